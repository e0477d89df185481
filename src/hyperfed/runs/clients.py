"""What a run says of each client by its name: a table, and a figure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hyperfed.errors import UserError
from hyperfed.metrics import ACCURACY, Metric
from hyperfed.runs.drawing import COLOURS, chosen_round, finish, new_figure
from hyperfed.runs.records import Evaluation, deciding

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMED = 60
"""Clients to a figure whose names can still be read; the names of more are left out."""

SPLITS = (("val", "validation"), ("test", "test"))


def rows(found: Iterable[Evaluation], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields what evaluations say of each client, one row per client and split.

    Args:
        found: the evaluations, of which every split is told.
        names: of all clients by number; a client is called by its number where empty.
    """
    for e in found:
        of_each = {e.metric: e.main.client, "loss": e.client_loss}
        if e.metric == ACCURACY.name:
            of_each["masked_accuracy"] = e.client_masked_accuracy
        of_each |= {name: of.client for name, of in e.others.items()}
        for place, client in enumerate(e.clients):
            yield {
                "client": names[client] if names else str(client),
                "number": client,
                "split": e.split,
                "round": e.round,
                "examples": e.count[place],
                **{name: values[place] for name, values in of_each.items()},
            }


def at_best(evaluations: Sequence[Evaluation], best_round: int) -> list[Evaluation]:
    """Returns the evaluations of the best round, and that of novel clients where there is one."""
    known = [e for e in evaluations if e.split != "novel" and e.round == best_round]
    return known + [e for e in evaluations if e.split == "novel"][-1:]


def draw(
    evaluations: Sequence[Evaluation], best_round: int, names: Sequence[str], title: str
) -> "Figure":
    """Draws the metric over rounds, and that of each client, by name, at the best round.

    Raises:
        UserError: nothing has been evaluated.
    """
    told = {e.split: list(rows([e], names)) for e in at_best(evaluations, best_round)}
    if "test" not in told:
        raise UserError("a run to plot must have come to its first evaluation; train it")
    people = [*told["test"], *told.get("novel", ())]
    named = len(people) <= MOST_NAMED
    figure = new_figure(10, max(4.0, 0.2 * len(people)) if named else 6)
    left, right = figure.subplots(1, 2)
    metric = evaluations[0].judged_by
    _over_rounds(left, evaluations, best_round, metric)
    _of_clients(right, told, metric, named=named)
    figure.suptitle(title, fontsize="medium")
    return figure


def _over_rounds(
    axes: "Axes", evaluations: Sequence[Evaluation], best_round: int, metric: Metric
) -> None:
    from matplotlib.ticker import MaxNLocator

    for (split, label), colour in zip(SPLITS, COLOURS, strict=False):
        measured = [(e.round, e.main.value) for e in evaluations if e.split == split]
        points = [(number, metric.scale * v) for number, v in measured if v is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
    by = deciding(evaluations)
    validated = any(e.split == by and e.main.value is not None for e in evaluations)
    called = chosen_round([validated])
    axes.axvline(best_round, color="0.6", linewidth=1, zorder=1, label=called)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(frameon=False)
    finish(axes, "round", metric.axis("{}"))


def _of_clients(
    axes: "Axes", told: Mapping[str, list[dict[str, Any]]], metric: Metric, *, named: bool
) -> None:
    """Draws a point for each client, the best at the top, known and novel ones apart."""
    groups = (("test", "trained together", COLOURS[0]), ("novel", "joined afterwards", COLOURS[1]))
    everybody = [(row, split) for split, _, _ in groups for row in told.get(split, ())]
    measured = [(row, split) for row, split in everybody if row[metric.name] is not None]
    ordered = sorted(measured, key=lambda pair: metric.order(pair[0][metric.name]))
    for split, label, colour in groups:
        places = [place for place, (_, of) in enumerate(ordered) if of == split]
        values = [metric.scale * ordered[place][0][metric.name] for place in places]
        if places:
            axes.scatter(values, places, s=24, color=colour, label=label, zorder=2)
    labels = [row["client"] for row, _ in ordered] if named else []
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.legend(frameon=False, loc="lower right")
    up = "client" if named else f"{len(ordered)} clients, the best at the top"
    finish(axes, metric.axis("test {} at the best round"), up)

"""Two runs client by client: a table, and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hyperfed.analysis import statistics
from hyperfed.analysis.comparison import (
    Row,
    choices,
    compare,
    difference,
    grouped,
    metric_of,
    most_alike,
    new_table,
)
from hyperfed.analysis.statistics import Difference, Scores
from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.drawing import COLOURS, MARKERS, finish, new_figure, save
from hyperfed.runs.measures import Number
from hyperfed.runs.records import FinishedRun
from hyperfed.runs.remarks import percent


@dataclass(frozen=True)
class Paired:
    """A run, or its seeds together, against others, on the clients and the data that both have.

    Attributes:
        label: the run's, or that of its seeds.
        metric: by which both are judged.
        seeds: of how many seeds there are runs.
        best: the label of the run that does best on these test data, of one method's settings on
            validation data (:func:`hyperfed.analysis.statistics.best`); None where no other saw
            any.
        to_best: what clients gain over that one; None for itself.
        novel_to_best: what clients that joined afterwards gain over it; None where there are none.
        over_local: what they gain over training alone; None where no run of ``local`` saw the same.
        locals: the labels of those that did, first the one that this gain is over: that whose
            settings are most like the run's.
    """

    label: str
    metric: Metric
    seeds: int
    best: str | None
    to_best: Difference | None
    novel_to_best: Difference | None
    over_local: Difference | None
    locals: Sequence[str]

    @property
    def by_name(self) -> dict[str, Any]:
        """The same as plain values."""
        names = "to_best", "novel_to_best", "over_local"
        told = {
            name: (found := getattr(self, name)) and asdict(found) | {"mark": found.mark}
            for name in names
        }
        local = next(iter(self.locals), None)
        return {"label": self.label, "best": self.best, **told, "local": local}


@dataclass(frozen=True)
class _Side:
    """A run, or those of several seeds, to be set against others.

    Attributes:
        method: of whose settings one is chosen by validation data.
        vals: that number over all validation examples, by data set.
        means: the same of test examples.
    """

    label: str
    method: str
    metric: Metric
    first: FinishedRun
    vals: Mapping[tuple[int, str, str], float]
    means: Mapping[tuple[int, str, str], float]
    scores: Sequence[Scores]
    novel: Sequence[Scores]

    @property
    def is_local(self) -> bool:
        """Whether its clients train alone."""
        return (self.first.summary or {}).get("method") == "local"


def pair(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Paired]:
    """Compares each run, client by client, to the best one on its data and to ``local``.

    The best is that with the best test metric, of one method's settings the best by validation
    data: which of many has the best test metric is luck, too.

    Args:
        runs: finished.
        rows: of :func:`hyperfed.analysis.comparison.compare`, one for each.
    """
    each = [(row.label, [place]) for place, row in enumerate(rows)]
    return _pair(_sides(runs, rows, each))


def pair_groups(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Paired]:
    """Does the same with all seeds of each run together, on the seeds that both have."""
    return _pair(_sides(runs, rows, grouped(rows)))


def pair_labelled(labelled: Mapping[str, Sequence[FinishedRun]], metric: Metric) -> list[Paired]:
    """Does the same with runs by what they are called, several seeds of each.

    Each name is a method of its own, so that the best is that by test data alone.
    """
    name = f"test_{metric.name}"
    sides = []
    for label, runs in labelled.items():
        tests = [(run.summary or {}).get(name) for run in runs]
        sides.append(_side(label, label, metric, runs, vals=[None] * len(runs), tests=tests))
    return _pair(sides)


def _sides(
    runs: Sequence[FinishedRun], rows: Sequence[Row], named: Sequence[tuple[str, Sequence[int]]]
) -> list[_Side]:
    """Returns a side for each (label, which of the runs)."""
    vals = [value for _, value in choices(rows)]
    return [
        _side(
            label,
            rows[own[0]].method,
            rows[own[0]].metric,
            [runs[at] for at in own],
            vals=[vals[at] for at in own],
            tests=[rows[at].test for at in own],
        )
        for label, own in named
    ]


def _side(
    label: str,
    method: str,
    metric: Metric,
    runs: Sequence[FinishedRun],
    *,
    vals: Sequence[Number],
    tests: Sequence[Number],
) -> _Side:
    scores = [statistics.scores(run) for run in runs]
    of_vals, of_tests = (
        statistics.by_seed(zip((own.of for own in scores), values, strict=True))
        for values in (vals, tests)
    )
    novel = [statistics.scores(run, "novel") for run in runs]
    return _Side(label, method, metric, runs[0], of_vals, of_tests, scores, novel)


def _pair(sides: Sequence[_Side]) -> list[Paired]:
    seeds = [{own.of for own in side.scores} for side in sides]
    bests: dict[tuple[int, ...], int | None] = {}  # of all that are set against the same ones
    found = []
    for one, own in zip(sides, seeds, strict=True):
        same = tuple(place for place, of in enumerate(seeds) if of & own)
        if same not in bests:
            bests[same] = _best(sides, same)
        best = None if (at := bests[same]) is None else sides[at]
        alone = [] if one.is_local else [sides[at] for at in same if sides[at].is_local]
        alone = [alone[at] for at in most_alike(one.first, [other.first for other in alone])]
        other = None if best is one else best
        found.append(
            Paired(
                one.label,
                one.metric,
                len({run.seed for run in one.scores}),
                best.label if best else None,
                statistics.difference(one.scores, other.scores) if other else None,
                statistics.difference(one.novel, other.novel) if other else None,
                statistics.difference(one.scores, alone[0].scores) if alone else None,
                [side.label for side in alone],
            )
        )
    return found


def _best(sides: Sequence[_Side], places: Sequence[int]) -> int | None:
    """Returns the place of the best by test data of those that are the best of their method.

    That is by validation data; where one of them has none, all of its method are compared. None
    where no two have data in common.
    """
    choices: dict[str, list[int]] = {}
    for place in places:
        choices.setdefault(sides[place].method, []).append(place)
    metric, chosen = sides[places[0]].metric, []
    for own in choices.values():
        vals = [sides[place].vals for place in own]
        at = statistics.best(vals, metric) if all(vals) else None
        chosen += own if at is None else [own[at]]
    if len(chosen) == 1 < len(places):
        return chosen[0]
    at = statistics.best([sides[place].means for place in chosen], metric)
    return None if at is None else chosen[at]


def tables(pairs: Sequence[Paired]) -> list[Table]:
    """Returns the paired comparison for a console, a table for each metric with what it tells."""
    judged: dict[str, list[Paired]] = {}
    for one in pairs:
        judged.setdefault(one.metric.name, []).append(one)
    return [_table(own) for own in judged.values()]


def told_of_local(pairs: Sequence[Paired]) -> list[str]:
    """Returns over which runs of ``local`` gains are, where there were several; a line for each."""
    over: dict[str, list[str]] = {}
    for one in pairs:
        if len(one.locals) > 1:
            over.setdefault(one.locals[0], []).append(one.label)
    return [f"gains over local are over {it} of {', '.join(own)}" for it, own in over.items()]


def told_of(metric: Metric) -> str:
    """Returns what a paired comparison by a metric is, in a line."""
    what = f"points of a client's test {metric.label}"
    if not metric.percents:
        change = "lower" if metric.less_is_better else "higher"
        what = f"by how much a client's test {metric.label} is {change} (+ is better)"
    here = "here where it is in that over seeds or these have one division"
    noise = f"noise where 0 is in or seeds disagree, {here}"
    best = "the best is by test data, among settings of a method by validation data"
    return f"{what}; 95 % intervals over clients, {noise}; {best}"


def _table(pairs: Sequence[Paired]) -> Table:
    metric = pairs[0].metric
    gain = "points" if metric.percents else f"{metric.label} gain"
    joined = any(one.novel_to_best is not None for one in pairs)
    shown = new_table(
        f"{gain} to\nthe best",
        *(["of who joined\nafterwards"] if joined else []),
        f"{gain}\nover local",
        "clients that\ngain over it %",
    )
    for one in pairs:
        local, best = one.over_local, one.label == one.best
        shown.add_row(
            one.label,
            "best" if best else difference(one.to_best, metric, one.seeds),
            *([difference(one.novel_to_best, metric, one.seeds)] if joined else []),
            difference(local, metric, one.seeds),
            "–" if local is None else percent(local.gaining),
        )
    return shown


def draw(usual: FinishedRun, better: FinishedRun, path: Path) -> None:
    """Draws each client's test metric under one method against that under another.

    Known and novel clients are told apart by colour and marker. Clients with few test examples
    share a place; points are moved aside a little, by the same for a client in every figure.

    Args:
        usual: along the horizontal axis.
        better: along the vertical one; clients above the diagonal are better served by it, of an
            error those below.
        path: the figure; its ending says the format (.png, .pdf, .svg).

    Raises:
        UserError: a run is not done or saw other data, or the figure cannot be written.
    """
    across, up = compare([usual, better])
    if across.data_fingerprint != up.data_fingerprint:
        raise UserError(
            "two methods must have seen the same data to be set against each other, but these "
            "have not; train both on one task with one seed"
        )
    figure = new_figure(5.4, 5)
    axes = figure.subplots()
    metric = metric_of([across, up])
    groups = ("test", "trained together"), ("novel", "joined afterwards")
    found = [
        [statistics.scores(run, split).shown for run in (usual, better)] for split, _ in groups
    ]
    low, high = (0.0, 100.0) if metric.percents else _ends(found)
    axes.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=1)
    for index, ((_, label), (there, here)) in enumerate(zip(groups, found, strict=True)):
        both = [client for client in there if client in here]
        if not both:
            continue
        # Of shares of a few examples many are the same; other numbers are not.
        reach = 1.2 if metric.percents else 0.0
        aside = {c: np.random.default_rng(c).uniform(-reach, reach, size=2) for c in both}
        axes.scatter(
            [there[client] + aside[client][0] for client in both],
            [here[client] + aside[client][1] for client in both],
            s=34,
            color=COLOURS[index],
            marker=MARKERS[2 * index],
            alpha=0.75,
            linewidths=0,
            label=f"{label} ({len(both)} clients)",
            zorder=2 + index,
        )
    margin = 0.03 * (high - low)
    ends = (low - margin, high + margin)
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    of_one = metric.axis(f"test {{}} under {across.label}")
    finish(axes, of_one, metric.axis(f"test {{}} under {up.label}"))
    figure.legend(frameon=False, loc="outside upper center", ncols=2)  # points may be anywhere
    save(figure, path)


def _ends(found: Sequence[Sequence[Mapping[int, float]]]) -> tuple[float, float]:
    """Returns the least and the most of all values, apart from each other."""
    values = [value for pair in found for clients in pair for value in clients.values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)

"""Finished runs side by side: a table, and two methods client by client."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from rich.table import Table

from hyperfed.errors import UserError
from hyperfed.runs import statistics
from hyperfed.runs.config import RunConfig, flat, to_dict
from hyperfed.runs.records import Evaluation, Number
from hyperfed.runs.statistics import Difference
from hyperfed.system.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which people with any colour vision can tell apart; yellow left out."""

DASHES = ("-", "--", ":", "-.")
"""Told apart where colours are used up or not printed."""

MOST_NAMED = 3
"""Settings by which a run is told from others, at most."""

CHANGE_NO_NUMBER = ("engine.", "device", "checkpoint_every", "preset", "task.data_dir", "track")
"""How the keys begin that a run is not told from others by."""

PERSONAL = 0.01
"""By which part of the accuracy a client's own model must be better than another client's."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class FinishedRun(Protocol):
    """What a report needs: a :class:`hyperfed.runs.run.Run` that is done, or its record on disk."""

    @property
    def config(self) -> RunConfig | Mapping[str, Any]:
        """All settings; of a record, nested as in its file."""

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """In the order of the run."""

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The final numbers."""


@dataclass(frozen=True)
class Row:
    """A run in the comparison; accuracies from 0 to 1, at the best validation round.

    Attributes:
        label: the method, with settings or a number where that is needed to tell runs apart.
        method: its name.
        seed: of the run.
        rounds: server iterations.
        best_round: the one with the best validation accuracy.
        test_accuracy: mean over examples.
        test_accuracy_client_mean: mean over clients.
        test_accuracy_client_std: population standard deviation over clients.
        worst_decile_accuracy: mean over the worst tenth of the clients.
        novel_accuracy: of clients that joined after training; None where there are none.
        bytes_down: sent to clients.
        bytes_up: sent by clients.
        seconds: of the run.
        data_fingerprint: a hash of the data and of who holds what.
        total_variation: the mean between the labels of two known clients, from 0 to 1; None where
            labels are not known here, and in records of before it was measured.
    """

    label: str
    method: str
    seed: int
    rounds: int
    best_round: int
    test_accuracy: Number
    test_accuracy_client_mean: Number
    test_accuracy_client_std: Number
    worst_decile_accuracy: Number
    novel_accuracy: Number
    bytes_down: int
    bytes_up: int
    seconds: float
    data_fingerprint: str
    total_variation: Number = None


def comparison(runs: Sequence[FinishedRun]) -> list[Row]:
    """Returns a row for each run, in their order.

    Rows can be compared where their ``data_fingerprint`` is the same.

    Raises:
        UserError: a run is not done, or its summary lacks a number.
    """
    numbers = [_numbers(run) for run in runs]
    return [Row(label=label, **row) for label, row in zip(_labels(runs), numbers, strict=True)]


def table(rows: Sequence[Row]) -> Table:
    """Returns the comparison for a :class:`rich.console.Console` to print.

    Above it stands how far apart clients are by their labels, where that is the same for all rows.
    """
    # Two-line headers and narrow gaps: it is to fit into 80 columns.
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    shown.title_justify, shown.title_style = "left", ""
    shown.add_column("\nmethod")
    for column in (
        "\nrounds",
        "best\nround",
        "test\n%",
        "per client\n%",
        "worst\ndecile %",
        "novel\n%",
        "MB\ndown",
        "MB\nup",
        "\nseconds",
    ):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            row.label,
            str(row.rounds),
            str(row.best_round),
            percent(row.test_accuracy),
            mean_and_std(row.test_accuracy_client_mean, row.test_accuracy_client_std),
            percent(row.worst_decile_accuracy),
            percent(row.novel_accuracy),
            megabytes(row.bytes_down),
            megabytes(row.bytes_up),
            f"{row.seconds:.1f}",
        )
    apart = {row.total_variation for row in rows}
    if len(apart) == 1 and (variation := apart.pop()) is not None:
        shown.title = f"total variation between the labels of two clients: {variation:.2f}"
    return shown


@dataclass(frozen=True)
class Paired:
    """A run against others, on the clients and the data that both have.

    Attributes:
        label: the run's.
        best: the label of the run with the best test accuracy on these data.
        to_best: what clients gain over that one; None for itself.
        over_local: what they gain over training alone; None where no run of ``local`` saw the same.
    """

    label: str
    best: str
    to_best: Difference | None
    over_local: Difference | None


def paired(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Paired]:
    """Compares each run, client by client, to the best one on its data and to ``local``.

    Args:
        runs: finished.
        rows: of :func:`comparison`, one for each.
    """
    scores = [statistics.scores(run) for run in runs]
    found = []
    for row, own in zip(rows, scores, strict=True):
        same = [
            (other, theirs)
            for other, theirs in zip(rows, scores, strict=True)
            if (theirs.seed, theirs.data) == (own.seed, own.data)
        ]
        best, of_best = max(same, key=lambda pair: pair[0].test_accuracy or 0.0)
        alone = [theirs for other, theirs in same if other.method == "local"][:1]
        found.append(
            Paired(
                row.label,
                best.label,
                None if best is row else statistics.difference([own], [of_best]),
                None if row.method == "local" else statistics.difference([own], alone),
            )
        )
    return found


def paired_table(pairs: Sequence[Paired]) -> Table:
    """Returns the paired comparison for a :class:`rich.console.Console` to print."""
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in (
        "\nmethod",
        "points to\nthe best",
        "points\nover local",
        "clients that\ngain over it %",
    ):
        shown.add_column(column, justify="left" if "method" in column else "right")
    for pair in pairs:
        local = pair.over_local
        shown.add_row(
            pair.label,
            "best" if pair.label == pair.best else difference(pair.to_best),
            difference(local),
            "–" if local is None else percent(local.gaining),
        )
    return shown


def draw_against(usual: FinishedRun, better: FinishedRun, path: Path) -> None:
    """Draws each client's test accuracy under one method against that under another.

    Known and novel clients are told apart by colour and marker. Clients with few test examples
    share a place; points are moved aside a little, by the same for a client in every figure.

    Args:
        usual: along the horizontal axis.
        better: along the vertical one; clients above the diagonal are better served by it.
        path: the figure; its ending says the format (.png, .pdf, .svg).

    Raises:
        UserError: a run is not done or saw other data, or the figure cannot be written.
    """
    across, up = comparison([usual, better])
    if across.data_fingerprint != up.data_fingerprint:
        raise UserError(
            "two methods must have seen the same data to be set against each other, but these "
            "have not; train both on one task with one seed"
        )
    figure = new_figure(5.4, 5)
    check_ending(figure, path)
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color="0.6", linewidth=1, zorder=1)
    groups = ("test", "trained together"), ("novel", "joined afterwards")
    for index, (split, label) in enumerate(groups):
        there, here = (_of_clients(run, row, split) for run, row in ((usual, across), (better, up)))
        both = [client for client in there if client in here]
        if not both:
            continue
        aside = {c: np.random.default_rng(c).uniform(-1.2, 1.2, size=2) for c in both}
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
    axes.set(xlim=(-3, 103), ylim=(-3, 103), aspect="equal")
    axes.set_xlabel(f"test accuracy under {across.label} (%)")
    axes.set_ylabel(f"test accuracy under {up.label} (%)")
    figure.legend(frameon=False, loc="outside upper center", ncols=2)  # points may be anywhere
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    save(figure, path)


def _of_clients(run: FinishedRun, row: Row, split: str) -> dict[int, float]:
    """Returns {client: accuracy in per cent} at the best validation round; novel ones' at last."""
    found: dict[int, float] = {}
    for e in run.evaluations:
        if e.split == split and (split == "novel" or e.round == row.best_round):
            pairs = zip(e.clients, e.client_accuracy, strict=True)
            found = {client: 100 * value for client, value in pairs if value is not None}
    return found


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of so many inches."""
    # Not pyplot, which would keep every figure in memory and ask for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def check_ending(figure: "Figure", path: Path) -> None:
    """Raises ``UserError`` where a file's name ends in no format of figures."""
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise UserError(
            f"the figure's file must end in one of {', '.join(sorted(formats))}, came {path}"
        )


def save(figure: "Figure", path: Path) -> None:
    """Writes a figure whole or not at all."""
    ending = path.suffix.removeprefix(".")
    atomic_write(path, lambda file: figure.savefig(file, format=ending, dpi=200))


def _numbers(run: FinishedRun) -> dict[str, Any]:
    """Returns the fields of a row but its label."""
    if not run.summary:
        raise UserError("a run to compare must be done, but one has no summary; resume it first")
    names = [field.name for field in fields(Row) if field.name != "label"]
    missing = [name for name in names if name not in run.summary and name != "total_variation"]
    if missing:
        raise UserError(
            f"a run's summary must have {', '.join(names)}, but one lacks {', '.join(missing)}; "
            "run it again with this version of hyperfed"
        )
    return {name: run.summary.get(name) for name in names}


def _labels(runs: Sequence[FinishedRun]) -> list[str]:
    """Names runs by method, several of one by the settings that differ, and else by number."""
    settings = [settings_of(run) for run in runs]
    methods = [own["method.name"] for own in settings]
    labels = []
    for method, own in zip(methods, settings, strict=True):
        others = [it for name, it in zip(methods, settings, strict=True) if name == method]
        # A record of an earlier version may lack a key, which says nothing of its value.
        told = [key for key in own if any(it.get(key, own[key]) != own[key] for it in others)]
        named = [f"{key.removeprefix('method.')}={own[key]}" for key in told[:MOST_NAMED]]
        labels.append(" ".join([method, *named]))
    total, seen = Counter(labels), Counter[str]()
    for index, label in enumerate(labels):
        seen[label] += 1
        if total[label] > 1:
            labels[index] = f"{label} ({seen[label]})"
    return labels


def settings_of(run: FinishedRun) -> dict[str, Any]:
    """Returns {dotted key: value} of a run's settings, but for those that change no number."""
    nested = run.config if isinstance(run.config, Mapping) else to_dict(run.config)
    settings = flat(nested)
    return {key: settings[key] for key in settings if not key.startswith(CHANGE_NO_NUMBER)}


def remark(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence where numbers lack clients or models are not personal; None elsewhere.

    They are not where the model that is made for another client does as well on a client's data
    (``others_accuracy``, None where a method makes no such models).
    """
    if (missing := _without(summary)) is not None:
        return missing
    own, others = summary.get("test_accuracy"), summary.get("others_accuracy")
    if own is None or others is None or own - others >= PERSONAL * max(abs(own), abs(others)):
        return None
    return (
        f"nothing is personal: on a client's own test data its model is {percent(own)} % right and "
        f"that of another client {percent(others)} %; clients may not differ, or more rounds or a "
        "larger method.lr are needed"
    )


def _without(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence where clients are missing in the numbers."""
    for split, key in (("test", "evaluated"), ("novel", "novel_evaluated")):
        evaluated, _, clients = (summary.get(key) or "").partition(" of ")
        if evaluated != clients:
            return (
                f"evaluated {evaluated} of {clients} clients: the {split} numbers are without the "
                "others, which metrics.jsonl names"
            )
    return None


def percent(fraction: Number) -> str:
    """Returns a fraction in per cent, without the sign, or a dash where there is none."""
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def mean_and_std(mean: Number, std: Number) -> str:
    """Returns mean ± standard deviation of fractions in per cent, or a dash."""
    return "–" if mean is None or std is None else f"{percent(mean)} ± {percent(std)}"


def difference(found: Difference | None) -> str:
    """Returns a difference of accuracies in points, with its interval, or a dash."""
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.1f}, one client"
    told = f"{100 * found.mean:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
    return f"{told} noise" if found.within_noise else told


def megabytes(count: float) -> str:
    """Returns bytes in MB (1e6)."""
    return f"{count / 1e6:.1f}"

"""Two runs client by client: a table, and a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs import statistics
from hyperfed.runs.comparison import (
    FinishedRun,
    Row,
    compare,
    difference,
    grouped,
    metric_of,
    percent,
)
from hyperfed.runs.drawing import COLOURS, MARKERS, check_ending, new_figure, save
from hyperfed.runs.measures import Number
from hyperfed.runs.statistics import Difference, Scores


@dataclass(frozen=True)
class Paired:
    """A run, or its seeds together, against others, on the clients and the data that both have.

    Attributes:
        label: the run's, or that of its seeds.
        metric: by which both are judged.
        best: the label of the run that does best on these test data.
        to_best: what clients gain over that one; None for itself.
        novel_to_best: what clients that joined afterwards gain over it; None where there are none.
        over_local: what they gain over training alone; None where no run of ``local`` saw the same.
    """

    label: str
    metric: Metric
    best: str
    to_best: Difference | None
    novel_to_best: Difference | None
    over_local: Difference | None

    @property
    def by_name(self) -> dict[str, Any]:
        """The same as plain values."""
        names = "to_best", "novel_to_best", "over_local"
        told = {
            name: (found := getattr(self, name)) and asdict(found) | {"mark": found.mark}
            for name in names
        }
        return {"label": self.label, "best": self.best, **told}


@dataclass(frozen=True)
class _Side:
    """A run, or those of several seeds, to be set against others."""

    label: str
    method: str
    metric: Metric
    test: Number
    scores: Sequence[Scores]
    novel: Sequence[Scores]

    @property
    def of(self) -> frozenset[tuple[int, str, str]]:
        """What both sides must have in common."""
        return frozenset(own.of for own in self.scores)


def pair(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Paired]:
    """Compares each run, client by client, to the best one on its data and to ``local``.

    Args:
        runs: finished.
        rows: of :func:`hyperfed.runs.comparison.compare`, one for each.
    """
    return _pair([_side([run], [row], row.label) for run, row in zip(runs, rows, strict=True)])


def pair_groups(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> list[Paired]:
    """Does the same with all seeds of each run together: those that have seeds and data alike."""
    return _pair(
        [
            _side([runs[number] for number in own], [rows[number] for number in own], group)
            for group, own in grouped(rows)
        ]
    )


def _side(runs: Sequence[FinishedRun], rows: Sequence[Row], label: str) -> _Side:
    tested = [row.test for row in rows if row.test is not None]
    return _Side(
        label,
        rows[0].method,
        rows[0].metric,
        fmean(tested) if len(tested) == len(rows) else None,
        [statistics.scores(run) for run in runs],
        [statistics.scores(run, "novel") for run in runs],
    )


def _pair(sides: Sequence[_Side]) -> list[Paired]:
    found = []
    for one in sides:
        same = [other for other in sides if other.of == one.of]
        best = max(same, key=lambda other: other.metric.order(other.test))
        alone = next((other.scores for other in same if other.method == "local"), [])
        found.append(
            Paired(
                one.label,
                one.metric,
                best.label,
                None if best is one else statistics.difference(one.scores, best.scores),
                None if best is one else statistics.difference(one.novel, best.novel),
                None if one.method == "local" else statistics.difference(one.scores, alone),
            )
        )
    return found


def tables(pairs: Sequence[Paired]) -> list[Table]:
    """Returns the paired comparison for a console, a table for each metric with what it tells."""
    judged: dict[str, list[Paired]] = {}
    for one in pairs:
        judged.setdefault(one.metric.name, []).append(one)
    return [_table(own) for own in judged.values()]


def told_of(metric: Metric) -> str:
    """Returns what a paired comparison by a metric is, in a line."""
    what = f"points of a client's test {metric.label}"
    if not metric.percents:
        change = "lower" if metric.less_is_better else "higher"
        what = f"by how much a client's test {metric.label} is {change} (+ is better)"
    told = "95 % intervals over clients, noise where 0 is in, here where it is in that over seeds"
    return f"{what}; {told}"


def _table(pairs: Sequence[Paired]) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    metric = pairs[0].metric
    gain = "points" if metric.percents else f"{metric.label} gain"
    joined = any(one.novel_to_best is not None for one in pairs)
    for column in (
        "\nmethod",
        f"{gain} to\nthe best",
        *(["of who joined\nafterwards"] if joined else []),
        f"{gain}\nover local",
        "clients that\ngain over it %",
    ):
        shown.add_column(column, justify="left" if "method" in column else "right")
    for one in pairs:
        local, best = one.over_local, one.label == one.best
        shown.add_row(
            one.label,
            "best" if best else difference(one.to_best, metric),
            *([difference(one.novel_to_best, metric)] if joined else []),
            difference(local, metric),
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
    check_ending(figure, path)
    axes = figure.subplots()
    metric = metric_of([across, up])
    groups = ("test", "trained together"), ("novel", "joined afterwards")
    found = [
        [_of_clients(run, row, split) for run, row in ((usual, across), (better, up))]
        for split, _ in groups
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
    axes.set_xlabel(metric.axis(f"test {{}} under {across.label}"))
    axes.set_ylabel(metric.axis(f"test {{}} under {up.label}"))
    figure.legend(frameon=False, loc="outside upper center", ncols=2)  # points may be anywhere
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    save(figure, path)


def _of_clients(run: FinishedRun, row: Row, split: str) -> dict[int, float]:
    """Returns {client: metric as shown} at the best validation round; novel ones' at last."""
    found: dict[int, float] = {}
    for e in run.evaluations:
        if e.split == split and (split == "novel" or e.round == row.best_round):
            pairs = zip(e.clients, e.main.client, strict=True)
            scale = row.metric.scale
            found = {client: scale * value for client, value in pairs if value is not None}
    return found


def _ends(found: Sequence[Sequence[Mapping[int, float]]]) -> tuple[float, float]:
    """Returns the least and the most of all values, apart from each other."""
    values = [value for pair in found for clients in pair for value in clients.values()]
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if low < high else (low - 0.5, high + 0.5)

"""Figures of finished runs: a metric along rounds, visits, bytes or seconds, and every client's."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hyperfed.analysis.budgets import AXES, axis_of
from hyperfed.analysis.comparison import Row, compare, metric_of
from hyperfed.analysis.statistics import scores
from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.drawing import COLOURS, look, new_figure, save
from hyperfed.runs.records import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 8
"""Runs that one pair of axes shows; each of more has axes of its own."""

ACROSS = 6
"""Axes side by side."""

OF_A_CLIENT = "test {} of a client"
"""What an axis of clients' values is called; the metric stands in the brackets."""


def curve(run: FinishedRun, row: Row, axis: str) -> list[tuple[float, float]]:
    """Returns (place on the axis, test metric as shown) of each evaluation of known clients.

    Raises:
        UserError: no such axis, or a run without test examples.
    """
    _, along = axis_of(axis)
    found = [
        (float(along(run, e)), row.metric.scale * e.main.value)
        for e in run.evaluations
        if e.split == "test" and e.main.value is not None
    ]
    if not found:
        raise UserError(f"a run to draw must have test examples, but {row.label} has none")
    return found


def draw_accuracy(runs: Sequence[FinishedRun], path: Path, axis: str = "rounds") -> None:
    """Draws the test metric along an axis, and that of each client at the best validation round.

    More than ``TOGETHER`` runs have axes of their own, before the others in grey, the best first.

    Args:
        runs: at least one, each with an evaluation on test examples.
        path: the figure; its ending says the format (.png, .pdf, .svg).
        axis: a key of ``AXES``.

    Raises:
        UserError: a run is not done or has no test examples, several metrics, no such axis, or the
            figure cannot be written.
    """
    rows = compare(runs)
    drawn = [
        _Drawn(run, row, curve(run, row, axis), [*scores(run).shown.values()])
        for run, row in zip(runs, rows, strict=True)
    ]
    draw = _together if len(runs) <= TOGETHER else _apart
    figure = draw(drawn, metric_of(rows), axis)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    save(figure, path)


class _Drawn(NamedTuple):
    """A run, its curve, and what each of its clients came to."""

    run: FinishedRun
    row: Row
    points: Sequence[tuple[float, float]]
    clients: Sequence[float]


def _together(drawn: Sequence[_Drawn], metric: Metric, axis: str) -> "Figure":
    """Draws all curves into one pair of axes, and a box and a point for each client beside it."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    for index, one in enumerate(drawn):
        _line(left, index, one)
        _box(right, index, one.clients)
    left.set_title("All clients; marked: best validation round", fontsize="medium")
    _name_horizontal(left, axis)
    left.set_ylabel(metric.axis())
    left.legend(frameon=False)
    labels = [one.row.label for one in drawn]
    crowded = sum(map(len, labels)) > 60
    right.set_xticks(
        range(len(labels)),
        labels,
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    right.set_title("Each client, at the best validation round", fontsize="medium")
    right.set_xlabel("method")
    right.set_ylabel(metric.axis(OF_A_CLIENT))
    right.tick_params(labelleft=True)  # shared axes hide them
    for axes in (left, right):
        axes.grid(axis="y", color="0.9")
    return figure


def _apart(drawn: Sequence[_Drawn], metric: Metric, axis: str) -> "Figure":
    """Draws each run into axes of its own, and below them a line of clients for each."""
    ordered = sorted(drawn, key=lambda one: metric.order(one.row.test), reverse=True)
    down = -(-len(drawn) // ACROSS)
    heights = [1.7 * down + 0.6, 0.24 * len(drawn) + 0.9]
    figure = new_figure(12, sum(heights))
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
    panels = above.subplots(down, ACROSS, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(panels.flat):
        if place >= len(ordered):
            axes.set_visible(False)
            continue
        here = ordered[place]
        for other in drawn:
            axes.plot(*zip(*other.points, strict=True), color="0.85", linewidth=0.6, zorder=1)
        _line(axes, 0, here)
        axes.set_title(f"{here.row.label}  {metric.told(here.row.test)}", fontsize=8)
        axes.tick_params(labelsize=7)
    above.supxlabel(AXES[axis][0], fontsize=9)
    above.supylabel(metric.axis(), fontsize=9)
    line = below.subplots()
    for place, one in enumerate(ordered):
        _dots(line, len(ordered) - 1 - place, one.clients)
    line.set_yticks(range(len(ordered)), [one.row.label for one in reversed(ordered)], fontsize=8)
    line.set_ylim(-0.7, len(ordered) - 0.3)
    line.set_xlabel(f"{metric.axis(OF_A_CLIENT)}, at the best validation round; bar: median")
    line.grid(axis="x", color="0.9")
    return figure


def _line(axes: "Axes", index: int, one: _Drawn) -> None:
    """Draws a curve, with a marker at the best validation round, if it was tested."""
    tested = [e for e in one.run.evaluations if e.split == "test" and e.main.value is not None]
    axes.plot(
        *zip(*one.points, strict=True),
        **look(index, "linestyle", "marker"),
        markevery=[place for place, e in enumerate(tested) if e.round == one.row.best_round],
        label=one.row.label,
        zorder=2,
    )


def _name_horizontal(axes: "Axes", axis: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(AXES[axis][0])
    if axis in ("rounds", "client-visits"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _box(axes: "Axes", index: int, values: Sequence[float]) -> None:
    """Draws a box and a point for each client."""
    own = look(index, "marker")
    axes.boxplot(
        values,
        positions=[index],
        widths=0.5,
        showfliers=False,  # every client has its point
        medianprops={"color": own["color"], "linewidth": 2},
    )
    aside = np.random.default_rng(index).uniform(-0.15, 0.15, len(values))
    axes.scatter(
        index + aside,
        values,
        s=14,
        **own,
        alpha=0.6,
        linewidths=0,
        zorder=3,
    )


def _dots(axes: "Axes", height: int, values: Sequence[float]) -> None:
    """Draws a line of points, one for each client, with a bar at the median."""
    aside = np.random.default_rng(height).uniform(-0.18, 0.18, len(values))
    axes.scatter(values, height + aside, s=9, color=COLOURS[0], alpha=0.5, linewidths=0, zorder=2)
    median = float(np.median(values)) if values else 0.0
    axes.plot([median] * 2, [height - 0.34, height + 0.34], color=COLOURS[1], linewidth=2, zorder=3)

"""Figures of finished runs: a metric along rounds, visits, bytes or seconds, and every client's."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hyperfed.analysis.budgets import AXES, axis_of
from hyperfed.analysis.comparison import Row, compare, grouped, metric_of
from hyperfed.analysis.seeds import spread_of
from hyperfed.analysis.statistics import by_seed, scores
from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.drawing import COLOURS, chosen_round, look, new_figure, save
from hyperfed.runs.measures import Number
from hyperfed.runs.records import FinishedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOGETHER = 8
"""Curves that one pair of axes shows; each of more has axes of its own."""

ACROSS = 6
"""Axes side by side."""

WIDTH, TITLE = 110, 34
"""Letters that go into a line of a legend, and of a title of one of many axes."""

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

    Runs that differ by their seeds alone are one curve, of their mean, with a band from the lowest
    seed to the highest. More than ``TOGETHER`` curves have axes of their own, before the others in
    grey, the best first.

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
        _of_seeds(name, [runs[number] for number in own], [rows[number] for number in own], axis)
        for name, own in grouped(rows)
    ]
    draw = _together if len(drawn) <= TOGETHER else _apart
    chosen = chosen_round(row.val is not None for row in rows)
    figure = draw(drawn, metric_of(rows), axis, chosen)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    save(figure, path)


class _Drawn(NamedTuple):
    """Runs that differ by their seeds alone, as they are drawn.

    Attributes:
        name: of the method, with settings where that is needed to tell it from others.
        seeds: how many there are.
        test: the mean over seeds of what they came to.
        curve: (place on the axis, mean, lowest and highest seed) of each evaluation.
        marked: which of these some run's best validation round is.
        clients: what each client of each run came to.
    """

    name: str
    seeds: int
    test: Number
    curve: Sequence[tuple[float, float, float, float]]
    marked: Sequence[int]
    clients: Sequence[float]


def _of_seeds(name: str, runs: Sequence[FinishedRun], rows: Sequence[Row], axis: str) -> _Drawn:
    seeds = [row.seed for row in rows]
    curves = [
        {
            int(r): point
            for (r, _), point in zip(curve(*one, "rounds"), curve(*one, axis), strict=True)
        }
        for one in zip(runs, rows, strict=True)
    ]
    shared = [r for r in curves[0] if all(r in other for other in curves)]
    drawn = []
    for r in shared:
        places, values = zip(*(points[r] for points in curves), strict=True)
        of_seeds = by_seed(zip(seeds, values, strict=True)).values()
        drawn.append((fmean(places), fmean(of_seeds), min(of_seeds), max(of_seeds)))
    best = {row.best_round for row in rows}
    test = spread_of(seeds, [row.test for row in rows])
    return _Drawn(
        name,
        len(set(seeds)),
        None if test is None else test.mean,
        drawn,
        [place for place, r in enumerate(shared) if r in best],
        [value for run in runs for value in scores(run).shown.values()],
    )


def _together(drawn: Sequence[_Drawn], metric: Metric, axis: str, chosen: str) -> "Figure":
    """Draws all curves into one pair of axes, and a box and a point for each client beside it."""
    names = [one.name for one in drawn]
    across = max(1, WIDTH // (6 + max(map(len, names))))  # 6 for its line
    figure = new_figure(10, 4 + 0.25 * -(-len(drawn) // across))
    left, right = figure.subplots(1, 2, sharey=True)
    for index, one in enumerate(drawn):
        _line(left, index, one)
        _box(right, index, one.clients)
    what = _over_seeds(drawn) or "All clients"
    left.set_title(f"{what}; marked: {chosen}", fontsize="medium")
    _name_horizontal(left, axis)
    left.set_ylabel(metric.axis())
    crowded = sum(map(len, names)) > 60  # the legend tells them by their colours and markers, too
    right.set_xticks(range(len(names)), [""] * len(names) if crowded else names)
    right.set_title(f"Each client, at the {chosen}", fontsize="medium")
    right.set_xlabel("method, as above" if crowded else "method")
    right.set_ylabel(metric.axis(OF_A_CLIENT))
    right.tick_params(labelleft=True)  # shared axes hide them
    for axes in (left, right):
        axes.grid(axis="y", color="0.9")
    figure.legend(frameon=False, loc="outside upper center", ncols=across)  # curves may be anywhere
    return figure


def _apart(drawn: Sequence[_Drawn], metric: Metric, axis: str, chosen: str) -> "Figure":
    """Draws each curve into axes of its own, and below them a line of clients for each."""
    ordered = sorted(drawn, key=lambda one: metric.order(one.test), reverse=True)
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
            places, means, *_ = zip(*other.curve, strict=True)
            axes.plot(places, means, color="0.85", linewidth=0.6, zorder=1)
        _line(axes, 0, here)
        axes.set_title(fill(f"{here.name}  {metric.told(here.test)}", TITLE), fontsize=8)
        axes.tick_params(labelsize=7)
    above.suptitle(_over_seeds(drawn), fontsize=9)
    above.supxlabel(AXES[axis][0], fontsize=9)
    above.supylabel(metric.axis(), fontsize=9)
    line = below.subplots()
    for place, one in enumerate(ordered):
        _dots(line, len(ordered) - 1 - place, one.clients)
    line.set_yticks(range(len(ordered)), [one.name for one in reversed(ordered)], fontsize=8)
    line.set_ylim(-0.7, len(ordered) - 0.3)
    line.set_xlabel(f"{metric.axis(OF_A_CLIENT)}, at the {chosen}; bar: median")
    line.grid(axis="x", color="0.9")
    return figure


def _over_seeds(drawn: Sequence[_Drawn]) -> str:
    """Returns what is said of curves; nothing where each is of one seed."""
    return "Mean and range over seeds" if max(one.seeds for one in drawn) > 1 else ""


def _line(axes: "Axes", index: int, one: _Drawn) -> None:
    """Draws a curve, with a marker at best validation rounds that were tested, and its band."""
    places, means, least, most = zip(*one.curve, strict=True)
    own = look(index, "linestyle", "marker")
    axes.plot(places, means, **own, markevery=one.marked, label=one.name, zorder=2)
    if one.seeds > 1:
        axes.fill_between(places, least, most, color=own["color"], alpha=0.15, linewidth=0)


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

"""Figures of a report, as SVG text that stands in a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from hyperfed.analysis.statistics import Spread
from hyperfed.runs.drawing import COLOURS, finish, look, new_figure, write
from hyperfed.runs.experiments import Published

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Series:
    """Points (x, y) in the order of x, under a name."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Dot:
    """A number of a cell over seeds, in %, beside the published one where there is one."""

    name: str
    measured: Spread
    published: Published | None


@dataclass(frozen=True)
class Place:
    """What a cell came to whose column or row is called by a number.

    Attributes:
        at: the number.
        measured: over seeds.
        published: beside it; None where nothing was.
    """

    at: float
    measured: Spread
    published: Published | None


def draw_cells(curves: Sequence[Series], dots: Sequence[Dot], label: str) -> str:
    """Draws the cells of a column: accuracy over what travels, and beside what was published.

    A curve that never travels is a level line at its last accuracy.

    Args:
        curves: of each cell, accuracy in % (y) over what has travelled, in MB (x).
        dots: of each cell.
        label: what the dots are.

    Returns:
        SVG.
    """
    figure = new_figure(10, max(3.2, 1.4 + 0.32 * len(dots)))
    left, right = figure.subplots(1, 2)
    for index, curve in enumerate(curves):
        if not curve.points:
            continue
        style = look(index, "linestyle")
        if curve.points[-1][0] == 0:
            left.axhline(curve.points[-1][1], label=curve.name, **style)
        else:
            left.plot(*zip(*curve.points, strict=True), label=curve.name, **style)
    left.legend(frameon=False, fontsize="x-small")
    finish(left, "MB travelled, both ways", "test accuracy of known clients (%)", "y")
    first = next((at for at, dot in enumerate(dots) if dot.published is not None), None)
    for index, dot in enumerate(dots):
        place = len(dots) - 1 - index
        if dot.published is not None:
            right.errorbar(
                dot.published.value, place + 0.15, xerr=dot.published.spread or 0.0, fmt="D",
                color="0.55", capsize=3, label="published" if index == first else None,
            )  # fmt: skip
        right.errorbar(
            dot.measured.mean, place - 0.15, xerr=dot.measured.std or 0.0, fmt="o",
            color=COLOURS[0], capsize=3, label="measured" if index == 0 else None,
        )  # fmt: skip
    right.set_yticks(range(len(dots)), [dot.name for dot in reversed(dots)], fontsize="small")
    right.set_ylim(-0.6, len(dots) - 0.4)
    right.legend(frameon=False, fontsize="x-small")
    finish(right, f"{label} (%)", "", "x")
    return to_svg(figure)


def draw_series(series: Sequence[Series], across: str, up: str) -> str:
    """Draws lines over a logarithmic axis.

    Returns:
        SVG.
    """
    figure = new_figure(6, 3.6)
    axes = figure.subplots()
    for index, one in enumerate(series):
        axes.plot(
            *zip(*one.points, strict=True),
            **look(index, "linestyle", "marker"),
            label=one.name,
        )
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize="small")
    finish(axes, across, up, "y")
    return to_svg(figure)


def draw_along(lines: Mapping[str, Sequence[Place]], across: str, up: str) -> str:
    """Draws what was measured along a number, and the published beside it, dashed and hollow.

    Numbers stand at equal distances: they may be 0, 0.0001 and 0.9.

    Args:
        lines: name -> its places.
        across: what the numbers are.
        up: what was measured, with its unit.

    Returns:
        SVG.
    """
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    ticks = sorted({place.at for places in lines.values() for place in places})
    for index, (name, found) in enumerate(lines.items()):
        places = sorted(found, key=lambda place: place.at)
        own = look(index, "marker")
        axes.errorbar(
            [ticks.index(place.at) for place in places],
            [place.measured.mean for place in places],
            yerr=[place.measured.std or 0.0 for place in places],
            capsize=3, label=name, **own,
        )  # fmt: skip
        told = [(ticks.index(p.at), p.published.value) for p in places if p.published is not None]
        if told:
            axes.plot(
                *zip(*told, strict=True), linestyle="--", markerfacecolor="none", alpha=0.6,
                label=f"{name}, published", **own,
            )  # fmt: skip
    axes.set_xticks(range(len(ticks)), [f"{tick:g}" for tick in ticks])
    axes.legend(frameon=False, fontsize="x-small")
    finish(axes, across, up, "y")
    return to_svg(figure)


def to_svg(figure: "Figure") -> str:
    """Returns a figure as SVG whose text is text, the same for the same numbers."""
    file = StringIO()
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        write(figure, file, "svg")
    whole = file.getvalue()
    return whole[whole.index("<svg") :]

"""Rows of a table that are tried with several values of some settings, side by side.

The point that is best by the table's first measure stands for its row beside other rows.
"""

from collections.abc import Mapping
from itertools import product

from hyperfed.papers import measured
from hyperfed.papers.measured import Cell, Measurement
from hyperfed.runs.experiments import Experiment
from hyperfed.runs.statistics import Spread

Found = Mapping[Cell, list[Measurement]]
"""Records by cell."""


def worse(found: Found, experiment: Experiment, column: str) -> set[str]:
    """Returns the rows of all grids but for the best point of each, in a column."""
    return {
        row
        for name, grid in experiment.grids.items()
        for row in grid.points.values()
        if row != best(found, experiment, column, name)
    }


def best(found: Found, experiment: Experiment, column: str, name: str) -> str | None:
    """Returns the row of a grid's best point, of those that count if any; None for none."""
    measure = next(iter(experiment.measures))
    reached = {
        row: (counts, mean.mean)
        for row in experiment.grids[name].points.values()
        if (point := _point(found, experiment, column, measure, row)) is not None
        for mean, counts in [point]
    }
    return max(reached, key=lambda row: reached[row], default=None)


def matrix(
    found: Found, experiment: Experiment, column: str, measure: str, name: str
) -> tuple[list[str], list[list[str]]]:
    """Returns what a grid's points came to, the last of its settings across.

    Returns:
        The header and the rows of a table, none where no point has a record.
    """
    grid = experiment.grids[name]
    *down, across = grid.values
    chosen = best(found, experiment, column, name)
    if chosen is None:
        return [], []
    rows = []
    for upper in product(*(grid.values[setting] for setting in down)):
        cells = [f"{value:g}" for value in upper]
        for value in grid.values[across]:
            row = grid.points[*upper, value]
            point = _point(found, experiment, column, measure, row)
            said = "–" if point is None else _shown(*point)
            cells.append(f"**{said}**" if row == chosen else said)
        rows.append(cells)
    return [*down, *(f"{across}={value:g}" for value in grid.values[across])], rows


def _point(
    found: Found, experiment: Experiment, column: str, measure: str, row: str
) -> tuple[Spread, bool] | None:
    """Returns what a point came to, and whether a verdict can rest on it; None without a record."""
    records = found.get((experiment.id, f"{column}-{row}"))
    if not records:
        return None
    group = measured.alike(records)[0]
    mean = measured.over_seeds(group, experiment.measures[measure].metric)
    return None if mean is None else (mean, group[0].counts)


def _shown(mean: Spread, counts: bool) -> str:
    spread = "" if mean.std is None else f" ± {mean.std:.1f}"
    return f"{mean.mean:.1f}{spread}{'' if counts else '*'}"

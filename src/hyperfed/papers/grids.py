"""Rows of a table that are tried with several values of some settings, side by side.

The point that is best by the table's first measure stands for its row beside other rows.
"""

from itertools import product

from hyperfed.papers import markdown, measured
from hyperfed.papers.measured import Found, Measurement
from hyperfed.runs.experiments import Experiment


def worse(found: Found, experiment: Experiment, column: str) -> set[str]:
    """Returns the rows of all grids but for the best point of each, in a column."""
    return {
        row
        for name, grid in experiment.grids.items()
        if (chosen := best(found, experiment, column, name)) is not None
        for row in grid.points.values()
        if row != chosen
    }


def best(found: Found, experiment: Experiment, column: str, name: str) -> str | None:
    """Returns the row of a grid's best point, by the seeds that points have in common.

    Of those that count, if any; None for none, and where no two have a seed in common.
    """
    metric = next(iter(experiment.measures.values())).metric
    groups = {
        row: (group, metric)
        for row in experiment.grids[name].points.values()
        if (group := _group(found, experiment, column, row))
        and measured.over_seeds(group, metric) is not None
    }
    place = measured.best(list(groups.values()))
    return None if place is None else list(groups)[place]


def matrix(
    found: Found, experiment: Experiment, column: str, measure: str, name: str
) -> tuple[list[str], list[list[str]]]:
    """Returns what a grid's points came to, the last of its settings across.

    Returns:
        The header and the rows of a table, none where no point has a record.
    """
    grid = experiment.grids[name]
    *down, across = grid.values
    if not any(found.get((experiment.id, f"{column}-{row}")) for row in grid.points.values()):
        return [], []
    chosen = best(found, experiment, column, name)
    rows = []
    for upper in product(*(grid.values[setting] for setting in down)):
        cells = [f"{value:g}" for value in upper]
        for value in grid.values[across]:
            row = grid.points[*upper, value]
            said = _point(found, experiment, column, measure, row)
            cells.append(f"**{said}**" if row == chosen else said)
        rows.append(cells)
    return [*down, *(f"{across}={value:g}" for value in grid.values[across])], rows


def _point(found: Found, experiment: Experiment, column: str, measure: str, row: str) -> str:
    """Returns what a point came to, with a star where no verdict can rest on it; else a dash."""
    group = _group(found, experiment, column, row)
    mean = measured.over_seeds(group, experiment.measures[measure].metric)
    return "–" if mean is None else markdown.spread(mean) + "*" * (not group[0].counts)


def _group(found: Found, experiment: Experiment, column: str, row: str) -> list[Measurement]:
    """Returns a point's records, of one setting; none where it has none."""
    return next(iter(measured.alike(found.get((experiment.id, f"{column}-{row}"), []))), [])

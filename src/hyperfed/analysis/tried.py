"""Values of settings that are tried, all with all, and which of them validation data prefer."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from statistics import fmean

from hyperfed.analysis.comparison import Row, choices
from hyperfed.errors import UserError
from hyperfed.runs import config, experiments
from hyperfed.runs.experiments import MOST_SEEDS

Point = tuple[str, ...]
"""``KEY=VALUE`` of each setting that is tried."""


def points(tried: Sequence[str], each: Sequence[Sequence[str]]) -> list[Point]:
    """Returns all points of a grid, the last key's values the fastest; one empty without any key.

    Args:
        tried: ``KEY=VALUE,VALUE,...``, each key once.
        each: the other settings, for each of the seeds that a point is trained with.

    Raises:
        UserError: lists all that is wrong.
    """
    grid: dict[str, list[str]] = {}
    problems: list[str] = []
    set_besides = {setting.partition("=")[0].strip() for settings in each for setting in settings}
    for given in tried:
        key, _, written = given.partition("=")
        key, values = key.strip(), list(dict.fromkeys(map(str.strip, written.split(","))))
        if len(values) < 2 or not all(values):
            problems.append(f"must be KEY=VALUE,VALUE with two values or more, came {given}")
        if key == "seed":
            problems.append(f"must be no seeds, which are written seed=0..2, came {given}")
        elif key in grid or key in set_besides:
            problems.append(f"must be said once of each key, came {key} twice; leave one out")
        grid[key] = [f"{key}={value}" for value in values]
    count = prod(map(len, grid.values())) * len(each)
    if count > MOST_SEEDS:
        problems.append(f"must come to {MOST_SEEDS} trainings at most, came {count}; try fewer")
    if problems:
        raise UserError("\n".join(f"what is tried {problem}" for problem in problems))
    return list(product(*grid.values()))


def source(point: Point, named: str) -> str:
    """Returns what a point is a run of: the method that is tried, in the place of the one named.

    A file that is named has more than its method, and stays.

    Args:
        point: what is tried.
        named: a method, or an experiment file.
    """
    method = config.parse(point).get("method.name", named)
    return named if experiments.split(named) else str(method)


def best(
    rows: Sequence[Row], of: Sequence[Point], tried: Sequence[Point], seeds: int
) -> Iterator[str]:
    """Says of each method which point is the best, by the mean of validation data over seeds.

    That is of the number by which runs choose their best round
    (:func:`hyperfed.analysis.comparison.choices`).

    And where one of its numbers is the least or the greatest that was tried. A point of which some
    seed has come to nothing is not the best.

    Args:
        rows: of runs that are done.
        of: the point of each.
        tried: all points, those of runs that came to nothing too.
        seeds: how many each point was trained with.
    """
    chosen = choices(rows)
    for method in dict.fromkeys(row.method for row in rows):
        own = [number for number, row in enumerate(rows) if row.method == method]
        metric, by = rows[own[0]].metric, chosen[own[0]][0]
        values: dict[Point, list[float]] = {}
        for number in own:
            if (value := chosen[number][1]) is not None:
                values.setdefault(of[number], []).append(value)
        means = {point: fmean(found) for point, found in values.items() if len(found) == seeds}
        if not means:
            yield f"{method}: no validation data say which is the best" + (
                ", as none came to something with each of its seeds" if values else ""
            )
            continue
        first = max(means, key=lambda point: metric.order(means[point]))
        told = f"{method}: best by validation data with {' '.join(first)}"
        ends = [end for place in range(len(first)) if (end := _end(first, place, tried))]
        of_what = metric.told(means[first]) + (f" {by}" if by != metric.name else "")
        yield "; ".join([f"{told} ({of_what})", *ends])


def _end(point: Point, place: int, tried: Sequence[Point]) -> str | None:
    """Says where a point's number of one key is at an end of those that were tried."""
    key, _, own = point[place].partition("=")
    with suppress(ValueError):
        written = {each[place].partition("=")[2] for each in tried}
        numbers = {float(value) for value in written}
        if len(numbers) < len(written):  # a cohort of 1 is one client, of 1.0 all of them
            return None
        for end, which, further in ((min, "least", "less"), (max, "greatest", "more")):
            if float(own) == end(numbers):
                return f"{key}={own} is the {which} tried: try {further}"
    return None

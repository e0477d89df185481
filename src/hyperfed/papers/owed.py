"""What of the papers' tables has not been measured yet, and how long that would take.

Estimates are the lines of ``hours.jsonl`` beside the records, which ``tools/hours.py`` writes.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from pydantic import ConfigDict, NonNegativeFloat, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError, told
from hyperfed.papers.measured import Found
from hyperfed.runs.experiments import Experiment

FILE = "hours.jsonl"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Estimate:
    """How long a training takes.

    Attributes:
        table: ``paper/table``.
        cells: that it does for.
        hours: of one core, for one seed.
        of: ``TABLE:CELL`` whose first rounds were timed for that.
        seconds: of a core, where that is the first of these cells: of a client's visit, before and
            after its method begins to do something else, and of an evaluation of all clients.
    """

    table: str
    cells: tuple[str, ...]
    hours: NonNegativeFloat
    of: str
    seconds: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None


_ESTIMATE = TypeAdapter(Estimate)


def read(folder: Path) -> list[Estimate]:
    """Reads the estimates beside records; none where there is no such file.

    Raises:
        UserError: a line is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [_ESTIMATE.validate_json(line) for line in path.read_bytes().splitlines()]
    except (OSError, ValidationError) as error:
        raise UserError(
            f"{path} must have an estimate in each line, but: {told(error)}; remove the line and "
            "write it again with tools/hours.py"
        ) from error


def rows(
    found: Found, experiments: Sequence[Experiment], estimates: Sequence[Estimate]
) -> list[list[str]]:
    """Returns what tables lack, each with all its seeds, and last the sum of all.

    A training is there for a seed where one of its cells has a record that a verdict can rest on.

    Returns:
        Rows of the table, its trainings, how many are missing, the hours of one core that these
        take ("–" without any), and how many cells nothing was estimated of, and of which data those
        are; without tables that lack nothing.

    Raises:
        UserError: an estimate is of a cell that its table has not.
    """
    listed, total = [], [0.0] * 4
    for experiment in experiments:
        own = [one for one in estimates if one.table == experiment.id]
        seeds = range(experiment.table.seeds)
        missing = [sum(not _there(found, one, seed) for seed in seeds) for one in own]
        estimated = {cell for one in own for cell in one.cells}
        if strange := estimated - set(experiment.cells):
            raise UserError(
                f"{FILE} must be of cells that there are, but {experiment.id} has no "
                f"{', '.join(sorted(strange))}; remove the line"
            )
        unknown = [cell for cell in experiment.cells if cell not in estimated]
        if not any(missing) and not unknown:
            continue
        hours = sum(one.hours * times for one, times in zip(own, missing, strict=True))
        numbers = [len(own) * len(seeds), sum(missing), hours, len(unknown)]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        *shown, last = _shown(numbers)
        listed.append([f"`{experiment.id}`", *shown, last + _data(experiment, unknown)])
    return [*listed, ["all", *_shown(total)]] if listed else []


def held_against(found: Found, estimates: Sequence[Estimate]) -> str:
    """Returns a sentence on what trainings with a record took by its clock; "" of fewer than ten.

    Those that a GPU has done are not among them, which no estimate is of.
    """
    ratios = []
    for one in estimates:
        records = [each for cell in one.cells for each in found.get((one.table, cell), ())]
        hours = {
            record.summary["seed"]: record.summary["seconds"] / 3600  # once for each training
            for record in records
            if record.counts and record.record.config["device"] == "cpu"
        }
        ratios += [taken / one.hours for taken in hours.values() if one.hours]
    if len(ratios) < 10:
        return ""
    tenth, *_, ninth = quantiles(ratios, n=10)
    return (
        f"Of {len(ratios)} trainings on a CPU that have a record half took more than "
        f"{median(ratios):.2g} times their estimate by the clock, and eight of ten between "
        f"{tenth:.2g} and {ninth:.2g} times."
    )


def _there(found: Found, one: Estimate, seed: int) -> bool:
    return any(
        record.counts and record.summary.get("seed", 0) == seed
        for cell in one.cells
        for record in found.get((one.table, cell), ())
    )


def _data(experiment: Experiment, cells: Sequence[str]) -> str:
    """Returns the data sets of cells, as far as their table says them, in parentheses."""
    names: dict[str, str] = {}
    for cell in cells:
        for layer in experiment.layers(cell):
            names |= {cell: layer["task"]["name"]} if "name" in layer.get("task", {}) else {}
    return f" ({', '.join(sorted(set(names.values())))})" if names else ""


def _shown(numbers: Sequence[float]) -> list[str]:
    trainings, missing, hours, unknown = numbers
    told = "–" if not trainings else f"{hours:,.1f}" if hours < 10 else f"{hours:,.0f}"
    return [f"{trainings:,.0f}", f"{missing:,.0f}", told, f"{unknown:,.0f}"]

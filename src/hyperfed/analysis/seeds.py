"""Several seeds of the same settings: which they are, and what they came to on average."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from hyperfed.analysis.comparison import KEYS, Row, grouped, new_table
from hyperfed.analysis.statistics import Spread, by_seed, spread
from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.experiments import MOST_SEEDS
from hyperfed.runs.measures import Number
from hyperfed.runs.remarks import megabytes

RANGE = re.compile(r"\s*(\d{1,18})\.\.(\d{1,18})\s*")


@dataclass(frozen=True)
class OverSeeds:
    """What runs that differ by their seeds alone came to; accuracies are from 0 to 1.

    Attributes:
        group: the method, with settings where that is needed to tell it from others.
        method: its name.
        seeds: of its runs, each once.
        metric: by which they are judged.
        val: of the runs' values over validation data, by which settings are to be chosen; None
            where a run has none, as of the next three.
        test: of the values over test data.
        worst_decile: of the mean over the worst tenth of the clients.
        novel: of clients that joined after training.
        bytes_down: mean, sent to clients.
        bytes_up: mean, sent by clients.
        seconds: mean.
    """

    group: str
    method: str
    seeds: tuple[int, ...]
    metric: Metric
    val: Spread | None
    test: Spread | None
    worst_decile: Spread | None
    novel: Spread | None
    bytes_down: float
    bytes_up: float
    seconds: float

    @property
    def by_name(self) -> dict[str, Any]:
        """The same as plain values, each number named by its metric."""
        found: dict[str, Any] = {}
        for key, value in vars(self).items():
            if key in KEYS:
                name = KEYS[key].format(self.metric.name)
                found[f"{name}_mean"] = None if value is None else value.mean
                found[f"{name}_std"] = None if value is None else value.std
            elif key != "metric":
                found[key] = value
        return found


def asked_for(settings: Sequence[str]) -> list[list[str]]:
    """Returns the settings of each run: as they are, or one list for each seed of ``seed=0..2``.

    Of several seeds or ranges the last counts, as of every key that is given twice.

    Raises:
        UserError: a range that ends before it begins, or of more than :data:`MOST_SEEDS`.
    """
    of_seed = [setting for setting in settings if _is_seed(setting)]
    several = _range(of_seed[-1].partition("=")[2], "seed=") if of_seed else None
    if several is None:
        return [list(settings)]
    others = [setting for setting in settings if not _is_seed(setting)]
    return [[*others, f"seed={seed}"] for seed in several]


def of_option(text: str) -> range:
    """Returns the seeds of ``--seeds``: of ``3`` so many from 0, of ``1..2`` these.

    Raises:
        UserError: neither; or as :func:`asked_for`.
    """
    if (several := _range(text, "--seeds ")) is not None:
        return several
    count = int(text) if re.fullmatch(r"\d{1,18}", text) else 0
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(
            f"--seeds must be how many, from 1 to {MOST_SEEDS}, or which, such as 1..2, came {text}"
        )
    return range(count)


def _range(text: str, shown: str) -> range | None:
    """Returns the seeds of ``0..2``; None where it is not of this form."""
    if (match := RANGE.fullmatch(text)) is None:
        return None
    first, last = map(int, match.groups())
    if last < first:
        raise UserError(
            f"several seeds must be written from the smallest to the largest, got {shown}"
            f"{first}..{last}; write {shown}{last}..{first}"
        )
    if last - first >= MOST_SEEDS:
        raise UserError(
            f"several seeds must be {MOST_SEEDS} at most, each of which is a training, got {shown}"
            f"{first}..{last}, {last - first + 1}; train fewer"
        )
    return range(first, last + 1)


def _is_seed(setting: str) -> bool:
    return setting.partition("=")[0].strip() == "seed"


def over_seeds(rows: Sequence[Row]) -> list[OverSeeds]:
    """Returns what runs with the same settings came to, in the order of the first of each."""
    return [_over_seeds(group, [rows[number] for number in own]) for group, own in grouped(rows)]


def _over_seeds(group: str, rows: Sequence[Row]) -> OverSeeds:
    seeds = [row.seed for row in rows]
    return OverSeeds(
        group,
        rows[0].method,
        tuple(dict.fromkeys(seeds)),
        rows[0].metric,
        val=spread_of(seeds, [row.val for row in rows]),
        test=spread_of(seeds, [row.test for row in rows]),
        worst_decile=spread_of(seeds, [row.worst_decile for row in rows]),
        novel=spread_of(seeds, [row.novel for row in rows]),
        bytes_down=fmean(row.bytes_down for row in rows),
        bytes_up=fmean(row.bytes_up for row in rows),
        seconds=fmean(row.seconds for row in rows),
    )


def spread_of(seeds: Sequence[int], values: Sequence[Number]) -> Spread | None:
    """Returns mean and deviation over seeds, a seed's value being the mean of its runs.

    Args:
        seeds: of runs, at least one.
        values: of each; where a run has none, neither have all.
    """
    found = by_seed(zip(seeds, values, strict=True))
    return spread(list(found.values())) if found else None


def tables(groups: Sequence[OverSeeds]) -> list[Table]:
    """Returns means and deviations over seeds, a table for each metric that runs are judged by."""
    metrics = dict.fromkeys(one.metric for one in groups)
    return [_table([one for one in groups if one.metric == metric], metric) for metric in metrics]


def _table(groups: Sequence[OverSeeds], metric: Metric) -> Table:
    unit = metric.short
    shown = new_table(
        "\nseeds",
        f"val\n{unit}",
        f"test\n{unit}",
        f"worst\ndecile {unit}",
        f"novel\n{unit}",
        "MB\ndown",
        "MB\nup",
        "\nseconds",
    )
    shown.title = "mean ± sd over seeds"
    for one in groups:
        shown.add_row(
            one.group,
            str(len(one.seeds)),
            *(
                "–" if found is None else metric.spread(found.mean, found.std)
                for found in (one.val, one.test, one.worst_decile, one.novel)
            ),
            megabytes(one.bytes_down),
            megabytes(one.bytes_up),
            f"{one.seconds:.1f}",
        )
    return shown

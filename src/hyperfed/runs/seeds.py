"""Several seeds of the same settings: which they are, and what they came to on average."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.comparison import KEYS, Row, megabytes, metric_of
from hyperfed.runs.measures import Number

RANGE = re.compile(r"\s*seed\s*=\s*(\d+)\.\.(\d+)\s*")


@dataclass(frozen=True)
class Spread:
    """What the runs of one method with several seeds came to; accuracies are from 0 to 1.

    Each ``_std`` is the standard deviation over seeds with n - 1 below the root; None for one seed.

    Attributes:
        method: its name.
        seeds: of its runs.
        metric: by which they are judged.
        test_mean: of the runs' values; None where a run has none.
        test_std: over seeds.
        worst_decile_mean: of the mean over the worst tenth of the clients.
        worst_decile_std: over seeds.
        novel_mean: of clients that joined after training.
        novel_std: over seeds.
        bytes_down: mean, sent to clients.
        bytes_up: mean, sent by clients.
        seconds: mean.
    """

    method: str
    seeds: tuple[int, ...]
    metric: Metric
    test_mean: Number
    test_std: Number
    worst_decile_mean: Number
    worst_decile_std: Number
    novel_mean: Number
    novel_std: Number
    bytes_down: float
    bytes_up: float
    seconds: float

    @property
    def by_name(self) -> dict[str, Any]:
        """The same as plain values, each number named by its metric."""
        found = {}
        for key, value in vars(self).items():
            what, _, of = key.rpartition("_")
            found[f"{KEYS[what].format(self.metric.name)}_{of}" if what in KEYS else key] = value
        del found["metric"]
        return found


def asked_for(settings: Sequence[str]) -> list[list[str]]:
    """Returns the settings of each run: as they are, or one list for each seed of ``seed=0..2``.

    Raises:
        UserError: a range that ends before it begins.
    """
    found = [match for setting in settings if (match := RANGE.fullmatch(setting))]
    if not found:
        return [list(settings)]
    first, last = (int(number) for number in found[-1].groups())  # as with other keys, the last
    if last < first:
        raise UserError(
            f"several seeds must be written from the smallest to the largest, got seed="
            f"{first}..{last}; write seed={last}..{first}"
        )
    others = [setting for setting in settings if not RANGE.fullmatch(setting)]
    return [[*others, f"seed={seed}"] for seed in range(first, last + 1)]


def over_seeds(rows: Sequence[Row]) -> list[Spread]:
    """Returns what each method came to over its seeds, in the order of their first runs.

    Raises:
        UserError: the runs are judged by several metrics.
    """
    metric = metric_of(rows)
    return [
        _spread(method, metric, [row for row in rows if row.method == method])
        for method in dict.fromkeys(row.method for row in rows)
    ]


def table(spreads: Sequence[Spread]) -> Table:
    """Returns means and deviations over seeds for a :class:`rich.console.Console` to print."""
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    shown.add_column("mean ± sd over seeds\nmethod")
    metric = spreads[0].metric
    unit = metric.short
    for column in (
        "\nseeds",
        f"test\n{unit}",
        f"worst\ndecile {unit}",
        f"novel\n{unit}",
        "MB\ndown",
        "MB\nup",
        "\nseconds",
    ):
        shown.add_column(column, justify="right")
    for spread in spreads:
        shown.add_row(
            spread.method,
            str(len(spread.seeds)),
            metric.spread(spread.test_mean, spread.test_std),
            metric.spread(spread.worst_decile_mean, spread.worst_decile_std),
            metric.spread(spread.novel_mean, spread.novel_std),
            megabytes(spread.bytes_down),
            megabytes(spread.bytes_up),
            f"{spread.seconds:.1f}",
        )
    return shown


def _spread(method: str, metric: Metric, rows: Sequence[Row]) -> Spread:
    return Spread(
        method,
        tuple(row.seed for row in rows),
        metric,
        *_mean_and_std([row.test for row in rows]),
        *_mean_and_std([row.worst_decile for row in rows]),
        *_mean_and_std([row.novel for row in rows]),
        bytes_down=statistics.fmean(row.bytes_down for row in rows),
        bytes_up=statistics.fmean(row.bytes_up for row in rows),
        seconds=statistics.fmean(row.seconds for row in rows),
    )


def _mean_and_std(values: Sequence[Number]) -> tuple[Number, Number]:
    there = [value for value in values if value is not None]
    if len(there) < len(values):
        return None, None
    return statistics.fmean(there), statistics.stdev(there) if len(there) > 1 else None

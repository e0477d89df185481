"""Compared runs as a table in a file: for a spreadsheet, or for a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfed.analysis.comparison import Row, metric_of
from hyperfed.analysis.seeds import over_seeds
from hyperfed.runs.remarks import megabytes
from hyperfed.system.files import atomic_write, check_suffix

if TYPE_CHECKING:
    from pandas import DataFrame

SUFFIXES = (".csv", ".tex")


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Writes what runs came to, as the file's ending says.

    ``.csv`` has a line for each run with all numbers as they are, fractions from 0 to 1; ``.tex``,
    for LaTeX with the package booktabs, the means and deviations over seeds as they are printed.

    Args:
        rows: at least one.
        path: the file.

    Raises:
        UserError: another ending, runs for LaTeX that are judged by several metrics, or the disk
            refuses.
    """
    check_suffix(path, SUFFIXES, "table")
    if path.suffix == ".csv":
        from pandas import DataFrame

        text = DataFrame([row.by_name for row in rows]).to_csv(index=False)
    else:
        table = _printed(rows)
        text = table.to_latex(
            index=False, escape=True, column_format="l" + "r" * (table.shape[1] - 1)
        )
    atomic_write(path, text.encode())


def _printed(rows: Sequence[Row]) -> "DataFrame":
    """Returns means and deviations over seeds in words, without columns that nobody has."""
    from pandas import DataFrame

    metric, groups = metric_of(rows), over_seeds(rows)
    spreads = {
        metric.axis("test {}"): [one.test for one in groups],
        metric.axis("test {}, worst tenth"): [one.worst_decile for one in groups],
        metric.axis("novel {}"): [one.novel for one in groups],
    }
    columns = {
        "method": [one.group for one in groups],
        "seeds": [str(len(one.seeds)) for one in groups],
        **{
            name: ["–" if it is None else metric.spread(it.mean, it.std) for it in found]
            for name, found in spreads.items()
            if any(found)
        },
        "MB": [megabytes(one.bytes_down + one.bytes_up) for one in groups],
    }
    return DataFrame(columns)

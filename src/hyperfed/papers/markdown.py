"""How a report writes tables and numbers, in Markdown."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hyperfed.analysis.statistics import Spread
from hyperfed.runs.experiments import Published


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Returns a table, of which so many columns are of words and the others of numbers."""
    ruler = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ruler, *rows))


def spread(value: Spread) -> str:
    """Returns a mean over seeds, with the deviation where there are several."""
    return f"{value.mean:.1f}" if value.std is None else f"{value.mean:.1f} ± {value.std:.1f}"


def published(number: Published | None) -> str:
    """Returns what a paper says, with its spread where it has one, or a dash."""
    if number is None:
        return "–"
    return f"{number.value:g}" + ("" if number.spread is None else f" ± {number.spread:g}")


def minutes(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Returns how long runs took on average, by the clock."""
    return f"{fmean(s['seconds'] for s in summaries) / 60:,.1f}"

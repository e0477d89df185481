"""In which settings runs differ, all of them."""

from collections.abc import Sequence

from rich.table import Table

from hyperfed.analysis.comparison import Row, grouped, settings_of
from hyperfed.runs.keys import written
from hyperfed.runs.records import FinishedRun

NAMED = 6
"""Runs with the most frequent value that are named in a table; more are the others."""

Difference = dict[str, list[str]]
"""Value, as a user writes it -> the labels of the runs that have it."""


def differences(runs: Sequence[FinishedRun], rows: Sequence[Row]) -> dict[str, Difference]:
    """Returns {key: who has which value} for each setting in which runs differ.

    Where not every run has a key of its method, it is compared among runs of one method: of another
    it may mean something else. Left out are the method's name, which the labels say, and what
    changes no number. Runs that differ by their seeds alone are named once, without these.

    Args:
        runs: finished.
        rows: theirs.
    """
    settings = [settings_of(run) for run in runs]
    several = len(grouped(rows)) < len(rows)
    labels = [row.group if several else row.label for row in rows]
    said = {"method.name", "seed"} if several else {"method.name"}
    found: dict[str, Difference] = {}
    for key in dict.fromkeys(key for own in settings for key in own if key not in said):
        everyones = all(key in own for own in settings)
        for method in [None] if everyones else dict.fromkeys(it["method.name"] for it in settings):
            values: Difference = {}
            for label, own in zip(labels, settings, strict=True):
                if key in own and method in (None, own["method.name"]):
                    values.setdefault(written(own[key]), []).append(label)
            if len(values) > 1:
                for value, of in values.items():
                    found.setdefault(key, {}).setdefault(value, []).extend(dict.fromkeys(of))
    return found


def table(found: dict[str, Difference]) -> Table:
    """Returns the differences for a :class:`rich.console.Console` to print."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("setting that differs", "value", "runs"):
        shown.add_column(column)
    for key, values in found.items():
        most = max(values.values(), key=len)
        for number, (value, labels) in enumerate(values.items()):
            many = labels is most and len(labels) > NAMED
            runs = f"the other {len(labels)}" if many else ", ".join(labels)
            shown.add_row(key if number == 0 else "", value, runs)
    return shown

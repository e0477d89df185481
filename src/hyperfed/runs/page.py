"""Finished runs on one page for a browser, which loads nothing else (``comparison.html``)."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from hyperfed.runs.differences import differences
from hyperfed.runs.figures import AXES, curve, of_clients
from hyperfed.runs.report import FinishedRun, comparison, percent
from hyperfed.system.files import atomic_write

PERCENT = (
    "test_accuracy",
    "test_accuracy_client_mean",
    "test_accuracy_client_std",
    "worst_decile_accuracy",
    "novel_accuracy",
)
"""What is shown in per cent, rounded as in the table of a terminal."""


def write_page(runs: Sequence[FinishedRun], path: Path, axis: str = "rounds") -> None:
    """Writes a table that can be sorted, curves, every client's accuracy and what differs.

    Args:
        runs: at least one, each with an evaluation on test examples.
        path: the page.
        axis: a key of ``AXES``, the one that curves begin with.

    Raises:
        UserError: a run is not done or has no test accuracy, no such axis, or the disk refuses.
    """
    template = (files("hyperfed.runs") / "comparison.html").read_text(encoding="utf-8")
    text = json.dumps(content(runs, axis), allow_nan=False)
    # In a script of a page only "<" can mean anything but itself.
    atomic_write(path, template.replace("@DATA@", text.replace("<", "\\u003c")).encode())


def content(runs: Sequence[FinishedRun], axis: str = "rounds") -> dict[str, Any]:
    """Returns what the page shows, as plain data."""
    rows = comparison(runs)
    shown = []
    for run, row in zip(runs, rows, strict=True):
        curves = {name: curve(run, row, name) for name in (axis, *AXES)}
        rounds = [place for place, _ in curves["rounds"]]
        about = {
            "curves": curves,
            "best_point": rounds.index(row.best_round),
            "clients": of_clients(run, row),
            "shown": {name: percent(getattr(row, name)) for name in PERCENT},
        }
        shown.append({**asdict(row), **about})
    return {
        "runs": shown,
        "axis": axis,
        "axes": {name: label for name, (label, _) in AXES.items()},
        "data": len({row.data_fingerprint for row in rows}),
        "differences": differences(runs, [row.label for row in rows]),
    }

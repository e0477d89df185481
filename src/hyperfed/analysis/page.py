"""Finished runs on one page for a browser, which loads nothing else (``page.html``)."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from hyperfed.analysis.budgets import AXES
from hyperfed.analysis.comparison import TESTED, compare, metric_of, saw_the_same
from hyperfed.analysis.differences import differences
from hyperfed.analysis.figures import curve
from hyperfed.analysis.statistics import scores
from hyperfed.metrics import Metric, named
from hyperfed.runs.drawing import chosen_round
from hyperfed.runs.measures import Number
from hyperfed.runs.records import FinishedRun
from hyperfed.runs.remarks import megabytes, without
from hyperfed.system.files import atomic_write


def write_page(runs: Sequence[FinishedRun], path: Path, axis: str = "rounds") -> None:
    """Writes a table that can be sorted, curves, every client's metric and what differs.

    Args:
        runs: at least one, each with an evaluation on test examples.
        path: the page.
        axis: a key of ``AXES``, the one that curves begin with.

    Raises:
        UserError: a run is not done or has no test examples, several metrics, no such axis, or the
            disk refuses.
    """
    template = (files("hyperfed.analysis") / "page.html").read_text(encoding="utf-8")
    text = json.dumps(content(runs, axis), allow_nan=False)
    # In a script of a page only "<" can mean anything but itself.
    atomic_write(path, template.replace("@DATA@", text.replace("<", "\\u003c")).encode())


def content(runs: Sequence[FinishedRun], axis: str = "rounds") -> dict[str, Any]:
    """Returns what the page shows, as plain data."""
    rows = compare(runs)
    summaries = [run.summary or {} for run in runs]
    missing = [(row.label, without(of)) for row, of in zip(rows, summaries, strict=True)]
    metric, shown = metric_of(rows), []
    others = [named(name) for name in dict.fromkeys(name for row in rows for name in row.more)]
    for run, row in zip(runs, rows, strict=True):
        curves = {name: curve(run, row, name) for name in (axis, *AXES)}
        rounds = [place for place, _ in curves["rounds"]]
        texts = {name: metric.shown(getattr(row, name)) for name in TESTED}
        texts |= {name: megabytes(getattr(row, name)) for name in ("bytes_down", "bytes_up")}
        numbers: dict[str, Number] = {}
        for other in others:
            pair = row.more.get(other.name, (None, None))
            for split, value in zip(("test", "novel"), pair, strict=True):
                numbers[f"{split}_{other.name}"] = value
                texts[f"{split}_{other.name}"] = other.shown(value)
        about = {
            "curves": curves,
            "best_point": rounds.index(row.best_round) if row.best_round in rounds else None,
            "clients": [*scores(run).shown.values()],
            "shown": texts,
        }
        plain = {key: value for key, value in vars(row).items() if key not in ("metric", "more")}
        shown.append(plain | numbers | about)
    return {
        "runs": shown,
        "metric": _about(metric),
        "others": [_about(other) for other in others],
        "chosen_round": chosen_round(row.val is not None for row in rows),
        "axis": axis,
        "axes": {name: label for name, (label, _) in AXES.items()},
        "same_data": saw_the_same(rows),
        "missing": [f"{label}: {told}" for label, told in missing if told is not None],
        "differences": differences(runs, rows),
    }


def _about(metric: Metric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "label": metric.label,
        "header": metric.header,
        "unit": metric.unit,
        "less": metric.less_is_better,
    }

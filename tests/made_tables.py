"""A small table, records of its cells as runs leave them, made by hand, and reports of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperfed.apps.cli import main
from hyperfed.papers import measured
from hyperfed.runs import config, experiments
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import summarise

TABLE = """
[table]
paper = "Nobody, 2026"
title = "Digits"
spread = "over three seeds"
remarks = ["Nothing is known."]
set.rounds = 4
set.evaluate_every = 100
set.cohort = 2
set.task = { clients = 5, novel = 0.2 }

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.digits]
about = "digits, 5 clients"

[rows.local]
about = "Local"
published.test.digits = 50

[rows.fedavg]
about = "FedAvg"
remarks = ["It is the usual one."]
published.test.digits = [60.0, 2.0]

[rows.trained]
about = "FedAvg, trained on"
like = "fedavg"
judged = false
set.method = "fedavg"
"""


def make_table(folder: Path, text: str = TABLE) -> Path:
    """Writes the table ``made/table1`` below ``folder/experiments``, and returns its file."""
    path = folder / "experiments" / "made" / "table1.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def record(
    folder: Path,
    row: str,
    seed: int,
    correct: list[int],
    *,
    place: str = "",
    best: int | None = None,
    **keys: Any,
) -> Path:
    """Writes the record of a run whose four clients have ten test examples each."""
    overrides = [f"{key}={value}" for key, value in keys.items()]
    source = f"{folder / 'experiments' / 'made' / 'table1.toml'}:digits-{row}"
    settings = config.load(source, [f"seed={seed}", *overrides])
    run = RunFolder(folder / "results" / (place or f"made/table1-digits-{row}") / f"seed{seed}")
    run.path.mkdir(parents=True)
    config.dump(settings, run.config)
    best = best or settings.rounds
    evaluation = summarise(
        round=best, split="test", clients=[0, 1, 2, 3], count=[10] * 4, correct=correct,
        loss=[1.0] * 4, masked_correct=correct, zeroed_correct=correct,
        bytes_down=0 if row == "local" else 3_000_000,
        bytes_up=0 if row == "local" else 1_000_000, seconds=90.0,
    )  # fmt: skip
    run.append(evaluation)
    run.write_summary(
        {
            "method": settings.method, "seed": seed, "rounds": settings.rounds, "best_round": best,
            "test_accuracy": evaluation.accuracy, "test_masked_accuracy": evaluation.accuracy,
            "test_accuracy_client_mean": evaluation.accuracy_client_mean,
            "test_accuracy_client_std": evaluation.accuracy_client_std,
            "novel_accuracy": None, "worst_decile_accuracy": evaluation.worst_decile_accuracy,
            "bytes_down": evaluation.bytes_down, "bytes_up": evaluation.bytes_up,
            "seconds": 90.0, "data_fingerprint": f"data {seed}",
        }
    )  # fmt: skip
    return run.path


def collected(folder: Path) -> Any:
    """Returns all records, those of a cell apart from the others."""
    return measured.collect(folder / "results", experiments.find_all(folder / "experiments"))


def written(folder: Path, name: str, *options: str) -> str:
    """Returns the report that the command writes."""
    out = folder / name
    records = ["--records", str(folder / "results"), "--experiments", str(folder / "experiments")]
    with pytest.raises(SystemExit) as leaving:
        main(["report", "--out", str(out), *records, *options])
    assert leaving.value.code == 0
    return out.read_text()


def row(text: str, beginning: str) -> list[str]:
    """Returns the cells of the only row of a report's tables that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {beginning} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def untested(path: Path) -> None:
    """Has no client of a record have an example to test on."""
    nobody = summarise(
        round=4, split="test", clients=[0, 1, 2, 3], count=[0] * 4, correct=[0] * 4,
        loss=[0.0] * 4, masked_correct=[0] * 4, zeroed_correct=[0] * 4,
        bytes_down=3_000_000, bytes_up=1_000_000, seconds=0.0,
    )  # fmt: skip
    (path / "metrics.jsonl").unlink()
    RunFolder(path).append(nobody)
    summary = json.loads((path / "summary.json").read_text())
    gone = [key for key in summary if "accuracy" in key]
    (path / "summary.json").write_text(json.dumps(summary | dict.fromkeys(gone)))

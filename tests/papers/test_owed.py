"""What tables lack, and the hours of it, by sums that are done by hand."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyperfed.errors import UserError
from hyperfed.papers import owed, report
from hyperfed.papers.owed import Estimate
from hyperfed.runs import experiments

TABLE = """
[table]
paper = "Nobody, 2026"
title = "Digits"
seeds = 2
set.task = { clients = 5, novel = 0.2 }

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.a]
about = "digits"

[columns.b]
about = "digits, novel clients with noise"

[rows.local]
about = "Local"

[rows.fedavg]
about = "FedAvg"
"""


@pytest.fixture
def table(tmp_path: Path) -> experiments.Experiment:
    path = tmp_path / "made" / "table1.toml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return experiments.read(path)


def record(seed: int, counts: bool = True) -> Any:
    return SimpleNamespace(counts=counts, summary={"seed": seed})


LOCAL = Estimate("made/table1", ("a-local", "b-local"), 3.0, "made/table1:a-local", (1, 1, 1))
FEDAVG = Estimate("made/table1", ("a-fedavg",), 0.25, "made/table1:a-local")


def test_a_training_is_owed_for_each_seed_without_a_record_of_any_of_its_cells(
    table: experiments.Experiment,
) -> None:
    def told(found: Any, *estimates: Estimate) -> list[list[str]]:
        return owed.rows(found, [table], estimates)

    # Two trainings with two seeds each; of the fourth cell nothing was estimated.
    assert told({}, LOCAL, FEDAVG) == [
        ["`made/table1`", "4", "4", "6.5", "1"],
        ["all", "4", "4", "6.5", "1"],
    ]
    elsewhere = Estimate("made/table2", ("a-local",), 100.0, "made/table2:a-local")
    assert told({}, LOCAL, FEDAVG, elsewhere) == told({}, LOCAL, FEDAVG)
    assert told({})[0] == ["`made/table1`", "0", "0", "–", "4"]
    one = {("made/table1", "b-local"): [record(1), record(0, counts=False)]}
    assert told(one, LOCAL, FEDAVG)[0] == ["`made/table1`", "4", "3", "3.5", "1"]
    for name, other in [("made/table2", record(1)), ("made/table1", record(5))]:
        assert told({(name, "b-local"): [other]}, LOCAL, FEDAVG)[0][2] == "4"
    every = Estimate("made/table1", tuple(table.cells), 1200.0, "made/table1:a-local")
    assert told({}, every)[-1] == ["all", "2", "2", "2,400", "0"]
    assert told({("made/table1", "a-local"): [record(0), record(1)]}, every) == []


def test_cells_without_an_estimate_say_of_which_data_they_are(
    table: experiments.Experiment,
) -> None:
    whole = table.path.read_text()
    a, b = 'about = "digits"', 'about = "digits, novel clients with noise"'
    written = whole.replace(a, f'{a}\nset.task = {{ name = "cifar10" }}')
    written = written.replace(b, f'{b}\nset.task.name = "femnist"')
    table.path.write_text(written)
    named = experiments.read(table.path)
    assert owed.rows({}, [named], [])[0][-1] == "4 (cifar10, femnist)"
    own = Estimate("made/table1", ("b-local", "b-fedavg"), 1.0, "made/table1:b-local")
    assert owed.rows({}, [named], [own])[0][-1] == "2 (cifar10)"


def test_estimates_are_lines_and_the_report_has_their_sum(
    table: experiments.Experiment, tmp_path: Path
) -> None:
    assert owed.read(tmp_path) == []
    assert "What did not fit" not in report.of_papers(tmp_path, [table]).text
    line = {"table": "made/table1", "cells": ["a-local"], "hours": 1.5, "of": "made/table1:a-local"}
    (tmp_path / owed.FILE).write_text(f"{json.dumps(line)}\n")
    text = report.of_papers(tmp_path, [table]).text
    assert "### What did not fit" in text
    assert "| `made/table1` | 2 | 2 | 3.0 | 3 |" in text
    (tmp_path / owed.FILE).write_text(f"{json.dumps(line | {'cells': ['a-x', 'a-local']})}\n")
    with pytest.raises(UserError, match=r"must be of cells that there are, but .* has no a-x; rem"):
        report.of_papers(tmp_path, [table])
    (tmp_path / owed.FILE).write_text(f"{json.dumps(line | {'hours': -1})}\n")
    with pytest.raises(
        UserError, match=r"hours\.jsonl must have an estimate in each line.* hours: "
    ):
        owed.read(tmp_path)


def test_estimates_are_held_against_what_trainings_took() -> None:
    """Once for a training, however many cells it does for, and never of a GPU."""

    def took(hours: float, seed: int, device: str = "cpu", counts: bool = True) -> Any:
        own = SimpleNamespace(config={"device": device})
        summary = {"seed": seed, "seconds": 3600 * hours}
        return SimpleNamespace(counts=counts, summary=summary, record=own)

    others = [took(99, 11, "cuda"), took(99, 12, counts=False)]
    found: Any = {
        ("made/table1", "a-local"): [*(took(3 * n, n) for n in range(1, 10)), *others],
        ("made/table1", "b-local"): [took(30, 10), took(3, 1)],
    }
    told = owed.held_against(found, [LOCAL])
    assert "10 trainings" in told
    assert "more than 5.5 times" in told
    assert "between 1.1 and 9.9 times" in told
    assert owed.held_against(found, [replace(LOCAL, cells=("a-local",))]) == ""  # of nine
    assert owed.held_against({}, []) == ""

"""Rows that are tried at several points: the rows that they become, and how they are shown."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hyperfed.errors import UserError
from hyperfed.papers import grids, measured, report
from hyperfed.papers.measured import Measurement
from hyperfed.papers.origin import Origin
from hyperfed.papers.reproduction import carry_out, plan
from hyperfed.runs import config, experiments
from hyperfed.runs.experiments import Experiment

TABLE = """
[table]
paper = "Nobody, 2026"
title = "Rates"
set.rounds = 1
set.evaluate_every = 1
set.cohort = 2
set.task = { clients = 4, novel = 0 }

[measures.val]
metric = "val_accuracy"
place = "table 1"

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.digits]
about = "Digits"

[columns.half]
about = "Half of them"
set.task.fraction = 0.5

[rows.local]
about = "Local"

[rows.adapted]
about = "Per-FedAvg"
columns = ["digits"]
set.method = { name = "per_fedavg", local_steps = 3, adapt_lr = 7.0 }
cells.digits.method = { batch_size = 5 }
grid."method.local_lr" = [0.1, 0.02]
grid."method.adapt_lr" = [0.05, 0.5]

[rows.fedavg]
about = "FedAvg"
set.method.local_steps = 2
grid."method.local_lr" = [0.1, 0.02]
"""
ADAPTED = "digits-adapted-local_lr{}-adapt_lr{}"


def table(folder: Path, text: str = TABLE) -> Experiment:
    path = folder / "made" / "rates.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return experiments.read(path)


def test_a_row_becomes_one_for_each_point_of_its_grid(tmp_path: Path) -> None:
    made = table(tmp_path)
    points = [ADAPTED.format(*pair) for pair in ((0.1, 0.05), (0.1, 0.5), (0.02, 0.05))]
    points.append(ADAPTED.format(0.02, 0.5))
    assert list(made.cells) == [
        "digits-local",
        *points,
        "digits-fedavg-local_lr0.1",
        "digits-fedavg-local_lr0.02",
        "half-local",
        "half-fedavg-local_lr0.1",
        "half-fedavg-local_lr0.02",
    ]
    loaded = config.load(made.source(points[1]))
    assert loaded.method == "per_fedavg"
    own = loaded.settings
    assert (own.local_lr, own.adapt_lr, own.local_steps, own.batch_size) == (0.1, 0.5, 3, 5)
    fedavg = config.load(made.source("half-fedavg-local_lr0.02"))
    assert (fedavg.method, fedavg.settings.local_lr) == ("fedavg", 0.02)
    assert (fedavg.settings.local_steps, fedavg.task.fraction) == (2, 0.5)
    assert made.rows["fedavg-local_lr0.02"].about == "FedAvg, local_lr=0.02"
    whole = table(tmp_path, TABLE.replace('local_lr" = [0.1, 0.02]', 'local_steps" = [1, 2]'))
    assert config.load(whole.source("half-fedavg-local_steps1")).settings.local_steps == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE.replace("[0.05, 0.5]", "[0.05]"), r"rows\.adapted\.grid\.method\.adapt_lr"),
        (TABLE + '\n[rows.other]\nabout = "x"\nlike = "fedavg"', "other.like: must be a row with"),
        (TABLE + 'grid."other.local_lr" = [1, 2]', "fedavg.grid: settings must differ in the last"),
    ],
    ids=["one value", "like a grid", "one name"],
)
def test_what_is_no_grid_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        table(tmp_path, text)


def record(
    cell: str, val: float, test: float, seed: int = 0, *, scale: float = 1.0, **differing: Any
) -> Measurement:
    summary = {"val_accuracy": val, "test_accuracy": test, "seed": seed}
    run = cast(Any, SimpleNamespace(summary=summary))
    return Measurement(run, Origin("", cell, scale), differing)


def test_points_stand_side_by_side_and_the_best_is_chosen_by_the_first_measure(
    tmp_path: Path,
) -> None:
    made = table(tmp_path)
    found = {
        (made.id, cell): records
        for cell, records in {
            ADAPTED.format(0.1, 0.05): [record("", 0.6, 0.1), record("", 0.7, 0.3, seed=1)],
            # Better on the average, by a seed that is the easier one.
            ADAPTED.format(0.1, 0.5): [
                record("", 0.9, 0.2, scale=0.1),
                record("", 0.68, 0.9, seed=1),
            ],
            ADAPTED.format(0.02, 0.05): [record("", 0.95, 0.95, cohort=("3", "2"))],
            ADAPTED.format(0.02, 0.5): [record("", 0.99, 0.99, scale=0.1)],
        }.items()
    }
    header, rows = grids.matrix(found, made, "digits", "val", "adapted")
    assert header == ["local_lr", "adapt_lr=0.05", "adapt_lr=0.5"]
    assert rows == [["0.1", "**65.0 ± 7.1**", "68.0"], ["0.02", "95.0*", "99.0*"]]
    _, rows = grids.matrix(found, made, "digits", "test", "adapted")
    assert rows == [["0.1", "**20.0 ± 14.1**", "90.0"], ["0.02", "95.0*", "99.0*"]]
    assert grids.matrix(found, made, "half", "val", "fedavg") == ([], [])
    chosen = set(made.grids["adapted"].points.values()) - grids.worse(found, made, "digits")
    assert chosen == {"adapted-local_lr0.1-adapt_lr0.05"}
    scaled = {cell: of for cell, of in found.items() if of[-1].origin.scale < 1}
    assert grids.best(scaled, made, "digits", "adapted") == "adapted-local_lr0.02-adapt_lr0.5"


def test_of_points_without_a_seed_in_common_none_is_the_best(tmp_path: Path) -> None:
    made = table(tmp_path)
    cells = (ADAPTED.format(0.1, 0.05), ADAPTED.format(0.1, 0.5))
    found = {(made.id, cell): [record("", 0.5, 0.5, seed)] for seed, cell in enumerate(cells)}
    assert grids.best(found, made, "digits", "adapted") is None
    assert not grids.worse(found, made, "digits")
    _, (row, _) = grids.matrix(found, made, "digits", "val", "adapted")
    assert row == ["0.1", "50.0", "50.0"]


@pytest.mark.usefixtures("as_before")
def test_a_report_has_the_grid_and_the_best_point_beside_other_rows(tmp_path: Path) -> None:
    made = table(tmp_path)
    for job in plan(made, made.matching("half-*"), seeds=[0], scale=1.0, out=tmp_path):
        carry_out(job, lambda message: None)
        assert job.done
    text = report.of_papers(tmp_path, [made], figures=False).text
    _, _, part = text.partition("#### Half of them: val_accuracy (%)")
    told, _, _ = part.partition("####")
    assert "FedAvg, point by point; the best by val_accuracy is bold" in told
    assert "| local_lr=0.1 | local_lr=0.02 |" in told
    (best,) = [cell for cell in ("0.1", "0.02") if f"| FedAvg, local_lr={cell} |" in told]
    found, _ = measured.collect(tmp_path, [made])
    assert grids.best(found, made, "half", "fedavg") == f"fedavg-local_lr{best}"
    (one,) = found[made.id, "half-local"]
    evaluated = {e.split: e for e in one.record.evaluations}
    for metric, split in (("val_accuracy", "val"), ("test_accuracy", "test")):
        scored = list(one.scores(metric).clients.values())
        assert scored == list(evaluated[split].client_accuracy)
    assert evaluated["val"].client_accuracy != evaluated["test"].client_accuracy
    assert "| Local |" in told
    assert "Per-FedAvg, point by point" not in text

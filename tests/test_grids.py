"""The tools that make ``results/`` search rates as they say, and make no record twice."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hyperfed
from grids import ROOT, Grid, record

REACHED = {(0.1, 1.0): 0.5, (0.3, 1.0): 0.7, (0.3, 2.0): 0.9, (0.3, 3.0): 0.8}


def test_local_rates_are_tried_first_and_second_ones_at_the_best_of_them(tmp_path: Path) -> None:
    grid, of, tried = Grid(tmp_path / "new" / "grid.jsonl"), {"method": "pefll"}, []

    def train(rates: Mapping[str, float]) -> Any:
        tried.append((rates["local_lr"], rates["lr"]))
        return SimpleNamespace(summary={"val_accuracy": REACHED[tried[-1]]})

    for _ in range(2):  # the second time there is nothing to do
        grid.search(of, (0.1, 0.3), [{"lr": rate} for rate in (1.0, 2.0, 3.0)], train)
    assert tried == list(REACHED)
    assert grid.best(of) == {"local_lr": 0.3, "lr": 2.0}
    with pytest.raises(hyperfed.UserError, match=r"rates of local must be in .* run grid before"):
        grid.best({"method": "local"})
    grid.search({"method": "local"}, (0.1,), (), lambda rates: _reaching(0.95))
    assert grid.best(of) == {"local_lr": 0.3, "lr": 2.0}
    assert grid.best({"method": "local"}) == {"local_lr": 0.1}
    last = json.loads(grid.file.read_text().splitlines()[-1])
    assert last == {"method": "local", "rates": {"local_lr": 0.1}, "val_accuracy": 0.95}


def _reaching(accuracy: float | None) -> Any:
    return SimpleNamespace(summary={"val_accuracy": accuracy})


def test_rates_at_which_all_diverge_reach_nothing(tmp_path: Path) -> None:
    def diverges(rates: Mapping[str, float]) -> Any:
        if rates["local_lr"] > 1:
            raise hyperfed.UserError("all clients were lost")
        return _reaching(None)

    grid = Grid(tmp_path / "grid.jsonl")
    grid.search({"method": "fedavg"}, (1.0, 3.0), (), diverges)
    assert [point["val_accuracy"] for point in grid.points({})] == [0.0, 0.0]


def test_a_rate_at_the_end_of_those_tried_is_gone_beyond(tmp_path: Path) -> None:
    """A hill at (1, 0.01); a point is as high as it is near, in steps of three."""
    grid, tried = Grid(tmp_path / "grid.jsonl"), []

    def train(rates: Mapping[str, float]) -> Any:
        tried.append((rates["local_lr"], rates["lr"]))
        away = abs(math.log(rates["local_lr"], 3)) + abs(math.log(rates["lr"] / 0.01, 3))
        return _reaching(1 - away / 100)

    for of in ({"method": "pefll"}, {"method": "pfedhn"}):
        grid.search(of, (0.03, 0.1, 0.3), [{"lr": rate} for rate in (0.1, 0.03, 0.3)], train)
        assert len(tried) == 5
        grid.go_beyond(of, train)
        assert tried[5:] == [(0.9, 0.03), (2.7, 0.03), (0.9, 0.01), (0.9, 0.0033)]
        assert grid.best(of) == {"local_lr": 0.9, "lr": 0.01}
        grid.go_beyond(of, train)
        assert len(tried) == 9
        tried.clear()


def test_where_all_rates_do_alike_one_further_on_the_first_side_is_tried(tmp_path: Path) -> None:
    grid, of = Grid(tmp_path / "grid.jsonl"), {"method": "local"}
    grid.search(of, (0.03, 0.1, 0.3), (), lambda rates: _reaching(0.5))
    grid.go_beyond(of, lambda rates: _reaching(0.5))
    assert [point["rates"]["local_lr"] for point in grid.points(of)] == [0.03, 0.1, 0.3, 0.01]
    assert grid.best(of) == {"local_lr": 0.03}


def test_a_record_is_made_once_and_is_of_this_project_wherever_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def train(out: Path) -> hyperfed.Run:
        made.append(out)
        return hyperfed.train(
            "fedavg",
            out=out,
            rounds=1,
            task={"clients": 4, "novel": 0, "model": f"{ROOT}/tools/architectures.py:lenet"},
        )

    folder = tmp_path / "results" / "fedavg" / "seed0"
    for _ in range(2):
        record(folder, {"local_lr": 0.005}, train)
    assert len(made) == 1
    assert not made[0].exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.toml",
        "metrics.jsonl",
        "summary.json",
    ]
    assert 'model = "tools/architectures.py:lenet"' in (folder / "config.toml").read_text()
    accuracy = json.loads((folder / "summary.json").read_text())["test_accuracy"]
    assert f"fedavg seed0                 test {accuracy:.3f}\n" in capsys.readouterr().out
    record(folder, {"local_lr": 0.2}, train)
    assert len(made) == 2

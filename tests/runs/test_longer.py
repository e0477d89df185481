"""A run that is done goes on for longer: as if it had been begun so."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperfed
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.runs.run import Run

SMALL: dict[str, Any] = {
    "evaluate_every": 2,
    "cohort": 3,
    "task": {"clients": 6, "novel": 2, "model": "mlp", "hidden": [4]},
    "track": "none",
    "progress": False,
}
OWN: dict[str, dict[str, Any]] = {
    "itpfl": {"phase_one_rounds": 3},
    "pefll": {"delayed_gradient": True},
    "pfedhn": {"novel_rounds": 2},
    **{name: {"novel_steps": 3} for name in ("fedavg", "fedper", "ditto")},
}


def train(method: str, folder: Path, rounds: int, **keys: Any) -> Run:
    own = {"local_steps": 2, "batch_size": 8} | OWN.get(method, {})
    return hyperfed.train(method, out=folder, rounds=rounds, method=own, **SMALL | keys)


def numbers(run: Run) -> dict[str, Any]:
    unlike = ("seconds", "commit", "versions")
    return {key: value for key, value in (run.summary or {}).items() if key not in unlike}


def tensors(run: Run) -> Any:
    return trees.clone({"server": run.server.state(), "memory": {**run.engine.memory}})


@pytest.mark.parametrize(
    "method", ["fedavg", "fedper", "ditto", "pfedhn", "pefll", "headstart", "itpfl", "pfedla"]
)
def test_it_comes_to_what_it_would_have_come_to(method: str, tmp_path: Path) -> None:
    whole = train(method, tmp_path, 8)
    path = train(method, tmp_path, 4).folder.path
    longer = hyperfed.resume(path, rounds=8, progress=False)
    assert numbers(longer) == numbers(whole)
    torch.testing.assert_close(tensors(longer), tensors(whole), rtol=0, atol=0)
    opened = hyperfed.open_run(path)
    assert opened.config.rounds == 8
    found, expected = (
        [(e.round, e.split, e.client_loss) for e in run.evaluations] for run in (opened, whole)
    )
    assert found == expected


def test_its_last_evaluation_stays_and_that_of_newcomers_is_made_anew(tmp_path: Path) -> None:
    path = train("fedper", tmp_path, 3).folder.path
    longer = hyperfed.resume(path, rounds=4, progress=False)
    rounds = [(e.round, e.split) for e in longer.evaluations if e.split != "val"]
    assert rounds == [(2, "test"), (3, "test"), (4, "test"), (4, "novel")]


def test_it_can_be_stopped_and_gone_on_with(tmp_path: Path) -> None:
    path = train("pfedhn", tmp_path, 4, checkpoint_every=1).folder.path
    longer = Run.resume(path, changed={"rounds": 8})
    for progress in longer.train():
        if progress.round == 5:
            longer.stop()
    longer.close()
    assert longer.summary == {}
    assert not (path / "summary.json").exists()
    done = hyperfed.resume(path, progress=False)
    assert done.summary["rounds"] == 8


@pytest.mark.parametrize(
    ("method", "keys", "rounds", "said"),
    [
        ("fedavg", {}, 4, "must have more than its 4 rounds, came 4"),
        ("fedavg", {"privacy": {"epsilon": 8.0, "clip": 1.0}}, 6, "whose noise is for so many"),
        ("itpfl", {"method": {"epsilon": 0.5, "phase_one_rounds": 2}}, 6, "whose noise is for so"),
    ],
)
def test_what_cannot_have_more_rounds_is_left_as_it_is(
    method: str, keys: dict[str, Any], rounds: int, said: str, tmp_path: Path
) -> None:
    own = {"local_steps": 2, "batch_size": 8} | keys.pop("method", {})
    run = hyperfed.train(method, out=tmp_path, rounds=4, method=own, **SMALL | keys)
    before = {path: path.read_bytes() for path in run.folder.path.glob("*.*")}
    with pytest.raises(UserError, match=said):
        hyperfed.resume(run.folder.path, rounds=rounds)
    assert {path: path.read_bytes() for path in run.folder.path.glob("*.*")} == before


def test_a_record_without_a_checkpoint_stays_a_record(tmp_path: Path) -> None:
    run = train("fedavg", tmp_path, 4)
    shutil.rmtree(run.folder.path / "checkpoint")
    with pytest.raises(UserError, match="checkpoint"):
        hyperfed.resume(run.folder.path, rounds=8)
    assert (run.folder.path / "summary.json").exists()
    assert hyperfed.compare(run.folder.path)["rounds"].tolist() == [4]

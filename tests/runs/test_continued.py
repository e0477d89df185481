"""A run goes on where, how and for as long as it is told; what it trains stays what it was."""

from pathlib import Path
from typing import Any

import pytest

import hyperfed
from hyperfed.apps import cli
from hyperfed.errors import UserError
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig

KEYS: dict[str, Any] = {
    "rounds": 4,
    "evaluate_every": 1,
    "checkpoint_every": 3,
    "cohort": 3,
    "task": {"clients": 6, "novel": 2, "model": "mlp", "hidden": [4]},
    "method": {"local_steps": 2, "batch_size": 8},
    "track": "none",
}


def stopped(folder: Path, **keys: Any) -> Path:
    """Trains two rounds of four."""
    run = Run.start(config.from_keys("fedper", KEYS | keys), folder)
    for progress in run.train():
        if progress.round == 2:
            run.stop()
    run.close()
    assert run.folder is not None
    return run.folder.path


def settings(path: Path) -> dict[str, Any]:
    return config.flat(config.to_dict(config.load(str(path / "config.toml"))))


def test_a_killed_run_is_opened_as_of_its_checkpoint(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("fedper", KEYS | {"checkpoint_every": 2}), tmp_path)
    rounds = run.train()
    assert [next(rounds).round for _ in range(3)] == [1, 2, 3]
    rounds.close()
    run.close()
    assert run.folder is not None
    opened = Run.open(run.folder.path)
    assert opened.round == 2
    assert {e.round for e in opened.evaluations} == {1, 2}


def test_the_time_before_counts(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path)
    for progress in run.train():
        if progress.round == 2:
            run._earlier = 1000.0
            run.stop()
    run.close()
    assert run.folder is not None
    resumed = hyperfed.resume(run.folder.path, progress=False)
    assert resumed.summary["seconds"] > 1000
    later = [e.seconds for e in resumed.evaluations if e.round > 2]
    assert later
    assert min(later) > 1000


def test_a_run_at_sites_ends_after_the_rounds_that_it_began_with() -> None:
    flower = {"name": "flower", "superlink": "127.0.0.1:1"}
    begun = config.from_keys("fedper", KEYS | {"engine": flower})
    with pytest.raises(UserError, match=r"which is at sites, came 6; start a new run"):
        config.continued(begun, {"rounds": 6})


def test_it_goes_on_with_what_it_is_told_and_comes_to_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = hyperfed.train("fedper", progress=False, **KEYS)
    path = stopped(tmp_path)
    before = settings(path)
    engine = {"name": "vmap", "chunk": 2}
    run = hyperfed.resume(path, progress=False, engine=engine, checkpoint_every=1, rounds=5)
    changed = {
        "engine.name": "vmap",
        "engine.chunk": 2,
        "checkpoint_every": 1,
        "rounds": 5,
    }
    assert settings(path) == before | changed
    assert run.engine.name == "vmap"
    told = [record.message for record in caplog.records if "goes on with" in record.message]
    was = {key: before[key] for key in changed} | {"engine.chunk": "none"}  # as one would write it
    assert sorted(told) == sorted(
        f"goes on with {key}={value}, was {was[key]}" for key, value in changed.items()
    )
    ours, theirs = (
        [e.client_accuracy for e in of.evaluations if e.split == "test" and e.round <= 4]
        for of in (run, whole)
    )
    assert ours == theirs


def test_a_run_without_a_checkpoint_goes_on_with_checkpoints_more_often(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("fedper", KEYS), tmp_path)
    training = run.train()
    next(training), next(training)
    run.close()
    assert run.folder is not None
    resumed = hyperfed.resume(run.folder.path, progress=False, checkpoint_every=1)
    assert [e.round for e in resumed.evaluations if e.split == "val"] == [1, 2, 3, 4]


@pytest.mark.parametrize("done", [False, True])
def test_one_that_was_killed_as_it_went_on_otherwise_can_be_gone_on_with(
    done: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"rounds": 5} if done else {"checkpoint_every": 1}
    run, dump = Run.start(config.from_keys("fedper", KEYS), tmp_path), config.dump
    for progress in run.train():
        if progress.round == 2 and not done:
            break  # before its first checkpoint
    run.close()
    assert run.folder is not None

    def killed(settings: RunConfig, path: Path) -> None:
        dump(settings, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        Run.resume(run.folder.path, changed=changed)
    monkeypatch.setattr(config, "dump", dump)
    resumed = hyperfed.resume(run.folder.path, progress=False)
    assert settings(run.folder.path).items() >= changed.items()
    assert resumed.summary["rounds"] == (5 if done else 4)


def code_of(*arguments: object) -> Any:
    with pytest.raises(SystemExit) as left:
        cli.main([*map(str, arguments)])
    return left.value.code


def test_the_engine_alone_is_named_by_a_word(tmp_path: Path) -> None:
    path = stopped(tmp_path)
    assert code_of("resume", path, "engine=vmap", "--quiet") == 0
    assert settings(path)["engine.name"] == "vmap"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["method.local_lr=1"], "method.local_lr: must begin with device or engine. or"),
        (["method=fedavg"], "method: must begin with"),
        (["seed=3", "cohort=2"], "has 2 errors"),
        (["task.clients=5"], "task.clients: must begin with"),
        (["engine.workers=0"], "engine.workers: "),
        (["checkpoint_every=none"], "checkpoint_every: "),
        (["device=3"], "came 3; name one: hyperfed resume RUN device=cpu"),
        (["rounds=many"], "rounds: "),
        (["rounds=4"], "more than its 4 rounds"),
        (["vmap"], "vmap: must be key=value"),
        (["engine=flower"], "must stay where its data are, at sites (engine=flower) or not"),
    ],
)
def test_what_it_cannot_go_on_with_is_refused_and_changes_nothing(
    asked: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stopped(tmp_path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert code_of("resume", path, *asked) == 2
    refused = capsys.readouterr()
    assert said in refused.err
    assert not refused.out
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_run_at_sites_stays_there() -> None:
    at_sites = config.from_keys("fedper", {"engine": "flower"})
    assert config.continued(at_sites, {"engine.timeout": 9}).engine.timeout == 9
    with pytest.raises(UserError, match="came engine=loop after flower"):
        config.continued(at_sites, {"engine.name": "loop"})


def test_a_device_has_the_engine_with_it_unless_that_is_told_too() -> None:
    keys = {"device": "cuda:63", "engine": {"name": "vmap", "graphs": True}}
    there = config.from_keys("fedper", keys)
    here = config.continued(there, {"device": "cpu"})
    assert (here.engine.name, here.engine.graphs) == ("vmap", False)
    back = config.continued(here, {"device": "cuda:63", "engine.graphs": True})
    assert back == there

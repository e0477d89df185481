"""What clients have let out is on the disk of their run, and of no other, before it is told."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hyperfed.errors import UserError
from hyperfed.runs import accounts as module
from hyperfed.runs.accounts import Accounts
from hyperfed.runs.config import from_keys
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.run import Run
from hyperfed.system.locks import is_held
from hyperfed.trees import Tree
from toys import make_task

KNOWN, NOVEL, DATA = 0, 3, "hash of data"


def let_out(*multipliers: float) -> Tree:
    return {"multipliers": torch.tensor(multipliers, dtype=torch.float64), "answers": {}}


def accounts(path: Path) -> Accounts:
    """Those of a run as a process has them that has just opened its folder."""
    folder = RunFolder(path)
    folder.state.parent.mkdir(parents=True, exist_ok=True)
    return Accounts(folder, cast(Any, SimpleNamespace(released={})), {})


def spent(of: Accounts) -> dict[int | str, list[float]]:
    """The multipliers of each client and each newcomer."""
    held: dict[int | str, Tree] = {**of.engine.released}
    held |= {who: newcomer[0] for who, newcomer in of.newcomers.items() if newcomer}
    return {who: tree["multipliers"].tolist() for who, tree in held.items()}


def test_what_a_trusted_server_tells_is_paid_for_on_the_disk(tmp_path: Path) -> None:
    ours = accounts(tmp_path)
    ours.engine.released |= {KNOWN: let_out(2.0), NOVEL: let_out(3.0, 4.0)}
    ours.told()
    theirs = accounts(tmp_path)
    theirs.read()
    assert spent(theirs) == {KNOWN: [2.0], NOVEL: [3.0, 4.0]}


def test_the_names_of_accounts_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(module, "sync", synced.append)
    ours = accounts(tmp_path)
    ours.told()
    with ours.serving():
        ours.newcomers[DATA] = {0: let_out(5.0)}
    assert synced == [ours.folder.released.parent, ours.folder.served.parent]


def test_what_is_let_out_in_serving_is_on_the_disk_though_it_fails(tmp_path: Path) -> None:
    ours, before = accounts(tmp_path), accounts(tmp_path)

    def serve() -> None:
        with ours.serving():
            ours.engine.released |= {KNOWN: let_out(1.0), NOVEL: let_out(2.0)}
            ours.newcomers[DATA] = {0: let_out(5.0)}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    for theirs in (before, accounts(tmp_path)):
        theirs.read()
        assert spent(theirs) == {KNOWN: [1.0], NOVEL: [2.0], DATA: [5.0]}


def test_of_two_accounts_of_a_client_the_one_of_more_answers_is_taken(tmp_path: Path) -> None:
    ours = accounts(tmp_path)
    with ours.serving():
        ours.engine.released[NOVEL] = let_out(2.0, 3.0)
        ours.newcomers[DATA] = {0: let_out(5.0)}
    theirs = accounts(tmp_path)
    theirs.engine.released[NOVEL] = let_out(2.0)
    theirs.newcomers[DATA] = {0: let_out(5.0, 6.0)}
    with theirs.serving():
        assert spent(theirs) == {NOVEL: [2.0, 3.0], DATA: [5.0, 6.0]}
    ours.told()
    theirs.engine.released = {NOVEL: let_out(2.0, 3.0, 4.0)}  # of a later checkpoint
    theirs.read()
    assert spent(theirs)[NOVEL] == [2.0, 3.0, 4.0]


def test_who_serves_keeps_others_waiting_until_all_is_written(tmp_path: Path) -> None:
    ours = accounts(tmp_path)
    place = ours.folder.served.parent

    def serve() -> None:
        with ours.serving():
            assert is_held(place)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        serve()
    assert not is_held(place)


def test_where_nothing_is_let_out_nothing_is_written(tmp_path: Path) -> None:
    ours = accounts(tmp_path)
    with ours.serving():
        ours.newcomers[DATA] = {0: let_out(5.0)}
    written = ours.folder.served.stat()
    with accounts(tmp_path).serving():
        pass
    assert ours.folder.served.stat() == written


def test_who_serves_waits_for_another_and_goes_on_from_what_that_one_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = accounts(tmp_path), accounts(tmp_path)
    asked, flock = Event(), fcntl.flock

    def noted(file: int, how: int) -> None:
        asked.set()
        assert not how & fcntl.LOCK_NB  # which would raise where this waits
        flock(file, how)

    def serve() -> None:
        with theirs.serving():
            theirs.newcomers[DATA][0]["multipliers"] *= 2

    with ThreadPoolExecutor(1) as pool:
        with ours.serving():
            monkeypatch.setattr(fcntl, "flock", noted)
            waiting = pool.submit(serve)
            assert asked.wait(60)
            ours.newcomers[DATA] = {0: let_out(5.0)}
        waiting.result(60)
    assert spent(theirs) == {DATA: [10.0]}


def test_what_a_killed_run_told_before_its_first_checkpoint_stays_told(tmp_path: Path) -> None:
    private = {"epsilon": 8.0, "where": "central"}
    settings = {"rounds": 2, "cohort": 2, "method": {"local_steps": 1}, "privacy": private}
    run = Run.start(from_keys("fedavg", settings), tmp_path, make_task())
    assert run.folder is not None
    run.engine.released[KNOWN] = let_out(2.0)
    run._accounts(run.folder).told()
    assert not run.folder.has_checkpoint
    resumed = Run.resume(run.folder.path, make_task())
    assert resumed.engine.released[KNOWN]["multipliers"].tolist() == [2.0]


def test_an_account_is_that_of_one_run(tmp_path: Path) -> None:
    ours, others = accounts(tmp_path / "a"), accounts(tmp_path / "b")
    with ours.serving():
        ours.engine.released[NOVEL] = let_out(2.0)
        ours.newcomers[DATA] = {0: let_out(5.0)}
    ours.told()
    others.read()
    with others.serving():
        assert spent(others) == {}


@pytest.mark.parametrize("name", ["released", "served"])
def test_a_link_to_an_account_that_is_away_is_no_account_of_nothing(
    name: str, tmp_path: Path
) -> None:
    ours = accounts(tmp_path)
    getattr(ours.folder, name).symlink_to(tmp_path / "a disk that is away")
    with pytest.raises(UserError, match=f"no .*{name}"):
        ours.read()

"""hyperfed move: a client belongs to another key from now on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import command
from engines.flower.test_sites import PUBLIC
from hyperfed.apps.flower import commands
from hyperfed.data.roster import Introduction, Member, Roster, enrol, joined
from hyperfed.system.locks import Lock

NAME = "SHA256:Q1UdGA8DZpeQKma5MYVMAxB09bxzJEXNYH9kGfpRRvI"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    members = (Member("ann", 3, 1, 1), Member("bob", 3, 1, 1))
    said = Introduction(members, (5,), "torch.float32", 3)
    enrol([said], run=1, keys={"ann": "A", "bob": "B"}).save(tmp_path / "sites.json")
    (tmp_path / "node.pub").write_bytes(PUBLIC)
    return tmp_path


def test_a_client_is_moved_to_the_key_of_its_new_site(folder: Path, capsys: Any) -> None:
    assert command("move", str(folder), "ann", "--key", str(folder / "node.pub")) == 0
    assert capsys.readouterr().out == f"ann belongs to {NAME}, before: A\n"
    assert Roster.read(folder / "sites.json").keys == {"ann": NAME, "bob": "B"}


def test_who_came_when_the_run_was_over_is_moved_too(folder: Path, capsys: Any) -> None:
    said = Introduction((Member("eve", 3, 1, 1, novel=True),), (5,), "torch.float32", 3)
    roster = Roster.read(folder / "sites.json")
    everyone, refused = joined(roster, [said], run=2, keys={"eve": "E"})
    everyone.save(folder / "newcomers.json")
    assert refused == {}
    assert command("move", str(folder), "bob", "eve", "--key", str(folder / "node.pub")) == 0
    told = [f"bob belongs to {NAME}, before: B", f"eve belongs to {NAME}, before: E"]
    assert capsys.readouterr().out.splitlines() == told
    keys = {"ann": "A", "bob": NAME}
    assert Roster.read(folder / "sites.json").keys == keys
    assert Roster.read(folder / "newcomers.json").keys == keys | {"eve": NAME}


def test_what_cannot_be_moved_is_told(folder: Path, capsys: Any) -> None:
    before = (folder / "sites.json").read_bytes()
    key = str(folder / "node.pub")
    lock = Lock(folder)
    for arguments, message in (
        ((str(folder), "cem", "--key", key), "but cem is not"),
        ((str(folder), "ann", "--key", str(folder / "sites.json")), "must be a public key"),
        ((str(folder), "ann", "--key", str(folder / "none.pub")), "must be a public key"),
        ((str(folder / "none"), "ann", "--key", key), "must be readable"),
        ((str(folder), "ann", "--key", key), "one process at a time"),
    ):
        assert command("move", *arguments) == 2
        assert message in capsys.readouterr().err
    lock.release()
    assert (folder / "sites.json").read_bytes() == before


def test_another_move_just_before_is_not_undone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Lock):
        """Another process was faster."""

        def __init__(self, run_dir: Path) -> None:
            roster = Roster.read(run_dir / "sites.json")
            replace(roster, keys={**roster.keys, "bob": "C"}).save(run_dir / "sites.json")
            super().__init__(run_dir)

    monkeypatch.setattr(commands, "Lock", Late)
    assert command("move", str(folder), "ann", "--key", str(folder / "node.pub")) == 0
    assert Roster.read(folder / "sites.json").keys == {"ann": NAME, "bob": "C"}

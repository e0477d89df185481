"""What a site notes of what it was asked, and how often it has evaluated."""

import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engines.flower.policed import HONEST, MODEL, TASK, asked, site_in
from hyperfed.engines.flower import diary
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.errors import UserError
from hyperfed.methods import fedavg
from hyperfed.training import Steps


def test_a_client_is_evaluated_so_often_a_day_in_all_runs_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = ["2026-01-01"] * 4 + ["2025-12-31", "2026-01-02"]
    answers = []
    for serial, day in enumerate(days, 1):
        with monkeypatch.context() as then:
            then.setattr(diary, "datetime", _Frozen(day))
            limited = site_in(tmp_path, evaluations_per_day=2)
            answers.append(asked(limited, "evaluate", serial=serial, run=serial, session=serial))
    answered = [isinstance(answer, dict) for answer in answers]
    assert answered == [True, True, False, False, False, True]
    assert str(answers[3]).endswith("a client must be evaluated 2 times a day at most")
    assert (
        "and evaluations.json of its site's state counts on until 2026-01-01, which its clock has"
    ) in str(answers[4])
    (tmp_path / "evaluations.json").unlink()
    with monkeypatch.context() as then:
        then.setattr(diary, "datetime", _Frozen("2025-12-31"))
        again = asked(site_in(tmp_path, evaluations_per_day=2), "evaluate", serial=8, session=8)
    assert isinstance(again, dict)
    other = asked(site_in(tmp_path, evaluations_per_day=2), "evaluate", 1, serial=9, session=99)
    assert isinstance(other, dict)


@pytest.mark.parametrize(
    ("written_by", "write"),
    [
        ("atomic_write", lambda of_site: of_site.evaluate("a")),
        ("append_line", lambda of_site: of_site.note(decision="answered")),
    ],
)
def test_two_processes_write_one_by_one(
    written_by: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or both read a count before either writes it, or begin a log and cut off each other's."""
    waits = []

    def written_while_others_wait(path: Path, content: bytes) -> None:
        with (tmp_path / "lock").open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits.append(content)

    monkeypatch.setattr(diary, written_by, written_while_others_wait)
    write(diary.Diary(tmp_path, Policy()))
    assert len(waits) == 1


@pytest.mark.parametrize("name", ["evaluations.json", "run-1/latest.json"])
def test_a_link_to_what_is_gone_is_not_taken_for_nothing(name: str, tmp_path: Path) -> None:
    assert isinstance(asked(site_in(tmp_path, evaluations_per_day=1), "evaluate"), dict)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/a/disk/that/is/away")
    told = asked(site_in(tmp_path, evaluations_per_day=1), "evaluate", serial=2)
    assert str(told) == "FileNotFoundError: its site's audit log says more"


class _Frozen:
    """A clock that stands."""

    def __init__(self, day: str) -> None:
        self._day = day

    def now(self, zone: Any) -> Any:
        return datetime.fromisoformat(self._day)


def test_the_audit_log_says_what_was_asked_and_is_never_rewritten(tmp_path: Path) -> None:
    here = site_in(tmp_path, largest_log=700)
    for serial in range(1, 6):
        asked(here, batches=HONEST, serial=serial)
    files = sorted(tmp_path.glob("audit*.jsonl"))
    entries = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert len(files) > 1
    assert [entry["message"] for entry in sorted(entries, key=lambda e: e["message"])] == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip
    size = sum(leaf.numel() * leaf.element_size() for leaf in MODEL.values())
    assert {**entries[0], "time": "", "message": 0} == {
        "time": "",
        "run": 1,
        "session": 10,
        "message": 0,
        "round": 0,
        "client": "000000",
        "step": "train_model",
        "bytes_in": size,
        "bytes_out": size,
        "examples": 12,
        "decision": "answered",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_nothing_is_answered_that_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise UserError("no space left")

    monkeypatch.setattr(diary, "append_line", full)
    with pytest.raises(UserError, match="no space left"):
        asked(site_in(tmp_path), batches=HONEST)


def test_without_a_policy_nothing_is_noted(tmp_path: Path) -> None:
    bare = Site(Shard(TASK, range(4)), tmp_path, fedavg.Client, fedavg.Config(), seed=0)
    assert isinstance(asked(bare, batches=Steps(1, 1)), dict)
    assert not (tmp_path / "audit.jsonl").exists()

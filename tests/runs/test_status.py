"""What a run says of itself while it trains, and what ``hyperfed status`` makes of it."""

import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import command
from engines.flower.sites import DirectLink, remote, sites_of
from hyperfed import privacy
from hyperfed.apps.status import lasting
from hyperfed.engines.flower import diary, store
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.replies import NoAnswerError
from hyperfed.methods import METHODS
from hyperfed.runs import config, status
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.run import Run
from toys import make_task

KEYS: dict[str, Any] = {
    "rounds": 4,
    "cohort": 1.0,
    "evaluate_every": 2,
    "method": {"local_steps": 1},
    "track": "none",
}


def run_in(folder: Path, method: str = "fedavg", **keys: Any) -> Run:
    return Run.start(config.from_keys(method, KEYS | keys), folder, make_task())


def place(run: Run) -> RunFolder:
    assert run.folder is not None
    return run.folder


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every status that is written, in order, however fast its run is."""
    found: list[dict[str, Any]] = []

    def write(path: Path, content: bytes) -> None:
        assert path.name == "status.json"
        path.write_bytes(content)
        found.append(json.loads(content))

    monkeypatch.setattr(status, "atomic_write", write)
    monkeypatch.setattr(status, "PAUSE", 0.0)
    return found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0.0 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"),
        (3600, "1 h 0 min"), (86399, "23 h 59 min"), (86400, "1 d 0 h"), (183600, "2 d 3 h"),
    ],
)  # fmt: skip
def test_a_time_is_told_in_two_of_its_units(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def test_a_run_says_when_each_round_and_evaluation_begins_and_how_it_ends(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    run = run_in(tmp_path)
    run._bytes["up"] = 5  # or both ways would have the same
    both = {progress.round: dict(run.bytes) for progress in run.train()}
    assert [(it["state"], it["round"]) for it in written] == [
        ("training", 0), ("training", 1), ("evaluating", 2), ("training", 2), ("training", 3),
        ("evaluating", 4), ("evaluating", 4), ("done", 4),
    ]  # fmt: skip
    for way in ("down", "up"):
        assert [it[f"bytes_{way}"] for it in written[1:3]] == [both[1][way], both[2][way]]
    assert written[0]["seconds_per_round"] is None
    each, left = written[3]["seconds_per_round"], written[3]["seconds_left"]
    assert each > 0
    assert left == pytest.approx(2 * each)
    assert (written[-1]["sites"], written[-1]["epsilon_spent"]) == (None, None)


def test_quick_rounds_are_not_kept_waiting_by_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, times = 100.0, []
    monkeypatch.setattr(status, "monotonic", lambda: now)
    monkeypatch.setattr(status, "atomic_write", lambda path, content: times.append(now))
    for _ in run_in(tmp_path).train():
        now += 0.6
    # Rounds begin at 100, 100.6, 101.2 and 101.8, the last evaluation at 102.4; the end is told.
    assert times == pytest.approx([100.0, 101.2, 102.4, 102.4])


def test_news_is_due_within_three_times_the_longest_round_since_the_run_goes_on(
    tmp_path: Path, written: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, took = 100.0, {1: 2.0, 2: 5000.0, 3: 1.0}
    monkeypatch.setattr(status, "monotonic", lambda: now)
    run = run_in(tmp_path, rounds=5, evaluate_every=5, engine={"timeout": 50.0})
    for progress in run.train():
        now += took[progress.round]
        if progress.round == 3:
            run.stop()
    told = {it["round"]: it["patience"] for it in written}
    assert told == {0: 600, 1: 600, 2: 15000, 3: 15000}
    written.clear()
    for _ in Run.resume(place(run).path, make_task()).train():
        now += 8.0
    assert [it["seconds_per_round"] for it in written[:2]] == [None, 8.0]
    assert {it["patience"] for it in written} == {600}


def test_what_a_private_run_has_spent_is_that_of_the_client_with_most(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    run = run_in(tmp_path, rounds=2, cohort=2, privacy={"epsilon": 8.0})
    for _ in run.train():
        pass
    spent = privacy.spent(run.engine.released.values(), 1e-3)["epsilon_spent"]
    assert 0 < spent <= 8
    assert written[-1]["epsilon_spent"] == pytest.approx(spent)
    assert written[0]["epsilon_spent"] == 0.0
    # Fewer answers can be more: those with less noise.
    run.engine.released.clear()
    kept = ([3.0, 3.0, 3.0], [1.5])
    for client, told in enumerate(kept):
        run.engine.released[client] = {"multipliers": torch.tensor(told, dtype=torch.float64)}
    run._reporter.tell("done")
    spent = privacy.spent([run.engine.released[1]], 1e-3)["epsilon_spent"]
    assert written[-1]["epsilon_spent"] == pytest.approx(spent)


def test_the_sites_of_a_federation_are_told_and_who_was_lost_there(
    tmp_path: Path, written: list[dict[str, Any]], capsys: Any
) -> None:
    task = make_task()
    method, loaded = METHODS["fedavg"], config.from_keys("fedavg", KEYS | {"engine": "flower"})
    sites = sites_of(task, method, loaded.settings, tmp_path, {1: [0, 1], 2: [2]})
    link = DirectLink(sites)
    run = Run.start(loaded, tmp_path, remote(task, link, sites))
    for progress in run.train():
        if progress.round == 1:
            link.broken[2] = lambda site, content: NoAnswerError("\x1b[31mno\n" + "x" * 10**6)
        if progress.round == 2:
            del link.broken[2]
        if progress.round == 3:
            del link.sites[2]
    told = {it["round"]: it for it in written if it["state"] == "training"}
    assert [told[done]["lost"] for done in range(4)] == [0, 0, 1, 0]
    assert told[0]["sites"] == {"answering": 0, "asked": 0}
    assert told[1]["sites"] == {"answering": 2, "asked": 2}
    assert told[2]["sites"] == {"answering": 1, "asked": 2}
    (name,) = told[2]["reasons"]
    assert (name, len(told[2]["reasons"][name])) == ("2", 500)
    assert told[2]["reasons"][name].startswith("\\x1b[31mno\\nxxx")
    assert told[3]["sites"] == {"answering": 2, "asked": 2}
    assert written[-1]["sites"] == {"answering": 1, "asked": 2}
    assert written[-1]["reasons"] == {"2": "its site is not connected"}
    assert command("status", str(place(run).path)) == 0
    said = capsys.readouterr().out
    assert "done: round 4 of 4 of fedavg, engine flower" in said
    assert "sites: 1 of 2 answering" in said
    assert "  2: its site is not connected" in said


def test_a_run_that_fails_or_is_stopped_says_so(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = run_in(tmp_path / "a")
    for _ in stopped.train():
        stopped.stop()
    assert command("status", str(place(stopped).path)) == 3
    assert "stopped: round 1 of 4" in capsys.readouterr().out

    left = run_in(tmp_path / "b")
    training = left.train()
    next(training)
    training.close()
    assert command("status", str(place(left).path)) == 3

    failed = run_in(tmp_path / "c")

    def fail(cohort: Any) -> None:
        raise ZeroDivisionError("\x1b[31m" + "y" * 10**6)

    monkeypatch.setattr(failed.server, "round", fail)
    with pytest.raises(ZeroDivisionError):
        list(failed.train())
    assert command("status", str(place(failed).path)) == 1
    said = capsys.readouterr().out
    assert "failed: round 0 of 4" in said
    assert "error: ZeroDivisionError: \\x1b[31myyy" in said
    assert len(said) < 1000


def test_a_writer_that_is_gone_or_silent_makes_a_status_stale(tmp_path: Path, capsys: Any) -> None:
    run = run_in(tmp_path)
    training = run.train()
    next(training)
    folder = place(run)
    assert command("status", str(folder.path)) == 0  # it holds the lock
    assert capsys.readouterr().out.startswith("training: round 0 of 4")
    found, soon = status.read(folder), timedelta(seconds=1)
    due = found.time + timedelta(seconds=found.patience)
    assert status.stale(found, folder, due - soon) == ""
    assert "there must be news within 3600 s" in status.stale(found, folder, due + soon)
    before = folder.status.read_bytes()
    training.close()
    assert found.patience == 6 * run.config.engine.timeout

    folder.status.write_bytes(before)  # what a killed process leaves; its lock is free
    assert command("status", str(folder.path)) == 1
    said = capsys.readouterr().out
    assert said.startswith("stale, was training: round 0 of 4")
    assert f"at {found.time.astimezone():%Y-%m-%d %H:%M:%S}" in said
    assert "the process that wrote it is gone" in said
    assert command("status", str(folder.path), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["stale"]) == ("training", "the process that wrote it is gone")

    resumed = Run.resume(folder.path, make_task())
    for _ in resumed.train():
        pass
    assert command("status", str(folder.path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["stale"] == ""
    # Where no lock tells, time does.
    shutil.copytree(folder.path, tmp_path / "copy")
    (tmp_path / "copy" / ".lock").unlink()
    copied = RunFolder(tmp_path / "copy")
    assert status.stale(found, copied, due - soon) == ""
    assert status.stale(found, copied, due + soon)


def test_a_status_that_no_disk_takes_ends_no_run(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    place(run).status.mkdir()
    for _ in run.train():
        pass
    assert run.summary


def edited(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda found: json.dumps(json.loads(found) | changes).encode()


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda found: b"",
    "no JSON": lambda found: b"\x00" + found,
    "no text": lambda found: b"\xff\xfe" + found,
    "brackets": lambda found: b"[" * 100_000,
    "a list": lambda found: b"[]",
    "a state of no name": edited(state="\x1b[31mfine"),
    "a round below zero": edited(round=-1),
    "a round in words": edited(round="four"),
    "10^30 rounds": edited(rounds=10**30, round=10**31),
    "a round beyond the last": edited(round=5),
    "no time": edited(time="yesterday"),
    "a time without a zone": edited(time="2026-01-01T00:00:00"),
    "a time of no calendar": edited(time="99999-01-01T00:00:00Z"),
    "bytes below zero": edited(bytes_up=-1),
    "seconds of no number": lambda found: found.replace(b'"seconds": ', b'"seconds": NaN, "x": '),
    "infinite patience": lambda found: found.replace(b'"patience": ', b'"patience": 1e999, "x": '),
    "a key of its own": edited(evil=1),
    "reasons in a list": edited(reasons=["no"]),
    "sites in words": edited(sites="two"),
    "an epsilon below zero": edited(epsilon_spent=-1.0),
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_in(tmp_path_factory.mktemp("done"), rounds=1)
    for _ in run.train():
        pass
    return place(run).path


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_status_is_told_in_one_error(
    what: str, done: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "status.json").write_bytes(EDITS[what]((done / "status.json").read_bytes()))
    assert command("status", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert len(err) < 500
    assert "\x1b" not in err


def test_what_somebody_wrote_into_a_status_is_shown_as_one_line(
    done: Path, tmp_path: Path, capsys: Any
) -> None:
    found = (done / "status.json").read_bytes()
    evil = "\x1b[31m\n" + "z" * 10**4
    reasons = {f"{number}{evil}": evil for number in range(30)}
    changed = edited(state="failed", error=evil, method=evil, engine=evil, reasons=reasons)
    (tmp_path / "status.json").write_bytes(changed(found))
    assert command("status", str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 26
    assert len(out) < 20_000
    assert command("status", str(tmp_path), "--json") == 1
    assert len(capsys.readouterr().out) < 40_000


def test_a_run_without_a_status_is_told_so(tmp_path: Path, capsys: Any) -> None:
    assert command("status", str(tmp_path)) == 2
    assert "has one from its first round on" in capsys.readouterr().err


def test_a_site_says_when_it_was_asked_last_and_what_it_refused_today(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, zone: Any = None) -> "Clock":
            return cls(2026, 5, cls.day, 12, 30, tzinfo=UTC)

    monkeypatch.setattr(diary, "datetime", Clock)
    book = diary.Diary(tmp_path, Policy(largest_log=150))  # a file for every two lines
    for day, decision in [
        (1, "refused: of yesterday"), (1, "answered"), (2, "refused: too small"), (2, "answered"),
        (2, "refused: too small"), (2, "UserError: \x1b[31mfull"), (2, "refused: a"),
    ]:  # fmt: skip
        Clock.day = day
        book.note(client="ann", decision=decision)
        os.utime(tmp_path / "audit.jsonl", (Clock.now().timestamp(),) * 2)
    assert len(list(tmp_path.glob("audit*.jsonl"))) > 1
    assert command("status", str(tmp_path)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "last message: 2026-05-02T12:30:00+00:00",
        "today (UTC): 5 calls of clients, 3 of them refused",
        "  2 times refused: too small",
        "  1 times UserError: \\x1b[31mfull",
        "  1 times refused: a",
    ]
    assert command("status", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["refused"] == 3


def test_a_site_that_nobody_has_asked_yet_is_one(tmp_path: Path, capsys: Any) -> None:
    store.check_state(tmp_path)
    assert command("status", str(tmp_path)) == 0
    said = ["last message: none", "today (UTC): 0 calls of clients, 0 of them refused"]
    assert capsys.readouterr().out.splitlines() == said
    diary.Diary(tmp_path, Policy()).note(client="ann", decision="answered")
    store.check_state(tmp_path)  # it starts anew
    assert diary.told_by(tmp_path).last
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [b'{"time": "2026-05-0', b"\xff", b"\0" * 100, b"evil"])
def test_a_line_that_a_machine_died_over_hides_no_other(
    torn: bytes, tmp_path: Path, capsys: Any
) -> None:
    book = diary.Diary(tmp_path, Policy())
    book.note(decision="answered")
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(torn)
    book.note(decision="refused: a")
    assert command("status", str(tmp_path)) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "today (UTC): 2 calls of clients, 1 of them refused",
        "  1 times refused: a",
        "lines of the audit log that are none: 1; did the machine die over them?",
    ]
    assert command("status", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["torn"] == 1


@pytest.mark.parametrize(
    "line", [b"[]", b"[" * 10**5, b"{}", b'{"time": "\\n", "decision": "\\n"}']
)
def test_an_edited_audit_log_is_told_in_one_error(line: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "audit.jsonl").write_bytes(line + b"\n")
    assert command("status", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert (err[:7], len(err.splitlines())) == ("error: ", 1)

"""Who submits a run to a SuperLink: how it is reached, what is told of the run, and how it ends."""

import io
import os
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finished_runs import evaluation
from hyperfed.apps.flower import submit
from hyperfed.errors import UserError
from hyperfed.runs import config
from hyperfed.runs import progress as telling
from hyperfed.runs.progress import heard_failure, spoken, spoken_failure
from hyperfed.runs.records import Lost
from hyperfed.runs.run import Progress
from hyperfed.system import signals, toml

pytest.importorskip("flwr")


from commands import command
from engines.flower.sites import DirectLink
from engines.flower.test_sites import PUBLIC
from hyperfed.apps.flower import app
from hyperfed.apps.flower.app import run_settings


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", str(tmp_path))
    assert command("run", "pefll", "engine=flower", *out) == 2
    assert "set engine.superlink=HOST:PORT" in capsys.readouterr().err
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    assert command("run", "pefll", *link, "engine.root_certificates=none.crt", *out) == 2
    assert f"there is no {Path.cwd()}/none.crt" in capsys.readouterr().err
    monkeypatch.setattr(submit, "find_spec", lambda name: None)
    assert command("run", "pefll", *link, *out) == 2
    assert "pip install 'flwr==" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert command("run", "pefll", "engine=loop", "rounds=x") == 2


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:9093", True),
        ("[::1]:9093", True),
        ("LocalHost:9093", True),
        ("fed.example.org:9093", False),
        ("localhost.example.org:9093", False),
        ("192.0.2.7:9093", False),
        ("[2001:db8::7]:9093", False),
    ],
)
def test_what_leaves_this_host_is_encrypted(address: str, here: bool, tmp_path: Path) -> None:
    def reached(*settings: str) -> Any:
        keys = ["engine=flower", f"engine.superlink={address}", *settings]
        loaded = config.load("pefll", keys)
        connection = submit.SuperLink.of(loaded).connection()
        return loaded.engine.encrypts, tomllib.loads(connection)["superlink"]["run"]

    assert reached() == (not here, {"address": address, "insecure": here})
    (tmp_path / "ca.crt").touch()
    known = {"root-certificates": f"{tmp_path}/ca.crt", "insecure": False, "address": address}
    assert reached(f"engine.root_certificates={tmp_path}/ca.crt") == (True, known)


def test_where_flowers_own_command_says_where_it_is_nodes_have_their_keys() -> None:
    assert config.load("pefll", ["engine=flower"]).engine.encrypts


@pytest.mark.parametrize(
    ("address", "keyed"), [("fed.example.org:1", True), ("127.0.0.1:1", False)]
)
def test_a_nodes_key_says_who_it_is_where_what_it_sends_is_encrypted(
    address: str, keyed: bool
) -> None:
    """Without, it has another one whenever it starts."""
    one = SimpleNamespace(node_id=7, registered_at="", public_key=PUBLIC)
    grid = SimpleNamespace(get_nodes=lambda: [one])
    settings = config.load("fedavg", ["engine=flower", f"engine.superlink={address}"])
    (key,) = app._link(grid, settings).nodes().values()
    assert key.startswith("SHA256:") == keyed
    assert bool(key) == keyed


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 3), ("stopped", 3)])
def test_the_exit_code_is_that_of_the_run_and_not_of_flwr(
    status: str, code: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def flwr(home: Path, *arguments: str) -> Any:
        asked.append(arguments[0])
        if arguments[0] == "run":
            assert (home / "config.toml").exists()
            given = tomllib.loads(Path(arguments[-1]).read_text())
            assert run_settings(given).method == "pefll"
            return {"success": True, "run-id": "12"}
        ended = asked.count("ls") > 1
        return {"runs": [{"status": f"finished:{status}" if ended else "running"}]}

    lines = ["INFO : Start", spoken_failure(UserError("no site:\n- \x1b[31mann")), "ERROR : exit"]

    def program(*arguments: str) -> list[str]:
        asked.append(" ".join(arguments))
        return ["printf", "%s\\n", *(lines if status == "failed" else lines[:1])]

    monkeypatch.setattr(submit, "_flwr", flwr)
    monkeypatch.setattr(submit, "_program", program)
    monkeypatch.setattr(submit, "POLL", 1)
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: asked.append("wait"))
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    assert command("run", "pefll", *link, "--out", str(tmp_path)) == code
    said = capsys.readouterr()
    begun, ended = asked[:5], [what for what in asked[5:] if what != "wait"]  # for a process's end
    assert begun == ["run", "wait", "ls", "wait", "ls"]
    assert ended == ["log 12 run --stream"] * bool(code)
    assert ("is finished:failed: no site:\n- \\x1b[31mann; go on" in said.err) == (
        status == "failed"
    )
    assert ("is finished:stopped; the SuperLink's log" in said.err) == (status == "stopped")
    (folder,) = (tmp_path / "pefll").iterdir()
    assert str(folder) in said.out
    known = f"run 12 at 127.0.0.1:1; Ctrl-C stops it; its records on that host: {folder}\n"
    assert said.err.startswith(known)
    assert ("hyperfed resume" in said.err) == bool(code)
    assert config.load(str(folder / "config.toml")).engine.name == "flower"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (["running"] * 15 + ["finished:completed"], 0),
        ([*[""] * 9, "running", *[""] * 9, "finished:completed"], 0),
        ([""] * 10, 3),
    ],
    ids=["long", "silent for a while", "silent for too long"],
)
def test_a_run_is_out_of_sight_where_nothing_is_told_of_it_ten_times_in_a_row(
    told: list[str], code: int, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(told)

    def flwr(home: Path, *arguments: str) -> Any:
        return (
            {"success": True, "run-id": "12"}
            if arguments[0] == "run"
            else {"runs": [{"status": next(left)}]}
        )

    monkeypatch.setattr(submit, "_flwr", flwr)
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    assert command("run", "pefll", *link, "--quiet", "--out", str(tmp_path)) == code
    said = capsys.readouterr().err
    assert ("out of sight" in said) == bool(code)
    assert bool(said) == bool(code)  # quiet: nor what the run is
    assert not list(left)


def test_ctrl_c_stops_the_run_that_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def flwr(home: Path, *arguments: str) -> Any:
        asked.append(arguments)
        return {"success": True, "run-id": "12"}

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "_flwr", flwr)
    monkeypatch.setattr(submit.time, "sleep", interrupted)
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    assert command("run", "pefll", *link, "--out", str(tmp_path))
    assert asked[1:] == [("stop", "12", "run")]


def test_why_a_run_failed_is_told_by_the_superlink_where_its_log_does_not(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    details = "ServerApp failed:\n\x1b[31mits disk is full"
    ended = {"status": "finished:failed", "status-details": details}
    monkeypatch.setattr(
        submit, "_flwr", lambda home, *_: {"success": True, "run-id": "12", "runs": [ended]}
    )
    monkeypatch.setattr(submit, "_program", lambda *arguments: ["true"])
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    assert command("run", "pefll", *link, "--out", str(tmp_path)) == 3
    said = capsys.readouterr().err
    assert "is finished:failed: ServerApp failed:\\n\\x1b[31mits disk is full; go on" in said


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Of whoever starts the tests, such as nohup, they may ignore signals."""
    ending = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ending}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("number", [*signals.STOPPING, signal.SIGHUP])
def test_a_run_is_stopped_by_what_comes_while_it_is_submitted_or_waited_for(
    number: signal.Signals, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is submitted would train on, and nobody would know its number."""
    asked: list[str] = []
    when = ""

    def flwr(home: Path, *arguments: str) -> Any:
        asked.append(" ".join(arguments))
        assert len(asked) < 10, "it is waited for"
        if arguments[0] == when:
            os.kill(os.getpid(), number)
        return {"success": True, "run-id": "12", "runs": [{"status": "running"}]}

    monkeypatch.setattr(submit, "_flwr", flwr)
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    handlers = [signal.getsignal(each) for each in (*signals.STOPPING, signal.SIGHUP)]
    for when in ("run", "ls"):
        asked.clear()
        assert command("run", "pefll", *link, "--out", str(tmp_path)) == 3
        assert asked[-1] == "stop 12 run"
        assert len(asked) == {"run": 2, "ls": 3}[when]
        assert "stopped; go on with: hyperfed resume" in capsys.readouterr().err
    assert [signal.getsignal(each) for each in (*signals.STOPPING, signal.SIGHUP)] == handlers


def test_ctrl_c_reaches_no_program_of_flowers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends it to all processes of a group: what submits a run would not tell of it."""
    group = "import json, os; print(json.dumps({'group': os.getpgid(0)}))"
    monkeypatch.setattr(submit, "_program", lambda *arguments: [sys.executable, "-c", group])
    assert submit._flwr(tmp_path, "run")["group"] != os.getpgid(0)


def test_a_lost_terminal_stops_nothing_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.terminable():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_certificates_of_a_run_are_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ca.crt").touch()
    monkeypatch.chdir(tmp_path)
    link = ("engine=flower", "engine.superlink=a:1", "engine.root_certificates=ca.crt")
    loaded = config.load("pefll", link)
    folder = submit.folder_for(loaded, tmp_path, "")
    monkeypatch.chdir("/")
    again = submit.resumable(folder)
    assert again is not None
    assert submit.SuperLink.of(again).root_certificates == tmp_path / "ca.crt"


def test_a_run_that_no_superlink_takes_leaves_no_folder(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_flwr", lambda home, *arguments: {"output": "nobody there"})
    link = ("engine=flower", "engine.superlink=127.0.0.1:1")
    (tmp_path / "kept").mkdir()
    assert command("run", "pefll", *link, "--out", str(tmp_path / "runs")) == 2
    assert "must take the run, but: nobody there" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []
    # Of a folder with more in it nothing is removed.
    loaded = config.load("pefll", link)
    folder = submit.folder_for(loaded, tmp_path / "kept", "")
    (folder / "log.txt").touch()
    submit.discard(folder)
    assert {path.name for path in folder.iterdir()} == {"config.toml", "checkpoint", "log.txt"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_who_waits_for_a_run_sees_each_round_that_its_log_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    val = evaluation(2, "val", [5, 10])
    first = Progress(1, 3, (Lost(0, "gone"), Lost(2, "gone")), {})
    second = Progress(2, 3, (Lost(0, "gone"),), {"val": val})
    said = [spoken(first), spoken(second)]
    assert said == [
        "round 1 of 3: lost 2 clients",
        "round 2 of 3: lost 1 clients; val loss 0.100, accuracy 75.0 %",
    ]
    shown: list[tuple[int, str]] = []
    monkeypatch.setattr(telling._Bar, "advance", lambda bar, it: shown.append((it.round, it.found)))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with telling.following("pefll", 3, show=True) as tell:
        assert tell is not None
        for line in (
            "INFO :      Start",
            said[0] + "\n",
            said[0],
            said[1],
            said[0],
            "round 9 of 9: lost 0 clients",
            "round 4 of 3: lost 0 clients",
            f"round {'9' * 5000} of 3: lost 0 clients",
            "round \u0663 of 3: lost 0 clients",
            "round 3 of 3: lost 0 clients; \x1b[31m" + "x" * 10**6,
        ):
            tell(line)
    assert shown[:2] == [(1, ""), (2, "val loss 0.100, accuracy 75.0 %")]
    (last,) = shown[2:]
    assert (last[0], last[1][:8], len(last[1])) == (3, "\\x1b[31m", 100)
    assert "waiting for the sites" in terminal.getvalue()
    with telling.following("pefll", 3, show=False) as tell:
        assert tell is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with telling.following("pefll", 3, show=True) as tell:
        assert tell is None


def test_why_a_run_failed_is_said_in_a_line_of_its_log() -> None:
    assert heard_failure(spoken_failure(UserError("the sites\n- differ")) + "\n") == (
        "the sites\n- differ"
    )
    assert (
        heard_failure(spoken_failure(ZeroDivisionError("by zero"))) == "ZeroDivisionError: by zero"
    )
    for line in (
        "",
        "failed: ",
        "failed: 3",
        "failed: {",
        'failed: ["a"]',
        '"failed"',
        "round 1 of 2",
        "failed: " + "[" * 10**5,
    ):
        assert heard_failure(line) == ""
    many = heard_failure(spoken_failure(UserError("\n".join(["x" * 10**5] * 10**3))))
    assert len(many) < 20 * 501
    longest = spoken_failure(UserError("\x00" * 10**5))
    assert len(longest) < submit.LONGEST_LINE
    assert heard_failure(longest)


def test_a_run_whose_sites_make_no_federation_says_so_in_its_log_and_where_its_records_go(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["engine=flower", "engine.superlink=127.0.0.1:1", "engine.timeout=0.01"]
    loaded = config.load("pefll", keys)
    folder = submit.folder_for(loaded, tmp_path, "")
    settings = {"settings": toml.dumps(config.to_dict(loaded)), "folder": str(folder)}
    monkeypatch.setattr(app, "_link", lambda grid, config: DirectLink({}))
    with pytest.raises(UserError, match=r"engine\.sites=1 sites must introduce themselves"):
        app.serve(None, SimpleNamespace(run_config=settings))  # type: ignore[arg-type]
    (why,) = filter(None, map(heard_failure, capsys.readouterr().out.splitlines()))
    assert why.startswith("engine.sites=1 sites must introduce themselves")
    assert f"error before training: {why}" in (folder / "log.txt").read_text()
    # Where it has no folder yet, nothing is written into the current one.
    monkeypatch.chdir(folder)
    before = (folder / "log.txt").read_text()
    with pytest.raises(UserError, match=r"engine\.sites=1 sites must introduce themselves"):
        app.serve(None, SimpleNamespace(run_config=settings | {"folder": ""}))  # type: ignore[arg-type]
    assert (folder / "log.txt").read_text() == before


@pytest.mark.parametrize("key", ["task.model=nets.py:Net", "task.prefix=features"])
def test_a_target_that_sites_cannot_have_is_refused_before_anybody_is_asked(
    key: str, tmp_path: Path, capsys: Any
) -> None:
    link = ("engine=flower", "engine.superlink=127.0.0.1:1", key)
    assert command("run", "pefll", *link, "--out", str(tmp_path)) == 2
    assert "where clients are at sites" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address",
    ["fl.example.org", "127.0.0.1", "fl.example.org:", ":9093", "::1:9093", "[::1]", "a:99999"],
)
def test_a_superlink_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UserError, match=r"engine\.superlink.*must be HOST:PORT, such as"):
        config.load("pefll", ["engine=flower", f"engine.superlink={address}"])


def test_a_bar_takes_no_markup_from_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with telling.following("pefll", 2, show=True) as tell:
        assert tell is not None
        tell("round 1 of 2: lost 3 clients; [/bold][link=http://a]val[/]")
    assert "[/bold][link=http://a]val[/], lost 3" in terminal.getvalue()


def test_a_log_is_read_anew_where_it_was_cut_and_let_go_of_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    asked: list[tuple[str, ...]] = []
    scripts = ["echo one; exit 1", "printf 'one\\ntwo'; exit 0"]

    def program(*arguments: str) -> list[str]:
        asked.append(arguments)
        return ["sh", "-c", scripts.pop(0)]

    monkeypatch.setattr(submit, "_program", program)
    monkeypatch.setattr(submit, "POLL", 0)
    with submit._log_of(tmp_path, "12", told.append) as over:
        assert over.wait(timeout=60)
    assert told == ["one\n", "one\n", "two"]
    assert asked == [("log", "12", "run", "--stream")] * 2

    # Who leaves before its end ends its reader.
    begun = threading.Event()
    scripts.append("echo $$; exec sleep 1000")

    def tell(line: str) -> None:
        told.append(line)
        begun.set()

    with submit._log_of(tmp_path, "12", tell) as over:
        assert begun.wait(timeout=60)
    assert not over.is_set()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told[-1]), 0)
    with submit._log_of(tmp_path, "12", None) as over:
        assert not over.is_set()
    assert scripts == []

"""Calls in forked processes: what they answer, and what is left where one of them ends badly."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from apps.flower import works
from engines.flower.deployment import until
from engines.flower.sites import DirectLink
from hyperfed.apps.flower import app, executor
from hyperfed.apps.flower.executor import CrashedError, Executor, FailedError
from hyperfed.engines.flower.sites import HELLO, STEP
from hyperfed.runs import config
from hyperfed.system import toml
from processes import await_end, descendants, linux

pytestmark = [linux, pytest.mark.slow, pytest.mark.xdist_group("executor")]  # and its zygote


@pytest.fixture(scope="module", autouse=True)
def zygote() -> Iterator[None]:
    """Has these tests start a zygote of their own, as a node does, and the others theirs."""
    server: Any = forkserver._forkserver
    preload, threads = server._preload_modules, os.environ.pop("OMP_NUM_THREADS", None)
    server._stop()
    yield
    server._stop()
    server._preload_modules = preload
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_reply_is_that_of_the_site_in_this_process(tmp_path: Path) -> None:
    keys = ["rounds=1", "cohort=4", "task.clients=4", "task.novel=0.0", "method.local_steps=2"]
    settings = config.load("fedper", [*keys, "engine=flower", "engine.sites=1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}

    def node(name: str) -> dict[str, str]:
        return {"state": str(tmp_path / name), "clients": "0-3"}

    link = DirectLink({1: app.site_of(run_config, node("here"))})
    list(app.begin(settings, link, str(tmp_path / "run")).train())
    requests = [content for kind, _, content in link.sent if kind == STEP]
    here = app.site_of(run_config, node("again"))
    forked = Executor(app.respond)
    assert len(requests) >= 2  # the second needs what the first left on the disk
    for request in requests:
        expected = here.handle(request)
        assert forked.call(STEP, request, run_config, node("forked")) == expected


def test_each_call_has_a_process_of_its_own_and_all_one_zygote() -> None:
    calls = Executor(works.who)
    (first, zygote), (second, same) = calls.call(), calls.call()
    assert first != second
    assert zygote == same
    assert zygote in descendants(os.getpid())


def test_the_zygote_has_imported_everything_and_started_nothing() -> None:
    imported, awake = Executor(works.begins_with).call()
    assert imported
    assert not awake
    _, zygote = Executor(works.who).call()
    assert threads(zygote) == 1


def test_a_call_that_raises_costs_that_call() -> None:
    with pytest.raises(FailedError, match="ValueError: no such thing"):
        Executor(works.raise_with).call("no such thing")
    assert Executor(works.who).call()


@pytest.mark.parametrize("lasting", [False, True])
def test_a_call_that_crashes_costs_that_call(lasting: bool) -> None:
    calls = Executor(works.crash_or_who, lasting=lasting)
    before, zygote = calls.call(False)
    with pytest.raises(CrashedError, match="ended before it had answered"):
        calls.call(True)
    after, same = calls.call(False)
    assert (before != after, zygote) == (True, same)
    calls.close()


def test_a_call_that_takes_more_memory_than_it_may_costs_that_call() -> None:
    calls, most = Executor(works.takes), 3 << 30
    with pytest.raises(FailedError, match="allocate"):
        calls.call(most, most)
    assert calls.call(1 << 20, most) == 1 << 20


def test_the_memory_of_a_message_is_what_the_site_s_policy_says(tmp_path: Path) -> None:
    settings = config.load("fedper", ["task.clients=4", "engine=flower", "engine.sites=1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    policy = tmp_path / "policy.toml"
    node = {"state": str(tmp_path / "state"), "clients": "0-3", "policy": str(policy)}
    said = {}
    for most in (1 << 40, 1):
        policy.write_text(f"largest_memory = {most}")
        try:
            said[most] = Executor(app.respond_within).call(HELLO, b"", run_config, node)
        except (FailedError, CrashedError):
            said[most] = None
    assert said[1] is None
    assert said[1 << 40] == app.respond(HELLO, b"", run_config, node)


def test_a_killed_zygote_is_replaced() -> None:
    calls = Executor(works.who)
    _, zygote = calls.call()
    os.kill(zygote, signal.SIGKILL)
    _, another = calls.call()
    assert another != zygote


def test_without_any_zygote_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "PAUSE", 0.0)

    def refused() -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(forkserver, "ensure_running", refused)
    monkeypatch.setattr(executor._CONTEXT, "Process", lambda **_: pytest.fail("there is no zygote"))
    with pytest.raises(CrashedError, match="no process could be started"):
        Executor(works.who).call()


def test_a_lasting_process_stays_until_it_is_closed_or_killed() -> None:
    calls = Executor(works.who, lasting=True)
    (first, _), (second, _) = calls.call(), calls.call()
    assert first == second
    process = calls._process
    assert process is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: not process.is_alive(), "the zygote's word that it has ended")
    third, _ = calls.call()
    assert third != first
    calls.close()
    assert await_end({third}) == set()


def test_nothing_is_left_of_a_process_that_is_killed_in_a_call(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (  # whose zygote imports nothing: what ends with whom is the same
        "import sys; from pathlib import Path; from apps.flower import works;"
        "from hyperfed.apps.flower import executor; executor.PRELOADED.clear();"
        "executor.Executor(works.wait_for_ever).call(Path(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.Popen([sys.executable, "-c", program, str(note)], env=environment)
    until(lambda: note.exists() and note.read_text(), "the call")
    below = descendants(caller.pid)
    assert int(note.read_text()) in below
    assert len(below) == 3  # the zygote, the tracker of multiprocessing and the call
    caller.kill()
    caller.wait()
    assert await_end(below) == set()

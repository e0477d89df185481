"""``make gpu`` without a GPU: its plan, its time, and what its index says of each end."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import gpu
import gpu_steps
import hyperfed
from gpu import PARTS
from gpu_steps import Ending, State, Step
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.folder import read_run
from hyperfed.runs.run import Run
from hyperfed.system.devices import CPU
from pretended import NAME, present
from processes import await_end, linux

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda")
DEADLINE = 120.0

# What a step does. Its last argument is a file, which those that wait make when they do.

LISTENS = """
import pathlib, signal, sys
def stop(*_):
    print("stopped after round 3")
    sys.exit(3)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[-1]).touch()
while True:
    signal.pause()
"""

IS_DEAF = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
pathlib.Path(sys.argv[-1]).touch()
while True:
    signal.pause()
"""

INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
os.kill(os.getppid(), signal.SIGTERM)
while True:
    signal.pause()
"""

SHOWS_GPUS = "import os; print('GPUs:', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"

TESTS_FILE = """
import pathlib, signal, sys
import pytest

{mark}

def test_first():
    {first}

@pytest.mark.skip(reason="it is the second")
def test_second():
    pass

def test_third():
    while {waits}:
        pathlib.Path({ready!r}).touch()
        signal.pause()
"""

ALL_SKIPPED = "pytestmark = pytest.mark.skip(reason='there is no GPU')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the records go; below it, no pytest takes itself for a worker of ours."""
    for key in [key for key in os.environ if key.startswith("PYTEST")]:
        monkeypatch.delenv(key)
    return tmp_path / "out"


@pytest.fixture
def doing(tmp_path: Path) -> Callable[..., Step]:
    """Makes a step of what it does."""

    def made(name: str, code: str, **more: Any) -> Step:
        ready = tmp_path / name.replace("/", "-")
        return Step(name, ("-S", "-c", code, str(ready)), 60, **more)

    return made


@pytest.fixture
def _time_is_up_when_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the time of a step end when its file is there, of a run when it has evaluated.

    It takes as long as it does to stop, but for one that will not listen.
    """
    awaited, calls = gpu_steps._await, Counter[int]()

    def ready(last: Path) -> bool:
        return last.is_file() or any(last.rglob("metrics.jsonl"))

    def await_ready(process: subprocess.Popen[bytes], seconds: float) -> tuple[bool, bool]:
        calls[process.pid] += 1
        words = [str(word) for word in process.args]  # type: ignore[union-attr]
        if calls[process.pid] == 1:
            deadline = time.monotonic() + DEADLINE
            while process.poll() is None and time.monotonic() < deadline:
                if ready(Path(words[-1].rpartition("=")[2])):
                    return False, False
                time.sleep(0.002)
        if calls[process.pid] == 2 and IS_DEAF in words:
            return False, False
        return awaited(process, DEADLINE)

    monkeypatch.setattr(gpu_steps, "_await", await_ready)


def index_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "index.json").read_text(encoding="utf-8"))
    return found


def states(out: Path) -> dict[str, str]:
    return {name: step["state"] for name, step in index_of(out).items()}


# How a step ends.


@linux
@pytest.mark.usefixtures("_time_is_up_when_ready")
def test_each_step_costs_itself_alone_and_the_index_says_how_it_ended(
    folder: Path, doing: Callable[..., Step], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        doing("tests", "import sys; print('broken'); sys.exit(5)"),
        doing("bench", IS_DEAF),
        doing("data", "pass"),
        doing("pfedhn", LISTENS, settings=("pfedhn",)),
        doing("pefll/100-graphs", "pass", settings=("pefll",), skip="there is no GPU"),
        doing("methods/fedavg", SHOWS_GPUS, settings=("fedavg",)),
    ]
    assert gpu.carry_out(steps, folder, CPU, minutes=10) == 1
    index = index_of(folder)
    found = {name: (step["state"], step["said"]) for name, step in index.items()}
    child = int((folder / "bench" / "log.txt").read_text())
    assert found == {
        "tests": ("failed", "broken"),
        "bench": ("out of time", str(child)),
        "data": ("done", ""),
        "pfedhn": ("out of time", "stopped after round 3"),
        "pefll/100-graphs": ("skipped", "there is no GPU"),
        "methods/fedavg": ("done", "GPUs: ''"),
    }
    assert await_end({child}) == set()
    for step in index.values():
        assert step["device"] == "cpu"
        assert step["versions"]["torch"] == torch.__version__
        assert {"commit", "limit", "seconds", "ended"} <= step.keys()
        assert step["command"].startswith("python -S -c ")
    said, text = capsys.readouterr().out.splitlines(), (folder / "index.txt").read_text()
    for line, (name, (state, words)) in zip(said, found.items(), strict=True):
        assert name in line
        assert f"{state} after" in line
        assert line.endswith(words)
        assert any(row.split()[0] == name and state in row for row in text.splitlines()[2:])


@pytest.mark.parametrize(
    ("code", "state", "said", "status"),
    [
        ("raise type('UserError', (Exception,), {})('no images here')", "skipped", "no images", 0),
        ("raise ValueError('no such key')", "failed", "ValueError: no such key", 1),
    ],
)
def test_without_data_what_needs_them_is_skipped(
    folder: Path, doing: Callable[..., Step], *, code: str, state: str, said: str, status: int
) -> None:
    steps = [
        doing("data", code),
        doing("pfedhn", "pass", settings=("pfedhn",)),
        doing("methods/free", "pass"),
    ]
    assert gpu.carry_out(steps, folder, CPU, minutes=10) == status
    assert states(folder) == {"data": state, "pfedhn": "skipped", "methods/free": "done"}
    index = index_of(folder)
    assert index["data"]["said"].startswith(said)
    assert index["pfedhn"]["said"] == f"the data set is not here (data: {state})"


def test_an_interrupt_ends_the_step_and_the_plan_and_keeps_the_index(
    folder: Path, doing: Callable[..., Step]
) -> None:
    assert gpu.carry_out([doing("pfedhn", "pass")], folder, CPU, minutes=10) == 0
    steps = [doing("tests", "pass"), doing("bench", INTERRUPTS), doing("data", "pass")]
    before = signal.getsignal(signal.SIGTERM)
    assert gpu.carry_out(steps, folder, CPU, minutes=10) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert states(folder) == {"pfedhn": "done", "tests": "done", "bench": "interrupted"}


@pytest.mark.parametrize("when", ["it has begun", "it has ended"])
def test_an_interrupt_between_two_waits_is_not_lost_and_leaves_no_step_running(
    folder: Path, doing: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    steps = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if not options.get("start_new_session"):  # no step of the plan
                return
            steps.append(self)
            if when == "it has begun":
                os.kill(os.getpid(), signal.SIGTERM)

    def killed(group: int, number: int) -> None:
        if when == "it has ended" and number == signal.SIGKILL and len(steps) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        kill(group, number)

    kill = os.killpg
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(os, "killpg", killed)
    does = "import signal; signal.pause()" if when == "it has begun" else "pass"
    plan = [doing("tests", does), doing("bench", "pass")]
    assert gpu.carry_out(plan, folder, CPU, minutes=10) == 130
    assert states(folder) == {"tests": "interrupted"}
    assert [step.poll() is None for step in steps] == [False]


@pytest.mark.slow
@pytest.mark.usefixtures("_time_is_up_when_ready")
@pytest.mark.parametrize(
    ("mark", "first", "waits", "state", "said"),
    [
        ("", "pass", False, "done", "2 passed, 1 skipped"),
        ("", "assert 0", False, "failed", "1 failed, 1 passed, 1 skipped"),
        ("", "pass", True, "out of time", "1 passed, 1 skipped"),
        ("", "assert 0", True, "failed", "1 failed, 1 skipped"),
        (ALL_SKIPPED, "pass", False, "skipped", "there is no GPU"),
    ],
)
def test_what_tests_found_is_kept_and_decides(
    folder: Path, tmp_path: Path, *, mark: str, first: str, waits: bool, state: str, said: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    file, ready = tmp_path / "test_it.py", tmp_path / "ready"
    file.write_text(TESTS_FILE.format(mark=mark, first=first, waits=waits, ready=str(ready)))
    step = gpu._pytest("tests", str(file), folder, f"--junit-prefix={ready}")
    assert gpu.carry_out([step], folder, CPU, minutes=10) == (state == "failed")
    found = index_of(folder)["tests"]
    assert found["state"] == state
    assert found["said"].startswith(said)
    (suite,) = ElementTree.parse(folder / "tests" / "junit.xml").iter("testsuite")
    assert int(suite.attrib["failures"]) == (state == "failed")


def test_a_record_cut_short_or_of_an_earlier_call_decides_nothing(
    folder: Path, doing: Callable[..., Step]
) -> None:
    (folder / "tests" / "run").mkdir(parents=True)
    (folder / "tests" / "run" / "config.toml").touch()
    junit = folder / "tests" / "junit.xml"
    junit.write_text('<testsuite tests="1" failures="1" errors="0" skipped="0" />')
    assert gpu.carry_out([doing("tests", "pass")], folder, CPU, minutes=10) == 0
    cut = doing("tests", f"open({str(junit)!r}, 'w').write('<testsuite te')")
    assert gpu.carry_out([cut], folder, CPU, minutes=10) == 0
    assert states(folder) == {"tests": "done"}
    assert index_of(folder)["tests"]["run"] is None


@pytest.mark.parametrize(("limit", "grace"), [(30.0, 6.0), (500.0, 15.0)])
def test_a_step_is_asked_to_stop_before_its_time_is_over_and_killed_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: float, grace: float
) -> None:
    awaited, waits = gpu_steps._await, list[float]()

    def await_none(process: subprocess.Popen[bytes], seconds: float) -> tuple[bool, bool]:
        waits.append(seconds)
        return awaited(process, 0 if len(waits) < 3 else DEADLINE)

    monkeypatch.setattr(gpu_steps, "_await", await_none)
    deaf = Step("tests", ("-S", "-c", IS_DEAF, str(folder / "ready")), 60)
    assert gpu_steps.execute(deaf, folder, limit, CPU).state == State.OUT_OF_TIME
    assert waits[:2] == [limit - grace, grace]


def test_a_wait_is_as_long_as_is_said() -> None:
    waited: list[float] = []
    process: Any = SimpleNamespace(wait=waited.append)
    assert gpu_steps._await(process, 7.0) == (True, False)
    assert waited == [7.0]


# The plan and its time.


def test_the_plan_holds_all_parts_in_their_order_and_within_ten_minutes(folder: Path) -> None:
    steps = gpu.plan(CUDA, folder)
    assert list(dict.fromkeys(step.part for step in steps)) == list(PARTS)
    assert not any(step.skip for step in steps)
    assert sum(PARTS.values()) <= 600
    for part, seconds in PARTS.items():
        if part != "methods":  # as many as there is time for
            assert sum(step.seconds for step in steps if step.part == part) == seconds
    runs = {step.name: config.load(*_source(step)) for step in steps if step.settings}
    assert {run.device for run in runs.values()} == {"cuda"}
    assert {run.task.name for run in runs.values()} == {"cifar10"}
    assert runs["pfedhn"].rounds == 5000
    pefll = [
        (each.task.clients, each.cohort, each.engine.graphs)
        for name, each in runs.items()
        if name.startswith("pefll")
    ]
    assert pefll == [(100, 5, False), (100, 5, True), (1000, 0.05, False), (1000, 0.05, True)]
    beside = {step.name: step.beside for step in steps if step.beside}
    took = [(read_run(path).summary or {})["seconds"] for path in beside.values()]
    assert took == sorted(took)
    for name, path in beside.items():
        here, there = runs[name], config.load(str(path / "config.toml"))
        assert replace(here, device="cpu") == there
    recorded = {path.name for path in gpu.RECORDS.iterdir() if path.is_dir()}
    assert {runs[name].method for name in beside} == recorded


def _source(step: Step) -> tuple[str, tuple[str, ...]]:
    return step.settings[0], step.settings[1:]


def test_parts_bring_the_data_and_settings_come_last(folder: Path) -> None:
    (tests,) = gpu.plan(CPU, folder, ["tests"])
    assert tests.name == "tests"
    data, pfedhn = gpu.plan(CPU, folder, ["pfedhn"], ["rounds=3", "task=digits", "device=cuda"])
    assert (data.name, pfedhn.name) == ("data", "pfedhn")
    settings = config.load(*_source(pfedhn))
    assert (settings.rounds, settings.task.name, settings.device) == (3, "digits", "cuda")
    assert data.command[-len(pfedhn.settings) :] == pfedhn.settings
    graphs = [step for step in gpu.plan(CPU, folder, ["pefll"]) if step.skip]
    assert [step.name for step in graphs] == ["pefll/100-graphs", "pefll/1000-graphs"]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Returns the limits of steps that take a time each, of all where none is told."""

    def told(steps: Sequence[Step], out: Path, minutes: float, **takes: float) -> dict[str, float]:
        now, found = [0.0], {}

        def execute(step: Step, folder: Path, limit: float, device: Any) -> Ending:
            found[step.name] = limit
            now[0] += min(limit, takes.get(step.part, limit))
            return Ending(State.DONE, "")

        monkeypatch.setattr(gpu, "execute", execute)
        monkeypatch.setattr(gpu, "monotonic", lambda: now[0])
        gpu.carry_out(steps, out, CPU, minutes)
        assert now[0] <= minutes * 58 + 1e-6
        return found

    return told


def test_no_step_takes_more_than_its_time_and_what_is_left_over_goes_on(
    folder: Path, limits: Callable[..., dict[str, float]]
) -> None:
    steps = gpu.plan(CUDA, folder)
    last = steps[-1].name
    whole = limits(steps, folder, 10)
    for step in steps:
        if step.part != "methods":
            assert whole[step.name] == pytest.approx(step.seconds)
    methods = [seconds for name, seconds in whole.items() if name.startswith("methods")]
    assert sum(methods) == pytest.approx(PARTS["methods"])
    assert index_of(folder)[last]["state"] == "out of time"
    assert index_of(folder)[last]["said"] == "those before it took it"
    quick = limits(steps, folder, 10, tests=0, bench=0, data=0, pfedhn=0, pefll=0, methods=10)
    *others, _ = (step.name for step in steps if step.part == "methods")
    assert quick[last] == pytest.approx(sum(PARTS.values()) - len(others) * 10)
    assert {quick[name] for name in others} == {gpu.A_METHOD}
    assert limits(steps, folder, 30)["pfedhn"] == pytest.approx(3 * PARTS["pfedhn"])


def test_chosen_parts_share_all_the_time(
    folder: Path, limits: Callable[..., dict[str, float]]
) -> None:
    alone = limits(gpu.plan(CPU, folder, ["pfedhn"]), folder, 10, data=10)
    assert alone["pfedhn"] == pytest.approx(sum(PARTS.values()) - 10)


# The command.


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT TESTED: there is a GPU")
def test_without_a_gpu_it_says_so_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(folder)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "came cuda; take device=cpu" in said
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "tests all"], "parts must be among tests, .* methods; came all"),
        (["rounds=soon"], "rounds: must be a valid integer"),
    ],
)
def test_wrong_input_is_told_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert gpu.main(["--device", "cpu", "--out", str(folder), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not folder.exists()


def test_another_gpu_is_chosen_for_all_steps(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_device", torch.device)
    assert gpu.main(["--device", "cuda:1", "--out", str(folder)]) == 2
    assert "came cuda:1; for another one set CUDA_VISIBLE_DEVICES=1" in capsys.readouterr().err


SITE = """
import pretended
there = pretended.present()
there.__enter__()
"""


@pytest.fixture
def pretending(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gives the steps a device that pretends; returns what makes them small and use it."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    paths = (tmp_path, ROOT / "tests", Path(hyperfed.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    monkeypatch.setattr(gpu, "RECORDS", gpu.RECORDS / "fedavg")
    return ["--device", NAME, "--out", str(folder), "task=digits", "method.local_steps=1"]


@pytest.mark.slow
def test_a_run_is_set_beside_its_record_and_tests_without_a_gpu_are_skipped(
    folder: Path, pretending: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main([*pretending, "--parts", "tests bench methods", "rounds=2"]) == 0
    index, name = index_of(folder), "methods/seed0"
    assert states(folder) == {
        "tests": "skipped",
        "bench": "skipped",
        "data": "done",
        name: "done",
    }
    assert index["tests"]["said"] == "NOT TESTED: there is no GPU"
    assert index["bench"]["said"] == "NOT MEASURED: there is no GPU"
    tests = ElementTree.parse(folder / "tests" / "junit.xml").iter("testcase")
    assert len(list(tests)) == 3 * len(METHODS)
    run, beside = index[name]["run"], index[name]["beside"]
    assert read_run(Path(run["folder"])).config["device"] == NAME
    assert (run["rounds"], beside["rounds"]) == (2, 200)
    (row,) = [line for line in (folder / "index.txt").read_text().splitlines() if name in line]
    said = capsys.readouterr().out.splitlines()
    compared = [line.split() for line in said if line.startswith("fedavg")]
    accuracy = [f"{100 * each['test_accuracy']:.1f}" for each in (run, beside)]
    assert set(accuracy) <= set(row.split())
    for number, words in zip(reversed(accuracy), compared, strict=True):
        assert number in words


@pytest.mark.slow
@linux
@pytest.mark.usefixtures("_time_is_up_when_ready")
def test_a_run_out_of_time_is_stopped_with_a_checkpoint(
    folder: Path, pretending: list[str]
) -> None:
    keys = ["rounds=100000", "evaluate_every=1"]
    assert gpu.main([*pretending, "--parts", "pfedhn", *keys]) == 0
    assert states(folder) == {"data": "done", "pfedhn": "out of time"}
    step = index_of(folder)["pfedhn"]
    path = Path(step["run"]["folder"])
    assert read_run(path).summary is None
    with present():
        run = Run.open(path)
    assert 1 <= step["run"]["rounds"] <= run.round < run.config.rounds
    resume = f"go on with: hyperfed resume {path}"
    assert step["said"] == f"stopped after round {run.round} of 100000; {resume}"

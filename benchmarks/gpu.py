"""``make gpu``: all that only a GPU can show, within a time (see README.md beside this file).

Each step of the plan is a command in a process of its own. At the end of its time it is asked to
stop, as by Ctrl-C: a run writes a checkpoint, pytest its records. What does not listen is killed.
What a step wrote stays, and the next one begins.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from hyperfed.errors import UserError
from hyperfed.runs import config, records, report
from hyperfed.system.devices import describe, find_device
from hyperfed.system.files import atomic_write
from hyperfed.system.provenance import commit, versions

ROOT = Path(os.path.relpath(Path(__file__).parents[1]))
RECORDS = ROOT / "results" / "all"
"""Every method on the CPU: the same settings run here, and the numbers are set beside these."""

PARTS = {"tests": 90, "bench": 80, "data": 40, "pfedhn": 110, "pefll": 120, "methods": 140}
"""Part -> seconds of ten minutes, the most important first; 20 are for what is around them."""

A_METHOD = 25
"""Seconds of the part ``methods`` that one of them may take, so that many come to their end."""

GRACE = 0.2, 15
"""What is left to a step when it is asked to stop: this part of its time, at most these seconds."""

GPU_TESTS = "tests/engines/test_device.py::test_a_gpu_gives_the_numbers_of_the_cpu"

LOAD = """\
import sys
from hyperfed.data.datasets import load
from hyperfed.runs.config import load as read
task = read(sys.argv[1], sys.argv[2:]).task
load(task.name, task.data_dir)"""


class State(StrEnum):
    """How a step ended."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Step:
    """A command of the plan.

    Attributes:
        name: its part's, or ``part/which`` where that has several. Also its folder.
        command: arguments of Python.
        seconds: that it may take, of ten minutes.
        settings: of a run, as :func:`hyperfed.runs.config.load` takes them: the file and what
            overrides it. Without the data set it is skipped.
        skip: why it cannot run here; "" where it can.
        beside: the folder of the same run on the CPU, where there is one.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    settings: tuple[str, ...] = ()
    skip: str = ""
    beside: Path | None = None

    @property
    def part(self) -> str:
        """The part of the plan that it belongs to."""
        return self.name.partition("/")[0]


def plan(
    device: torch.device, out: Path, parts: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[Step]:
    """Returns the steps in their order.

    Args:
        device: where clients compute.
        out: the folder of all records.
        parts: names in :data:`PARTS`; all where empty. The data set comes with what needs it.
        settings: ``key=value`` for every run, which come last and so win.

    Raises:
        UserError: a part that there is not, or settings that a run does not take.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"parts must be among {', '.join(PARTS)}; came {', '.join(unknown)}")

    runs = list(_runs(device, out, settings))
    read_data = ("-c", LOAD, *runs[0].settings)  # all runs have one data set
    bench = f"--benchmark-json={out / 'bench' / 'bench.json'}"
    quiet = "-Wignore:Not saving anything"  # which pytest-benchmark says where nothing was measured
    steps = [
        _pytest("tests", GPU_TESTS, out),
        _pytest("bench", "benchmarks/bench_device.py", out, bench, quiet),
        Step("data", read_data, PARTS["data"]),
        *runs,
    ]
    wanted = set(parts or PARTS)
    for step in steps:
        if step.settings and step.part in wanted:
            config.load(step.settings[0], step.settings[1:])
            wanted.add("data")
    return [step for step in steps if step.part in wanted]


def _pytest(part: str, what: str, out: Path, *options: str) -> Step:
    shown = ("-v", "-p", "no:cacheprovider", "-o", "log_cli=true", "-o", "log_cli_level=INFO")
    junit = f"--junitxml={out / part / 'junit.xml'}"
    return Step(part, ("-m", "pytest", str(ROOT / what), *shown, junit, *options), PARTS[part])


def _runs(device: torch.device, out: Path, settings: Sequence[str]) -> Iterator[Step]:
    """Yields all runs of the plan, not checked."""

    def run(name: str, source: Path, *keys: str, seconds: float, **more: Any) -> Step:
        chosen = (str(source), f"device={device}", *keys, *settings)
        command = ("-m", "hyperfed", "run", *chosen, "--out", str(out / name))
        return Step(name, command, seconds, chosen, **more)

    pfedhn = ROOT / "experiments" / "pfedhn" / "table1-cifar10-50-pfedhn.toml"
    yield run("pfedhn", pfedhn, seconds=PARTS["pfedhn"])

    pefll = ROOT / "experiments" / "pefll" / "table1-cifar10-100-pefll.toml"
    no_graphs = "" if device.type == "cuda" else "CUDA graphs need a GPU that has CUDA"
    for clients, cohort in ((100, "5"), (1000, "0.05")):  # as published: 5 % of the clients
        for kind, skip in (("vmap", ""), ("graphs", no_graphs)):
            keys = [f"task.clients={clients}", f"cohort={cohort}", "rounds=50", "evaluate_every=25"]
            keys += ["engine=vmap", f"engine.graphs={str(kind == 'graphs').lower()}"]
            name = f"pefll/{clients}-{kind}"
            yield run(name, pefll, *keys, seconds=PARTS["pefll"] / 4, skip=skip)

    for path in sorted(records.find_runs(RECORDS), key=lambda path: _numbers(path)["seconds"]):
        name = f"methods/{path.relative_to(RECORDS)}"
        yield run(name, path / "config.toml", seconds=A_METHOD, beside=path)


def carry_out(steps: Sequence[Step], out: Path, device: torch.device, minutes: float) -> int:
    """Runs the steps one after another, and keeps the index of what became of them.

    A part may take its share of the time, and what the parts before it have left; the last step
    takes all there is.

    Args:
        steps: the plan.
        out: the folder of all records; what its index says of other steps stays.
        device: what the records name; without a GPU, none is shown to the steps.
        minutes: for all steps together.

    Returns:
        The exit status: 0, 1 where a step failed, 130 where somebody interrupted one.
    """
    index = Index(out, device)
    parts = [part for part in PARTS if any(step.part == part for step in steps)]
    scale = minutes / 10 * sum(PARTS.values()) / sum(PARTS[part] for part in parts)
    ends = dict(zip(parts, accumulate(scale * PARTS[part] for part in parts), strict=True))
    begin, failed, no_data = monotonic(), False, ""
    with _interruptible():
        for number, step in enumerate(steps, start=1):
            left = ends[step.part] - (monotonic() - begin)
            most = left if step is steps[-1] else scale * step.seconds
            limit = max(0.0, min(most, left))
            print(f"[{number}/{len(steps)}] {step.name}, {limit:.0f} s: ", end="", flush=True)
            if why := step.skip or (no_data if step.settings else ""):
                ending = Ending(State.SKIPPED, why)
            elif not limit:
                ending = Ending(State.OUT_OF_TIME, "those before it took it")
            else:
                ending = execute(step, out / step.name, limit, device)
            if step.name == "data" and ending.state != State.DONE:
                ending, no_data = _without_data(ending)
            index.add(step, ending, limit)
            print(f"{ending.state} after {ending.seconds:.0f} s: {ending.said}", flush=True)
            failed |= ending.state == State.FAILED
            if ending.state == State.INTERRUPTED:
                return 130
    return int(failed)


# One step.


@dataclass(frozen=True)
class Ending:
    """What became of a step.

    Attributes:
        state: how it ended.
        said: its last words, or why it was skipped.
        seconds: that it took.
        run: the folder of its run, where it began one.
    """

    state: State
    said: str
    seconds: float = 0.0
    run: Path | None = None


def execute(step: Step, folder: Path, limit: float, device: torch.device) -> Ending:
    """Runs a step, for ``limit`` seconds at most; what it prints is in ``folder/log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in ("junit.xml", "bench.json"):
        (folder / stale).unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a killed step's words are kept
    if device.type != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # tests and benchmarks take what they find
    earlier = records.find_runs(folder)
    log, begin = folder / "log.txt", monotonic()
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a group of its own, to be stopped and killed as a whole
        )
    share, most = GRACE
    grace = min(share * limit, most)
    ended, interrupted = _await(process, limit - grace)
    if not ended:
        os.killpg(process.pid, signal.SIGINT)
        _, again = _await(process, grace)
        interrupted |= again
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it has left running
    _await(process, grace)  # not for ever: what waits in a driver cannot be killed
    stopped = State.FAILED if ended else State.OUT_OF_TIME
    state, words = State.DONE if process.returncode == 0 else stopped, _last_words(log)
    if (junit := folder / "junit.xml").exists():
        state, words = _judge(junit, state, words)
    if interrupted:
        state = State.INTERRUPTED
    begun = [run for run in records.find_runs(folder) if run not in earlier]
    return Ending(state, words, monotonic() - begin, begun[-1] if begun else None)


def _await(process: subprocess.Popen[bytes], seconds: float) -> tuple[bool, bool]:
    """Waits; returns whether the process has ended, and whether somebody interrupted us."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False, False
    except KeyboardInterrupt:
        return False, True
    return True, False


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip("= ") for line in reversed(lines) if line.strip("= ")), "")


def _judge(junit: Path, state: State, words: str) -> tuple[State, str]:
    """Returns what a test record makes of how pytest ended, which calls it success to skip all."""
    try:
        (suite,) = ElementTree.parse(junit).iter("testsuite")
    except ElementTree.ParseError:  # killed while it wrote it
        return state, words
    tests, failures, errors, skipped = (
        int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
    )
    if failures + errors:
        return State.FAILED, words
    if state == State.DONE and skipped == tests:
        (why, *_) = (skip.attrib["message"] for skip in suite.iter("skipped"))
        return State.SKIPPED, why
    return state, words


def _without_data(ending: Ending) -> tuple[Ending, str]:
    """Returns how the step ``data`` ended, and why those that need it are skipped."""
    _, told, why = ending.said.partition("UserError: ")
    if told:  # there is none here, which is nobody's fault
        ending = Ending(State.SKIPPED, why, ending.seconds)
    return ending, f"the data set is not here (data: {ending.state})"


@contextmanager
def _interruptible() -> Iterator[None]:
    """Has SIGTERM interrupt as Ctrl-C does; and Ctrl-C too, which a shell's background ignores."""
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in both}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# What is kept.


class Index:
    """``index.json``, {step: what became of it}, and ``index.txt``, the same as a table."""

    def __init__(self, out: Path, device: torch.device) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._json, self._text = out / "index.json", out / "index.txt"
        self._where = {"device": describe(device), "commit": commit(), "versions": versions()}
        self.steps: dict[str, dict[str, Any]] = {}
        if self._json.exists():
            self.steps = json.loads(self._json.read_text(encoding="utf-8"))

    def add(self, step: Step, ending: Ending, limit: float) -> None:
        """Notes a step, in the place of what an earlier call knew of it."""
        self.steps[step.name] = {
            "command": shlex.join(["python", *step.command]),
            "state": ending.state,
            "said": ending.said,
            "seconds": ending.seconds,
            "limit": limit,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._where,
            "run": ending.run and _numbers(ending.run),
            "beside": step.beside and _numbers(step.beside),
        }
        atomic_write(self._json, f"{json.dumps(self.steps, indent=2)}\n".encode())
        with self._text.open("w", encoding="utf-8") as file:
            Console(file=file, width=160, highlight=False).print(table(self.steps))


def _numbers(folder: Path) -> dict[str, Any]:
    """Returns what a run has come to: its summary's numbers, or those of its last evaluation."""
    run = records.read_run(folder)
    found: dict[str, Any] = {"folder": str(folder)}
    if run.summary is not None:
        keys = ("rounds", "test_accuracy", "seconds", "graphs")
        return found | {key: run.summary[key] for key in keys if key in run.summary}
    for e in run.evaluations:
        if e.split == "test":
            found |= {"rounds": e.round, "test_accuracy": e.accuracy, "seconds": e.seconds}
    return found


def table(steps: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the index for a :class:`rich.console.Console` to print."""
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in ("\nstep", "\nstate"):
        shown.add_column(column)
    for column in (
        "step's\nseconds",
        "evaluated\nround",
        "\ntest %",
        "run's\nseconds",
        "CPU's\ntest %",
        "CPU's\nseconds",
    ):
        shown.add_column(column, justify="right")
    shown.add_column("\nsaid")
    for name, step in steps.items():
        run, beside = (step[key] or {} for key in ("run", "beside"))
        shown.add_row(
            name,
            step["state"],
            f"{step['seconds']:.1f}",
            str(run.get("rounds", "–")),
            report.percent(run.get("test_accuracy")),
            _seconds(run),
            report.percent(beside.get("test_accuracy")),
            _seconds(beside),
            step["said"],
        )
    return shown


def _seconds(run: Mapping[str, Any]) -> str:
    return f"{run['seconds']:.1f}" if "seconds" in run else "–"


def compare(out: Path, device: torch.device) -> None:
    """Prints and keeps what ``hyperfed compare`` says of the methods that are done, and the CPU."""
    steps = Index(out, device).steps.values()
    pairs = [step for step in steps if step["state"] == State.DONE and step["beside"]]
    folders = [step[key]["folder"] for step in pairs for key in ("beside", "run")]
    if folders:
        execute(
            Step("compare", ("-m", "hyperfed", "compare", *folders), 0), out / "compare", 20, device
        )
        print("\nof each two the first is of the CPU:")
        print((out / "compare" / "log.txt").read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out the plan; returns the exit status, 2 where the input is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="of all steps together")
    parser.add_argument("--parts", default="", help=f"in one word; all of '{' '.join(PARTS)}'")
    given = parser.parse_intermixed_args(arguments)
    try:
        device = find_device(given.device)
        if device.index and device.type == "cuda":
            raise UserError(
                f"device must be cuda, the first GPU, came {device}; for another one set "
                f"CUDA_VISIBLE_DEVICES={device.index}"
            )
        steps = plan(device, given.out, given.parts.split(), given.settings)
        status = carry_out(steps, given.out, device, given.minutes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compare(given.out, device)
    print(f"{given.out / 'index.txt'}\n{given.out / 'index.json'}")
    return status


if __name__ == "__main__":
    sys.exit(main())

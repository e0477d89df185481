"""A step of ``make gpu``: a command in a process of its own, and how it ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import monotonic
from types import FrameType
from xml.etree import ElementTree

import torch

from hyperfed.runs.folder import find_runs
from hyperfed.system.signals import handled

GRACE = 0.2, 15
"""What is left to a step when it is asked to stop: this part of its time, at most these seconds."""


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


class Interrupts:
    """SIGINT and SIGTERM interrupt the wait for a step; between two waits they interrupt the next.

    A step that has just begun would otherwise be left running, by nobody who knows of it.
    """

    def __init__(self) -> None:
        self._raises = self._came = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the signals, also that of Ctrl-C, which a shell's background ignores."""
        self._came = False
        with handled(self._note):
            yield

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raises ``KeyboardInterrupt`` in its block, or at once where a signal came before."""
        self._raises = True
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        except KeyboardInterrupt:
            self._came = False
            raise
        finally:
            self._raises = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if self._raises:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()
"""Those of this process."""


def execute(step: Step, folder: Path, limit: float, device: torch.device) -> Ending:
    """Runs a step, for ``limit`` seconds at most; what it prints is in ``folder/log.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in ("junit.xml", "bench.json"):
        (folder / stale).unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # a killed step's words are kept
    if device.type != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # tests and benchmarks take what they find
    earlier = find_runs(folder)
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
    _, late = _await(process, grace)  # not for ever: what waits in a driver cannot be killed
    interrupted |= late
    stopped = State.FAILED if ended else State.OUT_OF_TIME
    state, words = State.DONE if process.returncode == 0 else stopped, _last_words(log)
    if (junit := folder / "junit.xml").exists():
        state, words = _judge(junit, state, words)
    if interrupted:
        state = State.INTERRUPTED
    begun = [run for run in find_runs(folder) if run not in earlier]
    return Ending(state, words, monotonic() - begin, begun[-1] if begun else None)


def _await(process: subprocess.Popen[bytes], seconds: float) -> tuple[bool, bool]:
    """Waits; returns whether the process has ended, and whether somebody interrupted us."""
    try:
        with INTERRUPTS.raised():
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

"""Running a run to its end and telling of it: a bar on a terminal, ``log.txt``, a tracker.

Where a run trains on another host, it says each round in a line (:func:`spoken`), and who waits for
it shows the same bar from these (:func:`following`). Why it failed is such a line, too.
"""

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from hyperfed.errors import UserError, one_line
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.measures import Number
from hyperfed.runs.records import Evaluation, Lost
from hyperfed.runs.remarks import megabytes, remarks
from hyperfed.runs.trackers import tracking
from hyperfed.system.files import refused

if TYPE_CHECKING:
    from hyperfed.runs.run import Progress, Run

MOST_LINES, MOST_LETTERS = 20, 1500
"""Of why a run on another host failed."""


def watch(run: "Run", show: bool = True, told: Callable[["Progress"], None] | None = None) -> None:
    """Trains until the run is done or stopped.

    A run with a folder gets a ``log.txt`` that says what is learned from what, and has a line for
    each evaluation, the lost clients and why among it; its numbers go to the tracker that the
    settings name.

    Args:
        run: what to train.
        show: shows a progress bar on standard error, where that is a terminal.
        told: is called after every round.

    Raises:
        UserError: the disk refuses a record. The run can be resumed once it does not.
    """
    log = _Log(run.folder)
    try:
        log.write(
            f"{run.config.method} on {run.task.name}: {run.round} of {run.config.rounds} rounds"
        )
        if not run.round and len(run.task.x):  # of examples that are at sites it knows none
            for line in repr(run.task).splitlines():
                log.write(line)
        _train(run, log, show, told)
    except KeyboardInterrupt:
        log.write_if_possible(f"aborted after round {run.round}")
        raise
    except UserError as error:
        log.write_if_possible(f"error after round {run.round}: {error}")
        raise
    except Exception:
        log.write_if_possible(f"failed after round {run.round}\n{traceback.format_exc()}")
        raise
    for said in remarks(run.summary):
        log.write(said)
    log.write(f"{'done' if run.done else 'stopped'} after round {run.round}")


def _train(run: "Run", log: "_Log", show: bool, told: Callable[["Progress"], None] | None) -> None:
    with ExitStack() as stack:
        bar = None
        if show and sys.stderr.isatty():
            shown = _bar(run.config.method, run.round, run.config.rounds)
            bar = stack.enter_context(shown)
        record = stack.enter_context(tracking(run))
        for progress in run.train():
            if bar is not None:
                bar.advance(_said(progress))
            if progress.evaluation:
                log.write(_line(progress, run.task.name_of))
                record(progress.evaluation)
            if told is not None:
                told(progress)


def note(folder: RunFolder | None, text: str) -> None:
    """Appends a line to the ``log.txt`` of a run that does not train yet, if that can be."""
    _Log(folder).write_if_possible(text)


class _Log:
    """The ``log.txt`` of a run; nothing happens for one without a folder."""

    def __init__(self, folder: RunFolder | None) -> None:
        self._path = None if folder is None else folder.log

    def write(self, text: str) -> None:
        """Appends ``text`` with the time of day.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}\n")
        except OSError as error:
            raise refused(self._path, error) from error

    def write_if_possible(self, text: str) -> None:
        """Appends ``text``; for a failure that must not be hidden by a second one."""
        with suppress(UserError):
            self.write(text)


def _line(progress: "Progress", called: Callable[[int], str]) -> str:
    """Returns what the log says of a round with an evaluation; clients are ``called`` so."""
    any_split = next(iter(progress.evaluation.values()))
    parts = [
        f"{split} {_measured(e)}, worst decile {e.judged_by.told(e.main.worst_decile)}"
        for split, e in progress.evaluation.items()
    ]
    parts.append(
        f"{megabytes(any_split.bytes_down)} MB down, {megabytes(any_split.bytes_up)} MB up, "
        f"{any_split.seconds:.1f} s"
    )
    if any_split.missed:
        missed = ", ".join(_reason(lost, called) for lost in any_split.missed)
        parts.append(f"evaluated {any_split.evaluated} clients, without {missed}")
    if any_split.lost:
        lost = ", ".join(_reason(lost, called) for lost in any_split.lost)
        parts.append(f"lost {lost}")
    parts += (
        f"round {void.round} void, with replies of {', '.join(map(called, void.clients))} in it"
        for void in any_split.void
    )
    return f"round {progress.round} of {progress.rounds}: {'; '.join(parts)}"


def _reason(lost: Lost, called: Callable[[int], str]) -> str:
    return f"client {called(lost.client)} ({one_line(lost.reason)})"


class _Bar:
    """A progress bar with what the latest evaluation said."""

    def __init__(self, bar: RichProgress, task: TaskID) -> None:
        self._bar, self._task = bar, task
        self._lost = 0
        self._found = ""

    def advance(self, said: "_Said") -> None:
        """Shows a round more."""
        self._lost += said.lost
        self._found = said.found or self._found
        lost = f", lost {self._lost}" if self._lost else ""
        self._bar.update(self._task, completed=said.round, status=escape(self._found + lost))


def _measured(e: Evaluation) -> str:
    metric = e.judged_by
    return f"loss {_number(e.loss)}, {metric.label} {metric.told(e.main.value)}"


@dataclass(frozen=True)
class _Said:
    """What is said of a round: its number, of how many, clients lost, and what was found."""

    round: int
    rounds: int
    lost: int
    found: str


def _said(progress: "Progress") -> _Said:
    val = progress.evaluation.get("val")
    found = "" if val is None else f"val {_measured(val)}"
    return _Said(progress.round, progress.rounds, len(progress.lost), found)


def spoken(progress: "Progress") -> str:
    """Returns the line that says a round to those who wait for a run on another host."""
    said = _said(progress)
    found = f"; {said.found}" if said.found else ""
    return f"round {said.round} of {said.rounds}: lost {said.lost} clients{found}"


_SPOKEN = re.compile(r"round (\d{1,9}) of (\d{1,9}): lost (\d{1,9}) clients(?:; (.*))?", re.ASCII)


def _heard(line: str) -> _Said | None:
    """Returns what a line of a log says of a round; None of any other line."""
    match = _SPOKEN.fullmatch(line.strip())
    if match is None:
        return None
    number, rounds, lost, found = match.groups(default="")
    return _Said(int(number), int(rounds), int(lost), one_line(found, 100))


_FAILED = "failed: "


def spoken_failure(error: Exception) -> str:
    """Returns the line that says why a run ended to those who wait for it on another host."""
    named = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return _FAILED + json.dumps(f"{named}{error}"[:MOST_LETTERS])


def heard_failure(line: str) -> str:
    """Returns what a line of a log says of why a run ended; "" of any other line."""
    try:
        why = json.loads(line.removeprefix(_FAILED)) if line.startswith(_FAILED) else ""
    except (ValueError, RecursionError):  # of brackets in brackets
        return ""
    return "\n".join(map(one_line, why.splitlines()[:MOST_LINES])) if isinstance(why, str) else ""


@contextmanager
def following(method: str, rounds: int, show: bool) -> Iterator[Callable[[str], None] | None]:
    """Shows the progress of a run on another host from the lines of its log.

    A line that comes again, as all do where a log is read anew, shows nothing.

    Args:
        method: what trains there.
        rounds: how many there are to be.
        show: whether to, where standard error is a terminal.

    Yields:
        What is to be told each line; None where nothing is shown.
    """
    if not (show and sys.stderr.isatty()):
        yield None
        return
    latest = 0
    with _bar(method, 0, rounds, "waiting for the sites") as bar:

        def tell(line: str) -> None:
            nonlocal latest
            said = _heard(line)
            if said is not None and said.rounds == rounds and latest < said.round <= rounds:
                latest = said.round
                bar.advance(said)

        yield tell


@contextmanager
def _bar(method: str, done: int, rounds: int, status: str = "") -> Iterator[_Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    # On standard error, so that standard output holds nothing but results.
    with RichProgress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(method, total=rounds, completed=done, status=status)
        yield _Bar(bar, task)


def _number(value: Number) -> str:
    return "–" if value is None else f"{value:.3f}"

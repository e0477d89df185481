"""Running a run to its end and telling of it: a bar on a terminal, ``log.txt``, a tracker."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from hyperfed.errors import UserError, one_line
from hyperfed.runs.records import Evaluation, Lost, Number, RunFolder
from hyperfed.runs.report import megabytes, remark
from hyperfed.runs.trackers import tracking
from hyperfed.system.files import refused

if TYPE_CHECKING:
    from hyperfed.runs.run import Progress, Run


def watch(run: "Run", show: bool = True, told: Callable[["Progress"], None] | None = None) -> None:
    """Trains until the run is done or stopped.

    A run with a folder gets a line in ``log.txt`` for each evaluation, the lost clients and why
    among it; its numbers go to the tracker that the settings name.

    Args:
        run: what to train.
        show: shows a progress bar on standard error, where that is a terminal.
        told: is called after every round.

    Raises:
        UserError: the disk refuses a record. The run can be resumed once it does not.
    """
    log = _Log(run.folder)
    log.write(f"{run.config.method} on {run.task.name}: {run.round} of {run.config.rounds} rounds")
    try:
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
    if run.summary and (said := remark(run.summary)) is not None:
        log.write(said)
    log.write(f"{'done' if run.done else 'stopped'} after round {run.round}")


def _train(run: "Run", log: "_Log", show: bool, told: Callable[["Progress"], None] | None) -> None:
    with ExitStack() as stack:
        bar = stack.enter_context(_bar(run)) if show and sys.stderr.isatty() else None
        record = stack.enter_context(tracking(run))
        for progress in run.train():
            if bar is not None:
                bar.advance(progress)
            if progress.evaluation:
                log.write(_line(progress, run.task.name_of))
                record(progress.evaluation)
            if told is not None:
                told(progress)


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

    def advance(self, progress: "Progress") -> None:
        """Shows a round more."""
        self._lost += len(progress.lost)
        val = progress.evaluation.get("val")
        if val is not None:
            self._found = f"val {_measured(val)}"
        lost = f", lost {self._lost}" if self._lost else ""
        self._bar.update(self._task, completed=progress.round, status=self._found + lost)


def _measured(e: Evaluation) -> str:
    metric = e.judged_by
    return f"loss {_number(e.loss)}, {metric.label} {metric.told(e.main.value)}"


@contextmanager
def _bar(run: "Run") -> Iterator[_Bar]:
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
        task = bar.add_task(
            run.config.method, total=run.config.rounds, completed=run.round, status=""
        )
        yield _Bar(bar, task)


def _number(value: Number) -> str:
    return "–" if value is None else f"{value:.3f}"

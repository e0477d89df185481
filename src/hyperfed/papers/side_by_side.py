"""Jobs side by side: a process of one thread for each, and a display of how far they are."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from hyperfed.papers.reproduction import Job, carry_out
from hyperfed.system.signals import handled

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hyperfed.papers.zygote"])


@dataclass
class Outcome:
    """What became of jobs.

    Attributes:
        stopped: they can be gone on with.
        failed: job and why.
        ours: whether one of these is our fault, and not the input's.
    """

    stopped: list[Job] = field(default_factory=list)
    failed: list[tuple[Job, str]] = field(default_factory=list)
    ours: bool = False


@dataclass
class _Worker:
    job: Job
    process: BaseProcess
    pipe: Connection
    end: tuple[Any, ...] | None = None


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(jobs: Sequence[Job], at_once: int, *, show: bool, say: Callable[[str], None]) -> Outcome:
    """Does jobs, so many at once, until they are done or somebody stops them.

    SIGINT or SIGTERM has all that run end after their round, resumably, and begins no others; a
    second SIGINT kills them, which loses what came after the latest checkpoints.

    Args:
        jobs: none of them done; one that serves another's clients waits for that one.
        at_once: processes.
        show: shows bars on standard error, where that is a terminal.
        say: takes a line about each job that ends, where no bars are shown.
    """
    team = _Team(deque(jobs), at_once)
    with team.stopped_by_signals(), _display(jobs, show=show, say=say) as display:
        while team.hire() or team.workers:
            for worker, message in team.messages():
                match message:
                    case ("round", done, total):
                        display.advance(worker.job, done, total)
                    case _:
                        display.end(worker.job, message)
    return team.outcome


class _Team:
    """The processes."""

    def __init__(self, waiting: deque[Job], at_once: int) -> None:
        self.workers: dict[Connection, _Worker] = {}
        self.outcome = Outcome()
        self._waiting, self._at_once = waiting, at_once
        self._signals = 0

    def hire(self) -> bool:
        """Starts what can be started; returns whether there is anything left to start."""
        if self._signals:
            self.outcome.stopped += self._waiting
            self._waiting.clear()
        for job in list(self._waiting):
            if len(self.workers) >= self._at_once:
                break
            if job.trained is not None and (why := self._not_trained(job.trained)) is not None:
                if why:
                    self._waiting.remove(job)
                    self.outcome.failed.append((job, why))
                continue
            if any(other.folder == job.trained for other in self.outcome.stopped):
                self._waiting.remove(job)  # its process alone was told to stop
                self.outcome.stopped.append(job)
                continue
            self._waiting.remove(job)
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_process, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers[ours] = _Worker(job, process, ours)
            if self._signals:  # which came while it was started
                process.terminate()
        return bool(self._waiting)

    def _not_trained(self, folder: Path) -> str | None:
        """Returns None where a training is done, "" where it is not yet, or why it never is."""
        if any(job.folder == folder for job, _ in self.outcome.failed):
            return "what it serves failed to train"
        unfinished = [*self._waiting, *(worker.job for worker in self.workers.values())]
        return "" if any(job.folder == folder for job in unfinished) else None

    def messages(self) -> Iterator[tuple[_Worker, tuple[Any, ...]]]:
        """Waits for messages, and yields them with their worker; the end of each but once."""
        for pipe in wait(list(self.workers)):
            assert isinstance(pipe, Connection)
            worker = self.workers[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                yield worker, self._dismiss(worker)
                continue
            if message[0] == "round":
                yield worker, message
            else:
                worker.end = message

    def _dismiss(self, worker: _Worker) -> tuple[Any, ...]:
        """Says goodbye to a process that has ended, and returns how."""
        worker.process.join()
        worker.pipe.close()
        del self.workers[worker.pipe]
        end = worker.end
        if end is None and self._signals:
            end = ("stopped",)  # killed by the second signal
        elif end is None:
            end = ("failed", f"its process ended with {worker.process.exitcode}", True)
        match end:
            case ("stopped",):
                self.outcome.stopped.append(worker.job)
            case ("failed", str(why), ours):
                self.outcome.failed.append((worker.job, why))
                self.outcome.ours |= bool(ours)
        return end

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Has SIGINT and SIGTERM stop all processes, and a second SIGINT kill them."""

        def stop(number: int, frame: FrameType | None) -> None:
            again = self._signals > 0 and number == signal.SIGINT
            self._signals += 1
            for worker in list(self.workers.values()):
                worker.process.kill() if again else worker.process.terminate()

        with handled(stop):
            yield


def _process(job: Job, pipe: Connection) -> None:
    carry_out(job, pipe.send)


class _Display:
    """Lines about jobs that end."""

    def __init__(self, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
        self._say, self._all, self._ended = say, len(jobs), 0

    def advance(self, job: Job, done: int, total: int) -> None:
        """Takes what a job has come to."""

    def end(self, job: Job, message: tuple[Any, ...]) -> None:
        """Takes how a job ended."""
        self._ended += 1
        how = ": ".join(map(str, message[:2]))
        self._say(f"{job.name}: {how} ({self._ended} of {self._all})")


class _Bars(_Display):
    """A bar for all rounds of all jobs, with the time that is left, and one for each that runs."""

    def __init__(self, jobs: Sequence[Job], bars: RichProgress) -> None:
        super().__init__(jobs, lambda text: bars.console.print(text, markup=False, highlight=False))
        self._bars = bars
        self._total = bars.add_task("all cells", total=sum(job.rounds for job in jobs))
        self._of: dict[Path, TaskID] = {}
        self._done: dict[Path, int] = {}

    def advance(self, job: Job, done: int, total: int) -> None:
        """Moves the bars on."""
        if job.folder not in self._of:
            self._of[job.folder] = self._bars.add_task(f"{job.cell} seed {job.seed}", total=total)
            # What an earlier process has done says nothing of how long the rest takes.
            self._bars.update(self._total, total=self._whole() - (done - 1))
            self._done[job.folder] = done - 1
        self._bars.update(self._of[job.folder], completed=done)
        self._bars.advance(self._total, done - self._done[job.folder])
        self._done[job.folder] = done

    def end(self, job: Job, message: tuple[Any, ...]) -> None:
        """Takes the job's bar away, and what is left of it out of the sum."""
        if job.folder in self._of:
            self._bars.remove_task(self._of.pop(job.folder))
        left = job.rounds - self._done.get(job.folder, 0)
        if message[0] == "done":
            self._bars.advance(self._total, left)
        else:
            self._bars.update(self._total, total=self._whole() - left)
        super().end(job, message)

    def _whole(self) -> float:
        return next(t.total or 0.0 for t in self._bars.tasks if t.id == self._total)


@contextmanager
def _display(jobs: Sequence[Job], *, show: bool, say: Callable[[str], None]) -> Iterator[_Display]:
    if not show:
        yield _Display(jobs, lambda _: None)
        return
    if not sys.stderr.isatty():
        yield _Display(jobs, say)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True), expand=True) as bars:
        yield _Bars(jobs, bars)

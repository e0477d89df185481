"""Training on the command line: run by run, until all are done or somebody stops them."""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import print_exception
from types import FrameType
from typing import Any, NoReturn

import typer

from hyperfed.analysis import comparison, seeds, tried
from hyperfed.apps.flower import submit
from hyperfed.apps.guard import STOPPED, Tell, divide
from hyperfed.apps.printing import print_json, print_tables, say
from hyperfed.data import tasks
from hyperfed.data.tasks import of_nobody
from hyperfed.errors import EngineLostError, LostEverybodyError, UserError, one_line
from hyperfed.methods import METHODS
from hyperfed.runs import config, experiments
from hyperfed.runs.folder import read_run
from hyperfed.runs.progress import following, watch
from hyperfed.runs.records import FinishedRun
from hyperfed.runs.remarks import remarks
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig
from hyperfed.system.signals import handled

ALL = "all"
"""What stands for every method in the place of a method's name."""

FAULT = "a fault"
"""Why a run ended that fell over what is no user's to mend."""

ABORTED = "aborted"
"""How a run ended that was not even let finish its round."""


def own_process(loaded: Sequence[RunConfig], *, as_json: bool) -> Tell:
    """Goes on in a process of its own where what computes may end it; see :func:`divide`."""
    if any(it.engine.name == "ray" for it in loaded):
        return divide(as_json=as_json)
    return lambda folder: None


def train(run: Run, tell: Tell, *, as_json: bool, quiet: bool) -> None:
    """Trains, prints the result and the folder, and exits with 3 where the run was stopped."""
    tell(_folder(run))
    why = _watch(run, quiet=quiet)
    if as_json:
        print_json(_result(run))
    else:
        if run.summary and not quiet:
            _show(run)
        print(_folder(run), flush=True)
    if why is not None:
        _stop(run, why)


@dataclass(frozen=True)
class _Asked:
    """One of several runs.

    Attributes:
        config: its settings.
        point: those among them that are tried.
        seeds: whether there are others of other seeds.
    """

    config: RunConfig
    point: tried.Point
    seeds: bool

    def __str__(self) -> str:
        seed = f"seed {self.config.seed}" if self.seeds else ""
        return ", ".join(filter(None, (self.config.method, seed, *self.point)))


def train_all(
    source: str,
    each: Sequence[Sequence[str]],
    points: Sequence[tried.Point],
    out: Path,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Trains a method, or all, with each of some settings and compares.

    A run that loses everybody, or falls over a fault of its method or of ours, does not keep the
    others from theirs.

    Args:
        source: the method, all of them, or an experiment.
        each: settings, a list for each seed.
        points: settings that are tried, with all seeds each.
        out: the folder of all runs.
        as_json: print JSON.
        quiet: print results alone.

    Raises:
        Exit: with 3 where a run was stopped, with 1 where one fell over a fault, or lost everybody
            and was not tried among others.
        LostEverybodyError: all runs did.
    """
    asked = _load_all(source, each, points)  # no error after hours
    experiment = "" if source == ALL else experiments.name(source)
    tell = own_process([it.config for it in asked], as_json=as_json)
    build = cache(tasks.build)  # the same data for all, but a preset may have its own
    results: list[dict[str, Any]] = []
    of: list[tried.Point] = []
    left_out: list[str] = []
    for number, it in enumerate(asked, start=1):
        task = build(it.config.task, it.config.seed)
        with closing(Run.start(it.config, out, task, experiment)) as run:
            if not quiet:
                say(f"{it} ({number} of {len(asked)})")
            if number == 1:
                tell_of_data(run, quiet=quiet)
            tell(_folder(run))
            try:
                why = _watch(run, quiet=quiet)
            except Exception as error:
                # And not the error, which would keep in memory what the next may need.
                left_out.append(_leave_out(it, run, error))
                continue
            if why is not None:
                _stop(run, why, _not_begun(source, asked[number:], each, out))
            if not (quiet or as_json):
                _say_remarks(run.summary)
            results.append(_result(run))
            of.append(it.point)
    faulty = FAULT in left_out
    if left_out and not results:
        raise typer.Exit(1) if faulty else LostEverybodyError(left_out[-1])
    _print_all(results, of, points, trained=len(each), as_json=as_json)
    if not as_json:
        print(out, flush=True)
    if faulty or (left_out and len(points) == 1):
        raise typer.Exit(1)


def _leave_out(it: _Asked, run: Run, error: Exception) -> str:
    """Says why a run is not among the results; returns how it lost everybody, or :data:`FAULT`.

    Raises:
        UserError: it is the user's to mend, and the other runs would meet it, too.
    """
    if isinstance(error, LostEverybodyError):
        say(f"warning: left out: {it}: {error}")
        return str(error)
    if isinstance(error, UserError):
        raise error
    print_exception(error)  # whole, to be reported
    told = f"warning: left out: {it}: {type(error).__name__}, as said above"
    say(f"{told}; go on with: hyperfed resume {shlex.quote(str(_folder(run)))}")
    return FAULT


def _print_all(
    results: Sequence[Mapping[str, Any]],
    of: Sequence[tried.Point],
    points: Sequence[tried.Point],
    *,
    trained: int,
    as_json: bool,
) -> None:
    """Prints what runs came to, over several seeds too, and which of the points is the best.

    Args:
        results: of each run.
        of: its point.
        points: all that were tried.
        trained: how many seeds each was to be trained with.
        as_json: whether in JSON.
    """
    rows = comparison.compare([read_run(Path(result["folder"])) for result in results])
    of_groups = seeds.over_seeds(rows) if trained > 1 else []
    if as_json:
        over = [one.by_name for one in of_groups]
        print_json({"runs": results, "over_seeds": over} if of_groups else results)
        return
    print_tables(*comparison.tables(rows), *seeds.tables(of_groups))
    for line in tried.best(rows, of, points, trained) if len(points) > 1 else ():
        print(line)


def _load_all(
    source: str, each: Sequence[Sequence[str]], points: Sequence[tried.Point]
) -> list[_Asked]:
    """Returns what each run is of; of all methods without those that come to no last phase."""
    asked: list[_Asked] = []
    for method in METHODS if source == ALL else [source]:
        try:
            asked += [
                _Asked(config.load(named, [*settings, *point]), point, len(each) > 1)
                for point in points
                for named in [method if source == ALL else tried.source(point, method)]
                for settings in each
            ]
        except config.TooShortError as error:
            if source != ALL:
                raise
            say(f"warning: left out: {error}")
    if any(it.config.engine.name == "flower" for it in asked):
        raise UserError(
            "engine=flower must have one method, one seed and nothing tried; run one after another"
        )
    return asked


def tell_of_data(run: Run, *, quiet: bool) -> None:
    """Says what somebody's own data were taken for, of which no setting need say all."""
    if quiet:
        return
    if run.task.columns is not None and run.task.columns.features:
        say(repr(run.task))
    if told := of_nobody(run.config.task):
        say(told)


def _watch(run: Run, *, quiet: bool) -> str | None:
    """Trains; returns None where the run is done, else how it ended."""
    try:
        with _stopped_by_signals(run):
            watch(run, show=not quiet)
    except KeyboardInterrupt:
        return ABORTED
    except EngineLostError as error:
        return one_line(str(error))
    return None if run.summary else f"stopped after round {run.round} of {run.config.rounds}"


def _not_begun(
    source: str, left: Sequence[_Asked], each: Sequence[Sequence[str]], out: Path
) -> str:
    """Returns what is to be run when one of several was stopped; nothing of the last."""
    if not left:
        return ""
    if source == ALL or left[0].point:
        told = (" ".join([it.config.method, *it.point, f"seed={it.config.seed}"]) for it in left)
        return f"not begun: {', '.join(told)}"
    first, last = left[0].config.seed, left[-1].config.seed
    seeds = f"seed={first}..{last}"  # the last of each one's settings
    command = ["hyperfed", "run", source, *each[0][:-1], seeds, "--out", str(out)]
    return f"not begun: {seeds}; then run: {shlex.join(command)}"


def _stop(run: Run, why: str, beyond: str = "") -> NoReturn:
    """Says how to go on with a run, and with what is ``beyond`` it, and leaves."""
    say(f"{why}; go on with: hyperfed resume {shlex.quote(str(_folder(run)))}")
    if beyond:
        say(beyond)
    if why == ABORTED:
        os._exit(STOPPED)  # at once: an orderly exit waits for worker threads to end their steps
    raise typer.Exit(STOPPED)


def _show(run: FinishedRun) -> None:
    """Prints what a run that is done came to, and says what the numbers do not."""
    print_tables(*comparison.tables(comparison.compare([run])))
    _say_remarks(run.summary or {})


def _say_remarks(summary: Mapping[str, Any]) -> None:
    """Says of a run that is done what its numbers do not."""
    for remark in remarks(summary):
        say(remark)


def _folder(run: Run) -> Path:
    assert run.folder is not None, "a run of the command line has a folder"
    return run.folder.path


def _result(run: Run) -> dict[str, Any]:
    return {"folder": str(_folder(run)), "round": run.round, "summary": run.summary or None}


def submit_run(loaded: RunConfig, folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Has a SuperLink train, prints the result and the folder; 3 where the run can be resumed."""

    def taken(run: str) -> None:
        at = loaded.engine.superlink
        say(f"run {run} at {at}; Ctrl-C stops it; its records on that host: {folder.resolve()}")

    how = ""
    try:
        with following(loaded.method, loaded.rounds, not quiet) as tell:
            submit.train(loaded, folder, tell, None if quiet else taken)
    except KeyboardInterrupt:
        how = "stopped"
    except submit.RunFailedError as error:
        how = str(error)
    # The records are the ServerApp's, and here only where the SuperLink is on this host.
    done = read_run(folder) if (folder / "summary.json").exists() else None
    if as_json:
        print_json({"folder": str(folder), "summary": done and done.summary})
    else:
        if done and not quiet:
            _show(done)
        print(folder, flush=True)
    if how:
        say(f"{how}; go on with: hyperfed resume {shlex.quote(str(folder))}")
        raise typer.Exit(STOPPED)


@contextmanager
def _stopped_by_signals(run: Run) -> Iterator[None]:
    """Ends the run after the current round on Ctrl-C or SIGTERM; a second Ctrl-C aborts it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run.stop()
        with suppress(OSError):  # the terminal may be gone
            # Not print(): the signal may have come in the middle of one.
            os.write(2, b"\nstopping after this round; Ctrl-C aborts it\n")

    with handled(stop):
        yield

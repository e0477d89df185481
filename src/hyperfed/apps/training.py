"""Training on the command line: run by run, until all are done or somebody stops them."""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from hyperfed.apps.flower import submit
from hyperfed.apps.guard import STOPPED, Tell, divide
from hyperfed.apps.printing import print_json, print_tables, say
from hyperfed.data import tasks
from hyperfed.errors import EngineLostError, UserError, one_line
from hyperfed.methods import METHODS
from hyperfed.runs import comparison, config, experiments, seeds
from hyperfed.runs.folder import read_run
from hyperfed.runs.progress import following, watch
from hyperfed.runs.records import FinishedRun
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig
from hyperfed.system.signals import handled

ALL = "all"
"""What stands for every method in the place of a method's name."""

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


def train_all(
    source: str, each: Sequence[Sequence[str]], out: Path, *, as_json: bool, quiet: bool
) -> None:
    """Trains a method, or all, with each of some settings and compares; 3 where one was stopped."""
    loaded = _load_all(source, each)  # no error after hours
    experiment = "" if source == ALL else experiments.name(source)
    tell = own_process(loaded, as_json=as_json)
    build = cache(tasks.build)  # the same data for all, but a preset may have its own
    results: list[dict[str, Any]] = []
    for it in loaded:
        with closing(Run.start(it, out, build(it.task, it.seed), experiment)) as run:
            if not quiet:
                which = f", seed {it.seed}" if len(each) > 1 else ""
                say(f"{it.method}{which} ({len(results) + 1} of {len(loaded)})")
            if not results:
                tell_of_columns(run, quiet=quiet)
            tell(_folder(run))
            if (why := _watch(run, quiet=quiet)) is not None:
                _stop(run, why, _not_begun(source, loaded[len(results) + 1 :], each, out))
            if not (quiet or as_json):
                _say_remarks(run.summary)
            results.append(_result(run))
    done = [read_run(Path(result["folder"])) for result in results]
    rows = comparison.compare(done)
    of_groups = seeds.over_seeds(rows) if len(each) > 1 else []
    if as_json:
        over = [one.by_name for one in of_groups]
        print_json({"runs": results, "over_seeds": over} if of_groups else results)
        return
    print_tables(*comparison.tables(rows), *seeds.tables(of_groups))
    print(out, flush=True)


def _load_all(source: str, each: Sequence[Sequence[str]]) -> list[RunConfig]:
    """Returns the settings of each run; of all methods without those that come to no last phase."""
    loaded: list[RunConfig] = []
    for method in METHODS if source == ALL else [source]:
        try:
            loaded += [config.load(method, settings) for settings in each]
        except config.TooShortError as error:
            if source != ALL:
                raise
            say(f"warning: left out: {error}")
    if any(it.engine.name == "flower" for it in loaded):
        raise UserError("engine=flower must have one method and one seed; run one after another")
    return loaded


def tell_of_columns(run: Run, *, quiet: bool) -> None:
    """Says what a table was taken for, of which no setting need say all."""
    if not quiet and run.task.columns is not None and run.task.columns.features:
        say(repr(run.task))


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
    source: str, left: Sequence[RunConfig], each: Sequence[Sequence[str]], out: Path
) -> str:
    """Returns what is to be run when one of several was stopped; nothing of the last."""
    if not left:
        return ""
    if source == ALL:
        return f"not begun: {', '.join(f'{it.method} seed={it.seed}' for it in left)}"
    seeds = f"seed={left[0].seed}..{left[-1].seed}"  # the last of each one's settings
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
    for remark in comparison.remarks(summary):
        say(remark)


def _folder(run: Run) -> Path:
    assert run.folder is not None, "a run of the command line has a folder"
    return run.folder.path


def _result(run: Run) -> dict[str, Any]:
    return {"folder": str(_folder(run)), "round": run.round, "summary": run.summary or None}


def submit_run(loaded: RunConfig, folder: Path, *, as_json: bool, quiet: bool) -> None:
    """Has a SuperLink train, prints the result and the folder; 3 where the run can be resumed."""
    how = ""
    try:
        with following(loaded.method, loaded.rounds, not quiet) as tell:
            submit.train(loaded, folder, tell)
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

"""Personalised federated learning with hypernetworks: one model per client, no shared data.

Example:
    >>> import hyperfed
    >>> task = hyperfed.Task.from_arrays(x, y, client=ids, model=my_module, novel=2)
    >>> run = hyperfed.train("pfedhn", task, rounds=200, seed=0, out="runs")
    >>> run.summary["test_accuracy"]
    0.93
    >>> run.model(client=3)(batch)  # a client that trained: an nn.Module of its own
    >>> run.personalize(x_new, y_new)(batch)  # a client never seen
    >>> run = hyperfed.open_run("runs/pfedhn/20260101-120000-seed0")  # another day
    >>> run = hyperfed.resume("runs/pfedhn/20260102-120000-seed0")  # one that was stopped
    >>> hyperfed.compare("runs")  # a table of all that are done
"""

import logging
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperfed.errors import UserError, one_line
from hyperfed.system.files import absolute
from hyperfed.system.version import VERSION

if TYPE_CHECKING:
    from pandas import DataFrame

    from hyperfed.data.own import Task
    from hyperfed.runs.export import export_model
    from hyperfed.runs.run import Run

__all__ = [
    "Run",
    "Task",
    "UserError",
    "__version__",
    "compare",
    "export_model",
    "open_run",
    "resume",
    "train",
]

__version__ = VERSION

_HOME = {
    "Run": "hyperfed.runs.run",
    "Task": "hyperfed.data.own",
    "export_model": "hyperfed.runs.export",
}


def __getattr__(name: str) -> Any:
    """Imports what needs PyTorch, which takes seconds, when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def train(
    method: str,
    task: "Task | None" = None,
    /,
    *,
    out: str | Path | None = None,
    progress: bool = True,
    **keys: Any,
) -> "Run":
    """Trains a method and returns the finished run.

    Args:
        method: its name, such as "pfedhn".
        task: the data, with or without ``task=`` before it; built from ``task={...}`` keys where
            not given (``digits`` by default).
        out: a folder below which the run leaves its records; none by default.
        progress: shows a progress bar where there is a terminal.
        keys: every key of the command line; dotted ones as dicts: ``method={"local_steps": 20}``.

    Raises:
        UserError: settings or data are wrong; lists all errors at once.
    """
    from hyperfed.runs import config as configuration
    from hyperfed.runs.progress import watch
    from hyperfed.runs.run import Run
    from hyperfed.task import Task

    if isinstance(keys.get("task"), Task):
        if task is not None:
            raise UserError("there must be one task, but two were given; leave one out")
        task = keys.pop("task")
    settings = [key for key in keys if key == "task" or key.startswith("task.")]
    if task is not None and settings:
        raise UserError(
            f"a task that was made must come without settings of one, got {', '.join(settings)} "
            "beside it; make the task as you want it, or leave it out"
        )
    _check_task(task, "name data by the keyword task")
    config = configuration.from_keys(method, keys)
    run = Run(config, task) if out is None else Run.start(config, _place(out, "out"), task)
    watch(run, show=progress)
    return run


def _place(path: object, what: str) -> Path:
    """Returns where a folder is, wherever this process moves to; ``~`` is the home directory."""
    if isinstance(path, str | PathLike) and str(path) and "\0" not in str(path):
        return Path(absolute(str(Path(path))))
    raise UserError(
        f"{what} must be the path of a folder, got {one_line(repr(path), 100)}; name one, such as "
        "'runs'"
    )


def _check_task(task: object, instead: str) -> None:
    """Raises :class:`UserError` for what is no task, and says what can be done without one."""
    from hyperfed.task import Task

    if not isinstance(task, Task | None):
        raise UserError(
            f"the task must be a hyperfed.Task, got {one_line(repr(task), 100)}; make one with "
            f"hyperfed.Task.from_arrays, or {instead}"
        )


def compare(*runs: "Run | str | Path") -> "DataFrame":
    """Sets finished runs side by side, one row for each, as ``hyperfed compare --table`` does.

    Args:
        runs: runs, folders of runs, or folders that hold some, of which those that are not done are
            left out with a warning.

    Returns:
        Columns, among them: ``label`` and ``group``, by which runs are told apart and seeds belong
        together, ``test_accuracy``, ``worst_decile_accuracy`` and ``novel_accuracy`` from 0 to 1
        (or the task's own metric by its name), ``bytes_down`` and ``bytes_up``.

    Raises:
        UserError: there is none, or what is none; one is damaged, or a run that was given is not
            done.
    """
    import pandas

    from hyperfed.analysis import comparison
    from hyperfed.papers.agreement import read_runs
    from hyperfed.runs.records import FinishedRun

    found: list[FinishedRun] = []
    for run in runs:
        if not isinstance(run, str | Path | FinishedRun):
            raise UserError(
                "what is compared must be runs, and folders of some, one after another, got "
                f"{one_line(repr(run), 100)}; of a list: hyperfed.compare(*runs)"
            )
        if isinstance(run, str | Path):
            records = read_runs([_place(run, "what is compared")])
            for left in (record.path for record in records if record.summary is None):
                logging.getLogger(__name__).warning("left out, not done: %s", left)
            found += [record for record in records if record.summary is not None]
        else:
            found.append(run)
    if not found:
        raise UserError("there must be finished runs to compare, but there is none; give some")
    return pandas.DataFrame([row.by_name for row in comparison.compare(found)])


def open_run(path: str | Path, task: "Task | None" = None) -> "Run":
    """Opens a run from its folder, to use its models; on the CPU where its device is not here.

    Args:
        path: the run's folder.
        task: the data, where the run was started with its own; else built from the settings.

    Raises:
        UserError: not a run's folder, a damaged or foreign checkpoint, other data, or what is no
            task.
    """
    from hyperfed.runs.run import Run

    _check_task(task, "leave it out")
    return Run.open(_place(path, "a run to open"), task)


def resume(
    path: str | Path,
    task: "Task | None" = None,
    *,
    progress: bool = True,
    **keys: Any,
) -> "Run":
    """Goes on with a run that was stopped or killed, and returns it finished.

    Args:
        path: the run's folder.
        task: the data, where the run was started with its own; else built from the settings.
        progress: shows a progress bar where there is a terminal.
        keys: settings that it goes on with: ``device``, ``engine={...}``, ``checkpoint_every``,
            ``track``; more ``rounds`` than it was to have, with which one that is done goes on too.

    Raises:
        UserError: as :func:`open_run`; or the run is done, its device is not here, or it cannot go
            on with these settings.
    """
    from hyperfed.runs import config as configuration
    from hyperfed.runs.progress import watch
    from hyperfed.runs.run import Run

    _check_task(task, "leave it out; settings are keywords")
    run = Run.resume(_place(path, "a run to resume"), task, configuration.flat(keys))
    watch(run, show=progress)
    return run

"""Where the numbers of a run go besides its own records: TensorBoard, MLflow, Weights & Biases.

The records are whole without. A service that fails on the way is told and left alone, and training
goes on. A run that is resumed goes on in the tracker's own run too; rounds since the checkpoint
come there a second time, with the same numbers.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from pydantic import TypeAdapter

from hyperfed.errors import UserError, one_line
from hyperfed.runs.config import flat, to_dict
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import Evaluation
from hyperfed.runs.settings import RunConfig, TrackerName
from hyperfed.system.extras import how_to_install
from hyperfed.system.files import atomic_write, refused

Record = Callable[[Mapping[str, Evaluation]], None]
"""Takes the evaluations of one round by split."""

Ended = Literal["done", "stopped", "failed"]

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
)
"""Tracker -> what is imported for it."""

_CALLED = TypeAdapter(dict[str, str])

AT_ONCE = 100
"""Settings that MLflow takes in one request."""

log = logging.getLogger(__name__)


class Tracked(Protocol):
    """What is asked of a :class:`hyperfed.runs.run.Run`."""

    config: RunConfig
    folder: RunFolder | None
    round: int
    evaluations: list[Evaluation]
    summary: dict[str, Any]


class Tracker(Protocol):
    """Where numbers go. Each call may raise what it likes."""

    @property
    def id(self) -> str | None:
        """What the tracker calls its run, for a resumed run to go on with; None for none."""

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        """Takes the numbers of a round."""

    def close(self, ended: Ended) -> None:
        """Takes nothing more."""


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run.

    Attributes:
        name: of the run.
        settings: {dotted key: value}.
        folder: of the records; None where there are none.
        round: rounds done; later ones, which a killed run may have left, come again.
        id: what the tracker called the run before it was resumed.
    """

    name: str
    settings: Mapping[str, Any]
    folder: Path | None
    round: int
    id: str | None


def check(name: TrackerName | None) -> None:
    """Finds out whether a tracker can be had.

    Raises:
        UserError: what it needs is not installed.
    """
    if name is not None and name in PACKAGES:
        _package(name)


@contextmanager
def tracking(run: Tracked) -> Iterator[Record]:
    """Gives a function that hands evaluations on to the tracker that the settings name.

    At the end it hands on what novel clients came to, and the summary.

    Raises:
        UserError: the tracker is not installed, does not begin or, where it is TensorBoard, the
            disk refuses.
    """
    name, folder = run.config.track, None if run.folder is None else run.folder.path
    if name == "auto":
        name = "tensorboard" if folder is not None and _has_tensorboard() else None
    if name is None:
        yield lambda _: None
        return
    told = _Told(name, _opened(name, run, folder))
    ended: Ended = "failed"
    try:
        yield told.record
        ended = "done" if run.summary else "stopped"
        if run.summary:
            novel = [e for e in run.evaluations if e.split == "novel"][-1:]
            told.record({e.split: e for e in novel})
            told.log(_summary(run.summary), run.round)
    except KeyboardInterrupt:
        ended = "stopped"
        raise
    finally:
        told.close(ended)


class _Told:
    """A tracker that may fail: it is told once, and then left alone."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._failed = False

    def record(self, evaluations: Mapping[str, Evaluation]) -> None:
        """Hands on the evaluations of one round."""
        for split, evaluation in evaluations.items():
            self.log(_numbers(split, evaluation), evaluation.round)

    def log(self, numbers: Mapping[str, float | None], round: int) -> None:
        """Hands on the numbers that there are."""
        there = {name: number for name, number in numbers.items() if number is not None}
        self._attempt(lambda: self._tracker.log(there, round))

    def close(self, ended: Ended) -> None:
        """Ends the tracker's run."""
        self._attempt(lambda: self._tracker.close(ended))

    def _attempt(self, call: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            call()
        except UserError:
            raise
        except Exception as error:  # whatever a service raises, the run is worth more
            self._failed = True
            log.warning("%s takes no more numbers of this run: %s", self._name, error)


def _opened(name: str, run: Tracked, folder: Path | None) -> Tracker:
    package = _package(name)
    memo = None if folder is None else folder / "tracker.json"
    before = _called(memo) if memo is not None and memo.exists() else {}
    settings = flat(to_dict(run.config))
    title = f"{run.config.method} on {run.config.task.name}, seed {run.config.seed}"
    about = About(
        title if folder is None else f"{folder.parent.name}/{folder.name}",
        settings,
        folder,
        run.round,
        before.get(name),
    )
    try:
        tracker = TRACKERS[name](package, about)
    except UserError:
        raise
    except Exception as error:  # whatever a service raises is to be told
        raise UserError(
            f"track={name} must begin a run there, but: {error}; mend that, or leave track out"
        ) from error
    if memo is not None and tracker.id is not None:
        atomic_write(memo, json.dumps(before | {name: tracker.id}).encode())
    return tracker


def _called(memo: Path) -> dict[str, str]:
    """Returns {tracker: what it called the run before this was resumed}."""
    try:
        return _CALLED.validate_json(memo.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{memo} must say what trackers call their runs, but: {one_line(str(error), 100)}; "
            "restore it, or delete it to begin new ones"
        ) from error


class TensorBoard:
    """Event files in ``tensorboard/`` of the run's folder; ``tensorboard --logdir runs`` shows."""

    id = None

    def __init__(self, package: Any, about: About) -> None:
        if about.folder is None:
            raise UserError(
                "track=tensorboard must have a folder for its files, but the run keeps its records "
                "in memory; say out=..., or choose another tracker"
            )
        self._folder = about.folder / "tensorboard"
        try:
            # Hides what a killed run left of later rounds.
            self._writer = package.SummaryWriter(str(self._folder), purge_step=about.round + 1)
        except OSError as error:
            raise refused(self._folder, error) from error

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        """Writes scalars, at once.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        try:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, round)
            self._writer.flush()
        except OSError as error:
            raise refused(self._folder, error) from error

    def close(self, ended: Ended) -> None:
        """Closes the files."""
        with suppress(OSError):  # log() has flushed, or said that it cannot
            self._writer.close()


class MLflow:
    """A run of MLflow, inside the one that is active, where one is.

    MLflow's own settings say where (``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``).
    """

    def __init__(self, package: Any, about: About) -> None:
        self._mlflow = package
        nested = package.active_run() is not None
        started = package.start_run(run_id=about.id, run_name=about.name, nested=nested)
        self.id: str = started.info.run_id
        if about.id is None:
            settings = [(key, str(value)) for key, value in about.settings.items()]
            for start in range(0, len(settings), AT_ONCE):
                package.log_params(dict(settings[start : start + AT_ONCE]))

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        """Logs metrics."""
        self._mlflow.log_metrics(dict(numbers), step=round, run_id=self.id)

    def close(self, ended: Ended) -> None:
        """Ends the run."""
        status = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[ended]
        self._mlflow.end_run(status=status)


class WandB:
    """A run of Weights & Biases, in ``WANDB_PROJECT`` or in the project hyperfed."""

    def __init__(self, package: Any, about: About) -> None:
        self._run = package.init(
            project=os.environ.get("WANDB_PROJECT", "hyperfed"),
            name=about.name,
            config=dict(about.settings),
            dir=None if about.folder is None else str(about.folder),
            id=about.id,
            resume="allow",
            reinit="create_new",  # whoever calls us may have a run of their own
        )
        # Its own steps only grow, but a resumed run begins at its checkpoint.
        self._run.define_metric("*", step_metric="round")
        self.id: str = self._run.id

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        """Logs numbers over rounds."""
        self._run.log({**numbers, "round": round})

    def close(self, ended: Ended) -> None:
        """Ends the run."""
        self._run.finish(exit_code=0 if ended == "done" else 1)


TRACKERS: Mapping[str, Callable[[Any, About], Tracker]] = MappingProxyType(
    {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
)
"""Name -> what begins a run there, given the package of ``PACKAGES``."""


def _package(name: str) -> Any:
    try:
        return import_module(PACKAGES[name])
    except ImportError as error:
        raise UserError(
            f"track={name} must have {name}, which is not installed ({error}); "
            f"{how_to_install(name)}"
        ) from error


def _has_tensorboard() -> bool:
    try:
        import_module(PACKAGES["tensorboard"])
    except ImportError:
        return False
    return True


def _numbers(split: str, evaluation: Evaluation) -> dict[str, float | None]:
    metric = evaluation.metric
    return {
        f"{metric}/{split}": evaluation.main.value,
        f"loss/{split}": evaluation.loss,
        f"worst_decile_{metric}/{split}": evaluation.main.worst_decile,
        **{f"{name}/{split}": of.value for name, of in evaluation.others.items()},
        "bytes/down": evaluation.bytes_down,
        "bytes/up": evaluation.bytes_up,
        "seconds": evaluation.seconds,
    }


def _summary(summary: Mapping[str, Any]) -> dict[str, float | None]:
    return {f"summary/{key}": n for key, n in summary.items() if isinstance(n, int | float)}

"""What a run leaves on disk, and reading it back.

``runs/<experiment>/<timestamp>-seed<k>/`` holds ``config.toml``, ``metrics.jsonl`` (one
:class:`Evaluation` per line), ``summary.json``, ``log.txt``, ``status.json`` and ``checkpoint/``.
Files are replaced whole or not at all, lines are appended, and JSON says ``null`` where a number is
not finite.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from hyperfed.errors import LONGEST, UserError, one_line
from hyperfed.metrics import ACCURACY, Metric, named
from hyperfed.runs.measures import (
    Measure,
    Number,
    client_mean,
    client_std,
    finite,
    measure,
    weighted_mean,
    worst_decile,
)
from hyperfed.system.files import (
    PRIVATE,
    atomic_write,
    check_files,
    refused,
    remove_unfinished,
    sync,
)
from hyperfed.system.provenance import commit, versions
from hyperfed.trees import Tree, tree_map
from hyperfed.trees.checkpoints import load_latest, load_state, previous, save_latest

__all__ = [
    "Evaluation",
    "Lost",
    "Measure",
    "Number",
    "RunFolder",
    "RunRecord",
    "Void",
    "as_written",
    "atomic_write",
    "client_mean",
    "client_std",
    "commit",
    "find_runs",
    "load_latest",
    "load_state",
    "plain",
    "read_run",
    "save_latest",
    "summarise",
    "versions",
    "weighted_mean",
    "worst_decile",
]


@dataclass(frozen=True)
class Lost:
    """A client that gave no usable reply since the evaluation before, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Void:
    """A round that was taken back, since the server's state was not finite after it.

    Attributes:
        round: its number, from 0.
        clients: whose replies were in it.
    """

    round: int
    clients: tuple[int, ...]


@dataclass(frozen=True)
class Evaluation:
    """One line of ``metrics.jsonl``: the models of some clients on one split.

    Attributes:
        round: server iterations so far.
        split: ``val``, ``test`` or ``novel``.
        clients: (C,) ids.
        count: (C,) examples of each.
        client_accuracy: (C,) from 0 to 1; None of a task whose metric is another, like all
            accuracies then.
        client_loss: (C,) mean over a client's examples.
        client_masked_accuracy: (C,) accuracy among the classes that a client has.
        accuracy: mean over examples.
        loss: mean over examples.
        masked_accuracy: mean over examples.
        zeroed_accuracy: the same with the logits of classes that a client has not at zero, as
            PeFLL's authors count; None in records of before it was counted.
        diagnostics: what the server says of what it has learned
            (:meth:`hyperfed.federation.Server.diagnostics`), as :func:`plain` gives it; on ``val``
            alone, {} where it says nothing.
        accuracy_client_mean: mean over clients.
        accuracy_client_std: population standard deviation over clients.
        worst_decile_accuracy: mean over the worst tenth of the clients, at least one.
        bytes_down: sent to clients since the start.
        bytes_up: sent by clients since the start.
        seconds: since the start, time before a resume included.
        lost: clients lost since the evaluation before.
        void: rounds that were taken back since the evaluation before.
        missed: clients that this evaluation is without, since they gave it no usable answer.
        client_total_variation: of ``novel``, (C,) between the labels of a client and those of the
            known client nearest to it, from 0 to 1; () where labels are not known here.
        client_kl_divergence: the same in KL, in nats; None where it is infinite.
        metric: what models are judged by.
        measures: name of a metric -> what it came to, of all but the accuracies.
    """

    round: int
    split: str
    clients: tuple[int, ...]
    count: tuple[int, ...]
    client_accuracy: tuple[Number, ...]
    client_loss: tuple[Number, ...]
    client_masked_accuracy: tuple[Number, ...]
    accuracy: Number
    loss: Number
    masked_accuracy: Number
    accuracy_client_mean: Number
    accuracy_client_std: Number
    worst_decile_accuracy: Number
    bytes_down: int
    bytes_up: int
    seconds: float
    lost: tuple[Lost, ...] = ()
    zeroed_accuracy: Number = None
    diagnostics: dict[str, Any] = field(default_factory=dict, hash=False)
    void: tuple[Void, ...] = ()
    missed: tuple[Lost, ...] = ()
    client_total_variation: tuple[Number, ...] = ()
    client_kl_divergence: tuple[Number, ...] = ()
    metric: str = ACCURACY.name
    measures: dict[str, Measure] = field(default_factory=dict, hash=False)

    @property
    def main(self) -> Measure:
        """What the metric that models are judged by came to."""
        if self.metric != ACCURACY.name:
            return self.measures[self.metric]
        return Measure(
            self.accuracy,
            self.client_accuracy,
            self.accuracy_client_mean,
            self.accuracy_client_std,
            self.worst_decile_accuracy,
        )

    @property
    def judged_by(self) -> Metric:
        """The metric that models are judged by."""
        return named(self.metric)

    @property
    def others(self) -> dict[str, Measure]:
        """Every other metric, by name."""
        return {name: of for name, of in self.measures.items() if name != self.metric}

    def value(self, name: str) -> Number:
        """Returns a metric over all examples, by its name."""
        if name in self.measures:
            return self.measures[name].value
        found: Number = getattr(self, name)
        return found

    @property
    def evaluated(self) -> str:
        """How many clients there are numbers of, in words."""
        return f"{len(self.clients) - len(self.missed)} of {len(self.clients)}"


_EVALUATION = TypeAdapter(Evaluation)
_BEYOND = {"metric", "measures"}
"""Fields that a line is without where there are accuracies alone, as before there were others."""


def as_written(evaluation: Evaluation) -> dict[str, Any]:
    """Returns an evaluation as plain values, with the keys of its line in the metrics."""
    left_out = None if evaluation.measures else _BEYOND
    found: dict[str, Any] = _EVALUATION.dump_python(evaluation, mode="json", exclude=left_out)
    return found


def _line(evaluation: Evaluation) -> bytes:
    left_out = None if evaluation.measures else _BEYOND
    return _EVALUATION.dump_json(evaluation, exclude=left_out) + b"\n"


def summarise(
    *,
    round: int,
    split: str,
    clients: Sequence[int],
    count: Sequence[int],
    correct: Sequence[float],
    loss: Sequence[float],
    masked_correct: Sequence[float],
    zeroed_correct: Sequence[float],
    bytes_down: int,
    bytes_up: int,
    seconds: float,
    lost: Sequence[Lost] = (),
    void: Sequence[Void] = (),
    missed: Sequence[Lost] = (),
    metric: Metric = ACCURACY,
    others: Sequence[Metric] = (),
    counts: Mapping[str, Tensor] = MappingProxyType({}),
) -> Evaluation:
    """Turns what clients report, sums over their examples, into an :class:`Evaluation`.

    Args:
        round: server iterations so far.
        split: ``val``, ``test`` or ``novel``.
        clients: (C,) ids.
        count: (C,) examples; a client may have none.
        correct: (C,) sums of the task's score.
        loss: (C,) sums of the loss.
        masked_correct: (C,) sums of the score among the classes that a client has.
        zeroed_correct: (C,) sums of the score with the logits of all other classes at zero.
        bytes_down: sent to clients since the start.
        bytes_up: sent by clients since the start.
        seconds: since the start.
        lost: clients lost since the evaluation before.
        void: rounds that were taken back since the evaluation before.
        missed: clients that gave this evaluation no usable answer.
        metric: what models are judged by.
        others: what is measured beside it.
        counts: what these are made of, name -> (C, ...).
    """
    measures = {it.name: measure(it, counts) for it in others}
    if metric.name != ACCURACY.name:
        measures = {metric.name: measure(metric, counts)} | measures
        correct = masked_correct = zeroed_correct = [math.nan] * len(count)  # no accuracies
    held = [index for index, examples in enumerate(count) if examples]
    shares = [count[index] for index in held]
    accuracy, losses, masked, zeroed = (
        [sums[index] / count[index] for index in held]
        for sums in (correct, loss, masked_correct, zeroed_correct)
    )

    def per_client(values: Sequence[float]) -> tuple[Number, ...]:
        found = dict(zip(held, map(finite, values), strict=True))
        return tuple(found.get(index) for index in range(len(clients)))

    return Evaluation(
        round=round,
        split=split,
        clients=tuple(clients),
        count=tuple(count),
        client_accuracy=per_client(accuracy),
        client_loss=per_client(losses),
        client_masked_accuracy=per_client(masked),
        accuracy=weighted_mean(accuracy, shares),
        loss=weighted_mean(losses, shares),
        masked_accuracy=weighted_mean(masked, shares),
        zeroed_accuracy=weighted_mean(zeroed, shares),
        accuracy_client_mean=client_mean(accuracy),
        accuracy_client_std=client_std(accuracy),
        worst_decile_accuracy=worst_decile(accuracy),
        bytes_down=bytes_down,
        bytes_up=bytes_up,
        seconds=seconds,
        lost=tuple(lost),
        void=tuple(void),
        missed=tuple(missed),
        metric=metric.name,
        measures=measures,
    )


def plain(tree: Tree) -> dict[str, Any]:
    """Returns a tree as nested lists of numbers, for a record.

    Floats have four digits, so that a table of all clients by all clients stays small; they are
    None where they are not finite.
    """
    found: dict[str, Any] = _rounded(tree_map(Tensor.tolist, tree))
    return found


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(inner) for key, inner in value.items()}
        case list():
            return [_rounded(inner) for inner in value]
        case float():
            return finite(float(f"{value:.4g}"))
    return value


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, or where one is to be.

    Attributes:
        path: where it is.

    Raises:
        UserError: a pipe, or another thing that is no file, is in it.
    """

    path: Path

    def __post_init__(self) -> None:
        for folder in (self.path, self.state.parent):
            check_files(folder)

    @classmethod
    def create(cls, parent: Path, experiment: str, seed: int, timestamp: datetime) -> "RunFolder":
        """Makes ``parent/experiment/<timestamp>-seed<k>``, numbered from 2 where that is taken.

        Raises:
            UserError: the folder cannot be made.
        """
        name = f"{timestamp:%Y%m%d-%H%M%S}-seed{seed}"
        group = parent / experiment
        try:
            group.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                folder = cls(group / (name if number == 1 else f"{name}-{number}"))
                with contextlib.suppress(FileExistsError):  # a run that began in the same second
                    folder.path.mkdir(mode=PRIVATE)
                    break
            folder.state.parent.mkdir()
        except OSError as error:
            raise refused(group, error) from error
        return folder

    @property
    def config(self) -> Path:
        """All settings, as :func:`hyperfed.runs.config.dump` writes them."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One :class:`Evaluation` per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The final numbers; there is none before a run ends."""
        return self.path / "summary.json"

    @property
    def status(self) -> Path:
        """What it does now (:mod:`hyperfed.runs.status`)."""
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        """What a run says on the way."""
        return self.path / "log.txt"

    @property
    def state(self) -> Path:
        """The latest checkpoint, with the one before it beside it."""
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return self.state.exists() or previous(self.state).exists()

    @property
    def sites(self) -> Path:
        """Who the clients are, where they are at sites (:class:`hyperfed.data.roster.Roster`)."""
        return self.path / "sites.json"

    def append(self, evaluation: Evaluation) -> None:
        """Adds a line to the metrics, whole or not at all.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        try:
            with self.metrics.open("ab", buffering=0) as file:
                start, line = file.tell(), _line(evaluation)
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as error:
            raise refused(self.metrics, error) from error

    def sync(self) -> None:
        """Has the disk keep the metrics, without which a checkpoint is of no use.

        Raises:
            UserError: the disk refuses.
        """
        if self.metrics.exists():
            sync(self.metrics)

    def clean(self) -> None:
        """Removes what a killed process was about to put in place.

        Raises:
            UserError: the disk refuses.
        """
        for folder in (self.path, self.state.parent):
            remove_unfinished(folder)

    def truncate_after(self, round: int) -> None:
        """Drops what a resumed run writes again: later rounds, and novel clients (the end's).

        A last line that a kill cut short goes too.

        Raises:
            UserError: the metrics are damaged, or the disk refuses.
        """
        kept = [e for e in self.evaluations() if e.round <= round and e.split != "novel"]
        atomic_write(self.metrics, b"".join(map(_line, kept)))

    def evaluations(self) -> list[Evaluation]:
        """Returns the metrics so far, without a last line that a kill cut short.

        Raises:
            UserError: the metrics are damaged.
        """
        whole = _read(self.metrics).rpartition(b"\n")[0] if self.metrics.exists() else b""
        found: list[Evaluation] = []
        first: dict[tuple[int, str], Evaluation] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                evaluation = _EVALUATION.validate_json(line)
                _check(evaluation)
                if first.setdefault((evaluation.round, evaluation.split), evaluation) != evaluation:
                    raise ValueError("another line is of the same round and split")
                found.append(evaluation)
            except ValueError as error:  # pydantic's too
                raise UserError(
                    f"every line of {self.metrics} must be an evaluation, but line {number} is "
                    f"not: {line[:60]!r}; restore the file or remove that line"
                ) from error
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the final numbers; those that are not finite become null.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        text = json.dumps(_finite_only(summary), indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write(self.summary, f"{text}\n".encode())


def _check(evaluation: Evaluation) -> None:
    """Raises ``ValueError`` where numbers are not such as :func:`summarise` gives."""
    told = vars(evaluation)
    if min(*(told[name] for name in ("round", "bytes_down", "bytes_up")), *evaluation.count, 0) < 0:
        raise ValueError("a number is below zero")
    each = ("count", "client_accuracy", "client_loss", "client_masked_accuracy")
    if {len(told[name]) for name in each} != {len(evaluation.clients)}:
        raise ValueError("each client must have one number of each kind")
    if evaluation.metric != ACCURACY.name and evaluation.metric not in evaluation.measures:
        raise ValueError("what models are judged by is not measured")
    if not all(name.isprintable() for name in (evaluation.metric, *evaluation.measures)):
        raise ValueError("a metric's name is no word")
    of_clients = (value for name in each for value in told[name])
    if any(isinstance(n, float) and not math.isfinite(n) for n in (*told.values(), *of_clients)):
        raise ValueError("a number is not finite")


def _check_words(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where what is shown as it is, or taken apart, is no word."""
    method = config.get("method")
    words = {
        "method.name": method.get("name") if isinstance(method, dict) else None,
        "metric": summary.get("metric", ACCURACY.name),
        "evaluated": summary.get("evaluated") or "",
        "novel_evaluated": summary.get("novel_evaluated") or "",
    }
    for key, word in words.items():
        if not (isinstance(word, str) and word.isprintable() and len(word) <= LONGEST):
            raise ValueError(f"{key} is {one_line(repr(word), 60)}")


def _finite_only(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _finite_only(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite_only(inner) for inner in value]
        case float():
            return finite(value)
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} must be a readable file, but: {error.strerror}; "
            f"{path.parent} must be the folder of a run"
        ) from error


@dataclass(frozen=True)
class RunRecord:
    """A run as it stands on disk.

    Attributes:
        path: its folder.
        config: all settings, nested as in the file.
        evaluations: in the order of the run.
        summary: the final numbers; None for a run that has not ended.
    """

    path: Path
    config: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    summary: dict[str, Any] | None


def read_run(path: Path) -> RunRecord:
    """Reads a run's folder.

    Raises:
        UserError: it is not one, or a file in it is damaged.
    """
    folder = RunFolder(path)
    settings = _read(folder.config)
    numbers = _read(folder.summary) if folder.summary.exists() else b"null"
    try:
        config, summary = tomllib.loads(settings.decode()), json.loads(numbers)
        if not isinstance(summary, dict | None):
            raise ValueError(f"the summary is {one_line(numbers.decode(), 60)}")
        _check_words(config, summary or {})
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} must hold a TOML config and JSON summary, but: {error}") from error
    return RunRecord(path, config, tuple(folder.evaluations()), summary)


def find_runs(parent: Path) -> list[Path]:
    """Returns the folders of all runs in ``parent`` or below, sorted by name."""
    return sorted(config.parent for config in parent.rglob("config.toml"))

"""What a run writes down at an evaluation, and at its end."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

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
from hyperfed.runs.settings import RunConfig
from hyperfed.trees import Tree, tree_map

REHEARSAL = "rehearsal"
"""Validation data under the models that known clients would have as newcomers.

By it a method with :attr:`hyperfed.federation.Server.rehearse` chooses its best round. Records of
before it was written down lack it.
"""

MOST_NUMBERS = 100_000
"""Of a server's diagnostics that an evaluation records, about a megabyte: what thousands of clients
take from each other, at each evaluation, is more than memory and disks hold.
"""


@dataclass(frozen=True)
class Lost:
    """A client that gave no usable reply since the evaluation before, and why."""

    client: int
    reason: str


@dataclass(frozen=True)
class Void:
    """A round that was taken back: too few clients, unusable replies, or a server not finite.

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
        split: ``val``, ``test``, ``novel``, or :data:`REHEARSAL`.
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
            alone, {} where it says nothing, or more than :data:`MOST_NUMBERS`.
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
        client_zeroed_accuracy: (C,) of each client's own; () in records of before it was told.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

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
    client_zeroed_accuracy: tuple[Number, ...] = ()

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
        """How many clients were evaluated, in words; who has no examples is one of them."""
        return f"{len(self.clients) - len(self.missed)} of {len(self.clients)}"


@runtime_checkable
class FinishedRun(Protocol):
    """What a report needs: a :class:`hyperfed.runs.run.Run` that is done, or its record on disk."""

    @property
    def config(self) -> RunConfig | Mapping[str, Any]:
        """All settings; of a record, nested as in its file."""

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """In the order of the run."""

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The final numbers."""


_EVALUATION = TypeAdapter(Evaluation)
_BEYOND = {"metric", "measures"}
"""Fields that a line is without where there are accuracies alone, as before there were others."""


def deciding(evaluations: Iterable[Evaluation]) -> str:
    """Returns the split by which a run chooses its best round: the rehearsal, where it has one."""
    return REHEARSAL if any(e.split == REHEARSAL for e in evaluations) else "val"


def as_written(evaluation: Evaluation) -> dict[str, Any]:
    """Returns an evaluation as plain values, with the keys of its line in the metrics."""
    left_out = None if evaluation.measures else _BEYOND
    found: dict[str, Any] = _EVALUATION.dump_python(evaluation, mode="json", exclude=left_out)
    return found


def as_line(evaluation: Evaluation) -> bytes:
    """Returns an evaluation as its line in the metrics."""
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
        split: as of an evaluation.
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
        client_zeroed_accuracy=per_client(zeroed),
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


def from_line(line: bytes) -> Evaluation:
    """Reads a line of the metrics.

    Raises:
        ValueError: it is no evaluation, or has numbers that :func:`summarise` would not give.
    """
    evaluation = _EVALUATION.validate_json(line)
    _check(evaluation)
    return evaluation


def _check(evaluation: Evaluation) -> None:
    """Raises ``ValueError`` where numbers are not such as :func:`summarise` gives."""
    told = vars(evaluation)
    if min(*(told[name] for name in ("round", "bytes_down", "bytes_up")), *evaluation.count, 0) < 0:
        raise ValueError("a number is below zero")
    each = ["count", "client_accuracy", "client_loss", "client_masked_accuracy"]
    if evaluation.client_zeroed_accuracy:
        each.append("client_zeroed_accuracy")
    if {len(told[name]) for name in each} != {len(evaluation.clients)}:
        raise ValueError("each client must have one number of each kind")
    if evaluation.metric != ACCURACY.name and evaluation.metric not in evaluation.measures:
        raise ValueError("what models are judged by is not measured")
    if not all(name.isprintable() for name in (evaluation.metric, *evaluation.measures)):
        raise ValueError("a metric's name is no word")

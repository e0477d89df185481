"""Finished runs as of when they had spent a budget: rounds, visits, megabytes or seconds.

A round of one method sends several times what one of another does. So which is better may depend on
whether both had as many rounds or sent as much.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from hyperfed.errors import UserError
from hyperfed.metrics import ACCURACY, RMSE
from hyperfed.runs.config import to_dict
from hyperfed.runs.evaluation import is_better
from hyperfed.runs.numbers import numbers
from hyperfed.runs.records import Evaluation, FinishedRun, deciding
from hyperfed.runs.settings import RobustConfig, RunConfig, cohort_size
from hyperfed.trees import Tree

Along = Callable[[FinishedRun, Evaluation], float]
"""Where on an axis an evaluation is."""


def _visits(run: FinishedRun, evaluation: Evaluation) -> float:
    """Returns how many clients have been asked so far, each round counted anew."""
    config = run.config
    cohort = config.cohort if isinstance(config, RunConfig) else config["cohort"]
    return evaluation.round * cohort_size(cohort, len(evaluation.clients))


AXES: Mapping[str, tuple[str, Along]] = MappingProxyType(
    {
        "rounds": ("round", lambda _, e: e.round),
        "client-visits": ("clients visited", _visits),
        "mb": ("MB sent, both ways", lambda _, e: (e.bytes_down + e.bytes_up) / 1e6),
        "seconds": ("seconds", lambda _, e: e.seconds),
    }
)
"""Name of what runs go along -> its label, and where on it an evaluation is."""


def axis_of(name: str) -> tuple[str, Along]:
    """Returns an axis.

    Raises:
        UserError: there is none of that name.
    """
    if name not in AXES:
        raise UserError(f"the axis must be one of {', '.join(AXES)}, came {name!r}")
    return AXES[name]


@dataclass(frozen=True)
class Budget:
    """What each run may have spent.

    Attributes:
        axis: of what, a key of ``AXES``.
        most: of it.
    """

    axis: str
    most: float

    def __str__(self) -> str:
        return f"{self.axis}={self.most:g}"


def budget_of(text: str, runs: Sequence[FinishedRun]) -> Budget:
    """Reads a budget.

    Args:
        text: ``AXIS=MOST``, or ``AXIS`` alone for as much as the run that spent least; who spent
            nothing, such as clients that train alone and send nothing, does not count.
        runs: that are to be compared.

    Raises:
        UserError: no such axis, no number above zero, or a run without test data.
    """
    axis, given, most = text.partition("=")
    _, along = axis_of(axis)
    if not given:
        spent = [max(along(run, e) for e in _tests(run)) for run in runs]
        return Budget(axis, min(filter(None, spent), default=0.0))
    try:
        value = float(most)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise UserError(
            f"a budget must be {axis}=NUMBER with a number above 0, or {axis} alone for what the "
            f"thriftiest run spent, came {text!r}"
        )
    return Budget(axis, value)


@dataclass(frozen=True)
class Within:
    """A finished run as of when it had spent a budget; a ``FinishedRun``."""

    config: RunConfig | Mapping[str, Any]
    evaluations: Sequence[Evaluation]
    summary: Mapping[str, Any]


def within(run: FinishedRun, budget: Budget) -> FinishedRun:
    """Returns a run as if it had ended with its last evaluation within a budget.

    One that spent no more is returned as it is. Of another the best round is the best until then,
    by the validation number that its settings name, of a rehearsal where there is one. Clients that
    joined afterwards were served at the end of the run, so that there are no numbers of them.

    Raises:
        UserError: it is not done, or had no evaluation so early.
    """
    if not run.summary:
        raise UserError("a run to compare must be done, but one has no summary; resume it first")
    _, along = axis_of(budget.axis)
    kept = [e for e in run.evaluations if e.split != "novel" and along(run, e) <= budget.most]
    tested = {e.round: e for e in kept if e.split == "test"}
    if not tested:
        first = min(along(run, e) for e in _tests(run))
        exact = str(first).removesuffix(".0")  # rounded, it might be too little
        raise UserError(
            f"every run must have been evaluated within {budget}, but one of "
            f"{run.summary.get('method')} was first at {first:g}; take {budget.axis}={exact} or "
            "more, or leave it out"
        )
    last = tested[max(tested)]
    if last.round == run.summary["rounds"]:
        return run
    best = tested[_best_round(run, kept, tested)]
    ended = {
        "rounds": last.round,
        "best_round": best.round,
        "bytes_down": last.bytes_down,
        "bytes_up": last.bytes_up,
        "seconds": last.seconds,
    }
    return Within(run.config, kept, {**run.summary, **numbers(best, None, None), **ended})


def _best_round(
    run: FinishedRun, kept: Sequence[Evaluation], tested: Mapping[int, Evaluation]
) -> int:
    """Returns the best round as the run would have chosen it; without validation data the last."""
    config = to_dict(run.config)
    best, robust = config.get("best", "accuracy"), config.get("robust", {})
    mean = robust.get("aggregation", "mean") == "mean"
    hostile = None if mean else robust.get("hostile", RobustConfig().hostile)
    split, chosen = deciding(kept), None
    found = [e for e in kept if e.split == split and e.round in tested]
    pooled = best == "zeroed_accuracy" and not all(e.client_zeroed_accuracy for e in found)
    for e in sorted(found, key=lambda e: e.round):
        now = _told(e, best, pooled=pooled)
        if chosen is None or is_better(now, chosen[1], hostile):
            chosen = e.round, now
    return max(tested) if chosen is None else chosen[0]


def _told(of: Evaluation, best: str, *, pooled: bool) -> Tree:
    """Returns what a round is compared by (:func:`hyperfed.runs.evaluation.chosen_by`).

    Args:
        of: the round.
        best: the number that counts.
        pooled: that is ``zeroed_accuracy``, and there is a record that lacks it by client.
    """
    count, scores, missed = of.count, of.main.client, {lost.client for lost in of.missed}
    there = [client not in missed for client in of.clients]
    accuracies = of.metric == ACCURACY.name
    if (own := of.measures.get(best.replace(ACCURACY.name, of.metric))) is not None:
        scores = own.client  # also of a score of one's own among the classes that a client has
    elif accuracies and best == "masked_accuracy":
        scores = of.client_masked_accuracy
    elif accuracies and pooled:
        count, scores, there = (sum(count),), (of.zeroed_accuracy,), [True]
    elif accuracies and best == "zeroed_accuracy":
        scores = of.client_zeroed_accuracy
    correct = []
    for n, score in zip(count, scores, strict=True):
        value = math.nan if score is None else score
        if of.metric == RMSE.name:
            value = -(value**2)
        # A share of n is a whole number again, so that what is alike stays so.
        correct.append(round(n * value, 6) if accuracies else n * value)
    return {
        "there": torch.tensor(there),
        "count": torch.tensor(count, dtype=torch.float64),
        "correct": torch.tensor(correct, dtype=torch.float64),
    }


def _tests(run: FinishedRun) -> list[Evaluation]:
    """Returns the evaluations of known clients on test data.

    Raises:
        UserError: there are none.
    """
    found = [e for e in run.evaluations if e.split == "test"]
    if not found:
        raise UserError("a run to compare must have been evaluated on test data, but one was not")
    return found

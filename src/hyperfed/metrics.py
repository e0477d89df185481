"""Metrics: what is made of the counts of an evaluation, how it is shown, and which way is better.

A client counts on its own examples (:func:`count`), and no prediction leaves it. A metric is a
function of counts, of one client's or of the sum over clients. So what a record says of a
federation is pooled: that of all its examples together, wherever they are. The mean over clients
of what each has by its own counts stands beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

Counts = Mapping[str, Tensor]
"""Name -> float64 counts: those of an evaluation (``count``, ``correct``), and of :data:`KINDS`."""


def _mean(counts: Counts) -> Tensor:
    return counts["correct"] / counts["count"]


@dataclass(frozen=True)
class Metric:
    """A number that says how good models are.

    Attributes:
        name: in records, settings and columns of data.
        label: in tables and figures.
        value: (counts) -> scalar; not finite where the counts do not say it.
        less_is_better: as of an error.
        unit: "%" is of fractions, which are shown by the hundred.
        kind: what has to be counted for it beside the sum of scores; a key of :data:`KINDS`.
    """

    name: str
    label: str
    value: Callable[[Counts], Tensor] = _mean
    less_is_better: bool = False
    unit: str = ""
    kind: str = ""

    @property
    def percents(self) -> bool:
        """Whether values are fractions."""
        return self.unit == "%"

    @property
    def scale(self) -> float:
        """By what a value is multiplied where it is shown."""
        return 100.0 if self.percents else 1.0

    @property
    def header(self) -> str:
        """The heading of a column of values."""
        return f"{self.label} %" if self.percents else self.label

    @property
    def short(self) -> str:
        """What stands in a heading after the word that says of what the values are."""
        return "%" if self.percents else self.label

    def axis(self, of: str = "test {}") -> str:
        """Returns the label of an axis, such as "test accuracy (%)"; ``{}`` is the metric."""
        label = of.replace("{}", self.label)
        return f"{label} ({self.unit})" if self.unit else label

    @property
    def better(self) -> str:
        """Which way is better, in words."""
        return f"{'less' if self.less_is_better else 'more'} is better"

    def shown(self, value: float | None) -> str:
        """Returns a value as under :attr:`header`, or a dash where there is none."""
        if value is None:
            return "–"
        return f"{100 * value:.1f}" if self.percents else _in_digits(value)

    def told(self, value: float | None) -> str:
        """Returns a value as in a sentence, with its sign of per cent."""
        return f"{self.shown(value)} %" if self.percents else self.shown(value)

    def spread(self, mean: float | None, std: float | None) -> str:
        """Returns mean ± standard deviation, or a dash."""
        return "–" if mean is None or std is None else f"{self.shown(mean)} ± {self.shown(std)}"

    def gain(self, ours: float, theirs: float) -> float:
        """Returns by how much a value is better than another; below 0 where it is worse."""
        return theirs - ours if self.less_is_better else ours - theirs

    def order(self, value: float | None) -> tuple[bool, float]:
        """Returns a key by which the worst sorts first: no value, then the least good."""
        return (False, 0.0) if value is None else (True, self.gain(value, 0.0))


def _in_digits(value: float) -> str:
    """Returns four digits, or all before the point where there are a few more."""
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:#.4g}"


# From counts to a number.


def _mean_squared_error(counts: Counts) -> Tensor:
    return (0 - counts["correct"]) / counts["count"]  # scores are minus squared errors


def _r2(counts: Counts) -> Tensor:
    """Returns 1 - sum of squared errors / sum of squared deviations of targets from their mean."""
    total, squares = counts["targets"].unbind()
    deviation = squares - total.square() / counts["count"]
    rounding = counts["count"] * torch.finfo(torch.float64).eps * squares
    if deviation <= rounding:  # of targets that are all alike it says nothing
        return torch.full_like(deviation, torch.nan)
    return 1 + counts["correct"] / deviation


ACCURACY = Metric("accuracy", "accuracy", unit="%")
RMSE = Metric(
    "rmse",
    "RMSE",
    lambda counts: _mean_squared_error(counts).sqrt(),
    less_is_better=True,
    unit="in the target's unit",
)
MSE = Metric("mse", "MSE", _mean_squared_error, less_is_better=True)
R2 = Metric("r2", "R2", _r2, kind="targets")

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        metric.name: metric
        for metric in (
            ACCURACY,
            RMSE,
            MSE,
            R2,
        )
    }
)
"""Name -> a metric that is known; others are means of a task's own score."""

ON_REQUEST = tuple(name for name, metric in METRICS.items() if metric.kind)
"""Metrics that need counts which tell of targets, and so are counted where they are asked for."""

TAKEN = ("loss", "client", "number", "split", "round", "examples")
"""Names of columns beside those of metrics."""

S = TypeVar("S", bound=Callable[..., Tensor])


def scores(metric: Metric) -> Callable[[S], S]:
    """Marks a score of a task, (output, y) -> (B,), as that which a metric is made of."""

    def mark(score: S) -> S:
        score.__dict__["metric"] = metric
        return score

    return mark


def metric_of(score: Callable[..., Any]) -> Metric:
    """Returns the metric of a task's score; of a user's own its mean, called as the function is.

    More is better there. A function without a name is called ``score``.
    """
    known = getattr(score, "metric", None)
    if isinstance(known, Metric):
        return known
    name = getattr(score, "__name__", "score")
    if not name.isidentifier() or name in TAKEN:
        name = "score"
    return named(f"{name}_score" if name in METRICS and name != ACCURACY.name else name)


def among_own(metric: Metric) -> tuple[Metric, ...]:
    """Returns a mean score among the classes that a client has, and with the others at zero."""

    def of(name: str) -> Metric:
        return Metric(
            f"{name}_{metric.name}",
            f"{name} {metric.label}",
            lambda counts: counts[f"{name}_correct"] / counts["count"],
            unit=metric.unit,
        )

    return of("masked"), of("zeroed")


def named(name: str) -> Metric:
    """Returns a metric by its name in a record."""
    return METRICS.get(name) or Metric(name, name)


# What clients count.


def _of_targets(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """Returns (2,) the sum of targets and that of their squares."""
    y = y.double()
    return torch.stack([y.sum(), y.square().sum()])


KINDS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = MappingProxyType(
    {"targets": _of_targets}
)
"""What can be counted on a batch of outputs (B, ...) and targets (B,), beside scores and losses."""


def kinds(metrics: Sequence[str]) -> tuple[str, ...]:
    """Returns what has to be counted for metrics."""
    wanted = {METRICS[name].kind for name in metrics}
    return tuple(kind for kind in KINDS if kind in wanted)


def shape(kind: str, classes: int) -> tuple[int, ...]:
    """Returns the shape of counts of a kind."""
    return {"targets": (2,)}[kind]


_ROUNDING = 1e-6
"""By which part counts may miss what they must sum to: some are means over several models."""


def why_not(kind: str, counts: Counts, correct: Tensor | None) -> str | None:
    """Returns why a client's counts of a kind cannot be those of its examples; None if they can.

    Args:
        kind: a key of :data:`KINDS`.
        counts: of one client.
        correct: how many are right; None where a score is not that.
    """
    total, squares = counts[kind].unbind()
    possible = total.square() <= squares * counts["count"] * (1 + _ROUNDING)  # Cauchy and Schwarz
    return None if possible and squares >= 0 else f"targets {total:g} and squares {squares:g}"

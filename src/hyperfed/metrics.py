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
        """Returns mean ± standard deviation, the mean alone where there is none, or a dash."""
        return self.shown(mean) if std is None else f"{self.shown(mean)} ± {self.shown(std)}"

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
    """Returns 1 - sum of squared errors / sum of squared deviations of targets from their mean.

    Of targets of several numbers both are sums over these, each of which has a mean of its own.
    """
    total, squares = counts["targets"].unbind()
    deviation = (squares - total.square() / counts["count"]).sum()
    rounding = counts["count"] * torch.finfo(torch.float64).eps * squares.sum()
    if deviation <= rounding:  # of targets that are all alike it says nothing
        return torch.full_like(deviation, torch.nan)
    return 1 + counts["correct"] * total.numel() / deviation  # scores are means over the numbers


def _balanced_accuracy(counts: Counts) -> Tensor:
    """Returns the mean over classes that there are of the share that is right (their recall)."""
    of_class, _, right = counts["classes"].unbind()
    there = of_class > 0
    return (right[there] / of_class[there]).mean()


def _macro_f1(counts: Counts) -> Tensor:
    """Returns the mean of 2 right / (examples + predictions) over classes that have either."""
    of_class, predicted, right = counts["classes"].unbind()
    both = of_class + predicted
    there = both > 0
    return (2 * right[there] / both[there]).mean()


def _calibration_error(counts: Counts) -> Tensor:
    """Returns the expected calibration error (Guo et al., ICML 2017, equation 3)."""
    _, confidence, right = counts["bins"].unbind()
    return (right - confidence).abs().sum() / counts["count"]


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
            Metric(
                "balanced_accuracy",
                "balanced accuracy",
                _balanced_accuracy,
                unit="%",
                kind="classes",
            ),
            Metric("f1", "macro F1", _macro_f1, unit="%", kind="classes"),
            Metric(
                "calibration",
                "calibration error",
                _calibration_error,
                less_is_better=True,
                unit="%",
                kind="bins",
            ),
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


def of_each_class(output: Tensor, y: Tensor, classes: int) -> bool:
    """Returns whether outputs have a number for each class, or more.

    A task whose loss and score are a user's own may have others, such as one for two classes.

    Args:
        output: (B, ..., outputs), or (B,) where there is one.
        y: (B, ...) labels.
        classes: their number.
    """
    return output.ndim > y.ndim and output.shape[-1] >= classes


BINS = 15
"""Of confidence, all of one width."""


def _of_targets(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """Returns (2, ...) the sum over examples of each number of targets, and of its square."""
    y = y.double()
    return torch.stack([y.sum(dim=0), y.square().sum(dim=0)])


def _of_classes(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """Returns (3, classes): examples of a class, predictions of it, and those that are right."""
    predicted = output.argmax(dim=-1)
    # A network may have more outputs than there are classes: what it says there is right of none.
    right = y.where(predicted == y, classes)
    return torch.stack([_tally(of.clamp(max=classes), classes) for of in (y, predicted, right)])


def _of_bins(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """Returns (3, 15): examples whose confidence is in a bin, its sum over them, those right.

    Confidence is the largest probability by the softmax of the outputs; bin b has what is above
    b / 15, up to (b + 1) / 15.
    """
    probability, predicted = output.double().softmax(dim=-1).max(dim=-1)
    place = (probability * BINS).ceil().long().clamp(1, BINS) - 1
    ones = torch.ones_like(probability)
    right = (predicted == y).double()
    return torch.stack([_tally(place, BINS, each) for each in (ones, probability, right)])


def _tally(place: Tensor, places: int, each: Tensor | None = None) -> Tensor:
    """Returns (places,) float64 sums of ``each``, or ones; what stands behind the last is left."""
    each = torch.ones_like(place, dtype=torch.float64) if each is None else each
    return each.new_zeros(places + 1).scatter_add(0, place, each)[:places]


KINDS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = MappingProxyType(
    {"targets": _of_targets, "classes": _of_classes, "bins": _of_bins}
)
"""What can be counted on a batch of outputs and targets (B, ...), beside scores and losses."""


def kinds(metrics: Sequence[str]) -> tuple[str, ...]:
    """Returns what has to be counted for metrics."""
    wanted = {METRICS[name].kind for name in metrics}
    return tuple(kind for kind in KINDS if kind in wanted)


def shape(kind: str, classes: int, target: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of counts of a kind.

    Args:
        kind: a key of :data:`KINDS`.
        classes: number of labels.
        target: the shape of an example's target.
    """
    return {"targets": (2, *target), "classes": (3, classes), "bins": (3, BINS)}[kind]


_ROUNDING = 1e-6
"""By which part counts may miss what they must sum to: some are means over several models."""


def why_not(kind: str, counts: Counts, correct: Tensor | None) -> str | None:
    """Returns why a client's counts of a kind cannot be those of its examples; None if they can.

    Args:
        kind: a key of :data:`KINDS`.
        counts: of one client.
        correct: how many are right; None where a score is not that.
    """
    found, count = counts[kind], counts["count"]
    slack = _ROUNDING * max(1.0, float(count))
    if kind == "targets":
        total, squares = found.unbind()
        possible = total.square() <= squares * count * (1 + _ROUNDING)  # Cauchy and Schwarz
        if bool((possible & (squares >= 0)).all()):
            return None
        return f"targets {float(total.sum()):g} and squares {float(squares.sum()):g}"
    examples, _, right = found.unbind()
    if found.min() < 0 or (examples.sum() - count).abs() > slack:
        return f"{kind} of {float(examples.sum()):g} examples of {float(count):g}"
    if (right > examples + slack).any():
        return f"{kind} with more right than there are"
    if correct is not None and right.sum() > correct + slack:
        return f"{kind} with {float(right.sum()):g} right of {float(correct):g}"
    return (
        _impossible_classes(found, slack) if kind == "classes" else _impossible_bins(found, slack)
    )


def _impossible_classes(found: Tensor, slack: float) -> str | None:
    examples, predicted, right = found.unbind()
    if predicted.sum() > examples.sum() + slack or (right > predicted + slack).any():
        return f"classes with {float(predicted.sum()):g} predictions"
    return None


def _impossible_bins(found: Tensor, slack: float) -> str | None:
    examples, confidence, _ = found.unbind()
    lowest = examples * torch.arange(BINS) / BINS
    if (confidence < lowest - slack).any() or (confidence > lowest + examples / BINS + slack).any():
        return f"bins with confidence {float(confidence.sum()):g}"
    return None

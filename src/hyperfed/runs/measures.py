"""What a run measures, and what that came to over clients: of all together, and of each alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hyperfed import metrics
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.errors import UserError
from hyperfed.metrics import Metric
from hyperfed.runs.settings import RunConfig

Number = float | None
"""A measured number; None where there is none, or none that is finite."""


def names_beside(config: RunConfig, task: Task) -> tuple[str, ...]:
    """Returns the names of what is measured beside the task's own metric.

    R2 needs the sum of a client's targets and that of their squares, so clients at sites are asked
    for it on request alone.

    Raises:
        UserError: the task has not what a metric is about.
    """
    regression, at_sites = task.metric is metrics.RMSE, isinstance(task, RemoteTask)
    if config.best != "accuracy" and not task.classes:
        raise UserError(
            f"best must be accuracy, which stands for the task's own metric, {task.metric.label}, "
            f"where there are no classes, got {config.best}; leave it out"
        )
    for name in config.metrics:
        if regression if name != "r2" else not regression:
            raise UserError(
                f"metrics must suit the task, but {name} is of "
                f"{'numbers' if name == 'r2' else 'classes'}; leave it out"
            )
        if name != "r2" and (not task.classes or task.y.ndim > 1):
            raise UserError(
                f"metrics must suit the task, but {name} needs one label for each example, which "
                f"{task.name} has not; leave it out"
            )
        if name != "r2" and (size := task.without_classes) is not None:
            raise UserError(
                f"metrics must suit the task, but {name} needs an output for each of "
                f"{task.classes} classes, which model {size!r} has not; leave it out, or change "
                "the model's last layer, and loss and score with it"
            )
    always = ("r2",) if regression and not at_sites else ()
    return (*always, *(name for name in dict.fromkeys(config.metrics) if name not in always))


def beside(task: Task) -> list[Metric]:
    """Returns the metrics that a task is measured by beside its own, as they are told."""
    found = [metrics.METRICS[name] for name in task.metrics]
    if task.metric is metrics.RMSE:
        return [metrics.MSE, *found]
    if task.metric is not metrics.ACCURACY and task.classes:
        return [*found, *metrics.among_own(task.metric)]
    return found


@dataclass(frozen=True)
class Measure:
    """A metric of the models of C clients.

    Attributes:
        value: of the counts of all clients together (pooled): every example counts once. An RMSE is
            the root of the mean squared error of all examples, and no mean of clients' RMSE.
        client: (C,) of each client's own counts.
        client_mean: mean over clients, each counting once.
        client_std: population standard deviation over clients.
        worst_decile: mean over the worst tenth of the clients, at least one: the lowest accuracies,
            the largest errors.
    """

    value: Number
    client: tuple[Number, ...]
    client_mean: Number
    client_std: Number
    worst_decile: Number


def measure(metric: Metric, counts: Mapping[str, Tensor]) -> Measure:
    """Returns what a metric makes of the counts of C clients.

    Args:
        metric: the metric.
        counts: name -> (C, ...) float64 counts, with ``count`` the examples of each client.
    """
    held = (counts["count"] > 0).tolist()
    client = [
        finite(float(metric.value({name: of[place] for name, of in counts.items()})))
        if there
        else None
        for place, there in enumerate(held)
    ]
    pooled = {name: of.sum(dim=0) for name, of in counts.items()}
    return Measure(
        finite(float(metric.value(pooled))) if any(held) else None,
        tuple(client),
        **over_clients(metric, client),
    )


def over_clients(metric: Metric, client: Sequence[Number]) -> dict[str, Number]:
    """Returns mean, deviation and worst tenth of the values of clients that have one."""
    there = [value for value in client if value is not None]
    return {
        "client_mean": client_mean(there),
        "client_std": client_std(there),
        "worst_decile": worst_decile(there, less_is_better=metric.less_is_better),
    }


# Aggregates over clients, which are those with examples: None where there are none.


def weighted_mean(values: Sequence[float], count: Sequence[int]) -> Number:
    """Returns the mean over examples: (C,) clients' values weighted with their (C,) counts."""
    total = sum(count)
    if not total:
        return None
    return finite(sum(v * n for v, n in zip(values, count, strict=True)) / total)


def client_mean(values: Sequence[float]) -> Number:
    """Returns the mean over (C,) clients, each counting once."""
    return finite(sum(values) / len(values)) if values else None


def client_std(values: Sequence[float]) -> Number:
    """Returns the population standard deviation over (C,) clients."""
    mean = client_mean(values)
    if mean is None:
        return None
    return finite(math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)))


def worst_decile(values: Sequence[float], *, less_is_better: bool = False) -> Number:
    """Returns the mean over the worst tenth of (C,) clients, rounded down but at least one."""
    worst_first = sorted(values, reverse=less_is_better)
    return client_mean(worst_first[: max(1, len(values) // 10)])


def finite(value: float) -> Number:
    """Returns a number, or None for one that is not finite."""
    return value if math.isfinite(value) else None

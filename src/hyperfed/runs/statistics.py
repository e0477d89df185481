"""What can be said of a number over seeds, and of two methods on the same clients."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hyperfed.metrics import ACCURACY, Metric
from hyperfed.runs.measures import Number, worst_decile
from hyperfed.runs.records import Evaluation

CONFIDENCE = 0.95
"""Of every interval."""


@dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
        mean: over seeds.
        std: sample standard deviation (over S - 1); None for one seed.
        seeds: their number S.
    """

    mean: float
    std: Number
    seeds: int


@dataclass(frozen=True)
class Scores:
    """The metric of each client of a run.

    Attributes:
        seed: of the run.
        data: fingerprint of the data and of who holds what: a client is the same in two runs where
            it is.
        clients: id -> value, accuracies from 0 to 1; without those that have no examples.
        metric: by which models are judged.
    """

    seed: int
    data: str
    clients: Mapping[int, float]
    metric: Metric = ACCURACY

    @property
    def of(self) -> tuple[int, str, str]:
        """What two runs have in common that can be compared client by client."""
        return self.seed, self.data, self.metric.name


@dataclass(frozen=True)
class Difference:
    """What clients gain by one method over another.

    Attributes:
        mean: of ours less theirs over clients, or of theirs less ours where less is better: above
            0, ours is better.
        low: where the interval begins, by Student's t over clients; None for a single client.
        high: where it ends.
        clients: over how many.
        gaining: the share of them that ours serves better.
        agree: whether each pair of runs says the same of which one is better.
    """

    mean: float
    low: Number
    high: Number
    clients: int
    gaining: float
    agree: bool

    @property
    def within_noise(self) -> bool:
        """Whether the interval has zero in it, seeds disagree, or there is no interval."""
        if self.low is None or self.high is None:
            return True
        return self.low <= 0 <= self.high or not self.agree


class Measured(Protocol):
    """A run that is done, or its record."""

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """In the order of the run."""

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The final numbers."""


def spread(values: Sequence[float]) -> Spread:
    """Returns mean and deviation of a number, one value for each seed, at least one."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


def scores(run: Measured, split: str = "test") -> Scores:
    """Returns each client's metric, at the best validation round; of novel clients, the last."""
    summary = run.summary or {}
    best = summary.get("best_round")
    found: dict[int, float] = {}
    metric = ACCURACY
    for e in run.evaluations:
        if e.split == split and (split == "novel" or e.round == best):
            pairs, metric = zip(e.clients, e.main.client, strict=True), e.judged_by
            found = {client: value for client, value in pairs if value is not None}
    return Scores(summary.get("seed", 0), str(summary.get("data_fingerprint")), found, metric)


def worst(run: Scores) -> Number:
    """Returns the mean over the tenth of the clients that are served worst; None without any."""
    less = run.metric.less_is_better
    return worst_decile(list(run.clients.values()), less_is_better=less)


def difference(ours: Iterable[Scores], theirs: Iterable[Scores]) -> Difference | None:
    """Compares two methods on the clients that both have served, seed by seed.

    A client that several seeds have, where data are the same for all of them, counts once, by its
    mean difference. The interval is over clients: of which there might have been others. Of seeds
    there are too few for one; whether they agree is told instead.

    Args:
        ours: of one method. Each run is set against all of the other method that have its seed.
        theirs: of the other.

    Returns:
        None where no pair of runs has a seed, its data, a metric and clients in common.
    """
    by_run: dict[tuple[int, str, str], list[Mapping[int, float]]] = defaultdict(list)
    for run in theirs:
        by_run[run.of].append(run.clients)
    gains: dict[tuple[str, int], list[float]] = defaultdict(list)
    means: list[float] = []
    for run, other in ((own, clients) for own in ours for clients in by_run[own.of]):
        gain = {
            client: run.metric.gain(value, other[client])
            for client, value in run.clients.items()
            if client in other
        }
        for client, value in gain.items():
            gains[run.data, client].append(value)
        if gain:
            means.append(statistics.fmean(gain.values()))
    if not means:
        return None
    values = [statistics.fmean(several) for several in gains.values()]
    mean, low, high = statistics.fmean(values), None, None
    if (n := len(values)) > 1:
        from scipy.special import stdtrit  # takes long to import

        reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2))
        reach *= statistics.stdev(values) / math.sqrt(n)
        low, high = mean - reach, mean + reach
    agree = all(value > 0 for value in means) or all(value < 0 for value in means)
    gaining = sum(value > 0 for value in values) / n
    return Difference(mean, low, high, n, gaining, agree)

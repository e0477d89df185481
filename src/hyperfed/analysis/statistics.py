"""What can be said of a number over seeds, and of two methods on the same clients."""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hyperfed.metrics import ACCURACY, Metric
from hyperfed.runs.measures import Number, worst_decile
from hyperfed.runs.records import FinishedRun

CONFIDENCE = 0.95
"""Of every interval."""

Seed = TypeVar("Seed", bound=Hashable)
"""What runs have in common that are one: a seed, or a seed, its data and the metric."""


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
            it is, or by its name.
        clients: id -> value, accuracies from 0 to 1; without those that have no examples.
        metric: by which models are judged.
        names: of all clients by id, where data have them; else empty.
    """

    seed: int
    data: str
    clients: Mapping[int, float]
    metric: Metric = ACCURACY
    names: Sequence[str] = ()

    @property
    def of(self) -> tuple[int, str, str]:
        """What two runs have in common that can be compared client by client."""
        return self.seed, self.data, self.metric.name

    def who(self, client: int) -> tuple[str, int | str]:
        """Who a client is: by name also where another seed numbers or divides the data anew."""
        named = client < len(self.names)
        return ("", self.names[client]) if named else (self.data, client)

    @property
    def shown(self) -> dict[int, float]:
        """Each client's value as it is drawn, by id: a fraction by the hundred."""
        return {client: self.metric.scale * value for client, value in self.clients.items()}


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
        seeds: of how many seeds there is such a pair.
        divisions: of how many divisions of the data.
        seeds_low: where the interval over seeds begins, by Student's t over the mean difference of
            each, whose mean its middle is; None for a single seed.
        seeds_high: where it ends.
    """

    mean: float
    low: Number
    high: Number
    clients: int
    gaining: float
    agree: bool
    seeds: int = 1
    divisions: int = 1
    seeds_low: Number = None
    seeds_high: Number = None

    @property
    def within_noise(self) -> bool:
        """Whether the interval has zero in it, seeds disagree, or there is no interval."""
        return self.low is None or _has_zero(self.low, self.high) or not self.agree

    @property
    def mark(self) -> str:
        """What is said of it in a word.

        ``noise`` where it is within noise; ``here`` where it is not, but the interval over seeds
        has zero in it or all seeds are of one division, as one alone is: clear on these clients,
        not shown for another division of the data; else nothing.
        """
        if self.within_noise:
            return "noise"
        of_one = self.divisions == 1
        return "here" if of_one or _has_zero(self.seeds_low, self.seeds_high) else ""


def spread(values: Sequence[float]) -> Spread:
    """Returns mean and deviation of a number, one value for each seed, at least one."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


def by_seed(values: Iterable[tuple[Seed, Number]]) -> dict[Seed, float]:
    """Returns {seed: mean of its runs}, of (seed, value) of each; {} where a run has no value."""
    found: dict[Seed, list[float]] = defaultdict(list)
    for seed, value in values:
        if value is None:
            return {}
        found[seed].append(value)
    return {seed: statistics.fmean(several) for seed, several in found.items()}


def best(methods: Sequence[Mapping[Seed, float]], metric: Metric) -> int | None:
    """Returns which of some methods is best, by the seeds that each two of them have in common.

    Means over unlike seeds do not compare, as one division of the data is harder than another. The
    best is the one that no other beats on the seeds of both or, where each is beaten, as may be
    where seeds differ, the one that is beaten by least.

    Args:
        methods: {seed: value} of each; {} of one that is not to be the best.
        metric: which way values are better.

    Returns:
        Its place; None where no two have a seed in common.
    """
    least: dict[int, float] = {}
    for place, ours in enumerate(methods):
        for other, theirs in enumerate(methods):
            if other != place and (both := ours.keys() & theirs.keys()):
                own, its = (statistics.fmean(of[seed] for seed in both) for of in (ours, theirs))
                least[place] = min(metric.gain(own, its), least.get(place, math.inf))
    return max(least, key=lambda place: least[place], default=None)


def scores(run: FinishedRun, split: str = "test") -> Scores:
    """Returns each client's metric, at the best validation round; of novel clients, the last."""
    summary = run.summary or {}
    best = summary.get("best_round")
    found: dict[int, float] = {}
    metric = ACCURACY
    for e in run.evaluations:
        if e.split == split and (split == "novel" or e.round == best):
            pairs, metric = zip(e.clients, e.main.client, strict=True), e.judged_by
            found = {client: value for client, value in pairs if value is not None}
    data, told = str(summary.get("data_fingerprint")), summary.get("clients")
    names = tuple(map(str, told)) if isinstance(told, list) else ()
    return Scores(summary.get("seed", 0), data, found, metric, names)


def worst(run: Scores) -> Number:
    """Returns the mean over the tenth of the clients that are served worst; None without any."""
    less = run.metric.less_is_better
    return worst_decile(list(run.clients.values()), less_is_better=less)


def difference(ours: Iterable[Scores], theirs: Iterable[Scores]) -> Difference | None:
    """Compares two methods on the clients that both have served, seed by seed.

    A client that several seeds have, by its name or where data are the same for all of them, counts
    once, by its mean difference. (Of natural clients without a name, such as the writers of a named
    data set, records do not tell who they are: each seed's count anew.) One interval is over
    clients, which it takes for independent, also those of a seed, who share a server and a division
    of the data: it answers for these clients. How much another seed may change, that over seeds
    tells, wide as it is for a few of them.

    Args:
        ours: of one method. Each run is set against all of the other method that have its seed.
        theirs: of the other.

    Returns:
        None where no pair of runs has a seed, its data, a metric and clients in common.
    """
    by_run: dict[tuple[int, str, str], list[Mapping[int, float]]] = defaultdict(list)
    for run in theirs:
        by_run[run.of].append(run.clients)
    gains: dict[tuple[str, int | str], list[float]] = defaultdict(list)
    divisions: set[str] = set()
    means: dict[int, list[float]] = defaultdict(list)
    for run, other in ((own, clients) for own in ours for clients in by_run[own.of]):
        gain = {
            client: run.metric.gain(value, other[client])
            for client, value in run.clients.items()
            if client in other
        }
        for client, value in gain.items():
            gains[run.who(client)].append(value)
        if gain:
            divisions.add(run.data)
            means[run.seed].append(statistics.fmean(gain.values()))
    if not means:
        return None
    values = [statistics.fmean(several) for several in gains.values()]
    every = [value for several in means.values() for value in several]
    seeds_low, seeds_high = _interval([statistics.fmean(several) for several in means.values()])
    low, high = _interval(values)
    return Difference(
        mean=statistics.fmean(values),
        low=low,
        high=high,
        clients=len(values),
        gaining=sum(value > 0 for value in values) / len(values),
        agree=all(value > 0 for value in every) or all(value < 0 for value in every),
        seeds=len(means),
        divisions=len(divisions),
        seeds_low=seeds_low,
        seeds_high=seeds_high,
    )


def _interval(values: Sequence[float]) -> tuple[Number, Number]:
    """Returns the ends of Student's interval of a mean; None of a single value."""
    if (n := len(values)) == 1:
        return None, None
    from scipy.special import stdtrit  # takes long to import

    mean = statistics.fmean(values)
    reach = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / math.sqrt(n)
    return mean - reach, mean + reach


def _has_zero(low: Number, high: Number) -> bool:
    return low is not None and high is not None and low <= 0 <= high

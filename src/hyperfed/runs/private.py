"""Private training of a run: how much noise its epsilon takes, found out before it begins.

How often a client answers is known beforehand: cohorts are drawn from the seed, never from data. So
the noise is that of the client who answers most often, and no chance of not being drawn is counted
in anybody's favour: a cohort is of a fixed size, drawn without replacement, and what is private is
any client's data, in exchange for any others; no theorem on sampling that we know holds for both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hyperfed import privacy, trees
from hyperfed.engines import Engine
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.made_up import made_up
from hyperfed.engines.replies import UNUSABLE
from hyperfed.engines.updates import KEPT, PrivateUpdates, without_negative_variances
from hyperfed.errors import UserError, one_line
from hyperfed.federation import AllLostError, Server
from hyperfed.privacy import Ledger
from hyperfed.runs.settings import RunConfig, cohort_size, one_step
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from hyperfed.trees import Tree
from hyperfed.trees.aggregation import MEAN, MeanNoise

NOT_COVERED = (
    "counts of evaluations, numbers of examples, distances between the labels of clients that are "
    "here, and at sites what each introduces itself with "
    "beside these: a hash of its data, mean and deviation of its images' channels, number and "
    "names of its classes"
)
"""What is told of clients as it is, as records say it."""


def cohort_of(config: RunConfig, task: Task, round: int) -> list[int]:
    """Draws a round's cohort uniformly, without replacement; a number above all means all."""
    draw = generator(config.seed, "cohort", round)
    order = torch.randperm(len(task.known), generator=draw)
    return sorted(order[: cohort_size(config.cohort, len(task.known))].tolist())


@dataclass(frozen=True)
class Answers:
    """How often a client answers with what depends on its data.

    Attributes:
        round: in a round that it takes part in; of a trusted server, the means that it is in.
        serving: whenever its model is made, of a known client.
        novel: whenever its model is made, of a novel one.
    """

    round: int
    serving: int
    novel: int


def plan(config: RunConfig, task: Task, method: ModuleType) -> PrivateUpdates | None:
    """Returns how clients' answers are made private; None where they are not to be.

    Raises:
        UserError: with these settings a client answers with what is no update.
    """
    wanted = config.privacy
    if wanted.epsilon is None:
        return None
    each = answers_of(config, task, method)
    drawn = Counter(c for number in range(config.rounds) for c in cohort_of(config, task, number))
    evaluations = -(-config.rounds // config.evaluate_every)
    most = max(drawn.values()) * each.round + evaluations * each.serving
    if not (most := max(most, each.novel)):
        raise UserError(
            f"privacy.epsilon must be none for {config.method}, whose clients answer with nothing "
            "that depends on their data; leave it out"
        )
    multiplier = privacy.multiplier_of(wanted.epsilon, wanted.delta, most)
    return wanted.updates(multiplier)


def answers_of(config: RunConfig, task: Task, method: ModuleType) -> Answers:
    """Finds out how often a client answers, from clients with made-up examples.

    Raises:
        UserError: an answer is no update, or one by which models are made too long to be kept.
    """
    task = made_up(task)
    settings = one_step(config.settings)
    wanted = config.privacy
    free = PrivateUpdates(wanted.where, wanted.bound, 1.0, float("inf"), wanted.delta)
    engine = LoopEngine(task, method.Client, settings, seed=config.seed, private=free)
    with seeded(config.seed, "server"):
        server: Server = method.Server(task.outline(), settings)
    first = {task.size_of(client): client for client in reversed(task.known)}
    everyone = [*first.values(), *task.novel_ids[:1]]
    means = Counter[int]()

    def pay(group: Sequence[int] | None) -> None:
        means.update(first.values() if group is None else group)

    mean = AggregateNoise(free, config.seed, 0, pay=pay)

    def spent(client: int) -> int:
        released = engine.released.get(client, {})
        return len(released.get("multipliers", ()))

    def unkept(client: int) -> int:
        return privacy.not_kept(engine.released.get(client, {}))

    def after(part: Callable[[], object]) -> int:
        before = {client: spent(client) for client in everyone}
        try:
            part()
        except AllLostError as error:
            cause = error.__cause__ or error
            raise _of_a_trial(cause) from None
        finally:
            engine.close()
        return max(spent(client) - before[client] for client in everyone)

    def train() -> None:
        cohort = engine.cohort(list(first.values()), 0, training=True)
        with trees.aggregating(MEAN, mean.of_means if wanted.where == "central" else None):
            server.round(cohort)
            server.state()
        engine.commit(cohort)

    def serve(clients: Sequence[int]) -> None:
        cohort = engine.cohort(clients, 1, training=False)
        for group in cohort.sizes.values():
            server.personalize(group)

    rounds, paid = after(train), [unkept(client) for client in first.values()]
    serving = after(lambda: serve([*first.values()]))
    if [unkept(client) for client in first.values()] != paid:
        raise UserError(
            f"what a client answers whenever its model is made must be {KEPT} numbers at most where"
            " it has noise, so that it is given again for nothing, but is longer; lower "
            "method.descriptor_size"
        )
    return Answers(
        max(means.values(), default=0) if wanted.where == "central" else rounds,
        serving,
        after(lambda: serve(task.novel_ids[:1])) if task.novel else 0,
    )


def _of_a_trial(cause: BaseException) -> BaseException:
    """Returns what to raise where a client with made-up examples fails: of a network, an error."""
    if not isinstance(cause, UNUSABLE) or isinstance(cause, UserError):
        return cause
    return UserError(
        "a network that is trained in private must take examples that nobody holds (tokens 0 and "
        "1, normal numbers, any pixels), on which it is tried how often clients answer, but fails "
        f"on them ({one_line(f'{type(cause).__name__}: {cause}')}); have it take them"
    )


class AggregateNoise:
    """Adds noise to the means that a trusted server takes in a round.

    Args:
        private: how much.
        seed: of the run.
        round: the round's number.
        secret: noise is the operating system's, not the seed's.
        pay: called before a mean is told, with the clients that it is of, or None where nobody
            says; what it raises keeps the mean from being told.

    Attributes:
        told: how many means there were.
    """

    def __init__(
        self,
        private: PrivateUpdates,
        seed: int,
        round: int,
        *,
        secret: bool = False,
        pay: Callable[[Sequence[int] | None], None] = lambda group: None,
    ) -> None:
        self.told, self._pay = 0, pay
        self._private, self._seed, self._round = private, seed, round
        self._secret = secret

    @property
    def of_means(self) -> MeanNoise:
        """What :func:`hyperfed.trees.aggregating` takes."""
        return MeanNoise(self._private.clip, self.add)

    def add(self, mean: Tree, share: float, clients: torch.Tensor | None = None) -> Tree:
        """Returns a mean of clients, in which none has more than a share, with noise."""
        self._pay(None if clients is None else clients.tolist())
        sigma = self._private.sigma(self._private.sensitivity * share)
        source = generator(self._seed, "noise of means", self._round, self.told)
        noise = privacy.secret_noise if self._secret else privacy.seeded_noise(source)
        self.told += 1

        def noisy(leaf: torch.Tensor) -> torch.Tensor:
            if not leaf.is_floating_point():
                return leaf
            exact = leaf.double()
            return (exact + sigma * noise(exact)).to(leaf.dtype)

        return without_negative_variances(trees.tree_map(noisy, mean))


def charge(engine: Engine, clients: Sequence[int], private: PrivateUpdates) -> None:
    """Notes that a mean is told of some clients: also of those that were lost on the way.

    Raises:
        UserError: that is more than they may spend.
    """
    ledger = Ledger(private.epsilon, private.delta)
    before = {client: engine.released.get(client, {}) for client in clients}
    told = {c: ledger.load(account).after(private.multiplier) for c, account in before.items()}
    engine.released |= {c: before[c] | spent.state() for c, spent in told.items()}


def promised(private: PrivateUpdates) -> dict[str, Any]:
    """Returns what records say of private training, plain data."""
    return {
        "mechanism": f"gaussian, {private.where}",
        "adjacency": "one client's data replaced",
        "clip": private.clip,
        "epsilon": private.epsilon,
        "delta": private.delta,
        "noise_multiplier": private.multiplier,
        "not_covered": NOT_COVERED,
    }

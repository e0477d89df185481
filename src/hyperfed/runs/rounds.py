"""A round of training: who takes part and is lost, what it costs them, and when it is void."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

from hyperfed import trees
from hyperfed.engines import EngineCohort
from hyperfed.engines.calls import LOOKED_AT
from hyperfed.engines.masking import LARGEST, SMALLEST
from hyperfed.engines.replies import UNUSABLE
from hyperfed.errors import LostEverybodyError, UserError, one_line
from hyperfed.federation import AllLostError
from hyperfed.runs import private
from hyperfed.runs.rollback import Snapshot, is_finite
from hyperfed.runs.settings import RunConfig, cohort_size
from hyperfed.runs.tally import Tally
from hyperfed.runs.trained import TrainedMethod
from hyperfed.runs.watched import Watched
from hyperfed.task import Task

log = logging.getLogger(__name__)

PATIENCE = LOOKED_AT
"""Rounds in a row whose clients all failed by their own errors before the run gives up."""


class Rounds:
    """Trains a server, one round after another.

    Args:
        run: whose server learns, by its engine and settings.
        charged: is called when clients at sites have paid for what a trusted server is about to
            tell of them.

    Attributes:
        tally: what happened since the latest evaluation.
        answered: whether some round had a client left.
        nobody: why the last round without had none.

    Raises:
        UserError: a round has too few or too many clients for the rule or for masking, or a target
            size has too few that train.
    """

    def __init__(self, run: TrainedMethod, charged: Callable[[], None]) -> None:
        config = run.config
        _check_sizes(config, run.task)
        self.tally = Tally()
        self.answered = False
        self.nobody = ""
        self._run = run
        self._charged = charged
        self._before, self._watched = Snapshot(), Watched()
        self._failures = 0

    def train(self, clients: Sequence[int]) -> Mapping[int, str]:
        """Trains the server with these clients; returns whom it lost, and why.

        Raises:
            LostEverybodyError: this was the last of many rounds in which nobody was left.
            UserError: what a client, or the server, says is wrong with the settings.
        """
        lost: dict[int, str] = {}
        cohort = self._cohort(clients, lost)
        while not self._learns(cohort):
            cohort = self._cohort(cohort.there, lost)
        return lost

    def _cohort(self, clients: Sequence[int], lost: dict[int, str]) -> EngineCohort:
        """Returns the cohort of this round with these clients; whom it loses is noted."""
        run = self._run
        cohort = run.engine.cohort(clients, run.round, training=True)
        self.tally.follow(cohort.state)
        cohort.state.lost, cohort.state.reply_bound = lost, run.config.robust.reply_bound
        return cohort

    def _learns(self, cohort: EngineCohort) -> bool:
        """Trains the server with a cohort; whether the round is over so, if only to no avail.

        It is not where all clients of one target size were lost, of which a method can make
        nothing: then those of other sizes are asked once more, unless an answer costs.
        """
        server, engine = self._run.server, self._run.engine
        self._before.take(server)
        try:
            if few := self._too_few(cohort):
                cohort.give_up(few)
            with self._aggregating(cohort), self._watched.round(server, self._run.round + 1):
                server.round(cohort)
            self._failures, self.answered = 0, True
            if not is_finite(server):
                self._take_back(cohort, "a number of the server was not finite after it")
            elif few := self._too_few(cohort):
                self._take_back(cohort, few)
            else:
                engine.commit(cohort)
        except AllLostError as error:
            costs = self._run.private is not None or engine.masking is not None
            if 0 < len(cohort.there) < len(cohort.ids) and not costs:
                self._before.restore(server, engine, cohort)
                return False
            self.nobody = self._why(cohort.state.lost)
            self._failures += error.__cause__ is not None
            if self._failures >= PATIENCE:
                told = f"every client was lost in {self._failures} rounds in a row: {self.nobody}"
                raise LostEverybodyError(told) from (error.__cause__ or error)
        except UserError:
            raise
        except UNUSABLE as error:
            # Of our own clients that is our fault, of sites theirs, unless it never works.
            self._failures += 1
            if not cohort.state.remote or self._failures >= PATIENCE:
                raise
            what = one_line(f"{type(error).__name__}: {error}")
            self._take_back(cohort, f"the server could not use its replies ({what})")
        return True

    def _too_few(self, cohort: EngineCohort) -> str:
        """Returns of which target size too few clients are there; "" where that is of none.

        Rules and masks are each of the clients of one size.
        """
        of = _of_three(self._run.config)
        if not of:
            return ""
        there = {size: len(group.there) for size, group in cohort.sizes.items()}
        size, fewest = min(there.items(), key=lambda item: item[1])
        if fewest >= SMALLEST:
            return ""
        return (
            f"a round must have at least {SMALLEST} clients of each target size where {of}, but "
            f"{fewest} of {size} are there"
        )

    @contextmanager
    def _aggregating(self, cohort: EngineCohort) -> Iterator[None]:
        """Has the clients pay for means over them, where those are private."""
        run = self._run
        here = run.private if run.config.privacy.trusts_server else None
        if here is None:
            yield
            return
        clients, seed, secret = cohort.ids.tolist(), run.config.seed, cohort.state.remote

        def pay(group: Sequence[int] | None) -> None:
            # At once: a round that comes to nothing may still be told of.
            private.charge(run.engine, clients if group is None else group, here)
            if secret:
                self._charged()

        noise = private.AggregateNoise(here, seed, run.round, secret=secret, pay=pay)
        with trees.aggregating(run.config.robust.rule, noise.of_means):
            yield

    def _take_back(self, cohort: EngineCohort, why: str) -> None:
        """Goes back to before a round, and says whose replies were in it."""
        run = self._run
        self._before.restore(run.server, run.engine, cohort)
        void = self.tally.take_back(run.round, cohort.there)
        log.warning(
            "round %d is void: %s, so that it goes on from its state before; replies of clients %s "
            "were in it",
            void.round,
            why,
            ", ".join(map(run.task.name_of, void.clients)),
        )

    def _why(self, lost: Mapping[int, str]) -> str:
        """Returns why a client of this round was lost, and what can be done about it."""
        if not lost:
            return "the method says so, of a round in which none was"
        client, reason = next(iter(lost.items()))
        step, called = self.tally.step_of(client), self._run.task.name_of(client)
        return f"client {called} in step {step}: {reason}; {self.advice(reason)}"

    def advice(self, reason: str) -> str:
        """Returns what can be done where clients are lost for a reason."""
        config = self._run.config
        if config.faults.drop or config.faults.nan:
            return "lower faults.drop and faults.nan"
        if "of each target size" in reason:
            return "raise cohort"
        if "not finite" not in reason and "its length is" not in reason:
            return "mend what it raises"
        rates = {name: getattr(config.settings, name, None) for name in ("local_lr", "lr")}
        lower = " or ".join(f"method.{name}={rate:g}" for name, rate in rates.items() if rate)
        return f"lower {lower}, or bound the local gradient by method.local_clip"

    def meta(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, plain JSON values."""
        told = {"failures": self._failures, "answered": self.answered, "nobody": self.nobody}
        return told | self.tally.meta()

    def load(self, meta: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`meta` kept.

        Raises:
            LookupError, TypeError, ValueError: it is no such thing.
        """
        self._failures = index(meta["failures"])
        self.answered, self.nobody = meta.get("answered", True), str(meta.get("nobody", ""))
        self.tally.load(meta)


def _of_three(config: RunConfig) -> str:
    """Returns which setting takes three clients of each target size in a round; "" for none."""
    if config.privacy.masking:
        return "privacy.masking is true"
    return "" if config.robust.aggregation == "mean" else "robust.aggregation is not mean"


def _check_sizes(config: RunConfig, task: Task) -> None:
    """Finds out whether the rounds of a task can be aggregated as the settings say.

    Raises:
        UserError: they cannot.
    """
    if not (of := _of_three(config)):
        return
    known, masked = Counter(map(task.size_of, task.known)), config.privacy.masking
    came, sizes = cohort_size(config.cohort, len(task.known)), max(1, len(known))
    least = SMALLEST * sizes
    if came < least or (masked and came > LARGEST):
        bounds = f"{least} to {LARGEST}" if masked else f"at least {least}"
        each = f", {SMALLEST} of each of {sizes} target sizes," if sizes > 1 else ""
        why = "" if masked else ", as no two can outvote a third"
        raise UserError(
            f"a round must have {bounds} clients{each} where {of}{why}, came {came}; set cohort"
        )
    if few := [size for size, clients in known.items() if clients < SMALLEST]:
        raise UserError(
            f"each target size must be that of at least {SMALLEST} clients that train where {of}, "
            f"but {few[0]} is that of {known[few[0]]}; give it to more, or to none"
        )

"""What a site lets in and out: which calls it runs, and what of the answers leaves.

A site that has a policy goes by it; what a run's settings promise of privacy holds at every site.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from hyperfed.engines.calls import Answer, Call, find_step, promised
from hyperfed.engines.flower.diary import Diary
from hyperfed.engines.flower.pairwise import cover
from hyperfed.engines.flower.policy import COUNTING, Policy, RefusedError, guarded
from hyperfed.engines.flower.store import LostMemoryError, SupersededError
from hyperfed.engines.flower.wire import Request, SiteError
from hyperfed.engines.masking import SMALLEST, Masking
from hyperfed.engines.replies import BadReplyError, DivergedError
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.federation import Client
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from hyperfed.trees import Tree

OURS = (UserError, UnlabelledError, BadReplyError, DivergedError, LostMemoryError, SupersededError)
"""Errors whose words are all our own."""

Cover: TypeAlias = Callable[[Tree], tuple[Tree, Tree]]
"""Returns the masked part that a reply makes, and what the site is to know of its masks."""


@dataclass(frozen=True)
class Admitted:
    """A call that may be run.

    Attributes:
        call: as its client runs it.
        begin: the memory and the scratch that it begins with.
        behind: how many examples are behind its reply, where a policy asks.
        covered: masks the reply, where that is a part of a masked sum.
    """

    call: Call
    begin: Answer
    behind: int = 0
    covered: Cover | None = None


class Gate:
    """Admits the calls of a run at a site, and lets out its answers.

    Args:
        client: the method's Client.
        config: the method's settings.
        state: folder of the site's state.
        seed: the run's seed.
        method: name of the method.
        policy: what the site lets a server do; None for all, as in a trial.
        private: how its clients' answers are made private, by the run's settings.
        masking: how updates are summed, by the run's settings, where the server is told no other.
        metrics: what clients count for beside the task's own metric.

    Attributes:
        client: the method's Client, in whose own code the policy holds as well.
        smallest_sum: clients that a masked sum must be of.
    """

    def __init__(
        self,
        client: type[Client],
        config: Any,
        state: Path,
        *,
        seed: int,
        method: str = "",
        policy: Policy | None = None,
        private: PrivateUpdates | None = None,
        masking: Masking | None = None,
        metrics: Sequence[str] = (),
    ) -> None:
        self.client = client if policy is None else guarded(client, policy)
        self.smallest_sum = SMALLEST if policy is None else policy.smallest_sum
        self._config, self._state, self._seed, self._method = config, state, seed, method
        self._policy, self._private, self._masking = policy, private, masking
        self._metrics = metrics

    def check_run(self) -> None:
        """Raises ``RefusedError`` for a run that the policy does not allow."""
        if self._policy is not None:
            self._policy.check_run(
                self._method, self._config, self._private, self._metrics, self._masking
            )

    def admit(self, call: Call, name: str, task: Task, begin: Answer, masks: Tree) -> Admitted:
        """Returns a call as it may be run.

        Args:
            call: as it came; no exchange of a masked sum.
            name: of its client.
            task: with the client's data.
            begin: what the client remembers.
            masks: what it knows of its masks.

        Raises:
            RefusedError: it may not be.
            UserError: its answer would have no noise, which it must.
        """
        covered = None
        if call.masked:
            *payload, others = call.payload
            call = replace(call, payload=tuple(payload), masked=False)
            covered = self._covering(call, masks, others, task)
        self._check_private(call, task)
        return Admitted(call, begin, self._allowed(call, name, task, begin.scratch), covered)

    def leaving(
        self, reply: Tree | Exception, admitted: Admitted, task: Task
    ) -> tuple[Tree | Exception, Tree]:
        """Returns a reply as it may leave the site, and what is to be known of its masks."""
        if isinstance(reply, Exception):
            return reply, {}
        try:
            if reply and self._policy is not None:
                self._policy.check_trained(admitted.call, self.client, self._config, task)
            if admitted.covered is not None:
                return admitted.covered(reply)
        except Exception as error:
            return error, {}
        step = admitted.call.step
        if self._masking is not None and reply and step not in COUNTING:
            return RefusedError(f"the reply to {step} must be masked in this run"), {}
        return reply, {}

    def told(self, answer: Tree | Exception) -> Tree | Exception:
        """Returns an answer as it may be told: of an error that is not in our words its kind alone.

        Theirs may quote an example, as PyTorch's of a label for which a model has no output.
        """
        if self._policy is None or not isinstance(answer, Exception) or isinstance(answer, OURS):
            return answer
        return SiteError(f"{type(answer).__name__}: its site's audit log says more")

    def with_noise(self, request: Request) -> PrivateUpdates | None:
        """Returns how answers are made private, with as much noise as a request says.

        Where the policy has a limit for all runs, the run's epsilon is for the run alone: both are
        known to be spent from the site's disk.

        Raises:
            UserError: it says none, though there must be some.
        """
        private = self._private
        if private is None or private.where == "central":
            return private
        if request.multiplier is None:
            raise UserError(
                "a request must say how much noise answers are to have, but this does not"
            )
        run = 0 if self._policy is None else request.run
        return replace(private, multiplier=request.multiplier, run=run)

    @property
    def limits(self) -> Sequence[tuple[float, float]]:
        """What holds for all that a client lets out with noise: (epsilon, delta)."""
        policy = self._policy
        return () if policy is None else [(policy.epsilon, policy.delta)]

    def _covering(self, call: Call, masks: Tree, others: Tree, task: Task) -> Cover:
        """Returns what makes of the reply to a call what leaves, by what others share with it.

        Raises:
            RefusedError: the reply would be no update.
        """
        masking = self._masking
        _, info = find_step(self.client, call.step)
        like = promised(info, call)
        if masking is None or like is None:
            raise RefusedError(f"the reply to {call.step} is not to be masked in this run")
        weight = len(task.train[call.client]) if self._private is None else 1

        def covered(reply: Tree) -> tuple[Tree, Tree]:
            part = masking.part(reply, like, info, weight)
            return cover(masks, part, others, smallest=self.smallest_sum)

        return covered

    def _check_private(self, call: Call, task: Task) -> None:
        """Finds out whether the answer to a call lets out no more than it may.

        Raises:
            UserError: the client's answers are to have noise, and this one would have none.
        """
        private = getattr(self._config, "mechanism", None) is not None
        if private and call.client in task.novel_ids and call.step not in COUNTING:
            _, info = find_step(self.client, call.step)
            if not info.private:
                raise UserError(
                    "a client whose answers are private must be asked for no other, but was asked "
                    f"to {call.step}; leave it out, or make it no novel one"
                )

    def _allowed(self, call: Call, name: str, task: Task, scratch: Tree) -> int:
        """Returns the number of examples behind the reply to a call that the policy allows.

        Raises:
            RefusedError: it does not.
        """
        if self._policy is None:
            return 0
        found = self._policy.check_call(
            call, self.client, self._config, task, seed=self._seed, scratch=scratch
        )
        if call.step == "evaluate":
            Diary(self._state, self._policy).evaluate(name)
        return found

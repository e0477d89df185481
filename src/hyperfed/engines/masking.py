"""Masked sums: a server is told what clients' updates come to together, and no single one.

What a client adds to a sum is its update (:mod:`hyperfed.engines.updates`: the change to the model
that it was sent, no longer than C), times its number of examples, in whole numbers modulo 2^64:
sums of these are exact in any order, and a mask that is uniform among them hides one wholly. Here
they are summed as they are, which is what masks leave of them; clients at sites mask them
(:mod:`hyperfed.engines.flower.pairwise`), with the same sums, bit by bit.

An update's coordinates are multiples of C / 2^32, so that one of the mean is off by C / 2^33 at
most; in private training, where none is rounded up, by C / 2^32. Examples of 2^30 in a sum fill the
range.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.replies import BadReplyError
from hyperfed.engines.updates import centre_of, moved, offset
from hyperfed.federation import Each, StepInfo
from hyperfed.training import Batches
from hyperfed.trees import Tree

UNIT = 1 << 32
"""What the largest length of an update is in a sum."""

HEAVIEST = 1 << 30
"""Examples of all clients of a sum."""

SMALLEST = 3
"""Clients of a sum: of two each knows the other's part."""

LARGEST = 250
"""Clients of a sum: shares are as many as the square of their number."""

PART = "part"
"""What a masked reply is called."""


class Group(Protocol):
    """The clients of a sum: what of :class:`hyperfed.engines.cohort.EngineCohort` it needs."""

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client that is lost."""

    def gather(
        self,
        step: Callable[..., Tree] | StepInfo,
        payload: Sequence[Tree | Each],
        batches: Batches | None = None,
        *,
        masked: bool = False,
        late: bool = False,
    ) -> Tree:
        """Asks all that are there, and returns the replies stacked."""

    def need(self, least: int) -> None:
        """Raises ``AllLostError`` where fewer are there."""

    def give_up(self, reason: str) -> NoReturn:
        """Loses all that are there, and raises ``AllLostError``."""


def least(asked: int) -> int:
    """Returns how many of so many clients a sum must be of: three, and more than half.

    Whoever holds shares of secrets gives one kind of each client's away; with more than half needed
    of either kind, nobody is told both.
    """
    return max(SMALLEST, asked // 2 + 1)


@dataclass(frozen=True)
class Masking:
    """How updates are summed.

    Attributes:
        clip: C, the largest length of an update.
        private: noise is added to the mean, so that nobody may be lost by what its data make of it.
    """

    clip: float
    private: bool = False

    def part(self, reply: Tree, like: Tree, info: StepInfo, weight: int) -> Tree:
        """Returns what a client adds to a sum.

        Args:
            reply: of the client.
            like: what it was sent.
            info: of the step.
            weight: number of examples.

        Returns:
            {PART: (d,) int64}, over the floating-point leaves.

        Raises:
            BadReplyError: the reply is not finite, or not like what was sent.
        """
        centre = centre_of(reply, like, info)
        if not self.private and not all(trees.finite([reply])):
            raise BadReplyError("the reply is not finite")
        told = offset(reply, centre, self.clip) * (UNIT / self.clip)
        whole = told.trunc() if self.private else told.round()  # of which none is longer
        return {PART: whole.to(torch.int64) * weight}

    def total(
        self,
        cohort: Group,
        step: Callable[..., Tree],
        payload: Sequence[Tree],
        batches: Batches | None,
    ) -> Tensor:
        """Asks all clients of a cohort for their parts and returns the (d,) int64 sum.

        Raises:
            AllLostError: too few answered.
        """
        parts: Tensor = cohort.gather(step, payload, batches, masked=True)[PART]
        cohort.need(least(len(parts)))
        return parts.sum(dim=0)

    def mean(self, total: Tensor, weight: int, centre: Tree) -> Tree:
        """Returns what clients' replies are in the mean.

        Args:
            total: (d,) int64, the sum of their parts.
            weight: examples of them all.
            centre: what they were sent.

        Raises:
            ValueError: no updates come to such a sum.
        """
        if not 0 < weight <= HEAVIEST:
            raise ValueError(f"a masked sum must be of 1 to {HEAVIEST} examples, came {weight}")
        told = total.cpu().double() * (self.clip / (UNIT * weight))
        if torch.linalg.vector_norm(told) > self.clip * 1.0001:  # each is rounded
            raise ValueError("the sum is larger than updates can come to: some masked part is none")
        return moved(centre, told)

"""Faults made on purpose, on any engine: they happen where a cohort is asked."""

from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.calls import Call
from hyperfed.system.randomness import generator
from hyperfed.trees import Tree

Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Faults:
    """Faults made on purpose in training rounds, to see what a shrinking cohort does to a run.

    Attributes:
        drop: probability that a client does not answer in a round.
        nan: probability that a reply of a client is NaN.
        hostile: clients that lie in every reply; they must be among those that train.
        attack: how. ``reverse`` sends ten times the change that was to be, backwards; ``noise``
            sends Gaussian noise ten times as long as it; ``huge`` sends 1e30 in every entry.
    """

    drop: Probability = 0.0
    nan: Probability = 0.0
    hostile: tuple[NonNegativeInt, ...] = ()
    attack: Literal["reverse", "noise", "huge"] = "reverse"

    def drops(self, seed: int, call: Call) -> bool:
        """Returns whether the client of a call answers nothing in its round."""
        return _chance(self.drop, seed, "drop", call.client, call.round)

    def spoils(self, seed: int, call: Call) -> bool:
        """Returns whether the reply to a call is NaN."""
        return _chance(self.nan, seed, "nan", *call.keys)

    def lie(self, reply: Tree, like: Tree | None, seed: int, call: Call) -> Tree:
        """Returns what a hostile client sends in the place of a reply; integers stay.

        Args:
            reply: what it was to send.
            like: the argument that the reply is like, if any.
            seed: the run's.
            call: what it was asked.
        """
        draw = generator(seed, "attack", *call.keys)
        start = trees.tree_map(torch.zeros_like, reply)
        if like is not None and _length(_change(reply, like)) < _length(reply):
            start = like
        change = _change(reply, start)
        # As long as the change in the mean over draws.
        entries = sum(leaf.numel() for _, leaf in trees.leaves(reply) if leaf.is_floating_point())
        deviation = 10 * _length(change) / max(1, entries) ** 0.5

        def lied(true: Tensor, begun: Tensor, moved: Tensor) -> Tensor:
            if not true.is_floating_point():
                return true
            if self.attack == "reverse":
                return begun - 10 * moved
            if self.attack == "huge":
                return torch.full_like(true, 1e30)
            noise = torch.randn(true.shape, generator=draw, dtype=true.dtype).to(true.device)
            return begun.add(noise, alpha=deviation)

        return trees.tree_map(lied, reply, start, change)


def _change(reply: Tree, start: Tree) -> Tree:
    """Returns reply - start; what is no float stays, as of a mask there is no difference."""

    def change(true: Tensor, begun: Tensor) -> Tensor:
        return true - begun if true.is_floating_point() else true

    return trees.tree_map(change, reply, start)


def _length(tree: Tree) -> float:
    floating = [leaf for _, leaf in trees.leaves(tree) if leaf.is_floating_point()]
    return float(
        torch.stack([leaf.double().norm() for leaf in floating] or [torch.zeros(1)]).norm()
    )


def _chance(probability: float, seed: int, *keys: str | int) -> bool:
    if not probability:
        return False
    return float(torch.rand((), generator=generator(seed, "fault", *keys))) < probability

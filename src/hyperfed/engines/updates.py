"""Private training: what a client answers has a largest length, and noise hides what it was.

What is private is all of a client: answers of two clients with any data whatever cannot be told
apart, but for (epsilon, delta). An answer is what a step replies: of a step that is like one of its
arguments the change to that, else the reply itself, over all floating-point leaves together,
buffers included. Whole numbers (batch-norm's step counters) are as they were sent, or 0.

``local``: the client adds the noise, so that nobody is trusted. ``central``: clients answer a
server that is trusted with their answers, and adds noise to every mean that it takes of them
(:class:`hyperfed.trees.aggregation.MeanNoise`).
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.replies import VARIANCE, BadReplyError, difference
from hyperfed.errors import UserError
from hyperfed.federation import StepInfo
from hyperfed.trees import Tree

Where: TypeAlias = Literal["local", "central"]

UNCOVERED = ("evaluate", "export")
"""Steps that answer as they are: counts of an evaluation, and a model that its owner is handed."""

KEPT = 4096
"""Numbers of an answer that is kept and given again for nothing; models are not worth the space."""


def is_covered(info: StepInfo) -> bool:
    """Returns whether what a step answers must be bounded, and needs noise: not of no data."""
    return info.name not in UNCOVERED and info.reads != 0


@dataclass(frozen=True)
class PrivateUpdates:
    """How answers are made private; a :class:`hyperfed.privacy.Mechanism`.

    Attributes:
        where: noise is added by each client, or by the server to means.
        clip: C, the largest length of an answer.
        multiplier: the noise's standard deviation over the sensitivity.
        epsilon: what all answers of a client may cost together.
        delta: at which that is told.
        run: whose answers alone epsilon is of, where a site has a limit for all runs; 0 for all.
    """

    where: Where
    clip: float
    multiplier: float
    epsilon: float
    delta: float
    run: int = 0

    remedy = (
        "use the model that was made before, which is given again for nothing where all that it "
        "was made from is the same, but not at sites, or start a run in which newcomers answer "
        "less often (method.novel_rounds)"
    )
    """What to do where epsilon is spent."""

    @property
    def sensitivity(self) -> float:
        """How far two answers of one client can be apart, whatever its data: 2 C."""
        return 2 * self.clip

    def sigma(self, sensitivity: float) -> float:
        """Returns the noise's standard deviation for an answer of some sensitivity."""
        return self.multiplier * sensitivity

    def noise_in(self, reply: Tree) -> float:
        """Returns how long the noise of an answer is: the root of its mean square length."""
        floating = (leaf for _, leaf in trees.leaves(reply) if leaf.is_floating_point())
        return self.sigma(self.sensitivity) * math.sqrt(sum(leaf.numel() for leaf in floating))


def centre_of(reply: Tree, like: Tree | None, info: StepInfo) -> Tree:
    """Returns what a client would reply that tells nothing: what it was sent, or zeros.

    Args:
        reply: of the step.
        like: the argument that it is like, if any.
        info: of the step.

    Raises:
        BadReplyError: the reply is not like that argument.
        UserError: the step's reply has no bound that would mean anything.
    """
    if info.bounded is None:
        raise UserError(
            f"a reply in private training must be an update, but that of step {info.name} is none; "
            "choose a method, or settings of it, that do without"
        )
    if info.bounded == "change" and like is not None:
        if (came := trees.structure(reply)) != (promised := trees.structure(like)):
            raise BadReplyError(difference(came, promised))
        return like
    if any(path.endswith(VARIANCE) for path, _ in trees.leaves(reply)):
        raise UserError(
            f"step {info.name} replies with a difference of batch-norm's variances, which with "
            "noise would come below zero; choose a target without batch-norm, or another method"
        )
    return trees.tree_map(torch.zeros_like, reply)


def offset(reply: Tree, centre: Tree, clip: float) -> Tensor:
    """Returns what a reply tells, no longer than ``clip``.

    Args:
        reply: of a client.
        centre: what would tell nothing.
        clip: C.

    Returns:
        (d,) float64, reply - centre over the floating-point leaves, scaled down to length C where
        it is longer; zeros where it is not finite.
    """
    base = dict(trees.leaves(centre))
    told = torch.cat(
        [
            (leaf.double() - base[path].to(leaf.device).double()).flatten()
            for path, leaf in sorted(trees.leaves(reply))
            if leaf.is_floating_point()
        ]
    )
    length: Tensor = torch.linalg.vector_norm(told)
    shorter = told * (clip / length).clamp(max=1.0)
    return shorter.where(length.isfinite(), torch.zeros_like(told))


def moved(centre: Tree, by: Tensor, *, beyond: bool = True) -> Tree:
    """Returns the reply that differs from ``centre`` by an :func:`offset`, or one with noise.

    Args:
        centre: what would tell nothing.
        by: (d,) float64.
        beyond: whether the rounding to a leaf's precision may bring it farther from the centre.
    """
    floating = [p for p, leaf in sorted(trees.leaves(centre)) if leaf.is_floating_point()]
    leaves = dict(trees.leaves(centre))
    parts = dict(
        zip(floating, by.split_with_sizes([leaves[p].numel() for p in floating]), strict=True)
    )

    def put(tree: Tree, prefix: str = "") -> Tree:
        return {
            name: put(leaf, f"{prefix}{name}/")
            if isinstance(leaf, dict)
            else _added(leaf, parts.get(prefix + name), beyond=beyond)
            for name, leaf in tree.items()
        }

    return without_negative_variances(put(centre))


def _added(leaf: Tensor, part: Tensor | None, *, beyond: bool) -> Tensor:
    if part is None:
        return leaf
    part = part.view(leaf.shape).to(leaf.device)
    near = (leaf.double() + part).to(leaf.dtype)
    if beyond:
        return near
    farther = (near.double() - leaf.double()).abs() > part.abs()
    return torch.where(farther, torch.nextafter(near, leaf), near)


def without_negative_variances(model: Tree) -> Tree:
    """Returns a model as it can be used: noise can bring a variance of batch-norm below zero."""
    return {
        name: without_negative_variances(leaf)
        if isinstance(leaf, dict)
        else (leaf.clamp(min=0) if name.endswith(VARIANCE) else leaf)
        for name, leaf in model.items()
    }


def bounded(reply: Tree, like: Tree | None, info: StepInfo, clip: float) -> Tree:
    """Returns a reply no farther than ``clip`` from what would tell nothing, as it is rounded.

    Raises:
        BadReplyError, UserError: as :func:`centre_of`.
    """
    centre = centre_of(reply, like, info)
    return moved(centre, offset(reply, centre, clip), beyond=False)

"""What many clients' trees come to together: their weighted mean, or what bears hostile ones.

A method says :func:`weighted_mean` wherever its algorithm takes one. Which rule stands for it is
the run's to say, around all that the server computes (:func:`aggregating`), so that no method knows
of it. What follows is of C trees, those of weight 0 left out; f is the number of hostile ones that
are to be borne, the ceiling of a given share of C, but always less than half:

- ``median``, in each coordinate, halfway between the two in the middle where C is even
  (Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498, definition 1);
- ``trimmed_mean``, in each coordinate the mean without the f least and the f greatest
  (definition 2);
- ``krum``, the one tree whose C - f - 2 nearest are the nearest by their summed squared distances
  (Blanchard et al., NeurIPS 2017, section 4); of two trees, the mean;
- ``norm_clip``, the mean after every tree's difference from the coordinate-wise median is scaled
  down to at most the median length of such differences (the centred clipping of Karimireddy et al.,
  ICML 2021, https://arxiv.org/abs/2012.10333, about what needs no history).

All four count each client once: a number of examples is what a client says of itself. They commute
with a shift, so that the rule of models is that of changes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hyperfed.system.devices import in_full
from hyperfed.trees.arithmetic import Tree, leaves, take, tree_map

Aggregation: TypeAlias = Literal["mean", "median", "trimmed_mean", "krum", "norm_clip"]


@dataclass(frozen=True)
class Rule:
    """What stands for a mean over clients.

    Attributes:
        name: of the rule.
        hostile: the share of clients that ``trimmed_mean`` and ``krum`` are to bear.
    """

    name: Aggregation = "mean"
    hostile: float = 0.25

    def borne(self, clients: int) -> int:
        """Returns f, how many hostile ones are borne among so many clients."""
        exact = math.ceil(round(self.hostile * clients, 9))
        return min(exact, (clients - 1) // 2)


@dataclass(frozen=True)
class MeanNoise:
    """What is done to a mean of clients that a trusted server keeps private.

    Attributes:
        clip: the largest length of what each client may add to it; of replies it is bounded when
            they come, of what a server makes of them (gradients) by the server.
        add: returns a mean with noise, given it, the largest share that a client has in it, and
            which clients it is of, None where nobody says. Its floats are float64: what is rounded
            before there is noise may move by more than what clients add.
    """

    clip: float
    add: Callable[[Tree, float, Tensor | None], Tree]


REACH = 3.0
"""How many median lengths a client's vector may be from the median (:func:`within_reach`)."""

MEAN = Rule()
_RULE: ContextVar[Rule] = ContextVar("rule", default=MEAN)
_NOISE: ContextVar[MeanNoise | None] = ContextVar("noise", default=None)


@contextmanager
def aggregating(rule: Rule, noise: MeanNoise | None = None) -> Iterator[None]:
    """Has a rule stand for the mean, or noise added to it, inside a block, in this thread alone."""
    rules, noises = _RULE.set(rule), _NOISE.set(noise)
    try:
        yield
    finally:
        _RULE.reset(rules)
        _NOISE.reset(noises)


def is_plain() -> bool:
    """Returns whether a mean is a mean here."""
    return _RULE.get().name == "mean" and _NOISE.get() is None


def private_clip() -> float | None:
    """Returns what bounds a client's part of a mean that is private here; None where none is."""
    noise = _NOISE.get()
    return None if noise is None else noise.clip


def as_told(mean: Tree, share: float, like: Tree, clients: Tensor | None = None) -> Tree:
    """Returns a mean with noise where it is private.

    Args:
        mean: its floats in float64, where it is.
        share: the most that a client has in it.
        like: leaves of the dtypes that are returned.
        clients: their numbers, as of :func:`weighted_mean`.
    """
    noise = _NOISE.get()
    told = mean if noise is None else noise.add(mean, share, clients)
    return tree_map(lambda leaf, kind: leaf.to(kind.dtype), told, like)


def exact(tree: Tree) -> Tree:
    """Returns a tree with its floats in float64."""
    return tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, tree)


def weighted_mean(tree: Tree, weight: Tensor, clients: Tensor | None = None) -> Tree:
    """Averages a stacked tree over clients, or does what stands for that here.

    Args:
        tree: leaves of shape (C, ...). Integer leaves (batch-norm's step counters) are rounded
        back.
        weight: (C,) non-negative and not all zero; need not sum to one.
        clients: their numbers, lost ones among them: who pays for a mean that is private. Where
            they are not given that is the whole round.

    Returns:
        leaves of shape (...), of the dtype they had.
    """
    rule, noise = _RULE.get(), _NOISE.get()
    there = weight > 0
    if noise is not None and tree and there.any():
        exactly = weight.double()
        share = float(exactly.max() / exactly.sum())
        return as_told(_mean(exact(tree), weight), share, tree, clients)
    if rule.name == "mean" or not tree or not there.any():
        return _mean(tree, weight)
    return _ROBUST[rule.name](take(tree, there), weight[there], rule.borne(int(there.sum())))


def within_reach(rows: Tensor) -> Tensor:
    """Returns (C, l) rows, of which none is far from most, where hostile clients are to be borne.

    It is for what a server makes of vectors that are each one client's alone, such as the mean and
    the deviation of learned embeddings. Under another rule than the mean a row's difference from
    the coordinate-wise median is scaled down to at most :data:`REACH` times the median length of
    such differences, so that of honest ones hardly any moves; under the mean none does.
    """
    if _RULE.get().name == "mean":
        return rows
    centre, scale = _drawn_near({"rows": rows}, REACH)
    nearer: Tensor = centre["rows"] + scale.to(rows.dtype).unsqueeze(1) * (rows - centre["rows"])
    return nearer


def _mean(tree: Tree, weight: Tensor) -> Tree:
    share = weight.double() / weight.double().sum()

    def mean(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            # A client that computes in bfloat16 takes means of models, too, which are float32.
            with in_full(leaf.device):
                return torch.einsum("c,c...->...", share.to(leaf.dtype), leaf)
        return torch.einsum("c,c...->...", share, leaf.double()).round().to(leaf.dtype)

    return tree_map(mean, tree)


def _median(tree: Tree, weight: Tensor, hostile: int) -> Tree:
    return _middle(tree)


def _middle(tree: Tree) -> Tree:
    """Returns the coordinate-wise median of a stacked tree."""

    def middle(ordered: Tensor) -> Tensor:
        c = len(ordered)
        return ordered[(c - 1) // 2] / 2 + ordered[c // 2] / 2  # their sum may overflow

    return _by_coordinate(middle, tree)


def _trimmed_mean(tree: Tree, weight: Tensor, hostile: int) -> Tree:
    return _by_coordinate(lambda leaf: leaf[hostile : len(leaf) - hostile].mean(dim=0), tree)


def _krum(tree: Tree, weight: Tensor, hostile: int) -> Tree:
    c = len(weight)
    if c <= 2:
        return _mean(tree, weight.sign())
    square = weight.new_zeros(c, c, dtype=torch.float64)
    for _, leaf in leaves(tree):
        if leaf.is_floating_point():
            square += _square_distances(leaf)
    nearest = square.sort(dim=1).values[:, 1 : 1 + max(1, c - hostile - 2)]  # the first is itself
    return take(tree, int(nearest.sum(dim=1).argmin()))


def _norm_clip(tree: Tree, weight: Tensor, hostile: int) -> Tree:
    centre, scale = _drawn_near(tree)
    share = scale / len(scale)

    def clipped(leaf: Tensor, middle: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return middle
        return middle + torch.einsum("c,c...->...", share.to(leaf.dtype), leaf - middle)

    return tree_map(clipped, tree, centre)


def _drawn_near(tree: Tree, times: float = 1.0) -> tuple[Tree, Tensor]:
    """Returns the median, and (C,) what each difference from it is to be multiplied by.

    None is then longer than so many times the median length.
    """
    centre = _middle(tree)
    length = _square_lengths(_from(tree, centre)).sqrt()
    radius = times * _middle({"length": length})["length"]
    return centre, (radius / length).clamp(max=1.0).nan_to_num(1.0)  # of who is at the centre


_ROBUST: dict[str, Callable[[Tree, Tensor, int], Tree]] = {
    "median": _median,
    "trimmed_mean": _trimmed_mean,
    "krum": _krum,
    "norm_clip": _norm_clip,
}
"""Name -> the rule of a stacked tree, its clients' positive weights and f."""


def _by_coordinate(rule: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Applies a rule to leaves (C, ...) whose coordinates are in order; integers round back."""

    def applied(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point():
            return rule(leaf.sort(dim=0).values)
        return rule(leaf.double().sort(dim=0).values).round().to(leaf.dtype)

    return tree_map(applied, tree)


def _square_distances(leaf: Tensor) -> Tensor:
    """Returns (C, C) squared distances between the slices of a leaf (C, ...), none by a product."""
    rows = leaf.double().unsqueeze(-1).flatten(1)
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def _from(tree: Tree, centre: Tree) -> Tree:
    """Returns the differences of leaves (C, ...) from one tree, in float64; none of integers."""

    def difference(leaf: Tensor, one: Tensor) -> Tensor:
        return (leaf.double() - one.double()) * leaf.is_floating_point()

    return tree_map(difference, tree, centre)


def _square_lengths(differences: Tree) -> Tensor:
    """Returns (C,) squared lengths over all leaves (C, ...)."""
    parts = [leaf.unsqueeze(-1).flatten(1).square().sum(dim=1) for _, leaf in leaves(differences)]
    return torch.stack(parts).sum(dim=0)

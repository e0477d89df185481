"""How large a reply may be: one that is far larger than those beside it is not used.

A reply is judged by its length, which is that of all its floating-point leaves together, and apart
from it that of its integer leaves (counts; a single one is an index or a counter, and of any size).
Where a step's reply is like one of its arguments, the length is that of the change to it or, of a
step that returns a difference, that of the reply: whichever is the smaller for the median client,
since a step does the same at all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median, median_low

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.trees import Tree


@dataclass(frozen=True)
class Lengths:
    """Lengths of the same leaves of C replies.

    Attributes:
        own: (C,) of the replies.
        change: (C,) of what they changed; that of the reply where there is nothing to compare.
        sent: (C,) of what they are like; 0 where there is nothing.
    """

    own: Sequence[float]
    change: Sequence[float]
    sent: Sequence[float]

    def judged(self) -> Sequence[float]:
        """Returns the lengths by which the replies are judged."""
        return self.change if median_low(self.change) < median_low(self.own) else self.own


def too_large(
    replies: Mapping[int, Tree],
    likes: Mapping[int, Tree | None],
    factor: float,
    payloads: Mapping[int, Tree],
    *,
    noise: float,
) -> dict[int, str]:
    """Returns which replies to one question are too large to be used, {position: why}.

    The bound is ``factor`` times the median of the others' lengths, of those that are not zero. A
    change no longer than what was sent is not refused: where most clients have nothing left to
    learn, one that has is not an attacker. For the same reason the bound of a reply that is like
    nothing grows with what its client was sent, beside what the others were: a gradient that is
    pulled back is as many times longer as what it was pulled back of. Who is alone, or among zeros,
    is measured by what was sent or, where that is longer, by the noise that it adds, and passes
    where what was sent tells nothing.

    Args:
        replies: {position: reply}, all of one structure and finite.
        likes: {position: the argument that the reply is like}.
        factor: of the median.
        payloads: {position: all that the client was sent} where replies are like nothing.
        noise: how long the noise is that clients add to such a reply; 0 where they add none.
    """
    found: dict[int, str] = {}
    positions = list(replies)
    told = [_by_kind(payloads[p])[0] for p in positions] if payloads else []
    more = _beside_others(_norms(told)) if told and all(told) else [1.0] * len(positions)
    for lengths in _measured([replies[p] for p in positions], [likes[p] for p in positions]):
        judged = lengths.judged()
        for place, position in enumerate(positions):
            others = [length for at, length in enumerate(judged) if at != place and length]
            sent = lengths.sent[place]
            usual = median(others) * more[place] if others else sent and max(sent, noise)
            bound = min(max(factor * usual, sent) or torch.inf, torch.finfo(torch.float32).max)
            if not judged[place] <= bound:
                found[position] = (
                    f"the reply is too large: its length is {judged[place]:.3g}, but {bound:.3g} "
                    f"is the most beside the others' (robust.reply_bound = {factor:g})"
                )
    return found


def _beside_others(lengths: Sequence[float]) -> list[float]:
    """Returns how many times the others' median each length is; 1 where it is no longer."""
    found = []
    for place, length in enumerate(lengths):
        others = [other for at, other in enumerate(lengths) if at != place and other]
        found.append(max(1.0, length / median(others)) if others else 1.0)
    return found


def _measured(replies: Sequence[Tree], likes: Sequence[Tree | None]) -> list[Lengths]:
    """Returns the lengths of floating-point leaves and, where there are any, of integer ones."""
    own = [_by_kind(tree) for tree in replies]
    sent = [_by_kind(tree or {}) for tree in likes]
    kinds = zip(zip(*own, strict=True), zip(*sent, strict=True), strict=True)
    return [_lengths(*both) for both in kinds if both[0][0]]


def _lengths(replies: Sequence[Sequence[Tensor]], sent: Sequence[Sequence[Tensor]]) -> Lengths:
    pairs = zip(replies, sent, strict=True)
    changes = [torch._foreach_sub([*own], [*base]) if base else own for own, base in pairs]
    told = _norms([*replies, *changes, *sent])
    c = len(replies)
    return Lengths(told[:c], told[c : 2 * c], told[2 * c :])


def _norms(vectors: Sequence[Sequence[Tensor]]) -> list[float]:
    """Returns the Euclidean norm of each list of tensors, 0 of an empty one.

    Each tensor is measured once, such as a model that was sent to all; an accelerator is waited for
    once.
    """
    distinct = {id(leaf): leaf for leaves in vectors for leaf in leaves}
    norms = torch._foreach_norm([*distinct.values()])
    told = dict(zip(distinct, torch.stack([*norms]).tolist(), strict=True))
    return [hypot(*(told[id(leaf)] for leaf in leaves)) for leaves in vectors]


def _by_kind(tree: Tree) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the leaves that are measured, in the order of paths: floating-point and integer."""
    floating, integer = [], []
    for _, leaf in sorted(trees.leaves(tree)):
        if leaf.is_floating_point():
            floating.append(leaf)
        elif leaf.ndim and leaf.dtype != torch.bool:
            integer.append(leaf.double())
    return floating, integer

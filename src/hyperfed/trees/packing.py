"""Trees of tensors that travel: between processes as plain arrays, between devices in one piece.

Pickle copies a tensor byte by byte; an array's buffer it hands over as it is, so that processes of
one machine can read it from memory they share. To an accelerator each transfer takes its time,
however few bytes it carries.
"""

import warnings
from collections import defaultdict
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.trees import Tree

_ALIGNED = 64
"""Elements to whose multiples parts of a packed tensor begin: kernels read whole lines."""


class Packed(NamedTuple):
    """A tensor's bytes as they lie in memory, and what makes the tensor of them again.

    Attributes:
        data: (n,) uint8 array.
        dtype: of the tensor.
        shape: of the tensor, its dimensions from the slowest in memory to the fastest.
        order: which dimension of the tensor each of ``shape`` is.
    """

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]


def pack(tree: Tree) -> Tree:
    """Returns a tree whose leaves are :class:`Packed`."""
    return trees.tree_map(_pack, tree)


def unpack(tree: Tree) -> Tree:
    """Undoes :func:`pack`: same values, dtypes and order in memory, on which last bits depend.

    The tensors are not to be written to: they may lie in memory that other processes read too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return trees.tree_map(_unpack, tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    """Returns a tree whose leaves are on ``device``; a leaf that is there already is the same.

    What has to move does so in one transfer for each dtype, and is part of one tensor afterwards.
    Values, dtypes and order in memory stay.
    """
    device = torch.empty(0, device=device).device  # "cuda:0" where it was called "cuda"
    leaves = [leaf for _, leaf in trees.leaves(tree)]
    away = defaultdict(list)
    for place, leaf in enumerate(leaves):
        if leaf.device != device:
            away[leaf.dtype].append(place)
    for places in away.values():
        dense = [leaves[place].detach().permute(order_of(leaves[place])) for place in places]
        room = [-(-leaf.numel() // _ALIGNED) * _ALIGNED for leaf in dense]
        packed = dense[0].new_zeros(sum(room))
        starts = list(accumulate(room[:-1], initial=0))
        for start, leaf in zip(starts, dense, strict=True):
            packed[start : start + leaf.numel()].view(leaf.shape).copy_(leaf)
        there = packed.to(device)
        for start, leaf, place in zip(starts, dense, places, strict=True):
            part = there[start : start + leaf.numel()].view(leaf.shape)
            leaves[place] = in_order(part, order_of(leaves[place]))
    arrived = iter(leaves)
    return trees.tree_map(lambda _: next(arrived), tree)


def _pack(leaf: Tensor) -> Packed:
    order = order_of(leaf)
    dense = leaf.detach().cpu().permute(order).contiguous()
    return Packed(dense.flatten().view(torch.uint8).numpy(), leaf.dtype, tuple(dense.shape), order)


def _unpack(packed: Packed) -> Tensor:
    dense = torch.from_numpy(packed.data).view(packed.dtype).view(packed.shape)
    return in_order(dense, packed.order)


def order_of(leaf: Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a tensor from the slowest in memory to the fastest, of a clone."""
    strides = torch.empty_like(leaf, device="meta").stride()
    return tuple(sorted(range(leaf.dim()), key=lambda axis: -strides[axis]))


def in_order(dense: Tensor, order: tuple[int, ...]) -> Tensor:
    """Returns the tensor whose dimensions, in ``order``, are those of ``dense``."""
    place = {axis: index for index, axis in enumerate(order)}
    return dense.permute([place[axis] for axis in range(dense.dim())])

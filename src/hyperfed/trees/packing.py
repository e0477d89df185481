"""Trees of tensors that travel: between processes as plain arrays, between devices in one piece.

Pickle copies a tensor byte by byte; an array's buffer it hands over as it is, so that processes of
one machine can read it from memory they share. To an accelerator each transfer takes its time,
however few bytes it carries.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
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
        shape: of the tensor.
        strides: how far apart in memory its elements are along each dimension.
    """

    data: Any
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


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
        ours = [leaves[place].detach() for place in places]
        strides = [strides_of(leaf) for leaf in ours]
        room = [-(-leaf.numel() // _ALIGNED) * _ALIGNED for leaf in ours]
        packed = ours[0].new_zeros(sum(room))
        starts = list(accumulate(room[:-1], initial=0))
        for start, leaf, apart in zip(starts, ours, strides, strict=True):
            packed.as_strided(leaf.shape, apart, start).copy_(leaf)
        there = packed.to(device)
        for start, place, apart in zip(starts, places, strides, strict=True):
            leaves[place] = there.as_strided(leaves[place].shape, apart, start)
    arrived = iter(leaves)
    return trees.tree_map(lambda _: next(arrived), tree)


def _pack(leaf: Tensor) -> Packed:
    dense, strides = leaf.detach().cpu(), strides_of(leaf)
    if dense.stride() != strides:
        dense = dense.clone()
    flat = dense.as_strided((dense.numel(),), (1,))
    return Packed(flat.view(torch.uint8).numpy(), leaf.dtype, tuple(leaf.shape), strides)


def _unpack(packed: Packed) -> Tensor:
    flat = torch.from_numpy(packed.data).view(packed.dtype)
    return flat.as_strided(packed.shape, packed.strides)


def strides_of(leaf: Tensor) -> tuple[int, ...]:
    """Returns the strides of a clone of a tensor, which has no gaps and its order in memory.

    They are told of dimensions of length 1, too: by these PyTorch chooses how to convolve.
    """
    return torch.empty_like(leaf, device="meta").stride()


def laid_out(values: Tensor, strides: Sequence[int]) -> Tensor:
    """Returns the values in a tensor of some strides (:func:`strides_of`).

    Raises:
        ValueError: no tensor of their shape and without gaps has these.
    """
    step = 1
    for apart, size in sorted(zip(strides, values.shape, strict=True)):
        if size > 1 and apart != step and values.numel():  # of one element any will do
            raise ValueError(f"{strides} are no strides of {tuple(values.shape)}")
        step *= size
    return torch.empty_strided(values.shape, tuple(strides), dtype=values.dtype).copy_(values)

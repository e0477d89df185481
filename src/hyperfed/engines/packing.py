"""Trees of tensors as plain arrays, which travel between processes without being copied.

Pickle copies a tensor byte by byte; an array's buffer it hands over as it is, so that processes of
one machine can read it from memory they share.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.trees import Tree


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


def _pack(leaf: Tensor) -> Packed:
    strides = torch.empty_like(leaf, device="meta").stride()  # what a clone would have
    order = tuple(sorted(range(leaf.dim()), key=lambda axis: -strides[axis]))
    dense = leaf.detach().cpu().permute(order).contiguous()
    return Packed(dense.flatten().view(torch.uint8).numpy(), leaf.dtype, tuple(dense.shape), order)


def _unpack(packed: Packed) -> Tensor:
    dense = torch.from_numpy(packed.data).view(packed.dtype).view(packed.shape)
    place = {axis: index for index, axis in enumerate(packed.order)}
    return dense.permute([place[axis] for axis in range(dense.dim())])

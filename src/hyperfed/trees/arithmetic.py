"""Arithmetic on trees: (nested) dicts of tensors.

A model is the flat tree {parameter or buffer name: tensor}.

``delta`` has one definition, and this is it: :func:`subtract` gives **sent minus trained**. It
stands in for the gradient, so a server that hands it to an optimiser *descends*.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from hyperfed.system.devices import CPU

Tree: TypeAlias = dict[str, Any]
"""A tensor under each name, or another tree."""

Model: TypeAlias = dict[str, Tensor]
"""A flat tree: {parameter or buffer name: tensor}."""

T = TypeVar("T")

Structure: TypeAlias = tuple[tuple[str, tuple[int, ...], torch.dtype | None], ...]
"""Path, shape and dtype of every leaf; of a tree without any its path, (), and None."""


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields (path, tensor) for every leaf, depth first; a path joins names with '/'.

    Raises:
        TypeError: a name is no text, as which alone it is kept and sent.
    """
    for name, value in tree.items():
        try:
            path = prefix + name
        except TypeError as error:
            raise TypeError(
                f"names in a tree must be text, but {prefix or 'it'} has {name!r}, which is "
                f"{type(name).__name__}; take str(...) of it"
            ) from error
        if isinstance(value, dict):
            yield from leaves(value, f"{path}/")
        else:
            yield path, value


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Applies ``function`` leaf by leaf to trees of one structure."""
    return {
        name: tree_map(function, value, *(other[name] for other in others))
        if isinstance(value, dict)
        else function(value, *(other[name] for other in others))
        for name, value in tree.items()
    }


def subtract(sent: Tree, trained: Tree) -> Tree:
    """Returns delta = sent - trained, the stand-in for a gradient; of booleans where they differ.

    So what is subtracted from what was sent is again what was trained, for booleans as well.
    """

    def minus(sent: Tensor, trained: Tensor) -> Tensor:
        return sent ^ trained if sent.dtype == torch.bool else sent - trained

    return tree_map(minus, sent, trained)


def detach(tree: Tree) -> Tree:
    """Returns the same values, cut off from the autograd graph."""
    return tree_map(Tensor.detach, tree)


def clone(tree: Tree) -> Tree:
    """Returns a copy that shares no memory with ``tree`` and no autograd graph."""
    return tree_map(lambda leaf: leaf.detach().clone(), tree)


def to(tree: Tree, device: torch.device) -> Tree:
    """Returns a tree on a device; a tensor that is there already is not copied."""
    return tree_map(lambda leaf: leaf.to(device), tree)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stacks C trees of one structure: a leaf of shape (...) becomes (C, ...)."""
    return tree_map(lambda *values: torch.stack(values), *trees)


def take(tree: Tree, index: int | Tensor) -> Tree:
    """Takes one slice (an int) or several (a tensor of indices) of a stacked tree."""
    return tree_map(lambda leaf: leaf[index], tree)


def repeat(tree: Tree, count: int) -> Tree:
    """Stacks ``count`` views of one tree: (...) becomes (count, ...), without a copy."""
    return tree_map(lambda leaf: leaf.expand(count, *leaf.shape), tree)


def partition(model: Mapping[str, T], names: Collection[str]) -> tuple[dict[str, T], dict[str, T]]:
    """Splits a model into the entries in ``names`` and the rest; ``a | b`` joins them again."""
    chosen = {name: value for name, value in model.items() if name in names}
    rest = {name: value for name, value in model.items() if name not in names}
    return chosen, rest


def interpolate(start: Tree, end: Tree, share: float | Tensor) -> Tree:
    """Returns (1 - share) start + share end, leaf by leaf; integer leaves are rounded back.

    Args:
        start: of floating-point and integer tensors.
        end: as ``start``.
        share: a number, or a scalar tensor.
    """

    def between(first: Tensor, second: Tensor) -> Tensor:
        if first.is_floating_point():
            weight = share.to(first) if isinstance(share, Tensor) else share
            return torch.lerp(first, second, weight)
        return between(first.double(), second.double()).round().to(first.dtype)

    return tree_map(between, start, end)


def pull_back(
    model: Model,
    delta: Model,
    weight: Tensor,
    onto: Sequence[Tensor] | None = None,
    *,
    retain: bool = False,
) -> None:
    """Back-propagates sum_i weight_i <model_i, delta_i> into whatever made ``model``.

    This is the chain rule of pFedHN (section 3.2) with delta in the place of the gradient. It adds
    to the ``.grad`` of every leaf of the graph, so that an optimiser step afterwards *descends*.

    Args:
        model: what a hypernetwork made, leaves (C, ...), part of an autograd graph.
        delta: sent minus trained, the same names and shapes. Entries beyond those of ``model`` (the
            buffers a client returned) are ignored.
        weight: (C,) 1 for "unscaled", 1/C for the mean over a cohort, 0 for a lost client.
        onto: the only tensors whose ``.grad`` is filled, where the rest of the graph is frozen.
        retain: keep the graph, to pull back through it again.
    """

    def weighted(leaf: Tensor) -> Tensor:
        return leaf * weight.to(leaf.dtype).view(-1, *[1] * (leaf.dim() - 1))

    outputs = list(model.values())
    gradients = [weighted(delta[name]) for name in model]
    torch.autograd.backward(outputs, gradients, retain_graph=retain, inputs=onto)


def set_gradients(module: nn.Module, gradient: Mapping[str, Tensor]) -> None:
    """Puts ``gradient`` {parameter name: tensor} into the ``.grad`` of a module's trained ones."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.grad = gradient[name]


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Gives parameters that nothing flowed into a zero gradient.

    An optimiser skips a parameter without a gradient; with a zero one, momentum and weight decay
    move it as the dense gradient of the whole objective would.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def path_of(prefix: str, name: str) -> str:
    """Returns a path that no other names make: a '/' in a name is told from one between names."""
    return prefix + name.replace("%", "%25").replace("/", "%2F")


def structure(tree: Tree) -> Structure:
    """Returns path, shape and dtype of every leaf, in the order of paths.

    Trees of one structure can be mapped together, whoever made them: their names are the same at
    every level, those of trees without a leaf among them.
    """
    return tuple(sorted(_structure(tree)))


def _structure(
    tree: Tree, prefix: str = ""
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype | None]]:
    for name, value in tree.items():
        path = path_of(prefix, name)
        if not isinstance(value, dict):
            yield path, tuple(value.shape), value.dtype
        elif value:
            yield from _structure(value, f"{path}/")
        else:
            yield f"{path}/", (), None


def finite(trees: Sequence[Tree]) -> list[bool]:
    """Returns of each of C trees whether none of its floating-point leaves has a NaN or infinity.

    An accelerator is waited for once.
    """
    floating = [[leaf for _, leaf in leaves(tree) if leaf.is_floating_point()] for tree in trees]
    alike = len({tuple(leaf.shape for leaf in own) for own in floating}) == 1 and floating[0]
    if not alike or alike[0].device == CPU:
        return [_all_finite(own) for own in floating]
    # Leaf by leaf, of all trees at once.
    stacked = [torch.stack(leaf).unsqueeze(-1).flatten(1) for leaf in zip(*floating, strict=True)]
    home = alike[0].device  # of most: Adam counts its steps on the CPU
    finite = torch.stack([leaf.isfinite().all(1).to(home) for leaf in stacked])
    told: list[bool] = finite.all(0).tolist()
    return told


def _all_finite(floating: Sequence[Tensor]) -> bool:
    if not floating:
        return True
    # A sum takes a tenth of the time. It is not finite where a summand is not, and seldom else.
    sums = [leaf.sum() for leaf in floating]
    if floating[0].device != CPU:  # Adam counts its steps on the CPU
        sums = [each.to(floating[0].device) for each in sums]
    told = bool(torch.stack(sums).isfinite().all())
    return told or all(bool(leaf.isfinite().all()) for leaf in floating)


def count_bytes(tree: Tree) -> int:
    """Returns the bytes of all leaves as they would travel, without any framing."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def mapped() -> bool:
    """Returns whether this is computed under ``torch.func``, as by the engine ``vmap``.

    It has no rules for ``torch._foreach`` and none for memory formats, and what it maps cannot be
    added in place to what it does not map.
    """
    return torch._C._functorch.maybe_current_level() is not None


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Returns how often each of some tensors was written to in place.

    That takes less than a tenth of a microsecond for each. What is computed under ``vmap`` shows it
    outside, on what is stacked.
    """
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # one was made in inference mode, where nothing is counted
        return []

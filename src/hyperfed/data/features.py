"""Features once: examples go through a network's frozen beginning before training, not in it.

What the beginning makes of an example never changes, so it is computed once for each, in large
batches, and kept in the cache (:mod:`hyperfed.data.cache`). What is trained is the rest.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.data import cache
from hyperfed.data.examples import Normalize, fingerprint_of_frozen, hash_of
from hyperfed.data.hub import bar
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH
from hyperfed.nets.anatomy import mixing_norms
from hyperfed.nets.pretrained import is_peft

Beginning = str | nn.Module | Callable[[Tensor], Tensor]
"""A part of the target, by its name or as it is; or what maps a batch to features."""

CLOSE = 1e-3
"""Of the largest feature: what has been kept differs by less from what is computed now."""


class Prefix(nn.Module):
    """Maps raw examples to features: a task's ``transform``, where its targets take features.

    It always computes as in evaluation: batch-norm by its statistics, without dropout.

    Args:
        normalize: how raw examples become what ``net`` takes.
        net: the frozen beginning, or a function.
    """

    def __init__(self, normalize: Normalize, net: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.normalize, self.net = normalize, net
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the features of a raw batch."""
        with torch.no_grad():
            return self.net(self.normalize(x))

    def fingerprint(self) -> str | None:
        """Returns a hash of the weights; None of a function, whose ways nothing tells."""
        if not isinstance(self.net, nn.Module):
            return None
        buffers = [part for entry in self.net.named_buffers() for part in entry]
        frozen = fingerprint_of_frozen({"prefix": self.net})
        return hash_of(repr(self.net), repr(self.normalize), frozen, *buffers)


def split_off(
    models: Mapping[str, nn.Module], prefix: Beginning, given: Any = None
) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """Takes the frozen beginning out of a task's network.

    Args:
        models: the networks of each size, which stay as they are.
        prefix: a part of the one network; or what stands before all of them.
        given: the network that ``models`` are copies of, where ``prefix`` may be a part of it.

    Returns:
        the networks that take features, whose entries keep their names, and the beginning.

    Raises:
        UserError: no such part, a part of one among several networks, or one that is trained.
    """
    inside = given.named_modules() if isinstance(given, nn.Module) else ()
    name = prefix if isinstance(prefix, str) else None
    name = next((at for at, part in inside if part is prefix), name)
    if name is None:
        if not callable(prefix):
            raise UserError(
                "prefix must be a part of the model, its name, or a function of a batch, got "
                f"{prefix!r}; pass one"
            )
        return dict(models), deepcopy(prefix) if isinstance(prefix, nn.Module) else prefix
    if len(models) > 1:
        raise UserError(
            f"a prefix that is a part of the model must be that of one, got {len(models)} models "
            f"({', '.join(models)}); pass what stands before all of them, and models without it"
        )
    ((size, whole),) = models.items()
    rest: Any = trees.copied(whole)
    at: Any = next((net for net in (rest, _base(rest)) if name and _has(net, name)), None)
    if at is None:
        parts = [part for part, _ in _base(rest).named_children()]
        raise UserError(
            f"prefix must name a part of the model, got {name!r}; choose one of {', '.join(parts)} "
            "or a part of one"
        )
    net: nn.Module = at.get_submodule(name)
    if trained := list(trees.parameters_of(net)):
        raise UserError(
            f"a prefix must be frozen, but {name}.{trained[0]} is trained; "
            "requires_grad_(False), or choose an earlier part"
        )
    at.set_submodule(name, nn.Identity())
    return {size: rest}, net


def check(
    whole: Mapping[str, nn.Module],
    rest: Mapping[str, nn.Module],
    net: Callable[[Tensor], Tensor],
    batch: Tensor,
) -> Tensor:
    """Returns the features of a batch, having seen that the rest makes of them what the whole does.

    Args:
        whole: the networks; where they begin with ``net``.
        rest: the networks that take features.
        net: the beginning.
        batch: some normalised examples.

    Raises:
        UserError: it fails on the batch, gives no row for each example, has batch-norm without
            statistics, or something else in the network takes examples, too.
    """
    if isinstance(net, nn.Module) and (names := mixing_norms(net)):
        raise UserError(
            "a prefix must make features of each example by itself, but its batch-norm "
            f"{names[0] or type(net).__name__} keeps no statistics and takes those of all that "
            "come together; give it track_running_stats=True, or choose a part before it"
        )
    try:
        features = Prefix(Normalize((), ()), net)(batch)
    except Exception as error:  # whatever a user's network raises is to be told
        raise UserError(
            f"prefix must take a batch of x, shape {tuple(batch.shape)} {batch.dtype}, but fails "
            f"on it ({type(error).__name__}: {error}); change it"
        ) from error
    if not isinstance(features, Tensor) or features.shape[:1] != batch.shape[:1]:
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(
            f"prefix must return a tensor with a row for each of {len(batch)} examples, got {got}; "
            "change it"
        )
    for size, network in rest.items():
        if network is whole[size]:
            continue  # nothing was taken out of it
        try:
            with torch.no_grad():
                now, then = (
                    trees.copied(of).eval()(x)
                    for of, x in ((network, features), (whole[size], batch))
                )
                same = _close(now, then)
        except Exception:  # of whichever of its layers gets features that it does not take
            same = False
        if not same:
            raise UserError(
                "a prefix must be what examples go through first, and nothing else of the model "
                "may take them, but without it the model gives other outputs; choose another part"
            )
    return features


def computed(prefix: Callable[[Tensor], Tensor], x: Tensor, *, keep: bool = True) -> Tensor:
    """Returns what a prefix makes of all examples, on the CPU.

    Args:
        prefix: the task's ``transform``.
        x: (N, ...) raw examples.
        keep: look in the cache first, and leave it there for the next time. What is found there is
            of these examples and weights, and is used if the first batch still comes to it.
    """

    def compute() -> Tensor:
        first = prefix(x[:EVALUATION_BATCH])
        features = first.new_empty(len(x), *first.shape[1:])
        features[: len(first)] = first
        with bar("features", len(x)) as advance:
            advance(len(first))
            for begin in range(len(first), len(x), EVALUATION_BATCH):
                rows = slice(begin, begin + EVALUATION_BATCH)
                features[rows] = prefix(x[rows])
                advance(len(x[rows]))
        return features

    weights = prefix.fingerprint() if keep and isinstance(prefix, Prefix) else None
    if weights is None:
        return compute()
    key, first = f"features-{hash_of(x, weights)}", x[:EVALUATION_BATCH]
    return cache.tensor(key, compute, lambda kept: _close(kept[: len(first)], prefix(first)))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _base(net: Any) -> Any:
    """Returns the network inside one of ``peft``, whose parts have the names that a user knows."""
    return net.get_base_model() if is_peft(net) else net


def _has(net: nn.Module, name: str) -> bool:
    return name in dict(net.named_modules())

"""Known clients' models for a novel client that cannot get one of its own.

These are the ways in which IT-PFL-HN's paper (section 6.2) uses pFedHN for a client without labels:
one known client's model, drawn at random ("sampled"); all of them, their outputs averaged
("ensemble"); that of the known client whose inputs are the nearest ("nearest"). For the first two a
novel client is sent a pool, the models of all known clients; for the last a model like any other.
Known clients are those of its target size here: no other's embedding was trained to make such a
model.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.federation import Cohort
from hyperfed.methods.parts.a_distance import a_distance
from hyperfed.trees import Model, Tree, stack, take, tree_map

POOL = "pool"
"""The name under which a pool is sent: {"pool": models, leaves (n, ...)}."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PoolConfig:
    """The settings of a method that can serve novel clients with known ones' models.

    Attributes:
        novel_models: what a novel client uses: what the method fits with its labels; one model of
            the known clients drawn uniformly ("sampled": its expected counts are what is
            evaluated); all of them, their outputs averaged ("ensemble"); or that of the known
            client at the smallest A-distance ("nearest").
        distance_steps: gradient steps of the classifiers that measure it.
    """

    novel_models: Literal["fit", "sampled", "ensemble", "nearest"] = "fit"
    distance_steps: PositiveInt = 50

    @property
    def pooled(self) -> bool:
        """Whether novel clients are sent a pool."""
        return self.novel_models in ("sampled", "ensemble")

    def check_pool(self, *, possible: bool) -> None:
        """Raises ``UserError`` where known clients' models are asked for but do not do."""
        if self.novel_models != "fit" and not possible:
            raise UserError(
                f"novel_models={self.novel_models!r} needs whole models made from learned "
                "embeddings; set head_layers=0 and descriptor='embedding', or novel_models='fit'"
            )


def lenders(novel: Cohort) -> Cohort:
    """Returns the known clients of novel ones' target size.

    Args:
        novel: clients of one target size.

    Raises:
        UserError: no known client has their size.
    """
    known = novel.known.sizes.get(novel.size)
    if known is None:
        raise UserError(
            "a known client whose model a novel one uses must run a target of its size, but none "
            f"runs {novel.size}; set novel_models='fit'"
        )
    return known


def nearest(novel: Cohort, steps: int) -> Tensor:
    """Returns (C,) numbers of the known clients nearest to novel ones, among :func:`lenders`.

    Args:
        novel: C clients of one target size.
        steps: gradient steps of :func:`hyperfed.methods.parts.a_distance.a_distance`.

    Raises:
        UserError: no known client has their size.
    """
    known = lenders(novel)
    return known.ids[a_distance(novel, known, steps).argmin(dim=1)]


def check_single(received: Tree, novel_models: str) -> None:
    """Raises ``UserError`` where what a client received is a pool and not one model."""
    if POOL in received:
        raise UserError(
            f"a model to hand over must be one, but novel_models={novel_models!r} "
            "uses those of all known clients; evaluate it, or set novel_models='fit'"
        )


def completed(more: Callable[[Model], Model], model: Tree) -> Tree:
    """Returns a model with more entries, made from it; of a pool, each of its models."""
    if POOL not in model:
        return model | more(model)
    return {POOL: model[POOL] | stack([more(member) for member in _members(model)])}


def counts_of(evaluate: Callable[[Tree], Tree], received: Tree) -> Tree:
    """Evaluates a model; of a pool, returns the mean of its models' counts."""
    if POOL not in received:
        return evaluate(received)
    counts = stack([evaluate(member) for member in _members(received)])
    return tree_map(lambda leaf: leaf.double().mean(dim=0).to(leaf.dtype), counts)


def output_of(predict: Callable[[Model, Tensor], Tensor], model: Tree, x: Tensor) -> Tensor:
    """Returns (B, classes) outputs of a model; of a pool, the mean over its models."""
    if POOL not in model:
        return predict(model, x)
    return torch.stack([predict(member, x) for member in _members(model)]).mean(dim=0)


def _members(tree: Tree) -> Iterator[Model]:
    """Yields each model of a pool, with the entries that the client added beside the pool."""
    own = {name: value for name, value in tree.items() if name != POOL}
    for index in range(len(next(iter(tree[POOL].values())))):
        yield take(tree[POOL], index) | own

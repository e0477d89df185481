"""A pool: the models of all known clients, for a novel client that cannot get one of its own.

These are the ways in which IT-PFL-HN's paper (section 6.2) uses pFedHN for a client without labels.
Sent: the models of all known clients, to each novel one. The paper's third way, the model of the
nearest known client by A-distance, is not here: its linear classifier takes gradients from both
clients, so known clients would have to answer while a novel one is served.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.trees import Model, Tree, stack, take, tree_map

POOL = "pool"
"""The name under which a pool is sent: {"pool": models, leaves (n, ...)}."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PoolConfig:
    """The setting of a method that can serve novel clients from a pool.

    Attributes:
        novel_models: what a novel client uses: what the method fits with its labels; one model of
            the pool drawn uniformly ("sampled": its expected counts are what is evaluated); or all
            of them, their outputs averaged ("ensemble").
    """

    novel_models: Literal["fit", "sampled", "ensemble"] = "fit"

    def check_pool(self, *, possible: bool) -> None:
        """Raises ``UserError`` where a pool is asked for and is not possible."""
        if self.novel_models != "fit" and not possible:
            raise UserError(
                f"novel_models={self.novel_models!r} needs whole models made from learned "
                "embeddings; set head_layers=0 and descriptor='embedding', or novel_models='fit'"
            )


class PoolClient(federation.Client):
    """A client that may be sent a pool in the place of a model."""

    @step
    def export(self, received: Tree) -> Tree:
        """Hands over the personal model, where there is one.

        Raises:
            UserError: a pool was sent.
        """
        if POOL in received:
            raise UserError(
                f"a model to hand over must be one, but novel_models={self.config.novel_models!r} "
                "uses those of all known clients; evaluate it, or set novel_models='fit'"
            )
        return super().export(received)

    @step(evaluates=True)
    def evaluate(self, received: Tree) -> Tree:
        """Counts as usual; of a sampled model, what is to be expected: the mean over the pool."""
        if POOL not in received or self.config.novel_models == "ensemble":
            return super().evaluate(received)
        counts = [federation.Client.evaluate(self, member) for member in _members(received)]
        return tree_map(lambda leaf: leaf.double().mean(dim=0).to(leaf.dtype), stack(counts))

    def predict(self, model: Model, x: Tensor) -> Tensor:
        """Returns (B, classes) outputs; of a pool, their mean over its models."""
        if POOL not in model:
            return super().predict(model, x)
        outputs = [federation.Client.predict(self, member, x) for member in _members(model)]
        return torch.stack(outputs).mean(dim=0)


def _members(tree: Tree) -> Iterator[Model]:
    """Yields each model of a pool, with the entries that the client added beside the pool."""
    own = {name: value for name, value in tree.items() if name != POOL}
    for index in range(len(next(iter(tree[POOL].values())))):
        yield take(tree[POOL], index) | own

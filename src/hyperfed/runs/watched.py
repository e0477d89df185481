"""What a round does that a checkpoint does not keep, or a second run would not do again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.federation import Server
from hyperfed.trees import state

log = logging.getLogger(__name__)


class Watched:
    """Looks at rounds, and warns once of each such thing: a method of one's own may not know."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    @contextmanager
    def round(self, server: Server, number: int) -> Iterator[None]:
        """Looks at what a server's round does, which is trained in the block."""
        before, drawn = _left_out(server), _global_generators()
        yield
        now = _left_out(server)
        for name, value in before.items():
            if value is not None and now.get(name, value) != value:
                self._warn(
                    name,
                    "attribute %s of the server changed in round %d, but checkpoints leave it out, "
                    "so that a resumed run goes on with what it was made with; keep what changes "
                    "in tensors, such as torch.tensor(0), trees of tensors alone, modules or "
                    "optimisers",
                    name,
                    number,
                )
        for library, numbers in _global_generators().items():
            if numbers != drawn[library]:
                self._warn(
                    library,
                    "round %d drew from the global generator of %s, so that no two runs have the "
                    "same numbers; draw from self.generator in a step, and in a server from a "
                    "torch.Generator seeded by clients.round",
                    number,
                    library,
                )

    def _warn(self, what: str, message: str, *arguments: object) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(message, *arguments)


Leaves = set[tuple[str, tuple[int, ...], Any]]
"""Path, shape and dtype of each."""


def leaves(server: Server) -> Leaves:
    """Returns what a server has learned, without reading replies that wait for that."""
    learned = trees.structure(state.of(vars(server), optimizers=False))
    return {leaf for leaf in learned if leaf[2]}  # a tree without any may get some


def check_leaves(server: Server, made: Leaves, number: int) -> None:
    """Finds out whether another server, as it was made, could go on from a checkpoint of this one.

    Raises:
        UserError: it could not, after so many rounds.
    """
    if lacking := made - leaves(server):
        name, shape, dtype = min(lacking, key=str)
        raise UserError(
            f"{name} of the server's state must keep the shape {shape} and the type {dtype} that "
            "it was made with, as checkpoints are opened by another server, but has not after "
            f"round {number}; make it with those that it will have, or let it first come in a round"
        )


def _left_out(server: Server) -> dict[str, Any]:
    """Returns {name: what can be compared} of all attributes that are no state."""
    kept = state.of(vars(server))
    return {name: _told(value) for name, value in vars(server).items() if name not in kept}


def _told(value: object) -> object:
    """Returns what is to be compared of an attribute; nothing of what is no plain value."""
    if isinstance(value, dict):
        return [(key, _told(of)) for key, of in value.items()]
    if isinstance(value, list | tuple):
        return [_told(of) for of in value]
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float | complex | str | bytes) else None


def _global_generators() -> dict[str, bytes]:
    """Returns the states of the generators that nobody but a whole process seeds."""
    of_numpy: Any = np.random.get_state(legacy=False)
    told = of_numpy["state"]
    return {
        "PyTorch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": told["key"].tobytes() + str(told["pos"]).encode(),
    }

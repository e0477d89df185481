"""Going back to before a round, where what clients replied has ruined the server."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperfed import trees
from hyperfed.engines import Engine, EngineCohort
from hyperfed.federation import Server
from hyperfed.trees import Tree, state


class Snapshot:
    """A server as it was when this was taken, before each round anew, without gradients.

    Optimisers and modules move in place, so that all tensors are copied; what else a server holds
    is kept as it is, a message that waits for its reply among it. What clients remember is not in
    it: that changes only where their round is committed.
    """

    def __init__(self) -> None:
        self._attributes: dict[str, Any] = {}
        self._tensors: Tree = {}

    def take(self, server: Server) -> None:
        """Copies a server, to where the copy before was: to ask for memory takes the longest."""
        self._attributes = dict(vars(server))
        tensors = state.of(vars(server))
        copies, now = (dict(trees.leaves(tree)) for tree in (self._tensors, tensors))
        if now and copies.keys() == now.keys() and all(_alike(copies[p], now[p]) for p in now):
            torch._foreach_copy_([copies[path] for path in now], [*now.values()])
        else:
            self._tensors = trees.clone(tensors)

    def restore(self, server: Server, engine: Engine, cohort: EngineCohort) -> None:
        """Puts all back, and takes back what the cohort of the round was posted."""
        vars(server).clear()
        vars(server).update(self._attributes)
        vars(server).update(state.loaded(self._attributes, self._tensors))
        self._tensors = {}  # they are the server's now
        for value in self._attributes.values():
            if isinstance(value, nn.Module | Optimizer):
                value.zero_grad()  # what the round came to; as after a resume there is none
        engine.waiting[:] = [q for q in engine.waiting if q.cohort.state is not cohort.state]


def is_finite(server: Server) -> bool:
    """Returns whether all numbers of a server's state are finite; nothing waits to be read."""
    (told,) = trees.finite([state.of(vars(server))])
    return told


def _alike(first: Tensor, second: Tensor) -> bool:
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.stride() == second.stride()
        and first.device == second.device
    )

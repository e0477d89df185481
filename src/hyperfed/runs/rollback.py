"""Going back to before a round, where what clients replied has ruined the server."""

from hyperfed import trees
from hyperfed.engines import Engine, EngineCohort
from hyperfed.federation import Server
from hyperfed.trees import state


class Snapshot:
    """A server and what its clients remember, as they are now.

    Optimisers and modules move in place, so that all tensors are copied; what else a server holds
    is kept as it is, a message that waits for its reply among it.
    """

    def __init__(self, server: Server, engine: Engine) -> None:
        self._attributes = dict(vars(server))
        self._tensors = trees.clone(state.of(vars(server)))
        self._memory = dict(engine.memory)

    def restore(self, server: Server, engine: Engine, cohort: EngineCohort) -> None:
        """Puts all back, and takes back what the cohort of the round was posted."""
        vars(server).clear()
        vars(server).update(self._attributes)
        for name, tensors in self._tensors.items():
            setattr(server, name, state.loaded(self._attributes[name], tensors))
        engine.memory = self._memory
        engine.waiting[:] = [q for q in engine.waiting if q.cohort.state is not cohort.state]


def is_finite(server: Server) -> bool:
    """Returns whether all numbers of a server's state are finite; nothing waits to be read."""
    (told,) = trees.finite([state.of(vars(server))])
    return told

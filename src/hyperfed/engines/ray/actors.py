"""The half of the Ray engine that runs in an actor, and what it is sent and sends back."""

import pickle
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hyperfed.engines.calls import Answer, Call, same
from hyperfed.engines.local.vmap import best_engine
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.federation import Client
from hyperfed.system.devices import find_device
from hyperfed.task import Task
from hyperfed.training import Precision
from hyperfed.trees import Tree
from hyperfed.trees.packing import pack, unpack


@dataclass(frozen=True)
class Work:
    """What every actor of an engine needs, one object for all.

    Attributes:
        data: all examples, packed: the actors of one machine read them from memory they share.
        task: the task without them.
        client: the method's Client.
        config: the method's settings.
        seed: the run's seed.
        cores: threads of one client's arithmetic.
        precision: of that.
        device: where an actor computes.
        private: how the answers of clients are made private.
    """

    data: Tree
    task: Task
    client: type[Client]
    config: Any
    seed: int
    cores: int
    precision: Precision
    device: str
    private: PrivateUpdates | None = None

    @staticmethod
    def of(task: Task, client: type[Client], config: Any, **options: Any) -> "Work":
        """Splits a task into its examples and the rest; the options are the other attributes."""
        data = pack({"x": task.x, "y": task.y})
        without = replace(task, x=torch.empty(0), y=torch.empty(0))
        return Work(data, without, client, config, **options)

    def whole(self) -> Task:
        """Returns the task with its examples, which are not to be written to."""
        return replace(self.task, **unpack(self.data))


@dataclass(frozen=True)
class Outcome:
    """What became of one call.

    Attributes:
        reply: the client's reply, packed, or what it raised.
        wrote_memory: the client wrote to its memory.
        wrote_scratch: the same of its scratch.
        released: what it has let out with noise.
    """

    reply: Tree | Exception
    wrote_memory: bool = False
    wrote_scratch: bool = False
    released: Tree = field(default_factory=dict)


class Worker:
    """What an actor is: the data, and an engine. It remembers nothing between calls.

    Args:
        paths: where the driver looks for modules; on its own machine an actor finds them there too.
        boxed: a list of the reference to its :class:`Work`, which Ray would otherwise have loaded
            before the paths are known.
    """

    def __init__(self, paths: Sequence[str], boxed: Sequence[Any]) -> None:
        import ray

        sys.path += [path for path in paths if path not in sys.path]
        work: Work = ray.get(boxed[0])
        device = find_device(work.device)
        self._engine = best_engine(device)(
            work.whole(),
            work.client,
            work.config,
            seed=work.seed,
            workers=1,
            cores_per_client=work.cores,
            precision=work.precision,
            device=device,
            private=work.private,
        )

    def ready(self) -> None:
        """Returns, once the actor is there."""

    def answer(self, calls: Sequence[Call], *known: Tree | None) -> tuple[Any, ...]:
        """Runs calls of one or more cohorts, in each of them of different clients.

        Args:
            calls: payloads are packed.
            known: for each call memory and scratch with which it begins, packed; None where empty.

        Returns:
            the outcome of each call; then for each memory and scratch after it, packed, or None
            where nothing was written.
        """
        memories = self._engine.memories
        calls = [replace(call, payload=tuple(map(unpack, call.payload))) for call in calls]
        for call, memory, scratch in zip(calls, known[::2], known[1::2], strict=True):
            memories.note(call, Answer({}, unpack(memory or {}), unpack(scratch or {})))
        before = [memories.of(call) for call in calls]
        self._engine.released = {call.client: call.released for call in calls}
        replies = self._engine.answer(calls)
        outcomes: list[Outcome] = []
        written: list[Tree | None] = []
        for call, reply, held in zip(calls, replies, before, strict=True):
            try:
                if isinstance(reply, Exception):
                    raise reply
                after = [
                    None if same(tree, of) else pack(tree)
                    for tree, of in zip(memories.of(call), held, strict=True)
                ]
                wrote = [tree is not None for tree in after]
                released = self._engine.released[call.client]
                outcomes.append(Outcome(pack(reply), wrote[0], wrote[1], released))
                written += after
            except Exception as error:  # whatever a client raises concerns only itself
                outcomes.append(Outcome(portable(error)))
                written += [None, None]
        for cohort in {call.cohort for call in calls}:
            memories.forget(cohort)
        return outcomes, *written


def portable(error: Exception) -> Exception:
    """Returns an exception that can travel, with a note of where it was raised.

    It is the same one, unless that cannot be pickled: then a ``RuntimeError`` that names it.
    """
    import ray

    where = "".join(traceback.format_exception(error))
    pickler: Any = ray.cloudpickle  # published without types
    try:
        pickle.loads(pickler.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"It was raised by a client in an actor:\n{where}")
    return error

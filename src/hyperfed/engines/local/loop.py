"""The reference engine: clients one after another, or several at once in worker threads.

The number of workers never changes a result. The number of cores to a client does, in the last bits
(the order of a threaded sum), so it is a recorded setting: all cores where a round has one client,
one core to a client otherwise.
"""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.engines.calls import Answer, Call, execute, hash_of_data, keys_of_draws
from hyperfed.engines.cohort import CohortState, Engine, EngineCohort, Question
from hyperfed.engines.faults import Faults
from hyperfed.engines.made_up import made_up
from hyperfed.engines.masking import Masking
from hyperfed.engines.memories import Memories
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.federation import Client
from hyperfed.functional import forward
from hyperfed.system.allocation import keep_freed_memory
from hyperfed.system.devices import CPU, describe
from hyperfed.system.randomness import seeded
from hyperfed.task import Split, Task
from hyperfed.training import Precision, arithmetic
from hyperfed.trees import Tree


class LoopEngine:
    """Runs the clients of a task in this process; see :class:`hyperfed.engines.cohort.Engine`.

    Args:
        task: data and target models.
        client: the method's Client.
        config: the method's settings, handed to each client.
        seed: the run's seed.
        workers: clients at once; by default as many as keep all cores busy to the end.
        cores_per_client: threads of one client's arithmetic; by default all cores for a cohort of
            one and 1 for a larger one.
        faults: what to inject into training rounds.
        precision: of the clients' arithmetic.
        device: where the data, the clients' models and the server are.
        home: the engine of the task that the method was trained on, where ``task`` is that of a
            newcomer.
        secret: clients' noise is the operating system's, not the seed's.
        limits: (epsilon, delta) that hold for all that a client lets out.
        private: how the answers of clients are made private.
        masking: how updates are summed, where the server is told nothing but sums.

    Attributes:
        memories: what clients remember, drafts of open cohorts too.
        released: what each client has let out with noise.
    """

    name = "loop"

    def __init__(
        self,
        task: Task,
        client: type[Client],
        config: Any,
        *,
        seed: int,
        workers: int | None = None,
        cores_per_client: int | None = None,
        faults: Faults | None = None,
        precision: Precision = "float32",
        device: torch.device = CPU,
        home: Engine | None = None,
        secret: bool = False,
        limits: Sequence[tuple[float, float]] = (),
        private: PrivateUpdates | None = None,
        masking: Masking | None = None,
    ) -> None:
        self.task, self.device = task.to(device), device
        self.client, self.config, self.seed = client, config, seed
        self.workers, self.cores_per_client = workers, cores_per_client
        self.precision = precision
        self.faults, self.home = faults or Faults(), home
        self.memories = Memories(device)
        self.released: dict[int, Tree] = {}
        self.private, self._secret, self._limits = private, secret, limits
        self._hash_of_data = cache(partial(hash_of_data, self.task))  # of a client, found once
        self.masking = masking
        keep_freed_memory()
        if device.type == "cuda":  # the same bits in two runs, and all those of a float32
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.allow_tf32 = False
        self.waiting: list[Question] = []
        self.traffic: dict[str, int] = {}
        self.cores = torch.get_num_threads()
        self._numbers = count()
        self._own = threading.local()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        trained = task if home is None else home.task
        with seeded(seed, "networks"):
            networks = client.networks(trained.outline(), config)
        self._networks = {name: network.to(device) for name, network in networks.items()}
        # Of a method's own networks there is no trial, and that of a target misses some branches.
        everything = [*task.models.values(), *self._networks.values()]
        self._stochastic = any(map(_has_dropout, everything)) or _draws(self.task)

    @property
    def memory(self) -> dict[int, Tree]:
        """What clients remember after the latest commit, {client: tree}."""
        return self.memories.kept

    @memory.setter
    def memory(self, memory: dict[int, Tree]) -> None:
        self.memories.kept = memory

    def cohort(self, ids: Sequence[int], round: int, *, training: bool) -> EngineCohort:
        """Returns the cohort of a round."""
        state = CohortState(next(self._numbers), round, training)
        weakref.finalize(state, self.memories.forget, state.number)
        return EngineCohort(self, ids, state)

    def commit(self, cohort: EngineCohort) -> None:
        """Keeps the memories of a round's clients that were not lost."""
        self.memories.keep(cohort.state.number, cohort.there)

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Runs calls cohort by cohort, as if each came alone: its size decides on the cores."""
        parts = groupby(calls, key=lambda call: call.cohort)
        return [answer for _, part in parts for answer in self._answer(list(part))]

    def _answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Runs calls of one cohort, as many at once as there are workers."""
        cores = self._cores_of_one(len(calls))
        places = max(1, self.cores // cores)
        workers = min(self.workers or fair_workers(len(calls), places), len(calls))
        if self._stochastic or self.device != CPU:
            # A network draws from the one global generator; an accelerator does one thing.
            workers = 1

        def run(call: Call) -> Answer | Exception:
            torch.set_num_threads(cores)
            return self._run(call)

        with on_cores(cores):
            if workers == 1:
                answers = [run(call) for call in calls]
            else:
                answers = list(self._pool(workers).map(run, calls))
        for call, answer in zip(calls, answers, strict=True):
            if isinstance(answer, Answer):
                self.memories.note(call, answer)
                if answer.released:
                    self.released[call.client] = answer.released
        return [answer.tree if isinstance(answer, Answer) else answer for answer in answers]

    def saved(self, *memories: Mapping[int, Tree]) -> None:
        """Does nothing: a checkpoint holds the memories themselves."""

    def resources(self, clients: int) -> dict[str, Any]:
        """Returns the cores there are and those that compute one client, and any accelerator."""
        cores = {"cores": self.cores, "cores_per_client": self._cores_of_one(clients)}
        return cores if self.device == CPU else cores | {"device": describe(self.device)}

    def close(self) -> None:
        """Ends the worker threads."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()

    def _run(self, call: Call) -> Answer | Exception:
        memory, scratch = self.memories.of(call)
        released = self.released.get(call.client, {})
        payload = tuple(trees.to(tree, self.device) for tree in call.payload)
        try:
            with self._randomness("module", *keys_of_draws(call, self.client)), self.arithmetic():
                return execute(
                    replace(call, payload=payload, released=released),
                    task=self.task,
                    client=self.client,
                    config=self.config,
                    seed=self.seed,
                    module=self._module(self.task.size_of(call.client)),
                    networks=self._networks_of_this_thread(),
                    memory=memory,
                    scratch=scratch,
                    data=self._hash_of_data,
                    secret=self._secret,
                    limits=self._limits,
                    private=self.private,
                )
        except Exception as error:  # whatever a client raises concerns only itself
            return error

    def arithmetic(self) -> AbstractContextManager[None]:
        """Returns a block in which clients compute with the engine's precision."""
        return arithmetic(self.precision, self.device)

    def _cores_of_one(self, clients: int) -> int:
        """Returns how many threads compute one client of a cohort of so many."""
        return self.cores_per_client or (self.cores if clients == 1 else 1)

    def _pool(self, workers: int) -> ThreadPoolExecutor:
        if workers not in self._pools:
            self._pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="client")
        return self._pools[workers]

    def _module(self, size: str) -> nn.Module:
        """Returns this thread's own copy of a target.

        ``functional.apply`` puts weights into the module it is given, so a module shared by two
        threads would compute with a mixture of two clients' models.
        """
        copies: dict[str, nn.Module] = self._own.__dict__.setdefault("modules", {})
        if size not in copies:
            copies[size] = trees.copied(self.task.models[size])
        return copies[size]

    def _networks_of_this_thread(self) -> Mapping[str, nn.Module]:
        """Returns this thread's own copies of the method's other networks, as :meth:`_module`."""
        copies: dict[str, nn.Module] | None = self._own.__dict__.get("networks")
        if copies is None:
            copies = {name: trees.copied(network) for name, network in self._networks.items()}
            self._own.__dict__["networks"] = copies
        return copies

    def _randomness(self, *keys: str | int) -> AbstractContextManager[None]:
        """Returns a block in which networks draw as a function of ``keys``, where they do."""
        return seeded(self.seed, *keys) if self._stochastic else nullcontext()


def fair_workers(clients: int, places: int) -> int:
    """Returns how many workers end first with so many clients on cores for ``places``.

    Five clients at two places would take three turns, the last of them with a place left empty.
    Three that share two places, and then two, take two turns and a half.
    """

    def turns(workers: int) -> float:
        full, rest = divmod(clients, workers)
        return full * max(1, workers / places) + (max(1, rest / places) if rest else 0)

    return min(range(places, 2 * places), key=turns)


@contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """Computes a block with so many threads; None for as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _has_dropout(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.modules.dropout._DropoutNd)
        or (isinstance(part, nn.RNNBase) and part.dropout > 0)
        for part in module.modules()
    )


def _draws(task: Task) -> bool:
    """Returns whether some target in training mode draws random numbers, which a trial tells.

    A network may draw wherever it likes, such as by ``F.dropout``, and so may what makes its
    examples ready. One that the trial's examples are wrong for is taken to draw, which costs speed
    at most.
    """
    trial = made_up(task).to(task.x.device)
    places = torch, torch.get_device_module(trial.x.device)
    sources = [place for place in places if hasattr(place, "get_rng_state")]

    def states() -> list[Tensor]:
        return [source.get_rng_state() for source in sources]

    def moves(size: str) -> bool:
        before = states()
        try:
            x = Split(trial, trial.train[0]).batch().x
            forward(trees.copied(task.models[size]), task.initial(size), x)
        except Exception:  # whose fault it is shows in training
            return True
        return not all(map(torch.equal, before, states()))

    with seeded(0, "trial"), torch.no_grad():
        return any(map(moves, task.models))

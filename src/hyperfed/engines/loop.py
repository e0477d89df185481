"""The reference engine: clients one after another, or several at once in worker threads.

The number of workers never changes a result. The number of cores to a client does, in the last bits
(the order of a threaded sum), so it is a recorded setting: all cores where a round has one client,
one core to a client otherwise.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.federation import AllLostError, Client, Each, Outline, Split, StepInfo, Task
from hyperfed.randomness import generator, seeded
from hyperfed.training import Batch, Batches, Steps
from hyperfed.trees import Structure, Tree

Probability = Annotated[float, Field(ge=0, le=1)]


@validated(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Faults:
    """Faults made on purpose in training rounds, to see what a shrinking cohort does to a run.

    Attributes:
        drop: probability that a client does not answer in a round.
        nan: probability that a reply of a client is NaN.
    """

    drop: Probability = 0.0
    nan: Probability = 0.0


@dataclass(frozen=True)
class Exchange:
    """Bytes of one message to one client and of its reply (0 where none came)."""

    step: str
    client: int
    down: int
    up: int


class BadReplyError(Exception):
    """A client's reply is not what the step must return."""


@dataclass
class _Round:
    """What the views of one cohort (all of it, or one target size) share."""

    number: int
    training: bool
    novel: bool
    memory: dict[int, Tree]
    scratch: dict[int, Tree]
    turns: Counter[tuple[int, str]] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)
    causes: list[Exception] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


class LoopEngine:
    """Runs the clients of a task in this process.

    Args:
        task: data and target models.
        client: the method's Client.
        config: the method's settings, handed to each client.
        seed: the run's seed.
        workers: clients at once; by default as many as the cores allow.
        cores_per_client: threads of one client's arithmetic; by default all cores for a cohort of
            one and 1 for a larger one.
        faults: what to inject into training rounds.
        outline: of the task that the method was trained on, where ``task`` is that of a newcomer.
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
        outline: Outline | None = None,
    ) -> None:
        self.task, self.client, self.config, self.seed = task, client, config, seed
        self.workers, self.cores_per_client = workers, cores_per_client
        self.faults = faults or Faults()
        self.memory: dict[int, Tree] = {}
        self.cores = torch.get_num_threads()
        self._own = threading.local()
        self._pools: dict[int, ThreadPoolExecutor] = {}
        with seeded(seed, "networks"):
            self._networks = client.networks(outline or task.outline(), config)
        everything = [*task.models.values(), *self._networks.values()]
        self._stochastic = any(_draws(module) for module in everything)

    def cohort(
        self, ids: Sequence[int], round: int, *, training: bool, fresh: bool = False
    ) -> "LoopCohort":
        """Returns the cohort of a round.

        Args:
            ids: the clients.
            round: the round's number; draws depend on it.
            training: whether clients may be lost; if not, what a client raises is raised.
            fresh: clients start with an empty memory (a novel client that has never been asked).
        """
        memory = {} if fresh else {i: self.memory[i] for i in ids if i in self.memory}
        novel = any(i in self.task.novel_ids for i in ids)
        state = _Round(round, training, novel, memory, scratch={})
        return LoopCohort(self, tuple(ids), state)

    def commit(self, cohort: "LoopCohort") -> None:
        """Keeps the memories of a round's clients that were not lost."""
        state = cohort.state
        kept = {i: memory for i, memory in state.memory.items() if i not in state.lost}
        self.memory.update(kept)

    def close(self) -> None:
        """Ends the worker threads."""
        for pool in self._pools.values():
            pool.shutdown()
        self._pools.clear()

    def run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one job a client, and returns their results in the order of ``jobs``."""
        if not jobs:
            return []
        cores = self.cores_of_one(len(jobs) == 1)
        workers = min(self.workers or max(1, self.cores // cores), len(jobs))
        if self._stochastic:
            workers = 1  # dropout draws from the one global generator

        def run(job: Callable[[], Any]) -> Any:
            torch.set_num_threads(cores)
            return job()

        before = torch.get_num_threads()
        try:
            if workers == 1:
                return [run(job) for job in jobs]
            return list(self._pool(workers).map(run, jobs))
        finally:
            torch.set_num_threads(before)

    def cores_of_one(self, alone: bool) -> int:
        """Returns how many threads compute one client, which may be alone in its cohort."""
        return self.cores_per_client or (self.cores if alone else 1)

    def _pool(self, workers: int) -> ThreadPoolExecutor:
        if workers not in self._pools:
            self._pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="client")
        return self._pools[workers]

    def module(self, size: str) -> nn.Module:
        """Returns this thread's own copy of a target.

        ``functional_call`` swaps weights inside the module it is given, so a module shared by two
        threads would compute with a mixture of two clients' models.
        """
        copies: dict[str, nn.Module] = self._own.__dict__.setdefault("modules", {})
        if size not in copies:
            copies[size] = copy.deepcopy(self.task.models[size])
        return copies[size]

    def networks(self) -> Mapping[str, nn.Module]:
        """Returns this thread's own copies of the method's other networks; see :meth:`module`."""
        copies: dict[str, nn.Module] | None = self._own.__dict__.get("networks")
        if copies is None:
            copies = self._own.__dict__["networks"] = copy.deepcopy(self._networks)
        return copies

    def randomness(self, *keys: str | int) -> AbstractContextManager[None]:
        """Returns a block in which dropout draws as a function of ``keys``, where there is any."""
        return seeded(self.seed, *keys) if self._stochastic else nullcontext()


class LoopCohort:
    """The clients of one round; see :class:`hyperfed.federation.Cohort`."""

    def __init__(self, engine: LoopEngine, clients: tuple[int, ...], state: _Round) -> None:
        self._engine, self._clients, self.state = engine, clients, state
        self.ids = torch.tensor(clients, dtype=torch.int64)
        self._examples = torch.tensor(
            [len(engine.task.train[client]) for client in clients], dtype=torch.float64
        )

    @property
    def round(self) -> int:
        """The current round, from 0."""
        return self.state.number

    @property
    def novel(self) -> bool:
        """Whether these clients never took part in training."""
        return self.state.novel

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client lost this round."""
        there = [client not in self.state.lost for client in self._clients]
        return self._examples * torch.tensor(there, dtype=torch.float64)

    @cached_property
    def sizes(self) -> Mapping[str, "LoopCohort"]:
        """The clients grouped by target size, in the order of the task's models."""
        task = self._engine.task
        groups: dict[str, list[int]] = {size: [] for size in task.models}
        for client in self._clients:
            groups[task.size_of(client)].append(client)
        return {
            size: LoopCohort(self._engine, tuple(group), self.state)
            for size, group in groups.items()
            if group
        }

    @property
    def size(self) -> str:
        """The target size of all these clients, where they have one in common."""
        (size,) = self.sizes
        return size

    def ask(
        self, step: Callable[..., Tree], *payload: Tree | Each, batches: Batches | None = None
    ) -> Tree:
        """Runs a step at every client that is still there and stacks the replies."""
        info: StepInfo = step.__dict__["step"]
        slices = [_slice(payload, position) for position in range(len(self._clients))]
        there = [
            position
            for position, client in enumerate(self._clients)
            if client not in self.state.lost
        ]
        calls = [self._call(step, info, self._clients[p], slices[p], batches) for p in there]
        replies = dict(zip(there, self._engine.run([call.answer for call in calls]), strict=True))
        expected = _expected([reply for reply in replies.values() if isinstance(reply, _Answer)])
        answers: dict[int, Tree] = {}
        for position, reply in replies.items():
            client = self._clients[position]
            down = sum(trees.count_bytes(tree) for tree in slices[position])
            reason = _refusal(reply, expected)
            if reason is None:
                answers[position] = reply.tree
                self.state.memory[client] = reply.memory
                self.state.scratch[client] = reply.scratch
            else:
                self._lose(client, reason, reply)
            up = trees.count_bytes(reply.tree) if isinstance(reply, _Answer) else 0
            self.state.exchanges.append(Exchange(info.name, client, down, up))
        return self._stacked(answers)

    def _call(
        self,
        step: Callable[..., Tree],
        info: StepInfo,
        client: int,
        payload: tuple[Tree, ...],
        batches: Batches | None,
    ) -> "_Call":
        turn = self.state.turns[client, info.name]
        self.state.turns[client, info.name] += 1
        return _Call(self, step, info, client, payload, batches, turn)

    def _lose(self, client: int, reason: str, reply: object) -> None:
        if not self.state.training and isinstance(reply, Exception):
            raise reply
        self.state.lost[client] = reason
        if isinstance(reply, Exception):
            self.state.causes.append(reply)

    def _stacked(self, answers: dict[int, Tree]) -> Tree:
        if not answers:
            cause = next(iter(self.state.causes), None)
            reasons = "; ".join(f"client {i}: {why}" for i, why in self.state.lost.items())
            raise AllLostError(f"all clients were lost: {reasons}") from cause
        nothing = trees.tree_map(torch.zeros_like, next(iter(answers.values())))
        return trees.stack([answers.get(p, nothing) for p in range(len(self._clients))])


@dataclass(frozen=True)
class _Answer:
    """A client's reply and what it wants to keep."""

    tree: Tree
    memory: Tree
    scratch: Tree
    structure: Structure


class _NoAnswerError(Exception):
    """The client did not answer."""


@dataclass(frozen=True)
class _Call:
    """One step at one client; ``turn`` counts how often it was asked this step in this round."""

    cohort: LoopCohort
    step: Callable[..., Tree]
    info: StepInfo
    client: int
    payload: tuple[Tree, ...]
    batches: Batches | None
    turn: int

    def answer(self) -> _Answer | Exception:
        """Runs the step. What goes wrong is returned: it may lose this client and no other."""
        try:
            return self._run()
        except Exception as error:  # whatever a client raises concerns only itself
            return error

    def _run(self) -> _Answer:
        engine, state = self.cohort._engine, self.cohort.state
        keys = (self.client, state.number, self.info.name, self.turn)
        if state.training and _chance(engine, engine.faults.drop, "drop", *keys[:2]):
            raise _NoAnswerError("did not answer (injected by faults.drop)")
        task = engine.task
        labelled = not (task.unlabelled and self.client in task.novel_ids)
        train = Split(task, task.train[self.client], labelled=labelled)
        memory = dict(state.memory.get(self.client, {}))
        scratch = dict(state.scratch.get(self.client, {}))
        client = engine.client(
            id=self.client,
            round=state.number,
            task=task,
            module=engine.module(task.size_of(self.client)),
            config=engine.config,
            batches=_draw(train, self.batches, generator(engine.seed, "batches", *keys)),
            generator=generator(engine.seed, "client", *keys),
            memory=memory,
            scratch=scratch,
            networks=engine.networks(),
            labelled=labelled,
            evaluates=self.info.evaluates,
        )
        with engine.randomness("module", *keys):
            reply = self.step(client, *self.payload)
        _check_tree(reply)
        reply = trees.detach(reply)
        if state.training and _chance(engine, engine.faults.nan, "nan", *keys):
            reply = trees.tree_map(_spoil, reply)
        return _Answer(reply, client.memory, client.scratch, self._structure(reply))

    def _structure(self, reply: Tree) -> Structure:
        """Returns the reply's structure, or raises where the step promised another."""
        structure = trees.structure(reply)
        if self.info.like is not None:
            names = self.step.__code__.co_varnames[1:]
            promised = trees.structure(self.payload[names.index(self.info.like)])
            if structure != promised:
                raise BadReplyError(_difference(structure, promised))
        return structure


def _slice(payload: Sequence[Tree | Each], position: int) -> tuple[Tree, ...]:
    """Returns what one client is sent."""
    for item in payload:
        tree = item.tree if isinstance(item, Each) else item
        if any(leaf.requires_grad for _, leaf in trees.leaves(tree)):
            raise ValueError(
                "what is sent must not be part of an autograd graph: no gradient crosses the "
                "network; send trees.detach(...) and pull the reply back yourself"
            )
    return tuple(item.slice(position) if isinstance(item, Each) else item for item in payload)


def _draw(split: Split, batches: Batches | None, source: torch.Generator) -> Iterator[Batch]:
    """Yields the batches that a server asked for."""
    if batches is None:
        return
    if isinstance(batches, Steps):
        for _ in range(batches.count):
            yield split.batch(torch.randperm(len(split), generator=source)[: batches.size])
        return
    for _ in range(batches.count):
        order = torch.randperm(len(split), generator=source)
        for start in range(0, len(split), batches.size):
            yield split.batch(order[start : start + batches.size])


def _check_tree(reply: object) -> None:
    if not isinstance(reply, dict) or not all(
        isinstance(leaf, Tensor) for _, leaf in trees.leaves(reply)
    ):
        raise BadReplyError("a step must return a (nested) dict of tensors")


def _expected(answers: Sequence[_Answer]) -> Structure | None:
    """Returns the structure that most clients replied with."""
    counts = Counter(answer.structure for answer in answers)
    return counts.most_common(1)[0][0] if counts else None


def _refusal(reply: _Answer | Exception, expected: Structure | None) -> str | None:
    """Returns why a reply cannot be used, or None."""
    if isinstance(reply, _NoAnswerError | BadReplyError):
        return str(reply)
    if isinstance(reply, Exception):
        return f"{type(reply).__name__}: {reply}"
    if expected is not None and reply.structure != expected:
        return _difference(reply.structure, expected)
    return None if trees.finite(reply.tree) else "the reply is not finite"


def _difference(came: Structure, expected: Structure) -> str:
    """Names the first few leaves in which a reply differs from what it should be."""
    differing = sorted({path for path, *_ in set(came) ^ set(expected)})
    return f"the reply's names, shapes or dtypes are wrong: {', '.join(differing[:3])}"


def _chance(engine: LoopEngine, probability: float, *keys: str | int) -> bool:
    if not probability:
        return False
    return float(torch.rand((), generator=generator(engine.seed, "fault", *keys))) < probability


def _spoil(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf


def _draws(module: nn.Module) -> bool:
    """Returns whether a network in training mode draws random numbers."""
    return any(
        isinstance(part, nn.modules.dropout._DropoutNd)
        or (isinstance(part, nn.RNNBase) and part.dropout > 0)
        for part in module.modules()
    )

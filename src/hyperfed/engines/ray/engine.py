"""Actors on a Ray cluster: for many cores, GPUs and machines that you own and trust.

Client i is always computed by actor i modulo their number, which holds the data and runs the best
engine for its device: ``loop`` on a CPU, ``vmap`` on a GPU. What clients remember lies in the
object store of the machine that computed it, one object for each client, and goes in and out of
calls by reference. So an actor that dies takes nothing with it: another one is put in its place,
its clients of the round are lost and remember what they did before the round. A machine that is
lost does take the memories stored there: the run ends and is resumed from its checkpoint. Where it
is this one's raylet or the cluster's head that is lost, Ray ends this process, from which the
command line is safe (:mod:`hyperfed.apps.guard`).

The number of actors changes no result. Each client is computed by ``cores_per_client`` cores, one
by default: with as many, the loop engine gives the same bits.
"""

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeAlias

from hyperfed.engines.calls import Call
from hyperfed.engines.cohort import CohortState, Engine, EngineCohort, Question
from hyperfed.engines.faults import Faults
from hyperfed.engines.masking import Masking
from hyperfed.engines.ray.actors import Outcome, Work, Worker
from hyperfed.engines.ray.cluster import Connection, connect
from hyperfed.engines.replies import NoAnswerError
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import EngineLostError, UserError
from hyperfed.federation import Client
from hyperfed.system.devices import CPU
from hyperfed.task import Task
from hyperfed.training import Precision
from hyperfed.trees import Tree
from hyperfed.trees.packing import pack, unpack

START_SECONDS = 120.0
"""How long actors may take to start: they wait for cores that others use.

Five times as long where they wait for nothing, as a busy machine is only slow.
"""

Ref: TypeAlias = Any
"""Ray's reference to an object of the store; None stands for an empty tree."""

Session: TypeAlias = tuple[str, str]
"""What tells one connection of this process to a cluster, and so references, from the next."""


class _StoredTree(dict[str, Any]):
    """A tree that was got from the object store, and knows where it is there, in which session.

    Its copies and pickles are plain trees, which need no session.
    """

    def __init__(self, tree: Tree, ref: Ref, session: Session) -> None:
        super().__init__(tree)
        self.ref, self.session = ref, session

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass
class _Memory:
    """A client's memory: where it is and, once it was got from there, what it is."""

    ref: Ref = None
    tree: Tree | None = None

    def __post_init__(self) -> None:
        if self.ref is None:
            self.tree = {}


@dataclass(frozen=True)
class _Draft:
    """Memory and scratch after a client's latest call in a cohort."""

    memory: _Memory
    scratch: Ref


@dataclass(frozen=True)
class _Drafts:
    """What the clients of a cohort wrote, {client: draft}, and whether they may be lost."""

    training: bool
    of: dict[int, _Draft] = field(default_factory=dict)


class RayEngine:
    """Runs the clients of a task on a cluster; see :class:`hyperfed.engines.cohort.Engine`.

    Args:
        task: data and target models.
        client: the method's Client.
        config: the method's settings, handed to each client.
        seed: the run's seed.
        workers: actors; by default as many as the cluster's cores and GPUs allow, but no more than
            there are clients.
        cores_per_client: threads of one client's arithmetic, and cores of an actor.
        precision: of that arithmetic.
        gpus_per_worker: GPUs of an actor; a fraction shares one among several.
        device: where an actor computes. The server is in this process, on the CPU.
        address: of a cluster that runs; see :func:`hyperfed.engines.ray.cluster.connect`.
        faults: what to inject into training rounds.
        private: how the answers of clients are made private.
        masking: how updates are summed, where the server is told nothing but sums.

    Raises:
        UserError: Ray is not installed, or there is no such cluster, or it has too few cores or
            GPUs.
    """

    name = "ray"
    home: Engine | None = None
    device = CPU

    def __init__(
        self,
        task: Task,
        client: type[Client],
        config: Any,
        *,
        seed: int,
        workers: int | None = None,
        cores_per_client: int | None = None,
        precision: Precision = "float32",
        gpus_per_worker: float = 0.0,
        device: str = "cpu",
        address: str | None = None,
        faults: Faults | None = None,
        private: PrivateUpdates | None = None,
        masking: Masking | None = None,
    ) -> None:
        self.task, self.client, self.config, self.seed = task, client, config, seed
        self.private, self.masking = private, masking
        self.faults = faults or Faults()
        self.cores_per_client, self.gpus_per_worker = cores_per_client or 1, gpus_per_worker
        self.precision, self._actors_device = precision, device
        self.waiting: list[Question] = []
        self.traffic: dict[str, int] = {}
        self.released: dict[int, Tree] = {}
        self._numbers = count()
        self._cohorts: dict[int, _Drafts] = {}
        self._kept: dict[int, _Memory] = {}
        self._actors: list[Any] = []
        self._work: Ref = None
        connection = connect(address)
        self._connection: Connection | None = connection
        self._ray = connection.ray
        context = self._ray.get_runtime_context()
        self._session: Session = context.get_node_id(), context.get_job_id()
        # Engines of one process take turns: on a cluster of their own none waits for the others.
        self._cpus = 0 if connection.started else self.cores_per_client
        self.workers = self._count_workers(workers)

    @property
    def memory(self) -> dict[int, Tree]:
        """What clients remember after the latest commit, {client: tree}.

        The tensors lie in the object store and are not to be written to. Assigning what was got
        here, or from another engine of the same connection, moves no data.
        """
        missing = [memory for memory in self._kept.values() if memory.tree is None]
        stored = self._get([memory.ref for memory in missing]) if missing else []
        for memory, packed in zip(missing, stored, strict=True):
            memory.tree = _StoredTree(unpack(packed), memory.ref, self._session)
        return {c: memory.tree for c, memory in self._kept.items() if memory.tree is not None}

    @memory.setter
    def memory(self, memory: dict[int, Tree]) -> None:
        self._kept = {
            client: _Memory(tree.ref, tree)
            if isinstance(tree, _StoredTree) and tree.session == self._session
            else _Memory(self._ray.put(pack(tree)) if tree else None)
            for client, tree in memory.items()
        }

    def cohort(self, ids: Sequence[int], round: int, *, training: bool) -> EngineCohort:
        """Returns the cohort of a round."""
        state = CohortState(next(self._numbers), round, training)
        self._cohorts[state.number] = _Drafts(training)
        weakref.finalize(state, self._cohorts.pop, state.number)
        return EngineCohort(self, ids, state)

    def commit(self, cohort: EngineCohort) -> None:
        """Keeps the memories of a round's clients that were not lost."""
        drafts = self._cohorts[cohort.state.number].of
        for client in cohort.there:
            if client in drafts:
                self._kept[client] = drafts[client].memory

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Runs calls, one message to each actor.

        A client whose actor dies does not answer. Outside training it is asked once more, at the
        new actor; if that one dies too, its death is what went wrong.
        """
        answers = self._ask(calls)
        died = {i: answer for i, answer in enumerate(answers) if isinstance(answer, self._deaths)}
        again = [i for i in died if not self._cohorts[calls[i].cohort].training]
        instead: dict[int, Tree | Exception] = {
            i: _unanswered(death) for i, death in died.items() if i not in again
        }
        instead |= zip(again, self._ask([calls[i] for i in again]), strict=True)
        return [instead.get(i, answer) for i, answer in enumerate(answers)]

    def saved(self, *memories: Mapping[int, Tree]) -> None:
        """Does nothing: an object of the store stays as long as somebody refers to it."""

    def resources(self, clients: int) -> dict[str, Any]:
        """Returns the actors, their cores and those that compute one client."""
        found: dict[str, Any] = {
            "workers": self.workers,
            "cores": self.workers * self.cores_per_client,
            "cores_per_client": self.cores_per_client,
        }
        if self.gpus_per_worker:
            found |= {"device": self._actors_device, "gpus_per_worker": self.gpus_per_worker}
        return found

    def close(self) -> None:
        """Ends the actors and, where it was made for engines, the last one's connection."""
        if self._ray.is_initialized():
            self._dismiss()
        self._kept, self._connection = {}, None

    def _get(self, stored: Any) -> Any:
        """Returns what lies in the object store.

        Raises:
            EngineLostError: the machine where it lay is lost.
        """
        try:
            return self._ray.get(stored)
        except self._ray.exceptions.ObjectLostError as error:
            raise EngineLostError(
                "a machine of the Ray cluster was lost, and what clients remembered with it"
            ) from error

    # Actors.

    @property
    def _deaths(self) -> tuple[type[Exception], ...]:
        """What Ray raises where an actor died or is out of reach."""
        errors = self._ray.exceptions
        return errors.RayActorError, errors.OutOfMemoryError, errors.NodeDiedError

    def _count_workers(self, wanted: int | None) -> int:
        """Returns the number of actors for which the cluster has cores and GPUs."""
        there = {unit: self._ray.cluster_resources().get(unit, 0.0) for unit in ("CPU", "GPU")}
        each = {"CPU": self._cpus, "GPU": self.gpus_per_worker}
        if wanted is None:
            usual = each | {"CPU": self.cores_per_client}
            wanted = max(1, min(*_places(there, usual), self.task.clients))
        if any(wanted > places for places in _places(there, each)):
            has, needs = (
                " and ".join(f"{value:g} {unit}" for unit, value in units.items())
                for units in (there, each)
            )
            raise UserError(
                f"the Ray cluster must have {needs} for each of {wanted} engine.workers, but has "
                f"{has}; lower engine.workers, engine.cores_per_client or engine.gpus_per_worker"
            )
        return wanted

    def _start(self) -> None:
        """Starts the actors, when they are first needed, and waits for them."""
        work = Work.of(
            self.task,
            self.client,
            self.config,
            seed=self.seed,
            cores=self.cores_per_client,
            precision=self.precision,
            device=self._actors_device,
            private=self.private,
        )
        self._work = self._ray.put(work)
        self._actors = [self._hire() for _ in range(self.workers)]
        waits = bool(self._cpus or self.gpus_per_worker)
        limit = START_SECONDS if waits else 5 * START_SECONDS
        try:
            ready = [actor.ready.remote() for actor in self._actors]
            self._ray.get(ready, timeout=limit)
        except self._ray.exceptions.GetTimeoutError as error:
            self._dismiss()
            each, why = "", "this machine is busy; wait for what else it does"
            if waits:
                each = f" of {self._cpus} CPU and {self.gpus_per_worker:g} GPU"
                why = "others use it, or another run of this process; wait for them"
            raise UserError(
                f"the Ray cluster must start {self.workers} actors{each} within {limit:g} s, but "
                f"did not: {why}, or lower engine.workers"
            ) from error
        except BaseException:
            self._dismiss()
            raise

    def _hire(self) -> Any:
        """Starts an actor."""
        remote = self._ray.remote(Worker)
        options = remote.options(num_cpus=self._cpus, num_gpus=self.gpus_per_worker)
        return options.remote(sys.path, [self._work])

    def _dismiss(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors, self._work = [], None

    def _ask(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Sends each actor its calls; returns answers in the order of ``calls``."""
        if calls and not self._actors:
            self._start()
        shards: dict[int, list[int]] = {}
        for position, call in enumerate(calls):
            shards.setdefault(call.client % self.workers, []).append(position)
        calls = [replace(call, released=self.released.get(call.client, {})) for call in calls]
        sent = _packed(calls)
        returns = {
            index: self._send(index, [sent[p] for p in positions])
            for index, positions in shards.items()
        }
        answers: dict[int, Tree | Exception] = {}
        for index, positions in shards.items():
            asked = [calls[p] for p in positions]
            answers |= zip(positions, self._receive(index, asked, returns[index]), strict=True)
        return [answers[position] for position in range(len(calls))]

    def _send(self, index: int, calls: Sequence[Call]) -> list[Ref]:
        """Sends an actor calls; returns references to what :meth:`Worker.answer` returns."""
        known = [self._known(call) for call in calls]
        refs = [ref for draft in known for ref in (draft.memory.ref, draft.scratch)]
        method = self._actors[index].answer.options(num_returns=1 + len(refs))
        returned: list[Ref] = method.remote(calls, *refs)
        return returned

    def _receive(
        self, index: int, calls: Sequence[Call], returned: Sequence[Ref]
    ) -> list[Tree | Exception]:
        """Returns what an actor's clients answered, and notes what they remember."""
        try:
            outcomes: list[Outcome] = self._get(returned[0])
        except self._deaths as death:
            self._ray.kill(self._actors[index])  # it may only be out of reach, and keep its cores
            self._actors[index] = self._hire()
            return [death] * len(calls)
        answers: list[Tree | Exception] = []
        written = zip(returned[1::2], returned[2::2], strict=True)
        for call, outcome, (memory, scratch) in zip(calls, outcomes, written, strict=True):
            if isinstance(outcome.reply, Exception):
                answers.append(outcome.reply)
                continue
            if outcome.released:
                self.released[call.client] = outcome.released
            before = self._known(call)
            self._cohorts[call.cohort].of[call.client] = _Draft(
                _Memory(memory) if outcome.wrote_memory else before.memory,
                scratch if outcome.wrote_scratch else before.scratch,
            )
            answers.append(unpack(outcome.reply))
        return answers

    # Memories.

    def _known(self, call: Call) -> "_Draft":
        """Returns where memory and scratch are with which a call begins."""
        draft = self._cohorts[call.cohort].of.get(call.client)
        if draft is not None:
            return draft
        return _Draft(self._kept.get(call.client, _Memory()), None)


def _places(there: Mapping[str, float], each: Mapping[str, float]) -> list[int]:
    """Returns for how many actors there is enough of each unit that they take some of."""
    return [
        int(there[unit] / share) if share >= 1 else int(there[unit]) * int(1 / share)  # of one GPU
        for unit, share in each.items()
        if share
    ]


def _packed(calls: Sequence[Call]) -> list[Call]:
    """Returns calls whose payloads can travel; what goes to all alike is packed once."""
    packed: dict[int, Tree] = {}
    for tree in (tree for call in calls for tree in call.payload):
        if id(tree) not in packed:
            packed[id(tree)] = pack(tree)
    return [
        replace(call, payload=tuple(packed[id(tree)] for tree in call.payload)) for call in calls
    ]


def _unanswered(death: Exception) -> NoAnswerError:
    """Returns that a client's actor died."""
    unanswered = NoAnswerError("did not answer: its actor died")
    unanswered.__cause__ = death
    return unanswered

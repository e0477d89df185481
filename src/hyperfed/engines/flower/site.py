"""A site: it has the data of its clients, runs what they are asked and keeps what they remember.

Nothing of it stays in memory between two messages, so each may be answered by a new process.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hyperfed import trees
from hyperfed.data.examples import Normalize, fingerprint_of_frozen, hash_of_rows
from hyperfed.data.roster import Frame, Introduction, Member
from hyperfed.engines.calls import Answer, Call
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.diary import REFUSED, Diary
from hyperfed.engines.flower.gate import Admitted, Gate
from hyperfed.engines.flower.pairwise import STEPS, is_exchange
from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.engines.flower.releases import KeptReleases
from hyperfed.engines.flower.store import Draft, Store, make_private, place_of_model
from hyperfed.engines.flower.wire import Request, Response, Version
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import best_engine
from hyperfed.engines.masking import Masking
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError, one_line
from hyperfed.federation import PERSONAL, Client
from hyperfed.system.devices import CPU
from hyperfed.system.locks import alone
from hyperfed.task import Task
from hyperfed.training import Precision
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state


@dataclass(frozen=True)
class Answered:
    """What a call came to.

    Attributes:
        reply: what is answered, or what was raised.
        remembers: whether its client has a memory after it (:class:`Answer`).
        behind: how many examples are behind the reply, where a policy asks.
    """

    reply: Tree | Exception
    remembers: bool = False
    behind: int = 0


class Source(Protocol):
    """Where a site's data come from."""

    def introduce(self) -> Introduction:
        """Returns what the server may know of the data."""

    def check_client(self, number: int, name: str) -> None:
        """Raises ``UserError`` for a client that is not at this site.

        One that has left it since it introduced itself may still be called.
        """

    def task(self, frame: Frame, names: Mapping[int, str]) -> Task:
        """Returns a task in which the clients that are called have their data, if they are here.

        Args:
            frame: what the site must know of the whole.
            names: number -> name of each client that is called.

        Raises:
            UserError: the data are not those of such a frame.
        """


@dataclass(frozen=True)
class Shard:
    """Some clients of a task, as if they were at a site of their own: for trials and tests.

    Attributes:
        whole: the task.
        clients: numbers of those here.
    """

    whole: Task
    clients: Sequence[int]

    def introduce(self) -> Introduction:
        """Returns what the server may know; a name is a number with leading zeros."""
        task = self.whole
        normal = task.transform if isinstance(task.transform, Normalize) else Normalize((), ())
        sized = len(task.models) > 1
        members = tuple(
            Member(
                _name(client),
                len(task.train[client]),
                len(task.val[client]),
                len(task.test[client]),
                task.size_of(client) if sized else "",
                client in task.novel_ids,
            )
            for client in self.clients
        )
        return Introduction(
            members=members,
            shape=tuple(task.x.shape[1:]),
            dtype=str(task.x.dtype),
            classes=task.classes,
            target_size=task.target_size,
            pixels=sum(member.examples for member in members),
            mean=normal.mean,
            std=normal.std,
            fingerprint=task.fingerprint,
        )

    def check_client(self, number: int, name: str) -> None:
        """Raises ``UserError`` for a client that is not at this site."""
        if number not in self.clients or name != _name(number):
            raise UserError(
                f"client {number} ({name}) must be one of this site's, which has "
                f"{', '.join(map(_name, self.clients))}; let the nodes have all clients of the "
                "task, each once"
            )

    def task(self, frame: Frame, names: Mapping[int, str]) -> Task:
        """Returns the whole task."""
        return self.whole


def _name(client: int) -> str:
    return f"{client:06d}"


class Site:
    """Answers requests for the clients of a site.

    Args:
        source: the data.
        state: folder for what clients remember.
        client: the method's Client.
        config: the method's settings.
        seed: the run's seed.
        workers: clients at once; by default as many as keep all cores busy to the end.
        cores_per_client: threads of one client's arithmetic.
        precision: of that.
        device: where the site computes.
        method: name of the method.
        policy: what the site lets a server do; None for all, as in a trial.
        private: how its clients' answers are made private, by the run's settings; how much noise
            that takes, a request says.
        masking: how updates are summed, by the run's settings, where the server is told no other.
        metrics: what clients count for beside the task's own metric.
        write: writes a client's model for its owner, with the task's normalisation, to a file; None
            where nobody wants it, as in a trial.
    """

    def __init__(
        self,
        source: Source,
        state: Path,
        client: type[Client],
        config: Any,
        *,
        seed: int,
        workers: int | None = None,
        cores_per_client: int | None = None,
        precision: Precision = "float32",
        device: torch.device = CPU,
        method: str = "",
        policy: Policy | None = None,
        private: PrivateUpdates | None = None,
        masking: Masking | None = None,
        metrics: Sequence[str] = (),
        write: Callable[[nn.Module, Task, Path], None] | None = None,
    ) -> None:
        self.source, self.state = source, state
        self._name = method or client.__module__
        known = is_dataclass(config) and not isinstance(config, type)
        self._settings = asdict(config) if known else {}
        self._policy, self._masking, self._metrics = policy, masking, tuple(metrics)
        self._config, self._seed = config, seed
        self._workers, self._cores = workers, cores_per_client
        self._precision, self._device, self._write = precision, device, write
        self._gate = Gate(
            client,
            config,
            state,
            seed=seed,
            method=method,
            policy=policy,
            private=private,
            masking=masking,
            metrics=self._metrics,
        )

    def handle(self, content: bytes) -> bytes:
        """Answers a request as it came over the network.

        Raises:
            UserError: it is no request.
        """
        if self._policy is not None:
            self._policy.check_size(len(content))
        request = wire.unpack_request(content)
        return wire.pack_response(self.answer(request))

    def answer(self, request: Request) -> Response:
        """Runs the calls of a request, but none that has been answered before."""
        try:
            self._gate.check_run()  # before anything of the message is kept
            task = self._with_frozen(request, self.source.task(request.frame, request.names))
            task = replace(task, metrics=self._metrics)
            store = Store(self.state, request.run)
            released = KeptReleases(self.state)
            _check_distinct(request)
            with store.alone(), released.alone():
                store.receive(request.session, request.serial)
                store.keep_to(self._name, _outlines(task), self._settings)
                return self._answer(request, task, store, released)
        except Exception as error:  # concerns all that this message called, and nobody else
            everyone = dict.fromkeys(range(len(request.calls)), Answered(error))
            self._note(request, everyone)
            return Response(request.session, request.serial, self._told(everyone))

    def _note(self, request: Request, answers: Mapping[int, Answered]) -> None:
        """Writes into the audit log what is about to be answered."""
        if self._policy is None:
            return
        make_private(self.state)
        diary = Diary(self.state, self._policy)
        for place, call in enumerate(request.calls):
            reply, decision = answers[place].reply, "answered"
            if isinstance(reply, Exception):
                kind = REFUSED if isinstance(reply, RefusedError) else type(reply).__name__
                decision = one_line(f"{kind}: {reply}")
            diary.note(
                run=request.run,
                session=request.session,
                message=request.serial,
                round=call.round,
                client=one_line(request.names[call.client]),
                step=one_line(call.step),
                bytes_in=sum(trees.count_bytes(tree) for tree in call.payload),
                bytes_out=0 if isinstance(reply, Exception) else trees.count_bytes(reply),
                examples=answers[place].behind,
                decision=decision,
            )

    def _told(self, answers: Mapping[int, Answered]) -> dict[int, Tree | Exception]:
        return {place: self._gate.told(answer.reply) for place, answer in answers.items()}

    def _with_frozen(self, request: Request, task: Task) -> Task:
        """Returns the task with what is frozen in the run's targets.

        It comes with the first message of a session, and is kept by its hash.

        Raises:
            UserError: it is not there.
        """
        if fingerprint_of_frozen(task.models) == request.frozen:
            return task
        path, weights = self.state / f"frozen-{request.frozen}.safetensors", request.weights
        if not weights and not path.exists():
            raise UserError(f"what is frozen in the targets must be in {path}, but is not")
        models = {size: copy.deepcopy(model) for size, model in task.models.items()}
        for size, values in (weights or load_state(path)[0]).items():
            trees.fill_frozen(models[size], values)
        if fingerprint_of_frozen(models) != request.frozen:
            raise UserError("what is frozen in the targets must have the hash that came with it")
        if weights:
            make_private(self.state)
            with alone(self.state):
                save_state(path, weights, {})
        return replace(task, models=models)

    def _answer(
        self, request: Request, task: Task, store: Store, released: KeptReleases
    ) -> Response:
        """Runs those calls that are admitted, and answers all."""
        answers: dict[int, Answered] = {}
        to_run: dict[int, Admitted] = {}
        with closing(self._engine(request, task)) as engine:
            for place, call in enumerate(request.calls):
                try:
                    found = self._find(request, call, task, store)
                    if isinstance(found, Admitted):
                        let_out = released.read(request.names[call.client])
                        engine.released.setdefault(call.client, let_out)
                        engine.memories.note(found.call, found.begin)
                        to_run[place] = found
                    else:
                        answers[place] = found
                except Exception as error:
                    answers[place] = Answered(error)
            answers |= self._run(request, to_run, engine, store, released)
        for client, name in request.names.items():
            store.prune(name, _needed(request, client))
        self._note(request, answers)
        spent = {
            place: released.multipliers(request.names[call.client])
            for place, call in enumerate(request.calls)
        }
        return Response(
            request.session,
            request.serial,
            self._told(answers),
            frozenset(place for place, answer in answers.items() if answer.remembers),
            {place: told for place, told in spent.items() if told},
        )

    def _engine(self, request: Request, task: Task) -> LoopEngine:
        return best_engine(self._device)(
            task,
            self._gate.client,
            self._config,
            seed=self._seed,
            workers=self._workers,
            cores_per_client=self._cores,
            precision=self._precision,
            device=self._device,
            secret=True,
            limits=self._gate.limits,
            private=self._gate.with_noise(request),
        )

    def _find(self, request: Request, call: Call, task: Task, store: Store) -> Answered | Admitted:
        """Returns the answer to a call that needs no engine, or the call as one may run it."""
        name, version = request.names[call.client], (request.session, call.cohort)
        self.source.check_client(call.client, name)
        draft = store.draft(name, version)
        if draft is not None and draft.serial == request.serial:
            return Answered(draft.reply, remembers=draft.remembers)
        store.keep_to_data(name, _hash_of_examples(task, call.client))
        begin = _beginning(request, call, name, store, draft)
        masks = {} if draft is None else draft.masks
        if is_exchange(call) and self._masking is not None:
            smallest = self._gate.smallest_sum
            told, masks = STEPS[call.step](masks, *call.payload, smallest=smallest)
            kept = Draft(request.serial, begin.memory, begin.scratch, told, masks, begin.remembers)
            store.write(name, version, kept, lasting=True)
            return Answered(told, remembers=begin.remembers)
        return self._gate.admit(call, name, task, begin, masks)

    def _run(
        self,
        request: Request,
        to_run: Mapping[int, Admitted],
        engine: LoopEngine,
        store: Store,
        released: KeptReleases,
    ) -> dict[int, Answered]:
        """Runs calls, and keeps what came of them on the disk before it leaves."""
        before = dict(engine.released)
        replies = engine.answer([admitted.call for admitted in to_run.values()])
        for client, name in request.names.items():
            if client in before and engine.released[client] is not before[client]:
                released.write(name, engine.released[client])
        answers = {}
        for (place, admitted), came in zip(to_run.items(), replies, strict=True):
            call = admitted.call
            memory, scratch = engine.memories.of(call)
            remembers = engine.memories.remembers(call)
            reply, masks = self._gate.leaving(came, admitted, engine.task)
            if PERSONAL in scratch:
                scratch, reply = self._kept(request, call, engine.task, scratch)
            if not isinstance(reply, Exception):
                draft = Draft(request.serial, memory, scratch, reply, masks, remembers)
                version = (request.session, call.cohort)
                lasting = admitted.covered is not None
                store.write(request.names[call.client], version, draft, lasting=lasting)
            answers[place] = Answered(reply, remembers, admitted.behind)
        return answers

    def _kept(
        self, request: Request, call: Call, task: Task, scratch: Tree
    ) -> tuple[Tree, Tree | Exception]:
        """Writes a client's model for its owner; returns what else it noted, and its reply."""
        model, others = scratch[PERSONAL], {k: v for k, v in scratch.items() if k != PERSONAL}
        if self._write is None:
            return others, {}
        module = copy.deepcopy(task.models[task.size_of(call.client)])
        try:
            path = place_of_model(self.state, request.run, request.names[call.client])
            self._write(trees.fill(module, model), task, path)
        except Exception as error:
            return others, error
        return others, {}


def _check_distinct(request: Request) -> None:
    """Finds out whether each client is called by one number, and once in a cohort.

    What it lets out is counted by name, one call after the other.

    Raises:
        UserError: it is not.
    """
    called = [(call.cohort, call.client) for call in request.calls]
    if len({*request.names.values()}) < len(request.names) or len({*called}) < len(called):
        raise UserError("a client must be called by one number, and once in a cohort")


def _outlines(task: Task) -> dict[str, list[tuple[str, list[int]]]]:
    """Returns of each target the names and shapes of its entries, in order."""
    return {
        size: [(name, [*entry.shape]) for name, entry in trees.model_of(model).items()]
        for size, model in task.models.items()
    }


def _hash_of_examples(task: Task, client: int) -> str:
    """Returns a hash of a client's examples in their order, and of what each is for."""
    parts = (task.train[client], task.val[client], task.test[client])
    return hash_of_rows(*((values, rows) for rows in parts for values in (task.x, task.y)))


def _beginning(
    request: Request, call: Call, name: str, store: Store, draft: Draft | None
) -> Answer:
    """Returns the memory and the scratch with which a call begins."""
    if draft is not None:
        return Answer({}, draft.memory, draft.scratch, remembers=draft.remembers)
    version = request.begin.get(call.client)
    return Answer({}, store.memory(name, version), {}, remembers=version is not None)


def _needed(request: Request, client: int) -> set[Version]:
    opened = [(request.session, cohort) for cohort in request.open]
    begin = [request.begin[client]] if client in request.begin else []
    return {*opened, *request.keep.get(client, ()), *begin}

"""A site: it has the data of its clients, runs what they are asked and keeps what they remember.

Nothing of it stays in memory between two messages, so each may be answered by a new process.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from hyperfed import trees
from hyperfed.data.examples import Normalize, fingerprint_of_frozen, hash_of
from hyperfed.data.roster import Frame, Introduction, Member
from hyperfed.engines.calls import Answer, Call, find_step, promised
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.diary import Diary
from hyperfed.engines.flower.pairwise import STEPS, cover, is_exchange
from hyperfed.engines.flower.policy import COUNTING, Policy, RefusedError, guarded, is_evaluation
from hyperfed.engines.flower.releases import KeptReleases
from hyperfed.engines.flower.store import (
    Draft,
    LostMemoryError,
    Store,
    SupersededError,
    make_private,
)
from hyperfed.engines.flower.wire import Request, Response, SiteError, Version
from hyperfed.engines.local.vmap import best_engine
from hyperfed.engines.masking import SMALLEST, Masking
from hyperfed.engines.replies import BadReplyError, DivergedError
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError, one_line
from hyperfed.federation import Client
from hyperfed.system.devices import CPU
from hyperfed.system.locks import alone
from hyperfed.task import Task
from hyperfed.training import Precision, UnlabelledError
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state, save_state

OURS = (UserError, UnlabelledError, BadReplyError, DivergedError, LostMemoryError, SupersededError)
"""Errors whose words are all our own."""

Cover: TypeAlias = Callable[[Tree], tuple[Tree, Tree]]
"""Returns the masked part that a reply makes, and what the site is to know of its masks."""


class Source(Protocol):
    """Where a site's data come from."""

    def introduce(self) -> Introduction:
        """Returns what the server may know of the data."""

    def task(self, frame: Frame, names: Mapping[int, str]) -> Task:
        """Returns a task in which the clients that are called have their data.

        Args:
            frame: what the site must know of the whole.
            names: number -> name of each client that is called.

        Raises:
            UserError: one of them is not at this site.
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
            pixels=sum(member.examples for member in members),
            mean=normal.mean,
            std=normal.std,
            fingerprint=task.fingerprint,
        )

    def task(self, frame: Frame, names: Mapping[int, str]) -> Task:
        """Returns the whole task."""
        for client, name in names.items():
            if client not in self.clients or name != _name(client):
                raise UserError(
                    f"client {client} ({name}) must be one of this site's, which has "
                    f"{', '.join(map(_name, self.clients))}; let the nodes have all clients of the "
                    "task, each once"
                )
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
    ) -> None:
        self.source, self.state = source, state
        self._method, self._policy, self._private = method, policy, private
        self._name = method or client.__module__
        known = is_dataclass(config) and not isinstance(config, type)
        self._settings = asdict(config) if known else {}
        self._masking, self._metrics = masking, tuple(metrics)
        self._smallest = SMALLEST if policy is None else policy.smallest_sum
        self._client = client if policy is None else guarded(client, policy)
        self._config, self._seed = config, seed
        self._workers, self._cores = workers, cores_per_client
        self._precision, self._device = precision, device

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
            if self._policy is not None:  # before anything of the message is kept
                self._policy.check_run(
                    self._method, self._config, self._private, self._metrics, self._masking
                )
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
            everyone = dict.fromkeys(range(len(request.calls)), error)
            self._note(request, everyone, {})
            return Response(request.session, request.serial, self._told(everyone))

    def _note(
        self,
        request: Request,
        answers: Mapping[int, Tree | Exception],
        behind: Mapping[int, int],
    ) -> None:
        """Writes into the audit log what is about to be answered."""
        if self._policy is None:
            return
        make_private(self.state)
        diary = Diary(self.state, self._policy)
        for place, call in enumerate(request.calls):
            answer, decision = answers[place], "answered"
            if isinstance(answer, Exception):
                kind = "refused" if isinstance(answer, RefusedError) else type(answer).__name__
                decision = one_line(f"{kind}: {answer}")
            diary.note(
                run=request.run,
                session=request.session,
                message=request.serial,
                round=call.round,
                client=one_line(request.names[call.client]),
                step=one_line(call.step),
                bytes_in=sum(trees.count_bytes(tree) for tree in call.payload),
                bytes_out=0 if isinstance(answer, Exception) else trees.count_bytes(answer),
                examples=behind.get(place, 0),
                decision=decision,
            )

    def _told(self, answers: Mapping[int, Tree | Exception]) -> Mapping[int, Tree | Exception]:
        """Returns answers as they may leave: of errors that are not in our words the kind alone.

        Theirs may quote an example, as PyTorch's of a label for which a model has no output.
        """
        if self._policy is None:
            return answers
        return {
            place: SiteError(f"{type(answer).__name__}: its site's audit log says more")
            if isinstance(answer, Exception) and not isinstance(answer, OURS)
            else answer
            for place, answer in answers.items()
        }

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
        engine = best_engine(self._device)(
            task,
            self._client,
            self._config,
            seed=self._seed,
            workers=self._workers,
            cores_per_client=self._cores,
            precision=self._precision,
            device=self._device,
            secret=True,
            limits=() if self._policy is None else self._policy.limits,
            private=self._with_noise(request),
        )
        answers: dict[int, Tree | Exception] = {}
        remembers: set[int] = set()
        behind: dict[int, int] = {}
        to_run: dict[int, Call] = {}
        covering: dict[int, Cover] = {}
        for place, call in enumerate(request.calls):
            name, version = request.names[call.client], (request.session, call.cohort)
            try:
                draft = store.draft(name, version)
                if draft is not None and draft.serial == request.serial:
                    answers[place] = draft.reply
                    remembers |= {place} if draft.memory else set()
                    continue
                store.keep_to_data(name, _hash_of_examples(task, call.client))
                begin = Answer({}, *_beginning(request, call, name, store, draft))
                masks = draft.masks if draft is not None else {}
                if is_exchange(call) and self._masking is not None:
                    told, masks = STEPS[call.step](masks, *call.payload, smallest=self._smallest)
                    kept = Draft(request.serial, begin.memory, begin.scratch, told, masks)
                    store.write(name, version, kept, lasting=True)
                    answers[place] = told
                    remembers |= {place} if begin.memory else set()
                    continue
                plain = call
                if call.masked:
                    plain, covering[place] = self._covering(call, masks, task)
                self._check_private(plain, task)
                behind[place] = self._allowed(plain, name, task, begin.scratch)
                engine.released.setdefault(call.client, released.read(name))
            except Exception as error:
                answers[place] = error
                continue
            engine.memories.note(plain, begin)
            to_run[place] = plain
        let_out = dict(engine.released)
        try:
            replies = engine.answer(list(to_run.values()))
        finally:
            engine.close()
        for client, name in request.names.items():
            if client in let_out and engine.released[client] is not let_out[client]:
                released.write(name, engine.released[client])  # before it leaves
        for (place, call), came in zip(to_run.items(), replies, strict=True):
            memory, scratch = engine.memories.of(call)
            reply, masks = self._leaving(came, call, covering.get(place))
            answers[place] = reply
            if not isinstance(reply, Exception):
                name, version = request.names[call.client], (request.session, call.cohort)
                draft = Draft(request.serial, memory, scratch, reply, masks)
                store.write(name, version, draft, lasting=place in covering)
            remembers |= {place} if memory else set()
        for client, name in request.names.items():
            opened = [(request.session, cohort) for cohort in request.open]
            store.prune(name, _needed(request, client, opened))
        self._note(request, answers, behind)
        spent = {
            place: released.multipliers(request.names[call.client])
            for place, call in enumerate(request.calls)
        }
        spent = {place: told for place, told in spent.items() if told}
        leaving = self._told(answers)
        return Response(request.session, request.serial, leaving, frozenset(remembers), spent)

    def _covering(self, call: Call, masks: Tree, task: Task) -> tuple[Call, Cover]:
        """Returns a masked call as its client runs it, and what makes of its reply what leaves.

        Raises:
            RefusedError: the reply would be no update.
        """
        masking, told = self._masking, call.payload[-1]
        plain = replace(call, payload=call.payload[:-1], masked=False)
        step, info = find_step(self._client, call.step)
        like = promised(step, info, plain)
        if masking is None or like is None:
            raise RefusedError(f"the reply to {call.step} is not to be masked in this run")
        weight = len(task.train[call.client]) if self._private is None else 1

        def covered(reply: Tree) -> tuple[Tree, Tree]:
            part = masking.part(reply, like, info, weight)
            return cover(masks, part, told, smallest=self._smallest)

        return plain, covered

    def _leaving(
        self, reply: Tree | Exception, call: Call, covered: Cover | None
    ) -> tuple[Tree | Exception, Tree]:
        """Returns a reply as it may leave the site, and what is to be known of its masks."""
        if isinstance(reply, Exception):
            return reply, {}
        if covered is not None:
            try:
                return covered(reply)
            except Exception as error:
                return error, {}
        if self._masking is not None and reply and call.step not in COUNTING:
            return RefusedError(f"the reply to {call.step} must be masked in this run"), {}
        return reply, {}

    def _allowed(self, call: Call, name: str, task: Task, scratch: Tree) -> int:
        """Returns the number of examples behind the reply to a call that the policy allows.

        Raises:
            RefusedError: it does not.
        """
        if self._policy is None:
            return 0
        found = self._policy.check_call(
            call, self._client, self._config, task, seed=self._seed, scratch=scratch
        )
        if is_evaluation(call, self._client):
            Diary(self.state, self._policy).evaluate(name)
        return found

    def _with_noise(self, request: Request) -> PrivateUpdates | None:
        """Returns how answers are made private, with as much noise as a request says.

        Where the policy has a limit for all runs, the run's epsilon is for the run alone: both are
        known to be spent from the site's disk.

        Raises:
            UserError: it says none, though there must be some.
        """
        private = self._private
        if private is None or private.where == "central":
            return private
        if request.multiplier is None:
            raise UserError(
                "a request must say how much noise answers are to have, but this does not"
            )
        run = 0 if self._policy is None else request.run
        return replace(private, multiplier=request.multiplier, run=run)

    def _check_private(self, call: Call, task: Task) -> None:
        """Finds out whether the answer to a call lets out no more than it may.

        Raises:
            UserError: the client's answers are to have noise, and this one would have none.
        """
        private = getattr(self._config, "mechanism", None) is not None
        if private and call.client in task.novel_ids and call.step not in COUNTING:
            _, info = find_step(self._client, call.step)
            if not info.private:
                raise UserError(
                    "a client whose answers are private must be asked for no other, but was asked "
                    f"to {call.step}; leave it out, or make it no novel one"
                )


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
    return hash_of(*(values[rows] for rows in parts for values in (task.x, task.y)))


def _beginning(
    request: Request, call: Call, name: str, store: Store, draft: Draft | None
) -> tuple[Tree, Tree]:
    """Returns memory and scratch with which a call begins."""
    if draft is not None:
        return draft.memory, draft.scratch
    return store.memory(name, None if call.fresh else request.begin.get(call.client)), {}


def _needed(request: Request, client: int, opened: Sequence[Version]) -> set[Version]:
    begin = [request.begin[client]] if client in request.begin else []
    return {*opened, *request.keep.get(client, ()), *begin}

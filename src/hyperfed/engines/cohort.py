"""What all engines share: the clients of a round, asked, counted, lost and stacked.

An engine only has to answer calls. Everything that a server may rely on is decided here: what each
client is sent and when, which replies count, what travelled, who is lost.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines.bounds import too_large
from hyperfed.engines.calls import Call, find_step, name_of, promised
from hyperfed.engines.faults import Faults
from hyperfed.engines.masking import Masking
from hyperfed.engines.replies import (
    BadReplyError,
    DivergedError,
    NoAnswerError,
    Reply,
    checked,
    expected_structure,
    impossible,
    refusal,
)
from hyperfed.engines.updates import PrivateUpdates, bounded, centre_of, is_covered
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Client, Each, StepInfo
from hyperfed.task import Task
from hyperfed.training import Batches
from hyperfed.trees import Tree
from hyperfed.trees.aggregation import MEAN


class Engine(Protocol):
    """Who runs the clients of a task: what a run, an evaluation and a cohort need to know."""

    @property
    def name(self) -> str:
        """How the records call it."""

    @property
    def task(self) -> Task:
        """Who the clients are; those who run them have the data."""

    @property
    def client(self) -> type[Client]:
        """The method's Client."""

    @property
    def device(self) -> torch.device:
        """Where the server is, and so what it reads of a cohort."""

    @property
    def seed(self) -> int:
        """Of every draw."""

    @property
    def faults(self) -> Faults:
        """What to inject into training rounds."""

    @property
    def home(self) -> "Engine | None":
        """The engine of the task that the method was trained on, where this one's is a newcomer's.

        It has the known clients.
        """

    @property
    def memory(self) -> dict[int, Tree]:
        """What clients remember after the latest commit, {client: tree}; what a checkpoint holds.

        An engine whose clients keep their memories elsewhere may give references to them, tensors
        too. Assigning brings back what it gave before.
        """

    @memory.setter
    def memory(self, memory: dict[int, Tree]) -> None: ...

    @property
    def released(self) -> dict[int, Tree]:
        """What clients have let out with noise, {client: as of :class:`hyperfed.privacy.Releases`}.

        It only grows: no round that is taken back, and no earlier memory, changes it. Assigned by a
        run that goes on, and to another engine of the same clients.
        """

    @released.setter
    def released(self, released: dict[int, Tree]) -> None: ...

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes of all messages to sites and back, {"down": ..., "up": ...}; {} where none travel.

        A run that goes on writes to it what was sent before.
        """

    @property
    def private(self) -> PrivateUpdates | None:
        """How the answers of clients are made private; None where they are not."""

    @property
    def masking(self) -> Masking | None:
        """How updates are summed, where a server that trains is told nothing but sums."""

    @property
    def waiting(self) -> "list[Question]":
        """What was posted and travels with the next message; its cohorts fill and empty it."""

    def cohort(self, ids: Sequence[int], round: int, *, training: bool) -> "EngineCohort":
        """Returns the cohort of a round.

        Args:
            ids: the clients.
            round: the round's number; draws depend on it.
            training: whether clients may be lost; if not, what a client raises is raised.
        """

    def commit(self, cohort: "EngineCohort") -> None:
        """Keeps the memories of a round's clients that were not lost."""

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Runs calls in one exchange; returns replies in their order.

        The calls of one cohort come one after another, each of another client. Where something was
        posted there are two cohorts, and a client may be in both: what it replies to either must
        not depend on the other being there.

        What goes wrong at a client is returned, as the exception it raised or, where none came
        in time, a ``NoAnswerError``: it may lose this client and no other.
        """

    def saved(self, *memories: Mapping[int, Tree]) -> None:
        """Is told of a new checkpoint, and of the memories in it.

        A memory that neither it nor the checkpoint before refers to, nor anybody who still holds
        what :attr:`memory` gave, may be dropped.
        """

    def resources(self, clients: int) -> dict[str, Any]:
        """Returns what computes a cohort of so many clients, plain data for the records."""

    def close(self) -> None:
        """Gives back threads, processes and connections. The engine may not be asked again."""


@dataclass(frozen=True)
class Exchange:
    """Bytes of one message to one client and of its reply (0 where none came)."""

    step: str
    client: int
    down: int
    up: int


@dataclass
class CohortState:
    """What the views of one cohort (all of it, or one target size) share.

    Attributes:
        number: of the cohort, unique in its engine.
        round: the round's number.
        training: whether clients may be lost.
        remote: clients are at sites, so that whatever goes wrong at one loses it, at any time.
        reply_bound: what a reply may be times as large as the others'; None for any size.
        turns: how often each (client, step) was asked.
        lost: {client: why}.
        causes: what lost clients raised.
        posted: clients that were posted a step.
        late: (client, why) of each that did not answer what it was posted.
        exchanges: every message so far, those with known clients too.
        known: the cohort of all known clients, once it was asked for.
    """

    number: int
    round: int
    training: bool
    remote: bool = False
    reply_bound: float | None = None
    turns: Counter[tuple[int, str]] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)
    causes: list[Exception] = field(default_factory=list)
    posted: set[int] = field(default_factory=set)
    late: list[tuple[int, str]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    known: "EngineCohort | None" = None


@dataclass
class Question:
    """A step asked of a cohort's clients; what was posted is read here, a ``Pending``.

    Attributes:
        cohort: whose clients.
        info: what the step's mark says.
        calls: {position in the cohort: call} of the clients that are there.
        reached: those whose client no injected fault keeps from answering.
        posted: whether the replies can wait.
        accepted: {position: reply} of those that can be used; None before it has travelled.
    """

    cohort: "EngineCohort"
    info: StepInfo
    calls: Mapping[int, Call]
    reached: Mapping[int, Call]
    posted: bool
    accepted: Mapping[int, Tree] | None = None

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client that did not answer."""
        accepted = self._travelled()
        there = [position in accepted for position in range(len(self.cohort.ids))]
        return self.cohort.examples * self.cohort.examples.new_tensor(there)

    def reply(self) -> Tree:
        """Returns the replies stacked, leaves (C, ...); {} where nobody answered."""
        accepted = self._travelled()
        if not accepted:
            return {}
        nothing = trees.tree_map(torch.zeros_like, next(iter(accepted.values())))
        return trees.stack([accepted.get(p, nothing) for p in range(len(self.cohort.ids))])

    def _travelled(self) -> Mapping[int, Tree]:
        if self.accepted is None:
            self.cohort.exchange()
        assert self.accepted is not None
        return self.accepted


class EngineCohort:
    """The clients of one round; see :class:`hyperfed.federation.Cohort`.

    Attributes:
        examples: (C,) float64 training examples of each client, lost or not; 1 each where training
            is private, since how many there are is a client's data too.
    """

    def __init__(self, engine: Engine, clients: Sequence[int], state: CohortState) -> None:
        self._engine, self._clients, self.state = engine, tuple(clients), state
        self.ids = torch.tensor(self._clients, dtype=torch.int64, device=engine.device)
        examples = [len(engine.task.train[client]) for client in self._clients]
        if engine.private is not None:
            examples = [1] * len(examples)
        self.examples = torch.tensor(examples, dtype=torch.float64, device=engine.device)

    @property
    def round(self) -> int:
        """The current round, from 0."""
        return self.state.round

    @property
    def novel(self) -> bool:
        """Whether these clients never took part in training."""
        return any(client in self._engine.task.novel_ids for client in self._clients)

    @property
    def known(self) -> "EngineCohort":
        """All clients that took part in training, to be asked while others are served.

        Nothing that they write is kept.

        Raises:
            UserError: there are none.
        """
        if self.state.known is None:
            home = self._engine.home or self._engine
            if not home.task.known:
                raise UserError(
                    "known clients can be asked only where there are some, but all clients of task "
                    f"{home.task.name} are novel; give the engine a home, that of the trained task"
                )
            self._check_unmasked("all known clients")
            known = home.cohort(home.task.known, self.state.round, training=False)
            known.state.exchanges = self.state.exchanges
            known.state.reply_bound = self.state.reply_bound
            self.state.known = known
        return self.state.known

    @property
    def there(self) -> list[int]:
        """The clients that are not lost."""
        return [client for client in self._clients if client not in self.state.lost]

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client lost this round."""
        there = [client not in self.state.lost for client in self._clients]
        return self.examples * self.examples.new_tensor(there)

    @cached_property
    def sizes(self) -> Mapping[str, "EngineCohort"]:
        """The clients grouped by target size, in the order of the task's models."""
        task = self._engine.task
        groups: dict[str, list[int]] = {size: [] for size in task.models}
        for client in self._clients:
            groups[task.size_of(client)].append(client)
        return {size: self.only(group) for size, group in groups.items() if group}

    def only(self, clients: Sequence[int]) -> "EngineCohort":
        """Returns some of these clients, in the order given."""
        return EngineCohort(self._engine, clients, self.state)

    @property
    def size(self) -> str:
        """The target size of all these clients, where they have one in common."""
        (size,) = self.sizes
        return size

    def ask(
        self, step: Callable[..., Tree], *payload: Tree | Each, batches: Batches | None = None
    ) -> Tree:
        """Runs a step at every client that is still there and stacks the replies."""
        self._check_unmasked(f"each client's own reply to {name_of(step)}")
        return self.gather(step, payload, batches)

    def mean(
        self, step: Callable[..., Tree], *payload: Tree, batches: Batches | None = None
    ) -> Tree:
        """Runs a step at every client that is still there and returns the mean of the replies."""
        masking = self._engine.masking
        if masking is None or not self.state.training:
            replies = self.ask(step, *payload, batches=batches)
            return trees.weighted_mean(replies, self.weight, self.ids)
        _, info = find_step(self._engine.client, name_of(step))
        like = promised(info, Call(0, 0, 0, info.name, payload))
        if like is None:
            raise UserError(
                f"what is averaged in masked training must be like an argument, but step "
                f"{info.name} does not say which; mark it @step(like=...), or, where it replies "
                'with a difference, @step(like=..., bounded="reply")'
            )
        centre = centre_of(like, like, info)  # zeros of a difference
        total = masking.total(self, step, payload, batches)
        weight = self.weight
        try:
            mean = masking.mean(total, int(weight.sum()), trees.exact(centre))
        except ValueError as error:
            self.give_up(str(error))
        return trees.as_told(mean, float(weight.max() / weight.sum()), like, self.ids)

    def gather(
        self,
        step: Callable[..., Tree] | StepInfo,
        payload: Sequence[Tree | Each],
        batches: Batches | None = None,
        *,
        masked: bool = False,
        late: bool = False,
    ) -> Tree:
        """Does what :meth:`ask` does, also in masked training.

        Args:
            step: a step of the method's Client, or an exchange that no method asks for.
            payload: of the step.
            batches: to train on.
            masked: the replies are parts of a sum.
            late: who does not answer stays in the round; {} comes of nobody.
        """
        question = self._question(step, payload, batches, posted=late, masked=masked)
        self.exchange(question)
        if not question.accepted and not late:
            self._all_lost()
        return question.reply()

    def need(self, least: int) -> None:
        """Raises ``AllLostError`` where fewer clients are there; a sum of them would tell more."""
        if (there := len(self.there)) < least:
            of = f" of {', '.join(self.sizes)}" if len(self._engine.task.models) > 1 else ""
            self.give_up(f"a masked sum must be of {least} clients here, but {there} are left{of}")

    def give_up(self, reason: str) -> NoReturn:
        """Loses all clients that are there.

        Raises:
            AllLostError: that.
        """
        self.state.lost |= dict.fromkeys(self.there, reason)
        self._all_lost()

    def _all_lost(self) -> NoReturn:
        cause = next(iter(self.state.causes), None)
        reasons = "; ".join(f"client {i}: {why}" for i, why in self.state.lost.items())
        raise AllLostError(f"all clients were lost: {reasons}") from cause

    def _check_unmasked(self, what: str) -> None:
        """Finds out whether a server may be told more than sums.

        Raises:
            UserError: it may not.
        """
        if self._engine.masking is not None and self.state.training:
            raise UserError(
                f"in masked training a server must ask for means alone, but asked for {what}; "
                "set privacy.masking=false, or choose a method that needs nothing but means"
            )

    def post(
        self, step: Callable[..., Tree], *payload: Tree | Each, batches: Batches | None = None
    ) -> Question:
        """Has a step travel with the next message to the clients that are still there."""
        self._check_unmasked(f"each client's own reply to {name_of(step)}")
        self._check_postable(step)
        question = self._question(step, payload, batches, posted=True)
        self.state.posted.update(call.client for call in question.calls.values())
        self._engine.waiting.append(question)
        return question

    def exchange(self, *questions: Question) -> None:
        """Sends questions, and with them what was posted before to any client of the engine."""
        waiting = self._engine.waiting
        asked = [*waiting, *questions]
        calls = [call for question in asked for call in question.reached.values()]
        with trees.aggregating(MEAN):  # what clients compute is theirs
            answers = iter(self._engine.answer(calls) if calls else [])
        waiting.clear()
        for question in asked:
            came = {position: next(answers) for position in question.reached}
            question.cohort.hear(question, came)

    def hear(self, question: Question, answers: Mapping[int, Tree | Exception]) -> None:
        """Decides which answers to a question of this cohort can be used.

        Args:
            question: has travelled just now.
            answers: what came from each position that was reached.
        """
        replies = self._replies(question, answers)
        came = {p: reply for p, reply in replies.items() if isinstance(reply, Reply)}
        expected = expected_structure(list(came.values()))
        finite = dict(zip(came, trees.finite([r.tree for r in came.values()]), strict=True))
        reasons = {
            position: refusal(reply, expected, finite=finite.get(position, True))
            for position, reply in replies.items()
        }
        reasons |= self._too_large(question, {p: r for p, r in came.items() if reasons[p] is None})
        reasons |= {
            position: self._impossible(question, position, reply.tree)
            for position, reply in came.items()
            if reasons[position] is None
        }
        accepted: dict[int, Tree] = {}
        for position, reply in replies.items():
            call, reason = question.calls[position], reasons[position]
            if reason is None and isinstance(reply, Reply):
                accepted[position] = reply.tree
            elif reason is not None and question.posted:
                self.state.late.append((call.client, reason))
            elif reason is not None:
                self._lose(call.client, reason, reply)
            down = sum(trees.count_bytes(tree) for tree in call.payload)
            up = trees.count_bytes(reply.tree) if isinstance(reply, Reply) else 0
            self.state.exchanges.append(Exchange(question.info.name, call.client, down, up))
        question.accepted = accepted

    def _impossible(self, question: Question, position: int, reply: Tree) -> str | None:
        """Returns why no client can have come to a reply that may be of any size, or None."""
        call, info = question.calls[position], question.info
        if call.masked:
            return None
        if info.bounded != "reply":
            return impossible(reply, call.payload, None)
        start = promised(info, call)
        return None if start is None else impossible(reply, call.payload, start)

    def _too_large(self, question: Question, replies: Mapping[int, Reply]) -> dict[int, str]:
        factor, private = self.state.reply_bound, self._engine.private
        if private is not None and private.where == "central":
            return {}  # they are bounded; by others' data nobody may be lost
        if factor is None or not replies or self._engine.masking is not None:
            return {}
        device = self._engine.device
        likes = {
            position: None if like is None else trees.to(like, device)
            for position in replies
            for like in [promised(question.info, question.calls[position])]
        }
        payloads: dict[int, Tree] = {}
        if all(like is None for like in likes.values()):
            for position in replies:
                sent = question.calls[position].payload
                payloads[position] = {str(place): tree for place, tree in enumerate(sent)}
        told, noise = {position: reply.tree for position, reply in replies.items()}, 0.0
        if private is not None and is_covered(question.info):
            noise = private.noise_in(next(iter(told.values())))
        return too_large(told, likes, factor, payloads, noise=noise)

    def _question(
        self,
        step: Callable[..., Tree] | StepInfo,
        payload: Sequence[Tree | Each],
        batches: Batches | None,
        *,
        posted: bool = False,
        masked: bool = False,
    ) -> Question:
        info = step
        if not isinstance(info, StepInfo):
            _, info = find_step(self._engine.client, name_of(info))
        _check_detached(payload)
        if again := self.state.posted.intersection(self.there):
            raise ValueError(
                f"what a client is posted must be the last thing it is asked in a round, but "
                f"{info.name} came after it for client {min(again)}; ask it before"
            )
        if posted:
            payload = [_copied(item) for item in payload]
        calls = {
            position: self._call(info, position, payload, batches, masked=masked)
            for position, client in enumerate(self._clients)
            if client not in self.state.lost
        }
        seed, faults, training = self._engine.seed, self._engine.faults, self.state.training
        reached = {p: c for p, c in calls.items() if not (training and faults.drops(seed, c))}
        return Question(self, info, calls, reached, posted)

    def _check_postable(self, step: Callable[..., Tree]) -> None:
        _, info = find_step(self._engine.client, name_of(step))
        if not info.deferrable:
            raise ValueError(
                f"what is posted must be a step that can run later, but {info.name} is not marked "
                "@step(deferrable=True); mark it, or ask it"
            )
        if not self.state.training:
            raise ValueError(
                f"a step can be posted only in a training round, but {info.name} was while clients "
                "are served; ask it"
            )
        asked = {client for client, _ in self.state.turns}
        if new := set(self.there) - asked:
            raise ValueError(
                f"what is posted must go on from what its client was asked before in this round, "
                f"but client {min(new)} was asked nothing before {info.name}; ask it"
            )

    def _call(
        self,
        info: StepInfo,
        position: int,
        payload: Sequence[Tree | Each],
        batches: Batches | None,
        *,
        masked: bool,
    ) -> Call:
        client, state = self._clients[position], self.state
        turn = state.turns[client, info.name]
        state.turns[client, info.name] += 1
        own = tuple(item.slice(position) if isinstance(item, Each) else item for item in payload)
        return Call(state.number, state.round, client, info.name, own, batches, turn, masked=masked)

    def _replies(
        self, question: Question, answers: Mapping[int, Tree | Exception]
    ) -> dict[int, Reply | Exception]:
        """Returns what came from each position, faults included, in the order of the calls."""
        seed, faults, training = self._engine.seed, self._engine.faults, self.state.training
        device = self._engine.device
        replies: dict[int, Reply | Exception] = {}
        for position, call in question.calls.items():
            if position not in answers:
                replies[position] = NoAnswerError("did not answer (injected by faults.drop)")
                continue
            answer = answers[position]
            like = promised(question.info, call)
            shape = None if call.masked and self.state.remote else like
            reply = answer if isinstance(answer, Exception) else checked(answer, shape, device)
            if training and isinstance(reply, Reply) and faults.spoils(seed, call):
                reply = Reply(trees.tree_map(_spoil, reply.tree), reply.structure)
            if training and isinstance(reply, Reply) and call.client in faults.hostile:
                reply = Reply(faults.lie(reply.tree, like, seed, call), reply.structure)
            if isinstance(reply, Reply) and call.masked and not self.state.remote:
                reply = self._part(question.info, reply, like, int(self.examples[position]))
            elif isinstance(reply, Reply) and not call.masked:
                reply = self._bounded(question.info, reply, like)
            replies[position] = reply
        return replies

    def _bounded(self, info: StepInfo, reply: Reply, like: Tree | None) -> Reply:
        """Returns a reply as a trusted server may use it: no longer than ``privacy.clip``."""
        private = self._engine.private
        if private is None or private.where == "local" or not reply.tree or not is_covered(info):
            return reply
        like = None if like is None else trees.to(like, self._engine.device)
        return Reply(bounded(reply.tree, like, info, private.clip), reply.structure)

    def _part(
        self, info: StepInfo, reply: Reply, like: Tree | None, weight: int
    ) -> Reply | BadReplyError:
        """Returns what a client adds to a masked sum, as its reply."""
        masking = self._engine.masking
        assert masking is not None
        assert like is not None
        try:
            part = masking.part(reply.tree, like, info, weight)
        except BadReplyError as error:
            return error
        return Reply(part, trees.structure(part))

    def _lose(self, client: int, reason: str, reply: object) -> None:
        # Who does not answer or diverges is lost at any time, and so is who is not our own; what
        # else goes wrong at a client that is only served must be told.
        lost = self.state.remote or isinstance(reply, NoAnswerError | DivergedError)
        if not self.state.training and isinstance(reply, Exception) and not lost:
            raise reply
        self.state.lost[client] = reason
        if isinstance(reply, Exception):
            self.state.causes.append(reply)


def _copied(item: Tree | Each) -> Tree | Each:
    """Returns what stays as it is, whatever becomes of the server's own tensors."""
    if isinstance(item, Each):
        return replace(item, tree=trees.clone(item.tree))
    return trees.clone(item)


def _check_detached(payload: Sequence[Tree | Each]) -> None:
    for item in payload:
        tree = item.tree if isinstance(item, Each) else item
        if any(leaf.requires_grad for _, leaf in trees.leaves(tree)):
            raise ValueError(
                "what is sent must not be part of an autograd graph: no gradient crosses the "
                "network; send trees.detach(...) and pull the reply back yourself"
            )


def _spoil(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf

"""Flower: ``ask`` as messages to real, separate sites that keep their data.

One message to each site holds all that its clients are asked. The sites keep what their clients
remember (:mod:`hyperfed.engines.flower.store`); here are only references to it. How messages travel
is the business of a :class:`~hyperfed.engines.flower.sites.Link`.
"""

import time
import weakref
from collections.abc import Mapping, Sequence
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.data.examples import fingerprint_of_frozen
from hyperfed.data.roster import RemoteTask
from hyperfed.engines.calls import Call
from hyperfed.engines.cohort import CohortState, Engine, EngineCohort, Question
from hyperfed.engines.faults import Faults
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.honest import HonestClient
from hyperfed.engines.flower.pairwise import PairwiseMasking, is_exchange, structure_of
from hyperfed.engines.flower.sites import STEP, Sites
from hyperfed.engines.flower.wire import Request, Response, Version, WireError
from hyperfed.engines.masking import Masking
from hyperfed.engines.replies import BadReplyError, NoAnswerError, difference
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.federation import Client
from hyperfed.system.devices import CPU
from hyperfed.training import Precision
from hyperfed.trees import Structure, Tree


class FlowerEngine:
    """Has sites run the clients of a task; see :class:`hyperfed.engines.cohort.Engine`.

    Args:
        task: who the clients are, and the way to their sites.
        client: the method's Client.
        config: the method's settings, which the sites have from the run's configuration.
        seed: the run's seed, likewise.
        timeout: seconds that a site has to answer a message.
        faults: what to inject into training rounds.
        precision: of the sites' arithmetic, which they have from there too.
        device: where the server is.
        private: how the answers of clients are made private.
        masking: how updates are summed, where the server is told nothing but sums.

    Attributes:
        traffic: bytes of all messages to sites and back, {"down": ..., "up": ...}.
        released: what sites say that their clients have let out with noise, without the answers.
    """

    name = "flower"
    home: Engine | None = None

    def __init__(
        self,
        task: RemoteTask,
        client: type[Client],
        config: Any,
        *,
        seed: int,
        timeout: float = 600.0,
        faults: Faults | None = None,
        precision: Precision = "float32",
        device: torch.device = CPU,
        private: PrivateUpdates | None = None,
        masking: Masking | None = None,
    ) -> None:
        self.private = private
        self.masking = masking and PairwiseMasking(masking.clip, masking.private)
        self.task, self.client, self.config, self.seed = task, client, config, seed
        self.device, self._precision = device, precision
        self.faults, self.timeout = faults or Faults(), timeout
        self.traffic = {"down": 0, "up": 0}
        self.released: dict[int, Tree] = {}
        self.waiting: list[Question] = []
        keys = {} if task.roster is None else task.roster.keys
        names = None if task.roster is None else task.roster.numbers.keys()
        self._sites = None if task.link is None else Sites(task.link, timeout, keys, names)
        self._honest = HonestClient(task, client, config, seed=seed, precision=precision)
        self._frozen = fingerprint_of_frozen(task.models)
        # Whether, to what a node was sent last: then it has what is frozen, too.
        self._answered: dict[int, bool] = {}
        self._session, self._serials, self._cohorts = time.time_ns(), count(1), count()
        self._open: set[int] = set()
        self._memory: dict[int, Tree] = {}
        self._asked: dict[int, dict[int, bool]] = {}  # cohort -> client -> has it a memory now
        # References that somebody still holds, by their identity: a site may drop what nobody can
        # name any more.
        self._held: dict[int, tuple[int, Version]] = {}
        self._saved: tuple[list[Mapping[int, Tree]], ...] = ()

    @property
    def memory(self) -> dict[int, Tree]:
        """References to what clients remember: {client: {"version": (2,)}}."""
        return self._memory

    @memory.setter
    def memory(self, memory: dict[int, Tree]) -> None:
        self._memory = memory
        self._hold(memory)

    def saved(self, *memories: Mapping[int, Tree]) -> None:
        """Keeps what the latest two checkpoints refer to: a run may be resumed from either."""
        for memory in memories:
            self._hold(memory)
        self._saved = (*self._saved[-1:], [dict(memory) for memory in memories])

    def cohort(self, ids: Sequence[int], round: int, *, training: bool) -> EngineCohort:
        """Returns the cohort of a round."""
        state = CohortState(next(self._cohorts), round, training, remote=True)
        self._open.add(state.number)
        weakref.finalize(state, self._close, state.number)
        return EngineCohort(self, ids, state)

    def commit(self, cohort: EngineCohort) -> None:
        """Refers to what a round's clients remember now, but for those that were lost."""
        number, memory = cohort.state.number, dict(self._memory)
        for client, remembers in self._asked.get(number, {}).items():
            if client not in cohort.there:
                continue
            memory.pop(client, None)
            if remembers:
                memory[client] = {"version": torch.tensor([self._session, number])}
        self.memory = memory

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Sends each site its calls, in one message, and waits for all."""
        if self._sites is None or self.task.roster is None:
            raise UserError(
                "the clients of this run are at their sites, which are asked only while its "
                "Flower app runs; resume the run, or start a new one"
            )
        names = {call.client: self.task.roster.members[call.client].name for call in calls}
        node_of = self._sites.find(list(names.values()))
        answers: dict[int, Tree | Exception] = {}
        by_node: dict[int, dict[int, Call]] = {}
        for position, call in enumerate(calls):
            if names[call.client] in node_of:
                by_node.setdefault(node_of[names[call.client]], {})[position] = call
            else:
                answers[position] = NoAnswerError(self._sites.why_not(names[call.client]))
        serial = next(self._serials)
        contents = {
            node: wire.pack_request(self._request(node, serial, list(part.values()), names))
            for node, part in by_node.items()
        }
        self.traffic["down"] += sum(map(len, contents.values()))
        masked = all(call.masked or is_exchange(call) for call in calls)
        promised: list[Structure | None] = (
            [structure_of(call, self.client) for call in calls]
            if masked
            else self._honest.replies(calls)
        )
        wanted = {node: [promised[position] for position in part] for node, part in by_node.items()}
        told = {node: _most_bytes(structures) for node, structures in wanted.items()}
        most = {node: bound for node, bound in told.items() if bound is not None}
        replies = self.task.link.exchange(STEP, contents, self.timeout, most)
        for node, part in by_node.items():
            reply: bytes | Exception | None = replies.get(node)
            if isinstance(reply, bytes) and len(reply) > most.get(node, len(reply)):
                reply = BadReplyError(f"the site's reply is too large: {len(reply)} bytes")
            read = self._read(serial, list(part.values()), wanted[node], reply)
            self._answered[node] = not all(isinstance(answer, Exception) for answer in read)
            if not self._answered[node]:
                self._sites.forget(node)
            answers |= zip(part, read, strict=True)
        return [answers[position] for position in range(len(calls))]

    @property
    def answering(self) -> tuple[int, int]:
        """How many sites are there and gave a usable answer to what they were sent last, of all.

        All are those that have been sent anything.
        """
        there = frozenset() if self._sites is None else self._sites.connected
        usable = [node in there and fine for node, fine in self._answered.items()]
        return sum(usable), len(usable)

    def resources(self, clients: int) -> dict[str, Any]:
        """Returns the number of sites with clients, and the bytes of all messages with framing.

        Also of those that were sent before the run was gone on with.
        """
        there = {} if self._sites is None else self._sites.known()
        sites = sum(bool(said.members) for said in there.values())
        down, up = self.traffic["down"], self.traffic["up"]
        return {"sites": sites, "message_bytes_down": down, "message_bytes_up": up}

    def close(self) -> None:
        """Does nothing: the connection is the ServerApp's."""

    def _hold(self, memory: Mapping[int, Tree]) -> None:
        for client, tree in memory.items():
            reference: Tensor = tree["version"]
            if id(reference) not in self._held:
                self._held[id(reference)] = client, _version(tree)
                weakref.finalize(reference, self._held.pop, id(reference), None)

    def _close(self, cohort: int) -> None:
        self._open.discard(cohort)
        self._asked.pop(cohort, None)
        self._honest.forget(cohort)

    def _request(
        self, node: int, serial: int, calls: Sequence[Call], names: Mapping[int, str]
    ) -> Request:
        roster = self.task.roster
        assert roster is not None
        clients, private = [call.client for call in calls], self.private
        keep: dict[int, list[Version]] = {client: [] for client in clients}
        for client, version in set(self._held.values()):
            if client in keep:
                keep[client].append(version)
        return Request(
            run=roster.run,
            session=self._session,
            serial=serial,
            frame=roster.frame,
            names={client: names[client] for client in clients},
            calls=calls,
            begin={c: _version(self._memory[c]) for c in clients if c in self._memory},
            keep=keep,
            open=sorted(self._open),
            frozen=self._frozen,
            weights={} if self._answered.get(node) else self._weights(),
            multiplier=private.multiplier if private and private.where == "local" else None,
        )

    def _weights(self) -> Tree:
        """Returns what is frozen in the targets, {size: {name: tensor}}."""
        frozen = {size: trees.frozen_of(model) for size, model in self.task.models.items()}
        return {size: values for size, values in frozen.items() if values}

    def _read(
        self,
        serial: int,
        calls: Sequence[Call],
        promised: Sequence[Structure | None],
        reply: bytes | Exception | None,
    ) -> list[Tree | Exception]:
        """Returns the answers in a site's reply; one that is none answers no call."""
        response: Response | Exception
        if isinstance(reply, bytes):
            self.traffic["up"] += len(reply)
            try:
                response = wire.unpack_response(reply)
            except WireError as error:
                response = BadReplyError(f"the site's reply cannot be read: {error}")
        else:
            response = reply or NoAnswerError("its site did not answer")
        if isinstance(response, Response) and (response.session, response.serial) != (
            self._session,
            serial,
        ):
            response = BadReplyError("the site's reply is to another message")
        if isinstance(response, Response) and not _places(response) <= {*range(len(calls))}:
            response = BadReplyError("the site's reply is to calls that it was not sent")
        if isinstance(response, Exception):
            return [response] * len(calls)
        missing = NoAnswerError("its site did not answer for it")
        answers: list[Tree | Exception]
        answers = [response.answers.get(place, missing) for place in range(len(calls))]
        for place, call in enumerate(calls):
            answers[place] = self._as_promised(answers[place], promised[place])
            if not isinstance(answers[place], Exception):
                remembers = place in response.remembers
                self._asked.setdefault(call.cohort, {})[call.client] = remembers
            # A trusted server keeps its own account, which no site's word may use up.
            trusted = self.private is not None and self.private.where == "central"
            if not trusted and (told := response.spent.get(place)):
                multipliers = torch.tensor([*told], dtype=torch.float64)
                times = torch.tensor([*told.values()])
                self.released[call.client] = {"multipliers": multipliers.repeat_interleave(times)}
        return answers

    def _as_promised(
        self, answer: Tree | Exception, promised: Structure | None
    ) -> Tree | Exception:
        """Returns an answer, or why it is not what an honest client would have replied."""
        if isinstance(answer, Exception) or promised is None:
            return answer
        came = trees.structure(answer)
        if self._precision != "float32":  # accelerators differ in what they compute so
            came, promised = _of_floats(came), _of_floats(promised)
        return answer if came == promised else BadReplyError(difference(came, promised))


def _places(response: Response) -> set[int]:
    """Returns the places of all calls of which a response says anything."""
    return {*response.answers, *response.remembers, *response.spent}


HEADER = 1 << 14
"""Bytes that a call's reply may have beside its tensors: their names, or the text of an error."""


def _most_bytes(promised: Sequence[Structure | None]) -> int | None:
    """Returns how long a site's reply may be; None where nobody can tell."""
    total = HEADER
    for structure in promised:
        if structure is None:
            return None
        total += HEADER + sum(
            512 + (prod(shape) * dtype.itemsize if dtype else 0) for _, shape, dtype in structure
        )
    return total


def _of_floats(structure: Structure) -> Structure:
    """Returns a structure that does not tell floating-point numbers apart."""
    return tuple(
        (path, shape, torch.float32 if dtype and dtype.is_floating_point else dtype)
        for path, shape, dtype in structure
    )


def _version(tree: Tree) -> Version:
    session, cohort = tree["version"].tolist()
    return session, cohort

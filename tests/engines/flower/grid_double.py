"""Sites in this process behind a Grid that serialises, and a method played on them."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.flower.sites import hello, remote, sites_of
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.grid import GridLink, bytes_of, record_of
from hyperfed.engines.flower.site import Site
from hyperfed.engines.flower.sites import HELLO
from hyperfed.methods import METHODS
from hyperfed.runs.evaluation import SUMS
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from test_every_method import SETTINGS
from toys import Federation, lengths, make_task

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid


def answered(site: Site, message: Message) -> Message:
    return Message(record_of(site.handle(bytes_of(message.content))), reply_to=message)


def over_the_wire(message: Message) -> Message:
    """What comes out at the other end: the message as bytes and back."""
    parsed = ProtoMessage.FromString(message_to_proto(message).SerializeToString())
    return message_from_proto(parsed)


class GridDouble(Grid):
    """Nodes in this process, which get and give messages as bytes.

    ``behave`` maps a node to what it does with a message instead of answering it; replies come in
    the reverse order of the requests.
    """

    def __init__(self, sites: Mapping[int, Site]) -> None:
        self.sites = dict(sites)
        self.behave: dict[int, Any] = {}
        self.keys: dict[int, bytes] = {}
        self.delivered: list[tuple[int, str]] = []
        self._replies: list[Message] = []
        self._numbers = itertools.count(1)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.sites)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.sites]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message {next(self._numbers)}"
            came = over_the_wire(message)
            node = came.metadata.dst_node_id
            self.delivered.append((node, came.metadata.message_type))
            for reply in self._answer(node, came):
                self._replies.insert(0, over_the_wire(reply))
            identities.append(message.metadata.message_id)
        return identities

    def _answer(self, node: int, message: Message) -> list[Message]:
        site = self.sites[node]
        if message.metadata.message_type == HELLO:
            return [Message(record_of(hello(site)), reply_to=message)]
        if node in self.behave:
            return list(self.behave[node](site, message))
        return [answered(site, message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        there = [r for r in self._replies if r.metadata.reply_to_message_id in wanted]
        self._replies = [r for r in self._replies if r not in there]
        return there

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        raise NotImplementedError


def settings_of(method: str) -> dict[str, Any]:
    return SETTINGS | lengths(method)


class Remote:
    """A method on sites, round by round; clients 0 and 2 are at node 11, the others at node 7."""

    def __init__(
        self, method: str, task: Task, state: Path, timeout: float = 5.0, **own: Any
    ) -> None:
        module = METHODS[method]
        self.config = module.Config(**settings_of(method), **own)
        shares: dict[int, list[int]] = {11: [], 7: []}
        for client in range(task.clients):
            shares[7 if client % 2 else 11].append(client)
        self.sites = sites_of(task, module, self.config, state, shares)
        self.grid = GridDouble(self.sites)
        self.task = remote(task, GridLink(self.grid), self.sites)
        with seeded(0, "server"):
            self.server = module.Server(task.outline(), self.config)
        self.module, self.timeout = module, timeout
        self.engine = self.new_engine()

    def new_engine(self) -> FlowerEngine:
        return FlowerEngine(
            self.task, self.module.Client, self.config, seed=0, timeout=self.timeout
        )

    def round(self, clients: Iterable[int], number: int = 0) -> Any:
        cohort = self.engine.cohort(list(clients), number, training=True)
        cohort.state.reply_bound = 100.0
        self.server.round(cohort)
        self.engine.commit(cohort)
        return cohort


def both(method: str, state: Path, **options: Any) -> tuple[Remote, Federation]:
    task = make_task(**options)
    return Remote(method, task, state), Federation(method, task, **settings_of(method))


def values(counts: Any) -> dict[str, Tensor]:
    return {split: torch.stack([getattr(c, name) for name in SUMS]) for split, c in counts.items()}

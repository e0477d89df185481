"""What comes of a site's reply on its way through Flower, whatever the site makes of it.

Flower's own ``HttpGrid`` asks a SuperLink that gives it what each site announced and pushed.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hyperfed.engines.flower import grid as module
from hyperfed.engines.flower.grid import GridLink, bounded, record_of
from hyperfed.engines.flower.sites import STEP
from hyperfed.engines.flower.wire import WireError
from hyperfed.engines.replies import NoAnswerError

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto, metadata_from_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid import http_grid

HOSTILE, HONEST = 7, 11
BOTH = {HOSTILE: b"to the one", HONEST: b"to the other"}


@dataclass
class Pushed:
    """A reply as a site sends it: what it announces, and the parts that it then pushes.

    ``later`` are parts that come when one has been asked for in vain.
    """

    message: Any
    tree: ObjectTree
    parts: dict[str, bytes] = field(default_factory=dict)
    later: dict[str, bytes] = field(default_factory=dict)


Answer = Callable[[Message], Pushed | None]


def reply(content: bytes, to: Message | None = None) -> Answer:
    """What an honest site sends; ``to`` lies about which message it answers."""

    def answer(asked: Message) -> Pushed:
        made = Message(record_of(content), reply_to=to or asked)
        made.metadata.__dict__["_message_id"] = made.object_id
        parts = {name: part.deflate() for name, part in get_all_nested_objects(made).items()}
        announced = make_message(metadata=made.metadata, content=RecordDict())
        return Pushed(message_to_proto(announced), get_object_tree(made), parts)

    return answer


def forged(kind: str, body: bytes = b"", children: tuple[str, ...] = ()) -> Answer:
    """A root whose head and hash are right, which is all that a SuperLink looks at."""

    def answer(asked: Message) -> Pushed:
        head = f"{kind} {','.join(children)} {len(body)}"
        whole = head.encode() + b"\0" + body
        name = hashlib.sha256(whole).hexdigest()
        announced = reply(b"")(asked)
        announced.message.metadata.message_id = name
        return Pushed(announced.message, ObjectTree(object_id=name), {name: whole})

    return answer


def in_parts(count: int, size: int) -> Answer:
    """A reply of many parts, none of which means anything."""

    def answer(asked: Message) -> Pushed:
        announced = reply(b"")(asked)
        parts = {f"{number:064}": bytes(size) for number in range(count)}
        tree = ObjectTree(object_id="root", children=[ObjectTree(object_id=p) for p in parts])
        return Pushed(announced.message, tree, {"root": bytes(size)} | parts)

    return answer


def never_pushed(asked: Message) -> Pushed:
    whole = reply(b"announced")(asked)
    return Pushed(whole.message, whole.tree)


class SuperLink:
    """What ``HttpGrid`` asks of a SuperLink."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self.answers, self.asked = answers, dict[str, Message]()
        self.parts: dict[str, bytes] = {}
        self.later: dict[str, bytes] = {}
        self.pulled: Counter[str] = Counter()
        self.delivered: set[str] = set()

    def push_messages(self, request: Any) -> Any:
        for proto in request.messages_list:
            asked = make_message(metadata_from_proto(proto.metadata), content=RecordDict())
            self.asked[proto.metadata.message_id] = asked
        return PushAppMessagesResponse(message_ids=list(self.asked))

    def push_object(self, request: Any) -> Any:
        return PushObjectResponse(stored=True)

    def pull_messages(self, request: Any) -> Any:
        found = []
        for name in request.message_ids:
            asked = self.asked[name]
            answer = self.answers[asked.metadata.dst_node_id]
            expired = time.time() > asked.metadata.created_at + asked.metadata.ttl
            if name in self.delivered or expired:
                continue
            if (pushed := answer(asked)) is not None:
                self.delivered.add(name)
                self.parts |= pushed.parts
                self.later |= pushed.later
                found.append(pushed)
        return PullAppMessagesResponse(
            messages_list=[one.message for one in found],
            message_object_trees=[one.tree for one in found],
        )

    def pull_object(self, request: Any) -> Any:
        name = request.object_id
        self.pulled[name] += 1
        if self.pulled[name] > 10:
            raise SystemExit("the server waits for ever")
        content = self.parts.get(name)
        if content is None:
            self.parts |= self.later
        return PullObjectResponse(
            object_found=True, object_available=content is not None, object_content=content
        )

    def confirm_message_received(self, request: Any) -> Any:
        return ConfirmMessageReceivedResponse()


@pytest.fixture(autouse=True)
def _leaves_flower_as_it_was(inside_a_flower_process: None) -> Iterator[None]:
    usual = http_grid.pull_objects  # type: ignore[attr-defined]
    yield
    assert http_grid.pull_objects is usual  # type: ignore[attr-defined]


def link_to(answers: dict[int, Answer]) -> tuple[GridLink, SuperLink]:
    superlink = SuperLink(answers)
    grid: Any = http_grid.HttpGrid(token="token")
    grid._run = SimpleNamespace(run_id=1)
    grid._client = SimpleNamespace(
        PushMessages=superlink.push_messages,
        PushObject=superlink.push_object,
        PullMessages=superlink.pull_messages,
        PullObject=superlink.pull_object,
        ConfirmMessageReceived=superlink.confirm_message_received,
    )
    return GridLink(grid), superlink


def exchange(answers: dict[int, Answer], timeout: float = 0.3, **most: Any) -> dict[int, Any]:
    return link_to(answers)[0].exchange(STEP, BOTH, timeout, most.get("most", {}))


FORGED: dict[str, Answer] = {
    "a message that is none": forged("Message", b"\xff\xff\xff"),
    "a message without its content": forged("Message"),
    "a record for a message": forged("ConfigRecord"),
    "an array for a message": forged("ArrayRecord", b"{}"),
    "numbers for a message": forged("MetricRecord", b"\x01"),
    "a class that there is not": forged("Nothing"),
    "a part that it did not announce": forged("Message", children=("0" * 64,)),
    "a message that holds itself": forged("RecordDict", b'{"a": "a"}', ("a",)),
    "no head": in_parts(1, 3),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_reply_that_is_no_message_is_its_sites_alone(kind: str) -> None:
    came = exchange({HOSTILE: FORGED[kind], HONEST: reply(b"here")})
    assert came[HONEST] == b"here"
    assert isinstance(came[HOSTILE], WireError)
    assert str(came[HOSTILE]).isprintable()


def test_nodes_are_in_the_order_of_their_registration() -> None:
    """Who introduced a client first has its name; numbers of nodes are drawn."""
    key = {"public_key": b""}
    first = SimpleNamespace(node_id=9, registered_at="2026-01-01T00:00:00", **key)
    others = [
        SimpleNamespace(node_id=number, registered_at="2026-02-01T00:00:00", **key)
        for number in (5, 1)
    ]
    link = GridLink(SimpleNamespace(get_nodes=lambda: [*others, first]), keyed=False)
    assert list(link.nodes()) == [9, 1, 5]


def test_messages_that_a_superlink_does_not_take_lose_their_sites() -> None:
    link = GridLink(SimpleNamespace(push_messages=lambda messages: []))
    answers = link.exchange(STEP, BOTH, 1.0, {})
    assert answers.keys() == BOTH.keys()
    assert all("could not be sent" in str(answer) for answer in answers.values())


def test_no_site_answers_in_the_place_of_another() -> None:
    link, superlink = link_to({})
    superlink.answers[HONEST] = reply(b"honest")

    def another(asked: Message) -> Pushed | None:
        (victim,) = [m for m in superlink.asked.values() if m.metadata.dst_node_id == HONEST]
        return reply(b"forged", to=victim)(asked)

    superlink.answers[HOSTILE] = another
    came = link.exchange(STEP, BOTH, 0.3, {})
    assert came[HONEST] == b"honest"
    assert isinstance(came[HOSTILE], NoAnswerError)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_that_never_comes_loses_no_other_site(order: int) -> None:
    """The honest one's reply is there when the time is over, which the other's part took."""
    begin, asked = time.monotonic(), dict(list(BOTH.items())[::order])

    def late(asked: Message) -> Pushed | None:
        return reply(b"late")(asked) if time.monotonic() > begin + 0.1 else None

    link, _ = link_to({HOSTILE: never_pushed, HONEST: late})
    came = link.exchange(STEP, asked, 0.3, {})
    assert came[HONEST] == b"late"
    assert isinstance(came[HOSTILE], NoAnswerError)
    assert "never came whole" in str(came[HOSTILE])


def test_a_part_that_comes_later_is_waited_for() -> None:
    def slow(asked: Message) -> Pushed:
        whole = reply(b"slow")(asked)
        return replace(whole, parts={}, later=whole.parts)

    came = exchange({HOSTILE: slow, HONEST: reply(b"silent")}, 30.0)
    assert came == {HOSTILE: b"slow", HONEST: b"silent"}


def test_no_more_is_taken_of_a_reply_than_it_may_have() -> None:
    size = module.FRAMING // 4
    link, superlink = link_to({HOSTILE: in_parts(500, size), HONEST: reply(b"here")})
    came = link.exchange(STEP, BOTH, 5.0, {HOSTILE: 1000, HONEST: 4})
    assert came[HONEST] == b"here"
    assert isinstance(came[HOSTILE], NoAnswerError)
    taken = sum(len(superlink.parts[name]) for name in superlink.pulled)
    assert taken < 2 * module.FRAMING + 1000


@pytest.mark.parametrize("order", [1, -1])
def test_a_reply_of_parts_without_end_loses_no_other_site(order: int) -> None:
    """They are there, and few bytes, but each takes its time."""
    link, superlink = link_to({HOSTILE: in_parts(10**5, 1)})
    begin = time.monotonic()

    def late(asked: Message) -> Pushed | None:
        return reply(b"late")(asked) if time.monotonic() > begin + 0.1 else None

    superlink.answers[HONEST] = late
    came = link.exchange(STEP, dict(list(BOTH.items())[::order]), 0.3, {})
    assert came[HONEST] == b"late"
    assert isinstance(came[HOSTILE], NoAnswerError)
    assert len(superlink.pulled) < 10**5


@pytest.mark.parametrize("length", [10, 1 << 20, (1 << 20) + 1, 12 << 20])
def test_a_reply_as_long_as_it_may_be_is_taken(length: int) -> None:
    """In one piece or in several, with what Flower adds."""
    content = bytes(length)
    answers = {HOSTILE: reply(content), HONEST: reply(b"here")}
    came = exchange(answers, 30.0, most={HOSTILE: length, HONEST: 4})
    assert came[HOSTILE] == content
    assert came[HONEST] == b"here"


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), KeyboardInterrupt()])
def test_a_lost_superlink_is_no_sites_fault(error: BaseException) -> None:
    def raises(asked: Message) -> Pushed:
        raise error

    with pytest.raises(type(error)):
        exchange({HOSTILE: raises, HONEST: reply(b"here")})


def test_a_part_is_looked_for_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = inflatable_utils.pull_objects.__kwdefaults__
    options: dict[str, Any] = {}

    def pull_objects(names: Any, pull: Any, **given: Any) -> dict[str, bytes]:
        options.update(given)
        return {}

    monkeypatch.setattr(inflatable_utils, "pull_objects", pull_objects)
    with bounded(5.0, 5.0, None):
        http_grid.pull_objects(object_ids=[], pull_object_fn=bytes)  # type: ignore[attr-defined]
    assert options["initial_backoff"] < usual["initial_backoff"]
    assert options["backoff_cap"] < usual["backoff_cap"]
    assert options["max_time"] == 5.0

"""Requests and responses come over the wire as they were, or not at all."""

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from hyperfed.data.roster import Frame
from hyperfed.engines.calls import Call
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.wire import Request, Response, SiteError, WireError
from hyperfed.engines.replies import BadReplyError, DivergedError
from hyperfed.errors import UserError
from hyperfed.privacy import spent
from hyperfed.training import Epochs, Steps, UnlabelledError
from hyperfed.trees import checkpoints

FRAME = Frame(known=2, novel=1, shape=(5,), dtype="torch.float64", classes=3)


def request() -> Request:
    model = {
        "body": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(2).bfloat16()},
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3, dtype=torch.float64),
    }
    calls = [
        Call(4, 2, 0, "train_model", (model, {"own": torch.zeros(1)}), Steps(3, 4), 1),
        Call(4, 2, 2, "train_model", (model, {"own": torch.ones(1)}), Epochs(2, 8), 0, masked=True),
    ]
    return Request(
        run=2**62,
        session=3,
        serial=9,
        frame=FRAME,
        names={0: "clinic/a", 2: "clinic/ö"},
        calls=calls,
        begin={0: (3, 1)},
        keep={0: [(3, 1), (2, 0)], 2: []},
        open=[3, 4],
    )


def test_a_request_comes_back() -> None:
    sent = request()
    came = wire.unpack_request(wire.pack_request(sent))
    assert vars(came) | {"calls": 0} == vars(sent) | {"calls": 0}
    for ours, theirs in zip(sent.calls, came.calls, strict=True):
        assert vars(ours) | {"payload": 0} == vars(theirs) | {"payload": 0}
        torch.testing.assert_close(ours.payload, theirs.payload, rtol=0, atol=0)


def test_calls_of_one_client_in_two_rounds_come_back_with_an_answer_each() -> None:
    calls = [Call(4, 2, 0, "late", ({"w": torch.zeros(1)},)), Call(5, 3, 0, "train_model")]
    came = wire.unpack_request(wire.pack_request(replace(request(), calls=calls)))
    assert [(call.cohort, call.step, len(call.payload)) for call in came.calls] == [
        (4, "late", 1),
        (5, "train_model", 0),
    ]
    answers = {0: {"w": torch.ones(1)}, 1: {"w": torch.zeros(1)}}
    replied = wire.unpack_response(wire.pack_response(Response(5, 6, answers, frozenset({1}))))
    assert [replied.answers[place]["w"].item() for place in (0, 1)] == [1, 0]
    assert replied.remembers == {1}


def test_a_tree_for_all_travels_once() -> None:
    big = {"w": torch.zeros(100_000)}
    calls = [Call(0, 0, client, "step", (big,)) for client in range(10)]
    names = {client: str(client) for client in range(10)}
    sent = Request(1, 1, 1, FRAME, names, calls, {}, {}, [])
    assert len(wire.pack_request(sent)) < 500_000


def test_a_request_of_nobody_is_refused() -> None:
    """Of what is asked of a client a site keeps a note, and of nothing else that is sent."""
    with pytest.raises(UserError, match="calls"):
        wire.unpack_request(wire.pack_request(Request(1, 1, 1, FRAME, {}, [], {}, {}, [])))


def test_a_response_comes_back_and_errors_keep_what_they_mean() -> None:
    answers = {
        0: {"w": torch.ones(2)},
        1: OSError("disk on fire"),
        2: UnlabelledError("no labels"),
        3: BadReplyError("not a tree"),
        4: UserError("x" * 10_000),
        5: {},
        6: DivergedError("not finite"),
    }
    came = wire.unpack_response(wire.pack_response(Response(5, 6, answers, frozenset({0, 5}))))
    assert (came.session, came.serial, came.remembers) == (5, 6, {0, 5})
    assert torch.equal(came.answers[0]["w"], torch.ones(2))
    assert came.answers[5] == {}
    kinds = {client: type(came.answers[client]) for client in (1, 2, 3, 4, 6)}
    meant = {2: UnlabelledError, 3: BadReplyError, 4: UserError, 6: DivergedError}
    assert kinds == {1: SiteError} | meant
    assert str(came.answers[1]) == "OSError: disk on fire"
    assert len(str(came.answers[4])) == wire.LONGEST


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100, b"{" * 1000])
def test_garbage_is_refused(content: bytes) -> None:
    for unpack in (wire.unpack_request, wire.unpack_response):
        with pytest.raises(UserError, match="damaged"):
            unpack(content)


def test_a_flipped_bit_is_noticed() -> None:
    content = bytearray(wire.pack_request(request()))
    content[-3] ^= 1
    with pytest.raises(UserError, match="not what was written"):
        wire.unpack_request(bytes(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serial": "nine"}, "serial"),
        ({"run": 1.5}, "run"),
        ({"surplus": 1}, "surplus"),
        ({"names": {"0": "a"}}, "must name the clients"),
        ({"frame": {}}, "frame"),
    ],
)
def test_a_header_of_another_kind_is_refused(change: dict, message: str) -> None:
    tree, meta = checkpoints.loads(wire.pack_request(request()), "it")
    with pytest.raises(UserError, match=message):
        wire.unpack_request(checkpoints.dumps(tree, json.loads(json.dumps(meta)) | change))


def test_a_call_must_name_trees_that_are_there() -> None:
    _, meta = checkpoints.loads(wire.pack_request(request()), "it")
    with pytest.raises(UserError, match="must hold the trees"):
        wire.unpack_request(checkpoints.dumps({}, meta))


@pytest.mark.parametrize(
    "told",
    [
        *({told: 1} for told in (1e-300, 1e300, 5e-324, -1.0, 0.0)),
        {1.0: wire.MOST_SPENT + 1},
        {2.0: wire.MOST_SPENT, 3.0: 1},
        *({2.0: times} for times in (0, -1, 1.5, 10**12)),
    ],
)
def test_no_server_has_to_reckon_with_what_no_noise_costs_or_nobody_answers(told: Any) -> None:
    content = wire.pack_response(Response(1, 2, {0: {}}, frozenset(), {0: told}))
    with pytest.raises(WireError):
        wire.unpack_response(content)


def test_no_server_keeps_more_of_a_message_than_all_its_clients_ever_answered() -> None:
    """Of each 1 MB would be kept, and a reply names some hundred in 8 kB."""
    most = {1.0: wire.MOST_SPENT}
    places = range(wire.MOST_SPENT_TOGETHER // wire.MOST_SPENT)
    response = Response(1, 2, {}, frozenset(), dict.fromkeys(places, most))
    assert wire.unpack_response(wire.pack_response(response)).spent == response.spent
    more = replace(response, spent={**response.spent, len(places): {1.0: 1}})
    with pytest.raises(WireError, match="the clients of a message must have given"):
        wire.unpack_response(wire.pack_response(more))


def test_what_is_counted_twice_counts_together() -> None:
    tree, meta = checkpoints.loads(wire.pack_response(Response(1, 2, {0: {}})), "it")
    told = meta | {"spent": {"0": [[2.0, 3], [2.0, 4]]}}
    assert wire.unpack_response(checkpoints.dumps(tree, told)).spent == {0: {2.0: 7}}


@pytest.mark.parametrize("told", [{1e-6: 1}, {1e9: 1}, {1e-6: wire.MOST_SPENT}])
def test_whatever_sites_may_say_was_spent_has_an_epsilon(told: dict[float, int]) -> None:
    content = wire.pack_response(Response(1, 2, {0: {}}, frozenset(), {0: told}))
    multipliers = Counter(wire.unpack_response(content).spent[0]).elements()
    kept = {"multipliers": torch.tensor([*multipliers])}
    assert math.isfinite(spent([kept], 1e-3)["epsilon_spent"])

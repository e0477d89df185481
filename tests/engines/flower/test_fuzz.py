"""Bytes of any kind are read, or refused by the one error that parsers of the wire raise."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.flower.hostile import forged
from hyperfed.data.roster import Frame, Introduction, Member
from hyperfed.engines.calls import Call
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.wire import Request, Response, WireError
from hyperfed.training import Steps

MESSAGES_DRAWN = (30, pytest.param(680, marks=pytest.mark.slow))
SPOILT = 4
"""Copies of each that are read, too: with three kinds, more than ten thousand cases in all."""

FRAME = Frame(known=2, novel=0, shape=(5,), dtype="torch.float64", classes=3)
CALL = Call(4, 2, 0, "train_model", ({"w": torch.ones(2, 3)}, {"own": {}}), Steps(3, 4))
REQUEST = wire.pack_request(
    Request(7, 3, 9, FRAME, {0: "a"}, [CALL], {0: (3, 1)}, {0: [(3, 1)]}, [4])
)
RESPONSE = wire.pack_response(
    Response(5, 6, {0: {"w": torch.ones(2), "n": torch.tensor(1)}, 1: OSError("x")}, frozenset({0}))
)
SAID = wire._INTRODUCTION.dump_json(
    Introduction((Member("a", 3, 1, 1), Member("b", 4, 1, 1, novel=True)), (5,), "torch.uint8", 3)
)
MESSAGES = {"request": REQUEST, "response": RESPONSE, "introduction": SAID}
PARSERS: dict[str, Callable[[bytes], Any]] = {
    "request": wire.unpack_request,
    "response": wire.unpack_response,
    "introduction": wire.read_introduction,
}

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)
TENSORS = st.dictionaries(
    st.sampled_from(["0", "1", "x", "0/w", "0/n", "1/a/b", "weights", "-1", "²"]),
    st.sampled_from(
        [
            torch.ones(2),
            torch.tensor(1),
            torch.zeros(0, 3),
            torch.ones(1, 2, 2, 2).bfloat16(),
            torch.ones(1, dtype=torch.complex64),
            torch.tensor([True]),
            torch.tensor(torch.nan),
        ]
    ),
    max_size=4,
)
LAYOUTS = st.recursive(
    st.sampled_from(["contiguous", "channels_last", "other", 3, None]),
    lambda inner: st.dictionaries(st.sampled_from(["0", "1", "w", "n", "a", "x"]), inner),
    max_leaves=6,
)


def spoilt(content: bytes, rng: random.Random) -> bytes:
    """Returns a message with some bytes changed, left out or put in."""
    whole = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(whole)) if whole else 0
        kind = rng.choice(["set", "cut", "put"])
        if kind == "set" and whole:
            whole[place] = rng.randrange(256)
        elif kind == "cut":
            del whole[place : place + rng.randint(1, 64)]
        else:
            whole[place:place] = rng.randbytes(rng.randrange(17))
    return bytes(whole)


@st.composite
def altered(draw: Any, table: Any) -> Any:
    """A JSON value with something else in one place of it."""
    if isinstance(table, dict) and table and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(table)))
        return table | {key: draw(altered(table[key]))}
    if isinstance(table, list) and table and draw(st.booleans()):
        place = draw(st.integers(0, len(table) - 1))
        return [*table[:place], draw(altered(table[place])), *table[place + 1 :]]
    return draw(VALUES)


def messages(kind: str) -> st.SearchStrategy[bytes]:
    whole = MESSAGES[kind]
    said = {"introduction": SAID}.get(kind)
    if said is not None:
        return st.binary() | st.just(whole) | altered(json.loads(said)).map(_as_json)
    _, meta = wire.loads(whole, kind)
    tree, _ = wire.loads(whole, kind)
    metas = altered(meta) | VALUES
    return (
        st.binary()
        | st.just(whole)
        | metas.map(lambda changed: wire.dumps(tree, changed))  # of what is a message but for that
        | st.builds(forged, LAYOUTS, metas, TENSORS)
    )


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("drawn", MESSAGES_DRAWN)
@pytest.mark.parametrize("kind", MESSAGES)
def test_whatever_comes_is_a_message_or_refused(kind: str, drawn: int) -> None:
    parse, refused = PARSERS[kind], list[str]()

    @settings(
        max_examples=drawn,
        deadline=None,
        database=None,
        derandomize=drawn < 100,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(messages(kind), st.integers(0, 2**32))
    def check(content: bytes, seed: int) -> None:
        rng = random.Random(seed)
        for case in (content, *(spoilt(content, rng) for _ in range(SPOILT))):
            try:
                parse(case)
            except WireError as error:
                refused.append(str(error))

    check()
    assert refused
    assert all("\n" not in said for said in refused)


def test_what_was_sent_is_no_more_than_read() -> None:
    for kind, parse in PARSERS.items():
        parse(MESSAGES[kind])

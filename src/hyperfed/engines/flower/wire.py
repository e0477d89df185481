"""Calls and answers as bytes: one message to a site holds all that its clients are asked.

A message is a safetensors file (:mod:`hyperfed.trees.checkpoints`), so nothing in it can run code:
the tensors, and a header of plain JSON that is validated on arrival. A tree that goes to several
clients alike travels once.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as validated

from hyperfed.data.roster import Frame, Introduction, check_introduction, first_of, plain
from hyperfed.engines.calls import Call
from hyperfed.engines.replies import BadReplyError, DivergedError
from hyperfed.errors import LONGEST, SpentError, UserError, one_line
from hyperfed.system.version import VERSION
from hyperfed.training import Batches, Epochs, Steps, UnlabelledError
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import dumps, loads

_PLAIN = ConfigDict(extra="forbid", strict=True)

Version = tuple[int, int]
"""A committed memory of a client: (session of the server, number of the cohort)."""


class SiteError(Exception):
    """What a client raised at its site, in words."""


class WireError(UserError):
    """What came over the network is none of our messages. Every parser of one raises this alone."""


_RAISED: Mapping[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (UserError, SpentError, UnlabelledError, BadReplyError, DivergedError, SiteError)
}
"""Errors that mean something to the server; all others become a :class:`SiteError`."""

_PLACE = re.compile("[0-9]{1,9}")
"""The place of a call, by which its reply is named."""

MOST_INTRODUCED = 1 << 25
"""Bytes of an introduction: some hundred to a client."""

MOST_SPENT = 1 << 17
"""Answers with noise that a client ever gave."""

MOST_SPENT_TOGETHER = 1 << 22
"""The same of all that a message calls, whose list a server keeps: 32 MB."""

_Multiplier = Annotated[FiniteFloat, Field(ge=1e-6, le=1e9)]
"""Of noise: what is beyond that hides nothing or is nothing else, and its square no number."""

_BATCHES: Mapping[str, Callable[[int, int], Batches]] = {"Steps": Steps, "Epochs": Epochs}


@dataclass(frozen=True)
class Request:
    """What a server sends to a site.

    Attributes:
        run: number of the run at the sites.
        session: when the server's process began to ask; a later process has a larger number.
        serial: number of the message in its session; one that is repeated keeps it.
        frame: what the site must know of the whole.
        names: number -> name of each client that is called.
        calls: one for each client of a cohort.
        begin: client -> the version of its memory that its cohort begins with; absent for none.
        keep: client -> versions that may be asked for again. A site may drop all others.
        open: numbers of the cohorts that may still be asked.
        frozen: a hash of what is frozen in the targets; empty where nothing is.
        weights: {size: what is frozen}; {} where the site has had it.
        multiplier: the noise's standard deviation over the sensitivity, where clients train
            privately. What they spend is counted by what it is.
    """

    run: int
    session: int
    serial: int
    frame: Frame
    names: Mapping[int, str]
    calls: Sequence[Call]
    begin: Mapping[int, Version]
    keep: Mapping[int, Sequence[Version]]
    open: Sequence[int]
    frozen: str = ""
    weights: Tree = field(default_factory=dict)
    multiplier: float | None = None


@dataclass(frozen=True)
class Response:
    """What a site answers: to each call a reply or what it raised.

    Attributes:
        session: that of the request.
        serial: that of the request.
        answers: place of the call in the request -> reply or exception.
        remembers: places of the calls after which their client has a memory.
        spent: place of the call -> {noise multiplier: how many answers its client has ever let out
            with it}, where that is anything; they tell nothing of its data.
    """

    session: int
    serial: int
    answers: Mapping[int, Tree | Exception]
    remembers: frozenset[int] = frozenset()
    spent: Mapping[int, Mapping[float, int]] = field(default_factory=dict)


@validated(frozen=True, config=_PLAIN)
class _Call:
    """A call without its payload, which is named by number."""

    cohort: NonNegativeInt
    round: NonNegativeInt
    client: NonNegativeInt
    step: str
    payload: list[NonNegativeInt]
    batches: tuple[Literal["Steps", "Epochs"], NonNegativeInt, PositiveInt] | None
    turn: NonNegativeInt
    masked: bool = False


@validated(frozen=True, config=_PLAIN)
class _Request:
    run: int
    session: int
    serial: int
    frame: Frame
    names: dict[int, str]
    calls: Annotated[list[_Call], Field(min_length=1)]
    begin: dict[int, Version]
    keep: dict[int, list[Version]]
    open: list[int]
    frozen: Annotated[str, Field(pattern="^[0-9a-f]{0,32}$")]
    multiplier: _Multiplier | None = None


@validated(frozen=True, config=_PLAIN)
class _Response:
    session: int
    serial: int
    errors: dict[int, tuple[str, str]]
    remembers: list[int]
    spent: dict[int, list[tuple[_Multiplier, PositiveInt]]] = Field(default_factory=dict)


_WEIGHTS = "weights"
"""Where in a request the frozen weights are, beside the numbers of payloads."""

_REQUEST, _RESPONSE = TypeAdapter(_Request), TypeAdapter(_Response)
_INTRODUCTION = TypeAdapter(Introduction)


def pack_request(request: Request) -> bytes:
    """Returns a request as bytes."""
    different: dict[int, Tree] = {}  # by identity: one tree may go to many clients
    for call in request.calls:
        different |= {id(tree): tree for tree in call.payload}
    place = {identity: number for number, identity in enumerate(different)}
    calls = [
        {
            "cohort": call.cohort,
            "round": call.round,
            "client": call.client,
            "step": call.step,
            "payload": [place[id(tree)] for tree in call.payload],
            "batches": _batches(call),
            "turn": call.turn,
            "masked": call.masked,
        }
        for call in request.calls
    ]
    meta = {
        "run": request.run,
        "session": request.session,
        "serial": request.serial,
        "frame": plain(request.frame),
        "names": {str(client): name for client, name in request.names.items()},
        "calls": calls,
        "begin": {str(client): list(version) for client, version in request.begin.items()},
        "keep": {str(client): list(map(list, kept)) for client, kept in request.keep.items()},
        "open": list(request.open),
        "frozen": request.frozen,
        "multiplier": request.multiplier,
    }
    tree = {str(number): tree for number, tree in enumerate(different.values())}
    return dumps(tree | {_WEIGHTS: request.weights}, meta)


def unpack_request(content: bytes) -> Request:
    """Reads what :func:`pack_request` returned.

    Raises:
        WireError: the bytes are no request, or one that contradicts itself.
    """
    tree, found = _read(_REQUEST, content, "a request")
    if any(str(number) not in tree for call in found.calls for number in call.payload):
        raise WireError("a request must hold the trees that its calls name; ask for it again")
    if not {call.client for call in found.calls} <= set(found.names):
        raise WireError("a request must name the clients that it calls; ask for it again")
    if not all(isinstance(each, dict) for each in tree.values()):
        raise WireError("a request must hold trees and nothing else; ask for it again")
    calls = [
        Call(
            call.cohort,
            call.round,
            call.client,
            call.step,
            tuple(tree[str(number)] for number in call.payload),
            None if call.batches is None else _BATCHES[call.batches[0]](*call.batches[1:]),
            call.turn,
            masked=call.masked,
        )
        for call in found.calls
    ]
    return Request(**{**vars(found), "calls": calls}, weights=tree.get(_WEIGHTS, {}))


def pack_response(response: Response) -> bytes:
    """Returns a response as bytes."""
    replies = {
        str(place): answer
        for place, answer in response.answers.items()
        if not isinstance(answer, Exception)
    }
    errors = {
        str(place): [type(answer).__name__, str(answer)[:LONGEST]]
        for place, answer in response.answers.items()
        if isinstance(answer, Exception)
    }
    meta = {
        "session": response.session,
        "serial": response.serial,
        "errors": errors,
        "remembers": sorted(response.remembers),
        # How often each, so that it is no longer where a client has answered for years.
        "spent": {
            str(place): list(map(list, told.items())) for place, told in response.spent.items()
        },
    }
    return dumps(replies, meta)


def unpack_response(content: bytes) -> Response:
    """Reads what :func:`pack_response` returned.

    Raises:
        WireError: the bytes are no response, or one of more answers with noise than anybody gave.
    """
    tree, found = _read(_RESPONSE, content, "a reply")
    if not all(_PLACE.fullmatch(name) and isinstance(each, dict) for name, each in tree.items()):
        raise WireError("a reply must hold one tree for each call; ask for it again")
    answers: dict[int, Tree | Exception] = {int(name): reply for name, reply in tree.items()}
    answers |= {place: _raised(*error) for place, error in found.errors.items()}
    spent = {place: _counted(told) for place, told in found.spent.items()}
    times = [sum(told.values()) for told in spent.values()]
    for most, came, who in (
        (MOST_SPENT, max(times, default=0), "a client"),
        (MOST_SPENT_TOGETHER, sum(times), "the clients of a message"),
    ):
        if came > most:
            raise WireError(f"{who} must have given {most} answers with noise at most")
    remembers = frozenset(found.remembers)
    return Response(found.session, found.serial, answers, remembers, spent)


def read_introduction(content: bytes) -> Introduction:
    """Reads what a site says of itself.

    Raises:
        WireError: the bytes are no introduction, or one of what no site has, or of another version.
    """
    if len(content) > MOST_INTRODUCED:
        raise WireError(
            f"an introduction must have {MOST_INTRODUCED} bytes at most, but has {len(content)}; "
            "let a node have fewer clients"
        )
    try:
        said: Introduction = _INTRODUCTION.validate_json(content)
    except ValidationError as error:
        raise WireError(
            f"an introduction must be one of hyperfed {VERSION}, but {first_of(error)}"
        ) from error
    if said.version != VERSION:
        raise WireError(
            f"a site must have the server's hyperfed, {VERSION}, or it would compute and read "
            f"messages otherwise, but has {one_line(said.version, 64)}; install that there"
        )
    problems: list[str] = []
    check_introduction(said, problems)
    if problems:
        raise WireError(f"an introduction must be possible, but {'; '.join(problems)}")
    return said


def _read(adapter: TypeAdapter[Any], content: bytes, what: str) -> tuple[Tree, Any]:
    try:
        tree, meta = loads(content, what)
        # Strict, but keys of JSON are strings and its lists tuples.
        return tree, adapter.validate_json(json.dumps(meta), strict=True)
    except ValidationError as error:
        raise WireError(
            f"the header of {what} must be of this version of hyperfed, but {first_of(error)}; "
            "install the same one everywhere"
        ) from error
    except UserError as error:
        raise WireError(str(error)) from error


def _counted(told: Sequence[tuple[float, int]]) -> Mapping[float, int]:
    """Returns {value: how often} of pairs of them."""
    counts: Counter[float] = Counter()
    for value, times in told:
        counts[value] += times
    return counts


def _batches(call: Call) -> list[str | int] | None:
    if call.batches is None:
        return None
    return [type(call.batches).__name__, call.batches.count, call.batches.size]


def _raised(kind: str, text: str) -> Exception:
    known = _RAISED.get(kind)
    text = one_line(text)
    return SiteError(f"{one_line(kind, 100)}: {text}") if known is None else known(text)

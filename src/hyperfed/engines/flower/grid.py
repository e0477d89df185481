"""The way to sites through Flower. flwr is imported where it is used, since it is an extra."""

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperfed.engines.flower.sites import pause
from hyperfed.engines.replies import BadReplyError, NoAnswerError

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

ERRORS: Mapping[int, str] = {
    1: "it could not load the app; install the same hyperfed there",
    2: "its app failed",
    3: "the message expired",
    4: "its reply expired",
    5: "it is not connected any more",
    7: "it refused the app's bundle",
    8: "its process crashed; was it killed, or out of memory?",
}
"""What the error codes of Flower mean at a site."""

WHOLE = 1 << 20
"""Bytes up to which a message travels in one piece."""

PAUSE = 0.05
"""Seconds until the second look for a part of a message that is still on its way."""


def hurry() -> None:
    """Has Flower look again at once for a part of a message that is still on its way.

    A reply is announced before its parts are sent. Flower's own first pause is a second, which is
    longer than all else in an exchange.
    """
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.superlink.grid import http_grid

    quick = partial(inflatable_utils.pull_objects, initial_backoff=PAUSE)
    http_grid.pull_objects = quick  # type: ignore[attr-defined]


class GridLink:
    """The way through a Flower ``Grid``.

    Args:
        grid: that of the ServerApp.
    """

    def __init__(self, grid: "Grid") -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """Returns the ids of the connected SuperNodes."""
        return sorted(self._grid.get_node_ids())

    def exchange(
        self, kind: str, contents: Mapping[int, bytes], timeout: float
    ) -> dict[int, bytes | Exception]:
        """Sends a message to each node; replies are known by the message that they answer."""
        from flwr.app import Message

        answers: dict[int, bytes | Exception] = {}
        messages = [
            Message(record_of(content), node, kind, ttl=timeout)
            for node, content in contents.items()
        ]
        waiting: dict[str, int] = {}
        # Flower gives None for a message, or nothing at all, where it could not be sent.
        sent: list[str | None] = [*self._grid.push_messages(messages)] or [None] * len(messages)
        for node, identity in zip(contents, sent, strict=True):
            if identity:
                waiting[identity] = node
            else:
                answers[node] = NoAnswerError("the message could not be sent to its site")
        begin = time.monotonic()
        while waiting and time.monotonic() < begin + timeout:
            for reply in self._grid.pull_messages(list(waiting)):
                replied_to = reply.metadata.reply_to_message_id
                if replied_to in waiting:
                    answers[waiting.pop(replied_to)] = _content(reply)
            if waiting:
                time.sleep(pause(time.monotonic() - begin))
        for node in waiting.values():
            answers[node] = NoAnswerError(f"its site did not answer within {timeout:g} s")
        return answers


def record_of(content: bytes) -> Any:
    """Returns bytes as the content of a Flower message."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    # Each part of a message is a request more: few bytes travel in one. Of many, Flower makes an
    # array in pieces.
    if len(content) <= WHOLE:
        return RecordDict({"hyperfed": ConfigRecord({"content": content})})
    return RecordDict({"hyperfed": ArrayRecord([np.frombuffer(content, dtype=np.uint8)])})


def bytes_of(record: Any) -> bytes:
    """Returns what :func:`record_of` was given.

    Raises:
        BadReplyError: the record is another one.
    """
    try:
        (entry,) = record.values()
        if "content" in entry:
            whole = entry["content"]
            if not isinstance(whole, bytes):  # of a number, bytes() would make as many zeros
                raise TypeError(f"its content is of type {type(whole).__name__}")
            return whole
        (array,) = entry.to_numpy_ndarrays()
        content: bytes = array.tobytes()
    except Exception as error:  # whatever a site made of it
        raise BadReplyError(f"a message must hold one array of bytes ({error})") from error
    return content


def _content(reply: "Message") -> bytes | Exception:
    if reply.has_error():
        why = ERRORS.get(reply.error.code, f"unknown error {reply.error.code}")
        return NoAnswerError(f"its site did not answer: {why}")
    try:
        return bytes_of(reply.content)
    except BadReplyError as error:
        return error

"""The way to sites through Flower. flwr is imported where it is used, since it is an extra."""

import base64
import hashlib
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyperfed.engines.flower.sites import pause
from hyperfed.engines.flower.wire import WireError
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import one_line

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
        keyed: the nodes' keys mean something: a node of a SuperLink that does not encrypt makes
            itself a new one whenever it starts.
    """

    def __init__(self, grid: "Grid", *, keyed: bool = True) -> None:
        self._grid, self._keyed = grid, keyed

    def nodes(self) -> dict[int, str]:
        """Returns the connected SuperNodes, in the order of their registration: {id: key}."""
        found = sorted(self._grid.get_nodes(), key=lambda one: (one.registered_at, one.node_id))
        return {one.node_id: fingerprint(one.public_key) if self._keyed else "" for one in found}

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


def fingerprint(public_key: bytes) -> str:
    """Returns how ``ssh-keygen -lf`` calls a public key; empty where there is none.

    Args:
        public_key: in PEM, as Flower has it, or as an OpenSSH file has it.

    Raises:
        ValueError: it is no such key.
    """
    from cryptography.hazmat.primitives import serialization as forms

    if not public_key:
        return ""
    read = forms.load_pem_public_key
    if not public_key.startswith(b"-----"):
        read = forms.load_ssh_public_key
    line = read(public_key).public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


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
        WireError: the record is another one.
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
        why = one_line(str(error))
        raise WireError(f"a message must hold one array of bytes ({why})") from error
    return content


def _content(reply: "Message") -> bytes | Exception:
    if reply.has_error():
        why = ERRORS.get(reply.error.code, f"unknown error {reply.error.code}")
        return NoAnswerError(f"its site did not answer: {why}")
    try:
        return bytes_of(reply.content)
    except WireError as error:
        return error

"""The way to sites through Flower. flwr is imported where it is used, since it is an extra."""

import base64
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    3: "the message expired, or its reply never came whole or is too large",
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

LONGEST_PAUSE = 1.0
"""Seconds between two such looks, at most."""

FRAMING = 1 << 16
"""Bytes that Flower may add to a reply, beside a sixteenth of it."""

GRACE = 30.0
"""Seconds that a SuperLink keeps a message for when the last look for its reply must be over."""


@contextmanager
def bounded(wait: float, limit: float, most: int | None) -> Iterator[None]:
    """Bounds what Flower does meanwhile to have all parts of a reply.

    A reply is announced before its parts are sent. Flower waits for two hours for a part that is
    not there, and takes any number of bytes. It looks for one again after a second, which is longer
    than all else in an exchange, and here at once.

    Args:
        wait: seconds, for parts that are not there yet.
        limit: seconds for all parts together.
        most: bytes that the reply may have; None for any number.
    """
    from flwr.supercore.inflatable import inflatable_utils
    from flwr.superlink.grid import http_grid

    def pull(object_ids: list[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
        came: list[int] = []
        begin = time.monotonic()

        def part(name: str) -> bytes:
            if time.monotonic() > begin + limit:
                raise inflatable_utils.ObjectPullError(name, "the reply takes too long")
            content = pull_object_fn(name)
            came.append(len(content))
            if most is not None and sum(came) > most + most // 16 + FRAMING:
                raise inflatable_utils.ObjectPullError(name, "the reply is too large")
            return content

        return inflatable_utils.pull_objects(
            object_ids,
            part,
            max_time=max(wait, 0),
            max_tries_per_object=None,
            initial_backoff=PAUSE,
            backoff_cap=LONGEST_PAUSE,
        )

    module: Any = http_grid
    usual = module.pull_objects
    module.pull_objects = pull
    try:
        yield
    finally:
        module.pull_objects = usual


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
        self,
        kind: str,
        contents: Mapping[int, bytes],
        timeout: float,
        most: Mapping[int, int],
    ) -> dict[int, bytes | Exception]:
        """Sends each node a message and waits for the replies, each of which is read by itself.

        So no site can spoil what another answers, nor answer in its place.
        """
        from flwr.app import Message

        answers: dict[int, bytes | Exception] = {}
        messages = [
            Message(record_of(content), node, kind, ttl=2 * timeout + GRACE)
            for node, content in contents.items()
        ]
        waiting: dict[int, str] = {}
        # Flower gives None for a message, or nothing at all, where it could not be sent.
        sent: list[str | None] = [*self._grid.push_messages(messages)] or [None] * len(messages)
        for node, identity in zip(contents, sent, strict=True):
            if identity:
                waiting[node] = identity
            else:
                answers[node] = NoAnswerError("the message could not be sent to its site")
        begin = time.monotonic()
        end = begin + timeout
        in_time = True
        # Once more when the time is over: who has answered need not lose by another's slow parts.
        # That takes no longer than the time itself, of which each has a share.
        share = timeout / max(len(waiting), 1)
        while waiting and in_time:
            look = time.monotonic()
            in_time = look < end
            for node, identity in list(waiting.items()):
                left = end - time.monotonic()
                with bounded(left, max(left, share), most.get(node)):
                    answer = self._answer(identity)
                if answer is not None:
                    answers[node] = answer
                    del waiting[node]
            if waiting and in_time:
                # Whose looks take long, of many sites, looks half of the time at most.
                now = time.monotonic()
                time.sleep(max(min(max(pause(now - begin), now - look), end - now), 0))
        for node in waiting:
            answers[node] = NoAnswerError(f"its site did not answer within {timeout:g} s")
        return answers

    def _answer(self, identity: str) -> bytes | Exception | None:
        """Returns what answers a message, or None as long as nothing does."""
        from httpx import HTTPError

        try:
            for reply in self._grid.pull_messages([identity]):
                if reply.metadata.reply_to_message_id == identity:
                    return _content(reply)
        except HTTPError:  # the SuperLink is lost, which no site can bring about
            raise
        except Exception as error:  # of bytes that are no message at all
            return WireError(f"it is no message of Flower ({one_line(repr(error))})")
        return None


def fingerprint(public_key: bytes) -> str:
    """Returns how ``ssh-keygen -lf`` calls a public key; empty where there is none.

    One on a curve that OpenSSH has no name for, with which a node can come to a SuperLink that
    authenticates none, is called by its DER form.

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
    key = read(public_key)
    try:
        line = key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)
        blob = base64.b64decode(line.split()[1])
    except ValueError:
        blob = key.public_bytes(forms.Encoding.DER, forms.PublicFormat.SubjectPublicKeyInfo)
    return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


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

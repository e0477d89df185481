"""``hyperfed node --superlink``: the process of a site, whose messages cost it a fork each.

It stands for flower-supernode, flower-superexec and flwr-clientapp, speaks Flower's protocol by
Flower's own functions, and answers in the processes of an
:class:`~hyperfed.apps.flower.executor.Executor`. The only code that runs is what is installed here:
of the bundle that a run brings, only the settings are read.
"""

import ssl
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.common.config import flatten_dict, fuse_dicts
from flwr.common.constant import ErrorCode
from flwr.supercore.address import parse_address
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from hyperfed.apps.flower.app import NodeConfig, respond_within
from hyperfed.apps.flower.executor import CrashedError, Executor, FailedError, warm
from hyperfed.engines.flower.diary import REFUSED, Diary
from hyperfed.engines.flower.grid import PAUSE, bytes_of, record_of
from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.engines.flower.sites import pause
from hyperfed.engines.flower.store import clean, make_private
from hyperfed.engines.flower.wire import WireError
from hyperfed.errors import LONGEST, UserError, one_line
from hyperfed.system.hosts import is_loopback
from hyperfed.system.signals import terminable

FRAMES = 1 << 20
"""Bytes that Flower puts around a message, at most."""

PATIENCE = 600.0
"""Seconds after which no part of a message is waited for. It is announced before they are sent, and
meanwhile nobody else is answered; Flower waits for two hours."""

RUNS = 8
"""Runs whose settings are kept; those of another are asked for again."""

QUOTE_NOTHING = (RefusedError.__name__, WireError.__name__)
"""Errors of a call that are told in whole: they repeat what a server sent, and none of the data."""

LARGEST_SETTINGS = 1 << 20
"""Bytes that the settings in a bundle may have."""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink that sends messages, and how a node and it know each other.

    Attributes:
        address: host:port.
        root_certificates: what it is known by, PEM; the system's where None.
        key: what the node is known by; a new one, which only a SuperLink without authentication
            takes, where None.
        insecure: nothing is encrypted, and nobody known; it is on this host.
    """

    address: str
    root_certificates: bytes | None = None
    key: ec.EllipticCurvePrivateKey | None = None
    insecure: bool = False

    @classmethod
    def of(
        cls, address: str, root_certificates: Path | None, key: Path | None, *, insecure: bool
    ) -> "SuperLink":
        """Reads the files of a connection.

        Raises:
            UserError: one of them is missing or no such file, the address is none, or encryption is
                both wanted and not, or not wanted on the way to another host.
        """
        parsed = parse_address(address)
        if parsed is None or not parsed[0]:
            raise UserError(
                f"--superlink must be HOST:PORT, such as fl.example.org:8443, got {address}"
            )
        host, port, is_v6 = parsed
        place = f"[{host}]:{port}" if is_v6 else f"{host}:{port}"
        if insecure and not is_loopback(host):
            raise UserError(
                f"--insecure must be left out where the SuperLink is on another host, got {host}: "
                "all that is said would be read and changed on the way; have it encrypt, and give "
                "--root-certificates and --key"
            )
        if insecure and (root_certificates or key):
            raise UserError(
                "--insecure must be without --root-certificates and --key, which need encryption; "
                "leave it out, or them"
            )
        return cls(
            place,
            None if root_certificates is None else _certificates(root_certificates),
            None if key is None else _key(key),
            insecure,
        )


def _certificates(path: Path) -> bytes:
    content = _read(path, "--root-certificates")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError) as error:
        raise UserError(
            f"--root-certificates must hold certificates in PEM, but {path} does not ({error}); "
            "take the authority's, such as ca.crt"
        ) from error
    return content


def _key(path: Path) -> ec.EllipticCurvePrivateKey:
    content, key, why = _read(path, "--key"), None, ""
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = f" ({error})"
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"--key must be an elliptic curve's private key without a passphrase, but {path} is "
            f'not{why}; make one with: ssh-keygen -t ecdsa -b 384 -N "" -f node'
        )
    return key


def _read(path: Path, option: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise UserError(
            f"{option} must be a file that can be read, but {path} is not ({error.strerror})"
        ) from error


def serve(superlink: SuperLink, node: NodeConfig, say: Callable[[str], None]) -> None:
    """Answers the messages of a SuperLink until SIGTERM or SIGINT.

    While the SuperLink cannot be reached, it is tried again and again.

    Args:
        superlink: whose.
        node: what is at this site.
        say: told what happens.

    Raises:
        UserError: the SuperLink refuses the node.
    """
    failure: Exception | None = None
    executor = Executor(respond_within, lasting=node.device != "cpu")
    keys = None if superlink.key is None else (superlink.key, superlink.key.public_key())
    try:
        with (
            terminable(),
            closing(executor),
            http_request_response(
                superlink.address, superlink.insecure, superlink.root_certificates, keys
            ) as connection,
        ):
            warm()  # not before, since a node that is refused ends at once
            try:
                Node(connection, executor, node, say).run()
            except Exception as error:  # which the connection would log and forget
                failure = error
    except KeyboardInterrupt as end:
        # Flower ends the process that the SuperLink does not know by SIGINT.
        if isinstance(end.__context__, httpx.HTTPStatusError):
            raise _refused(superlink, "not authenticated") from end.__context__
        say("stopped")
    except SystemExit as end:  # Flower has said why
        raise _refused(superlink, "the reason stands above") from end
    if failure is not None:
        raise failure


def _refused(superlink: SuperLink, why: str) -> UserError:
    return UserError(
        f"the SuperLink at {superlink.address} must take this node, but refuses it ({why}); "
        "register its key (flwr supernode register), see that --root-certificates are the "
        "SuperLink's and that the clock is right; after a kill, start again when the last "
        "connection has expired, in a minute"
    )


def defaults_in(bundle: bytes) -> dict[str, Any]:
    """Returns the settings that a bundle brings, which a run may override.

    A kilobyte can be the compressed form of a gigabyte, whatever size it says, and who reads it
    is the process that serves all messages.

    Raises:
        ValueError: they are too large, or it is no bundle.
    """
    with ZipFile(BytesIO(bundle)) as archive:
        entry = archive.getinfo("pyproject.toml")
        if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # others unpack without an end
            raise ValueError("settings must be stored or deflated")
        with archive.open(entry) as file:
            content = file.read(LARGEST_SETTINGS + 1)
    if len(content) > LARGEST_SETTINGS:
        raise ValueError(f"settings must have {LARGEST_SETTINGS} bytes at most")
    app: dict[str, Any] = tomllib.loads(content.decode())["tool"]["flwr"]["app"]
    return dict(app.get("config", {}))


class Node:
    """Answers messages, one after another.

    Args:
        connection: what Flower's connection to a SuperLink is made of.
        executor: of :func:`hyperfed.apps.flower.app.respond_within`.
        node: what is at this site.
        say: told what happens.
    """

    def __init__(
        self,
        connection: tuple[Any, ...],
        executor: Executor,
        node: NodeConfig,
        say: Callable[[str], None],
    ) -> None:
        number, self._receive, self._send, get_run, get_fab, *objects = connection
        self._pull, self._push, self._confirm = objects
        self._executor, self._log, self._allowed = executor, say, node.allowed
        self._state = Path(node.state)
        self._config = {name: value for name, value in asdict(node).items() if value is not None}

        def settings(run_id: int) -> Mapping[str, Any]:
            run = get_run(run_id)
            defaults = defaults_in(get_fab(run.fab_hash, run_id).content)
            fused: Mapping[str, Any] = fuse_dicts(flatten_dict(defaults), run.override_config)
            return fused

        self._settings = lru_cache(RUNS)(settings)
        say(f"connected as node {number}")

    def _say(self, text: str) -> None:
        """Tells what may repeat words of a server."""
        self._log(one_line(text))

    def run(self) -> None:
        """Answers messages for good, and asks for the next one the later the longer none came."""
        last = time.monotonic()
        while True:
            try:
                if (came := self._receive()) is None:
                    time.sleep(pause(time.monotonic() - last))
                    continue
                self._answer(*came)
            except RunNotRunningException:
                self._say("the run ended before its message was answered")
            last = time.monotonic()

    def _answer(self, announced: Message, tree: Any) -> None:
        """Fetches a message that is announced without its content, and sends the reply."""
        run, begin = announced.metadata.run_id, time.monotonic()
        try:
            try:
                reply = self._reply(self._fetched(run, tree))
            except UserError as error:  # no policy is there, too
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                reply = self._failed(announced, code, f"{type(error).__name__}: {error}")
            seconds = time.monotonic() - begin
            reply.metadata.__dict__["_message_id"] = reply.object_id
            with no_object_id_recompute():
                wanted, session = self._send(reply, get_object_tree(reply), seconds)
                push_objects(
                    get_all_nested_objects(reply),
                    partial(self._push, run, session),
                    object_ids_to_push=wanted,
                )
        except Exception as error:  # the server waits for an answer until it has waited enough
            self._say(f"run {run}: a message was lost: {type(error).__name__}: {error}")
        else:
            self._say(f"run {run}: {announced.metadata.message_type} took {seconds:.2f} s")

    def _fetched(self, run: int, tree: Any) -> Message:
        """Fetches the parts of a message.

        Raises:
            UserError: they are larger together than the site's policy allows, and the rest is
                left; or there is no policy, or a part did not come.
        """
        policy, alone, fetched = self._allowed(), Lock(), 0

        def pull(name: str) -> bytes:
            nonlocal fetched
            part: bytes = self._pull(run, name)
            with alone:  # several at once
                fetched += len(part)
                policy.check_size(fetched - FRAMES)
            return part

        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                pull,
                partial(self._confirm, run),
                return_type=Message,
                max_time=PATIENCE,
                max_tries_per_object=None,
                initial_backoff=PAUSE,
            )
        except ObjectPullError as error:
            raise UserError(
                f"all parts of a message must come within {PATIENCE:g} s, but one did not; see "
                "whether its server is there"
            ) from error
        message.metadata.__dict__["_message_id"] = tree.object_id  # which its bytes lack
        return message

    def _reply(self, message: Message) -> Message:
        try:
            settings = self._settings(message.metadata.run_id)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return self._failed(message, ErrorCode.INVALID_FAB, why)
        try:
            kind, content = message.metadata.message_type, bytes_of(message.content)
            answer = self._executor.call(kind, content, settings, self._config)
        except FailedError as error:
            return self._failed(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error))
        except CrashedError as error:
            clean(self._state)  # no other process works with it
            return self._failed(message, ErrorCode.CLIENT_APP_CRASHED, str(error))
        return Message(record_of(answer), reply_to=message)

    def _failed(self, message: Message, code: int, why: str) -> Message:
        """Returns the reply to a message that has no other, and says so here."""
        run, kind = message.metadata.run_id, message.metadata.message_type
        self._say(f"run {run}: {kind} failed: {why}")
        self._note(run, kind, why)
        raised, _, _ = why.partition(":")
        if code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and raised not in QUOTE_NOTHING:
            why = f"{raised}: its node's log says more"  # such as a row of the data
        return Message(Error(code, why[:LONGEST]), reply_to=message)

    def _note(self, run: int, kind: str, why: str) -> None:
        """Writes into the site's audit log why a message has no other reply, if that can be."""
        refusal = RefusedError.__name__
        decision = REFUSED + why.removeprefix(refusal) if why.startswith(refusal) else why
        try:
            make_private(self._state)
            diary = Diary(self._state, self._policy())
            diary.note(run=run, kind=one_line(kind), decision=one_line(decision))
        except (OSError, UserError) as error:
            self._say(f"run {run}: this is not in the audit log: {error}")

    def _policy(self) -> Policy:
        """Returns what a server may do here; the strict default where nothing can be read of it."""
        try:
            return self._allowed()
        except UserError:
            return Policy()

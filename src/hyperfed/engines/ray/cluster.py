"""The way to a Ray cluster: one on this machine alone, or one that runs already.

A cluster that is started here lives for the engines of this process. It listens on this machine's
loopback address only, has no dashboard and reports nothing to anybody. From version 2.59 on, Ray
also has it ask for a token, which it keeps in the user's home; one that runs elsewhere may do so
too, and is told the token only where the user has set RAY_AUTH_MODE=token.
"""

import ipaddress
import logging
import os
import socket
import weakref
from typing import Any

from hyperfed.errors import UserError
from hyperfed.system.extras import how_to_install

LOOPBACK = "127.0.0.1"
REACHABLE_SECONDS = 5.0
"""How long a cluster's address may take to accept a connection. Ray itself tries for minutes."""

HEAD_SECONDS = 10
"""How long the head of a cluster started here may be out of reach before Ray ends this process. It
is a process of this machine, which nobody starts anew; for one elsewhere Ray has a minute."""


class Connection:
    """This process's connection to a cluster. Ray has one, so the engines of a process share it.

    Args:
        ray: the library.
        ours: it was made for engines: it ends with the last of them, and so does a cluster that was
            started for it. One that the user made stays.
        started: the cluster was started for engines of this process and has no other user.
    """

    def __init__(self, ray: Any, *, ours: bool, started: bool = False) -> None:
        self.ray, self.started = ray, started
        if ours:
            self._end = weakref.finalize(self, ray.shutdown)
            _OURS.add(self)

    def disown(self) -> None:
        """Has the connection outlive this object."""
        self._end.detach()
        _OURS.discard(self)


_OURS: "weakref.WeakSet[Connection]" = weakref.WeakSet()
"""The connection that engines made, where there is one: as Ray's own, it is the process's."""


def connect(address: str | None = None) -> Connection:
    """Connects this process to a cluster, or shares the connection that it has.

    Args:
        address: ``host:port`` of the cluster's head, or ``auto`` for the one that runs on this
            machine. None for the cluster that this process is connected to and, where there is
            none, a new one on this machine.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """
    ray = library()
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise UserError(
                f"engine.address must be that of the cluster this process is connected to, {here}, "
                f"came {address}; leave it out, or call ray.shutdown() first"
            )
        return next(iter(_OURS), None) or Connection(ray, ours=False)
    for ended in list(_OURS):  # somebody called ray.shutdown()
        ended.disown()
    if address is None:
        _start(ray)
    else:
        _join(ray, address)
    return Connection(ray, ours=True, started=address is None)


def library() -> Any:
    """Returns the library ``ray``, imported as an engine needs it.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reads this once, when it is imported. What it does, on every system, is to let a cluster
    # of one machine have the loopback address, which _node_ip_address alone does not get it.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(
            f"engine=ray must find the library Ray, which is not installed; {how_to_install('ray')}"
        ) from error
    return ray


def _start(ray: Any) -> None:
    """Starts a cluster on this machine."""
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        raise UserError(
            "a cluster started here must listen on this machine's loopback address only, but Ray "
            "was imported before it could be told; set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 in the "
            "environment, or call ray.init() yourself to have its ports open to the network"
        )
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(HEAD_SECONDS))
    try:
        ray.init(
            address="local",  # whatever RAY_ADDRESS says
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
        )
    except Exception as error:  # Ray's are of no class of their own
        raise UserError(
            f"Ray must be able to start a cluster on this machine, but did not ({error}); try "
            "again when it is less busy, or use engine=loop"
        ) from error


def _join(ray: Any, address: str) -> None:
    """Connects to a cluster that runs."""
    wrong = "engine.address must be host:port of a Ray cluster's head, or auto, on a machine of it"
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            raise UserError(f"{wrong}; came {address}")
        try:
            socket.create_connection((host, int(port)), REACHABLE_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise UserError(f"{wrong}; nothing answers at {address} ({error})") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise UserError(
            f"{wrong}; at {address}: {error}. A cluster that asks for a token is joined with "
            "RAY_AUTH_MODE=token in the environment"
        ) from error

"""``hyperfed superexec``: starts the ServerApps of a SuperLink, each by a fork.

It stands for flower-superexec, beside ``flower-superlink --isolation process``, and runs what
flwr-serverapp does in a process that has imported all it needs.
"""

import os
import time
from collections.abc import Callable
from queue import Queue

from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.logger import mirror_output_to_queue
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.runtime import run_serverapp

from hyperfed.apps.flower.executor import fork, warm
from hyperfed.apps.flower.node import SuperLink
from hyperfed.system.signals import terminable

POLL = 1.0
"""Seconds between two questions for a run that is to be started."""


def serve(superlink: SuperLink, say: Callable[[str], None]) -> None:
    """Starts what is to be run until SIGTERM or SIGINT, which end that too.

    While the SuperLink cannot be reached, it is tried again and again.

    Args:
        superlink: whose runs.
        say: told what happens.

    Raises:
        CrashedError: no process can be started.
    """
    warm()
    with (
        terminable(),
        RuntimeHttpClient.from_server_address(
            superlink.address,
            superlink.insecure,
            superlink.root_certificates,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
            retry_invoker=make_simple_http_retry_invoker(),
        ) as client,
    ):
        try:
            while True:
                found = client.AcquireTask(
                    AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
                )
                if found.HasField("task") and found.token:
                    process = fork(_run, superlink, found.token, os.getpid())
                    say(f"run {found.task.run_id} started in process {process.pid}")
                time.sleep(POLL)
        except KeyboardInterrupt:
            say("stopped")


def _run(superlink: SuperLink, token: str, parent: int) -> None:
    """Does what flwr-serverapp does; it ends with its parent."""
    output: Queue[str | None] = Queue()
    mirror_output_to_queue(output)
    run_serverapp(
        superlink.address,
        output,
        token,
        superlink.insecure,
        superlink.root_certificates,
        parent,
        runtime_dependency_install=False,
    )

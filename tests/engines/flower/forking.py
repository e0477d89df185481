"""A federation on this host whose programs of ours are forked, since their imports take longest.

They are still processes with a group, a folder, an environment and a log of their own, as those of
a terminal are.
"""

import os
import subprocess
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import commands
from engines.flower.deployment import Deployment

HEARTBEAT = 15
"""Seconds between a node's signs of life; Flower has 30. Who gives none for two of them is gone."""

QUESTIONS = 600
"""Seconds between a run's questions for its status while it has not seen its end, each of which
starts a program of Flower's."""


class Forked:
    """A process as those of :mod:`subprocess` are."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self.pid, self._process = process.pid, process
        self.kill, self.terminate = process.kill, process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("hyperfed", timeout or 0.0)
        return code


class Forking(Deployment):
    """Forks what is not Flower's own, but for the ``STARTED``, which begin as they do elsewhere."""

    STARTED = ("node0", "pefll")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        commands.preload("hyperfed.apps.flower.node", "hyperfed.apps.flower.superexec")

    def hyperfed(self, name: str, *arguments: str) -> Any:
        if name in self.STARTED:
            return super().hyperfed(name, *arguments)
        log = self.folder / f"{name}.log"
        log.touch()  # for whoever looks before there is anything in it
        begin = partial(_begin, self.folder, self.environment, log)
        process = Forked(commands.start(*arguments, said=log, first=begin))
        self.processes[name] = process
        self.groups.append(process.pid)
        return process


def _begin(folder: Path, environment: dict[str, str], log: Path) -> None:
    """Makes a forked process like one that was started."""
    from flwr.supernode import fleet_http_connection

    from hyperfed.apps.flower import submit

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = HEARTBEAT
    submit.POLL = QUESTIONS

"""``hyperfed run METHOD engine=flower`` and ``hyperfed serve RUN_DIR``: what a SuperLink runs.

It is handed over and waited for. ``flwr run`` says that a run was accepted, not that it went well,
so its status is asked for until it has ended.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import hyperfed
from hyperfed.data import tasks
from hyperfed.errors import LONGEST, UserError, one_line
from hyperfed.runs import config as configuration
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.progress import heard_failure
from hyperfed.runs.settings import RunConfig
from hyperfed.system import toml
from hyperfed.system.extras import how_to_install
from hyperfed.system.signals import STOPPING, handled, lost, terminable

POLL = 20
"""Seconds between two questions for the status, each of which starts a program of Flower's."""

PATIENCE = 10
"""Questions in a row without an answer before the SuperLink counts as gone."""

LONGEST_READING = 60
"""Seconds for the log of a run that has ended."""

COMPLETED = "finished:completed"
"""The status of a run that is done."""

LONGEST_LINE = 20 * LONGEST
"""Letters of a line of a run's log: a client's name, and a reason, or why it failed, as JSON."""

APP = """\
[project]
name = "hyperfed"
version = "{version}"
description = "Personalised federated learning with hypernetworks"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "hyperfed"

[tool.flwr.app.components]
serverapp = "hyperfed.apps.flower.app:{server}"
clientapp = "hyperfed.apps.flower.app:client"

[tool.flwr.app.config]
settings = ""
folder = ""
"""
"""What is submitted: all hosts have hyperfed, so the bundle only names it."""


class RunFailedError(Exception):
    """The run ended at the SuperLink without being done."""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink that takes runs.

    Attributes:
        address: host:port.
        encrypts: whether it is reached by TLS.
        root_certificates: file of the certificates that it is then known by; None for the system's.
    """

    address: str
    encrypts: bool
    root_certificates: Path | None

    @classmethod
    def of(cls, config: RunConfig) -> "SuperLink":
        """Returns that of a configuration.

        Raises:
            UserError: it names none, a file that is not there, or Flower is not installed.
        """
        if find_spec("flwr") is None:
            raise UserError(
                "engine=flower must have Flower, which is not installed; "
                f"{how_to_install('flower')}"
            )
        engine = config.engine
        if engine.superlink is None:
            raise UserError(
                "engine=flower must be told where its SuperLink is; set engine.superlink=HOST:PORT"
            )
        root = engine.root_certificates
        if root is not None and not Path(root).is_file():
            raise UserError(f"engine.root_certificates must be a file, but there is no {root}")
        return cls(engine.superlink, engine.encrypts, None if root is None else Path(root))

    def connection(self) -> str:
        """Returns Flower's own configuration, which names it."""
        entries: dict[str, Any] = {"address": self.address, "insecure": not self.encrypts}
        if self.root_certificates is not None:
            entries["root-certificates"] = str(self.root_certificates)
        return toml.dumps({"superlink": {"default": "run", "run": entries}})


def folder_for(config: RunConfig, out: Path, experiment: str) -> Path:
    """Makes the folder of a new run and writes its settings into it.

    Raises:
        UserError: the folder cannot be made, or the settings name no SuperLink, or a target that
            clients at sites cannot have.
    """
    SuperLink.of(config)
    tasks.check_remote(config.task)
    folder = RunFolder.create(out, experiment or config.method, config.seed, datetime.now())
    configuration.dump(config, folder.config)
    return folder.path


def discard(folder: Path) -> None:
    """Removes the folder of a run that no SuperLink has taken, and a group that it leaves empty.

    What has more in it than :func:`folder_for` put there stays.
    """
    place = RunFolder(folder)
    if {path.name for path in folder.iterdir()} != {place.config.name, place.state.parent.name}:
        return
    with suppress(OSError):
        place.state.parent.rmdir()
        place.config.unlink()
        folder.rmdir()
        folder.parent.rmdir()


def resumable(folder: Path, *, done: bool = False) -> RunConfig | None:
    """Returns the settings of a run that is not done, or ``done``; None for any other folder."""
    place = RunFolder(folder)
    if not place.config.exists() or (place.summary.exists() and not done):
        return None
    return configuration.load(str(place.config))


def train(
    config: RunConfig,
    folder: Path,
    tell: Callable[[str], None] | None = None,
    taken: Callable[[str], None] | None = None,
) -> None:
    """Has a SuperLink train, and returns when the run is done.

    The ServerApp writes the records into ``folder`` on the SuperLink's host. Where they lie there
    already, it resumes.

    Args:
        config: all settings.
        folder: of the records.
        tell: is told each line of the run's log, from another thread; where there is none, the log
            is not asked for.
        taken: is told the run's number at the SuperLink, once that has it.

    Raises:
        UserError: the SuperLink cannot be reached or takes no run.
        RunFailedError: the run ended without being done.
        KeyboardInterrupt: somebody gave up; the run is stopped, and can be resumed.
    """
    _submit(config, folder, "server", tell, done=RunFolder(folder).summary, taken=taken)


def serve(config: RunConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Has a SuperLink serve the newcomers of a run that is done, and returns when they are served.

    Args:
        config: all settings.
        folder: of the run's records on the SuperLink's host.
        tell: is told each line of the log, from another thread.

    Raises:
        UserError: the SuperLink cannot be reached or takes no run.
        RunFailedError: not every newcomer was served.
        KeyboardInterrupt: somebody gave up.
    """
    _submit(config, folder, "newcomers", tell)


def _submit(
    config: RunConfig,
    folder: Path,
    server: str,
    tell: Callable[[str], None] | None,
    *,
    done: Path | None = None,
    taken: Callable[[str], None] | None = None,
) -> None:
    """Has a SuperLink run one of our ServerApps, and waits.

    Args:
        config: all settings.
        folder: of the records.
        server: the ServerApp, of :mod:`hyperfed.apps.flower.app`.
        tell: is told each line of its log.
        done: a file that is there when it is done, on its host.
        taken: is told the run's number.
    """
    link = SuperLink.of(config)
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        home, app = Path(scratch) / "home", Path(scratch) / "hyperfed"
        home.mkdir()
        app.mkdir()
        (home / "config.toml").write_text(link.connection(), encoding="utf-8")
        (app / "pyproject.toml").write_text(
            APP.format(version=hyperfed.__version__, server=server), encoding="utf-8"
        )
        settings = toml.dumps(configuration.to_dict(config))
        values = {"settings": settings, "folder": str(folder.resolve())}
        given = Path(scratch) / "run.toml"
        given.write_text(toml.dumps(values), encoding="utf-8")
        asked: list[int] = []  # to stop, while it is not known yet what
        with handled(lambda number, _: asked.append(number), *STOPPING, *lost()):
            started = _flwr(home, "run", str(app), "run", "--run-config", str(given))
        if not started.get("success") or "run-id" not in started:
            raise UserError(
                f"the SuperLink at {link.address} must take the run, but: "
                f"{started.get('error-message') or started.get('output')}; see that it runs, "
                "encrypts where it is not on this host, and that engine.root_certificates is its "
                "own"
            )
        run = str(started["run-id"])
        try:
            if asked:
                raise KeyboardInterrupt
            if taken is not None:
                taken(run)
            with _log_of(home, run, tell) as over:
                status, details = _wait(home, run, done, over)
                if tell is not None:
                    over.wait(POLL)  # for its last lines
        except KeyboardInterrupt:
            _flwr(home, "stop", run, "run")
            raise
        failed = status.startswith("finished") and status != COMPLETED
        why = (_why_failed(home, run) or details) if failed else ""
    if status != COMPLETED:
        raise RunFailedError(
            f"run {run} at {link.address} must end as {COMPLETED}, but is {status}"
            + (f": {why}" if why else "; the SuperLink's log says why")
        )


def _why_failed(home: Path, run: str) -> str:
    """Returns what a run that has ended said of why it failed; "" where its log has nothing."""
    told: deque[str] = deque(maxlen=1)

    def hear(line: str) -> None:
        if why := heard_failure(line):
            told.append(why)

    with _log_of(home, run, hear) as over:
        over.wait(LONGEST_READING)
    return told[0] if told else ""


@contextmanager
def _log_of(home: Path, run: str, tell: Callable[[str], None] | None) -> Iterator[Event]:
    """Has somebody told each line of a run's log, also again where the way to it was cut.

    Yields:
        What is set when the log is at its end, as the run is then.
    """
    over, left = Event(), Event()
    if tell is None:
        yield over
        return
    reading: list[subprocess.Popen[str]] = []

    def read() -> None:
        while not left.is_set():
            process = subprocess.Popen(
                _program("log", run, "run", "--stream"),
                env=_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for us
            )
            reading[:] = [process]
            if left.is_set():
                process.kill()
            assert process.stdout is not None
            with process.stdout as lines:
                while line := lines.readline(LONGEST_LINE):
                    tell(line)
            if process.wait() == 0:
                over.set()
                return
            left.wait(POLL)

    thread = Thread(target=read, daemon=True)
    thread.start()
    try:
        yield over
    finally:
        left.set()
        for process in reading:
            process.kill()
        thread.join()


def _wait(home: Path, run: str, done: Path | None, over: Event) -> tuple[str, str]:
    """Returns the status with which a run has ended, and what the SuperLink says of it.

    Args:
        home: of Flower's programs.
        run: its number.
        done: as of :func:`_submit`.
        over: set when its log has ended.
    """
    silent = 0
    while silent < PATIENCE:
        for _ in range(POLL):
            time.sleep(1)
            # Here, or in the log, its end is seen at once.
            if over.is_set() or (done is not None and done.exists()):
                break
        found = _flwr(home, "ls", "run", "--run-id", run)
        runs = found.get("runs") or [{}]
        status = str(runs[0].get("status", ""))
        if status.startswith("finished"):
            return status, one_line(str(runs[0].get("status-details") or ""))
        silent = 0 if status else silent + 1
    return "out of sight", ""


def _flwr(home: Path, *arguments: str) -> Mapping[str, Any]:
    """Runs a command of Flower's and returns its JSON, or {"output": ...} where that is none."""
    done = subprocess.run(
        _program(*arguments, "--format", "json"),
        env=_environment(home),
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # Ctrl-C is for us
    )
    start = done.stdout.find("{")
    try:
        found: dict[str, Any] = json.loads(done.stdout[start:])
    except ValueError:
        return {"output": (done.stdout + done.stderr).strip()[-500:]}
    return found


def _program(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("flwr")), *arguments]


def _environment(home: Path) -> dict[str, str]:
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONUNBUFFERED": "1",
    }

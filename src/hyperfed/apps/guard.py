"""A run in a process of its own, where a library may end that process without a word.

Ray does: a process whose raylet dies, or that has long not reached the cluster's head, is ended
from below Python, with exit code 1. So the process that the user started forks one that trains, and
waits: it hands on signals, ends what a lost cluster leaves behind, and says how to go on. Of Linux;
elsewhere a run is ended as Ray has it.
"""

import atexit
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hyperfed.apps.printing import print_json, say

STOPPED = 3
"""Exit code of a run that was stopped, or lost what computed it, and can be resumed."""

_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl(2)

Tell = Callable[[Path], None]
"""Is told the folder of the run that trains now."""


def divide(*, as_json: bool) -> Tell:
    """Forks, and returns in the new process, which is to train; the old one leaves with its code.

    Where the new one was ended by other than itself after it has told a run's folder, the old one
    prints that and leaves with :data:`STOPPED`.

    Args:
        as_json: prints the folder as JSON.
    """
    if sys.platform != "linux":
        return lambda folder: None
    said, says = os.pipe()
    old = os.getpid()
    _prctl(_SUBREAPER, 1)
    if new := os.fork():
        os.close(says)
        _leave_with(new, said, as_json=as_json)
    os.close(said)
    os.setpgid(0, 0)  # so that Ctrl-C comes once, from the old one
    _prctl(_SUBREAPER, 0)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != old:  # it died before that was asked for
        os._exit(1)
    folders = 0

    def tell(folder: Path) -> None:
        nonlocal folders
        os.write(says, os.fsencode(folder) + b"\n")
        if not folders:  # after Ray has asked the same, so before what that does then
            atexit.register(os.write, says, b"\n")
        folders += 1

    return tell


def _leave_with(process: int, said: int, *, as_json: bool) -> NoReturn:
    """Waits for the end of a process and leaves as it did."""

    def hand_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with os.fdopen(said, "rb", closefd=False) as pipe:
        os.set_blocking(said, False)  # a daemon of the run may keep the other end
        *folders, _ = (pipe.read() or b"").split(b"\n")
    by_itself = code > 1 or code == 0 or (code == 1 and folders[-1:] == [b""])
    if by_itself or not folders:
        os._exit(code if code >= 0 else 128 - code)
    _end_orphans()
    folder = os.fsdecode(next(filter(None, reversed(folders))))
    how = "the Ray cluster was lost" if code == 1 else f"signal {-code} ended the run's process"
    if as_json:
        print_json({"folder": folder, "summary": None})
    else:
        print(folder, flush=True)
    say(f"{how}; go on with: hyperfed resume {shlex.quote(folder)}")
    os._exit(STOPPED)


def _end_orphans() -> None:
    """Kills what a process that is gone had started: it is ours now, one generation at a time."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            # The name, in brackets, may contain anything.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == os.getpid():
                found.append(int(folder.name))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

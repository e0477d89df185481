"""Calls in processes of their own that cost a fork each, and not the imports of a new one.

A zygote, of :mod:`multiprocessing`, has imported what calls need and never computes
(:mod:`hyperfed.apps.flower.zygote`). It is forked for each call, so nothing stays in memory from
one to the next, and a call that crashes takes nobody with it. An accelerator takes longer to start
than most calls, and does not survive a fork; there the process stays for the next call.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

PRELOADED = ["hyperfed.apps.cli", "hyperfed.apps.flower.zygote"]
"""Modules that a zygote imports: what started us, which each of its processes begins with, and what
calls need."""

STARTS, PAUSE = 20, 0.1
"""Times that a process is tried to be started, and the seconds between: a zygote that was killed
refuses before it is known to be dead."""

THREADLESS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Environment of a zygote, in which NumPy and Arrow start no thread when they are imported."""

_CONTEXT = get_context("forkserver")


class FailedError(Exception):
    """A call raised; the message is the kind of its error and what that said."""


class CrashedError(Exception):
    """The process of a call ended without an answer."""


@dataclass(frozen=True)
class _Raised:
    reason: str


class Executor:
    """Calls a function in processes forked from one that has imported it.

    Args:
        function: what is called; one of a module.
        lasting: the process stays for the next call, until it crashes.
    """

    def __init__(self, function: Callable[..., Any], *, lasting: bool = False) -> None:
        self._function, self._lasting = function, lasting
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def call(self, *arguments: Any) -> Any:
        """Returns what the function returns for some arguments.

        Raises:
            FailedError: it raised.
            CrashedError: its process ended before, or could not be started.
        """
        if self._process is None or not self._process.is_alive():
            self.close()
            self._pipe, theirs = _CONTEXT.Pipe()
            with theirs:
                self._process = fork(_serve, self._function, theirs)
        assert self._pipe is not None
        try:
            self._pipe.send(arguments)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise CrashedError("the process of the call ended before it had answered") from error
        except BaseException:  # somebody ends us
            self.close()
            raise
        if not self._lasting:
            self._pipe.close()  # whereupon it ends, and nobody waits for that
            self._process = self._pipe = None
        if isinstance(answer, _Raised):
            raise FailedError(answer.reason)
        return answer

    def close(self) -> None:
        """Ends the process of a call, if there is one."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def warm() -> None:
    """Has a zygote begin its imports, where there is none, and does not wait for them."""
    _CONTEXT.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    os.environ |= THREADLESS
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before


def fork(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Runs a function in a process that a zygote forks.

    Raises:
        CrashedError: the zygote cannot be forked, nor can a new one.
    """
    for _ in range(STARTS):
        try:
            warm()
            process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
            process.start()
        except (EOFError, OSError) as error:  # the zygote has just been killed
            failure = error
            time.sleep(PAUSE)
        else:
            return process
    raise CrashedError("no process could be started") from failure


def _serve(function: Callable[..., Any], pipe: Connection) -> None:
    """Answers calls until nobody can make any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the process that calls
    Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(*arguments)
        except Exception as error:
            answer = _Raised(f"{type(error).__name__}: {error}")
        pipe.send(answer)


def _end_with_parent() -> None:
    """Ends this process, whatever it does, when the one that calls has ended."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

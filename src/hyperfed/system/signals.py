"""What the process does when it is asked to stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""By Ctrl-C, and by whoever manages processes."""


def lost() -> list[signal.Signals]:
    """Returns the signal of a terminal that is gone; none under ``nohup``, and on Windows."""
    found: signal.Signals | None = getattr(signal, "SIGHUP", None)
    return [] if found is None or signal.getsignal(found) is signal.SIG_IGN else [found]


@contextmanager
def terminable() -> Iterator[None]:
    """Makes of SIGTERM and of a lost terminal what Ctrl-C is, so that all is tidied up."""
    with handled(signal.default_int_handler, signal.SIGTERM, *lost()):
        yield


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals
) -> Iterator[None]:
    """Handles signals inside its block, and leaves them to whoever did after it.

    Args:
        handler: takes a signal's number, and where it came.
        numbers: of the signals; :data:`STOPPING` where none is named.
    """
    before = {number: signal.signal(number, handler) for number in numbers or STOPPING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

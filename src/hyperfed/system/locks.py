"""A folder that one process at a time writes to."""

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from hyperfed.errors import UserError
from hyperfed.system.files import refused, remove_unfinished


class Lock:
    """Keeps other processes from writing to a folder, until it is released or this process ends.

    It is released at the end of a ``with`` block, too.

    Where the system has no such locks (Windows, some network drives), nobody is kept out.

    Args:
        folder: it must exist; the lock is its file ``.lock``.
        wait: until no other process has it.

    Raises:
        UserError: another process has it, or the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        path = folder / ".lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise refused(path, error) from error
        self.release = weakref.finalize(self, os.close, file)
        """Lets others in."""
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            self.release()
            raise UserError(
                f"{folder} must be written to by one process at a time, but another one is at it; "
                "wait for its end, or stop it"
            ) from error
        except (ImportError, OSError):
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until no other process works with a folder, keeps others waiting, and tidies it up.

    The lock is its file ``lock``, and goes with the process, even where that is killed.
    """
    import fcntl

    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_unfinished(folder)
        yield


def is_held(folder: Path) -> bool | None:
    """Returns whether a process has the lock of a folder; None where nobody can tell."""
    try:
        import fcntl

        file = os.open(folder / ".lock", os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False

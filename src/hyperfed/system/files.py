"""Writing files that are never seen half-written."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from hyperfed.errors import UserError

PRIVATE = 0o700
"""Of a folder that nobody but its owner may look into: what clients remember is somebody's data."""


def at_home(path: str) -> str:
    """Returns a path in which ``~`` alone or before a slash is the home directory.

    ``~ann`` is nobody's here, since a folder may be called so.
    """
    return str(Path(path).expanduser()) if path == "~" or path.startswith("~/") else path


def absolute(path: str) -> str:
    """Returns a path that leads to the same place wherever this process moves to."""
    return str(Path(at_home(path)).absolute())


def check_file(path: Path) -> None:
    """Finds out whether what is called ``path``, if anything is, can be opened without waiting.

    Nobody may ever write to the other end of a pipe, and what is read of a device may have no end.

    Raises:
        UserError: it is a pipe, a device or a socket, or a link to one.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} must be a file, but is a pipe, a device or a socket; remove it")


def check_files(folder: Path) -> None:
    """Finds out, as :func:`check_file` does, of all that is in a folder, if there is one.

    Raises:
        UserError: one of them is no file and no folder, or nobody may look.
    """
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            check_file(path)
    except OSError as error:
        raise UserError(
            f"{folder} must be a folder that can be read, but: {error.strerror}; permit reading"
        ) from error


def check_writable(folder: Path) -> None:
    """Finds out whether files can be written in a folder, which is made.

    Raises:
        UserError: they cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):  # without a name, where the system can
            pass
    except OSError as error:
        raise refused(folder, error) from error


def check_suffix(path: Path, suffixes: Iterable[str], what: str) -> None:
    """Finds out whether a file's name says what is, or is to be, in it.

    Args:
        path: the file.
        suffixes: those that do, such as ``.csv``.
        what: whose file it is.

    Raises:
        UserError: another one.
    """
    *others, last = suffixes
    if path.suffix not in (*others, last):
        known = f"{', '.join(others)} or {last}" if others else last
        raise UserError(f"the name of a {what}'s file must end in {known}, came {path}")


def atomic_write(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Replaces a file as a whole: afterwards it is the new one, or the old one untouched.

    Args:
        path: the file; its folder must exist.
        content: the bytes, or a function that writes them to the binary file it is given.

    Raises:
        UserError: the disk is full, read-only or otherwise refuses.
    """
    # In the same folder, because a file can only be replaced by one of the same file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise refused(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def atomic_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Makes a folder as a whole: afterwards it is there with all that is in it, or not at all.

    Args:
        path: what must not be there yet; the folder around it must.
        write: writes the files into the folder that it is given.

    Raises:
        UserError: the disk is full, read-only or otherwise refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        write(temporary)
        temporary.rename(path)
    except OSError as error:
        raise refused(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def append_line(path: Path, line: bytes) -> None:
    """Adds a line to a file that nobody but its owner may read, and has the disk keep it.

    Afterwards all of it is there, or nothing: half a line would spoil the next one. Nobody else may
    be writing meanwhile.

    Raises:
        UserError: the disk is full, read-only or otherwise refuses.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            length = os.fstat(file).st_size
            torn = length and os.pread(file, 1, length - 1) != b"\n"  # a machine died over it
            left = b"\n" * bool(torn) + line + b"\n"
            try:
                while left:  # what there is room for is written without an error
                    left = left[os.write(file, left) :]
                os.fsync(file)
            except OSError:
                os.ftruncate(file, length)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise refused(path, error) from error


def remove_unfinished(folder: Path) -> None:
    """Removes what a killed process was about to put in place, in a folder nobody else writes to.

    Raises:
        UserError: the system refuses.
    """
    for path in folder.glob(".*.tmp"):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise refused(path, error) from error


def sync(path: Path) -> None:
    """Has the disk keep what was written to a file, whatever becomes of the machine.

    Of a folder it is the names of its files.

    Raises:
        UserError: the disk refuses.
    """
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise refused(path, error) from error


def refused(path: Path, error: OSError) -> UserError:
    """Returns the error to raise where the system does not let us write to ``path``."""
    away = isinstance(error, FileNotFoundError)
    how = "make its folder" if away else "make room or permit writing"
    return UserError(
        f"{path} must be writable, but: {error.strerror or error}; {how}, or choose another folder"
    )

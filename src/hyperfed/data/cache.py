"""Decoded data sets on disk, so that the second load is a memory map; and features of them.

One safetensors file per data set, with the rest of :class:`Examples` as JSON in its header: one
file is replaced in one atomic step and can never be half new.
"""

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hyperfed.data.examples import Examples, channels_moved_first, fingerprint_of, hash_of

FORMAT = 4
"""Part of every key: raise it when the code that decodes comes to something else."""

ABANDONED = 3600.0
"""Seconds after which a file that was begun, and not written to since, is nobody's."""


def folder() -> Path:
    """Returns ``$HYPERFED_CACHE``, ``$XDG_CACHE_HOME/hyperfed`` or ``~/.cache/hyperfed``."""
    own, shared = os.environ.get("HYPERFED_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "hyperfed"


def asked_for() -> bool:
    """Whether the user says where the cache is, and so that there may be one of anything."""
    return bool(os.environ.get("HYPERFED_CACHE"))


def key(
    name: str, reader: str, constants: dict[str, Any], source: str | list[tuple[str, int, int]]
) -> str:
    """Returns the cache's name for what ``reader`` makes of ``source``.

    Args:
        name: of the data set; kept legible in the result.
        reader: name of the function that decodes.
        constants: those that it decodes by, plain data.
        source: hub id, or (path in the folder, bytes, modification time in ns) of every file.
    """
    digest = hash_of(json.dumps([FORMAT, name, reader, constants, source]))
    legible = "".join(letter if letter.isalnum() else "_" for letter in name)[-40:]
    return f"{legible}-{digest}"


def load_or_build(key: str, build: Callable[[], Examples]) -> Examples:
    """Returns the examples stored under ``key``, or builds and stores them.

    A file that is missing, damaged or from another version is built again. A cache that cannot be
    written costs time, not correctness: the examples are returned all the same.
    """
    path = folder() / "datasets" / f"{key}.safetensors"
    examples = _read(path)
    if examples is None:
        examples = build()
        with contextlib.suppress(OSError):
            tensors = examples.tensors()
            plain = {
                key: v for key, v in vars(examples).items() if key not in tensors and v is not None
            }
            _write(path, tensors, plain)
    return examples


def tensor(key: str, compute: Callable[[], Tensor], fits: Callable[[Tensor], bool]) -> Tensor:
    """Returns the tensor stored under ``key``, if it fits, or computes and stores it.

    Args:
        key: says all that it is computed from.
        compute: does so.
        fits: looks at what was stored.
    """
    path = folder() / "features" / f"{key}.safetensors"
    read = _tensors(path)
    if read is not None and fits(stored := read[0]["x"]):
        return stored
    computed = compute()
    with contextlib.suppress(OSError):
        _write(path, {"x": computed}, {"fingerprint": fingerprint_of({"x": computed})})
    return computed


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Returns what is in a file, and its header; None where it is not what was written."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["examples"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Reading all pages once (0.2 s for CIFAR-10) catches what the file format does not.
        return (tensors, header) if fingerprint_of(tensors) == header["fingerprint"] else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _read(path: Path) -> Examples | None:
    if (read := _tensors(path)) is None:
        return None
    tensors: dict[str, Any] = read[0]
    header = read[1]
    try:
        tensors["x"] = channels_moved_first(tensors["x"])
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in header.items()
        }
        return Examples(**plain, **tensors)
    except (KeyError, TypeError, ValueError):
        return None


def _write(path: Path, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    try:
        save_file(tensors, temporary, {"examples": json.dumps(plain)})
        Path(temporary).replace(path)
    except SafetensorError as error:  # a full disk, in safetensors' own words
        raise OSError(f"could not write {temporary}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _remove_unfinished(folder: Path) -> None:
    """Removes what killed processes were writing: nobody has written to it for an hour.

    Raises:
        OSError: the system refuses.
    """
    for path in folder.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime < time.time() - ABANDONED:
                path.unlink()

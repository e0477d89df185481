"""The state of a run on disk: a tree of tensors, and what else it takes to go on.

One safetensors file, so any of its tools can read the tensors. Its header says, under the one key
"hyperfed", the format, the order, nesting and memory formats of the tree (which safetensors does
not keep), the caller's values, and a digest of it all.
"""

import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.system.files import atomic_write, refused
from hyperfed.trees import Tree
from hyperfed.trees.arithmetic import path_of
from hyperfed.trees.packing import laid_out, strides_of

log = logging.getLogger(__name__)

_KEY = "hyperfed"
_FORMAT = "hyperfed-checkpoint-1"
_REMEDY = "; restore the file from a copy, or start a new run"

_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, RuntimeError)
"""What reading a header raises that another than us wrote."""

_DEEPEST = 32
"""Trees in a tree, at most; ours are four deep."""


def save_state(path: Path, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint, whole or not at all.

    Args:
        path: the file; its folder must exist.
        tree: nested dict of tensors, any names, empty dicts included.
        meta: what is not a tensor; plain JSON values with finite numbers.

    Raises:
        UserError: the disk is full, read-only or otherwise refuses.
        ValueError: ``meta`` holds a number that is not finite.
    """
    atomic_write(path, dumps(tree, meta))


def previous(path: Path) -> Path:
    """Returns where :func:`save_latest` keeps the checkpoint before the one at ``path``."""
    return path.with_stem(f"{path.stem}-before")


def save_latest(
    path: Path, tree: Tree, meta: Mapping[str, Any], *, keep_newest: bool = True
) -> None:
    """Writes a checkpoint as :func:`save_state` does, and keeps the one before beside it.

    Args:
        path: the file; its folder must exist.
        tree: as of :func:`save_state`, of finite numbers.
        meta: likewise.
        keep_newest: keep the one at ``path``; else it is replaced, where it is of no use, and the
            one before it is kept.

    Raises:
        UserError: the disk refuses; then both are still there.
        ValueError: a number of the tree or of ``meta`` is not finite; nothing is written.
    """
    if not all(trees.finite([tree])):
        raise ValueError("a checkpoint must hold finite numbers alone; go back to a state that is")
    following = path.with_stem(f"{path.stem}-next")
    save_state(following, tree, meta)
    try:
        if keep_newest and path.exists():
            path.replace(previous(path))
        following.replace(path)
    except OSError as error:
        raise refused(path, error) from error


def load_latest(path: Path) -> tuple[Tree, dict[str, Any], bool]:
    """Reads the newest of the checkpoints of :func:`save_latest` that can be gone on from.

    One that is torn, missing or holds a number that is not finite is told of in the log.

    Returns:
        tree: as :func:`load_state`.
        meta: likewise.
        newest: whether it is the one at ``path``, for ``keep_newest`` of the next that is saved.

    Raises:
        UserError: as :func:`load_state`, of the newest; there is none that can be gone on from.
    """
    try:
        return *_load_finite(path), True
    except UserError as error:
        if not previous(path).exists():
            raise
        log.warning("%s; going on from the checkpoint before, %s", error, previous(path))
        try:
            return *_load_finite(previous(path)), False
        except UserError as older:
            raise UserError(f"{error}; and {older}") from older


def _load_finite(path: Path) -> tuple[Tree, dict[str, Any]]:
    tree, meta = load_state(path)
    if not all(trees.finite([tree])):
        raise UserError(f"{path} must hold finite numbers alone, but does not{_REMEDY}")
    return tree, meta


def dumps(tree: Tree, meta: Mapping[str, Any]) -> bytes:
    """Returns what :func:`save_state` writes.

    Raises:
        ValueError: ``meta`` holds a number that is not finite.
    """
    # Copies, because safetensors refuses tensors that share memory.
    tensors = {
        name: leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, leaf in _leaves(tree)
    }
    header = {"format": _FORMAT, "layout": _layout(tree), "meta": meta}
    text = json.dumps(header | {"digest": _digest(header, tensors)}, allow_nan=False)
    return safetensors.torch.save(tensors, {_KEY: text})


def load_state(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Reads a checkpoint.

    Returns:
        tree: as it was saved, in the same order, on the CPU.
        meta: as it was saved.

    Raises:
        UserError: there is none, it is damaged, or another program wrote it.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            # Copies, because the file stays mapped into memory otherwise.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise UserError(f"there must be a checkpoint to go on from, but no {path}") from error
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or not a checkpoint ({error}){_REMEDY}") from error
    return _parsed(text, tensors, str(path))


def loads(content: bytes, what: str) -> tuple[Tree, dict[str, Any]]:
    """Reads what :func:`dumps` returned; ``what`` is its name in an error.

    Raises:
        UserError: it is damaged, or another program made it.
    """
    try:
        tensors = safetensors.torch.load(content)
        (length,) = struct.unpack("<Q", content[:8])
        text = json.loads(content[8 : 8 + length]).get("__metadata__", {}).get(_KEY)
    except (SafetensorError, struct.error, *_MALFORMED) as error:
        raise UserError(f"{what} is damaged ({error}){_REMEDY}") from error
    return _parsed(text, tensors, what)


def _parsed(
    text: str | None, tensors: Mapping[str, Tensor], what: str
) -> tuple[Tree, dict[str, Any]]:
    if text is None:
        raise UserError(
            f"{what} must be a checkpoint of hyperfed, but another program wrote it{_REMEDY}"
        )
    try:
        header = json.loads(text)
        digest = header.pop("digest")
        written_as = header["format"]
    except _MALFORMED as error:
        raise UserError(f"{what} has a damaged header{_REMEDY}") from error
    if written_as != _FORMAT:
        raise UserError(
            f"{what} must have the format {_FORMAT}, but has {str(written_as)[:40]!r}; "
            "read it with the version of hyperfed that wrote it"
        )
    # Whoever wrote it may have made a digest of anything: what holds for our own is checked.
    try:
        if digest != _digest(header, tensors):
            raise UserError(f"{what} is damaged: its content is not what was written{_REMEDY}")
        tree, meta = _restore(header["layout"], tensors), header["meta"]
    except UserError:
        raise
    except _MALFORMED as error:
        raise UserError(f"{what} has a header that is not of its content{_REMEDY}") from error
    if not isinstance(meta, dict):
        raise UserError(f"{what} must say what it is, but its header does not{_REMEDY}")
    return tree, meta


def _leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in tree.items():
        path = path_of(prefix, name)
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}/")
        else:
            yield path, value


def _layout(tree: Tree) -> dict[str, Any]:
    """Returns the names of a tree, with the memory format in place of the tensors.

    Convolutions and sums round otherwise in another one, so without it a resumed run would drift.
    """
    return {
        name: _layout(value) if isinstance(value, dict) else _memory_format(value)
        for name, value in tree.items()
    }


def _memory_format(tensor: Tensor) -> str | list[int]:
    """Returns how a tensor lies in memory: its strides, where they are not the usual ones."""
    strides = strides_of(tensor)
    usual = torch.empty(tensor.shape, device="meta").stride()
    return "contiguous" if strides == usual else [*strides]


def _restore(
    layout: Mapping[str, Any], tensors: Mapping[str, Tensor], prefix: str = "", depth: int = 0
) -> Tree:
    if depth > _DEEPEST:
        raise ValueError(f"a tree must not be deeper than {_DEEPEST}")
    tree: Tree = {}
    for name, inner in layout.items():
        path = path_of(prefix, name)
        if isinstance(inner, dict):
            tree[name] = _restore(inner, tensors, f"{path}/", depth + 1)
        elif inner == "contiguous":
            tree[name] = tensors[path]
        else:
            tree[name] = laid_out(tensors[path], inner)
    return tree


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(json.dumps(header, allow_nan=False).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

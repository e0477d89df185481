"""Your own arrays as examples: every problem found, then all reported together."""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfed.data.examples import Examples, channel_statistics, fingerprint_of
from hyperfed.errors import UserError


def features(x: Any, problems: list[str]) -> Tensor:
    """Converts inputs to (N, ...) uint8 images, floats or int64 tokens.

    Args:
        x: NumPy array or tensor. uint8 means images (N, C, H, W) or (N, H, W); floats stay floats;
            every other integer becomes an int64 token.
        problems: what must hold and does not is appended here.
    """
    inputs = to_tensor(x, "x")
    if inputs.ndim < 2:
        problems.append(
            f"x must have shape (N, features...), got {tuple(inputs.shape)}; reshape it"
        )
    elif inputs.dtype == torch.uint8:
        if inputs.ndim == 3:
            inputs = inputs[:, None]
        if inputs.ndim != 4 or (inputs.shape[-1] in (1, 3) and inputs.shape[1] not in (1, 3)):
            problems.append(
                "x of dtype uint8 means images (N, C, H, W), channels before height and width, "
                f"got shape {tuple(inputs.shape)}; transpose it, or pass features as floats"
            )
        else:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
    elif inputs.is_floating_point():
        _check_finite("x", inputs, problems)
    elif inputs.dtype == torch.bool or inputs.is_complex():
        problems.append(
            f"x must be uint8 images, floats or integer tokens, got {inputs.dtype}; convert it"
        )
    else:
        inputs = inputs.long()
    return inputs


def targets(y: Any, classes: int | None, problems: list[str]) -> tuple[Tensor, int]:
    """Converts targets to (N,) int64 labels and their number, or (N,) floats and 0.

    Args:
        y: NumPy array or tensor of integers (labels) or floats (regression).
        classes: number of labels; largest label + 1 where None.
        problems: what must hold and does not is appended here.
    """
    y = to_tensor(y, "y")
    if y.ndim != 1:
        problems.append(f"y must have shape (N,), got {tuple(y.shape)}; flatten it")
        return y, classes or 0
    if y.is_floating_point():
        if classes is not None:
            problems.append(
                f"y must hold integer labels because classes={classes} was given, got {y.dtype}; "
                "convert y to integers, or leave classes out for regression"
            )
        _check_finite("y", y, problems)
        return y, 0
    if y.is_complex():
        problems.append(f"y must be integer labels or float targets, got {y.dtype}; convert it")
        return y, 0
    y = y.long()
    largest = int(y.max()) if len(y) else -1
    limit = largest + 1 if classes is None else classes
    wrong = (y < 0) | (y >= limit)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        problems.append(
            f"labels must lie in 0..{limit - 1}, got {int(y[first])} at index {first} "
            f"({int(wrong.sum())} such); number them from 0"
            + ("" if classes is None else f" or raise classes from {classes}")
        )
    return y, limit


def numbered(client: Iterable[Hashable] | Any, problems: list[str]) -> Tensor:
    """Numbers client ids of any hashable type by first appearance, from 0: (N,) int64."""
    if isinstance(client, str | bytes) or not isinstance(client, Iterable):
        problems.append(
            f"client must be one hashable id per example, (N,), got {client!r}; pass an array"
        )
        return torch.zeros(0, dtype=torch.int64)
    ids = client.tolist() if hasattr(client, "tolist") else list(client)
    if nobody := [row for row, identity in enumerate(ids) if _is_missing(identity)]:
        problems.append(
            f"client must name who holds each example, got {ids[nobody[0]]} in {len(nobody)} rows, "
            f"the first at index {nobody[0]}; fill or drop them"
        )
    try:
        number = {identity: index for index, identity in enumerate(dict.fromkeys(ids))}
    except TypeError:
        problems.append("client must be one hashable id per example, (N,), got rows; flatten it")
        return torch.zeros(len(ids), dtype=torch.int64)
    return torch.tensor([number[identity] for identity in ids], dtype=torch.int64)


def _is_missing(identity: Any) -> bool:
    """Whether an id is what tables have for none: None, NaN, or pandas' NA and NaT."""
    if identity is None or type(identity).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(identity, float | np.floating) and bool(np.isnan(identity))


def check_numbering(y: Tensor, problems: list[str]) -> bool:
    """Whether labels, whose number nobody gave, are numbered from 0; appends if not.

    Args:
        y: (N,) integer labels, or floats, which are none.
        problems: what must hold and does not is appended here.
    """
    if y.is_floating_point() or y.ndim != 1 or not len(y):
        return True
    first, last, different = int(y.min()), int(y.max()), len(set(y.tolist()))
    if first <= 0 and last < max(len(y), 2):
        return True
    problems.append(
        f"labels must be numbered from 0, got {different} different from {first} to {last}; "
        "number them with numpy.unique(y, return_inverse=True)[1], or give classes where some "
        "have no example"
    )
    return False


def same_length(problems: list[str], **arrays: Tensor) -> bool:
    """Whether all arrays have equal, positive length; appends to ``problems`` if not."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) == 1 and next(iter(lengths.values())) > 0:
        return True
    told = ", ".join(f"{name} {length}" for name, length in lengths.items())
    problems.append(
        f"{' and '.join(lengths)} must have the same number of rows, at least one, got {told}; "
        "pass one row of each per example"
    )
    return False


def raise_all(problems: list[str], what: str) -> None:
    """Raises one ``UserError`` that lists all problems, if there are any."""
    if problems:
        raise UserError(f"{what}:\n" + "\n".join(f"- {problem}" for problem in problems))


def examples_of(name: str, x: Tensor, y: Tensor, classes: int, client: Tensor | None) -> Examples:
    """Puts checked tensors together; no example is held out."""
    mean, std = channel_statistics(x)
    held_out = torch.zeros(len(y), dtype=torch.bool)
    examples = Examples(name, x, y, held_out, classes, client, mean=mean, std=std)
    fingerprint = fingerprint_of(examples.tensors())
    return Examples(**{**vars(examples), "fingerprint": fingerprint})


def from_npz(path: str | Path) -> Examples:
    """Reads ``x``, ``y`` and, where present, ``client`` from a NumPy archive (``np.savez``).

    Args:
        path: the .npz file. ``x`` as in :func:`features`, ``y`` as in :func:`targets`, ``client``
            (N,) integers or strings.

    Raises:
        UserError: no such file, not an archive, missing arrays, or arrays that do not fit.
    """
    path = Path(path)
    arrays = read_npz(path, needed=("x", "y"))
    problems: list[str] = []
    x = features(arrays["x"], problems)
    y, classes = targets(arrays["y"], None, problems)
    client = numbered(arrays["client"], problems) if "client" in arrays else None
    same_length(problems, x=x, y=y, **({} if client is None else {"client": client}))
    raise_all(problems, f"{path} does not hold usable arrays")
    return examples_of(path.stem, x, y, classes, client)


def read_npz(path: Path, *, needed: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Reads all arrays of a NumPy archive; those in ``needed`` must be among them.

    Raises:
        UserError: no such file, not an archive, or missing arrays.
    """
    advice = f"write it with numpy.savez(path, {', '.join(f'{name}=...' for name in needed)})"
    try:
        # Opened here, because np.load leaves the file of a damaged archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, EOFError, ValueError, BadZipFile, AttributeError) as error:
        raise UserError(
            f"{path} must be an .npz archive of plain arrays, cannot be read ({error}); {advice}"
        ) from error
    if not arrays.keys() >= set(needed):
        raise UserError(
            f"{path} must hold {' and '.join(needed)}, came {', '.join(arrays) or 'none'}; {advice}"
        )
    return arrays


def to_tensor(array: Any, name: str) -> Tensor:
    """Converts NumPy arrays, lists or tensors; widens unsigned integers that torch lacks.

    Raises:
        UserError: it holds no numbers, or rows of several lengths; ``name`` says which it is.
    """
    if isinstance(array, Tensor):
        return array.detach().cpu()
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise UserError(
            f"{name} must be one array, with rows of one shape, got others ({error}); cut or pad "
            "them"
        ) from error
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    if array.dtype.kind not in "buifc":
        raise UserError(
            f"{name} must hold numbers, got dtype {array.dtype}; convert it, or encode categories "
            "as integers (numpy.unique(labels, return_inverse=True)[1] numbers labels)"
        )
    return torch.tensor(array)


def _check_finite(name: str, values: Tensor, problems: list[str]) -> None:
    wrong = ~torch.isfinite(values.flatten(1) if values.ndim > 1 else values[:, None])
    if wrong.any():
        rows = wrong.any(dim=1).nonzero().flatten()
        problems.append(
            f"{name} must be finite, got NaN or infinity in {len(rows)} rows, the first at index "
            f"{int(rows[0])}; remove or fill them"
        )

"""Your own arrays as examples: every problem found, then all reported together."""

import unicodedata
import zlib
from collections.abc import Hashable, Iterable, KeysView, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile, is_zipfile

import numpy as np
import numpy.lib.format as npformat
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfed.data.examples import Examples, fingerprint_of
from hyperfed.errors import UserError, one_line
from hyperfed.system.allocation import total_memory
from hyperfed.system.files import check_file

PARTS = ("train", "val", "test")
"""What an example is for, as a split says it; the position is its number."""

MOST_CLASSES = 10**6
"""Of a task, and tokens that a vocabulary is made for."""

IGNORED = -100
"""The label of a token that counts for nothing, as of PyTorch's cross entropy."""


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
    elif not inputs.shape[1:].numel():
        problems.append(
            f"an example must hold a number at least, got shape {tuple(inputs.shape[1:])}; pass "
            "others"
        )
    elif inputs.dtype == torch.uint8:
        if inputs.ndim == 3:
            inputs = inputs[:, None]
        if inputs.ndim != 4 or _are_channels_last(*inputs.shape[1:]):
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


def _are_channels_last(first: int, _: int, last: int) -> bool:
    """Whether images are (H, W, C), by their shape; with an alpha channel where C is 2 or 4."""
    return (last in (1, 3) and first not in (1, 3)) or (last in (2, 4) and first > 4)


def targets(
    y: Any,
    classes: int | None,
    problems: list[str],
    *,
    tokens: bool = False,
    amounts: bool = False,
    stated: bool = False,
) -> tuple[Tensor, int]:
    """Converts targets to (N,) int64 labels and their number, or (N,) or (N, K) floats and 0.

    Args:
        y: NumPy array or tensor of integers (labels) or floats (regression).
        classes: number of labels; largest label + 1 where None.
        problems: what must hold and does not is appended here.
        tokens: labels may be those of tokens, (N, T), of which IGNORED counts for nothing; an
            example of these alone has no loss, and would count as wrong.
        amounts: floats are known to be of a regression, where zeros and ones alone are no labels.
        stated: whoever brings ``y`` has said ``classes``, and may say another number.
    """
    y = to_tensor(y, "y")
    several = y.ndim == 2 and y.shape[1] > 1  # one each is a column that nobody flattened
    of_tokens = tokens and several and y.dtype != torch.bool and not y.is_floating_point()
    of_amounts = several and y.is_floating_point() and (amounts or not _are_labels(y))
    if y.ndim != 1 and not of_tokens and not of_amounts:
        or_of_tokens = ", or (N, T) for labels of tokens" if tokens else ""
        or_several = ""
        if several and y.is_floating_point():
            or_several = "; labels of which several may hold are integers, with a loss of your own"
        problems.append(
            f"y must have shape (N,){or_of_tokens}, got {tuple(y.shape)} {y.dtype}; flatten it, or "
            f"take y.argmax(1) where a row has a 1 for its label{or_several}"
        )
        return y, classes or 0
    if y.is_floating_point():
        if classes is not None:
            because = f" because classes={classes} was given" if stated else ""
            remedy = ", or leave classes out for regression" if stated else ""
            problems.append(
                f"y must hold integer labels{because}, got {y.dtype}; convert y to integers{remedy}"
            )
        _check_finite("y", y, problems)
        return y, 0
    if y.is_complex():
        problems.append(f"y must be integer labels or float targets, got {y.dtype}; convert it")
        return y, 0
    y = y.long()
    largest = int(y.max()) if y.numel() else -1
    limit = largest + 1 if classes is None else classes
    wrong = (y < 0) | (y >= limit)
    if of_tokens:
        wrong &= y != IGNORED
    if wrong.any():
        first = (
            int(wrong.flatten(1).any(dim=1).nonzero()[0]) if of_tokens else int(wrong.nonzero()[0])
        )
        found = int(y[wrong][0])
        more = f" or raise classes from {classes}" if stated and classes and found >= 0 else ""
        problems.append(
            f"labels must lie in 0..{limit - 1}, got {found} at index {first} "
            f"({int(wrong.sum())} such); number them from 0{more}"
            + (", and leave out rows that have none" if found < 0 else "")
        )
    if of_tokens and (nothing := (y == IGNORED).all(dim=1)).any():
        problems.append(
            f"each row of y must have a label that counts, got {IGNORED} alone at index "
            f"{int(nothing.nonzero()[0])} ({int(nothing.sum())} such); leave out such rows"
        )
    return y, limit


def class_count(said: Any, problems: list[str]) -> int | None:
    """Returns how many classes there are, where somebody says so; None where nobody does.

    Args:
        said: a whole number, or an array of one.
        problems: what must hold and does not is appended here.
    """
    if said is None:
        return None
    number = np.asarray(said)
    count = int(number.item()) if number.size == 1 and number.dtype.kind in "iu" else 0
    if 1 <= count <= MOST_CLASSES:
        return count
    problems.append(
        f"classes must be one whole number above 0, {MOST_CLASSES} at most, got {said!r}; leave it "
        "out for regression"
    )
    return None


def is_text(values: npt.NDArray[Any]) -> bool:
    """Whether an array holds words."""
    if values.dtype.kind == "U":
        return True
    some = values.dtype == object and values.ndim > 0 and len(values) > 0
    return some and all(isinstance(value, str) for value in values.flat)


def label_numbers(
    y: Any, labels: Sequence[str], problems: list[str], *, integers: bool = True
) -> Any:
    """Returns (N,) numbers of labels that are told by their names; numbers as they are.

    Words may label tokens, (N, T).

    Args:
        y: words, truth values or integers, each a name; or a tensor, which holds numbers.
        labels: names of the labels 0, 1, ...
        problems: what must hold and does not is appended here.
        integers: whether integers may be names; where not, they are numbers.
    """
    if not labels or isinstance(y, Tensor) or np.ma.is_masked(y):
        return y
    try:
        values = np.asarray(y)
    except ValueError:  # of rows of several lengths, which are told of where they are no labels
        return y
    words_alone = not all(label.lstrip("-").isdecimal() for label in labels)
    counted = integers and values.dtype.kind in "iu"
    of_examples = values.ndim == 1 and (values.dtype == bool or counted)
    if not of_examples and not is_text(values):
        return y
    number = {_composed(label): place for place, label in enumerate(labels)}
    words = [_composed(str(value)) for value in values.flat]
    if strange := [place for place, word in enumerate(words) if word not in number]:
        # Whoever numbers labels may do so in another order than they are numbered in here.
        first = np.unravel_index(strange[0], values.shape)
        problems.append(
            f"y must hold labels that are known, {', '.join(labels)}, got "
            f"{values[first].item() if counted else words[strange[0]]!r} at index "
            f"{', '.join(map(str, first))} ({len(strange)} such); "
            + ("write these names" if counted and words_alone else "rename or drop them")
        )
    return np.array([number.get(word, 0) for word in words], np.int64).reshape(values.shape)


def words_in_order(y: Any, labels: Sequence[str], problems: list[str]) -> tuple[Tensor, int]:
    """Converts labels that are told by their names to (N,) int64 numbers, and their number.

    Args:
        y: (N,) words or integers that are the names; a tensor of numbers stays as it is.
        labels: names of the labels 0, 1, ...
        problems: what must hold and does not is appended here.
    """
    check_names("labels", labels, problems)
    return targets(label_numbers(y, labels, problems), len(labels), problems)


def check_names(what: str, names: Iterable[Any], problems: list[str]) -> None:
    """Tells of names that are the same or read the same, and of one that no file can hold.

    An accented letter is one character, or the letter and an accent beside it (Unicode's NFC and
    NFD): systems write folders, and programs words, in one way or the other.

    Args:
        what: is called so.
        names: in their order.
        problems: what must hold and does not is appended here.
    """
    known: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            problems.append(f"{what} must have names that are words, got {name!r}; write it as one")
            return
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            problems.append(
                f"{what} must be called by whole characters, got {name[:100]!a}; rename it"
            )
        other = known.get(_composed(name))
        known[_composed(name)] = name
        if other == name:
            problems.append(f"{what} must be named once each, got {name!r} twice; remove one")
        elif other is not None:
            problems.append(
                f"{what} must have names that read differently, got {other!a} and {name!a}, which "
                "are one name written in two ways; write it in one, as "
                "unicodedata.normalize('NFC', name) does"
            )


def _composed(name: str) -> str:
    """Returns a name with each accented letter as one character, however it was written."""
    return unicodedata.normalize("NFC", name)


def parts_named(splits: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Returns which of :data:`PARTS` the name of each row's split begins with, else "train", (N,).

    Args:
        splits: split name -> its rows.
    """
    words = [next((part for part in PARTS if split.startswith(part)), "train") for split in splits]
    return np.repeat(words, [len(rows) for rows in splits.values()])


def parts(split: Any, length: int, problems: list[str]) -> npt.NDArray[np.int64]:
    """Returns for each example the number in :data:`PARTS` of what it is for, (N,).

    Args:
        split: (N,) words of :data:`PARTS`.
        length: N.
        problems: what must hold and does not is appended here.
    """
    words = [str(word) for word in np.asarray(split).ravel()]
    strange = [row for row, word in enumerate(words) if word not in PARTS]
    if strange:
        problems.append(
            f"split must be one of {', '.join(PARTS)}, got {words[strange[0]]} at index "
            f"{strange[0]}; rename it"
        )
    if len(words) != length:
        problems.append(f"split must say it of each example, got {len(words)} for {length}")
    return np.array([PARTS.index(word) if word in PARTS else 0 for word in words], np.int64)


def numbered(client: Iterable[Hashable] | Any, problems: list[str]) -> Tensor:
    """Numbers client ids of any hashable type by first appearance, from 0: (N,) int64."""
    return named(client, problems)[0]


def named(client: Iterable[Hashable] | Any, problems: list[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Numbers client ids of any hashable type by first appearance, from 0.

    Returns:
        (N,) int64 numbers, and the name of each: its id as text.
    """
    nobody: tuple[str, ...] = ()
    told = client.tolist() if hasattr(client, "tolist") else client
    if not in_order(told):
        problems.append(
            "client must be one hashable id per example, (N,), got "
            f"{one_line(repr(client), 100)}; pass an array"
        )
        return torch.zeros(0, dtype=torch.int64), nobody
    ids = list(told)
    if missing := [row for row, identity in enumerate(ids) if is_missing(identity)]:
        problems.append(
            f"client must name who holds each example, got {ids[missing[0]]} in {len(missing)} "
            f"rows, the first at index {missing[0]}; fill or drop them"
        )
    try:
        number = {identity: index for index, identity in enumerate(dict.fromkeys(ids))}
    except TypeError:
        problems.append("client must be one hashable id per example, (N,), got rows; flatten it")
        return torch.zeros(len(ids), dtype=torch.int64), nobody
    names = tuple(str(identity) for identity in number)
    if not missing and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problems.append(
            f"clients must have names of their own, but two different ids read {twice!r}; convert "
            "all ids to one type"
        )
    check_names("clients", dict.fromkeys(names), problems)
    return torch.tensor([number[identity] for identity in ids], dtype=torch.int64), names


def in_order(values: Any) -> bool:
    """Whether something has values in an order that it keeps: no word, no set, and no dict."""
    unordered = isinstance(values, str | bytes | Mapping | Set)
    return isinstance(values, Iterable) and (not unordered or isinstance(values, KeysView))


def is_missing(identity: Any) -> bool:
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
    if first <= 0 and last < len(y):
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


def examples_of(
    name: str, x: Tensor, y: Tensor, classes: int, client: Tensor | None, **others: Any
) -> Examples:
    """Puts checked tensors together; no example is held out, unless ``part`` says so."""
    held_out = torch.zeros(len(y), dtype=torch.bool)
    examples = Examples(name, x, y, held_out, classes, client, **others)
    return replace(examples, fingerprint=fingerprint_of(examples.tensors()))


def read_npz(path: Path, *, needed: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Reads all arrays of a NumPy archive; those in ``needed`` must be among them.

    Raises:
        UserError: no such file, not an archive, or missing arrays.
    """
    usual = needed or ("x", "y", "client")
    advice = f"write it with numpy.savez({', '.join(['path', *(f'{n}=...' for n in usual)])})"
    check_file(path)
    try:
        # Opened here, because np.load leaves the file of a damaged archive open.
        with path.open("rb") as file:
            if not is_zipfile(file):
                raise BadZipFile("it is no zip archive, or not all of one")
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                _check_sizes(archive)
                arrays = {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise UserError(
            f"{path} must be an .npz archive of plain arrays, cannot be read ({error}); {advice}"
        ) from error
    if not arrays.keys() >= set(needed):
        raise UserError(
            f"{path} must hold {' and '.join(needed)}, came {', '.join(arrays) or 'none'}; {advice}"
        )
    return arrays


_UNREADABLE = (
    OSError, EOFError, ValueError, BadZipFile, AttributeError, MemoryError, NotImplementedError,
    RuntimeError, TypeError, TokenError, zlib.error,
)  # fmt: skip
"""What reading a damaged or forged archive raises."""


def _check_sizes(archive: Any) -> None:
    """Raises ``ValueError`` where arrays are not as large as they say, or larger than memory.

    NumPy asks for the memory that a header announces before it reads a byte, and a few megabytes
    can be the compressed form of a terabyte.
    """
    headers: Mapping[tuple[int, ...], Any] = {
        (1, 0): npformat.read_array_header_1_0,
        (2, 0): npformat.read_array_header_2_0,
    }
    entries = archive.zip.infolist()
    if sum(entry.file_size for entry in entries) > total_memory():
        raise ValueError("its arrays are larger than this machine's memory")
    for entry in entries:
        with archive.zip.open(entry) as file:
            if file.read(len(npformat.MAGIC_PREFIX)) != npformat.MAGIC_PREFIX:
                continue  # no array, which is told elsewhere
            read = headers.get(tuple(file.read(2)))
            if read is None:
                raise ValueError(f"{entry.filename} is of a version of NumPy that we do not read")
            shape, _, dtype = read(file)
            if dtype.hasobject:
                raise ValueError(f"{entry.filename} holds objects of Python; give it a dtype")
            if prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} announces more than it holds")


def to_tensor(array: Any, name: str) -> Tensor:
    """Copies NumPy arrays, lists or tensors; widens unsigned integers that torch lacks.

    Raises:
        UserError: it is none, holds no numbers, or rows of several lengths; ``name`` says which it
            is.
    """
    if isinstance(array, Tensor):
        if array.layout != torch.strided:
            raise UserError(
                f"{name} must be dense, got {array.layout}; pass {name}.to_dense() in its place"
            )
        return array.detach().to("cpu", copy=True)
    if np.ma.is_masked(array):  # what is below the mask is any number
        raise UserError(
            f"{name} must have a value everywhere, got some that are masked; fill or drop them"
        )
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise UserError(
            f"{name} must be one array, with rows of one shape, got others ({error}); cut or pad "
            "them"
        ) from error
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"{name} must hold integers below 2**63, got {array.max()}; scale them")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    array = of_numbers(array)
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    _check_numbers(array, name)
    # Torch takes neither another machine's order of bytes nor strides below zero.
    return torch.tensor(np.asarray(array, array.dtype.newbyteorder("="), order="C"))


def of_numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns an array of objects that all are numbers as one of these; any other as it is."""
    numbers = (int, float, np.number, np.bool_)
    if array.dtype == object and array.ndim and all(isinstance(v, numbers) for v in array.flat):
        return np.array(array.tolist())
    return array


def _check_numbers(array: Any, name: str) -> None:
    """Raises ``UserError`` for an array of anything else, or of arrays."""
    if array.dtype == object and array.ndim == 0:  # as which NumPy takes a dict, or None
        raise UserError(
            f"{name} must be one array with a row for each example, those of all clients together, "
            f"got {type(array.item()).__name__}; put it together with numpy.concatenate"
        )
    if array.dtype == object and len(array) and np.ndim(array.flat[0]) > 0:
        raise UserError(
            f"{name} must be one array, got an array of arrays; put them together with numpy.stack"
        )
    if array.dtype.kind not in "buifc":
        raise UserError(
            f"{name} must hold numbers, got dtype {array.dtype}; convert it, or encode categories "
            "as integers (numpy.unique(labels, return_inverse=True)[1] numbers labels)"
        )


def _are_labels(y: Tensor) -> bool:
    """Returns whether floats are zeros and ones alone, which say which labels hold."""
    return bool(((y == 0) | (y == 1)).all() and (y == 1).any())


def _check_finite(name: str, values: Tensor, problems: list[str]) -> None:
    values = values.float()  # as which it is computed with
    wrong = ~torch.isfinite(values.flatten(1) if values.ndim > 1 else values[:, None])
    if wrong.any():
        rows = wrong.any(dim=1).nonzero().flatten()
        problems.append(
            f"{name} must be finite as float32, up to 3.4e38, got NaN or infinity in {len(rows)} "
            f"rows, the first at index {int(rows[0])}; remove, fill or scale them"
        )

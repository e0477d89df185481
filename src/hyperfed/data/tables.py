"""Tables as examples: which column says what, and the arrays that columns hold.

A table is a pandas ``DataFrame``, a parquet or CSV file, or the arrays of an ``.npz`` archive, each
of which counts as a column. One column says who holds each row (``client``), one what is to be
learned (``target``) and, where there is one, what each row is for (``split``: "train", "val" or
"test").
The others, or those that are named, are the features:

- columns of numbers are one row of floats, (N, columns);
- a column of arrays, or of lists in lists, is what it holds, (N, ...); several of one shape are
  channels, (N, columns, ...);
- a column of encoded images, as Hugging Face ``datasets`` writes them, is uint8 (N, C, H, W);
- one column of text is its UTF-8 bytes plus 1, with 0 before them up to the longest, (N, T) int64.

Labels that are words, or for tokens lists of words, and integers that do not begin at 0, are
numbered in their order and keep their names; integers of an archive that says how many ``classes``
there are stay as they are. Rows are counted from 0, the first below a file's column names.
"""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfed.data import arrays, pictures
from hyperfed.errors import UserError, nearest, one_line
from hyperfed.system.allocation import total_memory

Array = npt.NDArray[Any]

SUFFIXES = (".npz", ".parquet", ".csv")
"""How the names of files with a table end."""

TARGETS = ("label", "y", "target")
"""Columns one of which is what is to be learned where nothing else is said."""

NOTHING = np.zeros(0)

_INTEGER = r"\s*[+-]?(0|[1-9]\d*)\s*"
_NUMBER = r"\s*[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+|inf)([eE][+-]?\d+)?\s*"
"""What is written as one, without zeros before it."""

_NO_NUMBER = ("NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null", "None", "none", "?", "-")
"""What programs write in the place of a number where there is none; among words it may be one."""

_NAMELESS = re.compile(r"Unnamed: \d+")


@dataclass(frozen=True)
class Columns:
    """Which column is what.

    Attributes:
        client: who holds a row; ``client`` where None, if there is one.
        target: what is to be learned, or several columns of numbers that are learned together; the
            one of :data:`TARGETS` that is there where None.
        features: what it is learned from; ``x`` where None, or else all others.
        split: what a row is for; ``split`` where None, if there is one.
    """

    client: str | None = None
    target: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    split: str | None = None


@dataclass(frozen=True)
class Rows:
    """What the columns of a table hold.

    Attributes:
        x: (N, ...) features.
        y: (N,) labels as they are written there, or float targets, (N, K) of K numbers; None where
            there is no target column.
        client: (N,) ids; None without such a column.
        split: (N,) words; None without such a column.
        classes: number of labels, where an archive says it.
        features: the names of the columns that ``x`` is of, in their order.
        text: ``x`` holds the bytes of texts.
        left_out: rows of the table that are none of these.
    """

    x: Array
    y: Array | None
    client: Array | None
    split: Array | None
    features: tuple[str, ...]
    classes: int | None = None
    text: bool = False
    left_out: int = 0


def is_frame(data: Any) -> bool:
    """Whether something is a ``DataFrame``; pandas is not imported for it."""
    return hasattr(data, "columns") and hasattr(data, "iloc")


def frame_of(data: Any) -> Any:
    """Returns a table of another library (polars, pyarrow, datasets) as a ``DataFrame``.

    Anything else is as it came.
    """
    table = hasattr(data, "columns") or hasattr(data, "column_names")
    return data.to_pandas() if table and hasattr(data, "to_pandas") else data


def ending(path: str | Path) -> str:
    """Returns how a file's name ends, in small letters, such as ``.csv`` of DATA.CSV."""
    return Path(path).suffix.lower()


def read(path: Path, columns: Columns | None = None, words: Set[str] = frozenset()) -> Any:
    """Reads a table: a ``DataFrame``, or {name: array} of an archive.

    Clients and splits of a CSV file are as they are written there, and so are labels where a number
    would not tell them apart, such as 01 and 1.

    Args:
        path: a file whose name ends in one of :data:`SUFFIXES`.
        columns: which is what.
        words: the columns of a CSV file that hold words, also where all of them are numbers.

    Raises:
        UserError: another ending, no such file, or one that cannot be read.
    """
    if (kind := ending(path)) in SUFFIXES and not path.is_file():
        raise UserError(f"a table must be a file, but there is no {path}; name one that is there")
    if kind == ".npz":
        return arrays.read_npz(path, needed=())

    if kind == ".csv":
        return read_csv([path], columns or Columns(), words)[0]
    try:
        if kind == ".parquet":
            return read_parquet(path).to_pandas()
    except UNREADABLE as error:
        raise UserError(
            f"{path} must be a readable table, but is not: {one_line(str(error))}"
        ) from error
    raise UserError(
        f"a table's name must end in {', '.join(SUFFIXES)}, got {path}; convert it to one of them"
    )


UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, MemoryError,
    RecursionError,
)  # fmt: skip
"""What pyarrow and pandas raise of damaged or forged files."""


def read_csv(
    paths: Sequence[Path],
    columns: Columns,
    words: Set[str] = frozenset(),
    *,
    whole: Set[str] = frozenset(),
) -> tuple[Any, list[int]]:
    """Reads CSV files as one table, of which pandas is not to guess what ids and labels are.

    One that is called ``.tsv`` has tabs between its columns.

    Args:
        paths: the files.
        columns: which is what.
        words: columns that hold words, also where all of them are numbers.
        whole: others that are words or numbers by the whole of them.

    Returns:
        a ``DataFrame``, and the number of rows of each file.

    Raises:
        UserError: one cannot be read, or has other columns than the first.
    """
    import pandas
    from pandas.api.types import is_string_dtype

    # "NA" or "None" may be a label or a name; only an empty cell has none. And cells belong to the
    # names above them: of a longer row pandas would take the first ones for names of rows.
    read: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False}
    unguessed = words | whole | ids(columns)
    parts: list[Any] = []
    for path in paths:
        read["sep"] = "\t" if ".tsv" in path.suffixes[-2:] else ","
        try:
            header = list(pandas.read_csv(path, nrows=0, **read))
            _check_separated(header, path)
            kinds = dict.fromkeys(unguessed, str)
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                parts.append(pandas.read_csv(path, dtype=kinds, low_memory=False, **read))
            # As they are written: of the second of two names pandas makes another.
            written = pandas.read_csv(path, header=None, nrows=1, dtype=str, **read)
        except UserError:
            raise
        except pandas.errors.ParserWarning as error:
            raise UserError(
                f"{path} must have a name for each cell of a row, got {len(header)} above longer "
                "rows; name all cells (R's write.table leaves out the names of rows), or remove "
                "those without a name"
            ) from error
        except UNREADABLE as error:
            raise UserError(
                f"{path} must be a readable table, but is not: {one_line(str(error))}"
            ) from error
        problems: list[str] = []
        _check_names(list(written.loc[0]), unguessed | {*(columns.features or header)}, problems)
        arrays.raise_all(problems, f"{path} does not hold usable columns")
        if {*header} != {*parts[0]}:
            raise UserError(
                f"{path} must have the columns of {paths[0]}, {', '.join(parts[0])}, got "
                f"{', '.join(header)}; rename or add them"
            )
    of_words = [{name for name in part if is_string_dtype(part[name])} for part in parts]
    if mixed := set.union(*of_words) - set.intersection(*of_words):  # words by the whole of it
        return read_csv(paths, columns, words, whole=mixed)
    table = parts[0] if len(parts) == 1 else pandas.concat(parts, ignore_index=True)
    type_words(table, columns, but=words)
    return table, [len(part) for part in parts]


def _check_separated(header: Sequence[str], path: Path) -> None:
    """Raises ``UserError`` where the names of all columns were read as that of one."""
    if len(header) == 1 and (found := re.search(r"[;\t|]", header[0])):
        raise UserError(
            f"{path} must have commas between its columns, or tabs where it is called .tsv, got "
            f"{found[0]!r}; write it anew, as pandas.read_csv(path, sep={found[0]!r}) with "
            'decimal="," where numbers have one, and to_csv(path, index=False) do'
        )


def ids(columns: Columns) -> set[str]:
    """Returns the columns in which CSV files may have ids or labels, which are words there."""
    return {columns.client or "client", columns.split or "split", *(columns.target or TARGETS)}


def type_words(table: Any, columns: Columns, but: Set[str] = frozenset()) -> None:
    """Makes numbers of what a CSV file holds as words, where all are.

    Those of clients and splits stay words, and those of the columns ``but``.
    """
    import pandas

    for name in {*table} - {columns.client or "client", columns.split or "split"} - but:
        if pandas.api.types.is_string_dtype(table[name]):
            table[name] = _typed(table[name])


def _typed(words: Any) -> Any:
    """Returns a column of words as the numbers or truth values that all of them are, if so.

    What stands for no number among numbers is NaN, which is told of where it is used.
    """
    if words.isin(("True", "False")).all():
        return words == "True"
    if words.str.fullmatch(_INTEGER, na=False).all():
        try:
            return words.astype(np.int64)
        except (OverflowError, ValueError):  # more than 64 bits
            return words
    numbers, absent = words.str.fullmatch(_NUMBER, na=False), words.isin(_NO_NUMBER)
    if (numbers | absent).all() and numbers.any():
        return words.mask(absent).astype(np.float64)
    return words


def read_parquet(path: Path) -> Any:
    """Reads a parquet file: an Arrow table.

    Raises:
        ValueError: it is none, or says that it holds more numbers than memory does. A few bytes can
            be the compressed form of many.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        said = file.metadata
        groups = [said.row_group(number) for number in range(said.num_row_groups)]
        values = sum(g.column(c).num_values for g in groups for c in range(said.num_columns))
        if values * np.dtype(np.float64).itemsize > total_memory():
            raise ValueError(f"its {values} values are larger than this machine's memory")
        return file.read()


def rows_of(
    table: Any, columns: Columns, what: str, *, length: int | None = None, label: bool = True
) -> Rows:
    """Takes the columns of a table apart.

    Args:
        table: a ``DataFrame``, or {name: array}.
        columns: which is what.
        what: how an error names the table.
        length: of texts in bytes, longer ones being cut; that of the longest where None.
        label: whether the columns that are named must be there, and a target; where not, features
            are enough, as for a newcomer.

    Raises:
        UserError: lists all columns that are missing or hold what cannot be learned from.
    """
    problems: list[str] = []
    if is_frame(table):
        # A frame made of an array numbers its columns, and others have names of several parts.
        table = _with_index(table.set_axis([str(name) for name in table.columns], axis=1), columns)
    names = [str(name) for name in table]
    picked = _picked(table, names, columns, problems, label=label)
    arrays.raise_all(problems, f"the columns of {what} are {', '.join(names) or 'none'}")
    client, target, split, features = picked
    _check_names(names, {client, *target, split, *features}, problems)
    arrays.raise_all(problems, f"{what} does not hold usable columns")
    parts = [_no_tags(table[name], name, problems) for name in features]
    whose = "" if client else ", or say which column tells whose a row is (client)"
    x, text = _features(parts, features, length, problems, whose)
    y = _target({name: _values(table[name], name, problems) for name in target}, problems)
    held = {name: _no_tags(table[name], name, problems) for name in (client, split) if name}
    said: Any = table["classes"] if "classes" in names and not is_frame(table) else None
    classes = None if np.ndim(said) else arrays.class_count(said, problems)
    arrays.raise_all(problems, f"{what} does not hold usable columns")
    return Rows(
        x=x,
        y=y,
        client=held.get(client or ""),
        split=held.get(split or ""),
        features=features,
        classes=classes,
        text=text,
    )


def _with_index(table: Any, columns: Columns) -> Any:
    """Returns a ``DataFrame`` with those levels of its index as columns that are called as one.

    So pandas reads a parquet file again that it wrote of a table with such an index.
    """
    wanted = (ids(columns) | {*(columns.features or ())}) - {*table.columns}
    levels = [name for name in table.index.names if name in wanted]
    return table.reset_index(level=levels) if levels else table


def numbered(y: Array, *, numbers: bool = False) -> tuple[Array, tuple[str, ...]]:
    """Numbers labels that are words, or integers that do not begin at 0.

    Args:
        y: (N,) labels, or floats, or (N, T) words that label tokens.
        numbers: integers are numbers of labels already, wherever they begin.

    Returns:
        Labels and their names, in order; what needs no numbers as it is, and ().
    """
    if y.dtype == bool:
        return y.astype(np.int64), ("False", "True")
    counted = y.dtype.kind in "iu" and y.ndim == 1 and len(y) > 0
    fits = numbers or (counted and y.min() == 0 and y.max() < max(len(y), 2))
    if not arrays.is_text(y) and (not counted or fits):
        return y, ()
    names, number = np.unique(y, return_inverse=True)
    # Of several dimensions NumPy before 2 gives a flat one.
    return number.reshape(y.shape).astype(np.int64), tuple(str(name) for name in names)


def _picked(
    table: Any, names: Sequence[str], columns: Columns, problems: list[str], *, label: bool
) -> tuple[str | None, tuple[str, ...], str | None, tuple[str, ...]]:
    """Returns the names of client, target, split and features; None or () where there is none."""

    def one(key: str, given: str | None, usual: Sequence[str], *, needed: bool) -> str | None:
        if given is None:
            there = [name for name in usual if name in names]
            if len(there) > 1:
                problems.append(
                    f"{key} must be one of them, got {' and '.join(there)}; say which is the {key}"
                )
            return there[0] if there else None
        if given in names:
            return given
        if needed:
            problems.append(f"{key} must be one of them, got {given!r}{nearest(given, names)}")
        return None

    client = one("client", columns.client, ("client",), needed=label)
    wanted = columns.target or (None,)
    needed = label or any(name in names for name in wanted)  # some of several are not enough
    found = [one("target", name, TARGETS, needed=needed) for name in wanted]
    target = tuple(name for name in found if name is not None)
    split = one("split", columns.split, ("split",), needed=label)
    if label and not target and columns.target is None:
        problems.append(
            f"one of {', '.join(TARGETS)} must be among them, got none; say which is the target"
        )
    named = Counter(name for name in (client, *target, split) if name is not None)
    problems += [
        f"a column must be one of client, target and split, got {name!r} for several; name another"
        for name, count in named.items()
        if count > 1
    ]
    if columns.features is not None:
        problems += _wrong_features(columns.features, names, target, split)
        return client, target, split, columns.features
    left = [name for name in names if name not in (client, *target, split)]
    others = tuple(name for name in left if np.ndim(table[name]) > 0)
    features = ("x",) if "x" in left else others
    if nameless := [name for name in features if _NAMELESS.fullmatch(name)]:
        problems.append(
            f"a feature must have a name, got {nameless[0]!r}, as pandas calls a column without "
            "one (often the numbers of rows); leave it out, to_csv(..., index=False), or name the "
            "features"
        )
    if not features:
        problems.append("there must be features beside client, target and split, got none")
    return client, target, split, features


def _wrong_features(
    features: Sequence[str], names: Sequence[str], target: Sequence[str], split: str | None
) -> list[str]:
    """Returns what is wrong with the columns that are named as features."""
    if not features:
        return ["features must be some of them, got none; leave features out for all others"]
    absent = [name for name in features if name not in names]
    counts = Counter([*features, *{*target, split}])
    return [f"features must be some of them, got {name!r}" for name in absent] + [
        f"a feature must be there once, and be neither target nor split, got {name!r} again; "
        "leave it out of the features"
        for name, count in counts.items()
        if count > 1 and name is not None
    ]


def _check_names(names: Sequence[str], used: Set[str | None], problems: list[str]) -> None:
    """Tells which of the columns that are used has the name of another, too."""
    problems += [
        f"a column must have a name of its own, got {count} called {name!r}; rename or drop them"
        for name, count in Counter(names).items()
        if count > 1 and name in used
    ]


def _target(columns: Mapping[str, Array], problems: list[str]) -> Array | None:
    """Returns what is to be learned: a column as it is, or several, (N, columns).

    Several are numbers, or labels of which several may hold: integers or truth values, 0 and 1.
    """
    _check_finite(columns, problems)
    if len(columns) < 2:
        return next(iter(columns.values()), None)
    if problems:
        return NOTHING
    for name, values in columns.items():
        if values.ndim != 1 or values.dtype.kind not in "buif":
            problems.append(
                f"several targets must each be a column of numbers, got {name!r} with shape "
                f"{values.shape} {values.dtype}; name one target, or others"
            )
            return NOTHING
    labels = all(v.dtype.kind in "bui" and np.isin(v, (0, 1)).all() for v in columns.values())
    kind = np.int64 if labels else np.float64
    return np.stack([values.astype(kind) for values in columns.values()], axis=1)


def _no_tags(column: Any, name: str, problems: list[str]) -> Array:
    """Returns what a column holds that is no target: arrays of words are labels of tokens."""
    values = _values(column, name, problems)
    if values.ndim > 1 and arrays.is_text(values):
        problems.append(f"column {name!r} must be the target to hold arrays of words; name it so")
        return NOTHING
    return values


def _values(column: Any, name: str, problems: list[str]) -> Array:
    """Returns what a column holds: numbers, words (as objects) or stacked arrays of one of them."""
    values = np.asarray(column)
    if values.ndim == 0:
        problems.append(f"column {name!r} must hold a value for each row, got one; repeat it")
        return NOTHING
    if values.dtype.kind == "U":
        return values.astype(object)
    if values.dtype.kind == "S":
        problems.append(
            f"column {name!r} must hold words as text, got bytes, {values.dtype}; decode them "
            "(numpy.char.decode)"
        )
        return NOTHING
    if values.dtype.kind in "mM":
        problems.append(f"column {name!r} must not hold times, got {values.dtype}; make numbers")
        return NOTHING
    if values.dtype.kind == "c":
        problems.append(
            f"column {name!r} must hold real numbers, got {values.dtype}; make two columns of it"
        )
        return NOTHING
    return values if values.dtype != object else _objects(values, name, problems)


def _objects(values: Array, name: str, problems: list[str]) -> Array:
    """Returns words as they are, and stacked arrays or numbers of what Python objects are."""
    if missing := [row for row, cell in enumerate(values) if arrays.is_missing(cell)]:
        problems.append(
            f"column {name!r} must have a value in every row, got none in {len(missing)} rows, the "
            f"first is row {missing[0]}; fill or drop them"
        )
        return NOTHING
    kinds = [type(cell) for cell in values]
    if all(issubclass(kind, str) for kind in kinds):
        return values
    if all(issubclass(kind, dict) for kind in kinds) and "bytes" in values[0]:
        return _stacked(name, _pictures(values), problems)
    if all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        return _stacked(name, list(values), problems)
    if all(issubclass(kind, int | float | bool | np.number | np.bool_) for kind in kinds):
        return np.array(list(values))
    odd = next((row for row, kind in enumerate(kinds) if kind is not kinds[0]), None)
    other = "" if odd is None else f" and {kinds[odd].__name__} in row {odd}"
    problems.append(
        f"column {name!r} must hold numbers, words, lists or images, got {kinds[0].__name__} in "
        f"row 0{other}; convert it"
    )
    return NOTHING


def _pictures(cells: Array) -> list[Array]:
    """Decodes images to (C, H, W), in colour where one of them is."""
    found = [np.atleast_3d(pictures.pixels(cell["bytes"] or cell["path"])) for cell in cells]
    pictures.check_memory(found, "a table")
    channels = max(picture.shape[2] for picture in found)
    return [
        np.moveaxis(np.broadcast_to(picture, (*picture.shape[:2], channels)), -1, 0)
        for picture in found
    ]


def _stacked(name: str, cells: list[Any], problems: list[str]) -> Array:
    """Stacks cells of one shape."""
    try:
        found = [_array(cell) for cell in cells]
    except (ValueError, TypeError) as error:
        problems.append(
            f"column {name!r} must hold arrays of numbers, or of words, got others ({error})"
        )
        return NOTHING
    odd = next((row for row, cell in enumerate(found) if cell.shape != found[0].shape), None)
    if odd is not None:
        problems.append(
            f"column {name!r} must hold arrays of one shape, got {found[0].shape} in row 0 and "
            f"{found[odd].shape} in row {odd}; cut, pad or resize them"
        )
        return NOTHING
    return np.stack(found)


def _array(cell: Any) -> Array:
    """Returns lists in lists as one array, of words as objects."""
    array = np.asarray(cell)
    if array.dtype.kind in "UO" and arrays.is_text(words := np.asarray(cell, object)):
        return words
    if array.dtype != object:
        if array.dtype.kind not in "buif":
            raise ValueError(f"{array.dtype}")
        return array
    if array.ndim == 0:
        raise ValueError(f"{cell!r}")
    return np.stack([_array(part) for part in array])


def _features(
    parts: list[Array], names: Sequence[str], length: int | None, problems: list[str], whose: str
) -> tuple[Array, bool]:
    """Puts feature columns together: (N, ...), and whether they are texts; ``whose`` is advice."""
    if problems:
        return NOTHING, False
    words = [name for name, part in zip(names, parts, strict=True) if arrays.is_text(part)]
    if words and len(parts) == 1:
        return tokens(parts[0], length), True
    if words:
        problems.append(
            f"a column of text must be the only feature, got {', '.join(words)} among {len(names)};"
            f" make numbers of it, or name the features without it{whose}"
        )
        return NOTHING, False
    if len(parts) == 1 and parts[0].ndim > 1:
        _check_finite({names[0]: parts[0]}, problems)
        return parts[0], False
    _check_finite(dict(zip(names, parts, strict=True)), problems)
    shapes = {name: part.shape for name, part in zip(names, parts, strict=True)}
    odd = next((name for name in names if shapes[name] != shapes[names[0]]), None)
    if odd is not None:
        problems.append(
            f"features must have one shape, rows first, got {shapes[names[0]]} in {names[0]!r} and "
            f"{shapes[odd]} in {odd!r}; name those that go together"
        )
        return NOTHING, False
    return np.stack([part.astype(np.float64) for part in parts], axis=1), False


def tokens(texts: Array, length: int | None = None) -> Array:
    """Returns the UTF-8 bytes of texts plus 1, (N, T) int64, with zeros before them.

    A recurrent network so reads the end of a text last.

    Args:
        texts: (N,) words.
        length: T, to which longer texts are cut; that of the longest where None, at least 1.
    """
    encoded = [np.frombuffer(str(text).encode(), np.uint8) for text in texts]
    longest = length or max([len(text) for text in encoded] + [1])
    found = np.zeros((len(encoded), longest), np.int64)
    for row, text in zip(found, encoded, strict=True):
        kept = text[:longest]
        row[longest - len(kept) :] = kept.astype(np.int64) + 1
    return found


def _check_finite(columns: Mapping[str, Array], problems: list[str]) -> None:
    """Tells in which column and row a number is missing or infinite."""
    for name, values in columns.items():
        if values.dtype.kind != "f" or not len(values):
            continue
        wrong = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if wrong.any():
            problems.append(
                f"column {name!r} must be finite, got NaN or infinity in {int(wrong.sum())} rows, "
                f"the first is row {int(wrong.argmax())}; fill or drop them"
            )

"""A division of a data set as a file: one that others dealt, to run on, or ours, for others.

The file has one row for each example, in the order in which a task counts them: the splits of a
data set one after another, as ``datasets.load_dataset`` lists them, training rows before test rows
(CIFAR-10: rows 0 to 49,999, then 50,000 to 59,999), each split in its own order; the rows of an
.npz file, and scikit-learn's of the digits, in theirs. Columns, all of integers:

- ``client``: who holds the example, from 0 and without gaps; -1 where nobody does. Novel clients
  are the last ones, as ever.
- ``split``: 0 for training, 1 for validation, 2 for testing; -1 where it is not used.
- ``y``: its label, which may be left out. Where it is there, rows in another order are noticed.

A name in .npz is a NumPy archive (``numpy.savez``) of arrays (N,) by these names; a name in .csv is
text whose first line has the names.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hyperfed.data.arrays import raise_all, read_npz
from hyperfed.data.partitions import TEST, TRAIN, UNUSED, VAL, Partition
from hyperfed.data.shares import Integers
from hyperfed.errors import UserError
from hyperfed.system.files import atomic_write, check_file, check_suffix

NEEDED = ("client", "split")
SUFFIXES = (".npz", ".csv")


def read(path: Path, labels: Integers, clients: int) -> tuple[Integers, Integers]:
    """Reads who holds which example, and what for.

    Args:
        path: the file.
        labels: (N,) of the task's examples.
        clients: how many the file must have.

    Returns:
        (N,) the client of each example, -1 where nobody holds it; and (N,) TRAIN, VAL, TEST or
        UNUSED.

    Raises:
        UserError: the file cannot be read or does not divide these examples; lists all problems.
    """
    columns = _read_csv(path) if path.suffix.lower() == ".csv" else read_npz(path, needed=NEEDED)
    problems: list[str] = []
    client, split = (_integers(name, columns[name], len(labels), problems) for name in NEEDED)
    y = _integers("y", columns.get("y", labels), len(labels), problems)
    if not problems:
        _check_rows("client", client, client >= -1, "0 or more, or -1 for nobody", problems)
        codes = "0 (training), 1 (validation), 2 (testing) or -1 (unused)"
        _check_rows("split", split, np.isin(split, (TRAIN, VAL, TEST, UNUSED)), codes, problems)
        _check_rows("y", y, y == labels, "the label of the task's example in that row", problems)
    if not problems:
        used = (client >= 0) & (split != UNUSED)
        client, split = np.where(used, client, -1), np.where(used, split, UNUSED)
        _check_clients(client, split, clients, problems)
    raise_all(problems, f"{path} does not divide these {len(labels)} examples")
    return client, split


def write(path: Path, partition: Partition, labels: npt.NDArray[Any]) -> None:
    """Writes a division, with labels where there are any, so that :func:`read` gives it back.

    Args:
        path: the file, whose name ends in one of ``SUFFIXES``.
        partition: who holds what.
        labels: (N,) of all examples; floats, the targets of a regression, are left out.

    Raises:
        UserError: another ending, or the file cannot be written.
    """
    check_suffix(path, SUFFIXES, "partition")
    client, split = np.full(len(labels), -1, np.int32), np.full(len(labels), UNUSED, np.int8)
    sides = ((TRAIN, partition.train), (VAL, partition.val), (TEST, partition.test))
    for purpose, held in sides:
        for number, rows in enumerate(held):
            client[rows.numpy()], split[rows.numpy()] = number, purpose
    columns: dict[str, Any] = {"client": client, "split": split}
    if labels.dtype.kind in "iu":
        columns["y"] = labels.astype(np.int32)
    if path.suffix == ".npz":
        atomic_write(path, lambda file: np.savez_compressed(file, **columns))
        return
    table = zip(*(column.tolist() for column in columns.values()), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in table)]
    atomic_write(path, "\n".join([*lines, ""]).encode())


def _integers(name: str, column: Any, rows: int, problems: list[str]) -> Integers:
    """Returns a column as int64, where it holds one integer for each example."""
    values: npt.NDArray[Any] = np.asarray(column)
    if values.shape != (rows,):
        problems.append(
            f"{name} must have one row for each example, shape ({rows},), got {values.shape}; "
            "give -1 to what is not used"
        )
    elif values.dtype.kind not in "iu":
        problems.append(f"{name} must hold integers, got {values.dtype}; convert it")
    else:
        return values.astype(np.int64)
    return np.zeros(rows, dtype=np.int64)


def _check_rows(
    name: str, values: Integers, right: npt.NDArray[np.bool_], must: str, problems: list[str]
) -> None:
    wrong = np.flatnonzero(~right)
    if len(wrong):
        problems.append(
            f"{name} must be {must}, got {values[wrong[0]]} in row {wrong[0]} ({len(wrong)} such "
            "rows; rows count from 0)"
        )


def _check_clients(client: Integers, split: Integers, clients: int, problems: list[str]) -> None:
    numbers = np.unique(client[client >= 0])
    count = int(numbers.max(initial=-1)) + 1
    missing = np.setdiff1d(np.arange(count), numbers)
    idle = np.setdiff1d(numbers, client[split == TRAIN])
    if len(missing):
        problems.append(
            f"client must number the clients from 0 without gaps, got {count - 1} for the last but "
            f"no row of client {_few(missing)}; number them anew"
        )
    elif count != clients:
        problems.append(
            f"client must number as many clients as the task has, got {count} where "
            f"task.clients={clients}; set task.clients={count}"
        )
    if len(idle):
        problems.append(
            f"split must be 0 (training) in a row of each client, got none of client {_few(idle)}; "
            "leave those clients out"
        )


def _few(numbers: Sequence[int] | Integers) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _read_csv(path: Path) -> Mapping[str, Any]:
    check_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # Excel marks its beginning
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{path} must be a text file of columns, cannot be read ({error})"
        ) from error
    names = [name.strip() for name in lines[0]] if lines else []
    if absent := [name for name in NEEDED if name not in names]:
        raise UserError(
            f"{path} must have columns {' and '.join(NEEDED)}, named in its first line, lacks "
            f"{' and '.join(absent)}; came {', '.join(names) or 'none'}"
        )
    columns: dict[str, list[int]] = {name: [] for name in (*NEEDED, "y") if name in names}
    for row, cells in enumerate(lines[1:]):
        for name, values in columns.items():
            try:
                values.append(int(cells[names.index(name)]))
            except (ValueError, IndexError) as error:
                raise UserError(
                    f"{path} must have an integer in each column of a row, but row {row} (the "
                    f"first below the names is row 0) has {','.join(cells)!r} and no {name}"
                ) from error
    return columns

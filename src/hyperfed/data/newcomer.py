"""The data of a client that was never seen: a task of its own, like the one trained on."""

from collections.abc import Sequence
from dataclasses import replace
from os.path import exists
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperfed.data import arrays, features, newcomer_images, own_files, tables
from hyperfed.data.examples import hash_of
from hyperfed.data.networks import to_try, try_out
from hyperfed.data.own import Task
from hyperfed.data.partitions import TRAIN
from hyperfed.data.roster import RemoteTask
from hyperfed.errors import UserError, one_line
from hyperfed.system.files import at_home


def newcomer(task: Task, x: Any, y: Any = None, *, size: str | None = None) -> Task:
    """Makes the task of one client that was never seen: its own data, all else as in ``task``.

    The one client, number 0, is novel and trains on all its examples; it has none for validation
    and testing.

    Args:
        task: what the method was trained on.
        x: (m, ...) the client's examples, like the task's; or a table of them, like the one that
            the task was made of; or where they lie (:func:`read_like`).
        y: (m,) their targets, labels by name where they have names, or as a tensor of numbers, like
            the task's, (m, K) where those are; None where the client is unlabelled, or where the
            table or the file has them.
        size: which target network it runs; may be left out where the task has one.

    Raises:
        UserError: lists all in which the data do not fit the task, or as of :func:`read_like`.
    """
    problems: list[str] = []
    if (rows := _rows_of(task, x)) is not None:
        if y is not None:
            raise UserError("y must be left out where x is a table or a path, which has it")
        x, y = rows.x, rows.y
    inputs = arrays.features(x, problems)
    if inputs.is_floating_point() and task.x.is_floating_point():
        inputs = inputs.to(task.x.dtype)  # any precision will do, but no float is an image
    ours, given = (
        f"{tuple(sample.shape[1:])} {sample.dtype}".replace("torch.", "")
        for sample in (task.x, inputs)
    )
    if not problems and given != ours:
        problems.append(f"x must hold examples like the task's, {ours}, got {given}; convert it")
    targets = _targets_like(task, y, inputs, problems)
    if size is None and len(task.models) == 1:
        size = next(iter(task.models))
    if size not in task.models:
        problems.append(f"size must be one of {', '.join(task.models)}, got {size}; choose one")
    if not problems and task.features is None and inputs.dtype == torch.int64:
        model = {str(size): task.models[str(size)]}
        try_out(model, inputs[to_try(inputs)], None, 0, problems)
    arrays.raise_all(problems, "these data do not fit the task")
    nothing = torch.zeros(0, dtype=torch.int64)
    once = None if task.features is None else features.computed(task.transform, inputs, keep=False)
    return replace(
        task,
        x=inputs,
        y=targets,
        features=once,
        train=(torch.arange(len(inputs)),),
        val=(nothing,),
        test=(nothing,),
        sizes=(str(size),),
        novel=1,
        unlabelled=y is None,
        fingerprint=hash_of(inputs, *([] if y is None else [targets])),
        names=(),
    )


def _rows_of(task: Task, x: Any) -> tables.Rows | None:
    """Returns the rows of a table, or of what lies at a path; None where ``x`` is an array."""
    if isinstance(x, str | Path):
        return read_like(task, Path(at_home(str(x))))
    table = tables.frame_of(x)
    if not tables.is_frame(table):
        return None
    columns = task.columns or tables.Columns()
    names = own_files.names_of_target(getattr(x, "features", None), columns)
    return _by_names(task, rows_like(task, table, "the table"), names, "the table")


def _targets_like(task: Task, y: Any, inputs: Tensor, problems: list[str]) -> Tensor:
    """Returns targets of inputs as a task has them, zeros where ``y`` is None."""
    if y is None:
        nothing = _nothing(task, inputs)
        if not len(nothing):
            problems.append("x must hold at least one example, got none; pass some")
        return nothing
    y = arrays.label_numbers(y, task.labels, problems)
    if task.classes and _are_words(y):
        problems.append(
            "y must be numbers of labels, since those that the task was trained on have no names, "
            "got words; number them as they are numbered there"
        )
        return _nothing(task, inputs)
    if not task.classes:  # of a few numbers all may be whole, and are no labels for that
        y = arrays.to_tensor(y, "y")
        y = y if y.is_complex() else y.to(task.y.dtype)
    fine, ours = len(problems), tuple(task.y.shape[1:])
    classes, tokens = task.classes or None, bool(ours and task.classes)
    targets, _ = arrays.targets(y, classes, problems, tokens=tokens, amounts=not task.classes)
    if len(problems) == fine and tuple(targets.shape[1:]) != ours:
        problems.append(
            f"y must hold targets like the task's, {ours} for each example, got "
            f"{tuple(targets.shape[1:])}; convert it"
        )
    arrays.same_length(problems, x=inputs, y=targets)
    return targets.to(task.y.dtype)


def _nothing(task: Task, inputs: Tensor) -> Tensor:
    """Returns zeros for the targets of inputs, which nobody reads, shaped as the task's."""
    length = len(inputs) if inputs.ndim else 0
    return torch.zeros(length, *task.y.shape[1:], dtype=task.y.dtype)


def _are_words(y: Any) -> bool:
    """Whether targets are words, of which nobody can tell the numbers that a task has for them."""
    try:
        return not isinstance(y, Tensor) and arrays.is_text(np.asarray(y, dtype=object))
    except ValueError:  # of arrays of several shapes, which are told of where they are no labels
        return False


def read_like(task: Task, path: Path) -> tables.Rows:
    """Reads a newcomer's file, which has the columns of the task's and may lack the target.

    Labels that are numbers with names, as parquet files of ``datasets`` (Hugging Face) have them,
    come by these names where the task's have some.

    Args:
        task: what the method was trained on.
        path: a parquet, CSV or ``.npz`` file, or a folder of images
            (:mod:`hyperfed.data.newcomer_images`).

    Raises:
        UserError: it cannot be read, or as :func:`rows_like`.
    """
    if not exists(path):  # noqa: PTH110, which raises where a text is longer than a name may be
        raise UserError(
            "a newcomer's examples must be in a file or a folder, but there is no "
            f"{one_line(str(path), 200)}; name one that is there"
        )
    if path.is_dir():
        return _of_one_to_train_on(newcomer_images.read(task, path), str(path))
    rows = rows_like(task, tables.read(path, task.columns, _words(task)), str(path))
    names = own_files.label_names(path, task.columns or tables.Columns())
    return _by_names(task, rows, names, str(path))


def _words(task: Task) -> set[str]:
    """Returns the columns of a CSV file that hold words, though a newcomer's may all be numbers.

    These are texts, and labels of which not all are integers.
    """
    columns = task.columns or tables.Columns()
    texts, words = columns.features or ("x",), set[str]()
    if task.x.dtype == torch.int64 and len(texts) == 1:
        words |= {*texts}
    if not all(label.lstrip("-").isdecimal() for label in task.labels):
        words |= {*(columns.target or tables.TARGETS)}
    return words


def _by_names(task: Task, rows: tables.Rows, names: Sequence[str], what: str) -> tables.Rows:
    """Returns rows whose labels that are numbers with names come by these where the task's do."""
    if rows.y is None or not names or not task.labels:
        return rows
    return replace(rows, y=own_files.by_names(rows.y, names, what))


def rows_like(task: Task, table: Any, what: str) -> tables.Rows:
    """Takes a newcomer's table apart as that of a task was; it may lack the target.

    Rows that a column says are for validation or testing are left out, and not learned from.

    Args:
        task: what the method was trained on.
        table: a ``DataFrame``, or {name: array} of an archive, in which ``x`` may be the features
            in their order.
        what: how an error names the table.

    Raises:
        UserError: lists all columns that are missing or hold what cannot be learned from; or they
            are not those that sites have, the rows are those of several clients, or none is to
            train on.
    """
    length = task.x.shape[1] if task.x.ndim == 2 else None
    columns = task.columns or tables.Columns()
    arrays_alone = not tables.is_frame(table) and "x" in table
    if arrays_alone and not {*(columns.features or ())} & {*table}:
        columns = tables.Columns()  # of arrays, x and y, as in Python
    known = task.roster.features if isinstance(task, RemoteTask) and task.roster else ""
    if arrays_alone or not known:
        columns = replace(columns, features=columns.features or ("x",))  # never by what is there
    rows = tables.rows_of(table, columns, what, length=length, label=False)
    if known and not arrays_alone and hash_of(*rows.features) != known:
        raise UserError(
            f"the features of {what} must be the columns that the sites have, in their order, got "
            f"{', '.join(rows.features)}; leave out what is none, or rename or reorder them"
        )
    return _of_one_to_train_on(rows, what)


def _of_one_to_train_on(rows: tables.Rows, what: str) -> tables.Rows:
    """Returns the rows of one client that are not for validation or testing."""
    if rows.client is not None and len(several := dict.fromkeys(rows.client.tolist())) > 1:
        raise UserError(
            f"{what} must hold the rows of one client, who gets one model, got those of "
            f"{len(several)} ({', '.join(map(str, list(several)[:3]))}, ...); pass one client's"
        )
    return rows if rows.split is None else _to_train_on(rows, rows.split, what)


def _to_train_on(rows: tables.Rows, split: tables.Array, what: str) -> tables.Rows:
    """Leaves out the rows that are for validation or testing."""
    problems: list[str] = []
    ours = arrays.parts(split, len(rows.x), problems) == TRAIN
    if any(len(held) != len(rows.x) for held in (rows.y, rows.client) if held is not None):
        problems.append("each column must have a value for each row, but one is shorter; fill it")
    if not problems and not ours.any():
        problems.append("split must be train in a row or more, got none; pass some to train on")
    arrays.raise_all(problems, f"{what} does not hold a newcomer's examples")
    return replace(
        rows,
        x=rows.x[ours],
        y=None if rows.y is None else rows.y[ours],
        client=None if rows.client is None else rows.client[ours],
        split=split[ours],
        left_out=int((~ours).sum()),
    )

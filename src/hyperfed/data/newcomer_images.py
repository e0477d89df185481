"""A newcomer's folder of images: one person's folder, as those that a task was made of.

``CLASS/*.png``, below a folder for each split or not; without labels the images themselves; or any
places, where a ``metadata.csv`` beside them has the columns of the task's.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from unicodedata import normalize

import numpy as np
from torch import Tensor

from hyperfed.data import arrays, datasets, folder_checks, own_files, readers, tables
from hyperfed.data.own import Task
from hyperfed.errors import UserError


def read(task: Task, folder: Path) -> tables.Rows:
    """Reads a folder, whose labels come by their names where the task's have some.

    Args:
        task: what the method was trained on.
        folder: of images.

    Raises:
        UserError: the task is not of images, the folder cannot be read or holds none, or their
            places do not tell of classes.
    """
    if task.x.ndim != 4:  # before all of a large folder is looked at
        raise UserError(
            f"a newcomer's folder must be of images, as the task's examples are not, came {folder};"
            " name a file"
        )
    columns = task.columns or tables.Columns()
    client, split = columns.client or "client", columns.split or "split"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        splits = datasets.open_folder(folder, scratch, columns)
        features = next(iter(splits.values())).features
        image = readers.image_column(features, str(folder))
        x = _in_channels_of(task, readers.decoded(splits, image, str(folder)))
        # The library leaves labels out where all images of a split are of one class.
        places = None if any(folder.rglob("metadata.*")) else _folders(splits, folder.resolve())
        if places is not None:
            y = _classes(task, places, folder)
        elif {*features} - {image, client, split}:
            (target,) = columns.target or (None,)
            y = _column(task, splits, target, (client, split), str(folder))
        else:
            y = None
        told = split in features
        words = readers.column_of(splits, split) if told else arrays.parts_named(splits)
        owner = readers.column_of(splits, client) if client in features else None
    return tables.Rows(x.numpy(), y, owner, words, ())


def _in_channels_of(task: Task, images: Tensor) -> Tensor:
    """Returns (N, C, H, W) images, grey ones in colour where the task's are."""
    grey = images.ndim == task.x.ndim == 4 and images.shape[1] == 1
    return images.expand(-1, task.x.shape[1], -1, -1) if grey else images


def _folders(splits: Mapping[str, Any], root: Path) -> list[str] | None:
    """Returns of each image the folder that it is in, below that of its split; "" for none.

    None where images are no files there, such as those in a parquet file.

    Raises:
        UserError: one is in a folder of a folder, which may be somebody else's.
    """
    paths = [PurePath(path) for rows in splits.values() for path in folder_checks.image_paths(rows)]
    if not all(path.is_relative_to(root) for path in paths):
        return None
    found = []
    for path in paths:
        below = path.relative_to(root).parts[:-1]
        if below and below[0] in folder_checks.SPLITS:
            below = below[1:]
        if len(below) > 1:
            raise UserError(
                "images of a newcomer must be in CLASS/*.png, or *.png without labels, below a "
                f"folder for each split or not, got {PurePath(*below)}/ in {root}; name the folder "
                "of one client"
            )
        found.append("".join(below))
    return found


def _classes(task: Task, folders: Sequence[str], root: Path) -> tables.Array | None:
    """Returns (N,) classes by the folders of images; None where they are in none.

    They are names, and numbers where the task's labels have no names.

    Raises:
        UserError: a folder is called as none of the task's labels is.
    """
    if not any(folders):
        return None
    labels = task.labels or [str(number) for number in range(task.classes)]
    # A disk may spell an accented letter as two characters, and another one as one.
    spelled = {normalize("NFC", label): label for label in labels}
    named = [spelled.get(normalize("NFC", folder)) for folder in folders]
    if strange := sorted({f for f, name in zip(folders, named, strict=True) if name is None}):
        known = ", ".join(labels) if len(labels) < 20 else f"{labels[0]}, ..., {labels[-1]}"
        raise UserError(
            f"images of {root} must be in folders that are called as labels of the run are "
            f"({known}), or in none, got {strange[0] or 'some in none'}; rename it"
        )
    return np.array(named, dtype=object if task.labels else np.int64)


def _column(
    task: Task, splits: Mapping[str, Any], target: str | None, besides: Sequence[str], name: str
) -> tables.Array:
    """Returns (N,) labels by a column, whose names they come by where the task's have some.

    Raises:
        UserError: there is no such column.
    """
    features = next(iter(splits.values())).features
    column = target or readers.label_column(features, name, besides)
    if column not in features:
        raise UserError(
            f"the images of {name} must have the column {column}, as those of the run have, got "
            f"{', '.join(features)}; add it"
        )
    y, names = readers.column_of(splits, column), readers.class_names(features[column])
    return own_files.by_names(y, names, name) if names and task.labels else y

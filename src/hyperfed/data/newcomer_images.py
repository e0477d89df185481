"""A newcomer's folder of images: one person's folder, as those that a task was made of.

``CLASS/*.png``, below a folder for each split or not; without labels the images themselves; or any
places, where a ``metadata.csv`` beside them has the columns of the task's.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

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
        UserError: it cannot be read or holds no images, or their places do not tell of classes.
    """
    columns = task.columns or tables.Columns()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        splits = datasets.open_folder(folder, scratch, columns)
        features = next(iter(splits.values())).features
        image = readers.image_column(features, str(folder))
        x = _in_channels_of(task, readers.decoded(splits, image, str(folder)))
        client, split = columns.client or "client", columns.split or "split"
        y = None
        if {*features} - {image, client, split}:
            target = columns.target or readers.label_column(features, str(folder), (client, split))
            if target not in features:
                raise UserError(
                    f"the images of {folder} must have the column {target}, as those of the run "
                    f"have, got {', '.join(features)}; add it"
                )
            y, names = readers.column_of(splits, target), readers.class_names(features[target])
            if names and task.labels:
                y = own_files.by_names(y, names, str(folder))
        folders = _folders(splits, folder)
        if {*features} == {image}:  # of one class alone the library makes no label
            y = _classes(task, folders, folder)
        told = split in features
        words = readers.column_of(splits, split) if told else arrays.parts_named(splits)
        owner = readers.column_of(splits, client) if client in features else None
    return tables.Rows(x.numpy(), y, owner, words, ())


def _in_channels_of(task: Task, images: Tensor) -> Tensor:
    """Returns (N, C, H, W) images, grey ones in colour where the task's are."""
    grey = images.ndim == task.x.ndim == 4 and images.shape[1] == 1
    return images.expand(-1, task.x.shape[1], -1, -1) if grey else images


def _folders(splits: Mapping[str, Any], root: Path) -> list[str]:
    """Returns of each image the folder that it is in, below that of its split; "" for none.

    Raises:
        UserError: one is in a folder of a folder, which may be somebody else's.
    """
    found = []
    for rows in splits.values():
        for path in map(PurePath, folder_checks.image_paths(rows)):
            below = path.relative_to(root.resolve()).parts[:-1] if path.is_absolute() else ()
            if below and below[0] in folder_checks.SPLITS:
                below = below[1:]
            if len(below) > 1:
                raise UserError(
                    f"images of a newcomer must be in CLASS/*.png, or *.png without labels, below "
                    f"a folder for each split or not, got {PurePath(*below)}/ in {root}; name the "
                    "folder of one client"
                )
            found.append("".join(below))
    return found


def _classes(task: Task, folders: list[str], root: Path) -> tables.Array | None:
    """Returns (N,) names of classes by the folders of images; None where they are in none.

    Raises:
        UserError: a folder is called as none of the task's labels is.
    """
    if not any(folders):
        return None
    if strange := sorted({*folders} - {*task.labels}):
        raise UserError(
            f"images of {root} must be in folders that are called as labels of the run are "
            f"({', '.join(task.labels) or 'which have no names'}), or in none, got "
            f"{strange[0] or 'some in none'}; rename it"
        )
    return np.array(folders, dtype=object)

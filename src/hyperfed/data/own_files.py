"""Your own files as examples: a table (:mod:`hyperfed.data.tables`), or a folder.

A folder is what ``datasets.load_dataset`` (Hugging Face) can read: images with one label column, or
tables. Images in ``person/class/*.png``, below a folder for each split or not, belong to the person
whose folder they are in.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperfed.data import arrays, folder_checks, readers, tables
from hyperfed.data.examples import Examples, fingerprint_of
from hyperfed.data.tables import Columns
from hyperfed.errors import UserError, one_line


def from_file(path: Path, columns: Columns | None = None) -> Examples:
    """Reads a parquet, CSV or ``.npz`` file.

    Raises:
        UserError: no such file, or one that does not hold examples; lists all that is wrong.
    """
    columns = columns or Columns()
    table = tables.read(path, columns)
    return of_table(table, path.stem, columns, str(path), label_names(path, columns))


def label_names(path: Path, columns: Columns) -> Sequence[str]:
    """Returns the names of a parquet file's labels that are numbers with names; () of any other.

    Raises:
        UserError: what it says of the kinds of its columns cannot be read.
    """
    if tables.ending(path) != ".parquet":
        return ()
    from pyarrow import parquet

    schema = parquet.read_schema(path)
    if b"huggingface" not in (schema.metadata or {}):
        return ()
    import datasets  # takes seconds to import

    try:
        features = datasets.Features.from_arrow_schema(schema)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} must say what datasets (Hugging Face) takes for the kinds of its columns, but "
            f"does not ({one_line(str(error))}); write it anew"
        ) from error
    return names_of_target(features, columns)


def names_of_target(features: Any, columns: Columns) -> Sequence[str]:
    """Returns the names of labels that are numbers with names.

    Args:
        features: {column: its kind} of ``datasets`` (Hugging Face); () of anything else.
        columns: which is what.
    """
    if not isinstance(features, Mapping):
        return ()
    usual = next((name for name in tables.TARGETS if name in features), "")
    target, *several = columns.target or (usual,)
    return () if several else readers.class_names(features.get(target))


def by_names(y: tables.Array, names: Sequence[str], what: str) -> tables.Array:
    """Returns (N,) labels that are numbers with names by these.

    Raises:
        UserError: one of them has none; ``what`` says of what.
    """
    problems: list[str] = []
    numbers, _ = arrays.targets(y, len(names), problems)
    arrays.raise_all(problems, f"{what} does not hold usable labels")
    named: tables.Array = np.array(names, dtype=object)[numbers.numpy()]
    return named


def from_csv_files(files: Mapping[str, Sequence[Path]], name: str, columns: Columns) -> Examples:
    """Reads the CSV files of each split as one table, whose ids and labels are as written there.

    Raises:
        UserError: one that does not hold examples; lists all that is wrong.
    """
    table, rows = tables.read_csv([path for paths in files.values() for path in paths], columns)
    left = iter(rows)
    splits = {split: range(sum(next(left) for _ in paths)) for split, paths in files.items()}
    return _of_splits(table, splits, name, columns)


def _of_splits(
    table: Any,
    splits: Mapping[str, Any],
    name: str,
    columns: Columns,
    named: Sequence[str] = (),
) -> Examples:
    """Turns the table that several splits make, {name: its rows}, into examples.

    What rows are for a column of splits says before them. Where none is for validation, some of
    those for training are, as of images.
    """
    examples = of_table(table, name, columns, name, named)
    if examples.part is not None or len(splits) < 2:
        return examples
    words = arrays.parts_named(splits)
    if "val" not in words:
        return replace(examples, held_out=torch.from_numpy(words == "test"))
    return replace(examples, part=torch.from_numpy(arrays.parts(words, len(examples), [])))


def of_table(
    table: Any, name: str, columns: Columns, what: str, named: Sequence[str] = ()
) -> Examples:
    """Turns a table into examples.

    Args:
        table: a ``DataFrame``, or {name: array}.
        name: of the result.
        columns: which is what.
        what: how an error names the table.
        named: names of the labels 0, 1, ..., where these are numbers with names.

    Raises:
        UserError: lists all that is wrong with the table.
    """
    rows = tables.rows_of(table, columns, what)
    assert rows.y is not None, "a table without a target was refused"
    problems: list[str] = []
    x = arrays.features(rows.x, problems)
    numbers, labels = rows.y, tuple(named)
    if not named:
        numbers, labels = tables.numbered(rows.y, numbers=rows.classes is not None)
    arrays.check_names("labels", labels, problems)
    y, classes = arrays.targets(numbers, len(labels) or rows.classes, problems)
    names: tuple[str, ...] = ()
    client = part = None
    held: dict[str, Tensor] = {"x": x, "y": y}
    if rows.client is not None:
        client, names = arrays.named(rows.client, problems)
        held["client"] = client
    arrays.same_length(problems, **held)
    if rows.split is not None:
        part = torch.from_numpy(arrays.parts(rows.split, len(y), problems))
    arrays.raise_all(problems, f"{what} does not hold usable examples")
    x, y = (values.float() if values.is_floating_point() else values for values in (x, y))
    return arrays.examples_of(
        name,
        x,
        y,
        classes,
        client,
        names=names,
        labels=labels,
        part=part,
        features=rows.features,
        text=rows.text,
    )


def numbered_by(examples: Examples, labels: Sequence[str]) -> Examples:
    """Returns examples whose labels are numbered in the order of a list of their names.

    Raises:
        UserError: labels without names, a name twice, or a label that is not in the list.
    """
    if not examples.labels:
        raise UserError(
            f"labels must be words where they are named in order, but those of {examples.name} are "
            "not; leave task.labels out"
        )
    problems: list[str] = []
    words = np.array(examples.labels, dtype=object)[examples.y.numpy()]
    y, classes = arrays.words_in_order(words, labels, problems)
    arrays.raise_all(problems, f"{examples.name} does not hold usable labels")
    changed = replace(examples, y=y, classes=classes, labels=tuple(labels))
    return replace(changed, fingerprint=fingerprint_of(changed.tensors()))


def read_rows(
    rows: readers.Rows, name: str, columns: Columns | None = None, folder: Path | None = None
) -> Examples:
    """Reads what ``datasets.load_dataset`` has opened: images with a label, or a table.

    Args:
        rows: opens it.
        name: of the result.
        columns: which is what.
        folder: that it has opened; None of what is on the hub.

    Raises:
        UserError: no examples; lists all that is wrong.
    """
    columns = columns or Columns()
    splits = rows(None)
    features = next(iter(splits.values())).features
    if any(type(kind).__name__ == "Image" for kind in features.values()):
        return _images(splits, name, columns, folder and folder_checks.whole(folder))
    import pandas

    table = pandas.concat([held.to_pandas() for held in splits.values()], ignore_index=True)
    if next(iter(splits.values())).info.builder_name == "csv":
        tables.type_words(table, columns)
    return _of_splits(table, splits, name, columns, names_of_target(features, columns))


def _images(
    splits: Mapping[str, Any],
    name: str,
    columns: Columns,
    folder: Path | None,
) -> Examples:
    """Reads images, and of whom they are by a column or by the folders that they are in."""
    features = next(iter(splits.values())).features
    _check_columns(features, columns, name)
    column = columns.client or "client"
    besides = (column, columns.split or "split")
    if folder and len(features) == 1 and not any(folder.rglob("metadata.*")):
        _raise_unlabelled(splits, name, folder.resolve())
    (target,) = columns.target or (readers.label_column(features, name, besides),)
    examples = readers.images(lambda _: splits, name, client=column, label=target)
    labels = readers.labels_of(splits, target, features[target], name)[1]
    if not labels:  # integers of a metadata file, numbered as those of a table are
        numbers, labels = tables.numbered(examples.y.numpy())
        classes = len(labels) or examples.classes
        examples = replace(examples, y=torch.from_numpy(numbers), classes=classes)
    client = examples.client
    names: tuple[str, ...] = ()
    if column in features:
        ids, _ = readers.ids_of(splits, column, name)
        names = tuple(str(identity) for identity in ids)
    elif (people := _people(splits, labels, name, folder)) is not None:
        ids, number = np.unique(people, return_inverse=True)
        client, names = torch.from_numpy(number), tuple(str(identity) for identity in ids)
    problems: list[str] = []
    for what, called in (("clients", names), ("labels", labels)):
        arrays.check_names(what, called, problems)
    words = part = None
    if (split := columns.split or "split") in features:
        words = readers.column_of(splits, split)
    elif any(name.startswith("val") for name in splits):  # else some of training's are for that
        words = arrays.parts_named(splits)
    if words is not None:
        part = torch.from_numpy(arrays.parts(words, len(examples), problems))
    arrays.raise_all(problems, f"{name} does not hold usable examples")
    return replace(examples, client=client, names=names, labels=labels, part=part)


def _check_columns(features: Mapping[str, Any], columns: Columns, name: str) -> None:
    """Raises ``UserError`` where columns are named that images do not have, or several targets."""
    named = [*(columns.target or ()), columns.client, columns.split]
    absent = [key for key in named if key is not None]
    if columns.features is not None or any(key not in features for key in absent):
        raise UserError(
            f"{name} holds images, whose columns are {', '.join(features)}, got others: "
            f"{', '.join([*absent, *(columns.features or ())])}; name those, and no features"
        )
    if len(columns.target or ()) > 1:
        raise UserError(
            f"images must have one target, their label, got {', '.join(columns.target or ())}; "
            "name one, or bring the images as arrays"
        )


def _raise_unlabelled(splits: Mapping[str, Any], name: str, root: Path) -> None:
    """Raises ``UserError`` where the library takes no names of folders for labels, and says why."""
    paths = [PurePath(path) for rows in splits.values() for path in folder_checks.image_paths(rows)]
    depths = Counter(len(path.parts) for path in paths)
    usual, odd = depths.most_common()[0][0], depths.most_common()[-1][0]
    found, other = (next(p for p in paths if len(p.parts) == n) for n in (usual, odd))
    got = f"those of {found.parent.name} alone"
    if usual != odd:
        got = f"{other.relative_to(root)} beside {found.relative_to(root)}"
    raise UserError(
        f"images of {name} must be of two classes or more, in class/*.png or person/class/*.png, "
        f"below a folder for each split or not, all as deep, got {got}; move or add some"
    )


def _people(
    splits: Mapping[str, Any], labels: Sequence[str], name: str, folder: Path | None
) -> list[str] | None:
    """Returns for each image of ``person/class/file`` the person; None of ``class/file``.

    Raises:
        UserError: labels are names of folders in any other layout of a folder.
    """
    places = [
        (split, PurePath(path).parts[:-1])
        for split, rows in splits.items()
        for path in folder_checks.image_paths(rows)
    ]
    below = [parts for _, parts in places]
    root = folder.resolve().parts if folder else ()
    if any(parts[: len(root)] != root for parts in below):
        root = ()  # where it begins is not to be told, such as of an archive
    if {*labels} != {parts[-1] for parts in below if parts}:
        root = ()  # a person's images may lie in any folders
    least = 2 if root else 0  # person and class, unless only what all have can be left out
    below = _without_common([parts[len(root) :] for parts in below], least)
    if _are_splits([split for split, _ in places], below):  # else it is who is called so
        below = [parts[1:] for parts in below]
        below = _without_common(below, least) if root else below
    people = [parts[0] for parts in below if len(parts) == 2]
    found = len(people) == len(below)
    if not root:
        return people if found else None
    if all(len(parts) == 1 for parts in below):
        return None
    if found and (len(set(people)) > 1 or len(splits) > 1):
        return people
    if found:
        raise UserError(
            f"images of {name} must be in class/*.png, nobody's, or in person/class/*.png of two "
            f"people or more, got those of {people[0]} alone; name the folder {people[0]} in its "
            "place, so that its images are dealt by task.partition, or add those of others"
        )
    raise UserError(
        f"images of {name} must be in class/*.png or person/class/*.png, below a folder for each "
        f"split or not, got {PurePath(*below[0])}/; move them, or say whose they are in a column "
        "client of a metadata.csv"
    )


def _without_common(places: list[tuple[str, ...]], least: int) -> list[tuple[str, ...]]:
    """Leaves out the first folders that all have in common, but for so many as must stay."""
    common = 0
    while all(
        len(parts) > common + least and parts[common] == places[0][common] for parts in places
    ):
        common += 1
    return [parts[common:] for parts in places]


def _are_splits(splits: Sequence[str], places: Sequence[tuple[str, ...]]) -> bool:
    """Whether the first folder of each image is that of its split."""
    tops = {(split, *parts[:1]) for split, parts in zip(splits, places, strict=True)}
    names = [top[1] if len(top) > 1 else "" for top in tops]
    words = [{*re.split(r"[-._ 0-9]", name)} for name in names]
    of_one = len(names) == len({*splits})
    return all(name in folder_checks.SPLITS for name in names) or (
        of_one and all(each & {*folder_checks.SPLITS} for each in words)
    )

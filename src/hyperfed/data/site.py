"""The data of a site: its own clients' examples, read from its own disk and shown to nobody.

Three layouts:

- an ``.npz`` archive (``numpy.savez``) of ``x``, ``y`` and ``client``, one row for each example;
  ``x`` and ``y`` as in :func:`hyperfed.data.own.from_arrays`, ``client`` integers or strings.
  Optional: ``split``, one of "train", "val" and "test" for each example, and ``classes``, the
  number of labels in the whole federation where this site may lack some;
- a table: a parquet or CSV file, or an archive, whose columns are found or named as those of
  :mod:`hyperfed.data.tables` are, numbers as one row of floats;
- a parquet file, or a folder that ``datasets.load_dataset`` (Hugging Face) can read, with a column
  ``client`` and either one image and one label column, or columns ``x`` (lists of equal length) and
  ``y``. Optional: a column ``split``; else splits whose names start with "test" or "val" are held
  out.

Where nothing says what is for validation and testing, 15 % of each client's examples are for each.

Labels may be words. Each site sees some of them, so that all number them alike by one list of their
names, in order: the run's ``task.labels``, or one that the site is told. Labels that are numbers
with names (``ClassLabel`` of ``datasets``) are numbered anew by it.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hyperfed.data import arrays, hub, own_files, partitions, readers, tables
from hyperfed.data.examples import channel_moments, hash_of
from hyperfed.data.own import Task
from hyperfed.data.roster import Frame, Introduction, Member
from hyperfed.data.tables import Columns
from hyperfed.errors import UserError, one_line
from hyperfed.system.files import PRIVATE, refused

LONGEST = 100
"""Letters of a client's name, which becomes that of a folder."""

READING = "reading-"
"""How the name of a folder begins that is there while a site's folder of data is read."""


@dataclass(frozen=True)
class SiteData:
    """Examples of a site's clients.

    Attributes:
        x: (N, ...) every example: uint8 images (N, C, H, W), floats or int64 tokens.
        y: (N,) int64 labels, or floats for regression, (N, K) where each has K numbers.
        classes: the number of labels that this site knows of; 0 for regression.
        rows: client -> its examples of each of :data:`hyperfed.data.arrays.PARTS`.
        models: builds the targets, {size: network}, from the frame of a run.
        site: with which the names of its clients begin.
        size: which target its clients run; empty where the task has one.
        novel: its clients join after training.
        unlabelled: novel clients have no training labels.
        labels: names of the labels 0, 1, ..., where the data have words.
        features: the columns that the numbers or channels of an example are, in their order; ()
            where none is named for each.
    """

    x: Tensor
    y: Tensor
    classes: int
    rows: Mapping[str, tuple[Tensor, Tensor, Tensor]]
    models: Callable[[Frame], Mapping[str, nn.Module]] | None = None
    site: str = ""
    size: str = ""
    novel: bool = False
    unlabelled: bool = False
    labels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def at(self, **where: Any) -> "SiteData":
        """Returns the same data with other values of the fields from ``models`` on."""
        return replace(self, **where)

    @property
    def target_size(self) -> int:
        """Numbers that a target of regression has; 1 where there are classes."""
        return self.y.shape[1:].numel()

    def introduce(self) -> Introduction:
        """Returns what the server may know: how many examples each client has, never one.

        Images of those who train are normalised by all of theirs; of others nobody needs any.
        """
        trained = [train for train, _, _ in self.rows.values() if not self.novel]
        images = torch.cat(trained) if trained else torch.zeros(0, dtype=torch.int64)
        mean, std = channel_moments(self.x[images])
        members = tuple(
            Member(self._name(client), len(train), len(val), len(test), self.size, self.novel)
            for client, (train, val, test) in self.rows.items()
        )
        return Introduction(
            members=members,
            shape=tuple(self.x.shape[1:]),
            dtype=str(self.x.dtype),
            classes=self.classes,
            target_size=self.target_size,
            pixels=len(images),
            mean=mean,
            std=std,
            fingerprint=hash_of(self.x, self.y, *(part for r in self.rows.values() for part in r)),
            labels=self.labels,
            features=hash_of(*self.features) if self.features else "",
        )

    def check_client(self, number: int, name: str) -> None:
        """Raises ``UserError`` for a client that is not at this site."""
        if name not in self._named:
            raise UserError(
                f"client {name} must be at this site, but is not; put its rows back, or do without"
            )

    def task(self, frame: Frame, names: Mapping[int, str]) -> Task:
        """Returns a task in which the clients that are called have their data, if they are here.

        Raises:
            UserError: the site does not fit the frame. Whether a client of a run is novel is the
                site's to say; a newcomer may be of any.
        """
        rows = self._named
        if otherwise := [name for n, name in names.items() if not self._may_be(n, frame)]:
            raise UserError(
                f"client {otherwise[0]} must {'join after' if self.novel else 'take part in'} "
                "training, as its site says, but the message has it otherwise; start a new run"
            )
        ours = (tuple(self.x.shape[1:]), str(self.x.dtype), self.target_size)
        theirs = (frame.shape, frame.dtype, frame.target_size)
        known = self.classes <= frame.classes and bool(self.classes) == bool(frame.classes)
        if ours != theirs or not known:
            raise UserError(
                f"the site's examples must be {frame.shape} {frame.dtype} of {frame.classes} "
                f"classes and {frame.target_size} numbers to learn, got {ours[0]} {ours[1]} of "
                f"{self.classes} and {self.target_size}; start a new run"
            )
        nothing = torch.zeros(0, dtype=torch.int64)
        absent = (nothing, nothing, nothing)
        numbered = [rows.get(names.get(n, ""), absent) for n in range(frame.clients)]
        train, val, test = zip(*numbered, strict=True)
        assert self.models is not None, "a site that answers has been told what its clients run"
        return Task(
            name=self.site,
            x=self.x,
            y=self.y,
            train=train,
            val=val,
            test=test,
            models=self.models(frame),
            unlabelled=self.unlabelled,
            labels=self.labels,
            **frame.task_options(),
        )

    def _may_be(self, number: int, frame: Frame) -> bool:
        """Whether a client of this site can be one with such a number, known or novel."""
        if number < frame.known:
            return not self.novel
        return self.novel or number >= frame.clients - frame.newcomers

    @cached_property
    def _named(self) -> Mapping[str, tuple[Tensor, Tensor, Tensor]]:
        """The examples of each client, by the name that a server has for it."""
        return {self._name(client): parts for client, parts in self.rows.items()}

    def _name(self, client: str) -> str:
        return f"{self.site}/{client}" if self.site else client


def columns_named(client: str, target: str, features: str, split: str) -> Columns:
    """Returns which column of a site's table is what, as texts say it; empty for the usual one."""
    targets = (target,) if target else None
    return Columns(client or None, targets, listed(features) or None, split or None)


def listed(text: str) -> tuple[str, ...]:
    """Returns the words of a text with commas between them."""
    return tuple(word.strip() for word in text.split(",")) if text.strip() else ()


def read(
    path: str | Path,
    *,
    val: float = partitions.HELD_OUT,
    test: float = partitions.HELD_OUT,
    columns: Columns | None = None,
    labels: Sequence[str] = (),
    check: bool = False,
    scratch: Path | None = None,
) -> SiteData:
    """Reads a site's data.

    Args:
        path: an .npz archive, a parquet or CSV file, or a folder.
        val: fraction of each client's examples for validation, where the data do not say.
        test: the same for testing.
        columns: which column is what, where the layout does not say it.
        labels: names of the labels 0, 1, ..., where they are words.
        check: words need no list of names, which the run may have.
        scratch: folder, made where it does not exist, for a copy of a folder of data that is there
            while it is read (:data:`READING`), and afterwards where the process is killed; the
            system's temporary folder where None.

    Raises:
        UserError: lists all that is wrong with the data; or the disk refuses.
    """
    path = Path(path)
    held = _columns_of(path, columns or Columns(), scratch)
    problems: list[str] = []
    x = arrays.features(held["x"], problems)
    if check and not labels and arrays.is_text(np.asarray(held["y"])):
        labels = tuple(sorted(map(str, np.unique(held["y"]))))
        if (arrays.class_count(held.get("classes"), []) or 0) > len(labels):
            held = held | {"classes": None}  # of the federation, of whose labels a site lacks some
    y, number, labels = _targets(held, labels, problems)
    if number > arrays.MOST_CLASSES:
        problems.append(f"labels must be of {arrays.MOST_CLASSES} classes at most, got {number}")
    clients = np.asarray(held["client"])
    owner = arrays.numbered(clients, problems)  # which tells of names that are missing
    arrays.same_length(problems, x=x, y=y, client=owner)
    names = [str(name) for name in clients.ravel()]
    different = dict.fromkeys(names)
    if bad := [n for n in different if not 0 < len(n) <= LONGEST or not n.isprintable()]:
        problems.append(
            f"a client's name must have 1 to {LONGEST} printable letters, got {bad[0][:20]!r}"
        )
    part = (
        None if (split := held.get("split")) is None else arrays.parts(split, len(names), problems)
    )
    arrays.raise_all(problems, f"{path} does not hold the data of a site")
    rows = _divided(names, part, val, test)
    if empty := [client for client, (train, _, _) in rows.items() if not len(train)]:
        problems.append(
            f"each client must have an example to train on, but {', '.join(empty[:3])} has none; "
            "give it some, or leave it out"
        )
    arrays.raise_all(problems, f"{path} does not hold the data of a site")
    x, y = (values.float() if values.is_floating_point() else values for values in (x, y))
    named = held.get("features", ())
    features = named if x.shape[1:2] == (len(named),) else ()  # not of one column of lists
    return SiteData(x, y, number, rows, labels=tuple(labels), features=features)


def _targets(
    held: Mapping[str, Any], labels: Sequence[str], problems: list[str]
) -> tuple[Tensor, int, Sequence[str]]:
    """Returns (N,) labels, or (N, ...) floats, the number of labels, and the names of words."""
    y, classes = held["y"], arrays.class_count(held.get("classes"), problems)
    names = tuple(held.get("names", ()))
    arrays.check_names("labels", names, problems)
    if names:  # numbered by this site's own list of them
        numbers, known = arrays.targets(y, len(names), problems)
        if not labels or problems:  # sites are compared by the names
            return numbers, known, names
        y, classes = np.array(names, dtype=object)[numbers.numpy()], None
    if not labels:
        if arrays.is_text(np.asarray(y)):
            problems.append(
                "labels that are words must be numbered alike at all sites, but nothing says how; "
                "name them in order with --labels, or the run with task.labels"
            )
            return torch.zeros(len(y), dtype=torch.int64), 0, ()
        return *arrays.targets(y, classes, problems, stated=True), ()
    if classes not in (None, len(labels)):
        problems.append(f"classes must be as many as the labels, {len(labels)}, got {classes}")
    return *arrays.words_in_order(y, labels, problems), labels


def _columns_of(path: Path, columns: Columns, scratch: Path | None) -> dict[str, Any]:
    """Returns x, y, client and what else there is, of any layout."""
    kind = tables.ending(path)
    if columns != Columns() and path.is_dir():
        raise UserError(
            f"columns must be named of a table alone, got the folder {path}, whose columns are "
            "client, and an image and a label, or x and y; call them so, and name none"
        )
    if columns != Columns() or kind == ".csv":
        return _from_table(path, columns)
    return _from_npz(path) if kind == ".npz" else _from_rows(path, scratch)


def _from_table(path: Path, columns: Columns) -> dict[str, Any]:
    rows = tables.rows_of(tables.read(path, columns), columns, str(path))
    if rows.client is None:
        raise UserError(f"{path} must have a column that says who holds a row; name it by --client")
    if rows.text:
        raise UserError(
            f"{path} must hold numbers or images, got texts, whose length each site would take for "
            "itself; make tokens of them, as many in each row"
        )
    held = {"x": rows.x, "y": rows.y, "client": rows.client, "features": rows.features}
    if rows.split is not None:
        held["split"] = rows.split
    if rows.classes is not None:
        held["classes"] = np.array(rows.classes)
    return held | {"names": own_files.label_names(path, columns)}


def _from_npz(path: Path) -> dict[str, Any]:
    held = arrays.read_npz(path, needed=("x", "y", "client"))
    return {name: values for name, values in held.items() if name not in ("names", "features")}


@contextmanager
def _aside(folder: Path | None) -> Iterator[str]:
    """Makes a folder in another one that nobody else may look into and that is gone afterwards."""
    try:
        if folder is not None:
            folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix=READING, dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise refused(folder or Path(tempfile.gettempdir()), error) from error
    with made as name:
        yield name


def _from_rows(path: Path, scratch: Path | None) -> dict[str, Any]:
    import datasets  # takes seconds to import

    if not path.exists():
        raise UserError(f"a site's data must be a file or a folder, but there is no {path}")
    # What the library makes of a folder's files goes where nobody finds it afterwards.
    with _aside(scratch) as aside:
        try:
            if path.is_dir():
                splits = hub.load(str(path), None, aside, local=True, whole=True)
            else:
                held = datasets.table.InMemoryTable(tables.read_parquet(path))
                splits = {"train": datasets.Dataset(held)}
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            datasets.exceptions.DatasetsError,
        ) as e:
            raise UserError(
                f"{path} must be an .npz archive, a parquet file or a folder that "
                f"datasets.load_dataset can read, but is not ({one_line(str(e))})"
            ) from e
        return _columns(splits, path)


def _columns(splits: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the columns of all splits, of which nothing is decoded but images of the task."""
    features = next(iter(splits.values())).features
    names = list(features)
    pictures = any(type(kind).__name__ == "Image" for kind in features.values())
    if "client" in names and path.is_file() and not pictures and not {"x", "y"} <= set(names):
        return _from_table(path, Columns())
    if "client" not in names:
        how = "add it"
        if pictures and path.is_dir():
            how = "write a metadata.csv with columns file_name and client beside the images"
        raise UserError(f"{path} must have a column client, got {', '.join(names)}; {how}")
    columns: dict[str, Any] = {"client": np.array(_listed(splits, "client"), dtype=object)}
    if {"x", "y"} <= set(names):
        try:
            columns |= {name: np.array(_listed(splits, name)) for name in ("x", "y")}
        except ValueError as error:
            raise UserError(f"the lists of {path} must have one length; pad them") from error
        if columns["x"].dtype == object:
            raise UserError(f"the lists in column x of {path} must hold numbers alone; convert it")
        columns["names"] = readers.class_names(features["y"])
    else:
        label = readers.label_column(features, str(path), ("client", "split"))
        examples = readers.images(lambda config: splits, str(path), client="", label=label)
        columns |= {"x": examples.x, "y": examples.y, "classes": examples.classes}
        columns["names"] = readers.class_names(features[label])
        words = readers.labels_of(splits, label, features[label], str(path))[1]
        if words != columns["names"]:  # which other sites may order otherwise
            columns |= {"y": np.array(words, dtype=object)[examples.y.numpy()], "classes": None}
    if "split" in names:
        columns["split"] = np.array(_listed(splits, "split"))
    elif len(splits) > 1:
        columns["split"] = arrays.parts_named(splits)
    return columns


def _listed(splits: Mapping[str, Any], column: str) -> list[Any]:
    """Returns what is written in a column, as Python has it."""
    tables = (table.with_format("arrow")[:] for table in splits.values())
    return [value for table in tables for value in table.column(column).to_pylist()]


def _divided(
    names: list[str], part: npt.NDArray[np.int64] | None, val: float, test: float
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Returns each client's rows of each part, in the order in which clients first appear."""
    order = list(dict.fromkeys(names))
    number = {name: place for place, name in enumerate(order)}
    owner = np.array([number[name] for name in names])
    if part is None:
        # Of the data alone, so that what is for testing is the same in every run.
        part = partitions.hold_out(owner, partitions.random_source(0, "site"), val=val, test=test)
    codes = (partitions.TRAIN, partitions.VAL, partitions.TEST)
    rows = {}
    for client, name in enumerate(order):
        train, held, tested = (
            torch.from_numpy(np.flatnonzero((owner == client) & (part == code))) for code in codes
        )
        rows[name] = (train, held, tested)
    return rows

"""Data sets by name, by folder or by hub id.

``datasets.load_dataset`` (Hugging Face) is the one door. A known name stands for a folder of that
name in the data directory, else for a data set on the hub. What is decoded once is kept in a cache
(:mod:`hyperfed.data.cache`), your own data only where ``$HYPERFED_CACHE`` says where; ``digits``
comes with scikit-learn and needs no download.
"""

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hyperfed.data import cache, hub, own_files, readers, tables
from hyperfed.data.examples import Examples, Normalize, fingerprint_of, hash_of
from hyperfed.data.tables import Columns
from hyperfed.errors import UserError, nearest

__all__ = ["KNOWN", "NAMES", "Examples", "Known", "Normalize", "load"]


@dataclass(frozen=True)
class Known:
    """A data set with a name.

    Attributes:
        hub: its id on the Hugging Face hub; None where only a local folder has the layout we read.
        read: turns its rows into tensors.
    """

    hub: str | None
    read: Callable[[readers.Rows, str], Examples]


KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "cifar10": Known("uoft-cs/cifar10", readers.cifar10),
        "cifar100": Known("uoft-cs/cifar100", readers.cifar100),
        "mnist": Known("ylecun/mnist", readers.mnist),
        "fashion_mnist": Known("zalando-datasets/fashion_mnist", readers.images),
        "emnist": Known("tanganke/emnist_letters", readers.images),
        "femnist": Known("flwrlabs/femnist", readers.femnist),
        "omniglot": Known(None, readers.omniglot),
        "shakespeare": Known("flwrlabs/shakespeare", readers.shakespeare),
        "stackoverflow": Known(None, readers.stackoverflow),
    }
)
"""Data sets by name, besides the bundled ``digits`` and ``cifar100_coarse`` (20 superclasses)."""

NAMES = ("digits", "cifar100_coarse", *KNOWN)
"""Every data set with a name; anything else is a user's own."""

VALIDATION: Mapping[str, int] = MappingProxyType({"mnist": 10_000})
"""Training examples for validation in the place of a fifth: as many as of CIFAR (pFedHN, C.1)."""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load(name: str, data_dir: str | Path | None = None, columns: Columns | None = None) -> Examples:
    """Loads a data set into memory.

    Args:
        name: one of ``NAMES``; else your own: a parquet, CSV or .npz file, a local folder or a hub
            id (:mod:`hyperfed.data.own_files`).
        data_dir: folder of data sets, each in a folder of its name; ``$HYPERFED_DATA`` where None.
        columns: which column of your own data is what.

    Returns:
        All examples, decoded. The second load maps the cache into memory; delete the folder
        ``datasets`` of the cache to have a hub data set read afresh.

    Raises:
        UserError: unknown name, a folder without data, nothing to be had from the hub, or columns
            of a data set with a name.
    """
    columns = columns or Columns()
    given = [f"{key}={value!r}" for key, value in vars(columns).items() if value is not None]
    if name in NAMES and given:
        raise UserError(
            f"{name} must come without client, target, features and split, which are for your own "
            f"data, got {', '.join(given)}; leave them out"
        )
    if not name:
        raise UserError(f"a data set must have a name, got none; choose one of {', '.join(NAMES)}")
    try:
        Path(name).exists()
    except OSError as error:  # such as of a name that is too long
        raise UserError(
            f"a data set must have a name that can be looked for, got {name[:100]!r}, but: "
            f"{error.strerror}; choose another"
        ) from error
    if name == "digits":
        return _digits()
    if name == "cifar100_coarse":
        fine = load("cifar100", data_dir)
        if fine.coarse is None:
            raise UserError("cifar100 must have coarse labels, got none; use another copy of it")
        fingerprint = hash_of(fine.fingerprint, "coarse")
        return replace(
            fine, name=name, y=fine.coarse, coarse=None, classes=20, fingerprint=fingerprint
        )
    if tables.ending(name) in tables.SUFFIXES:
        return own_files.from_file(Path(name), columns)
    return _load_rows(name, _data_dir(data_dir), columns)


def _digits() -> Examples:
    """Returns the digits, decoded once: importing scikit-learn takes longer than most rounds."""
    source = f"scikit-learn {version('scikit-learn')}"
    key = cache.key("digits", readers.digits.__name__, {}, source)
    examples = cache.load_or_build(key, lambda: _finished(readers.digits()))
    # Strides of row after row, by which a convolution chooses its order of summation.
    return replace(examples, x=examples.x[:, 0, None])


def _load_rows(name: str, data_dir: Path | None, columns: Columns) -> Examples:
    known = KNOWN.get(name)
    folder = _folder(name, data_dir)
    read = known.read if known else partial(own_files.read_rows, columns=columns, folder=folder)
    source = str(folder) if folder else known.hub if known else name
    if source is None:
        raise UserError(
            f"{name} must come from a local folder, got data_dir={data_dir} without one; set "
            f"data_dir (or HYPERFED_DATA) to a folder that holds {name}/"
        )
    files = _files(folder) if folder else source
    reader = known.read.__name__ if known else f"whole folders, upright, all as written, {columns}"

    def build() -> Examples:
        # The rows of a local folder are decoded once: no second copy of them stays on disk.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            cache_dir, own = scratch if folder else None, None if known else columns
            files = hub.csv_files(folder, scratch) if folder and own else {}
            if files:
                return _finished(own_files.from_csv_files(files, name, columns))
            return _finished(read(lambda config: _rows(name, source, config, cache_dir, own), name))

    if folder and not known and not cache.asked_for():
        return build()  # somebody's own: no copy stays
    return cache.load_or_build(cache.key(name, reader, readers.constants(), files), build)


def _finished(examples: Examples) -> Examples:
    return replace(examples, fingerprint=fingerprint_of(examples.tensors()))


def open_folder(folder: Path, scratch: str, columns: Columns) -> Mapping[str, Any]:
    """Opens all of somebody's own folder: {split: its rows}.

    Args:
        folder: it.
        scratch: a folder for what the library makes of its files, needed as long as the rows are.
        columns: which column is what.

    Raises:
        UserError: the library cannot read it, or would leave some of it out.
    """
    return _rows(str(folder), str(folder), None, scratch, columns)


def _data_dir(data_dir: str | Path | None) -> Path | None:
    given = data_dir or os.environ.get("HYPERFED_DATA")
    return Path(given) if given else None


def _folder(name: str, data_dir: Path | None) -> Path | None:
    """Returns the local folder that ``name`` stands for; None where it is one of the hub's."""
    from_here = name.startswith(".")  # a path, as ./photos is, and no name of a data set
    if data_dir is not None and not from_here and (data_dir / name).is_dir():
        return data_dir / name
    if name in KNOWN:
        return None
    if Path(name).is_dir():
        return Path(name).resolve() if from_here else Path(name)
    if HUB_ID.fullmatch(name) and not from_here:
        return None
    raise UserError(
        f"a data set must be one of {', '.join(NAMES)}, a folder, a file that ends in "
        f"{', '.join(tables.SUFFIXES)} or a hub id (owner/name), got {name!r}{nearest(name, NAMES)}"
    )


def located(name: str, data_dir: str | Path | None = None) -> str:
    """Returns a name by which :func:`load` finds a data set from any folder.

    It is the same, but of a folder that is found from the current one its path.
    """
    if name in NAMES or tables.ending(name) in tables.SUFFIXES:
        return name
    kept = _data_dir(data_dir)
    folder = _folder(name, kept)
    if folder is None or (kept is not None and folder == kept / name):
        return name
    return str(folder.absolute())


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Lists (path, bytes, modification time in ns) of all files of a folder, sorted."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            found.append((str(path.relative_to(folder)), status.st_size, status.st_mtime_ns))
    return found


def _rows(
    name: str, source: str, config: str | None, cache_dir: str | None, own: Columns | None
) -> Mapping[str, Any]:
    """Opens a configuration of a data set, or says what to do about it.

    Of somebody's own data ``own`` says which column is what.
    """
    import datasets  # takes seconds to import, and a cached load does without

    local = cache_dir is not None
    try:
        ids = tables.ids(own) if own else ()
        splits: Mapping[str, Any] = hub.load(
            source, config, cache_dir, local=local, whole=own is not None, ids=ids
        )
    except ConnectionError as error:
        raise UserError(
            f"{name} must come from a local folder or the Hugging Face hub, and the hub could not "
            f"be reached ({error}); connect to the internet, or set data_dir (or HYPERFED_DATA) to "
            f"a folder that holds {name}/ in the hub's layout"
        ) from error
    except UnicodeDecodeError as error:
        told = f"{source} must hold text files in UTF-8, but: {error}; convert them"
        raise UserError(told) from error
    except ValueError as error:
        raise readers.NoSuchConfigurationError(
            f"{source} must have a configuration {config or 'by default'}, but has not ({error}); "
            "use a copy with one"
        ) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{name} must be readable by datasets.load_dataset, but {source} is not "
            f"({error}); check the path or id, and that it holds data files"
        ) from error
    return splits

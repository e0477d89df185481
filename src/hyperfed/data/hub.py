"""Loading by Hugging Face's library as we want it.

It is quick to say that there is no way to the hub: without a network the library's requests are
tried again for half a minute, each with two lines. And a folder is read without asking anybody, and
without reading what lies elsewhere: what came with the data may name any file or address. Of
somebody's own folder all is read or nothing: the library leaves out what it takes for no split.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

PATIENCE = 5.0
"""Seconds in which the hub must answer one request."""

SPLITS = (
    "train", "training", "val", "valid", "validation", "dev",
    "test", "testing", "eval", "evaluation",
)  # fmt: skip
"""Folders and files that name a split to the library, which tells capitals apart."""

TABLES = (".arrow", ".csv", ".jsonl", ".ndjson", ".parquet", ".tsv")
"""How files with rows of a table end; one of .json or .txt often says something about them."""

CSV = {".csv": ",", ".tsv": "\t"}
"""How CSV files end, and what is between their columns."""

PACKED = (".bz2", ".gz", ".xz")
"""Endings after those, by which pandas unpacks a file."""


def load(
    source: str, config: str | None, cache_dir: str | None, *, local: bool, whole: bool = False
) -> Any:
    """Returns what ``datasets.load_dataset`` does, and raises what it does.

    Where the hub does not answer, only what has been downloaded before is looked for, at once.

    Args:
        source: a folder, or an id on the hub.
        config: which of its configurations; None for the default one.
        cache_dir: where the rows go; the library's own folder where None.
        local: it is a folder.
        whole: of which all files of a kind must be read, unless its README says which.

    Raises:
        ValueError: the folder cannot be read, or its README names data that are not in it.
        OSError: it is one of ``save_to_disk``, of which the library would read the notes; or files
            would be left out.
    """
    try:
        with _library(offline=local or not reachable()) as datasets:
            if local:
                _check_layout(Path(source))
                _check_named_data(Path(source))
            if not (whole and local) or _named_data(Path(source)):
                return datasets.load_dataset(source, config, cache_dir=cache_dir)
            builder = datasets.load_dataset_builder(source, cache_dir=cache_dir)
            _check_whole(Path(source), builder)
            splits = datasets.load_dataset(source, config, cache_dir=cache_dir)
            _check_metadata(Path(source), builder, splits)
            return splits
    except Exception as error:  # whatever a folder makes several libraries raise
        from datasets.exceptions import DatasetsError

        if not local or isinstance(error, OSError | ValueError | DatasetsError):
            raise
        raise ValueError(f"{type(error).__name__}: {error}") from error


def csv_files(folder: Path, cache_dir: str) -> dict[str, list[Path]]:
    """Returns the files of a folder by split, where all of them are CSV files.

    Of any other folder, or one whose README says how they are to be read, it is {}, and so it is
    where something is wrong, which :func:`load` tells.
    """
    if not any(_kind(path) in CSV for path in folder.rglob("*")):
        return {}
    try:
        _check_layout(folder)
        _check_named_data(folder)
        named = bool(_named_data(folder))
        with _library(offline=True) as datasets:
            builder = datasets.load_dataset_builder(str(folder), cache_dir=cache_dir)
            if not named:
                _check_whole(folder, builder)
    except Exception:  # whatever a folder makes several libraries raise
        return {}
    split_files = builder.config.data_files.items()
    found = {str(split): [Path(path) for path in paths] for split, paths in split_files}
    kinds = {_kind(path) for paths in found.values() for path in paths}
    if not kinds <= {*CSV} or (named and not _plain(builder, kinds)):
        return {}
    return found


def _plain(builder: Any, kinds: Set[str]) -> bool:
    """Whether a README leaves it to the endings of CSV files how they are read."""
    usual = type(builder.config)(sep=builder.config.sep).pd_read_csv_kwargs
    separators = {CSV[kind] for kind in kinds}
    options = builder.config.pd_read_csv_kwargs
    typed = builder.config.features or builder.info.features
    return not typed and options == usual and separators == {builder.config.sep}


@contextmanager
def _library(*, offline: bool) -> Iterator[Any]:
    """Gives ``datasets``, without its bars and, where asked, without a way to the hub."""
    import datasets  # takes seconds to import, and a cached load does without
    from huggingface_hub import constants

    shown = not datasets.are_progress_bars_disabled()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if offline:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
        if shown:
            datasets.enable_progress_bars()


def _check_layout(folder: Path) -> None:
    """Raises ``OSError`` where a folder has the layout of ``save_to_disk``."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise OSError(
            "save_to_disk wrote it; write parquet files in its place, data.to_parquet, named after "
            "their splits"
        )


def _check_named_data(folder: Path) -> None:
    """Raises ``ValueError`` where a README says that data of a folder are elsewhere."""
    for name in _named_data(folder):
        if "://" in name or ".." in PurePath(name).parts or name[:1] in "/~":
            raise ValueError(f"{folder} must name data within it, but names {name[:100]!r}")


def whole(folder: Path) -> Path | None:
    """Returns a folder of which all is read; None where a README says which data there are."""
    try:
        return None if _named_data(folder) else folder
    except Exception:  # whatever a README makes several libraries raise, which load tells
        return None


def _named_data(folder: Path) -> list[str]:
    """Returns all words by which a README says which data of a folder there are."""
    from huggingface_hub import DatasetCard

    readme, alone = folder / "README.md", folder / ".huggingface.yaml"
    cards = [DatasetCard.load(readme)] if readme.is_file() else []
    if alone.is_file():
        cards.append(DatasetCard(f"---\n{alone.read_text(encoding='utf-8')}\n---\n"))
    return [name for card in cards for name in _texts(card.data.get("configs"))]


def _check_whole(folder: Path, builder: Any) -> None:
    """Raises ``OSError`` where the library would leave out files, or train on those for testing.

    One file or folder that is called as a split is, such as val, and it reads no others. Where none
    is, as it finds Train and Test, everything is for training. Of tables of several kinds it reads
    one. Nor is a CSV file read that only the library can read, which guesses what ids are.
    """
    from datasets.data_files import FILES_TO_IGNORE

    root = folder.resolve()
    read = {Path(path) for paths in builder.config.data_files.values() for path in paths}
    kinds = {path.suffix.lower() for path in read if path.stem != "metadata"}
    kinds.update(getattr(builder, "EXTENSIONS", ()))
    rows = {_kind(path) for path in read} & {*TABLES}
    left = [
        path.relative_to(root)
        for path in sorted(root.rglob("*"))
        if (path.suffix.lower() in kinds or (rows and _kind(path) in TABLES))
        and (path not in read and path.name not in FILES_TO_IGNORE)
    ]
    left = [path for path in left if not any(part.startswith((".", "__")) for part in path.parts)]
    if others := [path for path in left if rows and _kind(path) in {*TABLES} - rows]:
        raise OSError(
            f"its tables must be of one kind, got {others[0]} beside others that end in "
            f"{', '.join(sorted(rows))}, so that {len(others)} of its files would be left out; "
            "convert or remove them"
        )
    if left:
        raise OSError(
            f"{len(left)} of its files would be left out, such as {left[0]}, because others are "
            "called as splits are (train, val, dev, test, ...) by their name or that of a folder; "
            "rename those, or have all files below folders of splits"
        )
    guessed = [path.name for path in sorted(read) if _kind(path) not in CSV]
    if type(builder.config).__name__ == "CsvConfig" and guessed:
        raise OSError(
            "CSV files must not be in archives, of which it would be guessed what their ids are, "
            f"got {guessed[0]}; unpack it"
        )
    common = os.path.commonpath(read) if read else root
    tops = sorted({path.relative_to(common).parts[0] for path in read if path != Path(common)})
    words = {re.split(r"[-._ 0-9]", top)[0] for top in tops}
    splits = len(words) > 1 and all(word.lower() in SPLITS for word in words)
    if splits and len(builder.config.data_files) == 1 and not words <= {*SPLITS}:
        raise OSError(
            f"its splits must be called in small letters, such as train and test, or all of it is "
            f"for training, got {', '.join(tops[:4])}; rename them"
        )


def _check_metadata(folder: Path, builder: Any, splits: Any) -> None:
    """Puts images of which metadata files tell in an order that does not vary.

    Raises:
        OSError: the metadata do not list all images, or pandas makes one id of two in them.
    """
    read = {str(split): [*map(Path, paths)] for split, paths in builder.config.data_files.items()}
    metadata = {split: [p for p in paths if p.stem == "metadata"] for split, paths in read.items()}
    if type(builder.config).__name__ != "ImageFolderConfig" or not any(metadata.values()):
        return
    listed: set[Path] = set()
    for split, rows in splits.items():
        paths = image_paths(rows)
        listed.update(map(Path, paths))
        if len(metadata[split]) > 1:  # which the library takes in the order of a set
            splits[split] = rows.select(sorted(range(len(paths)), key=paths.__getitem__))
    images = {p for paths in read.values() for p in paths if p.suffix.lower() in builder.EXTENSIONS}
    if left := sorted(images - listed):
        raise OSError(
            f"{len(left)} of its images would be left out, such as "
            f"{left[0].relative_to(folder.resolve())}, because its metadata files list others "
            "alone; list all, or remove those"
        )
    _check_guesses([p for paths in metadata.values() for p in paths if p.suffix == ".csv"])


def _check_guesses(paths: Sequence[Path]) -> None:
    """Raises ``OSError`` where pandas makes one number of two words of a column of CSV files."""
    import pandas

    if not paths:
        return
    guessed = pandas.concat([pandas.read_csv(path) for path in paths], ignore_index=True)
    written = pandas.concat([pandas.read_csv(path, dtype=str) for path in paths], ignore_index=True)
    for name in guessed.select_dtypes("integer"):
        ways = written.groupby(guessed[name])[name].unique()
        if odd := [sorted(each) for each in ways if len(each) > 1]:
            raise OSError(
                "its metadata.csv must write a number in one way, got "
                f"{' and '.join(odd[0][:2])} in column {name!r}, which would be one; write words, "
                "or a metadata.jsonl in its place"
            )


def image_paths(rows: Any) -> list[str]:
    """Returns the path of each image of a split, as the library knows it."""
    image = next(key for key, kind in rows.features.items() if type(kind).__name__ == "Image")
    cells = rows.with_format("arrow")[:].column(image).combine_chunks()
    return [str(path) for path in cells.field("path").to_pylist()]


def _kind(path: PurePath) -> str:
    """Returns how the name of a file ends, in small letters, before what tells how it is packed."""
    packed = path.suffix.lower() in PACKED
    return (PurePath(path.stem) if packed else path).suffix.lower()


def _texts(value: Any) -> Iterator[str]:
    """Yields every text in nested lists and mappings."""
    match value:
        case str():
            yield value
        case Mapping():
            for inner in value.values():
                yield from _texts(inner)
        case list():
            for inner in value:
                yield from _texts(inner)


def reachable() -> bool:
    """Whether the hub answers, whatever it says."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of whichever library there is below: there is no way
        return False
    return True


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that advances a progress bar on standard error, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), expand=True, transient=True) as shown:
        task = shown.add_task(description, total=total)
        yield lambda count: shown.advance(task, count)

"""What must hold of a folder that somebody names, before and after the library reads it.

``datasets`` (Hugging Face) reads any file or address that came with the data names, leaves out what
it takes for no split, and guesses what ids in CSV files are. Of a folder nothing is read that lies
elsewhere; of somebody's own all is read as it is written there, or nothing.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePath
from typing import Any

SPLITS = (
    "train", "training", "val", "valid", "validation", "dev",
    "test", "testing", "eval", "evaluation",
)  # fmt: skip
"""Folders and files that name a split to the library, which tells capitals apart."""

TABLES = (".arrow", ".csv", ".jsonl", ".ndjson", ".parquet", ".tsv")
"""How files with rows of a table end; one of .json or .txt often says something about them."""

CSV = {".csv": ",", ".tsv": "\t"}
"""How CSV files end, and what is between their columns."""

PHOTOS = (".arw", ".avif", ".cr2", ".dng", ".heic", ".heif", ".jxl", ".nef")
"""How photographs end that the library takes for none."""

NOBODYS = ("__MACOSX", "__pycache__")
"""Folders of no data, of those that begin with two underscores; the library leaves out all."""

_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what stands for bytes that are not UTF-8."""

PACKED = (".bz2", ".gz", ".xz")
"""Endings after those, by which pandas unpacks a file."""


def check_unread(folder: Path) -> None:
    """Looks at a folder before the library does.

    Raises:
        OSError: it has the layout of ``save_to_disk``, or a path that stands for several.
        ValueError: a README says that data of it are elsewhere.
    """
    if odd := {*"*?["} & {*str(folder.resolve())}:
        raise OSError(
            f"its path must be without {' and '.join(sorted(odd))}, by which the library would "
            "look in other folders, too; rename it"
        )
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise OSError(
            "save_to_disk wrote it; write parquet files in its place, data.to_parquet, named after "
            "their splits"
        )
    for name in named_data(folder):
        if "://" in name or ".." in PurePath(name).parts or name[:1] in "/~":
            raise ValueError(f"{folder} must name data within it, but names {name[:100]!r}")


def whole(folder: Path) -> Path | None:
    """Returns a folder of which all is read; None where a README says which data there are."""
    try:
        return None if named_data(folder) else folder
    except Exception:  # whatever a README makes several libraries raise, which load tells
        return None


def named_data(folder: Path) -> list[str]:
    """Returns all words by which a README says which data of a folder there are."""
    from huggingface_hub import DatasetCard

    readme, alone = folder / "README.md", folder / ".huggingface.yaml"
    cards = [DatasetCard.load(readme)] if readme.is_file() else []
    if alone.is_file():
        cards.append(DatasetCard(f"---\n{alone.read_text(encoding='utf-8')}\n---\n"))
    return [name for card in cards for name in _texts(card.data.get("configs"))]


def check_paths(folder: Path) -> None:
    """Looks at what is in a folder, before the library finds it.

    Raises:
        OSError: a file has a name that the library cannot look for; a folder is a link, which it
            leaves out; or a link leads nowhere.
    """
    for path in sorted(folder.rglob("*")):
        where = path.relative_to(folder)
        if path.suffix and _NO_TEXT.search(str(where)):  # others, such as Icon\r, are not read
            raise OSError(
                "names of its files and folders must be text (UTF-8) without line breaks, got "
                f"{str(where)!r}; rename it"
            )
        if path.is_symlink() and not path.is_file() and not _is_hidden(where):
            if path.exists():
                raise OSError(
                    f"a folder in it must be no link, as {where} is, whose files would be left "
                    "out; put a copy in its place, or remove it"
                )
            raise OSError(f"a link in it must lead to a file, but {where} does not; remove it")


def check_whole(folder: Path, builder: Any) -> None:
    """Looks at what the library is going to read of somebody's own folder.

    One file or folder that is called as a split is, such as val, and it reads no others. Where none
    is, as it finds Train and Test, everything is for training. Of tables of several kinds it reads
    one. Nor is a CSV file read that only the library can read, which guesses what ids are.

    Args:
        folder: it.
        builder: the library's, which knows the files.

    Raises:
        OSError: files would be left out, guessed of, or trained on although they are for testing.
    """
    read = {Path(path) for paths in builder.config.data_files.values() for path in paths}
    _check_none_left(folder.resolve(), builder, read)
    _check_no_archives(builder, read)
    if len(builder.config.data_files) == 1:
        _check_one_split(folder.resolve(), read)


def _check_none_left(root: Path, builder: Any, read: Set[Path]) -> None:
    """Raises ``OSError`` where files of the kinds that are read would be left out."""
    from datasets.data_files import FILES_TO_IGNORE

    kinds = {path.suffix.lower() for path in read if path.stem != "metadata"}
    if pictures := getattr(builder, "EXTENSIONS", ()):
        kinds.update(pictures, PHOTOS)
    rows = {kind_of(path) for path in read} & {*TABLES}
    unread = (path for path in sorted(root.rglob("*")) if path not in read and path.is_file())
    left = [
        path
        for path in (path.relative_to(root) for path in unread)
        if (path.suffix.lower() in kinds or (rows and kind_of(path) in TABLES))
        and not (path.name in FILES_TO_IGNORE or _is_hidden(path))
    ]
    photos = [path for path in left if path.suffix.lower() in PHOTOS]
    apart = [path for path in left if any(part.startswith("__") for part in path.parts)]
    if others := [path for path in left if rows and kind_of(path) in {*TABLES} - rows]:
        raise OSError(
            f"its tables must be of one kind, got {others[0]} beside others that end in "
            f"{', '.join(sorted(rows))}, so that {len(others)} of its files would be left out; "
            "convert or remove them"
        )
    # The library knows .jpg and .JPG, and no third way.
    odd = [path for path in left if path.suffix not in (path.suffix.lower(), path.suffix.upper())]
    reasons = (
        (odd, "the library reads no such endings; write them in small letters"),
        (photos, "the library reads no such files; convert them, to .png or .jpg"),
        (apart, "folders whose names begin with __ are not read; rename them"),
        (
            left,
            "others are called as splits are (train, val, dev, test, ...) by their name or that of "
            "a folder; rename those, or have all files below folders of splits",
        ),
    )
    for files, why in reasons:
        if files:
            raise OSError(
                f"{len(files)} of its files would be left out, such as {files[0]}, because {why}"
            )


def _check_no_archives(builder: Any, read: Set[Path]) -> None:
    """Raises ``OSError`` where CSV files are in archives, which only the library can read."""
    guessed = [path.name for path in sorted(read) if kind_of(path) not in CSV]
    if type(builder.config).__name__ == "CsvConfig" and guessed:
        raise OSError(
            "CSV files must not be in archives, of which it would be guessed what their ids are, "
            f"got {guessed[0]}; unpack it"
        )


def _check_one_split(root: Path, read: Set[Path]) -> None:
    """Raises ``OSError`` where files are all for training, but are called Train and Test."""
    common = os.path.commonpath(read) if read else root
    tops = sorted({path.relative_to(common).parts[0] for path in read if path != Path(common)})
    words = {re.split(r"[-._ 0-9]", top)[0] for top in tops}
    splits = len(words) > 1 and all(word.lower() in SPLITS for word in words)
    if splits and not words <= {*SPLITS}:
        raise OSError(
            f"its splits must be called in small letters, such as train and test, or all of it is "
            f"for training, got {', '.join(tops[:4])}; rename them"
        )


def check_metadata(folder: Path, builder: Any, splits: Mapping[str, Any]) -> None:
    """Looks at the metadata files that tell of images, once these have been read.

    Args:
        folder: where they are.
        builder: the library's, which knows the files.
        splits: name -> rows.

    Raises:
        OSError: they do not list all images, or one of them twice.
    """
    if not any(metadata_files(builder).values()):
        return
    read = {Path(path) for paths in builder.config.data_files.values() for path in paths}
    images = {path for path in read if path.suffix.lower() in builder.EXTENSIONS}
    listed = Counter(Path(path) for rows in splits.values() for path in image_paths(rows))
    if left := sorted(images.difference(listed)):
        raise OSError(
            f"{len(left)} of its images would be left out, such as "
            f"{left[0].relative_to(folder.resolve())}, because its metadata files list others "
            "alone; list all, or remove those"
        )
    if again := sorted(path for path, times in listed.items() if times > 1):
        raise OSError(
            f"its metadata files must list each image once, got {len(again)} more often, such as "
            f"{again[0].relative_to(folder.resolve())}; remove the other rows"
        )


def metadata_files(builder: Any) -> dict[str, list[Path]]:
    """Returns the files of each split that tell of its images; {} where there are no images."""
    if type(builder.config).__name__ != "ImageFolderConfig":
        return {}
    files = builder.config.data_files.items()
    return {
        str(split): [path for path in map(Path, paths) if path.stem == "metadata"]
        for split, paths in files
    }


def image_paths(rows: Any) -> list[str]:
    """Returns the path of each image of a split, as the library knows it."""
    image = next(key for key, kind in rows.features.items() if type(kind).__name__ == "Image")
    cells = rows.with_format("arrow")[:].column(image).combine_chunks()
    return [str(path) for path in cells.field("path").to_pylist()]


def _is_hidden(path: PurePath) -> bool:
    """Whether systems and editors keep something for themselves: .DS_Store, __MACOSX."""
    return any(part.startswith(".") or part in NOBODYS for part in path.parts)


def kind_of(path: PurePath) -> str:
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

"""Loading by Hugging Face's library as we want it.

It is quick to say that there is no way to the hub: without a network the library's requests are
tried again for half a minute, each with two lines. And a folder is read without asking anybody, and
only where it holds what it must (:mod:`hyperfed.data.folder_checks`).
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hyperfed.data import folder_checks
from hyperfed.data.folder_checks import CSV, kind_of

PATIENCE = 5.0
"""Seconds in which the hub must answer one request."""


def load(
    source: str,
    config: str | None,
    cache_dir: str | None,
    *,
    local: bool,
    whole: bool = False,
    ids: Collection[str] = (),
) -> Any:
    """Returns what ``datasets.load_dataset`` does, and raises what it does.

    Where the hub does not answer, only what has been downloaded before is looked for, at once.

    Args:
        source: a folder, or an id on the hub.
        config: which of its configurations; None for the default one.
        cache_dir: where the rows go; the library's own folder where None.
        local: it is a folder.
        whole: of which all files of a kind must be read, unless its README says which.
        ids: columns that are words as they are written in CSV files, unless a README says of what
            kind they are.

    Raises:
        ValueError: the folder cannot be read, or its README names data that are not in it.
        OSError: it is one of ``save_to_disk``, of which the library would read the notes; or files
            would be left out.
    """
    try:
        with _library(offline=local or not reachable()) as datasets:
            if local:
                folder_checks.check_unread(Path(source))
            if not (whole and local) or folder_checks.named_data(Path(source)):
                options = _as_written(source, config, cache_dir, ids) if ids else {}
                return datasets.load_dataset(source, config, cache_dir=cache_dir, **options)
            builder = _builder_of_all(source, cache_dir=cache_dir)
            builder.download_and_prepare()
            splits = builder.as_dataset()
            folder_checks.check_metadata(Path(source), builder, splits)
            _put_in_order(splits, builder)
            _keep_words(splits, builder)
            return splits
    except Exception as error:  # whatever a folder makes several libraries raise
        from datasets.exceptions import DatasetsError

        if not local or isinstance(error, OSError | ValueError | DatasetsError):
            raise
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _as_written(
    source: str, config: str | None, cache_dir: str | None, ids: Collection[str]
) -> dict[str, Any]:
    """Returns with what options the library leaves columns of CSV files as they are written."""
    import datasets

    builder = datasets.load_dataset_builder(source, config, cache_dir=cache_dir)
    typed = builder.config.features or builder.info.features
    guessed = type(builder.config).__name__ == "CsvConfig" and not typed
    words = {"converters": dict.fromkeys(ids, _word), "keep_default_na": False, "na_values": [""]}
    return words if guessed else {}


def _builder_of_all(folder: str, *, cache_dir: str | None) -> Any:
    """Returns what reads a folder; raises ``OSError`` where it would not read all of it."""
    import datasets

    folder_checks.check_paths(Path(folder))
    builder = datasets.load_dataset_builder(folder, cache_dir=cache_dir)
    folder_checks.check_whole(Path(folder), builder)
    return builder


def _word(written: str) -> str | None:
    """Returns what is written in a cell; None for nothing, which pandas before 3 has as a word."""
    return written or None


def _put_in_order(splits: Any, builder: Any) -> None:
    """Sorts images of which several metadata files tell, which come in the order of a set."""
    for split, files in folder_checks.metadata_files(builder).items():
        if len(files) > 1:
            paths = folder_checks.image_paths(splits[split])
            order = sorted(range(len(paths)), key=paths.__getitem__)
            splits[split] = splits[split].select(order)


def _keep_words(splits: Any, builder: Any) -> None:
    """Makes words again of numbers that metadata.csv writes otherwise, such as 07 and 7.0 beside 7.

    Args:
        splits: name -> rows, which are changed.
        builder: the library's, which took them for numbers.
    """
    import pandas

    metadata = folder_checks.metadata_files(builder).values()
    files = [path for paths in metadata for path in paths if path.suffix == ".csv"]
    if not files:
        return
    guessed = pandas.concat([pandas.read_csv(path) for path in files], ignore_index=True)
    tables = [pandas.read_csv(path, dtype=str) for path in files]
    written = pandas.concat(tables, ignore_index=True)
    odd = [n for n in guessed.select_dtypes("number") if _in_own_ways(written[n], guessed[n])]
    named = next(name for name in written if name.endswith("file_name"))
    images = [
        str(path.parent / os.path.normpath(name).replace("\\", "/"))  # as the library does
        for path, table in zip(files, tables, strict=True)
        for name in table[named]
    ]
    told = written[odd].set_axis(images)
    for split, rows in splits.items() if odd else ():
        words = told.loc[folder_checks.image_paths(rows)]
        for name in odd:
            rows = rows.remove_columns(name).add_column(name, [*words[name]])  # noqa: PLW2901
        splits[split] = rows


def _in_own_ways(written: Any, guessed: Any) -> bool:
    """Whether numbers of a column are written otherwise than numbers are, or one in two ways."""
    words = written.str.strip()
    if guessed.dtype.kind in "iu":
        return bool((words != guessed.astype(str)).any())
    return bool((words.groupby(guessed).nunique() > 1).any())


def csv_files(folder: Path, cache_dir: str) -> dict[str, list[Path]]:
    """Returns the files of a folder by split, where all of them are CSV files.

    Of any other folder, or one whose README says how they are to be read, it is {}, and so it is
    where something is wrong, which :func:`load` tells.
    """
    if not any(kind_of(path) in CSV for path in folder.rglob("*")):
        return {}
    try:
        folder_checks.check_unread(folder)
        named = bool(folder_checks.named_data(folder))
        with _library(offline=True) as datasets:
            opened = datasets.load_dataset_builder if named else _builder_of_all
            builder = opened(str(folder), cache_dir=cache_dir)
    except Exception:  # whatever a folder makes several libraries raise
        return {}
    split_files = builder.config.data_files.items()
    found = {str(split): [Path(path) for path in paths] for split, paths in split_files}
    kinds = {kind_of(path) for paths in found.values() for path in paths}
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

"""Loading by Hugging Face's library as we want it: quick to say that there is no way to the hub.

Without a network its requests are tried again for half a minute, each with two lines.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

PATIENCE = 5.0
"""Seconds in which the hub must answer one request."""


def load(source: str, config: str | None, cache_dir: str | None, *, local: bool) -> Any:
    """Returns what ``datasets.load_dataset`` does, and raises what it does.

    Where the hub does not answer, only what has been downloaded before is looked for, at once.

    Args:
        source: a folder, or an id on the hub.
        config: which of its configurations; None for the default one.
        cache_dir: where the rows go; the library's own folder where None.
        local: it is a folder.
    """
    import datasets  # takes seconds to import, and a cached load does without
    from huggingface_hub import constants

    shown = not datasets.are_progress_bars_disabled()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not local and not reachable():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(source, config, cache_dir=cache_dir)
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

"""Commands in this process, or in their own, which start from one that has imported what they need.

Importing takes longer than what the tests have them do. They are still processes that a signal
kills.
"""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["hyperfed.apps.cli", "hyperfed.papers.zygote"])


def preload(*modules: str) -> None:
    """Says what else commands need, for a worker in which none has started yet."""
    _CONTEXT.set_forkserver_preload(["hyperfed.apps.cli", "hyperfed.runs.run", *modules])


def start(
    *arguments: str, said: Path | None = None, first: Callable[[], None] | None = None
) -> BaseProcess:
    """Starts ``hyperfed ARGUMENTS``, with one thread and nothing on the terminal.

    Args:
        arguments: of the command line.
        said: the file for what it prints, behind what is in it.
        first: called in the process before; can be pickled.
    """
    process = _CONTEXT.Process(target=_command, args=(arguments, said or Path(os.devnull), first))
    process.start()
    return process


def command(*arguments: str) -> int:
    """Runs ``hyperfed ARGUMENTS`` in this process; returns its exit status."""
    from hyperfed.apps import cli

    try:
        cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a command ends with its status")


def _command(arguments: tuple[str, ...], said: Path, first: Callable[[], None] | None) -> None:
    from hyperfed.apps.cli import main  # preloaded

    torch.set_num_threads(1)
    # As what began this process, for processes that it starts.
    sys.modules["__main__"] = importlib.import_module("hyperfed.__main__")
    with said.open("a", buffering=1) as out:
        sys.stdout = sys.stderr = out
        if first is not None:
            first()
        main(arguments)

"""Commands in processes of their own, which start from one that has imported what they need.

Importing takes longer than what the tests have them do. They are still processes that a signal
kills.
"""

import multiprocessing
import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["hyperfed.apps.cli", "hyperfed.runs.run", "sklearn.datasets", "torch._dynamo"]
)


def start(*arguments: str, said: Path | None = None) -> BaseProcess:
    """Starts ``hyperfed ARGUMENTS``, with one thread and nothing on the terminal.

    Args:
        arguments: of the command line.
        said: the file for what it prints.
    """
    process = _CONTEXT.Process(target=_command, args=(arguments, said or Path(os.devnull)))
    process.start()
    return process


def _command(arguments: tuple[str, ...], said: Path) -> None:
    from hyperfed.apps.cli import main  # preloaded

    torch.set_num_threads(1)
    with said.open("w", buffering=1) as out:
        sys.stdout = sys.stderr = out
        main(arguments)

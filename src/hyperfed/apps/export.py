"""The command that hands out a client's adapter."""

import importlib
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hyperfed.apps.printing import Json, print_json
from hyperfed.data.own import Task
from hyperfed.errors import UserError
from hyperfed.runs.run import Run


def export(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="The folder of a run.")],
    *,
    client: Annotated[int, Option(help="The client's number.")],
    adapter: Annotated[Path, Option(help="The folder to make, as peft opens it.")],
    task: Annotated[
        str,
        Option(
            metavar="MODULE:FUNCTION",
            help="Of a run with a task of your own: the function without arguments that makes it.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Write a client's adapter (LoRA and the like) as peft's own folder."""
    with closing(Run.open(run_dir, _made(task) if task else None)) as run:
        run.adapter(client, adapter)
    if as_json:
        print_json({"adapter": str(adapter), "client": client})
    else:
        print(adapter)


def _made(name: str) -> Task:
    """Returns the task that a function makes; a module is looked for in this folder, too."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"task must be a module and its function without arguments, MODULE:FUNCTION, came "
            f"{name!r} ({type(error).__name__}: {error}); write it so"
        ) from error
    finally:
        sys.path.pop(0)
    if not isinstance(made, Task):
        raise UserError(f"{name} must make a task, came {made!r}; return Task.from_arrays(...)")
    return made

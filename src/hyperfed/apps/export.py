"""``hyperfed export``: a client's model as files for programs that know nothing of hyperfed."""

import importlib
import re
import sys
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from hyperfed.apps.printing import Json, print_made
from hyperfed.data.own import Task
from hyperfed.errors import UserError
from hyperfed.runs.export import SUFFIXES, export_model, format_of
from hyperfed.runs.run import Run

UNUSUAL = re.compile(r"[^\w.-]+")
"""What of a client's name is not used in that of a file."""


class Format(StrEnum):
    """Which file to write: a key of ``SUFFIXES``."""

    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"


def export(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="The folder of a run.")],
    *,
    client: Annotated[str, Option(help="Its name, or its number where it has none.")],
    format: Annotated[
        Format | None,
        Option(
            help="Weights (safetensors), or a program that takes raw examples; default: what the "
            "file's ending says, else safetensors."
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(help="The file to write; default: client-NAME, here.")
    ] = None,
    adapter: Annotated[
        Path | None,
        Option(help="The folder to make instead, of the client's adapter alone, as peft opens it."),
    ] = None,
    task: Annotated[
        str,
        Option(
            metavar="MODULE:FUNCTION",
            help="Of a run with a task of your own: the function without arguments that makes it.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Write the model of a client. It may be a novel one; normalisation is inside."""
    if adapter is not None and (format or out):
        raise UserError("--adapter must come without --format and --out; leave either out")
    with closing(Run.open(run_dir, _made(task) if task else None)) as run:
        number = run.task.number_of(client)
        if adapter is not None:
            run.adapter(number, adapter)
            print_made("adapter", adapter, as_json, client=client)
            return
        kind = format_of(out, format) if out else format or Format.SAFETENSORS
        path = out or Path(f"client-{UNUSUAL.sub('_', client)}{SUFFIXES[kind]}")
        export_model(run.model(number), run.task, path, kind)
        print_made("model", path, as_json, client=client, format=str(kind))


def _made(name: str) -> Task:
    """Returns the task that a function makes; a module is looked for in this folder, too."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), function)()
    except UserError:  # which says itself what is wrong with what it makes
        raise
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

"""A target network from a user's own file: ``task.model=nets.py:SensorNet``."""

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from torch import nn

from hyperfed.errors import UserError


def is_file(model: str) -> bool:
    """Whether the name of a target is that of one in a file."""
    return ":" in model


def make(model: str, options: Mapping[str, object]) -> nn.Module:
    """Makes a network of a user's file, whose code runs here.

    Args:
        model: ``path:name``; what has the name is a network, or makes one.
        options: with which it is called.

    Raises:
        UserError: no such file or name, or it makes no network.
    """
    path, _, name = model.rpartition(":")
    found = vars(_module(Path(path))).get(name)
    if isinstance(found, nn.Module) and not options:
        return copy.deepcopy(found)
    if not callable(found):
        raise UserError(
            f"task.model must name a network, or what makes one, in {path}, got {name!r}; give "
            "FILE.py:NAME"
        )
    try:
        made = found(**options)
    except Exception as error:  # whatever a user's code raises is to be told
        raise UserError(
            f"task.model must make a network when it is called with {dict(options) or 'nothing'}, "
            f"but {model} fails ({type(error).__name__}: {error}); mend it"
        ) from error
    if not isinstance(made, nn.Module):
        raise UserError(f"task.model must make an nn.Module, but {model} makes {made!r}; mend it")
    return made


def _module(path: Path) -> object:
    """Runs a file of Python as a module."""
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"task.model must be a target's name or FILE.py:NAME, but there is no {path}"
        )
    module = ModuleType(name := f"hyperfed_model_{path.stem}")
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look there while the file runs
    try:
        # What it says now: an import would take what it compiled of the file as of that second.
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # whatever a user's code raises is to be told
        raise UserError(
            f"{path} must run as Python, but fails ({type(error).__name__}: {error}); mend it"
        ) from error
    finally:
        del sys.modules[name]  # so that its classes are sent to other processes as they are
    return module

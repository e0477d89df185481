"""What the shell completes: methods, keys and their values, tables."""

from collections.abc import Sequence
from pathlib import Path

import typer

from hyperfed.data import datasets
from hyperfed.engines import ENGINES
from hyperfed.methods import METHODS
from hyperfed.nets.targets import TARGETS
from hyperfed.papers.reproduction import WHERE
from hyperfed.runs import experiments, keys
from hyperfed.runs.config import GOES_ON
from hyperfed.runs.keys import Key

NAMED = {"task": datasets.NAMES, "task.model": tuple(TARGETS), "engine": tuple(ENGINES)}
"""Key -> values that its type does not tell."""


def sources(incomplete: str) -> list[str]:
    """Returns what a run can be made from that begins so: methods, ``all``, experiment files."""
    folder = incomplete[: incomplete.rfind("/") + 1]  # as it was written: /home/, ./ or nothing
    found = sorted(Path(folder).glob("*.toml")) if incomplete else []
    files = (f"{folder}{path.name}" for path in found)
    return [name for name in (*METHODS, "all", *files) if name.startswith(incomplete)]


def methods(incomplete: str) -> list[str]:
    """Returns the methods that begin so."""
    return [name for name in METHODS if name.startswith(incomplete)]


def tables(incomplete: str) -> list[str]:
    """Returns the papers' tables that begin so."""
    home = experiments.home()
    known = (path.relative_to(home).with_suffix("") for path in sorted(home.glob("*/*.toml")))
    return [name for name in map(Path.as_posix, known) if name.startswith(incomplete)]


def listed(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns of what ``list keys`` and ``list experiments`` tell more."""
    return tables(incomplete) if ctx.params.get("kind") == "experiments" else methods(incomplete)


def settings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns the keys that begin so, with the method's own, or behind ``=`` the key's values."""
    source = ctx.params.get("source")
    return _completed(keys.keys_of(source if source in METHODS else None), incomplete)


def going_on(incomplete: str) -> list[str]:
    """Returns the same of the keys by which a run may go on otherwise."""
    known = [key for key in keys.keys_of() if key.name.startswith(("engine", *GOES_ON))]
    return _completed(known, incomplete)


def where(incomplete: str) -> list[str]:
    """Returns the same of the keys that say where a table is reproduced."""
    known = [key for key in keys.keys_of() if WHERE.fullmatch(f"{key.name}=")]
    return _completed(known, incomplete)


def _completed(known: Sequence[Key], incomplete: str) -> list[str]:
    name, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{key.name}=" for key in known if key.name.startswith(name)]
    values = {key.name: key.values for key in known} | NAMED
    return [f"{name}={each}" for each in values.get(name, ()) if each.startswith(value)]

"""What commands print: results on standard output, everything else on standard error."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Option

WIDTH = 160
"""Columns of a table that no terminal shows."""

Json = Annotated[bool, Option("--json", help="Print the result as JSON and nothing else.")]
"""The option of every command that has a result."""


def say(text: str) -> None:
    """Prints a line that is no result."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints plain data as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def print_made(what: str, path: Path, as_json: bool, **more: Any) -> None:
    """Prints the path of what a command has made; as JSON with more of it."""
    if as_json:
        print_json({what: str(path), **more})
    else:
        print(path)


def table(*columns: str) -> Table:
    """Returns a table without rows, as all commands show them."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        shown.add_column(column)
    return shown


def print_tables(*shown: Table) -> None:
    """Prints tables, as wide as the terminal; what is in them is text and never markup."""
    width = None if sys.stdout.isatty() else WIDTH
    for each in shown:
        Console(width=width, highlight=False, markup=False).print(each)

"""The little TOML that settings need beyond the standard library.

Writing, reading one value, and reading no more than can be settings.

What is written are scalars, lists and tables; None, which TOML lacks, becomes the word "none".
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 32
"""Tables and lists within one another that are read; the tables of papers have seven."""


def loads(text: str) -> dict[str, Any]:
    """Parses TOML.

    Raises:
        ValueError: it is none, or is nested deeper than settings are, by brackets or dotted keys.
    """
    deep = f"tables and lists must be nested {DEEPEST} deep at most"
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(deep) from error
    level: list[Any] = [table]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, Mapping | list)
        ]
    if level:
        raise ValueError(deep)
    return table


def read_value(text: str) -> Any:
    """Returns what a TOML literal means; text that is none, such as a bare word, stays as it is."""
    number = re.fullmatch(r"[+-]?(\d*)\.(\d*)", text)
    if number and (number[1] or number[2]):  # TOML wants the digits that .2 and 5. leave out
        return float(text)
    try:
        table = loads(f"value = {text}")
    except ValueError:  # a number can have too many digits
        return text
    value = table.pop("value")
    # More than one line, or a date: no setting takes those, so it is a string.
    return (
        value if not table and isinstance(value, bool | int | float | str | list | dict) else text
    )


def literal(value: Any) -> str:
    """Returns a scalar or a list as a TOML literal."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(literal, value))}]"
        case int() | float():
            return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def dumps(table: Mapping[str, Any]) -> str:
    """Returns a table of scalars, lists and tables, whose keys are identifiers, as TOML."""
    return "\n".join(_lines(table)) + "\n"


def _lines(table: Mapping[str, Any], name: str = "") -> Iterator[str]:
    if name:
        yield f"\n[{name}]"
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {literal(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{name}.{key}" if name else key)

"""The keys of a run, for people to look up: type, default and what its docstring says of each."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hyperfed.errors import UserError, nearest
from hyperfed.methods import METHODS
from hyperfed.runs.config import flat, from_keys, shown, to_dict
from hyperfed.runs.settings import RunConfig
from hyperfed.system import toml

ENTRY = re.compile(r"^    (\w+): (.*(?:\n        .*|\n(?=\n        ))*)", re.MULTILINE)
"""An attribute and what is said of it, over several lines."""

ROLE = re.compile(r":\w+:`~?([^`]+)`")
"""A cross-reference."""

BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
"""Constraint -> its sign."""

PLAIN = {NoneType: "none", bool: "true | false", Path: "path", Any: "any"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key that a run understands.

    Attributes:
        name: as a user writes it.
        type: what it takes.
        default: as a user would write it, with the method's preset ``default``.
        about: what its docstring says.
        values: all there are, where they can be told.
    """

    name: str
    type: str
    default: str
    about: str
    values: tuple[str, ...] = ()


def keys_of(method: str | None = None) -> list[Key]:
    """Returns every key of a run, with the method's own where one is given.

    Raises:
        UserError: no such method.
    """
    if method is not None and method not in METHODS:
        raise UserError(
            f"a method must be one of {', '.join(METHODS)}, came {method!r}"
            f"{nearest(method, METHODS)}"
        )
    # Without a method no preset is part of them.
    local = RunConfig("local", METHODS["local"].Config())
    defaults = flat(to_dict(local if method is None else from_keys(method, {})))
    found = list(_fields(RunConfig))
    if method is not None:
        found += _fields(METHODS[method].Config, "method.")
    return [
        Key(
            shown(name),
            type_name(kind),
            written(defaults[name]),
            about,
            tuple(_values(kind)),
        )
        for name, kind, about in found
        if name not in ("method", "settings")
    ]


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (dotted key, type, meaning) of each field, those of nested dataclasses in place."""
    hints, meanings = get_type_hints(kind, include_extras=True), _meanings(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _fields(hint, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hint, meanings.get(field.name, "")


def _meanings(kind: type) -> dict[str, str]:
    """Returns what the docstrings of a dataclass, and of those it inherits from, say of fields."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        documented = inspect.cleandoc(each.__dict__.get("__doc__") or "")
        _, _, attributes = documented.partition("\nAttributes:\n")
        for name, text in ENTRY.findall(attributes):
            found[name] = ROLE.sub(r"\1", " ".join(text.split())).replace("``", "")
    return found


def type_name(kind: Any) -> str:
    """Returns what a type takes, for people: ``float > 0 | none``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([type_name(arguments[0]), ", ".join(_bounds(arguments[1:]))]).rstrip()
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(type_name, arguments))
    if origin is tuple:
        return f"[{type_name(arguments[0])}, ...]"
    if origin is not None and issubclass(origin, Mapping):
        return "table"
    return PLAIN.get(kind) or str(getattr(kind, "__name__", kind))


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    for constraint in metadata:
        inner = getattr(constraint, "metadata", None)  # pydantic's Field holds a list of them
        if inner:
            yield from _bounds(tuple(inner))
            continue
        for name, sign in BOUNDS:
            if (bound := getattr(constraint, name, None)) is not None:
                yield f"{sign} {bound}"


def _values(kind: Any) -> Iterator[str]:
    """Yields all values of a type that has few."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        yield from map(str, arguments)
    elif origin is Annotated:
        yield from _values(arguments[0])
    elif origin in (Union, UnionType):
        for each in arguments:
            yield from _values(each)
    elif kind is bool:
        yield from ("true", "false")
    elif kind is NoneType:
        yield "none"


def written(value: Any) -> str:
    """Returns a value as a user writes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else toml.literal(value)


def changes(was: RunConfig, now: RunConfig) -> Iterator[str]:
    """Yields a line for each setting of a run that has changed, as a user writes it."""
    before, after = flat(to_dict(was)), flat(to_dict(now))
    for key, value in after.items():
        if value != before[key]:
            yield f"{key}={written(value)}, was {written(before[key])}"

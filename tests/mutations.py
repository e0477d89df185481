"""What somebody else may have made of a file or a message: a few drawn bytes say what.

To draw is what costs most in a test of thousands of cases, so that a case is drawn as bytes, from
which all that is changed follows. Zeros change nothing, which is what a failure is reduced to.
"""

from collections.abc import Sequence
from typing import Any

VALUES: Sequence[Any] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 0.5, -0.0, 1e-320,
    1e308, -1e300, float("nan"), float("inf"), "", "0", "-1", "1e9", "nan", "none", "²", "x" * 600,
    "\x1b[31m\n", "\u2028", "\ud800", "val", "Steps", "contiguous", "channels_last", "ann", "a/b",
    [], {}, [[]], [None], [0, 0], [-1], ["a", "b"], [1e308] * 3, {"0": 0}, {"a": {}}, {"": []},
    {"round": -1}, [{"client": "x"}], {"0": {"w": "contiguous"}},
)  # fmt: skip
"""What is put in the place of a value."""

NAMES = (
    "0",
    "1",
    "-1",
    "²",
    "",
    "w",
    "a",
    "x",
    "weights",
    "metric",
    "name",
    "\x1b[0m",
    "..",
)
"""What a value is called besides."""


class Tape:
    """Choices that follow from some bytes; where there are no more, each is the first.

    Args:
        content: the bytes.
    """

    def __init__(self, content: bytes) -> None:
        self._left = int.from_bytes(content, "little")

    def below(self, count: int) -> int:
        """Returns a number from 0 to ``count`` - 1."""
        self._left, chosen = divmod(self._left, count)
        return chosen

    def one_of(self, options: Sequence[Any]) -> Any:
        """Returns one of some options."""
        return options[self.below(len(options))]


def parts(table: Any) -> list[Any]:
    """Returns all values that a JSON value is made of, itself among them."""
    inner = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
    return [table, *(part for value in inner for part in parts(value))]


def changed(table: Any, tape: Tape, own: Sequence[Any]) -> Any:
    """Returns a JSON value that has something else in one place, more or less there.

    Args:
        table: the value.
        tape: says where, and what.
        own: what may come there, beside :data:`VALUES`.
    """
    if not (isinstance(table, dict | list) and table) or not tape.below(8):
        return tape.one_of(VALUES if tape.below(2) else own)
    copy = table.copy()
    place = tape.one_of([*table] if isinstance(table, dict) else range(len(table)))
    kind = tape.below(12)
    if kind == 0:
        del copy[place]
    elif kind == 1 and isinstance(copy, dict):
        copy[tape.one_of(NAMES)] = copy[place]
    elif kind == 1:
        copy.append(copy[place])
    else:
        copy[place] = changed(table[place], tape, own)
    return copy


def spoilt(content: bytes, tape: Tape) -> bytes:
    """Returns bytes of which some are changed, left out or put in."""
    whole = bytearray(content)
    for _ in range(1 + tape.below(3)):
        place, kind = tape.below(len(whole) + 1), tape.below(3)
        if kind == 0:
            whole[place : place + 1] = bytes([tape.below(256)])
        elif kind == 1:
            del whole[place : place + 1 + tape.below(64)]
        else:
            whole[place:place] = b'[{\x00\xff\n"9'[: 1 + tape.below(7)] * (1 + tape.below(3))
    return bytes(whole)


def printable(table: Any) -> dict[str, Any]:
    """Returns a table whose names are text that can be encoded; an empty one of what is none."""
    names = table.items() if isinstance(table, dict) else ()
    return {str(name).encode(errors="replace").decode(): it for name, it in names}

"""The errors a user can cause, kept apart from ours: the command line exits with 2 for these."""

import math
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError


class UserError(ValueError):
    """The input is wrong. The message says what must hold, what came, and what to do."""


class LostEverybodyError(UserError):
    """No client was left in any round, or in many in a row: the run came to nothing.

    The command line exits with 1 for it.
    """


class SpentError(UserError):
    """An answer would take more of a client's epsilon than is left. It is not sent."""


class EngineLostError(Exception):
    """What computes the clients is gone, and what they remember with it; the run can be resumed.

    The command line exits with 3 for it.
    """


def check_positive(**numbers: float) -> None:
    """Raises :class:`UserError` for a number that is not positive and finite, naming it."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise UserError(f"{name} must be positive and finite, came {number}; choose another")


def closest(word: object, options: Iterable[str]) -> str | None:
    """Returns which of some names a word is most like, whatever its capitals; None for none."""
    names = {name.casefold(): name for name in options}
    near = get_close_matches(str(word).casefold(), names, n=1)
    return names[near[0]] if near else None


def nearest(word: object, options: Iterable[str]) -> str:
    """Returns "; did you mean ...?", or nothing where nothing is near."""
    near = closest(word, options)
    return "" if near is None else f"; did you mean {near!r}?"


LONGEST = 500
"""Letters of what others say that we repeat: in a reason, a log, a record."""


def one_line(text: str, longest: int = LONGEST) -> str:
    """Returns what somebody else said as one line that may be shown: escaped, and cut.

    Whatever is not printable (line ends, a terminal's commands, halves of characters) is written as
    Python's ``repr`` does, so that nobody can write lines or colours into our log.
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: longest + 1]
    )
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def fields_wrong(error: ValidationError) -> list[str]:
    """Returns for each wrong field of a file its place and what is wrong."""
    return [f"{'.'.join(map(str, it['loc']))}: {it['msg']}" for it in error.errors()]


def told(error: Exception) -> str:
    """Returns in a line what an error says: of a file's fields, all that are wrong."""
    wrong = "; ".join(fields_wrong(error)) if isinstance(error, ValidationError) else str(error)
    return one_line(wrong)

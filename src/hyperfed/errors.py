"""The errors a user can cause, kept apart from ours: the command line exits with 2 for these."""

import math


class UserError(ValueError):
    """The input is wrong. The message says what must hold, what came, and what to do."""


class LostEverybodyError(UserError):
    """No client was left in any round, or in many in a row: the run came to nothing.

    The command line exits with 1 for it.
    """


def check_positive(**numbers: float) -> None:
    """Raises :class:`UserError` for a number that is not positive and finite, naming it."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise UserError(f"{name} must be positive and finite, came {number}; choose another")

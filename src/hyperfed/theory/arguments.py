"""What the arguments of a bound must be."""

import math

from hyperfed.errors import UserError


def check_not_negative(**numbers: float) -> None:
    """Raises ``UserError`` for a number that is negative or not finite, naming it."""
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise UserError(f"{name} must be 0 or more and finite, came {number}; choose another")


def check_probability(**numbers: float) -> None:
    """Raises ``UserError`` for a number that is not strictly between 0 and 1, naming it."""
    for name, number in numbers.items():
        if not 0 < number < 1:
            raise UserError(f"{name} must be between 0 and 1, came {number}; choose another")

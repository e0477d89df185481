"""What became of clients that came to their sites when a run was over, and its line in a log."""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from hyperfed.runs.measures import Number


@dataclass(frozen=True)
class Newcomer:
    """A client that introduced itself when the run was over.

    Attributes:
        client: its name.
        model: whether its site has kept it; "known" is that of a client of the run, or of one that
            was served before, which was left alone.
        why: the site has not kept it; "" where it has.
        metric: what models of the task are judged by.
        value: of that, on the client's test examples; None where it has none, or was not evaluated.
    """

    client: str
    model: Literal["kept", "not kept", "known"]
    why: str = ""
    metric: str = ""
    value: Number = None


_NEWCOMER, _SPOKEN = TypeAdapter(Newcomer), "newcomer: "


def spoken(newcomer: Newcomer) -> str:
    """Returns the line that says it to those who wait on another host."""
    return _SPOKEN + _NEWCOMER.dump_json(newcomer).decode()


def heard(line: str) -> Newcomer | None:
    """Returns what a line of a log says of a newcomer; None of any other line."""
    if not line.startswith(_SPOKEN):
        return None
    try:
        return _NEWCOMER.validate_json(line.removeprefix(_SPOKEN))
    except ValidationError:
        return None

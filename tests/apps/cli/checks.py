"""What the tests of the command line share: a short run, what a command left, what is the same."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hyperfed.runs.folder import read_run

SMALL = (
    "rounds=4",
    "task.clients=4",
    "task.novel=0.25",
    "evaluate_every=2",
    "checkpoint_every=2",
    "method.local_steps=2",
)

DEADLINE = 120.0
"""Seconds for what takes a few on a machine that does nothing else."""


class Outcome(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


def failure(outcome: Outcome) -> str:
    """Checks that a command said one thing, on standard error, and nothing else; returns it."""
    assert outcome.code == 2, outcome
    assert not outcome.out
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("error: ") == 1
    assert "Traceback" not in outcome.err
    return outcome.err


def measured(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what two equal runs may differ in: the time, and the commit of a busy checkout."""
    return {key: value for key, value in numbers.items() if key not in ("seconds", "commit")}


def same_records(left: Path, right: Path) -> None:
    """Checks that two runs have the same numbers."""
    one, other = read_run(left), read_run(right)
    assert one.summary is not None
    assert other.summary is not None
    assert measured(one.summary) == measured(other.summary)
    assert [measured(vars(e)) for e in one.evaluations] == [
        measured(vars(e)) for e in other.evaluations
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }

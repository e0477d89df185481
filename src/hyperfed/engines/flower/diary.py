"""What a site has been asked, on its own disk: the audit log, and the evaluations of a day."""

import json
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from os.path import lexists
from pathlib import Path
from typing import Any

from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.errors import UserError, one_line
from hyperfed.system.files import append_line, atomic_write, check_files
from hyperfed.system.locks import alone

LOG = "audit.jsonl"
"""The audit log in a site's state, by which that is known for what it is."""

REFUSED = "refused"
"""How the decision on what a policy does not allow begins."""


class Diary:
    """How often a site has evaluated today, and a log that is only added to.

    Args:
        state: folder of the site's state, which is there.
        policy: says how much.
    """

    def __init__(self, state: Path, policy: Policy) -> None:
        self._state, self._policy = state, policy

    def evaluate(self, client: str) -> None:
        """Notes that a client is evaluated, before it is.

        Raises:
            RefusedError: it has been, as often as it may be in a day.
            UserError: the disk refuses.
        """
        with alone(self._state):  # two runs may ask at once
            self._count(client, self._state / "evaluations.json")

    def _count(self, client: str, path: Path) -> None:
        today = datetime.now(UTC).date().isoformat()
        known = json.loads(path.read_text(encoding="utf-8")) if lexists(path) else {}
        day = max(today, known.get("day", ""))  # a clock that is set back gives nothing back
        counts = known["clients"] if known.get("day", "") == day else {}
        if counts.get(client, 0) >= self._policy.evaluations_per_day:
            why = (
                f", and {path.name} of its site's state counts on until {day}, which its clock has "
                "said; if the clock is right now, the site's owner may remove that file"
            )
            raise RefusedError(
                f"a client must be evaluated {self._policy.evaluations_per_day} times a day at most"
                f"{why * (day > today)}"
            )
        counts[client] = counts.get(client, 0) + 1
        atomic_write(path, json.dumps({"day": day, "clients": counts}).encode())

    def note(self, **entry: Any) -> None:
        """Adds a line to :data:`LOG`; a full file becomes ``audit-<time>.jsonl``.

        Raises:
            UserError: the disk refuses.
        """
        path = self._state / LOG
        when = datetime.now(UTC).isoformat(timespec="seconds")
        with alone(self._state):
            if path.exists() and path.stat().st_size > self._policy.largest_log:
                path.rename(self._state / f"audit-{time.time_ns()}.jsonl")
            append_line(path, json.dumps({"time": when} | entry).encode())


@dataclass(frozen=True)
class Told:
    """What the audit log of a site says.

    Attributes:
        last: when the last call was noted, ISO 8601 in UTC; empty where none was.
        calls: calls of clients today (UTC), and messages that failed as a whole.
        refused: those of them that the policy refused.
        reasons: (decision, times) of what was not answered today, the most frequent first.
        torn: lines that are no JSON, of which nothing is said: over some a machine died.
    """

    last: str
    calls: int
    refused: int
    reasons: tuple[tuple[str, int], ...]
    torn: int = 0


SHOWN = 5
"""Decisions that are told."""


def told_by(state: Path) -> Told:
    """Reads the audit log of a site.

    Raises:
        UserError: it cannot be read, or a line is JSON and no note.
    """
    today, last, torn = datetime.now(UTC).date().isoformat(), "", 0
    decisions: Counter[str] = Counter()
    check_files(state)
    # A log that is full was renamed when the next one began; its last line may be of today.
    path = state
    try:
        for path in sorted(state.glob("audit*.jsonl")):
            changed = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
            if path.name != LOG and changed < today:
                continue
            for line in path.read_bytes().splitlines():
                try:
                    note = json.loads(line)
                except ValueError:
                    torn += 1
                    continue
                when, decision = str(note["time"]), str(note["decision"])
                datetime.fromisoformat(when)
                last = max(last, when)
                if when.startswith(today):
                    decisions[one_line(decision, 200)] += 1
    except OSError as error:
        raise UserError(f"{path} must be a file that can be read, but: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"every line of {path} must be a note of the audit log, but one is not "
            f"({one_line(f'{type(error).__name__}: {error}', 100)}); put the file elsewhere"
        ) from error
    failed = [(it, times) for it, times in decisions.most_common() if it != "answered"]
    refused = sum(times for it, times in failed if it.startswith(REFUSED))
    return Told(last, decisions.total(), refused, tuple(failed[:SHOWN]), torn)

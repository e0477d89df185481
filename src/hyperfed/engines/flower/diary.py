"""What a site has been asked, on its own disk: the audit log, and the evaluations of a day."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.system.files import append, atomic_write


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
        today, path = datetime.now(UTC).date().isoformat(), self._state / "evaluations.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        counts = known["clients"] if known.get("day", "") == today else {}
        if known.get("day", "") > today:  # a clock that is set back gives nothing back
            today, counts = known["day"], known["clients"]
        if counts.get(client, 0) >= self._policy.evaluations_per_day:
            raise RefusedError(
                f"a client must be evaluated {self._policy.evaluations_per_day} times a day at most"
            )
        counts[client] = counts.get(client, 0) + 1
        atomic_write(path, json.dumps({"day": today, "clients": counts}).encode())

    def note(self, **entry: Any) -> None:
        """Adds a line to ``audit.jsonl``; a full file becomes ``audit-<time>.jsonl``.

        Raises:
            UserError: the disk refuses.
        """
        path = self._state / "audit.jsonl"
        if path.exists() and path.stat().st_size > self._policy.largest_log:
            path.rename(self._state / f"audit-{time.time_ns()}.jsonl")
        when = datetime.now(UTC).isoformat(timespec="seconds")
        append(path, json.dumps({"time": when} | entry).encode() + b"\n")

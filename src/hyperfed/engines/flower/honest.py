"""What an honest client would reply: a made-up one does what sites are asked, beside them.

Most steps promise nothing of their reply, and a vote among clients is won by the site that has
most. So the server is a client itself: with a few made-up examples it takes part in every cohort,
one batch of each kind, and what its replies look like (names, shapes and dtypes, never a value) is
what those of sites must look like.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyperfed import trees
from hyperfed.data.roster import RemoteTask
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.made_up import made_up
from hyperfed.federation import Client
from hyperfed.trees import Structure


class HonestClient:
    """Knows the structure of replies.

    Args:
        task: who the clients are.
        client: the method's Client.
        config: the method's settings.
        options: seed and precision of the run.
    """

    def __init__(self, task: RemoteTask, client: type[Client], config: Any, **options: Any) -> None:
        self._task, self._client, self._config, self._options = task, client, config, options
        self._engine: LoopEngine | None = None
        # Whose place it takes in a cohort: a client that is asked first remembers nothing, and one
        # that is asked again goes on from what it wrote.
        self._place: dict[tuple[int, str], int] = {}

    def replies(self, calls: Sequence[Call]) -> list[Structure | None]:
        """Returns what the reply to each call must look like; None where that cannot be told."""
        found: dict[tuple[int, str, str, int], Structure | None] = {}
        return [
            found[key] if key in found else found.setdefault(key, self._reply(call, key[1]))
            for call in calls
            for key in [(call.cohort, self._task.size_of(call.client), call.step, call.turn)]
        ]

    def forget(self, cohort: int) -> None:
        """Drops what it wrote in a cohort that is closed."""
        self._place = {key: place for key, place in self._place.items() if key[0] != cohort}
        if self._engine is not None:
            self._engine.memories.forget(cohort)

    def _reply(self, call: Call, size: str) -> Structure | None:
        if self._engine is None:
            self._engine = LoopEngine(
                made_up(self._task), self._client, self._config, workers=1, **self._options
            )
        place = self._place.setdefault((call.cohort, size), call.client)
        batches = call.batches and replace(call.batches, count=min(1, call.batches.count))
        (reply,) = self._engine.answer([replace(call, client=place, batches=batches)])
        return None if isinstance(reply, Exception) else trees.structure(reply)

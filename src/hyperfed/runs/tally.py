"""What training tells of itself: whom it lost, which rounds were void, and what travelled."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from hyperfed.engines import Exchange
from hyperfed.engines.cohort import CohortState
from hyperfed.runs.records import Evaluation, Lost, Void


class Tally:
    """What has happened since the latest evaluation, which is when it is recorded.

    Attributes:
        exchanges: messages that nobody has counted yet. What is posted may travel, and lose
            clients, after its round.
        late: clients that were lost so, and why.
        lost: clients that were lost since the latest evaluation.
        void: rounds that were taken back since then.
        void_rounds: how many were in all.
    """

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.late: list[tuple[int, str]] = []
        self.lost: list[Lost] = []
        self.void: list[Void] = []
        self.void_rounds = 0
        self._news: list[Lost] = []

    def follow(self, state: CohortState) -> None:
        """Has what a cohort exchanges noted here."""
        state.exchanges, state.late = self.exchanges, self.late

    def count(self, bytes: dict[str, int]) -> None:
        """Adds what has travelled since the last time to {"down": ..., "up": ...}."""
        bytes["down"] += sum(exchange.down for exchange in self.exchanges)
        bytes["up"] += sum(exchange.up for exchange in self.exchanges)
        self.note(self.late)
        self.exchanges.clear()
        self.late.clear()

    def note(self, lost: Iterable[tuple[int, str]]) -> list[Lost]:
        """Notes clients that were lost, and why; returns them."""
        found = [Lost(client, reason) for client, reason in lost]
        self.lost += found
        self._news += found
        return found

    def take_back(self, round: int, clients: Sequence[int]) -> Void:
        """Notes that a round, in which were replies of ``clients``, is void; returns it."""
        void = Void(round, tuple(clients))
        self.void.append(void)
        self.void_rounds += 1
        return void

    def step_of(self, client: int) -> str:
        """Returns which step a client was asked last."""
        return next((e.step for e in reversed(self.exchanges) if e.client == client), "any")

    def news(self) -> tuple[Lost, ...]:
        """Returns the clients that were lost since this was called last."""
        lost, self._news = tuple(self._news), []
        return lost

    def close(self) -> tuple[tuple[Lost, ...], tuple[Void, ...]]:
        """Returns who was lost and which rounds were void, and begins anew."""
        lost, void = tuple(self.lost), tuple(self.void)
        self.lost, self.void = [], []
        return lost, void

    def meta(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it, plain JSON values."""
        return {
            "lost": [[lost.client, lost.reason] for lost in self.lost],
            "void": [[void.round, list(void.clients)] for void in self.void],
            "void_rounds": self.void_rounds,
        }

    def load(self, meta: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`meta` kept.

        Raises:
            LookupError, TypeError, ValueError: it is no such thing.
        """
        self.lost = [Lost(client, reason) for client, reason in meta["lost"]]
        self.void = [Void(number, tuple(clients)) for number, clients in meta.get("void", [])]
        self.void_rounds = index(meta.get("void_rounds", 0))


def always_lost(evaluations: Iterable[Evaluation], cohorts: Iterable[Sequence[int]]) -> list[int]:
    """Returns the clients that were lost whenever a round was to have them.

    Args:
        evaluations: of the whole run.
        cohorts: of all its rounds.
    """
    lost = Counter(it.client for e in evaluations if e.split == "test" for it in e.lost)
    if not lost:
        return []
    drawn = Counter(client for cohort in cohorts for client in cohort)
    return [client for client in sorted(lost) if lost[client] >= drawn[client]]

"""What a run notes of lost clients, void rounds and messages between two evaluations."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from finished_runs import evaluation
from hyperfed.engines import Exchange
from hyperfed.engines.cohort import CohortState
from hyperfed.runs.records import REHEARSAL, Lost, Void
from hyperfed.runs.tally import Tally, always_lost


def test_what_is_late_is_counted_and_its_clients_are_lost_once() -> None:
    tally, state = Tally(), CohortState(0, 0, training=True)
    tally.follow(state)
    state.exchanges += [Exchange("train", 3, 100, 10), Exchange("train", 4, 100, 0)]
    sent: dict[str, int] = Counter()
    tally.count(sent)
    tally.note({4: "did not answer"}.items())
    state.exchanges.append(Exchange("gradient", 3, 7, 0))  # it was posted, and travels later
    state.late.append((3, "its site is gone"))
    for _ in range(2):
        tally.count(sent)
    assert sent == {"down": 207, "up": 10}
    lost = (Lost(4, "did not answer"), Lost(3, "its site is gone"))
    assert (tally.news(), tally.news()) == (lost, ())
    assert (tally.close(), tally.close()) == ((lost, ()), ((), ()))


def test_a_client_s_latest_step_is_told() -> None:
    tally = Tally()
    tally.exchanges += [Exchange(step, client, 1, 1) for step, client in (("a", 1), ("b", 1))]
    tally.exchanges.append(Exchange("c", 2, 1, 1))
    assert [tally.step_of(client) for client in (1, 2, 3)] == ["b", "c", "any"]


def test_a_checkpoint_keeps_what_no_evaluation_has_recorded_yet() -> None:
    tally, again = Tally(), Tally()
    assert tally.take_back(2, [5, 6]) == Void(2, (5, 6))
    tally.close()
    tally.take_back(3, [5])
    tally.note([(1, "diverged")])
    again.load(json.loads(json.dumps(tally.meta())))
    assert again.void_rounds == 2
    assert again.close() == ((Lost(1, "diverged"),), (Void(3, (5,)),))


def test_an_older_checkpoint_knows_of_no_void_round() -> None:
    tally = Tally()
    tally.load({"lost": [[1, "diverged"]]})
    assert (tally.void_rounds, tally.close()) == (0, ((Lost(1, "diverged"),), ()))


@pytest.mark.parametrize(
    ("lost", "cohorts", "never"),
    [
        ([], [[0, 1]], []),
        ([[1], [1]], [[0, 1], [1, 2], [0, 2]], [1]),
        ([[1], []], [[0, 1], [1, 2]], []),
        ([[1, 0], [0]], [[0, 1], [0, 1]], [0]),
        ([[2, 2], []], [[0, 2], [0, 2]], [2]),  # of two rounds before one evaluation
        ([[3, 1], [1, 3]], [[1, 3], [1, 3]], [1, 3]),
    ],
)
def test_who_was_lost_whenever_it_was_drawn(lost: Any, cohorts: Any, never: list[int]) -> None:
    evaluations = [
        replace(evaluation(1, split, [1]), lost=tuple(Lost(client, "why") for client in clients))
        for clients in lost
        for split in ("val", "test", REHEARSAL)  # all tell of the same
    ]
    assert always_lost(evaluations, cohorts) == never

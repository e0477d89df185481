"""What clients remember: drafts of a cohort until it is committed."""

import gc

import torch

from hyperfed.engines.calls import Answer, Call
from hyperfed.engines.memories import Memories
from probe import Client, engine_of


def test_memory_survives_rounds_and_scratch_one_round() -> None:
    engine = engine_of()
    for number in range(2):
        cohort = engine.cohort([0, 1], number, training=True)
        for _ in range(2):
            reply = cohort.ask(Client.remember)
        engine.commit(cohort)
        assert reply["scratch"].tolist() == [2, 2]
        assert reply["memory"].tolist() == [2 * (number + 1)] * 2


def test_an_uncommitted_cohort_leaves_no_trace() -> None:
    engine = engine_of()
    engine.cohort([0], 0, training=False).ask(Client.remember)
    assert engine.memory == {}


def written(count: int) -> Answer:
    return Answer({}, {"count": torch.tensor(count)}, {"turn": torch.tensor(count)})


def test_cohorts_that_are_open_at_once_see_their_own_drafts_and_what_is_kept() -> None:
    memories = Memories()
    memories.kept = {7: {"count": torch.tensor(1)}}
    first, second = Call(0, 0, 7, "any"), Call(1, 0, 7, "any")
    memories.note(first, written(2))
    assert [memories.of(call)[0]["count"].item() for call in (first, second)] == [2, 1]
    assert [len(memories.of(call)[1]) for call in (first, second)] == [1, 0]


def test_only_the_clients_that_are_named_are_kept() -> None:
    memories = Memories()
    for client in (3, 4):
        memories.note(Call(0, 0, client, "any"), written(client))
    memories.keep(0, [4])
    assert {client: tree["count"].item() for client, tree in memories.kept.items()} == {4: 4}


def test_drafts_end_with_their_cohort() -> None:
    engine = engine_of()
    cohort = engine.cohort([0], 0, training=True)
    cohort.ask(Client.remember)
    call = Call(cohort.state.number, 0, 0, "remember")
    assert engine.memories.of(call)[1] != {}
    del cohort
    gc.collect()
    assert engine.memories.of(call) == ({}, {})

"""What clients remember: drafts of a cohort until it is committed."""

import gc
import weakref
from typing import Any

import pytest
import torch

from hyperfed import federation
from hyperfed.engines.calls import Answer, Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.engines.memories import Memories
from hyperfed.federation import AllLostError, Each, step
from hyperfed.trees import Tree
from probe import Client, engine_of
from toys import make_task


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


class Keeping(federation.Client):
    """Remembers what it was sent, as it came, and what has a graph."""

    @step
    def keep(self, model: Tree) -> Tree:
        last = self.memory.get("last", model["w"])
        learned = model["w"].detach().clone().requires_grad_()
        self.memory |= {"last": model["w"], "double": 2 * learned}
        return {"last": last}


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_what_a_client_remembers_does_not_move_with_the_server(
    kind: type[LoopEngine], *, each: bool
) -> None:
    """Which moves its own tensors in place, and sends them as they are."""
    engine = kind(make_task(), Keeping, None, seed=0)
    model = torch.zeros(2, 3) if each else torch.zeros(3)
    payload: Any = Each({"w": model}) if each else {"w": model}
    for number in range(3):
        cohort = engine.cohort([0, 1], number, training=True)
        reply = cohort.ask(Keeping.keep, payload)
        assert reply["last"].tolist() == [[max(0, number - 1)] * 3] * 2
        engine.commit(cohort)
        model += 1
    for kept in engine.memory.values():
        assert kept["last"].tolist() == [2.0] * 3
        assert not any(leaf.requires_grad for leaf in kept.values())


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


def test_a_draft_keeps_no_reply_alive() -> None:
    """Which may be as long as a model, for as long as the round lasts."""
    memories, reply = Memories(), torch.zeros(1)
    gone = weakref.ref(reply)
    memories.note(Call(0, 0, 3, "any"), Answer({"w": reply}, {}, {}))
    del reply
    assert gone() is None


def test_drafts_end_with_their_cohort() -> None:
    engine = engine_of()
    cohort = engine.cohort([0], 0, training=True)
    cohort.ask(Client.remember)
    call = Call(cohort.state.number, 0, 0, "remember")
    assert engine.memories.of(call)[1] != {}
    del cohort
    gc.collect()
    assert engine.memories.of(call) == ({}, {})


class Nesting(Client):
    """Remembers in a tree within its memory."""

    def add(self, number: float) -> Tree:
        for tree in (self.memory, self.scratch):
            inner = tree.setdefault("inner", {})
            inner["sum"] = inner.get("sum", torch.tensor(0.0)) + number
        return {"scratch": self.scratch["inner"]["sum"]}

    @step
    def one(self) -> Tree:
        return self.add(1)

    @step
    def spoiled(self) -> Tree:
        return {"reply": self.add(1)["scratch"] * torch.nan}

    @step
    def diverges(self) -> Tree:
        self.add(torch.nan)
        return {}

    @step(deferrable=True)
    def hides_what_it_writes(self) -> Tree:
        self.memory["inner"]["sum"] = torch.tensor(5.0)
        return {}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_a_tree_within_a_memory_is_a_draft_as_the_rest(kind: type[LoopEngine]) -> None:
    engine = kind(make_task(), Nesting, None, seed=0)

    def remembered() -> list[float]:
        return [float(engine.memory[client]["inner"]["sum"]) for client in (0, 1)]

    first = engine.cohort([0, 1], 0, training=True)
    assert [first.ask(Nesting.one)["scratch"].tolist() for _ in range(2)] == [[1, 1], [2, 2]]
    engine.commit(first)
    engine.cohort([0, 1], 1, training=False).ask(Nesting.one)  # it is served
    for lost, what in (
        (Nesting.spoiled, "the reply"),
        (Nesting.diverges, "what it would remember"),
    ):
        cohort = engine.cohort([0, 1], 1, training=True)
        with pytest.raises(AllLostError, match=f"{what} is not finite"):
            cohort.ask(lost)
        engine.commit(cohort)
    assert remembered() == [2, 2]
    cohort = engine.cohort([0, 1], 2, training=True)
    cohort.ask(Nesting.one)
    cohort.post(Nesting.hides_what_it_writes).reply()
    assert [why[:15] for _, why in cohort.state.late] == ["PermissionError"] * 2
    engine.commit(cohort)
    assert remembered() == [3, 3]

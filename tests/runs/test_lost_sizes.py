"""Of several target sizes all clients of one are lost: the others' round is not void."""

from collections import Counter
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines.calls import Call
from hyperfed.engines.faults import Faults
from hyperfed.federation import AllLostError, Cohort
from hyperfed.methods import METHODS
from hyperfed.runs.config import from_keys
from hyperfed.runs.run import Run
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import Tree
from toys import Normed, TwoLayers, close, make_task

LOST = 1
"""The only client of its size."""

OWN: dict[str, dict[str, Any]] = {"itpfl": {"phase_one_rounds": 1}, "pfedkt": {"absorb_steps": 1}}
"""Settings without which a method needs more than two rounds, or long."""


def task() -> Task:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    return make_task(models=models, sizes=("S", "L", "S", "S"))


def run_of(method: str, **keys: Any) -> Run:
    settings = {"rounds": 2, "cohort": 1.0, "evaluate_every": 2, "track": "none"}
    own = {"local_steps": 2, "batch_size": 4, "local_lr": 0.1} | OWN.get(method, {})
    return Run(from_keys(method, settings | {"method": own} | keys), task())


def learned(run: Run) -> Tree:
    """What two rounds came to."""
    for _ in range(2):
        run._one_round()
    return trees.clone({"server": run.server.state(), "memory": {**run.engine.memory}})


def lose(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Loses the client from now on; returns how often each was asked."""
    asked: Counter[int] = Counter()

    def drops(_: Faults, seed: int, call: Call) -> bool:
        asked[call.client] += 1
        return call.client == LOST

    monkeypatch.setattr(Faults, "drops", drops)
    return asked


@pytest.mark.parametrize("method", METHODS)
def test_what_is_learned_is_as_without_them(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch)
    run = run_of(method)
    found = learned(run)
    assert [lost.client for lost in run._rounds.tally.lost] == [LOST] * 2
    assert run._rounds.tally.void_rounds == 0
    assert found["memory"].keys() <= {0, 2, 3}
    monkeypatch.setattr(Run, "_cohort", lambda *_: [0, 2, 3])
    close(found, learned(run_of(method)))


def test_the_others_are_asked_once_more_and_the_lost_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = lose(monkeypatch)
    learned(run_of("fedavg"))
    assert asked == {0: 4, LOST: 2, 2: 4, 3: 4}


def test_one_that_is_left_is_asked_once_more_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = lose(monkeypatch)
    monkeypatch.setattr(Run, "_cohort", lambda *_: [0, LOST])
    run = run_of("fedavg")
    run._one_round()
    assert asked == {0: 2, LOST: 1}
    assert run._rounds.answered


def test_who_is_lost_then_is_told_of_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = lose(monkeypatch)
    drops = Faults.drops
    monkeypatch.setattr(
        Faults,
        "drops",
        lambda self, seed, call: drops(self, seed, call) or (call.client, asked[3]) == (3, 2),
    )
    run = run_of("fedavg")
    run._one_round()
    assert [lost.client for lost in run._rounds.tally.lost] == [LOST, 3]


@pytest.mark.parametrize(
    "privacy",
    [
        {"epsilon": 8.0, "where": "local"},
        {"epsilon": 8.0, "where": "central"},
        {"masking": True},  # of one sum more or less the difference is a client's own
    ],
)
def test_nobody_is_asked_once_more_where_an_answer_costs(
    privacy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("fedavg", privacy=privacy | {"clip": 1.0})
    before, asked = trees.clone(run.server.state()), lose(monkeypatch)
    after = learned(run)["server"]
    assert asked == {0: 2, LOST: 2, 2: 2, 3: 2}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_they_begin_where_the_round_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a method that has changed its server before it asked."""
    lose(monkeypatch)
    found = []
    for begun in (False, True):
        run = run_of("fedavg")
        train = run.server.round

        def hasty(clients: Cohort, run: Run = run, train: Any = train, begun: bool = begun) -> None:
            if begun and LOST in clients.ids:
                trees.tree_map(lambda leaf: leaf.add_(1), run.server.model["S"])
            train(clients)

        monkeypatch.setattr(run.server, "round", hasty)
        found.append(learned(run))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_round_of_which_a_method_can_make_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rounds = run_of("fedavg"), Counter[int]()

    def nothing(clients: Cohort) -> None:
        rounds[clients.round] += 1
        if rounds[clients.round] < 5:
            raise AllLostError

    monkeypatch.setattr(run.server, "round", nothing)
    learned(run)
    assert rounds == {0: 1, 1: 1}

"""Of several target sizes all clients of one are lost: the others' round is not void."""

from collections import Counter
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines.calls import Call
from hyperfed.engines.faults import Faults
from hyperfed.errors import UserError
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


FOUR = ("S", "L", "S", "S")


def task(sizes: tuple[str, ...] = FOUR) -> Task:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    return make_task(models=models, sizes=sizes, examples=(12, 7, 20, 9, 8, 8)[: len(sizes)])


def run_of(method: str, whole: Task | None = None, **keys: Any) -> Run:
    settings = {"rounds": 2, "cohort": 1.0, "evaluate_every": 2, "track": "none"}
    own = {"local_steps": 2, "batch_size": 4, "local_lr": 0.1} | OWN.get(method, {})
    return Run(from_keys(method, settings | {"method": own} | keys), whole or task())


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


SIX = ("S", "L", "S", "S", "L", "L")
"""Sizes of which each is that of three clients."""


@pytest.mark.parametrize(
    ("privacy", "sizes"),
    [
        ({"epsilon": 8.0, "where": "local"}, FOUR),
        ({"epsilon": 8.0, "where": "central"}, FOUR),
        ({"masking": True}, SIX),  # of one sum more or less the difference is a client's own
    ],
)
def test_nobody_is_asked_once_more_where_an_answer_costs(
    privacy: dict[str, Any], sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("fedavg", task(sizes), privacy=privacy | {"clip": 1.0})
    before, asked = trees.clone(run.server.state()), lose(monkeypatch)
    after = learned(run)["server"]
    assert asked == dict.fromkeys(range(len(sizes)), 2)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    if sizes == SIX:
        told = "a masked sum must be of 3 clients here, but 2 are left of L"
        assert run._rounds.tally.lost[-1].reason == told


ROBUST: dict[str, Any] = {"robust": {"aggregation": "median"}}
MASKED: dict[str, Any] = {"privacy": {"masking": True}}


@pytest.mark.parametrize(
    ("keys", "setting"),
    [(ROBUST, "robust.aggregation is not mean"), (MASKED, "privacy.masking is true")],
    ids=["robust", "masked"],
)
def test_a_round_has_three_clients_of_each_size_or_changes_nothing(
    keys: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"3 of each of 2 target sizes, where {setting}"):
        run_of("fedavg", task(SIX), cohort=5, **keys)
    with pytest.raises(UserError, match=f"train where {setting}, but L is that of 1; give"):
        run_of("fedavg", task((*SIX[:4], "S", "S")), **keys)
    asked = lose(monkeypatch)
    monkeypatch.setattr(Run, "_cohort", lambda *_: [0, 2, 3, 4, 5])
    run = run_of("fedavg", task(SIX), **keys)
    before = trees.clone(run.server.state())
    torch.testing.assert_close(learned(run)["server"], before, rtol=0, atol=0)
    assert asked == {}
    told = f"a round must have at least 3 clients of each target size where {setting}, but 2 of L"
    assert [lost.client for lost in run._rounds.tally.lost] == [0, 2, 3, 4, 5] * 2
    assert {lost.reason for lost in run._rounds.tally.lost} == {f"{told} are there"}
    assert "are there; raise cohort" in run._rounds.nobody
    monkeypatch.setattr(Run, "_cohort", lambda *_: [0, 2, 3])  # of which all are of one size
    learned(run)
    assert (run.server.model["S"]["body.weight"] != before["model"]["S"]["body.weight"]).any()


def test_of_two_that_are_left_no_rule_makes_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lose(monkeypatch)
    run = run_of("fedavg", task(SIX), **ROBUST)
    before = trees.clone(run.server.state())
    torch.testing.assert_close(learned(run)["server"], before, rtol=0, atol=0)
    assert [void.clients for void in run._rounds.tally.void] == [(0, 2, 3, 4, 5)] * 2
    assert "is not mean, but 2 of L are there, so that it goes on" in caplog.text


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

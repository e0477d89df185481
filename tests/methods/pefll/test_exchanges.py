"""What travels between PeFLL's server and clients, who is lost, and what is kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyperfed import trees
from hyperfed.engines.calls import Call
from hyperfed.engines.local import loop
from hyperfed.federation import AllLostError
from hyperfed.system.randomness import seeded
from hyperfed.trees import Tree, aggregation, checkpoints
from hyperfed.trees.aggregation import Rule
from methods.pefll.checks import (
    DELAYED,
    SETTINGS,
    lose,
)
from toys import (
    CLASSES,
    FEATURES,
    Federation,
    Normed,
    TwoLayers,
    close,
    make_task,
)


@pytest.mark.parametrize(
    ("descriptor_net", "network"),
    [("target", (FEATURES + CLASSES) * 4 + 4 + 4 * 2 + 2), ("linear", CLASSES * 2 + 2)],
)
def test_three_exchanges_travel_and_nothing_else(descriptor_net: str, network: int) -> None:
    federation = Federation("pefll", make_task(), **SETTINGS | {"descriptor_net": descriptor_net})
    cohort = federation.round([1, 2])
    model = FEATURES * 4 + 4 + 4 * CLASSES + CLASSES
    expected = [
        ("describe", network, 2),
        ("train_model", model, model),
        ("descriptor_net_gradient", 2, network),
    ]
    assert [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges] == [
        (step, client, 8 * down, 8 * up) for step, down, up in expected for client in (1, 2)
    ]
    assert federation.engine.memory == {1: {}, 2: {}}


def test_with_a_delayed_gradient_the_same_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[str]] = []
    answer = loop.LoopEngine.answer

    def watched(engine: loop.LoopEngine, calls: Sequence[Call]) -> list[Tree | Exception]:
        steps.append([call.step for call in calls])
        return answer(engine, calls)

    usual, ours = (Federation("pefll", make_task(), **each) for each in (SETTINGS, DELAYED))
    expected = [usual.round([1, 2], number).state.exchanges for number in range(2)]
    monkeypatch.setattr(loop.LoopEngine, "answer", watched)
    cohorts = [ours.round([1, 2], number) for number in range(2)]
    assert steps == [
        ["describe"] * 2,
        ["train_model"] * 2,
        ["descriptor_net_gradient"] * 2 + ["describe"] * 2,
        ["train_model"] * 2,
    ]
    ours.server.state()
    assert [cohort.state.exchanges for cohort in cohorts] == expected
    assert ours.engine.memory == {1: {}, 2: {}}


STEPS = ["describe", "train_model", "descriptor_net_gradient"]


@pytest.mark.parametrize("net", [TwoLayers, Normed])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_lost_between_messages_equals_one_never_sampled(
    step: str, net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS | {"standardize": True, "optimizer": "adam"}
    lossy = Federation("pefll", make_task(net), **settings)
    smaller = Federation("pefll", make_task(net), **settings)
    for ours in (lossy, smaller):
        ours.round([0, 1, 2, 3], 0)
    lose(monkeypatch, step, 1)
    assert list(lossy.round([0, 1, 3], 1).state.lost) == [1]
    smaller.round([0, 3], 1)
    close(lossy.server.state(), smaller.server.state())


def test_descriptors_are_standardised_without_who_is_lost_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SETTINGS | {"standardize": True}
    lossy, smaller = (Federation("pefll", make_task(), **settings) for _ in range(2))
    smaller.round([1, 3])
    lose(monkeypatch, "describe", 0)  # the first, whose descriptor it would be
    lossy.round([0, 1, 3])
    close(lossy.server.state(), smaller.server.state())


@pytest.mark.parametrize("step", STEPS)
def test_all_lost_at_any_message_changes_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Federation("pefll", make_task(Normed), **SETTINGS | {"standardize": True})
    before = trees.clone(ours.server.state())
    lose(monkeypatch, step, 0, 1)
    with pytest.raises(AllLostError):
        ours.round([0, 1])
    torch.testing.assert_close(ours.server.state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [aggregation.MEAN, Rule("trimmed_mean", 0.0)])
@pytest.mark.parametrize("step", STEPS[2:])
def test_a_target_size_lost_at_the_end_leaves_the_others(
    step: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seeded(0, "sizes"):
        models: dict[str, nn.Module] = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    lossy, smaller = (Federation("pefll", task, **SETTINGS) for _ in range(2))
    lose(monkeypatch, step, 1)
    with trees.aggregating(rule):
        lossy.round([0, 1, 2])
        smaller.round([0, 2])
    close(lossy.server.state(), smaller.server.state())


@pytest.mark.parametrize("delayed", [False, True])
def test_the_state_holds_what_a_killed_server_needs(delayed: bool, tmp_path: Path) -> None:
    settings = {"local_steps": 2, "batch_size": 4}  # Adam, standardised
    settings |= {"delayed_gradient": delayed}
    ours, other = (Federation("pefll", make_task(Normed), **settings) for _ in range(2))
    ours.round([0, 1])
    checkpoints.save_state(tmp_path / "state", ours.server.state(), {})
    tree, _ = checkpoints.load_state(tmp_path / "state")
    assert tree["standard"]["deviation"] > 0
    other.server.load(tree)
    for each in (ours, other):
        each.round([2, 3], 1)
    torch.testing.assert_close(ours.server.state(), other.server.state(), rtol=0, atol=0)

"""IT-PFL-HN, phase 2: the one-piece gradient through the frozen encoder, resuming, losses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.federation import AllLostError
from hyperfed.runs.config import from_keys
from hyperfed.runs.run import Run
from methods.itpfl.checks import (
    UNITS,
    check_descent,
    check_phase_two,
    encode,
    encoder_of,
    federation,
    inputs,
    state,
)
from toys import client_loss, close, make_task


@pytest.mark.parametrize(
    "settings", [{}, {"private": True}, {"epsilon": 0.3}, {"standardize": True}]
)
@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
def test_phase_two_is_the_one_piece_gradient_through_the_frozen_encoder(
    clients: list[int], settings: dict[str, Any]
) -> None:
    """Without noise even where novel clients add some: training is not private (section 7)."""
    check_phase_two(clients, **settings)


def test_momentum_and_weight_decay_of_the_two_phases_are_apart() -> None:
    ours = federation(settings={"momentum": 0.9})
    ours.round([0, 1], 0)
    before = state(ours)["hyper_net"]
    ours.round([0, 1], 1)
    torch.testing.assert_close(state(ours)["hyper_net"], before, rtol=0, atol=0)
    other = federation(settings={"momentum": 0.9})
    other.server.load(trees.clone(ours.server.state()))
    for each in (ours, other):  # resumed within phase 2, it goes on with the same momentum
        each.round([0, 2], 2)
    torch.testing.assert_close(state(ours), state(other), rtol=0, atol=0)


def test_phase_two_descends_with_the_momentum_and_decay_of_the_server() -> None:
    ours = federation(settings={"momentum": 0.9, "weight_decay": 0.1})
    ours.round([0, 1, 2], 0)
    config, speed = ours.config, dict[str, Tensor]()
    for number in (1, 2, 3):
        named = dict(ours.server.novel_net.named_parameters())
        made = ours.server.novel_net(encode(encoder_of(ours), inputs(ours, 1))[None])
        loss = config.local_lr * client_loss(ours.task, 1, trees.take(made, 0))
        gradients = torch.autograd.grad(loss, list(named.values()))
        expected = {}
        for (name, value), gradient in zip(named.items(), gradients, strict=True):
            speed[name] = 0.9 * speed.get(name, 0) + gradient + 0.1 * value.detach()
            expected[name] = value.detach() - config.lr * speed[name]
        ours.round([1], number)
        close(trees.detach(dict(ours.server.novel_net.named_parameters())), expected)


def test_phase_two_goes_on_from_its_own_network() -> None:
    """Its second round too is a step from where the first ended, not from phase 1."""
    ours = federation()
    for number in range(2):
        ours.round([0, 1, 2], number)

    def describe(client: int) -> Tensor:
        return encode(encoder_of(ours), inputs(ours, client))

    check_descent(ours, "novel_net", [0, 2], describe, 2)


def test_a_first_round_of_phase_two_that_all_miss_changes_nothing() -> None:
    unlucky, other = federation(), federation()
    for ours in (unlucky, other):
        ours.round([0, 1, 2], 0)
    before = state(unlucky)
    unlucky.engine.faults = Faults(drop=1.0)
    with pytest.raises(AllLostError):
        unlucky.round([0, 1], 1)
    torch.testing.assert_close(state(unlucky), before, rtol=0, atol=0)
    unlucky.engine.faults = Faults()
    for ours in (unlucky, other):
        ours.round([0, 2], 2)
    torch.testing.assert_close(state(unlucky), state(other), rtol=0, atol=0)


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_run_abandoned_in_either_phase_resumes_to_the_same_numbers(
    stop: int, tmp_path: Path
) -> None:
    short = {"phase_one_rounds": 3, "local_steps": 2, "batch_size": 4, "encoder_units": UNITS}
    keys = {"rounds": 6, "cohort": 2, "evaluate_every": 2, "checkpoint_every": 1, "method": short}
    whole = hyperfed.train("itpfl", make_task(novel=1), progress=False, **keys)
    run = Run.start(from_keys("itpfl", keys), tmp_path, make_task(novel=1))
    for progress in run.train():
        if progress.round == stop:
            run.stop()
    (folder,) = (tmp_path / "itpfl").iterdir()
    resumed = hyperfed.resume(folder, make_task(novel=1))
    found = [[vars(e) | {"seconds": 0} for e in each.evaluations] for each in (whole, resumed)]
    assert found[0] == found[1]
    assert whole.summary["novel_accuracy"] == resumed.summary["novel_accuracy"]
    torch.testing.assert_close(whole.server.state(), resumed.server.state(), rtol=0, atol=0)


def test_a_client_lost_in_phase_two_equals_one_never_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lossy, smaller = federation(), federation()
    for ours in (lossy, smaller):
        ours.round([0, 1, 2], 0)
    after_the_descriptor = {"count": 0}

    def second_is_lost(faults: Faults, seed: int, call: Call) -> bool:
        if call.client == 1:
            after_the_descriptor["count"] += 1
            return after_the_descriptor["count"] == 2
        return False

    monkeypatch.setattr(Faults, "drops", second_is_lost)
    cohort = lossy.round([0, 1, 2], 1)
    assert list(cohort.state.lost) == [1]
    smaller.round([0, 2], 1)
    torch.testing.assert_close(state(lossy), state(smaller), rtol=1e-12, atol=1e-14)


# A mutant: the check of phase 2 fails on it, so much it is worth


def test_an_encoder_that_trains_in_phase_two_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_phase_two([2], phase_one_rounds=2)

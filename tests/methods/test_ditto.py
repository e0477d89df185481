"""Ditto against PyTorch's own optimiser on the loss of algorithm 1."""

from typing import Any

import pytest
import torch

from hyperfed.methods import ditto
from hyperfed.runs.config import from_keys
from hyperfed.training import Sgd, Steps
from hyperfed.trees import Tree, count_bytes
from toys import (
    MOMENTUM,
    TORCH,
    Federation,
    Normed,
    TwoLayers,
    close,
    make_task,
    squared_distance,
    torch_sgd,
)

LAMBDA = 0.7
NETS = pytest.mark.parametrize("net", [TwoLayers, Normed])


def after_two_rounds(net: Any = TwoLayers, **settings: Any) -> Federation:
    """In the second round client 1 is absent, so that its v is far from w; client 3 is novel."""
    ours = Federation(
        "ditto", make_task(net, novel=1), **MOMENTUM | {"proximity": LAMBDA} | settings
    )
    ours.round([0, 1], 0)
    ours.round([0], 1)
    return ours


def trained(ours: Federation, client: int, v: Tree, w: Tree, steps: int = 3) -> Tree:
    """V after steps of its own, from w held constant."""

    def penalty(net: Any) -> torch.Tensor:
        return LAMBDA / 2 * squared_distance(net, w)

    return torch_sgd(ours.task, client, v, steps, penalty=penalty, **TORCH)


@NETS
def test_v_descends_the_loss_and_the_distance_to_the_received_global_model(net: Any) -> None:
    ours = after_two_rounds(net)
    w, v = ours.server.model["base"], ours.engine.memory[1]["personal"]
    assert all((v[name] - w[name]).abs().max() > 1e-3 for name in w if w[name].ndim)
    expected = trained(ours, 1, v, w)
    ours.round([0, 1], 2)
    close(ours.engine.memory[1], {"personal": expected})
    close(ours.personal(1), expected)


def test_v_starts_from_the_first_global_model_that_is_received() -> None:
    ours = after_two_rounds()
    w = ours.server.model["base"]
    torch.testing.assert_close(ours.personal(2), w, rtol=0, atol=0)  # it was never asked
    ours.round([2], 2)
    close(ours.personal(2), trained(ours, 2, w, w))


@NETS
def test_the_global_model_is_that_of_fedavg(net: Any) -> None:
    ours = after_two_rounds(net)
    fedavg = Federation("fedavg", make_task(net, novel=1), **MOMENTUM)
    fedavg.round([0, 1], 0)
    fedavg.round([0], 1)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_novel_client_trains_its_v_from_the_frozen_global_model(steps: int) -> None:
    ours = after_two_rounds(Normed, novel_steps=steps)
    w = ours.server.model["base"]
    close(ours.personal(3), trained(ours, 3, w, w, steps))
    torch.testing.assert_close(ours.server.model["base"], w, rtol=0, atol=0)
    assert 3 not in ours.engine.memory


def test_a_model_goes_down_and_a_model_comes_up_and_of_a_novel_client_nothing() -> None:
    ours = after_two_rounds(novel_steps=1)
    size = count_bytes(ours.server.model["base"])
    assert [(e.down, e.up) for e in ours.round([0, 1], 2).state.exchanges] == [(size, size)] * 2
    cohort = ours.engine.cohort([3], 9, training=False)
    ours.server.personalize(cohort)
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, 0)]


def test_the_official_preset_is_the_script_for_fashion_mnist() -> None:
    run = from_keys("ditto", ditto.PRESETS["official"])
    assert (run.rounds, run.cohort, run.settings.proximity) == (5000, 10, 1.0)
    assert run.settings.batches == Steps(2, 16)
    assert run.settings.local == Sgd(0.05)

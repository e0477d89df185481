"""FedProx against PyTorch's own optimiser on the loss of algorithm 2."""

from typing import Any

import pytest
import torch

from hyperfed.methods import fedprox
from hyperfed.runs.config import from_keys
from hyperfed.training import Epochs, Sgd
from hyperfed.trees import Tree
from toys import (
    EXAMPLES,
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

MU = 0.7


def trained(ours: Federation, client: int, w: Tree, steps: int = 3) -> Tree:
    def penalty(net: Any) -> torch.Tensor:
        return MU / 2 * squared_distance(net, w)

    return torch_sgd(ours.task, client, w, steps, penalty=penalty, **TORCH)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_a_round_descends_the_loss_and_the_distance_to_the_received_model(net: Any) -> None:
    ours = Federation("fedprox", make_task(net), **MOMENTUM, proximity=MU)
    for number, clients in enumerate(([0, 1, 2], [0, 3])):
        w = ours.server.model["base"]
        total = sum(EXAMPLES[client] for client in clients)
        each = [(EXAMPLES[client] / total, trained(ours, client, w)) for client in clients]
        ours.round(clients, number)
        for name, found in ours.server.model["base"].items():
            mean = sum(share * model[name].double() for share, model in each)
            close(found, mean.to(found.dtype))


def test_every_client_uses_the_global_model_and_a_novel_one_may_fine_tune_it() -> None:
    ours, tuned = (
        Federation("fedprox", make_task(novel=1), **MOMENTUM, proximity=MU, novel_steps=steps)
        for steps in (0, 4)
    )
    for federation in (ours, tuned):
        federation.round([0, 1])
    w = ours.server.model["base"]
    torch.testing.assert_close(tuned.personal(0), w, rtol=0, atol=0)
    torch.testing.assert_close(ours.personal(3), w, rtol=0, atol=0)
    expected = trained(tuned, 3, w, steps=4)
    close(tuned.personal(3), expected)
    assert ours.engine.memory.get(0, {}) == {}


def test_with_mu_zero_it_is_fedavg() -> None:
    ours = Federation("fedprox", make_task(Normed), **MOMENTUM, proximity=0.0)
    fedavg = Federation("fedavg", make_task(Normed), **MOMENTUM)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 2, 3], number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)


def test_the_paper_preset_is_that_of_mnist() -> None:
    run = from_keys("fedprox", fedprox.PRESETS["paper"])
    assert (run.rounds, run.cohort, run.settings.proximity) == (100, 10, 1.0)
    assert run.settings.batches == Epochs(20, 10)
    assert run.settings.local == Sgd(0.03)

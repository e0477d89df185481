"""pFedHN with several target sizes, of which a hypernetwork has a head each."""

from typing import Any

import pytest
import torch
from torch import nn

from hyperfed import trees
from hyperfed.system.randomness import seeded
from methods.pfedhn.checks import (
    SERVER,
    check_unsampled_sizes_move,
    parameters,
    sized_task,
)
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    close,
    logits,
    make_task,
)


def test_a_client_is_sent_its_sizes_part() -> None:
    federation = Federation("pfedhn", sized_task(), **ONE_STEP, **SERVER)
    cohort = federation.round([0, 1, 2, 3])
    down = {e.client: e.down for e in cohort.state.exchanges}
    small = sum(p.numel() for p in TwoLayers().parameters()) * 8
    large = sum(p.numel() for p in Normed().parameters()) * 8
    assert down == {0: small, 2: small, 1: large, 3: large}
    heads = federation.server.hyper_net.heads
    made = sum(head.out_features for head in heads.values())
    assert made * 8 == small + large  # the sum of the sizes' tensors


def test_weight_decay_moves_the_heads_of_unsampled_sizes_too() -> None:
    check_unsampled_sizes_move()


@pytest.mark.parametrize(("settings", "together"), [({}, 1), ({"cohort_reduction": "mean"}, 3)])
def test_of_several_sizes_the_update_is_the_sum_or_mean_over_all_clients(
    settings: dict[str, Any], together: int
) -> None:
    """One objective (section 5.2), however many clients a size has."""
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": nn.Linear(FEATURES, CLASSES).double()}
    federation = Federation(
        "pfedhn",
        make_task(models=models, sizes=("S", "L", "S", "L")),
        **ONE_STEP,
        **SERVER,
        **settings,
    )
    task, server, losses = federation.task, federation.server, []
    for client in (0, 1, 2):
        size, rows = task.size_of(client), task.train[client]
        made = server.hyper_net(server.embeddings.weight[client : client + 1], size)
        output = logits(models[size], trees.take(made, 0), task.x[rows])
        losses.append(nn.functional.cross_entropy(output, task.y[rows]))
    named = dict(server.hyper_net.named_parameters()) | {"v": server.embeddings.weight}
    gradients = torch.autograd.grad(sum(losses) / together, list(named.values()))
    expected = {
        name: (value - federation.config.lr * federation.config.local_lr * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }
    federation.round([0, 1, 2])
    close(parameters(server), expected)

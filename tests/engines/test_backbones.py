"""A frozen backbone is held once, in any precision, whatever stands on it."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.data import own
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.methods import METHODS
from hyperfed.nets.descriptors import LabelledTarget
from hyperfed.nets.pretrained import compute_in_own_precision
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from toys import CLASSES, EXAMPLES, FEATURES, Federation, make_task, short

WIDE = 37
"""Units of the backbone, which nothing else has."""


class OnBackbone(nn.Module):
    """A frozen layer, batch-norm too, and two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, WIDE), nn.BatchNorm1d(WIDE))
        self.backbone.requires_grad_(False)
        self.body = nn.Linear(WIDE, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(self.backbone(x))))
        return logits


def held() -> set[int]:
    """Where in memory there is a backbone."""
    gc.collect()
    tensors = (found for found in gc.get_objects() if isinstance(found, Tensor))
    return {tensor.data_ptr() for tensor in tensors if tensor.shape == (WIDE, FEATURES)}


@pytest.mark.parametrize("method", ["pefll", "itpfl", "moon", "fml", "mh_pfedhn", "fedavg"])
def test_all_clients_workers_and_networks_have_one_in_common(method: str) -> None:
    before = held()
    settings = short(method, global_model=True)  # of those that can have one
    ours = Federation(method, make_task(OnBackbone), {"workers": 2}, **settings)
    for number in range(2):
        assert ours.round([0, 1, 2, 3], number).state.lost == {}
    assert len(held() - before) == 1
    ours.server.load(trees.clone(ours.server.state()))
    assert len(held() - before) == 1


def test_a_copy_shares_what_is_frozen_and_nothing_else() -> None:
    net = OnBackbone()
    net.tied = net.backbone[0]
    made = trees.copied(net)
    pairs = list(zip(net.state_dict().items(), made.state_dict().values(), strict=True))
    same = {name for (name, one), other in pairs if one.data_ptr() == other.data_ptr()}
    assert same == {
        name for name, _ in net.state_dict().items() if "backbone" in name or "tied" in name
    }
    assert made.tied.weight is made.backbone[0].weight
    assert {name for name, p in made.named_parameters() if p.requires_grad} == set(
        trees.parameters_of(net)
    )
    torch.testing.assert_close(made.state_dict(), net.state_dict(), rtol=0, atol=0)
    made.double()
    assert net.backbone[0].weight.dtype == torch.float32
    trees.cast(made, torch.float16)
    assert made.backbone[0].weight.dtype == made.backbone[1].running_mean.dtype == torch.float64
    assert made.head.weight.dtype == torch.float16


# Half precision


def half_task(dtype: torch.dtype) -> Task:
    rows = make_task(examples=EXAMPLES)
    with seeded(3):
        net = OnBackbone()
        nn.init.uniform_(net.backbone[1].running_mean)
    net.backbone.to(dtype)
    owner = torch.arange(len(rows.x)) % 4
    return own.from_arrays(rows.x, rows.y, client=owner.tolist(), model=net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_backbone_of_half_precision_computes_in_it(dtype: torch.dtype) -> None:
    task = half_task(dtype)
    net, x = task.models["base"].eval(), task.x[:7]
    linear, norm = net.backbone
    y = (x.to(dtype) @ linear.weight.T + linear.bias - norm.running_mean) * norm.weight
    y = y / (norm.running_var + norm.eps).sqrt() + norm.bias
    expected = net.head(torch.tanh(net.body(y.float())))
    assert x.dtype == net(x).dtype == torch.float32
    torch.testing.assert_close(net(x), expected, rtol=0.03, atol=0.03)
    assert task.initial("base").keys() == {"body.weight", "body.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("method", ["pfedhn", "pefll", "itpfl", "moon", "fedper"])
def test_methods_train_on_it(method: str) -> None:
    task = half_task(torch.bfloat16)
    frozen = trees.clone(trees.frozen_of(task.models["base"]))
    ours = Federation(method, task, **short(method))
    assert ours.round([0, 1, 2]).state.lost == {}
    assert {value.dtype for value in ours.personal(0).values()} == {torch.float32}
    for net in ours.method.Client.networks(task.outline(), ours.config).values():
        kept = trees.frozen_of(net).values()
        assert {value.dtype for value in kept if value.is_floating_point()} == {torch.bfloat16}
    torch.testing.assert_close(trees.frozen_of(ours.task.models["base"]), frozen, rtol=0, atol=0)


def test_what_a_layer_of_half_precision_ends_with_is_raised() -> None:
    last = nn.Linear(6, CLASSES).to(torch.bfloat16).requires_grad_(False)
    net = compute_in_own_precision(nn.Sequential(nn.Linear(FEATURES, 6), last))
    assert net(torch.ones(4, FEATURES)).dtype == torch.float32


def test_tokens_are_whole_numbers_to_an_embedding_of_half_precision() -> None:
    with seeded(0, "tokens"):
        embedding, head = nn.Embedding(7, 4), nn.Linear(3 * 4, CLASSES)
    x = torch.tensor([[0, 6, 2], [5, 5, 1]])
    expected = head(embedding(x).flatten(1))
    embedding.to(torch.bfloat16).requires_grad_(False)
    found = compute_in_own_precision(nn.Sequential(embedding, nn.Flatten(), head))(x)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_what_describes_clients_computes_so_too() -> None:
    """Where its new layers stand behind a part of half precision."""
    parts = [nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)]
    parts[1].to(torch.bfloat16).requires_grad_(False)
    net = LabelledTarget(compute_in_own_precision(nn.Sequential(*parts)), CLASSES, 2)
    assert net(torch.ones(4, FEATURES), torch.tensor([0, 1, 2, 0])).dtype == torch.float32


def test_vmap_computes_it_as_the_loop_does() -> None:
    found: list[Any] = []
    for kind in (None, VmappedEngine):
        ours = Federation("fedavg", half_task(torch.bfloat16), **short("fedavg"))
        if kind is not None:
            ours.engine = kind(ours.task, METHODS["fedavg"].Client, ours.config, seed=0)
        ours.round([0, 1, 2])
        found.append(ours.personal(0))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)

"""The stacked hypernetworks of pFedLA against one small network at a time; layers of a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.nets import LayerWeights, LeNetBN, PFedLACNN, layers_of
from hyperfed.system.randomness import seeded

CLIENTS, LAYERS = 5, {"S": 2, "L": 3}


def make(hidden_layers: int = 1) -> LayerWeights:
    with seeded(0):
        return LayerWeights(CLIENTS, LAYERS, 4, hidden=6, hidden_layers=hidden_layers).double()


def of_one(net: LayerWeights, client: int, size: str) -> Tensor:
    """(L, n): client by client and layer by layer, from the parameters' rows."""
    state = net.state_dict()
    x = state["embeddings.weight"][client]
    for at in range(len(net.trunk)):
        x = F.relu(state[f"trunk.{at}.weight"][client] @ x + state[f"trunk.{at}.bias"][client])
    weight = state[f"heads.{size}.weight"][client].split(CLIENTS)
    bias = state[f"heads.{size}.bias"][client].split(CLIENTS)
    rows = []
    for w, b in zip(weight, bias, strict=True):
        exponentials = (w @ x + b).exp()
        rows.append(exponentials / exponentials.sum())
    return torch.stack(rows)


@pytest.mark.parametrize("hidden_layers", [0, 1, 2])
@pytest.mark.parametrize("size", ["S", "L"])
def test_the_stack_is_one_network_per_client(size: str, hidden_layers: int) -> None:
    net = make(hidden_layers)
    ids = torch.tensor([3, 0])
    weights = net(ids, size)
    assert weights.shape == (2, LAYERS[size], CLIENTS)
    expected = torch.stack([of_one(net, client, size) for client in (3, 0)])
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_a_gradient_reaches_only_the_clients_own_network() -> None:
    net = make()
    net(torch.tensor([2]), "L")[..., 0].sum().backward()
    for name, parameter in net.named_parameters():
        if "heads.S" in name:
            assert parameter.grad is None
            continue
        touched = parameter.grad.abs().flatten(1).amax(1) > 0
        assert touched.tolist() == [False, False, True, False, False], name


def test_who_is_no_member_gets_nothing_and_the_rest_its_share() -> None:
    net, ids = make(), torch.tensor([1])
    members = torch.tensor([True, True, False, True, False])
    masked, whole = net(ids, "S", members), net(ids, "S")
    kept = whole * members
    torch.testing.assert_close(masked, kept / kept.sum(-1, keepdim=True))


def test_each_network_is_initialised_as_pytorch_does() -> None:
    net = LayerWeights(200, {"base": 1}, 16, hidden=25)
    for layer, inputs in ((net.trunk[0], 16), (net.trunk[1], 25), (net.heads["base"], 25)):
        for parameter in (layer.weight, layer.bias):
            bound = inputs**-0.5
            assert 0.95 * bound < parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize(
    "numbers", [(0, LAYERS, 4, 6, 1), (5, {"S": 0}, 4, 6, 1), (5, LAYERS, 4, 6, -1)]
)
def test_numbers_out_of_range_are_refused(numbers: tuple) -> None:
    with pytest.raises(UserError, match="raise the number that is too small"):
        LayerWeights(*numbers)


@pytest.mark.parametrize("size", ["", "a.b", "half", "training"])
def test_a_size_of_a_name_that_no_part_can_have_is_refused(size: str) -> None:
    with pytest.raises(UserError, match=f"got '{size}'; rename it"):
        LayerWeights(CLIENTS, {size: 2})


# Layers of a model.


def test_a_layer_is_a_module_with_its_weight_bias_and_buffers() -> None:
    model = LeNetBN((3, 16, 16), 4)
    layers = layers_of(model)
    assert list(layers) == ["conv1", "norm1", "conv2", "norm2", "fc1", "fc2", "fc3"]
    assert layers["conv1"] == ("conv1.weight", "conv1.bias")
    statistics = ("norm1.running_mean", "norm1.running_var", "norm1.num_batches_tracked")
    assert layers["norm1"] == ("norm1.weight", "norm1.bias", *statistics)
    entries = [name for names in layers.values() for name in names]
    assert sorted(entries) == sorted(trees.model_of(model))


def test_statistics_without_a_scale_belong_to_the_layer_before() -> None:
    layers = layers_of(PFedLACNN((3, 16, 16), 4))
    assert list(layers) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    statistics = ("norm2.running_mean", "norm2.running_var", "norm2.num_batches_tracked")
    assert layers["conv2"] == ("conv2.weight", "conv2.bias", *statistics)


def test_every_entry_of_an_unusual_model_is_in_one_layer() -> None:
    class Unusual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))
            self.first = nn.Linear(3, 3)
            self.norm = nn.BatchNorm1d(3, affine=False)
            self.last = nn.Linear(3, 3, bias=False)
            self.last.weight = self.first.weight
            self.rest = nn.Linear(3, 1)

    model = Unusual()
    statistics = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert layers_of(model) == {
        "first": ("centre", "first.weight", "first.bias", *statistics),
        "rest": ("rest.weight", "rest.bias"),
    }
    entries = [name for names in layers_of(model).values() for name in names]
    assert sorted(entries) == sorted(trees.model_of(model))


def test_parameters_of_the_model_itself_are_a_layer_without_a_name() -> None:
    assert layers_of(nn.Linear(2, 1)) == {"": ("weight", "bias")}


def test_a_model_without_parameters_has_no_layers() -> None:
    with pytest.raises(UserError, match="must have parameters to train to divide into layers"):
        layers_of(nn.ReLU())

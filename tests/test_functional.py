"""Networks that run with the weights of a tree, against those that hold these weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hyperfed import functional, trees
from hyperfed.system.randomness import generator, seeded
from toys import CLASSES, FEATURES, Assigning


class Tied(nn.Module):
    """One matrix in two places, a buffer, and a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(self.norm(self.first(x)))


def tied(name: str = "ours") -> Tied:
    with seeded(0, name):
        return Tied().double()


def test_a_network_runs_with_the_weights_of_a_tree_wherever_it_keeps_them() -> None:
    ours, other = tied(), tied("other")
    model = {name: value + 1.5 for name, value in trees.model_of(other).items()}
    assert "second.weight" not in model
    for name, parameter in other.named_parameters():
        parameter.data = model[name]
    other.norm.load_state_dict(
        {key: model[f"norm.{key}"].clone() for key in other.norm.state_dict()}
    )
    x = torch.randn(8, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    before = trees.model_of(ours)
    for train in (True, False):  # with the statistics of the batch, then with those updated
        output = functional.apply(ours, model, x, train=train)
        torch.testing.assert_close(output, other.train(train)(x))
        torch.testing.assert_close(model["norm.running_mean"], other.norm.running_mean)
    torch.testing.assert_close(trees.model_of(ours), before, rtol=0, atol=0)


@pytest.mark.parametrize("copied", [lambda net: net, copy.deepcopy, trees.copied])
def test_parts_that_come_in_another_mode_train_as_if_they_had_come_in_this(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    """Such as a pretrained body; what of it is frozen stays in evaluation, however it came."""
    still = nn.BatchNorm1d(FEATURES).requires_grad_(False)
    body = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.5)).eval()
    whole = copied(nn.Sequential(still, body).double())
    model = trees.model_of(whole)
    x = 3 + torch.randn(8, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    with seeded(0, "dropout"):
        first, buffers = functional.forward(whole, model, x)
    before = still.eval()(x)
    with seeded(0, "dropout"):
        torch.testing.assert_close(first, copy.deepcopy(body).train()(before))
    torch.testing.assert_close(buffers["1.0.running_mean"], 0.1 * before.mean(dim=0))
    functional.apply(whole, model, x)
    with seeded(0, "dropout"):
        again, _ = functional.forward(whole, model, x)
    assert torch.equal(first, again)  # whether there was an evaluation or not


def test_what_has_one_value_for_each_channel_is_normalised_as_in_evaluation() -> None:
    """And a single example that has more of them by itself."""
    net = nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(8)).double()
    source = generator(0, "x")
    x = torch.randn(1, 2, 2, 2, dtype=torch.float64, generator=source)
    model = trees.model_of(net) | {
        f"{norm}.running_{name}": torch.rand(size, dtype=torch.float64, generator=source)
        for norm, size in (("0", 2), ("2", 8))
        for name in ("mean", "var")
    }
    output, buffers = functional.forward(net, model, x)
    own = {name: value for name, value in buffers.items() if name.startswith("2.")}
    assert trees.structure(own) == trees.structure({name: model[name] for name in own})
    assert all(torch.equal(value, model[name]) for name, value in own.items())
    mean = x.mean(dim=(0, 2, 3))
    torch.testing.assert_close(
        buffers["0.running_mean"], 0.9 * model["0.running_mean"] + 0.1 * mean
    )
    assert buffers["0.num_batches_tracked"] == 1
    seen = (x - mean[:, None, None]) / (x.var(dim=(0, 2, 3), correction=0) + 1e-5).sqrt()[
        :, None, None
    ]
    expected = (seen.flatten(1) - model["2.running_mean"]) / (model["2.running_var"] + 1e-5).sqrt()
    torch.testing.assert_close(output, expected)
    again, _ = functional.forward(net, model, torch.cat([x, 2 * x]))  # as ever, with two
    torch.testing.assert_close(again.mean(dim=0), torch.zeros(8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("tail", "masked"),
    [
        (nn.Linear(4, 2), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Unflatten(1, (3, 2))), False),
        (nn.Conv1d(3, 2, 1), False),
    ],
    ids=["of each token", "of all together", "of a convolution"],
)
def test_features_of_tokens_that_count_nothing_are_zero(tail: nn.Module, masked: bool) -> None:
    """Where the last layer takes those of each token; else nobody knows which are whose."""
    net = nn.Sequential(nn.Embedding(5, 4), tail).double()
    x, y = torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, -100, 1], [-100, 1, -100]])
    _, found = functional.outputs_and_features(net, trees.model_of(net), x, y)
    seen = net[0](x)
    expected = seen * (y >= 0)[..., None] if masked else seen
    assert torch.equal(found, expected.flatten(1))
    _, plain = functional.outputs_and_features(net, trees.model_of(net), x)
    assert torch.equal(plain, seen.flatten(1))


@pytest.mark.parametrize("made", [weight_norm, spectral_norm])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_whose_weight_is_made_from_another_is_the_last(
    made: Callable[[nn.Module], nn.Module], bias: bool
) -> None:
    net = nn.Sequential(made(nn.Linear(FEATURES, 4)), made(nn.Linear(4, 2, bias=bias))).double()
    x = torch.randn(6, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    output, found = functional.outputs_and_features(net, trees.model_of(net), x)
    torch.testing.assert_close(found, net.eval()[0](x))
    torch.testing.assert_close(output, net(x))


def test_a_network_ends_in_a_layer_that_gives_its_output_and_runs_once() -> None:
    layer, other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    cases = [
        (layer, True),
        (nn.Sequential(other, nn.Dropout(), layer), True),
        (nn.Sequential(layer, nn.ReLU()), False),
        (nn.Sequential(layer, nn.Identity()), True),
        (nn.Sequential(layer, nn.ReLU(), layer), False),
        (nn.Sequential(layer, other), False),
    ]
    for net, ends in cases:
        assert functional.ends_in(net, layer, trees.model_of(net), torch.ones(2, FEATURES)) == ends
        assert not {**layer._forward_hooks, **net._forward_hooks}  # nothing is left behind


def test_buffers_that_a_network_assigns_to_are_kept_in_training_alone() -> None:
    net = Assigning().double()
    model = trees.model_of(net)
    before = trees.clone(model)
    x = torch.randn(8, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    output, buffers = functional.forward(net, model, x)
    same, features, again = functional.forward_with_features(net, model, x)
    assert buffers.keys() == again.keys() == {"mean", "passes", "mask"}
    for found in (buffers, again):
        torch.testing.assert_close(found["mean"], 0.1 * torch.tanh(net.body(x)).mean(0))
        assert found["passes"] == 1
        assert len(found["mask"]) == 1
    assert output.shape == same.shape == (8, CLASSES)
    assert features.shape == (8, 4)
    functional.apply(net, model, x)
    torch.testing.assert_close(model, before, rtol=0, atol=0)
    torch.testing.assert_close(trees.model_of(net), before, rtol=0, atol=0)


def test_statistics_forget_what_was_no_number() -> None:
    net = nn.BatchNorm1d(FEATURES).double()
    model = trees.tree_map(lambda value: value * torch.inf, trees.model_of(net))
    x = torch.randn(5, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    found = functional.batch_statistics(net, model, [x])
    torch.testing.assert_close(found["running_mean"], x.mean(dim=0))
    torch.testing.assert_close(found["running_var"], x.var(dim=0))


def test_statistics_of_one_value_for_each_channel_are_the_models_own() -> None:
    net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 2)).double()
    model = trees.tree_map(lambda value: value + 3, trees.model_of(net))
    x = torch.randn(3, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    found = functional.batch_statistics(net, model, [x[:1]])
    assert torch.equal(found["0.running_mean"], model["0.running_mean"])
    assert torch.equal(found["0.running_var"], model["0.running_var"])
    found = functional.batch_statistics(net, model, [x[:1], x])
    torch.testing.assert_close(found["0.running_mean"], x.mean(dim=0))
    torch.testing.assert_close(found["0.running_var"], x.var(dim=0))


def test_a_network_has_its_own_weights_again_after_an_error() -> None:
    ours = tied()
    before = trees.model_of(ours)
    model = trees.tree_map(torch.zeros_like, before)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional.apply(ours, model, torch.zeros(2, FEATURES + 1, dtype=torch.float64))
    del model["second.bias"]
    with pytest.raises(KeyError, match=r"second\.bias"):
        functional.apply(ours, model, torch.zeros(2, FEATURES, dtype=torch.float64))
    torch.testing.assert_close(trees.model_of(ours), before, rtol=0, atol=0)

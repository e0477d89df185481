"""The deep-set encoder against matrix products written out here, in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hyperfed.errors import UserError
from hyperfed.functional import apply
from hyperfed.nets.deepsets import DeepSet
from hyperfed.nets.targets import ITPFLMLP, MLP, TARGETS, CharLSTM, LeNet, build_target
from hyperfed.privacy import sensitivity
from hyperfed.trees import model_of
from toys import Normed, TwoLayers

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_mean_of_one_half_and_maximum_of_the_other() -> None:
    torch.manual_seed(0)
    encoder, x = DeepSet(MLP((5,), 3, (7, 4)).double(), 2, units=6), draw(9, 5)
    w = dict(encoder.named_parameters())
    h = F.relu(x @ w["features.0.layers.0.weight"].T + w["features.0.layers.0.bias"])
    pooled = torch.cat([h[:, :3].sum(0) / 9, h[:, 3:].sort(dim=0).values[-1]])
    # The widths after pooling are the target's: 7, 4, then l in the place of 3 classes.
    inner = F.relu(pooled @ w["layers.0.weight"].T + w["layers.0.bias"])
    inner = F.relu(inner @ w["layers.2.weight"].T + w["layers.2.bias"])
    expected = inner @ w["layers.4.weight"].T + w["layers.4.bias"]
    torch.testing.assert_close(encoder(x), expected, **CLOSE)
    assert [len(w["layers.0.bias"]), len(w["layers.2.bias"]), len(expected)] == [7, 4, 2]


def test_on_lenet_it_is_the_papers() -> None:
    """Two convolutions, Linear(200), pooling, Linear(120), Linear(84), Linear(l)."""
    target = LeNet((3, 32, 32), 10)
    encoder = DeepSet(target, 25)
    shapes = [tuple(p.shape) for p in encoder.parameters() if p.ndim > 1]
    assert shapes == [(16, 3, 5, 5), (32, 16, 5, 5), (200, 800), (120, 200), (84, 120), (25, 84)]
    x = torch.rand(4, 3, 32, 32)
    trunk = encoder.features[0]
    images = F.max_pool2d(F.relu(trunk.conv1(x)), 2)
    images = F.max_pool2d(F.relu(trunk.conv2(images)), 2).flatten(1)
    h = F.relu(images @ trunk.fc1.weight.T + trunk.fc1.bias)
    pooled = torch.cat([h[:, :100].mean(0), h[:, 100:].max(0).values])
    torch.testing.assert_close(encoder(x), encoder.layers(pooled))


def test_on_features_it_is_the_papers_and_drops_nothing() -> None:
    """Linear(500), pooling of 250 and 250, twice Linear(500), Linear(l); the target's dropout."""
    torch.manual_seed(0)
    encoder = DeepSet(ITPFLMLP((16,), 7).double(), 9, units=500)
    shapes = [tuple(p.shape) for p in encoder.parameters() if p.ndim > 1]
    assert shapes == [(500, 16), (500, 500), (500, 500), (9, 500)]
    x, first = draw(6, 16), encoder.features[0].dense1
    h = F.relu(x @ first.weight.T + first.bias)
    pooled = torch.cat([h[:, :250].mean(0), h[:, 250:].amax(0)])
    torch.testing.assert_close(encoder.train()(x), encoder.layers(pooled), **CLOSE)


def test_sets_that_differ_get_descriptors_that_differ_before_any_training() -> None:
    """As they must to be told apart: from PyTorch's own start they differ by a fifth of that."""
    torch.manual_seed(0)
    encoder = DeepSet(LeNet((3, 32, 32), 10), 25)
    sets = torch.stack([torch.randn(32, 3, 32, 32) + shift for shift in torch.randn(8, 3, 1, 1)])
    with torch.no_grad():
        descriptors = torch.stack([encoder(x) for x in sets])
    assert descriptors.std(dim=0).norm() > 0.25 * descriptors.norm(dim=1).mean()


def test_the_order_of_a_set_does_not_matter_and_the_target_is_left_alone() -> None:
    target = TwoLayers().double()
    before, x = model_of(target), draw(8, 5)
    for bounded in (False, True):
        encoder = DeepSet(target, 3, units=4, bounded=bounded)
        torch.testing.assert_close(encoder(x), encoder(x.flip(0)), **CLOSE)
        encoder(x).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_bounded_is_the_mean_of_points_on_the_unit_sphere() -> None:
    encoder = DeepSet(TwoLayers().double(), 3, units=4, bounded=True)
    x = 10 * draw(8, 5)
    alone = torch.stack([encoder(row[None]) for row in x])
    torch.testing.assert_close(alone.norm(dim=1), torch.ones(8, dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(encoder(x), alone.mean(0), **CLOSE)


@pytest.mark.parametrize("samples", [1, 5, 40])
def test_replacing_a_sample_moves_a_bounded_descriptor_by_at_most_its_sensitivity(
    samples: int,
) -> None:
    """And an adversary comes close to that: the bound is no larger than it must be."""
    torch.manual_seed(1)
    linear = nn.Linear(5, 2, bias=False).double()
    encoder, x = DeepSet(linear, 3, units=4, bounded=True), draw(samples, 5)
    bound = sensitivity(bound=1, lipschitz=1, samples=samples)
    moved = []
    for seed in range(50):
        extreme = 1e6 * draw(5, seed=seed)
        both = []
        for sign in (1, -1):
            changed = x.clone()
            changed[samples // 2] = sign * extreme
            both.append(encoder(changed))
        moved.append(float((both[0] - both[1]).norm().detach()))
        assert moved[-1] <= bound * (1 + 1e-12)
    assert max(moved) > 0.99 * bound


def test_a_maximum_has_no_such_sensitivity() -> None:
    """Even with features between -1 and 1, one of 400 samples moves it by far more than 2 / 400."""
    torch.manual_seed(0)
    encoder, x = DeepSet(TwoLayers().double(), 3, units=40), 0.01 * draw(400, 5)
    changed = x.clone()
    changed[0] = 1e3
    assert (encoder(changed) - encoder(x)).norm() > 10 * sensitivity(1, 1, 400)


def test_of_what_it_keeps_of_a_target_only_trained_weights_of_convolutions_are_drawn() -> None:
    """A frozen one is in the target's own memory, also where its bias is trained."""
    torch.manual_seed(0)
    frozen, made, trained = nn.Conv1d(1, 4, 3), weight_norm(nn.Conv1d(4, 4, 3)), nn.Conv1d(4, 4, 3)
    frozen.weight.requires_grad_(False)
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    target = nn.Sequential(frozen, made, trained, norm, nn.Flatten(), nn.Linear(12, 3)).double()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    kept = DeepSet(target, 3, units=4).features[0].state_dict()
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert name.startswith("5.") or torch.equal(value, kept[name]) == (name != "2.weight"), name


@pytest.mark.parametrize("name", ["lenet", "omniglot_net", "mlp", "lenet_bn", "pfedkt_cnn"])
@pytest.mark.parametrize("bounded", [False, True])
def test_it_encodes_for_every_target(name: str, bounded: bool) -> None:
    assert name in TARGETS
    target = build_target(name, input_shape=(1, 28, 28), classes=10)
    encoder = DeepSet(target, 4, units=6, bounded=bounded)
    x = torch.rand(3, 1, 28, 28)
    assert apply(encoder, model_of(encoder), x).shape == (4,)


@pytest.mark.parametrize("target", [Normed(), nn.Linear(5, 3), MLP((5,), 3, ())])
def test_other_targets(target: nn.Module) -> None:
    assert DeepSet(target.double(), 4, units=6)(draw(3, 5)).shape == (4,)


class Scaled(nn.Module):
    """Has a parameter of its own beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(self.scale * x)
        return output


@pytest.mark.parametrize("first", [nn.Linear(5, 6), weight_norm(nn.Linear(5, 6))])
def test_parts_behind_the_first_linear_layer_are_left_out_with_all_that_is_in_them(
    first: nn.Module,
) -> None:
    target = nn.Sequential(first, nn.ReLU(), *(Scaled() for _ in range(12)))
    encoder = DeepSet(target.double(), 4, units=8)
    left = [tuple(parameter.shape) for parameter in encoder.features.parameters()]
    assert left == [(8, 5), (8,)]
    assert encoder(draw(3, 5)).shape == (4,)


class Dropping(nn.Module):
    """Drops in its trunk whatever can be dropped, also by one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.again = self.dropout
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.dropout(x))
        hidden, _ = self.attention(hidden, hidden, hidden)
        output: Tensor = self.head(self.again(hidden.mean(dim=1)))
        return output


def test_it_drops_nothing_for_a_descriptor_is_told_and_then_differentiated() -> None:
    target = Dropping().double()
    encoder, x = DeepSet(target, 3, units=4), draw(6, 5, 4)
    torch.testing.assert_close(encoder.train()(x), encoder.eval()(x), **CLOSE)
    assert (target.dropout.p, target.lstm.dropout, target.attention.dropout) == (0.5,) * 3


def test_texts() -> None:
    encoder = DeepSet(CharLSTM(30, 4, 8, 1), 4, units=6)
    assert encoder(torch.randint(30, (3, 7))).shape == (4,)


def normed(norm: nn.Module, *, frozen: bool = False) -> nn.Sequential:
    """With a normalisation before the first linear layer and another one after it."""
    stem = nn.Sequential(nn.Conv1d(1, 4, 3), norm).requires_grad_(not frozen)
    tail = nn.BatchNorm1d(6, track_running_stats=False)
    return nn.Sequential(stem, nn.Flatten(), nn.Linear(12, 6), tail, nn.Linear(6, 3)).double()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_bounded_one_has_no_layer_that_mixes_samples_in_evaluation(frozen: bool) -> None:
    mixing = normed(nn.BatchNorm1d(4, track_running_stats=False), frozen=frozen)
    with pytest.raises(UserError, match=r"by itself, but the target's batch-norm 0\.1 keeps no"):
        DeepSet(mixing, 3, units=4, bounded=True)
    assert DeepSet(mixing, 3, units=4).eval()(draw(6, 1, 5)).shape == (3,)
    for norm in (nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.GroupNorm(2, 4)):
        encoder = DeepSet(normed(norm, frozen=frozen), 3, units=4, bounded=True).eval()
        x = draw(6, 1, 5)
        alone = torch.stack([encoder(row[None]) for row in x])
        torch.testing.assert_close(encoder(x), alone.mean(0), **CLOSE)


def test_what_is_behind_the_layer_of_another_width_is_not_frozen() -> None:
    target = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    target[2].requires_grad_(False)
    with pytest.raises(
        UserError, match=r"a deep set gives 0 of .* than 4, which 2 behind it could"
    ):
        DeepSet(target, 4)
    target.requires_grad_(True)[0].requires_grad_(False)
    assert DeepSet(target, 4, units=6).features(torch.zeros(2, 5)).shape == (2, 6)


def test_errors() -> None:
    with pytest.raises(UserError, match=r"a linear layer, got a Conv2d without one; choose"):
        DeepSet(nn.Conv2d(1, 1, 3), 4)
    for size, units in ((0, 4), (3, 5), (3, 0)):
        with pytest.raises(UserError, match=f"even number of units, got {size} and {units}"):
            DeepSet(TwoLayers(), size, units)

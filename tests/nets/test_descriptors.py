"""Descriptor networks against sums written out by hand, in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.nets import MLP, CharLSTM, LeNet, LeNetBN, OmniglotNet
from hyperfed.nets.descriptors import LabelledTarget, LabelMap, Standard
from hyperfed.system.randomness import generator, seeded

CLASSES, LENGTH = 3, 4
LABELS = torch.tensor([0, 2, 2, 1, 0])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(0, "draw"), dtype=torch.float64)


def copy_of(target: nn.Module) -> LabelledTarget:
    with seeded(0, "copy"):
        return LabelledTarget(target, CLASSES, LENGTH).double()


def test_a_convolution_sees_the_label_as_constant_channels() -> None:
    net = copy_of(LeNet((2, 16, 16), 10, width=2))
    x = draw(len(LABELS), 2, 16, 16)
    ours = net(x, LABELS)
    assert ours.shape == (len(LABELS), LENGTH)
    weight = net.net.conv1.weight
    assert weight.shape == (2, 2 + CLASSES, 5, 5)
    # Without padding a constant channel adds the sum of its kernel to every pixel.
    by_label = weight[:, 2:].sum((2, 3))[:, LABELS].T + net.net.conv1.bias
    x = F.conv2d(x, weight[:, :2]) + by_label[:, :, None, None]
    x = F.max_pool2d(x.relu(), 2)
    x = F.max_pool2d(F.conv2d(x, net.net.conv2.weight, net.net.conv2.bias).relu(), 2).flatten(1)
    for layer in (net.net.fc1, net.net.fc2):
        x = (x @ layer.weight.T + layer.bias).relu()
    expected = x @ net.net.fc3.weight.T + net.net.fc3.bias
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_a_linear_layer_sees_the_label_behind_the_flattened_example() -> None:
    net = copy_of(MLP((2, 3), 10, hidden=(5,)))
    x = draw(len(LABELS), 2, 3)
    first, last = net.net.layers
    assert first.weight.shape == (5, 6 + CLASSES)
    hidden = x.flatten(1) @ first.weight[:, :6].T + first.weight[:, 6 + LABELS].T + first.bias
    expected = hidden.relu() @ last.weight.T + last.bias
    torch.testing.assert_close(net(x, LABELS), expected, rtol=1e-10, atol=1e-12)


def test_the_layers_between_keep_the_targets_weights_and_the_target_its_own() -> None:
    target = LeNet((1, 16, 16), 10, width=2)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    net = LabelledTarget(target, CLASSES, LENGTH)
    torch.testing.assert_close(target.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(net.net.fc1.weight, target.fc1.weight)
    assert net.net.fc1.weight.data_ptr() != target.fc1.weight.data_ptr()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(6, 2, bias=False), (6,)),
        (lambda: OmniglotNet((1, 28, 28), 55, width=2), (1, 28, 28)),
        (lambda: LeNetBN((3, 16, 16), 10), (3, 16, 16)),
    ],
    ids=["one layer", "padded convolutions", "batch-norm"],
)
def test_an_embedding_depends_on_its_own_example_only(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    net = copy_of(build()).train()
    x = draw(len(LABELS), *shape)
    alone = torch.cat([net(x[i : i + 1], LABELS[i : i + 1]) for i in range(len(LABELS))])
    assert alone.shape == (len(LABELS), LENGTH)
    torch.testing.assert_close(net(x, LABELS), alone, rtol=1e-10, atol=1e-12)
    assert list(net.buffers()) == []


def test_a_label_map_is_linear_in_the_one_hot_label_and_blind_to_the_example() -> None:
    net = LabelMap(CLASSES, LENGTH).double()
    one_hot = torch.eye(CLASSES, dtype=torch.float64)[LABELS]
    torch.testing.assert_close(net(draw(5, 2), LABELS), net.linear(one_hot))
    assert torch.equal(net(draw(5, 2), LABELS), net(draw(5, 2) * torch.nan, LABELS))


def test_a_text_target_cannot_be_copied() -> None:
    with pytest.raises(UserError, match=r"begins with Embedding.*descriptor_net = \"linear\""):
        LabelledTarget(CharLSTM(CLASSES), CLASSES, LENGTH)


@pytest.mark.parametrize(
    "build", [lambda: LabelledTarget(nn.Linear(2, 1), 0, LENGTH), lambda: LabelMap(0, LENGTH)]
)
def test_without_classes_there_is_nothing_to_encode(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(UserError, match="must have classes, got 0"):
        build()


def test_a_standard_is_fitted_once_to_the_first_descriptor() -> None:
    standard, descriptors = Standard().double(), draw(3, LENGTH)
    fitted = standard.fitted(descriptors)
    first = descriptors[0]
    deviation = ((first - first.mean()).square().sum() / (LENGTH - 1)).sqrt()
    torch.testing.assert_close(fitted(descriptors), (descriptors - first.mean()) / deviation)
    assert fitted.fitted(descriptors[1:]) is fitted
    assert standard.deviation == 0  # fitting makes a copy: a round may still come to nothing
    assert set(fitted.state_dict()) == {"mean", "deviation"}


def test_a_standard_that_never_fits_changes_nothing() -> None:
    standard, descriptors = Standard(fit=False).double(), draw(3, LENGTH)
    assert torch.equal(standard.fitted(descriptors)(descriptors), descriptors)

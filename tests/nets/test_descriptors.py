"""Descriptor networks against sums written out by hand, in float64."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hyperfed.errors import UserError
from hyperfed.nets import MLP, LeNet, LeNetBN, OmniglotNet, descriptors
from hyperfed.nets.descriptors import LabelledTarget, LabelMap, Standard
from hyperfed.system.randomness import generator, seeded
from toys import Federation, make_task_of_two_labels

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


def test_nothing_that_a_target_computes_behind_its_last_layer_is_in_an_embedding() -> None:
    """That is no layer, so that no copy could leave it out."""

    class Saying(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(dim=-1)

    nets = [copy_of(kind((2, 3), 10, hidden=(5,))) for kind in (MLP, Saying)]
    x = draw(len(LABELS), 2, 3)
    torch.testing.assert_close(nets[1](x, LABELS), nets[0](x, LABELS), rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("kind", "convolve", "shape"),
    [(nn.Conv1d, F.conv1d, (2, 9)), (nn.Conv3d, F.conv3d, (2, 5, 6, 7))],
    ids=["Conv1d", "Conv3d"],
)
@pytest.mark.parametrize(("padding", "mode"), [(0, "zeros"), (2, "zeros"), (2, "circular")])
def test_a_convolution_of_any_dimension_sees_the_label_as_constant_channels(
    kind: Callable[..., nn.Module],
    convolve: Callable[..., Tensor],
    shape: tuple[int, ...],
    padding: int,
    mode: str,
) -> None:
    options, around = {"stride": 2, "dilation": 2}, {"padding": padding, "padding_mode": mode}
    first = kind(2, 3, kernel_size=3, bias=False, **options, **around)
    target = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.LazyLinear(7))
    target(torch.zeros(1, *shape))
    net = copy_of(target)
    x = draw(len(LABELS), *shape)
    label = F.one_hot(LABELS, CLASSES).double()
    channels = torch.stack([row[:, None].expand(-1, x[0, 0].numel()) for row in label])
    seen = torch.cat([x, channels.reshape(len(x), CLASSES, *shape[1:])], dim=1)
    how = "constant" if mode == "zeros" else mode
    seen = F.pad(seen, [padding, padding] * len(shape[1:]), mode=how)
    hidden = convolve(seen, net.net[0].weight, **options).relu().flatten(1)
    expected = hidden @ net.net[3].weight.T + net.net[3].bias
    torch.testing.assert_close(net(x, LABELS), expected, rtol=1e-10, atol=1e-12)


def test_a_linear_layer_along_a_sequence_sees_the_label_at_every_place() -> None:
    net = copy_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5)))
    x = draw(len(LABELS), 4, 2)
    first, last = net.net[0], net.net[3]
    places = [
        x[:, t] @ first.weight[:, :2].T + first.weight[:, 2 + LABELS].T + first.bias
        for t in range(4)
    ]
    expected = torch.cat(places, dim=1).relu() @ last.weight.T + last.bias
    torch.testing.assert_close(net(x, LABELS), expected, rtol=1e-10, atol=1e-12)


def test_an_embedding_of_the_label_is_added_to_that_of_each_token() -> None:
    net = copy_of(nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 5)))
    tokens = torch.tensor([[1, 2, 0, 5]] * len(LABELS))
    first, last = net.net[0], net.net[2]
    assert not first.weight[0].any()  # padding
    places = [first.weight[tokens[:, t]] + first.of_label[LABELS] for t in range(4)]
    expected = torch.cat(places, dim=1) @ last.weight.T + last.bias
    assert last.weight.shape == (LENGTH, 12)
    torch.testing.assert_close(net(tokens, LABELS), expected, rtol=1e-10, atol=1e-12)


def test_an_embedding_of_labelled_tokens_is_the_mean_over_them() -> None:
    net = copy_of(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 5)))
    tokens, labels = torch.tensor([[1, 2, 5], [0, 5, 4]]), torch.tensor([[0, 2, 1], [1, 1, 0]])
    first, last = net.net
    each = (first.weight[tokens] + first.of_label[labels]) @ last.weight.T + last.bias
    expected = (each[:, 0] + each[:, 1] + each[:, 2]) / 3
    torch.testing.assert_close(net(tokens, labels), expected, rtol=1e-10, atol=1e-12)


class Recurrent(nn.Module):
    """Begins with a layer into which no label can be built."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classify = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classify(self.body(x)[0][:, -1])
        return output


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (Recurrent(), (3, 2)),
        (nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 5)), (2, 3)),
    ],
    ids=["recurrent", "grouped convolution"],
)
def test_any_other_target_sees_the_label_at_its_last_layer(
    target: nn.Module, shape: tuple[int, ...]
) -> None:
    net, body = copy_of(target), copy.deepcopy(target).double()
    x = draw(len(LABELS), *shape)
    taken: list[Tensor] = []
    last = [part for part in body.modules() if isinstance(part, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    body(x)
    head = [part for part in net.modules() if hasattr(part, "hidden")][-1]
    label = F.one_hot(LABELS, CLASSES).double()
    seen = torch.cat([taken[0], label], dim=1)
    hidden = (seen @ head.hidden.weight.T + head.hidden.bias).relu()
    expected = hidden @ head.out.weight.T + head.out.bias
    assert expected.shape == (len(LABELS), LENGTH)
    torch.testing.assert_close(net(x, LABELS), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("target", [(), (3,)])
def test_a_target_of_regression_is_seen_as_it_is(target: tuple[int, ...]) -> None:
    size = math.prod(target)
    with seeded(0, "copy"):
        like = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, size))
        net = LabelledTarget(like, 0, LENGTH, size)
        label_map = LabelMap(0, LENGTH, size).double()
    net, x, y = net.double(), draw(5, 2), draw(5, *target)
    first, last, seen = net.net[0], net.net[2], y.view(5, size)
    hidden = (torch.cat([x, seen], dim=1) @ first.weight.T + first.bias).relu()
    torch.testing.assert_close(net(x, y), hidden @ last.weight.T + last.bias)
    expected = seen @ label_map.linear.weight.T + label_map.linear.bias
    torch.testing.assert_close(label_map(x, y), expected)


def test_a_layer_whose_weight_is_made_from_another_is_the_first_or_the_last() -> None:
    """Also without a bias, where it has no parameter of its own."""
    layers = [weight_norm(nn.Linear(*shape, bias=False)) for shape in ((6, 5), (5, 2))]
    net = copy_of(nn.Sequential(layers[0], nn.ReLU(), layers[1]))
    x, first, last = draw(len(LABELS), 6), net.net[0], net.net[2]
    hidden = x @ first.weight[:, :6].T + first.weight[:, 6 + LABELS].T
    expected = hidden.relu() @ last.weight.T + last.bias
    torch.testing.assert_close(net(x, LABELS), expected, rtol=1e-10, atol=1e-12)


def test_a_target_without_a_linear_layer_cannot_be_copied() -> None:
    with pytest.raises(UserError, match=r"ends with a linear layer.*descriptor_net = \"linear\""):
        LabelledTarget(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()), CLASSES, LENGTH)


@pytest.mark.parametrize("last", [nn.Linear(5, 2), nn.BatchNorm1d(5)])
def test_what_is_behind_the_last_layer_is_not_frozen(last: nn.Module) -> None:
    target = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.ReLU(), last.requires_grad_(False)))
    with pytest.raises(UserError, match=r"descriptor network gives 0 .* than 5, which 1\.1 behind"):
        LabelledTarget(target, CLASSES, LENGTH)
    target.requires_grad_(True)[0].requires_grad_(False)
    if isinstance(last, nn.Linear):
        assert LabelledTarget(target, CLASSES, LENGTH)(torch.zeros(4, 6), LABELS[:4]).shape == (
            4,
            LENGTH,
        )


def test_a_standard_is_fitted_once_to_the_first_descriptor() -> None:
    standard, descriptors = Standard().double(), draw(3, LENGTH)
    fitted = standard.fitted(descriptors)
    first = descriptors[0]
    deviation = ((first - first.mean()).square().sum() / (LENGTH - 1)).sqrt()
    torch.testing.assert_close(fitted(descriptors), (descriptors - first.mean()) / deviation)
    assert fitted.fitted(descriptors[1:]) is fitted
    assert standard.deviation == 0  # fitting makes a copy: a round may still come to nothing
    assert set(fitted.state_dict()) == {"mean", "deviation"}


@pytest.mark.parametrize("lie", [0.0, 1e-30, 0.03, 30.0])
def test_a_standard_is_not_fitted_to_who_is_far_from_all_others(lie: float) -> None:
    descriptors = draw(4, LENGTH)
    fitted = Standard().double().fitted(torch.cat([lie * descriptors[:1], descriptors[1:]]))
    honest = Standard().double().fitted(descriptors[1:])
    assert torch.equal(fitted(descriptors), honest(descriptors))


def test_where_most_say_nothing_a_standard_changes_nothing() -> None:
    descriptors = torch.zeros(3, LENGTH, dtype=torch.float64)
    fitted = Standard().double().fitted(descriptors)
    assert torch.equal(fitted(descriptors + 2), descriptors + 2)


def test_a_standard_that_never_fits_changes_nothing() -> None:
    standard, descriptors = Standard(fit=False).double(), draw(3, LENGTH)
    assert torch.equal(standard.fitted(descriptors)(descriptors), descriptors)


def test_labels_of_tokens_are_told_as_their_shares_without_what_is_ignored():
    y = torch.tensor([[0, 2, -100], [1, 1, -100], [-100, -100, -100]])
    shares = torch.tensor([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]])
    assert torch.equal(descriptors.encoded(y, 3, torch.float32), shares)
    net = LabelMap(3, 4)
    torch.testing.assert_close(net(y, y), shares @ net.linear.weight.T + net.linear.bias)


def test_of_labels_side_by_side_each_is_told():
    y = torch.tensor([[0, 2], [2, 0], [1, -1]])
    told = torch.tensor([[1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]).float()
    assert torch.equal(descriptors.encoded(y, 3, torch.float32, 2), told)
    net = LabelMap(3, 4, 2)
    torch.testing.assert_close(net(y, y), told @ net.linear.weight.T + net.linear.bias)
    seeing = LabelledTarget(MLP((5,), 2), 3, LENGTH, 2)
    first, second, _ = seeing(torch.ones(3, 5), y)
    assert not torch.allclose(first, second)
    assert seeing.net.layers[0].in_features == 5 + 6


@pytest.mark.parametrize("of", ["target", "linear"])
def test_clients_whose_labels_are_swapped_are_described_otherwise(of: str) -> None:
    task = make_task_of_two_labels(examples=(9, 9))
    task.x[task.train[1]] = task.x[task.train[0]]
    task.y[task.train[0]] = torch.tensor([0, 1])
    task.y[task.train[1]] = torch.tensor([1, 0])
    ours = Federation("pefll", task, descriptor_net=of, batch_size=9)
    cohort = ours.engine.cohort([0, 1], 0, training=False)
    first, second = ours.server.descriptors_of(cohort)
    assert not torch.allclose(first, second)

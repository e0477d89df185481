"""Local training against the optimisers of PyTorch, and what must not move."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from hyperfed import training, trees
from hyperfed.system.randomness import seeded
from hyperfed.training import (
    AdamW,
    Batch,
    Epochs,
    LocalConfig,
    Optimizer,
    Sgd,
    Steps,
    UnlabelledError,
)
from toys import CLASSES, FEATURES, Assigning, Normed, TwoLayers


def batches(count: int = 6) -> list[Batch]:
    draw = torch.Generator().manual_seed(3)
    return [
        Batch(
            torch.randn(8, FEATURES, dtype=torch.float64, generator=draw),
            torch.randint(CLASSES, (8,), generator=draw),
        )
        for _ in range(count)
    ]


def module(net=TwoLayers) -> nn.Module:
    with seeded(0, "net"):
        return net().double()


class Summed(nn.Module):
    """Has gradients that autograd keeps in one place, or in one for all of their entries."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.own = (nn.Parameter(torch.randn(CLASSES, FEATURES)) for _ in range(2))
        self.first = nn.Parameter(torch.randn(1, FEATURES))
        self.rest = nn.Parameter(torch.randn(CLASSES - 1, FEATURES))
        self.scales = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.common + self.own + torch.cat([self.first, self.rest])
        return F.linear(x, weight) * self.scales.sum()


def pytorchs(settings: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    same = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if isinstance(settings, Sgd):
        return torch.optim.SGD(parameters, momentum=settings.momentum, **same)
    return torch.optim.AdamW(parameters, **same)


def reference(net: nn.Module, data: list[Batch], settings: Optimizer) -> trees.Model:
    """The same training with PyTorch's modules, optimiser and clipping."""
    net.train()
    optimizer = pytorchs(settings, [*net.parameters()])
    for batch in data:
        optimizer.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        if settings.clip is not None:
            for parameter in net.parameters():  # views of one tensor would be scaled twice here
                parameter.grad = parameter.grad.clone()
            nn.utils.clip_grad_norm_(net.parameters(), settings.clip)
        optimizer.step()
    return trees.model_of(net)


SETTINGS = [
    Sgd(0.1),
    Sgd(0.1, momentum=0.9, weight_decay=0.01),
    Sgd(0.5, momentum=0.9, weight_decay=0.01, clip=0.05),
    Sgd(0.1, clip=1e6),
    AdamW(0.01),
    AdamW(0.1, weight_decay=0.3),
    AdamW(0.05, weight_decay=0.1, clip=0.05),
]


@pytest.mark.parametrize("net", [TwoLayers, Normed, Assigning, Summed])
@pytest.mark.parametrize("settings", SETTINGS)
def test_an_optimizer_is_pytorchs(net, settings: Optimizer) -> None:
    ours = module(net)
    before = trees.model_of(ours)
    trained = training.fit(
        training.supervised(ours, F.cross_entropy),
        before,
        batches(),
        settings,
        trainable=[name for name, _ in ours.named_parameters()],
    ).model
    torch.testing.assert_close(before, trees.model_of(module(net)), rtol=0, atol=0)  # unchanged
    expected = reference(module(net), batches(), settings)
    # The gradient of a bias before batch-norm is what rounding leaves, which AdamW scales up.
    near = 1e-8 if net is Normed and isinstance(settings, AdamW) else 1e-12
    if net is Assigning:  # what changes its shape is no part of a model
        expected["mask"] = before["mask"]
    torch.testing.assert_close(trained, expected, rtol=near, atol=near)


@pytest.mark.parametrize("settings", [Sgd(0.1, momentum=0.9), AdamW(0.1)])
def test_moments_handed_on_make_two_calls_one(settings: Optimizer) -> None:
    net = module()
    objective = training.supervised(net, F.cross_entropy)
    names = [name for name, _ in net.named_parameters()]
    data, start = batches(), trees.model_of(net)
    whole = training.fit(objective, start, data, settings, trainable=names)
    half = training.fit(objective, start, data[:3], settings, trainable=names)
    rest = training.fit(
        objective, half.model, data[3:], settings, trainable=names, moments=half.moments
    )
    torch.testing.assert_close(rest.model, whole.model)
    again = training.fit(objective, start, data[:3], settings, trainable=names)
    torch.testing.assert_close(half.moments, again.moments, rtol=0, atol=0)  # unchanged
    fresh = training.fit(objective, half.model, data[3:], settings, trainable=names)
    assert not torch.allclose(fresh.model["head.weight"], whole.model["head.weight"])


def test_what_is_not_trainable_gets_no_gradient_and_does_not_move() -> None:
    net, head = module(Normed), ("head.weight", "head.bias")
    start = trees.model_of(net)
    trained, moments = training.fit(
        training.supervised(net, F.cross_entropy), start, batches(), Sgd(0.1, 0.9), trainable=head
    )
    moved = {n for n in start if not torch.equal(start[n], trained[n])}
    buffers = {name for name, _ in net.named_buffers()}
    assert moved == set(head) | buffers  # buffers follow the forward passes
    assert set(moments) == set(head)


def test_clipping_leaves_out_the_unclipped() -> None:
    net, head = module(), ("head.weight", "head.bias")
    names = [name for name, _ in net.named_parameters()]
    start, (batch, *_) = trees.model_of(net), batches()
    one = {"objective": training.supervised(net, F.cross_entropy), "model": start}
    plain = training.fit(**one, batches=[batch], optimizer=Sgd(1.0), trainable=names).model
    clipped = training.fit(
        **one, batches=[batch], optimizer=Sgd(1.0, clip=1e-3), trainable=names, unclipped=head
    ).model
    steps = {name: start[name] - clipped[name] for name in names}
    for name in head:
        torch.testing.assert_close(clipped[name], plain[name])
    body = torch.cat([steps[name].flatten() for name in names if name not in head])
    assert body.norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_extra_terms_are_added_by_wrapping_the_objective() -> None:
    net = module()
    start, names = trees.model_of(net), [name for name, _ in net.named_parameters()]
    supervised = training.supervised(net, F.cross_entropy)

    def with_decay(model, batch):
        loss, buffers = supervised(model, batch)
        return loss + 0.5 * 0.3 * sum(model[n].square().sum() for n in names), buffers

    added = training.fit(with_decay, start, batches(), Sgd(0.1), trainable=names).model
    built_in = Sgd(0.1, weight_decay=0.3)
    expected = training.fit(supervised, start, batches(), built_in, trainable=names).model
    torch.testing.assert_close(added, expected)


def test_an_unlabelled_batch_refuses_its_labels() -> None:
    with pytest.raises(UnlabelledError, match="has no labels"):
        _ = Batch(torch.zeros(1), None).y


def test_local_settings_ask_for_steps_or_epochs() -> None:
    assert LocalConfig(local_steps=7, batch_size=5).batches == Steps(7, 5)
    assert LocalConfig(local_epochs=2, batch_size=5).batches == Epochs(2, 5)


def test_local_settings_make_an_optimizer() -> None:
    own = {"local_lr": 0.2, "local_momentum": 0.5, "local_weight_decay": 0.1, "local_clip": 3.0}
    assert LocalConfig(**own).local == Sgd(0.2, 0.5, 0.1, 3.0)
    assert LocalConfig(**own, local_optimizer="adamw").local == AdamW(0.2, 0.1, 3.0)
    with pytest.raises(ValidationError, match="less than 1"):
        LocalConfig(local_momentum=1.0)


@pytest.mark.parametrize(
    ("examples", "size", "lengths"),
    [
        (0, 4, []),
        (1, 4, [1]),
        (5, 4, [5]),
        (8, 4, [4, 4]),
        (9, 4, [4, 5]),  # batch-norm refuses one example alone
        (10, 4, [4, 4, 2]),
        (3, 1, [1, 1, 1]),  # as was asked for
    ],
)
def test_the_last_batch_of_a_pass_has_one_example_only_where_each_has(
    examples: int, size: int, lengths: list[int]
) -> None:
    assert training.pass_lengths(examples, size) == lengths
    assert Epochs(2, size).lengths(examples) == lengths
    assert Steps(2, size).lengths(examples) == [min(size, examples)] * (examples > 0)


def test_classes_are_counted_as_by_bincount() -> None:
    y = torch.tensor([3, 0, 3, 1, 3])
    assert torch.equal(training.count_classes(y, 5), torch.bincount(y, minlength=5))
    assert training.count_classes(y[:0], 2).tolist() == [0, 0]
    assert training.count_classes(torch.tensor([[1, -100], [-1, 1]]), 2).tolist() == [0, 2]


@pytest.mark.parametrize("examples", [49, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_come_back_whole_from_rates(examples: int, dtype: torch.dtype) -> None:
    """One 49th, times 49, is less than one."""
    count = torch.tensor([*range(50), examples], dtype=torch.float64)
    rate = (count / examples).to(dtype)
    found = training.counts_of(rate[None], torch.tensor([examples]))
    assert torch.equal(found, count[None])


def test_the_mean_loss_is_that_of_all_examples_in_evaluation_mode() -> None:
    net, (first, second, *_) = module(Normed), batches()
    short = Batch(second.x[:3], second.y[:3])
    found = training.mean_loss(net, F.cross_entropy, trees.model_of(net), [first, short])
    x, y = torch.cat([first.x, short.x]), torch.cat([first.y, short.y])
    torch.testing.assert_close(found, F.cross_entropy(net.eval()(x), y).detach())


@pytest.mark.parametrize("shape", [(2,), ()])
def test_adamw_in_bfloat16_counts_further_and_stays_there(shape: tuple[int, ...]) -> None:
    optimizer, weight = AdamW(0.1), [torch.zeros(shape, dtype=torch.bfloat16)]
    moments = [optimizer.start(weight[0])]
    for _ in range(300):
        weight, moments = optimizer.step(weight, [torch.ones_like(weight[0])], moments)
    assert moments[0]["steps"].item() == 300
    assert {weight[0].dtype, moments[0]["first"].dtype, moments[0]["second"].dtype} == {
        torch.bfloat16
    }


def test_adam_corrects_its_moments_exactly_in_single_precision() -> None:
    start = {"w": torch.zeros(3)}
    moved = training.adam(lambda w: {"w": torch.tensor([1.0, -2.0, 0.5])}, start, 1, 0.1)["w"]
    torch.testing.assert_close(moved, torch.tensor([-0.1, 0.1, -0.1]), rtol=1e-6, atol=0)

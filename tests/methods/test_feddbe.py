"""FedDBE against a derivation of its own: modules, torch.optim and autograd."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from hyperfed.trees import Tree
from toys import (
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    half_square,
    make_quadratic_task,
    make_task,
)

LR, KAPPA, MU = 0.1, 3.0, 0.4
OWN: dict[str, Any] = {"mean_weight": KAPPA, "mean_momentum": MU, "novel_steps": 3}
THREE_STEPS: dict[str, Any] = ONE_STEP | {
    "local_steps": 3,
    "local_momentum": 0.9,
    "local_weight_decay": 1e-2,
}


def features(net: nn.Module, x: Tensor) -> Tensor:
    """What enters the head of a toy network."""
    normed = getattr(net, "norm", nn.Identity())
    return torch.tanh(normed(net.body(x)))


def of(task: Task, model: Tree) -> nn.Module:
    net = copy.deepcopy(task.models["base"])
    net.load_state_dict({**net.state_dict(), **model})
    return net.train()


def train(
    task: Task, client: int, model: Tree, bias: Tensor, mean: Tensor | None, *, body: bool = True
) -> tuple[Tree, Tensor, Tensor]:
    """Three steps on all of a client's data: the model, its bias and its running mean."""
    net, bias = of(task, model), nn.Parameter(bias.clone())
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    parameters = [*net.parameters(), bias] if mean is not None else [*net.parameters()]
    optimizer = torch.optim.SGD(parameters if body else [bias], LR, 0.9, weight_decay=1e-2)
    running = torch.zeros_like(bias)
    for _ in range(3):
        z = features(net, x)
        running = (1 - MU) * running.detach() + MU * z.mean(0)
        loss = F.cross_entropy(net.head(z + bias), y)
        if mean is not None:
            loss = loss + KAPPA * torch.mean(0.5 * (running - mean) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: v.detach() for n, v in net.state_dict().items()}, bias.detach(), running.detach()


def weighted(values: dict[int, Tensor]) -> Tensor:
    total = sum(EXAMPLES[client] for client in values)
    return sum(EXAMPLES[client] / total * value for client, value in values.items())  # type: ignore[return-value]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_two_rounds_are_those_of_modules_and_optimisers(net: Any) -> None:
    ours = Federation("feddbe", make_task(net), **THREE_STEPS, **OWN)
    model, zero = ours.server.model["base"], torch.zeros(4, dtype=torch.float64)
    mean = weighted({i: train(ours.task, i, model, zero, None)[2] for i in (0, 1, 2)})
    bias = dict.fromkeys(range(4), zero)
    for number, clients in enumerate(([0, 1, 2], [0, 2, 3])):
        ours.round(clients, number)
        trained = {i: train(ours.task, i, model, bias[i], mean) for i in clients}
        floats = [name for name, value in model.items() if value.is_floating_point()]
        model = {n: weighted({i: t[0][n] for i, t in trained.items()}) for n in floats}
        bias |= {i: b for i, (_, b, _) in trained.items()}
        close(ours.server.mean["base"], mean)
        close({name: ours.server.model["base"][name] for name in model}, model)
        close(
            {i: memory["bias"] for i, memory in ours.engine.memory.items()},
            {i: bias[i] for i in ours.engine.memory},
        )
    assert (bias[1] - bias[0]).abs().max() > 1e-4
    for client in range(4):  # the model that a client hands over adds its bias to the features
        x, whole = ours.task.x[ours.task.test[client]], of(ours.task, ours.server.model["base"])
        expected = whole.eval().head(features(whole, x) + bias[client])
        close(of(ours.task, ours.personal(client)).eval()(x), expected)


def test_the_mean_is_measured_once_and_what_measured_it_is_dropped() -> None:
    ours = Federation("feddbe", make_task(), **ONE_STEP)
    first = [each.step for each in ours.round([0, 1], 0).state.exchanges]
    mean = ours.server.mean["base"].clone()
    again = [each.step for each in ours.round([2, 3], 1).state.exchanges]
    assert (first[0], again[0]) == ("measure_mean", "train_model")
    assert set(first + again) == {"measure_mean", "train_model"}
    torch.testing.assert_close(ours.server.mean["base"], mean, rtol=0, atol=0)


def test_the_mean_of_each_target_size_is_measured_in_the_first_round_of_its_own() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    ours = Federation("feddbe", task, **ONE_STEP)
    for number, (size, clients) in enumerate({"S": (0, 2), "L": (1, 3)}.items()):
        x = {i: task.x[task.train[i]] for i in clients}
        means = {i: features(models[size], x[i]).mean(0).detach() for i in clients}
        asked = [each.step for each in ours.round(clients, number).state.exchanges]
        assert asked == ["measure_mean"] * 2 + ["train_model"] * 2
        close(ours.server.mean[size], weighted(means))


def test_the_authors_momentum_takes_the_last_batch_alone() -> None:
    ours = Federation("feddbe", make_task(), **ONE_STEP)
    task = ours.task
    net = of(task, ours.server.model["base"])
    means = {i: features(net, task.x[task.train[i]]).mean(0).detach() for i in (0, 1)}
    ours.round([0, 1], 0)
    close(ours.server.mean["base"], weighted(means))
    assert (ours.config.mean_weight, ours.config.mean_momentum) == (50.0, 1.0)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_novel_client_trains_a_bias_on_the_frozen_model(steps: int) -> None:
    ours = Federation(
        "feddbe", make_task(Normed, novel=1), **THREE_STEPS, **OWN | {"novel_steps": steps}
    )
    ours.round([0, 1, 2], 0)
    model = ours.server.model["base"]
    bias = torch.zeros(4, dtype=torch.float64)
    if steps:
        net = of(ours.task, model)
        _, bias, _ = train(ours.task, 3, model, bias, None, body=False)
        assert bias.abs().max() > 1e-3
        close(dict(net.named_parameters()), {n: model[n] for n, _ in net.named_parameters()})
    expected = model | {"head.bias": model["head.bias"] + model["head.weight"] @ bias}
    close(ours.personal(3), expected)


def test_a_novel_client_needs_labels() -> None:
    ours = Federation("feddbe", make_task(novel=1, unlabelled=True), **THREE_STEPS)
    ours.round([0, 1, 2], 0)
    with pytest.raises(UnlabelledError, match="no labels"):
        ours.personal(3)


def test_it_serves_regression_too() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

    task = make_task(net, classes=0, loss=half_square, score=lambda output, y: -(output[:, 0] - y))
    ours = Federation("feddbe", task, **THREE_STEPS, **OWN)
    assert ours.round([0, 1, 2]).state.lost == {}
    assert ours.engine.memory[0]["bias"].abs().max() > 1e-3


def test_a_head_must_be_linear_with_a_bias() -> None:
    with pytest.raises(
        UserError, match=r"a target of FedDBE must end in .* got Linear.*bias=False"
    ):
        Federation("feddbe", make_quadratic_task())

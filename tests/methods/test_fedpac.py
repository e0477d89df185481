"""FedPAC against a derivation of its own: modules, torch.optim and a general solver."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.methods import fedpac
from hyperfed.methods.fedpac import combining_weights
from hyperfed.task import Task
from hyperfed.training import Epochs, Steps, UnlabelledError
from hyperfed.trees import Tree
from toys import (
    CLASSES,
    EXAMPLES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    make_quadratic_task,
    make_task,
)

LR, HEAD_LR, LAMBDA = 0.1, 0.3, 5.0
OWN: dict[str, Any] = {"alignment_weight": LAMBDA, "head_lr": HEAD_LR, "head_steps": 2}
THREE_STEPS: dict[str, Any] = ONE_STEP | {
    "local_steps": 3,
    "local_momentum": 0.9,
    "local_weight_decay": 1e-2,
    "novel_steps": 2,
}
HEAD = ("head.weight", "head.bias")
Centroids = dict[int, Tensor]


def features(net: nn.Module, x: Tensor) -> Tensor:
    """What enters the head of a toy network."""
    normed = getattr(net, "norm", nn.Identity())
    return torch.tanh(normed(net.body(x)))


def data(task: Task, client: int) -> tuple[Tensor, Tensor]:
    return task.x[task.train[client]], task.y[task.train[client]]


def centroids(task: Task, client: int, net: nn.Module) -> Centroids:
    x, y = data(task, client)
    z = features(net.eval(), x).detach()
    return {label: z[y == label].mean(0) for label in y.unique().tolist()}


def optimise(net: nn.Module, names: set[str], lr: float, loss: Any, steps: int) -> None:
    moving = [value for name, value in net.named_parameters() if name in names]
    optimizer = torch.optim.SGD(moving, lr, 0.9, weight_decay=1e-2)
    for _ in range(steps):
        net.zero_grad()
        loss().backward()
        optimizer.step()


def train_head(task: Task, client: int, net: nn.Module) -> None:
    x, y = data(task, client)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    optimise(net.train(), {*HEAD}, HEAD_LR, lambda: F.cross_entropy(net(x), y), 2)
    net.load_state_dict({**net.state_dict(), **buffers})


def train(task: Task, client: int, net: nn.Module, common: Centroids) -> None:
    """Two steps of the head and three of the body, on all of a client's data."""
    x, y = data(task, client)
    own = centroids(task, client, net)
    train_head(task, client, net)

    def loss() -> Tensor:
        z = features(net.train(), x)
        near = torch.stack([common.get(label, own[label]) for label in y.tolist()])
        return F.cross_entropy(net.head(z), y) + bool(common) * LAMBDA * F.mse_loss(z, near)

    body = {name for name, _ in net.named_parameters()} - {*HEAD}
    optimise(net, body, LR, loss, 3)


def statistics(task: Task, client: int, net: nn.Module) -> tuple[np.ndarray, float]:
    """H by class, and v as the authors' code sums it up."""
    x, y = data(task, client)
    z = features(net.eval(), x).detach().numpy()
    h, v = np.zeros((CLASSES, z.shape[1])), 0.0
    for label in range(CLASSES):
        some = z[y.numpy() == label]
        if len(some):
            share = len(some) / len(z)
            h[label] = share * some.mean(axis=0)
            v += share * np.trace(some.T @ some / len(some))
            v -= share**2 * (some.mean(axis=0) ** 2).sum()
    return h, v / len(z)


def solve(h: np.ndarray, v: np.ndarray, i: int) -> np.ndarray:
    """The quadratic programme by a general solver."""
    dist = np.einsum("jkf,lkf->jl", h[i] - h, h[i] - h) + np.diag(v)
    start = np.full(len(v), 1 / len(v))
    found = minimize(
        lambda a: 1e3 * a @ dist @ a,
        start,
        jac=lambda a: 2e3 * dist @ a,
        bounds=[(0, 1)] * len(v),
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    return np.asarray(found.x)


def close(actual: Tree, expected: Tree, rtol: float = 1e-9) -> None:
    floating = [
        {name: value for name, value in model.items() if value.is_floating_point()}
        for model in (actual, expected)
    ]
    torch.testing.assert_close(*floating, rtol=rtol, atol=1e-3 * rtol)


def load(net: nn.Module, model: Tree) -> nn.Module:
    net = copy.deepcopy(net)
    net.load_state_dict({**net.state_dict(), **model})
    return net


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_rounds_are_those_of_modules_and_optimisers(net: Any) -> None:
    """Client 0 has no class 0, and is alone in the first and the last round."""
    task = make_task(net)
    rows = task.train[0]
    task.y[rows] = task.y[rows].clamp(min=1)
    ours = Federation("fedpac", task, **THREE_STEPS, **OWN)
    nets = [copy.deepcopy(task.models["base"]) for _ in range(4)]
    common: Centroids = {}
    for number, clients in enumerate(([0], [0, 1, 2], [0, 2, 3], [0])):
        found = [statistics(task, i, nets[i]) for i in clients]
        ours.round(clients, number)
        for i in clients:
            train(task, i, nets[i], common)
        seen = {i: centroids(task, i, nets[i]) for i in clients}
        for label in {label for own in seen.values() for label in own}:
            count = {i: int((data(task, i)[1] == label).sum()) for i in clients}
            has = [i for i in clients if count[i]]
            total = sum(count[i] for i in has)
            common[label] = sum(count[i] / total * seen[i][label] for i in has)
        body = {
            name: sum(EXAMPLES[i] * nets[i].state_dict()[name] for i in clients)
            / sum(EXAMPLES[i] for i in clients)
            for name in task.models["base"].state_dict()
            if name not in HEAD
        }
        h, v = (np.array(values) for values in zip(*found, strict=True))
        trained = {name: [nets[i].state_dict()[name].clone() for i in clients] for name in HEAD}
        nets = [load(own, body) for own in nets]
        for place, i in enumerate(clients):
            weights = solve(h, v, place).tolist()
            mixed = {
                n: sum(map(torch.mul, map(torch.tensor, weights), own))
                for n, own in trained.items()
            }
            close({n: ours.personal(i)[n] for n in HEAD}, mixed, rtol=2e-3)  # the general solver's
            nets[i] = load(nets[i], {name: ours.personal(i)[name] for name in HEAD})
        for i in range(4):
            close(ours.personal(i), nets[i].state_dict())
        close(
            {str(label): ours.server.centroids["base"]["mean"][label] for label in common},
            {str(label): value for label, value in common.items()},
        )


def test_the_weights_solve_the_quadratic_programme() -> None:
    draw = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e3):
        h, v = scale * draw.normal(size=(6, 3, 4)), scale**2 * draw.uniform(0, 9, 6)
        h[3:] += h[0]  # so that some are of use to others
        ours = combining_weights(torch.from_numpy(h), torch.from_numpy(v)).numpy()
        np.testing.assert_allclose(ours.sum(axis=1), 1)
        for i in range(6):
            expected = solve(h / scale, v / scale**2, i)
            np.testing.assert_allclose(ours[i], expected * (expected > 1e-3), atol=2e-3)
    assert (ours == 0).any()
    assert ((ours > 0).sum(axis=1) > 1).any()


def test_heads_have_so_many_steps_or_passes_as_the_settings_say() -> None:
    assert fedpac.Config(head_steps=7, batch_size=9).head_batches == Steps(7, 9)
    assert fedpac.Config(head_epochs=2, batch_size=9).head_batches == Epochs(2, 9)


def test_small_weights_are_cut_off() -> None:
    """Two clients with H alike share by 1 / v."""
    share = combining_weights(torch.zeros(2, 1, 1), torch.tensor([1.0, 998.0]))
    torch.testing.assert_close(share[0], torch.tensor([998 / 999, 1 / 999]).double())
    share = combining_weights(torch.zeros(2, 1, 1), torch.tensor([1.0, 1000.0]))
    assert share[0].tolist() == [1.0, 0.0]


def test_weights_that_are_all_small_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a thousand clients may be; cut off, they would come to nothing."""
    monkeypatch.setattr(fedpac, "SMALLEST", 0.6)
    share = combining_weights(torch.zeros(3, 1, 1), torch.tensor([1.0, 2.0, 2.0]))
    torch.testing.assert_close(share[0], torch.tensor([0.5, 0.25, 0.25]).double())


def test_clients_that_are_all_alike_have_weights() -> None:
    share = combining_weights(torch.zeros(3, 2, 2), torch.zeros(3))
    torch.testing.assert_close(share.sum(dim=1), torch.ones(3).double())


def test_a_variance_that_rounding_makes_negative_is_none() -> None:
    """As of a client whose examples are all alike."""
    share = combining_weights(torch.zeros(2, 1, 1), torch.tensor([-1e-9, 1.0]))
    torch.testing.assert_close(share, torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double())


def test_the_model_travels_once_each_way() -> None:
    """With the first message; the second has the centroids and which there are."""
    task = make_task()
    cohort = Federation("fedpac", task, **THREE_STEPS, **OWN).round([0])
    model = sum(value.nbytes for value in task.models["base"].state_dict().values())
    h, v, share, there = CLASSES * 4 * 8, 8, CLASSES * 8, CLASSES
    assert [(each.step, each.down, each.up) for each in cohort.state.exchanges] == [
        ("describe", model, h + v),
        ("train_model", h + there, model),
        ("centroids", 0, h + share),
    ]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_novel_client_trains_a_head_on_the_frozen_body(steps: int) -> None:
    settings = THREE_STEPS | OWN | {"novel_steps": steps}
    ours = Federation("fedpac", make_task(Normed, novel=1), **settings)
    ours.round([0, 1, 2])
    expected = load(ours.task.models["base"], ours.server.body["base"])
    if steps:
        train_head(ours.task, 3, expected)
    close(ours.personal(3), expected.state_dict())


def test_a_novel_client_needs_labels() -> None:
    ours = Federation("fedpac", make_task(novel=1, unlabelled=True), **THREE_STEPS)
    ours.round([0, 1, 2])
    with pytest.raises(UnlabelledError, match="no labels"):
        ours.personal(3)


def test_defaults_are_those_of_the_authors_code() -> None:
    config = Federation("fedpac", make_task()).config
    assert (config.alignment_weight, config.head_lr) == (1.0, 0.1)


def test_centroids_are_weighted_by_whole_numbers_of_examples() -> None:
    """In the precision of the features, in which a share is rounded."""
    draw = torch.Generator().manual_seed(0)
    examples = torch.tensor([1_000_003, 3, 0])  # the last is lost
    count = torch.tensor([[3, 1_000_000, 0], [1, 2, 0], [0, 0, 0]])
    mean = torch.randn(3, 3, 2, generator=draw) * (count > 0)[..., None]
    share = (count / examples.clamp(min=1)[:, None]).float()
    before = {"mean": torch.ones(3, 2), "there": torch.tensor([False, False, True])}
    after = fedpac.updated(before, {"mean": mean, "share": share}, examples.double())
    by_count = torch.einsum("ck,ckf->kf", count.float(), mean) / count.sum(0).clamp(min=1)[:, None]
    by_count[2] = 1  # which nobody has
    torch.testing.assert_close(after["mean"], by_count, rtol=0, atol=0)
    assert after["there"].all()


def test_a_task_must_have_classes() -> None:
    with pytest.raises(UserError, match="a task of FedPAC must have classes"):
        Federation("fedpac", make_quadratic_task())

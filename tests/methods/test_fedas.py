"""FedAS against a derivation of its own: modules, torch.optim and autograd."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.engines import Faults
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.task import Task
from hyperfed.training import Batch, Epochs, UnlabelledError
from hyperfed.trees import Tree
from toys import ONE_STEP, Federation, Normed, TwoLayers, make_quadratic_task, make_task

LR, ALIGN_LR = 0.1, 0.7
OWN: dict[str, Any] = {"align_lr": ALIGN_LR, "align_batch_size": 100, "align_epochs": 2}
THREE_STEPS: dict[str, Any] = ONE_STEP | {
    "local_steps": 3,
    "local_momentum": 0.9,
    "local_weight_decay": 1e-2,
    "novel_steps": 3,
}
HEAD = ("head.weight", "head.bias")


def features(net: nn.Module, x: Tensor) -> Tensor:
    """What enters the head of a toy network."""
    normed = getattr(net, "norm", nn.Identity())
    return torch.tanh(normed(net.body(x)))


def align(task: Task, client: int, net: nn.Module, own: nn.Module) -> None:
    """Two steps on all of a client's data, class by class, from its own model's prototypes."""
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    z = features(own.eval(), x).detach()
    prototypes = {label: z[y == label].mean(0) for label in y.unique().tolist()}
    body = [value for name, value in net.named_parameters() if name not in HEAD]
    optimizer = torch.optim.SGD(body, ALIGN_LR)
    for _ in range(2):
        z = features(net.train(), x)
        pairs = [(z[y == label], prototype) for label, prototype in prototypes.items()]
        loss = torch.stack([((some - prototype) ** 2).mean() for some, prototype in pairs]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(task: Task, client: int, net: nn.Module) -> None:
    """Three steps on all of a client's data."""
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    optimizer = torch.optim.SGD(net.parameters(), LR, 0.9, weight_decay=1e-2)
    for _ in range(3):
        loss = F.cross_entropy(net.train()(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def trace(task: Task, client: int, net: nn.Module) -> float:
    """That of all data as one batch."""
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    loss = F.cross_entropy(net.eval()(x), y)
    gradients = torch.autograd.grad(loss, [*net.parameters()])
    return sum((gradient**2).sum().item() for gradient in gradients)


def with_body(net: nn.Module, body: Tree) -> nn.Module:
    """A copy of a network with another body, but for batch-norm's counter."""
    net = copy.deepcopy(net)
    net.load_state_dict({**net.state_dict(), **body})
    return net


def test_a_body_is_aligned_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    client = METHODS["fedas"].Client
    draw, drawn = client.draw_batches, list[tuple[Epochs, list[Batch]]]()

    def watched(self: Any, plan: Epochs) -> Iterator[Batch]:
        drawn.append((plan, [*draw(self, plan)]))
        return iter(drawn[-1][1])

    own = ONE_STEP | {"local_lr": 1e-30, "align_lr": ALIGN_LR, "align_epochs": 2}
    ours = Federation("fedas", make_task(), **own, align_batch_size=4)
    task, net = ours.task, copy.deepcopy(ours.task.models["base"])
    x, y = task.x[task.train[2]], task.y[task.train[2]]
    z = features(net, x).detach()
    prototypes = {label: z[y == label].mean(0) for label in y.unique().tolist()}
    sent = {name: value + 0.1 for name, value in ours.server.body["base"].items()}
    ours.server.body["base"] = sent
    with monkeypatch.context() as patched:
        patched.setattr(client, "draw_batches", watched)
        ours.round([2], 0)
    net.load_state_dict({**net.state_dict(), **sent})
    optimizer = torch.optim.SGD(net.body.parameters(), ALIGN_LR)
    plan, batches = drawn[0]  # before those of the Fisher information
    assert plan == Epochs(2, 4)
    assert len(batches) > 4
    for batch in batches:
        z = features(net, batch.x)
        parts = [((z[batch.y == c] - prototypes[c]) ** 2).mean() for c in set(batch.y.tolist())]
        optimizer.zero_grad()
        torch.stack(parts).sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.server.body["base"]["body.weight"], net.body.weight.detach())


def close(actual: Tree, expected: Tree) -> None:
    floating = [
        {name: value for name, value in model.items() if value.is_floating_point()}
        for model in (actual, expected)
    ]
    torch.testing.assert_close(*floating, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_rounds_are_those_of_modules_and_optimisers(net: Any) -> None:
    ours = Federation("fedas", make_task(net), **THREE_STEPS, **OWN)
    task, body = ours.task, dict(ours.server.body["base"])
    own = [copy.deepcopy(task.models["base"]) for _ in range(4)]
    assert set(HEAD).isdisjoint(body)
    for number, clients in enumerate(([0, 1, 2], [0, 2], [1, 2])):
        ours.round(clients, number)
        traces = {}
        for i in clients:
            trained = with_body(own[i], body)
            align(task, i, trained, own[i])
            train(task, i, trained)
            own[i], traces[i] = trained, trace(task, i, trained)
            close(ours.engine.memory[i]["model"], trained.state_dict())
        total = sum(traces.values())
        body = {
            name: sum(traces[i] / total * own[i].state_dict()[name] for i in clients)
            for name, value in body.items()
            if value.is_floating_point()
        }
        close({name: ours.server.body["base"][name] for name in body}, body)
    close(ours.personal(0), own[0].state_dict())  # as it was trained last
    net_of_3 = with_body(task.models["base"], ours.server.body["base"])
    close(ours.personal(3), net_of_3.state_dict())


def test_bodies_weigh_by_whole_traces_whatever_these_are_divided_by_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of batches of four, of which clients have different numbers."""
    own = ONE_STEP | {"batch_size": 4, "align_epochs": 0}
    ours, other = (Federation("fedas", make_task(), **own) for _ in range(2))
    client = METHODS["fedas"].Client
    fisher, told = client.fisher_trace, list[Tensor]()

    def noted(self: Any, model: Tree) -> Tensor:
        told.append(fisher(self, model))
        return told[-1]

    cohort = other.engine.cohort([0, 1, 2], 0, training=True)
    body, batches = other.server.body["base"], other.config.batches
    with monkeypatch.context() as patched:
        patched.setattr(client, "fisher_trace", noted)
        bodies = cohort.ask(client.train_model, body, batches=batches)["body"]
    ours.round([0, 1, 2])
    assert len({-(-len(rows) // 4) for rows in ours.task.train[:3]}) > 1
    weight = torch.stack(told) / torch.stack(told).sum()
    for name, value in ours.server.body["base"].items():
        torch.testing.assert_close(value, torch.tensordot(weight, bodies[name], 1))


def test_the_trace_is_that_of_the_batches_of_a_pass() -> None:
    """With one example to a batch, as their order is none of ours."""
    settings = ONE_STEP | {"batch_size": 1, "local_lr": 1e-12, "align_epochs": 0}
    ours = Federation("fedas", make_task(), **settings)
    net, task, client = ours.task.models["base"], ours.task, METHODS["fedas"].Client
    cohort = ours.engine.cohort([0, 1], 0, training=True)
    batches = ours.config.batches
    told = cohort.ask(client.train_model, ours.server.body["base"], batches=batches)["trace"]
    told = told * torch.tensor([16, 8])  # 12 and 7 batches are told over the next power of two
    for place in (0, 1):
        found = []
        for row in task.train[place]:
            loss = F.cross_entropy(net(task.x[row][None]), task.y[row][None])
            gradients = torch.autograd.grad(loss, [*net.parameters()])
            found += [(gradient**2).sum().item() for gradient in gradients]
        assert told[place].item() == pytest.approx(sum(found), rel=1e-6)


def test_clients_without_a_gradient_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a single example; but for a lost one, of which there is no body either."""
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 2)
    task = make_task(examples=(12, 1, 20))
    task.y.zero_()
    with torch.no_grad():
        task.models["base"].head.bias[0] = 1e4  # certain of the only class that there is
    ours = Federation("fedas", task, **ONE_STEP, align_lr=ALIGN_LR)
    ours.round([0, 1, 2])
    bodies = [ours.engine.memory[i]["model"]["body.weight"] for i in (0, 1)]
    assert not torch.equal(*bodies)
    close(ours.server.body["base"], {**ours.server.body["base"], "body.weight": sum(bodies) / 2})


@pytest.mark.parametrize("steps", [0, 3])
def test_a_novel_client_trains_from_the_global_body(steps: int) -> None:
    ours = Federation(
        "fedas", make_task(Normed, novel=1), **THREE_STEPS | {"novel_steps": steps}, **OWN
    )
    ours.round([0, 1, 2])
    expected = with_body(ours.task.models["base"], ours.server.body["base"])
    if steps:
        train(ours.task, 3, expected)
    close(ours.personal(3), expected.state_dict())


def test_a_novel_client_needs_labels() -> None:
    ours = Federation("fedas", make_task(novel=1, unlabelled=True), **THREE_STEPS)
    ours.round([0, 1, 2])
    with pytest.raises(UnlabelledError, match="no labels"):
        ours.personal(3)


def test_defaults_are_those_of_the_authors_code() -> None:
    config = Federation("fedas", make_task()).config
    assert (config.align_epochs, config.align_lr, config.align_batch_size) == (1, 0.01, 16)


def test_a_task_must_have_classes() -> None:
    with pytest.raises(UserError, match="a task of FedAS must have classes"):
        Federation("fedas", make_quadratic_task())

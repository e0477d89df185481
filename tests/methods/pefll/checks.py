"""What the tests of PeFLL share: its settings, and its update by one-piece autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.system.randomness import generator
from hyperfed.task import Task
from hyperfed.trees import Tree
from toys import (
    PLAIN,
    Federation,
    logits,
)

THETA, ETA = 0.01, 0.02
"""lambda_theta, and lambda_h = lambda_v: large enough to be missed."""
SETTINGS: dict[str, Any] = PLAIN | {
    "local_steps": 1,
    "batch_size": 4,
    "local_lr": 0.1,
    "local_weight_decay": 2 * THETA,
    "optimizer": "sgd",
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 2 * ETA,
    "clip": None,
    "descriptor_size": 2,
    "standardize": False,
    "hyper_net": "single",
    "hidden": 7,
    "hidden_layers": 1,
}


def drawn(task: Task, client: int, number: int, step: str) -> tuple[Tensor, Tensor]:
    """The batch of 4 that a client is given in a step: a function of these keys."""
    rows = task.train[client]
    source = generator(0, "batches", client, number, step, 0)
    rows = rows[torch.randperm(len(rows), generator=source)[:4]]
    return task.x[rows], task.y[rows]


def gradients(
    federation: Federation, clients: list[int], number: int, standard: list[Tensor]
) -> dict[str, Tensor]:
    """The gradient of objective (1), which autograd sees in one piece, for both networks."""
    server, task, settings = federation.server, federation.task, federation.config
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        x, y = drawn(task, client, number, "describe")
        descriptor = server.descriptor_net(x, y).sum(0) / len(x)
        if settings.standardize:
            if not standard:
                standard += [descriptor.mean().detach(), descriptor.std().detach()]
            descriptor = (descriptor - standard[0]) / standard[1]
        model = {name: value[0] for name, value in server.hyper_net(descriptor[None]).items()}
        x, y = drawn(task, client, number, "train_model")
        loss = task.loss(logits(task.models["base"], model, x), y)
        squares = torch.stack([value.square().sum() for value in model.values()]).sum()
        objective = objective + (loss + THETA * squares) / len(clients)
    named = parameters(federation)
    found = torch.autograd.grad(objective, list(named.values()))
    return dict(zip(named, found, strict=True))


def after_a_step(federation: Federation, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both networks after one step.

    With one plain local step of rate eta, delta is eta times the gradient of a client's objective,
    so the server descends their mean with rate lr * eta.
    """
    return {
        name: (value - 0.5 * (0.1 * gradient[name] + 2 * ETA * value)).detach()
        for name, value in parameters(federation).items()
    }


def parameters(federation: Federation) -> dict[str, Tensor]:
    server = federation.server
    hyper = {f"h.{name}": value for name, value in server.hyper_net.named_parameters()}
    return hyper | {f"v.{name}": value for name, value in server.descriptor_net.named_parameters()}


def summed_over_clients(_: Any) -> Callable[..., Tree]:
    return lambda tree, weight, *_: trees.tree_map(lambda leaf: leaf.sum(0), tree)


def from_another_batch(gradient_of: Callable[..., Tree]) -> Callable[..., Tree]:
    def mutant(client: Any, gradient: Tree) -> Tree:
        other = client.train.batch(slice(4))
        client.scratch |= {"x": other.x, "y": other.y}
        return gradient_of(client, gradient)

    mutant.__dict__.update(gradient_of.__dict__)
    return mutant


DELAYED = SETTINGS | {"delayed_gradient": True}


def lose(monkeypatch: pytest.MonkeyPatch, step: str, *clients: int) -> None:
    def spoilt(faults: Faults, seed: int, call: Call) -> bool:
        return call.client in clients and call.step == step

    monkeypatch.setattr(Faults, "spoils", spoilt)

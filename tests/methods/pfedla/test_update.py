"""The update of pFedLA and HeurpFedLA by one-piece autograd, its mutants, and several sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.methods import pfedla
from hyperfed.system.randomness import seeded
from methods.pfedla.checks import (
    CLOSE,
    LAYERS,
    PARAMETERS,
    SERVER,
    layers_in,
    loss_of,
    mixture_of,
    trained_federation,
    two_sizes,
)
from toys import CLASSES, FEATURES, ONE_STEP, Federation, TwoLayers, logits, make_task


def check_one_round(clients: list[int], retain: int = 0, **settings: Any) -> None:
    """One round against gradient descent on the one-piece objective, and what is kept and used.

    With one plain local step of rate eta, delta = eta times the gradient in the mixture, so
    descending the pull-back is gradient descent with rate lr * eta on sum_i L_i(mixture_i).
    """
    federation = trained_federation(retain, **settings)
    server = federation.server
    assert list(server.weights(torch.tensor(clients))) == list(layers_in(federation))
    rate = ONE_STEP["local_lr"]
    stored = trees.clone(server.trained["base"])
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        mixture = mixture_of(federation, client, retain)
        loss = loss_of(federation, client, mixture)
        objective = objective + loss
        leaves = {name: mixture[name].detach().requires_grad_() for name in PARAMETERS}
        loss_of(federation, client, mixture | leaves).backward()
        for name, leaf in leaves.items():
            stored[name][client] = (leaf - rate * leaf.grad).detach()
    named = dict(server.hyper_nets.named_parameters())
    gradients = torch.autograd.grad(objective, list(named.values()))
    expected = {
        name: (value - federation.config.lr * rate * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }

    federation.round(clients, 3)

    ours = {name: value.detach() for name, value in server.hyper_nets.named_parameters()}
    torch.testing.assert_close(ours, expected, **CLOSE)
    for name in PARAMETERS:
        torch.testing.assert_close(server.trained["base"][name], stored[name], **CLOSE)
    for client in range(4):
        mixture = trees.detach(mixture_of(federation, client, retain))
        torch.testing.assert_close(federation.personal(client), mixture, **CLOSE)


@pytest.mark.parametrize("retain", [0, 1, 2])
@pytest.mark.parametrize("clients", [[1], [3], [0, 1, 3]])
def test_the_update_is_the_gradient_of_the_one_piece_objective(
    clients: list[int], retain: int
) -> None:
    check_one_round(clients, retain)


def test_whole_models_have_one_weight_for_all_layers() -> None:
    check_one_round([0, 1, 3], weigh="models")
    with pytest.raises(ValueError, match="weigh must be layers where layers are retained"):
        Federation("pfedla", make_task(), weigh="models", retain=1)


def test_the_update_moves_the_participants_hypernetworks_and_no_other() -> None:
    federation = trained_federation()
    before = trees.clone(federation.server.state()["hyper_nets"])
    federation.round([1], 3)
    after = federation.server.state()["hyper_nets"]
    for name, old in before.items():
        moved = (after[name] - old).abs().flatten(1).amax(dim=1)
        assert [bool(rows > 0) for rows in moved] == [False, True, False, False], name


def flipped(sent: trees.Tree, trained: trees.Tree) -> trees.Tree:
    return {name: trained[name] - value for name, value in sent.items()}


def own_over_mixture(self: pfedla.Client, received: dict[str, Tensor]) -> dict[str, Tensor]:
    """The public error: the mixture is loaded, then overwritten by the client's own model."""
    return received | self.recall("model", self.initial)


def to_a_neighbour(model: Any, delta: Any, weight: Tensor) -> None:
    PULL_BACK(model, trees.tree_map(lambda leaf: leaf.roll(1, 0), delta), weight)


PULL_BACK = trees.pull_back


def each_entry_a_layer(net: Any) -> dict[str, list[str]]:
    return {name: [name] for names in LAYERS.values() for name in names}


def biases_elsewhere(net: Any) -> dict[str, list[str]]:
    other = {"body.bias": "head.bias", "head.bias": "body.bias"}
    return {layer: [other.get(n, n) for n in names] for layer, names in LAYERS.items()}


def without_buffers(net: Any) -> dict[str, list[str]]:
    return {layer: [n for n in names if n in PARAMETERS] for layer, names in LAYERS.items()}


def buffers_too(net: Any) -> list[str]:
    return [name for name, value in trees.model_of(net).items() if value.is_floating_point()]


@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (trees, "subtract", flipped),
        (pfedla.Client, "personal_model", own_over_mixture),
        (trees, "pull_back", to_a_neighbour),
        (torch.optim, "SGD", partial(torch.optim.SGD, momentum=0.9)),
        (torch.optim, "SGD", partial(torch.optim.SGD, weight_decay=0.1)),
        (pfedla, "layers_of", each_entry_a_layer),
        (pfedla, "layers_of", biases_elsewhere),
        (pfedla, "layers_of", without_buffers),
        (pfedla, "shapes_of", buffers_too),
    ],
)
def test_a_mutant_is_caught(
    place: Any, name: str, mutant: Callable[..., Any], retain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check_one_round([0, 1, 3], retain)


def test_the_hypernetwork_of_a_lost_client_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    federation = trained_federation()
    fresh = Federation("pfedla", federation.task, **ONE_STEP, **SERVER).server.state()
    for name, value in federation.server.state()["hyper_nets"].items():
        moved = (value - fresh["hyper_nets"][name]).abs().flatten(1).amax(dim=1) > 0
        assert moved.tolist() == [True, False, True, False], name


def test_of_several_sizes_each_client_s_hypernetwork_makes_one_step() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": torch.nn.Linear(FEATURES, CLASSES).double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER)
    for number in range(2):  # of models that are all alike any mixture is the same
        federation.round([0, 1, 2, 3], number)
    server, losses = federation.server, []
    for client in range(4):
        size, rows = task.size_of(client), task.train[client]
        (alpha,) = server.hyper_nets(torch.tensor([client]), size, server.members[size])
        model = {
            name: torch.tensordot(weights, server.trained[size][name], dims=1)
            for weights, names in zip(alpha, server.layers[size].values(), strict=True)
            for name in names
        }
        output = logits(models[size], model, task.x[rows])
        losses.append(torch.nn.functional.cross_entropy(output, task.y[rows]))
    named = dict(server.hyper_nets.named_parameters())
    gradients = torch.autograd.grad(sum(losses), list(named.values()))
    rate = federation.config.lr * federation.config.local_lr
    expected = {
        name: (value - rate * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }
    federation.round([0, 1, 2, 3], 2)
    torch.testing.assert_close(trees.detach(named), expected, **CLOSE)


def test_a_client_is_mixed_from_the_clients_of_its_own_size() -> None:
    task = two_sizes()
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER)
    unseen = federation.server.weights(torch.tensor([0]), "S")["body"]
    assert bool((unseen > 0).all())  # the server has not yet met anyone
    for number in range(2):
        federation.round([0, 1, 2, 3], number)
    alpha = federation.server.weights(torch.tensor([0]), "S")
    assert list(alpha) == ["body", "head"]
    stored = federation.server.trained["S"]
    ours = federation.personal(0)
    for name, value in ours.items():
        (weight,) = alpha[name.split(".")[0]]
        assert weight[[1, 3]].tolist() == [0, 0]
        expected = weight[0] * stored[name][0] + weight[2] * stored[name][2]
        torch.testing.assert_close(value, expected, **CLOSE)

"""FedALA against a derivation of its own."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.trees import Tree
from toys import ONE_STEP, Federation, Normed, client_loss, close, logits, make_task, snapshot

LR = 0.1  # that of ONE_STEP
ETA = 400.0  # high, so that some of W reaches either end
BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")
ONE_PASS: dict[str, Any] = {"weight_share": 1.0, "first_epochs": 1, "weight_lr": ETA}


def own_and_global(**settings: Any) -> tuple[Federation, Tree, Tree]:
    """Client 1 trained in round 0 and was absent in round 1; its theta_i, and Theta since."""
    ours = Federation("fedala", make_task(), **ONE_STEP | ONE_PASS | settings)
    ours.round([0, 1, 2], 0)
    ours.round([0, 2], 1)
    own, model = ours.engine.memory[1]["own"], ours.server.model["base"]
    assert all((own[name] - model[name]).abs().max() > 1e-6 for name in own)
    return ours, own, model


def mixture(own: Tree, model: Tree, weights: Tree) -> Tree:
    """Theta with theta_i + (Theta - theta_i) W in the place of what has a W."""
    return model | {name: own[name] + (model[name] - own[name]) * weights[name] for name in weights}


def descended(loss: Tensor, weights: Tree, eta: float = ETA) -> Tree:
    """W after a step on a loss that was computed from it in one piece, and clipped."""
    gradients = torch.autograd.grad(loss, list(weights.values()))
    steps = zip(weights.items(), gradients, strict=True)
    return {name: (w - eta * g).detach().clamp(0, 1) for (name, w), g in steps}


def one_pass(ours: Federation, own: Tree, model: Tree, weights: Tree) -> Tree:
    """W after one step on all of client 1's examples."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    return descended(client_loss(ours.task, 1, mixture(own, model, leaves)), leaves)


def ones(own: Tree) -> Tree:
    return {name: torch.ones_like(value) for name, value in own.items()}


@pytest.mark.parametrize(("layers", "names"), [(1, HEAD), (2, (*BODY, *HEAD))])
def test_a_client_trains_from_the_mixture_that_lowers_its_loss(
    layers: int, names: tuple[str, ...]
) -> None:
    ours, own, model = own_and_global(higher_layers=layers)
    assert tuple(own) == names
    weights = one_pass(ours, own, model, ones(own))
    values = torch.cat([value.flatten() for value in weights.values()])
    ends = [(values == end).any() for end in (0, 1)]
    assert all([*ends, ((values > 0) & (values < 1)).any()])
    start = mixture(own, model, weights)
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    client_loss(ours.task, 1, leaves).backward()
    trained = {name: leaf.detach() - LR * leaf.grad for name, leaf in leaves.items()}
    close(ours.personal(1), start)  # before it trains, and without being kept
    assert set(ours.engine.memory[1]) == {"own"}
    ours.round([1], 2)
    close(ours.engine.memory[1], {"own": {n: trained[n] for n in own}, "weights": weights})
    close(ours.server.model["base"], trained)


def test_weights_are_kept_and_trained_for_one_pass_from_then_on() -> None:
    ours, *_ = own_and_global(first_epochs=3, loss_threshold=0.0)
    ours.round([0, 1, 2], 2)
    kept = ours.engine.memory[1]["weights"]
    assert any((value != 1).any() for value in kept.values())
    ours.round([0, 2], 3)
    close(ours.engine.memory[1]["weights"], kept)
    own, model = ours.engine.memory[1]["own"], ours.server.model["base"]
    ours.round([0, 1, 2], 4)
    close(ours.engine.memory[1]["weights"], one_pass(ours, own, model, kept))


def first_training(
    ours: Federation, own: Tree, model: Tree, batches: Sequence[Tensor], **rule: Any
) -> tuple[Tree, int]:
    """W after the first training on these examples, pass by pass, and the number of passes."""
    weights, losses = ones(own), list[float]()
    net = ours.task.models["base"]
    while len(losses) < rule["most"]:
        for rows in batches:
            leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
            output = logits(net, mixture(own, model, leaves), ours.task.x[rows])
            loss = F.cross_entropy(output, ours.task.y[rows])
            weights = descended(loss, leaves, ours.config.weight_lr)
        losses.append(loss.item())
        window = losses[-rule["window"] :]
        if len(losses) > rule["window"] and np.std(window) < rule["threshold"]:
            break
    return weights, len(losses)


@pytest.mark.parametrize(
    ("threshold", "passes"), [(1e3, 4), (1e-4, 7), (0.0, 12)], ids=["soon", "later", "never"]
)
def test_the_first_time_weights_are_trained_until_the_losses_agree(
    threshold: float, passes: int
) -> None:
    rule = {"window": 3, "threshold": threshold, "most": 12}
    settings = {"loss_window": 3, "loss_threshold": threshold, "first_epochs": 12}
    ours, own, model = own_and_global(**settings)
    expected, counted = first_training(ours, own, model, [ours.task.train[1]], **rule)
    assert counted == passes
    ours.round([1], 2)
    close(ours.engine.memory[1]["weights"], expected)


def test_weights_see_one_random_share_of_the_examples_in_batches() -> None:
    rule = {"window": 2, "threshold": 6e-4, "most": 6}
    settings = {"loss_window": 2, "loss_threshold": 6e-4, "first_epochs": 6, "weight_lr": 100.0}
    ours, own, model = own_and_global(**settings, weight_share=0.8, batch_size=3)
    rows = ours.task.train[1]
    ours.round([1], 2)
    kept = ours.engine.memory[1]["weights"]
    matching = 0
    for first in combinations(range(7), 3):  # 5 of 7 examples: a batch of three, one of two
        for second in combinations(sorted({*range(7)} - {*first}), 2):
            batches = [rows[list(first)], rows[list(second)]]
            expected, _ = first_training(ours, own, model, batches, **rule)
            matching += all(torch.allclose(kept[n], expected[n], 1e-9, 1e-10) for n in kept)
    assert matching == 1


def test_the_first_time_a_client_takes_part_it_overwrites() -> None:
    ours = Federation("fedala", make_task(), **ONE_STEP)
    fedavg = Federation("fedavg", make_task(), **ONE_STEP)
    for federation in (ours, fedavg):
        federation.round([0, 2], 0)
        federation.round([1], 1)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    assert set(ours.engine.memory[1]) == {"own"}
    own = {name: ours.server.model["base"][name] for name in HEAD}  # it trained alone
    torch.testing.assert_close(ours.engine.memory[1]["own"], own, rtol=0, atol=0)
    torch.testing.assert_close(ours.personal(3), ours.server.model["base"], rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"net": Normed}], ids=["plain", "normed"])
def test_without_higher_layers_it_is_fedavg(options: Any) -> None:
    settings = {"local_steps": 3, "batch_size": 4, "local_lr": 0.1, "novel_steps": 2}
    ours = Federation("fedala", make_task(**options, novel=1), **settings, higher_layers=0)
    fedavg = Federation("fedavg", make_task(**options, novel=1), **settings)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 1, 2], number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    torch.testing.assert_close(ours.personal(1), fedavg.personal(1), rtol=0, atol=0)
    novel = [federation.personal(3) for federation in (ours, fedavg)]
    torch.testing.assert_close(novel[0], novel[1], rtol=0, atol=0)


def test_an_absent_client_changes_nothing_and_uses_a_mixture_of_the_latest_model() -> None:
    ours, own, model = own_and_global()
    before = snapshot(ours)["memory"]["1"]
    ours.round([0, 2], 2)
    torch.testing.assert_close(snapshot(ours)["memory"]["1"], before, rtol=0, atol=0)
    model = ours.server.model["base"]
    close(ours.personal(1), mixture(own, model, one_pass(ours, own, model, ones(own))))


def test_the_mixture_has_the_global_buffers_and_weights_train_in_training_mode() -> None:
    ours = Federation("fedala", make_task(Normed), **ONE_STEP | ONE_PASS)
    ours.round([0, 1, 2], 0)
    ours.round([0, 2], 1)
    own, model = ours.engine.memory[1]["own"], ours.server.model["base"]

    rows, net = ours.task.train[1], ours.task.models["base"]
    leaves = {name: value.requires_grad_() for name, value in ones(own).items()}
    # Batch-norm writes its statistics in place.
    start = {name: value.clone() for name, value in mixture(own, model, leaves).items()}
    loss = F.cross_entropy(logits(net, start, ours.task.x[rows]), ours.task.y[rows])
    close(ours.personal(1), mixture(own, model, descended(loss, leaves)))


def test_two_examples_at_least_are_drawn_for_batch_norm() -> None:
    """Which has no statistics of one, and would take that as in evaluation."""
    ours, own, model = own_and_global(weight_share=0.01, weight_lr=100.0)
    ours.round([1], 2)
    kept, matching = ours.engine.memory[1]["weights"], 0
    for pair in combinations(ours.task.train[1], 2):
        rule = {"window": 1, "threshold": 0.0, "most": 1}
        expected, _ = first_training(ours, own, model, [torch.stack(pair)], **rule)
        matching += all(torch.allclose(kept[n], expected[n], 1e-9, 1e-10) for n in kept)
    assert matching == 1


@pytest.mark.parametrize("steps", [0, 1])
def test_a_novel_client_fine_tunes_the_global_model(steps: int) -> None:
    ours = Federation("fedala", make_task(novel=1), **ONE_STEP, novel_steps=steps)
    for number in range(2):
        ours.round([0, 1, 2], number)
    model = ours.server.model["base"]
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    client_loss(ours.task, 3, leaves).backward()
    tuned = {name: model[name] - LR * leaf.grad for name, leaf in leaves.items()}
    close(ours.personal(3), tuned if steps else model)


def test_a_network_must_have_the_layers() -> None:
    with pytest.raises(UserError, match=r"0 to 2 layers .* got 3"):
        Federation("fedala", make_task(), higher_layers=3)

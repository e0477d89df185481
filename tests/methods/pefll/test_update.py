"""PeFLL's update: three exchanges against one-piece autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.methods import pefll
from hyperfed.methods.parts import hypernet_training
from hyperfed.nets.descriptors import Standard
from hyperfed.task import Task
from hyperfed.trees import Tree
from methods.pefll.checks import (
    ETA,
    SETTINGS,
    after_a_step,
    from_another_batch,
    gradients,
    parameters,
    summed_over_clients,
)
from toys import (
    Federation,
    client_loss,
    close,
    make_quadratic_task,
    make_task,
)


def check_two_rounds(clients: list[int], task: Task | None = None, **settings: Any) -> None:
    federation = Federation("pefll", task or make_task(), **SETTINGS | settings)
    standard: list[Tensor] = []
    for number in range(2):
        gradient = gradients(federation, clients, number, standard)
        expected = after_a_step(federation, gradient)
        federation.round(clients, number)
        ours = {name: value.detach() for name, value in parameters(federation).items()}
        close(ours, expected)


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("hyper_net", ["single", "heads"])
@pytest.mark.parametrize("descriptor_net", ["target", "linear"])
@pytest.mark.parametrize("clients", [[2], [0, 1, 3]])
def test_the_update_is_the_gradient_of_the_one_piece_objective(
    clients: list[int], descriptor_net: str, hyper_net: str, standardize: bool
) -> None:
    settings = {"hyper_net": hyper_net, "standardize": standardize}
    check_two_rounds(clients, descriptor_net=descriptor_net, **settings)


@pytest.mark.parametrize(
    "settings", [{"hyper_net": "chunks", "chunk": 7}, {"head_rank": 2}, {"start": "target"}]
)
def test_so_it_is_with_every_kind_of_hypernetwork(settings: dict[str, Any]) -> None:
    check_two_rounds([0, 1, 3], **settings)


@pytest.mark.parametrize("descriptor_net", ["target", "linear"])
def test_the_update_of_a_regression_is_that_gradient_too(descriptor_net: str) -> None:
    check_two_rounds([0, 1, 3], make_quadratic_task(), descriptor_net=descriptor_net)


def test_the_sgd_of_the_server_has_momentum() -> None:
    ours = Federation("pefll", make_task(), **SETTINGS | {"momentum": 0.9})
    buffer = dict.fromkeys(parameters(ours), torch.zeros((), dtype=torch.float64))
    for number in range(2):
        gradient, expected = gradients(ours, [0, 2], number, []), {}
        for name, value in parameters(ours).items():
            buffer[name] = 0.9 * buffer[name] + 0.1 * gradient[name] + 2 * ETA * value.detach()
            expected[name] = value.detach() - 0.5 * buffer[name]
        ours.round([0, 2], number)
        close({name: value.detach() for name, value in parameters(ours).items()}, expected)


def test_the_decay_of_adam_is_in_its_gradient() -> None:
    """The first step of Adam is g / (|g| + 1e-8) times the rate, with bias corrected."""
    ours = Federation("pefll", make_task(), **SETTINGS | {"optimizer": "adam"})
    gradient = gradients(ours, [0, 2], 0, [])
    decayed = {n: 0.1 * gradient[n] + 2 * ETA * value for n, value in parameters(ours).items()}
    expected = {
        name: (value - 0.5 * decayed[name] / (decayed[name].abs() + 1e-8)).detach()
        for name, value in parameters(ours).items()
    }
    ours.round([0, 2])
    torch.testing.assert_close(dict(parameters(ours)), expected, rtol=1e-6, atol=1e-9)


def flipped(subtract: Callable[..., Tree]) -> Callable[..., Tree]:
    return lambda sent, trained: subtract(trained, sent)


def summed_in_the_hypernetwork(pull_back: Callable[..., None]) -> Callable[..., None]:
    return lambda model, delta, weight, *rest, **more: pull_back(
        model, delta, weight.sign(), *rest, **more
    )


def summed_over_examples(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda client, net, batch: embed(client, net, batch) * len(batch.x)


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (trees, "subtract", flipped),
        (trees, "weighted_mean", summed_over_clients),
        (hypernet_training, "pull_back", summed_in_the_hypernetwork),
        (pefll.Client, "embed", summed_over_examples),
        (pefll.Client, "descriptor_net_gradient", from_another_batch),
    ],
)
def test_a_wrong_update_is_caught(
    place: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above fails on these mutants: so much it is worth."""
    monkeypatch.setattr(place, name, mutant(getattr(place, name)))
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3])


@pytest.mark.parametrize("missing", ["local_weight_decay", "weight_decay"])
def test_a_missing_regulariser_is_caught(missing: str) -> None:
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3], **{missing: 0.0})


def test_a_standard_fitted_in_every_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = Standard.fitted

    def again(_: Standard, descriptors: Tensor) -> Standard:
        return fitted(Standard().double(), descriptors)

    monkeypatch.setattr(Standard, "fitted", again)
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3], standardize=True)


def test_the_gradient_of_both_networks_is_clipped_together() -> None:
    settings = SETTINGS | {"weight_decay": 0.0, "clip": 1e-4, "lr": 1.0}
    federation = Federation("pefll", make_task(), **settings)
    before = {name: value.detach().clone() for name, value in parameters(federation).items()}
    federation.round([0, 1])
    moved = [(before[name] - value).flatten() for name, value in parameters(federation).items()]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("delayed", [False, True])
def test_training_lowers_the_loss_of_every_client(delayed: bool) -> None:
    settings = {"local_steps": 3, "batch_size": 20, "local_lr": 0.2, "lr": 1e-2}
    federation = Federation("pefll", make_task(), **settings, delayed_gradient=delayed)
    before = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    for number in range(20):
        federation.round(range(4), number)
    after = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    assert all(new < 0.7 * old for old, new in zip(before, after, strict=True))

"""PeFLL whose descriptor network learns a round late, in two exchanges."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import engines, trees
from hyperfed.engines import EngineCohort
from hyperfed.federation import AllLostError, Each
from hyperfed.methods import pefll
from hyperfed.trees import Tree
from methods.pefll.checks import (
    DELAYED,
    ETA,
    after_a_step,
    from_another_batch,
    gradients,
    lose,
    parameters,
    summed_over_clients,
)
from toys import (
    Federation,
    close,
    make_task,
)

COHORTS = [[0, 1, 3], [1, 2], [0, 2, 3]]
"""Clients 1, then 2, are posted a gradient in one round and described in the next."""


def check_delayed_rounds(**settings: Any) -> None:
    """The descriptor network moves by the gradient at the networks and clients of a round ago."""
    federation = Federation("pefll", make_task(), **DELAYED | settings)
    standard: list[Tensor] = []
    before = {name: torch.zeros_like(value) for name, value in parameters(federation).items()}
    for number, clients in enumerate(COHORTS):
        now = gradients(federation, clients, number, standard)
        used = {name: (now if name.startswith("h.") else before)[name] for name in now}
        expected, before = after_a_step(federation, used), now
        federation.round(clients, number)
        ours = {name: value.detach() for name, value in parameters(federation).items()}
        close(ours, expected)


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("descriptor_net", ["target", "linear"])
def test_a_delayed_gradient_is_that_of_the_round_before(
    descriptor_net: str, standardize: bool
) -> None:
    check_delayed_rounds(descriptor_net=descriptor_net, standardize=standardize)


def posted_to_other_clients(post: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(cohort: Any, step: Any, each: Each) -> Any:
        return post(cohort, step, Each({name: leaf.flip(0) for name, leaf in each.tree.items()}))

    return mutant


def not_copied(_: Any) -> Callable[..., Any]:
    return lambda item: item


def dropped(_: Any) -> Callable[..., Tree]:
    return lambda self: {}


def kept_from_the_first_round(latest: Callable[..., Tree]) -> Callable[..., Tree]:
    return lambda self: self.late_gradient or latest(self)


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (pefll.Client, "descriptor_net_gradient", from_another_batch),
        (EngineCohort, "post", posted_to_other_clients),
        (engines.cohort, "_copied", not_copied),
        (trees, "weighted_mean", summed_over_clients),
        (pefll.Server, "latest_gradient", dropped),
        (pefll.Server, "latest_gradient", kept_from_the_first_round),
    ],
)
def test_a_mutant_of_the_delayed_update_is_caught(
    place: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mutant(getattr(place, name)))
    with pytest.raises(AssertionError):
        check_delayed_rounds()


def test_a_mutant_that_does_not_delay_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_delayed_rounds(delayed_gradient=False)


def test_who_does_not_answer_late_is_left_out_of_the_descriptor_networks_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its delta counts: only the mean over those that answered differs."""
    lossy = Federation("pefll", make_task(), **DELAYED)
    gradient = gradients(lossy, [0, 3], 0, [])
    lose(monkeypatch, "descriptor_net_gradient", 1)
    first = lossy.round([0, 1, 3], 0)
    mean = {f"v.{name}": leaf for name, leaf in lossy.server.state()["late_gradient"].items()}
    assert [client for client, _ in first.state.late] == [1]
    assert first.state.lost == {}
    expected = {name: 0.1 * leaf for name, leaf in gradient.items() if name.startswith("v.")}
    close(mean, expected)


def test_a_gradient_waits_while_rounds_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy, whole = (Federation("pefll", make_task(), **DELAYED) for _ in range(2))
    for ours in (lossy, whole):
        ours.round([0, 1, 3], 0)
    with monkeypatch.context() as patched:
        lose(patched, "describe", 2)
        with pytest.raises(AllLostError):
            lossy.round([2], 1)
    for ours in (lossy, whole):
        ours.round([1, 2], 2)
    torch.testing.assert_close(lossy.server.state(), whole.server.state(), rtol=0, atol=0)


def test_where_nobody_answers_late_the_descriptor_network_only_decays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = Federation("pefll", make_task(), **DELAYED)
    lose(monkeypatch, "descriptor_net_gradient", 0, 1, 3)
    ours.round([0, 1, 3], 0)
    before = trees.clone(trees.model_of(ours.server.descriptor_net))
    ours.round([1, 2], 1)
    decayed = {name: (1 - 0.5 * 2 * ETA) * value for name, value in before.items()}
    close(trees.model_of(ours.server.descriptor_net), decayed)

"""Bounds and rules under every method: none is noticed by honest clients, none needs a line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.methods import METHODS
from hyperfed.nets.descriptors import Centred
from hyperfed.runs.capability import NO_MEAN
from hyperfed.runs.settings import RobustConfig
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import aggregation
from hyperfed.trees.aggregation import Rule
from toys import (
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    make_task,
    short,
    snapshot,
)

ALL = sorted(METHODS)
ALIKE = (8, 8, 8, 8)
"""Training examples of each client: equal, so that a mean is the same with weights and without."""


def after(
    method: str,
    rule: Rule = aggregation.MEAN,
    *,
    bound: float | None = None,
    task: Task | None = None,
    **options: Any,
) -> Federation:
    """A federation after two rounds, the second without client 3."""
    ours = Federation(method, task or make_task(examples=ALIKE), **short(method, **options))
    for number, ids in enumerate(([0, 1, 2, 3], [0, 1, 2])):
        cohort = ours.engine.cohort(ids, number, training=True)
        cohort.state.reply_bound = bound
        with trees.aggregating(rule):
            ours.server.round(cohort)
        ours.engine.commit(cohort)
        assert cohort.state.lost == {}
    return ours


@pytest.mark.parametrize("method", ALL)
def test_the_default_bound_changes_no_honest_number_and_a_rule_stands_for_the_mean(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = after(method)
    bound = after(method, bound=RobustConfig().reply_bound)
    torch.testing.assert_close(snapshot(bound), snapshot(plain), rtol=0, atol=0)
    # Trimmed by nobody it is the mean, but by another way; and that way is gone.
    used = []
    trimmed = aggregation._ROBUST["trimmed_mean"]
    monkeypatch.setitem(
        aggregation._ROBUST, "trimmed_mean", lambda *of: used.append(of[2]) or trimmed(*of)
    )
    robust = after(method, Rule("trimmed_mean", 0.0))
    assert set(used) == (set() if method in NO_MEAN else {0})
    if method != "fedas":  # whose mean is weighted by what clients say of their gradients
        torch.testing.assert_close(snapshot(robust), snapshot(plain), rtol=1e-8, atol=1e-11)


UNALIKE = [(method, {"batch_size": 50}) for method in ALL if method != "fedas"]
UNALIKE += [("fedas", {"batch_size": 1}), ("pfedhn", {"descriptor": "class_shares"})]


@pytest.mark.parametrize(("method", "settings"), UNALIKE)
def test_who_has_far_more_examples_than_the_others_is_not_lost(
    method: str, settings: dict[str, Any]
) -> None:
    """By nothing that it sums or counts over them."""
    task = make_task(examples=(900, 3, 4, 3))
    after(method, bound=RobustConfig().reply_bound, task=task, **settings)


class SecondIsLost(Faults):
    def drops(self, seed: int, call: Call) -> bool:
        return call.client == 2


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc", "pefll", "itpfl"])
def test_a_rule_is_of_the_clients_of_one_size_and_of_those_that_are_there(method: str) -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}

    def state(rule: Rule) -> trees.Tree:
        task = make_task(examples=(8,) * 5, models=models, sizes=("S", "L", "S", "L", "S"))
        ours = Federation(method, task, {"faults": SecondIsLost()}, **short(method))
        for number in range(2):
            with trees.aggregating(rule):
                assert list(ours.round(range(5), number).state.lost) == [2]
        return snapshot(ours)

    mean, trimmed = state(aggregation.MEAN), state(Rule("trimmed_mean", 0.0))
    torch.testing.assert_close(trimmed, mean, rtol=1e-8, atol=1e-11)


def middle(rows: torch.Tensor) -> torch.Tensor:
    return rows.median(dim=0).values


def clipped(rows: torch.Tensor) -> torch.Tensor:
    away = rows - middle(rows)
    length = away.norm(dim=1, keepdim=True)
    return middle(rows) + (away * (length.median() / length).clamp(max=1).nan_to_num(1)).mean(dim=0)


@pytest.mark.parametrize(("reduction", "times"), [("mean", 1), ("sum", 3)])
@pytest.mark.parametrize(("rule", "by_hand"), [("median", middle), ("norm_clip", clipped)])
def test_of_a_hypernetwork_it_is_the_rule_of_what_each_delta_is_pulled_back_to(
    rule: Any, by_hand: Callable[[torch.Tensor], torch.Tensor], reduction: str, times: int
) -> None:
    """For the sum it is as many times what stands for the mean."""
    rate = 0.5
    server = {"lr": rate, "momentum": 0.0, "weight_decay": 0.0, "clip": None}
    server |= {"cohort_reduction": reduction}
    ours = Federation("pfedhn", make_task(), **ONE_STEP, **server)
    hyper_net, embeddings = ours.server.hyper_net, ours.server.embeddings.weight
    parameters = dict(hyper_net.named_parameters())
    pulled, own = [], []
    for client in (0, 1, 3):
        made = hyper_net(embeddings[client : client + 1], "base")
        model = {name: value[0].detach().requires_grad_() for name, value in made.items()}
        loss = client_loss(ours.task, client, model)
        delta = torch.autograd.grad(loss, list(model.values()))  # times the rate of one local step
        inner = sum((made[n][0] * 0.1 * d).sum() for n, d in zip(model, delta, strict=True))
        *shared, mine = torch.autograd.grad(inner, [*parameters.values(), embeddings])
        pulled.append(torch.cat([gradient.flatten() for gradient in shared]))
        own.append(mine / 3 * times)
    weights = torch.cat([value.detach().flatten() for value in parameters.values()])
    expected = weights - rate * times * by_hand(torch.stack(pulled))
    rows = embeddings.detach() - rate * sum(own)
    with trees.aggregating(Rule(rule)):
        ours.round([0, 1, 3])
    found = torch.cat([value.detach().flatten() for value in parameters.values()])
    close(found, expected)
    close(ours.server.embeddings.weight.detach(), rows)


def test_of_fedavg_it_is_the_median_of_what_clients_trained() -> None:
    ours = Federation("fedavg", make_task(), **ONE_STEP)
    start = trees.clone(ours.server.model["base"])
    trained = []
    for client in range(3):
        model = {name: value.clone().requires_grad_() for name, value in start.items()}
        client_loss(ours.task, client, model).backward()
        trained.append({name: (value - 0.1 * value.grad).detach() for name, value in model.items()})
    with trees.aggregating(Rule("median")):
        ours.round([0, 1, 2])
    expected = {n: torch.stack([each[n] for each in trained]).median(0).values for n in start}
    close(ours.server.model["base"], expected)


def test_what_clients_compute_is_theirs_whatever_the_rule() -> None:
    """FedFomo's clients mix models by a mean with weights of their own."""
    torch.testing.assert_close(
        snapshot(after("fedfomo", Rule("median"))), snapshot(after("fedfomo")), rtol=0, atol=0
    )


def test_a_trace_below_zero_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAS weighs a body by what its client says; -1 times the others' would divide by zero."""
    honest = Federation("fedas", make_task(), **short("fedas"))
    trained = METHODS["fedas"].Client.fisher_trace
    monkeypatch.setattr(
        METHODS["fedas"].Client,
        "fisher_trace",
        lambda self, model: trained(self, model) * (-1e6 if self.id == 1 else 1),
    )
    lying = Federation("fedas", make_task(), **short("fedas"))
    lying.round([0, 1, 2])
    honest.round([0, 2])
    torch.testing.assert_close(lying.server.body, honest.server.body, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["pfedhn", "itpfl"])
def test_how_far_away_one_embedding_is_moves_no_newcomer_under_a_rule(method: str) -> None:
    """Its client alone trains it, with whatever it answers; newcomers begin at what is usual."""
    ours = Federation(method, make_task(novel=1), **short(method, novel_rounds=1))
    ours.round([0, 1, 2])

    def made(rule: Rule, entry: float) -> torch.Tensor:
        with torch.no_grad():
            ours.server.embeddings.weight[0] = entry
        with trees.aggregating(rule):
            return torch.cat([value.flatten() for value in ours.personal(3).values()])

    close(made(Rule("median"), 1e12), made(Rule("median"), 1e15))
    assert made(aggregation.MEAN, 1e9).norm() > 100 * made(aggregation.MEAN, 1e6).norm()


def test_how_far_away_one_descriptor_is_moves_no_centre_under_a_rule() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def others(rule: Rule, entry: float) -> torch.Tensor:
        rows[4] = entry
        with trees.aggregating(rule):
            centred: torch.Tensor = Centred(3).fitted(rows)(rows[:4])
        return centred.std(dim=0)

    close(others(Rule("median"), 1e12), others(Rule("median"), 1e15))
    assert others(Rule("median"), 1e12).min() > 0.3
    assert others(aggregation.MEAN, 1e12).max() < 1e-6

"""pFedHN for unlabelled novel clients, against each known client's model run by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import config as configuration
from hyperfed.errors import UserError
from hyperfed.evaluation import evaluate
from hyperfed.federation import EVALUATION_BATCH
from toys import Federation, client_loss, logits, make_task

SETTINGS: dict[str, Any] = {"local_steps": 10, "batch_size": 8, "local_lr": 0.05, "lr": 0.02}
NOVEL = 3


def federation(kind: str) -> Federation:
    """Three known clients whose models differ, and a novel one without training labels."""
    ours = Federation("pfedhn", make_task(novel=1, unlabelled=True), **SETTINGS, novel_models=kind)
    for number in range(30):
        ours.round([number % 3], number)
    return ours


def outputs(ours: Federation) -> tuple[Tensor, Tensor]:
    """(models, B, classes) of all known clients on the novel one's test data, and its labels."""
    index = ours.task.test[NOVEL]
    net, x = ours.task.models["base"], ours.task.x[index]
    found = [logits(net, ours.personal(client), x) for client in range(3)]
    return torch.stack(found).detach(), ours.task.y[index]


def test_sampled_counts_the_mean_over_all_models() -> None:
    ours = federation("sampled")
    found = evaluate(ours.server, ours.engine, [NOVEL], 9, novel=True)["test"]
    each, y = outputs(ours)
    correct = torch.stack([(output.argmax(1) == y).double().sum() for output in each])
    assert len(correct.unique()) > 1  # so that one model alone would show
    assert found.correct.item() == pytest.approx(correct.mean().item())
    losses = [float(F.cross_entropy(output, y)) * len(y) for output in each]
    assert found.loss.item() == pytest.approx(sum(losses) / 3)
    assert found.count.item() == len(y) <= EVALUATION_BATCH


def test_ensemble_averages_the_outputs() -> None:
    ours = federation("ensemble")
    found = evaluate(ours.server, ours.engine, [NOVEL], 9, novel=True)["test"]
    each, y = outputs(ours)
    mean = each.mean(0)
    assert found.correct.item() == (mean.argmax(1) == y).sum()
    assert found.loss.item() == pytest.approx(float(F.cross_entropy(mean, y)) * len(y))
    sampled = federation("sampled")
    other = evaluate(sampled.server, sampled.engine, [NOVEL], 9, novel=True)["test"]
    assert found.loss.item() < other.loss.item()  # by convexity


def test_known_clients_use_their_own_model_all_the_same() -> None:
    losses = []
    for kind in ("fit", "sampled", "ensemble"):
        ours = federation(kind)
        found = evaluate(ours.server, ours.engine, [1], 9)["test"]
        losses.append(found.loss.item())
        assert client_loss(ours.task, 1, ours.personal(1)).isfinite()
    assert len(set(losses)) == 1


def test_a_pool_is_all_models_and_no_more() -> None:
    ours = federation("ensemble")
    cohort = ours.engine.cohort([NOVEL], 9, training=False, fresh=True)
    cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))
    one = sum(parameter.numel() for parameter in ours.task.models["base"].parameters()) * 8
    assert [exchange.down for exchange in cohort.state.exchanges] == [3 * one]


def test_errors() -> None:
    with pytest.raises(
        UserError, match="must be one, but novel_models='sampled' uses those of all"
    ):
        federation("sampled").personal(NOVEL, fresh=True)
    for other in ({"head_layers": 1}, {"descriptor": "class_proportions"}):
        with pytest.raises(UserError, match="'ensemble' needs whole models made from learned"):
            configuration.from_keys("pfedhn", {"method": {"novel_models": "ensemble", **other}})

"""pFedHN for unlabelled novel clients, against each known client's model run by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hyperfed
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH
from hyperfed.methods.parts import pools
from hyperfed.runs import config as configuration
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import seeded
from toys import CLASSES, Federation, TwoLayers, client_loss, close, logits, make_task

SETTINGS: dict[str, Any] = {"local_steps": 10, "batch_size": 8, "local_lr": 0.05, "lr": 0.02}
NOVEL = 3


def federation(kind: str, **options: Any) -> Federation:
    """Three known clients whose models differ, and a novel one without training labels."""
    task = make_task(novel=1, unlabelled=True, **options)
    ours = Federation("pfedhn", task, **SETTINGS, novel_models=kind)
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
    found = evaluate(ours.server, ours.engine, [NOVEL], 9)["test"]
    each, y = outputs(ours)
    correct = torch.stack([(output.argmax(1) == y).double().sum() for output in each])
    assert len(correct.unique()) > 1  # so that one model alone would show
    assert found.correct.item() == pytest.approx(correct.mean().item())
    losses = [float(F.cross_entropy(output, y)) * len(y) for output in each]
    assert found.loss.item() == pytest.approx(sum(losses) / 3)
    assert found.count.item() == len(y) <= EVALUATION_BATCH


def test_sampled_counts_the_mean_of_each_class_too() -> None:
    ours = federation("sampled", metrics=("f1",))
    cohort = ours.engine.cohort([NOVEL], 9, training=False)
    found = cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))["test"]
    each, y = outputs(ours)
    counts = [
        torch.stack([torch.bincount(of, minlength=CLASSES) for of in (y, said, y[said == y])])
        for said in (output.argmax(1) for output in each)
    ]
    expected = torch.stack(counts).double().mean(dim=0)
    torch.testing.assert_close(found["classes"][0], expected)


def test_ensemble_averages_the_outputs() -> None:
    ours = federation("ensemble")
    found = evaluate(ours.server, ours.engine, [NOVEL], 9)["test"]
    each, y = outputs(ours)
    mean = each.mean(0)
    assert found.correct.item() == (mean.argmax(1) == y).sum()
    assert found.loss.item() == pytest.approx(float(F.cross_entropy(mean, y)) * len(y))
    sampled = federation("sampled")
    other = evaluate(sampled.server, sampled.engine, [NOVEL], 9)["test"]
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
    cohort = ours.engine.cohort([NOVEL], 9, training=False)
    cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))
    one = sum(parameter.numel() for parameter in ours.task.models["base"].parameters()) * 8
    assert [exchange.down for exchange in cohort.state.exchanges] == [3 * one]


def test_errors() -> None:
    with pytest.raises(
        UserError, match="must be one, but novel_models='sampled' uses those of all"
    ):
        federation("sampled").personal(NOVEL)
    for other in ({"head_layers": 1}, {"descriptor": "class_proportions"}):
        with pytest.raises(UserError, match="'ensemble' needs whole models made from learned"):
            configuration.from_keys("pfedhn", {"method": {"novel_models": "ensemble", **other}})


# The nearest


def nearest_federation(**options: Any) -> Federation:
    """Known clients around different means; the novel one is where client 1 is."""
    task = make_task(novel=1, **({"unlabelled": True} | options))
    for client, by in {0: -3.0, 1: 3.0, 3: 3.0}.items():
        for split in (task.train, task.val, task.test):
            task.x[split[client]] += by
    ours = Federation("pfedhn", task, **SETTINGS, novel_models="nearest")
    for number in range(6):
        ours.round([number % 3], number)
    return ours


def check_nearest() -> None:
    ours = nearest_federation()
    model = ours.personal(NOVEL)
    torch.testing.assert_close(model, ours.personal(1), rtol=0, atol=0)
    for other in (0, 2):
        assert any(not torch.equal(model[name], ours.personal(other)[name]) for name in model)
    found = evaluate(ours.server, ours.engine, [NOVEL], 9)["test"]
    index = ours.task.test[NOVEL]
    output = logits(ours.task.models["base"], ours.personal(1), ours.task.x[index])
    assert found.correct.item() == (output.argmax(1) == ours.task.y[index]).sum()


def test_the_nearest_known_clients_model_is_sent() -> None:
    check_nearest()


def test_labels_of_the_novel_client_do_not_matter() -> None:
    labelled, unlabelled = nearest_federation(unlabelled=False), nearest_federation()
    models = [ours.personal(NOVEL) for ours in (labelled, unlabelled)]
    torch.testing.assert_close(*models, rtol=0, atol=0)


def test_one_model_travels_and_known_clients_are_sent_classifiers_alone() -> None:
    ours = nearest_federation()
    cohort = ours.engine.cohort([NOVEL], 9, training=False)
    cohort.ask(ours.method.Client.export, ours.server.personalize(cohort))
    one = sum(parameter.numel() for parameter in ours.task.models["base"].parameters()) * 8
    *_, last = cohort.state.exchanges
    assert (last.step, last.client, last.down) == ("export", NOVEL, one)
    steps = {e.step for e in cohort.state.exchanges if e.client != NOVEL}
    assert steps == {"input_moments", "separation_gradient", "separation_error"}
    asked = [e.step for e in cohort.state.exchanges if e.client == NOVEL]
    assert asked.count("separation_gradient") == ours.config.distance_steps - 1  # the means are one


def sizes(*names: str) -> dict[str, Any]:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    return {"models": models, "sizes": names}


def test_only_known_clients_of_the_same_size_have_a_model_for_a_novel_one() -> None:
    ours = nearest_federation(**sizes("S", "L", "S", "S"))  # client 1 is the nearest of all
    model = ours.personal(NOVEL)
    torch.testing.assert_close(model, ours.personal(2), rtol=0, atol=0)
    ours = federation("ensemble", **sizes("S", "L", "S", "S"))
    pool = ours.server.personalize(ours.engine.cohort([NOVEL], 9, training=False))["pool"]
    expected = trees.stack([ours.personal(client) for client in (0, 2)])
    close(pool, expected)


@pytest.mark.parametrize("kind", ["sampled", "ensemble", "nearest"])
def test_without_a_known_client_of_its_size_a_novel_one_is_told_so(kind: str) -> None:
    ours = federation(kind, **sizes("S", "S", "S", "L"))
    with pytest.raises(UserError, match="but none runs L; set novel_models='fit'"):
        ours.personal(NOVEL)


def test_a_newcomer_is_served_by_the_clients_of_the_run() -> None:
    ours = nearest_federation()
    method = SETTINGS | {"novel_models": "nearest"}
    run = hyperfed.train(
        "pfedhn", ours.task, progress=False, rounds=6, evaluate_every=6, cohort=1, method=method
    )
    served = run.personalize(ours.task.x[ours.task.train[NOVEL]])
    nearest, other = run.model(1), run.model(2)
    torch.testing.assert_close(trees.model_of(served), trees.model_of(nearest), rtol=0, atol=0)
    assert not torch.equal(served.head.weight, other.head.weight)
    assert run.summary["novel_accuracy"] is not None


def test_mutant_the_farthest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pools.a_distance
    monkeypatch.setattr(pools, "a_distance", lambda *arguments: -right(*arguments))
    with pytest.raises(AssertionError):
        check_nearest()

"""IT-PFL-HN, what a client is served: a known one by phase 1, a novel one by its inputs alone."""

from typing import Any

import pytest
import torch

import hyperfed
from finished_runs import Finished
from hyperfed import trees
from hyperfed.analysis import budgets
from hyperfed.federation import Cohort
from hyperfed.methods import itpfl
from hyperfed.runs import evaluation
from hyperfed.runs.config import to_dict
from hyperfed.system.randomness import generator, seeded
from hyperfed.training import UnlabelledError
from methods.itpfl.checks import (
    LENGTH,
    SETTINGS,
    UNITS,
    NormedInputs,
    encode,
    encoder_of,
    federation,
    generated,
    inputs,
)
from toys import CLASSES, FEATURES, Normed, TwoLayers, close, make_task


def check_serving() -> None:
    ours = federation(unlabelled=True)
    ours.round([0, 1, 2], 0)
    known = ours.personal(1)
    ours.round([0, 1, 2], 1)
    server = ours.server
    torch.testing.assert_close(ours.personal(1), known, rtol=0, atol=0)
    expected = generated(server.hyper_net, server.embeddings.weight[1])
    close(known, expected)
    descriptor = encode(encoder_of(ours), inputs(ours, 3))
    expected = generated(server.novel_net, descriptor)
    close(ours.personal(3), expected)


def test_old_clients_keep_phase_one_and_an_unlabelled_novel_one_uses_phase_two() -> None:
    check_serving()


def test_only_training_a_model_reads_labels() -> None:
    ours = federation(unlabelled=True)
    cohort = ours.engine.cohort([3], 0, training=False)
    target = {"embedding": torch.zeros(LENGTH, dtype=torch.float64)}
    batches = ours.config.batches
    cohort.ask(itpfl.Client.train_encoder, encoder_of(ours), target, batches=batches)
    cohort.ask(itpfl.Client.describe, encoder_of(ours))
    model = ours.task.outline().initial()
    with pytest.raises(UnlabelledError):
        cohort.ask(itpfl.Client.train_model, model, batches=batches)


def test_a_descriptor_is_the_mean_over_batches_of_all_inputs() -> None:
    ours = federation(settings={"batch_size": 4})
    cohort = ours.engine.cohort([3], 5, training=False)
    x = inputs(ours, 3)  # 9 examples: batches of 4 and 5, in an order of the client's own
    order = torch.randperm(9, generator=generator(0, "client", 3, 5, "describe", 0))
    parts = [(encode(encoder_of(ours), x[b]), len(b)) for b in order.split([4, 5])]
    expected = sum(row * size for row, size in parts) / 9
    close(ours.server.describe(cohort)[0], expected)


def test_a_bounded_descriptor_is_the_plain_mean_whatever_the_batches() -> None:
    for size in (4, 100):
        ours = federation(settings={"batch_size": size, "private": True})
        cohort = ours.engine.cohort([3], 0, training=False)
        expected = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
        close(ours.server.describe(cohort)[0], expected)
        assert expected.norm() <= 1


def test_a_descriptor_is_told_by_statistics_that_batch_norm_keeps_and_changes_none() -> None:
    ours = federation(net=NormedInputs)
    ours.round([0, 1, 2], 0)
    sent, x = encoder_of(ours), inputs(ours, 3)
    before = trees.clone(sent)
    cohort = ours.engine.cohort([3], 1, training=False)
    (descriptor,) = cohort.ask(itpfl.Client.describe, sent)["descriptor"]
    torch.testing.assert_close(sent, before, rtol=0, atol=0)
    weight, bias, mean, variance = (
        before[f"features.0.norm.{name}"]
        for name in ("weight", "bias", "running_mean", "running_var")
    )
    normed = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
    expected = encode(before, normed)
    close(descriptor, expected)


def test_what_travels() -> None:
    ours = federation()
    parameters = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
    encoder = (FEATURES * UNITS + UNITS + UNITS * 4 + 4 + 4 * LENGTH + LENGTH) * 8

    def exchanges(cohort: Any) -> list[tuple[str, int, int]]:
        return [(e.step, e.down, e.up) for e in cohort.state.exchanges]

    model, descriptor = ("train_model", parameters, parameters), ("describe", encoder, LENGTH * 8)
    learning = [model, ("train_encoder", encoder + LENGTH * 8, encoder)]
    assert exchanges(ours.round([1], 0)) == learning
    assert exchanges(ours.round([1], 1)) == [descriptor, model]
    cohort = ours.engine.cohort([3], 2, training=False)
    ours.server.personalize(cohort)
    assert exchanges(cohort) == [descriptor]


def test_batch_norm_statistics_are_those_of_the_clients_inputs() -> None:
    for client in (1, 3):  # known and novel
        ours = federation(net=Normed, unlabelled=True)
        ours.round([0, 1], 0)
        model = ours.personal(client)
        hidden = inputs(ours, client) @ model["body.weight"].T + model["body.bias"]
        close(model["norm.running_mean"], hidden.mean(0))
        close(model["norm.running_var"], hidden.var(0))
        assert ours.engine.memory.get(client, {}) == {}


def test_one_encoder_serves_several_target_sizes() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    ours = federation(models=models, sizes=("S", "L", "S", "L"))
    for number in range(2):
        ours.round([0, 1, 2], number)
    server = ours.server
    expected = server.novel_net(encode(encoder_of(ours), inputs(ours, 3))[None], "L")
    model = ours.personal(3)
    assert "norm.weight" in expected
    for name, value in expected.items():
        close(model[name], value[0].detach())


def test_the_best_round_is_chosen_by_known_clients_served_as_novel_ones() -> None:
    """By what they use, phase 2 would never look better than phase 1."""
    run = hyperfed.train(
        "itpfl",
        make_task(novel=1, examples=(12, 7, 20, 9)),
        progress=False,
        rounds=6,
        cohort=3,
        evaluate_every=1,
        method=SETTINGS | {"phase_one_rounds": 3, "local_steps": 5},
    )
    val = {e.round: e.accuracy for e in run.evaluations if e.split == "val"}
    assert val[3] == val[4] == val[5] == val[6]
    with run._at_best() as server:
        counts = evaluation.evaluate(server, run.engine, [0, 1, 2], 6, serve=server.rehearse)["val"]
    assert run.best.value == pytest.approx(float(counts.correct.sum() / counts.count.sum()))
    rehearsed = {e.round: e.accuracy for e in run.evaluations if e.split == "rehearsal"}
    assert list(rehearsed) == [1, 2, 3, 4, 5, 6]
    assert rehearsed[run.best.round] == run.best.value == max(rehearsed.values())
    longer = Finished(to_dict(run.config), {**run.summary, "rounds": 7}, tuple(run.evaluations))
    found = budgets.within(longer, budgets.Budget("rounds", 6))
    assert found.summary["best_round"] == run.best.round


# A mutant: the check of serving fails on it, so much it is worth


def test_old_clients_with_weights_of_phase_two_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def personalize(self: Any, clients: Cohort) -> Any:
        net = self.novel_net
        vector = self.describe(clients) if clients.novel else self.embed(clients).detach()
        return itpfl.Each(trees.detach(net(vector, clients.size)))

    monkeypatch.setattr(itpfl.Server, "personalize", personalize)
    with pytest.raises(AssertionError):
        check_serving()

"""IT-PFL-HN, the encoder: averaged steps towards the embeddings, and what it explains of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hyperfed
from hyperfed import trees
from hyperfed.engines import Faults
from methods.itpfl.checks import (
    LENGTH,
    NormedInputs,
    check_encoder,
    encode,
    encoder_of,
    federation,
    inputs,
    of_known,
    state,
)
from toys import FEATURES, TwoLayers, close, make_task


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"private": True},
        {"epsilon": 0.3},  # bounded too, and without noise
        {"encoder_reduction": "sum"},
        {"local_clip": 1e-2},
        {"standardize": True},
    ],
)
def test_the_encoder_is_fedavg_of_steps_towards_the_embeddings(settings: dict[str, Any]) -> None:
    check_encoder([0, 1, 2], **settings)


def test_what_standardises_embeddings_does_not_depend_on_who_takes_part() -> None:
    check_encoder([1], standardize=True)


def test_what_does_not_vary_is_not_divided_by_zero() -> None:
    ours = federation(settings={"standardize": True})
    with torch.no_grad():
        ours.server.embeddings.weight[:, 1] = 0.7
    cohort = ours.engine.cohort([3], 0, training=False)
    mean, deviation = of_known(ours)
    deviation[1] = 1.0
    expected = encode(encoder_of(ours), inputs(ours, 3)) * deviation + mean
    close(ours.server.describe(cohort)[0], expected)


def check_fedadam(net: Any, **settings: Any) -> None:
    """By its formulas; statistics of batch-norm are no change, they are averaged."""
    learning = settings | {"phase_one_rounds": 3}
    theirs = learning | {"encoder_optimizer": "adam", "encoder_server_lr": 0.03}
    ours, average = (federation(net=net, settings=own) for own in (theirs, learning))
    names = set(trees.parameters_of(ours.server.encoder))
    first = {name: torch.zeros_like(value) for name, value in encoder_of(ours).items()}
    second = trees.clone(first)
    for number, clients in enumerate([[0, 1, 2], [1], [0, 2]]):
        average.server.load(trees.clone(state(ours)))
        before = encoder_of(ours)
        for each in (ours, average):
            each.round(clients, number)
        expected = encoder_of(average)
        for name in names:
            change = before[name] - expected[name]
            first[name] = 0.9 * first[name] + 0.1 * change
            second[name] = 0.999 * second[name] + 0.001 * change**2
            m = first[name] / (1 - 0.9 ** (number + 1))
            v = second[name] / (1 - 0.999 ** (number + 1))
            expected[name] = before[name] - 0.03 * m / (v.sqrt() + 1e-8)
        close(encoder_of(ours), expected)


@pytest.mark.parametrize("net", [TwoLayers, NormedInputs])
def test_the_encoders_averaged_change_is_descended_by_adam(net: Any) -> None:
    check_fedadam(net)


def test_fedadam_has_no_weight_decay() -> None:
    """That of the server is the hypernetwork's."""
    check_fedadam(TwoLayers, weight_decay=0.1)


def test_the_encoder_has_the_momentum_and_decay_of_local_training() -> None:
    ours = federation(settings={"local_steps": 3, "local_momentum": 0.9, "local_weight_decay": 0.1})
    expected = encoder_of(ours)
    leaves = [value.requires_grad_() for value in expected.values()]
    e = ours.server.embeddings.weight[1].detach().clone()
    sgd = torch.optim.SGD(leaves, ours.config.encoder_lr, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        sgd.zero_grad()
        (encode(expected, inputs(ours, 1)) - e).square().mean().backward()
        sgd.step()
    ours.round([1], 0)
    close(encoder_of(ours), trees.detach(expected))


def test_training_brings_descriptors_to_the_embeddings() -> None:
    ours = federation(
        settings={"phase_one_rounds": 100, "local_steps": 5, "encoder_lr": 0.02 * LENGTH}
    )
    for client in range(3):  # clients that can be told apart
        ours.task.x[ours.task.train[client]] += 3 * torch.eye(FEATURES, dtype=torch.float64)[client]

    def distance() -> float:
        pairs = [(encode(encoder_of(ours), inputs(ours, i)), i) for i in range(3)]
        return sum(
            float((g - ours.server.embeddings.weight[i]).detach().square().sum()) for g, i in pairs
        )

    before = distance()
    for number in range(25):
        ours.round([0, 1, 2], number)
    assert distance() < 0.3 * before


def test_an_encoder_that_phase_two_cannot_use_is_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = federation(settings={"batch_size": 100})  # one batch: a descriptor has no luck in it
    cohort = ours.engine.cohort([0, 1, 2], 0, training=False)
    ours.server.rehearse(cohort)
    assert ours.server.diagnostics() == {}  # it may still learn
    ours.server.tuning = torch.tensor(True)
    descriptor = ours.server.describe(cohort)
    with torch.no_grad():  # an encoder that has learned everything
        ours.server.embeddings.weight[:3] = descriptor
    ours.server.rehearse(cohort)
    assert ours.server.diagnostics()["explained"] == 1
    last = "layers.2.weight"  # one that says the same of all
    torch.nn.init.zeros_(ours.server.encoder.get_parameter(last))
    embedding = ours.server.embeddings.weight.detach()[:3]
    embedding[0] += torch.tensor([1.0, -2.0, 4.0])  # entries of different variances
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    for training, there in ((False, [0, 1, 2]), (True, [0, 2])):  # who is lost has no descriptor
        caplog.clear()
        ours.server.rehearse(ours.engine.cohort([0, 1, 2], 0, training=training))
        own = embedding[there]
        missed = (own - ours.server.describe(cohort)[there]).square().sum()
        missed /= (own - own.mean(dim=0)).square().sum()
        assert ours.server.diagnostics()["explained"].item() == pytest.approx((1 - missed).item())
        assert f"the encoder explains {100 * (1 - missed):.0f} % of the variance" in caplog.text
        assert len(caplog.records) == 1


def test_what_is_explained_is_of_all_clients_whatever_groups_they_are_served_in() -> None:
    settings = {"batch_size": 100}
    sizes = {"models": {"S": TwoLayers().double(), "L": TwoLayers().double()}}
    ours = federation(settings=settings, sizes=("S", "L", "S", "S"), **sizes)
    ours.server.tuning = torch.tensor(True)
    groups = ours.engine.cohort([0, 1, 2], 0, training=False).sizes
    for group in groups.values():
        ours.server.rehearse(group)
    told = torch.cat([ours.server.describe(group) for group in groups.values()])
    embedding = ours.server.embeddings.weight.detach()[torch.cat([g.ids for g in groups.values()])]
    missed = (embedding - told).square().sum()
    missed /= (embedding - embedding.mean(dim=0)).square().sum()
    assert ours.server.diagnostics()["explained"].item() == pytest.approx((1 - missed).item())


def test_a_standardised_descriptor_explains_embeddings_in_their_own_units(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = federation(settings={"batch_size": 100, "standardize": True})
    cohort = ours.engine.cohort([0, 1, 2], 0, training=False)
    said = torch.stack([encode(encoder_of(ours), inputs(ours, i)) for i in range(3)])
    mean, deviation = said.mean(dim=0), said.std(dim=0, correction=0)
    last = ours.server.encoder.layers[2]
    with torch.no_grad():  # an encoder that tells standardised embeddings, of another size
        last.weight /= deviation[:, None]
        last.bias.copy_((last.bias - mean) / deviation)
        ours.server.embeddings.weight[:] = 0.3 * (said - mean) / deviation + 2
    ours.server.tuning = torch.tensor(True)
    ours.server.rehearse(cohort)
    assert ours.server.diagnostics()["explained"].item() == pytest.approx(1)
    assert caplog.text == ""


def test_novel_clients_have_no_embedding_to_be_explained(caplog: pytest.LogCaptureFixture) -> None:
    ours = federation(novel=2)
    ours.server.tuning = torch.tensor(True)
    novel = ours.engine.cohort(list(ours.task.novel_ids), 0, training=False)
    assert len(ours.server.personalize(novel).tree["body.weight"]) == 2
    assert ours.server.diagnostics() == {}
    assert caplog.text == ""


def test_an_evaluation_records_what_is_explained_by_the_encoder_that_it_judges() -> None:
    """After the first round of three the encoder still learns."""
    run = hyperfed.train(
        "itpfl",
        make_task(),
        rounds=3,
        evaluate_every=1,
        method={"phase_one_rounds": 2, "local_steps": 1},
        progress=False,
    )
    told = [e.diagnostics for e in run.evaluations if e.split == "val"]
    assert ["explained" in each for each in told] == [False, False, True]


def test_a_run_tells_what_its_encoder_explains_also_when_it_is_opened_again(tmp_path: Path) -> None:
    task, method = make_task(), {"phase_one_rounds": 1, "local_steps": 1}
    options = {"rounds": 2, "evaluate_every": 2, "method": method}
    run = hyperfed.train("itpfl", task, **options, out=tmp_path, progress=False)
    assert run.folder is not None
    (told,) = (e.diagnostics["explained"] for e in run.evaluations if e.split == "val")
    for each in (run, hyperfed.open_run(run.folder.path, task)):
        assert each.diagnostics()["explained"].item() == pytest.approx(told, rel=1e-3)

"""IT-PFL-HN: each phase's update by one-piece autograd, what a novel client is served, privacy."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from finished_runs import Finished
from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Cohort
from hyperfed.methods import itpfl
from hyperfed.methods.parts import hypernet_training
from hyperfed.privacy import GaussianMechanism, analytic_multiplier
from hyperfed.runs import budgets, evaluation
from hyperfed.runs.config import from_keys, to_dict
from hyperfed.runs.run import Run
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    logits,
    make_task,
)

CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
UNITS, LENGTH = 6, 3
PFEDHN: dict[str, Any] = {
    "cohort_reduction": "mean",
    "embedding_lr": None,
    "embedding_weight_decay": None,
}
"""Phase 1 with the server's step of pFedHN."""
SETTINGS: dict[str, Any] = (
    PFEDHN
    | ONE_STEP
    | {
        "hidden": 7,
        "hidden_layers": 1,
        "lr": 0.5,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "embedding_size": LENGTH,
        "encoder_units": UNITS,
        "encoder_lr": 0.2,
        "phase_one_rounds": 1,
        "embedding_start": 1.0,
        "encoder_optimizer": "average",
        "standardize": False,
    }
)
"""And FedAvg of an encoder that tells embeddings as they are, drawn from N(0, 1)."""


class NormedInputs(torch.nn.Module):
    """Batch-norm where the encoder has it too: before the first linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.body = torch.nn.Linear(FEATURES, 4)
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(self.norm(x))))
        return output


def federation(**options: Any) -> Federation:
    settings = SETTINGS | options.pop("settings", {})
    return Federation("itpfl", make_task(**({"novel": 1} | options)), **settings)


def encode(weights: Mapping[str, Tensor], x: Tensor, *, bounded: bool = False) -> Tensor:
    """The encoder on the trunk of ``TwoLayers``: (B, features) -> (l,)."""
    h = torch.tanh(x @ weights["features.0.body.weight"].T + weights["features.0.body.bias"])
    if not bounded:
        h = torch.cat([h[:, : UNITS // 2].mean(0), h[:, UNITS // 2 :].max(0).values])
    h = torch.relu(h @ weights["layers.0.weight"].T + weights["layers.0.bias"])
    h = h @ weights["layers.2.weight"].T + weights["layers.2.bias"]
    return (h / h.norm(dim=1, keepdim=True)).mean(0) if bounded else h


def encoder_of(ours: Federation) -> dict[str, Tensor]:
    """A copy of the encoder's weights."""
    return trees.model_of(ours.server.encoder)


def inputs(ours: Federation, client: int) -> Tensor:
    return ours.task.x[ours.task.train[client]]


def of_known(ours: Federation) -> tuple[Tensor, Tensor]:
    """Mean and deviation, (l,) each, of the three known clients' embeddings."""
    rows = ours.server.embeddings.weight.detach()
    mean = (rows[0] + rows[1] + rows[2]) / 3
    return mean, ((rows - mean).square().sum(dim=0) / 3).sqrt()


def state(ours: Federation) -> dict[str, Any]:
    return trees.clone(ours.server.state(optimizers=False))


def check_descent(
    ours: Federation, net: str, clients: list[int], describe: Callable[[int], Tensor], number: int
) -> None:
    """One round is one step on the mean, or sum, of L_i(h(v_i)), seen by autograd in one piece.

    With one plain local step of rate eta, delta = eta times the gradient, so descending the
    pull-back is gradient descent with rate lr * eta. Its clipping counts all that moves, and
    precedes weight decay.
    """
    server, config = ours.server, ours.config
    together = 1 if config.cohort_reduction == "sum" else len(clients)
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        generated = getattr(server, net)(describe(client)[None])
        model = {name: value[0] for name, value in generated.items()}
        objective = objective + client_loss(ours.task, client, model) / together
    named = dict(getattr(server, net).named_parameters())
    if net == "hyper_net":
        named["v"] = server.embeddings.weight
    gradients = torch.autograd.grad(config.local_lr * objective, list(named.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    scale = (config.clip / (norm + 1e-6)).clamp(max=1)
    expected = {}
    for (name, value), gradient in zip(named.items(), gradients, strict=True):
        lr, decay = config.lr, config.weight_decay
        if name == "v":
            lr = config.embedding_lr or lr
            decay = (
                decay if config.embedding_weight_decay is None else config.embedding_weight_decay
            )
        expected[name] = (value - lr * (scale * gradient + decay * value)).detach()
    ours.round(clients, number)
    after = dict(getattr(server, net).named_parameters()) | {"v": server.embeddings.weight}
    after = {name: after[name].detach() for name in expected}
    torch.testing.assert_close(after, expected, **CLOSE)


# Phase 1


def check_phase_one(clients: list[int], **settings: Any) -> None:
    ours = federation(settings=settings)

    def describe(client: int) -> Tensor:
        e: Tensor = ours.server.embeddings.weight[client]
        return e / e.norm() if ours.config.bounded else e

    check_descent(ours, "hyper_net", clients, describe, 0)
    # Until phase 2 begins, novel clients use the same hypernetwork.
    descriptor = encode(encoder_of(ours), inputs(ours, 3), bounded=ours.config.bounded)
    served = generated(ours.server.hyper_net, descriptor)
    torch.testing.assert_close(ours.personal(3, fresh=True), served, **CLOSE)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
def test_phase_one_is_pfedhns_gradient_in_one_piece(clients: list[int], private: bool) -> None:
    check_phase_one(clients, private=private)


@pytest.mark.parametrize("settings", [{"hyper_net": "chunks", "chunk": 7}, {"head_rank": 2}])
def test_so_it_is_with_every_kind_of_hypernetwork(settings: dict[str, Any]) -> None:
    check_phase_one([0, 1, 2], **settings)


DESCENTS: list[dict[str, Any]] = [
    {"cohort_reduction": "sum"},
    {"clip": 1e-3},  # a hundredth of the gradient's norm, or less
    {"cohort_reduction": "sum", "clip": 1e-3, "weight_decay": 0.2},
    {"weight_decay": 0.2, "embedding_weight_decay": 0.3, "embedding_lr": 0.4},
    {"weight_decay": 0.2, "embedding_weight_decay": 0.0},
]
"""The server's step: equations 7 and 9 are sums, and embeddings have their own rate and decay."""


@pytest.mark.parametrize("settings", DESCENTS)
def test_the_servers_step_is_by_sum_or_mean_clipped_and_decayed(settings: dict[str, Any]) -> None:
    check_phase_one([0, 1, 2], **settings)
    check_phase_two([0, 1, 2], **settings)


def test_the_papers_preset_is_its_text() -> None:
    """Appendix C: 500 steps of a tenth of the clients, the grids; equations 7 to 9 are sums."""
    run = from_keys("itpfl", {"preset": "paper"})
    own, rates = run.settings, {1e-1, 5e-2, 1e-2, 5e-3, 1e-3}
    assert (run.rounds, run.cohort, run.task.val, run.task.novel) == (500, 0.1, 0.15, 0.1)
    assert (own.hidden, own.hidden_layers, own.encoder_units) == (100, 3, 200)
    assert (own.cohort_reduction, own.encoder_reduction) == ("sum", "sum")
    assert {own.lr, own.embedding_lr, own.local_lr, own.encoder_lr} <= rates
    decays = {own.weight_decay, own.embedding_weight_decay, own.local_weight_decay}
    assert decays <= {1e-3, 1e-4, 1e-5}
    assert own.local_epochs in {1, 2, 5, 10}
    assert own.batch_size in {32, 64}
    assert own.local_momentum == 0.9
    assert (own.encoder, own.encoder_optimizer, own.standardized) == (
        "regression",
        "average",
        False,
    )
    assert own.embedding_start == 1.0  # as of PyTorch's embeddings, and of pFedHN's


def test_the_defaults_are_what_makes_embeddings_tell_of_their_clients() -> None:
    own = from_keys("itpfl", {}).settings
    found = (own.embedding_start, own.embedding_lr, own.embedding_weight_decay)
    assert found == (0.05, 1.0, 0.0)
    assert (own.encoder, own.encoder_optimizer) == ("regression", "adam")
    assert (own.cohort_reduction, own.encoder_server_lr, own.standardized) == ("sum", 1e-3, True)


def test_phase_one_is_pfedhn() -> None:
    """From the same start, over several rounds, with momentum, weight decay and local steps."""
    theirs = {"local_steps": 4, "batch_size": 6, "local_lr": 0.05, "hidden": 7}
    ours = Federation("itpfl", make_task(), **theirs, **PFEDHN, encoder_units=UNITS)
    pfedhn = Federation("pfedhn", make_task(), **theirs)
    ours.server.hyper_net.load_state_dict(pfedhn.server.hyper_net.state_dict())
    ours.server.embeddings.load_state_dict(pfedhn.server.embeddings.state_dict())
    for number, clients in enumerate([[0], [1, 2], [0, 3]]):
        ours.round(clients, number)
        pfedhn.round(clients, number)
    for name in ("hyper_net", "embeddings"):
        torch.testing.assert_close(state(ours)[name], state(pfedhn)[name], **CLOSE)


def check_encoder(clients: list[int], **settings: Any) -> None:
    """FedAvg, by training examples, of one clipped step each on |g(x) - e_i|^2, or that / l."""
    ours = federation(settings=settings)
    bounded = ours.config.bounded
    before = encoder_of(ours)
    count = torch.tensor([len(inputs(ours, i)) for i in clients], dtype=torch.float64)
    assert len(count.unique()) == len(clients)  # unequal, so that a wrong weight shows
    expected = {name: torch.zeros_like(value) for name, value in before.items()}
    for client, share in zip(clients, count / count.sum(), strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in before.items()}
        e = ours.server.embeddings.weight[client].detach().clone()
        e = e / e.norm() if bounded else e
        if ours.config.standardized:
            mean, deviation = of_known(ours)
            e = (e - mean) / deviation
        squares = (encode(leaves, inputs(ours, client), bounded=bounded) - e).square()
        distance = squares.sum() if ours.config.encoder_reduction == "sum" else squares.mean()
        gradients = torch.autograd.grad(distance, list(leaves.values()))
        if (bound := ours.config.local_clip) is not None:
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            assert norm > 2 * bound
            gradients = tuple(gradient * bound / (norm + 1e-6) for gradient in gradients)
        for name, gradient in zip(leaves, gradients, strict=True):
            expected[name] += share * (before[name] - ours.config.encoder_lr * gradient)
    ours.round(clients, 0)
    torch.testing.assert_close(encoder_of(ours), expected, **CLOSE)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"private": True},
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
    cohort = ours.engine.cohort([3], 0, training=False, fresh=True)
    mean, deviation = of_known(ours)
    deviation[1] = 1.0
    expected = encode(encoder_of(ours), inputs(ours, 3)) * deviation + mean
    torch.testing.assert_close(ours.server.describe(cohort)[0], expected, **CLOSE)


def test_embeddings_start_as_wide_as_is_said() -> None:
    wide, narrow = (federation(settings={"embedding_start": start}) for start in (1.0, 0.05))
    expected = 0.05 * wide.server.embeddings.weight
    torch.testing.assert_close(narrow.server.embeddings.weight, expected, **CLOSE)


@pytest.mark.parametrize("net", [TwoLayers, NormedInputs])
def test_the_encoders_averaged_change_is_descended_by_adam(net: Any) -> None:
    """FedAdam by its formulas; statistics of batch-norm are no change, they are averaged."""
    learning = {"phase_one_rounds": 3}
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
        torch.testing.assert_close(encoder_of(ours), expected, **CLOSE)


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
    torch.testing.assert_close(encoder_of(ours), trees.detach(expected), **CLOSE)


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
    descriptor = ours.server.describe(cohort)
    with torch.no_grad():  # an encoder that has learned everything
        ours.server.embeddings.weight[:3] = descriptor
    ours.server.tuning = torch.tensor(True)
    ours.server.rehearse(cohort)
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    ours.server.rehearse(ours.engine.cohort([0, 1, 2], 0, training=True))
    assert caplog.text == ""  # who is lost has no descriptor
    last = "layers.2.weight"  # one that says the same of all
    torch.nn.init.zeros_(ours.server.encoder.get_parameter(last))
    ours.server.tuning = torch.tensor(False)
    ours.server.rehearse(cohort)
    assert caplog.text == ""  # it may still learn
    assert ours.server.diagnostics() == {}
    ours.server.tuning = torch.tensor(True)
    embedding = ours.server.embeddings.weight.detach()[:3]
    embedding[0] += torch.tensor([1.0, -2.0, 4.0])  # entries of different variances
    ours.server.rehearse(cohort)
    missed = (embedding - ours.server.describe(cohort)).square().sum()
    missed /= (embedding - embedding.mean(dim=0)).square().sum()
    assert f"explains {100 * (1 - missed):.0f} %" in caplog.text
    assert ours.server.diagnostics()["explained"].item() == pytest.approx((1 - missed).item())
    assert "% of the variance of the clients' embeddings" in caplog.text


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
    assert caplog.text == ""


def test_novel_clients_have_no_embedding_to_be_explained(caplog: pytest.LogCaptureFixture) -> None:
    ours = federation(novel=2)
    ours.server.tuning = torch.tensor(True)
    novel = ours.engine.cohort(list(ours.task.novel_ids), 0, training=False, fresh=True)
    assert len(ours.server.personalize(novel).tree["body.weight"]) == 2
    assert caplog.text == ""


def two_classes_each(clients: int = 30, classes: int = 6, examples: int = 24) -> Task:
    """Clients that differ in their two classes alone, which lie apart."""
    draw = torch.Generator().manual_seed(3)
    center = 2 * torch.randn(classes, 8, generator=draw, dtype=torch.float64)
    own = torch.stack([torch.randperm(classes, generator=draw)[:2] for _ in range(clients)])
    y = own.gather(1, torch.randint(2, (clients, examples), generator=draw)).flatten()
    x = center[y] + torch.randn(len(y), 8, generator=draw, dtype=torch.float64)
    rows = list(torch.arange(len(y)).split(examples))
    with seeded(0, "two classes"):
        models = {"base": torch.nn.Linear(8, classes).double()}
    return Task("two classes", x, y, rows, rows, rows, models, classes)


def explained(embedding: Tensor, proportions: Tensor) -> float:
    """R2 of linear regression of class proportions on embeddings, each client left out once."""
    error = torch.zeros((), dtype=torch.float64)
    for client in range(len(embedding)):
        others = torch.arange(len(embedding)) != client
        padded = torch.nn.functional.pad(embedding, (0, 1), value=1.0)
        fit = torch.linalg.lstsq(padded[others], proportions[others]).solution
        error += (padded[client] @ fit - proportions[client]).square().sum()
    return 1 - float(error / (proportions - proportions.mean(dim=0)).square().sum())


def test_class_proportions_explain_embeddings_by_default_and_not_as_drawn() -> None:
    task = two_classes_each()
    counts = [torch.bincount(task.y[rows], minlength=6) for rows in task.train]
    proportions = torch.stack(counts).double() / 24
    few = {"local_steps": 1, "batch_size": 24, "local_lr": 0.2, "hidden": 20, "hidden_layers": 1}
    paper = {key[7:]: value for key, value in itpfl.PRESETS["paper"].items() if "method" in key}
    found = []
    for settings in ({}, {key: paper[key] for key in paper if "embedding" in key or "lr" in key}):
        ours = Federation("itpfl", task, **(settings | few), encoder_units=4)
        for number in range(12):
            ours.round(list(range(number % 3, 30, 3)), number)
        found.append(explained(ours.server.embeddings.weight.detach(), proportions))
    default, drawn = found
    assert default > 0.3
    assert drawn < 0


# Phase 2


def check_phase_two(clients: list[int], **settings: Any) -> None:
    ours = federation(settings=settings)
    ours.round([0, 1, 2], 0)
    before = state(ours)
    bounded = ours.config.bounded

    def describe(client: int) -> Tensor:
        descriptor = encode(encoder_of(ours), inputs(ours, client), bounded=bounded)
        assert not descriptor.requires_grad
        if ours.config.standardized:  # the encoder speaks of standardised embeddings: undone
            mean, deviation = of_known(ours)
            descriptor = descriptor * deviation + mean
        return descriptor

    check_descent(ours, "novel_net", clients, describe, 1)
    for frozen in ("encoder", "embeddings", "hyper_net"):
        torch.testing.assert_close(state(ours)[frozen], before[frozen], rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings", [{}, {"private": True}, {"epsilon": 0.3}, {"standardize": True}]
)
@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
def test_phase_two_is_the_one_piece_gradient_through_the_frozen_encoder(
    clients: list[int], settings: dict[str, Any]
) -> None:
    """Without noise even where novel clients add some: training is not private (section 7)."""
    check_phase_two(clients, **settings)


def test_momentum_and_weight_decay_of_the_two_phases_are_apart() -> None:
    ours = federation(settings={"momentum": 0.9})
    ours.round([0, 1], 0)
    before = state(ours)["hyper_net"]
    ours.round([0, 1], 1)
    torch.testing.assert_close(state(ours)["hyper_net"], before, rtol=0, atol=0)
    other = federation(settings={"momentum": 0.9})
    other.server.load(trees.clone(ours.server.state()))
    for each in (ours, other):  # resumed within phase 2, it goes on with the same momentum
        each.round([0, 2], 2)
    torch.testing.assert_close(state(ours), state(other), rtol=0, atol=0)


def test_phase_two_goes_on_from_its_own_network() -> None:
    """Its second round too is a step from where the first ended, not from phase 1."""
    ours = federation()
    for number in range(2):
        ours.round([0, 1, 2], number)

    def describe(client: int) -> Tensor:
        return encode(encoder_of(ours), inputs(ours, client))

    check_descent(ours, "novel_net", [0, 2], describe, 2)


def test_a_first_round_of_phase_two_that_all_miss_changes_nothing() -> None:
    unlucky, other = federation(), federation()
    for ours in (unlucky, other):
        ours.round([0, 1, 2], 0)
    before = state(unlucky)
    unlucky.engine.faults = Faults(drop=1.0)
    with pytest.raises(AllLostError):
        unlucky.round([0, 1], 1)
    torch.testing.assert_close(state(unlucky), before, rtol=0, atol=0)
    unlucky.engine.faults = Faults()
    for ours in (unlucky, other):
        ours.round([0, 2], 2)
    torch.testing.assert_close(state(unlucky), state(other), rtol=0, atol=0)


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_run_abandoned_in_either_phase_resumes_to_the_same_numbers(
    stop: int, tmp_path: Path
) -> None:
    short = {"phase_one_rounds": 3, "local_steps": 2, "batch_size": 4, "encoder_units": UNITS}
    keys = {"rounds": 6, "cohort": 2, "evaluate_every": 2, "checkpoint_every": 1, "method": short}
    whole = hyperfed.train("itpfl", make_task(novel=1), progress=False, **keys)
    run = Run.start(from_keys("itpfl", keys), tmp_path, make_task(novel=1))
    for progress in run.train():
        if progress.round == stop:
            run.stop()
    (folder,) = (tmp_path / "itpfl").iterdir()
    resumed = hyperfed.resume(folder, make_task(novel=1))
    found = [[vars(e) | {"seconds": 0} for e in each.evaluations] for each in (whole, resumed)]
    assert found[0] == found[1]
    assert whole.summary["novel_accuracy"] == resumed.summary["novel_accuracy"]
    torch.testing.assert_close(whole.server.state(), resumed.server.state(), rtol=0, atol=0)


def test_a_client_lost_in_phase_two_equals_one_never_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lossy, smaller = federation(), federation()
    for ours in (lossy, smaller):
        ours.round([0, 1, 2], 0)
    after_the_descriptor = {"count": 0}

    def second_is_lost(faults: Faults, seed: int, call: Call) -> bool:
        if call.client == 1:
            after_the_descriptor["count"] += 1
            return after_the_descriptor["count"] == 2
        return False

    monkeypatch.setattr(Faults, "drops", second_is_lost)
    cohort = lossy.round([0, 1, 2], 1)
    assert list(cohort.state.lost) == [1]
    smaller.round([0, 2], 1)
    torch.testing.assert_close(state(lossy), state(smaller), rtol=1e-12, atol=1e-14)


# End to end


def check_end_to_end(clients: list[int], **settings: Any) -> None:
    """One round is gradient descent on the mean, or sum, of L_i(h(g(x_i))), by one-piece autograd.

    The hypernetwork steps by its own rate and the encoder, always by the mean, by its own.
    """
    ours = federation(settings={"encoder": "end_to_end"} | settings)
    server, config = ours.server, ours.config
    leaves = {name: value.requires_grad_() for name, value in encoder_of(ours).items()}
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        descriptor = encode(leaves, inputs(ours, client), bounded=config.bounded)
        made = {name: value[0] for name, value in server.hyper_net(descriptor[None]).items()}
        objective = objective + client_loss(ours.task, client, made) / len(clients)
    of_net, of_encoder = dict(server.hyper_net.named_parameters()), list(leaves.values())
    gradients = torch.autograd.grad(objective * config.local_lr, [*of_net.values(), *of_encoder])
    together = len(clients) if config.cohort_reduction == "sum" else 1
    expected_net = {
        name: (value - config.lr * together * gradient).detach()
        for (name, value), gradient in zip(of_net.items(), gradients, strict=False)
    }
    changes = gradients[len(of_net) :]
    if config.encoder_optimizer == "adam":  # its first step is the sign, but for epsilon
        changes = [change / (change.abs() + 1e-8) for change in changes]
    rate = config.encoder_server_lr if config.encoder_optimizer == "adam" else config.encoder_lr
    expected = {
        name: (value - rate * change).detach()
        for (name, value), change in zip(leaves.items(), changes, strict=True)
    }
    ours.round(clients, 0)
    torch.testing.assert_close(dict(server.hyper_net.named_parameters()), expected_net, **CLOSE)
    torch.testing.assert_close(encoder_of(ours), expected, **CLOSE)
    assert len(server.embeddings.weight) == 0


@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
@pytest.mark.parametrize(
    "settings",
    [{}, {"private": True}, {"cohort_reduction": "sum"}, {"encoder_optimizer": "adam"}],
)
def test_end_to_end_is_the_one_piece_gradient(clients: list[int], settings: dict[str, Any]) -> None:
    check_end_to_end(clients, **settings)


def test_end_to_end_a_client_lost_on_the_way_equals_one_never_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = {"left": 0}

    def loses_client_1(faults: Faults, seed: int, call: Call) -> bool:
        calls["left"] -= call.client == 1
        return call.client == 1 and calls["left"] == 0

    smaller = federation(settings={"encoder": "end_to_end"})
    smaller.round([0, 2], 0)
    monkeypatch.setattr(Faults, "drops", loses_client_1)
    for message in (1, 2, 3):  # its descriptor, its delta, its gradient of the encoder
        calls["left"] = message
        lossy = federation(settings={"encoder": "end_to_end"})
        assert list(lossy.round([0, 1, 2], 0).state.lost) == [1]
        torch.testing.assert_close(state(lossy), state(smaller), rtol=1e-12, atol=1e-14)


def test_end_to_end_a_round_that_all_miss_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = federation(settings={"encoder": "end_to_end"})
    before, calls = state(ours), {"count": 0}

    def loses_last(faults: Faults, seed: int, call: Call) -> bool:
        calls["count"] += 1
        return calls["count"] == 3

    monkeypatch.setattr(Faults, "drops", loses_last)
    with pytest.raises(AllLostError):
        ours.round([1], 0)
    assert calls["count"] == 3
    torch.testing.assert_close(state(ours), before, rtol=0, atol=0)


def test_end_to_end_known_clients_are_served_by_their_inputs_and_phase_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = federation(settings={"encoder": "end_to_end", "standardize": None}, unlabelled=True)
    for number in range(2):
        ours.round([0, 1, 2], number)
    server, encoder = ours.server, encoder_of(ours)
    known = generated(server.hyper_net, encode(encoder, inputs(ours, 1)))
    torch.testing.assert_close(ours.personal(1), known, **CLOSE)
    novel = generated(server.novel_net, encode(encoder, inputs(ours, 3)))
    torch.testing.assert_close(ours.personal(3, fresh=True), novel, **CLOSE)
    assert not torch.allclose(server.novel_net.trunk[0].weight, server.hyper_net.trunk[0].weight)
    rehearsed = server.rehearse(ours.engine.cohort([0, 1], 2, training=False)).tree
    novel = generated(server.novel_net, encode(encoder, inputs(ours, 1)))
    torch.testing.assert_close(trees.take(rehearsed, 1), novel, **CLOSE)
    assert caplog.text == ""  # there is no embedding to be explained


def test_end_to_end_serves_several_sizes_and_averages_batch_norm() -> None:
    """Each reply is the gradient of a client's own descriptor, whatever its size and place."""
    with seeded(0, "sizes"):
        models = {"S": NormedInputs().double(), "L": TwoLayers().double()}
    ours = federation(models=models, sizes=("S", "L", "S", "L"), settings={"encoder": "end_to_end"})
    server, config, before = ours.server, ours.config, encoder_of(ours)
    network = copy.deepcopy(server.encoder)
    mean = {name: torch.zeros_like(v) for name, v in trees.parameters_of(network).items()}
    buffers = {name: torch.zeros_like(v) for name, v in trees.buffers_of(network).items()}
    for client in (0, 1, 2):
        trees.fill(network, before)
        size = ours.task.size_of(client)
        made = server.hyper_net(network.train()(inputs(ours, client))[None], size)
        own = {name: value[0] for name, value in made.items()}
        start = {name: own.get(name, v) for name, v in models[size].state_dict().items()}
        index = ours.task.train[client]
        output = logits(models[size], start, ours.task.x[index])
        loss = config.local_lr * torch.nn.functional.cross_entropy(output, ours.task.y[index]) / 3
        pulled = torch.autograd.grad(loss, list(network.parameters()))
        mean = {name: mean[name] + g for name, g in zip(mean, pulled, strict=True)}
        buffers = {n: buffers[n] + v / 3 for n, v in network.named_buffers()}
    assert buffers
    ours.round([0, 1, 2], 0)
    expected = {name: before[name] - config.encoder_lr * g for name, g in mean.items()}
    after = encoder_of(ours)
    torch.testing.assert_close({n: after[n] for n in mean}, expected, **CLOSE)
    found = {n: v.double() for n, v in after.items() if n in buffers}
    torch.testing.assert_close(found, {n: v.double() for n, v in buffers.items()}, **CLOSE)


def test_end_to_end_what_travels() -> None:
    ours = federation(settings={"encoder": "end_to_end"})
    parameters = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
    encoder = (FEATURES * UNITS + UNITS + UNITS * 4 + 4 + 4 * LENGTH + LENGTH) * 8
    cohort = ours.round([1], 0)
    assert [(e.step, e.down, e.up) for e in cohort.state.exchanges] == [
        ("describe_batch", encoder, LENGTH * 8),
        ("train_model", parameters, parameters),
        ("encoder_gradient", LENGTH * 8, encoder),
    ]


# What a client is served


def generated(net: Any, descriptor: Tensor) -> dict[str, Tensor]:
    return {name: value[0].detach() for name, value in net(descriptor[None]).items()}


def check_serving() -> None:
    ours = federation(unlabelled=True)
    ours.round([0, 1, 2], 0)
    known = ours.personal(1)
    ours.round([0, 1, 2], 1)
    server = ours.server
    torch.testing.assert_close(ours.personal(1), known, rtol=0, atol=0)
    expected = generated(server.hyper_net, server.embeddings.weight[1])
    torch.testing.assert_close(known, expected, **CLOSE)
    descriptor = encode(encoder_of(ours), inputs(ours, 3))
    expected = generated(server.novel_net, descriptor)
    torch.testing.assert_close(ours.personal(3, fresh=True), expected, **CLOSE)


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
    cohort = ours.engine.cohort([3], 5, training=False, fresh=True)
    x = inputs(ours, 3)  # 9 examples: batches of 4 and 5, in an order of the client's own
    order = torch.randperm(9, generator=generator(0, "client", 3, 5, "describe", 0))
    parts = [(encode(encoder_of(ours), x[b]), len(b)) for b in order.split([4, 5])]
    expected = sum(row * size for row, size in parts) / 9
    torch.testing.assert_close(ours.server.describe(cohort)[0], expected, **CLOSE)


def test_a_bounded_descriptor_is_the_plain_mean_whatever_the_batches() -> None:
    for size in (4, 100):
        ours = federation(settings={"batch_size": size, "private": True})
        cohort = ours.engine.cohort([3], 0, training=False, fresh=True)
        expected = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
        torch.testing.assert_close(ours.server.describe(cohort)[0], expected, **CLOSE)
        assert expected.norm() <= 1


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
    cohort = ours.engine.cohort([3], 2, training=False, fresh=True)
    ours.server.personalize(cohort)
    assert exchanges(cohort) == [descriptor]


def test_batch_norm_statistics_are_those_of_the_clients_inputs() -> None:
    for client in (1, 3):  # known and novel
        ours = federation(net=Normed, unlabelled=True)
        ours.round([0, 1], 0)
        model = ours.personal(client, fresh=client == 3)
        hidden = inputs(ours, client) @ model["body.weight"].T + model["body.bias"]
        torch.testing.assert_close(model["norm.running_mean"], hidden.mean(0), **CLOSE)
        torch.testing.assert_close(model["norm.running_var"], hidden.var(0), **CLOSE)
        assert ours.engine.memory.get(client, {}) == {}


def test_one_encoder_serves_several_target_sizes() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    ours = federation(models=models, sizes=("S", "L", "S", "L"))
    for number in range(2):
        ours.round([0, 1, 2], number)
    server = ours.server
    expected = server.novel_net(encode(encoder_of(ours), inputs(ours, 3))[None], "L")
    model = ours.personal(3, fresh=True)
    assert "norm.weight" in expected
    for name, value in expected.items():
        torch.testing.assert_close(model[name], value[0].detach(), **CLOSE)


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


# Privacy


@pytest.mark.parametrize("other", [{"private": True}, {"epsilon": 0.3}, {"encoder": "end_to_end"}])
def test_embeddings_that_cannot_be_told_standardised_are_not(other: dict[str, Any]) -> None:
    assert from_keys("itpfl", {}).settings.standardized
    assert not from_keys("itpfl", {"method": other}).settings.standardized
    with pytest.raises(UserError, match="must be told by an encoder that is not bounded"):
        from_keys("itpfl", {"method": other | {"standardize": True}})


def reply_of(ours: Federation, client: int, round: int = 7) -> Tensor:
    """The descriptor that leaves a client."""
    fresh = client in ours.task.novel_ids
    cohort = ours.engine.cohort([client], round, training=False, fresh=fresh)
    reply: Tensor = cohort.ask(itpfl.Client.describe, encoder_of(ours))["descriptor"][0]
    return reply


def check_noise() -> None:
    """What leaves a novel client has noise of the calibrated size; nothing is added later."""
    settings = {"epsilon": 0.3, "budget": 30.0, "embedding_size": 20}
    ours = federation(settings=settings)
    clean = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
    noise = torch.cat([reply_of(ours, 3, number) - clean for number in range(100)])
    sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
    assert noise.std().item() == pytest.approx(sigma, rel=0.06)  # four standard errors
    assert abs(noise.mean().item()) < 4 * sigma / len(noise) ** 0.5
    cohort = ours.engine.cohort([3], 7, training=False, fresh=True)
    received = ours.server.describe(cohort)[0]
    torch.testing.assert_close(received, reply_of(ours, 3), rtol=0, atol=0)
    expected = generated(ours.server.novel_net, received)
    cohort = ours.engine.cohort([3], 7, training=False, fresh=True)
    sent = trees.take(ours.server.personalize(cohort).tree, 0)
    torch.testing.assert_close(sent, expected, **CLOSE)
    known = encode(encoder_of(ours), inputs(ours, 1), bounded=True)
    torch.testing.assert_close(reply_of(ours, 1), known, **CLOSE)


def test_a_novel_client_adds_the_noise_before_it_sends() -> None:
    check_noise()


def test_without_sigma_there_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noiseless = federation(settings={"private": True})
    expected = noiseless.personal(3, fresh=True)
    noisy = federation(settings={"epsilon": 0.3})
    assert not torch.allclose(noisy.personal(3, fresh=True)["head.bias"], expected["head.bias"])
    monkeypatch.setattr(GaussianMechanism, "sigma", lambda self, sensitivity: 0.0)
    noisy.engine.released.clear()
    torch.testing.assert_close(noisy.personal(3, fresh=True), expected, rtol=0, atol=0)


def test_more_data_needs_less_noise() -> None:
    errors = []
    for count in (10, 100, 1000):
        ours = federation(examples=(5, 5, 5, count), settings={"epsilon": 0.3})
        clean = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
        errors.append((reply_of(ours, 3) - clean).norm().item())
    # The draw is another, as the order of the samples is drawn first; the scale is 1 / n.
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_replacing_a_sample_moves_what_is_sent_by_at_most_2_over_n() -> None:
    ours = federation(settings={"private": True})
    before = reply_of(ours, 3)
    for which in range(9):
        changed = federation(settings={"private": True})
        changed.task.x[changed.task.train[3][which]] = 1e3 * (-1) ** which
        assert (reply_of(changed, 3) - before).norm() <= 2 / 9


@pytest.mark.parametrize("fresh", [False, True])
def test_no_client_answers_beyond_its_budget_whatever_it_is_said_to_remember(fresh: bool) -> None:
    ours = federation(settings={"epsilon": 0.3, "budget": 0.5})
    said = []
    for number in (0, 1, 1, 0):  # the same question again is answered alike
        ours.engine.memory = {}
        said.append(reply_of(ours, 3, number))
        cohort = ours.engine.cohort([3], number, training=False, fresh=fresh)
        torch.testing.assert_close(ours.server.describe(cohort)[0], said[-1], rtol=0, atol=0)
    assert torch.equal(said[0], said[3])
    assert torch.equal(said[1], said[2])
    assert len(ours.engine.released[3]["multipliers"]) == 2
    with pytest.raises(UserError, match=r"within epsilon 0\.5 .* after 2 of them"):
        ours.server.personalize(ours.engine.cohort([3], 2, training=False, fresh=fresh))
    ours.round([0, 1, 2], 1)  # nobody else is concerned
    assert ours.engine.released.keys() == {3}


def test_another_encoder_is_another_question_with_other_noise() -> None:
    """Of one noise for both, the difference of two answers would tell what is behind them."""
    ours = federation(settings={"epsilon": 0.3, "budget": 5.0})
    encoder = encoder_of(ours)
    other = trees.tree_map(lambda leaf: leaf + 1e-12, encoder)
    said = []
    for sent in (encoder, other):
        cohort = ours.engine.cohort([3], 0, training=False, fresh=True)
        said.append(cohort.ask(itpfl.Client.describe, sent)["descriptor"][0])
    sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
    assert (said[0] - said[1]).norm() > 0.1 * sigma
    assert len(ours.engine.released[3]["multipliers"]) == 2


def test_weights_that_overflow_do_not_tell_whose_sample_did() -> None:
    """A sample that gives NaN would make the whole answer NaN, whatever the noise."""
    ours = federation(settings={"epsilon": 0.3, "private": True})
    huge = trees.tree_map(lambda leaf: leaf * 1e200, encoder_of(ours))
    cohort = ours.engine.cohort([0, 3], 0, training=False)
    assert cohort.ask(itpfl.Client.describe, huge)["descriptor"].isfinite().all()


def test_the_server_says_how_private_it_is() -> None:
    assert federation().server.privacy() is None
    assert Federation("pfedhn", make_task()).server.privacy() is None
    record = federation(settings={"epsilon": 0.3}).server.privacy()
    assert record is not None
    assert (record["epsilon_of_an_answer"], record["delta"]) == (0.3, 0.01)
    assert record["mechanism"] == "gaussian, analytic calibration"


# Mutants: the checks above fail on them, so much they are worth


def flipped(sent: trees.Tree, trained: trees.Tree) -> trees.Tree:
    return trees.tree_map(torch.neg, trees.subtract(sent, trained))


def unweighted(tree: trees.Tree, weight: Tensor) -> trees.Tree:
    return trees.weighted_mean(tree, weight.sign())


def halved(model: Any, delta: Any, weight: Tensor) -> None:
    trees.pull_back(model, delta, weight / 2)


def summed_regression(module: Any, target: Tensor, reduction: str) -> Any:
    return lambda model, batch: ((module(batch.x) - target).square().sum(), {})


@pytest.mark.parametrize(
    ("place", "name", "mutant", "check"),
    [
        (itpfl, "subtract", flipped, lambda: check_phase_one([2])),
        (itpfl, "subtract", flipped, lambda: check_phase_two([2])),
        (hypernet_training, "pull_back", halved, lambda: check_phase_one([2])),
        (hypernet_training, "pull_back", halved, lambda: check_phase_two([2])),
        (itpfl, "weighted_mean", unweighted, lambda: check_encoder([0, 1, 2])),
        (itpfl, "regression", summed_regression, lambda: check_encoder([0, 1, 2])),
    ],
)
def test_a_wrong_update_is_caught(
    place: Any,
    name: str,
    mutant: Any,
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check()


def test_an_encoder_that_trains_in_phase_two_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_phase_two([2], phase_one_rounds=2)


def test_mutant_a_network_that_never_left_its_start_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Novel clients of phase 1 served from the copy that phase 2 is to tune."""
    monkeypatch.setattr(itpfl.Server, "novel_net", property(lambda self: self.tuned_net))
    with pytest.raises(AssertionError):
        check_phase_one([2])


def test_old_clients_with_weights_of_phase_two_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def personalize(self: Any, clients: Cohort) -> Any:
        net = self.novel_net
        vector = self.describe(clients) if clients.novel else self.embed(clients).detach()
        return itpfl.Each(trees.detach(net(vector, clients.size)))

    monkeypatch.setattr(itpfl.Server, "personalize", personalize)
    with pytest.raises(AssertionError):
        check_serving()


def no_noise(self: Any, value: Tensor, sensitivity: float) -> Tensor:
    return value


def test_no_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(itpfl.Client, "release", no_noise)
    with pytest.raises(AssertionError):
        check_noise()


def test_noise_of_the_server_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = itpfl.Server.describe

    def noisy(self: Any, clients: Cohort) -> Tensor:
        row = describe(self, clients)
        sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
        return row + sigma * torch.randn(row.shape, generator=generator(0), dtype=row.dtype)

    monkeypatch.setattr(itpfl.Client, "release", no_noise)
    monkeypatch.setattr(itpfl.Server, "describe", noisy)
    with pytest.raises(AssertionError):
        check_noise()


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

"""pFedMe against closed forms on quadratics."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.methods import pfedme
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from hyperfed.task import Task
from hyperfed.training import Batch, proximal
from hyperfed.trees import Model
from toys import (
    EXAMPLES,
    FEATURES,
    PLAIN,
    Federation,
    Normed,
    close,
    make_quadratic_task,
    make_task,
    quadratic,
)

ETA, LAMBDA, RATE = 0.04, 5.0, 0.06
STEPS: dict[str, Any] = PLAIN | {
    "local_steps": 4,
    "batch_size": 5,
    "local_lr": RATE,
    "inner_steps": 3,
    "proximity": LAMBDA,
    "lr": ETA,
}


def vector(model: Model) -> Tensor:
    return model["weight"].squeeze()


def batches(task: Task, client: int, number: int, name: str = "train_model") -> Iterable[Tensor]:
    """Yields the rows of one batch after another, as a step draws them."""
    source, rows = generator(0, "batches", client, number, name, 0), task.train[client]
    while True:
        yield rows[torch.randperm(len(rows), generator=source)[:5]]


def round_by_hand(task: Task, client: int, w: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The client's w and theta after four local rounds."""
    return local_rounds_by_hand(task, w, islice(batches(task, client, number), 4))


def local_rounds_by_hand(
    task: Task, w: Tensor, drawn: Iterable[Tensor], eta: float = ETA
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 with matrices: w and theta after a local round on each of some batches."""
    theta = w
    for rows in drawn:
        a, b = quadratic(task, rows)
        for _ in range(3):
            theta = theta - RATE * (a @ theta - b + LAMBDA * (theta - w))
        w = w - eta * LAMBDA * (w - theta)
    return w, theta


def check_a_round(server_lr: float = 1.0) -> None:
    """The second round, so that what clients did before it would show."""
    task = make_quadratic_task()
    federation = Federation("pfedme", task, **STEPS, server_lr=server_lr)
    federation.round([0, 1, 2], 0)
    start = vector(federation.server.model["base"])
    federation.round([0, 2], 1)
    by_hand = {client: round_by_hand(task, client, start, 1) for client in (0, 2)}
    mean = (by_hand[0][0] + by_hand[2][0]) / 2  # uniform: they have 12 and 20 examples
    expected = (1 - server_lr) * start + server_lr * mean
    close(vector(federation.server.model["base"]), expected)


@pytest.mark.parametrize("server_lr", [1.0, 0.5, 2.0])
def test_a_round_is_the_matrix_formula_averaged_uniformly(server_lr: float) -> None:
    check_a_round(server_lr)


def test_each_local_round_begins_without_momentum() -> None:
    task = make_quadratic_task()
    federation = Federation("pfedme", task, **STEPS | {"local_momentum": 0.9})
    w = theta = vector(task.outline().initial())
    federation.round([2])
    for rows in islice(batches(task, 2, 0), 4):
        a, b = quadratic(task, rows)
        speed = torch.zeros_like(w)
        for _ in range(3):
            speed = 0.9 * speed + a @ theta - b + LAMBDA * (theta - w)
            theta = theta - RATE * speed
        w = w - ETA * LAMBDA * (w - theta)
    close(vector(federation.server.model["base"]), w)


def all_data(**settings: Any) -> Federation:
    """One local round on all data, theta solved to the end."""
    solved = {"local_steps": 1, "batch_size": 10_000, "inner_steps": 400}
    return Federation("pfedme", make_quadratic_task(), **STEPS | solved | settings)


def test_with_many_inner_steps_theta_is_the_proximal_point() -> None:
    federation = all_data()
    w = vector(federation.task.outline().initial())
    a, b = quadratic(federation.task, federation.task.train[1])
    theta = torch.linalg.solve(a + LAMBDA * torch.eye(FEATURES).double(), b + LAMBDA * w)
    close(vector(federation.personal(1)), theta)
    federation.round([1])
    moved = w - ETA * LAMBDA * (w - theta)
    close(vector(federation.server.model["base"]), moved)


def test_w_descends_the_moreau_envelope() -> None:
    """Its gradient by autograd through the closed form of the minimum over theta."""
    federation = all_data()
    start = vector(federation.task.outline().initial())
    federation.round([2])
    a, b = quadratic(federation.task, federation.task.train[2])
    w = start.clone().requires_grad_()
    theta = torch.linalg.solve(a + LAMBDA * torch.eye(FEATURES).double(), b + LAMBDA * w)
    envelope = theta @ a @ theta / 2 - b @ theta + LAMBDA / 2 * (theta - w).square().sum()
    envelope.backward()
    ours = vector(federation.server.model["base"])
    close(ours, start - ETA * w.grad)


# Limits


def test_where_eta_lambda_is_one_w_lands_on_theta() -> None:
    task = make_quadratic_task()
    federation = Federation("pfedme", task, **STEPS | {"lr": 1 / LAMBDA})
    start = vector(task.outline().initial())
    federation.round([0, 1])
    by_hand = (
        local_rounds_by_hand(task, start, islice(batches(task, client, 0), 4), 1 / LAMBDA)
        for client in (0, 1)
    )
    mean = sum(theta for _, theta in by_hand) / 2
    close(vector(federation.server.model["base"]), mean)


def test_without_lambda_w_stays_and_theta_is_trained_alone() -> None:
    task = make_quadratic_task()
    federation = Federation("pfedme", task, **STEPS | {"proximity": 0.0})
    start = federation.task.outline().initial()
    federation.round([0, 1])
    torch.testing.assert_close(federation.server.model["base"], start, rtol=0, atol=0)
    theta = vector(start)
    for rows in islice(batches(task, 1, 99, "adapt"), 4):
        a, b = quadratic(task, rows)
        for _ in range(3):
            theta = theta - RATE * (a @ theta - b)
    close(vector(federation.personal(1)), theta)


def test_with_a_large_lambda_theta_stays_at_w() -> None:
    settings = STEPS | {"proximity": 1e9, "local_lr": 1e-10, "lr": 1e-9, "inner_steps": 200}
    federation = Federation("pfedme", make_quadratic_task(), **settings)
    federation.round([0])
    ours = vector(federation.personal(0))
    start = vector(federation.task.outline().initial())
    torch.testing.assert_close(ours, start, rtol=0, atol=1e-7)


@pytest.mark.parametrize("net", [None, Normed])
def test_without_beta_the_server_stays_and_clients_train(net: Any) -> None:
    task = make_task(net) if net else make_task()
    federation = Federation("pfedme", task, **STEPS, server_lr=0.0)
    start = task.outline().initial()
    federation.round([0, 1])
    torch.testing.assert_close(federation.server.model["base"], start, rtol=0, atol=0)
    assert (federation.personal(0)["head.weight"] - start["head.weight"]).abs().max() > 1e-3


# Which model is evaluated, what travels, what stays


def check_the_evaluated_model() -> None:
    """Of a client that was asked last, of one that was asked before, and of one that never was."""
    task = make_quadratic_task()
    federation = Federation("pfedme", task, **STEPS)
    federation.round([0, 1], 0)
    federation.round([0], 1)
    w = vector(federation.server.model["base"])
    for client in (0, 1, 2):
        _, theta = local_rounds_by_hand(task, w, islice(batches(task, client, 99, "adapt"), 4))
        close(vector(federation.personal(client)), theta)
    torch.testing.assert_close(vector(federation.server.model["base"]), w, rtol=0, atol=0)


def test_a_theta_of_the_latest_global_model_is_evaluated_and_moves_it_nowhere() -> None:
    check_the_evaluated_model()


@pytest.mark.parametrize("net", [None, Normed])
def test_w_goes_down_and_w_comes_up_and_nothing_stays_or_comes_up_of_theta(net: Any) -> None:
    task = make_task(net) if net else make_task()
    federation = Federation("pfedme", task, **STEPS)
    cohort = federation.round([2])
    size = trees.count_bytes(trees.model_of(task.models["base"]))
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)]
    assert not any(federation.engine.memory.values())
    cohort = federation.engine.cohort([0, 2], 99, training=False)
    assert federation.server.personalize(cohort) == {}
    exchanges = [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges]
    assert exchanges == [("adapt", 0, size, 0), ("adapt", 2, size, 0)]
    assert not any(federation.engine.memory.values())


@pytest.mark.parametrize("server_lr", [1.0, 0.5, 4.0])
def test_buffers_are_those_of_thetas_passes_averaged_uniformly(server_lr: float) -> None:
    federation = Federation("pfedme", make_task(Normed), **STEPS, server_lr=server_lr)
    alone = Federation("pfedme", make_task(Normed), **STEPS)
    measured = []
    for client in (0, 2):
        alone.server.model = {"base": alone.task.outline().initial()}
        alone.round([client])
        measured.append(alone.server.model["base"])
    federation.round([0, 2])
    ours = federation.server.model["base"]
    mean = trees.tree_map(lambda *values: sum(values) / 2, *measured)
    share = min(server_lr, 1.0)
    close(ours["norm.running_mean"], share * mean["norm.running_mean"])  # it was zero
    close(ours["norm.running_var"], 1 - share + share * mean["norm.running_var"])  # it was one
    assert ours["norm.num_batches_tracked"] == share * 4 * 3
    start = federation.task.outline().initial()["body.weight"]
    close(ours["body.weight"], start + server_lr * (mean["body.weight"] - start))


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_a_novel_client_fine_tunes_as_in_training_with_a_w_of_its_own_that_moves(unit: str) -> None:
    task = make_quadratic_task(novel=1)
    novel = {"novel_steps": 6} if unit == "steps" else {"novel_epochs": 3}
    federation = Federation("pfedme", task, **STEPS, **novel)
    federation.round([0, 1, 2])
    before = federation.server.model["base"]
    if unit == "steps":
        rows = list(islice(batches(task, 3, 99, "adapt"), 6))
    else:
        source = generator(0, "batches", 3, 99, "adapt", 0)
        orders = [task.train[3][torch.randperm(9, generator=source)] for _ in range(3)]
        rows = [part for order in orders for part in order.split(5)]
    assert len(rows) == 6
    w, theta = local_rounds_by_hand(task, vector(before), rows)
    close(vector(federation.personal(3)), theta)
    assert (w - vector(before)).abs().max() > 0.1  # or a fixed w would pass
    torch.testing.assert_close(federation.server.model["base"], before, rtol=0, atol=0)
    assert 3 not in federation.engine.memory


# Mistakes that the checks above must reject


APPROACH, MOVED = pfedme.Client.approach, pfedme.Client.moved


def center_is_theta(self: pfedme.Client, theta: Model, w: Model, given: Iterable[Batch]) -> Model:
    """One tensor for both: the proximal term vanishes."""
    for batch in given:
        theta = APPROACH(self, theta, theta, [batch])
    return theta


def starts_from_w(self: pfedme.Client, theta: Model, w: Model, given: Iterable[Batch]) -> Model:
    return APPROACH(self, w, w, given)


def onto_theta(self: pfedme.Client, w: Model, theta: Model) -> Model:
    return theta


def away_from_theta(self: pfedme.Client, w: Model, theta: Model) -> Model:
    return {name: 2 * w[name] - value for name, value in MOVED(self, w, theta).items()}


def without_lambda(self: pfedme.Client, w: Model, theta: Model) -> Model:
    return {name: w[name] - ETA * (w[name] - theta[name]) for name in w}


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("approach", center_is_theta),
        ("approach", starts_from_w),
        ("moved", onto_theta),
        ("moved", away_from_theta),
        ("moved", without_lambda),
    ],
)
def test_mutant_that_aliases_or_moves_wrongly(name: str, mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pfedme.Client, name, mutant)
    with pytest.raises(AssertionError):
        check_a_round()


def repelled(objective: Any, center: Model, strength: float, names: Any) -> Any:
    return proximal(objective, center, -strength, names)


def twice_as_near(objective: Any, center: Model, strength: float, names: Any) -> Any:
    return proximal(objective, center, 2 * strength, names)


@pytest.mark.parametrize("mutant", [repelled, twice_as_near])
def test_mutant_of_the_proximal_term(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pfedme, "proximal", mutant)
    with pytest.raises(AssertionError):
        check_a_round()


def by_examples(tree: Model, weight: Tensor, *_: Any) -> Model:
    return trees.weighted_mean(tree, torch.tensor([EXAMPLES[0], EXAMPLES[2], 0.0])[: len(weight)])


def test_mutant_that_weighs_by_examples(monkeypatch: Any) -> None:
    monkeypatch.setattr(pfedme, "weighted_mean", by_examples)
    with pytest.raises(AssertionError):
        check_a_round()


ROUNDS = pfedme.Client.local_rounds


def w_for_theta(self: pfedme.Client, model: Model) -> tuple[Model, Model]:
    w, _ = ROUNDS(self, model)
    return w, w


def the_global_model(self: pfedme.Client, model: Model) -> tuple[Model, Model]:
    return ROUNDS(self, model)[0], model


@pytest.mark.parametrize("mutant", [w_for_theta, the_global_model])
def test_mutant_that_tests_w(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pfedme.Client, "local_rounds", mutant)
    with pytest.raises(AssertionError):
        check_the_evaluated_model()


# Settings


def test_presets() -> None:
    for name in pfedme.PRESETS:
        ours = from_keys("pfedme", pfedme.PRESETS[name]).settings
        assert (ours.proximity, ours.inner_steps, ours.server_lr) == (15.0, 3, 1.0)
    pfedhn, pefll = (from_keys("pfedme", pfedme.PRESETS[name]) for name in ("pfedhn", "pefll"))
    assert pfedhn.settings.local_steps * pfedhn.settings.inner_steps == 60
    assert pefll.settings.novel_batches.count == 20

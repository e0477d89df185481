"""Per-FedAvg against matrix formulas on quadratics and one-piece autograd beyond them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.federation import step
from hyperfed.methods import per_fedavg
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from hyperfed.task import Task
from hyperfed.training import Batch, Sgd, fit
from hyperfed.trees import Model
from toys import (
    ONE_STEP,
    PLAIN,
    Federation,
    Normed,
    client_loss,
    close,
    make_quadratic_task,
    make_task,
    quadratic,
    torch_sgd,
)

VARIANTS = ["first_order", "hessian_free"]
ALPHA = 0.15
STEPS: dict[str, Any] = PLAIN | {
    "local_steps": 3,
    "batch_size": 4,
    "local_lr": 0.2,
    "adapt_lr": ALPHA,
}


def drawn(task: Task, client: int, kind: str, *, number: int = 0, name: str = "train_model") -> Any:
    """Yields the rows of one batch after another, as a step draws them."""
    source, rows = generator(0, kind, client, number, name, 0), task.train[client]
    while True:
        yield rows[torch.randperm(len(rows), generator=source)[:4]]


def trained_by_hand(task: Task, client: int, w: Tensor, variant: str, **local: float) -> Tensor:
    """Algorithm 1 with matrices: (I - alpha A'') (A' (w - alpha (A w - b)) - b') by torch's SGD."""
    inner = drawn(task, client, "batches")
    outer = drawn(task, client, "client")
    w = w.clone().requires_grad_()
    optimizer = torch.optim.SGD([w], **({"lr": 0.2} | local))
    for _ in range(3):
        a, b = quadratic(task, next(inner))
        adapted = w.detach() - ALPHA * (a @ w.detach() - b)
        a, b = quadratic(task, next(outer))
        w.grad = a @ adapted - b
        if variant == "hessian_free":
            a, _ = quadratic(task, next(outer))
            w.grad = w.grad - ALPHA * a @ w.grad
        optimizer.step()
    return w.detach()


def check_a_round(variant: str) -> None:
    task, clients = make_quadratic_task(), [0, 1, 2]
    federation = Federation("per_fedavg", task, **STEPS, variant=variant)
    start = task.outline().initial()["weight"].squeeze()
    federation.round(clients)
    expected = sum(trained_by_hand(task, i, start, variant) for i in clients) / 3
    ours = federation.server.model["base"]["weight"].squeeze()
    close(ours, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_is_the_matrix_formula_averaged_uniformly(variant: str) -> None:
    check_a_round(variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_momentum_and_weight_decay_are_those_of_pytorch(variant: str) -> None:
    task = make_quadratic_task()
    local = {"local_momentum": 0.9, "local_weight_decay": 0.03}
    federation = Federation("per_fedavg", task, **STEPS | local, variant=variant)
    start = task.outline().initial()["weight"].squeeze()
    federation.round([2])
    expected = trained_by_hand(task, 2, start, variant, momentum=0.9, weight_decay=0.03)
    ours = federation.server.model["base"]["weight"].squeeze()
    close(ours, expected)


def meta_gradient(task: Task, client: int, model: Model, *, exact: bool) -> Model:
    """The gradient of f(w - alpha grad f(w)) on all data in one piece, or without the Hessian."""
    w = {name: value.clone().requires_grad_() for name, value in model.items()}
    loss = client_loss(task, client, w)
    inner = torch.autograd.grad(loss, list(w.values()), create_graph=exact)
    adapted = {n: v - ALPHA * g for (n, v), g in zip(w.items(), inner, strict=True)}
    by = torch.autograd.grad(client_loss(task, client, adapted), list(w.values()))
    return dict(zip(w, by, strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_on_all_data_it_descends_maml_or_its_first_order_part(variant: str) -> None:
    task = make_task()
    settings = ONE_STEP | {"adapt_lr": ALPHA, "variant": variant, "difference": 1e-4}
    federation = Federation("per_fedavg", task, **settings)
    start = task.outline().initial()
    federation.round([1])
    exact, first_order = (meta_gradient(task, 1, start, exact=exact) for exact in (True, False))
    ours = trees.tree_map(lambda a, b: (a - b) / 0.1, start, federation.server.model["base"])
    near, far = (exact, first_order) if variant == "hessian_free" else (first_order, exact)
    torch.testing.assert_close(ours, near, rtol=1e-6, atol=1e-8)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours, far, rtol=1e-3, atol=1e-5)


def test_an_epoch_is_one_iteration_for_each_of_its_batches() -> None:
    task = make_task(Normed)
    settings = STEPS | {"local_epochs": 2, "batch_size": 5}
    federation = Federation("per_fedavg", task, **settings)
    federation.round([0])
    iterations = 2 * 3  # 12 examples: batches of 5, 5 and 2
    assert federation.server.model["base"]["norm.num_batches_tracked"] == iterations


def test_with_a_vanishing_alpha_it_is_fedavg() -> None:
    settings = PLAIN | {"local_steps": 4, "batch_size": 10_000, "local_lr": 0.1}
    equal = {"examples": (9, 9, 9, 9)}  # where the mean by examples is the uniform one
    for variant in VARIANTS:
        task = make_task(**equal)
        ours = Federation("per_fedavg", task, **settings, variant=variant, adapt_lr=1e-15)
        fedavg = Federation("fedavg", make_task(**equal), **settings)
        for federation in (ours, fedavg):
            federation.round([0, 1, 3])
        torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=1e-12)


def test_buffers_follow_the_pass_of_the_adapted_model_alone() -> None:
    task = make_task(Normed)
    settings = ONE_STEP | {"adapt_lr": ALPHA, "variant": "hessian_free"}
    federation = Federation("per_fedavg", task, **settings)
    start = task.outline().initial()
    federation.round([0])
    parameters = dict(task.models["base"].named_parameters())
    leaves = {n: v.clone().requires_grad_(n in parameters) for n, v in start.items()}
    client_loss(task, 0, leaves).backward()
    weight, bias = (
        start[name] - ALPHA * leaves[name].grad for name in ("body.weight", "body.bias")
    )
    hidden = task.x[task.train[0]] @ weight.T + bias
    ours = federation.server.model["base"]
    close(ours["norm.running_mean"], 0.1 * hidden.mean(0))
    assert ours["norm.num_batches_tracked"] == 1


# Which model is evaluated, what travels, what stays


def check_the_evaluated_model(novel: bool = False, **local: Any) -> None:
    task = make_quadratic_task(novel=1)
    federation = Federation("per_fedavg", task, **STEPS | local, adapt_steps=3)
    federation.round([0, 1, 2])
    client = 3 if novel else 1
    w = federation.server.model["base"]["weight"].squeeze()
    batches = drawn(task, client, "batches", number=99, name="adapt")
    for _ in range(3):
        a, b = quadratic(task, next(batches))
        w = w - ALPHA * (a @ w - b)
    ours = federation.personal(client)["weight"].squeeze()
    close(ours, w)


@pytest.mark.parametrize("novel", [False, True])
def test_every_client_uses_the_meta_model_after_adapting_it(novel: bool) -> None:
    check_the_evaluated_model(novel)


@pytest.mark.parametrize(
    "local", [{"local_momentum": 0.9}, {"local_weight_decay": 0.5}, {"local_clip": 0.01}], ids=str
)
def test_an_adaptation_has_plain_steps_whatever_the_settings_of_training(
    local: dict[str, float],
) -> None:
    check_the_evaluated_model(**local)


def test_an_adaptation_moves_the_statistics_of_batch_norm() -> None:
    federation = Federation(
        "per_fedavg", make_task(Normed), **ONE_STEP, adapt_lr=ALPHA, adapt_steps=2
    )
    federation.round([0, 1])
    expected = torch_sgd(federation.task, 1, federation.server.model["base"], 2, lr=ALPHA)
    close(federation.personal(1), expected)


def test_what_is_counted_is_the_adapted_model() -> None:
    task = make_quadratic_task()
    federation = Federation("per_fedavg", task, **STEPS)
    federation.round([0, 1])
    cohort = federation.engine.cohort([0, 1], 99, training=False)
    counts = cohort.ask(per_fedavg.Client.evaluate, federation.server.personalize(cohort))
    for position, client in enumerate((0, 1)):
        w, rows = federation.personal(client)["weight"].squeeze(), task.test[client]
        squares = (task.x[rows] @ w - task.y[rows]).square()
        close(counts["test"]["loss"][position], squares.sum() / 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_goes_down_and_a_model_comes_up_and_no_adapted_one_travels(variant: str) -> None:
    task = make_task(Normed)
    federation = Federation("per_fedavg", task, **STEPS, variant=variant)
    size = trees.count_bytes(trees.model_of(task.models["base"]))
    exchanges = federation.round([0, 2]).state.exchanges
    assert [(e.down, e.up) for e in exchanges] == [(size, size)] * 2
    assert federation.engine.memory == {0: {}, 2: {}}
    cohort = federation.engine.cohort([0, 3], 1, training=False)
    assert federation.server.personalize(cohort) == {}
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, 0)] * 2


# Mistakes that the checks above must reject


def the_same_batch_thrice(self: per_fedavg.Client, model: Model, batch: Batch) -> Any:
    self.draw = lambda: batch
    return META_OBJECTIVE(self, model, batch)


META_OBJECTIVE = per_fedavg.Client.meta_objective
HESSIAN_PRODUCT = per_fedavg.Client.hessian_product


@pytest.mark.parametrize("variant", VARIANTS)
def test_mutant_with_the_same_batch_thrice(variant: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(per_fedavg.Client, "meta_objective", the_same_batch_thrice)
    with pytest.raises(AssertionError):
        check_a_round(variant)


@pytest.mark.parametrize("factor", [-1.0, 0.5, 2.0, 1 / ALPHA], ids=str)
def test_mutant_with_another_sign_or_factor_of_the_hessian(factor: float, monkeypatch: Any) -> None:
    def scaled(self: per_fedavg.Client, *given: Model) -> Model:
        return trees.tree_map(lambda leaf: factor * leaf, HESSIAN_PRODUCT(self, *given))

    monkeypatch.setattr(per_fedavg.Client, "hessian_product", scaled)
    with pytest.raises(AssertionError):
        check_a_round("hessian_free")


def alpha_forgotten(start: Model, by: Model, rate: float) -> Model:
    return trees.tree_map(lambda value, direction: value - direction, start, by)


def not_descended(start: Model, by: Model, rate: float) -> Model:
    return start if rate == ALPHA else per_fedavg.descended(start, by, rate)


def ascended(start: Model, by: Model, rate: float) -> Model:
    return trees.tree_map(lambda value, direction: value + rate * direction, start, by)


@pytest.mark.parametrize("mutant", [alpha_forgotten, not_descended, ascended])
def test_mutant_whose_inner_step_is_wrong(mutant: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(per_fedavg, "descended", mutant)
    with pytest.raises(AssertionError):
        check_a_round("first_order")


def adaptation_at(rate: float) -> Callable[..., Any]:
    def adapt(self: per_fedavg.Client, model: Model) -> Model:
        steps = Sgd(rate)
        trained = fit(self.objective, model, self.batches, steps, trainable=self.parameters)
        self.scratch["adapted"] = trained.model
        return {}

    return step(adapt)


@pytest.mark.parametrize("novel", [False, True])
@pytest.mark.parametrize("rate", [0.0, STEPS["local_lr"]], ids=["unadapted", "at_beta"])
def test_mutant_that_tests_the_meta_model_unadapted_or_adapted_at_another_rate(
    rate: float, novel: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(per_fedavg.Client, "adapt", adaptation_at(rate))
    with pytest.raises(AssertionError):
        check_the_evaluated_model(novel)


# Settings


def test_presets() -> None:
    for name, preset in per_fedavg.PRESETS.items():
        ours = from_keys("per_fedavg", preset).settings
        assert (ours.variant, ours.adapt_steps) == ("first_order", 1), name
    assert from_keys("per_fedavg", per_fedavg.PRESETS["pefll"]).settings.local_epochs == 1

"""MOON against one-piece autograd, and what travels, stays and is evaluated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hyperfed import functional, trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.errors import UserError
from hyperfed.functional import outputs_and_features
from hyperfed.methods import moon
from hyperfed.methods.parts import contrast
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.training import Batch
from hyperfed.trees import Model
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    make_task,
)

MU, TEMPERATURE = 2.0, 0.4
SETTINGS: dict[str, Any] = ONE_STEP | {"contrast_weight": MU, "temperature": TEMPERATURE}


def outputs_by_hand(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """(B, classes) logits and (B, 4) features of ``TwoLayers``, written out."""
    z = torch.tanh(x @ model["body.weight"].T + model["body.bias"])
    return z @ model["head.weight"].T + model["head.bias"], z


def similarity(z: Tensor, other: Tensor) -> Tensor:
    return (z * other).sum(1) / ((z**2).sum(1) * (other**2).sum(1)).sqrt()


def loss_by_hand(
    federation: Federation, client: int, model: Model, received: Model, previous: Model
) -> Tensor:
    """Equations 3 and 4 on all training data of a client, differentiable in ``model``."""
    task = federation.task
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    output, z = outputs_by_hand(model, x)
    near, far = (
        (similarity(z, outputs_by_hand(other, x)[1]) / TEMPERATURE).exp()
        for other in (received, previous)
    )
    return F.cross_entropy(output, y) - MU * (near / (near + far)).log().mean()


def after_two_rounds(**settings: Any) -> Federation:
    """Client 0 was absent in the second, so its previous model is far from the global one."""
    federation = Federation("moon", make_task(novel=1), **SETTINGS | settings)
    federation.round([0, 1], 0)
    federation.round([1, 2], 1)
    return federation


def trained_by_hand(
    federation: Federation, client: int, received: Model, previous: Model, steps: int = 3
) -> Model:
    """Gradient steps on the one-piece objective, the other two models constant.

    At the first the trained model is the received one, so that only later ones see a wrong positive
    model.
    """
    model = received
    for _ in range(steps):
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        loss_by_hand(federation, client, leaves, received, previous).backward()
        model = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    return model


def check_a_round() -> None:
    federation = after_two_rounds(local_steps=3)
    received, previous = federation.server.model["base"], federation.engine.memory[0]["model"]
    expected = trained_by_hand(federation, 0, received, previous)
    federation.round([0], 2)
    close(federation.engine.memory[0]["model"], expected)
    close(federation.server.model["base"], expected)


def test_a_round_is_gradient_descent_on_the_one_piece_objective() -> None:
    check_a_round()


def test_the_contrast_counts() -> None:
    federation = after_two_rounds()
    received = federation.server.model["base"]
    leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
    client_loss(federation.task, 0, leaves).backward()
    federation.round([0], 2)
    plain = received["body.weight"] - 0.1 * leaves["body.weight"].grad
    assert (federation.server.model["base"]["body.weight"] - plain).abs().max() > 1e-3


def test_in_the_first_round_the_contrast_has_no_gradient() -> None:
    """The previous model is the initial one, which is the global one: both similarities are 1."""
    ours, fedavg = (
        Federation("moon", make_task(), **SETTINGS),
        Federation("fedavg", make_task(), **ONE_STEP),
    )
    for federation in (ours, fedavg):
        federation.round([0, 1, 3])
    close(ours.server.model, fedavg.server.model)


def test_the_other_models_use_their_own_statistics() -> None:
    """With batch-norm, features of global and previous model are those of evaluation mode."""
    federation = Federation("moon", make_task(Normed), **SETTINGS)
    federation.round([0, 1], 0)
    federation.round([1, 2], 1)
    task, received = federation.task, federation.server.model["base"]
    previous, rows = federation.engine.memory[0]["model"], federation.task.train[0]
    x = task.x[rows]

    def features(model: Model, batch: bool) -> Tensor:
        hidden = x @ model["body.weight"].T + model["body.bias"]
        mean = hidden.mean(0) if batch else model["norm.running_mean"]
        variance = hidden.var(0, correction=0) if batch else model["norm.running_var"]
        normal = (hidden - mean) / (variance + 1e-5).sqrt()
        return torch.tanh(normal * model["norm.weight"] + model["norm.bias"])

    names = [name for name, _ in task.models["base"].named_parameters()]
    leaves = received | {name: received[name].clone().requires_grad_() for name in names}
    z = features(leaves, batch=True)
    near, far = (similarity(z, features(m, batch=False)) for m in (received, previous))
    output = z @ leaves["head.weight"].T + leaves["head.bias"]
    drawn = F.softplus((far - near) / TEMPERATURE).mean()
    (F.cross_entropy(output, task.y[rows]) + MU * drawn).backward()
    federation.round([0], 2)
    ours = federation.server.model["base"]
    expected = {name: received[name] - 0.1 * leaves[name].grad for name in names}
    close({name: ours[name] for name in names}, expected)
    assert ours["norm.num_batches_tracked"] == received["norm.num_batches_tracked"] + 1


@pytest.mark.parametrize("evaluated", ["global", "local"])
def test_with_mu_zero_it_is_fedavg(evaluated: str) -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1}
    settings = local | {"contrast_weight": 0.0, "evaluated": evaluated}
    ours = Federation("moon", make_task(Normed), **settings)
    fedavg = Federation("fedavg", make_task(Normed), **local)
    for number, clients in enumerate(([0, 1, 2], [1, 3], [0, 3])):
        ours.round(clients, number)
        fedavg.round(clients, number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)


# Which model is evaluated, what travels, what stays


def check_the_evaluated_models() -> None:
    ours, local = after_two_rounds(), after_two_rounds(evaluated="local")
    for client in (0, 1):
        model = local.engine.memory[client]["model"]
        torch.testing.assert_close(local.personal(client), model, rtol=0, atol=0)
        received = ours.server.model["base"]
        torch.testing.assert_close(ours.personal(client), received, rtol=0, atol=0)


def test_the_global_model_is_evaluated_or_the_clients_own_on_demand() -> None:
    check_the_evaluated_models()


def test_a_known_client_that_was_never_asked_uses_the_global_model() -> None:
    federation = Federation("moon", make_task(), **SETTINGS, evaluated="local")
    federation.round([0, 1])
    torch.testing.assert_close(federation.personal(2), federation.server.model["base"])


def test_a_novel_client_uses_the_global_model_or_trains_its_own() -> None:
    ours = after_two_rounds()
    torch.testing.assert_close(ours.personal(3), ours.server.model["base"])
    local = after_two_rounds(evaluated="local", novel_rounds=2)
    received = local.server.model["base"]
    previous = local.task.outline().initial()
    for _ in range(2):
        previous = trained_by_hand(local, 3, received, previous, steps=1)
    close(local.personal(3), previous)
    torch.testing.assert_close(local.server.model["base"], received, rtol=0, atol=0)
    cohort = local.engine.cohort([3], 9, training=False)
    local.server.personalize(cohort)
    assert [e.up for e in cohort.state.exchanges] == [0, 0]


@pytest.mark.parametrize("net", [None, Normed])
def test_a_model_goes_down_and_a_model_comes_up_and_the_client_keeps_one(net: Any) -> None:
    task = make_task(net) if net else make_task()
    federation = Federation("moon", task, **SETTINGS)
    cohort = federation.round([0, 2])
    size = trees.count_bytes(trees.model_of(task.models["base"]))
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    assert {name for memory in federation.engine.memory.values() for name in memory} == {"model"}
    assert trees.count_bytes(federation.engine.memory[0]) == size


# The projection head

PROJECTED = 6
NAMES = {"body": "body", "first": "head.0", "second": "head.2", "output": "head.3"}


def projected_by_hand(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """(B, classes) logits and (B, 6) outputs of the projection head, written out."""
    w = {part: (model[f"{name}.weight"].T, model[f"{name}.bias"]) for part, name in NAMES.items()}
    z = torch.tanh(x @ w["body"][0] + w["body"][1])
    hidden = (z @ w["first"][0] + w["first"][1]).clamp(min=0)
    projection = hidden @ w["second"][0] + w["second"][1]
    return projection @ w["output"][0] + w["output"][1], projection


def check_a_projected_round() -> None:
    """Client 0 was absent in the second of three rounds, of which the last has three steps."""
    federation = after_two_rounds(projection=PROJECTED, local_steps=3)
    task, rows = federation.task, federation.task.train[0]
    x, y = task.x[rows], task.y[rows]
    received, previous = federation.server.model["base"], federation.engine.memory[0]["model"]
    assert received["head.3.weight"].shape == (3, PROJECTED)
    model = received
    for _ in range(3):
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        output, own = projected_by_hand(leaves, x)
        near, far = (
            (similarity(own, projected_by_hand(other, x)[1]) / TEMPERATURE).exp()
            for other in (received, previous)
        )
        loss = F.cross_entropy(output, y) - MU * (near / (near + far)).log().mean()
        loss.backward()
        model = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    federation.round([0], 2)
    close(federation.server.model["base"], model)
    close(federation.engine.memory[0]["model"], model)


def test_with_a_projection_head_its_output_is_contrasted_and_classified() -> None:
    check_a_projected_round()


def test_the_projection_head_begins_with_the_targets_body_and_under_the_runs_seed() -> None:
    first, second = (Federation("moon", make_task(), projection=PROJECTED) for _ in range(2))
    ours = first.server.model["base"]
    torch.testing.assert_close(ours, second.server.model["base"], rtol=0, atol=0)
    start = first.task.outline().initial()
    body = {name: value for name, value in ours.items() if name.startswith("body")}
    expected = {name: value for name, value in start.items() if name.startswith("body")}
    torch.testing.assert_close(body, expected, rtol=0, atol=0)
    shapes = {name: tuple(value.shape) for name, value in ours.items() if name not in body}
    assert shapes == {
        **{"head.0.weight": (4, 4), "head.0.bias": (4,)},
        **{"head.2.weight": (6, 4), "head.2.bias": (6,)},
        **{"head.3.weight": (3, 6), "head.3.bias": (3,)},
    }
    assert {value.dtype for value in ours.values()} == {torch.float64}


def test_a_last_layer_without_a_bias_has_none_behind_a_projection_head_either() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES, bias=False))

    ours = Federation("moon", make_task(net), projection=PROJECTED).server.model["base"]
    last = {name: tuple(value.shape) for name, value in ours.items() if name.startswith("1.3.")}
    assert last == {"1.3.weight": (CLASSES, PROJECTED)}


def test_with_a_projection_head_the_first_round_of_a_client_has_no_contrast() -> None:
    runs = [
        Federation("moon", make_task(Normed), **SETTINGS | {"contrast_weight": mu}, projection=6)
        for mu in (MU, 0.0)
    ]
    for federation in runs:
        federation.round([0, 1], 0)
        federation.round([3], 1)
    ours, fedavg = (federation.server.model for federation in runs)
    close(ours, fedavg)


@pytest.mark.parametrize("engine", [LoopEngine, VmappedEngine])
def test_the_projection_head_travels_with_the_model_and_is_evaluated(
    engine: type[LoopEngine],
) -> None:
    task = make_task(sizes=("S", "L", "S", "L"), models=sizes())
    ours = Federation("moon", task, **SETTINGS, projection=PROJECTED)
    ours.engine = engine(task, ours.method.Client, ours.config, seed=0)
    exchanges = ours.round([0, 1, 2]).state.exchanges
    bytes_of = {size: trees.count_bytes(model) for size, model in ours.server.model.items()}
    expected = [bytes_of["S"], bytes_of["S"], bytes_of["L"]]
    assert [(e.down, e.up) for e in exchanges] == [(size, size) for size in expected]
    assert trees.structure(ours.engine.memory[0]["model"]) == trees.structure(
        ours.server.model["S"]
    )
    cohort = ours.engine.cohort([0], 9, training=False)
    counts = cohort.ask(moon.Client.evaluate, ours.server.personalize(cohort))
    output, _ = projected_by_hand(ours.server.model["S"], task.x[task.test[0]])
    loss = F.cross_entropy(output, task.y[task.test[0]], reduction="sum")
    close(counts["test"]["loss"][0], loss)


def sizes() -> dict[str, nn.Module]:
    with seeded(0, "sizes"):
        return {"S": TwoLayers().double(), "L": Normed().double()}


def test_a_model_with_a_projection_head_is_not_handed_over() -> None:
    federation = Federation("moon", make_task(), **SETTINGS, projection=PROJECTED)
    with pytest.raises(UserError, match=r"must be the task's target.*method.projection=none"):
        federation.personal(0)


class Ending(nn.Sequential):
    """Its last layer is no linear one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))


class Normalised(TwoLayers):
    """Its last layer's weight is made from another."""

    def __init__(self) -> None:
        super().__init__()
        self.head = spectral_norm(self.head)


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Ending, rf"MOON with method.projection={PROJECTED} must end in .* got BatchNorm1d"),
        (Normalised, r"must end in an nn.Linear .* got ParametrizedLinear"),
        (lambda: nn.Linear(FEATURES, CLASSES), "must have layers before .* is a Linear alone"),
    ],
)
def test_a_target_without_a_linear_layer_after_others_takes_no_projection_head(
    net: Any, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        Federation("moon", make_task(net), projection=PROJECTED)


# Mistakes that the checks above must reject


def logits_for_features(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    output, _ = outputs_and_features(*given, **options)
    return output, output


def exchanged(near: Tensor, far: Tensor, *settings: Any, **more: float) -> Tensor:
    return contrast.contrastive_loss(far, near, *settings, **more)


def without_temperature(near: Tensor, far: Tensor, *settings: Any, **more: float) -> Tensor:
    return F.softplus(near - far).mean()


def summed(near: Tensor, far: Tensor, *settings: Any, **more: float) -> Tensor:
    return len(near) * contrast.contrastive_loss(near, far, *settings, **more)


def inner_products(own: Tensor, other: Tensor, distance: str) -> Tensor:
    return -(own * other).sum(1)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("outputs_and_features", logits_for_features),
        ("contrastive_loss", exchanged),
        ("contrastive_loss", without_temperature),
        ("contrastive_loss", summed),
        ("distances", inner_products),
    ],
)
def test_mutant_of_the_contrast(name: str, mutant: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(moon, name, mutant)
    if name == "outputs_and_features":
        monkeypatch.setattr(functional, name, mutant)  # of the model that trains
    with pytest.raises(AssertionError):
        check_a_round()


BETWEEN = moon.Client.objective_between


def global_model_moves(self: moon.Client, positive: Model, negative: Model) -> Any:
    """The global model shares the trained one's weights, so that gradients flow into it."""

    def objective(model: Model, batch: Batch) -> Any:
        return BETWEEN(self, model, negative)(model, batch)

    return objective


def test_mutant_with_a_gradient_into_the_global_model(monkeypatch: Any) -> None:
    monkeypatch.setattr(moon.Client, "objective_between", global_model_moves)
    monkeypatch.setattr(
        moon, "distances", lambda own, other, _: 1 - F.cosine_similarity(own, other)
    )
    with pytest.raises(AssertionError):
        check_a_round()


def always_the_initial_model(self: moon.Client, positive: Model, negative: Model) -> Any:
    return BETWEEN(self, positive, self.initial)


def no_previous_model(self: moon.Client, positive: Model, negative: Model) -> Any:
    return BETWEEN(self, positive, positive)


@pytest.mark.parametrize("mutant", [always_the_initial_model, no_previous_model])
def test_mutant_with_another_negative_model(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(moon.Client, "objective_between", mutant)
    with pytest.raises(AssertionError):
        check_a_round()


def always_own(self: moon.Client, received: Model) -> Model:
    return self.memory.get("model", received)


def never_own(self: moon.Client, received: Model) -> Model:
    return received


@pytest.mark.parametrize("mutant", [always_own, never_own])
def test_mutant_that_evaluates_another_model(mutant: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(moon.Client, "personal_model", mutant)
    with pytest.raises(AssertionError):
        check_the_evaluated_models()


# Settings


def test_presets() -> None:
    paper, pfedkt = (from_keys("moon", moon.PRESETS[name]) for name in ("paper", "pfedkt"))
    assert (paper.settings.contrast_weight, paper.settings.evaluated) == (5.0, "global")
    assert (paper.settings.projection, moon.Config().projection) == (256, None)
    published = {  # section 4.1
        "temperature": 0.5,
        "local_epochs": 10,
        "batch_size": 64,
        "local_lr": 0.01,
        "local_momentum": 0.9,
        "local_weight_decay": 1e-5,
    }
    assert {name: getattr(paper.settings, name) for name in published} == published
    assert (paper.rounds, paper.cohort, paper.task.clients) == (100, 1.0, 10)
    assert (pfedkt.cohort, pfedkt.settings.evaluated) == (0.1, "local")

"""PeFLL: three exchanges against one-piece autograd, the authors' trace, and what travels."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hyperfed import engines, trees
from hyperfed.engines import EngineCohort, Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.local import loop
from hyperfed.federation import AllLostError, Each
from hyperfed.methods import pefll
from hyperfed.methods.parts import hypernet_training
from hyperfed.nets import LeNet
from hyperfed.nets.descriptors import Standard
from hyperfed.runs import config
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Outline, Task
from hyperfed.training import Batch, UnlabelledError
from hyperfed.trees import Model, Tree, checkpoints
from toys import (
    CLASSES,
    FEATURES,
    PLAIN,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    logits,
    make_quadratic_task,
    make_task,
)

TRACE = Path(__file__).parents[1] / "traces" / "pefll.safetensors"
THETA, ETA = 0.01, 0.02
"""lambda_theta, and lambda_h = lambda_v: large enough to be missed."""
SETTINGS: dict[str, Any] = PLAIN | {
    "local_steps": 1,
    "batch_size": 4,
    "local_lr": 0.1,
    "local_weight_decay": 2 * THETA,
    "optimizer": "sgd",
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 2 * ETA,
    "clip": None,
    "descriptor_size": 2,
    "standardize": False,
    "hyper_net": "single",
    "hidden": 7,
    "hidden_layers": 1,
}


# The update


def drawn(task: Task, client: int, number: int, step: str) -> tuple[Tensor, Tensor]:
    """The batch of 4 that a client is given in a step: a function of these keys."""
    rows = task.train[client]
    source = generator(0, "batches", client, number, step, 0)
    rows = rows[torch.randperm(len(rows), generator=source)[:4]]
    return task.x[rows], task.y[rows]


def gradients(
    federation: Federation, clients: list[int], number: int, standard: list[Tensor]
) -> dict[str, Tensor]:
    """The gradient of objective (1), which autograd sees in one piece, for both networks."""
    server, task, settings = federation.server, federation.task, federation.config
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        x, y = drawn(task, client, number, "describe")
        descriptor = server.descriptor_net(x, y).sum(0) / len(x)
        if settings.standardize:
            if not standard:
                standard += [descriptor.mean().detach(), descriptor.std().detach()]
            descriptor = (descriptor - standard[0]) / standard[1]
        model = {name: value[0] for name, value in server.hyper_net(descriptor[None]).items()}
        x, y = drawn(task, client, number, "train_model")
        loss = task.loss(logits(task.models["base"], model, x), y)
        squares = torch.stack([value.square().sum() for value in model.values()]).sum()
        objective = objective + (loss + THETA * squares) / len(clients)
    named = parameters(federation)
    found = torch.autograd.grad(objective, list(named.values()))
    return dict(zip(named, found, strict=True))


def after_a_step(federation: Federation, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Both networks after one step.

    With one plain local step of rate eta, delta is eta times the gradient of a client's objective,
    so the server descends their mean with rate lr * eta.
    """
    return {
        name: (value - 0.5 * (0.1 * gradient[name] + 2 * ETA * value)).detach()
        for name, value in parameters(federation).items()
    }


def parameters(federation: Federation) -> dict[str, Tensor]:
    server = federation.server
    hyper = {f"h.{name}": value for name, value in server.hyper_net.named_parameters()}
    return hyper | {f"v.{name}": value for name, value in server.descriptor_net.named_parameters()}


def check_two_rounds(clients: list[int], task: Task | None = None, **settings: Any) -> None:
    federation = Federation("pefll", task or make_task(), **SETTINGS | settings)
    standard: list[Tensor] = []
    for number in range(2):
        gradient = gradients(federation, clients, number, standard)
        expected = after_a_step(federation, gradient)
        federation.round(clients, number)
        ours = {name: value.detach() for name, value in parameters(federation).items()}
        close(ours, expected)


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("hyper_net", ["single", "heads"])
@pytest.mark.parametrize("descriptor_net", ["target", "linear"])
@pytest.mark.parametrize("clients", [[2], [0, 1, 3]])
def test_the_update_is_the_gradient_of_the_one_piece_objective(
    clients: list[int], descriptor_net: str, hyper_net: str, standardize: bool
) -> None:
    settings = {"hyper_net": hyper_net, "standardize": standardize}
    check_two_rounds(clients, descriptor_net=descriptor_net, **settings)


@pytest.mark.parametrize(
    "settings", [{"hyper_net": "chunks", "chunk": 7}, {"head_rank": 2}, {"start": "target"}]
)
def test_so_it_is_with_every_kind_of_hypernetwork(settings: dict[str, Any]) -> None:
    check_two_rounds([0, 1, 3], **settings)


@pytest.mark.parametrize("descriptor_net", ["target", "linear"])
def test_the_update_of_a_regression_is_that_gradient_too(descriptor_net: str) -> None:
    check_two_rounds([0, 1, 3], make_quadratic_task(), descriptor_net=descriptor_net)


def test_the_decay_of_adam_is_in_its_gradient() -> None:
    """The first step of Adam is g / (|g| + 1e-8) times the rate, with bias corrected."""
    ours = Federation("pefll", make_task(), **SETTINGS | {"optimizer": "adam"})
    gradient = gradients(ours, [0, 2], 0, [])
    decayed = {n: 0.1 * gradient[n] + 2 * ETA * value for n, value in parameters(ours).items()}
    expected = {
        name: (value - 0.5 * decayed[name] / (decayed[name].abs() + 1e-8)).detach()
        for name, value in parameters(ours).items()
    }
    ours.round([0, 2])
    torch.testing.assert_close(dict(parameters(ours)), expected, rtol=1e-6, atol=1e-9)


def flipped(subtract: Callable[..., Tree]) -> Callable[..., Tree]:
    return lambda sent, trained: subtract(trained, sent)


def summed_over_clients(_: Any) -> Callable[..., Tree]:
    return lambda tree, weight: trees.tree_map(lambda leaf: leaf.sum(0), tree)


def summed_in_the_hypernetwork(pull_back: Callable[..., None]) -> Callable[..., None]:
    return lambda model, delta, weight, *rest, **more: pull_back(
        model, delta, weight.sign(), *rest, **more
    )


def summed_over_examples(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda client, net, batch: embed(client, net, batch) * len(batch.x)


def from_another_batch(gradient_of: Callable[..., Tree]) -> Callable[..., Tree]:
    def mutant(client: Any, gradient: Tree) -> Tree:
        other = client.train.batch(slice(4))
        client.scratch |= {"x": other.x, "y": other.y}
        return gradient_of(client, gradient)

    mutant.__dict__.update(gradient_of.__dict__)
    return mutant


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (trees, "subtract", flipped),
        (trees, "weighted_mean", summed_over_clients),
        (hypernet_training, "pull_back", summed_in_the_hypernetwork),
        (pefll.Client, "embed", summed_over_examples),
        (pefll.Client, "descriptor_net_gradient", from_another_batch),
    ],
)
def test_a_wrong_update_is_caught(
    place: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above fails on these mutants: so much it is worth."""
    monkeypatch.setattr(place, name, mutant(getattr(place, name)))
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3])


@pytest.mark.parametrize("missing", ["local_weight_decay", "weight_decay"])
def test_a_missing_regulariser_is_caught(missing: str) -> None:
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3], **{missing: 0.0})


def test_a_standard_fitted_in_every_round_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = Standard.fitted

    def again(_: Standard, descriptors: Tensor) -> Standard:
        return fitted(Standard().double(), descriptors)

    monkeypatch.setattr(Standard, "fitted", again)
    with pytest.raises(AssertionError):
        check_two_rounds([0, 1, 3], standardize=True)


# The delayed update


DELAYED = SETTINGS | {"delayed_gradient": True}
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


# Clipping, and learning at all


def test_the_gradient_of_both_networks_is_clipped_together() -> None:
    settings = SETTINGS | {"weight_decay": 0.0, "clip": 1e-4, "lr": 1.0}
    federation = Federation("pefll", make_task(), **settings)
    before = {name: value.detach().clone() for name, value in parameters(federation).items()}
    federation.round([0, 1])
    moved = [(before[name] - value).flatten() for name, value in parameters(federation).items()]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-4, rel=0.02)


@pytest.mark.parametrize("delayed", [False, True])
def test_training_lowers_the_loss_of_every_client(delayed: bool) -> None:
    settings = {"local_steps": 3, "batch_size": 20, "local_lr": 0.2, "lr": 1e-2}
    federation = Federation("pefll", make_task(), **settings, delayed_gradient=delayed)
    before = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    for number in range(20):
        federation.round(range(4), number)
    after = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    assert all(new < 0.7 * old for old, new in zip(before, after, strict=True))


# The authors' code


class Trace:
    """The authors' numbers, under our names."""

    def __init__(self) -> None:
        with safe_open(TRACE, "pt") as file:
            self.said: dict[str, Any] = {k: json.loads(v) for k, v in file.metadata().items()}
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def under(self, prefix: str) -> dict[str, Tensor]:
        start = len(prefix) + 1
        return {k[start:]: v for k, v in self.tensors.items() if k.startswith(f"{prefix}.")}

    def networks(self, when: str) -> Tree:
        layers = {"c1": "conv1", "c2": "conv2", "l1": "fc1", "l2": "fc2", "l3": "fc3"}
        hyper: Model = {}
        for name, value in self.under(f"{when}.hypernet").items():
            module, *rest = name.split(".")
            layer, _, kind = module.partition("_")
            target = f"{layers.get(layer)}/{'bias' if kind == 'bias' else 'weight'}"
            ours = "trunk" if module == "mlp" else f"heads.base/{target}"
            hyper[".".join([ours, *rest])] = value
        descriptor = {f"net.{k}": v for k, v in self.under(f"{when}.embednet").items()}
        return {"hyper_net": hyper, "descriptor_net": descriptor}


def play(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Tree]]:
    """Runs the official preset from the trace's initial weights on the trace's batches."""
    said, seen = trace.said, dict[str, Tree]()
    raw = {key: value for key, value in trace.tensors.items() if value.dtype == torch.uint8}
    rows = [torch.arange(said["batch"])] * 3
    task = Task(
        name="trace",
        x=next(iter(raw.values())),
        y=torch.zeros(said["batch"], dtype=torch.int64),
        train=rows,
        val=rows,
        test=rows,
        models={"base": LeNet((1, 32, 32), said["classes"], width=said["filters"]).double()},
        classes=said["classes"],
    )
    official = config.load("pefll", ["preset=official"]).settings
    assert (official.local_lr, official.local_momentum) == (said["local_lr"], said["momentum"])
    assert official.local_weight_decay == said["local_weight_decay"]
    assert official.local_clip == official.clip == said["clip"]
    assert official.hidden_layers == said["hidden_layers"]
    assert (official.optimizer, official.lr, official.weight_decay) == ("adam", 2e-4, 0)
    settings = [f"method.descriptor_size={said['descriptor_size']}"]
    settings += [f"method.{key}={said[key]}" for key in ("hidden", "local_steps")]
    settings += [f"method.batch_size={said['batch']}"]
    settings = config.load("pefll", ["preset=official", *settings]).settings

    def batch(key: str, x: str, y: str, which: int | slice = slice(None)) -> Batch:
        images = trace.tensors[f"{key}.{x}"][which]
        return Batch(images.double() / 64 - 2, trace.tensors[f"{key}.{y}"][which])

    describe, train_model = pefll.Client.describe, pefll.Client.train_model

    def watched_describe(client: Any, descriptor_net: Model) -> Tree:
        key = f"round.{client.round}.client.{client.id}"
        client.batches = [batch(key, "descriptor_x", "descriptor_y")]
        seen[key] = describe(client, descriptor_net)
        return seen[key]

    def watched_train(client: Any, model: Model) -> Tree:
        key = f"round.{client.round}.client.{client.id}"
        client.batches = [batch(key, "x", "y", k) for k in range(said["local_steps"])]
        delta: Model = train_model(client, model)
        seen[key] |= {"sent": model, "trained": trees.subtract(model, delta)}
        return delta

    watched_describe.__dict__.update(describe.__dict__)
    watched_train.__dict__.update(train_model.__dict__)
    monkeypatch.setattr(pefll.Client, "describe", watched_describe)
    monkeypatch.setattr(pefll.Client, "train_model", watched_train)
    server = pefll.Server(task.outline(), settings)
    server.load(trace.networks("initial"))
    engine = loop.LoopEngine(task, pefll.Client, settings, seed=0)
    for number, clients in enumerate(said["clients_per_round"]):
        server.round(engine.cohort(clients, number, training=True))
    return server, seen


def test_the_authors_trace_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    server, seen = play(trace, monkeypatch)
    exact: dict[str, Any] = {"rtol": 0, "atol": 1e-9}
    assert len(seen) == 4
    for key, entry in seen.items():
        theirs = trace.tensors[f"{key}.descriptor"]
        torch.testing.assert_close(server.standard(entry["descriptor"]), theirs, **exact)
        for what in ("sent", "trained"):
            torch.testing.assert_close(entry[what], trace.under(f"{key}.{what}"), **exact)
    for network, final in trace.networks("final").items():
        torch.testing.assert_close(dict(server.state()[network]), final, **exact)
    # Their descriptor is a sum over 4 examples divided by 2, which standardising hides.
    for ours, theirs in (("mean", "mean"), ("deviation", "std")):
        number = trace.tensors[f"standardise.{theirs}"] / 2
        torch.testing.assert_close(server.state()["standard"][ours], number, **exact)


# What travels, and who is lost


@pytest.mark.parametrize(
    ("descriptor_net", "network"),
    [("target", (FEATURES + CLASSES) * 4 + 4 + 4 * 2 + 2), ("linear", CLASSES * 2 + 2)],
)
def test_three_exchanges_travel_and_nothing_else(descriptor_net: str, network: int) -> None:
    federation = Federation("pefll", make_task(), **SETTINGS | {"descriptor_net": descriptor_net})
    cohort = federation.round([1, 2])
    model = FEATURES * 4 + 4 + 4 * CLASSES + CLASSES
    expected = [
        ("describe", network, 2),
        ("train_model", model, model),
        ("descriptor_net_gradient", 2, network),
    ]
    assert [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges] == [
        (step, client, 8 * down, 8 * up) for step, down, up in expected for client in (1, 2)
    ]
    assert federation.engine.memory == {1: {}, 2: {}}


def test_with_a_delayed_gradient_the_same_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[str]] = []
    answer = loop.LoopEngine.answer

    def watched(engine: loop.LoopEngine, calls: Sequence[Call]) -> list[Tree | Exception]:
        steps.append([call.step for call in calls])
        return answer(engine, calls)

    usual, ours = (Federation("pefll", make_task(), **each) for each in (SETTINGS, DELAYED))
    expected = [usual.round([1, 2], number).state.exchanges for number in range(2)]
    monkeypatch.setattr(loop.LoopEngine, "answer", watched)
    cohorts = [ours.round([1, 2], number) for number in range(2)]
    assert steps == [
        ["describe"] * 2,
        ["train_model"] * 2,
        ["descriptor_net_gradient"] * 2 + ["describe"] * 2,
        ["train_model"] * 2,
    ]
    ours.server.state()
    assert [cohort.state.exchanges for cohort in cohorts] == expected
    assert ours.engine.memory == {1: {}, 2: {}}


def lose(monkeypatch: pytest.MonkeyPatch, step: str, *clients: int) -> None:
    def spoilt(faults: Faults, seed: int, call: Call) -> bool:
        return call.client in clients and call.step == step

    monkeypatch.setattr(Faults, "spoils", spoilt)


STEPS = ["describe", "train_model", "descriptor_net_gradient"]


@pytest.mark.parametrize("net", [TwoLayers, Normed])
@pytest.mark.parametrize("step", STEPS)
def test_a_client_lost_between_messages_equals_one_never_sampled(
    step: str, net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS | {"standardize": True, "optimizer": "adam"}
    lossy = Federation("pefll", make_task(net), **settings)
    smaller = Federation("pefll", make_task(net), **settings)
    for ours in (lossy, smaller):
        ours.round([0, 1, 2, 3], 0)
    lose(monkeypatch, step, 1)
    assert list(lossy.round([0, 1, 3], 1).state.lost) == [1]
    smaller.round([0, 3], 1)
    close(lossy.server.state(), smaller.server.state())


def test_descriptors_are_standardised_without_who_is_lost_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = SETTINGS | {"standardize": True}
    lossy, smaller = (Federation("pefll", make_task(), **settings) for _ in range(2))
    smaller.round([1, 3])
    lose(monkeypatch, "describe", 0)  # the first, whose descriptor it would be
    lossy.round([0, 1, 3])
    close(lossy.server.state(), smaller.server.state())


@pytest.mark.parametrize("step", STEPS)
def test_all_lost_at_any_message_changes_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Federation("pefll", make_task(Normed), **SETTINGS | {"standardize": True})
    before = trees.clone(ours.server.state())
    lose(monkeypatch, step, 0, 1)
    with pytest.raises(AllLostError):
        ours.round([0, 1])
    torch.testing.assert_close(ours.server.state(), before, rtol=0, atol=0)


@pytest.mark.parametrize("step", STEPS[2:])
def test_a_target_size_lost_at_the_end_leaves_the_others(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seeded(0, "sizes"):
        models: dict[str, nn.Module] = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    lossy, smaller = (Federation("pefll", task, **SETTINGS) for _ in range(2))
    lose(monkeypatch, step, 1)
    lossy.round([0, 1, 2])
    smaller.round([0, 2])
    close(lossy.server.state(), smaller.server.state())


@pytest.mark.parametrize("delayed", [False, True])
def test_the_state_holds_what_a_killed_server_needs(delayed: bool, tmp_path: Path) -> None:
    settings = {"local_steps": 2, "batch_size": 4}  # Adam, standardised
    settings |= {"delayed_gradient": delayed}
    ours, other = (Federation("pefll", make_task(Normed), **settings) for _ in range(2))
    ours.round([0, 1])
    checkpoints.save_state(tmp_path / "state", ours.server.state(), {})
    tree, _ = checkpoints.load_state(tmp_path / "state")
    assert tree["standard"]["deviation"] > 0
    other.server.load(tree)
    for each in (ours, other):
        each.round([2, 3], 1)
    torch.testing.assert_close(ours.server.state(), other.server.state(), rtol=0, atol=0)


# Personal models


@pytest.mark.parametrize("client", [1, 3])
def test_known_and_novel_clients_get_a_model_from_all_their_data(client: int) -> None:
    task = make_task(novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"standardize": True})
    federation.round([0, 1, 2])
    server, rows = federation.server, task.train[client]
    descriptor = server.descriptor_net(task.x[rows], task.y[rows]).mean(0)
    standard = server.state()["standard"]
    descriptor = (descriptor - standard["mean"]) / standard["deviation"]
    model = server.hyper_net(descriptor[None])
    expected = {name: value[0].detach() for name, value in model.items()}
    ours = federation.personal(client)
    close(ours, expected)


def test_one_batch_can_describe_a_client_to_be_served() -> None:
    task = make_task(novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"prediction": "batch"})
    x, y = drawn(task, 3, 99, "describe")
    model = federation.server.hyper_net(federation.server.descriptor_net(x, y).mean(0)[None])
    expected = {name: value[0].detach() for name, value in model.items()}
    close(federation.personal(3), expected)


def test_a_label_only_descriptor_is_linear_in_the_class_proportions() -> None:
    task = make_task()
    federation = Federation("pefll", task, **SETTINGS | {"descriptor_net": "linear"})
    cohort = federation.engine.cohort([2], 0, training=False)
    net = federation.server.descriptor_net
    y = task.y[task.train[2]]
    share = torch.stack([(y == label).double().mean() for label in range(CLASSES)])
    reply = cohort.ask(
        pefll.Client.describe,
        trees.model_of(net),
        batches=pefll.Epochs(1, 8),  # three batches, the last of 4
    )["descriptor"]
    torch.testing.assert_close(reply[0], (net.linear.weight @ share + net.linear.bias).detach())


def test_an_unlabelled_client_is_told_why_it_gets_no_model() -> None:
    federation = Federation("pefll", make_task(novel=1, unlabelled=True), **SETTINGS)
    with pytest.raises(UnlabelledError, match="has no labels"):
        federation.personal(3)


def test_batch_norm_buffers_are_averaged_over_the_cohort_and_reach_novel_clients() -> None:
    task = make_task(Normed, novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"batch_size": 10_000})
    server, means = federation.server, []
    for client in (0, 1):  # of 12 and 7 examples: each counts once
        x, y = task.x[task.train[client]], task.y[task.train[client]]
        model = server.hyper_net(server.descriptor_net(x, y).mean(0)[None])
        before_norm = x @ model["body.weight"][0].T + model["body.bias"][0]
        means.append(0.1 * before_norm.mean(0).detach())  # from 0, with batch-norm's momentum
    cohort = federation.round([0, 1])
    novel = federation.personal(3)
    torch.testing.assert_close(novel["norm.running_mean"], (means[0] + means[1]) / 2)
    assert novel["norm.num_batches_tracked"] == 1
    whole = trees.count_bytes(trees.model_of(task.models["base"]))
    assert {(e.down, e.up) for e in cohort.state.exchanges if e.step == "train_model"} == {
        (whole, whole)
    }


# Settings


@pytest.mark.parametrize(
    ("rule", "known", "novel", "length"),
    [
        ("n/4", 90, 10, 22),  # the paper's n is that of the clients that train
        ("1+n/4", 90, 10, 26),  # the code's is that of all
        ("n/4", 3, 9, 2),
        ("1+n/4", 3, 0, 2),
        (5, 90, 10, 5),
    ],
)
def test_the_length_of_a_descriptor(rule: Any, known: int, novel: int, length: int) -> None:
    outline = Outline({}, known, CLASSES, novel)
    assert pefll.Config(descriptor_size=rule).length(outline) == length


def test_the_official_length_counts_novel_clients() -> None:
    settings = config.load("pefll", ["preset=official"]).settings
    task = make_task(examples=(4,) * 13, novel=3)
    assert pefll.Server(task.outline(), settings).hyper_net.descriptor_size == 1 + 13 // 4


def test_the_paper_preset_has_table_4_and_the_factor_2_of_the_regularisers() -> None:
    settings = config.load("pefll", ["preset=paper"]).settings
    assert (settings.local_weight_decay, settings.weight_decay) == (2 * 5e-5, 2 * 1e-3)
    task = make_task(examples=(4,) * 40)
    server = pefll.Server(task.outline(), settings)
    widths = [m.weight.shape for m in server.hyper_net.modules() if isinstance(m, nn.Linear)]
    assert widths == [(100, 10), (100, 100), (39, 100)]
    assert isinstance(server.optimizer, torch.optim.SGD)
    assert not settings.standardize

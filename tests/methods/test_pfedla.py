"""pFedLA and HeurpFedLA: the update by one-piece autograd, the limits, the weights, the bytes."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import hyperfed
from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.errors import UserError
from hyperfed.methods import pfedla
from hyperfed.nets import LeNet, PFedLACNN
from hyperfed.runs import records
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    PLAIN,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    logits,
    make_task,
    torch_sgd,
)

CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-12}
SERVER: dict[str, Any] = {"embedding_size": 6, "hidden": 7, "lr": 0.5}
LAYERS: dict[str, list[str]] = {
    "body": ["body.weight", "body.bias"],
    "norm": [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ],
    "head": ["head.weight", "head.bias"],
}
"""The layers of Normed, in the order of its modules."""


def trained_federation(retain: int = 0, **settings: Any) -> Federation:
    """Three rounds, after which no two clients have the same model; client 3 has its first one."""
    settings = ONE_STEP | SERVER | settings
    federation = Federation("pfedla", make_task(Normed), retain=retain, **settings)
    for number, cohort in enumerate([[0, 1, 2], [1, 2], [0, 2]]):
        federation.round(cohort, number)
    return federation


def layers_in(federation: Federation) -> dict[str, list[str]]:
    """What has a weight of each client: a layer, or the whole model."""
    whole = federation.config.weigh == "models"
    return {"model": [name for names in LAYERS.values() for name in names]} if whole else LAYERS


def mixture_of(federation: Federation, client: int, retain: int = 0) -> dict[str, Tensor]:
    """sum_j alpha[l, j] theta_j entry by entry, but for the retained layers: the client's own."""
    server = federation.server
    alpha = server.hyper_nets(torch.tensor([client]))[0]  # (layers, n)
    model, own = server.trained["base"], alpha[:, client].tolist()
    retained = sorted(range(len(own)), key=lambda at: -own[at])[:retain]
    mixture = {}
    for at, names in enumerate(layers_in(federation).values()):
        for name in names:
            weighed = [a * theta for a, theta in zip(alpha[at], model[name].double(), strict=True)]
            mixed = model[name][client].double() if at in retained else torch.stack(weighed).sum(0)
            mixture[name] = mixed.round().long() if "num_batches" in name else mixed
    return mixture


def loss_of(federation: Federation, client: int, mixture: dict[str, Tensor]) -> Tensor:
    """The client's loss; batch-norm writes its statistics into copies."""
    kept = {n: value.detach().clone() for n, value in mixture.items() if n not in PARAMETERS}
    return client_loss(federation.task, client, mixture | kept)


PARAMETERS = dict(Normed().named_parameters()).keys()


def check_one_round(clients: list[int], retain: int = 0, **settings: Any) -> None:
    """One round against gradient descent on the one-piece objective, and what is kept and used.

    With one plain local step of rate eta, delta = eta times the gradient in the mixture, so
    descending the pull-back is gradient descent with rate lr * eta on sum_i L_i(mixture_i).
    """
    federation = trained_federation(retain, **settings)
    server = federation.server
    assert list(server.weights(torch.tensor(clients))) == list(layers_in(federation))
    rate = ONE_STEP["local_lr"]
    stored = trees.clone(server.trained["base"])
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        mixture = mixture_of(federation, client, retain)
        loss = loss_of(federation, client, mixture)
        objective = objective + loss
        leaves = {name: mixture[name].detach().requires_grad_() for name in PARAMETERS}
        loss_of(federation, client, mixture | leaves).backward()
        for name, leaf in leaves.items():
            stored[name][client] = (leaf - rate * leaf.grad).detach()
    named = dict(server.hyper_nets.named_parameters())
    gradients = torch.autograd.grad(objective, list(named.values()))
    expected = {
        name: (value - federation.config.lr * rate * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }

    federation.round(clients, 3)

    ours = {name: value.detach() for name, value in server.hyper_nets.named_parameters()}
    torch.testing.assert_close(ours, expected, **CLOSE)
    for name in PARAMETERS:
        torch.testing.assert_close(server.trained["base"][name], stored[name], **CLOSE)
    for client in range(4):
        mixture = trees.detach(mixture_of(federation, client, retain))
        torch.testing.assert_close(federation.personal(client), mixture, **CLOSE)


@pytest.mark.parametrize("retain", [0, 1, 2])
@pytest.mark.parametrize("clients", [[1], [3], [0, 1, 3]])
def test_the_update_is_the_gradient_of_the_one_piece_objective(
    clients: list[int], retain: int
) -> None:
    check_one_round(clients, retain)


def test_whole_models_have_one_weight_for_all_layers() -> None:
    check_one_round([0, 1, 3], weigh="models")
    with pytest.raises(ValueError, match="weigh must be layers where layers are retained"):
        Federation("pfedla", make_task(), weigh="models", retain=1)


def test_the_update_moves_the_participants_hypernetworks_and_no_other() -> None:
    federation = trained_federation()
    before = trees.clone(federation.server.state()["hyper_nets"])
    federation.round([1], 3)
    after = federation.server.state()["hyper_nets"]
    for name, old in before.items():
        moved = (after[name] - old).abs().flatten(1).amax(dim=1)
        assert [bool(rows > 0) for rows in moved] == [False, True, False, False], name


# Mutants: what the checks above are worth.


def flipped(sent: trees.Tree, trained: trees.Tree) -> trees.Tree:
    return {name: trained[name] - value for name, value in sent.items()}


def own_over_mixture(self: pfedla.Client, received: dict[str, Tensor]) -> dict[str, Tensor]:
    """The public error: the mixture is loaded, then overwritten by the client's own model."""
    return received | self.recall("model", self.initial)


def to_a_neighbour(model: Any, delta: Any, weight: Tensor) -> None:
    PULL_BACK(model, trees.tree_map(lambda leaf: leaf.roll(1, 0), delta), weight)


PULL_BACK = trees.pull_back


def each_entry_a_layer(net: Any) -> dict[str, list[str]]:
    return {name: [name] for names in LAYERS.values() for name in names}


def biases_elsewhere(net: Any) -> dict[str, list[str]]:
    other = {"body.bias": "head.bias", "head.bias": "body.bias"}
    return {layer: [other.get(n, n) for n in names] for layer, names in LAYERS.items()}


def without_buffers(net: Any) -> dict[str, list[str]]:
    return {layer: [n for n in names if n in PARAMETERS] for layer, names in LAYERS.items()}


def buffers_too(net: Any) -> list[str]:
    return [name for name, value in trees.model_of(net).items() if value.is_floating_point()]


@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (trees, "subtract", flipped),
        (pfedla.Client, "personal_model", own_over_mixture),
        (trees, "pull_back", to_a_neighbour),
        (torch.optim, "SGD", partial(torch.optim.SGD, momentum=0.9)),
        (torch.optim, "SGD", partial(torch.optim.SGD, weight_decay=0.1)),
        (pfedla, "layers_of", each_entry_a_layer),
        (pfedla, "layers_of", biases_elsewhere),
        (pfedla, "layers_of", without_buffers),
        (pfedla, "shapes_of", buffers_too),
    ],
)
def test_a_mutant_is_caught(
    place: Any, name: str, mutant: Callable[..., Any], retain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check_one_round([0, 1, 3], retain)


# The limits.


def with_weights(federation: Any, logits: Tensor) -> Any:
    """Makes all layers' weights the softmax of the rows of ``logits`` (n, n), for good."""
    head = federation.server.hyper_nets.heads["base"]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(logits.repeat(1, head.bias.shape[1] // len(logits)))
    return federation


STILL: dict[str, Any] = PLAIN | SERVER | {"lr": 1e-30}
"""Hypernetworks that do not move."""
ROUNDS = ([0, 1, 2, 3], [1, 3], [0, 1, 2])


@pytest.mark.parametrize("retain", [0, 3])
def test_identity_weights_are_local_training(retain: int) -> None:
    settings = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1}
    task = make_task(Normed)
    ours = Federation("pfedla", task, retain=retain, **(STILL | settings))
    if retain == 0:  # identity: exp(-1000) is 0; retaining all layers is the same
        ours = with_weights(ours, 1000 * torch.eye(4))
    local = Federation("local", task, **(PLAIN | settings))
    for number, cohort in enumerate(ROUNDS):
        for federation in (ours, local):
            federation.round(cohort, number)
    for client in range(4):
        torch.testing.assert_close(ours.personal(client), local.personal(client), **CLOSE)


def test_uniform_weights_are_fedavg_with_equal_weights() -> None:
    settings = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1}
    task = make_task(Normed, examples=(9,) * 4)
    ours = with_weights(Federation("pfedla", task, **(STILL | settings)), torch.zeros(4, 4))
    fedavg = Federation("fedavg", task, **(PLAIN | settings))
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 1, 2, 3], number)
    for client in range(4):
        torch.testing.assert_close(ours.personal(client), fedavg.personal(client), **CLOSE)


# The weights.


def chain(clients: int = 7, classes_of_one: int = 4) -> Task:
    """Client i has the classes i to i + 3, as in figure 6: close clients share most classes."""
    draw = torch.Generator().manual_seed(3)
    classes = clients + classes_of_one - 1
    centres = 1.5 * torch.randn(classes, FEATURES, dtype=torch.float64, generator=draw)
    y = torch.cat([torch.arange(24) % classes_of_one + client for client in range(clients)])
    noise = torch.randn(len(y), FEATURES, dtype=torch.float64, generator=draw)
    parts = list(torch.arange(len(y)).split(24))

    class Net(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, classes)

    with seeded(0, "chain"):
        models = {"base": Net().double()}
    return Task("chain", centres[y] + noise, y, parts, parts, parts, models, classes)


def test_clients_with_common_classes_weigh_more_than_strangers() -> None:
    """Figure 6, with the hypernetworks as they are by default."""
    settings = {"local_steps": 5, "batch_size": 24, "local_lr": 0.2}
    federation = Federation("pfedla", chain(), **(PLAIN | settings))
    everyone = torch.arange(7)
    for number in range(20):
        federation.round(everyone.tolist(), number)
    apart = (everyone[:, None] - everyone).abs()
    for layer, weights in federation.server.weights(everyone).items():
        own, neighbours = weights[apart == 0].mean(), weights[apart == 1].mean()
        strangers = weights[apart >= 4].mean()  # no class in common
        assert own > 1.2 * neighbours > 1.4 * strangers, layer


def test_each_client_has_a_hypernetwork_of_the_sizes_in_the_settings() -> None:
    settings = {"embedding_size": 6, "hidden": 7, "hidden_layers": 3}
    nets = Federation("pfedla", make_task(), **settings).server.hyper_nets
    assert nets.embeddings.weight.shape == (4, 6)
    assert [layer.weight.shape for layer in nets.trunk] == [(4, 7, 6), *[(4, 7, 7)] * 3]
    assert nets.heads["base"].weight.shape == (4, 2 * 4, 7)  # of two layers, for four clients


def test_a_rate_suits_its_preset() -> None:
    """The paper's is for many more and longer rounds than those of the default."""
    assert from_keys("pfedla", {}).settings.lr == 0.1
    for method in ("pfedla", "heurpfedla"):
        for preset in ("paper", "paper_100"):
            assert from_keys(method, {"preset": preset}).settings.lr == 1e-2


def test_weights_are_a_function_of_the_state() -> None:
    federation = trained_federation()
    before = trees.clone(federation.server.state())
    ids = torch.tensor([2, 0])
    weights = federation.server.weights(ids)
    assert {layer: alpha.shape for layer, alpha in weights.items()} == dict.fromkeys(LAYERS, (2, 4))
    for alpha in weights.values():
        assert not alpha.requires_grad
        assert bool((alpha >= 0).all())
        torch.testing.assert_close(alpha.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(federation.server.weights(ids), weights, rtol=0, atol=0)
    torch.testing.assert_close(federation.server.state(), before, rtol=0, atol=0)


def test_an_evaluation_records_who_takes_how_much_from_whom(tmp_path: Path) -> None:
    task = chain()
    settings = PLAIN | {"local_steps": 5, "batch_size": 24, "local_lr": 0.2, "lr": 1.0}
    keys: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "cohort": 1.0}
    run = hyperfed.train("pfedla", task, method=settings, out=tmp_path, **keys)
    ours, weights = Federation("pfedla", task, **settings), {}
    for number in range(4):
        ours.round(range(7), number)
        weights[number + 1] = ours.server.weights(torch.arange(7))  # rows: who takes
    assert run.folder is not None
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    told = {line["round"]: line["diagnostics"] for line in lines if line["split"] == "val"}
    assert list(told) == [2, 4]
    for number, diagnostics in told.items():
        found = trees.tree_map(torch.tensor, {"weights": diagnostics["weights"]})
        expected = trees.tree_map(Tensor.float, {"weights": {"base": weights[number]}})
        torch.testing.assert_close(found, expected, rtol=6e-4, atol=0)  # four digits
    assert [line["diagnostics"] for line in lines if line["split"] == "test"] == [{}, {}]
    assert [e.diagnostics for e in run.evaluations if e.split == "val"] == list(told.values())
    best = {"weights": {"base": weights[run.best.round]}}
    with_weights(run, torch.zeros(7, 7))  # what comes after it does not count
    torch.testing.assert_close(run.diagnostics(), best, rtol=0, atol=0)


def test_weights_of_more_clients_than_records_have_room_for_are_those_of_the_best_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are clients by clients for each layer, and thousands of clients are not rare."""
    numbers = 2 * 7**2  # body and head
    keys: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "cohort": 1.0}
    kept = {}
    for most in (numbers, numbers - 1):
        monkeypatch.setattr(records, "MOST_NUMBERS", most)
        run = hyperfed.train("pfedla", chain(), method=PLAIN, **keys)
        kept[most] = [bool(e.diagnostics) for e in run.evaluations if e.split == "val"]
        (shape,) = {alpha.shape for alpha in run.diagnostics()["weights"]["base"].values()}
        assert shape == (7, 7)
        assert caplog.text.count("not recorded at evaluations") == (most < numbers)
    assert kept == {numbers: [True, True], numbers - 1: [False, False]}
    assert f"the {numbers} numbers of the server's diagnostics" in caplog.text


def test_weights_that_are_uniform_are_told_from_those_that_were_learned() -> None:
    ours = Federation("pfedla", chain(), **PLAIN | {"local_steps": 5, "local_lr": 0.2, "lr": 1.0})
    for number in range(4):
        ours.round(range(7), number)

    def own() -> dict[str, float]:
        """The mean weight of a client's own model, of each layer."""
        told = ours.server.diagnostics()["weights"]["base"]
        return {layer: alpha.diagonal().mean().item() for layer, alpha in told.items()}

    assert all(mean > 2 / 7 for mean in own().values())
    with_weights(ours, torch.zeros(7, 7))
    assert own() == pytest.approx(dict.fromkeys(["body", "head"], 1 / 7))


# HeurpFedLA.


@pytest.mark.parametrize("retain", [0, 1, 2, 3])
def test_bytes_fall_as_the_retained_layers_sizes_say(retain: int) -> None:
    federation = trained_federation(retain)
    model = trees.model_of(federation.task.models["base"])
    size = {
        layer: sum(model[name].numel() * 8 for name in names) for layer, names in LAYERS.items()
    }
    total = sum(size.values())
    weights = federation.server.weights(torch.arange(4))
    expected = {}
    for client in range(4):
        own = {layer: float(alpha[client, client]) for layer, alpha in weights.items()}
        retained = sorted(own, key=lambda layer: -own[layer])[:retain]
        expected[client] = (total - sum(size[layer] for layer in retained), total)
    cohort = federation.round([0, 1, 2, 3], 3)
    assert {e.client: (e.down, e.up) for e in cohort.state.exchanges} == expected
    assert retain in (0, 3) or len(set(expected.values())) > 1  # the clients do differ


@pytest.mark.parametrize(("retain", "kept"), [(1, ["norm"]), (2, ["norm", "head"])])
def test_layers_are_retained_in_the_order_of_their_own_weights(
    retain: int, kept: list[str]
) -> None:
    """An order that is not its own inverse: who comes first is not the place of the first."""
    federation = Federation("pfedla", make_task(Normed), retain=retain, **ONE_STEP, **SERVER)
    head = federation.server.hyper_nets.heads["base"]
    with torch.no_grad():
        head.weight.zero_()
        own = head.bias.zero_().view(4, len(LAYERS), 4).diagonal(dim1=0, dim2=2)  # (layers, n)
        own.copy_(torch.tensor([[1.0], [3.0], [2.0]]))
    cohort = federation.engine.cohort(range(4), 0, training=True)
    _, sent = federation.server.mix(cohort)
    assert sent == [{n for layer in LAYERS.keys() - kept for n in LAYERS[layer]}] * 4


class Made(Normed):
    """With a body whose weight is made from others, and statistics that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = spectral_norm(weight_norm(self.body))
        self.norm = torch.nn.BatchNorm1d(4, affine=False)


def test_what_a_retained_weight_is_made_from_is_not_sent_either() -> None:
    settings = ONE_STEP | SERVER | {"retained_layers": ("body",)}
    federation = Federation("heurpfedla", make_task(Made), **settings)
    _, sent = federation.server.mix(federation.engine.cohort([0, 1], 0, training=True))
    names = trees.model_of(federation.task.models["base"])
    assert sent == [{name for name in names if not name.startswith("body.")}] * 2


@pytest.mark.parametrize(("layers", "retain"), [(("head",), 0), (("norm", "body"), 1)])
def test_fixed_layers_are_retained_by_everybody(layers: tuple[str, ...], retain: int) -> None:
    """The same ones by all clients, whatever the ranking; all others are sent."""
    federation = trained_federation(retain, retained_layers=layers)
    task, stored = federation.task, trees.clone(federation.server.trained["base"])
    sent = {c: trees.detach(mixture_of(federation, c)) for c in range(4)}
    for client in range(4):
        for layer in layers:
            sent[client] |= {name: stored[name][client] for name in LAYERS[layer]}
        torch.testing.assert_close(federation.personal(client), sent[client], **CLOSE)
    before = trees.clone(federation.server.state()["hyper_nets"])
    cohort = federation.round([0, 1, 2, 3], 3)
    model = trees.model_of(task.models["base"])
    kept = [name for layer in layers for name in LAYERS[layer]]
    down = sum(value.numel() * 8 for name, value in model.items() if name not in kept)
    assert {e.down for e in cohort.state.exchanges} == {down}
    after = federation.server.state()["hyper_nets"]
    head = after["heads.base.bias"] - before["heads.base.bias"]  # (n, L * n)
    moved = head.reshape(4, len(LAYERS), 4).abs().amax((0, 2)) > 0
    assert moved.tolist() == [layer not in layers for layer in LAYERS]


def test_a_fixed_layer_must_be_one() -> None:
    message = r"retained_layers must be layers of every target, of body, head, got head, fc; remove"
    with pytest.raises(UserError, match=message):
        Federation("heurpfedla", make_task(), retained_layers=("head", "fc"))


CNN: dict[str, Callable[[], torch.nn.Module]] = {
    "EMNIST": lambda: LeNet((1, 28, 28), 10),
    "CIFAR-10": lambda: PFedLACNN((3, 32, 32), 10),
}
COSTS: list[tuple[str, tuple[str, ...], float, float]] = [
    ("EMNIST", (), 491.08, 491.08),
    ("EMNIST", ("fc3",), 488.65, 488.65),
    ("EMNIST", ("fc3", "fc1"), 312.52, 312.52),
    ("CIFAR-10", (), 693.98, 693.98),
    ("CIFAR-10", ("fc1",), 418.97, 418.98),
    ("CIFAR-10", ("fc1", "conv2"), 382.25, 382.27),
    ("CIFAR-10", ("fc1", "conv2", "fc3"), 379.82, 379.84),
]
"""Data, retained layers, the paper's "communication cost (MBytes)", and ours."""


@pytest.mark.parametrize(("data", "layers", "published", "expected"), COSTS)
def test_the_costs_of_the_paper(
    data: str, layers: tuple[str, ...], published: float, expected: float
) -> None:
    """Its table of costs: ten clients, 600 rounds, every layer kept by all of them alike.

    It is of 750 messages each way, an eighth of the 6000 that these are, as if bytes were bits.
    Four of its numbers are ours to the last digit. Where layers are retained on CIFAR-10, its
    differences (275.01, 36.72, 2.43) are up to 0.01 above what these layers are (275.00, 36.71).
    """
    net = CNN[data]()
    x = torch.zeros(8, *((1, 28, 28) if data == "EMNIST" else (3, 32, 32)))
    rows = [torch.arange(8)] * 2
    task = Task(data, x, torch.arange(8), rows, rows, rows, {"base": net}, classes=10)
    settings = ONE_STEP | SERVER | {"retained_layers": layers}
    cohort = Federation("heurpfedla" if layers else "pfedla", task, **settings).round([0, 1])
    messages = cohort.state.exchanges
    assert len({(message.down, message.up) for message in messages}) == 1
    cost = 750 * (messages[0].down + messages[0].up) / 2**20
    assert round(cost, 2) == expected
    assert abs(expected - published) < 0.021


def test_heurpfedla_retains_one_layer() -> None:
    federation = Federation("heurpfedla", make_task(), **ONE_STEP, **SERVER)
    cohort = federation.round([0, 1])
    body, head = (FEATURES * 4 + 4) * 8, (4 * 3 + 3) * 8
    assert {exchange.down for exchange in cohort.state.exchanges} <= {body, head}
    assert {exchange.up for exchange in cohort.state.exchanges} == {body + head}


def test_the_server_keeps_what_the_clients_keep_though_some_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(faults: Faults, seed: int, call: Call) -> bool:
        return (call.client + call.round) % 3 == 0

    monkeypatch.setattr(Faults, "drops", lost)
    task = make_task(Normed, examples=(12, 1, 20, 9))  # who has one example was not lost
    federation = Federation("heurpfedla", task, **ONE_STEP, **SERVER)
    for number in range(4):
        assert federation.round([0, 1, 2], number).state.lost
    for client, memory in federation.engine.memory.items():
        stored = trees.take(federation.server.trained["base"], client)
        torch.testing.assert_close(stored, memory["model"], rtol=0, atol=0)
    initial = trees.take(federation.server.trained["base"], 3)  # never sampled
    torch.testing.assert_close(initial, federation.task.outline().initial(), rtol=0, atol=0)


def test_the_hypernetwork_of_a_lost_client_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    federation = trained_federation()
    fresh = Federation("pfedla", federation.task, **ONE_STEP, **SERVER).server.state()
    for name, value in federation.server.state()["hyper_nets"].items():
        moved = (value - fresh["hyper_nets"][name]).abs().flatten(1).amax(dim=1) > 0
        assert moved.tolist() == [True, False, True, False], name


def test_more_layers_than_there_are_cannot_be_retained() -> None:
    with pytest.raises(UserError, match=r"retain must be 0 to 2, .* got 3; lower it"):
        Federation("pfedla", make_task(), retain=3)


# Which model is used.


def test_the_trained_model_can_be_evaluated() -> None:
    federation = trained_federation(evaluated="trained")
    stored = federation.server.trained["base"]
    for client in (0, 3):
        ours = federation.personal(client)
        torch.testing.assert_close(ours, trees.take(stored, client), rtol=0, atol=0)


@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_novel_client_starts_from_the_mean_of_all_models(steps: int, retain: int) -> None:
    task = make_task(novel=1)
    settings = ONE_STEP | SERVER | {"novel_steps": steps, "retain": retain}
    federation = Federation("pfedla", task, **settings)
    for number, cohort in enumerate([[0, 1, 2], [0, 2]]):
        federation.round(cohort, number)
    expected = {name: value.mean(0) for name, value in federation.server.trained["base"].items()}
    if steps:
        leaves = {name: value.clone().requires_grad_() for name, value in expected.items()}
        client_loss(task, 3, leaves).backward()
        expected = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in leaves.items()}
    torch.testing.assert_close(federation.personal(3), expected, **CLOSE)
    assert 3 not in federation.engine.memory


def test_a_novel_client_is_fine_tuned_for_its_own_number_of_steps() -> None:
    task = make_task(novel=1)
    settings = ONE_STEP | SERVER | {"novel_steps": 3}
    federation = Federation("pfedla", task, **settings)
    federation.round([0, 1, 2])
    leaves = {name: value.mean(0) for name, value in federation.server.trained["base"].items()}
    for _ in range(3):  # of its own: a known client has one
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        client_loss(task, 3, leaves).backward()
        leaves = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in leaves.items()}
    torch.testing.assert_close(federation.personal(3), leaves, **CLOSE)


def two_sizes(**options: Any) -> Task:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    return make_task(models=models, sizes=("S", "L", "S", "L"), **options)


def test_a_novel_client_starts_from_the_mean_of_the_models_of_its_size() -> None:
    task = two_sizes(novel=1)
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER, evaluated="trained")
    for number in range(2):
        federation.round([0, 1, 2], number)
    ours, stored = federation.personal(3), federation.server.trained
    for name, value in stored["L"].items():
        torch.testing.assert_close(ours[name], value[1], **CLOSE)  # client 1 alone is as large
    initial = task.outline().initial("L")
    assert (ours["body.weight"] - initial["body.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [0, 1])
def test_a_novel_client_of_a_size_that_nobody_has_starts_from_its_initial_model(steps: int) -> None:
    task = replace(two_sizes(novel=1), sizes=("S", "S", "S", "L"))
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER, novel_steps=steps)
    for number in range(2):  # the server has met everyone
        federation.round([0, 1, 2], number)
    expected = task.outline().initial("L")
    if steps:
        expected = torch_sgd(task, 3, expected, 1, lr=0.1)
    torch.testing.assert_close(federation.personal(3), expected, **CLOSE)
    told = federation.server.diagnostics()["weights"]
    assert not torch.stack([*told["L"].values()]).any()  # NaN would count as true
    own = torch.stack([*told["S"].values()])
    torch.testing.assert_close(own.sum(-1), torch.ones_like(own[..., 0]), **CLOSE)


def test_of_several_sizes_each_client_s_hypernetwork_makes_one_step() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": torch.nn.Linear(FEATURES, CLASSES).double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER)
    for number in range(2):  # of models that are all alike any mixture is the same
        federation.round([0, 1, 2, 3], number)
    server, losses = federation.server, []
    for client in range(4):
        size, rows = task.size_of(client), task.train[client]
        (alpha,) = server.hyper_nets(torch.tensor([client]), size, server.members[size])
        model = {
            name: torch.tensordot(weights, server.trained[size][name], dims=1)
            for weights, names in zip(alpha, server.layers[size].values(), strict=True)
            for name in names
        }
        output = logits(models[size], model, task.x[rows])
        losses.append(torch.nn.functional.cross_entropy(output, task.y[rows]))
    named = dict(server.hyper_nets.named_parameters())
    gradients = torch.autograd.grad(sum(losses), list(named.values()))
    rate = federation.config.lr * federation.config.local_lr
    expected = {
        name: (value - rate * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }
    federation.round([0, 1, 2, 3], 2)
    torch.testing.assert_close(trees.detach(named), expected, **CLOSE)


def test_a_client_is_mixed_from_the_clients_of_its_own_size() -> None:
    task = two_sizes()
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER)
    unseen = federation.server.weights(torch.tensor([0]), "S")["body"]
    assert bool((unseen > 0).all())  # the server has not yet met anyone
    for number in range(2):
        federation.round([0, 1, 2, 3], number)
    alpha = federation.server.weights(torch.tensor([0]), "S")
    assert list(alpha) == ["body", "head"]
    stored = federation.server.trained["S"]
    ours = federation.personal(0)
    for name, value in ours.items():
        (weight,) = alpha[name.split(".")[0]]
        assert weight[[1, 3]].tolist() == [0, 0]
        expected = weight[0] * stored[name][0] + weight[2] * stored[name][2]
        torch.testing.assert_close(value, expected, **CLOSE)

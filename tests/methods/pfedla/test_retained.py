"""What clients of pFedLA and HeurpFedLA retain: which layers, their bytes, the costs published."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.errors import UserError
from hyperfed.nets import LeNet, PFedLACNN
from hyperfed.task import Task
from methods.pfedla.checks import CLOSE, LAYERS, SERVER, mixture_of, trained_federation
from toys import FEATURES, ONE_STEP, Federation, Normed, make_task


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


def test_more_layers_than_there_are_cannot_be_retained() -> None:
    with pytest.raises(UserError, match=r"retain must be 0 to 2, .* got 3; lower it"):
        Federation("pfedla", make_task(), retain=3)

"""IT-PFL-HN, end to end: hypernetwork and encoder descend one loss together, seen in one piece."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.federation import AllLostError
from hyperfed.system.randomness import generator, seeded
from methods.itpfl.checks import (
    LENGTH,
    UNITS,
    NormedInputs,
    encode,
    encoder_of,
    federation,
    generated,
    inputs,
    state,
)
from toys import CLASSES, FEATURES, Federation, TwoLayers, client_loss, close, logits, make_task


def check_end_to_end(clients: list[int], **settings: Any) -> None:
    """One round is gradient descent on the mean, or sum, of L_i(h(g(x_i))), by one-piece autograd.

    Hypernetwork and encoder step each by its own rate.
    """
    ours = federation(settings={"encoder": "end_to_end"} | settings)
    server, config = ours.server, ours.config
    leaves = {name: value.requires_grad_() for name, value in encoder_of(ours).items()}
    together = 1 if config.cohort_reduction == "sum" else len(clients)
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        descriptor = encode(leaves, inputs(ours, client), bounded=config.bounded)
        made = {name: value[0] for name, value in server.hyper_net(descriptor[None]).items()}
        objective = objective + client_loss(ours.task, client, made) / together
    of_net, of_encoder = dict(server.hyper_net.named_parameters()), list(leaves.values())
    gradients = torch.autograd.grad(objective * config.local_lr, [*of_net.values(), *of_encoder])
    expected_net = {
        name: (value - config.lr * gradient).detach()
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
    close(dict(server.hyper_net.named_parameters()), expected_net)
    close(encoder_of(ours), expected)
    assert len(server.embeddings.weight) == 0


@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
@pytest.mark.parametrize(
    "settings",
    [{}, {"private": True}, {"cohort_reduction": "mean"}, {"encoder_optimizer": "adam"}],
)
def test_end_to_end_is_the_one_piece_gradient(clients: list[int], settings: dict[str, Any]) -> None:
    check_end_to_end(clients, **settings)


def test_end_to_end_an_averaged_encoder_descends_by_plain_steps() -> None:
    """Momentum and weight decay are the hypernetwork's."""
    settings = {"momentum": 0.9, "weight_decay": 0.1, "phase_one_rounds": 3}
    ours = federation(settings={"encoder": "end_to_end"} | settings)
    for number in range(3):
        leaves = {name: value.requires_grad_() for name, value in encoder_of(ours).items()}
        made = ours.server.hyper_net(encode(leaves, inputs(ours, 2))[None])
        loss = ours.config.local_lr * client_loss(ours.task, 2, trees.take(made, 0))
        pulled = torch.autograd.grad(loss, list(leaves.values()))
        expected = {
            name: (value - ours.config.encoder_lr * by).detach()
            for (name, value), by in zip(leaves.items(), pulled, strict=True)
        }
        ours.round([2], number)
        close(encoder_of(ours), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_end_to_end_a_client_lost_on_the_way_equals_one_never_sampled(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, settings = {"left": 0}, {"encoder": "end_to_end", "cohort_reduction": reduction}

    def loses_client_1(faults: Faults, seed: int, call: Call) -> bool:
        calls["left"] -= call.client == 1
        return call.client == 1 and calls["left"] == 0

    smaller = federation(settings=settings)
    smaller.round([0, 2], 0)
    monkeypatch.setattr(Faults, "drops", loses_client_1)
    for message in (1, 2, 3):  # its descriptor, its delta, its gradient of the encoder
        calls["left"] = message
        lossy = federation(settings=settings)
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
    close(ours.personal(1), known)
    novel = generated(server.novel_net, encode(encoder, inputs(ours, 3)))
    close(ours.personal(3), novel)
    assert not torch.allclose(server.novel_net.trunk[0].weight, server.hyper_net.trunk[0].weight)
    rehearsed = server.rehearse(ours.engine.cohort([0, 1], 2, training=False)).tree
    novel = generated(server.novel_net, encode(encoder, inputs(ours, 1)))
    close(trees.take(rehearsed, 1), novel)
    assert caplog.text == ""  # there is no embedding to be explained


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_end_to_end_serves_several_sizes_and_averages_batch_norm(reduction: str) -> None:
    """Each reply is the gradient of a client's own descriptor, whatever its size and place.

    Batch-norm's statistics are averaged, whatever the gradients come to.
    """
    with seeded(0, "sizes"):
        models = {"S": NormedInputs().double(), "L": TwoLayers().double()}
    settings = {"encoder": "end_to_end", "cohort_reduction": reduction}
    ours = federation(models=models, sizes=("S", "L", "S", "L"), settings=settings)
    server, config, before = ours.server, ours.config, encoder_of(ours)
    network = copy.deepcopy(server.encoder)
    total = {name: torch.zeros_like(v) for name, v in trees.parameters_of(network).items()}
    buffers = {name: torch.zeros_like(v) for name, v in trees.buffers_of(network).items()}
    for client in (0, 1, 2):
        trees.fill(network, before)
        size = ours.task.size_of(client)
        made = server.hyper_net(network.train()(inputs(ours, client))[None], size)
        own = {name: value[0] for name, value in made.items()}
        start = {name: own.get(name, v) for name, v in models[size].state_dict().items()}
        index = ours.task.train[client]
        output = logits(models[size], start, ours.task.x[index])
        loss = config.local_lr * torch.nn.functional.cross_entropy(output, ours.task.y[index])
        pulled = torch.autograd.grad(loss, list(network.parameters()))
        total = {name: total[name] + g for name, g in zip(total, pulled, strict=True)}
        buffers = {n: buffers[n] + v / 3 for n, v in network.named_buffers()}
    assert buffers
    ours.round([0, 1, 2], 0)
    rate = config.encoder_lr / (3 if reduction == "mean" else 1)
    expected = {name: before[name] - rate * g for name, g in total.items()}
    after = encoder_of(ours)
    close({n: after[n] for n in total}, expected)
    found = {n: v.double() for n, v in after.items() if n in buffers}
    close(found, {n: v.double() for n, v in buffers.items()})


def test_end_to_end_a_number_by_itself_is_trained_in_its_precision() -> None:
    """PyTorch would make float64 of one that is multiplied by another."""

    class Scaled(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.scale * x)

    task = make_task()
    task = replace(task, x=task.x.float(), models={"base": Scaled()})
    ours = Federation("itpfl", task, encoder="end_to_end", cohort_reduction="sum", local_steps=1)
    before = encoder_of(ours)
    ours.round([0, 1], 0)
    moved = {name: before[name] - value for name, value in encoder_of(ours).items()}
    assert {value.dtype for value in moved.values()} == {torch.float32}
    assert [name for name, value in moved.items() if "scale" in name and value != 0]


def test_end_to_end_a_model_is_made_of_one_batch() -> None:
    """And the encoder's gradient is that of the same batch."""
    ours = federation(settings={"encoder": "end_to_end", "batch_size": 4})
    task, leaves = ours.task, encoder_of(ours)
    looked, trained = (
        task.train[2][torch.randperm(20, generator=generator(0, "batches", 2, 0, step, 0))[:4]]
        for step in ("describe_batch", "train_model")
    )
    for value in leaves.values():
        value.requires_grad_()
    made = ours.server.hyper_net(encode(leaves, task.x[looked])[None])
    output = logits(task.models["base"], trees.take(made, 0), task.x[trained])
    loss = ours.config.local_lr * torch.nn.functional.cross_entropy(output, task.y[trained])
    pulled = torch.autograd.grad(loss, list(leaves.values()))
    expected = {
        name: (value - ours.config.encoder_lr * by).detach()
        for (name, value), by in zip(leaves.items(), pulled, strict=True)
    }
    ours.round([2], 0)
    close(encoder_of(ours), expected)


def test_end_to_end_what_travels() -> None:
    ours = federation(settings={"encoder": "end_to_end"})
    parameters = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
    encoder = (FEATURES * UNITS + UNITS + UNITS * 4 + 4 + 4 * LENGTH + LENGTH) * 8
    train = ("train_model", parameters, parameters)
    learning = [("describe_batch", encoder, LENGTH * 8), train]
    learning.append(("encoder_gradient", LENGTH * 8, encoder))
    # In phase 2 a client describes itself by all its inputs, as a novel one does.
    for number, expected in ((0, learning), (1, [("describe", encoder, LENGTH * 8), train])):
        cohort = ours.round([1], number)
        assert [(e.step, e.down, e.up) for e in cohort.state.exchanges] == expected

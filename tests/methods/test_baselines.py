"""Local, FedAvg and FedPer against one-piece autograd and PyTorch's own optimiser; and heads."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.system.randomness import generator
from hyperfed.training import Steps
from toys import (
    EXAMPLES,
    ONE_STEP,
    PLAIN,
    Federation,
    Normed,
    client_loss,
    close,
    logits,
    make_task,
    short,
)


def gradient(task, client: int, model: dict[str, Tensor]) -> dict[str, Tensor]:
    """One-piece gradient of a client's mean loss."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    return dict(
        zip(
            leaves,
            torch.autograd.grad(client_loss(task, client, leaves), list(leaves.values())),
            strict=True,
        )
    )


def stepped(task, client: int, model: dict[str, Tensor], lr: float) -> dict[str, Tensor]:
    by = gradient(task, client, model)
    return {name: value - lr * by[name] for name, value in model.items()}


# FedAvg


def test_fedavg_is_a_gradient_step_on_the_sample_weighted_objective() -> None:
    task = make_task()
    federation = Federation("fedavg", task, **ONE_STEP)
    start, clients = task.outline().initial(), [0, 1, 2]
    federation.round(clients)
    total = sum(EXAMPLES[i] for i in clients)
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    objective = sum(EXAMPLES[i] / total * client_loss(task, i, leaves) for i in clients)
    objective.backward()
    expected = {name: start[name] - 0.1 * leaf.grad for name, leaf in leaves.items()}
    close(federation.server.model["base"], expected)


def test_fedavg_averages_batch_norm_buffers_too() -> None:
    task = make_task(Normed)
    federation = Federation("fedavg", task, **ONE_STEP)
    start, clients = task.outline().initial(), [0, 2]
    federation.round(clients)
    total = sum(EXAMPLES[i] for i in clients)
    mean = torch.zeros(4, dtype=torch.float64)
    for i in clients:
        hidden = task.x[task.train[i]] @ start["body.weight"].T + start["body.bias"]
        running = 0.9 * start["norm.running_mean"] + 0.1 * hidden.mean(0)
        mean += EXAMPLES[i] / total * running
    close(federation.server.model["base"]["norm.running_mean"], mean)
    assert federation.server.model["base"]["norm.num_batches_tracked"] == 1


def test_fedavg_with_one_client_is_centralised_sgd() -> None:
    task = make_task(examples=(12,))
    settings = {"local_steps": 5, "batch_size": 4, "local_lr": 0.1, "local_momentum": 0.0}
    federation = Federation("fedavg", task, **settings, local_weight_decay=0.01)
    net = task.models["base"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)
    start = trees.model_of(net)
    for number in range(3):
        federation.round([0], number)
        draw = generator(0, "batches", 0, number, "train_model", 0)
        for _ in range(5):
            rows = task.train[0][torch.randperm(12, generator=draw)[:4]]
            optimizer.zero_grad()
            F.cross_entropy(net(task.x[rows]), task.y[rows]).backward()
            optimizer.step()
    expected = trees.model_of(net)
    trees.fill(net, start)
    close(federation.server.model["base"], expected)


def test_fedavg_gives_every_client_the_global_model_and_fine_tunes_only_if_asked() -> None:
    task = make_task(novel=1)
    federation = Federation("fedavg", task, **ONE_STEP)
    federation.round([0, 1])
    federation_model = federation.server.model["base"]
    for client in (0, 3):
        torch.testing.assert_close(federation.personal(client), federation_model)
    tuned = Federation("fedavg", task, **ONE_STEP, novel_steps=1)
    tuned.round([0, 1])
    expected = stepped(task, 3, federation_model, 0.1)
    close(tuned.personal(3), expected)
    torch.testing.assert_close(tuned.server.model["base"], federation_model)  # untouched


# FedPer


def test_fedper_averages_the_body_of_jointly_trained_models_and_keeps_heads() -> None:
    task = make_task()
    federation = Federation("fedper", task, **ONE_STEP)
    start, clients = task.outline().initial(), [0, 1, 3]
    federation.round(clients)
    trained = {i: stepped(task, i, start, 0.1) for i in clients}
    total = sum(EXAMPLES[i] for i in clients)
    body = {
        name: sum(EXAMPLES[i] / total * trained[i][name] for i in clients)
        for name in ("body.weight", "body.bias")
    }
    close(federation.server.body["base"], body)
    for i in clients:
        head = {name: trained[i][name] for name in ("head.weight", "head.bias")}
        close(federation.engine.memory[i]["head"], head)
        close(federation.personal(i), body | head)
    unseen = federation.personal(2)  # sampled in no round so far: the common initial head
    torch.testing.assert_close(unseen["head.weight"], start["head.weight"])


def test_fedper_sends_no_head() -> None:
    cohort = Federation("fedper", make_task(), **ONE_STEP).round([0, 1])
    body = (4 * 5 + 4) * 8
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(body, body)] * 2


def test_fedper_with_an_empty_head_is_fedavg() -> None:
    settings = {"local_steps": 3, "batch_size": 4}
    ours = Federation("fedper", make_task(Normed), **settings, head_layers=0)
    fedavg = Federation("fedavg", make_task(Normed), **settings)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 2, 3], number)
    torch.testing.assert_close(
        ours.server.body["base"], fedavg.server.model["base"], rtol=0, atol=0
    )


def test_a_novel_client_of_fedper_fits_a_head_on_the_frozen_body() -> None:
    task = make_task(novel=1)
    federation = Federation("fedper", task, **ONE_STEP, novel_steps=3)
    federation.round([0, 1, 2])
    body = federation.server.body["base"]
    start, ours = task.outline().initial(), federation.personal(3)
    for name in body:
        torch.testing.assert_close(ours[name], body[name], rtol=0, atol=0)
    head = {name: start[name] for name in ("head.weight", "head.bias")}
    for _ in range(3):  # from the second on, a body that had moved would show
        by = gradient(task, 3, body | head)
        head = {name: value - 0.1 * by[name] for name, value in head.items()}
    close({name: ours[name] for name in head}, head)
    assert 3 not in federation.engine.memory


# Local


def test_local_sends_nothing_and_clients_do_not_meet() -> None:
    task = make_task()
    alone, together = (Federation("local", task, local_steps=3, batch_size=4) for _ in range(2))
    alone.round([2])
    cohort = together.round([0, 1, 2, 3])
    torch.testing.assert_close(alone.personal(2), together.personal(2), rtol=0, atol=0)
    assert {(e.down, e.up) for e in cohort.state.exchanges} == {(0, 0)}


def test_a_novel_client_of_local_trains_its_own_model() -> None:
    task = make_task(novel=1)
    settings = PLAIN | {"batch_size": 10_000, "local_lr": 0.1}
    federation = Federation("local", task, **settings, novel_steps=2)
    start = task.outline().initial()
    expected = stepped(task, 3, stepped(task, 3, start, 0.1), 0.1)
    close(federation.personal(3), expected)


# What is evaluated


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "pfedhn", "pfedhn_pc"])
def test_the_evaluated_model_is_the_personal_one(method: str) -> None:
    task = make_task()
    federation = Federation(method, task, local_steps=5, batch_size=4, local_lr=0.3)
    for number in range(3):
        federation.round([0, 1], number)
    cohort = federation.engine.cohort([0, 1], 3, training=False)
    counts = cohort.ask(federation.method.Client.evaluate, federation.server.personalize(cohort))
    for position, client in enumerate((0, 1)):
        model, rows = federation.personal(client), task.test[client]
        output = logits(task.models["base"], model, task.x[rows]).detach()
        loss = F.cross_entropy(output, task.y[rows], reduction="sum")
        close(counts["test"]["loss"][position], loss)


def test_steps_are_what_the_settings_say() -> None:
    assert Federation("fedavg", make_task(), local_steps=3).config.batches == Steps(3, 64)


# What several of them have


LAYERS = {
    method: {key: 3}
    for method in sorted(METHODS)
    for key in ("head_layers", "higher_layers")
    if hasattr(METHODS[method].Config, key)
}
LAYERS["partialfed"] |= {"strategy": "fixed"}


@pytest.mark.parametrize("method", LAYERS)
def test_no_head_has_more_layers_than_there_are(method: str) -> None:
    """And it is said before anything is trained."""
    with pytest.raises(UserError, match=r"must .* 0 to 2 .* got 3"):
        Federation(method, make_task(), **LAYERS[method])


@pytest.mark.parametrize("method", ["fedper", "fedrep", "headstart", "pfedhn_pc"])
def test_statistics_among_personal_layers_are_the_clients_own(method: str) -> None:
    """Whoever else is in the round: they are of what the client's own layers make."""
    kept = []
    for clients in ([0], [0, 1, 3]):
        federation = Federation(method, make_task(Normed), **short(method, head_layers=2))
        federation.round(clients)
        own = federation.personal(0)
        kept.append({name: own[name] for name in own if name.startswith("norm.")})
    assert kept[0]["norm.running_mean"].any()
    close(kept[1], kept[0])

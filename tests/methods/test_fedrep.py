"""FedRep against one-piece autograd: its phases and buffers, what travels and what stays."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from hyperfed import trees
from hyperfed.federation import step
from hyperfed.methods import fedrep
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from hyperfed.training import Epochs, Steps, fit
from hyperfed.trees import Model, Tree
from toys import EXAMPLES, ONE_STEP, PLAIN, Federation, Normed, client_loss, close, make_task

HEAD = ("head.weight", "head.bias")
SETTINGS = ONE_STEP | {"head_steps": 2, "local_steps": 1}
CLIENTS = [0, 1, 3]


def descended(
    task: Any, client: int, model: dict[str, Tensor], part: set[str]
) -> dict[str, Tensor]:
    """One plain gradient step on some entries."""
    leaves = {n: v.clone().requires_grad_(n in part) for n, v in model.items()}
    client_loss(task, client, leaves).backward()
    return {n: leaf.detach() - (0.1 * leaf.grad if n in part else 0) for n, leaf in leaves.items()}


def round_by_hand(
    federation: Federation, clients: list[int]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """(the next global body, the heads): two steps of the head, then one of the body."""
    task, sent = federation.task, federation.server.body["base"]
    body = {name: value for name, value in sent.items() if name not in HEAD}
    initial = task.outline().initial()
    total = sum(EXAMPLES[i] for i in clients)
    mean = {name: torch.zeros_like(value) for name, value in body.items()}
    heads = {}
    for i in clients:
        kept = federation.engine.memory.get(i, {}).get("head")
        model = body | (kept or {name: initial[name] for name in HEAD})
        for _ in range(2):
            model = descended(task, i, model, set(HEAD))
        model = descended(task, i, model, set(body))
        heads[i] = {name: model[name] for name in HEAD}
        mean = {name: mean[name] + EXAMPLES[i] / total * model[name] for name in body}
    return mean, heads


def check_two_rounds(prepare: Any = None) -> None:
    federation = Federation("fedrep", make_task(), **SETTINGS)
    if prepare:
        prepare(federation)
    for number, clients in enumerate((CLIENTS, [0, 3])):
        body, heads = round_by_hand(federation, clients)
        federation.round(clients, number)
        for i in clients:
            close(federation.engine.memory[i]["head"], heads[i])
            close(federation.personal(i), body | heads[i])
        ours = {name: federation.server.body["base"][name] for name in body}
        close(ours, body)


def test_the_head_trains_first_then_the_body_whose_mean_is_weighted_by_examples() -> None:
    check_two_rounds()


def test_a_client_that_was_never_asked_has_the_initial_head() -> None:
    federation = Federation("fedrep", make_task(), **SETTINGS)
    federation.round([0, 1])
    body, start = federation.server.body["base"], federation.task.outline().initial()
    expected = body | {name: start[name] for name in HEAD}
    torch.testing.assert_close(federation.personal(2), expected, rtol=0, atol=0)


# Buffers


def hidden_mean(task: Any, client: int, start: dict[str, Tensor]) -> Tensor:
    return (task.x[task.train[client]] @ start["body.weight"].T + start["body.bias"]).mean(0)


def check_the_buffers() -> None:
    """The body has seen one batch, its own, though the head trained on two before it."""
    task = make_task(Normed)
    federation = Federation("fedrep", task, **SETTINGS)
    start = task.outline().initial()
    federation.round(CLIENTS)
    total = sum(EXAMPLES[i] for i in CLIENTS)
    mean = sum(EXAMPLES[i] / total * 0.1 * hidden_mean(task, i, start) for i in CLIENTS)
    ours = federation.server.body["base"]
    assert ours["norm.num_batches_tracked"] == 1
    close(ours["norm.running_mean"], mean)


def test_the_frozen_bodys_statistics_do_not_move_while_the_head_trains() -> None:
    check_the_buffers()


def test_the_frozen_heads_statistics_do_not_move_while_the_body_trains() -> None:
    federation = Federation("fedrep", make_task(Normed), **SETTINGS, head_layers=2)
    federation.round(CLIENTS)
    assert federation.engine.memory[0]["head"]["norm.num_batches_tracked"] == 2
    assert set(federation.server.body["base"]) == {"body.weight", "body.bias"}


def test_the_frozen_bodys_parameters_do_not_move_while_the_head_trains() -> None:
    federation = Federation("fedrep", make_task(novel=1), **SETTINGS, novel_steps=20)
    federation.round([0])
    body = trees.clone(federation.server.body["base"])
    ours = federation.personal(3)
    torch.testing.assert_close({n: ours[n] for n in body}, body, rtol=0, atol=0)


# What travels


@pytest.mark.parametrize(("net", "buffers"), [(None, 0), (Normed, 4 * 4 + 1)])
def test_only_the_body_travels(net: Any, buffers: int) -> None:
    task = make_task(net) if net else make_task()
    federation = Federation("fedrep", task, **SETTINGS)
    cohort = federation.round([0, 1])
    body = (4 * 5 + 4 + buffers) * 8  # batch-norm: scale, shift, mean, variance and a counter
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(body, body)] * 2
    assert set(federation.server.body["base"]).isdisjoint(HEAD)
    assert set(federation.engine.memory[0]) == {"head"}
    assert set(federation.engine.memory[0]["head"]) == set(HEAD)


# Batches: steps or epochs


def replayed(federation: Federation, client: int, number: int, model: Model, head: int) -> Model:
    """The client's round by PyTorch's optimisers, the first ``head`` batches for the head."""
    task, size = federation.task, federation.config.batch_size
    rows, draw = task.train[client], generator(0, "batches", client, number, "train_model", 0)
    batches: list[Tensor] = []
    if isinstance(federation.config.batches, Epochs):
        for _ in range(federation.config.batches.count):
            order = rows[torch.randperm(len(rows), generator=draw)]
            batches += order.split([5, 6] if len(rows) == 11 else size)
    else:
        for _ in range(federation.config.batches.count):
            batches.append(rows[torch.randperm(len(rows), generator=draw)[:size]])
    net = trees.fill(task.models["base"], model)
    parts = (net.head.parameters(), net.body.parameters())
    for part, own in zip(parts, (batches[:head], batches[head:]), strict=True):
        optimizer = torch.optim.SGD(part, lr=0.1, momentum=0.9, weight_decay=0.01)
        for batch in own:
            optimizer.zero_grad()
            F.cross_entropy(net(task.x[batch]), task.y[batch]).backward()
            optimizer.step()
    return trees.model_of(net)


@pytest.mark.parametrize(
    ("settings", "examples", "head"),
    [
        ({"head_steps": 4, "local_steps": 3}, 12, 4),
        ({"head_epochs": 2, "local_epochs": 1}, 12, 6),  # 12 examples are three batches
        ({"head_epochs": 2, "local_epochs": 1}, 11, 4),  # 11 are two, since none has one example
    ],
)
def test_the_first_batches_are_the_heads_and_each_phase_has_its_own_optimiser(
    settings: dict[str, int], examples: int, head: int
) -> None:
    local = {"batch_size": 5, "local_lr": 0.1, "local_weight_decay": 0.01}
    federation = Federation("fedrep", make_task(examples=(examples,)), **settings, **local)
    start = trees.model_of(federation.task.models["base"])
    expected = replayed(federation, 0, 0, start, head)
    trees.fill(federation.task.models["base"], start)
    federation.round([0])
    close(federation.personal(0), expected)


def test_head_and_body_count_in_the_same_unit() -> None:
    assert fedrep.Config(head_epochs=5, local_epochs=1).batches == Epochs(6, 64)
    assert fedrep.Config(head_steps=5, local_steps=2).batches == Steps(7, 64)
    for half in ({"head_epochs": 5}, {"local_epochs": 5}):
        with pytest.raises(ValidationError, match=r"got head_epochs=.*; give both or neither"):
            fedrep.Config(**half)


# Limits


def test_without_a_head_it_is_fedavg() -> None:
    local = {"local_steps": 3, "batch_size": 4}
    ours = Federation("fedrep", make_task(Normed), **local, head_layers=0, head_steps=0)
    fedavg = Federation("fedavg", make_task(Normed), **local)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 2, 3], number)
    torch.testing.assert_close(ours.server.body, fedavg.server.model, rtol=0, atol=0)


def test_with_all_layers_in_the_head_clients_do_not_meet() -> None:
    alone, together = (Federation("fedrep", make_task(), **SETTINGS, head_layers=2) for _ in "ab")
    alone.round([2])
    cohort = together.round([0, 1, 2])
    torch.testing.assert_close(alone.personal(2), together.personal(2), rtol=0, atol=0)
    assert {(e.down, e.up) for e in cohort.state.exchanges} == {(0, 0)}


# Novel clients


@pytest.mark.parametrize("time", [{"novel_steps": 2}, {"novel_epochs": 2}])
def test_a_novel_client_trains_the_initial_head_on_the_frozen_body(time: dict[str, int]) -> None:
    task = make_task(novel=1)
    federation = Federation("fedrep", task, **SETTINGS, **time)
    federation.round([0, 1])
    body, start = federation.server.body["base"], task.outline().initial()
    expected = body | {name: start[name] for name in HEAD}
    for _ in range(2):
        expected = descended(task, 3, expected, set(HEAD))
    close(federation.personal(3), expected)
    assert 3 not in federation.engine.memory


def test_the_settings_of_pefll() -> None:
    config = from_keys("fedrep", {"preset": "pefll"})
    assert config.settings.batches == Epochs(5 + 1, 32)
    assert config.settings.head_batches(34) == 5 * 2
    assert config.settings.head_batches(33) == 5  # of 33 examples: none has one alone
    assert config.settings.novel_batches == Epochs(20, 32)


# Mistakes that the checks above notice


class TestMutants:
    def test_mutant_that_trains_jointly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @step(like="body")
        def train_model(self: fedrep.Client, body: Model) -> Model:
            trained = fitted(self, self.personal_model(body), self.batches, self.parameters)
            self.memory["head"], body = trees.partition(trained, self.head)
            return body

        rejected(monkeypatch, train_model)

    def test_mutant_that_trains_the_body_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        @step(like="body")
        def train_model(self: fedrep.Client, body: Model) -> Model:
            first, *batches = self.batches
            own = self.personal_model(body)
            model = fitted(self, own, [first], self.parameters - self.head)
            model = fitted(self, model, batches, frozenset(self.head))
            self.memory["head"], body = trees.partition(model, self.head)
            return body

        rejected(monkeypatch, train_model)

    def test_mutant_that_trains_the_body_under_the_old_head(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @step(like="body")
        def train_model(self: fedrep.Client, body: Model) -> Model:
            *batches, last = self.batches
            own = self.personal_model(body)
            self.train_head(body, batches)
            model = fitted(self, own, [last], self.parameters - self.head)
            return trees.partition(model, self.head)[1]

        rejected(monkeypatch, train_model)

    def test_mutant_that_averages_the_head_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = fedrep.Client.train_model

        @step(like="model")
        def train_model(self: fedrep.Client, model: Model) -> Model:
            self.memory["head"], body = trees.partition(model, self.head)
            return right(self, body) | self.memory["head"]

        def start_with_a_global_head(federation: Federation) -> None:
            federation.server.body = {"base": federation.task.outline().initial()}

        monkeypatch.setattr(fedrep.Client, "train_model", train_model)
        with pytest.raises(AssertionError):
            check_two_rounds(start_with_a_global_head)

    def test_mutant_that_is_evaluated_without_its_own_head(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @step
        def export(self: fedrep.Client, received: Model) -> Tree:
            return received | trees.partition(self.initial, self.head)[0]

        monkeypatch.setattr(fedrep.Client, "export", export)
        with pytest.raises(AssertionError):
            check_two_rounds()

    def test_mutant_that_does_not_weight_the_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = trees.weighted_mean
        monkeypatch.setattr(trees, "weighted_mean", lambda t, w, *_: right(t, torch.ones_like(w)))
        with pytest.raises(AssertionError):
            check_two_rounds()

    def test_mutant_whose_statistics_move_while_the_head_trains(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = fedrep.Client.train_model

        @step(like="body")
        def train_model(self: fedrep.Client, body: Model) -> Model:
            *batches, last = self.batches
            model = fitted(self, self.personal_model(body), batches, frozenset(self.head))
            self.memory["head"], body = trees.partition(model, self.head)
            self.batches = [*batches, last]
            return right(self, body)

        monkeypatch.setattr(fedrep.Client, "train_model", train_model)
        with pytest.raises(AssertionError):
            check_the_buffers()


def fitted(client: fedrep.Client, model: Model, batches: Any, part: frozenset[str]) -> Model:
    settings = client.config.local
    return fit(client.objective, model, batches, settings, trainable=part).model


def rejected(monkeypatch: pytest.MonkeyPatch, train_model: Any) -> None:
    monkeypatch.setattr(fedrep.Client, "train_model", train_model)
    with pytest.raises(AssertionError):
        check_two_rounds()


def test_plain_settings_mean_plain_steps() -> None:
    """The derivations above have no momentum, decay or clipping in them."""
    config = fedrep.Config(**SETTINGS)
    assert PLAIN.items() <= SETTINGS.items()
    assert (config.local.momentum, config.local.weight_decay, config.local.clip) == (0, 0, None)

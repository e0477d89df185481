"""LG-FedAvg against one-piece autograd: bodies stay, the head is averaged."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.federation import Each, step
from hyperfed.methods import lg_fedavg
from hyperfed.nets.anatomy import head_names
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.trees import Model, Tree
from toys import (
    EXAMPLES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    make_task,
    torch_sgd,
)

HEAD = ("head.weight", "head.bias")
BODY = ("body.weight", "body.bias")
HEAD_BYTES = (4 * 3 + 3) * 8
MODEL_BYTES = (5 * 4 + 4) * 8 + HEAD_BYTES
CLIENTS = [0, 1, 3]


def descended(
    task: Any, client: int, model: dict[str, Tensor], part: tuple[str, ...] = HEAD + BODY
) -> dict[str, Tensor]:
    """One plain gradient step on some entries."""
    leaves = {n: v.clone().requires_grad_(n in part) for n, v in model.items()}
    client_loss(task, client, leaves).backward()
    return {n: leaf.detach() - (0.1 * leaf.grad if n in part else 0) for n, leaf in leaves.items()}


def mean_of(models: dict[int, dict[str, Tensor]], names: tuple[str, ...]) -> dict[str, Tensor]:
    total = sum(EXAMPLES[i] for i in models)
    return {n: sum(EXAMPLES[i] / total * m[n] for i, m in models.items()) for n in names}


def check_two_rounds() -> None:
    """In the second round every client goes on with its own body under the averaged head."""
    federation = Federation("lg_fedavg", make_task(), **ONE_STEP)
    task = federation.task
    start = task.outline().initial()
    own = dict.fromkeys(range(4), start)
    head = {name: start[name] for name in HEAD}
    for number, clients in enumerate((CLIENTS, [0, 3])):
        trained = {i: descended(task, i, own[i] | head) for i in clients}
        own |= trained
        head = mean_of(trained, HEAD)
        cohort = federation.round(clients, number)
        ours = {name: federation.server.model["base"][name] for name in HEAD}
        close(ours, head)
        for i in range(4):
            expected = {name: own[i][name] for name in BODY} | head
            close(federation.personal(i), expected)
        travelled = [(e.down, e.up) for e in cohort.state.exchanges]
        assert travelled == [(HEAD_BYTES, HEAD_BYTES)] * len(clients)


def test_heads_are_averaged_by_examples_bodies_stay_and_both_make_the_evaluated_model() -> None:
    check_two_rounds()


def test_a_client_keeps_its_body_alone() -> None:
    federation = Federation("lg_fedavg", make_task(Normed), **ONE_STEP)
    federation.round([0, 1])
    assert set(federation.engine.memory) == {0, 1}
    kept = federation.engine.memory[0]
    assert set(kept) == {"body"}
    assert set(kept["body"]) == set(federation.task.outline().initial()).difference(HEAD)


def test_batch_norm_buffers_stay_with_the_body() -> None:
    task = make_task(Normed)
    federation = Federation("lg_fedavg", task, **ONE_STEP)
    start = task.outline().initial()
    cohort = federation.round([0, 2])
    assert {(e.down, e.up) for e in cohort.state.exchanges} == {(HEAD_BYTES, HEAD_BYTES)}
    for i in (0, 2):
        hidden = task.x[task.train[i]] @ start["body.weight"].T + start["body.bias"]
        ours = federation.personal(i)
        close(ours["norm.running_mean"], 0.1 * hidden.mean(0))
        assert ours["norm.num_batches_tracked"] == 1
    assert federation.personal(1)["norm.num_batches_tracked"] == 0


# Limits


def test_with_no_global_layer_it_is_local_training() -> None:
    local = {"local_steps": 3, "batch_size": 4, "keep_momentum": True}
    ours = Federation("lg_fedavg", make_task(Normed), **local, head_layers=0)
    alone = Federation("local", make_task(Normed), **local)
    for number in range(3):
        for federation in (ours, alone):
            cohort = federation.round([0, 2, 3], number)
            assert {(e.down, e.up) for e in cohort.state.exchanges} == {(0, 0)}
    for client in range(4):
        torch.testing.assert_close(ours.personal(client), alone.personal(client), rtol=0, atol=0)


def test_with_all_layers_global_it_is_fedavg() -> None:
    local = {"local_steps": 3, "batch_size": 4}
    ours = Federation("lg_fedavg", make_task(), **local, head_layers=2)
    fedavg = Federation("fedavg", make_task(), **local)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 2, 3], number)
    torch.testing.assert_close(ours.personal(1), fedavg.personal(1), rtol=0, atol=0)


# From a FedAvg model


def pretrained(
    net: type[torch.nn.Module] = TwoLayers, examples: Sequence[int] = EXAMPLES, **settings: Any
) -> Federation:
    task = make_task(net, examples=examples, novel=1)
    federation = Federation("lg_fedavg", task, **ONE_STEP | settings)
    federation.round([0, 1, 2], 0)
    return federation


def test_the_first_rounds_may_be_those_of_fedavg() -> None:
    ours = pretrained(pretrain_rounds=1)
    fedavg = Federation("fedavg", make_task(novel=1), **ONE_STEP)
    fedavg.round([0, 1, 2], 0)
    close(ours.server.model, fedavg.server.model)
    assert not any(ours.engine.memory.values())
    for client in (0, 2):
        torch.testing.assert_close(ours.personal(client), fedavg.personal(client))


def test_bodies_begin_at_the_pretrained_one_which_is_sent_once() -> None:
    ours = pretrained(pretrain_rounds=1)
    task, start = ours.task, trees.clone(ours.server.model["base"])
    trained = {i: descended(task, i, start) for i in (0, 1)}
    cohort = ours.round([0, 1], 1)
    assert {(e.down, e.up) for e in cohort.state.exchanges} == {(MODEL_BYTES, HEAD_BYTES)}
    head = mean_of(trained, HEAD)
    for i in (0, 1):
        expected = {name: trained[i][name] for name in BODY} | head
        close(ours.personal(i), expected)
    close(ours.personal(2), {name: start[name] for name in BODY} | head)
    cohort = ours.round([1, 2], 2)
    down = {e.client: e.down for e in cohort.state.exchanges}
    assert down == {1: HEAD_BYTES, 2: MODEL_BYTES}


def test_a_client_lost_at_its_first_chance_is_sent_the_body_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = pretrained(examples=(1, 7, 20, 9), pretrain_rounds=1)
    right = lg_fedavg.Client.train_model

    @step
    def train_model(self: lg_fedavg.Client, received: Model) -> Model:
        if (self.id, self.round) == (1, 1):
            raise ConnectionError("lost")
        return right(self, received)

    monkeypatch.setattr(lg_fedavg.Client, "train_model", train_model)
    assert list(ours.round([0, 1], 1).state.lost) == [1]
    assert ours.server.has_body.tolist() == [True, False, False]
    cohort = ours.round([0, 1], 2)
    assert {e.client: e.down for e in cohort.state.exchanges} == {0: HEAD_BYTES, 1: MODEL_BYTES}


def test_several_target_sizes_have_a_head_each() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    ours = Federation("lg_fedavg", task, **ONE_STEP)
    before = trees.clone(ours.server.model)
    ours.round([0, 2])
    torch.testing.assert_close(ours.server.model["L"], before["L"], rtol=0, atol=0)
    for name in HEAD:
        assert (ours.server.model["S"][name] - before["S"][name]).abs().max() > 1e-4


# Novel clients


@pytest.mark.parametrize("net", [TwoLayers, Normed])
@pytest.mark.parametrize("pretrain_rounds", [0, 1])
def test_a_novel_client_trains_a_body_under_the_frozen_head(
    pretrain_rounds: int, net: type[torch.nn.Module]
) -> None:
    """Batch-norm's statistics are the body's, and what its training makes of them."""
    ours = pretrained(net, pretrain_rounds=pretrain_rounds, novel_steps=2)
    beginning = ours.server.model["base"] if pretrain_rounds else ours.task.outline().initial()
    body = {name: value.clone() for name, value in beginning.items() if name not in HEAD}
    ours.round([0, 1], 1)
    head = {name: ours.server.model["base"][name] for name in HEAD}
    close(ours.personal(3), torch_sgd(ours.task, 3, body | head, 2, names=body, lr=0.1))
    assert 3 not in ours.engine.memory


def test_a_novel_client_without_steps_has_the_body_to_begin_with() -> None:
    ours = pretrained(novel_steps=0)
    start = ours.task.outline().initial()
    expected = {name: start[name] for name in BODY} | {
        name: ours.server.model["base"][name] for name in HEAD
    }
    torch.testing.assert_close(ours.personal(3), expected, rtol=0, atol=0)


def test_the_published_settings() -> None:
    config = from_keys("lg_fedavg", {"preset": "pfedhn"})
    assert config.rounds - config.settings.pretrain_rounds == 1000
    config = from_keys("lg_fedavg", {"preset": "pfedkt"})
    assert (config.rounds, config.cohort, config.settings.local_epochs) == (500, 0.1, 10)


# Mistakes that the checks above notice


class TestMutants:
    def test_mutant_that_shares_the_first_layers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def first_names(module: torch.nn.Module, layers: int = 1) -> tuple[str, ...]:
            last = head_names(module, layers)
            return tuple(name for name, _ in module.named_parameters() if name not in last)

        rejected(monkeypatch, lg_fedavg, "head_names", first_names)

    def test_mutant_that_sends_every_layer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rejected(monkeypatch, lg_fedavg, "head_names", lambda module, _: head_names(module, 2))

    def test_mutant_that_is_evaluated_with_the_common_body(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @step
        def export(self: lg_fedavg.Client, received: Model) -> Tree:
            return self.initial | received

        rejected(monkeypatch, lg_fedavg.Client, "export", export)

    def test_mutant_whose_body_starts_anew_each_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = lg_fedavg.Client.train_model

        @step
        def train_model(self: lg_fedavg.Client, received: Model) -> Model:
            self.memory = {}
            return right(self, received)

        rejected(monkeypatch, lg_fedavg.Client, "train_model", train_model)

    def test_mutant_that_keeps_its_own_head_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = lg_fedavg.Client.train_model

        @step
        def train_model(self: lg_fedavg.Client, received: Model) -> Model:
            head = right(self, received)
            self.memory["body"] = self.memory["body"] | head
            return head

        rejected(monkeypatch, lg_fedavg.Client, "train_model", train_model)

    def test_mutant_that_does_not_weight_the_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = trees.weighted_mean
        rejected(monkeypatch, lg_fedavg, "weighted_mean", lambda t, w: right(t, torch.ones_like(w)))

    def test_mutant_whose_message_holds_the_body(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rejected(monkeypatch, lg_fedavg, "Each", lambda tree, _: Each(tree))


def rejected(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Any) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check_two_rounds()

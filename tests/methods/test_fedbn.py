"""FedBN against one-piece autograd: batch-norm, found by type, stays; the rest is averaged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.federation import step
from hyperfed.methods import fedbn
from hyperfed.nets.anatomy import batch_norm_names
from hyperfed.nets.targets import LeNet, LeNetBN, PFedLACNN
from hyperfed.runs.config import from_keys
from hyperfed.trees import Model, Tree
from toys import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    TwoLayers,
    client_loss,
    close,
    make_task,
)

CLIENTS = [0, 1, 3]


class Misnamed(nn.Module):
    """Batch-norm layers that no name gives away, and a linear layer called "bn"."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.Linear(FEATURES, 4)
        self.stage = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
        self.a1 = nn.BatchNorm1d(4, affine=False)
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.tanh(self.a1(self.stage(self.bn(x))))))


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
OWN = (
    *(f"stage.0.{name}" for name in ("weight", "bias", *STATISTICS)),
    *(f"a1.{name}" for name in STATISTICS),
)
SHARED = (
    *("bn.weight", "bn.bias", "stage.2.weight", "stage.2.bias"),
    *("norm.weight", "norm.bias", "out.weight", "out.bias"),
)
SHARED_BYTES = ((5 * 4 + 4) + (4 * 4 + 4) + (4 + 4) + (4 * 3 + 3)) * 8


def descended(
    task: Any, client: int, model: dict[str, Tensor], part: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """One plain gradient step by PyTorch's module and optimiser, statistics included."""
    net = task.models["base"]
    before = trees.model_of(net)
    trees.fill(net, model)
    trained = [p for n, p in net.named_parameters() if part is None or n in part]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    index = task.train[client]
    optimizer.zero_grad()
    nn.functional.cross_entropy(net.train()(task.x[index]), task.y[index]).backward()
    optimizer.step()
    result = trees.model_of(net)
    trees.fill(net, before)
    return result


# Which layers they are


def test_batch_norm_is_found_by_its_type() -> None:
    assert batch_norm_names(Misnamed()) == OWN
    assert batch_norm_names(nn.BatchNorm2d(3, track_running_stats=False)) == ("weight", "bias")
    both = nn.ModuleDict({"x": nn.SyncBatchNorm(2), "bn": nn.GroupNorm(1, 2)})
    assert {name.split(".")[0] for name in batch_norm_names(both)} == {"x"}
    assert batch_norm_names(nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.Linear(2, 2))) == ()


@pytest.mark.parametrize(("target", "entries"), [(LeNetBN, 5), (PFedLACNN, 3)])
def test_the_targets_that_have_two_such_layers(target: type[LeNetBN], entries: int) -> None:
    found = batch_norm_names(target((3, 32, 32), 10))
    assert {name.split(".")[0] for name in found} == {"norm1", "norm2"}
    assert len(found) == 2 * entries
    assert batch_norm_names(LeNet((3, 32, 32), 10)) == ()


# The update, what travels and what stays


def check_two_rounds() -> None:
    """In the second round every client goes on with its own batch-norm in the averaged rest."""
    federation = Federation("fedbn", make_task(Misnamed), **ONE_STEP)
    task = federation.task
    start = task.outline().initial()
    own = {i: {name: start[name] for name in OWN} for i in range(4)}
    shared = {name: start[name] for name in SHARED}
    for number, clients in enumerate((CLIENTS, [0, 3])):
        trained = {i: descended(task, i, own[i] | shared) for i in clients}
        total = sum(EXAMPLES[i] for i in clients)
        own |= {i: {name: model[name] for name in OWN} for i, model in trained.items()}
        shared = {
            name: sum(EXAMPLES[i] / total * trained[i][name] for i in clients) for name in SHARED
        }
        cohort = federation.round(clients, number)
        assert set(federation.server.shared["base"]) == set(SHARED)
        close(federation.server.shared["base"], shared)
        for i in range(4):
            close(federation.personal(i), own[i] | shared)
        travelled = [(e.down, e.up) for e in cohort.state.exchanges]
        assert travelled == [(SHARED_BYTES, SHARED_BYTES)] * len(clients)


def test_batch_norm_stays_and_the_mean_of_the_rest_is_weighted_by_examples() -> None:
    check_two_rounds()


def test_clients_differ_in_their_batch_norm_alone() -> None:
    federation = Federation("fedbn", make_task(Misnamed), **ONE_STEP)
    for number in range(3):
        federation.round([0, 1, 2], number)
    first, second = federation.personal(0), federation.personal(1)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert same == {*SHARED, "stage.0.num_batches_tracked", "a1.num_batches_tracked"}
    assert set(federation.engine.memory[0]["norm"]) == set(OWN)


# Limits


def test_without_batch_norm_it_is_fedavg() -> None:
    local = {"local_steps": 3, "batch_size": 4}
    ours, fedavg = (Federation(m, make_task(novel=1), **local) for m in ("fedbn", "fedavg"))
    for number in range(3):
        for federation in (ours, fedavg):
            cohort = federation.round([0, 1, 2], number)
            assert {(e.down, e.up) for e in cohort.state.exchanges} == {(39 * 8, 39 * 8)}
    for client in (1, 3):
        expected = fedavg.personal(client)
        torch.testing.assert_close(ours.personal(client), expected, rtol=0, atol=0)


def test_with_one_client_it_is_centralised_sgd() -> None:
    task = make_task(Misnamed, examples=(12,))
    federation = Federation("fedbn", task, **ONE_STEP)
    expected = task.outline().initial()
    for number in range(3):
        federation.round([0], number)
        expected = descended(task, 0, expected)
    close(federation.personal(0), expected)


# Novel clients


def test_a_novel_client_trains_initial_batch_norm_in_the_frozen_rest() -> None:
    task = make_task(Misnamed, novel=1)
    federation = Federation("fedbn", task, **ONE_STEP, novel_steps=3)
    federation.round([0, 1])
    start = task.outline().initial()
    expected = federation.server.shared["base"] | {name: start[name] for name in OWN}
    for _ in range(3):
        expected = descended(task, 3, expected, OWN)
    ours = federation.personal(3)
    close(ours, expected)
    assert ours["a1.num_batches_tracked"] == 3
    assert 3 not in federation.engine.memory


class Plain(nn.Module):
    """Statistics and nothing to train in the batch-norm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(FEATURES, affine=False)
        self.second = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_novel_client_measures_its_statistics_where_there_is_nothing_to_train() -> None:
    """Also with momentum, weight decay and clipping, of which there is nothing to apply to."""
    task = make_task(Plain, novel=1)
    settings = {"batch_size": 10_000, "local_clip": 1.0, "novel_steps": 2}
    federation = Federation("fedbn", task, **settings)
    ours = federation.personal(3)
    x = task.x[task.train[3]]
    close(ours["first.running_mean"], (1 - 0.9**2) * x.mean(0))
    variance = 0.9**2 + (1 - 0.9**2) * x.var(0)
    close(ours["first.running_var"], variance)


# A target without batch-norm


def test_without_batch_norm_the_run_starts_with_a_warning_that_it_is_fedavg(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = Federation("fedbn", make_task(novel=1), **ONE_STEP, novel_steps=1)
    assert not caplog.messages  # a server is also built to evaluate
    ours.round(CLIENTS[:2], 0)
    (message,) = caplog.messages
    for number in (1, 2):
        ours.round(CLIENTS[:2], number)
    ours.personal(0)
    ours.personal(3)
    assert caplog.messages == [message]
    assert "this is FedAvg, not FedBN" in message
    assert "task.model=" in message


def test_with_batch_norm_in_a_target_of_any_size_there_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = {"S": TwoLayers().double(), "L": Misnamed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    Federation("fedbn", task, **ONE_STEP).round([0, 1])
    Federation("fedbn", make_task(Misnamed), **ONE_STEP).round([0, 1])
    assert not caplog.messages


def test_the_settings_of_pfedla_are_those_that_pfedla_has_itself() -> None:
    """With the network of it that has batch-norm, which its own preset leaves to the data."""
    ours = from_keys("fedbn", {"preset": "pfedla"})
    theirs = from_keys("pfedla", {"preset": "paper", "task": {"model": "pfedla_cnn"}})
    assert (ours.rounds, ours.cohort, ours.task) == (theirs.rounds, theirs.cohort, theirs.task)
    assert ours.settings.batches == theirs.settings.batches
    assert ours.settings.local == theirs.settings.local


# Mistakes that the checks above notice


class TestMutants:
    def test_mutant_that_goes_by_names_with_bn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_name(module: nn.Module) -> tuple[str, ...]:
            return tuple(name for name in trees.model_of(module) if "bn" in name)

        rejected(monkeypatch, fedbn, "batch_norm_names", by_name)

    def test_mutant_that_goes_by_names_with_norm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def by_name(module: nn.Module) -> tuple[str, ...]:
            return tuple(name for name in trees.model_of(module) if "norm" in name)

        rejected(monkeypatch, fedbn, "batch_norm_names", by_name)

    def test_mutant_that_averages_the_statistics(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def parameters(module: nn.Module) -> tuple[str, ...]:
            buffers = {name for name, _ in module.named_buffers()}
            return tuple(name for name in batch_norm_names(module) if name not in buffers)

        rejected(monkeypatch, fedbn, "batch_norm_names", parameters)

    def test_mutant_that_averages_scale_and_shift(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def buffers(module: nn.Module) -> tuple[str, ...]:
            return tuple(name for name, _ in module.named_buffers())

        rejected(monkeypatch, fedbn, "batch_norm_names", buffers)

    def test_mutant_that_takes_every_normalisation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def with_layer_norm(module: nn.Module) -> tuple[str, ...]:
            return (*batch_norm_names(module), "norm.weight", "norm.bias")

        rejected(monkeypatch, fedbn, "batch_norm_names", with_layer_norm)

    def test_mutant_that_shares_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rejected(monkeypatch, fedbn, "batch_norm_names", lambda _: ())

    def test_mutant_that_is_evaluated_without_its_own_batch_norm(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @step
        def export(self: fedbn.Client, received: Model) -> Tree:
            return self.initial | received

        rejected(monkeypatch, fedbn.Client, "export", export)

    def test_mutant_whose_batch_norm_starts_anew_each_round(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = fedbn.Client.train_model

        @step(like="shared")
        def train_model(self: fedbn.Client, shared: Model) -> Model:
            self.memory = {}
            return right(self, shared)

        rejected(monkeypatch, fedbn.Client, "train_model", train_model)

    def test_mutant_that_does_not_weight_the_mean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = trees.weighted_mean
        rejected(monkeypatch, trees, "weighted_mean", lambda t, w, *_: right(t, torch.ones_like(w)))


def rejected(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Any) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check_two_rounds()


def test_the_toy_needs_every_entry() -> None:
    """A check of the check: the loss depends on each shared entry of the misnamed network."""
    task = make_task(Misnamed)
    leaves = {
        name: value.clone().requires_grad_(value.is_floating_point() and name in SHARED)
        for name, value in task.outline().initial().items()
    }
    client_loss(task, 0, leaves).backward()
    blind = {name for name in SHARED if leaves[name].grad.abs().max() < 1e-12}
    assert blind == {"bn.bias", "stage.2.bias"}  # which batch-norm takes out again

"""HypCluster: choice and averages by hand, what travels, and its limits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError
from hyperfed.methods import hypcluster
from hyperfed.runs.evaluation import evaluate
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from hyperfed.trees import Model, Tree
from toys import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    make_task,
)

MODEL = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
"""Bytes of a model."""


def federation(clusters: int = 3, net: Any = TwoLayers, **task: Any) -> Federation:
    """The models are so different that clients choose differently."""
    ours = Federation("hypcluster", make_task(net, **task), **ONE_STEP, clusters=clusters)
    draw = torch.Generator().manual_seed(0)
    ours.server.models = {
        size: {
            name: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
            if leaf.is_floating_point() and "running_var" not in name
            else leaf
            for name, leaf in models.items()
        }
        for size, models in ours.server.models.items()
    }
    return ours


def losses_by_hand(task: Task, rows: Tensor, models: Model) -> list[float]:
    """Of each model, in evaluation mode."""
    net = task.models["base"].eval()
    found = []
    for cluster in range(len(models["head.bias"])):
        output = torch.func.functional_call(net, trees.take(models, cluster), (task.x[rows],))
        found.append(float(F.cross_entropy(output, task.y[rows])))
    return found


def best_by_hand(task: Task, client: int, models: Model) -> int:
    losses = losses_by_hand(task, task.train[client], models)
    return losses.index(min(losses))


def stepped(task: Task, client: int, model: Model) -> Model:
    """One gradient step on all training data of a client."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    client_loss(task, client, leaves).backward()
    return {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}


def check_a_round() -> None:
    ours = federation()
    task, models = ours.task, trees.clone(ours.server.models["base"])
    chosen = {client: best_by_hand(task, client, models) for client in range(4)}
    members = {j: [i for i in chosen if chosen[i] == j] for j in range(3)}
    assert sorted(map(len, members.values())) == [0, 1, 3]  # a mean, a model and an empty cluster
    ours.round([0, 1, 2, 3])
    for cluster, clients in members.items():
        expected = trees.take(models, cluster)
        if clients:
            total = sum(EXAMPLES[i] for i in clients)
            trained = {i: stepped(task, i, trees.take(models, cluster)) for i in clients}
            expected = {
                name: sum(EXAMPLES[i] / total * trained[i][name] for i in clients)
                for name in expected
            }
        close(trees.take(ours.server.models["base"], cluster), expected)


def test_each_cluster_becomes_the_weighted_mean_of_what_its_clients_trained() -> None:
    check_a_round()


def test_nobody_chooses_a_model_without_a_loss() -> None:
    ours = federation()
    models = trees.clone(ours.server.models["base"])
    spoiled = best_by_hand(ours.task, 0, models)
    ours.server.models["base"]["head.weight"][spoiled] = torch.finfo(torch.float64).max
    losses = losses_by_hand(ours.task, ours.task.train[0], ours.server.models["base"])
    assert losses[spoiled] != losses[spoiled]
    others = [loss for cluster, loss in enumerate(losses) if cluster != spoiled]
    cohort = ours.engine.cohort([0], 0, training=True)
    chosen = cohort.ask(hypcluster.Client.choose_cluster, ours.server.models["base"])["cluster"]
    assert chosen.tolist() == [losses.index(min(others))]


def check_the_evaluated_model() -> None:
    ours = federation(novel=1)
    ours.round([0, 1])
    models = ours.server.models["base"]
    best = [best_by_hand(ours.task, client, models) for client in range(4)]
    assert len(set(best)) > 1
    for client in range(4):
        model = ours.personal(client)
        torch.testing.assert_close(model, trees.take(models, best[client]), rtol=0, atol=0)


def test_known_and_novel_clients_use_the_model_that_is_best_on_their_training_data() -> None:
    check_the_evaluated_model()


# Mutants


def highest_loss(client: hypcluster.Client, model: Model) -> Tensor:
    return -training_loss(client, model)


def validation_loss(client: hypcluster.Client, model: Model) -> Tensor:
    return hypcluster.mean_loss(client.module, client.loss, model, client.val.chunks(512))


training_loss = hypcluster.Client.training_loss


def all_with_all(models: Model, trained: Model, chosen: Tensor, weight: Tensor) -> Model:
    clusters = len(models["head.bias"])
    return trees.stack([trees.weighted_mean(trained, weight) for _ in range(clusters)])


def unweighted(models: Model, trained: Model, chosen: Tensor, weight: Tensor) -> Model:
    return cluster_means(models, trained, chosen, weight.sign())


def empty_ones_vanish(models: Model, trained: Model, chosen: Tensor, weight: Tensor) -> Model:
    return cluster_means(trees.tree_map(torch.zeros_like, models), trained, chosen, weight)


cluster_means = hypcluster.cluster_means


@pytest.mark.parametrize(
    ("place", "name", "mutant", "check"),
    [
        (hypcluster.Client, "training_loss", highest_loss, check_a_round),
        (hypcluster.Client, "training_loss", highest_loss, check_the_evaluated_model),
        (hypcluster.Client, "training_loss", validation_loss, check_a_round),
        (hypcluster, "cluster_means", all_with_all, check_a_round),
        (hypcluster, "cluster_means", unweighted, check_a_round),
        (hypcluster, "cluster_means", empty_ones_vanish, check_a_round),
    ],
)
def test_mutant_is_caught(
    place: Any,
    name: str,
    mutant: Callable[..., Any],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check()


def loss_on_test_data(client: hypcluster.Client, model: Model) -> Tensor:
    return hypcluster.mean_loss(client.module, client.loss, model, client.test.chunks(512))


def test_mutant_that_chooses_on_test_data_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a round, nor for what is exported, nor for what is evaluated."""
    ours = federation()
    monkeypatch.setattr(hypcluster.Client, "training_loss", loss_on_test_data)
    with pytest.raises(AllLostError, match="PermissionError: test data is for evaluation"):
        ours.round([0, 1])
    for use in (lambda: ours.personal(0), lambda: evaluate(ours.server, ours.engine, [0], 9)):
        with pytest.raises(PermissionError, match="test data is for evaluation"):
            use()


# Limits


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_one_cluster_is_fedavg(net: Any) -> None:
    settings = {"local_steps": 3, "batch_size": 4}
    ours = Federation("hypcluster", make_task(net, novel=1), **settings, clusters=1)
    fedavg = Federation("fedavg", make_task(net, novel=1), **settings)
    for number in range(3):
        for each in (ours, fedavg):
            each.round([0, 2], number)
    models = trees.take(ours.server.models["base"], 0)
    torch.testing.assert_close(models, fedavg.server.model["base"], rtol=0, atol=0)
    torch.testing.assert_close(ours.personal(3), fedavg.personal(3))


def check_the_models_differ() -> None:
    ours = Federation("hypcluster", make_task(Normed), **ONE_STEP, clusters=3)
    models, initial = ours.server.models["base"], ours.task.outline().initial()
    torch.testing.assert_close(trees.take(models, 0), initial, rtol=0, atol=0)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for name in ("body.weight", "body.bias", "head.weight", "head.bias"):
            assert not torch.isclose(models[name][first], models[name][second]).any()
    bound = FEATURES**-0.5  # of PyTorch's default
    assert all(0.5 * bound < part.abs().max() < bound for part in models["body.weight"])
    again = Federation("hypcluster", make_task(Normed), **ONE_STEP, clusters=3)
    torch.testing.assert_close(again.server.models["base"], models, rtol=0, atol=0)


def test_the_first_model_is_the_initial_one_and_the_others_are_drawn_anew() -> None:
    check_the_models_differ()


def identical(net: nn.Module) -> nn.Module:
    return net


def test_mutant_with_identical_initial_models_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first round is FedAvg's: everyone chooses the first of equals."""
    monkeypatch.setattr(hypcluster, "_redrawn", identical)
    with pytest.raises(AssertionError):
        check_the_models_differ()
    ours = Federation("hypcluster", make_task(), **ONE_STEP, clusters=2)
    fedavg = Federation("fedavg", make_task(), **ONE_STEP)
    for each in (ours, fedavg):
        each.round([0, 1, 2, 3])
    first = trees.take(ours.server.models["base"], 0)
    torch.testing.assert_close(first, fedavg.server.model["base"], rtol=0, atol=0)


def test_clusters_come_to_be_the_groups_there_are() -> None:
    """Two groups of clients that label the same inputs differently."""
    task = make_task(examples=(30, 30, 30, 30))
    for client, shift in enumerate((0, 1, 0, 1)):
        rows = task.train[client]
        task.y[rows] = (task.x[rows, :CLASSES].argmax(dim=1) + shift) % CLASSES
    settings = {"local_steps": 10, "local_lr": 0.1, "batch_size": 16, "clusters": 2}
    ours = Federation("hypcluster", task, **settings)
    for number in range(6):
        ours.round([0, 1, 2, 3], number)
    models = ours.server.models["base"]
    best = [best_by_hand(task, client, models) for client in range(4)]
    assert best[0] == best[2] != best[1] == best[3]


class Bare(TwoLayers):
    """A network with a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_a_target_that_cannot_be_drawn_anew_is_refused() -> None:
    with pytest.raises(UserError, match=r"reset_parameters\(\), but the target \(Bare\) has none"):
        Federation("hypcluster", make_task(Bare), clusters=2)
    assert Federation("hypcluster", make_task(Bare), clusters=1).server.models


# What travels, what is chosen by


def test_what_travels_are_all_models_down_and_a_number_and_one_model_up() -> None:
    cohort = federation().round([0, 1])
    assert [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges] == [
        ("choose_cluster", 0, 3 * MODEL, 8),
        ("choose_cluster", 1, 3 * MODEL, 8),
        ("train_model", 0, 0, MODEL),
        ("train_model", 1, 0, MODEL),
    ]


def test_batch_norm_statistics_belong_to_their_model() -> None:
    ours = federation(net=Normed)
    before = trees.clone(ours.server.models["base"])
    chosen = best_by_hand(ours.task, 2, before)
    ours.round([2])
    after = ours.server.models["base"]
    for cluster in range(3):
        same = torch.equal(
            after["norm.running_mean"][cluster], before["norm.running_mean"][cluster]
        )
        assert same == (cluster != chosen)
    assert after["norm.num_batches_tracked"].tolist() == [int(j == chosen) for j in range(3)]


def test_nothing_is_kept() -> None:
    ours = federation()
    ours.round([0, 1, 2, 3])
    assert all(memory == {} for memory in ours.engine.memory.values())


def test_an_unlabelled_newcomer_cannot_choose() -> None:
    ours = federation(novel=1, unlabelled=True)
    with pytest.raises(UnlabelledError):
        ours.server.personalize(ours.engine.cohort([3], 9, training=False))


def test_a_lost_client_has_no_part_in_a_cluster() -> None:
    models: Tree = {"w": torch.tensor([[1.0], [2.0]])}
    trained: Tree = {"w": torch.tensor([[5.0], [0.0], [7.0]])}
    means = hypcluster.cluster_means(
        models, trained, torch.tensor([0, 0, 0]), torch.tensor([1.0, 0.0, 3.0])
    )
    assert means["w"].tolist() == [[(5 + 21) / 4], [2.0]]

"""FedProto against a derivation of its own: modules, torch.optim and autograd."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from hyperfed.errors import UserError
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from hyperfed.trees import Tree
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    close,
    make_quadratic_task,
    make_task,
)

LR, LAMBDA = 0.1, 5.0
OWN: dict[str, Any] = {"prototype_weight": LAMBDA, "novel_steps": 3}
THREE_STEPS: dict[str, Any] = ONE_STEP | {
    "local_steps": 3,
    "local_momentum": 0.9,
    "local_weight_decay": 1e-2,
}
Prototypes = dict[int, Tensor]
"""{class: (F,)} of those that there are."""


def task_without(classes: dict[int, Sequence[int]], **options: Any) -> Task:
    """A toy task whose clients lack some classes among their training examples."""
    task = make_task(**options)
    for client, absent in classes.items():
        labels = task.y[task.train[client]]
        for label in absent:
            labels = torch.where(labels == label, (label + 1) % CLASSES, labels)
        assert not set(labels.tolist()) & set(absent)
        task.y[task.train[client]] = labels
    return task


def features(net: nn.Module, x: Tensor) -> Tensor:
    """What enters the head of a toy network."""
    normed = getattr(net, "norm", nn.Identity())
    return torch.tanh(normed(net.body(x)))


def train(task: Task, client: int, net: nn.Module, common: Prototypes) -> tuple[Any, Prototypes]:
    """Three steps on all of a client's data, example by example; the client's prototypes then."""
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), LR, 0.9, weight_decay=1e-2)
    for _ in range(3):
        z = features(net, x)
        target = z.detach().clone()
        for row, label in enumerate(y.tolist()):
            target[row] = common.get(label, target[row])
        loss = F.cross_entropy(net.head(z), y) + LAMBDA * nn.MSELoss()(z, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    z = features(net.eval(), x).detach()
    return net, {label: z[y == label].mean(0) for label in sorted(set(y.tolist()))}


def averaged(found: Sequence[Prototypes]) -> Prototypes:
    """Whatever their numbers of examples."""
    labels = {label for own in found for label in own}
    has = {label: [own[label] for own in found if label in own] for label in labels}
    return {label: torch.stack(own).mean(0) for label, own in has.items()}


def held(ours: Federation) -> Prototypes:
    server: Any = ours.server
    return {c: server.prototypes[c] for c in range(CLASSES) if server.there[c]}


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_rounds_are_those_of_modules_and_optimisers(net: Any) -> None:
    """Nobody has class 0 in the first round, so 1 and 2 train without; nor class 1 in the third."""
    task = task_without({0: [0], 2: [1], 3: [1]}, net=net)
    ours = Federation("fedproto", task, **THREE_STEPS, **OWN)
    common: Prototypes = {}
    nets = [task.models["base"]] * 4
    for number, clients in enumerate(([0], [1, 2], [2, 3], [0, 1])):
        ours.round(clients, number)
        trained = {i: train(task, i, nets[i], common) for i in clients}
        for i, (own, _) in trained.items():
            nets[i] = own
        common = common | averaged([found for _, found in trained.values()])
        close(held(ours), common)
        for i in clients:
            close(ours.engine.memory[i]["model"], {**nets[i].state_dict()})
    for client in range(4):
        z = features(nets[client].eval(), task.x[task.test[client]])
        distances = torch.stack(
            [(z - common[label]).square().sum(1) for label in range(CLASSES)], 1
        )
        predictor = load(task, ours.personal(client))
        logits = predictor(task.x[task.test[client]])
        close(logits.log_softmax(1), (-distances).log_softmax(1))
        assert logits.argmax(1).tolist() == distances.argmin(1).tolist()


def load(task: Task, model: Tree) -> nn.Module:
    net = copy.deepcopy(task.models["base"]).eval()
    net.load_state_dict(model)
    return net


def test_a_class_without_a_prototype_is_never_predicted_and_losses_are_finite() -> None:
    task = task_without({0: [0], 1: [0]})
    ours = Federation("fedproto", task, **THREE_STEPS, **OWN)
    ours.round([0, 1])
    assert set(held(ours)) == {1, 2}
    logits = load(task, ours.personal(2))(100 * task.x)
    assert logits.isfinite().all()
    assert set(logits.argmax(1).tolist()) == {1, 2}


def test_outputs_that_are_no_class_are_never_predicted() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES + 2))

    ours = Federation("fedproto", make_task(net), **THREE_STEPS, **OWN)
    ours.round([0, 1, 2])
    found = load(ours.task, ours.personal(3))
    z, common = found[:2](ours.task.x), ours.server.prototypes
    logits = 2 * z @ common.T - common.square().sum(1)
    close(found(ours.task.x), F.pad(logits, (0, 2), value=-1e6))


def test_the_classifier_can_predict_in_their_place() -> None:
    ours = Federation("fedproto", make_task(), **THREE_STEPS, evaluated="classifier")
    ours.round([0, 1])
    own, _ = train(ours.task, 0, ours.task.models["base"], {})
    close(ours.personal(0), {**own.state_dict()})
    close(ours.personal(3), {**ours.task.models["base"].state_dict()})
    assert ours.config.prototype_weight == 1.0  # the authors' default


def test_a_novel_client_trains_near_the_global_prototypes() -> None:
    task = make_task(Normed, novel=1)
    ours = Federation("fedproto", task, **THREE_STEPS, **OWN, evaluated="classifier")
    ours.round([0, 1, 2])
    before = held(ours)
    own, _ = train(task, 3, task.models["base"], before)
    close(ours.personal(3), {**own.state_dict()})
    close(held(ours), before)


def test_a_novel_client_needs_labels() -> None:
    ours = Federation("fedproto", make_task(novel=1, unlabelled=True), **THREE_STEPS)
    ours.round([0, 1, 2])
    with pytest.raises(UnlabelledError, match="no labels"):
        ours.personal(3)


def test_clients_of_several_targets_share_prototypes() -> None:
    models = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    ours = Federation("fedproto", task, **THREE_STEPS, **OWN)
    ours.round([0, 1])
    found = [train(task, i, models[size], {})[1] for i, size in ((0, "S"), (1, "L"))]
    close(held(ours), averaged(found))


def test_features_must_be_of_one_length() -> None:
    models = {"S": nn.Linear(FEATURES, CLASSES).double(), "L": TwoLayers().double()}
    with pytest.raises(UserError, match=r"features of one length.* got 4, 5"):
        Federation("fedproto", make_task(models=models, sizes=("S", "L", "S", "L")))


def test_a_task_must_have_classes_and_a_linear_head() -> None:
    with pytest.raises(UserError, match="a task of FedProto must have classes"):
        Federation("fedproto", make_quadratic_task())
    headless = {"base": nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))}
    with pytest.raises(UserError, match=r"must end in an nn.Linear .* got BatchNorm1d"):
        Federation("fedproto", make_task(models=headless))
    with pytest.raises(UserError, match=r"must end in an nn.Linear .* got ParametrizedLinear"):
        Federation("fedproto", make_task(lambda: spectral_norm(nn.Linear(FEATURES, CLASSES))))

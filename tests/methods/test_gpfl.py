"""GPFL against a derivation of its own: functions of tensors, torch.optim and autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.runs.evaluation import evaluate, finetuned
from hyperfed.task import Task
from hyperfed.training import Steps, UnlabelledError
from hyperfed.trees import Tree
from toys import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    Saying,
    TwoLayers,
    close,
    make_quadratic_task,
    make_task,
)

LR, LAMBDA, MU, DECAY = 0.1, 0.3, 0.2, 1e-2
OWN: dict[str, Any] = {"magnitude_weight": LAMBDA, "guidance_weight_decay": MU, "novel_steps": 3}
THREE_STEPS: dict[str, Any] = ONE_STEP | {
    "local_steps": 3,
    "local_momentum": 0.9,
    "local_weight_decay": DECAY,
}
HEAD = ("head.weight", "head.bias")
TABLE = "guidance/embedding.weight"


def features(model: Tree, x: Tensor, *, train: bool) -> Tensor:
    """What enters the head of a toy network; statistics of batch-norm move in training."""
    z = F.linear(x, model["body.weight"], model["body.bias"])
    if "norm.weight" in model:
        statistics = model["norm.running_mean"], model["norm.running_var"]
        z = F.batch_norm(z, *statistics, model["norm.weight"], model["norm.bias"], training=train)
    return torch.tanh(z)


def valve(model: Tree, z: Tensor, condition: Tensor) -> Tensor:
    def of(name: str) -> Tensor:
        weights = [model[f"guidance/{name}.{part}"] for part in ("0.weight", "0.bias")]
        scale, shift = (model[f"guidance/{name}.{part}"] for part in ("2.weight", "2.bias"))
        return F.layer_norm(F.linear(condition, *weights).relu(), condition.shape, scale, shift)

    return (z * (of("gamma") + 1) + of("beta")).relu()


def labels(task: Task, client: int) -> list[int]:
    return task.y[task.train[client]].tolist()


def condition(task: Task, client: int, table: Tensor) -> Tensor:
    return torch.stack([table[label] for label in labels(task, client)]).mean(0)


def train(task: Task, client: int, received: Tree, head: Tree, *, only_head: bool = False) -> Tree:
    """Three steps on all of a client's data; everything after them."""
    x, y = task.x[task.train[client]], task.y[task.train[client]]
    model = {name: value.clone() for name, value in {**received, **head}.items()}
    moving = [n for n in model if "running" not in n and "tracked" not in n]
    if only_head:
        moving = [*HEAD]
    for name in moving:
        model[name].requires_grad_()
    guidance = [model[n] for n in moving if n.startswith("guidance/")]
    others = [model[n] for n in moving if not n.startswith("guidance/")]
    groups = [{"params": others}, {"params": guidance, "weight_decay": DECAY + MU}]
    optimizer = torch.optim.SGD(groups[: 1 + bool(guidance)], LR, 0.9, weight_decay=DECAY)
    table = received[TABLE]
    frozen = torch.stack([table[label] for label in y.tolist()])
    own, alike = condition(task, client, table), table.sum(0) / CLASSES
    for _ in range(3):
        z = features(model, x, train=True)
        personal = F.linear(valve(model, z, own), model["head.weight"], model["head.bias"])
        general = valve(model, z, alike)
        pairs = [F.cosine_similarity(general, row[None]) for row in model[TABLE]]
        loss = F.cross_entropy(personal, y) + F.cross_entropy(torch.stack(pairs, 1), y)
        loss = loss + LAMBDA * torch.sqrt(((general - frozen) ** 2).sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.items()}


def check_evaluation(ours: Federation, client: int, head: Tree) -> None:
    """The counted loss on test data is that of the personal way."""
    task, model = ours.task, {**ours.server.model["base"], **head}
    x, y = task.x[task.test[client]], task.y[task.test[client]]
    own = condition(task, client, model[TABLE])
    z = valve(model, features(model, x, train=False), own)
    logits = F.linear(z, model["head.weight"], model["head.bias"])
    counted = evaluate(ours.server, ours.engine, [client], 9)["test"]
    assert counted.loss.item() == pytest.approx(F.cross_entropy(logits, y).item() * len(y))
    assert counted.correct.item() == (logits.argmax(1) == y).sum()


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_two_rounds_are_those_of_tensors_and_optimisers(net: Any) -> None:
    ours = Federation("gpfl", make_task(net), **THREE_STEPS, **OWN)
    initial = {name: dict(ours.task.models["base"].named_parameters())[name] for name in HEAD}
    heads = [{name: value.detach() for name, value in initial.items()} for _ in range(4)]
    model = ours.server.model["base"]
    assert set(HEAD).isdisjoint(model)
    for number, clients in enumerate(([0, 1, 2], [0, 2, 3])):
        ours.round(clients, number)
        trained = {i: train(ours.task, i, model, heads[i]) for i in clients}
        for i in clients:
            heads[i] = {name: trained[i][name] for name in HEAD}
            close(ours.engine.memory[i]["head"], heads[i])
        total = sum(EXAMPLES[i] for i in clients)
        model = {
            name: sum(EXAMPLES[i] / total * trained[i][name] for i in clients)
            for name, value in model.items()
            if value.is_floating_point()
        }
        close({name: ours.server.model["base"][name] for name in model}, model)
    for client in range(4):
        check_evaluation(ours, client, heads[client])


def test_the_personal_way_goes_on_through_what_a_target_has_behind_its_last_layer() -> None:
    ours = Federation("gpfl", make_task(novel=1), **THREE_STEPS, **OWN)
    saying = Federation("gpfl", make_task(Saying, loss=F.nll_loss, novel=1), **THREE_STEPS, **OWN)
    for number in range(2):
        for each in (ours, saying):
            each.round([0, 1, 2], number)
    close(saying.server.model, ours.server.model)
    for steps in (0, 2):
        counted = []
        for each in (ours, saying):
            serve = finetuned(each.server.personalize, each.method.Client, Steps(steps, 99))
            counted.append(evaluate(each.server, each.engine, [0, 3], 9, serve=serve)["test"])
        close(counted[0].loss, counted[1].loss)


def test_defaults_are_those_of_the_authors_script() -> None:
    config = Federation("gpfl", make_task()).config
    assert (config.magnitude_weight, config.guidance_weight_decay) == (0.01, 0.1)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_novel_client_trains_a_head_on_what_is_frozen(steps: int) -> None:
    settings = THREE_STEPS | OWN | {"novel_steps": steps}
    ours = Federation("gpfl", make_task(Normed, novel=1), **settings)
    ours.round([0, 1, 2])
    net = ours.task.models["base"]
    head = {name: net.state_dict()[name] for name in HEAD}
    if steps:
        trained = train(ours.task, 3, ours.server.model["base"], head, only_head=True)
        head = {name: trained[name] for name in HEAD}
    check_evaluation(ours, 3, head)


def test_a_novel_client_needs_labels() -> None:
    ours = Federation("gpfl", make_task(novel=1, unlabelled=True), **THREE_STEPS)
    ours.round([0, 1, 2])
    cohort = ours.engine.cohort([3], 9, training=False)
    with pytest.raises(UnlabelledError, match="no labels"):
        ours.server.personalize(cohort)


def test_there_is_no_one_network_to_hand_over() -> None:
    ours = Federation("gpfl", make_task(), **THREE_STEPS)
    with pytest.raises(UserError, match="a model to hand over must be one network, but GPFL"):
        ours.personal(0)


def test_a_task_must_have_classes_and_a_linear_head() -> None:
    with pytest.raises(UserError, match="a task of GPFL must have classes"):
        Federation("gpfl", make_quadratic_task())
    without = {"base": nn.Linear(FEATURES, CLASSES, bias=False)}
    with pytest.raises(UserError, match="a target of GPFL must end in"):
        Federation("gpfl", make_task(models=without))

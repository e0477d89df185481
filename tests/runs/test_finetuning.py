"""Fine-tuning of any method: what is used is the personal model after some steps of SGD."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import METHODS, moon
from hyperfed.runs.config import from_keys, to_dict
from hyperfed.runs.evaluation import evaluate, finetuned
from hyperfed.runs.run import Run
from hyperfed.system.randomness import generator
from hyperfed.task import Task
from hyperfed.training import Steps
from together import both
from toys import Normed, close, make_task, short

STEPS, BATCH, LR = 3, 5, 0.1
ROUNDS = 2
NOVEL = 3
LINEAR = ("weight", "bias")
TUNED = [f"serve.finetune_steps={STEPS}"]


def trained(method: str, *, steps: int = 0, task: Task | None = None, **own: Any) -> Run:
    settings = short(method, batch_size=BATCH, local_weight_decay=0.01, **own)
    return hyperfed.train(
        method,
        task or make_task(Normed, novel=1),
        rounds=ROUNDS,
        evaluate_every=1,
        cohort=2,
        method=settings,
        serve={"finetune_steps": steps},
    )


def rows_of(run: Any, client: int, round: int) -> list[Tensor]:
    """The training examples of each step."""
    draw, own = generator(0, "batches", client, round, "finetune", 0), run.task.train[client]
    return [own[torch.randperm(len(own), generator=draw)[:BATCH]] for _ in range(STEPS)]


def tuned_by_hand(run: Any, client: int, model: nn.Module, round: int) -> nn.Module:
    """The same model after a loop of PyTorch's own."""
    model = copy.deepcopy(model).train()
    settings = run.config.settings
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=settings.local_momentum, weight_decay=0.01
    )
    for rows in rows_of(run, client, round):
        optimizer.zero_grad()
        F.cross_entropy(model(run.task.x[rows]), run.task.y[rows]).backward()
        if settings.local_clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.local_clip)
        optimizer.step()
    return model


def model_of(run: Any, client: int) -> nn.Module | None:
    """The model of a client, unless its method says that it is not one."""
    try:
        found: nn.Module = run.model(client)
    except UserError as error:
        if "a model to hand over must be one" in str(error):
            return None
        raise
    return found


def mean_loss(task: Task, model: nn.Module, rows: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model.eval()(task.x[rows]), task.y[rows]).item()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_model_of_a_client_is_the_personal_one_after_a_loop_of_sgd(method: str) -> None:
    """Of known clients and of one that joins; what is evaluated is what is handed over."""
    run = trained(method, local_clip=0.3)
    memory = trees.clone(run.engine.memory)
    tuned = run.served_otherwise(TUNED)
    evaluated = tuned.evaluate_best()
    ours, theirs = (
        {client: trees.structure(tree) for client, tree in each.best.memory.items()}
        for each in (tuned, run)
    )
    assert ours == theirs
    torch.testing.assert_close(run.engine.memory, memory, rtol=0, atol=0)
    for client in (0, 1, NOVEL):
        plain = model_of(run, client)
        if plain is None:  # it is looked at below
            continue
        number = ROUNDS if client == NOVEL else run.best.round
        expected = tuned_by_hand(run, client, plain, number)
        ours = tuned.model(client)
        close(trees.model_of(ours), trees.model_of(expected))
        assert not torch.equal(ours.head.weight, plain.head.weight)
        found = evaluated["novel" if client == NOVEL else "test"]
        loss = found.client_loss[found.clients.index(client)]
        assert loss == pytest.approx(mean_loss(run.task, ours, run.task.test[client]), rel=1e-9)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_one_example_is_enough_under_batch_norm(method: str) -> None:
    """To train, to be evaluated and to join, with fine-tuning and without."""
    run = trained(method, task=make_task(Normed, examples=(9, 1, 9, 1), novel=1))
    x, y = run.task.x[:1], run.task.y[:1]
    for served in (run, run.served_otherwise(TUNED)):
        found = served.evaluate_best()
        assert all(math.isfinite(loss) for part in found.values() for loss in part.client_loss)
        try:
            assert isinstance(served.personalize(x, y), nn.Module)
        except UserError as error:
            refused = str(error)
        else:
            continue
        assert "a model to hand over must be one" in refused


def test_a_model_that_is_drawn_for_is_handed_over_as_it_was_evaluated() -> None:
    """Per-FedAvg adapts the model on random batches whenever it serves a client."""
    run = trained("per_fedavg")
    found = run.evaluate_best()
    for client in (0, NOVEL):
        record = found["novel" if client == NOVEL else "test"]
        loss = record.client_loss[record.clients.index(client)]
        ours = mean_loss(run.task, run.model(client), run.task.test[client])
        assert loss == pytest.approx(ours, rel=1e-9)


def test_a_newcomers_model_is_fine_tuned_too(tmp_path: Path) -> None:
    run = trained("fedavg")
    x, y = run.task.x[run.task.train[NOVEL]], run.task.y[run.task.train[NOVEL]]
    plain = run.personalize(x.numpy(), y.numpy())
    ours = run.served_otherwise(TUNED).personalize(x.numpy(), y.numpy())
    assert not torch.equal(ours.head.weight, plain.head.weight)
    losses = [F.cross_entropy(model(x), y).item() for model in (ours, plain)]
    assert losses[0] < losses[1]


def test_a_run_is_evaluated_fine_tuned_and_trains_as_if_it_were_not() -> None:
    """Also the best round is that of the fine-tuned models."""
    plain, ours = (trained("pfedhn_pc", steps=steps, local_lr=0.3) for steps in (0, STEPS))
    for what in ("server", "memory"):
        states = [
            run.server.state() if what == "server" else run.engine.memory for run in (plain, ours)
        ]
        torch.testing.assert_close(*states, rtol=0, atol=0)
    for split in ("val", "test", "novel"):
        losses = [
            [e.client_loss for e in run.evaluations if e.split == split] for run in (plain, ours)
        ]
        assert losses[0] != losses[1]
    assert plain.summary["bytes_down"] == ours.summary["bytes_down"]
    at_best = next(e for e in ours.evaluations if (e.round, e.split) == (ours.best.round, "val"))
    best = max(e.accuracy for e in ours.evaluations if e.split == "val")
    assert at_best.accuracy == best == ours.summary["val_accuracy"]
    again = ours.evaluate_best()["test"]
    recorded = next(e for e in ours.evaluations if (e.round, e.split) == (ours.best.round, "test"))
    assert again.client_loss == recorded.client_loss
    without = ours.served_otherwise(["serve.finetune_steps=0"]).model(0)
    assert not torch.equal(without.head.weight, ours.model(0).head.weight)


def test_a_method_made_for_newcomers_is_judged_by_fine_tuned_ones() -> None:
    """Its best round is by known clients served as if they were novel."""
    task = make_task(Normed, novel=1)
    plain, ours = (trained("itpfl", steps=steps, task=task, local_lr=0.2) for steps in (0, 40))
    with ours._at_best() as server:
        serve = finetuned(server.rehearse, ours.engine.client, Steps(40, BATCH))
        val = evaluate(server, ours.engine, [0, 1, 2], ours.best.round, serve=serve)["val"]
    assert ours.best.value == (val.correct.sum() / val.count.sum()).item()
    assert ours.best.value != plain.best.value


def test_the_two_models_of_mapper_are_fine_tuned_together() -> None:
    run = trained("mapper", mixing=(0.3,), task=make_task(novel=1))
    task = run.task
    common, own = (copy.deepcopy(task.models["base"]) for _ in range(2))
    trees.fill(common, run.best.server["model"]["base"])
    (client, *_) = (c for c, memory in run.best.memory.items() if memory)
    trees.fill(own, run.best.memory[client]["local"])
    both_parameters = [*common.parameters(), *own.parameters()]
    optimizer = torch.optim.SGD(both_parameters, lr=LR, momentum=0.9, weight_decay=0.01)
    for rows in rows_of(run, client, run.best.round):
        optimizer.zero_grad()
        output = 0.3 * own(task.x[rows]) + 0.7 * common(task.x[rows])
        F.cross_entropy(output, task.y[rows]).backward()
        optimizer.step()
    x, y = task.x[task.test[client]], task.y[task.test[client]]
    expected = F.cross_entropy(0.3 * own(x) + 0.7 * common(x), y).item()
    found = run.served_otherwise(TUNED).evaluate_best()["test"].client_loss[client]
    assert found == pytest.approx(expected, rel=1e-9)
    assert found != pytest.approx(run.evaluate_best()["test"].client_loss[client], rel=1e-3)


def test_target_and_head_of_gpfl_are_fine_tuned_on_the_personal_way() -> None:
    run = trained("gpfl", task=make_task(novel=1))
    task, received = run.task, run.best.server["model"]["base"]
    (client, *_) = (c for c, memory in run.best.memory.items() if memory)
    net = copy.deepcopy(task.models["base"])
    trees.fill(net, received | run.best.memory[client]["head"])
    share = torch.bincount(task.y[task.train[client]], minlength=3).double()
    condition = share / share.sum() @ received["guidance/embedding.weight"]

    def made(part: str) -> Tensor:
        first = F.linear(condition, *(received[f"guidance/{part}.0.{n}"] for n in LINEAR))
        scale, shift = (received[f"guidance/{part}.2.{n}"] for n in LINEAR)
        return F.layer_norm(F.relu(first), (4,), scale, shift)

    gamma, beta = made("gamma"), made("beta")

    def outputs(x: Tensor) -> Tensor:
        logits: Tensor = net.head(F.relu((1 + gamma) * torch.tanh(net.body(x)) + beta))
        return logits

    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=0.01)
    for rows in rows_of(run, client, run.best.round):
        optimizer.zero_grad()
        F.cross_entropy(outputs(task.x[rows]), task.y[rows]).backward()
        optimizer.step()
    x, y = task.x[task.test[client]], task.y[task.test[client]]
    found = run.served_otherwise(TUNED).evaluate_best()["test"].client_loss[client]
    assert found == pytest.approx(F.cross_entropy(outputs(x), y).item(), rel=1e-9)
    assert found != pytest.approx(run.evaluate_best()["test"].client_loss[client], rel=1e-3)


@pytest.mark.parametrize("client", [0, NOVEL])
def test_the_neighbours_of_knn_per_are_those_of_the_fine_tuned_features(client: int) -> None:
    """As if the server had sent this client the fine-tuned model."""
    run = trained("knn_per", mixing=(0.5,), neighbours=(3,))
    model = copy.deepcopy(run.task.models["base"])
    trees.fill(model, run.best.server["model"]["base"])
    number = ROUNDS if client == NOVEL else run.best.round
    expected = trees.model_of(tuned_by_hand(run, client, model, number))
    tuned = run.served_otherwise(TUNED)
    with run._at_best() as server:
        serve = tuned._finetuning(server.personalize)
        ours = evaluate(server, run.engine, [client], number, serve=serve)["test"]
        server.model["base"] = expected
        theirs = evaluate(server, run.engine, [client], number)["test"]
    close(vars(ours), vars(theirs))


@pytest.mark.parametrize("client", [0, NOVEL])
def test_moons_projection_head_is_fine_tuned_with_the_rest(client: int) -> None:
    run = trained("moon", projection=6)
    net = trees.fill(moon.projected(run.task.models["base"], 6), run.best.server["model"]["base"])
    number = ROUNDS if client == NOVEL else run.best.round
    expected = mean_loss(run.task, tuned_by_hand(run, client, net, number), run.task.test[client])
    found = run.served_otherwise(TUNED).evaluate_best()["novel" if client == NOVEL else "test"]
    assert found.client_loss[found.clients.index(client)] == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(mean_loss(run.task, net, run.task.test[client]), rel=1e-3)


@pytest.mark.parametrize("method", ["fedper", "pefll"])
def test_clients_are_fine_tuned_together_where_they_are_computed_together(method: str) -> None:
    loop, ours = both(method, task={"net": Normed, "examples": (12,) * 4, "novel": 2})
    for each in (loop, ours):
        each.round([0, 1])
    for ids in ([0, 1], [2, 3]):
        counts = []
        for each in (loop, ours):
            serve = finetuned(each.server.personalize, each.method.Client, Steps(STEPS, BATCH))
            found = evaluate(each.server, each.engine, ids, 4, serve=serve)
            counts.append({split: vars(found[split]) for split in found})
        close(*counts)
        assert ("finetune", ids) in ours.engine.together


def test_who_has_no_model_since_fine_tuning_diverged_is_told() -> None:
    """An evaluation goes on without such clients; whoever asks for one's model is told why."""
    run = trained("fedavg").served_otherwise([*TUNED, "method.local_lr=1e300"])
    assert run.evaluate_best()["test"].evaluated == "0 of 3"
    x, y = run.task.x[:4], run.task.y[:4]
    for wanted in (lambda: run.model(0), lambda: run.model(NOVEL), lambda: run.personalize(x, y)):
        with pytest.raises(UserError, match=r"must come to a model .* is not finite; serve it"):
            wanted()


def test_without_labels_it_is_refused_before_anything_is_trained() -> None:
    task = make_task(novel=1, unlabelled=True)
    with pytest.raises(UserError, match="finetune_steps must be 0 where a novel client has no lab"):
        trained("itpfl", steps=STEPS, task=task)
    run = trained("itpfl", task=task)
    with pytest.raises(UserError, match="finetune_steps must be 0"):
        run.served_otherwise(TUNED)
    tuned = trained("itpfl", steps=STEPS)
    with pytest.raises(UserError, match="finetune_steps must be 0"):
        tuned.personalize(task.x[:4].numpy())


def test_models_that_are_not_one_networks_are_refused() -> None:
    keys = {"method": {"novel_models": "ensemble"}, "serve": {"finetune_steps": 1}}
    with pytest.raises(UserError, match=r"serve\.finetune_steps: must be 0 where.*came 1"):
        from_keys("pfedhn", keys)
    ours = trained("fedavg")
    own = {"personal_model": lambda self, model: {"a": model}}
    client = type("Odd", (ours.engine.client,), own)
    ours.engine.client = client
    serve = finetuned(ours.server.personalize, client, Steps(1, 4))
    with pytest.raises(UserError, match="must be one network's weights"):
        evaluate(ours.server, ours.engine, [0], 1, serve=serve)


def test_no_steps_are_the_default_and_change_nothing() -> None:
    assert to_dict(from_keys("fedavg", {}))["serve"] == {"finetune_steps": 0}
    assert from_keys("fedavg", {}) == from_keys("fedavg", {"serve.finetune_steps": 0})
    runs = [trained("fedper"), trained("fedper").served_otherwise(["serve.finetune_steps=0"])]
    models = [trees.model_of(run.model(0)) for run in runs]
    torch.testing.assert_close(*models, rtol=0, atol=0)
    with pytest.raises(UserError, match=r"serve\.finetune_steps: must be greater than or equal"):
        from_keys("fedavg", {"serve.finetune_steps": -1})

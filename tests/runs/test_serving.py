"""What is served is what was best, by the run's own settings, and serving leaves no trace."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hyperfed
from hyperfed import trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.runs import evaluation
from hyperfed.runs.evaluation import evaluate
from hyperfed.runs.run import Run
from hyperfed.task import Task
from toys import Normed, make_task, short

NOVEL = 3


def overfitted(method: str, **keys: Any) -> Run:
    """A run whose best round is not its last."""
    task = make_task(Normed, novel=1)
    settings = short(method, local_lr=1.0, novel_steps=0)
    run = hyperfed.train(method, task, rounds=5, evaluate_every=1, method=settings, **keys)
    assert run.best.round < 5
    return run


def test_serving_leaves_what_clients_remember_as_it_was() -> None:
    run = overfitted("fedper", seed=1)
    before = dict(run.engine.memory)
    assert any(before[client] is not run.best.memory.get(client) for client in before)
    run.model(0)
    run.evaluate_best()
    run.personalize(run.task.x[:6].numpy(), run.task.y[:6].numpy())
    assert run.engine.memory.keys() == before.keys()
    assert all(run.engine.memory[client] is before[client] for client in before)


def test_a_model_is_handed_out_for_use_and_not_for_training() -> None:
    run = overfitted("fedavg", seed=1)
    assert run.task.models["base"].train().training
    newcomer = run.task.x[:6].numpy(), run.task.y[:6].numpy()
    assert not any(model.training for model in (run.model(0), run.personalize(*newcomer)))


def test_novel_clients_are_evaluated_with_the_best_rounds_server() -> None:
    run = overfitted("fedavg", seed=1)
    latest, best = run.server.model["base"], run.best.server["model"]["base"]
    assert not torch.equal(latest["head.weight"], best["head.weight"])
    rows = run.task.test[NOVEL]
    output = torch.func.functional_call(Normed().double().eval(), best, (run.task.x[rows],))
    expected = F.cross_entropy(output, run.task.y[rows]).item()
    recorded = next(e for e in run.evaluations if e.split == "novel")
    assert recorded.round == 5  # recorded at the end of the run
    for found in (recorded, run.evaluate_novel(), run.evaluate_best()["novel"]):
        assert found.loss == pytest.approx(expected, rel=1e-9)


def test_a_server_that_changes_while_it_serves_does_not_change_the_best_round() -> None:
    run = overfitted("fedavg", seed=1)
    before = trees.clone(run.best.server)
    with run._at_best() as server:
        server.model["base"]["head.weight"].add_(1)
    torch.testing.assert_close(run.best.server, before, rtol=0, atol=0)


def test_who_serves_otherwise_has_what_training_sent() -> None:
    run = overfitted("fedavg", seed=1)
    run._earlier = 1000.0  # as of a run that was resumed
    tuned = run.served_otherwise(["serve.finetune_steps=2"])
    assert (tuned.round, tuned.bytes) == (5, run.bytes)
    recorded = tuned.evaluate_novel()
    assert (recorded.bytes_down, recorded.bytes_up) == (run.bytes["down"], run.bytes["up"])
    assert recorded.bytes_up > 0
    assert run.seconds > recorded.seconds > 1000
    run._start -= 500  # as of a run that has trained since for as long
    assert run.served_otherwise(["serve.finetune_steps=2"]).evaluate_novel().seconds > 1500
    assert pickle.loads(pickle.dumps(tuned)).evaluate_novel().seconds > recorded.seconds


def test_of_equally_good_rounds_the_first_is_the_best() -> None:
    run = hyperfed.train(
        "fedavg", make_task(), rounds=3, evaluate_every=1, method=short("fedavg", local_lr=1e-9)
    )
    assert len({e.accuracy for e in run.evaluations if e.split == "val"}) == 1
    assert run.best.round == 1


def test_each_newcomer_has_draws_of_its_own_and_the_runs_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing = {"precision": "bf16", "engine": {"name": "loop", "cores_per_client": 1}}
    run = hyperfed.train(
        "fedavg", make_task(novel=1), rounds=1, method=short("fedavg"), **computing
    )
    built: list[dict[str, Any]] = []

    def watched(*arguments: Any, **options: Any) -> LoopEngine:
        built.append(options)
        return LoopEngine(*arguments, **options)

    monkeypatch.setattr("hyperfed.runs.trained.LoopEngine", watched)
    x, y = run.task.x.numpy(), run.task.y.numpy()
    for start in (0, 0, 6):
        run.personalize(x[start : start + 6], y[start : start + 6])
    seeds = [options["seed"] for options in built]
    assert seeds[0] == seeds[1] != seeds[2]
    assert {options["precision"] for options in built} == {"bf16"}
    assert {options["cores_per_client"] for options in built} == {1}
    assert all(options["home"] is run.engine for options in built)  # of whom methods ask


def test_a_newcomer_gets_what_known_clients_say_is_nearest() -> None:
    task = make_task(novel=1)
    run = hyperfed.train(
        "pfedhn", task, rounds=1, method=short("pfedhn", novel_models="nearest", distance_steps=1)
    )
    x = task.x[:6]
    made = run.personalize(x.numpy(), task.y[:6].numpy())(x)
    assert any(torch.equal(made, run.model(client)(x)) for client in task.known)


def test_absent_classes_are_those_without_an_example_to_learn_from() -> None:
    """Not those without one to be tested on."""
    task = lacking()
    run = hyperfed.train("fedavg", task, rounds=1, method=short("fedavg"))
    found = evaluate(run.server, run.engine, [0], 1)["test"]
    model, rows = run.server.model["base"], task.test[0]
    output = torch.func.functional_call(task.models["base"], model, (task.x[rows],))
    assert output.argmax(dim=1).eq(2).any()  # it does predict the class that is absent
    right = output[:, :2].argmax(dim=1) == task.y[rows]
    assert found.masked_correct.item() == right.sum()
    assert found.masked_correct.item() != found.correct.item()


def lacking() -> Task:
    """Client 0 learns from classes 0 and 1, and is tested on classes 0 and 2."""
    task = make_task()
    task.y[task.train[0]] %= 2
    task.y[task.test[0]] = torch.tensor([0, 2, 0, 2, 0, 0])
    return task


def accuracy_with(run: Run, of: dict[int, int]) -> float:
    """Of clients with each other's models, {client: whose}."""
    right = 0.0
    for client, other in of.items():
        rows = run.task.test[client]
        output = run.model(other)(run.task.x[rows])
        right += float((output.argmax(dim=1) == run.task.y[rows]).sum())
    return right / sum(len(run.task.test[client]) for client in of)


def test_a_summary_says_how_good_other_clients_models_are() -> None:
    method = short("pfedhn", local_steps=5, lr=0.5 / 3, embedding_size=3)
    keys = {"rounds": 20, "cohort": 3, "evaluate_every": 20, "seed": 3, "method": method}
    run = hyperfed.train("pfedhn", make_task(novel=1), **keys)
    accuracy = partial(accuracy_with, run)

    before, behind, own = ({c: (c + by) % 3 for c in range(3)} for by in (2, 1, 0))
    assert run.summary["others_accuracy"] == accuracy(before)
    assert accuracy(before) not in (accuracy(behind), accuracy(own)), "choose another seed"

    share = [run.task.y[rows].bincount(minlength=3) / len(rows) for rows in run.task.train]
    apart = [[float((p - q).abs().sum()) / 2 for q in share[:3]] for p in share]
    assert run.summary["total_variation"] == pytest.approx(sum(map(sum, apart[:3])) / 6)
    novel = run.evaluations[-1]
    assert novel.client_total_variation == pytest.approx([min(apart[3])])
    nearest = min(float((share[3] * (share[3] / q).log()).sum()) for q in share[:3])
    assert novel.client_kl_divergence == pytest.approx([nearest], rel=1e-5)
    assert not any(e.client_total_variation for e in run.evaluations if e.split != "novel")


@pytest.mark.parametrize(("at_once", "of"), [(2, {0: 1, 1: 0}), (1, {})])
def test_who_is_alone_has_no_other_clients_model(
    at_once: int, of: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "CHUNK", at_once)
    method = short("pfedhn", local_steps=5, lr=0.5, embedding_size=3)
    keys = {"rounds": 20, "cohort": 3, "evaluate_every": 20, "seed": 0, "method": method}
    run = hyperfed.train("pfedhn", make_task(novel=1), **keys)
    expected = accuracy_with(run, of) if of else None
    assert run.summary["others_accuracy"] == expected
    assert expected != accuracy_with(run, of | {2: 2}), "choose another seed"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("fedavg", {}),
        ("fedper", {}),
        ("pfedhn_pc", {}),
        ("pfedhn", {"serve": {"finetune_steps": 1}}),
    ],
    ids=["one for all", "a head of its own", "a head beside a made body", "fine-tuned"],
)
def test_where_others_models_say_nothing_there_is_no_number(
    method: str, keys: dict[str, Any]
) -> None:
    run = hyperfed.train(method, make_task(), rounds=1, method=short(method), **keys)
    assert run.summary["others_accuracy"] is None

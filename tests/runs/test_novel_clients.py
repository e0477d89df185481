"""A newcomer's model depends on its training data and on nothing that it is judged by."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from hyperfed import federation, trees
from hyperfed.engines import calls
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, step
from hyperfed.methods import METHODS
from hyperfed.privacy import analytic_multiplier
from hyperfed.runs.config import from_keys
from hyperfed.runs.evaluation import SUMS, evaluate, with_samples
from hyperfed.runs.run import Run
from hyperfed.task import Outline, Task
from hyperfed.training import Steps, UnlabelledError
from hyperfed.trees import Model, Tree
from toys import Federation, Normed, lengths, make_task

NOVEL = 3
SETTINGS = {"local_steps": 3, "batch_size": 4, "local_lr": 0.1}
KEYS: dict[str, Any] = {"method": {"epsilon": 0.3, "phase_one_rounds": 1, **SETTINGS}}


def trained(method: str, task: Task) -> Federation:
    ours = Federation(method, task, **SETTINGS, **lengths(method, 3))
    for number in range(2):
        ours.round([0, 1, 2], number)
    return ours


def killed(run: Run, training: Any) -> Path:
    """The folder that a killed run leaves."""
    training.close()
    run.close()
    assert run.folder is not None
    return run.folder.path


def with_other_test_data(task: Task) -> Task:
    """The same task, but for inputs and labels of all test examples of the novel client."""
    x, y = task.x.clone(), task.y.clone()
    x[task.test[NOVEL]] *= -10
    y[task.test[NOVEL]] = (y[task.test[NOVEL]] + 1) % task.classes
    return dataclasses.replace(task, x=x, y=y)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_newcomer_is_served_the_same_whatever_its_test_data_are(method: str) -> None:
    """In training, in personalisation, and in what its validation examples then find."""
    task = make_task(novel=1)
    found = []
    for each in (task, with_other_test_data(task)):
        ours = trained(method, each)
        found.append(evaluate(ours.server, ours.engine, [NOVEL], 7))
    honest, spoiled = found
    for name in SUMS:
        assert torch.equal(getattr(honest["val"], name), getattr(spoiled["val"], name)), name
    assert not torch.equal(honest["test"].loss, spoiled["test"].loss)  # it does tell them apart


def takes_steps(method: str) -> bool:
    return "novel_steps" in {field.name for field in dataclasses.fields(METHODS[method].Config)}


@pytest.mark.parametrize("method", sorted(filter(takes_steps, METHODS)))
def test_a_newcomer_that_is_not_to_train_is_served_all_the_same(method: str) -> None:
    task = make_task(novel=1)
    ours = Federation(method, task, **SETTINGS, **lengths(method, 3) | {"novel_steps": 0})
    ours.round([0, 1, 2], 0)
    assert evaluate(ours.server, ours.engine, [NOVEL], 1)["test"].loss.isfinite().all()


@pytest.mark.parametrize("method", sorted(filter(takes_steps, METHODS)))
def test_a_newcomer_trains_on_batches_as_large_as_anybodys(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, draw = set(), calls.draw

    def drawn(call: calls.Call, *arguments: Any) -> Tensor:
        if call.client == NOVEL and call.batches is not None:
            plans.add(call.batches)
        return draw(call, *arguments)

    monkeypatch.setattr(calls, "draw", drawn)
    own = SETTINGS | lengths(method, 3) | {"batch_size": 5, "novel_steps": 2}
    ours = Federation(method, make_task(Normed, novel=1), **own)
    ours.round([0, 1, 2], 0)
    evaluate(ours.server, ours.engine, [NOVEL], 1)
    assert Steps(2, 5) in plans
    assert {plan.size for plan in plans} == {5}


class Server(federation.Server):
    """Sends the initial model, after it has asked the client to look at its data, if it can."""

    def __init__(self, outline: Outline, config: Any) -> None:
        super().__init__(outline, config)
        self.model = outline.initial()

    def personalize(self, clients: Cohort) -> Model:
        if hasattr(self.config, "look"):
            clients.ask(self.config.look)
        return self.model


class LooksInAStep(federation.Client):
    @step
    def look(self) -> Tree:
        return {"sum": self.test.batch().x.sum()}


class LooksForItsModel(federation.Client):
    def personal_model(self, received: Tree) -> Model:
        return received | {"head.bias": received["head.bias"] + self.test.batch().x.mean()}


class LooksToPredict(federation.Client):
    def predict(self, model: Model, x: Tensor) -> Tensor:
        return super().predict(model, x) + self.test.batch().x.mean()


@pytest.mark.parametrize("cheat", [LooksInAStep, LooksForItsModel, LooksToPredict])
def test_personalisation_cannot_read_test_data_however_it_tries(cheat: Any) -> None:
    task = make_task(novel=1)
    engine, server = LoopEngine(task, cheat, cheat, seed=0), Server(task.outline(), cheat)
    with pytest.raises(PermissionError, match="test data is for evaluation"):
        evaluate(server, engine, [NOVEL], 0)


class ReadsLabels(federation.Client):
    def personal_model(self, received: Tree) -> Model:
        return received | {"head.bias": received["head.bias"] + self.train.batch().y.sum()}


def test_the_model_of_an_unlabelled_newcomer_cannot_depend_on_its_labels() -> None:
    task = make_task(novel=1, unlabelled=True)
    engine = LoopEngine(task, ReadsLabels, ReadsLabels, seed=0)
    server = Server(task.outline(), ReadsLabels)
    with pytest.raises(UnlabelledError):
        evaluate(server, engine, [NOVEL], 0)


def finished(method: str, task: Task, seed: int = 0, **settings: Any) -> Run:
    short = {"local_steps": 3, "batch_size": 4} | settings
    return hyperfed.train(method, task, rounds=2, evaluate_every=2, method=short, seed=seed)


def test_fewer_samples_are_nested_and_leave_all_other_data() -> None:
    task = make_task(novel=2)
    few, more = with_samples(task, 3, seed=0), with_samples(task, 5, seed=0)
    for client in task.novel_ids:
        own, three, five = (set(each.train[client].tolist()) for each in (task, few, more))
        assert len(three) == 3
        assert three < five < own
    for client in task.known:
        assert few.train[client] is task.train[client]
    assert few.val == task.val
    assert few.test == task.test
    assert with_samples(task, 3, seed=1).train[3].tolist() != few.train[3].tolist()
    assert len({each.fingerprint for each in (task, few, more)}) == 3
    same = dataclasses.replace(task, train=[*task.train[:2], *[torch.arange(9)] * 2])
    one, other = with_samples(same, 3, seed=0).train[2:]
    assert one.tolist() != other.tolist()  # each has a draw of its own
    for wrong in (0, 10):
        with pytest.raises(UserError, match=r"samples must be 1 to 9.*novel client 3"):
            with_samples(make_task(novel=1), wrong, seed=0)


def test_a_run_serves_novel_clients_from_fewer_samples_as_if_they_had_no_others() -> None:
    """By PeFLL's one forward pass: the descriptor is the mean over those three examples."""
    run = finished("pefll", make_task(novel=1), seed=1)
    few = run.served_otherwise(samples=3)
    same = finished("pefll", with_samples(make_task(novel=1), 3, seed=1), seed=1)
    whole, from_few, expected = (trees.model_of(each.model(NOVEL)) for each in (run, few, same))
    torch.testing.assert_close(from_few, expected, rtol=0, atol=0)
    assert not torch.equal(whole["head.weight"], from_few["head.weight"])
    assert few.evaluate_novel() != run.evaluate_novel()
    assert vars(run.evaluate_novel()) | {"seconds": 0} == vars(run.evaluate_best()["novel"]) | {
        "seconds": 0
    }


def test_a_run_serves_novel_clients_by_another_protocol_without_training_again() -> None:
    run = finished("pfedhn", make_task(novel=1), novel_rounds=2)
    zero = run.served_otherwise(["method.novel_rounds=0"])
    mean = run.server.embeddings.weight.detach().mean(dim=0, keepdim=True)
    made = run.server.hyper_net(mean, "base")
    for name, value in zero.model(NOVEL).state_dict().items():
        torch.testing.assert_close(value, made[name][0].detach())
    unlabelled = run.served_otherwise(["method.novel_models=ensemble", "task.unlabelled=true"])
    assert unlabelled.evaluate_novel().split == "novel"
    with pytest.raises(UserError, match="needs labels"):
        run.served_otherwise(["task.unlabelled=true"])


def test_novel_clients_are_served_several_times_with_noise_of_their_own() -> None:
    run = finished("itpfl", make_task(novel=1), private=True, phase_one_rounds=1)
    noisy = run.served_otherwise(["method.epsilon=0.5", "method.delta=0.01", "method.budget=2"])
    once, thrice = noisy.evaluate_novel(), noisy.evaluate_novel(draws=3)
    assert thrice.count == tuple(3 * count for count in once.count)
    assert thrice.loss != pytest.approx(once.loss, rel=1e-6)
    assert noisy.evaluate_best(draws=3)["novel"].loss == thrice.loss
    assert run.evaluate_novel(draws=3).loss == pytest.approx(run.evaluate_novel().loss, rel=1e-9)
    with pytest.raises(UserError, match="draws must be a whole number, at least 1"):
        run.evaluate_novel(draws=0)


@pytest.mark.parametrize("kept", ["in a pickle", "in its folder"])
def test_what_a_newcomer_spent_is_kept(kept: str, tmp_path: Path) -> None:
    task = make_task()
    method = {"epsilon": 0.3, "delta": 0.01, "phase_one_rounds": 1, **SETTINGS}
    keys: dict[str, Any] = {"cohort": 2, "evaluate_every": 1, "rounds": 3, "checkpoint_every": 2}
    run = Run.start(from_keys("itpfl", keys | {"method": method}), tmp_path, task)
    training = run.train()
    next(training)
    newcomer = task.x[:6].numpy(), task.y[:6].numpy()
    run.personalize(*newcomer)
    next(training)
    spent = run.privacy()
    assert spent is not None
    assert spent["answered"] == 1
    if kept == "in a pickle":
        again = pickle.loads(pickle.dumps(run))
    else:
        again = Run.open(killed(run, training), task)
    assert again.privacy() == spent
    with pytest.raises(UserError, match="after 1 of them"):
        again.served_otherwise(["method.epsilon=0.2"]).personalize(*newcomer)


def test_what_is_let_out_after_a_run_s_end_is_known_to_whoever_opens_it(tmp_path: Path) -> None:
    task = make_task(novel=1, unlabelled=True)
    method = {"epsilon": 0.3, "delta": 0.01, "phase_one_rounds": 1, **SETTINGS}
    run = hyperfed.train("itpfl", task, rounds=2, cohort=2, method=method, out=tmp_path)
    run.close()
    one, other = (Run.open(run.folder.path, task) for _ in range(2))
    x, less = task.x[:6], ["method.epsilon=0.2", "method.budget=0.42"]
    model = one.personalize(x).state_dict()
    one.served_otherwise(less).evaluate_novel()
    spent = one.privacy()
    assert (spent["answered"], spent["answers"]) == (2, 2)
    for served in (other, Run.open(run.folder.path, task)):
        torch.testing.assert_close(served.personalize(x).state_dict(), model, rtol=0, atol=0)
        with pytest.raises(UserError, match="after 1 of them"):
            served.served_otherwise(["method.epsilon=0.2"]).personalize(x)
        with pytest.raises(UserError, match="after 2 of them"):
            served.served_otherwise(["method.epsilon=0.25", "method.budget=0.42"]).evaluate_novel()
        assert served.privacy() == spent


def test_noise_that_only_serving_asks_for_is_accounted_for_over_processes_too(
    tmp_path: Path,
) -> None:
    task, method = make_task(novel=1), {"private": True, "phase_one_rounds": 1, **SETTINGS}
    run = hyperfed.train("itpfl", task, rounds=2, cohort=2, method=method, out=tmp_path)
    for epsilon in (0.3, 0.3, 0.2):  # the same question, and another one
        noisy = [f"method.epsilon={epsilon}", "method.delta=0.01"]
        served = Run.open(run.folder.path, task).served_otherwise(noisy)
        if epsilon == 0.3:
            served.evaluate_novel()
            continue
        with pytest.raises(UserError, match="after 1 of them"):
            served.evaluate_novel()


def test_a_newcomer_without_labels_is_not_the_one_whose_labels_are_all_the_first_class() -> None:
    task = make_task(novel=1)
    method = KEYS["method"] | {"budget": 1.0}
    run = hyperfed.train("itpfl", task, rounds=2, cohort=2, method=method)
    x = task.x[:6].numpy()
    models = [run.personalize(x, y) for y in (None, [0] * 6, [1] * 6)]
    # None answers in the place of another, and all are told of the same examples.
    assert (run.privacy()["answered"], run.privacy()["answers"]) == (2, 3)
    weights = [model.state_dict()["head.weight"] for model in models]
    assert not any(map(torch.equal, weights, weights[1:]))


def test_a_newcomer_s_account_is_of_its_examples_in_any_order() -> None:
    """Each order has noise of its own, and their mean little."""
    task = make_task(novel=1, unlabelled=True)
    run = hyperfed.train("itpfl", task, rounds=2, cohort=2, **KEYS)
    x = task.x[:6].numpy()
    model = run.personalize(x).state_dict()
    with pytest.raises(UserError, match="after 1 of them"):
        run.personalize(x[::-1].copy())
    again = run.personalize(x).state_dict()
    torch.testing.assert_close(again, model, rtol=0, atol=0)
    run.personalize(task.x[1:7].numpy())  # somebody else, as far as anybody knows
    assert run.privacy()["answered"] == 3


def test_who_answers_with_noise_is_not_served_without() -> None:
    task = make_task(novel=1, unlabelled=True)
    run = hyperfed.train("itpfl", task, rounds=2, cohort=2, **KEYS)
    with pytest.raises(UserError, match=r"must be served so, got method\.epsilon=none; name one"):
        run.served_otherwise(["method.epsilon=none"])


def test_every_answer_to_a_private_run_is_the_same_one_or_spends(tmp_path: Path) -> None:
    task = make_task(novel=1, unlabelled=True)
    keys: dict[str, Any] = {"cohort": 2, "evaluate_every": 1, "rounds": 2}
    method = {"epsilon": 0.3, "delta": 0.01, "phase_one_rounds": 1, **SETTINGS}
    run = hyperfed.train("itpfl", task, **keys, method=method, out=tmp_path)
    assert run.summary["privacy"] == {
        "mechanism": "gaussian, analytic calibration",
        "adjacency": "one sample replaced",
        "epsilon_of_an_answer": 0.3,
        "delta": 0.01,
        "noise_multiplier": pytest.approx(analytic_multiplier(0.3, 0.01)),
        "epsilon_budget": 0.3,
        "epsilon_spent": pytest.approx(0.3),
        "answers": 1,
        "answered": 1,
        "noise": "drawn from the run's seed: a simulation, which protects nobody who knows it",
    }
    opened = Run.open(run.folder.path, task)
    copied = pickle.loads(pickle.dumps(run))
    assert (copied.privacy(), copied.bytes) == (run.privacy(), run.bytes)
    for served in (run, opened, copied, run.served_otherwise(["serve.finetune_steps=0"])):
        models = [served.model(NOVEL).state_dict() for _ in range(2)]
        torch.testing.assert_close(models[0], run.model(NOVEL).state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(models[1], models[0], rtol=0, atol=0)
        assert served.evaluate_novel().loss == run.evaluations[-1].loss
        with pytest.raises(UserError, match=r"within epsilon 0\.3 .* after 1 of them"):
            served.evaluate_novel(draws=20)
        with pytest.raises(UserError, match="after 1 of them"):
            served.served_otherwise(["method.epsilon=0.2"]).evaluate_novel()
        assert served.privacy() == run.summary["privacy"]
    x = task.x[task.train[NOVEL]]
    first, again = (run.personalize(x).state_dict() for _ in range(2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert run.privacy() == run.summary["privacy"] | {"answered": 2}
    (newcomer,) = run._newcomers.values()
    assert len(newcomer[0]["multipliers"]) == 1


def test_what_was_spent_survives_rounds_that_come_to_nothing_and_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    task = make_task(novel=1)
    config = from_keys("itpfl", {"rounds": 9, "checkpoint_every": 1, "evaluate_every": 1} | KEYS)
    run = Run.start(config, tmp_path, task)
    training = run.train()
    next(training)
    run.model(NOVEL)
    assert run.privacy()["answers"] == 1
    run.engine.memory = {}
    next(training)
    resumed = Run.resume(killed(run, training), task)
    assert resumed.privacy()["answers"] == 1


def test_novel_clients_are_served_by_the_server_of_the_best_round_not_of_the_last() -> None:
    keys = {"evaluate_every": 1, "cohort": 2, "method": {"local_lr": 1.0, "local_steps": 5}}
    run = hyperfed.train("fedavg", make_task(novel=1), rounds=6, **keys)
    best = run.summary["best_round"]
    assert best < 6
    till_then = hyperfed.train("fedavg", make_task(novel=1), rounds=best, **keys)
    latest = evaluate(till_then.server, till_then.engine, [NOVEL], best)["test"]
    (recorded,) = [e for e in run.evaluations if e.split == "novel"]
    found = {e.loss for e in (recorded, run.evaluate_novel(), run.evaluate_best()["novel"])}
    assert found == {latest.loss.item() / latest.count.item()}
    last = evaluate(run.server, run.engine, [NOVEL], 6)["test"]
    assert last.loss.item() != latest.loss.item()


def test_settings_that_decide_what_is_trained_are_refused_when_serving() -> None:
    run = finished("pfedhn", make_task(novel=1))
    with pytest.raises(UserError, match="must not change what was trained"):
        run.served_otherwise(["method.hidden=7"])
    with pytest.raises(UserError, match="3 errors"):
        run.served_otherwise(["rounds=7", "method=fedavg", "method.novel_lr=-1"])
    with pytest.raises(UserError, match="must be novel clients"):
        finished("fedavg", make_task()).evaluate_novel()


def test_layers_that_no_client_remembers_are_not_retained_when_serving() -> None:
    """It would have the target's initial ones in their place."""
    run = finished("pfedla", make_task())
    for setting in ("method.retain=1", 'method.retained_layers=["head"]'):
        with pytest.raises(
            UserError, match=r"must not change what was trained, but method\.retain"
        ):
            run.served_otherwise([setting])
    kept = finished("pfedla", make_task(), retain=1)
    client, remembered = next(iter(kept.best.memory.items()))
    own = kept.served_otherwise(["method.retain=2"]).model(client).state_dict()
    torch.testing.assert_close(dict(own), remembered["model"], rtol=0, atol=0)
    kept.served_otherwise(["method.retain=0"])  # which needs nothing of what is remembered


def test_novel_clients_images_are_corrupted_after_training_too(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"rounds": 1, "method": {"local_steps": 1}, "seed": 1}
    keys |= {"task": {"name": "digits", "clients": 10}}
    run = hyperfed.train("fedavg", out=tmp_path, **keys)
    blurred = run.served_otherwise(["task.novel_corruption=blur"])
    del keys["task"]
    given = hyperfed.train("fedavg", dataclasses.replace(run.task, source=None), **keys)
    with pytest.raises(UserError, match="only where settings made the task"):
        given.served_otherwise(["task.novel_corruption=blur"])
    novel, known = run.task.train[9], run.task.train[0]
    assert not torch.equal(blurred.task.x[novel], run.task.x[novel])
    assert torch.equal(blurred.task.x[known], run.task.x[known])
    for ours, theirs in zip(blurred.task.train, run.task.train, strict=True):
        assert torch.equal(ours, theirs)  # the seed deals clients what it dealt them before
    assert blurred.evaluate_novel().loss != run.evaluate_novel().loss


def test_a_private_client_spends_where_it_is_served_from_other_data() -> None:
    data = {"name": "digits", "clients": 8, "novel": 0.25, "unlabelled": True}
    keys: dict[str, Any] = {"rounds": 2, "cohort": 2, "task": data}
    method = {"epsilon": 0.3, "phase_one_rounds": 1, "local_steps": 1}
    run = hyperfed.train("itpfl", **keys, method=method)
    blurred = "task.novel_corruption=blur"
    with pytest.raises(UserError, match="after 1 of them"):
        run.served_otherwise([blurred]).evaluate_novel()
    run.served_otherwise([blurred, "method.budget=2"]).evaluate_novel()
    for client in run.task.novel_ids:
        released = run.engine.released[client]
        assert len(released["multipliers"]) == 2
        first, second = released["answers"].values()
        assert not torch.equal(first, second)
    assert run.evaluate_novel().loss == run.evaluations[-1].loss  # as before, for nothing


def test_one_trained_run_serves_novel_clients_of_several_distributions(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 12, "novel": 0.25, "partition": "dirichlet", "alpha": 0.3}
    keys = {"rounds": 2, "evaluate_every": 1, "cohort": 3, "method": {"local_steps": 1}}
    run = hyperfed.train("fedavg", out=tmp_path, task=data, **keys)
    before = run.evaluate_best()
    for alpha in (1, 100):
        other = run.served_otherwise([f"task.novel_alpha={alpha}"])
        for ours, theirs in zip(
            (run.task.train, run.task.val, run.task.test),
            (other.task.train, other.task.val, other.task.test),
            strict=True,
        ):
            for client in run.task.known:
                assert torch.equal(theirs[client], ours[client])
        assert torch.equal(other.task.x, run.task.x)
        after = other.evaluate_best()
        for split in ("val", "test"):
            assert after[split].client_loss == before[split].client_loss
        assert after["novel"].client_loss != before["novel"].client_loss
        assert sum(after["novel"].count) == sum(before["novel"].count)
    same = run.served_otherwise(["task.novel_alpha=none"])
    assert same.evaluate_novel().client_loss == before["novel"].client_loss
    again = pickle.loads(pickle.dumps(other)).served_otherwise(["task.novel_alpha=none"])
    for split, found in again.evaluate_best().items():
        assert found.client_loss == before[split].client_loss
    given = hyperfed.train("fedavg", dataclasses.replace(run.task, source=None), **keys)
    with pytest.raises(UserError, match=r"novel_alpha can change only where settings made"):
        given.served_otherwise(["task.novel_alpha=1"])

"""The round loop: repeatable, resumable, the best round by validation, models afterwards."""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.analysis.budgets import Budget, within
from hyperfed.engines import Faults
from hyperfed.errors import LostEverybodyError, UserError
from hyperfed.federation import AllLostError
from hyperfed.methods import METHODS, fedavg, pfedhn
from hyperfed.runs import config
from hyperfed.runs.records import as_written
from hyperfed.runs.run import Run
from hyperfed.task import Task
from toys import FEATURES, Normed, Stemmed, TwoLayers, lengths, make_task, recorded

FAULTS = {"drop": 0.3, "nan": 0.2}


def keys_of(name: str, **keys: Any) -> dict[str, Any]:
    """Settings of a short run: a newcomer's training is short too."""
    own = {"local_steps": 3, "batch_size": 4} | lengths(name) | keys.pop("method", {})
    return {"rounds": 6, "evaluate_every": 2, "checkpoint_every": 2, "method": own} | keys


def trained(name: str = "pfedhn", out: Path | None = None, task: Any = None, **keys: Any) -> Run:
    task = task or make_task(Normed, novel=1)
    return hyperfed.train(name, task, out=out, **keys_of(name, **keys))


@pytest.mark.parametrize(("cores", "seen"), [(1, {1}), (None, {2})])
def test_server_and_clients_compute_on_the_cores_of_the_settings(
    cores: int | None, seen: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            found.append(torch.get_num_threads())
            return function(*arguments, **options)

        return noted

    for name in ("round", "personalize", "state"):
        monkeypatch.setattr(pfedhn.Server, name, noting(getattr(pfedhn.Server, name)))
    told = property(noting(pfedhn.Client.objective.fget))
    monkeypatch.setattr(pfedhn.Client, "objective", told)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = trained("pfedhn", tmp_path, cohort=1, rounds=2, engine={"cores": cores})
        assert torch.get_num_threads() == 2
        run.model(0)
        run.personalize(run.task.x[:8], run.task.y[:8])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(found) == seen
    assert run.summary["cores"] == max(seen)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_same_command_twice_and_more_workers_give_identical_records(method: str) -> None:
    one = {"engine": {"workers": 1, "cores_per_client": 1}}
    two = {"engine": {"workers": 2, "cores_per_client": 1}}
    first = trained(method, cohort=3, rounds=3, **one)
    assert recorded(first) == recorded(trained(method, cohort=3, rounds=3, **one))
    assert recorded(first) == recorded(trained(method, cohort=3, rounds=3, **two))
    assert recorded(first) != recorded(trained(method, cohort=3, rounds=3, seed=1, **one))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "own", "faults"),
    [
        *((method, {}, FAULTS) for method in sorted(METHODS)),
        ("pefll", {"delayed_gradient": True}, FAULTS),
        ("pefll", {}, {}),
    ],
)
def test_a_run_abandoned_anywhere_resumes_to_the_same_numbers(
    method: str, own: Any, faults: Any, tmp_path: Path
) -> None:
    keys = keys_of(method, cohort=2, faults=faults, evaluate_every=3, method=own)
    whole = hyperfed.train(method, make_task(Stemmed, novel=1), **keys)
    anywhere = (1, 3, 5)  # before the first checkpoint, between two, after the last
    from_one = Random(method).choice(anywhere[1:])
    for stop in anywhere if method in ("pefll", "fedper") else (from_one,):
        settings = config.from_keys(method, keys)
        run = Run.start(settings, tmp_path / str(stop), make_task(Stemmed, novel=1))
        rounds = run.train()
        for _ in range(stop):
            next(rounds)
        del run, rounds  # killed: what was in memory is gone
        (folder,) = (tmp_path / str(stop) / method).iterdir()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"round": 99, "spl')  # in the middle of a line
        resumed = hyperfed.resume(folder, make_task(Stemmed, novel=1))
        assert recorded(resumed) == recorded(whole)
        on_disk = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        in_memory = [as_written(e) for e in resumed.evaluations]
        assert on_disk == in_memory
        written = json.loads((folder / "summary.json").read_text())
        assert written == json.loads(json.dumps(resumed.summary))


def test_a_run_that_was_stopped_can_be_trained_on() -> None:
    keys = keys_of("fedper", cohort=2, rounds=3)
    run = Run(config.from_keys("fedper", keys), make_task())
    rounds = [[progress.round for progress in run.train() if run.stop() is None] for _ in range(3)]
    assert rounds == [[1], [2], [3]]
    assert recorded(run) == recorded(hyperfed.train("fedper", make_task(), **keys))


def test_clients_lost_late_are_told_and_recorded_once_whenever_it_is_evaluated(
    tmp_path: Path,
) -> None:
    """Every round loses whom it loses; evaluations and checkpoints only have it travel sooner."""
    found = []
    for number, (evaluate_every, checkpoint_every) in enumerate([(8, 8), (3, 2), (1, 1)]):
        keys = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
        keys |= {"cohort": 3, "faults": {"nan": 0.4}, "method": {"delayed_gradient": True}}
        settings = config.from_keys("pefll", keys_of("pefll", rounds=8, **keys))
        run = Run.start(settings, tmp_path / str(number), make_task(Normed, novel=1))
        told = [lost for progress in run.train() for lost in progress.lost]
        val = [evaluation for evaluation in run.evaluations if evaluation.split == "val"]
        assert told == [lost for evaluation in val for lost in evaluation.lost]
        found.append((told, val[-1].client_loss, run.summary["bytes_down"], run._bytes["up"]))
    assert found[0][0]
    assert found == [found[0]] * 3


def test_the_best_round_is_by_the_validation_number_that_is_asked_for() -> None:
    task = make_task()
    for client in (0, 1, 3):  # none of which has examples of class 2 to learn from
        task.y[task.train[client]] %= 2
    for best in ("accuracy", "masked_accuracy", "zeroed_accuracy"):
        keys = {"rounds": 6, "evaluate_every": 1, "best": best, "seed": 6}
        run = trained("fedavg", task=task, cohort=2, method={"local_lr": 0.3}, **keys)
        found = {e.round: getattr(e, best) for e in run.evaluations if e.split == "val"}
        other = {e.round: e.accuracy for e in run.evaluations if e.split == "val"}
        assert run.best.round == run.summary["best_round"] == max(found, key=found.__getitem__)
        assert run.summary[f"val_{best}"] == max(found.values())
        test = next(e for e in run.evaluations if (e.round, e.split) == (run.best.round, "test"))
        assert run.summary["test_zeroed_accuracy"] == test.zeroed_accuracy
        assert any(e.zeroed_accuracy != e.masked_accuracy for e in run.evaluations)
        assert any(e.zeroed_accuracy != e.accuracy for e in run.evaluations)
        if best == "masked_accuracy":
            assert run.best.round != max(other, key=other.__getitem__)
            assert "val_accuracy" not in run.summary
    with pytest.raises(
        UserError, match=r"best: must be 'accuracy', 'masked_accuracy' or 'zeroed_accuracy'"
    ):
        config.from_keys("fedavg", {"best": "loss"})


def test_a_score_of_ones_own_is_among_the_classes_of_a_client_as_accuracy_is() -> None:
    def hit(output: Tensor, y: Tensor) -> Tensor:
        return (output.argmax(dim=-1) == y).double()

    task = make_task()
    for client in (0, 1, 3):
        task.y[task.train[client]] %= 2
    keys = {"rounds": 6, "evaluate_every": 1, "best": "masked_accuracy", "seed": 6}
    plain, own = (
        trained("fedavg", task=of, cohort=2, method={"local_lr": 0.3}, **keys)
        for of in (task, replace(task, score=hit))
    )
    kinds = ("", "masked_", "zeroed_")
    for e, expected in zip(own.evaluations, plain.evaluations, strict=True):
        for kind in kinds:
            assert e.measures[f"{kind}hit"].value == expected.value(f"{kind}accuracy")
            assert e.measures[f"{kind}hit"].client == getattr(expected, f"client_{kind}accuracy")
    assert any(len({e.value(f"{kind}hit") for kind in kinds}) == 3 for e in own.evaluations)
    ended = [within(run, Budget("rounds", 5)).summary for run in (own, plain)]
    assert ended[0]["best_round"] == ended[1]["best_round"] == own.summary["best_round"]
    scores = {e.round: e.main.value for e in own.evaluations if e.split == "val" and e.round < 6}
    assert own.summary["best_round"] != max(scores, key=scores.__getitem__)


def test_faults_are_recorded_and_the_run_goes_on() -> None:
    run = trained("fedavg", cohort=3, faults={"drop": 0.5})
    lost = [lost for evaluation in run.evaluations for lost in evaluation.lost]
    assert lost
    assert all("faults.drop" in each.reason for each in lost)
    assert run.summary["rounds"] == 6


def test_rounds_without_any_client_change_nothing_and_are_reported() -> None:
    keys = keys_of("fedavg", cohort=2, faults={"drop": 1.0})
    run = Run(config.from_keys("fedavg", keys), make_task(Normed, novel=1))
    with pytest.raises(LostEverybodyError):
        list(run.train())
    assert len(run.evaluations[0].lost) == 4  # two rounds of two clients
    initial = run.task.outline().initial()
    torch.testing.assert_close(run.server.state()["model"]["base"], initial, rtol=0, atol=0)


def test_a_network_that_always_fails_is_an_error_and_not_a_run_without_clients() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("shapes do not match")
            return self.weight.expand(len(x), 3)

    told = "lost in 10 rounds in a row: client . in step train_model: RuntimeError: shapes do not m"
    with pytest.raises(LostEverybodyError, match=told) as caught:
        hyperfed.train("fedavg", make_task(Broken), rounds=50, evaluate_every=50)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_rounds_that_fail_now_and_then_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of them, where ten in a row would."""
    played: list[int] = []
    good = fedavg.Server.round

    def failing(self: Any, clients: Any) -> None:
        played.append(clients.round)
        if clients.round % 2:
            raise AllLostError from RuntimeError("no")
        good(self, clients)

    monkeypatch.setattr(fedavg.Server, "round", failing)
    run = hyperfed.train("fedavg", make_task(), rounds=24, evaluate_every=24)
    assert run.summary["rounds"] == 24
    assert played == list(range(24))


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({"faults": {"drop": 1.0}}, "did not answer .*; lower faults.drop and faults.nan"),
        ({"faults": {"nan": 1.0}}, "reply is not finite; lower faults.drop and faults.nan"),
        (
            {"method": {"local_lr": 1e200, "local_steps": 3}},
            "step train_model: the reply is not finite; lower method.local_lr=1e.200, or bound",
        ),
        (
            {"method": {"local_lr": 1e60, "local_steps": 1}},
            "step train_model: the reply is too large: .*; lower method.local_lr=1e.60, or bound",
        ),
    ],
)
def test_a_run_that_loses_everybody_all_the_time_has_no_summary(
    keys: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    with pytest.raises(LostEverybodyError, match=f"in every round: client . in .*{advice}"):
        hyperfed.train("fedavg", make_task(), out=tmp_path, rounds=3, **keys)
    (folder,) = (tmp_path / "fedavg").iterdir()
    assert not (folder / "summary.json").exists()
    with pytest.raises(LostEverybodyError, match=advice):  # nor has it when it is gone on with
        hyperfed.resume(folder, make_task())


def test_a_run_in_which_nobody_can_be_evaluated_says_whose_what_to_lower(tmp_path: Path) -> None:
    """Its first round is good, what the server makes for anybody afterwards is not finite."""
    keys = keys_of("pfedhn", rounds=3, evaluate_every=3, method={"lr": 1e200})
    told = (
        "lost in every evaluation: client 0: the reply is not finite; lower method.local_lr=0.005 "
        r"or method.lr=1e.200, or bound the local gradient"
    )
    with pytest.raises(LostEverybodyError, match=told):
        hyperfed.train("pfedhn", make_task(Normed), out=tmp_path, **keys)
    (folder,) = (tmp_path / "pfedhn").iterdir()
    assert not (folder / "summary.json").exists()


def test_a_cohort_of_more_clients_than_there_are_is_refused_but_of_a_preset(tmp_path: Path) -> None:
    task = make_task(novel=1)
    with pytest.raises(UserError, match=r"cohort must be at most 3, .* came 4; lower it"):
        hyperfed.train("fedavg", task, out=tmp_path, **keys_of("fedavg", cohort=4))
    assert not list(tmp_path.iterdir())
    run = hyperfed.train("fedavg", task, out=tmp_path, **keys_of("fedavg"))
    assert (run.config.cohort, run.cohort_size) == (5, 3)
    assert Run(replace(run.config, cohort=9), task, run.folder).cohort_size == 3  # an old one


def test_one_round_with_a_client_left_is_enough() -> None:
    run = hyperfed.train("fedavg", make_task(), rounds=12, cohort=1, faults={"drop": 0.8})
    lost = sum(len(e.lost) for e in run.evaluations if e.split == "test")
    assert 6 < lost < 12, "choose another seed"
    assert run.summary["rounds"] == 12


def test_the_summary_is_that_of_the_best_validation_round() -> None:
    run = trained("fedavg", rounds=20, evaluate_every=1, cohort=3)
    val = [e for e in run.evaluations if e.split == "val"]
    best = max(val, key=lambda e: (e.accuracy, -e.round))
    test = next(e for e in run.evaluations if (e.split, e.round) == ("test", best.round))
    assert run.summary["best_round"] == best.round
    assert run.summary["test_accuracy"] == test.accuracy
    assert run.summary["worst_decile_accuracy"] == min(test.client_accuracy)
    assert run.summary["bytes_down"] == sum(
        trees.count_bytes(run.task.outline().initial()) for _ in range(3 * 20)
    )
    # The models handed out are those of that round, not of the last.
    model, client = run.model(0), run.task.test[0]
    right = (model(run.task.x[client]).argmax(1) == run.task.y[client]).double().mean()
    assert right.item() == test.client_accuracy[0]


def test_novel_clients_never_train_and_are_evaluated_at_the_end() -> None:
    run = trained("pfedhn", rounds=30, task=make_task(novel=2))
    assert run.server.state()["embeddings"]["weight"].shape[0] == 2
    assert set(run.engine.memory) <= {0, 1}
    (novel,) = [e for e in run.evaluations if e.split == "novel"]
    assert novel.clients == (2, 3)
    assert run.summary["novel_accuracy"] == novel.accuracy


def test_cohorts_are_uniform_without_replacement_and_known_only() -> None:
    run = Run(config.from_keys("fedavg", {"cohort": 2}), make_task(novel=1))
    seen = []
    for number in range(60):
        run.round = number
        seen.append(run._cohort(run.round))
    assert {len(set(cohort)) for cohort in seen} == {2}
    counts = np.bincount([client for cohort in seen for client in cohort], minlength=4)
    assert counts[3] == 0
    assert counts[:3].min() > 25


def test_the_first_server_and_who_is_in_a_round_are_drawn_from_the_runs_seed() -> None:
    """On the same data, which it does not draw here."""
    keys = {"method": {"hidden": 7, "hidden_layers": 1}, "cohort": 2}
    task = make_task()
    first, again, other = (
        Run(config.from_keys("pfedhn", keys | {"seed": seed}), task) for seed in (1, 1, 2)
    )

    def drawn(run: Run) -> list[Any]:
        weights = [value.tolist() for _, value in run.server.hyper_net.state_dict().items()]
        embeddings = run.server.embeddings.weight.tolist()
        return [weights, embeddings, [run._cohort(number) for number in range(10)]]

    assert drawn(first) == drawn(again)
    for ours, theirs in zip(drawn(first), drawn(other), strict=True):
        assert ours != theirs


@pytest.mark.parametrize(("cohort", "size"), [(1, 1), (0.5, 2), (1.0, 4), (4, 4)])
def test_a_cohort_is_a_number_or_a_fraction(cohort: float, size: int) -> None:
    run = Run(config.from_keys("fedavg", {"cohort": cohort}), make_task())
    assert len(run._cohort(run.round)) == size


@pytest.mark.parametrize(
    ("cohort", "known", "size"),
    # Exact halves go up, also to an odd number, and where binary fractions fall short of them.
    [(0.25, 18, 5), (0.1, 25, 3), (0.1, 15, 2), (0.29, 50, 15), (0.1, 24, 2), (0.01, 18, 1)],
)
def test_a_fraction_of_a_cohort_counts_who_trains_and_rounds_halves_up(
    cohort: float, known: int, size: int
) -> None:
    task = make_task(examples=(1,) * (known + 10), novel=10)
    run = Run(config.from_keys("fedavg", {"cohort": cohort}), task)
    assert len(run._cohort(run.round)) == size


def test_resume_refuses_a_finished_run_other_data_and_no_run(tmp_path: Path) -> None:
    run = trained(out=tmp_path)
    assert run.folder is not None
    with pytest.raises(UserError, match="must not be done"):
        hyperfed.resume(run.folder.path, run.task)
    (run.folder.path / "summary.json").unlink()
    other = make_task(Normed, novel=1, fingerprint="other")
    with pytest.raises(UserError, match="data_fingerprint"):
        hyperfed.resume(run.folder.path, other)
    with pytest.raises(UserError, match=r"has no config\.toml"):
        hyperfed.resume(tmp_path, run.task)


def test_personalize_serves_a_newcomer_with_its_own_data(tmp_path: Path) -> None:
    run = trained("fedavg", task=make_task(), out=tmp_path, method={"novel_steps": 50})
    x, y = run.task.x[run.task.train[0]], run.task.y[run.task.train[0]]
    model = run.personalize(x, y)
    assert run.folder is not None
    again = hyperfed.open_run(run.folder.path, run.task).personalize(x, y)
    torch.testing.assert_close(trees.model_of(model), trees.model_of(again), rtol=0, atol=0)
    loss = nn.functional.cross_entropy
    assert loss(model(x), y) < loss(run.model(0)(x), y)  # fine-tuned on just these
    for bad, why in [
        ((x[:, :2], y), "like the task's"),
        ((x, y + 9), "labels"),
        ((x * math.nan, y), "finite"),
    ]:
        with pytest.raises(UserError, match=why):
            run.personalize(*bad)
    with pytest.raises(UserError, match="needs labels"):
        run.personalize(x)


def test_a_method_that_needs_labels_refuses_a_task_without_before_it_trains(
    tmp_path: Path,
) -> None:
    task = make_task(novel=1, unlabelled=True)
    with pytest.raises(UserError, match="needs labels to personalise"):
        hyperfed.train("pfedhn", task, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert trained("fedavg", task=task, method={"novel_steps": 0}).summary["novel_accuracy"] >= 0


class Choosy(TwoLayers):
    """Takes no batch of which an entry is at most -5, such as those that nobody holds."""

    def forward(self, x: Tensor) -> Tensor:
        if (x <= -5).any():
            raise ValueError("entries must be above -5")
        return super().forward(x)


def test_a_network_that_takes_no_made_up_examples_is_trained_for_clients_without_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        Task, "made_up", lambda task, n: (torch.full((n, FEATURES), -9.0).double(), task.y[:n])
    )
    task = make_task(Choosy, novel=1, unlabelled=True)
    run = trained("itpfl", task=task, rounds=2, method={"phase_one_rounds": 1})
    assert run.summary["novel_accuracy"] >= 0
    with pytest.raises(UserError, match="needs labels to personalise"):
        trained("pefll", task=task)


def test_a_closed_run_has_ended_its_threads_and_keeps_its_numbers() -> None:
    others = set(threading.enumerate())
    run = trained("fedavg", cohort=3, engine={"workers": 2, "cores_per_client": 1})
    workers = set(threading.enumerate()) - others
    assert len(workers) == 2
    before = recorded(run)
    run.close()
    assert not any(thread.is_alive() for thread in workers)
    assert recorded(run) == before


def test_no_such_client() -> None:
    with pytest.raises(UserError, match="must be below 4, came 4"):
        trained().model(4)


class Windows(nn.Module):
    """A user's own network for (9, 128) sensor windows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(9, 8, 9, stride=4), nn.ReLU(), nn.Conv1d(8, 8, 5, stride=2), nn.ReLU()
        )
        self.classifier = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.layers(x).mean(dim=2))
        return output


def sensor_windows() -> dict[str, Any]:
    """30 clients, each with two of six activities: frequencies, seen through noisy channels."""
    draw = np.random.default_rng(0)
    activity = np.stack([draw.permutation(6)[:2] for _ in range(30)])
    client = np.repeat(np.arange(30), 40)
    y = activity[client, draw.integers(2, size=len(client))]
    time = np.arange(128) / 128
    phase = draw.uniform(0, 2 * np.pi, (len(y), 9, 1))
    wave = np.sin(2 * np.pi * (3 + 5 * y)[:, None, None] * time + phase)
    x = wave + 0.3 * draw.standard_normal((len(y), 9, 128))
    return {"x": x.astype(np.float32), "y": y, "client": [f"sensor {i}" for i in client]}


@pytest.mark.slow
def test_a_users_own_windows_and_network_train_with_pfedhn() -> None:
    task = hyperfed.Task.from_arrays(**sensor_windows(), model=Windows, classes=6, novel=2)
    run = hyperfed.train(
        "pfedhn",
        task,
        rounds=90,
        evaluate_every=45,
        cohort=2,
        method={"local_steps": 10, "batch_size": 16, "local_lr": 0.05, "lr": 0.025},
    )
    first, last = run.evaluations[0], run.summary
    assert last["test_accuracy"] > 0.75  # chance is 1/6, one of its two classes 1/2
    assert first.accuracy is not None
    model = run.model(3)
    assert isinstance(model, Windows)
    assert model(torch.zeros(5, 9, 128)).shape == (5, 6)
    x, y = task.x[task.train[29]], task.y[task.train[29]]
    assert isinstance(run.personalize(x, y), Windows)


def test_faults_are_probabilities() -> None:
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Faults(drop=1.5)

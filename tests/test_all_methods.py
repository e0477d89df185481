"""The comparison of all methods: who takes part in each federation, and that it can be run."""

import runpy
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperfed
from all_methods import FEDERATIONS, Federation, method_of, second_rates, train
from grids import KEPT, ROOT
from hyperfed import trees
from hyperfed.data.settings import TaskConfig
from hyperfed.methods import METHODS
from hyperfed.runs import config


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_federation_has_newcomers_and_visits_everybody(name: str) -> None:
    federation = FEDERATIONS[name]
    task = TaskConfig(**federation.task)
    assert task.clients is not None
    novel = round(task.novel * task.clients)
    assert novel >= 2
    assert federation.cohort <= task.clients - novel
    assert federation.visits >= 5


def test_newcomers_may_be_a_number_of_clients() -> None:
    share = Federation({"clients": 10, "novel": 0.2}, 4, 1)
    assert replace(share, task={"clients": 10, "novel": 2}).visits == share.visits == 50


def test_clients_with_two_classes_are_as_many_as_their_name_says() -> None:
    for known in (10, 50, 100):
        task = FEDERATIONS[f"two_classes_{known}"].task
        assert task["clients"] - round(task["novel"] * task["clients"]) == known
        assert task["classes_per_client"] == 2


def test_rates_are_taken_from_a_federation_that_differs_in_a_number_alone() -> None:
    takes = [(each, each.rates_of) for each in FEDERATIONS.values() if each.rates_of is not None]
    assert len(takes) == 3
    for federation, rates_of in takes:
        other = FEDERATIONS[rates_of]
        assert other.rates_of is None
        differs = {key for key, value in other.task.items() if federation.task[key] != value}
        assert differs in ({"clients"}, {"alpha"})
        assert replace(federation, task=other.task, rates_of=None) == other


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the tool, with trainings that reach the more the nearer ``local_lr`` is to 0.1 or 3."""
    trained: list[dict[str, Any]] = []

    def reaching(_method: str, *, out: Path | None, **settings: Any) -> Any:
        trained.append(settings)
        rate = settings["method"]["local_lr"]
        summary = {"val_accuracy": 1 - min(abs(rate - 0.1), abs(rate - 3.0) / 30)}
        for name in KEPT if out is not None else ():
            (out / name).write_text("")
        return SimpleNamespace(summary=summary, folder=SimpleNamespace(path=out))

    def run(*arguments: str) -> list[dict[str, Any]]:
        trained.clear()
        path = ROOT / "tools" / "all_methods.py"
        options = ["--methods", "local", "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", [str(path), *arguments, *options])
        runpy.run_path(str(path), run_name="__main__")
        return list(trained)

    monkeypatch.setattr(hyperfed, "train", reaching)
    return run


@pytest.mark.parametrize(
    ("name", "rates"), [("dirichlet_0.1", [0.03, 0.1, 0.3]), ("roles", [1.0, 3.0, 10.0])]
)
def test_the_rates_tried_are_the_federations(name: str, rates: list[float], tool: Any) -> None:
    assert [each["method"]["local_lr"] for each in tool(name, "grid")] == rates


def test_rates_of_another_federation_are_searched_and_looked_up_there(
    tool: Any, tmp_path: Path
) -> None:
    with pytest.raises(hyperfed.UserError, match=r"must be in .*two_classes_50/grid\.jsonl"):
        tool("two_classes_10", "record")
    searched = tool("two_classes_10", "grid")
    assert all(each["task"] == FEDERATIONS["two_classes_50"].task for each in searched)
    assert [path.name for path in tmp_path.iterdir()] == ["two_classes_50"]
    recorded = tool("two_classes_10", "record")
    assert [each["seed"] for each in recorded] == [0, 1, 2]
    assert {each["seed"] for each in searched} == {3}  # a division that no record is of
    assert all(each["task"] == FEDERATIONS["two_classes_10"].task for each in recorded)
    assert all(each["method"]["local_lr"] == 0.1 for each in recorded)
    assert len(list(tmp_path.glob("two_classes_10/local/seed?/summary.json"))) == 3


def test_newcomers_without_labels_are_served_by_a_method_that_learned_to_do_without() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_unlabelled", few, 3, {})
    assert run.task.unlabelled
    assert run.config.settings.label_dropout == 0.5
    assert len(run.task.novel_ids) == 1
    assert run.summary["novel_accuracy"] is not None


def test_what_a_hypernetwork_is_worth_is_told_by_a_training_without() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_common", few, 3, {})
    one, other = (run.model(client).state_dict() for client in (0, 1))
    *names, _ = one  # the last are biases, with class frequencies
    assert all(torch.equal(one[name], other[name]) for name in names)
    assert not second_rates("headstart_common")
    assert len(second_rates("headstart")) == 3


def test_a_last_layer_of_its_own_stays_with_the_client() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_own_head", few, 3, {})
    assert run.config.settings.head_layers == 1
    *_, weight, _ = run.model(0).state_dict().values()
    assert {value.shape for _, value in trees.leaves(run.engine.memory[0])} >= {weight.shape}
    assert method_of("headstart_own_head") == "headstart"
    assert len(second_rates("headstart_own_head")) == 3


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_a_rate_beside_the_local_one_has_it_searched(name: str) -> None:
    default = vars(config.from_keys(name, {}).settings)
    others = {key for key in default if key.endswith("lr")} - {"local_lr"}
    tried = second_rates(name)
    assert {key for rates in tried for key in rates} == ({"lr"} if "lr" in others else others)
    assert not tried or tried[0].items() <= default.items()  # the default comes first


RESULTS = ROOT / "results"
RECORDS = [
    path for name in FEDERATIONS for path in sorted((RESULTS / name).glob("*/seed0/config.toml"))
]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: "/".join(path.parts[-4:-2]))
def test_a_record_has_the_defaults_of_now_but_for_its_rates(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whoever changes a default is told which records are of another."""
    federation, name, *_ = path.relative_to(RESULTS).parts

    def configured(method: str, /, out: Path | None, **keys: Any) -> Any:
        return config.to_dict(config.from_keys(method, keys))

    monkeypatch.setattr(hyperfed, "train", configured)
    now: Any = train(name, FEDERATIONS[federation], 0, {})
    then = config.to_dict(config.load(str(path)))
    named = tomllib.loads(path.read_text(encoding="utf-8"))["method"]  # others came afterwards
    searched = {key for key in named if key.endswith("lr")}
    for table in (now, then):
        table["method"] = {key: table["method"][key] for key in named.keys() - searched}
    for key in ("method", "rounds", "cohort", "evaluate_every", "best", "serve"):
        assert then[key] == now[key]

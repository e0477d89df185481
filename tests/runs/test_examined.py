"""What a run is looked into for: how it tells clients apart, and whose model suits whom."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import hyperfed
from hyperfed.data import tasks
from hyperfed.data.roster import Introduction, Member, RemoteTask, enrol
from hyperfed.errors import UserError
from hyperfed.papers import report
from hyperfed.papers.measured import Measurement
from hyperfed.papers.origin import Origin
from hyperfed.runs import config, experiments, records
from hyperfed.runs.config import from_keys
from hyperfed.runs.examined import rank_correlation
from hyperfed.runs.folder import read_run
from hyperfed.runs.run import Run
from toys import both_are_right, both_labels_loss, make_task, make_token_task

SMALL: dict[str, Any] = {"rounds": 2, "evaluate_every": 2, "cohort": 3}
DEALT = {"clients": 6, "novel": 2, "partition": "dirichlet", "alpha": 0.5}
PRIVATE = {"method.private": True, "method.epsilon": 1.0}
QUICK = {"local_steps": 2, "local_lr": 0.1}


def test_the_rank_correlation_is_spearmans_averaged_over_clients() -> None:
    generator = torch.Generator().manual_seed(0)
    descriptors = torch.randn(7, 3, generator=generator)
    tenths = torch.rand(7, 4, generator=generator).mul(10).round()
    tenths[2] = tenths[1]  # ties
    shares = tenths.double() / 10
    expected = []
    for client in (1, 5):
        distances = [
            [float((rows[other] - rows[client]).square().sum()) ** 0.5 for other in range(7)]
            for rows in (descriptors, tenths)
        ]
        expected.append(spearmanr(*distances).statistic)
    assert rank_correlation(descriptors, shares, [1, 5]) == pytest.approx(np.mean(expected))
    assert rank_correlation(-descriptors, shares, [5]) == pytest.approx(expected[1])
    assert rank_correlation(shares, shares, range(7)) == pytest.approx(1)


def test_distances_that_differ_by_how_sums_are_rounded_are_ties() -> None:
    """Descriptors that say which six of ten classes a client has rank as its shares do."""
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(30, 10)
    for own in held:
        own[torch.randperm(10, generator=generator)[:6]] = 1
    assert rank_correlation(held, held.double() / 6, range(30)) == pytest.approx(1, abs=1e-9)


def test_who_is_as_far_from_everybody_has_no_correlation() -> None:
    corners = torch.eye(3)[[0, 0, 0]]
    assert np.isnan(rank_correlation(corners, torch.eye(3), [0, 1]))
    one_apart = torch.tensor([[0.0, 0], [3, 0], [0, 3], [9, 9]])
    assert rank_correlation(one_apart, one_apart, [0, 1]) == pytest.approx(1)


@pytest.mark.parametrize("method", ["pefll", "pfedhn", "itpfl"])
def test_descriptors_are_what_models_are_made_from(method: str) -> None:
    own: dict[str, Any] = {
        "pefll": {"prediction": "batch"},  # whose draws are those of the evaluation
        "pfedhn": {"novel_rounds": 1},
        "itpfl": {"phase_one_rounds": 1},
    }[method]
    run = hyperfed.train(method, **SMALL, task=DEALT, method=QUICK | own, examine=["descriptors"])
    found = run.summary["examined"]
    descriptors = torch.tensor(found["descriptors"])
    assert len(descriptors) == 6
    server = run.server  # of the last round, which is the best: it is the only one evaluated
    for client in range(6):
        net = server.hyper_net
        if method == "itpfl" and client >= 4:
            net = server.novel_net
        row = descriptors[[client]]
        if method == "pefll":
            row = server.standard.fitted(row)(row)
        made = net(row, "base")
        trained = dict(run.model(client).named_parameters())
        for name, value in made.items():
            torch.testing.assert_close(value[0], trained[name], rtol=0, atol=5e-3)  # four digits
    shares = torch.tensor(found["proportions"])
    counts = torch.stack([torch.bincount(run.task.y[own], minlength=10) for own in run.task.train])
    torch.testing.assert_close(shares, counts / counts.sum(1, keepdim=True), rtol=6e-4, atol=0)
    told = next(e for e in run.evaluations if e.split == "val").diagnostics["descriptors"]
    for name, ids in (("rank_correlation", range(4)), ("novel_rank_correlation", (4, 5))):
        each = []
        for i in ids:
            pair = [
                np.linalg.norm(rows - rows[i], axis=1)
                for rows in map(np.array, (found["descriptors"], found["proportions"]))
            ]
            each.append(spearmanr(*pair).statistic)
        assert told[name] == pytest.approx(np.mean(each), abs=2e-3)


def test_descriptors_are_set_beside_each_of_several_labels() -> None:
    draw = np.random.default_rng(0)
    x, who = draw.normal(size=(120, 4)).astype("float32"), np.arange(120) % 4
    y = (x[:, :2] > who[:, None] / 4).astype(int)
    task = hyperfed.Task.from_arrays(
        x,
        y,
        client=who,
        model=nn.Linear(4, 2),
        novel=0,
        loss=both_labels_loss,
        score=both_are_right,
    )
    run = hyperfed.train("pefll", task, rounds=1, method={"local_steps": 1}, examine="descriptors")
    shares = torch.tensor(run.summary["examined"]["proportions"])
    held = [run.task.y[rows].double().mean(dim=0) for rows in run.task.train]
    expected = torch.stack([torch.stack([1 - share, share], dim=1).flatten() for share in held])
    torch.testing.assert_close(2 * shares, expected.float(), rtol=2e-3, atol=1e-4)
    tagged = make_token_task()
    with pytest.raises(UserError, match=r"needs clients with labels of examples, not of tokens"):
        hyperfed.train("pefll", tagged, rounds=1, examine="descriptors")


def test_newcomers_with_the_models_of_others_have_no_descriptor() -> None:
    task, borrowed = DEALT | {"unlabelled": True}, QUICK | {"novel_models": "sampled"}
    run = hyperfed.train("pfedhn", **SMALL, task=task, method=borrowed, examine="descriptors")
    found = run.summary["examined"]
    assert len(found["descriptors"]) == len(found["proportions"]) == 4
    told = next(e for e in run.evaluations if e.split == "val").diagnostics["descriptors"]
    assert [*told] == ["rank_correlation"]


def test_crossed_models_are_a_clients_head_on_the_body_of_another() -> None:
    task = {"clients": 4, "novel": 0, "classes_per_client": 2}
    run = hyperfed.train("pfedhn_pc", **SMALL, task=task, method=QUICK, examine="crossed")
    assert records.plain(run.examined()) == run.summary["examined"]
    run.best.server["embeddings"]["weight"].mul_(100)  # so that bodies differ
    crossed = run.examined()["crossed"]
    models = [run.model(client).eval() for client in range(4)]
    head = [name for name, _ in models[0].named_parameters()][-2:]
    assert ((crossed - crossed.mT).abs() > 0.1).any()
    for client, rows in enumerate(run.task.test):
        x, y = run.task.transform(run.task.x[rows]), run.task.y[rows]
        for other in range(4):
            model = copy.deepcopy(models[other])
            own = models[client].state_dict()
            model.load_state_dict({name: own[name] for name in head}, strict=False)
            with torch.no_grad():
                accuracy = (model(x).argmax(1) == y).double().mean().item()
            assert crossed[client, other].item() == pytest.approx(accuracy)
    assert "descriptors" not in run.summary["examined"]


def test_crossed_models_are_fine_tuned_as_clients_own_are() -> None:
    looked_into = {"examine": "crossed", "serve": {"finetune_steps": 5}}
    task = {"clients": 4, "novel": 0, "classes_per_client": 2}
    run = hyperfed.train("pfedhn", **SMALL, task=task, method=QUICK, **looked_into)
    own = next(e for e in run.evaluations if e.split == "test").client_accuracy
    assert run.examined()["crossed"].diagonal().tolist() == pytest.approx(own)


def test_to_look_into_a_run_changes_none_of_its_numbers() -> None:
    def numbers(**examine: Any) -> dict[str, Any]:
        task = DEALT | {"alpha": 5.0}
        run = hyperfed.train("pefll", **SMALL, task=task, method=QUICK, **examine)
        return {k: v for k, v in run.summary.items() if k not in ("seconds", "examined")}

    assert numbers() == numbers(examine=["descriptors", "crossed"])


@pytest.mark.parametrize(
    ("method", "keys", "message"),
    [
        ("fedavg", {"examine": "descriptors"}, "descriptors needs a method that has some"),
        ("pefll", {"examine": "descriptors", "privacy.epsilon": 8}, "not private"),
        ("itpfl", {"examine": "descriptors", **PRIVATE}, "not private"),
        ("fedavg", {"examine": "crossed", "task.clients": 66, "task.novel": 1}, "got 65 with 1"),
    ],
)
def test_what_cannot_be_looked_into_is_said_at_once(
    method: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Run(from_keys(method, keys))


@pytest.mark.parametrize("wanted", ["crossed", "descriptors"])
def test_nothing_is_looked_into_at_sites(wanted: str) -> None:
    members = [Member(name, 10, 5, 5) for name in "abc"]
    said = Introduction(tuple(members), (5,), "torch.float64", 3)
    there = RemoteTask.of(enrol([said], run=1), make_task().models, "toy")
    keys = {"examine": wanted, "engine": {"name": "flower", "superlink": "127.0.0.1:1"}}
    with pytest.raises(UserError, match="must be left out where clients are at sites"):
        Run(from_keys("pefll", keys), there)


def test_a_model_for_all_cannot_be_crossed() -> None:
    run = hyperfed.train("fedavg", **SMALL, task=DEALT, method=QUICK, examine="crossed")
    assert run.summary["examined"] == {}


def test_a_size_has_the_mean_over_its_clients_and_their_scores() -> None:
    digits, kinds = tasks.build(config.TaskConfig(clients=5, novel=0), seed=0), ("S", "L")
    nets = {kind: copy.deepcopy(digits.models["base"]) for kind in kinds}
    data = replace(digits, models=nets, sizes=("S", "L", "S", "S", "L"))
    with pytest.raises(UserError, match="clients with one target, got 5 with 2"):
        Run(from_keys("local", {"examine": "crossed"}), data)
    run = hyperfed.train("local", data, **SMALL, method=QUICK)
    sizes = [data.size_of(client) for client in range(5)]
    assert run.summary["sizes"] == sizes
    test = next(e for e in run.evaluations if e.split == "test").client_accuracy
    small = [value for value, size in zip(test, sizes, strict=True) if size == "S"]
    assert run.summary["test_accuracy_S"] == pytest.approx(np.mean(small))
    assert set(run.summary) >= {"test_accuracy_S", "test_accuracy_L"}
    measurement = Measurement(cast(Any, run), Origin("a", "b"), {})
    assert measurement.value("test_accuracy_S") == pytest.approx(100 * np.mean(small))
    assert list(measurement.scores("test_accuracy_S").clients.values()) == small
    assert len(measurement.scores("test_accuracy_client_mean").clients) == 5


TABLE = """
[table]
paper = "Nobody, 2026"
title = "Digits"
figures = ["heatmap", "rounds", "shift", "embedding", "correlation"]
set.rounds = 1
set.evaluate_every = 1
set.cohort = 2
set.method.local_steps = 1
set.task = { clients = 5, novel = 1, partition = "iid" }

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.one]
about = "Digits"

[columns.two]
about = "Half of them"
set.task.fraction = 0.5

[rows.pfedla]
about = "pFedLA"
columns = ["one"]

[rows.pfedhn]
about = "pFedHN"
set.examine = "descriptors"
set.method.novel_rounds = 1
"""


def test_a_report_draws_what_its_table_names_of_the_records_that_have_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "table1.toml"
    path.parent.mkdir()
    path.write_text(TABLE)
    table = experiments.read(path)
    for cell in table.cells:
        run = Run.start(config.load(table.source(cell)), tmp_path / "made", None, f"table1-{cell}")
        list(run.train())
        run.close()
        assert run.folder is not None
        assert read_run(run.folder.path).summary is not None
    found = report.of_papers(tmp_path, [table])
    drawn = {name.removeprefix("made/table1-"): svg for name, svg in found.figures.items()}
    assert set(drawn) >= {
        *("one-pfedla-heatmap", "one-rounds", "two-rounds", "shift"),
        *("one-pfedhn-embedding", "two-pfedhn-embedding", "correlation"),
    }
    assert not {name for name in drawn if "pfedhn-heatmap" in name or "pfedla-embedding" in name}
    assert "pFedLA" in drawn["one-rounds"]
    assert "pFedLA" not in drawn["two-rounds"]
    assert "Half of them: pFedHN" in drawn["correlation"]
    for name in found.figures:
        assert f"{{figure {name}}}" in found.text
    without = report.of_papers(tmp_path, [table], figures=False)
    assert not without.figures
    assert "{figure" not in without.text

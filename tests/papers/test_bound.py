"""Theorem 4.2 on a run: terms from the run's own tensors, and at no noise what the run measured."""

import json
import math
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import hyperfed
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.papers import bound, report
from hyperfed.papers.bound import Variances, _around, check, measure
from hyperfed.papers.reproduction import Job, carry_out, plan
from hyperfed.runs import experiments
from hyperfed.runs.run import Run

KEYS = {
    "rounds": 3,
    "cohort": 4,
    "evaluate_every": 3,
    "task": {"clients": 12, "novel": 0.25, "fraction": 0.2},  # clients of unequal size
    "method": {"standardize": False, "local_steps": 2, "hidden": 8, "descriptor_size": 3},
}
ALMOST_NONE = Variances(1e-16, 1e-16)

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return hyperfed.train("pefll", progress=False, out=tmp_path_factory.mktemp("runs"), **KEYS)


def test_without_noise_the_errors_are_those_of_the_trained_models(run: Run) -> None:
    found = measure(run, ALMOST_NONE, draws=1)
    task = run.task

    def error(client: int, rows: torch.Tensor) -> float:
        predicted = run.model(client)(task.transform(task.x[rows])).argmax(1)
        return float((predicted != task.y[rows]).float().mean())

    seen = [error(client, task.train[client]) for client in task.known]
    unseen = [error(client, task.test[client]) for client in task.novel_ids]
    assert found.terms["empirical"] == pytest.approx(sum(seen) / len(seen))
    assert found.unseen_error == pytest.approx(sum(unseen) / len(unseen))


def test_the_terms_are_those_of_what_was_trained(run: Run) -> None:
    found = measure(run, ALMOST_NONE, draws=1, delta=0.1)
    saved = run.best.server
    eta = sum(
        leaf.double().square().sum().item()
        for part in ("hyper_net", "descriptor_net")
        for _, leaf in trees.leaves(saved[part])
    )
    thetas = [
        sum(p.detach().double().square().sum().item() for p in run.model(client).parameters())
        for client in run.task.known
    ]
    sizes = [len(run.task.train[client]) for client in run.task.known]
    n, m = 9, min(sizes)
    assert m < max(sizes)
    assert (found.clients, found.samples) == (n, m)
    assert found.networks_norm == pytest.approx(eta)
    assert found.model_norm == pytest.approx(sum(thetas) / n, rel=1e-5)
    assert measure(run, ALMOST_NONE, draws=2).model_norm == pytest.approx(found.model_norm)
    wide = measure(run, Variances(10.0, 1e12), draws=1, delta=0.1)
    across = math.sqrt((eta / 20 + math.log(4 * 3 / 0.1)) / 18)
    divergence = n * wide.model_norm / 2e12
    within = math.sqrt((divergence + math.log(8 * n * m / 0.1) + 1) / (2 * n * m))
    assert wide.terms["clients"] == pytest.approx(across)
    assert wide.terms["samples"] == pytest.approx(within)
    assert found.bound == pytest.approx(sum(found.terms.values()))


def test_noise_is_on_the_networks_and_on_the_models_with_its_own_variance(run: Run) -> None:
    """|theta|^2 is of what drawn networks make, before the noise on it."""
    still, of_networks = (measure(run, Variances(v, 1e-16), draws=3) for v in (1e-16, 1.0))
    assert of_networks.model_norm > 100 * still.model_norm  # drawn networks make these models
    assert of_networks.networks_norm == still.networks_norm  # that of the mean
    assert measure(run, Variances(1.0, 1e-16), draws=1).model_norm != of_networks.model_norm
    of_models = measure(run, Variances(1e-16, 1.0), draws=3)
    assert of_models.model_norm == pytest.approx(still.model_norm)
    assert of_models.terms["empirical"] != still.terms["empirical"]
    assert of_models == measure(run, Variances(1e-16, 1.0), draws=3)
    assert measure(run, Variances(1e-16, 1.0), draws=2).unseen_error != of_models.unseen_error


def test_the_noise_has_the_variance_that_was_asked_for() -> None:
    noise = torch.Generator().manual_seed(0)
    drawn = _around(torch.full((100_000,), 7.0), 0.25, noise)
    assert float(drawn.mean()) == pytest.approx(7, abs=0.01)
    assert float(drawn.var()) == pytest.approx(0.25, rel=0.02)


def test_a_run_that_the_theorem_is_not_about_is_refused(run: Run) -> None:
    def refused(message: str, config=run.config, task=run.task) -> None:
        with pytest.raises(UserError, match=f"a run for theorem 4.2 must {message}"):
            check(config, task)

    check(run.config, run.task)
    refused("be of pefll, came fedavg", replace(run.config, method="fedavg"))
    standard = replace(run.config.settings, standardize=True)
    refused("have method.standardize=false", replace(run.config, settings=standard))
    refused("be of classification", task=replace(run.task, classes=0))
    normed = {"base": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))}
    refused("have a target without buffers", task=replace(run.task, models=normed))
    refused("have novel clients with test examples", task=replace(run.task, novel=0))
    empty = [*run.task.train[1:], run.task.train[0][:0]]
    refused("give every client a training example", task=replace(run.task, train=empty))
    with pytest.raises(UserError, match="model must be positive and finite, came 0"):
        Variances(1, 0)
    with pytest.raises(UserError, match="draws must be positive"):
        measure(run, ALMOST_NONE, draws=0)


TABLE = """
[table]
paper = "Nobody, 2026"
title = "A bound"
bound = { networks = [1e-2, 1.0], models = [1e-2, 1e10], delta = 0.1, draws = 2 }
set.rounds = 3
set.cohort = 4
set.evaluate_every = 3
set.task = { clients = 12, novel = 0.25, fraction = 0.2 }
set.method = { local_steps = 2, hidden = 8, descriptor_size = 3, standardize = false }

[measures.unseen]
metric = "novel_accuracy"
place = "theorem 4.2"

[columns.digits]
about = "Digits"

[rows.pefll]
about = "PeFLL"
"""


def jobs(folder: Path, *, seeds: int = 1, scale: float = 1.0, text: str = TABLE) -> list[Job]:
    (folder / "made").mkdir(exist_ok=True)
    path = folder / "made" / "bound.toml"
    path.write_text(text)
    return plan(
        experiments.read(path), ["digits-pefll"], seeds=range(seeds), scale=scale, out=folder
    )


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def told(job: Job) -> list[tuple[object, ...]]:
    messages: list[tuple[object, ...]] = []
    carry_out(job, messages.append)
    return messages


def test_a_table_has_both_sides_of_each_run_beside_its_record_and_in_the_report(
    tmp_path: Path,
) -> None:
    both = jobs(tmp_path, seeds=2)
    assert [told(job)[-1] for job in both] == [("done",)] * 2
    found = []
    for job in both:
        assert job.done
        run = Run.open(job.folder)
        kept = json.loads((job.folder / "bound.json").read_text())
        assert (kept["delta"], kept["draws"]) == (0.1, 2)
        assert kept["known_error"] == 1 - run.summary["test_accuracy"]
        assert kept["unseen_error"] == 1 - run.summary["novel_accuracy"]
        pairs = [(1e-2, 1e-2), (1e-2, 1e10), (1.0, 1e-2), (1.0, 1e10)]
        for pair, point in zip(pairs, kept["points"], strict=True):
            again = measure(run, Variances(*pair), draws=2, delta=0.1 / 4)
            assert asdict(again) == point
        found.append(kept["points"])
        nm = 9 * kept["points"][0]["samples"]  # nine known clients; every divergence is 0
        nothing = math.sqrt(math.log(4 * 3 / (0.1 / 4)) / 18)
        nothing += math.sqrt((math.log(8 * nm / (0.1 / 4)) + 1) / (2 * nm))
        sides = bound.read(job.folder / "bound.json")
        assert sides is not None
        assert sides.without_divergence == pytest.approx(nothing)
    made = report.of_papers(tmp_path, [both[0].experiment]).text
    totals = [[sum(point["terms"].values()) for point in points] for points in found]
    means = [(first + second) / 2 for first, second in zip(*totals, strict=True)]
    assert f"The least is {shown(min(means))}, vacuous" in made
    unseen = (found[0][1]["unseen_error"] + found[1][1]["unseen_error"]) / 2
    (row,) = [line for line in made.splitlines() if line.startswith("| 0.01 | 1e+10 |")]
    deviation = abs(totals[0][1] - totals[1][1]) / math.sqrt(2)
    assert f"| {shown(means[1])} ± {shown(deviation)} | {shown(unseen)} |" in row

    job = both[0]
    (job.folder / "bound.json").unlink()
    assert not job.done
    before = (job.folder / "summary.json").read_bytes()
    assert told(job) == [("done",)]  # it trains no more
    assert json.loads((job.folder / "bound.json").read_text())["points"] == found[0]
    assert (job.folder / "summary.json").read_bytes() == before
    whole = json.loads((job.folder / "bound.json").read_text())
    for damaged in ({}, whole | {"points": []}):
        (job.folder / "bound.json").write_text(json.dumps(damaged))
        with pytest.raises(
            UserError, match=r"(?s)bound\.json must hold both sides of a bound, but"
        ):
            report.of_papers(tmp_path, [job.experiment])


def test_a_scaled_run_has_one_draw_and_a_run_without_the_theorem_does_not_begin(
    tmp_path: Path,
) -> None:
    (scaled,) = jobs(tmp_path, scale=0.3)
    assert scaled.bound is not None
    assert scaled.bound.draws == 1
    (wrong,) = jobs(tmp_path, text=TABLE.replace("standardize = false", "standardize = true"))
    ((kind, why, ours),) = told(wrong)
    assert (kind, ours) == ("failed", False)
    assert "have method.standardize=false" in str(why)
    assert not wrong.folder.exists()
    for name, value in [("delta = 0.1", "delta = 1.0"), ("models = [1e-2, 1e10]", "models = []")]:
        with pytest.raises(UserError, match=f"table.bound.{name.split()[0]}"):
            jobs(tmp_path, text=TABLE.replace(name, value))


def test_a_bound_is_of_the_clients_that_its_cell_serves_by_another_training(tmp_path: Path) -> None:
    dealt = TABLE.replace("fraction = 0.2", 'fraction = 0.2, partition = "dirichlet", alpha = 0.1')
    # Models that have learned a little, whose errors differ, and of which nearly these are drawn.
    dealt = dealt.replace("rounds = 3", "rounds = 60").replace("[1e-2,", "[1e-12,")
    even = '[columns.even]\nabout = "Dealt anew"\nset.task.novel_alpha = 100.0\n'
    jobs(tmp_path, text=dealt.replace("[rows.pefll]", f"{even}\n[rows.pefll]"))
    table = experiments.read(tmp_path / "made" / "bound.toml")
    trained, served = plan(table, list(table.cells), seeds=[0], scale=0.3, out=tmp_path)
    assert [told(job)[-1] for job in (trained, served)] == [("done",)] * 2
    run = Run.open(trained.folder)
    again = measure(
        run.served_otherwise(["task.novel_alpha=100.0"]),
        Variances(1e-12, 1e-12),
        draws=1,
        delta=0.1 / 4,
    )
    kept, other = (json.loads((job.folder / "bound.json").read_text()) for job in (served, trained))
    assert kept["points"][0] == asdict(again) != other["points"][0]
    assert kept["unseen_error"] != other["unseen_error"]
    summary = json.loads((served.folder / "summary.json").read_text())
    assert kept["unseen_error"] == 1 - summary["novel_accuracy"]


def test_a_signal_between_two_points_leaves_nothing_half_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs(tmp_path, scale=0.3)
    measured = []

    def interrupted(run: Run, variances: Variances, **_: float) -> bound.Measured:
        measured.append(variances)
        os.kill(os.getpid(), signal.SIGTERM)
        return measure(run, variances, draws=1)

    monkeypatch.setattr(bound, "measure", interrupted)
    assert told(job)[-1] == ("stopped",)
    assert len(measured) == 1
    assert not (job.folder / "bound.json").exists()
    assert not job.done


def test_a_bound_below_one_is_told_apart_from_one_that_says_nothing(run: Run) -> None:
    point = measure(run, ALMOST_NONE, draws=1)
    low = replace(point, terms={"empirical": 0.25, "clients": 0.25, "samples": 0.25})
    of = bound.Sides(0.05, 1, 0.5, 0.25, (point, low), None)
    rows, told = bound.in_words([of])
    assert "1 draws at each point, from which both sides are estimated." in told
    assert "The least is 0.75, below 1." in told
    assert rows[0][3].isdecimal() or "," in rows[0][3]
    assert rows[1][2:6] == ["0.25", "0.25", "0.25", "0.75"]
    assert "25.0% of the test examples of unseen clients and on 50.0% of those of known" in told

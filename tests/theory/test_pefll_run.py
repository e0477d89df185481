"""Theorem 4.2 on a run: terms from the run's own tensors, and at no noise what the run measured."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hyperfed
import pefll_bound
from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.runs.run import Run
from hyperfed.theory.pefll_run import Variances, _around, check, measure

KEYS = {
    "rounds": 3,
    "cohort": 4,
    "evaluate_every": 3,
    "task": {"clients": 12, "novel": 0.25, "fraction": 0.2},  # clients of unequal size
    "method": {"standardize": False, "local_steps": 2, "hidden": 8, "descriptor_size": 3},
}
ALMOST_NONE = Variances(1e-16, 1e-16)


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
    assert found.vacuous
    assert not replace(found, terms={"empirical": 0.5, "clients": 0.25, "samples": 0.2}).vacuous


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


def test_the_command_prints_both_sides_and_keeps_them(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pefll_bound.main(run.folder.path, tmp_path, draws=1, rounds=None)
    kept = json.loads((tmp_path / "bound.json").read_text())
    share = 0.05 / 16  # of delta, for each of the grid's lines
    first = measure(run, Variances(1e-6, 1e-4), draws=1, delta=share)
    assert kept["lines"][0]["terms"] == pytest.approx(first.terms)
    assert kept["least_bound"] == min(line["bound"] for line in kept["lines"])
    assert kept["trained_models"] == {
        "known_test_error": 1 - run.summary["test_accuracy"],
        "unseen_test_error": 1 - run.summary["novel_accuracy"],
    }
    nm = 9 * first.samples  # nine known clients; every divergence is 0
    nothing = math.sqrt(math.log(4 * 3 / share) / 18)
    nothing += math.sqrt((math.log(8 * nm / share) + 1) / (2 * nm))
    assert kept["without_divergence"] == pytest.approx(nothing)
    assert (tmp_path / "summary.json").read_bytes() == run.folder.summary.read_bytes()
    printed = capsys.readouterr().out
    assert f"{first.unseen_error:.3g}" in printed.splitlines()[4]
    assert "says less than that no error exceeds 1" in printed

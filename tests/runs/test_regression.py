"""Runs on numbers: RMSE, MSE and R2, and everywhere that less of an error is better."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

import hyperfed
from finished_runs import Finished, finished
from hyperfed.analysis import comparison, figures, page, paired, seeds, statistics
from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.metrics import METRICS, R2, RMSE, metric_of
from hyperfed.runs import progress, trackers
from hyperfed.runs.folder import read_run
from hyperfed.runs.measures import measure, worst_decile
from hyperfed.runs.records import as_written, summarise
from hyperfed.runs.remarks import remark
from hyperfed.runs.run import Run

KEYS: dict[str, Any] = {"rounds": 4, "evaluate_every": 1, "cohort": 1.0}
OWN = {"local_steps": 2, "local_lr": 0.05, "batch_size": 8}


def make_task(model: Any = None, **options: Any) -> hyperfed.Task:
    """Six clients of unequal size with a slope of their own each; the last is novel."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(6), [20, 24, 30, 36, 40, 50])
    x = rng.normal(size=(200, 3))
    y = 7 + x @ np.array([1.0, -2.0, 0.5]) * (1 + client / 4) + rng.normal(size=200) / 10
    usual = {"model": model or (lambda: nn.Linear(3, 1).double()), "novel": 1, "name": "heights"}
    return hyperfed.Task.from_arrays(x, y, client=client, **usual | options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with models of its own for each client; not to be changed."""
    out = tmp_path_factory.mktemp("runs")
    return hyperfed.train("local", make_task(), out=out, method=OWN, **KEYS)


def errors(run: Run, split: str) -> list[tuple[Tensor, Tensor]]:
    """(errors, targets) of each client's model on its examples, by its own plain forward pass."""
    clients = run.task.novel_ids if split == "novel" else run.task.known
    held = {"val": run.task.val, "test": run.task.test, "novel": run.task.test}[split]
    found = []
    for client in clients:
        x, y = run.task.x[held[client]], run.task.y[held[client]]
        with torch.no_grad():
            found.append((run.model(client)(x).squeeze(1) - y, y))
    return found


def r2(error: Tensor, y: Tensor) -> float:
    return float(1 - error.square().sum() / (y - y.mean()).square().sum())


@pytest.mark.parametrize("split", ["test", "novel"])
def test_numbers_are_those_of_the_formulas_over_all_examples(run: Run, split: str) -> None:
    found = errors(run, split)
    error, y = (torch.cat(each) for each in zip(*found, strict=True))
    own = torch.stack([of.square().mean().sqrt() for of, _ in found])
    said, near = run.summary, {"rel": 1e-12}
    assert said["metric"] == "rmse"
    assert said[f"{split}_rmse"] == pytest.approx(error.square().mean().sqrt().item(), **near)
    assert said[f"{split}_mse"] == pytest.approx(error.square().mean().item(), **near)
    assert said[f"{split}_r2"] == pytest.approx(r2(error, y), rel=1e-10)
    best = run.summary["best_round"]
    line = next(e for e in run.evaluations if e.split == split and e.round in (best, 4))
    if split == "test":
        line = next(e for e in run.evaluations if (e.split, e.round) == (split, best))
        assert said["test_rmse_client_mean"] == pytest.approx(own.mean().item(), **near)
        assert said["test_rmse_client_std"] == pytest.approx(own.std(correction=0).item(), **near)
        assert said["worst_decile_rmse"] == pytest.approx(own.max().item(), **near)
        assert said["test_rmse"] != pytest.approx(own.mean().item(), rel=1e-3)  # pooled, no mean
    assert line.main.client == pytest.approx(own.tolist(), **near)
    assert line.measures["r2"].client == pytest.approx([r2(*each) for each in found], rel=1e-10)
    assert line.accuracy is None
    assert not any("accuracy" in key for key in said)


def test_the_best_round_has_the_least_error_on_validation_data() -> None:
    """Too large a rate makes later rounds worse, so that the best is not the last."""
    run = hyperfed.train("fedavg", make_task(), **KEYS, method=OWN | {"local_lr": 0.45})
    val = {e.round: e.main.value for e in run.evaluations if e.split == "val"}
    assert len({*val.values()}) == 4
    best = min(val, key=lambda number: val[number] or 0.0)
    assert run.summary["best_round"] == best
    assert run.summary["val_rmse"] == val[best] < max(value or 0.0 for value in val.values())


def test_records_and_tables_are_named_by_the_metric(run: Run) -> None:
    assert run.folder is not None
    frame = run.to_frame()
    assert set(frame) == {
        *("client", "number", "split", "round", "examples", "rmse", "mse", "r2", "loss")
    }
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert lines == [as_written(e) for e in run.evaluations]
    assert read_run(run.folder.path).evaluations == tuple(run.evaluations)
    logged = run.folder.log.read_text()
    assert "RMSE" in logged
    for word in ("%", "accuracy"):
        assert word not in logged
    numbers = trackers._numbers("val", run.evaluations[0])
    assert {"rmse/val", "mse/val", "r2/val", "worst_decile_rmse/val"} < set(numbers)
    assert not [name for name in numbers if "accuracy" in name]
    assert progress._measured(run.evaluations[0]).partition(", ")[2].startswith("RMSE ")


def test_figures_name_the_metric_and_show_no_per_cent(run: Run, tmp_path: Path) -> None:
    drawn = run.plot()
    labels = [label for axes in drawn.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert "RMSE (in the target's unit)" in labels
    assert "test RMSE at the best round (in the target's unit)" in labels
    places = {
        point[0]: point[1] for dots in drawn.axes[1].collections for point in dots.get_offsets()
    }
    top = max(places.values())
    assert [x for x, y in places.items() if y == top] == [min(places)]  # the best at the top
    points = drawn.axes[0].lines[1].get_ydata()
    assert list(points) == [e.main.value for e in run.evaluations if e.split == "test"]


def by_error(method: str, *squares: float, **changes: Any) -> Finished:
    """A finished run in which each client has four examples, with so large a mean square each."""
    count = torch.full((len(squares),), 4.0, dtype=torch.float64)
    correct = -count * torch.tensor(squares, dtype=torch.float64)
    evaluation = summarise(
        round=10, split="test", clients=range(len(squares)), count=[4] * len(squares),
        correct=correct.tolist(), loss=[1.0] * len(squares),
        masked_correct=correct.tolist(), zeroed_correct=correct.tolist(),
        bytes_down=0, bytes_up=0, seconds=0.0, metric=RMSE, others=[METRICS["mse"]],
        counts={"count": count, "correct": correct},
    )  # fmt: skip
    usual = finished(method).summary or {}
    kept = {key: value for key, value in usual.items() if "accuracy" not in key}
    kept |= {
        "metric": "rmse", "test_rmse": evaluation.main.value, "novel_rmse": None,
        "test_rmse_client_mean": evaluation.main.client_mean,
        "test_rmse_client_std": evaluation.main.client_std,
        "worst_decile_rmse": evaluation.main.worst_decile,
        "test_mse": evaluation.measures["mse"].value, "novel_mse": None,
    }  # fmt: skip
    return replace(finished(method), summary=kept | changes, evaluations=(evaluation,))


def printed(*tables: Any) -> str:
    out = StringIO()
    console = Console(width=80, file=out)
    for table in tables:
        console.print(table)
    return out.getvalue()


def test_less_error_is_better_for_every_client_and_over_seeds() -> None:
    runs = [by_error("local", 4, 9), by_error("good", 1, 4), by_error("bad", 16, 9)]
    rows = comparison.compare(runs)
    assert rows[0].test == pytest.approx(6.5**0.5)
    assert (rows[0].client_mean, rows[0].worst_decile) == (2.5, 3)
    pairs = paired.pair(runs, rows)
    assert [pair.best for pair in pairs] == ["good"] * 3
    local, good, bad = pairs
    assert local.to_best is not None
    assert local.to_best.mean == -1  # each client's RMSE is 1 larger
    assert good.over_local is not None
    assert bad.over_local is not None
    assert (good.over_local.mean, good.over_local.gaining) == (1, 1)
    assert (bad.over_local.mean, bad.over_local.gaining) == (-1, 0)
    shown = printed(*comparison.tables(rows), *paired.tables(pairs))
    assert "RMSE" in shown
    assert "MSE" in shown.replace("RMSE", "")
    assert "accuracy" not in shown
    assert "%" not in shown.replace("gain over it %", "")  # a share of clients, that is
    assert "2.550" in shown
    assert "RMSE is lower" in paired.told_of(RMSE)
    (spread,) = seeds.over_seeds([rows[0], replace(rows[1], group="local")])
    assert spread.by_name["test_rmse_mean"] == pytest.approx((6.5**0.5 + 2.5**0.5) / 2)
    (table,) = seeds.tables([spread])
    assert "test\nRMSE" in [column.header for column in table.columns]
    assert rows[0].by_name["worst_decile_rmse"] == 3
    assert rows[0].by_name["test_mse"] == 6.5
    assert not [key for key in rows[0].by_name if "accuracy" in key]


def test_the_worst_tenth_has_the_largest_errors_and_the_lowest_accuracies() -> None:
    values = [float(value) for value in range(20)]
    assert worst_decile(values) == 0.5
    assert worst_decile(values, less_is_better=True) == 18.5
    one = statistics.scores(by_error("a", *range(1, 11)))
    assert statistics.worst(one) == pytest.approx(10**0.5)


def test_gains_are_of_one_metric() -> None:
    ours = statistics.scores(by_error("a", 4))
    theirs = statistics.scores(finished("b"))
    assert statistics.difference([ours], [theirs]) is None
    with pytest.raises(UserError, match="judged by one metric, came rmse, accuracy"):
        page.content([by_error("a", 4), finished("b")])


def test_many_runs_are_drawn_with_the_least_error_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    runs = [by_error(f"m{i}", (i + 1) ** 2) for i in range(figures.TOGETHER + 1)]
    figures.draw_accuracy([*runs[1:], runs[0]], tmp_path / "a.png")
    titles = [axes.get_title() for axes in drawn[0].axes if axes.get_title()]
    assert titles == [f"m{i}  {i + 1}.000" for i in range(len(runs))]
    figures.draw_accuracy(runs[:2], tmp_path / "b.png")
    left, right = drawn[1].axes
    assert left.get_ylabel() == "test RMSE (in the target's unit)"
    assert right.get_ylabel() == "test RMSE of a client (in the target's unit)"
    assert [line.get_ydata().tolist() for line in left.lines] == [[1.0], [2.0]]
    paired.draw(runs[0], runs[1], tmp_path / "c.png")
    (against,) = drawn[2].axes
    assert "test RMSE under m0" in against.get_xlabel()
    assert against.get_xlim() == against.get_ylim() == pytest.approx((0.97, 2.03))
    paired.draw(runs[0], runs[0], tmp_path / "d.png")  # all have one error
    assert drawn[3].axes[0].get_xlim() == pytest.approx((0.47, 1.53))


def test_the_page_knows_which_way_is_better() -> None:
    runs = [by_error("a", 4), by_error("b", 1)]
    for run in runs:
        run.config["cohort"] = 1
    found = page.content(runs)
    assert found["metric"]["less"] is True
    assert (found["metric"]["header"], found["metric"]["unit"]) == ("RMSE", "in the target's unit")
    assert [(other["name"], other["less"]) for other in found["others"]] == [("mse", True)]
    assert found["runs"][0]["shown"]["test"] == "2.000"
    assert found["runs"][0]["clients"] == [2.0]
    assert found["runs"][0]["curves"]["rounds"] == [(10.0, 2.0)]


@pytest.mark.parametrize(
    ("own", "others", "said"), [(1.0, 1.0, True), (1.0, 1.005, True), (1.0, 2.0, False)]
)
def test_models_that_are_not_personal_are_remarked_upon(
    own: float, others: float, said: bool
) -> None:
    told = remark({"metric": "rmse", "test_rmse": own, "others_rmse": others})
    assert (told is not None) == said
    assert "%" not in (told or "")
    assert remark({"metric": "rmse", "test_rmse": 2.0, "others_rmse": 1.0}) is not None


def test_r2_says_nothing_of_targets_that_are_alike_and_survives_a_large_mean() -> None:
    y = torch.tensor([1e5, 1e5 + 1, 1e5 + 3], dtype=torch.float64)
    error = torch.tensor([0.5, 0.0, -1.0], dtype=torch.float64)

    def counts(y: Tensor) -> dict[str, Tensor]:
        made = {
            "count": torch.tensor(3.0), "correct": -error.square().sum(),
            "targets": torch.stack([y.sum(), y.square().sum()]),
        }  # fmt: skip
        return {name: value.double()[None] for name, value in made.items()}

    assert measure(R2, counts(y)).value == pytest.approx(r2(error, y), rel=1e-4)
    for alike in (1e5, 123.456):  # of whose squares the sum is rounded, and is above
        assert measure(R2, counts(torch.full_like(y, alike))).value is None


def closeness(output: Tensor, y: Tensor) -> Tensor:
    """A score of one's own: more is better."""
    return torch.exp(-(output.reshape(y.shape) - y).abs())


def test_a_score_of_ones_own_is_averaged_and_called_by_its_name() -> None:
    run = hyperfed.train("fedavg", make_task(score=closeness), **KEYS, method=OWN)
    found = errors(run, "test")
    expected = torch.cat([torch.exp(-error.abs()) for error, _ in found]).mean()
    assert run.summary["test_closeness"] == pytest.approx(expected.item(), rel=1e-12)
    assert run.summary["metric"] == "closeness"
    val = {e.round: e.main.value for e in run.evaluations if e.split == "val"}
    assert run.summary["val_closeness"] == max(value or 0.0 for value in val.values())
    assert set(run.to_frame()) > {"closeness"}
    assert "r2" not in run.to_frame()


@pytest.mark.parametrize(
    ("score", "name"),
    [(lambda output, y: y, "score"), (closeness, "closeness"), (np.mean, "mean")],
)
def test_a_score_without_a_name_is_a_score(score: Any, name: str) -> None:
    metric = metric_of(score)
    assert (metric.name, metric.less_is_better, metric.unit) == (name, False, "")


def test_no_score_of_ones_own_takes_the_name_of_a_metric_or_a_column() -> None:
    def rmse(output: Tensor, y: Tensor) -> Tensor:
        return y

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return y

    assert metric_of(rmse).name == "rmse_score"
    assert not metric_of(rmse).less_is_better
    assert metric_of(loss).name == "score"


def test_what_needs_classes_is_refused_for_numbers() -> None:
    with pytest.raises(UserError, match=r"best must be accuracy, which stands for .* RMSE"):
        hyperfed.train("fedavg", make_task(), best="masked_accuracy")


# The command line.


@pytest.fixture(scope="module")
def schools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of a few schools, whose scores are numbers."""
    folder = tmp_path_factory.mktemp("schools")
    rng = np.random.default_rng(1)
    rows = ["school,age,hours,score"]
    for school in range(5):
        for _ in range(14):
            age, hours = rng.normal(size=2)
            score = 60 + 5 * hours + school + age
            rows.append(f"s{school},{age:.3f},{hours:.3f},{score:.3f}")
    path = folder / "schools.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    with pytest.raises(SystemExit, match="0"):
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_the_command_line_says_rmse_everywhere(
    schools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["task.client=school", "task.target=score", "task.novel=1", "rounds=2"]
    keys += ["evaluate_every=1", "method.local_steps=1", f"task={schools}"]
    out, _ = told(capsys, "run", "fedavg", *keys, "--out", tmp_path)
    assert "RMSE" in out
    assert re.search(r"\bR2\b", out)
    assert "%" not in out
    told(capsys, "run", "local", *keys, "--out", tmp_path, "--quiet")
    folder = next((tmp_path / "fedavg").iterdir())
    out, _ = told(capsys, "evaluate", folder, "--clients")
    assert "RMSE" in out
    assert "%" not in out
    said = json.loads(told(capsys, "evaluate", folder, "--json")[0])
    summary = read_run(folder).summary
    assert summary is not None
    assert said["test"]["measures"]["rmse"]["value"] == summary["test_rmse"]
    html = tmp_path / "page.html"
    out, err = told(capsys, "compare", tmp_path, "--html", html, "--figure", tmp_path / "a.svg")
    assert "RMSE gain" in out
    assert "RMSE is lower" in err
    compared = json.loads(told(capsys, "compare", tmp_path, "--json")[0])
    assert {row["test_rmse"] for row in compared} >= {summary["test_rmse"]}
    assert '"label": "RMSE"' in html.read_text()
    out, _ = told(capsys, "describe", "fedavg", *keys)
    assert "judged by: RMSE (in the target's unit), less is better" in out

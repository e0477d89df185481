"""Metrics of classes from counts, against scikit-learn and a plain loop over examples."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch import Tensor

import hyperfed
from finished_runs import finished
from hyperfed.analysis import comparison
from hyperfed.errors import UserError
from hyperfed.metrics import BINS, KINDS, METRICS, ON_REQUEST, named, why_not
from hyperfed.runs import config
from hyperfed.runs.measures import measure
from hyperfed.runs.run import Run
from hyperfed.runs.settings import MetricName
from toys import Normed, make_task

ASKED = ["balanced_accuracy", "f1", "calibration"]
KEYS: dict[str, Any] = {
    "rounds": 2,
    "evaluate_every": 1,
    "cohort": 1.0,
    "method": {"local_steps": 2, "local_lr": 0.1},
}


def calibration(probability: np.ndarray, y: np.ndarray) -> float:
    """The expected calibration error, bin by bin."""
    confidence, right = probability.max(1), probability.argmax(1) == y
    gap = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return gap


@pytest.fixture(scope="module")
def run() -> Run:
    """A finished run of which the metrics were asked for; not to be changed."""
    return hyperfed.train("local", make_task(Normed, novel=1), metrics=ASKED, **KEYS)


def outputs(run: Run, client: int) -> tuple[np.ndarray, np.ndarray]:
    """(probabilities, labels) of a client's test examples."""
    rows = run.task.test[client]
    with torch.no_grad():
        output = run.model(client)(run.task.transform(run.task.x[rows]))
    return output.softmax(1).numpy(), run.task.y[rows].numpy()


def expected(pairs: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    probability, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
    predicted = probability.argmax(1)
    return {
        "balanced_accuracy": balanced_accuracy_score(y, predicted),
        "f1": f1_score(y, predicted, average="macro"),
        "calibration": calibration(probability, y),
    }


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_metrics_are_those_of_all_examples_and_of_each_client(run: Run) -> None:
    known = [outputs(run, client) for client in run.task.known]
    joined = [outputs(run, client) for client in run.task.novel_ids]
    for split, pairs in (("test", known), ("novel", joined)):
        for name, value in expected(pairs).items():
            assert run.summary[f"{split}_{name}"] == pytest.approx(value, rel=1e-10, abs=1e-12)
    frame = run.to_frame()
    rows = frame[frame["split"] == "test"].set_index("number")
    for name in ASKED:
        own = [expected([pair])[name] for pair in known]
        assert rows[name].tolist() == pytest.approx(own, rel=1e-10, abs=1e-12)
        assert run.summary[f"test_{name}_client_mean"] == pytest.approx(np.mean(own))
        worst = max(own) if name == "calibration" else min(own)
        assert run.summary[f"worst_decile_{name}"] == pytest.approx(worst)


@pytest.mark.parametrize("share", [1, 1 / 3])
def test_a_class_counts_for_f1_by_one_example_or_by_one_prediction(share: float) -> None:
    """Shares of examples, too, as a mean over several models has; the last class has neither."""
    classes = torch.tensor([[share, 0, 9, 0], [0, share, 9, 0], [0, 0, 9, 0]])  # the third has all
    counts = {"classes": classes, "count": torch.tensor(share + 9)}
    assert METRICS["f1"].value(counts).item() == pytest.approx((0 + 0 + 1) / 3)


def test_nobody_counts_them_unless_asked_and_the_other_numbers_stay(run: Run) -> None:
    plain = hyperfed.train("local", make_task(Normed, novel=1), **KEYS)
    left_out = {"seconds", "engine"}
    assert {k: v for k, v in run.summary.items() if k in plain.summary and k not in left_out} == {
        k: v for k, v in plain.summary.items() if k not in left_out
    }
    assert [key for key in plain.summary if "f1" in key or "calib" in key or "metric" in key] == []
    assert not any(e.measures for e in plain.evaluations)
    assert list(plain.to_frame()) == [
        *("client", "number", "split", "round", "examples", "accuracy", "loss", "masked_accuracy")
    ]
    tuned = plain.served_otherwise(['metrics=["f1"]'])
    found = tuned.evaluate_best()["test"]
    assert found.measures["f1"].value == run.summary["test_f1"]


def test_a_cohort_in_one_computation_counts_the_same(run: Run) -> None:
    task = make_task(Normed, novel=1)
    together = hyperfed.train("local", task, metrics=ASKED, engine="vmap", **KEYS)
    for name in ASKED:
        assert together.summary[f"test_{name}"] == pytest.approx(run.summary[f"test_{name}"])


def test_outputs_beyond_the_classes_are_right_of_none() -> None:
    output = torch.eye(4)[[0, 3, 1, 2]] * 9  # the fourth output is of no class
    counted = KINDS["classes"](output, torch.tensor([0, 0, 1, 1]), 3)
    assert counted.tolist() == [[2, 2, 0], [1, 1, 1], [1, 1, 0]]


def test_a_probability_on_an_edge_is_of_the_bin_below() -> None:
    output = torch.tensor([[0.6, 0.4], [1.0, 0.0]], dtype=torch.float64).log()
    counted = KINDS["bins"](output, torch.tensor([1, 0]), 2)
    assert counted[0].nonzero().flatten().tolist() == [8, BINS - 1]  # 0.6 is 9 / 15
    assert counted[2].nonzero().flatten().tolist() == [BINS - 1]


def honest() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    output = torch.randn(20, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=draw)
    found = {kind: KINDS[kind](output, y, 3) for kind in ("classes", "bins")}
    right = (output.argmax(1) == y).double().sum()
    return {"count": torch.tensor(20.0).double(), "correct": right, **found}


@pytest.mark.parametrize(
    ("kind", "place", "change"),
    [
        ("classes", (0, 1), 1.0), ("classes", (1, 1), 1.0), ("classes", (2, 1), 1.0),
        ("classes", (2, 1), -50.0), ("bins", (0, 7), 1.0), ("bins", (1, 7), 5.0),
        ("bins", (1, 7), -5.0), ("bins", (2, 7), 1.0),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_are_told(kind: str, place: tuple[int, int], change: float) -> None:
    counts = honest()
    assert why_not(kind, counts, counts["correct"]) is None
    changed = counts[kind].clone()
    changed[place] += change
    assert why_not(kind, counts | {kind: changed}, counts["correct"]) is not None


def test_more_right_of_a_class_than_there_are_cannot_be() -> None:
    """Nothing but this class is wrong here: as many are right in all as the score says."""
    classes = torch.tensor([[1, 3], [4, 0], [3, 0]]).double()
    count, right = torch.tensor(4.0).double(), torch.tensor(3.0).double()
    told = why_not("classes", {"count": count, "classes": classes}, right)
    assert told == "classes with more right than there are"


def test_sums_of_more_examples_are_rounded_more() -> None:
    """A million times 0.2, one after another, as of a network that tells none of five classes."""
    bins = torch.zeros(3, BINS, dtype=torch.float64)
    bins[0, 2], bins[1, 2] = 1e6, 2e5 + 3e-6  # no confidence there is above 0.2
    counts = {"count": torch.tensor(1e6).double(), "bins": bins}
    assert why_not("bins", counts, None) is None
    bins[1, 2] += 2
    assert why_not("bins", counts, None) is not None


def test_sums_of_targets_that_cannot_be_are_told() -> None:
    def said(total: float, squares: float, of: float = 2.0) -> str | None:
        told = torch.tensor([total, squares]).double()
        return why_not("targets", {"count": torch.tensor(of).double(), "targets": told}, None)

    assert said(3.0, 5.0) is None
    assert said(4.0, 5.0) is not None  # of two numbers that sum to 4, squares sum to 8 at least
    assert said(0.0, -1.0) is not None
    assert said(0.0, -1.0, of=0.0) is not None
    both = {"count": torch.tensor(2.0).double(), "targets": torch.tensor([[3.0, 3], [5, 5]])}
    assert why_not("targets", both, None) is None
    both["targets"][0, 1] = 4  # of two numbers, each is to be possible
    assert why_not("targets", both, None) == "targets 7 and squares 10"


def test_more_right_than_were_predicted_cannot_be() -> None:
    classes = torch.tensor([[2, 2], [0, 3], [1, 2]]).double()  # nobody said the first
    counts = {"count": torch.tensor(4.0).double(), "classes": classes}
    assert why_not("classes", counts, None) == "classes with 3 predictions"
    classes[1, 0] = 1
    assert why_not("classes", counts, None) is None


def test_the_comparison_has_a_table_of_them() -> None:
    run = finished("fedavg", test_f1=0.5, novel_f1=None, test_calibration=0.125)
    (row,) = comparison.compare([run])
    assert row.by_name["test_f1"] == 0.5
    _, further = comparison.tables([row])
    cells = {column.header: list(column.cells) for column in further.columns}
    assert cells["test\nmacro F1 %"] == ["50.0"]
    assert cells["novel\nmacro F1 %"] == ["–"]
    assert cells["test\ncalibration error %"] == ["12.5"]
    assert len(comparison.tables(comparison.compare([finished("fedavg")]))) == 1
    assert METRICS["calibration"].less_is_better
    assert not named("f1").less_is_better


def test_a_number_has_four_digits_or_all_before_the_point() -> None:
    values = (0.5, 999.96, 1000.0, 1234.4, -1234.4, -0.5, 1e7)
    shown = [named("rmse").shown(value) for value in values]
    assert shown == ["0.5000", "1000.", "1000", "1234", "-1234", "-0.5000", "1.000e+07"]


@pytest.mark.parametrize(("name", "worst_first"), [("accuracy", [0.0, 0.5]), ("rmse", [2.0, 0.0])])
def test_what_has_no_value_is_worse_than_the_worst(name: str, worst_first: list[float]) -> None:
    values = [*reversed(worst_first), None]
    assert sorted(values, key=named(name).order) == [None, *worst_first]


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ({"classes": 0}, "f1", "needs one label for each example"),
        ({}, "r2", "r2 is of numbers"),
        ({}, "accuracy", "metrics"),
    ],
)
def test_metrics_that_do_not_suit_the_task_are_refused(
    options: dict[str, Any], asked: str, told: str
) -> None:
    task = replace(make_task(), **options)
    with pytest.raises(UserError, match=told):
        hyperfed.train("fedavg", task, metrics=[asked], **KEYS)


def test_no_client_with_examples_has_no_measure() -> None:
    nothing = {"count": torch.zeros(2).double(), "classes": torch.zeros(2, 3, 4).double()}
    found = measure(METRICS["f1"], nothing)
    assert (found.value, found.client, found.client_mean) == (None, (None, None), None)


def test_the_settings_name_what_clients_count_for_on_request() -> None:
    assert sorted(get_args(MetricName)) == sorted(ON_REQUEST)


def test_words_name_metrics_in_a_file_and_on_the_command_line() -> None:
    for text in ("metrics=f1", 'metrics=["f1"]'):
        assert config.load("fedavg", [text]).metrics == ("f1",)
    with pytest.raises(UserError, match="metrics"):
        config.load("fedavg", ["metrics=f2"])


def test_a_value_is_shown_told_and_set_against_another_as_its_metric_has_it() -> None:
    accuracy, rmse = named("accuracy"), named("rmse")
    assert (accuracy.told(0.756), rmse.told(2.5)) == ("75.6 %", "2.500")
    assert (accuracy.spread(0.756, 0.012), rmse.spread(2.5, None)) == ("75.6 ± 1.2", "2.500")
    assert accuracy.spread(None, None) == "–"
    assert (accuracy.gain(0.75, 0.5), rmse.gain(2.0, 2.5)) == (0.25, 0.5)
    assert (accuracy.better, rmse.better) == ("more is better", "less is better")
    assert (accuracy.axis(), named("mse").axis("{} of all")) == ("test accuracy (%)", "MSE of all")

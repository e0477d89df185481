"""Figures of what was learned: the numbers they show, from runs made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import hyperfed
from finished_runs import Finished, evaluation, finished
from hyperfed.errors import UserError
from hyperfed.runs import learned
from hyperfed.runs.experiments import FigureName

CONV = [[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.4, 0.6]], np.eye(3).tolist()]
"""Of a layer: who takes how much from whom, in rounds 10 and 20."""


def mixed() -> Finished:
    """A run whose best round is the first of two."""
    told = [
        replace(
            evaluation(number, "val", [5, 5]),
            diagnostics={"weights": {"base": {"conv": CONV[at], "fc": CONV[1 - at]}}},
        )
        for at, number in enumerate((10, 20))
    ]
    run = finished("pfedla")
    return replace(run, evaluations=(*told, *run.evaluations))


def lines(figure):
    return [axes for axes in figure.axes if axes.get_lines()]


def test_each_figure_of_a_table_has_a_function_and_a_caption() -> None:
    assert set(get_args(FigureName)) == set(learned.CAPTIONS)
    assert set(learned.CAPTIONS) == {*learned.OF_A_RUN, *learned.OF_RUNS}


def test_weights_over_rounds_are_those_of_the_first_client_line_by_line() -> None:
    conv, fc = lines(learned.draw_weights(mixed()))
    assert (conv.get_title(), fc.get_title()) == ("conv", "fc")
    for client, line in enumerate(conv.get_lines()):
        assert line.get_xdata().tolist() == [10, 20]
        assert line.get_ydata().tolist() == [CONV[0][0][client], CONV[1][0][client]]
        assert line.get_label().split(",")[0] == str(client)
    assert fc.get_lines()[1].get_ydata().tolist() == [0.0, 0.3]


def test_a_heatmap_is_of_the_best_round_and_of_the_latest_where_a_run_is_not_done() -> None:
    run = mixed()
    conv, fc, _ = learned.draw_heatmap(run).axes  # and the colours' scale
    np.testing.assert_array_equal(conv.get_images()[0].get_array(), CONV[0])
    np.testing.assert_array_equal(fc.get_images()[0].get_array(), CONV[1])
    assert {axes.get_images()[0].get_clim() for axes in (conv, fc)} == {(0, 1)}
    latest = learned.draw_heatmap(replace(run, summary=None)).axes[0]
    np.testing.assert_array_equal(latest.get_images()[0].get_array(), CONV[1])


def test_layers_are_what_the_first_client_takes_of_each() -> None:
    axes = learned.draw_layers(mixed()).axes[0]
    np.testing.assert_array_equal(axes.get_images()[0].get_array(), [CONV[0][0], CONV[1][0]])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["conv", "fc"]


def test_layers_of_several_target_sizes_are_called_by_both() -> None:
    told = {"S": {"fc": CONV[0]}, "L": {"fc": CONV[1]}}
    one = replace(evaluation(10, "val", [5, 5]), diagnostics={"weights": told})
    rounds, layers = learned.weights_over_rounds([one])
    assert rounds == [10]
    assert list(layers) == ["S fc", "L fc"]
    np.testing.assert_array_equal(layers["L fc"], [CONV[1]])


def shifted(correct: list[int], *divergence: float | None) -> Finished:
    run = finished("itpfl")
    novel = replace(evaluation(20, "novel", correct), client_kl_divergence=divergence)
    return replace(run, evaluations=(*run.evaluations, novel))


def test_novel_clients_are_drawn_by_their_shift_whom_it_is_finite_of_and_who_were_tested() -> None:
    near, far = shifted([9, 8], 0.1, 0.3, 0.2), shifted([4, 2], 1.5, None, 0.2)
    figure = learned.draw_shift({"ours": [near, far], "theirs": [far]})
    ours, theirs = figure.axes[0].collections
    np.testing.assert_allclose(ours.get_offsets(), [[0.1, 90], [0.3, 80], [1.5, 40]])
    np.testing.assert_allclose(theirs.get_offsets(), [[1.5, 40]])
    assert (ours.get_label(), theirs.get_label()) == ("ours", "theirs")
    assert not learned.can_draw("shift", finished("itpfl"))
    assert learned.can_draw("shift", far)


def varied(correct: list[int], alpha: float | str, *variation: float | None) -> Finished:
    """A run with 75.12 % on known clients, whose novel ones are as far from these as is said."""
    run = finished("pfedhn")
    run.config["task"] = {"novel_alpha": alpha}
    novel = replace(evaluation(20, "novel", correct), client_total_variation=variation)
    return replace(run, evaluations=(*run.evaluations, novel))


def test_what_novel_clients_lose_is_one_point_for_each_of_their_distributions() -> None:
    ours = [
        varied([9, 8], 0.25, 0.1, 0.3, 0.9),  # 85 % at 0.2: the last client is not tested
        varied([4, 6], 0.25, 0.3, 0.5, None),  # 50 % at 0.4, of another seed
        varied([6, 6], "none", 0.0, 0.1, None),  # 60 % at 0.05
    ]
    axes = learned.draw_gap({"ours": ours, "theirs": ours[:1]}).axes[0]
    mine, theirs, _ = axes.get_lines()  # and the line at 0
    np.testing.assert_allclose(mine.get_xydata(), [[0.05, -15.12], [0.3, -7.62]])
    np.testing.assert_allclose(theirs.get_xydata(), [[0.2, 9.88]])
    assert [mine.get_label(), theirs.get_label()] == ["ours", "theirs"]
    assert "points" in axes.get_ylabel()
    with_kl = shifted([9, 8], 0.1, 0.3, 0.2)
    assert not learned.can_draw("gap", with_kl)  # total variation is what it takes
    assert not learned.can_draw("gap", replace(ours[0], summary=None))


def test_novel_clients_are_drawn_by_their_total_variation() -> None:
    run = varied([9, 8], 0.25, 0.1, 0.3, 0.9)
    figure = learned.draw_variation({"ours": [run, varied([4, 2], 0.5, None, 0.6, 0.2)]})
    (points,) = figure.axes[0].collections
    np.testing.assert_allclose(points.get_offsets(), [[0.1, 90], [0.3, 80], [0.6, 20]])
    assert not learned.can_draw("shift", run)


def test_the_concentration_of_a_run_in_memory_is_found_too() -> None:
    small = {"rounds": 1, "evaluate_every": 1, "cohort": 3, "method": {"local_steps": 1}}
    task = {"clients": 7, "novel": 3, "partition": "dirichlet", "alpha": 1.0, "novel_alpha": 1.0}
    run = hyperfed.train("fedavg", **small, task=task)
    ((_, gap),) = learned.draw_gap({"FedAvg": [run, run]}).axes[0].get_lines()[0].get_xydata()
    means = [run.summary[f"{split}_accuracy_client_mean"] for split in ("novel", "test")]
    expected = means[0] - means[1]
    assert abs(means[0] - run.summary["novel_accuracy"]) > 1e-3  # clients are of several sizes
    assert gap == pytest.approx(100 * expected)


def test_a_run_draws_what_it_has_and_says_what_it_lacks(tmp_path: Path) -> None:
    small = {"rounds": 1, "evaluate_every": 1, "cohort": 3, "task": {"clients": 4, "novel": 1}}
    run = hyperfed.train("pfedla", **small, method={"local_steps": 1})
    figure = run.plot(tmp_path / "heatmap.png", of="heatmap")
    drawn = figure.axes[0].get_images()[0].get_array()
    weights = next(iter(run.diagnostics()["weights"]["base"].values()))
    np.testing.assert_allclose(drawn, weights, rtol=6e-4)
    assert (tmp_path / "heatmap.png").stat().st_size
    with pytest.raises(UserError, match=r"of metric, weights, heatmap, .* came 'weight'"):
        run.plot(of="weight")
    with pytest.raises(UserError, match="weights must be in the diagnostics of a run"):
        learned.draw("weights", finished("fedavg"), "FedAvg")


def looked_into(**examined: object) -> Finished:
    return finished("pfedhn", examined=examined)


def test_others_models_are_compared_within_a_client() -> None:
    told = [[0.9, 0.5, 0.7], [0.2, 0.2, 0.2], [0.0, 1.0, 0.25]]
    axes = learned.draw_crossed(looked_into(crossed=told)).axes[0]
    expected = [[1, 0, 0.5], [1, 1, 1], [0, 1, 0.25]]
    np.testing.assert_allclose(axes.get_images()[0].get_array(), expected)
    assert not learned.can_draw("crossed", finished("pfedhn"))


def test_of_errors_the_least_of_a_client_is_one() -> None:
    told = [[1.0, 5.0, 3.0], [None, 2.0, 4.0]]
    run = finished("pfedhn", metric="rmse", examined={"crossed": told})
    np.testing.assert_equal(learned.crossed(run), [[1, 0, 0.5], [np.nan, 1, 0]])
    bar = learned.draw_crossed(run).axes[1]
    assert bar.get_ylabel() == "RMSE, from 0 to 1 in each row, 1 the least"
    bar = learned.draw_crossed(looked_into(crossed=told)).axes[1]
    assert bar.get_ylabel() == "accuracy, from 0 to 1 in each row"


def test_of_who_has_no_test_examples_nothing_is_compared() -> None:
    told = [[None, None, None], [0.9, None, 0.7], [0.2, 0.2, None]]  # as a record says nan
    found = learned.crossed(looked_into(crossed=told))
    nan = np.nan
    np.testing.assert_equal(found, [[nan, nan, nan], [1, nan, 0], [1, 1, nan]])


def test_clients_with_the_same_classes_have_a_colour_and_lie_together() -> None:
    rng = np.random.default_rng(0)
    kind = np.arange(24) % 3
    rows = np.eye(3)[kind] * 20 + rng.normal(size=(24, 3))
    shares = np.eye(6)[kind] * 0.3 + np.eye(6)[kind + 3] * 0.7
    run = looked_into(descriptors=rows.tolist(), proportions=shares.tolist())
    points = learned.draw_embedding(run).axes[0].collections[0]
    colours = {tuple(colour): set() for colour in points.get_facecolors()}
    for colour, of in zip(points.get_facecolors(), kind, strict=True):
        colours[tuple(colour)].add(int(of))
    assert sorted(map(sorted, colours.values())) == [[0], [1], [2]]
    placed = np.asarray(points.get_offsets())
    apart = np.linalg.norm(placed[:, None] - placed, axis=2)
    np.fill_diagonal(apart, np.inf)
    assert (kind[apart.argmin(axis=1)] == kind).all()
    assert not learned.can_draw("embedding", looked_into(descriptors=rows[:3], proportions=[]))


def test_where_hardly_two_clients_have_the_same_classes_the_largest_tells_the_group() -> None:
    shares = [[0.6, 0.4, 0], [0.9, 0, 0.1], [0.2, 0.7, 0.1], [0, 1, 0]]
    run = looked_into(descriptors=[[0.0]] * 4, proportions=shares)
    assert learned.described(run)[1] == [0, 0, 1, 1]


def test_rank_correlations_are_of_novel_clients_where_there_are_any() -> None:
    told = ({"rank_correlation": 0.2}, {"rank_correlation": 0.3, "novel_rank_correlation": 0.9})
    evaluations = tuple(
        replace(evaluation(number, "val", [5, 5]), diagnostics={"descriptors": of})
        for number, of in zip((10, 20), told, strict=True)
    )
    run = replace(finished("pefll"), evaluations=evaluations)
    (line,) = learned.draw_correlation({"PeFLL": [run]}).axes[0].get_lines()
    assert line.get_xydata().tolist() == [[10, 0.2], [20, 0.9]]
    assert not learned.can_draw("correlation", finished("pefll"))


def test_accuracy_over_rounds_has_a_line_for_each_run() -> None:
    ours, theirs = finished("a"), finished("b")
    axes = learned.draw_rounds({"A": [ours, theirs], "B": [theirs]}).axes[0]
    assert [line.get_xydata().tolist() for line in axes.get_lines()] == [[[10, 75], [20, 60]]] * 3
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["A", "B"]
    assert not learned.can_draw("rounds", replace(ours, evaluations=()))

"""The comparison and its figure, on runs made by hand."""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from finished_runs import Finished, evaluation, finished
from hyperfed.analysis import paired
from hyperfed.analysis.comparison import (
    compare,
    difference,
    groups,
    most_alike,
    saw_the_same,
    table,
)
from hyperfed.analysis.differences import differences
from hyperfed.analysis.figures import draw_accuracy
from hyperfed.analysis.statistics import Difference
from hyperfed.errors import UserError
from hyperfed.metrics import ACCURACY
from hyperfed.runs.records import REHEARSAL
from hyperfed.runs.remarks import megabytes, percent, remark, remarks


def test_rows_are_the_summaries_in_order():
    first, second = finished("pfedhn", test_accuracy=0.8), finished("local", best_round=20)
    one, other = compare([first, second])
    assert (one.label, one.test, one.best_round) == ("pfedhn", 0.8, 10)
    assert (other.label, other.test, other.best_round) == ("local", 0.75, 20)
    assert other.novel is None
    assert first.summary is not None
    assert (one.val, other.val) == (0.75, 0.5)  # at the best round: 15 and 10 of 20
    expected = {"label": "pfedhn", "group": "pfedhn", "total_variation": None} | first.summary
    expected |= {"val_accuracy": 0.75}
    assert one.by_name == {name: expected[name] for name in expected if name != "engine"}


def test_what_a_run_is_chosen_by_is_its_rehearsal_where_it_has_one():
    plain = finished("itpfl")
    rehearsed = replace(plain, evaluations=(*plain.evaluations, evaluation(10, REHEARSAL, [1, 2])))
    blank = replace(plain, evaluations=(evaluation(10, "test", [5, 5]),))
    assert [row.val for row in compare([plain, rehearsed, blank])] == [0.75, 0.15, None]


def test_a_run_that_chose_by_another_number_tells_that_too():
    masked = replace(evaluation(10, "val", [6, 9]), masked_accuracy=0.8, zeroed_accuracy=None)
    runs = []
    for best in ("accuracy", "masked_accuracy", "zeroed_accuracy"):
        run = finished("pefll")
        runs.append(replace(run, config=run.config | {"best": best}, evaluations=(masked,)))
    rows = compare(runs)
    assert [row.val for row in rows] == [0.75] * 3
    assert [row.chosen for row in rows] == [
        None,
        ("masked_accuracy", 0.8),
        ("zeroed_accuracy", None),  # of before it was told
    ]
    assert "val_masked_accuracy" not in rows[0].by_name
    assert rows[1].by_name["val_masked_accuracy"] == 0.8
    (blank,) = compare([replace(runs[1], evaluations=())])
    assert blank.chosen is None


def test_the_best_of_a_methods_settings_is_by_what_its_runs_chose_by():
    """By accuracy it would be the first, by masked accuracy it is the other."""
    runs = of_settings((0.9, 0.7), (6, 3))
    for run, value in zip(runs[:2], (0.5, 0.6), strict=True):
        run.config["best"] = "masked_accuracy"
        at = run.evaluations[1]
        run.evaluations[1:] = [replace(at, masked_accuracy=value)]
    assert {one.best for one in paired.pair(runs, compare(runs))} == {"fedavg"}


def test_labels_tell_runs_apart_by_what_differs_and_then_by_number():
    runs = [finished("pfedhn", 0), finished("local"), finished("pfedhn", 1), finished("pfedhn", 0)]
    assert [row.label for row in compare(runs)] == [
        "pfedhn seed=0 (1)",
        "local",
        "pfedhn seed=1",
        "pfedhn seed=0 (2)",
    ]
    first, second = finished("pfedla"), finished("pfedla")
    first.config["method"] |= {"retain": 1, "lr": 0.1}
    second.config["method"] |= {"retain": 2, "lr": 0.1}
    second.config["method"]["new"] = True  # of a version that first did not know
    second.config["engine"]["name"] = "vmap"  # changes no number
    labels = [row.label for row in compare([first, second, finished("local")])]
    assert labels == ["pfedla retain=1", "pfedla retain=2", "local"]
    for run, keep in zip((first, second), (True, None), strict=True):
        run.config["method"] |= {"retain": 1, "keep": keep}
    runs = [first, second]
    assert [row.label for row in compare(runs)] == ["pfedla keep=true", "pfedla keep=none"]
    assert differences(runs, compare(runs)) == {
        "method.keep": {"true": ["pfedla keep=true"], "none": ["pfedla keep=none"]}
    }


def test_runs_are_told_apart_by_how_their_clients_are_served():
    plain, tuned = finished("fedavg"), finished("fedavg")
    plain.config["serve"], tuned.config["serve"] = {"finetune_steps": 0}, {"finetune_steps": 20}
    labels = [row.label for row in compare([plain, tuned])]
    assert labels == ["fedavg serve.finetune_steps=0", "fedavg serve.finetune_steps=20"]


CIFAR: dict[str, Any] = {"name": "cifar10"}
BY_SUM, BY_MEAN = (
    {"method": {"name": "pfedhn", "cohort_reduction": reduction}} for reduction in ("sum", "mean")
)


@pytest.mark.parametrize(
    ("now", "before", "same"),
    [
        ({"task": CIFAR | {"partition": None}}, {"task": CIFAR | {"partition": "class_shares"}}, 1),
        ({"task": CIFAR | {"partition": None}}, {"task": CIFAR | {"partition": "iid"}}, 0),
        (
            {"task": {"name": "x", "partition": None}},
            {"task": {"name": "x", "partition": "iid"}},
            0,
        ),
        ({"task": CIFAR | {"val": None}}, {"task": CIFAR | {"val": "none"}}, 1),
        ({"method": {"name": "fml", "keep_momentum": True}}, {"method": {"name": "fml"}}, 1),
        ({"method": {"name": "fml", "keep_momentum": False}}, {"method": {"name": "fml"}}, 0),
        (BY_SUM | {"cohort": 5}, BY_MEAN | {"cohort": 5}, 0),
        (BY_SUM | {"cohort": 1.0}, BY_MEAN | {"cohort": 1.0}, 0),
        (BY_SUM | {"cohort": 1}, BY_MEAN | {"cohort": 1}, 1),
        *[
            ({"method": {"name": method}}, {"method": of["method"] | {"name": method}}, same)
            for method in ("pfedhn", "pfedhn_pc", "itpfl")
            for of, same in ((BY_MEAN, 1), (BY_SUM, 0))  # before one could say it was the mean
        ],
        ({"privacy": {"epsilon": None, "clip": 2.0}}, {"privacy": {"epsilon": None}}, 1),
        ({"privacy": {"epsilon": 1.0, "clip": 2.0}}, {"privacy": {"epsilon": 1.0, "clip": 3.0}}, 0),
        (
            {"privacy": {"masking": True, "clip": 2.0}},
            {"privacy": {"masking": True, "clip": 3.0}},
            0,
        ),
    ],
)
def test_seeds_of_several_versions_are_together(now, before, same):
    """What is left out, or none, is told in one way."""
    runs = [finished("fedavg", 0), finished("fedavg", 1)]
    for run, settings in zip(runs, (now, before), strict=True):
        run.config.update(settings)
    assert len(set(groups(runs))) == 2 - same


def test_no_more_than_a_few_settings_are_named():
    runs = [finished("pfedla", seed) for seed in (0, 1)]
    for run, value in zip(runs, (1, 2), strict=True):
        run.config["method"] |= dict.fromkeys(("a", "b", "c", "d"), value)
    labels = [row.label for row in compare(runs)]
    assert labels == ["pfedla seed=0 a=1 b=1", "pfedla seed=1 a=2 b=2"]


def test_a_run_that_is_not_done_or_of_another_version_is_refused():
    for summary in (None, {}):
        with pytest.raises(UserError, match="must be done"):
            compare([finished("local"), Finished({}, summary, ())])
    run = finished("local")
    assert run.summary is not None
    short = {name: value for name, value in run.summary.items() if name != "seed"}
    with pytest.raises(UserError, match="lacks seed"):
        compare([replace(run, summary=short)])


def test_table_fits_into_80_columns_and_has_every_number():
    printed = StringIO()
    rows = compare([finished("pfedhn_pc", rounds=5000, test_accuracy=0.7, novel_accuracy=1.0)])
    Console(width=80, file=printed).print(table(rows))
    last = printed.getvalue().splitlines()[-1]
    assert last.split() == [
        *("pfedhn_pc", "5000", "10", "75.0", "70.0", "75.1", "±", "25.0", "50.0", "100.0"),
        *("1.5", "2.0", "12.3"),
    ]


def test_how_far_apart_clients_are_stands_above_runs_on_the_same_clients():
    def printed(*shifts: float | None) -> str:
        runs = [finished("local", seed, total_variation=v) for seed, v in enumerate(shifts)]
        out = StringIO()
        Console(width=80, file=out).print(table(compare(runs)))
        return out.getvalue()

    told = "total variation between the labels of two clients: 0.81"
    assert told in printed(0.8125, 0.8125)
    for shifts in ((0.8125, 0.5), (None, None), (None, 0.8125)):
        assert "total variation" not in printed(*shifts)
    assert "total variation" not in printed()
    old = compare([finished("local")])  # a record of before it was measured
    assert old[0].total_variation is None


def test_numbers_that_are_not_there_are_dashes():
    assert percent(None) == ACCURACY.spread(None, None) == "–"
    assert percent(0.1234) == "12.3"
    assert ACCURACY.spread(0.5, 0.125) == "50.0 ± 12.5"
    assert megabytes(1_250_000_000) == "1250.0"
    assert [megabytes(count) for count in (100_000, 36_156, 0)] == ["0.1", "0.036", "0.0"]
    assert difference(None) == "–"
    assert difference(Difference(0.0, -0.1, 0.1, 3, 0.5, agree=False)) == "+0.0 [-10.0, 10.0] noise"
    over_seeds = Difference(
        0.2, 0.1, 0.3, 6, 1.0, agree=True, seeds=2, divisions=2, seeds_low=-0.1, seeds_high=0.5
    )
    assert difference(over_seeds) == "+20.0 [10.0, 30.0] here"
    assert difference(replace(over_seeds, seeds_low=0.1), ACCURACY, 2) == "+20.0 [10.0, 30.0]"
    assert difference(over_seeds, seeds=3) == "+20.0 [10.0, 30.0] here, 2 seeds"
    alone = Difference(0.2, None, None, 1, 1.0, agree=True)
    assert difference(alone, seeds=1) == "+20.0, one client"
    assert difference(alone, seeds=2) == "+20.0, one client, 1 seed"


def test_figure_names_its_axes_and_runs(tmp_path):
    path = tmp_path / "figure.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        draw_accuracy([finished("pfedhn"), finished("local", best_round=20)], path)
    drawn = path.read_text()
    for text in ("round", "test accuracy (%)", "test accuracy of a client (%)"):
        assert f">{text}<" in drawn
    for label in ("pfedhn", "local"):
        assert drawn.count(f">{label}<") == 2  # in the legend and below its clients


@pytest.mark.parametrize("ending", ["svg", "pdf", "png"])
def test_figure_is_the_same_file_on_another_day(ending, tmp_path, monkeypatch):
    paths = [tmp_path / f"{day}.{ending}" for day in (0, 86_400)]
    for day, path in enumerate(paths):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(86_400 * day))  # matplotlib's clock
        draw_accuracy([finished("pfedhn"), finished("local")], path)
    one, other = (path.read_bytes() for path in paths)
    assert one == other


def test_figure_shows_the_best_round_and_the_clients_that_have_examples(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_accuracy([finished("a"), finished("b", best_round=20)], tmp_path / "figure.png")
    left, right = drawn[0].axes
    for line, label, best in zip(left.lines, ("a", "b"), (0, 1), strict=True):
        assert line.get_label() == label
        assert list(line.get_xdata()) == [10, 20]
        assert list(line.get_ydata()) == [75.0, 60.0]
        assert line.get_markevery() == [best]
    points = [scatter.get_offsets()[:, 1].tolist() for scatter in right.collections]
    assert points == [[50.0, 100.0], [40.0, 80.0]]


def test_figure_of_more_runs_than_colours(tmp_path):
    path = tmp_path / "figure.png"
    draw_accuracy([finished(f"a long method's name {i}") for i in range(9)], path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["figure.docx", "figure", "missing/figure.png"])
def test_figure_that_cannot_be_written_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="figure"):
        draw_accuracy([finished("pfedhn")], tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_figure_needs_test_examples(tmp_path):
    blank = replace(finished("pfedhn"), evaluations=(evaluation(10, "val", [5, 5]),))
    with pytest.raises(UserError, match="pfedhn has none"):
        draw_accuracy([blank], Path(tmp_path / "figure.png"))


def test_two_methods_are_drawn_against_each_other_client_by_client(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    novel = [evaluation(20, "novel", [2, correct]) for correct in (3, 9)]
    usual = finished("local", best_round=20)
    better = finished("pefll")
    usual, better = (
        replace(run, evaluations=(*run.evaluations, joined))
        for run, joined in zip((usual, better), novel, strict=True)
    )
    paired.draw(usual, better, tmp_path / "figure.png")
    (axes,) = drawn[0].axes
    assert "local" in axes.get_xlabel()
    assert "pefll" in axes.get_ylabel()
    assert axes.get_xlim() == axes.get_ylim() == pytest.approx((-3, 103))
    for points, expected in zip(
        axes.collections, ([(40, 50), (80, 100)], [(20, 20), (30, 90)]), strict=True
    ):
        # Moved aside by less than what parts two neighbouring accuracies.
        for (x, y), (across, up) in zip(points.get_offsets().tolist(), expected, strict=True):
            assert (x, y) == pytest.approx((across, up), abs=1.2)
    told = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert told == ["trained together (2 clients)", "joined afterwards (2 clients)"]


def test_methods_that_saw_other_data_are_not_drawn_against_each_other(tmp_path):
    with pytest.raises(UserError, match="must have seen the same data"):
        paired.draw(finished("a"), finished("b", data_fingerprint="d"), tmp_path / "figure.png")
    with pytest.raises(UserError, match=r"must end in .*, \.png, "):
        paired.draw(finished("a"), finished("b"), tmp_path / "figure.txt")


@pytest.mark.parametrize(
    ("own", "others", "said"),
    [
        (0.956, 0.956, True),
        (0.5, 0.496, True),
        (0.5, 0.494, False),  # by more than one per cent of it
        (0.9, 0.8, False),
        (-0.1, -0.9, False),
    ],
)
def test_models_that_are_not_personal_are_remarked_upon(own, others, said):
    told = remark({"test_accuracy": own, "others_accuracy": others})
    assert (told is not None) == said
    if told:
        assert f"is {percent(own)} % right and that of another client {percent(others)} %" in told


@pytest.mark.parametrize("split", ["test", "novel"])
def test_clients_that_numbers_are_without_are_remarked_upon(split):
    whole = {"evaluated": "9 of 9", "novel_evaluated": "2 of 2"}
    assert remark(whole) is None
    key = "evaluated" if split == "test" else "novel_evaluated"
    told = remark(whole | {key: "1 of 2"})
    assert told is not None
    assert told.startswith(f"evaluated 1 of 2 clients: the {split} numbers are without")


def test_clients_that_were_always_lost_are_named_but_not_all_of_many():
    assert remarks({"always_lost": None}) == remarks({}) == []
    (told,) = remarks({"always_lost": [f"c{number}" for number in range(12)]})
    assert told.startswith("lost in every round that was to have them: c0, c1, c2, ")
    assert "c8, c9 and 2 more; log.txt" in told


@pytest.mark.parametrize(("delta", "clients", "told"), [(0.2, 5, True), (0.19, 5, False)])
def test_a_delta_that_one_client_drawn_at_random_keeps_is_remarked_upon(delta, clients, told):
    spent = {"epsilon_spent": 8.0, "delta": delta, "noise": "drawn at the sites"}
    of_samples = {"privacy": spent}
    of_clients = {"privacy": spent | {"epsilon_of_clients": [8.0] * clients}}
    assert ("1 in 5 clients" in remarks(of_clients)[0]) is told
    (without,) = remarks(of_samples)
    assert without.endswith("noise drawn at the sites")


def test_where_nothing_was_measured_nothing_is_remarked():
    assert remark({"test_accuracy": 0.9, "others_accuracy": None}) is None
    assert remark({"others_accuracy": None}) is None


@pytest.mark.parametrize("metric", ["accuracy", "rmse"])
def test_where_nobody_is_tested_it_is_said(metric):
    told = remark({"metric": metric, f"test_{metric}": None, f"others_{metric}": None})
    assert "no client has an example to test with" in told


def test_methods_are_compared_on_the_same_clients():
    # Two clients have test examples: 5 and 10 of ten, 8 and 9, and 2 and 9 right at round 10.
    found = (evaluation(10, "test", [8, 9]), evaluation(10, "test", [2, 9]))
    runs = [
        finished("local"),
        replace(finished("best", test_accuracy=0.85), evaluations=found[:1]),
        replace(finished("worse", test_accuracy=0.55), evaluations=found[1:]),
        finished("elsewhere", data_fingerprint="other"),
    ]
    local, best, worse, elsewhere = paired.pair(runs, compare(runs))
    assert [pair.best for pair in (local, best, worse, elsewhere)] == ["best"] * 3 + [None]
    assert (local.over_local, best.to_best, elsewhere.to_best) == (None, None, None)
    assert elsewhere.over_local is None
    assert worse.to_best is not None
    assert worse.to_best.mean == pytest.approx((-0.6 + 0.0) / 2)
    assert best.over_local is not None
    assert best.over_local.mean == pytest.approx((0.3 - 0.1) / 2)
    assert best.over_local.gaining == 0.5
    printed = StringIO()
    Console(width=80, file=printed).print(*paired.tables([local, best, worse, elsewhere]))
    rows = printed.getvalue().splitlines()[2:]
    assert rows[1].split() == ["best", "best", "+10.0", "[-244.1,", "264.1]", "noise", "50.0"]
    assert rows[3].split() == ["elsewhere", "–", "–", "–"]


def of_settings(test_accuracies, vals):
    """A run for each rate of one method, and one of another method that is between them."""
    runs = []
    for rate, (test, val) in enumerate(zip(test_accuracies, vals, strict=True)):
        run = finished("pefll", test_accuracy=test)
        run.config["method"] |= {"lr": rate}
        found = [evaluation(10, "test", [5, 5])]
        found += [evaluation(10, "val", [val, val])] if val is not None else []
        runs.append(replace(run, evaluations=found))
    return [*runs, finished("fedavg", test_accuracy=0.75)]


@pytest.mark.parametrize(
    ("vals", "test_accuracies", "best"),
    [
        ((3, 6, 5), (0.9, 0.8, 0.7), "pefll lr=1"),
        ((3, 6, 5), (0.9, 0.7, 0.8), "fedavg"),
        ((3, None, 5), (0.9, 0.8, 0.7), "pefll lr=0"),  # nothing to choose by
    ],
)
def test_no_setting_of_a_method_is_the_best_by_its_test_data(vals, test_accuracies, best):
    runs = of_settings(test_accuracies, vals)
    for pairs in (paired.pair(runs, compare(runs)), paired.pair_groups(runs, compare(runs))):
        assert {one.best for one in pairs} == {best}
        assert [one.to_best is None for one in pairs] == [one.label == best for one in pairs]
    alone = runs[:-1]  # a method that nothing is compared with has a best setting, too
    chosen = "pefll lr=0" if None in vals else "pefll lr=1"
    assert {one.best for one in paired.pair(alone, compare(alone))} == {chosen}
    named = {f"row {number}": [run] for number, run in enumerate(runs)}
    of_rows = paired.pair_labelled(named, ACCURACY)
    assert {one.best for one in of_rows} == {"row 0"}  # of tables, each a method of its own


def test_methods_are_compared_on_the_clients_that_joined_afterwards_too():
    """By the run that is best on known clients, which is not the one that serves newcomers best."""
    of_best = (evaluation(10, "test", [8, 9]), evaluation(20, "novel", [3, 5]))
    of_other = (evaluation(10, "test", [2, 9]), evaluation(20, "novel", [7, 8]))
    runs = [
        replace(finished("best", test_accuracy=0.85), evaluations=of_best),
        replace(finished("other", test_accuracy=0.55), evaluations=of_other),
    ]
    best, other = paired.pair(runs, compare(runs))
    assert best.novel_to_best is None
    assert other.novel_to_best is not None
    assert other.novel_to_best.mean == pytest.approx((0.4 + 0.3) / 2)
    assert other.by_name["novel_to_best"]["clients"] == 2
    printed = StringIO()
    Console(width=100, file=printed).print(*paired.tables([best, other]))
    heads, *_, last = printed.getvalue().splitlines()[1:]
    assert "afterwards" in heads
    assert last.split()[4:8] == ["noise", "+35.0", "[-28.5,", "98.5]"]


def test_seeds_are_compared_together_on_those_that_both_have():
    """Two of ten more in one seed and three in the other, each for one of two clients."""
    shown = {"good": ([8, 9], [7, 9]), "bad": ([6, 9], [4, 9]), "local": ([5, 9], [5, 9])}
    tested = {"good": (0.7, 0.95), "bad": (0.8, 0.6), "local": (0.7, 0.7)}  # one seed misleads
    runs = [
        replace(
            finished(
                method, seed, test_accuracy=tested[method][seed], data_fingerprint=f"data {seed}"
            ),
            evaluations=(evaluation(10, "test", right),),
        )
        for method, of_seeds in shown.items()
        for seed, right in enumerate(of_seeds)
    ]
    # Its only seed is the easier one: its mean is the highest, and it is beaten there.
    runs.append(finished("once", 1, test_accuracy=0.9, data_fingerprint="data 1"))
    good, bad, local, once = paired.pair_groups(runs, compare(runs))
    assert [one.label for one in (good, bad, local, once)] == [*shown, "once"]
    assert {one.best for one in (good, bad, local, once)} == {"good"}
    assert once.to_best is not None
    assert (once.to_best.seeds, once.to_best.mean) == (1, pytest.approx((-0.2 + 0.1) / 2))
    assert once.over_local is not None
    assert once.over_local.mean == pytest.approx(0.1 / 2)
    assert bad.to_best is not None
    assert (bad.to_best.clients, bad.to_best.mean) == (4, pytest.approx(-(0.2 + 0.3) / 4))
    assert good.over_local is not None
    assert good.over_local.mean == pytest.approx((0.3 + 0.2) / 4)
    assert (good.to_best, local.over_local) == (None, None)
    assert bad.by_name["to_best"]["seeds"] == 2
    assert bad.by_name["to_best"]["seeds_high"] == pytest.approx(
        stats.t.interval(0.95, 1, -0.125, 0.025)[1]
    )
    assert bad.by_name["to_best"]["mark"] == "noise"
    separately = paired.pair(runs, compare(runs))
    assert [one.best for one in separately[:2]] == ["bad seed=0", "good seed=1"]
    assert separately[0].over_local is not None
    assert separately[0].over_local.mean == pytest.approx(0.3 / 2)
    ahead = [*runs[:-1], replace(runs[-1], summary={**runs[-1].summary, "test_accuracy": 0.96})]
    good, *_ = paired.pair_groups(ahead, compare(ahead))
    assert (good.best, good.seeds) == ("once", 2)
    printed = StringIO()
    Console(width=120, file=printed).print(*paired.tables([good]))
    assert "noise, 1 seed" in printed.getvalue()


def test_a_seed_that_ran_twice_is_no_more_of_a_mean_than_another():
    """Over runs the first has the higher mean, over seeds the second."""
    runs = [
        finished(method, seed, test_accuracy=accuracy, data_fingerprint=f"data {seed}")
        for method, seed, accuracy in (
            *(("often", 0, 0.9), ("often", 0, 0.9), ("often", 1, 0.3)),
            *(("once", 0, 0.8), ("once", 1, 0.5)),
        )
    ]
    pairs = paired.pair_groups(runs, compare(runs))
    assert [(one.best, one.seeds) for one in pairs] == [("once", 2)] * 2


def test_a_gain_over_local_is_over_the_one_with_most_settings_alike():
    def of(method, correct, **settings):
        run = finished(method)
        run.config["method"] |= settings
        return replace(run, evaluations=(evaluation(10, "test", correct),))

    short, long = {"local_steps": 5, "local_lr": 0.1}, {"local_steps": 50, "local_lr": 0.1}
    runs = [
        of("local", [2, 2], **short),
        of("local", [6, 6], **long),
        of("fedper", [7, 7], **short, lr=1),
        of("fedper", [8, 8], **long, lr=2),
    ]
    pairs = paired.pair(runs, compare(runs))
    assert [one.over_local and one.over_local.mean for one in pairs] == [
        *(None, None, pytest.approx(0.5), pytest.approx(0.2))
    ]
    printed = StringIO()
    Console(width=120, file=printed).print(*paired.tables(pairs))
    assert [line.split()[-1] for line in printed.getvalue().splitlines()[-2:]] == ["100.0"] * 2
    names = ["local local_steps=5", "local local_steps=50"]
    assert [one.by_name["local"] for one in pairs] == [None, None, *names]
    assert paired.told_of_local(pairs) == [
        f"gains over local are over {name} of {one.label}"
        for name, one in zip(names, pairs[2:], strict=True)
    ]
    assert paired.told_of_local(paired.pair(runs[1:], compare(runs[1:]))) == []


@pytest.mark.parametrize(
    ("seen", "same"),
    [
        ({"a": "xy", "b": "xy"}, True),  # a division for each seed
        ({"a": "xx", "b": "x"}, True),
        ({"a": "xy", "b": "xz"}, False),
        ({"a": "xy", "b": "x"}, False),  # a mean over one division more
        ({"a": "x", "b": "y"}, False),
        ({"a": "xy"}, True),
    ],
)
def test_methods_compare_that_saw_the_same_data_over_all_their_seeds(
    seen: dict[str, str], same: bool
) -> None:
    runs = [
        finished(method, seed, data_fingerprint=data)
        for method, of_seeds in seen.items()
        for seed, data in enumerate(of_seeds)
    ]
    assert saw_the_same(compare(runs)) is same


def test_runs_are_named_by_the_settings_that_tell_most_of_them_apart():
    runs = [finished("fedavg") for _ in range(4)]
    for number, run in enumerate(runs):
        run.config["method"] |= {"a": number // 2, "b": number // 2, "c": number // 2}
        run.config["method"] |= {"d": number % 2, "e": number % 2}
    assert [row.label for row in compare(runs)] == [
        "fedavg a=0 b=0 d=0",
        "fedavg a=0 b=0 d=1",
        "fedavg a=1 b=1 d=0",
        "fedavg a=1 b=1 d=1",
    ]


def test_a_seed_does_not_make_runs_unlike():
    runs = [finished(method, seed) for method, seed in (("pfedhn", 0), ("local", 0), ("local", 1))]
    for run, cohort in zip(runs, (0.1, 0.2, 0.1), strict=True):
        run.config["cohort"] = cohort
    assert most_alike(runs[0], runs[1:]) == [1, 0]

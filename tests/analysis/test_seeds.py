"""Several seeds: which are asked for, and mean and spread by hand."""

from dataclasses import replace
from io import StringIO
from itertools import permutations

import pytest
from rich.console import Console

from finished_runs import finished, row
from hyperfed.analysis.comparison import compare
from hyperfed.analysis.differences import differences
from hyperfed.analysis.seeds import asked_for, of_option, over_seeds, tables
from hyperfed.errors import UserError
from hyperfed.metrics import RMSE
from hyperfed.runs.config import load


def test_a_range_is_a_run_for_each_seed_and_anything_else_one_run():
    assert asked_for(["rounds=5", "seed=2..4"]) == [
        ["rounds=5", "seed=2"],
        ["rounds=5", "seed=3"],
        ["rounds=5", "seed=4"],
    ]
    assert asked_for(["seed=0..0"]) == [["seed=0"]]
    for settings in ([], ["seed=3"], ["seed=0.."], ["method.seeds=0..2"]):
        assert asked_for(settings) == [settings]
    with pytest.raises(UserError, match=r"got seed=2\.\.1; write seed=1\.\.2"):
        asked_for(["seed=2..1"])


def test_the_option_says_how_many_or_which():
    assert [list(of_option(text)) for text in ("1", "3", "0..2", "4..5", "7..7")] == [
        *([0], [0, 1, 2], [0, 1, 2], [4, 5], [7])
    ]
    assert of_option("1000") == range(1000)
    for text in ("0", "1001", "-1", "1..", "1,2", "two", "", "9" * 5000):
        with pytest.raises(UserError, match=r"--seeds must be how many, from 1 to 1000, or which"):
            of_option(text)
    with pytest.raises(UserError, match=r"got --seeds 2\.\.1; write --seeds 1\.\.2"):
        of_option("2..1")
    with pytest.raises(UserError, match=r"must be 1000 at most, .* got --seeds 0\.\.1000, 1001;"):
        of_option("0..1000")


def test_more_seeds_than_anybody_trains_are_refused_before_they_are_listed():
    assert len(asked_for(["seed=1..1000"])) == 1000
    with pytest.raises(UserError, match=r"must be 1000 at most, .* got seed=0\.\.1000, 1001;"):
        asked_for(["seed=0..1000"])
    with pytest.raises(UserError, match=r"must be 1000 at most"):
        asked_for(["seed=0..999999999999999999"])
    (settings,) = asked_for([f"seed=0..{'9' * 5000}"])
    with pytest.raises(UserError, match="seed: must be a valid integer"):
        load("fedavg", settings)


@pytest.mark.parametrize(
    ("settings", "seeds"),
    [
        (["seed=0..2", "seed=5"], [5]),
        (["seed=5", " seed = 0..2"], [0, 1, 2]),
        (["seed=0..2", "seed=3..4"], [3, 4]),
        (["seed=2..1", "seed=7"], [7]),
    ],
)
def test_of_seeds_that_are_given_twice_the_last_counts_as_of_every_key(settings, seeds):
    runs = [load("fedavg", own) for own in asked_for([*settings, "rounds=5", "rounds=3"])]
    assert [(run.seed, run.rounds) for run in runs] == [(seed, 3) for seed in seeds]


def test_mean_and_spread_are_those_over_the_seeds_of_a_method():
    rows = [row("b", 0, 0.5, 0.1), row("a", 0, 0.7), row("b", 1, 0.6, 0.3), row("b", 2, 0.76, 0.2)]
    b, a = over_seeds(rows)
    assert (b.method, b.seeds, a.method, a.seeds) == ("b", (0, 1, 2), "a", (0,))
    assert b.test.mean == pytest.approx(0.62)  # and not the median
    assert b.val.mean == pytest.approx(0.52)
    assert b.test.std == pytest.approx(0.0172**0.5)  # sqrt((0.0144 + 0.0004 + 0.0196) / 2)
    assert b.worst_decile.mean == pytest.approx(0.31)
    assert b.worst_decile.std == pytest.approx(0.0172**0.5 / 2)
    assert b.novel.mean == pytest.approx(0.2)
    assert b.novel.std == pytest.approx(0.1)
    assert (b.bytes_down, b.bytes_up, b.seconds) == (2_000_000, 0, 2.0)
    assert (a.test.mean, a.test.std) == (0.7, None)
    assert a.by_name == {
        **{
            "group": "a",
            "method": "a",
            "seeds": (0,),
            "val_accuracy_mean": 0.6,
            "val_accuracy_std": None,
            "test_accuracy_mean": 0.7,
            "test_accuracy_std": None,
        },
        **{"worst_decile_accuracy_mean": 0.35, "worst_decile_accuracy_std": None},
        **{"novel_accuracy_mean": None, "novel_accuracy_std": None},
        **{"bytes_down": 1_000_000, "bytes_up": 0, "seconds": 0.0},
    }


def test_a_mean_over_fewer_runs_than_there_are_is_none():
    (spread,) = over_seeds([row("a", 0, 0.5, 0.4), row("a", 1, 0.5), row("a", 2, 0.5, 0.6)])
    assert spread.novel is None
    assert spread.test.std == 0


def test_the_table_has_every_number_in_80_columns():
    printed = StringIO()
    rows = [row("pfedhn_pc", seed, 0.5 + 0.1 * seed, 1.0) for seed in range(3)]
    Console(width=80, file=printed).print(*tables(over_seeds(rows)))
    last = printed.getvalue().splitlines()[-1]
    assert last.split() == [
        *("pfedhn_pc", "3", "50.0", "±", "10.0", "60.0", "±", "10.0", "30.0", "±", "5.0"),
        *("100.0", "±", "0.0"),
        *("2.0", "0.0", "2.0"),
    ]


def test_runs_belong_together_that_differ_by_their_seeds_alone():
    runs = [finished("pfedla", seed) for seed in (0, 1, 0, 1, 2)]
    for run, retain in zip(runs, (1, 1, 2, 2, 1), strict=True):
        run.config["method"] |= {"retain": retain, "lr": 0.1}
    runs[4].config["method"]["new"] = True  # of a version that the others did not know
    runs[1].config["engine"]["name"] = "vmap"  # changes no number
    one, two, local = over_seeds(compare([*runs, finished("local", 3)]))
    assert (one.group, one.seeds) == ("pfedla retain=1", (0, 1, 2))
    assert (two.group, two.seeds) == ("pfedla retain=2", (0, 1))
    assert (local.group, local.seeds) == ("local", (3,))


def test_one_client_and_all_of_them_are_equal_numbers_and_no_seeds():
    runs = [finished("fedavg", seed) for seed in (0, 1, 0, 1)]
    for run, cohort in zip(runs, (1, 1, 1.0, 1.0), strict=True):
        run.config["cohort"] = cohort
    rows = compare(runs)
    told = {one.group: one.seeds for one in over_seeds(rows)}
    assert told == {"fedavg cohort=1": (0, 1), "fedavg cohort=1.0": (0, 1)}
    assert {*differences(runs, rows)["cohort"]} == {"1", "1.0"}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_what_a_run_lacks_belongs_to_none_whose_value_is_another(order: tuple[int, ...]):
    runs = [finished("mine", seed) for seed in range(3)]
    for run, rate in zip(runs[1:], (0.1, 9.0), strict=True):
        run.config["method"]["rate"] = rate  # of a version that the first did not know
    of_seeds = {one.seeds for one in over_seeds(compare([runs[number] for number in order]))}
    assert of_seeds == {(0,), (1,), (2,)}


def test_what_an_older_run_lacks_is_its_default():
    runs = [finished("fedavg", seed) for seed in range(4)]
    for run, steps in zip(runs[1:], (0, 20, 20), strict=True):
        run.config["serve"] = {"finetune_steps": steps}
    plain, tuned = over_seeds(compare(runs))
    assert (plain.group, plain.seeds) == ("fedavg serve.finetune_steps=0", (0, 1))
    assert (tuned.group, tuned.seeds) == ("fedavg serve.finetune_steps=20", (2, 3))
    runs = [finished("local", seed) for seed in range(2)]
    for kept in (True, False):  # it did before there was a key that says so
        runs[1].config["method"]["keep_momentum"] = kept
        assert len(over_seeds(compare(runs))) == (1 if kept else 2)


def test_a_seed_that_ran_twice_counts_as_one_and_each_metric_has_a_table():
    rows = [row("a", 0, 0.5), row("a", 1, 0.5), row("a", 0, 0.7)]
    (twice,) = over_seeds(rows)
    assert twice.seeds == (0, 1)
    assert twice.test.mean == pytest.approx((0.6 + 0.5) / 2)
    assert twice.test.std == pytest.approx(0.005**0.5)  # of two seeds, and not of three
    (alone,) = over_seeds(rows[::2])
    assert (alone.test.mean, alone.test.std) == (pytest.approx(0.6), None)
    printed = StringIO()
    of_both = over_seeds([*rows, replace(row("a", 0, 0.25), metric=RMSE)])
    Console(width=80, file=printed).print(*tables(of_both))
    lines = [line.split() for line in printed.getvalue().splitlines() if line.startswith("a ")]
    assert [line[:3] for line in lines] == [["a", "2", "45.0"], ["a", "1", "0.1500"]]

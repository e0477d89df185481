"""What is tried: which points there are, and which of them is the best, by hand."""

from dataclasses import replace

import pytest

from finished_runs import row
from hyperfed.analysis.tried import best, points, source
from hyperfed.errors import UserError
from hyperfed.metrics import RMSE
from hyperfed.runs.experiments import MOST_SEEDS

RATE = "method.local_lr"
LOW, MIDDLE, HIGH = ((f"{RATE}={rate}",) for rate in ("1e-3", "0.01", "0.1"))


def test_all_values_are_tried_with_all_others() -> None:
    assert points([], [[]]) == [()]
    assert points([f"{RATE} = 0.1, 0.2,0.1", "preset=paper,default"], [["rounds=3"]]) == [
        (f"{RATE}=0.1", "preset=paper"),
        (f"{RATE}=0.1", "preset=default"),
        (f"{RATE}=0.2", "preset=paper"),
        (f"{RATE}=0.2", "preset=default"),
    ]
    assert len(points(["rounds=" + ",".join(map(str, range(MOST_SEEDS)))], [[]])) == MOST_SEEDS


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        (["rounds=3"], "KEY=VALUE,VALUE with two values or more, came rounds=3"),
        (["rounds=3,3"], "two values or more, came rounds=3,3"),
        (["rounds=3,"], "two values or more, came rounds=3,"),
        (["rounds"], "two values or more, came rounds"),
        (["seed=0,1"], r"no seeds, which are written seed=0\.\.2, came seed=0,1"),
        (["rounds=3,4", "rounds=5,6"], "once of each key, came rounds twice"),
        (["cohort=3,4"], "once of each key, came cohort twice"),
        (["rounds=3,4", "evaluate_every=" + ",".join(map(str, range(1, 252)))], "came 1004; try"),
    ],
)
def test_what_is_no_grid_is_refused(tried: list[str], message: str) -> None:
    each = [["cohort=2", f"seed={seed}"] for seed in (0, 1)]
    with pytest.raises(UserError, match=message):
        points(tried, each)


def test_a_method_that_is_tried_takes_the_place_of_the_one_that_is_named() -> None:
    assert source((), "fedavg") == source(LOW, "fedavg") == "fedavg"
    assert source((*LOW, "method=fedper"), "fedavg") == "fedper"
    assert source(("method.name=fedper",), "fedavg") == "fedper"
    assert source(("method=fedper",), "mine.toml") == "mine.toml"  # with its other settings


def test_the_best_has_the_best_mean_over_seeds_on_validation_data() -> None:
    rows = [row("a", seed, accuracy) for accuracy in (0.3, 0.5, 0.4) for seed in (0, 1)]
    rows[4] = replace(rows[4], val=0.45)  # better than either of the middle, but not on average
    rows[0] = replace(rows[0], test=0.9)
    of = [point for point in (LOW, MIDDLE, HIGH) for _ in (0, 1)]
    expected = [f"a: best by validation data with {RATE}=0.01 (40.0 %)"]
    assert list(best(rows, of, of, 2)) == expected
    assert list(best(rows[:5], of[:5], of, 2)) == expected  # of the last one's seeds one diverged
    apart = [rows[0], rows[3]], [of[0], of[3]]  # of each one seed, not the same
    none = "a: no validation data say which is the best, as none came to something with each of its"
    assert list(best(*apart, of, 2)) == [f"{none} seeds"]


def test_the_best_is_by_the_number_that_runs_choose_their_best_round_by() -> None:
    rows = [row("a", 0, 0.5), row("a", 0, 0.4)]
    masked = [
        replace(it, chosen=("masked_accuracy", value))
        for it, value in zip(rows, (0.6, 0.7), strict=True)
    ]
    told = "a: best by validation data with"
    assert list(best(masked, [LOW, HIGH], [LOW, MIDDLE, HIGH], 1)) == [
        f"{told} {RATE}=0.1 (70.0 % masked_accuracy); {RATE}=0.1 is the greatest tried: try more"
    ]
    mixed = [rows[0], masked[1], replace(row("b", 0, 0.2), chosen=("zeroed_accuracy", 0.3))]
    points_of = [("best=accuracy",), ("best=masked_accuracy",), ("rounds=1",)]
    assert list(best(mixed, points_of, points_of[:2], 1)) == [
        f"{told} best=accuracy (40.0 %)",  # by what both have
        "b: best by validation data with rounds=1 (30.0 % zeroed_accuracy)",
    ]


def test_where_the_best_lies_at_an_end_of_what_was_tried_it_says_so() -> None:
    rows = [row("a", 0, accuracy) for accuracy in (0.2, 0.5, 0.3)]
    of = [(*LOW, "rounds=9"), (*HIGH, "rounds=10"), (*MIDDLE, "rounds=10")]
    (told,) = best(rows, of, of, 1)
    assert told == (
        f"a: best by validation data with {RATE}=0.1 rounds=10 (40.0 %); "
        f"{RATE}=0.1 is the greatest tried: try more; rounds=10 is the greatest tried: try more"
    )
    errors = [replace(it, metric=RMSE) for it in rows]  # whose first is now the best
    (told,) = best(errors, of, of, 1)
    assert told.startswith(f"a: best by validation data with {RATE}=1e-3 rounds=9 (0.1000); ")
    assert f"{RATE}=1e-3 is the least tried: try less" in told
    alone = [*best(rows[2:], of[2:], [of[2], (*HIGH, "rounds=9")], 1)]  # the other came to nothing
    assert alone == [
        f"a: best by validation data with {RATE}=0.01 rounds=10 (20.0 %); "
        f"{RATE}=0.01 is the least tried: try less; rounds=10 is the greatest tried: try more"
    ]


def test_words_have_no_ends_and_each_method_has_a_best_of_its_own() -> None:
    rows = [row("a", 0, 0.4), row("a", 0, 0.3), row("b", 0, 0.3), row("b", 0, 0.4)]
    of = [("preset=paper",), ("preset=default",)] * 2
    told = list(best(rows, of, of, 1))
    assert told == [
        "a: best by validation data with preset=paper (30.0 %)",
        "b: best by validation data with preset=default (30.0 %)",
    ]
    cohorts = [("cohort=1",), ("cohort=1.0",)]  # one client, and all
    assert list(best(rows[:2], cohorts, cohorts, 1)) == [
        "a: best by validation data with cohort=1 (30.0 %)"
    ]
    blind = [replace(it, val=None) for it in rows[:2]]
    assert list(best(blind, of[:2], of, 1)) == ["a: no validation data say which is the best"]

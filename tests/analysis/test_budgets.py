"""Runs as of when they had spent a budget, against what stands in their evaluations."""

from dataclasses import replace
from statistics import fmean

import pytest
import torch

from finished_runs import Finished, evaluation, finished
from hyperfed.analysis.budgets import Budget, budget_of, within
from hyperfed.analysis.comparison import compare
from hyperfed.errors import UserError
from hyperfed.metrics import RMSE
from hyperfed.runs.config import from_keys
from hyperfed.runs.records import REHEARSAL, Evaluation, Lost, summarise

VAL = {5: [7, 8], 10: [8, 9], 15: [9, 8], 20: [9, 9]}
TEST = {5: [9, 9], 10: [5, 10], 15: [6, 7], 20: [4, 8]}


def run(method: str = "pefll", mb: float = 2.0, **config: object) -> Finished:
    """Four evaluations, the first the best on test data; ``mb`` travel in each round."""
    done = finished(method, best_round=20, test_accuracy=0.6, novel_accuracy=0.4)
    bytes_down, bytes_up = round(mb * 0.75e6), round(mb * 0.25e6)
    told = [
        replace(
            evaluation(number, split, correct[number]),
            bytes_down=bytes_down * number,
            bytes_up=bytes_up * number,
            seconds=number / 4,
        )
        for number in TEST
        for split, correct in (("val", VAL), ("test", TEST))
    ]
    novel = replace(evaluation(20, "novel", [4, 4]), clients=(3,), bytes_down=bytes_down * 20)
    told.append(novel)
    return replace(done, config=done.config | {"cohort": 2, **config}, evaluations=tuple(told))


@pytest.mark.parametrize(
    ("budget", "ended", "best"),
    [
        (Budget("rounds", 14), 10, 10),
        (Budget("rounds", 15), 15, 10),  # the first of two that are as good by validation
        (Budget("mb", 20), 10, 10),
        (Budget("mb", 19.9), 5, 5),
        (Budget("client-visits", 39), 15, 10),
        (Budget("seconds", 1.25), 5, 5),
    ],
)
def test_a_run_ends_with_its_last_evaluation_within_the_budget(
    budget: Budget, ended: int, best: int
) -> None:
    ran = within(run(), budget)
    assert {e.split for e in ran.evaluations} == {"val", "test"}
    (row,) = compare([ran])
    assert (row.rounds, row.best_round) == (ended, best)
    assert row.test == pytest.approx(sum(TEST[best]) / 20)
    assert (row.bytes_down, row.bytes_up) == (1_500_000 * ended, 500_000 * ended)
    assert row.seconds == ended / 4
    assert row.novel is None  # who joined was served at the end of the run


def later_is_better(done: Finished) -> tuple[Evaluation, ...]:
    return tuple(
        replace(e, client_masked_accuracy=(e.round / 100,) * len(e.clients))
        for e in done.evaluations
    )


def test_the_best_round_is_by_the_number_that_the_settings_name() -> None:
    done = run(best="masked_accuracy")
    other = later_is_better(done)
    (row,) = compare([within(replace(done, evaluations=tuple(other)), Budget("rounds", 15))])
    assert row.best_round == 15


def test_a_rehearsal_counts_instead_of_validation() -> None:
    done = run()
    rehearsed = [
        replace(e, split=REHEARSAL, client_accuracy=(1 / e.round, 0.5, None))
        for e in done.evaluations
        if e.split == "val"
    ]
    other = replace(done, evaluations=(*done.evaluations, *rehearsed))
    (row,) = compare([within(other, Budget("rounds", 15))])
    assert row.best_round == 5


def test_a_run_in_python_is_held_to_its_own_settings() -> None:
    config = from_keys("pefll", {"cohort": 1, "best": "masked_accuracy"})
    done = run()
    other = replace(done, config=config, evaluations=later_is_better(done))
    (row,) = compare([within(other, Budget("client-visits", 15))])
    assert (row.rounds, row.best_round) == (15, 15)


def test_without_validation_data_the_last_round_is_the_best() -> None:
    done = run()
    empty = [replace(e, count=(0, 0, 0)) if e.split == "val" else e for e in done.evaluations]
    without = [e for e in done.evaluations if e.split != "val"]
    for other in (empty, without):
        (row,) = compare([within(replace(done, evaluations=tuple(other)), Budget("rounds", 15))])
        assert row.best_round == 15


BY_CLIENT = ["accuracy", "masked_accuracy", "zeroed_accuracy"]


def scored(done: Finished, name: str, scores: dict[int, list[float]]) -> Finished:
    """Validates three clients, whose scores are given by round; the first may be missing, None."""
    told = []
    for e in done.evaluations:
        if e.split != "val":
            told.append(e)
            continue
        own = scores[e.round]
        there = [value for value in own if value is not None]
        more = {name: fmean(there), f"client_{name}": tuple(own)}
        missed = () if there == own else (Lost(0, "gone"),)
        count = tuple(10 * (value is not None) for value in own)
        told.append(replace(e, **more, count=count, missed=missed))
    return replace(done, config=done.config | {"best": name}, evaluations=tuple(told))


@pytest.mark.parametrize("name", BY_CLIENT)
def test_where_scores_may_be_lies_the_least_and_the_greatest_do_not_choose(name: str) -> None:
    scores = {5: [0.5, 0.5, 0.5], 10: [0.4, 0.4, 1.0], 15: [0.3, 0.6, 0.6], 20: [0, 0, 0]}
    for robust, best in [({"aggregation": "median", "hostile": 0.25}, 15), ({}, 10)]:
        (row,) = compare([within(scored(run(robust=robust), name, scores), Budget("rounds", 15))])
        assert row.best_round == best, robust


@pytest.mark.parametrize("name", BY_CLIENT)
def test_rounds_are_compared_on_the_clients_that_both_have(name: str) -> None:
    scores = {5: [0.9, 0.5, 0.5], 10: [None, 0.6, 0.6], 15: [0, 0, 0], 20: [0, 0, 0]}
    done = scored(run(), name, scores)
    (row,) = compare([within(done, Budget("rounds", 10))])
    assert row.best_round == 10  # of those that were there each is better


def test_a_record_without_zeroed_accuracy_by_client_goes_by_that_of_all_examples() -> None:
    """As of before it was told; also where only a part of them was, by a resumed run."""
    scores = {5: [0.5, 0.5, 0.5], 10: [0.4, 0.4, 1.0], 15: [0.3, 0.6, 0.6], 20: [0, 0, 0]}
    done = scored(run(robust={"aggregation": "median"}), "zeroed_accuracy", scores)
    for last in (20, 5):
        older = [
            replace(e, client_zeroed_accuracy=()) if e.round <= last else e
            for e in done.evaluations
        ]
        (row,) = compare([within(replace(done, evaluations=tuple(older)), Budget("rounds", 15))])
        assert row.best_round == 10


def test_a_round_without_test_data_is_not_the_best() -> None:
    """As where a run was killed between the two, and goes on without an evaluation there."""
    done = run()
    early = replace(done.evaluations[0], round=4, client_accuracy=(1.0, 1.0, None))
    (row,) = compare(
        [within(replace(done, evaluations=(early, *done.evaluations)), Budget("rounds", 10))]
    )
    assert row.best_round == 10


def by_error(number: int, split: str, errors: list[float]) -> Evaluation:
    """Two clients, of 30 examples and of 10, each with one error on all of them."""
    squares = [-30 * errors[0] ** 2, -10 * errors[1] ** 2]
    sums = {"count": torch.tensor([30.0, 10.0]), "correct": torch.tensor(squares)}
    return summarise(
        round=number, split=split, clients=[0, 1], count=[30, 10], correct=squares,
        masked_correct=squares, zeroed_correct=squares, loss=[0.0, 0.0], bytes_down=0,
        bytes_up=0, seconds=0.0, metric=RMSE, counts=sums,
    )  # fmt: skip


def test_of_errors_the_best_round_has_the_least_over_all_examples() -> None:
    """The mean of the clients' errors is less in the first round, that of squares in the other."""
    shown = {5: [5.0, 1.0], 10: [4.0, 5.0], 20: [9.0, 9.0]}
    told = [by_error(n, split, errors) for n, errors in shown.items() for split in ("val", "test")]
    done = replace(finished("fedavg", metric="rmse"), evaluations=tuple(told))
    ran = within(done, Budget("rounds", 10))
    assert ran.summary["best_round"] == 10
    assert ran.summary["test_rmse"] == pytest.approx(18.25**0.5)


def test_a_run_that_spent_no_more_is_as_it_was() -> None:
    done = run()
    assert within(done, Budget("mb", 40)) is done


def test_without_a_number_the_budget_is_what_the_thriftiest_spent_that_spent_anything() -> None:
    runs = [run("local", mb=0), run("fedavg", mb=1), run()]
    assert budget_of("mb", runs) == Budget("mb", 20)
    assert budget_of("mb=0.5", runs) == Budget("mb", 0.5)
    assert budget_of("mb", runs[:1]) == Budget("mb", 0)
    assert [row.rounds for row in compare([within(r, Budget("mb", 20)) for r in runs])] == [
        *(20, 20, 10)
    ]


@pytest.mark.parametrize("text", ["mb=", "mb=much", "mb=0", "mb=-3", "mb=nan"])
def test_a_budget_must_be_a_number(text: str) -> None:
    with pytest.raises(UserError, match=r"must be mb=NUMBER with a number above 0, .* came 'mb="):
        budget_of(text, [run()])


def test_what_cannot_be_compared_so_is_told() -> None:
    with pytest.raises(UserError, match="one of rounds, client-visits, mb, seconds, came 'epochs'"):
        budget_of("epochs=3", [run()])
    with pytest.raises(UserError, match=r"within mb=9, but one of pefll was first at 10; take mb="):
        within(run(), Budget("mb", 9))
    with pytest.raises(UserError, match="has no summary; resume it first"):
        within(replace(run(), summary=None), Budget("mb", 9))
    odd = run(mb=2.000002)
    with pytest.raises(UserError, match=r"take mb=10\.00000") as refused:
        within(odd, Budget("mb", 9))
    said = str(refused.value).partition("; take ")[2].split()[0]
    assert within(odd, budget_of(said, [odd])).summary["rounds"] == 5
    done = run()
    late = tuple(e for e in done.evaluations if e.split == "val" or e.round > 5)
    with pytest.raises(UserError, match=r"but one of pefll was first at 20; take mb=20 or more"):
        within(replace(done, evaluations=late), Budget("mb", 10))
    untested = replace(done, evaluations=tuple(e for e in late if e.split == "val"))
    with pytest.raises(UserError, match="evaluated on test data, but one was not"):
        budget_of("mb", [untested])


def test_what_is_pooled_of_older_records_is_not_the_accuracy():
    scores = {5: [0.5, 0.5, 0.5], 10: [0.4, 0.4, 1.0], 15: [0.3, 0.6, 0.6], 20: [0, 0, 0]}
    done = scored(run(), "zeroed_accuracy", scores)
    older = tuple(
        replace(
            e,
            client_zeroed_accuracy=(),
            client_accuracy=(1 / e.round,) * 3,
            client_masked_accuracy=(1 / e.round,) * 3,
        )
        for e in done.evaluations
    )
    (row,) = compare([within(replace(done, evaluations=older), Budget("rounds", 15))])
    assert row.best_round == 10

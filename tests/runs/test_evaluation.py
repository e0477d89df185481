"""An evaluation that misses clients: what counts, what is told, and which round is the best."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hyperfed
from hyperfed.data.own import mean_squared_error, minus_squared_error
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.federation import Client
from hyperfed.runs import progress
from hyperfed.runs.config import from_keys
from hyperfed.runs.evaluation import (
    SUMS,
    Counts,
    all_together,
    chosen_by,
    evaluate,
    exchanged,
    is_better,
)
from hyperfed.runs.remarks import remark
from hyperfed.runs.run import Progress, Run
from hyperfed.trees import Tree
from toys import Federation, make_quadratic_task, make_task

KEYS: dict[str, Any] = {
    "rounds": 4,
    "cohort": 1.0,
    "evaluate_every": 1,
    "method": {"local_steps": 1},
}


def counts(*correct: float | None, of: int = 10) -> Counts:
    """Of clients with ``of`` examples each; None for who is missed."""
    right = torch.tensor([0.0 if c is None else c for c in correct], dtype=torch.float64)
    there = torch.tensor([float(c is not None) * of for c in correct], dtype=torch.float64)
    missed = {client: "gone" for client, c in enumerate(correct) if c is None}
    return Counts(there, right, right / 2, 1.0 * right, right, missed)


@pytest.mark.parametrize(
    ("now", "before", "better"),
    [
        (counts(6, 6), counts(5, 6), True),
        (counts(5, 6), counts(5, 6), False),
        (counts(14, 1, of=25), counts(15, 0, of=25), False),  # 14 / 25 * 25 is not quite 14
        (counts(None, 9), counts(1, 9), False),  # on both it is as good
        (counts(None, 9), counts(9, 8), True),
        (counts(9, None), counts(None, 1), False),  # nobody was there both times
        (counts(None, None), counts(1, 1), False),
        (counts(None, None), counts(None, None), False),
        (counts(0, 0), counts(None, None), True),
        (counts(9, 1), counts(None, 2), False),
        (counts(0, 3), counts(None, 2), True),
        (counts(1, 1, of=0), counts(1, 1, of=0), True),  # nothing to choose by
        (counts(1, None, of=0), counts(1, 1), False),
    ],
)
def test_a_round_is_better_on_the_clients_that_both_have(
    now: Counts, before: Counts, better: bool
) -> None:
    ours, theirs = (chosen_by(each, range(2), "accuracy") for each in (now, before))
    assert is_better(ours, theirs) == better


def test_rounds_are_compared_by_the_number_that_was_asked_for() -> None:
    made = counts(4, 2)
    assert chosen_by(made, range(2), "masked_accuracy")["correct"].tolist() == [2, 1]
    assert chosen_by(made, range(2), "zeroed_accuracy")["correct"].tolist() == [4, 2]


@pytest.mark.parametrize(("rule", "best"), [("mean", 1), ("median", 2)])
def test_under_a_rule_against_lies_one_client_does_not_choose_the_round(
    rule: str, best: int
) -> None:
    run = Run(from_keys("fedavg", KEYS | {"robust.aggregation": rule}), make_task())
    for number, found in ((1, counts(5, 5, 5, 5)), (2, counts(6, 6, 6, 0))):
        run.round = number
        run._choose(found, list(range(4)))
    assert run.best.round == best


def test_counts_of_clients_of_several_sizes_are_in_the_order_that_was_asked_for() -> None:
    models = {size: nn.Linear(5, 3).double() for size in ("S", "L")}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    ours = Federation("local", task)
    ids = [3, 0, 1, 2]
    found = evaluate(ours.server, ours.engine, ids, 0)["test"]
    alone = [evaluate(ours.server, ours.engine, [client], 0)["test"] for client in ids]
    assert found.loss.tolist() == [float(one.loss) for one in alone]
    assert len({*found.loss.tolist()}) == 4


def test_a_client_may_count_once_whatever_number_of_examples_it_says() -> None:
    many = torch.tensor([10, 10, 10**8])
    first, second = (
        Counts(many.double(), (of * many).double(), *[torch.zeros(3).double()] * 3, {})
        for of in (torch.tensor([0.5, 0.5, 1.0]), torch.tensor([0.9, 0.9, 0.5]))
    )
    before, now = (chosen_by(c, range(3), "accuracy") for c in (first, second))
    assert not is_better(now, before)
    assert is_better(now, before, 0.25)
    nothing = chosen_by(counts(1, 1, of=0), range(2), "accuracy")
    assert is_better(nothing, nothing, 0.25)  # nothing to choose by


@pytest.mark.parametrize("lie", [-1e9, 1e9])
@pytest.mark.parametrize("clients", [3, 4, 5, 8])
def test_neither_the_least_nor_the_greatest_score_decides(clients: int, lie: float) -> None:
    def scores(*of: float) -> Any:
        there, none = torch.ones(len(of)).double(), torch.zeros(len(of)).double()
        made = Counts(there, torch.tensor(of).double(), none, none, none, {})
        return chosen_by(made, range(len(of)), "accuracy")

    lower, higher = ([of] * (clients - 1) for of in (0.5, 0.6))
    assert is_better(scores(*higher, lie), scores(*lower, -lie), 0.25)
    assert not is_better(scores(*lower, lie), scores(*higher, -lie), 0.25)
    assert is_better(scores(0.6), scores(0.5), 0.25)  # of one, and of two, there is nothing to cut
    assert is_better(scores(0.6, 0.6), scores(0.5, 0.5), 0.25)


def test_as_many_scores_are_left_out_as_a_rule_bears_clients() -> None:
    """Of 25, 0.28 are 7, in binary a little more: the eighth of the least counts."""
    ones, none = torch.ones(25).double(), torch.zeros(25).double()
    now, before = (
        chosen_by(Counts(ones, torch.tensor(of).double(), *[none] * 3, {}), range(25), "accuracy")
        for of in ([0.0] * 8 + [0.51] * 17, [0.5] * 25)
    )
    assert not is_better(now, before, 0.28)
    assert is_better(now, before, 0.32)


def test_a_score_without_bounds_does_not_decide_where_a_share_may_lie() -> None:
    """One of five says of a regression what it likes; four are worse, then better."""
    ids, ones, none = range(5), torch.ones(5).double(), torch.zeros(5).double()
    honest, worse, lower = (
        chosen_by(Counts(ones, torch.tensor(of).double(), none, none, none, {}), ids, "accuracy")
        for of in ([-1, -2, -3, -4, -1e9], [-9, -9, -9, -9, 0], [-1, -2, -2, -4, -1e12])
    )
    assert is_better(worse, honest)
    assert not is_better(worse, honest, 0.2)
    assert is_better(lower, honest, 0.2)
    assert not is_better(lower, honest)


def test_several_draws_are_one_and_who_missed_one_counts_in_none() -> None:
    both = all_together([counts(1, 2, 3), counts(3, None, 3)], range(3))
    assert both.count.tolist() == [20, 0, 20]
    assert both.correct.tolist() == [4, 0, 6]
    assert both.loss.tolist() == [4, 0, 6]
    assert both.missed == {1: "gone"}


def absent(monkeypatch: pytest.MonkeyPatch, away: dict[int, set[int]]) -> None:
    """Who gives no finite counts in the evaluation after a round."""
    count = Client.evaluate

    def evaluated(self: Client, received: Tree) -> Tree:
        found = count(self, received)
        if self.id in away.get(self.round, ()):
            found["test"]["loss"] = found["test"]["loss"] * torch.nan
        return found

    evaluated.__dict__.update(count.__dict__)
    monkeypatch.setattr(Client, "evaluate", evaluated)


def test_a_run_says_whom_its_numbers_are_without(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, {2: {1, 3}})
    run = hyperfed.train("fedavg", make_task(), **KEYS)
    val, test = run.evaluations[2:4]
    for e in (val, test):
        assert [(one.client, one.reason) for one in e.missed] == [
            (1, "the reply is not finite"),
            (3, "the reply is not finite"),
        ]
        assert e.evaluated == "2 of 4"
        assert e.count == (6, 0, 6, 0)
    told = progress._line(Progress(2, 4, (), {"val": val}), str)
    assert "evaluated 2 of 4 clients, without client 1 (the reply is not finite), client 3" in told
    assert run.evaluations[0].evaluated == "4 of 4"


def test_a_summary_whose_numbers_lack_clients_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hyperfed.train("fedavg", make_task(novel=1), **KEYS)
    assert (whole.summary["evaluated"], whole.summary["novel_evaluated"]) == ("3 of 3", "1 of 1")
    absent(monkeypatch, {number: {1} for number in range(5)})
    run = hyperfed.train("fedavg", make_task(novel=1), **KEYS)
    assert run.summary["evaluated"] == "2 of 3"
    said = remark(run.summary)
    assert said is not None
    assert "evaluated 2 of 3 clients: the test numbers are without the others" in said
    assert "evaluated" not in (remark(whole.summary) or "")


def test_the_best_round_is_not_one_that_the_worst_clients_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = hyperfed.train("fedavg", make_task(), **KEYS)
    val = [e for e in whole.evaluations if e.split == "val"]
    best = val[whole.summary["best_round"] - 1]
    worst = sorted(range(4), key=lambda c: best.client_accuracy[c] or 0.0)[:2]
    other = next(e for e in val if e.round > best.round) if best.round < 4 else val[0]
    absent(monkeypatch, {other.round: set(worst)})
    run = hyperfed.train("fedavg", make_task(), **KEYS)
    there = [c for c in range(4) if c not in worst]
    missing = next(e for e in run.evaluations if e.round == other.round)
    assert missing.accuracy is not None
    ours, theirs = ([e.client_accuracy[c] or 0.0 for c in there] for e in (missing, best))
    expected = sum(ours) > sum(theirs)
    assert (run.summary["best_round"] == other.round) == expected


REGRESSION = (minus_squared_error, mean_squared_error)


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("correct", -3.0, True),
        ("correct", 0.5, False),
        ("loss", 0.0, True),
        ("loss", -1.0, False),
        ("count", 5, False),
    ],
)
def test_scores_of_a_regression_are_not_above_zero(
    name: str, value: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(self: Client, received: Tree) -> Tree:
        nothing = torch.tensor(0.0, dtype=torch.float64)
        sums: Tree = dict.fromkeys(SUMS, nothing) | {"count": torch.tensor(6)}
        lied = sums | {name: torch.tensor(value).to(sums[name].dtype)} if self.id == 1 else sums
        return {"val": dict(sums), "test": dict(lied)}

    evaluated.__dict__.update(Client.evaluate.__dict__)
    monkeypatch.setattr(Client, "evaluate", evaluated)
    score, loss = REGRESSION
    ours = Federation("fedavg", replace(make_quadratic_task(), score=score, loss=loss))
    found = evaluate(ours.server, ours.engine, [0, 1, 2, 3], 1)["val"]
    assert list(found.missed) == ([] if fits else [1])


@pytest.mark.parametrize("name", SUMS)
def test_who_has_nothing_to_be_tested_on_counts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Client.evaluate

    def evaluated(self: Client, received: Tree) -> Tree:
        found = count(self, received)
        if self.id == 1:
            found["test"][name] = found["test"][name] + 1
        return found

    whole = make_task()
    task = replace(whole, test=[rows[: len(rows) * (c != 1)] for c, rows in enumerate(whole.test)])
    ours = Federation("fedavg", task)
    found = evaluate(ours.server, ours.engine, range(4), 1)["test"]
    assert (found.missed, found.count.tolist()) == ({}, [6, 0, 6, 6])
    evaluated.__dict__.update(count.__dict__)
    monkeypatch.setattr(Client, "evaluate", evaluated)
    found = evaluate(ours.server, ours.engine, range(4), 1)["test"]
    assert list(found.missed) == [1]
    assert {float(sums[1]) for sums in found.by_name.values()} == {0.0}


def test_who_would_have_the_model_of_a_lost_client_counts_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = hyperfed.train("pefll", make_task(), **KEYS)
    client = run.method.Client
    describe = client.describe

    def with_others() -> Counts:
        with run._at_best() as server:
            serve = exchanged(server.personalize)
            return evaluate(server, run.engine, range(4), 2, serve=serve)["test"]

    def described(self: Client, net: Tree) -> Tree:
        spoiled = torch.nan if self.id == 1 else 1.0
        return {"descriptor": describe(self, net)["descriptor"] * spoiled}

    before = with_others()
    described.__dict__.update(describe.__dict__)
    monkeypatch.setattr(client, "describe", described)
    after = with_others()
    assert after.missed == dict.fromkeys((1, 2), "the reply is not finite")
    assert after.count.tolist() == [6, 0, 0, 6]
    assert after.loss[[0, 3]].tolist() == before.loss[[0, 3]].tolist()


def test_a_step_of_our_own_that_fails_is_told_and_loses_nobody() -> None:
    """At a site it would lose its client; in this process it is our fault."""
    engine = LoopEngine(make_task(), Failing, None, seed=0)
    cohort = engine.cohort([0, 1], 0, training=False)
    with pytest.raises(KeyError):
        cohort.ask(Failing.fail)
    cohort = engine.cohort([0, 1], 0, training=False)
    cohort.state.remote = True
    assert cohort.ask(Failing.fail)["w"].tolist() == [0, 1]
    assert cohort.state.lost == {0: "KeyError: 'x'"}


class Failing(Client):
    @hyperfed.federation.step
    def fail(self) -> Tree:
        if self.id == 0:
            raise KeyError("x")
        return {"w": torch.tensor(1)}

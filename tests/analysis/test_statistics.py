"""Statistics of seeds and clients, against sums by hand and against scipy's own tests."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from scipy import stats

from finished_runs import finished
from hyperfed.analysis.statistics import (
    Difference,
    Scores,
    best,
    by_seed,
    difference,
    scores,
    spread,
)
from hyperfed.metrics import ACCURACY, RMSE, named
from hyperfed.runs.records import summarise


def test_the_spread_over_seeds_is_the_sample_deviation() -> None:
    assert (spread([0.5]).mean, spread([0.5]).std) == (0.5, None)
    assert spread([1.0, 3.0]).std == pytest.approx(math.sqrt(2))
    three = spread([1.0, 2.0, 6.0])
    assert (three.mean, three.seeds) == (3.0, 3)
    assert three.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))


OURS = {0: 0.9, 1: 0.8, 2: 0.7, 3: 0.4}
THEIRS = {0: 0.5, 1: 0.7, 2: 0.75, 3: 0.3, 9: 0.0}


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    found = difference([Scores(0, "a", OURS)], [Scores(0, "a", THEIRS)])
    assert found is not None
    test = stats.ttest_rel(list(OURS.values()), [THEIRS[c] for c in OURS])
    low, high = test.confidence_interval(0.95)
    assert found.mean == pytest.approx(0.55 / 4)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert (found.clients, found.gaining) == (4, 0.75)
    assert found.within_noise  # the test's p is 0.26
    assert test.pvalue > 0.05


def test_a_client_that_is_served_as_well_does_not_gain() -> None:
    found = difference([Scores(0, "a", {1: 0.5, 2: 0.5})], [Scores(0, "a", {1: 0.25, 2: 0.5})])
    assert found is not None
    assert found.gaining == 0.5
    assert found.low is not None  # two clients are enough for an interval


def test_clients_of_the_same_data_count_once_and_seeds_must_agree() -> None:
    up, down = ({c: OURS[c] + step for c in OURS} for step in (0.2, -0.1))
    both = difference(
        [Scores(0, "a", up), Scores(1, "a", down)], [Scores(0, "a", OURS), Scores(1, "a", OURS)]
    )
    assert both is not None
    assert (both.clients, both.agree, both.within_noise) == (4, False, True)
    assert both.mean == pytest.approx(0.05)
    apart = difference(
        [Scores(0, "a", up), Scores(1, "b", up)], [Scores(0, "a", OURS), Scores(1, "b", OURS)]
    )
    assert apart is not None
    assert (apart.clients, apart.agree, apart.within_noise) == (8, True, False)
    assert apart.mean == pytest.approx(0.2)
    worse = difference([Scores(0, "a", down)], [Scores(0, "a", OURS)])
    assert worse is not None
    assert not worse.within_noise
    assert worse.gaining == 0


def test_runs_of_other_data_seeds_or_metrics_are_not_compared() -> None:
    assert difference([Scores(0, "a", OURS)], [Scores(0, "b", OURS)]) is None
    assert difference([Scores(0, "a", OURS)], [Scores(1, "a", OURS)]) is None
    assert difference([Scores(0, "a", OURS)], [Scores(0, "a", OURS, named("rmse"))]) is None
    one = difference([Scores(0, "a", {1: 0.5})], [Scores(0, "a", {1: 0.25})])
    assert one is not None
    assert (one.low, one.high, one.within_noise) == (None, None, True)


def test_only_clients_that_both_have_served_are_compared() -> None:
    more = {**OURS, 7: 1.0}
    found = difference([Scores(0, "a", more)], [Scores(0, "a", THEIRS)])
    assert found == difference([Scores(0, "a", OURS)], [Scores(0, "a", THEIRS)])
    # A run without any of them says nothing of the method, and does not disagree either.
    none = Scores(1, "a", {7: 1.0}), Scores(1, "a", THEIRS)
    again = difference([Scores(0, "a", OURS), none[0]], [Scores(0, "a", THEIRS), none[1]])
    assert again == found
    assert difference([none[0]], [none[1]]) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_seed_without_a_difference_does_not_agree_with_one(sign: int) -> None:
    apart = {client: value + sign * (0.1 + 0.01 * client) for client, value in OURS.items()}
    found = difference(
        [Scores(0, "a", apart), Scores(1, "a", OURS)], [Scores(0, "a", OURS), Scores(1, "a", OURS)]
    )
    assert found is not None
    assert (found.agree, found.within_noise) == (False, True)


def test_an_interval_that_ends_at_zero_is_noise() -> None:
    assert Difference(0.1, 0.0, 0.2, 4, 1.0, agree=True).within_noise
    assert Difference(-0.1, -0.2, 0.0, 4, 0.0, agree=True).within_noise
    assert not Difference(0.1, 1e-9, 0.2, 4, 1.0, agree=True).within_noise


BEFORE = dict.fromkeys(range(12), 0.25)


def gained(*seeds: list[float], same: bool = False) -> Difference:
    """A difference of what each client of each seed gains, of data of its own or of the same."""
    of = ["a" if same else f"of {seed}" for seed in range(len(seeds))]
    found = difference(
        [
            Scores(seed, of[seed], {c: 0.25 + gain for c, gain in enumerate(gains)})
            for seed, gains in enumerate(seeds)
        ],
        [Scores(seed, name, BEFORE) for seed, name in enumerate(of)],
    )
    assert found is not None
    return found


UNEQUAL = [0.4, 0.5, 0.3, 0.45], [0.1, 0.2], [0.05, 0.1, 0.15]
"""Gains of the clients of three seeds: clear over clients, not over seeds."""


def test_the_interval_over_seeds_is_that_of_a_t_test_of_their_means() -> None:
    found = gained(*UNEQUAL)
    test = stats.ttest_1samp([math.fsum(of) / len(of) for of in UNEQUAL], 0.0)
    ends = test.confidence_interval(0.95)
    assert (found.seeds_low, found.seeds_high) == (
        pytest.approx(ends.low),
        pytest.approx(ends.high),
    )
    assert test.pvalue > 0.05
    clients = [gain for of in UNEQUAL for gain in of]
    ends = stats.ttest_1samp(clients, 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(ends.low), pytest.approx(ends.high))
    assert (found.clients, found.seeds) == (len(clients), 3)
    # The mean is over clients, of whom a seed may have more than another.
    assert found.mean == pytest.approx(math.fsum(clients) / len(clients))


def test_what_is_clear_over_clients_alone_is_so_here() -> None:
    assert gained(*UNEQUAL).mark == "here"
    assert gained(*([-gain for gain in of] for of in UNEQUAL)).mark == "here"
    assert gained(*UNEQUAL, same=True).mark == "here"  # clients that the seeds have in common
    alike = [0.3, 0.4], [0.35, 0.45], [0.4, 0.3]
    assert gained(*alike).mark == ""
    # Seeds that are clear do not make clear what is noise over clients, nor what they differ in.
    unclear = gained([0.6, -0.2], [0.65, -0.25])
    assert (unclear.mark, unclear.agree) == ("noise", True)
    assert unclear.seeds_low == pytest.approx(0.2)
    assert gained([0.5] * 10, [-0.01, -0.02]).mark == "noise"


def test_several_seeds_of_one_division_show_nothing_of_another() -> None:
    alike = [0.3, 0.4], [0.35, 0.45], [0.4, 0.3]
    apart, one = gained(*alike), gained(*alike, same=True)
    assert (apart.mark, apart.divisions) == ("", 3)
    assert (one.mark, one.divisions, one.seeds) == ("here", 1, 3)


def test_a_client_with_a_name_counts_once_however_seeds_divide_and_number() -> None:
    """Whose examples are dealt to training and testing anew is nobody else for that."""
    ours = [
        Scores(0, "a", {0: 0.5, 1: 0.75}, names=["ann", "bob"]),
        Scores(1, "b", {0: 0.5, 1: 0.25, 2: 1.0}, names=["bob", "ann", "cem"]),
    ]
    theirs = [replace(one, clients=dict.fromkeys(one.clients, 0.25)) for one in ours]
    found = difference(ours, theirs)
    assert found is not None
    of_each = [(0.25 + 0.0) / 2, (0.5 + 0.25) / 2, 0.75]  # ann, bob, cem
    ends = stats.ttest_1samp(of_each, 0.0).confidence_interval(0.95)
    assert found.clients == 3
    assert found.mean == pytest.approx(math.fsum(of_each) / 3)
    assert (found.low, found.high) == (pytest.approx(ends.low), pytest.approx(ends.high))
    nameless = difference(*([replace(one, names=()) for one in of] for of in (ours, theirs)))
    assert nameless is not None
    assert nameless.clients == 5


def test_names_are_those_that_the_summary_tells() -> None:
    named_ones = scores(finished("a", clients=["ann", "bob", "cem"]))
    assert [named_ones.who(client) for client in (0, 2)] == [("", "ann"), ("", "cem")]
    for nothing in (None, [], "ann", 3):
        assert scores(finished("a", clients=nothing)).who(2) == ("abc", 2)


def test_of_one_seed_there_is_no_interval_over_seeds() -> None:
    one = gained([0.4, 0.5, 0.3])
    assert (one.seeds, one.seeds_low, one.seeds_high, one.mark) == (1, None, None, "here")
    two = gained([0.4, 0.5, 0.3], [0.1, 0.2, 0.1])
    low, high = stats.t.interval(0.95, 1, 4 / 15, (0.4 - 0.4 / 3) / 2)
    assert (two.seeds_low, two.seeds_high) == (pytest.approx(low), pytest.approx(high))
    assert (two.seeds, two.mark) == (2, "here")


def test_a_seed_counts_once_in_the_interval_over_seeds() -> None:
    ours = [Scores(0, "a", {1: 0.5, 2: 0.75}), Scores(1, "b", {1: 0.5, 2: 0.5})]
    theirs = [Scores(0, "a", {1: 0.25, 2: 0.25}), Scores(1, "b", {1: 0.25, 2: 0.0})]
    again = Scores(0, "a", {1: 0.25, 2: 0.5})  # of seed 0, whose gain is now 0.25
    found = difference([*ours, again], theirs)
    assert found is not None
    ends = stats.ttest_1samp([0.25, 0.375], 0.0).confidence_interval(0.95)
    assert (found.seeds_low, found.seeds_high) == (
        pytest.approx(ends.low),
        pytest.approx(ends.high),
    )
    assert found.seeds == 2
    none = Scores(2, "c", {7: 1.0}), Scores(2, "c", {8: 1.0})  # without a client of both
    assert difference([*ours, again, none[0]], [*theirs, none[1]]) == found


@pytest.mark.parametrize(
    ("ends", "mark"), [((0.0, 0.2), "here"), ((-0.2, 0.0), "here"), ((1e-9, 0.2), "")]
)
def test_an_interval_over_seeds_that_ends_at_zero_has_it(ends, mark) -> None:
    found = Difference(0.1, 0.05, 0.15, 4, 1.0, agree=True, seeds=3, divisions=3)
    assert replace(found, seeds_low=ends[0], seeds_high=ends[1]).mark == mark


def test_scores_are_those_of_the_best_round_and_of_novel_clients_the_last() -> None:
    def evaluation(number: int, split: str, correct: list[int]):
        return summarise(
            round=number, split=split, clients=[3, 4], count=[10, 0], correct=correct, loss=[0, 0],
            masked_correct=correct, zeroed_correct=correct, bytes_down=0, bytes_up=0, seconds=0,
        )  # fmt: skip

    done = SimpleNamespace(
        evaluations=[
            evaluation(1, "test", [1, 0]),
            evaluation(2, "test", [2, 0]),
            evaluation(2, "val", [8, 0]),
            evaluation(3, "test", [3, 0]),
            evaluation(3, "novel", [7, 0]),
        ],
        summary={"best_round": 2, "seed": 5, "data_fingerprint": "f"},
    )
    assert scores(done) == Scores(5, "f", {3: 0.2})
    assert scores(done, "novel").clients == {3: 0.7}
    assert scores(done, "val").clients == {3: 0.8}


def test_a_seed_that_ran_twice_is_set_against_by_both_of_its_runs() -> None:
    twice = [Scores(0, "a", {1: 0.25, 2: 0.5}), Scores(0, "a", {1: 0.75, 2: 0.0})]
    once = [Scores(0, "a", {1: 0.75, 2: 0.75})]
    for ours, theirs, sign in ((once, twice, 1), (twice, once, -1)):
        found = difference(ours, theirs)
        assert found is not None
        assert (found.clients, found.mean) == (2, pytest.approx(sign * (0.25 + 0.5) / 2))
        assert found.agree


@pytest.mark.parametrize(
    ("methods", "place"),
    [
        ([{0: 0.5, 1: 0.7}, {0: 0.6, 1: 0.5}], 0),
        ([{0: 0.6}, {0: 0.1}, {0: 0.5}], 0),  # though the last is above the second by more
        ([{0: 0.9, 1: 0.3, 2: 0.3}, {0: 0.8}], 0),  # whose mean is higher, of an easier seed
        ([{0: 0.7, 1: 0.9, 2: 0.9}, {0: 0.8}], 1),
        ([{0: 0.5, 1: 0.5}, {1: 0.6, 2: 0.1}, {2: 0.2, 3: 0.9}], 2),
        # Each is beaten by another: by 0.3, by 0.1 and by 0.2.
        ([{0: 0.5, 2: 0.5}, {0: 0.4, 1: 0.7}, {1: 0.5, 2: 0.8}], 1),
        ([{0: 0.5}, {1: 0.9}], None),
        ([{1: 0.9}, {0: 0.5}, {0: 0.4}], 1),  # of the first nothing is known
        ([{}, {0: 0.4}, {0: 0.5}], 2),
        ([{}, {0: 0.5}], None),
        ([{0: 0.5}], None),
        ([{0: 0.5}, {0: 0.5}], 0),
        ([], None),
    ],
)
def test_the_best_is_what_no_other_beats_on_the_seeds_of_both(methods, place) -> None:
    assert best(methods, ACCURACY) == place
    errors = [{seed: 1 - value for seed, value in of.items()} for of in methods]
    assert best(errors, RMSE) == place


def test_a_seed_has_the_mean_of_its_runs_and_none_where_one_has_no_value() -> None:
    assert by_seed([(0, 0.5), (1, 0.25), (0, 1.0)]) == {0: 0.75, 1: 0.25}
    assert by_seed([(0, 0.5), (1, None)]) == by_seed([]) == {}

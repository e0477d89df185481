"""Partitions: nothing lost, nothing twice, and the same shares on every split."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hyperfed.data import partitions, shares
from hyperfed.errors import UserError


def rng(seed=0):
    return np.random.default_rng(seed)


def counts(index, labels, classes):
    return np.stack([np.bincount(labels[own.numpy()], minlength=classes) for own in index])


def allocated(drawn, labels, source):
    """Returns the rows of each client where all examples are trained on."""
    return partitions.by_shares(drawn, labels, np.zeros(len(labels), int), source).train


def test_allocate_by_hand():
    labels = np.array([0, 1, 0, 1, 0, 1, 0])  # four of class 0, three of class 1
    drawn = np.array([[0.5, 0.0], [0.25, 1.0], [0.25, 0.0]])
    index = allocated(drawn, labels, rng())
    assert counts(index, labels, 2).tolist() == [[2, 0], [1, 3], [1, 0]]
    assert torch.cat(index).sort().values.tolist() == list(range(7))
    assert all(own.dtype == torch.int64 and (own.diff() > 0).all() for own in index)


def test_rows_of_a_client_are_no_view_of_those_of_all():
    labels = np.zeros(100, dtype=np.int64)
    index = allocated(np.full((4, 1), 0.25), labels, rng())
    assert [own.untyped_storage().nbytes() for own in index] == [25 * 8] * 4


def test_allocate_rounds_cumulatively():
    # Thirds of four examples are cut at 1.33, 2.67 and 4, so at 1, 3 and 4; half a class at 2.
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    drawn = np.array([[1 / 3, 0.25], [1 / 3, 0.0], [1 / 3, 0.25]])
    index = allocated(drawn, labels, rng())
    assert counts(index, labels, 2).tolist() == [[1, 1], [2, 0], [1, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_shares_that_sum_to_one_use_every_example_once(seed):
    labels = rng(seed).integers(0, 10, 5003)
    drawn = shares.dirichlet_per_client(37, 10, 0.3, rng(seed))
    index = allocated(drawn, labels, rng(seed))
    assert torch.cat(index).sort().values.tolist() == list(range(5003))
    assert (np.abs(counts(index, labels, 10) - drawn * np.bincount(labels)) <= 1).all()


def test_which_examples_a_client_gets_is_random_and_seeded():
    labels = np.zeros(100, dtype=np.int64)
    first, again, other = (
        allocated(np.full((2, 1), 0.5), labels, rng(seed))[0].tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first != list(range(50))


def test_all_splits_follow_the_same_shares():
    labels = rng(1).permutation(np.repeat(np.arange(10), 600))
    part = partitions.hold_out(labels, rng(), val=0.1, test=0.2)
    drawn = shares.class_shares(20, 10, 2, rng())
    partition = partitions.by_shares(drawn, labels, part, rng())
    for index, size in ((partition.train, 420), (partition.val, 60), (partition.test, 120)):
        assert (np.abs(counts(index, labels, 10) - drawn * size) <= 1).all()
    every = torch.cat([*partition.train, *partition.val, *partition.test])
    assert every.sort().values.tolist() == list(range(6000))


def test_hold_out_keeps_fractions_within_each_group():
    groups = np.repeat([0, 1, 2], [20, 10, 4])
    part = partitions.hold_out(groups, rng(), val=0.15, test=0.25)
    table = [np.bincount(part[groups == group], minlength=3).tolist() for group in range(3)]
    # (train, validation, test): .15 x 20 = 3 and .25 x 20 = 5; 1.5 and 2.5 round to 2; .6 and 1.
    assert table == [[12, 3, 5], [6, 2, 2], [2, 1, 1]]


def test_hold_out_leaves_the_own_test_split_alone():
    held_out = np.arange(60) % 3 == 0
    part = partitions.hold_out(np.arange(60) % 2, rng(), val=0.2, test=None, held_out=held_out)
    np.testing.assert_array_equal(part == partitions.TEST, held_out)
    assert (part == partitions.VAL).sum() == 8  # a fifth of the other 40


def test_of_overlapping_texts_the_last_are_held_out_apart_from_the_others():
    groups = np.array([1] * 20 + [0] * 12 + [1] * 10)
    overlaps = np.full(42, 2)
    overlaps[[25, 26]] = 1, 0  # a post of client 0 ends here, where those to validate on begin
    part = partitions.hold_out(groups, rng(), val=0.2, test=0.1, overlaps=overlaps)
    told = {partitions.TRAIN: "t", partitions.VAL: "v", partitions.TEST: "T"}
    word = ["".join(told.get(int(p), "-") for p in part[groups == g]) for g in (0, 1)]
    # Of 30: 3 to test on, 6 to validate on, 2 left out before each; of 12: 1 and 2 (2.4).
    assert word == ["tttttttvv--T", "t" * 17 + "--vvvvvv--TTT"]


def test_of_overlapping_texts_none_are_left_out_before_none():
    groups, overlaps = np.zeros(20, dtype=np.int64), np.full(20, 3)
    own = np.arange(20) >= 15
    overlaps[12:15] = 2, 1, 0  # none across the data's own split
    for val, expected in ((0.0, "t" * 15), (0.2, "t" * 9 + "---vvv")):
        part = partitions.hold_out(
            groups, rng(), val=val, test=None, held_out=own, overlaps=overlaps
        )
        assert "".join("tv"[purpose] if purpose >= 0 else "-" for purpose in part[:15]) == expected
        assert (part[15:] == partitions.TEST).all()
    part = partitions.hold_out(groups, rng(), val=0.0, test=0.1, overlaps=np.full(20, 3))
    assert (
        part.tolist() == [partitions.TRAIN] * 15 + [partitions.UNUSED] * 3 + [partitions.TEST] * 2
    )


def test_thin_leaves_alone_what_is_not_used():
    groups = np.repeat([0, 1], 10)
    part = np.where(np.arange(20) % 2, partitions.UNUSED, partitions.TRAIN)
    thinned = partitions.thin(part, groups, 0.4, rng())
    used = thinned != partitions.UNUSED
    assert (part[used] == partitions.TRAIN).all()
    assert np.bincount(groups[used]).tolist() == [2, 2]  # of 5 each


def test_thin_keeps_the_fraction_of_each_group_and_side():
    groups = np.repeat([0, 1, 2], [20, 10, 4])
    part = partitions.hold_out(groups, rng(), val=0.15, test=0.25)
    thinned = partitions.thin(part, groups, 0.3, rng())
    used = thinned != partitions.UNUSED
    np.testing.assert_array_equal(thinned[used], part[used])
    # Of (12, 3, 5), (6, 2, 2) and (2, 1, 1), as above: 3.6, .9, 1.5; 1.8, .6, .6; .6, .3, .3; the
    # last two would round to none.
    table = [np.bincount(thinned[used & (groups == g)], minlength=3).tolist() for g in range(3)]
    assert table == [[4, 1, 2], [2, 1, 1], [1, 1, 1]]


def test_thin_nests_smaller_fractions_and_invents_no_example():
    groups = rng(1).integers(0, 7, 500)
    part = partitions.hold_out(groups, rng(), val=0.0, test=0.3)
    used = [partitions.thin(part, groups, f, rng()) != partitions.UNUSED for f in (0.1, 0.4, 1)]
    assert (used[0] <= used[1]).all()
    assert used[0].sum() < used[1].sum() < used[2].sum() == 500
    other = partitions.thin(part, groups, 0.4, rng(1)) != partitions.UNUSED
    assert not np.array_equal(other, used[1])


def test_by_client_leaves_out_what_nobody_holds():
    owner = np.array([1, -1, 0, 1, 0, -1])
    part = np.array([0, 0, 0, 1, 2, 2])
    partition = partitions.by_client(owner, part, clients=2)
    assert [own.tolist() for own in partition.train] == [[2], [0]]
    assert [own.tolist() for own in partition.val] == [[], [3]]
    assert [own.tolist() for own in partition.test] == [[4], []]


def test_a_thousand_clients():
    labels = np.repeat(np.arange(10), 5000)
    part = np.zeros(50_000, dtype=np.int64)
    partition = partitions.by_shares(shares.class_shares(1000, 10, 2, rng()), labels, part, rng())
    assert len(torch.cat(partition.train).unique()) == 50_000
    assert min(len(own) for own in partition.train) > 0


FINGERPRINT = """
import numpy as np
from hyperfed.data import partitions, shares
rng = np.random.default_rng({seed})
labels = np.arange(500) % 10
part = partitions.hold_out(labels, rng, val=0.2, test=0.2)
drawn = shares.class_shares(5, 10, 2, rng)
fingerprint = partitions.by_shares(drawn, labels, part, rng).fingerprint
"""


def fingerprint(seed):
    scope: dict[str, str] = {}
    exec(FINGERPRINT.format(seed=seed), scope)
    return scope["fingerprint"]


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process_and_differs_for_another_seed():
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", FINGERPRINT.format(seed=0) + "print(fingerprint)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout.strip()
    assert printed == fingerprint(0)
    assert fingerprint(1) != fingerprint(0)


def test_the_fingerprint_tells_one_split_from_another():
    one, two, none = ((torch.tensor(index),) for index in ([0, 1], [2, 3], []))
    a, b, c = (
        partitions.Partition(*splits).fingerprint
        for splits in [(one, two, none), (one, none, two), (two, one, none)]
    )
    assert len({a, b, c}) == 3


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ([[0.7], [0.7]], "sum to at most 1 for each class, got .* largest sum of 1.4"),
        ([[-0.1], [0.7]], "shares must be 0 or more .* smallest share of -0.1"),
        ([[np.nan], [0.7]], "shares must be 0 or more"),
    ],
)
def test_shares_that_do_not_fit_are_refused(drawn, message):
    with pytest.raises(UserError, match=message):
        allocated(np.array(drawn), np.zeros(4, dtype=np.int64), rng())


def test_labels_beyond_the_shares_are_refused():
    with pytest.raises(UserError, match=r"labels must lie in 0..1, .* got 0..2"):
        allocated(np.full((2, 2), 0.5), np.array([0, 1, 2]), rng())


def test_more_clients_than_examples_are_refused():
    with pytest.raises(UserError, match="got 5 clients and 4 training examples; ask for fewer"):
        partitions.by_shares(np.full((5, 1), 0.2), np.zeros(4, int), np.zeros(4, int), rng())


def test_a_client_without_training_examples_is_named():
    drawn = np.array([[0.5], [0.0], [0.5]])
    with pytest.raises(UserError, match=r"got none for 1 of 3 clients \(1\); use fewer clients"):
        partitions.by_shares(drawn, np.zeros(8, int), np.zeros(8, int), rng())


def test_sizes_are_dealt_to_equal_groups():
    dealt = partitions.deal_sizes(("S", "M", "L"), 75, seed=0)
    assert {size: dealt.count(size) for size in "SML"} == {"S": 25, "M": 25, "L": 25}
    assert dealt != tuple("SML") * 25
    assert dealt != partitions.deal_sizes(("S", "M", "L"), 75, seed=1)

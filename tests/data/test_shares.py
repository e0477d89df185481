"""Shares: every class used up, and each scheme against what its paper says of it."""

import numpy as np
import pytest

from hyperfed.data import shares
from hyperfed.errors import UserError


def rng(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("clients", "classes", "per_client"),
    [(10, 10, 2), (50, 10, 2), (7, 10, 3), (50, 100, 10), (9, 4, 3)],
)
def test_paper_shares_use_up_classes_that_are_held_equally_often(clients, classes, per_client):
    drawn = shares.class_shares(clients, classes, per_client, rng())
    held = drawn > 0
    np.testing.assert_allclose(drawn.sum(axis=0), 1, atol=1e-12)
    assert (held.sum(axis=1) == per_client).all()
    assert np.ptp(held.sum(axis=0)) <= 1
    # Shares are U(.4, .6) over a common sum, so within a class they differ by at most .6 / .4.
    largest, smallest = drawn.max(axis=0), np.where(held, drawn, np.inf).min(axis=0)
    assert (largest / smallest <= 1.5).all()
    assert len(np.unique(drawn[held])) == held.sum()


def test_paper_shares_leave_out_classes_that_nobody_can_hold():
    totals = shares.class_shares(2, 10, 2, rng()).sum(axis=0)
    assert sorted(totals.round(12)) == [0] * 6 + [1] * 4


@pytest.mark.parametrize(("clients", "slots"), [(10, 3), (50, 11), (100, 21)])
def test_official_shares_leave_one_slot_of_each_class_unused(clients, slots):
    unused = []
    for seed in range(100):
        drawn = shares.class_shares(clients, 10, 2, rng(seed), variant="official")
        assert ((drawn > 0).sum(axis=0) == slots - 1).all()
        left = 1 - drawn.sum(axis=0)
        # One U(.4, .6) of a sum of `slots` such draws.
        assert (left > 0.4 / (0.4 + 0.6 * (slots - 1))).all()
        assert (left < 0.6 / (0.6 + 0.4 * (slots - 1))).all()
        unused.append(left)
    # Slots are exchangeable: the mean is 1 / slots. Its standard error is below 0.2 % of it.
    assert np.mean(unused) == pytest.approx(1 / slots, rel=0.01)


def test_official_shares_of_an_uneven_division_stay_within_their_slots():
    # 7 clients x 2 of 3 classes: 14 // 3 + 1 = 5 slots a class, 14 of 15 taken; a client may take a
    # class twice.
    doubles = 0
    for seed in range(50):
        drawn = shares.class_shares(7, 3, 2, rng(seed), variant="official")
        held = (drawn > 0).sum(axis=1)
        assert set(held) <= {1, 2}
        doubles += (held == 1).sum()
        used_up = np.isclose(drawn.sum(axis=0), 1)
        assert used_up.sum() == 2
    assert doubles > 0


def dirichlet_variance(alpha, size):
    """Of one component of a symmetric Dir(alpha): m (1 - m) / (size alpha + 1), m = 1 / size."""
    return (1 / size) * (1 - 1 / size) / (size * alpha + 1)


def test_dirichlet_per_class_splits_each_class_by_one_draw():
    drawn = shares.dirichlet_per_class(4, 40_000, 0.5, rng())
    np.testing.assert_allclose(drawn.sum(axis=0), 1, atol=1e-12)
    assert drawn.var() == pytest.approx(dirichlet_variance(0.5, 4), rel=0.03)


def test_dirichlet_per_client_draws_proportions_with_each_clients_own_alpha():
    clients, classes = 40_000, 4
    alphas = np.repeat([0.1, 2.0], clients // 2)
    drawn = shares.dirichlet_per_client(clients, classes, alphas, rng())
    np.testing.assert_allclose(drawn.sum(axis=0), 1, atol=1e-12)
    # With so many clients the scaling of columns is clients / classes to within a percent.
    proportions = drawn * clients / classes
    for alpha in (0.1, 2.0):
        variance = proportions[alphas == alpha].var()
        assert variance == pytest.approx(dirichlet_variance(alpha, classes), rel=0.05)


def taken_one_by_one(mixes, sizes, order, rounds=20_000):
    """Hsu et al.'s procedure in fine steps: a client takes a little by its mix, again and again."""
    left = sizes.astype(float)
    amount = sizes.sum() / len(mixes)
    taken = np.zeros(mixes.shape)
    for client in order:
        for _ in range(rounds):
            mix = mixes[client] * (left > 1e-9)
            bite = np.minimum(mix / mix.sum() * amount / rounds, left)
            taken[client] += bite
            left -= bite
    return taken


def test_equal_sizes_by_dirichlet_follow_the_procedure_step_by_step():
    sizes = np.array([3000, 2500, 2700, 1800])
    drawn = shares.dirichlet_equal(5, 4, 0.5, rng(), sizes)
    # The same draws: five mixes, then the order in which clients take.
    source = rng()
    mixes = np.exp(shares._log_dirichlet(np.full(5, 0.5), 4, source))
    stepped = taken_one_by_one(mixes, sizes, source.permutation(5))
    assert (np.abs(mixes - stepped / 2000) > 0.1).any()  # some classes ran out
    np.testing.assert_allclose(drawn * sizes, stepped, atol=3)


@pytest.mark.parametrize(("alpha", "classes"), [(0.1, 10), (0.001, 10), (0.1, 100), (10.0, 100)])
def test_equal_sizes_by_dirichlet_are_equal_to_the_example(alpha, classes):
    sizes = rng(1).integers(4000, 6000, classes)
    drawn = shares.dirichlet_equal(100, classes, alpha, rng(), sizes)
    amounts = drawn * sizes
    np.testing.assert_allclose(amounts, amounts.round(), atol=1e-8)
    np.testing.assert_allclose(amounts.sum(axis=1), sizes.sum() // 100)
    assert drawn.min() >= 0
    assert drawn.sum(axis=0).max() <= 1 + 1e-9
    assert sizes.sum() - amounts.sum() == pytest.approx(sizes.sum() % 100)
    again, other = (shares.dirichlet_equal(100, classes, alpha, rng(s), sizes) for s in (0, 1))
    np.testing.assert_array_equal(again, drawn)
    assert not np.array_equal(other, drawn)


@pytest.mark.parametrize("alpha", [1000.0, np.repeat([0.2, 5.0], 1000)])
def test_equal_sizes_by_dirichlet_have_the_mixes_of_their_draws_until_a_class_runs_out(alpha):
    sizes = np.full(5, 200_000)
    drawn = shares.dirichlet_equal(2000, 5, alpha, rng(), sizes)
    source = rng()
    mixes = np.exp(shares._log_dirichlet(np.broadcast_to(alpha, 2000), 5, source))
    order = source.permutation(2000)
    assert (order[:1800] >= 1800).any()  # the last numbers are not the last to take
    difference = np.abs(drawn * 200_000 / 500 - mixes).max(axis=1)[order]
    assert difference[:1800].max() < 1 / 500  # rounded to whole examples
    # Of 2000 clients, classes are wanted alike to within a few percent, and so run out at the end.
    assert difference[-1] > 1 / 500


def test_a_tiny_alpha_underflows_to_one_class_a_client_not_to_nothing():
    drawn = shares.dirichlet_per_client(30, 5, 1e-3, rng())
    np.testing.assert_allclose(drawn.sum(axis=0), 1)
    assert (drawn.max(axis=1) > 0).any()
    per_class = shares.dirichlet_per_class(5, 30, 1e-3, rng())
    assert np.isfinite(per_class).all()
    np.testing.assert_allclose(per_class.sum(axis=0), 1)


def test_equal_classes_give_the_same_amount_of_every_held_class():
    sizes = np.array([100, 120, 90, 110, 100, 95])
    drawn = shares.equal_classes(8, 6, 2, rng(), sizes)
    assert ((drawn > 0).sum(axis=1) == 2).all()
    amounts = drawn * sizes
    np.testing.assert_allclose(amounts[amounts > 0], amounts.max())
    assert drawn.sum(axis=0).max() == pytest.approx(1)  # the most contended class is used up
    contention = (drawn > 0).sum(axis=0) / sizes
    assert drawn.sum(axis=0).argmax() == contention.argmax()


def test_majority_gives_all_classes_and_more_of_some():
    sizes = np.array([100, 100, 80, 100])
    amounts = shares.majority(5, 4, 1, rng(), ratio=3, sizes=sizes) * sizes
    smallest = amounts.min(axis=1, keepdims=True)
    np.testing.assert_allclose(np.sort(amounts / smallest), np.tile([1, 1, 1, 3], (5, 1)))
    np.testing.assert_allclose(
        np.ptp(smallest), 0, atol=1e-9
    )  # so every client has as many examples
    assert (amounts.sum(axis=0) / sizes).max() == pytest.approx(1)


def test_coarse_classes_are_dealt_evenly_and_shared_equally():
    coarse = rng(1).permutation(np.repeat(np.arange(20), 5))
    drawn = shares.coarse_classes(100, coarse, rng())
    held = drawn > 0
    own = [set(coarse[row]) for row in held]
    assert all(len(groups) == 1 for groups in own)
    owners = np.bincount([groups.pop() for groups in own], minlength=20)
    assert owners.tolist() == [5] * 20
    np.testing.assert_allclose(drawn[held], 1 / 5)
    assert (held.sum(axis=1) == 5).all()
    np.testing.assert_allclose(drawn.sum(axis=0), 1)


def test_coarse_classes_of_any_number_and_size():
    coarse = np.array([2, 0, 2, -1, 4])  # 1 and 3 have no class, and class 3 no coarse class
    drawn = shares.coarse_classes(7, coarse, rng())
    owners = (drawn > 0).sum(axis=0)
    assert sorted(owners[[0, 1, 4]]) == [2, 2, 3]
    assert owners[2] == owners[0]
    np.testing.assert_allclose(drawn.sum(axis=0), [1, 1, 1, 0, 1])
    assert ((drawn > 0).sum(axis=1) > 0).all()
    np.testing.assert_array_equal(shares.coarse_classes(7, coarse, rng()), drawn)
    few = [shares.coarse_classes(2, coarse, rng(s)).sum(axis=0) > 0 for s in range(20)]
    assert len({tuple(held) for held in few}) == 3  # which two are chosen is random


def test_shards_are_those_of_the_sorted_labels():
    labels = rng(1).integers(0, 5, 400)
    clients, per_client = 10, 2
    drawn = shares.shards(clients, 5, per_client, labels, rng())
    np.testing.assert_allclose(drawn.sum(axis=0), 1, atol=1e-12)
    # 400 examples in 20 shards of 20, cut from the sorted labels and dealt by the same permutation.
    cut = np.sort(labels).reshape(20, 20)
    dealt = rng().permutation(20).reshape(clients, per_client)
    counts = np.stack([np.bincount(cut[own].ravel(), minlength=5) for own in dealt])
    np.testing.assert_allclose(drawn * np.bincount(labels), counts, atol=1e-9)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: shares.class_shares(5, 10, 11, rng()), "classes per client must lie in 1..10"),
        (lambda: shares.equal_classes(5, 10, 0, rng()), "classes per client must lie in 1..10"),
        (lambda: shares.majority(5, 3, 4, rng(), ratio=2), "classes per client must lie in 1..3"),
        (lambda: shares.majority(5, 3, 1, rng(), ratio=0.5), "ratio must be at least 1, got 0.5"),
        (lambda: shares.class_shares(5, 10, 2, rng(), low=0.7), "low <= high, got 0.7 and 0.6"),
        (lambda: shares.dirichlet_per_client(5, 3, 0.0, rng()), "alpha must be positive"),
        (lambda: shares.dirichlet_per_class(5, 3, -1.0, rng()), "alpha must be positive"),
        (lambda: shares.dirichlet_per_client(5, 3, [1.0, 2.0], rng()), "one for each of 5 clients"),
        (lambda: shares.dirichlet_equal(5, 3, 0.0, rng(), [9, 9, 9]), "alpha must be positive"),
        (
            lambda: shares.shards(5, 2, 3, np.array([0, 1] * 4), rng()),
            "got 15 shards .5 clients x 3. of 8 examples",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(draw, message):
    with pytest.raises(UserError, match=message):
        draw()


def test_chosen_classes_give_each_client_its_own_in_equal_amounts():
    sizes = np.array([100, 120, 90, 110])
    amounts = shares.chosen_classes([[0, 1], [1], [1, 3]], 4, sizes) * sizes
    np.testing.assert_allclose(amounts, [[40, 40, 0, 0], [0, 40, 0, 0], [0, 40, 0, 40]])
    for sets in ([[0, 1], []], [[0], [4]]):
        with pytest.raises(UserError, match=r"class_sets must give each client classes of 0\.\.3"):
            shares.chosen_classes(sets, 4)
    assert not shares.chosen_classes([[2], [2]], 3, [5, 5, 0]).any()  # nobody is left to train


def test_which_classes_a_client_has_follows_from_the_seed():
    sources = map(np.random.default_rng, range(5))
    held = {(shares.class_shares(10, 10, 2, source) > 0).tobytes() for source in sources}
    assert len(held) == 5

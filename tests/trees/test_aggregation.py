"""What stands for a mean, against NumPy."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from hyperfed.trees import Tree, aggregating, weighted_mean, within_reach
from hyperfed.trees.aggregation import Aggregation, MeanNoise, Rule, is_plain

C = 7


def clients(count: int = C) -> tuple[Tree, torch.Tensor, np.ndarray]:
    """A tree of two shapes, a weight for each client, and the same in rows."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(count, 10))
    rows[0] *= 30
    tree = {
        "a": torch.from_numpy(rows[:, :6].reshape(count, 2, 3)),
        "b": {"c": torch.from_numpy(rows[:, 6:])},
    }
    return tree, torch.from_numpy(rng.uniform(1, 5, size=count)), rows


def by_rule(name: Aggregation, tree: Tree, weight: torch.Tensor, hostile: float = 0.25) -> Any:
    with aggregating(Rule(name, hostile)):
        found = weighted_mean(tree, weight)
    return np.concatenate([found["a"].flatten().numpy(), found["b"]["c"].numpy()])


@pytest.mark.parametrize("count", [1, 2, 6, C])
def test_the_median_of_each_coordinate(count: int) -> None:
    tree, weight, rows = clients(count)
    np.testing.assert_allclose(by_rule("median", tree, weight), np.median(rows, axis=0), rtol=1e-14)


def test_the_middle_of_two_large_numbers_is_finite() -> None:
    """Their sum is not."""
    large = torch.finfo(torch.float32).max
    with aggregating(Rule("median")):
        found = weighted_mean({"w": torch.full((2, 1), large)}, torch.ones(2))
    assert found["w"].item() == large


@pytest.mark.parametrize(("hostile", "cut"), [(0.0, 0), (0.1, 1), (0.25, 2), (0.29, 3), (0.49, 3)])
def test_the_trimmed_mean_leaves_out_the_ceiling_on_each_side(hostile: float, cut: int) -> None:
    tree, weight, rows = clients()
    expected = np.sort(rows, axis=0)[cut : C - cut].mean(axis=0)
    np.testing.assert_allclose(
        by_rule("trimmed_mean", tree, weight, hostile), expected, rtol=1e-13, atol=1e-15
    )


@pytest.mark.parametrize(("hostile", "f"), [(0.0, 0), (0.25, 2), (0.49, 3)])
def test_krum_takes_the_one_whose_nearest_are_nearest(hostile: float, f: int) -> None:
    tree, weight, rows = clients()
    scores = []
    for own in range(C):
        square = [((rows[own] - rows[other]) ** 2).sum() for other in range(C) if other != own]
        scores.append(sum(sorted(square)[: C - f - 2]))
    found = by_rule("krum", tree, weight, hostile)
    np.testing.assert_array_equal(found, rows[int(np.argmin(scores))])


def test_a_share_is_rounded_up_as_it_is_written() -> None:
    assert [Rule("krum", 0.07).borne(count) for count in (100, 101)] == [7, 8]  # not 7.000...01


def test_of_few_clients_one_is_left_whatever_the_share() -> None:
    assert [Rule("trimmed_mean", 0.49).borne(count) for count in (1, 2, 3, 4, 6)] == [0, 0, 1, 1, 2]
    half = torch.tensor([1.0, 2.0, 4.0, 8.0])
    with aggregating(Rule("trimmed_mean", 0.49)):
        found = weighted_mean({"w": half}, torch.ones(4))
    assert found["w"].item() == 3.0


def test_krum_of_two_is_their_mean() -> None:
    tree, weight, rows = clients(2)
    np.testing.assert_allclose(by_rule("krum", tree, weight), rows.mean(axis=0), rtol=1e-14)


def test_krum_of_three_looks_at_the_nearest_alone() -> None:
    rows = torch.tensor([10.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    with aggregating(Rule("krum", 0.25)):
        assert weighted_mean({"w": rows}, torch.ones(3))["w"].item() == 0  # by two it were 1


def test_krum_tells_many_apart_that_are_nearly_alike() -> None:
    """More than 25, of whom PyTorch would find the distances by a product of matrices."""
    rows = 1e6 + 1e-3 * np.random.default_rng(0).normal(size=(30, 4))
    square = ((rows[:, None] - rows) ** 2).sum(axis=2)
    scores = np.sort(square, axis=1)[:, 1 : 30 - 8 - 1].sum(axis=1)  # the first is its own
    with aggregating(Rule("krum", 0.25)):
        found = weighted_mean({"w": torch.from_numpy(rows)}, torch.ones(30))["w"]
    np.testing.assert_array_equal(found.numpy(), rows[scores.argmin()])


def test_norm_clip_is_the_mean_of_clipped_differences_from_the_median() -> None:
    tree, weight, rows = clients()
    centre = np.median(rows, axis=0)
    lengths = np.linalg.norm(rows - centre, axis=1)
    radius = np.median(lengths)
    clipped = [(r - centre) * min(1, radius / n) for r, n in zip(rows, lengths, strict=True)]
    expected = centre + np.mean(clipped, axis=0)
    np.testing.assert_allclose(by_rule("norm_clip", tree, weight), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "norm_clip"])
def test_of_nothing_there_is_nothing(name: Aggregation) -> None:
    """As of the buffers of a target without batch-norm."""
    with aggregating(Rule(name)):
        assert weighted_mean({}, torch.ones(3)) == {}


def test_norm_clip_where_all_are_alike() -> None:
    tree, _, _ = clients(1)
    alike = {"a": tree["a"].expand(4, 2, 3), "b": {"c": tree["b"]["c"].expand(4, 4)}}
    found = by_rule("norm_clip", alike, torch.ones(4))
    np.testing.assert_array_equal(found[:6], tree["a"].flatten().numpy())


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "norm_clip"])
def test_who_has_no_weight_does_not_count_and_a_shift_shifts(name: Aggregation) -> None:
    tree, weight, _ = clients()
    weight[0] = 0
    rest = {"a": tree["a"][1:], "b": {"c": tree["b"]["c"][1:]}}
    found = by_rule(name, tree, weight)
    np.testing.assert_array_equal(found, by_rule(name, rest, weight[1:]))
    shifted = {"a": tree["a"] + 2, "b": {"c": tree["b"]["c"] + 2}}
    np.testing.assert_allclose(by_rule(name, shifted, weight), found + 2, rtol=1e-12)


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "norm_clip"])
def test_a_claimed_number_of_examples_buys_nothing(name: Aggregation) -> None:
    tree, weight, _ = clients()
    claimed = weight.clone()
    claimed[0] = 1e12
    np.testing.assert_array_equal(by_rule(name, tree, claimed), by_rule(name, tree, weight))


@pytest.mark.parametrize(
    ("name", "expected"), [("median", 5), ("trimmed_mean", 5), ("krum", 4), ("norm_clip", 5)]
)
def test_whole_numbers_stay_whole_and_no_claim_carries_them_off(
    name: Aggregation, expected: int
) -> None:
    steps = torch.tensor([4, 5, 5, 6, 2**40])
    place = torch.tensor([[0.0], [0.05], [-0.2], [0.3], [0.5]])
    with aggregating(Rule(name, 0.2)):
        found = weighted_mean({"w": place, "steps": steps}, torch.ones(5))
    assert found["steps"].dtype == torch.int64
    assert found["steps"].item() == expected


def test_noise_is_told_the_largest_share_and_added_to_what_is_not_rounded_yet() -> None:
    told: list[tuple[Tree, float]] = []

    def add(mean: Tree, share: float, clients: Any) -> Tree:
        told.append((mean, share))
        return mean

    third = {"w": torch.tensor([0.0, 1.0, 0.0]), "steps": torch.tensor([1, 2, 2])}
    with aggregating(Rule(), MeanNoise(1.0, add)):
        found = weighted_mean(third, torch.tensor([2.0, 1.0, 0.0]))
    ((mean, share),) = told
    assert share == pytest.approx(2 / 3, rel=1e-15)
    assert (mean["w"].dtype, mean["w"].item()) == (torch.float64, pytest.approx(1 / 3, rel=1e-15))
    assert found["w"].dtype == torch.float32
    assert weighted_mean(third, torch.ones(3))["steps"].item() == 2  # of 1.67


def test_a_counter_makes_no_update_longer() -> None:
    place = torch.tensor([[0.0], [0.05], [-0.2], [0.3], [0.5]])
    with aggregating(Rule("norm_clip")):
        alone = weighted_mean({"w": place}, torch.ones(5))
        counted = weighted_mean({"w": place, "steps": torch.arange(5) * 9}, torch.ones(5))
    assert counted["w"].item() == alone["w"].item()


def test_one_of_five_carries_nothing_far_but_the_mean() -> None:
    honest = torch.tensor([1.0, 1.1, 0.9, 1.05], dtype=torch.float64)
    tree = {"w": torch.cat([honest, torch.tensor([1e30], dtype=torch.float64)])[:, None]}
    for name in ("median", "trimmed_mean", "krum", "norm_clip"):
        with aggregating(Rule(name, 0.2)):
            assert 0.9 <= float(weighted_mean(tree, torch.ones(5))["w"]) <= 1.1
    assert float(weighted_mean(tree, torch.ones(5))["w"]) > 1e29


def test_a_rule_holds_inside_its_block_and_in_its_thread() -> None:
    seen: list[bool] = []
    with aggregating(Rule("median")):
        thread = threading.Thread(target=lambda: seen.append(is_plain()))
        thread.start()
        thread.join()
        assert not is_plain()
        with aggregating(Rule("mean")):
            assert is_plain()
        assert not is_plain()
    assert is_plain()
    assert seen == [True]


def test_a_row_is_at_most_three_median_lengths_from_the_median() -> None:
    rows = np.random.default_rng(4).normal(size=(C, 5))
    rows[2] *= 1e3
    with aggregating(Rule("krum")):
        found = within_reach(torch.from_numpy(rows)).numpy()
    centre = np.median(rows, axis=0)
    length = np.linalg.norm(rows - centre, axis=1)
    assert np.sort(length)[-2] < 3 * np.median(length) < length[2]
    others = np.arange(C) != 2
    np.testing.assert_allclose(found[others], rows[others], rtol=1e-13)
    nearer = centre + (rows[2] - centre) * 3 * np.median(length) / length[2]
    np.testing.assert_allclose(found[2], nearer, rtol=1e-13)
    np.testing.assert_array_equal(within_reach(torch.from_numpy(rows)).numpy(), rows)


def test_rows_that_are_all_alike_stay() -> None:
    with aggregating(Rule("median")):
        assert torch.equal(within_reach(torch.full((3, 2), 7.0)), torch.full((3, 2), 7.0))

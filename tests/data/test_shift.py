"""Distances between class distributions, against sums written out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from hyperfed.data.shift import (
    LabelShift,
    kl_divergence,
    label_shift,
    nearest_total_variation,
    total_variation,
)
from hyperfed.errors import UserError
from hyperfed.task import Task

P = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
Q = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]], dtype=torch.float64)


def test_total_variation_by_hand():
    # |.5-.5| + |.5-.25| + |0-.25| = .5, halved; and so on.
    expected = [[0.25, 1.0, 0.5], [(0.3 + 0.05 + 0.25) / 2, 0.5, 0.0]]
    torch.testing.assert_close(total_variation(P, Q), torch.tensor(expected, dtype=torch.float64))


def test_the_nearest_of_the_training_clients_counts():
    torch.testing.assert_close(
        nearest_total_variation(P, Q), torch.tensor([0.25, 0.0], dtype=torch.float64)
    )


def test_kl_divergence_by_hand():
    divergence = kl_divergence(P, Q)
    assert divergence.shape == (2, 3)
    assert divergence[0, 0].item() == pytest.approx(0.5 * math.log(2))
    assert divergence[0, 1].item() == math.inf  # a class that q lacks
    assert divergence[1, 0].item() == pytest.approx(
        0.2 * math.log(0.2 / 0.5) + 0.3 * math.log(0.3 / 0.25) + 0.5 * math.log(0.5 / 0.25)
    )
    assert divergence[1, 2].item() == pytest.approx(0, abs=1e-15)


def task_of(*labels: list[int], novel: int = 0, **options: object) -> Task:
    """A task whose clients have these labels for training, and others for testing."""
    y = torch.tensor([label for own in labels for label in own])
    rows = list(torch.arange(len(y)).split([len(own) for own in labels]))
    settings = {"x": torch.zeros(len(y), 1), "y": y, "classes": 3, "novel": novel} | options
    return Task(
        "made", train=rows, val=rows, test=rows[::-1], models={"base": nn.Linear(1, 3)}, **settings
    )


def test_the_label_shift_of_a_task_by_hand():
    # (1/2, 1/2, 0), (0, 1, 0) and (1/2, 0, 1/2) of the known: 1/2, 1/2 and 1 apart. The first novel
    # one, (1/4, 3/4, 0), is 1/4 from the first two; KL to the first is 1/4 log(1/2) + 3/4 log(3/2),
    # to the others infinite. Each known one lacks a class of the second novel one, (1/3, 1/3, 1/3).
    known = [0, 1, 0, 1], [1], [0, 2]
    found = label_shift(task_of(*known, [0, 1, 1, 1], [0, 1, 2], [], novel=3))
    assert found.total_variation == pytest.approx(2 / 3)
    assert found.novel_total_variation == pytest.approx((1 / 4, 1 / 3, None))
    divergence = math.log(1 / 2) / 4 + 3 / 4 * math.log(3 / 2)
    assert found.novel_kl_divergence == pytest.approx((divergence, None, None))
    assert label_shift(task_of([0], [], [1])).total_variation == 1  # who has nothing counts not


def test_the_label_shift_of_labels_side_by_side_is_the_mean_over_them() -> None:
    """Label 0 is 0 of the first, of the second either, of the third 1; label 1 always 1."""
    y = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 1], [1, 1], [1, 1]])
    own = {"y": y, "classes": 2, "score": lambda output, y: output[:, 0]}
    task = task_of([0, 0], [0, 0], [0, 0], novel=1, **own)
    found = label_shift(replace(task, models={"base": nn.Linear(1, 2)}))
    assert found.total_variation == 1 / 4
    assert found.novel_total_variation == (1 / 4,)
    assert found.novel_kl_divergence == (pytest.approx(math.log(2) / 2),)


def test_newcomers_are_compared_with_a_single_known_client() -> None:
    found = label_shift(task_of([0, 1], [0], [2], novel=2))
    assert found == LabelShift(None, (1 / 2, 1), (pytest.approx(math.log(2)), None))


def test_a_task_without_labels_to_compare_has_no_label_shift():
    nothing = LabelShift()
    assert label_shift(task_of([0], [1], classes=0)) == nothing
    at_sites = task_of([0], [1], y=torch.zeros(0, dtype=torch.int64))
    assert label_shift(at_sites) == nothing
    assert label_shift(task_of([], [], [0, 1], novel=1)) == nothing  # nobody to compare with


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: total_variation(P, Q[:, :2]), "over the same classes"),
        (lambda: total_variation(P[0], Q), "must be .clients, classes."),
        (lambda: total_variation(P * 4, Q), "sum to one in each row, got sums of 4 to 4"),
        (lambda: total_variation(P * 1.001, Q), "got sums of 1.001 to 1.001"),
        (lambda: kl_divergence(P, Q - torch.tensor([0.5, -0.5, 0])), "must be 0 or more"),
    ],
)
def test_what_is_no_distribution_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()

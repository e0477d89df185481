"""Distances between class distributions, against sums written out by hand."""

import math

import pytest
import torch

from hyperfed.data.shift import kl_divergence, nearest_total_variation, total_variation
from hyperfed.errors import UserError

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


def test_smoothing_makes_kl_finite():
    # (.5, .5, 0) and (0, 0, 1) with .1 added to each class, over 1.3.
    p, q = [0.6 / 1.3, 0.6 / 1.3, 0.1 / 1.3], [0.1 / 1.3, 0.1 / 1.3, 1.1 / 1.3]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl_divergence(P[:1], Q[1:2], smoothing=0.1).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: total_variation(P, Q[:, :2]), "over the same classes"),
        (lambda: total_variation(P[0], Q), "must be .clients, classes."),
        (lambda: total_variation(P * 4, Q), "sum to one in each row, got sums of 4 to 4"),
        (lambda: kl_divergence(P, Q - torch.tensor([0.5, -0.5, 0])), "must be 0 or more"),
        (lambda: kl_divergence(P, Q, smoothing=-1), "smoothing must be 0 or more, got -1"),
    ],
)
def test_what_is_no_distribution_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()

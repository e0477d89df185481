"""Contrastive losses against NumPy."""

from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperfed.methods.parts.contrast import (
    Contrast,
    Distance,
    contrastive_loss,
    distances,
    mean_discrepancy,
)

ROWS, CLASSES = 4, 3


def draw(seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=source)


def by_hand(anchor: Tensor, other: Tensor, distance: Distance) -> list[float]:
    found = []
    for a, o in zip(anchor.numpy(), other.numpy(), strict=True):
        p, q = np.exp(a) / np.exp(a).sum(), np.exp(o) / np.exp(o).sum()
        found.append(
            {
                "kl": (q * np.log(q / p)).sum(),
                "cosine": 1 - a @ o / np.sqrt((a @ a) * (o @ o)),
                "l2": np.sqrt(((a - o) ** 2).sum()),
                "mse": ((a - o) ** 2).sum(),
            }[distance]
        )
    return found


@pytest.mark.parametrize("distance", get_args(Distance))
def test_distances(distance: Distance) -> None:
    found = distances(draw(0), draw(1), distance)
    np.testing.assert_allclose(found.numpy(), by_hand(draw(0), draw(1), distance), rtol=1e-12)


@pytest.mark.parametrize("distance", get_args(Distance))
def test_each_token_has_a_distance_of_its_own(distance: Distance) -> None:
    anchor, other = (torch.stack([draw(seed), draw(seed + 1)], dim=1) for seed in (0, 2))
    found = distances(anchor, other, distance)  # (ROWS, 2), of outputs (ROWS, 2, CLASSES)
    for token in (0, 1):
        alone = by_hand(anchor[:, token], other[:, token], distance)
        np.testing.assert_allclose(found[:, token].numpy(), alone, rtol=1e-12)


@pytest.mark.parametrize("distance", ["cosine", "l2", "mse"])
def test_one_number_of_each_example_may_stand_without_a_dimension(distance: Distance) -> None:
    """As a regression's do: what is compared is example by example, never a whole batch."""
    anchor, other = draw(0)[:, 0], draw(1)[:, 0]
    found = distances(anchor, other, distance)
    expected = by_hand(anchor[:, None], other[:, None], distance)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("distance", get_args(Distance))
def test_a_model_is_at_no_distance_from_itself_and_its_gradient_is_finite(
    distance: Distance,
) -> None:
    anchor = draw(0).requires_grad_()
    found = distances(anchor, draw(0), distance)
    torch.testing.assert_close(found.detach(), torch.zeros_like(found), rtol=0, atol=1e-12)
    found.sum().backward()
    torch.testing.assert_close(anchor.grad, torch.zeros_like(anchor), rtol=0, atol=1e-12)


def check_that_the_other_is_constant(
    measure: Callable[[Tensor, Tensor, Distance], Tensor], distance: Distance
) -> None:
    """With one leaf in both places, as where a private model starts from the global one."""
    leaf, anchor = draw(0).requires_grad_(), draw(0).requires_grad_()
    measure(leaf, 2 * leaf, distance).sum().backward()
    measure(anchor, 2 * draw(0), distance).sum().backward()
    torch.testing.assert_close(leaf.grad, anchor.grad, rtol=0, atol=0)


def not_detached(anchor: Tensor, other: Tensor, distance: Distance) -> Tensor:
    if distance == "kl":
        ours, theirs = anchor.log_softmax(-1), other.log_softmax(-1)
        return (theirs.exp() * (theirs - ours)).sum(-1)
    return (anchor - other).square().sum(-1)


@pytest.mark.parametrize("distance", get_args(Distance))
def test_no_gradient_flows_into_the_other_model(distance: Distance) -> None:
    check_that_the_other_is_constant(distances, distance)


@pytest.mark.parametrize("distance", ["kl", "mse"])
def test_a_gradient_that_does_is_caught(distance: Distance) -> None:
    with pytest.raises(AssertionError):
        check_that_the_other_is_constant(not_detached, distance)


NEAR, FAR = torch.tensor([0.5, 1.5, 1.0]), torch.tensor([3.0, 0.0, 0.75])
"""Means of 1 and 1.25."""

LABELS = torch.zeros(3, dtype=torch.int64)
OF_TOKENS = torch.tensor([[0, 2, -100], [1, -100, -100]])
"""Three tokens count."""


def tokens(*counted: float) -> Tensor:
    """What was found of each token, and of those that do not count something else."""
    return torch.full(OF_TOKENS.shape, 77.0).masked_scatter(OF_TOKENS >= 0, torch.tensor(counted))


@pytest.mark.parametrize("contrast", get_args(Contrast))
def test_tokens_that_count_nothing_do_not_count_here(contrast: Contrast) -> None:
    near, far = (tokens(*values.tolist()).requires_grad_() for values in (NEAR, FAR))
    found = contrastive_loss(near, far, OF_TOKENS, contrast, margin=0.5, temperature=0.5)
    expected = contrastive_loss(NEAR, FAR, LABELS, contrast, margin=0.5, temperature=0.5)
    torch.testing.assert_close(found, expected)
    found.backward()
    assert not near.grad[OF_TOKENS < 0].any()
    assert near.grad[OF_TOKENS >= 0].all()


@pytest.mark.parametrize(("margin", "expected"), [(0.5, 0.25), (0.25, 0.0), (0.1, 0.0)])
def test_the_hinge_is_on_the_mean_distances(margin: float, expected: float) -> None:
    found = contrastive_loss(NEAR, FAR, LABELS, "triplet", margin=margin, temperature=0.5)
    assert found.item() == pytest.approx(expected)


def test_moon_is_the_loss_of_its_paper_on_cosine_similarities() -> None:
    anchor, positive, negative = draw(0), draw(1), draw(2)
    near, far = distances(anchor, positive, "cosine"), distances(anchor, negative, "cosine")
    found = contrastive_loss(near, far, LABELS, "moon", margin=0.1, temperature=0.5)
    expected = []
    for a, p, n in zip(anchor.numpy(), positive.numpy(), negative.numpy(), strict=True):
        s, t = (a @ o / np.linalg.norm(a) / np.linalg.norm(o) for o in (p, n))
        expected.append(-np.log(np.exp(s / 0.5) / (np.exp(s / 0.5) + np.exp(t / 0.5))))
    assert found.item() == pytest.approx(np.mean(expected), rel=1e-12)


def test_regularization_is_the_mean_distance_to_the_positive_model() -> None:
    found = contrastive_loss(NEAR, FAR, LABELS, "regularization", margin=0.1, temperature=0.5)
    assert found.item() == pytest.approx(1.0)


def test_the_discrepancy_of_features_that_are_nearly_alike_is_not_lost_in_rounding() -> None:
    """As it would be of squares far larger than their differences."""
    source = torch.Generator().manual_seed(0)
    ours, theirs = 10 + 1e-3 * torch.randn(2, 32, 16, generator=source)
    theirs = theirs + 1e-3
    exact = mean_discrepancy(ours.double(), theirs.double())
    found = mean_discrepancy(ours, theirs)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0)

"""IT-PFL's theorem 5.1 and lemma 7.1 by hand, and on clients small enough to count everything."""

import math

import pytest
import torch
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.theory.itpfl import (
    clients_needed,
    domain_error,
    h_delta_h,
    novel_error_bound,
    samples_needed,
    sensitivity,
)

F64 = torch.float64
THRESHOLDS = (torch.arange(5) < torch.arange(6)[:, None]).to(F64)
"""(6, 5): hypotheses "x < t" on the inputs 0 .. 4."""


def test_theorem_5_1_by_hand() -> None:
    terms = novel_error_bound(0.1, 0.05, [0.4, 1.2], [0.02, 0.06], 0.3)
    assert terms == pytest.approx(
        {"empirical": 0.1, "approximation": 0.05, "shift": 0.4, "joint": 0.04, "estimation": 0.3}
    )
    assert sum(novel_error_bound(0.1, 0.05, [0.4, 1.2]).values()) == pytest.approx(0.55)


def test_the_distance_of_thresholds_by_hand() -> None:
    # Two thresholds differ on an interval. p - q = (.2, .1, 0, -.1, -.2): {0, 1} has .3.
    p = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1], dtype=F64)
    q = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.3], dtype=F64)
    assert h_delta_h(THRESHOLDS, p, q) == pytest.approx(0.6)
    assert h_delta_h(THRESHOLDS, p, p) == 0
    # Where q has more than p in one place, {1}, and p more than q only to both sides of it.
    p = torch.tensor([0.35, 0, 0.35, 0.15, 0.15], dtype=F64)
    q = torch.tensor([0.2, 0.3, 0.2, 0.15, 0.15], dtype=F64)
    assert h_delta_h(THRESHOLDS, p, q) == pytest.approx(0.6)
    # Far ends: an interval has all of the one and nothing of the other.
    ends = torch.eye(5, dtype=F64)
    assert h_delta_h(THRESHOLDS, ends[0], ends[4]) == 2
    assert h_delta_h(THRESHOLDS[:1], ends[0], ends[4]) == 0  # one hypothesis never differs


def errors(p: Tensor, labels: Tensor) -> Tensor:
    """(hypotheses,) each one's error on inputs of probabilities p."""
    return (labels != THRESHOLDS).to(F64) @ p


def test_theorem_5_1_holds_wherever_everything_can_be_counted() -> None:
    """Clients with random inputs and random labels; the empirical error is the true one."""
    draw = torch.Generator().manual_seed(0)
    without_joint = 0
    for _ in range(300):
        p = torch.rand(4, 5, dtype=F64, generator=draw) ** 3
        p = p / p.sum(1, keepdim=True)  # three training clients and a novel one
        labels = torch.randint(2, (4, 5), generator=draw).to(F64)
        known, novel = [errors(p[i], labels[i]) for i in range(3)], errors(p[3], labels[3])
        empirical = sum(float(error.min()) for error in known) / 3
        distances = [h_delta_h(THRESHOLDS, p[i], p[3]) for i in range(3)]
        joint = [float((error + novel).min()) for error in known]
        bound = sum(novel_error_bound(empirical, 0, distances, joint).values())
        assert float(novel.min()) <= bound + 1e-12
        without_joint += float(novel.min()) > sum(
            novel_error_bound(empirical, 0, distances).values()
        )
    assert without_joint  # what the theorem leaves out is needed


def test_baxters_numbers_by_hand() -> None:
    # epsilon = .5: 256 / .25 (log C + log(8 / .1)); samples a tenth of that for ten clients.
    expected = 1024 * (3 + math.log(80))
    assert clients_needed(3, 0.5, 0.1) == pytest.approx(expected)
    assert samples_needed(3, 0.5, 0.1, 10) == pytest.approx(expected / 10)
    assert samples_needed(3, 0.5, 0.1, 10**6) == pytest.approx(64 / 0.25)


def test_equation_6_by_hand() -> None:
    # 4 sqrt((2 * 3 log 200 + log 20) / 100)
    assert domain_error(3, 100, 0.1) == pytest.approx(
        4 * math.sqrt((6 * math.log(200) + math.log(20)) / 100)
    )


def test_no_replaced_example_moves_the_encoder_further_than_lemma_7_1_and_one_does() -> None:
    """psi(mean of phi), psi linear and phi on the sphere; the printed bound, half, is exceeded."""
    draw = torch.Generator().manual_seed(1)
    n, psi = 7, torch.randn(3, 4, dtype=F64, generator=draw)
    lipschitz = float(torch.linalg.matrix_norm(psi, 2))
    bound = sensitivity(bound=1, lipschitz=lipschitz, samples=n)
    phi = torch.nn.functional.normalize(torch.randn(500, n, 4, dtype=F64, generator=draw), dim=2)
    other = torch.nn.functional.normalize(torch.randn(500, 4, dtype=F64, generator=draw), dim=1)
    replaced = phi.clone()
    replaced[:, 0] = other
    moved = ((phi.mean(1) - replaced.mean(1)) @ psi.T).norm(dim=1)
    assert moved.max() <= bound
    assert moved.max() > bound / 2
    worst = torch.linalg.svd(psi)[2][0]  # from one pole to the other, along the longest axis
    assert float((psi @ (2 * worst / n)).norm()) == pytest.approx(bound)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: novel_error_bound(0, 0, []), "one in .0, 2. for each training client.*came 0"),
        (lambda: novel_error_bound(0, 0, [1, 2.5]), "came 2 up to 2.5"),
        (lambda: novel_error_bound(0, 0, [1, 1], [0.1]), "and 1 joint errors"),
        (lambda: novel_error_bound(0, -1, [1]), "approximation must be 0 or more"),
        (lambda: novel_error_bound(0, 0, [1, -1]), "divergence_1 must be 0 or more"),
        (lambda: clients_needed(1, 0, 0.1), "epsilon must be positive"),
        (lambda: samples_needed(1, 0.1, 0.1, 0), "clients must be positive"),
        (lambda: domain_error(1, 10, 2), "delta must be between 0 and 1, came 2"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()

"""pFedKT's theorems 5.1 and 5.2 by hand, and a case that the second in print does not bound."""

import math
from dataclasses import replace

import pytest

from hyperfed.errors import UserError
from hyperfed.theory.pfedhn import Lipschitz
from hyperfed.theory.pfedkt import FedAvgConstants, loss_bound, samples_needed, samples_order

CONDITIONS = Lipschitz(radius=2.0, loss=3.0, weights=4.0, embedding=0.0)
NUMBERS = {"embeddings": 40, "weights": 60, "epsilon": 0.5, "delta": 0.1}


def test_theorem_5_1_by_hand() -> None:
    # 1 / .25 [(40 + 60) log(2 * 3 * 4 / .5) + log 10]
    expected = 4 * (100 * math.log(48) + math.log(10))
    assert samples_order(CONDITIONS, **NUMBERS) == pytest.approx(expected)
    assert samples_order(CONDITIONS, **NUMBERS, constant=3) == pytest.approx(3 * expected)
    # 2 / .25 [100 log(1 + 8 * 24 / .5) + log 20]
    explicit = 8 * (100 * math.log(385) + math.log(20))
    assert samples_needed(CONDITIONS, **NUMBERS) == pytest.approx(explicit)


def test_fewer_numbers_than_none_are_refused() -> None:
    assert samples_order(CONDITIONS, **NUMBERS | {"embeddings": 0}) > 0
    with pytest.raises(UserError, match="embeddings must"):
        samples_order(CONDITIONS, **NUMBERS | {"embeddings": -1})


CONSTANTS = FedAvgConstants(smoothness=6.0, convexity=2.0, local_steps=5, noise=7.0, sampling=1.0)


def test_theorem_5_2_by_hand() -> None:
    # kappa = 3, gamma = 24; 2 kappa / (gamma + T) = 6 / 30; (B + C) / mu = 4.
    # In print 2 L L_phi sigma4^2 = 12 * 10 * 9; mended 8 L L_phi^2 sigma4^2 = 48 * 100 * 9.
    arguments = {"weights_lipschitz": 10.0, "weights_norm": 3.0}
    printed = loss_bound(CONSTANTS, 6, **arguments, published=True)
    assert printed == pytest.approx({"noise": 0.2 * 4, "start": 0.2 * 1080})
    mended = loss_bound(CONSTANTS, 6, **arguments)
    assert mended == pytest.approx({"noise": 0.2 * 4, "start": 0.2 * 43_200})


def test_more_local_steps_than_8_kappa_slow_the_bound_as_in_li_et_al() -> None:
    # gamma = E = 36; kappa / (gamma + T) mu gamma / 2 |w_0 - w*|^2 = 3 / 42 * 36 * (2 * 10 * 3)^2.
    slow = loss_bound(
        replace(CONSTANTS, local_steps=36), 6, weights_lipschitz=10.0, weights_norm=3.0
    )
    assert slow["start"] == pytest.approx(3 / 42 * 36 * 3600)
    assert slow["noise"] == pytest.approx(6 / 42 * 4)


def test_a_quadratic_exceeds_theorem_5_2_in_print_and_meets_the_mended_one() -> None:
    """One client, omega = L_phi phi, f = omega^2 / 2, full gradients: B = C = 0, kappa = 1.

    phi starts at sigma4 and its best is -sigma4, as far as its ball allows. Li et al.'s steps are
    2 / (mu (gamma + t)), gamma 8.
    """
    constants = FedAvgConstants(1.0, 1.0, 1, 0.0, 0.0)
    lipschitz, norm = 0.5, 2.0
    distance = lipschitz * 2 * norm
    for step in range(20):
        arguments = {"weights_lipschitz": lipschitz, "weights_norm": norm}
        left = distance**2 / 2
        if step < 2:
            assert left > sum(loss_bound(constants, step, **arguments, published=True).values())
        assert left <= sum(loss_bound(constants, step, **arguments).values()) + 1e-12
        distance *= 1 - 2 / (8 + step)
    start = loss_bound(constants, 0, **arguments)["start"]
    assert start == pytest.approx((lipschitz * 2 * norm) ** 2 / 2)  # with equality


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: samples_order(CONDITIONS, **(NUMBERS | {"epsilon": 30.0})),
            "it is 0.8 times that",
        ),
        (
            lambda: samples_order(CONDITIONS, **(NUMBERS | {"epsilon": 24.0})),
            "it is 1 times that",
        ),
        (
            lambda: samples_order(CONDITIONS, **(NUMBERS | {"delta": 0.0})),
            "delta must be between 0 and 1",
        ),
        (
            lambda: samples_needed(CONDITIONS, **(NUMBERS | {"weights": 0})),
            "weights must be positive",
        ),
        (lambda: replace(CONSTANTS, convexity=7.0), "at least convexity, came 6.0 and 7.0"),
        (lambda: replace(CONSTANTS, noise=-1.0), "noise must be 0 or more"),
        (
            lambda: loss_bound(CONSTANTS, -1, weights_lipschitz=1, weights_norm=1),
            "rounds must be 0 or more",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()

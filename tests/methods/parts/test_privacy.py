"""Noise and its accounting against the definition of differential privacy."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from scipy.stats import norm

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods.parts.privacy import (
    GaussianMechanism,
    Ledger,
    PrivacyConfig,
    add_noise,
    analytic_multiplier,
    classical_multiplier,
    sensitivity,
)
from hyperfed.runs import config as configuration
from hyperfed.trees.checkpoints import load_state, save_state

BUDGETS = [(0.1, 1e-5), (0.3, 0.01), (1.0, 1e-5), (4.0, 1e-3), (30.0, 1e-6)]


def delta_of(epsilon: float, multiplier: float) -> float:
    """The exact delta of Gaussian noise (Balle and Wang, 2018, theorem 8)."""
    half, shift = 1 / (2 * multiplier), epsilon * multiplier
    return float(norm.cdf(half - shift) - math.exp(epsilon) * norm.cdf(-half - shift))


def test_sensitivity_by_hand() -> None:
    assert sensitivity(bound=1, lipschitz=1, samples=3000) == pytest.approx(2 / 3000)
    assert sensitivity(bound=3, lipschitz=0.5, samples=4) == pytest.approx(0.75)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_analytic_calibration_is_exactly_private(epsilon: float, delta: float) -> None:
    multiplier = analytic_multiplier(epsilon, delta)
    assert delta_of(epsilon, multiplier) == pytest.approx(delta, rel=1e-6)
    assert delta_of(epsilon, 0.99 * multiplier) > delta  # less noise would not do


def test_the_papers_formula_by_hand() -> None:
    """sigma^2 = 2 Delta^2 ln(1.25/delta) / epsilon^2, section 7."""
    sigma = GaussianMechanism(0.3, 0.01, "classical").sigma(2 / 3000)
    assert sigma**2 == pytest.approx(2 * (2 / 3000) ** 2 * math.log(125) / 0.09)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (0.3, 0.01), (0.99, 1e-3)])
def test_the_papers_formula_is_private_below_1_with_more_noise_than_need_be(
    epsilon: float, delta: float
) -> None:
    multiplier = classical_multiplier(epsilon, delta)
    assert delta_of(epsilon, multiplier) < delta
    assert multiplier > analytic_multiplier(epsilon, delta)


def test_the_papers_formula_is_refused_where_it_does_not_hold() -> None:
    assert delta_of(30, math.sqrt(2 * math.log(1.25e6)) / 30) > 1e-6  # the reason
    for epsilon in (1.0, 30.0):
        with pytest.raises(UserError, match=rf"below 1 only, came {epsilon}: .*'analytic'"):
            classical_multiplier(epsilon, 1e-6)


def test_wrong_numbers_are_refused() -> None:
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="epsilon must be positive and finite, came"):
            analytic_multiplier(epsilon, 0.1)
    for delta in (0.0, 1.0, -0.1):
        with pytest.raises(UserError, match="delta must be between 0 and 1, came"):
            classical_multiplier(0.5, delta)
    with pytest.raises(UserError, match="samples must be positive and finite, came 0"):
        sensitivity(1, 1, 0)


# Noise


def test_no_sigma_no_noise() -> None:
    value = torch.linspace(0, 1, 5)
    assert torch.equal(add_noise(value, 0.0, torch.Generator()), value)


def test_noise_is_gaussian_of_the_calibrated_size_and_a_function_of_its_generator() -> None:
    sigma = GaussianMechanism(0.3, 0.01).sigma(sensitivity(1, 1, 3000))
    value = torch.full((40_000,), 7.0, dtype=torch.float64)
    noise = add_noise(value, sigma, torch.Generator().manual_seed(3)) - 7
    assert noise.std().item() == pytest.approx(sigma, rel=0.015)  # four standard errors
    assert abs(noise.mean().item()) < 4 * sigma / 200
    inside = (noise.abs() < sigma).double().mean().item()
    assert inside == pytest.approx(0.6827, abs=0.01)
    again = add_noise(value, sigma, torch.Generator().manual_seed(3)) - 7
    assert torch.equal(noise, again)


# Accounting


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_one_query_costs_what_it_was_calibrated_for(epsilon: float, delta: float) -> None:
    ledger = Ledger(epsilon, delta).after(analytic_multiplier(epsilon, delta))
    assert ledger.spent == pytest.approx(epsilon, rel=1e-8)
    assert Ledger(epsilon, delta).spent == 0


def test_queries_compose_exactly() -> None:
    """With multiplier z, k queries are one with z / sqrt(k); different ones by their squares."""
    z, delta = analytic_multiplier(0.5, 1e-5), 1e-5
    ledger = Ledger(100, delta)
    spent = [0.0]
    for k in range(1, 6):
        ledger = ledger.after(z)
        spent.append(ledger.spent)
        assert delta_of(spent[-1], z / math.sqrt(k)) == pytest.approx(delta, rel=1e-6)
        assert spent[-1] < k * 0.5 + 1e-9  # never worse than adding epsilons up
    assert spent == sorted(set(spent))
    mixed = Ledger(100, delta).after(3.0).after(4.0).spent
    assert delta_of(mixed, 12 / 5) == pytest.approx(delta, rel=1e-6)
    assert Ledger(100, delta).after(4.0).after(3.0).spent == pytest.approx(mixed)


def test_it_agrees_with_the_librarys_general_accountant() -> None:
    """Which composes numerically, on a grid, and errs on the safe side."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    ledger, accountant = Ledger(100, 1e-5), PLDAccountant()
    for multiplier in (2.0, 3.0, 5.0):
        ledger = ledger.after(multiplier)
        accountant.compose(GaussianDpEvent(multiplier))
    theirs = accountant.get_epsilon(1e-5)
    assert theirs - 1e-3 < ledger.spent <= theirs


def test_a_query_beyond_the_budget_is_refused_and_not_recorded() -> None:
    z = analytic_multiplier(0.5, 1e-5)
    ledger = Ledger(1.0, 1e-5).after(z).after(z).after(z)  # not two: they cost less than 2 x 0.5
    message = r"within epsilon 1 at delta 1e-05, but after 3 of them .* bring it to 1\.\d+; use the"
    with pytest.raises(UserError, match=message):
        ledger.after(z)
    assert ledger.multipliers == (z, z, z)
    with pytest.raises(UserError, match="multiplier must be positive"):
        ledger.after(0.0)


def test_a_ledger_goes_through_a_checkpoint(tmp_path: Any) -> None:
    ledger = Ledger(5, 1e-5).after(2.0).after(math.pi)
    save_state(tmp_path / "state", {"memory": ledger.state()}, {})
    tree, _ = load_state(tmp_path / "state")
    assert Ledger(5, 1e-5).load(tree["memory"]) == ledger
    assert trees.count_bytes(ledger.state()) == 16


# Settings


def test_release_adds_noise_and_keeps_the_ledger_in_memory() -> None:
    settings = PrivacyConfig(epsilon=0.3, budget=0.5)
    value, memory = torch.zeros(3, dtype=torch.float64), {}
    sent = settings.release(value, 0.1, memory, torch.Generator().manual_seed(0))
    noise = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sent, 0.1 * analytic_multiplier(0.3, 0.01) * noise)
    settings.release(value, 0.1, memory, torch.Generator())
    before = trees.clone(memory)
    with pytest.raises(UserError, match="after 2 of them"):
        settings.release(value, 0.1, memory, torch.Generator())
    torch.testing.assert_close(memory, before, rtol=0, atol=0)


def test_without_a_budget_one_query_is_all() -> None:
    """Or, with more noise than need be, as many as fit: the ledger counts what was really told."""
    excess = classical_multiplier(0.3, 0.01) / analytic_multiplier(0.3, 0.01)
    for calibration, queries in (("analytic", 1), ("classical", int(excess**2))):
        settings = PrivacyConfig(epsilon=0.3, calibration=calibration)
        memory: dict[str, Any] = {}
        for _ in range(queries):
            settings.release(torch.zeros(3), 0.1, memory, torch.Generator())
        with pytest.raises(UserError, match=rf"within epsilon 0\.3 .* after {queries} of them"):
            settings.release(torch.zeros(3), 0.1, memory, torch.Generator())


def test_without_epsilon_nothing_happens() -> None:
    value, memory = torch.ones(3), {}
    assert PrivacyConfig().release(value, 0.1, memory, torch.Generator()) is value
    assert memory == {}
    assert PrivacyConfig().privacy() is None


def test_the_record_is_plain_data() -> None:
    assert PrivacyConfig(epsilon=0.5, delta=1e-3, calibration="classical").privacy() == {
        "mechanism": "gaussian, classical calibration",
        "adjacency": "one sample replaced",
        "epsilon": 0.5,
        "delta": 1e-3,
        "noise_multiplier": math.sqrt(2 * math.log(1250)) / 0.5,
        "epsilon_budget": 0.5,
    }


def test_wrong_settings_are_refused_before_a_run_begins() -> None:
    with pytest.raises(UserError, match="below 1 only, came 2"):
        configuration.from_keys("itpfl", {"method": {"epsilon": 2.0, "calibration": "classical"}})
    for wrong in ({"epsilon": 0.0}, {"epsilon": math.inf}, {"delta": 0.0}, {"delta": 1.0}):
        with pytest.raises(ValidationError):
            PrivacyConfig(**wrong)

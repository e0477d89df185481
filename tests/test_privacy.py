"""Noise and its accounting against the definition of differential privacy."""

import math
from typing import Any

import pytest
import torch
from scipy.stats import norm

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.privacy import (
    GaussianMechanism,
    Ledger,
    Noise,
    Releases,
    analytic_multiplier,
    classical_multiplier,
    multiplier_of,
    secret_noise,
    seeded_noise,
    sensitivity,
    spent,
)
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


def seeded(like: torch.Tensor) -> torch.Tensor:
    return seeded_noise(torch.Generator().manual_seed(3))(like)


@pytest.mark.parametrize("draw", [seeded, secret_noise])
def test_noise_is_normal(draw: Noise) -> None:
    noise = draw(torch.empty(200, 200, dtype=torch.float64))
    assert noise.std().item() == pytest.approx(1, rel=0.018)  # five standard errors
    assert abs(noise.mean().item()) < 5 / 200
    for bound in (0.5, 1.0, 2.0):
        inside = (noise.abs() < bound).double().mean().item()
        assert inside == pytest.approx(norm.cdf(bound) - norm.cdf(-bound), abs=0.0125)
    rows = noise - noise.mean(dim=1, keepdim=True)
    together = (rows[::2] * rows[1::2]).mean(dim=1)  # of rows with each other: independent
    assert abs(together.mean().item()) < 5 / 141
    assert draw(torch.empty(3)).dtype == torch.float32


@pytest.mark.parametrize(("byte", "quantile"), [(b"\xff", 1 - 2.0**-53), (b"\0", 2.0**-53)])
def test_secret_noise_is_finite_whatever_the_generator_gives(
    byte: bytes, quantile: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.urandom", lambda count: byte * count)
    drawn = secret_noise(torch.empty(3, dtype=torch.float64))
    assert drawn.tolist() == pytest.approx([norm.ppf(quantile)] * 3, rel=1e-9)


def test_seeded_noise_is_a_function_of_its_seed_and_secret_noise_of_none() -> None:
    like = torch.empty(7, dtype=torch.float64)
    assert torch.equal(seeded(like), seeded(like))
    torch.manual_seed(0)
    first = secret_noise(like)
    torch.manual_seed(0)
    assert (first != secret_noise(like)).all()


# Letting out

MECHANISM = GaussianMechanism(0.3, 0.01)


def releases(kept: Any = None, question: str = "q", **options: Any) -> Releases:
    def noise(asked: str) -> Noise:
        return seeded_noise(torch.Generator().manual_seed(len(asked)))

    return Releases(kept or {}, lambda sigma: question, noise, **options)


def test_an_answer_has_noise_and_is_in_the_ledger() -> None:
    ours, value = releases(), torch.full((3,), 7.0, dtype=torch.float64)
    sent = ours.release(value, 0.1, MECHANISM, 0.5)
    noise = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sent, 7 + 0.1 * analytic_multiplier(0.3, 0.01) * noise)
    assert ours.kept["multipliers"].tolist() == [MECHANISM.multiplier]
    assert list(ours.kept["answers"]) == ["q"]


def test_the_same_question_has_the_same_answer_and_costs_nothing() -> None:
    first = releases()
    sent = first.release(torch.zeros(3), 0.1, MECHANISM, 0.3)
    for value in (torch.zeros(3), torch.ones(3)):  # other data, too, since this tells no more
        again = releases(first.kept)
        assert torch.equal(again.release(value, 0.1, MECHANISM, 0.3), sent)
        assert again.kept is first.kept


def test_another_question_spends_until_the_budget_is_gone() -> None:
    kept: Any = {}
    for number in range(2):
        ours = releases(kept, "q" * (number + 1))
        ours.release(torch.zeros(3), 0.1, MECHANISM, 0.5)
        kept = ours.kept
    last = releases(kept, "other")
    with pytest.raises(UserError, match=r"within epsilon 0\.5 .* after 2 of them"):
        last.release(torch.zeros(3), 0.1, MECHANISM, 0.5)
    assert last.kept is kept
    last.release(torch.zeros(3), 0.1, MECHANISM, 10.0)  # a larger budget has what is left of it
    assert len(last.kept["multipliers"]) == 3
    assert list(last.kept["answers"]) == ["q", "qq", "other"]


def test_a_budget_is_of_one_run_where_that_is_named_and_of_all_where_none_is() -> None:
    kept: Any = {}
    for run in (7, 9):
        ours = releases(kept, "q" * run)
        ours.release(torch.zeros(3), 0.1, MECHANISM, 0.3, run=run)
        kept = ours.kept
    assert kept["runs"].tolist() == [7, 9]
    for run in (7, 0):
        with pytest.raises(UserError, match=r"within epsilon 0\.3 "):
            releases(kept, "other").release(torch.zeros(3), 0.1, MECHANISM, 0.3, run=run)
    ours = releases(kept, "of none")
    ours.release(torch.zeros(3), 0.1, MECHANISM, 10.0)
    assert ours.kept["runs"].tolist() == [7, 9, 0]  # what each had spent is still known


def test_a_limit_holds_whatever_the_budget_is() -> None:
    ours = releases(limits=[(5.0, 0.01), (0.31, 0.001)])  # the latter is 0.3 at delta 0.01 no more
    with pytest.raises(UserError, match=r"within epsilon 0\.31 at delta 0\.001"):
        ours.release(torch.zeros(3), 0.1, MECHANISM, 100.0)
    assert ours.kept == {}
    first = releases()
    first.release(torch.zeros(3), 0.1, MECHANISM, 0.3, run=7)
    second = releases(first.kept, "other", limits=[(0.4, 0.01)])
    with pytest.raises(UserError, match=r"within epsilon 0\.4 "):  # of all runs
        second.release(torch.zeros(3), 0.1, MECHANISM, 0.3, run=9)


def test_what_is_not_kept_spends_each_time() -> None:
    ours = releases()
    for number in (1, 2):
        ours.release(torch.zeros(3), 0.1, MECHANISM, 0.5, keep=False)
        assert len(ours.kept["multipliers"]) == number
    assert ours.kept["answers"] == {}


def test_a_question_is_named_by_how_much_noise_its_answer_has() -> None:
    """Of one noise in two sizes, the difference would tell what is behind them."""
    ours = Releases({}, str, lambda asked: seeded)
    for reach in (0.1, 0.2):
        ours.release(torch.zeros(3), reach, MECHANISM, 0.5)
    named = [str(reach * MECHANISM.multiplier) for reach in (0.1, 0.2)]
    assert list(ours.kept["answers"]) == named


def test_without_a_budget_beyond_it_one_answer_is_all() -> None:
    """Or, with more noise than need be, as many as fit: the ledger counts what was really told."""
    excess = classical_multiplier(0.3, 0.01) / analytic_multiplier(0.3, 0.01)
    for calibration, queries in (("analytic", 1), ("classical", int(excess**2))):
        kept: Any = {}
        mechanism = GaussianMechanism(0.3, 0.01, calibration)  # type: ignore[arg-type]
        for number in range(queries):
            ours = releases(kept, f"{number}")
            ours.release(torch.zeros(3), 0.1, mechanism, 0.3)
            kept = ours.kept
        with pytest.raises(UserError, match=rf"within epsilon 0\.3 .* after {queries} of them"):
            releases(kept, "last").release(torch.zeros(3), 0.1, mechanism, 0.3)


def test_records_say_what_the_client_spent_that_spent_most() -> None:
    """Not of the one that answered most."""
    z = MECHANISM.multiplier
    told = ([2 * z], [z], [2 * z, 2 * z])
    found = spent([{}, *({"multipliers": torch.tensor(each)} for each in told)], 0.01)
    assert delta_of(found["epsilon_spent"], z) == pytest.approx(0.01, rel=1e-5)
    assert (found["answers"], found["answered"]) == (1, 3)
    assert spent([{}], 0.01) == {"epsilon_spent": 0.0, "answers": 0, "answered": 0}


# Accounting


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_one_query_costs_what_it_was_calibrated_for(epsilon: float, delta: float) -> None:
    ledger = Ledger(epsilon, delta).after(analytic_multiplier(epsilon, delta))
    assert ledger.spent == pytest.approx(epsilon, rel=1e-8)
    assert Ledger(epsilon, delta).spent == 0
    with pytest.raises(UserError, match="must stay within epsilon"):  # rounding is all it forgives
        Ledger(epsilon * (1 - 1e-7), delta).after(analytic_multiplier(epsilon, delta))


@pytest.mark.parametrize(
    ("epsilon", "delta"), [*BUDGETS, (1e-6, 1e-10), (1e10, 1e-3), (2e13, 1e-5)]
)
def test_what_noise_was_made_for_is_within_the_budget_whatever_that_is(
    epsilon: float, delta: float
) -> None:
    """A run with more noise, or hardly any, ends as others do."""
    ledger, z = Ledger(epsilon, delta), multiplier_of(epsilon, delta, 37)
    for _ in range(37):
        ledger = ledger.after(z)
    assert ledger.spent == pytest.approx(epsilon, rel=1e-4)
    with pytest.raises(UserError, match="after 37 of them"):
        ledger.after(z)


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
        assert delta_of(0.5, multiplier_of(0.5, delta, k) / math.sqrt(k)) == pytest.approx(delta)
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
    message = r"within epsilon 1 at delta 1e-05, but after 3 of them .* bring it to 1\.\d+; ask"
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

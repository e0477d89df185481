"""Differential privacy of what a client sends: sensitivity, Gaussian noise, accounting.

A mechanism is (epsilon, delta)-private if for any two data sets that differ in one sample, and any
set of outputs, the probabilities p and q of that set obey p <= exp(epsilon) q + delta. Here two
data sets differ by **replacing** one sample: how many there are, n, is no secret.

The noise is only as secret as the generator that draws it. A simulation draws it from the run's
seed, so that it can be repeated; that shows what privacy costs, and protects nobody from someone
who knows the seed. A site that means it must seed its own clients, in secret. Neither are the low
bits of floating-point samples protected (Mironov, CCS 2012).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated
from torch import Tensor

from hyperfed.errors import UserError, check_positive
from hyperfed.trees import Tree

Calibration = Literal["analytic", "classical"]
"""How much noise: exactly enough, or the textbook's formula, which IT-PFL-HN's paper uses."""

ROUNDING = 1e-9
"""Relative excess over a budget that is put down to rounding: epsilon is found by root search."""


def sensitivity(bound: float, lipschitz: float, samples: int) -> float:
    """Returns how far replacing one sample moves g(D) = psi(1/n sum_x phi(x)), in Euclidean norm.

    2 L B / n (IT-PFL-HN, lemma 7.1 as appendix D proves it; the lemma's statement lacks the 2).

    Args:
        bound: B, the largest norm of phi.
        lipschitz: L, the Lipschitz constant of the linear map psi.
        samples: n.
    """
    check_positive(bound=bound, lipschitz=lipschitz, samples=samples)
    return 2 * lipschitz * bound / samples


def analytic_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest sigma / sensitivity of Gaussian noise that is (epsilon, delta)-private.

    Balle and Wang (ICML 2018, theorem 8), valid for every epsilon > 0.

    Raises:
        UserError: epsilon is not positive, or delta not between 0 and 1.
    """
    import dp_accounting  # takes seconds to import

    _check_budget(epsilon, delta)
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def classical_multiplier(epsilon: float, delta: float) -> float:
    """Returns sqrt(2 ln(1.25 / delta)) / epsilon, the textbook's sigma / sensitivity.

    Dwork and Roth (2014, theorem A.1); IT-PFL-HN, section 7. Its proof needs epsilon < 1; beyond,
    the noise can be too little for what it claims (Balle and Wang, section 2.2).

    Raises:
        UserError: epsilon is not between 0 and 1, or delta not between 0 and 1.
    """
    _check_budget(epsilon, delta)
    if epsilon >= 1:
        raise UserError(
            f"the classical calibration holds for epsilon below 1 only, came {epsilon}: beyond, "
            "its noise can be too little; use the calibration 'analytic'"
        )
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


@dataclass(frozen=True)
class GaussianMechanism:
    """Gaussian noise in proportion to a sensitivity.

    Attributes:
        epsilon: of one query.
        delta: of one query.
        calibration: what sets the amount of noise.

    Raises:
        UserError: the calibration does not hold for these numbers.
    """

    epsilon: float
    delta: float
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        self.multiplier  # noqa: B018  so that wrong numbers are refused at once

    @property
    def multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity."""
        if self.calibration == "classical":
            return classical_multiplier(self.epsilon, self.delta)
        return analytic_multiplier(self.epsilon, self.delta)

    def sigma(self, sensitivity: float) -> float:
        """Returns the noise's standard deviation for a query of some sensitivity."""
        return self.multiplier * sensitivity


def add_noise(value: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Returns ``value`` plus independent N(0, sigma^2) noise in each entry."""
    noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return value + sigma * noise.to(value.device)


@dataclass(frozen=True)
class Ledger:
    """What a client has spent of its privacy by Gaussian queries, and what it will spend at most.

    Queries may differ and may depend on earlier answers. Gaussian noise with multipliers z_1 .. z_k
    tells exactly as much as one query with multiplier (sum z_i^-2)^(-1/2) (Dong, Roth and Su, 2022,
    corollary 3.3), so that the composition is exact.

    Attributes:
        epsilon: the budget.
        delta: the delta at which epsilon is spent.
        multipliers: sigma / sensitivity of each query so far.
    """

    epsilon: float
    delta: float
    multipliers: tuple[float, ...] = ()

    @property
    def spent(self) -> float:
        """The epsilon, at ``delta``, of all queries together."""
        import dp_accounting

        if not self.multipliers:
            return 0.0
        precision = math.fsum(multiplier**-2 for multiplier in self.multipliers)
        return float(dp_accounting.get_epsilon_gaussian(precision**-0.5, self.delta))

    def after(self, multiplier: float) -> "Ledger":
        """Returns the ledger after one more query.

        Raises:
            UserError: the query would exceed the budget. Nothing may be sent then.
        """
        check_positive(multiplier=multiplier)
        ledger = Ledger(self.epsilon, self.delta, (*self.multipliers, multiplier))
        if ledger.spent > self.epsilon * (1 + ROUNDING):
            raise UserError(
                f"all queries to a client must stay within epsilon {self.epsilon:g} at delta "
                f"{self.delta:g}, but after {len(self.multipliers)} of them this one would bring "
                f"it to {ledger.spent:.4g}; use the descriptor that was sent before, add more "
                "noise (a smaller epsilon for each query) or raise the budget"
            )
        return ledger

    def state(self) -> Tree:
        """Returns {"multipliers": (k,) float64}, what a checkpoint or a client's memory keeps."""
        return {"multipliers": torch.tensor(self.multipliers, dtype=torch.float64)}

    def load(self, state: Tree) -> "Ledger":
        """Returns a ledger of this budget with the queries of a :meth:`state`."""
        return Ledger(self.epsilon, self.delta, tuple(state["multipliers"].tolist()))


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class PrivacyConfig:
    """The settings of a private method, under the same keys for all.

    Attributes:
        epsilon: of one query to a client, which makes it private; no noise where not given.
        delta: of one query, and of all together; the default is that of IT-PFL-HN's paper.
        budget: epsilon that all queries to a client may cost; that of one where not given.
        calibration: of the noise.
    """

    epsilon: Annotated[FiniteFloat, Field(gt=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.01
    budget: Annotated[FiniteFloat, Field(gt=0)] | None = None
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        self.privacy()  # so that a calibration that does not hold is refused at once

    @property
    def mechanism(self) -> GaussianMechanism | None:
        """What a client does before it sends anything; None without privacy."""
        if self.epsilon is None:
            return None
        return GaussianMechanism(self.epsilon, self.delta, self.calibration)

    def privacy(self) -> dict[str, Any] | None:
        """Returns what a record says of the privacy of a client, plain data; None without any."""
        mechanism = self.mechanism
        if mechanism is None:
            return None
        return {
            "mechanism": f"gaussian, {mechanism.calibration} calibration",
            "adjacency": "one sample replaced",
            "epsilon": mechanism.epsilon,
            "delta": mechanism.delta,
            "noise_multiplier": mechanism.multiplier,
            "epsilon_budget": self.budget or mechanism.epsilon,
        }

    def release(
        self, value: Tensor, sensitivity: float, memory: Tree, generator: torch.Generator
    ) -> Tensor:
        """Returns ``value`` as a client may send it: with noise, if these settings have any.

        Args:
            value: what was computed from the client's data.
            sensitivity: how far replacing one sample moves it, in Euclidean norm.
            memory: the client's, where its ledger is kept as "ledger".
            generator: draws the noise.

        Raises:
            UserError: the client's budget is spent.
        """
        mechanism = self.mechanism
        if mechanism is None:
            return value
        ledger = Ledger(self.budget or mechanism.epsilon, mechanism.delta)
        if "ledger" in memory:
            ledger = ledger.load(memory["ledger"])
        memory["ledger"] = ledger.after(mechanism.multiplier).state()
        return add_noise(value, mechanism.sigma(sensitivity), generator)


def _check_budget(epsilon: float, delta: float) -> None:
    """Raises ``UserError`` unless epsilon > 0 (and finite) and 0 < delta < 1."""
    check_positive(epsilon=epsilon)
    if not 0 < delta < 1:
        raise UserError(
            f"delta must be between 0 and 1, came {delta}; choose one well below 1 / samples"
        )

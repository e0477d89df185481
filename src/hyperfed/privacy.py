"""Differential privacy of what a client sends: sensitivity, Gaussian noise, accounting.

A mechanism is (epsilon, delta)-private if for any two data sets that differ in one sample, and any
set of outputs, the probabilities p and q of that set obey p <= exp(epsilon) q + delta. Here two
data sets differ by **replacing** one sample: how many there are, n, is no secret.

The noise is only as secret as what draws it. A simulation draws it from the run's seed, so that it
can be repeated; that shows what privacy costs, and protects nobody from someone who knows the seed.
A site draws it from its operating system's generator. The low bits of floating-point samples are
protected by neither (Mironov, CCS 2012).
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hyperfed.errors import SpentError, UserError, check_positive
from hyperfed.trees import Tree

Calibration = Literal["analytic", "classical"]
"""How much noise: exactly enough, or the textbook's formula, which IT-PFL-HN's paper uses."""

ROUNDING = 1e-9
"""Relative excess of mu^2 over what a budget allows that is put down to rounding."""

REMEDY = (
    "ask what was asked before, which costs nothing, add more noise (a smaller epsilon for each "
    "query) or raise the budget"
)
"""What to do where a budget is spent whose answers are all kept."""


def sensitivity(bound: float, lipschitz: float, samples: int) -> float:
    """Returns how far replacing one sample moves g(D) = psi(1/n sum_x phi(x)), in Euclidean norm.

    2 L B / n (IT-PFL-HN, lemma 7.1, as appendix D proves it).

    Args:
        bound: B, the largest norm of phi.
        lipschitz: L, the Lipschitz constant of the linear map psi.
        samples: n.
    """
    check_positive(bound=bound, lipschitz=lipschitz, samples=samples)
    return 2 * lipschitz * bound / samples


@cache
def analytic_multiplier(epsilon: float, delta: float) -> float:
    """Returns the smallest sigma / sensitivity of Gaussian noise that is (epsilon, delta)-private.

    Balle and Wang (ICML 2018, theorem 8), valid for every epsilon > 0.

    Raises:
        UserError: epsilon is not positive, or delta not between 0 and 1.
    """
    import dp_accounting  # takes seconds to import

    _check_budget(epsilon, delta)
    with np.errstate(divide="ignore"):  # noise that leaves no delta at all is tried on the way
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


def multiplier_of(epsilon: float, delta: float, answers: int) -> float:
    """Returns sigma / sensitivity of each of so many Gaussian answers, private all together.

    They may depend on one another. Their composition is exact (:class:`Ledger`), so no bound such
    as that of Renyi divergences is needed.

    Raises:
        UserError: epsilon is not positive, or delta not between 0 and 1.
    """
    check_positive(answers=answers)
    return math.sqrt(answers) * analytic_multiplier(epsilon, delta)


class Mechanism(Protocol):
    """What adds Gaussian noise to an answer."""

    @property
    def delta(self) -> float:
        """At which epsilon is told."""

    @property
    def multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity."""

    @property
    def remedy(self) -> str:
        """What to do where the budget is spent."""

    def sigma(self, sensitivity: float) -> float:
        """Returns the noise's standard deviation for an answer of some sensitivity."""


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

    remedy = REMEDY
    """What to do where the budget is spent."""

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


Noise: TypeAlias = Callable[[Tensor], Tensor]
"""Draws independent N(0, 1) numbers of the shape, dtype and device of a tensor."""


def seeded_noise(generator: torch.Generator) -> Noise:
    """Returns noise that whoever knows the generator's seed can draw too: for simulations."""

    def draw(like: Tensor) -> Tensor:
        noise = torch.randn(like.shape, generator=generator, dtype=like.dtype)
        return noise.to(like.device)

    return draw


def secret_noise(like: Tensor) -> Tensor:
    """Draws noise from the operating system's generator, which no seed tells.

    Each number is the normal distribution's quantile of 52 random bits, in the middle of their
    interval of [0, 1], so that the largest is 8.2: of 53 the last middle would be rounded to 1.
    """
    bits = np.frombuffer(os.urandom(8 * like.numel()), dtype=np.uint64) >> np.uint64(12)
    quantile = (torch.from_numpy(bits.astype(np.float64)) + 0.5) * 2.0**-52
    noise: Tensor = torch.special.ndtri(quantile).view(like.shape)
    return noise.to(dtype=like.dtype, device=like.device)


@lru_cache(2**12)  # a search, and clients that have answered alike have spent alike
def _epsilon(multiplier: float, delta: float) -> float:
    """Returns the epsilon, at ``delta``, of one Gaussian query."""
    import dp_accounting

    with np.errstate(divide="ignore"):
        return float(dp_accounting.get_epsilon_gaussian(multiplier, delta))


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
    def mu_squared(self) -> float:
        """mu^2 of Gaussian differential privacy, the sum of z_i^-2: queries compose by it."""
        return math.fsum(multiplier**-2 for multiplier in self.multipliers)

    @property
    def spent(self) -> float:
        """The epsilon, at ``delta``, of all queries together."""
        return _epsilon(self.mu_squared**-0.5, self.delta) if self.multipliers else 0.0

    @property
    def _most(self) -> float:
        """What :attr:`mu_squared` may be."""
        return analytic_multiplier(self.epsilon, self.delta) ** -2

    def after(self, multiplier: float, remedy: str = REMEDY) -> "Ledger":
        """Returns the ledger after one more query.

        Args:
            multiplier: sigma / sensitivity of the query.
            remedy: what an error says to do.

        Raises:
            SpentError: the query would exceed the budget. Nothing may be sent then.
        """
        check_positive(multiplier=multiplier)
        ledger = Ledger(self.epsilon, self.delta, (*self.multipliers, multiplier))
        # A root search finds an epsilon again to some digits only: mu decides.
        if ledger.spent > self.epsilon and ledger.mu_squared > (1 + ROUNDING) * self._most:
            raise SpentError(
                f"all queries to a client must stay within epsilon {self.epsilon:g} at delta "
                f"{self.delta:g}, but after {len(self.multipliers)} of them this one would bring "
                f"it to {ledger.spent:.4g}; {remedy}"
            )
        return ledger

    def state(self) -> Tree:
        """Returns {"multipliers": (k,) float64}, what a checkpoint or a site's disk keeps."""
        return {"multipliers": torch.tensor(self.multipliers, dtype=torch.float64)}

    def load(self, state: Tree) -> "Ledger":
        """Returns a ledger of this budget with the queries of a :meth:`state`, none of {}."""
        told = tuple(state["multipliers"].tolist()) if state else ()
        return Ledger(self.epsilon, self.delta, told)


class Releases:
    """What one client has let out: every answer is noted and kept, and a repeated one is free.

    It outlives all that a server can forget or ask anew: no round that is taken back, no client
    that starts without memory and no earlier version of one gives a budget back.

    Args:
        kept: as of the client's last answer, {} before its first.
        question: names what is asked, and of which data, by a standard deviation: two that are
            named alike are answered alike.
        noise: of the question that is named.
        limits: (epsilon, delta) that hold for all answers beside the settings' budget.

    Attributes:
        kept: {"multipliers": (k,) of a :class:`Ledger`, "answers": {question: answer}}, {} where
            nothing was let out; with {"runs": (k,) int64} where runs were named, 0 of no name.
    """

    def __init__(
        self,
        kept: Tree,
        question: Callable[[float], str],
        noise: Callable[[str], Noise],
        limits: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.kept = kept
        self._question, self._noise, self._limits = question, noise, limits

    def release(
        self,
        value: Tensor,
        sensitivity: float,
        mechanism: Mechanism,
        budget: float,
        *,
        keep: bool = True,
        run: int = 0,
    ) -> Tensor:
        """Returns ``value`` with noise, or what it was with noise when the same was asked before.

        Args:
            value: what was computed from the client's data.
            sensitivity: how far replacing one sample, or whatever is to be private, moves it, in
                Euclidean norm.
            mechanism: of the noise.
            budget: epsilon that all answers may cost, at the mechanism's delta.
            keep: to give it again for nothing; what is not kept spends each time.
            run: whose answers alone the budget is of; 0 where it is of all.

        Raises:
            SpentError: the budget, or a limit, would be exceeded.
        """
        sigma = mechanism.sigma(sensitivity)
        question = self._question(sigma)
        answers: Tree = self.kept.get("answers", {})
        if question in answers:
            before: Tensor = answers[question]
            return before.to(value.device)
        ledger = Ledger(math.inf, mechanism.delta).load(self.kept)
        runs = self.kept.get("runs", torch.zeros(len(ledger.multipliers), dtype=torch.int64))
        own = [z for z, of in zip(ledger.multipliers, runs, strict=True) if not run or of == run]
        Ledger(budget, mechanism.delta, tuple(own)).after(mechanism.multiplier, mechanism.remedy)
        for epsilon, delta in self._limits:
            Ledger(epsilon, delta, ledger.multipliers).after(mechanism.multiplier, mechanism.remedy)
        ledger = ledger.after(mechanism.multiplier)
        answer = value + sigma * self._noise(question)(value)
        if keep:
            answers = answers | {question: answer.detach().cpu()}
        self.kept = self.kept | ledger.state() | {"answers": answers}
        if run or runs.any():
            self.kept["runs"] = torch.cat([runs, torch.tensor([run])])
        return answer


def not_kept(account: Tree) -> int:
    """Returns how many answers of an account (:class:`Releases`) would be paid for once more."""
    return len(account.get("multipliers", ())) - len(account.get("answers", ()))


def spent(kept: Iterable[Tree], delta: float) -> dict[str, Any]:
    """Returns what records say of what clients have let out, plain data.

    Args:
        kept: what each client has, as of :class:`Releases`.
        delta: at which epsilon is spent.

    Returns:
        {"epsilon_spent": of the client that spent most, "answers": of that client, repeated ones
        not counted, "answered": how many clients did answer}.
    """
    ledgers = [Ledger(math.inf, delta).load(each) for each in kept if each]
    most = max(ledgers, key=lambda ledger: ledger.spent, default=Ledger(math.inf, delta))
    told = {"epsilon_spent": most.spent, "answers": len(most.multipliers)}
    return told | {"answered": len(ledgers)}


def _check_budget(epsilon: float, delta: float) -> None:
    """Raises ``UserError`` unless epsilon > 0 (and finite) and 0 < delta < 1."""
    check_positive(epsilon=epsilon)
    if not 0 < delta < 1:
        raise UserError(
            f"delta must be between 0 and 1, came {delta}; choose one well below 1 / samples"
        )

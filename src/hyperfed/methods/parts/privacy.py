"""The settings of a method whose clients answer with noise; the noise is of hyperfed.privacy."""

from typing import Annotated, Any

from pydantic import ConfigDict, Field, FiniteFloat
from pydantic.dataclasses import dataclass as validated

from hyperfed.privacy import Calibration, GaussianMechanism, Ledger


@validated(frozen=True, config=ConfigDict(extra="forbid"))
class PrivacyConfig:
    """The settings of a private method, under the same keys for all.

    Attributes:
        epsilon: of one query to a client, which makes it private; no noise where not given.
        delta: of one query, and of all together; the default is that of IT-PFL-HN's paper.
        budget: epsilon that all queries to a client may cost; that of one where not given. To ask
            the same of the same data costs nothing, and gives the same noisy answer.
        calibration: of the noise.

    Raises:
        UserError: the calibration does not hold for these numbers, or the budget is for less than
            one answer.
    """

    epsilon: Annotated[FiniteFloat, Field(gt=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.01
    budget: Annotated[FiniteFloat, Field(gt=0)] | None = None
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        mechanism = self.mechanism  # so that a calibration that does not hold is refused at once
        if mechanism is not None and self.budget is not None:
            remedy = "raise method.budget, or leave it out, which is for one answer"
            Ledger(self.budget, self.delta).after(mechanism.multiplier, remedy)

    @property
    def mechanism(self) -> GaussianMechanism | None:
        """What a client does before it sends anything; None without privacy."""
        if self.epsilon is None:
            return None
        return GaussianMechanism(self.epsilon, self.delta, self.calibration)

    def privacy(self) -> dict[str, Any] | None:
        """Returns what these settings promise a client, plain data; None without privacy.

        What was spent is :func:`hyperfed.privacy.spent`.
        """
        mechanism = self.mechanism
        if mechanism is None:
            return None
        return {
            "mechanism": f"gaussian, {mechanism.calibration} calibration",
            "adjacency": "one sample replaced",
            "epsilon_of_an_answer": mechanism.epsilon,
            "delta": mechanism.delta,
            "noise_multiplier": mechanism.multiplier,
            "epsilon_budget": self.budget or mechanism.epsilon,
        }

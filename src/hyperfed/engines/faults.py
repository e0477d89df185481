"""Faults made on purpose, on any engine: they happen where a cohort is asked."""

from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from hyperfed.engines.calls import Call
from hyperfed.system.randomness import generator

Probability = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Faults:
    """Faults made on purpose in training rounds, to see what a shrinking cohort does to a run.

    Attributes:
        drop: probability that a client does not answer in a round.
        nan: probability that a reply of a client is NaN.
    """

    drop: Probability = 0.0
    nan: Probability = 0.0

    def drops(self, seed: int, call: Call) -> bool:
        """Returns whether the client of a call answers nothing in its round."""
        return _chance(self.drop, seed, "drop", call.client, call.round)

    def spoils(self, seed: int, call: Call) -> bool:
        """Returns whether the reply to a call is NaN."""
        return _chance(self.nan, seed, "nan", *call.keys)


def _chance(probability: float, seed: int, *keys: str | int) -> bool:
    if not probability:
        return False
    return float(torch.rand((), generator=generator(seed, "fault", *keys))) < probability

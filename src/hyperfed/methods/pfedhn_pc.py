"""pFedHN-PC (Shamsian et al., ICML 2021): pFedHN with personal classifiers.

Paper: https://arxiv.org/abs/2103.04628, section 3.3.

Sent: the body, which the hypernetwork makes. Kept: the head. Evaluated: the two together.
The hypernetwork makes the feature extractor; each client keeps its last layer between rounds. In
the authors' code **that layer's momentum** outlives the round too, so it does (``keep_momentum``)
in the published presets. As in that code, each client draws a classifier of its own to start with,
in its first round (before that it uses the target's initial one), and trains it at the local rate,
where the text has the server's; the classifier's gradient neither counts for clipping nor is
clipped. A novel client draws a classifier too and fits it and its embedding in the same exchanges.
All of it is pFedHN with one personal layer, so this file holds only what is published for it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from hyperfed.methods import pfedhn
from hyperfed.methods.pfedhn import Client, Server

__all__ = ["PRESETS", "Client", "Config", "Server"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(pfedhn.Config):
    """Settings of pFedHN-PC: pFedHN's, with a larger learning rate and one personal layer."""

    lr: PositiveFloat = 5e-2
    head_layers: NonNegativeInt = 1


PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: preset if name == "default" else {**preset, "method.keep_momentum": True}
    for name, preset in pfedhn.PRESETS.items()
    if name != "pefll"
}

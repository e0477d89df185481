"""HeurpFedLA (Ma et al., CVPR 2022): pFedLA that sends a client fewer layers.

Paper: https://arxiv.org/abs/2205.03993, section 3.3.

Sent: the mixture but for the ``retain`` layers on which the client's own weight is largest.
Returned: the whole trained model. Kept by the client: its last trained model, whose layers it goes
on with where none came. Evaluated: the mixture with the retained layers. A novel client is sent the
mean of all models, as in pFedLA. All of it is pFedLA with ``retain`` above 0, so this file holds
only what is published for it: one layer in tables 1 and 2, up to three in the table of costs.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed.methods import pfedla
from hyperfed.methods.pfedla import Client, Server

__all__ = ["PRESETS", "Client", "Config", "Server"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(pfedla.Config):
    """Settings of HeurpFedLA: pFedLA's, with one layer retained."""

    retain: PositiveInt = 1


PRESETS: Mapping[str, Mapping[str, Any]] = pfedla.PRESETS

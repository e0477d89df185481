"""HeurpFedLA (Ma et al., CVPR 2022): pFedLA that sends a client fewer layers.

Paper: https://arxiv.org/abs/2205.03993, section 3.3.

Sent: the mixture but for the retained layers. Returned: the whole trained model. Kept by the
client: its last trained model, whose layers it goes on with where none came. Evaluated: the mixture
with the retained layers. A novel client is sent the mean of all models, as in pFedLA. All of it is
pFedLA with retained layers, so this file holds only what is published for it: one layer in tables 1
and 2, up to three in the table of costs.

Which layers: equation 12 takes for each client the ``retain`` layers on which its own weight is
largest. The table of costs is of one list for all clients and rounds, which ``retained_layers``
names: ["fc1", "conv2", "fc3"] on CIFAR-10, ["fc3", "fc1"] on EMNIST. The statistics of a
normalisation without scale and shift are no layer and travel all the same, as in those costs.

The paper does not say what becomes of the weights of a retained layer. They had no part in the
model that was trained, so their gradient is zero and nothing is pulled back. Hence a ranking begins
as noise, the softmax of what was drawn, all of it around 1 / n; and who is first stands still while
the own weights of the others grow, is overtaken, and is sent again. On a small problem of seven
clients and four layers (figure 6's classes, 80 rounds, three seeds) a client's first layer changed
about 20 times with one layer retained, 0.8 times in pFedLA: layers took turns, their weights held
together. Own weights ended at 0.2 to 0.6, pFedLA's at 0.3 to 1.0. Where weights hardly move, the
noise decides for good: 8 of 10 clients on a fiftieth of CIFAR-10 ended 40 rounds with the layer
that was first before them. Of these trials no records are kept.
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

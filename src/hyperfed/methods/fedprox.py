"""FedProx (Li et al., MLSys 2020): FedAvg whose local training stays near the global model.

Paper: https://arxiv.org/abs/1812.06127, algorithm 2.

In a round client k minimises h(w) = F_k(w) + mu/2 |w - w_t|^2, with F_k the loss on its own data
and w_t the global model that it received, a constant.

Sent: the whole model, batch-norm buffers included, both ways. Kept: nothing. Aggregated: the mean
of the trained models, weighted by training examples: algorithm 2 draws clients in proportion to
their examples and weighs them alike, but the authors' code draws them alike and weighs them so.
Evaluated: the global model. A novel client uses the global model too, after ``novel_steps`` steps
on its own h (none by default), of which nothing is sent back. A task with several target sizes has
one global model for each. With mu = 0 this is FedAvg.

The paper also lets slow clients do less work, which the authors simulate; here all do as much.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat
from pydantic.dataclasses import dataclass

from hyperfed.federation import step
from hyperfed.methods import fedavg
from hyperfed.methods.fedavg import Server
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.training import fit, proximal
from hyperfed.trees import Model

__all__ = ["PRESETS", "Client", "Config", "Server"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(fedavg.Config):
    """Settings of FedProx: FedAvg's, and how far training goes.

    Attributes:
        proximity: mu; 0 is FedAvg. The authors' advice is to search 0.001, 0.01, 0.1, 0.5 and 1.
    """

    proximity: NonNegativeFloat = 0.1


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # Section 5 and the authors' scripts, for MNIST without slow clients: 10 of 1,000 clients a
    # round, 20 epochs of plain SGD on batches of 10. The rate is that of MNIST in appendix C.
    "paper": {
        "rounds": 100,
        "cohort": 10,
        "evaluate_every": 1,
        "method.local_epochs": 20,
        "method.batch_size": 10,
        "method.local_lr": 3e-2,
        "method.local_momentum": 0.0,
        "method.local_weight_decay": 0.0,
        "method.proximity": 1.0,
    },
}


class Client(fedavg.Client):
    """Trains the global model on its own data, without going far."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns the model that was trained on F(w) + mu/2 |w - w_t|^2."""
        near = proximal(self.objective, model, self.config.proximity, self.parameters)
        return fit(near, model, self.batches, self.config.local, trainable=self.parameters).model

"""Ditto (Li et al., ICML 2021): a personal model beside the global one, and near it.

Paper: https://arxiv.org/abs/2012.04221, algorithm 1.

Client k's personal model v_k minimises F_k(v) + lambda/2 |v - w|^2, where F_k is the loss on its
own data and w the global model, which FedAvg trains. In a round a client takes as many steps
towards either, on the same batches: v's with the w that it received, a constant.

Sent: the whole global model w, batch-norm buffers included, both ways. Kept: the personal model v,
buffers included, which starts from the first w that a client receives (the authors' code: from the
initial model, whenever that is); with ``keep_momentum`` its momentum too. Aggregated: the mean of
the trained global models, weighted by training examples, as in FedAvg (the authors' code draws
clients in proportion to their examples and weighs them alike). Evaluated: v; a client that was
never asked uses w. A novel client trains its v from w for ``novel_steps`` steps, w frozen, nothing
sent back. A task with several target sizes has one global model for each. With lambda = 0 personal
models are those of clients alone, from the first w that each received.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from hyperfed import federation
from hyperfed.federation import step
from hyperfed.methods.fedavg import Server
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.training import Batch, PersonalConfig, fit, proximal
from hyperfed.trees import Model, Tree

__all__ = ["PRESETS", "Client", "Config", "Server"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of Ditto. Those of local training are both models', an optimiser for each.

    Attributes:
        proximity: lambda; the larger, the nearer is v to w.
        novel_steps: steps in which a novel client trains its personal model.
    """

    proximity: NonNegativeFloat = 1.0
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The authors' script for Fashion-MNIST, without attackers.
    "official": {
        "rounds": 5000,
        "cohort": 10,
        "evaluate_every": 10,
        "method.local_steps": 2,
        "method.batch_size": 16,
        "method.local_lr": 5e-2,
        "method.local_momentum": 0.0,
        "method.local_weight_decay": 0.0,
        "method.proximity": 1.0,
    },
}


class Client(federation.Client):
    """Keeps a personal model near the global one."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Trains the personal and the global model on the same batches; returns the latter."""
        batches = list(self.batches)
        self.train_near(model, batches)
        return fit(
            self.objective, model, batches, self.config.local, trainable=self.parameters
        ).model

    @step
    def join(self, model: Model) -> Tree:
        """Trains the personal model alone; replies with nothing."""
        self.train_near(model, self.batches)
        return {}

    def train_near(self, center: Model, batches: Iterable[Batch]) -> None:
        """Takes steps on F(v) + lambda/2 |v - w|^2, with w the ``center``, and keeps v."""
        near = proximal(self.objective, center, self.config.proximity, self.parameters)
        v, names = self.personal_model(center), self.parameters
        self.memory["personal"] = self.train_own(near, v, batches, trainable=names, own=names)

    def personal_model(self, received: Model) -> Model:
        """Returns v, or the global model if there is none."""
        personal: Model = self.memory.get("personal", received)
        return personal

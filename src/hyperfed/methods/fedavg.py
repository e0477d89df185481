"""FedAvg (McMahan et al., AISTATS 2017): one model for all, the mean of what clients trained.

Paper: https://arxiv.org/abs/1602.05629, algorithm 1.

Sent: the whole model, batch-norm buffers included, both ways. Kept: nothing. Aggregated: the mean
of the trained models, weighted by training examples. Evaluated: the global model. A novel client
uses the global model too, after ``novel_steps`` steps of fine-tuning on its own data (none by
default), of which nothing is sent back. A task with several target sizes has one global model for
each.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, average, step
from hyperfed.methods.parts.presets import DEFAULT, PEFLL, PFEDHN
from hyperfed.training import LocalConfig, Steps, fit
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of FedAvg.

    Attributes:
        novel_steps: fine-tuning steps of a novel client.
    """

    novel_steps: NonNegativeInt = 0


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "pfedhn": PFEDHN,
    "pefll": PEFLL,
}


class Client(federation.Client):
    """Trains the global model on its own data."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns the trained model."""
        return fit(
            self.objective, model, self.batches, self.config.local, trainable=self.parameters
        ).model

    @step(draws_as=train_model)
    def join(self, model: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.scratch["personal"] = self.train_model(model)
        return {}

    def personal_model(self, received: Model) -> Model:
        """Returns what a novel client trained, or the global model."""
        personal: Model = self.scratch.get("personal", received)
        return personal


class Server(federation.Server):
    """Holds the global model, ``self.model[size]``.

    Other methods have it too: a step is found by its name, so it asks those of their own Client.
    """

    def __init__(self, outline: Outline, config: LocalConfig) -> None:
        super().__init__(outline, config)
        self.model: Tree = {size: outline.initial(size) for size in outline.models}

    def round(self, clients: Cohort) -> None:
        """Replaces the global model by the weighted mean of the trained ones."""
        batches = self.config.batches
        self.model = average(clients, Client.train_model, self.model, batches)

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model; a novel client may train it first."""
        model: Model = self.model[clients.size]
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.join, model, batches=batches)
        return model

"""Local: every client trains alone.

The reference that says what cooperation is worth.

Sent: nothing, in either direction. Kept: the model; with ``keep_momentum`` its momentum too, so
that the rounds of a client make up one run of its optimiser. Evaluated: that model. A novel client
trains its own from the initial weights for ``novel_steps`` steps.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from hyperfed import federation
from hyperfed.federation import Cohort, step
from hyperfed.methods.parts.presets import PEFLL
from hyperfed.training import PersonalConfig, Steps
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of Local.

    Attributes:
        novel_steps: steps of a novel client.
    """

    novel_steps: NonNegativeInt = 2000


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"rounds": 10, "cohort": 1.0, "evaluate_every": 5},
    # pFedHN, section 5: 2,000 steps on each client, which are of one optimiser.
    "pfedhn": {
        "rounds": 40,
        "cohort": 1.0,
        "evaluate_every": 1,
        "method.keep_momentum": True,
    },
    # PeFLL, section 5: 200 epochs on each client, batches of 32, likewise.
    "pefll": {
        **PEFLL,
        "rounds": 200,
        "cohort": 1.0,
        "method.local_epochs": 1,
        "method.keep_momentum": True,
    },
}


class Client(federation.Client):
    """Trains a model that never leaves it."""

    @step
    def train_model(self) -> Tree:
        """Goes on training; replies with nothing."""
        self.memory["model"] = self.train_own(
            self.objective,
            self.personal_model({}),
            self.batches,
            trainable=self.parameters,
            own=self.parameters,
        )
        return {}

    def personal_model(self, received: Tree) -> Model:
        """Returns the client's own model, the initial one before it has trained."""
        model: Model = self.memory.get("model") or self.initial
        return model


class Server(federation.Server):
    """Only says when to train."""

    def round(self, clients: Cohort) -> None:
        """Lets every client of the cohort train on."""
        for group in clients.sizes.values():
            group.ask(Client.train_model, batches=self.config.batches)

    def personalize(self, clients: Cohort) -> Tree:
        """Sends nothing: each client uses its own model."""
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.train_model, batches=batches)
        return {}

"""FedPer (Arivazhagan et al., 2019): a common body, a head for each client.

Paper: https://arxiv.org/abs/1912.00818.

Sent: the body (everything but the head; its buffers included), both ways. Kept: the head, the last
``head_layers`` layers with the statistics of batch-norm among them. Body and head train jointly;
the body is averaged, weighted by training examples. Evaluated: the global body with the client's
own head. A novel client fits a head on the frozen body for ``novel_steps`` steps. With
``head_layers=0`` this is FedAvg.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import nn

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, average, step
from hyperfed.methods.parts.presets import DEFAULT, PFEDHN
from hyperfed.nets.anatomy import head_entries
from hyperfed.training import PersonalConfig, Steps, fit
from hyperfed.trees import Model, Tree, partition


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedPer.

    Attributes:
        head_layers: how many of the last layers are personal.
        novel_steps: steps in which a novel client fits its head.
    """

    head_layers: NonNegativeInt = 1
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "pfedhn": PFEDHN,
}


class Client(federation.Client):
    """Keeps a head of its own."""

    @step(like="body")
    def train_model(self, body: Model) -> Model:
        """Trains body and head jointly; returns the body and keeps the head."""
        trained = self.train_own(
            self.objective,
            self.personal_model(body),
            self.batches,
            trainable=self.parameters,
            own=self.head,
        )
        self.memory["head"], body = partition(trained, self.head)
        return body

    @step
    def fit_head(self, body: Model) -> Tree:
        """Trains the head on the frozen body; replies with nothing."""
        trained = fit(
            self.objective,
            self.personal_model(body),
            self.batches,
            self.config.local,
            trainable=self.parameters & self.head,
        ).model
        self.memory["head"], _ = partition(trained, self.head)
        return {}

    @cached_property
    def head(self) -> frozenset[str]:
        """Names of what of the model is personal: parameters, and buffers among them."""
        return frozenset(head_entries(self.module, self.config.head_layers))

    def personal_model(self, received: Model) -> Model:
        """Returns the received body with the client's own head, at first the initial one."""
        return received | self.recall("head", self.head)


class Server(federation.Server):
    """Holds the global body, ``self.body[size]``.

    Other methods have it too: a step is found by its name, so it asks those of their own Client.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.body: Tree = {
            size: partition(outline.initial(size), self.head(module))[1]
            for size, module in outline.models.items()
        }

    def head(self, module: nn.Module) -> tuple[str, ...]:
        """Names what of a target is not sent."""
        return head_entries(module, self.config.head_layers)

    def round(self, clients: Cohort) -> None:
        """Replaces the global body by the weighted mean of the trained ones."""
        batches = self.config.batches
        self.body = average(clients, Client.train_model, self.body, batches)

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global body."""
        body: Model = self.body[clients.size]
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_head, body, batches=batches)
        return body

"""LG-FedAvg (Liang et al., 2020): a body for each client, a common classifier.

Paper: https://arxiv.org/abs/2001.01523.

Sent: the head, the parameters of the last ``head_layers`` layers, both ways. Kept: the body
(everything else; all batch-norm buffers are part of it). Body and head train jointly; heads are
averaged, weighted by training examples, as in FedAvg (the authors' code for MNIST and CIFAR-10
weighs clients alike). Evaluated: the client's own body under the global head. A novel client trains
a body from where the others began, under the frozen head, for ``novel_steps``. (A new device of the
paper has no labels and trains nothing: its prediction is the mean of those of all trained local
models, or their majority, as in ``test_img_ensemble_all`` of the authors' code.)

A body begins at the initial weights. Or, as in pFedHN's comparison (Shamsian et al., section 5), at
a model that FedAvg made in the first ``pretrain_rounds`` rounds: in these the whole model is sent,
both ways, and evaluated; afterwards a client that has no body yet is sent that model's with the
head. With all layers global this is FedAvg (but for buffers), with none it is Local training.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.federation import Cohort, Each, Outline, average, step
from hyperfed.methods.parts.presets import DEFAULT, PFEDHN, PFEDKT
from hyperfed.nets.anatomy import head_names
from hyperfed.training import PersonalConfig, Steps, fit
from hyperfed.trees import Model, Tree, partition, repeat, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of LG-FedAvg.

    Attributes:
        head_layers: how many of the last layers are global.
        pretrain_rounds: rounds of FedAvg before the first body is local.
        novel_steps: steps in which a novel client trains its body.
    """

    head_layers: NonNegativeInt = 1
    pretrain_rounds: NonNegativeInt = 0
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # Section 5: 1,000 rounds on top of a FedAvg model (of at most 5,000).
    "pfedhn": {**PFEDHN, "rounds": 6000, "method.pretrain_rounds": 5000},
    "pfedkt": PFEDKT,
}


class Client(federation.Client):
    """Keeps a body of its own."""

    @step(like="model")
    def pretrain(self, model: Model) -> Model:
        """Returns the whole model, trained (FedAvg)."""
        return fit(
            self.objective, model, self.batches, self.config.local, trainable=self.parameters
        ).model

    @step
    def train_model(self, received: Model) -> Model:
        """Trains body and head jointly; returns the head and keeps the body."""
        trained = self.train_own(
            self.objective,
            self.personal_model(received),
            self.batches,
            trainable=self.parameters,
            own=self.parameters - self.head,
        )
        head, self.memory["body"] = partition(trained, self.head)
        return head

    @step
    def fit_body(self, received: Model) -> Tree:
        """Trains the body under the frozen head; replies with nothing."""
        trained = fit(
            self.objective,
            self.personal_model(received),
            self.batches,
            self.config.local,
            trainable=self.parameters - self.head,
        ).model
        _, self.memory["body"] = partition(trained, self.head)
        return {}

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the global parameters."""
        return head_names(self.module, self.config.head_layers)

    def personal_model(self, received: Model) -> Model:
        """Returns the client's own body, or where bodies begin, under the received head."""
        own: Model = self.memory.get("body", {})
        return self.initial | received | own


class Server(federation.Server):
    """Holds the global head and where bodies begin, ``self.model[size]``.

    Attributes:
        has_body: (n,) which known clients have a body of their own.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        for module in outline.models.values():
            head_names(module, config.head_layers)  # there are as many
        self.model: Tree = {size: outline.initial(size) for size in outline.models}
        self.has_body: Tensor = torch.zeros(outline.clients, dtype=torch.bool)

    def round(self, clients: Cohort) -> None:
        """Replaces the global head by the weighted mean of the trained ones."""
        batches = self.config.batches
        if clients.round < self.config.pretrain_rounds:
            self.model = average(clients, Client.pretrain, self.model, batches)
            return
        groups = clients.sizes
        heads = {
            size: group.ask(Client.train_model, self.message(group), batches=batches)
            for size, group in groups.items()
        }
        self.model = self.model | {
            size: self.model[size] | weighted_mean(heads[size], group.weight)
            for size, group in groups.items()
        }
        self.has_body = self.has_body.clone()
        self.has_body[clients.ids[clients.weight > 0]] = True

    def personalize(self, clients: Cohort) -> Each:
        """Sends the global head, and the body to begin with to those who need it."""
        message = self.message(clients)
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_body, message, batches=batches)
        return message

    def message(self, clients: Cohort) -> Each:
        """Returns the head; and where a pretrained body is to begin with, that too."""
        model: Model = self.model[clients.size]
        head = head_names(self.outline.models[clients.size], self.config.head_layers)
        has_body = [not clients.novel and bool(self.has_body[client]) for client in clients.ids]
        entries = [
            head if own or not self.config.pretrain_rounds else tuple(model) for own in has_body
        ]
        return Each(repeat(model, len(clients.ids)), entries)

"""FedBABU (Oh et al., ICLR 2022): only the body is trained together; all is fine-tuned at the end.

Paper: https://arxiv.org/abs/2106.06042, algorithm 1.

During the federation the head, the last ``head_layers`` layers, is what it was at first, the same
random one for all clients: they train the body under it, and the server averages bodies. Only when
a client needs its model does it train the whole, body and head, on its own data.

Sent: the body (everything but the head; buffers included), both ways. Kept: nothing; every client
has the initial head from the start. Aggregated: the mean of the trained bodies, weighted by
training examples (the authors' code weighs clients alike, which have as many). Evaluated: the
latest body with the initial head after ``finetune_epochs`` passes over the client's training
examples, of known and novel clients alike; nothing of it is kept. So a novel client has the same
protocol as a known one. With ``head_layers=0`` this is FedAvg with fine-tuning.

The paper's rate falls to a tenth after a half and after three quarters of the rounds, and
fine-tuning goes on with the last; here there is one for each.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import nn

from hyperfed import federation
from hyperfed.federation import Cohort, step
from hyperfed.methods import fedper
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Epochs, LocalConfig, Optimizer, fit
from hyperfed.trees import Model, Tree, partition


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of FedBABU. Those of local training are the body's.

    Attributes:
        head_layers: how many of the last layers stay as they are until fine-tuning.
        finetune_epochs: passes over a client's examples, in which it trains the whole.
        finetune_lr: learning rate of that; for the rest it has the settings of local training.
    """

    head_layers: NonNegativeInt = 1
    finetune_epochs: NonNegativeInt = 5
    finetune_lr: PositiveFloat = 5e-3

    @property
    def finetune(self) -> Optimizer:
        """The optimiser of fine-tuning."""
        return replace(self.local, lr=self.finetune_lr)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # By the authors' scripts: a tenth of 100 clients, ten epochs in each of 32 rounds, fine-tuning
    # for another five. They have 1 and 4 epochs too, 320 in all, and all clients in each round.
    "paper": {
        "rounds": 32,
        "cohort": 0.1,
        "evaluate_every": 1,
        "task.clients": 100,
        "task.novel": 0.0,
        "method.local_epochs": 10,
        "method.batch_size": 50,
        "method.local_lr": 0.1,
        "method.local_weight_decay": 0.0,
        "method.finetune_epochs": 5,
        "method.finetune_lr": 1e-3,
    },
}


class Client(federation.Client):
    """Trains the body under the initial head, and the whole for itself."""

    @step(like="body")
    def train_model(self, body: Model) -> Model:
        """Returns the trained body."""
        trained = fit(
            self.objective,
            self.whole(body),
            self.batches,
            self.config.local,
            trainable=self.parameters - self.head,
        ).model
        return partition(trained, self.head)[1]

    @step
    def fine_tune(self, body: Model) -> Tree:
        """Makes the whole, trained, the personal model; replies with nothing."""
        self.scratch["personal"] = fit(
            self.objective,
            self.whole(body),
            self.batches,
            self.config.finetune,
            trainable=self.parameters,
        ).model
        return {}

    def whole(self, body: Model) -> Model:
        """Returns a body with the initial head."""
        return body | partition(self.initial, self.head)[0]

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained together."""
        return head_names(self.module, self.config.head_layers)

    def personal_model(self, received: Model) -> Model:
        """Returns the fine-tuned model; without fine-tuning the body with the initial head."""
        personal: Model = self.scratch.get("personal") or self.whole(received)
        return personal


class Server(fedper.Server):
    """FedPer's, of which each client makes a model of its own, known or novel."""

    def head(self, module: nn.Module) -> tuple[str, ...]:
        """Names the parameters that are not trained together; buffers are, being nobody's own."""
        return head_names(module, self.config.head_layers)

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global body, with which each client trains its own model."""
        body: Model = self.body[clients.size]
        if self.config.finetune_epochs:
            batches = Epochs(self.config.finetune_epochs, self.config.batch_size)
            clients.ask(Client.fine_tune, body, batches=batches)
        return body

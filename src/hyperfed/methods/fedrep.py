"""FedRep (Collins et al., ICML 2021): FedPer that trains first the head, then the body.

Paper: https://arxiv.org/abs/2102.07078, algorithm 1.

Sent: the body (everything but the head; its buffers included), both ways. Kept: the head, the last
``head_layers`` layers with the statistics of batch-norm among them. A client first trains its head
on the frozen body, for ``head_steps`` steps (or ``head_epochs``), then the body under the frozen
head, for ``local_steps`` (or ``local_epochs``); each has an optimiser of its own. Bodies are
averaged, weighted by training examples, as in FedAvg (algorithm 1 and, for CIFAR, the authors' code
weigh clients alike; for FEMNIST and Sent140 that code weighs by examples). Evaluated: the global
body with the client's own head. A novel client trains a head from the initial weights, which are
random, on the frozen body for ``novel_steps`` (or ``novel_epochs``).

A frozen body is frozen whole, and so is a frozen head. While the one trains, the other's batch-norm
normalises by the batch, as in all training, but its running statistics do not move: what a client
sends back has seen the batches of the body's own training only, and what it keeps the head's.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError
from hyperfed.federation import Cohort, step
from hyperfed.methods import fedper
from hyperfed.methods.parts.presets import DEFAULT, PEFLL
from hyperfed.training import Batch, Batches, Epochs, PersonalConfig, Steps, fit, pass_lengths
from hyperfed.trees import Model, Tree, partition


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedRep. Those of local training are the body's, and the head's but for its time.

    Attributes:
        head_layers: how many of the last layers are personal.
        head_steps: steps for which the head trains before the body.
        head_epochs: passes over the client's data instead, where ``local_epochs`` is given too.
        novel_steps: steps for which a novel client trains its head.
        novel_epochs: passes over its data instead.
    """

    head_layers: NonNegativeInt = 1
    head_steps: NonNegativeInt = 50
    head_epochs: NonNegativeInt | None = None
    novel_steps: NonNegativeInt = 500
    novel_epochs: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        if (self.head_epochs is None) != (self.local_epochs is None):
            raise UserError(
                "head and body must both train for epochs or both for steps, got head_epochs="
                f"{self.head_epochs} and local_epochs={self.local_epochs}; give both or neither"
            )

    @property
    def batches(self) -> Batches:
        """What a server asks for in a round: the head's batches, then the body's."""
        if self.head_epochs is not None and self.local_epochs is not None:
            return Epochs(self.head_epochs + self.local_epochs, self.batch_size)
        return Steps(self.head_steps + self.local_steps, self.batch_size)

    def head_batches(self, examples: int) -> int:
        """Returns how many of them are the head's, for a client with so many examples."""
        if self.head_epochs is not None:
            return self.head_epochs * len(pass_lengths(examples, self.batch_size))
        return self.head_steps

    @property
    def novel_batches(self) -> Batches:
        """What a novel client trains its head on."""
        if self.novel_epochs is not None:
            return Epochs(self.novel_epochs, self.batch_size)
        return Steps(self.novel_steps, self.batch_size)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Fewer than FedAvg has: each has twice the steps.
    "default": {**DEFAULT, "rounds": 20},
    # Appendix C.2: "5 and 1 epochs"; 20 for the head of a novel client.
    "pefll": {
        **PEFLL,
        "method.head_epochs": 5,
        "method.local_epochs": 1,
        "method.novel_epochs": 20,
    },
}


class Client(fedper.Client):
    """FedPer's, which trains the head before the body."""

    @step(like="body")
    def train_model(self, body: Model) -> Model:
        """Trains the head, then the body; returns the body and keeps the head."""
        batches = iter(self.batches)
        self.train_head(body, islice(batches, self.config.head_batches(len(self.train))))
        trained = fit(
            self.objective,
            self.personal_model(body),
            batches,
            self.config.local,
            trainable=self.parameters - self.head,
        ).model
        return partition(trained, self.head)[1]

    @step
    def fit_head(self, body: Model) -> Tree:
        """Trains the head on the frozen body; replies with nothing."""
        self.train_head(body, self.batches)
        return {}

    def train_head(self, body: Model, batches: Iterable[Batch]) -> None:
        """Trains the head on the frozen body and keeps it; moved buffers of the body are lost."""
        trained = self.train_own(
            self.objective,
            self.personal_model(body),
            batches,
            trainable=self.parameters & self.head,
            own=self.head,
        )
        self.memory["head"], _ = partition(trained, self.head)


class Server(fedper.Server):
    """FedPer's, which has a newcomer's head trained for steps or epochs."""

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global body."""
        body: Model = self.body[clients.size]
        if clients.novel:
            clients.ask(Client.fit_head, body, batches=self.config.novel_batches)
        return body

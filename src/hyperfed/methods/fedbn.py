"""FedBN (Li et al., ICLR 2021): one model for all but for batch-norm, which each client keeps.

Paper: https://arxiv.org/abs/2102.07623, algorithm 1.

Sent: everything but the batch-norm layers, both ways. Kept: the batch-norm layers, scale, shift and
running statistics; they are found by the type of a module, whatever its name. All of it trains
jointly; what is sent is averaged, weighted by training examples (the authors' code weighs clients
alike). Evaluated: the global model with the client's own batch-norm layers. A novel client trains
its batch-norm layers, from the initial ones, with all else frozen, for ``novel_steps`` steps, whose
forward passes measure its statistics: the server has never had any batch-norm layer to give. That
is ours. As we know of the paper, without its appendix at hand, a client of an unseen domain trains
nothing: its scale and shift are the mean of the trained clients', its statistics those of its own
batches (the authors advise the same outside it: issue 9 of med-air/FedBN).

Without batch normalisation this is FedAvg, of which a warning tells as the run starts. That is so
for the default targets: take one that has some, such as ``task.model=lenet_bn``, where images
have 16 pixels a side or more.
"""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, average, step
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import batch_norm_names
from hyperfed.training import PersonalConfig, Steps, fit
from hyperfed.trees import Model, Tree, partition

log = logging.getLogger(__name__)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedBN.

    Attributes:
        novel_steps: steps in which a novel client trains its batch-norm layers.
    """

    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # pFedLA, section 4: 10 clients at 100 %, four classes each, batch-norm after convolutions.
    # Local training as in the preset of pfedla.
    "pfedla": {
        "rounds": 600,
        "cohort": 1.0,
        "task.clients": 10,
        "task.model": "pfedla_cnn",
        "task.partition": "equal_classes",
        "task.classes_per_client": 4,
        "task.novel": 0.0,
        "method.local_epochs": 10,
        "method.batch_size": 32,
        "method.local_lr": 1e-2,
        "method.local_momentum": 0.0,
        "method.local_weight_decay": 0.0,
    },
}


class Client(federation.Client):
    """Keeps batch-norm layers of its own."""

    @step(like="shared")
    def train_model(self, shared: Model) -> Model:
        """Trains the whole model; returns the shared part and keeps batch-norm."""
        trained = self.train_own(
            self.objective,
            self.personal_model(shared),
            self.batches,
            trainable=self.parameters,
            own=self.norm,
        )
        self.memory["norm"], shared = partition(trained, self.norm)
        return shared

    @step
    def fit_norm(self, shared: Model) -> Tree:
        """Trains batch-norm with the rest frozen; replies with nothing."""
        trained = fit(
            self.objective,
            self.personal_model(shared),
            self.batches,
            self.config.local,
            trainable=self.parameters & self.norm,
        ).model
        self.memory["norm"], _ = partition(trained, self.norm)
        return {}

    @property
    def norm(self) -> tuple[str, ...]:
        """Names of the personal entries, buffers included."""
        return batch_norm_names(self.module)

    def personal_model(self, received: Model) -> Model:
        """Returns the received part with the client's own batch-norm, at first the initial one."""
        return received | self.recall("norm", self.norm)


class Server(federation.Server):
    """Holds what is shared, ``self.shared[size]``."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.shared: Tree = {
            size: partition(outline.initial(size), batch_norm_names(module))[1]
            for size, module in outline.models.items()
        }

    def round(self, clients: Cohort) -> None:
        """Replaces the shared part by the weighted mean of the trained ones."""
        if clients.round == 0 and not any(map(batch_norm_names, self.outline.models.values())):
            log.warning(
                "this is FedAvg, not FedBN: no target has a batch-norm layer, so clients keep "
                "nothing of their own; choose a target with some, such as task.model=lenet_bn"
            )
        self.shared = average(clients, Client.train_model, self.shared, self.config.batches)

    def personalize(self, clients: Cohort) -> Model:
        """Sends the shared part."""
        shared: Model = self.shared[clients.size]
        normalises = batch_norm_names(self.outline.models[clients.size])
        if clients.novel and normalises and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_norm, shared, batches=batches)
        return shared

"""MOON (Li et al., CVPR 2021): FedAvg whose features are drawn to those of the global model.

Paper: https://arxiv.org/abs/2103.16257, algorithm 1.

A client's loss is the supervised one plus mu times -log(e^(s/t) / (e^(s/t) + e^(s'/t))), with s the
cosine similarity of the trained model's features to those of the received global model, s' that to
the client's own model of its last round, and t the temperature. Those two models are constants, run
in evaluation mode. Features are the input of the last layer. The paper's networks have a projection
head before it, two linear layers with ReLU between them, so that what is contrasted, and classified
too, is its output: ``projection`` puts one into the target. It is a part of the model like any
other. Then the model is not the task's target, and cannot be exported as one.

Sent: the global model, batch-norm buffers included; the trained model comes back. Kept: the trained
model, to be the next round's previous one. It starts as the initial model (with a projection head,
as the global model that the client is first sent), so that in the first round the contrast has no
gradient, as in the authors' code. Aggregated: the mean of the trained models, weighted by training
examples, as in FedAvg. Evaluated: the global model, as in the paper, or with ``evaluated="local"``
the trained one of each client (the global one for a known client that was never asked). A novel
client uses the global model; with ``evaluated="local"`` it first does what a known one does for
``novel_rounds`` rounds, with the global model frozen and nothing sent back. With mu = 0 this is
FedAvg, of the target with its projection head where it has one.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Outline, step
from hyperfed.functional import forward_with_features, outputs_and_features
from hyperfed.methods import fedavg
from hyperfed.methods.parts.contrast import contrastive_loss, distances
from hyperfed.methods.parts.presets import DEFAULT, PFEDKT
from hyperfed.nets.anatomy import check_head, last_linear
from hyperfed.training import Batch, LocalConfig, Objective, fit
from hyperfed.trees import Model, Tree, copied, model_of


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of MOON.

    Attributes:
        contrast_weight: mu, the weight of the contrastive loss beside the supervised one.
        temperature: of the contrastive loss.
        projection: outputs of the projection head before the last layer; none leaves the target as
            it is.
        evaluated: which model a client uses, the global one or its own trained one.
        novel_rounds: rounds of local training by which a novel client obtains its own model, where
            that is evaluated.
    """

    contrast_weight: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 0.5
    projection: PositiveInt | None = None
    evaluated: Literal["global", "local"] = "global"
    novel_rounds: NonNegativeInt = 20


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # Section 4.1 and the authors' code for CIFAR-10: ten clients, all of them in every round.
    "paper": {
        "rounds": 100,
        "cohort": 1.0,
        "task.clients": 10,
        "task.novel": 0.0,
        "method.local_epochs": 10,
        "method.local_lr": 1e-2,
        "method.local_weight_decay": 1e-5,
        "method.contrast_weight": 5.0,
        "method.projection": 256,
    },
    # The clients' own models; the paper gives no mu for MOON.
    "pfedkt": {**PFEDKT, "method.evaluated": "local"},
}


class Client(federation.Client):
    """Keeps its last trained model."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Builds the target of each size with its projection head, where there is one."""
        if config.projection is None:
            return {}
        return {
            size: projected(target, config.projection) for size, target in outline.models.items()
        }

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.config.projection is not None:
            self.module = self.network(self.size)

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Trains the global model, returns it and keeps it."""
        first = self.initial if self.config.projection is None else model
        objective = self.objective_between(model, self.memory.get("model", first))
        trained = fit(
            objective, model, self.batches, self.config.local, trainable=self.parameters
        ).model
        self.memory["model"] = trained
        return trained

    @step
    def join(self, model: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(model)
        return {}

    def objective_between(self, positive: Model, negative: Model) -> Objective:
        """Returns the supervised loss + mu * the contrastive one (equations 3 and 4)."""
        config = self.config
        if not config.contrast_weight:
            return self.objective

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            x, y = batch.x, batch.y
            output, own, buffers = forward_with_features(self.module, model, x, y)
            near, far = (
                distances(own, outputs_and_features(self.module, other, x, y)[1], "cosine")
                for other in (positive, negative)
            )
            contrast = contrastive_loss(
                near, far, y, "moon", margin=0.0, temperature=config.temperature
            )
            return self.loss(output, y) + config.contrast_weight * contrast, buffers

        return objective

    def personal_model(self, received: Model) -> Model:
        """Returns the global model, or the trained one where that is evaluated and there is one."""
        if self.config.evaluated == "global":
            return received
        model: Model = self.memory.get("model", received)
        return model

    @step
    def export(self, received: Tree) -> Tree:
        """Hands the personal model to its owner.

        Raises:
            UserError: it has a projection head.
        """
        if self.config.projection is not None:
            raise UserError(
                "a model to hand over must be the task's target, but with "
                f"method.projection={self.config.projection} MOON's has a projection head more; "
                "evaluate it, or train with method.projection=none"
            )
        return self.served_model(received)


class Server(fedavg.Server):
    """FedAvg's, of targets with their projection heads, where these have some."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        for module in outline.models.values():
            check_head(module)  # what goes into it are the features
        projecting = Client.networks(outline, config)
        self.model |= {size: model_of(network) for size, network in projecting.items()}

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model."""
        model: Model = self.model[clients.size]
        if clients.novel and self.config.evaluated == "local":
            for _ in range(self.config.novel_rounds):
                clients.ask(Client.join, model, batches=self.config.batches)
        return model


def projected(target: nn.Module, outputs: int) -> nn.Module:
    """Returns a copy of a target with a projection head before its last layer.

    That layer's F inputs go through a linear layer of F outputs, ReLU and a linear layer of
    ``outputs``, and it is drawn anew to take these; the rest has the target's weights.

    Args:
        target: its last layer must be linear (:func:`last_linear`), with others before it.
        outputs: what the projection head gives to the last layer.

    Raises:
        UserError: the last layer is another, or the only one.
    """
    place, last = last_linear(target, f"MOON with method.projection={outputs}")
    if not place:
        raise UserError(
            "a target for method.projection must have layers before its last one, this one is a "
            f"{type(last).__name__} alone; choose another target, or method.projection=none"
        )
    width = last.in_features
    layers = nn.Sequential(
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, outputs),
        nn.Linear(outputs, last.out_features, bias=last.bias is not None),
    )
    network = copied(target)
    network.set_submodule(place, layers.to(last.weight))
    return network

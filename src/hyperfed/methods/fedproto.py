"""FedProto (Tan et al., AAAI 2022): clients share no model, but the mean features of each class.

Paper: https://arxiv.org/abs/2105.00243, algorithm 1.

The prototype of a class is the mean of the features (what enters the last layer) of a client's
training examples of it, by the client's own model. The global prototype p_c is the mean of those of
the clients that have the class. A client trains its own model by

    L + lambda mean over examples and features of (z - p_y)^2

where z are an example's features and y is its class; an example of a class without a global
prototype has the loss L alone. A client predicts the class with the nearest global prototype. The
squared distance is, but for a term that all classes share, -2 p_c z + |p_c|^2, so the personal
model is the client's own whose last layer has the weights 2 p_c and the biases -|p_c|^2; its loss
is that of the softmax of the negative squared distances. A class without a global prototype is
never predicted.

Sent: the global prototypes, and which there are. Returned: the client's, and which it has. Kept:
the own model, with its batch-norm buffers; models may differ, but not the length of their features.
Evaluated: the own model with the global prototypes or, with ``evaluated="classifier"``, with the
last layer that it has trained; a client that was never asked has the initial one. A novel client
trains a model of its own near the global prototypes, from the initial weights, for ``novel_steps``
steps.

The paper weighs clients that have a class by their examples of it, and draws the prototypes of a
client, not each example's features, towards the global ones. This follows the authors' code, which

- takes the mean over clients that have a class, whatever their numbers of examples, and the mean of
  squared differences of each example for the distance;
- averages the features that it saw while training, in the last pass: here they are those of the
  trained model in evaluation mode, as in PFLlib;
- asks all clients in each round: here a class that none of a round's clients has keeps its global
  prototype;
- predicts, by prototypes, one of the client's own classes: here any (``test_masked_accuracy`` is
  the accuracy among its own). It reports both predictions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Outline, step
from hyperfed.functional import forward_with_features
from hyperfed.methods.parts.features import (
    check_classes,
    check_outputs,
    class_means,
    features_of,
    linear_head,
)
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Batch, Objective, PersonalConfig, Steps
from hyperfed.trees import Model, Tree

NEVER = -1e6
"""The bias of a class that is never predicted: finite, so that losses and models are."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedProto.

    Attributes:
        prototype_weight: lambda, the weight of the distance to the global prototypes.
        evaluated: what predicts, the global prototypes or the client's own classifier.
        novel_steps: steps in which a novel client trains its model.
    """

    prototype_weight: NonNegativeFloat = 1.0
    evaluated: Literal["prototypes", "classifier"] = "prototypes"
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The authors' command for CIFAR-10, with the defaults of their options.
    "official": {
        "rounds": 110,
        "cohort": 1.0,
        "task.clients": 20,
        "task.novel": 0.0,
        "method.local_epochs": 1,
        "method.batch_size": 4,
        "method.local_lr": 1e-2,
        "method.local_momentum": 0.5,
        "method.local_weight_decay": 0.0,
        "method.prototype_weight": 0.1,
    },
}


class Client(federation.Client):
    """Keeps a model of its own."""

    @step
    def train_model(self, shared: Tree) -> Tree:
        """Trains the own model near the global prototypes; returns its own.

        Args:
            shared: {"prototypes": (classes, F), "there": (classes,) bool, whether there is one}.

        Returns:
            the same of this client.
        """
        objective, names = self.objective_near(shared), self.parameters
        model = self.train_own(objective, self.own, self.batches, trainable=names, own=names)
        self.memory["model"] = model
        features = features_of(self.module, model, self.train)
        prototypes, count = class_means(features, self.train.labels, self.classes)
        return {"prototypes": prototypes, "there": count > 0}

    @step
    def join(self, shared: Tree) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(shared)
        return {}

    def objective_near(self, shared: Tree) -> Objective:
        """Returns the loss and lambda times the distance to the global prototypes."""
        prototypes, there = shared["prototypes"], shared["there"]

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, features, buffers = forward_with_features(self.module, model, batch.x)
            square = (features - prototypes[batch.y]).square().mean(dim=1)
            distance = (square * there[batch.y]).mean()
            return self.loss(output, batch.y) + self.config.prototype_weight * distance, buffers

        return objective

    @property
    def own(self) -> Model:
        """The client's own model, the initial one before it has trained."""
        return self.recall("model", self.initial)

    def personal_model(self, received: Tree) -> Model:
        """Returns the own model, whose last layer tells the nearest global prototype."""
        if self.config.evaluated == "classifier":
            return self.own
        prototypes, there = received["prototypes"], received["there"]
        own, (weight, bias) = self.own, head_names(self.module)
        beyond = len(own[bias]) - len(there)  # outputs that are no class
        constant = torch.where(there, -prototypes.square().sum(dim=1), NEVER)
        return own | {
            weight: F.pad(2 * prototypes, (0, 0, 0, beyond)),
            bias: F.pad(constant, (0, beyond), value=NEVER),
        }


class Server(federation.Server):
    """Holds the global prototypes (classes, F), and which there are.

    Raises:
        UserError: examples are not of one class each, the last layer of a target is not linear, the
            features of its targets differ in length, or prototypes are to predict where a target
            has no output for each class.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_classes("FedProto", outline)
        if config.evaluated == "prototypes":
            check_outputs('FedProto with method.evaluated="prototypes"', outline)
        heads = [linear_head("FedProto", target) for target in outline.models.values()]
        lengths = {head.in_features for head in heads}
        if len(lengths) > 1:
            raise UserError(
                "the targets of FedProto must have features of one length, as clients share "
                f"prototypes, got {', '.join(map(str, sorted(lengths)))}; choose targets whose "
                "last layers take as many inputs, or another method"
            )
        self.prototypes = heads[0].weight.new_zeros(outline.classes, *lengths)
        self.there = torch.zeros(outline.classes, dtype=torch.bool)

    @property
    def shared(self) -> Tree:
        """What clients are sent."""
        return {"prototypes": self.prototypes, "there": self.there}

    def round(self, clients: Cohort) -> None:
        """Replaces the prototypes of the classes that some of the clients have."""
        replies = [
            group.ask(Client.train_model, self.shared, batches=self.config.batches)
            for group in clients.sizes.values()
        ]
        mean, there = mean_prototypes(replies)
        self.prototypes = torch.where(there[:, None], mean, self.prototypes)
        self.there = self.there | there

    def personalize(self, clients: Cohort) -> Tree:
        """Sends the prototypes, near which a novel client first trains a model."""
        if clients.novel:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.join, self.shared, batches=batches)
        return self.shared


def mean_prototypes(replies: Sequence[Tree]) -> tuple[Tensor, Tensor]:
    """Averages prototypes over the clients that have the class.

    Args:
        replies: of some clients each, {"prototypes": (C, classes, F), "there": (C, classes) bool}.

    Returns:
        the means (classes, F), of no meaning where nobody has the class, and whether somebody has,
        (classes,).
    """
    prototypes = torch.cat([reply["prototypes"] for reply in replies])
    there = torch.cat([reply["there"] for reply in replies])
    count = there.sum(dim=0)
    return (prototypes * there[..., None]).sum(dim=0) / count.clamp(min=1)[:, None], count > 0

"""GPFL (Zhang et al., ICCV 2023): features of each class for all, and a head for each client.

Paper: https://arxiv.org/abs/2308.10279.

Features z (what enters the last layer) go two ways, through one conditional valve

    V(z, s) = relu((1 + gamma(s)) z + beta(s))

with gamma and beta networks of one layer of a conditional input s. On the personal way s is the
mean of the embeddings of the classes, weighted by their shares in the client's training data, and
the client's own head follows, with all that the target has behind it; on the global way s is their
plain mean. There is one trained embedding e_c for each class. A client's loss is that of the
personal way and, with g the output of the global one,

- the angle: cross-entropy of the cosine similarities of g to all embeddings;
- the magnitude: lambda times the Euclidean norm of g - e_y over the whole batch, with the
  embeddings as received.

Conditional inputs are those of the embeddings as received, too.

Sent: the body (everything but the last layer; buffers included), the valve and the embeddings, both
ways. Kept: the head. Aggregated: the mean of what was trained, weighted by training examples.
Evaluated: the personal way, with the client's own head; as a conditional valve stands before it, it
is not the target network, so there is no model to export. A novel client, of which the paper has
none, trains a head with all else frozen for ``novel_steps`` steps, and needs labels.

We had no text of the paper but its summary: the algorithm is that of the authors' code, in which

- a client takes its conditional inputs from the embeddings that it last had, its own trained ones
  where it took part, and has none in the first round;
- body and head have no weight decay, valve and embeddings mu: here mu comes beside
  ``local_weight_decay``.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.linalg import vector_norm

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Outline, average, step
from hyperfed.functional import apply, forward_with_features, outputs_and_features
from hyperfed.methods.parts.features import check_classes, linear_head
from hyperfed.methods.parts.presets import DEFAULT, PFLLIB
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Batch, PersonalConfig, Steps, count_classes, fit
from hyperfed.trees import Model, Tree, model_of, partition

GUIDANCE = "guidance/"
"""Begins the names of valve and embeddings, to tell them from those of the target."""

EMBEDDINGS = GUIDANCE + "embedding.weight"
"""The name of the embeddings e_c, (classes, F)."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of GPFL; the defaults of its own are those of the authors' script.

    Attributes:
        magnitude_weight: lambda, the weight of the distance to the embedding.
        guidance_weight_decay: mu, further weight decay of valve and embeddings.
        novel_steps: steps in which a novel client trains its head.
    """

    magnitude_weight: NonNegativeFloat = 0.01
    guidance_weight_decay: NonNegativeFloat = 0.1
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "official": PFLLIB,
}


class Guidance(nn.Module):
    """The conditional valve, (B, F) features and (F,) conditional input -> (B, F); embeddings.

    Args:
        classes: number of embeddings.
        features: F.
    """

    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, features)
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.LayerNorm(features))
            for _ in range(2)
        )

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """Lets features through under a condition."""
        return F.relu((1 + self.gamma(condition)) * features + self.beta(condition))


class Client(federation.Client):
    """Keeps a head of its own, which sees what its own condition lets through."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Builds valve and embeddings of each target size."""
        return {
            size: Guidance(outline.classes, linear_head("GPFL", target).in_features).to(
                outline.dtype
            )
            for size, target in outline.models.items()
        }

    @step(like="received")
    def train_model(self, received: Model) -> Model:
        """Trains all; returns what it received, trained, and keeps the head."""
        trained = self.trained(received, {*self.parameters, *received} - self.buffers)
        self.memory["head"], reply = partition(trained, self.head)
        return reply

    @step
    def fit_head(self, received: Model) -> Tree:
        """Trains the head with all else frozen; replies with nothing."""
        self.memory["head"], _ = partition(self.trained(received, self.head), self.head)
        return {}

    def trained(self, received: Model, trainable: Collection[str]) -> Model:
        """Returns body, head, valve and embeddings after training these parameters."""
        config, embeddings = self.config, received[EMBEDDINGS]
        alike, own = embeddings.mean(dim=0), self.condition(embeddings)

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, features, buffers = self.personal_way(model, own, batch)
            general = self.valve(model, alike)(features)
            cosine = F.normalize(general) @ F.normalize(model[EMBEDDINGS]).T
            angle = F.cross_entropy(cosine, batch.y)
            magnitude = vector_norm(general - embeddings[batch.y])
            loss = self.loss(output, batch.y) + angle + config.magnitude_weight * magnitude
            return loss + config.guidance_weight_decay / 2 * guidance_square(model), buffers

        start = received | self.recall("head", self.head)
        return self.train_own(objective, start, self.batches, trainable=trainable, own=self.head)

    def personal_way(
        self, model: Model, condition: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor, Model]:
        """Returns the outputs (B, classes), the features (B, F) and the buffers, in training."""
        valve = self.valve(model, condition)
        return forward_with_features(self.module, model, batch.x, through=valve)

    def valve(self, model: Model, condition: Tensor) -> Callable[[Tensor], Tensor]:
        """Returns V(., s), from (B, F) features to (B, F), of a conditional input s, (F,)."""
        network, guidance = self.network(self.size), guidance_of(model)
        return lambda features: apply(network, guidance, features, condition)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the personal parameters."""
        return head_names(self.module)

    def condition(self, embeddings: Tensor) -> Tensor:
        """Returns the personal conditional input (F,) from the embeddings (classes, F)."""
        count = count_classes(self.train.labels, self.classes).to(embeddings.dtype)
        return count @ embeddings / count.sum()

    def personal_model(self, received: Model) -> Tree:
        """Returns all that the personal way consists of, and its conditional input."""
        own = received | self.recall("head", self.head)
        return {"model": own, "condition": self.condition(received[EMBEDDINGS])}

    def predict(self, model: Tree, x: Tensor) -> Tensor:
        """Returns (B, classes) outputs of the personal way."""
        own, valve = model["model"], self.valve(model["model"], model["condition"])
        return outputs_and_features(self.module, own, x, through=valve)[0]

    def finetuned(self, model: Tree) -> Tree:
        """Returns the same after training target and head on the personal way."""

        def objective(own: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, _, buffers = self.personal_way(own, model["condition"], batch)
            return self.loss(output, batch.y), buffers

        own, settings = model["model"], self.config.local
        tuned = fit(objective, own, self.batches, settings, trainable=self.parameters).model
        return model | {"model": tuned}

    @step
    def export(self, received: Tree) -> Tree:
        """Raises ``UserError``: the valve is no part of the target network."""
        raise UserError(
            "a model to hand over must be one network, but GPFL has a conditional valve between a "
            "target's layers; evaluate it, or choose another method"
        )


def guidance_of(model: Model) -> Model:
    """Returns valve and embeddings out of a model, by the names of their network."""
    named = model.items()
    return {n.removeprefix(GUIDANCE): value for n, value in named if n.startswith(GUIDANCE)}


def guidance_square(model: Model) -> Tensor:
    """Returns the squared Euclidean norm of valve and embeddings."""
    return torch.stack([value.square().sum() for value in guidance_of(model).values()]).sum()


class Server(federation.Server):
    """Holds body, valve and embeddings, ``self.model[size]``.

    Raises:
        UserError: examples are not of one class each, or the last layer of a target is not linear.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_classes("GPFL", outline)
        self.model: Tree = {}
        for size, network in Client.networks(outline, config).items():
            _, body = partition(outline.initial(size), head_names(outline.models[size]))
            named = model_of(network).items()
            self.model[size] = body | {GUIDANCE + name: value for name, value in named}

    def round(self, clients: Cohort) -> None:
        """Replaces what is sent by the weighted mean of what was trained."""
        self.model = average(clients, Client.train_model, self.model, self.config.batches)

    def personalize(self, clients: Cohort) -> Model:
        """Sends body, valve and embeddings."""
        model: Model = self.model[clients.size]
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_head, model, batches=batches)
        return model

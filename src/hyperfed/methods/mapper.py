"""MAPPER (Mansour et al., 2020): the outputs of a global and a local model, interpolated.

Paper: https://arxiv.org/abs/2002.10619, "Three approaches for personalization".

Client k predicts with lambda_k h_l + (1 - lambda_k) h_c: its own local model h_l and the common
global one h_c. The objective is the sum of the clients' losses of that predictor, minimised over
h_c and, for each client, over h_l and lambda_k. What is interpolated are the **outputs** (logits),
in which the loss is convex, not the weights. Log-probabilities (``F.nll_loss``) are logits, too:
what they come to is normalised.

In a round a client trains both models jointly, on the loss of the interpolated predictor at its
lambda, and then chooses lambda anew: the one of ``mixing`` with the smallest loss on its
validation examples (its training examples where it has none), among equals the one nearest to that
it has: before the global model has been another's too, both models may be the same, and every
lambda as good. Before its first choice lambda is the middle one. (We had no text of the paper.
Ditto's authors, in their code for comparing, train a local model for each lambda with the global
one frozen, and then the latter at the best: as many trainings in a round as there are lambdas.)

Sent: the global model, batch-norm buffers included, both ways. Kept: the local model, which starts
from the first global model received, and lambda. Aggregated: the mean of the trained global models,
weighted by training examples, as in FedAvg. Evaluated: the interpolated predictor; a known client
that was never asked uses the global model alone. As this predictor is two models it cannot be
exported as one. A novel client trains a local model and chooses lambda for ``novel_rounds`` rounds,
with the global model frozen and nothing sent back. With ``mixing=[0]`` the global model is
FedAvg's, with ``[1]`` this is Local.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH, Cohort, step
from hyperfed.functional import apply, forward
from hyperfed.methods import fedavg
from hyperfed.methods.parts.presets import DEFAULT, PFEDKT
from hyperfed.training import Batch, PersonalConfig, Share, fit
from hyperfed.trees import Model, Tree

GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""The interior of [0, 1]: both models of a client go on learning."""

COMMON, OWN = "common.", "own."
"""Before the names of the global and of the local model where both make up one tree."""

LAMBDA = "lambda"
"""The name of lambda in that tree and in a client's memory."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of MAPPER.

    Attributes:
        mixing: lambda to choose from; 0 is the global model, 1 the local one. At 0 a client's local
            model gets no gradient, at 1 the global one gets none from it.
        novel_rounds: rounds of local training by which a novel client obtains its local model.
    """

    mixing: Annotated[tuple[Share, ...], Field(min_length=1)] = GRID
    novel_rounds: NonNegativeInt = 20


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "pfedkt": PFEDKT,
}


class Client(federation.Client):
    """Keeps a local model and lambda, the share that it has in the predictor."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Trains both models jointly and chooses lambda; returns the global model."""
        common, own = self.train_jointly(model, (COMMON, OWN))
        self.choose(common, own)
        return common

    @step
    def join(self, model: Model) -> Tree:
        """Does the same with the global model frozen; replies with nothing."""
        _, own = self.train_jointly(model, (OWN,))
        self.choose(model, own)
        return {}

    def train_jointly(self, model: Model, moving: tuple[str, ...]) -> tuple[Model, Model]:
        """Returns the global and the local model, trained on the interpolated predictor's loss."""
        names = {prefix + name for prefix in moving for name in self.parameters}
        joint = _joined(model, self.memory.get("local", model))
        own = {OWN + name for name in self.parameters}
        return _parted(
            self.train_own(self.joint_objective, joint, self.batches, trainable=names, own=own)
        )

    def joint_objective(self, joint: Model, batch: Batch) -> tuple[Tensor, Model]:
        """Returns the loss of the interpolated predictor, and both models' buffers."""
        common, own = _parted(joint)
        common_output, common_buffers = forward(self.module, common, batch.x)
        own_output, own_buffers = forward(self.module, own, batch.x)
        mixed = self.blended(interpolated(common_output, own_output, self.share))
        return self.loss(mixed, batch.y), _joined(common_buffers, own_buffers)

    def choose(self, common: Model, own: Model) -> None:
        """Keeps the local model and the lambda with the smallest loss.

        Of those that are equal, to within rounding, it is the one nearest to the present one.
        """
        losses = torch.zeros_like(self.mixing)
        with torch.no_grad():
            for batch in (self.val if len(self.val) else self.train).chunks(EVALUATION_BATCH):
                first, second = (apply(self.module, model, batch.x) for model in (common, own))
                mixed = [interpolated(first, second, share) for share in self.mixing]
                each = [self.loss(self.blended(output), batch.y) for output in mixed]
                losses = losses + torch.stack(each).double() * len(batch.x)
        equal = losses.isclose(losses.min(), rtol=1e-5)
        nearest = (self.mixing - self.share).abs().where(equal, torch.inf).argmin()
        self.memory["local"], self.memory[LAMBDA] = own, self.mixing[nearest].clone()

    @property
    def share(self) -> Tensor:
        """The present lambda, a scalar."""
        middle = len(self.config.mixing) // 2
        share: Tensor = self.memory[LAMBDA] if LAMBDA in self.memory else self.mixing[middle]
        return share

    @property
    def mixing(self) -> Tensor:
        """(L,) the values of lambda to choose from."""
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        return torch.stack([torch.full((), share, **options) for share in self.config.mixing])

    def personal_model(self, received: Model) -> Model:
        """Returns the predictor: both models as one tree, and lambda under its name."""
        if "local" not in self.memory:
            return received
        return _joined(received, self.memory["local"]) | {LAMBDA: self.memory[LAMBDA]}

    def predict(self, model: Model, x: Tensor) -> Tensor:
        """Returns (B, classes) interpolated outputs."""
        if LAMBDA not in model:
            return super().predict(model, x)
        common, own = (apply(self.module, part, x) for part in _parted(model))
        return self.blended(interpolated(common, own, model[LAMBDA]))

    def finetuned(self, model: Model) -> Model:
        """Returns the predictor after training on its loss: both models move, lambda does not."""
        if LAMBDA not in model:
            return super().finetuned(model)
        names = {prefix + name for prefix in (COMMON, OWN) for name in self.parameters}
        settings = self.config.local
        return fit(self.joint_objective, model, self.batches, settings, trainable=names).model

    @step
    def export(self, received: Tree) -> Tree:
        """Hands over nothing.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a model to hand over must be one, but MAPPER interpolates the outputs of two, a "
            "global and a local one; evaluate it, or choose a method with one personal model"
        )


def interpolated(common: Tensor, own: Tensor, share: Tensor) -> Tensor:
    """Returns lambda h_l(x) + (1 - lambda) h_c(x).

    Args:
        common: (B, ...) outputs of the global model h_c.
        own: (B, ...) outputs of the local model h_l.
        share: scalar lambda.
    """
    return share * own + (1 - share) * common


class Server(fedavg.Server):
    """FedAvg's, which has a novel client train as in rounds."""

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model; each client interpolates it with its own."""
        model: Model = self.model[clients.size]
        if clients.novel:
            for _ in range(self.config.novel_rounds):
                clients.ask(Client.join, model, batches=self.config.batches)
        return model


def _joined(common: Model, own: Model) -> Model:
    """Returns two models, or parts of them, as one."""
    prefixed = {COMMON + name: value for name, value in common.items()}
    return prefixed | {OWN + name: value for name, value in own.items()}


def _parted(joint: Model) -> tuple[Model, Model]:
    """Undoes :func:`_joined`."""
    common, own = (
        {name.removeprefix(p): value for name, value in joint.items() if name.startswith(p)}
        for p in (COMMON, OWN)
    )
    return common, own

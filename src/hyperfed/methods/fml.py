"""FML (Shen et al., 2020): a private model and a travelling one, the meme, teach each other.

Paper: https://arxiv.org/abs/2006.16765, Federated Mutual Learning.

Sent: the meme model, batch-norm buffers included, both ways. Kept by the client: its private model,
with ``keep_momentum`` that model's momentum too; neither ever travels. Aggregated: the mean of the
trained memes, weighted by training examples (the authors' code weighs clients alike). Evaluated:
the private model, which is the initial one at a client that was never asked. A novel client trains
its private model from the initial weights for ``novel_steps`` steps in the same way, with a copy of
the meme that learns along; nothing is sent back.

The two learn from the labels and, as in deep mutual learning (Zhang et al., CVPR 2018), from each
other. In every local step both see one batch and minimise

    private model:  alpha * supervised loss + (1 - alpha) * KL(p_meme || p_private)
    meme:           beta  * supervised loss + (1 - beta)  * KL(p_private || p_meme)

with p the softmax of the outputs in training mode, the teacher constant in each, and both moved at
once. With alpha = beta = 1 the private models are those of Local and the meme is that of FedAvg.

Private models and the meme begin alike, at the initial weights, where the authors' code draws each
anew. While they are alike there is nothing to teach: in round 0, with alpha = beta, both learn from
that share of the supervised loss alone, and stay alike.

What travels has one architecture while private models may differ: in a task with several target
sizes the meme is of the first, for all clients, and a private model is of its client's own size.
The paper does not fix alpha and beta; the defaults are those of the authors' code.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation, trees
from hyperfed.federation import Cohort, Outline, step
from hyperfed.functional import forward
from hyperfed.methods.parts.contrast import check_logits, distances, mean_counted
from hyperfed.methods.parts.presets import DEFAULT, PFEDKT
from hyperfed.training import Batch, PersonalConfig, Share, Steps
from hyperfed.trees import Model, Tree, leaves


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FML.

    Attributes:
        local_clip: bound of the joint norm of both models' gradients; none by default.
        label_weight: alpha, the weight of the labels in the private model's loss; what the meme
            says has 1 - alpha.
        meme_label_weight: beta, the same in the meme's loss.
        novel_steps: steps in which a novel client trains its private model.
    """

    label_weight: Share = 0.5
    meme_label_weight: Share = 0.5
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Each step trains two models, so half as many as elsewhere.
    "default": {**DEFAULT, "method.local_steps": 25},
    "pfedkt": PFEDKT,
}


class Client(federation.Client):
    """Trains a private model and the meme, side by side."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Builds the meme's network: the first of the task's targets."""
        return {"meme": trees.copied(outline.models[meme_size(outline)])}

    @step(like="meme")
    def train_model(self, meme: Model) -> Model:
        """Trains both models; keeps the private one and returns the meme."""
        trained = self.train_own(
            self.mutual_objective,
            _joined(self.private_model, meme),
            self.batches,
            trainable=self.trainable,
            own=_joined(self.private_model, {}),
        )
        self.memory["model"], meme = _parts(trained)
        return meme

    @step
    def join(self, meme: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(meme)
        return {}

    def mutual_objective(self, both: Model, batch: Batch) -> tuple[Tensor, Model]:
        """Returns the sum of both models' losses, each a constant in the other's."""
        private, meme = _parts(both)
        ours, private_buffers = forward(self.module, private, batch.x)
        theirs, meme_buffers = forward(self.network("meme"), meme, batch.x)
        loss = self.loss_of(ours, theirs, batch.y, self.config.label_weight)
        meme_loss = self.loss_of(theirs, ours, batch.y, self.config.meme_label_weight)
        return loss + meme_loss, _joined(private_buffers, meme_buffers)

    def loss_of(self, student: Tensor, teacher: Tensor, y: Tensor, label_weight: float) -> Tensor:
        """Returns the loss of (B, classes) outputs; no gradient flows into the teacher's."""
        taught = mean_counted(distances(student, teacher, "kl"), y)
        return torch.lerp(taught, self.loss(student, y), label_weight)

    @property
    def trainable(self) -> frozenset[str]:
        """Names of both models' parameters, as :func:`_joined` names them."""
        parts = {"private": self.module, "meme": self.network("meme")}
        named = ((part, name) for part in parts for name in trees.parameters_of(parts[part]))
        return frozenset("/".join(path) for path in named)

    @property
    def private_model(self) -> Model:
        """The client's own model, the initial one before it has trained."""
        model: Model = self.memory.get("model") or self.initial
        return model

    def personal_model(self, received: Tree) -> Model:
        """Returns the private model."""
        return self.private_model


def meme_size(outline: Outline) -> str:
    """Returns the name of the target size that the meme has."""
    return next(iter(outline.models))


def _joined(private: Model, meme: Model) -> Model:
    """Makes one model of two, so that they train at once."""
    return dict(leaves({"private": private, "meme": meme}))


def _parts(both: Model) -> tuple[Model, Model]:
    """Undoes :func:`_joined`."""
    parts: dict[str, Model] = {"private": {}, "meme": {}}
    for path, value in both.items():
        part, name = path.split("/", maxsplit=1)
        parts[part][name] = value
    return parts["private"], parts["meme"]


class Server(federation.Server):
    """Holds the meme, ``self.meme``, one for clients of all sizes."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_logits("fml", outline)
        self.meme: Model = outline.initial(meme_size(outline))

    def round(self, clients: Cohort) -> None:
        """Replaces the meme by the weighted mean of the trained ones."""
        self.meme = clients.mean(Client.train_model, self.meme, batches=self.config.batches)

    def personalize(self, clients: Cohort) -> Tree:
        """Sends nothing: each client uses its private model; a novel one trains it first."""
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.join, self.meme, batches=batches)
        return {}

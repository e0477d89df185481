"""FedPAC (Xu et al., ICLR 2023): features near common centroids, a mixture of heads for each.

Paper: https://arxiv.org/abs/2306.11867, algorithm 1.

Clients share a body; each has a head of its own, the last layer. A client that takes part trains
its head on the frozen body, for ``head_steps`` at the rate ``head_lr``, then the body under the
frozen head, on its loss plus lambda times the mean over examples and features of (z - c_y)^2: z is
what enters the head and c_y the global centroid of the class y or, where there is none yet, the
client's own of before its training. While there is none at all, in the first round, it has the
loss alone.

The server combines the trained heads of a round for each of its clients i anew, by the weights

    argmin_a  sum_j a_j^2 v_j + |sum_j a_j (H_i - H_j)|^2,   a >= 0, sum_j a_j = 1

where, with the body as received, H_j (classes, F) are client j's mean features of each class times
the share of the class in its data, and v_j = (mean |z|^2 - |H_j|^2) / n_j, with n_j its number of
examples, is what its head varies by. That quadratic programme is solved exactly, as the problem of
non-negative least squares that has the same solution up to a factor. Weights of 0.001 or less are
cut off, unless all are that small.

Sent: the body (buffers included), the client's head, the centroids and which there are. Returned: H
and v, then body and head as trained, then the client's centroids by the trained body and the share
of each class in its data. Aggregated: bodies weighted by training examples, centroids by those of
the class; a class that none of a round's clients has keeps its centroid. Kept: nothing; the server
has the heads. Evaluated: the global body with the client's own, combined head, at first the initial
one. A novel client, of which the paper has none, trains a head on the frozen body for
``novel_steps`` steps. A target size has a body, centroids and heads for itself.

What the text leaves open follows the authors' code, in which a head trains for one pass.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.federation import Cohort, Each, Outline, step
from hyperfed.functional import forward_with_features
from hyperfed.methods.parts.features import check_classes, class_means, features_of, linear_head
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import head_names
from hyperfed.training import (
    Batch,
    Batches,
    Epochs,
    LocalConfig,
    Objective,
    Steps,
    counts_of,
    fit,
)
from hyperfed.trees import Model, Tree, clone, partition, repeat, take, weighted_mean

SMALLEST = 1e-3
"""Weights of heads up to here are cut off, as in the authors' code."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of FedPAC.

    Attributes:
        alignment_weight: lambda, the weight of the distance to the centroids.
        head_steps: steps for which the head trains before the body.
        head_epochs: passes over the client's data instead.
        head_lr: learning rate of the head; for the rest it has the settings of local training.
        novel_steps: steps in which a novel client trains its head.
    """

    alignment_weight: NonNegativeFloat = 1.0
    head_steps: NonNegativeInt = 50
    head_epochs: NonNegativeInt | None = None
    head_lr: PositiveFloat = 0.1
    novel_steps: NonNegativeInt = 500

    @property
    def head_batches(self) -> Batches:
        """What a head is trained on in a round."""
        if self.head_epochs is not None:
            return Epochs(self.head_epochs, self.batch_size)
        return Steps(self.head_steps, self.batch_size)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The defaults of the authors' options, and what their code fixes.
    "official": {
        "rounds": 200,
        "cohort": 1.0,
        "task.clients": 20,
        "task.novel": 0.0,
        "method.local_epochs": 5,
        "method.head_epochs": 1,
        "method.batch_size": 50,
        "method.local_lr": 2e-2,
        "method.local_momentum": 0.5,
        "method.local_weight_decay": 5e-4,
    },
}


class Client(federation.Client):
    """Trains the head and then the body that it receives."""

    @step
    def describe(self, model: Model) -> Tree:
        """Measures features by the model as received; keeps it and their centroids for the round.

        Args:
            model: the global body and the client's head.

        Returns:
            {"H": (classes, F), "v": ()}.
        """
        features = features_of(self.module, model, self.train)
        means, count = class_means(features, self.train.labels, self.classes)
        self.scratch["model"], self.scratch["centroids"] = model, means
        n = len(features)
        h = means * (count / n)[:, None]
        return {"H": h, "v": (features.square().sum() / n - h.square().sum()) / n}

    @step
    def train_model(self, centroids: Tree) -> Model:
        """Trains the head of the model that was described, then the body; returns both.

        Args:
            centroids: {"mean": (classes, F), "there": (classes,) bool, whether there is one}.
        """
        model: Model = self.scratch["model"]
        head = self.trained_head(model, self.draw_batches(self.config.head_batches))
        trained = fit(
            self.objective_near(centroids),
            model | head,
            self.batches,
            self.config.local,
            trainable=self.parameters - self.head,
        ).model
        self.scratch["model"] = trained
        return trained

    @step
    def centroids(self) -> Tree:
        """Returns {"mean": (classes, F) by the trained body, "share": (classes,) of the data}."""
        features = features_of(self.module, self.scratch["model"], self.train)
        means, count = class_means(features, self.train.labels, self.classes)
        return {"mean": means, "share": count / len(features)}

    @step
    def fit_head(self, model: Model) -> Tree:
        """Trains the head on the frozen body; replies with nothing."""
        self.memory["head"] = self.trained_head(model, self.batches)
        return {}

    def trained_head(self, model: Model, batches: Iterable[Batch]) -> Model:
        """Returns the head after training on the frozen body; moved buffers are lost."""
        settings = replace(self.config.local, lr=self.config.head_lr)
        trained = fit(self.objective, model, batches, settings, trainable=self.head).model
        return partition(trained, self.head)[0]

    def objective_near(self, centroids: Tree) -> Objective:
        """Returns the loss and lambda times the distance to the centroids."""
        mean, there, own = centroids["mean"], centroids["there"], self.scratch["centroids"]
        near = torch.where(there[:, None], mean, own)
        strength = self.config.alignment_weight * there.any()

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, features, buffers = forward_with_features(self.module, model, batch.x)
            distance = (features - near[batch.y]).square().mean()
            return self.loss(output, batch.y) + strength * distance, buffers

        return objective

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the personal parameters."""
        return head_names(self.module)

    def personal_model(self, received: Model) -> Model:
        """Returns what was sent, a novel client with the head that it has trained."""
        head: Model = self.memory.get("head", {})
        return received | head


class Server(federation.Server):
    """Holds, by target size, body, centroids and the clients' heads, leaves (n, ...).

    Raises:
        UserError: examples are not of one class each, or the last layer of a target is not linear.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_classes("FedPAC", outline)
        self.body: Tree = {}
        self.heads: Tree = {}
        self.initial_head: Tree = {}
        self.centroids: Tree = {}
        for size, target in outline.models.items():
            last = linear_head("FedPAC", target)
            names = head_names(target)
            self.initial_head[size], self.body[size] = partition(outline.initial(size), names)
            self.heads[size] = clone(repeat(self.initial_head[size], outline.clients))
            mean = last.weight.new_zeros(outline.classes, last.in_features)
            there = torch.zeros(outline.classes, dtype=torch.bool)
            self.centroids[size] = {"mean": mean, "there": there}

    def round(self, clients: Cohort) -> None:
        """Replaces bodies and centroids by means, and combines the clients' heads."""
        groups = clients.sizes
        replies = {size: self.replies(group) for size, group in groups.items()}
        for size, group in groups.items():
            described, trained, seen = replies[size]
            answered = group.weight > 0
            heads, bodies = partition(trained, self.heads[size])
            share = combining_weights(described["H"][answered], described["v"][answered])
            combined = {
                name: torch.einsum("ij,j...->i...", share.to(head.dtype), head[answered])
                for name, head in heads.items()
            }
            ids = group.ids[answered].to(share.device)
            self.heads[size] = {
                name: kept.index_copy(0, ids, combined[name])
                for name, kept in self.heads[size].items()
            }
            self.body[size] = weighted_mean(bodies, group.weight)
            self.centroids[size] = updated(self.centroids[size], seen, group.weight)

    def replies(self, clients: Cohort) -> tuple[Tree, Tree, Tree]:
        """Returns what clients of one size describe, train and have as centroids then."""
        size = clients.size
        return (
            clients.ask(Client.describe, Each(self.models(clients))),
            clients.ask(Client.train_model, self.centroids[size], batches=self.config.batches),
            clients.ask(Client.centroids),
        )

    def models(self, clients: Cohort) -> Model:
        """Returns the body with the head of each client, leaves (C, ...)."""
        size, count = clients.size, len(clients.ids)
        heads = repeat(self.initial_head[size], count)
        if not clients.novel:
            heads = take(self.heads[size], clients.ids)
        return repeat(self.body[size], count) | heads

    def personalize(self, clients: Cohort) -> Each:
        """Sends each client its model; a novel one first trains a head."""
        sent = Each(self.models(clients))
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_head, sent, batches=batches)
        return sent


def updated(centroids: Tree, seen: Tree, examples: Tensor) -> Tree:
    """Returns the centroids after some clients' came in.

    Args:
        centroids: {"mean": (classes, F), "there": (classes,) bool}.
        seen: {"mean": (C, classes, F), "share": (C, classes)}.
        examples: (C,) of each client; 0 of a lost one.
    """
    count = counts_of(seen["share"], examples).to(seen["mean"].dtype)
    total = count.sum(dim=0)
    mean = torch.einsum("ck,ckf->kf", count, seen["mean"]) / total.clamp(min=1)[:, None]
    there = total > 0
    return {
        "mean": torch.where(there[:, None], mean, centroids["mean"]),
        "there": centroids["there"] | there,
    }


def combining_weights(h: Tensor, v: Tensor) -> Tensor:
    """Returns by which weights each client's head is made of all.

    The objective is |A a|^2, with the roots of v and below them the differences H_i - H_j as the
    columns of A. Scaled by s it grows by s^2, so that the least |A a|^2 + (sum a - 1)^2 over all
    a >= 0 is taken in the direction of the weights: that is non-negative least squares.

    Args:
        h: H, (C, classes, F).
        v: (C,).

    Returns:
        (C, C) float64, a row of sum 1 for each client.
    """
    from scipy.optimize import nnls  # takes long to import

    rows, means = [], h.double().cpu()
    spread = v.double().cpu().clamp(min=0).sqrt().diag()
    for own in means:
        a = torch.cat([spread, (own - means).flatten(1).T])  # (C + classes * F, C)
        a = torch.linalg.qr(a / a.norm().clamp(min=torch.finfo(a.dtype).tiny)).R  # (C, C)
        system = torch.cat([a, torch.ones(1, len(h), dtype=a.dtype)])
        target = torch.zeros(len(system), dtype=a.dtype)
        target[-1] = 1
        weights = torch.from_numpy(nnls(system.numpy(), target.numpy())[0])
        weights = weights / weights.sum()
        large = weights > SMALLEST
        if large.any():  # of a thousand clients none need be
            weights = weights * large
        rows.append(weights / weights.sum())
    return torch.stack(rows).to(h.device)

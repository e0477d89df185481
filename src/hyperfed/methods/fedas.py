"""FedAS (Yang et al., CVPR 2024): bodies fitted to each client before it trains, weighed by Fisher.

Paper: https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html

Clients share a body and keep a head. A client that takes part

1. aligns the global body with its own model of last time: with p_c the mean of that model's
   features (what enters the last layer) of its training examples of class c, and z those of the
   body, that descends, in ``align_epochs`` passes of plain SGD, the sum over the classes c of a
   batch of the mean of (z - p_c)^2 over the examples of the class and the features;
2. trains the aligned body and its own head together;
3. tells the trace of the Fisher information of what it trained: the squared norm of the gradient of
   the mean loss of a batch, summed over the batches of one pass, in evaluation mode.

Bodies are averaged with weights in proportion to the traces, so that the under-trained model of a
client that was long absent counts for little.

Sent: the global body (everything but the last layer; buffers included). Returned: the trained body
and the trace. Kept: the own model, as last trained. Evaluated: that one; a client that was never
asked has the global body and the initial head. A novel client, of which the paper has none, trains
those for ``novel_steps`` steps, as PFLlib fine-tunes.

We had no text of the paper but its abstract: the algorithm is that of the authors' code. There the
clients of a round align one and the same body in their turn, each where the last one left it: here
each aligns the one that it was sent. There batch-norm's statistics do not travel.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.func import grad

from hyperfed import federation, training
from hyperfed.federation import Cohort, Outline, step
from hyperfed.functional import apply, forward_with_features
from hyperfed.methods.parts.features import check_classes, class_means, features_of
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Batch, Epochs, PersonalConfig, Steps, count_classes
from hyperfed.trees import Model, Tree, partition, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedAS; the defaults of its own are those of the authors' code.

    Attributes:
        align_epochs: passes over a client's data in which it aligns the global body.
        align_lr: learning rate of these.
        align_batch_size: examples of a batch of these.
        novel_steps: steps in which a novel client trains its model.
    """

    align_epochs: NonNegativeInt = 1
    align_lr: NonNegativeFloat = 0.01
    align_batch_size: PositiveInt = 16
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The authors' script for CIFAR-100 and the defaults of their options.
    "official": {
        "rounds": 40,
        "cohort": 0.1,
        "task.clients": 20,
        "task.novel": 0.0,
        "method.local_epochs": 5,
        "method.batch_size": 16,
        "method.local_lr": 5e-3,
        "method.local_momentum": 0.0,
        "method.local_weight_decay": 0.0,
    },
}


class Client(federation.Client):
    """Keeps a model of its own, with which it aligns what it receives."""

    @step
    def train_model(self, body: Model) -> Tree:
        """Aligns the body and trains the model.

        Returns:
            {"body": the trained body, "trace": that of the Fisher information over
            :func:`scale_of_trace`, float64}.
        """
        model = self.train_from(self.aligned(body))
        trace = self.fisher_trace(model) / scale_of_trace(len(self.train), self.config.batch_size)
        return {"body": partition(model, self.head)[1], "trace": trace}

    @step
    def fit(self, body: Model) -> Tree:
        """Trains the model from the body as it is; replies with nothing."""
        self.train_from(body)
        return {}

    def train_from(self, body: Model) -> Model:
        """Trains a body and the client's own head; returns and keeps the model."""
        start = body | partition(self.own, self.head)[0]
        names = self.parameters
        model = self.train_own(self.objective, start, self.batches, trainable=names, own=self.head)
        self.memory["model"] = model
        return model

    def aligned(self, body: Model) -> Model:
        """Returns the body after its features came nearer to the prototypes of the own model."""
        config = self.config
        features = features_of(self.module, self.own, self.train)
        prototypes, _ = class_means(features, self.train.labels, self.classes)

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            _, features, buffers = forward_with_features(self.module, model, batch.x)
            square = (features - prototypes[batch.y]).square().mean(dim=1)
            return (square / count_classes(batch.y, self.classes)[batch.y]).sum(), buffers

        start = body | partition(self.own, self.head)[0]
        batches = self.draw_batches(Epochs(config.align_epochs, config.align_batch_size))
        trainable = self.parameters - self.head
        optimizer = training.Sgd(config.align_lr)
        model = training.fit(objective, start, batches, optimizer, trainable=trainable).model
        return partition(model, body)[0]

    def fisher_trace(self, model: Model) -> Tensor:
        """Returns the squared norm of the loss's gradient, summed over the batches of a pass."""
        weights, buffers = partition(model, self.parameters)

        def loss(weights: Model, batch: Batch) -> Tensor:
            return self.loss(apply(self.module, weights | buffers, batch.x), batch.y)

        trace = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in self.draw_batches(Epochs(1, self.config.batch_size)):
            gradient = grad(loss)(weights, batch)
            trace = (
                trace + torch.stack([g.double().square().sum() for g in gradient.values()]).sum()
            )
        return trace

    @property
    def own(self) -> Model:
        """The client's own model, the initial one before it has trained."""
        return self.recall("model", self.initial)

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the personal parameters."""
        return head_names(self.module)

    def personal_model(self, received: Model) -> Model:
        """Returns the own model; before it has trained, the global body with the initial head."""
        model: Model = self.memory.get("model", received | partition(self.initial, self.head)[0])
        return model


class Server(federation.Server):
    """Holds the global body, ``self.body[size]``.

    Raises:
        UserError: examples are not of one class each.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_classes("FedAS", outline)
        self.body: Tree = {
            size: partition(outline.initial(size), head_names(target))[1]
            for size, target in outline.models.items()
        }

    def round(self, clients: Cohort) -> None:
        """Replaces the global body by the mean of the trained ones, weighted by their traces."""
        groups, batches = clients.sizes, self.config.batches
        replies = {
            size: group.ask(Client.train_model, self.body[size], batches=batches)
            for size, group in groups.items()
        }
        for size, group in groups.items():
            told = replies[size]["trace"].clamp(min=0)  # of squares: nobody's is below
            scales = [scale_of_trace(int(n), self.config.batch_size) for n in group.weight]
            trace = told * told.new_tensor(scales)
            # Where no gradient is left, all that answered count alike.
            weight = torch.where(trace.sum() > 0, trace, (group.weight > 0).to(trace))
            self.body |= {size: weighted_mean(replies[size]["body"], weight)}

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global body, for a client without a model of its own."""
        body: Model = self.body[clients.size]
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit, body, batches=batches)
        return body


def scale_of_trace(examples: int, batch_size: int) -> int:
    """Returns what a client's trace is divided by on its way: about the batches that it sums over.

    So it is no longer by the number of examples, by which a client with far more than the others
    would be lost (``robust.reply_bound``). A power of two rounds nothing.
    """
    batches = -(-examples // batch_size)
    return 1 << max(0, batches - 1).bit_length()

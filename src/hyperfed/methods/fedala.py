"""FedALA (Zhang et al., AAAI 2023): each client mixes the global model into its own, then trains.

Paper: https://arxiv.org/abs/2212.01197, algorithm 1.

A client that was asked before has the model theta_i that it trained last. It does not overwrite it
with the global model Theta, but starts from

    theta_hat = theta_i + (Theta - theta_i) * W

elementwise. W is one in all but the ``higher_layers`` (p) last layers: the others are overwritten.
There W starts at one and is trained on a random share s of the client's examples, by gradient
descent on the loss of theta_hat, everything else frozen:

    W <- clip(W - eta * grad L(theta_hat) * (Theta - theta_i), 0, 1)

after each batch. The first time, which is the second in which a client takes part, it is trained
until the losses of the last batch of each pass no longer vary; from then on for one pass a round.
From theta_hat the client trains as in FedAvg. With p = 0 this is FedAvg.

Sent: the whole model, batch-norm buffers included, both ways. Kept: the p higher layers of theta_i,
and W; statistics of batch-norm among them are not mixed but the global ones. Aggregated: the mean
of the trained models, weighted by training examples. Evaluated: theta_hat, mixed anew from the
latest global model, as in the authors' code, before the client trains: one pass for W, or all of
the first training where it has taken part but once, and nothing is kept; one that was never asked
uses the global model. A novel client has nothing to mix: it fine-tunes the global model for
``novel_steps`` steps, and nothing is sent back.

We had no text of the paper: the algorithm is that of its summary and of the authors' code, which

- counts p in tensors of parameters, and takes 0 for all of them: here they are layers, 0 is none;
- has every client aggregate in every round: here those that take part, or are evaluated;
- draws its share as a run of consecutive examples: here all are as likely, in one order for all
  passes of a round, as there. At least two are drawn, as batch-norm has no statistics of one;
- keeps batch-norm buffers on the client: here theta_hat has the global ones, averaged. In both they
  do not move while W is trained;
- sets no limit to the first training of W: here that is ``first_epochs``.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.func import grad_and_value

from hyperfed.federation import Cohort, Outline, step
from hyperfed.methods import fedavg
from hyperfed.methods.parts.presets import DEFAULT, PFLLIB
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Batch, fit, pass_lengths
from hyperfed.trees import Model, Tree, partition, tree_map


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(fedavg.Config):
    """Settings of FedALA.

    Attributes:
        higher_layers: p, how many of the last layers are mixed; 0 is FedAvg.
        weight_lr: eta, the rate of W.
        weight_share: s, the share of a client's examples on which W is trained in a round.
        first_epochs: at most so many passes over them the first time.
        loss_window: how many passes must agree for W to have converged then.
        loss_threshold: below which standard deviation their losses do. The default is that of the
            authors' code; in the paper it was 0.01, as the code's README says.
        novel_steps: steps in which a novel client fine-tunes the global model.
    """

    higher_layers: NonNegativeInt = 1
    weight_lr: NonNegativeFloat = 1.0
    weight_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    first_epochs: PositiveInt = 100
    loss_window: PositiveInt = 10
    loss_threshold: NonNegativeFloat = 0.1
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The authors' script.
    "official": PFLLIB,
}


class Client(fedavg.Client):
    """FedAvg's, which aggregates the global model and its own before it trains."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Trains from theta_hat; returns the trained model, and keeps its higher layers."""
        start, settings = self.aggregated(model), self.config.local
        trained = fit(
            self.objective, start, self.batches, settings, trainable=self.parameters
        ).model
        self.memory["own"], _ = partition(trained, self.higher)
        return trained

    @step
    def aggregate(self, model: Model) -> Tree:
        """Makes theta_hat the personal model; replies with nothing."""
        self.scratch["personal"] = self.aggregated(model)
        return {}

    def aggregated(self, model: Model) -> Model:
        """Trains and keeps W; returns theta_hat, which is the global model without an own one."""
        own: Model = self.memory.get("own", {})
        if not own:
            return model
        config, (received, _) = self.config, partition(model, self.higher)
        first = "weights" not in self.memory
        weights = tree_map(torch.ones_like, own) if first else self.memory["weights"]
        sample, losses = self.sample(), list[Tensor]()
        for _ in range(config.first_epochs if first else 1):
            for rows in sample:
                mixture = tree_map(torch.lerp, own, received, weights)
                gradient, loss = self.gradient(model, mixture, self.train.batch(rows))
                weights = tree_map(self.descended, weights, gradient, received, own)
            losses.append(loss)
            if first and converged(losses, config.loss_window, config.loss_threshold):
                break
        self.memory["weights"] = weights
        return model | tree_map(torch.lerp, own, received, weights)

    def sample(self) -> Sequence[Tensor]:
        """Draws the examples for W: the positions of those of each batch of a pass."""
        count = max(2, int(self.config.weight_share * len(self.train)))
        rows = torch.randperm(len(self.train), generator=self.generator)[:count]
        return rows.split_with_sizes(pass_lengths(len(rows), self.config.batch_size))

    def gradient(self, model: Model, higher: Model, batch: Batch) -> tuple[Model, Tensor]:
        """Returns the gradient by the higher layers, over the rest of a model, and the loss."""

        def loss(higher: Model) -> tuple[Tensor, Model]:
            return self.objective(model | higher, batch)

        gradient, (value, _) = grad_and_value(loss, has_aux=True)(higher)
        return gradient, value

    def descended(self, weight: Tensor, gradient: Tensor, received: Tensor, own: Tensor) -> Tensor:
        """Returns clip(W - eta * gradient * (Theta - theta_i), 0, 1)."""
        eta: float = self.config.weight_lr
        return (weight - eta * gradient * (received - own)).clamp(0, 1)

    @property
    def higher(self) -> tuple[str, ...]:
        """Names of the parameters that are mixed."""
        return head_names(self.module, self.config.higher_layers)


def converged(losses: Sequence[Tensor], window: int, threshold: float) -> bool:
    """Returns whether the last losses vary by less than a threshold; one must have gone before."""
    if len(losses) <= window:
        return False
    return bool(torch.stack([*losses[-window:]]).std(correction=0) < threshold)


class Server(fedavg.Server):
    """FedAvg's, which has known clients aggregate before they are evaluated."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        for module in outline.models.values():
            head_names(module, config.higher_layers)  # there are as many

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model, of which each client makes its own."""
        if not clients.novel:
            clients.ask(Client.aggregate, self.model[clients.size])
        return super().personalize(clients)

"""FedDBE (Zhang et al., NeurIPS 2023): FedAvg whose clients each keep the bias of their features.

Paper: https://arxiv.org/abs/2311.14975.

The domain bias eliminator (DBE) adds two parts to FedAvg. Each client keeps a vector b_i, its
personalised representation bias memory, at first zero, which is added to the features z (what
enters the last layer) and trained with the model. And the mean of the features before b_i is added
is drawn to one that all clients have in common: with m_i the running mean over the batches of a
round, m_i <- (1 - mu) m_i + mu mean(z), at first zero, the loss of a batch is

    L(head(z + b_i)) + kappa/2 mean over features of (m_i - m)^2.

The last layer is linear, head(z) = W z + c, so that the personal model is the target with c + W b_i
in the place of c.

m is found once, before the first round: the clients train the initial model without either part,
and m is the mean of their m_i, weighted by training examples; what they trained is dropped. There
all clients do so, here those of the first round, of each target size.

Sent: the global model, batch-norm buffers included, both ways, and m. Kept: b_i. Aggregated: the
mean of the trained models, weighted by training examples. Evaluated: the global model with the
client's own b_i; one that was never asked has none. A novel client, of which the paper has none,
trains a b_i on the frozen global model for ``novel_steps`` steps.

We had no text of the paper but its summary: the algorithm is that of the authors' code. There model
and b_i have optimisers of their own, plain SGD with the same rate; here they share the settings.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, step
from hyperfed.functional import forward_with_features
from hyperfed.methods.parts.features import check_one_label, linear_head
from hyperfed.methods.parts.presets import DEFAULT, PFLLIB
from hyperfed.nets.anatomy import head_names
from hyperfed.training import Batch, Objective, PersonalConfig, Steps
from hyperfed.trees import Model, Tree, partition, weighted_mean

BIAS, RUNNING = "dbe/bias", "dbe/mean"
"""The names of b_i and m_i among those of the target's entries."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of FedDBE; the defaults of its own are those of the authors' script.

    Attributes:
        mean_weight: kappa, the weight of the distance between the means.
        mean_momentum: mu, the share of a new batch in the running mean; 1 is that batch alone.
        novel_steps: steps in which a novel client trains its bias memory.
    """

    mean_weight: NonNegativeFloat = 50.0
    mean_momentum: Annotated[float, Field(gt=0, le=1)] = 1.0
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    "official": {**PFLLIB, "rounds": 2000},
}


class Client(federation.Client):
    """Keeps a bias of its features."""

    @step
    def measure_mean(self, model: Model) -> Tree:
        """Trains as FedAvg does; returns {"mean": m_i, (F,)} and keeps nothing."""
        return {"mean": self.trained(self.objective_near(None), model, self.parameters)[RUNNING]}

    @step(like="model")
    def train_model(self, model: Model, common: Tree) -> Model:
        """Trains the global model and b_i; returns the one and keeps the other.

        Args:
            model: the global one.
            common: {"mean": m, (F,)}.
        """
        objective = self.objective_near(common["mean"])
        trained = self.trained(objective, model, {*self.parameters, BIAS})
        self.memory["bias"] = trained[BIAS]
        return partition(trained, model)[0]

    @step
    def fit_bias(self, model: Model) -> Tree:
        """Trains b_i on the frozen global model; replies with nothing."""
        self.memory["bias"] = self.trained(self.objective_near(None), model, {BIAS})[BIAS]
        return {}

    def trained(self, objective: Objective, model: Model, trainable: Collection[str]) -> Model:
        """Returns model, b_i and m_i after training."""
        bias = self.bias(model)
        start = model | {BIAS: bias, RUNNING: torch.zeros_like(bias)}
        own = {BIAS}.intersection(trainable)
        return self.train_own(objective, start, self.batches, trainable=trainable, own=own)

    def objective_near(self, mean: Tensor | None) -> Objective:
        """Returns the loss with b_i and, where there is a common mean, the distance of m_i to it.

        What is returned as a buffer beside batch-norm's is m_i, without its past's gradient.
        """
        config = self.config

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            own, target = partition(model, (BIAS, RUNNING))
            shifted = self.shifted(target, own[BIAS])
            output, features, buffers = forward_with_features(self.module, shifted, batch.x)
            running = torch.lerp(own[RUNNING], features.mean(dim=0), config.mean_momentum)
            loss = self.loss(output, batch.y)
            if mean is not None:
                loss = loss + config.mean_weight / 2 * (running - mean).square().mean()
            return loss, buffers | {RUNNING: running}

        return objective

    def shifted(self, model: Model, bias: Tensor) -> Model:
        """Returns the target that adds a bias (F,) to its features: c + W b in the place of c."""
        weight, constant = head_names(self.module)
        return model | {constant: model[constant] + model[weight] @ bias}

    def bias(self, model: Model) -> Tensor:
        """Returns b_i, (F,)."""
        weight, _ = head_names(self.module)
        own: Tensor = self.memory.get("bias", torch.zeros_like(model[weight][0]))
        return own

    def personal_model(self, received: Model) -> Model:
        """Returns the global model with the client's own bias."""
        return self.shifted(received, self.bias(received))


class Server(federation.Server):
    """Holds, by target size, the global model, the common mean m and whether there is one yet.

    Raises:
        UserError: the task has a label for every token, or a target's last layer is not linear.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_one_label("FedDBE", outline)
        heads = {size: linear_head("FedDBE", target) for size, target in outline.models.items()}
        self.model: Tree = {size: outline.initial(size) for size in heads}
        self.mean: Tree = {s: head.weight.new_zeros(head.in_features) for s, head in heads.items()}
        self.there: Tree = {size: torch.tensor(False) for size in heads}

    def round(self, clients: Cohort) -> None:
        """Replaces the global model by the weighted mean of the trained ones."""
        groups, batches = clients.sizes, self.config.batches
        mean = {size: self.common_mean(group) for size, group in groups.items()}
        trained = {
            size: group.ask(Client.train_model, self.model[size], mean[size], batches=batches)
            for size, group in groups.items()
        }
        self.model |= {size: weighted_mean(trained[size], groups[size].weight) for size in groups}
        self.mean |= {size: common["mean"] for size, common in mean.items()}
        self.there |= {size: torch.ones_like(self.there[size]) for size in groups}

    def common_mean(self, clients: Cohort) -> Tree:
        """Returns {"mean": m, (F,)} of these clients' size, which they measure if there is none."""
        size = clients.size
        if self.there[size]:
            return {"mean": self.mean[size]}
        measured = clients.ask(Client.measure_mean, self.model[size], batches=self.config.batches)
        return weighted_mean(measured, clients.weight)

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model, to which each client adds its own bias."""
        model: Model = self.model[clients.size]
        if clients.novel and self.config.novel_steps:
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.fit_bias, model, batches=batches)
        return model

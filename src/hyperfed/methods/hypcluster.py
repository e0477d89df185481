"""HypCluster (Mansour et al., 2020; Ghosh et al., NeurIPS 2020): each client has one of k models.

Paper: https://arxiv.org/abs/2002.10619; the second, of IFCA: https://arxiv.org/abs/2006.04088.

Both papers alternate the same two things. Each client finds, among k models, the one with the
lowest loss on its own training data (in evaluation mode, with the model's own batch-norm
statistics), and trains it; the server averages, cluster by cluster, what came back, weighted by
training examples as in FedAvg (IFCA's algorithm 1 weighs its clients equally, which have equally
many). A cluster that nobody chose stays as it was.

The first of the k models is the target's initial one, so that k = 1 is FedAvg. The others are drawn
anew from the run's seed: of identical models everyone would choose the first, and train no other.

Sent: all k models, batch-norm buffers included. Returned: the number of the chosen one, then that
one, trained. Kept: nothing. Evaluated: the model with the lowest loss on the client's own training
data, never on what it is evaluated on. A novel client does the same, without training: so it needs
labels. A task with several target sizes has k models for each.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation, trees
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH, Cohort, Outline, step
from hyperfed.training import LocalConfig, fit, mean_loss
from hyperfed.trees import Model, Tree, model_of, stack, take, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of HypCluster.

    Attributes:
        clusters: k, the number of global models.
    """

    clusters: PositiveInt = 5


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # With all clients: what a small first cohort has trained would be the best of the models, the
    # others being new, to nearly everyone who is asked later.
    "default": {"rounds": 15, "cohort": 1.0, "evaluate_every": 5},
}


class Client(federation.Client):
    """Chooses one of the models it is sent and trains it."""

    @step
    def choose_cluster(self, models: Model) -> Tree:
        """Holds the best of the models, leaves (k, ...), until the end of the round.

        Returns:
            {"cluster": its number, a scalar}.
        """
        numbers = range(self.config.clusters)
        losses = torch.stack([self.training_loss(take(models, j)) for j in numbers])
        cluster = losses.where(~losses.isnan(), torch.inf).argmin()  # which takes NaN for the least
        self.scratch["model"] = take(models, cluster)
        return {"cluster": cluster}

    def training_loss(self, model: Model) -> Tensor:
        """Returns the mean loss of a model on this client's training data."""
        return mean_loss(self.module, self.loss, model, self.train.chunks(EVALUATION_BATCH))

    @step
    def train_model(self) -> Model:
        """Returns the chosen model, trained."""
        return fit(
            self.objective,
            self.scratch["model"],
            self.batches,
            self.config.local,
            trainable=self.parameters,
        ).model

    def personal_model(self, received: Tree) -> Model:
        """Returns the chosen model."""
        model: Model = self.scratch["model"]
        return model


class Server(federation.Server):
    """Holds the global models, ``self.models[size]`` with leaves (k, ...)."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        others = range(config.clusters - 1)
        self.models: Tree = {
            size: stack([model_of(net), *(model_of(_redrawn(net)) for _ in others)])
            for size, net in outline.models.items()
        }

    def round(self, clients: Cohort) -> None:
        """Lets clients choose and train, and averages each cluster."""
        groups, batches = clients.sizes, self.config.batches
        chosen = {
            size: group.ask(Client.choose_cluster, self.models[size])["cluster"]
            for size, group in groups.items()
        }
        trained = {
            size: group.ask(Client.train_model, batches=batches) for size, group in groups.items()
        }
        self.models = self.models | {
            size: cluster_means(self.models[size], trained[size], chosen[size], group.weight)
            for size, group in groups.items()
        }

    def personalize(self, clients: Cohort) -> Tree:
        """Lets clients choose; nothing more need be sent."""
        clients.ask(Client.choose_cluster, self.models[clients.size])
        return {}


def cluster_means(models: Model, trained: Model, chosen: Tensor, weight: Tensor) -> Model:
    """Averages what the clients of each cluster trained.

    Args:
        models: leaves (k, ...), the models so far.
        trained: leaves (C, ...), a model of each client.
        chosen: (C,) the cluster of each client.
        weight: (C,) training examples of each client; 0 for a lost one.

    Returns:
        leaves (k, ...); a cluster without any weight stays.
    """
    means = []
    for cluster in range(len(next(iter(models.values())))):
        members = weight * (chosen == cluster)
        means.append(weighted_mean(trained, members) if members.any() else take(models, cluster))
    return stack(means)


def _redrawn(net: nn.Module) -> nn.Module:
    """Returns a copy with new weights, drawn from the global generator, which the caller seeds.

    Each module draws its own as PyTorch does by default.

    Raises:
        UserError: a module with parameters of its own cannot draw them.
    """
    net = deepcopy(net)
    for prefix, module in net.named_modules():
        if not trees.is_trained(module):
            continue
        draw = getattr(module, "reset_parameters", None)
        if callable(draw):
            draw()
        else:
            raise UserError(
                "to draw several initial models, each module with parameters to train must have "
                f"reset_parameters(), but {prefix or 'the target'} ({type(module).__name__}) has "
                "none; give it one, choose another target, or set clusters=1"
            )
    return net

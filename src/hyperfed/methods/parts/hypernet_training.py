"""What methods share whose server trains a hypernetwork on the deltas of the models it makes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed.federation import Cohort
from hyperfed.trees import Model, fill_gradients, pull_back


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HyperNetConfig:
    """The settings of a hypernetwork and of its training, under the same keys.

    Attributes:
        lr: learning rate of the server's SGD.
        momentum: its momentum.
        weight_decay: its weight decay. Like momentum it moves unsampled embeddings too.
        clip: bound of the norm of the server's gradient.
        embedding_lr: learning rate of the embeddings; ``lr`` where not given. IT-PFL-HN's authors
            searched it by itself.
        embedding_size: length l of an embedding; 1 + n // 4 for n clients where not given.
        hidden: width of the hypernetwork's hidden layers.
        hidden_layers: their number.
    """

    lr: PositiveFloat = 1e-2
    momentum: NonNegativeFloat = 0.9
    weight_decay: NonNegativeFloat = 1e-3
    clip: PositiveFloat = 50.0
    embedding_lr: PositiveFloat | None = None
    embedding_size: PositiveInt | None = None
    hidden: PositiveInt = 100
    hidden_layers: NonNegativeInt = 3

    def length(self, clients: int) -> int:
        """Returns the length l of an embedding for ``clients`` known clients."""
        return self.embedding_size or 1 + clients // 4

    def sgd(
        self,
        *,
        embeddings: Iterable[Tensor] = (),
        hyper_net: Iterable[Tensor] = (),
        embedding_lr: float | None = None,
    ) -> torch.optim.SGD:
        """Returns the server's optimiser.

        Args:
            embeddings: their parameters, if they are to move.
            hyper_net: the hypernetwork's, likewise.
            embedding_lr: in the place of the setting of that name.
        """
        lr = embedding_lr or self.embedding_lr or self.lr
        groups: list[dict[str, Any]] = [
            {"params": [*embeddings], "lr": lr},
            {"params": [*hyper_net]},
        ]
        return torch.optim.SGD(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=True,
        )


def descend(
    optimizer: torch.optim.Optimizer,
    model: Mapping[str, Model],
    delta: Mapping[str, Model],
    clients: Cohort,
    clip: float | None,
) -> None:
    """Makes a step against the mean of what a cohort's deltas are pulled back to.

    Gradients that parameters have already are added; afterwards they have none.

    Args:
        optimizer: of whatever made the models. All its parameters move by momentum and weight
            decay, those that made none of these models too.
        model: {size: what was sent to its clients, leaves (C, ...), part of an autograd graph}.
        delta: {size: sent minus trained}, likewise.
        clients: the cohort; a lost client does not count.
        clip: bound of the gradient's norm; None for none.
    """
    there = clients.weight.sign().sum()
    for size, group in clients.sizes.items():
        pull_back(model[size], delta[size], group.weight.sign() / there)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fill_gradients(parameters)
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    optimizer.zero_grad()

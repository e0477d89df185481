"""What methods share whose server trains a hypernetwork on the deltas of the models it makes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hyperfed.federation import Cohort
from hyperfed.methods.parts.generators import GeneratorConfig
from hyperfed.trees import Model, fill_gradients, pull_back, weighted_mean
from hyperfed.trees.aggregation import is_plain, private_clip

Reduction = Literal["mean", "sum"]
"""What the clients of a cohort, or the entries of a vector, come to together."""

Own = Literal["rows", "whole"]
"""Whether each row of a parameter is one client's own, or a parameter is as a whole."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HyperNetConfig(GeneratorConfig):
    """The settings of a hypernetwork and of its training, under the same keys.

    Attributes:
        lr: learning rate of the server's SGD.
        momentum: its momentum.
        weight_decay: its weight decay. Like momentum it moves unsampled embeddings too.
        clip: bound of the norm of the server's gradient; None for none.
        embedding_lr: learning rate of the embeddings; ``lr`` where not given. IT-PFL-HN's authors
            searched it by itself.
        embedding_weight_decay: weight decay of the embeddings; ``weight_decay`` where not given.
            They searched it by itself too.
        cohort_reduction: whether the server steps by the sum of what its clients' deltas are
            pulled back to, which is about as far as those clients take it one a round (algorithm 1
            of pFedHN), and as the loss of IT-PFL-HN has it; or by their mean, by which a rate that
            suits one client a round is small for many.
        embedding_size: length l of an embedding; 1 + n // 4 for n clients where not given.
    """

    lr: PositiveFloat = 1e-2
    momentum: NonNegativeFloat = 0.9
    weight_decay: NonNegativeFloat = 1e-3
    clip: PositiveFloat | None = 50.0
    embedding_lr: PositiveFloat | None = None
    embedding_weight_decay: NonNegativeFloat | None = None
    cohort_reduction: Reduction = "sum"
    embedding_size: PositiveInt | None = None

    def length(self, clients: int) -> int:
        """Returns the length l of an embedding for ``clients`` known clients."""
        return self.embedding_size or 1 + clients // 4

    def sgd(
        self,
        *,
        embeddings: Iterable[Tensor] = (),
        hyper_net: Iterable[Tensor] = (),
        embedding_lr: float | None = None,
    ) -> SGD:
        """Returns the server's optimiser.

        Args:
            embeddings: their parameters, if they are to move.
            hyper_net: the hypernetwork's, likewise.
            embedding_lr: in the place of the setting of that name.
        """
        lr, decay = embedding_lr or self.embedding_lr or self.lr, self.embedding_weight_decay
        if decay is None:
            decay = self.weight_decay
        groups: list[dict[str, Any]] = [
            {"params": [*embeddings], "lr": lr, "weight_decay": decay, "own": "rows"},
            {"params": [*hyper_net]},
        ]
        return SGD(
            groups,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=True,
        )


def descend(
    optimizers: Sequence[Optimizer],
    model: Mapping[str, Model],
    delta: Mapping[str, Model],
    clients: Cohort,
    clip: float | None,
    *,
    reduction: Reduction = "mean",
) -> None:
    """Makes a step against the mean, or sum, of what a cohort's deltas are pulled back to.

    Gradients that parameters have already are added; afterwards they have none.

    Args:
        optimizers: of whatever made the models. All their parameters move by momentum and weight
            decay, those that made none of these models too.
        model: {size: what was sent to its clients, leaves (C, ...), part of an autograd graph}.
        delta: {size: sent minus trained}, likewise.
        clients: the cohort; a lost client does not count.
        clip: bound of the gradient's norm; None for none.
        reduction: over the clients that are there.
    """
    together = clients.weight.sign().sum() if reduction == "mean" else 1
    pull_back_groups(optimizers, model, delta, clients.sizes, together)
    parameters = [parameter for parameter, _ in _parameters(optimizers)]
    fill_gradients(parameters)
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def pull_back_groups(
    optimizers: Sequence[Optimizer],
    model: Mapping[str, Model],
    delta: Mapping[str, Model],
    groups: Mapping[str, Cohort],
    together: Tensor | int,
) -> None:
    """Pulls the deltas of clients back: their sum, or what a rule makes of them, over ``together``.

    Args:
        optimizers: of whatever made the models; adds to the gradients of their parameters.
        model: {size: what was sent to its clients, leaves (C, ...), part of an autograd graph}.
        delta: {size: sent minus trained}, likewise.
        groups: {size: its clients}; a lost client does not count.
        together: by how much the clients' sum is divided.
    """
    for size, group in groups.items():
        if is_plain():
            pull_back(model[size], delta[size], group.weight.sign() / together)
        else:
            pull_back_apart(optimizers, model[size], delta[size], group, together)


def pull_back_apart(
    optimizers: Sequence[Optimizer],
    model: Model,
    delta: Model,
    clients: Cohort,
    together: Tensor | int,
) -> None:
    """Pulls each client's delta back by itself, so that a rule can stand for their mean.

    The deltas are of different models, which no rule can compare; what they are pulled back to are
    gradients of the same parameters, and their mean is what the server descends. A learned
    embedding (of a parameter group that says so: ``"own"``, :data:`Own`) takes part in its client's
    model alone, so that its gradient is that client's, as ever.

    Where the mean is private, all that a client's delta is pulled back to is bounded as one, its
    embedding's gradient included, and all of that has noise: what the server keeps is private, and
    so is whatever it makes of it. Who is in the cohort is no secret.

    Args:
        optimizers: of whatever made the models; adds to the gradients of their parameters.
        model: what was sent to the clients of one size, (C, ...), part of an autograd graph.
        delta: sent minus trained, likewise.
        clients: those of one size; a lost client does not count.
        together: by how much the clients' sum is divided.
    """
    parameters, clip, there = _parameters(optimizers), private_clip(), clients.weight.sign()
    pulled: list[list[Tensor | None]] = []
    for position in there.nonzero().flatten().tolist():
        alone = torch.zeros_like(there)
        alone[position] = 1
        before = [parameter.grad for parameter, _ in parameters]
        for parameter, _ in parameters:
            parameter.grad = None
        pull_back(model, delta, alone, retain=True)
        pulled.append([parameter.grad for parameter, _ in parameters])
        for (parameter, _), gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    if not pulled:
        return
    by_parameter = [torch.stack(rows) for rows in zip(*pulled, strict=True) if rows[0] is not None]
    reached = [p for p, gradient in zip(parameters, pulled[0], strict=True) if gradient is not None]
    if clip is not None:
        by_parameter = clip_together(by_parameter, clip)
    apart = [own is not None and clip is None for _, own in reached]
    shared = {str(i): by_parameter[i] for i in range(len(reached)) if not apart[i]}
    mean = weighted_mean(shared, there[there > 0], clients.ids)
    for i, (parameter, own) in enumerate(reached):
        total = by_parameter[i].sum(dim=0) if apart[i] else mean[str(i)] * len(pulled)
        if own == "rows" and not apart[i]:  # of which those of other clients have no gradient
            absent = torch.ones(len(total), dtype=torch.bool, device=total.device)
            absent[clients.ids[there > 0]] = False
            total[absent] = 0
        gradient = (total / together).to(parameter.dtype)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _parameters(optimizers: Iterable[Optimizer]) -> list[tuple[Tensor, Own | None]]:
    """Returns all parameters, each with how it is clients' own; None where they share it."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [(p, group.get("own")) for group in groups for p in group["params"]]


def clip_together(gradients: Sequence[Tensor], clip: float) -> list[Tensor]:
    """Bounds the length of each client's gradient over all parameters.

    Args:
        gradients: (C, ...) of each parameter.
        clip: the largest length. What is not finite becomes zero.

    Returns:
        the same in float64: rounded, they could be longer.
    """
    rows = [gradient.double().unsqueeze(-1).flatten(1) for gradient in gradients]
    length = torch.stack([row.square().sum(dim=1) for row in rows]).sum(dim=0).sqrt()  # (C,)
    scale = torch.where(length.isfinite(), (clip / length).clamp(max=1.0), 0.0)

    def clipped(gradient: Tensor) -> Tensor:
        by = scale.view(-1, *[1] * (gradient.dim() - 1))
        return torch.where(by > 0, gradient.double() * by, 0.0)

    return [clipped(gradient) for gradient in gradients]


def fit_rows(
    rows: Tensor,
    optimizer: Optimizer,
    exchange: Callable[[Tensor], tuple[Model, Model]],
    clients: Cohort,
    *,
    rounds: int,
    clip: float | None,
) -> Tensor:
    """Fits what novel clients' models are made from, by their deltas; the hypernetwork is frozen.

    Args:
        rows: (C, l) where each client begins, a leaf that requires gradients.
        optimizer: of them, and of nothing else.
        exchange: makes of rows the models and gets their deltas: sent minus trained, (C, ...) each.
        clients: whose rows they are; that of a lost one, which nobody uses, has no gradient.
        rounds: how often they move.
        clip: bound of the norm of a row's gradient; None for none.

    Returns:
        (C, l) rows, detached.
    """
    for _ in range(rounds):
        model, delta = exchange(rows)
        optimizer.zero_grad()
        pull_back(model, delta, clients.weight.sign(), onto=[rows])
        clip_rows(rows, clip)
        optimizer.step()
    return rows.detach()


def clip_rows(rows: Tensor, clip: float | None) -> None:
    """Bounds the norm of the gradient of each row by itself; None for no bound.

    Rows belong to clients that are fitted apart from one another: what one of them gets must not
    depend on who else is there.
    """
    if clip is not None:
        assert rows.grad is not None
        norm = rows.grad.norm(dim=1, keepdim=True)
        rows.grad *= (clip / (norm + 1e-6)).clamp(max=1.0)  # as ``clip_grad_norm_`` does

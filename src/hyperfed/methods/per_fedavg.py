"""Per-FedAvg (Fallah et al., NeurIPS 2020): one model for all that adapts in a step or two.

Paper: https://arxiv.org/abs/2002.07948, algorithm 1.

A client's part of the objective is MAML's F(w) = f(w - alpha grad f(w)): the loss after one step of
gradient descent. A local iteration estimates its gradient

    (I - alpha Hess f(w; D'')) grad f(w - alpha grad f(w; D); D')

from three independent batches D, D', D''. ``first_order`` drops the Hessian; ``hessian_free`` takes
its product with a gradient as the difference of two gradients.

Sent: the meta-model w, batch-norm buffers included, both ways. Kept: nothing. Aggregated: the mean
of the trained meta-models, **uniform** over the cohort, as in the paper, whose objective is the
plain mean over clients (we know of no code of its authors; that of pFedMe's, who compare with it,
weighs by training examples). Evaluated: the meta-model after ``adapt_steps`` steps of rate alpha at
the client, each on a batch as large as those of training, so that a client is served what w was
trained for. A novel client does the same. What has been adapted never travels. Batch-norm buffers
follow the passes of the adapted model: in training those on D', in adaptation those on its batches.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.func import grad

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, step
from hyperfed.methods.parts.presets import DEFAULT, PEFLL, PFEDHN
from hyperfed.training import Batch, LocalConfig, Sgd, Steps, fit
from hyperfed.trees import Model, Tree, detach, partition, tree_map, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of Per-FedAvg.

    Attributes:
        local_lr: beta, the rate of the meta-model.
        variant: how the Hessian is approximated; ``first_order`` takes two thirds of the batches
            and half the gradients.
        adapt_lr: alpha, the rate of an adaptation, in training and for evaluation. Which is good
            depends on ``local_lr``: search both, in as many rounds as will be trained. Nothing in
            the objective bounds the loss before the step, which may run away after hundreds of
            rounds and leave a model of which a step makes nothing (results/pfedhn).
        adapt_steps: steps in which a client adapts the meta-model before using it.
        difference: delta, how far from w the two gradients of ``hessian_free`` are taken, in units
            of the gradient that they are taken along.
    """

    variant: Literal["first_order", "hessian_free"] = "first_order"
    adapt_lr: PositiveFloat = 1e-2
    adapt_steps: PositiveInt = 1
    difference: PositiveFloat = 1e-3


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {**DEFAULT, "method.local_steps": 20},
    "pfedhn": PFEDHN,
    # Appendix C.2: the first-order variant, one local epoch. Each of its steps draws a D' besides,
    # so that a client looks at twice as many examples as in one pass.
    "pefll": {**PEFLL, "method.local_epochs": 1},
}


class Client(federation.Client):
    """Trains the meta-model, and adapts it to its own data."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns the trained meta-model; D are the batches of the round."""
        return fit(
            self.meta_objective, model, self.batches, self.config.local, trainable=self.parameters
        ).model

    @step
    def adapt(self, model: Model) -> Tree:
        """Makes the personal model of the meta-model; replies with nothing."""
        rate = Sgd(self.config.adapt_lr)
        adapted = fit(self.objective, model, self.batches, rate, trainable=self.parameters).model
        self.scratch["adapted"] = adapted
        return {}

    def meta_objective(self, model: Model, batch: Batch) -> tuple[Tensor, Model]:
        """Returns <w, g> with a constant g, so that its gradient is the estimate g of grad F."""
        parameters, buffers = partition(model, self.parameters)
        w, alpha = detach(parameters), self.config.adapt_lr
        inner, _ = self.gradient(w, buffers, batch)
        g, buffers_after = self.gradient(descended(w, inner, alpha), buffers, self.draw())
        if self.config.variant == "hessian_free":
            g = descended(g, self.hessian_product(w, buffers, g), alpha)
        products = [(parameters[name] * g[name]).sum() for name in g]
        return torch.stack(products).sum(), buffers_after

    def hessian_product(self, w: Model, buffers: Model, g: Model) -> Model:
        """Returns Hess f(w; D'') g as (grad f(w + delta g) - grad f(w - delta g)) / (2 delta)."""
        delta, batch = self.config.difference, self.draw()
        ahead, _ = self.gradient(descended(w, g, -delta), buffers, batch)
        behind, _ = self.gradient(descended(w, g, delta), buffers, batch)
        return tree_map(lambda plus, minus: (plus - minus) / (2 * delta), ahead, behind)

    def gradient(self, weights: Model, buffers: Model, batch: Batch) -> tuple[Model, Model]:
        """Returns grad f(weights; batch) and the buffers after its pass."""
        by, after = grad(lambda w: self.objective(buffers | w, batch), has_aux=True)(weights)
        return by, after

    def draw(self) -> Batch:
        """Returns a batch independent of the round's own: D' or D''."""
        (batch,) = self.draw_batches(Steps(1, self.config.batch_size))
        return batch

    def personal_model(self, received: Tree) -> Model:
        """Returns the adapted model; the meta-model itself serves nobody."""
        adapted: Model = self.scratch["adapted"]
        return adapted


def descended(start: Model, by: Model, rate: float) -> Model:
    """Returns start - rate * by."""
    return tree_map(lambda value, direction: value - rate * direction, start, by)


class Server(federation.Server):
    """Holds the meta-model, ``self.model[size]``."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.model: Tree = {size: outline.initial(size) for size in outline.models}

    def round(self, clients: Cohort) -> None:
        """Replaces the meta-model by the uniform mean of the trained ones."""
        groups, batches = clients.sizes, self.config.batches
        trained = {
            size: group.ask(Client.train_model, self.model[size], batches=batches)
            for size, group in groups.items()
        }
        means = {
            size: weighted_mean(trained[size], group.weight.sign(), group.ids)
            for size, group in groups.items()
        }
        self.model = self.model | means

    def personalize(self, clients: Cohort) -> Tree:
        """Has each client adapt the meta-model, and sends nothing more."""
        batches = Steps(self.config.adapt_steps, self.config.batch_size)
        clients.ask(Client.adapt, self.model[clients.size], batches=batches)
        return {}

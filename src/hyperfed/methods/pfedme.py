"""pFedMe (Dinh et al., NeurIPS 2020): personal models that stay near a global one.

Paper: https://arxiv.org/abs/2006.08848, algorithm 1.

A client's part of the objective is the Moreau envelope F(w) = min f(theta) + lambda/2 |theta - w|^2
over theta. In each local round a client takes K gradient steps towards the minimiser theta(w) on
one fresh batch, and then moves its w by -eta lambda (w - theta), which is -eta grad F(w).

Sent: the global model w, batch-norm buffers included; the client's moved w comes back. Kept:
nothing. Aggregated: w <- (1 - beta) w + beta times the mean of the clients' w; the mean is
**uniform** over the cohort, as in the paper (the authors' code weighs by training examples).
Evaluated: the personal model, the last theta, not w. The paper has every client train in every
round and averages some; here the others train when they are served, which changes no w: from the
global model, as long as in a round, in which a w of the client's own moves after theta, and nothing
comes back. A theta from the round that a client was last asked in would be as old as the w that it
is near. A novel client does the same for ``novel_steps`` local rounds, which is fine-tuning on the
same loss (PeFLL, appendix C.2). (A fixed w would hold theta at the global model where lambda is
large.)

Where the paper leaves theta's start open we follow the authors' code: the global w in a round's
first local round, the last theta in the others. Batch-norm buffers are those of theta's passes,
since no pass is made with w; where beta is above 1 they go to the mean, and not beyond.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed import federation
from hyperfed.federation import Cohort, Outline, step
from hyperfed.methods.parts.presets import DEFAULT, PEFLL, PFEDHN
from hyperfed.training import Batch, Batches, Epochs, LocalConfig, Momentum, Steps, fit, proximal
from hyperfed.trees import Model, Tree, interpolate, parameters_of, partition, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of pFedMe.

    Attributes:
        local_steps: R, local rounds, each on one batch; with ``local_epochs`` one for each batch.
        local_lr: rate of theta's gradient steps; its other settings (``local_momentum``, ...)
            apply to them too, by a new optimiser in each local round.
        inner_steps: K, gradient steps towards theta(w) in a local round.
        proximity: lambda; 0 trains theta alone and leaves w where it is.
        lr: eta, the rate of w; eta * lambda = 1 puts w onto theta.
        server_lr: beta; 1 takes the mean of the clients' w, 0 leaves the global model as it is.
        novel_steps: local rounds in which a novel client fine-tunes the global model.
        novel_epochs: passes over its data instead, with a local round for each batch.
    """

    local_lr: PositiveFloat = 5e-2
    local_momentum: Momentum = 0.0
    local_weight_decay: NonNegativeFloat = 0.0
    inner_steps: PositiveInt = 3
    proximity: NonNegativeFloat = 15.0
    lr: PositiveFloat = 5e-2
    server_lr: NonNegativeFloat = 1.0
    novel_steps: NonNegativeInt = 500
    novel_epochs: NonNegativeInt | None = None

    @property
    def novel_batches(self) -> Batches:
        """What a novel client fine-tunes on."""
        if self.novel_epochs is not None:
            return Epochs(self.novel_epochs, self.batch_size)
        return Steps(self.novel_steps, self.batch_size)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {**DEFAULT, "method.local_steps": 20},
    # Appendix B: K = 3, "i.e., 60 local steps".
    "pfedhn": PFEDHN,
    # Appendix C.2: lambda, K and beta are the defaults; 20 epochs of a novel client.
    "pefll": {**PEFLL, "method.novel_epochs": 20},
}


class Client(federation.Client):
    """Trains w, by a personal model near it."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Returns w after R local rounds."""
        w, _ = self.local_rounds(model)
        return w

    @step
    def adapt(self, model: Model) -> Tree:
        """Makes the last theta the personal model; replies with nothing."""
        _, self.scratch["personal"] = self.local_rounds(model)
        return {}

    def local_rounds(self, model: Model) -> tuple[Model, Model]:
        """Returns w and the last theta, from the global model."""
        w = theta = model
        for batch in self.batches:
            theta = self.approach(theta, w, self.again(batch, self.config.inner_steps))
            w = self.moved(w, theta)
        return w, theta

    def approach(self, theta: Model, w: Model, batches: Iterable[Batch]) -> Model:
        """Takes a gradient step of f(theta; batch) + lambda/2 |theta - w|^2 for each batch."""
        near = proximal(self.objective, w, self.config.proximity, self.parameters)
        return fit(near, theta, batches, self.config.local, trainable=self.parameters).model

    def moved(self, w: Model, theta: Model) -> Model:
        """Returns w - eta lambda (w - theta), with the buffers of theta."""
        rate = self.config.lr * self.config.proximity
        return {
            name: value - rate * (value - theta[name]) if name in self.parameters else theta[name]
            for name, value in w.items()
        }

    def personal_model(self, received: Tree) -> Model:
        """Returns theta; w itself serves nobody."""
        personal: Model = self.scratch["personal"]
        return personal


class Server(federation.Server):
    """Holds the global model w, ``self.model[size]``."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.model: Tree = {size: outline.initial(size) for size in outline.models}

    def round(self, clients: Cohort) -> None:
        """Moves the global model by beta towards the uniform mean of the clients' w."""
        moved, batches, beta = {}, self.config.batches, self.config.server_lr
        for size, group in clients.sizes.items():
            moved[size] = group.ask(Client.train_model, self.model[size], batches=batches)
        for size, group in clients.sizes.items():
            mean = weighted_mean(moved[size], group.weight.sign(), group.ids)
            trained = parameters_of(self.outline.models[size])
            parameters, buffers = partition(self.model[size], trained)
            # Beyond the mean a variance can be below zero.
            buffers = interpolate(buffers, mean, min(beta, 1.0))
            moved[size] = interpolate(parameters, mean, beta) | buffers
        self.model = self.model | moved

    def personalize(self, clients: Cohort) -> Tree:
        """Sends the global model, near which each client trains its theta."""
        batches = self.config.novel_batches if clients.novel else self.config.batches
        clients.ask(Client.adapt, self.model[clients.size], batches=batches)
        return {}

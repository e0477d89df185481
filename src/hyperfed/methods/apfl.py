"""APFL (Deng et al., 2020): a local and the global model mixed, in a share that each client learns.

Paper: https://arxiv.org/abs/2003.13461, algorithm 1.

Client i's personal model is the mixture v_bar = alpha v + (1 - alpha) w of the **weights** of its
local model v and of the global model w. In each local step both descend, on one batch and from
where both were before it:

    w <- w - eta grad f(w)
    v <- v - eta alpha grad f(v_bar)

where alpha grad f(v_bar) is the gradient by v. Once a round, on its first batch, so does alpha:

    alpha <- clip(alpha - eta <v - w, grad f(v_bar)>, 0, 1)

with w as it was received; the round's second step is the first to mix by it.

Sent: the global model w, batch-norm buffers included, both ways. Kept: v, which starts from the
first w that a client receives, and alpha; with ``keep_momentum`` v's momentum too. Aggregated: the
mean of the clients' w, weighted by training examples, as in FedAvg. Evaluated: the mixture with the
latest w; a known client that was never asked uses w alone. A novel client does what a known one
does for ``novel_rounds`` rounds, the global model frozen and nothing sent back. A task with several
target sizes has one global model for each. With alpha fixed at 0 the mixture is FedAvg's model, at
1 v is that of a client alone.

Batch-norm buffers of the mixture are those of its own passes, kept with v. We had no text of the
paper: its algorithm is as its citing work and the authors' code give it, and that code

- mixes the **outputs** of the two models in the place of their weights;
- moves w before v and alpha, so that v descends on the mixture with the new w;
- takes alpha g_v + (1 - alpha) g_w for the gradient of the mixture in alpha's step, with the
  gradients by v and by w, and adds 0.02 alpha to the product: a decay that the equation has not;
- starts v from the initial model, whenever a client is first asked;
- weighs clients alike in the mean.
"""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.func import grad

from hyperfed import federation
from hyperfed.federation import Cohort, step
from hyperfed.methods import fedavg
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.training import Batch, Objective, PersonalConfig, Share, fit
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of APFL. Those of local training are v's and w's, an optimiser for each.

    Attributes:
        local_lr: eta, the rate of w, v and alpha; alpha has neither momentum nor decay nor clip.
        mixing: alpha, the share of the local model, before it is first trained.
        adaptive: whether alpha is trained.
        novel_rounds: rounds of local training by which a novel client obtains v and alpha.
    """

    mixing: Share = 0.5
    adaptive: bool = True
    novel_rounds: NonNegativeInt = 20


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # The example of the authors' code, on MNIST, whose rate falls by 1 % an epoch.
    "official": {
        "rounds": 20,
        "cohort": 1.0,
        "evaluate_every": 1,
        "task.clients": 10,
        "task.classes_per_client": 2,
        "task.novel": 0.0,
        "method.local_steps": 10,
        "method.batch_size": 50,
        "method.local_lr": 0.1,
        "method.local_momentum": 0.0,
        "method.local_weight_decay": 1e-4,
        "method.mixing": 0.5,
        "method.adaptive": False,
    },
}


class Client(federation.Client):
    """Keeps a local model v, and alpha, the share that it has in the mixture."""

    @step(like="model")
    def train_model(self, model: Model) -> Model:
        """Trains w, v and alpha; keeps the last two and returns w."""
        settings, names = self.config.local, self.parameters
        w, v, alpha = model, self.memory.get("local", model), self.alpha(model)
        w_moments: Tree = {}
        keeps = self.config.keep_momentum
        v_moments = self.memory.get("momentum", {}) if keeps else {}
        for number, batch in enumerate(self.batches):
            first = self.config.adaptive and number == 0
            after = self.descended(alpha, w, v, batch) if first else alpha
            mixed = self.mixed_objective(w, alpha)
            v, v_moments = fit(mixed, v, [batch], settings, trainable=names, moments=v_moments)
            w, w_moments = fit(
                self.objective, w, [batch], settings, trainable=names, moments=w_moments
            )
            alpha = after
        self.memory["local"], self.memory["alpha"] = v, alpha
        if keeps:
            self.memory["momentum"] = v_moments
        return w

    @step
    def join(self, model: Model) -> Tree:
        """Does the same and replies with nothing."""
        self.train_model(model)
        return {}

    def alpha(self, model: Model) -> Tensor:
        """Returns alpha, a scalar of the dtype that the model's parameters have."""
        if "alpha" in self.memory:
            kept: Tensor = self.memory["alpha"]
            return kept
        dtype = next(value.dtype for name, value in model.items() if name in self.parameters)
        return torch.full((), self.config.mixing, dtype=dtype, device=self.device)

    def descended(self, alpha: Tensor, w: Model, v: Model, batch: Batch) -> Tensor:
        """Returns alpha after a step; its gradient is <v - w, grad f(v_bar)>."""

        def loss(alpha: Tensor) -> Tensor:
            return self.mixed_objective(w, alpha)(v, batch)[0]

        gradient: Tensor = grad(loss)(alpha)
        eta: float = self.config.local_lr
        return (alpha - eta * gradient).clamp(0, 1)

    def mixed_objective(self, w: Model, alpha: Tensor) -> Objective:
        """Returns f(v_bar) as a function of v."""

        def objective(v: Model, batch: Batch) -> tuple[Tensor, Model]:
            return self.objective(self.mixture(w, v, alpha), batch)

        return objective

    def mixture(self, w: Model, v: Model, alpha: Tensor) -> Model:
        """Returns v_bar = alpha v + (1 - alpha) w, with the buffers of v."""
        return v | {name: alpha * v[name] + (1 - alpha) * w[name] for name in self.parameters}

    def personal_model(self, received: Model) -> Model:
        """Returns the mixture, or the global model if there is no local one."""
        if "local" not in self.memory:
            return received
        return self.mixture(received, self.memory["local"], self.memory["alpha"])


class Server(fedavg.Server):
    """FedAvg's, of w, which has a novel client train as in rounds."""

    def personalize(self, clients: Cohort) -> Model:
        """Sends the global model; each client mixes it with its own."""
        model: Model = self.model[clients.size]
        if clients.novel:
            for _ in range(self.config.novel_rounds):
                clients.ask(Client.join, model, batches=self.config.batches)
        return model

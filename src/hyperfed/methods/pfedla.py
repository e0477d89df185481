"""pFedLA (Ma et al., CVPR 2022): each client's model is mixed from all clients', layer by layer.

Paper: https://arxiv.org/abs/2205.03993, algorithm 1.

The server keeps the last trained model theta_j of every client j, at first the initial weights, and
one small hypernetwork per client. That of client i makes weights alpha_i[l, j] >= 0 with sum 1 over
j, and layer l of client i's model is sum_j alpha_i[l, j] theta_j[l] (eq. 5). A layer is a module
with parameters: its weight, its bias and its batch-norm buffers are mixed with the same weights;
integer buffers (step counters) are rounded back. Delta, sent minus trained, is pulled back into the
client's own hypernetwork and embedding, into no other (eq. 10 and 11); that of buffers is not, for
the loss in training mode does not depend on them.

Sent: that mixture, buffers included. Returned: the whole trained model, which becomes theta_i. Kept
by the client: nothing; with retained layers (:mod:`hyperfed.methods.heurpfedla`) its last trained
model.

Evaluated: the mixture (with the retained layers). The paper's objective (eq. 7) is the loss of the
mixture; whether its section 4 tests that or the model trained from it is left open:
``evaluated="trained"`` tests the latter, theta_i. A novel client, of which the paper has none, is
sent the mean of all theta_j, and may train it for ``novel_steps`` steps. In a task with several
target sizes a client is mixed from the clients of its own size; where none has it, a novel client
is sent that size's initial model.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation, trees
from hyperfed.errors import UserError
from hyperfed.federation import BASE, Cohort, Each, Outline, step
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import layers_of, own_entries
from hyperfed.nets.layer_weights import LayerWeights
from hyperfed.nets.shapes import shapes_of
from hyperfed.training import Momentum, PersonalConfig, Steps
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PersonalConfig):
    """Settings of pFedLA. Local training has no momentum, at the learning rate of CIFAR.

    Attributes:
        lr: learning rate of the hypernetworks' SGD. The paper names one rate for a data set
            and none for them, so its presets have that one. It leaves weights near where they began
            in the few short rounds of the default, and in all 600 of ten epochs with ten clients of
            CIFAR-100, where thirty times that rate comes within two points of what is published
            (results/pfedla).
        embedding_size: length of a client's embedding.
        hidden: width of the hypernetworks' hidden layers.
        hidden_layers: number of hidden layers after the first.
        weigh: a weight of each client for every layer; or, for comparison (figure 1), one for its
            whole model.
        retain: k, layers that a client keeps instead of receiving them, those on which its own
            weight is largest (HeurpFedLA).
        retained_layers: names of the layers that every client keeps, in the place of those k.
        evaluated: the mixture a client receives, or the model it last trained from one.
        novel_steps: fine-tuning steps of a novel client.
    """

    batch_size: PositiveInt = 32
    local_lr: PositiveFloat = 1e-2
    local_momentum: Momentum = 0.0
    local_weight_decay: NonNegativeFloat = 0.0
    lr: PositiveFloat = 0.1
    embedding_size: PositiveInt = 100
    hidden: PositiveInt = 100
    hidden_layers: NonNegativeInt = 1
    weigh: Literal["layers", "models"] = "layers"
    retain: NonNegativeInt = 0
    retained_layers: tuple[str, ...] = ()
    evaluated: Literal["mixture", "trained"] = "mixture"
    novel_steps: NonNegativeInt = 0

    @property
    def keeps_models(self) -> bool:
        """Whether clients remember what they trained, to have layers of it that they retain."""
        return bool(self.retain or self.retained_layers)

    def __post_init__(self) -> None:
        if self.weigh == "models" and self.keeps_models:
            raise UserError(
                "weigh must be layers where layers are retained, got models; leave it out, or "
                "choose pfedla without retained_layers"
            )


_PAPER = {
    "task.partition": "equal_classes",
    "task.classes_per_client": 4,
    "task.novel": 0.0,
    "method.lr": 1e-2,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
    # Section 4.1: 10 clients at 100 % or 100 clients at 10 %, four classes each.
    "paper": {"rounds": 600, "cohort": 1.0, "task.clients": 10, "method.local_epochs": 10} | _PAPER,
    "paper_100": {"rounds": 2500, "cohort": 0.1, "task.clients": 100, "method.local_epochs": 20}
    | _PAPER,
}


class Client(federation.Client):
    """Trains the mixture it is sent."""

    @step
    def train_model(self, mixture: Model) -> Model:
        """Returns the trained model, retained layers included, and keeps it where any may be."""
        model = self.train_own(
            self.objective,
            self.personal_model(mixture),
            self.batches,
            trainable=self.parameters,
            own=self.parameters if self.config.keeps_models else (),
            anew=mixture,
        )
        if self.config.keeps_models:
            self.memory["model"] = model
        return model

    @step(draws_as=train_model)
    def join(self, model: Model) -> Tree:
        """Does the same, keeps the model in any case and replies with nothing."""
        self.memory["model"] = self.train_model(model)
        return {}

    def personal_model(self, received: Model) -> Model:
        """Returns the received layers, and the client's own in the place of those not received."""
        return self.recall("model", self.initial) | received


class Server(federation.Server):
    """Holds the clients' hypernetworks and, in ``self.trained[size]``, their models (n, ...)."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.layers = {size: layers_of(net) for size, net in outline.models.items()}
        self.own = {size: own_entries(net) for size, net in outline.models.items()}
        if config.weigh == "models":
            self.layers = {
                size: {"model": tuple(name for names in layers.values() for name in names)}
                for size, layers in self.layers.items()
            }
        counts = {size: len(layers) for size, layers in self.layers.items()}
        if config.retain > min(counts.values()):
            raise UserError(
                f"retain must be 0 to {min(counts.values())}, the target's number of layers "
                f"(modules with parameters), got {config.retain}; lower it"
            )
        for layers in self.layers.values():
            if not layers.keys() >= set(config.retained_layers):
                raise UserError(
                    f"retained_layers must be layers of every target, of {', '.join(layers)}, got "
                    f"{', '.join(config.retained_layers)}; remove or rename what is not among them"
                )
        self.hyper_nets = LayerWeights(
            outline.clients, counts, config.embedding_size, config.hidden, config.hidden_layers
        ).to(outline.dtype)
        # Plain SGD: momentum or decay would move the hypernetworks of clients that were not asked.
        self.optimizer = torch.optim.SGD(self.hyper_nets.parameters(), config.lr, fused=True)
        n, sizes = outline.clients, outline.models
        self.trained: Tree = trees.clone({s: trees.repeat(outline.initial(s), n) for s in sizes})
        # Who may be of a size: what size a client has shows when it takes part for the first time.
        self.members: Tree = {s: torch.ones(n, dtype=torch.bool) for s in sizes}

    def round(self, clients: Cohort) -> None:
        """Algorithm 1, for every client of the cohort on its own."""
        mixture, trained = {}, {}
        for size, group in clients.sizes.items():
            mixture[size], sent = self.mix(group)
            trained[size] = group.ask(
                Client.train_model,
                Each(trees.detach(mixture[size]), sent),
                batches=self.config.batches,
            )
        self.optimizer.zero_grad()
        for size, group in clients.sizes.items():
            parameters, _ = trees.partition(mixture[size], shapes_of(self.outline.models[size]))
            delta = trees.subtract(trees.detach(parameters), trained[size])
            trees.pull_back(parameters, delta, group.weight.sign())
            self.keep(trained[size], group)
        self.optimizer.step()

    def mix(self, clients: Cohort) -> tuple[Model, list[set[str]]]:
        """Mixes the models of a cohort of one target size.

        Returns:
            the models before training, (C, ...), part of the hypernetworks' graph, and for each
            client the names of the entries that it must be sent.
        """
        ids, size = clients.ids, clients.size
        layers, trained = self.layers[size], self.trained[size]
        weights = self.hyper_nets(ids, size, self.members[size])  # (C, L, n)
        own = F.one_hot(ids, self.outline.clients).to(weights.dtype)[:, None]  # (C, 1, n)
        retained = self.retained((weights.detach() * own).sum(-1), list(layers))
        weights = torch.where(retained[..., None], own, weights)
        model = {
            name: _mix(weights[:, at], trained[name])
            for at, names in enumerate(layers.values())
            for name in names
        }
        # What a module without parameters holds is mixed as the layer before; it is no part of it.
        part = [self.own[size].get(layer, ()) for layer in layers]
        sent = [
            set(model).difference(*(part[at] for at, keeps in enumerate(row) if keeps))
            for row in retained.tolist()
        ]
        return model, sent

    def retained(self, weights: Tensor, layers: list[str]) -> Tensor:
        """Returns which layers the clients keep, (C, L) bool, from their own weights (C, L)."""
        if self.config.retained_layers:
            fixed = [layer in self.config.retained_layers for layer in layers]
            return torch.tensor(fixed, device=weights.device).expand_as(weights)
        rank = weights.argsort(dim=1, descending=True, stable=True)
        retained = torch.zeros_like(rank, dtype=torch.bool)
        return retained.scatter(1, rank[:, : self.config.retain], True)

    def keep(self, trained: Model, clients: Cohort) -> None:
        """Puts what the clients of one size trained, (C, ...), in the place of their old models."""
        there = clients.weight > 0
        ids = clients.ids[there]
        for name, value in trained.items():
            self.trained[clients.size][name][ids] = value[there]
        for size in self.members:
            self.members[size][ids] = size == clients.size

    def personalize(self, clients: Cohort) -> Tree | Each:
        """Sends the mixtures; a novel client one model for all of a size, which it may train."""
        size = clients.size
        if clients.novel:
            model = self.novel_model(size)
            if not self.config.novel_steps:
                return model
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.join, model, batches=batches)
            return {}
        if self.config.evaluated == "trained":
            return Each(trees.take(self.trained[size], clients.ids))
        mixture, sent = self.mix(clients)
        return Each(trees.detach(mixture), sent)

    def novel_model(self, size: str) -> Model:
        """Returns the mean of all models of a size, its initial one where nobody has it."""
        trained, members = self.trained[size], self.members[size]
        return trees.weighted_mean(trained, members) if members.any() else trees.take(trained, 0)

    def diagnostics(self) -> Tree:
        """Returns alpha of every client as {"weights": {size: {layer: (n, n)}}}.

        A row is a client's, its columns are whom it takes from; of a size that it has not, no row
        is used. Of a size that nobody has, all are 0.
        """
        device = self.hyper_nets.embeddings.weight.device
        everyone = torch.arange(self.outline.clients).to(device)
        return {"weights": {size: self.weights(everyone, size) for size in self.layers}}

    def weights(self, ids: Tensor, size: str = BASE) -> dict[str, Tensor]:
        """Returns alpha for some clients: {layer: (C, n)}, retained or not, without a graph."""
        members = self.members[size]
        with torch.no_grad():
            weights = self.hyper_nets(ids, size, members)
        if not members.any():  # of nobody there is no softmax
            weights = torch.zeros_like(weights)
        return dict(zip(self.layers[size], weights.unbind(dim=1), strict=True))


def _mix(weight: Tensor, models: Tensor) -> Tensor:
    """Mixes models (n, ...) with weights (C, n) to (C, ...); integers are rounded back."""
    if models.is_floating_point():
        return torch.einsum("cn,n...->c...", weight, models)
    return torch.einsum("cn,n...->c...", weight.double(), models.double()).round().to(models.dtype)

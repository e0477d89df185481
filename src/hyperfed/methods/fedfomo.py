"""FedFomo (Zhang et al., ICLR 2021): each client takes from others what lowers its own loss.

Paper: https://arxiv.org/abs/2012.08565.

The server keeps the last trained model theta_n of every client n. A client i that takes part is
sent M of them, and its own last trained model is one more candidate. Its reference, theta_i, is the
model that this training began with. It weighs candidates on its own validation data (its training
data, where it has no other):

    w_n = (L_i(theta_i) - L_i(theta_n)) / |theta_n - theta_i|

with the Euclidean distance over all parameters (the authors' code: by default the sum of
magnitudes); a candidate at distance zero weighs nothing, nor one whose loss is not finite. Weights
below zero are cut off, the others divided by their sum, and from theta_i + sum_n w_n (theta_n -
theta_i) the client trains. So the client's own training counts like that of others: by what it
gained, and not at all where it did harm. Losses are those of evaluation mode, each model with its
own batch-norm buffers, which move with the same weights; integer ones are rounded back.

To row i of the affinity matrix P the server adds the weights of others that client i replies with:
before they are cut off, so that a model that would do harm comes after one that was never tried,
and divided by the sum of all magnitudes, its own model's too (the authors' code: by the magnitude
of their sum, which may be near zero). As in that code each of the M places is filled by the client
with the highest affinity, ties broken at random, or with a probability that falls from round to
round by any client. Only clients of the same target size that have trained are candidates (the
authors' code: those of the round before and, beside the M, the server's means, of each cluster of
clients and of these together). A server is built under the run's seed and draws one number then;
with it candidates are a function of seed, round and client.

Sent: M candidates. Returned: their weights, then the trained model. Kept: that model, and the one
that its training began with; at first both are the initial one. Evaluated: the model as last
trained (the authors' code: as mixed, before it trains, and at the end after one mixture more). A
novel client, of which the paper has none, begins where all did, at the initial weights: it weighs M
candidates drawn at random in the same way, then trains for ``novel_steps`` steps, for which it
needs labels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed import federation, trees
from hyperfed.federation import EVALUATION_BATCH, Cohort, Each, Outline, step
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.system.randomness import generator
from hyperfed.training import LocalConfig, Steps, fit, mean_loss
from hyperfed.trees import Model, Tree


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of FedFomo.

    Attributes:
        candidates: M, models of others that a client is sent; fewer where fewer have trained. (The
            authors count a client's own as well: their "5 models" are M = 4.)
        exploration: probability in round 0 that a place among them is filled at random.
        exploration_decay: by how much that falls from round to round.
        novel_steps: steps in which a novel client trains its model.
    """

    candidates: PositiveInt = 5
    exploration: NonNegativeFloat = 0.3
    exploration_decay: NonNegativeFloat = 0.05
    novel_steps: NonNegativeInt = 500


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": DEFAULT,
}


class Client(federation.Client):
    """Moves towards the candidates that are better on its own data, and trains."""

    @step(reads="val")
    def weigh(self, candidates: Tree) -> Tree:
        """Moves the reference, and holds what becomes of it until the end of the round.

        Args:
            candidates: {place, "0" to "M-1": model of another}; some places may be empty.

        Returns:
            {"weights": (M,) float64}, not cut off, 0 for an empty place. With that of the client's
            own model, which does not travel, their magnitudes sum to 1.
        """
        reference, own = self.recall("reference", self.initial), self.personal_model({})
        models = {int(place): other for place, other in candidates.items()}
        models[self.config.candidates] = own
        loss = self.validation_loss(reference)
        weights = loss.new_zeros(self.config.candidates + 1)
        for place, model in models.items():
            distance, better = self.distance(reference, model), loss - self.validation_loss(model)
            counts = (distance > 0) & better.isfinite()
            weights[place] = torch.where(counts, better / distance, 0)
        used = shares(weights)[list(models)]
        self.scratch["model"] = moved(reference, list(models.values()), used)
        return {"weights": F.normalize(weights, p=1, dim=0)[:-1]}

    def validation_loss(self, model: Model) -> Tensor:
        """Returns the mean loss of a model on validation data; on training data without any."""
        split = self.val if len(self.val) else self.train
        return mean_loss(self.module, self.loss, model, split.chunks(EVALUATION_BATCH))

    def distance(self, first: Model, second: Model) -> Tensor:
        """Returns the Euclidean distance of two models' parameters, a float64 scalar."""
        between, _ = trees.partition(trees.subtract(first, second), self.parameters)
        return torch.stack([part.double().square().sum() for part in between.values()]).sum().sqrt()

    @step
    def train_model(self) -> Model:
        """Trains from where the weights led; keeps that and the model, and returns the latter."""
        start, settings = self.scratch["model"], self.config.local
        model = fit(self.objective, start, self.batches, settings, trainable=self.parameters).model
        self.memory["reference"], self.memory["model"] = start, model
        return model

    @step
    def train_personal_model(self) -> Tree:
        """Does the same, but replies with nothing."""
        self.train_model()
        return {}

    def personal_model(self, received: Tree) -> Model:
        """Returns the client's own model, the initial one before it has trained."""
        return self.recall("model", self.initial)


class Server(federation.Server):
    """Holds the clients' models, {size: (n, ...)}, which there are, and P, their affinities."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        n, sizes = outline.clients, outline.models
        self.trained: Tree = trees.clone({s: trees.repeat(outline.initial(s), n) for s in sizes})
        self.there: Tree = {size: torch.zeros(n, dtype=torch.bool) for size in sizes}
        self.affinity = torch.zeros(n, n, dtype=torch.float64)
        self.seed = torch.randint(2**62, ())

    def round(self, clients: Cohort) -> None:
        """Lets clients weigh and train, and keeps models and affinities."""
        groups, batches = clients.sizes, self.config.batches
        chosen = {size: self.candidates(group) for size, group in groups.items()}
        weights = {
            size: group.ask(Client.weigh, self.models(chosen[size], size))["weights"]
            for size, group in groups.items()
        }
        trained = {
            size: group.ask(Client.train_model, batches=batches) for size, group in groups.items()
        }
        for size, group in groups.items():
            for position in group.weight.nonzero().flatten().tolist():
                client, others = int(group.ids[position]), chosen[size][position]
                for name, value in trained[size].items():
                    self.trained[size][name][client] = value[position]
                self.there[size][client] = True
                self.affinity[client, others] += weights[size][position, : len(others)]

    def candidates(self, clients: Cohort) -> list[list[int]]:
        """Returns for each client of a cohort of one target size up to M others."""
        m, there = self.config.candidates, self.there[clients.size].nonzero().flatten()
        chance = self.config.exploration - clients.round * self.config.exploration_decay
        chosen = []
        for client in clients.ids.tolist():
            draw = generator(int(self.seed), "candidates", clients.round, client)
            # The number of a novel client says nothing: a known one may have the same.
            others = there if clients.novel else there[there != client]
            others = others[torch.randperm(len(others), generator=draw)]
            ranked = others
            if not clients.novel:
                affinity = self.affinity[client, others]
                ranked = others[affinity.argsort(descending=True, stable=True)]
            explores = torch.rand(m, generator=draw) < chance
            chosen.append(fill_places(ranked.tolist(), others.tolist(), explores.tolist()))
        return chosen

    def models(self, chosen: Sequence[Sequence[int]], size: str) -> Each:
        """Returns what to send so that each client has the models of the clients chosen for it."""
        places = [str(place) for place in range(self.config.candidates)]
        padded = torch.tensor([[*row, *[0] * (len(places) - len(row))] for row in chosen])  # (C, M)
        tree = {place: trees.take(self.trained[size], padded[:, int(place)]) for place in places}
        return Each(tree, [places[: len(row)] for row in chosen])

    def personalize(self, clients: Cohort) -> Tree:
        """Sends nothing to a known client; a novel one is sent candidates first."""
        if clients.novel:
            clients.ask(Client.weigh, self.models(self.candidates(clients), clients.size))
            batches = Steps(self.config.novel_steps, self.config.batch_size)
            clients.ask(Client.train_personal_model, batches=batches)
        return {}


def shares(weights: Tensor) -> Tensor:
    """Cuts weights (M,) off below zero and divides them by their sum, unless all are zero."""
    return F.normalize(weights.clamp(min=0), p=1, dim=0)


def moved(start: Model, models: Sequence[Model], weights: Tensor) -> Model:
    """Returns start + sum_n weights_n (models_n - start); integer entries are rounded back."""
    rest = 1 - weights.sum(0, keepdim=True)
    return trees.weighted_mean(trees.stack([start, *models]), torch.cat([rest, weights]))


def fill_places(ranked: list[int], at_random: list[int], explores: list[bool]) -> list[int]:
    """Fills each place with the first client left of one order or, where it explores, the other."""
    chosen: list[int] = []
    for explore in explores[: len(ranked)]:
        order = at_random if explore else ranked
        chosen.append(next(client for client in order if client not in chosen))
    return chosen

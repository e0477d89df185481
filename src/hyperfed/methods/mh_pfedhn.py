"""MH-pFedHN (Zhang et al., IJCAI 2026): one hypernetwork for clients of any architectures.

Paper: https://arxiv.org/abs/2507.22330, with the authors' code, github.com/DangDang1895/MH-pFL.

Sent: the parameters that the hypernetwork makes, chunk by chunk, from as many embeddings as the
client's network needs. Returned: delta, sent minus trained. Kept by the client: batch-norm buffers,
where its network has any. Evaluated: the generated model with them; a novel client that has none,
since nothing was fitted to it, measures them on its inputs. A novel client's embeddings are drawn
as all were and fitted by ``novel_rounds`` of the same exchange, with the hypernetwork frozen.
If no client that trained has as many chunks as it, its heads are as they were drawn; in the code
they are fitted too, by all such clients together. What is clipped in a fit is the gradient of the
client's embeddings; in the code that of the whole hypernetwork, of its frozen parts, too.

The trunk is one for all; a head makes the chunk at its place for all clients of as many chunks,
whatever their architectures. The server, which is told no architecture, has for every client as
many embeddings as the largest target needs, and uses the first.

With ``global_model`` it is MH-pFedHNGD: the hypernetwork makes a light global model too, from
embeddings of its own. A round's clients all train it, and it is pulled back as their mean, weighted
by training examples. Each then trains its own model on

    (1 - alpha) * supervised loss + alpha * T^2 * KL(p_global || p_own)

with p the softmax of the outputs over the temperature T and the global model as it was sent. A
novel client learns from its labels alone, as in the code. The light model is the smallest of the
task's targets (in the code its CNN); its batch-norm buffers travel with it and are averaged.

The code visits all clients in a round, one after another, with a step of Adam after each. Here a
round makes one step for the mean over its cohort; with ``cohort = 1``, as in the presets, that is
the code's step, for clients drawn at random. As in the code, it moves what made this round's models
and nothing else: the moments of Adam of an embedding or a head wait until its next turn.

The step of the global model is another than in the code, which makes it once before it visits all
clients, by the mean over all of them. Here each round makes it, by the mean over its cohort: with
``official_gd`` 25,000 times by one client, where the code does so 500 times by 50. It is the first
of two steps that start where the round did, for the clients' models are made before it. And it
moves what made the global model and nothing else. The code gives it gradients of zero for the rest,
so that Adam moves all embeddings and heads by their moments, once between two turns of a client;
here that would be about 50 times.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.optim import Adam

from hyperfed import federation, trees
from hyperfed.federation import Cohort, Each, Outline, step
from hyperfed.functional import forward
from hyperfed.methods.parts.contrast import check_logits, distances, mean_counted
from hyperfed.methods.parts.hypernet_training import fit_rows, pull_back_groups
from hyperfed.nets.chunks import ChunkHeads
from hyperfed.nets.shapes import shapes_of, total
from hyperfed.training import Batch, LocalConfig, Objective, Share, fit, supervised
from hyperfed.trees import Model, Tree, detach, partition, pull_back, subtract, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(LocalConfig):
    """Settings of MH-pFedHN.

    At the authors' learning rate the server needs thousands of rounds, so the preset ``default``,
    of two hundred, takes one ten times as large.

    Attributes:
        local_weight_decay: that of local training.
        local_clip: bound of a local gradient's norm; that of the global model has none, as in the
            code.
        lr: learning rate of the server's Adam.
        clip: bound of the norm of the server's gradient; None for none.
        chunk: parameters that one head makes.
        embedding_size: length e of an embedding.
        embedding_std: standard deviation of a new one.
        hidden: width of the hypernetwork's hidden layers, of which ``hidden_layers`` follow the
            first.
        hidden_layers: their number.
        global_model: whether there is a light global model that teaches (MH-pFedHNGD).
        distillation: alpha, the weight of what it says; the labels have 1 - alpha.
        temperature: T, by which both models' outputs are divided.
        novel_rounds: exchanges in which a novel client's embeddings are fitted.
        novel_lr: learning rate of that fit; ``lr`` where not given.
    """

    local_weight_decay: NonNegativeFloat = 5e-4
    local_clip: PositiveFloat | None = 50.0
    lr: PositiveFloat = 2e-4
    clip: PositiveFloat | None = 50.0
    chunk: PositiveInt = 3072
    embedding_size: PositiveInt = 64
    embedding_std: PositiveFloat = 0.002
    hidden: PositiveInt = 128
    hidden_layers: NonNegativeInt = 2
    global_model: bool = False
    distillation: Share = 0.2
    temperature: PositiveFloat = 15.0
    novel_rounds: NonNegativeInt = 20
    novel_lr: PositiveFloat | None = None


OFFICIAL: Mapping[str, Any] = {
    "rounds": 25_000,
    "cohort": 1,
    "evaluate_every": 250,
    "task.clients": 50,
    "task.novel": 0.0,
    "method.local_epochs": 1,
    "method.novel_rounds": 500,
}
"""The authors' code: 500 visits to each of 50 clients, of a pass over its data."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"rounds": 200, "cohort": 1, "evaluate_every": 25, "method.lr": 2e-3},
    "official": OFFICIAL,
    "official_gd": {**OFFICIAL, "method.global_model": True},
}


class Client(federation.Client):
    """Trains the model it is sent, and the global one, and answers with the differences."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Builds the light global model's network, where there is one."""
        if not config.global_model:
            return {}
        return {"global": trees.copied(outline.models[lightest(outline)])}

    @step(like="model", bounded="reply")
    def train_global(self, model: Model) -> Model:
        """Returns delta of the global model after local training; as it was sent it will teach."""
        self.scratch["global"] = model
        network = self.network("global")
        objective, trainable = supervised(network, self.loss), trees.parameters_of(network)
        trained = fit(
            objective,
            model,
            self.batches,
            self.config.local,
            trainable=trainable,
            unclipped=trainable,
        ).model
        return subtract(model, trained)

    @step(like="model", bounded="reply")
    def train_model(self, model: Model) -> Model:
        """Returns delta after local training, taught by the global model if there is one."""
        teacher: Model | None = self.scratch.get("global")
        trained = fit(
            self.objective if teacher is None else self.taught_by(teacher),
            self.with_own(model),
            self.batches,
            self.config.local,
            trainable=self.parameters,
        ).model
        _, self.memory["buffers"] = partition(trained, self.parameters)
        return subtract(model, trained)

    @step(like="embedding", reads=0)
    def draw_embedding(self, embedding: Tree) -> Tree:
        """Returns {"embedding": (chunks * e,)} as all are before training.

        Args:
            embedding: the same, for the shape alone. The draw is the client's, so that nobody's
                depends on who else joins.
        """
        like = embedding["embedding"]
        drawn = torch.randn(like.shape, generator=self.generator, dtype=like.dtype)
        return {"embedding": self.config.embedding_std * drawn.to(self.device)}

    def taught_by(self, teacher: Model) -> Objective:
        """Returns (1 - alpha) F(w) + alpha T^2 KL(p_global || p_own); the teacher is constant."""
        temperature = self.config.temperature

        def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
            output, buffers = forward(self.module, model, batch.x)
            said, _ = forward(self.network("global"), teacher, batch.x)
            each = distances(output / temperature, said / temperature, "kl")
            loss, divergence = self.loss(output, batch.y), mean_counted(each, batch.y)
            return torch.lerp(loss, temperature**2 * divergence, self.config.distillation), buffers

        return objective

    def with_own(self, received: Model) -> Model:
        """Returns the received parameters with the client's own buffers, at first the initial."""
        return received | self.recall("buffers", self.buffers)

    def personal_model(self, received: Model) -> Model:
        """Returns the same; a novel client without buffers of its own measures them."""
        model, measures = self.with_own(received), self.novel and "buffers" not in self.memory
        return model | self.measured(model) if measures else model


def lightest(outline: Outline) -> str:
    """Returns the name of the target size with the fewest parameters to train."""
    return min(outline.models, key=lambda size: total(shapes_of(outline.models[size])))


class Server(federation.Server):
    """Holds the hypernetwork and the clients' embeddings, the global model's behind them."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.light = lightest(outline)
        self.buffers: Tree = {}  # of the global model
        if config.global_model:
            check_logits("mh_pfedhn with a global_model", outline)
            parameters = trees.parameters_of(outline.models[self.light])
            _, self.buffers = partition(outline.initial(self.light), parameters)
        self.hyper_net = ChunkHeads(
            {size: shapes_of(net) for size, net in outline.models.items()},
            chunk=config.chunk,
            embedding=config.embedding_size,
            hidden=config.hidden,
            hidden_layers=config.hidden_layers,
        ).to(outline.dtype)
        shape = max(self.hyper_net.chunks.values()), config.embedding_size
        self.embeddings = nn.ParameterList(
            config.embedding_std * torch.randn(shape, dtype=outline.dtype)
            for _ in range(outline.clients + config.global_model)
        )
        groups: list[dict[str, Any]] = [
            {"params": [*self.embeddings], "own": "whole"},
            {"params": [*self.hyper_net.parameters()]},
        ]
        self.optimizer = Adam(groups, config.lr, fused=True)

    def round(self, clients: Cohort) -> None:
        """Makes, sends and pulls back the models of a cohort, and the global one before them."""
        groups, batches = clients.sizes, self.config.batches
        light, light_delta = self.global_model(), {}
        if light:
            sent = trees.take(detach(light), 0) | self.buffers
            light_delta = clients.ask(Client.train_global, sent, batches=batches)
        model = {
            size: self.hyper_net(self.embeddings_of(group.ids.tolist(), size), size)
            for size, group in groups.items()
        }
        delta = {
            size: group.ask(Client.train_model, Each(detach(model[size])), batches=batches)
            for size, group in groups.items()
        }

        pull_back_groups([self.optimizer], model, delta, groups, clients.weight.sign().sum())
        for client in clients.ids[clients.weight == 0].tolist():
            self.embeddings[client].grad = None
        if light:
            parameters = [*self.embeddings, *self.hyper_net.parameters()]
            gradients = [parameter.grad for parameter in parameters]
            self.optimizer.zero_grad()
            mean = weighted_mean(light_delta, clients.weight)
            self.buffers = subtract(self.buffers, partition(mean, self.buffers)[0])
            pull_back(light, trees.repeat(mean, 1), torch.ones(1, device=clients.weight.device))
            self.descend()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        self.descend()

    def global_model(self) -> Model:
        """Returns the global model's parameters, leaves (1, ...); {} where there is none."""
        if not self.config.global_model:
            return {}
        embedding = self.embeddings_of([self.outline.clients], self.light)
        model: Model = self.hyper_net(embedding, self.light)
        return model

    def embeddings_of(self, clients: Sequence[int], size: str) -> Tensor:
        """Returns (C, chunks, e), as many for each client as a target of their size needs."""
        chunks = self.hyper_net.chunks[size]
        return torch.stack([self.embeddings[client][:chunks] for client in clients])

    def descend(self) -> None:
        """Makes a step of what has gradients; afterwards nothing has."""
        if self.config.clip is not None:
            parameters = [*self.embeddings, *self.hyper_net.parameters()]
            nn.utils.clip_grad_norm_(parameters, self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def personalize(self, clients: Cohort) -> Each:
        """Sends the generated models; a novel client's embeddings are fitted first."""
        if clients.novel:
            embedding = self.fit_embeddings(clients)
        else:
            embedding = self.embeddings_of(clients.ids.tolist(), clients.size)
        with torch.no_grad():
            return Each(self.hyper_net(embedding, clients.size))

    def fit_embeddings(self, clients: Cohort) -> Tensor:
        """Returns (C, chunks, e) embeddings of novel clients; the hypernetwork is frozen."""
        config, size = self.config, clients.size
        shape = self.embeddings_of([0], size)[0].shape
        like = {"embedding": self.embeddings[0].detach().new_zeros(shape.numel())}
        rows: Tensor = clients.ask(Client.draw_embedding, like)["embedding"]
        rows.requires_grad_()
        optimizer = Adam([rows], config.novel_lr or config.lr, fused=True)

        def exchange(rows: Tensor) -> tuple[Model, Model]:
            model = self.hyper_net(rows.view(-1, *shape), size)
            sent = Each(detach(model))
            return model, clients.ask(Client.train_model, sent, batches=config.batches)

        fitted = fit_rows(
            rows, optimizer, exchange, clients, rounds=config.novel_rounds, clip=config.clip
        )
        return fitted.view(-1, *shape)

"""pFedHN (Shamsian et al., ICML 2021): a hypernetwork on the server writes each client's model.

Paper: https://arxiv.org/abs/2103.04628, algorithm 1.

Sent: the parameters the hypernetwork makes from a client's embedding. Returned: delta, sent minus
trained; the server pulls it back through the hypernetwork into its weights and all embeddings. Kept
by the client: batch-norm buffers, where the target has any, and with ``head_layers`` (pFedHN-PC,
section 3.3) a personal classifier. Evaluated: the generated model with what the client keeps; a
novel client that has no buffers, since nothing was fitted to it, measures them on its inputs. A
novel client's embedding is fitted by ``novel_rounds`` of the same exchange with the hypernetwork
frozen (section 5.3), clipped as in training. The paper does not say where the fit starts: at the
mean of the learned embeddings, or where a learned one starts (``novel_start``). With a fixed
``descriptor`` (appendix C.5) nothing is fitted, no classifier either. The appendix takes "the
vector of class proportions" of section 5.3, which the words say is within the client, the default
of the two (``"class_proportions"``, the share of each class in its data), and the formula over the
clients (``"class_shares"``, its share of each class: sum_i p_ij = 1 over known clients, who are
asked for their counts once; one that is away then counts from its first round on). By the formula
descriptors of many clients are so small that the hypernetwork hardly tells them apart. With
``novel_models`` a novel client needs no labels: it uses the models of known clients of its size,
all of them or that of the nearest by its inputs.

Algorithm 1 writes trained minus sent for delta, which its minus signs would ascend; the authors'
code has it as here.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Each, Outline, step
from hyperfed.methods.parts import a_distance, pools
from hyperfed.methods.parts.hypernet_training import HyperNetConfig, descend, fit_rows
from hyperfed.methods.parts.pools import POOL, PoolConfig
from hyperfed.methods.parts.presets import PEFLL
from hyperfed.nets.anatomy import head_names
from hyperfed.nets.layers import draw_weights, update_norms
from hyperfed.training import PersonalConfig, count_classes, counts_of
from hyperfed.trees import Model, Tree, detach, partition, subtract, within_reach

log = logging.getLogger(__name__)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PoolConfig, HyperNetConfig, PersonalConfig):
    """Settings of pFedHN.

    Attributes:
        local_clip: bound of a local gradient's norm.
        descriptor: an embedding learned for each client; or fixed, the share of each class in the
            client's data, or the client's share of each class.
        head_layers: how many of the target's last layers are the client's own (pFedHN-PC: 1).
        spectral_norm: whether all layers of the hypernetwork are spectrally normalised (C.3).
        novel_rounds: exchanges in which a novel client's embedding is fitted.
        novel_start: where that begins: at the mean of the learned embeddings, or at a random one
            (PeFLL, appendix C.2).
        novel_lr: learning rate of that fit; the embeddings' where not given.
    """

    local_clip: PositiveFloat | None = 50.0
    descriptor: Literal["embedding", "class_proportions", "class_shares"] = "embedding"
    head_layers: NonNegativeInt = 0
    spectral_norm: bool = False
    novel_rounds: NonNegativeInt = 20
    novel_start: Literal["mean", "random"] = "mean"
    novel_lr: PositiveFloat | None = None

    def __post_init__(self) -> None:
        self.check_pool(possible=not self.head_layers and self.descriptor == "embedding")
        self.check_hyper_net(spectral_norm=self.spectral_norm)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"rounds": 200, "cohort": 1, "evaluate_every": 25},
    "paper": {"rounds": 5000, "cohort": 1, "evaluate_every": 30, "task.shares": "paper"},
    # The authors' code leaves part of each class unused when it splits the data.
    "official": {"rounds": 5000, "cohort": 1, "evaluate_every": 30, "task.shares": "official"},
    # PeFLL, appendix C.2: what pFedHN recommends, and a random embedding for a new client.
    "pefll": {**PEFLL, "method.novel_start": "random", "method.cohort_reduction": "mean"},
}


class Client(federation.Client):
    """Trains the model it is sent and answers with the difference."""

    input_moments = a_distance.input_moments
    separation_gradient = a_distance.separation_gradient
    separation_error = a_distance.separation_error

    @step(like="model", bounded="reply")
    def train_model(self, model: Model) -> Model:
        """Returns delta after local training; keeps head and buffers.

        A head that the client has none of yet is drawn: each client's is another. Where models
        start at the target, so does it.
        """
        if "head" not in self.memory and self.config.start == "random":
            start, _ = partition(self.initial, self.head)
            self.memory["head"] = draw_weights(self.module, self.generator, start)
        trained = self.train_own(
            self.objective,
            self.with_own(model),
            self.batches,
            trainable=self.parameters,
            own=self.head,
            unclipped=self.head,
        )
        self.memory["head"], _ = partition(trained, self.head)
        _, self.memory["buffers"] = partition(trained, self.parameters)
        return subtract(model, trained)

    @step(like="mean", reads=0)
    def draw_embedding(self, mean: Tree) -> Tree:
        """Returns {"embedding": (l,)} as a learned one is before training, N(0, 1).

        Args:
            mean: {"embedding": (l,)} of those that were learned, for the shape alone. The draw is
                the client's, so that nobody's embedding depends on who else joins.
        """
        shape, dtype = mean["embedding"].shape, mean["embedding"].dtype
        drawn = torch.randn(shape, generator=self.generator, dtype=dtype)
        return {"embedding": drawn.to(self.device)}

    @step
    def class_proportions(self) -> Tree:
        """Returns {"descriptor": (classes,)}, the share of each class in the training labels.

        Of tokens those that are ignored have none; where all are, the shares are zero.
        """
        count = count_classes(self.train.labels, self.classes)
        total = count.sum().clamp(min=1)
        return {"descriptor": count.to(torch.get_default_dtype()) / total}

    @step
    def class_counts(self) -> Tree:
        """Returns {"rate": (classes,) float64}, the training labels of each class to an example."""
        return {"rate": count_classes(self.train.labels, self.classes).double() / len(self.train)}

    def with_own(self, received: Tree) -> Tree:
        """Returns what was received with the client's own head and buffers.

        Before its first round it uses the target's initial ones.
        """
        head, buffers = self.recall("head", self.head), self.recall("buffers", self.buffers)
        return received | head | buffers

    def personal_model(self, received: Tree) -> Tree:
        """Returns the same; a novel client without buffers of its own measures them."""
        model = self.with_own(received)
        if "buffers" in self.memory or not (self.novel and self.buffers):
            return model
        return pools.completed(self.measured, model)

    @step
    def export(self, received: Tree) -> Tree:
        """Hands over the personal model, where there is one."""
        pools.check_single(received, self.config.novel_models)
        return super().export(received)

    @step
    def evaluate(self, received: Tree) -> Tree:
        """Counts as usual; of a sampled model, what is to be expected."""
        if self.config.novel_models == "sampled":
            return pools.counts_of(super().evaluate, received)
        return super().evaluate(received)

    def predict(self, model: Model, x: Tensor) -> Tensor:
        """Returns (B, classes) outputs; of an ensemble, their mean over its models."""
        output = pools.output_of(super().predict, model, x)
        return self.blended(output) if POOL in model else output

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the personal parameters."""
        return head_names(self.module, self.config.head_layers)


class Server(federation.Server):
    """Holds the hypernetwork h(v; phi) and the clients' embeddings v.

    Raises:
        UserError: descriptors are of classes, and examples are not of one each.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        learned = config.descriptor == "embedding"
        if not learned and (not outline.classes or outline.target_size > 1):
            several = f"examples have {outline.target_size} labels each, not one class"
            because = several if outline.classes else "targets are numbers, which have no classes"
            raise UserError(
                f"method.descriptor must be embedding where {because}, came {config.descriptor}; "
                "leave it out"
            )
        size = config.length(outline.clients) if learned else outline.classes
        self.hyper_net = config.build(
            outline, size, head_layers=config.head_layers, spectral_norm=config.spectral_norm
        )
        self.embeddings = nn.Embedding(outline.clients, size).to(outline.dtype)
        self.examples: Tree = {}  # {"count": (n, classes)} of known clients, once they were asked
        self.optimizer = config.sgd(
            embeddings=self.embeddings.parameters(), hyper_net=self.hyper_net.parameters()
        )

    def round(self, clients: Cohort) -> None:
        """Algorithm 1; for a cohort of several, the sum over them (the paper's has one)."""
        if clients.round == 0:
            self.warn()
        groups, batches = clients.sizes, self.config.batches
        examples = self.class_examples(clients)
        model = {
            size: self.hyper_net(self.descriptors(group, examples), size)
            for size, group in groups.items()
        }
        delta = {
            size: group.ask(Client.train_model, Each(detach(model[size])), batches=batches)
            for size, group in groups.items()
        }
        self.examples = examples
        descend(
            [self.optimizer],
            model,
            delta,
            clients,
            self.config.clip,
            reduction=self.config.cohort_reduction,
        )
        update_norms(self.hyper_net)

    def warn(self) -> None:
        """Tells, before training, of newcomers whose classifier nothing will be fitted to."""
        if self.config.descriptor != "embedding" and self.config.head_layers:
            log.warning(
                "novel clients will have an untrained classifier, since with a fixed descriptor "
                "nothing is fitted for them; set serve.finetune_steps, or leave method.descriptor "
                "out"
            )

    def personalize(self, clients: Cohort) -> Tree | Each:
        """Sends the generated models; a novel client's embedding is fitted first, or borrowed."""
        descriptor = self.descriptors_of(clients)
        if descriptor is None:
            rows = self.embeddings(pools.lenders(clients).ids)
            return {POOL: detach(self.hyper_net(rows, clients.size))}
        with torch.no_grad():
            return Each(self.hyper_net(descriptor, clients.size))

    def descriptors_of(self, clients: Cohort) -> Tensor | None:
        """Returns (C, l): learned, fixed, fitted or borrowed; None of who uses a pool of models."""
        config = self.config
        if clients.novel and config.pooled:
            return None
        if clients.novel and config.novel_models == "nearest":
            rows: Tensor = self.embeddings(pools.nearest(clients, config.distance_steps))
            return rows
        if clients.novel and config.descriptor == "embedding":
            return self.fit_embeddings(clients)
        return self.descriptors(clients, self.class_examples(clients))

    def class_examples(self, clients: Cohort) -> Tree:
        """Returns {"count": (n, classes)} of the known clients, 0 of those who never answered.

        {} where descriptors are no shares. Known ones among ``clients`` are asked for their own.
        """
        if self.config.descriptor != "class_shares":
            return {}
        examples = self.examples or {"count": count_labels(clients.known)}
        if clients.novel:
            return examples
        own, count = count_labels(clients), examples["count"].clone()
        there = clients.weight > 0
        count[clients.ids[there]] = own[there]
        return {"count": count}

    def descriptors(self, clients: Cohort, examples: Tree) -> Tensor:
        """Returns (C, l): learned embeddings, or what the clients say of their classes."""
        if self.config.descriptor == "class_proportions":
            proportions: Tensor = clients.ask(Client.class_proportions)["descriptor"]
            return proportions.to(self.outline.dtype)
        if self.config.descriptor == "class_shares":
            known: Tensor = examples["count"]
            own = count_labels(clients) if clients.novel else known[clients.ids]
            shares: Tensor = own.to(self.outline.dtype) / known.sum(dim=0)
            return shares.nan_to_num(posinf=1.0)  # of a class that no known client has: 0, or all
        rows: Tensor = self.embeddings(clients.ids)
        return rows

    def fit_embeddings(self, clients: Cohort) -> Tensor:
        """Returns (C, l) embeddings of novel clients, fitted with the hypernetwork frozen."""
        config = self.config
        mean = within_reach(self.embeddings.weight.detach()).mean(dim=0)
        embedding = mean.repeat(len(clients.ids), 1)
        if config.novel_start == "random":
            embedding = clients.ask(Client.draw_embedding, {"embedding": mean})["embedding"]
        embedding.requires_grad_()
        optimizer = config.sgd(embeddings=[embedding], embedding_lr=config.novel_lr)

        def exchange(rows: Tensor) -> tuple[Model, Model]:
            model = self.hyper_net(rows, clients.size)
            sent = Each(detach(model))
            return model, clients.ask(Client.train_model, sent, batches=config.batches)

        return fit_rows(
            embedding, optimizer, exchange, clients, rounds=config.novel_rounds, clip=config.clip
        )


def count_labels(clients: Cohort) -> Tensor:
    """Asks clients for their numbers of training labels of each class, (C, classes) int64."""
    rate = clients.ask(Client.class_counts)["rate"]
    return counts_of(rate, clients.weight).long()

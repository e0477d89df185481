"""IT-PFL-HN (anonymous, 2021): models for clients without labels, with differential privacy.

Paper: sections 4 and 7, appendix B.

Phase 1 is pFedHN, and at the same time the clients train an encoder g to tell a client's embedding
e_i from a batch of its inputs (equation 8), averaged as in FedAvg. Phase 2 freezes g and fine-tunes
a copy of the hypernetwork on what g makes of each client (equation 9).

Sent: generated parameters, for their delta; in phase 1 also the encoder and the client's embedding,
for the trained encoder; in phase 2 the encoder, for a descriptor. (The paper's one message of phase
1 is two here; their bytes are the same.) Kept by the client: nothing, but for what it let out with
noise. Evaluated: for known clients, what the hypernetwork as phase 1 left it makes of their
embeddings; for a novel client, what the fine-tuned one makes of its descriptor, in one forward pass
over its unlabelled inputs. Batch-norm statistics of these models never travel: each client measures
them on its inputs. The encoder's, where the target gives it some, are sent and averaged with it.

With ``encoder = "end_to_end"`` there are no embeddings: in phase 1 a model is made from what g says
of a batch, and the hypernetwork's gradient with respect to that goes back to the client, which
returns that of g, as in PeFLL (Scott et al., 2024), but no label is read for it.

Private (section 7): the encoder is bounded, and a novel client adds Gaussian noise to its
descriptor before it sends it. Training is without noise, as in the paper.

The preset ``paper`` is the paper's text: losses that are sums, over the clients of a round
(equations 7 and 9) and over the entries of an embedding (8), and rates, decays, epochs and batch
size out of the grids that it searched (appendix C); it does not say which were chosen. What the
paper leaves open: optimisers are pFedHN's, and so is the length of embeddings, of which the text at
hand has no legible number; the lengths of the phases and the encoder's start are ours; and private
embeddings are put on the unit sphere, beyond which a bounded encoder cannot follow them.

With these an encoder hardly learns: what an embedding gathers in 500 rounds is small beside the
N(0, 1) that it was drawn from, so g is asked to tell noise. By default therefore embeddings start
small and learn fast, without decay; g is asked for them standardised, by all known clients' mean
and deviation, which the server takes back before the hypernetwork sees a descriptor; and Adam
descends g's averaged change (FedAdam, Reddi et al., 2021), which a plain average makes too short a
step. (On the unit sphere, where nothing is standardised, a small start makes directions turn fast.)
Losses are sums over clients, as in the paper, and means over entries, so that no rate depends on l.
"""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import grad
from torch.optim import SGD, Adam, Optimizer

from hyperfed import federation
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Each, Outline, step
from hyperfed.functional import forward, mean_output
from hyperfed.methods.parts.features import check_one_label
from hyperfed.methods.parts.hypernet_training import HyperNetConfig, Reduction, descend
from hyperfed.methods.parts.privacy import PrivacyConfig
from hyperfed.nets.deepsets import DeepSet
from hyperfed.nets.hypernets import HyperNet
from hyperfed.nets.trial import check_it_runs
from hyperfed.privacy import sensitivity
from hyperfed.training import Epochs, LocalConfig, Steps, fit, regression
from hyperfed.trees import (
    Model,
    Tree,
    buffers_of,
    detach,
    fill,
    model_of,
    parameters_of,
    partition,
    pull_back,
    set_gradients,
    subtract,
    tree_map,
    weighted_mean,
    within_reach,
)

log = logging.getLogger(__name__)

EXPLAINED = 0.1
"""Share of the embeddings' variance below which an encoder hardly helps a novel client."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(PrivacyConfig, HyperNetConfig, LocalConfig):
    """Settings of IT-PFL-HN.

    Attributes:
        local_clip: bound of a local gradient's norm.
        embedding_lr: learning rate of the embeddings; ``lr`` where None.
        embedding_weight_decay: their weight decay; ``weight_decay`` where None.
        embedding_start: standard deviation of the entries that they start with.
        cohort_reduction: as of the sum that is equation 7, or as of its mean; end to end the
            encoder steps by it too.
        phase_one_rounds: rounds of phase 1; all further rounds are phase 2.
        encoder: trained to tell embeddings (equation 8); or end to end, by the hypernetwork's
            gradient with respect to the descriptor, without any embedding.
        encoder_lr: learning rate of the encoder, whose optimiser is otherwise that of local
            training. End to end with ``encoder_optimizer = "average"`` that of the server's SGD.
        encoder_optimizer: what the server does with the averaged change of the encoder: takes it as
            it is (FedAvg), or lets Adam descend it (FedAdam: Reddi et al., 2021).
        encoder_server_lr: learning rate of that Adam.
        standardize: whether the encoder is to tell embeddings less their mean over known clients
            and divided by their deviation, entry by entry. None: by regression, unless bounded.
        encoder_reduction: whether its loss is the mean or the sum over the entries of an embedding.
            At the mean a rate does as much as one of 1 / l times it at the sum.
        encoder_units: outputs of the encoder's layer before pooling.
        private: whether the encoder is bounded, as noise (``epsilon``) needs it.
    """

    local_clip: PositiveFloat | None = 50.0
    embedding_lr: PositiveFloat | None = 1.0
    embedding_weight_decay: NonNegativeFloat | None = 0.0
    embedding_start: PositiveFloat = 0.05
    phase_one_rounds: PositiveInt = 400
    encoder: Literal["regression", "end_to_end"] = "regression"
    encoder_lr: PositiveFloat = 1e-3
    encoder_optimizer: Literal["average", "adam"] = "adam"
    encoder_server_lr: PositiveFloat = 1e-3
    standardize: bool | None = None
    encoder_reduction: Reduction = "mean"
    encoder_units: Annotated[int, Field(gt=0, multiple_of=2)] = 200
    private: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hyper_net()
        if self.standardize and (self.bounded or self.encoder == "end_to_end"):
            raise UserError(
                "standardised embeddings must be told by an encoder that is not bounded and learns "
                "by regression: a bounded one tells vectors of length 1 at most, and end to end "
                "there are no embeddings; leave standardize out"
            )

    @property
    def least_rounds(self) -> int:
        """Rounds of a run that comes to phase 2."""
        return self.phase_one_rounds + 1

    @property
    def bounded(self) -> bool:
        """Whether the encoder's outputs, and with them the embeddings, are bounded."""
        return self.private or self.epsilon is not None

    @property
    def standardized(self) -> bool:
        """Whether the encoder is to tell standardised embeddings."""
        if self.standardize is None:
            return self.encoder == "regression" and not self.bounded
        return self.standardize


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {"rounds": 80, "cohort": 0.1, "evaluate_every": 20, "method.phase_one_rounds": 64},
    # Of appendix C's grids: rates 1e-1, 5e-2, 1e-2, 5e-3, 1e-3; decays 1e-3, 1e-4, 1e-5; epochs 1,
    # 2, 5, 10; batches of 32, 64. Validation is 15 % of the training examples.
    "paper": {
        "rounds": 500,
        "cohort": 0.1,
        "evaluate_every": 10,
        "task.val": 0.15,
        "method.cohort_reduction": "sum",
        "method.lr": 1e-2,
        "method.weight_decay": 1e-3,
        "method.embedding_lr": 1e-2,
        "method.embedding_weight_decay": 1e-3,
        "method.embedding_start": 1.0,
        "method.standardize": False,
        "method.encoder_optimizer": "average",
        "method.encoder_lr": 1e-3,
        "method.encoder_reduction": "sum",
        "method.local_lr": 5e-3,
        "method.local_weight_decay": 1e-4,
        "method.local_epochs": 2,
        "method.batch_size": 32,
    },
}


def _sent(descriptor: Tensor, encoder: Model) -> Tree:
    """Returns {"descriptor": (l,)} in the precision of the encoder that told it."""
    return {"descriptor": descriptor.to(next(iter(encoder.values())).dtype)}


class Client(federation.Client):
    """Trains its model with labels and the encoder without; describes itself by its inputs."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Returns the encoder; with several target sizes, on the trunk of the first."""
        target, length = next(iter(outline.models.values())), config.length(outline.clients)
        encoder = DeepSet(target, length, config.encoder_units, config.bounded)
        if (tried := outline.trial) is not None:
            check_it_runs(
                encoder,
                target,
                tried.x,
                gives=(length,),
                of="a deep set",
                instead="or choose another method",
            )
        return {"encoder": encoder}

    @step(like="model", bounded="reply")
    def train_model(self, model: Model) -> Model:
        """Returns delta after local training."""
        trained = fit(
            self.objective,
            self.initial | model,
            self.batches,
            self.config.local,
            trainable=self.parameters,
        ).model
        return subtract(model, trained)

    @step(like="encoder")
    def train_encoder(self, encoder: Model, target: Tree) -> Model:
        """Returns the encoder after training on |g(x) - e|^2, e = ``target["embedding"]``."""
        network = self.network("encoder")
        return fit(
            regression(network, target["embedding"], self.config.encoder_reduction),
            encoder,
            self.batches,
            replace(self.config.local, lr=self.config.encoder_lr),
            trainable=parameters_of(network),
        ).model

    @step(bounded="reply")
    def describe_batch(self, encoder: Model) -> Tree:
        """Returns {"descriptor": (l,)} of one batch of inputs, which it holds for the next step."""
        (batch,) = self.batches
        self.scratch |= {"encoder": encoder, "x": batch.x}
        with torch.no_grad():
            return _sent(forward(self.network("encoder"), encoder, batch.x)[0], encoder)

    @step(reads="kept")
    def encoder_gradient(self, gradient: Tree) -> Model:
        """Back-propagates the gradient of that descriptor through the encoder that made it.

        Returns:
            the gradient of each parameter of the encoder, and each buffer after the batch.
        """
        network, by = self.network("encoder"), gradient["descriptor"]
        parameters, buffers = partition(self.scratch["encoder"], parameters_of(network))

        def along(values: Model) -> tuple[Tensor, Model]:
            descriptor, after = forward(network, values | buffers, self.scratch["x"])
            return (descriptor * by).sum(), after

        pulled, after = grad(along, has_aux=True)(parameters)
        return dict(pulled | after)

    @step(private=True)
    def describe(self, encoder: Model) -> Tree:
        """Returns {"descriptor": (l,)}, the mean over batches of all inputs; no label is read.

        A novel client adds its noise here. What that is to hide goes through the network sample by
        sample, whatever layers of the user's mix the samples of a batch.
        """
        batches = self.draw_batches(Epochs(1, self.config.batch_size))
        alone = self.novel and self.config.bounded
        inputs = (x for batch in batches for x in (torch.split(batch.x, 1) if alone else [batch.x]))
        descriptor = mean_output(self.network("encoder"), encoder, inputs)
        if self.novel:
            moved = sensitivity(bound=1, lipschitz=1, samples=len(self.train))
            descriptor = self.release(descriptor, moved)
        return _sent(descriptor, encoder)

    def personal_model(self, received: Model) -> Model:
        """Returns the received parameters with batch-norm statistics of this client's inputs."""
        return received | self.measured(self.initial | received)


class Server(federation.Server):
    """Holds embeddings, encoder, and a hypernetwork each for known and for novel clients.

    Raises:
        UserError: the task has a label for every token.
    """

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        check_one_label("IT-PFL-HN", outline)
        length, self.end_to_end = config.length(outline.clients), config.encoder == "end_to_end"
        self.encoder = Client.networks(outline, config)["encoder"]
        self.encoder_optimizer: Optimizer
        parameters = parameters_of(self.encoder).values()
        if config.encoder_optimizer == "adam":
            self.encoder_optimizer = Adam(parameters, config.encoder_server_lr, fused=True)
        else:
            self.encoder_optimizer = SGD(parameters, config.encoder_lr, fused=True)
        rows = 0 if self.end_to_end else outline.clients
        self.embeddings = nn.Embedding(rows, length).to(outline.dtype)
        with torch.no_grad():
            self.embeddings.weight *= config.embedding_start
        self.hyper_net = config.build(outline, length)
        self.tuned_net = copy.deepcopy(self.hyper_net)
        self.tuning = torch.tensor(False)  # a tensor, so that it is part of the state
        self.optimizer = config.sgd(
            embeddings=self.embeddings.parameters(), hyper_net=self.hyper_net.parameters()
        )
        self.tuning_optimizer = config.sgd(hyper_net=self.tuned_net.parameters())
        # Squared distances of embeddings from the descriptors rehearsed last; -1 where none was.
        self.missed = -torch.ones(rows, dtype=torch.float64)

    @property
    def novel_net(self) -> HyperNet:
        """What makes novel clients' models: until phase 2 has begun, the network of phase 1."""
        return self.tuned_net if self.tuning else self.hyper_net

    def round(self, clients: Cohort) -> None:
        """Phase 1: a step on L_HN (equation 7), and one of the encoder (8). Phase 2: (9)."""
        groups, batches = clients.sizes, self.config.batches
        learning = clients.round < self.config.phase_one_rounds
        net, optimizer = self.hyper_net, self.optimizer
        if not learning:
            net, optimizer = self.novel_net, self.tuning_optimizer
        if learning and self.end_to_end:
            descriptor = self.describe_batch(clients)  # (C, l), a leaf of the graph
            of_size = {size: torch.isin(clients.ids, group.ids) for size, group in groups.items()}
            vector = {size: descriptor[which] for size, which in of_size.items()}
        else:
            find = self.embed if learning else self.describe
            vector = {size: find(group) for size, group in groups.items()}
        model = {size: net(vector[size], size) for size in groups}
        delta = {
            size: group.ask(Client.train_model, Each(detach(model[size])), batches=batches)
            for size, group in groups.items()
        }
        if not learning and not self.tuning:  # phase 2 begins; from here on there are two networks
            self.tuned_net.load_state_dict(self.hyper_net.state_dict())
            self.tuning = torch.tensor(True)
            model = {size: self.tuned_net(vector[size], size) for size in groups}
        elif learning and self.end_to_end:
            for size, group in groups.items():
                here = group.weight.sign()
                pull_back(model[size], delta[size], here, onto=[descriptor], retain=True)
            reply = clients.ask(Client.encoder_gradient, Each({"descriptor": descriptor.grad}))
            here = clients.weight.sign()
            gradient = weighted_mean(reply, here)
            if self.config.cohort_reduction == "sum":
                mean, buffers = partition(gradient, parameters_of(self.encoder))
                gradient = tree_map(lambda by: by * here.sum().to(by.dtype), mean) | buffers
            self.descend_encoder(gradient)
        elif learning:
            self.train_encoder(clients)
        descend(
            [optimizer],
            model,
            delta,
            clients,
            self.config.clip,
            reduction=self.config.cohort_reduction,
        )

    def train_encoder(self, clients: Cohort) -> None:
        """Has clients train the encoder to tell their embeddings; FedAvg or FedAdam of it."""
        mean, deviation = self.scale()
        with torch.no_grad():
            target = Each({"embedding": (self.embed(clients) - mean) / deviation})
        sent = model_of(self.encoder)
        reply = clients.ask(Client.train_encoder, sent, target, batches=self.config.batches)
        trained = weighted_mean(reply, clients.weight)
        if self.config.encoder_optimizer == "average":
            fill(self.encoder, trained)
        else:
            change, _ = partition(subtract(sent, trained), parameters_of(self.encoder))
            self.descend_encoder(trained | change)

    def descend_encoder(self, gradient: Model) -> None:
        """Descends the ``gradient`` of each parameter, and takes its buffers as they are there."""
        set_gradients(self.encoder, gradient)
        self.encoder_optimizer.step()
        buffers, _ = partition(gradient, buffers_of(self.encoder))
        fill(self.encoder, model_of(self.encoder) | buffers)

    def personalize(self, clients: Cohort) -> Each:
        """Sends what phase 1 made for known clients, and what phase 2 makes for novel ones."""
        if clients.novel:
            return self.rehearse(clients)
        vector = self.descriptors_of(clients)
        with torch.no_grad():
            return Each(self.hyper_net(vector, clients.size))

    def descriptors_of(self, clients: Cohort) -> Tensor:
        """Returns (C, l): what the encoder says of novel clients, embeddings of known ones."""
        known = not (clients.novel or self.end_to_end)
        return self.embed(clients) if known else self.describe(clients)

    def rehearse(self, clients: Cohort) -> Each:
        """Serves clients as novel ones; on known clients it tells which round is the best."""
        descriptor = self.describe(clients)
        if self.tuning and not (clients.novel or self.end_to_end):
            distance = (self.embed(clients) - descriptor).detach().double().square().sum(dim=1)
            distance = distance.where(clients.weight > 0, -1)
            self.missed = self.missed.index_copy(0, clients.ids, distance)
        with torch.no_grad():
            return Each(self.novel_net(descriptor, clients.size))

    def diagnostics(self) -> Tree:
        """Returns {"explained": R^2}, and warns of little.

        It is of the embeddings of all known clients by their descriptors, over those that answered
        when they were rehearsed last. {} where there is none yet: of an encoder that still learns,
        or has no embedding to tell.
        """
        there = self.missed >= 0
        rows = self.embeddings_of(there.nonzero().flatten()).detach().double()
        varies = (rows - rows.mean(dim=0)).square().sum()
        if not varies:
            return {}
        explained = 1 - float(self.missed[there].sum() / varies)
        if explained < EXPLAINED:
            log.warning(
                f"the encoder explains {round(100 * explained)} % of the variance of the clients' "
                "embeddings, so novel clients get nearly one model; train phase 1 longer, or with "
                "another method.encoder_lr"
            )
        return {"explained": torch.tensor(explained, dtype=torch.float64)}

    def embed(self, clients: Cohort) -> Tensor:
        """Returns (C, l) embeddings of known clients."""
        return self.embeddings_of(clients.ids)

    def embeddings_of(self, ids: Tensor) -> Tensor:
        """Returns (C, l) embeddings by number, on the unit sphere for a bounded encoder."""
        rows: Tensor = self.embeddings(ids)
        return F.normalize(rows, dim=-1) if self.config.bounded else rows

    def scale(self) -> tuple[Tensor, Tensor]:
        """Returns what standardises embeddings, mean and deviation of each entry, (l,) each.

        Over all known clients, whoever takes part in a round: nothing depends on who was lost.
        What is not standardised has mean 0 and deviation 1.
        """
        rows = self.embeddings.weight.detach()
        if not self.config.standardized:
            return rows.new_zeros(()), rows.new_ones(())
        deviation, mean = torch.std_mean(within_reach(rows), dim=0, correction=0)
        return mean, deviation.where(deviation > 0, 1)

    def describe_batch(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors of one batch at each client, to be differentiated by."""
        one = Steps(1, self.config.batch_size)
        reply = clients.ask(Client.describe_batch, model_of(self.encoder), batches=one)
        descriptor: Tensor = reply["descriptor"]
        return descriptor.requires_grad_()

    def describe(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors, computed at the clients, in the units of embeddings."""
        mean, deviation = self.scale()
        reply = clients.ask(Client.describe, model_of(self.encoder))
        descriptor: Tensor = reply["descriptor"] * deviation + mean
        return descriptor

    def privacy(self) -> dict[str, Any] | None:
        """Returns what a novel client's descriptor reveals at most."""
        found: dict[str, Any] | None = self.config.privacy()
        return found

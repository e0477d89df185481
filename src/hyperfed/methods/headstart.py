"""HeadStart (hyperfed, 2026): one model for all, and by a look at half of a batch what differs.

Our own: PeFLL (Scott et al., ICLR 2024), whose descriptor network and hypernetwork learn in three
exchanges, with what other methods of the field do once each:

- **All start from one model, which learns by plain averaging.** The biases of the hypernetwork's
  output are the target's initial weights, and move by the mean of the cohort's deltas, each client
  counting once (FedAvg's model moves by their mean weighted by examples: McMahan et al., 2017). The
  output's matrices, at first zero, make what clients differ by.
- **The matrices learn at the pace of averaging.** They descend plainly, at a rate of 1 like the
  biases, from features of length 1: a client's model moves by its own delta, and by those of others
  as much as their features are alike. Where deltas have nothing in common that descriptors tell,
  the matrices hardly move. A step of Adam, as PeFLL's code makes it, has the same size whatever the
  deltas say: it learns few clients by heart, and a LeNet dies of it. (The hidden layers and the
  descriptor network have Adam.) Of several target sizes they descend the mean over the whole
  cohort, while the biases of a size move by that of its own clients.
- **A client's own class frequencies stand in its last layer's biases** (``pseudo_count``), as
  logarithms, in training and after: the balanced softmax (Ren et al., NeurIPS 2020) by which
  Fed-RoD trains its generic model. What is averaged learns all classes alike, and nothing is left
  to learn of who has which.
- **Descriptors are centred.** The hypernetwork sees at once what clients differ by, since what the
  first cohort has in common is taken away, entry by entry.
- **Labels may be kept from the descriptor network** (``label_dropout``): of a part of the visits it
  sees inputs alone, and no frequencies are told, so that a newcomer without labels is described by
  the same network.
- **The last layers may be the client's own** (``head_layers``), as in pFedHN-PC: for clients whose
  labels have nothing in common, of which no common layer could tell anything.
- **In training a client is described by half of a batch**, new in each round: who describes a
  client of few examples by all of them, always the same, learns it by heart, and newcomers get what
  they should not. It trains on batches of all its examples, as in PeFLL.

Sent: the descriptor network down, the descriptor up; the model down, delta up; the descriptor's
gradient down, that of the descriptor network up, as in PeFLL. Kept by the client: the last layers,
where they are its own; its class frequencies do not leave it. Evaluated: the model made from all
training data, with what is the client's; ``serve.finetune_steps`` goes on from it. A novel client
does the same, after ``novel_rounds`` of the model down and delta up; without labels it can where
``label_dropout`` is above 0, and its descriptor stays as it was seen.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.optim import SGD

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Each, Outline, step
from hyperfed.methods import pefll
from hyperfed.methods.parts.hypernet_training import descend, fit_rows
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.anatomy import head_entries
from hyperfed.nets.chunks import DescribedChunks
from hyperfed.nets.descriptors import Centred
from hyperfed.nets.hypernets import HyperNet, hold_common, start_at
from hyperfed.nets.layers import UnitLength
from hyperfed.training import Batch, PersonalConfig, Steps, count_classes
from hyperfed.trees import Model, Tree, model_of, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(pefll.Config, PersonalConfig):
    """Settings of HeadStart: PeFLL's, and some more.

    Attributes:
        lr: learning rate of the hypernetwork's output: by how much of its delta a client's model
            moves, were it a cohort of its own. At 0 they differ by class frequencies alone.
        network_lr: that of the descriptor network and the hypernetwork's hidden layers, to which
            ``optimizer``, ``momentum`` and ``weight_decay`` belong; a hypernetwork in ``chunks``
            learns by it alone.
        descriptor_size: as of PeFLL; it does not grow with the number of clients here.
        start: of no consequence here, where all models begin as the target whatever it says.
        common_lr: by how much of a cohort's mean delta, each client counting once, the common model
            moves; at 1 by all of it.
        pseudo_count: examples of every class that a client counts beside its own, so that no class
            is impossible; None leaves the biases as they are made. Of a task with classes, and a
            target whose last trained parameter is a bias for each of them.
        head_layers: how many of the target's last layers are the client's own. They begin as the
            target's do; class frequencies are not added to them.
        label_dropout: probability that the descriptor network is told no label in a visit of
            training; of classes, and a network that looks at inputs, only.
        novel_rounds: exchanges in which a novel client's descriptor is fitted, the networks frozen;
            with 0 it has its model at the first look.
        novel_lr: learning rate of that fit.
    """

    local_lr: PositiveFloat = 5e-3
    lr: NonNegativeFloat = 1.0
    network_lr: PositiveFloat = 1e-3
    descriptor_size: pefll.DescriptorSize = 16
    common_lr: NonNegativeFloat = 1.0
    pseudo_count: PositiveFloat | None = 1.0
    head_layers: NonNegativeInt = 0
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    novel_rounds: NonNegativeInt = 5
    novel_lr: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_dropout and self.descriptor_net == "linear":
            raise UserError(
                "method.label_dropout must be 0 where labels alone describe a client, came "
                f'{self.label_dropout} with descriptor_net = "linear"; change one of them'
            )

    def generator(self, outline: Outline) -> HyperNet:
        """Builds the hypernetwork, of all but the clients' own layers."""
        return self.build(outline, self.length(outline), head_layers=self.head_layers)


UNTOLD = -1
"""Stands for a label that the descriptor network is not told."""

PRESETS: Mapping[str, Mapping[str, Any]] = {"default": DEFAULT}


class Client(pefll.Client):
    """PeFLL's, described by half of a batch while the networks learn."""

    @step(bounded="reply", reads=0.5)
    @torch.no_grad()
    def describe_half(self, descriptor_net: Model) -> Tree:
        """Returns {"descriptor": (l,)}, the mean over half of a batch, rounded up."""
        (batch,) = self.batches
        half = (len(batch.x) + 1) // 2  # of examples drawn in random order
        seen = Batch(batch.x[:half], batch.y[:half])
        if self.config.label_dropout:
            draw = torch.rand((), generator=self.generator).to(self.device)
            hidden = draw < self.config.label_dropout
            seen = Batch(seen.x, seen.y.masked_fill(hidden, UNTOLD))
            self.scratch["told"] = ~hidden
        self.scratch |= {"descriptor_net": descriptor_net, "x": seen.x, "y": seen.y}
        return {"descriptor": self.embed(descriptor_net, seen).mean(dim=0)}

    @step(like="model", bounded="reply")
    def train_model(self, model: Model) -> Model:
        """Returns delta after local training; keeps the client's own layers.

        A client that has no labels, nor layers that need them, answers with zeros.
        """
        head = self.head
        if not head:
            return super().train_model(model) if self.labelled else trees.subtract(model, model)
        start, parameters = self.personal_model(model), self.parameters
        trained = self.train_own(
            self.objective, start, self.batches, trainable=parameters, own=head, unclipped=head
        )
        self.memory["head"], sent = trees.partition(trained, head)
        return trees.subtract(trees.partition(start, head)[1], sent)

    def personal_model(self, received: Model) -> Model:
        """Returns what was made, the logarithms of the client's class frequencies in its biases.

        With layers of its own it has these, and no frequencies; nor if biases are of no class.
        """
        if head := self.head:
            return received | self.recall("head", head)
        *_, (name, last) = trees.parameters_of(self.module).items()
        more = self.config.pseudo_count
        if more is None or not self.labelled or not self.classes or last.shape != (self.classes,):
            return received
        if self.labels_of_each > 1:  # which have an output each
            return received
        count = count_classes(self.train.labels, self.classes).to(last.dtype) + more
        added = (count / count.sum()).log() * self.scratch.get("told", 1)
        return {**received, name: received[name] + added}

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Names of what of the model is the client's own: parameters, and buffers among them."""
        return head_entries(self.module, self.config.head_layers)

    def labels(self, batch: Batch) -> Tensor:
        """Returns the labels; where there are none and the network learned without, untold ones."""
        if batch.labelled or not self.config.label_dropout:
            return batch.y
        return torch.full((len(batch.x), self.labels_of_each), UNTOLD, device=batch.x.device)

    @property
    def labels_of_each(self) -> int:
        """How many labels an example has side by side."""
        net: Any = self.network("descriptor_net")
        size: int = net.target_size
        return size


class Server(pefll.Server):
    """Holds the hypernetwork, with the common model in its biases, and the descriptor network."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        if config.label_dropout and not outline.classes:
            raise UserError(
                "method.label_dropout must be 0 where targets are numbers, of which none means "
                f"untold, came {config.label_dropout}; leave it out"
            )
        for size, net in outline.models.items():
            own = head_entries(net, config.head_layers)
            _, self.buffers[size] = trees.partition(self.buffers[size], own)
        start_at(self.hyper_net, outline.models)
        outputs: list[Tensor] = []
        if not isinstance(self.hyper_net, DescribedChunks):  # whose output all layers share
            hold_common(self.hyper_net)
            self.hyper_net.trunk.append(UnitLength())
            outputs = [layer.weight for layer in self.hyper_net.last_layers()]
        described = trees.parameters_of(self.descriptor_net)
        parameters = [*self.hyper_net.parameters(), *described.values()]
        others = [value for value in parameters if all(value is not output for output in outputs)]
        self.optimizer = config.optimizer_of(others, config.network_lr)
        self.output_optimizer = SGD([{"params": outputs}], config.lr, fused=True)
        if config.standardize:
            self.standard = Centred(config.length(outline)).to(outline.dtype)

    def describe_batch(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors to learn from, each of half of a batch."""
        net, one = model_of(self.descriptor_net), Steps(1, self.config.batch_size)
        reply = clients.ask(Client.describe_half, net, batches=one)
        descriptor: Tensor = reply["descriptor"]
        return descriptor

    def descriptors_of(self, clients: Cohort) -> Tensor:
        """Returns (C, l): PeFLL's; those of novel clients fitted from there."""
        seen = super().descriptors_of(clients)
        return self.fit_descriptors(clients, seen) if clients.novel else seen

    def fit_descriptors(self, clients: Cohort, seen: Tensor) -> Tensor:
        """Returns (C, l) descriptors that novel clients' models have moved, the networks frozen."""
        config, standard = self.config, self.standard.fitted(seen)
        buffers = trees.repeat(self.buffers[clients.size], len(seen))

        def exchange(descriptor: Tensor) -> tuple[Model, Model]:
            model = self.hyper_net(standard(descriptor), clients.size)
            sent = Each(trees.detach(model) | buffers)
            return model, clients.ask(Client.train_model, sent, batches=config.batches)

        rows = seen.clone().requires_grad_()
        optimizer = SGD([rows], config.novel_lr, fused=True)
        return fit_rows(
            rows, optimizer, exchange, clients, rounds=config.novel_rounds, clip=config.clip
        )

    def descend(
        self, model: Mapping[str, Model], delta: Mapping[str, Model], clients: Cohort
    ) -> None:
        """Makes PeFLL's step, and moves the common model of each size by its clients' mean."""
        optimizers = [self.optimizer, self.output_optimizer]
        descend(optimizers, model, delta, clients, self.config.clip)
        for size, group in clients.sizes.items():
            if group.weight.any():
                mean = weighted_mean(delta[size], group.weight.sign(), group.ids)
                for name, value in self.hyper_net.common(size).items():
                    value.sub_(mean[name], alpha=self.config.common_lr)

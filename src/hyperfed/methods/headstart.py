"""HeadStart (hyperfed, 2026): all start from one model, moved by a look at half of a batch.

Our own: PeFLL (Scott et al., ICLR 2024), whose descriptor network and hypernetwork learn in three
exchanges, with what other methods of the field do once each:

- **The hypernetwork begins as the target.** The biases of its output are the target's initial
  weights: clients start from one network, as in FedAvg, and the rest is what they differ by.
- **The common model also learns by plain averaging.** Those biases move by the mean of the cohort's
  deltas, as FedAvg's model does (McMahan et al., 2017), beside the hypernetwork's own step. So a
  descriptor that says nothing costs nothing.
- **Descriptors are centred.** The hypernetwork sees at once what clients differ by, since what the
  first cohort has in common is taken away, entry by entry.
- **Labels may be kept from the descriptor network** (``label_dropout``): of a part of the visits it
  sees inputs alone, so that a newcomer without labels is described by the same network.
- **In training a client is described by half of a batch**, and trains on all of it: who describes a
  client of few examples by all of them, always the same, learns it by heart, and newcomers get what
  they should not.

Left out is what did not help on the validation data by which the rest was chosen (the division of
``tools/all_methods.py`` that no record is of; many clients with few labels, where a fine-tuned
HeadStart comes to 85.8 %): steps before those that the networks learn from, so that a model is
judged after it was fine-tuned, first order as in Per-FedAvg (five such steps 83.0 %, ten 82.2 %);
and a classifier that is made once and then the client's own (83.7 %, newcomers 86.7 -> 80.9 %; with
few clients and many labels 95.4 -> 94.7 %). Of these trials no records are kept.

Sent: the descriptor network down, the descriptor up; the model down, delta up; the descriptor's
gradient down, that of the descriptor network up, as in PeFLL. Kept by the client: nothing.
Evaluated: the model made from all training data; ``serve.finetune_steps`` goes on from it. A novel
client does the same; without labels it can where ``label_dropout`` is above 0.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Outline, step
from hyperfed.methods import pefll
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.descriptors import Centred
from hyperfed.training import Batch, Steps
from hyperfed.trees import Model, Tree, model_of, weighted_mean


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(pefll.Config):
    """Settings of HeadStart: PeFLL's, and two more.

    Attributes:
        lr: learning rate of the server; small targets take twice as much, at which a LeNet dies.
        descriptor_size: as of PeFLL; it does not grow with the number of clients here.
        common_lr: by how much of a cohort's mean delta the common model moves; 1 as in FedAvg, 0
            leaves it to the hypernetwork's own step.
        label_dropout: probability that the descriptor network is told no label in a visit of
            training; of classes, and a network that looks at inputs, only.
    """

    local_lr: PositiveFloat = 5e-3
    lr: PositiveFloat = 1e-3
    descriptor_size: pefll.DescriptorSize = 16
    common_lr: NonNegativeFloat = 1.0
    label_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_dropout and self.descriptor_net == "linear":
            raise UserError(
                "method.label_dropout must be 0 where labels alone describe a client, came "
                f'{self.label_dropout} with descriptor_net = "linear"; change one of them'
            )


UNTOLD = -1
"""Stands for a label that the descriptor network is not told."""

PRESETS: Mapping[str, Mapping[str, Any]] = {"default": DEFAULT}


class Client(pefll.Client):
    """PeFLL's, described by half of a batch while the networks learn."""

    @step(bounded="reply")
    @torch.no_grad()
    def describe_half(self, descriptor_net: Model) -> Tree:
        """Returns {"descriptor": (l,)}, the mean over half of a batch, rounded up."""
        (batch,) = self.batches
        half = (len(batch.x) + 1) // 2  # of examples drawn in random order
        seen = Batch(batch.x[:half], batch.y[:half])
        if self.config.label_dropout:
            hidden = torch.rand((), generator=self.generator) < self.config.label_dropout
            seen = Batch(seen.x, seen.y.masked_fill(hidden.to(self.device), UNTOLD))
        self.scratch |= {"descriptor_net": descriptor_net, "x": seen.x, "y": seen.y}
        return {"descriptor": self.embed(descriptor_net, seen).mean(dim=0)}

    def labels(self, batch: Batch) -> Tensor:
        """Returns (B,) the labels, untold where there are none and the network learned without."""
        if batch.labelled or not self.config.label_dropout:
            return batch.y
        return torch.full((len(batch.x),), UNTOLD, device=batch.x.device)


class Server(pefll.Server):
    """Holds the hypernetwork, with the common model in its biases, and the descriptor network."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        if config.label_dropout and not outline.classes:
            raise UserError(
                "method.label_dropout must be 0 where targets are numbers, of which none means "
                f"untold, came {config.label_dropout}; leave it out"
            )
        for size in outline.models:
            start = outline.initial(size)
            for name, value in self.hyper_net.common(size).items():
                value.copy_(start[name])
        if config.standardize:
            self.standard = Centred(config.length(outline)).to(outline.dtype)

    def describe_batch(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors to learn from, each of half of a batch."""
        net, one = model_of(self.descriptor_net), Steps(1, self.config.batch_size)
        reply = clients.ask(Client.describe_half, net, batches=one)
        descriptor: Tensor = reply["descriptor"]
        return descriptor

    def descend(
        self, model: Mapping[str, Model], delta: Mapping[str, Model], clients: Cohort
    ) -> None:
        """Makes PeFLL's step, and moves the common model of each size by its clients' mean."""
        super().descend(model, delta, clients)
        for size, group in clients.sizes.items():
            if group.weight.any():
                mean = weighted_mean(delta[size], group.weight.sign())
                for name, value in self.hyper_net.common(size).items():
                    value.sub_(mean[name], alpha=self.config.common_lr)

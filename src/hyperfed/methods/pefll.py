"""PeFLL (Scott et al., ICLR 2024): a look at a client's data makes its model, also a newcomer's.

Paper: https://arxiv.org/abs/2306.05515.

A descriptor network embeds a batch of a client's labelled examples; their mean is the client's
descriptor, from which a hypernetwork on the server makes its model. Sent: the descriptor network
down, the descriptor up; the model down, delta up; the descriptor's gradient down, that of the
descriptor network up. Kept by the client: nothing; batch-norm buffers, where the target has any,
travel with the model and are averaged over the cohort. Evaluated: the model made from one batch or
from all training data. A novel client does the same: one forward pass, which needs its labels.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import grad
from torch.optim import SGD, Adam, Optimizer

from hyperfed import federation, trees
from hyperfed.federation import EVALUATION_BATCH, Cohort, Each, Outline, Pending, step
from hyperfed.functional import apply
from hyperfed.methods.parts.generators import GeneratorConfig
from hyperfed.methods.parts.hypernet_training import descend
from hyperfed.methods.parts.presets import DEFAULT
from hyperfed.nets.descriptors import LabelledTarget, LabelMap, Standard
from hyperfed.nets.hypernets import HyperNet
from hyperfed.nets.trial import check_it_runs
from hyperfed.training import Batch, Batches, Epochs, LocalConfig, Steps, fit
from hyperfed.trees import Model, Tree

DescriptorSize = Annotated[int, Field(ge=2)] | Literal["n/4", "1+n/4"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config(GeneratorConfig, LocalConfig):
    """Settings of PeFLL; the defaults are those of the authors' code.

    At their learning rate the server needs thousands of rounds, so the preset ``default``, of a few
    dozen, takes one ten times as large.

    Attributes:
        local_weight_decay: 2 lambda_theta, the gradient's factor of lambda_theta |theta|^2.
        optimizer: of the server.
        lr: its learning rate.
        momentum: that of ``sgd``.
        weight_decay: 2 lambda_h = 2 lambda_v, of the hypernetwork and the descriptor network.
        clip: bound of the norm of the server's gradient, of both networks together.
        descriptor_net: a copy of the target that sees labels, or a linear map of the label alone.
        descriptor_size: length l of a descriptor, or a rule (2 at least): "n/4" for the n known
            clients, as the paper's tables count them; "1+n/4" for all n, novel ones included, as
            the authors' code does.
        delayed_gradient: the third exchange travels with the first of the next round: two in each,
            but the descriptor network steps one round late and not by the last round's gradient.
        prediction: whether one batch or all training data describe a client to be served.
        standardize: descriptors by mean and deviation of the entries of the very first one.
    """

    batch_size: PositiveInt = 32
    local_lr: PositiveFloat = 2e-3
    local_clip: PositiveFloat | None = 50.0
    optimizer: Literal["sgd", "adam"] = "adam"
    lr: PositiveFloat = 2e-4
    momentum: NonNegativeFloat = 0.9
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = 50.0
    descriptor_net: Literal["target", "linear"] = "target"
    descriptor_size: DescriptorSize = "1+n/4"
    delayed_gradient: bool = False
    prediction: Literal["batch", "all"] = "all"
    standardize: bool = True

    def __post_init__(self) -> None:
        self.check_hyper_net()

    def optimizer_of(self, parameters: Iterable[Tensor], lr: float) -> Optimizer:
        """Returns an optimiser of the server."""
        momentum, decay = self.momentum, self.weight_decay
        if self.optimizer == "sgd":
            return SGD(parameters, lr, momentum, weight_decay=decay, fused=True)
        return Adam(parameters, lr, weight_decay=decay, fused=True)

    def length(self, outline: Outline) -> int:
        """Returns the length l of a descriptor."""
        if isinstance(self.descriptor_size, int):
            return self.descriptor_size
        known, everybody = outline.clients, outline.clients + outline.novel
        return max(2, known // 4 if self.descriptor_size == "n/4" else 1 + everybody // 4)

    def generator(self, outline: Outline) -> HyperNet:
        """Builds the hypernetwork."""
        return self.build(outline, self.length(outline))


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "default": {**DEFAULT, "method.lr": 2e-3},
    # The authors' code sets the logits of absent classes to zero in every evaluation, that of the
    # best round among them.
    "official": {
        "rounds": 5000,
        "cohort": 5,
        "evaluate_every": 30,
        "best": "zeroed_accuracy",
    },
    # Section 5, tables 2-4, appendix C.2. The paper takes pFedHN's values for its hypernetwork, so
    # the server's rate and momentum are pFedHN's, where algorithm 2 adds the clients' mean change
    # as it is. The local rate was searched on a grid that it does not give: it is the code's.
    "paper": {
        "rounds": 5000,
        "cohort": 0.05,
        "evaluate_every": 30,
        "method.local_weight_decay": 1e-4,
        "method.local_clip": None,
        "method.optimizer": "sgd",
        "method.lr": 1e-2,
        "method.weight_decay": 2e-3,
        "method.clip": None,
        "method.descriptor_size": "n/4",
        "method.prediction": "batch",
        "method.standardize": False,
        "method.hyper_net": "single",
        "method.hidden_layers": 1,
    },
}


class Client(federation.Client):
    """Describes itself, trains the model made from that, and passes the gradient back."""

    @staticmethod
    def networks(outline: Outline, config: Config) -> dict[str, nn.Module]:
        """Builds the descriptor network; of several target sizes it copies the first."""
        length, target = config.length(outline), next(iter(outline.models.values()))
        net: nn.Module = LabelMap(outline.classes, length, outline.target_size)
        if config.descriptor_net == "target":
            net = LabelledTarget(target, outline.classes, length, outline.target_size)
        net = trees.cast(net, outline.dtype)
        if (tried := outline.trial) is not None and config.descriptor_net == "target":
            check_it_runs(
                net,
                target,
                tried.x,
                tried.y,
                gives=(len(tried.y), length),
                of="a descriptor network",
                instead='describe clients by their labels alone (descriptor_net = "linear"), or '
                "choose another method",
            )
        return {"descriptor_net": net}

    @step(bounded="reply")
    @torch.no_grad()  # its gradient comes in a step of its own
    def describe(self, descriptor_net: Model) -> Tree:
        """Returns {"descriptor": (l,)}, a mean over examples; in a round there is one batch."""
        total, count = torch.zeros(()), 0
        for batch in self.batches:
            seen = Batch(batch.x, self.labels(batch))
            total = total + self.embed(descriptor_net, seen).sum(dim=0)
            count += len(seen.y)
            self.scratch |= {"descriptor_net": descriptor_net, "x": seen.x, "y": seen.y}
        return {"descriptor": total / count}

    @step(like="model", bounded="reply")
    def train_model(self, model: Model) -> Model:
        """Returns delta after local training from the personal model."""
        local, parameters, start = self.config.local, self.parameters, self.personal_model(model)
        trained = fit(self.objective, start, self.batches, local, trainable=parameters).model
        return trees.subtract(start, trained)

    @step(deferrable=True, bounded="reply", reads="kept")
    def descriptor_net_gradient(self, gradient: Tree) -> Model:
        """Back-propagates a descriptor's gradient through the batch and network that made it."""
        batch, by = Batch(self.scratch["x"], self.scratch["y"]), gradient["descriptor"]
        sent: Model = self.scratch["descriptor_net"]
        whole = {name: value for name, value in sent.items() if not value.is_floating_point()}
        pulled = grad(lambda net: self.embed(whole | net, batch).mean(dim=0) @ by)
        return dict(pulled(trees.partition(sent, whole)[1]))

    def labels(self, batch: Batch) -> Tensor:
        """Returns (B,) what of the labels the descriptor network is told."""
        return batch.y

    def embed(self, descriptor_net: Model, batch: Batch) -> Tensor:
        """Returns (B, l), one embedding for each example."""
        return apply(self.network("descriptor_net"), descriptor_net, batch.x, batch.y)


class Server(federation.Server):
    """Holds the hypernetwork h(v; eta_h) and the descriptor network v(S; eta_v)."""

    def __init__(self, outline: Outline, config: Config) -> None:
        super().__init__(outline, config)
        self.descriptor_net = Client.networks(outline, config)["descriptor_net"]
        self.hyper_net = config.generator(outline)
        self.standard = Standard(fit=config.standardize).to(outline.dtype)
        self.buffers: Tree = {
            size: trees.partition(outline.initial(size), trees.parameters_of(net))[1]
            for size, net in outline.models.items()
        }
        self.late_gradient: Tree = {}
        self._posted: Pending | None = None
        described = trees.parameters_of(self.descriptor_net)
        parameters = [*self.hyper_net.parameters(), *described.values()]
        self.optimizer = config.optimizer_of(parameters, config.lr)

    def round(self, clients: Cohort) -> None:
        """Algorithm 2: three exchanges, then the mean over the clients that were there for all.

        With a delayed gradient the third is posted: the step is by the hypernetwork's gradient of
        this round and the descriptor network's of the round before, zero in the first.
        """
        config, groups = self.config, clients.sizes
        descriptor = self.describe_batch(clients)  # (C, l)
        standard = self.standard.fitted(descriptor[clients.weight > 0])
        descriptor.requires_grad_()
        model, delta = {}, {}
        for size, group in groups.items():
            own = standard(descriptor[torch.isin(clients.ids, group.ids)])
            model[size] = self.hyper_net(own, size)
            sent = trees.detach(model[size]) | trees.repeat(self.buffers[size], len(own))
            delta[size] = group.ask(Client.train_model, Each(sent), batches=config.batches)
            # At first onto the descriptors alone, unscaled: who is left for the mean shows later.
            here = group.weight.sign()
            trees.pull_back(model[size], delta[size], here, onto=[descriptor], retain=True)
        last = Client.descriptor_net_gradient, Each({"descriptor": descriptor.grad})
        if config.delayed_gradient:
            gradient, self._posted = self.latest_gradient(), clients.post(*last)
        else:
            reply = clients.ask(*last)
            gradient = trees.weighted_mean(reply, clients.weight.sign())

        self.standard = standard
        for size, group in groups.items():
            if group.weight.any():
                moved, _ = trees.partition(delta[size], self.buffers[size])
                moved = trees.weighted_mean(moved, group.weight.sign(), group.ids)
                self.buffers[size] = trees.subtract(self.buffers[size], moved)
        if gradient:
            trees.set_gradients(self.descriptor_net, gradient)
        self.descend(model, delta, clients)

    def describe_batch(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors to learn from, each of one batch."""
        return self.describe(clients, Steps(1, self.config.batch_size))

    def describe(self, clients: Cohort, batches: Batches) -> Tensor:
        """Returns (C, l) descriptors, computed at the clients."""
        net = trees.model_of(self.descriptor_net)
        descriptor: Tensor = clients.ask(Client.describe, net, batches=batches)["descriptor"]
        return descriptor

    def descend(
        self, model: Mapping[str, Model], delta: Mapping[str, Model], clients: Cohort
    ) -> None:
        """Makes a step of both networks: see :func:`hypernet_training.descend`."""
        descend([self.optimizer], model, delta, clients, self.config.clip)

    def latest_gradient(self) -> Tree:
        """Returns the descriptor network's gradient that was posted, {} where there is none."""
        if self._posted is not None:
            reply, there = self._posted.reply(), self._posted.weight.sign()
            self.late_gradient, self._posted = trees.weighted_mean(reply, there), None
        return self.late_gradient

    def state(self, *, optimizers: bool = True) -> Tree:
        """Returns the server's tensors, with the gradient that was posted."""
        self.latest_gradient()
        return super().state(optimizers=optimizers)

    def personalize(self, clients: Cohort) -> Each:
        """Algorithm 1, for known and novel clients alike."""
        descriptor = self.descriptors_of(clients)
        with torch.no_grad():
            model = self.hyper_net(self.standard.fitted(descriptor)(descriptor), clients.size)
        return Each(model | trees.repeat(self.buffers[clients.size], len(clients.ids)))

    def descriptors_of(self, clients: Cohort) -> Tensor:
        """Returns (C, l) descriptors that predict: of one batch, or of all training examples."""
        if self.config.prediction == "batch":
            return self.describe(clients, Steps(1, self.config.batch_size))
        return self.describe(clients, Epochs(1, EVALUATION_BATCH))

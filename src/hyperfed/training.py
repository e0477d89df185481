"""Functional local training: a model goes in as a tree and comes out as a tree.

Nothing here holds state. A step of a client calls :func:`fit` with the objective it wants; the
network is only a description of the computation, run with the weights of a tree
(:mod:`hyperfed.functional`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.linalg import vector_norm

from hyperfed.functional import apply, forward
from hyperfed.system.devices import CPU
from hyperfed.trees import Model, Tree, clone, mapped

Moments: TypeAlias = Any
"""What an optimiser remembers of a parameter: SGD its momentum, a tensor; AdamW a tree."""


@dataclass(frozen=True)
class Sgd:
    """SGD with the arithmetic of ``torch.optim.SGD``; ``clip`` bounds the gradient's joint norm."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def start(self, weight: Tensor) -> Moments:
        """Returns the momentum of a parameter before its first step."""
        return torch.zeros_like(weight)

    def step(
        self, weights: list[Tensor], gradients: list[Tensor], moments: list[Moments]
    ) -> tuple[list[Tensor], list[Moments]]:
        """Returns parameters and moments after a step; those that came may be overwritten."""
        if self.weight_decay:
            gradients = _added(gradients, weights, self.weight_decay)
        if self.momentum:
            gradients = moments = _added(_scaled(moments, self.momentum), gradients)
        return _added(weights, gradients, -self.lr), moments


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter, ICLR 2019) with the arithmetic of ``torch.optim.AdamW``.

    Its betas are 0.9 and 0.999, its epsilon is 1e-8. Weights decay by themselves, in proportion to
    ``lr``, and not through the gradient; ``clip`` is as that of :class:`Sgd`.
    """

    lr: float
    weight_decay: float = 0.0
    clip: float | None = None

    def start(self, weight: Tensor) -> Moments:
        """Returns both moments of a parameter, and its number of steps, before the first."""
        zero, steps = torch.zeros_like(weight), weight.new_zeros((), dtype=torch.float64)
        return {"first": zero, "second": zero, "steps": steps}

    def step(
        self, weights: list[Tensor], gradients: list[Tensor], moments: list[Moments]
    ) -> tuple[list[Tensor], list[Moments]]:
        """Returns parameters and moments after a step; those that came may be overwritten."""
        if self.weight_decay:
            weights = _scaled(weights, 1 - self.lr * self.weight_decay)
        after = [self._moved(*of) for of in zip(weights, gradients, moments, strict=True)]
        return [weight for weight, _ in after], [own for _, own in after]

    def _moved(self, weight: Tensor, gradient: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
        steps = moments["steps"] + 1
        first = 0.9 * moments["first"] + 0.1 * gradient
        second = 0.999 * moments["second"] + 0.001 * gradient**2
        rate, scale = self.lr / (1 - 0.9**steps), 1 - 0.999**steps
        change = rate * first / ((second / scale).sqrt() + 1e-8)
        # A scalar in bfloat16 would become what its number of steps is.
        return weight - change.to(weight.dtype), {"first": first, "second": second, "steps": steps}


Optimizer: TypeAlias = Sgd | AdamW
"""Of a client. Its state is handed in and out, so that it can be computed for many at once."""

Momentum: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""A setting of SGD."""

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
"""A setting of methods, from nothing to all."""


def pass_lengths(examples: int, size: int) -> list[int]:
    """Returns how many of some examples each batch of one pass holds.

    Each has ``size``, but for the last, which has what is left. Where that is one example, of which
    batch-norm has no statistics (:func:`hyperfed.functional.apply`), it joins the batch before.
    """
    lengths = [min(size, examples - start) for start in range(0, examples, size)]
    if len(lengths) > 1 and lengths[-1] == 1 < size:
        lengths[-2:] = [size + 1]
    return lengths


@dataclass(frozen=True)
class Steps:
    """Batches for ``count`` local steps, each drawn afresh, without replacement, from all data."""

    count: int
    size: int

    def lengths(self, examples: int) -> list[int]:
        """Returns the lengths of the batches from one order of the examples: of one."""
        return pass_lengths(min(self.size, examples), self.size)


@dataclass(frozen=True)
class Epochs:
    """Batches for ``count`` passes over all examples in a new order each.

    The last of a pass may be short; where it would have one example, it joins the one before.
    """

    count: int
    size: int

    def lengths(self, examples: int) -> list[int]:
        """Returns the lengths of the batches from one order of the examples: of a pass."""
        return pass_lengths(examples, self.size)


Batches: TypeAlias = Steps | Epochs
"""What to train on: ``count`` orders of a client's examples, drawn at random, cut into batches."""

Precision: TypeAlias = Literal["float32", "bf16"]
"""Of a client's arithmetic."""


def arithmetic(precision: Precision, device: torch.device = CPU) -> AbstractContextManager[None]:
    """Returns a block in which clients compute with a precision; see PyTorch's ``autocast``."""
    if precision == "float32":
        return nullcontext()
    # Its cache would keep the weights of every step until the end of the block.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LocalConfig:
    """The settings of local training that every method has, under the same keys.

    Attributes:
        local_steps: steps a client makes in a round, each on a fresh i.i.d. batch.
        local_epochs: passes over the client's data instead of ``local_steps``.
        batch_size: examples of a batch.
        local_optimizer: what makes the steps: SGD, as in the papers, or AdamW, which adapters and
            transformers are mostly trained by. It is new in each round (but see
            :class:`PersonalConfig`). It trains FedPAC's head, FedBABU's fine-tuned model and
            IT-PFL-HN's encoder, too, which have rates of their own. Others that have, Per-FedAvg's
            adaptation, FedAS's alignment and PartialFed's strategy, are SGD's, and so is what a
            paper has a formula for, such as APFL's mixture.
        local_lr: its learning rate; that of AdamW is a tenth of SGD's, or less.
        local_momentum: SGD's momentum.
        local_weight_decay: its weight decay; AdamW's is not part of the gradient.
        local_clip: bound of the gradient's norm in a local step; none by default.
    """

    local_steps: PositiveInt = 50
    local_epochs: PositiveInt | None = None
    batch_size: PositiveInt = 64
    local_optimizer: Literal["sgd", "adamw"] = "sgd"
    local_lr: PositiveFloat = 5e-3
    local_momentum: Momentum = 0.9
    local_weight_decay: NonNegativeFloat = 5e-5
    local_clip: PositiveFloat | None = None

    @property
    def batches(self) -> Batches:
        """What a server asks for in a round."""
        if self.local_epochs is not None:
            return Epochs(self.local_epochs, self.batch_size)
        return Steps(self.local_steps, self.batch_size)

    @property
    def local(self) -> Optimizer:
        """The optimiser of a client."""
        if self.local_optimizer == "adamw":
            return AdamW(self.local_lr, self.local_weight_decay, self.local_clip)
        return Sgd(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PersonalConfig(LocalConfig):
    """The same where a client goes on with parameters of its own, which nobody overwrites.

    That is the choice of an implementation, and published ones differ: the authors' code of
    LG-FedAvg and of FedBN makes a new optimiser in each round, that of pFedHN-PC keeps each
    client's. What methods are compared by must not depend on it, so the default is one for all.

    Attributes:
        keep_momentum: whether what the optimiser remembers of a client's own parameters, their
            momentum, outlives the round (:meth:`hyperfed.federation.Client.train_own`).
    """

    keep_momentum: bool = False


def count_classes(y: Tensor, classes: int) -> Tensor:
    """Returns the (classes,) number of each class among labels (...), int64.

    Labels below zero, which are ignored, do not count. ``torch.bincount`` waits for the GPU.
    """
    known = y.flatten().where(y.flatten() >= 0, classes)  # others stand behind the classes
    return y.new_zeros(classes + 1).scatter_add(0, known, torch.ones_like(known))[:classes]


def counts_of(rate: Tensor, examples: Tensor) -> Tensor:
    """Returns how many labels of each class clients have, from how many there are to an example.

    Which is what they tell: counts of a client with far more examples than the others would be far
    longer than theirs, as a lie is (``robust.reply_bound``).

    Args:
        rate: (C, classes), labels of a class over examples.
        examples: (C,) of each client.

    Returns:
        (C, classes) whole numbers, float64.
    """
    return (rate.double() * examples.to(rate.device)[:, None]).round()


class UnlabelledError(RuntimeError):
    """A step read the labels of a client that has none."""


class Batch:
    """Examples as the network takes them: ``x`` (B, ...) and, for a labelled client, ``y`` (B,)."""

    __slots__ = ("_y", "x")

    def __init__(self, x: Tensor, y: Tensor | None) -> None:
        self.x, self._y = x, y

    @property
    def labelled(self) -> bool:
        """Whether the client has labels."""
        return self._y is not None

    @property
    def y(self) -> Tensor:
        """(B,) labels."""
        if self._y is None:
            raise UnlabelledError(
                "this client has no labels, but the step reads them: use its inputs only"
            )
        return self._y


class OnePass(Iterator[Batch]):
    """Batches that are gathered as they are asked for, and gone afterwards.

    Who begins a pass after all are gone, or in a step that was asked without, would train on
    nothing, and is told.

    Args:
        batches: those that the server asked for; None where it asked for none.
    """

    def __init__(self, batches: Iterable[Batch] | None) -> None:
        self._asked = batches is not None
        self._batches, self._some, self._gone = iter(batches or ()), False, False

    def __iter__(self) -> "OnePass":
        if not self._asked:
            raise ValueError(
                "self.batches must be what the server asks for, but it asked this step without; "
                "ask it with batches=self.config.batches, or draw some, self.draw_batches(...)"
            )
        if self._gone:
            raise ValueError(
                "self.batches must be gone through once, but a step began again after all were "
                "gone; keep them, list(self.batches), or draw others, self.draw_batches(...)"
            )
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._gone = self._some  # of none, every pass is over all
            raise
        self._some = True
        return batch


Objective: TypeAlias = Callable[[Model, Batch], tuple[Tensor, Model]]
"""(model, batch) -> (scalar loss, the buffers after the forward pass, {} where there are none)."""


class Trained(NamedTuple):
    """What :func:`fit` returns: the model, and what its optimiser remembers of each parameter."""

    model: Model
    moments: Tree


def mean_loss(
    module: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    model: Model,
    batches: Iterable[Batch],
) -> Tensor:
    """Returns the mean loss of a model over all examples of some batches, a float64 scalar.

    The module is in evaluation mode, as when the model is used: batch-norm has the model's own
    statistics. There is no gradient.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in batches:
            total = total + loss(apply(module, model, batch.x), batch.y).double() * len(batch.x)
            count += len(batch.x)
    return total / count


def supervised(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Returns the objective loss(module(x), y) in training mode."""

    def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
        output, buffers = forward(module, model, batch.x)
        return loss(output, batch.y), buffers

    return objective


def balanced_softmax_loss(logits: Tensor, y: Tensor, count: Tensor, balance: float = 1.0) -> Tensor:
    """Returns the mean of -log(n_y^gamma exp(g_y) / sum_c n_c^gamma exp(g_c)).

    Cross-entropy for classes of unequal counts (Ren et al., NeurIPS 2020), as Fed-RoD uses it. An
    absent class has probability zero exactly: its logit neither counts nor gets a gradient.

    Args:
        logits: g, (B, outputs), those of the classes first; the others are of absent ones.
        y: (B,) labels, none of an absent class.
        count: n, (classes,) examples of each class.
        balance: gamma; at 0 every class counts alike, absent ones too.
    """
    count = F.pad(count, (0, logits.shape[1] - len(count)))
    return F.cross_entropy(logits + count.to(logits.dtype).pow(balance).log(), y)


def regression(
    module: nn.Module, target: Tensor, reduction: Literal["mean", "sum"] = "mean"
) -> Objective:
    """Returns the objective |module(x) - target|^2 / l in training mode; it reads no labels.

    The mean over the l entries, so that a learning rate serves targets of any length; or their sum.
    """

    def objective(model: Model, batch: Batch) -> tuple[Tensor, Model]:
        output, buffers = forward(module, model, batch.x)
        return F.mse_loss(output, target, reduction=reduction), buffers

    return objective


def proximal(
    objective: Objective, center: Model, strength: float, names: Collection[str]
) -> Objective:
    """Returns the objective plus strength/2 |model - center|^2 over the entries in ``names``."""

    def near(model: Model, batch: Batch) -> tuple[Tensor, Model]:
        loss, buffers = objective(model, batch)
        squares = [(model[name] - center[name]).square().sum() for name in names]
        return loss + strength / 2 * torch.stack(squares).sum(), buffers

    return near


def clip_norm(gradients: list[Tensor], bound: float) -> list[Tensor]:
    """Scales gradients, which are overwritten, to a joint Euclidean norm of at most ``bound``.

    The arithmetic of ``torch.nn.utils.clip_grad_norm_``: the factor is bound / (norm + 1e-6), at
    most 1.
    """
    norms = [vector_norm(g) for g in gradients] if mapped() else torch._foreach_norm(gradients)
    norm = vector_norm(torch.stack(norms))
    return _scaled(gradients, (bound / (norm + 1e-6)).clamp(max=1.0))


def fit(
    objective: Objective,
    model: Model,
    batches: Iterable[Batch],
    optimizer: Optimizer,
    *,
    trainable: Collection[str],
    moments: Tree | None = None,
    unclipped: Collection[str] = (),
) -> Trained:
    """Trains a model, one step a batch.

    Args:
        objective: the loss; extra terms are added by wrapping it.
        model: parameters and buffers; it is not changed.
        batches: one step each.
        optimizer: makes the steps.
        trainable: names of the parameters that move. No gradient flows into any other entry;
            buffers follow the forward passes.
        moments: of an earlier call, to go on with, for some or all parameters; the others begin as
            with a new optimiser.
        unclipped: parameters whose gradients neither count for the clipping norm nor are scaled.

    Returns:
        the trained model and the moments of its trained parameters.
    """
    names = [name for name in model if name in trainable]
    clipped = [index for index, name in enumerate(names) if name not in unclipped]
    weights = [model[name].detach().clone() for name in names]
    rest = {name: value.detach() for name, value in model.items() if name not in trainable}
    kept = clone(moments or {})
    remembered = [
        kept[name] if name in kept else optimizer.start(weight)
        for name, weight in zip(names, weights, strict=True)
    ]

    def loss(parameters: list[Tensor], batch: Batch) -> tuple[Tensor, Model]:
        return objective(rest | dict(zip(names, parameters, strict=True)), batch)

    for batch in batches:
        gradients, buffers = _gradients(loss, weights, batch)
        rest |= buffers
        if not names:  # the forward pass was all there is to do
            continue
        if optimizer.clip is not None and clipped:
            scaled = clip_norm([gradients[index] for index in clipped], optimizer.clip)
            for index, gradient in zip(clipped, scaled, strict=True):
                gradients[index] = gradient
        weights, remembered = optimizer.step(weights, gradients, remembered)
    trained = rest | dict(zip(names, weights, strict=True))
    after = dict(zip(names, remembered, strict=True))
    return Trained({name: trained[name] for name in model}, after)


def adam(gradient: Callable[[Model], Model], weights: Model, steps: int, lr: float) -> Model:
    """Descends by Adam (Kingma & Ba, ICLR 2015, algorithm 1) with its published constants.

    Like :func:`fit` it is a function of tensors and keeps no state.

    Args:
        gradient: of the weights, the same names and shapes.
        weights: to start from; they are not changed.
        steps: their number.
        lr: learning rate.

    Returns:
        the weights after them.
    """
    optimizer, names, moved = AdamW(lr), [*weights], [*weights.values()]
    moments = [optimizer.start(weight) for weight in moved]
    for _ in range(steps):
        by = gradient(dict(zip(names, moved, strict=True)))
        moved, moments = optimizer.step(moved, [by[name] for name in names], moments)
    return dict(zip(names, moved, strict=True))


def _gradients(
    loss: Callable[[list[Tensor], Batch], tuple[Tensor, Model]],
    weights: list[Tensor],
    batch: Batch,
) -> tuple[list[Tensor], Model]:
    """Returns the gradient of a loss by each weight, and the buffers after the forward pass.

    ``torch.func.grad`` would do, and does under ``vmap``, which has no other; through
    ``torch.autograd`` a step of a small network takes half the time.
    """
    if not weights:
        with torch.no_grad():
            return [], loss(weights, batch)[1]
    if mapped():
        gradients, (_, buffers) = grad_and_value(loss, has_aux=True)(weights, batch)
        return gradients, buffers
    leaves = [weight.detach().requires_grad_() for weight in weights]
    with torch.enable_grad():
        value, buffers = loss(leaves, batch)
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return _apart(found), {name: buffer.detach() for name, buffer in buffers.items()}


def _apart(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Returns gradients of which each can be overwritten, whatever becomes of the others.

    Autograd gives parameters that a network sums one tensor, or views of one, and the entries of
    what is summed up one place.
    """
    taken: set[int] = set()
    apart = []
    for gradient in gradients:
        place = gradient.untyped_storage()._cdata  # not every device tells an address
        alone = place not in taken and gradient.is_contiguous()
        apart.append(gradient if alone else gradient.clone())
        taken.add(place)
    return apart


def _scaled(tensors: list[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Returns tensors times a factor; they are overwritten where they can be."""
    if mapped():
        return [tensor * factor for tensor in tensors]
    torch._foreach_mul_(tensors, factor)
    return tensors


def _added(tensors: list[Tensor], others: list[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """Returns tensors + alpha * others; the tensors are overwritten where they can be."""
    if mapped():
        pairs = zip(tensors, others, strict=True)
        return [torch.add(tensor, other, alpha=alpha) for tensor, other in pairs]
    torch._foreach_add_(tensors, others, alpha=alpha)
    return tensors

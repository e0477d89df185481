"""A network as a function of its weights: the weights of a tree go in, and outputs come out."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.trees import Model


def apply(module: nn.Module, model: Model, x: Tensor, *more: Tensor, train: bool = False) -> Tensor:
    """Runs ``module`` with the weights of ``model``.

    Under ``train`` batch-norm has no statistics of a batch with one value for each channel, such as
    one example of an MLP. Where it keeps statistics, it takes such a batch as in evaluation, and
    they stay.

    Outputs that autocast made bfloat16 are float32: what is computed of them, such as distances or
    means, need not know in which precision the network was.

    Args:
        module: the architecture. Of its own weights only frozen ones are used. It must not be
            shared by threads.
        model: as ``trees.model_of`` gives it. Under ``train`` its buffers change, in place or for
            what the network assigns to them.
        x: (B, ...) what the network takes.
        more: further arguments of the network, where it takes any.
        train: the mode that batch-norm and dropout see.
    """
    found = _places_of(module)
    if module.training != train:
        module.train(train)
        found.hold_still()
    places = found.places
    own = [entries[key] for _, entries, key in places]
    try:
        for name, entries, key in places:
            entries[key] = model[name]
        with _spared(found.norms) if train and len(x) == 1 else nullcontext():
            output: Tensor = module(x, *more)
        if train:
            model |= found.assigned(model)
    finally:
        for (_, entries, key), tensor in zip(places, own, strict=True):
            entries[key] = tensor
    return _in_full(output)


def _in_full(output: Tensor) -> Tensor:
    return output.float() if output.dtype is torch.bfloat16 else output


@contextmanager
def _spared(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Has batch-norm in training mode take what has one value for each channel as in evaluation."""
    spared: list[nn.Module] = []

    def spare(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        (x,) = inputs  # (B, C, ...)
        if norm.training and x.numel() == x.shape[1]:
            spared.append(norm.eval())

    hooks = [norm.register_forward_pre_hook(spare) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in spared:
            norm.train()


class _Places:
    """Where a network keeps each entry of its model, found once, at its first use.

    From then on all its parts are in the mode of the network itself. They may come in another, such
    as a pretrained body in evaluation within a new network.

    ``torch.func.functional_call`` finds them anew at every call, which takes as long as the forward
    pass of a small network. A tensor that has two places has the name of the first.

    Attributes:
        places: (name, dictionary, key there) of each entry.
        buffers: names of those that are buffers.
        norms: its batch-norm that is not frozen.
    """

    def __init__(self, module: nn.Module) -> None:
        of = {id(tensor): name for name, tensor in trees.entries_of(module).items()}
        self.buffers = tuple(trees.buffers_of(module))
        self.places: list[tuple[str, dict[str, Any], str]] = [
            (of[id(tensor)], entries, key)
            for part in module.modules()
            for entries in (part._parameters, part._buffers)
            for key, tensor in entries.items()
            if id(tensor) in of
        ]
        frozen = set(trees.frozen_parts(module))
        trained = [part for part in module.modules() if part not in frozen]
        self.norms = [part for part in trained if isinstance(part, _BatchNorm)]
        self._of_buffers = [place for place in self.places if place[0] in self.buffers]
        self._still = [part for part in frozen if any(True for _ in part.buffers(recurse=False))]
        module.train(module.training)
        self.hold_still()

    def hold_still(self) -> None:
        """Puts frozen batch-norm back into evaluation mode: its statistics stay as they are."""
        for part in self._still:
            part.training = False

    def assigned(self, model: Model) -> Model:
        """Returns what a network that ran with a model has put in the place of buffers.

        Such as by ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)``, which writes nothing in place.
        What is of another shape, such as a mask made anew for longer inputs, is of this pass alone.
        """
        now = [(name, entries.get(key), model[name]) for name, entries, key in self._of_buffers]
        return {
            name: value.detach().to(before.dtype)
            for name, value, before in now
            if value is not before and isinstance(value, Tensor) and value.shape == before.shape
        }


_PLACES: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()


def _places_of(module: nn.Module) -> _Places:
    return _PLACES.get(module) or _PLACES.setdefault(module, _Places(module))


def outputs_and_features(
    module: nn.Module,
    model: Model,
    x: Tensor,
    y: Tensor | None = None,
    *,
    train: bool = False,
    through: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs ``module`` as :func:`apply` does and also returns what goes to its last layer.

    The last layer is the last module, as defined, that has parameters to train, or a weight that is
    made from such: the head of one layer.

    Args:
        module: the architecture; its own weights are not used. It must not be shared by threads.
        model: every parameter and buffer of ``module``. Under ``train`` buffers change as there.
        x: (B, ...) what the network takes.
        y: (B, T) labels of tokens. A linear layer's features of those that count nothing, whose
            label is below 0, are zero.
        train: the mode that batch-norm and dropout see.
        through: makes of the features what the last layer takes in their place.

    Returns:
        the outputs, and the features (B, F), flattened where the last layer takes more dimensions.

    Raises:
        UserError: what is last is not a layer but its adapter.
    """
    *_, (_, last) = trees.trained_parts(module)
    if last in trees.adapter_parts(module):
        raise UserError(
            f"features are what goes into a target's last layer, but of a {type(module).__name__} "
            "an adapter alone is trained there; name the head in its modules_to_save"
        )
    inputs: list[Tensor] = []

    def pass_on(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        features, *more = arguments
        inputs.append(features)
        return (features if through is None else through(features), *more)

    hook = last.register_forward_pre_hook(pass_on)
    try:
        output = apply(module, model, x, train=train)
    finally:
        hook.remove()
    features = _in_full(inputs[-1])
    by_token = isinstance(last, nn.Linear) and features.ndim == 3  # (B, T, F)
    if by_token and y is not None and features.shape[:2] == y.shape:
        features = features.where((y >= 0)[..., None], 0)
    return output, features.flatten(1)


def ends_in(module: nn.Module, layer: nn.Module, model: Model, x: Tensor) -> bool:
    """Returns whether a network gives the very output of one of its layers, which runs once.

    Args:
        module: the architecture; its own weights are not used. It must not be shared by threads.
        layer: a part of it, or itself.
        model: every parameter and buffer of ``module``.
        x: (B, ...) what the network takes.
    """
    outputs: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _, arguments, output: outputs.append(output))
        for part in (layer, module)
    ]
    try:
        with torch.no_grad():
            apply(module, model, x)
    finally:
        for hook in hooks:
            hook.remove()
    return len(outputs) == 2 and outputs[0] is outputs[1]


def vectors_of(network: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Returns what a layer makes of each example, without what its network computes behind it.

    Such as a softmax in ``forward``, which no layer says.

    Args:
        network: as it is, with its own weights. It must not be shared by threads.
        layer: a part of it, the last that runs and counts.
        x: (B, ...) what the network takes.

    Returns:
        (B, F) the layer's output; the network's own where that is no vector of each example, or
        another one in size.
    """
    given: list[Tensor] = []
    hook = layer.register_forward_hook(lambda _, arguments, output: given.append(output))
    try:
        output: Tensor = network(x)
    finally:
        hook.remove()
    return given[-1] if output.ndim == 2 and given[-1].shape == output.shape else output


def mean_output(module: nn.Module, model: Model, inputs: Iterable[Tensor]) -> Tensor:
    """Returns the mean of a network's outputs for some batches, each weighing as its examples.

    It is float64, in which one output more or less does not get lost among many, whatever the
    precision of the outputs. The module is in evaluation mode. There is no gradient.

    Args:
        module: the architecture; its own weights are not used. It must not be shared by threads.
        model: every parameter and buffer of ``module``.
        inputs: (B, ...) batches, B examples each.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for x in inputs:
            total = total + len(x) * apply(module, model, x).double()
            count += len(x)
    return total / count


def forward(module: nn.Module, model: Model, x: Tensor) -> tuple[Tensor, Model]:
    """Runs ``module`` in training mode as a function: ``model`` stays as it is.

    Args:
        module: the architecture. Threads must not share it.
        model: every parameter and buffer of ``module``.
        x: (B, ...) what the network takes.

    Returns:
        the output and the buffers after the pass, {} where there are none.
    """
    own = _with_own_buffers(module, model)
    output = apply(module, own, x, train=True)
    return output, {name: own[name] for name in _places_of(module).buffers}


def forward_with_features(
    module: nn.Module,
    model: Model,
    x: Tensor,
    y: Tensor | None = None,
    *,
    through: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Model]:
    """Runs ``module`` as :func:`forward` does and also returns what goes to its last layer.

    Returns:
        the output, the features (B, F) of :func:`outputs_and_features`, and the buffers.
    """
    own = _with_own_buffers(module, model)
    output, features = outputs_and_features(module, own, x, y, train=True, through=through)
    return output, features, {name: own[name] for name in _places_of(module).buffers}


def _with_own_buffers(module: nn.Module, model: Model) -> Model:
    """Returns a model with copies of its buffers: batch-norm writes its statistics in place."""
    return model | {name: model[name].clone() for name in _places_of(module).buffers}


def batch_statistics(module: nn.Module, model: Model, inputs: Iterable[Tensor]) -> Model:
    """Measures the buffers of batch-norm with the weights of ``model``, without labels.

    Args:
        module: the architecture; its own weights are overwritten. Threads must not share it.
        model: every parameter and buffer of ``module``.
        inputs: (B, ...) batches; each counts alike.

    Returns:
        all buffers of ``module``, as after a pass over the inputs, or the model's own where these
        have no statistics (:func:`apply`); {} where it has none.
    """
    if not _places_of(module).buffers:
        return {}
    norms = _places_of(module).norms
    momenta = [norm.momentum for norm in norms]
    trees.fill(module, model)
    for norm in norms:
        norm.momentum = None  # a cumulative mean, which begins with the next batch
        for own in (norm.running_mean, norm.running_var):
            if own is not None:
                own.nan_to_num_()  # it counts zero times, which infinity would outlive
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.zero_()
    buffers: Model = {name: value.clone() for name, value in trees.buffers_of(module).items()}
    try:
        with torch.no_grad():
            for x in inputs:
                _, buffers = forward(module, model | buffers, x)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return buffers

"""What tells the parts of a network apart: its head, its batch normalisation, its layers."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, dropwhile
from typing import NamedTuple

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from hyperfed import trees
from hyperfed.errors import UserError


def head_names(model: nn.Module, layers: int = 1) -> tuple[str, ...]:
    """Names the parameters of the head: of the last ``layers`` modules, as defined, that have any.

    FedPer and pFedHN-PC keep them on the client ("personal classifier", one layer).

    Args:
        model: any module.
        layers: modules in the head, from 0 (no head) to all that have parameters of their own.
            Modules that are frozen do not count.

    Returns:
        Names as in ``model.named_parameters()``, such as ``("fc3.weight", "fc3.bias")``.

    Raises:
        UserError: the model has fewer such modules, or adapters in their place, or ``layers`` is
            negative; or a weight of the head, or of what is defined behind it, is one of the rest
            of the model, too.
    """
    head = _head(model, layers)
    names = tuple(name for part in head for name in part.parameters)
    for name, first in _tied(model, head[0]) if head else ():
        if first not in names:
            raise UserError(
                f"a head of {layers} must have weights of its own, but {name} is {first}, too; "
                "untie them, or choose a method without a head"
            )
    return names


def head_entries(model: nn.Module, layers: int = 1) -> tuple[str, ...]:
    """Names all of a model that belongs to its head: what :func:`head_names` does, and the buffers.

    Who keeps a head that has batch-norm in it keeps its statistics with it: they are of what the
    client's own layers before it make.

    Args:
        model: any module.
        layers: modules in the head; those behind its first that have buffers alone are of it, too.

    Raises:
        UserError: as of :func:`head_names`.
    """
    if not head_names(model, layers):
        return ()
    return tuple(chain.from_iterable([*layers_of(model).values()][-layers:]))


def check_head(model: nn.Module) -> None:
    """Raises ``UserError`` where a model's last layer is none that is trained whole.

    What goes into that layer are the features. Its weights may be another's, too.
    """
    _head(model, 1)


def _head(model: nn.Module, layers: int) -> list["_Part"]:
    """Returns the last ``layers`` modules that have parameters; see :func:`head_names`."""
    owners = [part for part in _parts(model) if part.parameters]
    if not 0 <= layers <= len(owners):
        raise UserError(
            f"the head of a {type(model).__name__} must have 0 to {len(owners)} layers (modules "
            f"with parameters to train), got {layers}; choose such a number or another target"
        )
    head = owners[len(owners) - layers :]
    if adapters := [part.name for part in head if part.module in trees.adapter_parts(model)]:
        raise UserError(
            f"a head of {layers} must be layers that are trained whole, but {adapters[0]} belongs "
            "to an adapter; name the target's head in its modules_to_save, or choose a method "
            "without a head"
        )
    return head


def _tied(model: nn.Module, begin: "_Part") -> Iterator[tuple[str, str]]:
    """Yields (name there, name as defined first) of trained weights from a module on."""
    first = {id(value): name for name, value in trees.parameters_of(model).items()}
    behind = dropwhile(lambda named: named[1] is not begin.module, model.named_modules())
    for prefix, part in behind:
        for name, value in part.named_parameters(prefix, recurse=False):
            if id(value) in first:
                yield name, first[id(value)]


def last_linear(model: nn.Module, method: str) -> tuple[str, nn.Linear]:
    """Returns the name and the module of a model's last layer, which must be a plain linear one.

    Its weight is trained as it is: neither frozen nor made from something else.

    Args:
        model: any module.
        method: who asks, as its paper calls it.

    Raises:
        UserError: the layer that is the head of one layer (:func:`head_names`) is another.
    """
    name, _, entry = head_names(model)[0].rpartition(".")
    last = model.get_submodule(name)
    if not isinstance(last, nn.Linear) or entry != "weight" or is_parametrized(last):
        raise UserError(
            f"a target of {method} must end in an nn.Linear whose weight is trained as it is, got "
            f"{type(last).__name__}; choose another target or method"
        )
    return name, last


def batch_norm_names(model: nn.Module) -> tuple[str, ...]:
    """Names what belongs to batch normalisation, found by the type of a module, never by its name.

    FedBN keeps it on the client.

    Args:
        model: any module.

    Returns:
        Names of the parameters and buffers of every batch-norm layer (of one, two or three
        dimensions, synchronised or lazy), in the order of definition, without what is frozen.
        Instance, layer and group normalisation have no statistics of the data set and are not
        among them.
    """
    return tuple(
        name
        for part in _parts(model)
        if isinstance(part.module, nn.modules.batchnorm._BatchNorm)
        for name in part.parameters + part.buffers
    )


def mixing_norms(model: nn.Module) -> list[str]:
    """Names batch-norm that keeps no statistics, frozen or not.

    In evaluation, too, what it makes of an example depends on which others are in the batch.
    """
    return [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None
    ]


def layers_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Divides a model's entries into layers, as pFedLA weighs them.

    A layer is a module with parameters to train, in the order of definition: its weight, bias and
    buffers belong together. Buffers of a module without (a batch-norm without scale) belong to the
    layer before it, or to the first.

    Args:
        model: any module with parameters.

    Returns:
        {module name: names of its parameters and buffers}; each entry of the model, which nothing
        frozen is, is in one layer.
        The name of the model itself, where it has parameters of its own, is "".

    Raises:
        UserError: the model has no parameters to train.
    """
    layers: dict[str, tuple[str, ...]] = {}
    pending: tuple[str, ...] = ()
    for part in _parts(model):
        if part.parameters:
            layers[part.name] = pending + part.parameters + part.buffers
            pending = ()
        elif layers:
            layers[next(reversed(layers))] += part.buffers
        else:
            pending += part.buffers
    if not layers:
        raise UserError(
            "a target must have parameters to train to divide into layers, a "
            f"{type(model).__name__} has none; choose another target"
        )
    return layers


def own_entries(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Names what each layer of :func:`layers_of` holds itself.

    That is without the buffers that it has from modules without parameters.
    """
    return {part.name: part.parameters + part.buffers for part in _parts(model) if part.parameters}


def trained_layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, module) of those that have parameters to train, adapters' apart."""
    beside = trees.adapter_parts(network)
    return [(name, part) for name, part in trees.trained_parts(network) if part not in beside]


def check_widened(network: nn.Module, layer: str, of: str) -> None:
    """Refuses a frozen layer that takes what comes out of one that gets another width.

    The order of definition does not say what takes what: a frozen body may be defined behind the
    head. So it is the next frozen one that is looked at, and whether it takes as many features.

    Args:
        network: a target.
        layer: the name of a linear layer in it, which gets another number of outputs in a copy.
        of: what the copy is, such as "a deep set".

    Raises:
        UserError: there is such a layer, which could take no other width.
    """
    width = network.get_submodule(layer).out_features
    behind = dropwhile(lambda named: named[0] != layer, network.named_modules())
    frozen = set(trees.frozen_parts(network)) - trees.replaced_parts(network)
    for name, part in behind:
        if part in frozen and any(True for _ in part.parameters(recurse=False)):
            if width in (getattr(part, "in_features", None), getattr(part, "num_features", None)):
                raise UserError(
                    f"{of} gives {layer} of a target another width than {width}, which {name} "
                    "behind it could not take, as it is frozen; train it, too, or choose another "
                    "method"
                )
            return


class _Part(NamedTuple):
    """A module of a network, and what of the network's model it has itself."""

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def _parts(model: nn.Module) -> Iterator[_Part]:
    """Yields the modules of a network in the order of definition.

    What a weight is made from is of the module that has the weight.
    """
    trained, moving = trees.parameters_of(model), trees.buffers_of(model)  # a tied one once
    owner = trees.owners(model)
    parameters: defaultdict[nn.Module, list[str]] = defaultdict(list)
    buffers: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        own = owner.get(module, module)
        for held, named, kept in (
            (parameters, module.named_parameters, trained),
            (buffers, module.named_buffers, moving),
        ):
            held[own] += [name for name, _ in named(prefix=prefix, recurse=False) if name in kept]
    for prefix, module in model.named_modules():
        if module not in owner:
            yield _Part(prefix, module, tuple(parameters[module]), tuple(buffers[module]))

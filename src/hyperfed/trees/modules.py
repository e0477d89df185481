"""What of a network is its model, which is generated, trained, sent and averaged, and what is not.

A parameter with ``requires_grad=False`` is *frozen*: a part of the task, which everybody has from
the start. So are the buffers of a part of the network that is frozen whole.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from hyperfed.trees.arithmetic import Model


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns {name: parameter} of those that are trained, in the order of definition."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def is_trained(part: nn.Module) -> bool:
    """Returns whether a part of a network has parameters of its own that are trained."""
    return any(parameter.requires_grad for parameter in part.parameters(recurse=False))


def owners(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Returns {part: the module whose it is} of all that weights of a network are made from.

    Such as by ``torch.nn.utils.parametrizations.weight_norm``.
    """
    owner: dict[nn.Module, nn.Module] = {}
    for part in module.modules():
        if is_parametrized(part) and part not in owner:
            owner |= dict.fromkeys(part.get_submodule("parametrizations").modules(), part)
    return owner


def trained_parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (name, part) of those with parameters of their own to train, as they are defined.

    What a weight is made from is of the part that has the weight.
    """
    owner = owners(module)
    trained = {owner.get(part, part) for part in filter(is_trained, module.modules())}
    return [(name, part) for name, part in module.named_modules() if part in trained]


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns {name: buffer}, without those of parts that are frozen whole."""
    frozen = {id(buffer) for part in frozen_parts(module) for buffer in part.buffers(recurse=False)}
    return {name: value for name, value in module.named_buffers() if id(value) not in frozen}


def entries_of(module: nn.Module) -> Model:
    """Returns {name: value} of a network's model, parameters first: references, not copies."""
    return {**parameters_of(module), **buffers_of(module)}


def frozen_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the parts of a network that are frozen whole: they have parameters, all frozen.

    A part without parameters, such as a batch-norm without scale, goes with what it is in.
    """

    def within(part: nn.Module, frozen: bool) -> Iterator[nn.Module]:
        trained = [parameter.requires_grad for parameter in part.parameters()]
        if trained and all(trained):
            return  # as is all that is in it
        frozen = not any(trained) if trained else frozen
        if frozen:
            yield part
        for child in part.children():
            yield from within(child, frozen)

    return within(module, False)


def adapter_parts(module: nn.Module) -> set[nn.Module]:
    """Returns what of a network PEFT has put around or beside its layers, such as LoRA's factors.

    It is trained, but is nobody's first layer, nor a head. A head that PEFT trains whole
    (``modules_to_save``) is not among it.
    """
    if "peft" not in sys.modules:  # nobody has made an adapter
        return set()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in module.modules() if isinstance(part, BaseTunerLayer)]
    return {part for layer in layers for part in layer.modules()}


def replaced_parts(module: nn.Module) -> set[nn.Module]:
    """Returns what PEFT keeps of the layers of a network that it trains whole, and never runs.

    That is the original of each layer in ``modules_to_save``: frozen, beside the one in its place.
    """
    if "peft" not in sys.modules:
        return set()
    from peft.utils import ModulesToSaveWrapper

    wrapped = [part for part in module.modules() if isinstance(part, ModulesToSaveWrapper)]
    return {part for wrapper in wrapped for part in wrapper.original_module.modules()}


def frozen_of(module: nn.Module) -> Model:
    """Returns {name: value} of all that is frozen: references, not copies."""
    if all(parameter.requires_grad for parameter in module.parameters()):
        return {}  # at a glance, of most networks and before each round
    moving = entries_of(module)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: value.detach() for name, value in named.items() if name not in moving}


def copied(module: nn.Module) -> nn.Module:
    """Returns a copy of a network that shares the memory of what is frozen, which none may write.

    So a backbone is held once, however many copies compute with it. A copy that is moved to another
    device, or to another dtype, leaves that of the others where it is.
    """
    moving = {*map(id, entries_of(module).values())}
    alias: dict[int, Any] = {
        id(value): nn.Parameter(value.data, requires_grad=False)
        for value in module.parameters()
        if id(value) not in moving
    }
    alias |= {id(value): value.detach() for value in module.buffers() if id(value) not in moving}
    return copy.deepcopy(module, alias)


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Gives all floats of a network a dtype, in place, but what is frozen; and returns it."""
    for value in entries_of(module).values():
        if value.is_floating_point():
            value.data = value.data.to(dtype)
    return module


def model_of(module: nn.Module) -> Model:
    """Returns a copy of a module's trained parameters and its buffers, nothing that is frozen."""
    return {name: value.detach().clone() for name, value in entries_of(module).items()}


def fill_frozen(module: nn.Module, values: Model) -> nn.Module:
    """Copies values into all that is frozen of a module, and returns it."""
    for name, target in frozen_of(module).items():
        target.copy_(values[name])
    return module


def fill(module: nn.Module, model: Model) -> nn.Module:
    """Copies a model's values into a module, and returns it; what is frozen stays."""
    with torch.no_grad():
        for name, target in entries_of(module).items():
            target.copy_(model[name])
    return module

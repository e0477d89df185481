"""What of an object's attributes is state: modules, optimisers, tensors and trees of tensors.

Of a module, what is not frozen.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from hyperfed import trees
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree


def of(attributes: Mapping[str, Any], *, optimizers: bool = True) -> Tree:
    """Returns references to all tensors among some attributes, {name: tensor or tree}.

    Args:
        attributes: {name: value}; a value that is no state is left out.
        optimizers: with those of the optimisers.
    """
    return {
        name: _state(value)
        for name, value in attributes.items()
        if _is_state(value) and (optimizers or not isinstance(value, torch.optim.Optimizer))
    }


def _is_state(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(of, dict | Tensor) and _is_state(of) for of in value.values())
    return isinstance(value, nn.Module | torch.optim.Optimizer | Tensor)


def _state(value: Any) -> Tree | Tensor:
    if isinstance(value, nn.Module):
        frozen = trees.frozen_of(value)
        entries = value.state_dict().items()
        return {name: entry.detach() for name, entry in entries if name not in frozen}
    if isinstance(value, torch.optim.Optimizer):
        state = value.state_dict()["state"]
        return {
            str(key): {name: leaf for name, leaf in entry.items() if isinstance(leaf, Tensor)}
            for key, entry in state.items()
        }
    return value.detach() if isinstance(value, Tensor) else trees.detach(value)


def moved(attributes: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns attributes on a device: what learns is moved in place, other tensors are replaced.

    An optimiser stays as it is: it holds the tensors that it moves, and has no state of its own
    before the first step.
    """
    held = _held(attributes)

    def there(value: Any) -> Any:
        if isinstance(value, Tensor) and _learns(value, held):
            arrived = value.detach().to(device)
            if arrived.device != value.device:
                like = nn.Parameter if isinstance(value, nn.Parameter) else Tensor.requires_grad_
                swap_tensors(value, like(arrived, value.requires_grad))  # type: ignore[no-untyped-call]
            return value
        if isinstance(value, nn.Module | Tensor):
            return value.to(device)
        is_tree = isinstance(value, dict) and _is_state(value)
        return trees.tree_map(there, value) if is_tree else value

    return {name: there(value) for name, value in attributes.items()}


def loaded(attributes: Mapping[str, Any], saved: Tree) -> dict[str, Any]:
    """Returns what attributes are with what :func:`of` gave put back, {name: value}.

    Modules and optimisers are loaded in place, and so are tensors that learn: an optimiser goes on
    with those that it holds. Other tensors and trees are replaced, and may be new.

    Args:
        attributes: as they are.
        saved: of all or some of them, {name: tensor or tree}; not to be used any more.

    Raises:
        ValueError: what is to be loaded in place is not of the shape that is there.
    """
    held = _held(attributes)
    return {name: _loaded(attributes.get(name), value, held) for name, value in saved.items()}


def _held(attributes: Mapping[str, Any]) -> set[int]:
    """Returns the ids of all tensors that optimisers among some attributes hold."""
    optimizers = [of for of in attributes.values() if isinstance(of, torch.optim.Optimizer)]
    return {id(leaf) for of in optimizers for group in of.param_groups for leaf in group["params"]}


def _learns(leaf: Tensor, held: Collection[int]) -> bool:
    """Returns whether a tensor must stay the same one: an optimiser's, or one of gradients."""
    return id(leaf) in held or (leaf.requires_grad and leaf.is_leaf)


def _loaded(target: Any, state: Any, held: Collection[int]) -> Any:
    if isinstance(target, Tensor) and _learns(target, held):
        if target.shape != state.shape:
            came, there = tuple(state.shape), tuple(target.shape)
            raise ValueError(f"a tensor that learns must be of shape {there}, came {came}")
        with torch.no_grad():
            target.copy_(state)
        target.grad = None
        return target
    if isinstance(target, dict) and isinstance(state, dict):
        return {name: _loaded(target.get(name), leaf, held) for name, leaf in state.items()}
    if isinstance(target, nn.Module):
        frozen = trees.frozen_of(target)
        kept = {name: value for name, value in target.state_dict().items() if name in frozen}
        target.load_state_dict(kept | state)
        return target
    if isinstance(target, torch.optim.Optimizer):
        groups = target.state_dict()["param_groups"]
        # From the CPU: it moves what belongs elsewhere, and keeps what it counts on the CPU.
        entries = {int(key): trees.to(entry, CPU) for key, entry in state.items()}
        _check_shapes(target, entries)
        target.load_state_dict({"state": entries, "param_groups": groups})
        return target
    return state


def _check_shapes(optimizer: torch.optim.Optimizer, entries: Mapping[int, Tree]) -> None:
    """Finds out whether what an optimiser is to know of its parameters is of their shapes.

    Those that can be fused (SGD, Adam) keep such tensors alone, beside the number of steps, and as
    fused ones go through them without a look at their length, into whatever lies behind. Of others
    nobody can tell, and a step raises what does not fit.

    Raises:
        ValueError: it is not.
    """
    if "fused" not in optimizer.defaults:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, entry in entries.items():
        for name, leaf in entry.items():
            shape = () if name == "step" else tuple(parameters[key].shape)
            if tuple(leaf.shape) != shape:
                raise ValueError(f"{name} of parameter {key} must be of shape {shape}")

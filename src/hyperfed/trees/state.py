"""What of an object's attributes is state: modules, optimisers, tensors and trees of tensors.

Of a module, what is not frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree, leaves


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
        return all(isinstance(leaf, Tensor) for _, leaf in leaves(value))
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
    return value if isinstance(value, Tensor) else dict(value)


def moved(value: Any, device: torch.device) -> Any:
    """Moves a module in place, and returns it; a tensor or a tree is replaced.

    An optimiser stays as it is: it holds the parameters of modules, and has no state of its own
    before the first step.
    """
    if isinstance(value, nn.Module | Tensor):
        return value.to(device)
    return trees.to(value, device) if _is_state(value) and isinstance(value, dict) else value


def loaded(target: Any, state: Any) -> Any:
    """Loads a module or an optimiser in place, and returns it; a tensor or a tree replaces it.

    Raises:
        ValueError: what an optimiser is to know of a parameter is not of its shape.
    """
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

"""What a hypernetwork is to generate: the shapes of a target's parameters, by its size."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError

Shapes = Mapping[str, Mapping[str, torch.Size]]
"""``{target size: {parameter name: shape}}``."""


def shapes_of(module: nn.Module) -> dict[str, torch.Size]:
    """Returns ``{name: shape}`` of the module's trained parameters, as defined."""
    return {name: parameter.shape for name, parameter in trees.parameters_of(module).items()}


def spread_of(module: nn.Module) -> dict[str, float]:
    """Returns ``{name: root mean square}`` of the module's trained parameters, as they are now."""
    return {
        name: parameter.detach().double().square().mean().sqrt().item()
        for name, parameter in trees.parameters_of(module).items()
    }


def total(tensors: Mapping[str, torch.Size]) -> int:
    """Returns D, the number of parameters in all tensors."""
    return sum(shape.numel() for shape in tensors.values())


def unflatten(flat: Tensor, tensors: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Cuts ``flat`` (..., D) into the named tensors (..., *shape): views, not copies."""
    parts = flat.split_with_sizes([shape.numel() for shape in tensors.values()], dim=-1)
    return {
        name: part.reshape(flat.shape[:-1] + shape)
        for (name, shape), part in zip(tensors.items(), parts, strict=True)
    }


def check_shapes(shapes: Shapes) -> dict[str, dict[str, torch.Size]]:
    """Copies ``shapes``, or raises ``UserError`` if no hypernetwork can be built from them."""
    if not shapes:
        raise UserError("shapes must list at least one target size, got none; add {'base': ...}")
    for size, tensors in shapes.items():
        check_size(size)
        if total(tensors) == 0:
            raise UserError(
                f"a target must have parameters to generate, size {size!r} has none; "
                "pass shapes_of(a module with parameters)"
            )
    return {size: dict(tensors) for size, tensors in shapes.items()}


def check_size(size: str) -> None:
    """Raises ``UserError`` for a name of a target size that no part of a network can have."""
    if not size or "." in size or "/" in size or hasattr(nn.ModuleDict(), size):
        raise UserError(
            "a target size's name must be non-empty, without '.' and '/', and no attribute of "
            f"nn.ModuleDict (such as 'half'), got {size!r}; rename it"
        )


def of_size(shapes: Shapes, size: str) -> Mapping[str, torch.Size]:
    """Returns the tensors of one target size."""
    if size not in shapes:
        raise UserError(
            f"this hypernetwork generates the sizes {', '.join(shapes)}, got {size!r}; "
            "ask for one of them or list it in shapes"
        )
    return shapes[size]

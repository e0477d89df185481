"""Features, which are what enters a target's last layer, and their means for each class."""

import torch
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH, Outline, Split
from hyperfed.functional import outputs_and_features
from hyperfed.nets.anatomy import last_linear
from hyperfed.system.devices import in_full
from hyperfed.trees import Model


def linear_head(method: str, target: nn.Module) -> nn.Linear:
    """Returns the last layer of a target, whose ``in_features`` is the length of its features.

    Args:
        method: who asks, as its paper calls it.
        target: any module.

    Raises:
        UserError: that layer is not linear, or has not a weight and a bias that train as they are.
    """
    _, last = last_linear(target, method)
    if [parameter.requires_grad for parameter in last.parameters()] != [True, True]:
        raise UserError(
            f"a target of {method} must end in an nn.Linear with a bias that trains, as its "
            f"features are what enters that layer; got {last}: choose another target or method"
        )
    return last


def check_classes(method: str, outline: Outline) -> None:
    """Refuses a task whose examples are not of one class each.

    Args:
        method: who asks, as its paper calls it.
        outline: of the task.

    Raises:
        UserError: the task has no classes, or several labels for each example.
    """
    if not outline.classes:
        raise UserError(
            f"a task of {method} must have classes, this one has float targets; choose another "
            "method, or labels that are classes"
        )
    if outline.target_size > 1:
        raise UserError(
            f"a task of {method} must have one label for each example, this one has "
            f"{outline.target_size} side by side; choose another method, or a class for each "
            "combination of them"
        )
    check_one_label(method, outline)


def check_one_label(method: str, outline: Outline) -> None:
    """Refuses labels of tokens, where a method takes an example's features as one vector.

    Args:
        method: who asks, as its paper calls it.
        outline: of the task.

    Raises:
        UserError: the task has a label for every token.
    """
    if outline.of_tokens:
        raise UserError(
            f"a task of {method} must have one label for each example, whose features it takes as "
            "a whole, this one has a label for every token; choose another method, or one label "
            "for each example"
        )


def check_outputs(method: str, outline: Outline) -> None:
    """Refuses targets without an output for each class, where a method takes outputs for logits.

    Args:
        method: who asks, as a user calls it.
        outline: of the task.

    Raises:
        UserError: a target has other outputs, for a loss and a score of the user's own.
    """
    if not outline.of_each_class:
        raise UserError(
            f"a target of {method} must have an output for each of {outline.classes} classes, as "
            "it takes them for logits, but this task has fewer, for a loss and a score of its own; "
            "choose another method, or change the target's last layer, and loss and score with it"
        )


def features_of(module: nn.Module, model: Model, split: Split) -> Tensor:
    """Returns the features (m, F) of all examples of a split, in evaluation mode, no gradient."""
    with torch.no_grad():
        seen = [
            outputs_and_features(module, model, batch.x)[1]
            for batch in split.chunks(EVALUATION_BATCH)
        ]
    return torch.cat(seen)


def class_means(features: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Averages features by class.

    Args:
        features: (m, F).
        y: (m,) labels.
        classes: number of labels.

    Returns:
        the means (classes, F), zero for a class without examples, and the numbers (classes,) of
        examples, both in the dtype of the features.
    """
    member = (y == torch.arange(classes, device=y.device)[:, None]).to(features.dtype)
    count = member.sum(dim=1)
    with in_full(features.device):  # a client that computes in bfloat16 tells means in float32
        total = member @ features
    return total / count.clamp(min=1)[:, None], count

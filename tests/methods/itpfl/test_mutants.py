"""IT-PFL-HN, mutants: the checks of updates fail on them, so much they are worth."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.methods import itpfl
from hyperfed.methods.parts import hypernet_training
from methods.itpfl.checks import check_encoder, check_phase_one, check_phase_two


def flipped(sent: trees.Tree, trained: trees.Tree) -> trees.Tree:
    return trees.tree_map(torch.neg, trees.subtract(sent, trained))


def unweighted(tree: trees.Tree, weight: Tensor) -> trees.Tree:
    return trees.weighted_mean(tree, weight.sign())


def halved(model: Any, delta: Any, weight: Tensor) -> None:
    trees.pull_back(model, delta, weight / 2)


def summed_regression(module: Any, target: Tensor, reduction: str) -> Any:
    return lambda model, batch: ((module(batch.x) - target).square().sum(), {})


@pytest.mark.parametrize(
    ("place", "name", "mutant", "check"),
    [
        (itpfl, "subtract", flipped, lambda: check_phase_one([2])),
        (itpfl, "subtract", flipped, lambda: check_phase_two([2])),
        (hypernet_training, "pull_back", halved, lambda: check_phase_one([2])),
        (hypernet_training, "pull_back", halved, lambda: check_phase_two([2])),
        (itpfl, "weighted_mean", unweighted, lambda: check_encoder([0, 1, 2])),
        (itpfl, "regression", summed_regression, lambda: check_encoder([0, 1, 2])),
    ],
)
def test_a_wrong_update_is_caught(
    place: Any,
    name: str,
    mutant: Any,
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check()

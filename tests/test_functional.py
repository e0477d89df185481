"""Networks that run with the weights of a tree, against those that hold these weights."""

import pytest
import torch
from torch import nn

from hyperfed import functional, trees
from hyperfed.system.randomness import generator, seeded
from toys import FEATURES


class Tied(nn.Module):
    """One matrix in two places, a buffer, and a layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES, bias=False)
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(self.norm(self.first(x)))


def tied(name: str = "ours") -> Tied:
    with seeded(0, name):
        return Tied().double()


def test_a_network_runs_with_the_weights_of_a_tree_wherever_it_keeps_them() -> None:
    ours, other = tied(), tied("other")
    model = {name: value + 1.5 for name, value in trees.model_of(other).items()}
    assert "second.weight" not in model
    for name, parameter in other.named_parameters():
        parameter.data = model[name]
    other.norm.load_state_dict(
        {key: model[f"norm.{key}"].clone() for key in other.norm.state_dict()}
    )
    x = torch.randn(8, FEATURES, dtype=torch.float64, generator=generator(0, "x"))
    before = trees.model_of(ours)
    for train in (True, False):  # with the statistics of the batch, then with those updated
        output = functional.apply(ours, model, x, train=train)
        torch.testing.assert_close(output, other.train(train)(x))
        torch.testing.assert_close(model["norm.running_mean"], other.norm.running_mean)
    torch.testing.assert_close(trees.model_of(ours), before, rtol=0, atol=0)


def test_a_network_has_its_own_weights_again_after_an_error() -> None:
    ours = tied()
    before = trees.model_of(ours)
    model = trees.tree_map(torch.zeros_like, before)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional.apply(ours, model, torch.zeros(2, FEATURES + 1, dtype=torch.float64))
    del model["second.bias"]
    with pytest.raises(KeyError, match=r"second\.bias"):
        functional.apply(ours, model, torch.zeros(2, FEATURES, dtype=torch.float64))
    torch.testing.assert_close(trees.model_of(ours), before, rtol=0, atol=0)

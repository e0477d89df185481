"""Networks made of a target's layers are refused where these do not run as they are defined."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed.errors import UserError
from hyperfed.methods import headstart, itpfl, pefll
from hyperfed.nets.trial import check_it_runs
from hyperfed.task import Outline
from hyperfed.training import Batch
from toys import make_task

TOKENS = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2])


class PositionsFirst(nn.Module):
    """Defines the embedding of positions, one for all examples, before that of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.token = nn.Embedding(5, 4), nn.Embedding(9, 4)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x) + self.position(torch.arange(x.shape[1]))
        logits: Tensor = self.head(self.body(hidden).relu().mean(dim=1))
        return logits


class EachPlace(nn.Module):
    """Takes the places of all examples as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.reshape(-1, 2)).relu().reshape(len(x), -1, 4)
        logits: Tensor = self.head(hidden.mean(dim=1))
        return logits


class Attending(nn.Module):
    """Attention behind the first linear layer, with which a deep set ends."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 4)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attention(self.body(x)).mean(dim=1))
        return logits


class HeadFirst(nn.Module):
    """Defines what runs last before what runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).relu())
        return logits


FLOATS = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("method", "net", "x"),
    [
        (pefll, PositionsFirst, TOKENS),
        (headstart, PositionsFirst, TOKENS),
        (pefll, EachPlace, FLOATS),
        (itpfl, EachPlace, FLOATS),
        (itpfl, Attending, FLOATS),
        (pefll, HeadFirst, FLOATS[:, 0].repeat(1, 2)),
    ],
)
def test_layers_that_do_not_run_as_they_are_defined_are_refused_before_training(
    method: Any, net: type[nn.Module], x: Tensor
) -> None:
    assert net()(x).shape == (3, 3)
    outline = Outline({"base": net()}, 8, 3, trial=Batch(x, LABELS))
    with pytest.raises(UserError, match=f"layers of {net.__name__} must give .* but fails") as told:
        method.Client.networks(outline, method.Config())
    assert ('descriptor_net = "linear"' in str(told.value)) == (method is not itpfl)
    if method is not itpfl:
        method.Client.networks(outline, method.Config(descriptor_net="linear", **OTHERS[method]))


OTHERS: dict[Any, dict[str, Any]] = {pefll: {}, headstart: {"label_dropout": 0.0}}


def test_what_gives_another_shape_is_refused_and_what_the_target_cannot_take_tells_nothing() -> (
    None
):
    target, x = nn.Linear(4, 3), torch.zeros(3, 4)
    said = {"of": "a copy", "instead": "or choose another"}
    check_it_runs(nn.Linear(4, 2), target, x, gives=(3, 2), **said)
    with pytest.raises(UserError, match=r"must give \(3, 5\) .* but gives \(3, 2\);"):
        check_it_runs(nn.Linear(4, 2), target, x, gives=(3, 5), **said)
    check_it_runs(nn.Linear(4, 2), target, torch.zeros(3, 7), gives=(3, 5), **said)


def test_as_many_examples_are_tried_as_an_example_is_not_long() -> None:
    """Or layers that take the one for the other would run, and tell of each example's label."""
    task = make_task()
    for length, count in ((2, 3), (3, 4), (4, 3)):
        object.__setattr__(task, "x", torch.zeros(8, length))
        trial = task.outline().trial
        assert trial is not None
        assert trial.x.shape == (count, length)
        assert len(trial.y) == count


def test_made_up_examples_that_cannot_be_made_ready_are_not_tried() -> None:
    task = make_task()

    def transform(x: Tensor) -> Tensor:
        raise ValueError("not mine")

    object.__setattr__(task, "transform", transform)
    assert task.outline().trial is None


def test_a_trial_changes_no_draw() -> None:
    torch.manual_seed(0)
    make_task().outline()
    found = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(3))

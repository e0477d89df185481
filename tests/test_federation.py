"""What the contract itself computes: a client's own evaluation."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed import federation, trees
from hyperfed.data.own import mean_squared_error, minus_squared_error
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.trees import Tree
from probe import Client, engine_of
from toys import CLASSES, FEATURES, logits, make_task


@pytest.mark.parametrize("batch", [federation.EVALUATION_BATCH, 4])
def test_evaluation_counts_by_hand(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all examples, in whatever batches they go through the model."""
    monkeypatch.setattr(federation, "EVALUATION_BATCH", batch)
    task = make_task()
    model = task.outline().initial()
    cohort = engine_of(task).cohort([1, 0], 0, training=False)
    counts = cohort.ask(Client.evaluate, model)
    for position, client in enumerate([1, 0]):
        for name, split in (("val", task.val), ("test", task.test)):
            x, y = task.x[split[client]], task.y[split[client]]
            output = logits(task.models["base"], model, x)
            mine = trees.take(counts[name], position)
            assert mine["count"] == len(y)
            assert mine["correct"] == (output.argmax(1) == y).sum()
            loss = nn.functional.cross_entropy(output, y, reduction="sum")
            torch.testing.assert_close(mine["loss"], loss.detach())


@pytest.mark.parametrize("asked", [("f1", "calibration"), ("r2",)])
def test_what_is_counted_beside_is_of_all_batches_together(
    asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"loss": mean_squared_error, "score": minus_squared_error, "classes": 0}
    task = make_task(lambda: nn.Linear(FEATURES, 1).double(), **numbers)
    task = make_task() if asked != ("r2",) else replace(task, y=task.y.double())
    task, found = replace(task, metrics=asked), []
    for batch in (federation.EVALUATION_BATCH, 4):
        monkeypatch.setattr(federation, "EVALUATION_BATCH", batch)
        cohort = engine_of(task).cohort([0], 0, training=False)
        found.append(cohort.ask(Client.evaluate, task.outline().initial())["test"])
    assert found[0]["count"] > 4
    torch.testing.assert_close(*found)


def test_outputs_beyond_the_classes_are_absent_at_every_client() -> None:
    """A model that says what is no class first, and class 1 then."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logit = nn.Parameter(torch.tensor([-3.0, 1.0, -2.0, 2.0, 5.0])[: CLASSES + 2])

        def forward(self, x: Tensor) -> Tensor:
            return self.logit.expand(len(x), CLASSES + 2)

    task = make_task(Wide)
    task.y[task.train[0]] = torch.arange(len(task.train[0])) % 2
    task.y[task.test[0]] = 1
    counts = (
        engine_of(task)
        .cohort([0], 0, training=False)
        .ask(Client.evaluate, task.outline().initial())["test"]
    )
    found = [counts[name].item() for name in ("correct", "masked_correct", "zeroed_correct")]
    assert found == [0, 6, 6]


def test_a_clients_names_are_in_the_models_order() -> None:
    """What is summed over them is the same in each process; that of a set is not."""

    class Ordered(federation.Client):
        @step
        def in_order(self) -> Tree:
            names = ([*self.parameters], [*self.buffers])
            return {"right": torch.tensor(names == (trained, moving))}

    net = nn.Sequential(*(nn.BatchNorm1d(FEATURES) for _ in range(8)), nn.Linear(FEATURES, CLASSES))
    trained = [name for name, _ in net.named_parameters()]
    moving = [name for name, _ in net.named_buffers()]
    engine = LoopEngine(make_task(lambda: net), Ordered, None, seed=0)
    assert engine.cohort([0], 0, training=False).ask(Ordered.in_order)["right"].all()


class OneLogit(nn.Module):
    """Says by a sign which of two classes an example has."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.head, self.flat = nn.Linear(FEATURES, 1), flat

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)[:, 0] if self.flat else self.head(x)


@pytest.mark.parametrize(("flat", "called"), [(True, "right"), (False, "accuracy")])
def test_without_an_output_for_each_class_none_is_taken_out(flat: bool, called: str) -> None:
    def right(output: Tensor, y: Tensor) -> Tensor:
        return ((output.reshape(y.shape) > 0).long() == y).double()

    right.__name__ = called  # which tells nothing of the outputs

    def loss(output: Tensor, y: Tensor) -> Tensor:
        logit = output.reshape(y.shape)
        return nn.functional.binary_cross_entropy_with_logits(logit, y.to(logit))

    task = make_task(lambda: OneLogit(flat=flat), classes=2, loss=loss, score=right)
    task.y.clamp_(max=1)
    task.y[task.train[0]] = 1  # class 0 is absent there
    model = task.outline().initial()
    counts = engine_of(task).cohort([0], 0, training=False).ask(Client.evaluate, model)["test"]
    x, y = task.x[task.test[0]], task.y[task.test[0]]
    expected = (((x @ model["head.weight"].T + model["head.bias"])[:, 0] > 0) == y).sum()
    found = [counts[name].item() for name in ("correct", "masked_correct", "zeroed_correct")]
    assert found == [expected] * 3
    with pytest.raises(UserError, match=r"f1 needs an output for each of 2 classes, .* 'base'"):
        hyperfed.train("local", task, metrics=["f1"], rounds=1)


class Constant(nn.Module):
    """Always says class 0."""

    def __init__(self) -> None:
        super().__init__()
        # All logits negative: a mask at zero instead of minus infinity would win.
        self.logit = nn.Parameter(torch.tensor([-1.0, -2.0, -3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logit.log_softmax(dim=0).expand(len(x), CLASSES)


def test_masking_takes_absent_classes_out_at_minus_infinity() -> None:
    """A model that always says class 0 is right under the mask where class 0 is absent."""
    task = make_task(Constant)
    task.y[task.train[0]] = 1
    task.y[task.test[0]] = 1
    cohort = engine_of(task).cohort([0], 0, training=False)
    counts = cohort.ask(Client.evaluate, task.outline().initial())["test"]
    assert counts["correct"].item() == 0
    assert counts["masked_correct"].item() == 6
    assert counts["zeroed_correct"].item() == 0  # at zero they win, as PeFLL's authors count
    # What is absent is so from training: from test labels it could be told what is asked.
    task.y[task.test[0]] = 2
    task.y[task.val[0]] = 2
    counts = cohort.ask(Client.evaluate, task.outline().initial())
    assert [counts[split]["masked_correct"].item() for split in ("val", "test")] == [0, 0]
    task.y[task.test[0]] = 0
    counts = cohort.ask(Client.evaluate, task.outline().initial())["test"]
    assert [counts[f"{name}_correct"].item() for name in ("masked", "zeroed")] == [0, 6]


def test_what_a_network_with_log_probabilities_has_at_zero_is_probabilities() -> None:
    found = []
    for loss in (nn.functional.nll_loss, nn.functional.cross_entropy):
        task = make_task(Constant, loss=loss)
        task.y[task.train[0]] = 1
        task.y[task.test[0]] = 1
        model = task.outline().initial()
        counts = engine_of(task).cohort([0], 0, training=False).ask(Client.evaluate, model)
        found.append(counts["test"]["zeroed_correct"].item())
    assert found == [6, 0]


def test_a_servers_state_may_be_named_as_a_default_of_its_class_and_not_as_a_method() -> None:
    class Server(federation.Server):
        total: ClassVar[trees.Tree] = {}

    server = Server(make_task().outline(), None)
    server.load({"total": {"sum": torch.ones(2)}})
    assert server.state()["total"]["sum"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="must not be named as a method, came personalize"):
        server.load({"personalize": {}})

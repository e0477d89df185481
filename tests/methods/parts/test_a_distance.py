"""The A-distance, against logistic regression on pooled inputs in one piece."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import federation
from hyperfed.engines import EngineCohort
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.federation import Each
from hyperfed.methods.parts import a_distance
from hyperfed.task import Task
from hyperfed.trees import Model, Tree
from toys import CLASSES, FEATURES, make_task

KNOWN, NOVEL = (0, 1, 2), (3, 4)
EXAMPLES = (12, 7, 20, 9, 30)
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
STEPS = 7


class Client(federation.Client):
    """A client of some method that measures distances."""

    input_moments = a_distance.input_moments
    separation_gradient = a_distance.separation_gradient
    separation_error = a_distance.separation_error


def shifted(task: Task, shift: dict[int, float], scale: float = 1.0) -> Task:
    """The task with all inputs of some clients moved by (shift, shift, ...)."""
    x = task.x.clone()
    for client, by in shift.items():
        for split in (task.train, task.val, task.test):
            x[split[client]] += by
    return dataclasses.replace(task, x=x * scale)


def toy(examples: tuple[int, ...] = EXAMPLES, scale: float = 1.0) -> Task:
    """Three known clients and two novel ones; 1 and 4 are shifted alike, 2 the other way."""
    task = make_task(examples=examples, novel=2, unlabelled=True)
    return shifted(task, {1: 1.0, 4: 1.0, 2: -1.5}, scale)


def cohorts(task: Task) -> tuple[EngineCohort, EngineCohort]:
    engine = LoopEngine(task, Client, None, seed=0)
    novel = engine.cohort(list(NOVEL), 0, training=False)
    return novel, novel.known


def halves(task: Task, client: int) -> tuple[Tensor, Tensor]:
    x = task.x[task.train[client]]
    return x[::2], x[1::2]


def pair_loss(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The mean over two equal halves of the logistic loss, by PyTorch's own function."""
    logits, label = [side @ weight + bias for side in (x, other)], (1.0, 0.0)
    losses = [
        F.binary_cross_entropy_with_logits(logit, torch.full_like(logit, target))
        for logit, target in zip(logits, label, strict=True)
    ]
    return torch.stack(losses).mean()


def centralised(task: Task, novel: int, known: int, steps: int) -> tuple[Tensor, Tensor]:
    """Gradient descent on the pooled inputs of a pair."""
    x, other = halves(task, novel)[0], halves(task, known)[0]
    square = torch.stack([side.square().sum(1).mean() for side in (x, other)]).mean() + 1
    weight = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        gradients = torch.autograd.grad(pair_loss(x, other, weight, bias), (weight, bias))
        with torch.no_grad():
            weight -= 4 / square * gradients[0]
            bias -= 4 / square * gradients[1]
    return weight.detach(), bias.detach()


def check_separation(steps: int = STEPS) -> None:
    task = toy()
    found = a_distance.separate(*cohorts(task), steps)
    assert found["weight"].shape == (len(NOVEL), len(KNOWN), FEATURES)
    for row, novel in enumerate(NOVEL):
        for column, known in enumerate(KNOWN):
            weight, bias = centralised(task, novel, known, steps)
            torch.testing.assert_close(found["weight"][row, column], weight, **EXACT)
            torch.testing.assert_close(found["bias"][row, column], bias, **EXACT)


def check_distance() -> None:
    """2 (1 - 2 err), err the mean of two error rates on inputs that nothing was fitted to."""
    task = toy()
    found = a_distance.a_distance(*cohorts(task), STEPS)
    expected, apart = np.zeros((len(NOVEL), len(KNOWN))), 0
    for row, novel in enumerate(NOVEL):
        for column, known in enumerate(KNOWN):
            weight, bias = (value.numpy() for value in centralised(task, novel, known, STEPS))
            x, other = halves(task, novel)[1].numpy(), halves(task, known)[1].numpy()
            missed, mistaken = np.mean(x @ weight + bias <= 0), np.mean(other @ weight + bias > 0)
            apart += missed != mistaken
            expected[row, column] = 2 * (1 - 2 * (missed + mistaken) / 2)
    assert apart  # so that one side alone would show
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, STEPS])
def test_federated_training_is_logistic_regression_on_the_pooled_inputs(steps: int) -> None:
    check_separation(steps)


def test_the_distance_is_that_of_two_error_rates() -> None:
    check_distance()


def test_clients_of_one_distribution_are_nearer_than_of_different_ones() -> None:
    task = toy((200,) * 5)
    distance = a_distance.a_distance(*cohorts(task), 50)
    assert distance.argmin(dim=1).tolist() == [0, 1]
    assert distance[0, 0] < 0.4 < distance[0, 1]
    assert distance[1, 1] < 0.4 < distance[1, 0] < distance[1, 2]
    assert distance.max() > 1.8


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_every_step_lowers_the_loss_whatever_the_scale_of_the_inputs(scale: float) -> None:
    task = toy(scale=scale)
    losses = []
    for steps in (1, 2, 5, 20):
        found = a_distance.separate(*cohorts(task), steps)
        weight, bias = found["weight"][1, 2], found["bias"][1, 2]
        losses.append(pair_loss(halves(task, 4)[0], halves(task, 2)[0], weight, bias).item())
    assert np.log(2) > losses[0] > losses[1] > losses[2] > losses[3]


def test_a_client_alone_sees_the_same_as_one_of_many() -> None:
    task = toy()
    together = a_distance.a_distance(*cohorts(task), STEPS)
    engine = LoopEngine(task, Client, None, seed=0)
    alone = engine.cohort([4], 0, training=False)
    torch.testing.assert_close(
        a_distance.a_distance(alone, alone.known, STEPS), together[1:], **EXACT
    )


def test_what_travels_are_classifiers_moments_and_errors_and_no_input() -> None:
    task = toy()
    novel, known = cohorts(task)
    a_distance.a_distance(novel, known, STEPS)
    label, moments = 4, 8 * (FEATURES + 1)

    def messages(pairs: int) -> list[tuple[str, int, int]]:
        classifiers = 8 * pairs * (FEATURES + 1)
        fit = ("separation_gradient", classifiers + label, classifiers)
        last = ("separation_error", classifiers + label, 8 * pairs)
        return [("input_moments", 0, moments), *[fit] * (STEPS - 1), last]

    counted = novel.state.exchanges
    for client in (*KNOWN, *NOVEL):
        own = [(e.step, e.down, e.up) for e in counted if e.client == client]
        assert own == messages(len(KNOWN if client in NOVEL else NOVEL))


def test_a_known_client_that_is_lost_is_infinitely_far() -> None:
    task = shifted(toy(), {1: float("nan")})
    novel, known = cohorts(task)
    distance = a_distance.a_distance(novel, known, STEPS)
    assert list(known.state.lost) == [1]
    assert distance.isinf().tolist() == [[False, True, False]] * 2


def test_tokens_and_single_examples_are_inputs_too() -> None:
    task = toy((1, 7, 20, 9, 1))
    tokens = (100 * task.x).long()
    found = a_distance.a_distance(*cohorts(dataclasses.replace(task, x=tokens)), 20)
    assert found.isfinite().all()
    assert found[1, 0] == 2  # one input each, on both sides of the line


def test_a_large_client_takes_part_with_inputs_from_all_over_its_data() -> None:
    count = 3 * a_distance.INPUTS
    x = torch.arange(count, dtype=torch.float64)[:, None]
    rows, none = torch.arange(count), torch.arange(0)
    net = torch.nn.Linear(1, CLASSES).double()
    task = Task("many", x, rows, [rows], [none], [none], {"base": net}, CLASSES)
    cohort = LoopEngine(task, Client, None, seed=0).cohort([0], 0, training=False)
    mean = cohort.ask(Client.input_moments)["mean"].item()
    assert mean == np.arange(0, count, 4).mean()  # every other of every second


# Mutants: the checks above fail on them, so much they are worth


def one_side(asked: Any, novel: Any, known: Any, classifier: Model) -> Tree:
    """What the novel client says, for both."""
    if asked is not a_distance.separation_error:
        return both(asked, novel, known, classifier)
    reply: Tree = novel.ask(asked, Each(classifier), {"label": torch.tensor(1.0)})
    return reply


def by_examples(asked: Any, novel: Any, known: Any, classifier: Model) -> Tree:
    """The pooled mean, in which the client with more data weighs more."""
    ours, theirs = 2 * novel.weight[:, None], 2 * known.weight
    share = ours / (ours + theirs)
    mean = both(asked, novel, known, classifier)
    mine: Tree = novel.ask(asked, Each(classifier), {"label": torch.tensor(1.0)})
    return {
        name: leaf
        + (2 * share - 1).view(*share.shape, *[1] * (leaf.dim() - 2)) * (mine[name] - leaf)
        for name, leaf in mean.items()
    }


def not_transposed(asked: Any, novel: Any, known: Any, classifier: Model) -> Tree:
    """Known clients answer for the wrong pairs."""
    rolled = {name: leaf.roll(1, 0) for name, leaf in classifier.items()}
    return both(asked, novel, known, rolled)


both = a_distance._both


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (one_side, check_distance),
        (by_examples, check_separation),
        (not_transposed, check_separation),
    ],
)
def test_mutant_sides_are_caught(
    mutant: Any, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a_distance, "_both", mutant)
    with pytest.raises(AssertionError):
        check()


def test_mutant_errors_on_what_was_fitted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = a_distance._halves
    monkeypatch.setattr(a_distance, "_halves", lambda client: (right(client)[0],) * 2)
    with pytest.raises(AssertionError):
        check_distance()


def test_in_bfloat16_clients_answer_in_float32() -> None:
    """What is like the classifier is of its precision, or it is no answer."""
    task = toy()
    models = {"base": task.models["base"].float()}
    task = dataclasses.replace(task, x=task.x.float(), models=models)
    engine = LoopEngine(task, Client, None, seed=0, precision="bf16")
    novel = engine.cohort(list(NOVEL), 0, training=False)
    classifier = a_distance.separate(novel, novel.known, STEPS)
    assert {value.dtype for value in classifier.values()} == {torch.float32}
    assert a_distance.a_distance(novel, novel.known, STEPS).argmin(dim=1)[1] == 1

"""Your own arrays: splits per client, conversions, and every problem told in one error."""

import math
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from hyperfed import trees
from hyperfed.data.networks import Network
from hyperfed.data.newcomer import newcomer
from hyperfed.data.own import Task, from_arrays, from_frame, mean_squared_error, minus_squared_error
from hyperfed.errors import UserError
from own_data import CLIENT, RNG, X, Y, linear
from toys import Federation


def test_each_client_is_split_and_clients_are_numbered_by_first_appearance():
    task = from_arrays(X, Y, client=CLIENT, model=linear(), val=0.2, test=0.2)
    assert isinstance(task, Task)
    assert task.clients == 3
    assert [len(own) for own in task.train] == [15, 30, 15]
    assert [len(own) for own in task.val] == [5, 10, 5]
    assert [len(own) for own in task.test] == [5, 10, 5]
    for client, name in enumerate(["zoe", "ann", "bob"]):
        own = torch.cat([split[client] for split in (task.train, task.val, task.test)])
        assert sorted(own.tolist()) == np.flatnonzero(name == CLIENT).tolist()
    assert (task.classes, task.novel, task.sizes) == (3, 0, ("base",) * 3)


def test_the_contract_delegates_here():
    task = Task.from_arrays(X, Y, client=CLIENT.tolist(), model=linear(), novel=1, seed=3)
    direct = from_arrays(X, Y, client=CLIENT, model=linear(), novel=1, seed=3)
    assert task.fingerprint == direct.fingerprint
    assert list(task.novel_ids) == [2]


def test_the_data_decide_the_fingerprint():
    options = {"client": CLIENT, "model": linear()}
    made = [from_arrays(*data, **options) for data in ((X, Y), (X + 1, Y), (X, (Y + 1) % 3))]
    assert len({task.fingerprint for task in made}) == 3


def test_novel_clients_have_no_labels_where_that_is_said():
    task = from_arrays(X, Y, client=CLIENT, model=linear(), novel=1, unlabelled=True)
    assert task.unlabelled
    assert not from_arrays(X, Y, client=CLIENT, model=linear(), novel=1).unlabelled


def test_a_seed_decides_the_split():
    fingerprints = {
        from_arrays(X, Y, client=CLIENT, model=linear(), seed=seed).fingerprint
        for seed in (0, 0, 1)
    }
    assert len(fingerprints) == 2


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"score": lambda o, y: (o.argmax(1) == y).float().mean()}, r"score .*, got shape \(\)"),
        ({"score": lambda o, y: o}, r"score .* shape \(2,\), got shape \(2, 3\) for 2 examples"),
        ({"score": lambda o, y: 0.5}, "score must return a number of each example, .*, got 0.5"),
        ({"score": lambda o, y: o[:, 9]}, r"score must take .*, but fails on it \(IndexError"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"loss .* shape \(\), got shape \(2,\)"),
        ({"loss": lambda o, y: o.sum().item()}, "loss must return one number of a batch, .*, got"),
        ({"loss": lambda o, y: o.sum().detach()}, "must return what can be differentiated"),
        (
            {"loss": nn.NLLLoss(ignore_index="no")},
            r"loss must take .*, but fails on it \(TypeError",
        ),
    ],
)
def test_a_loss_and_a_score_are_tried(functions, message):
    with pytest.raises(UserError, match=message):
        from_arrays(X, Y, client=CLIENT, model=linear(), **functions)


def test_a_loss_and_a_score_of_ones_own_are_taken():
    task = from_arrays(
        X, Y, client=CLIENT, model=linear(), loss=nn.CrossEntropyLoss(), score=lambda o, y: o[:, 0]
    )
    assert task.score(torch.ones(5, 3), torch.zeros(5)).shape == (5,)


def test_sizes_may_be_called_by_numbers():
    model = {1: linear(), 2: linear()}
    task = from_arrays(X, Y, client=CLIENT, model=model, size=[1, 2, 1])
    assert task.sizes == ("1", "2", "1")
    with pytest.raises(UserError, match="size must be one of the models 1, 2, got 3"):
        from_arrays(X, Y, client=CLIENT, model=model, size=[1, 2, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"novel": "2"}, "novel must be a whole number of clients, .*, got novel=2 of 3"),
        ({"novel": ["zoe"]}, r"got novel=\['zoe'\] of 3 clients"),
        ({"val": "0.1"}, "val and test must be 0 or more .*, got 0.1 and 0.15"),
    ],
)
def test_what_must_be_a_number_is_told_of(options, message):
    with pytest.raises(UserError, match=message):
        from_arrays(X, Y, client=CLIENT, model=linear(), **options)


def test_inputs_take_the_precision_of_the_model():
    assert from_arrays(X, Y, client=CLIENT, model=linear()).x.dtype == torch.float32
    assert from_arrays(X, Y, client=CLIENT, model=linear().double()).x.dtype == torch.float64


def test_what_is_frozen_belongs_to_the_task():
    """A run must not be resumed on another backbone; weights that are trained say nothing."""
    fingerprints = []
    for seed, freeze in ((0, True), (0, True), (1, True), (0, False), (1, False)):
        torch.manual_seed(seed)
        model = nn.Sequential(linear(4).requires_grad_(not freeze), nn.Linear(4, 3))
        fingerprints.append(from_arrays(X, Y, client=CLIENT, model=model).fingerprint)
    first, again, other, trained, others = fingerprints
    assert first == again
    assert trained == others
    assert len({first, other, trained}) == 3


def test_inputs_take_the_precision_of_what_is_trained():
    model = nn.Sequential(linear(4).requires_grad_(False), nn.Linear(4, 3).double())
    with pytest.raises(UserError, match=r"\(2, 4\) torch.float64, but fails"):
        from_arrays(X, Y, client=CLIENT, model=model)


def test_a_task_has_its_own_copy_of_the_model():
    network = linear()
    task = from_arrays(X, Y, client=CLIENT, model=network)
    with torch.no_grad():
        network.weight.zero_()
    assert task.models["base"].get_parameter("weight").any()


def test_a_function_makes_the_model_from_the_seed():
    first, again, other = (
        from_arrays(X, Y, client=CLIENT, model=linear, seed=seed)
        .models["base"]
        .get_parameter("weight")
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_several_sizes_are_dealt_to_equal_groups():
    sizes: dict[str, Network] = {
        "small": linear,
        "large": nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)),
    }
    task = from_arrays(X, Y, client=np.arange(100) % 10, model=sizes)
    assert set(task.models) == {"small", "large"}
    assert sorted(task.sizes) == ["large"] * 5 + ["small"] * 5


PHONES = {"small": linear(), "large": nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3))}
RUNS = {"zoe": "large", "bob": "small", "ann": "large"}


@pytest.mark.parametrize(
    "size", [RUNS, pd.Series(RUNS).sort_index(), ["large", "large", "small"], np.array([*"lls"])]
)
def test_a_user_says_which_client_runs_which_network(size):
    models = PHONES | {name[0]: net for name, net in PHONES.items()}
    task = from_arrays(X, Y, client=CLIENT, model=models, size=size)  # zoe, ann, bob
    assert [name[0] for name in task.sizes] == ["l", "l", "s"]


def test_a_clients_size_is_found_by_its_id_or_by_its_name():
    for size in ({7: "small", 3: "large"}, {"7": "small", "3": "large"}):
        task = from_arrays(X, Y, client=[3, 7] * 50, model=PHONES, size=size)
        assert (task.size_of(0), task.size_of(1)) == ("large", "small")


def test_who_runs_what_belongs_to_the_task():
    """A run must not be resumed with other networks at its clients."""
    others = RUNS | {"ann": "small"}, RUNS, None, None
    first, *rest = [
        from_arrays(X, Y, client=CLIENT, model=PHONES, size=size).fingerprint
        for size in (RUNS, *others)
    ]
    assert [rest.count(each) for each in (first, rest[0], rest[2])] == [1, 1, 2]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (RUNS | {"zoe": "laptop"}, "must be one of the models small, large, got laptop; rename"),
        ({"zoe": "large"}, r"must have a size, got none for 2 of 3 clients \(ann, bob\)"),
        (["large", None, "small"], r"got none for 1 of 3 clients \(ann\)"),
        (pd.Series({**RUNS, "ann": np.nan}), r"got none for 1 of 3 clients \(ann\)"),
        (["large"], r"got none for 2 of 3 clients \(ann, bob\)"),
        (RUNS | {"eve": "small"}, r"clients that have examples, got eve \(1 such\)"),
        (["small"] * 100, "one entry for each client, got 100 for 3 clients"),
        ("small", "a size for each client, got 'small'"),
        (3, "a size for each client, got 3"),
        ({}, "got none for 3 of 3 clients"),
    ],
)
def test_sizes_that_do_not_fit_are_told_once(size, message):
    with pytest.raises(UserError, match=message) as error:
        from_arrays(X, Y, client=CLIENT, model=PHONES, size=size)
    assert str(error.value).count("\n- ") == 1


def test_a_single_network_is_called_base():
    with pytest.raises(UserError, match="one of the models base, got small"):
        from_arrays(X, Y, client=CLIENT, model=linear(), size=["small"] * 3)
    sizes = from_arrays(X, Y, client=CLIENT, model=linear(), size=["base"] * 3).sizes
    assert sizes == ("base",) * 3


def test_images_are_normalised_by_the_training_clients_images():
    images = RNG.integers(0, 256, (60, 2, 3), dtype=np.uint8)
    client = np.arange(60) % 3
    images[client == 2] = 255  # of the novel client, which nobody has seen
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    task = from_arrays(images, np.arange(60) % 2, client=client, model=model, novel=1)
    assert task.x.shape == (60, 1, 2, 3)
    known = task.transform(task.x[torch.cat(list(task.train[:2]))])
    assert known.mean().item() == pytest.approx(0, abs=1e-3)
    assert known.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_tokens_stay_integers():
    class LastToken(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 3)

        def forward(self, x):
            return self.embedding(x[:, -1])

    tokens = RNG.integers(0, 7, (100, 5)).astype(np.int32)
    task = from_arrays(tokens, Y, client=CLIENT, model=LastToken())
    assert task.x.dtype == torch.int64
    assert task.transform(task.x[:1]).tolist() == tokens[:1].tolist()


def test_float_targets_are_a_regression():
    y = X @ np.ones(4)
    task = from_arrays(X, y, client=CLIENT, model=linear(1))
    assert task.classes == 0
    assert task.y.dtype == torch.float32
    output, target = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0.0, 2.0, 1.0])
    assert task.loss is mean_squared_error
    assert task.loss(output, target).item() == pytest.approx((1 + 0 + 9) / 3)
    assert task.score is minus_squared_error
    assert task.score(output, target).tolist() == [-1, 0, -9]


def sign_loss(output, y):
    """Of one logit, where there are two classes."""
    return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.float())


def sign_is_right(output, y):
    return ((output[:, 0] > 0).long() == y).float()


def test_a_loss_and_a_score_of_ones_own_are_kept_whatever_the_outputs():
    task = from_arrays(
        X, Y % 2, client=CLIENT, model=linear(1), loss=sign_loss, score=sign_is_right
    )
    assert (task.loss, task.score) == (sign_loss, sign_is_right)


@pytest.mark.parametrize(
    ("functions", "instead"), [({"loss": sign_loss}, "score"), ({"score": sign_is_right}, "loss")]
)
def test_outputs_must_suit_the_usual_loss_and_the_usual_score(functions, instead):
    """Of one output the largest is always that of class 0."""
    wanted = f"must give 2 outputs per example, .* last layer, or pass a {instead} of your own, too"
    with pytest.raises(UserError, match=wanted):
        from_arrays(X, Y % 2, client=CLIENT, model=linear(1), **functions)
    y = X @ np.ones(4)
    with pytest.raises(UserError, match=f"must give 1 outputs .* a {instead} of your own, too"):
        from_arrays(X, y, client=CLIENT, model=linear(2), **functions)


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (3, 1)], ids=str)
def test_outputs_for_labels_must_be_one_row_per_example(shape):
    """A column of argmax, (B, 1), is compared with each of (B,) labels: more are right than are."""
    model = nn.Sequential(nn.Linear(4, math.prod(shape)), nn.Unflatten(1, shape))

    def flat(output, y):
        return nn.functional.cross_entropy(output.flatten(1), y)

    wanted = rf"must give 3 outputs .* got shape \(2, {shape[0]}, {shape[1]}\) .* of shape \(B, 3\)"
    with pytest.raises(UserError, match=wanted + "$"):
        from_arrays(X, Y, client=CLIENT, model=model)
    with pytest.raises(UserError, match=wanted + ", or pass a score of your own, too"):
        from_arrays(X, Y, client=CLIENT, model=model, loss=flat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": np.where(np.arange(100)[:, None] == 7, np.nan, X)},
            "NaN or infinity in 1 rows, .* 7",
        ),
        ({"x": X[:, 0]}, r"x must have shape \(N, features...\), got \(100,\)"),
        ({"x": X > 0}, "uint8 images, floats or integer tokens, got torch.bool"),
        ({"x": np.zeros((100, 8, 8, 3), np.uint8)}, "channels before height and width"),
        ({"x": np.zeros((100, 8), np.uint8)}, "pass features as floats"),
        ({"x": X[:90]}, "same number of rows, at least one, got x 90, y 100, client 100"),
        ({"y": Y - 1}, r"labels must lie in 0..1, got -1 at index 0 .34 such."),
        ({"classes": 2}, r"labels must lie in 0..1, got 2 at index 2 .* or raise classes from 2"),
        (
            {"y": Y + 0.5, "classes": 3},
            "integer labels because classes=3 was given, got torch.float",
        ),
        ({"y": np.full(100, np.inf), "model": linear(1)}, "y must be finite"),
        ({"y": np.stack([X, X], 1)}, r"y must have shape \(N,\), .* got \(100, 2, 4\)"),
        ({"y": np.stack([Y, Y], 1)}, r"must give 2 x 3 outputs .* or y where it holds no labels"),
        ({"labels": ["a", "b", "b"]}, "labels must be named once each, got 'b' twice; remove one"),
        ({"labels": [0, 1, 2]}, "labels must have names that are words, got 0; write it as one"),
        ({"val": np.nan}, "val and test must be 0 or more and leave examples to train on, got nan"),
        ({"novel": np.nan}, "novel must be a whole number of clients, .* got novel=nan"),
        ({"classes": 3.0}, r"classes must be one whole number above 0, .* got 3\.0; leave it out"),
        ({"classes": "3"}, "classes must be one whole number above 0, .* got '3'"),
        ({"classes": 0}, "classes must be one whole number above 0, .* got 0"),
        ({"classes": 10**9}, "above 0, 1000000 at most, got 1000000000"),
        ({"y": np.stack([Y, Y - 1], 1)}, r"labels must lie in 0..2, got -1 at index 0 .34 such."),
        (
            {"y": np.where(Y[:, None] == 1, -100, np.stack([Y, Y], 1))},
            r"each row of y must have a label that counts, got -100 alone at index 1 .33 such.",
        ),
        (
            {"y": ["a", np.nan, "b", np.nan] * 25},
            "y must have a label in every row, got none in 50 rows, the first at index 1",
        ),
        ({"client": np.stack([Y, Y], 1)}, "client must be one hashable id per example"),
        (
            {"client": [0] * 98 + [1] * 2, "val": 0.5, "test": 0.3},
            r"got none for 1 of 2 clients .1.",
        ),
        ({"val": 0.5, "test": 0.5}, "leave examples to train on, got 0.5 and 0.5"),
        ({"test": 0}, "test must be above 0, .* got 0; to train on all examples .* in split"),
        ({"novel": 3}, "got novel=3 of 3 clients"),
        ({"model": linear().requires_grad_(False)}, "must have parameters to train"),
        ({"model": linear(2)}, r"must give 3 outputs per example, got shape \(2, 2\)"),
        ({"model": linear(1)}, "last layer, or convert y to floats if these labels are amounts$"),
        (
            {"model": linear(3, inputs=5)},
            "but fails on it .RuntimeError: .*; change the model or x",
        ),
    ],
)
def test_every_problem_is_told(changes, message):
    arguments = {"x": X, "y": Y, "client": CLIENT, "model": linear()} | changes
    with pytest.raises(UserError, match=message):
        from_arrays(arguments.pop("x"), arguments.pop("y"), **arguments)


def test_all_problems_are_told_at_once():
    broken = X.copy()
    broken[3] = np.inf
    with pytest.raises(UserError) as raised:
        from_arrays(broken, Y[:50] - 1, client=CLIENT, model=linear(), val=-1.0, novel=7)
    told = str(raised.value)
    assert told.count("\n- ") == 5
    for part in ("x must be finite", "labels must", "same number of rows", "val and test", "novel"):
        assert part in told


def test_words_are_labels_but_no_features():
    words = np.array(["walk", "sit", "run"])[Y]
    task = from_arrays(X, words, client=CLIENT, model=linear())
    assert task.labels == ("run", "sit", "walk")
    assert task.y.tolist() == [task.labels.index(word) for word in words]
    given = from_arrays(
        X, words, client=CLIENT, model=linear(4), labels=["walk", "lie", "sit", "run"]
    )
    assert (given.classes, given.y[:3].tolist()) == (4, [0, 2, 3])
    with pytest.raises(UserError, match="labels that are known, walk, sit, got 'run' at"):
        from_arrays(X, words, client=CLIENT, model=linear(), labels=["walk", "sit"])
    with pytest.raises(UserError, match="x must hold numbers, got dtype <U"):
        from_arrays(words[:, None], Y, client=CLIENT, model=linear())


def test_truth_values_are_labels_by_name():
    task = from_arrays(X, Y == 0, client=CLIENT, model=linear(2))
    assert (task.labels, task.y[:3].tolist()) == (("False", "True"), [1, 0, 0])
    assert newcomer(task, X[:3], [True, True, False]).y.tolist() == [1, 1, 0]


def test_clients_are_called_by_their_ids():
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    assert task.names == ("zoe", "ann", "bob")
    assert [task.number_of(name) for name in ("bob", "zoe", 1)] == [2, 0, 1]
    assert task.name_of(1) == "ann"
    numbered = from_arrays(X, Y, client=np.arange(100) % 3, model=linear())
    assert (numbered.names, numbered.name_of(2), numbered.number_of("2")) == ((), "2", 2)
    other = from_arrays(X, Y, client=(np.arange(100) + 1) % 3, model=linear())
    assert (other.names, other.number_of("0"), other.number_of(0)) == (("1", "2", "0"), 2, 0)
    for name, advice in (("an", r"did you mean 'ann'\?"), ("carlos", "choose one of them")):
        with pytest.raises(UserError, match=rf"one of 3, zoe to bob, came '{name}'; {advice}"):
            task.number_of(name)
    for number in (3, -1):
        with pytest.raises(UserError, match=f"number must be below 3, came {number}"):
            task.number_of(number)


@pytest.mark.parametrize("number", [float, np.float32, np.float64])
def test_a_fraction_is_one_whatever_library_it_is_of(number):
    task = from_arrays(X, Y, client=CLIENT, model=linear(), val=number(0.25), test=number(0.25))
    for own in zip(task.train, task.val, task.test, strict=True):
        count = sum(map(len, own))
        assert [len(rows) for rows in own[1:]] == [round(count / 4)] * 2


def test_what_a_split_says_an_example_is_for_it_is():
    split = np.array(["train", "test", "val", "train", "train"])[np.arange(100) % 5]
    task = from_arrays(X, Y, client=CLIENT, model=linear(), split=split)
    for own, word in ((task.train, "train"), (task.val, "val"), (task.test, "test")):
        assert torch.cat(list(own)).sort().values.tolist() == np.flatnonzero(split == word).tolist()


def test_novel_is_a_number_or_a_fraction_below_1():
    for novel, number in ((0.5, 5), (0.06, 1), (3, 3), (np.int64(2), 2), (0, 0)):
        task = from_arrays(X, Y, client=np.arange(100) % 10, model=linear(), novel=novel)
        assert task.novel == number


class IdleAtTheEnd(nn.Module):
    """Keeps a projection behind its head that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.projection = nn.Linear(2, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class AuxiliaryAtTheEnd(IdleAtTheEnd):
    """Uses it in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + (0 * self.projection(x).sum() if self.training else 0)


class IdleBefore(nn.Sequential):
    """Keeps one before its head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](x)


class Bounded(nn.Sequential):
    """An embedding that PyTorch rescales in place."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.LazyLinear(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.long().abs() % 5)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.GRU(1, 3, batch_first=True)

    def forward(self, x):
        return self.body(x[..., None])


class Turning(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.ones(2)), persistent=False)

    def forward(self, x):
        return super().forward((x * self.turn).imag)


class Causal(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(2))


def scripted():
    with pytest.deprecated_call():
        return torch.jit.script(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3)))


class Silent(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

    def forward(self, x):
        return super().forward(x)[:0].flatten()


def fails():
    raise RuntimeError("no such layer")


GAPS = np.ma.masked_equal([0, 2] * 6, 2)


def stacked_in_an_array():
    """Twelve rows as a table's column holds them."""
    rows = np.empty(12, object)
    rows[:] = [np.ones(2)] * 12
    return rows


@pytest.mark.parametrize(
    "net",
    [
        AuxiliaryAtTheEnd,
        IdleBefore,
        scripted,
    ],
)
def test_a_layer_that_is_idle_elsewhere_or_in_evaluation_alone_is_let_be(net: Network) -> None:
    assert from_arrays(X[:, :2], Y, client=CLIENT, model=net).models["base"](torch.ones(1, 2)).ndim


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"y": [2 * 10**9, 0] * 6}, "labels must be numbered from 0, got 2 different from 0 to 20"),
        (
            {"y": [0, 12] * 6},
            "labels must be numbered from 0, got 2 different from 0 to 12; number",
        ),
        ({"y": [1, 3] * 6}, r"got 2 different from 1 to 3; number them with numpy.unique\(y"),
        ({"y": [0.0, 2.0] * 6}, "must give 1 outputs .*convert y to integers if these floats are"),
        (
            {"client": [0, 1, float("nan")] * 4},
            "who holds each example, got nan in 4 .*index 2",
        ),
        ({"client": [0, None] * 6}, "got None in 6 rows, the first at index 1; fill or drop"),
        ({"client": 3}, r"one hashable id per example, \(N,\), got 3; pass an array"),
        ({"client": "ab"}, "got 'ab'; pass an array"),
        ({"client": np.array(3)}, r"one hashable id per example, \(N,\), got array\(3\); pass"),
        (
            {"y": [0, 1] * 6, "model": lambda: nn.Sequential(nn.LazyLinear(1), nn.Flatten(0))},
            r"must give 2 outputs per example, got shape \(2,\) for 2 examples",
        ),
        ({"model": Silent}, r"must give 3 outputs per example, got shape \(0,\) for 2 examples"),
        ({"model": None}, "must be an nn.Module, or a function .*got None"),
        ({"model": "lenet"}, "got 'lenet'"),
        ({"model": fails}, "one that fails .RuntimeError: no such layer"),
        ({"model": lambda: None}, "got one that makes None"),
        ({"model": {}}, "model must be a network, or one for each size"),
        (
            {"model": Bounded},
            r"must leave its parameters as they are, .* writes to 0.weight in forward; .*max_norm",
        ),
        ({"model": Recurrent}, "must return a tensor, got tuple"),
        ({"model": IdleAtTheEnd}, "use the layer that it defines last, .* but projection has no"),
        ({"model": Turning}, "real parameters and buffers .* but turn is torch.complex64; keep"),
        ({"model": Causal}, "finite parameters .*, but mask is not; .* if it is a mask, take bool"),
        (
            {
                "model": lambda: nn.Sequential(
                    nn.Embedding(3, 2, sparse=True), nn.Flatten(), nn.Linear(4, 3)
                ),
                "x": torch.ones(12, 2, dtype=torch.int64),
            },
            "gradients that are not sparse, but those of 0 are; leave out sparse=True",
        ),
        (
            {"model": lambda: nn.Linear(2, 3).bfloat16()},
            "float32 or float64 parameters .*, but weight is torch.bfloat16; make it float32, and",
        ),
        (  # as a head that PEFT trains whole, on a network that was loaded in half precision
            {"model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3).half())},
            "are trained, but 1.weight is torch.float16",
        ),
        ({"model": nn.Identity, "x": torch.ones(12, 3)}, "must have parameters to train"),
        ({"x": [[1.0], [1.0, 2.0]] * 6}, "x must be one array, with rows of one shape"),
        ({"x": {"a": torch.ones(6, 2)}}, "x must be one array .* of all .*, got dict; put it"),
        ({"y": {"a": torch.ones(6)}}, "y must be one array .*, got dict; put it together"),
        ({"y": None}, "y must be one array .*, got NoneType; put"),
        ({"x": GAPS[:, None]}, "x must have a value everywhere, got some that are masked; fill or"),
        ({"y": GAPS}, "y must have a value everywhere, got some that are masked"),
        ({"y": GAPS, "labels": ["a", "b", "c"]}, "y must have a value everywhere, got some"),
        ({"y": [[0], [1]] * 6}, r"y must have shape \(N,\), .* got \(12, 1\) .*; flatten it"),
        ({"y": [["a"], ["b"]] * 6}, r"y must have shape \(N,\), .* got \(12, 1\)"),
        ({"x": [["a"]] * 12}, "x must hold numbers, got dtype <U1"),
        ({"novel": 2.0}, "novel must be a whole number of clients, or a fraction below 1"),
        ({"novel": -0.1}, "got novel=-0.1 of 3 clients"),
        ({"split": ["train"] * 11 + ["tset"]}, "split must be .*got tset at index 11; rename it"),
        ({"split": ["train"] * 11}, "split must say it of each example, got 11 for 12"),
        (
            {"split": ["train", "val"] + ["test"] * 10, "client": ["a", "b"] * 6},
            "must have a training example, got none for 1 of 2 clients .b.",
        ),
        ({"split": ["train"] * 12, "val": 0.2}, "val and test must be left out where split says"),
        ({"client": [1, "1"] * 6}, "two different ids read '1'; convert all ids to one type"),
        ({"y": [2.0, [1.0]] * 6}, "y must be one array, with rows of one shape"),
        ({"y": torch.ones(12, 3)}, "several may hold are integers, with a loss of your own"),
        ({"y": torch.eye(3)[[0, 2, 1] * 4]}, "take y.argmax.1. where a row has a 1 for its label"),
        (
            {"x": stacked_in_an_array()},
            "got an array of arrays; put them together with numpy.stack",
        ),
        ({"x": torch.ones(12, 2, dtype=torch.int64)}, "to floats if these integers are no tokens"),
        (
            {"client": range(12)},
            "those of a client or class, 1 at most, a fraction of 0.15 is none; give more",
        ),
    ],
)
def test_odd_arguments_are_told_with_what_to_do(odd, told):
    usual = {"x": torch.ones(12, 2), "y": [0, 2] * 6, "client": [0, 1, 2] * 4}
    arguments = usual | {"model": lambda: nn.Linear(2, 3)} | odd
    with pytest.raises(UserError, match=told) as caught:
        Task.from_arrays(**arguments)
    faults = str(caught.value).count("\n- ")
    assert faults <= (2 if odd.get("client") in (3, "ab") else 1)  # what follows from it is none


def test_one_label_alone_is_told():
    with pytest.raises(UserError, match=r"y must have shape \(N,\).*, got \(\) torch.int64"):
        Task.from_arrays(torch.ones(3, 2), 3, client=[0] * 3, model=lambda: nn.Linear(2, 3))


def test_given_classes_say_how_labels_are_numbered():
    x, y, client = torch.ones(6, 2), [1, 2] * 3, [0, 0, 0, 1, 1, 1]
    every = {"client": client, "split": ["train"] * 6}
    task = Task.from_arrays(x, y, model=nn.Linear(2, 9), classes=9, **every)
    assert task.classes == 9


def test_classes_that_are_not_as_many_as_the_labels_are_refused():
    with pytest.raises(UserError, match="classes must be as many as the labels, 3, got 5; leave"):
        from_arrays(X, Y, client=CLIENT, model=linear(5), labels=["a", "b", "c"], classes=5)
    task = from_arrays(X, Y, client=CLIENT, model=linear(), labels=["a", "b", "c"], classes=3)
    assert (task.classes, task.labels) == (3, ("a", "b", "c"))


def test_labels_may_be_an_array_of_names():
    names = np.array(["a", "b", "c"])  # such as classes_ of scikit-learn's LabelEncoder
    table = pd.DataFrame({"x": [*X], "y": Y, "client": CLIENT})
    for task in (
        from_arrays(X, Y, client=CLIENT, model=linear(), labels=names),
        from_frame(table, model=linear(), labels=names),
    ):
        assert repr(task.labels) == "('a', 'b', 'c')"  # which a run is known by again


def test_what_is_frozen_may_be_infinite_and_its_gradients_sparse():
    masked = nn.Sequential(Causal().requires_grad_(False), nn.Linear(3, 3))
    assert from_arrays(X[:, :2], Y, client=CLIENT, model=masked).models
    words = nn.Embedding(3, 2, sparse=True).requires_grad_(False)
    net = nn.Sequential(words, nn.Flatten(), nn.Linear(4, 3))
    assert from_arrays(np.ones((len(Y), 2), int), Y, client=CLIENT, model=net).models


@pytest.mark.parametrize("labels", [3, "abc"])
def test_labels_that_are_no_sequence_of_names_are_refused(labels: Any):
    table = pd.DataFrame({"x": [*X], "y": Y, "client": CLIENT})
    for make in (
        lambda: from_arrays(X, Y, client=CLIENT, model=linear(), labels=labels),
        lambda: from_frame(table, model=linear(), labels=labels),
    ):
        with pytest.raises(
            UserError, match=r"labels must be a sequence of names, .* got .*classes"
        ):
            make()


def test_words_that_label_tokens_may_be_lists_in_a_table():
    tokens, tags = RNG.integers(0, 7, (100, 5)), RNG.choice(["noun", "verb"], (100, 5))
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    frame = pd.DataFrame({"x": tokens.tolist(), "y": tags.tolist(), "client": CLIENT})
    tasks = [
        from_arrays(tokens, tags, client=CLIENT, model=net),
        from_frame(frame, model=net),
        from_frame(datasets.Dataset.from_pandas(frame), model=net),
    ]
    assert [task.labels for task in tasks] == [("noun", "verb")] * 3
    assert len({task.fingerprint for task in tasks}) == 1
    late = newcomer(tasks[1], frame[:2].assign(client="late", y=[["verb"] * 5, ["noun"] * 5]))
    assert late.y is not None
    assert late.y.tolist() == [[1] * 5, [0] * 5]


def test_tokens_that_count_for_nothing_are_no_class_that_a_client_has():
    """Who has but classes 1 and 2 is asked, in a masked accuracy, for one of these."""
    net = nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 3))
    nn.init.zeros_(net[1].weight)
    net[1].bias.data = torch.tensor([3.0, 2.0, 1.0])  # class 0, and else class 1
    y = np.where(np.arange(3) == 2, -100, np.ones((40, 3), int) + np.arange(40)[:, None] % 2)
    task = from_arrays(np.zeros((40, 3), int), y, client=[0] * 40, model=net)
    ours = Federation("fedavg", task)
    cohort = ours.engine.cohort([0], 0, training=False)
    counts = cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))["test"]
    assert counts["correct"] == 0
    assert counts["masked_correct"] == (task.y[task.test[0]][:, 0] == 1).sum()


class Lazy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))


def test_lazy_layers_take_their_shapes_from_the_data_and_weights_from_the_seed():
    tasks = [from_arrays(X, Y, client=CLIENT, model=Lazy, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (trees.model_of(task.models["base"]) for task in tasks)
    assert {name: tuple(value.shape) for name, value in first.items() if "weight" in name} == {
        "0.weight": (5, 4), "1.weight": (5,), "3.weight": (3, 5),
    }  # fmt: skip
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert tasks[0].models["base"].training
    assert not first["1.running_mean"].any()  # no example has been counted
    beside = from_arrays(
        X, Y, client=CLIENT, model=lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4), Lazy())
    )
    eager, lazy, _ = beside.models["base"]
    assert not torch.equal(eager.weight, lazy.weight)  # as they would be of one stream
    with pytest.raises(UserError, match=r"one that cannot be copied .ValueError: "):
        from_arrays(X, Y, client=CLIENT, model=Lazy())
    with pytest.raises(UserError, match="one that fails"):
        from_arrays(X, Y, client=CLIENT, model=fails, prefix="0")


def test_a_task_is_shown_in_three_lines():
    task = from_arrays(X, Y, client=CLIENT, model=linear(), novel=1, name="readings")
    held = [len(rows) for rows in task.train]
    assert repr(task).splitlines() == [
        "Task readings: 100 examples of 4 for 3 classes",
        f"{len(held)} clients, 1 of them novel, with {min(held)} to {max(held)} training examples "
        "each",
        "base: Linear, 15 parameters",
    ]
    alike = from_arrays(X[:40], Y[:40], client=np.arange(40) % 4, model=linear(), classes=3)
    assert "4 clients, 0 of them novel, with 6 training examples each\n" in repr(alike)
    few = from_arrays(X[:40], Y[:40], client=[0, 1, 1, *[2] * 37], model=linear(), classes=3)
    assert "with 1 to 25 training examples each, 2 with none for testing\n" in repr(few)

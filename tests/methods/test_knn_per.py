"""kNN-Per: the mixture in NumPy and scikit-learn, what is chosen and how, and its limits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

import hyperfed
from hyperfed import trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.functional import outputs_and_features
from hyperfed.methods import knn_per
from hyperfed.runs.config import from_keys
from hyperfed.runs.evaluation import evaluate
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from hyperfed.trees import Model, Tree
from toys import CLASSES, FEATURES, Federation, Normed, TwoLayers, close, make_task

SETTINGS: dict[str, Any] = {"local_steps": 5, "batch_size": 8, "local_lr": 0.2}
EXAMPLES = (40, 7, 30, 25)
SCALE = 0.05  # small, so that near neighbours count clearly more than far ones
MODEL = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
"""Bytes of a model."""


def federation(net: Any = TwoLayers, task: dict[str, Any] | None = None, **own: Any) -> Federation:
    toy = make_task(net, examples=EXAMPLES, **(task or {}))
    ours = Federation("knn_per", toy, **{**SETTINGS, "scale": SCALE, **own})
    for number in range(3):
        ours.round([0, 1, 2], number)
    return ours


def by_hand(net: dict[str, Tensor], x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The toy network's probabilities and the features before its last layer, in NumPy."""
    model = {name: value.numpy() for name, value in net.items()}
    features = np.tanh(x.numpy() @ model["body.weight"].T + model["body.bias"])
    e = np.exp(features @ model["head.weight"].T + model["head.bias"])
    return e / e.sum(axis=1, keepdims=True), features


def vote_by_hand(stored: np.ndarray, y: np.ndarray, query: np.ndarray, k: int) -> np.ndarray:
    """p_kNN of one query."""
    squares = ((stored - query) ** 2).sum(axis=1)
    votes = np.zeros(CLASSES)
    for nearest in np.argsort(squares)[:k]:
        votes[y[nearest]] += np.exp(-squares[nearest] / (len(query) * SCALE))
    return votes / votes.sum()


def choose_by_hand(task: Task, client: int, net: Model, pairs: Any) -> tuple[int, float]:
    """The k and lambda by brute force: most accurate on validation data, then most likely."""
    probabilities, features = by_hand(net, task.x[task.train[client]])
    y = task.y[task.train[client]].numpy()
    places = range(len(y))
    if held_out := len(task.val[client]):
        held = task.val[client]
        probabilities, queries = by_hand(net, task.x[held])
        labels, places = task.y[held].numpy(), range(held_out)
    scores = {}
    for k, share in pairs:
        right, likelihood = 0, 0.0
        for place in places:
            if held_out:
                vote, label = vote_by_hand(features, y, queries[place], k), labels[place]
            else:
                rest = np.arange(len(y)) != place
                vote, label = vote_by_hand(features[rest], y[rest], features[place], k), y[place]
            p = share * vote + (1 - share) * probabilities[place]
            right += int(p.argmax() == label)
            likelihood += math.log(max(p[label], np.finfo(np.float64).tiny))
        scores[k, share] = (right, round(likelihood, 9))
    return max(scores, key=lambda pair: scores[pair])


GRID = [(k, i / 10) for k in (5, 10) for i in range(11)]


def served(ours: Federation, client: int) -> Any:
    """Counts on validation and test data."""
    found = evaluate(ours.server, ours.engine, [client], 9)
    return found["val"], found["test"]


def check_the_mixture(client: int = 0, pair: tuple[int, float] = (5, 0.4)) -> None:
    """On test data, for a known k and lambda."""
    k, share = pair
    ours = federation(neighbours=(k,), mixing=(share,))
    task, model = ours.task, ours.server.model["base"]
    _, stored = by_hand(model, task.x[task.train[client]])
    y = task.y[task.train[client]].numpy()
    probabilities, queries = by_hand(model, task.x[task.test[client]])
    votes = np.stack([vote_by_hand(stored, y, query, k) for query in queries])
    assert not np.allclose(votes, probabilities, atol=0.1)
    p = share * votes + (1 - share) * probabilities
    labels = task.y[task.test[client]].numpy()
    _, test = served(ours, client)
    expected = -np.log(p[np.arange(len(labels)), labels]).sum()
    assert test.loss.item() == pytest.approx(expected, rel=1e-6)
    assert test.correct.item() == (p.argmax(axis=1) == labels).sum()


@pytest.mark.parametrize("pair", [(5, 0.4), (10, 0.9), (3, 0.5)])
@pytest.mark.parametrize("client", [0, 2])
def test_the_mixture_is_that_of_the_paper(client: int, pair: tuple[int, float]) -> None:
    check_the_mixture(client, pair)


def test_the_vote_is_scikit_learns_with_these_weights() -> None:
    stored, queries = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.arange(CLASSES).repeat(10)
    for k in (1, 4, 10):
        theirs = KNeighborsClassifier(k, weights=lambda d: np.exp(-(d**2) / (6 * 2.0)))
        theirs.fit(stored.numpy(), labels.numpy())
        expected = torch.from_numpy(theirs.predict_proba(queries.numpy()))
        ours = knn_per.neighbour_vote(queries, stored, labels, k, classes=CLASSES, scale=2.0)
        close(ours, expected)


# The choice of k and lambda


class Tells(knn_per.Client):
    @step
    def tell(self, model: Model) -> Tree:
        """What the client chose."""
        self.remember(model)
        return self.scratch["chosen"]


def chosen(ours: Federation) -> list[tuple[int, float]]:
    """The k and lambda of every client."""
    engine = LoopEngine(ours.task, Tells, ours.config, seed=0)
    reply = engine.cohort(range(4), 9, training=False).ask(Tells.tell, ours.server.model["base"])
    return list(zip(reply["neighbours"].tolist(), reply["mixing"].tolist(), strict=True))


def check_the_choice(validation: bool = True) -> None:
    ours = federation()
    if not validation:
        ours.task.val[:] = [torch.tensor([], dtype=torch.int64) for _ in ours.task.val]
    model = ours.server.model["base"]
    expected = [choose_by_hand(ours.task, client, model, GRID) for client in range(4)]
    assert len(set(expected)) > 1  # it is the client's own
    assert chosen(ours) == expected


def test_k_and_lambda_are_those_of_brute_force() -> None:
    check_the_choice()


def check_leaving_one_out() -> None:
    check_the_choice(validation=False)


def test_without_validation_data_each_training_example_is_left_out_in_turn() -> None:
    check_leaving_one_out()


# Mutants

neighbour_vote, seen = knn_per.neighbour_vote, knn_per.Client.seen


def unsquared(queries: Any, features: Tensor, labels: Tensor, k: int, **more: Any) -> Tensor:
    """With the distance itself in the exponent."""
    theirs = KNeighborsClassifier(k, weights=lambda d: np.exp(-d / (features.shape[1] * SCALE)))
    theirs.fit(torch.cat([features, features[:CLASSES] + 1e6]), [*labels, *range(CLASSES)])
    return torch.from_numpy(theirs.predict_proba(queries.numpy()))


def equal_votes(queries: Any, *, scale: float, **more: Any) -> Tensor:
    return neighbour_vote(queries, scale=1e9, **more)


def not_left_out(queries: Any, features: Tensor, **more: Any) -> Tensor:
    """Each example is its own nearest neighbour."""
    return neighbour_vote(features if queries is None else queries, features, **more)


def logits_as_features(*arguments: Any) -> tuple[Tensor, Tensor]:
    output, _ = outputs_and_features(*arguments)
    return output, output


def inputs_as_features(module: Any, model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    output, _ = outputs_and_features(module, model, x)
    return output, x.flatten(1)


def mixed_logits(outputs: Tensor, votes: Tensor, share: float) -> Tensor:
    return share * votes + (1 - share) * outputs


def exchanged(outputs: Tensor, votes: Tensor, share: float) -> Tensor:
    return mixture(outputs, votes, 1 - share)


mixture = knn_per.mixture


def first_of_the_grid(*pairs: Any, key: Any) -> Any:
    return next(iter(*pairs))


def fixed_share(*pairs: Any, key: Any) -> Any:
    return max((pair for pair in list(*pairs) if pair[1] == 0.5), key=key)


def by_likelihood(*pairs: Any, key: Any) -> Any:
    return max(*pairs, key=lambda pair: (key(pair)[1], key(pair)[0]))


@pytest.mark.parametrize(
    ("name", "mutant", "check"),
    [
        ("max", first_of_the_grid, check_the_choice),
        ("max", fixed_share, check_the_choice),
        ("max", by_likelihood, check_the_choice),
        ("neighbour_vote", not_left_out, check_leaving_one_out),
        ("neighbour_vote", unsquared, check_the_mixture),
        ("neighbour_vote", equal_votes, check_the_mixture),
        ("outputs_and_features", logits_as_features, check_the_mixture),
        ("outputs_and_features", inputs_as_features, check_the_mixture),
        ("mixture", mixed_logits, check_the_mixture),
        ("mixture", exchanged, check_the_mixture),
    ],
)
def test_mutant_is_caught(
    name: str,
    mutant: Callable[..., Any],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(knn_per, name, mutant, raising=False)
    with pytest.raises(AssertionError):
        check()


def test_mutant_that_stores_or_chooses_with_test_data_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = federation()

    def test_data(client: knn_per.Client, model: Model, split: Any) -> Any:
        return seen(client, model, client.test)

    monkeypatch.setattr(knn_per.Client, "seen", test_data)
    with pytest.raises(PermissionError, match="test data is for evaluation"):
        served(ours, 0)


# Limits


def plain(ours: Federation, model: Model, client: int, split: str) -> tuple[float, float]:
    """Correct predictions and summed loss of a model by itself."""
    rows = getattr(ours.task, split)[client]
    output = torch.func.functional_call(
        ours.task.models["base"].eval(), model, (ours.task.x[rows],)
    )
    y = ours.task.y[rows]
    loss = F.cross_entropy(output, y, reduction="sum")
    return float((output.argmax(dim=1) == y).sum()), float(loss)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_lambda_0_is_the_global_model_which_is_fedavgs(net: Any) -> None:
    ours = federation(net, mixing=(0.0,))
    fedavg = Federation("fedavg", ours.task, **SETTINGS)
    for number in range(3):
        fedavg.round([0, 1, 2], number)
    model = ours.server.model["base"]
    torch.testing.assert_close(model, fedavg.server.model["base"], rtol=0, atol=0)
    for client in range(4):
        for split, counts in zip(("val", "test"), served(ours, client), strict=True):
            found = (counts.correct.item(), counts.loss.item())
            assert found == pytest.approx(plain(ours, model, client, split), rel=1e-6)


def test_lambda_1_is_the_neighbours_alone_and_its_loss_is_finite() -> None:
    ours = federation(mixing=(1.0,), neighbours=(1,))
    _, test = served(ours, 0)
    task, model = ours.task, ours.server.model["base"]
    _, stored = by_hand(model, task.x[task.train[0]])
    _, queries = by_hand(model, task.x[task.test[0]])
    theirs = KNeighborsClassifier(1).fit(stored, task.y[task.train[0]])
    right = int((theirs.predict(queries) == task.y[task.test[0]].numpy()).sum())
    assert 0 < right < len(queries)
    assert test.correct.item() == right
    floor = math.log(torch.finfo(torch.float64).tiny)
    assert test.loss.item() == pytest.approx(-floor * (len(queries) - right))


def test_fewer_examples_than_k_vote_all() -> None:
    features = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()
    labels = torch.tensor([0, 2, 2])
    three, ten = (
        knn_per.neighbour_vote(features + 0.1, features, labels, k, classes=CLASSES, scale=SCALE)
        for k in (3, 10)
    )
    assert torch.equal(ten, three)
    others = knn_per.neighbour_vote(None, features, labels, 10, classes=CLASSES, scale=SCALE)
    assert others[0].tolist() == [0, 0, 1]  # both others
    alone = knn_per.neighbour_vote(None, features[:1], labels[:1], 10, classes=CLASSES, scale=SCALE)
    assert alone.tolist() == [[0, 0, 0]]  # nobody: the global model decides


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_where_nobody_votes_the_global_model_decides(share: float) -> None:
    outputs = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).double()
    votes = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.75]]).double()
    found = knn_per.mixture(outputs, votes, share)
    close(found[0], outputs[0].log_softmax(dim=0))
    close(found[1].exp(), share * votes[1] + (1 - share) * outputs[1].softmax(dim=0))


@pytest.mark.parametrize("label", range(CLASSES))
def test_a_client_that_has_nothing_to_choose_by_takes_the_first_pair(label: int) -> None:
    """Also where its one label is that which is the greatest among equals."""
    ours = Federation("knn_per", make_task(examples=(12, 1, 1, 1)), **SETTINGS)
    ours.task.val[1:] = [rows[:0] for rows in ours.task.val[1:]]
    ours.task.y[torch.cat([*ours.task.train[1:]])] = label
    ours.server.model["base"]["head.bias"][(label + 1) % CLASSES] += 50  # the global model is wrong
    assert chosen(ours)[1:] == [(5, 0.0)] * 3


def test_nobody_votes_for_outputs_that_are_no_class() -> None:
    outputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).double()
    votes = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]).double()
    p = 0.3 * torch.cat([votes, torch.zeros(2, 2)], dim=1) + 0.7 * outputs.softmax(dim=1)
    close(knn_per.mixture(outputs, votes, 0.3), p.log())


def test_a_client_with_a_single_example_is_served() -> None:
    ours = Federation("knn_per", make_task(examples=(12, 1)), **SETTINGS)
    ours.round([0, 1])
    for val in (ours.task.val[1], ours.task.val[1][:0]):
        ours.task.val[1] = val
        assert served(ours, 1)[1].count.item() == 6


def test_masked_accuracy_is_among_the_classes_of_the_training_data() -> None:
    ours = federation(mixing=(0.5,), neighbours=(5,))
    task, model = ours.task, ours.server.model["base"]
    rows = task.train[0]
    task.y[rows] = torch.where(task.y[rows] == 2, 0, task.y[rows])  # no example of class 2
    task.y[task.test[0]] %= 2
    probabilities, queries = by_hand(model, task.x[task.test[0]])
    _, stored = by_hand(model, task.x[rows])
    y = task.y[rows].numpy()
    votes = np.stack([vote_by_hand(stored, y, query, 5) for query in queries])
    assert (votes[:, 2] == 0).all()
    p = 0.5 * votes + 0.5 * probabilities
    labels = task.y[task.test[0]].numpy()
    _, test = served(ours, 0)
    assert test.masked_correct.item() == (p[:, :2].argmax(axis=1) == labels).sum() > 0
    assert test.zeroed_correct.item() == (np.where([1, 1, 0], p, 0).argmax(axis=1) == labels).sum()


# What travels, who is served


def test_what_travels_is_the_global_model_and_no_more() -> None:
    ours = federation()
    cohort = ours.round([0, 1], 3)
    assert [(e.step, e.down, e.up) for e in cohort.state.exchanges] == [
        ("train_model", MODEL, MODEL)
    ] * 2
    asked = ours.engine.cohort([0], 9, training=False)
    asked.ask(knn_per.Client.evaluate, ours.server.personalize(asked))
    counts = 2 * (8 + 4 * 8)
    assert [(e.step, e.down, e.up) for e in asked.state.exchanges] == [
        ("remember", MODEL, 0),
        ("evaluate", 0, counts),
    ]
    assert all(memory == {} for memory in ours.engine.memory.values())


def test_a_novel_client_is_served_like_a_known_one() -> None:
    """What it finds does not depend on whether it is novel: nothing is trained."""
    ours = federation(task={"novel": 1})
    before = trees.clone(ours.server.state())
    novel = served(ours, 3)
    torch.testing.assert_close(ours.server.state(), before, rtol=0, atol=0)
    known = federation()
    known.server.model = ours.server.model
    for ours_counts, theirs in zip(novel, served(known, 3), strict=True):
        assert vars(ours_counts) == vars(theirs)


def test_an_unlabelled_newcomer_cannot_be_served() -> None:
    ours = federation(task={"novel": 1, "unlabelled": True})
    with pytest.raises(UnlabelledError):
        ours.server.personalize(ours.engine.cohort([3], 9, training=False))


def test_errors() -> None:
    with pytest.raises(UserError, match="must be one network, but kNN-Per mixes"):
        federation().personal(0)
    with pytest.raises(UserError, match="a task of kNN-Per must have classes"):
        Federation("knn_per", make_task(classes=0))
    for wrong in ({"mixing": [1.5]}, {"neighbours": [0]}, {"mixing": []}, {"scale": 0}):
        with pytest.raises(UserError):
            hyperfed.train("knn_per", make_task(), rounds=1, method=wrong)


# The features


def test_features_are_the_input_of_the_last_layer_and_carry_gradients() -> None:
    net = Normed().double()
    model, x = trees.model_of(net), torch.randn(6, FEATURES).double()
    output, features = outputs_and_features(net, model, x)
    torch.testing.assert_close(output, features @ model["head.weight"].T + model["head.bias"])
    hidden = x @ model["body.weight"].T + model["body.bias"]
    torch.testing.assert_close(features, torch.tanh(hidden / math.sqrt(1 + 1e-5)))

    def of_weight(weight: Tensor) -> Tensor:
        return outputs_and_features(net, model | {"body.weight": weight}, x)[1].sum()

    weight = model["body.weight"].clone().requires_grad_()
    expected = torch.tanh((x @ weight.T + model["body.bias"]) / math.sqrt(1 + 1e-5)).sum()
    (gradient,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(torch.func.grad(of_weight)(model["body.weight"]), gradient)
    assert not net.head._forward_pre_hooks  # nothing is left behind


def test_settings_are_those_that_are_published() -> None:
    """PeFLL, appendix C.2: what k and lambda are chosen from, and the best of its scales."""
    settings = from_keys("knn_per", knn_per.PRESETS["pefll"]).settings
    assert (settings.scale, settings.neighbours) == (100, (5, 10))
    assert settings.mixing == tuple(share / 10 for share in range(11))
    assert from_keys("knn_per", {}).settings.scale == 1

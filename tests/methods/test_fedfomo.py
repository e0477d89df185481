"""FedFomo: weights, update and affinities in NumPy, which models travel, and what is kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import trees
from hyperfed.data.newcomer import newcomer
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.methods import fedfomo
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import Model
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    make_task,
)

EXAMPLES = (12, 7, 20, 9, 15, 5)
SEED = 121
"""So that client 0 and, with batch-norm, client 4 gain from their own model; client 2 loses."""
MODEL = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
"""Bytes of a model."""


def federation(net: Any = TwoLayers, candidates: int = 5, **task: Any) -> Federation:
    """Six clients, each with a model of its own and a reference, both drawn at random."""
    toy = make_task(net, examples=EXAMPLES, **task)
    settings: dict[str, Any] = {"exploration": 0.0, "novel_steps": 1}
    ours = Federation("fedfomo", toy, **ONE_STEP, candidates=candidates, **settings)
    known = len(toy.known)
    ours.round(range(known))  # for the server to hold something of everyone
    draw = torch.Generator().manual_seed(SEED)
    for client in range(known):
        kept, models = ours.engine.memory[client], ours.server.trained["base"]
        for name, value in models.items():
            if value.is_floating_point() and "running_var" not in name:
                value[client], kept["reference"][name] = 0.6 * torch.randn(
                    2, *value.shape[1:], generator=draw, dtype=torch.float64
                )
        kept["model"] = trees.clone(trees.take(models, client))
    return ours


def loss_by_hand(task: Task, rows: Tensor, model: Model) -> float:
    """Cross entropy of the toy network, in NumPy; batch-norm, if any, by its own statistics."""
    x, y = task.x[rows].numpy(), task.y[rows].numpy()
    net = {name: value.numpy() for name, value in model.items()}
    hidden = x @ net["body.weight"].T + net["body.bias"]
    if "norm.weight" in net:
        spread = np.sqrt(net["norm.running_var"] + 1e-5)
        hidden = (hidden - net["norm.running_mean"]) / spread * net["norm.weight"]
        hidden = hidden + net["norm.bias"]
    outputs = np.tanh(hidden) @ net["head.weight"].T + net["head.bias"]
    log_sum = np.log(np.exp(outputs).sum(axis=1))
    return float((log_sum - outputs[np.arange(len(y)), y]).mean())


def weights_by_hand(
    task: Task, client: int, reference: Model, candidates: list[Model]
) -> np.ndarray:
    """The weights of the paper's equation, before anything is cut off."""
    rows, weights = task.val[client], []
    parameters = [name for name, _ in task.models["base"].named_parameters()]
    for other in candidates:
        gain = loss_by_hand(task, rows, reference) - loss_by_hand(task, rows, other)
        squares = [((other[name] - reference[name]).numpy() ** 2).sum() for name in parameters]
        weights.append(gain / np.sqrt(sum(squares)))
    return np.array(weights)


def stepped(task: Task, client: int, model: Model) -> Model:
    """One gradient step on all training data of a client."""
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    client_loss(task, client, leaves).backward()
    return {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}


def update_by_hand(reference: Model, candidates: list[Model], weights: np.ndarray) -> Model:
    used = np.where(weights > 0, weights, 0.0)
    used = used / used.sum()
    pairs = list(zip(used, candidates, strict=True))
    return {
        name: value + sum(w * (model[name] - value) for w, model in pairs)
        for name, value in reference.items()
    }


def check_a_round(client: int = 0) -> None:
    """The client's own trained model is weighed like those of others, against its reference."""
    ours = federation()
    task, server = ours.task, ours.server
    server.affinity[client] = 0.3 * torch.arange(6.0).double()  # what is added must not replace it
    reference, own = (trees.clone(ours.engine.memory[client][k]) for k in ("reference", "model"))
    ids = [other for other in range(6) if other != client]
    others = [trees.clone(trees.take(server.trained["base"], other)) for other in ids]
    before = server.affinity.clone()
    weights = weights_by_hand(task, client, reference, [*others, own])
    assert (weights > 0).sum() > 1  # so that they must be divided by their sum
    assert (weights < 0).any()
    ours.round([client], 1)
    start = update_by_hand(reference, [*others, own], weights)
    expected = stepped(task, client, start)
    close(ours.engine.memory[client]["model"], expected)
    close(ours.engine.memory[client]["reference"], start)
    close(trees.take(server.trained["base"], client), expected)
    gained = torch.zeros(6, dtype=torch.float64)
    gained[ids] = torch.from_numpy(weights[:-1] / np.abs(weights).sum())
    close(server.affinity[client] - before[client], gained)
    others_rows = torch.arange(6) != client
    assert torch.equal(server.affinity[others_rows], before[others_rows])


@pytest.mark.parametrize("client", [0, 2])
def test_a_round_is_that_of_the_paper(client: int) -> None:
    check_a_round(client)


def test_one_better_peer_leaves_the_client_its_own_share() -> None:
    """The reference is the model before the client's training, whose gain so counts for itself."""
    ours = Federation("fedfomo", make_task(examples=EXAMPLES), **ONE_STEP, candidates=1)
    ours.round([0, 1], 0)
    task, initial = ours.task, trees.clone(ours.engine.memory[0]["reference"])
    own = trees.clone(ours.engine.memory[0]["model"])
    peer = own
    for _ in range(2):
        peer = stepped(task, 0, peer)
    for name, value in ours.server.trained["base"].items():
        value[1] = peer[name]
    reference, better, best = (loss_by_hand(task, task.val[0], m) for m in (initial, own, peer))
    assert best < better < reference
    weights = weights_by_hand(task, 0, initial, [peer, own])
    ours.round([0], 1)
    start = ours.engine.memory[0]["reference"]
    close(start, update_by_hand(initial, [peer, own], weights))
    assert (start["body.weight"] - peer["body.weight"]).abs().max() > 1e-3


def check_the_best_are_sent() -> None:
    ours = federation(candidates=3)
    ours.server.affinity[1] = torch.tensor([0.2, 9.0, -0.4, 0.7, 0.0, 0.1]).double()
    cohort = ours.engine.cohort([1], 5, training=True)
    assert ours.server.candidates(cohort) == [[3, 0, 5]]  # never the client itself
    sent = ours.server.models([[3, 0, 5]], "base").slice(0)
    for place, client in (("0", 3), ("1", 0), ("2", 5)):
        expected = trees.take(ours.server.trained["base"], client)
        torch.testing.assert_close(sent[place], expected, rtol=0, atol=0)


def test_the_candidates_are_those_of_the_highest_affinity() -> None:
    check_the_best_are_sent()


# Mutants


def ascending(ranked: list[int], *more: Any) -> list[int]:
    return fedfomo_fill_places(ranked[::-1], *more)


fedfomo_fill_places = fedfomo.fill_places


def sum_of_models(own: Model, others: list[Model], weights: Tensor) -> Model:
    return {
        name: value + sum(w * other[name] for w, other in zip(weights, others, strict=True))
        for name, value in own.items()
    }


def not_cut_off(weights: Tensor) -> Tensor:
    return torch.nan_to_num(weights / weights.sum())


def magnitudes(weights: Tensor) -> Tensor:
    return F.normalize(weights.abs(), p=1, dim=0)


def not_normalised(weights: Tensor) -> Tensor:
    return weights.clamp(min=0)


def equal(weights: Tensor) -> Tensor:
    return torch.nan_to_num((weights > 0).double() / (weights > 0).sum())


def training_loss(client: fedfomo.Client, model: Model) -> Tensor:
    return fedfomo.mean_loss(client.module, client.loss, model, client.train.chunks(512))


def loss_of_the_other(client: fedfomo.Client, model: Model) -> Tensor:
    return -fedfomo_validation_loss(client, model)


fedfomo_validation_loss = fedfomo.Client.validation_loss


def no_distance(client: fedfomo.Client, first: Model, second: Model) -> Tensor:
    return torch.ones((), dtype=torch.float64)


def squared_distance(client: fedfomo.Client, first: Model, second: Model) -> Tensor:
    return fedfomo_distance(client, first, second) ** 2


fedfomo_distance = fedfomo.Client.distance


@pytest.mark.parametrize(
    ("place", "name", "mutant", "check"),
    [
        (fedfomo, "fill_places", ascending, check_the_best_are_sent),
        (fedfomo, "moved", sum_of_models, check_a_round),
        (fedfomo, "shares", not_cut_off, check_a_round),
        (fedfomo, "shares", magnitudes, check_a_round),
        (fedfomo, "shares", not_normalised, check_a_round),
        (fedfomo, "shares", equal, check_a_round),
        (fedfomo.Client, "validation_loss", training_loss, check_a_round),
        (fedfomo.Client, "validation_loss", loss_of_the_other, check_a_round),
        (fedfomo.Client, "distance", no_distance, check_a_round),
        (fedfomo.Client, "distance", squared_distance, check_a_round),
    ],
)
def test_mutant_is_caught(
    place: Any,
    name: str,
    mutant: Callable[..., Any],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, mutant)
    with pytest.raises(AssertionError):
        check()


# Limits


def spoil(ours: Federation, *clients: int) -> None:
    """Makes the models of some clients the worst there can be: sure of a class, and wrong."""
    wrong = torch.tensor([50.0, -50.0, -50.0]).double()
    for client in clients:
        ours.server.trained["base"]["head.bias"][client] = wrong
        ours.engine.memory[client]["model"]["head.bias"] = wrong


def test_a_client_goes_on_from_its_own_model_where_no_other_is_better() -> None:
    ours = federation()
    spoil(ours, 1, 2, 3, 4, 5)
    kept = ours.engine.memory[0]
    kept["model"] = own = stepped(ours.task, 0, kept["reference"])
    ours.round([0], 1)
    close(ours.engine.memory[0]["model"], stepped(ours.task, 0, own))
    assert (ours.server.affinity[0, 1:] < 0).all()


def test_a_client_goes_back_to_its_reference_where_its_own_model_is_worse_too() -> None:
    ours = federation()
    spoil(ours, *range(6))
    reference = trees.clone(ours.engine.memory[0]["reference"])
    ours.round([0], 1)
    expected = stepped(ours.task, 0, reference)
    close(ours.engine.memory[0]["model"], expected)


def test_a_candidate_at_distance_zero_weighs_nothing() -> None:
    ours = federation(candidates=2)
    reference = trees.clone(ours.engine.memory[0]["reference"])
    ours.engine.memory[0]["model"] = trees.clone(reference)
    for name, value in ours.server.trained["base"].items():
        value[1:] = reference[name]
    before = ours.server.affinity.clone()
    ours.round([0], 1)
    expected = stepped(ours.task, 0, reference)
    close(ours.engine.memory[0]["model"], expected)
    assert torch.equal(ours.server.affinity, before)


def test_a_candidate_without_a_finite_loss_weighs_nothing() -> None:
    """As of a loss that overflows on what another client's model says of these data."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        usual = F.cross_entropy(output, y)
        return usual.where(output.abs().max() < 40, torch.inf)

    ours, usual = federation(candidates=2, loss=loss), federation(candidates=2)
    spoil(ours, 1)
    cohort = ours.engine.cohort([0], 1, training=True)
    reply = cohort.ask(fedfomo.Client.weigh, ours.server.models([[1, 3]], "base"))
    assert cohort.weight.all()
    alone = usual.engine.cohort([0], 1, training=True)
    expected = alone.ask(fedfomo.Client.weigh, usual.server.models([[3]], "base"))
    close(reply["weights"][0, 1], expected["weights"][0, 0])
    assert not reply["weights"][0, 0]


def test_the_first_round_is_local_training() -> None:
    ours = Federation("fedfomo", make_task(), **ONE_STEP)
    cohort = ours.round([0, 1])
    initial = ours.task.outline().initial()
    for client in (0, 1):
        expected = stepped(ours.task, client, initial)
        close(ours.personal(client), expected)
    assert sum(exchange.down for exchange in cohort.state.exchanges) == 0


def test_without_validation_data_a_client_weighs_on_its_training_data() -> None:
    ours = federation()
    task = ours.task
    task.val[0] = torch.tensor([], dtype=torch.int64)  # type: ignore[index]
    kept = ours.engine.memory[0]
    kept["model"] = kept["reference"]  # at distance zero
    other = trees.take(ours.server.trained["base"], 3)
    cohort = ours.engine.cohort([0], 1, training=True)
    reply = cohort.ask(fedfomo.Client.weigh, ours.server.models([[3]], "base"))
    before, after = (loss_by_hand(task, task.train[0], m) for m in (kept["reference"], other))
    assert reply["weights"][0].tolist() == [np.sign(before - after), 0, 0, 0, 0]


def test_batch_norm_buffers_move_with_the_weights() -> None:
    ours = federation(Normed)
    ours.server.trained["base"]["norm.num_batches_tracked"][:] = torch.arange(10, 70, 10)
    kept = ours.engine.memory[4]
    kept["model"]["norm.num_batches_tracked"] = torch.tensor(57)
    kept["reference"]["norm.num_batches_tracked"] = torch.tensor(40)
    reference, ids = trees.clone(kept["reference"]), [0, 1, 2, 3, 5]
    others = [trees.clone(trees.take(ours.server.trained["base"], other)) for other in ids]
    candidates = [*others, trees.clone(kept["model"])]
    weights = weights_by_hand(ours.task, 4, reference, candidates)
    assert 1 < (weights > 0).sum() < 6
    ours.round([4], 1)
    start = update_by_hand(reference, candidates, weights)
    trained = ours.engine.memory[4]["model"]
    counted = trained["norm.num_batches_tracked"]
    assert counted == round(float(start["norm.num_batches_tracked"])) + 1
    assert counted.dtype == torch.int64
    x = ours.task.x[ours.task.train[4]]
    seen = (x @ start["body.weight"].T + start["body.bias"]).mean(dim=0)
    expected = 0.9 * start["norm.running_mean"] + 0.1 * seen
    close(trained["norm.running_mean"], expected)


# Candidates


def test_only_others_that_have_trained_are_candidates() -> None:
    ours = Federation("fedfomo", make_task(), **ONE_STEP, candidates=3)
    ours.round([0, 2])
    cohort = ours.engine.cohort([0, 1, 2], 1, training=True)
    found = [sorted(row) for row in ours.server.candidates(cohort)]
    assert found == [[2], [0, 2], [0]]


def draws(round: int, clients: list[int], seed: int = 0, **settings: Any) -> list[list[int]]:
    ours = Federation("fedfomo", make_task(examples=EXAMPLES), **ONE_STEP, **settings)
    with seeded(seed, "server"):
        ours.server = fedfomo.Server(ours.task.outline(), ours.config)
    ours.server.there["base"][:] = True
    ours.server.affinity[0] = torch.arange(6.0).double()
    return ours.server.candidates(ours.engine.cohort(clients, round, training=True))


def test_candidates_are_drawn_for_seed_round_and_client_whoever_else_takes_part() -> None:
    explore = {"exploration": 1.0, "exploration_decay": 0.0, "candidates": 3}
    first = draws(4, [0, 1, 3], **explore)
    assert first == draws(4, [0, 1, 3], **explore)
    assert first[1:] == draws(4, [1, 3], **explore)
    assert len({str(draws(number, [0, 1, 3], **explore)) for number in range(5)}) > 1
    assert len({str(draws(4, [0, 1, 3], seed, **explore)) for seed in range(5)}) > 1
    assert len({str(row) for row in draws(4, [1, 2, 3, 4, 5], **explore)}) > 1  # ties too
    half = {"exploration": 0.5, "exploration_decay": 0.0}
    assert draws(4, [1, 0], **half)[1:] == draws(4, [0], **half)  # and where it explores


def test_exploration_falls_until_only_the_best_are_sent() -> None:
    best = [5, 4, 3]
    falling = {"exploration": 1.0, "exploration_decay": 0.25, "candidates": 3}
    assert draws(4, [0], **falling) == [best]
    explored = [draws(number, [0], **falling)[0] for number in range(3)]
    assert any(row != best for row in explored)
    assert all(len(set(row)) == 3 and 0 not in row for row in explored)
    half = [draws(number, [0], exploration=0.5, candidates=1)[0] for number in range(10)]
    assert [5] in half[:9]
    assert half[9] == [5]  # 0.5 - 9 * 0.05 is left


def test_exploration_falls_by_as_much_in_each_round_and_ends() -> None:
    """Not by as large a share, of which one draw would tell nothing."""
    falling = {"exploration": 1.0, "exploration_decay": 0.25, "candidates": 3}
    found = [draws(4, [0], seed, **falling) for seed in range(40)]
    assert found == [[[5, 4, 3]]] * 40


def test_each_place_explores_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []

    def fill_places(ranked: list[int], at_random: list[int], explores: list[bool]) -> list[int]:
        seen.append(explores)
        return fedfomo_fill_places(ranked, at_random, explores)

    monkeypatch.setattr(fedfomo, "fill_places", fill_places)
    for number in range(40):
        draws(number, [0], exploration=0.5, exploration_decay=0.0, candidates=3)
    assert {sum(row) for row in seen} == {0, 1, 2, 3}
    assert 45 < sum(map(sum, seen)) < 75  # of 120


def test_exploration_is_by_default_that_of_the_authors_command() -> None:
    ours = fedfomo.Config()
    assert (ours.exploration, ours.exploration_decay) == (0.3, 0.05)


def test_candidates_have_the_clients_target_size() -> None:
    models = {"S": TwoLayers().double(), "L": Normed().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    ours = Federation("fedfomo", task, **ONE_STEP)
    ours.round([0, 1, 2, 3])
    groups = ours.engine.cohort([0, 1, 2, 3], 1, training=True).sizes
    assert ours.server.candidates(groups["S"]) == [[2], [0]]
    assert ours.server.candidates(groups["L"]) == [[3], [1]]


# What travels, what is kept, which model is evaluated


def test_what_travels_are_the_candidates_their_weights_and_the_trained_model() -> None:
    ours = Federation("fedfomo", make_task(), **ONE_STEP, candidates=2)
    ours.round([0, 1, 2])
    cohort = ours.round([0, 3], 1)
    exchanges = {(e.step, e.client): (e.down, e.up) for e in cohort.state.exchanges}
    weighed, trained = (2 * MODEL, 2 * 8), (0, MODEL)
    assert exchanges == {
        ("weigh", 0): weighed,
        ("weigh", 3): weighed,
        ("train_model", 0): trained,
        ("train_model", 3): trained,
    }


def test_who_has_fewer_candidates_than_another_is_sent_fewer() -> None:
    ours = Federation("fedfomo", make_task(), **ONE_STEP, candidates=2)
    ours.round([0, 1])
    exchanges = ours.round([0, 2], 1).state.exchanges
    sent = {exchange.client: exchange.down for exchange in exchanges if exchange.step == "weigh"}
    assert sent == {0: MODEL, 2: 2 * MODEL}


def check_the_evaluated_model() -> None:
    ours = federation()
    ours.round([0, 1], 1)
    for client in (0, 1, 2):
        mine = ours.engine.memory[client]["model"]
        torch.testing.assert_close(ours.personal(client), mine, rtol=0, atol=0)


def test_the_trained_model_is_evaluated() -> None:
    check_the_evaluated_model()


def test_mutant_that_evaluates_another_model_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of all models, as of a method with a global one."""

    def mean(server: fedfomo.Server, clients: Any) -> Model:
        return trees.weighted_mean(server.trained["base"], torch.ones(6))

    def received_model(client: fedfomo.Client, received: Model) -> Model:
        return received or client.recall("model", client.initial)

    monkeypatch.setattr(fedfomo.Server, "personalize", mean)
    monkeypatch.setattr(fedfomo.Client, "personal_model", received_model)
    with pytest.raises(AssertionError):
        check_the_evaluated_model()


def test_a_client_that_was_never_asked_has_the_initial_model() -> None:
    ours = Federation("fedfomo", make_task(), **ONE_STEP)
    ours.round([0, 1])
    torch.testing.assert_close(ours.personal(2), ours.task.outline().initial())


def test_a_client_lost_after_it_weighed_changes_no_affinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = federation()
    before = trees.clone(ours.server.state())
    kept = trees.clone(ours.engine.memory[1])

    def fails_to_train(faults: Faults, seed: int, call: Call) -> bool:
        return call.client == 1 and call.step == "train_model"

    monkeypatch.setattr(Faults, "spoils", fails_to_train)
    cohort = ours.round([0, 1], 1)
    assert list(cohort.state.lost) == [1]
    after = ours.server.state()
    assert torch.equal(after["affinity"][1], before["affinity"][1])
    assert not torch.equal(after["affinity"][0], before["affinity"][0])
    torch.testing.assert_close(
        trees.take(after["trained"]["base"], 1), trees.take(before["trained"]["base"], 1)
    )
    torch.testing.assert_close(ours.engine.memory[1], kept, rtol=0, atol=0)


def test_a_novel_client_starts_from_the_initial_model_with_candidates_at_random() -> None:
    ours = federation(candidates=2, novel=1)
    ours.server.affinity[:] = torch.arange(5.0).double()
    cohort = ours.engine.cohort([5], 99, training=False)
    (ids,) = ours.server.candidates(cohort)
    assert len({*ids, *range(5)}) == 5
    initial = ours.task.outline().initial()
    others = [trees.take(ours.server.trained["base"], other) for other in ids]
    weights = weights_by_hand(ours.task, 5, initial, others)
    start = update_by_hand(initial, others, weights) if (weights > 0).any() else initial
    expected = stepped(ours.task, 5, start)
    close(ours.personal(5), expected)
    asked = ours.engine.cohort([5], 99, training=False)
    ours.server.personalize(asked)
    assert [(e.step, e.down, e.up) for e in asked.state.exchanges] == [
        ("weigh", 2 * MODEL, 2 * 8),
        ("train_personal_model", 0, 0),
    ]


def test_a_newcomer_is_sent_the_model_of_a_client_whose_number_it_shares() -> None:
    """Its task has one client, number 0, as has the one that the server knows."""
    ours = Federation("fedfomo", make_task(), **ONE_STEP)
    ours.round([0])
    task, rows = ours.task, ours.task.train[1]
    came = LoopEngine(
        newcomer(task, task.x[rows], task.y[rows]), fedfomo.Client, ours.config, seed=0
    )
    cohort = came.cohort([0], 99, training=False)
    assert ours.server.candidates(cohort) == [[0]]

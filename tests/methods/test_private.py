"""Private training under every method: which can, and that nothing goes past the noise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines import updates
from hyperfed.engines.calls import Answer, Call, find_step, perform, promised
from hyperfed.engines.updates import PrivateUpdates, Where
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError
from hyperfed.methods import METHODS
from hyperfed.methods.parts.hypernet_training import clip_together
from hyperfed.runs.capability import NO_UPDATES
from hyperfed.runs.private import AggregateNoise
from hyperfed.task import Task
from hyperfed.training import Steps
from hyperfed.trees import Tree
from hyperfed.trees.aggregation import MEAN, MeanNoise
from toys import ONE_STEP, Federation, Normed, TwoLayers, client_loss, close, make_task, short

TASK = make_task(examples=(8, 8, 8))
OTHERS = replace(TASK, x=-2 * TASK.x, y=(TASK.y + 1) % 3)
"""The same clients with other data."""


def blind(mean: Tree, share: float, clients: Any) -> Tree:
    """As with infinitely much noise: what is told does not depend on any client."""
    return trees.tree_map(torch.zeros_like, mean)


def knows(method: str, task: Task, where: Where, **settings: Any) -> Tree:
    """All that a server has after two rounds in which it was told nothing of the data."""
    private = PrivateUpdates(where, 1.0, 1.0, math.inf, 1e-3)
    ours = Federation(method, task, {"private": private}, **short(method, **settings))
    for number in range(2):
        cohort = ours.engine.cohort([0, 1, 2], number, training=True)
        with trees.aggregating(MEAN, MeanNoise(1.0, blind) if where == "central" else None):
            ours.server.round(cohort)
            ours.server.state()
        ours.engine.commit(cohort)
        assert cohort.state.exchanges
    return trees.clone(ours.server.state())


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"local"}))  # where nothing is sent
def test_what_a_server_knows_has_come_through_the_noise_or_the_method_is_refused(
    method: str, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(centre: Tree, noisy: Tensor) -> Tree:
        return updates.moved(centre, torch.linspace(-1, 1, len(noisy)).double())

    monkeypatch.setattr("hyperfed.engines.calls.moved", told)
    settings: dict[str, Any] = {"standardize": False} if where == "central" else {}
    settings |= {"absorb_steps": 1}
    if method in NO_UPDATES:
        with pytest.raises((UserError, AllLostError), match="is none; choose a method"):
            knows(method, TASK, where, **settings)
        return
    ours, theirs = (knows(method, task, where, **settings) for task in (TASK, OTHERS))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["fedala", "fedavg", "fedprox", "pfedla"])
def test_what_a_newcomer_trains_for_itself_is_told_to_nobody(method: str) -> None:
    """So it has no noise, costs nothing, and is what training as in a round makes of the model."""
    private = PrivateUpdates("local", 0.1, 1.0, 1e9, 1e-3)
    noisy, clear = (
        Federation(method, make_task(novel=1), {"private": where}, **short(method, novel_steps=5))
        for where in (private, None)
    )
    cohort = noisy.engine.cohort([3], 0, training=False)
    served = cohort.ask(noisy.method.Client.export, noisy.server.personalize(cohort))
    assert [(e.step, e.up) for e in cohort.state.exchanges[:-1]] == [("join", 0)]
    assert noisy.engine.released == {}
    trained = clear.engine.cohort([3], 0, training=False).ask(
        clear.method.Client.train_model, clear.task.initial("base"), batches=Steps(5, 4)
    )
    close(served, trained)


def test_a_number_that_noise_does_not_reach_is_found() -> None:
    ours, theirs = (knows("pefll", task, "central", standardize=True) for task in (TASK, OTHERS))
    assert not torch.equal(ours["standard"]["mean"], theirs["standard"]["mean"])


def alike(method: str) -> set[str]:
    """The steps of a method's own file whose reply is like what came, and depends on data."""
    client = METHODS[method].Client
    own = [of for of in vars(client).values() if getattr(of, "__module__", "") == client.__module__]
    steps = [of.step for of in own if hasattr(of, "step")]
    return {info.name for info in steps if info.like and info.reads}


ALIKE = sorted(filter(alike, METHODS))

PHASES: dict[str, dict[str, Any]] = {
    "lg_fedavg": {"pretrain_rounds": 1},
    "mh_pfedhn": {"global_model": True},
}
STILL: dict[str, dict[str, Any]] = {
    "fedas": {"align_epochs": 0},
    "itpfl": {"encoder_lr": 1e-12, "phase_one_rounds": 1},
}


@pytest.mark.parametrize("method", sorted(set(ALIKE) - {"pfedkt"}))  # what it sends is its own
def test_who_does_not_learn_says_nothing_by_the_measure_of_its_bound(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference that was marked as a model, or a model as a difference, would be far from it."""
    told: dict[str, float] = {}

    def noting(call: Call, **options: Any) -> Answer:
        answer = perform(call, **options)
        _, info = find_step(options["client"], call.step)
        like = promised(info, call)
        if like is not None and answer.tree:
            centre = updates.centre_of(answer.tree, like, info)
            far = trees.tree_map(lambda a, b: (a - b).abs().max(), answer.tree, centre)
            told[call.step] = max(leaf.item() for _, leaf in trees.leaves(far))
        return answer

    monkeypatch.setattr("hyperfed.engines.calls.perform", noting)
    for phase in ({}, PHASES.get(method, {})):
        net = Normed if method == "fedbn" else TwoLayers
        own = short(method, local_lr=1e-12) | STILL.get(method, {}) | phase
        ours = Federation(method, make_task(net, examples=(8, 8, 8)), **own)
        for number in range(2):
            ours.round([0, 1, 2], number)
    assert told.keys() == alike(method)
    assert max(told.values()) < 1e-9


def with_noise(value: float) -> MeanNoise:
    return MeanNoise(
        CLIP, lambda mean, share, clients: trees.tree_map(lambda leaf: leaf + value, mean)
    )


CLIP, RATE = 0.03, 0.5
PLAIN_SERVER = {"lr": RATE, "momentum": 0.0, "weight_decay": 0.0, "clip": None}
PRIVATE_SERVER = PrivateUpdates("central", CLIP, 1.0, math.inf, 1e-3)


@pytest.mark.parametrize(("reduction", "together"), [("mean", 3), ("sum", 1)])
@pytest.mark.parametrize("lost", [False, True])
def test_of_a_hypernetwork_all_that_a_client_moves_is_bounded_as_one_and_has_noise(
    lost: bool, reduction: str, together: int
) -> None:
    server = PLAIN_SERVER | {"cohort_reduction": reduction}

    def moved(by: float) -> tuple[list[Tensor], Tensor]:
        ours = Federation("pfedhn", make_task(), {"private": PRIVATE_SERVER}, **ONE_STEP, **server)
        parameters = [ours.server.embeddings.weight, *ours.server.hyper_net.parameters()]
        before = [parameter.detach().clone() for parameter in parameters]
        cohort = ours.engine.cohort([0, 1, 2, 3] if lost else [0, 1, 3], 0, training=True)
        cohort.state.lost |= {2: "away"} if lost else {}
        with trees.aggregating(MEAN, with_noise(by)):
            ours.server.round(cohort)
        return [(b - p).detach() / RATE for b, p in zip(before, parameters, strict=True)]

    ours = Federation("pfedhn", make_task(), **ONE_STEP, **server)
    embeddings, hyper_net = ours.server.embeddings.weight, ours.server.hyper_net
    expected = [torch.zeros_like(p) for p in (embeddings, *hyper_net.parameters())]
    lengths = []
    for client in (0, 1, 3):
        made = hyper_net(embeddings[client : client + 1], "base")
        model = {name: value[0].detach().requires_grad_() for name, value in made.items()}
        loss = client_loss(ours.task, client, model)
        delta = [0.1 * g for g in torch.autograd.grad(loss, list(model.values()))]
        length = torch.cat([d.flatten() for d in delta]).norm()
        delta = [d * min(1.0, CLIP / float(length)) for d in delta]
        inner = sum((made[n][0] * d).sum() for n, d in zip(model, delta, strict=True))
        pulled = torch.autograd.grad(inner, [embeddings, *hyper_net.parameters()])
        length = torch.cat([g.flatten() for g in pulled]).norm()
        lengths.append(float(length))
        share = min(1.0, CLIP / float(length)) / together
        expected = [sum_ + share * g for sum_, g in zip(expected, pulled, strict=True)]
    assert max(lengths) > CLIP  # or nothing was bounded
    for step, gradient in zip(moved(0.0), expected, strict=True):
        torch.testing.assert_close(step, gradient, rtol=1e-8, atol=1e-10)
    there = torch.tensor([1.0, 1.0, 0.0, 1.0]).double()  # of client 2 nothing moves
    for place, (step, gradient) in enumerate(zip(moved(1.0), expected, strict=True)):
        added = (there[:, None] if place == 0 else 1.0) * 3 / together  # of a mean over three
        torch.testing.assert_close(step, gradient + added, rtol=1e-8, atol=1e-10)


def test_what_a_client_moves_of_a_hypernetwork_is_as_long_in_lower_precision() -> None:
    ones, short_of_one = torch.ones(2, 999).bfloat16(), 1 - 0.4 * 2**-8  # it is rounded up
    (ours,) = clip_together([ones], short_of_one * 999**0.5)
    assert ours.double().norm(dim=1).tolist() == pytest.approx([short_of_one * 999**0.5] * 2)


def test_a_mean_has_noise_before_it_is_rounded() -> None:
    """In bfloat16 a third of three models is another model."""
    w = torch.linspace(1, 2, 100).bfloat16().repeat(3, 1)
    w[0] = torch.nextafter(w[0], torch.full_like(w[0], 9))
    told = []

    def add(mean: Tree, share: float, clients: Any) -> Tree:
        told.append(mean["w"])
        return mean

    with trees.aggregating(MEAN, MeanNoise(1.0, add)):
        mean = trees.weighted_mean({"w": w, "steps": torch.tensor([1, 1, 1])}, torch.ones(3))
    torch.testing.assert_close(told[0], w.double().mean(dim=0), rtol=1e-12, atol=0)
    assert (mean["w"].dtype, mean["steps"].dtype) == (torch.bfloat16, torch.int64)


def test_a_client_s_gradients_are_bounded_as_one_and_nothing_where_they_overflow() -> None:
    matrix = torch.tensor([[[3.0, 0.0]], [[0.3, 0.0]], [[1.0, torch.nan]], [[1.0, 1.0]]])
    vector = torch.tensor([[4.0], [0.4], [1.0], [torch.inf]])
    found = clip_together([matrix, vector], 2.5)  # of lengths 5 and 0.5, and two of none
    expected = [matrix.double(), vector.double()]
    for each in expected:
        each[0] /= 2
        each[2:] = 0
    torch.testing.assert_close(found, expected)


def test_of_several_sizes_the_noise_is_that_of_each_one_s_clients() -> None:
    """A mean over two clients has half of what one of one client has."""
    private = PrivateUpdates("central", 0.5, 3.0, math.inf, 1e-3)
    sizes = {"models": {"S": TwoLayers().double(), "L": TwoLayers().double()}}
    shares = []

    def note(mean: Tree, share: float, clients: Any) -> Tree:
        shares.append(share)
        return mean

    task = make_task(sizes=("S", "L", "S", "S"), **sizes)
    ours = Federation("fedavg", task, {"private": private}, **short("fedavg"))
    cohort = ours.engine.cohort([0, 1, 2], 0, training=True)
    with trees.aggregating(MEAN, MeanNoise(0.5, note)):
        ours.server.round(cohort)
    assert shares == [0.5, 1.0]


@pytest.mark.parametrize("secret", [False, True])
def test_the_noise_of_a_mean_is_normal_in_proportion_to_a_clients_share(secret: bool) -> None:
    private = PrivateUpdates("central", 0.5, 3.0, math.inf, 1e-3)
    noise = AggregateNoise(private, 0, 0, secret=secret)
    mean = {"w": torch.ones(2500), "norm.running_mean": torch.ones(500), "steps": torch.tensor(3)}
    told = [noise.add(mean, 0.25) for _ in range(2)]
    assert noise.told == 2
    assert told[0]["steps"] == 3
    sigma = 3.0 * 2 * 0.5 * 0.25
    for name in ("w", "norm.running_mean"):
        z = torch.cat([(each[name] - 1) / sigma for each in told]).double()
        assert abs(float(z.square().sum()) - len(z)) < 4.5 * math.sqrt(2 * len(z))
        assert abs(float(z.mean())) < 4.5 / math.sqrt(len(z))
    apart = torch.stack([each["w"] for each in told]).corrcoef()[0, 1]
    assert abs(float(apart)) < 4.5 / math.sqrt(2500)
    assert told[0]["w"].dtype == torch.float32
    again = AggregateNoise(private, 0, 0, secret=secret).add(mean, 0.25)["w"]
    assert torch.equal(again, told[0]["w"]) is not secret
    other = AggregateNoise(private, 0, 1).add(mean, 0.25)["w"]
    assert not torch.equal(other, told[0]["w"])
    variance = noise.add({"running_var": torch.zeros(99)}, 1.0)["running_var"]
    assert variance.min() == 0 < variance.max()

"""What a client answers in private training: how far it reaches, and how much noise it has."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import federation, trees
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.engines.replies import BadReplyError
from hyperfed.engines.updates import PrivateUpdates, bounded, without_negative_variances
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Each, step
from hyperfed.methods import fedavg, fedper
from hyperfed.methods.parts.privacy import PrivacyConfig
from hyperfed.task import Task
from hyperfed.training import Steps
from hyperfed.trees import Tree
from toys import ONE_STEP, Federation, Normed, make_task, short

CLIP, MULTIPLIER = 0.4, 1.5  # a sensitivity of 1 would hide what divides by it
SIGMA = MULTIPLIER * 2 * CLIP  # of whoever could have answered with -x in the place of x
FREE = PrivateUpdates("local", CLIP, MULTIPLIER, math.inf, 1e-3)


class Client(federation.Client):
    """Answers with what it is told to, so that only what is done to it shows."""

    @step(like="model")
    def model(self, model: Tree, own: Tree) -> Tree:
        self.memory["own"] = own
        names = sorted(model, reverse=True)  # in which order they come does not matter
        return {name: model[name] + own[name] for name in names}

    @step(like="model", bounded="reply")
    def difference(self, model: Tree, own: Tree) -> Tree:
        return own

    @step(bounded="reply")
    def vector(self, own: Tree) -> Tree:
        return {"vector": own["w"].flatten()}

    @step(bounded="reply")
    def released(self, own: Tree) -> Tree:
        return {"vector": self.release(own["w"].flatten(), 0.1)}

    @step
    def unbounded(self, own: Tree) -> Tree:
        return own

    @step
    def silent(self, own: Tree) -> Tree:
        return {}

    @step(like="model", reads=0)
    def drawn(self, model: Tree, own: Tree) -> Tree:
        return self.model(model, own)


SENT: Tree = {
    "running_mean": torch.linspace(-1, 1, 3).double(),
    "steps": torch.tensor(7),
    "w": torch.arange(6.0).double().view(2, 3),
}


def change(size: float, *, seed: int = 0) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    made = {
        n: torch.randn(v.shape, generator=draw).double() for n, v in SENT.items() if n != "steps"
    }
    length = math.sqrt(sum(float(v.square().sum()) for v in made.values()))
    return {n: v * size / length for n, v in made.items()} | {"steps": torch.tensor(3)}


def engine(private: PrivateUpdates | None, kind: type[LoopEngine] = LoopEngine) -> LoopEngine:
    return kind(make_task(), Client, None, seed=0, private=private)


def asked(engine: LoopEngine, name: str, own: Tree, *, round: int = 0, clients: int = 1) -> Tree:
    cohort = engine.cohort(list(range(clients)), round, training=True)
    alone = name in ("vector", "released", "unbounded", "silent")
    payload = [own] if alone else [SENT, own]
    reply = cohort.ask(getattr(Client, name), *payload)
    engine.commit(cohort)
    return reply


def flat(tree: Tree) -> Tensor:
    return torch.cat([v.flatten() for n, v in sorted(tree.items()) if v.is_floating_point()])


def from_sent(reply: Tree) -> Tensor:
    return flat(trees.take(reply, 0)) - flat(SENT)


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize("size", [0.2, 0.5, 1e6])
def test_an_answer_is_scaled_down_to_the_clip_with_its_buffers_and_without_whole_numbers(
    where: Any, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperfed.engines.calls.seeded_noise", lambda _: torch.zeros_like)
    private = replace(FREE, where=where)
    own = change(size)
    shorter = flat(own) * min(1, CLIP / size)
    model = asked(engine(private), "model", own)
    torch.testing.assert_close(from_sent(model), shorter, atol=1e-10, rtol=1e-10)
    assert model["steps"].tolist() == [7]
    difference = asked(engine(private), "difference", own)
    torch.testing.assert_close(flat(trees.take(difference, 0)), shorter, atol=1e-10, rtol=1e-10)
    assert difference["steps"].tolist() == [0]
    alone = own["w"].flatten()
    vector = asked(engine(private), "vector", own)["vector"][0]
    expected = alone * min(1, CLIP / float(alone.norm()))
    torch.testing.assert_close(vector, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("where", ["local", "central"])
def test_an_answer_that_depends_on_no_data_is_as_it_is_and_costs_nothing(
    where: Any, kind: type[LoopEngine]
) -> None:
    ours, own = engine(replace(FREE, where=where), kind), change(1e6)
    torch.testing.assert_close(from_sent(asked(ours, "drawn", own)), flat(own))
    assert not ours.released


def test_an_answer_of_several_parts_is_scaled_as_one() -> None:
    """Parts within parts, in whatever order they come."""
    sent = {"a": torch.ones(2).double(), "b": {"c": torch.zeros(2, 2).double()}}
    told = {"b": {"c": torch.full((2, 2), 3.0).double()}, "a": torch.tensor([1.0, 9.0]).double()}
    reply = bounded(told, sent, Client.model.__dict__["step"], CLIP)
    shorter = CLIP / 10  # the change has length 10: 8 in "a", and 3 four times
    expected = {
        "a": torch.tensor([1.0, 1 + 8 * shorter]).double(),
        "b": {"c": torch.full((2, 2), 3 * shorter).double()},
    }
    torch.testing.assert_close(reply, expected)


def test_an_answer_of_other_parts_than_the_question_is_refused() -> None:
    sent = {"a": torch.ones(2), "b": {"c": torch.zeros(2)}}
    for told in ({"a": torch.ones(2)}, sent | {"d": torch.ones(1)}, {"a": sent["b"], "b": sent}):
        with pytest.raises(BadReplyError):
            bounded(told, sent, Client.model.__dict__["step"], CLIP)


def reached() -> Iterator[tuple[Tensor, Tensor]]:
    """What two clients with any data answer, without noise."""
    worst = change(9.0)
    opposite = {n: -v for n, v in worst.items()}
    nothing = {n: torch.full_like(v, torch.nan) for n, v in worst.items() if n != "steps"}
    far = {n: v * 1e300 for n, v in worst.items() if n != "steps"}
    for other in (opposite, nothing | {"steps": SENT["steps"]}, far | {"steps": SENT["steps"]}):
        for name in ("model", "difference"):
            info = getattr(Client, name).__dict__["step"]
            pair = []
            for own in (worst, other):
                told = own
                if name == "model":
                    told = {n: SENT[n] + v for n, v in own.items()}
                pair.append(flat(bounded(told, SENT, info, CLIP)))
            yield pair[0], pair[1]


def test_two_clients_with_any_data_are_never_farther_apart_than_the_sensitivity() -> None:
    apart = [float((one - other).norm()) for one, other in reached()]
    assert max(apart) <= FREE.sensitivity * (1 + 1e-12)
    assert max(apart) >= FREE.sensitivity * (1 - 1e-9)  # it is reached: no less would do


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["model", "difference"])
def test_an_answer_is_no_longer_than_the_clip_as_it_is_rounded(
    name: str, dtype: torch.dtype
) -> None:
    """Bounded, each number is at 0.6 of the way from one that there is to the next, farther one."""
    sent = torch.linspace(-2, 2, 999).repeat(9).to(dtype)
    beyond = torch.nextafter(sent, 9 * sent)
    reply, centre, nearer = beyond, sent.double(), sent
    if name == "difference":
        centre = torch.zeros_like(centre)
    exact = sent.double() + 0.6 * (beyond.double() - sent.double())
    if name == "difference":  # all of one size, so that one factor has them all between two
        reply = torch.ones_like(sent)
        nearer = torch.nextafter(reply, torch.zeros_like(reply))
        exact = nearer.double() + 0.6 * (1 - nearer.double())
    clip = float((exact - centre).norm())
    ours = bounded({"w": reply}, {"w": sent}, getattr(Client, name).__dict__["step"], clip)["w"]
    assert float((ours.double() - centre).norm()) <= clip
    assert torch.equal(ours, nearer)


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_the_noise_of_each_answer_is_normal_of_the_multiplier_times_the_sensitivity(
    kind: type[LoopEngine],
) -> None:
    ours, own = engine(FREE, kind), change(0.3)
    noise = torch.cat(
        [
            (flat(trees.take(reply, client)) - flat(SENT) - flat(own)) / SIGMA
            for number in range(100)
            for reply in [asked(ours, "model", own, round=number, clients=4)]
            for client in range(4)
        ]
    )
    # 3600 numbers: their sum of squares is within 4.5 deviations of a chi-square's mean.
    assert abs(float(noise.square().sum()) - len(noise)) < 4.5 * math.sqrt(2 * len(noise))
    assert abs(float(noise.mean())) < 4.5 / math.sqrt(len(noise))
    by_leaf = noise.view(-1, 9)  # of the buffers as of the rest, of each coordinate apart
    assert float((by_leaf.square().mean(dim=0) - 1).abs().max()) < 4.5 * math.sqrt(2 / 400)
    correlations = by_leaf.T.corrcoef() - torch.eye(9, dtype=torch.float64)
    assert float(correlations.abs().max()) < 4.5 / math.sqrt(400)


def test_an_answer_without_noise_is_not_measured_by_what_noise_others_have() -> None:
    """Who is alone in a round may answer as long as its noise is, where it has some."""
    noisy = replace(FREE, multiplier=1e3)
    for asks, is_lost in ((Client.drawn, True), (Client.model, False)):
        cohort = engine(noisy).cohort([0], 0, training=True)
        cohort.state.reply_bound = 10.0
        with pytest.raises(AllLostError, match="too large") if is_lost else nullcontext():
            cohort.ask(asks, SENT, change(1000.0))


def test_how_long_the_noise_of_an_answer_is() -> None:
    """Nine numbers of it are floats."""
    assert FREE.noise_in(SENT) == pytest.approx(3 * SIGMA)


def test_noise_is_a_function_of_the_question_and_of_nothing_else() -> None:
    first, other = engine(FREE), engine(FREE, VmappedEngine)
    own = change(0.3)
    together = asked(first, "model", own, clients=4)
    torch.testing.assert_close(asked(other, "model", own, clients=4), together, rtol=0, atol=0)
    torch.testing.assert_close(
        asked(engine(FREE), "model", own), trees.take(together, torch.tensor([0])), rtol=0, atol=0
    )
    later = asked(engine(FREE), "model", own, round=1)
    assert not torch.equal(from_sent(later), from_sent(together))
    assert not torch.equal(from_sent(together), flat(trees.take(together, 1)) - flat(SENT))
    cohort = engine(FREE).cohort([0], 0, training=True)  # twice in a round: other batches
    twice = [from_sent(cohort.ask(Client.model, SENT, own)) for _ in range(2)]
    assert not torch.equal(*twice)


def test_a_trusted_server_is_answered_without_noise_and_nobody_pays() -> None:
    ours = engine(replace(FREE, where="central"))
    torch.testing.assert_close(from_sent(asked(ours, "model", change(0.3))), flat(change(0.3)))
    assert ours.released == {}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_a_client_that_diverges_answers_with_noise_alone_and_forgets_it(
    kind: type[LoopEngine],
) -> None:
    ours = engine(FREE, kind)
    asked(ours, "model", change(0.1), clients=2)
    before = {c: trees.clone(m) for c, m in ours.memory.items()}
    broken = {n: torch.full_like(v, torch.inf) for n, v in change(1.0).items() if n != "steps"}
    reply = asked(ours, "model", broken | {"steps": SENT["steps"]}, round=1, clients=2)
    assert reply["w"].isfinite().all()
    assert not torch.equal(trees.take(reply, 0)["w"], SENT["w"])
    torch.testing.assert_close(ours.memory, before)
    assert [len(kept["multipliers"]) for kept in ours.released.values()] == [2, 2]


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_a_client_that_diverges_answers_a_trusted_server_too_and_forgets_it(
    kind: type[LoopEngine],
) -> None:
    """Who is lost tells of its data, and leaves a larger share of the mean to the others."""
    ours = engine(replace(FREE, where="central"), kind)
    asked(ours, "model", change(0.1), clients=2)
    before = {c: trees.clone(m) for c, m in ours.memory.items()}
    told = trees.clone(trees.repeat(change(0.2), 2))
    told["w"][0, 0, 0] = torch.inf
    cohort = ours.cohort([0, 1], 1, training=True)
    reply = cohort.ask(Client.model, SENT, Each(told))
    ours.commit(cohort)
    assert cohort.state.lost == {}
    torch.testing.assert_close(trees.take(reply, 0), SENT)
    torch.testing.assert_close(flat(trees.take(reply, 1)) - flat(SENT), flat(change(0.2)))
    torch.testing.assert_close(ours.memory[0], before[0])
    torch.testing.assert_close(ours.memory[1]["own"], trees.take(told, 1))


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_every_answer_is_paid_for_also_of_who_is_lost_and_none_beyond_the_budget(
    kind: type[LoopEngine],
) -> None:
    # Two answers with multiplier z cost as much as one with z / sqrt(2): exactly the budget.
    from dp_accounting import get_epsilon_gaussian

    budget = get_epsilon_gaussian(MULTIPLIER / math.sqrt(2), 1e-3)
    ours = engine(replace(FREE, epsilon=budget), kind)
    for number in range(2):
        cohort = ours.cohort([0, 1], number, training=True)
        cohort.ask(Client.model, SENT, change(0.1))  # not committed: a round that comes to nothing
    assert [kept["multipliers"].tolist() for kept in ours.released.values()] == [
        [MULTIPLIER] * 2
    ] * 2
    with pytest.raises(AllLostError, match="all queries to a client must stay within epsilon"):
        asked(ours, "model", change(0.1), round=2)
    assert asked(ours, "silent", change(0.1), round=2) == {}
    assert len(ours.released[0]["multipliers"]) == 2


def test_a_short_answer_is_given_again_for_nothing_and_a_model_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, own = engine(FREE), change(0.3)
    first, again = (asked(ours, "vector", own) for _ in range(2))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert len(ours.released[0]["multipliers"]) == 1
    monkeypatch.setattr("hyperfed.engines.calls.KEPT", 8)
    large = engine(FREE)
    for number in range(2):
        asked(large, "model", own, round=number)
    assert len(large.released[0]["multipliers"]) == 2
    assert large.released[0]["answers"] == {}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_what_a_step_lets_out_by_itself_is_paid_for_beside_its_answer(
    kind: type[LoopEngine],
) -> None:
    settings = PrivacyConfig(epsilon=0.3)
    assert settings.mechanism is not None
    ours = kind(make_task(), Client, settings, seed=0, private=FREE)
    asked(ours, "released", change(0.3), clients=2)
    for kept in ours.released.values():
        assert kept["multipliers"].tolist() == [settings.mechanism.multiplier, MULTIPLIER]
        assert len(kept["answers"]) == 2


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_what_a_step_lets_out_by_itself_counts_against_the_budget_of_answers(
    kind: type[LoopEngine],
) -> None:
    from dp_accounting import get_epsilon_gaussian

    enough = replace(FREE, epsilon=get_epsilon_gaussian(MULTIPLIER, 1e-3))  # for one answer
    ours = kind(make_task(), Client, PrivacyConfig(epsilon=0.3), seed=0, private=enough)
    asked(ours, "vector", change(0.3))
    ours = kind(make_task(), Client, PrivacyConfig(epsilon=0.3), seed=0, private=enough)
    with pytest.raises(AllLostError, match="all queries to a client must stay within epsilon"):
        asked(ours, "released", change(0.3))


NOVEL = 3
TASK = make_task(novel=1)
ELSEWHERE = replace(
    TASK,
    x=torch.cat([TASK.x, TASK.x]),
    y=torch.cat([TASK.y, TASK.y]),
    train=[rows + len(TASK.x) for rows in TASK.train],
)
"""Every client's training examples, in other places of the task."""
OTHER_DATA = {
    "inputs": replace(TASK, x=-TASK.x),
    "inputs as networks take them": replace(TASK, transform=torch.neg),
    "labels": replace(TASK, y=(TASK.y + 1) % 3),
    "no labels": replace(TASK, unlabelled=True),
    "fewer": replace(TASK, train=[rows[:-1] for rows in TASK.train]),
    "another order": replace(TASK, train=[rows.flip(0) for rows in TASK.train]),
}


def told_of(task: Task, released: dict[int, Tree], kind: type[LoopEngine]) -> Tensor:
    """What a novel client answers on a task, after what it has let out."""
    ours = kind(task, Client, None, seed=0, private=FREE)
    ours.released = released
    cohort = ours.cohort([2, NOVEL], 0, training=False)
    vector: Tensor = cohort.ask(Client.vector, change(0.3))["vector"][1]
    return vector


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("data", OTHER_DATA)
def test_of_other_data_the_same_is_another_question(data: str, kind: type[LoopEngine]) -> None:
    released: dict[int, Tree] = {}
    first = told_of(TASK, released, kind)
    other = told_of(OTHER_DATA[data], released, kind)
    assert len(released[NOVEL]["multipliers"]) == 2
    assert (other - first).norm() > 0.1 * SIGMA
    for task in (TASK, ELSEWHERE):
        torch.testing.assert_close(told_of(task, released, kind), first, rtol=0, atol=0)
    assert len(released[NOVEL]["multipliers"]) == 2


COMPUTED_BY: dict[str, dict[str, Any]] = {
    "another rate": {"config": fedavg.Config(local_lr=0.7)},
    "another method": {"config": fedper.Config()},
    "another seed": {"seed": 1},
}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("changed", COMPUTED_BY)
def test_by_other_settings_the_same_is_another_question(
    changed: str, kind: type[LoopEngine]
) -> None:
    """Whose first model is the same; a site keeps one account for all runs."""
    released: dict[int, Tree] = {}
    usual: dict[str, Any] = {"config": fedavg.Config(), "seed": 0}

    def told(config: Any, seed: int) -> Tensor:
        ours = kind(TASK, Client, config, seed=seed, private=FREE)
        ours.released = released
        vector: Tensor = asked(ours, "vector", change(0.3), clients=2)["vector"][1]
        return vector

    first, other = told(**usual), told(**usual | COMPUTED_BY[changed])
    assert (other - first).norm() > 0.1 * SIGMA
    torch.testing.assert_close(told(**usual), first, rtol=0, atol=0)
    assert len(released[1]["multipliers"]) == 2


def test_what_older_runs_have_let_out_is_asked_anew() -> None:
    """Their questions did not name the data."""
    call = Call(0, 0, NOVEL, "vector", (change(0.3),))
    old = {"answers": {f"{call.question(SIGMA)}-0": torch.ones(6).double()}}
    released = {NOVEL: old | {"multipliers": torch.tensor([MULTIPLIER]).double()}}
    assert not torch.equal(told_of(TASK, released, LoopEngine), torch.ones(6).double())
    assert len(released[NOVEL]["multipliers"]) == 2


def test_data_are_read_once_and_not_where_nothing_is_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = []

    def noted(x: Tensor) -> Tensor:
        read.append(len(x))
        return x

    ours = LoopEngine(replace(TASK, transform=noted), Client, None, seed=0, private=FREE)
    read.clear()  # of the trial whether a network draws
    for number in range(3):
        asked(ours, "vector", change(0.3), round=number)
    assert read == [len(TASK.train[0])]
    monkeypatch.setattr("hyperfed.engines.calls.KEPT", 8)
    asked(ours, "model", change(0.3), clients=2)  # noise of the seed is of the data, too
    assert read == [len(TASK.train[0]), len(TASK.train[1])]
    task = replace(TASK, transform=noted)
    for kind in (LoopEngine, VmappedEngine):
        ours = kind(task, Client, None, seed=0, private=FREE, secret=True)
        read.clear()
        asked(ours, "model", change(0.3), clients=2)
        assert read == []


@pytest.mark.parametrize("where", ["local", "central"])
def test_what_is_no_update_is_refused_and_what_is_nothing_is_not(where: Any) -> None:
    ours = engine(replace(FREE, where=where))
    assert asked(ours, "silent", change(0.1)) == {}
    with pytest.raises((AllLostError, UserError), match="but that of step unbounded is none"):
        asked(ours, "unbounded", change(0.1))


def test_a_variance_is_not_brought_below_zero_and_the_difference_of_one_is_refused() -> None:
    model = {"norm.running_var": torch.tensor([-1.0, 2.0]), "w": torch.tensor([-1.0])}
    kept = without_negative_variances({"base": model})["base"]
    assert kept["norm.running_var"].tolist() == [0, 2]
    assert kept["w"].tolist() == [-1]
    private = {"private": replace(FREE, multiplier=50.0)}
    ours = Federation("fedavg", make_task(Normed), private, **short("fedavg"))
    cohort = ours.engine.cohort([0, 1], 0, training=True)
    reply = cohort.ask(
        ours.method.Client.train_model, ours.server.model["base"], batches=ours.config.batches
    )
    assert reply["norm.running_var"].min() == 0 < reply["norm.running_var"].max()
    with pytest.raises(AllLostError, match="batch-norm's variances"):
        Federation("pefll", make_task(Normed), private, **short("pefll")).round([0, 1])
    common = Federation("mh_pfedhn", make_task(Normed), private, global_model=True, **ONE_STEP)
    with pytest.raises(AllLostError, match="train_global replies with a difference of batch-norm"):
        common.round([0, 1])


def test_who_trains_privately_counts_alike_whatever_number_of_examples_it_has() -> None:
    task = make_task()
    ours = LoopEngine(task, Client, None, seed=0, private=FREE)
    assert ours.cohort([0, 1, 2], 0, training=True).weight.tolist() == [1, 1, 1]
    assert engine(None).cohort([0, 1, 2], 0, training=True).weight.tolist() == [12, 7, 20]


def test_among_a_trusted_server_s_clients_nobody_is_lost_by_what_others_answer() -> None:
    cohorts = [
        engine(private).cohort([0, 1, 2], 0, training=True)
        for private in (None, replace(FREE, where="central"))
    ]
    nothing = trees.tree_map(torch.zeros_like, SENT)
    own = {n: torch.stack([v + size for size in (1e-9, 1e-9, 0.1)]) for n, v in nothing.items()}
    own["steps"] = SENT["steps"].repeat(3)
    for cohort in cohorts:
        cohort.state.reply_bound = 100.0
        cohort.ask(Client.difference, nothing, Each(own))
    assert [list(cohort.state.lost) for cohort in cohorts] == [[2], []]


def test_each_client_has_noise_of_its_own_where_all_are_sent_something_of_their_own() -> None:
    ours, own = engine(FREE), change(0.3)
    cohort = ours.cohort([0, 1], 0, training=True)
    reply = cohort.ask(Client.model, Each(trees.repeat(SENT, 2)), own)
    noise = reply["w"] - SENT["w"] - own["w"]
    assert not torch.equal(noise[0], noise[1])


def test_of_other_batches_the_same_is_another_question() -> None:
    ours, own, told = engine(FREE), change(0.3), []
    for batches in (Steps(1, 4), Steps(2, 4), Steps(1, 4)):
        cohort = ours.cohort([0], 0, training=True)
        told.append(cohort.ask(Client.vector, own, batches=batches)["vector"])
    assert not torch.equal(told[0], told[1])
    assert torch.equal(told[0], told[2])
    assert len(ours.released[0]["multipliers"]) == 2

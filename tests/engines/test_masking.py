"""What updates come to in a masked sum, and what a server may not ask for beside it."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import engines, trees
from hyperfed.engines import EngineConfig, Faults
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.masking import HEAVIEST, SMALLEST, UNIT, Masking, least
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Cohort, step
from hyperfed.methods import METHODS, fedavg
from hyperfed.methods.fedavg import Client
from hyperfed.runs import config as configuration
from hyperfed.runs.capability import NO_SUMS
from hyperfed.runs.run import Run
from hyperfed.training import Steps
from hyperfed.trees import Tree
from hyperfed.trees.aggregation import MEAN, MeanNoise
from toys import ONE_STEP, Federation, Normed, TwoLayers, client_loss, make_task, short

TASK = make_task()


def updates(clients: list[int], sent: Tree) -> list[Tensor]:
    """Changes by one gradient step of 0.1, in the order of names."""
    found = []
    for client in clients:
        leaves = {name: value.clone().requires_grad_() for name, value in sorted(sent.items())}
        gradients = torch.autograd.grad(client_loss(TASK, client, leaves), list(leaves.values()))
        found.append(-0.1 * torch.cat([g.flatten() for g in gradients]))
    return found


def flat(model: Tree) -> Tensor:
    return torch.cat([value.flatten() for _, value in sorted(model.items())])


def masked(method: str = "fedavg", clip: float = 5.0, **options: Any) -> Federation:
    engine = {"masking": Masking(clip, options.pop("private", False))}
    return Federation(method, TASK, engine | options, **ONE_STEP)


@pytest.mark.parametrize("clip", [0.01, 5.0])  # one that all updates reach, one that none does
def test_the_mean_is_that_of_bounded_changes_in_multiples_of_the_clip_over_2_to_the_32(
    clip: float,
) -> None:
    ours, clients = masked(clip=clip), [0, 1, 3]
    sent = trees.clone(ours.server.model["base"])
    ours.round(clients)
    told = flat(ours.server.model["base"]) - flat(sent)
    changes = [u * min(1.0, clip / float(u.norm())) for u in updates(clients, sent)]
    weights = [len(TASK.train[client]) for client in clients]
    exact = [
        sum(
            w * round(Fraction(float(u[place])) * 2**32 / Fraction(clip))
            for w, u in zip(weights, changes, strict=True)
        )
        for place in range(len(told))
    ]
    lattice = told.new_tensor([float(Fraction(clip) * n / (2**32 * sum(weights))) for n in exact])
    mean = sum(w * u for w, u in zip(weights, changes, strict=True)) / sum(weights)
    assert (told - lattice).abs().max() < clip * 2**-33 / 4  # at most some rounding up or down
    assert (told - mean).abs().max() <= clip * 2**-33 + 1e-15
    assert float(mean.norm()) < clip < 1e4 * float(mean.norm())


def test_a_part_of_a_sum_is_whole_and_weighs_as_many_examples() -> None:
    like = {"w": torch.zeros(4).double(), "steps": torch.tensor(3)}
    reply = {"w": torch.tensor([1.0, -0.5, 2**-32, 0.0]).double(), "steps": torch.tensor(9)}
    info = Client.train_model.__dict__["step"]
    part = Masking(2.0).part(reply, like, info, 7)["part"]
    assert part.tolist() == [7 * 2**31, -7 * 2**30, 0, 0]  # half of a unit is rounded to even
    assert part.dtype == torch.int64


def test_a_part_of_a_private_sum_is_no_longer_than_the_clip() -> None:
    like = {"w": torch.zeros(1000).double()}
    told = {"w": torch.full((1000,), 0.75 * 2**-32).double()}  # all would be rounded up
    told["w"][0], clip = 1.0, math.hypot(1.0, 0.75 * 2**-32 * 999**0.5)
    info = Client.train_model.__dict__["step"]
    part = Masking(clip, private=True).part(told, like, info, 1)["part"]
    assert sum(int(each) ** 2 for each in part) <= UNIT**2
    assert sum(int(each) ** 2 for each in Masking(clip).part(told, like, info, 1)["part"]) > UNIT**2


def test_whole_numbers_stay_as_they_were_sent_and_variances_are_none_below_zero() -> None:
    task = make_task(net=Normed)
    ours = Federation("fedavg", task, {"masking": Masking(5.0)}, **short("fedavg"))
    ours.round([0, 1, 2])
    model = ours.server.model["base"]
    assert model["norm.num_batches_tracked"] == 0
    assert not torch.equal(model["norm.running_var"], torch.ones(4).double())
    sent = {"norm.running_var": torch.tensor([0.1]).double()}
    assert Masking(1.0).mean(torch.tensor([-UNIT]), 1, sent)["norm.running_var"] == 0


class Differing(Client):
    @step(like="model", bounded="reply")
    def change(self, model: Tree) -> Tree:
        return trees.subtract(model, self.train_model(model))


def test_the_mean_of_differences_is_one() -> None:
    config = fedavg.Config(**ONE_STEP)
    means = []
    for masking in (None, Masking(5.0)):
        engine = LoopEngine(TASK, Differing, config, seed=0, masking=masking)
        cohort = engine.cohort([0, 1, 3], 0, training=True)
        sent = TASK.outline().initial()
        means.append(cohort.mean(Differing.change, sent, batches=config.batches))
    torch.testing.assert_close(means[1], means[0], rtol=0, atol=5.0 * 2**-32)


class Unlike(Client):
    @step(bounded="reply")
    def train_model(self, model: Tree) -> Tree:
        return trees.subtract(model, super().train_model(model))


def test_a_difference_that_is_like_nothing_is_no_sum() -> None:
    engine = LoopEngine(TASK, Unlike, fedavg.Config(**ONE_STEP), seed=0, masking=Masking(5.0))
    cohort, model = engine.cohort([0, 1, 3], 0, training=True), TASK.initial("base")
    told = r'step train_model does not say .* a difference, @step\(like=..., bounded="reply"\)'
    with pytest.raises(UserError, match=told):
        cohort.mean(Unlike.train_model, model, batches=Steps(1, 32))
    engine.masking = None
    assert cohort.mean(Unlike.train_model, model, batches=Steps(1, 32)).keys() == model.keys()


def test_sums_are_those_of_integers_modulo_2_to_the_64() -> None:
    parts = torch.tensor([2**63 - 1, 2**63 - 1, 5])
    assert int(parts.sum()) == (2 * (2**63 - 1) + 5) - 2**64


@pytest.mark.parametrize(("total", "weight"), [(3 * UNIT + UNIT // 100, 3), (-(2**63), 3)])
def test_what_updates_cannot_come_to_is_no_sum(total: int, weight: int) -> None:
    with pytest.raises(ValueError, match="larger than updates can come to"):
        Masking(1.0).mean(torch.tensor([total, 0]), weight, {"w": torch.zeros(2)})


@pytest.mark.parametrize("weight", [0, 2**30 + 1])
def test_of_too_many_examples_or_none_there_is_no_sum(weight: int) -> None:
    with pytest.raises(ValueError, match="must be of 1 to 1073741824 examples"):
        Masking(1.0).mean(torch.tensor([1]), weight, {"w": torch.zeros(1)})
    assert HEAVIEST * UNIT * 2 <= 2**63


def test_a_sum_is_of_three_and_of_more_than_half() -> None:
    assert [least(asked) for asked in (1, 3, 4, 5, 6, 7, 10)] == [3, 3, 3, 3, 4, 4, 6]
    assert SMALLEST == 3


@pytest.mark.parametrize(("clients", "drops"), [([0, 1], 0), ([0, 1, 2, 3], 2)])
def test_a_sum_of_fewer_is_none_and_the_round_changes_nothing(
    clients: list[int], drops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faults, "drops", lambda self, seed, call: call.client < drops)
    ours = masked()
    sent = trees.clone(ours.server.model)
    cohort = ours.engine.cohort(clients, 0, training=True)
    with pytest.raises(AllLostError, match="must be of 3 clients here, but 2 are left"):
        ours.server.round(cohort)
    torch.testing.assert_close(ours.server.model, sent, rtol=0, atol=0)
    assert set(cohort.state.lost) == set(clients)


def test_a_sum_is_of_more_than_half_of_those_asked_not_of_those_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Faults, "drops", lambda self, seed, call: call.client < 3)
    task = make_task(examples=(5,) * 6)
    ours = Federation("fedavg", task, {"masking": Masking(5.0)}, **ONE_STEP)
    with pytest.raises(AllLostError, match="must be of 4 clients here, but 3 are left"):
        ours.server.round(ours.engine.cohort(range(6), 0, training=True))


def test_a_sum_is_exact_in_all_its_range() -> None:
    """Where parts are masked, or weigh much, no float holds them."""

    class Told:
        def gather(self, *asked: Any, masked: bool) -> Tree:
            assert masked
            return {"part": torch.tensor([[2**62 + 1], [-(2**62)], [2**62 + 5]])}

        def need(self, least: int) -> None:
            assert least == 3

    total = Masking(1.0).total(Told(), Client.train_model, [], None)  # type: ignore[arg-type]
    assert total.tolist() == [2**62 + 6]


def test_a_lost_client_is_in_no_sum() -> None:
    ours, theirs = masked(), masked()
    cohort = ours.engine.cohort([0, 1, 2, 3], 0, training=True)
    cohort.state.lost[2] = "away"
    ours.server.round(cohort)
    theirs.round([0, 1, 3])
    torch.testing.assert_close(ours.server.state(), theirs.server.state(), rtol=0, atol=0)


@pytest.mark.parametrize("private", [False, True])
def test_who_diverges_is_lost_unless_that_would_tell(private: bool) -> None:
    task = make_task()
    task.x[task.train[1]] = torch.nan
    ours = Federation("fedavg", task, {"masking": Masking(5.0, private)}, **ONE_STEP)
    cohort = ours.round([0, 1, 2, 3])
    assert cohort.state.lost == ({} if private else {1: "the reply is not finite"})
    assert all(trees.finite([ours.server.state()]))


def test_a_private_mean_has_noise_for_the_share_of_the_heaviest() -> None:
    ours, theirs, shares = masked(), masked(), []

    def add(mean: Tree, share: float, clients: Any) -> Tree:
        shares.append(share)
        return trees.tree_map(lambda leaf: leaf + 1, mean)

    with trees.aggregating(MEAN, MeanNoise(1.0, add)):
        ours.round([0, 1, 2])
    theirs.round([0, 1, 2])
    assert shares == [20 / 39]
    torch.testing.assert_close(
        flat(ours.server.model["base"]), flat(theirs.server.model["base"]) + 1, rtol=0, atol=0
    )


def test_a_private_mean_has_noise_before_it_is_rounded() -> None:
    task, dtypes = make_task(net=lambda: TwoLayers().bfloat16()), []
    task = replace(task, x=task.x.bfloat16(), models={"base": task.models["base"].bfloat16()})

    def add(mean: Tree, share: float, clients: Any) -> Tree:
        dtypes.extend(leaf.dtype for leaf in mean.values())
        return mean

    ours = Federation("fedavg", task, {"masking": Masking(5.0, private=True)}, **short("fedavg"))
    with trees.aggregating(MEAN, MeanNoise(1.0, add)):
        ours.round([0, 1, 2])
    assert {*dtypes} == {torch.float64}
    assert {leaf.dtype for leaf in ours.server.model["base"].values()} == {torch.bfloat16}


def test_a_reply_s_size_and_the_others_do_not_matter() -> None:
    """It is bounded, and a bound relative to others would need them."""
    ours = masked(clip=1e6)
    cohort = ours.engine.cohort([0, 1, 2, 3], 0, training=True)
    cohort.state.reply_bound = 1.0 + 1e-9
    ours.server.round(cohort)
    assert cohort.state.lost == {}


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"local"}))  # which asks for nothing
def test_a_server_is_told_nothing_but_means_or_the_method_is_refused(method: str) -> None:
    task = make_task(novel=1)
    ours = Federation(method, task, {"masking": Masking(5.0)}, **short(method, absorb_steps=1))

    def two_rounds() -> None:
        for number in range(2):
            ours.round([0, 1, 2], number)

    if method not in NO_SUMS:
        two_rounds()
        return
    with pytest.raises(UserError, match="must ask for means alone, but asked for"):
        two_rounds()


def ask_all(cohort: Cohort) -> object:
    return cohort.known.ask(Client.train_model, TASK.initial("base"))


def post(cohort: Cohort) -> object:
    return cohort.post(Client.train_model, TASK.initial("base"))


@pytest.mark.parametrize("way", [ask_all, post])
def test_there_is_no_way_round_the_means(way: Callable[[Cohort], object]) -> None:
    cohort = masked().engine.cohort([0, 1, 2], 0, training=True)
    with pytest.raises(UserError, match="must ask for means alone"):
        way(cohort)
    assert cohort.state.exchanges == []


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"method.name": "pfedhn"}, "privacy.masking: must be false for pfedhn"),
        ({"privacy.epsilon": 8.0}, "privacy.where: must be central where sums are masked"),
        ({"robust.aggregation": "median"}, "robust.aggregation: must be mean where sums"),
        ({"faults.nan": 0.1}, "faults.nan, faults.hostile: must be 0 and empty"),
        ({"faults.hostile": [1]}, "faults.nan, faults.hostile: must be 0 and empty"),
    ],
)
def test_settings_that_need_single_answers_are_refused(keys: dict[str, Any], told: str) -> None:
    method = keys.pop("method.name", "fedavg")
    with pytest.raises(UserError, match=told):
        configuration.from_keys(method, {"privacy.masking": True, **keys})


@pytest.mark.parametrize("cohort", [2, 251])
def test_a_run_with_too_small_or_large_cohorts_is_refused(cohort: int) -> None:
    keys = {"cohort": cohort, "task.clients": 260, "task.novel": 0.0, "privacy.masking": True}
    told = f"3 to 250 clients where privacy.masking is true, came {cohort}"
    with pytest.raises(UserError, match=told):
        Run(configuration.from_keys("fedavg", keys))


def test_a_run_that_is_masked_and_private_spends_and_goes_on() -> None:
    keys: dict[str, Any] = {"rounds": 2, "cohort": 1.0, "task.clients": 5, "task.novel": 0.0}
    keys |= {"method.local_steps": 1, "evaluate_every": 2, "privacy.masking": True}
    keys |= {"privacy.epsilon": 50.0, "privacy.where": "central"}
    run = Run(configuration.from_keys("fedavg", keys))
    for _ in run.train():
        continue
    assert run.summary["privacy"]["epsilon_spent"] == pytest.approx(50.0)


def test_the_page_says_of_each_method_whether_its_sums_can_be_masked() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    can, cannot = (
        re.findall("`([a-z_]+)`", re.findall(rf"\| {row} \| (.+) \|", page)[0])
        for row in ("whose sums can be masked", "that are refused")
    )
    assert cannot == sorted(NO_SUMS)
    assert can == sorted(METHODS.keys() - set(NO_SUMS))


@pytest.mark.parametrize(
    ("keys", "bound"),
    [({}, 100.0), ({"epsilon": 8.0, "where": "central"}, 1.0), ({"clip": 3.0}, 3.0)],
)
def test_an_update_s_largest_length_is_that_of_noise_where_it_has_some(
    keys: dict[str, Any], bound: float
) -> None:
    found = configuration.from_keys("fedavg", {"privacy": {"masking": True, **keys}}).privacy
    assert found.sums() == Masking(bound, "epsilon" in keys)
    assert (found.updates() or found.sums()).clip == bound  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["loop", "vmap"])
def test_sums_are_the_same_whoever_computes(name: str) -> None:
    found = []
    for sums in (Masking(5.0), None):
        engine = engines.build(
            EngineConfig(name), TASK, Client, fedavg.Config(**ONE_STEP), seed=0, masking=sums
        )
        cohort = engine.cohort([0, 1, 3], 0, training=True)
        found.append(cohort.mean(Client.train_model, TASK.initial("base"), batches=Steps(1, 99)))
        told = {exchange.up for exchange in cohort.state.exchanges}
        assert told == {8 * len(flat(found[0]))}
    assert not torch.equal(flat(found[0]), flat(found[1]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)


def test_a_mean_of_those_who_are_served_is_none_of_masked_parts() -> None:
    """Which would be of three at least."""
    found = []
    for sums in (Masking(5.0), None):
        engine = LoopEngine(TASK, Client, fedavg.Config(**ONE_STEP), seed=0, masking=sums)
        cohort = engine.cohort([0, 1], 0, training=False)
        found.append(cohort.mean(Client.train_model, TASK.initial("base"), batches=Steps(1, 99)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

"""Masked sums at sites are those of the reference engine, bit by bit, or the round is lost."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.flower.hostile import (
    UNREADABLE,
    UNUSABLE,
    Behave,
    honest,
    leaves,
    says,
)
from engines.flower.sites import DirectLink, remote
from hyperfed import trees
from hyperfed.engines.flower import store, wire
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.engines.flower.pairwise import STEPS
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.masking import Masking
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.federation import AllLostError
from hyperfed.methods import METHODS
from hyperfed.runs.capability import NO_SUMS
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_state
from toys import Federation, Normed, make_task, short

SUMS = Masking(5.0)
TASK = make_task(examples=(12, 7, 20, 9, 15))
EACH = {node: [node] for node in range(5)}
"""A site for each client."""
EVERYONE = list(range(5))

KEYS, SHARES, PART, REVEAL = EXCHANGES = "mask_keys", "mask_shares", "train_model", "mask_reveal"
"""The exchanges, by the steps that their calls name."""


@pytest.fixture(autouse=True)
def _no_machine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


class Sites:
    """A method whose sums are masked at sites, round by round."""

    def __init__(
        self,
        method: str,
        task: Task,
        state: Path,
        shares: Mapping[int, Sequence[int]] = EACH,
        **options: Any,
    ) -> None:
        self.module = METHODS[method]
        self.config = self.module.Config(**short(method))
        options = {"seed": 0, "masking": SUMS, "method": method} | options
        self.sites = {
            node: Site(
                Shard(task, clients),
                state / str(node),
                self.module.Client,
                self.config,
                **options,
            )
            for node, clients in shares.items()
        }
        self.link = DirectLink(self.sites)
        self.task = remote(task, self.link, self.sites)
        with seeded(0, "server"):
            self.server = self.module.Server(task.outline(), self.config)
        self.engine = self.new_engine()

    def new_engine(self) -> FlowerEngine:
        return FlowerEngine(self.task, self.module.Client, self.config, seed=0, masking=SUMS)

    def cohort(self, clients: Sequence[int], number: int = 0) -> Any:
        cohort = self.engine.cohort(clients, number, training=True)
        cohort.state.reply_bound = 100.0
        return cohort

    def round(self, clients: Sequence[int], number: int = 0) -> Any:
        cohort = self.cohort(clients, number)
        self.server.round(cohort)
        self.engine.commit(cohort)
        return cohort

    def breaks(self, node: int, exchange: str, behave: Behave) -> None:
        """Has a site behave in one of the exchanges, and be honest in the others."""

        def behaves(site: Site, content: bytes) -> Any:
            steps = {call.step for call in wire.unpack_request(content).calls}
            return (behave if exchange in steps else honest)(site, content)

        self.link.broken[node] = behaves


def equal(ours: Tree, theirs: Tree) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


QUICK = ("fedavg", "fedper", "gpfl")
METHODS_OF_SUMS = [
    pytest.param(method, marks=() if method in QUICK else pytest.mark.slow)
    for method in sorted(METHODS.keys() - set(NO_SUMS))
]


def test_no_secret_comes_back_where_a_machine_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that stands in for another must be found under its name before the reply leaves."""
    kept: list[Path] = []
    monkeypatch.setattr(store, "sync", kept.append)
    ours = Sites("fedavg", TASK, tmp_path)
    ours.round([0, 1, 2])
    names = [path.relative_to(tmp_path).parts[0] for path in kept]
    assert sorted(names) == sorted(["0", "1", "2"] * len(EXCHANGES))
    ours.server.personalize(ours.engine.cohort([0], 1, training=False))
    assert len(kept) == len(names)


@pytest.mark.parametrize("method", METHODS_OF_SUMS)
def test_sums_are_those_of_the_reference_engine_and_nobody_is_missed(
    method: str, tmp_path: Path
) -> None:
    task = make_task(net=Normed, novel=1)
    ours = Sites(method, task, tmp_path, {11: [0, 2], 7: [1, 3]})
    loop = Federation(method, task, {"masking": SUMS}, **short(method))
    assert ours.round([0, 1, 2]).state.lost == {}
    loop.round([0, 1, 2])
    equal(ours.server.state(), loop.server.state())
    assert ours.engine.memory.keys() == {c for c, kept in loop.engine.memory.items() if kept}
    for ids in ([0, 1, 2], [3]):
        here = evaluate(ours.server, ours.engine, ids, 2)["test"]
        there = evaluate(loop.server, loop.engine, ids, 2)["test"]
        assert here.missed == {}
        equal({"loss": here.loss}, {"loss": there.loss})


def without(method: str, clients: Sequence[int], lost: Sequence[int]) -> Federation:
    """The reference engine, that loses some of its clients."""
    loop = Federation(method, TASK, {"masking": SUMS}, **short(method))
    for number in range(2):
        cohort = loop.engine.cohort(clients, number, training=True)
        cohort.state.lost |= dict.fromkeys(lost, "away")
        loop.server.round(cohort)
        loop.engine.commit(cohort)
    return loop


@pytest.mark.parametrize(
    ("exchange", "method"),
    [(KEYS, "fedavg"), (SHARES, "fedper"), (PART, "fedavg"), (PART, "fedper")],
)
def test_with_a_lost_client_they_are_those_of_the_others(
    exchange: str, method: str, tmp_path: Path
) -> None:
    ours = Sites(method, TASK, tmp_path)
    ours.breaks(3, exchange, says(None))
    for number in range(2):
        cohort = ours.round(EVERYONE, number)
        assert cohort.state.lost == {3: "its site did not answer"}
    loop = without(method, EVERYONE, [3])
    equal(ours.server.state(), loop.server.state())
    counts = [evaluate(f.server, f.engine, [0, 1, 2, 4], 2)["test"].loss for f in (ours, loop)]
    equal({"loss": counts[0]}, {"loss": counts[1]})


def test_who_is_lost_once_its_part_was_sent_counts_and_keeps_what_it_learned(
    tmp_path: Path,
) -> None:
    ours = Sites("fedper", TASK, tmp_path)
    ours.breaks(3, REVEAL, says(None))
    for number in range(2):
        cohort = ours.round(EVERYONE, number)
        assert cohort.state.lost == {}
        assert cohort.state.late == [(3, "its site did not answer")]
    loop = without("fedper", EVERYONE, [])
    equal(ours.server.state(), loop.server.state())
    counts = [evaluate(f.server, f.engine, EVERYONE, 2)["test"].loss for f in (ours, loop)]
    equal({"loss": counts[0]}, {"loss": counts[1]})


def raised(site: Site, content: bytes) -> bytes:
    raise MemoryError


def noise(leaf: Tensor) -> Tensor:
    most = 2**62 if leaf.dtype == torch.int64 else 255
    return torch.randint_like(leaf, 0, most)


GARBAGE: dict[str, Behave] = {
    "20 MB": UNREADABLE["20 MB"],
    "an axis more": UNUSABLE["an axis more"],
    "noise": leaves(noise),
    "zeros": leaves(torch.zeros_like),
}
"""What a site may answer in each of the exchanges in the place of what it should."""


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_loses_its_client_or_the_round_and_never_makes_another_sum(
    name: str, exchange: str, tmp_path: Path
) -> None:
    ours = Sites("fedavg", TASK, tmp_path)
    before = trees.clone(ours.server.state())
    ours.breaks(3, exchange, GARBAGE[name])
    cohort = ours.cohort(EVERYONE)
    try:
        ours.server.round(cohort)
    except AllLostError:
        assert set(cohort.state.lost) == set(EVERYONE)
        assert all(cohort.state.lost.values())
        equal(ours.server.state(), before)
        return
    lost = set(cohort.state.lost)
    assert lost == ({3} if exchange != REVEAL else set())
    loop = Federation("fedavg", TASK, {"masking": SUMS}, **short("fedavg"))
    loop.round(sorted({*EVERYONE} - lost))
    equal(ours.server.state(), loop.server.state())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_who_has_most_clients_does_not_say_what_an_answer_is(exchange: str, tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path, {0: [0, 1, 2], 1: [3], 2: [4]})
    ours.breaks(0, exchange, UNUSABLE["an axis more"])
    cohort = ours.cohort(EVERYONE)
    with pytest.raises(AllLostError, match=r"but 2 (are left|came)"):
        ours.server.round(cohort)
    told = cohort.state.lost if exchange != REVEAL else dict(cohort.state.late)
    wrong = {client for client, why in told.items() if "shapes or dtypes are wrong" in why}
    assert wrong == {0, 1, 2}


def test_a_part_that_is_none_is_found_by_its_size(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path)
    ours.breaks(3, PART, GARBAGE["noise"])
    with pytest.raises(AllLostError, match="larger than updates can come to"):
        ours.server.round(ours.cohort(EVERYONE))


def test_a_client_is_not_in_a_sum_with_what_does_not_learn(tmp_path: Path) -> None:
    task = make_task(examples=(12, 7, 20, 9, 15))
    task.x[task.train[1]] = torch.nan
    ours = Sites("fedavg", task, tmp_path)
    assert ours.round(EVERYONE).state.lost == {1: "the reply is not finite"}


def test_a_client_that_has_other_examples_by_now_is_in_no_sum(tmp_path: Path) -> None:
    """It would weigh what it has, of what the server divides by what it had."""
    ours = Sites("fedavg", TASK, tmp_path)
    ours.round(EVERYONE)
    more = [rows.repeat(5) if c == 3 else rows for c, rows in enumerate(TASK.train)]
    ours.sites[3].source = Shard(replace(TASK, train=more), [3])
    assert "must go on with the examples" in ours.round(EVERYONE, 1).state.lost[3]
    loop = Federation("fedavg", TASK, {"masking": SUMS}, **short("fedavg"))
    loop.round(EVERYONE)
    loop.round([0, 1, 2, 4], 1)
    equal(ours.server.state(), loop.server.state())


def test_secrets_are_new_after_a_kill_in_between(tmp_path: Path) -> None:
    """The server dies before the sum is uncovered; a new one does the same round again."""
    ours = Sites("fedavg", TASK, tmp_path)
    for node in EACH:
        ours.breaks(node, REVEAL, raised)
    with pytest.raises(MemoryError):
        ours.server.round(ours.cohort(EVERYONE))
    first = list(ours.link.sent)
    ours.link.broken.clear()
    ours.engine = ours.new_engine()
    assert ours.round(EVERYONE).state.lost == {}
    loop = Federation("fedavg", TASK, {"masking": SUMS}, **short("fedavg"))
    loop.round(EVERYONE)
    equal(ours.server.state(), loop.server.state())

    def keys(sent: Sequence[tuple[str, int, bytes]]) -> set[bytes]:
        calls = [call for _, _, c in sent if c for call in wire.unpack_request(c).calls]
        told = next(call.payload[0]["keys"] for call in calls if call.step == SHARES)
        return {bytes(key.tolist()) for key in told.flatten(0, 1)}

    assert len(keys(first) | keys(ours.link.sent[len(first) :])) == 20


def test_a_message_that_comes_again_has_the_answer_that_it_had(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path)

    def twice(site: Site, content: bytes) -> bytes:
        first = site.handle(content)
        assert wire.unpack_response(site.handle(content)).answers.keys() == {0}
        equal(*(wire.unpack_response(c).answers[0] for c in (first, site.handle(content))))
        return first

    ours.link.broken = dict.fromkeys(EACH, twice)
    assert ours.round(EVERYONE).state.lost == {}


def test_nothing_secret_is_left_at_a_site(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path)
    seen: list[set[str]] = []

    def looks(site: Site, content: bytes) -> bytes:
        answer = site.handle(content)
        (kept,) = site.state.glob("run-*/_*/*.safetensors")
        seen.append(set(load_state(kept)[0]["masks"]))
        return answer

    ours.link.broken[0] = looks
    ours.round(EVERYONE)
    assert seen == [{"new"}, {"own", "seed", "keys", "share"}, {"held", "there", "me"}, set()]


STRICT = Policy(methods=("fedavg",), smallest_reply=1, smallest_batch=1)


def test_a_site_may_want_more_clients_in_a_sum(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path, policy=replace(STRICT, smallest_sum=5))
    assert ours.round(EVERYONE).state.lost == {}
    with pytest.raises(AllLostError, match="must be of 5 clients here, but 4 are left"):
        ours.server.round(ours.cohort([0, 1, 2, 3], 1))


def test_a_site_may_train_for_masked_sums_alone(tmp_path: Path) -> None:
    policy = replace(STRICT, masks_in_training=True)
    assert Sites("fedavg", TASK, tmp_path, policy=policy).round(EVERYONE).state.lost == {}
    open_ = Sites("fedavg", TASK, tmp_path / "open", policy=policy, masking=None)
    open_.engine = FlowerEngine(open_.task, open_.module.Client, open_.config, seed=0)
    with pytest.raises(AllLostError, match="clients train here for masked sums alone"):
        open_.server.round(open_.cohort(EVERYONE))


@pytest.mark.parametrize("step", ["train_model", "export"])
def test_in_a_masked_run_no_reply_leaves_by_itself(step: str, tmp_path: Path) -> None:
    """A server that departs from the protocol asks as if nothing were masked."""
    ours = Sites("fedavg", TASK, tmp_path)
    server = FlowerEngine(ours.task, ours.module.Client, ours.config, seed=0)
    cohort = server.cohort(EVERYONE, 0, training=True)
    asked = getattr(ours.module.Client, step)
    with pytest.raises(AllLostError, match=f"the reply to {step} must be masked in this run"):
        cohort.ask(asked, TASK.initial("base"), batches=ours.config.batches)


def test_in_another_run_nothing_is_masked(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path, masking=None)
    with pytest.raises(AllLostError, match="mask_keys"):
        ours.server.round(ours.cohort(EVERYONE))


def asks_again(change: Callable[[Any], Any]) -> Behave:
    """Asks a site, after its answer, the same in a new message that differs."""

    def behave(site: Site, content: bytes) -> bytes:
        answer = site.handle(content)
        request = wire.unpack_request(content)
        calls = [change(call) for call in request.calls]
        again = replace(request, calls=calls, serial=request.serial + 10**6)
        told = wire.unpack_response(site.handle(wire.pack_request(again)))
        assert "in their order, and each once" in str(told.answers[0])
        return answer

    return behave


def other_model(call: Any) -> Any:
    model, told = call.payload
    return replace(call, payload=(trees.tree_map(torch.zeros_like, model), told))


def others_sent(call: Any) -> Any:
    sent = call.payload[0]["sent"].clone()
    sent[3] = ~sent[3]
    return replace(call, payload=({"sent": sent},))


@pytest.mark.parametrize(
    ("exchange", "change"),
    [(SHARES, lambda call: call), (PART, other_model), (REVEAL, others_sent)],
)
def test_nothing_is_asked_twice_of_one_sum(
    exchange: str, change: Callable[[Any], Any], tmp_path: Path
) -> None:
    ours = Sites("fedavg", TASK, tmp_path)
    ours.breaks(0, exchange, asks_again(change))
    ours.round(EVERYONE)
    assert ours.link.broken


def test_a_site_s_policy_is_that_of_what_is_masked_too(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path, policy=replace(STRICT, smallest_reply=8))
    lost = ours.round(EVERYONE).state.lost
    assert "must be of 8 examples at least here, came 7" in lost[1]  # who has no more
    noted = (tmp_path / "0" / "audit.jsonl").read_text().splitlines()
    behind = [json.loads(line)["examples"] for line in noted]
    assert [behind[0], behind[1], behind[2] >= 8, behind[3]] == [0, 0, True, 0]


def test_with_noise_of_the_server_all_clients_weigh_alike(tmp_path: Path) -> None:
    private = PrivateUpdates("central", SUMS.clip, 1.0, math.inf, 1e-3)
    options = {"masking": Masking(SUMS.clip, private=True), "private": private}
    ours = Sites("fedavg", TASK, tmp_path, **options)
    client = ours.module.Client
    ours.engine = FlowerEngine(ours.task, client, ours.config, seed=0, **options)
    loop = Federation("fedavg", TASK, options, **short("fedavg"))
    unlike = Federation("fedavg", TASK, {"masking": SUMS}, **short("fedavg"))
    for one in (ours, loop, unlike):
        one.round(EVERYONE)
    equal(ours.server.state(), loop.server.state())
    weight = [model.server.model["base"]["body.weight"] for model in (ours, unlike)]
    assert not torch.equal(*weight)


def test_traffic_is_counted_as_it_travels(tmp_path: Path) -> None:
    ours = Sites("fedavg", TASK, tmp_path)
    cohort = ours.round(EVERYONE)
    model = trees.count_bytes(TASK.initial("base"))
    numbers = model // 8
    found = {e.step: (e.down, e.up) for e in cohort.state.exchanges if e.client == 2}
    assert found == {
        KEYS: (0, 64),
        SHARES: (5 * 64, 5 * 120 + 32),
        PART: (model + 5 * 120, 8 * numbers),
        REVEAL: (5, 5 * 52),
    }
    assert set(STEPS) == {KEYS, SHARES, REVEAL}

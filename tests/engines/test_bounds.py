"""How large a reply may be, against lengths by NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.bounds import too_large
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.replies import impossible
from hyperfed.federation import Client, Each, step
from hyperfed.trees import Tree
from toys import TwoLayers, make_task


def judged(
    replies: list[Tree],
    like: Tree | None = None,
    factor: float = 10.0,
    payloads: Sequence[Tree] = (),
    noise: float = 0.0,
) -> set[int]:
    likes = dict.fromkeys(range(len(replies)), like)
    of, told = dict(enumerate(replies)), dict(enumerate(payloads))
    found = too_large(of, likes, factor, told, noise=noise)
    assert all("too large" in why for why in found.values())
    return set(found)


def of(*values: float) -> Tree:
    whole = torch.tensor(values, dtype=torch.float64)
    return {"a": whole[:1], "b": {"c": whole[1:]}}


def test_the_length_is_over_all_leaves_and_the_bound_a_multiple_of_the_others_median() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 3))
    others = [np.linalg.norm(row) for row in values[1:]]
    bound = 10 * np.median(others)
    direction = np.array([0.6, 0.0, 0.8])
    for length, refused in ((bound * 0.9999, set()), (bound * 1.0001, {0})):
        rows = [length * direction, *values[1:]]
        assert judged([of(*row) for row in rows]) == refused


def test_a_client_is_not_among_those_that_it_is_measured_by() -> None:
    assert judged([of(1, 0), of(1e30, 0)]) == {1}
    assert judged([of(1, 0), of(1, 0), of(1e30, 0)]) == {2}


def test_leaves_are_compared_by_name_in_whatever_order_they_come() -> None:
    sent = of(100, 0)
    backwards = [dict(reversed(of(*values).items())) for values in ((100.1, 0), (100, 0.1))]
    assert judged([*backwards, of(300, 0)], sent, factor=5) == {2}


def test_where_most_send_models_what_counts_is_the_change() -> None:
    sent = of(100, 100)
    models = [of(100.1, 100), of(100, 100.1), of(100, 99.9)]
    assert judged([*models, of(99, 100)], sent, factor=5) == set()  # below what was sent
    assert judged([*models, of(99, 300)], sent, factor=5) == {3}
    assert judged([*models, of(0, 0)], sent, factor=5) == set()
    assert judged([*models, of(-1, -1)], sent, factor=5) == {3}


def test_where_most_send_differences_what_counts_is_the_reply() -> None:
    sent = of(100, 100)
    differences = [of(0.1, 0), of(0, 0.1), of(0, -0.1)]
    assert judged([*differences, of(100, 100)], sent, factor=5) == set()
    assert judged([*differences, of(110, 100)], sent, factor=5) == {3}
    assert judged([*differences, of(200, 200)], sent, factor=5) == {3}


def test_who_still_learns_among_those_that_do_not_is_used() -> None:
    sent = of(3, 4)
    still = [of(3, 4)] * 4
    assert judged([*still, of(3, 5)], sent) == set()
    assert judged([*still, of(3, 60)], sent) == {4}
    almost = [of(3, 4 + 1e-6 * place) for place in range(1, 5)]
    assert judged([*almost, of(3, 8.9)], sent) == set()
    assert judged([*almost, of(3, 9.1)], sent) == {4}


def test_a_gradient_may_be_as_many_times_longer_as_what_it_was_pulled_back_of() -> None:
    """Or a client that still learns among those that do not would be lost for good."""
    replies = [of(1, 0), of(0, 1), of(0, 1), of(300, 0)]
    alike, more, less = ([of(1, 0)] * 3 + [of(length, 0)] for length in (1, 40, 1e-3))
    assert judged(replies, payloads=alike) == judged(replies, payloads=less) == {3}
    assert judged(replies, payloads=more) == set()
    assert judged([*replies[:3], of(500, 0)], payloads=more) == {3}
    nothing: list[Tree] = [{}] * 4
    assert judged(replies, payloads=nothing) == {3}
    assert judged(replies[:2] + replies[3:], payloads=[*[of(0, 0)] * 2, of(9, 0)]) == {2}


@pytest.mark.parametrize(("length", "bound"), [(80, 400), (2.2, 11), (1, 10)])
def test_how_many_times_longer_is_told_by_the_others_median(length: float, bound: float) -> None:
    payloads = [of(1, 0), of(2, 0), of(3, 0), of(length, 0)]
    for reply, refused in ((0.999 * bound, set()), (1.001 * bound, {3})):
        replies = [of(1, 0), of(0, 1), of(0, 1), of(reply, 0)]
        assert judged(replies, payloads=payloads) == refused


def test_who_says_nothing_is_no_measure_for_the_others() -> None:
    nothing = [of(0, 0)] * 3
    assert judged([*nothing, of(1, 0), of(2, 0)]) == set()
    assert judged([*nothing, of(1, 0), of(1e30, 0)]) == {4}


def test_almost_nothing_from_one_does_not_refuse_the_other() -> None:
    assert judged([of(3, 4 + 1e-6), of(3, 5)], of(3, 4)) == set()


def test_who_is_alone_is_measured_by_what_was_sent() -> None:
    assert judged([of(3, 53)], of(3, 4)) == set()
    assert judged([of(3, 55)], of(3, 4)) == {0}
    assert judged([of(1e15, 0)]) == set()  # of which nothing is known
    assert judged([of(1e39, 0)]) == {0}  # its length is beyond a float32


def test_who_is_alone_with_noise_that_is_longer_is_measured_by_that() -> None:
    reply, sent = of(3, 59), of(3, 4)
    assert judged([reply], sent, noise=5.4) == {0}
    assert judged([reply], sent, noise=5.6) == set()
    assert judged([of(3, 53)], sent, noise=0.1) == set()  # what was sent is longer
    assert judged([of(1e15, 0)], noise=0.1) == set()  # nothing was
    assert judged([of(1, 0), of(11, 0)], noise=5.6) == {1}  # others have the same


def test_counts_are_judged_by_themselves_and_single_numbers_are_not() -> None:
    def reply(count: int, cluster: int = 1) -> Tree:
        return {
            "mean": torch.ones(2) * 1e6,
            "count": torch.tensor([count, 1]),
            "cluster": torch.tensor(cluster),
            "there": torch.tensor([True, False]),
        }

    few = [reply(3), reply(5), reply(4, cluster=1000)]
    assert judged([*few, reply(30)]) == set()
    assert judged([*few, reply(2**62)]) == {3}
    assert judged([*few, reply(-(2**62))]) == {3}


class Sender(Client):
    @step(like="model")
    def train(self, model: Tree) -> Tree:
        return model

    @step
    def counts(self) -> Tree:
        return {"count": torch.tensor([3, 4])}

    @step(deferrable=True)
    def late(self) -> Tree:
        return {"value": torch.ones(2)}


class Liar(Faults):
    def lie(self, reply: Tree, like: Tree | None, seed: int, call: Any) -> Tree:
        return trees.tree_map(lambda leaf: torch.full_like(leaf, 10**9), reply)


@pytest.fixture
def engine() -> LoopEngine:
    models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    return LoopEngine(task, Sender, None, seed=0, faults=Liar(hostile=(1,)))


def test_a_cohort_loses_who_lies_by_size_and_only_with_a_bound(engine: LoopEngine) -> None:
    def lost(bound: float | None, training: bool = True) -> set[int]:
        cohort = engine.cohort([0, 1, 2, 3], 0, training=training)
        cohort.state.reply_bound = bound
        for scale, group in zip((1e5, 1.0), cohort.sizes.values(), strict=True):
            sent = {"w": torch.tensor([3.0, 4.0]) * scale}
            group.ask(Sender.train, Each(trees.repeat(sent, len(group.ids))))
        assert (cohort.weight == 0).tolist() == [client in cohort.state.lost for client in range(4)]
        return set(cohort.state.lost)

    assert lost(10.0) == {1}
    assert lost(None) == set()


def test_who_lies_in_what_was_posted_stays_in_its_round(engine: LoopEngine) -> None:
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Sender.counts)
    cohort.state.reply_bound = 10.0
    pending = cohort.post(Sender.late)
    assert (pending.weight == 0).tolist() == [False, True, False]
    assert pending.reply()["value"][1].tolist() == [0, 0]
    assert [client for client, _ in cohort.state.late] == [1]
    assert cohort.state.lost == {}


def test_known_clients_asked_in_a_round_are_bound_as_well(engine: LoopEngine) -> None:
    cohort = engine.cohort([0, 2], 0, training=True)
    cohort.state.reply_bound = 10.0
    assert cohort.known.state.reply_bound == 10.0


@pytest.mark.parametrize(("more", "refused"), [(2**40, False), (2**40 + 1, True)])
@pytest.mark.parametrize("difference", [False, True])
def test_a_count_of_batches_is_judged_by_what_was_sent(
    more: int, refused: bool, difference: bool
) -> None:
    """Of all that was, since clients may be sent several models; after many rounds it is large."""
    of = "norm.num_batches_tracked"
    sent = [{"a": {of: torch.tensor(2**50)}, "b": {of: torch.tensor(2**45)}}]
    count = torch.tensor(2**50 + more)
    start = {of: torch.tensor(2**45)} if difference else None
    told = impossible({of: start[of] - count if start else count}, sent, start)
    assert (told is not None) is refused
    assert not refused or "more batches" in str(told)

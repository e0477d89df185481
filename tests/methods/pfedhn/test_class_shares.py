"""pFedHN with fixed descriptors: the proportions of classes that a client has."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.data.arrays import IGNORED
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from methods.pfedhn.checks import (
    SERVER,
)
from toys import (
    CLASSES,
    ONE_STEP,
    Federation,
    close,
    make_quadratic_task,
    make_task,
    make_task_of_two_labels,
    make_token_task,
)


def test_fixed_descriptors_are_class_proportions() -> None:
    task = make_task(examples=(12, 1, 20, 9), novel=1)  # all of what client 1 has is of one class
    settings = SERVER | {"descriptor": "class_proportions"}
    federation = Federation("pfedhn", task, **ONE_STEP, **settings)
    federation.round([0, 1])
    for client in (1, 3):
        y = task.y[task.train[client]]
        share = torch.tensor([[(y == c).double().mean() for c in range(CLASSES)]]).double()
        generated = federation.server.hyper_net(share)
        expected = {name: value[0].detach() for name, value in generated.items()}
        torch.testing.assert_close(federation.personal(client), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["class_proportions", "class_shares"])
def test_what_has_no_class_of_each_example_is_not_described_by_them(kind: str) -> None:
    with pytest.raises(UserError, match=rf"method.descriptor must be embedding .* came {kind}"):
        Federation("pfedhn", make_quadratic_task(), descriptor=kind)
    with pytest.raises(UserError, match=rf"examples have 2 labels each.* came {kind}; leave it"):
        Federation("pfedhn", make_task_of_two_labels(), descriptor=kind)


def test_class_proportions_of_tokens_are_of_those_that_count() -> None:
    task = make_token_task()
    task.y[task.train[1]] = IGNORED  # one client has no label at all
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, descriptor="class_proportions")
    cohort = ours.engine.cohort([0, 1], 0, training=True)
    found = cohort.ask(ours.method.Client.class_proportions)["descriptor"]
    assert not cohort.state.lost
    y = task.y[task.train[0]][:, :3]  # those behind do not count
    expected = [[(y == c).double().mean().item() for c in range(CLASSES)], [0.0] * CLASSES]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double())


def check_class_shares(engine: Any = None) -> None:
    """p_ij over known clients i, which sums to one for each class j (section 5.3)."""
    task = make_task(novel=1)
    task.y[: len(task.y)] = task.y.clamp(max=1)  # nobody has the third class
    task.y[task.train[3][:2]] = 2  # but for a novel client
    settings = SERVER | {"descriptor": "class_shares"}
    federation = Federation("pfedhn", task, engine, **ONE_STEP, **settings)
    cohort = federation.round([0, 1])
    asked = [(e.client, e.step) for e in cohort.state.exchanges if e.step == "class_counts"]
    assert sorted(client for client, _ in asked) == [0, 0, 1, 1, 2]  # all known ones, once
    cohort = federation.round([2], 1)
    assert [e.step for e in cohort.state.exchanges] == ["class_counts", "train_model"]
    labels = [task.y[task.train[client]] for client in range(4)]
    count = torch.stack([torch.bincount(y, minlength=CLASSES) for y in labels]).double()
    total = count[:3].sum(dim=0)
    assert total[2] == 0
    for client in (1, 3):
        share = torch.where(total > 0, count[client] / total, (count[client] > 0).double())
        generated = federation.server.hyper_net(share[None])
        expected = {name: value[0].detach() for name, value in generated.items()}
        close(federation.personal(client), expected)


def test_fixed_descriptors_may_be_shares_of_classes() -> None:
    check_class_shares()


def test_who_is_away_when_classes_are_counted_counts_from_its_first_round_on() -> None:
    """Shares are of all who have answered, so that those of known clients never exceed one."""

    class Away(LoopEngine):
        def answer(self, calls: Sequence[Call]) -> list[trees.Tree | Exception]:
            away = NoAnswerError("away")
            answers = zip(calls, super().answer(calls), strict=True)
            return [away if (c.client, c.round) == (2, 0) else answer for c, answer in answers]

    task = make_task(novel=1)
    task.y[torch.cat([*task.train])[:CLASSES]] = torch.arange(CLASSES)  # client 0 has each class
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, descriptor="class_shares")
    ours.engine = Away(task, ours.method.Client, ours.config, seed=0)
    ours.round([0], 0)
    labels = [task.y[task.train[client]] for client in range(4)]
    count = torch.stack([torch.bincount(y, minlength=CLASSES) for y in labels]).double()

    def shares(*clients: int) -> Tensor:
        cohort = ours.engine.cohort(clients, 99, training=False)
        found: Tensor = ours.server.descriptors_of(cohort)
        return found

    close(shares(0), count[:1] / count[:2].sum(dim=0))
    close(shares(2), count[2:3] / count[:3].sum(dim=0))
    ours.round([2], 1)
    for which in ([0, 1, 2], [3]):
        expected = count[which] / count[:3].sum(dim=0)
        close(shares(*which), expected)


def test_who_is_lost_has_the_classes_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SERVER | {"descriptor": "class_shares"}
    lossy, smaller = (Federation("pfedhn", make_task(), **ONE_STEP, **settings) for _ in range(2))
    for ours in (lossy, smaller):
        ours.round([0, 1], 0)
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    assert list(lossy.round([0, 1], 1).state.lost) == [1]
    smaller.round([0], 1)
    close(lossy.server.state(), smaller.server.state())


def test_class_shares_are_known_before_the_first_round_and_after_a_restart() -> None:
    settings = SERVER | {"descriptor": "class_shares"}
    ours, other = (Federation("pfedhn", make_task(), **ONE_STEP, **settings) for _ in range(2))
    fresh = ours.personal(0)
    assert not ours.server.examples  # serving changes nothing
    ours.round([0])
    other.server.load(trees.clone(ours.server.state()))
    assert torch.equal(other.server.examples["count"], ours.server.examples["count"])
    torch.testing.assert_close(other.personal(0), ours.personal(0), rtol=0, atol=0)
    assert not torch.equal(fresh["head.bias"], ours.personal(0)["head.bias"])

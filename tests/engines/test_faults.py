"""What a client sends that is to lie, against the formula of each lie."""

import pytest
import torch

from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.trees import Tree

SENT = {"w": torch.tensor([3.0, -4.0]).double(), "count": torch.tensor(7)}
CHANGE = {"w": torch.tensor([0.5, 1.0]).double(), "count": torch.tensor(0)}
TRAINED = {"w": SENT["w"] + CHANGE["w"], "count": torch.tensor(7)}
CALL = Call(0, 0, 0, "train_model")


def test_who_does_not_answer_is_drawn_anew_in_each_round_and_for_all_its_steps() -> None:
    faults = Faults(drop=0.5)
    away, later = (
        [faults.drops(0, Call(0, number, 0, step)) for number in range(20)]
        for step in ("train_model", "join")
    )
    assert set(away) == {True, False}
    assert later == away


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(TRAINED, SENT["w"] - 10 * CHANGE["w"]), (CHANGE, -10 * CHANGE["w"])],
    ids=["a model", "a difference"],
)
def test_reverse_is_ten_times_the_change_backwards(reply: Tree, expected: torch.Tensor) -> None:
    found = Faults(hostile=(0,)).lie(reply, SENT, 0, CALL)
    torch.testing.assert_close(found["w"], expected, rtol=1e-15, atol=1e-15)
    assert torch.equal(found["count"], reply["count"])


@pytest.mark.parametrize("like", [SENT | {"there": torch.tensor([True, True])}, None])
def test_a_mask_stays_beside_what_is_turned(like: Tree | None) -> None:
    """As of FedProto, whose clients say which classes they have."""
    reply = TRAINED | {"there": torch.tensor([True, False])}
    found = Faults(hostile=(0,)).lie(reply, like, 0, CALL)
    assert found["there"].tolist() == [True, False]
    assert not torch.equal(found["w"], reply["w"])


def test_of_a_reply_that_is_like_nothing_all_is_the_change() -> None:
    found = Faults(hostile=(0,)).lie(TRAINED, None, 0, CALL)
    torch.testing.assert_close(found["w"], -10 * TRAINED["w"])


def test_noise_is_ten_times_as_long_as_the_change_and_each_call_has_its_own() -> None:
    draw = torch.Generator().manual_seed(0)
    sent = {name: torch.randn(5000, generator=draw) for name in ("a", "b")}
    change = {name: torch.full((5000,), 3 / 10_000**0.5) for name in sent}  # of length 3
    reply = {name: sent[name] + change[name] for name in sent}
    faults = Faults(hostile=(0,), attack="noise")
    found = faults.lie(reply, sent, 0, CALL)
    noise = torch.cat([found[name] - sent[name] for name in sent])
    assert noise.norm().item() == pytest.approx(30, rel=0.05)
    again, other = (
        faults.lie(reply, sent, 0, Call(0, number, 0, "train_model")) for number in (0, 1)
    )
    assert torch.equal(again["a"], found["a"])
    assert not torch.equal(other["a"], found["a"])
    assert not torch.equal(faults.lie(reply, sent, 1, CALL)["a"], found["a"])  # of another seed


def test_huge_is_huge_in_every_entry() -> None:
    found = Faults(hostile=(0,), attack="huge").lie(TRAINED, SENT, 0, CALL)
    assert found["w"].tolist() == [1e30, 1e30]
    assert found["count"].item() == 7

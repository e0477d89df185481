"""IT-PFL-HN, privacy: the noise that a novel client adds, how much, and within what budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.federation import Cohort
from hyperfed.methods import itpfl
from hyperfed.privacy import GaussianMechanism, analytic_multiplier
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from methods.itpfl.checks import (
    SETTINGS,
    encode,
    encoder_of,
    federation,
    generated,
    inputs,
)
from toys import CLASSES, FEATURES, Federation, close, make_task


@pytest.mark.parametrize("other", [{"private": True}, {"epsilon": 0.3}, {"encoder": "end_to_end"}])
def test_embeddings_that_cannot_be_told_standardised_are_not(other: dict[str, Any]) -> None:
    assert from_keys("itpfl", {}).settings.standardized
    assert not from_keys("itpfl", {"method": other}).settings.standardized
    with pytest.raises(UserError, match="must be told by an encoder that is not bounded"):
        from_keys("itpfl", {"method": other | {"standardize": True}})


def reply_of(ours: Federation, client: int, round: int = 7) -> Tensor:
    """The descriptor that leaves a client."""
    cohort = ours.engine.cohort([client], round, training=False)
    reply: Tensor = cohort.ask(itpfl.Client.describe, encoder_of(ours))["descriptor"][0]
    return reply


def check_noise() -> None:
    """What leaves a novel client has noise of the calibrated size; nothing is added later."""
    settings = {"epsilon": 0.3, "budget": 30.0, "embedding_size": 20}
    ours = federation(settings=settings)
    clean = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
    noise = torch.cat([reply_of(ours, 3, number) - clean for number in range(100)])
    sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
    assert noise.std().item() == pytest.approx(sigma, rel=0.06)  # four standard errors
    assert abs(noise.mean().item()) < 4 * sigma / len(noise) ** 0.5
    cohort = ours.engine.cohort([3], 7, training=False)
    received = ours.server.describe(cohort)[0]
    torch.testing.assert_close(received, reply_of(ours, 3), rtol=0, atol=0)
    expected = generated(ours.server.novel_net, received)
    cohort = ours.engine.cohort([3], 7, training=False)
    sent = trees.take(ours.server.personalize(cohort).tree, 0)
    close(sent, expected)
    known = encode(encoder_of(ours), inputs(ours, 1), bounded=True)
    close(reply_of(ours, 1), known)


def test_a_novel_client_adds_the_noise_before_it_sends() -> None:
    check_noise()


def test_without_sigma_there_is_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    noiseless = federation(settings={"private": True})
    expected = noiseless.personal(3)
    noisy = federation(settings={"epsilon": 0.3})
    assert not torch.allclose(noisy.personal(3)["head.bias"], expected["head.bias"])
    monkeypatch.setattr(GaussianMechanism, "sigma", lambda self, sensitivity: 0.0)
    noisy.engine.released.clear()
    torch.testing.assert_close(noisy.personal(3), expected, rtol=0, atol=0)


def test_more_data_needs_less_noise() -> None:
    errors = []
    for count in (10, 100, 1000):
        ours = federation(examples=(5, 5, 5, count), settings={"epsilon": 0.3})
        clean = encode(encoder_of(ours), inputs(ours, 3), bounded=True)
        errors.append((reply_of(ours, 3) - clean).norm().item())
    # The draw is another, as the order of the samples is drawn first; the scale is 1 / n.
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_replacing_a_sample_moves_what_is_sent_by_at_most_2_over_n() -> None:
    ours = federation(settings={"private": True})
    before = reply_of(ours, 3)
    for which in range(9):
        changed = federation(settings={"private": True})
        changed.task.x[changed.task.train[3][which]] = 1e3 * (-1) ** which
        assert (reply_of(changed, 3) - before).norm() <= 2 / 9


class Mixing(torch.nn.Module):
    """Sees each sample beside the mean of its batch, which no type of a layer tells."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(FEATURES, 4)
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(x - x.mean(dim=0) / 2)))
        return output


def test_what_noise_is_to_hide_goes_through_the_network_sample_by_sample() -> None:
    """Of known clients, who answer without noise, in batches."""
    ours = federation(net=Mixing, settings={"private": True, "batch_size": 100})
    for client, mixed in ((3, False), (1, True)):
        x = inputs(ours, client)
        seen = x - (x.mean(dim=0) if mixed else x) / 2
        close(reply_of(ours, client), encode(encoder_of(ours), seen, bounded=True))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_sensitivity_holds_in_whatever_precision_clients_compute(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a linear encoder -x is told as the opposite of x: no pair is farther apart."""
    told: list[tuple[Tensor, float]] = []

    def noted(self: itpfl.Client, value: Tensor, sensitivity: float) -> Tensor:
        told.append((value, sensitivity))
        return value

    monkeypatch.setattr(itpfl.Client, "release", noted)
    linear = torch.nn.Linear(FEATURES, CLASSES, bias=False)
    task = make_task(examples=(5, 5, 5, 400), novel=1, models={"base": linear})
    settings = SETTINGS | {"epsilon": 0.3, "batch_size": 32}
    one = 1e6 * torch.randn(4, FEATURES, generator=generator(0))
    for row in [each for pair in zip(one, -one, strict=True) for each in pair]:
        x = task.x.float()
        x[task.train[3][7]] = row
        ours = Federation("itpfl", replace(task, x=x), {"precision": precision}, **settings)
        assert reply_of(ours, 3).dtype == torch.float32
    apart = [float((a[0] - b[0]).norm()) for a, b in zip(told[::2], told[1::2], strict=True)]
    assert {sensitivity for _, sensitivity in told} == {2 / 400}
    assert 2 / 400 * (1 - 1e-9) < max(apart) <= 2 / 400 * (1 + 1e-12)


def test_no_client_answers_beyond_its_budget_whatever_it_is_said_to_remember() -> None:
    ours = federation(settings={"epsilon": 0.3, "budget": 0.5})
    said = []
    for number in (0, 1, 1, 0):  # the same question again is answered alike
        ours.engine.memory = {}
        said.append(reply_of(ours, 3, number))
        cohort = ours.engine.cohort([3], number, training=False)
        torch.testing.assert_close(ours.server.describe(cohort)[0], said[-1], rtol=0, atol=0)
    assert torch.equal(said[0], said[3])
    assert torch.equal(said[1], said[2])
    assert len(ours.engine.released[3]["multipliers"]) == 2
    with pytest.raises(UserError, match=r"within epsilon 0\.5 .* after 2 of them"):
        ours.server.personalize(ours.engine.cohort([3], 2, training=False))
    ours.round([0, 1, 2], 1)  # nobody else is concerned
    assert ours.engine.released.keys() == {3}


def test_another_encoder_is_another_question_with_other_noise() -> None:
    """Of one noise for both, the difference of two answers would tell what is behind them."""
    ours = federation(settings={"epsilon": 0.3, "budget": 5.0})
    encoder = encoder_of(ours)
    other = trees.tree_map(lambda leaf: leaf + 1e-12, encoder)
    said = []
    for sent in (encoder, other):
        cohort = ours.engine.cohort([3], 0, training=False)
        said.append(cohort.ask(itpfl.Client.describe, sent)["descriptor"][0])
    sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
    assert (said[0] - said[1]).norm() > 0.1 * sigma
    assert len(ours.engine.released[3]["multipliers"]) == 2


def test_of_other_inputs_the_same_is_another_question_with_other_noise() -> None:
    """Else what a client answers is of data that it has no more."""
    ours = federation(settings={"epsilon": 0.3, "budget": 5.0})
    first = reply_of(ours, 3)
    other = federation(x=ours.task.x + 1e-12, settings={"epsilon": 0.3, "budget": 5.0})
    other.engine.released = ours.engine.released
    sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
    assert (reply_of(other, 3) - first).norm() > 0.1 * sigma
    assert len(ours.engine.released[3]["multipliers"]) == 2
    torch.testing.assert_close(reply_of(ours, 3), first, rtol=0, atol=0)


def test_weights_that_overflow_do_not_tell_whose_sample_did() -> None:
    """A sample that gives NaN would make the whole answer NaN, whatever the noise."""
    ours = federation(settings={"epsilon": 0.3, "private": True})
    huge = trees.tree_map(lambda leaf: leaf * 1e200, encoder_of(ours))
    cohort = ours.engine.cohort([0, 3], 0, training=False)
    assert cohort.ask(itpfl.Client.describe, huge)["descriptor"].isfinite().all()


def test_the_server_says_how_private_it_is() -> None:
    assert federation().server.privacy() is None
    assert Federation("pfedhn", make_task()).server.privacy() is None
    record = federation(settings={"epsilon": 0.3}).server.privacy()
    assert record is not None
    assert (record["epsilon_of_an_answer"], record["delta"]) == (0.3, 0.01)
    assert record["mechanism"] == "gaussian, analytic calibration"


# Mutants: the checks above fail on them, so much they are worth


def no_noise(self: Any, value: Tensor, sensitivity: float) -> Tensor:
    return value


def test_no_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(itpfl.Client, "release", no_noise)
    with pytest.raises(AssertionError):
        check_noise()


def test_noise_of_the_server_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = itpfl.Server.describe

    def noisy(self: Any, clients: Cohort) -> Tensor:
        row = describe(self, clients)
        sigma = 2 / 9 * analytic_multiplier(0.3, 0.01)
        return row + sigma * torch.randn(row.shape, generator=generator(0), dtype=row.dtype)

    monkeypatch.setattr(itpfl.Client, "release", no_noise)
    monkeypatch.setattr(itpfl.Server, "describe", noisy)
    with pytest.raises(AssertionError):
        check_noise()

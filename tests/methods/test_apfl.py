"""APFL against PyTorch's own optimisers on both models, and autograd for alpha."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed.methods import apfl
from hyperfed.runs.config import from_keys
from hyperfed.training import Sgd, Steps
from hyperfed.trees import Tree, count_bytes
from toys import MOMENTUM, TORCH, Federation, Normed, TwoLayers, logits, make_task, torch_sgd

NETS = pytest.mark.parametrize("net", [TwoLayers, Normed])


class Kept(NamedTuple):
    """What a client has after a round."""

    w: Tree
    v: Tree
    alpha: Tensor


def mixture(w: Tree, v: Tree, alpha: Tensor) -> Tree:
    """Alpha v + (1 - alpha) w of the parameters, and the buffers of v."""
    return {
        name: alpha * v[name] + (1 - alpha) * w[name] if "norm.run" not in name else v[name]
        for name in v
        if "tracked" not in name
    }


def a_round(ours: Federation, client: int, w: Tree, v: Tree, alpha: Tensor) -> Kept:
    """Three steps, in each of which everything descends from where all was before it."""
    net, rows = ours.task.models["base"], ours.task.train[client]
    names = [name for name, _ in net.named_parameters()]
    # Batch-norm writes its statistics in place, into copies.
    w, v = ({n: value.clone().requires_grad_(n in names) for n, value in m.items()} for m in (w, v))
    by_w, by_v = (torch.optim.SGD([model[n] for n in names], **TORCH) for model in (w, v))

    def loss(model: Tree) -> Tensor:
        return F.cross_entropy(logits(net, model, ours.task.x[rows]), ours.task.y[rows])

    for number in range(3):
        alpha = alpha.detach().requires_grad_()
        for optimizer in (by_w, by_v):
            optimizer.zero_grad()
        constant = {name: value.detach() for name, value in w.items()}
        loss(mixture(constant, v, alpha)).backward()
        loss(w).backward()
        if number == 0:
            alpha = (alpha - TORCH["lr"] * alpha.grad).clamp(0, 1)
        for optimizer in (by_w, by_v):
            optimizer.step()
    return Kept(*({n: value.detach() for n, value in m.items()} for m in (w, v)), alpha.detach())


def close(actual: Tree, expected: Tree) -> None:
    """All but the count of batches, which the derivation has no mixture of."""
    pairs = ({n: t for n, t in tree.items() if "tracked" not in n} for tree in (actual, expected))
    torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-12)


def after_two_rounds(net: Any = TwoLayers, **settings: Any) -> Federation:
    """In the second round client 1 is absent, so that its v is far from w; client 3 is novel."""
    ours = Federation("apfl", make_task(net, novel=1), **MOMENTUM | settings)
    ours.round([0, 1], 0)
    ours.round([0], 1)
    return ours


def kept(ours: Federation, client: int) -> tuple[Tree, Tensor]:
    return ours.engine.memory[client]["local"], ours.engine.memory[client]["alpha"]


@NETS
def test_a_round_moves_both_models_and_alpha(net: Any) -> None:
    ours = after_two_rounds(net, mixing=0.3)
    for number in (2, 3):  # in the second alpha is no longer the setting
        w, (v, alpha) = ours.server.model["base"], kept(ours, 1)
        expected = a_round(ours, 1, w, v, alpha)
        assert 1e-3 < (expected.alpha - alpha).abs() < 0.29
        ours.round([1], number)
        close(ours.server.model["base"], expected.w)
        close(ours.engine.memory[1]["local"], expected.v)
        close({"": kept(ours, 1)[1]}, {"": expected.alpha})
        close(ours.personal(1), mixture(expected.w, expected.v, expected.alpha))
    if net is Normed:
        assert kept(ours, 1)[0]["norm.num_batches_tracked"] == 9


@pytest.mark.parametrize(("start", "end"), [(0.02, 0.0), (0.98, 1.0)])
def test_alpha_stays_a_share(start: float, end: float) -> None:
    """A long step from near an end of [0, 1] would go beyond it."""
    ours = after_two_rounds(mixing=start, adaptive=False)
    far = Federation("apfl", ours.task, **MOMENTUM | {"local_lr": 1e4, "local_steps": 1})
    far.server.load(ours.server.state())
    far.engine.memory = dict(ours.engine.memory)
    far.round([1], 2)
    assert kept(far, 1)[1] == end


def test_v_starts_from_the_first_global_model_that_is_received() -> None:
    ours = after_two_rounds()
    w = ours.server.model["base"]
    torch.testing.assert_close(ours.personal(2), w, rtol=0, atol=0)  # it was never asked
    expected = a_round(ours, 2, w, w, torch.tensor(0.5, dtype=torch.float64))
    ours.round([2], 2)
    close(ours.engine.memory[2]["local"], expected.v)
    assert kept(ours, 2)[1] == 0.5  # v was w: neither share is better


@NETS
def test_the_global_model_is_that_of_fedavg_and_with_alpha_zero_it_is_evaluated(net: Any) -> None:
    ours = after_two_rounds(net, mixing=0.0, adaptive=False)
    fedavg = Federation("fedavg", make_task(net, novel=1), **MOMENTUM)
    fedavg.round([0, 1], 0)
    fedavg.round([0], 1)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    names = [name for name, _ in ours.task.models["base"].named_parameters()]
    pairs = ({name: each.personal(1)[name] for name in names} for each in (ours, fedavg))
    torch.testing.assert_close(*pairs, rtol=0, atol=0)


def test_with_alpha_one_a_client_trains_alone() -> None:
    ours = after_two_rounds(Normed, mixing=1.0, adaptive=False)
    expected = ours.task.outline().initial()
    for _ in range(2):
        expected = torch_sgd(ours.task, 0, expected, 3, **TORCH)
    close(ours.personal(0), expected)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_novel_client_does_what_a_known_one_does_with_the_global_model_frozen(
    rounds: int,
) -> None:
    ours = after_two_rounds(mixing=0.3, novel_rounds=rounds)
    w = ours.server.model["base"]
    v, alpha = w, torch.tensor(0.3, dtype=torch.float64)
    for _ in range(rounds):
        _, v, alpha = a_round(ours, 3, w, v, alpha)
    assert (alpha != 0.3) == bool(rounds)
    close(ours.personal(3), mixture(w, v, alpha))
    torch.testing.assert_close(ours.server.model["base"], w, rtol=0, atol=0)
    cohort = ours.engine.cohort([3], 9, training=False)
    ours.server.personalize(cohort)
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(count_bytes(w), 0)] * rounds


def test_the_official_preset_is_the_example_on_mnist() -> None:
    run = from_keys("apfl", apfl.PRESETS["official"])
    assert (run.rounds, run.cohort, run.task.clients) == (20, 1.0, 10)
    assert (run.settings.mixing, run.settings.adaptive) == (0.5, False)
    assert run.settings.batches == Steps(10, 50)
    assert run.settings.local == Sgd(0.1, weight_decay=1e-4)

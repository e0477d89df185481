"""PeFLL's theorems: terms by hand from the paper, and whether they hold where all is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hyperfed.errors import UserError
from hyperfed.theory.pefll import (
    Constants,
    gaussian_kl,
    generalization_bound,
    gradient_norm_bound,
    objective_smoothness,
    rounds_needed,
)

CONSTANTS = Constants(
    gap=12.0,
    smoothness=0.5,
    local_smoothness=0.25,
    local_gradient=2.0,
    network_gradient=3.0,
    local_noise=5.0,
    jacobian_noise=7.0,
    model_noise=11.0,
    dissimilarity=13.0,
    cohort=4,
    local_steps=10,
    batch=8,
)


def test_theorem_3_1_in_print_by_hand() -> None:
    # sqrt(cT) = sqrt(4 * 100) = 20; (F_0 - F_*) / sqrt(cT) = 12 / 20.
    # 224 c L1^2 b1^2 b2^2 / T = 224 * 4 * .0625 * 4 * 9 / 100 = 20.16.
    # 8 b1^2 sigma2^2 / b = 8 * 4 * 49 / 8 = 196.
    # 14 L1^2 b2^2 sigma3^2 / b = 14 * .0625 * 9 * 121 / 8 = 119.109375.
    # L (6 sigma1^2 + 4 k gamma^2) / (k sqrt(cT)) = .5 (6 * 25 + 4 * 10 * 169) / 200 = 17.275.
    assert gradient_norm_bound(CONSTANTS, 100, published=True) == pytest.approx(
        {"start": 0.6, "drift": 20.16, "jacobian": 196, "model": 119.109375, "sampling": 17.275}
    )


def test_theorem_3_1_as_proved_is_that_of_115_with_its_step_size() -> None:
    # (114), (115) with / b and b2^2 sigma1^2; beta = 2 sqrt(c) / (k sqrt(T)) = 4 / 100.
    c, k, T, beta = 4, 10, 100, 0.04
    of_step = {
        "start": 2 * 12 / (beta * k * T),
        "drift": 56 * 0.0625 * 4 * 9 * beta**2 * k**2,
        "jacobian": 196,
        "model": 119.109375,
        "sampling": 6 * 0.5 * beta / c * 25 * 9 + 4 * 0.5 * beta * k / c * 169,
    }
    assert gradient_norm_bound(CONSTANTS, T) == pytest.approx(of_step)


def mean_square_gradient(b2: float, L1: float, sigma1: float, T: int) -> float:
    """The left side, exactly: one client, k = 1, h = b2 eta, f = L1 theta^2 / 2 near 0, eta_0 = 0.

    The noise of a local gradient is +-sigma1. So eta <- (1 - beta L) eta +- beta b2 sigma1 with L =
    b2^2 L1, and the mean of eta^2 follows a recursion. |eta| never exceeds b2 sigma1 / L, where a
    model's gradient is sigma1: b1 = sigma1 holds. F is at its minimum at the start.
    """
    L, beta = b2**2 * L1, 2 / math.sqrt(T)
    square, total = 0.0, 0.0
    for _ in range(T):
        square = (1 - beta * L) ** 2 * square + (beta * b2 * sigma1) ** 2
        total += L**2 * square
    return total / T


def test_the_printed_theorem_3_1_fails_where_the_jacobian_is_large_and_the_mended_one_holds() -> (
    None
):
    b2, L1, T = 4.0, 1 / 16, 100_000
    constants = Constants(
        gap=0.0,
        smoothness=b2**2 * L1,
        local_smoothness=L1,
        local_gradient=1.0,
        network_gradient=b2,
        local_noise=1.0,
        jacobian_noise=0.0,
        model_noise=0.0,
        dissimilarity=0.0,
        cohort=1,
        local_steps=1,
        batch=1,
    )
    assert rounds_needed(constants) < T
    left = mean_square_gradient(b2, L1, 1.0, T)
    assert left > sum(gradient_norm_bound(constants, T, published=True).values())
    assert left < sum(gradient_norm_bound(constants, T).values())


def test_rounds_needed_make_the_step_as_small_as_the_proof_needs() -> None:
    for smoothness in (0.5, 50.0):  # the one is bound by (109), the other by (108)
        constants = replace(CONSTANTS, smoothness=smoothness)
        c, k, T = 4, 10, rounds_needed(constants)
        beta = 2 * math.sqrt(c) / (k * math.sqrt(T))
        needs = beta * k * smoothness * 56, 28 * 0.0625 * beta * k**2 * c / smoothness
        assert max(needs) == pytest.approx(1)


def test_lemma_b_1_by_hand() -> None:
    assert objective_smoothness(2, 3, 0.25, 5, 0.002) == pytest.approx(2 * 5 + 9 * 0.25 + 0.002)


def test_theorem_4_2_by_hand() -> None:
    # |eta_h|^2 = 6 and |eta_v|^2 = 2 with alpha = .5: 6 / 1 + 2 / 1 = 8.
    assert gaussian_kl(6, 0.5) + gaussian_kl(2, 0.5) == 8
    # n = 4, m = 5, delta = .1. In print: sqrt((8 + log(2 * 2 / .1)) / 8).
    # Of the samples: the mean over two draws of sqrt((KL + log(8 * 20 / .1) + 1) / 40).
    terms = generalization_bound(
        0.25, meta_kl=8, client_kls=[3, 13], clients=4, samples=5, delta=0.1, published=True
    )
    log = math.log(1600)
    within = (math.sqrt((3 + log + 1) / 40) + math.sqrt((13 + log + 1) / 40)) / 2
    across = math.sqrt((8 + math.log(40)) / 8)
    assert terms == pytest.approx({"empirical": 0.25, "clients": across, "samples": within})


def test_theorem_4_1_holds_with_half_of_delta_for_each_part() -> None:
    # Maurer's bound at confidence delta / 2: log(2 sqrt(n) / (delta / 2)); M scales what is added.
    terms = generalization_bound(
        1.0, meta_kl=8, client_kls=[3], clients=4, samples=5, delta=0.1, loss_bound=2
    )
    assert terms["clients"] == pytest.approx(2 * math.sqrt((8 + math.log(2 * 2 / 0.05)) / 8))
    assert terms["samples"] == pytest.approx(2 * math.sqrt((3 + math.log(1600) + 1) / 40))
    assert terms["empirical"] == 1


def test_theorem_4_1_is_not_violated_by_the_luckiest_of_many_algorithms() -> None:
    """A client is a coin of its own bias, its examples are tosses; a model is "heads" or "tails".

    Of 64 algorithms, each bets with a client's majority at some counts and against it at the
    others. The one that does best on the clients seen is taken; of a bet the posterior is certain
    (KL log 2 from the uniform prior), as it is of the algorithm (log 64). Delta is a tenth.
    """
    n, m, trials, delta = 30, 5, 400, 0.1
    draw = np.random.default_rng(0)
    bets = ((np.arange(64)[:, None] >> np.arange(m + 1)) & 1).astype(float)  # (64, counts)
    bias = draw.uniform(size=(trials, n))
    heads = draw.binomial(m, bias)  # (trials, n)
    seen = np.stack([np.where(bet[heads] == 1, 1 - heads / m, heads / m) for bet in bets])
    empirical = seen.mean(axis=2)  # (64, trials)
    chosen = empirical.argmin(axis=0)
    # The bias is uniform, so given the count it is Beta(heads + 1, m - heads + 1), and all counts
    # are equally likely: tails come with probability (m - heads + 1) / (m + 2).
    tails = (m - np.arange(m + 1) + 1) / (m + 2)
    expected = np.where(bets == 1, tails, 1 - tails).mean(axis=1)  # (64,)
    added = generalization_bound(
        0.0,
        meta_kl=math.log(64),
        client_kls=[n * math.log(2)],
        clients=n,
        samples=m,
        delta=delta,
    )
    violated = expected[chosen] > empirical[chosen, np.arange(trials)] + sum(added.values())
    assert violated.mean() <= delta
    # It is no bound of nothing: without what is added the error is more often above than below.
    assert (expected[chosen] > empirical[chosen, np.arange(trials)]).mean() > 0.5
    assert sum(added.values()) < 1


def test_what_is_added_shrinks_with_clients_and_examples_as_it_should() -> None:
    def added(clients: int, samples: int, delta: float = 0.1) -> dict[str, float]:
        kl = {"meta_kl": 8.0, "client_kls": [3.0 * clients]}
        return generalization_bound(0, **kl, clients=clients, samples=samples, delta=delta)

    few, clients, samples = added(100, 5), added(400, 5), added(100, 20)
    assert clients["clients"] < 0.55 * few["clients"]
    assert samples["clients"] == few["clients"]  # more of each client tell nothing of others
    assert samples["samples"] < 0.6 * few["samples"]
    assert added(100, 5, 0.01)["clients"] > few["clients"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": 0.0}, "delta must be between 0 and 1, came 0.0"),
        ({"samples": 0}, "samples must be positive and finite, came 0"),
        ({"meta_kl": -1.0}, "meta_kl must be 0 or more and finite, came -1.0"),
        ({"client_kls": [1.0, math.inf]}, "client_kls_1 must be 0 or more and finite, came inf"),
        ({"client_kls": []}, "an entry for each drawn algorithm, came none"),
        ({"loss_bound": math.inf}, "loss_bound must be positive and finite, came inf"),
    ],
)
def test_what_is_no_setting_of_theorem_4_1_is_refused(change, message) -> None:
    fine = {"meta_kl": 1.0, "client_kls": [1.0], "clients": 2, "samples": 2, "delta": 0.1}
    with pytest.raises(UserError, match=message):
        generalization_bound(0.5, **(fine | change))


def test_what_are_no_constants_of_theorem_3_1_is_refused() -> None:
    with pytest.raises(UserError, match="smoothness must be positive and finite, came 0"):
        replace(CONSTANTS, smoothness=0)
    with pytest.raises(UserError, match="local_noise must be 0 or more and finite, came -1"):
        replace(CONSTANTS, local_noise=-1)
    with pytest.raises(UserError, match="rounds must be positive and finite, came 0"):
        gradient_norm_bound(CONSTANTS, 0)

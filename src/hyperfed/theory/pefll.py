"""PeFLL (Scott et al., ICLR 2024, sections 3.1 and 4, appendices A and B): its three theorems."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hyperfed.errors import UserError, check_positive
from hyperfed.theory.arguments import check_not_negative, check_probability

# Theorem 3.1: convergence


@dataclass(frozen=True)
class Constants:
    """What theorem 3.1 assumes (appendix B.1), and how PeFLL is trained.

    Attributes:
        gap: F(eta_0) - F_*, what the objective can fall by. F is (1) with a mean over clients in
            the place of the sum, as in appendix B.
        smoothness: L, of F; :func:`objective_smoothness` bounds it.
        local_smoothness: L_1, of a client's objective in its model.
        local_gradient: b_1, a bound of the gradient of a client's objective.
        network_gradient: b_2, a bound of the norm of the model's Jacobian in eta.
        local_noise: sigma_1, with sigma_1^2 the variance of a client's stochastic gradients.
        jacobian_noise: sigma_2; the Jacobian by a descriptor from b examples varies by
            sigma_2^2 / b. 0 where descriptors are of all examples.
        model_noise: sigma_3, the same of the model itself.
        dissimilarity: gamma_G, of clients' gradients.
        cohort: c, clients of a round.
        local_steps: k.
        batch: b, examples that make a descriptor.
    """

    gap: float
    smoothness: float
    local_smoothness: float
    local_gradient: float
    network_gradient: float
    local_noise: float
    jacobian_noise: float
    model_noise: float
    dissimilarity: float
    cohort: int
    local_steps: int
    batch: int

    def __post_init__(self) -> None:
        counts = {"cohort": self.cohort, "local_steps": self.local_steps, "batch": self.batch}
        check_positive(smoothness=self.smoothness, **counts)
        given = {k: v for k, v in vars(self).items() if k not in {"smoothness", *counts}}
        check_not_negative(**given)


def objective_smoothness(
    local_gradient: float,
    network_gradient: float,
    local_smoothness: float,
    network_smoothness: float,
    server_smoothness: float,
) -> float:
    """Returns L = b_1 L_2 + b_2^2 L_1 + L_3 (lemma B.1).

    Args:
        local_gradient: b_1.
        network_gradient: b_2.
        local_smoothness: L_1.
        network_smoothness: L_2, of the model in eta.
        server_smoothness: L_3, of the server's objective: 2 max(lambda_h, lambda_v).
    """
    of_models = network_gradient * network_gradient * local_smoothness
    return local_gradient * network_smoothness + of_models + server_smoothness


def gradient_norm_bound(
    constants: Constants, rounds: int, *, published: bool = False
) -> dict[str, float]:
    """Returns the terms of theorem 3.1's bound of the mean of |grad F|^2 over rounds.

    Its step size is beta = 2 sqrt(c) / (k sqrt(T)), at the clients and at the server alike.

    The printed statement (2) is half of its own proof in two terms, and the proof drops a factor:

    - (115) has 6 L beta sigma_1^2 / c + 4 L beta k gamma_G^2 / c. With beta put in that is
      L (12 sigma_1^2 + 8 k gamma_G^2) / (k sqrt(cT)), not L (6 sigma_1^2 + 4 k gamma_G^2) / ....
    - From (90) on a local gradient's noise counts as sigma_1^2, but it reaches eta through the
      Jacobian, by (28) as b_2^2 sigma_1^2. A quadratic objective with b_2 = 4 exceeds the printed
      bound; with the factor the proof goes through.

    (98) lacks the / b of (35) and (36), which the statement has. The server's weight decay is
    beta k lambda in (84), but beta lambda in algorithm 2. And beta must be small enough for (108)
    and (109), which takes :func:`rounds_needed` rounds; the statement says "after T steps".

    Args:
        constants: of the problem.
        rounds: T.
        published: as it is printed.

    Returns:
        {"start", "drift", "jacobian", "model", "sampling"}: of the initial value, of k local steps
        in a row, of sigma_2, of sigma_3, and of sigma_1 and gamma_G. The bound is their sum.
    """
    check_positive(rounds=rounds)
    c, k, T = constants.cohort, constants.local_steps, rounds
    L1, b1, b2 = constants.local_smoothness, constants.local_gradient, constants.network_gradient
    if published:
        of_noise, of_clients = 6.0, 4.0
    else:
        of_noise, of_clients = 12 * b2**2, 8.0
    noise, dissimilarity = constants.local_noise**2, constants.dissimilarity**2
    sampled = constants.smoothness * (of_noise * noise + of_clients * k * dissimilarity)
    return {
        "start": constants.gap / math.sqrt(c * T),
        "drift": 224 * c * (L1 * b1 * b2) ** 2 / T,
        "jacobian": 8 * (b1 * constants.jacobian_noise) ** 2 / constants.batch,
        "model": 14 * (L1 * b2 * constants.model_noise) ** 2 / constants.batch,
        "sampling": sampled / (k * math.sqrt(c * T)),
    }


def rounds_needed(constants: Constants) -> float:
    """Returns from which T on theorem 3.1's step size is as small as its proof needs.

    beta k L <= 1 / 56 for (104) to (108), and 28 L_1^2 beta k^2 c <= L for (109).
    """
    c, k, L = constants.cohort, constants.local_steps, constants.smoothness
    root: float = max(112 * L * math.sqrt(c), 56 * constants.local_smoothness**2 * k * c**1.5 / L)
    return root * root


# Theorems 4.1 and 4.2: generalisation


def gaussian_kl(square_norm: float, variance: float) -> float:
    """Returns KL(N(x, variance I) || N(0, variance I)) = |x|^2 / (2 variance).

    This is what theorem 4.2 puts into 4.1; the text before it has variance * |x|^2 instead.
    """
    check_not_negative(square_norm=square_norm)
    check_positive(variance=variance)
    return square_norm / (2 * variance)


def generalization_bound(
    empirical: float,
    *,
    meta_kl: float,
    client_kls: Sequence[float],
    clients: int,
    samples: int,
    delta: float,
    loss_bound: float = 1.0,
    published: bool = False,
) -> dict[str, float]:
    """Returns the terms of theorem 4.1's bound of the expected loss of a future client.

    With ``meta_kl`` and ``client_kls`` by :func:`gaussian_kl` it is theorem 4.2: |eta_h|^2 /
    (2 alpha_h) + |eta_v|^2 / (2 alpha_v), and sum_i |theta_i|^2 / (2 alpha_theta).

    - The proof bounds (25) with probability 1 - delta / 2, but by the number that holds with
      1 - delta: Maurer's bound then has log(4 sqrt(n) / delta), which is taken here. As it is
      printed, with log(2 sqrt(n) / delta), the theorem holds with probability 1 - 3 delta / 2.
    - Theorem 4.2 has lost the M of 4.1, so its loss is in [0, 1], which cross-entropy is not.
    - Theorem 4.2 has the loss of the model h(v(S)) on both sides; what follows from 4.1 is one for
      models drawn around it, from N(h(v(S)), alpha_theta I).
    - "delta >= 0" can only be delta > 0. Priors must not depend on the data, so a variance that was
      chosen by its bound costs a union: delta divided by the number of choices.
    - All clients have m examples. Where they differ the proof's (13) holds with the smallest m.

    Args:
        empirical: er-hat(Q), the mean over clients and over their examples, of drawn models.
        meta_kl: KL(Q || P), of the algorithm: hypernetwork and descriptor network.
        client_kls: sum_i KL(A(S_i) || P_i) of each drawn algorithm A, whose root's mean is taken.
        clients: n.
        samples: m, of each client.
        delta: probability that the bound does not hold.
        loss_bound: M; the loss is in [0, M].
        published: with the logarithm of the printed theorem.

    Returns:
        {"empirical", "clients", "samples"}: the empirical loss, what is added for having seen n
        clients only, and for having seen m examples of each. The bound is their sum.
    """
    check_not_negative(empirical=empirical, meta_kl=meta_kl)
    check_not_negative(**{f"client_kls_{number}": kl for number, kl in enumerate(client_kls)})
    check_positive(clients=clients, samples=samples, loss_bound=loss_bound)
    check_probability(delta=delta)
    if not client_kls:
        raise UserError("client_kls must have an entry for each drawn algorithm, came none")
    n, total = clients, clients * samples
    across = meta_kl + math.log((2 if published else 4) * math.sqrt(n) / delta)
    within = [math.sqrt((kl + math.log(8 * total / delta) + 1) / (2 * total)) for kl in client_kls]
    return {
        "empirical": empirical,
        "clients": loss_bound * math.sqrt(across / (2 * n)),
        "samples": loss_bound * sum(within) / len(within),
    }

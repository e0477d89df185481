"""IT-PFL (anonymous, 2021, sections 5 and 7, appendices A and D): theorem 5.1 and lemma 7.1.

Lemma 7.1, the sensitivity of a deep-set encoder, is :func:`sensitivity`, which the noise of itpfl
is made by: 2 L B / |D|, as appendix D proves it.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from hyperfed.errors import UserError, check_positive
from hyperfed.privacy import sensitivity
from hyperfed.theory.arguments import check_not_negative, check_probability

__all__ = [
    "clients_needed",
    "domain_error",
    "h_delta_h",
    "novel_error_bound",
    "samples_needed",
    "sensitivity",
]


def novel_error_bound(
    empirical: float,
    approximation: float,
    divergences: Sequence[float],
    joint_errors: Sequence[float] = (),
    estimation: float = 0.0,
) -> dict[str, float]:
    """Returns the terms of theorem 5.1's bound of a novel client's error.

    err_z(H) + epsilon + 1/2 mean of d_HDH(P, P_new) + mean of lambda. err(H) is the error of the
    best hypothesis in H for a client: what it can reach, not what is found for it.

    The theorem leaves out lambda = min_h err_P(h) + err_new(h), by the assumption of appendix A
    (where it is called "arg max") that some hypothesis is right for both clients. Two clients with
    the same inputs and other labels show that nothing holds without it. The integral is over the
    clients' distribution Q, of which the training clients are draws; "inf over h" of a distance
    that has no h in it says nothing.

    Args:
        empirical: err_z(H), the mean over training clients of the least error on their examples.
        approximation: epsilon, for which :func:`clients_needed` and :func:`samples_needed` hold.
        divergences: d_HDH of each training client and the novel one, in [0, 2], as
            :func:`h_delta_h` gives them.
        joint_errors: lambda of each training client and the novel one; 0 for all where not given.
        estimation: :func:`domain_error` where divergences are those of samples, else 0.

    Returns:
        {"empirical", "approximation", "shift", "joint", "estimation"}; the bound is their sum.

    Raises:
        UserError: a term is negative, there are no clients, or a divergence is above 2.
    """
    check_not_negative(empirical=empirical, approximation=approximation, estimation=estimation)
    check_not_negative(**{f"divergence_{i}": distance for i, distance in enumerate(divergences)})
    check_not_negative(**{f"joint_error_{i}": error for i, error in enumerate(joint_errors)})
    if not divergences or max(divergences) > 2 or len(joint_errors) not in {0, len(divergences)}:
        raise UserError(
            "divergences must be one in [0, 2] for each training client, and joint errors as many "
            f"or none, came {len(divergences)} up to {max(divergences, default=0):g} and "
            f"{len(joint_errors)} joint errors; give one for each"
        )
    count = len(divergences)
    return {
        "empirical": empirical,
        "approximation": approximation,
        "shift": sum(divergences) / count / 2,
        "joint": sum(joint_errors) / count,
        "estimation": estimation,
    }


def h_delta_h(predictions: Tensor, p: Tensor, q: Tensor) -> float:
    """Returns d_HDH(p, q) of finitely many hypotheses on finitely many inputs, in [0, 2].

    2 max over pairs of hypotheses of |Pr_p(they differ) - Pr_q(they differ)| (Ben-David et al., A
    theory of learning from different domains, 2010, section 4).

    Args:
        predictions: (hypotheses, inputs) of each hypothesis for each input.
        p: (inputs,) probabilities.
        q: (inputs,) probabilities.
    """
    differ = (predictions[:, None] != predictions).to(p.dtype)  # (H, H, inputs)
    return float(2 * (differ @ (p - q)).abs().max())


def domain_error(dimension: float, samples: int, delta: float) -> float:
    """Returns 4 sqrt((2 d log(2 m) + log(2 / delta)) / m), for a divergence of samples.

    Equation 6, from theorem 2 of Ben-David et al. (2010); "neglected" in theorem 5.1.

    Args:
        dimension: d, the VC dimension of H.
        samples: m, of each of the two clients.
        delta: probability that it is not enough.
    """
    check_positive(dimension=dimension, samples=samples)
    check_probability(delta=delta)
    return 4 * math.sqrt((2 * dimension * math.log(2 * samples) + math.log(2 / delta)) / samples)


def clients_needed(log_cover: float, epsilon: float, delta: float) -> float:
    """Returns n = 256 / epsilon^2 log(8 C / delta), before equation 5.

    The max with 64 / epsilon^2 that it has there never counts: log(8 / delta) is above 2. With as
    many clients and :func:`samples_needed` examples of each, err_Q(H) <= err_z(H) + epsilon
    for all H, with probability 1 - delta (Baxter, JAIR 2000, theorem 2).

    Args:
        log_cover: log C(epsilon / 32, H*), of the family of hypothesis spaces.
        epsilon: how near.
        delta: probability that it fails.
    """
    check_not_negative(log_cover=log_cover)
    check_positive(epsilon=epsilon)
    check_probability(delta=delta)
    return 256 * (log_cover + math.log(8 / delta)) / epsilon**2


def samples_needed(log_cover: float, epsilon: float, delta: float, clients: int) -> float:
    """Returns m = max(256 / (n epsilon^2) log(8 C / delta), 64 / epsilon^2), before equation 5.

    Args:
        log_cover: log C(epsilon / 32, H_l^n), of n losses from one hypothesis space.
        epsilon: as of :func:`clients_needed`.
        delta: the same.
        clients: n.
    """
    check_not_negative(log_cover=log_cover)
    check_positive(epsilon=epsilon, clients=clients)
    check_probability(delta=delta)
    return max(256 * (log_cover + math.log(8 / delta)) / clients, 64) / epsilon**2

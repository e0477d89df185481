"""pFedKT (Yi et al., 2023, section 5 and appendix E): theorems 5.1 and 5.2."""

import math
from dataclasses import dataclass

from hyperfed.errors import UserError, check_positive
from hyperfed.theory import pfedhn
from hyperfed.theory.arguments import check_not_negative, check_probability
from hyperfed.theory.pfedhn import Lipschitz


def samples_order(
    lipschitz: Lipschitz,
    *,
    embeddings: int,
    weights: int,
    epsilon: float,
    delta: float,
    constant: float = 1.0,
) -> float:
    """Returns theorem 5.1's M, examples of one client, up to the constant of its O(...).

    M = constant / epsilon^2 [(e + N) log(r L_omega L_phi / epsilon) + log(1 / delta)]: pFedHN's
    theorem 1 for a client alone. Equation 18 has losses of losses where it means losses of models.

    Args:
        lipschitz: r as radius, L_omega as that of the loss, L_phi as that in the weights.
        embeddings: e, numbers that the chunks' embeddings have. The paper writes "emb_dim", one
            embedding's length; a hypernetwork called once for each chunk learns one for each, so it
            is the length times the calls.
        weights: N, the rest of the hypernetwork.
        epsilon: how near empirical and expected loss are.
        delta: probability that they are not.
        constant: of the O(...), which the paper does not tell; :func:`samples_needed` has one.

    Raises:
        UserError: the logarithm is not positive: the order says nothing at these numbers.
    """
    check_not_negative(embeddings=embeddings)
    check_positive(weights=weights, epsilon=epsilon, constant=constant)
    check_probability(delta=delta)
    ratio = lipschitz.product / epsilon
    if ratio <= 1:
        raise UserError(
            "r L_omega L_phi must be above epsilon, which is what M is an order for; it is "
            f"{ratio:g} times that: choose a smaller epsilon"
        )
    return constant / epsilon**2 * ((embeddings + weights) * math.log(ratio) - math.log(delta))


def samples_needed(
    lipschitz: Lipschitz, *, embeddings: int, weights: int, epsilon: float, delta: float
) -> float:
    """Returns theorem 5.1's M with its constants, for a loss in [0, 1]: pFedHN's, for one client.

    M = 2 / epsilon^2 [(e + N) log(1 + 8 r L_omega L_phi / epsilon) + log(2 / delta)]; L_phi is that
    in weights and embeddings. Arguments as of :func:`samples_order`.
    """
    return pfedhn.samples_needed(
        lipschitz,
        embedding_size=embeddings,
        weights=weights,
        clients=1,
        epsilon=epsilon,
        delta=delta,
    )


@dataclass(frozen=True)
class FedAvgConstants:
    """The constants of Li et al. (On the convergence of FedAvg on non-IID data, ICLR 2020).

    Attributes:
        smoothness: L, of every client's loss.
        convexity: mu, by which every client's loss is strongly convex.
        local_steps: E.
        noise: B, of gradients, of different data and of local steps together (their theorem 1).
        sampling: C, of asking some clients only (their theorems 2 and 3); 0 where all take part.
    """

    smoothness: float
    convexity: float
    local_steps: int
    noise: float
    sampling: float

    def __post_init__(self) -> None:
        check_positive(smoothness=self.smoothness, convexity=self.convexity)
        check_positive(local_steps=self.local_steps)
        check_not_negative(noise=self.noise, sampling=self.sampling)
        if self.smoothness < self.convexity:
            raise UserError(
                f"smoothness must be at least convexity, came {self.smoothness} and "
                f"{self.convexity}; no loss has less curvature than it has at least"
            )

    @property
    def kappa(self) -> float:
        """L / mu."""
        return self.smoothness / self.convexity

    @property
    def gamma(self) -> float:
        """max(8 kappa, E)."""
        return max(8 * self.kappa, self.local_steps)


def loss_bound(
    constants: FedAvgConstants,
    rounds: int,
    *,
    weights_lipschitz: float,
    weights_norm: float,
    published: bool = False,
) -> dict[str, float]:
    """Returns the terms of theorem 5.2's bound of E f(omega_T) - f*, whose sum it is.

    2 kappa / (gamma + T) [(B + C) / mu + 2 L |omega_0 - omega*|^2], in which omega = h(v; phi).
    Lipschitz continuity gives |omega_0 - omega*| <= L_phi |phi_0 - phi*|, squared L_phi^2, and two
    points in a ball of radius sigma_4 are up to 2 sigma_4 apart: so 8 L L_phi^2 sigma_4^2 in the
    brackets. In print (equations 24 and 25) L_phi is not squared, and |phi_0 - phi*|^2 is replaced
    by sigma_4^2, which bounds |phi|^2: 2 L L_phi sigma_4^2. The bound in print fails
    already for one client with a quadratic loss, full gradients and L_phi > 1/4.

    Li et al. need a strongly convex loss of omega, and have 2 L in the brackets for gamma = 8
    kappa; with more local steps than that it is mu gamma / 4, which is taken here. Their T counts
    local steps; that of rounds, fewer, gives a weaker bound. They prove it of FedAvg on omega: that
    the private models of pFedKT behave as its omega is assumed.

    Args:
        constants: of FedAvg.
        rounds: T.
        weights_lipschitz: L_phi, of the private model in the hypernetwork's weights.
        weights_norm: sigma_4, a bound of |phi|.
        published: as it is printed.

    Returns:
        {"noise": that of B + C, "start": that of where training starts}.
    """
    check_not_negative(
        rounds=rounds, weights_lipschitz=weights_lipschitz, weights_norm=weights_norm
    )
    outside = 2 * constants.kappa / (constants.gamma + rounds)
    noise = (constants.noise + constants.sampling) / constants.convexity
    start = 2 * constants.smoothness * weights_lipschitz * weights_norm**2
    if not published:
        curvature = constants.convexity * constants.gamma / 4  # 2 L where gamma = 8 kappa
        start = curvature * (2 * weights_lipschitz * weights_norm) ** 2
    return {"noise": outside * noise, "start": outside * start}

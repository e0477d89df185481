"""Examples that bring a mean loss near its expectation, for all parameters in a ball at once.

pFedHN's theorem 1 and pFedKT's theorem 5.1 give such a number as O(...), by theorem 4 of Baxter (A
model of inductive bias learning, JAIR 2000). Their Lipschitz conditions hold for every example, so
it can be had with its constants from Hoeffding's inequality alone: take a net of parameters such
that moving to the nearest one changes no loss by more than epsilon / 4. The mean loss at one point
of the net is off by more than epsilon / 2 with a probability of 2 exp(-n m epsilon^2 / 2) at most,
at any of C points with C times that; everywhere else both losses are epsilon / 4 away from those at
a point of the net.
"""

import math

from hyperfed.errors import check_positive
from hyperfed.theory.arguments import check_not_negative, check_probability


def log_covering_number(dimension: float, radius: float, resolution: float) -> float:
    """Returns log C: balls that cover a Euclidean ball, C = (1 + 2 radius / resolution)^dimension.

    Args:
        dimension: of the space.
        radius: of the ball that is covered.
        resolution: radius of those that cover it.
    """
    check_not_negative(dimension=dimension, radius=radius)
    check_positive(resolution=resolution)
    return dimension * math.log1p(2 * radius / resolution)


def samples_needed(log_cover: float, epsilon: float, delta: float, clients: int = 1) -> float:
    """Returns 2 (log C + log(2 / delta)) / (n epsilon^2).

    With as many examples of each client, the mean of a loss in [0, 1] over all clients and examples
    is within epsilon of its expectation for all parameters, with probability 1 - delta.

    Args:
        log_cover: log C, of a net that keeps every loss within epsilon / 4.
        epsilon: how near.
        delta: probability that it fails.
        clients: n.
    """
    check_not_negative(log_cover=log_cover)
    check_positive(epsilon=epsilon, clients=clients)
    check_probability(delta=delta)
    return 2 * (log_cover + math.log(2 / delta)) / (clients * epsilon**2)

"""pFedHN (Shamsian et al., ICML 2021, section 4 and appendix A): proposition 1 and theorem 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperfed.errors import UserError, check_positive
from hyperfed.nets.hypernets import MultiHead, SingleOutput
from hyperfed.theory import covering
from hyperfed.theory.arguments import check_not_negative, check_probability

# Proposition 1


@dataclass(frozen=True)
class LinearHypernetwork:
    """theta_i = W v_i.

    Attributes:
        weight: W, (d, k), with orthonormal columns.
        embeddings: V, (k, n).
        loss: what is left of sum_i s_i |W v_i - theta_i|^2.
    """

    weight: Tensor
    embeddings: Tensor
    loss: float

    @property
    def models(self) -> Tensor:
        """(n, d) models that it makes: the local solutions, denoised."""
        return (self.weight @ self.embeddings).T


def linear_hypernetwork(
    solutions: Tensor, embedding_size: int, scale: Tensor | None = None
) -> LinearHypernetwork:
    """Returns the best linear hypernetwork for linear models with isometric data.

    Proposition 1: where X_i'X_i = I, sum_i |X_i W v_i - y_i|^2 is sum_i |W v_i - theta_i|^2 up to a
    constant, with theta_i = X_i'y_i the client's own solution. So W spans the k principal
    directions of the local solutions and v_i are theta_i's coefficients in them. "PCA" is one
    without centring, since W v_i has no offset: the singular value decomposition as it is.

    X_i'X_i = I leaves no place for more data at one client than at another. With X_i'X_i = s_i I
    (s_i examples with white inputs) the proof goes through with sum_i s_i |W v_i - theta_i|^2, the
    decomposition of sqrt(s_i) theta_i.

    Args:
        solutions: theta_i, (n, d), n clients' own solutions, or anything else to be compressed.
        embedding_size: k, at most d; W has fewer columns where there are fewer clients.
        scale: s_i, (n,), positive; 1 for all where not given.

    Raises:
        UserError: ``solutions`` are no matrix, or there are too many directions.
    """
    if solutions.ndim != 2:
        raise UserError(
            f"solutions must be (clients, parameters), came {tuple(solutions.shape)}; flatten each "
            "client's into a row"
        )
    if not 1 <= embedding_size <= solutions.shape[1]:
        raise UserError(
            f"embedding_size must be between 1 and the models' {solutions.shape[1]} parameters, "
            f"came {embedding_size}; choose another"
        )
    root = torch.ones_like(solutions[:, 0]) if scale is None else scale.sqrt()
    _, spread, directions = torch.linalg.svd(root[:, None] * solutions, full_matrices=False)
    weight = directions[:embedding_size].T
    left_over = spread[embedding_size:].square().sum()
    return LinearHypernetwork(weight, weight.T @ solutions.T, float(left_over))


def expected_error(truth: Tensor, weight: Tensor, variance: float) -> float:
    """Returns the mean over clients of E |W W' theta_i - theta*_i|^2.

    Proposition 1 as denoising (section 4.1): theta_i is theta*_i with noise N(0, variance I). In
    the k directions W the noise stays, k * variance; of the truth what lies beside them is lost.
    Training alone, W = I, costs d * variance. So k directions help where the clients' true models
    lie near a space of few dimensions, and no k is best for any data (:func:`best_rank`).

    The paper has sqrt(n_i) (theta_i - theta*_i) -> N(0, I) for n_i examples under X_i'X_i = I; but
    then the noise is N(0, sigma^2 I) whatever n_i is, sigma^2 being that of the labels. It is
    sigma^2 / n_i where X_i'X_i = n_i I.

    Args:
        truth: theta*_i, (n, d).
        weight: W, (d, k), with orthonormal columns that do not depend on the noise.
        variance: of each entry's noise.
    """
    check_not_negative(variance=variance)
    beside = truth - truth @ weight @ weight.T
    return float(beside.square().sum(dim=1).mean()) + weight.shape[1] * variance


def best_rank(truth: Tensor, variance: float) -> int:
    """Returns the k at which the principal directions of the truth have the least expected error.

    A direction is worth its noise where the true models' mean square along it exceeds ``variance``.

    Args:
        truth: theta*_i, (n, d).
        variance: of each entry's noise.
    """
    check_not_negative(variance=variance)
    mean_square = torch.linalg.svdvals(truth).square() / len(truth)
    return int((mean_square > variance).sum())


# Theorem 1


@dataclass(frozen=True)
class Lipschitz:
    """The conditions of theorem 1, which hold for weights and embeddings in balls of a radius.

    Attributes:
        radius: R, of the ball of hypernetwork weights, and of that of embeddings.
        loss: L, of an example's loss in the parameters of the model.
        weights: L_h, of the generated model in the hypernetwork's weights.
        embedding: L_V, of the generated model in the embedding.
    """

    radius: float
    loss: float
    weights: float
    embedding: float

    def __post_init__(self) -> None:
        check_positive(radius=self.radius, loss=self.loss)
        check_not_negative(weights=self.weights, embedding=self.embedding)
        check_positive(weights_and_embedding=self.weights + self.embedding)

    @property
    def product(self) -> float:
        """R L (L_h + L_V)."""
        return self.radius * self.loss * (self.weights + self.embedding)


def samples_order(
    lipschitz: Lipschitz,
    *,
    embedding_size: int,
    weights: int,
    clients: int,
    epsilon: float,
    delta: float,
    constant: float = 1.0,
    published: bool = False,
) -> float:
    """Returns theorem 1's M, examples of each client, up to the constant of its O(...).

    M = constant / epsilon^2 (k + N / n) log(R L (L_h + L_V) / (epsilon delta)). The logarithm lacks
    the epsilon in the theorem as it is printed; the paper's appendix A mends it.

    Args:
        lipschitz: the conditions.
        embedding_size: k.
        weights: N, of the hypernetwork.
        clients: n.
        epsilon: how near empirical and expected loss are.
        delta: probability that they are not.
        constant: of the O(...), which the paper does not tell; :func:`samples_needed` has one.
        published: as it is printed in section 4.2.

    Raises:
        UserError: the logarithm is not positive: the order says nothing at these numbers.
    """
    check_positive(embedding_size=embedding_size, weights=weights, clients=clients)
    check_positive(epsilon=epsilon, constant=constant)
    check_probability(delta=delta)
    least, smaller = (delta, "delta") if published else (epsilon * delta, "epsilon or delta")
    ratio = lipschitz.product / least
    if ratio <= 1:
        raise UserError(
            f"R L (L_h + L_V) must be above {least:g}, which is what M is an order for; it is "
            f"{ratio:g} times that: choose a smaller {smaller}"
        )
    return constant / epsilon**2 * (embedding_size + weights / clients) * math.log(ratio)


def samples_needed(
    lipschitz: Lipschitz,
    *,
    embedding_size: int,
    weights: int,
    clients: int,
    epsilon: float,
    delta: float,
) -> float:
    """Returns theorem 1's M with its constants, for a loss in [0, 1].

    M = 2 / epsilon^2 [(k + N / n) log(1 + 8 R L (L_h + L_V) / epsilon) + log(2 / delta) / n]: the
    appendix's net, of resolution epsilon / (4 L (L_h + L_V)), in :mod:`hyperfed.theory.covering`.
    The embeddings' part does not fall with the number of clients, the hypernetwork's does.
    """
    check_positive(embedding_size=embedding_size, weights=weights, clients=clients, epsilon=epsilon)
    resolution = epsilon * lipschitz.radius / (4 * lipschitz.product)
    dimension = weights + clients * embedding_size
    log_cover = covering.log_covering_number(dimension, lipschitz.radius, resolution)
    return covering.samples_needed(log_cover, epsilon, delta, clients)


def lipschitz_in_embedding(norms: Sequence[float]) -> float:
    """Returns L_V of a fully connected network with ReLUs: the product of its layers' norms.

    Args:
        norms: a bound of each layer's spectral norm, as of :func:`spectral_norms`.
    """
    check_not_negative(**{f"norm_{number}": norm for number, norm in enumerate(norms)})
    return math.prod(norms)


def lipschitz_in_weights(
    norms: Sequence[float], biases: Sequence[float], embedding: float
) -> float:
    """Returns L_h of a fully connected network with ReLUs, in all its weights and biases.

    With a_0 = |v| and a_j = s_j a_(j-1) + b_j, moving layer j by (dW, db) moves the output by at
    most s_J ... s_(j+1) sqrt(a_(j-1)^2 + 1) |(dW, db)|; L_h^2 is the sum of those squared.

    Args:
        norms: s_j, a bound of each layer's spectral norm, first to last.
        biases: b_j, a bound of each layer's bias's norm.
        embedding: |v|, a bound of the embedding's norm.
    """
    check_not_negative(embedding=embedding)
    check_not_negative(**{f"bias_{number}": bias for number, bias in enumerate(biases)})
    total, activation = 0.0, embedding
    for number, (norm, bias) in enumerate(zip(norms, biases, strict=True)):
        total += lipschitz_in_embedding(norms[number + 1 :]) ** 2 * (activation**2 + 1)
        activation = norm * activation + bias
    return math.sqrt(total)


def spectral_norms(
    hyper_net: MultiHead | SingleOutput, size: str = "base"
) -> tuple[list[float], list[float]]:
    """Returns the spectral norm of each layer of a hypernetwork, and the norm of each bias.

    All heads of a target size are one layer: their outputs are one model. Of a weight that is
    spectrally normalised it is the norm of what the layer computes with; where a layer has no bias
    that is 0. What these norms are at some weights is a bound there alone; theorem 1 needs one for
    all weights in its ball.
    """
    if isinstance(hyper_net, MultiHead):
        last = [module for key, module in hyper_net.heads.items() if key.startswith(f"{size}/")]
    else:
        last = [hyper_net.outputs[size]]
    norms, biases = [], []
    for modules in [*([module] for module in hyper_net.trunk), last]:
        parts = [part for part in modules if isinstance(part, nn.Linear)]
        if parts:
            weight = torch.cat([part.weight.detach() for part in parts])
            bias = [state["bias"] for state in map(nn.Module.state_dict, parts) if "bias" in state]
            norms.append(float(torch.linalg.matrix_norm(weight, 2)))
            biases.append(float(torch.cat(bias).norm()) if bias else 0.0)
    return norms, biases

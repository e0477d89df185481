"""How a data set's classes are shared out to clients.

A share is the fraction of all examples of a class that a client gets. Every function here draws
the shares of all clients at once, as a float64 array (clients, classes) whose columns sum to at
most one; what is left of a class is not used. :mod:`hyperfed.data.partitions` applies them.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from hyperfed.errors import UserError

Shares = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def class_shares(
    clients: int,
    classes: int,
    per_client: int,
    rng: np.random.Generator,
    *,
    variant: Literal["paper", "official"] = "paper",
    low: float = 0.4,
    high: float = 0.6,
) -> Shares:
    """Gives each client a few classes and an uneven share of each (pFedHN, section 5.1).

    ``paper``: every client gets ``per_client`` distinct classes, classes are used equally often
    (to within one), and the holders of a class draw U(low, high) and share it in proportion, to
    the last example.

    ``official``, as the authors' code does: every class has s = per_client * clients // classes + 1
    slots, which draw U(low, high) and share the class in proportion. Clients in turn, for each of
    their classes, choose uniformly among those with most slots left and take one slot. The last
    slots stay unused: 1/s of the data where the division is even, 1/11 for 50 clients with 2 of 10
    classes. Where ``per_client`` does not divide ``classes``, a client may draw a class twice: its
    shares add up and it holds fewer classes.

    Raises:
        UserError: more classes per client than there are, or ``low`` and ``high`` out of order.
    """
    _check_per_client(per_client, classes)
    if not 0 < low <= high:
        raise UserError(f"low and high must satisfy 0 < low <= high, got {low} and {high}")
    if variant == "official":
        slots = per_client * clients // classes + 1
        drawn = rng.uniform(low, high, (slots, classes))
        return _take_slots(drawn / drawn.sum(axis=0), clients, per_client, rng)
    held = np.zeros((clients, classes), dtype=bool)
    used = np.zeros(classes, dtype=np.int64)
    for client in range(clients):
        least_used = np.lexsort((rng.random(classes), used))[:per_client]  # ties at random
        held[client, least_used] = True
        used[least_used] += 1
    return _columns_to_one(held * rng.uniform(low, high, held.shape))


def _take_slots(slots: Shares, clients: int, per_client: int, rng: np.random.Generator) -> Shares:
    """Lets clients in turn take slots, (slots, classes), of the classes with most left."""
    left = np.full(slots.shape[1], len(slots))
    shares = np.zeros((clients, slots.shape[1]))
    for client in range(clients):
        for _ in range(per_client):
            chosen = rng.choice(np.flatnonzero(left == left.max()))
            left[chosen] -= 1
            shares[client, chosen] += slots[left[chosen], chosen]
    return shares


def dirichlet_per_client(
    clients: int, classes: int, alpha: float | npt.ArrayLike, rng: np.random.Generator
) -> Shares:
    """Draws each client's class proportions from Dir(alpha), then shares each class by them.

    pFedHN, section 5.3: p_i ~ Dir(alpha) over classes, then scaled so that each class is used up,
    sum_i p_ij = 1. Sizes of clients differ. (PeFLL's text, section 5.1, has no such scaling, but
    its authors' code does; :func:`dirichlet_equal` scales within the client.)

    Args:
        clients: number of clients.
        classes: number of classes.
        alpha: concentration, or one for each client (novel clients may differ). The scaling is over
            all clients, whatever their alpha.
        rng: source of the draws.

    Raises:
        UserError: an alpha is not positive, or their number is not that of the clients.
    """
    logarithms = _log_dirichlet(_alphas(alpha, clients), classes, rng)
    logarithms -= logarithms.max(axis=0)
    return _columns_to_one(np.exp(logarithms))


def dirichlet_equal(
    clients: int,
    classes: int,
    alpha: float | npt.ArrayLike,
    rng: np.random.Generator,
    sizes: npt.ArrayLike,
) -> Shares:
    """Gives clients equally many examples, classes by a draw from Dir(alpha) for each client.

    Hsu et al. (2019), IT-PFL-HN section 6.3: q_i ~ Dir(alpha), and client i takes examples by q_i
    until it has as many as every other. An example is taken once: where a class runs out, q_i is
    scaled to the classes that are left. Clients take in random order, not in that of their numbers,
    so that novel clients (the last numbers) do not have to take what is left.

    Amounts are the expected ones of that procedure in whole examples of ``sizes``: equal exactly
    for the examples that ``sizes`` counts, to rounding for other splits.

    Args:
        clients: number of clients.
        classes: number of classes.
        alpha: concentration, or one for each client.
        rng: source of the draws.
        sizes: (classes,) training examples of each class. What is left after dividing their sum by
            ``clients`` is not used.

    Raises:
        UserError: an alpha is not positive, or their number is not that of the clients.
    """
    mixes = _log_dirichlet(_alphas(alpha, clients), classes, rng)
    available = np.asarray(sizes, dtype=np.float64)
    left, amount = available.copy(), available.sum() // clients
    taken = np.zeros((clients, classes))
    for client in rng.permutation(clients):
        taken[client] = to_whole(_take(mixes[client], left, amount))
        left -= taken[client]
    return np.asarray(taken / np.maximum(available, 1))


def _take(log_weights: Shares, left: Shares, amount: float) -> Shares:
    """Takes ``amount``, at most ``sum(left)``, by weight: min(left, c weights), for some c."""
    taken = np.zeros_like(left)
    while (open_ := taken < left).any():
        # Scaled in logarithms: all that is left may have a weight that underflows to zero.
        weights = np.exp(np.where(open_, log_weights - log_weights[open_].max(), -np.inf))
        wanted = taken + (amount - taken.sum()) * weights / weights.sum()
        taken = np.minimum(wanted, left)
        if (wanted <= left).all():
            break
    return taken


def to_whole(amounts: Shares) -> Shares:
    """Rounds to whole numbers of the same sum, which is whole: the largest remainders go up."""
    whole = np.floor(amounts)
    missing = round(float((amounts - whole).sum()))
    whole[np.argsort(whole - amounts, kind="stable")[:missing]] += 1
    return whole


def dirichlet_per_class(
    clients: int, classes: int, alpha: float, rng: np.random.Generator
) -> Shares:
    """Splits each class over the clients by one draw from Dir(alpha) (Yurochkin et al., ICML 2019).

    Raises:
        UserError: alpha is not positive.
    """
    return np.exp(_log_dirichlet(_alphas(alpha, classes), clients, rng)).T


def equal_classes(
    clients: int,
    classes: int,
    per_client: int,
    rng: np.random.Generator,
    sizes: npt.ArrayLike | None = None,
) -> Shares:
    """Gives each client random classes and the same amount of each (pFedLA, section 4.1, case 1).

    Classes are drawn independently for each client, so some are held by more clients than others;
    the most contended one sets the amount for all, and the rest of the others is not used.

    Args:
        clients: number of clients.
        classes: number of classes.
        per_client: classes to a client.
        rng: source of the draws.
        sizes: (classes,) training examples of each class, for equal amounts; equal where None.

    Raises:
        UserError: more classes per client than there are.
    """
    _check_per_client(per_client, classes)
    held = _random_classes(clients, classes, per_client, rng)
    return _largest_fit(held.astype(np.float64), sizes)


def chosen_classes(
    sets: Sequence[Sequence[int]], classes: int, sizes: npt.ArrayLike | None = None
) -> Shares:
    """Gives each client the classes that are named, and the same amount of each.

    So are the clients of pFedLA, section 4.3: two with the same four classes and one with three of
    these, or a chain in which neighbours share three of four. The most contended class sets the
    amount for all, as in :func:`equal_classes`.

    Args:
        sets: the classes of each client.
        classes: number of classes.
        sizes: (classes,) training examples of each class; equal where None.

    Raises:
        UserError: a client without a class, or a class that there is not.
    """
    named = {label for own in sets for label in own}
    if not all(sets) or not named <= set(range(classes)):
        raise UserError(
            f"class_sets must give each client classes of 0..{classes - 1}, got "
            f"{[list(own) for own in sets]}; correct them"
        )
    held = np.array([[label in own for label in range(classes)] for own in sets])
    return _largest_fit(held.astype(np.float64), sizes)


def majority(
    clients: int,
    classes: int,
    per_client: int,
    rng: np.random.Generator,
    *,
    ratio: float,
    sizes: npt.ArrayLike | None = None,
) -> Shares:
    """Gives each client all classes, and more of some random ones (pFedLA, section 4.1, case 2).

    Args:
        clients: number of clients.
        classes: number of classes.
        per_client: majority classes to a client.
        rng: source of the draws.
        ratio: examples of a majority class to one of another; the paper does not give it.
        sizes: (classes,) training examples of each class; equal where None.

    Raises:
        UserError: more majority classes than there are, or a ratio below one.
    """
    _check_per_client(per_client, classes)
    if ratio < 1:
        raise UserError(f"the majority ratio must be at least 1, got {ratio}; raise it")
    held = _random_classes(clients, classes, per_client, rng)
    return _largest_fit(np.where(held, ratio, 1.0), sizes)


def coarse_classes(clients: int, coarse: Integers, rng: np.random.Generator) -> Shares:
    """Gives each client one coarse class, shared equally by its holders (pFedHN, section 5.5).

    Clients are dealt to coarse classes at random, equally many to each (to within one): CIFAR-100's
    20 over 100 clients have five each, and each of those a fifth of its five fine classes.

    Args:
        clients: number of clients.
        coarse: (classes,) coarse class of each class, from 0; -1 for a class that nobody gets.
        rng: deals the coarse classes.
    """
    groups = rng.permutation(np.unique(coarse[coarse >= 0]))
    dealt = groups[rng.permutation(clients) % len(groups)]  # (clients,)
    return _columns_to_one((dealt[:, None] == coarse).astype(np.float64))


def shards(
    clients: int, classes: int, per_client: int, labels: Integers, rng: np.random.Generator
) -> Shares:
    """Sorts by label, cuts equal shards and deals them out (McMahan et al., AISTATS 2017).

    Args:
        clients: number of clients.
        classes: number of classes.
        per_client: shards to a client.
        labels: (m,) training labels. The shares follow from them and serve the other splits too.
        rng: deals the shards.

    Raises:
        UserError: more shards than examples.
    """
    count = clients * per_client
    if count > len(labels):
        raise UserError(
            f"shards must hold at least one example each, got {count} shards ({clients} clients x "
            f"{per_client}) of {len(labels)} examples; ask for fewer clients or shards"
        )
    class_ends = np.cumsum(np.bincount(labels, minlength=classes))
    class_sizes = np.diff(class_ends, prepend=0)
    shard_ends = np.rint(np.arange(1, count + 1) * len(labels) / count).astype(np.int64)
    shard_begins = np.concatenate([[0], shard_ends[:-1]])
    overlap = np.minimum(shard_ends[:, None], class_ends) - np.maximum(
        shard_begins[:, None], class_ends - class_sizes
    )  # (shards, classes)
    of_class = overlap.clip(min=0) / np.maximum(class_sizes, 1)
    dealt = rng.permutation(count).reshape(clients, per_client)
    return np.asarray(of_class[dealt].sum(axis=1))


def _columns_to_one(weights: Shares) -> Shares:
    """Scales columns to sum one; a class that nobody holds stays at zero."""
    totals = weights.sum(axis=0)
    return weights / np.where(totals > 0, totals, 1.0)


def _random_classes(
    clients: int, classes: int, per_client: int, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Draws ``per_client`` distinct classes for each client, independently: (clients, classes)."""
    chosen = rng.random((clients, classes)).argsort(axis=1)[:, :per_client]
    held = np.zeros((clients, classes), dtype=bool)
    np.put_along_axis(held, chosen, True, axis=1)
    return held


def _largest_fit(weights: Shares, sizes: npt.ArrayLike | None) -> Shares:
    """Scales relative amounts (clients, classes) to the largest that every class can meet."""
    available = np.ones(weights.shape[1]) if sizes is None else np.asarray(sizes, np.float64)
    wanted = weights.sum(axis=0)
    contended = (wanted > 0) & (available > 0)
    if not contended.any():  # nobody's classes have an example
        return np.zeros_like(weights)
    unit = (available[contended] / wanted[contended]).min()
    return np.asarray(weights * unit * contended / np.where(contended, available, 1.0))


def _alphas(alpha: float | npt.ArrayLike, count: int) -> Shares:
    alphas = np.asarray(alpha, dtype=np.float64)
    if alphas.ndim and alphas.shape != (count,):
        raise UserError(
            f"alpha must be one number or one for each of {count} clients, got shape {alphas.shape}"
        )
    if not (np.isfinite(alphas) & (alphas > 0)).all():
        raise UserError(
            f"alpha must be positive and finite, got {alphas.min():g} to {alphas.max():g}; try 0.1"
        )
    return np.broadcast_to(alphas, (count,))


def _log_dirichlet(alphas: Shares, size: int, rng: np.random.Generator) -> Shares:
    """Draws one Dirichlet vector for each alpha, as logarithms (len(alphas), size).

    Gamma(a) = Gamma(a + 1) U^(1/a): in logarithms a small alpha does not underflow to an empty row.
    """
    shape = (len(alphas), size)
    column = alphas[:, None]
    gamma = np.log(rng.standard_gamma(column + 1, shape)) + np.log1p(-rng.random(shape)) / column
    peak = gamma.max(axis=1, keepdims=True)
    return np.asarray(gamma - peak - np.log(np.exp(gamma - peak).sum(axis=1, keepdims=True)))


def _check_per_client(per_client: int, classes: int) -> None:
    if not 1 <= per_client <= classes:
        raise UserError(f"classes per client must lie in 1..{classes}, got {per_client}; change it")

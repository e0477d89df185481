"""Who holds what: a data set divided over clients.

A division over classes is drawn **once**, as shares (:mod:`hyperfed.data.shares`), and applied to
the training, validation and test examples alike, so a client is tested on the classes it trained
on, in the same proportions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hyperfed.data.examples import hash_of
from hyperfed.data.shares import Integers, Shares, to_whole
from hyperfed.errors import UserError
from hyperfed.system.randomness import derive

TRAIN, VAL, TEST, UNUSED = 0, 1, 2, -1
"""What an example is for."""

HELD_OUT = 0.15
"""Fraction of each client's examples for validation, and for testing, where nothing says it."""

TOLERANCE = 1e-9
"""How far shares of a class may exceed one in sum, from rounding."""


def _owners(shares: Shares, labels: Integers, rng: np.random.Generator) -> Integers:
    """Hands out the examples of one split: each class shuffled and cut at the cumulative shares.

    Cuts are rounded cumulatively: every amount is within one example of its share, no example goes
    to two clients, and a class whose shares sum to one is used up exactly.

    Returns:
        (m,) the client of each example; -1 where nobody holds it.
    """
    clients, classes = shares.shape
    totals = shares.sum(axis=0)
    if not np.isfinite(shares).all() or shares.min() < 0 or totals.max() > 1 + TOLERANCE:
        raise UserError(
            "shares must be 0 or more and sum to at most 1 for each class, got a smallest share of "
            f"{shares.min():g} and a largest sum of {totals.max():g}; divide each column by its sum"
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(
            f"labels must lie in 0..{classes - 1}, the columns of shares, got "
            f"{labels.min()}..{labels.max()}; draw shares for all classes"
        )
    counts = np.bincount(labels, minlength=classes)
    cuts = np.rint(np.cumsum(shares, axis=0) * counts).astype(np.int64).clip(max=counts)
    amounts = np.diff(cuts, axis=0, prepend=0, append=counts[None])  # last row: for nobody
    client_or_nobody = np.append(np.arange(clients), -1)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(client_or_nobody, classes), amounts.T.ravel())
    return owner


def hold_out(
    groups: Integers,
    rng: np.random.Generator,
    *,
    val: float | int,
    test: float | None,
    held_out: npt.NDArray[np.bool_] | None = None,
    overlaps: Integers | None = None,
) -> Integers:
    """Decides what each example is for, in the same fractions within each group.

    Texts are cut into examples that share most of what they say with their neighbours. Of such the
    last ones of each group are tested on, those before validated on, and the few before either that
    share text with it are not used, as LEAF divides them (Caldas et al. 2018).

    Args:
        groups: (N,) what to keep the fractions within: labels, or clients.
        rng: decides which examples, where they share nothing.
        val: fraction for validation: of all examples, or of those not in ``held_out``. A whole
            number is that many of them, shared out to the groups in proportion.
        test: fraction for testing; None to test on ``held_out``.
        held_out: (N,) the data set's own test split.
        overlaps: (N,) how many of those after it in its group an example shares text with, none
            across ``held_out``; None where examples share nothing.

    Returns:
        (N,) of TRAIN, VAL, TEST and UNUSED. Counts are rounded within each group.

    Raises:
        UserError: none are held out to test on, or a number for validation leaves none to train on.
    """
    part = np.full(len(groups), TRAIN)
    free = np.arange(len(groups))
    if test is None:
        if held_out is None:
            raise UserError("test must be a fraction where no examples are held out, got None")
        part[held_out] = TEST
        free = free[~held_out]
    within = groups[free]
    size = np.bincount(within)
    amounts = {TEST: np.rint((test or 0.0) * size), VAL: _amounts(val, size)}
    if overlaps is not None:
        part[free] = _from_the_end(within, amounts, overlaps[free])
        return part
    rank = _ranked(within, rng)[0]
    first_val = amounts[TEST][within]
    first_train = first_val + amounts[VAL][within]
    part[free] = np.select([rank < first_val, rank < first_train], [TEST, VAL], TRAIN)
    return part


def _from_the_end(groups: Integers, amounts: Mapping[int, Shares], overlaps: Integers) -> Integers:
    """Takes from the end of each group so many for each purpose, and what overlaps with them."""
    place, size = places(groups)
    end: Shares = size.astype(np.float64)
    part = np.full(len(groups), TRAIN)
    for purpose, amount in amounts.items():
        first = (end - amount)[groups]
        part[(part == TRAIN) & (place >= first)] = purpose
        spoilt = (part == TRAIN) & (place + overlaps >= first) & (amount > 0)[groups]
        part[spoilt] = UNUSED
        end = end - amount - np.bincount(groups[spoilt], minlength=len(end))
    return part


UNTESTED = (
    "test must be above 0, so that models are tested, got 0; to train on all examples of your own "
    "data, say so of each in split"
)


def too_few_to_test(groups: Integers, test: float) -> str:
    """Returns what is wrong where groups are so small that a fraction of each comes to nothing.

    Args:
        groups: (N,) the group of each example.
        test: the fraction.
    """
    return (
        "there must be examples to test with, but of those of a client or class, "
        f"{int(np.bincount(groups).max())} at most, a fraction of {test} is none; give more, or "
        "raise test"
    )


def _amounts(val: float | int, size: Integers) -> Shares:
    """Returns how many of each group a fraction, or a number of all groups together, comes to."""
    if isinstance(val, float | np.floating):
        return np.asarray(np.rint(val * size))
    if val >= size.sum():
        raise UserError(
            f"val must leave examples to train on, got {val} of {size.sum()}; give a fraction"
        )
    return to_whole(val * size / size.sum())


def thin(part: Integers, groups: Integers, fraction: float, rng: np.random.Generator) -> Integers:
    """Leaves a fraction of each group's training, validation and test examples in use.

    At least one of each is left where there was one. With the same ``rng``, what a smaller fraction
    leaves is among what a larger one leaves.

    Args:
        part: (N,) what each example is for, as :func:`hold_out` decides.
        groups: (N,) labels, or clients.
        fraction: in (0, 1].
        rng: decides which examples.

    Returns:
        ``part`` with UNUSED for the others. Counts are rounded within each group.
    """
    used = np.flatnonzero(part != UNUSED)
    sides = (groups * 3 + part)[used]
    rank, size = _ranked(sides, rng)
    kept = used[rank < np.rint(fraction * size).clip(min=1)[sides]]
    thinned = np.full(len(part), UNUSED)
    thinned[kept] = part[kept]
    return thinned


def _ranked(groups: Integers, rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Shuffles each group: the place of each example in its own, (N,), and the groups' sizes."""
    return places(groups, rng.permutation(len(groups)))


def places(groups: Integers, order: Integers | None = None) -> tuple[Integers, Integers]:
    """Counts within each group: the place of each example in its own, (N,), and the groups' sizes.

    Args:
        groups: (N,) from 0.
        order: (N,) of the examples; None as they come.
    """
    order = np.arange(len(groups)) if order is None else order
    order = order[np.argsort(groups[order], kind="stable")]
    size = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(size) - size, size)
    return rank, size


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds what.

    Attributes:
        train: for each client int64 indices of its training examples, ascending.
        val: the same for validation.
        test: the same for testing.
    """

    train: tuple[Tensor, ...]
    val: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    @property
    def fingerprint(self) -> str:
        """A hash of who holds what."""
        splits = (self.train, self.val, self.test)
        sizes = torch.tensor([[index.numel() for index in split] for split in splits])
        return hash_of(sizes, *(torch.cat(split) for split in splits))


def by_shares(
    shares: Shares, labels: Integers, part: Integers, rng: np.random.Generator
) -> Partition:
    """Applies the same shares to training, validation and test examples.

    Args:
        shares: (clients, classes) fractions.
        labels: (N,) labels of all examples.
        part: (N,) TRAIN, VAL, TEST or UNUSED, as :func:`hold_out` and :func:`thin` decide.
        rng: decides which examples of a class a client gets.

    Raises:
        UserError: more clients than training examples, a client is left without any, or shares do
            not fit.
    """
    owner = np.full(len(labels), -1)
    for split in (TRAIN, VAL, TEST):
        rows = np.flatnonzero(part == split)
        owner[rows] = _owners(shares, labels[rows], rng)
    return by_client(owner, part, clients=shares.shape[0])


def shuffled(part: Integers, rng: np.random.Generator, *, clients: int) -> Partition:
    """Deals everything out in random order, equally much to each (IID of McMahan et al. 2017).

    Clients have equally many training, validation and test examples, each to within one.

    Args:
        part: (N,) TRAIN, VAL, TEST or UNUSED.
        rng: decides which examples a client gets.
        clients: number of clients.

    Raises:
        UserError: more clients than training examples.
    """
    return iid(np.zeros_like(part), part, rng, clients=clients)


def iid(labels: Integers, part: Integers, rng: np.random.Generator, *, clients: int) -> Partition:
    """Deals out each class evenly, one after the other, to each client in its turn.

    Clients have equally many training, validation and test examples, and of each class as well,
    each to within one.

    Args:
        labels: (N,) labels of all examples.
        part: (N,) TRAIN, VAL, TEST or UNUSED.
        rng: decides which examples a client gets.
        clients: number of clients.

    Raises:
        UserError: more clients than training examples.
    """
    owner = np.full(len(part), -1)
    for split in (TRAIN, VAL, TEST):
        rows = rng.permutation(np.flatnonzero(part == split))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        owner[rows] = np.arange(len(rows)) % clients
    return by_client(owner, part, clients=clients)


def keep_few(partition: Partition, count: int, seed: int) -> Partition:
    """Leaves each client some of its training examples, drawn at random; all where it has fewer.

    Which they are is a function of seed and client; those of a smaller count are among those of a
    larger one.

    Args:
        partition: who holds what.
        count: training examples that a client keeps.
        seed: of the draw.
    """
    train = []
    for client, own in enumerate(partition.train):
        kept = random_source(seed, f"few {client}").permutation(len(own))[:count]
        train.append(own[np.sort(kept)])
    return replace(partition, train=tuple(train))


def by_client(owner: Integers, part: Integers, *, clients: int) -> Partition:
    """Groups examples whose clients are known.

    Args:
        owner: (N,) client of each example; -1 where nobody holds it.
        part: (N,) TRAIN, VAL, TEST or UNUSED.
        clients: number of clients.

    Raises:
        UserError: more clients than training examples, or a client without any.
    """
    training = int((part == TRAIN).sum())
    if clients > training:
        raise UserError(
            f"each client must have a training example, got {clients} clients and {training} "
            "training examples; ask for fewer clients"
        )
    train, val, test = (
        _grouped(np.where(part == split, owner, -1), clients) for split in (TRAIN, VAL, TEST)
    )
    _check_everyone_trains(train)
    return Partition(train, val, test)


def _check_everyone_trains(train: Sequence[Tensor]) -> None:
    empty = [str(client) for client, index in enumerate(train) if not index.numel()]
    if empty:
        listed = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        raise UserError(
            f"each client must have a training example, got none for {len(empty)} of {len(train)} "
            f"clients ({listed}); use fewer clients, more classes per client, a larger alpha or "
            "smaller validation and test fractions, or leave these clients out"
        )


def deal_sizes(names: Sequence[str], clients: int, seed: int) -> tuple[str, ...]:
    """Deals model sizes out to equal groups of clients (to within one), drawn at random.

    Returns:
        For each client a size's name.
    """
    dealt = random_source(seed, "sizes").permutation(clients) % len(names)
    return tuple(names[index] for index in dealt)


def is_number(value: Any) -> bool:
    """Whether a value that a user gave is a number, which it is said to be."""
    return isinstance(value, Real)


def is_number_or_fraction(novel: Any) -> bool:
    """Whether it says how many clients join after training: a whole number, or below 1."""
    if not is_number(novel):
        return False
    return 0 <= novel < 1 or (novel >= 1 and not isinstance(novel, float | np.floating))


def novel_number(novel: float, clients: int) -> int:
    """Returns how many of ``clients`` join after training; a fraction below 1 is rounded."""
    return round(novel * clients) if novel < 1 else int(novel)


def random_source(seed: int, purpose: str) -> np.random.Generator:
    """Returns the generator of one of a division's draws: a function of seed and purpose."""
    return np.random.default_rng(derive(seed, "partition", purpose))


def _grouped(owner: Integers, clients: int) -> tuple[Tensor, ...]:
    """Lists, for each client, where ``owner`` names it; ascending."""
    order = np.argsort(owner, kind="stable")
    edges = np.searchsorted(owner[order], np.arange(clients + 1))
    held = torch.from_numpy(order[edges[0] : edges[-1]].astype(np.int64))
    # Copies, since whoever sends a view to another process sends all that it is a view of.
    return tuple(part.clone() for part in held.split_with_sizes(np.diff(edges).tolist()))

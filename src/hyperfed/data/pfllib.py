"""PFLlib's dealing (Zhang et al., JMLR 2025): the clients of its public table, example by example.

Code: https://github.com/TsingZ0/PFLlib, ``dataset/utils/dataset_utils.py``; table:
http://www.pfllib.com/benchmark.html. The official training and test splits are joined, dealt to the
clients, and each client's examples are cut into 75 % for training and 25 % for testing, whatever
their labels. Every draw comes from NumPy's first generator with seed 1, in the order in which that
code draws: of each run the same, whatever its seed. Clients hold here what they hold there where a
copy of the data has the official splits in their own order. A copy whose split was drawn anew, as
that of Fashion-MNIST in the records of ``experiments/pfllib``, is dealt in the same way, but not
the same examples. Newer PFLlib lets a client have a single example (``least_samples = 1``) and so
deals otherwise where clients are many, such as 100.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from hyperfed.data.partitions import TEST, TRAIN, UNUSED
from hyperfed.data.shares import Integers
from hyperfed.errors import UserError

Dealing = Literal["pathological", "dirichlet"]

SEED = 1
"""What its scripts begin with."""

TRAIN_SHARE = 0.75
"""Of a client's examples."""

BATCH = 10
"""Examples of which a client shall have a batch to be tested on."""

TRIES = 1000
"""Dirichlet draws before we give up; PFLlib never does."""


def deal(
    labels: Integers, clients: int, dealing: Dealing, *, classes_per_client: int, alpha: float
) -> tuple[Integers, Integers]:
    """Deals examples out as PFLlib does, unbalanced.

    Args:
        labels: (N,) of all examples, those of the training split first.
        clients: their number.
        dealing: ``pathological`` ("pat" there) or ``dirichlet`` ("dir").
        classes_per_client: of the pathological form.
        alpha: concentration of the Dirichlet form.

    Returns:
        (N,) the client of each example, -1 where nobody holds it; and (N,) TRAIN, TEST or UNUSED.

    Raises:
        UserError: too few examples for so many clients, or classes so uneven that a client stays
            without.
    """
    rng = np.random.RandomState(SEED)
    least = int(min(BATCH / (1 - TRAIN_SHARE), len(labels) / clients / 2))
    of_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    if dealing == "pathological":
        held = _pathological(of_class, clients, classes_per_client, least, rng)
    else:
        held = _dirichlet(of_class, clients, alpha, least, rng)
    return _cut(held, len(labels), rng)


def _pathological(
    of_class: Sequence[Integers],
    clients: int,
    classes_per_client: int,
    least: int,
    rng: np.random.RandomState,
) -> list[Integers]:
    """Deals each class, in order, to the first clients that still want one, in uneven runs.

    So clients come in groups that hold the same classes. The last of a group takes what is left.
    """
    held: list[list[Integers]] = [[] for _ in range(clients)]
    at_once = math.ceil(clients / len(of_class) * classes_per_client)
    for rows in of_class:
        takers = [own for own in held if len(own) < classes_per_client][:at_once]
        if not takers:
            break
        most = len(rows) / len(takers)
        low, high = int(max(most / 10, least / len(of_class))), int(most)
        if low >= high:
            raise UserError(
                f"PFLlib's dealing needs more than {low} examples of a class for each of its "
                f"clients, got {len(rows)} for {len(takers)}; use fewer clients or classes per "
                "client"
            )
        cuts = np.cumsum(rng.randint(low, high, len(takers) - 1))
        for own, part in zip(takers, np.split(rows, cuts), strict=True):
            own.append(part)
    return [_joined(own) for own in held]


def _dirichlet(
    of_class: Sequence[Integers],
    clients: int,
    alpha: float,
    least: int,
    rng: np.random.RandomState,
) -> list[Integers]:
    """Cuts each class by a Dirichlet draw, of which a client with its fair share gets nothing more.

    Drawn again, all of it, until each client has ``least`` examples.
    """
    fair = sum(map(len, of_class)) / clients
    for _ in range(TRIES):
        held: list[list[Integers]] = [[] for _ in range(clients)]
        size = np.zeros(clients, dtype=np.int64)
        for ordered in of_class:
            rows = rng.permutation(ordered)
            wanted = rng.dirichlet(np.full(clients, alpha)) * (size < fair)
            if not wanted.sum() > 0:
                break  # nobody with room was drawn: a draw that has failed
            cuts = (np.cumsum(wanted / wanted.sum()) * len(rows)).astype(np.int64)[:-1]
            for own, part in zip(held, np.split(rows, cuts), strict=True):
                own.append(part)
            size = np.array([sum(map(len, own)) for own in held])
        else:
            if size.min() >= least:
                return [_joined(own) for own in held]
    raise UserError(
        f"each client must get {least} examples in PFLlib's dealing, but in {TRIES} draws some had "
        f"fewer, got {clients} clients and alpha={alpha:g}; use fewer clients or a larger alpha"
    )


def _cut(
    held: Sequence[Integers], examples: int, rng: np.random.RandomState
) -> tuple[Integers, Integers]:
    """Cuts what each client holds into training and test examples, in the order of clients."""
    from sklearn.model_selection import train_test_split  # takes a second to import

    owner, part = np.full(examples, -1), np.full(examples, UNUSED)
    for client, rows in enumerate(held):
        if len(rows) < 2:
            raise UserError(
                f"each client must have 2 examples or more in PFLlib's dealing, client {client} "
                f"got {len(rows)}; use fewer clients or more classes per client"
            )
        train, test = train_test_split(rows, train_size=TRAIN_SHARE, random_state=rng)
        owner[rows], part[train], part[test] = client, TRAIN, TEST
    return owner, part


def _joined(parts: Sequence[Integers]) -> Integers:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

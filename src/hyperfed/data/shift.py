"""How far apart clients are: distances between their class distributions.

Distributions are rows (..., classes) that sum to one, such as those of its classes at each client.
"""

from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.task import Task


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Computes half the L1 distance of each row of ``p`` to each of ``q``.

    Args:
        p: (n, classes) distributions.
        q: (m, classes) distributions.

    Returns:
        (n, m) distances in [0, 1].

    Raises:
        UserError: the rows are no distributions over the same classes.
    """
    _check(p, q)
    return torch.cdist(p, q, p=1) / 2


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Computes KL(p || q) = sum p log(p / q), in nats, of each row of ``p`` from each of ``q``.

    Args:
        p: (n, classes) distributions.
        q: (m, classes) distributions.

    Returns:
        (n, m) divergences, 0 or more; infinite where ``q`` lacks a class of ``p``.

    Raises:
        UserError: the rows are no distributions over the same classes.
    """
    _check(p, q)
    entropy = torch.xlogy(p, p).sum(dim=1, keepdim=True)  # (n, 1)
    cross = torch.xlogy(p[:, None], q).sum(dim=2)  # (n, m); xlogy(0, 0) = 0
    return entropy - cross


def nearest_total_variation(novel: Tensor, train: Tensor) -> Tensor:
    """Computes the total variation of each novel client to its nearest training client.

    The distribution shift of pFedHN, figure 2.

    Args:
        novel: (n, classes) distributions of novel clients.
        train: (m, classes) distributions of training clients.

    Returns:
        (n,) distances in [0, 1].
    """
    return total_variation(novel, train).amin(dim=1)


@dataclass(frozen=True)
class LabelShift:
    """How far apart the class distributions of a task's clients are, by their training examples.

    Attributes:
        total_variation: the mean over pairs of known clients; None of fewer than two.
        novel_total_variation: of each novel client to its nearest known one (pFedHN, figures 2 and
            7); None of a client without examples.
        novel_kl_divergence: KL(novel || known), in nats, to the known client where it is least
            (IT-PFL-HN, figure 3); None where each of them lacks a class of the novel one.
    """

    total_variation: float | None = None
    novel_total_variation: tuple[float | None, ...] = ()
    novel_kl_divergence: tuple[float | None, ...] = ()


def label_shift(task: Task) -> LabelShift:
    """Measures the label shift of a task; an empty one of regression, and of clients at sites.

    Of several labels side by side it is the mean over them.
    """
    if not task.classes or not len(task.y):
        return LabelShift()
    count = torch.stack([task.class_counts(rows) for rows in task.train]).double()
    share = count / count.sum(dim=1, keepdim=True)  # (clients, classes), nan without examples
    known = share[: len(task.known)]
    known = known[known.isfinite().all(dim=1)]
    if not len(known):
        return LabelShift()
    pairs = len(known) * (len(known) - 1)
    mean = float(total_variation(known, known).sum()) / pairs if pairs else None  # 0 to itself
    variation: list[float | None] = []
    divergence: list[float | None] = []
    for row in share[len(task.known) :, None]:  # (1, classes); all at once would fill the memory
        there = bool(row.isfinite().all())
        variation.append(float(nearest_total_variation(row, known)) if there else None)
        least = float(kl_divergence(row, known).min()) if there else inf
        divergence.append(least if isfinite(least) else None)
    return LabelShift(mean, tuple(variation), tuple(divergence))


def _check(*distributions: Tensor) -> None:
    shapes = [tuple(rows.shape) for rows in distributions]
    if any(len(shape) != 2 for shape in shapes) or len({shape[-1] for shape in shapes}) != 1:
        raise UserError(
            f"class distributions must be (clients, classes) over the same classes, got {shapes}"
        )
    for rows in distributions:
        sums = rows.sum(dim=1)
        if (rows < 0).any() or not torch.allclose(sums, torch.ones_like(sums), atol=1e-5):
            raise UserError(
                "class distributions must be 0 or more and sum to one in each row, got sums of "
                f"{float(sums.min()):g} to {float(sums.max()):g}; divide counts by their sum"
            )

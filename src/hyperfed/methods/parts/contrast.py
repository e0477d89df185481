"""Contrastive losses between the outputs of models (pFedKT, equation 2 and appendix F.3).

A model, the anchor, is to come near a positive model and stay away from a negative one. Those two
are constants: no gradient flows into them.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from hyperfed.errors import UserError
from hyperfed.federation import Outline
from hyperfed.methods.parts.features import check_outputs

Contrast = Literal["triplet", "moon", "regularization"]
Distance = Literal["kl", "cosine", "l2", "mse"]


def distances(anchor: Tensor, other: Tensor, distance: Distance) -> Tensor:
    """Compares two models' outputs example by example.

    Args:
        anchor: (B, classes) logits of the model that learns, (B, T, classes) those of tokens, or
            one number of each example, (B,) as (B, 1).
        other: the same of the model it is compared with, a constant.
        distance: ``kl``, KL(other || anchor) of the two softmax (equation 2); ``cosine``, 1 minus
            the cosine similarity; ``l2``, the Euclidean norm of the difference; ``mse``, its square
            (so defined in appendix F.3: not divided by the number of classes).

    Returns:
        (B,) distances, (B, T) of tokens.
    """
    if anchor.ndim == 1:
        anchor, other = anchor[:, None], other[:, None]
    other = other.detach()
    match distance:
        case "kl":
            ours, theirs = anchor.log_softmax(dim=-1), other.log_softmax(dim=-1)
            return (theirs.exp() * (theirs - ours)).sum(dim=-1)
        case "cosine":
            return 1 - F.cosine_similarity(anchor, other, dim=-1)
        case "l2":
            norm: Tensor = vector_norm(anchor - other, dim=-1)
            return norm
        case "mse":
            return (anchor - other).square().sum(dim=-1)


def mean_counted(values: Tensor, y: Tensor) -> Tensor:
    """Averages what was found of each example, or of each token that counts, as the loss does.

    Args:
        values: (B,), or (B, T) of tokens.
        y: (B,) labels or targets, or (B, T) labels; a token whose label is below 0 counts nothing.

    Returns:
        a scalar.
    """
    if values.ndim < 2:
        return values.mean()
    counts = y >= 0
    return values.where(counts, 0).sum() / counts.sum()


def contrastive_loss(
    near: Tensor, far: Tensor, y: Tensor, contrast: Contrast, *, margin: float, temperature: float
) -> Tensor:
    """Returns a scalar that rises with the distances ``near`` and falls with ``far``.

    - ``triplet``: max(mean near - mean far + margin, 0). The distances are between models, so the
      hinge is on their means over the batch (algorithm 1);
    - ``moon``: the mean of -log(e^(s/t) / (e^(s/t) + e^(s'/t))), with t the temperature and the
      similarities s to the positive, s' to the negative model: a constant, which cancels, minus the
      distances (Li et al., CVPR 2021, equation 3);
    - ``regularization``: mean near.

    Args:
        near: (B,) distances of the anchor to the positive model, or (B, T) of tokens.
        far: the same to the negative model.
        y: as of :func:`mean_counted`.
        contrast: which loss.
        margin: alpha, by which ``far`` should exceed ``near``; of ``triplet`` alone.
        temperature: of ``moon`` alone.
    """
    match contrast:
        case "triplet":
            return (mean_counted(near, y) - mean_counted(far, y) + margin).clamp(min=0)
        case "moon":
            return mean_counted(F.softplus((near - far) / temperature), y)
        case "regularization":
            return mean_counted(near, y)


def mean_discrepancy(anchor: Tensor, other: Tensor) -> Tensor:
    """Compares the distributions of two models' features on a batch (MMD, squared).

    mean k(a, a') - 2 mean k(a, b) + mean k(b, b') over all pairs, an example with itself included,
    where k is the sum of five Gaussian kernels exp(-|a - b|^2 / w) whose widths w are 1/4, 1/2, 1,
    2 and 4 times the mean squared distance of two of the 2B features: the estimate of FedPHP's
    authors. The widths are constants, and so are the other model's features.

    Args:
        anchor: (B, F) features of the model that learns.
        other: (B, F) features of the model it is compared with.

    Returns:
        a scalar, not negative.
    """
    both = torch.cat([anchor, other.detach()])  # (2B, F)
    # Not by a product of matrices, which loses the small distances of like features.
    exact = "donot_use_mm_for_euclid_dist"
    square = torch.cdist(both, both, compute_mode=exact).square()  # (2B, 2B)
    pairs = len(both) * (len(both) - 1)
    width = square.detach().sum() / pairs + 1e-8  # features may all be the same, such as zero
    kernel = torch.stack([(-square / (width * 2.0**power)).exp() for power in range(-2, 3)]).sum(0)
    sign = torch.cat([torch.ones_like(anchor[:, 0]), -torch.ones_like(other[:, 0])])
    return sign @ kernel @ sign / len(anchor) ** 2


def check_logits(method: str, outline: Outline) -> None:
    """Refuses a task whose outputs are no logits, as the softmax of them would mean nothing.

    Args:
        method: who asks, as a user calls it.
        outline: of the task.

    Raises:
        UserError: the task is a regression, or has no output for each class.
    """
    if not outline.classes:
        raise UserError(
            f"a task for {method} must have classes, as its models learn from each other's logits; "
            "this one has float targets: choose another method, or labels that are classes"
        )
    check_outputs(method, outline)

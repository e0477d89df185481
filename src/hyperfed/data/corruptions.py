"""Corrupted images for novel clients: a change of domain (IT-PFL-HN, section 6.6, table 3).

Each corruption has one strength, drawn uniformly. The paper gives the ranges, not how often it
draws; here it is **once per client**, as if each client had a camera of its own, so a client's
training, validation and test images are corrupted alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import cos, radians, sin
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed.data.examples import IMAGE_DIMENSIONS
from hyperfed.data.partitions import Partition
from hyperfed.errors import UserError
from hyperfed.system.randomness import generator

CorruptionName = Literal["blur", "rotation", "brightness", "contrast", "saturation"]

RADIUS = 3
"""Pixels on each side of the centre of the blur's 7 x 7 filter."""

LUMA = (0.299, 0.587, 0.114)
"""Red, green and blue of a grey value (ITU-R BT.601)."""


def blur(images: Tensor, sigma: float) -> Tensor:
    """Filters with a 7 x 7 Gaussian of standard deviation ``sigma`` pixels, mirrored at the edges.

    Args:
        images: (N, C, H, W) floats; height and width at least 4.
        sigma: positive.

    Raises:
        UserError: the images are smaller than the mirrored edge.
    """
    height, width = images.shape[2:]
    if min(height, width) <= RADIUS:
        raise UserError(
            f"images to blur must have sides of more than {RADIUS} pixels, got {height} x {width}; "
            "choose another corruption"
        )
    distance = torch.arange(-RADIUS, RADIUS + 1).to(images)
    weight = (-(distance**2) / (2 * sigma**2)).exp()
    weight = weight / weight.sum()
    kernel = torch.outer(weight, weight)[None, None]
    channels = images.reshape(-1, 1, height, width)
    padded = F.pad(channels, [RADIUS] * 4, mode="reflect")
    return F.conv2d(padded, kernel).reshape(images.shape)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Rotates counter-clockwise about the centre; what comes from outside the image is black.

    A pixel gets the value of the one nearest to where it comes from, as in torchvision's rotations
    by default: the paper names no interpolation. A small angle may leave a small image as it is.

    Args:
        images: (N, C, H, W) floats.
        degrees: angle.
    """
    height, width = images.shape[2:]
    down = torch.arange(height).to(images)[:, None] - (height - 1) / 2
    right = torch.arange(width).to(images) - (width - 1) / 2
    cosine, sine = cos(radians(degrees)), sin(radians(degrees))
    # Where each pixel comes from, in pixels from the centre; grid_sample counts in half images.
    from_right, from_down = cosine * right - sine * down, sine * right + cosine * down
    grid = torch.stack([from_right * 2 / width, from_down * 2 / height], dim=-1)  # (H, W, 2)
    grid = grid.expand(len(images), -1, -1, -1)
    return F.grid_sample(images, grid, mode="nearest", align_corners=False)


def scale_brightness(images: Tensor, factor: float) -> Tensor:
    """Moves images (N, C, H, W) away from black (factor > 1) or towards it."""
    return factor * images


def scale_contrast(images: Tensor, factor: float) -> Tensor:
    """Moves images (N, C, H, W) away from their own mean grey (factor > 1) or towards it."""
    mean = _grey(images).mean(dim=(1, 2, 3), keepdim=True)
    return torch.lerp(mean.expand_as(images), images, factor)


def scale_saturation(images: Tensor, factor: float) -> Tensor:
    """Moves images (N, 3, H, W) away from their grey copies (factor > 1) or towards them.

    Raises:
        UserError: the images have no colour.
    """
    if images.shape[1] != len(LUMA):
        raise UserError(
            f"saturation needs colour images, 3 channels, got {images.shape[1]}; "
            "choose another corruption, or data in colour"
        )
    return torch.lerp(_grey(images).expand_as(images), images, factor)


def _grey(images: Tensor) -> Tensor:
    """Returns (N, 1, H, W): the grey values of colour images, grey images as they are."""
    if images.shape[1] != len(LUMA):
        return images.mean(dim=1, keepdim=True)
    return (images * images.new_tensor(LUMA)[:, None, None]).sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Corruption:
    """A function of images and a strength, and between what bounds the strength is drawn."""

    apply: Callable[[Tensor, float], Tensor]
    low: float
    high: float


CORRUPTIONS: Mapping[CorruptionName, Corruption] = MappingProxyType(
    {
        "blur": Corruption(blur, 0.1, 2.0),
        "rotation": Corruption(rotate, 0.0, 15.0),
        "brightness": Corruption(scale_brightness, 0.5, 1.5),
        "contrast": Corruption(scale_contrast, 0.5, 1.5),
        "saturation": Corruption(scale_saturation, 0.5, 1.5),
    }
)
"""By name, with the paper's ranges: sigma in pixels, an angle in degrees, three factors."""


def corrupt(images: Tensor, name: CorruptionName, source: torch.Generator) -> Tensor:
    """Corrupts all images with one random strength.

    Args:
        images: (N, C, H, W), uint8 or floats in [0, 1]; one channel or three.
        name: a key of ``CORRUPTIONS``.
        source: draws the strength.

    Returns:
        Images of the same shape and dtype; values are cut off at 0 and 1, uint8 is rounded.

    Raises:
        UserError: these are no images, too small ones to blur, or grey ones to saturate.
    """
    _check_images(images)
    kind = CORRUPTIONS[name]
    draw = torch.rand((), generator=source, dtype=torch.float64).item()
    strength = kind.low + (kind.high - kind.low) * draw
    if images.is_floating_point():
        return kind.apply(images, strength).clamp(0, 1)
    return (kind.apply(images / 255, strength).clamp(0, 1) * 255).round().to(images.dtype)


def corrupt_novel(
    x: Tensor, partition: Partition, *, novel: int, name: CorruptionName, seed: int
) -> Tensor:
    """Corrupts the images of novel clients, each client's with its own strength.

    Args:
        x: (N, C, H, W) all images, as :func:`corrupt` takes them; not changed.
        partition: who holds what.
        novel: number of novel clients, the last ones.
        name: a key of ``CORRUPTIONS``.
        seed: a strength is a function of it, the corruption's name and the client.

    Returns:
        All images; those of known clients and of nobody as they were.

    Raises:
        UserError: an image belongs to two clients, or :func:`corrupt` cannot corrupt them.
    """
    splits = zip(partition.train, partition.val, partition.test, strict=True)
    own = [torch.cat(indices) for indices in splits]
    holders = torch.bincount(torch.cat(own), minlength=len(x))
    if (holders > 1).any():
        raise UserError(
            "an image must belong to one client where novel clients' are corrupted, got "
            f"{int((holders > 1).sum())} images that are held more than once; use a partition "
            "that shares none"
        )
    changed = x.clone()
    for client in range(len(own) - novel, len(own)):
        source = generator(seed, "corruption", name, client)
        changed[own[client]] = corrupt(x[own[client]], name, source)
    return changed


def _check_images(images: Tensor) -> None:
    shaped = images.ndim == IMAGE_DIMENSIONS and images.shape[1] in (1, len(LUMA))
    if not shaped or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise UserError(
            "only images can be corrupted, (N, C, H, W) of 1 or 3 channels in uint8 or floats, got "
            f"shape {tuple(images.shape)} of {images.dtype}; choose data of images"
        )
    if images.is_floating_point() and images.numel() and not _in_unit_interval(images):
        raise UserError(
            "float images must lie in [0, 1], got values from "
            f"{float(images.min()):g} to {float(images.max()):g}; corrupt before normalising"
        )


def _in_unit_interval(values: Tensor) -> bool:
    return bool(values.min() >= 0) and bool(values.max() <= 1)

"""A data set in memory: every example once, as tensors, and how raw images become network input."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.trees import mapped

IMAGE_DIMENSIONS = 4

HASHED_ROWS = 1024
"""Rows of which a hash copies the values at a time."""


@dataclass(frozen=True)
class Normalize:
    """Maps uint8 images to float32 network input: ``(x / 255 - mean) / std``, channel by channel.

    The result of a 4-d batch is ``channels_last`` in memory, which convolutions train fastest on
    (but not under ``vmap``, which computes with all clients' images as channels of one).
    Tokens and floats pass unchanged.

    Attributes:
        mean: one per channel, on the scale of x / 255.
        std: the same.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    _constants: dict[tuple[torch.Size, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, x: Tensor) -> Tensor:
        """Returns a batch (B, C, H, W) of uint8 images as float32; anything else as it is."""
        if x.dtype != torch.uint8:
            return x
        if x.ndim == IMAGE_DIMENSIONS and not mapped():
            x = channels_last(x)
        scale, shift = self._scale_and_shift(x)
        pixels = x.float()
        return torch.addcmul(shift, pixels, scale, out=None if mapped() else pixels)

    def _scale_and_shift(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (C, H, W) constants laid out as the images are: 4 x faster than broadcasting."""
        key = (x.shape[-3:], x.device)
        if key not in self._constants:
            std = torch.tensor(self.std, dtype=torch.float64)
            mean = torch.tensor(self.mean, dtype=torch.float64)
            channels, height, width = key[0]
            pixels = torch.ones(height, width, channels, dtype=torch.float64)
            scale, shift = (
                (pixels * constant).to(x.device, torch.float32).permute(2, 0, 1)
                for constant in (1 / (255 * std), -mean / std)
            )
            self._constants[key] = (scale, shift)
        return self._constants[key]


def channels_last(x: Tensor) -> Tensor:
    """Returns images (B, C, H, W) with a pixel's channels side by side in memory.

    Of images with one channel the strides must say so, too, which PyTorch leaves as they are: it
    looks at them to choose between kernels, and of one channel either layout is the other.
    """
    if x.shape[1] == 1:
        return x[:, 0, :, :, None].movedim(-1, 1)
    return x.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set. N is the number of examples.

    Attributes:
        name: how records call it.
        x: uint8 images (N, C, H, W), ``channels_last`` in memory; float features or int64 tokens.
        y: (N,) int64 labels, or float targets for regression, (N, K) where each has K numbers.
        held_out: (N,) bool, True for the data set's own test split; all False where it has none.
        classes: number of labels; 0 for regression.
        client: (N,) int64 natural client of each example, from 0; None where none is known.
        coarse: (N,) int64 coarser label (CIFAR-100's 20 superclasses); None where there is none.
        shared_labels: a label means the same at every client. False for Omniglot, where each
            alphabet numbers its own characters.
        mean: per channel, of the training images on the scale of x / 255; empty if not images, or
            of a table. Of your own data a task takes those that its known clients train on.
        std: the same.
        overlaps: (N,) int64 with how many of those after it, of its client and on its side of
            ``held_out``, an example shares text; None where examples share nothing.
        part: (N,) int64 what each example is for, a number of :data:`hyperfed.data.arrays.PARTS`,
            where the data say it; None where not.
        names: of the natural clients; () where they have none.
        labels: names of the labels; () where they have none.
        features: columns of the table that ``x`` is of; () where it is of none.
        text: ``x`` holds bytes of texts (:func:`hyperfed.data.tables.tokens`).
        fingerprint: a hash of the tensors.
    """

    name: str
    x: Tensor
    y: Tensor
    held_out: Tensor
    classes: int
    client: Tensor | None = None
    coarse: Tensor | None = None
    shared_labels: bool = True
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    overlaps: Tensor | None = None
    part: Tensor | None = None
    names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    text: bool = False
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def transform(self) -> Normalize:
        """How a raw batch of ``x`` becomes network input."""
        return Normalize(self.mean, self.std)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by name, C-contiguous; images as (N, H, W, C)."""
        every = {
            "x": channels_moved_last(self.x),
            "y": self.y,
            "held_out": self.held_out,
            "client": self.client,
            "coarse": self.coarse,
            "overlaps": self.overlaps,
            "part": self.part,
        }
        return {name: value.contiguous() for name, value in every.items() if value is not None}


def channels_moved_last(x: Tensor) -> Tensor:
    """Views uint8 images (N, C, H, W) as (N, H, W, C); returns anything else as it is."""
    return x.permute(0, 2, 3, 1) if is_image(x) else x


def channels_moved_first(x: Tensor) -> Tensor:
    """Views uint8 images (N, H, W, C) as (N, C, H, W); returns anything else as it is."""
    return x.permute(0, 3, 1, 2) if is_image(x) else x


def is_image(x: Tensor) -> bool:
    """Whether ``x`` is a batch of images: four dimensions of uint8."""
    return x.dtype == torch.uint8 and x.ndim == IMAGE_DIMENSIONS


def channel_statistics(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes mean and standard deviation per channel, by which images are normalised.

    They are those of :func:`channel_moments`, but that a constant channel gets standard deviation
    1, which leaves it finite.
    """
    mean, std = channel_moments(x)
    return mean, tuple(deviation or 1.0 for deviation in std)


def channel_moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes mean and standard deviation per channel, exactly, from a histogram of the pixels.

    Args:
        x: (N, C, H, W) uint8 images. Anything else has no channels: two empty tuples.

    Returns:
        Means and standard deviations on the scale of x / 255, rounded to 4 decimals as the field
        quotes them; zeros of no image.
    """
    if not is_image(x):
        return (), ()
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(x.shape[1]):
        counts = np.zeros(256)
        for begin in range(0, len(x), 8192):
            pixels = x[begin : begin + 8192, channel].flatten()
            counts += torch.bincount(pixels, minlength=256).numpy()
        frequency = counts / max(counts.sum(), 1)
        mean = float(frequency @ values)
        deviation = float(np.sqrt(frequency @ (values - mean) ** 2))
        means.append(round(mean, 4))
        deviations.append(round(deviation, 4))
    return tuple(means), tuple(deviations)


def hash_of(*parts: bytes | str | Tensor) -> str:
    """Returns 32 hexadecimal digits that change with any part, a tensor's dtype or its shape."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(_kind(part.dtype, part.shape))
            digest.update(_content(part))
        else:
            content = part.encode() if isinstance(part, str) else part
            digest.update(f"{len(content)};".encode() + content)
    return digest.hexdigest()


def hash_of_rows(*parts: tuple[Tensor, Tensor]) -> str:
    """Returns :func:`hash_of` some rows of tensors, of which it never copies all.

    Args:
        parts: values (N, ...), and the numbers (M,) of the rows of them that count, in order.
    """
    digest = hashlib.blake2b(digest_size=16)
    for values, rows in parts:
        digest.update(_kind(values.dtype, (len(rows), *values.shape[1:])))
        for some in torch.split(rows, HASHED_ROWS):
            digest.update(_content(values[some]))
    return digest.hexdigest()


def _kind(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype} {tuple(shape)};".encode()


def _content(part: Tensor) -> memoryview:
    return part.contiguous().flatten().view(torch.uint8).numpy().data


def fingerprint_of_frozen(models: Mapping[str, nn.Module]) -> str:
    """Returns a hash of all that is frozen in some networks, with their names; "" where nothing."""
    parts = [
        part
        for size, network in models.items()
        for name, value in trees.frozen_of(network).items()
        for part in (f"{size}/{name}", value)
    ]
    return hash_of(*parts) if parts else ""


def fingerprint_of(tensors: dict[str, Tensor]) -> str:
    """Returns the fingerprint of :meth:`Examples.tensors`."""
    return hash_of(*(part for name in sorted(tensors) for part in (name, tensors[name])))

"""Corruptions against SciPy, Pillow and formulas; and that they stay with the novel clients."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from scipy import ndimage

from hyperfed.data.corruptions import (
    CORRUPTIONS,
    blur,
    corrupt,
    corrupt_novel,
    rotate,
    scale_brightness,
    scale_contrast,
    scale_saturation,
)
from hyperfed.data.partitions import Partition
from hyperfed.errors import UserError
from hyperfed.system.randomness import generator


def images(*shape, seed=0):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def photos(count=6, side=16, channels=3):
    """Smooth uint8 images: noise, enlarged."""
    small = images(count, channels, 4, 4)
    large = torch.nn.functional.interpolate(small, size=side, mode="bicubic").clamp(0, 1)
    return (large * 255).round().to(torch.uint8)


def pillow(pixels):
    """(C, H, W) uint8 as a Pillow image."""
    array = pixels.permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def back(image):
    """A Pillow image as (C, H, W) float64."""
    array = np.asarray(image, dtype=np.float64)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_scipys_gaussian_cut_at_three_pixels(sigma):
    given = images(2, 3, 9, 12)
    # SciPy's "mirror" leaves the edge pixel single, which PyTorch calls "reflect".
    expected = ndimage.gaussian_filter(given.numpy(), sigma, axes=(2, 3), radius=3, mode="mirror")
    torch.testing.assert_close(blur(given, sigma), torch.from_numpy(expected))


def test_blur_keeps_flat_images_and_spreads_a_point():
    torch.testing.assert_close(
        blur(torch.full((1, 1, 8, 8), 0.3), 1.5), torch.full((1, 1, 8, 8), 0.3)
    )
    point = torch.zeros(1, 1, 15, 15, dtype=torch.float64)
    point[0, 0, 7, 7] = 1
    spread = blur(point, 2.0)[0, 0]
    assert int((spread > 0).sum()) == 49
    assert spread.sum().item() == pytest.approx(1)
    assert (spread[7, 8] / spread[7, 7]).item() == pytest.approx(np.exp(-1 / 8))


def test_a_rotation_by_nothing_is_the_identity():
    for shape in [(2, 3, 8, 8), (1, 1, 7, 10)]:
        torch.testing.assert_close(rotate(images(*shape), 0.0), images(*shape))


@pytest.mark.parametrize("side", [7, 8])
def test_a_rotation_by_quarters_turns_counter_clockwise(side):
    given = images(2, 3, side, side)
    for quarters in (1, 2, 3, -1):
        expected = torch.rot90(given, quarters, dims=(2, 3))
        torch.testing.assert_close(rotate(given, 90.0 * quarters), expected)


def test_a_rotation_does_not_stretch_an_oblong_image():
    given = images(1, 1, 8, 12)
    torch.testing.assert_close(rotate(given, 180.0), given.flip(2, 3))
    turned = rotate(given, 90.0)  # the 8 columns about the centre fit as rows
    torch.testing.assert_close(turned[..., 2:10], torch.rot90(given[..., 2:10], dims=(2, 3)))
    assert turned[..., :2].abs().max() < 1e-9  # from above the image: black


@pytest.mark.parametrize("degrees", [0.7, 3.0, 11.3, 15.0, -8.0])
@pytest.mark.parametrize("shape", [(8, 8), (7, 12)])
def test_a_rotation_takes_the_nearest_pixel(degrees, shape):
    """Pixel by pixel; so do torchvision's rotations by default, and what they miss is black."""
    height, width = shape
    given = images(1, 1, height, width)
    turned, angle = rotate(given, degrees)[0, 0], np.deg2rad(degrees)
    for row in range(height):
        for column in range(width):
            # Upwards is positive here. A pixel shows what a turn back by the angle leads to.
            right, up = column - (width - 1) / 2, (height - 1) / 2 - row
            from_right = np.cos(angle) * right + np.sin(angle) * up
            from_up = np.cos(angle) * up - np.sin(angle) * right
            there = (
                round((height - 1) / 2 - from_up),
                round(from_right + (width - 1) / 2),
            )
            inside = 0 <= there[0] < height and 0 <= there[1] < width
            assert turned[row, column] == (given[0, 0][there] if inside else 0)


@pytest.mark.parametrize("degrees", [8.0, 15.0])
def test_a_rotation_is_pillows(degrees):
    given = photos()
    turned = rotate(given.double(), degrees)
    expected = torch.stack([back(pillow(image).rotate(degrees)) for image in given])
    assert (turned == expected).double().mean() > 0.99  # but for what lies between two pixels
    assert (turned == given).double().mean() < 0.9


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.5])
@pytest.mark.parametrize(
    ("scale", "enhance", "channels"),
    [
        (scale_brightness, ImageEnhance.Brightness, 3),
        (scale_brightness, ImageEnhance.Brightness, 1),
        (scale_contrast, ImageEnhance.Contrast, 3),
        (scale_contrast, ImageEnhance.Contrast, 1),
        (scale_saturation, ImageEnhance.Color, 3),
    ],
)
def test_brightness_contrast_and_saturation_are_pillows(scale, enhance, channels, factor):
    given = photos(channels=channels)
    scaled = (scale(given.double() / 255, factor).clamp(0, 1) * 255).round()
    expected = torch.stack([back(enhance(pillow(image)).enhance(factor)) for image in given])
    # Pillow rounds the grey value and cuts off the result.
    assert (scaled - expected).abs().max() <= 1
    if factor != 1:
        assert (given - expected).abs().max() > 10


def test_contrast_and_saturation_by_their_formulas():
    given = images(3, 3, 5, 4)
    array = given.numpy()
    grey = np.einsum("c,nchw->nhw", [0.299, 0.587, 0.114], array)[:, None]
    mean = grey.mean(axis=(1, 2, 3)).reshape(-1, 1, 1, 1)
    for factor in (0.5, 1.4):
        for scaled, centre in (
            (scale_contrast(given, factor), mean),
            (scale_saturation(given, factor), grey),
        ):
            expected = torch.from_numpy(centre + factor * (array - centre))
            torch.testing.assert_close(scaled, expected)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_strength_is_drawn_uniformly_within_the_papers_range(name, monkeypatch):
    ranges = {"blur": (0.1, 2), "rotation": (0, 15)}
    low, high = ranges.get(name, (0.5, 1.5))
    drawn = []
    kind = CORRUPTIONS[name]
    spy = type(kind)(lambda x, strength: drawn.append(strength) or x, kind.low, kind.high)
    monkeypatch.setattr("hyperfed.data.corruptions.CORRUPTIONS", {name: spy})
    for client in range(400):
        corrupt(torch.zeros(1, 3, 8, 8), name, generator(0, "corruption", name, client))
    strengths = (np.array(drawn) - low) / (high - low)
    assert 0 <= strengths.min() < 0.02
    assert 0.98 < strengths.max() <= 1
    assert strengths.mean() == pytest.approx(0.5, abs=0.05)  # three standard errors and more
    assert strengths.var() == pytest.approx(1 / 12, abs=0.01)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_images_are_still_images_and_a_function_of_the_generator(name):
    given = photos()
    once, again, other = (corrupt(given, name, generator(seed, "c")) for seed in (0, 0, 1))
    assert once.dtype == torch.uint8
    assert once.shape == given.shape
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert not torch.equal(once, given)
    of_floats = corrupt(given.double() / 255, name, generator(0, "c"))
    assert of_floats.dtype == torch.float64
    assert 0 <= of_floats.min() <= of_floats.max() <= 1
    assert (of_floats * 255 - once).abs().max() <= 0.51


def test_one_strength_serves_all_images_of_a_call():
    once = corrupt(torch.full((50, 1, 8, 8), 0.5), "brightness", generator(0))
    assert len(once.unique()) == 1


def partition_of(*clients):
    """A partition from (train, val, test) lists for each client."""
    splits = (
        [torch.tensor(own, dtype=torch.int64) for own in split]
        for split in zip(*clients, strict=True)
    )
    return Partition(*map(tuple, splits))


CLIENTS = [([0, 1], [2], [3]), ([4], [], [5]), ([6, 7], [8], [9]), ([10], [11], [])]


def test_every_split_of_a_novel_client_gets_its_own_strength_and_no_other_image_any():
    x = torch.full((14, 1, 8, 8), 100, dtype=torch.uint8)  # 12 and 13 belong to nobody
    changed = corrupt_novel(x, partition_of(*CLIENTS), novel=2, name="brightness", seed=3)
    assert x.unique().tolist() == [100]
    values = changed[:, 0, 0, 0].tolist()
    assert all(len(image.unique()) == 1 for image in changed)
    assert values[:6] == values[12:] * 3 == [100] * 6
    for client, rows in ((2, slice(6, 10)), (3, slice(10, 12))):
        draw = torch.rand(
            (), generator=generator(3, "corruption", "brightness", client), dtype=torch.float64
        )
        assert set(values[rows]) == {round((0.5 + draw.item()) * 100)}
    assert values[6] != values[10]


def test_images_of_two_clients_are_not_corrupted():
    shared = partition_of(*CLIENTS[:3], ([10], [2], []))  # image 2 is known client 0's too
    with pytest.raises(UserError, match=r"must belong to one client .* got 1 images that are held"):
        corrupt_novel(torch.zeros(14, 1, 8, 8), shared, novel=1, name="blur", seed=0)


@pytest.mark.parametrize(
    ("given", "name", "message"),
    [
        (images(4, 1, 8, 8), "saturation", "needs colour images, 3 channels, got 1"),
        (images(4, 1, 3, 8), "blur", "sides of more than 3 pixels, got 3 x 8"),
        (images(4, 8), "blur", r"only images can be corrupted, .* got shape \(4, 8\)"),
        (images(4, 8, 8, 3), "blur", "1 or 3 channels"),
        (torch.zeros(4, 1, 8, 8, dtype=torch.int64), "blur", "of torch.int64"),
        (images(4, 1, 8, 8) - 0.5, "blur", r"float images must lie in \[0, 1\], got values from -"),
        (images(4, 1, 8, 8) * 2, "blur", r"float images must lie in \[0, 1\], got .* to 1.9"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(given, name, message):
    with pytest.raises(UserError, match=message):
        corrupt(given, name, generator(0))

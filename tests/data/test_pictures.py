"""Pictures of every kind come to grey or colour, as they look."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyperfed.data.pictures import pixels
from hyperfed.errors import UserError

COLOUR = (200, 100, 50)


@pytest.mark.parametrize(
    ("mode", "kind"), [("RGBA", "png"), ("P", "png"), ("CMYK", "tiff"), ("RGBA", "webp")]
)
def test_what_has_colours_keeps_them(mode: str, kind: str) -> None:
    found = decoded(Image.new("RGB", (3, 2), COLOUR).convert(mode), kind)
    assert found.shape == (2, 3, 3)
    assert np.abs(found.astype(int) - COLOUR).max() <= 30  # a palette has few to choose from


@pytest.mark.parametrize("mode", ["LA", "1"])
def test_what_has_none_is_grey(mode: str) -> None:
    found = decoded(Image.new("L", (3, 2), 255).convert(mode), "png")
    assert found.tolist() == [[255] * 3] * 2


@pytest.mark.parametrize("kind", ["gif", "png", "tiff", "webp"])
def test_a_file_of_several_is_refused(kind: str) -> None:
    frames = [Image.new("RGB", (3, 2), (shade, 0, 0)) for shade in (0, 100, 200)]
    with pytest.raises(UserError, match="an image must be one, got 3 in a file; save each"):
        decoded(frames[0], kind, save_all=True, append_images=frames[1:])


def test_of_a_photograph_with_smaller_copies_it_is_the_photograph() -> None:
    smaller = Image.new("RGB", (6, 4), (0, 0, 0))
    found = decoded(
        Image.new("RGB", (12, 8), COLOUR), "mpo", save_all=True, append_images=[smaller]
    )
    assert found.shape == (8, 12, 3)
    assert np.abs(found.astype(int) - COLOUR).max() <= 3


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_can_be_seen_through_is_refused(mode: str) -> None:
    """What colour a pixel has that nobody sees is anything."""
    grey_or_colour = {"RGBA": (*COLOUR, 255), "LA": (200, 255), "P": 1}[mode]
    seen_through = {"RGBA": (*COLOUR, 254), "LA": (200, 0), "P": 0}[mode]
    picture = Image.new(mode, (3, 2), grey_or_colour)
    options = {"transparency": 0} if mode == "P" else {}
    assert decoded(picture, "png", **options).shape[:2] == (2, 3)
    picture.putpixel((1, 1), seen_through)
    with pytest.raises(UserError, match=r"must be opaque, .*; put it on a background"):
        decoded(picture, "png", **options)


def test_of_a_container_that_holds_sound_the_decoders_word_is_told() -> None:
    with pytest.raises(UserError, match=r"Pillow can decode, but is not \(Unidentified"):
        pixels(b"RIFF\x24\0\0\0WAVEfmt " + bytes(28))


def decoded(picture: Image.Image, kind: str, **options: Any) -> np.ndarray:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return pixels(file.getvalue())

"""Pictures of every kind come to grey or colour, as they look."""

import io

import numpy as np
import pytest
from PIL import Image

from hyperfed.data.pictures import pixels

COLOUR = (200, 100, 50)


@pytest.mark.parametrize(("mode", "kind"), [("RGBA", "png"), ("P", "png"), ("CMYK", "tiff")])
def test_what_has_colours_keeps_them(mode: str, kind: str) -> None:
    found = decoded(Image.new("RGB", (3, 2), COLOUR).convert(mode), kind)
    assert found.shape == (2, 3, 3)
    assert np.abs(found.astype(int) - COLOUR).max() <= 30  # a palette has few to choose from


@pytest.mark.parametrize("mode", ["LA", "1"])
def test_what_has_none_is_grey(mode: str) -> None:
    found = decoded(Image.new("L", (3, 2), 255).convert(mode), "png")
    assert found.tolist() == [[255] * 3] * 2


def decoded(picture: Image.Image, kind: str) -> np.ndarray:
    file = io.BytesIO()
    picture.save(file, kind)
    return pixels(file.getvalue())

"""Files of images as pixels, upright."""

import io
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from hyperfed.errors import UserError, one_line
from hyperfed.system.allocation import total_memory

Array = npt.NDArray[Any]

ORIENTED = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}
"""Where Pillow finds which way up a camera was held; only TIFF it turns by itself."""
FORMATS = {b"RIFF": ["WEBP"]}
"""Of a file's first bytes: Pillow asks seven others first, which takes a third of the time."""


def pixels(image: Any, side: int | None = None) -> Array:
    """Decodes a buffer or a file to (H, W) grey or (H, W, 3) colour uint8.

    A photograph is turned as its file says that the camera was held, as whatever shows it does.

    Raises:
        UserError: it is no image, or several, or see-through somewhere, or not one of 8 bits per
            channel, or larger than Pillow takes for a bomb by what it says of its size, before it
            is decoded.
    """
    try:
        if isinstance(image, str) and not Path(image).is_file():
            raise FileNotFoundError(f"no file {image}")
        # Opened here: of a grey TIFF that lies Pillow maps rows of another length into memory.
        with (
            Path(image).open("rb") if isinstance(image, str) else io.BytesIO(image) as stream,
            Image.open(stream, formats=FORMATS.get(stream.read(4))) as file,
        ):
            return _pixels(file, side)
    except UserError:
        raise
    except Exception as error:  # whatever bytes make a dozen decoders raise
        what = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"an image must be a file that Pillow can decode, but is not ({what}); remove it"
        ) from error


def _pixels(file: Image.Image, side: int | None) -> Array:
    most = Image.MAX_IMAGE_PIXELS
    if most and file.width * file.height > most:  # it only warns below twice as many
        raise UserError(
            f"images must have {most} pixels at most, got {file.width} x {file.height}; resize them"
        )
    frames = getattr(file, "n_frames", 1)
    if frames > 1 and file.format != "MPO":  # a photograph, and smaller copies of it
        raise UserError(f"an image must be one, got {frames} in a file; save each in its own")
    picture = file
    if picture.mode.startswith(("I", "F")):
        raise UserError(
            f"images must have 8 bits per channel, got mode {picture.mode}; "
            "convert them, or save the pixels as float arrays in an .npz file"
        )
    picture.load()
    if ORIENTED & picture.info.keys():  # to look takes a fifth of the time of a small image
        with suppress(SyntaxError, struct.error):  # what cannot be read does not say anything
            ImageOps.exif_transpose(picture, in_place=True)
    if picture.has_transparency_data and np.asarray(picture.convert("RGBA"))[..., 3].min() < 255:
        raise UserError(
            "an image must be opaque, since what lies below is not in it, got one with pixels that "
            "are not; put it on a background (PIL.Image.alpha_composite)"
        )
    if picture.mode not in ("L", "RGB"):
        grey = picture.mode in ("1", "LA")
        picture = picture.convert("L" if grey else "RGB")
    if side is not None:
        picture = picture.resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(picture)


def check_memory(pictures: Sequence[Array], name: str) -> None:
    """Raises :class:`UserError` where pictures are larger than memory, which few bytes can say."""
    if sum(picture.nbytes for picture in pictures) > total_memory() // 2:  # they are copied once
        raise UserError(
            f"images of {name} must fit into this machine's memory twice, but do not; resize them"
        )

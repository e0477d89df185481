"""Small data sets in the layout and with the names of those that experiments load."""

import io
from collections.abc import Sequence
from pathlib import Path

import datasets as huggingface
import numpy as np
from PIL import Image

CLASSES = {
    "cifar10": 10,
    "cifar100": 100,
    "mnist": 10,
    "fashion_mnist": 10,
    "emnist": 26,
    "ernestchu/emnist-digits": 10,
}
TRAIN, TEST = 2000, 600
ROLES = 100
"""Of Shakespeare, each with lines for 53 windows to train on and 12 to test on."""

MNIST = 10_400
"""Of which 10,000 are for validation."""

PICTURES = 100
"""Of a data set, which it repeats: to write one takes longer than all else."""


def make_all(folder: Path) -> None:
    """Makes each data set in a folder of its name."""
    features = np.random.default_rng(0).normal(size=(600, 16)).round(3)
    rows = {
        "client": [f"user {row % 30}" for row in range(600)],
        "label": [f"species {row // 7 % 5}" for row in range(600)],
        "x": features.tolist(),
    }
    kinds = {column: huggingface.Value("string") for column in ("client", "label")}
    kinds["x"] = huggingface.List(huggingface.Value("float32"))
    _write(folder / "inaturalist_geo_300", "train", rows, kinds)
    for split, letters in (("train", 600), ("test", 200)):
        lines = {
            "text": [chr(97 + role % 20) * letters for role in range(ROLES)],
            "speaker": [f"role {role:03}" for role in range(ROLES)],
        }
        kinds = {column: huggingface.Value("string") for column in lines}
        _write(folder / "shakespeare", split, lines, kinds)
    for name, classes in CLASSES.items():
        colours = name.startswith("cifar")
        shape = (32, 32, 3) if colours else (28, 28)
        image = "img" if colours else "image"
        label = {"cifar100": "fine_label"}.get(name, "label")
        for split, count in (("train", MNIST if name == "mnist" else TRAIN), ("test", TEST)):
            labels = np.arange(count) % classes
            columns: dict[str, Sequence[object]] = {image: _noise(count, shape)}
            columns[label] = labels.tolist()
            features = {image: huggingface.Image(), label: _labels(classes)}
            if name == "cifar100":
                columns["coarse_label"] = (labels // 5).tolist()
                features["coarse_label"] = _labels(20)
            _write(folder / name, split, columns, features)


def _labels(classes: int) -> huggingface.ClassLabel:
    return huggingface.ClassLabel(names=[str(label) for label in range(classes)])


def _noise(count: int, shape: tuple[int, ...]) -> list[dict[str, object]]:
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (PICTURES, *shape), dtype=np.uint8)
    found: list[dict[str, object]] = []
    for picture in pixels:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "png", compress_level=0)  # noise stays as it is
        found.append({"bytes": file.getvalue(), "path": None})
    return [found[row % PICTURES] for row in range(count)]


def _write(
    folder: Path, split: str, columns: dict[str, Sequence[object]], features: dict[str, object]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = huggingface.Dataset.from_dict(columns, features=huggingface.Features(features))
    table.to_parquet(folder / f"{split}.parquet")

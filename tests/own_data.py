"""Tables and folders of somebody's own, made up."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from torch import nn

from hyperfed.data.tasks import TaskConfig

N = 24

UNCLOSED = pytest.mark.filterwarnings(  # of files that the library reads
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 4))
Y = np.arange(100) % 3
CLIENT = np.array(["zoe", "ann", "bob", "ann"] * 25)


def linear(outputs: int = 3, inputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


SENSORS: dict[str, Any] = {"client": "person", "target": "activity"}


def table(**columns: Any) -> pd.DataFrame:
    """Two numbers, a label and one of four clients for each of 24 rows; changed as asked."""
    usual = {
        "age": np.arange(N),
        "height": np.linspace(1.5, 2.0, N),
        "label": np.arange(N) % 3,
        "client": [f"c{row % 4}" for row in range(N)],
    }
    return pd.DataFrame({name: v for name, v in (usual | columns).items() if v is not None})


def saved(frame: pd.DataFrame, path: Path) -> str:
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return str(path)


def config(path: str, **settings: Any) -> TaskConfig:
    return TaskConfig(name=path, **{"novel": 0} | settings)


def pictures(folder: Path, below: tuple[str, ...] = ("",)) -> str:
    rng = np.random.default_rng(0)
    for part in below:
        for person in ("ann", "bob"):
            for label in ("cat", "dog"):
                place = folder / part / person / label
                place.mkdir(parents=True)
                for number in range(4):
                    pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{number}.png")
    return str(folder)


def with_metadata(folder: Path, **clients: list[str]) -> str:
    """Images of a folder each, and a metadata.csv that says whose they are."""
    rng = np.random.default_rng(0)
    for place, ids in clients.items():
        (folder / place).mkdir(parents=True)
        lines = ["file_name,client,label"]
        for number, client in enumerate(ids):
            pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}.png")
            lines.append(f"{number}.png,{client},{number % 2}")
        (folder / place / "metadata.csv").write_text("\n".join(lines))
    return str(folder)

"""What stands behind results/architectures: clients of three architectures in one federation.

    python tools/architectures.py grid      # every method's rates, on one grid
    python tools/architectures.py record    # three divisions into results/architectures

What is done already is skipped, so a stopped command goes on where it was; ``--methods`` takes some
only. ``make readme`` writes the table of docs/howto/architectures.md from the records.

Sixty clinics each have twelve labelled digits of 8 x 8 pixels and code their labels in one of three
ways, as in the first run; a third of them runs a small LeNet, a third a ResNet of eight layers and
a third an MLP-Mixer, each code as often on each. Twelve of the clinics join when training is over.
Every method gets the same rounds, cohort, local steps, batch and plain SGD, and the same local
rates to choose from; one with a server that learns has then other rates for that, a third of the
first and three times it, at the local rate chosen. Rates are chosen by the best round's accuracy on
the validation data of a division (a seed) that no record is of. A newcomer who trains alone does so
for as many steps as each of the others on average.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hyperfed
from grids import OTHER_SEED, ROOT, SEEDS, Grid, record

RESULTS = ROOT / "results" / "architectures"
CLIENTS, NOVEL, CLASSES, CODES = 60, 12, 10, 3
TRAIN, VAL = 12, 6
"""Examples of a client; of its others, about twelve, it is tested on."""

ROUNDS, COHORT, LOCAL_STEPS = 1000, 4, 10
STEPS = ROUNDS * COHORT * LOCAL_STEPS // (CLIENTS - NOVEL)
"""Of each client that trains, on average."""

LOCAL_RATES = (0.1, 0.3)
METHODS: Mapping[str, Mapping[str, Any]] = {
    "local": {"novel_steps": STEPS},
    "mh_pfedhn": {},
    "pefll": {},
}
SERVER_RATES = {
    method: [{"lr": rate} for rate in (2e-3, 6e-4, 6e-3)] for method in ("mh_pfedhn", "pefll")
}
"""Adam's, of both."""


def lenet() -> nn.Module:
    """Two convolutions, each halving the image, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 2 * 2, 32),
        nn.ReLU(),
        nn.Linear(32, CLASSES),
    )


class Block(nn.Module):
    """Two convolutions and the way around them; group norm, for batches here are of a few."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, outputs)
        around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.around = around if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class Mean(nn.Module):
    """The mean over some dimensions."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        """Returns x without them."""
        return x.mean(dim=self.dims)


def resnet() -> nn.Module:
    """ResNet-8: a convolution, three blocks of two, and a linear layer."""
    first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU())
    blocks = Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
    return nn.Sequential(first, *blocks, Mean(2, 3), nn.Linear(32, CLASSES))


class MixerLayer(nn.Module):
    """Mixes what stands at each place, over all places, and then what each place has."""

    def __init__(self, places: int, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places, self.over_width = (
            nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))
            for size in (places, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, places, width), as it came."""
        x = x + self.over_places(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.over_width(self.norm2(x))
        return mixed


def mixer() -> nn.Module:
    """MLP-Mixer: patches of 2 x 2, and two layers over their sixteen places."""
    places, width = 16, 24
    patches = nn.Sequential(nn.Unfold(2, stride=2), Transposed(), nn.Linear(4, width))
    layers = (MixerLayer(places, width, 32) for _ in range(2))
    return nn.Sequential(patches, *layers, nn.LayerNorm(width), Mean(1), nn.Linear(width, CLASSES))


class Transposed(nn.Module):
    """(B, numbers, places) to (B, places, numbers)."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x, its last two dimensions exchanged."""
        return x.transpose(1, 2)


ARCHITECTURES = {"lenet": lenet, "resnet8": resnet, "mixer": mixer}


def architecture(client: int) -> str:
    """Returns the architecture of a client."""
    return list(ARCHITECTURES)[client % len(ARCHITECTURES)]


def task(seed: int) -> hyperfed.Task:
    """Divides the digits among the clinics, and codes their labels."""
    rng = np.random.default_rng(seed)
    x, y = load_digits(return_X_y=True)
    order = rng.permutation(len(x))
    x, y = x[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, y[order]
    client = np.arange(len(x)) % CLIENTS  # so an example's place among its client's is // CLIENTS
    codes = np.stack([rng.permutation(CLASSES) for _ in range(CODES)])
    place = np.arange(len(x)) // CLIENTS
    return hyperfed.Task.from_arrays(
        x,
        codes[client // len(ARCHITECTURES) % CODES, y],
        client=client,
        split=np.select([place < TRAIN, place < TRAIN + VAL], ["train", "val"], "test"),
        model=ARCHITECTURES,
        size=[architecture(own) for own in range(CLIENTS)],
        novel=NOVEL,
        seed=seed,
        name="digits on three architectures",
    )


def train(
    method: str, seed: int, rates: Mapping[str, float], out: Path | None = None
) -> hyperfed.Run:
    """Trains a method."""
    plain_sgd = {"local_momentum": 0.0, "local_weight_decay": 0.0}
    common = {"local_steps": LOCAL_STEPS, "batch_size": TRAIN, **plain_sgd}
    return hyperfed.train(
        method,
        task(seed),
        out=out,
        seed=seed,
        rounds=ROUNDS,
        cohort=COHORT,
        evaluate_every=ROUNDS // 2,
        engine={"name": "vmap", "cores": 1},
        method={**common, **METHODS[method], **rates},
        progress=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    asked = parser.parse_args()
    grid = Grid(RESULTS / "grid.jsonl")
    for each in asked.methods:
        of = {"method": each}
        if asked.what == "grid":
            searched = partial(train, each, OTHER_SEED)
            grid.search(of, LOCAL_RATES, SERVER_RATES.get(each, ()), searched)
        for seed in SEEDS if asked.what == "record" else ():
            best = grid.best(of)
            record(RESULTS / each / f"seed{seed}", best, partial(train, each, seed, best))

"""What tests of dealing begin with: made examples, and all that clients got."""

from dataclasses import replace

import numpy as np
import torch

from hyperfed.data.arrays import examples_of
from hyperfed.data.tasks import PARTITIONS, TaskConfig

BY_SHARES = tuple(name for name in PARTITIONS if name not in ("pfllib", "file"))
"""Those that hold out the same fractions of each class, or of each client."""

FEW = TaskConfig(clients=60, partition="shuffled", val=0.25, test=0.3, novel=1 / 6)


def made(count=2000, classes=10, clients=None, held_out=None):
    """Examples with shuffled, equally frequent labels; two classes to a coarse class."""
    y = torch.from_numpy(np.random.default_rng(0).permutation(np.arange(count) % classes))
    client = None if clients is None else torch.arange(count) % clients
    examples = examples_of("made", torch.zeros(count, 1), y, classes, client)
    examples = replace(examples, coarse=y // 2)
    return examples if held_out is None else replace(examples, held_out=held_out)


def class_proportions(held, y):
    """(clients, classes) of what each client holds."""
    counts = torch.stack([torch.bincount(y[own], minlength=int(y.max()) + 1) for own in held])
    return counts / counts.sum(dim=1, keepdim=True)


def all_indices(*splits):
    return torch.cat([index for split in splits for index in split]).sort().values

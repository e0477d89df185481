"""Random images, by default of CIFAR-10's shape, and a task of such."""

import torch
from torch import Tensor

from hyperfed.data.examples import Normalize
from hyperfed.data.own import Task
from hyperfed.nets.targets import LeNet
from hyperfed.system.randomness import generator, seeded

CLASSES = 10
SHAPE = (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def draw(
    clients: int, examples: int, shape: tuple[int, ...] = SHAPE
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns so many images of each client, their labels, and who holds them."""
    total, source = examples * clients, torch.Generator().manual_seed(0)
    x = torch.randint(256, (total, *shape), dtype=torch.uint8, generator=source)
    y = torch.randint(CLASSES, (total,), generator=source)
    return x, y, torch.arange(clients).repeat_interleave(examples)


def make_task(clients: int, *, train: int, held_out: int) -> Task:
    """Returns a task in which every client holds equally many images.

    Args:
        clients: how many.
        train: images of all clients to learn from.
        held_out: images of all clients for validation, and as many for testing.
    """
    total = train + 2 * held_out
    source = generator(0, "images")
    x = torch.randint(256, (total, *SHAPE), dtype=torch.uint8, generator=source)
    y = torch.randint(CLASSES, (total,), generator=source)
    parts = torch.split(torch.arange(total), [train, held_out, held_out])
    rows = [part.tensor_split(clients) for part in parts]
    with seeded(0, "target"):
        net = LeNet(SHAPE, CLASSES, width=16)
    return Task(
        name="random images",
        x=x.contiguous(memory_format=torch.channels_last),
        y=y,
        train=rows[0],
        val=rows[1],
        test=rows[2],
        models={"base": net},
        classes=CLASSES,
        transform=Normalize(MEAN, STD),
    )

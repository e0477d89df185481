"""Trains hypernetworks for large targets and prints what that took; see bench_large.py.

``python large.py METHOD TARGET CLIENTS [KEY=VALUE ...]`` prints {"target": its parameters,
"hypernetwork": those that make it, "gibibytes": the largest resident memory of the process, "more":
by how much that is above what it was with the data, "round": seconds of a round, the median of
those before the last, which evaluates all clients}.
"""

import json
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.data.own import Task
from hyperfed.nets.targets import LeNet
from hyperfed.runs import config
from hyperfed.runs.run import Run
from random_images import CLASSES, SHAPE, draw

EXAMPLES = 30
"""Of each client."""

ROUNDS = 4


class Block(nn.Module):
    """Two 3x3 convolutions with batch-norm, and what comes in added (He et al., CVPR 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.past = nn.Sequential()
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.past = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.past(x))


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32: 11,173,962 parameters with 10 classes."""
    first = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
    blocks = [Block(*width) for width in widths]
    more = [Block(outputs, outputs, 1) for _, outputs, _ in widths]
    body = [block for pair in zip(blocks, more, strict=True) for block in pair]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*first, *body, *end)


class ViT(nn.Module):
    """ViT-Ti or ViT-S (Touvron et al., ICML 2021) on patches of 4 x 4: 5.4 or 21.3 M parameters."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # (B, 64, 192)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], dim=1) + self.places
        logits: Tensor = self.head(self.layers(tokens)[:, 0])
        return logits


def frozen_vit_s() -> nn.Module:
    """ViT-S of which the last layer is trained."""
    net = ViT(384, 6).requires_grad_(False)
    net.head.requires_grad_(True)
    return net


TARGETS: Mapping[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "vit_ti": lambda: ViT(192, 3),
    "frozen_vit_s": frozen_vit_s,
    "lenet": lambda: LeNet(SHAPE, CLASSES),
}


def largest() -> float:
    """Returns the largest resident memory that this process has had, in GiB (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(method: str, target: str, clients: int, *keys: str) -> None:
    x, y, owner = draw(clients, EXAMPLES)
    short = [f"rounds={ROUNDS}", f"evaluate_every={ROUNDS}", "cohort=5", "method.start=target"]
    settings = config.load(method, [*short, "method.local_steps=5", "method.batch_size=8", *keys])
    before = largest()
    task = Task.from_arrays(x, y, client=owner.tolist(), model=TARGETS[target])
    run = Run(settings, task)
    rounds, seconds = run.train(), []
    for _ in range(ROUNDS - 1):
        begin = perf_counter()
        next(rounds)
        seconds.append(perf_counter() - begin)
    next(rounds)  # with the evaluation
    found = {
        "target": sum(p.numel() for p in trees.parameters_of(task.models["base"]).values()),
        "hypernetwork": sum(p.numel() for p in vars(run.server)["hyper_net"].parameters()),
        "gibibytes": largest(),
        "more": largest() - before,
        "round": statistics.median(seconds),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])

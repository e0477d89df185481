"""A frozen, pretrained network, and a low-rank adapter of it for every client.

A small ResNet is trained on digits that lie upright, and frozen. Each of forty clinics holds its
scanner turned its own way and has eight labelled digits; what it can have of its own is an adapter
(LoRA of rank 4) of the last block, and the last layer. Ten of the clinics join when training is
over. The digits come with scikit-learn, so nothing is downloaded:

    python examples/adapters.py

With CIFAR-100 and CIFAR-10 in HYPERFED_DATA the network is trained on the one, and the clients are
a hundred with two classes each of the other; that takes longer:

    python examples/adapters.py cifar
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hyperfed
from hyperfed.analysis import comparison
from hyperfed.data import datasets

ROUNDS, COHORT, LOCAL_STEPS = 120, 10, 5
"""The same for every method: 1,200 visits to clients, of five steps each."""

METHODS: dict[str, dict[str, Any]] = {
    "local": {"local_lr": 0.3},
    "fedavg": {"local_lr": 0.3},
    "fedper": {"local_lr": 0.1},
    "pfedhn": {"local_lr": 0.3, "lr": 0.03, "cohort_reduction": "mean", "start": "target"},
    "pefll": {"local_lr": 0.03, "lr": 0.002, "start": "target"},
}
"""Local rates chosen for each on validation data of another division (tools/adapter_runs.py)."""

TRAIN_NEWCOMERS = ("local", "fedper")
"""They get as many steps there as each of the other clients had on average."""


class Block(nn.Module):
    """Two convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.around = around if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """A small ResNet: (B, channels, H, W) images to (B, classes) logits."""

    def __init__(self, channels: int, classes: int, width: int = 16, stride: int = 1) -> None:
        super().__init__()
        first = nn.Conv2d(channels, width, 3, stride, padding=1)
        self.body = nn.Sequential(first, nn.ReLU(), Block(width, width))
        self.last = Block(width, 2 * width, stride=2)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.last(self.body(x)).mean(dim=(2, 3)))
        return logits


class Images(NamedTuple):
    """What the network is trained on first, and what the clients hold; labels are numbers."""

    first_x: Tensor
    first_y: Tensor
    x: Tensor
    y: Tensor
    client: np.ndarray[Any, Any]
    novel: int


def turned_digits(seed: int = 0, clients: int = 40, novel: int = 10) -> Images:
    """Upright digits to begin with; others for the clients, of whom each has turned all of its."""
    x, y = load_digits(return_X_y=True)
    order, first = np.random.default_rng(seed).permutation(len(x)), 700
    x, y = x[order].reshape(-1, 1, 8, 8).astype(np.float32) / 16, y[order]
    client = np.arange(len(x) - first) % clients
    quarters = zip(x[first:], client.tolist(), strict=True)  # of which the fifth is the first
    turned = np.stack([np.rot90(image, own, axes=(1, 2)) for image, own in quarters])
    first_x, first_y, x, y = map(torch.from_numpy, (x[:first], y[:first], turned, y[first:]))
    return Images(first_x, first_y, x, y, client, novel)


def cifar(seed: int = 0, clients: int = 100, novel: int = 10, examples: int = 60) -> Images:
    """CIFAR-100 to begin with; of CIFAR-10 two classes, and so many examples, for each client."""
    first, then = (datasets.load(name) for name in ("cifar100", "cifar10"))
    rng = np.random.default_rng(seed)
    order = np.argsort(then.y.numpy(), kind="stable")
    shards = order.reshape(2 * clients, -1)[rng.permutation(2 * clients)]
    pairs = shards.reshape(clients, 2, -1)
    rows = rng.permuted(pairs, axis=2)[..., : examples // 2].reshape(clients, -1)
    chosen = torch.from_numpy(rng.permuted(rows, axis=1).ravel())
    client = np.repeat(np.arange(clients), rows.shape[1])
    first_x, x = map(first.transform, (first.x, then.x[chosen]))
    return Images(first_x, first.y, x, then.y[chosen], client, novel)


def pretrained(images: Images, epochs: int) -> ResNet:
    """Returns a network that was trained on the first images."""
    torch.manual_seed(0)
    channels, size = images.first_x.shape[1:3]
    net = ResNet(channels, int(images.first_y.max()) + 1, stride=2 if size > 16 else 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    batches = DataLoader(TensorDataset(images.first_x, images.first_y), 64, shuffle=True)
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return net.eval()


def with_adapters(net: ResNet, classes: int) -> nn.Module:
    """Freezes a network, and gives its last block an adapter and itself a last layer to train."""
    if net.head.out_features != classes:  # other classes than those it was trained on
        net.head = nn.Linear(net.head.in_features, classes)
    convolutions = ["last.conv1", "last.conv2"]
    lora = peft.LoraConfig(r=4, target_modules=convolutions, modules_to_save=["head"])
    return peft.get_peft_model(net, lora)


def split_of(client: np.ndarray[Any, Any], train: int, val: int) -> np.ndarray[Any, Any]:
    """Says what each example is for: of a client's the first to train on, then to validate with."""
    split = np.full(len(client), "test ")
    for own in range(client.max() + 1):
        rows = np.flatnonzero(client == own)
        split[rows[:train]], split[rows[train : train + val]] = "train", "val"
    return np.char.strip(split)


def task_of(images: Images, net: nn.Module, name: str) -> hyperfed.Task:
    """Makes the task; what stands before the last block is computed once for each image."""
    return hyperfed.Task.from_arrays(
        images.x,
        images.y,
        client=images.client,
        split=split_of(images.client, train=8, val=6),
        model=net,
        prefix="body",
        novel=images.novel,
        name=name,
    )


def train(
    method: str,
    task: hyperfed.Task,
    *,
    rounds: int = ROUNDS,
    out: Path | None = None,
    settings: dict[str, Any] | None = None,
) -> hyperfed.Run:
    """Trains a method; ``settings`` replace some of its own."""
    common = {"local_steps": LOCAL_STEPS, "batch_size": 8, "local_momentum": 0.0}
    own = {"local_clip": 1.0, **common, **METHODS[method]}
    if method in TRAIN_NEWCOMERS:
        own["novel_steps"] = rounds * COHORT * LOCAL_STEPS // len(task.known)
    return hyperfed.train(
        method,
        task,
        out=out,
        rounds=rounds,
        cohort=COHORT,
        evaluate_every=max(1, rounds // 6),
        engine={"name": "vmap", "cores": 1},  # ten so small networks: together is fastest
        method=own | (settings or {}),
    )


def main(
    data: str = "digits",
    *,
    rounds: int = ROUNDS,
    epochs: int = 15,
    out: Path = Path("runs/adapters"),
) -> None:
    """Runs the example.

    Args:
        data: "digits" or "cifar".
        rounds: of training, for every method.
        epochs: passes over the first images.
        out: where everything goes.
    """
    show = Console(highlight=False, soft_wrap=True).print
    images = cifar() if data == "cifar" else turned_digits()
    net = with_adapters(pretrained(images, epochs), classes=10)
    whole, own = (
        sum(p.numel() for p in net.parameters() if p.requires_grad or every) for every in (1, 0)
    )
    show(f"Of {whole} numbers of the network {own} are an adapter's: these travel.\n")
    task = task_of(images, net, f"adapters of {data}")
    runs = {method: train(method, task, rounds=rounds, out=out) for method in METHODS}
    show("\nEvery client's model on its own test data; novel: clients that joined afterwards\n")
    show(comparison.table(comparison.compare(list(runs.values()))))

    # PEFT's own folder: whoever has the network reads it with PeftModel.from_pretrained.
    (run,) = (run for method, run in runs.items() if method == "pefll")
    assert run.folder is not None  # a run with out=... has one
    folder = run.folder.path / "adapter-of-client-0"
    run.adapter(0, folder)
    show(f"\nadapter of client 0  {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What stands behind results/adapters: a backbone, the choice of rates, and the records.

    python tools/adapter_runs.py pretrain    # on CIFAR-100, into .cache/adapters.safetensors
    python tools/adapter_runs.py grid        # every method's rates, on one grid
    python tools/adapter_runs.py record      # three divisions of CIFAR-10 into results/adapters
    python tools/adapter_runs.py example     # the rates of examples/adapters.py

What is done already is skipped, so a stopped command goes on where it was; ``--methods`` and
``--partitions`` take some only.

A ResNet-10 is trained on CIFAR-100 for a few passes and frozen. A hundred clients share CIFAR-10,
with two classes each or by Dirichlet 0.1, and ten of them join when training is over. What is
trained is a LoRA adapter of rank 4 of the last block's convolutions, and the last layer; what
stands before the last block is computed once for each image (``prefix``). Every method has the same
rounds, cohort, local steps, batch and plain SGD, and local learning rates to choose from; PeFLL's
server has three rates, around its default, at the local rate chosen. Rates are chosen by the best
round's accuracy on the validation data of a division (a seed) that no record is of. A newcomer who
trains does so for as many steps as each of the others on average.
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperfed
from grids import OTHER_SEED, ROOT, SEEDS, Grid, record
from hyperfed.data import datasets

BACKBONE = ROOT / ".cache" / "adapters.safetensors"
EPOCHS = 4

RESULTS = ROOT / "results" / "adapters"
CLIENTS, NOVEL = 100, 10
ROUNDS, COHORT, LOCAL_STEPS, BATCH = 100, 10, 5, 16
STEPS = ROUNDS * COHORT * LOCAL_STEPS // (CLIENTS - NOVEL)
"""Of each client that trains, on average."""

PARTITIONS: Mapping[str, Mapping[str, Any]] = {
    "pathological": {"partition": "class_shares", "classes_per_client": 2},
    "dirichlet": {"partition": "dirichlet", "alpha": 0.1},
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "local": {"novel_steps": STEPS},
    "fedavg": {},
    "fedper": {"novel_steps": STEPS},
    "pefll": {"start": "target"},
}
EXAMPLE_RATES = (0.03, 0.1, 0.3, 1.0)
LOCAL_RATES = (0.01, 0.03, 0.1, 0.3)
SERVER_RATES = {"pefll": [{"lr": rate} for rate in (2e-3, 6e-4, 6e-3)]}
GRID = Grid(RESULTS / "grid.jsonl")


class Block(nn.Module):
    """Two convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.around = around if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Returns (B, outputs, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


class ResNet(nn.Module):
    """ResNet-10 for images of 32 x 32: (B, 3, 32, 32) to (B, classes) logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            Block(32, 32),
            Block(32, 64, 2),
            Block(64, 64, 2),
        )
        self.last = Block(64, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self.head(self.last(self.body(x)).mean(dim=(2, 3)))
        return logits


def pretrain() -> None:
    """Trains the backbone on CIFAR-100 and writes its weights; prints its test accuracy."""
    torch.manual_seed(0)
    data = datasets.load("cifar100")
    train, test = ((data.held_out == held).nonzero()[:, 0] for held in (False, True))
    net: nn.Module = ResNet(data.classes)
    net, size = net.to(memory_format=torch.channels_last), 128  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, EPOCHS * (len(train) // size))
    for epoch in range(EPOCHS):
        order = train[torch.randperm(len(train))]
        for rows in order[: len(order) // size * size].split(size):  # type: ignore[no-untyped-call]
            x = data.transform(data.x[rows])
            x = x.flip(3) if torch.rand(()) < 0.5 else x
            loss = F.cross_entropy(net(x), data.y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}  loss of the last batch {loss.item():.2f}", flush=True)
    net.eval()
    with torch.no_grad():
        right = [
            net(data.transform(data.x[rows])).argmax(dim=1) == data.y[rows]
            for rows in test.split(1000)  # type: ignore[no-untyped-call]
        ]
    print(f"accuracy on CIFAR-100 {torch.cat(right).float().mean():.3f}", flush=True)
    BACKBONE.parent.mkdir(exist_ok=True)
    net = net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    safetensors.torch.save_file(net.state_dict(), BACKBONE)


def network() -> nn.Module:
    """Returns the target: the frozen backbone, an adapter of its last block, and a last layer."""
    net = ResNet(100)
    net.load_state_dict(safetensors.torch.load_file(BACKBONE))
    net.head = nn.Linear(net.head.in_features, 10)
    lora = peft.LoraConfig(
        r=4, target_modules=["last.conv1", "last.conv2"], modules_to_save=["head"]
    )
    return peft.get_peft_model(net, lora)


def train(
    method: str, partition: str, seed: int, rates: Mapping[str, float], out: Path | None = None
) -> hyperfed.Run:
    """Trains a method."""
    plain_sgd = {"local_momentum": 0.0, "local_weight_decay": 0.0}
    common = {"local_steps": LOCAL_STEPS, "batch_size": BATCH, **plain_sgd}
    return hyperfed.train(
        method,
        out=out,
        seed=seed,
        task={
            "name": "cifar10",
            "clients": CLIENTS,
            "novel": NOVEL,
            "model": f"{Path(__file__).resolve()}:network",
            "prefix": "body",
            **PARTITIONS[partition],
        },
        rounds=ROUNDS,
        cohort=COHORT,
        evaluate_every=ROUNDS // 2,
        engine={"name": "vmap", "cores": 1},
        method={**common, **METHODS[method], **rates},
        progress=False,
    )


def example(methods: list[str]) -> None:
    """Tries the local rates of the example on a division that it does not train on; prints them."""
    sys.path.insert(0, str(ROOT / "examples"))
    import adapters

    images = adapters.turned_digits(OTHER_SEED)
    net = adapters.with_adapters(adapters.pretrained(images, epochs=15), classes=10)
    task = adapters.task_of(images, net, "turned digits")
    for method, rate in product(methods, EXAMPLE_RATES):
        run = adapters.train(method, task, settings={"local_lr": rate})
        print(f"{method} {rate}  validation {run.summary['val_accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["pretrain", "grid", "record", "example"])
    parser.add_argument("--methods", nargs="+", default=None)
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "pretrain":
        pretrain()
    if asked.what == "example":
        example(asked.methods or [*METHODS, "pfedhn"])
    for wanted, division in product(asked.methods or METHODS, asked.partitions):
        of = {"method": wanted, "partition": division}
        if asked.what == "grid":
            searched = partial(train, wanted, division, OTHER_SEED)
            GRID.search(of, LOCAL_RATES, SERVER_RATES.get(wanted, ()), searched)
        for seed in SEEDS if asked.what == "record" else ():
            best = GRID.best(of)
            trained = partial(train, wanted, division, seed, best)
            record(RESULTS / division / wanted / f"seed{seed}", best, trained)

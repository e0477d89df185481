"""What the federation costs on top of the arithmetic, side by side in one process.

A round of pFedHN is set beside the same number of SGD steps in a loop as a textbook writes it, and
an evaluation of all clients beside the rounds that it interrupts. Competitors take turns, so that
whatever else the machine does slows them alike; what is reported is the median of the ratios.
Nothing here is an assertion: a busy machine makes no test fail.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from time import perf_counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed.data.examples import Normalize
from hyperfed.engines.loop import LoopEngine
from hyperfed.evaluation import evaluate
from hyperfed.federation import Task
from hyperfed.methods import pfedhn
from hyperfed.nets.targets import LeNet
from hyperfed.randomness import generator, seeded

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
MEAN_OF_PIXELS, STD_OF_PIXELS = (torch.tensor(c).view(3, 1, 1) for c in (MEAN, STD))
CLASSES = 10


@dataclass(frozen=True)
class Sizes:
    """What is measured: by default CIFAR-10's shapes in the setting of pFedHN, section 5.1."""

    clients: int = 50
    train: int = 40_000
    held_out: int = 10_000  # for validation, and as many for testing
    local_steps: int = 50
    batch: int = 64
    rounds: int = 5  # that an evaluation is compared with
    repetitions: int = 9


TINY = Sizes(clients=3, train=60, held_out=12, local_steps=2, batch=8, rounds=1, repetitions=2)


class Textbook(nn.Module):
    """The LeNet in its usual order: convolution, ReLU, pooling."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 5)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        self.fc1 = nn.Linear(2 * width * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


def bare_loop(
    net: nn.Module, x: Tensor, y: Tensor, normalize: Callable[[Tensor], Tensor], sizes: Sizes
) -> None:
    """Trains as a script would: an optimiser, a loop, and tensors in memory."""
    config = pfedhn.Config()
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=config.local_lr,
        momentum=config.local_momentum,
        weight_decay=config.local_weight_decay,
    )
    bound = config.local_clip
    assert bound is not None
    net.train()
    for _ in range(sizes.local_steps):
        index = torch.randperm(len(x))[: sizes.batch]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(normalize(x[index])), y[index])
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), bound)
        optimizer.step()


def normalize_textbook(x: Tensor) -> Tensor:
    return (x.float() / 255 - MEAN_OF_PIXELS) / STD_OF_PIXELS


def make_task(sizes: Sizes) -> Task:
    """Random images; every client holds equally many of them."""
    total = sizes.train + 2 * sizes.held_out
    draw = generator(0, "images")
    x = torch.randint(256, (total, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(CLASSES, (total,), generator=draw)
    parts = torch.split(torch.arange(total), [sizes.train, sizes.held_out, sizes.held_out])
    train, val, test = (part.tensor_split(sizes.clients) for part in parts)
    with seeded(0, "target"):
        net = LeNet((3, 32, 32), CLASSES, width=16)
    return Task(
        name="random images",
        x=x.contiguous(memory_format=torch.channels_last),
        y=y,
        train=train,
        val=val,
        test=test,
        models={"base": net},
        classes=CLASSES,
        transform=Normalize(MEAN, STD),
    )


class Federation:
    """pFedHN on a task, as a run drives it."""

    def __init__(self, task: Task, sizes: Sizes) -> None:
        config = pfedhn.Config(local_steps=sizes.local_steps, batch_size=sizes.batch)
        with seeded(0, "server"):
            self.server = pfedhn.Server(task.outline(), config)
        self.engine = LoopEngine(task, pfedhn.Client, config, seed=0)
        self.numbers = count()

    def round(self) -> None:
        """Trains with one client, each in turn."""
        number = next(self.numbers)
        cohort = self.engine.cohort([number % self.engine.task.clients], number, training=True)
        self.server.round(cohort)
        self.engine.commit(cohort)

    def evaluate(self) -> None:
        """Evaluates all clients on validation and test data."""
        evaluate(self.server, self.engine, list(self.engine.task.known), next(self.numbers))


@pytest.fixture
def sizes(tiny: bool) -> Sizes:
    return TINY if tiny else Sizes()


@pytest.fixture
def federation(sizes: Sizes) -> Iterator[Federation]:
    federation = Federation(make_task(sizes), sizes)
    yield federation
    federation.engine.close()


def test_round(benchmark: Any, sizes: Sizes, federation: Federation, findings: Any) -> None:
    task = federation.engine.task
    x, y = task.x[task.train[0]], task.y[task.train[0]]
    plain = x.contiguous()  # channels first, as a textbook has it
    ours, textbook = LeNet((3, 32, 32), CLASSES, width=16), Textbook()
    competitors: dict[str, Callable[[], None]] = {
        "round": federation.round,
        "textbook": lambda: bare_loop(textbook, plain, y, normalize_textbook, sizes),
        "same network": lambda: bare_loop(ours, x, y, task.transform, sizes),
    }
    seconds = measure(benchmark, sizes, competitors)
    steps = f"{sizes.local_steps} steps"
    findings += [
        (f"one round of pFedHN, {steps}", milliseconds(seconds["round"])),
        (f"{steps} of a textbook loop", milliseconds(seconds["textbook"])),
        ("  round / textbook loop", ratio(seconds["round"], seconds["textbook"])),
        (f"{steps} of a bare loop, our network", milliseconds(seconds["same network"])),
        ("  round / bare loop, our network", ratio(seconds["round"], seconds["same network"])),
    ]


def test_evaluation(benchmark: Any, sizes: Sizes, federation: Federation, findings: Any) -> None:
    def rounds() -> None:
        for _ in range(sizes.rounds):
            federation.round()

    competitors = {"evaluation": federation.evaluate, "rounds": rounds}
    seconds = measure(benchmark, sizes, competitors)
    images = 2 * sizes.held_out
    findings += [
        (
            f"evaluation, {sizes.clients} clients, {images} images",
            milliseconds(seconds["evaluation"]),
        ),
        (f"{sizes.rounds} rounds", milliseconds(seconds["rounds"])),
        ("  evaluation / rounds", ratio(seconds["evaluation"], seconds["rounds"])),
    ]


def measure(
    benchmark: Any, sizes: Sizes, competitors: dict[str, Callable[[], None]]
) -> dict[str, list[float]]:
    """Lets competitors take turns, each turn in another order, and returns the seconds of each.

    They are in the JSON record too, under ``extra_info``; pytest-benchmark's own columns are those
    of a whole turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    turns = count()

    def turn() -> None:
        start = next(turns) % len(competitors)
        names = list(competitors)
        for name in names[start:] + names[:start]:
            begin = perf_counter()
            competitors[name]()
            seconds[name].append(perf_counter() - begin)

    turn()  # the first one allocates and plans
    for times in seconds.values():
        times.clear()
    benchmark.pedantic(turn, rounds=sizes.repetitions)
    first, *others = seconds
    benchmark.extra_info.update(
        sizes=asdict(sizes),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        seconds=seconds,
        median_of_ratios={
            f"{first} / {name}": median_of_ratios(seconds[first], seconds[name]) for name in others
        },
    )
    return seconds


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median_of_ratios(ours, theirs):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"


def milliseconds(times: Sequence[float]) -> str:
    return f"{1000 * statistics.median(times):.1f} ms"

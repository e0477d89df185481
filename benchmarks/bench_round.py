"""Rounds and evaluations beside what a script does."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

import textbook
from hyperfed.methods import METHODS, fedavg, pfedhn
from hyperfed.methods.parts.complexity import count_flops
from hyperfed.nets.targets import LeNet
from hyperfed.task import Task
from random_images import CLASSES, SHAPE, make_task
from rounds import Rounds
from side_by_side import milliseconds, process_of_its_own, ratio, take_turns


@dataclass(frozen=True)
class Sizes:
    """What is measured: by default CIFAR-10's shapes in the setting of pFedHN, section 5.1."""

    clients: int = 50
    train: int = 40_000
    held_out: int = 10_000  # for validation, and as many for testing
    local_steps: int = 50
    batch: int = 64
    cohort: int = 5  # of PeFLL
    cohorts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    cohort_steps: int = 5  # of each of these
    rounds: int = 5  # that an evaluation is compared with
    repetitions: int = 7


TINY = Sizes(
    clients=3,
    train=60,
    held_out=12,
    local_steps=2,
    batch=8,
    cohort=2,
    cohorts=(1, 2),
    cohort_steps=2,
    rounds=1,
    repetitions=2,
)


@pytest.fixture
def sizes(tiny: bool) -> Sizes:
    return TINY if tiny else Sizes()


@pytest.fixture
def task(sizes: Sizes) -> Task:
    return make_task(sizes.clients, train=sizes.train, held_out=sizes.held_out)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable[..., object]]:
    with process_of_its_own() as call:
        yield call


@contextmanager
def federation(task: Task, method: ModuleType, sizes: Sizes) -> Iterator[Rounds]:
    ours = Rounds(task, method, local_steps=sizes.local_steps, batch_size=sizes.batch)
    yield ours
    ours.engine.close()


def local_training(task: Task, sizes: Sizes, config: Any) -> dict[str, Any]:
    """What a script needs to train as one client does, with the settings of a method."""
    return {
        "x": task.x[task.train[0]],
        "y": task.y[task.train[0]],
        "steps": sizes.local_steps,
        "batch": sizes.batch,
        "lr": config.local_lr,
        "momentum": config.local_momentum,
        "weight_decay": config.local_weight_decay,
        "clip": config.local_clip,
    }


def scripts(net: torch.nn.Module, clients: int, training: Mapping[str, Any]) -> None:
    """Trains as so many clients, one after another."""
    for _ in range(clients):
        textbook.train(net, **training)


@pytest.mark.parametrize("name", ["pfedhn", "pefll"])
def test_round(
    benchmark: Any,
    *,
    sizes: Sizes,
    task: Task,
    name: str,
    elsewhere: Callable[..., object],
    findings: Any,
) -> None:
    method, cohort = METHODS[name], 1 if name == "pfedhn" else sizes.cohort
    net, usual = LeNet(SHAPE, CLASSES, width=16), textbook.Textbook()
    matrix = torch.randn(1024, 1024)
    products = 8

    def multiply() -> None:
        for _ in range(products):
            matrix @ matrix

    with federation(task, method, sizes) as ours:
        training = local_training(task, sizes, ours.config)
        fast = training | {
            "x": training["x"].contiguous(memory_format=torch.channels_last),
            "transform": task.transform,
        }
        competitors: dict[str, Callable[[], object]] = {
            "round": lambda: ours.round(cohort),
            "local steps": lambda: ours.local_steps(cohort),
            "textbook": lambda: elsewhere(scripts, usual, cohort, training),
            "textbook here": lambda: scripts(usual, cohort, training),
            "same network": lambda: scripts(net, cohort, fast),
            "products": multiply,
        }
        seconds = take_turns(benchmark, competitors, sizes.repetitions, sizes=asdict(sizes))
    steps = cohort * sizes.local_steps
    # Three products for each of the forward pass: output, gradient by weights and by inputs, of
    # which the first layer needs none.
    forward, first = flops_of(net, sizes.batch)
    rate = [products * 2 * 1024**3 / s for s in seconds["products"]]
    bound = [steps * (3 * forward - first) / r for r in rate]
    findings += [
        (f"round of {name}, {cohort} clients, {steps} steps", milliseconds(seconds["round"])),
        ("  the same steps of a textbook loop", milliseconds(seconds["textbook"])),
        ("  the same steps of a bare loop, our network", milliseconds(seconds["same network"])),
        ("  their multiplications at the rate of matrix products", milliseconds(bound)),
        ("  its local steps / textbook loop", ratio(seconds["local steps"], seconds["textbook"])),
        (
            "  its local steps / textbook loop in our process",
            ratio(seconds["local steps"], seconds["textbook here"]),
        ),
        ("  round / textbook loop", ratio(seconds["round"], seconds["textbook"])),
        ("  round / bare loop, our network", ratio(seconds["round"], seconds["same network"])),
        ("  round / multiplications", ratio(seconds["round"], bound)),
    ]


def flops_of(net: LeNet, batch: int) -> tuple[int, int]:
    """Returns floating-point operations of a forward pass, and of its first layer."""
    x = torch.zeros(batch, *SHAPE)
    return count_flops(net, x), count_flops(net.conv1, x)


def test_evaluation(benchmark: Any, sizes: Sizes, task: Task, findings: Any) -> None:
    with federation(task, pfedhn, sizes) as ours:

        def rounds() -> None:
            for _ in range(sizes.rounds):
                ours.round(1)

        def script() -> None:
            server = ours.server
            textbook.evaluate(server.hyper_net, server.embeddings.weight, task)

        competitors = {"evaluation": ours.evaluate, "textbook": script, "rounds": rounds}
        seconds = take_turns(benchmark, competitors, sizes.repetitions, sizes=asdict(sizes))
    images = 2 * sizes.held_out
    findings += [
        (
            f"evaluation of pfedhn, {sizes.clients} clients, {images} images",
            milliseconds(seconds["evaluation"]),
        ),
        ("  images a second", f"{images / statistics.median(seconds['evaluation']):,.0f}"),
        ("  a model for every batch of a DataLoader", milliseconds(seconds["textbook"])),
        ("  textbook / evaluation", ratio(seconds["textbook"], seconds["evaluation"])),
        (f"  evaluation / {sizes.rounds} rounds", ratio(seconds["evaluation"], seconds["rounds"])),
    ]


def test_cohort_sizes(benchmark: Any, sizes: Sizes, findings: Any) -> None:
    most = max(sizes.cohorts)
    task = make_task(most, train=most * 2 * sizes.batch, held_out=most)
    short = replace(sizes, local_steps=sizes.cohort_steps)
    with federation(task, fedavg, short) as ours:
        competitors = {str(size): lambda size=size: ours.round(size) for size in sizes.cohorts}
        seconds = take_turns(benchmark, competitors, sizes.repetitions, sizes=asdict(sizes))
    for size in sizes.cohorts:
        each = [s / size / sizes.cohort_steps for s in seconds[str(size)]]
        findings.append((f"fedavg, cohort of {size}: a client's step", milliseconds(each)))

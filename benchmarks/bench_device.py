"""Rounds on a GPU: client after client, all together, and recorded as CUDA graphs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch

from hyperfed.engines.local.graphs import Graphs, recorder_on
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.methods import METHODS
from hyperfed.system.devices import CPU, find_device
from random_images import make_task
from rounds import Rounds
from side_by_side import milliseconds, ratio, take_turns

CUDA = torch.cuda.is_available()


@dataclass(frozen=True)
class Sizes:
    """What is measured: by default CIFAR-10's shapes, and PeFLL's cohort of 45."""

    clients: int = 50
    train: int = 40_000
    held_out: int = 10_000
    local_steps: int = 50
    batch: int = 64
    cohort: int = 45
    repetitions: int = 9


TINY = Sizes(clients=3, train=60, held_out=12, local_steps=2, batch=8, cohort=2, repetitions=2)


@pytest.mark.parametrize("method", ["pfedhn", "pefll"])
def test_device(benchmark: Any, tiny: bool, method: str, findings: Any) -> None:
    if not (CUDA or tiny):
        pytest.skip("NOT MEASURED: there is no GPU")
    device = find_device("cuda") if CUDA else CPU
    sizes = TINY if tiny else Sizes()
    cohort = 1 if method == "pfedhn" else sizes.cohort
    task = make_task(sizes.clients, train=sizes.train, held_out=sizes.held_out)
    engines: dict[str, tuple[type[LoopEngine], dict[str, Any]]] = {
        "loop": (LoopEngine, {}),
        "vmap": (VmappedEngine, {}),
    }
    if CUDA:
        engines["graphs"] = VmappedEngine, {"graphs": Graphs(recorder_on(device))}

    def rounds(name: str) -> Callable[[], None]:
        kind, options = engines[name]
        settings = {"local_steps": sizes.local_steps, "batch_size": sizes.batch}
        ours = Rounds(task, METHODS[method], kind, {"device": device, **options}, **settings)

        def one() -> None:
            ours.round(cohort)
            if CUDA:
                torch.cuda.synchronize()

        one()  # and again by take_turns: a graph is recorded when a step comes up again
        return one

    competitors = {name: rounds(name) for name in engines}
    seconds = take_turns(benchmark, competitors, sizes.repetitions, sizes=asdict(sizes))
    where = torch.cuda.get_device_name() if CUDA else "CPU"
    steps = cohort * sizes.local_steps
    label = f"round of {method}, {cohort} clients, {steps} steps"
    for name in engines:
        findings.append((f"{label}, {where}: {name}", milliseconds(seconds[name])))
    findings += [
        (f"  loop / {name}", ratio(seconds["loop"], seconds[name]))
        for name in engines
        if name != "loop"
    ]

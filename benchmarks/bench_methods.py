"""A round of every method on the engines of this machine, beside its local steps alone.

The bare loop makes as many SGD steps, on batches of the same size, as the round's clients make by
``local_steps``. What a method does beside them (a second model, a head, a hypernetwork) is its own
price, which a change of the engines should not raise.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest

import textbook
from hyperfed.engines.cohort import EngineCohort
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.methods import METHODS
from hyperfed.nets.targets import LeNet
from random_images import CLASSES, SHAPE, make_task
from rounds import Rounds
from side_by_side import milliseconds, ratio, take_turns

ENGINES: dict[str, type[LoopEngine]] = {"loop": LoopEngine, "vmap": VmappedEngine}


@dataclass(frozen=True)
class Sizes:
    """What is measured: by default a small round on CIFAR-10's shapes."""

    clients: int = 8
    train: int = 1_600
    held_out: int = 80
    local_steps: int = 10
    batch: int = 32
    cohort: int = 4
    repetitions: int = 5


TINY = Sizes(clients=3, train=30, held_out=6, local_steps=1, batch=4, cohort=2, repetitions=1)


@pytest.mark.parametrize("method", METHODS)
def test_method(benchmark: Any, tiny: bool, method: str, findings: Any) -> None:
    sizes = TINY if tiny else Sizes()
    task = make_task(sizes.clients, train=sizes.train, held_out=sizes.held_out)
    settings: dict[str, Any] = {"local_steps": sizes.local_steps, "batch_size": sizes.batch}
    ours = {name: Rounds(task, METHODS[method], kind, **settings) for name, kind in ENGINES.items()}
    net, steps = LeNet(SHAPE, CLASSES, width=16), sizes.cohort * sizes.local_steps
    latest: list[EngineCohort] = []

    def bare() -> None:
        x, y = task.x[task.train[0]], task.y[task.train[0]]
        textbook.train(net, x, y, steps=steps, batch=sizes.batch, transform=task.transform)

    def one_round(rounds: Rounds) -> None:
        latest[:] = [rounds.round(sizes.cohort)]

    competitors: dict[str, Callable[[], None]] = {"bare loop": bare}
    competitors |= {name: partial(one_round, rounds) for name, rounds in ours.items()}
    seconds = take_turns(benchmark, competitors, sizes.repetitions, sizes=asdict(sizes))
    exchanges = latest[0].state.exchanges
    travelled = [sum(e.down for e in exchanges), sum(e.up for e in exchanges)]
    benchmark.extra_info["bytes"] = dict(zip(("down", "up"), travelled, strict=True))
    for rounds in ours.values():
        rounds.engine.close()
    findings.append(
        (
            f"{method}, {sizes.cohort} clients: a local step of a bare loop",
            milliseconds([s / steps for s in seconds["bare loop"]]),
        )
    )
    findings += [
        (f"  round on {name} / bare loop", ratio(seconds[name], seconds["bare loop"]))
        for name in ours
    ]
    down, up = (f"{total / 1e6:.1f} MB" for total in travelled)
    findings.append(("  travelled in a round", f"{down} down, {up} up"))

"""What an exchange with a cohort costs on Ray's actors, beside the loop engine with worker threads.

Two actors of one core each and two worker threads of one core each train the same clients for the
same steps, in turns. What Ray adds is what messages cost: one to each actor, and the models there
and back. Nothing here is an assertion: a busy machine makes no test fail.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any

import pytest

from hyperfed import training, trees
from hyperfed.engines.cohort import Engine
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.ray.engine import RayEngine
from hyperfed.federation import Client, Each, step
from hyperfed.training import Sgd, Steps
from hyperfed.trees import Model, Tree
from random_images import make_task
from side_by_side import milliseconds, ratio, take_turns

WORKERS = 2


@dataclass(frozen=True)
class Sizes:
    """What is measured: by default 0.4 MB models of images of CIFAR-10's shape."""

    cohort: int = 10
    examples: int = 400  # of each client
    local_steps: int = 50
    batch: int = 64
    repetitions: int = 9


TINY = Sizes(cohort=4, examples=8, local_steps=1, batch=4, repetitions=2)


class Trainer(Client):
    """Trains what it is sent, or sends it back."""

    @step(like="model")
    def train_model(self, model: Model) -> Tree:
        trained = training.fit(
            self.objective, model, self.batches, Sgd(lr=0.01), trainable=self.parameters
        )
        return dict(trained.model)

    @step(like="model")
    def echo(self, model: Model) -> Tree:
        return dict(model)


@pytest.fixture
def sizes(tiny: bool) -> Sizes:
    return TINY if tiny else Sizes()


@pytest.fixture
def engines(sizes: Sizes) -> Iterator[dict[str, Engine]]:
    if find_spec("ray") is None:
        pytest.skip("NOT MEASURED: pip install -e '.[ray]'")
    held_out = sizes.cohort  # nobody is evaluated here
    task = make_task(sizes.cohort, train=sizes.cohort * sizes.examples, held_out=held_out)
    options: dict[str, Any] = {"seed": 0, "workers": WORKERS, "cores_per_client": 1}
    both: dict[str, Engine] = {
        "ray": RayEngine(task, Trainer, None, **options),
        "loop": LoopEngine(task, Trainer, None, **options),
    }
    yield both
    for engine in both.values():
        engine.close()


@pytest.mark.parametrize("what", ["echo", "train_model"])
def test_exchange(
    benchmark: Any, what: str, sizes: Sizes, engines: dict[str, Engine], findings: Any
) -> None:
    initial = engines["loop"].task.outline().initial()
    models = trees.stack([initial] * sizes.cohort)
    batches = Steps(sizes.local_steps, sizes.batch) if what == "train_model" else None
    numbers = count()

    def exchange(engine: Engine) -> None:
        cohort = engine.cohort(range(sizes.cohort), next(numbers), training=True)
        cohort.ask(getattr(Trainer, what), Each(models), batches=batches)
        engine.commit(cohort)

    competitors = {name: partial(exchange, engine) for name, engine in engines.items()}
    seconds = take_turns(
        benchmark, competitors, sizes.repetitions, sizes=asdict(sizes), workers=WORKERS
    )
    megabytes = trees.count_bytes(initial) / 1e6
    title = f"{what}, {sizes.cohort} clients, {megabytes:.1f} MB each way"
    if batches is not None:
        title += f", {sizes.local_steps} steps"
    findings += [
        (f"{title}: ray, {WORKERS} actors", milliseconds(seconds["ray"])),
        (f"{title}: loop, {WORKERS} threads", milliseconds(seconds["loop"])),
        ("  ray / loop", ratio(seconds["ray"], seconds["loop"])),
    ]

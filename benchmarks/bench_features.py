"""What it saves to compute a frozen beginning once: rounds on features, and on images, in turns.

The network is that of results/adapters: a ResNet-10 with an adapter of its last block. What it
takes to compute the features, once for a whole run, stands beside.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import peft
import pytest
import torch
from torch import nn

from adapter_runs import ResNet
from hyperfed.data.own import Task
from hyperfed.runs import config
from hyperfed.runs.run import Run
from random_images import CLASSES, draw
from side_by_side import milliseconds, ratio, take_turns


@dataclass(frozen=True)
class Sizes:
    """What is measured: clients, all of them in each round, and their images and steps."""

    clients: int = 10
    examples: int = 200
    local_steps: int = 5
    batch: int = 16
    repetitions: int = 7


TINY = Sizes(clients=2, examples=8, local_steps=1, batch=2, repetitions=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    lora = peft.LoraConfig(
        r=4, target_modules=["last.conv1", "last.conv2"], modules_to_save=["head"]
    )
    return peft.get_peft_model(ResNet(CLASSES), lora)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_features_once(
    benchmark: Any, engine: str, *, tiny: bool, findings: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path))
    sizes = TINY if tiny else Sizes()
    x, y, owner = draw(sizes.clients, sizes.examples)
    steps = [f"method.local_steps={sizes.local_steps}", f"method.batch_size={sizes.batch}"]
    rounds = ["rounds=1000", "evaluate_every=1000", "cohort=1.0", f"engine={engine}"]
    settings = config.load("fedavg", [*rounds, *steps])
    competitors = {}
    for name, prefix in (("images", None), ("features", "body")):
        begin = perf_counter()
        task = Task.from_arrays(x, y, client=owner.tolist(), model=network(), prefix=prefix)
        competitors[name] = partial(next, Run(settings, task).train())
    once = perf_counter() - begin
    seconds = take_turns(benchmark, competitors, sizes.repetitions, seconds_once=once)
    findings += [
        (f"{engine}: a round on images", milliseconds(seconds["images"])),
        ("  on features", milliseconds(seconds["features"])),
        ("  images / features", ratio(seconds["images"], seconds["features"])),
        (f"  features of {len(x)} images, once", f"{1000 * once:.0f} ms"),
    ]

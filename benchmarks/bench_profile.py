"""Where a run spends its time: in networks, or around them.

Functions at the borders are timed, each without the others that it calls; what no border covers is
"everything else". One core and one worker, so that the shares add up.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

from hyperfed import training, trees
from hyperfed.methods import pefll, pfedhn
from hyperfed.methods.parts import hypernet_training
from hyperfed.nets.hypernets import MultiHead, SingleOutput
from hyperfed.runs import config, run
from hyperfed.task import Split
from random_images import make_task

ROUNDS = {"pfedhn": 120, "pefll": 30}
COHORT = {"pfedhn": 1, "pefll": 5}
BORDERS: dict[str, list[tuple[Any, str]]] = {
    "local steps": [(training, "fit"), (pefll, "fit")],
    "hypernetwork": [
        (MultiHead, "forward"),
        (SingleOutput, "forward"),
        (hypernet_training, "pull_back"),
        (trees, "pull_back"),
        (nn.utils, "clip_grad_norm_"),
        (torch.optim.SGD, "step"),
        (torch.optim.Adam, "step"),
    ],
    "descriptor network": [
        (pefll.Client, "embed"),
        (pefll.Client, "descriptor_net_gradient"),
    ],
    "models under evaluation": [(pfedhn.Client, "predict"), (pefll.Client, "predict")],
    "data": [(Split, "batch")],
    "the rest of evaluation": [(run, "evaluate")],
    "records": [(run.Run, "_checkpoint"), (run.Run, "_record"), (run.Run, "_finish")],
}
AROUND = {"data", "the rest of evaluation", "records", "everything else"}
"""Parts in which no network computes."""


class Shares:
    """Seconds spent in each part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["everything else"]
        self._since = perf_counter()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, which counts its time for a part when it is called."""

        @wraps(function)
        def within(*arguments: Any, **options: Any) -> Any:
            self.note()
            self._open.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self.note()
                self._open.pop()

        return within

    def note(self) -> None:
        """Counts the time since the last border for the part that was entered there."""
        now = perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


@pytest.fixture(params=ROUNDS)
def started(request: pytest.FixtureRequest, tiny: bool, tmp_path: Path) -> run.Run:
    """A run as users start it, but for one core."""
    method = request.param
    rounds = 2 if tiny else ROUNDS[method]
    keys = [f"rounds={rounds}", "evaluate_every=30", f"cohort={COHORT[method]}"]
    keys += ["engine.workers=1", "engine.cores_per_client=1"]
    keys += ["method.local_steps=2"] if tiny else []
    clients, train, held_out = (5, 50, 10) if tiny else (50, 40_000, 10_000)
    task = make_task(clients, train=train, held_out=held_out)
    return run.Run.start(config.load(method, keys), tmp_path, task)


def test_shares(
    benchmark: Any, started: run.Run, findings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = started.train()
    next(training)  # the first round allocates and imports
    shares = Shares()
    for part, borders in BORDERS.items():
        for owner, function in borders:
            monkeypatch.setattr(owner, function, shares.timed(part, getattr(owner, function)))

    def other_rounds() -> None:
        shares.note()
        shares.seconds.clear()
        for _ in training:
            pass
        shares.note()

    benchmark.pedantic(other_rounds)
    total = sum(shares.seconds.values())
    name = started.config.method
    share = {part: seconds / total for part, seconds in shares.seconds.items()}
    around = sum(share[part] for part in AROUND)
    benchmark.extra_info |= {"share": share, "around networks": around}
    findings += [
        (f"{name}, {started.config.rounds} rounds: {part}", f"{100 * its:.1f} %")
        for part, its in sorted(share.items(), key=lambda item: -item[1])
    ]
    findings.append(("  where no network computes", f"{100 * around:.1f} %"))

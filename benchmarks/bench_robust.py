"""What the bound on replies and the state to go back to cost, of the CPU time of a round.

The time is that of the process, so that what else the machine does matters little: of a whole
round, and in it of a snapshot, of the check of the server's state and of the judgement of the
replies. There is one thread, since several would count the time that they wait for each other.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch

from hyperfed import trees
from hyperfed.data import tasks
from hyperfed.data.tasks import TaskConfig
from hyperfed.engines import cohort as cohorts
from hyperfed.runs import rounds
from hyperfed.runs.config import from_keys
from hyperfed.runs.rollback import Snapshot
from hyperfed.runs.run import Run
from random_images import make_task

PARTS = {
    "state to go back to": (Snapshot, "take"),
    "check of the state": (rounds, "is_finite"),
    "bound on replies": (cohorts, "too_large"),
}
ROUNDS = {"digits": 20, "LeNet": 5}


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "pefll"])
@pytest.mark.parametrize("where", ROUNDS)
def test_what_trust_costs(
    benchmark: Any,
    *,
    method: str,
    where: str,
    tiny: bool,
    findings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spent: dict[str, float] = {}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                spent[part] = spent.get(part, 0.0) + time.process_time() - begin

        return call

    for part, (module, name) in PARTS.items():
        monkeypatch.setattr(module, name, timed(part, getattr(module, name)))
    images = make_task(10, train=2000, held_out=100)
    task = images if where == "LeNet" else tasks.build(TaskConfig(), 0)
    run = Run(from_keys(method, {"rounds": 1000, "evaluate_every": 1000, "cohort": 5}), task)
    shares: list[dict[str, float]] = []
    seconds: list[float] = []

    def one_round() -> None:
        spent.clear()
        begin = time.process_time()
        run._one_round()
        seconds.append(time.process_time() - begin)
        shares.append({part: spent[part] / seconds[-1] for part in PARTS})

    count = 1 if tiny else ROUNDS[where]
    benchmark.pedantic(one_round, rounds=count, warmup_rounds=1)  # which allocates
    shares, seconds = shares[-count:], seconds[-count:]
    together = [sum(share.values()) for share in shares]
    held = sum(leaf.numel() for _, leaf in trees.leaves(run.server.state()))
    run.close()
    benchmark.extra_info.update(
        seconds_of_a_round=median(seconds),
        numbers_of_the_server=held,
        share_of_a_round={part: median(share[part] for share in shares) for part in PARTS},
        together=median(together),
    )
    findings.append(
        (
            f"{method}, {where}: CPU time of a round, numbers the server holds",
            f"{1000 * median(seconds):.0f} ms, {held:,}",
        )
    )
    findings += [(f"  {part}", f"{median(share[part] for share in shares):.2%}") for part in PARTS]
    findings.append(
        (
            "  together",
            f"{median(together):.2%}  ({min(together):.2%} to {max(together):.2%})",
        )
    )

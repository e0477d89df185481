"""What the bound on replies and the state to go back to cost, of the CPU time of a round.

The time is that of the process, all threads together, so that what else the machine does matters
little: of a whole round, and in it of a snapshot, of the check of the server's state and of the
judgement of the replies.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

from hyperfed.data import tasks
from hyperfed.data.tasks import TaskConfig
from hyperfed.engines import cohort as cohorts
from hyperfed.runs import run as runs
from hyperfed.runs.config import from_keys
from hyperfed.runs.rollback import Snapshot
from hyperfed.runs.run import Run
from random_images import make_task

PARTS = ((Snapshot, "take"), (runs, "is_finite"), (cohorts, "too_large"))


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "pefll"])
@pytest.mark.parametrize("where", ["digits", "LeNet"])
def test_what_trust_costs(
    benchmark: Any, method: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = dict.fromkeys([name for _, name in PARTS], 0.0)

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.process_time()
            try:
                return part(*arguments)
            finally:
                spent[name] += time.process_time() - begin

        return call

    for module, name in PARTS:
        monkeypatch.setattr(module, name, timed(name, getattr(module, name)))
    images = make_task(10, train=2000, held_out=100)
    task = images if where == "LeNet" else tasks.build(TaskConfig(), 0)
    run = Run(from_keys(method, {"rounds": 1000, "evaluate_every": 1000, "cohort": 5}), task)
    run._one_round()  # allocates
    spent.update(dict.fromkeys(spent, 0.0))
    begin = time.process_time()
    benchmark.pedantic(run._one_round, rounds=3)
    whole = time.process_time() - begin
    benchmark.extra_info.update(
        share_of_a_round={name: seconds / whole for name, seconds in spent.items()},
        together=sum(spent.values()) / whole,
    )
    run.close()

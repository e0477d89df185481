"""Starts a run with many clients and prints what that took; see bench_scale.py.

``python scale.py METHOD CLIENTS [KEY=VALUE ...]`` prints {"start": seconds from arrays to the end
of the first round, "mebibytes": resident memory beyond that of the arrays, "round": seconds of a
later round, the median of five}.
"""

import json
import os
import statistics
import sys
from pathlib import Path
from time import perf_counter

from hyperfed.data.own import Task
from hyperfed.nets.targets import LeNet
from hyperfed.runs import config
from hyperfed.runs.run import Run
from random_images import CLASSES, draw

SHAPE = (1, 28, 28)

EXAMPLES = 6
"""Of each client: enough for one of each split."""

LATER = 5
"""Rounds after the first, but for the last, which evaluates."""


def resident() -> float:
    """Returns the resident memory of this process in MiB (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(method: str, clients: int, *keys: str) -> None:
    x, y, owner = draw(clients, EXAMPLES, SHAPE)
    short = [f"rounds={2 + LATER}", "cohort=5", "method.local_steps=5", "method.batch_size=4"]
    settings = config.load(method, [*short, *keys])
    before, begin = resident(), perf_counter()
    task = Task.from_arrays(x, y, client=owner.tolist(), model=LeNet(SHAPE, CLASSES))
    del x, y  # the task may have copied them
    rounds = Run(settings, task).train()
    next(rounds)
    start = perf_counter() - begin
    seconds = []
    for _ in range(LATER):
        begin = perf_counter()
        next(rounds)
        seconds.append(perf_counter() - begin)
    found = {
        "start": start,
        "mebibytes": resident() - before,
        "round": statistics.median(seconds),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

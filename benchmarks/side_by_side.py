"""Competitors in turns: how every benchmark here measures.

Whatever else the machine does slows all of them alike, so what is reported is the median of the
ratios of one turn. Nothing is an assertion: a busy machine makes no test fail.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from time import perf_counter
from typing import Any

import torch

Seconds = dict[str, list[float]]
"""{competitor: seconds of each turn}."""


def take_turns(
    benchmark: Any, competitors: Mapping[str, Callable[[], object]], repetitions: int, **extra: Any
) -> Seconds:
    """Lets competitors take turns, each turn in another order, and returns the seconds of each.

    They are in the JSON record too, under ``extra_info``, with the ratios of the first to each of
    the others; pytest-benchmark's own columns are those of a whole turn.
    """
    seconds: Seconds = {name: [] for name in competitors}
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
    benchmark.pedantic(turn, rounds=repetitions)
    first, *others = seconds
    benchmark.extra_info.update(
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        seconds=seconds,
        median_of_ratios={
            f"{first} / {name}": median_of_ratios(seconds[first], seconds[name]) for name in others
        },
        **extra,
    )
    return seconds


@contextmanager
def process_of_its_own() -> Iterator[Callable[..., object]]:
    """Yields what calls a function, with its arguments, in another process and waits for it.

    A script is measured there: an engine has the memory of its whole process kept for the next
    step (``allocation.py``), and a script beside it would have that for nothing. It has as many
    threads as this process. It starts with the first call, in the turn that does not count, and to
    reach it takes a thousandth of a second.
    """
    spawn, threads = get_context("spawn"), torch.get_num_threads()
    with ProcessPoolExecutor(1, spawn, torch.set_num_threads, (threads,)) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{median_of_ratios(ours, theirs):.2f}  ({min(ratios):.2f} to {max(ratios):.2f})"


def milliseconds(times: Sequence[float]) -> str:
    return f"{1000 * statistics.median(times):.1f} ms"

"""CUDA graphs: the kernels of a step, recorded once and then launched together.

A small network's kernels take less time than Python takes to launch them. A recorded step launches
them all at once, but from and to the same memory every time, so what goes in and comes out is
copied.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.trees import Tree

log = logging.getLogger(__name__)

Replay: TypeAlias = Callable[[], None]
"""Computes again, from the inputs' memory to the outputs'."""

Recorder: TypeAlias = Callable[[Callable[[], Tree]], tuple[Tree, Replay]]
"""Runs what it is given, and returns its outputs and how to compute them again."""

WARM_UP = 2
"""Runs before a recording, in which libraries choose kernels and allocate what they keep."""


def recorder_on(device: torch.device) -> Recorder:
    """Returns what records on a GPU; see PyTorch's notes on CUDA graphs.

    What waits for the GPU cannot be recorded, and a recording that breaks off leaves PyTorch's
    allocator unusable. So the last warm-up refuses to wait, and raises before anything is recorded.
    """
    pool = torch.cuda.graph_pool_handle()  # one for all recordings: they are played one by one
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], Tree]) -> tuple[Tree, Replay]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            here = torch.cuda.current_stream()
            aside.wait_stream(here)
            try:
                with torch.cuda.stream(aside):
                    for _ in range(WARM_UP):
                        compute()
                    with no_waiting():
                        compute()
            finally:
                here.wait_stream(aside)
            with torch.cuda.stream(aside), torch.cuda.graph(graph, pool=pool, stream=aside):
                outputs = compute()
        return outputs, graph.replay

    return record


@contextmanager
def no_waiting() -> Iterator[None]:
    """Has what waits for the GPU raise, but for what PyTorch says of its own debugging mode."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class Graphs:
    """Functions of trees of tensors that are recorded where they come up again.

    Args:
        record: how.
        most: functions that are recorded, the first that come up again; to record takes many times
            as long as to compute, so none makes room for another.
    """

    def __init__(self, record: Recorder, *, most: int = 32) -> None:
        self._record, self._most = record, most
        self._calls: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._refused: set[Hashable] = set()

    def run(
        self,
        key: Hashable,
        inputs: Tree,
        function: Callable[[Tree], Tree],
        general: Callable[[Tree], Tree],
    ) -> Tree:
        """Returns ``function(inputs)``, from a recording if there is one.

        Args:
            key: all calls of one key have inputs of one structure, and launch the same.
            inputs: on the GPU.
            function: a function of the inputs alone, and of what else this call is about.
            general: the same, but it raises where the rest matters. This one is recorded; if it
                raises or cannot be recorded, the calls of this key are computed as they come.
        """
        self._calls[key] += 1
        new = key not in self._recorded and key not in self._refused
        if new and self._calls[key] > 1 and len(self._recorded) < self._most:
            self._try(key, inputs, general)
        recorded = self._recorded.get(key)
        return function(inputs) if recorded is None else recorded.replay(inputs)

    def counts(self) -> dict[str, int]:
        """Returns how many functions are recorded now, and how many are computed as they come."""
        return {"recorded": len(self._recorded), "refused": len(self._refused)}

    def clear(self) -> bool:
        """Gives back the memory of all recordings; returns whether there were any."""
        there = bool(self._recorded)
        self._refused |= set(self._recorded)
        self._recorded.clear()
        return there

    def _try(self, key: Hashable, inputs: Tree, general: Callable[[Tree], Tree]) -> None:
        try:
            self._recorded[key] = _Recorded(general, inputs, self._record)
        except Exception as error:  # then it is computed as it comes, which shows what is wrong
            self._refused.add(key)
            log.info("not recorded as a CUDA graph: %s: %s", type(error).__name__, error)


class _Recorded:
    """A function that computes from and to memory of its own."""

    def __init__(self, function: Callable[[Tree], Tree], inputs: Tree, record: Recorder) -> None:
        self._inputs = trees.clone(inputs)
        self._outputs, self._again = record(lambda: function(self._inputs))

    def replay(self, inputs: Tree) -> Tree:
        """Returns the function's outputs for other inputs."""
        trees.tree_map(Tensor.copy_, self._inputs, inputs)
        self._again()
        return trees.clone(self._outputs)

"""CUDA graphs: the kernels of a step, recorded once and then launched together.

A small network's kernels take less time than Python takes to launch them. A recorded step launches
them all at once, but from and to the same memory every time, so what goes in and comes out is
copied.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
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

WARM_UP = 3
"""Runs before a recording, in which libraries choose kernels and allocate what they keep."""


def record_on_cuda(compute: Callable[[], Tree]) -> tuple[Tree, Replay]:
    """Records on the current GPU; see PyTorch's notes on CUDA graphs."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            compute()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()
    return outputs, graph.replay


class Graphs:
    """Functions of trees of tensors that are recorded where they come up again.

    Args:
        record: how.
        most: recordings that are kept, the latest used; each keeps the memory of all that its
            function computes on the way.
        after: with which call of a function it is recorded.
    """

    def __init__(self, record: Recorder = record_on_cuda, *, most: int = 8, after: int = 2) -> None:
        self._record, self._most, self._after = record, most, after
        self._calls: Counter[Hashable] = Counter()
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
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
        if key not in self._recorded and key not in self._refused:
            if self._calls[key] < self._after:
                return function(inputs)
            self._try(key, inputs, general)
        recorded = self._recorded.get(key)
        if recorded is None:
            return function(inputs)
        self._recorded.move_to_end(key)
        return recorded.replay(inputs)

    def _try(self, key: Hashable, inputs: Tree, general: Callable[[Tree], Tree]) -> None:
        try:
            self._recorded[key] = _Recorded(general, inputs, self._record)
        except Exception as error:  # then it is computed as it comes, which shows what is wrong
            self._refused.add(key)
            log.info("not recorded as a CUDA graph: %s: %s", type(error).__name__, error)
        while len(self._recorded) > self._most:
            self._recorded.popitem(last=False)


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

"""Every method on a GPU: the numbers of the CPU, client by client, together, as CUDA graphs."""

import sys
from typing import Any

import pytest
import torch

from hyperfed.engines.local.graphs import Graphs, recorder_on
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.methods import METHODS
from toys import both, snapshot

CUDA = torch.device("cuda")


def recorded(*arguments: Any, **options: Any) -> VmappedEngine:
    return VmappedEngine(*arguments, graphs=Graphs(recorder_on(CUDA)), **options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT TESTED: there is no GPU")
@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine, recorded])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_gpu_gives_the_numbers_of_the_cpu(method: str, kind: Any) -> None:
    if "pretended" in sys.modules:  # PyTorch's gradients know one accelerator in a process
        pytest.skip(
            "NOT TESTED: the stand-in for a GPU is in this process; run this file by itself"
        )
    here, there = both(method, kind, CUDA)
    for number, clients in enumerate(([0, 1, 2], [1, 2], [0, 1, 2])):
        for each in (here, there):
            each.round(clients, number)
    torch.testing.assert_close(snapshot(there), snapshot(here), rtol=1e-6, atol=1e-8)

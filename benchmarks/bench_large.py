"""Memory and rounds where targets are large, each case in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLIENTS, FEW = 20, 2
CHUNKS = ("method.hyper_net=chunks", "method.chunk=10000")
CASES = {
    "pfedhn, heads of rank 4": ("pfedhn", "method.head_rank=4"),
    "pfedhn, chunks": ("pfedhn", *CHUNKS),
    "pefll, chunks": ("pefll", *CHUNKS),
}
"""Hypernetworks whose size does not follow the target's."""


@pytest.mark.parametrize("case", CASES)
def test_large_targets(benchmark: Any, case: str, tiny: bool, findings: Any) -> None:
    method, *keys = CASES[case]
    script, clients = Path(__file__).with_name("large.py"), FEW if tiny else CLIENTS
    for target in ("lenet",) if tiny else ("resnet18", "vit_ti"):
        command = [sys.executable, str(script), method, target, str(clients), *keys]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        measured = benchmark.extra_info[target] = json.loads(said)
        findings += [
            (
                f"{case}, {target}, {clients} clients: numbers of target and hypernetwork",
                f"{measured['target']:,}, {measured['hypernetwork']:,}",
            ),
            (
                "  memory of the process, a round of five clients",
                f"{measured['gibibytes']:.1f} GiB, {measured['round']:.1f} s",
            ),
        ]
    benchmark.pedantic(lambda: None)  # what is measured is in the record's extra_info

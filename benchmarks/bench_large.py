"""Memory and rounds where targets are large, each case in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
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

FROZEN, MANY = "frozen_vit_s", 100


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


@pytest.mark.parametrize("engine", ["loop", "ray", "flower"])
def test_one_copy_of_a_frozen_backbone(
    benchmark: Any, engine: str, tiny: bool, findings: Any
) -> None:
    of = {"ray": "ray", "flower": "flwr"}.get(engine)
    if of and find_spec(of) is None:
        pytest.skip(f"NOT MEASURED: pip install -e '.[{engine}]'")
    clients = FEW if tiny else MANY
    script = str(Path(__file__).with_name("frozen.py"))
    command = [sys.executable, script, engine, FROZEN, str(clients)]
    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    said = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    ).stdout
    measured = benchmark.extra_info[engine] = json.loads(said)
    each = ", ".join(f"{name} {size:.2f}" for name, size in measured["processes"].items())
    findings += [
        (
            f"{engine}: {clients} clients of a frozen backbone, its numbers, those trained",
            f"{measured['target']:,}, {measured['trained']:,}",
        ),
        ("  GiB beside the data", each),
        ("  a round of all of them", f"{measured['round']:.1f} s"),
    ]
    benchmark.pedantic(lambda: None)  # what is measured is in the record's extra_info

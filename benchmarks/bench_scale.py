"""Start-up, memory and rounds with few and very many clients, each case in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLIENTS = (100, 10_000, 100_000)
FEW = (40,)
CASES = {
    "fedavg": (),
    "pfedhn": ("method.embedding_size=8",),
    "pefll": ("method.descriptor_size=100",),
}
"""Method -> settings: lengths that do not grow with the number of clients, as the default does."""


@pytest.mark.parametrize("method", CASES)
def test_clients(benchmark: Any, method: str, tiny: bool, findings: Any) -> None:
    for clients in FEW if tiny else CLIENTS:
        command = [sys.executable, str(Path(__file__).with_name("scale.py")), method, str(clients)]
        said = subprocess.run(
            [*command, *CASES[method]], check=True, capture_output=True, text=True
        ).stdout
        measured = json.loads(said)
        benchmark.extra_info[str(clients)] = measured
        findings += [
            (
                f"{method}, {clients} clients: start-up, memory beside the data",
                f"{measured['start']:.2f} s, {measured['mebibytes']:.0f} MiB",
            ),
            ("  a round of five clients", f"{1000 * measured['round']:.0f} ms"),
        ]
    benchmark.pedantic(lambda: None)  # what is measured is in the record's extra_info

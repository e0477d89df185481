"""What an exchange costs over Flower: a message to each of two sites and back, with TLS.

The sites are processes of this machine and start one more for every message, which is most of what
an exchange takes. A long run less a short one leaves the rounds between; FedAvg's have one exchange
each. The same rounds in a loop stand beside them.
"""

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hyperfed.runs import config
from hyperfed.runs.run import Run

if find_spec("flwr") is None:
    pytest.skip("NOT MEASURED: pip install 'hyperfed[flower]'", allow_module_level=True)

from engines.flower.deployment import Deployment, deployed, write_node_key


@dataclass(frozen=True)
class Sizes:
    """Rounds of the two runs, and clients of each of the two sites."""

    short: int = 2
    long: int = 12
    clients: int = 10


TINY = Sizes(short=1, long=2, clients=2)


def federation(deployment: Deployment, clients: int) -> None:
    """Starts the SuperLink and two registered SuperNodes."""
    deployment.superlink()
    for site in range(2):
        name, first = f"node{site}", site * clients
        write_node_key(deployment.folder / name)
        assert deployment.flwr("supernode", "register", f"{name}.pub", "trial")["success"]
        node_config = f"clients='{first}-{first + clients - 1}' state='state{site}'"
        deployment.secure(name, node_config, name)


def keys(sizes: Sizes, rounds: int) -> list[str]:
    """Rounds of all clients, with little to compute, and one evaluation at the end."""
    count = 2 * sizes.clients
    return [
        f"rounds={rounds}",
        f"evaluate_every={rounds}",
        f"cohort={count}",
        f"task.clients={count}",
        "task.novel=0.0",
        "task.partition=iid",
        "method.local_steps=5",
    ]


def seconds_over_flower(deployment: Deployment, sizes: Sizes, rounds: int) -> float:
    name = f"run{rounds}"
    engine = ["engine=flower", f"engine.superlink={deployment.address}", "engine.sites=2"]
    command = ["run", "fedavg", "--json", *keys(sizes, rounds), *engine]
    process = deployment.hyperfed(name, *command, "engine.root_certificates=ca.crt")
    assert process.wait(timeout=1500) == 0, deployment.log(name)
    said = deployment.log(name)
    return float(json.loads(said[said.index("{") :])["summary"]["seconds"])


def seconds_in_a_loop(sizes: Sizes, rounds: int) -> float:
    run = Run(config.load("fedavg", [*keys(sizes, rounds), "engine=loop"]))
    for _ in run.train():
        pass
    run.close()
    return float(run.summary["seconds"])


def test_exchange(benchmark: Any, tiny: bool, tmp_path: Path, findings: Any) -> None:
    sizes = TINY if tiny else Sizes()
    found: dict[str, float] = {}

    def measure() -> None:
        with deployed(tmp_path) as deployment:
            federation(deployment, sizes.clients)
            over = [seconds_over_flower(deployment, sizes, n) for n in (sizes.short, sizes.long)]
        seconds_in_a_loop(sizes, sizes.short)  # imports
        loop = [seconds_in_a_loop(sizes, n) for n in (sizes.short, sizes.long)]
        rounds = sizes.long - sizes.short
        found["flower"], found["loop"] = ((long - short) / rounds for short, long in (over, loop))

    benchmark.pedantic(measure)
    benchmark.extra_info.update(seconds_of_a_round=found, sizes=asdict(sizes))
    title = f"a round of fedavg, {2 * sizes.clients} clients, one exchange"
    findings += [
        (f"{title}: flower, 2 sites", f"{found['flower']:.2f} s"),
        (f"{title}: loop", f"{1000 * found['loop']:.1f} ms"),
    ]

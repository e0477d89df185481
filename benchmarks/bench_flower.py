"""What an exchange costs over Flower: a message to each of two sites and back, with TLS.

The sites are processes of this machine: nodes of ours, which fork for a message, and beside them
Flower's own, which start a process. FedAvg's rounds have one exchange each, with little to compute;
what one takes is the time between two messages' arrivals at a site. The same rounds in a loop stand
beside them.
"""

import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hyperfed.runs import config
from hyperfed.runs.run import Run

if find_spec("flwr") is None:
    pytest.skip("NOT MEASURED: pip install -e '.[flower]'", allow_module_level=True)

from engines.flower.deployment import Deployment, deployed
from processes import descendants, name_of


@dataclass(frozen=True)
class Sizes:
    """Rounds with nodes of ours and with Flower's, after which memory is read, and clients."""

    ours: int = 50
    flowers: int = 4
    early: int = 10
    clients: int = 10


TINY = Sizes(ours=3, flowers=2, early=2, clients=2)


class Arrivals(threading.Thread):
    """Notes when each message of training arrives at site 0, and what its node holds in memory."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(daemon=True)
        self.deployment, self.done = deployment, threading.Event()
        self.seconds: list[float] = []
        self.megabytes: list[float] = []

    def run(self) -> None:
        before = self.latest()
        while not self.done.wait(0.005):
            if (now := self.latest()) > before:
                before = now
                self.seconds.append(now / 1e9)
                self.megabytes.append(megabytes(self.deployment.processes["node0"].pid))

    def latest(self) -> int:
        state = self.deployment.folder / "state0"
        return max((p.stat().st_mtime_ns for p in state.glob("run-*/latest.json")), default=0)

    def rounds(self, count: int) -> list[float]:
        """Seconds of each round: from a message's arrival to the next one's."""
        times = self.seconds[: count + 1]
        return [later - earlier for earlier, later in pairwise(times)]


def megabytes(node: int) -> float:
    """Returns what a node and its zygote hold, without the processes that come and go."""
    parts = [
        node,
        *(p for p in descendants(node) if "forkserver" in name_of(p) and parent(p, node)),
    ]
    return sum(resident(part) for part in parts)


def parent(pid: int, of: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == of
    except OSError:  # it has just ended
        return False


def resident(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


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


def over_flower(folder: Path, sizes: Sizes, rounds: int, *, ours: bool) -> Arrivals:
    """Runs rounds over a federation of its own."""
    folder.mkdir()
    with deployed(folder) as deployment:
        deployment.superlink()
        for site in range(2):
            name, first = f"node{site}", site * sizes.clients
            clients, state = f"{first}-{first + sizes.clients - 1}", f"state{site}"
            deployment.register(name)
            if ours:
                deployment.node(name, "--clients", clients, "--state", state)
            else:
                deployment.secure(name, f"clients='{clients}' state='{state}'", name)
        arrivals = Arrivals(deployment)
        arrivals.start()
        engine = ["engine=flower", f"engine.superlink={deployment.address}", "engine.sites=2"]
        command = ["run", "fedavg", "--json", *keys(sizes, rounds), *engine]
        process = deployment.hyperfed("run", *command, "engine.root_certificates=ca.crt")
        assert process.wait(timeout=1500) == 0, deployment.log("run")
        summary = json.loads(deployment.log("run")[deployment.log("run").index("{") :])["summary"]
        arrivals.done.set()
        arrivals.join()
        assert summary["rounds"] == rounds
    return arrivals


def seconds_in_a_loop(sizes: Sizes, rounds: int) -> float:
    run = Run(config.load("fedavg", [*keys(sizes, rounds), "engine=loop"]))
    begin = time.perf_counter()
    for _ in run.train():
        pass
    run.close()
    return (time.perf_counter() - begin) / rounds


def test_exchange(benchmark: Any, tiny: bool, tmp_path: Path, findings: Any) -> None:
    sizes = TINY if tiny else Sizes()
    found: dict[str, Any] = {}

    def measure() -> None:
        warm = over_flower(tmp_path / "ours", sizes, sizes.ours, ours=True)
        cold = over_flower(tmp_path / "flowers", sizes, sizes.flowers, ours=False)
        seconds_in_a_loop(sizes, 2)  # imports
        found.update(
            ours=warm.rounds(sizes.ours),
            flowers=cold.rounds(sizes.flowers),
            loop=seconds_in_a_loop(sizes, sizes.ours),
            megabytes=[warm.megabytes[sizes.early - 1], warm.megabytes[sizes.ours - 1]],
        )

    benchmark.pedantic(measure)
    benchmark.extra_info.update(found, sizes=asdict(sizes))
    ours, flowers = found["ours"], statistics.median(found["flowers"])
    median, (early, late) = statistics.median(ours), found["megabytes"]
    title = f"a round of fedavg, {2 * sizes.clients} clients, one exchange"
    findings += [
        (
            f"{title}: nodes of ours, {len(ours)} in a row",
            f"{median:.2f} s (worst {max(ours):.2f})",
        ),
        (f"{title}: Flower's nodes", f"{flowers:.2f} s"),
        (f"{title}: ours / Flower's", f"{median / flowers:.3f}"),
        (f"{title}: loop", f"{1000 * found['loop']:.1f} ms"),
        (
            f"memory of a node after round {sizes.early} and {sizes.ours}",
            f"{early:.0f} and {late:.0f} MB",
        ),
    ]

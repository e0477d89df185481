"""Trains the last layer of a frozen backbone on an engine and prints what that took of memory.

``python frozen.py ENGINE TARGET CLIENTS [KEY=VALUE ...]``, of which ENGINE is loop, ray or flower,
prints {"target": its parameters, "trained": those that are trained, "processes": {name: GiB beyond
the data and the code that is loaded; of an actor, all of its memory}, "round": seconds of a round}.
All clients take part in each round. On flower they are at one site, a process of its own, which is
sent the backbone.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from pydantic import TypeAdapter

from hyperfed import trees
from hyperfed.data.own import Task
from hyperfed.data.roster import Introduction, RemoteTask, enrol
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.engines.flower.sites import HELLO, Link
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig
from large import TARGETS
from processes import descendants, name_of
from random_images import draw

METHOD, EXAMPLES, ROUNDS = "pfedhn", 6, 2
MODES = ("cohort=1.0", f"rounds={ROUNDS}", f"evaluate_every={ROUNDS}", "method.start=target")
STEPS = ("method.local_steps=1", "method.batch_size=4")


def gibibytes(what: str, pid: int | None = None) -> float:
    """Returns what /proc says of a process's memory: VmRSS is now, VmHWM the most so far."""
    status = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(what)) / 2**20


def serve(connection: Connection, target: str, clients: int, settings: RunConfig) -> None:
    """Is a site whose backbone has other weights, until it is told to say its memory."""
    (x, y, owner), before = draw(clients, EXAMPLES), gibibytes("VmRSS")
    task = Task.from_arrays(x, y, client=owner.tolist(), model=TARGETS[target], seed=1)
    client = METHODS[METHOD].Client
    with tempfile.TemporaryDirectory() as state:
        site = Site(
            Shard(task, range(clients)), Path(state), client, settings.settings, seed=settings.seed
        )
        connection.send(site.source.introduce())
        while content := connection.recv_bytes():
            connection.send_bytes(site.handle(content))
    connection.send(gibibytes("VmHWM") - before)


class OneSite(Link):
    """The way to the one site.

    Args:
        connection: to its process.
        introduction: what it has said of itself.
    """

    def __init__(self, connection: Connection, introduction: Introduction) -> None:
        self.connection, self.introduction = connection, introduction

    def nodes(self) -> dict[int, str]:
        """Returns the site's node, which has no key."""
        return {1: ""}

    def exchange(
        self,
        kind: str,
        contents: Mapping[int, bytes],
        timeout: float,
        most: Mapping[int, int],
    ) -> dict[int, bytes | Exception]:
        """Sends a message and waits for the answer."""
        if kind == HELLO:
            return {1: TypeAdapter(Introduction).dump_json(self.introduction)}
        self.connection.send_bytes(contents[1])
        return {1: self.connection.recv_bytes()}


def main(engine: str, target: str, clients: int, *keys: str) -> None:
    settings = config.load(METHOD, [*MODES, *STEPS, f"engine={engine}", *keys])
    (x, y, owner), before = draw(clients, EXAMPLES), gibibytes("VmRSS")
    task = Task.from_arrays(x, y, client=owner.tolist(), model=TARGETS[target])
    network = task.models["base"]
    here, there = multiprocessing.Pipe()
    if engine == "flower":
        spawn = multiprocessing.get_context("spawn")
        spawn.Process(target=serve, args=(there, target, clients, settings), daemon=True).start()
        introduction: Introduction = here.recv()
        roster = enrol([introduction], run=1, sizes=task.models)
        task = RemoteTask.of(roster, task.models, "random", OneSite(here, introduction))
    run = Run(settings, task)
    rounds = run.train()
    begin = perf_counter()
    next(rounds)
    seconds = perf_counter() - begin
    for _ in rounds:
        pass  # the last one evaluates
    processes = {"server": gibibytes("VmHWM") - before}
    actors = [pid for pid in descendants(os.getpid()) if name_of(pid).startswith("ray::Worker")]
    for number, pid in enumerate(sorted(actors)):
        processes[f"actor {number}"] = gibibytes("VmHWM", pid)
    if engine == "flower":
        here.send_bytes(b"")
        processes["site"] = here.recv()
    run.close()
    found = {
        "target": sum(value.numel() for value in network.parameters()),
        "trained": sum(value.numel() for value in trees.parameters_of(network).values()),
        "processes": processes,
        "round": seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])

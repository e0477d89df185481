"""A real federation on this host: TLS, node authentication, one process for each part.

All tests share a SuperLink, what starts its runs, and two nodes. The runs are as short as they can
be.
"""

import fcntl
import json
import os
import signal
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from engines.flower.deployment import (
    Deployment,
    deployed,
    members,
    until,
    write_node_key,
)
from engines.flower.forking import Forking
from hyperfed.data import tasks
from processes import await_end, descendants, linux, listening

pytest.importorskip("flwr")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment"), linux]

LOOPBACK = "0100007F"
SITES = (range(10), range(10, 20))
NEWCOMER = 20
RESTART = 5.0
"""Seconds between two starts of a node."""
LONGEST = 1500.0
"""Seconds after which a run has failed; a quiet machine takes half a minute."""


def write_data(folder: Path) -> None:
    """Writes the data of two sites with ten clients each, and of a newcomer: digits."""
    task = tasks.build(tasks.TaskConfig("digits", clients=NEWCOMER + 1, novel=0.0), 0)

    def save(path: Path, clients: Any, **more: Any) -> None:
        rows, names, split = [], [], []
        for client in clients:
            for part in ("train", "val", "test"):
                own = getattr(task, part)[client]
                rows.append(own)
                names += [f"{client:02d}"] * len(own)
                split += [part] * len(own)
        every = np.concatenate([own.numpy() for own in rows])
        x, y = task.x.numpy()[every], task.y.numpy()[every]
        np.savez(path, x=x, y=y, client=np.array(names), split=np.array(split), classes=10)

    for site, clients in enumerate(SITES):
        save(folder / f"site{site}.npz", clients)
    save(folder / "newcomer.npz", [NEWCOMER])


def site(number: int, state: str = "") -> tuple[str, ...]:
    data, state = f"site{number}.npz", state or f"state{number}"
    return ("--data", data, "--state", state, "--site", f"site{number}")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink, what starts its runs, and two registered nodes; none of them is left."""
    with deployed(tmp_path_factory.mktemp("federation"), Forking) as deployment:
        write_data(deployment.folder)
        deployment.superlink("--isolation", "process", "--database", ":flwr-in-memory:")
        deployment.superexec()
        for number in range(2):
            deployment.register(f"node{number}")
            deployment.node(f"node{number}", *site(number))
        for name in ("node0", "node1"):
            until(lambda name=name: "connected as node" in deployment.log(name), f"{name}'s start")
        yield deployment
    assert deployment.alive() == []


def start(deployment: Deployment, name: str, method: str, *settings: str, sites: int = 2) -> Any:
    return deployment.hyperfed(
        name, "run", method, "--json", "--out", "runs", "cohort=1.0", "method.local_steps=5",
        "engine=flower", f"engine.superlink={deployment.address}", f"engine.sites={sites}",
        "engine.root_certificates=ca.crt", "engine.timeout=300", *settings,
    )  # fmt: skip


def result(deployment: Deployment, name: str) -> tuple[Any, Any]:
    """Waits for a run; returns what it printed, and its evaluation on test data."""
    try:
        code = deployment.processes[name].wait(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        code = None
    log = deployment.log(name)
    assert code == 0, log + deployment.log("superexec")[-3000:]
    said = json.loads(log[log.index("{") :])
    lines = (deployment.folder / said["folder"] / "metrics.jsonl").read_text().splitlines()
    return said, next(e for e in map(json.loads, lines) if e["split"] == "test")


def runs(deployment: Deployment, number: int) -> set[Path]:
    return set((deployment.folder / f"state{number}").glob("run-*"))


@contextmanager
def held(deployment: Deployment, number: int, before: set[Path]) -> Iterator[None]:
    """Keeps what a site is asked in a new run waiting."""
    (run,) = until(
        lambda: {run for run in runs(deployment, number) - before if (run / "lock").exists()},
        "the run's first message",
        LONGEST,
    )
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def waiting(deployment: Deployment, number: int) -> int:
    """Returns the process of a message that is held, which will come."""

    def found() -> list[int]:
        below = descendants(deployment.processes[f"node{number}"].pid)
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        return [int(row[5]) for row in rows if row[1] == "->" and int(row[5]) in below]

    return int(until(found, "a message that waits", LONGEST)[0])


def test_pefll_over_tls_with_authenticated_nodes(federation: Deployment) -> None:
    folder = federation.folder
    write_node_key(folder / "stranger")
    federation.node("stranger", *site(0, state="stranger-state"))
    place = ("--superlink", federation.address, "--insecure")
    federation.hyperfed("plain", "node", *site(0, state="plain-state"), *place)
    settings = ("rounds=2", "evaluate_every=2", "method.delayed_gradient=true")
    start(federation, "pefll", "pefll", *settings)

    said, test = result(federation, "pefll")
    summary = said["summary"]
    assert (summary["engine"], summary["sites"], summary["rounds"]) == ("flower", 2, 2)
    assert summary["message_bytes_down"] > summary["bytes_down"] / 10
    assert test["lost"] == []
    assert all(count > 0 for count in test["count"])
    assert len(test["clients"]) == 20

    # Each site has the models of its clients, by its strict policy, and nobody else has.
    for number in range(2):
        assert len([*folder.glob(f"state{number}/models/run-*/*.safetensors")]) == 10
    assert not [*(folder / said["folder"]).rglob("models")]

    # Whoever is not registered, or does not encrypt, had no part in it.
    nodes = federation.flwr("supernode", "list", "trial")["nodes"]
    assert len([node for node in nodes if node["status"] == "online"]) == 2
    assert not [*folder.glob("stranger-state/run-*"), *folder.glob("plain-state/run-*")]
    assert federation.processes["stranger"].wait(timeout=LONGEST) == 2
    assert "must take this node, but refuses it" in federation.log("stranger")
    assert federation.processes["plain"].poll() is None  # and tries again
    for outsider in ("stranger", "plain"):
        assert "connected as node" not in federation.log(outsider)
    assert listening({*federation.alive()}) == {LOOPBACK}
    federation.end("plain")

    # A newcomer's model is made from the run's records, without any site.
    out, record = folder / "model.safetensors", folder / said["folder"]
    newcomer = federation.hyperfed(
        "newcomer", "personalize", str(record), "--data", "newcomer.npz", "--out", str(out)
    )
    assert newcomer.wait(timeout=300) == 0, federation.log("newcomer")
    config = tomllib.loads((record / "config.toml").read_text())
    assert config["engine"]["name"] == "flower"
    model = safetensors.torch.load(out.read_bytes())
    assert all(bool(leaf.isfinite().all()) for leaf in model.values())

    # At a site of its own its model is made there, and nothing of the run changes.
    before = {path: path.read_bytes() for path in record.rglob("*") if path.is_file()}
    federation.register("late")
    late = ("--data", "newcomer.npz", "--state", "late-state", "--site", "late")
    federation.node("late", *late)
    asked = federation.hyperfed("served", "serve", str(record), "engine.timeout=300", "--json")
    assert asked.wait(timeout=LONGEST) == 0, federation.log("served") + federation.log("late")
    told = federation.log("served")
    outcomes = {it["client"]: it for it in json.loads(told[told.index("[") :])}
    assert outcomes["late/20"]["model"] == "kept"
    assert 0 <= outcomes["late/20"]["value"] <= 1
    assert {it["model"] for name, it in outcomes.items() if name != "late/20"} == {"known"}
    assert len(outcomes) == 21
    (kept,) = folder.glob("late-state/models/run-*/*.safetensors")
    assert safetensors.torch.load(kept.read_bytes()).keys() == model.keys()
    assert all(path.read_bytes() == content for path, content in before.items())
    federation.end("late")


def test_a_killed_step_costs_one_message(federation: Deployment) -> None:
    """What a killed zygote costs is a test of the executor's."""
    before = runs(federation, 1)
    start(federation, "kills", "fedper", "rounds=3", "evaluate_every=3")
    with held(federation, 1, before):
        os.kill(waiting(federation, 1), signal.SIGKILL)

    said, test = result(federation, "kills")
    assert "failed: the process" in federation.log("node1")
    assert said["summary"]["rounds"] == 3
    assert sorted(lost["client"] for lost in test["lost"]) == list(range(10, 20))
    assert all("its process crashed" in lost["reason"] for lost in test["lost"])
    assert all(count > 0 for count in test["count"])


def test_a_site_may_run_flowers_own_node(federation: Deployment) -> None:
    """Which starts processes for each message, so there is no more than one round of one step."""
    federation.register("flowers")
    data = "data='newcomer.npz' state='state2' site='flowers'"
    federation.secure("flowers", data, "flowers")
    start(federation, "mixed", "fedavg", "rounds=1", "evaluate_every=1", sites=3)
    said, test = result(federation, "mixed")
    assert (said["summary"]["sites"], test["lost"]) == (3, [])
    assert len(test["clients"]) == 21
    assert all(count > 0 for count in test["count"])
    federation.end("flowers")

    log = (federation.folder / "state2" / "audit.jsonl").read_text().splitlines()
    notes = [json.loads(line) for line in log]
    assert {note["step"] for note in notes} == {"train_model", "evaluate", "keep"}
    assert {note["decision"] for note in notes} == {"answered"}


def accounts(deployment: Deployment, number: int) -> dict[str, list[float]]:
    """Returns what clients of a site have let out with noise, by what is on its disk."""
    files = (deployment.folder / f"state{number}" / "released").glob("*.safetensors")
    return {
        file.name: safetensors.torch.load(file.read_bytes())["multipliers"].tolist()
        for file in files
    }


def test_a_node_killed_in_mid_run_comes_back_with_what_its_clients_remember(
    federation: Deployment,
) -> None:
    """FedPer's heads never travel: a site that had lost them could not go on.

    Nor could a site keep to its epsilon that had lost its account.
    """
    seen = runs(federation, 0), runs(federation, 1)
    # Of longer noise a model may say the same of all examples, and a site evaluates none that does.
    private = ("privacy.epsilon=1.0", "privacy.clip=0.01")
    settings = ("rounds=6", "evaluate_every=6", "engine.timeout=120", *private)
    start(federation, "away", "fedper", *settings)
    with ExitStack() as holding:
        with held(federation, 1, seen[1]):
            waiting(federation, 1)
            # While one of its messages is answered. The other node's keep the run from going on.
            holding.enter_context(held(federation, 0, seen[0]))
            federation.processes["node1"].kill()
            spent = accounts(federation, 1)
        node = federation.processes["node1"]
        node.wait()
        until(lambda: not members(node.pid), "the end of what it had started")
        counted = accounts(federation, 1)  # also what was put down and could not leave any more
        tried, said_before = 0.0, federation.log("node1").count("connected as node")

        def back() -> bool:
            """Does what a supervisor does: the SuperLink refuses a key that it takes for alive."""
            nonlocal tried
            ended = federation.processes["node1"].poll() is not None
            if ended and time.monotonic() > tried + RESTART:
                tried = time.monotonic()
                federation.node("node1", *site(1))
            return federation.log("node1").count("connected as node") > said_before

        until(back, "the node's return", LONGEST)

    said, test = result(federation, "away")
    # Its clients were lost while it was away, and were served with their heads afterwards.
    assert {lost["client"] for lost in test["lost"]} == set(range(10, 20))
    assert all("its site" in lost["reason"] for lost in test["lost"])
    assert all(count > 0 for count in test["count"]), test["missed"]
    assert said["summary"]["rounds"] == 6

    # Each answer is on its account, and what was before the kill still is.
    after, times = accounts(federation, 1), Counter(lost["client"] for lost in test["lost"])
    assert after.keys() >= counted.keys() >= spent.keys()
    assert all(counted[name][: len(before)] == before for name, before in spent.items())
    assert all(after[name][: len(before)] == before for name, before in counted.items())
    assert {len(answers) for answers in accounts(federation, 0).values()} == {6}
    in_vain = {name: len(counted.get(name, ())) - len(spent.get(name, ())) for name in after}
    assert [len(answers) - in_vain[name] for name, answers in sorted(after.items())] == [
        6 - times[client] for client in range(10, 20)
    ]
    told = said["summary"]["privacy"]
    assert told["epsilon_spent"] == pytest.approx(1)
    assert told["noise"] == "drawn at the sites, by their operating systems"


def test_a_node_that_is_told_to_end_says_goodbye(federation: Deployment) -> None:
    """The SuperLink takes its key again at once, which it does not after a kill."""
    node = federation.processes["node0"]
    below = descendants(node.pid)
    node.terminate()
    assert node.wait(timeout=60) == 0
    assert await_end(below) == set()
    count = federation.log("node0").count("connected as node")
    again = federation.node("node0", *site(0))
    until(
        lambda: (
            again.poll() is not None or federation.log("node0").count("connected as node") > count
        ),
        "the node's return",
    )
    assert again.poll() is None, federation.log("node0")

"""A real federation on this host: TLS, node authentication, one process for each part.

Every message starts a process at the site, so each costs seconds; the runs are as short as they can
be.
"""

import json
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from engines.flower.deployment import (
    Deployment,
    deployed,
    listening_addresses,
    until,
    write_node_key,
)
from hyperfed.data import tasks

pytest.importorskip("flwr")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployment")]

LOOPBACK = "0100007F"
SITES = (range(10), range(10, 20))
NEWCOMER = 20
RESTART = 10.0
"""Seconds between two starts of a node, of which each takes a core for some."""
LONGEST = 1500.0
"""Seconds after which a run has failed; a quiet machine takes two minutes."""


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


def node_config(site: int) -> str:
    return f"data='site{site}.npz' state='state{site}' site='site{site}'"


def federation(deployment: Deployment) -> None:
    """Starts the SuperLink and two registered SuperNodes."""
    write_data(deployment.folder)
    deployment.superlink()
    for site in range(2):
        write_node_key(deployment.folder / f"node{site}")
        registered = deployment.flwr("supernode", "register", f"node{site}.pub", "trial")
        assert registered["success"]
        deployment.secure(f"node{site}", node_config(site), f"node{site}")


def command(deployment: Deployment, method: str, *settings: str) -> tuple[str, ...]:
    return (
        "run", method, "--json", "--out", "runs", "cohort=20", "method.local_steps=5",
        "engine=flower", f"engine.superlink={deployment.address}", "engine.sites=2",
        "engine.root_certificates=ca.crt", "engine.timeout=300", *settings,
    )  # fmt: skip


def result(deployment: Deployment, name: str, process: subprocess.Popen[bytes]) -> Any:
    try:
        code = process.wait(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        code = None
    said = deployment.log(name)
    assert code == 0, said + deployment.log("superlink")[-3000:]
    return json.loads(said[said.index("{") :])


def test_pefll_over_tls_with_authenticated_nodes(tmp_path: Path) -> None:
    with deployed(tmp_path) as deployment:
        federation(deployment)
        write_node_key(tmp_path / "stranger")
        deployment.secure("stranger", node_config(0), "stranger")
        deployment.supernode("plain", node_config(0), "--insecure")
        settings = ("rounds=2", "evaluate_every=2", "method.delayed_gradient=true")
        process = deployment.hyperfed("run", *command(deployment, "pefll", *settings))

        said = result(deployment, "run", process)
        summary, folder = said["summary"], tmp_path / said["folder"]
        assert (summary["engine"], summary["sites"], summary["rounds"]) == ("flower", 2, 2)
        assert summary["message_bytes_down"] > summary["bytes_down"] / 10
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        test = next(e for e in map(json.loads, lines) if e["split"] == "test")
        assert test["lost"] == []
        assert all(count > 0 for count in test["count"])
        assert len(test["clients"]) == 20

        # Whoever is not registered, or does not encrypt, had no part in it.
        nodes = deployment.flwr("supernode", "list", "trial")["nodes"]
        assert len([node for node in nodes if node["status"] == "online"]) == 2
        assert not list(tmp_path.glob("state0/**/stranger*"))
        assert deployment.processes["stranger"].poll() != 0
        for outsider in ("stranger", "plain"):
            assert "Receiving" not in deployment.log(outsider)
        assert listening_addresses(deployment.alive()) == {LOOPBACK}

        # A newcomer's model is made from the run's records, without any site.
        out = tmp_path / "model.safetensors"
        newcomer = deployment.hyperfed(
            "newcomer", "personalize", str(folder), "--data", "newcomer.npz", "--out", str(out)
        )
        assert newcomer.wait(timeout=300) == 0, deployment.log("newcomer")
        config = tomllib.loads((folder / "config.toml").read_text())
        assert config["engine"]["name"] == "flower"
        model = safetensors.torch.load(out.read_bytes())
        assert all(bool(leaf.isfinite().all()) for leaf in model.values())
    assert deployment.alive() == []


def test_a_node_killed_in_mid_run_comes_back_with_what_its_clients_remember(
    tmp_path: Path,
) -> None:
    """FedPer's heads never travel: a site that had lost them could not go on."""
    with deployed(tmp_path) as deployment:
        federation(deployment)
        settings = ("rounds=4", "evaluate_every=4", "engine.timeout=60")
        process = deployment.hyperfed("run", *command(deployment, "fedper", *settings))

        def remembered() -> set[str]:
            return {path.name for path in (tmp_path / "state1").rglob("*.safetensors")}

        before = until(remembered, "the first round", LONGEST)
        deployment.kill("node1")

        tried = time.monotonic()

        def back() -> bool:
            """Does what a supervisor does: the SuperLink refuses a key that it takes for alive."""
            nonlocal tried
            node = deployment.processes.get("node1")
            ended = node is None or node.poll() is not None
            if ended and time.monotonic() > tried + RESTART:
                tried = time.monotonic()
                deployment.secure("node1", node_config(1), "node1")
            return process.poll() is not None or bool(remembered() - before)

        until(back, "the node's return", LONGEST)
        said = result(deployment, "run", process)
        lines = (tmp_path / said["folder"] / "metrics.jsonl").read_text().splitlines()
        test = next(e for e in map(json.loads, lines) if e["split"] == "test")
        # Its clients were lost while it was away, and were served with their heads afterwards.
        assert {lost["client"] for lost in test["lost"]} == set(range(10, 20))
        assert all("its site" in lost["reason"] for lost in test["lost"])
        assert all(count > 0 for count in test["count"])
        assert said["summary"]["rounds"] == 4
    assert deployment.alive() == []

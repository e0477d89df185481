"""Runs of the command line on actors: the loop's numbers, and no process that stays behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hyperfed.runs import config
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.run import Run
from hyperfed.trees.checkpoints import load_latest
from processes import SECONDS, await_end, descendants, linux, name_of

pytestmark = [
    linux,
    pytest.mark.slow,
    pytest.mark.xdist_group("ray processes"),
    pytest.mark.skipif(find_spec("ray") is None, reason="NOT TESTED: pip install -e '.[ray]'"),
]

KEYS = ["rounds=5", "evaluate_every=1", "task.clients=4", "cohort=3", "method.local_steps=2"]
ACTORS = ["engine=ray", "engine.workers=2", "engine.cores_per_client=1"]
ACTOR = [*ACTORS, "engine.workers=1"]
LONG = "method.local_steps=200"
"""So that actors are mostly at it when somebody looks."""

LOOK = 0.2
"""Seconds between two looks at all processes, each of which takes a hundredth of one."""


@contextmanager
def started(*arguments: str, out: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which is not left behind."""
    command = [sys.executable, "-m", "hyperfed", *arguments, "--quiet", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def watch(process: subprocess.Popen[str], until: str = "") -> set[int]:
    """Returns the processes that were seen below one until it ended, or until one had a name."""
    seen: set[int] = set()
    for _ in range(int(SECONDS / LOOK)):
        seen |= (now := descendants(process.pid))
        if until and any(until in name_of(pid) for pid in now):
            return seen
        try:
            process.wait(timeout=LOOK)
        except subprocess.TimeoutExpired:
            continue
        return seen
    raise AssertionError("the command hangs")


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line | {"seconds": None} for line in found]


@pytest.fixture(scope="module", autouse=True)
def killed(tmp_path_factory: pytest.TempPathFactory) -> set[int]:
    """What there was of a command before a ``kill -9``, which the first of these tests begins with.

    Ray's agents tell a head that is gone for a minute why they end; meanwhile the others run.
    """
    arguments = ["run", "fedavg", *KEYS, *ACTOR, "rounds=100000", LONG]
    with started(*arguments, out=tmp_path_factory.mktemp("killed")) as process:
        seen = watch(process, until="ray::Worker")
    assert process.returncode == -signal.SIGKILL
    return seen


def test_the_command_line_leaves_the_loops_metrics_and_no_process(tmp_path: Path) -> None:
    settings = config.load("pfedhn", [*KEYS, "engine.cores_per_client=1"])
    loop = Run.start(settings, tmp_path / "loop")
    assert len(list(loop.train())) == 5
    with started("run", "pfedhn", *KEYS, *ACTORS, out=tmp_path / "ray") as process:
        seen = watch(process)
        output, _ = process.communicate()
    assert process.returncode == 0
    assert seen
    assert await_end(seen) == set()
    folder = Path(output.splitlines()[-1])
    assert loop.folder is not None
    assert lines(folder) == lines(loop.folder.path)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["engine"], summary["workers"], summary["cores"]) == ("ray", 2, 2)


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_lost_cluster_leaves_a_run_to_resume_and_no_process(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both Ray ends the process that has connected to it."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    arguments = ["run", "fedavg", *KEYS, *ACTOR, "rounds=100000", "checkpoint_every=1", LONG]
    with started(*arguments, out=tmp_path, stderr=subprocess.PIPE) as process:
        seen = watch(process, until="ray::Worker.answer")
        while not list(tmp_path.glob("*/*/checkpoint/state.safetensors")):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=LOOK)
        (hit,) = (pid for pid in seen if name_of(pid).split(" ")[0].endswith(f"/{victim}"))
        os.kill(hit, signal.SIGKILL)
        seen |= watch(process)
        output, told = process.communicate()
    assert process.returncode == 3
    folder = RunFolder(Path(output.splitlines()[-1]))
    assert f"go on with: hyperfed resume {folder.path}" in told
    assert load_latest(folder.state)[1]["round"] > 0
    assert await_end(seen) == set()


def test_ctrl_c_stops_after_the_round_though_it_reaches_every_process(tmp_path: Path) -> None:
    arguments = ["run", "fedavg", *KEYS, *ACTOR, "rounds=100000", LONG]
    with started(*arguments, out=tmp_path, start_new_session=True) as process:
        seen = watch(process, until="ray::Worker.answer")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 3
    folder = RunFolder(Path(output.splitlines()[-1]))
    assert folder.state.exists()
    assert [evaluation.lost for evaluation in folder.evaluations() if evaluation.lost] == []
    assert await_end(seen) == set()


def test_kill_9_leaves_no_process(killed: set[int]) -> None:
    assert await_end(killed) == set()

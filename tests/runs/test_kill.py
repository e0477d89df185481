"""kill -9, resume, and again: the records equal those of a run never killed.

That all methods are where they were in what lies on the disk is tested in test_run.py, without
processes: here are those that keep something each in a place of its own.
"""

import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from apps.cli.checks import same_records
from commands import start
from hyperfed.runs import config
from hyperfed.runs.run import Run
from toys import lengths

# Together, since the process that theirs start from takes longer to start than they do.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kill")]

KEYS = [
    "rounds=8",
    "evaluate_every=1",
    "checkpoint_every=3",
    "cohort=2",
    "task.clients=6",
    "method.local_steps=5",
    "engine.cores_per_client=1",
]
FAULTS = ["faults.drop=0.2", "faults.nan=0.1"]
DEADLINE = 120.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As many as the processes have: others may round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def end(process: BaseProcess) -> None:
    process.join(DEADLINE)
    assert process.exitcode == 0


def kill_after(process: BaseProcess, parent: Path, evaluations: int) -> Path:
    """Kills a run once it has written so many evaluations, wherever it is by then."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.is_alive():
        for metrics in parent.glob("*/*/metrics.jsonl"):
            if metrics.read_bytes().count(b'"val"') >= evaluations:
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL
                return metrics.parent
        time.sleep(0.002)
    raise AssertionError("the run ended before it could be killed")


KILLED: dict[str, list[str]] = {
    "fedper": ["fedper"],  # clients remember a part of the model
    "pfedkt": ["pfedkt"],  # and a hypernetwork
    "compute together": ["pfedhn", "engine=vmap"],
    "gradients that come late": ["pefll", "method.delayed_gradient=true"],
    "newcomers with noise": ["itpfl", "method.epsilon=0.3", "task.novel=2"],
    "private training": ["fedavg", "privacy.epsilon=50"],
    "private training, central": ["fedper", "privacy.epsilon=50", "privacy.where=central"],
}
"""What is killed -> the method, and settings of its own."""


KILLS = 6
"""Of each: once it has one evaluation of its eight, then once it has two, and so on."""


@pytest.mark.parametrize("what", KILLED)
def test_kill_9_and_resume_changes_no_number(what: str, tmp_path: Path) -> None:
    method, *own = KILLED[what]
    short = [f"method.{key}={length}" for key, length in lengths(method).items()]
    keys = [*KEYS, *FAULTS, *short, *own]
    command = ["run", method, *keys, "--out", str(tmp_path / "killed")]
    for evaluations in range(1, KILLS + 1):
        killed = kill_after(start(*command, "--quiet"), tmp_path / "killed", evaluations)
        assert not (killed / "summary.json").exists()
        command = ["resume", str(killed)]
    said = tmp_path / "said"
    end(start(*command, "--quiet", said=said))
    assert said.read_text().splitlines()[-1] == str(killed)
    whole = Run.start(config.load(method, keys), tmp_path / "whole")
    list(whole.train())
    assert whole.folder is not None
    same_records(killed, whole.folder.path)

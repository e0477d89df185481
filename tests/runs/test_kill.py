"""kill -9 at a random moment, then resume: the records equal those of a run never killed."""

import json
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from commands import start
from hyperfed.methods import METHODS

pytestmark = pytest.mark.slow

KEYS = [
    "rounds=12",
    "evaluate_every=3",
    "checkpoint_every=4",
    "cohort=2",
    "task.clients=6",
    "method.local_steps=5",
    "engine.cores_per_client=1",
]
FAULTS = ["faults.drop=0.2", "faults.nan=0.1"]
DEADLINE = 120.0


def end(process: BaseProcess) -> None:
    process.join(DEADLINE)
    assert process.exitcode == 0


def numbers(folder: Path) -> Any:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for record in (*lines, summary):
        del record["seconds"]
    return lines, summary


def kill_after(process: BaseProcess, parent: Path, evaluations: int) -> Path:
    """Kills a run once it has written so many evaluations, wherever it is by then."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.is_alive():
        for metrics in parent.glob("*/*/metrics.jsonl"):
            if metrics.read_bytes().count(b"\n") >= evaluations:
                process.kill()
                process.join()
                assert process.exitcode == -signal.SIGKILL
                return metrics.parent
        time.sleep(0.002)
    raise AssertionError("the run ended before it could be killed")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_kill_9_and_resume_changes_no_number(method: str, tmp_path: Path) -> None:
    known = METHODS[method].Config.__dataclass_fields__
    lengths = ("novel_steps", "novel_rounds", "absorb_steps", "phase_one_rounds")
    short = [f"method.{key}=2" for key in lengths if key in known]
    command = ["run", method, *KEYS, *FAULTS, *short, "--quiet", "--out"]
    whole = start(*command, str(tmp_path / "whole"))
    moment = random.Random(method).randrange(1, 7)  # of 8 evaluations
    killed = kill_after(start(*command, str(tmp_path / "killed")), tmp_path / "killed", moment)
    assert not (killed / "summary.json").exists()
    said = tmp_path / "said"
    end(start("resume", str(killed), "--quiet", said=said))
    assert said.read_text().splitlines()[-1] == str(killed)
    end(whole)
    (other,) = (tmp_path / "whole").glob("*/*")
    assert numbers(killed) == numbers(other)

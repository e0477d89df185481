"""A run in a process of its own: how the one that waits leaves, and what it leaves behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyperfed.apps import guard
from processes import linux

pytestmark = linux

SCRIPT = """
import atexit, json, os, signal, subprocess, sys, time
from pathlib import Path
from hyperfed.apps.guard import divide

def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def found(end, folders):
    said, says = os.pipe()
    sys.stdout.flush()
    if not os.fork():
        os.dup2(says, 1), os.dup2(says, 2)
        tell = divide(as_json=end.startswith("# json"))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        left = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=-3, stderr=-3)
        print(os.getpid(), left.pid, flush=True)
        for folder in folders:
            tell(Path(folder))
        exec(end, globals() | {"tell": tell})
        sys.exit(0)
    os.close(says)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    first, *lines = os.read(said, 10_000).decode().splitlines()
    child, left = map(int, first.split())
    until = time.monotonic() + 20
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    orphan = alive(left)
    if orphan:
        os.kill(left, signal.SIGKILL)
    return [code, lines, alive(child), orphan]

print(json.dumps({name: found(*case) for name, case in json.loads(sys.argv[1]).items()}))
"""

BACK = "go on with: hyperfed resume 'a run'"
LOST = f"the Ray cluster was lost; {BACK}"

CASES: dict[str, tuple[str, list[str], tuple[int, list[str], bool]]] = {
    "done": ("sys.exit(0)", ["a run"], (0, [], True)),
    "wrong input": ("sys.exit(2)", [], (2, [], True)),
    "our fault": ("sys.exit(1)", ["a run"], (1, [], True)),
    "our fault in the second run": ("sys.exit(1)", ["a run", "b"], (1, [], True)),
    "stopped": ("sys.exit(3)", ["a run"], (3, [], True)),
    "aborted": ("os._exit(3)", ["a run"], (3, [], True)),
    "asked to end": ("os.kill(os.getppid(), 15); signal.pause()", ["a run"], (7, [], True)),
    "ended from below": ("os._exit(1)", ["a run"], (3, ["a run", LOST], False)),
    "ended in the second run": ("os._exit(1)", ["b", "a run"], (3, ["a run", LOST], False)),
    "killed": (
        "os.kill(os.getpid(), 9)",
        ["a run"],
        (3, ["a run", f"signal 9 ended the run's process; {BACK}"], False),
    ),
    "ended before there was a run": ("os._exit(1)", [], (1, [], True)),
    "killed before there was a run": ("os.kill(os.getpid(), 9)", [], (137, [], True)),
    "left alone": ("os.kill(os.getppid(), 9); signal.pause()", ["a run"], (-9, [], True)),
    "in JSON": (
        "# json\nos._exit(1)",
        ["a run"],
        (3, ["{", '  "folder": "a run",', '  "summary": null', "}", LOST], False),
    ),
}  # fmt: skip
"""How the process that trains ends, and the folders that it has told; then the code and what is
said of the one that waits, and whether what it has started stays, as a tracker's process may."""


@pytest.fixture(scope="module")
def found() -> Any:
    asked = {name: case[:2] for name, case in CASES.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_who_waits_leaves_as_the_run_ended(case: str, found: Any) -> None:
    code, lines, stays = CASES[case][2]
    assert found[case] == [code, lines, False, stays]


def test_a_process_left_behind_may_be_called_anything(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"\xff) 1 2")
    odd.symlink_to(shutil.which("cat") or "")
    with subprocess.Popen([odd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as left:
        assert left.stdin is not None
        assert left.stdout is not None
        left.stdin.write(b"x")
        assert left.stdout.read(1) == b"x"  # before it runs, it may be called after who began it
        assert b"\xff" in Path(f"/proc/{left.pid}/comm").read_bytes()
        assert left.pid in guard._children()
        left.communicate()

"""``make gpu``: all that only a GPU can show, within a time (see README.md beside this file).

Each step of the plan is a command in a process of its own. At the end of its time it is asked to
stop, as by Ctrl-C: a run writes a checkpoint, pytest its records. What does not listen is killed.
What a step wrote stays, and the next one begins.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from gpu_steps import INTERRUPTS, Ending, State, Step, execute
from hyperfed.errors import UserError
from hyperfed.runs import config
from hyperfed.runs.folder import find_runs, read_run
from hyperfed.runs.remarks import percent
from hyperfed.system.devices import describe, find_device
from hyperfed.system.files import atomic_write
from hyperfed.system.provenance import commit, versions

ROOT = Path(os.path.relpath(Path(__file__).parents[1]))
RECORDS = ROOT / "results" / "all"
"""Every method on the CPU: the same settings run here, and the numbers are set beside these."""

PARTS = {"tests": 90, "bench": 80, "data": 40, "pfedhn": 110, "pefll": 120, "methods": 140}
"""Part -> seconds of ten minutes, the most important first; 20 are for what is around them."""

A_METHOD = 25
"""Seconds of the part ``methods`` that one of them may take, so that many come to their end."""

GPU_TESTS = "tests/engines/test_on_gpu.py"

LOAD = """\
import sys
from hyperfed.data.datasets import load
from hyperfed.runs.config import load as read
task = read(sys.argv[1], sys.argv[2:]).task
load(task.name, task.data_dir)"""


def plan(
    device: torch.device, out: Path, parts: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[Step]:
    """Returns the steps in their order.

    Args:
        device: where clients compute.
        out: the folder of all records.
        parts: names in :data:`PARTS`; all where empty. The data set comes with what needs it.
        settings: ``key=value`` for every run, which come last and so win.

    Raises:
        UserError: a part that there is not, or settings that a run does not take.
    """
    if unknown := [part for part in parts if part not in PARTS]:
        raise UserError(f"parts must be among {', '.join(PARTS)}; came {', '.join(unknown)}")

    runs = list(_runs(device, out, settings))
    read_data = ("-c", LOAD, *runs[0].settings)  # all runs have one data set
    bench = f"--benchmark-json={out / 'bench' / 'bench.json'}"
    quiet = "-Wignore:Not saving anything"  # which pytest-benchmark says where nothing was measured
    steps = [
        _pytest("tests", GPU_TESTS, out),
        _pytest("bench", "benchmarks/bench_device.py", out, bench, quiet),
        Step("data", read_data, PARTS["data"]),
        *runs,
    ]
    wanted = set(parts or PARTS)
    for step in steps:
        if step.settings and step.part in wanted:
            config.load(step.settings[0], step.settings[1:])
            wanted.add("data")
    return [step for step in steps if step.part in wanted]


def _pytest(part: str, what: str, out: Path, *options: str) -> Step:
    shown = ("-v", "-p", "no:cacheprovider", "-o", "log_cli=true", "-o", "log_cli_level=INFO")
    junit = f"--junitxml={out / part / 'junit.xml'}"
    return Step(part, ("-m", "pytest", str(ROOT / what), *shown, junit, *options), PARTS[part])


def _runs(device: torch.device, out: Path, settings: Sequence[str]) -> Iterator[Step]:
    """Yields all runs of the plan, not checked."""

    def run(name: str, source: Path, *keys: str, seconds: float, **more: Any) -> Step:
        chosen = (str(source), f"device={device}", *keys, *settings)
        command = ("-m", "hyperfed", "run", *chosen, "--out", str(out / name))
        return Step(name, command, seconds, chosen, **more)

    pfedhn = ROOT / "experiments" / "pfedhn" / "table1.toml:cifar10-50-pfedhn"
    yield run("pfedhn", pfedhn, seconds=PARTS["pfedhn"])

    pefll = ROOT / "experiments" / "pefll" / "table1.toml:cifar10-100-pefll"
    no_graphs = "" if device.type == "cuda" else "CUDA graphs need a GPU that has CUDA"
    for clients, cohort in ((100, "5"), (1000, "0.05")):  # as published: 5 % of the clients
        for kind, skip in (("vmap", ""), ("graphs", no_graphs)):
            keys = [f"task.clients={clients}", f"cohort={cohort}", "rounds=50", "evaluate_every=25"]
            keys += ["engine=vmap", f"engine.graphs={str(kind == 'graphs').lower()}"]
            name = f"pefll/{clients}-{kind}"
            yield run(name, pefll, *keys, seconds=PARTS["pefll"] / 4, skip=skip)

    for path in sorted(find_runs(RECORDS), key=lambda path: _numbers(path)["seconds"]):
        name = f"methods/{path.relative_to(RECORDS)}"
        yield run(name, path / "config.toml", seconds=A_METHOD, beside=path)


def carry_out(steps: Sequence[Step], out: Path, device: torch.device, minutes: float) -> int:
    """Runs the steps one after another, and keeps the index of what became of them.

    A part may take its share of the time, and what the parts before it have left; the last step
    takes all there is.

    Args:
        steps: the plan.
        out: the folder of all records; what its index says of other steps stays.
        device: what the records name; without a GPU, none is shown to the steps.
        minutes: for all steps together.

    Returns:
        The exit status: 0, 1 where a step failed, 130 where somebody interrupted one.
    """
    index = Index(out, device)
    parts = [part for part in PARTS if any(step.part == part for step in steps)]
    scale = minutes / 10 * sum(PARTS.values()) / sum(PARTS[part] for part in parts)
    ends = dict(zip(parts, accumulate(scale * PARTS[part] for part in parts), strict=True))
    begin, failed, no_data = monotonic(), False, ""
    with INTERRUPTS.taken():
        for number, step in enumerate(steps, start=1):
            left = ends[step.part] - (monotonic() - begin)
            most = left if step is steps[-1] else scale * step.seconds
            limit = max(0.0, min(most, left))
            print(f"[{number}/{len(steps)}] {step.name}, {limit:.0f} s: ", end="", flush=True)
            if why := step.skip or (no_data if step.settings else ""):
                ending = Ending(State.SKIPPED, why)
            elif not limit:
                ending = Ending(State.OUT_OF_TIME, "those before it took it")
            else:
                ending = execute(step, out / step.name, limit, device)
            if step.name == "data" and ending.state != State.DONE:
                ending, no_data = _without_data(ending)
            index.add(step, ending, limit)
            print(f"{ending.state} after {ending.seconds:.0f} s: {ending.said}", flush=True)
            failed |= ending.state == State.FAILED
            if ending.state == State.INTERRUPTED:
                return 130
    return int(failed)


def _without_data(ending: Ending) -> tuple[Ending, str]:
    """Returns how the step ``data`` ended, and why those that need it are skipped."""
    _, told, why = ending.said.partition("UserError: ")
    if told:  # there is none here, which is nobody's fault
        ending = Ending(State.SKIPPED, why, ending.seconds)
    return ending, f"the data set is not here (data: {ending.state})"


# What is kept.


class Index:
    """``index.json``, {step: what became of it}, and ``index.txt``, the same as a table."""

    def __init__(self, out: Path, device: torch.device) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._json, self._text = out / "index.json", out / "index.txt"
        self._where = {"device": describe(device), "commit": commit(), "versions": versions()}
        self.steps: dict[str, dict[str, Any]] = {}
        if self._json.exists():
            self.steps = json.loads(self._json.read_text(encoding="utf-8"))

    def add(self, step: Step, ending: Ending, limit: float) -> None:
        """Notes a step, in the place of what an earlier call knew of it."""
        self.steps[step.name] = {
            "command": shlex.join(["python", *step.command]),
            "state": ending.state,
            "said": ending.said,
            "seconds": ending.seconds,
            "limit": limit,
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._where,
            "run": ending.run and _numbers(ending.run),
            "beside": step.beside and _numbers(step.beside),
        }
        atomic_write(self._json, f"{json.dumps(self.steps, indent=2)}\n".encode())
        with self._text.open("w", encoding="utf-8") as file:
            Console(file=file, width=160, highlight=False).print(table(self.steps))


def _numbers(folder: Path) -> dict[str, Any]:
    """Returns what a run has come to: its summary's numbers, or those of its last evaluation."""
    run = read_run(folder)
    found: dict[str, Any] = {"folder": str(folder)}
    if run.summary is not None:
        keys = ("rounds", "test_accuracy", "seconds", "graphs")
        return found | {key: run.summary[key] for key in keys if key in run.summary}
    for e in run.evaluations:
        if e.split == "test":
            found |= {"rounds": e.round, "test_accuracy": e.accuracy, "seconds": e.seconds}
    return found


def table(steps: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the index for a :class:`rich.console.Console` to print."""
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for column in ("\nstep", "\nstate"):
        shown.add_column(column)
    for column in (
        "step's\nseconds",
        "evaluated\nround",
        "\ntest %",
        "run's\nseconds",
        "CPU's\ntest %",
        "CPU's\nseconds",
    ):
        shown.add_column(column, justify="right")
    shown.add_column("\nsaid")
    for name, step in steps.items():
        run, beside = (step[key] or {} for key in ("run", "beside"))
        shown.add_row(
            name,
            step["state"],
            f"{step['seconds']:.1f}",
            str(run.get("rounds", "–")),
            percent(run.get("test_accuracy")),
            _seconds(run),
            percent(beside.get("test_accuracy")),
            _seconds(beside),
            step["said"],
        )
    return shown


def _seconds(run: Mapping[str, Any]) -> str:
    return f"{run['seconds']:.1f}" if "seconds" in run else "–"


def compare(out: Path, device: torch.device) -> None:
    """Prints and keeps what ``hyperfed compare`` says of the methods that are done, and the CPU."""
    steps = Index(out, device).steps.values()
    pairs = [step for step in steps if step["state"] == State.DONE and step["beside"]]
    folders = [step[key]["folder"] for step in pairs for key in ("beside", "run")]
    if folders:
        execute(
            Step("compare", ("-m", "hyperfed", "compare", *folders), 0), out / "compare", 60, device
        )
        print("\nof each two the first is of the CPU:")
        print((out / "compare" / "log.txt").read_text(encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out the plan; returns the exit status, 2 where the input is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=10, help="of all steps together")
    parser.add_argument("--parts", default="", help=f"in one word; all of '{' '.join(PARTS)}'")
    given = parser.parse_intermixed_args(arguments)
    try:
        device = find_device(given.device)
        if device.index and device.type == "cuda":
            raise UserError(
                f"device must be cuda, the first GPU, came {device}; for another one set "
                f"CUDA_VISIBLE_DEVICES={device.index}"
            )
        steps = plan(device, given.out, given.parts.split(), given.settings)
        status = carry_out(steps, given.out, device, given.minutes)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    compare(given.out, device)
    print(f"{given.out / 'index.txt'}\n{given.out / 'index.json'}")
    return status


if __name__ == "__main__":
    sys.exit(main())

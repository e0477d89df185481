"""What stands behind the first run, ``examples/digits.py``: the choice of rates, and its records.

    python tools/first_run.py grid       # every method on one grid; prints what to choose
    python tools/first_run.py record     # three divisions of the data into results/first_run
    python tools/first_run.py draw       # the figure of README.md, from the first of them

``make readme`` writes the table of README.md from those records.

Rates are chosen on the validation data of a division (a seed) that no record is of. Every method
gets the same rates of local training, and those with a server that learns as many of that. How a
newcomer of pFedHN is fitted is chosen on the newcomers of that division.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

from grids import ROOT
from grids import record as make_record

sys.path.insert(0, str(ROOT / "examples"))

import digits

from hyperfed import Run
from hyperfed.runs import report
from hyperfed.runs.records import read_run

RESULTS = ROOT / "results" / "first_run"
SEEDS, OTHER_SEED = (0, 1, 2), 3
LOCAL_RATES = (0.005, 0.02, 0.1)
SERVER_RATES = {"pfedhn": (0.01, 0.03, 0.1), "pefll": (0.001, 0.002, 0.005)}
"""The one is of SGD and the other of Adam, which take rates of another order."""
NOVEL_RATES = (0.1, 0.3, 1.0, 3.0)


def points(method: str) -> list[dict[str, float]]:
    """Returns the settings of a method's grid."""
    servers = [{"lr": rate} for rate in SERVER_RATES.get(method, ())] or [{}]
    return [{"local_lr": rate, **server} for rate, server in product(LOCAL_RATES, servers)]


def grid(methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """Trains every point, prints its validation accuracy, and returns all."""
    found: list[dict[str, Any]] = []
    for method in methods:
        runs = []
        for settings in points(method):
            run = digits.train(method, seed=OTHER_SEED, rounds=rounds, settings=settings)
            runs.append((run.summary["val_accuracy"], settings, run))
            found.append({"method": method, "val_accuracy": runs[-1][0], **settings})
            print(f"{method:8}{settings}  validation {runs[-1][0]:.3f}", flush=True)
        _, best, run = max(runs, key=lambda entry: entry[0])
        print(f"{method:8}{best}  <- chosen", flush=True)
        for rate in NOVEL_RATES if method == "pfedhn" else ():
            served = run.served_otherwise([f"method.novel_lr={rate}"])
            accuracy = served.evaluate_novel().accuracy
            found.append({"method": method, "novel_accuracy": accuracy, "novel_lr": rate, **best})
            print(f"{method:8}novel_lr {rate}  newcomers {accuracy:.3f}", flush=True)
    return found


def record(methods: list[str], rounds: int, results: Path) -> None:
    """Makes the records of every seed that are missing, ``results/METHOD/seedN``."""
    for method, seed in product(methods, SEEDS):

        def trained(out: Path, method: str = method, seed: int = seed) -> Run:
            return digits.train(method, seed=seed, rounds=rounds, out=out)

        make_record(results / method / f"seed{seed}", trained)


def draw(results: Path) -> None:
    """Draws the figure of README.md."""
    local, pefll = (read_run(results / of / f"seed{SEEDS[0]}") for of in ("local", "pefll"))
    report.draw_against(local, pefll, ROOT / "docs" / "first_run.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record", "draw"])
    parser.add_argument("--methods", nargs="+", default=list(digits.METHODS))
    parser.add_argument("--rounds", type=int, default=digits.ROUNDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.what == "grid":
        every = grid(asked.methods, asked.rounds)
        asked.results.mkdir(parents=True, exist_ok=True)
        file = asked.results / "grid.jsonl"
        before = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        kept = [point for point in before if point["method"] not in asked.methods]
        file.write_text("".join(json.dumps(point) + "\n" for point in [*kept, *every]))
    elif asked.what == "draw":
        draw(asked.results)
    else:
        record(asked.methods, asked.rounds, asked.results)

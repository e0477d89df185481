"""What stands behind the first run, ``examples/digits.py``: the choice of rates, and its records.

    python tools/first_run.py grid       # every method on one grid; prints what to choose
    python tools/first_run.py record     # three divisions of the data into results/first_run
    python tools/first_run.py draw       # the figure of README.md, from the first of them

``make readme`` writes the table of README.md from those records.

Rates are chosen on the validation data of a division (a seed) that no record is of. Every method
gets the same rates of local training, and those with a server that learns as many of that. Where
the best of a rate is the least or greatest that was tried, a third or three times of it is tried as
well, until it is not. How a newcomer of pFedHN is fitted is chosen on the newcomers of that
division. What was trained already is not again.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path

from grids import OTHER_SEED, ROOT, SEEDS, Grid
from grids import record as make_record

sys.path.insert(0, str(ROOT / "examples"))

import digits

from hyperfed import Run
from hyperfed.analysis import paired
from hyperfed.runs.folder import read_run

RESULTS = ROOT / "results" / "first_run"
LOCAL_RATES = (0.005, 0.02, 0.1)
SERVER_RATES = {
    "pfedhn": (0.01, 0.03, 0.1),
    "pefll": (0.001, 0.002, 0.005),
    "headstart": (0.3, 1.0, 3.0),
}
"""Of SGD, of Adam and of averaging, which take rates of different orders."""
NOVEL_RATES = (0.1, 0.3, 1.0, 3.0)


def points(method: str) -> list[dict[str, float]]:
    """Returns the rates of a method's grid."""
    servers = [{"lr": rate} for rate in SERVER_RATES.get(method, ())] or [{}]
    return [{"local_lr": rate, **server} for rate, server in product(LOCAL_RATES, servers)]


def choose(method: str, rounds: int, results: Path) -> None:
    """Trains every point that was not yet, goes on beyond their ends, and prints the best."""
    grid, of = Grid(results / "grid.jsonl"), {"method": method}

    def train(rates: Mapping[str, float]) -> Run:
        return digits.train(method, seed=OTHER_SEED, rounds=rounds, settings=dict(rates))

    for rates in points(method):
        grid.reached(of, rates, train)
    grid.go_beyond(of, train)
    best = grid.best(of)
    print(f"{method:10}{best}  <- chosen", flush=True)
    if method == "pfedhn":
        choose_for_newcomers(train(best), results / "newcomers.jsonl")


def choose_for_newcomers(run: Run, file: Path) -> None:
    """Serves the newcomers at several rates, and writes down what each came to."""
    with file.open("w") as lines:
        for rate in NOVEL_RATES:
            accuracy = run.served_otherwise([f"method.novel_lr={rate}"]).evaluate_novel().accuracy
            lines.write(json.dumps({"novel_lr": rate, "novel_accuracy": accuracy}) + "\n")
            print(f"novel_lr {rate}  newcomers {accuracy:.3f}", flush=True)


def record(method: str, rounds: int, results: Path) -> None:
    """Makes the records of every seed that are missing, ``results/METHOD/seedN``."""
    for seed in SEEDS:
        train = partial(digits.train, method, seed=seed, rounds=rounds)
        make_record(results / method / f"seed{seed}", digits.METHODS[method], train)


def draw(results: Path) -> None:
    """Draws the figure of README.md."""
    alone, made = (read_run(results / of / f"seed{SEEDS[0]}") for of in ("local", "headstart"))
    paired.draw(alone, made, ROOT / "docs" / "first_run.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record", "draw"])
    parser.add_argument("--methods", nargs="+", default=list(digits.METHODS))
    parser.add_argument("--rounds", type=int, default=digits.ROUNDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.what == "draw":
        draw(asked.results)
    else:
        for each in asked.methods:
            (choose if asked.what == "grid" else record)(each, asked.rounds, asked.results)

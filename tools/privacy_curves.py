"""Accuracy against epsilon on the digits: what private training costs three methods.

    python tools/privacy_curves.py                           # prints a table
    python tools/privacy_curves.py --out results/privacy     # keeps the records, and draws

60 clients, a linear model, everybody in every round, the same settings for every epsilon: the clip
is the default, and none was searched but the length of pFedHN's run, which in that of the others
learns nothing, without noise either. Records that are there already are not made again.
"""

import argparse
import json
import tempfile
from contextlib import closing
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import hyperfed
from grids import keep
from hyperfed.apps.printing import print_tables, table
from hyperfed.runs.drawing import COLOURS, MARKERS, new_figure, save

SHORT: dict[str, Any] = {"rounds": 15, "evaluate_every": 15}
STEPS: dict[str, Any] = {"local_steps": 5, "batch_size": 16}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": SHORT | {"method": STEPS},
    "pfedhn": {
        "rounds": 30,
        "evaluate_every": 30,
        "method": STEPS | {"local_steps": 10, "cohort_reduction": "mean"},
    },
    "pefll": SHORT | {"method": STEPS | {"standardize": False}},  # by numbers without noise
}
EPSILONS = (2.0, 8.0, 32.0, 128.0)
LOCAL = (32.0, 128.0)
SEEDS = (0, 1, 2)
SETTINGS: dict[str, Any] = {
    "task": {"clients": 60, "novel": 0.0, "model": "mlp", "hidden": []},
    "cohort": 1.0,
    "track": None,
}

Cell = tuple[str, str, float | None]
"""Method, where noise is added, epsilon; None without noise."""


def cells() -> list[Cell]:
    """Returns what is measured, in the order of the table."""
    found: list[Cell] = [(method, "none", None) for method in METHODS]
    for where, epsilons in (("central", EPSILONS), ("local", LOCAL)):
        found += [(method, where, epsilon) for method, epsilon in product(METHODS, epsilons)]
    return found


def name_of(cell: Cell, seed: int) -> str:
    """Returns the folder of a record."""
    method, where, epsilon = cell
    return f"{method}-{where}{'' if epsilon is None else f'-{epsilon:g}'}/seed{seed}"


def measure(cell: Cell, seed: int, out: Path | None) -> float:
    """Returns the test accuracy of a run, which is made unless its record is there."""
    method, where, epsilon = cell
    place = None if out is None else out / name_of(cell, seed)
    if place is not None and (place / "summary.json").exists():
        return float(json.loads((place / "summary.json").read_text())["test_accuracy"])
    private = {} if epsilon is None else {"privacy": {"epsilon": epsilon, "where": where}}
    settings = SETTINGS | private | METHODS[method]
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(hyperfed.train(method, out=folder, seed=seed, **settings)) as run,
    ):
        if place is not None:
            keep(run, place)
        return float(run.summary["test_accuracy"])


def draw(found: dict[Cell, list[float]], path: Path) -> None:
    """Draws the curves: a line for each method, dashed where clients add the noise."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for method, colour, marker in zip(METHODS, COLOURS, MARKERS, strict=False):
        for where, epsilons, line in (("central", EPSILONS, "-"), ("local", LOCAL, "--")):
            values = [[100 * a for a in found[method, where, e]] for e in epsilons]
            axes.errorbar(
                epsilons,
                [mean(each) for each in values],
                [stdev(each) for each in values],
                color=colour,
                marker=marker,
                linestyle=line,
                label=f"{method}, {where}",
                capsize=2,
            )
        without = mean(found[method, "none", None])
        axes.axhline(100 * without, color=colour, linestyle=":", label=f"{method}, no noise")
    axes.set_xscale("log", base=2)
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.set_xlabel("epsilon of each client over the run, at delta 0.001")
    axes.set_ylabel("test accuracy, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="x-small", frameon=False, ncols=3, loc="upper center")
    axes.set_ylim(0, 130)
    save(figure, path)


def main(out: Path | None) -> None:
    """Makes what is missing, and prints and draws all."""
    shown = table("method", "noise", "epsilon", "test accuracy %")
    found: dict[Cell, list[float]] = {}
    for cell in cells():
        found[cell] = [measure(cell, seed, out) for seed in SEEDS]
        told = [100 * accuracy for accuracy in found[cell]]
        method, where, epsilon = cell
        spent = "–" if epsilon is None else f"{epsilon:g}"
        shown.add_row(method, where, spent, f"{mean(told):.1f} ± {stdev(told):.1f}")
    print_tables(shown)
    if out is not None:
        draw(found, out / "curves.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the records and the figure go")
    main(parser.parse_args().out)

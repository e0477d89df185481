"""PeFLL's theorem 4.2 on a trained run: what it says beside what is measured.

    python tools/pefll_bound.py                              # trains on the digits and measures
    python tools/pefll_bound.py --out results/pefll_bound    # keeps the record, too
    python tools/pefll_bound.py --run RUN_DIR                # measures a run that is there

Each line has the theorem's right side for Gaussians of two variances, around the networks and
around clients' models, and its left side, the error of models that are drawn so for clients that
were never seen. The bound holds for all lines together.
"""

import argparse
import json
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from grids import ROOT, keep

sys.path.insert(0, str(ROOT / "examples"))

import digits
from rich.console import Console
from rich.table import Table

import hyperfed
from hyperfed.runs.run import Run
from hyperfed.system.provenance import commit
from hyperfed.theory.pefll import generalization_bound
from hyperfed.theory.pefll_run import Measured, Variances, measure

SETTINGS: dict[str, Any] = {
    "task": digits.TASK,
    "rounds": digits.ROUNDS,
    "cohort": digits.COHORT,
    "evaluate_every": 20,
    "method": {
        **digits.METHODS["pefll"],
        "local_steps": digits.LOCAL_STEPS,
        "standardize": False,  # which the theorem does not know of
        "hyper_net": "single",  # the paper's networks, and its regulariser of models
        "hidden_layers": 1,
        "local_weight_decay": 1e-4,
    },
}
"""The first run's, at the rates that were chosen for it."""

GRID = tuple(Variances(*pair) for pair in product((1e-6, 1e-4, 1e-2, 1.0), (1e-4, 1e-2, 1.0, 1e2)))
"""Chosen before anything was measured: that costs a union over all of them, and no more."""

DELTA, DRAWS = 0.05, 20


def lines(run: Run, draws: int) -> list[Measured]:
    """Measures both sides at every point of the grid."""
    return [measure(run, point, delta=DELTA / len(GRID), draws=draws) for point in GRID]


def record(run: Run, found: list[Measured], draws: int) -> dict[str, Any]:
    """Returns what was measured as plain data."""
    known, unseen = (1 - float(run.summary[f"{who}_accuracy"]) for who in ("test", "novel"))
    clients, samples = found[0].clients, found[0].samples
    nothing = generalization_bound(
        0,
        meta_kl=0,
        client_kls=[0],
        clients=clients,
        samples=samples,
        delta=DELTA / len(GRID),
    )
    return {
        "theorem": "PeFLL 4.2",
        "delta": DELTA,
        "draws": draws,
        "clients": clients,
        "samples": samples,
        "trained_models": {"known_test_error": known, "unseen_test_error": unseen},
        "without_divergence": sum(nothing.values()),
        "least_bound": min(each.bound for each in found),
        "lines": [asdict(each) | {"bound": each.bound} for each in found],
        "commit": commit(),
    }


def shown(found: list[Measured]) -> Table:
    """Returns the lines as a table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("networks", "model", "empirical", "+ clients", "+ samples", "= bound", "unseen"):
        table.add_column(name, justify="right")
    for each in found:
        variances = (each.variances.networks, each.variances.model)
        numbers = (*each.terms.values(), each.bound, each.unseen_error)
        table.add_row(*(f"{v:g}" for v in variances), *(f"{number:.3g}" for number in numbers))
    return table


def main(run_dir: Path | None, out: Path | None, draws: int, rounds: int | None) -> None:
    """Trains or opens a run, measures, prints, and writes the record where that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS | ({} if rounds is None else {"rounds": rounds})
        run = (
            hyperfed.train("pefll", out=folder, **settings)
            if run_dir is None
            else hyperfed.open_run(run_dir)
        )
        with closing(run):
            found = lines(run, draws)
            kept = record(run, found, draws)
            if out is not None:
                keep(run, out)
                (out / "bound.json").write_text(json.dumps(kept, indent=2) + "\n")
    show = Console(highlight=False, soft_wrap=True).print
    errors = kept["trained_models"]
    unseen, known = (errors[f"{who}_test_error"] for who in ("unseen", "known"))
    show(f"PeFLL, theorem 4.2: {kept['clients']} clients, {kept['samples']} examples of each\n")
    show("variances of            right side of the bound                   left side")
    show(shown(found))
    show(
        f"\nThe trained models themselves err on {unseen:.1%} of the test data of unseen clients, "
        f"on {known:.1%} of that of known ones."
    )
    verdict = "says less than that no error exceeds 1" if kept["least_bound"] >= 1 else "holds"
    show(
        f"The least bound is {kept['least_bound']:.3g}: it {verdict}. So few clients and examples "
        f"add {kept['without_divergence']:.3g} even where nothing differs from its prior."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, help="the folder of a finished run of pefll")
    parser.add_argument("--out", type=Path, help="where the record goes")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--rounds", type=int, help="other than the usual, where it trains")
    asked = parser.parse_args()
    main(asked.run, asked.out, asked.draws, asked.rounds)

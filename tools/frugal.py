"""What stands behind results/frugal: small hypernetworks beside the usual one, at equal rounds.

    python tools/frugal.py grid      # the server's rate of every hypernetwork, on one grid
    python tools/frugal.py record    # one division of CIFAR-10 into results/frugal
    python tools/frugal.py record --rounds 2000    # the same for longer, into results/frugal_2000

What is done already is skipped, so a stopped command goes on where it was.

pFedHN, whose server goes by SGD, and PeFLL, whose server goes by Adam, write the LeNets of fifty
clients of CIFAR-10 with two classes each: with an output layer for every tensor (their own
hypernetwork), with such layers of rank 16, and chunk by chunk. All else is alike: rounds, local
steps, batch, local rate. The server's rate is chosen for each of the six by validation data of a
division (a seed) that no record is of.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import hyperfed
from grids import OTHER_SEED, ROOT, SEEDS, Grid, record

RESULTS = ROOT / "results" / "frugal"
ROUNDS = 400
SERVER_RATES = {"pfedhn": (0.01, 0.003, 0.03), "pefll": (0.002, 0.0006, 0.006, 0.0002, 0.00006)}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "heads": {},
    "head_rank": {"head_rank": 16},
    "chunks": {"hyper_net": "chunks"},
}
TASK: Mapping[str, Any] = {
    "name": "cifar10",
    "clients": 50,
    "novel": 0,
    "partition": "class_shares",
    "classes_per_client": 2,
}


def train(
    method: str,
    kind: str,
    seed: int,
    rates: Mapping[str, float],
    out: Path | None = None,
    *,
    rounds: int = ROUNDS,
) -> hyperfed.Run:
    """Trains a method with a hypernetwork."""
    return hyperfed.train(
        method,
        out=out,
        seed=seed,
        task=TASK,
        rounds=rounds,
        cohort=1,
        evaluate_every=rounds // 4,
        engine={"cores": 1},
        method={"local_steps": 20, "batch_size": 32, **rates, **KINDS[kind]},
        progress=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--methods", nargs="+", default=list(SERVER_RATES))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of record; 400")
    asked = parser.parse_args()
    usual = asked.rounds == ROUNDS
    folder = RESULTS if usual else RESULTS.with_name(f"{RESULTS.name}_{asked.rounds}")
    grid = Grid(RESULTS / "grid.jsonl")
    for method, kind in product(asked.methods, KINDS):
        of = {"method": method, "kind": kind}
        for rate in SERVER_RATES[method] if asked.what == "grid" else ():
            grid.reached(of, {"lr": rate}, partial(train, method, kind, OTHER_SEED))
        for seed in SEEDS[:1] if asked.what == "record" else ():
            best = grid.best(of)
            trained = partial(train, method, kind, seed, best, rounds=asked.rounds)
            record(folder / f"{method}_{kind}" / f"seed{seed}", best, trained)

"""What stands behind results/frugal: small hypernetworks beside the usual one, at equal rounds.

    python tools/frugal.py grid      # the server's rate of every hypernetwork, on one grid
    python tools/frugal.py record    # one division of CIFAR-10 into results/frugal

What is done already is skipped, so a stopped command goes on where it was.

pFedHN writes the LeNets of fifty clients of CIFAR-10 with two classes each, with an output layer
for every tensor (its own hypernetwork), with such layers of rank 4, and chunk by chunk. All else is
alike: rounds, local steps, batch, local rate. The server's rate is chosen for each of the three by
validation data of a division (a seed) that no record is of.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hyperfed
from grids import ROOT, Grid, record

RESULTS = ROOT / "results" / "frugal"
SEEDS, OTHER_SEED = (0,), 3
ROUNDS = 400
SERVER_RATES = (0.01, 0.05)

KINDS: Mapping[str, Mapping[str, Any]] = {
    "heads": {},
    "head_rank": {"head_rank": 4},
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
    kind: str, seed: int, rates: Mapping[str, float], out: Path | None = None
) -> hyperfed.Run:
    """Trains pFedHN with a hypernetwork."""
    return hyperfed.train(
        "pfedhn",
        out=out,
        seed=seed,
        task=TASK,
        rounds=ROUNDS,
        cohort=1,
        evaluate_every=ROUNDS // 4,
        method={"local_steps": 20, "batch_size": 32, **rates, **KINDS[kind]},
        progress=False,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid(RESULTS / "grid.jsonl")
    for each in asked.kinds:
        of = {"kind": each}
        for rate in SERVER_RATES if asked.what == "grid" else ():
            grid.reached(of, {"lr": rate}, partial(train, each, OTHER_SEED))
        for seed in SEEDS if asked.what == "record" else ():
            record(RESULTS / each / f"seed{seed}", partial(train, each, seed, grid.best(of)))

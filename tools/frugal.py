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
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import hyperfed

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "frugal"
SEEDS, OTHER_SEED = (0,), 3
ROUNDS = 400
SERVER_RATES = (0.01, 0.05)
KEPT = ("config.toml", "metrics.jsonl", "summary.json")
"""What a record is of the files of a run."""

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


def train(kind: str, seed: int, rate: float, out: Path | None = None) -> hyperfed.Run:
    """Trains pFedHN with a hypernetwork."""
    return hyperfed.train(
        "pfedhn",
        out=out,
        seed=seed,
        task=TASK,
        rounds=ROUNDS,
        cohort=1,
        evaluate_every=ROUNDS // 4,
        method={"local_steps": 20, "batch_size": 32, "lr": rate, **KINDS[kind]},
        progress=False,
    )


def points(kind: str) -> dict[float, float]:
    """Returns what a kind has reached on validation data, by the server's rate."""
    file = RESULTS / "grid.jsonl"
    found = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {point["lr"]: point["val_accuracy"] for point in found if point["kind"] == kind}


def grid(kind: str) -> None:
    """Adds the points that are missing."""
    for rate in SERVER_RATES:
        if rate in points(kind):
            continue
        accuracy = train(kind, OTHER_SEED, rate).summary["val_accuracy"]
        with (RESULTS / "grid.jsonl").open("a") as lines:
            lines.write(json.dumps({"kind": kind, "lr": rate, "val_accuracy": accuracy}) + "\n")
        print(f"{kind:10}lr {rate}  validation {accuracy:.3f}", flush=True)


def record(kind: str) -> None:
    """Makes the records that are missing, ``results/frugal/KIND/seedN``."""
    reached = points(kind)
    for seed in SEEDS:
        folder = RESULTS / kind / f"seed{seed}"
        if (folder / "summary.json").exists():
            continue
        with tempfile.TemporaryDirectory() as out:
            run = train(kind, seed, max(reached, key=lambda rate: reached[rate]), Path(out))
            assert run.folder is not None  # a run with out=... has one
            folder.mkdir(parents=True, exist_ok=True)
            for name in KEPT:  # the summary last
                shutil.copyfile(run.folder.path / name, folder / name)
        print(f"{kind:10}seed {seed}  test {run.summary['test_accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for each in asked.kinds:
        grid(each) if asked.what == "grid" else record(each)

"""What stands behind the comparison of all methods: the choice of rates, and the records.

    python tools/all_methods.py few_labels grid      # every method's rates, on one grid
    python tools/all_methods.py few_labels record    # three divisions into results/few_labels
    python tools/all_methods.py many_labels grid
    python tools/all_methods.py many_labels record

What is done already is skipped, so a stopped command goes on where it was. ``--methods`` takes some
of them only: several processes share the work.

There are two federations of Fashion-MNIST, each with clients that join when training is over: many
clients with few labels each, and few clients with many. Every method gets the same rounds, cohort,
local steps, batch, plain SGD without momentum or weight decay, and local learning rates to choose
from; a method whose server learns, too, has then three rates for that, around its default, at the
local rate chosen. Rates are chosen by the best round's accuracy on the validation data of a
division (a seed) that no record is of. All other settings are a method's defaults. A newcomer who
trains does so for as many steps as each of the others on average.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import hyperfed
from hyperfed.methods import METHODS

ROOT = Path(__file__).parents[1]
SEEDS, OTHER_SEED = (0, 1, 2), 3
LOCAL_RATES = (0.03, 0.1, 0.3)
SERVER_FACTORS = (1.0, 0.3, 3.0)
KEPT = ("config.toml", "metrics.jsonl", "summary.json")
"""What a record is of the files of a run."""


@dataclass(frozen=True)
class Federation:
    """Who takes part, and what all methods do alike.

    Attributes:
        task: the ``task.*`` settings.
        cohort: clients of a round.
        local_steps: steps of each of them.
        rounds: of training.
    """

    task: Mapping[str, Any]
    cohort: int
    local_steps: int
    rounds: int = 100

    @property
    def visits(self) -> int:
        """Rounds in which a client takes part, on average."""
        clients = int(self.task["clients"])
        known: int = clients - round(self.task["novel"] * clients)
        return self.rounds * self.cohort // known


IMAGES = {"name": "fashion_mnist", "model": "mlp", "hidden": 50, "partition": "dirichlet_equal"}
FEDERATIONS = {
    "few_labels": Federation(
        IMAGES | {"clients": 120, "novel": 1 / 6, "alpha": 0.3, "examples_per_client": 20}, 20, 10
    ),
    "many_labels": Federation(
        IMAGES | {"clients": 24, "novel": 1 / 6, "alpha": 0.1, "examples_per_client": 1000}, 10, 20
    ),
}
FINETUNED = "_finetuned"
"""Ends the name of a method whose clients train on for a visit's steps when they are served."""

UNLABELLED = "_unlabelled"
"""Ends the name of a method whose newcomers have no labels, and which learned to do without."""

NAMES = [
    *METHODS,
    *(method + FINETUNED for method in ("fedavg", "pfedhn", "pefll", "headstart", "itpfl")),
    "headstart" + UNLABELLED,
]


def settings_of(method: str, federation: Federation) -> dict[str, Any]:
    """Returns the method's settings that follow from the federation."""
    rounds, steps, visits = federation.rounds, federation.local_steps, federation.visits
    wanted = {
        "local_steps": steps,
        "batch_size": 20,
        "local_momentum": 0.0,
        "local_weight_decay": 0.0,
        "head_steps": steps,
        "novel_steps": visits * steps,
        "novel_rounds": visits,
        "phase_one_rounds": rounds * 4 // 5,
        "expected_rounds": rounds,
    }
    has = {field.name for field in fields(METHODS[method].Config)}
    if method in ("fedavg", "fedprox", "pfedla", "heurpfedla"):  # newcomers get the common model
        del wanted["novel_steps"]
    return {key: value for key, value in wanted.items() if key in has}


def method_of(name: str) -> str:
    """Returns the method of a name that may have an ending."""
    return name.removesuffix(FINETUNED).removesuffix(UNLABELLED)


def train(
    name: str, federation: Federation, seed: int, rates: Mapping[str, float], out: Path | None
) -> hyperfed.Run:
    """Trains a method."""
    method = method_of(name)
    finetuning = {"finetune_steps": federation.local_steps} if name.endswith(FINETUNED) else {}
    task, own = dict(federation.task), settings_of(method, federation)
    if name.endswith(UNLABELLED):
        task |= {"unlabelled": True}
        own |= {"label_dropout": 0.5}
    return hyperfed.train(
        method,
        out=out,
        seed=seed,
        task=task,
        rounds=federation.rounds,
        cohort=federation.cohort,
        evaluate_every=federation.rounds // 10,
        engine="vmap",
        method=own | dict(rates),
        serve=finetuning,
    )


def grid(name: str, federation: Federation, file: Path) -> None:
    """Adds what a method reaches at each point of its grid that the file does not have."""

    def reached(rates: Mapping[str, float]) -> float:
        for point in points(file, name):
            if point["rates"] == rates:
                return float(point["val_accuracy"])
        try:
            accuracy = train(name, federation, OTHER_SEED, rates, None).summary["val_accuracy"]
        except hyperfed.UserError as error:
            print(f"{name} {rates}: {error}", flush=True)
            accuracy = 0.0
        with file.open("a") as lines:
            line = {"method": name, "rates": dict(rates), "val_accuracy": accuracy}
            lines.write(json.dumps(line) + "\n")
        print(f"{name:16}{rates}  validation {accuracy:.3f}", flush=True)
        return float(accuracy)

    local = max(LOCAL_RATES, key=lambda rate: reached(at(name, rate)))
    if len(at(name, local)) > 1:
        max(SERVER_FACTORS, key=lambda factor: reached(at(name, local, factor)))


def at(name: str, local: float, factor: float = 1.0) -> dict[str, float]:
    """Returns a point of a method's grid: its local rate, and its server's if that learns."""
    method = METHODS[method_of(name)]
    settings = method.Config(**_defaults(method.PRESETS["default"]))
    server = {} if not hasattr(settings, "lr") else {"lr": float(f"{settings.lr * factor:.2g}")}
    return {"local_lr": local, **server}


def _defaults(preset: Mapping[str, Any]) -> dict[str, Any]:
    own = "method."
    return {key.removeprefix(own): value for key, value in preset.items() if key.startswith(own)}


def points(file: Path, name: str) -> list[dict[str, Any]]:
    """Returns what the file has of a method, in the order in which it was found."""
    every = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [point for point in every if point["method"] == name]


def record(name: str, federation: Federation, results: Path) -> None:
    """Makes the records of every seed that are missing, ``results/METHOD/seedN``."""
    best = max(points(results / "grid.jsonl", name), key=lambda point: point["val_accuracy"])
    for seed in SEEDS:
        folder = results / name / f"seed{seed}"
        if (folder / "summary.json").exists():
            continue
        with tempfile.TemporaryDirectory() as out:
            run = train(name, federation, seed, best["rates"], Path(out))
            assert run.folder is not None  # a run with out=... has one
            folder.mkdir(parents=True, exist_ok=True)
            for kept in KEPT:  # the summary last
                shutil.copyfile(run.folder.path / kept, folder / kept)
        known, novel = (run.summary[f"{who}_accuracy"] for who in ("test", "novel"))
        print(f"{name:16}seed {seed}  known {known:.3f}  novel {novel:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("federation", choices=list(FEDERATIONS))
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--methods", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # so small a network is not worth sharing among cores
    results = asked.results / asked.federation
    results.mkdir(parents=True, exist_ok=True)
    for each in asked.methods:
        if asked.what == "grid":
            grid(each, FEDERATIONS[asked.federation], results / "grid.jsonl")
        else:
            record(each, FEDERATIONS[asked.federation], results)

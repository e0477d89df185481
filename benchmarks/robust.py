"""What hostile clients do to accuracy, under each rule that can stand for the mean.

python benchmarks/robust.py --out results/robust
writes ``robust.json`` and ``robust.md``, on the digits; runs that are there already are not made
again. Runs of one seed differ in their method, their rule, what the hostile clients do and how many
they are, and in nothing else: data, rounds and the methods' settings are the same, and the seed
decides which clients are hostile. The accuracy is that of the honest clients' models on their own
test data, after the last round: a run would choose its best round by validation, of which hostile
clients could lie too.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch

from hyperfed.data import tasks
from hyperfed.data.own import Task
from hyperfed.data.tasks import TaskConfig
from hyperfed.runs.config import from_keys
from hyperfed.runs.run import Run
from hyperfed.system.files import atomic_write
from hyperfed.system.provenance import commit, versions
from hyperfed.system.randomness import generator
from hyperfed.trees.aggregation import Aggregation

METHODS = ("fedavg", "fedper", "pfedhn", "pefll")
SETTINGS = {"pfedhn": {"cohort_reduction": "mean"}}
RULES: Sequence[str] = get_args(Aggregation)
ATTACKS = ("reverse", "noise", "labels")
SHARES = (0.1, 0.2)
CLIENTS = 20
HONEST = ("none", 0.0)


def cases() -> Iterator[tuple[str, float]]:
    """Yields (attack, share of clients), the honest case first."""
    yield HONEST
    yield from product(ATTACKS, SHARES)


def hostile(share: float, seed: int) -> list[int]:
    """Returns which clients are hostile: those of a smaller share are among those of a larger."""
    order = torch.randperm(CLIENTS, generator=generator(seed, "hostile"))
    return sorted(order[: round(share * CLIENTS)].tolist())


def flipped(task: Task, clients: Sequence[int]) -> Task:
    """Returns a task in which some clients train on other labels: 9 for 0, 8 for 1, and so on."""
    y = task.y.clone()
    for client in clients:
        y[task.train[client]] = task.classes - 1 - y[task.train[client]]
    return replace(task, y=y)


def measure(
    method: str, rule: str, attack: str, share: float, *, rounds: int, seed: int
) -> dict[str, Any]:
    """Trains once and returns what came of it."""
    liars = hostile(share, seed)
    keys: dict[str, Any] = {
        "rounds": rounds,
        "evaluate_every": rounds,
        "cohort": CLIENTS // 2,
        "seed": seed,
        "method": {"local_steps": 10} | SETTINGS.get(method, {}),
        "task": {"clients": CLIENTS, "novel": 0.0},
        "robust": {"aggregation": rule},
    }
    task = tasks.build(TaskConfig(clients=CLIENTS, novel=0.0), seed)
    if attack == "labels":
        task = flipped(task, liars)
    elif liars:
        keys["faults"] = {"hostile": liars, "attack": attack}
    begin = time.perf_counter()
    run = Run(from_keys(method, keys), task)
    lost = sum(len(progress.lost) for progress in run.train())
    test = next(e for e in reversed(run.evaluations) if e.split == "test")
    counted = [i for i, client in enumerate(test.clients) if client not in liars and test.count[i]]
    total = sum(test.count[i] for i in counted)
    correct = sum((test.client_accuracy[i] or 0.0) * test.count[i] for i in counted)
    run.close()
    return {
        "method": method,
        "aggregation": rule,
        "attack": attack,
        "share": share,
        "seed": seed,
        "hostile": liars,
        "accuracy": correct / total,
        "lost": lost,
        "void": run.summary["void_rounds"],
        "seconds": time.perf_counter() - begin,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Returns accuracies in Markdown, a row for each method and rule: mean and range over seeds."""
    heads = [
        "honest" if case == HONEST else f"{case[0]} {case[1]:.0%}".replace("%", " %")
        for case in cases()
    ]
    lines = [f"| method | aggregation | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    of: dict[tuple[Any, ...], list[float]] = {}
    for r in found:
        of.setdefault((r["method"], r["aggregation"], r["attack"], r["share"]), []).append(
            100 * r["accuracy"]
        )
    for method in dict.fromkeys(r["method"] for r in found):
        for rule in dict.fromkeys(r["aggregation"] for r in found):
            values = [of.get((method, rule, *case)) for case in cases()]
            shown = " | ".join(
                f"{fmean(v):.0f} ({min(v):.0f} to {max(v):.0f})" if v else "–" for v in values
            )
            lines.append(f"| `{method}` | `{rule}` | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/robust"))
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "robust.json"
    found: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text())
        found = before["runs"] if before["rounds"] == asked.rounds else []
    there = {(r["seed"], r["attack"], r["share"], r["method"], r["aggregation"]) for r in found}
    for seed, (attack, share), method, rule in product(
        range(asked.seeds), cases(), asked.methods, asked.rules
    ):
        if (seed, attack, share, method, rule) in there:
            continue
        found.append(measure(method, rule, attack, share, rounds=asked.rounds, seed=seed))
        print(json.dumps(found[-1]), flush=True)
        record = {
            "rounds": asked.rounds,
            "commit": commit(),
            "versions": versions(),
            "runs": found,
        }
        atomic_write(path, json.dumps(record, indent=1).encode())
        atomic_write(asked.out / "robust.md", table(found).encode())


if __name__ == "__main__":
    main()

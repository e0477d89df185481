"""What hypernetworks are for: many clients that differ, each with few labels, and newcomers.

Sixty clinics each have twelve labelled handwritten digits, and every clinic codes its labels in one
of three ways: what one calls a 3 is a 6 to the next. Alone a clinic has too little to learn from,
and no single model can be right for all. Ten of them join when training is over. The digits come
with scikit-learn, so nothing is downloaded:

    python examples/digits.py
"""

from pathlib import Path
from time import perf_counter
from typing import Any

import safetensors.torch
import torch
from rich.console import Console
from torch import nn

import hyperfed
from hyperfed.analysis import comparison, paired

TASK: dict[str, Any] = {
    "name": "digits",
    "clients": 60,
    "novel": 1 / 6,
    "partition": "shuffled",
    "val": 0.2,
    "test": 0.39,
    "examples_per_client": 12,
    "label_codes": 3,
    "hidden": 50,
}
"""About thirty digits each, of which twelve are for training; the network is 64-50-10."""

ROUNDS, COHORT, LOCAL_STEPS = 200, 20, 10
"""The same for every method: 4,000 visits to clients, of ten steps each."""

METHODS: dict[str, dict[str, Any]] = {
    "local": {"local_lr": 0.3},
    "fedavg": {"local_lr": 0.02},
    "fedper": {"local_lr": 0.1},
    "pfedhn": {"local_lr": 0.1, "lr": 0.1, "cohort_reduction": "mean", "novel_lr": 0.3},
    "pefll": {"local_lr": 0.1, "lr": 0.005},
    "headstart": {"local_lr": 0.005, "lr": 9.0},
}
"""Rates chosen for each method on validation data of another division (tools/first_run.py)."""

TRAIN_NEWCOMERS = ("local", "fedper")
"""They get as many steps there as each of the 50 other clients had."""


def main(rounds: int = ROUNDS, out: Path = Path("runs/digits")) -> None:
    """Runs the example.

    Args:
        rounds: of training, for every method.
        out: where everything goes.
    """
    show = Console(highlight=False, soft_wrap=True).print
    runs = {method: train(method, rounds=rounds, out=out) for method in METHODS}
    show("\nEvery client's model on its own test data; novel: clients that joined afterwards\n")
    show(comparison.table(comparison.compare(list(runs.values()))))
    figure = out / "clients.png"
    paired.draw(runs["local"], runs["headstart"], figure)

    # A client that took no part brings its twelve examples and gets a model of its own.
    headstart, task = runs["headstart"], runs["headstart"].task
    newcomer = task.novel_ids[0]
    brought = task.train[newcomer]
    begin = perf_counter()
    personal = headstart.personalize(task.x[brought], task.y[brought])
    took_ms = 1000 * (perf_counter() - begin)
    alone, everyones = (runs[method].model(newcomer) for method in ("local", "fedavg"))
    file = out / "newcomer.safetensors"
    safetensors.torch.save_file(personal.state_dict(), file)
    show(f"\nA client never seen brings {len(brought)} examples. On those it kept back:\n")
    show(f"its own, by headstart in {took_ms:4.0f} ms  {accuracy(personal, task, newcomer):.1%}")
    show(f"trained alone                  {accuracy(alone, task, newcomer):.1%}")
    show(f"fedavg's, that of all          {accuracy(everyones, task, newcomer):.1%}")
    show("\nIts labels are what tells its code: without them no method could know it.")

    show("\nWhat is on disk:\n")
    for method, run in runs.items():
        assert run.folder is not None  # a run with out=... has one
        show(f"{method:10}{run.folder.path}")
    show(f"figure    {figure}\nmodel     {file}")


def train(
    method: str,
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
    out: Path | None = None,
    settings: dict[str, Any] | None = None,
) -> hyperfed.Run:
    """Trains a method on the task above; ``settings`` replace some of its own."""
    own = {"local_steps": LOCAL_STEPS} | METHODS[method]
    if method in TRAIN_NEWCOMERS:
        own["novel_steps"] = rounds * COHORT * LOCAL_STEPS // 50
    return hyperfed.train(
        method,
        out=out,
        seed=seed,
        task=TASK,
        rounds=rounds,
        cohort=COHORT,
        evaluate_every=max(1, rounds // 10),
        engine={"name": "vmap", "cores": 1},  # twenty so small networks: together is fastest
        method=own | (settings or {}),
    )


def accuracy(model: nn.Module, task: hyperfed.Task, client: int) -> float:
    """Returns the share that a model gets right of what a client did not learn from."""
    kept = torch.cat([task.val[client], task.test[client]])
    with torch.no_grad():
        output = model(task.transform(task.x[kept]))
    return float(task.score(output, task.y[kept]).mean())


if __name__ == "__main__":
    main()

"""Trains three methods on handwritten digits, compares them, and serves a client never seen.

Twenty clients hold two digits each; two of them take no part in the training and join afterwards.
The digits come with scikit-learn, so nothing is downloaded:

    python examples/digits.py
"""

from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from torch import nn

import hyperfed
from hyperfed.runs import report

COHORTS = {"local": 18, "fedavg": 5, "pfedhn": 1}
"""Method -> clients of a round, as its paper has it; 18 are all that take part."""


def main(visits: int = 270, local_steps: int = 20, out: Path = Path("runs/digits")) -> None:
    """Runs the example.

    Args:
        visits: how often a method trains at some client, the same for all: rounds x cohort.
        local_steps: of SGD at each visit.
        out: where everything goes.
    """
    torch.set_num_threads(1)  # so small a network is not worth sharing among cores
    runs = {
        method: train(method, visits // cohort, local_steps, out)
        for method, cohort in COHORTS.items()
    }
    finished = list(runs.values())
    show = Console(highlight=False, soft_wrap=True).print
    show("\nEvery client's model on its own test data, at the best validation round:\n")
    show(report.table(report.comparison(finished)))
    show("\nA client alone easily tells two digits apart: local is hard to beat on this task.")
    figure = out / "accuracy.png"
    report.draw_accuracy(finished, figure)

    # A client that took no part brings data of its own and gets a model of its own.
    pfedhn, task = runs["pfedhn"], runs["pfedhn"].task
    newcomer = task.novel_ids[0]
    brought = task.train[newcomer]
    personal = pfedhn.personalize(task.x[brought], task.y[brought])
    everyones = runs["fedavg"].model(newcomer)
    file = out / "newcomer.safetensors"
    safetensors.torch.save_file(personal.state_dict(), file)
    show(f"\nA client never seen brings {len(brought)} examples. On those it kept back:\n")
    show(f"its own model, from pfedhn     {accuracy(personal, task, newcomer):.1%} right")
    show(f"the model of all, from fedavg  {accuracy(everyones, task, newcomer):.1%} right")

    show("\nWhat is on disk:\n")
    for method, run in runs.items():
        assert run.folder is not None  # a run with out=... has one
        show(f"{method:8}{run.folder.path}")
    show(f"figure  {figure}\nmodel   {file}")


def train(method: str, rounds: int, local_steps: int, out: Path) -> hyperfed.Run:
    """Trains a method on the default task: the digits, dealt out to 20 clients."""
    settings = {"local_steps": local_steps}
    if method == "local":
        settings["novel_steps"] = rounds * local_steps  # what the other clients had
    return hyperfed.train(
        method,
        out=out,
        rounds=rounds,
        cohort=COHORTS[method],
        evaluate_every=max(1, rounds // 12),
        method=settings,
    )


def accuracy(model: nn.Module, task: hyperfed.Task, client: int) -> float:
    """Returns the share that a model gets right of what a client did not learn from."""
    kept = torch.cat([task.val[client], task.test[client]])
    with torch.no_grad():
        output = model(task.transform(task.x[kept]))
    return float(task.score(output, task.y[kept]).mean())


if __name__ == "__main__":
    main()

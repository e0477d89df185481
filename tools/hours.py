"""Estimates how long what is missing of the papers' tables takes, for ``hyperfed report``.

    python tools/hours.py                         # all tables
    python tools/hours.py 'pfedhn/*' pefll/fig4   # some, the first ones first

What is estimated already is skipped, so a stopped command goes on where it was. Of a training three
rounds of one client are run, the last of them evaluated, and their CPU time tells what a visit of
a client and an evaluation cost. A run takes as many of both as its settings say; what it does once,
such as serving novel clients, is not in it. Trainings that differ in what takes no time only, such
as rates, share one measurement. Each line of ``results/hours.jsonl`` says which that is.
"""

import argparse
import json
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

import hyperfed
from grids import ROOT
from hyperfed.papers import measured, owed
from hyperfed.papers.owed import Estimate
from hyperfed.papers.reproduction import ONE_CORE, training_of
from hyperfed.runs import config, experiments
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig, cohort_size

PHASES = ("phase_one_rounds", "pretrain_rounds")
"""Settings that say after how many rounds a method begins to do something else."""

TAKES_NO_TIME = (
    *("rounds", "cohort", "evaluate_every", "best", "examine"),
    *("task.alpha", "task.class", "task.novel_", "task.partition", "task.pfllib", "task.share"),
    *("task.unlabelled", "method.adapt_lr", "method.contrast_weight", "method.encoder_lr"),
    *("method.cohort_reduction", "method.evaluated"),
    *("method.local_lr", "method.local_momentum", "method.local_weight_decay", "method.lr"),
    *("method.margin", "method.novel_", *(f"method.{phase}" for phase in PHASES)),
)
"""How the keys begin that do not decide what a visit or an evaluation costs."""


def cost(settings: RunConfig) -> tuple[str, ...]:
    """Returns what decides how long a visit and an evaluation take."""
    told = measured.flat(settings)
    return tuple(f"{key}={told[key]}" for key in told if not key.startswith(TAKES_NO_TIME))


def measure(settings: RunConfig) -> tuple[float, float, float]:
    """Returns the CPU seconds of a visit in either phase of a method, and of an evaluation.

    Raises:
        UserError: the data are not here, or how many clients there are is left to them.
    """
    own = settings.settings
    short = {name: 1 for name in PHASES if getattr(own, name, 0)}
    few = replace(settings, rounds=3, evaluate_every=3, settings=replace(own, **short))
    seconds = []
    with closing(Run(few)) as run:
        if settings.task.clients is None:
            raise hyperfed.UserError("its table must say how many clients there are, not its data")
        run.config = replace(run.config, cohort=1)
        training = run.train()
        for _ in range(3):
            began = time.process_time()
            next(training)
            seconds.append(time.process_time() - began)
    first, second, last = seconds
    before, after = (first, second) if short else [(first + second) / 2] * 2
    return before, after, max(0.0, last - second)


def hours(settings: RunConfig, seconds: tuple[float, float, float]) -> float:
    """Returns the hours of a core that a run takes."""
    before, after, evaluation = seconds
    task, rounds = settings.task, settings.rounds
    assert task.clients is not None  # others are not measured
    early = min(rounds, max(getattr(settings.settings, name, 0) for name in PHASES))
    visits = cohort_size(settings.cohort, task.clients - task.novel_clients)
    evaluations = -(-rounds // settings.evaluate_every)
    trained = visits * (early * before + (rounds - early) * after)
    return (trained + evaluations * evaluation) / 3600


def trainings() -> dict[tuple[str, tuple[str, ...]], RunConfig]:
    """Returns (table, cells that one training does for) -> its settings, of all tables."""
    found = {}
    for experiment in experiments.find_all(ROOT / "experiments"):
        together: dict[tuple[str, ...], list[str]] = {}
        loaded = {}
        for cell in experiment.cells:
            loaded[cell] = config.load(experiment.source(cell), [ONE_CORE])
            together.setdefault(training_of(loaded[cell]), []).append(cell)
        for cells in together.values():
            found[experiment.id, tuple(cells)] = loaded[cells[0]]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", default=["*"], help="patterns, such as 'pefll/*'")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    wanted = trainings()
    there = {(one.table, one.cells): one for one in owed.read(asked.results)}
    known = {
        cost(wanted[key]): (one.of, one.seconds)
        for key, one in there.items()
        if one.seconds is not None and key in wanted
    }
    without: Counter[tuple[str, str]] = Counter()
    for pattern in asked.tables:
        for (table, cells), settings in wanted.items():
            if (table, cells) in there or not fnmatchcase(table, pattern):
                continue
            timed = None
            if cost(settings) not in known:
                try:
                    timed = measure(settings)
                except hyperfed.UserError as error:  # data that are not here, mostly
                    without[table, str(error)] += 1
                    continue
                known[cost(settings)] = f"{table}:{cells[0]}", timed
            of, seconds = known[cost(settings)]
            one = Estimate(table, cells, float(f"{hours(settings, seconds):.3g}"), of, timed)
            there[table, cells] = one
            with (asked.results / owed.FILE).open("a") as lines:
                lines.write(
                    json.dumps({k: v for k, v in asdict(one).items() if v is not None}) + "\n"
                )
            if timed:
                print(f"{of:40}{one.hours:8.2f} h", flush=True)
    for (table, why), number in without.items():
        print(f"{table}: {number} trainings without an estimate: {why}")

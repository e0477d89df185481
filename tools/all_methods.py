"""What stands behind the comparison of all methods: the choice of rates, and the records.

    python tools/all_methods.py few_labels grid      # every method's rates, on one grid
    python tools/all_methods.py few_labels record    # three divisions into results/few_labels
    python tools/all_methods.py many_labels grid
    python tools/all_methods.py many_labels record

What is done already is skipped, so a stopped command goes on where it was; a record of other rates
than the best is made again. ``--methods`` takes some of them only: several processes share the
work.

There are two federations of Fashion-MNIST, each with clients that join when training is over: many
clients with few labels each, and few clients with many. The others are of the kinds that papers
judge by: a fifth of CIFAR-10, two classes each, with few and with many clients, or Dirichlet;
labels that each client codes; and clients as data sets have them: writers, alphabets and speaking
roles. Every method gets the same rounds, cohort, local steps, batch, plain SGD without momentum or
weight decay, and the same local learning rates to choose from; a method that has a second rate, of
its server or of what clients train besides, has then three for that, around its default, at the
local rate chosen. Where the best of a rate is the least or greatest that was tried, a third or
three times of it is tried as well, until it is not. Rates are chosen by the best round's accuracy
on the validation data of a division (a seed) that no record is of; three federations take those of
one that differs from them in a number alone. All other settings are a method's defaults, but that
the servers of pFedHN and pFedHN-PC step by the mean over a round's clients, by which their rates
were searched. A newcomer who trains does so for as many steps as each of the others on average.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import hyperfed
from grids import OTHER_SEED, ROOT, SEEDS, Grid, record
from hyperfed.data.partitions import novel_number
from hyperfed.methods import METHODS

sys.path.insert(0, str(ROOT / "examples"))

import digits

SECOND_FACTORS = (1.0, 0.3, 3.0)


@dataclass(frozen=True)
class Federation:
    """Who takes part, and what all methods do alike.

    Attributes:
        task: the ``task.*`` settings.
        cohort: clients of a round.
        local_steps: steps of each of them.
        rounds: of training.
        engine: the faster of both on one core.
        local_rates: to choose from.
        rates_of: the federation whose rates these clients take; their own where it is None.
    """

    task: Mapping[str, Any]
    cohort: int
    local_steps: int
    rounds: int = 100
    engine: str = "loop"
    local_rates: Sequence[float] = (0.03, 0.1, 0.3)
    rates_of: str | None = None

    @property
    def visits(self) -> int:
        """Rounds in which a client takes part, on average."""
        clients = int(self.task["clients"])
        known: int = clients - novel_number(self.task["novel"], clients)
        return self.rounds * self.cohort // known


MLP = {"model": "mlp", "hidden": 50}
IMAGES = MLP | {"name": "fashion_mnist", "partition": "dirichlet_equal"}
CIFAR = {"name": "cifar10", "novel": 1 / 6, "fraction": 0.2}
NATURAL = {"partition": "natural", "novel": 1 / 6}
FEDERATIONS = {
    "few_labels": Federation(
        IMAGES | {"clients": 120, "novel": 1 / 6, "alpha": 0.3, "examples_per_client": 20},
        20,
        10,
        engine="vmap",
    ),
    "many_labels": Federation(
        IMAGES | {"clients": 24, "novel": 1 / 6, "alpha": 0.1, "examples_per_client": 1000},
        10,
        20,
        engine="vmap",
    ),
    **{
        f"two_classes_{known}": Federation(
            CIFAR | {"clients": known * 6 // 5, "classes_per_client": 2}, 10, 20, rates_of=rates_of
        )
        for known, rates_of in ((10, "two_classes_50"), (50, None), (100, "two_classes_50"))
    },
    **{
        f"dirichlet_{alpha:g}": Federation(
            CIFAR | {"clients": 60, "partition": "dirichlet_equal", "alpha": alpha},
            10,
            20,
            rates_of=rates_of,
        )
        for alpha, rates_of in ((0.1, None), (1.0, "dirichlet_0.1"))
    },
    "own_labels": Federation(digits.TASK, digits.COHORT, digits.LOCAL_STEPS, digits.ROUNDS, "vmap"),
    "writers": Federation(NATURAL | MLP | {"name": "mnist", "clients": 300}, 20, 10, engine="vmap"),
    "alphabets": Federation(
        NATURAL | MLP | {"name": "omniglot", "clients": 48, "hidden": 100},
        10,
        20,
        rounds=200,
        engine="vmap",
    ),
    # Narrow, for a twentieth of a step's time: the grids are what takes hours. At the rates of
    # others, in steps half as many, FedAvg stayed at 15.8 % on validation data.
    "roles": Federation(
        NATURAL | {"name": "shakespeare", "clients": 120, "hidden": 32},
        10,
        10,
        local_rates=(1.0, 3.0, 10.0),
    ),
}
FINETUNED = "_finetuned"
"""Ends the name of a method whose clients train on for a visit's steps when they are served."""

UNLABELLED = "_unlabelled"
"""Ends the name of a method whose newcomers have no labels, and which learned to do without."""

COMMON = "_common"
"""Ends the name of a method whose hypernetwork learns nothing; clients add their frequencies."""

OWN_HEAD = "_own_head"
"""Ends the name of a method whose clients keep their last layer to themselves."""

OF_ENDING: dict[str, dict[str, Any]] = {
    UNLABELLED: {"label_dropout": 0.5},
    COMMON: {"lr": 0.0},
    OWN_HEAD: {"head_layers": 1},
}
"""What is set in the methods whose names end so."""

NAMES = [
    *METHODS,
    *(method + FINETUNED for method in ("fedavg", "pfedhn", "pefll", "headstart", "itpfl")),
    *("headstart" + ending for ending in OF_ENDING),
]


SECOND = ("lr", "adapt_lr", "finetune_lr", "head_lr", "align_lr", "weight_lr", "strategy_lr")
"""The setting that is a method's second rate: of its server, or of what clients train besides."""


def settings_of(method: str, federation: Federation) -> dict[str, Any]:
    """Returns the method's settings that follow from the federation."""
    rounds, steps, visits = federation.rounds, federation.local_steps, federation.visits
    wanted: dict[str, Any] = {
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
    if method in ("pfedhn", "pfedhn_pc"):  # as when their rates were searched
        wanted["cohort_reduction"] = "mean"
    if method in ("fedavg", "fedprox", "pfedla", "heurpfedla"):  # newcomers get the common model
        del wanted["novel_steps"]
    return {key: value for key, value in wanted.items() if key in has}


def method_of(name: str) -> str:
    """Returns the method of a name that may have an ending."""
    for ending in (FINETUNED, *OF_ENDING):
        name = name.removesuffix(ending)
    return name


def train(
    name: str,
    federation: Federation,
    seed: int,
    rates: Mapping[str, float],
    out: Path | None = None,
) -> hyperfed.Run:
    """Trains a method."""
    method = method_of(name)
    finetuning = {"finetune_steps": federation.local_steps} if name.endswith(FINETUNED) else {}
    task, own = dict(federation.task), settings_of(method, federation)
    if name.endswith(UNLABELLED):
        task |= {"unlabelled": True}
    for ending, settings in OF_ENDING.items():
        if name.endswith(ending):
            own |= settings
    return hyperfed.train(
        method,
        out=out,
        seed=seed,
        task=task,
        rounds=federation.rounds,
        cohort=federation.cohort,
        evaluate_every=federation.rounds // 10,
        engine={"name": federation.engine, "cores": 1},  # several processes share the work
        method=own | dict(rates),
        serve=finetuning,
    )


def second_rates(name: str) -> list[dict[str, float]]:
    """Returns what to try of a method's second rate; nothing where it has none that learns."""
    method = METHODS[method_of(name)]
    settings = method.Config(**_defaults(method.PRESETS["default"]))
    if name.endswith(COMMON) or not (own := [rate for rate in SECOND if hasattr(settings, rate)]):
        return []
    (rate,) = own
    default = getattr(settings, rate)
    return [{rate: float(f"{default * factor:.2g}")} for factor in SECOND_FACTORS]


def _defaults(preset: Mapping[str, Any]) -> dict[str, Any]:
    own = "method."
    return {key.removeprefix(own): value for key, value in preset.items() if key.startswith(own)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("federation", choices=list(FEDERATIONS))
    parser.add_argument("what", choices=["grid", "record"])
    parser.add_argument("--methods", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    asked = parser.parse_args()
    federation = FEDERATIONS[asked.federation]
    rates_of = federation.rates_of or asked.federation
    grid = Grid(asked.results / rates_of / "grid.jsonl")
    for each in asked.methods:
        of = {"method": each}
        if asked.what == "grid":
            of_rates = FEDERATIONS[rates_of]
            searched = partial(train, each, of_rates, OTHER_SEED)
            grid.search(of, of_rates.local_rates, second_rates(each), searched)
            grid.go_beyond(of, searched)
        for seed in SEEDS if asked.what == "record" else ():
            folder, rates = asked.results / asked.federation / each / f"seed{seed}", grid.best(of)
            record(folder, rates, partial(train, each, federation, seed, rates))

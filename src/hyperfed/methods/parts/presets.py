"""Presets that methods share: our default, and what a paper says of every method of its tables.

A method's preset named after a paper is that paper's, and what it says of the method beside it.
Learning rates that a paper searched for on a grid it does not give are not among them.
"""

from collections.abc import Mapping
from typing import Any

Preset = Mapping[str, Any]

DEFAULT: Preset = {"rounds": 30, "cohort": 5, "evaluate_every": 10}
"""For the bundled digits: 5 of 18 clients in each round."""

PFEDHN: Preset = {"rounds": 5000, "cohort": 5, "evaluate_every": 30, "method.local_steps": 20}
"""pFedHN: five clients a round (appendix B), at most 5,000 rounds (section 5).

It counts 60 local steps as three to each of pFedMe's local rounds, which makes 20 for the methods
with one.
"""

PEFLL: Preset = {"rounds": 5000, "cohort": 0.05, "evaluate_every": 30, "method.batch_size": 32}
"""PeFLL, section 5: 5,000 rounds of 5 % of the clients, batches of 32."""

PFEDKT: Preset = {
    "rounds": 500,
    "cohort": 0.1,
    "task.val": 0.1,
    "task.test": 0.1,
    "method.local_epochs": 10,
    "method.local_lr": 1e-2,
}
"""pFedKT, section 6.1: 8:1:1 of each client's examples, the fewest of 10, 50 and 100 epochs."""

PFLLIB: Preset = {
    "rounds": 1000,
    "cohort": 1.0,
    "evaluate_every": 10,
    "task.clients": 20,
    "task.novel": 0.0,
    "method.local_epochs": 1,
    "method.batch_size": 10,
    "method.local_lr": 5e-3,
    "method.local_momentum": 0.0,
    "method.local_weight_decay": 0.0,
}
"""The scripts of PFLlib's authors: all of 20 clients in each round, plain SGD, batches of 10."""

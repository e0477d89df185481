"""What the processes of jobs have in common: imported once, before they are forked.

Nothing here may start a thread or wake an accelerator, because neither survives a fork.
"""

# ruff: noqa: F401

import gc
from contextlib import suppress

# These are imported where they are used, since each takes long: to read data, to keep account of
# noise, for the first step of an optimiser, and to track a run.
import datasets
import dp_accounting
import sklearn.datasets
import sklearn.metrics
import torch._dynamo

import hyperfed.papers.reproduction

with suppress(ImportError):  # it need not be installed
    import torch.utils.tensorboard

# What is here is here for good. A collector that never looks at it leaves it shared.
gc.freeze()

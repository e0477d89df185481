"""What the processes that answer messages have in common: imported once, before they are forked.

Nothing here may start a thread or wake an accelerator, because neither survives a fork.
"""

# ruff: noqa: F401

import gc

# These are imported where they are used, since each takes long: to mask, to read data, to keep
# account of noise, and for the first step of an optimiser.
import cryptography.hazmat.primitives.asymmetric.x25519
import cryptography.hazmat.primitives.ciphers.aead
import cryptography.hazmat.primitives.kdf.hkdf
import datasets
import dp_accounting
import flwr.common.secure_aggregation.crypto.shamir
import sklearn.datasets
import sklearn.metrics
import torch._dynamo

import hyperfed.apps.flower.app

# What is here is here for good. A collector that never looks at it leaves it shared.
gc.freeze()

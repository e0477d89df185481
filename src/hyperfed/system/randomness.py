"""Randomness as a function of what is drawn for, never of the order of calls.

A draw made with ``generator(seed, "batches", client, round, step)`` is the same on every engine,
with any number of workers, and in a run that was killed and resumed.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *keys: str | int) -> int:
    """Returns a 63-bit seed, a hash of ``seed`` and ``keys``; order and type of keys count."""
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, *keys: str | int) -> torch.Generator:
    """Returns a CPU generator for the draws named by ``keys``."""
    return torch.Generator().manual_seed(derive(seed, *keys))


@contextmanager
def seeded(seed: int, *keys: str | int) -> Iterator[None]:
    """Makes PyTorch's global generator a function of ``keys`` inside the block, and restores it.

    For code that takes no generator: module initialisation and dropout. The global generator is
    shared by all threads, so the block must not run beside another that draws from it.
    """
    # An accelerator has a global generator of its own, which manual_seed sets too.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        # For each kind that is not awake it keeps the call's stack for good, which takes long.
        seed_all = torch.default_generator.manual_seed if _asleep() else torch.manual_seed
        seed_all(derive(seed, *keys))
        yield


def _asleep() -> bool:
    """Returns whether no accelerator has begun to compute in this process."""
    kind = torch.accelerator.current_accelerator()
    return kind is None or (kind.type == "cuda" and not torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

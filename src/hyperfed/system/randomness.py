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
    """Returns a CPU generator for the draws named by ``keys``.

    It takes 32 bits of its seed, as PyTorch's on the CPU do, so that of some 10^5 of them two may
    draw alike.
    """
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
        # Of each kind of accelerator, there or not, PyTorch would keep the call's stack for good.
        alone = torch.accelerator.current_accelerator() is None
        seed_all = torch.default_generator.manual_seed if alone else torch.manual_seed
        seed_all(derive(seed, *keys))
        yield

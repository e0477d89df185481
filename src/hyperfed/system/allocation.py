"""Memory: how much there is, and how the C library treats what tensors give back."""

import ctypes
import math
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of ``mallopt``'s parameters (glibc, malloc.h)."""

_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Bytes; glibc refuses more."""


def keep_freed_memory() -> bool:
    """Has the process keep what tensors free, for the tensors of the next step.

    By default glibc gives a freed block of some megabytes back to the kernel, which has to clear
    its pages when the next step asks for as much again: a tenth of a training step of LeNet on a
    CPU. The process then stays as large as it once was. Nothing happens where there is no glibc.

    Returns:
        whether the allocator took it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    )


def total_memory() -> float:
    """Returns the bytes of this machine's memory; infinity where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, or a system without these names
        return math.inf

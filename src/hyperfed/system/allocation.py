"""How the C library's allocator treats the memory that tensors give back."""

import ctypes

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

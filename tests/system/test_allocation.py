"""How much memory there is, and that the allocator keeps what a step frees for the next one."""

import os
import platform
import subprocess
import sys

import pytest

from hyperfed.system.allocation import total_memory

FAULTS = """
import resource, sys
from hyperfed.system.allocation import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
if sys.argv[1] == "engine":
    from hyperfed.data.tasks import TaskConfig, build
    from hyperfed.engines.local.loop import LoopEngine
    from hyperfed.methods import fedavg

    task = build(TaskConfig(clients=2, novel=0.0), seed=0)
    LoopEngine(task, fedavg.Client, fedavg.Config(), seed=0)

def step():
    return [bytearray(b"1") * 2**23 for _ in range(10)]

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints how many pages the kernel had to give in five steps of ten blocks of 8 MiB."""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="NOT TESTED: this is not glibc")
def test_pages_are_asked_for_once() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    kept, usual = faults("keep"), faults("leave")
    assert kept < 1000, "a step still asks the kernel for memory"
    assert faults("engine") < 1000, "the engine does not ask for it"
    assert usual > 10 * kept, "the allocator does so by itself: allocation.py is not needed"


def test_the_memory_of_a_machine_is_all_of_it_whatever_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says = {"SC_PHYS_PAGES": 1000, "SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", says.__getitem__)
    assert total_memory() == 1000 * 4096

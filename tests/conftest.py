"""What every test shares: no telemetry, no network, and the way to real data."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from check_method import own_tests

# Whose checks say the values that differ, as those of a test do.
pytest.register_assert_rewrite("apps.cli.checks", "methods.itpfl.checks", "together")

# Both libraries read these when they are imported, which is after this file.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
# Ray has its workers give way to all other processes: here to the tests beside them, for minutes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, Ray spells it so
# Tests have thousands of files kept for good, which takes a disk milliseconds each, and write
# gigabytes: into memory where there is plenty.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 12 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--method", help="run only what this method must pass (make check-method)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what ``--method`` asks for: its own tests, and those with a parameter ``method``.

    The slow ones come first: short ones fill up what is left of the time at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if (method := config.getoption("method")) is None:
        return
    own = own_tests(method)
    kept, left = [], []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        (kept if item.path in own or given.get("method") == method else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_collection_finish() -> None:
    """What is imported by now is there for good: a collector that looks at it only takes time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def hyperfed_data() -> Path:
    """Returns the folder of real data sets; a test that needs it is skipped where there is none."""
    folder = os.environ.get("HYPERFED_DATA")
    if folder is None:
        pytest.skip("NOT TESTED on real data: set HYPERFED_DATA to the folder of data sets")
    return Path(folder)


@pytest.fixture
def as_before() -> Iterator[None]:
    """Gives back what a job changes, which has a process of its own elsewhere."""
    import torch  # which not every test needs

    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)

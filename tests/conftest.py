"""What every test shares: no telemetry, no network, and the way to real data."""

import os
from pathlib import Path

import pytest

# Both libraries read these when they are imported, which is after this file.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def hyperfed_data() -> Path:
    """Returns the folder of real data sets; a test that needs it is skipped where there is none."""
    folder = os.environ.get("HYPERFED_DATA")
    if folder is None:
        pytest.skip("NOT TESTED on real data: set HYPERFED_DATA to the folder of data sets")
    return Path(folder)

"""What several files of these tests begin with."""

from pathlib import Path

import pytest

from own_data import saved
from sensors import windows


@pytest.fixture(scope="module")
def sensors(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The windows of thirty people as a parquet file."""
    return saved(windows(), tmp_path_factory.mktemp("sensors") / "sensors.parquet")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYPERFED_DATA", raising=False)

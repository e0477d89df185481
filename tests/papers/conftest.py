"""What tests of papers' tables share."""

from pathlib import Path

import pytest

from made_tables import make_table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_table(tmp_path)
    return tmp_path

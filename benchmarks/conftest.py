"""Options of ``make bench``, and the table at its end."""

import pytest
import torch
from rich.console import Console
from rich.table import Table

TINY = "--tiny"
FINDINGS = pytest.StashKey[list[tuple[str, str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(TINY, action="store_true", help="Sizes that only show that it runs.")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FINDINGS] = []


@pytest.fixture
def tiny(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption(TINY))


@pytest.fixture
def findings(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """What to say at the end: (what was measured, the numbers)."""
    return request.config.stash[FINDINGS]


def pytest_terminal_summary(config: pytest.Config) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("measured")
    table.add_column("result", justify="right")
    for what, result in config.stash[FINDINGS]:
        table.add_row(what, result)
    if table.row_count:
        console = Console(width=100, highlight=False)
        console.print(
            f"\nmedians with {torch.get_num_threads()} threads; ratios: (least to most)\n"
        )
        console.print(table)

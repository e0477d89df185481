"""Every experiment can be run as it stands, and says what was published."""

from pathlib import Path

import pytest

from hyperfed.runs import config

ROOT = Path(__file__).parents[1] / "experiments"
FILES = sorted(ROOT.glob("*/*.toml"))


def test_there_are_experiments_of_all_five_papers_and_of_pfllib() -> None:
    assert {path.parent.name for path in FILES} == {
        "itpfl",
        "pefll",
        "pfedhn",
        "pfedkt",
        "pfedla",
        "pfllib",
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_experiment_loads_and_begins_with_its_table_and_what_was_published(path: Path) -> None:
    config.load(str(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line for line in lines if line.startswith("#"))
    assert any(word in comment for word in ("table", "figure"))
    assert "Published" in comment or "does not say" in comment

"""The site: its pages made of docstrings, its links, its notebooks; ``make docs`` builds it."""

import json
import tomllib
from pathlib import Path
from runpy import run_path
from statistics import fmean, stdev
from types import ModuleType

import pytest

pytest.importorskip("mkdocs_gen_files", reason="NOT TESTED: needs the extra docs")

import hyperfed
import site_links
import site_pages
from hyperfed.methods import METHODS
from hyperfed.runs.keys import keys_of

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.xdist_group("records")  # which are all read for the first page
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_methods_page_says_what_every_setting_means(method: str) -> None:
    page = site_pages.method_page(method)
    own = [key for key in keys_of(method) if key.name.startswith("method.")]
    assert [key.name for key in own if not key.about] == []
    settings = page[page.index("## Settings") :]
    rows = [line for line in settings.splitlines() if line.startswith("| `")]
    assert len(rows) == len(own) + len(METHODS[method].PRESETS)
    assert "``" not in page.replace("```", "")
    assert "Sent: " in page
    assert "=None" not in page, "a command line takes none"
    assert "=False" not in page


@pytest.mark.xdist_group("records")
@pytest.mark.parametrize(
    ("paper", "column", "method", "why"),
    [
        ("pfedkt", "cifar10", "fedavg", "scaled: 0.1 of the rounds"),
        ("pfedla", "cifar10-10-short", "pfedla", "not the paper's settings, on purpose"),
        ("pfedla", "cifar10-10-short", "local", "not the paper's settings, on purpose"),
    ],
)
def test_a_methods_page_sets_records_beside_what_was_published(
    paper: str, column: str, method: str, why: str
) -> None:
    """The paper's numbers as its table of this repository has them, ours from the summaries."""
    table = tomllib.loads((ROOT / "experiments" / paper / "table1.toml").read_text())
    mean, spread = table["rows"][method]["published"]["test"][column.removesuffix("-short")]
    records = ROOT / "results" / paper / f"table1-{column}-{method}"
    summaries = [json.loads(path.read_text()) for path in records.glob("*/summary.json")]
    ours = [100 * summary["test_accuracy_client_mean"] for summary in summaries]
    cell = f"{table['columns'][column]['about']}: {table['rows'][method]['about']};"
    page = site_pages.method_page(method)
    (row,) = (line for line in page.splitlines() if f"`{paper}/table1`" in line and cell in line)
    *_, verdict, published, measured, seeds = (each.strip() for each in row.split("|")[:-1])
    assert published == f"{mean:g} ± {spread:g}"
    deviation = f" ± {stdev(ours):.1f}" if len(ours) > 1 else ""
    assert (measured, int(seeds)) == (f"{fmean(ours):.1f}{deviation}", len(ours))
    assert verdict.startswith(why)


def test_a_whole_budget_has_a_verdict_and_a_method_without_records_no_table() -> None:
    rows = site_pages.method_page("fedavg").splitlines()
    assert [row for row in rows if "| reproduced |" in row or "| missed by " in row]
    assert "## Measured beside published" not in site_pages.method_page("moon")


@pytest.mark.parametrize(
    ("text", "document", "page", "led"),
    [
        ("[a](docs/concepts.md#x)", "CONTRIBUTING.md", "contributing.md", "[a](concepts.md#x)"),
        (
            "[a](../src/hyperfed/federation.py)",
            "docs/security.md",
            "security.md",
            "[a](reference/hyperfed/federation.md)",
        ),
        ("[a](../concepts.md)", "docs/howto/x.md", "howto/x.md", "[a](../concepts.md)"),
        ("[a](../CHANGELOG.md)", "docs/x.md", "x.md", "[a](changelog.md)"),
        ("[a\nb](../tests/test_x.py)", "docs/x.md", "x.md", "a\nb"),
        ("![a](idea.svg)", "docs/x.md", "x.md", "![a](idea.svg)"),
        ("[a](https://x.org/y) [b](#z)", "docs/x.md", "x.md", "[a](https://x.org/y) [b](#z)"),
        (
            "[a](src/hyperfed/__init__.py)",
            "CHANGELOG.md",
            "changelog.md",
            "[a](reference/hyperfed/index.md)",
        ),
    ],
)
def test_links_to_files_lead_to_pages(text: str, document: str, page: str, led: str) -> None:
    assert site_links.relinked(text, document, page) == led


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_executed_and_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert "stderr" not in {shown.get("name") for cell in code for shown in cell["outputs"]}
    train = hyperfed.train
    monkeypatch.setattr(
        hyperfed, "train", lambda *given, **keys: train(*given, **{**keys, "rounds": 1})
    )
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = ModuleType(path.stem)
    for cell in code:
        exec(compile("".join(cell["source"]), str(path), "exec"), notebook.__dict__)


def test_the_first_run_is_that_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperfed, "train", lambda name, /, **keys: keys)
    path = ROOT / "docs" / "notebooks" / "first_run.ipynb"
    cell = next(c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code")
    notebook = ModuleType(path.stem)
    exec("".join(cell["source"]), notebook.__dict__)
    example = run_path(str(ROOT / "examples" / "digits.py"))
    for method, keys in notebook.runs.items():
        assert {**keys, "out": None, "seed": 0} == {**example["train"](method), "progress": False}

"""What the documents show works: Python blocks run, commands parse, files and links exist."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import typer

import check_method
import readme
from hyperfed.analysis import seeds
from hyperfed.apps import cli, training
from hyperfed.methods import METHODS
from hyperfed.runs import config, experiments
from hyperfed.runs.keys import keys_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
WITHOUT_EXAMPLES = [
    *("docs/architecture.md", "docs/tutorials/sites.md"),
    *("docs/howto/few_labels.md", "docs/howto/reproduce.md"),
]

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
LINK = re.compile(r'(?:\]\(|src=")([^)"#]+)')
EXAMPLE = "pfedsd"  # the method that CONTRIBUTING adds
TABLE = "src/hyperfed/methods/__init__.py"
OF_METHODS = re.compile(r'parametrize\("method", (?:ALL|METHODS|sorted\(METHODS\))\)')
SHARED = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
    if OF_METHODS.search(path.read_text(encoding="utf-8"))
]
"""Tests of every method."""
ACTORS, GPU = "tests/engines/ray/test_engine.py", "tests/engines/test_on_gpu.py"


@dataclass(frozen=True)
class Block:
    """A fenced block; ``title`` is the file it is, where it is one."""

    language: str
    title: str | None
    text: str
    line: int


def blocks(document: Path, language: str) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(kind, title, body, text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
        for kind, title, body in [found.groups()]
        if kind == language
    ]


def files_of(document: Path) -> dict[str, str]:
    """The files that a document writes: {path from the root: text}."""
    found = [block for kind in ("python", "toml") for block in blocks(document, kind)]
    return {block.title: block.text for block in found if block.title}


def commands_of(document: Path, section: str = "") -> Iterator[list[str]]:
    """The lines of all shell blocks, or a section's, split into words, without comments."""
    before, _, after = document.read_text(encoding="utf-8").partition(f"\n## {section}\n")
    first = before.count("\n") if section else 0
    last = first + after.partition("\n## ")[0].count("\n") + 3 if section else sys.maxsize
    for block in blocks(document, "sh"):
        if not first <= block.line <= last:
            continue
        for line in block.text.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test, and its alone."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_EXAMPLES])
def test_python_blocks_run_one_after_another(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, document)
    run = [block for block in blocks(ROOT / name, "python") if not block.title]
    assert run, "a document without an example needs no place in this test"
    for block in run:
        lines = "\n" * block.line + block.text  # so that a traceback tells the document's lines
        exec(compile(lines, str(ROOT / name), "exec"), document.__dict__)


def as_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a file that belongs to no package."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def write_files(document: Path, folder: Path) -> None:
    """Writes the files that a document shows below ``folder``."""
    for path, text in files_of(document).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(ROOT / name, folder)
    if (added := folder / "src" / "hyperfed" / "methods" / f"{EXAMPLE}.py").exists():
        monkeypatch.setitem(METHODS, EXAMPLE, as_module(added, monkeypatch))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    group = typer.main.get_command(cli.app)
    for program, *arguments in commands_of(ROOT / name):
        if program == "make":
            assert arguments[0] in targets
            continue
        assert program == "hyperfed", "what else there is to check must be told here"
        context = group.make_context(program, list(arguments), resilient_parsing=False)
        command, *rest = arguments
        chosen = group.get_command(context, command)  # type: ignore[attr-defined]
        assert chosen is not None, f"hyperfed has no command {command}"
        given = chosen.make_context(command, rest, parent=context).params
        if command == "run":
            for source in METHODS if given["source"] == training.ALL else [given["source"]]:
                for settings in seeds.asked_for(given["settings"] or ()):
                    config.load(source, settings)


@pytest.mark.parametrize("name", NAMES)
def test_experiment_files_load(name: str, folder: Path) -> None:
    for path, text in files_of(ROOT / name).items():
        if path.endswith(".toml"):
            file = folder / "experiment.toml"
            file.write_text(text, encoding="utf-8")
            table = experiments.is_table(file)
            for cell in experiments.read(file).cells if table else [None]:
                config.load("experiment.toml" if cell is None else f"experiment.toml:{cell}")


@pytest.mark.parametrize(
    "name", [*NAMES, "CHANGELOG.md", "benchmarks/README.md", "results/README.md"]
)
def test_links_lead_to_files(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    local = [link for link in LINK.findall(text) if not link.startswith(("http", "#"))]
    missing = [link for link in local if not ((ROOT / name).parent / link).exists()]
    assert missing == []


def test_settings_of_methods_that_documents_name_are_there() -> None:
    known = {key.name for method in METHODS for key in keys_of(method)}
    assert "method.novel_models" in known
    for document in DOCUMENTS:
        named = set(re.findall(r"`(method\.\w+)\b", document.read_text(encoding="utf-8")))
        assert named <= known, document


def test_the_architecture_tells_where_what_is_and_leaves_out_no_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    source = ROOT / "src" / "hyperfed"
    named = re.findall(r"`([\w/]+(?:\.py|/))`", text)
    assert [name for name in named if not (source / name).exists() and name != "tests/"] == []
    table = re.findall(r"^\| `([\w/.]+)` \|", text, re.MULTILINE)
    rooms = {f"{path.parent.relative_to(source)}/" for path in source.rglob("__init__.py")} - {"./"}
    files = {path.name for path in source.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert sorted(table) == sorted(rooms | files)


def test_documents_have_the_tables_that_docstrings_and_records_make() -> None:
    for document, tables in readme.DOCUMENTS.items():
        text = document.read_text(encoding="utf-8")
        assert readme.written(text, tables) == text, "run make readme"
    deploy = (readme.DOCS / "deploy.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", deploy, re.MULTILINE)) >= set(METHODS)
    section = readme.README.read_text(encoding="utf-8").partition("\n## Methods\n")[2]
    listed = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == list(METHODS)


@pytest.mark.parametrize(
    ("docstring", "row"),
    [
        ("Alone: as one (or two).\n\nSent: https://x.org.", "|  | as one (or two) |"),
        (
            "M (A & B, C 2020): it.\n\nPaper: https://x.org/1, algorithm 1.",
            "| [A & B, C 2020](https://x.org/1) | it |",
        ),
        (
            "M (A, 2020; B, 2021): it.\n\nPaper: https://x.org/1; then https://x.org/2.\nSent: it.",
            "| [A, 2020](https://x.org/1), [B, 2021](https://x.org/2) | it |",
        ),
        ("M (A, 2020): it.\n\nSent: it.\n\nPaper: https://x.org/1.", "| A, 2020 | it |"),
    ],
)
def test_a_row_of_the_readme_is_what_a_docstring_begins_with(
    docstring: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS["fedavg"], "__doc__", docstring)
    assert readme.row("fedavg") == f"| `fedavg` {row}"


@pytest.mark.parametrize("docstring", ["M (A, 2020) it.", "M (A): it.", "M (A, 2020): it", ""])
def test_a_docstring_that_begins_otherwise_is_told(
    docstring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS["fedavg"], "__doc__", docstring)
    with pytest.raises(ValueError, match=r"fedavg must begin with 'Name \(authors, venue year\): "):
        readme.row("fedavg")
    assert "must begin with" in str(check_method.problem("fedavg"))


def test_a_method_to_check_is_known_and_has_tests_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_method.problem("pfedhn_pc") is None
    assert [path.name for path in check_method.own_tests("fedavg")] == ["test_baselines.py"]
    assert {path.parent.name for path in check_method.own_tests("itpfl")} == {"itpfl"}
    assert "add it there" in str(check_method.problem("fedavgg"))
    assert "M must be a method" in str(check_method.problem(""))
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    sections = [readme.BEGIN.format(name) + readme.END.format(name) for name in readme.SECTIONS]
    readme.README.write_text("".join(sections))
    assert "make readme" in str(check_method.problem("fedavg"))
    monkeypatch.setattr(check_method, "TESTS", tmp_path)
    assert "write tests/methods/test_fedavg.py" in str(check_method.problem("fedavg"))


# The walk-through of CONTRIBUTING, followed to the letter in a copy of the project.


def patched(text: str, diff: str) -> str:
    """Applies the hunks of a diff without line numbers, which ``@@`` separates."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        new = "\n".join(line[1:] for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"CONTRIBUTING's change no longer fits {TABLE}:\n{old}"
        text = text.replace(old, new)
    return text


def unwanted(folder: str, names: list[str]) -> set[str]:
    """What a clone of the project does not have, or no test reads; caches save time."""
    made = {"runs", "build", "dist", "shared"} if Path(folder) == ROOT else set()
    hidden = {name for name in names if name.startswith(".")} - {".mypy_cache"}
    return hidden | made & {*names}


@pytest.mark.slow
def test_the_walkthrough_to_the_letter_adds_a_method_that_passes_all_that_it_must(
    tmp_path: Path,
) -> None:
    """In a copy of the project: its files, its change, and its commands one after another."""
    copy, document = tmp_path / "copy", ROOT / "CONTRIBUTING.md"
    shutil.copytree(ROOT, copy, ignore=unwanted)
    write_files(document, copy)
    (change,) = [block for block in blocks(document, "diff") if block.title == TABLE]
    table = copy / TABLE
    table.write_text(patched(table.read_text(encoding="utf-8"), change.text), encoding="utf-8")
    here = [f"BIN={Path(sys.executable).parent}"]
    for name in ("USABLE", "READY"):  # this environment has what make would install
        (tmp_path / name).touch()
        here.append(f"{name}={tmp_path / name}")
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    environment["PYTEST_XDIST_AUTO_NUM_WORKERS"] = "0"  # the other cores have other tests
    # Its actors take longer to start than all the rest, and send what the others send.
    environment["PYTEST_ADDOPTS"] = f"--deselect {ACTORS}"
    said = {}
    for program, *arguments in commands_of(document, "Adding a method"):
        command = [sys.executable, "-m", program, *arguments]
        command = ["make", *arguments, *here] if program == "make" else command
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said[arguments[0]] = done.stdout
    (summary,) = copy.glob(f"runs/{EXAMPLE}/*/summary.json")
    assert json.loads(summary.read_text())["rounds"] == 2
    assert f"| `{EXAMPLE}` | [Jin et al., TPDS 2023](https" in (copy / "README.md").read_text()
    ran = said["check-method"]
    passed = set(re.findall(r"^(tests/\S+?)::.* PASSED", ran, re.MULTILINE))
    assert passed >= {*SHARED, f"tests/methods/test_{EXAMPLE}.py"} - {ACTORS, GPU}
    assert set(re.findall(r"::\w+\[(\w+)", ran)) & {*METHODS} == set()

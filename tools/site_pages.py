"""Writes the pages of the site that are made of something else; MkDocs runs it (mkdocs.yml).

A page for every method, of its docstring and its settings; a page of reference for every module;
the documents that lie elsewhere in the repository; and the navigation.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import cleandoc
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import mkdocs_gen_files

import readme
from hyperfed.methods import METHODS
from hyperfed.papers import report
from hyperfed.runs import experiments
from hyperfed.runs.keys import keys_of, written
from site_links import OUTSIDE, reference, relinked

ROOT = Path(__file__).parents[1]

SUMMARY = """\
- [Tour](index.md)
- Tutorials
    - [Your own data](tutorials/own_data.md)
    - [A client that comes later](tutorials/newcomer.md)
    - [Real sites](tutorials/sites.md)
- How to
    - [Tune a method](howto/tuning.md)
    - [Few labels](howto/few_labels.md)
    - [No labels](howto/no_labels.md)
    - [Many clients](howto/many_clients.md)
    - [Several architectures](howto/architectures.md)
    - [Reproduce a paper's table](howto/reproduce.md)
    - [Adapters of a pretrained network](adapters.md)
- Notebooks
    - [One model cannot serve all](notebooks/first_run.ipynb)
    - [What an embedding knows](notebooks/embeddings.ipynb)
    - [What a newcomer needs](notebooks/newcomer.ipynb)
- Methods
    - [All methods](methods/index.md)
{methods}
- Understand
    - [Concepts](concepts.md)
    - [Architecture](architecture.md)
    - [Adding a method](contributing.md)
- Operate
    - [Deploying](deploy.md)
    - [Security](security.md)
- Measured
    - [Beside what was published](measured.md)
    - [Benchmarks](benchmarks.md)
    - [Changes](changelog.md)
- Reference
{reference}
"""
"""What the site's navigation shows."""


def main() -> None:
    """Writes all pages."""
    for name in METHODS:
        write(f"methods/{name}.md", method_page(name))
    write("methods/index.md", f"# Methods\n\n{linked(readme.table())}")
    for document, page in OUTSIDE.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        write(page, relinked(text, document, page))
    modules = []
    for source in sorted((ROOT / "src" / "hyperfed").rglob("*.py")):
        path = PurePosixPath(source.relative_to(ROOT).as_posix())
        if path.name != "__main__.py":
            write(reference(path), f"::: {dotted(path)}\n")
            modules.append((dotted(path), reference(path)))
    of_methods = [(readme.parts(name)["name"], f"methods/{name}.md") for name in METHODS]
    write("SUMMARY.md", SUMMARY.format(methods=listed(of_methods), reference=listed(modules)))


def write(page: str, text: str) -> None:
    """Writes a page of the site."""
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)


def listed(pages: list[tuple[str, str]]) -> str:
    """Returns (title, page) as entries of a section of the navigation."""
    return "\n".join(f"    - [{title}]({page})" for title, page in pages)


def dotted(source: PurePosixPath) -> str:
    """Returns the name under which a module is imported."""
    parts = source.relative_to("src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def linked(table: str) -> str:
    """Returns the table of methods with each name leading to its page."""
    return re.sub(r"^\| (`(\w+)`) \|", r"| [\1](\2.md) |", table, flags=re.MULTILINE)


def method_page(name: str) -> str:
    """Returns the page of a method."""
    method = METHODS[name]
    said = readme.parts(name)
    _, _, body = cleandoc(method.__doc__ or "").partition("\n\n")
    _, _, papers, *_ = readme.row(name).split("|")
    about = f"{said['about'][0].upper()}{said['about'][1:]}."
    lines = [
        f"# {said['name']}",
        f"{about} {papers.strip()}.".removesuffix(" ."),
        f"```sh\nhyperfed run {name}\n```",
        literal(body),
        *measured(name),
        "## Settings",
        "On the command line `method.KEY=VALUE`, in Python `method={...}`. Defaults are those of "
        "the preset `default`.",
        "\n".join(settings(name)),
        "## Presets",
        "\n".join(presets(method.PRESETS)),
        f"The code: [`{method.__name__}`](../{reference(source_of(method))}).",
    ]
    return "\n\n".join(lines) + "\n"


@cache
def records() -> dict[str, str]:
    """Returns for each method the table of its records beside what was published."""
    return report.of_methods(ROOT / "results", experiments.find_all(ROOT / "experiments"))


def measured(name: str) -> Iterator[str]:
    """Yields the section of a method's records, where it has some of a paper's cells."""
    if name in records():
        yield "## Measured beside published"
        yield (
            "Mean ± deviation over seeds of our records, and what the papers say; "
            "[what the columns mean, costs, figures](../measured.md)."
        )
        yield records()[name]


def source_of(method: ModuleType) -> PurePosixPath:
    """Returns the file of a method, from the root."""
    return PurePosixPath("src", *method.__name__.split(".")).with_suffix(".py")


def literal(text: str) -> str:
    """Returns text of a docstring as Markdown, in which code has one backtick and roles none."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def cell(text: str) -> str:
    """Returns text as the cell of a table."""
    return text.replace("|", "\\|")


def settings(name: str) -> Iterator[str]:
    """Yields the table of a method's settings."""
    yield "| key | takes | default | meaning |"
    yield "|---|---|---|---|"
    own = "method."
    for key in keys_of(name):
        if key.name.startswith(own):
            takes, about = cell(key.type), cell(key.about)
            yield f"| `{key.name.removeprefix(own)}` | {takes} | `{key.default}` | {about} |"


def presets(named: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table of a method's presets."""
    yield "| preset | sets |"
    yield "|---|---|"
    for name, keys in named.items():
        sets = ", ".join(f"`{key}={written(value)}`" for key, value in keys.items()) or "nothing"
        yield f"| `{name}` | {sets} |"


if __name__ == "<run_path>":  # as MkDocs calls it
    main()

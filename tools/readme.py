"""Writes the tables of README.md: of methods, from their docstrings, and of the first run.

    make readme

The first run's is the mean of the records in ``results/first_run``, of all their seeds.

A docstring begins with ``Name (authors, venue year): what it is in a line.`` Several papers are
parted by semicolons. Where a paper can be read, the next paragraph begins with ``Paper:`` and gives
a link for each. ``hyperfed list methods`` shows the same line.
"""

import json
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from hyperfed.methods import METHODS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- {}: written by make readme -->\n", "<!-- {}: end -->\n"
ACCURACIES = ("test_accuracy", "novel_accuracy")
FIRST_RUN = README.parent / "results" / "first_run"
FIRST_LINE = re.compile(
    r"(?P<name>[^:(]+?)(?: \((?P<papers>[^)]+ \d{4}(?:; [^)]+ \d{4})*)\))?: (?P<about>.+)\."
)


def parts(method: str) -> dict[str, str]:
    """Returns what a method's docstring begins with: {name, papers, about}, and {links} to those.

    Raises:
        ValueError: it begins otherwise.
    """
    first, _, rest = (METHODS[method].__doc__ or "").partition("\n")
    said = FIRST_LINE.fullmatch(first)
    if said is None:
        raise ValueError(
            f"the docstring of {method} must begin with 'Name (authors, venue year): what it is in "
            f"a line.', came {first!r}"
        )
    second = rest.strip().partition("\n\n")[0]
    links = re.findall(r"https://[^\s,;]+[^\s,;.]", second) if second.startswith("Paper:") else []
    return said.groupdict(default="") | {"links": " ".join(links)}


def row(method: str) -> str:
    """Returns a method's row of the table."""
    said = parts(method)
    papers = zip_longest(said["papers"].split("; "), said["links"].split())
    cited = ", ".join(f"[{paper}]({link})" if link else paper for paper, link in papers)
    return f"| `{method}` | {cited} | {said['about']} |"


def table() -> str:
    """Returns the table of all methods, in the order in which they are listed."""
    return "\n".join(["| method | paper | in a line |", "|---|---|---|", *map(row, METHODS)]) + "\n"


def first_run_table() -> str:
    """Returns mean and range over seeds of what ``make run`` shows of the first seed."""
    lines = ["| method | clients that trained | clients that joined afterwards |", "|---|---|---|"]
    for method in METHODS:
        files = sorted((FIRST_RUN / method).glob("seed*/summary.json"))
        if not files:
            continue
        summaries = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        cells = [_mean_and_range([s[key] for s in summaries]) for key in ACCURACIES]
        lines.append(" | ".join([f"| `{method}`", *cells]) + " |")
    return "\n".join(lines) + "\n"


def _mean_and_range(values: Sequence[float]) -> str:
    mean, low, high = (f"{100 * v:.1f}" for v in (fmean(values), min(values), max(values)))
    return f"{mean} % ({low} to {high})"


SECTIONS = {"first run": first_run_table, "methods": table}
"""Name -> what makes what stands there."""


def written(text: str) -> str:
    """Returns the text of README.md with the tables as they should be.

    Raises:
        ValueError: a docstring begins otherwise, or the text has no place for a table.
    """
    for name, made in SECTIONS.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not (found and last):
            raise ValueError(f"README.md must have the lines {begin!r} and {end!r}")
        text = before + begin + made() + end + after
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")

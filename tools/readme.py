"""Writes the table of methods in README.md from what the methods' docstrings say.

    make readme

A docstring begins with ``Name (authors, venue year): what it is in a line.`` Several papers are
parted by semicolons. Where a paper can be read, the next paragraph begins with ``Paper:`` and gives
a link for each. ``hyperfed list methods`` shows the same line.
"""

import re
from itertools import zip_longest
from pathlib import Path

from hyperfed.methods import METHODS

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- methods: written by make readme -->\n", "<!-- methods: end -->\n"
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


def written(text: str) -> str:
    """Returns the text of README.md with the table as it should be.

    Raises:
        ValueError: a docstring begins otherwise, or the text has no place for the table.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"README.md must have the lines {BEGIN!r} and {END!r}")
    return before + begin + table() + end + after


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")

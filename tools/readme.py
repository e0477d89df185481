"""Writes the tables of README.md and of four pages of the documentation.

    make readme

Those of methods are of their docstrings; the others are means of records in ``results``, of all
their seeds.

A docstring begins with ``Name (authors, venue year): what it is in a line.`` Several papers are
parted by semicolons. Where a paper can be read, the next paragraph begins with ``Paper:`` and gives
a link for each. ``hyperfed list methods`` shows the same line.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from hyperfed.analysis.budgets import budget_of, within
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.papers.agreement import read_run
from hyperfed.runs.folder import RunRecord
from hyperfed.runs.records import FinishedRun

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
SENT = re.compile(r"Sent: (.+?)(?= (?:Kept|Aggregated|Averaged|Evaluated|A novel client)\b|\n\n|$)")
BEGIN, END = "<!-- {}: written by make readme -->\n", "<!-- {}: end -->\n"
ACCURACIES = ("test_accuracy", "novel_accuracy")
RESULTS = README.parent / "results"
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


def sent(method: str) -> str:
    """Returns what travels, as a method's docstring says it.

    Raises:
        ValueError: it does not.
    """
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", METHODS[method].__doc__ or "")
    said = SENT.search(text)
    if said is None:
        raise ValueError(f"the docstring of {method} must say what is sent, after 'Sent:'")
    return said[1].replace("``", "`").replace("|", "\\|")


def table_of_sent() -> str:
    """Returns what travels with each method, in the order in which they are listed."""
    rows = [f"| `{method}` | {sent(method)} |" for method in METHODS]
    return "\n".join(["| method | sent |", "|---|---|", *rows]) + "\n"


def table_of_records(folder: str, *, best_first: bool = False) -> str:
    """Returns mean and range over seeds of what records reached, ``results/FOLDER/METHOD/seedN``.

    The last column is of when as much was sent as by FedAvg in all; a dash stands where a method
    was not evaluated so early.

    Args:
        folder: of ``results``.
        best_first: in the order of the clients that trained, not as methods are listed.
    """
    found = _records(folder)
    sent = budget_of("mb", found["fedavg"])
    heads = [
        *("method", "clients that trained", "clients that joined afterwards"),
        f"clients that trained, after {sent.most:,.0f} MB",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    order = list(found)
    if best_first:
        order.sort(key=lambda name: -fmean(_reached(found[name], ACCURACIES[0])))
    for name in order:
        called, how = _method_of(name)
        cells = [_mean_and_range(_reached(found[name], key)) for key in ACCURACIES]
        try:
            early = [within(run, sent) for run in found[name]]
        except UserError:
            cells.append("–")
        else:
            cells.append(_mean_and_range(_reached(early, ACCURACIES[0])))
        lines.append(f"| `{called}`{how} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _records(folder: str) -> dict[str, list[RunRecord]]:
    """Returns the records of each method in a folder of ``results``, as methods are listed.

    Those of a folder that ends in ``_again`` are the same trainings once more.
    """
    listed = list(METHODS)
    found: dict[str, list[RunRecord]] = {}
    for which in (folder, f"{folder}_again"):
        for path in sorted(RESULTS.glob(f"{which}/*/seed*")):
            found.setdefault(path.parent.name, []).append(read_run(path))
    return dict(sorted(found.items(), key=lambda item: listed.index(_method_of(item[0])[0])))


def _reached(runs: Sequence[FinishedRun], key: str) -> list[float]:
    """Returns a number of each run's summary."""
    return [run.summary[key] for run in runs if run.summary]


def table_of_architectures() -> str:
    """Returns the same for clients of each architecture, of ``results/architectures``."""
    from architectures import ARCHITECTURES, CLIENTS, architecture  # slow, and seldom needed

    methods = [path for name in METHODS if (path := RESULTS / "architectures" / name).is_dir()]
    heads = ["clients", "architecture", *(f"`{method.name}`" for method in methods)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for split, who in (("test", "that trained"), ("novel", "that joined afterwards")):
        for kind in (*ARCHITECTURES, "all"):
            taken = {i for i in range(CLIENTS) if kind in ("all", architecture(i))}
            cells = [
                _mean_and_range([_accuracy(one, split, taken) for one in method.glob("seed*")])
                for method in methods
            ]
            lines.append(f"| {' | '.join([who, kind, *cells])} |")
    return "\n".join(lines) + "\n"


def _accuracy(record: Path, split: str, taken: Collection[int]) -> float:
    """Returns the best model's accuracy on all examples of some clients.

    Newcomers are served once, by that model, when training is over.
    """
    best = json.loads((record / "summary.json").read_text(encoding="utf-8"))["best_round"]
    lines = map(json.loads, (record / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    of = next(
        line
        for line in lines
        if line["split"] == split and (split == "novel" or line["round"] == best)
    )
    everybody = zip(of["clients"], of["client_accuracy"], of["count"], strict=True)
    counted = [(own * count, count) for i, own, count in everybody if i in taken]
    return float(sum(right for right, _ in counted) / sum(count for _, count in counted))


def _method_of(folder: str) -> tuple[str, str]:
    """Returns the method of a folder, and how it was served."""
    for ending, how in ENDINGS.items():
        if folder.endswith(ending):
            return folder.removesuffix(ending), how
    return folder, ""


def _mean_and_range(values: Sequence[float]) -> str:
    mean, low, high = (f"{100 * v:.1f}" for v in (fmean(values), min(values), max(values)))
    return f"{mean} % ({low} to {high})"


ENDINGS = {
    "_finetuned": ", fine-tuned",
    "_unlabelled": ", newcomers without labels",
    "_common": ", its common model alone",
    "_own_head": ", with last layers of their own",
}
"""Of the folder of a method that was served otherwise -> what is said of it."""

SECTIONS: Mapping[str, Callable[[], str]] = {
    "first run": partial(table_of_records, "first_run"),
    "methods": table,
}
"""Name -> what makes what stands there in README.md."""

DOCUMENTS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    README: SECTIONS,
    DOCS / "howto" / "few_labels.md": {
        name: partial(table_of_records, name.replace(" ", "_"), best_first=True)
        for name in (
            "own labels",
            "alphabets",
            "writers",
            "roles",
            "few labels",
            "two classes 50",
            "two classes 10",
            "two classes 100",
            "dirichlet 0.1",
            "dirichlet 1",
            "many labels",
        )
    },
    DOCS / "howto" / "architectures.md": {"architectures": table_of_architectures},
    DOCS / "deploy.md": {"sent": table_of_sent},
    DOCS / "security.md": {"robust": (RESULTS / "robust" / "robust.md").read_text},
}
"""The same of every document that has such tables."""


def written(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Returns the text of a document with the tables as they should be.

    Raises:
        ValueError: a docstring begins otherwise, or the text has no place for a table.
    """
    for name, made in sections.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if not (found and last):
            raise ValueError(f"the text must have the lines {begin!r} and {end!r}")
        text = before + begin + made() + end + after
    return text


if __name__ == "__main__":
    for document, tables in DOCUMENTS.items():
        text = written(document.read_text(encoding="utf-8"), tables)
        document.write_text(text, encoding="utf-8")

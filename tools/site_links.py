"""Leads links of documents that point at files of the repository to the site's own pages.

In the repository ``docs/security.md`` links to ``../src/hyperfed/federation.py``, and CONTRIBUTING
to ``docs/concepts.md``: on the site the one is a page of the reference, the other lies beside it.
"""

import posixpath
import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")

OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "measured.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Documents outside of docs/ -> their page."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Is called by MkDocs with the text of each page."""
    uri = page.file.src_uri
    return relinked(markdown, f"docs/{uri}", uri)


def relinked(text: str, document: str, page: str) -> str:
    """Returns a document's text with its links to files of the repository turned into pages.

    A link to a file that has no page becomes its words.

    Args:
        text: Markdown.
        document: its path from the root of the repository, to which its links are relative.
        page: its path on the site.
    """

    def lead(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        to = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(document), target)))
        if to is None:
            return words
        return f"[{words}]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{anchor})"

    return LINK.sub(lead, text)


def page_of(file: str) -> str | None:
    """Returns the page of a file, by their paths from the roots, or None where there is none."""
    path = PurePosixPath(file)
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.parts[:2] == ("src", "hyperfed") and path.suffix == ".py":
        return reference(path)
    return "methods/index.md" if file == "README.md" else OUTSIDE.get(file)  # for its table


def reference(source: PurePosixPath) -> str:
    """Returns the page of the reference of a module, ``src/hyperfed/...py``."""
    module = source.relative_to("src").with_suffix("")
    module = module.parent / "index" if module.name == "__init__" else module
    return f"reference/{module}.md"

"""A report as a file: Markdown without figures, or one self-contained HTML page with them."""

import re
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from hyperfed.papers.report import Report
from hyperfed.system.files import atomic_write, check_suffix

SUFFIXES = (".html", ".md")

FIGURE = re.compile(r"^\{figure (.+)\}$\n?\n?", re.MULTILINE)

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
  max-width: 86rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1, h2, h3, h4 { line-height: 1.25; }
h2 { margin-top: 3rem; border-bottom: 2px solid #0072b2; padding-bottom: .2rem; }
h3 { margin-top: 2.2rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { text-align: left; background: #f2f5f8; }
th:first-child, td:first-child { position: sticky; left: 0; min-width: 8rem;
  white-space: normal; overflow-wrap: normal; }
td:first-child { background: #fff; }
pre { background: #f2f5f8; padding: .7rem; overflow-x: auto; }
code { background: #f2f5f8; overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; min-width: 30rem; height: auto; }
"""


def write(report: Report, title: str, path: Path) -> None:
    """Writes a report, as the file's ending says.

    Raises:
        UserError: another ending, or the disk refuses.
    """
    check_suffix(path, SUFFIXES, "report")
    text = f"# {title}\n\n{report.text}"
    if path.suffix == ".md":
        atomic_write(path, FIGURE.sub("", text).encode())
    else:
        atomic_write(path, page(text, report.figures, title).encode())


def page(text: str, figures: dict[str, str], title: str) -> str:
    """Returns Markdown as a page that needs nothing but itself.

    Args:
        text: Markdown, with figures by name.
        figures: name -> SVG.
        title: of the page.
    """
    body = MarkdownIt("commonmark").enable("table").render(text)
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    for name, svg in figures.items():
        shown = f'<figure role="img" aria-label="{escape(name)}">{_apart(svg, name)}</figure>'
        body = body.replace(f"<p>{{figure {escape(name)}}}</p>", shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _apart(svg: str, name: str) -> str:
    """Returns an SVG whose ids no other figure of the page has."""
    mark = re.sub(r"\W", "_", name)
    svg = re.sub(r'\bid="', f'id="{mark}_', svg)
    svg = re.sub(r"url\(#", f"url(#{mark}_", svg)
    return re.sub(r'href="#', f'href="#{mark}_', svg)

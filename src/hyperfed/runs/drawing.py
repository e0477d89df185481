"""What all figures have in common: colours that anyone can tell apart, and files."""

from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from hyperfed.system.files import atomic_write, check_suffix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which people with any colour vision can tell apart; yellow left out."""

DASHES = ("-", "--", ":", "-.")
"""Told apart where colours are used up or not printed."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")

LEFT_OUT = {"svg": ("Creator", "Date", "Format", "Type"), "pdf": ("CreationDate",)}
"""By format, what would stand in a file beside the drawing: when and by what it was made."""


def look(index: int, *of: Literal["linestyle", "marker"]) -> dict[str, Any]:
    """Returns how what belongs to one of many is drawn: its colour, and what else is asked for."""
    every = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {kind: every[kind][index % len(every[kind])] for kind in ("color", *of)}


def chosen_round(validated: Iterable[bool]) -> str:
    """Returns what to call the round whose models are used.

    Args:
        validated: whether each run that is drawn has validation data to choose by.
    """
    names = ("last round", "best validation round")
    return " or ".join(dict.fromkeys(names[has] for has in validated))


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of so many inches."""
    # Not pyplot, which would keep every figure in memory and ask for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def finish(axes: "Axes", across: str, up: str, grid: Literal["x", "y", "both"] = "both") -> None:
    """Says what axes are, and leaves them a light grid behind what is drawn and no frame."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.92" if grid == "both" else "0.9")
    axes.set_axisbelow(True)


def write(figure: "Figure", file: IO[Any], ending: str) -> None:
    """Writes a figure in a format; the same bytes of SVG and PDF for the same drawing."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "hyperfed"}):  # or elements get names by chance
        metadata = dict.fromkeys(LEFT_OUT.get(ending, ()))
        figure.savefig(file, format=ending, dpi=200, metadata=metadata)


def save(figure: "Figure", path: Path) -> None:
    """Writes a figure whole or not at all.

    Raises:
        UserError: the file's name ends in no format of figures, or the disk refuses.
    """
    formats = sorted(figure.canvas.get_supported_filetypes())
    check_suffix(path, [f".{name}" for name in formats], "figure")
    atomic_write(path, lambda file: write(figure, file, path.suffix.removeprefix(".")))

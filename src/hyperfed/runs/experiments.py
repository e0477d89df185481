"""Experiment files: the settings of one run, or a paper's table with what it published.

A table has rows (methods, or whatever is compared), columns (tasks) and a cell for each of both,
``COLUMN-ROW``, that can be run: ``experiments/pefll/table1.toml:cifar10-100-pefll``. Its settings
are those of the table, on top of them the column's, the row's, and its own; published numbers stand
beside them. In TOML::

    [table]
    paper = "PeFLL (Scott et al., ICLR 2024)"
    title = "Accuracy on seen and unseen clients"
    set.task.novel = 0.1                           # keys of a run, for all cells

    [measures.seen]                                # what is compared to what was published
    metric = "test_zeroed_accuracy"                # a number of a run's summary
    place = "table 1a"

    [columns.cifar10-100]
    about = "CIFAR-10, 100 clients"
    set.task = { name = "cifar10", clients = 100 }

    [rows.pefll]
    about = "PeFLL"
    set.preset = "official"
    published.seen = { cifar10-100 = [88.9, 0.7] } # mean and spread, or a number without any
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError, fields_wrong, nearest
from hyperfed.system import toml
from hyperfed.system.files import check_file

PAPERS = tuple(Path(__file__).parents[up] / "experiments" for up in (1, 3))
"""Where the papers' tables are: in a package from a wheel, and in a checkout, at its root."""

Settings = dict[str, Any]
"""Keys of a run as TOML nests them."""

FigureName = Literal[
    "weights",
    "heatmap",
    "layers",
    "embedding",
    "crossed",
    "shift",
    "variation",
    "gap",
    "correlation",
    "rounds",
]
"""What a report can draw of a table's records (:mod:`hyperfed.runs.learned`)."""

Tried = Annotated[tuple[int | float, ...], Field(min_length=2)]
"""Values of a setting."""

_STRICT = ConfigDict(extra="forbid")


MOST_NAMED = 12
"""Cells that a message names, at most."""

MOST_SEEDS = 1000
"""Of one command or table: each is a training, and all are listed before the first begins."""


@dataclass(frozen=True)
class Published:
    """A number of a paper, in the unit of its measure.

    Attributes:
        value: the number, mostly a mean.
        spread: as it stands behind the ±; None where there is none.
    """

    value: float
    spread: float | None = None


@dataclass(frozen=True, config=_STRICT)
class Served:
    """How novel clients of each run are served further when it is done.

    Attributes:
        samples: training examples that each of them has.
        epsilon: of the noise on what they send, one after the other; they are served without any,
            too.
        draws: how often with noise.
    """

    samples: tuple[PositiveInt, ...]
    epsilon: tuple[PositiveFloat, ...] = ()
    draws: PositiveInt = 1

    @property
    def files(self) -> dict[str, tuple[int, float | None]]:
        """Name of a file beside the record -> (examples, epsilon, None for no noise)."""
        return {
            f"novel-n{samples}{'' if epsilon is None else f'-epsilon{epsilon}'}.json": (
                samples,
                epsilon,
            )
            for samples in self.samples
            for epsilon in (None, *self.epsilon)
        }


@dataclass(frozen=True, config=_STRICT)
class Bound:
    """At which points both sides of PeFLL's theorem 4.2 are measured when a run is done.

    They are all pairs of two variances, chosen without a look at the data.

    Attributes:
        networks: variances of the Gaussians around hypernetwork and descriptor network.
        models: variances of those around clients' models.
        delta: probability that the bound does not hold, for all points together.
        draws: of networks and models at each point.
    """

    networks: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    models: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    draws: PositiveInt = 20


@dataclass(frozen=True, config=_STRICT)
class About:
    """What ``[table]`` says.

    Attributes:
        paper: name, authors, venue and year.
        title: what the table shows.
        seeds: how many it is measured with.
        spread: of what the published spreads are, such as "standard deviation over three seeds".
        remarks: in what these settings differ from the paper's, or what it leaves open.
        figures: that the report draws of its records, beside those of every table.
        along: how columns or rows are called that differ in a number, such as ``depth`` of
            ``depth1``, ``depth2`` or ``cifar10`` of ``cifar10-0.1`` -> what the number is. The
            report draws what was measured along it.
        served: how novel clients are served beside what the settings say; None for not at all.
        bound: of a run that is done (:mod:`hyperfed.papers.bound`); None for none.
        set: settings of every cell.
    """

    paper: str
    title: str
    seeds: Annotated[PositiveInt, Field(le=MOST_SEEDS)] = 3
    spread: str = ""
    remarks: tuple[str, ...] = ()
    figures: tuple[FigureName, ...] = ()
    along: dict[str, str] = field(default_factory=dict)
    served: Served | None = None
    bound: Bound | None = None
    set: Settings = field(default_factory=dict)


@dataclass(frozen=True, config=_STRICT)
class Measure:
    """A number of a run that is set beside what was published.

    Attributes:
        metric: its key in ``summary.json``.
        place: where the paper has it.
        about: which one it is, in words.
    """

    metric: str
    place: str
    about: str = ""


@dataclass(frozen=True, config=_STRICT)
class Column:
    """A task.

    Attributes:
        about: what it is, in words.
        set: its settings.
        like: the column whose published numbers stand for its own.
        judged: whether settings are as near to the paper's as can be. Where they are not on
            purpose, what was published is shown and no verdict given.
        remarks: in what its settings differ from the paper's.
    """

    about: str
    set: Settings = field(default_factory=dict)
    like: str | None = None
    judged: bool = True
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class Row:
    """A method, or another thing that is compared.

    Attributes:
        about: its name in the paper.
        set: its settings; without ``method`` the row is called as its method.
        columns: in which it has a cell, patterns as of files; a leading ``!`` takes cells away.
        cells: settings of single cells, by column.
        grid: setting -> values that are tried: the row becomes one for each point, called
            ``ROW-SETTING<value>-...`` by the last part of a setting's name, and the report has them
            side by side.
        published: measure -> column -> what the paper says.
        like: the row whose published numbers stand for its own.
        judged: as a column's.
        remarks: in what its settings differ from the paper's.
    """

    about: str
    set: Settings = field(default_factory=dict)
    columns: tuple[str, ...] = ("*",)
    cells: dict[str, Settings] = field(default_factory=dict)
    grid: dict[str, Tried] = field(default_factory=dict)
    published: dict[str, dict[str, Any]] = field(default_factory=dict)
    like: str | None = None
    judged: bool = True
    remarks: tuple[str, ...] = ()

    def has(self, column: str) -> bool:
        """Whether there is a cell in a column: the last pattern that fits decides."""
        there = False
        for pattern in self.columns:
            if fnmatchcase(column, pattern.removeprefix("!")):
                there = not pattern.startswith("!")
        return there


@dataclass(frozen=True)
class Grid:
    """A row that is tried with several values of some settings.

    Attributes:
        about: its name in the paper.
        values: setting, by the last part of its name -> the values.
        points: values, one for each setting -> the row of that point.
    """

    about: str
    values: dict[str, Tried]
    points: dict[tuple[float, ...], str]


@dataclass(frozen=True)
class Experiment:
    """A table of a paper.

    Attributes:
        id: ``paper/table``, the file's place.
        path: the file.
        table: what it says of itself.
        measures: by name.
        columns: by name.
        rows: by name, those of grids point by point.
        grids: by the name of the row that has it; the first measure tells which point is best.
    """

    id: str
    path: Path
    table: About
    measures: dict[str, Measure]
    columns: dict[str, Column]
    rows: dict[str, Row]
    grids: dict[str, Grid] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """``COLUMN-ROW`` -> (column, row), column by column."""
        return {
            f"{column}-{row}": (column, row)
            for column in self.columns
            for row, of_row in self.rows.items()
            if of_row.has(column)
        }

    def folder(self, cell: str) -> str:
        """Returns where records of a cell go, below a folder for all: ``paper/table-cell``."""
        return f"{self.id}-{cell}"

    def source(self, cell: str) -> str:
        """Returns what ``hyperfed run`` takes."""
        return f"{self.path}:{cell}"

    def matching(self, pattern: str) -> list[str]:
        """Returns the cells whose name fits a pattern, as of files.

        Raises:
            UserError: none does.
        """
        found = [cell for cell in self.cells if fnmatchcase(cell, pattern)]
        if not found:
            raise UserError(
                f"cells of {self.id} must fit a pattern such as '*-pfedhn', but none fits "
                f"{pattern!r}; they are {self._some_cells()}"
            )
        return found

    def _some_cells(self) -> str:
        """Names the cells, of many the first."""
        first, more = list(self.cells)[:MOST_NAMED], len(self.cells) - MOST_NAMED
        return ", ".join(first) + (f" and {more} more, which hyperfed list names" * (more > 0))

    def published(self, measure: str, cell: str) -> Published | None:
        """Returns what the paper says of a cell, or of the one that it is like."""
        column, row = self.cells[cell]
        columns = self.columns[column].like or column
        rows = self.rows[self.rows[row].like or row]
        said = rows.published.get(measure, {}).get(columns)
        if said is None:
            return None
        return Published(*said) if isinstance(said, list) else Published(said)

    def judged(self, cell: str) -> bool:
        """Whether a verdict can be given of a cell."""
        column, row = self.cells[cell]
        return self.columns[column].judged and self.rows[row].judged

    def along(self, prefix: str) -> dict[str, tuple[str, float]]:
        """Returns the cells whose column or row is called by a prefix and a number.

        Returns:
            Cell -> (what it is of, in words: its row where columns are so called, else its column;
            the number), column by column.
        """
        found = {}
        for cell, (column, row) in self.cells.items():
            if (number := _number(column, prefix)) is not None:
                found[cell] = (self.rows[row].about, number)
            elif (number := _number(row, prefix)) is not None:
                found[cell] = (self.columns[column].about, number)
        return found

    def layers(self, cell: str) -> Iterator[Settings]:
        """Yields the settings of a cell, the weakest first.

        Raises:
            UserError: the table has no such cell.
        """
        if cell not in self.cells:
            raise UserError(
                f"{self.path} must have the cell that is run, came {cell!r}"
                f"{nearest(cell, self.cells) or f'; they are {self._some_cells()}'}"
            )
        column, row = self.cells[cell]
        yield self.table.set
        yield self.columns[column].set
        yield {"method": row}
        yield self.rows[row].set
        yield self.rows[row].cells.get(column, {})


def _number(name: str, prefix: str) -> float | None:
    """Returns the number that a name ends with behind a prefix, with or without a hyphen."""
    match = re.fullmatch(rf"{re.escape(prefix)}-?(\d+(?:\.\d+)?)", name)
    return None if match is None else float(match[1])


def split(source: str) -> tuple[str, str] | None:
    """Returns the file and the cell, "" for none, that ``FILE.toml[:CELL]`` names; None for less.

    A method's name is less.
    """
    path, end, cell = source.rpartition(".toml")
    if end and (not cell or cell.startswith(":")):
        return f"{path}{end}", cell[1:]
    return None


def name(source: str) -> str:
    """Returns the name of the folder that runs of ``FILE.toml[:CELL]`` get; "" for a method."""
    if (parts := split(source)) is None:
        return ""
    path, cell = parts
    return "-".join(filter(None, (Path(path).stem, cell)))


def layers(path: Path, cell: str = "") -> list[Settings]:
    """Returns the settings that a file gives, the weakest first: of a run, or of a table's cell.

    Raises:
        UserError: the file cannot be read, or it is a table and the cell not one of it.
    """
    written = _written(path)
    if "networks" in written:
        raise UserError(
            f"{path} is a table that is computed and not trained; hyperfed reproduce "
            f"{path.absolute().parent.name}/{path.stem} does so"
        )
    if "rows" not in written:
        if cell:
            raise UserError(f"{path} must be a table to have cells, but is one run; leave {cell!r}")
        return [written]
    experiment = _experiment(path, written)
    if not cell:
        raise UserError(
            f"{path} is a table of {len(experiment.cells)} cells, of which one must be named, such "
            f"as {experiment.source(next(iter(experiment.cells)))}; all: hyperfed reproduce "
            f"{experiment.id}"
        )
    return list(experiment.layers(cell))


def is_table(path: Path) -> bool:
    """Whether a file is a table.

    Raises:
        UserError: the file cannot be read.
    """
    return "rows" in _written(path)


def read(path: Path) -> Experiment:
    """Reads a table.

    Raises:
        UserError: the file cannot be read or is no table; tells all errors at once.
    """
    written = _written(path)
    if "rows" not in written:
        raise UserError(f"{path} must be a table with rows and columns, but is one run")
    return _experiment(path, written)


def home() -> Path:
    """Returns the folder where experiments are looked for: ``experiments`` here, if it holds any.

    Otherwise it is that of the papers' tables, which come with the package.
    """
    here = Path("experiments")
    return here if any(here.rglob("*.toml")) else next(filter(Path.is_dir, PAPERS), here)


def find(id: str, folder: Path) -> Experiment:
    """Reads the table ``paper/table`` of a folder of experiments.

    Raises:
        UserError: there is none.
    """
    path = folder / f"{id}.toml"
    if not path.is_file():
        known = [experiment.id for experiment in find_all(folder)]
        raise unknown("an experiment", known, folder, id)
    return read(path)


def unknown(what: str, known: Sequence[str], folder: Path, came: str | None) -> UserError:
    """Returns what to raise where a folder has not the experiment, or the paper, that was named."""
    others = [place for place in PAPERS if place.is_dir() and place != folder.resolve()]
    papers = f", as {others[0]} for the papers'" if others else ""
    if not known:
        return UserError(
            f"there must be experiments in {folder.resolve()}, as PAPER/TABLE.toml, but there are "
            f"none; name another folder with --experiments{papers}"
        )
    return UserError(
        f"{what} must be one of {', '.join(known)} (in {folder.resolve()}), came {came}; "
        f"name one of them, or another folder with --experiments{papers}{nearest(came, known)}"
    )


def find_all(folder: Path) -> list[Experiment]:
    """Reads all tables of a folder, by name."""
    return [read(path) for path in sorted(folder.glob("*/*.toml")) if is_table(path)]


def _written(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the experiment file must be readable: {path} is not ({error.strerror}); "
            "give a method's name or the path of a .toml file"
        ) from error
    except ValueError as error:  # a number can have too many digits
        # TOML's own words for ``method = "pfedhn"`` above a table ``[method]``.
        twice = "; where method, task or engine is a table, its name is a key in it, name = ..."
        hint = twice if "Cannot overwrite a value" in str(error) else ""
        raise UserError(f"the experiment file must be TOML: in {path}, {error}{hint}") from error


def _experiment(path: Path, written: Mapping[str, Any]) -> Experiment:
    try:
        found = _EXPERIMENT.validate_python(
            {"id": f"{path.absolute().parent.name}/{path.stem}", "path": path, **written}
        )
    except ValidationError as error:
        told = [f"{path} must be a table, but:", *fields_wrong(error)]
        raise UserError("\n  - ".join(told)) from error
    if problems := [*_wrong_names(found), *_wrong_cells(found)]:
        raise UserError("\n  - ".join([f"{path} must be a table, but:", *problems]))
    return _with_grids(found)


_EXPERIMENT = TypeAdapter(Experiment)


def _with_grids(experiment: Experiment) -> Experiment:
    """Returns a table with a row for each point of a row's grid."""
    rows: dict[str, Row] = {}
    grids: dict[str, Grid] = {}
    for name, row in experiment.rows.items():
        if not row.grid:
            rows[name] = row
            continue
        values = {setting.rpartition(".")[2]: tried for setting, tried in row.grid.items()}
        method = row.set.get("method", name)
        method = {"name": method} if isinstance(method, str) else {"name": name, **method}
        points = {}
        for point in product(*values.values()):
            called = [f"{setting}{value:g}" for setting, value in zip(values, point, strict=True)]
            about = [f"{setting}={value:g}" for setting, value in zip(values, point, strict=True)]
            points[point] = "-".join([name, *called])
            rows[points[point]] = replace(
                row,
                about=f"{row.about}, {', '.join(about)}",
                set={**row.set, "method": method, **dict(zip(row.grid, point, strict=True))},
            )
        grids[name] = Grid(row.about, values, points)
    return replace(experiment, rows=rows, grids=grids)


def _wrong_names(experiment: Experiment) -> Iterator[str]:
    """Yields where columns, rows or grids are not called as the table says or needs."""
    rows = experiment.rows
    for prefix in experiment.table.along:
        called = {number for _, number in experiment.along(prefix).values()}
        if len(called) < 2:
            yield (
                f"table.along.{prefix}: columns or rows must be called {prefix} and a number, at "
                f"least two of them, came {len(called)}"
            )
    for kind, known in (("columns", experiment.columns), ("rows", rows)):
        for name, part in known.items():
            if part.like is not None and part.like not in known:
                yield f"{kind}.{name}.like: must be one of {', '.join(known)}, came {part.like}"
    for name, row in rows.items():
        if len({setting.rpartition(".")[2] for setting in row.grid}) < len(row.grid):
            yield f"rows.{name}.grid: settings must differ in the last part of their names"
        if row.like is not None and row.like in rows and rows[row.like].grid:
            yield f"rows.{name}.like: must be a row without a grid, came {row.like}"


def _wrong_cells(experiment: Experiment) -> Iterator[str]:
    """Yields cells that are called alike or are not there, and what is no published number."""
    rows, columns, measures = experiment.rows, experiment.columns, experiment.measures
    called = Counter(f"{c}-{r}" for c in columns for r, row in rows.items() if row.has(c))
    for cell in (cell for cell, times in called.items() if times > 1):
        yield f"columns and rows: {cell} must be of one column and row; rename one of them"
    published = {
        (columns[column].like or column, rows[row].like or row)
        for column, row in experiment.cells.values()
    }
    for name, row in rows.items():
        for column in row.cells:
            if column not in columns or not row.has(column):
                yield f"rows.{name}.cells: must be columns with a cell of it, came {column}"
        for measure, numbers in row.published.items():
            if measure not in measures:
                yield f"rows.{name}.published: must be of {', '.join(measures)}, came {measure}"
            for column, said in numbers.items():
                if (column, name) not in published:
                    yield (
                        f"rows.{name}.published.{measure}: {column} must be a column with a cell "
                        "of it, or of what is like it"
                    )
                pair = said if isinstance(said, list) else [said]
                numeric = all(type(n) in (int, float) and math.isfinite(n) for n in pair)
                if len(pair) not in (1, 2) or not numeric or min(pair[1:], default=0) < 0:
                    yield (
                        f"rows.{name}.published.{measure}.{column}: must be a number, or "
                        f"[mean, spread], came {said}"
                    )

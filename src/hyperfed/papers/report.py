"""The report: every table of a paper with what was measured beside what was published.

It is written in Markdown. A line ``{figure NAME}`` is where a figure goes that a page can show.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hyperfed.analysis import comparison
from hyperfed.errors import one_line
from hyperfed.metrics import ACCURACY, Metric, named
from hyperfed.papers import bound, grids, markdown, measured, owed
from hyperfed.papers.computed import Computed, read_record
from hyperfed.papers.lines import Lines, budgets, figure, in_words, lines_of, table_of
from hyperfed.papers.measured import UNITS, Found, Measurement
from hyperfed.papers.others import compared
from hyperfed.papers.svg import Place, Series, draw_along, draw_series, to_svg
from hyperfed.runs import learned
from hyperfed.runs.experiments import Experiment
from hyperfed.runs.folder import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "about.md"
"""Beside records: what a person has to say of all below that folder."""

LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
"""To a file, by its path from the page that has it."""

SERVED = re.compile(r"novel-n(\d+)(?:-epsilon([\d.]+))?\.json")
"""Evaluations of a run's novel clients with so many examples and so much noise."""

LEGEND = """\
*Published* is the paper's mean ± its spread, *measured* ours over seeds ± the sample deviation, in
the table's unit. **Reproduced** means that our mean lies within the published one ± the larger of
two of its spreads and 1.5 points; *missed* says by how much it does not lie on the published mean.
There is no verdict where rounds were scaled, settings differ from the cell's, code has changed
since, clients or seeds have no number, or nothing was published; notes below each table say which.

*Over Local* and *to the best* compare two methods on the same clients, in points of each
client's accuracy, with the 95 % interval of Student's t over clients. It takes those of one
training for independent, too, and so answers for these clients alone. *Noise* marks differences
whose interval has zero in it or whose seeds disagree; *here* those of the others that have zero
in the 95 % interval of Student's t over the mean differences of seeds, or of which all seeds,
or the one that there is, have one division: clear on these clients, not shown for another
division of the data, nor, of one, for another training. *1 seed* stands where no more of a line's
seeds have both methods. Means over unlike seeds do not compare, so the best is what no other
beats on the seeds of both, or is beaten by least. Of several rows of Local in a paper's table
the gain is over the first with seeds of the line, the paper's own. Where there are lines of all
rounds, by the cell's settings and by code that stands, both are among these. *Worst tenth* is
the accuracy of the clients that are served worst. Of records of before accuracy with other
classes' logits at zero was told by client the three are dashes there. Models are those of the
best round by validation data; *last round* has those of the last. *MB* is all that travelled in
training, both ways, and *points/GB* accuracy by that; minutes are on the clock of a shared
machine. Curves are means over the seeds of a line.
"""

OWED = """\
CPU time that all seeds of all cells still take: that of three short rounds and an evaluation of
each training (`hours.jsonl`, by `tools/hours.py`), times its rounds and evaluations. One training
does for cells that differ in how novel clients are served; what a run does once, such as serving
those, is not in it. The machine had other programs beside it.
"""


@dataclass(frozen=True)
class Report:
    """What a report says.

    Attributes:
        text: Markdown.
        figures: name -> SVG.
    """

    text: str
    figures: dict[str, str] = field(default_factory=dict)


def of_papers(
    folder: Path,
    experiments: Sequence[Experiment],
    paper: str | None = None,
    figures: bool = True,
    computed: Sequence[Computed] = (),
) -> Report:
    """Sets all records of a folder beside what was published.

    Args:
        folder: of records.
        experiments: all tables.
        paper: of whose tables alone; None for all, and for records of no table.
        figures: draws them too.
        computed: tables that are computed and not trained.

    Raises:
        UserError: a record is damaged.
    """
    found, others = measured.collect(folder, experiments)
    asked = [each for each in experiments if paper in (None, each.id.split("/")[0])]
    lines = {each.id: lines_of(found, each) for each in asked}
    writer = _Writer(folder, found, lines, figures)
    writer.say(_about(folder) if paper is None else "")
    writer.say("## In short", _overview(found, lines, asked), LEGEND, _owed(folder, found, asked))
    for name, tables in groupby(asked, key=lambda experiment: experiment.id.split("/")[0]):
        writer.paper(name, list(tables))
        for table in computed:
            if table.id.startswith(f"{name}/"):
                writer.computed(table)
    if paper is None:
        writer.others(others)
    return Report("\n\n".join(writer.parts) + "\n", writer.figures)


def of_methods(folder: Path, experiments: Sequence[Experiment]) -> dict[str, str]:
    """Returns {method: what was published and measured of its cells that have records}, a table.

    Args:
        folder: of records.
        experiments: all tables.

    Raises:
        UserError: a record is damaged.
    """
    found, _ = measured.collect(folder, experiments)
    rows: dict[str, list[list[str]]] = {}
    for experiment in experiments:
        for (column, measure), lines in lines_of(found, experiment).items():
            part, told = experiment.columns[column], experiment.measures[measure]
            what = f"{told.about or told.metric} ({UNITS[told.metric][0]})"
            for line in lines:
                cell = [f"`{experiment.id}` {part.about}: {line.about}; {what}"]
                cell += [in_words(line), markdown.published(line.published)]
                cell += [markdown.spread(line.mean), str(line.mean.seeds)]
                rows.setdefault(line.method, []).append(cell)
    header = ["cell", "verdict", "published", "measured", "seeds"]
    return {method: markdown.table(header, of, left=2) for method, of in rows.items()}


def _overview(found: Found, lines: Mapping[str, Lines], experiments: Sequence[Experiment]) -> str:
    rows = []
    for experiment in experiments:
        cells = [found[experiment.id, c] for c in experiment.cells if (experiment.id, c) in found]
        judged = [
            line.verdict.reproduced
            for several in lines[experiment.id].values()
            for line in several
            if line.verdict.reproduced is not None
        ]
        rows.append(
            [
                f"`{experiment.id}`",
                experiment.table.title,
                str(len(experiment.cells)),
                str(len(cells)),
                str(sum(any(one.counts for one in cell) for cell in cells)),
                f"{sum(judged)} of {len(judged)}" if judged else "–",
            ]
        )
    header = ["table", "", "cells", "with records", "of its settings", "cells reproduced"]
    return markdown.table(header, rows, left=2)


def _owed(folder: Path, found: Found, experiments: Sequence[Experiment]) -> str:
    """Returns what did not fit, with its hours; nothing where nothing was estimated."""
    estimates = owed.read(folder)
    if not estimates or not (rows := owed.rows(found, experiments, estimates)):
        return ""
    header = ["table", "trainings", "missing", "hours of a core", "cells without an estimate"]
    told = f"{OWED}{owed.held_against(found, estimates)}".strip()
    return f"### What did not fit\n\n{told}\n\n{markdown.table(header, rows)}"


class _Writer:
    """Collects the parts of a report."""

    def __init__(self, folder: Path, found: Found, lines: Mapping[str, Lines], draw: bool) -> None:
        self.parts: list[str] = []
        self.figures: dict[str, str] = {}
        self._folder, self._found, self._lines, self._draw = folder, found, lines, draw

    def say(self, *parts: str) -> None:
        """Adds parts, but for empty ones."""
        self.parts += [part.strip() for part in parts if part.strip()]

    def paper(self, name: str, tables: Sequence[Experiment]) -> None:
        """Adds the tables of a paper."""
        self.say(f"## {tables[0].table.paper}", _about(self._folder, name))
        without = []
        for experiment in tables:
            if any((experiment.id, cell) in self._found for cell in experiment.cells):
                self._experiment(experiment)
            else:
                without.append(f"`{experiment.id}` ({len(experiment.cells)} cells)")
        if without:
            self.say(f"No records yet: {', '.join(without)}.")

    def computed(self, table: Computed) -> None:
        """Adds a table that is computed."""
        self.say(f"### `{table.id}`: {table.table.title}")
        self.say("\n".join(f"- {remark}" for remark in table.table.remarks))
        record = read_record(table, self._folder)
        if record is None:
            self.say(f"Not computed yet. `hyperfed reproduce {table.id}` does so.")
            return
        rows = []
        for name, number in table.numbers.items():
            value = record["numbers"][name]
            told = "–" if number.published is None else number.shown(number.published)
            verdict = {None: "–", True: "**reproduced**", False: "differs"}[
                number.reproduced(value)
            ]
            rows.append([number.about, number.place, told, number.shown(value), verdict])
        self.say(
            markdown.table(["number", "place", "published", "computed", "verdict"], rows, left=2)
        )
        if self._draw and record["ratio"]:
            ratio = Series("small to large hypernetwork", record["ratio"])
            across, up = "parameters made by a call of the small one", "ratio of FLOPs"
            self._figure(f"{table.id}-ratio", draw_series([ratio], across, up))

    def _experiment(self, experiment: Experiment) -> None:
        about = experiment.table
        places = ", ".join(dict.fromkeys(m.place for m in experiment.measures.values()))
        self.say(f"### `{experiment.id}`: {about.title}")
        spreads = f", published spreads {about.spread}" if about.spread else ""
        self.say(f"Published: {places}{spreads}.")
        self.say("\n".join(f"- {remark}" for remark in about.remarks))
        for column in experiment.columns:
            for measure in experiment.measures:
                self._column(experiment, column, measure)
        self._served(experiment)
        self._bounds(experiment)
        if self._draw:
            self._along(experiment)
            self._learned(experiment)
        missing = [cell for cell in experiment.cells if (experiment.id, cell) not in self._found]
        if missing:
            self.say(
                f"Without records: {len(missing)} of {len(experiment.cells)} cells. "
                f"`hyperfed reproduce {experiment.id}` makes them."
            )

    def _column(self, experiment: Experiment, column: str, measure: str) -> None:
        if not (lines := self._lines[experiment.id][column, measure]):
            return
        told = experiment.measures[measure]
        unit = UNITS[told.metric][0]
        part = experiment.columns[column]
        self.say(f"#### {part.about}: {told.about or told.metric} ({unit})")
        self.say("\n".join(f"- {remark}" for remark in part.remarks))
        for name in experiment.grids:
            self.say(*self._grid(experiment, column, measure, name))
        notes: list[str] = []
        self.say(table_of(lines, notes))
        self.say("\n".join(f"- ({mark}) {note}" for mark, note in enumerate(notes, start=1)))
        self._repeated(experiment, column)
        self.say(budgets(lines))
        remarks = [
            f"- {row.about}: {remark}"
            for name, row in experiment.rows.items()
            for remark in row.remarks
            if (experiment.id, f"{column}-{name}") in self._found
        ]
        self.say("\n".join(remarks))
        if self._draw and unit == "%" and len(lines) > 1:
            self._figure(f"{experiment.id}-{column}-{measure}", figure(lines, notes, told))

    def _repeated(self, experiment: Experiment, column: str) -> None:
        """Adds which records another one of their seed takes the place of."""
        told = []
        for row, part in experiment.rows.items():
            for one in measured.repeated(self._found.get((experiment.id, f"{column}-{row}"), [])):
                path = one.record.path.relative_to(self._folder)
                told.append(
                    f"- {part.about}: seed {one.summary['seed']} comes again; `{path}` is left out"
                )
        self.say("\n".join(told))

    def _grid(self, experiment: Experiment, column: str, measure: str, name: str) -> list[str]:
        """Returns what each point of a grid came to, side by side."""
        header, rows = grids.matrix(self._found, experiment, column, measure, name)
        if not rows:
            return []
        chosen = next(iter(experiment.measures.values()))
        return [
            f"{experiment.grids[name].about}, point by point; the best by "
            f"{chosen.about or chosen.metric} is bold, * marks what no verdict can rest on:",
            markdown.table(header, rows, left=0),
        ]

    def _figure(self, name: str, svg: str) -> None:
        self.figures[name] = svg
        self.say(f"{{figure {name}}}")

    def _served(self, experiment: Experiment) -> None:
        """Adds evaluations of novel clients with few examples and with noise."""
        for cell in experiment.cells:
            column, row = experiment.cells[cell]
            of = f"{experiment.columns[column].about}: {experiment.rows[row].about}"
            for one in self._found.get((experiment.id, cell), []):
                curves: dict[str, list[tuple[float, float]]] = {}
                for path in sorted(one.record.path.glob("novel-n*.json")):
                    if (match := SERVED.fullmatch(path.name)) is None:
                        continue
                    accuracy = measured.novel_accuracy(path)
                    noise = "no noise" if match[2] is None else f"epsilon {match[2]}"
                    curves.setdefault(noise, []).append((float(match[1]), accuracy))
                if curves:
                    self._noise(of, one, curves)

    def _bounds(self, experiment: Experiment) -> None:
        """Adds both sides of PeFLL's bound, of the runs that it was measured of."""
        for cell, (column, row) in experiment.cells.items():
            group = measured.that_count(self._found.get((experiment.id, cell), []))
            read = [bound.read(one.record.path / bound.FILE) for one in group]
            if runs := [sides for sides in read if sides is not None]:
                rows, told = bound.in_words(runs)
                of = f"{experiment.columns[column].about}: {experiment.rows[row].about}"
                header = ["variance of networks", "of models", "error in training"]
                header += ["+ for clients", "+ for examples", "= bound", "error of unseen clients"]
                self.say(
                    f"#### {of}, both sides of theorem 4.2",
                    told,
                    markdown.table(header, rows, left=0),
                )

    def _learned(self, experiment: Experiment) -> None:
        """Adds the figures that a table names, of records of the cells that have what they show.

        They are of records that a verdict can rest on.
        """
        records = {
            cell: [one.record for one in measured.that_count(self._found[experiment.id, cell])]
            for cell in experiment.cells
            if (experiment.id, cell) in self._found
        }
        for name in experiment.table.figures:
            several: dict[str, dict[str, list[RunRecord]]] = {}
            for cell, own in records.items():
                drawable = [record for record in own if learned.can_draw(name, record)]
                if not drawable:
                    continue
                column, row = experiment.cells[cell]
                task, method = experiment.columns[column].about, experiment.rows[row].about
                if name in learned.OF_A_RUN:
                    figure = learned.OF_A_RUN[name](drawable[0])
                    self._of_learned(f"{experiment.id}-{cell}", f"{task}: {method}", name, figure)
                    continue
                of_column = name == "rounds"
                called = f"{task}: {method}" if name == "correlation" else method
                runs = several.setdefault(column if of_column else "", {})
                runs.setdefault(called, []).extend(drawable)
            for column, runs in several.items():
                where = experiment.columns[column].about if column else experiment.table.title
                figure = learned.OF_RUNS[name](runs)
                place = "-".join(filter(None, (experiment.id, column)))
                every = [run.summary or {} for of in runs.values() for run in of]
                seeds = {summary.get("seed") for summary in every}
                self._of_learned(place, where, name, figure, len(seeds))

    def _of_learned(
        self, place: str, where: str, name: str, figure: "Figure", seeds: int = 1
    ) -> None:
        told = "one seed" if seeds == 1 else f"{seeds} seeds"
        self.say(f"#### {where}: {learned.CAPTIONS[name]}, {told}")
        self._figure(f"{place}-{name}", to_svg(figure))

    def _along(self, experiment: Experiment) -> None:
        """Adds what was measured along the number by which columns or rows are called."""
        for prefix, across in experiment.table.along.items():
            for name, measure in experiment.measures.items():
                lines: dict[str, list[Place]] = {}
                for cell, (of, at) in experiment.along(prefix).items():
                    group = measured.that_count(self._found.get((experiment.id, cell), []))
                    if (mean := measured.over_seeds(group, measure.metric)) is None:
                        continue
                    published = experiment.published(name, cell)
                    lines.setdefault(of, []).append(Place(at, mean, published))
                if any(len(places) > 1 for places in lines.values()):
                    up = f"{measure.about or measure.metric} ({UNITS[measure.metric][0]})"
                    self.say(f"#### {experiment.table.title}: {across}")
                    self._figure(
                        f"{experiment.id}-{prefix}-{name}-along", draw_along(lines, across, up)
                    )

    def _noise(
        self, of: str, one: Measurement, curves: Mapping[str, list[tuple[float, float]]]
    ) -> None:
        counts = sorted({count for curve in curves.values() for count, _ in curve})
        rows = [
            [noise, *(_number(dict(curves[noise]).get(count)) for count in counts)]
            for noise in sorted(curves)
        ]
        told = f"by noise and number of examples, seed {one.summary['seed']}"
        self.say(
            f"#### {of}: accuracy of novel clients (%), {told}",
            markdown.table(["", *(f"{count:g}" for count in counts)], rows),
        )
        if self._draw:
            series = [Series(noise, sorted(curves[noise])) for noise in sorted(curves)]
            across, up = "examples of a novel client", "accuracy of novel clients (%)"
            record = one.record.path.relative_to(self._folder)  # there may be several of a cell
            self._figure(f"{record.as_posix()}-served", draw_series(series, across, up))

    def others(self, others: Iterable[RunRecord]) -> None:
        """Adds records that are of no table, by folder."""

        def group_of(record: RunRecord) -> str:
            first, *more = (*record.path.relative_to(self._folder).parts, "")
            return first if any(more) else ""  # of the folder itself

        def folder_of(record: RunRecord) -> Path:
            above = record.path.parent.parent
            return above if above.is_relative_to(self._folder) else self._folder

        for name, several in groupby(sorted(others, key=group_of), key=group_of):
            about = _about(self._folder, name) if name else ""  # which is said above
            self.say(f"## `{name or self._folder.resolve().name}`", about)
            for folder, group in groupby(sorted(several, key=folder_of), key=folder_of):
                self._side_by_side(folder, list(group))

    def _side_by_side(self, folder: Path, records: Sequence[RunRecord]) -> None:
        """Adds the records ``FOLDER/WHAT/seedN``, those of one metric in one table.

        Where those of one folder differ in more than seeds, each kind has a row.
        """
        place = folder.relative_to(self._folder)
        if len(place.parts) > 1:  # a folder of a folder, which has other clients than those beside
            self.say(f"### `{place.as_posix()}`")
        judged: dict[Metric, dict[str, list[RunRecord]]] = {}
        for label, group in groupby(records, key=lambda record: record.path.resolve().parent.name):
            runs: dict[str, list[RunRecord]] = {}
            several = list(group)
            for name, run in zip(comparison.groups(several), several, strict=True):
                runs.setdefault(name, []).append(run)
            for name, own in runs.items():
                metric = named((own[0].summary or {}).get("metric", ACCURACY.name))
                called = label if len(runs) == 1 else f"{label}: {one_line(name)}"
                judged.setdefault(metric, {})[called] = own
        for metric, labelled in judged.items():
            self.say(compared(metric, labelled))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _about(folder: Path, name: str = "") -> str:
    """Returns what a person has to say of records, with links as they are from their folder."""
    path = folder / name / ABOUT
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return LINK.sub(lambda link: f"]({posixpath.normpath(posixpath.join(name, link[1]))}", text)

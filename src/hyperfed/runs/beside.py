"""The report: every table of a paper with what was measured beside what was published.

It is written in Markdown. A line ``{figure NAME}`` is where a figure goes that a page can show.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hyperfed.metrics import ACCURACY, Metric, named
from hyperfed.runs import bound, grids, learned, measured, owed, statistics
from hyperfed.runs.computed import Computed, read_record
from hyperfed.runs.experiments import Experiment, Measure
from hyperfed.runs.measured import UNITS, Cell, Measurement, Verdict
from hyperfed.runs.records import RunRecord
from hyperfed.runs.report import difference, percent
from hyperfed.runs.statistics import Difference, Spread
from hyperfed.runs.svg import Curve, Dot, Place, Series, draw_along, draw_cells, draw_series, to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "about.md"
"""Beside records: what a person has to say of all below that folder."""

SERVED = re.compile(r"novel-n(\d+)(?:-epsilon([\d.]+))?\.json")
"""Evaluations of a run's novel clients with so many examples and so much noise."""

LEGEND = """\
*Published* is the paper's mean ± its spread, *measured* ours over seeds ± the sample deviation, in
the table's unit. **Reproduced** means that our mean lies within the published one ± the larger of
two of its spreads and 1.5 points; *missed* says by how much it does not lie on the published mean.
There is no verdict where rounds were scaled, settings differ from the cell's, code has changed
since, or nothing was published; notes below each table say which.

*Over Local* and *to the best* compare two methods on the same clients, in points of each client's
accuracy, with the 95 % interval of Student's t over clients; *noise* marks those whose interval has
zero in it or whose seeds disagree. Of how much another seed may change, the interval knows nothing.
*Worst tenth* is the accuracy of the clients that are served worst. Models are those of the best
round by validation data; *last round* has those of the last. *MB* is all that travelled in
training, both ways, and *points/GB* accuracy by that; minutes are on the clock of a shared machine.
"""

OWED = """\
What all seeds of all cells still take, by the CPU time of three short rounds and an evaluation of a
training (`hours.jsonl`, by `tools/hours.py`), times the rounds and evaluations of its settings. One
training does for cells that differ in how novel clients are served; what a run does once, such as
serving those, is not in it. The machine had other programs beside it.
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


@dataclass(frozen=True)
class _Line:
    """A cell's records with one set of settings, in a table."""

    about: str
    group: Sequence[Measurement]
    metric: str
    published: str
    mean: Spread
    verdict: Verdict
    missed: float | None

    @property
    def summaries(self) -> list[Mapping[str, Any]]:
        return [one.summary for one in self.group]

    @property
    def megabytes(self) -> float:
        return fmean((s["bytes_down"] + s["bytes_up"]) / 1e6 for s in self.summaries)


def report(
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
    writer = _Writer(folder, found, figures)
    writer.say(_read(folder / ABOUT) if paper is None else "")
    asked = [each for each in experiments if paper in (None, each.id.split("/")[0])]
    writer.say("## In short", _overview(found, asked), LEGEND, _owed(folder, found, asked))
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
        for column, part in experiment.columns.items():
            for measure, told in experiment.measures.items():
                what = f"{told.about or told.metric} ({UNITS[told.metric][0]})"
                for line in _lines(found, experiment, column, measure):
                    cell = [f"`{experiment.id}`", f"{part.about}: {line.about}; {what}"]
                    cell += [_in_words(line), line.published]
                    cell += [_spread(line.mean), str(line.mean.seeds)]
                    rows.setdefault(_method(line), []).append(cell)
    header = ["table", "cell", "verdict", "published", "measured", "seeds"]
    return {method: _table(header, of, left=3) for method, of in rows.items()}


def _lines(
    found: Mapping[Cell, list[Measurement]], experiment: Experiment, column: str, measure: str
) -> Iterator[_Line]:
    """Yields the cells of a column that have records, those of several settings several times.

    Of each grid it is the best point alone.
    """
    metric = experiment.measures[measure].metric
    worse = grids.worse(found, experiment, column)
    for row, part in experiment.rows.items():
        cell = f"{column}-{row}"
        if (experiment.id, cell) not in found or row in worse:
            continue
        published = experiment.published(measure, cell)
        for group in measured.alike(found[experiment.id, cell]):
            own = metric if measured.over_seeds(group, metric) else measured.plain(metric)
            if (mean := measured.over_seeds(group, own)) is None:
                continue
            said = "–"
            if published is not None:
                said = f"{published.value:g}"
                said += "" if published.spread is None else f" ± {published.spread:g}"
            missed = None if published is None else mean.mean - published.value
            verdict = _verdict(experiment, measure, cell, group)
            if own != metric:
                verdict = Verdict(None, f"{own}: these records lack {metric}; {verdict.why}")
            yield _Line(part.about, group, own, said, mean, verdict, missed)


def _in_words(line: _Line) -> str:
    """Returns the verdict, and which share of the rounds it rests on where that is not all."""
    if line.verdict.reproduced is not None:
        return "reproduced" if line.verdict.reproduced else f"missed by {line.missed:+.1f}"
    first = line.group[0]
    if first.origin.scale == 1 and "rounds" in first.differing:
        own, wanted = (int(rounds) for rounds in first.differing["rounds"])
        if own < wanted:
            return f"scaled: {own / wanted:g} of the rounds; {line.verdict.why}"
    return line.verdict.why


def _overview(found: Mapping[Cell, list[Measurement]], experiments: Sequence[Experiment]) -> str:
    rows = []
    for experiment in experiments:
        cells = [found[experiment.id, c] for c in experiment.cells if (experiment.id, c) in found]
        verdicts = [
            _verdict(experiment, measure, cell, group).reproduced
            for cell in experiment.cells
            for group in measured.alike(found.get((experiment.id, cell), []))
            for measure in experiment.measures
        ]
        judged = [verdict for verdict in verdicts if verdict is not None]
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
    header = ["table", "", "cells", "with records", "of its settings", "numbers reproduced"]
    return _table(header, rows, left=2)


def _owed(
    folder: Path, found: Mapping[Cell, list[Measurement]], experiments: Sequence[Experiment]
) -> str:
    """Returns what did not fit, with its hours; nothing where nothing was estimated."""
    estimates = owed.read(folder)
    if not estimates or not (rows := owed.rows(found, experiments, estimates)):
        return ""
    header = ["table", "trainings", "missing", "hours of a core", "cells without an estimate"]
    return f"### What did not fit\n\n{OWED}\n{_table(header, rows)}"


def _verdict(
    experiment: Experiment, measure: str, cell: str, group: Sequence[Measurement]
) -> Verdict:
    return measured.verdict(
        group,
        experiment.measures[measure].metric,
        experiment.published(measure, cell),
        judged=experiment.judged(cell),
    )


class _Writer:
    """Collects the parts of a report."""

    def __init__(self, folder: Path, found: dict[Cell, list[Measurement]], draw: bool) -> None:
        self.parts: list[str] = []
        self.figures: dict[str, str] = {}
        self._folder, self._found, self._draw = folder, found, draw

    def say(self, *parts: str) -> None:
        """Adds parts, but for empty ones."""
        self.parts += [part.strip() for part in parts if part.strip()]

    def paper(self, name: str, tables: Sequence[Experiment]) -> None:
        """Adds the tables of a paper."""
        self.say(f"## {tables[0].table.paper}", _read(self._folder / name / ABOUT))
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
        self.say(_table(["number", "place", "published", "computed", "verdict"], rows, left=2))
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
        lines = list(_lines(self._found, experiment, column, measure))
        if not lines:
            return
        told = experiment.measures[measure]
        unit = UNITS[told.metric][0]
        part = experiment.columns[column]
        self.say(f"#### {part.about}: {told.about or told.metric} ({unit})")
        self.say("\n".join(f"- {remark}" for remark in part.remarks))
        for name in experiment.grids:
            self.say(*self._grid(experiment, column, measure, name))
        notes: list[str] = []
        rows = [self._row(line, lines, notes) for line in lines]
        header = ["method", "published", "measured", "seeds", "verdict"]
        if unit == "%":
            header += ["worst tenth", "over Local", "to the best"]
        header += ["rounds × clients × local", "MB", "min"] + ["points/GB"] * (unit == "%")
        self.say(_table(header, rows))
        self.say("\n".join(f"- ({mark}) {note}" for mark, note in enumerate(notes, start=1)))
        self._repeated(experiment, column)
        self.say(_budgets(lines))
        remarks = [
            f"- {row.about}: {remark}"
            for name, row in experiment.rows.items()
            for remark in row.remarks
            if (experiment.id, f"{column}-{name}") in self._found
        ]
        self.say("\n".join(remarks))
        if self._draw and unit == "%" and len(lines) > 1:
            self._figure(f"{experiment.id}-{column}-{measure}", _cells(lines, notes, told))

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
            f"{chosen.about or chosen.metric} is bold, * marks a part of the rounds:",
            _table(header, rows, left=0),
        ]

    def _figure(self, name: str, svg: str) -> None:
        self.figures[name] = svg
        self.say(f"{{figure {name}}}")

    def _row(self, line: _Line, lines: Sequence[_Line], notes: list[str]) -> list[str]:
        percents = UNITS[line.metric][0] == "%"
        if line.verdict.reproduced is None:
            if line.verdict.why not in notes:
                notes.append(line.verdict.why)
            verdict = f"none ({notes.index(line.verdict.why) + 1})"
        elif line.verdict.reproduced:
            verdict = "**reproduced**"
        else:
            verdict = f"missed by {line.missed:+.1f}"
        cells = [line.about, line.published, _spread(line.mean), str(line.mean.seeds), verdict]
        if percents:
            best = max(lines, key=lambda other: other.mean.mean)
            to_best = "best" if line is best else difference(_against(line, [best]))
            local = [other for other in lines if _method(other) == "local"]
            over = "–" if _method(line) == "local" else difference(_against(line, local))
            cells += [_worst(line), over, to_best]
        cells += [_budget(line), f"{line.megabytes:,.0f}", _minutes(line.summaries)]
        if percents:
            travelled = line.megabytes / 1e3
            cells.append(f"{line.mean.mean / travelled:.1f}" if travelled else "–")
        return cells

    def _served(self, experiment: Experiment) -> None:
        """Adds evaluations of novel clients with few examples and with noise."""
        for cell in experiment.cells:
            for one in self._found.get((experiment.id, cell), []):
                curves: dict[str, list[tuple[float, float]]] = {}
                for path in sorted(one.record.path.glob("novel-n*.json")):
                    if (match := SERVED.fullmatch(path.name)) is None:
                        continue
                    accuracy = measured.novel_accuracy(path)
                    noise = "no noise" if match[2] is None else f"epsilon {match[2]}"
                    curves.setdefault(noise, []).append((float(match[1]), accuracy))
                if curves:
                    self._noise(f"{experiment.id}-{cell}", one, curves)

    def _bounds(self, experiment: Experiment) -> None:
        """Adds both sides of PeFLL's bound, of the runs that it was measured of."""
        for cell, (column, row) in experiment.cells.items():
            group = measured.alike(self._found.get((experiment.id, cell), []))[:1]
            read = [bound.read(one.record.path / bound.FILE) for of in group for one in of]
            if runs := [sides for sides in read if sides is not None]:
                rows, told = bound.in_words(runs)
                of = f"{experiment.columns[column].about}: {experiment.rows[row].about}"
                header = ["variance of networks", "of models", "error in training"]
                header += ["+ for clients", "+ for examples", "= bound", "error of unseen clients"]
                self.say(
                    f"#### {of}, both sides of theorem 4.2", told, _table(header, rows, left=0)
                )

    def _learned(self, experiment: Experiment) -> None:
        """Adds the figures that a table names, of records of the cells that have what they show.

        Of a cell with records of several settings they are of the first, as the tables have them.
        """
        records = {
            cell: [one.record for one in measured.alike(self._found[experiment.id, cell])[0]]
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
                    if (experiment.id, cell) not in self._found:
                        continue
                    group = measured.alike(self._found[experiment.id, cell])[0]
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
        self, name: str, one: Measurement, curves: Mapping[str, list[tuple[float, float]]]
    ) -> None:
        counts = sorted({count for curve in curves.values() for count, _ in curve})
        rows = [
            [noise, *(_number(dict(curves[noise]).get(count)) for count in counts)]
            for noise in sorted(curves)
        ]
        seed = one.summary["seed"]
        self.say(
            f"#### Accuracy of novel clients (%), by noise and number of examples, seed {seed}",
            _table(["", *(f"{count:g}" for count in counts)], rows),
        )
        if self._draw:
            series = [Series(noise, sorted(curves[noise])) for noise in sorted(curves)]
            label = "examples of a novel client"
            self._figure(name, draw_series(series, label, "accuracy of novel clients (%)"))

    def others(self, others: Sequence[RunRecord]) -> None:
        """Adds records that are of no table, by folder."""

        def group_of(record: RunRecord) -> str:
            return record.path.relative_to(self._folder).parts[0]

        for name, several in groupby(sorted(others, key=group_of), key=group_of):
            self.say(f"## `{name}`", _read(self._folder / name / ABOUT))
            judged: dict[Metric, dict[str, list[RunRecord]]] = {}
            for label, group in groupby(several, key=lambda record: record.path.parent.name):
                runs = list(group)
                metric = named((runs[0].summary or {}).get("metric", ACCURACY.name))
                judged.setdefault(metric, {})[label] = runs
            for metric, labelled in judged.items():
                self.say(_others(metric, labelled))


def _others(metric: Metric, labelled: Mapping[str, Sequence[RunRecord]]) -> str:
    """Returns a table of records by what they are called, each of several seeds.

    They are compared client by client where one of them trains alone: others need not be meant to.
    """
    tested = [f"{what} {metric.short}" for what in ("test", "last round", "worst tenth", "novel")]
    header = ["record", "seeds", *tested, "MB", "min"]
    rows = [_other(label, metric, runs) for label, runs in labelled.items()]
    scores = {label: [statistics.scores(run) for run in runs] for label, runs in labelled.items()}
    method = {label: (runs[0].summary or {})["method"] for label, runs in labelled.items()}
    alone = [one for label in labelled if method[label] == "local" for one in scores[label]]
    if alone:
        best = max(labelled, key=lambda label: metric.order(_mean(labelled[label], metric)))
        header[6:6] = ["over Local", "to the best"]
        for label, row in zip(labelled, rows, strict=True):
            over = statistics.difference(scores[label], alone)
            to_best = statistics.difference(scores[label], scores[best])
            row[6:6] = [
                "–" if method[label] == "local" else difference(over, metric),
                "best" if label == best else difference(to_best, metric),
            ]
    return _table(header, rows)


def _mean(runs: Sequence[RunRecord], metric: Metric) -> float | None:
    """Returns the mean over runs of the metric on test data; None where one has none."""
    values = [(run.summary or {}).get(f"test_{metric.name}") for run in runs]
    there = [value for value in values if value is not None]
    return fmean(there) if len(there) == len(runs) else None


def _other(label: str, metric: Metric, runs: Sequence[RunRecord]) -> list[str]:
    summaries = [run.summary or {} for run in runs]
    last = [[e for e in run.evaluations if e.split == "test"][-1:] for run in runs]

    def over_seeds(values: Sequence[float | None]) -> str:
        there = [value for value in values if value is not None]
        if not there:
            return "–"
        found = statistics.spread(there)
        return (
            metric.shown(found.mean) if found.std is None else metric.spread(found.mean, found.std)
        )

    def summed_up(key: str) -> str:
        return over_seeds([s.get(key) for s in summaries])

    megabytes = fmean((s["bytes_down"] + s["bytes_up"]) / 1e6 for s in summaries)
    return [
        label,
        str(len(summaries)),
        summed_up(f"test_{metric.name}"),
        over_seeds([e.main.value for of in last for e in of]),
        summed_up(f"worst_decile_{metric.name}"),
        summed_up(f"novel_{metric.name}"),
        f"{megabytes:,.1f}",
        _minutes(summaries),
    ]


def _method(line: _Line) -> str:
    return str(line.summaries[0]["method"])


def _worst(line: _Line) -> str:
    values = [
        value
        for one in line.group
        if (value := statistics.worst(one.scores(line.metric))) is not None
    ]
    return percent(fmean(values)) if values else "–"


def _against(line: _Line, others: Sequence[_Line]) -> Difference | None:
    theirs = [one.scores(line.metric) for other in others for one in other.group]
    return statistics.difference([one.scores(line.metric) for one in line.group], theirs)


def _spread(value: Spread) -> str:
    return f"{value.mean:.1f}" if value.std is None else f"{value.mean:.1f} ± {value.std:.1f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _minutes(summaries: Sequence[Mapping[str, Any]]) -> str:
    return f"{fmean(s['seconds'] for s in summaries) / 60:,.1f}"


def _size(line: _Line) -> tuple[int, int]:
    """Returns (rounds, clients of each) of a line."""
    settings = line.group[0].record.config
    task, cohort = settings["task"], settings["cohort"]
    known = task["clients"] - round(task["novel"] * task["clients"])
    clients = max(1, int(cohort * known + 0.5)) if isinstance(cohort, float) else cohort
    return line.summaries[0]["rounds"], min(clients, known)


def _local(line: _Line) -> str:
    own = line.group[0].record.config["method"]
    epochs = own.get("local_epochs", "none")
    return f"{own.get('local_steps')} steps" if epochs == "none" else f"{epochs} epochs"


def _budget(line: _Line) -> str:
    rounds, clients = _size(line)
    return f"{rounds:,} × {clients} × {_local(line)}"


def _budgets(lines: Sequence[_Line]) -> str:
    """Returns a sentence where methods of a table have been given unlike shares of work."""
    if len({(*_size(line), _local(line)) for line in lines}) < 2:
        return ""
    told = []
    for line in lines:
        rounds, clients = _size(line)
        told.append(f"{line.about} {rounds:,} rounds of {clients} with {_local(line)}")
    return f"Budgets differ: {'; '.join(dict.fromkeys(told))}."


def _cells(lines: Sequence[_Line], notes: Sequence[str], measure: Measure) -> str:
    curves, dots = [], []
    for line in lines:
        name = line.about
        if line.verdict.why in notes:  # which tells it from other records of the same cell
            name += f" ({notes.index(line.verdict.why) + 1})"
        record = line.group[0].record
        points = [
            ((e.bytes_down + e.bytes_up) / 1e6, 100 * e.accuracy)
            for e in record.evaluations
            if e.split == "test" and e.accuracy is not None
        ]
        curves.append(Curve(name, points))
        published = line.published.split(" ± ")
        dots.append(
            Dot(
                name,
                line.mean.mean,
                line.mean.std or 0.0,
                None if published[0] == "–" else float(published[0]),
                float(published[1]) if len(published) > 1 else 0.0,
            )
        )
    return draw_cells(curves, dots, measure.about or measure.metric)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    ruler = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ruler, *rows))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""

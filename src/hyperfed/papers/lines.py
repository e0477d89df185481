"""The lines of a report's tables: a cell's records, beside what was published and one another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hyperfed.analysis import statistics
from hyperfed.analysis.comparison import difference
from hyperfed.analysis.statistics import Difference, Spread
from hyperfed.data.partitions import novel_number
from hyperfed.papers import grids, markdown, measured
from hyperfed.papers.measured import UNITS, Found, Measurement, Verdict
from hyperfed.papers.svg import Dot, Series, draw_cells
from hyperfed.runs.experiments import Experiment, Measure, Published
from hyperfed.runs.remarks import percent
from hyperfed.runs.settings import cohort_size


@dataclass(frozen=True)
class Line:
    """A cell's records with one set of settings, in a table.

    Attributes:
        about: how the row is called.
        group: the records, of several seeds.
        metric: what they are judged by.
        published: what the paper says; None where it says nothing.
        mean: over seeds.
        verdict: on what was published.
    """

    about: str
    group: Sequence[Measurement]
    metric: str
    published: Published | None
    mean: Spread
    verdict: Verdict

    @property
    def summaries(self) -> list[Mapping[str, Any]]:
        """Those of the records."""
        return [one.summary for one in self.group]

    @property
    def counts(self) -> bool:
        """Whether a verdict can rest on it."""
        return self.group[0].counts

    @property
    def scale(self) -> float:
        """The share of the rounds that it was given."""
        return self.group[0].origin.scale

    @property
    def method(self) -> str:
        """The name of its method."""
        return str(self.summaries[0]["method"])

    @property
    def megabytes(self) -> float:
        """What travelled in training, both ways."""
        return fmean((s["bytes_down"] + s["bytes_up"]) / 1e6 for s in self.summaries)

    @property
    def budget(self) -> tuple[int, int, str]:
        """Rounds, clients of each, and what each of them does."""
        settings = self.group[0].record.config
        task, own = settings["task"], settings["method"]
        known = task["clients"] - novel_number(task["novel"], task["clients"])
        epochs = own.get("local_epochs", "none")
        local = f"{own.get('local_steps')} steps" if epochs == "none" else f"{epochs} epochs"
        return self.summaries[0]["rounds"], cohort_size(settings["cohort"], known), local

    @property
    def worst(self) -> float | None:
        """The accuracy of the clients that are served worst."""
        every = [statistics.worst(one.scores(self.metric)) for one in self.group]
        there = [value for value in every if value is not None]
        return fmean(there) if there else None

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Accuracy in % by MB travelled both ways, of rounds that all seeds evaluated: means."""
        each = [
            {
                e.round: ((e.bytes_down + e.bytes_up) / 1e6, 100 * e.accuracy)
                for e in one.record.evaluations
                if e.split == "test" and e.accuracy is not None
            }
            for one in self.group
        ]
        rounds = sorted(set(each[0]).intersection(*each[1:]))
        places = [zip(*(of[number] for of in each), strict=True) for number in rounds]
        return [(fmean(megabytes), fmean(accuracy)) for megabytes, accuracy in places]

    def against(self, other: "Line") -> Difference | None:
        """Compares it to another, client by client, where both are judged by one metric."""
        if other.metric != self.metric:
            return None
        ours, theirs = ([one.scores(self.metric) for one in it.group] for it in (self, other))
        return statistics.difference(ours, theirs)


Lines = Mapping[tuple[str, str], Sequence[Line]]
"""(column, measure) -> its lines."""


def lines_of(found: Found, experiment: Experiment) -> Lines:
    """Returns the cells of a table that have records, those of several settings several times.

    Of each grid it is the best point alone.
    """
    lines: dict[tuple[str, str], list[Line]] = {}
    for column in experiment.columns:
        worse = grids.worse(found, experiment, column)
        cells = {f"{column}-{row}": row for row in experiment.rows if row not in worse}
        there = {cell: row for cell, row in cells.items() if (experiment.id, cell) in found}
        for measure in experiment.measures:
            lines[column, measure] = [
                line
                for cell, row in there.items()
                for group in measured.alike(found[experiment.id, cell])
                if (line := _line(group, experiment, cell, row, measure)) is not None
            ]
    return lines


def _line(
    group: Sequence[Measurement], experiment: Experiment, cell: str, row: str, measure: str
) -> Line | None:
    """Returns the line of a cell's records with one set of settings; None without any number."""
    metric = experiment.measures[measure].metric
    own = metric if measured.over_seeds(group, metric) else measured.plain(metric)
    if (mean := measured.over_seeds(group, own)) is None:
        return None
    published = experiment.published(measure, cell)
    verdict = measured.verdict(group, metric, published, judged=experiment.judged(cell))
    if own != metric:
        verdict = Verdict(None, f"{own}: these records lack {metric}; {verdict.why}")
    return Line(experiment.rows[row].about, group, own, published, mean, verdict)


def in_words(line: Line) -> str:
    """Returns the verdict, and which share of the rounds it rests on where that is not all."""
    if line.verdict.reproduced:
        return "reproduced"
    if line.verdict.reproduced is not None and line.published is not None:
        return f"missed by {line.mean.mean - line.published.value:+.1f}"
    first = line.group[0]
    if line.scale == 1 and "rounds" in first.differing:
        own, wanted = (int(rounds) for rounds in first.differing["rounds"])
        if own < wanted:
            return f"scaled: {own / wanted:g} of the rounds; {line.verdict.why}"
    return line.verdict.why


def table_of(lines: Sequence[Line], notes: list[str]) -> str:
    """Returns lines as a table; why one has no verdict is added to the notes."""
    percents = UNITS[lines[0].metric][0] == "%"
    header = ["method", "published", "measured", "seeds", "verdict"]
    header += ["worst tenth", "over Local", "to the best"] * percents
    header += ["rounds × clients × local", "MB", "min"] + ["points/GB"] * percents
    at = measured.best([(line.group, line.metric) for line in lines])
    best = lines[at] if at is not None and len(lines) > 1 else None
    # The first row that is Local's is the paper's; others have other budgets.
    local = [line for line in lines if line.method == "local"]
    local.sort(key=lambda line: not line.counts)
    return markdown.table(header, [_row(line, best, local, notes) for line in lines])


def _row(line: Line, best: Line | None, local: Sequence[Line], notes: list[str]) -> list[str]:
    percents = UNITS[line.metric][0] == "%"
    if line.verdict.reproduced is None:
        if line.verdict.why not in notes:
            notes.append(line.verdict.why)
        verdict = f"none ({notes.index(line.verdict.why) + 1})"
    else:
        verdict = "**reproduced**" if line.verdict.reproduced else in_words(line)
    published = markdown.published(line.published)
    cells = [line.about, published, markdown.spread(line.mean), str(line.mean.seeds), verdict]
    if percents:
        to_best = "–"
        if best is not None:
            to_best = "best" if line is best else _gain(line, line.against(best))
        alone = (line.against(one) for one in local if one.scale >= line.scale)
        over = "–" if line.method == "local" else _gain(line, next(filter(None, alone), None))
        cells += ["–" if line.worst is None else percent(line.worst), over, to_best]
    rounds, clients, local_work = line.budget
    cells += [f"{rounds:,} × {clients} × {local_work}", f"{line.megabytes:,.0f}"]
    cells += [markdown.minutes(line.summaries)]
    if percents:
        travelled = line.megabytes / 1e3
        cells.append(f"{line.mean.mean / travelled:.1f}" if travelled else "–")
    return cells


def _gain(line: Line, found: Difference | None) -> str:
    return difference(found, seeds=line.mean.seeds)


def budgets(lines: Sequence[Line]) -> str:
    """Returns a sentence where methods of a table have been given unlike shares of work."""
    if len({line.budget for line in lines}) < 2:
        return ""
    told = []
    for line in lines:
        rounds, clients, local = line.budget
        told.append(f"{line.about} {rounds:,} rounds of {clients} with {local}")
    return f"Budgets differ: {'; '.join(dict.fromkeys(told))}."


def figure(lines: Sequence[Line], notes: Sequence[str], measure: Measure) -> str:
    """Draws lines as SVG: accuracy by what travelled, and measured beside published."""
    curves, dots = [], []
    for line in lines:
        name = line.about
        if line.verdict.why in notes:  # which tells it from other records of the same cell
            name += f" ({notes.index(line.verdict.why) + 1})"
        curves.append(Series(name, line.curve))
        dots.append(Dot(name, line.mean, line.published))
    return draw_cells(curves, dots, measure.about or measure.metric)

"""Finished runs side by side, a row for each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from hyperfed.analysis.statistics import Difference
from hyperfed.data import datasets
from hyperfed.data.division import OF_LABELLED
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.metrics import ACCURACY, METRICS, Metric, named
from hyperfed.runs.config import flat, to_dict
from hyperfed.runs.keys import written
from hyperfed.runs.measures import Number
from hyperfed.runs.records import FinishedRun, deciding
from hyperfed.runs.remarks import megabytes
from hyperfed.runs.settings import RunConfig

MOST_NAMED = 3
"""Settings by which a run is told from others, at most."""

CHANGE_NO_NUMBER = (
    *("engine.", "device", "checkpoint_every", "preset", "task.data_dir", "track", "metrics"),
    "examine",
)
"""How the keys begin that a run is not told from others by."""

KEPT_MOMENTUM = ("local", "fml", "pfedhn_pc")
"""Methods whose records of before ``keep_momentum`` have kept it."""

STEPPED_BY_MEAN = ("pfedhn", "pfedhn_pc", "itpfl")
"""Methods whose records of before ``cohort_reduction`` are of the mean."""


@dataclass(frozen=True)
class Row:
    """A run in the comparison, at the best validation round; accuracies are from 0 to 1.

    Attributes:
        label: the method, with settings or a number where that is needed to tell runs apart.
        group: the same of all runs that differ by their seeds alone.
        method: its name.
        seed: of the run.
        rounds: server iterations.
        best_round: the best one by validation data.
        val: the metric over all validation examples, of a rehearsal where the run has one; None
            where there are none.
        test: the metric over all examples.
        client_mean: mean over clients.
        client_std: population standard deviation over clients.
        worst_decile: mean over the worst tenth of the clients.
        novel: of clients that joined after training; None where there are none.
        bytes_down: sent to clients.
        bytes_up: sent by clients.
        seconds: of the run.
        data_fingerprint: a hash of the data and of who holds what.
        total_variation: the mean between the labels of two known clients, from 0 to 1; None where
            labels are not known here, and in records of before it was measured.
        metric: by which models are judged.
        more: name of another metric -> its value over all examples of known clients, and of those
            that joined after training.
        chosen: (name, value) of the number over these validation examples that made the best round
            the best (``best``); None where that is ``val``.
    """

    label: str
    group: str
    method: str
    seed: int
    rounds: int
    best_round: int
    test: Number
    client_mean: Number
    client_std: Number
    worst_decile: Number
    novel: Number
    bytes_down: int
    bytes_up: int
    seconds: float
    data_fingerprint: str
    total_variation: Number = None
    metric: Metric = ACCURACY
    val: Number = None
    more: Mapping[str, tuple[Number, Number]] = field(default_factory=dict)
    chosen: tuple[str, Number] | None = None

    @property
    def by_name(self) -> dict[str, Any]:
        """The row as plain values, each number named by its metric."""
        name = self.metric.name
        found = {KEYS.get(key, key).format(name): value for key, value in vars(self).items()}
        del found["metric"], found["more"], found["chosen"]
        if self.chosen is not None:
            found[f"val_{self.chosen[0]}"] = self.chosen[1]
        for other, (test, novel) in self.more.items():
            found |= {f"test_{other}": test, f"novel_{other}": novel}
        return found


KEYS = {
    "val": "val_{}",
    "test": "test_{}",
    "client_mean": "test_{}_client_mean",
    "client_std": "test_{}_client_std",
    "worst_decile": "worst_decile_{}",
    "novel": "novel_{}",
}
"""What a row calls a number -> its key in a summary, but for the name of the metric."""

TESTED = tuple(KEYS)
"""The numbers of a row that are values of its metric."""


_ROW = TypeAdapter(Row)


def compare(runs: Sequence[FinishedRun]) -> list[Row]:
    """Returns a row for each run, in their order.

    Rows can be compared where they :func:`saw_the_same`.

    Raises:
        UserError: a run is not done, or its summary lacks a number.
    """
    numbers = [_numbers(run) for run in runs]
    settings = [_filled(run) for run in runs]
    named = zip(_labels(settings), _groups(settings), numbers, strict=True)
    return [Row(label=label, group=group, **row) for label, group, row in named]


def choices(rows: Sequence[Row]) -> list[tuple[str, Number]]:
    """Returns (name, value) of what each row's method's settings are to be chosen by.

    It is what these runs chose their best round by; where they did by several numbers, the metric.
    """
    own = [row.chosen or (row.metric.name, row.val) for row in rows]
    by: dict[str, set[str]] = {}
    for row, (name, _) in zip(rows, own, strict=True):
        by.setdefault(row.method, set()).add(name)
    return [
        chosen if len(by[row.method]) == 1 else (row.metric.name, row.val)
        for row, chosen in zip(rows, own, strict=True)
    ]


def groups(runs: Sequence[FinishedRun]) -> list[str]:
    """Returns a name for each run, the same for those that differ by their seeds alone."""
    return _groups([_filled(run) for run in runs])


def most_alike(run: FinishedRun, others: Sequence[FinishedRun]) -> list[int]:
    """Returns the places of others, first the one whose settings are most like those of a run.

    Settings that only one of two methods has tell nothing, nor does the seed.
    """
    own, of = _filled(run), [_filled(other) for other in others]

    def differing(place: int) -> int:
        other = of[place]
        return sum(own[key] != other[key] for key in own.keys() & other.keys() - {"seed"})

    return sorted(range(len(others)), key=differing)


def grouped(rows: Sequence[Row]) -> list[tuple[str, list[int]]]:
    """Returns (name, which rows) of those that differ by their seeds alone, in their order."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(rows):
        found.setdefault((row.group, row.metric.name), []).append(number)
    return [(group, own) for (group, _), own in found.items()]


def saw_the_same(rows: Sequence[Row]) -> bool:
    """Returns whether all that were compared had the same data, of all their seeds together."""
    data = {frozenset(rows[number].data_fingerprint for number in own) for _, own in grouped(rows)}
    return len(data) <= 1


def metric_of(rows: Sequence[Row]) -> Metric:
    """Returns the metric by which all of some runs are judged.

    Raises:
        UserError: they are judged by several.
    """
    metrics = {row.metric.name: row.metric for row in rows}
    if len(metrics) > 1:
        raise UserError(
            "runs in one figure, page or printed table must be judged by one metric, came "
            f"{', '.join(metrics)}; take those of one task"
        )
    return next(iter(metrics.values()), ACCURACY)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns the comparison: for each metric that runs are judged by a table, then the others."""
    judged: dict[str, list[Row]] = {}
    for row in rows:
        judged.setdefault(row.metric.name, []).append(row)
    found = [table(own) for own in judged.values()]
    return found + [_further(own) for own in judged.values() if any(row.more for row in own)]


def new_table(*numbers: str) -> Table:
    """Returns a table without rows, of methods and what such columns say of each in numbers."""
    # Two-line headers and narrow gaps: it is to fit into 80 columns.
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    shown.title_justify, shown.title_style = "left", ""
    shown.add_column("\nmethod")
    for column in numbers:
        shown.add_column(column, justify="right")
    return shown


def _further(rows: Sequence[Row]) -> Table:
    """Returns the metrics beside the one that runs are judged by."""
    names = list(dict.fromkeys(name for row in rows for name in row.more))
    metrics = [named(name) for name in names]
    shown = new_table(*(f"{split}\n{it.header}" for it in metrics for split in ("test", "novel")))
    for row in rows:
        pairs = (row.more.get(name, (None, None)) for name in names)
        cells = [
            metric.shown(value)
            for metric, pair in zip(metrics, pairs, strict=True)
            for value in pair
        ]
        shown.add_row(row.label, *cells)
    return shown


def table(rows: Sequence[Row]) -> Table:
    """Returns runs that are judged by one metric for a :class:`rich.console.Console` to print.

    Above it stands how far apart clients are by their labels, where that is the same for all rows.
    """
    metric = metric_of(rows)
    unit = metric.short
    shown = new_table(
        "\nrounds",
        "best\nround",
        f"val\n{unit}",
        f"test\n{unit}",
        f"per client\n{unit}",
        f"worst\ndecile {unit}",
        f"novel\n{unit}",
        "MB\ndown",
        "MB\nup",
        "\nseconds",
    )
    for row in rows:
        shown.add_row(
            row.label,
            str(row.rounds),
            str(row.best_round),
            metric.shown(row.val),
            metric.shown(row.test),
            metric.spread(row.client_mean, row.client_std),
            metric.shown(row.worst_decile),
            metric.shown(row.novel),
            megabytes(row.bytes_down),
            megabytes(row.bytes_up),
            f"{row.seconds:.1f}",
        )
    apart = {row.total_variation for row in rows}
    if len(apart) == 1 and (variation := apart.pop()) is not None:
        shown.title = f"total variation between the labels of two clients: {variation:.2f}"
    return shown


def _numbers(run: FinishedRun) -> dict[str, Any]:
    """Returns the fields of a row but its label."""
    if not run.summary:
        raise UserError("a run to compare must be done, but one has no summary; resume it first")
    summary, metric = run.summary, named(run.summary.get("metric", ACCURACY.name))
    apart = ("label", "group", "metric", "val", "more", "chosen")
    own = [field.name for field in fields(Row) if field.name not in apart]
    keys = {name: KEYS.get(name, name).format(metric.name) for name in own}
    names = list(keys.values())
    missing = [name for name in names if name not in summary and name != "total_variation"]
    if missing:
        raise UserError(
            f"a run's summary must have {', '.join(names)}, but one lacks {', '.join(missing)}; "
            "run it again with this version of hyperfed"
        )
    more = {
        name: (summary[f"test_{name}"], summary.get(f"novel_{name}"))
        for name in METRICS
        if name != metric.name and f"test_{name}" in summary
    }
    found = {name: summary.get(key) for name, key in keys.items()}
    best = (summary["best_round"], deciding(run.evaluations))
    by = str(to_dict(run.config).get("best", ACCURACY.name)).replace(ACCURACY.name, metric.name)
    val = next((e for e in run.evaluations if (e.round, e.split) == best), None)
    found |= {"metric": metric, "val": val and val.main.value, "more": more}
    if val is not None and by != metric.name:
        found["chosen"] = by, val.value(by)
    try:
        row = _ROW.validate_python({"label": "", "group": "", **found})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(
            f"a run's summary must have numbers where those are told, but in one "
            f"{keys.get(str(wrong['loc'][0]), 'place')} {wrong['msg'].lower()}; restore the file, "
            "or run it again"
        ) from error
    return {name: getattr(row, name) for name in found}  # numbers, where those came in words


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names runs by method, several of one by the settings that differ, and else by number."""
    methods = [own["method.name"] for own in settings]
    labels = []
    for method, own in zip(methods, settings, strict=True):
        others = [it for name, it in zip(methods, settings, strict=True) if name == method]
        told = [key for key in own if any(_differ(own, it, key) for it in others)]
        telling = _telling(told, others)
        named = [f"{key.removeprefix('method.')}={written(own[key])}" for key in telling]
        labels.append(" ".join([method, *named]))
    total, seen = Counter(labels), Counter[str]()
    for index, label in enumerate(labels):
        seen[label] += 1
        if total[label] > 1:
            labels[index] = f"{label} ({seen[label]})"
    return labels


def _telling(keys: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns at most ``MOST_NAMED`` keys in their order: those that tell most runs apart."""
    chosen: list[str] = []

    def told_apart(key: str) -> int:
        return len({tuple(str(own.get(it)) for it in (*chosen, key)) for own in settings})

    for _ in range(min(MOST_NAMED, len(keys))):
        chosen.append(max((key for key in keys if key not in chosen), key=told_apart))
    return [key for key in keys if key in chosen]


def _groups(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names runs alike that differ by their seeds alone.

    Values are compared as they are written: a cohort of 1 is one client, of 1.0 all of them.

    A key that only some runs of a method have, and that this version does not know, says nothing as
    long as all of them have one value. Where they do not, a run without it is like none of them.
    """
    first: dict[tuple[str, str], str] = {}
    telling = set()
    spelled = [{key: repr(value) for key, value in own.items()} for own in settings]
    for own in spelled:
        for key in own.keys() - {"seed"}:
            which = own["method.name"], key
            if first.setdefault(which, own[key]) != own[key]:
                telling.add(which)
    told = [
        {"method.name": own["method.name"]}
        | {key: own[key] for key in own if (own["method.name"], key) in telling}
        for own in spelled
    ]
    firsts = [number for number, own in enumerate(told) if told.index(own) == number]
    labels = _labels([{k: v for k, v in settings[n].items() if k != "seed"} for n in firsts])
    names = dict(zip(firsts, labels, strict=True))
    return [names[told.index(own)] for own in told]


def _filled(run: FinishedRun) -> dict[str, Any]:
    """Returns settings with the defaults of those that a record of an earlier version lacks."""
    settings = settings_of(run)
    usual = _defaults(settings["method.name"])
    return {**settings, **{key: usual[key] for key in usual if key not in settings}}


@cache
def _defaults(method: str) -> Mapping[str, Any]:
    """Returns the settings of a run without any preset; none of a method that is not here."""
    if method not in METHODS:
        return {}
    return canonical(to_dict(RunConfig(method=method, settings=METHODS[method].Config())))


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Whether a setting differs; that an earlier version lacks it says nothing of its value."""
    return repr(other.get(key, one[key])) != repr(one[key])


def settings_of(run: FinishedRun) -> dict[str, Any]:
    """Returns {dotted key: value} of a run's settings, but for those that change no number."""
    return canonical(to_dict(run.config))


def canonical(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {dotted key: value} of settings that change numbers, told in one way for one thing.

    Nothing is the word for it, as in a record. A partition that is left to the data set is told by
    its name, as records of before it could be left out have it, and so is what methods did with
    momentum, and servers of hypernetworks with several clients, before one could say; of one client
    a round there is neither sum nor mean. Where nothing is private or masked, no more is told of
    that.
    """
    settings = {
        key: "none" if value is None else value
        for key, value in flat(nested).items()
        if not key.startswith(CHANGE_NO_NUMBER)
    }
    if settings.get("task.partition") == "none" and settings.get("task.name") in datasets.NAMES:
        settings["task.partition"] = OF_LABELLED
    if settings.get("method.name") in KEPT_MOMENTUM:
        settings.setdefault("method.keep_momentum", True)
    if settings.get("method.name") in STEPPED_BY_MEAN:
        settings.setdefault("method.cohort_reduction", "mean")
        if settings.get("cohort") == 1 and isinstance(settings["cohort"], int):
            del settings["method.cohort_reduction"]
    if settings.get("privacy.epsilon", "none") == "none" and not settings.get("privacy.masking"):
        for key in ("clip", "delta", "where"):
            settings.pop(f"privacy.{key}", None)
    return settings


def difference(
    found: Difference | None, metric: Metric = ACCURACY, seeds: int | None = None
) -> str:
    """Returns a gain, of accuracies in points, with its interval and mark, or a dash.

    Args:
        found: the gain.
        metric: by which it is measured.
        seeds: how many there are of what gains; where the gain is of fewer, that is said.
    """
    if found is None:
        return "–"
    mean = f"{'+' if found.mean >= 0 else ''}{metric.shown(found.mean)}"
    if found.low is None or found.high is None:
        told = f"{mean}, one client"
    else:
        ends = f"[{metric.shown(found.low)}, {metric.shown(found.high)}]"
        told = " ".join(filter(None, (mean, ends, found.mark)))
    if seeds is None or found.seeds == seeds:
        return told
    return f"{told}, {found.seeds} seed{'s' * (found.seeds > 1)}"

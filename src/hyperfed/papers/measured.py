"""Records beside what papers published: which are of a cell, what they differ in, the verdict."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hyperfed.analysis import comparison, statistics
from hyperfed.analysis.statistics import Scores, Spread
from hyperfed.data.settings import CLIENTS
from hyperfed.errors import UserError, one_line
from hyperfed.methods import METHODS
from hyperfed.metrics import ACCURACY
from hyperfed.papers import agreement, origin
from hyperfed.papers.origin import Origin
from hyperfed.runs import config
from hyperfed.runs.experiments import Experiment, Published
from hyperfed.runs.folder import RunRecord, find_runs
from hyperfed.runs.measures import Number
from hyperfed.runs.records import deciding
from hyperfed.runs.remarks import lacking
from hyperfed.runs.settings import RunConfig
from hyperfed.system.toml import literal

POINTS = 1.5
"""By how many points a mean may miss the published one where its spread is small."""

SPREADS = 2
"""By how many published spreads it may."""

MEBIBYTE = 2**20

LEFT_OUT = literal("none")
"""The value of a setting that a cell leaves out; a record has what came of the data."""

NATURAL = literal("natural")

NOT_SAID = "not said"
"""In the place of the value of a setting that a record lacks."""

SPLITS = ("val", "test", "novel")
"""Of what accuracies are, as their names begin."""

OF_SIZE = "test_accuracy_"
"""How the mean over the clients of a target size, S, M or L, is called."""


def _percent(key: str) -> tuple[str, Callable[[Mapping[str, Any]], Number]]:
    def of(summary: Mapping[str, Any]) -> Number:
        value = summary.get(key)
        return None if value is None else 100 * float(value)

    return "%", of


def _eighth(summary: Mapping[str, Any]) -> Number:
    return float(summary["bytes_down"] + summary["bytes_up"]) / 8 / MEBIBYTE


UNITS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Number]]] = MappingProxyType(
    {
        **{
            key: _percent(key)
            for key in (
                *(f"{split}_{of}accuracy" for split in SPLITS for of in ("", "masked_", "zeroed_")),
                *("test_accuracy_client_mean", "novel_accuracy_client_mean"),
                *(f"{OF_SIZE}{size}" for size in "SML"),
            )
        },
        "eighth_mebibytes": ("MiB", _eighth),
    }
)
"""Metric of a measure -> its unit, and how it is read from a summary."""


@dataclass(frozen=True)
class Measurement:
    """A record of a cell.

    Attributes:
        record: the run.
        origin: of which cell it is.
        differing: key -> (its value, that of the cell), as TOML; settings of the record that are
            not the cell's and change numbers.
    """

    record: RunRecord
    origin: Origin
    differing: Mapping[str, tuple[str, str]]

    @property
    def summary(self) -> Mapping[str, Any]:
        """The final numbers."""
        return self.record.summary or {}

    @property
    def counts(self) -> bool:
        """Whether a verdict can rest on it: all rounds, the cell's settings, code that stands.

        None does where a number lacks clients or a seed (:func:`verdict`).
        """
        return self.origin.scale == 1 and not self.differing and not self.origin.superseded

    def value(self, metric: str) -> Number:
        """Returns a number of the run, in its unit; None where it was not measured."""
        return UNITS[metric][1](self.summary)

    def scores(self, metric: str) -> Scores:
        """Returns the accuracy of each client that the metric is about.

        Of validation data that is the one by which the best round was chosen, of a rehearsal where
        the run has one. Of before it was told by client with the logits of other classes at zero
        there is none.
        """
        split, record = metric.partition("_")[0], self.record
        split = split if split in SPLITS else "test"
        if split == "val":
            split = deciding(record.evaluations)
        for name in ("client_masked_accuracy", "client_zeroed_accuracy"):
            if metric.endswith(name.removeprefix("client")):
                told = [getattr(e, name) or (None,) * len(e.clients) for e in record.evaluations]
                each = zip(record.evaluations, told, strict=True)
                every = tuple(replace(e, client_accuracy=own) for e, own in each)
                record = replace(record, evaluations=every)
        found = statistics.scores(record, split)
        size, of_client = metric.removeprefix(OF_SIZE), self.summary.get("sizes", ())
        if size not in of_client:
            return found
        own = {
            client: value for client, value in found.clients.items() if of_client[client] == size
        }
        return replace(found, clients=own)


Cell = tuple[str, str]
"""(table, cell)."""

Found = Mapping[Cell, Sequence[Measurement]]
"""Records by cell."""


def collect(
    folder: Path, experiments: Sequence[Experiment]
) -> tuple[dict[Cell, list[Measurement]], Iterator[RunRecord]]:
    """Reads all records that are done, those of a cell apart from the others.

    The others, which may be most and which not everybody wants, are read as they are asked for.

    A record is of the cell that its ``experiment.json`` names. Where it has none, it is of the one
    after which the folders are called: ``paper/table-cell/RUN``.

    Args:
        folder: of records, at any depth.
        experiments: all tables.

    Raises:
        UserError: a record is damaged (one of the others: where it is read), or names a cell that
            there is not; or a measure of a table is none.
    """
    for experiment in experiments:
        check_measures(experiment)
    tables = {experiment.id: experiment for experiment in experiments}
    called = {e.folder(cell): (e.id, cell) for e in experiments for cell in e.cells}
    wanted: dict[Cell, dict[str, str]] = {}
    found: dict[Cell, list[Measurement]] = defaultdict(list)
    others: list[Path] = []
    for path in find_runs(folder):
        of = origin.read(path)
        if of is None:
            name = "/".join(path.absolute().parts[-3:-1])
            of = Origin(*called[name]) if name in called else None
        if of is None:
            others.append(path)
            continue
        record = agreement.read_run(path)
        if record.summary is None:
            continue
        if of.table not in tables or of.cell not in tables[of.table].cells:
            raise UserError(
                f"{path / origin.FILE} must name a cell of a table, but there is no "
                f"{one_line(f'{of.table}:{of.cell}')}; give the folder of its table with "
                "--experiments, or remove the file"
            )
        cell = (of.table, of.cell)
        if cell not in wanted:
            wanted[cell] = flat(config.load(tables[of.table].source(of.cell)))
        found[cell].append(Measurement(record, of, differing(record.config, wanted[cell])))
    for several in found.values():
        _check_copies(several)
    read = map(agreement.read_run, others)
    return dict(found), (record for record in read if record.summary is not None)


def _check_copies(measurements: Sequence[Measurement]) -> None:
    """Refuses records of a cell that are one run under several seeds."""
    first: dict[object, Measurement] = {}
    for one in measurements:
        losses = tuple(e.client_loss for e in one.record.evaluations)
        same = first.setdefault((one.summary["data_fingerprint"], losses), one)
        if same.summary["seed"] != one.summary["seed"]:
            raise UserError(
                f"records of several seeds must be of several runs, but {one.record.path} has the "
                f"numbers of {same.record.path}; remove the copy"
            )


def check_measures(experiment: Experiment) -> None:
    """Finds out whether what a table measures is a number of a summary.

    Raises:
        UserError: it is not.
    """
    for name, measure in experiment.measures.items():
        if measure.metric not in UNITS:
            raise UserError(
                f"{experiment.path}: measures.{name}.metric must be one of {', '.join(UNITS)}, "
                f"came {one_line(measure.metric)}"
            )


def flat(settings: RunConfig | Mapping[str, Any]) -> dict[str, str]:
    """Returns {dotted key: value as TOML} of settings that change numbers, but for the seed."""
    told = comparison.canonical(config.to_dict(settings))
    if path := told.get("task.partition_file"):
        told["task.partition_file"] = Path(path).name
    return {key: literal(value) for key, value in told.items() if key != "seed"}


def differing(
    settings: RunConfig | Mapping[str, Any], wanted: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Returns key -> (its value, that of ``wanted``) of settings that differ.

    A key that the settings lack, as of an earlier version, has its default, and one that is wanted
    of none says nothing. What a cell leaves out comes of the data (:func:`_came_of_data`).
    """
    own = flat(settings)
    method = _method(config.to_dict(settings))
    usual = _defaults(method) if method in METHODS else {}
    found = {}
    for key, value in wanted.items():
        must = _came_of_data(key, wanted, own) if value == LEFT_OUT else value
        if own.get(key, usual.get(key, must)) != must:
            found[key] = (own.get(key, NOT_SAID), must)
    return found


def _came_of_data(key: str, wanted: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Returns what a record must say of a setting that its cell leaves out.

    Data of one's own are divided as they are where nothing is said, and then it is for them to say
    how many clients there are; others have :data:`hyperfed.data.settings.CLIENTS`.
    """
    said = own.get(key, LEFT_OUT)
    if said == LEFT_OUT:
        return LEFT_OUT
    if key == "task.partition":
        return NATURAL
    if key == "task.clients":
        natural = wanted.get("task.partition") in (LEFT_OUT, NATURAL)
        return said if natural else literal(CLIENTS)
    return LEFT_OUT


@cache
def _defaults(method: str) -> Mapping[str, str]:
    """Returns the settings of a run without any preset."""
    return flat(RunConfig(method=method, settings=METHODS[method].Config()))


def _method(nested: Mapping[str, Any]) -> str:
    return str(nested.get("method", {}).get("name"))


def alike(measurements: Iterable[Measurement]) -> list[list[Measurement]]:
    """Groups a cell's records by settings, so that each group differs in seeds alone.

    Those that a verdict can rest on come first; of a seed that comes twice, the latter counts.
    """
    groups: dict[tuple[object, ...], dict[int, Measurement]] = defaultdict(dict)
    for one in measurements:
        key = (one.origin.scale, tuple(sorted(one.differing.items())), one.origin.superseded)
        groups[key][one.summary.get("seed", 0)] = one
    found = [list(group.values()) for group in groups.values()]
    return sorted(found, key=lambda group: not group[0].counts)


def that_count(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Returns those of a cell's records that a verdict can rest on, one for each seed."""
    return next((group for group in alike(measurements) if group[0].counts), [])


def repeated(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Returns the records of a cell that do not count, since a latter one has seed and settings."""
    kept = {id(one) for group in alike(measurements) for one in group}
    return [one for one in measurements if id(one) not in kept]


def best(groups: Sequence[tuple[Sequence[Measurement], str]]) -> int | None:
    """Returns which of some groups is best, by the seeds that they have in common.

    Those that a verdict can rest on are compared, if there are any; one alone is the best of all.

    Args:
        groups: records that differ in seeds alone, and the accuracy that they are judged by.

    Returns:
        Its place; None where no two have a seed in common.
    """
    counting = [place for place, (group, _) in enumerate(groups) if group[0].counts]
    places = counting or range(len(groups))
    if len(places) == 1:
        return places[0]
    found = statistics.best([of_seeds(*groups[place]) for place in places], ACCURACY)
    return None if found is None else places[found]


@dataclass(frozen=True)
class Verdict:
    """What a cell's mean is against what was published.

    Attributes:
        reproduced: whether it lies within the band; None where no verdict is given.
        why: the band, or why there is no verdict.
    """

    reproduced: bool | None
    why: str


def plain(metric: str) -> str:
    """Returns the accuracy that every record has in the place of one that older ones lack."""
    return "novel_accuracy" if metric.startswith("novel") else "test_accuracy"


def novel_accuracy(path: Path) -> float:
    """Reads the accuracy, in %, of what ``hyperfed evaluate RUN --novel --json`` has printed.

    Raises:
        UserError: the file is damaged.
    """
    try:
        accuracy = float(json.loads(path.read_bytes())["novel"]["accuracy"])
        if not 0 <= accuracy <= 1:
            raise ValueError(f"its accuracy is {accuracy:g}")
        return 100 * accuracy
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} must be what evaluate --novel --json prints: {error}") from error


def over_seeds(group: Sequence[Measurement], metric: str) -> Spread | None:
    """Returns the mean of a group's numbers, in their unit, and their spread; None without any.

    Of a seed without one it knows nothing; :func:`verdict` gives none there.
    """
    values = [value for one in group if (value := one.value(metric)) is not None]
    return statistics.spread(values) if values else None


def of_seeds(group: Sequence[Measurement], metric: str) -> dict[tuple[int, str | None, str], float]:
    """Returns what a metric came to, by seed, data and metric; nothing of a seed without it."""
    return statistics.by_seed(
        ((one.summary.get("seed", 0), one.summary.get("data_fingerprint"), metric), value)
        for one in group
        if (value := one.value(metric)) is not None
    )


def verdict(
    group: Sequence[Measurement], metric: str, published: Published | None, *, judged: bool
) -> Verdict:
    """Judges a group of records: reproduced where the mean over seeds lies within the band.

    The band is the published mean ± the larger of two of its spreads and 1.5 points. There is no
    verdict where a number lacks clients, or some seeds have none.

    Args:
        group: records of one cell that differ in seeds alone, at least one.
        metric: what is judged.
        published: what the paper says.
        judged: whether the cell's settings are as near to the paper's as can be.
    """
    mean = over_seeds(group, metric)
    found = _verdict(group[0], metric, mean, published, judged=judged)
    missing = []
    for one in group:
        why = lacking(one.summary, metric.partition("_")[0])
        if mean is not None and one.value(metric) is None:
            why = "no number"
        if why:
            missing.append(f"seed {one.summary.get('seed', 0)}: {why}")
    return Verdict(None, "; ".join([*missing, found.why])) if missing else found


def _verdict(
    first: Measurement,
    metric: str,
    mean: Spread | None,
    published: Published | None,
    *,
    judged: bool,
) -> Verdict:
    """Judges a mean of records of which this is the first."""
    if first.origin.scale != 1:
        return Verdict(None, f"scaled: {first.origin.scale:g} of the rounds")
    if first.origin.superseded:
        return Verdict(None, f"superseded: {first.origin.superseded}")
    if first.differing:
        told = ", ".join(f"{k}={a} for {b}" for k, (a, b) in first.differing.items())
        return Verdict(None, f"other settings: {told}")
    if published is None:
        return Verdict(None, "nothing published")
    if not judged:
        return Verdict(None, "not the paper's settings, on purpose")
    if mean is None:
        return Verdict(None, "not measured by these records")
    if UNITS[metric][0] != "%":
        return Verdict(None, "no accuracy")
    band = max(SPREADS * (published.spread or 0), POINTS)
    within = abs(mean.mean - published.value) <= band + 1e-9  # as decimal numbers have it
    return Verdict(within, f"within {published.value:g} ± {band:g}")

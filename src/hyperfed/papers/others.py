"""Records that are of no paper's table, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from hyperfed.analysis import paired, seeds
from hyperfed.analysis.comparison import difference
from hyperfed.metrics import Metric
from hyperfed.papers.markdown import minutes, table
from hyperfed.runs.folder import RunRecord
from hyperfed.runs.remarks import without


def compared(metric: Metric, labelled: Mapping[str, Sequence[RunRecord]]) -> str:
    """Returns a table of records by what they are called, each of several seeds.

    They are compared client by client where one of them trains alone: others need not be meant to.
    Where several do, each is compared to the one whose settings are most like its own. Below it
    stands which that is, and whose numbers lack clients, or are none.
    """
    tested = [f"{what} {metric.short}" for what in ("test", "last round", "worst tenth", "novel")]
    header = ["record", "seeds", *tested, "MB", "min"]
    rows = [_other(label, metric, runs) for label, runs in labelled.items()]
    pairs = paired.pair_labelled(labelled, metric)
    notes = []
    if any((runs[0].summary or {})["method"] == "local" for runs in labelled.values()):
        header[6:6] = ["over Local", "to the best"]
        for one, row in zip(pairs, rows, strict=True):
            gains = [difference(of, metric, one.seeds) for of in (one.over_local, one.to_best)]
            row[6:6] = [gains[0], "best" if one.label == one.best else gains[1]]
        notes = [f"- {told}" for told in paired.told_of_local(pairs)]
    notes += [note for label, runs in labelled.items() for note in _notes(label, metric, runs)]
    return "\n\n".join([table(header, rows), *(["\n".join(notes)] if notes else [])])


def _notes(label: str, metric: Metric, runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        summary = run.summary or {}
        told = without(summary)
        if summary.get(f"test_{metric.name}") is None:
            told = f"no test {metric.label}"
        if told is not None:
            yield f"- {label}, seed {summary.get('seed', 0)}: {told}"


def _other(label: str, metric: Metric, runs: Sequence[RunRecord]) -> list[str]:
    summaries = [run.summary or {} for run in runs]
    last = [[e for e in run.evaluations if e.split == "test"][-1] for run in runs]

    of = [s.get("seed", 0) for s in summaries]

    def over_seeds(values: Sequence[float | None]) -> str:
        found = seeds.spread_of(of, values)
        return "–" if found is None else metric.spread(found.mean, found.std)

    def summed_up(key: str) -> str:
        return over_seeds([s.get(key) for s in summaries])

    megabytes = fmean((s["bytes_down"] + s["bytes_up"]) / 1e6 for s in summaries)
    return [
        label,
        str(len(set(of))),
        summed_up(f"test_{metric.name}"),
        over_seeds([e.main.value for e in last]),
        summed_up(f"worst_decile_{metric.name}"),
        summed_up(f"novel_{metric.name}"),
        f"{megabytes:,.1f}",
        minutes(summaries),
    ]

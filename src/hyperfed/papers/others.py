"""Records that are of no paper's table, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from hyperfed.metrics import Metric
from hyperfed.papers.markdown import minutes, table
from hyperfed.runs import seeds, statistics
from hyperfed.runs.comparison import difference, without
from hyperfed.runs.folder import RunRecord


def compared(metric: Metric, labelled: Mapping[str, Sequence[RunRecord]]) -> str:
    """Returns a table of records by what they are called, each of several seeds.

    They are compared client by client where one of them trains alone: others need not be meant to.
    Below it stands whose numbers lack clients, or are none.
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
            seeds = len({one.seed for one in scores[label]})
            row[6:6] = [
                "–" if method[label] == "local" else difference(over, metric, seeds),
                "best" if label == best else difference(to_best, metric, seeds),
            ]
    notes = [note for label, runs in labelled.items() for note in _notes(label, metric, runs)]
    return "\n\n".join([table(header, rows), *(["\n".join(notes)] if notes else [])])


def _notes(label: str, metric: Metric, runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        summary = run.summary or {}
        told = without(summary)
        if summary.get(f"test_{metric.name}") is None:
            told = f"no test {metric.label}"
        if told is not None:
            yield f"- {label}, seed {summary.get('seed', 0)}: {told}"


def _mean(runs: Sequence[RunRecord], metric: Metric) -> float | None:
    """Returns the mean over seeds of the metric on test data; None where a run has none."""
    summaries = [run.summary or {} for run in runs]
    values = [s.get(f"test_{metric.name}") for s in summaries]
    found = seeds.spread_of([s.get("seed", 0) for s in summaries], values)
    return None if found is None else found.mean


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

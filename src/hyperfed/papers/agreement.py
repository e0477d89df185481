"""Whether the files of a run that is done are of one run: settings, metrics and summary.

A summary is made of the other two; one that says otherwise was edited, or copied from elsewhere.
What sets records beside others or beside published numbers reads them here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hyperfed.errors import UserError, one_line
from hyperfed.methods import METHODS
from hyperfed.metrics import ACCURACY
from hyperfed.runs import folder
from hyperfed.runs.folder import RunRecord
from hyperfed.runs.measures import over_clients, weighted_mean
from hyperfed.runs.numbers import numbers, numbers_of_choice, numbers_of_sizes
from hyperfed.runs.records import REHEARSAL, Evaluation, deciding

COUNTS = ("seed", "rounds", "best_round", "bytes_down", "bytes_up")
"""Whole numbers that every summary has."""


def read_run(path: Path) -> RunRecord:
    """Reads a run's folder, whose files must agree where the run is done.

    Raises:
        UserError: it is not one, a file in it is damaged, or they do not agree.
    """
    record = folder.read_run(path)
    if record.summary is None:
        return record
    try:
        _check(record.config, record.evaluations, record.summary)
    except ValueError as error:
        raise UserError(
            f"{path} must hold settings, metrics and summary of one run, but {error}; restore the "
            "files, or run it again"
        ) from error
    return record


def read_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Reads the runs that paths name or hold, each once; also those that are not done.

    Raises:
        UserError: a path names and holds none, or as of :func:`read_run`.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        below = folder.find_runs(path)
        if not below:
            how = "holds none" if path.exists() else "is not there"
            raise UserError(f"{path} must be a run's folder or hold some, but {how}")
        folders |= dict.fromkeys(below)
    return [read_run(each) for each in folders]


def _check(
    config: Mapping[str, Any], evaluations: Sequence[Evaluation], summary: Mapping[str, Any]
) -> None:
    for key in COUNTS:
        if type(summary.get(key)) is not int or summary[key] < 0:
            raise _wrong(f"the summary's {key}", "a whole number", summary.get(key))
    if not _is_number(summary.get("seconds")) or summary["seconds"] < 0:
        raise _wrong("the summary's seconds", "a number", summary.get("seconds"))
    if not isinstance(summary.get("data_fingerprint"), str):
        raise _wrong("the summary's data_fingerprint", "text", summary.get("data_fingerprint"))
    _check_settings(config, summary)
    _check_numbers(config, evaluations, summary)


def _check_settings(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    task = config.get("task")
    of_task = task if isinstance(task, dict) else {}
    numbers_of_it: dict[str, tuple[Any, int]] = {
        "cohort": (config.get("cohort"), 0),
        "evaluate_every": (config.get("evaluate_every"), 1),
        "task.novel": (of_task.get("novel"), 0),
    }
    if (clients := of_task.get("clients")) != "none" or not _at_sites(config):
        numbers_of_it["task.clients"] = (clients, 1)
    for key, (value, least) in numbers_of_it.items():
        if not _is_number(value) or value < least:
            raise _wrong(f"the setting {key}", f"a number from {least}", value)
    for key, own in (
        ("method", config["method"]["name"]),
        ("seed", config.get("seed")),
        ("rounds", config.get("rounds")),
    ):
        if summary.get(key) != own:
            raise _wrong(f"the summary's {key}", f"that of the settings, {own}", summary.get(key))


def _check_numbers(
    config: Mapping[str, Any], evaluations: Sequence[Evaluation], summary: Mapping[str, Any]
) -> None:
    rounds, every = summary["rounds"], int(config["evaluate_every"])
    tested = {e.round: e for e in evaluations if e.split == "test"}
    # One after the other: how many a damaged record has them be is no reason to keep them all.
    for number in chain(range(every, rounds + 1, every), (rounds, summary["best_round"])):
        if number not in tested:
            raise ValueError(f"the metrics lack test data after round {number}")
    if max(e.round for e in evaluations) > rounds:
        raise ValueError(f"the metrics have rounds after the last, {rounds}")
    for each in evaluations:
        _check_clients(each)
    best, metric = tested[summary["best_round"]], summary.get("metric", ACCURACY.name)
    novel = next((e for e in evaluations if e.split == "novel"), None)
    expected = {"metric": best.metric} | numbers(best, novel, summary.get(f"others_{metric}"))
    expected |= {key: getattr(tested[rounds], key) for key in ("bytes_down", "bytes_up")}
    expected |= _chosen_by(config["method"]["name"], evaluations, best.round)
    if isinstance(sizes := summary.get("sizes", []), list) and len(sizes) == len(best.clients):
        expected |= numbers_of_sizes(best, sizes)
    elif sizes:
        raise _wrong("the summary's sizes", f"{len(best.clients)} words", sizes)
    # One of an earlier version may lack some.
    found = {f"test_{best.metric}": None, **summary, "metric": metric}
    for key, value in expected.items():
        if key in found and not _same(found[key], value):
            raise _wrong(f"the summary's {key}", f"that of the metrics, {value}", found[key])


def _chosen_by(method: str, evaluations: Sequence[Evaluation], best: int) -> dict[str, Any]:
    """Returns what a summary may say of the data by which its best round was chosen.

    That is nothing where a method rehearses and the metrics do not tell of it, as before they did.
    """
    split = deciding(evaluations)
    rehearses = method in METHODS and METHODS[method].Server.rehearse is not None
    if rehearses and split != REHEARSAL:
        return {}
    found = (e for e in evaluations if (e.round, e.split) == (best, split))
    return next((numbers_of_choice(e) for e in found), {})


def _check_clients(of: Evaluation) -> None:
    """Compares the numbers over clients with those of each client."""
    main, accuracies = of.main, of.metric == ACCURACY.name
    found = {"value": main.value} if accuracies else {}
    found |= {name: getattr(main, name) for name in ("client_mean", "client_std", "worst_decile")}
    there = [(v, n) for v, n in zip(main.client, of.count, strict=True) if v is not None]
    expected = over_clients(of.judged_by, main.client)
    if accuracies:
        expected["value"] = weighted_mean(*zip(*there, strict=True)) if there else None
    for name, value in found.items():
        if not _same(value, expected[name]):
            raise _wrong(
                f"the {name} of {of.split} data after round {of.round}",
                f"that of its clients, {expected[name]}",
                value,
            )


def _same(one: Any, other: Any) -> bool:
    """Whether two numbers, or words, are the same but for how a sum was rounded."""
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other)
    return bool(one == other)


def _at_sites(config: Mapping[str, Any]) -> bool:
    """Whether clients were at sites, which say who is there."""
    engine = config.get("engine")
    return isinstance(engine, dict) and engine.get("name") == "flower"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _wrong(what: str, wanted: str, came: object) -> ValueError:
    return ValueError(f"{what} must be {wanted}, is {one_line(repr(came), 60)}")

"""What a person is told of a run's summary."""

from collections.abc import Mapping
from typing import Any

from hyperfed.metrics import ACCURACY, named
from hyperfed.runs.measures import Number

MOST_LOST = 10
"""Clients that are named of those that took no part, at most."""

PERSONAL = 0.01
"""By which part of the metric a client's own model must be better than another client's."""


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Returns sentences on a run: :func:`remark`, whom it had nothing of, what privacy cost."""
    return [told for of in (remark, _always_lost, _spent) if (told := of(summary)) is not None]


def _always_lost(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence where clients took no part in training, though they were asked."""
    if not (names := summary.get("always_lost")):
        return None
    more = f" and {len(names) - MOST_LOST} more" if len(names) > MOST_LOST else ""
    return (
        f"lost in every round that was to have them: {', '.join(names[:MOST_LOST])}{more}; log.txt "
        "and metrics.jsonl say why"
    )


def _spent(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence on what answers cost, where they are private."""
    if (found := summary.get("privacy")) is None:
        return None
    told = (
        f"private: epsilon {found['epsilon_spent']:.4g} at delta {found['delta']:g} was spent by "
        f"the client that spent most; noise {found['noise']}"
    )
    clients = len(found.get("epsilon_of_clients") or ())  # where all that one holds is private
    if clients and found["delta"] >= 1 / clients:
        told += (
            f"; a delta of 1 in {clients} clients or more promises none of them a thing, since to "
            "publish all data of one drawn at random keeps it; set privacy.delta far below"
        )
    return told


def remark(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence where numbers lack clients, or all, or models are not personal, or None.

    They are not where the model that is made for another client does as well on a client's data
    (``others_accuracy``, None where a method makes no such models).
    """
    if (missing := without(summary)) is not None:
        return missing
    metric = named(summary.get("metric", ACCURACY.name))
    if summary.get(f"test_{metric.name}", 0) is None:
        return (
            "no client has an example to test with, so nothing says how good the models are; set "
            "test above 0, or let the data's split have some"
        )
    own, others = (summary.get(f"{which}_{metric.name}") for which in ("test", "others"))
    if own is None or others is None:
        return None
    if metric.gain(own, others) >= PERSONAL * max(abs(own), abs(others)):
        return None
    told = f"its model is {percent(own)} % right and that of another client {percent(others)} %"
    if metric.name != ACCURACY.name:
        told = f"{metric.label} is {metric.told(own)}, with another's model {metric.told(others)}"
    return (
        f"nothing is personal: on a client's own test data {told}; clients may not differ, or more "
        "rounds or a larger method.lr are needed"
    )


def without(summary: Mapping[str, Any]) -> str | None:
    """Returns a sentence where clients are missing in a run's numbers, or None."""
    for split in ("test", "novel"):
        if told := lacking(summary, split):
            return f"{told}: the {split} numbers are without the others, which metrics.jsonl names"
    return None


def lacking(summary: Mapping[str, Any], split: str) -> str:
    """Returns how many clients were evaluated where that is not all; "" where it is.

    Args:
        summary: of a run.
        split: "novel" for clients that joined afterwards; of known ones any other.
    """
    told = summary.get("novel_evaluated" if split == "novel" else "evaluated") or ""
    evaluated, _, clients = told.partition(" of ")
    return "" if evaluated == clients else f"evaluated {told} clients"


def percent(fraction: Number) -> str:
    """Returns a fraction in per cent, without the sign, or a dash where there is none."""
    return ACCURACY.shown(fraction)


def megabytes(count: float) -> str:
    """Returns bytes in MB (1e6), of less than 0.1 in thousandths."""
    return f"{count / 1e6:.{3 if 0 < count < 1e5 else 1}f}"

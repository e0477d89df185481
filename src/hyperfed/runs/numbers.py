"""The numbers of a run's end by name, as a summary has them."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from hyperfed.metrics import ACCURACY
from hyperfed.runs.measures import Measure, Number
from hyperfed.runs.records import Evaluation


def numbers(test: Evaluation, novel: Evaluation | None, others: Number) -> dict[str, Any]:
    """Returns what a run came to, each number named by its metric.

    A summary without ``metric`` is of accuracies, as before there were others.

    Args:
        test: of known clients at the best round.
        novel: of clients that joined afterwards; None where there are none.
        others: the metric of known clients with each other's models.
    """
    main, more = test.metric, test.others
    found: dict[str, Any] = {} if main == ACCURACY.name else {"metric": main}
    found |= {f"test_{name}": test.value(name) for name in _named(test)}
    for name, of in {main: test.main, **more}.items():
        found |= _over_clients(name, of)
    found |= {f"others_{main}": others, "evaluated": test.evaluated}
    return found | numbers_of_novel(test, novel)


def numbers_of_choice(val: Evaluation) -> dict[str, Any]:
    """Returns the numbers by one of which the best round was chosen.

    Args:
        val: of known clients at the best round, of the split that decides.
    """
    return {f"val_{name}": val.value(name) for name in _named(val)}


def numbers_of_novel(test: Evaluation, novel: Evaluation | None) -> dict[str, Any]:
    """Returns the part of these numbers that is of clients that joined afterwards.

    Args:
        test: of known clients, which says what is measured.
        novel: of novel ones; None where there are none.
    """
    found: dict[str, Any] = {f"novel_{name}": novel and novel.value(name) for name in _named(test)}
    found[f"novel_{test.metric}_client_mean"] = novel and novel.main.client_mean
    return found | {"novel_evaluated": novel and novel.evaluated}


def _named(test: Evaluation) -> list[str]:
    """Returns the metrics that there are over all examples, that of the task first."""
    accuracies = test.metric == ACCURACY.name
    return [
        test.metric,
        *(("masked_accuracy", "zeroed_accuracy") if accuracies else ()),
        *test.others,
    ]


def numbers_of_sizes(test: Evaluation, sizes: Sequence[str]) -> dict[str, Number]:
    """Returns the metric of known clients of each target size, the mean over those with examples.

    Args:
        test: of known clients at the best round.
        sizes: (C,) of each.
    """
    main = test.main.client
    found: dict[str, Number] = {}
    for size in dict.fromkeys(sizes):
        own = [v for v, of in zip(main, sizes, strict=True) if of == size and v is not None]
        found[f"test_{test.metric}_{size}"] = fmean(own) if own else None
    return found


def _over_clients(name: str, of: Measure) -> dict[str, Number]:
    return {
        f"test_{name}_client_mean": of.client_mean,
        f"test_{name}_client_std": of.client_std,
        f"worst_decile_{name}": of.worst_decile,
    }

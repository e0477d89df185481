"""Runs that are done, made by hand."""

from dataclasses import dataclass
from typing import Any

from hyperfed.analysis.comparison import Row
from hyperfed.runs.records import Evaluation, summarise


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    config: dict[str, Any]
    summary: dict[str, Any] | None
    evaluations: tuple[Evaluation, ...]


def evaluation(number: int, split: str, correct: list[int]) -> Evaluation:
    return summarise(
        round=number,
        split=split,
        clients=[0, 1, 2],
        count=[10, 10, 0],  # the last client has nothing to test on
        correct=[*correct, 0],
        loss=[1.0, 1.0, 0.0],
        masked_correct=[*correct, 0],
        zeroed_correct=[*correct, 0],
        bytes_down=0,
        bytes_up=0,
        seconds=0.0,
    )


def finished(method: str, seed: int = 0, **changes: Any) -> Finished:
    summary = {
        "method": method,
        "seed": seed,
        "rounds": 20,
        "best_round": 10,
        "test_accuracy": 0.75,
        "test_accuracy_client_mean": 0.7512,
        "test_accuracy_client_std": 0.25,
        "worst_decile_accuracy": 0.5,
        "novel_accuracy": None,
        "bytes_down": 1_500_000,
        "bytes_up": 2_000_000,
        "seconds": 12.34,
        "data_fingerprint": "abc",
        "engine": "loop",
    }
    found = (
        *(evaluation(10, "test", [5, 10]), evaluation(20, "test", [4, 8])),
        *(evaluation(10, "val", [6, 9]), evaluation(20, "val", [3, 7])),
    )
    config = {"seed": seed, "method": {"name": method}, "engine": {"name": "loop"}}
    return Finished(config, summary | changes, found)


def row(method: str, seed: int, accuracy: float, novel: float | None = None) -> Row:
    return Row(
        label=f"{method} seed={seed}",
        group=method,
        method=method,
        seed=seed,
        rounds=10,
        best_round=5,
        val=accuracy - 0.1,
        test=accuracy,
        client_mean=accuracy,
        client_std=0.0,
        worst_decile=accuracy / 2,
        novel=novel,
        bytes_down=1_000_000 * (seed + 1),
        bytes_up=0,
        seconds=2.0 * seed,
        data_fingerprint=str(seed),
    )

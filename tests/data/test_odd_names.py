"""Names of clients and labels: those that read the same are one, or are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from hyperfed.data import datasets, site
from hyperfed.data.newcomer import newcomer
from hyperfed.data.own import Task
from hyperfed.errors import UserError
from own_data import N, pictures, saved, table

COMPOSED, APART = "\xe9", "e\u0301"  # é as one letter, and as an e with an accent beside it
X = np.arange(N * 4, dtype=np.float32).reshape(N, 4)
BOTH, USUAL = [COMPOSED, APART, "b"] * (N // 3), ["c", "a", "b"] * (N // 3)


def task_of(y: list[str], client: list[str]) -> Task:
    return Task.from_arrays(X, y, client=client, model=lambda: nn.LazyLinear(3))


def from_table(folder: Path, **columns: list[str]) -> Any:
    return datasets.load(saved(table(**columns), folder / "mine.parquet"))


def from_folder(folder: Path, *old: str) -> Any:
    pictures(folder)
    for name, new in zip(old, (COMPOSED, APART), strict=True):
        for place in [*folder.rglob(name)]:
            place.rename(place.with_name(new))
    return datasets.load(str(folder))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(
    ("what", "load"),
    [
        ("clients", lambda folder: task_of(USUAL, BOTH)),
        ("labels", lambda folder: task_of(BOTH, USUAL)),
        ("clients", lambda folder: from_table(folder, client=BOTH)),
        ("labels", lambda folder: from_table(folder, label=BOTH)),
        ("clients", lambda folder: from_folder(folder, "ann", "bob")),
        ("labels", lambda folder: from_folder(folder, "cat", "dog")),
        ("clients", lambda folder: site.read(saved(table(client=BOTH), folder / "a.parquet"))),
        (
            "labels",
            lambda folder: site.read(saved(table(label=BOTH), folder / "a.parquet"), check=True),
        ),
    ],
)
def test_names_that_read_the_same_are_refused(
    what: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    told = rf"{what} must have names that read differently, got '(\\xe9|e\\u0301)' and '.*, which "
    with pytest.raises(UserError, match=told):
        load(tmp_path)


def test_a_label_is_known_however_its_accents_are_written(tmp_path: Path) -> None:
    task = task_of([COMPOSED, "a", "b"] * (N // 3), USUAL)
    assert newcomer(task, X[:2], [APART, "a"]).y.tolist() == [2, 0]
    held = table(label=[APART, "a"] * (N // 2))
    at_site = site.read(saved(held, tmp_path / "a.parquet"), labels=("a", COMPOSED))
    assert at_site.y[:2].tolist() == [1, 0]


@pytest.mark.parametrize("ending", ["", ".csv"])
def test_a_name_that_is_too_long_for_a_file_is_refused(ending: str) -> None:
    with pytest.raises(UserError, match=r"^a (data set|table) must "):
        datasets.load("a" * 10_000 + ending)


@pytest.mark.parametrize("what", ["clients", "labels"])
def test_a_name_that_no_file_can_hold_is_refused(what: str) -> None:
    odd = ["\ud800", "a", "b"] * (N // 3)  # half a character, as of a folder's odd encoding
    y, client = (odd, USUAL) if what == "labels" else (USUAL, odd)
    with pytest.raises(UserError, match=rf"{what} must be called by whole characters, got '\\ud"):
        task_of(y, client)

"""Arrays as libraries and files hand them over: taken for what they say, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from hyperfed.data import datasets, site
from hyperfed.data.newcomer import newcomer
from hyperfed.data.own import Task
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.errors import UserError

N = 24
X = np.arange(N * 4, dtype=np.float32).reshape(N, 4)
Y = np.arange(N) % 3


def task_of(x: Any = X, y: Any = Y, classes: int = 3) -> Task:
    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

    return Task.from_arrays(x, y, client=np.arange(N) % 4, model=net)


@pytest.mark.parametrize(
    "lay",
    [
        np.asfortranarray,
        lambda x: x.astype(">f4"),  # as of FITS and of MNIST's own files
        lambda x: x[::-1][::-1],
        lambda x: x[::-1].copy()[::-1],
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: x.astype(np.float16),
        lambda x: torch.tensor(x).bfloat16(),
    ],
)
def test_numbers_are_what_they_are_however_they_lie_in_memory(lay: Any) -> None:
    assert task_of(lay(X)).x.tolist() == X.tolist()
    assert task_of(y=Y[::-1]).y.tolist() == Y[::-1].tolist()
    assert task_of(y=Y.astype(">i2")).y.tolist() == Y.tolist()


def test_a_task_stays_as_it_is_where_its_data_are_changed_afterwards(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r+")
    for x in (X.copy(), torch.tensor(X), mapped):
        y = torch.tensor(Y)
        task = task_of(x, y)
        x[:], y[:] = 0, 0
        assert task.x.tolist() == X.tolist()
        assert task.y.tolist() == Y.tolist()


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (X[:, :0], r"must hold a number at least, got shape \(0,\)"),
        (np.zeros((N, 1, 0, 4), np.uint8), r"a number at least, got shape \(1, 0, 4\)"),
        (torch.tensor(X).to_sparse(), r"must be dense, got torch.sparse_coo; pass x\.to_dense"),
        (np.full((N, 4), 2**63, np.uint64), "integers below 2.*63, got 9223372036854775808"),
        (np.zeros((N, 8, 8, 4), np.uint8), r"channels before height and width, got shape"),
        (np.zeros((N, 8, 8, 2), np.uint8), r"channels before height and width, got shape"),
    ],
)
def test_what_cannot_be_taken_for_examples_is_refused(x: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        task_of(x)


@pytest.mark.parametrize("width", [2, 4])
def test_images_of_four_channels_are_images(width: int) -> None:
    images = np.arange(N * 4 * 8 * width).astype(np.uint8).reshape(N, 4, 8, width)
    assert task_of(images).x.tolist() == images.tolist()


def test_columns_may_have_names_of_several_parts() -> None:
    frame = pd.DataFrame({("sensor", "a"): X[:, 0], ("label", ""): Y, ("client", ""): Y})
    task = Task.from_frame(
        frame, client="('client', '')", target="('label', '')", model=lambda: nn.LazyLinear(3)
    )
    assert task.x.tolist() == X[:, :1].tolist()
    with pytest.raises(UserError, match=r"must be among them, got none; say which is the target"):
        Task.from_frame(frame, model=lambda: nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"features": []}, "features must be some of them, got none; leave features out for all"),
        ({"target": "client"}, "one of client, target and split, got 'client' for several"),
        ({"client": "label"}, "one of client, target and split, got 'label' for several"),
        ({"split": "client"}, "one of client, target and split, got 'client' for several"),
    ],
)
def test_a_column_is_one_thing_and_features_are_some(columns: dict[str, Any], told: str) -> None:
    frame = pd.DataFrame({"client": Y.astype(str), "label": Y, "a": X[:, 0], "b": X[:, 1]})
    with pytest.raises(UserError, match=told) as caught:
        Task.from_frame(frame, model=lambda: nn.LazyLinear(3), **columns)
    assert str(caught.value).count("\n- ") == 1


def test_times_with_a_zone_are_told_once() -> None:
    when = pd.date_range("2026-01-01", periods=N, tz="UTC")
    frame = pd.DataFrame({"when": when, "label": Y, "client": Y})
    with pytest.raises(UserError, match="got Timestamp in row 0; convert it"):
        Task.from_frame(frame, model=lambda: nn.LazyLinear(3))


def archive(folder: Path, **arrays: Any) -> str:
    usual = {"x": X, "y": Y, "client": np.arange(N) % 4}
    path = folder / "mine.npz"
    np.savez(path, **{name: held for name, held in (usual | arrays).items() if held is not None})
    return str(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"classes": 10**9}, "classes must be one whole number above 0, 1000000 at most, got"),
        ({"classes": np.nan}, "classes must be one whole number above 0"),
        ({"classes": 2.5}, "classes must be one whole number above 0"),
        ({"classes": "three"}, "classes must be one whole number above 0"),
        ({"x": 3}, "column 'x' must hold a value for each row, got one"),
        ({"y": 3}, "column 'y' must hold a value for each row, got one"),
        ({"client": 3}, "column 'client' must hold a value for each row, got one"),
        ({"x": None, "a": X[:, 0], "b": X[:5, 0]}, r"got \(24,\) in 'a' and \(5,\) in 'b'"),
        ({"y": np.stack([Y, Y], 1)}, r"y must have shape \(N,\), got \(24, 2\)"),
    ],
)
def test_an_archive_that_cannot_be_a_table_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        datasets.load(archive(tmp_path, **changes))


def test_labels_of_tokens_are_refused_at_a_site_whose_loss_takes_one_for_each(
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=r"y must have shape \(N,\), got \(24, 2\)"):
        site.read(archive(tmp_path, y=np.stack([Y, Y], 1)))


def test_tokens_that_a_model_does_not_know_are_refused_in_whatever_row_they_are() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 2), nn.Flatten(), nn.Linear(8, 3))

    tokens = np.arange(N * 4).reshape(N, 4) % 8
    for row, odd in ((N - 1, 8), (5, -1)):
        beyond = tokens.copy()
        beyond[row, 2] = odd
        told = rf"torch\.int64 from {min(odd, 0)} to {max(odd, 7)}, but fails on it \(IndexError"
        with pytest.raises(UserError, match=told):
            Task.from_arrays(beyond, Y, client=np.arange(N) % 4, model=net)
        task = Task.from_arrays(tokens, Y, client=np.arange(N) % 4, model=net)
        assert len(newcomer(task, tokens).x) == N
        with pytest.raises(UserError, match=told):
            newcomer(task, beyond)


def test_integers_that_are_too_large_for_tokens_take_no_memory(tmp_path: Path) -> None:
    path = archive(tmp_path, x=np.full((N, 4), 10**12))
    with pytest.raises(UserError, match=r"tokens must be below 1000000, got 1000000000000 in mine"):
        build(TaskConfig(path, novel=0), seed=0)

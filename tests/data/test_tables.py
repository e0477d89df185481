"""Tables: what each column becomes, and what is refused with column and row."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn

from hyperfed.data import datasets, tables
from hyperfed.data.newcomer import newcomer, rows_like
from hyperfed.data.own import Task
from hyperfed.data.tables import Columns
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.errors import UserError
from own_data import SENSORS, N, saved, table
from sensors import ACTIVITIES, NETS, PEOPLE, SensorNet, windows
from toys import both_are_right, both_labels_loss


def from_frame(frame: Any, outputs: int = 3, **options: Any) -> Task:
    return Task.from_frame(frame, model=lambda: nn.LazyLinear(outputs), **options)


def test_windows_of_thirty_people_are_a_task_of_thirty_clients(sensors: str) -> None:
    config = TaskConfig(name=sensors, model=f"{NETS}:SensorNet", novel=3, **SENSORS)
    task = build(config, seed=0)
    assert (task.clients, task.novel, task.x.shape) == (30, 3, (180, 9, 128))
    assert (task.x.dtype, task.labels) == (torch.float32, ACTIVITIES)
    frame = windows()
    expected = np.array(frame["window"].tolist(), np.float32)
    assert torch.equal(task.x, torch.from_numpy(expected))
    assert [ACTIVITIES[label] for label in task.y] == frame["activity"].tolist()
    assert sorted(task.names) == sorted(PEOPLE)
    for client, name in enumerate(task.names):
        own = torch.cat([split[client] for split in (task.train, task.val, task.test)])
        assert set(frame["person"].iloc[own.tolist()]) == {name}
        assert len(own) == 6
    assert task.source.settings.clients == 30
    assert task.source.settings.partition == "natural"


def test_a_frame_makes_the_same_examples(sensors: str) -> None:
    task = Task.from_frame(windows(), model=SensorNet, novel=0.1, **SENSORS)
    assert (task.names, task.novel, task.labels) == (PEOPLE, 3, ACTIVITIES)
    built = build(TaskConfig(name=sensors, model=f"{NETS}:SensorNet", **SENSORS), seed=0)
    assert torch.equal(task.x, built.x)
    assert torch.equal(task.y, built.y)
    assert task.source is None


def test_which_of_two_columns_is_the_target_must_be_said(tmp_path: Path) -> None:
    both = table(y=np.linspace(0, 1, N))
    with pytest.raises(UserError, match="target must be one of them, got label and y; say which"):
        from_frame(both)
    assert from_frame(both, target="label").classes == 3
    told = "target must be one of them, got label and y"
    with pytest.raises(UserError, match=told):
        datasets.load(saved(both, tmp_path / "both.csv"))


def test_columns_may_be_called_by_numbers() -> None:
    frame = table().rename(columns={"client": 3, "label": 4, "age": 0, "height": 1})
    task = from_frame(frame, client=3, target=4, features=[0, 1])
    assert task.columns == Columns("3", ("4",), ("0", "1"))
    assert from_frame(frame, client=3, target=4, features=1).x.shape == (N, 1)


def test_the_index_of_a_frame_may_be_a_column_that_is_asked_for(tmp_path: Path) -> None:
    frame = table().set_index("client")
    for held in (frame, frame.set_index("age", append=True)):
        path = saved(held, tmp_path / "held.parquet")
        assert datasets.load(path).names == from_frame(held).names == ("c0", "c1", "c2", "c3")
    named = frame.rename_axis("who")
    assert from_frame(named, client="who").features == from_frame(table()).features
    with pytest.raises(UserError, match="must have a column that says who holds each row"):
        from_frame(named)  # an index is no feature, nor a client unless it is said
    assert from_frame(table().rename_axis("row")).x.shape == (N, 2)


def test_words_as_bytes_are_refused() -> None:
    who = np.array(table()["client"], "S")
    held = {"x": np.ones((N, 2)), "y": np.arange(N) % 3, "client": who}
    with pytest.raises(UserError, match=r"column 'client' must hold words as text, got bytes"):
        tables.rows_of(held, Columns(), "mine.npz")


def test_columns_of_numbers_are_one_row_of_floats() -> None:
    task = from_frame(table(tall=np.arange(N) % 2 == 0))
    expected = np.stack([np.arange(N), np.linspace(1.5, 2, N), np.arange(N) % 2 == 0], 1)
    np.testing.assert_array_equal(task.x.numpy(), expected.astype(np.float32))
    assert task.y.tolist() == (np.arange(N) % 3).tolist()
    chosen = from_frame(table(), features="height")
    np.testing.assert_array_equal(chosen.x.numpy(), expected[:, 1:2].astype(np.float32))
    assert (task.classes, task.names, task.labels) == (3, ("c0", "c1", "c2", "c3"), ())


def test_columns_may_be_numbered_as_those_of_an_array_are() -> None:
    frame = table().rename(columns={"age": 0, "height": 1})
    numbered, named = from_frame(frame), from_frame(table())
    assert torch.equal(numbered.x, named.x)
    assert numbered.columns is not None
    assert numbered.columns.features == ("0", "1")
    assert torch.equal(from_frame(frame, features=["1"]).x, named.x[:, 1:])
    assert torch.equal(newcomer(numbered, frame[frame["client"] == "c1"]).x, named.x[1::4])
    assert list(frame) == [0, 1, "label", "client"]


@pytest.mark.parametrize("twice", ["age", "client", "label"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, twice: str) -> None:
    frame = table().rename(columns={"height": twice})
    told = f"a column must have a name of its own, got 2 called '{twice}'; rename"
    with pytest.raises(UserError, match=told):
        from_frame(frame)
    with pytest.raises(UserError, match=told):  # of which pandas makes "age.1"
        datasets.load(saved(frame, tmp_path / "mine.csv"))
    with pytest.raises(UserError, match="got 2 called '0'"):
        from_frame(table().rename(columns={"age": 0, "height": "0"}))


def test_columns_of_one_shape_are_channels() -> None:
    first, second = np.arange(N * 5).reshape(N, 5), -np.arange(N * 5).reshape(N, 5)
    frame = table(age=None, height=None, a=list(first), b=list(second))
    task = Task.from_frame(frame, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(10, 3)))
    assert torch.equal(task.x, torch.from_numpy(np.stack([first, second], 1)).float())


def test_float_targets_are_a_regression_and_float_names_are_none() -> None:
    task = from_frame(table(), outputs=1, target="height", features=["age"])
    assert (task.classes, task.y.dtype) == (0, torch.float32)
    assert "for numbers (a regression, since they are floats; " in repr(task)


def test_the_columns_of_features_are_named() -> None:
    assert repr(from_frame(table())).splitlines()[-1] == "features: age, height"
    many = {f"f{number}": np.zeros(N) for number in range(21)}
    told = repr(from_frame(table(**many))).splitlines()[-1]
    assert told.startswith("features: age, height, f0, ")
    assert told.endswith(", f16, f17 and 3 more")


def test_what_is_to_be_learned_is_no_feature_whatever_it_is_called() -> None:
    task = from_frame(table(x=np.arange(N) / N), target="x", features=None, outputs=1)
    assert task.columns.features == ("age", "height", "label")


def test_numbers_of_rows_are_a_feature_only_where_they_are_named() -> None:
    frame = pd.read_csv(io.StringIO(table().to_csv()))
    assert from_frame(frame, features=["age", "Unnamed: 0"]).x.shape == (N, 2)
    assert from_frame(frame.rename(columns={"age": "x"})).x.shape == (N, 1)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ([3, 1, 6] * 8, ("1", "3", "6"), [1, 0, 2]),
        ([-1, 1, 1] * 8, ("-1", "1"), [0, 1, 1]),
        ([0, 2, 1] * 8, (), [0, 2, 1]),
        ([0, 10**9, 1] * 8, ("0", "1", "1000000000"), [0, 2, 1]),
        (["b", "a", "NA"] * 8, ("NA", "a", "b"), [2, 1, 0]),
        ([True, False, True] * 8, ("False", "True"), [1, 0, 1]),
    ],
)
def test_labels_that_are_no_numbers_from_0_keep_their_names(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...], numbers: list[int]
) -> None:
    task = from_frame(table(label=labels))
    assert (tuple(task.labels), task.y[:3].tolist()) == (names, numbers)
    for ending in ("csv", "parquet"):
        path = saved(table(label=labels), tmp_path / f"mine.{ending}")
        examples = datasets.load(path)
        assert (examples.labels, examples.y[:3].tolist()) == (names, numbers)
    np.savez(tmp_path / "mine.npz", x=np.ones((N, 2)), y=labels, client=np.arange(N) % 4)
    examples = datasets.load(str(tmp_path / "mine.npz"))
    assert (examples.labels, examples.y[:3].tolist()) == (names, numbers)
    assert examples.classes == len(names or {*labels})  # and none that nobody has
    alone = table(label=labels)[:1]  # of one label, which has not the number 0
    assert newcomer(task, alone).y.tolist() == numbers[:1]


def test_classes_that_are_given_say_how_labels_of_a_frame_are_numbered() -> None:
    task = Task.from_frame(table(label=1 + np.arange(N) % 2), model=nn.Linear(2, 3), classes=3)
    assert (task.classes, task.labels, task.y[:4].tolist()) == (3, (), [1, 2, 1, 2])
    words = Task.from_frame(table(label=[*"ab" * 12]), model=nn.Linear(2, 3), classes=3)
    assert (words.classes, words.labels, words.y[:4].tolist()) == (3, ("a", "b"), [0, 1, 0, 1])


def test_a_text_is_its_bytes_with_the_end_last(tmp_path: Path) -> None:
    assert tables.tokens(np.array(["ab", "ü", ""]), None).tolist() == [[98, 99], [196, 189], [0, 0]]
    assert tables.tokens(np.array(["ab"]), 3).tolist() == [[0, 98, 99]]
    assert tables.tokens(np.array(["abc"]), 2).tolist() == [[98, 99]]
    frame = table(age=None, height=None, text=["yes", "no"] * 12)
    task = build(TaskConfig(name=saved(frame, tmp_path / "t.csv"), novel=1), seed=0)
    assert task.x[1].tolist() == [0, ord("n") + 1, ord("o") + 1]
    assert task.models["base"](task.x[:2]).shape == (2, 3)
    alone = newcomer(task, frame[frame["client"] == "c0"].assign(text="no, thank you"))
    assert alone.x[0].tolist() == [ord(letter) + 1 for letter in "no,"]


def test_encoded_images_in_a_column_are_images() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (N, 4, 5), dtype=np.uint8)

    def encoded(picture: Any, mode: str) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(picture).convert(mode).save(file, "png")
        return {"bytes": file.getvalue(), "path": None}

    def net() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))

    cells = [encoded(picture, "L") for picture in pixels]
    task = Task.from_frame(table(age=None, height=None, image=cells), model=net)
    assert torch.equal(task.x, torch.from_numpy(pixels)[:, None])
    cells[3] = encoded(pixels[3], "RGB")
    coloured = Task.from_frame(table(age=None, height=None, image=cells), model=net)
    assert torch.equal(coloured.x, torch.from_numpy(pixels)[:, None].expand(-1, 3, -1, -1))


def test_a_newcomers_table_may_lack_client_and_target_and_is_of_one_client() -> None:
    task = from_frame(table(), client="client", target="label")
    assert newcomer(task, table()[["age", "height"]][:2]).unlabelled
    alone = newcomer(task, table()[table()["client"] == "c1"])
    assert (alone.y.tolist(), len(alone.x)) == ([1, 2, 0, 1, 2, 0], 6)
    with pytest.raises(UserError, match=r"the rows of one client, .* got those of 4 .c0, c1, c2, "):
        newcomer(task, table())
    swapped = table()[["height", "age"]][:2].assign(weight=70.0)
    assert torch.equal(newcomer(task, swapped).x, task.x[:2])
    with pytest.raises(UserError, match="features must be some of them, got 'age'"):
        newcomer(task, table()[["height"]])
    with pytest.raises(UserError, match="y must be left out where x is a table"):
        newcomer(task, table()[:1], [0])


def test_a_newcomers_arrays_are_the_features_of_a_table_in_their_order() -> None:
    frame = table(grade=["a", "b", "c"] * 8, label=None)
    task = from_frame(frame, target="grade")
    x = frame[["age", "height"]].to_numpy()[:2]
    for target, told in ((None, None), ("y", ["b", "a"]), ("label", ["c", "a"])):
        arrays = {"x": x} | ({target: np.array(told)} if target else {})
        rows = rows_like(task, arrays, "mine.npz")
        alone = newcomer(task, rows.x, rows.y)
        assert torch.equal(alone.x, task.x[:2])
        assert alone.unlabelled == (target is None)
        assert target is None or alone.y.tolist() == [task.labels.index(word) for word in told]
    named = {"age": x[:, 0], "height": x[:, 1], "grade": np.array(["c", "b"]), "x": x[:, :1]}
    rows = rows_like(task, named, "mine.npz")
    assert newcomer(task, rows.x, rows.y).y.tolist() == [2, 1]
    with pytest.raises(UserError, match=r"examples like the task's, \(2,\) float32, got \(1,\)"):
        newcomer(task, rows_like(task, {"x": x[:, :1]}, "mine.npz").x)


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"age": [*range(17), np.nan, *range(6)]}, {}, "'age' must be finite, .*1 rows, .*row 17"),
        ({"age": ["x"] * N}, {}, "only feature, got age among 2; make .* name .* without it$"),
        ({"age": ["x"] * N, "client": None}, {}, "or say which column tells whose a row is"),
        ({"label": ["a"] * 5 + [None] + ["b"] * 18}, {}, "'label' must have a value .*row 5; fill"),
        ({"label": [0.5] * 9 + [np.inf] * 15}, {}, "'label' must be finite, .*15 rows, .*row 9"),
        ({"client": [None] + ["a"] * 23}, {}, "'client' must have a value in every row, .*row 0"),
        ({"age": [[1, 2]] * 7 + [[1]] * 17}, {}, r"got \(2,\) in row 0 and \(1,\) in row 7; cut"),
        ({"age": [[1, 2]] * N}, {}, r"one shape, rows first, got \(24, 2\) in 'age' and \(24,\)"),
        ({"age": [["a"]] * N}, {}, "'age' must be the target to hold arrays of words"),
        ({"client": [["a"]] * N}, {}, "'client' must be the target to hold arrays of words"),
        ({"label": [["a", 1]] * N}, {}, "'label' must hold arrays of numbers, or of words, got ot"),
        ({"age": [1, "a"] * 12}, {}, "got int in row 0 and str in row 1; convert it"),
        ({"age": pd.date_range("2026-01-01", periods=N)}, {}, "'age' must not hold times"),
        ({"client": None}, {}, "a column that says who holds each row, got age, height, label; na"),
        ({"label": None}, {}, "are age, height, client:\n- one of label, y, target must be among"),
        ({}, {"target": "labl"}, "target must be one of them, got 'labl'; did you mean 'label'?"),
        ({}, {"client": "person"}, "client must be one of them, got 'person'$"),
        ({"age": np.arange(N) * 1j}, {}, "column 'age' must hold real numbers, got complex128"),
        ({}, {"split": "part"}, "split must be one of them, got 'part'$"),
        ({}, {"features": ["age", "width"]}, "features must be some of them, got 'width'"),
        (
            {},
            {"features": ["age", "label"]},
            "neither target nor split, got 'label' again; leave it",
        ),
        ({}, {"features": ["age", "age"]}, "a feature must be there once, .* got 'age' again"),
        ({"age": None, "height": None}, {}, "there must be features beside client, target and spl"),
        (
            {"Unnamed: 0": range(N)},
            {},
            r"must have a name, got 'Unnamed: 0', .* index=False\), or n",
        ),
        ({"split": ["train"] * 23 + ["Test"]}, {}, "got Test at index 23; rename it"),
        ({}, {"classes": 2}, r"labels must lie in 0..1, got 2 at index 2"),
    ],
)
def test_what_is_wrong_is_told_with_column_and_row(
    changes: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        from_frame(table(**changes), **options)


def test_tables_of_other_libraries_are_taken_as_data_frames() -> None:
    arrow = pa.Table.from_pandas(table(label=["a", "b", "c"] * (N // 3)))
    task = from_frame(arrow)
    assert (task.labels, task.columns.features) == (("a", "b", "c"), ("age", "height"))
    turned = arrow.select(["height", "label", "age"])[:2]
    assert torch.equal(newcomer(task, turned).x, task.x[:2])


@pytest.mark.parametrize("held", [table().to_numpy(), table().to_dict("records"), "mine.csv"])
def test_what_is_no_table_is_refused(held: Any) -> None:
    with pytest.raises(
        UserError, match=r"must be a pandas DataFrame, got (ndarray|list|str); make"
    ):
        from_frame(held)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_text("no table")
    (tmp_path / "bad.csv").write_text("")
    for name in ("bad.parquet", "bad.csv"):
        with pytest.raises(UserError, match=f"{name} must be a readable table"):
            datasets.load(str(tmp_path / name))
    for name in ("none.csv", "none.npz"):
        with pytest.raises(UserError, match=f"there is no .*{name}; name one that is there"):
            datasets.load(str(tmp_path / name))
    with pytest.raises(UserError, match=r"must end in .npz, .parquet, .csv, got .*mine.txt"):
        tables.read(tmp_path / "mine.txt")
    with pytest.raises(UserError, match="digits must come without client, target"):
        datasets.load("digits", columns=Columns(client="writer"))


@pytest.mark.parametrize("kind", [int, bool])
def test_several_labels_that_may_hold_are_columns_of_zeros_and_ones(kind: type) -> None:
    held = {"flu": [0, 1, 1, 0] * 6, "cold": [1, 1, 0, 0] * 6}
    frame = pd.DataFrame(held).astype(kind)
    frame["age"], frame["who"] = range(24), [*"ab"] * 12
    named = {"client": "who", "target": ["flu", "cold"], "novel": 0}
    own = {"loss": both_labels_loss, "score": both_are_right}
    task = from_frame(frame, 2, **named, **own)
    assert task.y.dtype == torch.int64
    assert task.y.tolist() == [[*pair] for pair in zip(*held.values(), strict=True)]
    assert "for 2 labels of 2 classes each" in repr(task)
    joined = newcomer(task, frame.drop(columns="who").head(4))
    assert joined.y.tolist() == [[0, 1], [1, 1], [1, 0], [0, 0]]
    frame["cold"] = frame["cold"].astype(int) * 2
    amounts = from_frame(frame, 2, **named)
    assert (amounts.classes, amounts.y.dtype) == (0, torch.float32)


def test_columns_may_be_named_by_integers_of_numpy() -> None:
    frame = pd.DataFrame(np.arange(48).reshape(16, 3) % 3, columns=np.array([10, 20, 30]))
    frame[40] = [*"ab"] * 8
    first, _, label, who = frame.columns.to_numpy()
    task = from_frame(frame, client=who, target=label, features=first, novel=0)
    assert task.x.shape == (16, 1)

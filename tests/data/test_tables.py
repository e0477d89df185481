"""Your own files and tables: what each column becomes, who holds what, and what is refused."""

import io
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn

from hyperfed.data import arrays, datasets, hub, model_files, site, tables
from hyperfed.data.division import fitted
from hyperfed.data.own import Task, newcomer, rows_like
from hyperfed.data.roster import Frame, Member, Roster
from hyperfed.data.tables import Columns
from hyperfed.data.tasks import TaskConfig, build, remote, settings_of, targets_of
from hyperfed.errors import UserError
from sensors import ACTIVITIES, NETS, PEOPLE, SensorNet, windows

N = 24
SENSORS: dict[str, Any] = {"client": "person", "target": "activity"}


def table(**columns: Any) -> pd.DataFrame:
    """Two numbers, a label and one of four clients for each of 24 rows; changed as asked."""
    usual = {
        "age": np.arange(N),
        "height": np.linspace(1.5, 2.0, N),
        "label": np.arange(N) % 3,
        "client": [f"c{row % 4}" for row in range(N)],
    }
    return pd.DataFrame({name: v for name, v in (usual | columns).items() if v is not None})


def from_frame(frame: pd.DataFrame, outputs: int = 3, **options: Any) -> Task:
    return Task.from_frame(frame, model=lambda: nn.LazyLinear(outputs), **options)


def saved(frame: pd.DataFrame, path: Path) -> str:
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return str(path)


@pytest.fixture(scope="module")
def sensors(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The windows of thirty people as a parquet file."""
    return saved(windows(), tmp_path_factory.mktemp("sensors") / "sensors.parquet")


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
        ({"age": [[1, 2]] * N}, {}, r"one shape in each row, got \(2,\) in 'age' and \(\) in 'hei"),
        ({"age": [["a"]] * N}, {}, "'age' must hold arrays of numbers, got others"),
        ({"age": [1, "a"] * 12}, {}, "got int in row 0 and str in row 1; convert it"),
        ({"age": pd.date_range("2026-01-01", periods=N)}, {}, "'age' must not hold times"),
        ({"client": None}, {}, "a column that says who holds each row, got age, height, label; na"),
        ({"label": None}, {}, "are age, height, client:\n- one of y, target, label must be among"),
        ({}, {"target": "labl"}, "target must be one of them, got 'labl'; did you mean 'label'?"),
        ({}, {"client": "person"}, "client must be one of them, got 'person'$"),
        ({"age": np.arange(N) * 1j}, {}, "column 'age' must hold real numbers, got complex128"),
        ({}, {"split": "part"}, "split must be one of them, got 'part'$"),
        ({}, {"features": ["age", "width"]}, "features must be some of them, got 'width'"),
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


def written(folder: Path, ids: list[str], labels: list[str]) -> str:
    lines = (
        f"{who},{label},{row}" for row, (who, label) in enumerate(zip(ids, labels, strict=True))
    )
    path = folder / "mine.csv"
    path.write_text("\n".join(["client,label,age", *lines, ""]))
    return str(path)


def test_ids_of_a_csv_file_are_as_they_are_written(tmp_path: Path) -> None:
    path = written(tmp_path, ["01", "1", "001", "7"] * 6, ["0", "1"] * 12)
    assert datasets.load(path).names == ("01", "1", "001", "7")
    assert list(site.read(path).rows) == ["01", "1", "001", "7"]


def test_what_pandas_reads_part_by_part_is_one_column(tmp_path: Path) -> None:
    names = ["client", "y", "said", *(f"empty{number}" for number in range(2000))]
    nothing = "," * 2000  # the wider a table is, the fewer of its rows are a part
    rows = [f"{row % 2},{row % 2},{'word' if row == 2000 else row}{nothing}" for row in range(2001)]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join([",".join(names), *rows, ""]))
    assert datasets.load(str(path), columns=Columns(features=("said",))).text


@pytest.mark.parametrize(
    ("labels", "names", "first"),
    [
        (["1e1", "10", "010", "2"], ("010", "10", "1e1", "2"), [2, 1, 0, 3]),
        (["01", "02", "1"], ("01", "02", "1"), [0, 1, 2]),
        (["99999999999999999999", "1"], ("1", "99999999999999999999"), [1, 0]),
        (["3", "1", "-2"], ("-2", "1", "3"), [2, 1, 0]),
        (["0", "1", " 2"], (), [0, 1, 2]),
        (["True", "True"], ("False", "True"), [1, 1]),
        (["1.50", "-2e-1", ".5", "3"], (), [1.5, -0.2, 0.5, 3.0]),
    ],
)
def test_labels_of_a_csv_file_are_numbers_where_these_say_all_of_them(
    tmp_path: Path, labels: list[str], names: tuple[str, ...], first: list[float]
) -> None:
    examples = datasets.load(written(tmp_path, ["a"] * 12, labels * (12 // len(labels))))
    assert examples.labels == names
    assert examples.y[: len(first)].tolist() == pytest.approx(first)


# Division.


def test_clients_of_whom_nobody_can_be_tested_are_refused_unless_none_shall_be(
    tmp_path: Path,
) -> None:
    few = table()[:8]  # two of each
    path = saved(few, tmp_path / "few.csv")
    with pytest.raises(UserError, match=r"of a client, 2 at most, a fraction of 0.15 is none"):
        build(config(path), 0)
    path = saved(few.assign(split="train"), tmp_path / "all.csv")
    assert not any(map(len, build(config(path), 0).test))


def config(path: str, **settings: Any) -> TaskConfig:
    return TaskConfig(name=path, **{"novel": 0} | settings)


def test_own_data_are_dealt_by_their_clients_unless_settings_say_otherwise(tmp_path: Path) -> None:
    path = saved(table(), tmp_path / "mine.csv")
    assert sorted(build(config(path), 0).names) == ["c0", "c1", "c2", "c3"]
    assert build(config(path, clients=3), 0).clients == 3
    dealt = build(config(path, partition="iid", clients=2), 0)
    assert (dealt.clients, dealt.names) == (2, ())
    nobody = saved(table(client=None), tmp_path / "nobody.csv")
    assert build(config(nobody, clients=2), 0).source.settings.partition == "class_shares"
    with pytest.raises(
        UserError, match=r"do not fit mine: a client must be left .* got 4 clients "
    ):
        build(config(path, novel=4), 0)
    assert build(config(path, novel=3), 0).novel == 3


def test_an_archive_is_dealt_by_its_clients_and_its_split(tmp_path: Path) -> None:
    arrays = {"x": np.ones((N, 2)), "y": np.arange(N) % 3, "client": np.arange(N) % 4 + 7}
    split = np.where(np.arange(N) < 16, "train", np.where(np.arange(N) < 20, "val", "test"))
    np.savez(tmp_path / "mine.npz", **arrays, split=split, classes=5)
    task = build(config(str(tmp_path / "mine.npz")), 0)
    assert (sorted(task.names), task.classes, task.labels) == (["10", "7", "8", "9"], 5, ())
    for own, word in ((task.train, "train"), (task.val, "val"), (task.test, "test")):
        assert torch.cat(list(own)).sort().values.tolist() == np.flatnonzero(split == word).tolist()


def test_an_archive_that_says_its_classes_has_labels_by_number(tmp_path: Path) -> None:
    arrays = {"x": np.ones((N, 2)), "y": np.arange(N) % 3 + 1, "client": np.arange(N) % 4}
    np.savez(tmp_path / "mine.npz", **arrays, classes=5)
    examples = datasets.load(str(tmp_path / "mine.npz"))
    assert (examples.labels, examples.classes) == ((), 5)
    assert examples.y[:3].tolist() == [1, 2, 3]


def test_regression_is_dealt_by_clients_or_at_random(tmp_path: Path) -> None:
    frame = table(label=None, target=np.linspace(0, 1, N))
    task = build(config(saved(frame, tmp_path / "mine.csv")), 0)
    assert (task.clients, task.classes) == (4, 0)
    assert task.models["base"](task.x[:2]).shape == (2, 1)
    output, y = torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0])
    assert task.loss(output, y).item() == pytest.approx((1 + 4) / 2)
    assert task.score(output, y).tolist() == [-1, -4]
    nobody = saved(frame.drop(columns="client"), tmp_path / "nobody.csv")
    assert build(config(nobody, clients=3), 0).source.settings.partition == "shuffled"
    with pytest.raises(UserError, match="must have labels for partition=class_shares, but its ta"):
        build(config(nobody, clients=3, partition="class_shares"), 0)


def test_a_split_of_the_data_is_what_examples_are_for(tmp_path: Path) -> None:
    split = np.where(np.arange(N) < 16, "train", "test")
    path = saved(table(split=split), tmp_path / "mine.csv")
    task = build(config(path), 0)
    assert torch.cat(list(task.test)).sort().values.tolist() == [*range(16, 24)]
    assert sum(map(len, task.val)) == 0
    some = build(config(path, val=0.25), 0)
    assert torch.cat(list(some.test)).sort().values.tolist() == [*range(16, 24)]
    assert [len(own) for own in some.val] == [1, 1, 1, 1]
    with pytest.raises(UserError, match="test must be left out where the data have a split"):
        build(config(path, test=0.2), 0)
    path = saved(table(split=np.where(np.arange(N) < 4, "val", split)), tmp_path / "three.csv")
    with pytest.raises(UserError, match="val must be left out where the data have a split"):
        build(config(path, val=0.2), 0)
    path = saved(table(split=["train", "train", "test", "train"] * 6), tmp_path / "idle.csv")
    with pytest.raises(
        UserError, match=r"each client of idle must have an .*, but c2 has none .1 s"
    ):
        build(config(path), 0)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYPERFED_DATA", raising=False)


def pictures(folder: Path, below: tuple[str, ...] = ("",)) -> str:
    rng = np.random.default_rng(0)
    for part in below:
        for person in ("ann", "bob"):
            for label in ("cat", "dog"):
                place = folder / part / person / label
                place.mkdir(parents=True)
                for number in range(4):
                    pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{number}.png")
    return str(folder)


@pytest.mark.usefixtures("cached")
def test_a_folder_of_people_is_dealt_by_them(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "all")
    for _ in range(2):  # the second time from the cache
        task = build(config(folder), 0)
        assert (sorted(task.names), task.labels) == (["ann", "bob"], ("cat", "dog"))
    ann = task.number_of("ann")
    held = torch.cat([split[ann] for split in (task.train, task.val, task.test)])
    found = {tuple(task.x[row].flatten().tolist()) for row in held}
    files = (tmp_path / "all" / "ann").rglob("*.png")
    assert found == {tuple(np.asarray(Image.open(file)).flatten().tolist()) for file in files}
    apart = build(config(pictures(tmp_path / "apart", ("train", "test"))), 0)
    assert sorted(apart.names) == ["ann", "bob"]
    assert [len(own) for own in apart.test] == [8, 8]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("person", ["val", "test-1"])
def test_a_folder_of_which_some_would_be_left_out_is_refused(tmp_path: Path, person: str) -> None:
    folder = Path(pictures(tmp_path / "all"))
    (folder / "bob").rename(folder / person)  # as a split is called, so that ann is in none
    told = "8 of its files would be left out, such as ann/cat/0.png"
    with pytest.raises(UserError, match=told):
        datasets.load(str(folder))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: ann/*/*.png\n---\n"
    )
    assert len(datasets.load(str(folder))) == 8  # as it says


@pytest.mark.usefixtures("cached")
def test_a_folder_of_tables_of_which_some_would_be_left_out_is_refused(tmp_path: Path) -> None:
    for name in ("clinic a", "clinic b", "clinic test"):
        saved(table(), tmp_path / f"{name}.parquet")
    told = "2 of its files would be left out, such as clinic a.parquet"
    with pytest.raises(UserError, match=told):
        datasets.load(str(tmp_path))
    with pytest.raises(UserError, match=told):
        site.read(tmp_path)


@pytest.mark.usefixtures("cached")
def test_splits_that_are_called_in_capitals_are_not_trained_on(tmp_path: Path) -> None:
    told = "splits must be called in small letters, .*, got "
    folder = pictures(tmp_path / "all", ("Training", "Testing"))
    with pytest.raises(UserError, match=f"{told}Testing, Training"):
        datasets.load(folder)
    (tmp_path / "tables").mkdir()
    for name in ("Train", "Test"):
        saved(table(), tmp_path / "tables" / f"{name}.csv")
    with pytest.raises(UserError, match=rf"{told}Test\.csv, Train\.csv"):
        datasets.load(str(tmp_path / "tables"))


@pytest.mark.usefixtures("cached")
def test_a_person_may_be_called_as_a_split_is_but_for_capitals(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    (folder / "bob").rename(folder / "Dev")
    assert datasets.load(str(folder)).names == ("Dev", "ann")
    evaluated = datasets.load(pictures(tmp_path / "apart", ("train", "evaluation")))
    assert (evaluated.names, int(evaluated.held_out.sum())) == (("ann", "bob"), 16)


@pytest.mark.usefixtures("cached")
def test_images_for_validation_or_testing_are_not_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "three"
    pictures(folder, ("train", "validation", "test"))
    of_file = {path.read_bytes(): path.parts[-4] for path in folder.rglob("*.png")}

    def used() -> list[set[str]]:
        task = build(config(str(folder)), 0)
        pixels = {
            tuple(np.asarray(Image.open(io.BytesIO(content))).flatten().tolist()): part
            for content, part in of_file.items()
        }
        splits = (torch.cat(list(split)) for split in (task.train, task.val, task.test))
        return [{pixels[tuple(task.x[r].flatten().tolist())] for r in rows} for rows in splits]

    assert used() == [{"train"}, {"validation"}, {"test"}]
    shutil.rmtree(folder / "test" / "bob")
    assert used() == [{"train"}, {"validation"}, {"test"}]
    shutil.rmtree(folder / "validation")  # some of the training images are in its place
    assert used() == [{"train"}, {"train"}, {"test"}]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("parts", [None, ("test",), ("train", "validation", "test")])
def test_own_images_are_normalised_by_those_that_known_clients_train_on(
    tmp_path: Path, parts: tuple[str, ...] | None
) -> None:
    if parts is None:
        x = np.random.default_rng(0).integers(0, 256, (N, 1, 4, 4), dtype=np.uint8)
        np.savez(tmp_path / "mine.npz", x=x, y=np.arange(N) % 2, client=np.arange(N) % 4)
        name = str(tmp_path / "mine.npz")
    else:
        name = pictures(tmp_path / "mine", parts)
    task = build(config(name, novel=1, test=0.3 if parts == ("test",) else None), 0)
    known = task.transform(task.x[torch.cat(list(task.train[:-1]))])
    assert known.mean().item() == pytest.approx(0, abs=1e-3)
    assert known.std(correction=0).item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("splits", [True, False])
def test_a_folder_of_save_to_disk_is_told_apart(tmp_path: Path, splits: bool) -> None:
    import datasets as library

    rows = library.Dataset.from_pandas(table())
    folder = tmp_path / "mine"
    (library.DatasetDict({"train": rows}) if splits else rows).save_to_disk(folder)
    with pytest.raises(UserError, match=r"save_to_disk wrote it; write parquet files in its place"):
        datasets.load(str(folder))


UNCLOSED = pytest.mark.filterwarnings(  # of files that the library reads
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def with_metadata(folder: Path, **clients: list[str]) -> str:
    """Images of a folder each, and a metadata.csv that says whose they are."""
    rng = np.random.default_rng(0)
    for place, ids in clients.items():
        (folder / place).mkdir(parents=True)
        lines = ["file_name,client,label"]
        for number, client in enumerate(ids):
            pixels = rng.integers(0, 256, (4, 4), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / place / f"{number}.png")
            lines.append(f"{number}.png,{client},{number % 2}")
        (folder / place / "metadata.csv").write_text("\n".join(lines))
    return str(folder)


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_ids_of_metadata_that_would_be_one_are_refused(tmp_path: Path) -> None:
    padded = datasets.load(with_metadata(tmp_path / "padded", a=["07", "08", "10"]))
    assert padded.names == ("7", "8", "10")
    together = with_metadata(tmp_path / "together", a=["07", "7", "08"])
    apart = with_metadata(tmp_path / "apart", a=["07", "08"], b=["7", "8"])
    for folder in (together, apart):
        with pytest.raises(UserError, match="one way, got 07 and 7 in column 'client'"):
            datasets.load(folder)
    with pytest.raises(UserError, match="one way, got 07 and 7 in column 'client'"):
        site.read(together)


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_images_that_metadata_do_not_list_are_refused(tmp_path: Path) -> None:
    folder = with_metadata(tmp_path / "all", a=["7", "8", "9"])
    shutil.copy(Path(folder) / "a" / "0.png", Path(folder) / "a" / "9.png")
    with pytest.raises(UserError, match=r"1 of its images would be left out, such as a/9\.png"):
        datasets.load(folder)
    with pytest.raises(UserError, match="of its images would be left out"):
        site.read(folder)


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_images_of_several_metadata_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    places = [*"abcdef"]
    folder = with_metadata(tmp_path / "all", **{place: [place] * 2 for place in places})
    found = datasets.load(folder)
    assert found.client is not None
    assert [found.names[client] for client in found.client] == [p for p in places for _ in "12"]


@pytest.mark.usefixtures("cached")
def test_images_that_tell_of_no_persons_but_are_not_of_classes_alone_are_refused(
    tmp_path: Path,
) -> None:
    folder = Path(pictures(tmp_path / "all"))
    shutil.copytree(folder / "bob", tmp_path / "one" / "bob")
    with pytest.raises(UserError, match=r"of two people or more, got those of bob alone; name"):
        datasets.load(str(tmp_path / "one"))
    for person in ("ann", "bob"):
        shutil.copytree(folder / person, tmp_path / "sessions" / person / "first")
    with pytest.raises(UserError, match=r"person/class/.*, got ann/first/cat/"):
        datasets.load(str(tmp_path / "sessions"))


@pytest.mark.usefixtures("cached")
def test_splits_that_are_called_by_more_than_one_word_are_no_persons(tmp_path: Path) -> None:
    found = datasets.load(pictures(tmp_path / "all", ("train_set", "test_set")))
    assert (found.names, int(found.held_out.sum())) == (("ann", "bob"), 16)
    for split in ("train_set", "test_set"):
        shutil.copytree(tmp_path / "all" / split / "ann", tmp_path / "classes" / split)
    assert datasets.load(str(tmp_path / "classes")).client is None


@pytest.mark.usefixtures("cached")
def test_a_folder_of_classes_is_nobodys(tmp_path: Path) -> None:
    pictures(tmp_path / "all")
    examples = datasets.load(str(tmp_path / "all" / "ann"))
    assert (examples.client, examples.labels) == (None, ("cat", "dog"))
    with pytest.raises(UserError, match="holds images, whose columns are image, label, got others"):
        datasets.load(str(tmp_path / "all"), columns=Columns(target="animal"))


@pytest.mark.usefixtures("cached")
def test_a_folder_of_tables_has_the_splits_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    rows_of = {"train": slice(0, 16), "validation": slice(16, 20), "test": slice(20, N)}
    for split, rows in rows_of.items():
        saved(table()[rows], tmp_path / "mine" / f"{split}.parquet")
    for _ in range(2):  # the second time from the cache
        task = build(config(str(tmp_path / "mine")), 0)
        assert sorted(task.names) == ["c0", "c1", "c2", "c3"]
        assert torch.cat(list(task.val)).sort().values.tolist() == [*range(16, 20)]
        assert torch.cat(list(task.test)).sort().values.tolist() == [*range(20, 24)]
    other = build(config(str(tmp_path / "mine"), target="height", features="age"), 0)
    assert (other.classes, other.x.shape) == (0, (N, 1))


@pytest.mark.usefixtures("cached")
def test_ids_of_csv_files_in_a_folder_are_as_they_are_written(tmp_path: Path) -> None:
    ids, labels = ["01", "1", "NA"] * 8, ["010", "10"] * 12
    for split, rows in {"train": slice(0, 18), "test": slice(18, N)}.items():
        saved(table(client=ids, label=labels)[rows], tmp_path / f"{split}.csv")
    for _ in range(2):  # the second time from the cache
        found = datasets.load(str(tmp_path))
        assert (found.names, found.labels) == (("01", "1", "NA"), ("010", "10"))
        assert found.part is not None
        assert found.part.tolist() == [0] * 18 + [2] * 6
    (tmp_path / "more").mkdir()
    saved(table(client=ids, label=[*"12" * 12]), tmp_path / "more" / "a.csv")
    saved(table(client=ids, label=[*"1x" * 12]), tmp_path / "more" / "b.csv")
    assert datasets.load(str(tmp_path / "more")).labels == ("1", "2", "x")
    saved(table()[["client", "label", "age"]], tmp_path / "more" / "b.csv")
    with pytest.raises(UserError, match=r"b\.csv must have the columns of .*a\.csv"):
        datasets.load(str(tmp_path / "more"))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("ending", ["tsv", "csv.gz", "tsv.xz"])
def test_ids_are_as_they_are_written_whatever_a_csv_file_is_called(
    tmp_path: Path, ending: str
) -> None:
    frame = table(client=["01", "1", "NA"] * 8, label=["010", "10"] * 12)
    apart = "\t" if "tsv" in ending else ","
    frame.to_csv(tmp_path / f"mine.{ending}", index=False, sep=apart)
    found = datasets.load(str(tmp_path))
    assert (found.names, found.labels) == (("01", "1", "NA"), ("010", "10"))
    assert found.x.tolist() == torch.tensor(frame[["age", "height"]].to_numpy()).float().tolist()


@pytest.mark.usefixtures("cached")
def test_ids_of_csv_files_that_a_readme_names_are_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    saved(table(client=["01", "1"] * 12), tmp_path / "data" / "mine.csv")
    named = "configs:\n- config_name: one\n  data_files: data/*.csv\n"
    (tmp_path / "README.md").write_text(f"---\n{named}---\n")
    assert datasets.load(str(tmp_path)).names == ("01", "1")
    (tmp_path / "README.md").write_text(f"---\n{named}  sep: ;\n---\n")
    assert hub.csv_files(tmp_path, str(tmp_path / "scratch")) == {}  # which is read as it says


@pytest.mark.usefixtures("cached")
def test_csv_files_in_archives_are_refused_as_their_ids_would_be_guessed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.writestr("mine.csv", table(client=["01", "1"] * 12).to_csv(index=False))
    with pytest.raises(UserError, match=r"must not be in archives, .* got data\.zip; unpack it"):
        datasets.load(str(tmp_path))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("other", ["b.parquet", "b.jsonl", "b.tsv.gz"])
def test_a_folder_of_tables_of_several_kinds_is_refused(tmp_path: Path, other: str) -> None:
    saved(table(), tmp_path / "a.parquet")
    saved(table(), tmp_path / "c.csv")
    (tmp_path / other).touch()
    with pytest.raises(UserError, match=r"tables must be of one kind, .* would be left out"):
        datasets.load(str(tmp_path))
    (tmp_path / "c.csv").unlink()
    (tmp_path / other).unlink(missing_ok=True)
    saved(table(), tmp_path / "a.parquet")
    assert len(datasets.load(str(tmp_path))) == N


def test_labels_that_clients_code_in_their_own_ways_have_no_names(tmp_path: Path) -> None:
    path = saved(table(label=["a", "b", "c"] * 8), tmp_path / "mine.csv")
    assert build(config(path), 0).labels == ("a", "b", "c")
    assert build(config(path, label_codes=2), 0).labels == ()


def test_a_known_data_sets_natural_clients_stay_20() -> None:
    client, y = torch.arange(60) % 30, torch.arange(60) % 3
    examples = arrays.examples_of("made", torch.zeros(60, 1), y, 3, client)
    assert fitted(TaskConfig(name="femnist", partition="natural"), examples).clients == 20
    assert fitted(TaskConfig(name="femnist"), examples).partition == "class_shares"
    assert fitted(TaskConfig(name="mine.csv"), examples).clients == 30


# A network in a file.


def test_a_network_of_a_file_is_made_from_the_seed_with_the_options_that_are_given(
    sensors: str,
) -> None:
    settings = {"name": sensors, "model": f"{NETS}:SensorNet", **SENSORS}
    first, again, other = (build(TaskConfig(**settings), seed).models["base"] for seed in (0, 0, 1))
    weights = [net.get_parameter("classify.weight") for net in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    wide = build(TaskConfig(**settings, widths=(2, 5)), 0).models
    assert [net.get_parameter("classify.weight").shape[1] for net in wide.values()] == [2, 5]


@pytest.mark.parametrize(
    ("code", "name", "told"),
    [
        ("from torch import nn\nnet = nn.Linear(2, 3)", "net", None),
        ("from torch import nn\ndef net(): return nn.Linear(2, 3)", "net", None),
        ("net = 3", "net", "must name a network, or what makes one, in .*net.py, got 'net'; give"),
        ("", "net", "must name a network, or what makes one"),
        ("def net(): return 3", "net", "must make an nn.Module, but .*net.py:net makes 3; mend it"),
        (
            "def net(a): return a",
            "net",
            "called with nothing, but .* fails .TypeError: .*; mend it",
        ),
        ("import nothing_of_that_name", "net", "must run as Python, but fails .ModuleNotFound"),
        (
            "from torch import nn\nnet = nn.Linear(2, 2)",
            "net",
            "net does not suit .*\n.* 3 outputs",
        ),
        ("from torch import nn\nnet = nn.Linear(5, 3)", "net", "but fails on it .RuntimeError"),
    ],
)
def test_networks_of_files(tmp_path: Path, code: str, name: str, told: str | None) -> None:
    (tmp_path / "net.py").write_text(code)
    settings = config(saved(table(), tmp_path / "mine.csv"), model=f"{tmp_path / 'net.py'}:{name}")
    if told is None:
        assert build(settings, 0).models["base"](torch.ones(1, 2)).shape == (1, 3)
        # Where it stayed, its classes would be sent to another process as what is installed there.
        assert "hyperfed_model_net" not in sys.modules
    else:
        with pytest.raises(UserError, match=told):
            build(settings, 0)


def test_a_file_that_is_not_there_and_a_servers_file_at_a_site_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FILE.py:NAME, but there is no .*none.py"):
        model_files.make(f"{tmp_path / 'none.py'}:net", {})
    frame = Frame(known=2, novel=0, shape=(9, 128), dtype="torch.float32", classes=6)
    with pytest.raises(UserError, match="the name of a target where clients are at sites, got"):
        targets_of(TaskConfig(model=f"{NETS}:SensorNet"), frame, 0)


def test_clients_at_sites_are_called_as_their_sites_call_them() -> None:
    frame = Frame(known=2, novel=0, shape=(9,), dtype="torch.float32", classes=6)
    members = (Member("ward/ann", 3, 1, 1), Member("ward/bob", 4, 1, 1))
    settings = TaskConfig(model="mlp")
    task = remote(settings, Roster(1, frame, members, ""), 0)
    assert task.names == ("ward/ann", "ward/bob")
    assert settings_of(task, 0) is settings

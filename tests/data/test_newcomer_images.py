"""A newcomer's folder of images: read as a person's folder of the task's, or refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperfed.data.newcomer import newcomer, read_like
from hyperfed.data.own import Task
from hyperfed.data.tasks import build
from hyperfed.errors import UserError
from own_data import UNCLOSED, config, pictures, with_metadata

pytestmark = pytest.mark.usefixtures("cached")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return build(config(pictures(tmp_path / "all")), 0)


@pytest.fixture
def ann(tmp_path: Path) -> Path:
    """A folder like that of one of the task's persons."""
    pictures(tmp_path / "new")
    return tmp_path / "new" / "ann"


def decoded(files: list[Path]) -> list[list[int]]:
    return [np.asarray(Image.open(file)).flatten().tolist() for file in files]


def shown(x: torch.Tensor) -> list[list[int]]:
    return [image.flatten().tolist() for image in x]


def test_it_is_what_a_person_of_the_task_had(task: Task, ann: Path) -> None:
    made = newcomer(task, ann)
    assert shown(made.x) == decoded(sorted(ann.rglob("*.png")))
    assert made.y.tolist() == [0] * 4 + [1] * 4
    assert not made.unlabelled


def test_labels_are_numbered_as_the_runs_are(tmp_path: Path, ann: Path) -> None:
    task = build(config(pictures(tmp_path / "all"), labels=("dog", "cat")), 0)
    rows = read_like(task, ann)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [1] * 4 + [0] * 4


@pytest.mark.parametrize(("kept", "number"), [("cat", 0), ("dog", 1)])
def test_it_may_be_of_one_class_alone(task: Task, ann: Path, kept: str, number: int) -> None:
    shutil.rmtree(ann / ("dog" if kept == "cat" else "cat"))
    rows = read_like(task, ann)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [number] * 4
    (ann / kept).rename(ann / "mouse")
    with pytest.raises(UserError, match=r"called as labels of the run are \(cat, dog\).*got mouse"):
        read_like(task, ann)


@pytest.mark.parametrize("kept", [("3", "7"), ("7",)])
def test_labels_without_names_are_the_numbers_that_folders_are_called(
    tmp_path: Path, ann: Path, kept: tuple[str, ...]
) -> None:
    """Not the places of those that the newcomer has in their order."""
    task = build(config("digits", clients=5, novel=1), 0)
    for path in ann.rglob("*.png"):
        Image.open(path).resize((8, 8)).save(path)
    for old, new in zip(("cat", "dog"), kept, strict=False):
        (ann / old).rename(ann / new)
    shutil.rmtree(ann / "dog", ignore_errors=True)
    rows = read_like(task, ann)
    expected = [int(number) for number in kept for _ in range(4)]
    assert newcomer(task, rows.x, rows.y).y.tolist() == expected
    (ann / "7").rename(ann / "07")
    with pytest.raises(UserError, match=r"as labels of the run are \(0, 1, .*, 9\).*got 07"):
        read_like(task, ann)


def test_a_split_may_have_one_class_alone(task: Task, ann: Path) -> None:
    """Of which the library makes no label."""
    (ann / "test").mkdir()
    (ann / "train").mkdir()
    shutil.copytree(ann / "cat", ann / "test" / "cat")
    (ann / "dog").rename(ann / "test" / "dog")
    (ann / "cat").rename(ann / "train" / "cat")
    rows = read_like(task, ann)
    assert (newcomer(task, rows.x, rows.y).y.tolist(), rows.left_out) == ([0] * 4, 8)


@UNCLOSED
def test_classes_may_be_folders_where_the_runs_are_a_column(tmp_path: Path, ann: Path) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["x", "x", "y", "y"] * 2))
    table = folder / "a" / "metadata.csv"
    told = table.read_text().replace(",0\n", ",cat\n").replace(",1\n", ",dog\n")
    table.write_text(told.removesuffix("1").replace("label", "kind") + "dog")
    task = build(config(str(folder), target="kind"), 0)
    rows = read_like(task, ann)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [0] * 4 + [1] * 4


def test_images_of_a_table_have_its_labels(task: Task, ann: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    read = datasets.load_dataset(str(ann), cache_dir=str(tmp_path / "c"), split="train")
    (tmp_path / "table").mkdir()
    read.to_parquet(tmp_path / "table" / "train.parquet")
    rows = read_like(task, tmp_path / "table")
    assert newcomer(task, rows.x, rows.y).y.tolist() == [0] * 4 + [1] * 4


def test_accents_may_be_spelled_otherwise(tmp_path: Path, ann: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    for person in ("ann", "bob"):
        (folder / person / "dog").rename(folder / person / "caf\u00e9")
    task = build(config(str(folder)), 0)
    shutil.rmtree(ann / "cat")
    (ann / "dog").rename(ann / "cafe\u0301")
    rows = read_like(task, ann)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [task.labels.index("caf\u00e9")] * 4


def test_images_in_no_folder_have_no_labels(task: Task, ann: Path) -> None:
    files = sorted((ann / "dog").iterdir())
    rows = read_like(task, ann / "dog")
    assert (rows.y, shown(newcomer(task, rows.x).x)) == (None, decoded(files))
    shutil.copy(files[0], ann / "cat" / "5.png")
    shutil.move(ann / "cat" / "0.png", ann / "0.png")
    shutil.rmtree(ann / "dog")
    with pytest.raises(UserError, match="or in none, got some in none"):
        read_like(task, ann)


@pytest.mark.parametrize("splits", [("train", "test"), ("train", "validation")])
def test_what_is_for_validation_or_testing_is_left_out(
    task: Task, tmp_path: Path, splits: tuple[str, str]
) -> None:
    pictures(tmp_path / "new", splits)
    one = tmp_path / "a"
    for split in splits:
        for label in ("cat", "dog"):
            shutil.copytree(tmp_path / "new" / split / "ann" / label, one / split / label)
    rows = read_like(task, one)
    assert (len(rows.x), rows.left_out) == (8, 8)
    assert shown(rows.x) == decoded(sorted((one / splits[0]).rglob("*.png")))
    assert rows.y.tolist() == ["cat"] * 4 + ["dog"] * 4


@pytest.mark.parametrize("folder", ["new", "new/bob/.."])
def test_the_folders_of_several_are_refused(task: Task, ann: Path, folder: str) -> None:
    with pytest.raises(UserError, match=r"got ann/cat/ in .*; name the folder of one client"):
        read_like(task, ann.parents[1] / folder)
    shutil.rmtree(ann.parent / "bob")  # and of one, whose name might be a label
    with pytest.raises(UserError, match="name the folder of one client"):
        read_like(task, ann.parent)


def test_grey_images_are_in_colour_where_the_runs_are(tmp_path: Path, ann: Path) -> None:
    file = Path(pictures(tmp_path / "all")) / "bob" / "cat" / "0.png"
    Image.open(file).convert("RGB").save(file)
    task = build(config(str(tmp_path / "all")), 0)
    rows = read_like(task, ann)
    assert newcomer(task, rows.x, rows.y).x.shape[1:] == task.x.shape[1:] == (3, 4, 4)
    assert (rows.x == rows.x[:, :1]).all()
    grey = read_like(build(config(pictures(tmp_path / "grey")), 0), tmp_path / "all" / "bob")
    with pytest.raises(UserError, match=r"like the task's, \(1, 4, 4\) uint8, got \(3, 4, 4\)"):
        newcomer(build(config(str(tmp_path / "grey")), 0), grey.x, grey.y)


@UNCLOSED
def test_a_metadata_file_says_what_they_are(tmp_path: Path) -> None:
    task = build(config(with_metadata(tmp_path / "all", a=["x", "x", "y", "y"] * 2)), 0)
    one = Path(with_metadata(tmp_path / "one", b=["z", "z", "z"]))
    rows = read_like(task, one)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [0, 1, 0]
    table = one / "b" / "metadata.csv"
    told = table.read_text()
    table.write_text(told.replace("z,", "w,", 1))
    with pytest.raises(UserError, match=r"rows of one client, .* got those of 2 \(w, z, ...\)"):
        read_like(task, one)
    lines = zip(told.split("\n"), ("split", "test", "train", "val"), strict=True)
    table.write_text("\n".join(",".join(line) for line in lines))
    rows = read_like(task, one)
    assert (newcomer(task, rows.x, rows.y).y.tolist(), rows.left_out) == ([1], 2)
    table.write_text("\n".join(line.rpartition(",")[0] for line in told.split("\n")))
    assert read_like(task, one).y is None
    table.write_text(told.replace("label", "kind"))
    named = build(config(str(tmp_path / "all"), target="label"), 0)
    with pytest.raises(UserError, match=r"must have the column label, as those of the run have"):
        read_like(named, one)


@pytest.mark.parametrize("content", [b"", b"no image"])
def test_what_is_no_image_is_told_by_its_name(task: Task, ann: Path, content: bytes) -> None:
    (ann / "cat" / "0.png").write_bytes(content)
    with pytest.raises(UserError, match=r"cat/0\.png: an image must be a file that Pillow can dec"):
        read_like(task, ann)


def test_an_image_of_another_size_is_told_by_its_name(task: Task, ann: Path) -> None:
    file = ann / "dog" / "2.png"
    Image.open(file).resize((2, 3)).save(file)
    told = r"one size, got \(4, 4\) and \(3, 2\) .*such as .*dog/2\.png, and 0 more sizes"
    with pytest.raises(UserError, match=told):
        read_like(task, ann)


def test_what_is_not_there_is_told(task: Task, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in a file or a folder, but there is no .*nowhere; name"):
        read_like(task, tmp_path / "nowhere")


def test_a_folder_without_images_is_told(task: Task, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty must be readable by .*, and that it holds data"):
        read_like(task, tmp_path / "empty")

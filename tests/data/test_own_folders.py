"""Folders of your own images and tables: whose they are, what for, and read whole or refused."""

import io
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from hyperfed.data import datasets, hub, site
from hyperfed.data.tables import Columns
from hyperfed.data.tasks import build
from hyperfed.errors import UserError
from own_data import UNCLOSED, N, config, pictures, saved, table, with_metadata


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
def test_an_ending_that_the_library_does_not_know_is_told(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    datasets.load(str(folder))
    (folder / "ann" / "cat" / "0.png").rename(folder / "ann" / "cat" / "0.Png")
    told = r"1 of its files would be left out, such as ann/cat/0\.Png, because .* small letters"
    with pytest.raises(UserError, match=told):
        datasets.load(str(folder))


@pytest.mark.usefixtures("cached")
def test_a_folder_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes longer than to decode what is in it."""
    opened = Mock(side_effect=hub._builder_of_all)
    monkeypatch.setattr(hub, "_builder_of_all", opened)
    datasets.load(pictures(tmp_path / "all"))
    assert opened.call_count == 1


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


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_ids_of_metadata_are_as_they_are_written(tmp_path: Path) -> None:
    """As those of a table: pandas makes one number of 07 and 7, and of 1.1 and 1.10."""
    for name, written in {
        "plain": {"a": ["7", "8", "10"]},
        "padded": {"a": ["07", "08", "10"]},
        "together": {"a": ["07", "7", "08"]},
        "apart": {"a": ["07", "08"], "b": ["7", "8"]},
        "split": {"train": ["07", "08"], "test": ["08", "07"]},
        "decimal": {"a": ["1.1", "1.10", "1.2"]},
    }.items():
        examples = datasets.load(folder := with_metadata(tmp_path / name, **written))
        people = [person for place in written.values() for person in place]
        assert examples.client is not None
        assert [examples.names[number] for number in examples.client] == people
        assert examples.labels == ()
        assert {*site.read(Path(folder)).rows} == {*people}


@UNCLOSED
@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("name", ["./a/0.png", "a\\0.png", "b/../a/0.png"])
def test_ids_are_found_however_metadata_name_the_images(tmp_path: Path, name: str) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["07", "08", "10"]))
    said = (folder / "a" / "metadata.csv").read_text()
    (folder / "a" / "metadata.csv").unlink()
    lines = said.replace("0.png", "a/0.png", 1).replace("\n1", "\na/1").replace("\n2", "\na/2")
    (folder / "metadata.csv").write_text(lines.replace("a/0.png", name, 1))
    assert datasets.load(str(folder)).names == ("07", "08", "10")


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_labels_of_metadata_are_as_they_are_written(tmp_path: Path) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["x", "y", "x", "y"]))
    file = folder / "a" / "metadata.csv"
    said = file.read_text() + "\n"
    for none, one, expected in ((" 0", " 1", ()), ("01", "02", ("01", "02"))):
        file.write_text(said.replace(",0\n", f",{none}\n").replace(",1\n", f",{one}\n"))
        assert datasets.load(str(folder)).labels == expected


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_an_image_that_metadata_list_twice_is_refused(tmp_path: Path) -> None:
    """It might be learned from and tested on."""
    folder = Path(with_metadata(tmp_path / "all", a=["x", "y", "x", "y"]))
    with (folder / "a" / "metadata.csv").open("a") as file:
        file.write("\n0.png,z,1\n")
    with pytest.raises(UserError, match=r"each image once, got 1 more often, such as a/0\.png"):
        datasets.load(str(folder))


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_what_is_written_otherwise_than_in_utf_8_is_told(tmp_path: Path) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["x", "y"]))
    (folder / "a" / "metadata.csv").write_bytes(b"file_name,client\n0.png,Zo\xe9\n")  # of Excel
    with pytest.raises(UserError, match=r"text files in UTF-8, but: .* byte 0xe9 .*; convert them"):
        datasets.load(str(folder))


any_names = pytest.mark.skipif(sys.platform != "linux", reason="its disks refuse such names")


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_one_folder_is_no_label(tmp_path: Path) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["x", "y"]))
    told = folder / "a" / "metadata.csv"
    told.write_text("file_name\n0.png\n1.png\n")
    with pytest.raises(UserError, match="no labels, nor is that of a folder alone"):
        datasets.load(str(folder))
    told.unlink()
    with pytest.raises(UserError, match=r"of two classes or more, .*, got those of a alone; move"):
        datasets.load(str(folder))


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("odd", ["ann/extra.png", "ann/cat/deep/extra.png"])
def test_a_picture_at_another_depth_than_the_others_is_named(odd: str, tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    (folder / odd).parent.mkdir(exist_ok=True)
    shutil.copy(next(folder.glob("bob/cat/*.png")), folder / odd)
    with pytest.raises(UserError, match=f"all as deep, got {odd} beside [a-z]+/[a-z]+/[^/]+; move"):
        datasets.load(str(folder))


@any_names
@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("name", [b"\xff.png", b"a\nb.png", b"\xff/0.png"])
def test_a_name_that_is_no_text_is_told(name: bytes, tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    path = Path(os.fsdecode(os.fsencode(folder / "ann" / "cat") + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    shutil.copy(next(folder.glob("bob/cat/*.png")), path)
    with pytest.raises(UserError, match=r"must be text \(UTF-8\) without line breaks, got 'ann"):
        datasets.load(str(folder))


@any_names
@pytest.mark.usefixtures("cached")
def test_what_is_no_picture_counts_for_nothing(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "all"))
    (folder / "ann" / "Icon\r").touch()  # of macOS
    (folder / "ann" / "cat" / "d.png").mkdir()
    assert datasets.load(str(folder)).names == ("ann", "bob")


@UNCLOSED
@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("column", "expected"), [("label", ("cat", "dog")), ("other", None)])
def test_labels_of_metadata_may_be_words_and_clients_are_none(
    tmp_path: Path, column: str, expected: tuple[str, ...] | None
) -> None:
    folder = Path(with_metadata(tmp_path / "all", a=["7", "8", "7", "9"]))
    file = folder / "a" / "metadata.csv"
    said = file.read_text().replace(",0\n", ",cat\n").replace(",1\n", ",dog\n")
    said = said[:-1] + "dog"  # the last, without an end of its line
    file.write_text(said.replace("label", column))
    if expected is None:
        for read in (lambda: datasets.load(str(folder)), lambda: site.read(folder)):
            with pytest.raises(UserError, match=r"got none .*beside a metadata file the names of"):
                read()
        return
    examples = datasets.load(str(folder))
    assert (examples.labels, examples.y.tolist()) == (expected, [0, 1, 0, 1])
    assert examples.names == ("7", "8", "9")
    at_site = site.read(folder, labels=("dog", "cat"))
    assert (at_site.labels, at_site.y.tolist()) == (("dog", "cat"), [1, 0, 1, 0])


@UNCLOSED
@pytest.mark.usefixtures("cached")
def test_labels_of_metadata_that_do_not_begin_at_0_keep_their_names(tmp_path: Path) -> None:
    """As those of a table; a model would have an output for each number below the largest."""
    folder = Path(with_metadata(tmp_path / "all", a=["7", "8", "7", "9"]))
    examples = datasets.load(str(folder))
    assert (examples.labels, examples.classes, examples.y.tolist()) == ((), 2, [0, 1, 0, 1])
    file = folder / "a" / "metadata.csv"
    said = file.read_text().replace(",0\n", ",3\n").replace(",1\n", ",70000\n")
    file.write_text(said[:-1] + "70000")
    examples = datasets.load(str(folder))
    assert (examples.labels, examples.y.tolist()) == (("3", "70000"), [0, 1, 0, 1])
    assert examples.classes == 2


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
        datasets.load(str(tmp_path / "all"), columns=Columns(target=("animal",)))
    with pytest.raises(UserError, match="must have one target, their label, got label, image"):
        datasets.load(str(tmp_path / "all"), columns=Columns(target=("label", "image")))


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
@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_tables_without_a_split_for_validation_have_a_fifth_of_those_for_training(
    tmp_path: Path, ending: str
) -> None:
    for split, rows in {"test": slice(0, 4), "train": slice(4, N)}.items():
        saved(table()[rows], tmp_path / f"{split}.{ending}")
    examples = datasets.load(str(tmp_path))
    tested = {row for row, age in enumerate(examples.x[:, 0].tolist()) if age < 4}
    task = build(config(str(tmp_path)), 0)
    assert {*torch.cat(list(task.test)).tolist()} == tested
    assert [len(own) for own in task.val] == [1] * 4
    for split in ("test", "train"):  # which a column says before the names of files
        saved(table(split=split), tmp_path / f"{split}.{ending}")
    assert not any(map(len, build(config(str(tmp_path)), 0).val))


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


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("place", ["all/train.parquet", "all"])
def test_labels_that_are_numbers_with_names_keep_these(tmp_path: Path, place: str) -> None:
    import datasets as huggingface

    def save(labels: list[int]) -> str:
        rows = huggingface.Dataset.from_pandas(table(label=labels), preserve_index=False)
        named = rows.cast_column("label", huggingface.ClassLabel(names=["owl", "cat", "dog"]))
        (tmp_path / "all").mkdir(exist_ok=True)
        named.to_parquet(tmp_path / "all" / "train.parquet")
        return str(tmp_path / place)

    examples = datasets.load(save([1, 2] * (N // 2)))  # of owls there are none
    assert (examples.classes, examples.labels) == (3, ("owl", "cat", "dog"))
    assert examples.y.tolist() == [1, 2] * (N // 2)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.2, got -1 at .* that have none"):
        datasets.load(save([-1, 2] * (N // 2)))

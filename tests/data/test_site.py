"""A site's data: what is read, what the server learns of it, and what is refused."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from hyperfed.apps import cli
from hyperfed.data import arrays, site, tasks
from hyperfed.data.arrays import PARTS
from hyperfed.data.roster import Frame, Introduction, enrol
from hyperfed.data.tables import Columns
from hyperfed.data.tasks import TaskConfig
from hyperfed.engines.calls import Call, is_labelled
from hyperfed.engines.flower.policy import Policy, RefusedError
from hyperfed.engines.flower.site import Site
from hyperfed.engines.flower.wire import Request
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.training import Steps
from toys import CLASSES, FEATURES, TwoLayers

CLIENT = np.array(["ann"] * 20 + ["bob"] * 10)


def columns(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, FEATURES))
    made = {"x": x, "y": rng.integers(0, CLASSES, 30), "client": CLIENT} | changes
    return {name: value for name, value in made.items() if value is not None}


def archive(folder: Path, **changes: Any) -> Path:
    np.savez(folder / "site.npz", **columns(**changes))
    return folder / "site.npz"


def test_an_archive_is_read_and_divided_within_each_client(tmp_path: Path) -> None:
    data = site.read(archive(tmp_path))
    assert {name: [len(part) for part in rows] for name, rows in data.rows.items()} == {
        "ann": [14, 3, 3],
        "bob": [6, 2, 2],
    }
    assert (data.x.dtype, data.classes) == (torch.float32, CLASSES)
    again = site.read(archive(tmp_path))
    for ours, theirs in zip(data.rows.values(), again.rows.values(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for name, rows in data.rows.items():
        everything = torch.cat(rows).sort().values
        assert everything.tolist() == np.flatnonzero(name == CLIENT).tolist()


def test_what_the_data_say_is_for_testing_is(tmp_path: Path) -> None:
    split = np.array(["train", "test", "val", "train", "train"] * 6)
    data = site.read(archive(tmp_path, split=split, classes=7))
    assert data.classes == 7
    for code, part in enumerate(PARTS):
        rows = torch.cat([rows[code] for rows in data.rows.values()])
        assert set(split[rows]) == {part}


def test_numbers_name_clients_too(tmp_path: Path) -> None:
    assert list(site.read(archive(tmp_path, client=np.repeat([7, 3], 15))).rows) == ["7", "3"]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_columns_x_and_y_of_a_table(tmp_path: Path, kind: str) -> None:
    table = columns(x=columns()["x"].astype("float32"))
    expected = site.read(archive(tmp_path, x=table["x"]))
    rows = datasets.Dataset.from_dict({name: list(value) for name, value in table.items()})
    path = tmp_path / "site.parquet"
    if kind == "folder":
        path = tmp_path / "site"
        path.mkdir()
    rows.to_parquet(path if kind == "parquet" else path / "train-0.parquet")
    data = site.read(path)
    assert torch.equal(data.x, expected.x)
    assert torch.equal(data.y, expected.y)
    assert list(data.rows) == list(expected.rows)


def test_images_with_a_client_column(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 4, 4), dtype=np.uint8)
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "client": datasets.Value("string"),
        }
    )
    for split, rows in (("train", slice(0, 6)), ("test", slice(6, 8))):
        labels = [0, 1] * 4
        table = {
            "image": list(pixels[rows]),
            "label": labels[rows],
            "client": (["ann", "bob"] * 4)[rows],
        }
        made = datasets.Dataset.from_dict(table, features=features)
        made.to_parquet(tmp_path / f"{split}-0.parquet")
    data = site.read(tmp_path)
    assert data.x[:, 0].numpy().tolist() == pixels.tolist()
    assert data.classes == 2
    assert [len(part) for part in data.rows["bob"]] == [3, 0, 1]
    said = data.introduce()
    train = pixels[:6] / 255
    assert said.mean == pytest.approx([train.mean()], abs=1e-4)
    assert said.std == pytest.approx([train.std()], abs=1e-4)


def labelled_images(path: Path, names: list[str], labels: list[int]) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), 4, 4), dtype=np.uint8)
    columns = {"image": list(pixels), "label": labels, "client": [path.stem] * len(labels)}
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=names),
        "client": datasets.Value("string"),
    }
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet(path)
    return path


def test_names_of_image_labels_are_numbered_alike_at_all_sites(tmp_path: Path) -> None:
    ours = labelled_images(tmp_path / "a.parquet", ["cat", "dog"], [0, 1] * 5)
    others = labelled_images(tmp_path / "b.parquet", ["dog", "cat"], [1, 0] * 5)
    alike = labelled_images(tmp_path / "c.parquet", ["cat", "dog"], [1, 0] * 5)
    a, b, c = (site.read(path).introduce() for path in (ours, others, alike))
    enrol([a, c], run=1)
    with pytest.raises(UserError, match="name labels, or order them, in different ways"):
        enrol([a, b], run=1)
    for path in (ours, others):  # images 0, 2, ... are of cats in both
        data = site.read(path, labels=("bird", "cat", "dog"))
        assert (data.y.tolist(), data.classes) == ([1, 2] * 5, 3)
    with pytest.raises(UserError, match="labels that are known, cat, cow, got 'dog'"):
        site.read(others, labels=("cat", "cow"))


@pytest.mark.parametrize("lists", [False, True])
def test_names_of_labels_of_tables_are_numbered_alike_at_all_sites(
    tmp_path: Path, lists: bool
) -> None:
    def saved(name: str, names: list[str], labels: list[int]) -> Path:
        features = {"x": [[0.0, 1.0]] * 10} if lists else {"age": [0.0] * 10}
        columns = features | {"y": labels, "client": [name] * 10}
        rows = datasets.Dataset.from_dict(columns)
        path = tmp_path / f"{name}.parquet"
        rows.cast_column("y", datasets.ClassLabel(names=names)).to_parquet(path)
        return path

    ours, others = saved("a", ["cat", "dog"], [0, 1] * 5), saved("b", ["dog", "cat"], [1, 0] * 5)
    a, b = (site.read(path).introduce() for path in (ours, others))
    assert (a.labels, b.labels, b.classes) == (("cat", "dog"), ("dog", "cat"), 2)
    named = Columns(target=("y",), client="client")
    for path in (ours, others):
        for columns in (None, named):
            data = site.read(path, labels=("bird", "cat", "dog"), columns=columns)
            assert (data.y.tolist(), data.classes) == ([1, 2] * 5, 3)
    with pytest.raises(UserError, match="labels that are known, cat, cow, got 'dog'"):
        site.read(others, labels=("cat", "cow"))
    unlabelled = saved("c", ["cat", "dog"], [0, -1] * 5)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.1, got -1"):
        site.read(unlabelled, labels=("cat", "dog"))


def test_the_server_learns_counts_and_no_example(tmp_path: Path) -> None:
    said = site.read(archive(tmp_path)).at(site="clinic").introduce()
    assert [(m.name, m.examples) for m in said.members] == [("clinic/ann", 14), ("clinic/bob", 6)]
    assert (said.shape, said.dtype, said.classes) == ((FEATURES,), "torch.float32", CLASSES)


def test_of_the_images_of_who_does_not_train_nothing_is_said(tmp_path: Path) -> None:
    """A newcomer's answers may be private, and nobody is normalised by its images."""
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x=images, y=np.arange(20) % 2, client=np.zeros(20, np.int64))
    data = site.read(tmp_path / "own.npz")
    trains, joins = (data.at(site=name, novel=name == "b").introduce() for name in "ab")
    assert trains.pixels == trains.members[0].examples > 0
    assert min(trains.mean) > 0.4
    assert (joins.pixels, joins.mean, joins.std) == (0, (0.0,) * 3, (0.0,) * 3)
    alone, both = (enrol(said, run=1).frame for said in ([trains], [trains, joins]))
    assert (both.mean, both.std) == (alone.mean, alone.std)


def test_a_site_trains_its_own_clients_under_their_numbers(tmp_path: Path) -> None:
    data = site.read(archive(tmp_path))
    other = site.read(archive(tmp_path)).at(site="a")
    roster = enrol([data.at(site="b").introduce(), other.introduce()], run=1)
    assert list(roster.numbers) == ["a/ann", "a/bob", "b/ann", "b/bob"]
    net = TwoLayers()
    here = data.at(site="b", models=lambda frame: {"base": net})
    config = METHODS["fedavg"].Config(local_steps=1, batch_size=4)
    ours = Site(here, tmp_path / "state", METHODS["fedavg"].Client, config, seed=0)
    model = {name: value.detach() for name, value in net.state_dict().items()}
    call = Call(0, 0, 3, "train_model", (model,), Steps(1, 4))
    names = {3: "b/bob"}
    request = Request(1, 1, 1, roster.frame, names, [call], {}, {}, [0])
    (answer,) = ours.answer(request).answers.values()
    assert set(answer) == set(model)
    with pytest.raises(UserError, match="a/ann must be at this site"):
        here.check_client(0, "a/ann")
    wide = Frame(**{**vars(roster.frame), "classes": CLASSES + 1})  # a label that it has not seen
    assert here.task(wide, names).classes == CLASSES + 1
    narrow = Frame(**{**vars(roster.frame), "classes": CLASSES - 1})
    with pytest.raises(UserError, match="start a new run"):
        here.task(narrow, names)


def test_a_site_s_clients_run_the_target_that_it_says(tmp_path: Path) -> None:
    said = site.read(archive(tmp_path)).at(size="L").introduce()
    assert {member.size for member in said.members} == {"L"}
    assert enrol([said], run=1, sizes=("S", "L")).frame.sizes == ("L", "L")


@pytest.mark.parametrize("unlabelled", [False, True])
def test_a_novel_client_of_a_site_has_labels_only_where_the_run_says_so(
    unlabelled: bool, tmp_path: Path
) -> None:
    made = {"novel": True, "unlabelled": unlabelled, "models": lambda frame: {"base": TwoLayers()}}
    data = site.read(archive(tmp_path)).at(**made)
    frame = Frame(known=0, novel=2, shape=(FEATURES,), dtype="torch.float32", classes=CLASSES)
    task = data.task(frame, {0: "ann", 1: "bob"})
    assert task.unlabelled == unlabelled
    assert is_labelled(task, 0) != unlabelled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client": None}, "must hold x and y and client"),
        ({"client": CLIENT[:-1]}, "same number of rows"),
        ({"y": np.full(30, -1)}, "labels must lie in"),
        ({"y": np.arange(30) % 3, "classes": 2}, "labels must lie in 0..1"),
        ({"x": np.full((30, 2), np.nan)}, "x must be finite"),
        ({"split": np.array(["train", "dev"] * 15)}, "split must be one of train, val, test"),
        ({"split": np.array(["train"] * 20 + ["test"] * 10)}, "but bob has none"),
        ({"client": np.array(["a" * 101] * 30)}, "1 to 100 printable letters"),
        ({"client": np.array([""] * 30)}, "1 to 100 printable letters"),
    ],
)
def test_wrong_data_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        site.read(archive(tmp_path, **changes))


WORDS = np.array(["mild", "severe", "none"])
ORDER = ("none", "mild", "severe")


def test_words_are_numbered_by_a_list_that_all_sites_have(tmp_path: Path) -> None:
    told = WORDS[np.arange(30) % 2]  # this site has nobody without
    data = site.read(archive(tmp_path, y=told), labels=ORDER)
    assert data.y.tolist() == [1, 2] * 15
    assert (data.classes, data.introduce().labels) == (3, ORDER)
    integers = site.read(archive(tmp_path, y=np.repeat([5, 3], 15)), labels=("3", "5", "9"))
    assert integers.y.tolist() == [1] * 15 + [0] * 15
    wrong = told.astype(object)
    wrong[[7, 9]] = "sever"
    with pytest.raises(UserError, match=r"none, mild, severe, got 'sever' at index 7 \(2 such\)"):
        site.read(archive(tmp_path, y=wrong.astype(str)), labels=ORDER)
    with pytest.raises(UserError, match=r"none, mild, severe, got 1 at index 0 .30 such.; wr"):
        site.read(archive(tmp_path, y=np.repeat([1, 2], 15)), labels=ORDER)
    with pytest.raises(UserError, match=r"numbered alike at all sites.*--labels.*task.labels"):
        site.read(archive(tmp_path, y=told))
    assert site.read(archive(tmp_path, y=told), check=True).classes == 2
    for wrong, why in ((1, "as many as the labels, 2, got 1"), (0, "one whole number above 0")):
        with pytest.raises(UserError, match=why):
            site.read(archive(tmp_path, y=told, classes=wrong), check=True)
    lacks_one = archive(tmp_path, y=told, classes=3)  # which the run's list has
    assert site.read(lacks_one, check=True).classes == 2
    assert site.read(lacks_one, labels=ORDER).classes == 3
    with pytest.raises(UserError, match="as many as the labels, 3, got 2"):
        site.read(archive(tmp_path, y=told, classes=2), labels=ORDER)
    with pytest.raises(UserError, match="named once each, got 'a' twice"):
        site.read(archive(tmp_path, y=told), labels=("a", "b", "a"))


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("named", [False, True])
def test_the_columns_of_a_table_are_those_of_the_command_line(
    tmp_path: Path, ending: str, named: bool
) -> None:
    frame = pandas.DataFrame(columns()["x"], columns=[f"f{i}" for i in range(FEATURES)])
    frame["person" if named else "client"] = CLIENT
    frame["grade" if named else "label"] = WORDS[np.arange(30) % 3]
    path = tmp_path / f"site.{ending}"
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    asked = site.columns_named("person", "grade", "f2, f0", "") if named else None
    data = site.read(path, columns=asked, labels=ORDER)
    expected = columns()["x"][:, [2, 0] if named else slice(None)]
    np.testing.assert_allclose(data.x.numpy(), expected.astype(np.float32), rtol=1e-6)
    assert data.y.tolist() == [1, 2, 0] * 10
    assert list(data.rows) == ["ann", "bob"]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_named_column_says_what_each_row_is_for(tmp_path: Path, ending: str) -> None:
    part = np.array(["train", "val", "test"] * 10)
    table = {"f0": range(30), "y": np.arange(30) % 3, "client": CLIENT, "part": part}
    path, frame = tmp_path / f"site.{ending}", pandas.DataFrame(table)
    frame.to_csv(path, index=False) if ending == "csv" else frame.to_parquet(path)
    data = site.read(path, columns=site.columns_named("", "", "f0", "part"))
    for name, rows in data.rows.items():
        for purpose, own in zip(("train", "val", "test"), rows, strict=True):
            expected = np.flatnonzero((name == CLIENT) & (part == purpose))
            assert own.tolist() == expected.tolist()


def test_sites_that_number_words_otherwise_are_no_federation(tmp_path: Path) -> None:
    told, introductions = WORDS[np.arange(30) % 2], []
    for name, order in (("a", ORDER), ("b", ORDER[::-1]), ("c", ())):
        y = told if order else np.arange(30) % 3
        data = site.read(archive(tmp_path, y=y), labels=order).at(site=name)
        introductions.append(data.introduce())
    enrol([introductions[0], introductions[2]], run=1)
    with pytest.raises(UserError, match="name labels, or order them, in different ways"):
        enrol(introductions, run=1)


def test_sites_whose_features_are_other_columns_are_no_federation(tmp_path: Path) -> None:
    """Age at one site would be multiplied by what dose has learned at the others."""
    table = {"age": range(50, 80), "dose": np.linspace(0, 1, 30), "y": [0.5] * 30}

    def said(name: str, features: str = "", **more: Any) -> Introduction:
        path = tmp_path / f"{name}.csv"
        pandas.DataFrame(table | more | {"client": name}).to_csv(path, index=False)
        return site.read(path, columns=site.columns_named("", "", features, "")).introduce()

    alike = [said("a"), said("b", "age,dose", ward=1.5)]
    roster = enrol(alike, run=1)
    assert {one.features for one in alike} == {roster.features}
    lists = {"client": ["c"] * 30, "window": [[1.0, 2.0]] * 30, "y": table["y"]}
    pandas.DataFrame(lists).to_parquet(tmp_path / "c.parquet")
    named = site.columns_named("", "", "window", "")
    unnamed = site.read(tmp_path / "c.parquet", columns=named).introduce()
    assert enrol([unnamed, *alike], run=1).features == roster.features
    for other in (said("d", "dose,age"), said("e", "age,ward", ward=1.5)):
        whose = f"at the site of b and at the site of {other.members[0].name}"
        with pytest.raises(UserError, match=rf"same columns in the same order .* {whose}; name"):
            enrol([*alike, unnamed, other], run=1)


def test_an_archive_names_no_features(tmp_path: Path) -> None:
    data = site.read(archive(tmp_path, features=np.array(["a"] * FEATURES)))
    assert data.features == ()


def test_texts_and_tables_of_nobody_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("f0,y\n1.0,0\n")
    with pytest.raises(UserError, match="who holds a row; name it by --client"):
        site.read(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("said,client,y\nyes,ann,0\n")
    with pytest.raises(UserError, match="got texts"):
        site.read(tmp_path / "b.csv")


def test_the_run_says_the_labels_and_a_site_may_not_say_others(tmp_path: Path) -> None:
    app = pytest.importorskip("hyperfed.apps.flower.app")
    path = archive(tmp_path, y=WORDS[np.arange(30) % 2])

    def source(labels: str = "", *keys: str) -> Any:
        node = app.NodeConfig(state="s", data=str(path), labels=labels)
        return app.source_of(node, config.load("fedavg", ["engine=flower", *keys]), Policy())

    with pytest.raises(UserError, match="numbered alike at all sites"):
        source()
    declared = 'task.labels=["none", "mild", "severe"]'
    assert source("", declared).y.tolist() == [1, 2] * 15
    assert source("mild, severe").y.tolist() == [0, 1] * 15
    assert source("none,mild,severe", declared).labels == ORDER
    with pytest.raises(UserError, match="must be named alike by the run, none, mild, severe, and"):
        source("mild,severe", declared)
    roster = enrol([source("", declared).introduce()], run=1)
    settings = config.load("fedavg", ["engine=flower", declared])
    task = tasks.remote(settings.task, roster, 0)
    assert task.labels == ORDER
    assert ": 30 examples at sites of 5 for 3 classes\n" in repr(task)


@pytest.mark.parametrize("y", [WORDS[np.arange(30) % 2], np.arange(30) % 2])
@pytest.mark.parametrize("known", ['["severe"]', '["1"]', '["mild"]'])
def test_a_run_is_not_told_which_label_it_lacks(tmp_path: Path, y: Any, known: str) -> None:
    """Whoever sends settings could ask so for the labels, one by one, and how often each is."""
    app = pytest.importorskip("hyperfed.apps.flower.app")
    node = app.NodeConfig(state="s", data=str(archive(tmp_path, y=y)))
    settings = config.load("fedavg", ["engine=flower", f"task.labels={known}"])
    with pytest.raises(UserError, match=r"no labels but the run's.*node --check --labels") as told:
        app.source_of(node, settings, Policy())
    assert "index" not in str(told.value)
    assert "such" not in str(told.value)


def test_a_run_that_names_its_labels_is_not_blamed_for_what_else_is_wrong(tmp_path: Path) -> None:
    """Data that are away, or spoilt, are what the site's log must say; the server is told less."""
    app = pytest.importorskip("hyperfed.apps.flower.app")
    settings = config.load("fedavg", ["engine=flower", 'task.labels=["mild", "severe"]'])
    spoilt = archive(tmp_path, x=np.full((30, 2), np.nan), y=WORDS[np.arange(30) % 2])
    for path, told in ((tmp_path / "away.npz", "No such file"), (spoilt, "must be finite")):
        with pytest.raises(UserError, match=told) as error:
            app.source_of(app.NodeConfig(state="s", data=str(path)), settings, Policy())
        assert not isinstance(error.value, RefusedError)


def test_what_is_held_out_is_the_site_s_to_say(tmp_path: Path) -> None:
    """Or two evaluations, of fractions that differ by one example, would tell of that one."""
    app = pytest.importorskip("hyperfed.apps.flower.app")
    node = app.NodeConfig(state="s", data=str(archive(tmp_path)))

    def held_out(policy: Policy, *keys: str) -> list[int]:
        settings = config.load("fedavg", ["engine=flower", *keys])
        return [len(part) for part in app.source_of(node, settings, policy).rows["ann"]]

    assert held_out(Policy()) == held_out(Policy(), "task.test=0.15", "task.val=0.15")
    assert held_out(Policy(val=0.25, test=0.5), "task.test=0.5") == [5, 5, 10]
    for key in ("val", "test"):
        with pytest.raises(UserError, match=f"task.{key} must be 0.15 here, came 0.2"):
            held_out(Policy(), f"task.{key}=0.2")


def test_the_command_takes_columns_and_words_and_says_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pandas.DataFrame({"age": np.arange(30.0), "ward": CLIENT})
    frame["grade"] = WORDS[np.arange(30) % 2]
    path = tmp_path / "site.csv"
    frame.to_csv(path, index=False)
    given = ["--client", "ward", "--target", "grade", "--labels", "none,mild,severe"]
    assert run("node", "--data", str(path), "--state", str(tmp_path / "s"), *given) == 0
    said = capsys.readouterr().out
    assert "ann" in said
    assert "\nfeatures: age\n" in said
    assert " ".join(given) in said
    assert "labels='none,mild,severe'" in said.replace('"', "'")
    assert run("node", "--data", str(path), "--check", *given[:4], "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["classes"], told["features"]) == (2, ["age"])  # so far as this site knows


def test_a_task_of_files_numbers_words_in_the_order_that_is_said(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {"a": np.arange(30.0), "client": CLIENT, "y": WORDS[np.arange(30) % 2]}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    task = tasks.build(TaskConfig(name=str(tmp_path / "t.csv"), labels=ORDER), seed=0)
    assert (task.classes, tuple(task.labels)) == (3, ORDER)
    assert task.y.tolist() == [1, 2] * 15
    with pytest.raises(UserError, match="got 'mild' at index 0"):
        tasks.build(TaskConfig(name=str(tmp_path / "t.csv"), labels=("none", "severe")), seed=0)
    with pytest.raises(UserError, match="must be words"):
        tasks.build(TaskConfig(labels=("a",)), seed=0)


def test_a_folder_of_images_that_says_nothing_of_clients_is_refused(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / label / "0.png")
    told = "column client, got image, label; write a metadata.csv with columns file_name and client"
    with pytest.raises(UserError, match=told):
        site.read(tmp_path)
    with pytest.raises(UserError, match=f"a table alone, got the folder {tmp_path}, .*name none$"):
        site.read(tmp_path, columns=site.Columns(client="writer"))


def test_a_table_without_clients_and_no_table_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"x": [[1.0]], "y": [0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="must have a column client, got x, y"):
        site.read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="there is no"):
        site.read(tmp_path / "none.parquet")
    (tmp_path / "b.parquet").write_bytes(b"garbage")
    with pytest.raises(UserError, match="is not"):
        site.read(tmp_path / "b.parquet")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return int(end.value.code or 0)


def test_the_command_checks_and_says_how_to_start(tmp_path: Path, capsys: Any) -> None:
    path = archive(tmp_path)
    assert run("node", "--data", str(path), "--check", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["clients"]["bob"] == {"train": 6, "val": 2, "test": 2}
    assert said["start"] is None
    assert run("node", "--data", str(path), "--state", str(tmp_path / "state")) == 0
    assert f'data="{path}"' in capsys.readouterr().out
    assert (tmp_path / "state").is_dir()
    assert run("node", "--data", str(path)) == 2
    assert "give --state" in capsys.readouterr().err
    assert run("node", "--data", str(archive(tmp_path, client=None)), "--check") == 2
    assert "client" in capsys.readouterr().err


# Files that somebody made to harm.


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def announced(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """An array that says it has a shape, and holds four bytes."""
    file = io.BytesIO()
    said = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, said)
    return file.getvalue() + b"1234"


X, Y = np.zeros((30, FEATURES)), np.arange(30) % 3

HOSTILE: dict[str, dict[str, bytes]] = {
    "a length of 80 GB": {"x": announced((10**10,))},
    "a width of 240 GB": {"x": announced((30, 10**9))},
    "a length below zero": {"x": announced((-1, 5))},
    "less than announced": {"x": announced((30, 5))},
    "objects": {"x": announced((30,), "|O")},
    "a header of code": {"x": b"\x93NUMPY\x01\x00\x46\x00" + b"__import__('os')".ljust(70)},
    "a header of 60 kB of brackets": {"x": b"\x93NUMPY\x01\x00\x60\xea" + b"(" * 60_000},
    "a header of six brackets": {"x": b"\x93NUMPY\x01\x00\x07\x00((((((\n"},
    "no version": {"x": b"\x93NUMPY"},
    "half a version": {"x": b"\x93NUMPY\x01"},
    "a version to come": {"x": b"\x93NUMPY\x09\x00" + b"1234"},
    "no array": {"x": b"garbage"},
    "words": {"x": npy(np.array(["a"] * 30))},
    "times": {"x": npy(np.zeros((30, 5), "M8[s]"))},
    "records": {"x": npy(np.zeros(30, "f8,i4"))},
    "nothing known": {"x": npy(np.zeros((30, 5), "V8"))},
    "no axis": {"x": npy(np.array(3.0))},
    "no row": {"x": npy(np.zeros((0, 5)))},
    "no column": {"x": npy(np.zeros((30, 0)))},
    "beyond a float32": {"x": npy(np.full((30, 5), 1e300))},
    "targets beyond a float32": {"y": npy(np.full(30, -1e300))},
    "infinity": {"x": npy(np.full((30, 5), np.inf))},
    "NaN": {"x": npy(np.full((30, 5), np.nan))},
    "labels without an axis": {"y": npy(np.array(3))},
    "labels of 64 bits without a sign": {"y": npy(np.full(30, 2**64 - 1, np.uint64))},
    "10^16 classes": {"y": npy(np.arange(30) * 10**15)},
    "labels below zero": {"y": npy(Y - 1)},
    "complex labels": {"y": npy(Y * 1j)},
    "one label fewer": {"y": npy(Y[1:])},
    "several numbers of classes": {"classes": npy(np.array([3, 4]))},
    "half a class": {"classes": npy(np.array(3.5))},
    "classes in words": {"classes": npy(np.array("many"))},
    "no number of classes": {"classes": npy(np.array(np.nan))},
    "no class": {"classes": npy(np.array(0))},
    "10^12 classes": {"classes": npy(np.array(10**12))},
    "clients in rows": {"client": npy(np.zeros((30, 1)))},
    "clients of no name": {"client": npy(np.full(30, np.nan))},
    "no client": {"client": npy(np.zeros(0))},
    "one client without rows": {"client": npy(np.array("ann"))},
    "a client in two lines": {"client": npy(np.array(["a\nb"] * 30))},
    "a client of 200 letters": {"client": npy(np.array(["a" * 200] * 30))},
    "parts of other names": {"split": npy(np.array(["learn"] * 30))},
    "one part fewer": {"split": npy(np.array(["train"] * 29))},
    "nobody trains": {"split": npy(np.array(["test"] * 30))},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused(what: str, tmp_path: Path) -> None:
    members = {"x": npy(X), "y": npy(Y), "client": npy(CLIENT)} | HOSTILE[what]
    with zipfile.ZipFile(tmp_path / "site.npz", "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    # Before the memory is asked for, which some machines would give.
    with pytest.raises(UserError, match="announces more" if what.endswith("GB") else "."):
        site.read(tmp_path / "site.npz")


def test_a_pipe_is_no_archive_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.npz"
    os.mkfifo(path)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it would be waited for"))
    with pytest.raises(UserError, match="must be a file, but is a pipe"):
        site.read(path)


def test_an_archive_that_unpacks_to_more_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive(tmp_path)
    monkeypatch.setattr(arrays, "total_memory", lambda: 1000)
    with pytest.raises(UserError, match="larger than this machine's memory"):
        site.read(path)
    monkeypatch.undo()
    assert arrays.total_memory() > 2**20
    site.read(path)


def test_numbers_of_more_than_64_bits_are_rounded(tmp_path: Path) -> None:
    data = site.read(archive(tmp_path, x=np.ones((30, FEATURES), np.longdouble)))
    assert data.x.equal(torch.ones(30, FEATURES))


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_rows_of_nobody_are_refused(missing: Any, tmp_path: Path) -> None:
    names = [missing, *range(29)] if missing is not None else [None, *map(str, range(29))]
    rows = {"x": [[0.0] * 5] * 30, "y": [0] * 30, "client": names}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "site.parquet")
    with pytest.raises(UserError, match="client must name who holds each example"):
        site.read(tmp_path / "site.parquet")

"""How your own data are dealt: by clients, by splits, or as settings say."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hyperfed.data import arrays, datasets
from hyperfed.data.division import fitted
from hyperfed.data.own import from_arrays
from hyperfed.data.roster import Frame, Member, Roster
from hyperfed.data.tasks import TaskConfig, build, remote, settings_of
from hyperfed.errors import UserError
from own_data import N, config, saved, table

# Division.


def test_clients_of_whom_nobody_can_be_tested_are_refused_unless_none_shall_be(
    tmp_path: Path,
) -> None:
    few = table()[:8]  # two of each
    path = saved(few, tmp_path / "few.csv")
    with pytest.raises(UserError, match=r"client or class, 2 at most, a fraction of 0.15 is none"):
        build(config(path), 0)
    path = saved(few.assign(split="train"), tmp_path / "all.csv")
    assert not any(map(len, build(config(path), 0).test))


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


def test_how_many_clients_are_novel_is_known_when_own_data_are_read(tmp_path: Path) -> None:
    """Of the 20 that settings say without data a fiftieth is nobody, of 40 one."""
    images = np.zeros((80, 4, 4), np.uint8)
    np.savez(tmp_path / "mine.npz", x=images, y=np.arange(80) % 2, client=np.arange(80) // 2)
    settings = {"novel": 0.02, "novel_corruption": "contrast", "val": 0.0, "test": 0.5}
    assert build(config(str(tmp_path / "mine.npz"), **settings), 0).novel == 1
    few = {"x": images[:6], "y": np.arange(6) % 2, "client": np.arange(6) // 2}
    np.savez(tmp_path / "few.npz", **few)
    with pytest.raises(UserError, match="do not fit few: novel_corruption needs novel clients"):
        build(config(str(tmp_path / "few.npz"), **settings), 0)


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


def test_clients_at_sites_are_called_as_their_sites_call_them() -> None:
    frame = Frame(known=2, novel=0, shape=(9,), dtype="torch.float32", classes=6)
    members = (Member("ward/ann", 3, 1, 1), Member("ward/bob", 4, 1, 1))
    settings = TaskConfig(model="mlp")
    task = remote(settings, Roster(1, frame, members, ""), 0)
    assert task.names == ("ward/ann", "ward/bob")
    assert settings_of(task, 0) is settings
    assert settings_of(task, 1).source == "python"
    nets = [remote(settings, Roster(1, frame, members, ""), seed).models["base"] for seed in (0, 1)]
    same, other = (next(net.parameters()) for net in nets)
    assert torch.equal(next(task.models["base"].parameters()), same)
    assert not torch.equal(same, other)


def test_validation_and_test_have_the_fractions_that_each_was_given() -> None:
    x, y = torch.zeros(20, 2), torch.arange(20) % 2
    task = from_arrays(x, y, client=[0] * 20, model=nn.Linear(2, 2), val=0.1, test=0.3)
    assert [len(split[0]) for split in (task.train, task.val, task.test)] == [12, 2, 6]

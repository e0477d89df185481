"""Divisions as files: read as written, run as dealt, and every fault of a file told by its row."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hyperfed
from hyperfed.apps.cli import main
from hyperfed.data import partition_files
from hyperfed.data.arrays import examples_of
from hyperfed.data.datasets import load
from hyperfed.data.partitions import Partition
from hyperfed.data.tasks import TaskConfig, build, divide
from hyperfed.errors import UserError
from hyperfed.papers import measured
from hyperfed.runs import config
from hyperfed.runs.run import Run

LABELS = np.array([0, 1, 0, 1, 2, 0, 1, 2])
CLIENT = np.array([1, 0, 1, 1, -1, 0, 0, 0])
SPLIT = np.array([0, 0, 1, 2, 0, 2, 0, -1])


def written(path, **changes):
    """Writes a file of two clients, columns of which may be changed, or left out by None."""
    columns = {"client": CLIENT, "split": SPLIT, "y": LABELS, **changes}
    columns = {name: column for name, column in columns.items() if column is not None}
    if path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return path


def changed(column, row, value):
    copy = column.copy()
    copy[row] = value
    return copy


@pytest.fixture(params=[".npz", ".csv"])
def path(tmp_path, request):
    return tmp_path / f"dealt{request.param}"


def refusal(path, clients=2):
    with pytest.raises(UserError) as caught:
        partition_files.read(path, LABELS, clients)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("labels", [LABELS, None])
@pytest.mark.parametrize("name", ["dealt.npz", "dealt.csv", "DEALT.CSV"])
def test_reads_who_holds_what_and_what_for(tmp_path, name, labels):
    client, split = partition_files.read(written(tmp_path / name, y=labels), LABELS, 2)
    # Rows 4 and 7 are used by nobody: the one has no client, the other no purpose.
    assert client.tolist() == [1, 0, 1, 1, -1, 0, 0, -1]
    assert split.tolist() == [0, 0, 1, 2, -1, 2, 0, -1]


def test_columns_of_a_text_stand_in_any_order_beside_others(tmp_path):
    path = tmp_path / "dealt.csv"
    for encoding in ("utf-8", "utf-8-sig"):  # as Excel
        for names, first in (("note, split ,client", "first,0,0"), ("split,client,note", "0,0,a")):
            second = ",2,0" if first == "first,0,0" else "2,0,"
            path.write_text("\n".join([names, first, second, ""]), encoding=encoding)
            client, split = partition_files.read(path, LABELS[:2], 1)
            assert (client.tolist(), split.tolist()) == ([0, 0], [0, 2])


def test_small_and_unsigned_integers_will_do(tmp_path):
    columns = {"client": np.array([0, 1, 1], np.uint8), "split": np.array([0, 0, 2], np.int8)}
    np.savez(tmp_path / "dealt.npz", **columns)
    client, split = partition_files.read(tmp_path / "dealt.npz", LABELS[:3], 2)
    assert (client.tolist(), split.tolist()) == ([0, 1, 1], [0, 0, 2])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"client": None, "split": None}, "client and split"),
        ({"split": None}, "split"),
        (
            {"client": changed(CLIENT, 3, -2)},
            "client must be 0 or more, .* got -2 in row 3 (1 such",
        ),
        ({"split": changed(SPLIT, [2, 5], 3)}, "split must be .*, got 3 in row 2 (2 such rows"),
        (
            {"client": changed(CLIENT, 1, 3)},
            "without gaps, got 3 for the last but no row of cl.* 2;",
        ),
        ({"split": np.where(CLIENT == 1, 2, SPLIT)}, "row of each client, got none of client 1;"),
        ({"y": changed(LABELS, 6, 2)}, "y must be the label .*, got 2 in row 6 (1 such"),
        ({"client": np.full(8, -1)}, "got 0 where task.clients=2"),
    ],
    ids=["empty", "no split", "negative", "codes", "gap", "idle", "order", "nobody"],
)
def test_what_is_wrong_is_told_by_column_and_row(path, changes, told):
    message = refusal(written(path, **changes))
    for part in told.split(".*"):
        assert part.strip() in message, message


def test_the_task_must_have_as_many_clients_as_the_file(path):
    message = refusal(written(path), clients=3)
    assert "got 2 where task.clients=3; set task.clients=2" in message


def test_all_that_is_wrong_with_an_archive_is_told_together(tmp_path):
    path = written(tmp_path / "dealt.npz", client=CLIENT / 2, split=SPLIT[:-1])
    message = refusal(path)
    assert "client must hold integers, got float64" in message
    assert "split must have one row for each example, shape (8,), got (7,)" in message
    path = written(tmp_path / "dealt.npz", client=CLIENT[:, None], split=SPLIT.astype(str))
    message = refusal(path)
    assert "client must have one row for each example, shape (8,), got (8, 1)" in message
    assert "split must hold integers, got <U" in message


def test_a_text_must_have_a_row_for_each_example(tmp_path):
    columns = {"client": CLIENT[:-1], "split": SPLIT[:-1], "y": None}
    message = refusal(written(tmp_path / "dealt.csv", **columns))
    assert "client must have one row for each example, shape (8,), got (7,)" in message


@pytest.mark.parametrize("cells", ["1", "1,x", "1,0.5", ""])
def test_a_text_must_have_integers(tmp_path, cells):
    path = tmp_path / "dealt.csv"
    path.write_text(f"client,split\n0,0\n{cells}\n1,0\n")
    assert f"but row 1 (the first below the names is row 0) has {cells!r} and no" in refusal(path)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"PK\x03\x04"])
def test_a_file_must_be_there_and_readable(path, content):
    if content is not None:
        path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize(
    "settings",
    [
        {"shares": "official", "novel": 0.5},  # which leaves some examples to nobody
        {"partition": "dirichlet", "alpha": 0.5, "fraction": 0.3},
    ],
)
def test_a_written_division_is_the_same_task(path, settings):
    config = TaskConfig(clients=4, **settings)
    dealt = build(config, seed=3)
    partition_files.write(path, divide(config, load("digits"), 3), dealt.y.numpy())
    novel = settings.get("novel", config.novel)
    again = build(TaskConfig(clients=4, novel=novel, partition="file", partition_file=path), seed=3)
    for ours, theirs in zip(
        (again.train, again.val, again.test), (dealt.train, dealt.val, dealt.test), strict=True
    ):
        assert [rows.tolist() for rows in ours] == [rows.tolist() for rows in theirs]
    assert again.fingerprint == dealt.fingerprint


def test_a_text_has_a_line_for_each_example_also_for_those_that_nobody_holds(tmp_path):
    rows = [(torch.tensor(own),) for own in ([1, 3], [0], [2])]
    partition = Partition(*rows)
    partition_files.write(tmp_path / "dealt.csv", partition, np.array([7, 8, 9, 8, 5]))
    written = (tmp_path / "dealt.csv").read_text()
    assert written == "client,split,y\n0,1,7\n0,0,8\n0,2,9\n0,0,8\n-1,-1,5\n"


@pytest.mark.parametrize("name", ["dealt.npz", "dealt.csv"])
def test_the_division_of_a_regression_is_read_back(tmp_path, name):
    columns = {"x": np.ones((60, 2)), "score": np.linspace(-3, 3, 60), "who": np.arange(60) % 4}
    np.savez(tmp_path / "mine.npz", **columns)
    own = [f"task={tmp_path / 'mine.npz'}", "task.client=who", "task.target=score", "task.novel=0"]
    path = tmp_path / name
    with pytest.raises(SystemExit, match="0"):
        main(["export-partition", "fedavg", *own, "--out", str(path)])
    options = {"name": str(tmp_path / "mine.npz"), "client": "who", "target": "score", "novel": 0}
    read = build(TaskConfig(**options, clients=4, partition="file", partition_file=path), seed=0)
    assert read.fingerprint == build(TaskConfig(**options), seed=0).fingerprint


def test_the_division_of_labels_in_an_order_of_their_own_is_read_back(tmp_path):
    words = np.array(["mild", "none", "severe", "worst"])[np.arange(240) % 4]
    np.savez(tmp_path / "mine.npz", x=np.ones((240, 2)), y=words)
    order, path = ("none", "mild", "severe", "worst"), tmp_path / "dealt.npz"
    own = [f"task={tmp_path / 'mine.npz'}", f"task.labels={','.join(order)}", "task.clients=4"]
    with pytest.raises(SystemExit, match="0"):
        main(["export-partition", "fedavg", *own, "--out", str(path)])
    options = {"name": str(tmp_path / "mine.npz"), "labels": order, "clients": 4}
    read = build(TaskConfig(**options, partition="file", partition_file=path), seed=0)
    assert read.fingerprint == build(TaskConfig(**options), seed=0).fingerprint


def test_a_run_on_the_file_gives_the_same_numbers(tmp_path):
    path = tmp_path / "dealt.npz"
    config = TaskConfig(clients=4, novel=0.25)
    partition_files.write(path, divide(config, load("digits"), 1), load("digits").y.numpy())
    small = {"rounds": 2, "evaluate_every": 1, "cohort": 2, "seed": 1, "method.local_steps": 2}
    task = {"task.clients": 4, "task.novel": 0.25}
    from_file = {"task.partition": "file", "task.partition_file": path}
    dealt, read = (hyperfed.train("fedper", **small, **task, **own) for own in ({}, from_file))
    assert read.summary["data_fingerprint"] == dealt.summary["data_fingerprint"]
    numbers = [[replace(e, seconds=0) for e in run.evaluations] for run in (dealt, read)]
    assert numbers[0] == numbers[1]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder beside one with a file for four clients, ``project``, which is the current one."""
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project / "dealt", other):
        folder.mkdir(parents=True)
    np.savez(project / "dealt" / "a.npz", client=np.arange(1797) % 4, split=np.arange(1797) % 3)
    monkeypatch.chdir(project)
    return other


def begun(out, **keys):
    from_file = {"clients": 4, "novel": 0, "partition": "file", "partition_file": "dealt/a.npz"}
    keys |= {"rounds": 2, "checkpoint_every": 1, "method.local_steps": 1, "task": from_file}
    return Run.start(config.from_keys("fedavg", keys), out)


def trained_to_its_end(run):
    with closing(run):
        for _ in run.train():
            pass
    return run.folder.path


@pytest.mark.parametrize("out", ["runs", "../runs"])
def test_a_run_that_is_done_names_the_file_relative_to_where_it_ended(
    out, elsewhere, tmp_path, monkeypatch
):
    run = begun(Path(out))
    path = trained_to_its_end(run)
    assert 'partition_file = "dealt/a.npz"' in (path / "config.toml").read_text()
    again = config.load(str(path / "config.toml"))
    assert again.task.partition_file == run.config.task.partition_file
    assert measured.flat(again) == measured.flat(run.config)
    hyperfed.open_run(path)  # whose checkpoint is of that file's clients
    path = path.absolute()
    monkeypatch.chdir(elsewhere)
    if out == "runs":  # below the folder where the file is found
        hyperfed.open_run(path)
        (tmp_path / "project").rename(tmp_path / "moved")
        hyperfed.open_run(tmp_path / "moved" / path.relative_to(tmp_path / "project"))
        return
    with pytest.raises(UserError, match=f"task.partition_file must be .*a.npz; .* {elsewhere}"):
        hyperfed.open_run(path)
    (elsewhere / "dealt").mkdir()
    np.savez("dealt/a.npz", client=np.arange(1797) % 4, split=np.arange(1, 1798) % 3)
    with pytest.raises(UserError, match="the checkpoint's data_fingerprint must be this run's"):
        hyperfed.open_run(path)


def test_a_run_is_resumed_from_any_folder_by_the_file_that_it_was_begun_with(
    elsewhere, tmp_path, monkeypatch
):
    run = begun(tmp_path / "runs")
    run.close()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "dealt").mkdir()
    np.savez("dealt/a.npz", client=np.arange(1797) % 4, split=np.arange(1, 1798) % 3)
    resumed = Run.resume(run.folder.path)
    assert resumed.task.fingerprint == run.task.fingerprint
    path = trained_to_its_end(resumed)
    file = tmp_path / "project" / "dealt" / "a.npz"
    assert config.load(str(path / "config.toml")).task.partition_file == file


def test_the_content_of_the_file_is_in_the_fingerprint(tmp_path):
    client, split = np.arange(1797) % 4, np.arange(1797) % 3
    config = TaskConfig(clients=4, partition="file", partition_file=tmp_path / "dealt.npz")
    seen = set()
    for columns in (
        (client, split),
        (changed(client, 9, 2), split),
        (client, changed(split, 9, 1)),
    ):
        np.savez(tmp_path / "dealt.npz", client=columns[0], split=columns[1])
        seen.add(build(config, seed=0).fingerprint)
    assert len(seen) == 3


def test_a_fraction_is_that_of_each_client(tmp_path):
    rng = np.random.default_rng(0)
    client, split = rng.integers(-1, 4, 1797), rng.integers(-1, 3, 1797)
    np.savez(tmp_path / "dealt.npz", client=client, split=split)
    config = TaskConfig(
        clients=4, partition="file", partition_file=tmp_path / "dealt.npz", fraction=0.25
    )
    partition = divide(config, load("digits"), seed=0)
    for purpose, held in enumerate((partition.train, partition.val, partition.test)):
        for number, rows in enumerate(held):
            of = np.flatnonzero((client == number) & (split == purpose))
            assert set(rows.tolist()) < set(of.tolist())
            assert len(rows) == round(len(of) / 4)


def test_labels_that_only_their_client_understands_stay_apart(tmp_path):
    examples = replace(
        examples_of("alphabets", torch.zeros(8, 1), torch.from_numpy(LABELS), 3, None),
        client=torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        shared_labels=False,
    )
    path = tmp_path / "dealt.npz"
    config = TaskConfig(clients=2, novel=0, partition="file", partition_file=path)
    written(path, client=np.array([1, 1, -1, 1, 0, 0, 0, 0]), split=np.zeros(8, int))
    assert [len(rows) for rows in divide(config, examples, 0).train] == [4, 3]
    written(path, client=np.array([1, 1, -1, 1, 0, 0, 1, 0]), split=np.zeros(8, int))
    with pytest.raises(UserError, match=r"several natural clients .* client 1 \(row"):
        divide(config, examples, 0)


def test_a_file_is_named_npz_or_csv(tmp_path):
    partition = divide(TaskConfig(), load("digits"), 0)
    with pytest.raises(UserError, match=r"must end in \.npz or \.csv, came .*dealt\.txt"):
        partition_files.write(tmp_path / "dealt.txt", partition, load("digits").y.numpy())
    assert not list(tmp_path.iterdir())

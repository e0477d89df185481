"""A client that was never seen brings arrays of its own."""

from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torch import nn

from hyperfed.data import tables
from hyperfed.data.newcomer import newcomer, read_like, rows_like
from hyperfed.data.own import Task, from_arrays
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.errors import UserError
from own_data import CLIENT, X, Y, linear


def test_a_newcomer_names_its_labels_or_takes_their_numbers_from_the_task():
    task = from_arrays(X, np.array(["walk", "sit", "run"])[Y], client=CLIENT, model=linear())
    assert newcomer(task, X[:2], ["walk", "walk"]).y.tolist() == [2, 2]
    assert newcomer(task, X[:3], task.y[:3]).y.tolist() == task.y[:3].tolist()
    assert newcomer(task, X[:2], ["run", "sit"]).names == ()
    with pytest.raises(UserError, match=r"run, sit, walk, got 'swim' at index 1 .1 such.; rename"):
        newcomer(task, X[:2], ["walk", "swim"])


def test_a_newcomers_own_numbers_are_not_taken_for_those_of_words():
    task = from_arrays(X, np.array(["walk", "sit", "run"])[Y], client=CLIENT, model=linear())
    with pytest.raises(UserError, match=r"run, sit, walk, got 2 at index 0 .2 such.; write these"):
        newcomer(task, X[:2], [2, 1])
    some = from_arrays(X, np.array(["1", "2", "more"])[Y], client=CLIENT, model=linear())
    assert newcomer(some, X[:2], [2, 1]).y.tolist() == [1, 0]
    digits = from_arrays(X, np.array(["3", "5", "7"])[Y], client=CLIENT, model=linear())
    for told in ([7, 3], np.array([7, 3]), ["7", "3"]):
        assert newcomer(digits, X[:2], told).y.tolist() == [2, 0]
    ones = from_arrays(X, np.array(["1", "2", "3"])[Y], client=CLIENT, model=linear())
    for task in (digits, ones):  # as a tensor, numbers are those of the task
        assert torch.equal(newcomer(task, X, task.y).y, task.y)
    given = from_arrays(X, Y, client=CLIENT, model=linear(), labels=["walk", "sit", "run"])
    assert newcomer(given, X[:2], torch.tensor([2, 1])).y.tolist() == [2, 1]


def test_a_newcomer_brings_its_own_data_to_the_task():
    task = from_arrays(X, Y, client=CLIENT, model=linear(), novel=1)
    alone = newcomer(task, X[:7], Y[:7])
    assert (alone.clients, alone.novel, alone.unlabelled) == (1, 1, False)
    assert alone.train[0].tolist() == list(range(7))
    assert len(alone.val[0]) == len(alone.test[0]) == 0
    assert alone.x.dtype == task.x.dtype
    assert alone.y.tolist() == Y[:7].tolist()
    assert (alone.models, alone.classes, alone.loss) == (task.models, task.classes, task.loss)
    assert newcomer(task, X[:7]).unlabelled


@pytest.mark.parametrize("kind", [str, Path])
def test_a_newcomer_may_be_named_by_the_path_of_its_file(tmp_path, monkeypatch, kind):
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    np.savez(tmp_path / "mine.npz", x=X[:5], y=Y[:5])
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "mine.npz", "~/mine.npz"):
        came, same = newcomer(task, kind(path)), newcomer(task, X[:5], Y[:5])
        assert torch.equal(came.x, same.x)
        assert torch.equal(came.y, same.y)
        assert came.fingerprint == same.fingerprint
    np.savez(tmp_path / "bare.npz", x=X[:5])
    assert newcomer(task, kind(tmp_path / "bare.npz")).unlabelled
    with pytest.raises(UserError, match=r"y must be left out where x is a table or a path, which "):
        newcomer(task, kind("~/mine.npz"), Y[:5])
    with pytest.raises(UserError, match=r"there is no .*/yours.npz; name one that is there"):
        newcomer(task, kind("~/yours.npz"))
    with pytest.raises(UserError, match=r"there is no well, well, .*; name one that is there"):
        newcomer(task, kind("well, " * 2000))
    with pytest.raises(UserError, match=r"must be of images, as the task's examples are not, came"):
        newcomer(task, kind("~"))


def test_of_a_newcomers_file_texts_are_words_though_they_are_digits_and_so_are_labels(tmp_path):
    """What a table has as words a newcomer's may have as numbers, or as truth values."""
    table = tmp_path / "all.csv"
    table.write_text("x,label,client\n" + "gut,x,a\n12,1.0,a\nschlecht,x,b\n7,1.0,b\n" * 4)
    task = build(TaskConfig(name=str(table), model="char_lstm", novel=0), seed=0)
    told = {}
    for text in ("7", "True", "1.5"):
        file = tmp_path / "newcomer.csv"
        file.write_text(f"x,label\n{text},1.0\n{text},1.0\n")
        joined = newcomer(task, file)
        told[text] = [joined.labels[number] for number in joined.y.tolist()]
        assert joined.x.tolist() == tables.tokens([text, text], task.x.shape[1]).tolist()
    assert all(labels == ["1.0", "1.0"] for labels in told.values())
    numbers = tmp_path / "numbers.csv"
    numbers.write_text("x,label,client\n" + "1,3,a\n2,5,a\n3,3,b\n4,5,b\n" * 4)
    task_of_integers = build(TaskConfig(name=str(numbers), model="mlp", novel=0), seed=0)
    file.write_text("x,label\n1, 5\n2,3\n")
    assert newcomer(task_of_integers, file).y.tolist() == [1, 0]


def test_whole_numbers_are_no_labels_of_a_newcomer_to_a_regression():
    y = np.linspace(-3, 3, len(X))
    task = from_arrays(X, y, client=CLIENT, model=linear(1))
    came = newcomer(task, X[:3], [-3, 0, 2])
    assert came.y.tolist() == [-3, 0, 2]
    assert came.y.dtype == task.y.dtype


@pytest.mark.parametrize("names", [["1", "2", "3"], ["run", "sit", "walk"]])
def test_labels_of_a_newcomers_file_that_are_numbers_with_names_come_by_these(tmp_path, names):
    task = from_arrays(X, np.array(names)[Y], client=CLIENT, model=linear())
    kinds = {"x": datasets.List(datasets.Value("float64")), "y": datasets.ClassLabel(names=names)}
    columns = {"x": X[:5].tolist(), "y": [2, 1, 0, 1, 2]}
    path = tmp_path / "came.parquet"
    datasets.Dataset.from_dict(columns, datasets.Features(kinds)).to_parquet(path)
    rows = read_like(task, path)
    assert newcomer(task, rows.x, rows.y).y.tolist() == [2, 1, 0, 1, 2]
    plain = from_arrays(X, Y, client=CLIENT, model=linear())
    assert newcomer(plain, rows.x, read_like(plain, path).y).y.tolist() == [2, 1, 0, 1, 2]
    columns["y"][3] = -1  # as the library writes that there is none
    datasets.Dataset.from_dict(columns, datasets.Features(kinds)).to_parquet(path)
    with pytest.raises(UserError, match=r"does not hold usable labels:\n- labels must lie in 0..2"):
        read_like(task, path)


def test_a_dataset_says_the_names_of_its_labels():
    """Also of one that no row has, and whatever order the names are in."""
    names = ["walk", "run", "sit", "lie"]
    kinds = {
        "a": datasets.Value("float64"),
        "b": datasets.Value("float64"),
        "label": datasets.ClassLabel(names=names),
        "client": datasets.Value("int64"),
    }
    y = np.arange(40) % 3
    columns = {"a": y + 0.5, "b": y - 0.5, "label": y, "client": np.arange(40) // 20}
    rows = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    task = Task.from_frame(rows, model=torch.nn.Linear(2, 4))
    assert (task.labels, task.classes) == (tuple(names), 4)
    assert task.y.tolist() == y.tolist()
    ordered = Task.from_frame(rows, model=torch.nn.Linear(2, 4), labels=sorted(names))
    assert ordered.labels == ("lie", "run", "sit", "walk")
    assert ordered.y.tolist() == [(3, 1, 2)[label] for label in y]
    assert newcomer(ordered, rows.select(range(3))).y.tolist() == [3, 1, 2]
    assert newcomer(task, rows.select(range(3))).y.tolist() == [0, 1, 2]
    columns["label"] = np.where(y == 2, -1, y)  # as the library writes that there is none
    with pytest.raises(UserError, match=r"does not hold usable labels:\n- labels must lie in 0..3"):
        Task.from_frame(datasets.Dataset.from_dict(columns, datasets.Features(kinds)))


def test_nobody_numbers_the_words_of_a_newcomer_where_the_tasks_labels_have_no_names():
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    for words in (["a", "b"], np.array(["a", "b"], dtype=object)):
        with pytest.raises(UserError, match="have no names, got words; number them as they are"):
            newcomer(task, X[:2], words)


@pytest.mark.parametrize("short", ["y", "client"])
def test_columns_of_a_newcomer_have_one_length(short):
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    arrays = {"x": X[:9], "y": Y[:9], "client": ["eve"] * 9, "split": ["train"] * 8 + ["test"]}
    assert rows_like(task, arrays, "mine").left_out == 1
    arrays[short] = arrays[short][:8]
    with pytest.raises(UserError, match="must have a value for each row, but one is shorter"):
        rows_like(task, arrays, "mine")


@pytest.mark.parametrize("labels", [(), ("run", "sit", "walk")])
def test_labels_of_several_lengths_are_told_of(labels):
    y = np.array(labels)[Y] if labels else Y
    task = from_arrays(X, y, client=CLIENT, model=linear())
    with pytest.raises(UserError, match="y must be one array, with rows of one shape"):
        newcomer(task, X[:2], [[1], [1, 2]])
    with pytest.raises(UserError, match="y must be one array"):
        newcomer(task, X[:2], [np.zeros((2, 2)), np.zeros((2, 3))])


def test_a_newcomers_labels_have_the_shape_of_the_tasks():
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    with pytest.raises(UserError, match=r"y must have shape \(N,\), got \(7, 3\) .*y\.argmax"):
        newcomer(task, X[:7], np.eye(3, dtype=int)[Y[:7]])
    words = np.tile(Y[:, None], (1, 4))
    tokens = from_arrays(
        np.ones((100, 4), int), words, client=CLIENT, model=nn.Embedding(2, 3), novel=1
    )
    assert newcomer(tokens, np.ones((7, 4), int), words[:7]).y.shape == (7, 4)
    for y in (words[:7, :3], Y[:7]):
        with pytest.raises(UserError, match=r"targets like the task's, \(4,\) for each example"):
            newcomer(tokens, np.ones((7, 4), int), y)


@pytest.mark.parametrize("kind", [np.asarray, np.ndarray.tolist, lambda y: y.astype(object)])
def test_words_label_tokens_as_they_label_examples(kind):
    words = np.array(["where", "who", "none"])[np.stack([Y, 2 - Y], axis=1)]
    tokens, client = np.ones((100, 2), int), np.arange(100) % 4
    for given in ((), ("none", "who", "where")):
        task = from_arrays(
            tokens, kind(words), client=client, model=nn.Embedding(2, 3), labels=given
        )
        names = np.array(given or ("none", "where", "who"))
        assert (names[task.y.numpy()] == words).all()
        for y in (kind(words[:7]), task.y[:7].numpy()):
            assert torch.equal(newcomer(task, tokens[:7], y).y, task.y[:7])
    strange = words[:7].copy()
    strange[4, 1] = "when"
    with pytest.raises(UserError, match=r"labels that are known, .* got 'when' at index 4, 1 \(1 "):
        newcomer(task, tokens[:7], kind(strange))
    missing = words.astype(object)
    missing[2:4, 1] = missing[2, 0] = None
    mixed = words.astype(object)
    mixed[3, 1] = 7
    for y, message in (
        (missing, "got none in 2 rows, the first at index 2; fill or drop"),
        (mixed, "must hold words alone where it holds some, got 'none' and 7"),
    ):
        with pytest.raises(UserError, match=message) as told:
            from_arrays(tokens, y, client=client, model=nn.Embedding(2, 3))
        assert str(told.value).count("\n- ") == 1
    with pytest.raises(UserError, match=r"y must have shape \(N,\), or .* got \(100, 1\)"):
        from_arrays(tokens, kind(words[:, :1]), client=client, model=nn.Embedding(2, 3))


def test_a_newcomer_chooses_among_several_sizes():
    task = from_arrays(X, Y, client=CLIENT, model={"small": linear, "large": linear})
    assert newcomer(task, X[:7], size="small").size_of(0) == "small"
    with pytest.raises(UserError, match="size must be one of small, large, got None"):
        newcomer(task, X[:7])


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:7, :2], Y[:7], r"like the task's, \(4,\) float32, got \(2,\) float32"),
        (np.ones((7, 4), int), Y[:7], r"got \(4,\) int64"),
        (X[:7], Y[:7] + 2, r"0..2, got 3 at index 1 .4 such.; number them from 0$"),
        (X[:7], Y[:6], "got x 7, y 6"),
        (X[:7], Y[:7, None], r"y must have shape \(N,\), got \(7, 1\)"),
        ({"x": X[:7]}, Y[:7], "x must be one array .*, got dict"),
        (X[:0], None, "at least one example, got none"),
        (X[:7] * np.nan, Y[:7], "x must be finite"),
        (X[:7], Y[:7] + 0.5, "integer labels, got torch.float64; convert y to integers$"),
    ],
)
def test_a_newcomers_data_must_fit(x, y, message):
    task = from_arrays(X, Y, client=CLIENT, model=linear())
    with pytest.raises(UserError, match=message):
        newcomer(task, x, y)


def test_who_has_other_labels_is_another_newcomer():
    """Whose draws, and kept answers, are by this fingerprint."""
    task = from_arrays(X, Y, client=CLIENT, model=linear)
    labels = (None, Y[:4], np.roll(Y[:4], 1))
    assert len({newcomer(task, X[:4], y).fingerprint for y in labels}) == 3

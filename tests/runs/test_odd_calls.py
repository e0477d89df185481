"""Python's interface, called from elsewhere or with what it does not take."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch import nn

import hyperfed
from hyperfed.errors import UserError
from hyperfed.runs.run import Run

QUICK: dict[str, Any] = {
    "rounds": 2,
    "evaluate_every": 1,
    "checkpoint_every": 1,
    "cohort": 2,
    "progress": False,
    "method": {"local_steps": 1},
}
CLIENTS: dict[str, Any] = {"clients": 5, "model": "mlp", "hidden": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run without novel clients; not to be changed."""
    return hyperfed.train("fedavg", out=tmp_path_factory.mktemp("runs"), task=CLIENTS, **QUICK)


def test_a_run_is_where_it_was_begun_wherever_its_process_moves_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    begun = hyperfed.train("fedper", out="runs", task=CLIENTS | {"novel": 1}, **QUICK)
    assert begun.folder is not None
    place = begun.folder.path
    opened = hyperfed.open_run(place.relative_to(tmp_path))
    monkeypatch.chdir(tmp_path / "below")
    for each in (begun, opened):
        assert each.folder is not None
        assert each.folder.path == place == tmp_path / "runs" / "fedper" / place.name
        each.personalize(each.task.x[:5].numpy(), each.task.y[:5].numpy())
        each.evaluate_novel()
    assert hyperfed.resume(Path("..") / place.relative_to(tmp_path), rounds=3).round == 3
    assert not list((tmp_path / "below").iterdir())


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = hyperfed.train("fedavg", out="~/runs", task=CLIENTS, **QUICK | {"rounds": 1})
    assert begun.folder is not None
    assert begun.folder.path.is_relative_to(tmp_path / "runs")
    assert hyperfed.open_run(f"~/{begun.folder.path.relative_to(tmp_path)}").round == 1
    assert len(hyperfed.compare("~/runs")) == 1
    hyperfed.export_model(begun.model(0), begun.task, "~/0.safetensors")
    assert (tmp_path / "0.safetensors").is_file()
    nothing: Any = None
    with pytest.raises(TypeError, match="NoneType"):  # and no file is called None
        hyperfed.export_model(begun.model(0), begun.task, nothing, "safetensors")


def test_paths_of_a_task_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "mine.npz", x=np.eye(4).repeat(5, axis=0), y=np.arange(20) % 2)
    rows = [f"{row // 5},{row % 3}" for row in range(20)]
    (tmp_path / "dealt.csv").write_text("\n".join(["client,split", *rows]))
    (tmp_path / "nets.py").write_text("from torch import nn\nNet = lambda: nn.Linear(4, 2)\n")
    task = {"name": "~/mine.npz", "data_dir": "~/data", "clients": 4, "novel": 0}
    dealt = {"partition": "file", "partition_file": "~/dealt.csv", "model": "~/nets.py:Net"}
    run = hyperfed.train("fedavg", task=task | dealt, **QUICK)
    assert run.config.task.data_dir == f"{tmp_path}/data"


def test_a_name_may_begin_as_somebodys_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("~root", "~nobodyhere"):
        begun = hyperfed.train("fedavg", out=name, task=CLIENTS, **QUICK | {"rounds": 1})
        assert begun.folder is not None
        assert begun.folder.path.is_relative_to(tmp_path / name)


@pytest.mark.parametrize("odd", [3, True, b"runs", "", "a\0b"])
def test_what_is_no_path_is_told(odd: Any) -> None:
    calls = (lambda: hyperfed.train("fedavg", out=odd), lambda: hyperfed.open_run(odd))
    for call in (*calls, lambda: hyperfed.resume(odd)):
        with pytest.raises(UserError, match="must be the path of a folder, got"):
            call()


def test_a_run_that_is_done_does_not_hide_a_slip(run: Run) -> None:
    assert run.folder is not None
    with pytest.raises(UserError, match=r"round: must begin with device or .* or rounds to change"):
        hyperfed.resume(run.folder.path, round=4)
    with pytest.raises(UserError, match=r"must not be done, but .* give it more rounds"):
        hyperfed.resume(run.folder.path)


@pytest.mark.parametrize("odd", [0, -1, 1.5, "2", True])
def test_newcomers_are_served_a_number_of_times(odd: Any, run: Run) -> None:
    for call in (run.evaluate_best, run.evaluate_novel):
        with pytest.raises(UserError, match=r"a whole number, at least 1, got .*; leave it out"):
            call(odd)


def test_what_is_of_newcomers_needs_some(run: Run) -> None:
    with pytest.raises(UserError, match="there must be novel clients to serve 2 times"):
        run.evaluate_best(2)
    with pytest.raises(UserError, match="there must be novel clients to have 3 samples"):
        run.served_otherwise(samples=3)
    draws: Any = np.int64(1)
    assert run.evaluate_best(draws).keys() == {"val", "test"}


def test_one_setting_may_be_a_word(run: Run) -> None:
    served = run.served_otherwise("serve.finetune_steps=3")
    assert served.config.serve.finetune_steps == 3


def test_a_model_and_its_task_are_not_taken_for_each_other(run: Run, tmp_path: Path) -> None:
    swapped: Any = (run.task, run.model(0))
    with pytest.raises(UserError, match=r"got Task and .*; call export_model.run.model.client"):
        hyperfed.export_model(*swapped, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"unlabelled": "no"}, "unlabelled must be True or False, got 'no'"),
        ({"novel": True}, "novel must be a whole number of clients, or a fraction below 1"),
        ({"seed": "a"}, "seed must be a whole number, 0 or more, got 'a'"),
        ({"seed": 1.5}, "seed must be a whole number, 0 or more, got 1.5"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"seed": True}, "seed must be a whole number, 0 or more, got True"),
        ({"labels": {"a", "b"}}, "labels must be a sequence of names"),
        ({"labels": {"a": 0, "b": 1}}, "labels must be a sequence of names"),
        ({"client": dict.fromkeys(range(24), "ann")}, "one hashable id per example"),
        ({"client": set(range(24))}, "one hashable id per example"),
        ({"y": np.array([None, *"ab" * 11, "a"], object)}, "a label in every row, got none in 1 "),
        (
            {"y": pyarrow.array([None, *"ab" * 11, "a"])},
            "must have a label in every row, got none in 1 rows, the first at index 0",
        ),
        ({"y": ["a", True] * 12}, "must hold words alone .* got 'a' and True; write all as words"),
        ({"y": np.array(["1", 1] * 12, object)}, "must hold words alone .* got '1' and 1; write"),
    ],
)
def test_arguments_of_a_task_that_say_nothing_are_told(odd: dict[str, Any], told: str) -> None:
    usual = {"client": np.arange(24) % 3, "y": np.arange(24) % 2, "model": lambda: nn.Linear(2, 2)}
    with pytest.raises(UserError, match=told) as caught:
        hyperfed.Task.from_arrays(torch.ones(24, 2), **usual | odd)
    assert str(caught.value).count("\n- ") == 1 + ("client" in odd)  # then there are no rows


def test_keys_of_a_dict_are_in_an_order() -> None:
    names: Any = {"no": 0, "yes": 1}.keys()
    whose: Any = {f"client {row}": row for row in range(2)}.keys()
    task = hyperfed.Task.from_arrays(
        torch.ones(2, 2), [0, 1], client=whose, labels=names, split=["train"] * 2, model=flat
    )
    assert (task.labels, task.names) == (("no", "yes"), ("client 0", "client 1"))


def flat() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.mark.parametrize("values", [[0, 1, 1], [False, True, True]])
def test_objects_that_are_numbers_are_these(values: list[Any]) -> None:
    y = np.array(values * 8, object)
    task = hyperfed.Task.from_arrays(
        np.ones((24, 2)).astype(object),
        y,
        client=np.arange(24) % 2,
        model=lambda: nn.Linear(2, 2),
        seed=np.int64(1),
        unlabelled=np.bool_(False),
    )
    assert task.y.tolist() == [0, 1, 1] * 8
    assert (task.x.dtype, task.labels) == (
        torch.float32,
        ("False", "True") * isinstance(y[0], bool),
    )


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("cohort", "all", "cohort: must be a number of clients, or a fraction .*1.0 is all; came "),
        ("cohort", True, "cohort: must be a number of clients, or a fraction .*; came true"),
        ("device", torch.device("cpu"), r"must be a valid string; came device\(type='cpu'\)"),
        ("metrics", {"f1"}, r"must be a valid tuple; came \{'f1'\}"),
        ("task", {"name": ""}, "a data set must have a name, got none; choose one of digits"),
        ("task", {"client": "foo"}, "are for your own data, got client='foo'; leave them out"),
        ("task", {"model": "nope.py"}, "must be one of .*, or FILE.py:NAME, what makes one in a"),
    ],
)
def test_settings_that_cannot_be_are_told_as_they_came(key: str, value: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        hyperfed.train("fedavg", **QUICK | {key: value})

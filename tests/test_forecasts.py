"""Targets of several numbers, such as a forecast: from a file or arrays to a newcomer's model."""

import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn

import hyperfed
from hyperfed.data import site
from hyperfed.data.newcomer import newcomer, read_like
from hyperfed.data.own_files import names_of_target
from hyperfed.data.roster import Frame, RemoteTask, enrol
from hyperfed.data.tables import Columns
from hyperfed.data.tasks import TaskConfig, targets_of
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from toys import short

CLIENTS, EACH, HOURS = 6, 30, 4
RNG = np.random.default_rng(0)
CLIENT = np.repeat(np.arange(CLIENTS), EACH)
X = RNG.normal(size=(len(CLIENT), 3))
Y = X @ RNG.normal(size=(3, HOURS)) + RNG.normal(size=(CLIENTS, HOURS))[CLIENT]
KEYS: dict[str, Any] = {"rounds": 2, "evaluate_every": 1, "cohort": 1.0, "progress": False}


def net(outputs: int = HOURS) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, outputs)).double()


def make_task(model: Any = net, y: Any = Y, **options: Any) -> hyperfed.Task:
    return hyperfed.Task.from_arrays(X, y, client=CLIENT, model=model, **{"novel": 1} | options)


def test_the_errors_are_those_of_all_numbers_of_all_examples() -> None:
    """R2 is that of scikit-learn in which each number has a mean and counts by its variance."""
    run = hyperfed.train("local", make_task(y=Y + 5 * np.arange(HOURS)), **KEYS)
    task = run.task
    held = [(client, task.test[client]) for client in task.known]
    with torch.no_grad():
        said = torch.cat([run.model(client)(task.x[rows]) for client, rows in held])
    y = torch.cat([task.y[rows] for _, rows in held])
    mse = float((said - y).square().mean())
    assert run.summary["test_mse"] == pytest.approx(mse, rel=1e-12)
    assert run.summary["test_rmse"] == pytest.approx(mse**0.5, rel=1e-12)
    r2 = r2_score(y, said, multioutput="variance_weighted")
    assert run.summary["test_r2"] == pytest.approx(r2, rel=1e-9)
    assert r2 != pytest.approx(r2_score(y.flatten(), said.flatten()), rel=0.1)
    assert f"for {HOURS} numbers" in repr(task)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_that_takes_a_number_takes_several(method: str) -> None:
    """The others say of one, too, that they need classes."""
    keys = KEYS | {"method": short(method)}
    try:
        run = hyperfed.train(method, make_task(), **keys)
    except UserError as error:
        refused = str(error)
        with pytest.raises(UserError, match=f"must have classes.*{re.escape(refused[-40:])}"):
            hyperfed.train(method, make_task(lambda: net(1), Y[:, 0]), **keys)
    else:
        assert run.summary["test_mse"] < float(np.square(Y).mean()) * 2


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_files_hold_them_and_a_newcomer_brings_as_many(kind: str, tmp_path: Path) -> None:
    path, late = tmp_path / f"load.{kind}", tmp_path / f"late.{kind}"
    if kind == "npz":
        np.savez(path, x=X, y=Y, client=CLIENT)
        np.savez(late, x=X[:9], y=Y[:9])
    else:
        table = pandas.DataFrame({"x": [*X], "y": [*Y], "client": CLIENT})
        table.to_parquet(path)
        table[:9].to_parquet(late)
    keys = {"task": {"name": str(path), "model": "mlp", "hidden": 4, "novel": 1}}
    run = hyperfed.train("pefll", method=short("pefll"), **KEYS | keys)
    for y in (read_like(run.task, late).y, np.zeros((9, HOURS)), np.ones((9, HOURS), int)):
        model = run.personalize(X[:9].astype(np.float32), y)
        assert model(torch.zeros(2, 3)).shape == (2, HOURS)
    like = r"targets like the task's, \(4,\) for each example"
    for y, told in ((Y[:9, :3], like), (Y[:9, 0], like), (Y[:9, :, None], r"shape \(N,\), got")):
        with pytest.raises(UserError, match=told):
            run.personalize(X[:9].astype(np.float32), y)
    assert newcomer(run.task, X[:9].astype(np.float32)).target_size == HOURS


NAMED = ["south", "north"]


def farms() -> pandas.DataFrame:
    """Two columns that are learned together, one of whole numbers."""
    numbers = {"north": np.arange(len(Y)) % 7, "south": Y[:, 1]}
    return pandas.DataFrame({f"x{i}": X[:, i] for i in range(3)} | {"farm": CLIENT} | numbers)


def written(frame: pandas.DataFrame, path: Path) -> Path:
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_several_columns_are_one_target_in_the_order_in_which_they_are_named(
    ending: str, tmp_path: Path
) -> None:
    path, late = (tmp_path / f"{name}.{ending}" for name in ("farms", "late"))
    named = {"name": str(written(farms(), path)), "client": "farm", "target": ",".join(NAMED)}
    keys = {"task": named | {"model": "mlp", "hidden": 4, "novel": 1}}
    run = hyperfed.train("local", out=tmp_path / "runs", **KEYS | keys)
    task = run.task
    assert (task.target_size, task.classes, tuple(task.x.shape[1:])) == (2, 0, (3,))
    np.testing.assert_allclose(task.y, farms()[NAMED], rtol=1e-6)
    again = hyperfed.open_run(run.folder.path).task
    assert (again.fingerprint, again.columns) == (task.fingerprint, task.columns)

    later = farms()[:9]
    rows = read_like(task, written(later, late))
    np.testing.assert_allclose(rows.y, later[NAMED])
    assert run.personalize(rows.x, rows.y)(torch.zeros(2, 3)).shape == (2, 2)
    assert read_like(task, written(later.drop(columns=NAMED), late)).y is None
    with pytest.raises(UserError, match="target must be one of them, got 'north'"):
        read_like(task, written(later.drop(columns="north"), late))


def test_columns_of_a_frame_are_a_target_of_numbers_alone() -> None:
    frame = farms().assign(word="a", window=[*X])
    options = {"client": "farm", "features": ["x0", "x1", "x2"], "model": nn.Linear(3, 2)}
    task = hyperfed.Task.from_frame(frame, target=NAMED, **options)
    np.testing.assert_allclose(task.y, frame[NAMED], rtol=1e-6)
    assert hyperfed.train("local", task, **KEYS).personalize(farms()[:9])(task.x[:2]).shape == (
        2,
        2,
    )
    for target, told in (
        (["south", "word"], r"column of numbers, got 'word' with shape \(180,\) object"),
        (["window", "south"], r"column of numbers, got 'window' with shape \(180, 3\)"),
        (["south", "south"], "got 'south' for several"),
        (["south", "x0"], "neither target nor split, got 'x0'"),
        (["south", "east"], "target must be one of them, got 'east'"),
    ):
        with pytest.raises(UserError, match=told):
            hyperfed.Task.from_frame(frame, target=target, **options)
    twice = pandas.concat([frame, frame["north"]], axis=1)
    with pytest.raises(UserError, match="a name of its own, got 2 called 'north'"):
        hyperfed.Task.from_frame(twice, target=NAMED, **options)
    kinds = {"north": datasets.ClassLabel(names=["a", "b"]), "south": datasets.Value("float32")}
    assert names_of_target(kinds, Columns(target=("north", "south"))) == ()
    assert names_of_target(kinds, Columns(target=("north",))) == ("a", "b")
    frame.loc[3, "north"] = np.nan
    with pytest.raises(UserError, match="'north' must be finite, got NaN or infinity in 1 rows"):
        hyperfed.Task.from_frame(frame, target=NAMED, **options)


@pytest.mark.parametrize("outputs", [1, HOURS - 1, HOURS + 1])
def test_a_network_gives_as_many_as_a_target_has(outputs: int) -> None:
    with pytest.raises(UserError, match="must give 4 outputs per example"):
        make_task(nn.Linear(3, outputs))
    with pytest.raises(UserError, match="must give 1 outputs per example"):
        make_task(nn.Linear(3, outputs + 1), Y[:, 0])


def test_zeros_and_ones_are_labels_until_it_is_known_that_they_are_none() -> None:
    with pytest.raises(UserError, match="of which several may hold are integers, with a loss of"):
        make_task(y=(Y > 0).astype(float))
    with pytest.raises(UserError, match=r"y must have shape \(N,\), .*\(180, 2, 2\)"):
        make_task(y=Y.reshape(-1, 2, 2))
    assert make_task(y=np.zeros_like(Y)).target_size == HOURS  # the sun has not risen


def site_of(folder: Path, name: str, y: Any) -> site.SiteData:
    np.savez(folder / f"{name}.npz", x=X, y=y, client=CLIENT.astype(str))
    return site.read(folder / f"{name}.npz").at(site=name)


def test_sites_say_how_many_a_target_has_and_must_agree(tmp_path: Path) -> None:
    several, one = site_of(tmp_path, "several", Y), site_of(tmp_path, "one", Y[:, 0])
    said = [data.introduce() for data in (several, one)]
    assert [each.target_size for each in said] == [HOURS, 1]
    with pytest.raises(UserError, match="must have as many numbers, got 1 at the site of one/0, 4"):
        enrol(said, run=1)
    roster = enrol(said[:1], run=1)
    models = targets_of(TaskConfig(model="mlp", hidden=4), roster.frame, seed=0)
    task = RemoteTask.of(roster, models, "load")
    assert (task.target_size, task.outline().target_size) == (HOURS, HOURS)
    assert models["base"](torch.zeros(2, 3)).shape == (2, HOURS)
    names = {0: "several/0"}
    assert several.at(models=lambda frame: models).task(roster.frame, names).target_size == HOURS
    narrow = Frame(**vars(roster.frame) | {"target_size": 1})
    with pytest.raises(UserError, match=r"0 classes and 1 numbers to learn, got .* 4; start a new"):
        several.at(models=lambda frame: models).task(narrow, names)

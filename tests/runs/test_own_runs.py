"""Runs on data of one's own: what their records say, and clients by their names."""

import dataclasses
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import hyperfed
from hyperfed.apps.cli import main
from hyperfed.data.examples import Normalize
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.errors import UserError
from hyperfed.methods import METHODS, fedavg
from hyperfed.runs import config
from hyperfed.runs.folder import read_run
from hyperfed.runs.private import cohort_of
from hyperfed.runs.run import Run
from hyperfed.trees.checkpoints import load_latest, save_latest
from sensors import ACTIVITIES, NETS, PEOPLE, SensorNet, windows

SHORT: dict[str, Any] = {"rounds": 1, "cohort": 2, "evaluate_every": 1}
QUICK: dict[str, Any] = SHORT | {"method": {"local_steps": 1}}
NAMES = ("zoe", "ann", "bob")
WORDS = np.array(["sit", "walk"])


def make_task(**options: Any) -> hyperfed.Task:
    """Three people; the last is novel."""
    x = np.random.default_rng(0).normal(size=(60, 4))
    usual = {"client": [NAMES[row % 3] for row in range(60)], "novel": 1, "name": "steps"}
    usual |= {"model": lambda: nn.Linear(4, 2)}
    return hyperfed.Task.from_arrays(x, WORDS[np.arange(60) // 3 % 2], **usual | options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on a task from Python; not to be changed."""
    return hyperfed.train("fedavg", make_task(), out=tmp_path_factory.mktemp("runs"), **QUICK)


@pytest.fixture(scope="module")
def sensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of PeFLL on the windows of thirty people, from files."""
    folder = tmp_path_factory.mktemp("sensors")
    windows().to_parquet(folder / "sensors.parquet")
    names = ["task.client=person", "task.target=activity", f"task.model={NETS}:SensorNet"]
    settings = ["rounds=1", "cohort=2", "task.novel=3", "method.local_steps=1"]
    task = f"task={folder / 'sensors.parquet'}"
    with pytest.raises(SystemExit, match="0"):
        main(["run", "pefll", task, *names, *settings, "--out", str(folder / "runs"), "--quiet"])
    return next((folder / "runs" / "pefll").iterdir())


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([str(argument) for argument in arguments])
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    return told


# Records.


def test_a_run_from_python_says_so_and_nothing_that_is_not_true(run: Run) -> None:
    assert run.folder is not None
    written = tomllib.loads(run.folder.config.read_text())
    assert written["task"] == {
        "name": "steps",
        "source": "python",
        "clients": 3,
        "novel": 1,
        "unlabelled": False,
    }
    assert config.load(str(run.folder.config)) == run.config
    summary = read_run(run.folder.path).summary
    assert summary is not None
    assert (summary["clients"], summary["labels"]) == ([*NAMES], ["sit", "walk"])


def test_a_run_from_python_is_opened_with_its_task(run: Run) -> None:
    assert run.folder is not None
    again = hyperfed.open_run(run.folder.path, make_task())
    assert torch.equal(*(each.model("ann").get_parameter("weight") for each in (run, again)))
    assert again.config == run.config
    with pytest.raises(UserError, match="data_fingerprint must be this run's"):
        hyperfed.open_run(run.folder.path, make_task(seed=1))


@pytest.mark.parametrize("method", ["fedavg", "local"])  # one whose server holds no model, too
def test_another_model_than_the_runs_is_refused(method: str, tmp_path: Path) -> None:
    run = Run.start(config.from_keys(method, QUICK | {"rounds": 2}), tmp_path, make_task())
    for _ in run.train():
        run.stop()
    assert run.folder is not None
    other = make_task(model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    for use in (hyperfed.open_run, hyperfed.resume):
        with pytest.raises(UserError, match="the task's model must be the one that the run was st"):
            use(run.folder.path, other)
    assert hyperfed.resume(run.folder.path, make_task()).done


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("names of clients", {"names": ("ann", "zoe", "bob")}),
        ("names of labels", {"labels": ("walk", "sit")}),
        ("sizes of clients", {"sizes": ("other", "one", "one")}),
        ("number of novel clients", {"novel": 0}),
        ("normalisation", {"transform": Normalize((0.5,), (0.5,))}),
    ],
)
def test_another_task_on_the_runs_data_is_refused(
    what: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"client": [NAMES[row % 3] for row in range(60)], "size": ["one", "other", "one"]}
    ours = make_task(model={"one": nn.Linear(4, 2), "other": nn.Linear(4, 2)}, **sizes)
    run = Run.start(config.from_keys("fedavg", QUICK | {"rounds": 2}), tmp_path, ours)
    for _ in run.train():
        run.stop()
    assert run.folder is not None
    other = dataclasses.replace(ours, **changes)
    assert other.fingerprint == ours.fingerprint
    for use in (hyperfed.open_run, hyperfed.resume):
        with pytest.raises(UserError, match=f"the task's {what} must be those that the run was st"):
            use(run.folder.path, other)
    tree, said, _ = load_latest(run.folder.state)
    del said["task"]  # which checkpoints of earlier versions lack
    save_latest(run.folder.state, tree, said)
    hyperfed.open_run(run.folder.path, other)


def smoothed(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y, label_smoothing=0.1)


def minus_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -nn.functional.cross_entropy(output, y, reduction="none")


@pytest.mark.parametrize(
    ("what", "now", "said"),
    [
        ("score", minus_loss, "accuracy, came minus_loss"),
        ("loss", smoothed, "cross_entropy, came smoothed"),
        ("loss", nn.CrossEntropyLoss(), "cross_entropy, came CrossEntropyLoss"),
    ],
)
def test_another_score_or_loss_than_the_runs_is_refused(
    what: str, now: Any, said: str, tmp_path: Path
) -> None:
    """The best round would be chosen among numbers of two kinds, or trained on by another aim."""
    run = Run.start(config.from_keys("fedavg", QUICK | {"rounds": 2}), tmp_path, make_task())
    for _ in run.train():
        run.stop()
    assert run.folder is not None
    other = make_task(**{what: now})
    for use in (hyperfed.open_run, hyperfed.resume):
        with pytest.raises(UserError, match=rf"{what} must be the one that .*, {said}; make"):
            use(run.folder.path, other)
    tree, told, _ = load_latest(run.folder.state)
    del told[what]  # which checkpoints of earlier versions lack
    save_latest(run.folder.state, tree, told)
    hyperfed.open_run(run.folder.path, other)


def test_a_run_without_a_checkpoint_says_that_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = QUICK | {"rounds": 2, "checkpoint_every": 2}
    run = Run.start(config.from_keys("fedavg", keys), tmp_path, make_task())
    training = run.train()
    next(training)
    training.close()  # as a kill does
    assert run.folder is not None
    assert hyperfed.resume(run.folder.path, make_task()).done
    assert "begins anew: no checkpoint is there yet, checkpoint_every=2" in caplog.text


@pytest.mark.parametrize("command", ["evaluate", "resume", "personalize"])
def test_the_command_line_says_how_to_go_on_with_a_run_from_python(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run.folder is not None
    np.savez(tmp_path / "new.npz", x=np.zeros((2, 4), np.float32))
    options = ["--data", tmp_path / "new.npz", "--out", tmp_path / "new.safetensors"]
    folder = run.folder.path
    if command == "resume":  # one that is not done
        folder = tmp_path / "copy"
        folder.mkdir()
        (folder / "config.toml").write_bytes(run.folder.config.read_bytes())
    told = failure(capsys, command, folder, *(options if command == "personalize" else ()))
    assert "the task 'steps' of this run was made in Python" in told
    assert "hyperfed.open_run(FOLDER, task)" in told


def test_a_task_of_settings_is_recorded_as_they_say_with_what_follows_from_the_data() -> None:
    settings = TaskConfig(clients=4, novel=1)
    made = hyperfed.train("fedavg", build(settings, 0), **QUICK)
    assert made.config.task == TaskConfig(clients=4, novel=1, partition="class_shares")
    assert hyperfed.train("fedavg", task={"clients": 4, "novel": 1}, **QUICK).config == made.config
    divided_otherwise = Run(config.from_keys("fedavg", QUICK), build(settings, seed=1))
    assert divided_otherwise.config.task.source == "python"


# The Python front.


def test_a_task_may_come_by_keyword_and_only_once() -> None:
    task = make_task()
    assert hyperfed.train("fedavg", task=task, **QUICK).task is task
    for keys in ({"task": {"novel": 0}}, {"task.novel": 0}, {"task": "digits"}):
        with pytest.raises(UserError, match="must come without settings of one, got task"):
            hyperfed.train("fedavg", task, **QUICK, **keys)
    with pytest.raises(UserError, match="two were given"):
        hyperfed.train("fedavg", task, task=task)
    with pytest.raises(UserError, match=r"must be a hyperfed.Task, got 'digits'; make one"):
        hyperfed.train("fedavg", "digits")
    with pytest.raises(UserError, match=r"got {'a': tensor.*; make one") as told:
        hyperfed.train("fedavg", {"a": torch.zeros(99, 99)})
    assert len(str(told.value)) < 300


def test_a_method_of_ones_own_trains_where_it_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = ModuleType("mine", '"""Mine (me, 2026): FedAvg by another name."""')
    vars(mine).update({name: vars(fedavg)[name] for name in ("Config", "PRESETS", "Client")})
    vars(mine)["Server"] = fedavg.Server
    monkeypatch.setitem(cast(dict[str, ModuleType], METHODS), "mine", mine)
    ours, theirs = (hyperfed.train(method, make_task(), **QUICK) for method in ("mine", "fedavg"))
    assert ours.summary["test_accuracy"] == theirs.summary["test_accuracy"]
    with pytest.raises(SystemExit, match="0"):
        main(["describe", "mine"])


def test_an_exported_file_has_the_name_of_its_client(
    sensors: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        main(["export", str(sensors), "--client", PEOPLE[6]])
    assert [path.name for path in tmp_path.iterdir()] == ["client-person_07.safetensors"]


def test_models_of_clients_have_their_names_and_labels(run: Run) -> None:
    for number, name in enumerate(NAMES):
        model = run.model(name)
        assert torch.equal(model.get_parameter("weight"), run.model(number).get_parameter("weight"))
        assert vars(model)["label_names"] == ("sit", "walk")
    assert vars(run.personalize(np.zeros((2, 4)), ["walk", "sit"]))["label_names"] == (
        "sit",
        "walk",
    )
    with pytest.raises(UserError, match="did you mean 'zoe'"):
        run.model("zo")


def test_a_frame_has_a_row_for_each_client_and_split(run: Run) -> None:
    frame = run.to_frame()
    by_hand = [
        (NAMES[client], e.split, count, accuracy, loss)
        for e in run.evaluations
        for client, count, accuracy, loss in zip(
            e.clients, e.count, e.client_accuracy, e.client_loss, strict=True
        )
    ]
    columns = frame[["client", "split", "examples", "accuracy", "loss"]]
    assert [tuple(row) for row in columns.to_numpy().tolist()] == by_hand
    assert set(zip(frame["client"], frame["split"], strict=True)) == {
        *((name, split) for name in ("zoe", "ann") for split in ("val", "test")),
        ("bob", "novel"),
    }


def test_a_frame_has_the_accuracy_among_a_clients_classes() -> None:
    task = make_task(novel=0)
    task.y[task.train[0]] = 0
    run = hyperfed.train("fedavg", task, **QUICK)
    frame = run.to_frame()
    masked = [
        accuracy
        for e in run.evaluations
        if e.round == run.best.round
        for accuracy in e.client_masked_accuracy
    ]
    assert frame["masked_accuracy"].tolist() == masked
    assert frame["accuracy"].tolist() != masked


def test_a_frame_is_of_the_best_round() -> None:
    keys = QUICK | {"rounds": 3, "method": {"local_steps": 3, "local_lr": 0.5}}
    run = hyperfed.train("fedavg", make_task(novel=0), **keys)
    best = run.summary["best_round"]
    assert {*run.to_frame()["round"]} == {best}
    with pytest.raises(UserError, match="first evaluation"):
        Run(config.from_keys("fedavg", QUICK), make_task()).to_frame()


def test_a_plot_names_clients_by_how_well_they_are_served(run: Run, tmp_path: Path) -> None:
    figure = run.plot(tmp_path / "run.png")
    assert isinstance(figure, Figure)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    rounds, people = figure.axes
    assert [line.get_label() for line in rounds.get_lines()] == [
        *("validation", "test", "best validation round")
    ]
    assert (rounds.get_xlabel(), people.get_ylabel()) == ("round", "client")
    told = [label.get_text() for label in people.get_yticklabels()]
    frame = run.to_frame()
    tested = frame[frame["split"] != "val"].set_index("client")["accuracy"]
    assert sorted(told) == sorted(NAMES)
    assert [tested[name] for name in told] == sorted(tested)
    points = {
        collection.get_label(): collection.get_offsets().tolist()
        for collection in people.collections
    }
    assert points["joined afterwards"] == [[100 * tested["bob"], told.index("bob")]]
    assert [told[int(place)] for _, place in points["trained together"]] == [
        name for name in told if name != "bob"
    ]
    with pytest.raises(
        UserError, match=r"a figure's file must end in .*, \.png, .* or \.\w+, came"
    ):
        run.plot(tmp_path / "run.text")


def test_a_plot_of_one_evaluation_has_whole_rounds() -> None:
    run = hyperfed.train("fedavg", make_task(), **QUICK | {"rounds": 2, "evaluate_every": 2})
    rounds = run.plot().axes[0]
    low, high = rounds.get_xlim()
    assert [tick for tick in rounds.get_xticks() if low <= tick <= high] == [2]


def test_a_plot_has_no_curve_of_a_split_without_examples() -> None:
    run = hyperfed.train("fedavg", make_task(val=0.0, novel=0), **QUICK)
    labels = [line.get_label() for line in run.plot().axes[0].get_lines()]
    assert labels == ["test", "last round"]


def test_losses_are_told_by_name(tmp_path: Path) -> None:
    task = make_task(name="lost", novel=0)
    keys = QUICK | {"rounds": 4, "faults": {"drop": 0.5}}
    run = hyperfed.train("fedavg", task, out=tmp_path, **keys)
    assert run.folder is not None
    lost = {task.name_of(lost.client) for e in run.evaluations for lost in e.lost}
    assert lost
    log = run.folder.log.read_text()
    assert all(f"client {name} (" in log for name in lost)


def test_a_log_says_that_a_run_was_aborted_while_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: hyperfed.Task) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(hyperfed.Task, "__repr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hyperfed.train("fedavg", make_task(), out=tmp_path, **QUICK)
    (log,) = tmp_path.glob("*/*/log.txt")
    assert log.read_text().endswith("aborted after round 0\n")


def test_who_was_lost_in_every_round_is_named_at_the_end(tmp_path: Path) -> None:
    """Of one example nothing knows a variance, so ann cannot train."""

    def net() -> nn.Module:
        norm = nn.BatchNorm1d(3, track_running_stats=False)
        return nn.Sequential(nn.Linear(4, 3), norm, nn.Linear(3, 2))

    split = ["test" if row % 3 == 1 else "train" for row in range(60)]
    split[1] = "train"
    task = make_task(model=net, split=split, novel=0)
    keys = QUICK | {"rounds": 5, "evaluate_every": 2}
    run = Run.start(config.from_keys("fedavg", keys), tmp_path, task)
    for progress in run.train():
        if progress.round == 3:
            run.stop()
    assert run.folder is not None
    resumed = hyperfed.resume(run.folder.path, task)
    assert resumed.summary["always_lost"] == ["ann"]
    told = "lost in every round that was to have them: ann; log.txt"
    assert told in run.folder.log.read_text()


@pytest.mark.parametrize("seed", [0, 2])  # two were lost always, and nobody was
def test_who_was_lost_at_times_is_not_named_at_the_end(seed: int) -> None:
    keys = QUICK | {"rounds": 6, "faults": {"drop": 0.6}, "seed": seed}
    run = Run(config.from_keys("fedavg", keys), make_task(novel=0))
    lost: set[tuple[int, int]] = set()
    for progress in run.train():
        lost |= {(progress.round - 1, it.client) for it in progress.lost}
    drawn = {(n, c) for n in range(6) for c in cohort_of(run.config, run.task, n)}
    always = [n for c, n in enumerate(NAMES) if not {it for it in drawn - lost if it[1] == c}]
    assert {client for _, client in lost} == {0, 1, 2}
    assert run.summary["always_lost"] == (always or None)


# The command line, from files.


def test_sensor_data_of_thirty_people_from_files(
    sensors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_run(sensors)
    assert record.summary is not None
    assert record.config["task"]["clients"] == 30
    assert sorted(record.summary["clients"]) == sorted(PEOPLE)
    assert record.summary["labels"] == [*ACTIVITIES]
    with pytest.raises(SystemExit, match="0"):
        main(["evaluate", str(sensors), "--clients"])
    shown = capsys.readouterr().out
    assert all(
        shown.count(name) == (2 if name in record.summary["clients"][:27] else 1) for name in PEOPLE
    )
    windows()[lambda frame: frame["person"] == "person 05"].to_parquet(tmp_path / "new.parquet")
    made = tmp_path / "new.safetensors"
    with pytest.raises(SystemExit, match="0"):
        main(
            [
                "personalize",
                str(sensors),
                "--data",
                str(tmp_path / "new.parquet"),
                "--out",
                str(made),
                "--json",
            ]
        )
    assert json.loads(capsys.readouterr().out) == {
        "model": str(made),
        "examples": 6,
        "labelled": True,
    }
    from safetensors import safe_open

    with safe_open(made, framework="pt") as file:
        assert json.loads(file.metadata()["hyperfed"])["labels"] == [*ACTIVITIES]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    SensorNet().load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})


def test_a_run_on_a_table_says_what_it_took_it_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ages = np.arange(24.0)
    table = {"age": ages, "grade": ages % 3, "client": np.arange(24) % 3}
    pd.DataFrame(table).to_csv(tmp_path / "mine.csv", index=False)
    keys = [f"task={tmp_path / 'mine.csv'}", "task.target=grade", "task.novel=0", "rounds=1"]
    told = {
        "Task mine: 24 examples of 1 for numbers (a regression, since they are floats; classes are "
        "integers or words)",
        "features: age",
    }
    for seeds in ("seed=0", "seed=0..1"):
        for quiet in ([], ["--quiet"]):
            out = tmp_path / f"{seeds}{quiet}"
            with pytest.raises(SystemExit, match="0"):
                main(["run", "fedavg", *keys, seeds, "--out", str(out), *quiet])
            said = capsys.readouterr().err.splitlines()
            assert [said.count(line) for line in told] == [0 if quiet else 1] * 2
            logs = [path.read_text() for path in out.glob("*/*/log.txt")]
            assert all(log.count(line) == 1 for log in logs for line in told)


@pytest.mark.parametrize("named", ["small", "./small", "kept in data_dir"])
def test_a_run_on_a_folder_is_opened_from_anywhere(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "small").mkdir(parents=True)
    frame = pd.DataFrame(np.arange(180.0).reshape(60, 3), columns=["a", "b", "c"])
    frame.assign(label=[0, 1, 2] * 20).to_csv(
        tmp_path / "data" / "small" / "train.csv", index=False
    )
    monkeypatch.chdir(tmp_path / "data")
    task: dict[str, Any] = {"name": named, "clients": 4}
    if named == "kept in data_dir":
        monkeypatch.chdir(tmp_path)
        task = {"name": "small", "data_dir": "data", "clients": 4}
    run = hyperfed.train("fedavg", task=task, out=tmp_path, **QUICK)
    (tmp_path / "elsewhere" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = hyperfed.open_run(run.folder.path)
    assert again.evaluate_best()["test"].main == run.evaluate_best()["test"].main
    written = config.load(str(run.folder.config)).task
    inside = named == "kept in data_dir"
    assert written.name == ("small" if inside else str(tmp_path / "data" / "small"))
    assert written.data_dir == (str(tmp_path / "data") if inside else None)


@pytest.mark.parametrize("net", ["nets.py", "nets.v2.py"])
def test_paths_in_an_experiment_begin_at_its_folder_where_the_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lines = ['method = "fedavg"', "[task]", 'name = "mine.csv"', f'model = "{net}:Net"']
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    loaded = config.load("../mine.toml").task
    here = tmp_path / "here"
    assert (loaded.name, loaded.model) == (str(here / "mine.csv"), f"{here / net}:Net")
    for name in ("mine.csv", net):
        (tmp_path / name).touch()
    loaded = config.load(str(tmp_path / "mine.toml")).task
    assert (loaded.name, loaded.model) == (
        str(tmp_path / "mine.csv"),
        f"{tmp_path / net}:Net",
    )
    assert config.load("fedavg", ["task=cifar10", "task.model=lenet"]).task.model == "lenet"


@pytest.mark.parametrize("method", ["pfedhn", "headstart", "mh_pfedhn"])
def test_a_newcomer_is_fitted_also_where_gradients_are_off(method: str) -> None:
    task = make_task()
    run = hyperfed.train(method, task, **QUICK)
    novel = task.name_of(task.novel_ids[0])
    x, y = task.x[:9], task.y[:9]
    outside = [model.state_dict() for model in (run.model(novel), run.personalize(x, y))]
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            within = [run.model(novel), run.personalize(x.clone(), y.clone())]
        for ours, model in zip(outside, within, strict=True):
            torch.testing.assert_close({**model.state_dict()}, {**ours}, rtol=0, atol=0)
            assert all(each.requires_grad for each in model.parameters())

"""A table made again: what is planned, what a process does, and the command as a whole."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commands import start
from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.papers import origin, reproduction, side_by_side
from hyperfed.papers.reproduction import Job, carry_out
from hyperfed.runs import config, records
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.run import Run

TABLE = """
[table]
paper = "Nobody, 2026"
title = "Digits"
seeds = 2
set.rounds = 6
set.evaluate_every = 2
set.cohort = 2
set.task = { clients = 6, novel = 0.34, partition = "dirichlet_equal", unlabelled = true }
set.method.local_steps = 2

[measures.novel]
metric = "novel_accuracy"
place = "table 1"

[columns.like]
about = "alike"

[columns.unlike]
about = "unlike"
set.task.novel_alpha = 10.0

[rows.sampled]
about = "pFedHN-sampled"
set.method = { name = "pfedhn", novel_models = "sampled" }

[rows.itpfl]
about = "IT-PFL-HN"
columns = ["like"]
set.method.phase_one_rounds = 4
"""
DEADLINE = 120.0

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "experiments" / "made" / "table1.toml"
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    return path.parents[1]


def planned(folder: Path, cells: str = "*", **options: Any) -> list[Job]:
    experiment, chosen = reproduction.find("made/table1", folder, cells)
    defaults: dict[str, Any] = {"seeds": [0], "scale": 1.0, "out": folder.parent / "results"}
    return reproduction.plan(experiment, chosen, **(defaults | options))


def told(job: Job) -> list[tuple[object, ...]]:
    messages: list[tuple[object, ...]] = []
    carry_out(job, messages.append)
    return messages


def numbers(folder: Path) -> Any:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    for record in (*lines, summary):
        del record["seconds"]
    del summary["commit"]  # of a checkout that somebody works in
    return lines, summary


def test_all_cells_come_with_one_seed_and_then_with_the_next(folder: Path) -> None:
    jobs = planned(folder, seeds=range(2))
    out = folder.parent / "results" / "made"
    assert [job.folder.relative_to(out) for job in jobs] == [
        Path(f"table1-{cell}/seed{seed}")
        for seed in (0, 1)
        for cell in ("like-sampled", "like-itpfl", "unlike-sampled")
    ]
    assert [job.config.seed for job in jobs] == [0, 0, 0, 1, 1, 1]
    assert {job.config.engine.cores for job in jobs} == {1}
    by = [job.trained and job.trained.name for job in jobs]
    assert by == [None, None, "seed0", None, None, "seed1"]  # each by a training of its seed


def test_seeds_are_trained_without_those_before_them(folder: Path) -> None:
    """Such as each on a machine of its own."""
    jobs = planned(folder, "*-sampled", seeds=[1, 2])
    assert [(job.seed, job.folder.name) for job in jobs] == [
        *((1, "seed1"), (1, "seed1"), (2, "seed2"), (2, "seed2"))
    ]
    by = [job.trained and job.trained.relative_to(folder.parent / "results/made") for job in jobs]
    assert by == [None, Path("table1-like-sampled/seed1"), None, Path("table1-like-sampled/seed2")]
    assert reproduce(folder, "--cells", "like-sampled", "--seeds", "1..1") == 0
    made = folder.parent / "results/made/table1-like-sampled"
    assert [path.name for path in made.iterdir()] == ["seed1"]


def test_settings_of_where_it_computes_come_to_each_run(folder: Path) -> None:
    where = ["device=cuda:63", "engine=vmap", "engine.chunk=2", "checkpoint_every=5"]
    for job in planned(folder, "like-*", where=where):
        engine = job.config.engine
        assert job.config.device == "cuda:63"
        assert (engine.name, engine.chunk, engine.cores) == ("vmap", 2, 1)
        assert job.config.checkpoint_every == 5
        assert all(setting in job.origin.command for setting in where)


@pytest.mark.parametrize("setting", ["rounds=3", "seed=1", "engines=vmap", "device", "method.lr=1"])
def test_settings_of_what_a_table_trains_are_refused(folder: Path, setting: str) -> None:
    with pytest.raises(UserError, match=rf"must say where it computes.* came {setting}; .*:CELL"):
        planned(folder, where=["engine=vmap", setting])


def test_a_record_made_elsewhere_is_one_of_the_cell(folder: Path) -> None:
    """It is not made again, and who is served by it says how it was trained."""
    (job,) = planned(folder, "like-sampled", where=["engine=vmap"])
    assert told(job)[-1] == ("done",)
    assert [job.done for job in planned(folder, "like-sampled")] == [True]
    (serving,) = planned(folder, "unlike-sampled", where=["engine=loop", "engine.workers=1"])
    assert serving.origin.command.startswith(f"{job.origin.command}; hyperfed evaluate RUN ")
    assert told(serving)[-1] == ("done",)
    engine = config.load(str(serving.folder / "config.toml")).engine
    assert (engine.name, engine.workers) == ("vmap", None)
    assert json.loads((serving.folder / "summary.json").read_text())["engine"] == "vmap"


def test_records_name_the_table_s_own_file_as_any_machine_finds_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    path = folder / "made" / "table1.toml"
    np.savez(path.with_name("a.npz"), client=np.arange(1797) % 6, split=np.arange(1797) // 6 % 3)
    dealt = 'partition = "file", partition_file = "a.npz"'
    text = TABLE.replace('partition = "dirichlet_equal"', dealt)
    path.write_text(text.replace("novel_alpha = 10.0", 'novel_corruption = "blur"'))
    jobs = planned(folder, "*-sampled")
    assert [bool(job.trained) for job in jobs] == [False, True]
    for job in jobs:
        assert told(job)[-1] == ("done",)
        settings = (job.folder / "config.toml").read_text()
        assert 'partition_file = "experiments/made/a.npz"' in settings
    assert [job.done for job in planned(folder, "*-sampled")] == [True, True]  # and of their cells


def test_cells_that_differ_in_serving_share_a_training(folder: Path) -> None:
    trained, other, served = planned(folder)
    assert (trained.trained, other.trained, served.trained) == (None, None, trained.folder)
    assert (trained.rounds, served.rounds) == (6, 0)
    assert served.origin.trained == "../../table1-like-sampled/seed0"
    command, serve = served.origin.command.split("; ")
    assert command == trained.origin.command
    assert serve == "hyperfed evaluate RUN --novel task.novel_alpha=10.0"
    (alone,) = planned(folder, "unlike-sampled")
    assert alone.trained is None
    assert told(trained)[-1] == ("done",)
    (served,) = planned(folder, "unlike-sampled")  # it is done, whoever asked for it
    assert served.trained == trained.folder


def test_who_is_looked_into_otherwise_is_served_by_no_other(folder: Path) -> None:
    """At each evaluation a training tells the descriptors of its own novel clients, too."""
    table = folder / "made" / "table1.toml"
    for where, examined, shared in [
        ("set.rounds", "crossed", True),
        ("set.rounds", "descriptors", False),
        ("set.task.novel_alpha", "crossed", False),  # of that cell alone
    ]:
        table.write_text(TABLE.replace(where, f"set.examine = ['{examined}']\n{where}", 1))
        _, served = planned(folder, "*like-sampled")
        assert bool(served.trained) == shared
    table.write_text(
        TABLE.replace("set.task.novel_alpha", "set.metrics = ['f1']\nset.task.novel_alpha")
    )
    _, counted = planned(folder, "*like-sampled")
    assert counted.trained is None  # the other's clients counted for no such metric


def test_records_have_what_a_table_leaves_to_the_data(folder: Path) -> None:
    """Such as the number of clients: they are read, are of their cells, and share a training."""
    table = folder / "made" / "table1.toml"
    table.write_text(TABLE.replace("clients = 6, ", "").replace("rounds = 6", "rounds = 1"))
    for job in planned(folder, "*like-sampled"):
        assert told(job)[-1] == ("done",)
        assert config.load(str(job.folder / "config.toml")).task.clients == 20
    trained, served = planned(folder, "*like-sampled")
    assert (trained.done, served.done, served.trained) == (True, True, trained.folder)


def test_nobody_is_served_by_a_record_that_was_served_itself(folder: Path) -> None:
    table = folder / "made" / "table1.toml"
    table.write_text(TABLE.replace("[rows.sampled]", f"{FAR}\n[rows.sampled]"))
    trained, served = planned(folder, "*like-sampled")
    for job in (trained, served):
        assert told(job)[-1] == ("done",)
    shutil.rmtree(trained.folder)
    (there, alone) = planned(folder, "[uf]*-sampled")
    assert there.folder == served.folder
    assert there.done
    assert alone.trained is None


def test_nobody_is_served_by_a_record_whose_checkpoint_is_gone(folder: Path) -> None:
    (job,) = planned(folder, "like-sampled")
    assert told(job)[-1] == ("done",)
    shutil.rmtree(job.folder / "checkpoint")
    record, alone = planned(folder, "*like-sampled")
    assert record.done
    assert alone.trained is None


FAR = """\
[columns.far]
about = "far"
set.task.novel_alpha = 100.0
"""


def test_a_scale_shortens_the_phases_too_and_leaves_each_a_round(folder: Path) -> None:
    def lengths(scale: float) -> tuple[int, int]:
        (job,) = planned(folder, "like-itpfl", scale=scale)
        assert job.origin.scale == scale
        assert job.folder.name == f"seed0-scale{scale:g}"
        return job.config.rounds, job.config.settings.phase_one_rounds

    assert lengths(0.5) == (3, 2)
    assert lengths(0.01) == (2, 1)
    (job,) = planned(folder, "like-sampled", scale=0.3)
    assert job.config.settings.novel_rounds == 6  # of 20
    assert job.config.settings.novel_models == "sampled"


def test_a_scale_is_of_the_rounds_as_it_is_written(folder: Path) -> None:
    """In binary 0.07 of 5,000 are a bit more than 350, and 0.29 of 100 a bit less than 29."""
    table = folder / "made" / "table1.toml"
    long = TABLE.replace("set.rounds = 6", "set.rounds = 5000\nset.method.novel_rounds = 100")
    table.write_text(long)
    (job,) = planned(folder, "like-sampled", scale=0.07)
    assert job.config.rounds == 350
    (job,) = planned(folder, "like-sampled", scale=0.29)
    assert job.config.settings.novel_rounds == 29


def test_novel_clients_are_served_further_and_a_job_goes_on_where_it_was_left(
    folder: Path,
) -> None:
    table = folder / "made" / "table1.toml"
    served = "served = { samples = [5, 8], epsilon = [1.0], draws = 3 }\nset.rounds"
    text = TABLE.replace("set.rounds", served)
    table.write_text(
        text.replace("rounds = 4", "rounds = 1\nset.method.private = true\nset.rounds = 2")
    )
    (job,) = planned(folder, "like-itpfl")
    assert told(job)[-1] == ("done",)
    files = {path.name: path for path in job.folder.glob("novel-*.json")}
    assert set(files) == {f"novel-n{n}{e}.json" for n in (5, 8) for e in ("", "-epsilon1.0")}
    found = {name: json.loads(path.read_text())["novel"] for name, path in files.items()}
    with closing(Run.open(job.folder)) as run:
        tested = [len(run.task.test[client]) for client in run.task.novel_ids]
        for name, epsilon, draws in [
            ("novel-n5", [], 1),
            ("novel-n8", ["method.epsilon=1.0", "method.budget=99.0"], 3),
        ]:
            told_name = f"{name}{'-epsilon1.0' if epsilon else ''}.json"
            with closing(run.served_otherwise(epsilon, samples=int(name[-1]))) as otherwise:
                again = records.as_written(otherwise.evaluate_novel(draws))
            assert found[told_name] | {"seconds": 0} == again | {"seconds": 0}
            assert found[told_name]["count"] == [draws * count for count in tested]
    assert job.done
    files["novel-n5.json"].unlink()
    before = (job.folder / "metrics.jsonl").read_bytes()
    assert not job.done
    assert told(job) == [("done",)]
    once_more = json.loads(files["novel-n5.json"].read_text())["novel"]
    assert once_more["client_loss"] == found["novel-n5.json"]["client_loss"]
    assert (job.folder / "metrics.jsonl").read_bytes() == before
    (scaled,) = planned(folder, "like-itpfl", scale=0.5)
    assert {path.name for path in scaled.further} == {"novel-n5.json", "novel-n5-epsilon1.0.json"}


def test_who_is_served_by_another_training_is_served_further_too(folder: Path) -> None:
    table = folder / "made" / "table1.toml"
    table.write_text(TABLE.replace("set.rounds = 6", "served = { samples = [5] }\nset.rounds = 1"))
    trained, served = planned(folder, "*like-sampled")
    for job in (trained, served):
        assert told(job)[-1] == ("done",)
        assert job.done
    with (
        closing(Run.open(trained.folder)) as run,
        closing(run.served_otherwise(["task.novel_alpha=10.0"], samples=5)) as otherwise,
    ):
        again = records.as_written(otherwise.evaluate_novel())
    found = json.loads((served.folder / "novel-n5.json").read_text())["novel"]
    assert found | {"seconds": 0} == again | {"seconds": 0}
    # Those of whoever trained need not be there for that.
    (trained.folder / "novel-n5.json").unlink()
    shutil.rmtree(served.folder)
    (served,) = planned(folder, "unlike-sampled")
    assert served.trained == trained.folder


def test_what_is_wrong_is_told_before_anything_is_written(folder: Path) -> None:
    for scale in (0.0, 1.5):
        with pytest.raises(UserError, match="--scale must be a part of the rounds"):
            planned(folder, scale=scale)
    (job,) = planned(folder, "like-itpfl")
    job.folder.mkdir(parents=True)
    config.dump(dataclasses.replace(job.config, rounds=7), job.folder / "config.toml")
    with pytest.raises(UserError, match=r"itpfl/seed0: rounds=7 for 6\nmove them away, or give"):
        planned(folder)
    assert [path.name for path in job.folder.iterdir()] == ["config.toml"]


def test_a_folder_with_a_record_of_something_else_is_told(folder: Path) -> None:
    trained, _, served = planned(folder)
    assert told(trained)[-1] == ("done",)

    def refused(*said: str, cells: str = "like-sampled", **options: Any) -> None:
        with pytest.raises(UserError) as error:
            planned(folder, cells, **options)
        assert all(each in str(error.value) for each in said), error.value

    other = trained.folder.with_name("seed1")
    shutil.copytree(trained.folder, other)
    refused(f"{other}: seed=0 for 1", seeds=range(2))
    planned(folder)
    path = trained.folder / "experiment.json"
    honest = path.read_bytes()
    of_another = dataclasses.replace(trained.origin, table="made/x", cell="like-itpfl", scale=0.5)
    of_another.write(trained.folder)
    told_of = (
        "table=made/x for made/table1",
        "cell=like-itpfl for like-sampled",
        "scale=0.5 for 1.0",
    )
    refused(*told_of)
    refused(*told_of, cells="unlike-sampled")  # whose clients would be served by it
    path.write_bytes(honest)
    summary = trained.folder / "summary.json"
    summary.write_text(summary.read_text().replace('"seed": 0', '"seed": 1'))
    refused("the summary's seed must be that of the settings, 0, is 1")
    (trained.folder / "config.toml").unlink()
    refused(f"{trained.folder}: a summary without settings")
    assert not served.folder.exists()


def test_a_job_leaves_the_record_of_its_run_and_of_which_cell_it_is(folder: Path) -> None:
    trained, _, served = planned(folder, scale=0.5)
    assert told(trained)[-1] == ("done",)
    assert origin.read(trained.folder) == trained.origin
    assert told(served) == [("done",)]
    with_others = origin.read(served.folder)
    assert with_others is not None
    assert with_others.trained == "../../table1-like-sampled/seed0-scale0.5"
    ours, theirs = numbers(trained.folder), numbers(served.folder)
    assert ours[0][:-1] == theirs[0][:-1]
    assert {key for key in ours[1] if ours[1][key] != theirs[1][key]} <= {
        "novel_accuracy",
        "novel_accuracy_client_mean",
        "novel_masked_accuracy",
        "novel_zeroed_accuracy",
        "data_fingerprint",
    }
    fingerprints = [of[1]["data_fingerprint"] for of in (ours, theirs)]
    assert fingerprints[0] != fingerprints[1]  # newcomers hold other data
    run = Run.open(trained.folder)
    again = run.served_otherwise(["task.novel_alpha=10.0"]).evaluate_novel()
    assert theirs[1]["novel_accuracy"] == again.accuracy
    assert theirs[1]["novel_accuracy_client_mean"] == again.main.client_mean
    assert theirs[0][-1]["split"] == "novel"
    assert theirs[0][-1]["client_loss"] == list(again.client_loss)
    assert theirs[0][-1]["client_loss"] != ours[0][-1]["client_loss"]
    assert all(job.done for job in (trained, served))
    # A later plan of the other cell alone finds the training that is done.
    (alone,) = planned(folder, "unlike-sampled", scale=0.5)
    assert alone.trained == trained.folder


def test_a_job_that_nobody_listens_to_any_more_stops_and_goes_on_later(folder: Path) -> None:
    (job,) = planned(folder, "like-sampled")
    ends = []

    def gone(message: tuple[object, ...]) -> None:
        if message[0] == "round":
            raise BrokenPipeError
        ends.append(message)

    carry_out(job, gone)
    assert ends == [("stopped",)]
    assert not job.done
    assert told(job)[-1] == ("done",)
    whole = planned(folder, "like-sampled", out=folder.parent / "whole")[0]
    told(whole)
    assert numbers(job.folder) == numbers(whole.folder)


def test_nobody_is_served_by_a_training_that_was_stopped(folder: Path) -> None:
    """Its process alone was told to stop, so that the command goes on."""
    table = folder / "made" / "table1.toml"
    table.write_text(TABLE.replace("evaluate_every = 2", "evaluate_every = 1"))
    trained, _, served = planned(folder)

    def gone(message: tuple[object, ...]) -> None:
        if message[0] == "round":
            raise BrokenPipeError

    carry_out(trained, gone)
    ((kind, why, ours),) = told(served)
    assert (kind, ours) == ("failed", False)
    assert f"{trained.folder} must be done to serve clients otherwise" in str(why)
    assert not served.folder.exists()
    team = side_by_side._Team(deque([served]), 1)
    team.outcome.stopped.append(trained)
    assert not team.hire()
    assert not team.workers
    assert team.outcome.stopped == [trained, served]


def test_a_record_that_is_served_has_no_checkpoint_of_a_training_of_its_own(folder: Path) -> None:
    """It was begun alone and stopped, and both are asked for when the other one has trained."""
    (alone,) = planned(folder, "unlike-sampled")
    stop_early(alone)
    (trained,) = planned(folder, "like-sampled")
    assert trained.trained is None
    assert told(trained)[-1] == ("done",)
    trained, served = planned(folder, "*like-sampled")
    assert (served.folder, served.trained) == (alone.folder, trained.folder)
    assert told(served)[-1] == ("done",)
    with pytest.raises(UserError, match="there must be a checkpoint"):
        Run.open(served.folder)
    assert not (served.folder / "status.json").exists()


def test_of_cells_that_share_a_training_the_one_that_was_begun_goes_on(folder: Path) -> None:
    (alone,) = planned(folder, "unlike-sampled")
    stop_early(alone)
    served, begun = planned(folder, "*like-sampled")
    assert (begun.folder, begun.trained, served.trained) == (alone.folder, None, alone.folder)
    rounds = [message[1] for message in told(begun) if message[0] == "round"]
    assert rounds[0] == 2  # of those it has yet to do
    (served,) = planned(folder, "like-sampled")  # by the other one, which is done
    assert served.trained == begun.folder
    assert told(served)[-1] == ("done",)
    assert all(job.done for job in planned(folder, "*like-sampled"))


def stop_early(job: Job) -> None:
    """Has a job stop after its first round, with a checkpoint, as if nobody listened any more."""

    def gone(message: tuple[object, ...]) -> None:
        if message[0] == "round":
            raise BrokenPipeError

    carry_out(job, gone)
    assert not job.done
    assert RunFolder(job.folder).has_checkpoint


def test_a_job_goes_on_where_its_settings_say(folder: Path) -> None:
    """It was begun with a GPU, of which there is none here."""
    (job,) = planned(folder, "like-sampled")

    def gone(message: tuple[object, ...]) -> None:
        if message[0] == "round":
            raise BrokenPipeError

    carry_out(job, gone)
    settings = job.folder / "config.toml"
    settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda:63"'))
    ((kind, why, ours),) = told(job)
    assert (kind, ours) == ("failed", False)
    assert "hyperfed reproduce TABLE device=cpu" in str(why)
    (moved,) = planned(folder, "like-sampled", where=["device=cpu", "engine=vmap"])
    assert told(moved)[-1] == ("done",)
    kept = config.load(str(settings))
    assert (kept.device, kept.engine.name, kept.engine.cores) == ("cpu", "vmap", 1)


def test_a_job_tells_why_it_failed_and_whose_fault_it_is(folder: Path, monkeypatch: Any) -> None:
    (job,) = planned(folder, "like-sampled")

    def raising(error: Exception) -> None:
        def build(*_: object) -> None:
            raise error

        monkeypatch.setattr(reproduction, "Run", build)

    raising(UserError("no such data"))
    assert told(job) == [("failed", "no such data", False)]
    raising(KeyError("x"))
    messages: list[tuple[object, ...]] = []
    with pytest.raises(KeyError):
        carry_out(job, messages.append)
    assert messages == [("failed", "KeyError: 'x'", True)]


def reproduce(folder: Path, *options: str) -> int:
    out = str(folder.parent / "results")
    arguments = ["reproduce", "made/table1", "--experiments", str(folder), "--out", out, *options]
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


def test_the_command_makes_what_is_not_done_and_nothing_else(folder: Path, capsys: Any) -> None:
    assert reproduce(folder, "--seeds", "1", "--scale", "0.5", "--jobs", "2") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [str(job.folder) for job in planned(folder, scale=0.5)]
    assert sorted(line.partition(": ")[2].split(" (")[0] for line in err.splitlines()) == [
        "done",
        "done",
        "done",
    ]
    assert err.splitlines()[-1].endswith("(3 of 3)")
    before = {
        job.folder: (job.folder / "summary.json").stat() for job in planned(folder, scale=0.5)
    }
    assert reproduce(folder, "--seeds", "1", "--scale", "0.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"records": [str(path) for path in before], "stopped": [], "failed": {}}
    assert all((path / "summary.json").stat() == stat for path, stat in before.items())


def test_the_command_takes_settings_of_where_it_computes(folder: Path, monkeypatch: Any) -> None:
    at_once = []
    run = side_by_side.run

    def noted(jobs: Any, jobs_at_once: int, **options: Any) -> Any:
        at_once.append(jobs_at_once)
        return run([], jobs_at_once, **options)

    monkeypatch.setattr(side_by_side, "run", noted)
    one = ("--cells", "like-sampled", "--seeds", "1")
    assert reproduce(folder, "engine=vmap", *one) == 0
    assert reproduce(folder, "device=cpu:0", *one) == 0
    assert reproduce(folder, "device=cuda:63", *one) == 0
    assert at_once == [side_by_side.cores(), side_by_side.cores(), 1]
    assert reproduce(folder, "rounds=3", *one) == 2


def test_the_command_trains_as_many_seeds_as_the_table_says(folder: Path, monkeypatch: Any) -> None:
    jobs: list[Job] = []
    run = side_by_side.run

    def noted(wanted: Any, jobs_at_once: int, **options: Any) -> Any:
        jobs.extend(wanted)
        return run([], jobs_at_once, **options)

    monkeypatch.setattr(side_by_side, "run", noted)
    assert reproduce(folder, "--cells", "like-sampled") == 0
    assert [job.folder.name for job in jobs] == ["seed0", "seed1"]


def test_no_more_processes_work_at_once_than_are_to(folder: Path, monkeypatch: Any) -> None:
    idle = SimpleNamespace(start=lambda: None)
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=lambda **_: idle)
    monkeypatch.setattr(side_by_side, "_CONTEXT", context)
    jobs = planned(folder, "like-*", seeds=[0, 1])
    for at_once in (1, 2):
        team = side_by_side._Team(deque(jobs), at_once)
        assert team.hire()
        assert len(team.workers) == at_once
        for pipe in team.workers:
            pipe.close()


def test_the_command_says_what_it_cannot_do(folder: Path, capsys: Any) -> None:
    path = folder / "made" / "table1.toml"
    path.write_text(TABLE.replace("task = {", 'task = { name = "nowhere.npz",'))
    assert reproduce(folder, "--cells", "like-sampled", "--seeds", "1") == 2
    assert "error: made/table1 like-sampled seed 0: " in capsys.readouterr().err
    assert reproduce(folder, "--jobs", "0") == 2
    assert reproduce(folder, "--cells", "x") == 2


def test_the_command_says_once_that_records_cannot_be_written(folder: Path, capsys: Any) -> None:
    out = folder.parent / "results"
    out.symlink_to("nowhere")
    assert reproduce(folder) == 2
    assert capsys.readouterr().err.startswith(f"error: {out} must be writable, but: File exists")


@pytest.mark.slow
@pytest.mark.xdist_group("kill")
def test_ctrl_c_stops_all_cells_and_the_same_command_goes_on(folder: Path) -> None:
    path = folder / "made" / "table1.toml"
    long = TABLE.replace("set.rounds = 6", "set.rounds = 80")
    path.write_text(long.replace("set.evaluate_every = 2", "set.evaluate_every = 8"))
    out = folder.parent / "results"
    arguments = ["reproduce", "made/table1", "--experiments", str(folder), "--out", str(out)]
    process = start(*arguments, "--cells", "like-sampled", "--seeds", "2", "--jobs", "2")
    deadline = time.monotonic() + DEADLINE
    while len(list(out.glob("*/*/*/metrics.jsonl"))) < 2:
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(DEADLINE)
    assert process.exitcode == 3
    jobs = planned(folder, "like-sampled", seeds=range(2))
    assert not any(job.done for job in jobs)
    whole = planned(folder, "like-sampled", out=folder.parent / "whole")
    for job in (*jobs, *whole):
        assert told(job)[-1] == ("done",)
    assert numbers(jobs[0].folder) == numbers(whole[0].folder)

"""The command line end to end, on the bundled digits with few rounds."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import typer
from click.shell_completion import ShellComplete

import hyperfed
from hyperfed import task as tasks
from hyperfed.apps import catalogue
from hyperfed.apps.cli import app, main
from hyperfed.data import own
from hyperfed.data.tasks import PARTITIONS, TaskConfig, build
from hyperfed.errors import EngineLostError
from hyperfed.methods import METHODS, pfedhn
from hyperfed.nets.targets import TARGETS
from hyperfed.runs.folder import RunFolder, read_run
from hyperfed.runs.run import Run
from hyperfed.trees.checkpoints import previous

SMALL = (
    "rounds=4",
    "task.clients=4",
    "task.novel=0.25",
    "evaluate_every=2",
    "checkpoint_every=2",
    "method.local_steps=2",
)
pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs

DEADLINE = 120.0
"""Seconds for what takes a few on a machine that does nothing else."""


class Outcome(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys) -> Cli:
    """Runs a command in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        code = leaving.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return call


def started(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Starts a command in a process of its own, with as many threads as here."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(
        [sys.executable, "-m", "hyperfed", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **threads},
        **options,
    )


@contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def run_with_log(process: subprocess.Popen[str], out: Path, text: str) -> Path:
    """Waits until a run's log says something; returns the run's folder."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        for log in out.glob("*/*/log.txt"):
            if text in log.read_text():
                return log.parent
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    pytest.fail(f"no log said {text!r} in {DEADLINE} s")


def failure(outcome: Outcome) -> str:
    """Checks that a command said one thing, on standard error, and nothing else; returns it."""
    assert outcome.code == 2, outcome
    assert not outcome.out
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("error: ") == 1
    assert "Traceback" not in outcome.err
    return outcome.err


def measured(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what two equal runs may differ in: the time, and the commit of a busy checkout."""
    return {key: value for key, value in numbers.items() if key not in ("seconds", "commit")}


def same_records(left: Path, right: Path) -> None:
    """Checks that two runs have the same numbers."""
    one, other = read_run(left), read_run(right)
    assert one.summary is not None
    assert other.summary is not None
    assert measured(one.summary) == measured(other.summary)
    assert [measured(vars(e)) for e in one.evaluations] == [
        measured(vars(e)) for e in other.evaluations
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run; not to be changed."""
    out = tmp_path_factory.mktemp("trained")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "pfedhn", *SMALL, "--out", str(out), "--quiet"])
    (folder,) = (out / "pfedhn").iterdir()
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A folder that holds a finished run on other data."""
    out = Path(tmp_path_factory.mktemp("other"))
    with pytest.raises(SystemExit, match="0"):
        main(["run", "fedavg", *SMALL, "task.clients=5", "--out", str(out), "--quiet"])
    return out


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A finished run to change."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture(scope="module")
def client_data(trained) -> dict[str, np.ndarray]:
    """Raw examples of the task's novel client."""
    task = Run.open(trained).task
    index = task.train[task.novel_ids[0]]
    return {"x": task.x[index].numpy(), "y": task.y[index].numpy()}


class TestRun:
    def test_says_its_numbers_then_its_folder(self, cli, tmp_path):
        outcome = cli("run", "local", *SMALL, "method.novel_steps=1", "--out", tmp_path)
        assert outcome.code == 0
        assert outcome.err == ""  # no progress where there is no terminal
        *shown, last = outcome.out.splitlines()
        record = read_run(Path(last))
        assert record.summary is not None
        assert Path(last).parent == tmp_path / "local"
        assert f"{100 * record.summary['test_accuracy']:.1f}" in shown[-1].split()

    def test_quiet_says_only_its_folder(self, cli, tmp_path):
        outcome = cli("run", "pfedhn", *SMALL, "--out", tmp_path, "--quiet")
        assert outcome.code == 0
        assert outcome.err == ""
        assert RunFolder(Path(outcome.out.rstrip("\n"))).summary.exists()

    def test_json_is_the_summary_and_the_folder(self, cli, tmp_path):
        outcome = cli("run", "pfedhn", *SMALL, "--out", tmp_path, "--json")
        result = json.loads(outcome.out)
        assert set(result) == {"folder", "round", "summary"}
        assert result["round"] == 4
        written = (Path(result["folder"]) / "summary.json").read_text()
        assert result["summary"] == json.loads(written)

    def test_takes_an_experiment_file(self, cli, trained, tmp_path):
        outcome = cli("run", trained / "config.toml", "--out", tmp_path, "--quiet")
        same_records(Path(outcome.out.rstrip("\n")), trained)

    def test_shows_progress_on_a_terminal(self, cli, tmp_path, monkeypatch):
        class Terminal(StringIO):
            def isatty(self) -> bool:
                return True

        for quiet in (False, True):
            terminal = Terminal()
            monkeypatch.setattr(sys, "stderr", terminal)
            monkeypatch.setenv("COLUMNS", "120")
            options = ["--quiet"] if quiet else []
            faults = ["faults.drop=1"]  # so that all are lost, which is exit code 1
            with pytest.raises(SystemExit, match="1"):
                main(["run", "pfedhn", *SMALL, *faults, "--out", str(tmp_path), *options])
            shown = terminal.getvalue()
            assert ("4/4" in shown) is not quiet
            assert ("val loss" in shown) is not quiet
            assert ("lost 4" in shown) is not quiet

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["pfehdn"], "did you mean pfedhn?"),
            (["pfedhn", "task.klients=4"], "did you mean task.clients?"),
            (["pfedhn", "rounds=0", "seed=-1"], "2 errors"),
            (["pfedhn", "task=digitz"], "did you mean 'digits'?"),
            (["pfedhn", "task.classes_per_client=11"], "11"),
            (["pfedhn", "task.clients=5000"], "lower task.clients"),
            (["missing.toml"], "missing.toml"),
        ],
        ids=str,
    )
    def test_refuses_wrong_settings_and_writes_nothing(self, cli, tmp_path, arguments, told):
        out = tmp_path / "runs"
        assert told in failure(cli("run", *arguments, "--out", out))
        assert not out.exists()

    def test_refuses_a_path_that_no_system_takes(self, cli):
        for path in (f"{'x' * 600}.toml", f"{'x' * 600}"):
            told = failure(cli("compare", path))
            assert "is too long" in told
            assert len(told) < 300

    def test_refuses_a_folder_that_cannot_be_made(self, cli, tmp_path):
        below = tmp_path / "a file"
        below.write_text("mine")
        assert str(below) in failure(cli("run", "pfedhn", *SMALL, "--out", below / "runs"))
        assert below.read_text() == "mine"

    def test_wrong_usage_is_the_users_input(self, cli):
        assert cli("run").code == 2
        assert cli("trian").code == 2

    def test_our_own_fault_is_in_the_log_with_a_traceback(self, tmp_path, monkeypatch):
        def broken(self: Any, clients: Any) -> None:
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(pfedhn.Server, "round", broken)
        # Uncaught, so Python prints it and exits with 1.
        with pytest.raises(RuntimeError, match="a fault of ours"):
            main(["run", "pfedhn", *SMALL, "--out", str(tmp_path)])
        (log,) = tmp_path.glob("*/*/log.txt")
        assert "Traceback" in log.read_text()
        assert "RuntimeError: a fault of ours" in log.read_text()


class TestRunAll:
    @pytest.mark.slow
    def test_every_method_trains_on_the_same_data_and_is_compared(self, cli, tmp_path):
        # Nobody joins: in a command of all methods none is told to train newcomers more briefly.
        keys = (*SMALL, "task.novel=0", "rounds=2")
        code, out, err = cli("run", "all", *keys, "--out", tmp_path, "--quiet")
        assert code == 0
        assert "left out" in err
        assert "rounds: must be at least 65, or itpfl does not come to its last phase" in err
        trained = [method for method in METHODS if method != "itpfl"]
        *_, last = lines = out.splitlines()
        assert last == str(tmp_path)
        assert [line.split()[0] for line in lines[-1 - len(trained) : -1]] == trained
        folders = {
            path.parent.parent.name: path.parent for path in tmp_path.glob("*/*/summary.json")
        }
        assert set(folders) == set(trained)
        summaries = [read_run(folder).summary or {} for folder in folders.values()]
        assert len({summary["data_fingerprint"] for summary in summaries}) == 1
        compared = json.loads(cli("compare", tmp_path, "--json").out)
        assert len(compared) == len(trained)

    def test_a_key_that_one_method_lacks_is_refused_before_anything_trains(self, cli, tmp_path):
        told = failure(cli("run", "all", "method.head_layers=1", "--out", tmp_path))
        assert "method.head_layers: must be a key of this run" in told
        assert list(tmp_path.iterdir()) == []


class TestSeveralSeeds:
    def test_each_is_trained_and_the_mean_and_spread_are_shown(self, cli, tmp_path):
        outcome = cli("run", "fedavg", *SMALL, "seed=3..4", "--out", tmp_path, "--json")
        assert outcome.err.splitlines() == ["fedavg, seed 3 (1 of 2)", "fedavg, seed 4 (2 of 2)"]
        found = json.loads(outcome.out)
        assert [result["summary"]["seed"] for result in found["runs"]] == [3, 4]
        one, other = (result["summary"]["test_accuracy"] for result in found["runs"])
        (spread,) = found["over_seeds"]
        assert (spread["method"], spread["seeds"]) == ("fedavg", [3, 4])
        assert spread["test_accuracy_mean"] == pytest.approx((one + other) / 2)
        assert spread["test_accuracy_std"] == pytest.approx(abs(one - other) / 2**0.5)

    def test_are_refused_in_one_run_at_sites_and_where_they_end_before_they_begin(
        self, cli, tmp_path
    ):
        wrong = ("fedavg", "seed=0..1", "engine=flower", "engine.superlink=here:1")
        assert "one method and one seed" in failure(cli("run", *wrong, "--out", tmp_path))
        assert "write seed=1..3" in failure(cli("run", "fedavg", "seed=3..1", "--out", tmp_path))
        assert not list(tmp_path.iterdir())


def test_a_home_directory_behind_an_equals_sign_is_found(cli, tmp_path, monkeypatch):
    """``--out=~/runs`` comes as it was typed, unlike ``--out ~/runs``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cli("run", "local", "rounds=1", "task.clients=2", "--out=~/runs", "--quiet").code == 0
    assert (tmp_path / "runs/local").is_dir()
    assert not (tmp_path / "~").exists()
    assert f"{tmp_path}/mine.npz" in cli("run", "local", "task.data=~/mine.npz").err


def test_a_run_that_lost_everybody_ends_with_one_sentence_and_1(cli, tmp_path):
    code, out, err = cli("run", "fedavg", *SMALL, "faults.drop=1.0", "--quiet", "--out", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: every client was lost in every round: client ")
    assert err.count("\n") == 1


class TestRecords:
    def test_log_has_a_line_for_each_evaluation_and_the_lost_clients(self, cli, tmp_path):
        faults = ("faults.drop=0.5", "cohort=3", "seed=1")
        outcome = cli("run", "pfedhn", *SMALL, *faults, "--out", tmp_path, "--quiet")
        folder = Path(outcome.out.rstrip("\n"))
        lines = (folder / "log.txt").read_text().splitlines()
        assert "0 of 4 rounds" in lines[0]
        assert "done after round 4" in lines[-1]
        found = [e for e in read_run(folder).evaluations if e.split == "test"]
        assert len(lines) == 2 + len(found)
        assert any(e.lost for e in found), "choose another seed"
        for line, e in zip(lines[1:-1], found, strict=True):
            assert f"round {e.round} of 4" in line
            assert f"{e.loss:.3f}" in line
            assert line.count("injected by faults.drop") == len(e.lost)
            assert all(f"client {lost.client} " in line for lost in e.lost)

    def test_tensorboard_has_the_evaluations(self, trained):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(trained / "tensorboard"))
        events.Reload()
        for e in read_run(trained).evaluations:
            if e.split == "novel":
                continue
            numbers = {
                f"accuracy/{e.split}": e.accuracy,
                f"loss/{e.split}": e.loss,
                f"worst_decile_accuracy/{e.split}": e.worst_decile_accuracy,
                "bytes/down": e.bytes_down,
                "bytes/up": e.bytes_up,
            }
            for name, number in numbers.items():
                values = {point.step: point.value for point in events.Scalars(name)}
                assert values[e.round] == pytest.approx(number, rel=1e-6), name

    def test_a_run_does_without_tensorboard(self, cli, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        outcome = cli("run", "pfedhn", *SMALL, "--out", tmp_path, "--quiet")
        assert outcome.code == 0
        assert not (Path(outcome.out.rstrip("\n")) / "tensorboard").exists()


class TestStopping:
    LONG = (*SMALL, "rounds=8", "evaluate_every=1", "method.local_steps=30", "checkpoint_every=5")

    @pytest.mark.slow
    def test_sigterm_stops_and_resume_ends_with_the_same_numbers(self, cli, tmp_path):
        arguments = ("run", "pfedhn", *self.LONG, "--out")
        with killed_at_the_end(started(*arguments, tmp_path / "stopped")) as process:
            folder = run_with_log(process, tmp_path / "stopped", "round 1 of 8")
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 3
        assert out == f"{folder}\n"
        assert "stopped after round" in err
        assert err.endswith(f"go on with: hyperfed resume {folder}\n")
        assert not RunFolder(folder).summary.exists()

        resumed = cli("resume", folder, "--quiet")
        assert resumed == (0, f"{folder}\n", "")
        whole = cli(*arguments, tmp_path / "whole", "--quiet")
        same_records(folder, Path(whole.out.rstrip("\n")))

    @pytest.mark.slow
    def test_a_second_ctrl_c_aborts_at_once(self, cli, tmp_path):
        endless = (*SMALL, "method.local_steps=1000000", "cohort=2", "engine.workers=2")
        with killed_at_the_end(started("run", "fedavg", *endless, "--out", tmp_path)) as process:
            folder = run_with_log(process, tmp_path, "0 of 4 rounds")
            assert process.stderr is not None
            process.send_signal(signal.SIGINT)
            while "stopping after this round" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 3
        assert out == f"{folder}\n"
        assert err == f"aborted; go on with: hyperfed resume {folder}\n"
        assert "aborted after round 0" in (folder / "log.txt").read_text()

    def test_a_run_whose_engine_is_lost_can_be_resumed(self, cli, tmp_path, monkeypatch):
        def lost(run: Run) -> None:
            raise EngineLostError("a machine is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Run, "_one_round", lost)
            code, out, err = cli("run", "fedavg", *SMALL, "--out", tmp_path, "--quiet")
        assert (code, err) == (3, f"a machine is gone; go on with: hyperfed resume {out}")
        assert cli("resume", out.rstrip("\n"), "--quiet").code == 0

    def test_handlers_are_restored(self, cli, tmp_path):
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in signals]
        cli("run", "pfedhn", *SMALL, "rounds=1", "--out", tmp_path, "--quiet")
        assert [signal.getsignal(number) for number in signals] == before

    @pytest.mark.slow
    def test_a_full_disk_is_the_users_to_mend(self, cli, trained, tmp_path):
        limit = (trained / "checkpoint" / "state.safetensors").stat().st_size // 2

        def small_disk() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        arguments = ("run", trained / "config.toml", "--out", tmp_path)
        with killed_at_the_end(started(*arguments, preexec_fn=small_disk)) as process:
            outcome = Outcome(0, *process.communicate(timeout=DEADLINE))
        told = failure(outcome._replace(code=process.returncode))
        assert "make room" in told
        (folder,) = (tmp_path / "config").iterdir()
        assert not list((folder / "checkpoint").iterdir())
        assert not RunFolder(folder).summary.exists()
        assert cli("resume", folder, "--quiet").code == 0  # there is room again
        same_records(folder, trained)


class TestResume:
    def test_refuses_a_finished_run(self, cli, trained):
        before = contents(trained)
        assert "must not be done" in failure(cli("resume", trained))
        assert contents(trained) == before

    @pytest.mark.parametrize("command", ["resume", "evaluate"])
    def test_refuses_a_folder_that_is_no_run(self, cli, tmp_path, command):
        assert str(tmp_path) in failure(cli(command, tmp_path))
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("command", ["resume", "evaluate"])
    def test_refuses_a_damaged_or_foreign_checkpoint(self, cli, copy, command):
        folder = RunFolder(copy)
        folder.summary.unlink()
        previous(folder.state).unlink()  # which it would go on from
        whole = folder.state.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        foreign = safetensors.torch.save({"weight": torch.zeros(3)})
        for content in (flipped, whole[:middle], b"", foreign):
            folder.state.write_bytes(content)
            before = contents(copy)
            assert "state.safetensors" in failure(cli(command, copy))
            assert contents(copy) == before


class TestEvaluate:
    def test_finds_what_the_run_recorded(self, cli, trained):
        before = contents(trained)
        found = json.loads(cli("evaluate", trained, "--json").out)
        assert contents(trained) == before
        record = read_run(trained)
        assert record.summary is not None
        assert list(found) == ["val", "test", "novel"]
        best = record.summary["best_round"]
        recorded = {e.split: e for e in record.evaluations if e.round == best}
        recorded["novel"] = record.evaluations[-1]
        for split, evaluation in found.items():
            assert evaluation["client_accuracy"] == list(recorded[split].client_accuracy)
            assert evaluation["loss"] == recorded[split].loss
            assert evaluation["round"] == best

    def test_shows_a_line_for_each_split(self, cli, trained):
        outcome = cli("evaluate", trained)
        lines = outcome.out.splitlines()
        assert [line.split()[0] for line in lines] == ["split", "val", "test", "novel"]
        summary = read_run(trained).summary
        assert summary is not None
        assert f"{100 * summary['test_accuracy']:.1f}" in lines[2].split()

    def test_serves_novel_clients_otherwise_and_changes_nothing(self, cli, trained):
        before = contents(trained)
        only = json.loads(cli("evaluate", trained, "--novel", "--json").out)
        assert list(only) == ["novel"]
        few = json.loads(cli("evaluate", trained, "--novel", "--samples", 3, "--json").out)
        twice = json.loads(cli("evaluate", trained, "--novel", "--draws", 2, "--json").out)
        assert few["novel"]["clients"] == only["novel"]["clients"]
        assert few["novel"]["loss"] != only["novel"]["loss"]
        assert twice["novel"]["count"] == [2 * count for count in only["novel"]["count"]]
        otherwise = ("method.novel_models=ensemble", "task.unlabelled=true")
        mixed = json.loads(cli("evaluate", trained, *otherwise, "--json").out)
        assert list(mixed) == ["val", "test", "novel"]
        tuned = json.loads(cli("evaluate", trained, "serve.finetune_steps=3", "--json").out)
        plain = json.loads(cli("evaluate", trained, "serve.finetune_steps=0", "--json").out)
        assert all(tuned[split]["loss"] != plain[split]["loss"] for split in mixed)
        assert plain["novel"]["loss"] == only["novel"]["loss"]
        assert contents(trained) == before

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["rounds=9"], "to change after training"),
            (["method.hidden=7"], "must not change what was trained"),
            (["task.unlabelled=true"], "needs labels"),
            (["task.unlabelled=true", "serve.finetune_steps=3"], "finetune_steps must be 0"),
            (["--samples", 100_000], "samples must be 1 to"),
            (["--draws", 0], "draws must be at least 1"),
        ],
    )
    def test_refuses_to_serve_in_a_way_that_needs_other_training(
        self, cli, trained, arguments, told
    ):
        assert told in failure(cli("evaluate", trained, *arguments))

    def test_refuses_a_run_without_an_evaluation(self, cli, copy):
        for name in ("checkpoint/state.safetensors", "metrics.jsonl", "summary.json"):
            (copy / name).unlink()
        previous(copy / "checkpoint" / "state.safetensors").unlink()
        assert "first evaluation" in failure(cli("evaluate", copy))


class TestPersonalize:
    @pytest.fixture
    def ask_for_a_model(self, cli, trained, tmp_path) -> Callable[..., Outcome]:
        """Asks for a model with the data that a function writes; checks that there is none."""

        def ask(write: Callable[[Path], None]) -> Outcome:
            data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
            write(data)
            outcome: Outcome = cli("personalize", trained, "--data", data, "--out", out)
            assert not out.exists()
            return outcome

        return ask

    @pytest.mark.parametrize("method", ["pfedhn", "fedavg"])
    def test_writes_the_model_of_a_client_never_seen(self, cli, tmp_path, client_data, method):
        folder = cli("run", method, *SMALL, "--out", tmp_path, "--quiet").out.rstrip("\n")
        data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
        np.savez(data, **client_data)
        outcome = cli("personalize", folder, "--data", data, "--out", out)
        assert outcome == (0, f"{out}\n", "")
        expected = Run.open(Path(folder)).personalize(**client_data).state_dict()
        written = safetensors.torch.load_file(out)
        weights = {f"model.{name}": value for name, value in expected.items()}
        assert written.keys() == {*weights, "normalize.scale", "normalize.shift"}
        assert all(torch.equal(written[name], weights[name]) for name in weights)

    def test_needs_no_labels_where_the_method_does_not(self, cli, tmp_path, client_data):
        folder = cli("run", "fedavg", *SMALL, "--out", tmp_path, "--quiet").out.rstrip("\n")
        data, out = tmp_path / "mine.npz", tmp_path / "model.safetensors"
        np.savez(data, x=client_data["x"])
        outcome = cli("personalize", folder, "--data", data, "--out", out, "--json")
        assert json.loads(outcome.out) == {
            "model": str(out),
            "examples": len(client_data["x"]),
            "labelled": False,
        }
        assert out.exists()

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda x, y: {"x": x, "y": y + 5}, "labels must lie in 0..9"),
            (lambda x, y: {"x": np.full(x.shape, np.nan), "y": y}, "finite"),
            (lambda x, y: {"x": x[..., :-1], "y": y}, "x must hold examples like the task's"),
            (lambda x, y: {"x": x, "y": y[:-1]}, "same number of rows"),
            (lambda x, y: {"x": x}, "labels"),
            (
                lambda x, y: {"images": x, "y": y},
                "are images, y:\n- features must be some of them, got 'x'",
            ),
        ],
        ids=["labels out of range", "NaN", "wrong shape", "lengths", "unlabelled", "no x"],
    )
    def test_refuses_data_that_do_not_fit(self, ask_for_a_model, client_data, change, told):
        def write(data: Path) -> None:
            np.savez(data, **change(**client_data))

        assert told in failure(ask_for_a_model(write))

    @pytest.mark.parametrize("content", [None, b"not an archive", b"PK\x03\x04 cut short"])
    def test_refuses_what_is_no_archive(self, ask_for_a_model, content):
        def write(data: Path) -> None:
            if content is not None:
                data.write_bytes(content)

        assert "mine.npz" in failure(ask_for_a_model(write))

    def test_refuses_a_file_that_cannot_be_written(self, cli, trained, tmp_path, client_data):
        data, out = tmp_path / "mine.npz", tmp_path / "missing" / "model.safetensors"
        np.savez(data, **client_data)
        assert "writable" in failure(cli("personalize", trained, "--data", data, "--out", out))


class TestExport:
    def test_the_model_of_a_known_and_of_a_novel_client(self, cli, trained, tmp_path):
        for client in (1, 3):
            out = tmp_path / f"{client}.safetensors"
            outcome = cli("export", trained, "--client", client, "--out", out)
            assert outcome == (0, f"{out}\n", "")
            expected = Run.open(trained).model(client).state_dict()
            written = safetensors.torch.load_file(out)
            assert all(torch.equal(written[f"model.{name}"], expected[name]) for name in expected)
            assert written.keys() - {f"model.{name}" for name in expected} == {
                "normalize.scale",
                "normalize.shift",
            }

    def test_where_it_is_not_said_the_file_is_named_by_client_and_format(
        self, cli, trained, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        outcome = cli("export", trained, "--client", "0", "--json")
        assert json.loads(outcome.out) == {
            "model": "client-0.safetensors",
            "client": "0",
            "format": "safetensors",
        }
        assert [path.name for path in tmp_path.iterdir()] == ["client-0.safetensors"]

    def test_the_files_ending_says_the_format(self, cli, trained, tmp_path):
        program, other = tmp_path / "a.pt2", tmp_path / "a.bin"
        assert cli("export", trained, "--client", 0, "--out", program).code == 0
        assert torch.export.load(program).module() is not None
        assert "or the file end in" in failure(
            cli("export", trained, "--client", 0, "--out", other)
        )
        assert not other.exists()

    def test_refuses_a_client_that_is_not_there(self, cli, trained, tmp_path):
        for client in ("4", "nobody"):
            failure(cli("export", trained, "--client", client, "--out", tmp_path / "a.onnx"))
        assert not list(tmp_path.iterdir())


class TestExportPartition:
    def test_what_it_writes_is_read_back(self, cli, tmp_path):
        out, experiment = tmp_path / "dealt.csv", tmp_path / "mine.toml"
        settings = ("task.clients=4", "task.novel=0.25", "seed=2")
        outcome = cli("export-partition", "fedavg", *settings, "--out", out, "--json")
        assert (outcome.code, outcome.err) == (0, "")
        dealt = build(TaskConfig(clients=4, novel=0.25), seed=2)
        assert json.loads(outcome.out) == {
            "partition": str(out),
            "clients": 4,
            "examples": {
                side: sum(map(len, getattr(dealt, side))) for side in ("train", "val", "test")
            },
        }
        # A path in an experiment begins at its own folder.
        experiment.write_text(
            'method = "fedavg"\n[task]\npartition = "file"\npartition_file = "dealt.csv"\n'
        )
        again = tmp_path / "again.csv"
        outcome = cli("export-partition", experiment, "task.clients=4", "--out", again)
        assert outcome == (0, f"{again}\n", "")
        assert again.read_text() == out.read_text()

    def test_refuses_data_that_are_elsewhere(self, cli, tmp_path):
        out = tmp_path / "dealt.npz"
        told = failure(cli("export-partition", "fedavg", "engine=flower", "--out", out))
        assert "must be of data that are here" in told
        assert not out.exists()


class TestCompare:
    def test_has_a_row_for_each_run(self, cli, trained):
        outcome = cli("compare", trained, trained.parent, "--json")  # the same one, named twice
        assert outcome.err == ""
        (row,) = json.loads(outcome.out)
        summary = read_run(trained).summary
        assert summary is not None
        assert row.pop("folder") == str(trained)
        assert (row.pop("label"), row.pop("group")) == ("pfedhn", "pfedhn")
        none = dict.fromkeys(("to_best", "novel_to_best", "over_local"))
        paired = {"label": "pfedhn", "best": "pfedhn"} | none
        assert row.pop("paired") == paired
        assert row.pop("settings")["method.local_steps"] == 2
        assert row == {name: summary[name] for name in row}

    def test_warns_where_the_data_differ_and_draws(self, cli, trained, other, tmp_path):
        figure, page = tmp_path / "figure.png", tmp_path / "page.html"
        files = ("--figure", figure, "--html", page, "--x", "mb")
        outcome = cli("compare", trained, other, *files)
        assert outcome.code == 0
        assert "different data" in outcome.err
        lines = outcome.out.splitlines()
        *_, first, second = lines[:-2]
        assert lines[-2:] == [str(figure), str(page)]
        assert (first.split()[0], second.split()[0]) == ("pfedhn", "fedavg")
        start = next(n for n, line in enumerate(lines) if line.startswith("task.clients"))
        assert lines[start].split() == ["task.clients", "4", "pfedhn"]
        assert lines[start + 1].split() == ["5", "fedavg"]
        assert '"axis": "mb"' in page.read_text()
        assert figure.read_bytes().startswith(b"\x89PNG")

    def test_has_means_over_seeds_where_there_are_several(self, cli, trained, copy):
        line = "mean ± sd over seeds"
        assert line not in cli("compare", trained).out
        for name in ("config.toml", "summary.json"):
            text = (copy / name).read_text()
            (copy / name).write_text(
                text.replace("seed = 0", "seed = 1").replace('"seed": 0', '"seed": 1')
            )
        _, _, means = cli("compare", trained, copy).out.partition(line)
        (row,) = [told.split() for told in means.splitlines() if told.startswith("pfedhn  ")]
        assert row[1:4] == ["2", f"{100 * read_run(trained).summary['test_accuracy']:.1f}", "±"]

    def test_compares_the_seeds_of_methods_together(self, cli, trained, copy, other):
        assert cli("compare", trained, other).out.count("the best") == 0  # other data
        folders = [trained, *(copy.with_name(f"like {number}") for number in range(3))]
        for number, folder in enumerate(folders[1:], 1):
            shutil.copytree(trained, folder)
            for name in ("config.toml", "summary.json"):
                text = (folder / name).read_text()
                text = text.replace("seed = 0", f"seed = {number % 2}")
                text = text.replace('"seed": 0', f'"seed": {number % 2}')
                text = text.replace("local_steps = 2", f"local_steps = {2 + number // 2}")
                (folder / name).write_text(text)
        lines = cli("compare", *folders).out.splitlines()
        heads = [number for number, line in enumerate(lines) if "the best" in line]
        last = [line.split()[:2] for line in lines[heads[-1] + 1 :]]
        assert len(heads) == 2
        assert last == [["pfedhn", "local_steps=2"], ["pfedhn", "local_steps=3"]]

    def test_compares_as_of_a_budget(self, cli, trained, other):
        outcome = cli("compare", trained, other, "--at", "rounds=2", "--json")
        assert "as of rounds=2 at most" in outcome.err
        rows = json.loads(outcome.out)
        assert [row["rounds"] for row in rows] == [2, 2]
        assert failure(cli("compare", trained, "--at", "epochs")).count("epochs") == 1

    def test_leaves_out_what_is_not_done(self, cli, trained, copy):
        RunFolder(copy).summary.unlink()
        outcome = cli("compare", trained, copy, "--json")
        assert f"not done: {copy}" in outcome.err
        assert len(json.loads(outcome.out)) == 1
        outcome = cli("compare", copy)
        assert outcome.code == 2
        assert "error: a run to compare must be done" in outcome.err

    def test_refuses_an_axis_that_is_not_there(self, cli, trained, tmp_path):
        wrong = ("--x", "epochs", "--figure", tmp_path / "figure.png")
        assert "must be one of rounds, client-visits" in failure(cli("compare", trained, *wrong))
        assert not list(tmp_path.iterdir())

    def test_refuses_a_folder_without_runs(self, cli, tmp_path):
        assert str(tmp_path) in failure(cli("compare", tmp_path))
        assert "missing" in failure(cli("compare", tmp_path / "missing"))


class TestList:
    def test_methods_with_what_they_are_and_their_presets(self, cli):
        entries = {e["method"]: e for e in json.loads(cli("list", "methods", "--json").out)}
        assert entries.keys() == METHODS.keys()
        assert entries["pfedhn"]["about"].startswith("pFedHN (Shamsian et al.")
        assert entries["pfedhn"]["presets"] == ["default", "paper", "official", "pefll"]
        assert "default, paper, official, pefll" in cli("list", "methods").out

    def test_partitions_are_those_a_task_takes(self, cli):
        names = [e["partition"] for e in json.loads(cli("list", "partitions", "--json").out)]
        assert set(names) == set(PARTITIONS)
        assert set(catalogue.PARTITIONS) == set(names) - {"natural", "file"}

    def test_datasets(self, cli):
        names = [e["dataset"] for e in json.loads(cli("list", "datasets", "--json").out)]
        assert {"digits", "cifar10", "shakespeare"} <= set(names)

    def test_keys_of_a_method_with_type_default_and_meaning(self, cli):
        found = {e["key"]: e for e in json.loads(cli("list", "keys", "pefll", "--json").out)}
        assert found["method.local_clip"] == {
            "key": "method.local_clip",
            "type": "float > 0 | none",
            "default": "50.0",
            "about": "bound of the gradient's norm in a local step; none by default.",
        }
        assert found["cohort"]["default"] == "5"  # of the method's default preset
        assert found["task.novel"]["type"] == "int | float"
        everyones = [e["key"] for e in json.loads(cli("list", "keys", "--json").out)]
        assert everyones == [key for key in found if not key.startswith("method.")]
        assert "did you mean pefll" in failure(cli("list", "keys", "peffl"))

    def test_models_with_what_a_task_can_set_of_them(self, cli):
        found = {e["model"]: e for e in json.loads(cli("list", "models", "--json").out)}
        assert found.keys() == TARGETS.keys()
        assert found["lenet"]["options"] == ["task.width", "task.hidden"]

    def test_everything_where_nothing_is_named(self, cli, tmp_path):
        found = json.loads(cli("list", "--folder", tmp_path, "--json").out)
        assert list(found) == [str(kind) for kind in catalogue.Kind]
        shown = cli("list", "--folder", tmp_path).out.splitlines()
        assert {"pefll", "cifar10", "dirichlet", "lenet", "rounds"} <= {
            line.split()[0] for line in shown if line
        }

    def test_experiments_of_a_folder(self, cli, tmp_path):
        (tmp_path / "paper").mkdir()
        (tmp_path / "paper" / "table1.toml").write_text('method = "pfedhn"\n')
        (tmp_path / "table2.toml").write_text('[method]\nname = "local"\n')
        (tmp_path / "table3.toml").write_text(
            '[table]\npaper = ""\ntitle = ""\nset.method.lr = 0.1\n[measures]\n'
            '[columns.a]\nabout = ""\n[rows.local]\nabout = ""\n[rows.b]\nabout = ""\n'
            'set.method = "fedavg"\n'
        )
        (tmp_path / "table4.toml").write_text("[rows.local]\n")
        entries = json.loads(cli("list", "experiments", "--folder", tmp_path, "--json").out)
        assert entries == [
            {"experiment": str(tmp_path / "paper" / "table1.toml"), "method": "pfedhn"},
            {"experiment": str(tmp_path / "table2.toml"), "method": "local"},
            {"experiment": f"{tmp_path / 'table3.toml'}:a-local", "method": "local"},
            {"experiment": f"{tmp_path / 'table3.toml'}:a-b", "method": "fedavg"},
            {
                "experiment": str(tmp_path / "table4.toml"),
                "method": "(no experiment that can be read)",
            },
        ]

    def test_says_where_there_is_nothing(self, cli, tmp_path):
        outcome = cli("list", "experiments", "--folder", tmp_path)
        assert outcome == (0, "", f"no experiments in {tmp_path}\n")
        assert cli("list", "experiments", "--folder", tmp_path, "--json").out == "[]\n"


class TestHelp:
    def test_says_what_is_required_and_asks_once(self, cli):
        outcome = cli("resume", "--help")
        assert "The folder of a run.  [required]" in outcome.out
        assert "\\[" not in outcome.out
        wrong = cli("lsit")
        assert (wrong.code, wrong.err.count("Did you mean")) == (2, 1)

    @pytest.mark.parametrize(
        ("words", "begun", "completed"),
        [
            (["run"], "fedr", {"fedrep"}),
            (["run"], "al", {"all"}),
            (["run", "pefll"], "method.local_c", {"method.local_clip="}),
            (["run", "fedavg"], "method.desc", set()),
            (["run", "pefll"], "task.partition=dirichlet_", {
                "task.partition=dirichlet_equal",
                "task.partition=dirichlet_per_class",
            }),
            (["run", "pefll"], "task=cifar100_", {"task=cifar100_coarse"}),
            (["run", "pefll"], "task.model=lenet_", {"task.model=lenet_bn"}),
            (["run", "pefll"], "engine.graphs=t", {"engine.graphs=true"}),
            (["list", "keys"], "pfedhn_", {"pfedhn_pc"}),
        ],
    )  # fmt: skip
    def test_the_shell_completes(self, words, begun, completed):
        group = typer.main.get_command(app)
        shell = ShellComplete(group, {}, "hyperfed", "_HYPERFED_COMPLETE")
        assert {item.value for item in shell.get_completions(words, begun)} == completed


class TestPackage:
    def test_version(self, cli):
        assert cli("--version") == (0, f"hyperfed {hyperfed.__version__}\n", "")

    @pytest.mark.slow
    def test_importing_the_command_line_imports_nothing_rarely_needed(self):
        heavy = "{'datasets', 'matplotlib', 'scipy', 'sklearn', 'tensorboard'}"
        code = (
            "import sys, hyperfed; assert 'torch' not in sys.modules; import hyperfed.apps.cli; "
            f"assert not {heavy} & sys.modules.keys(), {heavy} & sys.modules.keys()"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)

    def test_names_are_those_of_their_modules(self):
        assert hyperfed.Task is own.Task
        assert issubclass(hyperfed.Task, tasks.Task)
        assert isinstance(build(TaskConfig(clients=4), seed=0), hyperfed.Task)
        assert hyperfed.Run is Run
        assert all(hasattr(hyperfed, name) for name in hyperfed.__all__)
        with pytest.raises(AttributeError, match="nonsense"):
            _ = hyperfed.nonsense

    def test_a_run_in_memory_writes_nothing(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        keys: dict[str, Any] = {"task": {"clients": 4}, "method": {"local_steps": 1}}
        run = hyperfed.train("pfedhn", rounds=2, evaluate_every=1, **keys)
        assert [e.round for e in run.evaluations if e.split == "val"] == [1, 2]
        assert run.summary["rounds"] == 2
        assert not list(tmp_path.iterdir())

    def test_a_run_can_be_opened_and_resumed_in_python(self, trained, copy):
        assert hyperfed.open_run(str(trained)).round == 4
        with pytest.raises(hyperfed.UserError, match="must not be done"):
            hyperfed.resume(str(trained))
        RunFolder(copy).summary.unlink()
        (copy / "checkpoint" / "state.safetensors").unlink()
        assert hyperfed.resume(copy).summary["rounds"] == 4
        same_records(copy, trained)

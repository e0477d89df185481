"""Commands that train: one run, every method, several seeds, and what is told where it fails."""

import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.cli.checks import SMALL, failure, same_records
from hyperfed.apps.cli import main
from hyperfed.errors import LostEverybodyError, UserError
from hyperfed.methods import METHODS, pfedhn
from hyperfed.runs.folder import RunFolder, read_run
from hyperfed.runs.run import Run

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


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

    def test_says_what_privacy_was_spent(self, cli, tmp_path):
        keys = (*SMALL, "privacy.epsilon=8", "privacy.delta=1e-4")
        outcome = cli("run", "fedavg", *keys, "--out", tmp_path)
        told = "private: epsilon 8 at delta 0.0001 was spent by the client that spent most; noise "
        assert outcome.err.startswith(told)
        assert told in RunFolder(Path(outcome.out.splitlines()[-1])).log.read_text()

    @pytest.mark.parametrize("quiet", [True, False])
    def test_says_that_clients_are_made_up(self, cli, tmp_path, quiet):
        np.savez(tmp_path / "own.npz", x=np.zeros((40, 3)), y=np.arange(40) % 2, who=np.arange(40))
        keys = (f"task={tmp_path / 'own.npz'}", "task.clients=4", "task.novel=0", "rounds=1")
        asked = ("run", "fedavg", *keys, "task.features=x", "--out", tmp_path / "runs")
        outcome = cli(*asked, *(["--quiet"] if quiet else []))
        assert ("the 4 clients are made up" in outcome.err) is not quiet

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
            (["pfehdn"], "did you mean 'pfedhn'?"),
            (["pfedhn", "task.klients=4"], "did you mean 'task.clients'?"),
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

    def test_a_path_that_is_not_there_is_told_apart_from_one_without_runs(self, cli, tmp_path):
        assert "hold some, but holds none" in failure(cli("compare", tmp_path))
        assert "hold some, but is not there" in failure(cli("compare", tmp_path / "gone"))

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

    def test_what_is_to_be_said_of_a_run_is_said_of_each(self, cli, tmp_path):
        keys = (*SMALL, "rounds=2", "privacy.epsilon=20", "privacy.clip=1", "seed=0..1")
        code, _, err = cli("run", "fedavg", *keys, "--out", tmp_path)
        assert code == 0
        assert err.count("private: epsilon ") == 2

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
        assert "one seed and nothing tried" in failure(cli("run", *wrong, "--out", tmp_path))
        assert "write seed=1..3" in failure(cli("run", "fedavg", "seed=3..1", "--out", tmp_path))
        assert not list(tmp_path.iterdir())


class TestTried:
    def test_each_value_is_trained_with_each_seed_and_the_best_is_named(self, cli, tmp_path):
        grid = ("--try", "method.local_lr=1e-5,0.05", "--try", "method.batch_size=8,4")
        code, out, err = cli("run", "fedper", *SMALL, "seed=3..4", *grid, "--out", tmp_path)
        assert code == 0
        begun = [line for line in err.splitlines() if line.startswith("fedper, ")]
        assert len(begun) == 8
        assert begun[1] == "fedper, seed 4, method.local_lr=1e-5, method.batch_size=8 (2 of 8)"
        *_, told, folder = out.splitlines()
        assert told.startswith("fedper: best by validation data with method.local_lr=0.05 ")
        assert folder == str(tmp_path)
        runs = [read_run(path.parent).config for path in tmp_path.glob("*/*/summary.json")]
        found = {(c["seed"], c["method"]["local_lr"], c["method"]["batch_size"]) for c in runs}
        assert found == {(s, lr, b) for s in (3, 4) for lr in (1e-5, 0.05) for b in (8, 4)}

    def test_methods_are_tried_as_all_else_is(self, cli, tmp_path):
        grid = ("--try", "method=local,fedper")
        code, _, err = cli("run", "fedavg", *SMALL, "task.novel=0", *grid, "--out", tmp_path)
        assert code == 0
        begun = ["local, method=local (1 of 2)", "fedper, method=fedper (2 of 2)"]
        assert [line for line in err.splitlines() if line in begun] == begun
        assert {path.name for path in tmp_path.iterdir()} == {"local", "fedper"}

    def test_one_of_all_methods_is_not_named_again(self, cli, tmp_path):
        for again in (["method=fedper"], ["--try", "method=fedper,local"]):
            told = failure(cli("run", "all", *again, "--out", tmp_path))
            assert 'method: must be named once, came "local" and "fedper"' in told

    def test_what_diverges_is_left_out_unless_all_does(self, cli, tmp_path):
        with_rates = ("--try", "method.local_lr=1e30,0.05", "--out", tmp_path)
        code, out, err = cli("run", "fedavg", *SMALL, *with_rates)
        assert code == 0
        assert "warning: left out: fedavg, method.local_lr=1e30: every client was lost" in err
        assert "best by validation data with method.local_lr=0.05" in out
        assert "; method.local_lr=0.05 is the least tried: try less\n" in out
        worse = ("--try", "method.local_lr=1e30,1e31", "--out", tmp_path)
        code, out, err = cli("run", "fedavg", *SMALL, *worse, "--quiet")
        assert (code, out) == (1, "")
        assert err.splitlines()[-1].startswith("error: every client was lost")

    def test_of_several_seeds_one_that_diverges_keeps_none_from_its_end(
        self, cli, tmp_path, monkeypatch
    ):
        whole = Run._one_round

        def lost(run: Run) -> None:
            if run.config.seed == 3:
                raise LostEverybodyError("all are gone")
            whole(run)

        monkeypatch.setattr(Run, "_one_round", lost)
        code, out, err = cli("run", "fedavg", *SMALL, "seed=3..4", "--out", tmp_path, "--json")
        assert code == 1
        assert "warning: left out: fedavg, seed 3: all are gone" in err
        assert [result["summary"]["seed"] for result in json.loads(out)["runs"]] == [4]

    @pytest.mark.parametrize("tried", [["seed=3..4"], ["--try", "method.local_lr=0.1,0.05"]])
    @pytest.mark.parametrize("falls", ["one", "all"])
    def test_a_fault_in_one_run_keeps_no_other_from_its_end_and_is_told_whole(
        self, cli, tmp_path, monkeypatch, tried, falls
    ):
        whole, begun = Run._one_round, []

        def faulty(run: Run) -> None:
            begun.append(run)
            if falls == "all" or run is begun[0]:
                raise RuntimeError("not enough memory")
            whole(run)

        monkeypatch.setattr(Run, "_one_round", faulty)
        code, out, err = cli("run", "fedavg", *SMALL, *tried, "--out", tmp_path)
        assert code == 1
        assert "in faulty\n" in err
        assert "RuntimeError: not enough memory\n" in err
        told = [line for line in err.splitlines() if line.startswith("warning: left out: fedavg, ")]
        assert len(told) == (1 if falls == "one" else 2)
        again = told[0].rpartition("; go on with: hyperfed resume ")[2]
        ended = [path.parent for path in tmp_path.rglob("summary.json")]
        assert len(ended) == (1 if falls == "one" else 0)
        assert bool(out) == (falls == "one")
        assert "error:" not in err  # which is for what a user has to mend
        monkeypatch.setattr(Run, "_one_round", whole)
        assert cli("resume", again, "--quiet").code == 0
        assert (Path(again) / "summary.json").exists()

    def test_what_the_user_must_mend_ends_all_at_once(self, cli, tmp_path, monkeypatch):
        def refused(run: Run) -> None:
            raise UserError("the disk must have room")

        monkeypatch.setattr(Run, "_one_round", refused)
        code, _, err = cli("run", "fedavg", *SMALL, "seed=3..4", "--out", tmp_path)
        assert code == 2
        assert err.count("of 2)") == 1
        assert err.splitlines()[-1] == "error: the disk must have room"


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

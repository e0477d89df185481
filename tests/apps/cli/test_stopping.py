"""Runs that are stopped, by a signal or a full disk, and ``hyperfed resume``."""

import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from apps.cli.checks import DEADLINE, SMALL, Outcome, contents, failure, same_records
from hyperfed.apps.flower import submit
from hyperfed.errors import EngineLostError
from hyperfed.runs import config
from hyperfed.runs.folder import RunFolder, read_run
from hyperfed.runs.run import Run
from hyperfed.trees.checkpoints import previous

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


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

    def test_a_run_goes_on_on_the_device_it_is_told(self, cli, copy):
        RunFolder(copy).summary.unlink()
        settings = RunFolder(copy).config
        settings.write_text(settings.read_text().replace('device = "cpu"', 'device = "cuda:63"'))
        refused = cli("resume", copy)
        assert refused.code == 2
        assert "must go on with a device that is here, came cuda:63; name one" in refused.err
        assert "hyperfed resume RUN device=cpu" in refused.err
        assert cli("resume", copy, "device=cuda:62").err.count("came cuda:62; name one") == 1
        assert cli("resume", copy, "device=cpu", "--quiet") == (0, f"{copy}\n", "")
        assert config.load(str(settings)).device == "cpu"

    def test_the_server_of_sites_goes_on_on_the_device_it_is_told(self, cli, copy, monkeypatch):
        RunFolder(copy).summary.unlink()
        settings = config.load(str(RunFolder(copy).config))
        engine = replace(settings.engine, name="flower")
        config.dump(replace(settings, engine=engine), RunFolder(copy).config)
        submitted = []
        monkeypatch.setattr(submit, "train", lambda loaded, *_: submitted.append(loaded.device))
        assert cli("resume", copy, "device=cuda").code == 0
        assert cli("resume", copy).code == 0
        assert submitted == ["cuda", "cpu"]

    def test_a_run_whose_engine_is_lost_can_be_resumed(self, cli, tmp_path, monkeypatch):
        def lost(run: Run) -> None:
            raise EngineLostError("a machine is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Run, "_one_round", lost)
            code, out, err = cli("run", "fedavg", *SMALL, "--out", tmp_path, "--quiet")
        assert (code, err) == (3, f"a machine is gone; go on with: hyperfed resume {out}")
        assert cli("resume", out.rstrip("\n"), "--quiet").code == 0

    def test_what_was_not_begun_is_said(self, cli, tmp_path, monkeypatch):
        whole = Run._one_round

        def stopped(run: Run) -> None:
            whole(run)
            if (run.config.method, run.config.seed) in (("local", 2), ("fedavg", 4)):
                run.stop()

        monkeypatch.setattr(Run, "_one_round", stopped)
        keys = (*SMALL, "task.novel=0", "rounds=2")
        err = cli("run", "fedavg", *keys, "seed=3..6", "--out", tmp_path, "--quiet").err
        *_, first, last = err.splitlines()
        assert "; go on with: hyperfed resume " in first
        assert first.endswith("-seed4")
        told = "not begun: seed=5..6; then run: "
        assert last.startswith(told)
        command = shlex.split(last.removeprefix(told))
        assert command == ["hyperfed", "run", "fedavg", *keys, "seed=5..6", "--out", str(tmp_path)]
        err = cli("run", "fedavg", *keys, "seed=3..4", "--out", tmp_path, "--quiet").err
        assert "not begun" not in err
        err = cli("run", "all", *keys, "seed=2", "--out", tmp_path, "--quiet").err
        assert err.splitlines()[-1].startswith("not begun: fedavg seed=2, fedprox seed=2, ")
        tried = ("--try", "method.local_lr=0.1,0.2", "seed=4..5", "--out", tmp_path, "--quiet")
        err = cli("run", "fedavg", *keys, *tried).err
        assert err.splitlines()[-1] == (
            "not begun: fedavg method.local_lr=0.1 seed=5, fedavg method.local_lr=0.2 seed=4, "
            "fedavg method.local_lr=0.2 seed=5"
        )

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

    def test_gives_a_finished_run_more_rounds(self, cli, copy):
        rounds = read_run(copy).summary["rounds"] + 1
        assert f"more than its {rounds - 1} rounds" in failure(cli("resume", copy, "rounds=1"))
        assert cli("resume", copy, f"rounds={rounds}", "--quiet").code == 0
        assert read_run(copy).summary["rounds"] == rounds

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

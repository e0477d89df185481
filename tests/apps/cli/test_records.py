"""What a run leaves beside its numbers: the log and TensorBoard's events."""

import sys
from pathlib import Path

import pytest

from apps.cli.checks import SMALL
from hyperfed.runs.folder import read_run

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


class TestRecords:
    def test_log_has_a_line_for_each_evaluation_and_the_lost_clients(self, cli, tmp_path):
        faults = ("faults.drop=0.5", "cohort=3", "seed=1")
        outcome = cli("run", "pfedhn", *SMALL, *faults, "--out", tmp_path, "--quiet")
        folder = Path(outcome.out.rstrip("\n"))
        lines = (folder / "log.txt").read_text().splitlines()
        assert "0 of 4 rounds" in lines[0]
        assert "Task digits: 1,797 examples of 1 x 8 x 8 for 10 classes" in lines[1]
        assert "done after round 4" in lines[-1]
        found = [e for e in read_run(folder).evaluations if e.split == "test"]
        assert len(lines) == 5 + len(found)  # a task is three lines
        assert any(e.lost for e in found), "choose another seed"
        for line, e in zip(lines[4:-1], found, strict=True):
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

"""The package beside its command line: its version, its names, and runs from Python."""

import subprocess
import sys
from typing import Any

import pytest

import hyperfed
from apps.cli.checks import DEADLINE, same_records
from hyperfed import task as tasks
from hyperfed.data import own
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.run import Run

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


class TestPackage:
    def test_version(self, cli):
        assert cli("--version") == (0, f"hyperfed {hyperfed.__version__}\n", "")

    @pytest.mark.slow
    def test_importing_the_command_line_imports_nothing_rarely_needed(self):
        heavy = {"datasets", "flwr", "matplotlib", "pandas", "ray", "scipy", "sklearn"}
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

    def test_a_run_says_what_it_is(self, trained, copy):
        run = hyperfed.open_run(trained)
        assert repr(run).splitlines() == [
            "Run of pfedhn on digits: 4 of 4 rounds",
            f"test accuracy: {100 * run.summary['test_accuracy']:.1f} %",
            f"in {trained}",
        ]
        (copy / "summary.json").unlink()
        begun = repr(hyperfed.open_run(copy)).splitlines()
        assert begun == ["Run of pfedhn on digits: 4 of 4 rounds", f"in {copy}"]

    def test_runs_are_compared_in_python(self, trained, copy, caplog):
        run = hyperfed.open_run(trained)
        (copy / "summary.json").unlink()
        found = hyperfed.compare(str(trained.parent), run, copy)
        assert found["label"].tolist() == ["pfedhn (1)", "pfedhn (2)"]
        assert found["test_accuracy"].tolist() == [run.summary["test_accuracy"]] * 2
        assert caplog.messages == [f"left out, not done: {copy}"]
        with pytest.raises(hyperfed.UserError, match="there must be finished runs"):
            hyperfed.compare(copy)
        with pytest.raises(hyperfed.UserError, match="must be a run's folder or hold some"):
            hyperfed.compare(trained / "checkpoint")
        for wrong in ([run, run], {"a": run}, None):
            with pytest.raises(hyperfed.UserError, match=r"one after another, .*compare\(\*runs\)"):
                hyperfed.compare(wrong)

    def test_a_run_can_be_opened_and_resumed_in_python(self, trained, copy):
        assert hyperfed.open_run(str(trained)).round == 4
        for again in (hyperfed.open_run, hyperfed.resume):
            with pytest.raises(hyperfed.UserError, match=r"must be a hyperfed.Task, got .*rounds"):
                again(trained, {"rounds": 9})
        with pytest.raises(hyperfed.UserError, match="must not be done"):
            hyperfed.resume(str(trained))
        RunFolder(copy).summary.unlink()
        (copy / "checkpoint" / "state.safetensors").unlink()
        assert hyperfed.resume(copy).summary["rounds"] == 4
        same_records(copy, trained)

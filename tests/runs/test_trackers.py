"""Where numbers go besides the records: services that only pretend to be there."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

import hyperfed
from hyperfed.runs.config import from_keys
from hyperfed.runs.progress import watch
from hyperfed.runs.run import Run
from hyperfed.runs.settings import TrackerName
from hyperfed.runs.trackers import PACKAGES, TRACKERS, About
from toys import make_task

SMALL: dict[str, Any] = {
    "rounds": 4,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "cohort": 2,
    "task": {"clients": 4, "novel": 0.25},
    "method": {"local_steps": 1},
}


class Service(ModuleType):
    """What MLflow and Weights & Biases have in common: runs, each with numbers by step."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.begun: list[dict[str, Any]] = []
        self.settings: dict[str, str] = {}
        self.numbers: list[tuple[int, dict[str, float]]] = []
        self.ended: list[Any] = []
        self.broken: set[str] = set()

    def take(self, what: str) -> None:
        if what in self.broken:
            raise ConnectionError("the service is gone")


class FakeMLflow(Service):
    """The part of MLflow's fluent interface that is used, as strict as it is."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active: list[str] = []

    def active_run(self) -> Any:
        return SimpleNamespace() if self.active else None

    def start_run(self, run_id: str | None, run_name: str, nested: bool) -> Any:
        self.take("start")
        assert nested or not self.active
        self.begun.append({"id": run_id, "name": run_name})
        self.active.append(run_id or f"run{len(self.begun)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active[-1]))

    def log_params(self, params: dict[str, str]) -> None:
        assert len(params) <= 100
        assert not params.keys() & self.settings.keys()
        self.settings |= params

    def log_metrics(self, metrics: dict[str, float], step: int, run_id: str) -> None:
        self.take("log")
        assert run_id == self.active[-1]
        self.numbers.append((step, metrics))

    def end_run(self, status: str) -> None:
        self.active.pop()
        self.ended.append(status)


class FakeWandB(Service):
    """The part of Weights & Biases that is used."""

    def __init__(self) -> None:
        super().__init__("wandb")

    def init(self, **options: Any) -> Any:
        self.take("start")
        assert options["resume"] == "allow"
        assert options["reinit"] == "create_new"
        self.begun.append({key: options[key] for key in ("id", "name")})
        self.settings |= {key: str(value) for key, value in options["config"].items()}
        self.project, self.dir = options["project"], options["dir"]
        return SimpleNamespace(
            id=options["id"] or f"run{len(self.begun)}",
            define_metric=self.define,
            log=self.log,
            finish=self.finish,
        )

    def define(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "round")
        self.over = step_metric

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)

    def log(self, numbers: dict[str, float]) -> None:
        self.take("log")
        self.numbers.append((int(numbers[self.over]), {**numbers}))
        del self.numbers[-1][1][self.over]


FAKES = {"mlflow": FakeMLflow, "wandb": FakeWandB}
ENDS = {"mlflow": ("FINISHED", "KILLED", "FAILED"), "wandb": (0, 1, 1)}


@pytest.fixture(params=sorted(FAKES))
def service(request, monkeypatch) -> Service:
    fake: Service = FAKES[request.param]()
    monkeypatch.setitem(sys.modules, request.param, fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


def numbers_of(run: Run) -> list[tuple[int, dict[str, float]]]:
    """What a tracker is to have of a run that is done."""
    found: list[tuple[int, dict[str, Any]]] = [
        (
            e.round,
            {
                f"accuracy/{e.split}": e.accuracy,
                f"loss/{e.split}": e.loss,
                f"worst_decile_accuracy/{e.split}": e.worst_decile_accuracy,
                "bytes/down": e.bytes_down,
                "bytes/up": e.bytes_up,
                "seconds": e.seconds,
            },
        )
        for e in run.evaluations
    ]
    summary = {
        f"summary/{key}": value
        for key, value in run.summary.items()
        if isinstance(value, int | float)
    }
    return [*found, (run.round, summary)]


def test_a_service_has_every_number_and_the_settings(service, tmp_path):
    run = hyperfed.train("fedavg", out=tmp_path, track=service.__name__, **SMALL)
    assert {e.split for e in run.evaluations} == {"val", "test", "novel"}
    assert service.numbers == numbers_of(run)
    assert service.numbers[-1][1]["summary/test_accuracy"] == run.summary["test_accuracy"]
    assert service.settings["task.clients"] == "4"
    assert service.settings["method.name"] == "fedavg"
    assert service.settings["method.local_steps"] == "1"
    assert run.folder is not None
    assert service.begun == [{"id": None, "name": f"fedavg/{run.folder.path.name}"}]
    assert service.ended == [ENDS[service.__name__][0]]
    assert not (run.folder.path / "tensorboard").exists()


def test_a_run_that_is_resumed_goes_on_in_the_same_run(service, tmp_path):
    started = Run.start(from_keys("fedavg", SMALL | {"track": service.__name__}), tmp_path)
    started.stop()
    watch(started, show=False)  # not one round: it stops at once
    assert service.ended == [ENDS[service.__name__][1]]
    assert started.folder is not None
    resumed = hyperfed.resume(started.folder.path)
    assert [begun["id"] for begun in service.begun] == [None, "run1"]
    assert service.numbers == numbers_of(resumed)
    assert service.settings["rounds"] == "4"
    assert service.ended[-1] == ENDS[service.__name__][0]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"mlflow": {}}'])
def test_a_damaged_memo_of_trackers_is_told(service, tmp_path, content):
    run = Run.start(from_keys("fedavg", SMALL | {"track": service.__name__}), tmp_path)
    assert run.folder is not None
    (run.folder.path / "tracker.json").write_bytes(content)
    with pytest.raises(hyperfed.UserError, match=r"tracker\.json must say what trackers call the"):
        watch(run, show=False)
    assert not service.begun


def test_a_run_that_was_elsewhere_meanwhile_goes_on_in_its_first_run(tmp_path, monkeypatch):
    fakes = {name: make() for name, make in FAKES.items()}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    run = Run.start(from_keys("fedavg", SMALL | {"track": "mlflow"}), tmp_path)
    for other in ("wandb", "mlflow", None):
        run.stop()
        watch(run, show=False)
        run.close()
        if other is not None:
            run = Run.resume(run.folder.path, changed={"track": other})
    begun = {name: [each["id"] for each in fake.begun] for name, fake in fakes.items()}
    assert begun == {"mlflow": [None, "run1"], "wandb": [None]}


def test_a_service_that_fails_on_the_way_is_told_once_and_left_alone(service, tmp_path, caplog):
    service.broken.add("log")
    run = hyperfed.train("fedavg", out=tmp_path, track=service.__name__, **SMALL)
    assert run.summary["rounds"] == 4
    told = [record.getMessage() for record in caplog.records if "no more numbers" in record.msg]
    assert told == [f"{service.__name__} takes no more numbers of this run: the service is gone"]


def test_a_service_that_does_not_begin_is_an_error_before_training(service, tmp_path):
    service.broken.add("start")
    with pytest.raises(hyperfed.UserError, match="must begin a run there, but: the service is gon"):
        hyperfed.train("fedavg", track=service.__name__, **SMALL)


@pytest.mark.parametrize(("error", "ended"), [(ZeroDivisionError, 2), (KeyboardInterrupt, 1)])
def test_our_own_fault_is_a_failed_run_there_and_ctrl_c_a_stopped_one(
    service, error, ended, monkeypatch
):
    def one_round():
        raise error

    run = Run(from_keys("fedavg", SMALL | {"track": service.__name__}))
    monkeypatch.setattr(run, "_one_round", one_round)
    with pytest.raises(error):
        watch(run, show=False)
    assert service.ended == [ENDS[service.__name__][ended]]


def test_a_number_that_is_not_there_is_not_handed_on(service):
    """Of clients without validation data, where another metric is asked for."""
    task = make_task()
    task.val[:] = [rows[:0] for rows in task.val]
    keys = {"rounds": 1, "cohort": 2, "metrics": ["f1"], "method": {"local_steps": 1}}
    run = hyperfed.train("fedavg", task, track=service.__name__, **keys)
    (_, val), (_, test), (_, summary) = service.numbers
    assert set(val) == {"bytes/down", "bytes/up", "seconds"}
    assert test["f1/test"] == run.summary["test_f1"] == summary["summary/test_f1"]


def test_mlflow_takes_it_as_part_of_the_run_that_is_active(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    fake.active.append("theirs")
    hyperfed.train("fedavg", track="mlflow", **SMALL)
    assert fake.active == ["theirs"]


def test_the_project_of_wandb_is_the_environments_or_ours(monkeypatch, tmp_path):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = hyperfed.train("fedavg", out=tmp_path, track="wandb", **SMALL)
    assert run.folder is not None
    assert (fake.project, fake.dir) == ("hyperfed", str(run.folder.path))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    hyperfed.train("fedavg", track="wandb", **SMALL)
    assert (fake.project, fake.dir) == ("mine", None)
    assert fake.begun[-1]["name"] == "fedavg on digits, seed 0"  # there is no folder to name it by


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_what_is_not_installed_is_told_before_anything_is_written(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(hyperfed.UserError, match=f"pip install '{name}>="):
        hyperfed.train("fedavg", out=tmp_path / "runs", track=name, **SMALL)
    assert not list(Path(tmp_path).iterdir())


def test_tensorboard_hides_what_a_killed_run_left_of_later_rounds(tmp_path, monkeypatch):
    written: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, name: str, number: float, round: int) -> None:
            written.append((name, number, round))

        def flush(self) -> None:
            written.append("flushed")

        def close(self) -> None:
            written.append("closed")

    package = SimpleNamespace(SummaryWriter=Writer)
    tracker = TRACKERS["tensorboard"](package, About("a", {}, tmp_path, 7, None))
    tracker.log({"loss/val": 0.5}, 9)
    tracker.close("done")
    folder = str(tmp_path / "tensorboard")
    assert written == [(folder, 8), ("loss/val", 0.5, 9), "flushed", "closed"]


def test_each_tracker_of_the_settings_has_its_package_and_what_begins_a_run_there():
    named = {*get_args(TrackerName)} - {"auto"}  # which is TensorBoard where it is installed
    assert named == PACKAGES.keys() == TRACKERS.keys()


def test_tensorboard_needs_a_folder_where_it_is_asked_for():
    pytest.importorskip("torch.utils.tensorboard", reason="NOT TESTED: TensorBoard is not there")
    with pytest.raises(hyperfed.UserError, match="must have a folder for its files"):
        hyperfed.train("fedavg", track="tensorboard", **SMALL)


def test_nothing_is_tracked_where_nothing_is_to_be(tmp_path):
    run = hyperfed.train("fedavg", out=tmp_path, track=None, **SMALL)
    assert run.folder is not None
    assert not (run.folder.path / "tensorboard").exists()

"""Every method on another device than the CPU: the same numbers, and nothing left behind."""

import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperfed
from hyperfed import trees
from hyperfed.engines import EngineConfig, build
from hyperfed.engines.calls import Call
from hyperfed.engines.flower import site
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine, best_engine
from hyperfed.engines.ray.actors import Work, Worker
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.methods import METHODS, fedavg, fedper
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.system import toml
from hyperfed.system.devices import CPU, describe, find_device
from hyperfed.task import Task
from hyperfed.trees import Tree
from hyperfed.trees.packing import pack, unpack
from pretended import DEVICE, NAME, present
from toys import Dropping, Normed, both, lengths, make_task, recorded, snapshot


@pytest.fixture(autouse=True)
def _moving() -> Iterator[None]:
    with present():
        yield


def devices(tree: Tree) -> set[str]:
    return {leaf.device.type for _, leaf in trees.leaves(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_rounds_and_an_evaluation_together_give_the_numbers_of_the_cpu(method: str) -> None:
    """One after another a whole run does, below."""
    here, there = both(method, VmappedEngine, DEVICE)
    for number, clients in enumerate(([0, 1, 2], [1, 2])):
        exchanges = [each.round(clients, number).state.exchanges for each in (here, there)]
        assert exchanges[0] == exchanges[1]
    torch.testing.assert_close(snapshot(there), snapshot(here), rtol=0, atol=1e-12)
    assert all(devices(memory) <= {"cpu"} for memory in there.engine.memory.values())
    evaluate = here.method.Client.evaluate
    for client in (1, 3):
        counts = []
        for each in (here, there):
            cohort = each.engine.cohort([client], 9, training=False)
            counts.append(cohort.ask(evaluate, each.server.personalize(cohort)))
        assert devices(counts[1]) == {NAME}
        torch.testing.assert_close(trees.to(counts[1], CPU), counts[0], rtol=0, atol=1e-12)


def test_the_server_and_its_optimizer_move_and_the_task_stays() -> None:
    _, there = both("pefll", LoopEngine, DEVICE)
    there.round([0, 1, 2], 0)
    assert devices(there.server.state(optimizers=False)) == {NAME}
    moments = there.server.optimizer.state_dict()["state"][0]
    assert moments["exp_avg"].device.type == NAME
    assert there.task.x.device == CPU
    assert there.engine.task.x.device == DEVICE
    assert there.engine.task.to(DEVICE) is there.engine.task


class Straying(fedavg.Client):
    """Makes a tensor where it does not compute."""

    @step
    def train_model(self, model: Tree) -> Tree:
        return {name: value + torch.ones(value.shape) for name, value in model.items()}


def test_a_step_that_strays_is_told() -> None:
    task, config = make_task(), fedavg.Config()
    engine = LoopEngine(task, Straying, config, seed=0, device=DEVICE)
    cohort = engine.cohort([0], 0, training=False)
    with pytest.raises(RuntimeError, match="needs all tensors on pretended"):
        cohort.ask(Straying.train_model, trees.to(task.outline().initial(), DEVICE))


# Whole runs.


PLACE = ("engine", "cores", "cores_per_client", "workers", "device", "chunk")


def keys(method: str, device: str) -> dict[str, Any]:
    method_keys = {"local_steps": 3, "batch_size": 4} | lengths(method)
    faults = {"drop": 0.2, "nan": 0.1}
    engine = {"name": "loop", "cores_per_client": 1}
    return {
        "rounds": 4,
        "cohort": 3,
        "evaluate_every": 2,
        "checkpoint_every": 1,
        "method": method_keys,
        "engine": engine,
        "faults": faults,
        "device": device,
        "progress": False,
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_run_and_what_it_hands_out_are_those_of_the_cpu(method: str) -> None:
    task, short = make_task(Normed, novel=1), {"rounds": 3, "evaluate_every": 3}
    here, there = (
        hyperfed.train(method, task, **keys(method, name) | short) for name in ("cpu", NAME)
    )
    assert recorded(there, *PLACE) == recorded(here, *PLACE)
    assert "device" not in here.summary
    assert there.summary["device"] == NAME
    assert devices(there.best.server) <= {"cpu"}  # Local has no state there
    try:
        here.model(1)
    except UserError:  # a method that predicts with more than one: test_every_method.py
        return
    x, y = task.x[task.train[3]], task.y[task.train[3]]
    pairs = [
        [trees.model_of(run.model(1)) for run in (here, there)],
        [trees.model_of(run.personalize(x, y)) for run in (here, there)],
    ]
    for pair in pairs:
        assert devices(pair[1]) == {"cpu"}
        torch.testing.assert_close(*pair, rtol=0, atol=0)


def stopped(method: str, device: str, folder: Path, task: Task) -> Path:
    """A run of two rounds of four."""
    settings = keys(method, device)
    settings.pop("progress")
    run = Run.start(config.from_keys(method, settings), folder, task)
    for progress in run.train():
        if progress.round == 2:
            break
    assert run.folder is not None
    return run.folder.path


@pytest.mark.parametrize("method", ["pefll", "pfedkt"])
def test_a_run_resumes_on_its_device(method: str, tmp_path: Path) -> None:
    task = make_task(novel=1)
    whole = hyperfed.train(method, task, out=tmp_path / "whole", **keys(method, NAME))
    resumed = Run.resume(stopped(method, NAME, tmp_path / "part", task), task)
    for leaf in trees.leaves(resumed.server.state().get("optimizer", {})):
        assert leaf[1].device.type == NAME
    assert devices(resumed.server.state(optimizers=False)) == {NAME}
    list(resumed.train())
    assert recorded(resumed, *PLACE) == recorded(whole, *PLACE)


@pytest.mark.parametrize(("begun", "then"), [(NAME, "cpu"), ("cpu", NAME)])
def test_a_run_goes_on_on_another_device(begun: str, then: str, tmp_path: Path) -> None:
    task = make_task(novel=1)
    whole = hyperfed.train("pefll", task, **keys("pefll", begun))
    resumed = Run.resume(stopped("pefll", begun, tmp_path, task), task, {"device": then})
    assert devices(resumed.server.state(optimizers=False)) == {then}
    list(resumed.train())
    assert recorded(resumed, *PLACE) == recorded(whole, *PLACE)
    assert resumed.summary.get("device", "cpu") == then


GONE = "cuda:63"


def test_a_run_whose_device_is_gone_is_served_on_the_cpu_and_goes_on_where_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_task(novel=1)
    whole = hyperfed.train("pefll", task, **keys("pefll", "cpu"))
    folder = stopped("pefll", "cpu", tmp_path, task)
    settings = config.load(str(folder / "config.toml"))
    engine = replace(settings.engine, name="vmap", graphs=True)
    config.dump(replace(settings, device=GONE, engine=engine), folder / "config.toml")
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with pytest.raises(UserError, match=rf"is here, came {GONE}; name one: .* device=cpu,"):
        Run.resume(folder, task)
    assert {path: path.read_bytes() for path in files} == files

    served = Run.open(folder, task)
    assert f"device={GONE} is not here, so clients are served on the CPU" in caplog.text
    assert served.engine.device == CPU
    served.config = replace(served.config, device=GONE)
    assert pickle.loads(pickle.dumps(served)).engine.device == CPU

    resumed = hyperfed.resume(folder, task, device="cpu", progress=False)
    assert f"goes on with device=cpu, was {GONE}" in caplog.text
    kept = config.load(str(folder / "config.toml"))
    assert (kept.device, kept.engine.graphs) == ("cpu", False)  # where it goes on the next time
    torch.testing.assert_close(
        [e.loss for e in resumed.evaluations], [e.loss for e in whole.evaluations]
    )


def test_auto_takes_vmap_on_an_accelerator_and_says_so() -> None:
    chosen = keys("fedavg", NAME) | {"engine": {"name": "auto"}, "faults": {}}
    run = hyperfed.train("fedavg", make_task(), **chosen)
    assert run.summary["engine"] == "vmap"
    run = hyperfed.train("fedavg", make_task(), **(chosen | {"device": "cpu"}))
    assert run.summary["engine"] == "loop"


def test_dropout_draws_the_same_there() -> None:
    task = make_task(Dropping)
    here, there = (hyperfed.train("fedavg", task, **keys("fedavg", n)) for n in ("cpu", NAME))
    assert [e.loss for e in there.evaluations] == [e.loss for e in here.evaluations]


# Where the server is elsewhere than its clients.


def test_sites_and_their_server_have_devices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site and the server compute on the device, the other site on the CPU."""
    pytest.importorskip("flwr")
    from engines.flower.sites import DirectLink
    from hyperfed.apps.flower import app as flower_app

    built: set[tuple[str, str]] = set()

    def noted(device: torch.device) -> Any:
        def make(*arguments: Any, **options: Any) -> LoopEngine:
            kind = best_engine(device)
            built.add((kind.name, options["device"].type))
            return kind(*arguments, **options)

        return make

    monkeypatch.setattr(site, "best_engine", noted)

    words = ["rounds=4", "cohort=4", "evaluate_every=2", "task.clients=6", "task.novel=0.2"]
    words += ["method.local_steps=2", "engine.cores_per_client=1"]
    here = Run(config.load("pefll", [*words, "engine=loop"]))
    list(here.train())
    settings = config.load("pefll", [*words, "engine=flower", "engine.sites=2", f"device={NAME}"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    sites = {}
    for node, clients, device in ((5, "0-2", NAME), (3, "3-5", "cpu")):
        state = str(tmp_path / f"state{node}")
        node_config = {"state": state, "clients": clients, "device": device, "cores_per_client": 1}
        sites[node] = flower_app.site_of(run_config, node_config)
    settings = replace(settings, checkpoint_every=1)
    run = flower_app.begin(settings, DirectLink(sites), str(tmp_path / "run"))
    assert devices(run.server.state(optimizers=False)) == {NAME}
    next(iter(run.train()))
    run.close()
    run = flower_app.begin(settings.on("cpu"), DirectLink(sites), str(tmp_path / "run"))
    assert devices(run.server.state(optimizers=False)) == {"cpu"}  # which goes on elsewhere
    list(run.train())
    assert built == {("vmap", NAME), ("loop", "cpu")}
    for ours, theirs in zip(run.evaluations, here.evaluations, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_an_actor_computes_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives and leaves is packed, and so on the CPU."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda reference: reference))
    task, settings = make_task(), fedper.Config(local_steps=2, batch_size=4)
    body, _ = trees.partition(task.outline().initial(), ["body.weight", "body.bias"])
    calls = [Call(0, 0, i, "train_model", (pack(body),), settings.batches) for i in (0, 2)]
    answers = []
    for device in ("cpu", NAME):
        options: dict[str, Any] = {"seed": 0, "cores": 1, "precision": "float32"}
        work = Work.of(task, fedper.Client, settings, device=device, **options)
        worker = Worker([], [work])
        assert worker._engine.device.type == device
        outcomes, *written = worker.answer(calls, None, None, None, None)
        assert [outcome.wrote_memory for outcome in outcomes] == [True, True]
        held = [*(outcome.reply for outcome in outcomes), *(tree for tree in written if tree)]
        answers.append({str(place): unpack(tree) for place, tree in enumerate(held)})
    torch.testing.assert_close(*answers, rtol=0, atol=1e-12)


# What is asked for and cannot be had.


@pytest.mark.skipif(torch.cuda.is_available(), reason="NOT TESTED: there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "gpu", "cpu:", f"{NAME}:1"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"device must be one that .* came {name}; take device=cpu"):
        hyperfed.train("fedavg", make_task(), **keys("fedavg", name))


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's is; without a word it would break off in the middle of a round."""

    def zeros(size: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(UserError, match=rf"float64.* but {NAME} has none \(Cannot convert"):
        find_device(NAME)
    assert find_device("cpu") == CPU


def test_find_device_returns_what_is_there() -> None:
    assert find_device("cpu") == CPU
    assert find_device(f"{NAME}:0") == DEVICE


def test_a_gpu_is_recorded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T1000")
    assert describe(torch.device("cuda", 1)) == "cuda:1 (Tesla T1000)"
    assert describe(CPU) == "cpu"


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0.5), ("cuda", 0.0)])
def test_actors_have_gpus_where_they_compute_on_them(device: str, gpus: float) -> None:
    settings = EngineConfig("ray", gpus_per_worker=gpus)
    with pytest.raises(UserError, match="set both or neither"):
        build(settings, make_task(), fedavg.Client, fedavg.Config(), seed=0, device=device)

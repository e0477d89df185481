"""The engine of actors: equal to the loop, whatever dies, and closed to the network."""

import copy
import itertools
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperfed
import hyperfed.engines.ray.engine
from hyperfed import federation, trees
from hyperfed.engines import EngineConfig, Faults, build
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.ray import cluster
from hyperfed.engines.ray.actors import Work, Worker, portable
from hyperfed.engines.ray.engine import RayEngine
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import EngineLostError, UserError
from hyperfed.federation import AllLostError, step
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.training import UnlabelledError
from hyperfed.trees import Tree
from hyperfed.trees.packing import unpack
from processes import LOOPBACKS, SECONDS, await_end, descendants, linux, listening, name_of
from toys import Federation, Normed, Stemmed, lengths, make_task, recorded, short, snapshot

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(find_spec("ray") is None, reason="NOT TESTED: pip install -e '.[ray]'"),
]


@pytest.fixture(scope="module")
def connection() -> Iterator[cluster.Connection]:
    """A cluster on this machine, for all tests of this file."""
    connection = cluster.connect()
    # Actors cannot import this file: what is in it travels as what is in a user's script.
    connection.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield connection
    connection.ray.shutdown()


class Reused(RayEngine):
    """Puts its work to actors that are there: to start one takes seconds."""

    actors: Iterator[Any]

    def _hire(self) -> Any:
        actor = next(self.actors)
        self._ray.get(actor.__ray_call__.remote(Worker.__init__, sys.path, [self._work]))
        return actor

    def _dismiss(self) -> None:
        self._actors = []


@pytest.fixture(scope="module")
def reused(connection: cluster.Connection) -> type[Reused]:
    ray = connection.ray
    work = ray.put(
        Work.of(
            make_task(), federation.Client, None, seed=0, cores=1, precision="float32", device="cpu"
        )
    )
    remote = ray.remote(Worker).options(num_cpus=0)
    Reused.actors = itertools.cycle([remote.remote(sys.path, [work]) for _ in range(2)])
    return Reused


@dataclass(frozen=True)
class Config:
    """Which client ends its process, or raises what, while a file is there."""

    bad: int = -1
    marker: str = ""
    error: Callable[[], Exception] | None = None


class Client(federation.Client):
    """Counts the rounds it took part in."""

    @step
    def count(self) -> Tree:
        self.memory["count"] = self.memory.get("count", torch.tensor(0)) + 1
        self.scratch["seen"] = self.memory["count"] * 10
        return {"count": self.memory["count"]}

    @step
    def note(self) -> Tree:
        self.memory["noted"] = self.scratch["noted"] = {}
        return {}

    @step
    def noted(self) -> Tree:
        return {"kept": torch.tensor(["noted" in self.memory, "noted" in self.scratch])}

    @step
    def recall_seen(self) -> Tree:
        marker = Path(self.config.marker)
        if self.id == self.config.bad and marker.exists():
            if self.config.error is not None:
                raise self.config.error()
            marker.unlink()
            os._exit(1)
        return {"seen": self.scratch["seen"], "process": torch.tensor(os.getpid())}

    @step(deferrable=True)
    def recall_late(self) -> Tree:
        return self.recall_seen()

    @step
    def bytes_of_a_product(self) -> Tree:
        one = torch.ones(1, 1)
        return {"bytes": torch.tensor((one @ one).element_size())}

    @step
    def labels(self) -> Tree:
        return {"y": self.train.batch().y}


# The same numbers as the loop.


def both(
    method: str, reused: type[Reused], own: Any = None, **task: Any
) -> tuple[Federation, Federation]:
    """The same federation on the loop engine and on two actors."""
    settings = short(method) | (own or {})
    loop, ray = (Federation(method, make_task(**task), **settings) for _ in range(2))
    ray.engine = reused(ray.task, ray.method.Client, ray.config, seed=0, workers=2)
    return loop, ray


@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_rounds_equal_the_loop_engine(method: str, reused: type[Reused]) -> None:
    loop, ray = both(method, reused, net=Stemmed, novel=1)
    for number, clients in enumerate(([0, 1, 2], [1, 2])):
        exchanges = [each.round(clients, number).state.exchanges for each in (loop, ray)]
        assert exchanges[0] == exchanges[1]
    assert set(ray.engine.memory) == set(loop.engine.memory)
    torch.testing.assert_close(snapshot(ray), snapshot(loop), rtol=0, atol=1e-12)
    evaluate = loop.method.Client.evaluate
    for client in (1, 3):
        counts = []
        for each in (loop, ray):
            cohort = each.engine.cohort([client], 9, training=False)
            counts.append(cohort.ask(evaluate, each.server.personalize(cohort)))
        torch.testing.assert_close(*counts, rtol=0, atol=1e-12)


def test_what_was_let_out_with_noise_is_the_engines_to_remember(reused: type[Reused]) -> None:
    """The actors remember nothing, and the cohorts here are never committed."""
    loop, ray = both("itpfl", reused, {"epsilon": 0.3, "embedding_size": 3}, novel=1)
    for each in (loop, ray):
        for _ in range(2):
            each.server.personalize(each.engine.cohort([3], 9, training=False))
        with pytest.raises(UserError, match="after 1 of them"):
            each.server.personalize(each.engine.cohort([3], 8, training=False))
    torch.testing.assert_close(ray.engine.released[3], loop.engine.released[3], rtol=0, atol=1e-12)


def test_a_delayed_gradient_equals_the_loop_engine(reused: type[Reused]) -> None:
    loop, ray = both("pefll", reused, {"delayed_gradient": True}, net=Normed)
    cohorts: list[list[Any]] = [[], []]
    for number, clients in enumerate(([0, 1, 2], [1, 2], [1, 3])):
        for each, met in zip((loop, ray), cohorts, strict=True):
            met.append(each.round(clients, number))
    torch.testing.assert_close(snapshot(ray), snapshot(loop), rtol=0, atol=1e-12)
    mine, theirs = ([cohort.state.exchanges for cohort in met] for met in cohorts)
    assert mine == theirs


def keys_of(method: str, engine: str, **keys: Any) -> dict[str, Any]:
    own = {"local_steps": 3, "batch_size": 4} | lengths(method)
    computing = {"name": engine, "workers": 2, "cores_per_client": 1}
    # Not seed 0, as which one that is not passed on would pass unseen.
    usual = {"rounds": 10, "evaluate_every": 2, "seed": 3}
    return usual | {"method": own, "engine": computing} | keys


PLACE = ("engine", "cores", "workers")


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ("pfedhn", {}),
        ("pefll", {}),
        ("pfedkt", {}),
        ("itpfl", {}),
        ("fedavg", {"epsilon": 50.0}),
        ("fedper", {"epsilon": 50.0, "where": "central"}),
    ],
)
def test_ten_rounds_end_with_the_evaluations_of_the_loop(
    method: str, privacy: Any, reused: type[Reused], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyperfed.engines.ray.engine, "RayEngine", reused)
    task = make_task(Normed, novel=1)
    faults = {"drop": 0.2, "nan": 0.1}
    loop, ray = (
        hyperfed.train(
            method, task, **keys_of(method, engine, cohort=3, faults=faults, privacy=privacy)
        )
        for engine in ("loop", "ray")
    )
    assert (loop.summary["engine"], ray.summary["engine"]) == ("loop", "ray")
    assert recorded(ray, *PLACE) == recorded(loop, *PLACE)
    x, y = task.x[task.train[3]], task.y[task.train[3]]
    for models in (
        [run.model(1) for run in (loop, ray)],
        [r.personalize(x, y) for r in (loop, ray)],
    ):
        torch.testing.assert_close(*map(trees.model_of, models), rtol=0, atol=0)


@pytest.mark.parametrize(("first", "then"), [("ray", "loop"), ("loop", "ray")])
def test_a_checkpoint_of_one_engine_is_gone_on_with_by_the_other(
    first: str,
    then: str,
    reused: type[Reused],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hyperfed.engines.ray.engine, "RayEngine", reused)
    task = make_task(Normed, novel=1)
    keys = keys_of("fedper", first, cohort=2, checkpoint_every=4)
    whole = hyperfed.train("fedper", task, **keys)
    run = Run.start(config.from_keys("fedper", keys), tmp_path, task)
    for _ in itertools.islice(run.train(), 5):
        pass
    assert run.folder is not None
    settings = run.folder.config
    settings.write_text(settings.read_text().replace(f'"{first}"', f'"{then}"'))
    resumed = hyperfed.resume(run.folder.path, task)
    assert resumed.summary["engine"] == then
    assert recorded(resumed, *PLACE) == recorded(whole, *PLACE)


# Memories.


def test_memories_stay_in_the_store_until_a_client_writes(reused: type[Reused]) -> None:
    task = make_task()
    engine = reused(task, Client, Config(), seed=0, workers=2)
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Client.count)
    assert engine.memory == {}  # a draft
    engine.commit(cohort)
    before = engine.memory
    assert {client: int(tree["count"]) for client, tree in before.items()} == {0: 1, 1: 1, 2: 1}

    cohort = engine.cohort([0, 1], 1, training=True)
    cohort.ask(Client.evaluate, task.outline().initial())  # reads only
    engine.commit(cohort)
    assert all(engine.memory[client] is before[client] for client in before)
    cohort = engine.cohort([1], 2, training=True)
    cohort.ask(Client.count)
    engine.commit(cohort)
    after = engine.memory
    assert [after[client] is before[client] for client in before] == [True, False, True]

    engine.memory = dict(before)  # as a run does to use the models of its best round
    assert all(engine.memory[client] is before[client] for client in before)
    cohort = engine.cohort([1], 3, training=False)
    assert cohort.ask(Client.count)["count"].item() == 2
    engine.memory = trees.clone({1: after[1]})  # as from a checkpoint
    cohort = engine.cohort([0, 1], 4, training=False)
    assert cohort.ask(Client.count)["count"].tolist() == [1, 3]


def test_memories_outlive_the_session_in_whose_store_they_were(
    reused: type[Reused], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [reused(make_task(), Client, Config(), seed=0, workers=2) for _ in range(3)]
    first, same, later = engines
    monkeypatch.setattr(later, "_session", ("another node", "another job"))
    cohort = first.cohort([0], 0, training=True)
    cohort.ask(Client.count)
    first.commit(cohort)
    for engine in (same, later):
        engine.memory = first.memory
        assert engine.cohort([0], 1, training=False).ask(Client.count)["count"].item() == 2
    kept = [engine._kept[0].ref for engine in engines]
    assert [ref == kept[0] for ref in kept] == [True, True, False]
    for copied in (pickle.loads(pickle.dumps(first.memory)), copy.deepcopy(first.memory)):
        assert {client: type(tree) for client, tree in copied.items()} == {0: dict}
        assert copied[0]["count"].item() == 1


# What goes wrong at a client.


def test_a_dead_actor_loses_what_was_posted_and_is_asked_again_for_an_evaluation(
    connection: cluster.Connection, tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    engine = RayEngine(make_task(), Client, Config(1, str(marker)), seed=0, workers=2)
    cohort = engine.cohort([0, 1], 0, training=True)
    cohort.ask(Client.count)
    pending = cohort.post(Client.recall_late)
    engine.commit(cohort)
    marker.touch()
    served = engine.cohort([0, 1, 3], 1, training=False)
    assert served.ask(Client.count)["count"].tolist() == [2, 2, 1]
    assert pending.weight.tolist() == [len(engine.task.train[0]), 0]
    assert pending.reply()["seen"].tolist() == [10, 0]
    assert cohort.state.late == [(1, "did not answer: its actor died")]
    engine.close()


def test_a_dead_actor_loses_its_shard_for_the_round_and_nothing_else(
    connection: cluster.Connection, tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    engine = RayEngine(make_task(), Client, Config(1, str(marker)), seed=0, workers=2)
    seen: list[set[int]] = []

    def one_round(number: int, *, training: bool = True) -> Any:
        cohort = engine.cohort([0, 1, 2, 3], number, training=training)
        cohort.ask(Client.count)
        reply = cohort.ask(Client.recall_seen)
        seen.append(set(reply["process"].tolist()) - {0})
        return cohort, reply["seen"].tolist()

    def counts() -> list[int]:
        return [int(tree["count"]) for _, tree in sorted(engine.memory.items())]

    cohort, _ = one_round(0)
    engine.commit(cohort)
    assert counts() == [1, 1, 1, 1]

    marker.touch()
    cohort, reply = one_round(
        1
    )  # client 1 ends the process of clients 1 and 3 in its second message
    engine.commit(cohort)
    assert cohort.state.lost == dict.fromkeys([1, 3], "did not answer: its actor died")
    assert reply == [20, 0, 20, 0]
    assert cohort.weight.tolist() == [12, 0, 20, 0]
    assert counts() == [2, 1, 2, 1]

    cohort, reply = one_round(2)
    engine.commit(cohort)
    assert cohort.state.lost == {}
    assert reply == [30, 20, 30, 20]
    assert counts() == [3, 2, 3, 2]
    assert len(seen[0] | seen[2]) == 3  # one of the two was replaced

    marker.touch()  # nobody can be lost to an evaluation: its clients are asked again
    _, reply = one_round(3, training=False)
    assert reply == [40, 30, 40, 30]
    assert counts() == [3, 2, 3, 2]
    engine.close()
    assert await_end(seen[0] | seen[2] | seen[3]) == set()


def test_an_evaluation_that_kills_its_actor_twice_ends_the_run(
    connection: cluster.Connection, tmp_path: Path
) -> None:
    """A stand-in for the actors: that the real ones die is another test's."""
    died = connection.ray.exceptions.RayActorError

    class Dying(RayEngine):
        asked = 0

        def _start(self) -> None:
            self._actors = [None]

        def _send(self, index: int, calls: Any) -> Any:
            self.asked += len(calls)
            return [None]

        def _hire(self) -> Any:
            return None

        def _dismiss(self) -> None:
            pass

    engine = Dying(make_task(), Client, Config(), seed=0, workers=1)

    def dead(ref: Any) -> Any:
        raise died

    engine._ray = SimpleNamespace(
        get=dead, kill=lambda actor: None, exceptions=connection.ray.exceptions
    )
    with pytest.raises(died):
        engine.cohort([0, 2], 0, training=False).ask(Client.count)
    assert engine.asked == 4
    with pytest.raises(AllLostError, match="client 0: did not answer: its actor died") as caught:
        engine.cohort([0, 2], 0, training=True).ask(Client.count)
    assert isinstance(caught.value.__cause__, NoAnswerError)
    assert isinstance(caught.value.__cause__.__cause__, died)
    assert engine.asked == 6


def test_a_machine_that_is_lost_ends_a_run_as_one_to_resume(
    connection: cluster.Connection,
) -> None:
    lost = connection.ray.exceptions.OwnerDiedError  # one of those that say so

    def gone(ref: Any) -> Any:
        raise lost("0" * 28, "", "")

    engine = RayEngine(make_task(), Client, Config(), seed=0, workers=1)
    engine.memory = {0: {"count": torch.tensor(1)}}
    engine._kept[0].tree = None  # as after a commit
    engine._ray = SimpleNamespace(get=gone, exceptions=connection.ray.exceptions)
    with pytest.raises(EngineLostError, match="a machine of the Ray cluster was lost"):
        engine.memory  # noqa: B018
    engine._actors = [None]
    engine._send = lambda index, calls: [None]  # type: ignore[method-assign]
    with pytest.raises(EngineLostError, match="a machine of the Ray cluster was lost"):
        engine.cohort([0], 0, training=True).ask(Client.count)


class OwnError(Exception):
    """Of a user's script."""


class UnfriendlyError(Exception):
    """Cannot be made again of what it was made of."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (lambda: UserError("too few examples"), UserError, "too few examples"),
        (lambda: OwnError("mine"), OwnError, "mine"),
        (lambda: UnfriendlyError(code=7), RuntimeError, "UnfriendlyError: code 7"),
    ],
)
def test_what_a_client_raises_arrives_as_it_is(
    error: Any, kind: type[Exception], text: str, reused: type[Reused], tmp_path: Path
) -> None:
    (marker := tmp_path / "raise").touch()
    engine = reused(make_task(), Client, Config(2, str(marker), error), seed=0, workers=2)
    cohort = engine.cohort([0, 2, 3], 0, training=True)
    cohort.ask(Client.count)
    cohort.ask(Client.recall_seen)
    assert cohort.state.lost == {2: f"{kind.__name__}: {text}"}
    cohort = engine.cohort([2], 0, training=False)
    cohort.ask(Client.count)
    with pytest.raises(kind) as caught:
        cohort.ask(Client.recall_seen)
    assert type(caught.value) is kind
    assert str(caught.value) == text
    assert "in recall_seen" in "".join(caught.value.__notes__)


def test_labels_that_a_client_has_not_are_missed_as_anywhere(reused: type[Reused]) -> None:
    engine = reused(make_task(novel=1, unlabelled=True), Client, Config(), seed=0, workers=2)
    with pytest.raises(UnlabelledError, match="has no labels"):
        engine.cohort([3], 0, training=False).ask(Client.labels)


def test_an_error_that_can_travel_is_left_as_it_is() -> None:
    error = UserError("why")
    assert portable(error) is error


def test_an_empty_tree_is_kept_as_by_the_loop() -> None:
    """In an actor, without a cluster."""
    worker = Worker.__new__(Worker)
    worker._engine = LoopEngine(make_task(), Client, Config(), seed=0)
    _, *kept = worker.answer([Call(0, 0, 0, "note")], None, None)
    (told,), *written = worker.answer([Call(0, 0, 0, "noted")], *kept)
    assert unpack(told.reply)["kept"].tolist() == [True, True]
    assert written == [None, None]


# What the engine is built with.


def test_the_table_builds_it(connection: cluster.Connection) -> None:
    task, faults = make_task(), Faults(drop=0.5)
    settings = EngineConfig("ray", workers=3, cores_per_client=2)
    engine = build(settings, task, Client, None, seed=3, faults=faults)
    assert isinstance(engine, RayEngine)
    assert (engine.task, engine.client, engine.seed, engine.faults) == (task, Client, 3, faults)
    assert engine.resources(1) == {"workers": 3, "cores": 6, "cores_per_client": 2}
    engine.close()
    engine.close()


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bf16", 2)])
def test_actors_compute_in_the_precision_asked_for(
    precision: Any, size: int, reused: type[Reused]
) -> None:
    engine = reused(make_task(), Client, None, seed=0, workers=2, precision=precision)
    reply = engine.cohort([0, 1], 0, training=True).ask(Client.bytes_of_a_product)
    assert reply["bytes"].tolist() == [size, size]


def test_there_are_as_many_actors_as_cores_but_no_more_than_clients(
    connection: cluster.Connection,
) -> None:
    cores = int(connection.ray.cluster_resources()["CPU"])
    many, few = make_task(examples=(5,) * 2 * cores), make_task(examples=(5,))
    assert RayEngine(many, Client, None, seed=0).workers == cores
    assert RayEngine(many, Client, None, seed=0, cores_per_client=10**6).workers == 1
    assert RayEngine(few, Client, None, seed=0).workers == 1


@pytest.mark.parametrize(
    ("gpus", "share", "most"), [(2, 0.6, 2), (4, 0.4, 8), (3, 0.1, 30), (4, 2.0, 2)]
)
def test_a_share_is_of_one_gpu_and_the_same(
    gpus: int, share: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray puts no actor on what is left of two; it waits."""
    context = SimpleNamespace(get_node_id=str, get_job_id=str)
    there = {"CPU": 64.0, "GPU": float(gpus)}
    ray = SimpleNamespace(get_runtime_context=lambda: context, cluster_resources=lambda: there)
    found = SimpleNamespace(ray=ray, started=True)
    monkeypatch.setattr(hyperfed.engines.ray.engine, "connect", lambda address: found)
    task, options = make_task(examples=(5,) * 40), {"gpus_per_worker": share, "device": "cuda"}
    assert RayEngine(task, Client, None, seed=0, **options).workers == most
    with pytest.raises(UserError, match=rf"{share:g} GPU for each of {most + 1} engine\.workers"):
        RayEngine(task, Client, None, seed=0, workers=most + 1, **options)


def test_more_gpus_than_there_are_are_refused(connection: cluster.Connection) -> None:
    gpus = int(connection.ray.cluster_resources().get("GPU", 0))
    settings = EngineConfig("ray", workers=2, gpus_per_worker=gpus + 1)
    with pytest.raises(UserError, match=rf"must have 0 CPU and {gpus + 1} GPU for each of 2 "):
        build(settings, make_task(), Client, None, seed=0, device="cuda")


@pytest.mark.parametrize("gpus", [-1.0, 1.5])
def test_gpus_are_a_share_or_whole(gpus: float) -> None:
    with pytest.raises(ValueError, match=r"must be a fraction|greater than or equal to 0"):
        EngineConfig("ray", gpus_per_worker=gpus)


def test_on_a_cluster_of_others_cores_are_counted_and_waited_for(
    connection: cluster.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, ours = connection.ray, weakref.WeakSet[cluster.Connection]()
    monkeypatch.setattr(cluster, "_OURS", ours)  # as if a user had called ray.init()
    cores = int(ray.cluster_resources()["CPU"])
    with pytest.raises(UserError, match=rf"must have {cores + 1} CPU and 0 GPU for each of 1 "):
        RayEngine(make_task(), Client, None, seed=0, workers=1, cores_per_client=cores + 1)
    holder = ray.remote(type("Holder", (), {})).options(num_cpus=cores).remote()
    monkeypatch.setattr(hyperfed.engines.ray.engine, "START_SECONDS", 0.5)
    engine = RayEngine(make_task(), Client, None, seed=0, workers=1)
    with pytest.raises(UserError, match=r"must start 1 actors of 1 CPU .* within 0\.5 s.* others"):
        engine.cohort([0], 0, training=True).ask(Client.count)
    ray.kill(holder)


def test_on_one_of_this_process_nothing_is_waited_for_but_the_machine(
    connection: cluster.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connection.started
    monkeypatch.setattr(hyperfed.engines.ray.engine, "START_SECONDS", 1e-9)
    engine = RayEngine(make_task(), Client, None, seed=0, workers=2)
    busy = r"must start 2 actors within 5e-09 s, but did not: this machine is busy"
    with pytest.raises(UserError, match=busy):
        engine.cohort([0], 0, training=True).ask(Client.count)


# Other processes.


@linux
def test_nothing_listens_to_the_network(reused: type[Reused]) -> None:
    ours = descendants(os.getpid()) | {os.getpid()}
    assert any("gcs_server" in name_of(pid) for pid in ours)
    found = listening(ours)
    assert found
    assert found <= LOOPBACKS


SCRIPT = """
    import sys

    import torch
    from torch import nn

    from hyperfed import federation
    from hyperfed.engines.local.loop import LoopEngine
    from hyperfed.engines.ray.engine import RayEngine
    from hyperfed.federation import step
    from hyperfed.task import Task

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    class Odd(Exception):
        pass

    class Client(federation.Client):
        @step
        def output(self, model):
            if self.id == 2:
                raise Odd("of this script")
            return {"y": self.predict(model, self.train.batch().x).sum(0)}

    x = torch.arange(12.0).view(6, 2)
    rows = [torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([4, 5])]
    torch.manual_seed(0)
    task = Task("mine", x, torch.zeros(6, dtype=int), rows, rows, rows, {"base": Net(2, 3)}, 3,
                transform=lambda x: x / 12)
    model = task.outline().initial()
    ours = RayEngine(task, Client, None, seed=0, workers=1, address=sys.argv[1])
    there, here = (
        engine.cohort([0, 1], 0, training=True).ask(Client.output, model)
        for engine in (ours, LoopEngine(task, Client, None, seed=0, cores_per_client=1))
    )
    assert torch.equal(there["y"], here["y"])
    try:
        ours.cohort([2], 0, training=False).ask(Client.output, model)
    except Odd as error:
        print(error, ours.resources(1))
"""


def test_a_script_with_its_own_method_joins_a_cluster_and_leaves_it(
    connection: cluster.Connection, tmp_path: Path
) -> None:
    address = connection.ray.get_runtime_context().gcs_address
    (script := tmp_path / "mine.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("of this script {'workers': 1")
    assert connection.ray.cluster_resources()["CPU"] >= 1

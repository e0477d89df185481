"""The engine that computes clients together equals the loop, whatever is computed."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hyperfed
from hyperfed import federation
from hyperfed.engines import EngineConfig, build
from hyperfed.engines.calls import Answer, Call, execute
from hyperfed.engines.local import loop
from hyperfed.engines.local import vmap as vmapped
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.federation import step
from hyperfed.methods import METHODS
from hyperfed.training import Steps
from hyperfed.trees import Tree
from probe import Client as Probe
from probe import Config as ProbeConfig
from together import EVEN, RAGGED, Recorded, both, left
from toys import Assigning, Normed, Stemmed, TwoLayers, close, make_task, snapshot

TO_PYTHON = {"__bool__", "__int__", "__index__", "__float__", "item", "tolist", "numpy"}
"""What makes something of Python's of a tensor."""

IN_PLACE = {"copy_", "normal_", "uniform_"}
"""What writes into tensors that are not the client's: a network's, or new ones of no client."""


ONE_BY_ONE = {
    "fedala": {"train_model"},  # as many passes as its weights need
    "itpfl": {"evaluate"},  # batch-norm's statistics come from a network that is filled
    "knn_per": {"evaluate", "remember"},  # neighbours are scikit-learn's
    "partialfed": {"train_model"},  # a draw decides which layers are loaded
    "pfedkt": {"train_model", "join"},  # hypernetworks start from weights of their own draws
}
"""Method -> its steps that are left to the loop, and why they have to be."""

LONGER: dict[str, dict[str, int]] = {"fedala": {"first_epochs": 12}}
"""Settings with which a step comes to what it is left for, such as to ask whether it is done."""


class Watched(TorchFunctionMode):
    """Notes what a step does that cannot be done for all clients at once."""

    def __init__(self, step: str, found: dict[str, set[str]]) -> None:
        super().__init__()
        self.step, self.found = step, found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.__name__ in TO_PYTHON | IN_PLACE:
            self.found[self.step].add(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """{step that the loop computed: what it did that cannot be done for all clients at once}."""
    noted: defaultdict[str, set[str]] = defaultdict(set)

    def watched(call: Call, **options: Any) -> Answer:
        with Watched(call.step, noted):
            return execute(call, **options)

    monkeypatch.setattr(loop, "execute", watched)
    return noted


# Every method.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "examples"), [(Stemmed, EVEN), (TwoLayers, RAGGED)], ids=["even", "ragged"]
)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_two_rounds_equal_the_loop_engine(
    method: str,
    net: Any,
    examples: tuple[int, ...],
    found: dict[str, set[str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also, no step is the loop's but for what it does, and none without a word."""
    task = {"net": net, "examples": examples, "novel": 2}
    loop, ours = both(method, task=task, **LONGER.get(method, {}))
    asked = set()
    for number, clients in enumerate(([0, 1, 2, 3], [1, 2, 3])):
        exchanges = [each.round(clients, number).state.exchanges for each in (loop, ours)]
        assert exchanges[0] == exchanges[1]
        asked |= {exchange.step for exchange in exchanges[0]}
        close(snapshot(ours), snapshot(loop))
    evaluate = loop.method.Client.evaluate
    for clients in ([0, 1, 2, 3], [4, 5]):
        counts = []
        for each in (loop, ours):
            cohort = each.engine.cohort(clients, 9, training=False)
            counts.append(cohort.ask(evaluate, each.server.personalize(cohort)))
        close(*counts)
        asked |= {exchange.step for exchange in cohort.state.exchanges}
    why = left(caplog)
    assert set(why) <= {step for step in asked if found[step]}
    assert all("vmap" not in reason and "Error" not in reason for reason in why.values())
    if examples == EVEN:  # of ragged clients no two may be alike
        assert set(why) == ONE_BY_ONE.get(method, set())
        assert asked - {name for name, _ in ours.engine.together} <= set(why)


def test_a_client_that_draws_otherwise_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the engine: the comparison above is not blind to which examples are drawn."""
    draw = vmapped.draw
    monkeypatch.setattr(vmapped, "draw", lambda *of: draw(*of[:-1], of[-1] + 1))
    loop, ours = both("fedavg", task={"examples": EVEN})
    for each in (loop, ours):
        each.round([0, 1])
    assert ours.engine.together
    with pytest.raises(AssertionError, match="not close"):
        close(snapshot(ours), snapshot(loop))


@pytest.mark.parametrize(
    "settings",
    [
        {"local_clip": 0.05, "local_weight_decay": 0.1, "local_momentum": 0.5},
        {"local_momentum": 0.0},
        {"local_optimizer": "adamw", "local_clip": 0.05, "local_weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "apfl"])
def test_local_training_has_the_same_settings(method: str, settings: dict[str, Any]) -> None:
    loop, ours = both(method, task={"examples": EVEN}, **settings)
    for each in (loop, ours):
        each.round([0, 1, 2])
    assert ("train_model", [0, 1, 2]) in ours.engine.together
    close(snapshot(ours), snapshot(loop))


def test_batch_norm_has_the_statistics_of_each_client() -> None:
    replies = []
    for each in both("fedavg", task={"net": Normed, "examples": EVEN}):
        cohort = each.engine.cohort([0, 1, 2], 0, training=True)
        model = each.task.outline().initial()
        replies.append(cohort.ask(each.method.Client.train_model, model, batches=Steps(3, 8)))
    close(*replies)
    means, counts = replies[1]["norm.running_mean"], replies[1]["norm.num_batches_tracked"]
    assert len(means.unique(dim=0)) == 3
    assert counts.tolist() == [3, 3, 3]


def test_buffers_that_a_network_assigns_to_are_each_clients() -> None:
    replies = []
    for each in both("fedavg", task={"net": Assigning, "examples": EVEN}):
        cohort = each.engine.cohort([0, 1, 2], 0, training=True)
        model = each.task.outline().initial()
        replies.append(cohort.ask(each.method.Client.train_model, model, batches=Steps(3, 8)))
    assert each.engine.together
    close(*replies)
    assert len(replies[1]["mean"].unique(dim=0)) == 3
    assert replies[1]["passes"].tolist() == [3, 3, 3]


# What the engine is built with.


def test_the_table_builds_it_with_its_settings() -> None:
    task = make_task()
    settings = EngineConfig("vmap", workers=2, cores_per_client=3, chunk=5)
    engine = build(settings, task, Probe, ProbeConfig(), seed=3)
    assert isinstance(engine, VmappedEngine)
    assert (engine.name, engine.chunk, engine.workers, engine.seed) == ("vmap", 5, 2, 3)
    resources = {"cores": engine.cores, "cores_per_client": 3, "chunk": 5}
    assert engine.resources(4) == resources
    usual = build(EngineConfig("vmap"), task, Probe, ProbeConfig(), seed=0)
    resources = {"cores": engine.cores, "cores_per_client": engine.cores, "chunk": None}
    assert usual.resources(4) == resources
    with pytest.raises(ValueError, match="greater than 0"):
        EngineConfig("vmap", chunk=0)


def test_a_group_is_computed_on_the_cores_of_one_client() -> None:
    class Client(federation.Client):
        @step
        def threads(self) -> Tree:
            return {"threads": torch.tensor(torch.get_num_threads())}

    before = torch.get_num_threads()
    ours = Recorded(make_task(), Client, None, seed=0, cores_per_client=before + 1)
    reply = ours.cohort(range(4), 0, training=False).ask(Client.threads)
    assert reply["threads"].tolist() == [before + 1] * 4
    assert len(ours.together) == 1
    assert torch.get_num_threads() == before


def test_a_run_ends_with_the_evaluations_of_the_loop() -> None:
    task = make_task(Normed, examples=EVEN, novel=2)
    keys: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "cohort": 3, "faults": {"drop": 0.2}}
    keys["method"] = {"local_steps": 3, "batch_size": 4}
    loop, ours = (
        hyperfed.train("pefll", task, **keys, engine=engine)
        for engine in ({"name": "loop"}, {"name": "vmap", "chunk": 2})
    )
    assert (ours.summary["engine"], ours.summary["chunk"]) == ("vmap", 2)
    for key in ("val_accuracy", "test_accuracy", "novel_accuracy", "bytes_up", "bytes_down"):
        assert ours.summary[key] == loop.summary[key]

"""Who is computed together, who is left to the loop, and what becomes of a client that fails."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed import federation, training, trees
from hyperfed.engines.calls import Call
from hyperfed.engines.local import vmap as vmapped
from hyperfed.engines.local.draws import OwnError
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import Kind, VmappedEngine
from hyperfed.federation import Each, step
from hyperfed.methods import METHODS
from hyperfed.system.randomness import seeded
from hyperfed.training import Batch, Batches, Epochs, Sgd, Steps
from hyperfed.trees import Tree
from probe import Client as Probe
from probe import Config as ProbeConfig
from together import EVEN, SEED, Recorded, both, left
from toys import CLASSES, DRAWING, FEATURES, Normed, TwoLayers, close, make_task, short, snapshot

# Who goes together.


@pytest.mark.parametrize(
    ("plan", "examples", "alike"),
    [
        (Steps(3, 8), (12, 7, 20, 9, 7, 8), [[0, 2, 3, 5], [1, 4]]),
        (Epochs(2, 8), (12, 7, 12, 9, 12, 8), [[0, 2, 4]]),
    ],
)
@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
def test_clients_with_batches_of_the_same_lengths_go_together(
    chunk: int | None,
    plan: Batches,
    examples: tuple[int, ...],
    alike: list[list[int]],
) -> None:
    task, client = make_task(examples=examples), METHODS["fedavg"].Client
    config = METHODS["fedavg"].Config(local_lr=0.1)
    ours = Recorded(task, client, config, seed=0, chunk=chunk)
    replies = [
        engine.cohort(range(6), 0, training=True).ask(
            client.train_model, task.outline().initial(), batches=plan
        )
        for engine in (LoopEngine(task, client, config, seed=0), ours)
    ]
    close(*replies)
    expected = [
        group[start : start + (chunk or 6)]
        for group in alike
        for start in range(0, len(group), chunk or 6)
    ]
    assert [clients for _, clients in ours.together] == expected


def test_clients_of_one_target_size_go_together() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    sizes = ("S", "L", "S", "L", "L", "S")
    loop, ours = both("fedavg", task={"models": models, "sizes": sizes, "examples": EVEN})
    for each in (loop, ours):
        each.round(range(6))
    assert [clients for _, clients in ours.engine.together] == [[0, 2, 5], [1, 3, 4]]
    close(snapshot(ours), snapshot(loop))


def test_novel_clients_without_labels_go_together_but_not_with_others() -> None:
    class Client(federation.Client):
        @step
        def inputs(self) -> Tree:
            return {"x": torch.stack([batch.x.sum() for batch in self.batches])}

    task = make_task(examples=EVEN, novel=2, unlabelled=True)
    ours = Recorded(task, Client, None, seed=0)
    loop = LoopEngine(task, Client, None, seed=0)
    replies = [
        engine.cohort(range(6), 0, training=False).ask(Client.inputs, batches=Steps(2, 8))
        for engine in (loop, ours)
    ]
    close(*replies)
    assert [clients for _, clients in ours.together] == [[0, 1, 2, 3], [4, 5]]


def test_evaluation_goes_together_where_clients_have_equally_many_examples() -> None:
    task = make_task(examples=(12, 7, 12, 7, 9))
    ours = Recorded(task, federation.Client, None, seed=0)
    models = trees.repeat(task.outline().initial(), 5)
    models = trees.tree_map(
        lambda leaf: leaf * torch.arange(5).view(-1, *[1] * (leaf.dim() - 1)), models
    )
    loop = LoopEngine(task, federation.Client, None, seed=0)
    replies = [
        engine.cohort(range(5), 0, training=False).ask(federation.Client.evaluate, Each(models))
        for engine in (loop, ours)
    ]
    close(*replies)
    assert [clients for _, clients in ours.together] == [[0, 2], [1, 3]]


def test_clients_that_remember_nothing_by_another_name_are_apart() -> None:
    class Client(federation.Client):
        @step
        def seen(self) -> Tree:
            new = "nothing" not in self.memory
            self.memory["nothing"] = {}
            return {"new": self.train.batch().x.sum() * 0 + new}

    ours = Recorded(make_task(examples=EVEN), Client, None, seed=0)
    for clients, new in (([0, 1], [1, 1]), ([0, 1, 2, 3], [0, 0, 1, 1])):
        cohort = ours.cohort(clients, 0, training=True)
        assert cohort.ask(Client.seen)["new"].tolist() == new
        ours.commit(cohort)
    assert [clients for _, clients in ours.together] == [[0, 1], [0, 1], [2, 3]]


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "pefll", "pfedla"])
def test_images_go_together(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """As they are stored: bytes, which become the network's input a batch at a time."""
    caplog.set_level(logging.INFO)
    keys: dict[str, Any] = {"rounds": 3, "evaluate_every": 3, "cohort": 5, "progress": False}
    keys["task"] = {"name": "digits", "clients": 6, "partition": "iid", "novel": 0.0}
    keys["method"] = short(method)
    loop, ours = (
        hyperfed.train(method, **keys, engine={"name": name, "cores_per_client": 1})
        for name in ("loop", "vmap")
    )
    assert left(caplog) == {}
    for mine, theirs in zip(ours.evaluations, loop.evaluations, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)


def test_calls_of_two_cohorts_do_not_mix() -> None:
    """A client may be in both: what was posted travels with what is asked."""

    class Client(federation.Client):
        @step
        def seen(self) -> Tree:
            self.scratch["x"] = x = self.scratch.get("x", 0) + next(iter(self.batches)).x
            return {"round": torch.tensor(self.round), "x": x}

    task = make_task(examples=EVEN)
    engines = [kind(task, Client, None, seed=0) for kind in (LoopEngine, Recorded)]
    plan = Steps(1, 4)
    calls = [Call(c, c, client, "seen", batches=plan) for c in (0, 1) for client in (2, 0)]
    for _ in range(2):
        loop, ours = (engine.answer(calls) for engine in engines)
        close(dict(enumerate(ours)), dict(enumerate(loop)))
    assert [clients for _, clients in engines[1].together] == [[2, 0]] * 4  # type: ignore[attr-defined]


class Drawing(federation.Client):
    """Draws in all ways that go together, also inside of what is differentiated."""

    @step
    def numbers(self) -> Tree:
        weights = torch.empty_like(self.train.batch().x[0]).exponential_(generator=self.generator)
        nn.init.uniform_(weights, 1, 2, generator=self.generator)
        return {"y": weights * torch.randn(FEATURES, generator=self.generator)}

    @step
    def batches_between_numbers(self) -> Tree:
        x = [batch.x * self.noise() for batch in self.draw_batches(Epochs(2, 5))]
        return {"y": torch.cat(x)}

    @step
    def in_an_objective(self) -> Tree:
        def objective(model: Tree, batch: Batch) -> tuple[Tensor, Tree]:
            (own,) = self.draw_batches(Steps(1, 4))
            return (model["y"] * self.noise() * own.x.sum(0)).sum(), {}

        start, batches = {"y": self.train.batch().x[0]}, self.draw_batches(Steps(3, 8))
        return training.fit(objective, start, batches, Sgd(0.1), trainable=start).model

    def noise(self) -> Tensor:
        return torch.rand((), generator=self.generator)


@pytest.mark.parametrize("name", [n for n, f in vars(Drawing).items() if hasattr(f, "step")])
@pytest.mark.parametrize("chunk", [None, 2])
def test_clients_that_draw_go_together_and_draw_what_they_would_alone(
    name: str, chunk: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_task(examples=(11, 11, 11))
    ours = Recorded(task, Drawing, None, seed=0, chunk=chunk)
    loop = LoopEngine(task, Drawing, None, seed=0)
    for number in (0, 1):
        cohorts = [engine.cohort(range(3), number, training=True) for engine in (ours, loop)]
        for _ in range(2):
            first, second = (cohort.ask(getattr(Drawing, name)) for cohort in cohorts)
            torch.testing.assert_close(first, second, rtol=1e-14, atol=0)
            assert len(first["y"].unique(dim=0)) == 3
    assert left(caplog) == {}
    assert {name for name, _ in ours.together} == {name}


# What is left to the loop.


class Odd(federation.Client):
    """Steps that one client can answer, but not all at once; they read what is its own."""

    @step
    def number(self) -> Tree:
        return {"y": torch.tensor(self.id)}

    @step
    def number_compared(self) -> Tree:
        return {"y": torch.tensor(self.id == 2)}

    @step
    def number_found(self) -> Tree:
        return {"y": torch.tensor(self.id in (1, 2))}

    @step
    def number_as_key(self) -> Tree:
        return {"y": torch.tensor({0: 5.0, 1: 6.0, 2: 7.0}[self.id])}

    @step
    def number_as_index(self) -> Tree:
        return {"y": torch.tensor([5.0, 6.0, 7.0, 8.0][self.id])}

    @step
    def number_as_text(self) -> Tree:
        return {"y": torch.tensor(float(f"{self.id}1"))}

    @step
    def number_as_truth(self) -> Tree:
        return {"y": torch.tensor(1.0 if self.id else 0.0)}

    @step
    def draw_elsewhere(self) -> Tree:
        return {"y": torch.tensor(self.generator.initial_seed() % 1000)}

    @step
    def drawn_by_a_tensor(self) -> Tree:
        x = self.train.batch().x
        return {"y": torch.bernoulli(x.sigmoid(), generator=self.generator)}

    @step
    def drawn_into_a_new_tensor(self) -> Tree:
        return {"y": torch.empty(3).normal_(generator=self.generator)}

    @step
    def global_draw(self) -> Tree:
        return {"y": torch.rand(2) * 0}

    @step
    def chosen(self) -> Tree:
        x = self.train.batch().x
        return {"y": x.sum(0) if x.sum() > 0 else x[0]}

    @step
    def listed(self) -> Tree:
        return {"y": torch.tensor(self.train.batch().x[0].tolist())}

    @step
    def in_place(self) -> Tree:
        total = torch.zeros(FEATURES, dtype=torch.float64)
        total += self.train.batch().x.sum(0)
        return {"y": total}

    @step
    def of_other_shape(self) -> Tree:
        y = self.train.labels
        return {"y": y[y == 0].sum()}

    @step
    def no_tensor_in_scratch(self) -> Tree:
        self.scratch["turn"] = self.scratch.get("turn", 0) + 1
        return {"y": self.train.batch().x.sum() * self.scratch["turn"]}


WHO = "it asks who its client is"
DECIDES = "a tensor decides what Python does (if, and, or, not, in)"
SHARED = "it writes into a tensor that all clients share"
ODD = {
    "number": WHO,
    "number_compared": WHO,
    "number_found": WHO,
    "number_as_key": WHO,
    "number_as_index": WHO,
    "number_as_text": WHO,
    "number_as_truth": WHO,
    "draw_elsewhere": "it asks a generator for more than draws",
    "drawn_by_a_tensor": "what it draws with torch.bernoulli depends on a tensor",
    "drawn_into_a_new_tensor": "it fills a tensor that it made (normal_) and not a new one",
    "global_draw": "it draws from PyTorch's global generator, not from self.generator",
    "chosen": DECIDES,
    "listed": "it takes a tensor out of PyTorch (tolist, numpy)",
    "in_place": SHARED,
    "of_other_shape": "the shape of a tensor depends on numbers in another",
    "no_tensor_in_scratch": "it remembers what is no tensor",
}


@pytest.mark.parametrize(("name", "why"), ODD.items())
def test_a_step_that_cannot_go_together_is_the_loops_is_told_and_tried_once(
    name: str, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    task = make_task(examples=(12, 12, 12))
    ours, loop = Recorded(task, Odd, None, seed=0), LoopEngine(task, Odd, None, seed=0)
    function = getattr(Odd, name)
    cohorts = [engine.cohort(range(3), 0, training=False) for engine in (ours, loop)]
    for _ in range(3):
        first, second = (cohort.ask(function) for cohort in cohorts)
        assert torch.equal(first["y"], second["y"])
        monkeypatch.setattr(vmapped, "vmap", None)  # is not used again
    assert left(caplog) == {name: why}
    assert ours.together == []


def test_a_library_finds_no_way_to_make_an_array_of_what_is_each_clients_own() -> None:
    """Where it looks for one, Python from 3.13 on prints any other error than that it is absent."""
    for name in ("__array__", "__torch_function__"):
        assert not hasattr(vmapped._ANYONE, name)
    with pytest.raises(OwnError, match=WHO):
        _ = vmapped._ANYONE.real


class Recurrent(nn.Module):
    """Has an operation that ``vmap`` knows the gradient of, but not the operation."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.body = kind(1, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x[..., None])[0][:, -1])


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_recurrent_networks_train_together_and_are_evaluated_one_by_one(
    kind: type[nn.RNNBase], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loop, ours = both("fedavg", task={"net": lambda: Recurrent(kind), "examples": EVEN})
    counts = []
    for each in (loop, ours):
        for number in range(2):
            each.round([0, 1, 2], number)
        cohort = each.engine.cohort([0, 1, 2], 2, training=False)
        counts.append(cohort.ask(each.method.Client.evaluate, each.server.personalize(cohort)))
    close(snapshot(ours), snapshot(loop))
    close(*counts)
    assert ours.engine.together == [("train_model", [0, 1, 2])] * 2
    assert list(left(caplog)) == ["evaluate"]


@pytest.mark.parametrize(
    ("fits", "attempts", "error"),
    [
        (3, [4, 2, 2], torch.OutOfMemoryError("CUDA out of memory")),
        (1, [4, 2, 1, 1, 1, 1], torch.OutOfMemoryError("CUDA out of memory")),
        (0, [4, 2, 1], torch.OutOfMemoryError("CUDA out of memory")),
        (3, [4, 2, 2], RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...")),
    ],
)
def test_as_many_clients_go_together_as_fit_into_memory(
    fits: int, attempts: list[int], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tried: list[int] = []

    class Small(Recorded):
        def _stacked(self, kind: Kind, calls: Sequence[Call]) -> Tree:
            tried.append(len(calls))
            if len(calls) > fits:
                raise error
            return super()._stacked(kind, calls)

    loop, ours = both("fedavg", task={"examples": EVEN})
    ours.engine = Small(ours.task, ours.method.Client, ours.config, seed=SEED)
    for each in (loop, ours):
        each.round([0, 1, 2, 3])
    close(snapshot(ours), snapshot(loop))
    assert tried == attempts
    ours.round([0, 1, 2, 3], 1)
    assert tried[len(attempts) :] == [attempts[-1]] * (4 // attempts[-1] if fits else 0)
    said = "step train_model: memory for fewer than 4 clients at once"
    assert caplog.records[0].getMessage() == said


@pytest.mark.parametrize("net", DRAWING)
def test_networks_that_draw_are_the_loops(
    net: type[TwoLayers], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loop, ours = both("fedavg", task={"net": net, "examples": EVEN})
    for number in range(2):
        for each in (loop, ours):
            each.round([0, 1, 2], number)
    torch.testing.assert_close(snapshot(ours), snapshot(loop), rtol=0, atol=0)
    assert ours.engine.together == []
    assert left(caplog) == {}


class Spoiling(federation.Client):
    """Leaves the target in another state, as an update of statistics that breaks off does."""

    @step
    def spoil(self) -> Tree:
        self.module.norm.momentum += 1
        float(self.train.batch().x.sum())
        return {"momentum": torch.tensor(self.module.norm.momentum)}


def test_what_a_failed_attempt_left_in_a_network_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    task = make_task(Normed, examples=EVEN)
    ours, loop = (
        kind(task, Spoiling, None, seed=0, workers=1).cohort(range(3), 0, training=False)
        for kind in (VmappedEngine, LoopEngine)
    )
    assert torch.equal(ours.ask(Spoiling.spoil)["momentum"], loop.ask(Spoiling.spoil)["momentum"])
    assert list(left(caplog)) == ["spoil"]


# Clients that are lost.


class Keeping(federation.Client):
    """Keeps its model, and everything that it computed in a round."""

    @step
    def train_model(self, model: Tree) -> Tree:
        model = self.memory.get("model", model)
        local, parameters = Sgd(0.1), self.parameters
        trained = training.fit(self.objective, model, self.batches, local, trainable=parameters)
        self.memory["model"] = self.scratch["model"] = trained.model
        return trained.model


def train_keeping(engine: LoopEngine, number: int, clients: Sequence[int] = range(4)) -> Any:
    cohort = engine.cohort(clients, number, training=True)
    model = engine.task.outline().initial()
    reply = cohort.ask(Keeping.train_model, model, batches=Steps(2, 8))
    engine.commit(cohort)
    return cohort, reply


def test_a_client_that_raises_is_lost_alone_and_others_go_together_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    task = make_task(examples=EVEN)
    good = task.y.clone()
    ours, loop = (kind(task, Keeping, None, seed=0) for kind in (Recorded, LoopEngine))
    for engine in (ours, loop):
        train_keeping(engine, 0)
    before = trees.clone(ours.memory[2])
    task.y[task.train[2]] = 99  # a label of no class
    (cohort, reply), (other, expected) = (train_keeping(engine, 1) for engine in (ours, loop))
    assert cohort.state.lost == other.state.lost
    assert list(cohort.state.lost) == [2]
    close(reply, expected)
    assert [trees.tree_map(torch.equal, ours.memory[2], before)] == [
        {"model": dict.fromkeys(before["model"], True)}
    ]
    task.y.copy_(good)
    train_keeping(ours, 2)
    assert [clients for _, clients in ours.together] == [[0, 1, 2, 3]] * 2
    assert left(caplog) == {}


def test_only_the_chunk_of_a_client_that_raises_is_the_loops() -> None:
    task = make_task(examples=EVEN)
    task.y[task.train[3]] = 99
    ours = Recorded(task, Keeping, None, seed=0, chunk=2)
    cohort, _ = train_keeping(ours, 0, range(6))
    assert list(cohort.state.lost) == [3]
    assert [clients for _, clients in ours.together] == [[0, 1], [4, 5]]
    assert sorted(ours.memory) == [0, 1, 2, 4, 5]


def test_a_client_whose_reply_is_not_finite_is_lost_and_keeps_its_memory() -> None:
    task = make_task(examples=EVEN)
    ours = Recorded(task, Keeping, None, seed=0)
    train_keeping(ours, 0)
    before = trees.clone(ours.memory[1])
    task.x[task.train[1]] = torch.nan
    cohort, _ = train_keeping(ours, 1)
    assert cohort.state.lost == {1: "what it would remember is not finite"}
    assert len(ours.together) == 2
    assert torch.equal(ours.memory[1]["model"]["head.bias"], before["model"]["head.bias"])


def test_what_is_served_raises_what_the_client_raised() -> None:
    task = make_task(examples=EVEN, novel=2, unlabelled=True)
    engine = Recorded(task, Probe, ProbeConfig(), seed=0)
    with pytest.raises(training.UnlabelledError, match="has no labels"):
        engine.cohort([4, 5], 0, training=False).ask(Probe.labels)
    with pytest.raises(PermissionError, match="test data is for evaluation"):
        engine.cohort([0, 1], 0, training=False).ask(Probe.peek)


def test_a_memory_keeps_no_other_clients_tensors_alive() -> None:
    ours = Recorded(make_task(examples=EVEN), Keeping, None, seed=0)
    cohort, _ = train_keeping(ours, 0)
    drafts = [ours.memories.of(Call(cohort.state.number, 0, c, "")) for c in range(4)]
    kept = {"drafts": dict(zip("abcd", [{"m": m, "s": s} for m, s in drafts], strict=True))}
    kept["memory"] = {str(client): tree for client, tree in ours.memory.items()}
    assert len(ours.together) == 1
    for _, leaf in trees.leaves(kept):
        assert leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()

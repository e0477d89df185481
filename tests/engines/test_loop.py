"""The contract, on the reference engine."""

import threading
from typing import Any

import pytest
import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hyperfed import federation, training, trees
from hyperfed.engines.loop import Faults, LoopEngine
from hyperfed.federation import AllLostError, Each, Task, step
from hyperfed.nets.targets import LeNet
from hyperfed.randomness import seeded
from hyperfed.training import Epochs, Steps
from hyperfed.trees import Tree
from toys import CLASSES, EXAMPLES, Federation, TwoLayers, logits, make_task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """Which clients misbehave, and how."""

    bad: tuple[int, ...] = ()
    how: str = ""


class Client(federation.Client):
    """Steps that show what a client sees."""

    @step
    def draws(self) -> Tree:
        inputs = torch.stack([batch.x.sum() for batch in self.batches])
        return {"batches": inputs, "other": torch.rand(2, generator=self.generator)}

    @step
    def sizes_of_batches(self) -> Tree:
        sizes = [len(batch.y) for batch in self.batches]
        return {"sizes": torch.tensor(sizes), "rows": torch.tensor(sum(sizes))}

    @step
    def remember(self) -> Tree:
        count = self.memory.get("count", torch.tensor(0)) + 1
        self.memory["count"] = count
        self.scratch["count"] = self.scratch.get("count", torch.tensor(0)) + 1
        return self.answer({"memory": count, "scratch": self.scratch["count"]})

    @step(like="model")
    def echo(self, model: Tree) -> Tree:
        return self.answer(dict(model))

    @step
    def total(self, model: Tree) -> Tree:
        return {"total": torch.cat(list(model.values())).sum()}

    @step
    def peek(self) -> Tree:
        return {"x": self.test.batch().x}

    @step
    def labels(self) -> Tree:
        return {"y": self.train.batch().y[:1]}

    def answer(self, good: Tree) -> Tree:
        if self.id not in self.config.bad:
            return good
        match self.config.how:
            case "raise":
                raise OSError("disk on fire")
            case "nan":
                return trees.tree_map(lambda leaf: leaf * torch.nan, good)
            case "name":
                return good | {"surplus": torch.zeros(1)}
            case "shape":
                return trees.tree_map(lambda leaf: leaf.unsqueeze(0), good)
            case "dtype":
                return trees.tree_map(lambda leaf: leaf.half(), good)
            case _:
                return None  # type: ignore[return-value]


def engine_of(task: Task | None = None, config: Config | None = None, **options: Any) -> LoopEngine:
    return LoopEngine(task or make_task(), Client, config or Config(), seed=0, **options)


MODEL = {"w": torch.ones(2)}


@pytest.mark.parametrize("batches", [Steps(3, 4), Epochs(2, 4)])
def test_draws_depend_on_client_round_and_step_and_not_on_the_cohort(batches) -> None:
    def ask(clients: list[int], number: int, **options: Any) -> dict[int, Tree]:
        cohort = engine_of(make_task(examples=(12,) * 4), **options).cohort(
            clients, number, training=True
        )
        reply = cohort.ask(Client.draws, batches=batches)
        return {client: trees.take(reply, i) for i, client in enumerate(clients)}

    alone, together = ask([2], 5), ask([3, 2, 0], 5, workers=2, cores_per_client=1)
    torch.testing.assert_close(alone[2], together[2], rtol=0, atol=0)
    for other in (ask([2], 6)[2], together[3]):
        assert not torch.equal(other["batches"], alone[2]["batches"])
        assert not torch.equal(other["other"], alone[2]["other"])


def test_asking_again_in_the_same_round_draws_anew() -> None:
    cohort = engine_of().cohort([0], 0, training=True)
    first = cohort.ask(Client.draws, batches=Steps(3, 4))
    assert not torch.equal(
        first["batches"], cohort.ask(Client.draws, batches=Steps(3, 4))["batches"]
    )


def test_steps_are_without_replacement_and_epochs_ragged() -> None:
    engine = engine_of()
    cohort = engine.cohort([1], 0, training=True)  # seven examples
    assert cohort.ask(Client.sizes_of_batches, batches=Steps(2, 5))["sizes"].tolist() == [[5, 5]]
    assert cohort.ask(Client.sizes_of_batches, batches=Steps(2, 50))["sizes"].tolist() == [[7, 7]]
    ragged = cohort.ask(Client.sizes_of_batches, batches=Epochs(2, 5))
    assert ragged["sizes"].tolist() == [[5, 2, 5, 2]]


def test_memory_survives_rounds_and_scratch_one_round() -> None:
    engine = engine_of()
    for number in range(2):
        cohort = engine.cohort([0, 1], number, training=True)
        for _ in range(2):
            reply = cohort.ask(Client.remember)
        engine.commit(cohort)
        assert reply["scratch"].tolist() == [2, 2]
        assert reply["memory"].tolist() == [2 * (number + 1)] * 2


def test_an_uncommitted_cohort_leaves_no_trace() -> None:
    engine = engine_of()
    engine.cohort([0], 0, training=False).ask(Client.remember)
    assert engine.memory == {}


@pytest.mark.parametrize("how", ["raise", "nan", "name", "shape", "dtype", "not a tree"])
def test_a_bad_reply_loses_its_client_and_keeps_its_memory(how: str) -> None:
    engine = engine_of()
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Client.remember)
    engine.commit(cohort)
    engine.config = Config((1,), how)
    cohort = engine.cohort([0, 1, 2], 1, training=True)
    step_ = Client.remember if how in ("nan", "raise") else Client.echo
    reply = cohort.ask(step_) if how in ("nan", "raise") else cohort.ask(step_, MODEL)
    engine.commit(cohort)
    assert list(cohort.state.lost) == [1]
    assert cohort.weight.tolist() == [EXAMPLES[0], 0, EXAMPLES[2]]
    assert engine.memory[1]["count"] == 1
    assert all(bool(leaf[1].eq(0).all()) for _, leaf in trees.leaves(reply))
    # A lost client is not asked again in this round.
    cohort.ask(Client.echo, MODEL)
    assert [e.client for e in cohort.state.exchanges if e.step == "echo"][-2:] == [0, 2]


def test_replies_unlike_the_majority_are_refused() -> None:
    engine = engine_of(config=Config((2,), "name"))
    cohort = engine.cohort([0, 1, 2], 0, training=True)
    cohort.ask(Client.remember)
    assert "surplus" in cohort.state.lost[2]


def test_all_lost_ends_the_round_and_says_why() -> None:
    cohort = engine_of(config=Config((0, 1), "raise")).cohort([0, 1], 0, training=True)
    with pytest.raises(AllLostError, match="client 0: OSError: disk on fire") as caught:
        cohort.ask(Client.echo, MODEL)
    assert isinstance(caught.value.__cause__, OSError)


def test_outside_training_what_a_client_raises_is_raised() -> None:
    cohort = engine_of(config=Config((1,), "raise")).cohort([0, 1], 0, training=False)
    with pytest.raises(OSError, match="disk on fire"):
        cohort.ask(Client.echo, MODEL)


def test_bytes_are_counted_per_direction_step_and_client() -> None:
    engine = engine_of(config=Config((2,), "raise"))
    cohort = engine.cohort([0, 2], 0, training=True)
    cohort.ask(Client.echo, {"w": torch.zeros(3), "n": torch.zeros(2, dtype=torch.int64)})
    cohort.ask(Client.echo, Each({"w": torch.zeros(2, 5)}))
    counted = [(e.step, e.client, e.down, e.up) for e in cohort.state.exchanges]
    assert counted == [("echo", 0, 28, 28), ("echo", 2, 28, 0), ("echo", 0, 20, 20)]


def test_each_client_may_be_sent_other_entries_and_the_rest_does_not_travel() -> None:
    cohort = engine_of().cohort([0, 2], 0, training=True)
    tree = {"v": torch.tensor([[1.0], [2.0]]), "w": torch.tensor([[10.0, 20.0], [30.0, 40.0]])}
    reply = cohort.ask(Client.total, Each(tree, [{"v", "w"}, {"w"}]))
    assert reply["total"].tolist() == [31, 70]
    assert [(e.client, e.down) for e in cohort.state.exchanges] == [(0, 12), (2, 8)]


def test_what_carries_a_gradient_is_not_sent() -> None:
    cohort = engine_of().cohort([0], 0, training=True)
    with pytest.raises(ValueError, match="no gradient crosses the network"):
        cohort.ask(Client.echo, {"w": torch.ones(1, requires_grad=True) * 2})


def test_only_an_evaluation_reads_test_data() -> None:
    cohort = engine_of().cohort([0], 0, training=False)
    with pytest.raises(PermissionError, match="test data is for evaluation"):
        cohort.ask(Client.peek)


def test_an_unlabelled_client_has_no_labels_but_can_be_evaluated() -> None:
    task = make_task(novel=1, unlabelled=True)
    cohort = engine_of(task).cohort([3], 0, training=False, fresh=True)
    with pytest.raises(Exception, match="has no labels"):
        cohort.ask(Client.labels)
    counts = cohort.ask(Client.evaluate, task.outline().initial())["test"]
    assert counts["count"].item() == 6
    assert counts["masked_correct"].item() == counts["correct"].item()
    known = engine_of(task).cohort([0], 0, training=False)
    assert known.ask(Client.labels)["y"].shape == (1, 1)


def test_evaluation_counts_by_hand() -> None:
    task = make_task()
    model = task.outline().initial()
    cohort = engine_of(task).cohort([1, 0], 0, training=False)
    counts = cohort.ask(Client.evaluate, model)
    for position, client in enumerate([1, 0]):
        for name, split in (("val", task.val), ("test", task.test)):
            x, y = task.x[split[client]], task.y[split[client]]
            output = logits(task.models["base"], model, x)
            mine = trees.take(counts[name], position)
            assert mine["count"] == len(y)
            assert mine["correct"] == (output.argmax(1) == y).sum()
            loss = nn.functional.cross_entropy(output, y, reduction="sum")
            torch.testing.assert_close(mine["loss"], loss.detach())


def test_masking_takes_absent_classes_out_at_minus_infinity() -> None:
    """A model that always says class 0 is right under the mask where class 0 is absent."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # All logits negative: a mask at zero instead of minus infinity would win.
            self.logit = nn.Parameter(torch.tensor([-1.0, -2.0, -3.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.logit.expand(len(x), CLASSES)

    task = make_task(Constant)
    task.y[task.train[0]] = 1
    task.y[task.test[0]] = 1
    cohort = engine_of(task).cohort([0], 0, training=False)
    counts = cohort.ask(Client.evaluate, task.outline().initial())["test"]
    assert counts["correct"].item() == 0
    assert counts["masked_correct"].item() == 6


def test_worker_threads_do_not_share_a_module() -> None:
    """``functional_call`` swaps weights inside the module: two threads on one would mix models."""
    rendezvous = threading.Barrier(2, timeout=20)

    class Slow(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            rendezvous.wait()  # both clients' weights are swapped in now
            return self.head(hidden)

    class Predicting(federation.Client):
        @step
        def output(self, model: Tree) -> Tree:
            return {"output": self.predict(model, self.train.batch(slice(3)).x)}

    task = make_task(Slow)
    engine = LoopEngine(task, Predicting, None, seed=0, workers=2, cores_per_client=1)
    one = task.outline().initial()
    models = trees.stack([one, trees.tree_map(torch.neg, one)])
    cohort = engine.cohort([0, 1], 0, training=False)
    output = cohort.ask(Predicting.output, Each(models))["output"]
    for client in (0, 1):
        x = task.x[task.train[client][:3]]
        expected = logits(TwoLayers().double(), trees.take(models, client), x)
        torch.testing.assert_close(output[client], expected.detach())


def test_worker_threads_do_not_share_a_methods_other_networks() -> None:
    """What ``Client.networks`` builds is copied for each worker, as the target is."""
    rendezvous = threading.Barrier(2, timeout=20)

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rendezvous.wait()  # both clients' weights are swapped in now
            return super().forward(x)

    class Encoding(federation.Client):
        @staticmethod
        def networks(outline: federation.Outline, config: Any) -> dict[str, nn.Module]:
            return {"encoder": Slow(outline.classes, outline.clients, dtype=outline.dtype)}

        @step
        def encode(self, model: Tree) -> Tree:
            x = torch.ones(1, self.classes, dtype=torch.float64)
            return {"output": training.apply(self.network("encoder"), model, x)}

    task = make_task(novel=1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine = LoopEngine(task, Encoding, None, seed=0, workers=2, cores_per_client=1)
    assert torch.equal(torch.get_rng_state(), before)
    one = trees.model_of(Encoding.networks(task.outline(), None)["encoder"])
    models = trees.stack([one, trees.tree_map(torch.neg, one)])
    output = engine.cohort([0, 1], 0, training=False).ask(Encoding.encode, Each(models))["output"]
    expected = one["weight"].sum(1) + one["bias"]  # one output for each known client
    torch.testing.assert_close(output[:, 0], torch.stack([expected, -expected]))


def test_a_newcomers_engine_builds_the_networks_of_the_trained_task() -> None:
    class Encoding(federation.Client):
        @staticmethod
        def networks(outline: federation.Outline, config: Any) -> dict[str, nn.Module]:
            return {"encoder": nn.Linear(1, outline.clients)}

        @step
        def width(self) -> Tree:
            return {"width": torch.tensor(len(trees.model_of(self.network("encoder"))["bias"]))}

    trained = make_task()
    task = make_task(novel=1, examples=(5,))  # the newcomer alone: no known client
    engine = LoopEngine(task, Encoding, None, seed=0, outline=trained.outline())
    assert engine.cohort([0], 0, training=False).ask(Encoding.width)["width"].item() == 4


class Dropping(TwoLayers):
    """Draws in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x))))


class Losing(federation.Client):
    """Reports a loss in training mode."""

    @step
    def training_loss(self, model: Tree) -> Tree:
        loss, _ = self.objective(model, self.train.batch())
        return {"loss": loss}


def test_dropout_is_a_function_of_client_and_round_and_leaves_the_global_generator() -> None:
    task = make_task(Dropping)
    model = task.outline().initial()

    def losses(clients: list[int], number: int = 0, **options: Any) -> list[float]:
        engine = LoopEngine(task, Losing, None, seed=0, **options)
        cohort = engine.cohort(clients, number, training=True)
        values: list[float] = cohort.ask(Losing.training_loss, model)["loss"].tolist()
        return values

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = losses([0, 1, 2])
    assert losses([2, 0], workers=2, cores_per_client=1) == [first[2], first[0]]
    assert losses([0], 1) != first[:1]
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_group_a_cohort_and_share_its_fate() -> None:
    sizes = ("S", "L", "S", "L")
    task = make_task(models={"S": TwoLayers().double(), "L": TwoLayers().double()}, sizes=sizes)
    cohort = engine_of(task, Config((1,), "raise")).cohort([0, 1, 2, 3], 0, training=True)
    groups = cohort.sizes
    assert {size: group.ids.tolist() for size, group in groups.items()} == {
        "S": [0, 2],
        "L": [1, 3],
    }
    assert groups["L"].size == "L"
    groups["L"].ask(Client.echo, MODEL)
    assert cohort.weight.tolist() == [EXAMPLES[0], 0, EXAMPLES[2], EXAMPLES[3]]


def test_injected_faults_shrink_a_cohort_reproducibly() -> None:
    def lost(faults: Faults, training: bool = True) -> dict[int, str]:
        engine = engine_of(make_task(examples=(5,) * 40), faults=faults)
        cohort = engine.cohort(range(40), 3, training=training)
        cohort.ask(Client.echo, MODEL)
        return dict(cohort.state.lost)

    dropped = lost(Faults(drop=0.3))
    assert 3 <= len(dropped) <= 25
    assert dropped == lost(Faults(drop=0.3))
    assert set(lost(Faults(nan=0.3)).values()) == {"the reply is not finite"}
    assert lost(Faults(drop=0.3), training=False) == {}


def test_other_cores_per_client_agree_to_1e_6_on_a_network_that_uses_them() -> None:
    """The arithmetic of the tiny tasks is too small for PyTorch to share among threads."""
    draw = torch.Generator().manual_seed(0)
    with seeded(0, "net"):
        net = LeNet((3, 32, 32), CLASSES, width=16).double()
    x = torch.randn(96, 3, 32, 32, dtype=torch.float64, generator=draw)
    y = torch.randint(CLASSES, (96,), generator=draw)
    rows = [torch.arange(96)]
    task = Task("images", x, y, rows, rows, rows, {"base": net}, CLASSES)
    states = []
    for cores in (1, 2):
        federation_ = Federation("pfedhn", task, {"cores_per_client": cores}, local_steps=5)
        federation_.round([0])
        states.append(federation_.server.state())
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)

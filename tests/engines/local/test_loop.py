"""The reference engine: worker threads, their own copies of modules, their cores."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed import federation, functional, trees
from hyperfed.engines.local.loop import LoopEngine, fair_workers
from hyperfed.engines.made_up import EXAMPLES
from hyperfed.federation import Each, step
from hyperfed.nets.targets import LeNet
from hyperfed.system.randomness import seeded
from hyperfed.task import Outline, Task
from hyperfed.trees import Tree
from toys import CLASSES, DRAWING, FEATURES, Dropping, Federation, TwoLayers, logits, make_task


def test_worker_threads_do_not_share_a_module() -> None:
    """``functional.apply`` puts weights into the module: two threads on one would mix models."""
    rendezvous = threading.Barrier(2, timeout=20)

    class Slow(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.body(x))
            if not self.training:  # as in the trial whether it draws
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
        def networks(outline: Outline, config: Any) -> dict[str, nn.Module]:
            return {"encoder": Slow(outline.classes, outline.clients, dtype=outline.dtype)}

        @step
        def encode(self, model: Tree) -> Tree:
            x = torch.ones(1, self.classes, dtype=torch.float64)
            return {"output": functional.apply(self.network("encoder"), model, x)}

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
        def networks(outline: Outline, config: Any) -> dict[str, nn.Module]:
            return {"encoder": nn.Linear(1, outline.clients)}

        @step
        def width(self) -> Tree:
            return {"width": torch.tensor(len(trees.model_of(self.network("encoder"))["bias"]))}

    trained = make_task()
    task = make_task(novel=1, examples=(5,))  # the newcomer alone: no known client
    home = LoopEngine(trained, Encoding, None, seed=0)
    engine = LoopEngine(task, Encoding, None, seed=0, home=home)
    assert engine.cohort([0], 0, training=False).ask(Encoding.width)["width"].item() == 4


class Losing(federation.Client):
    """Reports a loss in training mode."""

    @step
    def training_loss(self, model: Tree) -> Tree:
        loss, _ = self.objective(model, self.train.batch())
        return {"loss": loss}


def losses(task: Task, clients: list[int], number: int = 0, **options: Any) -> list[float]:
    engine = LoopEngine(task, Losing, None, **{"seed": 0} | options)
    cohort = engine.cohort(clients, number, training=True)
    model = task.outline().initial()
    values: list[float] = cohort.ask(Losing.training_loss, model)["loss"].tolist()
    return values


class DroppingOfMany(Dropping):
    """Draws in no batch as small as that of a trial."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(self.dropout(hidden) if len(x) > EXAMPLES else hidden)


@pytest.mark.parametrize("net", [*DRAWING, DroppingOfMany])
def test_what_a_network_draws_is_a_function_of_client_and_round_and_leaves_the_global_generator(
    net: type[TwoLayers],
) -> None:
    task = make_task(net)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = losses(task, [0, 1, 2])
    assert losses(task, [2, 0], workers=2, cores_per_client=1) == [first[2], first[0]]
    assert losses(task, [0], 1) != first[:1]
    assert losses(task, [0], seed=1) != first[:1]
    assert torch.equal(torch.get_rng_state(), before)


class Recurrent(nn.LSTM):
    """Draws between its layers, without a part that is called dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


@pytest.mark.parametrize("net", [nn.Dropout(0.5), Recurrent(5, 4, num_layers=2, dropout=0.5)])
def test_what_a_methods_other_networks_drop_is_a_function_of_client_and_round(
    net: nn.Module,
) -> None:
    class Beside(federation.Client):
        @staticmethod
        def networks(outline: Outline, config: Any) -> dict[str, nn.Module]:
            return {"beside": net}

        @step
        def output(self) -> Tree:
            own = self.network("beside")
            x = torch.ones(2, 3, 5)
            return {"output": functional.apply(own, trees.model_of(own), x, train=True)}

    def told(clients: list[int], number: int = 0, **options: Any) -> Tensor:
        engine = LoopEngine(make_task(), Beside, None, seed=0, **options)
        return engine.cohort(clients, number, training=True).ask(Beside.output)["output"].detach()

    first = told([0, 1, 2])
    assert torch.equal(told([2, 0], workers=2, cores_per_client=1), first[[2, 0]])
    assert not torch.equal(told([0], 1), first[:1])


def test_what_makes_examples_ready_draws_as_networks_do() -> None:
    task = replace(make_task(), transform=lambda x: x + torch.randn_like(x))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = losses(task, [0, 1, 2])
    assert losses(task, [2, 0], workers=2, cores_per_client=1) == [first[2], first[0]]
    assert torch.equal(torch.get_rng_state(), before)


def test_what_makes_examples_ready_need_not_take_those_of_a_trial() -> None:
    """Such as codes that are not negative."""
    task = make_task()
    task = replace(task, x=torch.arange(len(task.x)).double() % FEATURES, transform=one_hot)
    assert len(losses(task, [0, 1])) == 2


def one_hot(x: Tensor) -> Tensor:
    return nn.functional.one_hot(x.long(), FEATURES).double()


@pytest.mark.parametrize(
    ("clients", "places", "workers"),
    [(1, 1, 1), (2, 2, 2), (3, 2, 3), (4, 2, 2), (5, 2, 3), (50, 2, 2), (17, 3, 3), (45, 16, 23)],
)
def test_as_many_workers_as_keep_all_places_busy(clients: int, places: int, workers: int) -> None:
    assert fair_workers(clients, places) == workers


@pytest.mark.slow
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

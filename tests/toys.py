"""Tiny float64 tasks on which the truth can be computed independently."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.data.arrays import IGNORED
from hyperfed.data.own import token_accuracy, token_cross_entropy
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.federation import Server
from hyperfed.methods import METHODS
from hyperfed.runs.run import Run
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import Tree

FEATURES, CLASSES = 5, 3
EXAMPLES = (12, 7, 20, 9)
"""Training examples of each client: unequal, so that a wrong weight shows."""


class TwoLayers(nn.Module):
    """A body and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Saying(TwoLayers):
    """Gives log-probabilities, by a function that is no layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(dim=-1)


class Dropping(TwoLayers):
    """Draws in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.body(x))))


class DroppingByFunction(TwoLayers):
    """Draws without a module that says so."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(torch.tanh(self.body(x)), 0.5, self.training))


class Attending(TwoLayers):
    """Draws in a module that is not called dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)[:, None].expand(-1, 3, -1)
        return self.head(self.attention(hidden, hidden, hidden)[0].mean(dim=1))


class RandomSlopes(TwoLayers):
    """Draws in its activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.rrelu(self.body(x), training=self.training))


DRAWING = (Dropping, DroppingByFunction, Attending, RandomSlopes)


class Normed(nn.Module):
    """A body with batch-norm: buffers that must travel or stay on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))))


class Assigning(TwoLayers):
    """Counts, and keeps a running mean, in buffers that it assigns to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("passes", torch.tensor(0))
        self.register_buffer("mask", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.passes = self.passes + 1
        self.mask = torch.ones(len(x), 1)  # made anew, for batches of any length
        return self.head((hidden - self.mean) * self.mask)


class Stemmed(Normed):
    """On a frozen stem with batch-norm of its own, which is part of the task."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(FEATURES)
        nn.init.uniform_(norm.running_mean)
        self.stem = nn.Sequential(nn.Linear(FEATURES, FEATURES), norm).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


def make_task(
    net: Callable[[], nn.Module] = TwoLayers,
    examples: Sequence[int] = EXAMPLES,
    **options: Any,
) -> Task:
    """A classification task; client i has ``examples[i]`` training and 6 + 6 other examples."""
    draw = torch.Generator().manual_seed(1)
    sizes = [(count, 6, 6) for count in examples]
    total = sum(map(sum, sizes))
    x = torch.randn(total, FEATURES, dtype=torch.float64, generator=draw)
    y = torch.randint(CLASSES, (total,), generator=draw)
    rows = iter(torch.arange(total).split([part for size in sizes for part in size]))
    splits = [(next(rows), next(rows), next(rows)) for _ in sizes]
    with seeded(0, "toy"):
        model = net().double()
    return Task(
        name="toy",
        y=y,
        train=[train for train, _, _ in splits],
        val=[val for _, val, _ in splits],
        test=[test for _, _, test in splits],
        **({"x": x, "models": {"base": model}, "classes": CLASSES, "fingerprint": "toy"} | options),
    )


def far_task() -> Task:
    """With batch-norm, which the statistics that it begins with are of no use to."""
    task = make_task(Normed, examples=(12, 7, 20, 9, 9), novel=2)
    task.x.mul_(5).add_(7)
    return task


class Tagger(nn.Module):
    """Says something of every token, whatever stands beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(7, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def make_token_task(more: int = 2, **options: Any) -> Task:
    """A task with a label for every token; behind three that count are ``more`` that do not."""
    task = make_task(Tagger, **options)
    draw = torch.Generator().manual_seed(2)
    x, others = (torch.randint(7, (len(task.x), of), generator=draw) for of in (3, more))
    return replace(
        task,
        x=torch.cat([x, others], dim=1),
        y=F.pad(x % CLASSES, (0, more), value=IGNORED),
        loss=token_cross_entropy,
        score=token_accuracy,
    )


def both_labels_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, y.to(output))


def both_are_right(output: Tensor, y: Tensor) -> Tensor:
    return ((output > 0) == y).all(dim=-1).double()


class TwoLabels(TwoLayers):
    """Says of each of two labels whether it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)


def make_task_of_two_labels(**options: Any) -> Task:
    """A task whose examples have two labels side by side, each of which may hold."""
    own = {"classes": 2, "loss": both_labels_loss, "score": both_are_right}
    task = make_task(TwoLabels, **own, **options)
    return replace(task, y=(task.x[:, :2] > 0).long())


def half_square(output: Tensor, y: Tensor) -> Tensor:
    """Half the mean squared error of (B, 1) outputs."""
    return (output.squeeze(-1) - y).square().mean() / 2


def make_quadratic_task(**options: Any) -> Task:
    """Linear regression on the labels: a client's loss is w'Aw/2 - b'w + c; see ``quadratic``."""
    with seeded(0, "quadratic"):
        models = {"base": nn.Linear(FEATURES, 1, bias=False).double()}
    settings = {"models": models, "classes": 0, "loss": half_square}
    return make_task(**settings, score=lambda output, y: -(output.squeeze(-1) - y), **options)


def quadratic(task: Task, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A, (FEATURES, FEATURES), and b, (FEATURES,), of the mean loss on some rows of its data."""
    x, y = task.x[rows], task.y[rows].double()
    return x.T @ x / len(rows), x.T @ y / len(rows)


def close(actual: Any, expected: Any) -> None:
    """Checks that trees of float64 tensors are equal but for the order of sums."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


class Federation:
    """A method on a task, round by round."""

    def __init__(self, method: str, task: Task, engine: Any = None, **settings: Any) -> None:
        self.method: ModuleType = METHODS[method]
        self.task = task
        self.config = self.method.Config(**settings)
        with seeded(0, "server"):
            self.server: Server = self.method.Server(task.outline(), self.config)
        options = {"seed": 0} | (engine or {})
        self.engine = LoopEngine(task, self.method.Client, self.config, **options)
        self.server.to(self.engine.device)

    def round(self, clients: Sequence[int], number: int = 0) -> Any:
        cohort = self.engine.cohort(clients, number, training=True)
        self.server.round(cohort)
        self.engine.commit(cohort)
        return cohort

    def personal(self, client: int) -> dict[str, Tensor]:
        """The model that a client uses."""
        cohort = self.engine.cohort([client], 99, training=False)
        reply = cohort.ask(self.method.Client.export, self.server.personalize(cohort))
        return {name: value[0] for name, value in reply.items()}


def check_that_novel_clients_measure(ours: Federation, kind: type[LoopEngine]) -> None:
    """Novel clients of :func:`far_task` have batch-norm's statistics of their inputs."""
    task, client_class = ours.task, ours.method.Client
    ours.engine = kind(task, client_class, ours.config, seed=0)
    ours.round([0, 1])
    cohort = ours.engine.cohort([3, 4], 99, training=False)
    found = cohort.ask(client_class.export, ours.server.personalize(cohort))
    for place, client in enumerate((3, 4)):
        model, x = trees.take(found, place), task.x[task.train[client]]
        body = x @ model["body.weight"].T + model["body.bias"]
        close(model["norm.running_mean"], body.mean(dim=0))
        close(model["norm.running_var"], body.var(dim=0))
    known, initial = ours.personal(2), task.initial("base")  # it was never asked
    torch.testing.assert_close(known["norm.running_var"], initial["norm.running_var"])


def both(method: str, kind: Callable[..., LoopEngine], device: torch.device) -> list[Federation]:
    """The same federation on the CPU and on a device, there by an engine of a kind."""
    made = [Federation(method, make_task(Normed, novel=1), **short(method)) for _ in range(2)]
    there = made[1]
    there.engine = kind(there.task, there.method.Client, there.config, seed=0, device=device)
    there.server.to(device)
    return made


def snapshot(federation: Federation) -> Tree:
    """A copy of what there is between two rounds: the server, and what clients remember."""
    memory = {str(client): tree for client, tree in sorted(federation.engine.memory.items())}
    return trees.clone(trees.to({"server": federation.server.state(), "memory": memory}, CPU))


def recorded(run: Run, *but: str) -> Any:
    """All that a run records but for what time, and whatever else is named, decides."""
    evaluations = [vars(evaluation) | {"seconds": None} for evaluation in run.evaluations]
    left_out = ("seconds", "commit", *but)
    return evaluations, {key: of for key, of in run.summary.items() if key not in left_out}


LENGTHS = ("_steps", "_rounds", "_epochs")
"""How settings end that say how long something is done."""


def lengths(method: str, length: int = 2) -> dict[str, int]:
    """The same short length of all that a method has beside local training.

    What is shorter by default stays so, but for a newcomer's training, which there is then.
    """
    fields = METHODS[method].Config.__dataclass_fields__
    usual = {key: of.default for key, of in fields.items() if key.endswith(LENGTHS)}
    return {
        key: length
        for key, default in usual.items()
        if default is not None and not key.startswith("local_")
        if default > length or key.startswith("novel_")
    }


def short(method: str, **settings: Any) -> dict[str, Any]:
    """Settings for a few local steps, those that the method has."""
    known = METHODS[method].Config.__dataclass_fields__
    few = {"local_steps": 3, "batch_size": 4, "local_lr": 0.1}
    few |= lengths(method) | {"phase_one_rounds": 1} | settings
    return {key: value for key, value in few.items() if key in known}


PLAIN: dict[str, Any] = {
    "local_momentum": 0.0,
    "local_weight_decay": 0.0,
    "local_clip": None,
}
"""Local training by plain gradient steps."""

ONE_STEP: dict[str, Any] = PLAIN | {"local_steps": 1, "batch_size": 10_000, "local_lr": 0.1}
"""One of them, on all of a client's data."""


def logits(net: nn.Module, model: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network in training mode, written with PyTorch's own functional call."""
    output: Tensor = torch.func.functional_call(net.train(), model, (x,))
    return output


def client_loss(task: Task, client: int, model: dict[str, Tensor]) -> Tensor:
    """Mean cross entropy of a model on all training data of a client, differentiable."""
    index = task.train[client]
    return F.cross_entropy(logits(task.models["base"], model, task.x[index]), task.y[index])


def torch_sgd(
    task: Task,
    client: int,
    start: dict[str, Tensor],
    steps: int,
    *,
    names: Collection[str] | None = None,
    penalty: Callable[[nn.Module], Tensor | float] = lambda net: 0.0,
    **settings: float,
) -> dict[str, Tensor]:
    """A model after steps of PyTorch's own optimiser on all training data of a client.

    ``names`` are the parameters that move, all by default; the loss has the ``penalty`` added.
    """
    net, rows = copy.deepcopy(task.models[task.size_of(client)]).train(), task.train[client]
    net.load_state_dict(start)
    moving = [value for name, value in net.named_parameters() if names is None or name in names]
    optimizer = torch.optim.SGD(moving, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(net(task.x[rows]), task.y[rows]) + penalty(net)).backward()
        optimizer.step()
    return trees.model_of(net)


MOMENTUM: dict[str, Any] = {
    "local_steps": 3,
    "batch_size": 10_000,
    "local_lr": 0.1,
    "local_momentum": 0.9,
    "local_weight_decay": 0.01,
}
"""Three local steps on all of a client's data, with momentum and decay."""

TORCH: dict[str, float] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
"""The same for PyTorch's own optimiser."""


def squared_distance(net: nn.Module, center: dict[str, Tensor]) -> Tensor:
    """|w - center|^2 over the parameters of a network, differentiable."""
    pairs = [(value, center[name]) for name, value in net.named_parameters()]
    return torch.stack([((value - other) ** 2).sum() for value, other in pairs]).sum()

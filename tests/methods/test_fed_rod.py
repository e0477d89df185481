"""Fed-RoD: its losses by NumPy, its update by one-piece autograd, what is added, sent and kept."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from hyperfed import training, trees
from hyperfed.errors import UserError
from hyperfed.federation import step
from hyperfed.methods import fed_rod
from hyperfed.methods.fed_rod import PERSONAL
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import Model, Tree
from toys import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    logits,
    make_task,
)

HEAD = ("head.weight", "head.bias")
CLIENTS = [0, 1, 3]
HYPER: dict[str, Any] = {"head": "hypernetwork", "hidden": 6}
MODEL_BYTES = (5 * 4 + 4 + 4 * 3 + 3) * 8
HYPER_BYTES = (3 * 6 + 6 + 6 * 15 + 15) * 8


def skewed_task(net: Callable[[], nn.Module] = TwoLayers, **options: Any) -> Task:
    """Client 3 has no example of the last class."""
    task = make_task(net, **options)
    mine = task.train[3]
    task.y[mine[task.y[mine] == 2]] = 0
    return task


def counts(task: Task, client: int) -> list[int]:
    return [int((task.y[task.train[client]] == c).sum()) for c in range(CLASSES)]


# The balanced softmax


def balanced_by_numpy(g: Any, y: Any, n: Any, gamma: float = 1.0) -> Any:
    weighted = np.asarray(n, dtype=float) ** gamma * np.exp(g)
    return -np.log(weighted[np.arange(len(y)), y] / weighted.sum(axis=1)).mean()


@pytest.mark.parametrize("n", [[5, 1, 2], [5, 0, 2], [1, 1, 1]])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_balanced_softmax_weighs_classes_by_their_counts(n: list[int], gamma: float) -> None:
    draw = torch.Generator().manual_seed(2)
    g = torch.randn(8, 3, dtype=torch.float64, generator=draw)
    y = torch.tensor([0, 2, 0, 0, 2, 0, 2, 2])
    ours = training.balanced_softmax_loss(g, y, torch.tensor(n), gamma).item()
    assert ours == pytest.approx(balanced_by_numpy(g.numpy(), y.numpy(), n, gamma), rel=1e-12)


def test_an_absent_class_has_no_probability_and_no_gradient() -> None:
    g = torch.tensor([[0.3, 400.0, -0.2], [1.0, -400.0, 2.0]], dtype=torch.float64)
    leaf = g.clone().requires_grad_()
    y, n = torch.tensor([0, 2]), torch.tensor([3, 0, 1])
    loss = training.balanced_softmax_loss(leaf, y, n)
    loss.backward()
    there = g[:, [0, 2]]
    expected = balanced_by_numpy(there.numpy(), np.array([0, 1]), [3, 1])
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert leaf.grad[:, 1].tolist() == [0.0, 0.0]
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_outputs_beyond_the_classes_are_of_absent_ones(gamma: float) -> None:
    g = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, n = torch.tensor([0, 2, 2, 0]), torch.tensor([3, 0, 1])
    ours = training.balanced_softmax_loss(g, y, n, gamma).item()
    expected = balanced_by_numpy(g.numpy(), y.numpy(), [3, 0, 1, 0, 0], gamma)
    assert ours == pytest.approx(expected, rel=1e-12)


def test_equal_counts_make_it_cross_entropy() -> None:
    g, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 2])
    ours = training.balanced_softmax_loss(g, y, torch.full((3,), 7))
    torch.testing.assert_close(ours, F.cross_entropy(g, y))


# The update


def gradients(task: Task, client: int, model: dict[str, Tensor], head: Model) -> tuple[Model, Any]:
    """The generic model's gradient of the balanced loss, and the personal one's function.

    Each is a gradient of its own loss, taken on its own: nothing is detached here.
    """
    index = task.train[client]
    n = torch.tensor(counts(task, client), dtype=torch.float64)
    leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
    generic = logits(task.models["base"], leaves, task.x[index])
    weighted = n * generic.exp()
    own = weighted[torch.arange(len(index)), task.y[index]]
    by = torch.autograd.grad(-(own / weighted.sum(1)).log().mean(), list(leaves.values()))
    summed = {name: value + head.get(name, 0) for name, value in model.items()}
    return dict(zip(leaves, by, strict=True)), client_loss(task, client, summed)


def round_by_hand(
    federation: Federation, clients: list[int]
) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """(what is sent next, the kept heads) after one plain step on both losses."""
    task, sent = federation.task, federation.server.model["base"]
    generic = {name: value for name, value in sent.items() if not name.startswith(PERSONAL)}
    shared = {name: value for name, value in sent.items() if name.startswith(PERSONAL)}
    total = sum(EXAMPLES[i] for i in clients)
    mean = {name: torch.zeros_like(value) for name, value in sent.items()}
    heads: dict[int, dict[str, Tensor]] = {}
    for i in clients:
        kept = federation.engine.memory.get(i, {}).get("head", {})
        own = shared or {
            PERSONAL + n: kept.get(PERSONAL + n, torch.zeros_like(generic[n])) for n in HEAD
        }
        leaves = {name: value.clone().requires_grad_() for name, value in own.items()}
        by, personal_loss = gradients(task, i, generic, head_by_hand(federation, i, leaves))
        personal_loss.backward()
        trained = {name: value - 0.1 * by[name] for name, value in generic.items()}
        trained |= {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
        if not shared:
            heads[i] = {name: trained[name] for name in own}
        mean = {name: mean[name] + EXAMPLES[i] / total * trained[name] for name in sent}
    return mean, heads


def head_by_hand(federation: Federation, client: int, own: Model) -> Model:
    """What is added to the generic head: itself, or what Linear, ReLU, Linear make of shares."""
    named = {name.removeprefix(PERSONAL): value for name, value in own.items()}
    if federation.config.head == "linear":
        return named
    n = torch.tensor(counts(federation.task, client), dtype=torch.float64)
    hidden = torch.relu(named["trunk.0.weight"] @ (n / n.sum()) + named["trunk.0.bias"])
    made = named["outputs.base.weight"] @ hidden + named["outputs.base.bias"]
    return {"head.weight": made[:12].reshape(3, 4), "head.bias": made[12:]}


def check_three_rounds(net: Callable[[], nn.Module] = TwoLayers, **settings: Any) -> None:
    """Personal heads start at zero, so what they add shows from the second round on."""
    federation = Federation("fed_rod", skewed_task(net), **ONE_STEP, **settings)
    for number, clients in enumerate((CLIENTS, [0, 3], [0, 1, 2, 3])):
        shared, heads = round_by_hand(federation, clients)
        federation.round(clients, number)
        close(federation.server.model["base"], shared)
        for i, head in heads.items():
            close(federation.engine.memory[i]["head"], head)
        for i in range(4):
            kept = federation.engine.memory.get(i, {}).get("head", {})
            own = {name: v for name, v in shared.items() if name.startswith(PERSONAL)} or kept
            added = head_by_hand(federation, i, own) if own else {}
            expected = {
                name: value + added.get(name, 0)
                for name, value in shared.items()
                if not name.startswith(PERSONAL)
            }
            close(federation.personal(i), expected)


@pytest.mark.parametrize("settings", [{}, HYPER], ids=["linear", "hypernetwork"])
def test_both_losses_descend_in_one_step_and_heads_are_added(settings: dict[str, Any]) -> None:
    check_three_rounds(**settings)


class Scaled(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return 0.3 * super().forward(x)


class Rectified(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Normalised(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(dim=1)


@pytest.mark.parametrize("net", [Scaled, Rectified, Normalised])
@pytest.mark.parametrize("settings", [{}, HYPER], ids=["linear", "hypernetwork"])
def test_what_is_behind_the_last_layer_is_behind_the_sum_of_heads_in_training_too(
    net: type[nn.Module], settings: dict[str, Any]
) -> None:
    check_three_rounds(net, **settings)


def test_batch_norm_sees_each_batch_once_though_what_is_behind_takes_two_passes() -> None:
    class ScaledNormed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            return 0.3 * super().forward(x)

    federation = Federation("fed_rod", skewed_task(ScaledNormed), **ONE_STEP)
    federation.round([0])
    assert federation.server.model["base"]["norm.num_batches_tracked"] == 1


def test_the_personal_loss_does_not_touch_what_is_averaged() -> None:
    """However large a personal head is, the generic model takes the same path."""
    zero, large = (Federation("fed_rod", skewed_task(), **ONE_STEP) for _ in range(2))
    initial = zero.task.outline().initial()
    for i in range(4):
        head = {PERSONAL + n: torch.full_like(initial[n], 3.0) for n in HEAD}
        large.engine.memory[i] = {"head": head}
    for number in range(3):
        for federation in (zero, large):
            federation.round(CLIENTS, number)
    torch.testing.assert_close(zero.server.model, large.server.model, rtol=0, atol=0)


@pytest.mark.parametrize("settings", [{}, HYPER], ids=["linear", "hypernetwork"])
def test_the_personal_gradient_is_not_clipped_with_the_generic_one(
    settings: dict[str, Any],
) -> None:
    free, clipped = (
        Federation("fed_rod", skewed_task(), **ONE_STEP | {"local_clip": clip}, **settings)
        for clip in (None, 1e-9)
    )
    start = clipped.task.outline().initial()
    parts = []
    for federation in (free, clipped):
        federation.round([0])
        trained = federation.server.model["base"] | federation.engine.memory[0]["head"]
        parts.append(trees.partition(trained, start))
    close(parts[0][1], parts[1][1])
    torch.testing.assert_close(parts[1][0], start, rtol=0, atol=1e-9)


def test_the_output_of_the_evaluated_model_is_the_sum_of_both_logits() -> None:
    federation = Federation("fed_rod", skewed_task(), **ONE_STEP)
    federation.round(CLIENTS)
    task, x = federation.task, federation.task.x[:9]
    generic, head = federation.server.model["base"], federation.engine.memory[0]["head"]
    features = torch.tanh(x @ generic["body.weight"].T + generic["body.bias"])
    shared = features @ generic["head.weight"].T + generic["head.bias"]
    own = features @ head[PERSONAL + "head.weight"].T + head[PERSONAL + "head.bias"]
    ours = logits(task.models["base"], federation.personal(0), x)
    close(ours, shared + own)
    assert own.abs().max() > 1e-3


# What travels, what is kept, buffers


@pytest.mark.parametrize(("settings", "more"), [({}, 0), (HYPER, HYPER_BYTES)])
def test_the_personal_head_and_the_class_counts_do_not_travel(
    settings: dict[str, Any], more: int
) -> None:
    federation = Federation("fed_rod", skewed_task(), **ONE_STEP, **settings)
    cohort = federation.round([0, 3])
    size = MODEL_BYTES + more
    assert [(e.step, e.down, e.up) for e in cohort.state.exchanges] == [
        ("train_model", size, size)
    ] * 2
    kept = federation.engine.memory[0]["head"]
    assert set(kept) == (set() if settings else {PERSONAL + name for name in HEAD})


@pytest.mark.parametrize("settings", [{}, HYPER], ids=["linear", "hypernetwork"])
def test_batch_norm_sees_each_batch_once_and_its_statistics_are_averaged(
    settings: dict[str, Any],
) -> None:
    task = skewed_task(Normed)
    federation = Federation("fed_rod", task, **ONE_STEP, **settings)
    start = task.outline().initial()
    federation.round([0, 2])
    mean = torch.zeros(4, dtype=torch.float64)
    for i in (0, 2):
        hidden = task.x[task.train[i]] @ start["body.weight"].T + start["body.bias"]
        mean += EXAMPLES[i] / (EXAMPLES[0] + EXAMPLES[2]) * 0.1 * hidden.mean(0)
    ours = federation.server.model["base"]
    close(ours["norm.running_mean"], mean)
    assert ours["norm.num_batches_tracked"] == 1


def test_each_target_size_has_a_hypernetwork_of_its_own() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    sizes = ("S", "L", "S", "L")
    one, two = (
        Federation(
            "fed_rod",
            skewed_task(models=models, sizes=sizes),
            {"workers": workers, "cores_per_client": 1},
            **ONE_STEP,
            **HYPER,
        )
        for workers in (1, 2)
    )
    before = trees.clone(one.server.model)
    for federation in (one, two):
        federation.round([0, 2], 0)
    torch.testing.assert_close(one.server.model["L"], before["L"], rtol=0, atol=0)
    for federation in (one, two):
        federation.round([0, 1, 2, 3], 1)
    torch.testing.assert_close(one.server.model, two.server.model, rtol=0, atol=0)
    for size in models:
        name = f"{PERSONAL}outputs.{size}.weight"
        assert (one.server.model[size][name] - before[size][name]).abs().max() > 1e-6
    assert set(one.personal(1)) == set(trees.model_of(models["L"]))


# Limits


def test_without_balance_the_generic_model_is_that_of_fedavg() -> None:
    local = {"local_steps": 3, "batch_size": 4}
    ours = Federation("fed_rod", skewed_task(Normed), **local, balance=0.0)
    fedavg = Federation("fedavg", skewed_task(Normed), **local)
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 2, 3], number)
    close(ours.server.model, fedavg.server.model)


def test_a_client_that_was_never_asked_uses_the_generic_model() -> None:
    federation = Federation("fed_rod", skewed_task(), **ONE_STEP)
    federation.round([0, 1])
    expected = federation.server.model["base"]
    torch.testing.assert_close(federation.personal(2), expected, rtol=0, atol=0)


# Novel clients


def test_a_novel_client_trains_a_personal_head_with_all_else_frozen() -> None:
    task = skewed_task(novel=1)
    federation = Federation("fed_rod", task, **ONE_STEP, novel_steps=2)
    federation.round([0, 1])
    generic = federation.server.model["base"]
    head = {name: torch.zeros_like(generic[name]) for name in HEAD}
    for _ in range(2):
        leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
        client_loss(task, 3, generic | {n: generic[n] + leaves[n] for n in HEAD}).backward()
        head = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    expected = generic | {name: generic[name] + head[name] for name in HEAD}
    close(federation.personal(3), expected)
    assert 3 not in federation.engine.memory


def test_a_novel_client_gets_its_head_from_the_hypernetwork_without_being_asked() -> None:
    task = skewed_task(novel=1)
    federation = Federation("fed_rod", task, **ONE_STEP, **HYPER)
    federation.round([0, 1])
    sent = federation.server.model["base"]
    own = {name: value for name, value in sent.items() if name.startswith(PERSONAL)}
    head = head_by_hand(federation, 3, own)
    ours = federation.personal(3)
    torch.testing.assert_close({n: ours[n] for n in HEAD}, {n: sent[n] + head[n] for n in HEAD})
    cohort = federation.engine.cohort([3], 99, training=False)
    federation.server.personalize(cohort)
    assert cohort.state.exchanges == []


def test_only_the_hypernetwork_needs_the_labels_of_a_novel_client() -> None:
    task = skewed_task(novel=1, unlabelled=True)
    linear = Federation("fed_rod", task, **ONE_STEP, novel_steps=0)
    generic = linear.server.model["base"]
    torch.testing.assert_close(linear.personal(3), generic, rtol=0, atol=0)
    with pytest.raises(training.UnlabelledError):
        Federation("fed_rod", task, **ONE_STEP, **HYPER).personal(3)


# Targets and tasks it cannot serve; settings


def test_a_task_needs_classes_and_a_linear_last_layer() -> None:
    with pytest.raises(UserError, match="a task of Fed-RoD must have classes"):
        Federation("fed_rod", make_task(classes=0))

    def convolution() -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (FEATURES, 1)), nn.Conv1d(FEATURES, 3, 1))

    with pytest.raises(UserError, match=r"must end in an nn.Linear.* got Conv1d"):
        Federation("fed_rod", make_task(convolution))
    with pytest.raises(UserError, match=r"must end in an nn.Linear.* got ParametrizedLinear"):
        Federation("fed_rod", make_task(lambda: spectral_norm(nn.Linear(FEATURES, CLASSES))))


def test_a_linear_layer_without_a_bias_will_do() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES, bias=False))

    for settings in ({}, HYPER):
        federation = Federation("fed_rod", skewed_task(net), **ONE_STEP, **settings)
        federation.round([0, 1])
        assert set(federation.personal(0)) == {"0.weight", "0.bias", "2.weight"}


def test_the_settings_of_pfedkt() -> None:
    config = from_keys("fed_rod", {"preset": "pfedkt"})
    assert (config.rounds, config.cohort, config.settings.head) == (500, 0.1, "hypernetwork")
    assert (config.settings.local_lr, config.settings.local_epochs) == (1e-2, 10)


# Mistakes that the checks above notice


def added(features: Tensor, head: Model) -> Tensor:
    return features @ head["head.weight"].T + head["head.bias"]


def right_sum(self: fed_rod.Client, g: Tensor, z: Tensor, head: Model) -> Tensor:
    """The right one in the words of this file."""
    return g.detach() + added(z.detach(), head)


def without_the_sum(self: fed_rod.Client, g: Tensor, z: Tensor, head: Model) -> Tensor:
    return added(z.detach(), head)


def gradient_through_the_features(
    self: fed_rod.Client, g: Tensor, z: Tensor, head: Model
) -> Tensor:
    return g.detach() + added(z, head)


def gradient_through_the_generic_logits(
    self: fed_rod.Client, g: Tensor, z: Tensor, head: Model
) -> Tensor:
    return g + added(z.detach(), head)


def right_loss(self: fed_rod.Client, g: Tensor, p: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Generic plus personal loss of generic logits g and personal logits p."""
    return training.balanced_softmax_loss(g, y, n, self.config.balance) + self.loss(p, y)


def plain_cross_entropy(self: fed_rod.Client, g: Tensor, p: Tensor, y: Tensor, n: Tensor) -> Tensor:
    return F.cross_entropy(g, y) + self.loss(p, y)


def balanced_personal_loss(
    self: fed_rod.Client, g: Tensor, p: Tensor, y: Tensor, n: Tensor
) -> Tensor:
    return sum(training.balanced_softmax_loss(own, y, n) for own in (g, p))


def inverse_counts(self: fed_rod.Client, g: Tensor, p: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """As the weights of a class-weighted cross-entropy are."""
    return right_loss(self, g, p, y, 1 / n.clamp(min=1))


def counts_of_validation(self: fed_rod.Client) -> Tensor:
    return torch.bincount(self.val.batch().y, minlength=self.classes).double() + 1e-9


def counts_of_all_clients(self: fed_rod.Client) -> Tensor:
    return torch.bincount(self._task.y, minlength=self.classes).double()


@pytest.mark.parametrize("settings", [{}, HYPER], ids=["linear", "hypernetwork"])
class TestMutants:
    def test_the_right_ones_pass_as_mutants(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(fed_rod.Client, "summed", right_sum)
        monkeypatch.setattr(fed_rod.Client, "joint_loss", right_loss)
        check_three_rounds(**settings)

    @pytest.mark.parametrize(
        "mutant",
        [without_the_sum, gradient_through_the_features, gradient_through_the_generic_logits],
    )
    def test_mutant_with_another_sum(
        self, mutant: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        rejected(monkeypatch, "summed", mutant, settings)

    @pytest.mark.parametrize(
        "mutant", [plain_cross_entropy, balanced_personal_loss, inverse_counts]
    )
    def test_mutant_with_another_loss(
        self, mutant: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        rejected(monkeypatch, "joint_loss", mutant, settings)

    @pytest.mark.parametrize("mutant", [counts_of_validation, counts_of_all_clients])
    def test_mutant_with_class_counts_from_elsewhere(
        self, mutant: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        rejected(monkeypatch, "class_counts", property(mutant), settings)

    def test_mutant_evaluated_without_the_sum(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        @step
        def export(self: fed_rod.Client, received: Model) -> Tree:
            maker, model = self.parts(received)
            return model | self.make_head(maker)

        rejected(monkeypatch, "export", export, settings)

    def test_mutant_that_is_evaluated_with_the_generic_head(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        @step
        def export(self: fed_rod.Client, received: Model) -> Tree:
            return self.parts(received)[1]

        rejected(monkeypatch, "export", export, settings)

    def test_mutant_that_does_not_weight_the_mean(
        self, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
    ) -> None:
        mean = trees.weighted_mean
        monkeypatch.setattr(trees, "weighted_mean", lambda t, w, *_: mean(t, torch.ones_like(w)))
        with pytest.raises(AssertionError):
            check_three_rounds(**settings)


def test_mutant_hypernetwork_that_sees_counts_and_not_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_head(self: fed_rod.Client, maker: Model) -> Model:
        count = self.class_counts
        named = {name.removeprefix(PERSONAL): value for name, value in maker.items()}
        made = functional_call(self.network(self.size), named, (count.unsqueeze(0), self.size))
        return trees.take(made, 0)

    rejected(monkeypatch, "make_head", make_head, HYPER)


def rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Any, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(fed_rod.Client, name, mutant)
    with pytest.raises(AssertionError):
        check_three_rounds(**settings)

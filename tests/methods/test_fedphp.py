"""FedPHP against one-piece autograd, and what travels, stays and is evaluated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import fedphp
from hyperfed.runs import experiments
from hyperfed.runs.config import RunConfig, from_keys, load
from hyperfed.task import Task
from hyperfed.trees import Model
from toys import (
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    close,
    half_square,
    logits,
    make_task,
    make_token_task,
)

ROOT = Path(__file__).parents[2]
LR, LAMBDA, TEMPERATURE, MOMENTUM, EXPECTED = 0.1, 0.3, 3.0, 0.8, 4
SETTINGS = ONE_STEP | {
    "transfer_weight": LAMBDA,
    "temperature": TEMPERATURE,
    "momentum": MOMENTUM,
    "expected_rounds": EXPECTED,
}


def hidden(model: Model, x: Tensor, there: Tensor) -> Tensor:
    """What goes into the head of ``TwoLayers``, or into that of ``Tagger`` of tokens that count."""
    if "body.bias" in model:
        return torch.tanh(x @ model["body.weight"].T + model["body.bias"])
    return (torch.tanh(model["body.weight"][x]) * there[..., None]).flatten(1)


def discrepancy(ours: Tensor, theirs: Tensor) -> Tensor:
    """The maximum mean discrepancy, pair by pair."""
    both = [*ours.unbind(), *theirs.unbind()]
    squares = [((a - b) ** 2).sum() for a in both for b in both]
    width = torch.stack(squares).sum().item() / (len(both) * (len(both) - 1)) + 1e-8

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        square = ((a - b) ** 2).sum()
        return sum(torch.exp(-square / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))

    def mean(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([kernel(a, b) for a in first for b in second]).mean()

    return mean(ours, ours) - 2 * mean(ours, theirs) + mean(theirs, theirs)


def trained_by_hand(ours: Federation, client: int, received: Model, teacher: Model) -> Model:
    """One step of the whole loss, in which the teacher's term is written as the authors' code does.

    That is as a cross entropy, which is the divergence plus a constant. Of tokens it is on those
    that count.
    """
    task, index = ours.task, ours.task.train[client]
    net, x, y = task.models["base"], task.x[index], task.y[index]
    there = y >= 0
    leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
    if ours.config.transfer == "mmd":
        transfer = discrepancy(hidden(leaves, x, there), hidden(teacher, x, there))
    else:
        z, softened = logits(net, leaves, x)[there], logits(net, teacher, x)[there] / TEMPERATURE
        target = softened.exp() / softened.exp().sum(1, keepdim=True)
        transfer = -(target * (z - z.exp().sum(1, keepdim=True).log())).sum(1).mean()
    supervised = F.cross_entropy if task.classes else task.loss
    labels = supervised(logits(net, leaves, x)[there], y[there])
    loss = (1 - LAMBDA) * labels + LAMBDA * transfer
    by = torch.autograd.grad(loss, list(leaves.values()))
    return {name: received[name] - LR * g for name, g in zip(received, by, strict=True)}


def mixed(mu: float, old: Model, new: Model) -> Model:
    return {name: mu * old[name] + (1 - mu) * new[name] for name in new}


def after_three_rounds(task: Task | None = None, **settings: Any) -> Federation:
    """Global model, last trained and inherited model of client 1 all differ."""
    ours = Federation("fedphp", task or make_task(novel=1), **SETTINGS | settings)
    for number, clients in enumerate(([0, 1, 2], [1, 2], [0, 2])):
        ours.round(clients, number)
    return ours


def check_a_round(task: Task | None = None, **settings: Any) -> None:
    """The third round of client 1, in which mu is half of what it grows to."""
    ours = after_three_rounds(task, **settings)
    received = trees.clone(ours.server.model["base"])
    inherited = trees.clone(ours.engine.memory[1]["inherited"])
    assert all((received[name] - inherited[name]).abs().max() > 1e-4 for name in received)
    trained = trained_by_hand(ours, 1, received, inherited)
    ours.round([1], 3)
    expected = mixed(MOMENTUM * 2 / EXPECTED, inherited, trained)
    close(ours.server.model["base"], trained)
    close(ours.personal(1), expected)


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_a_round_is_a_gradient_step_on_the_one_piece_objective(transfer: str) -> None:
    check_a_round(transfer=transfer)


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_of_tokens_only_those_that_count_teach(transfer: str) -> None:
    check_a_round(make_token_task(), transfer=transfer)


def test_the_first_round_has_no_teacher_and_is_inherited_whole() -> None:
    ours = Federation("fedphp", make_task(), **SETTINGS)
    start = ours.task.outline().initial()
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    client_loss(ours.task, 2, leaves).backward()
    trained = {name: start[name] - LR * leaf.grad for name, leaf in leaves.items()}
    ours.round([2])
    close(ours.personal(2), trained)
    close(ours.server.model["base"], trained)


def check_the_schedule() -> None:
    """Mu is 0, 1/4, 1/2, 3/4 of the momentum, then all of it for good."""
    ours = Federation("fedphp", make_task(), **SETTINGS)
    inherited: Model = {}
    for number, share in enumerate((0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0)):
        ours.round([3], number)
        trained = ours.server.model["base"]
        inherited = mixed(share * MOMENTUM, inherited, trained) if number else trained
        close(ours.personal(3), inherited)


def test_the_average_moves_ever_more_slowly() -> None:
    check_the_schedule()


class TestMutants:
    """Mistakes that would go unnoticed in an accuracy."""

    @pytest.mark.parametrize("evaluated", ["local", "global"])
    def test_mutant_evaluates_another_model(
        self, evaluated: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inherit = fedphp.Client.inherit

        def keep_both(self: fedphp.Client, trained: Model) -> None:
            inherit(self, trained)
            self.memory["local"] = trained

        def other(self: fedphp.Client, received: Model) -> Model:
            return received if evaluated == "global" else self.memory["local"]

        monkeypatch.setattr(fedphp.Client, "inherit", keep_both)
        monkeypatch.setattr(fedphp.Client, "personal_model", other)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_exchanges_the_weights_of_the_average(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            fedphp, "interpolate", lambda new, old, mu: trees.interpolate(old, new, mu)
        )
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    @pytest.mark.parametrize("mistake", ["counts this round", "constant", "without end"])
    def test_mutant_has_another_schedule(
        self, mistake: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def inherit(self: fedphp.Client, trained: Model) -> None:
            rounds = self.memory.get("rounds", torch.tensor(0))
            share = {
                "counts this round": min((int(rounds) + 1) / EXPECTED, 1.0),
                "constant": 1.0,
                "without end": int(rounds) / EXPECTED,
            }[mistake]
            old = self.memory.get("inherited", trained)
            self.memory |= {"inherited": mixed(MOMENTUM * share, old, trained)}
            self.memory["rounds"] = rounds + 1

        monkeypatch.setattr(fedphp.Client, "inherit", inherit)
        with pytest.raises(AssertionError, match="not close"):
            check_the_schedule()

    def test_mutant_reverses_the_divergence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def reversed_divergence(student: Tensor, teacher: Tensor, kind: Any) -> Tensor:
            p, q = student.log_softmax(-1), teacher.log_softmax(-1)
            return (p.exp() * (p - q)).sum(-1)

        monkeypatch.setattr(fedphp, "distances", reversed_divergence)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_softens_the_student_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        distances = fedphp.distances
        monkeypatch.setattr(
            fedphp, "distances", lambda ours, theirs, kind: distances(ours / 3.0, theirs, kind)
        )
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    @pytest.mark.parametrize("transfer", ["kd", "mmd"])
    def test_mutant_lets_the_global_model_teach_the_inherited_one(
        self, transfer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then nothing but the smaller supervised loss reaches the global one."""
        distances, discrepancy = fedphp.distances, fedphp.mean_discrepancy
        monkeypatch.setattr(fedphp, "distances", lambda w, h, kind: distances(h, w, kind))
        monkeypatch.setattr(fedphp, "mean_discrepancy", lambda w, h: discrepancy(h, w))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round(transfer=transfer)

    def test_mutant_trains_the_teacher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without a constant teacher the same loss moves both models."""
        inherit = fedphp.Client.inherit

        def moved(self: fedphp.Client, trained: Model) -> None:
            teacher = self.memory.get("inherited")
            if teacher is not None:
                batch = self.train.batch()
                target = logits(self.module, trained, batch.x).detach()
                leaves = {name: value.clone().requires_grad_() for name, value in teacher.items()}
                p = (logits(self.module, leaves, batch.x) / TEMPERATURE).log_softmax(1)
                (LAMBDA * (p.exp() * (p - target.log_softmax(1))).sum(1).mean()).backward()
                self.memory["inherited"] = {n: v.detach() - LR * v.grad for n, v in leaves.items()}
            inherit(self, trained)

        monkeypatch.setattr(fedphp.Client, "inherit", moved)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    @pytest.mark.parametrize("teacher", ["received", "initial"])
    def test_mutant_has_another_teacher(
        self, teacher: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taught_by = fedphp.Client.taught_by

        def other(self: fedphp.Client, inherited: Model) -> Any:
            def objective(model: Model, batch: Any) -> Any:
                constant = trees.tree_map(Tensor.detach, model)
                return taught_by(self, constant if teacher == "received" else self.initial)(
                    model, batch
                )

            return objective

        monkeypatch.setattr(fedphp.Client, "taught_by", other)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_forgets_1_minus_lambda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            fedphp.torch, "lerp", lambda loss, taught, weight: loss + weight * taught
        )
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_uploads_the_inherited_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = fedphp.Client.train_model

        def train_model(self: fedphp.Client, model: Model) -> Model:
            original(self, model)
            return self.memory["inherited"]

        monkeypatch.setattr(fedphp.Client, "train_model", fedphp.step(like="model")(train_model))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()


# What is averaged, what travels, what stays, limits


def test_without_transfer_the_global_model_is_that_of_fedavg() -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1}
    ours = Federation("fedphp", make_task(Normed), **local, transfer_weight=0.0)
    fedavg = Federation("fedavg", make_task(Normed), **local)
    for number, clients in enumerate(([0, 1, 2], [1, 3], [1, 2])):
        ours.round(clients, number)
        fedavg.round(clients, number)
    close(ours.server.model, fedavg.server.model)
    gap = ours.personal(1)["head.weight"] - ours.server.model["base"]["head.weight"]
    assert gap.abs().max() > 1e-3


def test_without_momentum_the_last_trained_model_is_inherited() -> None:
    ours = after_three_rounds(momentum=0.0)
    ours.round([1], 3)
    torch.testing.assert_close(ours.personal(1), ours.server.model["base"], rtol=0, atol=0)


def test_buffers_are_inherited_and_the_teacher_uses_its_own() -> None:
    ours = Federation("fedphp", make_task(Normed), **SETTINGS)
    for number, clients in enumerate(([0, 1], [1], [0, 2])):
        ours.round(clients, number)
    task, memory = ours.task, trees.clone(ours.engine.memory[1]["inherited"])
    received = trees.clone(ours.server.model["base"])
    net, index = task.models["base"], task.train[1]
    x, y = task.x[index], task.y[index]
    parameters = {name for name, _ in net.named_parameters()}
    leaves, buffers = trees.partition(trees.clone(received), parameters)
    leaves = {name: value.requires_grad_() for name, value in leaves.items()}
    softened = torch.func.functional_call(net.eval(), memory, (x,)) / TEMPERATURE
    z = torch.func.functional_call(net.train(), leaves | buffers, (x,))
    transfer = F.kl_div(z.log_softmax(1), softened.softmax(1), reduction="batchmean")
    ((1 - LAMBDA) * F.cross_entropy(z, y) + LAMBDA * transfer).backward()
    trained = {name: leaf.detach() - LR * leaf.grad for name, leaf in leaves.items()} | buffers
    ours.round([1], 3)
    close(ours.server.model["base"], trained)
    floats = {name: value for name, value in trained.items() if value.is_floating_point()}
    found = ours.personal(1)
    expected = mixed(MOMENTUM * 2 / EXPECTED, memory, floats)
    close({name: found[name] for name in floats}, expected)
    assert found["norm.num_batches_tracked"].dtype == torch.int64


def test_the_teachers_features_are_those_of_its_own_statistics() -> None:
    """The student's are those of the batch."""
    ours = after_three_rounds(make_task(Normed), transfer="mmd")
    task, memory = ours.task, trees.clone(ours.engine.memory[1]["inherited"])
    received = trees.clone(ours.server.model["base"])
    x, y = task.x[task.train[1]], task.y[task.train[1]]
    names = [name for name, _ in task.models["base"].named_parameters()]
    leaves = {name: received[name].clone().requires_grad_() for name in names}

    def features(model: Model, mean: Tensor, variance: Tensor) -> Tensor:
        body = x @ model["body.weight"].T + model["body.bias"]
        normed = (body - mean) / (variance + 1e-5).sqrt()
        return torch.tanh(normed * model["norm.weight"] + model["norm.bias"])

    body = x @ leaves["body.weight"].T + leaves["body.bias"]
    learned = features(leaves, body.mean(0), body.var(0, correction=0))
    taught = features(memory, memory["norm.running_mean"], memory["norm.running_var"])
    labels = F.cross_entropy(learned @ leaves["head.weight"].T + leaves["head.bias"], y)
    ((1 - LAMBDA) * labels + LAMBDA * discrepancy(learned, taught)).backward()
    trained = {name: leaf.detach() - LR * leaf.grad for name, leaf in leaves.items()}
    ours.round([1], 3)
    close({name: ours.server.model["base"][name] for name in names}, trained)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_a_model_goes_down_and_a_model_comes_up_and_one_is_kept(net: type[nn.Module]) -> None:
    ours = Federation("fedphp", make_task(net), **SETTINGS)
    for number in range(2):
        cohort = ours.round([0, 2], number)
        size = trees.count_bytes(trees.model_of(ours.task.models["base"]))
        assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    assert trees.count_bytes(ours.engine.memory[0]) == size + 8  # and the number of rounds


def test_a_known_client_that_was_never_asked_uses_the_global_model() -> None:
    ours = Federation("fedphp", make_task(), **SETTINGS)
    ours.round([0, 1])
    torch.testing.assert_close(ours.personal(2), ours.server.model["base"], rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_novel_client_inherits_the_global_model_fine_tuned(steps: int) -> None:
    ours = after_three_rounds(novel_steps=steps)
    received = trees.clone(ours.server.model["base"])
    expected = received
    for _ in range(steps):
        leaves = {name: value.clone().requires_grad_() for name, value in expected.items()}
        client_loss(ours.task, 3, leaves).backward()
        expected = {name: leaf.detach() - LR * leaf.grad for name, leaf in leaves.items()}
    close(ours.personal(3), expected)
    torch.testing.assert_close(ours.server.model["base"], received, rtol=0, atol=0)
    cohort = ours.engine.cohort([3], 99, training=False)
    ours.server.personalize(cohort)
    assert [e.up for e in cohort.state.exchanges] == ([0] if steps else [])


class OneOutput(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)


def test_a_regression_is_taught_by_features_alone() -> None:
    task = make_task(OneOutput, classes=0, loss=half_square, novel=1)
    check_a_round(task, transfer="mmd")
    with pytest.raises(UserError, match='a task for fedphp with transfer "kd" must have classes'):
        Federation("fedphp", task)


def expected(config: RunConfig) -> int:
    """In how many rounds a client of a run takes part, by the share of them in each."""
    known = config.task.client_count - config.task.novel_clients
    share = config.cohort if isinstance(config.cohort, float) else config.cohort / known
    return round(share * config.rounds)


@pytest.mark.parametrize("preset", fedphp.PRESETS)
def test_the_presets_expect_what_their_runs_do(preset: str) -> None:
    config = from_keys("fedphp", {"preset": preset})
    assert config.settings.expected_rounds == expected(config)


def test_so_do_the_cells_of_experiments() -> None:
    for experiment in experiments.find_all(ROOT / "experiments"):
        cells = [cell for cell, (_, row) in experiment.cells.items() if row == "fedphp"]
        for config in (load(experiment.source(cell)) for cell in cells):
            assert config.settings.expected_rounds == expected(config)


def shown(function: Callable[[Tensor, Tensor], Tensor], ours: Tensor, theirs: Tensor) -> Tensor:
    ours = ours.clone().requires_grad_()
    return torch.autograd.grad(function(ours, theirs), ours)[0]


def test_the_discrepancy_is_that_of_all_pairs_and_none_of_equal_features() -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 5, 3, dtype=torch.float64, generator=draw)
    found = fedphp.mean_discrepancy(ours, theirs)
    close(found, discrepancy(ours, theirs))
    gradients = [shown(f, ours, theirs) for f in (fedphp.mean_discrepancy, discrepancy)]
    close(*gradients)
    flat = torch.zeros(5, 3, dtype=torch.float64)
    assert fedphp.mean_discrepancy(flat, flat).abs() < 1e-12
    assert shown(fedphp.mean_discrepancy, flat, flat).abs().max() < 1e-12  # and finite

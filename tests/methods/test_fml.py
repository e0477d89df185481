"""FML against one-piece autograd and PyTorch's optimiser; what travels, stays and is evaluated."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import training, trees
from hyperfed.errors import UserError
from hyperfed.methods import fml
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from hyperfed.trees import Model
from toys import (
    EXAMPLES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    close,
    logits,
    make_task,
    make_token_task,
)

LR, ALPHA, BETA = 0.1, 0.7, 0.4
WEIGHTS = {"label_weight": ALPHA, "meme_label_weight": BETA}
SETTINGS = ONE_STEP | WEIGHTS


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over the batch of KL(teacher || student), written out."""
    q = teacher.exp() / teacher.exp().sum(1, keepdim=True)
    p = student.exp() / student.exp().sum(1, keepdim=True)
    return (q * (q / p).log()).sum(1).mean()


def both_by_hand(ours: Federation, client: int, private: Model, meme: Model) -> tuple[Model, Model]:
    """One step of each model on all data, each loss differentiated on its own.

    Of tokens, on those that count.
    """
    net, index = ours.task.models["base"], ours.task.train[client]
    x, y = ours.task.x[index], ours.task.y[index]
    there = y >= 0

    def step(model: Model, teacher: Model, label_weight: float) -> Model:
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        z = logits(net, leaves, x)[there]
        taught = divergence(logits(net, teacher, x)[there], z)
        loss = label_weight * F.cross_entropy(z, y[there]) + (1 - label_weight) * taught
        by = torch.autograd.grad(loss, list(leaves.values()))
        return {name: model[name] - LR * g for name, g in zip(model, by, strict=True)}

    return step(private, meme, ALPHA), step(meme, private, BETA)


def after_two_rounds(task: Task | None = None, **settings: Any) -> Federation:
    """Private model of client 0 and meme differ."""
    ours = Federation("fml", task or make_task(novel=1), **SETTINGS | settings)
    ours.round([0, 1, 2], 0)
    ours.round([1, 2], 1)
    return ours


def check_a_round(task: Task | None = None) -> None:
    ours = after_two_rounds(task)
    private, meme = trees.clone(ours.engine.memory[0]["model"]), trees.clone(ours.server.meme)
    assert all((private[name] - meme[name]).abs().max() > 1e-4 for name in meme)
    trained, shared = both_by_hand(ours, 0, private, meme)
    ours.round([0], 2)
    close(ours.personal(0), trained)
    close(ours.server.meme, shared)


def test_a_round_is_a_gradient_step_of_each_model_on_its_own_loss() -> None:
    check_a_round()


def test_of_tokens_only_those_that_count_teach() -> None:
    check_a_round(make_token_task())


@pytest.mark.parametrize(("net", "keep"), [(TwoLayers, True), (Normed, True), (TwoLayers, False)])
def test_rounds_are_those_of_two_modules_with_two_optimizers(
    net: type[nn.Module], keep: bool
) -> None:
    """The private one's may last over rounds, the meme's is new in each; buffers follow."""
    local = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1, "local_weight_decay": 0.01}
    ours = Federation("fml", make_task(net), keep_momentum=keep, **local, **WEIGHTS)
    task = ours.task
    private, meme = (copy.deepcopy(task.models["base"]) for _ in range(2))

    def new_sgd(module: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    optimizer = new_sgd(private)
    for number in range(3):
        trees.fill(meme, trees.clone(ours.server.meme))
        ours.round([2], number)
        meme_optimizer = new_sgd(meme)
        if not keep:
            optimizer = new_sgd(private)
        draw = generator(0, "batches", 2, number, "train_model", 0)
        for _ in range(3):
            rows = task.train[2][torch.randperm(EXAMPLES[2], generator=draw)[:5]]
            own, shared = private(task.x[rows]), meme(task.x[rows])
            optimizer.zero_grad()
            meme_optimizer.zero_grad()
            labels = F.cross_entropy(own, task.y[rows])
            (ALPHA * labels + (1 - ALPHA) * divergence(shared.detach(), own)).backward()
            labels = F.cross_entropy(shared, task.y[rows])
            (BETA * labels + (1 - BETA) * divergence(own.detach(), shared)).backward()
            optimizer.step()
            meme_optimizer.step()
    close(ours.personal(2), trees.model_of(private))
    close(ours.server.meme, trees.model_of(meme))


def check_the_average() -> None:
    """Every meme is trained beside the initial private model of its client."""
    ours = Federation("fml", make_task(), **SETTINGS)
    clients, initial = [0, 1, 2], ours.task.outline().initial()
    ours.server.meme = trees.tree_map(lambda value: value + 0.3, initial)
    trained = [both_by_hand(ours, i, initial, ours.server.meme)[1] for i in clients]
    ours.round(clients)
    share = [EXAMPLES[i] / sum(EXAMPLES[:3]) for i in clients]
    expected = {
        name: sum(s * meme[name] for s, meme in zip(share, trained, strict=True))
        for name in initial
    }
    close(ours.server.meme, expected)


def test_the_server_averages_memes_by_training_examples() -> None:
    check_the_average()


class TestMutants:
    """Mistakes that would go unnoticed in an accuracy; several are those of public code."""

    @pytest.mark.parametrize("mistake", ["reversed", "divided by classes", "teacher not detached"])
    def test_mutant_has_another_divergence(
        self, mistake: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wrong(student: Tensor, teacher: Tensor, kind: Any) -> Tensor:
            p, q = student.log_softmax(-1), teacher.log_softmax(-1)
            if mistake == "reversed":
                return (p.exp() * (p - q.detach())).sum(-1)
            if mistake == "divided by classes":  # what nn.KLDivLoss does by default
                return (q.exp().detach() * (q - p)).mean(-1)
            return (q.exp() * (q - p)).sum(-1)

        monkeypatch.setattr(fml, "distances", wrong)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_exchanges_alpha_and_beta(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loss_of = fml.Client.loss_of

        def wrong(self: fml.Client, student: Tensor, teacher: Tensor, y: Tensor, w: float) -> Any:
            return loss_of(self, student, teacher, y, BETA if w == ALPHA else ALPHA)

        monkeypatch.setattr(fml.Client, "loss_of", wrong)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_weighs_the_teacher_with_alpha(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lerp = torch.lerp
        monkeypatch.setattr(fml.torch, "lerp", lambda taught, loss, w: lerp(loss, taught, w))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_trains_one_after_the_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The meme would learn from a private model that has moved already."""

        def train_model(self: fml.Client, meme: Model) -> Model:
            private, _ = one_step(self, self.private_model, meme)
            _, trained = one_step(self, private, meme)
            self.memory["model"] = private
            return trained

        def one_step(client: fml.Client, private: Model, meme: Model) -> tuple[Model, Model]:
            return fml._parts(
                training.fit(
                    client.mutual_objective,
                    fml._joined(private, meme),
                    [client.train.batch()],
                    client.config.local,
                    trainable=client.trainable,
                ).model
            )

        monkeypatch.setattr(fml.Client, "train_model", fml.step(like="meme")(train_model))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_uploads_the_private_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = fml.Client.train_model

        def train_model(self: fml.Client, meme: Model) -> Model:
            original(self, meme)
            return self.memory["model"]

        monkeypatch.setattr(fml.Client, "train_model", fml.step(like="meme")(train_model))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_evaluates_the_meme(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fml.Server, "personalize", lambda self, clients: self.meme)
        monkeypatch.setattr(fml.Client, "personal_model", lambda self, received: received)
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_starts_the_private_model_from_the_meme(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = fml.Client.train_model

        def train_model(self: fml.Client, meme: Model) -> Model:
            self.memory["model"] = meme
            return original(self, meme)

        monkeypatch.setattr(fml.Client, "train_model", fml.step(like="meme")(train_model))
        with pytest.raises(AssertionError, match="not close"):
            check_a_round()

    def test_mutant_weighs_all_clients_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = trees.weighted_mean
        monkeypatch.setattr(trees, "weighted_mean", lambda t, w, *_: right(t, w.sign()))
        with pytest.raises(AssertionError, match="not close"):
            check_the_average()


# Limits, what travels, what stays


def test_with_labels_alone_it_is_local_beside_fedavg() -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1, "local_momentum": 0.9}
    ones = {"label_weight": 1.0, "meme_label_weight": 1.0}
    task = make_task(Normed)
    ours = Federation("fml", task, **local, **ones)
    fedavg, alone = Federation("fedavg", task, **local), Federation("local", task, **local)
    for number, clients in enumerate(([0, 1, 2], [1, 3], [0, 1, 2, 3])):
        for each in (ours, fedavg, alone):
            each.round(clients, number)
    close(ours.server.meme, fedavg.server.model["base"])
    for client in range(4):
        close(ours.personal(client), alone.personal(client))


def test_without_labels_equal_models_stay_as_they_are() -> None:
    zeros = {"label_weight": 0.0, "meme_label_weight": 0.0}
    ours = Federation("fml", make_task(), **SETTINGS | zeros)
    start = ours.task.outline().initial()
    ours.round([0, 1])
    close(ours.server.meme, start)
    close(ours.personal(0), start)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_a_meme_goes_down_and_a_meme_comes_up_and_the_private_model_stays(
    net: type[nn.Module],
) -> None:
    ours = Federation("fml", make_task(net), **SETTINGS)
    cohort = ours.round([0, 2])
    model = trees.model_of(ours.task.models["base"])
    size = trees.count_bytes(model)
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    assert set(ours.engine.memory[0]) == {"model"}
    assert trees.structure(ours.engine.memory[0]["model"]) == trees.structure(model)


def test_the_meme_has_one_architecture_where_private_models_differ() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    ours = Federation(
        "fml", make_task(models=models, sizes=("S", "L", "S", "L")), local_steps=2, batch_size=4
    )
    before = trees.clone(ours.server.meme)
    cohort = ours.round([1, 3])  # no client whose target the meme is
    assert set(ours.server.meme) == set(trees.model_of(models["S"]))
    assert all((ours.server.meme[name] - before[name]).abs().max() > 1e-4 for name in before)
    size = trees.count_bytes(before)
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    assert set(ours.personal(1)) == set(trees.model_of(models["L"]))


def test_a_known_client_that_was_never_asked_has_the_initial_model() -> None:
    ours = after_two_rounds()
    ours = Federation("fml", make_task(), **SETTINGS)
    ours.round([0, 1])
    torch.testing.assert_close(ours.personal(2), ours.task.outline().initial(), rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_novel_client_trains_beside_a_copy_of_the_meme_and_sends_nothing(steps: int) -> None:
    ours = after_two_rounds(novel_steps=steps)
    sent = trees.clone(ours.server.meme)
    private, meme = ours.task.outline().initial(), sent
    for _ in range(steps):
        private, meme = both_by_hand(ours, 3, private, meme)
    close(ours.personal(3), private)
    torch.testing.assert_close(ours.server.meme, sent, rtol=0, atol=0)
    cohort = ours.engine.cohort([3], 99, training=False)
    assert ours.server.personalize(cohort) == {}
    assert [e.up for e in cohort.state.exchanges] == ([0] if steps else [])


def test_a_regression_is_refused() -> None:
    with pytest.raises(UserError, match="a task for fml must have classes"):
        Federation("fml", make_task(classes=0))


@pytest.mark.parametrize("preset", fml.PRESETS)
def test_the_presets_are_settings_of_a_run(preset: str) -> None:
    config = from_keys("fml", {"preset": preset})
    assert (config.rounds, config.cohort) == ((500, 0.1) if preset == "pfedkt" else (30, 5))

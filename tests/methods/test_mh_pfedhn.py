"""MH-pFedHN: its steps by one-piece autograd and PyTorch's Adam, clients of several networks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.errors import UserError
from hyperfed.methods import mh_pfedhn
from hyperfed.methods.mh_pfedhn import Client, Config
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.trees import aggregation
from hyperfed.trees.aggregation import Rule
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    check_that_novel_clients_measure,
    close,
    far_task,
    logits,
    make_quadratic_task,
    make_task,
    snapshot,
    torch_sgd,
)

CHUNK, LENGTH = 10, 3
SERVER: dict[str, Any] = {
    "chunk": CHUNK,
    "embedding_size": LENGTH,
    "embedding_std": 1.0,
    "hidden": 7,
    "hidden_layers": 1,
    "lr": 0.05,
}
LOCAL_LR = 0.1  # that of ONE_STEP
SIZES = ("small", "large", "other", "small", "large")


def three_networks(**options: Any) -> Task:
    """Of 57, 39 and 39 parameters, which are 6, 4 and 4 chunks."""
    with seeded(0, "three"):
        large = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))
        small, other = TwoLayers(), nn.Sequential(nn.Linear(FEATURES, 6, bias=False), nn.ReLU())
        other.append(nn.Linear(6, 1, bias=False)).append(nn.Linear(1, CLASSES, bias=False))
    models = {"large": large, "small": small, "other": other}
    assert [sum(p.numel() for p in net.parameters()) for net in models.values()] == [57, 39, 39]
    models = {size: net.double() for size, net in models.items()}
    return make_task(examples=(12, 7, 20, 9, 8), models=models, sizes=SIZES, **options)


class Reference:
    """The hypernetwork in plain matrix products, and PyTorch's own Adam.

    Its parameters are apart from the server's, whose values they have at first.
    """

    def __init__(self, ours: Federation) -> None:
        state = trees.clone(ours.server.state(optimizers=False))
        self.task, self.config = ours.task, ours.config
        self.hyper_net = {n: v.requires_grad_() for n, v in state["hyper_net"].items()}
        self.embeddings = [v.requires_grad_() for v in state["embeddings"].values()]
        groups = [{"params": self.embeddings}, {"params": [*self.hyper_net.values()]}]
        self.optimizer = torch.optim.Adam(groups, lr=ours.config.lr)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.embeddings, *self.hyper_net.values()]

    def layer(self, name: str, x: Tensor) -> Tensor:
        return x @ self.hyper_net[f"{name}.weight"].T + self.hyper_net[f"{name}.bias"]

    def generate(self, embedding: Tensor, size: str) -> dict[str, Tensor]:
        net = self.task.models[size]
        count = sum(p.numel() for p in net.parameters())
        chunks = -(-count // self.config.chunk)
        pieces = []
        for place in range(chunks):
            feature = self.layer("trunk.0", embedding[place]).clamp(min=0)
            feature = self.layer("trunk.2", feature).clamp(min=0)
            pieces.append(self.layer(f"heads.{chunks}.{place}", feature))
        flat, model, position = torch.cat(pieces), {}, 0
        for name, parameter in net.named_parameters():
            model[name] = flat[position : position + parameter.numel()].view(parameter.shape)
            position += parameter.numel()
        return model

    def output(self, client: int, model: Mapping[str, Tensor], size: str) -> Tensor:
        return logits(self.task.models[size], dict(model), self.task.x[self.task.train[client]])

    def loss(self, client: int, model: Mapping[str, Tensor], size: str) -> Tensor:
        return F.cross_entropy(
            self.output(client, model, size), self.task.y[self.task.train[client]]
        )

    def personal(self, client: int) -> dict[str, Tensor]:
        return self.generate(self.embeddings[client], self.task.size_of(client))

    def objective(self, clients: Sequence[int]) -> Tensor:
        losses = [self.loss(i, self.personal(i), self.task.size_of(i)) for i in clients]
        return torch.stack(losses).mean()

    def gradients(self, objective: Tensor) -> list[Tensor | None]:
        """Of one plain local step, whose delta is its rate times the gradient."""
        return list(torch.autograd.grad(LOCAL_LR * objective, self.parameters, allow_unused=True))

    def step(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()

    def check(self, ours: Federation) -> None:
        state = ours.server.state(optimizers=False)
        close(state["hyper_net"], trees.detach(self.hyper_net))
        embeddings = [value.detach() for value in self.embeddings]
        close([*state["embeddings"].values()], embeddings)


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_round_is_a_step_of_adam_of_what_made_its_models(clip: float | None) -> None:
    """In each round others take part; the moments of those who do not wait for them."""
    ours = Federation("mh_pfedhn", three_networks(), **ONE_STEP, **SERVER, clip=clip)
    reference = Reference(ours)
    for number, clients in enumerate(([0, 1, 2], [3], [0, 4], [1])):
        reference.step(reference.gradients(reference.objective(clients)))
        ours.round(clients, number)
        reference.check(ours)
    for client in range(5):
        made = trees.detach(reference.personal(client))
        close(ours.personal(client), made)


def test_under_a_rule_an_embedding_learns_from_its_client_as_ever() -> None:
    """The median is that of what clients have in common; others' zeros would be an embedding's."""
    ours = Federation("mh_pfedhn", make_task(), **ONE_STEP, **SERVER)
    reference, clients = Reference(ours), (0, 1, 3)
    for number in range(2):
        each = [reference.gradients(reference.objective([i])) for i in clients]
        gradients: list[Tensor | None] = [None] * len(reference.parameters)
        for client, own in zip(clients, each, strict=True):
            gradients[client] = own[client] / len(clients)
        for place in range(len(reference.embeddings), len(gradients)):
            gradients[place] = torch.stack([own[place] for own in each]).median(dim=0).values
        reference.step(gradients)
        with trees.aggregating(Rule("median")):
            ours.round(clients, number)
        reference.check(ours)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_with_a_global_model_there_is_a_step_of_it_and_clients_learn_from_it(alpha: float) -> None:
    """The smallest target, of which there are two: the first one."""
    settings = {"global_model": True, "distillation": alpha, "temperature": 2.5}
    ours = Federation("mh_pfedhn", three_networks(), **ONE_STEP, **SERVER, **settings, clip=1e-3)
    reference = Reference(ours)
    assert len(reference.embeddings) == 6
    for number, clients in enumerate(([0, 1, 2], [3], [4, 2])):
        light = reference.generate(reference.embeddings[5], "small")
        share = torch.tensor([float(len(ours.task.train[i])) for i in clients]).double()
        losses = torch.stack([reference.loss(i, light, "small") for i in clients])
        gradients = reference.gradients(losses @ (share / share.sum()))
        objective = []
        for i in clients:
            size, teacher = ours.task.size_of(i), reference.output(i, light, "small").detach()
            own = reference.output(i, reference.personal(i), size)
            p, q = (out.div(2.5).softmax(1) for out in (teacher, own))
            divergence = (p * (p / q).log()).sum(1).mean()
            label = F.cross_entropy(own, ours.task.y[ours.task.train[i]])
            objective.append((1 - alpha) * label + alpha * 2.5**2 * divergence)
        own_gradients = reference.gradients(torch.stack(objective).mean())
        reference.step(gradients)
        reference.step(own_gradients)
        ours.round(clients, number)
        reference.check(ours)


@pytest.mark.parametrize("last", ["train_global", "train_model"])
@pytest.mark.parametrize("rule", [aggregation.MEAN, Rule("trimmed_mean", 0.0)])
def test_who_is_lost_in_either_exchange_equals_who_was_never_asked(rule: Rule, last: str) -> None:
    class Lost(Faults):
        def drops(self, seed: int, call: Call) -> bool:
            return (call.round, call.client, call.step) == (1, 3, last)

    settings = {**ONE_STEP, **SERVER, "global_model": True}
    lossy = Federation("mh_pfedhn", three_networks(), {"faults": Lost()}, **settings)
    smaller = Federation("mh_pfedhn", three_networks(), **settings)
    with trees.aggregating(rule):
        for number, (one, other) in enumerate([([0, 1, 3], [0, 1, 3]), ([0, 1, 3], [0, 1])]):
            lossy.round(one, number)
            smaller.round(other, number)
    close(lossy.server.state(), smaller.server.state())


def drawn(ours: Federation, clients: list[int], length: int) -> Tensor:
    cohort = ours.engine.cohort(clients, 99, training=False)
    like = {"embedding": torch.zeros(length, dtype=torch.float64)}
    embedding: Tensor = cohort.ask(Client.draw_embedding, like)["embedding"]
    return embedding


@pytest.mark.parametrize(("novel_lr", "clip"), [(None, None), (0.2, 1e-4)])
def test_a_novel_clients_embeddings_are_fitted_and_nothing_else(
    novel_lr: float | None, clip: float | None
) -> None:
    """Each by itself: clients 3 and 4, of two sizes, get what they would alone."""
    settings = {"novel_rounds": 3, "novel_lr": novel_lr, "clip": clip}
    ours = Federation("mh_pfedhn", three_networks(novel=2), **ONE_STEP, **SERVER, **settings)
    ours.round([0, 1, 2])
    before, reference = snapshot(ours), Reference(ours)
    for client, chunks in ((3, 4), (4, 6)):
        embedding = drawn(ours, [client], chunks * LENGTH).view(chunks, LENGTH).requires_grad_()
        optimizer = torch.optim.Adam([embedding], lr=novel_lr or SERVER["lr"])
        for _ in range(3):
            model = reference.generate(embedding, SIZES[client])
            loss = LOCAL_LR * reference.loss(client, model, SIZES[client])
            (embedding.grad,) = torch.autograd.grad(loss, [embedding])
            if clip is not None:
                nn.utils.clip_grad_norm_([embedding], clip)
            optimizer.step()
        expected = trees.detach(reference.generate(embedding, SIZES[client]))
        close(ours.personal(client), expected)
    torch.testing.assert_close(snapshot(ours), before, rtol=0, atol=0)
    reference = Reference(ours)  # nor does it leave anything to the next round
    reference.optimizer.load_state_dict(deepcopy(ours.server.optimizer.state_dict()))
    reference.step(reference.gradients(reference.objective([1])))
    ours.round([1], 1)
    reference.check(ours)


def test_novel_clients_of_a_cohort_do_not_see_one_another() -> None:
    task = make_task(examples=(12, 7, 20, 9), novel=2)
    settings = {**SERVER, "novel_rounds": 3, "clip": 1e-4}
    ours = Federation("mh_pfedhn", task, **ONE_STEP, **settings)
    both = ours.engine.cohort([2, 3], 99, training=False)
    served = both.ask(Client.export, ours.server.personalize(both))
    for place, client in enumerate((2, 3)):
        alone = ours.personal(client)
        close(trees.take(served, place), alone)


def test_embeddings_are_drawn_with_their_standard_deviation() -> None:
    """Those of known clients as those of novel ones, of which each has its own."""
    ours = Federation("mh_pfedhn", make_task(novel=2), embedding_size=5000, embedding_std=0.3)
    fresh = drawn(ours, [2, 3], 5000)
    assert not torch.equal(fresh[0], fresh[1])
    for embedding in (*ours.server.embeddings, *fresh):
        assert embedding.std().item() == pytest.approx(0.3, rel=0.05)
        assert embedding.mean().item() == pytest.approx(0, abs=0.02)


def test_batch_norms_statistics_are_the_clients_and_those_of_the_global_model_the_mean() -> None:
    task = make_task(Normed)
    settings = {**ONE_STEP, **SERVER, "global_model": True}
    ours, held = Federation("mh_pfedhn", task, **settings), task.initial("base")
    for number, shares in enumerate(({0: 12 / 32, 2: 20 / 32}, {1: 1.0})):
        reference, initial = Reference(ours), task.initial("base")
        light = trees.detach(reference.generate(reference.embeddings[4], "base"))
        sent = {i: trees.detach(reference.personal(i)) for i in shares}
        ours.round([*shares], number)
        buffers = [name for name in initial if name not in light]
        total: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        for i, share in shares.items():
            own = torch_sgd(task, i, initial | sent[i], 1, lr=LOCAL_LR)
            trained = torch_sgd(task, i, held | light, 1, lr=LOCAL_LR)
            kept = ours.engine.memory[i]["buffers"]
            close(kept, {name: own[name] for name in buffers})
            used = {name: ours.personal(i)[name] for name in buffers}
            torch.testing.assert_close(used, kept, rtol=0, atol=0)
            for name in buffers:
                total[name] = total[name] + share * trained[name]
        for name in ("norm.running_mean", "norm.running_var"):
            close(ours.server.buffers[name], total[name])
        held = initial | ours.server.buffers
    assert set(ours.server.buffers) == set(buffers)


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_novel_clients_to_whom_nothing_is_fitted_measure_batch_norms_statistics(
    kind: type[LoopEngine],
) -> None:
    ours = Federation("mh_pfedhn", far_task(), **ONE_STEP, **SERVER, novel_rounds=0)
    check_that_novel_clients_measure(ours, kind)


def test_a_fit_begins_with_the_statistics_that_all_begin_with_and_keeps_what_it_leaves() -> None:
    task = far_task()
    ours = Federation("mh_pfedhn", task, **ONE_STEP, **SERVER, novel_rounds=1)
    cohort = ours.engine.cohort([3], 99, training=False)
    like = {"embedding": ours.server.embeddings[0].detach().flatten()}
    drawn = cohort.ask(Client.draw_embedding, like)["embedding"].view(1, -1, LENGTH)
    sent = trees.take(trees.detach(ours.server.hyper_net(drawn, "base")), 0)
    body = task.x[task.train[3]] @ sent["body.weight"].T + sent["body.bias"]
    fitted = ours.personal(3)
    close(fitted["norm.running_mean"], 0.1 * body.mean(dim=0))
    close(fitted["norm.running_var"], 0.9 + 0.1 * body.var(dim=0))


def test_the_local_gradient_of_a_clients_own_model_is_clipped_and_the_global_ones_is_not() -> None:
    task, clip = make_task(), 1e-3
    settings = ONE_STEP | SERVER | {"global_model": True, "local_clip": clip}
    ours, sent = Federation("mh_pfedhn", task, **settings), task.initial("base")
    cohort, batches = ours.engine.cohort([0], 0, training=True), ours.config.batches
    trained = torch_sgd(task, 0, sent, 1, lr=LOCAL_LR)
    own = trees.take(cohort.ask(Client.train_model, sent, batches=batches), 0)
    shared = trees.take(cohort.ask(Client.train_global, sent, batches=batches), 0)
    close(shared, trees.subtract(sent, trained))
    length = torch.cat([value.flatten() for value in own.values()]).norm()
    assert length.item() == pytest.approx(LOCAL_LR * clip, rel=0.02)


def test_the_global_model_is_trained_by_the_settings_of_clients() -> None:
    task, sgd = make_task(), {"momentum": 0.9, "weight_decay": 0.1}
    own = {"local_steps": 3} | {f"local_{name}": value for name, value in sgd.items()}
    ours = Federation("mh_pfedhn", task, **ONE_STEP | SERVER | own, global_model=True)
    cohort, sent = ours.engine.cohort([0], 0, training=True), task.initial("base")
    shared = trees.take(cohort.ask(Client.train_global, sent, batches=ours.config.batches), 0)
    trained = torch_sgd(task, 0, sent, 3, lr=LOCAL_LR, **sgd)
    close(shared, trees.subtract(sent, trained))


def test_a_global_model_teaches_with_its_own_buffers_those_whose_are_of_another_shape() -> None:
    class Wide(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = nn.Linear(FEATURES, 7), nn.BatchNorm1d(7)
            self.head = nn.Linear(7, CLASSES)

    models: dict[str, nn.Module] = {"narrow": Normed().double(), "wide": Wide().double()}
    task = make_task(models=models, sizes=("narrow", "wide", "wide", "narrow"))
    ours = Federation("mh_pfedhn", task, **ONE_STEP, **SERVER, global_model=True)
    for number in range(2):  # in the second the clients remember buffers
        assert ours.round(range(4), number).weight.gt(0).all()


def test_the_global_model_teaches_by_the_statistics_of_the_batch() -> None:
    """In the mode of the one that it teaches, which sees the same batch."""
    task = make_task(Normed)
    settings = {"global_model": True, "distillation": 1.0, "temperature": 2.5}
    ours = Federation("mh_pfedhn", task, **ONE_STEP, **SERVER, **settings)
    reference, initial = Reference(ours), task.initial("base")
    light = trees.detach(reference.generate(reference.embeddings[4], "base"))
    sent = trees.detach(reference.personal(0))
    cohort, batches = ours.engine.cohort([0], 0, training=True), ours.config.batches
    cohort.ask(Client.train_global, initial | light, batches=batches)
    delta = trees.take(cohort.ask(Client.train_model, sent, batches=batches), 0)
    leaves = {name: value.clone().requires_grad_() for name, value in sent.items()}
    p, q = (
        reference.output(0, trees.clone(initial) | model, "base").div(2.5).softmax(1)
        for model in (light, leaves)
    )
    (2.5**2 * (p * (p / q).log()).sum(1).mean()).backward()
    close(delta, {name: LOCAL_LR * leaf.grad for name, leaf in leaves.items()})


def test_nothing_but_weights_of_its_own_size_travels() -> None:
    """A client is sent its model, and with a global model that one too, as large as it is."""
    for light in (False, True):
        ours = Federation("mh_pfedhn", three_networks(), **ONE_STEP, **SERVER, global_model=light)
        exchanges = ours.round([0, 1]).state.exchanges
        counted = {(e.client, e.step): (e.down, e.up) for e in exchanges}
        personal = {(0, "train_model"): (8 * 39, 8 * 39), (1, "train_model"): (8 * 57, 8 * 57)}
        shared = {(i, "train_global"): (8 * 39, 8 * 39) for i in (0, 1)}
        assert counted == (personal | shared if light else personal)


def test_the_global_model_needs_classes() -> None:
    Federation("mh_pfedhn", make_quadratic_task())
    with pytest.raises(UserError, match="with a global_model must have classes"):
        Federation("mh_pfedhn", make_quadratic_task(), global_model=True)


def test_training_lowers_the_loss_of_clients_of_every_network() -> None:
    """The reason for it all."""
    ours = Federation("mh_pfedhn", three_networks(), **SERVER, local_steps=5, local_lr=0.05)
    reference = Reference(ours)
    before = [reference.objective([i]).item() for i in range(5)]
    for number in range(20):
        ours.round(range(5), number)
    reference = Reference(ours)
    after = [reference.objective([i]).item() for i in range(5)]
    assert all(new < old - 0.1 for old, new in zip(before, after, strict=True))


def test_the_defaults_are_the_authors() -> None:
    """utils.py and the optimiser of MH-pFedHN.py; 500 visits to each of 50 clients."""
    config = Config(
        **{
            key.removeprefix("method."): value
            for key, value in mh_pfedhn.PRESETS["official_gd"].items()
            if key.startswith("method.")
        }
    )
    assert (config.lr, config.clip, config.chunk) == (2e-4, 50.0, 3072)
    assert (config.embedding_size, config.embedding_std) == (64, 0.002)
    assert (config.hidden, config.hidden_layers) == (128, 2)
    assert (config.local_epochs, config.batch_size, config.local_lr) == (1, 64, 5e-3)
    assert (config.local_momentum, config.local_weight_decay, config.local_clip) == (0.9, 5e-4, 50)
    assert (config.global_model, config.distillation, config.temperature) == (True, 0.2, 15.0)
    official = mh_pfedhn.PRESETS["official"]
    assert official["rounds"] == 500 * official["task.clients"] // official["cohort"]
    assert mh_pfedhn.PRESETS["official_gd"] == {**official, "method.global_model": True}


def test_few_rounds_go_by_ten_times_the_authors_rate() -> None:
    few = mh_pfedhn.PRESETS["default"]
    assert few["rounds"] == 200
    assert few["method.lr"] == pytest.approx(10 * Config().lr)

"""pFedHN and pFedHN-PC: the update by one-piece autograd, Proposition 1, and what travels."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.data.arrays import IGNORED
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.engines.replies import NoAnswerError
from hyperfed.federation import AllLostError
from hyperfed.methods import pfedhn
from hyperfed.methods.parts import hypernet_training
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from toys import (
    CLASSES,
    FEATURES,
    MOMENTUM,
    ONE_STEP,
    PLAIN,
    TORCH,
    Federation,
    Normed,
    TwoLayers,
    check_that_novel_clients_measure,
    client_loss,
    close,
    far_task,
    logits,
    make_task,
    make_token_task,
    torch_sgd,
)

SERVER: dict[str, Any] = {
    "hidden": 7,
    "hidden_layers": 1,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
}


def parameters_after_one_round(
    federation: Federation, clients: list[int], heads: dict[int, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The server after one step on its objective, which autograd sees in one piece.

    With one plain local step of rate eta, delta = eta times the gradient, so descending the
    pull-back is gradient descent with rate lr * eta on the mean, or sum, of L_i(h(v_i; phi)).
    """
    server, task = federation.server, federation.task
    together = 1 if federation.config.cohort_reduction == "sum" else len(clients)
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        generated = server.hyper_net(server.embeddings.weight[client : client + 1])
        model = {name: value[0] for name, value in generated.items()} | heads.get(client, {})
        objective = objective + client_loss(task, client, model) / together
    named = dict(server.hyper_net.named_parameters()) | {"v": server.embeddings.weight}
    gradients = torch.autograd.grad(objective, list(named.values()))
    config = federation.config
    rate = dict.fromkeys(named, config.lr) | {"v": config.embedding_lr or config.lr}
    return {
        name: (value - rate[name] * config.local_lr * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }


def parameters(server: Any) -> dict[str, Tensor]:
    named = dict(server.hyper_net.named_parameters()) | {"v": server.embeddings.weight}
    return {name: value.detach().clone() for name, value in named.items()}


def own_head(client: int) -> dict[str, Tensor]:
    """A classifier for each client."""
    noise = generator(5, client)
    return {
        "head.weight": torch.randn(CLASSES, 4, generator=noise, dtype=torch.float64),
        "head.bias": torch.randn(CLASSES, generator=noise, dtype=torch.float64),
    }


def check_one_round(method: str, clients: list[int], **settings: Any) -> None:
    federation = Federation(method, make_task(), **ONE_STEP, **SERVER, **settings)
    heads: dict[int, dict[str, Tensor]] = {}
    if method == "pfedhn_pc":
        heads = {client: own_head(client) for client in clients}
        federation.engine.memory = {client: {"head": head} for client, head in heads.items()}
    expected = parameters_after_one_round(federation, clients, heads)
    federation.round(clients)
    close(parameters(federation.server), expected)


@pytest.mark.parametrize("clients", [[2], [0, 1, 3]])
@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc"])
def test_the_update_is_the_gradient_of_the_one_piece_objective(
    method: str, clients: list[int]
) -> None:
    check_one_round(method, clients)


def test_embeddings_have_their_own_learning_rate_where_one_is_given() -> None:
    check_one_round("pfedhn", [0, 1, 3], embedding_lr=3.0)


def test_the_step_may_be_by_the_sum_over_a_cohort() -> None:
    check_one_round("pfedhn", [0, 1, 3], cohort_reduction="sum")


@pytest.mark.parametrize(
    "settings",
    [
        {"hyper_net": "single"},
        {"hyper_net": "single", "head_rank": 2},
        {"head_rank": 2},
        {"hyper_net": "chunks", "chunk": 7, "chunk_embedding": 2},
        {"hyper_net": "chunks", "start": "target"},
        {"start": "target"},
    ],
)
def test_so_it_is_with_every_kind_of_hypernetwork(settings: dict[str, Any]) -> None:
    check_one_round("pfedhn", [0, 1, 3], **settings)


def flipped(sent: trees.Tree, trained: trees.Tree) -> trees.Tree:
    return trees.tree_map(torch.neg, trees.subtract(sent, trained))


def scaled(model: Any, delta: Any, weight: Tensor, onto: Any = None) -> None:
    trees.pull_back(model, delta, weight / 2, onto)


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (pfedhn, "subtract", flipped),
        (hypernet_training, "pull_back", scaled),
        (hypernet_training, "fill_gradients", None),
    ],
)
def test_a_flipped_sign_or_a_wrong_scale_is_caught(
    place: Any, name: str, mutant: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks above and below fail on these mutants: so much they are worth."""
    if mutant is None:
        monkeypatch.setattr(place, name, lambda _: None)
        with pytest.raises(AssertionError):
            check_unsampled_sizes_move()
    else:
        monkeypatch.setattr(place, name, mutant)
        with pytest.raises(AssertionError):
            check_one_round("pfedhn", [2])


def test_training_lowers_the_loss_of_every_client() -> None:
    federation = Federation("pfedhn", make_task(), local_steps=10, local_lr=0.05, batch_size=8)
    before = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    for number in range(200):
        federation.round([number % 4], number)
    after = [client_loss(federation.task, i, federation.personal(i)).item() for i in range(4)]
    assert all(new < 0.7 * old for old, new in zip(before, after, strict=True))


def test_momentum_and_weight_decay_move_unsampled_embeddings_too() -> None:
    settings = SERVER | {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.5}
    federation = Federation("pfedhn", make_task(), **ONE_STEP, **settings)
    before = federation.server.embeddings.weight[1].detach().clone()
    federation.round([0])
    after = federation.server.embeddings.weight[1].detach()
    torch.testing.assert_close(after, before * (1 - 0.5 * 0.1))


def test_the_servers_gradient_is_clipped() -> None:
    settings = SERVER | {"clip": 1e-4, "lr": 1.0}
    federation = Federation("pfedhn", make_task(), **ONE_STEP, **settings)
    before = trees.clone(federation.server.state())
    federation.round([0])
    after = federation.server.state()
    moved = [
        (old - new).flatten()
        for (_, old), (_, new) in zip(trees.leaves(before), trees.leaves(after), strict=True)
    ]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-4, rel=0.02)


def test_the_servers_gradient_need_not_be_clipped() -> None:
    """With a gradient above the bound of 50, which is no bound then."""
    steep = ONE_STEP | {"local_lr": 1e4}
    federation = Federation("pfedhn", make_task(), **steep, **SERVER, clip=None)
    expected = parameters_after_one_round(federation, [2], {})
    clipped = Federation("pfedhn", make_task(), **steep, **SERVER)
    for ours in (federation, clipped):
        ours.round([2])
    found, bounded = (parameters(ours.server) for ours in (federation, clipped))
    close(found, expected)
    assert not torch.allclose(found["v"], bounded["v"])


# Spectral normalisation


def test_a_round_that_all_are_lost_in_leaves_the_norms_too() -> None:
    options = {"faults": Faults(drop=1.0)}
    federation = Federation(
        "pfedhn", make_task(), options, **ONE_STEP, **SERVER, spectral_norm=True
    )
    before = trees.clone(federation.server.state())
    with pytest.raises(AllLostError):
        federation.round([0])
    torch.testing.assert_close(federation.server.state(), before, rtol=0, atol=0)


def test_norms_follow_the_weights_once_a_round() -> None:
    """One power iteration on the new weights, however many sizes a cohort has."""
    federation = Federation("pfedhn", sized_task(), **ONE_STEP, **SERVER, spectral_norm=True)
    key = "trunk.0.parametrizations.weight"
    before = trees.clone(federation.server.state())["hyper_net"]
    federation.round([0, 1])
    after = federation.server.state()["hyper_net"]
    weight, v = after[f"{key}.original"], before[f"{key}.0._v"]
    assert not torch.equal(weight, before[f"{key}.original"])
    u = weight @ v / (weight @ v).norm()
    close(after[f"{key}.0._u"], u)
    found = after[f"{key}.0._v"]
    close(found, weight.T @ u / (weight.T @ u).norm())


# Personal classifiers


@pytest.mark.parametrize("keep", [False, True])
def test_pc_keeps_the_head_and_its_momentum_if_asked_and_does_not_clip_it(keep: bool) -> None:
    settings = {"local_steps": 3, "batch_size": 10_000, "local_lr": 0.1, "local_momentum": 0.9}
    settings |= {"local_weight_decay": 0.0, "local_clip": 1e-9, "keep_momentum": keep}
    federation = Federation("pfedhn_pc", make_task(), **settings, **SERVER)
    task = federation.task
    head = own_head(0)
    federation.engine.memory = {0: {"head": own_head(0)}}
    speed = {name: torch.zeros_like(value) for name, value in head.items()}
    for number in range(2):
        generated = federation.server.hyper_net(federation.server.embeddings.weight[:1].detach())
        body = {name: value[0].detach() for name, value in generated.items()}
        if not keep:
            speed = {name: torch.zeros_like(value) for name, value in head.items()}
        for _ in range(3):  # a clip of 1e-9 freezes the body, so the head's path is simple
            leaves = {name: value.clone().requires_grad_() for name, value in head.items()}
            client_loss(task, 0, body | leaves).backward()
            for name, leaf in leaves.items():
                speed[name] = 0.9 * speed[name] + leaf.grad
                head[name] = head[name] - 0.1 * speed[name]
        federation.round([0], number)
        torch.testing.assert_close(federation.engine.memory[0]["head"], head, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
def test_pc_clients_draw_a_head_each_and_once(
    kind: type[LoopEngine], caplog: pytest.LogCaptureFixture
) -> None:
    still = ONE_STEP | {"local_lr": 1e-300}  # what was drawn is what is kept
    federation = Federation("pfedhn_pc", make_task(), **still, **SERVER)
    federation.engine = kind(federation.task, federation.method.Client, federation.config, seed=0)
    for number, clients in enumerate(([3, 0], [0, 1, 2])):
        federation.round(clients, number)
    for client, number in ((0, 0), (3, 0), (1, 1), (2, 1)):
        noise = generator(0, "client", client, number, "train_model", 0)
        expected = {  # as ``nn.Linear`` draws, from 4 features
            "head.weight": torch.empty(CLASSES, 4, dtype=torch.float64),
            "head.bias": torch.empty(CLASSES, dtype=torch.float64),
        }
        for value in expected.values():
            value.uniform_(-0.5, 0.5, generator=noise)
        kept = federation.engine.memory[client]["head"]
        torch.testing.assert_close(kept, expected, rtol=0, atol=0)
    assert not [record for record in caplog.records if "client by client" in record.msg]


def test_a_client_of_pc_that_was_never_asked_uses_the_initial_head() -> None:
    federation = Federation("pfedhn_pc", make_task(), **ONE_STEP, **SERVER)
    federation.round([0, 1])
    ours, initial = federation.personal(2), federation.task.outline().initial()
    assert all(torch.equal(ours[name], initial[name]) for name in ("head.weight", "head.bias"))


def test_what_travels_is_what_the_hypernetwork_makes() -> None:
    whole = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
    body = (FEATURES * 4 + 4) * 8
    for method, size in (("pfedhn", whole), ("pfedhn_pc", body)):
        cohort = Federation(method, make_task(), **ONE_STEP, **SERVER).round([1, 2])
        assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2


def test_batch_norm_buffers_stay_with_the_client() -> None:
    federation = Federation("pfedhn", make_task(Normed), **ONE_STEP, **SERVER)
    cohort = federation.round([0])
    parameters = sum(p.numel() for p in Normed().parameters()) * 8
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(parameters, parameters)]
    kept = federation.engine.memory[0]["buffers"]
    assert kept["norm.num_batches_tracked"] == 1
    torch.testing.assert_close(
        federation.personal(0)["norm.running_mean"], kept["norm.running_mean"]
    )


def normalised(model: dict[str, Tensor], x: Tensor, by: Tensor) -> Tensor:
    """Outputs of a ``Normed`` on x with statistics of the inputs ``by``, in plain products."""
    body, inputs = (rows @ model["body.weight"].T + model["body.bias"] for rows in (x, by))
    spread = (inputs.var(dim=0) + 1e-5).sqrt()
    hidden = (body - inputs.mean(dim=0)) / spread * model["norm.weight"] + model["norm.bias"]
    return hidden.tanh() @ model["head.weight"].T + model["head.bias"]


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize(
    "settings",
    [
        {"descriptor": "class_proportions"},
        {"descriptor": "class_shares"},
        {"novel_models": "nearest"},
        {"novel_rounds": 0},
    ],
)
def test_novel_clients_to_whom_nothing_is_fitted_measure_the_buffers(
    settings: dict[str, Any], kind: type[LoopEngine]
) -> None:
    ours = Federation("pfedhn", far_task(), **ONE_STEP, **SERVER, **settings)
    check_that_novel_clients_measure(ours, kind)


def test_a_fit_begins_with_the_buffers_that_all_begin_with() -> None:
    task = far_task()
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, novel_rounds=1)
    embedding = ours.server.embeddings.weight.mean(dim=0, keepdim=True)
    sent = trees.take(trees.detach(ours.server.hyper_net(embedding)), 0)
    body = task.x[task.train[3]] @ sent["body.weight"].T + sent["body.bias"]
    fitted = ours.personal(3)
    close(fitted["norm.running_mean"], 0.1 * body.mean(dim=0))
    close(fitted["norm.running_var"], 0.9 + 0.1 * body.var(dim=0))


@pytest.mark.parametrize("kind", ["sampled", "ensemble"])
def test_a_novel_client_measures_the_buffers_of_each_model_of_a_pool(kind: str) -> None:
    task = far_task()
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, novel_models=kind)
    ours.round([0, 1])
    found = evaluate(ours.server, ours.engine, [3], 9)["test"]
    by, y = task.x[task.train[3]], task.y[task.test[3]]
    x = task.x[task.test[3]]
    outputs = torch.stack([normalised(ours.personal(client), x, by) for client in range(3)])
    sampled = torch.stack([nn.functional.cross_entropy(each, y) for each in outputs]).mean()
    loss = {"sampled": sampled, "ensemble": nn.functional.cross_entropy(outputs.mean(dim=0), y)}
    close(found.loss.item(), len(y) * loss[kind].item())


# Several target sizes


def sized_task() -> Task:
    with seeded(0, "sizes"):
        small, large = TwoLayers().double(), Normed().double()
    sizes = ("S", "L", "S", "L")
    return make_task(models={"S": small, "L": large}, sizes=sizes)


def test_a_client_is_sent_its_sizes_part() -> None:
    federation = Federation("pfedhn", sized_task(), **ONE_STEP, **SERVER)
    cohort = federation.round([0, 1, 2, 3])
    down = {e.client: e.down for e in cohort.state.exchanges}
    small = sum(p.numel() for p in TwoLayers().parameters()) * 8
    large = sum(p.numel() for p in Normed().parameters()) * 8
    assert down == {0: small, 2: small, 1: large, 3: large}
    heads = federation.server.hyper_net.heads
    made = sum(head.out_features for head in heads.values())
    assert made * 8 == small + large  # the sum of the sizes' tensors


def check_unsampled_sizes_move() -> None:
    settings = SERVER | {"weight_decay": 0.1}
    federation = Federation("pfedhn", sized_task(), **ONE_STEP, **settings)
    before = trees.clone(federation.server.state())["hyper_net"]
    federation.round([0])  # S only
    after = federation.server.state()["hyper_net"]
    name = "heads.L/head/weight.weight"
    torch.testing.assert_close(after[name], before[name] * (1 - 0.5 * 0.1))


def test_weight_decay_moves_the_heads_of_unsampled_sizes_too() -> None:
    check_unsampled_sizes_move()


def test_of_several_sizes_the_update_is_the_mean_over_all_clients() -> None:
    """One objective (section 5.2), however many clients a size has."""
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": nn.Linear(FEATURES, CLASSES).double()}
    federation = Federation(
        "pfedhn", make_task(models=models, sizes=("S", "L", "S", "L")), **ONE_STEP, **SERVER
    )
    task, server, losses = federation.task, federation.server, []
    for client in (0, 1, 2):
        size, rows = task.size_of(client), task.train[client]
        made = server.hyper_net(server.embeddings.weight[client : client + 1], size)
        output = logits(models[size], trees.take(made, 0), task.x[rows])
        losses.append(nn.functional.cross_entropy(output, task.y[rows]))
    named = dict(server.hyper_net.named_parameters()) | {"v": server.embeddings.weight}
    gradients = torch.autograd.grad(sum(losses) / 3, list(named.values()))
    expected = {
        name: (value - federation.config.lr * federation.config.local_lr * gradient).detach()
        for (name, value), gradient in zip(named.items(), gradients, strict=True)
    }
    federation.round([0, 1, 2])
    close(parameters(server), expected)


# Novel clients


@pytest.mark.parametrize(
    "rates", [{"novel_lr": 0.3}, {"embedding_lr": 0.3}, {"novel_lr": 0.3, "embedding_lr": 0.7}]
)
def test_a_novel_client_fits_an_embedding_with_the_hypernetwork_frozen(
    rates: dict[str, float],
) -> None:
    task = make_task(novel=1)
    settings = SERVER | {"novel_rounds": 2} | rates
    federation = Federation("pfedhn", task, **ONE_STEP, **settings)
    federation.round([0, 1])
    server, before = federation.server, trees.clone(federation.server.state())
    ours = federation.personal(3)
    torch.testing.assert_close(server.state(), before, rtol=0, atol=0)
    # Nor is there a gradient that the next round of training would add.
    assert all(parameter.grad is None for parameter in server.hyper_net.parameters())
    embedding = server.embeddings.weight.detach().mean(0, keepdim=True)
    for _ in range(2):  # gradient descent with that rate times eta on L(h(v))
        embedding.requires_grad_()
        model = {name: value[0] for name, value in server.hyper_net(embedding).items()}
        (by,) = torch.autograd.grad(client_loss(task, 3, model), embedding)
        embedding = (embedding - 0.3 * 0.1 * by).detach()
    expected = {name: value[0].detach() for name, value in server.hyper_net(embedding).items()}
    close(ours, expected)


def test_a_fit_s_exchanges_are_those_of_training() -> None:
    """With all local steps, whose delta is pulled back in one."""
    settings = SERVER | {"novel_rounds": 1}
    federation = Federation("pfedhn", make_task(novel=1), **MOMENTUM, **settings)
    server = federation.server
    embedding = server.embeddings.weight.detach().mean(0, keepdim=True).requires_grad_()
    made = trees.take(server.hyper_net(embedding), 0)
    trained = torch_sgd(federation.task, 3, trees.detach(made), 3, **TORCH)
    inner = sum((made[name] * (made[name].detach() - trained[name])).sum() for name in made)
    (by,) = torch.autograd.grad(inner, embedding)
    expected = server.hyper_net(embedding.detach() - federation.config.lr * by)
    expected = trees.take(trees.detach(expected), 0)
    close(federation.personal(3), expected)


def fitted(server: Any, task: Task, client: int, start: Tensor, config: Any) -> Tensor:
    """What gradient descent of a client's loss, by PyTorch's own SGD, makes of an embedding."""
    embedding = start.clone().requires_grad_()
    optimizer = torch.optim.SGD(
        [embedding], config.lr, config.momentum, weight_decay=config.weight_decay
    )
    for _ in range(config.novel_rounds):
        model = {name: value[0] for name, value in server.hyper_net(embedding[None]).items()}
        (by,) = torch.autograd.grad(client_loss(task, client, model), embedding)
        embedding.grad = config.local_lr * by
        if config.clip is not None:
            nn.utils.clip_grad_norm_([embedding], config.clip)
        optimizer.step()
    return embedding.detach()


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("start", ["mean", "random"])
def test_novel_clients_are_fitted_each_as_if_alone(start: str, clip: float | None) -> None:
    """Of unequal size, with momentum and decay, and clipped as in training."""
    task = make_task(novel=2)
    settings = SERVER | {"momentum": 0.9, "weight_decay": 0.3, "novel_rounds": 4, "clip": clip}
    federation = Federation("pfedhn", task, **ONE_STEP, **settings, novel_start=start)
    federation.round([0, 1])
    cohort = federation.engine.cohort([2, 3], 99, training=False)
    ours = federation.server.fit_embeddings(cohort)
    assert len(task.train[2]) != len(task.train[3])
    for place, client in enumerate((2, 3)):
        first = federation.server.embeddings.weight.detach().mean(dim=0)
        if start == "random":
            noise = generator(0, "client", client, 99, "draw_embedding", 0)
            first = torch.randn(first.shape, generator=noise, dtype=torch.float64)
        expected = fitted(federation.server, task, client, first, federation.config)
        close(ours[place], expected)
        assert not torch.allclose(ours[place], first)


def test_where_a_fit_starts_can_change_after_training() -> None:
    run = hyperfed.train("pfedhn", make_task(novel=1), rounds=2, method={"local_steps": 2})
    other = run.served_otherwise(["method.novel_start=random"])
    assert run.evaluate_novel().client_loss != other.evaluate_novel().client_loss


def test_a_novel_client_of_pc_fits_its_classifier_too_and_leaves_no_memory() -> None:
    federation = Federation("pfedhn_pc", make_task(novel=1), **ONE_STEP, **SERVER)
    federation.round([0])
    ours, initial = federation.personal(3), federation.task.outline().initial()
    assert not torch.allclose(ours["head.weight"], initial["head.weight"])
    assert 3 not in federation.engine.memory


def test_fixed_descriptors_are_class_proportions() -> None:
    task = make_task(examples=(12, 1, 20, 9), novel=1)  # all of what client 1 has is of one class
    settings = SERVER | {"descriptor": "class_proportions"}
    federation = Federation("pfedhn", task, **ONE_STEP, **settings)
    federation.round([0, 1])
    for client in (1, 3):
        y = task.y[task.train[client]]
        share = torch.tensor([[(y == c).double().mean() for c in range(CLASSES)]]).double()
        generated = federation.server.hyper_net(share)
        expected = {name: value[0].detach() for name, value in generated.items()}
        torch.testing.assert_close(federation.personal(client), expected, rtol=1e-6, atol=1e-7)


def test_class_proportions_of_tokens_are_of_those_that_count() -> None:
    task = make_token_task()
    task.y[task.train[1]] = IGNORED  # one client has no label at all
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, descriptor="class_proportions")
    cohort = ours.engine.cohort([0, 1], 0, training=True)
    found = cohort.ask(ours.method.Client.class_proportions)["descriptor"]
    assert not cohort.state.lost
    y = task.y[task.train[0]][:, :3]  # those behind do not count
    expected = [[(y == c).double().mean().item() for c in range(CLASSES)], [0.0] * CLASSES]
    torch.testing.assert_close(found.double(), torch.tensor(expected).double())


def check_class_shares(engine: Any = None) -> None:
    """p_ij over known clients i, which sums to one for each class j (section 5.3)."""
    task = make_task(novel=1)
    task.y[: len(task.y)] = task.y.clamp(max=1)  # nobody has the third class
    task.y[task.train[3][:2]] = 2  # but for a novel client
    settings = SERVER | {"descriptor": "class_shares"}
    federation = Federation("pfedhn", task, engine, **ONE_STEP, **settings)
    cohort = federation.round([0, 1])
    asked = [(e.client, e.step) for e in cohort.state.exchanges if e.step == "class_counts"]
    assert sorted(client for client, _ in asked) == [0, 0, 1, 1, 2]  # all known ones, once
    cohort = federation.round([2], 1)
    assert [e.step for e in cohort.state.exchanges] == ["class_counts", "train_model"]
    labels = [task.y[task.train[client]] for client in range(4)]
    count = torch.stack([torch.bincount(y, minlength=CLASSES) for y in labels]).double()
    total = count[:3].sum(dim=0)
    assert total[2] == 0
    for client in (1, 3):
        share = torch.where(total > 0, count[client] / total, (count[client] > 0).double())
        generated = federation.server.hyper_net(share[None])
        expected = {name: value[0].detach() for name, value in generated.items()}
        close(federation.personal(client), expected)


@pytest.mark.parametrize(
    ("settings", "untrained"),
    [
        ({"descriptor": "class_proportions", "head_layers": 1}, True),
        ({"descriptor": "class_proportions"}, False),
        ({"head_layers": 1}, False),
    ],
)
def test_it_is_told_once_that_newcomers_will_have_an_untrained_classifier(
    settings: dict[str, Any], untrained: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Federation("pfedhn", make_task(novel=1), **ONE_STEP, **SERVER, **settings)
    for number in (0, 1):
        ours.round([0, 1], number)
    assert caplog.text.count("untrained classifier") == untrained


def test_fixed_descriptors_may_be_shares_of_classes() -> None:
    check_class_shares()


def test_who_is_away_when_classes_are_counted_counts_from_its_first_round_on() -> None:
    """Shares are of all who have answered, so that those of known clients never exceed one."""

    class Away(LoopEngine):
        def answer(self, calls: Sequence[Call]) -> list[trees.Tree | Exception]:
            away = NoAnswerError("away")
            answers = zip(calls, super().answer(calls), strict=True)
            return [away if (c.client, c.round) == (2, 0) else answer for c, answer in answers]

    task = make_task(novel=1)
    task.y[torch.cat([*task.train])[:CLASSES]] = torch.arange(CLASSES)  # client 0 has each class
    ours = Federation("pfedhn", task, **ONE_STEP, **SERVER, descriptor="class_shares")
    ours.engine = Away(task, ours.method.Client, ours.config, seed=0)
    ours.round([0], 0)
    labels = [task.y[task.train[client]] for client in range(4)]
    count = torch.stack([torch.bincount(y, minlength=CLASSES) for y in labels]).double()

    def shares(*clients: int) -> Tensor:
        cohort = ours.engine.cohort(clients, 99, training=False)
        found: Tensor = ours.server.descriptors_of(cohort)
        return found

    close(shares(0), count[:1] / count[:2].sum(dim=0))
    close(shares(2), count[2:3] / count[:3].sum(dim=0))
    ours.round([2], 1)
    for which in ([0, 1, 2], [3]):
        expected = count[which] / count[:3].sum(dim=0)
        close(shares(*which), expected)


def test_who_is_lost_has_the_classes_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SERVER | {"descriptor": "class_shares"}
    lossy, smaller = (Federation("pfedhn", make_task(), **ONE_STEP, **settings) for _ in range(2))
    for ours in (lossy, smaller):
        ours.round([0, 1], 0)
    monkeypatch.setattr(Faults, "drops", lambda faults, seed, call: call.client == 1)
    assert list(lossy.round([0, 1], 1).state.lost) == [1]
    smaller.round([0], 1)
    close(lossy.server.state(), smaller.server.state())


def test_class_shares_are_known_before_the_first_round_and_after_a_restart() -> None:
    settings = SERVER | {"descriptor": "class_shares"}
    ours, other = (Federation("pfedhn", make_task(), **ONE_STEP, **settings) for _ in range(2))
    fresh = ours.personal(0)
    assert not ours.server.examples  # serving changes nothing
    ours.round([0])
    other.server.load(trees.clone(ours.server.state()))
    assert torch.equal(other.server.examples["count"], ours.server.examples["count"])
    torch.testing.assert_close(other.personal(0), ours.personal(0), rtol=0, atol=0)
    assert not torch.equal(fresh["head.bias"], ours.personal(0)["head.bias"])


# Proposition 1


class Linear(nn.Module):
    """The linear hypernetwork theta_i = W v_i."""

    def __init__(self, descriptor: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Linear(descriptor, outputs, bias=False)

    def forward(self, descriptor: Tensor, size: str = "base") -> dict[str, Tensor]:
        return {"weight": self.matrix(descriptor).unsqueeze(1)}


@pytest.mark.slow
def test_proposition_1_the_linear_case_is_pca_of_the_local_solutions() -> None:
    """X_i'X_i = I: W spans the top k principal components, W v_i is the projection."""
    clients, samples, dimension, k = 8, 10, 6, 2
    draw = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            torch.linalg.qr(torch.randn(samples, dimension, dtype=torch.float64, generator=draw))[0]
            for _ in range(clients)
        ]
    )
    truth = torch.randn(clients, dimension, dtype=torch.float64, generator=draw)
    noise = torch.randn(clients * samples, dtype=torch.float64, generator=draw)
    y = (x * truth.repeat_interleave(samples, 0)).sum(1) + 0.1 * noise
    rows = list(torch.arange(clients * samples).split(samples))
    task = Task(
        name="proposition 1",
        x=x,
        y=y,
        train=rows,
        val=rows,
        test=rows,
        models={"base": nn.Linear(dimension, 1, bias=False).double()},
        classes=0,
        loss=lambda output, target: (output[:, 0] - target).square().sum(),
    )
    # The loss is |theta - theta_i|^2 up to a constant: one local step of rate 1/2 lands on theta_i.
    federation = Federation(
        "pfedhn", task, **PLAIN, local_steps=1, batch_size=samples, local_lr=0.5, embedding_size=k
    )
    server = federation.server
    with seeded(3, "linear"):
        server.hyper_net = Linear(k, dimension).double()
    everything = [*server.embeddings.parameters(), *server.hyper_net.parameters()]
    server.optimizer = torch.optim.SGD(everything, lr=0.5, momentum=0.9)
    for number in range(600):
        federation.round(range(clients), number)

    local = torch.stack([x[r].T @ y[r] for r in rows])  # theta_i, rows
    _, _, right = torch.linalg.svd(local)  # PCA without centring, as in the proof
    projection = right[:k].T @ right[:k]
    matrix = server.hyper_net.matrix.weight.detach()
    ours = matrix @ torch.linalg.pinv(matrix)
    torch.testing.assert_close(ours, projection, rtol=0, atol=1e-6)
    for client in range(clients):
        model = federation.personal(client)["weight"][0]
        torch.testing.assert_close(model, projection @ local[client], rtol=0, atol=1e-6)

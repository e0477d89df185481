"""The update of pFedHN and pFedHN-PC, by one-piece autograd, and what travels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.federation import AllLostError
from hyperfed.methods import pfedhn
from hyperfed.methods.parts import hypernet_training
from methods.pfedhn.checks import (
    SERVER,
    check_unsampled_sizes_move,
    own_head,
    parameters,
    sized_task,
)
from toys import (
    CLASSES,
    FEATURES,
    ONE_STEP,
    Federation,
    client_loss,
    close,
    make_task,
)


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


def test_the_step_may_be_by_the_mean_over_a_cohort() -> None:
    check_one_round("pfedhn", [0, 1, 3], cohort_reduction="mean")


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc"])
def test_a_round_of_several_goes_as_far_as_they_do_one_a_round(method: str) -> None:
    """As algorithm 1 has them, but for what a step changes of the next: of its square."""
    clients, small = [0, 1, 3], {**SERVER, "lr": 1e-3}
    ones, together = (Federation(method, make_task(), **ONE_STEP, **small) for _ in range(2))
    before = parameters(ones.server)
    for client in clients:
        ones.round([client])
    together.round(clients)
    after = parameters(together.server)
    went, apart = (
        sum(float((after[name] - of[name]).square().sum()) for name in after) ** 0.5
        for of in (before, parameters(ones.server))
    )
    assert 0 < apart < 0.02 * went


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


def test_what_travels_is_what_the_hypernetwork_makes() -> None:
    whole = (FEATURES * 4 + 4 + 4 * CLASSES + CLASSES) * 8
    body = (FEATURES * 4 + 4) * 8
    for method, size in (("pfedhn", whole), ("pfedhn_pc", body)):
        cohort = Federation(method, make_task(), **ONE_STEP, **SERVER).round([1, 2])
        assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2

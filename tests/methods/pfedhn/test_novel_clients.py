"""pFedHN's clients that were never seen: an embedding is fitted to each."""

import pytest
import torch

import hyperfed
from hyperfed import trees
from hyperfed.system.randomness import generator
from methods.pfedhn.checks import (
    SERVER,
    fitted,
)
from toys import (
    MOMENTUM,
    ONE_STEP,
    TORCH,
    Federation,
    client_loss,
    close,
    make_task,
    torch_sgd,
)


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

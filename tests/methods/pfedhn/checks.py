"""What the tests of pFedHN share: a small server, a task of two sizes, a fit by hand."""

from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from toys import (
    CLASSES,
    ONE_STEP,
    Federation,
    Normed,
    TwoLayers,
    client_loss,
    make_task,
)

SERVER: dict[str, Any] = {
    "hidden": 7,
    "hidden_layers": 1,
    "lr": 0.5,
    "momentum": 0.0,
    "weight_decay": 0.0,
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


def sized_task() -> Task:
    with seeded(0, "sizes"):
        small, large = TwoLayers().double(), Normed().double()
    sizes = ("S", "L", "S", "L")
    return make_task(models={"S": small, "L": large}, sizes=sizes)


def check_unsampled_sizes_move() -> None:
    settings = SERVER | {"weight_decay": 0.1}
    federation = Federation("pfedhn", sized_task(), **ONE_STEP, **settings)
    before = trees.clone(federation.server.state())["hyper_net"]
    federation.round([0])  # S only
    after = federation.server.state()["hyper_net"]
    name = "heads.L/head/weight.weight"
    torch.testing.assert_close(after[name], before[name] * (1 - 0.5 * 0.1))


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

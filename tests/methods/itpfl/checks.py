"""What the tests of IT-PFL-HN share: a toy federation, its encoder by hand, one-piece checks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hyperfed import trees
from toys import CLASSES, FEATURES, ONE_STEP, Federation, client_loss, close, make_task

UNITS, LENGTH = 6, 3
PFEDHN: dict[str, Any] = {
    "embedding_lr": None,
    "embedding_weight_decay": None,
}
"""Phase 1 with the server's step of pFedHN."""
SETTINGS: dict[str, Any] = (
    PFEDHN
    | ONE_STEP
    | {
        "hidden": 7,
        "hidden_layers": 1,
        "lr": 0.5,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "embedding_size": LENGTH,
        "encoder_units": UNITS,
        "encoder_lr": 0.2,
        "phase_one_rounds": 1,
        "embedding_start": 1.0,
        "encoder_optimizer": "average",
        "standardize": False,
    }
)
"""And FedAvg of an encoder that tells embeddings as they are, drawn from N(0, 1)."""


class NormedInputs(torch.nn.Module):
    """Batch-norm where the encoder has it too: before the first linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(FEATURES)
        self.body = torch.nn.Linear(FEATURES, 4)
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.body(self.norm(x))))
        return output


def federation(**options: Any) -> Federation:
    settings = SETTINGS | options.pop("settings", {})
    return Federation("itpfl", make_task(**({"novel": 1} | options)), **settings)


def encode(weights: Mapping[str, Tensor], x: Tensor, *, bounded: bool = False) -> Tensor:
    """The encoder on the trunk of ``TwoLayers``: (B, features) -> (l,)."""
    h = torch.tanh(x @ weights["features.0.body.weight"].T + weights["features.0.body.bias"])
    if not bounded:
        h = torch.cat([h[:, : UNITS // 2].mean(0), h[:, UNITS // 2 :].max(0).values])
    h = torch.relu(h @ weights["layers.0.weight"].T + weights["layers.0.bias"])
    h = h @ weights["layers.2.weight"].T + weights["layers.2.bias"]
    return (h / h.norm(dim=1, keepdim=True)).mean(0) if bounded else h


def encoder_of(ours: Federation) -> dict[str, Tensor]:
    """A copy of the encoder's weights."""
    return trees.model_of(ours.server.encoder)


def inputs(ours: Federation, client: int) -> Tensor:
    return ours.task.x[ours.task.train[client]]


def of_known(ours: Federation) -> tuple[Tensor, Tensor]:
    """Mean and deviation, (l,) each, of the three known clients' embeddings."""
    rows = ours.server.embeddings.weight.detach()
    mean = (rows[0] + rows[1] + rows[2]) / 3
    return mean, ((rows - mean).square().sum(dim=0) / 3).sqrt()


def state(ours: Federation) -> dict[str, Any]:
    return trees.clone(ours.server.state(optimizers=False))


def check_descent(
    ours: Federation, net: str, clients: list[int], describe: Callable[[int], Tensor], number: int
) -> None:
    """One round is one step on the mean, or sum, of L_i(h(v_i)), seen by autograd in one piece.

    With one plain local step of rate eta, delta = eta times the gradient, so descending the
    pull-back is gradient descent with rate lr * eta. Its clipping counts all that moves, and
    precedes weight decay.
    """
    server, config = ours.server, ours.config
    together = 1 if config.cohort_reduction == "sum" else len(clients)
    objective = torch.zeros((), dtype=torch.float64)
    for client in clients:
        generated = getattr(server, net)(describe(client)[None])
        model = {name: value[0] for name, value in generated.items()}
        objective = objective + client_loss(ours.task, client, model) / together
    named = dict(getattr(server, net).named_parameters())
    if net == "hyper_net":
        named["v"] = server.embeddings.weight
    gradients = torch.autograd.grad(config.local_lr * objective, list(named.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    scale = (config.clip / (norm + 1e-6)).clamp(max=1)
    expected = {}
    for (name, value), gradient in zip(named.items(), gradients, strict=True):
        lr, decay = config.lr, config.weight_decay
        if name == "v":
            lr = config.embedding_lr or lr
            decay = (
                decay if config.embedding_weight_decay is None else config.embedding_weight_decay
            )
        expected[name] = (value - lr * (scale * gradient + decay * value)).detach()
    ours.round(clients, number)
    after = dict(getattr(server, net).named_parameters()) | {"v": server.embeddings.weight}
    after = {name: after[name].detach() for name in expected}
    close(after, expected)


def generated(net: Any, descriptor: Tensor) -> dict[str, Tensor]:
    return {name: value[0].detach() for name, value in net(descriptor[None]).items()}


def check_phase_one(clients: list[int], **settings: Any) -> None:
    ours = federation(settings=settings)

    def describe(client: int) -> Tensor:
        e: Tensor = ours.server.embeddings.weight[client]
        return e / e.norm() if ours.config.bounded else e

    check_descent(ours, "hyper_net", clients, describe, 0)
    # Until phase 2 begins, novel clients use the same hypernetwork.
    descriptor = encode(encoder_of(ours), inputs(ours, 3), bounded=ours.config.bounded)
    served = generated(ours.server.hyper_net, descriptor)
    close(ours.personal(3), served)


def check_encoder(clients: list[int], **settings: Any) -> None:
    """FedAvg, by training examples, of one clipped step each on |g(x) - e_i|^2, or that / l."""
    ours = federation(settings=settings)
    bounded = ours.config.bounded
    before = encoder_of(ours)
    count = torch.tensor([len(inputs(ours, i)) for i in clients], dtype=torch.float64)
    assert len(count.unique()) == len(clients)  # unequal, so that a wrong weight shows
    expected = {name: torch.zeros_like(value) for name, value in before.items()}
    for client, share in zip(clients, count / count.sum(), strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in before.items()}
        e = ours.server.embeddings.weight[client].detach().clone()
        e = e / e.norm() if bounded else e
        if ours.config.standardized:
            mean, deviation = of_known(ours)
            e = (e - mean) / deviation
        squares = (encode(leaves, inputs(ours, client), bounded=bounded) - e).square()
        distance = squares.sum() if ours.config.encoder_reduction == "sum" else squares.mean()
        gradients = torch.autograd.grad(distance, list(leaves.values()))
        if (bound := ours.config.local_clip) is not None:
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            assert norm > 2 * bound
            gradients = tuple(gradient * bound / (norm + 1e-6) for gradient in gradients)
        for name, gradient in zip(leaves, gradients, strict=True):
            expected[name] += share * (before[name] - ours.config.encoder_lr * gradient)
    ours.round(clients, 0)
    close(encoder_of(ours), expected)


def check_phase_two(clients: list[int], **settings: Any) -> None:
    ours = federation(settings=settings)
    ours.round([0, 1, 2], 0)
    before = state(ours)
    bounded = ours.config.bounded

    def describe(client: int) -> Tensor:
        descriptor = encode(encoder_of(ours), inputs(ours, client), bounded=bounded)
        assert not descriptor.requires_grad
        if ours.config.standardized:  # the encoder speaks of standardised embeddings: undone
            mean, deviation = of_known(ours)
            descriptor = descriptor * deviation + mean
        return descriptor

    check_descent(ours, "novel_net", clients, describe, 1)
    for frozen in ("encoder", "embeddings", "hyper_net"):
        torch.testing.assert_close(state(ours)[frozen], before[frozen], rtol=0, atol=0)

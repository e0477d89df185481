"""What the tests of pFedLA share: a small server, its mixtures by hand, a task of two sizes."""

from typing import Any

import torch
from torch import Tensor

from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from toys import ONE_STEP, Federation, Normed, TwoLayers, client_loss, make_task

CLOSE: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-12}
SERVER: dict[str, Any] = {"embedding_size": 6, "hidden": 7, "lr": 0.5}
LAYERS: dict[str, list[str]] = {
    "body": ["body.weight", "body.bias"],
    "norm": [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ],
    "head": ["head.weight", "head.bias"],
}
"""The layers of Normed, in the order of its modules."""


def trained_federation(retain: int = 0, **settings: Any) -> Federation:
    """Three rounds, after which no two clients have the same model; client 3 has its first one."""
    settings = ONE_STEP | SERVER | settings
    federation = Federation("pfedla", make_task(Normed), retain=retain, **settings)
    for number, cohort in enumerate([[0, 1, 2], [1, 2], [0, 2]]):
        federation.round(cohort, number)
    return federation


def layers_in(federation: Federation) -> dict[str, list[str]]:
    """What has a weight of each client: a layer, or the whole model."""
    whole = federation.config.weigh == "models"
    return {"model": [name for names in LAYERS.values() for name in names]} if whole else LAYERS


def mixture_of(federation: Federation, client: int, retain: int = 0) -> dict[str, Tensor]:
    """sum_j alpha[l, j] theta_j entry by entry, but for the retained layers: the client's own."""
    server = federation.server
    alpha = server.hyper_nets(torch.tensor([client]))[0]  # (layers, n)
    model, own = server.trained["base"], alpha[:, client].tolist()
    retained = sorted(range(len(own)), key=lambda at: -own[at])[:retain]
    mixture = {}
    for at, names in enumerate(layers_in(federation).values()):
        for name in names:
            weighed = [a * theta for a, theta in zip(alpha[at], model[name].double(), strict=True)]
            mixed = model[name][client].double() if at in retained else torch.stack(weighed).sum(0)
            mixture[name] = mixed.round().long() if "num_batches" in name else mixed
    return mixture


def loss_of(federation: Federation, client: int, mixture: dict[str, Tensor]) -> Tensor:
    """The client's loss; batch-norm writes its statistics into copies."""
    kept = {n: value.detach().clone() for n, value in mixture.items() if n not in PARAMETERS}
    return client_loss(federation.task, client, mixture | kept)


PARAMETERS = dict(Normed().named_parameters()).keys()


def two_sizes(**options: Any) -> Task:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    return make_task(models=models, sizes=("S", "L", "S", "L"), **options)

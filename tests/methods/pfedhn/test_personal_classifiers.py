"""pFedHN-PC: a classifier that each client keeps, and the hypernetwork never sees."""

from typing import Any

import pytest
import torch
from torch import nn

from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.errors import UserError
from hyperfed.federation import Outline
from hyperfed.methods import METHODS
from hyperfed.system.randomness import generator
from methods.pfedhn.checks import (
    SERVER,
    own_head,
)
from toys import (
    CLASSES,
    ONE_STEP,
    Federation,
    client_loss,
    make_task,
)


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


def test_a_target_that_is_its_classifier_alone_leaves_nothing_to_generate() -> None:
    outline = Outline({"small": nn.Linear(4, 3)}, 2, 3)
    with pytest.raises(UserError, match=r"to generate .* size 'small' has no more than 1; c"):
        METHODS["pfedhn_pc"].Server(outline, METHODS["pfedhn_pc"].Config())


def test_a_client_of_pc_that_was_never_asked_uses_the_initial_head() -> None:
    federation = Federation("pfedhn_pc", make_task(), **ONE_STEP, **SERVER)
    federation.round([0, 1])
    ours, initial = federation.personal(2), federation.task.outline().initial()
    assert all(torch.equal(ours[name], initial[name]) for name in ("head.weight", "head.bias"))


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

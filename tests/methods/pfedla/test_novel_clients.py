"""Novel clients of pFedLA and HeurpFedLA: the mean of all models, of their size, own steps."""

from dataclasses import replace

import pytest
import torch

from methods.pfedla.checks import CLOSE, SERVER, two_sizes
from toys import ONE_STEP, Federation, client_loss, make_task, torch_sgd


@pytest.mark.parametrize("retain", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_novel_client_starts_from_the_mean_of_all_models(steps: int, retain: int) -> None:
    task = make_task(novel=1)
    settings = ONE_STEP | SERVER | {"novel_steps": steps, "retain": retain}
    federation = Federation("pfedla", task, **settings)
    for number, cohort in enumerate([[0, 1, 2], [0, 2]]):
        federation.round(cohort, number)
    expected = {name: value.mean(0) for name, value in federation.server.trained["base"].items()}
    if steps:
        leaves = {name: value.clone().requires_grad_() for name, value in expected.items()}
        client_loss(task, 3, leaves).backward()
        expected = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in leaves.items()}
    torch.testing.assert_close(federation.personal(3), expected, **CLOSE)
    assert 3 not in federation.engine.memory


def test_a_novel_client_is_fine_tuned_for_its_own_number_of_steps() -> None:
    task = make_task(novel=1)
    settings = ONE_STEP | SERVER | {"novel_steps": 3}
    federation = Federation("pfedla", task, **settings)
    federation.round([0, 1, 2])
    leaves = {name: value.mean(0) for name, value in federation.server.trained["base"].items()}
    for _ in range(3):  # of its own: a known client has one
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        client_loss(task, 3, leaves).backward()
        leaves = {name: (leaf - 0.1 * leaf.grad).detach() for name, leaf in leaves.items()}
    torch.testing.assert_close(federation.personal(3), leaves, **CLOSE)


def test_a_novel_client_starts_from_the_mean_of_the_models_of_its_size() -> None:
    task = two_sizes(novel=1)
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER, evaluated="trained")
    for number in range(2):
        federation.round([0, 1, 2], number)
    ours, stored = federation.personal(3), federation.server.trained
    for name, value in stored["L"].items():
        torch.testing.assert_close(ours[name], value[1], **CLOSE)  # client 1 alone is as large
    initial = task.outline().initial("L")
    assert (ours["body.weight"] - initial["body.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [0, 1])
def test_a_novel_client_of_a_size_that_nobody_has_starts_from_its_initial_model(steps: int) -> None:
    task = replace(two_sizes(novel=1), sizes=("S", "S", "S", "L"))
    federation = Federation("pfedla", task, **ONE_STEP, **SERVER, novel_steps=steps)
    for number in range(2):  # the server has met everyone
        federation.round([0, 1, 2], number)
    expected = task.outline().initial("L")
    if steps:
        expected = torch_sgd(task, 3, expected, 1, lr=0.1)
    torch.testing.assert_close(federation.personal(3), expected, **CLOSE)
    told = federation.server.diagnostics()["weights"]
    assert not torch.stack([*told["L"].values()]).any()  # NaN would count as true
    own = torch.stack([*told["S"].values()])
    torch.testing.assert_close(own.sum(-1), torch.ones_like(own[..., 0]), **CLOSE)

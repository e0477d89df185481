"""pFedHN where models have batch-norm's buffers, which no hypernetwork writes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.runs.evaluation import evaluate
from methods.pfedhn.checks import (
    SERVER,
)
from toys import (
    ONE_STEP,
    Federation,
    Normed,
    check_that_novel_clients_measure,
    close,
    far_task,
    make_task,
)


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

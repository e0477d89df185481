"""Which hypernetwork a server has: where its models start, how large it is, what is refused."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.methods import METHODS
from hyperfed.nets import DescribedChunks, MultiHead, SingleOutput
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import seeded
from toys import Federation, Normed, TwoLayers, make_task

NETS: dict[str, dict[str, Any]] = {
    "heads": {},
    "low rank": {"head_rank": 2},
    "single": {"hyper_net": "single"},
    "chunks": {"hyper_net": "chunks", "chunk": 5, "chunk_hidden_layers": 2},
}
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
METHODS_WITH = ["pfedhn", "pefll", "itpfl"]


def trained(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("method", METHODS_WITH)
def test_models_start_as_the_target(method: str, net: str) -> None:
    """Of each size, of known clients and novel ones, to 1e-12 in float64."""
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": nn.Sequential(TwoLayers()).double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"), novel=1)
    ours = Federation(method, task, start="target", batch_size=4, **NETS[net])
    for client in range(4):
        model = ours.personal(client)
        torch.testing.assert_close(model, trained(models[task.size_of(client)]), **EXACT)


@pytest.mark.parametrize("method", METHODS_WITH)
def test_accuracy_starts_as_the_targets(method: str) -> None:
    with seeded(1):
        target = TwoLayers().double()
    task = make_task(models={"base": target})
    ours = Federation(method, task, start="target", batch_size=4)
    counts = evaluate(ours.server, ours.engine, [0, 1, 2, 3], 0)["test"]
    right = [
        (target(task.x[rows]).argmax(dim=1) == task.y[rows]).sum().item() for rows in task.test
    ]
    assert counts.correct.tolist() == right
    loss = [task.loss(target(task.x[rows]), task.y[rows]).item() * len(rows) for rows in task.test]
    torch.testing.assert_close(counts.loss, torch.tensor(loss, dtype=torch.float64), **EXACT)


def test_batch_norm_starts_as_the_targets_too() -> None:
    task = make_task(Normed)
    nn.init.uniform_(task.models["base"].norm.running_mean)
    for method in ("pfedhn", "pefll"):
        ours = Federation(method, task, start="target", batch_size=4)
        torch.testing.assert_close(ours.personal(0), dict(task.models["base"].state_dict()))


@pytest.mark.parametrize("net", NETS)
def test_from_the_target_all_of_the_hypernetwork_learns(net: str) -> None:
    """Zero matrices at the end hold the layers before them back for a round, not for good."""
    ours = Federation("pfedhn", make_task(), start="target", local_lr=0.1, **NETS[net])
    before = trees.clone(trained(ours.server.hyper_net))
    for number in range(2):
        ours.round([0, 1, 2, 3], number)
    after = trained(ours.server.hyper_net)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


def test_a_start_at_random_is_another() -> None:
    ours = Federation("pfedhn", make_task())
    gap = trees.subtract(ours.personal(0), trained(ours.task.models["base"]))
    assert all(value.abs().max() > 1e-3 for value in gap.values())


def test_a_personal_head_starts_as_the_target_does() -> None:
    """Of pFedHN-PC, which draws one for each client otherwise."""
    for start, same in (("target", True), ("random", False)):
        ours = Federation("pfedhn_pc", make_task(), start=start, local_lr=1e-9, local_steps=1)
        ours.round([1])
        head = ours.engine.memory[1]["head"]["head.weight"]
        initial = ours.task.models["base"].head.weight
        assert torch.allclose(head, initial, rtol=0, atol=1e-6) == same


@pytest.mark.parametrize("method", METHODS_WITH)
def test_settings_choose_the_hypernetwork(method: str) -> None:
    kinds = {"heads": MultiHead, "low rank": MultiHead, "single": SingleOutput}
    for name, settings in NETS.items():
        ours = Federation(method, make_task(), hidden=7, chunk_embedding=2, **settings)
        net = ours.server.hyper_net
        assert type(net) is kinds.get(name, DescribedChunks)
        if name == "low rank":
            assert net.heads["base/body/weight"].weight.shape == (20, 2)
        if name == "chunks":
            assert [*map(type, net.network)] == [nn.Linear, nn.ReLU] * 3 + [nn.Linear]
            assert net.network[-1].weight.shape == (5, 7)
            assert net.ids["base"].weight.shape == (8, 2)  # 39 parameters in chunks of 5


def test_chunks_start_as_wide_as_the_target() -> None:
    """The embeddings of pFedHN are N(0, 1), as the spread of each tensor takes it."""
    squares = []
    for seed in range(200):
        with seeded(seed):
            server = METHODS["pfedhn"].Server(
                make_task().outline(), METHODS["pfedhn"].Config(hyper_net="chunks", chunk=5)
            )
        made = server.hyper_net(server.embeddings.weight)
        squares.append({name: value.detach().square().mean() for name, value in made.items()})
    for name, value in trained(make_task().models["base"]).items():
        mean = torch.stack([square[name] for square in squares]).mean().sqrt()
        assert mean.item() == pytest.approx(value.square().mean().sqrt().item(), rel=0.15)


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        *(
            (method, {"hyper_net": "chunks", "head_rank": 2}, "head_rank")
            for method in METHODS_WITH
        ),
        ("pfedhn", {"spectral_norm": True, "start": "target"}, "spectral_norm"),
        ("pfedhn", {"spectral_norm": True, "hyper_net": "chunks"}, "spectral_norm"),
        ("pefll", {"head_rank": 0}, "greater than 0"),
    ],
)
def test_what_excludes_one_another_is_refused(
    method: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, ValidationError), match=says):
        METHODS[method].Config(**settings)

"""What a client has of its own trains on from round to round, with its momentum or without.

Against optimisers of PyTorch, one of what is the client's own and one of all else. In a federation
of one client what is averaged is what that client trained.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from together import both
from toys import Federation, Normed, TwoLayers, close, make_task, snapshot

LOCAL = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1, "local_weight_decay": 0.01}
KEPT = {
    "apfl",
    "ditto",
    "fed_rod",
    "fedas",
    "fedbn",
    "feddbe",
    "fedper",
    "fedproto",
    "fedrep",
    "fml",
    "gpfl",
    "headstart",
    "heurpfedla",
    "lg_fedavg",
    "local",
    "mapper",
    "partialfed",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
}
"""The methods with parameters that a client goes on with."""


HEAD = {"head.weight", "head.bias"}


def new_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    return torch.optim.SGD([*parameters], lr=0.1, momentum=0.9, weight_decay=0.01)


def new_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW([*parameters], lr=0.1, betas=(0.9, 0.999), weight_decay=0.01)


def federation(method: str, net: type[nn.Module] = TwoLayers, **settings: Any) -> Federation:
    """One client, so that the average is of one."""
    return Federation(method, make_task(net, examples=(12,)), **LOCAL, **settings)


def rows_of(ours: Federation, number: int, count: int) -> Iterable[Tensor]:
    draw = generator(0, "batches", 0, number, "train_model", 0)
    own = ours.task.train[0]
    for _ in range(count):
        yield own[torch.randperm(len(own), generator=draw)[:5]]


def is_head(name: str) -> bool:
    return name.startswith("head")


def is_body(name: str) -> bool:
    return not is_head(name)


def is_norm(name: str) -> bool:
    return name.startswith("norm")


def is_any(name: str) -> bool:
    return True


def check(ours: Federation, own: Callable[[str], bool], *, keep: bool, apart: bool = False) -> None:
    """Three rounds; where ``apart``, three steps of the client's own and then three of the rest."""
    task = ours.task
    net = copy.deepcopy(task.models["base"])
    named = dict(net.named_parameters())
    personal = [value for name, value in named.items() if own(name)]
    rest = [value for name, value in named.items() if not own(name)]
    adamw = ours.server.config.local_optimizer == "adamw"
    new: Callable[[Any], torch.optim.Optimizer] = new_adamw if adamw else new_sgd
    optimizer = new(personal)
    for number in range(3):
        ours.round([0], number)
        if not keep:
            optimizer = new(personal)
        others = [new(rest)] if rest else []
        for step, rows in enumerate(rows_of(ours, number, 6 if apart else 3)):
            net.zero_grad()
            F.cross_entropy(net(task.x[rows]), task.y[rows]).backward()
            moving = [optimizer, *others]
            for each in moving if not apart else moving[:1] if step < 3 else moving[1:]:
                each.step()
        assert ("momentum" in ours.engine.memory[0]) is keep
    close(ours.personal(0), trees.model_of(net))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("method", "own", "settings"),
    [
        ("local", is_any, {}),
        ("fedper", is_head, {}),
        ("lg_fedavg", is_body, {}),
        ("fedrep", is_head, {"head_steps": 3}),
        ("fedbn", is_norm, {}),
        ("partialfed", is_head, {"strategy": "fixed"}),
        ("partialfed", is_any, {"strategy": "fixed", "head_layers": 2}),  # as Local
        ("ditto", is_any, {"proximity": 0.0}),
        ("apfl", is_any, {"mixing": 1.0, "adaptive": False}),
        ("fedproto", is_any, {"prototype_weight": 0.0, "evaluated": "classifier"}),
        ("fedas", is_head, {"align_epochs": 0}),
        ("heurpfedla", is_any, {"retain": 2, "local_momentum": 0.9}),
        # Of one client all weights are 1, and of equal ones the first layer is retained.
        ("heurpfedla", is_body, {"retain": 1, "local_momentum": 0.9}),
        ("local", is_any, {"local_optimizer": "adamw"}),
        ("fedper", is_head, {"local_optimizer": "adamw"}),
        ("apfl", is_any, {"mixing": 1.0, "adaptive": False, "local_optimizer": "adamw"}),
    ],
)
def test_its_own_parameters_have_one_optimiser_or_one_a_round(
    method: str, own: Any, settings: Any, keep: bool
) -> None:
    net = Normed if method == "fedbn" else TwoLayers
    ours = federation(method, net, keep_momentum=keep, **settings)
    check(ours, own, keep=keep, apart=method == "fedrep")


@pytest.mark.parametrize("keep", [False, True])
def test_of_mapper_it_is_the_local_model(keep: bool) -> None:
    ours = federation("mapper", keep_momentum=keep, mixing=(0.3,))
    task = ours.task
    common, own = (copy.deepcopy(task.models["base"]) for _ in range(2))
    optimizer = new_sgd(own.parameters())
    for number in range(3):
        ours.round([0], number)
        optimizer = optimizer if keep else new_sgd(own.parameters())
        other = new_sgd(common.parameters())
        for rows in rows_of(ours, number, 3):
            common.zero_grad()
            own.zero_grad()
            mixed = 0.3 * own(task.x[rows]) + 0.7 * common(task.x[rows])
            F.cross_entropy(mixed, task.y[rows]).backward()
            optimizer.step()
            other.step()
    close(ours.engine.memory[0]["local"], trees.model_of(own))
    close(ours.server.model["base"], trees.model_of(common))


@pytest.mark.parametrize("keep", [False, True])
def test_of_fed_rod_it_is_the_personal_head(keep: bool) -> None:
    ours = federation("fed_rod", keep_momentum=keep, balance=0.0)
    task = ours.task
    net = copy.deepcopy(task.models["base"])
    head = nn.Linear(4, 3).double()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = new_sgd(head.parameters())
    for number in range(3):
        ours.round([0], number)
        optimizer = optimizer if keep else new_sgd(head.parameters())
        other = new_sgd(net.parameters())
        for rows in rows_of(ours, number, 3):
            net.zero_grad()
            head.zero_grad()
            features = torch.tanh(net.body(task.x[rows]))
            output, y = net.head(features), task.y[rows]
            F.cross_entropy(output, y).backward()
            F.cross_entropy(output.detach() + head(features.detach()), y).backward()
            optimizer.step()
            other.step()
    expected = trees.model_of(net)
    for name, value in head.named_parameters():
        expected[f"head.{name}"] = expected[f"head.{name}"] + value.detach()
    close(ours.personal(0), expected)


@pytest.mark.parametrize(("method", "own"), [("feddbe", {"dbe/bias"}), ("gpfl", HEAD)])
def test_of_these_it_is_just_a_part(method: str, own: set[str]) -> None:
    kept, anew = (federation(method, keep_momentum=keep) for keep in (True, False))
    for number in range(2):
        for ours in (kept, anew):
            ours.round([0], number)
        same = torch.equal(part_of(kept), part_of(anew))
        assert same is (number == 0)
    assert set(kept.engine.memory[0]["momentum"]) == own


def part_of(ours: Federation) -> Tensor:
    """What the client keeps of its model, in one."""
    kept = ours.engine.memory[0]
    return torch.cat(
        [leaf.flatten() for path, leaf in trees.leaves(kept) if "momentum" not in path]
    )


@pytest.mark.parametrize("method", ["fedper", "fml"])
def test_momentum_is_kept_where_clients_are_computed_together(method: str) -> None:
    loop, ours = both(method, task={"examples": (12, 12, 12)}, keep_momentum=True)
    for each in (loop, ours):
        for number, clients in enumerate(([0, 1], [0, 1, 2])):
            each.round(clients, number)
    assert [clients for _, clients in ours.engine.together] == [[0, 1], [0, 1]]
    close(snapshot(loop), snapshot(ours))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fed_rod", {"head": "hypernetwork"}), ("pfedla", {"local_momentum": 0.9}), ("pfedhn", {})],
)
def test_where_a_client_has_nothing_of_its_own_none_is_kept(method: str, settings: Any) -> None:
    found = []
    for keep in (False, True):
        ours = federation(method, keep_momentum=keep, **settings)
        for number in range(2):
            ours.round([0], number)
        assert "momentum" not in ours.engine.memory[0]
        found.append(snapshot(ours))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_only_a_method_whose_clients_go_on_with_their_own_takes_the_key(method: str) -> None:
    """And all of them have one default."""
    if method in KEPT:
        assert METHODS[method].Config().keep_momentum is False
        assert from_keys(method, {"method.keep_momentum": True}).settings.keep_momentum
        return
    with pytest.raises(UserError, match=r"method\.keep_momentum: must be a key of this run"):
        from_keys(method, {"method.keep_momentum": True})


def test_presets_keep_it_where_the_published_did() -> None:
    told = {
        (method, preset)
        for method in sorted(METHODS)
        for preset, keys in METHODS[method].PRESETS.items()
        if "method.keep_momentum" in keys
    }
    assert told == {
        ("local", "pfedhn"),
        ("local", "pefll"),
        ("pfedhn_pc", "paper"),
        ("pfedhn_pc", "official"),
    }

"""A server's tensors that an optimiser moves are the same ones, whatever is put into them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.federation import Client, Server
from hyperfed.runs.rollback import Snapshot
from hyperfed.system.devices import CPU
from hyperfed.trees import Tree, state
from toys import make_task


def in_a_tree(server: Server) -> list[Tensor]:
    server.weights = {"deep": {"a": torch.zeros(2)}, "b": torch.zeros(3)}
    return [leaf for _, leaf in trees.leaves(server.weights)]


def as_a_parameter(server: Server) -> list[Tensor]:
    server.vector = nn.Parameter(torch.zeros(2))
    return [server.vector]


def as_a_tensor(server: Server) -> list[Tensor]:
    server.vector = torch.zeros(2)
    return [server.vector]


KINDS = pytest.mark.parametrize("make", [in_a_tree, as_a_parameter, as_a_tensor])
Make = Callable[[Server], list[Tensor]]


def made(make: Make) -> Server:
    """A server whose optimiser moves tensors of its own, beside one that it does not move."""
    server = Server(make_task().outline(), None)
    moving = make(server)
    server.optimizer = torch.optim.Adam(moving, lr=0.1, fused=True)
    server.other = {"mean": torch.zeros(2)}
    return server


def descend(server: Server) -> None:
    for group in server.optimizer.param_groups:
        for leaf in group["params"]:
            leaf.grad = torch.ones_like(leaf)
    server.optimizer.step()
    server.other = trees.tree_map(lambda leaf: leaf + 1, server.other)


def told(server: Server) -> Tree:
    return trees.clone(server.state())


@KINDS
def test_an_optimiser_goes_on_with_what_was_loaded(make: Make) -> None:
    whole, resumed = made(make), made(make)
    descend(whole)
    resumed.load(told(whole))
    for server in (whole, resumed):
        descend(server)
    torch.testing.assert_close(told(resumed), told(whole), rtol=0, atol=0)


@KINDS
def test_an_optimiser_goes_on_after_a_round_that_was_taken_back(make: Make) -> None:
    engine = LoopEngine(make_task(), Client, None, seed=0)
    cohort = engine.cohort([0], 0, training=True)
    once, twice, before = made(make), made(make), Snapshot()
    for _ in range(2):
        descend(once)
        before.take(twice)
        descend(twice)
        before.restore(twice, engine, cohort)
        descend(twice)
    torch.testing.assert_close(told(twice), told(once), rtol=0, atol=0)


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
@KINDS
def test_an_optimiser_moves_what_is_on_another_device(make: Make, device: torch.device) -> None:
    server = made(make)
    held = server.optimizer.param_groups[0]["params"]

    def kinds() -> list[object]:
        return [(type(leaf), leaf.requires_grad, leaf.is_leaf) for leaf in held]

    before = kinds()
    server.to(device)
    assert kinds() == before
    assert {leaf.device for leaf in held} == {device}
    assert {leaf.device for _, leaf in trees.leaves(server.state())} == {device}


def test_a_parameter_without_an_optimiser_stays_one() -> None:
    server = Server(make_task().outline(), None)
    server.vector = vector = nn.Parameter(torch.zeros(2))
    vector.grad = torch.ones(2)
    server.load({"vector": torch.ones(2)})
    assert server.vector is vector
    assert (vector.tolist(), vector.grad) == ([1, 1], None)


def test_what_is_loaded_in_place_has_the_shape_that_is_there() -> None:
    """A number would fill it."""
    with pytest.raises(ValueError, match=r"must be of shape \(2,\), came \(1,\)"):
        made(as_a_tensor).load({"vector": torch.ones(1)})


@pytest.mark.parametrize(("name", "shape"), [("exp_avg", 1), ("exp_avg_sq", 3), ("step", 2)])
def test_what_an_optimiser_knows_of_a_parameter_has_its_shape(name: str, shape: int) -> None:
    """One that is fused goes on into whatever lies behind."""
    server = made(as_a_tensor)
    descend(server)
    tree = told(server)
    tree["optimizer"]["0"][name] = torch.zeros(shape)
    with pytest.raises(ValueError, match=f"{name} of parameter 0 must be of shape"):
        server.load(tree)


def test_what_first_comes_in_a_round_is_loaded_into_a_new_server() -> None:
    server = Server(make_task().outline(), None)
    server.load({"mean": torch.ones(2), "rows": {"of": torch.ones(1)}})
    assert set(state.of(vars(server))) == {"mean", "rows"}


def test_other_tensors_are_replaced() -> None:
    """They may be the task's own, such as its initial weights."""
    server = Server(make_task().outline(), None)
    server.model = server.outline.initial()
    server.load({"model": trees.tree_map(torch.ones_like, server.model)})
    assert server.model["body.bias"].tolist() == [1, 1, 1, 1]
    assert server.outline.initial()["body.bias"].tolist() != [1, 1, 1, 1]


def test_what_is_no_tree_of_tensors_is_no_state_whatever_its_names() -> None:
    given = {"names": {0: "ann", 1: "bob"}, "places": {"a": [1]}, "net": {"in": nn.Linear(1, 1)}}
    assert state.of(given) == {}

import pytest
import torch
from torch import nn

from hyperfed import trees
from hyperfed.trees import arithmetic


def tree(*values: float) -> trees.Tree:
    return {"a": torch.tensor(values), "b": {"c": torch.tensor([[values[0]]])}}


def test_delta_is_sent_minus_trained() -> None:
    delta = trees.subtract(tree(3.0, 5.0), tree(1.0, 7.0))
    torch.testing.assert_close(delta, tree(2.0, -2.0))


def test_what_was_sent_without_delta_is_what_was_trained_of_booleans_too() -> None:
    sent = {"mask": torch.tensor([True, True, False, False])}
    trained = {"mask": torch.tensor([True, False, True, False])}
    again = trees.subtract(sent, trees.subtract(sent, trained))
    assert torch.equal(again["mask"], trained["mask"])


@pytest.mark.parametrize(
    ("wrong", "where"),
    [({0: torch.ones(1)}, "it has 0"), ({"in": {3: {"a": torch.ones(1)}}}, "in/ has 3")],
)
def test_a_name_that_is_no_text_is_told(wrong: trees.Tree, where: str) -> None:
    """In a tree that is kept it would be text afterwards, and nobody would find it."""
    with pytest.raises(TypeError, match=f"must be text, but {where}, which is int; take str"):
        list(trees.leaves(wrong))


def test_stack_take_and_repeat_undo_each_other() -> None:
    first, second = tree(1.0, 2.0), tree(3.0, 4.0)
    stacked = trees.stack([first, second])
    assert stacked["b"]["c"].shape == (2, 1, 1)
    torch.testing.assert_close(trees.take(stacked, 1), second)
    torch.testing.assert_close(trees.take(trees.repeat(first, 3), 2), first)


def test_interpolation_is_exact_and_rounds_whole_numbers_back() -> None:
    start = {"w": torch.tensor([1.0, 2.0]).double(), "steps": torch.tensor([3, 10])}
    end = {"w": torch.tensor([2.0, 0.0]).double(), "steps": torch.tensor([12, 0])}
    expected = {"w": torch.tensor([1.1, 1.8], dtype=torch.float64), "steps": torch.tensor([4, 9])}
    for share in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        found = trees.interpolate(start, end, share)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_gradients_are_of_what_is_trained() -> None:
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    gradient = torch.tensor([[3.0, -1.0]])
    trees.set_gradients(module, {"weight": gradient})
    torch.testing.assert_close(module.weight.grad, gradient)
    assert module.bias.grad is None


def test_partition_joins_again_and_keeps_order() -> None:
    model = {"w": torch.ones(1), "head": torch.zeros(1), "b": torch.ones(2)}
    head, body = trees.partition(model, ["head"])
    assert list(head) == ["head"]
    assert list(body) == ["w", "b"]
    assert (head | body).keys() == model.keys()


def test_weighted_mean_by_hand() -> None:
    stacked = {"w": torch.tensor([[1.0, 2.0], [4.0, 6.0], [99.0, 99.0]], dtype=torch.float64)}
    weight = torch.tensor([1.0, 3.0, 0.0])
    mean = trees.weighted_mean(stacked, weight)["w"]
    torch.testing.assert_close(mean, torch.tensor([13 / 4, 20 / 4], dtype=torch.float64))


def test_weighted_mean_rounds_integer_buffers_and_keeps_their_dtype() -> None:
    steps = {"num_batches_tracked": torch.tensor([10, 13])}
    mean = trees.weighted_mean(steps, torch.tensor([1.0, 2.0]))["num_batches_tracked"]
    assert mean.dtype == torch.int64
    assert mean == 12


def test_pull_back_is_the_gradient_of_the_weighted_inner_product() -> None:
    net = nn.Linear(2, 3).double()
    descriptor = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    delta = torch.randn(4, 3, dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0])
    trees.pull_back({"w": net(descriptor)}, {"w": delta, "buffer": delta}, weight)
    # d/dW sum_i weight_i <W v_i + b, delta_i> and d/dv_i = weight_i W' delta_i, by hand.
    scaled = delta * weight.double()[:, None]
    torch.testing.assert_close(net.weight.grad, scaled.T @ descriptor.detach())
    torch.testing.assert_close(net.bias.grad, scaled.sum(0))
    torch.testing.assert_close(descriptor.grad, scaled @ net.weight.detach())


def test_pull_back_onto_some_tensors_leaves_the_rest_without_gradient() -> None:
    net, descriptor = nn.Linear(2, 3), torch.ones(1, 2, requires_grad=True)
    trees.pull_back({"w": net(descriptor)}, {"w": torch.ones(1, 3)}, torch.ones(1), [descriptor])
    assert net.weight.grad is None
    assert descriptor.grad is not None


@pytest.mark.parametrize("own", ["cpu", "cuda"])
def test_what_is_not_finite_is_found(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the way of accelerators, which tensors of the CPU take where that is called one."""
    monkeypatch.setattr(arithmetic, "CPU", torch.device(own))
    good, bad = tree(1.0, 2.0), tree(1.0, torch.nan)
    early, whole = tree(torch.inf, 2.0), {"n": torch.zeros(3, dtype=torch.uint8)}
    assert trees.finite([good, early, whole, bad, good]) == [True, False, True, False, True]
    assert trees.finite([good, bad, early, good]) == [True, False, False, True]  # all alike
    opposite = {"w": torch.tensor([torch.inf, -torch.inf])}
    large = {"w": torch.full((4,), torch.finfo(torch.float32).max)}  # whose sum is not finite
    assert trees.finite([opposite, large, {}]) == [False, True, True]
    assert trees.finite([]) == trees.finite([whole])[:0] == []


def test_structure_and_bytes() -> None:
    good = tree(1.0, 2.0)
    assert trees.structure(good) == (("a", (2,), torch.float32), ("b/c", (1, 1), torch.float32))
    assert trees.count_bytes(good) == 3 * 4
    assert trees.count_bytes({"n": torch.zeros(3, dtype=torch.uint8)}) == 3


def test_trees_whose_names_differ_at_a_level_have_structures_of_their_own() -> None:
    one, whole = torch.ones(1), torch.tensor([1])
    nested = {"a": {"b": one}}
    others = (
        {"a/b": one},
        {"a%2Fb": one},
        {"a": {"b": one, "c": {}}},
        {"a": {"b": one}, "c": {}},
        {"a": {"b": {}}},
        {"a": {"b": {"": one}}},
        {"a/b": one, "a": {"b": whole}},
    )
    assert len({trees.structure(each) for each in (nested, *others)}) == 1 + len(others)


def test_a_model_is_parameters_and_buffers_and_no_alias() -> None:
    module = nn.BatchNorm1d(2)
    model = trees.model_of(module)
    assert list(model) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    model["weight"].zero_()
    assert module.weight.detach().eq(1).all()
    trees.fill(module, model)
    assert module.weight.detach().eq(0).all()


def test_fill_gradients_gives_zeros_only_where_there_is_nothing() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    a.grad = torch.ones(2)
    trees.fill_gradients([a, b])
    assert a.grad.eq(1).all()
    assert b.grad is not None
    assert b.grad.eq(0).all()


@pytest.mark.parametrize("function", [trees.detach, trees.clone])
def test_no_autograd_graph_survives(function) -> None:
    leaf = torch.ones(1, requires_grad=True) * 2
    assert not function({"a": leaf})["a"].requires_grad

"""What of a network is its model, and what is frozen."""

import pytest
import torch
from torch import nn

from hyperfed import functional, trees
from hyperfed.errors import UserError
from hyperfed.nets.anatomy import batch_norm_names, head_names, layers_of
from hyperfed.nets.deepsets import DeepSet
from hyperfed.nets.descriptors import LabelledTarget
from hyperfed.nets.shapes import shapes_of, spread_of
from toys import CLASSES, FEATURES, Stemmed, TwoLayers, make_task


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def test_a_model_is_all_that_is_not_frozen() -> None:
    net = nn.Sequential(nn.Linear(2, 3), frozen(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    net[0].bias.requires_grad_(False)
    moving = ["0.weight", "2.weight", "2.bias", "2.running_mean", "2.running_var"]
    assert list(trees.model_of(net)) == [*moving, "2.num_batches_tracked"]
    assert list(trees.frozen_of(net)) == ["0.bias", "1.weight", "1.bias"]
    assert list(trees.parameters_of(net)) == moving[:3]


@pytest.mark.parametrize("affine", [True, False])
def test_buffers_of_a_part_that_is_frozen_whole_are_frozen(affine: bool) -> None:
    """Those of a batch-norm without scale go with what it is in."""
    stem = frozen(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=affine)))
    net = nn.Sequential(stem, nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine))
    assert all(name.startswith("2.") for name in trees.buffers_of(net))
    assert len(trees.buffers_of(net)) == 3
    stem[0].bias.requires_grad_(True)
    assert len(trees.buffers_of(net)) == (3 if affine else 6)


def test_a_servers_precision_is_that_of_what_is_trained() -> None:
    net = Stemmed().double()
    net.stem = frozen(nn.Linear(2, 3)).half()
    outline = make_task(models={"base": nn.Sequential(net.stem, net.head)}).outline()
    assert outline.dtype == torch.float64


def test_filling_leaves_what_is_frozen() -> None:
    net, other = Stemmed(), Stemmed()
    before = trees.clone(trees.frozen_of(net))
    trees.fill(net, trees.model_of(other))
    torch.testing.assert_close(trees.model_of(net), trees.model_of(other), rtol=0, atol=0)
    torch.testing.assert_close(trees.frozen_of(net), before, rtol=0, atol=0)


def test_names_and_shapes_are_those_of_what_is_trained() -> None:
    net = Stemmed()
    own = ["body.weight", "body.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert list(shapes_of(net)) == own
    assert list(spread_of(net)) == own
    assert head_names(net) == ("head.weight", "head.bias")
    assert {name.partition(".")[0] for name in batch_norm_names(net)} == {"norm"}
    assert list(layers_of(net)) == ["body", "norm", "head"]
    with pytest.raises(UserError, match="must have 0 to 3 layers"):
        head_names(net, 4)


@pytest.mark.parametrize("mode", [True, False])
def test_frozen_batch_norm_computes_as_in_evaluation(mode: bool) -> None:
    """Whatever the mode, and whatever mode the network was in before."""
    net, x = Stemmed(), torch.randn(8, FEATURES)
    expected = net.get_submodule("stem").eval()(x)
    net.train()
    seen = []
    net.get_submodule("body").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    before = trees.clone(trees.frozen_of(net))
    for train in (mode, not mode, mode):
        functional.apply(net, trees.model_of(net), x, train=train)
        torch.testing.assert_close(seen[-1], expected, rtol=0, atol=0)
        assert net.get_submodule("norm").training == train
    torch.testing.assert_close(trees.frozen_of(net), before, rtol=0, atol=0)


def test_dropout_in_a_frozen_part_drops_out_in_training() -> None:
    """As it does in PyTorch: what is held still is batch-norm alone."""
    frozen = nn.Sequential(nn.Linear(FEATURES, 99), nn.Dropout(0.5)).requires_grad_(False)
    net, x = nn.Sequential(frozen, nn.Linear(99, CLASSES)), torch.randn(8, FEATURES)
    outputs = [
        functional.apply(net, trees.model_of(net), x, train=train)
        for train in (True, True, False, False)
    ]
    assert not outputs[0].equal(outputs[1])
    assert outputs[2].equal(outputs[3])


def test_measuring_statistics_leaves_frozen_batch_norm() -> None:
    net, x = Stemmed(), torch.randn(3, 8, FEATURES)
    before, momentum = trees.clone(trees.frozen_of(net)), net.norm.momentum
    found = functional.batch_statistics(net, trees.model_of(net), iter(x))
    assert set(found) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    features = net.body(net.get_submodule("stem").eval()(x.flatten(0, 1))).unflatten(0, (3, 8))
    torch.testing.assert_close(found["norm.running_mean"], features.mean(dim=(0, 1)))
    torch.testing.assert_close(found["norm.running_var"], features.var(dim=1).mean(dim=0))
    torch.testing.assert_close(trees.frozen_of(net), before, rtol=0, atol=0)
    assert net.norm.momentum == momentum


def test_networks_made_of_a_target_keep_its_frozen_part() -> None:
    net = Stemmed()
    stem = {f"stem.{name}": value for name, value in net.get_submodule("stem").state_dict().items()}
    descriptor, encoder = LabelledTarget(net, CLASSES, 2), DeepSet(net, 2)
    for made, prefix in ((descriptor, "net."), (encoder, "features.0.")):
        kept = trees.frozen_of(made)
        expected = {prefix + name: value for name, value in stem.items()}
        torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@pytest.mark.parametrize("nothing", [lambda: frozen(TwoLayers()), nn.Flatten])
def test_a_target_with_nothing_to_train_is_refused(nothing: type[nn.Module]) -> None:
    task = make_task(models={"small": TwoLayers(), "large": nothing()}, sizes=("small",) * 4)
    with pytest.raises(UserError, match=r"must have parameters to train.*'large'"):
        task.outline()

"""Which parameters are the head; layers and batch-norm are tested where methods use them."""

import copy

import pytest
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.nets import MLP, CharLSTM, LeNet, LeNetBN, OmniglotNet, head_names, layers_of
from hyperfed.nets.anatomy import check_head, check_widened, head_entries, last_linear


class TestHeadNames:
    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            (LeNet((1, 28, 28), 3), ("fc3.weight", "fc3.bias")),
            (OmniglotNet((1, 28, 28), 3), ("fc2.weight", "fc2.bias")),
            (MLP((4,), 3, (5, 6)), ("layers.2.weight", "layers.2.bias")),
            (LeNetBN((1, 28, 28), 3), ("fc3.weight", "fc3.bias")),
            (CharLSTM(5, hidden=3), ("fc.weight", "fc.bias")),
            (nn.Linear(2, 3, bias=False), ("weight",)),
            (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()), ("1.weight", "1.bias")),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_last_module_with_parameters(self, model, expected):
        assert head_names(model) == expected

    @pytest.mark.parametrize(
        ("layers", "modules"),
        [(0, ()), (2, ("fc1", "fc2")), (6, ("conv1", "conv2", "conv3", "conv4", "fc1", "fc2"))],
    )
    def test_several_layers(self, layers, modules):
        expected = tuple(f"{name}.{kind}" for name in modules for kind in ("weight", "bias"))
        assert head_names(OmniglotNet((1, 28, 28), 3), layers) == expected

    def test_buffers_from_its_first_layer_on_are_of_the_head(self):
        plain = nn.BatchNorm1d(3, affine=False)
        model = nn.Sequential(nn.Linear(2, 3), plain, nn.Linear(3, 3), copy.deepcopy(plain))
        names = ("2.weight", "2.bias", "3.running_mean", "3.running_var", "3.num_batches_tracked")
        assert head_entries(model) == names
        assert head_entries(model, 0) == ()
        assert set(head_entries(model, 2)) == set(trees.model_of(model))

    @pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
    def test_what_a_weight_is_made_from_is_of_its_layer(self, norm):
        model = nn.Sequential(norm(nn.Linear(2, 3)), nn.ReLU(), norm(nn.Linear(3, 4)))
        parameters = trees.parameters_of(model)
        assert set(head_names(model)) == {name for name in parameters if name.startswith("2.")}
        assert "2.bias" in head_names(model)
        assert set(head_names(model, 2)) == set(parameters)
        layers = {name: set(entries) for name, entries in layers_of(model).items()}
        entries = trees.model_of(model)
        assert layers == {k: {name for name in entries if name.startswith(k)} for k in ("0", "2")}

    @pytest.mark.parametrize("layers", [-1, 3])
    def test_layers_the_model_does_not_have(self, layers):
        with pytest.raises(UserError, match=rf"a MLP must have 0 to 2 layers .* got {layers}"):
            head_names(MLP((4,), 3), layers)

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_head_has_no_weight_of_the_body(self, bias):
        """What is left of a layer without them, its bias or the layer before, is not the head."""
        first, last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=bias)
        last.weight = first.weight
        model = nn.Sequential(first, nn.Linear(3, 3), nn.LayerNorm(3), last)
        wanted = r"a head of 1 must have weights of its own, but 3\.weight is 0\.weight, too"
        with pytest.raises(UserError, match=wanted):
            head_names(model)
        assert head_names(model, 0) == ()
        check_head(model)  # of features it does not matter
        last.weight.requires_grad_(False)  # nobody moves it
        assert head_names(model)[-1] == ("3.bias" if bias else "2.bias")

    def test_layers_of_a_head_may_have_a_weight_in_common(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        model[3].weight = model[1].weight
        assert head_names(model, 2) == ("1.weight", "1.bias", "3.bias")

    def test_needs_parameters(self):
        with pytest.raises(UserError, match=r"a Sequential must have 0 to 0 layers .* got 1"):
            head_names(nn.Sequential(nn.ReLU(), nn.Flatten()))


def biased_by(last: nn.Linear) -> nn.Linear:
    """The layer with a bias that is made from another; its weight is its own."""
    return register_parametrization(last, "bias", nn.Softplus())


def half_frozen(last: nn.Linear) -> nn.Linear:
    """The layer with a weight that does not train; its bias does."""
    last.weight.requires_grad_(False)
    return last


class TestLastLinear:
    @pytest.mark.parametrize("bias", [False, True])
    def test_is_told_with_its_place(self, bias):
        last = nn.Linear(3, 4, bias=bias)
        within = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Sequential(last, nn.ReLU())})
        assert last_linear(within, "X") == ("b.0", last)
        assert last_linear(last, "X") == ("", last)

    @pytest.mark.parametrize("made", [biased_by, half_frozen, spectral_norm, weight_norm])
    def test_its_parameters_are_trained_as_they_are(self, made):
        model = nn.Sequential(nn.Linear(2, 3), made(nn.Linear(3, 4)))
        with pytest.raises(UserError, match=r"of X must end in an nn.Linear .* got \w*Linear"):
            last_linear(model, "X")

    def test_another_layer_is_none(self):
        with pytest.raises(UserError, match=r"of X must end in an nn.Linear .* got BatchNorm1d"):
            last_linear(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "X")


@pytest.mark.parametrize("width", [4, 5])
def test_only_the_next_frozen_layer_is_taken_for_one_that_takes_what_a_layer_gives(
    width: int,
) -> None:
    """A frozen body that is defined behind the head may have a layer of any width further on."""
    net = nn.Module()
    net.head = nn.Linear(6, 5)
    net.body = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 6)).requires_grad_(False)
    if width == 4:
        check_widened(net, "head", "a copy")
        return
    with pytest.raises(UserError, match=r"a copy gives head .* than 5, which body\.0 behind it"):
        check_widened(net, "head", "a copy")

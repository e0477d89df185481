"""Deep sets (Zaheer et al., 2017): networks that read a set of samples as one descriptor."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.nets.anatomy import check_widened, mixing_norms, trained_layers
from hyperfed.nets.pretrained import compute_in_own_precision


class DeepSet(nn.Module):
    """IT-PFL-HN's encoder g (section 6.3, appendix C): a batch of inputs to one descriptor.

    The target's trunk, a linear layer of ``units`` outputs, pooling over the batch (the mean of the
    first half, the maximum of the other), then linear layers of the target's widths up to l. On
    LeNet: conv1, conv2, Linear(200), pooling, Linear(120), Linear(84), Linear(l), with ReLU after
    each but the last.

    Bounded (section 7): every sample goes through all layers by itself, onto the unit sphere, and
    the descriptor is the plain mean, both in float64. In whatever precision the layers compute,
    replacing one of n samples moves it by at most 2 / n. A maximum could move by as much as its
    whole range, whatever n; and so could a mean, by layers that mix the samples of a batch. Batch-
    norm does in training, and in evaluation where it keeps no statistics, which is refused.

    Its linear layers and convolutions start as He et al. (2015) start networks with ReLU. From
    PyTorch's own start, in which each layer makes differences smaller, all clients get nearly one
    descriptor, and keep it in training. Its layers drop nothing, in training either: where it
    learns end to end, a descriptor is told in one pass and differentiated in another.

    Attributes:
        features: the target with ``units`` outputs in its first linear layer, and without the
            layers defined after it: (B, ...) -> (B, ``units``). What is frozen stays, and what the
            target's ``forward`` does beside its layers: activations, and a softmax at its end.
        layers: (``units``) -> (l).

    Args:
        target: the target network. Its layers must be used in the order of their definition. It is
            copied; of what it keeps, the weights of convolutions that are trained are drawn anew.
        descriptor_size: l.
        units: outputs of the layer before pooling; an even number.
        bounded: whether samples are mapped onto the unit sphere and averaged.

    Raises:
        UserError: the target has no linear layer, a frozen one takes what comes out of it, a size
            is out of range, or it is bounded and batch-norm before that layer keeps no statistics.
    """

    def __init__(
        self, target: nn.Module, descriptor_size: int, units: int = 200, bounded: bool = False
    ) -> None:
        super().__init__()
        if descriptor_size < 1 or units < 2 or units % 2:
            raise UserError(
                "a deep set must have at least 1 output and an even number of units, "
                f"got {descriptor_size} and {units}; choose others"
            )
        dtype = next(iter(trees.parameters_of(target).values())).dtype
        widths = [
            part.out_features for _, part in trained_layers(target) if isinstance(part, nn.Linear)
        ]
        self.bounded = bounded
        self.features = _features(target, units, dtype)
        if bounded and (names := mixing_norms(self.features)):
            raise UserError(
                "a bounded deep set must encode each sample by itself, but the target's batch-norm "
                f"{names[0].removeprefix('0.')} keeps no statistics and takes those of all; give "
                "it track_running_stats=True, or leave out what is private (private, epsilon)"
            )
        self.layers = _layers([units, *widths[:-1], descriptor_size]).to(dtype)
        for _, part in trained_layers(self):
            weight = trees.parameters_of(part).get("weight")
            if weight is not None and isinstance(part, nn.Linear | _ConvNd):
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Returns the descriptor (l,) of a batch (B, ...) of inputs as the target takes them.

        It is float64 where it is bounded.
        """
        features: Tensor = self.features(x)  # (B, units)
        if self.bounded:
            each = F.normalize(self.layers(features).double(), dim=-1)
            # Whatever the weights are: a sample whose numbers overflow is no exception.
            return each.nan_to_num(0.0).mean(dim=0)
        first, other = features.chunk(2, dim=-1)
        pooled = torch.cat([first.mean(dim=0), other.amax(dim=0)])  # (units,)
        descriptor: Tensor = self.layers(pooled)
        return descriptor


def _features(target: nn.Module, units: int, dtype: torch.dtype) -> nn.Module:
    """Returns a copy of ``target`` that ends with its first linear layer, of ``units`` outputs."""
    network = nn.Sequential(trees.copied(target))  # a parent, also for a target that is one layer
    trained = dict(trained_layers(network))
    linear = [(name, part) for name, part in trained.items() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError(
            f"a deep set needs a target that trains a linear layer, got a {type(target).__name__} "
            "without one; choose another target, or name its head in the adapter's modules_to_save"
        )
    first, layer = linear[0]
    check_widened(target, first.partition(".")[2], "a deep set")
    # From the end: what is in a part is found only while the part itself is there.
    for name in reversed(dict(network.named_modules())):
        if name == first:
            break
        if name in trained:
            network.set_submodule(name, nn.Identity())
    network.set_submodule(first, nn.Linear(layer.in_features, units).to(dtype))
    _drop_nothing(network)
    compute_in_own_precision(network)
    return network


def _drop_nothing(network: nn.Module) -> None:
    """Switches off what layers drop at random."""
    for part in network.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0


def _layers(widths: list[int]) -> nn.Sequential:
    """Returns linear layers from each width to the next, with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])

"""What hypernetworks are made of: their layers, how these start, and spectral normalisation."""

import copy
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm as _normalise_spectrum
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.system.devices import CPU


def trunk_of(inputs: int, hidden: int, hidden_layers: int) -> nn.Sequential:
    """Builds the hidden layers every hypernetwork starts with; linear at both ends."""
    check_at_least(1, hidden=hidden)
    check_at_least(0, hidden_layers=hidden_layers)
    layers: list[nn.Module] = [nn.Linear(inputs, hidden)]
    for _ in range(hidden_layers):
        layers += [nn.ReLU(), nn.Linear(hidden, hidden)]
    return nn.Sequential(*layers)


def narrowed(trunk: nn.Sequential, hidden: int, rank: int | None) -> nn.Sequential:
    """Appends B, the second factor of all output layers of a rank; nothing for None.

    With variance 1 / r it keeps lengths, so that what heads are told is as large as without it, and
    they learn as fast by SGD. PyTorch's own start, 1 / (3 H), would leave that to B alone, whose
    steps the whole target adds up in.
    """
    if rank is None:
        return trunk
    check_at_least(1, rank=rank)
    layer = nn.Linear(hidden, rank, bias=False)
    nn.init.uniform_(layer.weight, -math.sqrt(3 / rank), math.sqrt(3 / rank))
    return trunk.append(layer)


def output_layer(hidden: int, outputs: int, rank: int | None) -> nn.Linear:
    """Builds an output layer: (H) -> (outputs), or (r) -> (outputs) behind a narrowed trunk.

    Both start as a full layer does, U(-1/sqrt(H), 1/sqrt(H)): with B's variance of 1 / r, so does
    their product, 1 / (3 H).
    """
    layer = nn.Linear(hidden if rank is None else rank, outputs)
    if rank is not None:
        for parameter in (layer.weight, layer.bias):
            nn.init.uniform_(parameter, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
    return layer


class UnitLength(nn.Module):
    """Divides vectors (..., H) by their lengths; zero stays zero."""

    def forward(self, features: Tensor) -> Tensor:
        """Returns (..., H)."""
        return F.normalize(features, dim=-1)


def draw_weights(
    net: nn.Module, generator: torch.Generator, start: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Draws new weights for a network's linear layers, convolutions and embeddings.

    They are distributed as those of a new module, which takes them from the global generator: all
    threads share that one. Clients that start from weights of their own use this.

    Args:
        net: the network; it is not changed.
        generator: a CPU generator.
        start: the entries to return, some or all of the network's; its own where not given. What
            belongs to another layer stays as it is here. Of a weight that is made from others
            (``torch.nn.utils.parametrizations``) they are those, such that it is as drawn.

    Returns:
        ``{parameter name: tensor}``, for :func:`hyperfed.functional.apply`.
    """
    device = next(net.parameters()).device
    weights = trees.to(trees.model_of(net) if start is None else trees.clone(dict(start)), CPU)
    for prefix, part in net.named_modules():
        made = is_parametrized(part)
        layer = copy.deepcopy(part).to(CPU) if made else part  # to read its weight may change it
        for name, _ in layer.named_parameters(prefix, recurse=False):
            if name in weights:
                _draw(layer, weights[name], generator)
        makers = f"{prefix}.parametrizations.".removeprefix(".")
        if made and any(name.startswith(makers) for name in weights):
            drawn = trees.model_of(_makers(layer, generator))
            anew = {makers + name: value for name, value in drawn.items()}
            weights |= {name: value for name, value in anew.items() if name in weights}
    return trees.to(weights, device)


def _draw(layer: nn.Module, value: Tensor, generator: torch.Generator) -> None:
    """Draws a parameter of a layer in place; that of a layer of another kind stays."""
    if isinstance(layer, nn.Embedding):
        value.normal_(generator=generator)
        if layer.padding_idx is not None:  # no gradient would move it from what is drawn
            value[layer.padding_idx].zero_()
    elif isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
        bound = 1 / math.sqrt(layer.weight[0].numel())  # of the weight's fan-in
        value.uniform_(-bound, bound, generator=generator)


def _makers(layer: nn.Module, generator: torch.Generator) -> nn.ModuleDict:
    """Draws the weights of a layer that are made from others; returns what makes them, anew.

    Of a new layer, too, the weight is drawn first, and what makes it (``weight_norm`` and the like)
    found from that.
    """
    makers = nn.ModuleDict()
    for entry, parts in layer.get_submodule("parametrizations").named_children():
        value = getattr(layer, entry).detach().clone()
        _draw(layer, value, generator)
        makers[entry] = ParametrizationList([*parts.children()], nn.Parameter(value))
    return makers


def expected_spread(network: nn.Sequential) -> float:
    """Returns the root mean square of a new network's outputs for N(0, 1) inputs, over its draws.

    Exact for linear layers with PyTorch's uniform draws, of variance 1 / (3 fan-in), and ReLU
    between them: what a layer returns is distributed symmetrically, so ReLU halves its square.
    """
    square = 1.0
    for layer in network:
        if isinstance(layer, nn.Linear):
            square = square / 3 + 1 / (3 * layer.in_features)
        else:
            square /= 2
    return math.sqrt(square)


def normalise_linear_layers(module: nn.Module) -> None:
    """Applies spectral normalisation to every linear layer, in place.

    In evaluation mode, where a forward pass changes nothing: a server that serves stays as it is.
    """
    for layer in list(module.modules()):
        if isinstance(layer, nn.Linear):
            _normalise_spectrum(layer)
    module.eval()


def update_norms(module: nn.Module) -> None:
    """Makes one power iteration in each layer that is spectrally normalised, if any is.

    It belongs after every step of the optimiser, and nowhere else: PyTorch's own, in each forward
    pass in training mode, would also move a network that makes models and does not train.
    """
    with torch.no_grad():
        for layer in module.modules():
            if is_parametrized(layer):
                _ = layer.train().weight  # reading the weight is what iterates
                layer.eval()


def check_descriptor(descriptor: Tensor, length: int) -> None:
    """Raises ``UserError`` unless the descriptors are (C, length)."""
    if descriptor.ndim != 2 or descriptor.shape[1] != length:
        raise UserError(
            f"descriptors must have shape (clients, {length}), got {tuple(descriptor.shape)}; "
            "stack one row per client, or set descriptor_size to their length"
        )


def check_at_least(least: int, **numbers: int) -> None:
    """Raises ``UserError`` for a number below ``least``, naming the argument."""
    for name, number in numbers.items():
        if number < least:
            raise UserError(
                f"{name} must be at least {least}, got {number}; choose a larger number"
            )

"""Descriptor networks: from a labelled example to its embedding; the mean describes a client.

Both are PeFLL's (Scott et al., ICLR 2024, section 5): a copy of the network that clients run, which
sees the label as extra inputs, and a linear map of the label alone.
"""

import copy

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError


class LabelledTarget(nn.Module):
    """A copy of a target that sees labels too (PeFLL, table 3): (B, ...), (B,) to (B, l).

    A first layer that is a convolution takes the one-hot label as extra channels, each constant
    over the image; a linear one takes it as extra features behind what it takes. The last linear
    layer has l outputs and no activation after it. Layers count in the order of their definition;
    frozen ones do not, they stay as they are. Batch normalisation is left out: an embedding must
    depend on its own example only.

    Args:
        target: the network to copy, with its initial weights; these two layers get new ones.
        classes: number of labels.
        descriptor_size: l, the length of an embedding.

    Raises:
        UserError: there are no classes, or the target does not begin with a convolution or a
            linear layer.
    """

    def __init__(self, target: nn.Module, classes: int, descriptor_size: int) -> None:
        super().__init__()
        _check_classes(classes)
        self.net = copy.deepcopy(target)
        self.classes = classes
        frozen = set(trees.frozen_parts(self))
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.modules.batchnorm._NormBase) and module not in frozen:
                self.set_submodule(name, nn.Identity())
        layers = self._layers()
        first_name, first = layers[0] if layers else ("", self.net)
        if not isinstance(first, nn.Conv2d | nn.Linear):
            raise UserError(
                "a descriptor network that copies the target needs one that begins with a 2-D "
                f"convolution or a linear layer, got {type(target).__name__}, which begins with "
                f"{type(first).__name__}; describe clients by their labels alone (descriptor_net = "
                '"linear"), or choose another target'
            )
        self._first = first_name
        self.set_submodule(first_name, _with_labels(first, classes))
        last_name, last = [(n, m) for n, m in self._layers() if isinstance(m, nn.Linear)][-1]
        kind = _LabelledLinear if isinstance(last, _LabelledLinear) else nn.Linear
        self.set_submodule(last_name, kind(last.in_features, descriptor_size))

    def _layers(self) -> list[tuple[str, nn.Module]]:
        """Returns (name, module) of the modules that have parameters to train."""
        return [(name, part) for name, part in self.named_modules() if trees.is_trained(part)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Embeds examples x (B, C, H, W) or (B, ...) with labels y (B,)."""
        first = self.get_submodule(self._first)
        assert isinstance(first, _LabelledConv2d | _LabelledLinear)
        first.one_hot = torch.eye(self.classes, dtype=x.dtype, device=x.device)[y]  # (B, classes)
        try:
            embedding: Tensor = self.net(x)
        finally:
            del first.one_hot
        return embedding


class _LabelledConv2d(nn.Conv2d):
    """Takes labels as more channels."""

    one_hot: Tensor

    def forward(self, x: Tensor) -> Tensor:
        channels = self.one_hot[:, :, None, None].expand(-1, -1, *x.shape[2:])
        return super().forward(torch.cat([x, channels], dim=1))


class _LabelledLinear(nn.Linear):
    """Takes labels as more features."""

    one_hot: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, self.one_hot], dim=1))


class LabelMap(nn.Module):
    """One linear map of the one-hot label (PeFLL's choice for CIFAR-100): (B, ...), (B,) to (B, l).

    Args:
        classes: number of labels.
        descriptor_size: l, the length of an embedding.

    Raises:
        UserError: there are no classes.
    """

    def __init__(self, classes: int, descriptor_size: int) -> None:
        super().__init__()
        _check_classes(classes)
        self.linear = nn.Linear(classes, descriptor_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Embeds labels y (B,); the examples x are not looked at."""
        return self.linear.weight.T[y] + self.linear.bias


class Standard(nn.Module):
    """Standardises descriptors by two numbers fitted once, to the first descriptor ever seen.

    So does the code of PeFLL's authors. The numbers are buffers: a checkpoint holds them.

    Args:
        fit: False for a module that never fits and changes nothing.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, *, fit: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("deviation", torch.tensor(0.0 if fit else 1.0))  # 0 before the fit

    def fitted(self, descriptors: Tensor) -> "Standard":
        """Returns itself where it is fitted, else a copy fitted to the first of (C, l)."""
        if self.deviation > 0:
            return self
        copied = copy.deepcopy(self)
        copied.mean, copied.deviation = descriptors[0].mean(), descriptors[0].std()
        return copied

    def forward(self, descriptors: Tensor) -> Tensor:
        """Subtracts the mean from every entry of (C, l) and divides by the deviation."""
        return (descriptors - self.mean) / self.deviation


def _with_labels(layer: nn.Conv2d | nn.Linear, more: int) -> nn.Conv2d | nn.Linear:
    """Returns a new layer like ``layer`` that takes a label of ``more`` classes, too."""
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return _LabelledLinear(layer.in_features + more, layer.out_features, bias=bias)
    return _LabelledConv2d(
        layer.in_channels + more,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        bias=bias,
        padding_mode=layer.padding_mode,
    )


def _check_classes(classes: int) -> None:
    """Raises ``UserError`` where there are no labels to encode."""
    if classes < 1:
        raise UserError(
            f"a descriptor encodes class labels, so the task must have classes, got {classes}; "
            "choose a classification task or another method"
        )

"""Descriptor networks: from a labelled example to its embedding; the mean describes a client.

Both are PeFLL's (Scott et al., ICLR 2024, section 5): a copy of the network that clients run, which
sees the label as extra inputs, and a linear map of the label alone.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.functional import vectors_of
from hyperfed.nets.anatomy import check_widened, trained_layers
from hyperfed.nets.pretrained import compute_in_own_precision


class LabelledTarget(nn.Module):
    """A copy of a target that sees labels too (PeFLL, table 3): (B, ...), (B,) to (B, l).

    A first layer that is a convolution takes the label as extra channels, each constant over the
    example; a linear one takes it as extra features behind what it takes; to the embedding of each
    token one of the label is added, which is what a linear layer does. A target that begins with
    anything else (a recurrent layer, attention) sees the label at its last layer, which becomes two
    with a ReLU between them: the first, as wide as what it takes, takes the label beside it. The
    last linear layer has l outputs and, but of a target that says something of every token, nothing
    after it, whatever the target computes there itself.

    Of classes the label is one-hot, of several side by side each; for regression it is the target's
    values as they are. Layers count in the order of their definition; frozen ones do not, nor what
    an adapter puts beside them: they stay as they are. So a target on adapters sees the label at
    its last layer. Batch normalisation is left out: an embedding must depend on its own example
    only.

    Args:
        target: the network to copy, with its initial weights; these two layers get new ones.
        classes: number of labels; 0 for regression.
        descriptor_size: l, the length of an embedding.
        target_size: numbers that a target of regression has, or labels an example has side by side.

    Raises:
        UserError: the target has no linear layer to end with, or a frozen one takes what comes out
            of its last.
    """

    def __init__(
        self, target: nn.Module, classes: int, descriptor_size: int, target_size: int = 1
    ) -> None:
        super().__init__()
        self.net = trees.copied(target)
        self.classes, self.target_size = classes, target_size
        frozen = set(trees.frozen_parts(self))
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.modules.batchnorm._NormBase) and module not in frozen:
                self.set_submodule(name, nn.Identity())
        more = (classes or 1) * target_size
        layers, adapted = trained_layers(self), trees.adapter_parts(self)
        first = _with_labels(layers[0][1], more) if layers and not adapted else None
        if first is not None:
            self.set_submodule(layers[0][0], first)
        linear = [
            (name, part) for name, part in trained_layers(self) if isinstance(part, nn.Linear)
        ]
        if not linear:
            raise UserError(
                "a descriptor network that copies the target needs one that ends with a linear "
                f"layer, got {type(target).__name__}, which trains none; describe clients by their "
                'labels alone (descriptor_net = "linear"), name its head in an adapter\'s '
                "modules_to_save, or choose another target"
            )
        last_name, last = linear[-1]
        check_widened(target, last_name.partition(".")[2], "a descriptor network")
        last_now: nn.Module
        if first is None:
            last_now = _LabelledHead(last.in_features, more, descriptor_size)
        elif isinstance(last, _LabelledLinear):
            last_now = _LabelledLinear(last.in_features, descriptor_size)
        else:
            last_now = nn.Linear(last.in_features, descriptor_size)
        self.set_submodule(last_name, last_now)
        self._last = last_name
        compute_in_own_precision(self)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Embeds examples x (B, ...) with labels or targets y (B,), or (B, K).

        Of a target that says something of every token, (B, T, ...), it is the mean over tokens.
        """
        (sees,) = (part for part in self.modules() if isinstance(part, _SeesLabels))
        dtype = x.dtype if x.is_floating_point() else next(sees.parameters()).dtype
        sees.label = encoded(y, self.classes, dtype, self.target_size)
        try:
            embedding = vectors_of(self.net, self.get_submodule(self._last), x)
        finally:
            del sees.label
        return embedding.flatten(1, -2).mean(dim=1) if embedding.ndim > 2 else embedding


def encoded(y: Tensor, classes: int, dtype: torch.dtype, target_size: int = 1) -> Tensor:
    """Returns labels (B,) as (B, classes) one-hot rows; targets of regression as (B, K) numbers.

    A class below 0 is a label that is not told: zeros. Of K labels side by side, (B, K), there is
    such a row for each, (B, K * classes), and of labels of every token, (B, T), their shares in
    each example.
    """
    if not classes:
        return y.reshape(len(y), -1).to(dtype)
    rows = torch.eye(classes + 1, dtype=dtype, device=y.device)[y.where(y >= 0, classes)]
    rows = rows[..., :classes]
    if y.ndim == 1 or target_size > 1:
        return rows.flatten(1)
    counts = rows.flatten(1, -2).sum(dim=1)
    return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)


class _SeesLabels:
    """A layer that takes the labels of the batch, too.

    Attributes:
        label: (B, classes) or (B, K), there while the network runs.
    """

    label: Tensor

    def beside(self, x: Tensor, *, dim: int) -> Tensor:
        """Returns x (B, ...) with the label behind it along ``dim``, the same at every place."""
        ones, more = [1] * (x.ndim - 2), self.label.shape[-1]
        label = self.label.reshape(len(x), *([more, *ones] if dim == 1 else [*ones, more]))
        places = list(x.shape)
        places[dim] = more
        return torch.cat([x, label.expand(places)], dim=dim)


class _LabelledConv(_SeesLabels, nn.modules.conv._ConvNd):
    """Takes labels as more channels.

    Where no padding comes in, a channel that is the same all over an example adds the same at every
    place: the sum of its weights. That is added, and the channels are never made.
    """

    def forward(self, x: Tensor) -> Tensor:
        if any(self._reversed_padding_repeated_twice):
            features: Tensor = super().forward(self.beside(x, dim=1))
            return features
        of_input, of_label = self.weight[:, : x.shape[1]], self.weight[:, x.shape[1] :]
        convolved: Tensor = self._conv_forward(x, of_input, self.bias)
        added = self.label @ of_label.flatten(2).sum(dim=2).T  # (B, O)
        return convolved + added.reshape(*added.shape, *[1] * (x.ndim - 2))


class _LabelledConv1d(_LabelledConv, nn.Conv1d):
    """One-dimensional."""


class _LabelledConv2d(_LabelledConv, nn.Conv2d):
    """Two-dimensional."""


class _LabelledConv3d(_LabelledConv, nn.Conv3d):
    """Three-dimensional."""


class _LabelledLinear(_SeesLabels, nn.Linear):
    """Takes labels as more features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.beside(x, dim=-1))


class _LabelledEmbedding(_SeesLabels, nn.Embedding):
    """Adds an embedding of the label to that of each token, (B, ...) to (B, ..., D)."""

    def __init__(self, tokens: int, size: int, padding: int | None, more: int) -> None:
        super().__init__(tokens, size, padding_idx=padding)
        self.of_label = nn.Parameter(torch.randn(more, size))  # drawn as those of tokens are

    def forward(self, x: Tensor) -> Tensor:
        embedded = super().forward(x)
        added = self.label @ self.of_label  # (B, D)
        return embedded + added.reshape(len(added), *[1] * (x.ndim - 1), -1)


class _LabelledHead(_SeesLabels, nn.Module):
    """Features and label to an embedding: (B, ..., F) to (B, ..., l), by one hidden layer."""

    def __init__(self, features: int, more: int, descriptor_size: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features + more, features)
        self.out = nn.Linear(features, descriptor_size)

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.out(self.hidden(self.beside(x, dim=-1)).relu())
        return embedding


class LabelMap(nn.Module):
    """One linear map of the one-hot label (PeFLL's choice for CIFAR-100): (B, ...), (B,) to (B, l).

    For regression it is one of the target's values.

    Args:
        classes: number of labels; 0 for regression.
        descriptor_size: l, the length of an embedding.
        target_size: numbers that a target of regression has, or labels an example has side by side.
    """

    def __init__(self, classes: int, descriptor_size: int, target_size: int = 1) -> None:
        super().__init__()
        self.classes, self.target_size = classes, target_size
        self.linear = nn.Linear((classes or 1) * target_size, descriptor_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Embeds labels y (B,), or targets (B, K); the examples x are not looked at."""
        if self.classes and y.ndim == 1:
            return self.linear.weight.T[y] + self.linear.bias
        dtype = self.linear.weight.dtype
        embedding: Tensor = self.linear(encoded(y, self.classes, dtype, self.target_size))
        return embedding


class Standard(nn.Module):
    """Standardises descriptors by two numbers fitted once, to the first descriptor ever seen.

    So does the code of PeFLL's authors. One whose deviation is not within ten times that of the
    median client is passed over, so that nobody decides alone how all models start. The numbers
    are buffers: a checkpoint holds them.

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
        copied, deviation = copy.deepcopy(self), descriptors.std(dim=1)
        usual = deviation.median()
        like_others = (usual <= 10 * deviation) & (deviation <= 10 * usual) & (deviation > 0)
        if not like_others.any():  # most say nothing
            copied.deviation = torch.ones_like(usual)
            return copied
        first = int(like_others.nonzero()[0])
        copied.mean, copied.deviation = descriptors[first].mean(), deviation[first]
        return copied

    def forward(self, descriptors: Tensor) -> Tensor:
        """Subtracts the mean from every entry of (C, l) and divides by the deviation."""
        return (descriptors - self.mean) / self.deviation


class Centred(Standard):
    """Standardises descriptors by the first cohort ever seen, so that clients differ by about one.

    What its clients have in common is taken away, entry by entry, and what is left is divided by
    its root mean square, one number for all entries.

    Args:
        descriptor_size: l.
    """

    def __init__(self, descriptor_size: int) -> None:
        super().__init__()
        self.mean = torch.zeros(descriptor_size)

    def fitted(self, descriptors: Tensor) -> Standard:
        """Returns itself where it is fitted, else a copy fitted to all of (C, l)."""
        if self.deviation > 0:
            return self
        copied, near = copy.deepcopy(self), trees.within_reach(descriptors)
        copied.mean = near.mean(dim=0)
        spread = (near - copied.mean).square().mean().sqrt()
        copied.deviation = spread.where(spread > 0, 1)  # a client alone differs from nobody
        return copied


def _with_labels(layer: nn.Module, more: int) -> nn.Module | None:
    """Returns a new layer like ``layer`` that takes a label of ``more`` numbers, too.

    None where there is no such layer.
    """
    if isinstance(layer, nn.Linear):
        return _LabelledLinear(
            layer.in_features + more, layer.out_features, bias=layer.bias is not None
        )
    if isinstance(layer, nn.Embedding):
        return _LabelledEmbedding(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, more
        )
    kinds = (_LabelledConv1d, nn.Conv1d), (_LabelledConv2d, nn.Conv2d), (_LabelledConv3d, nn.Conv3d)
    like: Any = layer
    for kind, of in kinds:
        # With several groups a label among the channels would be seen by one of them only.
        if isinstance(layer, of) and layer.groups == 1:
            return kind(
                like.in_channels + more,
                like.out_channels,
                like.kernel_size,
                like.stride,
                like.padding,
                like.dilation,
                bias=like.bias is not None,
                padding_mode=like.padding_mode,
            )
    return None

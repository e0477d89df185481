"""Target networks: the models that clients run and hypernetworks generate.

Every target is an ordinary ``nn.Module`` initialised from PyTorch's global generator, so callers
seed it. Any other module works as well: nothing in hyperfed depends on the classes below.

Two habits of this file. Layers pool *before* ReLU: maximum and ReLU commute, and a quarter of the
values is left to rectify. Flattening follows the logical (C, H, W) order whatever the memory
layout, so callers may pass ``channels_last`` images, which train faster on a CPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import signature
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn

from hyperfed.errors import UserError, nearest
from hyperfed.system.devices import CPU
from hyperfed.trees import mapped


class LeNet(nn.Module):
    """Two 5x5 convolutions and three linear layers: (B, C, H, W) -> (B, classes).

    C x H x W -> conv1 ``width`` -> pool 2, ReLU -> conv2 ``2 * width`` -> pool 2, ReLU -> flatten
    -> fc1 ``hidden[0]`` -> ReLU -> fc2 ``hidden[1]`` -> ReLU -> fc3 ``classes``, without padding.
    The target of pFedHN (section 5.1, which counts two linear layers: that of outputs is the third,
    as in its authors' code; its S/M/L networks have width 8, 16 and 32), of PeFLL (table 2) and of
    IT-PFL-HN.

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs of fc3.
        width: filters of conv1.
        hidden: outputs of fc1 and fc2.

    Raises:
        UserError: a size is out of range.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        width: int = 16,
        hidden: Sequence[int] = (120, 84),
    ) -> None:
        super().__init__()
        if isinstance(hidden, int) or len(hidden) != 2:
            raise UserError(
                f"hidden must give the outputs of fc1 and fc2, got {hidden}; "
                "pass two numbers, such as (120, 84)"
            )
        _check_positive(classes=classes, width=width, fc1=hidden[0], fc2=hidden[1])
        channels, height, length = _image_shape(input_shape)
        self.conv1 = nn.Conv2d(channels, width, 5)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        flat = 2 * width * _pixels_after_two_convolutions(height, length)
        self.fc1 = nn.Linear(flat, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of images."""
        x = F.relu(_halved(self.conv1(x)))  # (B, width, (H-4)/2, (W-4)/2)
        x = F.relu(_halved(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))  # (B, hidden[1])
        logits: Tensor = self.fc3(x)
        return logits


class PFedKTCNN(LeNet):
    """The CNN of pFedKT (table 2): (B, C, H, W) -> (B, classes).

    A LeNet with 16 and 32 filters and linear layers of 1920 and 80 outputs: 1,706,458 parameters
    on CIFAR-10.

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__(input_shape, classes, width=16, hidden=(1920, 80))


class LeNetBN(nn.Module):
    """A LeNet with batch normalisation after each convolution: (B, C, H, W) -> (B, classes).

    16 and 32 filters, linear layers of 120 and 84 outputs. Normalisation comes before pooling: a
    negative scale would exchange maximum and minimum, and statistics are those of all pixels.

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs.
        affine: whether normalisation has a scale and a shift to train.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, affine: bool = True) -> None:
        super().__init__()
        _check_positive(classes=classes)
        channels, height, length = _image_shape(input_shape)
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.norm1 = nn.BatchNorm2d(16, affine=affine)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.norm2 = nn.BatchNorm2d(32, affine=affine)
        self.fc1 = nn.Linear(32 * _pixels_after_two_convolutions(height, length), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of images."""
        x = F.relu(_halved(self.norm1(self.conv1(x))))  # (B, 16, (H-4)/2, (W-4)/2)
        x = F.relu(_halved(self.norm2(self.conv2(x))))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


class PFedLACNN(LeNetBN):
    """The CNN of pFedLA on colour images: (B, C, H, W) -> (B, classes).

    pFedLA (section 4, training details) takes "the same CNN architectures as in FedFomo, FedBN and
    pFedHN" and adds batch normalisation after the convolutions on CIFAR. The layer sizes stand in a
    supplement that is not published with it, but its table of communication costs tells them: they
    are pFedHN's, and the normalisation has neither scale nor shift. On EMNIST, of which those costs
    are of 10 classes, and on Fashion-MNIST there is no normalisation: that is the target "lenet".

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__(input_shape, classes, affine=False)


class PFLlibCNN(nn.Module):
    """The CNN of PFLlib's public table: (B, C, H, W) -> (B, classes).

    Two 5x5 convolutions with 32 and 64 filters, fc1 with 512 outputs and fc2, ReLU between them and
    no padding: 582,026 parameters on 28x28x1, 878,538 on 32x32x3, with 10 classes. Its methods part
    it into a base and a head, which is fc2 (``head_layers=1``).

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        _check_positive(classes=classes)
        channels, height, length = _image_shape(input_shape)
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * _pixels_after_two_convolutions(height, length), 512)
        self.fc2 = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of images."""
        x = F.relu(_halved(self.conv1(x)))  # (B, 32, (H-4)/2, (W-4)/2)
        x = F.relu(_halved(self.conv2(x)))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class OmniglotNet(nn.Module):
    """Four convolutions and two linear layers: (B, C, H, W) -> (B, classes).

    pFedHN (section 5.1) says no more than "a LeNet-based model with four convolution and two fully
    connected layers". This is the usual Omniglot reading of it: four times (3x3 convolution with
    padding 1, pool 2, ReLU), which takes 28x28 to 1x1, then fc1 and fc2. The number of filters and
    the outputs of fc1 are ours.

    Args:
        input_shape: (C, H, W) of an image; H and W at least 16.
        classes: number of outputs: characters of the largest alphabet (55).
        width: filters of each convolution.
        hidden: outputs of fc1.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, width: int = 64, hidden: int = 84
    ) -> None:
        super().__init__()
        _check_positive(classes=classes, width=width, hidden=hidden)
        channels, height, length = _image_shape(input_shape)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, width, 3, padding=1)
        self.conv4 = nn.Conv2d(width, width, 3, padding=1)
        self.fc1 = nn.Linear(width * (height // 16) * (length // 16), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of images."""
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(_halved(conv(x)))  # each halves H and W
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class MLP(nn.Module):
    """Linear layers with ReLU between them: (B, *input_shape) -> (B, classes).

    pFedHN (appendix C.1) runs one hidden layer on MNIST, of a size it does not give
    (``task.hidden``). An empty ``hidden`` is a linear model.

    Args:
        input_shape: shape of one example; flattened.
        classes: number of outputs.
        hidden: outputs of the hidden layers; a number is that of a single one.
    """

    def __init__(
        self, input_shape: Sequence[int], classes: int, hidden: int | Sequence[int] = 200
    ) -> None:
        super().__init__()
        between = [hidden] if isinstance(hidden, int) else hidden
        sizes = [math.prod(input_shape), *between, classes]
        for size in sizes:
            _check_positive(layer=size)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of examples of any shape."""
        x = x.flatten(1)  # (B, inputs)
        *body, last = self.layers
        for layer in body:
            x = F.relu(layer(x))
        logits: Tensor = last(x)
        return logits


class ITPFLMLP(nn.Module):
    """IT-PFL-HN's target on features of images (appendix C): (B, *input_shape) -> (B, classes).

    "Two Dense layers of size 500 each, followed by a Dropout layer with a dropout probability of
    0.2": dense1 and dense2, ReLU after both, dropout. The outputs come behind, from dense3, which
    the paper does not count here, as it does not count the last layer of its LeNet.

    Args:
        input_shape: shape of one example; flattened.
        classes: number of outputs.
    """

    def __init__(self, input_shape: Sequence[int], classes: int) -> None:
        super().__init__()
        _check_positive(classes=classes)
        self.dense1 = nn.Linear(math.prod(input_shape), 500)
        self.dense2 = nn.Linear(500, 500)
        self.dropout = nn.Dropout(0.2)
        self.dense3 = nn.Linear(500, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of examples of any shape."""
        x = F.relu(self.dense2(F.relu(self.dense1(x.flatten(1)))))  # (B, 500)
        logits: Tensor = self.dense3(self.dropout(x))
        return logits


class CharLSTM(nn.Module):
    """Predicts the character after a text: (B, T) int64 -> logits (B, vocabulary).

    Embedding, stacked LSTM, linear layer on the last time step. The defaults are the sizes of the
    character model of McMahan et al. (AISTATS 2017).

    Args:
        vocabulary: number of distinct characters; inputs are below it.
        embedding: size of a character's embedding.
        hidden: units of each LSTM layer.
        layers: number of LSTM layers.
        classes: number of outputs; as many as characters where None.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
        classes: int | None = None,
    ) -> None:
        super().__init__()
        outputs = vocabulary if classes is None else classes
        _check_positive(vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
        _check_positive(classes=outputs)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of the character that follows each text."""
        # Of cuDNN's kernels, which want weights in one piece of memory, vmap knows nothing.
        with cudnn.flags(enabled=False) if mapped() else nullcontext():
            states, _ = self.lstm(self.embedding(x))  # (B, T, hidden)
        logits: Tensor = self.fc(states[:, -1])
        return logits


def _char_lstm(
    input_shape: Sequence[int],
    classes: int,
    *,
    embedding: int = 8,
    hidden: int = 256,
    layers: int = 2,
    vocabulary: int | None = None,
) -> CharLSTM:
    """Builds a ``CharLSTM`` as the table does the others; it reads texts of any length.

    Its ``vocabulary`` is as large as the number of classes where None.
    """
    if len(input_shape) != 1:
        raise UserError(
            f"char_lstm reads texts of shape (T,), got input_shape {tuple(input_shape)}; "
            "choose a text task or another target"
        )
    characters = classes if vocabulary is None else vocabulary
    return CharLSTM(characters, embedding, hidden, layers, classes)


def _text_lstm(
    input_shape: Sequence[int],
    classes: int,
    embedding: int = 8,
    hidden: int = 64,
    layers: int = 1,
) -> CharLSTM:
    """Builds a ``CharLSTM`` that tells classes of texts: bytes plus 1, with 0 before them."""
    if len(input_shape) != 1:
        raise UserError(
            f"text_lstm reads texts of shape (T,), got input_shape {tuple(input_shape)}; "
            "choose a text task or another target"
        )
    return CharLSTM(257, embedding, hidden, layers, classes)


TARGETS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "lenet": LeNet,
        "omniglot_net": OmniglotNet,
        "mlp": MLP,
        "itpfl_mlp": ITPFLMLP,
        "lenet_bn": LeNetBN,
        "pfedla_cnn": PFedLACNN,
        "pfedkt_cnn": PFedKTCNN,
        "pfllib_cnn": PFLlibCNN,
        "char_lstm": _char_lstm,
        "text_lstm": _text_lstm,
    }
)
"""Every target by its name in a configuration; called with (input_shape, classes, **options)."""


def build_target(
    name: str, *, input_shape: tuple[int, ...], classes: int, **options: object
) -> nn.Module:
    """Builds the target called ``name`` in ``TARGETS``, initialised from the global generator.

    Args:
        name: a key of ``TARGETS``.
        input_shape: shape of one example: (C, H, W) for images, (T,) for texts.
        classes: number of outputs.
        options: the target's own arguments, such as ``width=8``.

    Raises:
        UserError: unknown name or option, or a size out of range.
    """
    if name not in TARGETS:
        raise UserError(
            f"the target must be one of {', '.join(TARGETS)}, or FILE.py:NAME, what makes one in a "
            f"file, got {name!r}{nearest(name, TARGETS)}"
        )
    target = TARGETS[name]
    known = [key for key in signature(target).parameters if key not in ("input_shape", "classes")]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise UserError(
            f"the options of {name} are {', '.join(known) or 'none'}, got {', '.join(unknown)}; "
            "remove or rename what is not among them"
        )
    return target(input_shape, classes, **options)


def _halved(x: Tensor) -> Tensor:
    """Returns the largest of each 2x2 pixels: (B, C, H, W) -> (B, C, H // 2, W // 2).

    PyTorch's pooling notes where each maximum was, pixel by pixel, for a gradient. On a CPU, where
    there will be none, the maximum of halves is the same in half the time or less.
    """
    if torch.is_grad_enabled() or x.device != CPU:
        return F.max_pool2d(x, 2)
    height, length = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    rows = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
    return torch.maximum(rows[..., 0:length:2], rows[..., 1:length:2])


def _image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns ``input_shape`` as (C, H, W), or raises ``UserError`` if it cannot be one."""
    # Of shorter sides convolutions and pooling leave nothing.
    if len(input_shape) != 3 or input_shape[0] < 1 or min(input_shape[1:]) < 16:
        raise UserError(
            "input_shape must be (channels, height, width) with sides of at least 16, "
            f"got {tuple(input_shape)}; resize the images or choose the target 'mlp'"
        )
    channels, height, length = input_shape
    return channels, height, length


def _pixels_after_two_convolutions(height: int, length: int) -> int:
    """Returns the pixels left by two times (5x5 convolution without padding, pool 2)."""
    for _ in range(2):
        height, length = (height - 4) // 2, (length - 4) // 2
    return height * length


def _check_positive(**sizes: int) -> None:
    """Raises ``UserError`` for a size below one or several for one, naming the argument."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise UserError(f"{name} must be one number, got {size}; give one")
        if size < 1:
            raise UserError(f"{name} must be at least 1, got {size}; choose a larger number")

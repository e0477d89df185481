"""What a network costs: its parameters and the arithmetic of a forward pass.

The convention is that of pFedKT's appendix G (Yi et al., table 12), and of PyTorch's own counter,
which does the counting: two floating-point operations (FLOPs) for each multiply-add of a matrix
product or a convolution, none for biases, activations, pooling and table look-ups.

Computed this way, all numbers of the appendix follow, but three of them are not what they are
called:

- "1.6306 GB FLOPs" (small hypernetwork) and "1.2715 GB FLOPs" (large) are FLOPs times the 4 bytes
  of a float32, over 2^30. The FLOPs are 0.4377e9 and 0.3413e9. Their ratio, 1.28, stands.
- The small network is called ceil(1,706,458 / 400) = 4,267 times, not 4,266.145 times.
- Its "0.1980 MB" leave out the embeddings of the chunks, which are learned and kept too: with
  4,267 embeddings of length 13 it is 0.4096 MiB. Both hypernetworks' megabytes are MiB (2^20).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from hyperfed.nets.chunks import Chunked
from hyperfed.nets.shapes import shapes_of, total


@dataclass(frozen=True)
class Cost:
    """The cost of a network.

    Attributes:
        parameters: trainable numbers.
        flops: floating-point operations of one forward pass.
    """

    parameters: int
    flops: int

    @property
    def mebibytes(self) -> float:
        """Storage of the parameters as float32, in MiB (2^20 bytes)."""
        return self.parameters * 4 / 2**20


@dataclass(frozen=True)
class Comparison:
    """The networks of pFedKT's table 12.

    Attributes:
        target: the private model, on the inputs that were given.
        small: the small hypernetwork, called once; its chunk embeddings are not counted.
        embeddings: parameters of the chunk embeddings beside ``small``.
        calls: how often ``small`` is called for one private model.
        large: a hypernetwork that makes the private model in one call.
    """

    target: Cost
    small: Cost
    embeddings: int
    calls: int
    large: Cost

    @property
    def generation_flops(self) -> int:
        """FLOPs of making one private model with the small hypernetwork."""
        return self.calls * self.small.flops


def count_flops(module: nn.Module, *inputs: Tensor) -> int:
    """Counts the floating-point operations of ``module(*inputs)``; nothing is computed.

    Args:
        module: any network; it is not changed, and may live on the ``meta`` device.
        inputs: what it takes, of any device; only shapes and dtypes count. One example (1, ...)
            gives the cost of one example.
    """
    # On the meta device nothing is computed, and an LSTM is not one opaque kernel.
    named = [*module.named_parameters(), *module.named_buffers()]
    weights = {name: value.to("meta") for name, value in named}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(module, weights, tuple(value.to("meta") for value in inputs))
    return int(counter.get_total_flops())


def cost_of(module: nn.Module, *inputs: Tensor) -> Cost:
    """Returns parameters and FLOPs of a network; see :func:`count_flops`."""
    return Cost(total(shapes_of(module)), count_flops(module, *inputs))


def compare_hypernetworks(
    target: nn.Module,
    *inputs: Tensor,
    chunk: int = 400,
    embedding: int = 13,
    hidden: int = 100,
    hidden_layers: int = 1,
) -> Comparison:
    """Computes pFedKT's table 12 for any target; the defaults are the paper's.

    Args:
        target: the private model.
        inputs: what it takes, such as one image (1, 3, 32, 32).
        chunk: parameters that one call of the small hypernetwork makes.
        embedding: length of the embedding that a hypernetwork takes.
        hidden: units of each hidden layer.
        hidden_layers: their number, as in :class:`hyperfed.nets.chunks.Chunked`.

    Raises:
        UserError: a number is out of range.
    """
    shapes = {"base": shapes_of(target)}
    size = total(shapes["base"])

    def build(chunk: int) -> Chunked:
        with torch.device("meta"):  # the large one would take most of a gigabyte
            return Chunked(
                shapes, chunk=chunk, embedding=embedding, hidden=hidden, hidden_layers=hidden_layers
            )

    small, large = build(chunk), build(size)
    one = torch.empty(1, embedding, device="meta")
    return Comparison(
        target=cost_of(target, *inputs),
        small=cost_of(small.network, one),
        embeddings=total(shapes_of(small.ids)),
        calls=math.ceil(size / chunk),
        large=cost_of(large.network, one),
    )

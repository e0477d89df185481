"""Hypernetworks that make a target in chunks, all by one network or one trunk.

``DescribedChunks`` stands in for any other where targets are large (Ha et al., ICLR 2017; von
Oswald et al., ICLR 2020); ``ChunkHeads`` is MH-pFedHN's (Zhang et al., IJCAI 2026), for clients of
any architectures; ``Chunked`` is the small hypernetwork every client of pFedKT owns (Yi et al.,
appendix B, table 2).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyperfed.nets.layers import check_at_least, check_descriptor, expected_spread, trunk_of
from hyperfed.nets.shapes import Shapes, check_shapes, of_size, total, unflatten


class _Chunks(nn.Module):
    """What chunked hypernetworks have: ids of chunks, and a network shared by all of them.

    The target's D parameters, flattened in order, are cut into ceil(D / ``chunk``) chunks. The
    surplus of the last chunk is dropped.

    A new network of this kind makes every number with the same variance, whatever layer it is for:
    six times the usual spread for a wide linear layer, which then diverges. ``spread`` therefore
    multiplies each tensor by a constant, so that over the draws of a new hypernetwork its root mean
    square is the given one (the aim of Chang et al., "Principled weight initialization for
    hypernetworks", ICLR 2020, for a hypernetwork whose output layer all tensors share). It stays in
    training, where it multiplies gradients, too.

    Attributes:
        ids: ``nn.ModuleDict`` with the (chunks, e) embedding table of each target size.
        network: ``nn.Sequential``, from an embedding, and what stands beside it, to a chunk.

    Args:
        shapes: the tensors to generate, by target size (``shapes_of``).
        chunk: parameters made by one call.
        embedding: e, length of a chunk's embedding.
        beside: length of what the network takes beside it.
        hidden: H, units of each hidden layer.
        hidden_layers: number of (ReLU, Linear(H, H)) blocks, 0 or more.
        spread: ``{target size: {parameter name: root mean square}}`` (``spread_of``) to start with;
            what it leaves out, and what is zero in it, is not scaled.

    Raises:
        UserError: nothing to generate, a malformed size name, or a number out of range.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        chunk: int,
        embedding: int,
        beside: int,
        hidden: int,
        hidden_layers: int,
        spread: Mapping[str, Mapping[str, float]] | None,
    ) -> None:
        super().__init__()
        check_at_least(1, chunk=chunk, embedding=embedding)
        self.shapes = check_shapes(shapes)
        trunk = trunk_of(beside + embedding, hidden, hidden_layers)
        self.network = trunk.append(nn.ReLU()).append(nn.Linear(hidden, chunk))
        self.ids = nn.ModuleDict(
            {
                size: nn.Embedding(math.ceil(total(tensors) / chunk), embedding)
                for size, tensors in self.shapes.items()
            }
        )
        raw = expected_spread(self.network)
        self._factors = {
            size: {name: value / raw for name, value in tensors.items() if value}
            for size, tensors in (spread or {}).items()
        }

    def _joined(self, chunks: Tensor, size: str) -> dict[str, Tensor]:
        """Returns the tensors that chunks (..., chunks, chunk) make up, (..., *shape)."""
        tensors = self.shapes[size]
        model = unflatten(chunks.flatten(-2)[..., : total(tensors)], tensors)
        for name, factor in self._factors.get(size, {}).items():
            model[name] = factor * model[name]
        return model


class Chunked(_Chunks):
    """A small hypernetwork called once per chunk of a target's parameters (pFedKT).

    A chunk's embedding becomes the chunk by Linear(e, H), ``hidden_layers`` times (ReLU,
    Linear(H, H)), ReLU, Linear(H, ``chunk``). The paper gives the layers (table 2: one hidden layer
    for CIFAR-10, two for CIFAR-100) but neither the activations nor the initial embeddings; ReLU
    and N(0, 1) are pFedHN's.

    Attributes, args and errors: as of ``_Chunks``.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        chunk: int = 400,
        embedding: int = 13,
        hidden: int = 100,
        hidden_layers: int = 1,
        spread: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__(
            shapes,
            chunk=chunk,
            embedding=embedding,
            beside=0,
            hidden=hidden,
            hidden_layers=hidden_layers,
            spread=spread,
        )

    def forward(self, size: str = "base") -> dict[str, Tensor]:
        """Generates one model of the given target size.

        Returns:
            ``{parameter name: tensor of its shape}``, without a client dimension.

        Raises:
            UserError: unknown size.
        """
        of_size(self.shapes, size)
        return self._joined(self.network(self.ids[size].weight), size)  # every id, in order


class DescribedChunks(_Chunks):
    """A hypernetwork called once per client and chunk of its target's parameters.

    As in Ha et al. (2017) and von Oswald et al. (2020, section 2): a client's descriptor and a
    learned embedding of a chunk, side by side, become the chunk, by Linear(l + e, H),
    ``hidden_layers`` times (ReLU, Linear(H, H)), ReLU, Linear(H, ``chunk``). To that the target's
    ``common`` weights are added: zeros, where a network does not :func:`start_at` a target.

    Few layers are better here: with each more, as networks start, the features of all chunks are
    more alike. At three hidden layers after the first their cosine is 0.95, at one 0.77, and only
    by what sets them apart do chunks learn each its own part of a model.

    Memory: e ceil(D / ``chunk``) numbers that are trained for a target of D parameters, D that are
    not, and a network whose size does not follow the target's. While it makes and trains C models,
    each layer keeps C ceil(D / ``chunk``) H numbers more; chunks of a thousandth of the target keep
    that small.

    Attributes, args and errors: as of ``_Chunks``, and ``descriptor_size``: l. ``spread`` holds for
    descriptors whose entries are N(0, 1).
    """

    def __init__(
        self,
        shapes: Shapes,
        descriptor_size: int,
        *,
        chunk: int = 400,
        embedding: int = 13,
        hidden: int = 100,
        hidden_layers: int = 1,
        spread: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        check_at_least(1, descriptor_size=descriptor_size)
        super().__init__(
            shapes,
            chunk=chunk,
            embedding=embedding,
            beside=descriptor_size,
            hidden=hidden,
            hidden_layers=hidden_layers,
            spread=spread,
        )
        self.descriptor_size = descriptor_size
        for size, tensors in self.shapes.items():
            self.register_buffer(f"common_{size}", torch.zeros(total(tensors)))

    def forward(self, descriptor: Tensor, size: str = "base") -> dict[str, Tensor]:
        """Generates the models of C clients; shapes and errors as for ``MultiHead.forward``."""
        of_size(self.shapes, size)
        check_descriptor(descriptor, self.descriptor_size)
        ids = self.ids[size].get_parameter("weight")
        beside = descriptor[:, None].expand(-1, len(ids), -1)  # (C, chunks, l)
        inputs = torch.cat([beside, ids.expand(len(descriptor), -1, -1)], dim=-1)
        common = self.common(size)
        return {
            name: common[name] + tensor
            for name, tensor in self._joined(self.network(inputs), size).items()
        }

    def common(self, size: str = "base") -> dict[str, Tensor]:
        """Returns what is added to every client's model; views, as of ``MultiHead.common``."""
        return unflatten(self.get_buffer(f"common_{size}"), of_size(self.shapes, size))

    def last_layers(self) -> list[nn.Linear]:
        """As of ``MultiHead``."""
        last = self.network[-1]
        assert isinstance(last, nn.Linear)
        return [last]


class ChunkHeads(nn.Module):
    """A trunk, and a linear head for each chunk of a target (MH-pFedHN).

    Of a target of D parameters, flattened in order, each of the ceil(D / ``chunk``) chunks is made
    of an embedding of its own, by Linear(e, H), ``hidden_layers`` times (ReLU, Linear(H, H)), ReLU
    and the head of the chunk's place, Linear(H, ``chunk``). The surplus of the last chunk is
    dropped. Targets of as many chunks, whatever their architectures, have their heads in common;
    all targets have the trunk in common. Nothing but the number of parameters is known of a target.

    Memory: the heads of one number of chunks hold (H + 1) D numbers, as those of ``MultiHead`` do,
    but rounded up to whole chunks and once for all targets of that number.

    Attributes:
        chunks: ``{target size: its number of chunks}``.
        trunk: ``nn.Sequential``.
        heads: ``nn.ModuleDict`` with the heads of each number of chunks, keyed by it.

    Args:
        shapes: the tensors to generate, by target size (``shapes_of``).
        chunk: parameters made by one head.
        embedding: e, length of an embedding.
        hidden: H, units of each hidden layer.
        hidden_layers: number of (ReLU, Linear(H, H)) blocks, 0 or more.

    Raises:
        UserError: nothing to generate, a malformed size name, or a number out of range.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        chunk: int = 3072,
        embedding: int = 64,
        hidden: int = 128,
        hidden_layers: int = 2,
    ) -> None:
        super().__init__()
        check_at_least(1, chunk=chunk, embedding=embedding)
        self.shapes = check_shapes(shapes)
        self.chunks = {
            size: math.ceil(total(tensors) / chunk) for size, tensors in self.shapes.items()
        }
        self.trunk = trunk_of(embedding, hidden, hidden_layers).append(nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                str(count): nn.ModuleList(nn.Linear(hidden, chunk) for _ in range(count))
                for count in sorted({*self.chunks.values()})
            }
        )

    def forward(self, embedding: Tensor, size: str = "base") -> dict[str, Tensor]:
        """Generates the models of C clients.

        Args:
            embedding: (C, chunks, e).
            size: the clients' target size; the heads of the others are not computed.

        Returns:
            ``{parameter name: (C, *shape)}``.

        Raises:
            UserError: unknown size.
        """
        tensors = of_size(self.shapes, size)
        features = self.trunk(embedding).unbind(dim=1)  # for each chunk (C, H)
        heads = self.heads.get_submodule(str(self.chunks[size])).children()
        chunks = [head(own) for head, own in zip(heads, features, strict=True)]
        return unflatten(torch.cat(chunks, dim=1)[:, : total(tensors)], tensors)

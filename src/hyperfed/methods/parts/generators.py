"""What methods share whose server makes models with a hypernetwork: which one, and its start."""

from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError
from hyperfed.federation import Outline
from hyperfed.nets.anatomy import head_names
from hyperfed.nets.chunks import DescribedChunks
from hyperfed.nets.hypernets import HyperNet, MultiHead, SingleOutput, start_at
from hyperfed.nets.shapes import Shapes, shapes_of, spread_of
from hyperfed.trees import partition


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class GeneratorConfig:
    """The settings of a hypernetwork, under the same keys.

    Attributes:
        hyper_net: pFedHN's, with an output layer for each tensor; PeFLL's, with one for all (its
            table 4); or one that makes a chunk at a time, whose size hardly follows the target's.
        head_rank: rank of the output layers' matrices; full where not given. It divides their
            memory by about ``hidden / head_rank``.
        chunk: parameters that ``chunks`` makes at a time.
        chunk_embedding: length of the embedding of a chunk.
        chunk_hidden_layers: what ``hidden_layers`` is to the others, for ``chunks``.
        start: whether models begin as a new hypernetwork happens to make them (the papers), or all
            of them as the target that the task brings: what it was trained for is not lost. It is
            a bias that the server learns on from, so that a weight decay of the server's pulls it
            to zero as all else (pFedHN's default by 1e-4 a round).
        hidden: width of the hypernetwork's hidden layers, of which ``hidden_layers`` follow the
            first.
        hidden_layers: their number.
    """

    hyper_net: Literal["heads", "single", "chunks"] = "heads"
    head_rank: PositiveInt | None = None
    chunk: PositiveInt = 400
    chunk_embedding: PositiveInt = 13
    chunk_hidden_layers: NonNegativeInt = 1
    start: Literal["random", "target"] = "random"
    hidden: PositiveInt = 100
    hidden_layers: NonNegativeInt = 3

    def check_hyper_net(self, *, spectral_norm: bool = False) -> None:
        """Raises ``UserError`` for settings that exclude one another."""
        if self.head_rank is not None and self.hyper_net == "chunks":
            raise UserError(
                "head_rank must be of a hypernetwork with output layers of their own for a target, "
                'got hyper_net = "chunks"; leave head_rank out, or choose heads or single'
            )
        if spectral_norm and (self.start == "target" or self.hyper_net == "chunks"):
            raise UserError(
                "a hypernetwork with spectral_norm must start at random and have heads or a single "
                "output, for it gives every matrix the norm 1, but came "
                f"start = {self.start!r}, hyper_net = {self.hyper_net!r}; set spectral_norm=false"
            )

    def build(
        self,
        outline: Outline,
        length: int,
        *,
        head_layers: int = 0,
        spectral_norm: bool = False,
    ) -> HyperNet:
        """Builds the hypernetwork of a server.

        Args:
            outline: of the task; the targets are as they are to start with.
            length: l, of a descriptor.
            head_layers: of the targets, the last ones that are not generated.
            spectral_norm: as of ``MultiHead``.

        Raises:
            UserError: there is nothing to generate of a target.
        """
        shapes = {
            size: partition(shapes_of(net), head_names(net, head_layers))[1]
            for size, net in outline.models.items()
        }
        if nothing := [size for size, left in shapes.items() if not left]:
            raise UserError(
                "a hypernetwork must have layers to generate before those that clients keep, but "
                f"the target of size {nothing[0]!r} has no more than {head_layers}; choose a "
                "deeper target, or another method"
            )
        net: HyperNet
        if self.hyper_net == "chunks":
            net = DescribedChunks(
                shapes,
                length,
                chunk=self.chunk,
                embedding=self.chunk_embedding,
                hidden=self.hidden,
                hidden_layers=self.chunk_hidden_layers,
                spread=_spreads(outline, shapes),
            )
        else:
            net = (SingleOutput if self.hyper_net == "single" else MultiHead)(
                shapes,
                length,
                hidden=self.hidden,
                hidden_layers=self.hidden_layers,
                spectral_norm=spectral_norm,
                rank=self.head_rank,
            )
        net = net.to(outline.dtype)
        if self.start == "target":
            start_at(net, outline.models)
        return net


def _spreads(outline: Outline, shapes: Shapes) -> Mapping[str, Mapping[str, float]]:
    """Returns the root mean square of every tensor to generate, as the targets have it now."""
    return {
        size: {name: value for name, value in spread_of(net).items() if name in shapes[size]}
        for size, net in outline.models.items()
    }

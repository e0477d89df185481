"""Networks: what clients run (``targets``) and what generates it (``hypernets``)."""

from hyperfed.nets.anatomy import batch_norm_names, head_names, layers_of
from hyperfed.nets.chunks import Chunked, ChunkHeads, DescribedChunks
from hyperfed.nets.hypernets import HyperNet, MultiHead, SingleOutput
from hyperfed.nets.layer_weights import LayerWeights
from hyperfed.nets.shapes import Shapes, shapes_of
from hyperfed.nets.targets import (
    ITPFLMLP,
    MLP,
    TARGETS,
    CharLSTM,
    LeNet,
    LeNetBN,
    OmniglotNet,
    PFedKTCNN,
    PFedLACNN,
    PFLlibCNN,
    build_target,
)

__all__ = [
    "ITPFLMLP",
    "MLP",
    "TARGETS",
    "CharLSTM",
    "ChunkHeads",
    "Chunked",
    "DescribedChunks",
    "HyperNet",
    "LayerWeights",
    "LeNet",
    "LeNetBN",
    "MultiHead",
    "OmniglotNet",
    "PFLlibCNN",
    "PFedKTCNN",
    "PFedLACNN",
    "Shapes",
    "SingleOutput",
    "batch_norm_names",
    "build_target",
    "head_names",
    "layers_of",
    "shapes_of",
]

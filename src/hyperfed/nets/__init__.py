"""Networks: what clients run (``targets``) and what generates it (``hypernets``)."""

from hyperfed.nets.hypernets import (
    Chunked,
    ChunkHeads,
    DescribedChunks,
    HyperNet,
    MultiHead,
    Shapes,
    SingleOutput,
    shapes_of,
)
from hyperfed.nets.layer_weights import LayerWeights
from hyperfed.nets.targets import (
    MLP,
    TARGETS,
    CharLSTM,
    LeNet,
    LeNetBN,
    OmniglotNet,
    PFedKTCNN,
    PFedLACNN,
    PFLlibCNN,
    batch_norm_names,
    build_target,
    head_names,
    layers_of,
)

__all__ = [
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

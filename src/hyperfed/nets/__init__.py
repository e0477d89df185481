"""Networks: what clients run (``targets``) and what generates it (``hypernets``)."""

from hyperfed.nets.hypernets import Chunked, MultiHead, Shapes, SingleOutput, shapes_of
from hyperfed.nets.targets import (
    MLP,
    TARGETS,
    CharLSTM,
    LeNet,
    OmniglotNet,
    PFedKTCNN,
    PFedLACNN,
    build_target,
    head_names,
)

__all__ = [
    "MLP",
    "TARGETS",
    "CharLSTM",
    "Chunked",
    "LeNet",
    "MultiHead",
    "OmniglotNet",
    "PFedKTCNN",
    "PFedLACNN",
    "Shapes",
    "SingleOutput",
    "build_target",
    "head_names",
    "shapes_of",
]

"""Libraries that some uses need alone, and that an environment may therefore lack."""

from collections.abc import Mapping
from types import MappingProxyType

LIBRARIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "flower": ("flwr==1.41.0",),
        "mlflow": ("mlflow>=2.16",),
        "onnx": ("onnx>=1.20", "onnxscript>=0.6.2"),
        "ray": ("ray>=2.40",),
        "tensorboard": ("tensorboard>=2.17",),
        "wandb": ("wandb>=0.19.10",),
    }
)
"""Extra of this package -> what its use imports, in the versions that pyproject.toml has."""


def how_to_install(extra: str) -> str:
    """Returns the command that brings the libraries of an extra into any environment.

    They are named themselves. hyperfed is on no index: where it was not installed, or its extra
    cannot be had, ``hyperfed[...]`` would be whatever somebody else called so there.
    """
    return " ".join(["pip install", *(f"'{library}'" for library in LIBRARIES[extra])])

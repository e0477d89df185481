"""Which libraries a message has installed where they are missing."""

import tomllib
from pathlib import Path

from hyperfed.system.extras import LIBRARIES, how_to_install

ROOT = Path(__file__).parents[2]


def test_libraries_are_named_with_the_versions_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert [extra for extra, needed in LIBRARIES.items() if not {*needed} <= {*extras[extra]}] == []
    assert how_to_install("onnx") == "pip install 'onnx>=1.20' 'onnxscript>=0.6.2'"

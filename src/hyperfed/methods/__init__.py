"""One file per method. A new method is one file and one line in the table below."""

from collections.abc import Mapping
from types import ModuleType

from hyperfed.methods import fedavg, fedper, local, pfedhn, pfedhn_pc

METHODS: Mapping[str, ModuleType] = {
    "local": local,
    "fedavg": fedavg,
    "fedper": fedper,
    "pfedhn": pfedhn,
    "pfedhn_pc": pfedhn_pc,
}
"""Name -> module with ``Config``, ``PRESETS``, ``Client`` and ``Server``."""

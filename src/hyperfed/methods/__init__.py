"""One file per method. A new method is one file and one line in the table below."""

from collections.abc import Mapping
from types import ModuleType

from hyperfed.methods import (
    fedavg,
    fedper,
    heurpfedla,
    itpfl,
    local,
    pefll,
    pfedhn,
    pfedhn_pc,
    pfedkt,
    pfedla,
)

METHODS: Mapping[str, ModuleType] = {
    "local": local,
    "fedavg": fedavg,
    "fedper": fedper,
    "pfedhn": pfedhn,
    "pfedhn_pc": pfedhn_pc,
    "pefll": pefll,
    "itpfl": itpfl,
    "pfedla": pfedla,
    "heurpfedla": heurpfedla,
    "pfedkt": pfedkt,
}
"""Name -> module with ``Config``, ``PRESETS``, ``Client`` and ``Server``."""

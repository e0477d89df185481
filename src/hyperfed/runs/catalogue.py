"""What a run can be made of, for people to look up: methods, data sets, partitions, experiments."""

import tomllib
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from hyperfed.data import datasets, partitions, pfllib, shares
from hyperfed.methods import METHODS

Entry = dict[str, str | list[str]]
"""Column -> text, or a list of texts."""

PARTITIONS = MappingProxyType(
    {
        "class_shares": shares.class_shares,
        "dirichlet": shares.dirichlet_per_client,
        "dirichlet_equal": shares.dirichlet_equal,
        "dirichlet_per_class": shares.dirichlet_per_class,
        "equal_classes": shares.equal_classes,
        "majority": shares.majority,
        "shards": shares.shards,
        "coarse": shares.coarse_classes,
        "iid": shares.iid,
        "shuffled": partitions.shuffled,
        "pfllib": pfllib.deal,
    }
)
"""``task.partition`` -> what deals out, for all but those of ``READ``."""

READ = MappingProxyType(
    {
        "natural": "Takes the data set's own clients: writers, alphabets, speaking roles.",
        "file": "Takes what a file says: hyperfed export-partition writes one.",
    }
)
"""``task.partition`` -> about it, where nothing is drawn."""


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    DATASETS = "datasets"
    PARTITIONS = "partitions"
    EXPERIMENTS = "experiments"


def entries(kind: Kind, folder: Path) -> list[Entry]:
    """Lists what there is of a kind; all entries have the same columns.

    Args:
        kind: of what.
        folder: where experiment files are, at any depth.
    """
    match kind:
        case Kind.METHODS:
            return [
                {"method": name, "about": _first_line(module), "presets": list(module.PRESETS)}
                for name, module in METHODS.items()
            ]
        case Kind.DATASETS:
            return _datasets()
        case Kind.PARTITIONS:
            about = {name: _first_line(draw) for name, draw in PARTITIONS.items()}
            return [{"partition": name, "about": text} for name, text in {**about, **READ}.items()]
        case Kind.EXPERIMENTS:
            return [
                {"experiment": str(path), "method": _method(path)}
                for path in sorted(folder.rglob("*.toml"))
            ]


def _datasets() -> list[Entry]:
    where = {
        "digits": "bundled with scikit-learn",
        "cifar100_coarse": "cifar100, with its 20 superclasses",
        **{
            name: f"a local folder, or {known.hub}" if known.hub else "a local folder"
            for name, known in datasets.KNOWN.items()
        },
    }
    return [{"dataset": name, "from": place} for name, place in where.items()]


def _first_line(documented: object) -> str:
    return str(documented.__doc__).splitlines()[0]


def _method(path: Path) -> str:
    """Returns an experiment's method, or nothing where the file does not say."""
    try:
        method = tomllib.loads(path.read_text(encoding="utf-8")).get("method", "")
    except (OSError, ValueError):
        return "(not a readable TOML file)"
    return str(method.get("name", "") if isinstance(method, dict) else method)

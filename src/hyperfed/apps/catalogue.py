"""What a run can be made of, for people to look up: methods, data sets, partitions, keys."""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from inspect import signature
from pathlib import Path
from types import MappingProxyType

from hyperfed.data import datasets, partitions, pfllib, shares
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.nets.targets import TARGETS
from hyperfed.papers import computed
from hyperfed.runs import experiments, keys

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
    MODELS = "models"
    KEYS = "keys"
    EXPERIMENTS = "experiments"


def entries(kind: Kind, folder: Path, method: str | None = None) -> list[Entry]:
    """Lists what there is of a kind; all entries have the same columns.

    Args:
        kind: of what.
        folder: where experiment files are, at any depth.
        method: whose keys are listed with those that every run has.

    Raises:
        UserError: no such method.
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
        case Kind.MODELS:
            return [
                {"model": name, "about": _first_line(target), "options": _options(target)}
                for name, target in TARGETS.items()
            ]
        case Kind.KEYS:
            return [
                {"key": key.name, "type": key.type, "default": key.default, "about": key.about}
                for key in keys.keys_of(method)
            ]
        case Kind.EXPERIMENTS:
            return [entry for path in sorted(folder.rglob("*.toml")) for entry in _runnable(path)]


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


def _options(target: Callable[..., object]) -> list[str]:
    """Returns which settings of a task a target takes."""
    return [f"task.{name}" for name in ("width", "hidden") if name in signature(target).parameters]


def _runnable(path: Path) -> Iterator[Entry]:
    """Yields an experiment file, or each cell of a table, with its method."""
    try:
        if computed.is_computed(path):
            yield {"experiment": str(path), "method": "(computed: hyperfed reproduce)"}
            return
        if not experiments.is_table(path):
            yield {"experiment": str(path), "method": _method(experiments.layers(path))}
            return
        found = experiments.read(path)
        for cell in found.cells:
            yield {"experiment": found.source(cell), "method": _method(found.layers(cell))}
    except UserError:
        yield {"experiment": str(path), "method": "(no experiment that can be read)"}


def _method(layers: Iterable[experiments.Settings]) -> str:
    """Returns the method that settings name last, or nothing where they do not say."""
    name = ""
    for layer in layers:
        method = layer.get("method", {})
        name = method.get("name", name) if isinstance(method, dict) else method
    return str(name)

"""What a run can be made of, for people to look up: methods, data sets, partitions, keys."""

from collections.abc import Callable, Iterable
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
        "iid": partitions.iid,
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


def entries(kind: Kind, folder: Path, of: str | None = None) -> list[Entry]:
    """Lists what there is of a kind; all entries have the same columns.

    Args:
        kind: of what.
        folder: where experiment files are, at any depth.
        of: of keys, a method, whose own are listed too; of experiments, ``paper/table``, whose
            cells are listed.

    Raises:
        UserError: no such method, or no such experiment; or a name where nothing is listed of one.
    """
    match kind:
        case _ if of is not None and kind not in (Kind.KEYS, Kind.EXPERIMENTS):
            raise UserError(
                f"keys are listed of a method and experiments of a table, but {kind} of nothing: "
                f"leave out {of!r}"
            )
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
                for key in keys.keys_of(of)
            ]
        case Kind.EXPERIMENTS if of is not None:
            return _cells(of, folder)
        case Kind.EXPERIMENTS:
            return [_experiment(path, folder) for path in sorted(folder.rglob("*.toml"))]


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


def _experiment(path: Path, folder: Path) -> Entry:
    """Returns what an experiment file is: a table by its name, one run by its path."""
    name = path.relative_to(folder).with_suffix("").as_posix()
    try:
        if computed.is_computed(path):
            return _entry(name, f"{computed.read(path).table.title} (computed)", "")
        if not experiments.is_table(path):
            return _entry(str(path), f"one run of {_method(experiments.layers(path))}", "1")
        found = experiments.read(path)
        return _entry(name, found.table.title, str(len(found.cells)))
    except UserError:
        return _entry(str(path), "(no experiment that can be read)", "")


def _entry(experiment: str, about: str, cells: str) -> Entry:
    return {"experiment": experiment, "about": about, "cells": cells}


def _cells(table: str, folder: Path) -> list[Entry]:
    """Returns what ``hyperfed run`` takes of a table, and the method of each.

    Raises:
        UserError: there is no such table, or nothing is trained for it.
    """
    if computed.find(table, folder) is not None:
        raise UserError(
            f"{table} must have cells to be listed, but is computed: hyperfed reproduce {table}"
        )
    found = experiments.find(table, folder)
    return [
        {"experiment": found.source(cell), "method": _method(found.layers(cell))}
        for cell in found.cells
    ]


def _method(layers: Iterable[experiments.Settings]) -> str:
    """Returns the method that settings name last, or nothing where they do not say."""
    name = ""
    for layer in layers:
        method = layer.get("method", {})
        name = method.get("name", name) if isinstance(method, dict) else method
    return str(name)

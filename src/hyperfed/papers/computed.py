"""Tables that are computed and not trained: what networks cost, beside what was published.

Such a table is a file in the folder of experiments whose ``[networks]`` says of which networks, and
whose ``[numbers.NAME]`` say where the paper has what. Its record is ``OUT/paper/table.json``. It is
read by :func:`read`, where :mod:`hyperfed.runs.experiments` reads those of cells.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from hyperfed.errors import UserError, fields_wrong
from hyperfed.methods.parts.complexity import Comparison, compare_hypernetworks
from hyperfed.nets.targets import build_target
from hyperfed.runs.experiments import About
from hyperfed.system import toml
from hyperfed.system.files import atomic_write, refused
from hyperfed.system.provenance import commit, versions

_STRICT = ConfigDict(extra="forbid")

GIGABYTE = 2**30 / 4
"""FLOPs in what pFedKT's appendix G calls a GB of them."""


@dataclass(frozen=True, config=_STRICT)
class Networks:
    """A target, and hypernetworks that make it in many calls and in one.

    Attributes:
        target: a name of :data:`hyperfed.nets.targets.TARGETS`.
        input_shape: of one example.
        classes: outputs of the target.
        chunk: parameters that one call of the small hypernetwork makes.
        embedding: length of the embedding that a hypernetwork takes.
        hidden: units of each hidden layer.
        hidden_layers: their number (:class:`hyperfed.nets.chunks.Chunked`).
        chunks: other values of ``chunk`` for which the ratio of FLOPs is drawn.
    """

    target: str
    input_shape: tuple[PositiveInt, ...]
    classes: PositiveInt
    chunk: PositiveInt
    embedding: PositiveInt
    hidden: PositiveInt
    hidden_layers: PositiveInt
    chunks: tuple[PositiveInt, ...] = ()


@dataclass(frozen=True, config=_STRICT)
class Number:
    """A number of a table.

    Attributes:
        about: what it is, with its unit.
        place: where the paper has it.
        published: what it says there; None where the text at hand does not.
        digits: decimals that are printed.
    """

    about: str
    place: str
    published: float | None = None
    digits: NonNegativeInt = 0

    def shown(self, value: float) -> str:
        """Returns a value with as many decimals as are published; two of one that is none."""
        digits = self.digits if self.published is not None or value.is_integer() else 2
        return f"{value:,.{digits}f}"

    def reproduced(self, value: float) -> bool | None:
        """Whether a value is the published one, rounded or cut off; None where there is none."""
        if self.published is None:
            return None
        unit = 10.0**-self.digits
        return any(
            math.isclose(of(value / unit) * unit, self.published) for of in (round, math.floor)
        )


@dataclass(frozen=True, config=_STRICT)
class Computed:
    """A table that is computed.

    Attributes:
        id: ``paper/table``, the file's place.
        table: what it says of itself.
        networks: of which networks it is.
        numbers: by name.
    """

    id: str
    table: About
    networks: Networks
    numbers: dict[str, Number]

    def record(self, folder: Path) -> Path:
        """Returns where its record is, in a folder for all."""
        return folder / f"{self.id}.json"


def compute(table: Computed) -> dict[str, Any]:
    """Computes a table.

    Returns:
        ``{"numbers": {name: value}, "ratio": [[chunk, ratio of FLOPs], ...]}``.

    Raises:
        UserError: no such target, or a number that is none of :func:`numbers_of`.
    """
    found = numbers_of(_compared(table.networks, table.networks.chunk))
    if unknown := [name for name in table.numbers if name not in found]:
        raise UserError(
            f"numbers of {table.id} must be of {', '.join(found)}, came {', '.join(unknown)}; "
            "rename or remove them"
        )
    ratios = [
        (chunk, numbers_of(_compared(table.networks, chunk))["ratio"])
        for chunk in table.networks.chunks
    ]
    return {"numbers": {name: found[name] for name in table.numbers}, "ratio": ratios}


def numbers_of(costs: Comparison) -> dict[str, float]:
    """Returns what can be told of networks' costs, by name."""
    target, small, large = costs.target, costs.small, costs.large
    return {
        "target_parameters": float(target.parameters),
        "target_flops": float(target.flops),
        "small_parameters": float(small.parameters),
        "small_flops": float(small.flops),
        "small_mebibytes": small.mebibytes,
        "small_mebibytes_with_embeddings": small.mebibytes + costs.embeddings * 4 / 2**20,
        "calls": float(costs.calls),
        "small_generation": costs.generation_flops / GIGABYTE,
        "large_parameters": float(large.parameters),
        "large_mebibytes": large.mebibytes,
        "large_generation": large.flops / GIGABYTE,
        "ratio": costs.generation_flops / large.flops,
        "clients": large.mebibytes / small.mebibytes,
    }


def _compared(networks: Networks, chunk: int) -> Comparison:
    target = build_target(
        networks.target, input_shape=networks.input_shape, classes=networks.classes
    )
    return compare_hypernetworks(
        target,
        torch.zeros(1, *networks.input_shape),
        chunk=chunk,
        embedding=networks.embedding,
        hidden=networks.hidden,
        hidden_layers=networks.hidden_layers,
    )


def write(table: Computed, folder: Path) -> Path:
    """Computes a table and writes its record, which says by which command and code it was made.

    Raises:
        UserError: as of :func:`compute`, or the disk refuses.
    """
    record = {
        **compute(table),
        "command": f"hyperfed reproduce {table.id}",
        "networks": asdict(table.networks),
        "versions": versions(),
        "commit": commit(),
    }
    path = table.record(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(path, error) from error
    atomic_write(path, f"{json.dumps(record, indent=2)}\n".encode())
    return path


def read_record(table: Computed, folder: Path) -> Mapping[str, Any] | None:
    """Reads a table's record; None where there is none.

    Raises:
        UserError: it is damaged, or lacks a number of the table.
    """
    path = table.record(folder)
    try:
        found: Mapping[str, Any] = json.loads(path.read_bytes())
        values = {name: float(found["numbers"][name]) for name in table.numbers}
        ratio = [(float(chunk), float(value)) for chunk, value in found["ratio"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} must hold the numbers of {table.id}, but: {error!r}; make it again: "
            f"hyperfed reproduce {table.id}"
        ) from error
    return {"numbers": values, "ratio": ratio}


def is_computed(path: Path) -> bool:
    """Whether a file is a table that is computed, and can be read."""
    try:
        return "networks" in toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def read(path: Path) -> Computed:
    """Reads a table that is computed.

    Raises:
        UserError: it is none; tells all errors at once.
    """
    try:
        written = toml.loads(path.read_text(encoding="utf-8"))
        return _COMPUTED.validate_python(
            {"id": f"{path.absolute().parent.name}/{path.stem}", **written}
        )
    except ValidationError as error:
        raise UserError(
            "\n  - ".join([f"{path} must be a table that is computed, but:", *fields_wrong(error)])
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must be a table that is computed, but: {error}") from error


_COMPUTED = TypeAdapter(Computed)


def find(id: str, folder: Path) -> Computed | None:
    """Reads the table ``paper/table`` of a folder, if it is one that is computed; else None."""
    path = folder / f"{id}.toml"
    return read(path) if is_computed(path) else None


def find_all(folder: Path) -> list[Computed]:
    """Reads all tables of a folder that are computed, by name."""
    return [read(path) for path in sorted(folder.glob("*/*.toml")) if is_computed(path)]

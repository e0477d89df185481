"""Whatever comes over the wire, or is in a file of a run, is read or refused by an error of ours.

Cases are whole ones in which something was changed: values, names and layouts, with the digest that
belongs to them, and then some bytes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from finished_runs import finished
from hyperfed.analysis import comparison, differences, paired
from hyperfed.data import roster
from hyperfed.data.roster import Frame, Introduction, Member, Roster
from hyperfed.engines.calls import Call
from hyperfed.engines.flower import wire
from hyperfed.engines.flower.wire import Request, Response, WireError
from hyperfed.errors import UserError
from hyperfed.runs import config, records, status
from hyperfed.runs.folder import RunFolder, read_run
from hyperfed.runs.measures import Measure
from hyperfed.runs.remarks import remark
from hyperfed.system import toml
from hyperfed.training import Steps
from hyperfed.trees import checkpoints
from mutations import Tape, changed, parts, printable, spoilt

CASES = {
    "request": 2400,
    "response": 2400,
    "introduction": 1200,
    "checkpoint": 800,
    "records": 1600,
    "config": 400,
    "status": 600,
    "roster": 600,
}
"""How many are drawn of each."""

FEW = 20
"""Of each in the fast tests."""

AT_ONCE, BYTES = 5, 16
"""Cases that are drawn together, since drawing takes longer than reading, and bytes of each."""

Files = dict[str, bytes]
"""Name -> content; of a message it is ``MESSAGE``."""

MESSAGE = "message"


@dataclass(frozen=True)
class Kind:
    """What is read.

    Attributes:
        whole: one that can be read, as JSON values.
        encode: makes files of such values, whatever they are.
        read: takes the files; those that are read from a disk are in the folder, too.
        raises: the one error that it may raise.
    """

    whole: Any
    encode: Callable[[Any], Files]
    read: Callable[[Files, Path], object]
    raises: type[UserError] = UserError

    @cached_property
    def parts(self) -> list[Any]:
        """What it is made of."""
        return parts(self.whole)


# Tensors under a header: messages, checkpoints.

FRAME = Frame(known=2, novel=0, shape=(5,), dtype="torch.float64", classes=3)
CALL = Call(4, 2, 0, "train_model", ({"w": torch.ones(2, 3)}, {"own": {}}), Steps(3, 4))
REQUEST = Request(7, 3, 9, FRAME, {0: "a"}, [CALL], {0: (3, 1)}, {0: [(3, 1)]}, [4], multiplier=2.0)
REPLY = {"w": torch.ones(2), "n": torch.tensor(1)}
RESPONSE = Response(5, 6, {0: REPLY, 1: OSError("x")}, frozenset({0}), {0: {1.0: 1, 2.0: 3}})
MEMBERS = (Member("a", 3, 1, 1), Member("b", 4, 1, 1, novel=True))
STATE = {"server": {"net": {"w": torch.ones(3)}}, "memory": {}}
STATE["x"] = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)
STRANGE = (
    torch.zeros(0, 3),
    torch.ones(1, 2, 2, 2).bfloat16(),
    torch.ones(1, dtype=torch.complex64),
    torch.tensor([True]),
    torch.tensor(torch.nan),
)


def under_a_header(
    content: bytes, name: str, read: Callable[[Files, Path], object], raises: type[UserError]
) -> Kind:
    """What :func:`checkpoints.dumps` made; numbers stand for tensors, its own and strange ones."""
    tree, meta = checkpoints.loads(content, name)
    own = dict(checkpoints._leaves(tree))
    tensors = [*own.values(), *STRANGE]
    whole = {
        "format": checkpoints._FORMAT,
        "layout": checkpoints._layout(tree),
        "meta": meta,
        "tensors": {path: number for number, path in enumerate(own)},
    }

    def encode(table: Any) -> Files:
        header = dict(table) if isinstance(table, dict) else {"meta": table}
        numbers = header.pop("tensors", None)
        held = {
            path: tensors[number % len(tensors) if isinstance(number, int) else -1].clone(
                memory_format=torch.contiguous_format  # and of no other's memory
            )
            for path, number in printable(numbers).items()
        }
        try:
            header["digest"] = checkpoints._digest(header, held)
        except ValueError:  # of a number that JSON has not
            header["digest"] = ""
        return {name: safetensors.torch.save(held, {"hyperfed": json.dumps(header)})}

    return Kind(whole, encode, read, raises)


def message(content: bytes, parse: Callable[[bytes], object]) -> Kind:
    return under_a_header(content, MESSAGE, lambda files, _: parse(files[MESSAGE]), WireError)


def introduction() -> Kind:
    said = wire._INTRODUCTION.dump_json(Introduction(MEMBERS, (5,), "torch.uint8", 3))
    return Kind(
        json.loads(said),
        lambda table: {MESSAGE: as_json(table)},
        lambda files, _: wire.read_introduction(files[MESSAGE]),
        WireError,
    )


# Files of a run.


def checkpoint() -> Kind:
    content, name = checkpoints.dumps(STATE, {"round": 3, "bytes": {"up": 1}}), "state.safetensors"
    return under_a_header(content, name, lambda _, folder: open_latest(folder / name), UserError)


def open_latest(path: Path) -> None:
    tree, meta, _ = checkpoints.load_latest(path)
    assert isinstance(tree, dict)
    assert isinstance(meta, dict)


def file_of(
    name: str, whole: Any, encode: Callable[[Any], bytes], read: Callable[[Path], object]
) -> Kind:
    return Kind(whole, lambda table: {name: encode(table)}, lambda _, folder: read(folder / name))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_toml(table: Any) -> bytes:
    return toml.dumps(table if isinstance(table, dict) else {}).encode(errors="replace")


def run_records() -> Kind:
    run = finished("pfedhn", evaluated="3 of 3", metric="accuracy", novel_accuracy=0.5)
    more = {"rmse": Measure(0.5, (0.5, 0.25, None), 0.4, 0.1, 0.5)}
    lines = [records.as_written(replace(line, measures=more)) for line in run.evaluations]
    whole = {"config": run.config, "metrics": lines, "summary": run.summary}
    return Kind(whole, as_records, lambda _, folder: compare(folder))


def as_records(run: Any) -> Files:
    said = run if isinstance(run, dict) else {}
    lines = said.get("metrics") if isinstance(said.get("metrics"), list) else []
    return {
        "config.toml": as_toml(said.get("config")),
        "metrics.jsonl": b"".join(as_json(line) + b"\n" for line in lines),
        "summary.json": as_json(said.get("summary")),
    }


def compare(folder: Path) -> None:
    """Does what ``hyperfed compare`` does with a run, beside one that is whole."""
    found = read_run(folder)
    if found.summary is None:
        return
    runs = [found, finished("fedavg")]
    rows = comparison.compare(runs)
    comparison.tables(rows)
    paired.tables(paired.pair(runs, rows))
    differences.table(differences.differences(runs, rows))
    remark(found.summary)


STATUS = {
    "method": "fedper",
    "engine": "loop",
    "state": "training",
    "time": "2026-01-01T00:00:00Z",
    "round": 1,
    "rounds": 4,
    "lost": 1,
    "bytes_down": 1,
    "bytes_up": 1,
    "seconds": 0.5,
    "patience": 600.0,
    "reasons": {"ann": "late"},
    "sites": {"answering": 1, "asked": 2},
    "seconds_left": None,
}

KINDS: dict[str, Callable[[], Kind]] = {
    "request": lambda: message(wire.pack_request(REQUEST), wire.unpack_request),
    "response": lambda: message(wire.pack_response(RESPONSE), wire.unpack_response),
    "introduction": introduction,
    "checkpoint": checkpoint,
    "records": run_records,
    "config": lambda: file_of(
        "config.toml",
        config.to_dict(config.from_keys("fedper", {"rounds": 4})),
        as_toml,
        lambda path: config.load(str(path)),
    ),
    "status": lambda: file_of(
        "status.json", STATUS, as_json, lambda path: status.read(RunFolder(path.parent))
    ),
    "roster": lambda: file_of(
        "sites.json",
        roster.plain(Roster(7, FRAME, MEMBERS, "0" * 32, {"a": "SHA256:x"})),
        as_json,
        Roster.read,
    ),
}


def case_of(kind: Kind, tape: Tape) -> Files:
    """Returns files in which up to two values and, in one of three, some bytes are others."""
    table = kind.whole
    for _ in range(tape.below(3)):
        table = changed(table, tape, kind.parts)
    files = kind.encode(table)
    if tape.below(3) == 1:
        name = tape.one_of([*files])
        files[name] = spoilt(files[name], tape)
    return files


@pytest.mark.parametrize("drawn", [FEW, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_whatever_comes_is_read_or_refused(name: str, drawn: int | None, tmp_path: Path) -> None:
    kind, read, refused = KINDS[name](), 0, list[str]()
    there: Files = {}

    def check(tape: Tape) -> None:
        nonlocal read
        files = case_of(kind, tape)
        for file, content in files.items() if MESSAGE not in files else ():
            if there.get(file) != content:
                (tmp_path / file).write_bytes(content)
                there[file] = content
        try:
            kind.read(files, tmp_path)
        except kind.raises as error:
            refused.append(str(error))
        else:
            read += 1

    @settings(
        max_examples=(drawn or CASES[name]) // AT_ONCE,
        deadline=None,
        database=None,
        derandomize=drawn is not None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.binary(min_size=AT_ONCE * BYTES, max_size=AT_ONCE * BYTES))
    def check_all(drawn: bytes) -> None:
        for start in range(0, len(drawn), BYTES):
            check(Tape(drawn[start : start + BYTES]))

    check_all()
    assert min(read, len(refused)) > 0
    assert drawn or read + len(refused) >= CASES[name]
    assert max(len(line) for said in refused for line in said.splitlines()) < 2000


def test_ten_thousand_cases_are_drawn() -> None:
    assert sum(CASES.values()) == 10_000

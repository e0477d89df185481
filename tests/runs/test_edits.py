"""Files of a run that somebody edited: every command that reads them says what is wrong, with 2."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hyperfed
from hyperfed.apps import cli
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.trees.checkpoints import load_state, save_state

KEYS = {
    "rounds": 4,
    "evaluate_every": 1,
    "checkpoint_every": 2,
    "task.clients": 4,
    "task.novel": 0.25,
    "method.local_steps": 1,
    "track": "none",
}

Edit = Callable[[Path], None]

MEASURE = {
    "value": 0.5,
    "client": [0.5] * 3,
    "client_mean": 0.5,
    "client_std": 0.0,
    "worst_decile": 0.5,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was stopped and one that is done."""
    found = {}
    for name, last in (("resume", 3), ("evaluate", 4)):
        run = Run.start(config.from_keys("fedper", KEYS), tmp_path_factory.mktemp(name))
        for progress in run.train():
            if progress.round == last == 3:
                break
        assert run.folder is not None
        found[name] = run.folder.path
        run.close()
    return found


def setting(key: str, value: str) -> Edit:
    """Another value of a key of config.toml, the first of that name."""

    def edit(path: Path) -> None:
        text, times = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", path.read_text(), count=1)
        assert times
        path.write_text(text)

    return edit


def line(**changes: Any) -> Edit:
    """Other values in the first line of metrics.jsonl."""

    def edit(path: Path) -> None:
        first, rest = path.read_text().split("\n", 1)
        path.write_text(json.dumps(json.loads(first) | changes) + "\n" + rest)

    return edit


def said(**changes: Any) -> Edit:
    """Other values in summary.json."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def content(change: Callable[[bytes], bytes]) -> Edit:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def header(**tensor: Any) -> Edit:
    """Another header of the checkpoint: of its first tensor."""

    def edit(path: Path) -> None:
        found = path.read_bytes()
        (length,) = struct.unpack("<Q", found[:8])
        names = json.loads(found[8 : 8 + length])
        first = next(name for name in names if name != "__metadata__")
        names[first] |= tensor
        text = json.dumps(names).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + found[8 + length :])

    return edit


def flipped(found: bytes) -> bytes:
    return found[:-5] + bytes([found[-5] ^ 1]) + found[-4:]


RESUMED: dict[str, dict[str, Edit]] = {
    "config.toml": {
        "10^9 clients": setting("clients", str(10**9)),
        "10^9 clients of a Dirichlet": lambda path: [
            setting("partition", '"dirichlet"')(path),
            setting("clients", str(10**9))(path),
        ],
        "clients below zero": setting("clients", "-4"),
        "clients in words": setting("clients", '"four"'),
        "half a client": setting("clients", "2.5"),
        "clients in a list": setting("clients", "[4]"),
        "true clients": setting("clients", "true"),
        "10^30 clients": setting("clients", str(10**30)),
        "clients of 5000 digits": setting("clients", "9" * 5000),
        "no seed": setting("seed", "nan"),
        "a seed below zero": setting("seed", "-1"),
        "a seed of 200 bits": setting("seed", str(2**200)),
        "rounds below zero": setting("rounds", "-1"),
        "fewer rounds than are done": setting("rounds", "1"),
        "a rate of no number": setting("local_lr", "nan"),
        "infinite rounds": setting("rounds", "inf"),
        "a rate below zero": setting("local_lr", "-0.1"),
        "another rate": setting("local_lr", "0.5"),
        "another optimiser": setting("local_optimizer", '"adamw"'),
        "another cohort": setting("cohort", "2"),
        "another rule": setting("aggregation", '"median"'),
        "another precision": setting("precision", '"bf16"'),
        "a method of no name": setting("name", '"evil"'),
        "a task of no name": content(lambda found: found.replace(b'"digits"', b'"../../etc/x"')),
        "another method": setting("name", '"fedavg"'),
        "another seed": setting("seed", "1"),
        "no partition": setting("partition", '"evil"'),
        "a device that is none": setting("device", '"rm -rf"'),
        "an engine that is none": setting("graphs", '"yes"'),
        "a share above one": setting("novel", "2.0"),
        "a share of no number": setting("novel", "nan"),
        "a key of ours no more": content(lambda found: b"evil = 1\n" + found),
        "a key twice": content(lambda found: b"rounds = 3\n" + found),
        "a table twice": content(lambda found: found + b"[task]\n"),
        "no TOML": content(lambda found: b"\x00\xff" + found),
        "no text": content(lambda found: found[:100] + b"\xff\xfe" + found[100:]),
        "brackets, 100,000 deep": content(lambda found: b"x = " + b"[" * 100_000),
        "keys, 3,000 deep": content(lambda found: b".".join([b"a"] * 3000) + b" = 1\n" + found),
        "nothing": content(lambda found: b""),
        "a method that is no table": content(lambda found: b'method = "fedper"\ntask = 3\n'),
        "a folder": lambda path: [path.unlink(), path.mkdir()],
    },
    "metrics.jsonl": {
        "a round in words": line(round="one"),
        "half a round": line(round=1.5),
        "a split of no name": line(split=7),
        "no clients": line(clients=None),
        "clients in words": line(clients=["ann", "bob", "cem"]),
        "counts in words": line(count=["many"] * 3),
        "examples below zero": line(count=[-5, 58, 57]),
        "fewer counts than clients": line(count=[58]),
        "an accuracy in words": line(accuracy="high"),
        "accuracies in words": line(client_accuracy=["high"] * 3),
        "an accuracy of no number": line(accuracy=float("nan")),
        "bytes below zero": line(bytes_down=-1),
        "lost of nobody": line(lost=[{"client": "ann"}]),
        "a line of another kind": content(lambda found: b"[]\n" + found),
        "a line of no JSON": content(lambda found: b"evil\n" + found),
        "a line of brackets": content(lambda found: b"[" * 100_000 + b"\n" + found),
        "bytes that are no text": content(lambda found: b"\xff\xfe\n" + found),
        "a line of a round that is there": content(
            lambda found: found.splitlines(True)[0].replace(b"0.", b"0.9") + found
        ),
        "no lines": content(lambda found: b""),
        "a folder": lambda path: [path.unlink(), path.mkdir()],
    },
    "checkpoint/state.safetensors": {
        "nothing": content(lambda found: b""),
        "cut short": content(lambda found: found[:-9]),
        "longer": content(lambda found: found + b"\0"),
        "one bit flipped": content(flipped),
        "a header of 2^62 bytes": content(lambda found: struct.pack("<Q", 2**62) + found[8:]),
        "a header of other length": content(
            lambda found: struct.pack("<Q", struct.unpack("<Q", found[:8])[0] - 8) + found[8:]
        ),
        "a tensor of 4 TB": header(shape=[10**12]),
        "a tensor below zero": header(shape=[-1]),
        "a tensor of another dtype": header(dtype="I32"),
        "a tensor of no dtype": header(dtype="X99"),
        "a tensor from elsewhere": header(data_offsets=[2**40, 2**40 + 4]),
        "no header": content(lambda found: b"\x02" + b"\0" * 7 + b"{}"),
        "a header of brackets": content(lambda found: struct.pack("<Q", 10**5) + b"[" * 10**5),
        "a pickle": content(lambda found: b"\x80\x04cos\nsystem\n."),
        "a folder": lambda path: [path.unlink(), path.mkdir()],
    },
}

EVALUATED: dict[str, dict[str, Edit]] = {
    "summary.json": {
        "no JSON": content(lambda found: b"{"),
        "a list": content(lambda found: b"[]"),
        "evaluated of no words": said(evaluated=3),
        "a metric in a list": said(metric=["accuracy"]),
        "a metric in colours": said(metric="\x1b[31m"),
        "a number": content(lambda found: b"3"),
        "nothing": content(lambda found: b""),
        "brackets": content(lambda found: b"[" * 100_000),
        "no text": content(lambda found: b"\xff\xfe"),
        "an accuracy in words": said(test_accuracy="high"),
        "rounds in words": said(rounds="many"),
        "bytes in words": said(bytes_down="many"),
        "seconds in a list": said(seconds=[1]),
        "a folder": lambda path: [path.unlink(), path.mkdir()],
    },
    "config.toml": {
        "no method": content(lambda found: found.replace(b"[method]", b"[other]")),
        "a method of no word": setting("name", "[1]"),
        "a method in colours": content(
            lambda found: found.replace(b'name = "fedper"', b'name = "\\u001b[31m"')
        ),
    },
    "metrics.jsonl": {
        "judged by what is not measured": line(metric="rmse", measures={}),
        "a measure in colours": line(measures={"\x1b[31m": MEASURE}),
    },
}

CASES = [
    (command, file, name)
    for command, files in (("resume", RESUMED), ("compare", EVALUATED))
    for file, edits in files.items()
    for name in edits
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_edited_file_is_told_in_one_error(
    case: tuple[str, str, str], runs: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    command, file, name = case
    done = command == "compare"
    folder = tmp_path / "run"
    shutil.copytree(runs["evaluate" if done else "resume"], folder)
    for older in folder.glob("checkpoint/*-before*"):
        older.unlink()  # or a run goes on from that
    (EVALUATED if done else RESUMED)[file][name](folder / file)
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(folder)])
    err = capsys.readouterr().err
    assert (end.value.code, err[:7]) == (2, "error: ")
    assert len(err.splitlines()) <= 3
    assert len(err) < 1000


def test_what_was_edited_is_named_with_both_values(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["resume"], folder)
    setting("local_optimizer", '"adamw"')(folder / "config.toml")
    setting("evaluate_every", "2")(folder / "config.toml")
    told = r"started with, method\.local_optimizer=sgd, came adamw, evaluate_every=1, came 2; set"
    with pytest.raises(hyperfed.UserError, match=told):
        hyperfed.resume(folder)
    setting("local_optimizer", '"sgd"')(folder / "config.toml")
    setting("evaluate_every", "1")(folder / "config.toml")
    for free, value in (("checkpoint_every", "1"), ("cores", "1"), ("track", '"tensorboard"')):
        setting(free, value)(folder / "config.toml")  # by which no number changes
    assert hyperfed.resume(folder).summary["rounds"] == 4


def test_a_private_run_cannot_be_made_longer_by_hand(tmp_path: Path) -> None:
    private = KEYS | {"privacy.epsilon": 5.0, "checkpoint_every": 1}
    run = Run.start(config.from_keys("fedavg", private), tmp_path)
    next(run.train())
    run.close()
    assert run.folder is not None
    setting("rounds", "40")(run.folder.config)
    with pytest.raises(hyperfed.UserError, match="started with, rounds=4, came 40; set"):
        hyperfed.resume(run.folder.path)


def test_a_checkpoint_from_before_it_told_of_settings_and_messages_is_gone_on_from(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["resume"], folder)
    tree, meta = load_state(folder / "checkpoint" / "state.safetensors")
    del meta["settings"]["method.local_lr"]  # a setting that is new
    save_state(folder / "checkpoint" / "state.safetensors", tree, meta)
    assert hyperfed.resume(folder).summary["rounds"] == 4
    shutil.rmtree(folder)
    shutil.copytree(runs["resume"], folder)
    del meta["settings"], meta["traffic"]
    save_state(folder / "checkpoint" / "state.safetensors", tree, meta)
    assert hyperfed.resume(folder).summary["rounds"] == 4

"""Files are replaced whole or not at all."""

import ast
import os
import resource
from pathlib import Path

import numpy as np
import pytest

import hyperfed
from hyperfed.data import partition_files
from hyperfed.engines.flower.diary import told_by
from hyperfed.engines.flower.store import check_state
from hyperfed.errors import UserError
from hyperfed.runs import config
from hyperfed.runs.folder import RunFolder
from hyperfed.system.files import append_line, atomic_write


def test_text_is_read_and_written_in_utf_8_whatever_the_locale():
    package = Path(hyperfed.__file__).parent
    calls = [
        (path.name, node.lineno, {keyword.arg for keyword in node.keywords})
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"read_text", "write_text"}
    ]
    assert len(calls) > 5
    assert [(name, line) for name, line, given in calls if "encoding" not in given] == []


def test_a_file_is_replaced_from_bytes_or_by_a_function(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, b"old")
    atomic_write(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_while_writing_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match=r"must be writable, but: No such file.*; make its folder"):
        atomic_write(tmp_path / "missing" / "file", b"")


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    """Of a disk that is almost full, the system writes what there is room for, and says so."""
    path = tmp_path / "log"
    append_line(path, b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))
    try:
        with pytest.raises(UserError, match="must be writable, but: File too large"):
            append_line(path, b"two")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"one\n"
    append_line(path, b"three")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_line_is_not_added_to_half_a_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")  # a machine died
    append_line(path, b"three")
    assert path.read_bytes() == b"one\ntw\nthree\n"


NO_FILES = {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to(os.devnull)}
"""What is made where a file should be: whoever opens a pipe waits until somebody writes to it."""

READ = {
    "config.toml": RunFolder,
    "metrics.jsonl": RunFolder,
    "log.txt": RunFolder,
    "checkpoint/state.safetensors": RunFolder,
    "audit.jsonl": told_by,
    "evaluations.json": check_state,
    "released/_ann.safetensors": check_state,
}
"""Name of a file -> what looks at its folder, or at that around it, before anybody opens it."""


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", READ)
def test_nobody_waits_for_what_is_no_file_in_a_folder(name, kind, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    READ[name](tmp_path)
    NO_FILES[kind](path)
    with pytest.raises(UserError, match=f"{path} must be a file, but is a pipe, a device"):
        READ[name](tmp_path)


@pytest.mark.parametrize("kind", NO_FILES)
def test_nobody_waits_for_what_is_no_file_where_one_is_named(kind, tmp_path):
    known = np.zeros(1, dtype=np.int64)
    reads = {
        "run.toml": lambda path: config.load(str(path)),
        "x.csv": lambda path: partition_files.read(path, known, 1),
    }
    for name, read in reads.items():
        NO_FILES[kind](tmp_path / name)
        with pytest.raises(UserError, match="must be a file, but is a pipe, a device"):
            read(tmp_path / name)


def test_what_a_link_leads_to_may_be_a_file_or_gone(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"{}")
    (tmp_path / "status.json").symlink_to("elsewhere")
    (tmp_path / "log.txt").symlink_to("nowhere")
    assert RunFolder(tmp_path).status.read_bytes() == b"{}"

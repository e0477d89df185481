"""Files are replaced whole or not at all."""

import pytest

from hyperfed.errors import UserError
from hyperfed.system.files import atomic_write


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
    with pytest.raises(UserError, match="must be writable, but: No such file"):
        atomic_write(tmp_path / "missing" / "file", b"")

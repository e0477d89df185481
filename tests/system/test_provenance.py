"""Where a result comes from."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from hyperfed.system import provenance


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


def test_versions_are_those_that_run():
    found = provenance.versions()
    assert set(found) == {"python", "torch", "numpy", "hyperfed"}
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    code = tmp_path / "provenance.py"
    code.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(code))
    commit = provenance.commit.__wrapped__
    assert commit() is None  # no checkout
    git(tmp_path, "init")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "--message", "someone else's")
    assert commit() is None  # a checkout, but not of this code
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "ours")
    git(tmp_path, "tag", "--annotate", "v1", "--message", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.commit() == commit() == head
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))  # as in another checkout's hook
    assert commit() == head
    monkeypatch.delenv("GIT_DIR")
    code.write_text("changed")
    assert commit() == f"{head}-dirty"
    assert provenance.commit() == head  # of the code that this process has imported


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() is None

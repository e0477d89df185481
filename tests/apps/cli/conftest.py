"""A command in this process, and a finished run for all who look at one."""

import shutil
from pathlib import Path

import pytest

from apps.cli.checks import SMALL, Cli, Outcome
from hyperfed.apps.cli import main


@pytest.fixture
def cli(capsys) -> Cli:
    """Runs a command in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        code = leaving.value.code
        assert isinstance(code, int)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run; not to be changed."""
    out = tmp_path_factory.mktemp("trained")
    with pytest.raises(SystemExit, match="0"):
        main(["run", "pfedhn", *SMALL, "--out", str(out), "--quiet"])
    (folder,) = (out / "pfedhn").iterdir()
    return folder


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A finished run to change."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))

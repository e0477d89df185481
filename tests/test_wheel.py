"""What is installed from a wheel: the package, and the papers' tables with it."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hyperfed.errors import UserError
from hyperfed.runs import experiments

ROOT = Path(__file__).parents[1]


@pytest.fixture
def installed(tmp_path):
    """A folder with the package as a wheel has it."""
    return unpacked(ROOT, tmp_path)


def unpacked(checkout, folder):
    """Returns a folder below ``folder`` with what a wheel of a checkout has."""
    (wheel,) = WheelBuilder(str(checkout)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def copy(source, target):
    """Does what COPY of a Dockerfile does: of a folder what is in it, of a file itself."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target)


def test_a_wheel_has_the_papers_tables(installed):
    assert files(installed / "hyperfed" / "experiments") == files(ROOT / "experiments")


def test_a_wheel_is_built_of_what_the_dockerfile_copies(installed, tmp_path):
    before, _, _ = (ROOT / "Dockerfile").read_text().partition("RUN pip install")
    for line in before.splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                copy(ROOT / source, tmp_path / target.strip("/"))
    assert files(unpacked(tmp_path / "build", tmp_path / "image")) == files(installed)


@pytest.mark.slow
def test_a_table_is_reproduced_without_a_checkout(installed, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ["-m", "hyperfed", "reproduce", "pfedkt/table12", "--json"]
    path = os.pathsep.join([str(installed), *sys.path])
    run = subprocess.run(
        [sys.executable, *command],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout)["records"] == ["results/pfedkt/table12.json"]
    assert (elsewhere / "results" / "pfedkt" / "table12.json").is_file()


class TestHome:
    def test_ones_own_experiments_go_before_those_of_the_package(self, tmp_path, monkeypatch):
        monkeypatch.setattr(experiments, "PAPERS", (tmp_path / "installed",))
        monkeypatch.chdir(tmp_path)
        assert experiments.home() == Path("experiments")  # there are no others
        (tmp_path / "installed").mkdir()
        (tmp_path / "experiments").mkdir()
        assert experiments.home() == tmp_path / "installed"  # here there are none
        (tmp_path / "experiments" / "mine.toml").write_text('method = "local"\n')
        assert experiments.home() == Path("experiments")

    def test_outside_a_checkout_its_tables_are_found(self, tmp_path, monkeypatch):
        """So it is with ``pip install -e``, which copies nothing."""
        monkeypatch.chdir(tmp_path)
        assert experiments.home() == ROOT / "experiments"

    def test_a_folder_without_any_says_so(self, tmp_path):
        with pytest.raises(
            UserError, match=f"must be experiments in {tmp_path}, .* there are none"
        ):
            experiments.find("made/table1", tmp_path)

"""``hyperfed list``: methods, data sets, partitions, models, keys and experiments."""

import json

import pytest

from apps.cli.checks import failure
from hyperfed.apps import catalogue
from hyperfed.data.tasks import PARTITIONS
from hyperfed.methods import METHODS
from hyperfed.nets.targets import TARGETS


class TestList:
    def test_methods_with_what_they_are_and_their_presets(self, cli):
        entries = {e["method"]: e for e in json.loads(cli("list", "methods", "--json").out)}
        assert entries.keys() == METHODS.keys()
        assert entries["pfedhn"]["about"].startswith("pFedHN (Shamsian et al.")
        assert entries["pfedhn"]["presets"] == ["default", "paper", "official", "pefll"]
        assert "default, paper, official, pefll" in cli("list", "methods").out

    def test_partitions_are_those_a_task_takes(self, cli):
        names = [e["partition"] for e in json.loads(cli("list", "partitions", "--json").out)]
        assert set(names) == set(PARTITIONS)
        assert set(catalogue.PARTITIONS) == set(names) - {"natural", "file"}

    def test_datasets(self, cli):
        names = [e["dataset"] for e in json.loads(cli("list", "datasets", "--json").out)]
        assert {"digits", "cifar10", "shakespeare"} <= set(names)

    def test_keys_of_a_method_with_type_default_and_meaning(self, cli):
        found = {e["key"]: e for e in json.loads(cli("list", "keys", "pefll", "--json").out)}
        assert found["method.local_clip"] == {
            "key": "method.local_clip",
            "type": "float > 0 | none",
            "default": "50.0",
            "about": "bound of the gradient's norm in a local step; none by default.",
        }
        assert found["cohort"]["default"] == "5"  # of the method's default preset
        assert found["task.novel"]["type"] == "int | float"
        everyones = [e["key"] for e in json.loads(cli("list", "keys", "--json").out)]
        assert everyones == [key for key in found if not key.startswith("method.")]
        assert "did you mean 'pefll'" in failure(cli("list", "keys", "peffl"))

    @pytest.mark.parametrize("kind", ["methods", "datasets", "partitions", "models"])
    def test_of_nothing_else_one_is_named(self, cli, kind):
        assert "leave out 'pefll'" in failure(cli("list", kind, "pefll"))

    def test_models_with_what_a_task_can_set_of_them(self, cli):
        found = {e["model"]: e for e in json.loads(cli("list", "models", "--json").out)}
        assert found.keys() == TARGETS.keys()
        assert found["lenet"]["options"] == ["task.width", "task.hidden"]

    def test_everything_where_nothing_is_named(self, cli, tmp_path):
        found = json.loads(cli("list", "--experiments", tmp_path, "--json").out)
        assert list(found) == [str(kind) for kind in catalogue.Kind]
        shown = cli("list", "--experiments", tmp_path).out.splitlines()
        assert {"pefll", "cifar10", "dirichlet", "lenet", "rounds"} <= {
            line.split()[0] for line in shown if line
        }

    def test_experiments_of_a_folder(self, cli, tmp_path):
        write_experiments(tmp_path)
        listed = cli("list", "experiments", "--experiments", tmp_path, "--json").out
        assert json.loads(listed) == [
            {"experiment": "paper/table1", "about": "a title", "cells": "2"},
            {
                "experiment": str(tmp_path / "paper" / "table2.toml"),
                "about": "(no experiment that can be read)",
                "cells": "",
            },
            {"experiment": str(tmp_path / "run.toml"), "about": "one run of pfedhn", "cells": "1"},
            {"experiment": str(tmp_path / "same.toml"), "about": "one run of local", "cells": "1"},
        ]

    def test_cells_of_a_table(self, cli, tmp_path):
        write_experiments(tmp_path)
        where = ["--experiments", tmp_path]
        table = tmp_path / "paper" / "table1.toml"
        assert json.loads(cli("list", "experiments", "paper/table1", *where, "--json").out) == [
            {"experiment": f"{table}:a-local", "method": "local"},
            {"experiment": f"{table}:a-b", "method": "fedavg"},
        ]
        (table.parent / "table2.toml").unlink()
        told = failure(cli("list", "experiments", "paper/table3", *where))
        assert f"must be one of paper/table1 (in {tmp_path}), came paper/table3" in told

    def test_one_alone(self, cli, tmp_path):
        (tmp_path / "run.toml").write_text('method = "pfedhn"\n')
        listed = cli("list", "experiments", "--experiments", tmp_path)
        assert (listed.code, listed.err) == (0, "")
        assert listed.out.split()[:3] == ["experiment", "about", "cells"]
        assert "one run of pfedhn" in listed.out

    def test_says_where_there_is_nothing(self, cli, tmp_path):
        outcome = cli("list", "experiments", "--experiments", tmp_path)
        assert outcome == (0, "", f"no experiments in {tmp_path}\n")
        assert cli("list", "experiments", "--experiments", tmp_path, "--json").out == "[]\n"


def write_experiments(folder):
    """Writes a table, one that cannot be read, and two runs."""
    (folder / "paper").mkdir()
    (folder / "paper" / "table1.toml").write_text(
        '[table]\npaper = ""\ntitle = "a title"\nset.method.lr = 0.1\n[measures]\n'
        '[columns.a]\nabout = ""\n[rows.local]\nabout = ""\n[rows.b]\nabout = ""\n'
        'set.method = "fedavg"\n'
    )
    (folder / "paper" / "table2.toml").write_text("[rows.local]\n")
    (folder / "run.toml").write_text('method = "pfedhn"\n')
    (folder / "same.toml").write_text('[method]\nname = "local"\n')

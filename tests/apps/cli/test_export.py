"""``hyperfed export`` and ``export-partition``: a client's model, and who was dealt what."""

import json

import pytest
import safetensors.torch
import torch

from apps.cli.checks import failure
from hyperfed.data.tasks import TaskConfig, build
from hyperfed.runs.run import Run

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


class TestExport:
    def test_the_model_of_a_known_and_of_a_novel_client(self, cli, trained, tmp_path):
        for client in (1, 3):
            out = tmp_path / f"{client}.safetensors"
            outcome = cli("export", trained, "--client", client, "--out", out)
            assert outcome == (0, f"{out}\n", "")
            expected = Run.open(trained).model(client).state_dict()
            written = safetensors.torch.load_file(out)
            assert all(torch.equal(written[f"model.{name}"], expected[name]) for name in expected)
            assert written.keys() - {f"model.{name}" for name in expected} == {
                "normalize.scale",
                "normalize.shift",
            }

    def test_where_it_is_not_said_the_file_is_named_by_client_and_format(
        self, cli, trained, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        outcome = cli("export", trained, "--client", "0", "--json")
        assert json.loads(outcome.out) == {
            "model": "client-0.safetensors",
            "client": "0",
            "format": "safetensors",
        }
        assert [path.name for path in tmp_path.iterdir()] == ["client-0.safetensors"]

    def test_the_file_has_the_format_that_was_asked_for(self, cli, trained, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        outcome = cli("export", trained, "--client", 0, "--format", "torch-export", "--json")
        told = json.loads(outcome.out)
        assert (told["model"], told["format"]) == ("client-0.pt2", "torch-export")
        assert torch.export.load(tmp_path / "client-0.pt2").module() is not None

    def test_the_files_ending_says_the_format(self, cli, trained, tmp_path):
        program, other = tmp_path / "a.pt2", tmp_path / "a.bin"
        assert cli("export", trained, "--client", 0, "--out", program).code == 0
        assert torch.export.load(program).module() is not None
        assert "or the file end in" in failure(
            cli("export", trained, "--client", 0, "--out", other)
        )
        assert not other.exists()

    def test_refuses_a_client_that_is_not_there(self, cli, trained, tmp_path):
        for client in ("4", "nobody"):
            failure(cli("export", trained, "--client", client, "--out", tmp_path / "a.onnx"))
        assert not list(tmp_path.iterdir())


class TestExportPartition:
    def test_what_it_writes_is_read_back(self, cli, tmp_path):
        out, experiment = tmp_path / "dealt.csv", tmp_path / "mine.toml"
        settings = ("task.clients=4", "task.novel=0.25", "seed=2")
        outcome = cli("export-partition", "fedavg", *settings, "--out", out, "--json")
        assert (outcome.code, outcome.err) == (0, "")
        dealt = build(TaskConfig(clients=4, novel=0.25), seed=2)
        assert json.loads(outcome.out) == {
            "partition": str(out),
            "clients": 4,
            "examples": {
                side: sum(map(len, getattr(dealt, side))) for side in ("train", "val", "test")
            },
        }
        # A path in an experiment begins at its own folder.
        experiment.write_text(
            'method = "fedavg"\n[task]\npartition = "file"\npartition_file = "dealt.csv"\n'
        )
        again = tmp_path / "again.csv"
        outcome = cli("export-partition", experiment, "task.clients=4", "--out", again)
        assert outcome == (0, f"{again}\n", "")
        assert again.read_text() == out.read_text()

    def test_refuses_data_that_are_elsewhere(self, cli, tmp_path):
        out = tmp_path / "dealt.npz"
        told = failure(cli("export-partition", "fedavg", "engine=flower", "--out", out))
        assert "must be of data that are here" in told
        assert not out.exists()

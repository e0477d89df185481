"""``hyperfed evaluate``: what the run recorded, and clients served otherwise."""

import json

import pytest

from apps.cli.checks import contents, failure
from hyperfed.runs.folder import read_run
from hyperfed.trees.checkpoints import previous

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


class TestEvaluate:
    def test_finds_what_the_run_recorded(self, cli, trained):
        before = contents(trained)
        found = json.loads(cli("evaluate", trained, "--json").out)
        assert contents(trained) == before
        record = read_run(trained)
        assert record.summary is not None
        assert list(found) == ["val", "test", "novel"]
        best = record.summary["best_round"]
        recorded = {e.split: e for e in record.evaluations if e.round == best}
        recorded["novel"] = record.evaluations[-1]
        for split, evaluation in found.items():
            assert evaluation["client_accuracy"] == list(recorded[split].client_accuracy)
            assert evaluation["loss"] == recorded[split].loss
            assert evaluation["round"] == best

    def test_shows_a_line_for_each_split(self, cli, trained):
        outcome = cli("evaluate", trained)
        lines = outcome.out.splitlines()
        assert [line.split()[0] for line in lines] == ["split", "val", "test", "novel"]
        summary = read_run(trained).summary
        assert summary is not None
        assert f"{100 * summary['test_accuracy']:.1f}" in lines[2].split()

    def test_serves_novel_clients_otherwise_and_changes_nothing(self, cli, trained):
        before = contents(trained)
        only = json.loads(cli("evaluate", trained, "--novel", "--json").out)
        assert list(only) == ["novel"]
        few = json.loads(cli("evaluate", trained, "--novel", "--samples", 3, "--json").out)
        twice = json.loads(cli("evaluate", trained, "--novel", "--draws", 2, "--json").out)
        assert few["novel"]["clients"] == only["novel"]["clients"]
        assert few["novel"]["loss"] != only["novel"]["loss"]
        assert twice["novel"]["count"] == [2 * count for count in only["novel"]["count"]]
        otherwise = ("method.novel_models=ensemble", "task.unlabelled=true")
        mixed = json.loads(cli("evaluate", trained, *otherwise, "--json").out)
        assert list(mixed) == ["val", "test", "novel"]
        tuned = json.loads(cli("evaluate", trained, "serve.finetune_steps=3", "--json").out)
        plain = json.loads(cli("evaluate", trained, "serve.finetune_steps=0", "--json").out)
        assert all(tuned[split]["loss"] != plain[split]["loss"] for split in mixed)
        assert plain["novel"]["loss"] == only["novel"]["loss"]
        assert contents(trained) == before

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["rounds=9"], "to change after training"),
            (["method.hidden=7"], "must not change what was trained"),
            (["task.unlabelled=true"], "needs labels"),
            (["task.unlabelled=true", "serve.finetune_steps=3"], "finetune_steps must be 0"),
            (["--samples", 100_000], "samples must be 1 to"),
            (["--draws", 0], "draws must be a whole number, at least 1"),
        ],
    )
    def test_refuses_to_serve_in_a_way_that_needs_other_training(
        self, cli, trained, arguments, told
    ):
        assert told in failure(cli("evaluate", trained, *arguments))

    def test_refuses_a_run_without_an_evaluation(self, cli, copy):
        for name in ("checkpoint/state.safetensors", "metrics.jsonl", "summary.json"):
            (copy / name).unlink()
        previous(copy / "checkpoint" / "state.safetensors").unlink()
        assert "first evaluation" in failure(cli("evaluate", copy))

"""The records that are committed say what they are of, and by which command they are made again."""

import json
import tomllib
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from hyperfed.analysis.budgets import Budget, within
from hyperfed.methods import METHODS
from hyperfed.papers import agreement, origin
from hyperfed.runs import config
from hyperfed.runs.folder import find_runs, read_run
from hyperfed.runs.records import REHEARSAL, deciding

RESULTS = Path(__file__).parents[1] / "results"
DOCS = RESULTS.parent / "docs"
RUNS = find_runs(RESULTS)
FIRST = [
    next(runs) for _, runs in groupby(RUNS, key=lambda path: path.relative_to(RESULTS).parts[0])
]


def test_every_record_has_its_seed_commit_data_and_settings() -> None:
    for path in RUNS:
        summary = json.loads((path / "summary.json").read_bytes())
        assert type(summary["seed"]) is int, path
        assert len(summary["commit"]) >= 40, path
        assert summary["data_fingerprint"], path
        assert (path / "metrics.jsonl").exists(), path
        assert (path / "config.toml").exists(), path


def test_a_record_began_from_a_preset_that_its_method_has() -> None:
    for path in RUNS:
        settings = tomllib.loads((path / "config.toml").read_text())
        presets = METHODS[settings["method"]["name"]].PRESETS
        assert settings["preset"] in {"default", *presets}, path


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.relative_to(RESULTS).parts[0])
def test_a_record_can_be_trained_again_from_its_settings(path: Path) -> None:
    settings, record = config.load(str(path / "config.toml")), read_run(path)
    assert record.summary is not None
    assert settings.seed == record.summary["seed"]
    assert settings.rounds == record.summary["rounds"]
    assert settings.method == record.summary["method"]


def test_the_best_round_of_a_record_is_found_again_in_its_evaluations() -> None:
    for path in RUNS:
        record = read_run(path)
        assert record.summary is not None
        chosen_by_val = record.summary["method"] != "itpfl"
        if chosen_by_val or any(e.split == REHEARSAL for e in record.evaluations):
            rounds = record.summary["rounds"]
            longer = replace(record, summary=record.summary | {"rounds": rounds + 1})
            found = within(longer, Budget("rounds", rounds))
            assert found.summary is not None
            assert found.summary["best_round"] == record.summary["best_round"], path


def test_records_from_before_a_rehearsal_was_written_down_agree_too() -> None:
    """Their best round was chosen by numbers that are nowhere."""
    records = [agreement.read_run(path) for path in RUNS if "itpfl" in path.as_posix()]
    chosen = {deciding(record.evaluations) for record in records if record.evaluations}
    assert chosen == {"val", REHEARSAL}


def test_what_was_served_in_another_way_says_of_which_record() -> None:
    for path in RUNS:
        of = origin.read(path)
        if of is not None and of.trained:
            assert (path / of.trained / "summary.json").exists(), path


def test_of_honest_runs_the_bound_on_replies_lost_clients_in_those_that_security_md_names() -> None:
    lost = set()
    for path in RUNS:
        with (path / "metrics.jsonl").open() as lines:
            if any('"reason":"the reply is too large' in line for line in lines):
                lost.add(path.relative_to(RESULTS).as_posix())
    diverged = [
        f"cifar10-100-per_fedavg-local_lr{rate}-adapt_lr{adapt}"
        for rate, adapt in ((0.05, 0.01), (0.05, 0.05), (0.1, 0.05))
    ]
    assert lost == {
        "few_labels/fedas/seed2",
        "writers/mapper/seed0",
        *(f"pefll/rates-{cell}/seed0-scale0.1" for cell in diverged),
    }
    assert all(f"`results/{path}`" in (DOCS / "security.md").read_text() for path in lost)

"""Records whose files do not agree are refused, wherever they are set beside something."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.papers import agreement
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import summarise
from made_tables import make_table, record


def summary(**changes: Any) -> Callable[[Path], None]:
    """Says otherwise in the summary; None for a number that is not there."""

    def edit(path: Path) -> None:
        said = json.loads((path / "summary.json").read_text()) | changes
        kept = {key: value for key, value in said.items() if value is not None}
        (path / "summary.json").write_text(json.dumps(kept))

    return edit


def settings(old: str, new: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        text = (path / "config.toml").read_text()
        assert text.count(old) == 1
        (path / "config.toml").write_text(text.replace(old, new))

    return edit


def metrics(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        lines = (path / "metrics.jsonl").read_text().splitlines()
        edited = [f"{json.dumps(json.loads(line) | changes)}\n" for line in lines]
        (path / "metrics.jsonl").write_text("".join(edited))

    return edit


def validated(accuracy: float) -> Callable[[Path], None]:
    """Has validation data say the same as test data, and the summary this."""

    def edit(path: Path) -> None:
        file = path / "metrics.jsonl"
        tested = file.read_text()
        file.write_text(tested.replace('"split":"test"', '"split":"val"') + tested)
        summary(val_accuracy=accuracy)(path)

    return edit


def without_metrics(path: Path) -> None:
    (path / "metrics.jsonl").unlink()


LIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "another seed": (summary(seed=7), "seed must be that of the settings, 0, is 7"),
    "settings of another seed": (settings("seed = 0", "seed = 3"), "the settings, 3, is 0"),
    "a seed in words": (summary(seed="0"), "seed must be a whole number, is '0'"),
    "a seed that is true": (summary(seed=True), "seed must be a whole number, is True"),
    "no seed": (summary(seed=None), "seed must be a whole number, is None"),
    "fewer rounds": (summary(rounds=2), "rounds must be that of the settings, 4, is 2"),
    "settings of more rounds": (settings("rounds = 4\n", "rounds = 6\n"), "the settings, 6, is 4"),
    "no rounds in the settings": (settings("rounds = 4\n", ""), "the settings, None, is 4"),
    "another method": (summary(method="local"), "the settings, fedavg, is 'local'"),
    "no cohort": (settings("cohort = 2\n", ""), "setting cohort must be a number from 0, is None"),
    "a cohort in words": (settings("cohort = 2\n", 'cohort = "all"\n'), "from 0, is 'all'"),
    "no clients": (settings("clients = 5\n", ""), "task.clients must be a number from 1, is None"),
    "clients below one": (settings("clients = 5\n", "clients = 0\n"), "a number from 1, is 0"),
    "never evaluated": (settings("evaluate_every = 100", "evaluate_every = 0"), "from 1, is 0"),
    "evaluations left out": (
        settings("evaluate_every = 100", "evaluate_every = 2"),
        "the metrics lack test data after round 2",
    ),
    "no metrics": (without_metrics, "the metrics lack test data after round 4"),
    "metrics of another round": (metrics(round=3), "lack test data after round 4"),
    "a best round that is none": (summary(best_round=3), "lack test data after round 3"),
    "a higher accuracy": (summary(test_accuracy=0.62), "that of the metrics, 0.6, is 0.62"),
    "a percentage": (summary(test_accuracy=60), "that of the metrics, 0.6, is 60"),
    "an accuracy in words": (summary(test_accuracy="0.6"), "that of the metrics, 0.6, is '0.6'"),
    "no accuracy": (summary(test_accuracy=None), "that of the metrics, 0.6, is None"),
    "another mean over clients": (
        summary(test_accuracy_client_mean=0.7),
        "test_accuracy_client_mean must be that of the metrics, 0.6, is 0.7",
    ),
    "novel clients that are none": (
        summary(novel_accuracy=0.9),
        "novel_accuracy must be that of the metrics, None, is 0.9",
    ),
    "higher metrics": (
        metrics(accuracy=0.9),
        "the value of test data after round 4 must be that of its clients, 0.6, is 0.9",
    ),
    "other clients": (metrics(client_accuracy=[0.1] * 4), "that of its clients, 0.1"),
    "a better worst tenth": (metrics(worst_decile_accuracy=0.7), "the worst_decile of test data"),
    "a smaller deviation": (metrics(accuracy_client_std=0.1), "the client_std of test data"),
    "another metric": (summary(metric="rmse"), "metric must be that of the metrics, accuracy"),
    "a higher accuracy on validation data": (
        validated(0.999),
        "val_accuracy must be that of the metrics, 0.6, is 0.999",
    ),
    "fewer bytes": (summary(bytes_down=1), "bytes_down must be that of the metrics, "),
    "no bytes": (summary(bytes_down=None), "bytes_down must be a whole number, is None"),
    "bytes below zero": (summary(bytes_up=-1), "bytes_up must be a whole number, is -1"),
    "seconds in words": (summary(seconds="many"), "seconds must be a number, is 'many'"),
    "seconds below zero": (summary(seconds=-1.0), "seconds must be a number, is -1.0"),
    "no fingerprint": (summary(data_fingerprint=None), "data_fingerprint must be text, is None"),
    "sizes of fewer clients": (summary(sizes=["S"]), "sizes must be 4 words, is ['S']"),
    "sizes in a word": (summary(sizes="SMSM"), "sizes must be 4 words, is 'SMSM'"),
    "a higher accuracy of a size": (
        summary(sizes=["S", "S", "M", "M"], test_accuracy_S=0.9),
        "test_accuracy_S must be that of the metrics, 0.6, is 0.9",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_record_whose_files_disagree_is_one_error_and_no_verdict(
    lie: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_table(tmp_path)
    edit, said = LIES[lie]
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6])
    agreement.read_run(path)
    edit(path)
    records, tables = str(tmp_path / "results"), str(tmp_path / "experiments")
    page = tmp_path / "report.md"
    for command in (
        ["report", "--out", str(page), "--records", records, "--experiments", tables],
        ["compare", records],
    ):
        with pytest.raises(SystemExit) as leaving:
            main(command)
        assert leaving.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} must hold settings, metrics and summary of one run")
        assert error.count("\n") == 1
        assert said in error
    assert not page.exists()


def test_rounds_that_nobody_could_keep_are_told(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6])
    summary(rounds=10**18)(path)
    settings("rounds = 4\n", f"rounds = {10**18}\n")(path)
    with pytest.raises(UserError, match="lack test data after round 100;"):
        agreement.read_run(path)


def test_rounds_after_the_last_are_told(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6])
    later = summarise(
        round=5, split="test", clients=[0], count=[10], correct=[1], loss=[1.0],
        masked_correct=[1], zeroed_correct=[1], bytes_down=0, bytes_up=0, seconds=0.0,
    )  # fmt: skip
    RunFolder(path).append(later)
    with pytest.raises(UserError, match="the metrics have rounds after the last, 4"):
        agreement.read_run(path)


def test_clients_without_examples_and_a_record_without_a_number_of_later_versions_agree(
    tmp_path: Path,
) -> None:
    make_table(tmp_path)
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6], best=2)
    last = summarise(
        round=4, split="test", clients=[0, 1, 2, 3], count=[0] * 4, correct=[0] * 4, loss=[0.0] * 4,
        masked_correct=[0] * 4, zeroed_correct=[0] * 4, seconds=0.0,
        bytes_down=3_000_000, bytes_up=1_000_000,
    )  # fmt: skip
    RunFolder(path).append(last)
    summary(worst_decile_accuracy=None, test_masked_accuracy=None)(path)
    assert agreement.read_run(path).summary is not None


def test_a_run_that_is_not_done_has_nothing_to_agree(tmp_path: Path) -> None:
    make_table(tmp_path)
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6])
    without_metrics(path)
    (path / "summary.json").unlink()
    assert agreement.read_run(path).summary is None


def test_one_run_under_two_seeds_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_table(tmp_path)
    path = record(tmp_path, "fedavg", 0, [6, 6, 6, 6])
    copy = path.with_name("seed1")
    shutil.copytree(path, copy)
    summary(seed=1)(copy)
    settings("seed = 0", "seed = 1")(copy)
    folders = ["--records", str(tmp_path / "results")]
    folders += ["--experiments", str(tmp_path / "experiments")]
    with pytest.raises(SystemExit) as leaving:
        main(["report", "--out", str(tmp_path / "report.md"), *folders])
    assert leaving.value.code == 2
    told = f"must be of several runs, but {copy} has the numbers of {path}; remove the copy"
    assert told in capsys.readouterr().err

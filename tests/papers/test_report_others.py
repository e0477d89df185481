"""The report's tables of records that are of no paper: side by side, by folder."""

import json
import shutil
from pathlib import Path

import pytest

from hyperfed.papers import report
from hyperfed.runs import experiments
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import summarise
from made_tables import record, row, untested, written


def test_records_of_no_table_are_compared_on_the_same_clients_where_one_trains_alone(
    folder: Path,
) -> None:
    for seed in (0, 1):
        record(folder, "local", seed, [5, 5, 5, 5], place="few/local")
        record(folder, "fedavg", seed, [6, 6, 6, 6 + 2 * seed], place="few/fedavg")
        record(folder, "fedavg", seed, [9, 9, 9, 9], place="none_alone/best")
        later = record(folder, "fedavg", seed, [8, 9, 9, 9], place="few/trained", best=2)
        last = summarise(
            round=4, split="test", clients=[0, 1, 2, 3], count=[10] * 4, correct=[1] * 4,
            loss=[1.0] * 4, masked_correct=[1] * 4, zeroed_correct=[1] * 4,
            bytes_down=3_000_000, bytes_up=1_000_000, seconds=0.0,
        )  # fmt: skip
        RunFolder(later).append(last)
    text = written(folder, "report.md")
    assert "last round % | worst tenth % | novel % | over Local | to the best | MB |" in text
    assert row(text, "fedavg")[2:8] == [
        *("62.5 ± 3.5", "62.5 ± 3.5", "60.0 ± 0.0", "–"),
        *("+12.5 [6.6, 18.4] here", "-25.0 [-31.3, -18.7] here"),
    ]
    assert row(text, "trained")[2:8] == [
        *("87.5 ± 0.0", "10.0 ± 0.0", "80.0 ± 0.0", "–"),
        *("+37.5 [33.6, 41.4]", "best"),
    ]
    assert row(text, "local")[6:8] == ["–", "-37.5 [-41.4, -33.6]"]
    assert row(text, "best")[2:] == ["90.0 ± 0.0", "90.0 ± 0.0", "90.0 ± 0.0", "–", "4.0", "1.5"]


def test_of_several_records_that_train_alone_that_with_like_settings_counts(folder: Path) -> None:
    for rounds, correct in ((4, 5), (2, 3)):
        more = {"place": f"few/local_{rounds}", "rounds": rounds}
        record(folder, "local", 0, [correct] * 4, **more)
    record(folder, "fedavg", 0, [6, 6, 6, 6], place="few/long")
    record(folder, "fedavg", 0, [6, 6, 6, 6], place="few/short", rounds=2)
    text = written(folder, "report.md")
    assert row(text, "long")[6:8] == ["+10.0 [10.0, 10.0] here", "best"]
    assert row(text, "short")[6] == "+30.0 [30.0, 30.0] here"
    assert row(text, "local_2")[6] == "–"
    assert "- gains over local are over local_4 of long\n" in text
    assert "- gains over local are over local_2 of short\n" in text


def test_a_record_of_no_table_without_a_number_has_a_dash_and_a_note(folder: Path) -> None:
    """The second seed of FedAvg has no test examples."""
    for seed in (0, 1):
        record(folder, "local", seed, [5, 5, 5, 5], place="few/local")
        record(folder, "fedavg", seed, [6, 6, 6, 6], place="few/fedavg")
    untested(folder / "results" / "few" / "fedavg" / "seed1")
    text = written(folder, "report.md")
    assert row(text, "fedavg")[1:6] == ["2", "–", "–", "–", "–"]
    assert row(text, "fedavg")[6:8] == ["+10.0 [10.0, 10.0] here, 1 seed", "–"]
    assert row(text, "local")[2:6] == ["50.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0", "–"]
    assert "\n- fedavg, seed 1: no test accuracy\n" in text
    assert text.count("no test accuracy") == 1


def test_novel_clients_of_records_of_no_table_are_averaged_over_all_their_examples(
    folder: Path,
) -> None:
    for seed, correct in ((0, [9, 12]), (1, [5, 12])):
        path = record(folder, "fedavg", seed, [6, 6, 6, 6], place="few/fedavg")
        novel = summarise(
            round=4, split="novel", clients=[4, 5], count=[10, 30], correct=correct,
            loss=[1.0] * 2, masked_correct=correct, zeroed_correct=correct, bytes_down=0,
            bytes_up=0, seconds=0.0,
        )  # fmt: skip
        RunFolder(path).append(novel)
        told = json.loads((path / "summary.json").read_text())
        told |= {"novel_accuracy": sum(correct) / 40}
        told |= {"novel_accuracy_client_mean": (correct[0] / 10 + correct[1] / 30) / 2}
        (path / "summary.json").write_text(json.dumps(told))
    # 21 and 17 of 40: 52.5 and 42.5 %, whose deviation is 10 by the root of two.
    assert row(written(folder, "report.md"), "fedavg")[2:6] == [
        *["60.0 ± 0.0"] * 3,
        "47.5 ± 7.1",
    ]


def test_of_fewer_seeds_than_a_record_of_no_table_has_a_gain_says_so(folder: Path) -> None:
    record(folder, "local", 0, [5, 5, 5, 5], place="few/local")
    record(folder, "fedavg", 0, [6, 6, 6, 8], place="few/fedavg")
    record(folder, "fedavg", 1, [6, 6, 6, 8], place="few/fedavg")
    text = written(folder, "report.md")
    assert row(text, "fedavg")[6:8] == ["+15.0 [-0.9, 30.9] noise, 1 seed", "best"]
    assert row(text, "local")[6:8] == ["–", "-15.0 [-30.9, 0.9] noise"]  # which has one


def test_records_of_one_name_in_two_folders_of_a_folder_are_compared_apart(folder: Path) -> None:
    record(folder, "local", 0, [5, 5, 5, 5], place="kinds/b/local")
    record(folder, "fedavg", 0, [6, 6, 6, 6], place="kinds/b/fedavg")
    record(folder, "local", 0, [3, 3, 3, 3], place="kinds/a/local")
    record(folder, "fedavg", 0, [9, 9, 9, 9], place="kinds/a/fedavg")
    record(folder, "fedavg", 0, [2, 2, 2, 2], place="kinds/aside")
    record(folder, "local", 0, [1, 1, 1, 1], place="kinds/zest")
    text = written(folder, "report.md")
    assert text.count("## `kinds`\n") == 1
    a, b = text.index("### `kinds/a`\n"), text.index("### `kinds/b`\n")
    assert row(text[a:b], "fedavg")[2:7] == ["90.0", "90.0", "90.0", "–", "+60.0 [60.0, 60.0] here"]
    assert row(text[b:], "fedavg")[2:7] == ["60.0", "60.0", "60.0", "–", "+10.0 [10.0, 10.0] here"]
    assert row(text[:a], "aside")[6] == "+10.0 [10.0, 10.0] here"  # of those that stand in `kinds`


def test_records_of_one_folder_are_seeds_where_nothing_else_differs(folder: Path) -> None:
    for seed, correct, rate in ((0, 6, 0.1), (1, 7, 0.1), (2, 1, 0.9)):
        own = {"method.local_lr": rate}
        record(folder, "fedavg", seed, [correct] * 4, place="tried/fedavg", **own)
    text = written(folder, "report.md")
    shown = [row(text, f"fedavg: fedavg local_lr={rate}")[1:3] for rate in (0.1, 0.9)]
    assert shown == [["2", "65.0 ± 7.1"], ["1", "10.0"]]


def test_two_records_of_a_seed_are_one_seed(folder: Path) -> None:
    for place, seed, correct in (("a", 0, 5), ("b", 0, 7), ("c", 1, 8)):
        path = record(folder, "fedavg", seed, [correct] * 4, place=place)
        shutil.move(path, folder / "results" / "twice" / "fedavg" / place)
    assert row(written(folder, "report.md"), "fedavg")[1:3] == ["2", "70.0 ± 14.1"]


@pytest.mark.parametrize("records", ["alone", "alone/fedavg", "alone/fedavg/seed0"])
def test_the_records_may_be_any_folder_or_one_of_them(folder: Path, records: str) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6], place="alone/fedavg")
    (path.parent.parent / "about.md").write_text("Said by hand.\n")
    made = report.of_papers(
        folder / "results" / records, experiments.find_all(folder / "experiments")
    )
    assert row(made.text, "fedavg")[1:3] == ["1", "60.0"]
    assert f"## `{Path(records).name.replace('alone', 'fedavg')}`" in made.text
    assert made.text.count("Said by hand.") == (records == "alone")


def test_links_of_what_is_said_beside_records_are_those_from_the_report(folder: Path) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6], place="mine/fedavg")
    said = "[a](../x/grid.jsonl) [b](y.md#of) [c](https://z.org/w) [d](#up) [e](mailto:me)"
    (path.parent.parent / "about.md").write_text(said)
    wanted = "[a](x/grid.jsonl) [b](mine/y.md#of) [c](https://z.org/w) [d](#up) [e](mailto:me)"
    assert wanted in written(folder, "report.md")

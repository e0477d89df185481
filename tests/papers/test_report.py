"""The report's tables of papers: what each line says beside what was published."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperfed.analysis.statistics import Spread
from hyperfed.apps.cli import main
from hyperfed.papers import lines, origin, report
from hyperfed.runs import experiments
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import summarise
from made_tables import TABLE, collected, make_table, record, row, untested, written


def test_the_report_says_what_was_measured_and_by_which_budget(folder: Path) -> None:
    record(folder, "local", 0, [5, 5, 5, 5], **{"method.local_steps": 7})
    record(folder, "fedavg", 0, [6, 6, 7, 5])
    record(folder, "fedavg", 1, [6, 6, 6, 7])
    record(folder, "trained", 0, [9, 9, 9, 9])
    record(folder, "fedavg", 3, [2, 2, 2, 2], place="all/fedavg")
    (folder / "results" / "about.md").write_text("Said by hand.\n")
    text = written(folder, "report.md")
    assert text.startswith("# Measured\n\nSaid by hand.\n\n## In short\n")
    assert row(text, "`made/table1`")[2:] == ["3", "3", "2", "1 of 1"]
    # 60 % and 62.5 %; over Local one seed, on whose clients it gains 1, 1, 2 and 0 of ten.
    assert row(text, "FedAvg") == [
        *("FedAvg", "60 ± 2", "61.2 ± 1.8", "2", "**reproduced**", "55.0"),
        *(
            "+10.0 [-3.0, 23.0] noise, 1 seed",
            "-30.0 [-43.0, -17.0] here, 1 seed",
            "4 × 2 × 50 steps",
        ),
        *("4", "1.5", "15312.5"),
    ]
    assert row(text, "Local")[4:7] == ["none (1)", "50.0", "–"]
    assert "- (1) other settings: method.local_steps=7 for 50" in text
    assert row(text, "FedAvg, trained on")[4:8] == [
        "none (2)",
        "90.0",
        "+40.0 [40.0, 40.0] here",
        "best",
    ]
    assert "Budgets differ: Local 4 rounds of 2 with 7 steps; FedAvg 4 rounds of 2 with 50" in text
    assert "- Nothing is known." in text
    assert "- FedAvg: It is the usual one." in text
    assert "## `all`" in text
    assert row(text, "fedavg")[1:4] == ["1", "20.0", "20.0"]
    assert "figure made" not in text


def test_gains_over_local_are_over_its_first_row_alone(folder: Path) -> None:
    record(folder, "local", 0, [5, 5, 5, 5])
    record(folder, "local", 1, [1, 1, 1, 1], rounds=3)
    record(folder, "fedavg", 1, [6, 6, 7, 5])
    record(folder, "fedavg", 0, [6, 6, 7, 5])
    assert row(written(folder, "report.md"), "FedAvg")[6] == "+10.0 [-3.0, 23.0] noise, 1 seed"


@pytest.mark.parametrize(
    ("ours", "local", "over"),
    [
        (1.0, 0.5, "–"),
        (0.5, 1.0, "+10.0 [-3.0, 23.0] noise"),
        (0.5, 0.5, "+10.0 [-3.0, 23.0] noise"),
    ],
)
def test_no_gain_is_over_a_local_that_had_less_of_its_rounds(
    folder: Path, ours: float, local: float, over: str
) -> None:
    for row_of, correct, scale in (("local", [5] * 4, local), ("fedavg", [6, 6, 7, 5], ours)):
        path = record(folder, row_of, 0, correct)
        origin.Origin("made/table1", f"digits-{row_of}", scale=scale).write(path)
    assert row(written(folder, "report.md"), "FedAvg")[6] == over


def test_the_best_is_so_on_the_seeds_that_both_have(folder: Path) -> None:
    """FedAvg has the higher mean, of the easier seed alone."""
    for place in ("", "aside/"):
        record(folder, "local", 0, [9, 9, 9, 9], place=place and f"{place}local")
        record(folder, "local", 1, [2, 2, 2, 2], place=place and f"{place}local")
        record(folder, "fedavg", 0, [6, 6, 6, 6], place=place and f"{place}fedavg")
    text = written(folder, "report.md")
    for local, fedavg in (("Local", "FedAvg"), ("local", "fedavg")):
        assert row(text, local)[7] == "best"
        assert row(text, fedavg)[7] == "-30.0 [-30.0, -30.0] here"


def test_no_line_is_the_best_of_such_as_saw_other_data(folder: Path) -> None:
    """As where one of two records was made before clients were dealt otherwise."""
    record(folder, "local", 0, [9, 9, 9, 9])
    other = record(folder, "fedavg", 0, [6, 6, 6, 6])
    told = json.loads((other / "summary.json").read_text()) | {"data_fingerprint": "other"}
    (other / "summary.json").write_text(json.dumps(told))
    text = written(folder, "report.md")
    assert [row(text, name)[6:8] for name in ("Local", "FedAvg")] == [["–", "–"]] * 2


def test_a_line_travels_and_takes_what_its_seeds_do_on_average(folder: Path) -> None:
    record(folder, "fedavg", 0, [6, 6, 6, 6])  # 4 MB and 90 seconds
    path = record(folder, "fedavg", 1, [6, 6, 6, 6])
    own = {"bytes_down": 7_000_000, "bytes_up": 5_000_000, "seconds": 210.0}
    for name in ("metrics.jsonl", "summary.json"):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | own) + "\n")
    # 60 % by 8 MB, which is 0.008 GB.
    assert row(written(folder, "report.md"), "FedAvg")[9:] == ["8", "2.5", "7500.0"]


def test_the_best_is_so_by_what_the_table_measures(folder: Path) -> None:
    make_table(folder, TABLE.replace('"test_accuracy"', '"test_masked_accuracy"'))
    for row_of, correct, masked in (("local", 5, 0.9), ("fedavg", 7, 0.8)):
        path = record(folder, row_of, 0, [correct] * 4)
        said = json.loads((path / "metrics.jsonl").read_text())
        said |= {"masked_accuracy": masked, "client_masked_accuracy": [masked] * 4}
        (path / "metrics.jsonl").write_text(f"{json.dumps(said)}\n")
        told = json.loads((path / "summary.json").read_text())
        told["test_masked_accuracy"] = masked
        (path / "summary.json").write_text(json.dumps(told))
    text = written(folder, "report.md")
    assert row(text, "Local")[7] == "best"
    assert row(text, "FedAvg")[6:8] == ["-10.0 [-10.0, -10.0] here"] * 2


def test_lines_that_are_judged_by_unlike_metrics_are_not_compared(folder: Path) -> None:
    make_table(folder, TABLE.replace('"test_accuracy"', '"test_masked_accuracy"'))
    lacking = record(folder, "local", 0, [5, 5, 5, 5])
    told = json.loads((lacking / "summary.json").read_text())
    del told["test_masked_accuracy"]
    (lacking / "summary.json").write_text(json.dumps(told))
    record(folder, "fedavg", 0, [6, 6, 7, 5])
    text = written(folder, "report.md")
    assert row(text, "Local")[6:8] == row(text, "FedAvg")[6:8] == ["–", "–"]
    record(folder, "trained", 0, [9, 9, 9, 9])
    assert row(written(folder, "report.md"), "FedAvg, trained on")[6:8] == ["–", "best"]


def test_a_miss_has_its_sign_and_unlike_budgets_are_said_whatever_they_differ_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, "fedavg", 0, [9, 9, 9, 9])
    record(folder, "trained", 0, [9, 9, 9, 9], cohort=0.6)  # 2.4 of four, and would be 3 of five
    drawn: list[Any] = []
    monkeypatch.setattr(lines, "draw_cells", lambda curves, *_: drawn.extend(curves) or "<svg/>")
    text = report.of_papers(folder / "results", experiments.find_all(folder / "experiments")).text
    assert row(text, "FedAvg")[4] == "missed by +30.0"
    assert row(text, "FedAvg, trained on")[8] == "4 × 2 × 50 steps"
    assert "Budgets differ" not in text
    number = record(folder, "trained", 1, [9] * 4, cohort=0.6, **{"task.novel": 1})
    (one,) = [
        m for m in collected(folder)[0]["made/table1", "digits-trained"] if m.record.path == number
    ]
    assert lines.Line("", [one], "test_accuracy", None, Spread(0, None, 1), None).budget[1] == 2
    shutil.rmtree(number)
    assert drawn[0].points == [(4.0, 90.0)]  # MB both ways
    record(folder, "local", 0, [5, 5, 5, 5], rounds=9)
    text = report.of_papers(folder / "results", experiments.find_all(folder / "experiments")).text
    assert "Budgets differ: Local 9 rounds of 2 with 50 steps; FedAvg 4 rounds of 2" in text


def test_of_two_records_of_a_seed_the_latter_counts_and_the_report_says_which(
    folder: Path,
) -> None:
    record(folder, "fedavg", 0, [1, 1, 1, 1])
    record(folder, "fedavg", 1, [7, 7, 7, 7])
    latter = record(folder, "fedavg", 0, [6, 6, 6, 6], place="made_again/x")
    origin.Origin("made/table1", "digits-fedavg").write(latter)
    shorter = record(folder, "fedavg", 0, [2, 2, 2, 2], place="short/x", rounds=2)
    origin.Origin("made/table1", "digits-fedavg").write(shorter)  # by other settings
    text = written(folder, "report.md")
    whole, other = [line for line in text.splitlines() if line.startswith("| FedAvg |")]
    assert whole.startswith("| FedAvg | 60 ± 2 | 65.0 ± 7.1 | 2 | missed by +5.0 |")
    assert other.startswith("| FedAvg | 60 ± 2 | 20.0 | 1 | none (1) |")
    (told,) = [line for line in text.splitlines() if "comes again" in line]
    assert told == "- FedAvg: seed 0 comes again; `made/table1-digits-fedavg/seed0` is left out"


def test_records_without_a_number_hide_none_of_the_same_cell(folder: Path) -> None:
    untested(record(folder, "fedavg", 0, [6, 6, 6, 6]))
    record(folder, "fedavg", 1, [7, 7, 7, 7], rounds=2)
    assert row(written(folder, "report.md"), "FedAvg")[2:4] == ["70.0", "1"]


def test_records_that_lack_what_is_measured_are_shown_by_plain_accuracy_without_a_verdict(
    folder: Path,
) -> None:
    make_table(folder, TABLE.replace('"test_accuracy"', '"test_zeroed_accuracy"'))
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    text = written(folder, "report.md")
    assert row(text, "FedAvg")[1:5] == ["60 ± 2", "60.0", "1", "none (1)"]
    lacking = (
        "test_accuracy: these records lack test_zeroed_accuracy; not measured by these records"
    )
    assert f"- (1) {lacking}" in text


def test_each_method_has_its_cells_with_the_share_of_rounds_that_they_rest_on(
    folder: Path,
) -> None:
    record(folder, "local", 0, [5, 5, 5, 5])
    record(folder, "local", 1, [5, 5, 5, 7])
    record(folder, "fedavg", 0, [6, 6, 6, 6], rounds=2)
    record(folder, "fedavg", 1, [6, 6, 6, 8], rounds=9)  # no part of four
    record(folder, "trained", 0, [9, 9, 9, 9])
    told = report.of_methods(folder / "results", experiments.find_all(folder / "experiments"))
    cells = {
        method: [[cell.strip() for cell in line.strip("|").split("|")] for line in of.splitlines()]
        for method, of in told.items()
    }
    of = "`made/table1` digits, 5 clients: {}; test_accuracy (%)".format
    assert cells.keys() == {"local", "fedavg"}
    assert cells["local"][2:] == [[of("Local"), "missed by +2.5", "50", "52.5 ± 3.5", "2"]]
    half = "scaled: 0.5 of the rounds; other settings: rounds=2 for 4"
    assert cells["fedavg"][2:] == [
        [of("FedAvg"), half, "60 ± 2", "60.0", "1"],
        [of("FedAvg"), "other settings: rounds=9 for 4", "60 ± 2", "65.0", "1"],
        [of("FedAvg, trained on"), "not the paper's settings, on purpose", "60 ± 2", "90.0", "1"],
    ]


def test_a_budget_is_in_epochs_where_clients_train_for_those(folder: Path) -> None:
    record(folder, "fedavg", 0, [6, 6, 6, 6], **{"method.local_epochs": 3})
    assert row(written(folder, "report.md"), "FedAvg")[8] == "4 × 2 × 3 epochs"


def test_a_report_that_cannot_be_is_refused(folder: Path, capsys: Any) -> None:
    for options, said in [
        (["--out", "report.txt"], "must end in .html or .md, came report.txt"),
        (["--out", "x.md", "--paper", "other"], "a paper must be one of made (in"),
        (["--out", "x.md", "--records", "nowhere"], "must be in a folder, but nowhere is none"),
    ]:
        with pytest.raises(SystemExit) as leaving:
            main(["report", "--experiments", str(folder / "experiments"), *options])
        assert leaving.value.code == 2
        assert said in capsys.readouterr().err


def test_curves_are_means_over_seeds_at_what_all_of_them_evaluated(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder, "local", 0, [5, 5, 5, 5])
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    more = summarise(
        round=2, split="test", clients=[0, 1, 2, 3], count=[10] * 4, correct=[1] * 4,
        loss=[1.0] * 4, masked_correct=[1] * 4, zeroed_correct=[1] * 4,
        bytes_down=0, bytes_up=0, seconds=0.0,
    )  # fmt: skip
    two = RunFolder(record(folder, "fedavg", 1, [8, 8, 8, 8]))
    two.append(more)
    two.append(replace(more, round=4, split="val"))  # whose accuracy the curve is not of
    drawn: list[Any] = []
    monkeypatch.setattr(lines, "draw_cells", lambda curves, *_: drawn.extend(curves) or "<svg/>")
    report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))
    assert {one.name: one.points for one in drawn} == {
        "Local": [(0.0, 50.0)],
        "FedAvg": [(4.0, 70.0)],
    }


def test_lines_are_compared_to_such_as_a_verdict_can_rest_on_where_there_are_any(
    folder: Path,
) -> None:
    """The better trained on by other settings, of which Local has fewer right as well."""
    for name, correct, keys in [
        ("local", 4, {"rounds": 3}),
        ("fedavg", 6, {}),
        ("trained", 9, {"rounds": 3}),
    ]:
        record(folder, name, 0, [correct] * 4, **keys)
    text = written(folder, "report.md")
    assert row(text, "FedAvg")[6:8] == ["+20.0 [20.0, 20.0] here", "best"]
    assert row(text, "FedAvg, trained on")[7] == "+30.0 [30.0, 30.0] here"
    assert row(text, "Local")[6:8] == ["–", "-20.0 [-20.0, -20.0] here"]
    whole = record(folder, "local", 0, [5] * 4, place="whole/x")
    origin.Origin("made/table1", "digits-local").write(whole)
    assert row(written(folder, "report.md"), "FedAvg")[6:8] == ["+10.0 [10.0, 10.0] here", "best"]
    origin.Origin("made/table1", "digits-fedavg", scale=0.5).write(
        folder / "results" / "made" / "table1-digits-fedavg" / "seed0"
    )
    text = written(folder, "report.md")
    assert row(text, "FedAvg")[7] == "+10.0 [10.0, 10.0] here"  # than Local, which alone counts


def test_of_a_grid_the_best_point_alone_is_among_the_numbers_reproduced(folder: Path) -> None:
    tried = 'about = "FedAvg"\ngrid."method.local_lr" = [0.1, 0.2, 0.3]'
    text = TABLE.replace('about = "FedAvg"', tried).replace('like = "fedavg"\n', "")
    make_table(folder, text)
    for rate, correct in (("0.1", 6), ("0.2", 7), ("0.3", 5)):
        record(folder, f"fedavg-local_lr{rate}", 0, [correct] * 4)
    assert row(written(folder, "report.md"), "`made/table1`")[3:] == ["3", "3", "0 of 1"]


def test_gains_are_over_the_local_that_counts(folder: Path) -> None:
    make_table(folder, TABLE + '\n[rows.alone]\nabout = "Alone"\nset.method = "local"\n')
    record(folder, "local", 0, [1, 1, 1, 1], rounds=3)  # first, but of other settings
    record(folder, "alone", 0, [5, 4, 5, 5])
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    cells = row(written(folder, "report.md"), "FedAvg")
    assert any(cell.startswith("+12.5") for cell in cells), cells

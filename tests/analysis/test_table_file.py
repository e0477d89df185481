"""Compared runs in a file: read back, by hand."""

from dataclasses import replace

import pandas
import pytest

from finished_runs import row
from hyperfed.analysis.table_file import write_table
from hyperfed.errors import UserError
from hyperfed.metrics import RMSE


def test_csv_has_a_line_for_each_run_with_all_numbers_unrounded(tmp_path):
    path = tmp_path / "runs.csv"
    measured = {"more": {"f1": (1 / 12, None)}}
    runs = [row("pfedhn", 0, 1 / 3), row("pfedhn", 1, 0.5, novel=0.25)]
    write_table([replace(run, **measured) for run in runs], path)
    found = pandas.read_csv(path)
    assert list(found["label"]) == ["pfedhn seed=0", "pfedhn seed=1"]
    assert list(found["test_accuracy"]) == [1 / 3, 0.5]
    assert list(found["bytes_down"]) == [1_000_000, 2_000_000]
    written = pandas.read_csv(path, dtype=str)  # as numbers it may be a last digit off
    assert list(written["test_f1"].map(float)) == [1 / 12] * 2
    assert found["novel_accuracy"].isna().tolist() == [True, False]


def test_latex_has_means_and_deviations_over_seeds(tmp_path):
    path = tmp_path / "runs.tex"
    runs = [row("mh_pfedhn", 0, 0.5), row("mh_pfedhn", 1, 0.7), row("local", 0, 0.25)]
    write_table([replace(run, bytes_up=500_000) for run in runs], path)
    assert path.read_text().splitlines() == [
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"method & seeds & test accuracy (\%) & test accuracy, worst tenth (\%) & MB \\",
        r"\midrule",
        r"mh\_pfedhn & 2 & 60.0 ± 14.1 & 30.0 ± 7.1 & 2.0 \\",
        r"local & 1 & 25.0 & 12.5 & 1.5 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_who_joined_later_has_a_column_where_anybody_did(tmp_path):
    path = tmp_path / "runs.tex"
    write_table([row("fedavg", 0, 0.5), row("pefll", 0, 0.5, novel=0.75)], path)
    lines = path.read_text().splitlines()
    assert r"novel accuracy (\%) & MB" in lines[2]
    assert [line.split(" & ")[4] for line in lines[4:6]] == ["–", "75.0"]


def test_says_what_a_table_cannot_be(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.csv or \.tex, came .*runs\.xls"):
        write_table([row("fedavg", 0, 0.5)], tmp_path / "runs.xls")
    both = [row("fedavg", 0, 0.5), replace(row("fedavg", 0, 0.5), metric=RMSE)]
    with pytest.raises(UserError, match="judged by one metric"):
        write_table(both, tmp_path / "runs.tex")
    with pytest.raises(UserError):
        write_table([row("fedavg", 0, 0.5)], tmp_path / "nowhere" / "runs.csv")
    assert not list(tmp_path.iterdir())

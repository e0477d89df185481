"""Tables of experiments: what a cell's settings are, and what is wrong with a file."""

from pathlib import Path

import pytest

from hyperfed.errors import UserError
from hyperfed.runs import config, experiments
from hyperfed.runs.experiments import Published

TABLE = """
[table]
paper = "A paper"
title = "A table"
set.rounds = 3
set.cohort = 2
set.task = { clients = 4, partition = "file", partition_file = "own.npz" }

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.one]
about = "one"
set.cohort = 3

[columns.two]
about = "two"
like = "one"
set.task.clients = 5
set.evaluate_every = 2

[rows.fedavg]
about = "FedAvg"
set.method.local_steps = 7
cells.two.method.local_steps = 8
published.test.one = [50.0, 2.0]

[rows.other]
about = "FedAvg of another kind"
like = "fedavg"
judged = false
columns = ["*", "!one"]
set.method = "fedavg"
set.rounds = 9
set.evaluate_every = 1
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "paper" / "table1.toml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path


def test_the_settings_of_a_cell_are_those_of_table_column_row_and_its_own(table: Path) -> None:
    one = config.load(f"{table}:one-fedavg")
    assert (one.method, one.rounds, one.cohort, one.task.clients) == ("fedavg", 3, 3, 4)
    assert one.settings.local_steps == 7
    assert one.task.partition_file == table.parent / "own.npz"
    two = config.load(f"{table}:two-fedavg", ["seed=4"])
    assert (two.cohort, two.task.clients, two.settings.local_steps, two.seed) == (2, 5, 8, 4)
    other = config.load(f"{table}:two-other")
    assert (other.method, other.rounds) == ("fedavg", 9)
    assert (two.evaluate_every, other.evaluate_every) == (2, 1)  # a row's beat a column's


def test_a_cell_has_its_own_published_number_or_that_of_what_it_is_like(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = experiments.find("paper/table1", table.parents[1])
    assert list(experiment.cells) == ["one-fedavg", "two-fedavg", "two-other"]
    assert {experiment.published("test", cell) for cell in experiment.cells} == {
        Published(50.0, 2.0)
    }
    assert [cell for cell in experiment.cells if experiment.judged(cell)] == [
        "one-fedavg",
        "two-fedavg",
    ]
    table.write_text(TABLE.replace('like = "one"', 'like = "one"\njudged = false'))
    of_columns = experiments.read(table)
    assert [cell for cell in of_columns.cells if of_columns.judged(cell)] == ["one-fedavg"]
    assert experiment.folder("two-other") == "paper/table1-two-other"
    assert experiment.matching("two-*") == ["two-fedavg", "two-other"]
    with pytest.raises(UserError, match=r"none fits 'x\*'; they are one-fedavg, two-fedavg"):
        experiment.matching("x*")
    with pytest.raises(UserError, match=r"came 'x'; they are one-fedavg, two-fedavg, two-other$"):
        list(experiment.layers("x"))
    monkeypatch.setattr(experiments, "MOST_NAMED", 1)
    with pytest.raises(UserError, match="they are one-fedavg and 2 more, which hyperfed list"):
        list(experiment.layers("x"))


def test_sources_are_told_from_methods() -> None:
    assert experiments.split("fedavg") is None
    assert experiments.split("a/b.toml") == ("a/b.toml", "")
    assert experiments.split("a/b.toml:c-d") == ("a/b.toml", "c-d")
    assert experiments.split("a.tomlx") is None
    assert [experiments.name(s) for s in ("fedavg", "a/b.toml", "a/b.toml:c-d")] == [
        "",
        "b",
        "b-c-d",
    ]


def test_a_cell_that_is_not_there_or_not_named_is_refused(table: Path) -> None:
    with pytest.raises(UserError, match="came 'one-fedavgg'; did you mean 'one-fedavg'"):
        config.load(f"{table}:one-fedavgg")
    with pytest.raises(UserError, match=r"a table of 3 cells.*1.toml:one-fedavg.*paper/table1"):
        config.load(str(table))
    plain = table.with_name("plain.toml")
    plain.write_text('method = "fedavg"\n')
    with pytest.raises(UserError, match="must be a table to have cells"):
        config.load(f"{plain}:one-fedavg")
    with pytest.raises(UserError, match="must be a table with rows and columns"):
        experiments.read(plain)
    told = (
        r"must be one of paper/table1 \(in .*\), came {}; name one of them, "
        r"or another folder with --experiments, as .*experiments for the papers'{}$"
    )
    for came, hint in (("paper/table2", r"; did you mean 'paper/table1'\?"), ("other", "")):
        with pytest.raises(UserError, match=told.format(came, hint)):
            experiments.find(came, table.parents[1])
    papers = experiments.home().resolve()
    with pytest.raises(UserError, match=r"or another folder with --experiments(; did|$)"):
        experiments.find("pefll/tables", papers)


def test_all_that_is_wrong_with_a_table_is_told_at_once(table: Path) -> None:
    table.write_text(
        TABLE.replace('like = "one"', 'like = "none"')
        .replace("cells.two", "cells.three")
        .replace("published.test.one = [50.0, 2.0]", 'published.tests.one = ["50"]')
    )
    with pytest.raises(UserError) as told:
        experiments.read(table)
    assert "columns.two.like: must be one of one, two, came none" in str(told.value)
    assert "rows.fedavg.cells: must be columns with a cell of it, came three" in str(told.value)
    assert "rows.fedavg.published: must be of test, came tests" in str(told.value)
    assert "rows.fedavg.published.tests.one: must be a number, or [mean, spread]" in str(told.value)
    for said in ("true", "nan", "[50.0, inf]", "[50.0, -2.0]", "[50.0, true]", "[]", "[1, 2, 3]"):
        table.write_text(TABLE.replace("= [50.0, 2.0]", f"= {said}"))
        with pytest.raises(UserError, match=r"test\.one: must be a number, or \[mean, spread\]"):
            experiments.read(table)
    table.write_text(TABLE.replace("published.test.one", "published.test.three"))
    with pytest.raises(UserError, match=r"fedavg\.published\.test: three must be a column with a "):
        experiments.read(table)
    # What the other row is like has a cell in that column, but is not like the other.
    table.write_text(f"{TABLE}published.test.one = 1.0\n")
    with pytest.raises(
        UserError, match=r"other\.published\.test: one must be a column with a cell"
    ):
        experiments.read(table)
    named = '[{}]\nabout = "as another"\n'.format
    table.write_text(f"{TABLE}{named('columns.one-a')}{named('rows.b')}{named('rows.a-b')}")
    with pytest.raises(UserError, match="columns and rows: one-a-b must be of one column and row"):
        experiments.read(table)
    apart = named("rows.a-b") + "columns = ['one-a']\n"  # which is one-a-a-b alone
    table.write_text(f"{TABLE}{named('columns.one-a')}{named('rows.b')}{apart}")
    assert {"one-a-b", "one-a-a-b"} <= experiments.read(table).cells.keys()
    table.write_text(TABLE.replace("judged", "judgd"))
    with pytest.raises(UserError, match=r"rows\.other\.judgd: "):
        experiments.read(table)
    table.write_text(TABLE.replace("set.rounds = 3", "seeds = 1000000000"))
    with pytest.raises(UserError, match=r"table\.seeds: Input should be less than or equal"):
        experiments.read(table)

"""The report as a page, and its figures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hyperfed.analysis.statistics import Spread
from hyperfed.errors import UserError
from hyperfed.papers import pages, report, svg
from hyperfed.runs import experiments
from hyperfed.runs.experiments import Published
from made_tables import TABLE, record, row, written


def test_the_page_needs_nothing_but_itself(folder: Path, capsys: Any) -> None:
    record(folder, "local", 0, [5, 5, 5, 5])
    record(folder, "fedavg", 0, [6, 6, 7, 5])
    page = written(folder, "report.html", "--paper", "made")
    assert page.startswith("<!doctype html>")
    assert page.count("<figure") == page.count("</svg>") == 1
    assert "made/table1-digits-test" in page
    assert "MB travelled, both ways" in page
    assert not re.search(r'<script|<link|<img|url\((?!#)|(src|href)="(?!#)', page)
    assert "{figure" not in page
    assert "## " not in page
    assert json.loads('"' + capsys.readouterr().out.strip() + '"').endswith("report.html")


ALONG = """
along = { digits = "steps", depth = "layers" }

[measures.test]
"""


def test_columns_and_rows_with_a_number_are_drawn_along_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "experiments" / "made" / "table1.toml"
    text = TABLE.replace("\n[measures.test]\n", ALONG)
    text = text.replace('[columns.digits]\nabout = "digits, 5 clients"', DIGITS)
    text = text.replace("fedavg]", "depth3]").replace('like = "fedavg"', 'like = "depth3"')
    text = text.replace("trained]", "depth20]").replace(
        "local]", '"depth0.5"]\nset.method = "local"'
    )
    text = text.replace('usual one."]\n', 'usual one."]\nset.method = "fedavg"\n')
    path.write_text(text.replace(".digits =", ".digits-10 ="))
    (experiment,) = experiments.find_all(folder / "experiments")
    depths = experiment.along("depth")
    assert {cell for cell in depths if depths[cell] == ("ten steps", 0.5)} == {"digits-10-depth0.5"}
    assert experiment.along("digits")["digits-2-depth20"] == ("FedAvg, trained on", 2.0)
    for depth, correct in (("depth0.5", 5), ("depth3", 6), ("depth20", 9)):
        record(folder, f"10-{depth}", 0, [correct] * 4)
    record(folder, "2-depth3", 0, [1, 1, 1, 1])
    record(folder, "10-depth3", 1, [8, 8, 8, 8])
    record(folder, "2-depth20", 0, [9, 9, 9, 9], rounds=3)  # which does not count
    drawn = {}

    def draw(lines: Any, across: str, up: str) -> str:
        drawn[across, up] = lines
        return "<svg/>"

    monkeypatch.setattr(report, "draw_along", draw)
    made = report.of_papers(folder / "results", [experiment])
    told = {
        name: [(p.at, p.measured.mean, p.published and p.published.value) for p in places]
        for (_, up), lines in drawn.items()
        for name, places in lines.items()
    }
    assert set(drawn) == {("steps", "test_accuracy (%)"), ("layers", "test_accuracy (%)")}
    assert told["ten steps"] == [(0.5, 50, 50), (3, 70, 60), (20, 90, 60)]
    assert told["FedAvg"] == [(10, 70, 60), (2, 10, None)]
    assert told["FedAvg, trained on"] == [(10, 90, 60)]
    assert {"made/table1-digits-test-along", "made/table1-depth-test-along"} <= set(made.figures)
    path.write_text(text.replace("depth = ", "width = "))
    with pytest.raises(
        UserError, match=r"along\.width: columns or rows must be called width and a"
    ):
        experiments.find_all(folder / "experiments")


DIGITS = """\
[columns.digits-10]
about = "ten steps"

[columns.digits-2]
about = "two steps"
"""


def test_along_a_number_places_are_in_its_order_and_the_published_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(svg, "to_svg", lambda figure: drawn.append(figure) or "")
    places = [
        svg.Place(0.9, Spread(20.0, None, 1), None),
        svg.Place(0.0, Spread(80.0, 2.0, 3), Published(81.0)),
        svg.Place(0.001, Spread(85.0, 1.0, 3), Published(86.0)),
    ]
    svg.draw_along({"ours": places, "theirs": places[:1]}, "mu", "accuracy (%)")
    (axes,) = drawn[0].axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "0.001", "0.9"]
    by_label = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert by_label["ours, published"] == [[0, 81], [1, 86]]
    values = {box.get_label(): box.lines[0].get_xydata().tolist() for box in axes.containers}
    assert values == {"ours": [[0, 80], [1, 85], [2, 20]], "theirs": [[2, 20]]}
    bars = axes.containers[0].lines[2][0].get_segments()
    assert [segment[:, 1].tolist() for segment in bars] == [[78, 82], [84, 86], [20, 20]]


def test_each_cell_s_numbers_stand_beside_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(svg, "to_svg", lambda figure: drawn.append(figure) or "")
    dots = [
        svg.Dot("local", Spread(80.0, 2.0, 3), Published(81.0, 0.5)),
        svg.Dot("pefll", Spread(90.0, None, 1), None),
        svg.Dot("fedavg", Spread(40.0, 1.0, 3), Published(50.0)),
    ]
    curves = [
        svg.Series("local", [(0.0, 50.0), (0.0, 80.0)]),
        svg.Series("fedavg", [(1.0, 30.0), (2.0, 40.0)]),
    ]
    svg.draw_cells(curves, dots, "test accuracy")
    left, axes = drawn[0].axes
    level, travelling = left.get_lines()
    assert level.get_ydata() == [80.0, 80.0]  # what training that sends nothing came to
    assert travelling.get_xydata().tolist() == [[1, 30], [2, 40]]
    places = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    names = {int(place): text.get_text() for place, text in places}
    found: dict[tuple[str, bool], tuple[float, list[float]]] = {}
    for box in axes.containers:
        ((value, height),) = box.lines[0].get_xydata().tolist()
        (bar,) = box.lines[2][0].get_segments()
        found[names[round(height)], height > round(height)] = value, bar[:, 0].tolist()
    measured = {
        ("local", False): (80, [78, 82]),
        ("pefll", False): (90, [90, 90]),
        ("fedavg", False): (40, [39, 41]),
    }
    published = {("local", True): (81, [80.5, 81.5]), ("fedavg", True): (50, [50, 50])}
    assert found == measured | published


def test_ids_of_figures_do_not_meet_on_a_page() -> None:
    svg = '<svg id="a"><use href="#a"/><g clip-path="url(#a)"/></svg>'
    page = pages.page("{figure x/1}\n\n{figure x/2}\n", {"x/1": svg, "x/2": svg}, "T")
    for mark in ("x_1", "x_2"):
        told = f'<svg id="{mark}_a"><use href="#{mark}_a"/><g clip-path="url(#{mark}_a)"/></svg>'
        assert told in page


def test_a_figure_that_a_table_names_is_of_the_records_that_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracy over rounds of each column by itself, the shift of all of them together."""
    of_both = TABLE.replace("[rows.local]", '[columns.more]\nabout = "more"\n\n[rows.local]')
    made = of_both.replace("\nset.rounds", '\nfigures = ["rounds", "shift"]\nset.rounds')
    (folder / "experiments" / "made" / "table1.toml").write_text(made)
    for seed in (0, 1):
        record(folder, "local", seed, [5, 5, 5, 5])
    record(folder, "local", 4, [5, 5, 5, 5], place="made/table1-more-local")
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    record(folder, "fedavg", 3, [9, 9, 9, 9], rounds=3)  # of other settings
    drawn: list[dict[str, list[int]]] = []

    def draw(runs: Any) -> None:
        seeds = {name: [run.summary["seed"] for run in of] for name, of in runs.items()}
        drawn.append(seeds)

    monkeypatch.setattr(report.learned, "OF_RUNS", {"rounds": draw, "shift": draw})
    monkeypatch.setattr(report.learned, "can_draw", lambda name, run: True)
    monkeypatch.setattr(report, "to_svg", lambda figure: "<svg/>")
    told = report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))
    assert drawn == [
        {"Local": [0, 1], "FedAvg": [0]},
        {"Local": [4]},
        {"Local": [0, 1, 4], "FedAvg": [0]},
    ]
    assert "#### digits, 5 clients: test accuracy over rounds, 2 seeds\n" in told.text
    assert "#### more: test accuracy over rounds, one seed\n" in told.text
    assert "#### Digits: accuracy of novel clients over their distance" in told.text
    assert "made/table1-more-rounds" in told.figures


def test_examples_of_novel_clients_are_drawn_in_the_order_of_their_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 7, 5])
    for count, accuracy in ((10, 0.25), (30, 0.5), (100, 0.75)):
        told = json.dumps({"novel": {"accuracy": accuracy}})
        (path / f"novel-n{count}.json").write_text(told)
    drawn: list[Any] = []
    monkeypatch.setattr(report, "draw_series", lambda series, *_: drawn.extend(series) or "<svg/>")
    report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))
    assert [one.points for one in drawn] == [[(10, 25), (30, 50), (100, 75)]]


def test_noise_and_examples_of_novel_clients_are_a_table(folder: Path) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 7, 5])
    for name, accuracy in (("n10", 0.5), ("n30", 0.75), ("n10-epsilon0.1", 0.25)):
        (path / f"novel-{name}.json").write_text(json.dumps({"novel": {"accuracy": accuracy}}))
    made = report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))
    assert row(made.text, "no noise") == ["no noise", "50.0", "75.0"]
    assert row(made.text, "epsilon 0.1") == ["epsilon 0.1", "25.0", "–"]
    assert "made/table1-digits-fedavg/seed0-served" in made.figures
    assert "#### digits, 5 clients: FedAvg: accuracy of novel clients (%), by noise" in made.text
    other = record(folder, "fedavg", 1, [6, 6, 7, 5])
    (other / "novel-n10.json").write_text(json.dumps({"novel": {"accuracy": 0.125}}))
    both = report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))
    first, second = (both.figures[f"made/table1-digits-fedavg/seed{s}-served"] for s in (0, 1))
    assert first == made.figures["made/table1-digits-fedavg/seed0-served"] != second
    for wrong in ("{}", '{"novel": {"accuracy": 50}}', '{"novel": {"accuracy": NaN}}'):
        (path / "novel-n10.json").write_text(wrong)
        with pytest.raises(UserError, match="must be what evaluate --novel --json prints"):
            report.of_papers(folder / "results", experiments.find_all(folder / "experiments"))

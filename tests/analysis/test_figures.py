"""What curves go along, many runs in one figure, the page, and in what runs differ."""

import json
import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from finished_runs import Finished, evaluation, finished
from hyperfed.analysis.comparison import compare
from hyperfed.analysis.differences import differences, table
from hyperfed.analysis.figures import TOGETHER, curve, draw_accuracy
from hyperfed.analysis.page import content, write_page
from hyperfed.errors import UserError


def moved(run: Finished, cohort: float = 2) -> Finished:
    """The same with bytes and seconds in its evaluations of three clients."""
    run.config["cohort"] = cohort
    told = [
        replace(e, bytes_down=10**6 * e.round, bytes_up=10**5, seconds=e.round / 4)
        for e in run.evaluations
    ]
    return replace(run, evaluations=tuple(told))


@pytest.mark.parametrize(
    ("axis", "cohort", "places"),
    [
        ("rounds", 2, (10, 20)),
        ("client-visits", 2, (20, 40)),
        ("client-visits", 5, (30, 60)),  # more than there are
        ("client-visits", 0.5, (20, 40)),  # one and a half, rounded up
        ("mb", 2, (10.1, 20.1)),
        ("seconds", 2, (2.5, 5.0)),
    ],
)
def test_curves_go_along_what_is_asked_for(axis, cohort, places):
    run = moved(finished("pfedhn"), cohort)
    found = curve(run, compare([run])[0], axis)
    assert [place for place, _ in found] == pytest.approx(places)
    assert [accuracy for _, accuracy in found] == [75.0, 60.0]


def test_an_axis_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="one of rounds, client-visits, mb, seconds, came '"):
        draw_accuracy([finished("a")], tmp_path / "a.png", "epochs")
    assert not list(tmp_path.iterdir())


def test_many_runs_have_axes_of_their_own_the_best_first(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    few = [finished(f"m{i}", test_accuracy=i / 100) for i in range(TOGETHER)]
    draw_accuracy(few, tmp_path / "a.png")
    assert len(drawn[0].axes) == 2
    best = finished("best", test_accuracy=0.9)
    of_three = replace(best.evaluations[0], client_accuracy=(0.5, 1.0, 0.9))
    best = replace(best, evaluations=(of_three, *best.evaluations[1:]))
    draw_accuracy([*few, best], tmp_path / "b.png", "rounds")
    *panels, clients = [axes for axes in drawn[1].axes if axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [
        "best  90.0 %",
        *(f"m{i}  {i}.0 %" for i in range(TOGETHER - 1, -1, -1)),
    ]
    for axes in panels:  # the others in grey, and its own
        assert len(axes.lines) == len(panels) + 1
    names = [text.get_text() for text in clients.get_yticklabels()]
    assert names == [f"m{i}" for i in range(TOGETHER)] + ["best"]  # from below
    drawn_at = [sorted(points.get_offsets()[:, 0].tolist()) for points in clients.collections]
    assert drawn_at == [[50.0, 90.0, 100.0], *[[50.0, 100.0]] * TOGETHER]
    medians = [line.get_xdata()[0] for line in clients.lines]
    assert medians == [90.0, *[75.0] * TOGETHER]


def of_seed(method: str, seed: int, right: int, best: int = 10) -> Finished:
    """A run whose clients have so many of ten right, first half of them and then all."""
    run = moved(finished(method, seed, best_round=best, test_accuracy=right / 10))
    told = [evaluation(e.round, e.split, [right * e.round // 20, right]) for e in run.evaluations]
    moved_by = [replace(e, bytes_up=seed * 10**6) for e in told]
    return replace(run, evaluations=tuple(moved_by))


def test_seeds_are_one_curve_of_their_mean_with_a_band_from_lowest_to_highest(
    tmp_path, monkeypatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    runs = [of_seed("a", 0, 4), of_seed("b", 0, 6), of_seed("a", 1, 8, best=20), of_seed("a", 2, 6)]
    runs.append(runs[2])  # a seed that ran twice counts once
    draw_accuracy(runs, tmp_path / "a.png", "mb")
    left, right = drawn[0].axes
    of_a, of_b = left.lines
    assert (of_a.get_label(), of_b.get_label()) == ("a", "b")
    assert of_a.get_ydata().tolist() == pytest.approx([45.0, 60.0])
    assert of_a.get_xdata().tolist() == pytest.approx([1.0, 1.0])  # of four runs
    assert (of_a.get_markevery(), of_b.get_markevery()) == ([0, 1], [0])
    (band,) = left.collections
    heights = sorted({round(float(y), 6) for _, y in band.get_paths()[0].vertices})
    assert heights == [30.0, 40.0, 60.0, 80.0]
    clients = [sorted(points.get_offsets()[:, 1].tolist()) for points in right.collections]
    assert clients == [[20.0, 30.0, 40.0, 60.0, 80.0, 80.0, 80.0, 80.0], [30.0, 60.0]]
    assert left.get_title().startswith("Mean and range over seeds; ")
    several = [of_seed(f"m{i}", seed, 4 + seed) for i in range(TOGETHER) for seed in range(2)]
    draw_accuracy(several, tmp_path / "b.png")
    assert len(drawn[1].axes) == 2
    draw_accuracy([*several, *runs], tmp_path / "c.png")
    titles = [axes.get_title() for axes in drawn[2].axes if axes.get_title()]
    assert titles == ["a  60.0 %", "b  60.0 %", *(f"m{i}  45.0 %" for i in range(TOGETHER))]


def test_long_names_are_in_the_legend_alone_or_take_lines_of_a_title(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    runs = [finished(f"a method whose name is long, {i}") for i in range(TOGETHER + 1)]
    draw_accuracy(runs[:3], tmp_path / "a.png")
    _, right = drawn[0].axes
    assert [text.get_text() for text in right.get_xticklabels()] == [""] * 3
    assert right.get_xlabel() == "method, as above"
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"a method whose name is long, {i}" for i in range(3)
    ]
    draw_accuracy(runs, tmp_path / "b.png")
    assert drawn[1].axes[0].get_title() == "a method whose name is long, 0\n75.0 %"


def test_a_best_round_without_a_test_value_has_no_mark(tmp_path, monkeypatch):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    run = moved(finished("local", test_accuracy=None))
    first = replace(run.evaluations[0], accuracy=None, client_accuracy=(None,) * 3)
    run = replace(run, evaluations=(first, *run.evaluations[1:]))
    for runs in ([run], [run, *(moved(finished(f"m{i}")) for i in range(TOGETHER))]):
        draw_accuracy(runs, tmp_path / "a.png")
        path = tmp_path / "page.html"
        write_page(runs, path)
        assert content(runs)["runs"][0]["best_point"] is None
    assert list(drawn[0].axes[0].lines[0].get_markevery()) == []


def test_the_round_that_is_shown_is_called_best_only_where_validation_data_say_so(
    tmp_path, monkeypatch
):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    judged = moved(finished("a"))
    unjudged = moved(finished("b", best_round=20))
    unjudged = replace(unjudged, evaluations=unjudged.evaluations[:2])  # no validation data
    told = {}
    for name, runs in {"a": [judged], "b": [unjudged], "ab": [judged, unjudged, judged]}.items():
        draw_accuracy(runs, tmp_path / "a.png")
        told[name] = content(runs)["chosen_round"]
        assert [axes.get_title() for axes in drawn[-1].axes] == [
            f"All clients; marked: {told[name]}",
            f"Each client, at the {told[name]}",
        ]
    assert told == {
        "a": "best validation round",
        "b": "last round",
        "ab": "best validation round or last round",
    }
    draw_accuracy(
        [unjudged, *(moved(finished(f"m{i}")) for i in range(TOGETHER))], tmp_path / "b.png"
    )
    assert drawn[-1].axes[-1].get_xlabel() == (
        "test accuracy of a client (%), at the last round or best validation round; bar: median"
    )


def test_the_page_says_whether_runs_saw_the_same_data():
    for data, same in (("abc", True), ("other", False)):
        runs = [moved(finished("a")), moved(finished("b", data_fingerprint=data))]
        assert content(runs)["same_data"] is same


def test_the_page_has_further_metrics_of_known_clients_and_of_newcomers():
    (run,) = content([moved(finished("fedavg", test_f1=0.5, novel_f1=0.25))])["runs"]
    assert (run["test_f1"], run["novel_f1"]) == (0.5, 0.25)
    assert (run["shown"]["test_f1"], run["shown"]["novel_f1"]) == ("50.0", "25.0")


def test_the_page_says_whose_numbers_lack_clients():
    runs = [finished("local", evaluated="2 of 3"), finished("pfedhn", evaluated="3 of 3")]
    (told,) = content([moved(run) for run in runs])["missing"]
    assert told.startswith("local: evaluated 2 of 3 clients: the test numbers are without")


def test_the_page_has_everything_in_it_and_loads_nothing(tmp_path):
    runs = [
        moved(finished("local", test_accuracy=0.8525, bytes_up=36_156)),
        moved(finished("pfedhn"), 1),
    ]
    runs[0].config["method"]["note"] = runs[1].config["method"]["note"] = "</script>"
    runs[1].config["method"]["note"] = "<b>"
    path = tmp_path / "page.html"
    write_page(runs, path, "seconds")
    text = path.read_text()
    assert not re.search(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    assert text.count("</script>") == 2
    found = json.loads(text.partition('type="application/json">')[2].partition("</script>")[0])
    assert found == json.loads(json.dumps(content(runs, "seconds")))
    assert found["axis"] == "seconds"
    local = found["runs"][0]
    assert local["shown"]["test"] == "85.2"
    assert local["shown"]["novel"] == "–"
    assert (local["shown"]["bytes_down"], local["shown"]["bytes_up"]) == ("1.5", "0.036")
    assert local["curves"]["client-visits"] == [[20, 75.0], [40, 60.0]]
    assert local["clients"] == [50.0, 100.0]
    assert local["best_point"] == 0
    assert found["differences"]["cohort"] == {"2": ["local"], "1": ["pfedhn"]}
    assert found["differences"]["method.note"] == {"</script>": ["local"], "<b>": ["pfedhn"]}


def test_all_settings_in_which_runs_differ_are_told():
    runs = [finished("pfedhn", seed) for seed in range(3)] + [finished("moon", 0)]
    for number, run in enumerate(runs):
        run.config["method"] |= {"a": number, "b": number // 2, "c": 7, "lr": None}
        run.config["engine"]["name"] = str(number)  # changes no number
    runs[3].config["method"] |= {"temperature": 3}
    del runs[3].config["method"]["b"]  # of another method: not the same thing
    runs[3].config["track"] = "mlflow"
    runs[3].config["method"]["lr"] = 0.5
    rows = [
        replace(row, label=label, group=label)
        for row, label in zip(compare(runs), ["p0", "p1", "p2", "m"], strict=True)
    ]
    assert differences(runs, rows) == {
        "seed": {"0": ["p0", "m"], "1": ["p1"], "2": ["p2"]},
        "method.a": {"0": ["p0"], "1": ["p1"], "2": ["p2"], "3": ["m"]},
        "method.b": {"0": ["p0", "p1"], "1": ["p2"]},
        "method.lr": {"none": ["p0", "p1", "p2"], "0.5": ["m"]},
    }
    assert differences(runs[:1], rows[:1]) == {}


def test_runs_that_differ_by_their_seeds_are_named_once_where_settings_differ():
    runs = [finished(method, seed) for method in ("pfedhn", "moon") for seed in range(3)]
    for run in runs[:3]:
        run.config["cohort"] = 2
    for run in runs[3:]:
        run.config["cohort"] = 1
    assert differences(runs, compare(runs)) == {"cohort": {"2": ["pfedhn"], "1": ["moon"]}}


def test_most_of_many_runs_are_the_others():
    many = {"lr": {"0.1": list("abcdefg"), "0.2": ["x", "y"]}}
    runs = table(many).columns[2]
    assert list(runs.cells) == ["the other 7", "x, y"]
    few = {"lr": {"0.1": list("abcdef"), "0.2": ["x"]}}
    assert list(table(few).columns[2].cells) == ["a, b, c, d, e, f", "x"]

"""``hyperfed compare``: rows, means over seeds, budgets, figures, and what is not compared."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from apps.cli.checks import SMALL, failure
from hyperfed.analysis import figures
from hyperfed.apps.cli import main
from hyperfed.runs.folder import RunFolder, read_run

pytestmark = pytest.mark.xdist_group("cli")  # which share trained runs


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A folder that holds a finished run on other data."""
    out = Path(tmp_path_factory.mktemp("other"))
    with pytest.raises(SystemExit, match="0"):
        main(["run", "fedavg", *SMALL, "task.clients=5", "--out", str(out), "--quiet"])
    return out


class TestCompare:
    def test_has_a_row_for_each_run(self, cli, trained):
        outcome = cli("compare", trained, trained.parent, "--json")  # the same one, named twice
        assert outcome.err == ""
        (row,) = json.loads(outcome.out)
        summary = read_run(trained).summary
        assert summary is not None
        assert row.pop("folder") == str(trained)
        assert (row.pop("label"), row.pop("group")) == ("pfedhn", "pfedhn")
        none = dict.fromkeys(("best", "to_best", "novel_to_best", "over_local", "local"))
        paired = {"label": "pfedhn"} | none
        assert row.pop("paired") == row.pop("paired_over_seeds") == paired
        assert row.pop("settings")["method.local_steps"] == 2
        assert row == {name: summary[name] for name in row}

    def test_a_terminal_without_all_letters_is_told_the_rest(self, trained, monkeypatch):
        said = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said, encoding="ascii"))
        with pytest.raises(SystemExit, match="0"):
            main(["compare", str(trained)])
        sys.stdout.flush()
        assert " ? " in said.getvalue().decode("ascii")  # the ± of accuracy per client

    def test_warns_where_the_data_differ_and_draws(self, cli, trained, other, tmp_path):
        figure, page = tmp_path / "figure.png", tmp_path / "page.html"
        table = tmp_path / "table.csv"
        files = ("--figure", figure, "--html", page, "--table", table, "--x", "mb")
        outcome = cli("compare", trained, other, *files)
        assert outcome.code == 0
        assert "different data" in outcome.err
        lines = outcome.out.splitlines()
        *_, first, second = lines[:-3]
        assert lines[-3:] == [str(figure), str(page), str(table)]
        assert (first.split()[0], second.split()[0]) == ("pfedhn", "fedavg")
        start = next(n for n, line in enumerate(lines) if line.startswith("task.clients"))
        assert lines[start].split() == ["task.clients", "4", "pfedhn"]
        assert lines[start + 1].split() == ["5", "fedavg"]
        assert '"axis": "mb"' in page.read_text()
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert table.read_text().count("\n") == 3

    def test_says_at_once_what_a_table_cannot_be(self, cli, trained, tmp_path):
        figure = tmp_path / "figure.png"
        files = ("--figure", figure, "--table", tmp_path / "table.xls")
        assert "the name of a table's file must end in .csv or .tex, came" in failure(
            cli("compare", trained, *files)
        )
        assert not figure.exists()

    def test_has_means_over_seeds_where_there_are_several(self, cli, trained, copy):
        line = "mean ± sd over seeds"
        assert line not in cli("compare", trained).out
        for name in ("config.toml", "summary.json"):
            text = (copy / name).read_text()
            (copy / name).write_text(
                text.replace("seed = 0", "seed = 1").replace('"seed": 0', '"seed": 1')
            )
        _, _, means = cli("compare", trained, copy).out.partition(line)
        (row,) = [told.split() for told in means.splitlines() if told.startswith("pfedhn  ")]
        summary = read_run(trained).summary
        val, test = (f"{100 * summary[f'{split}_accuracy']:.1f}" for split in ("val", "test"))
        assert row[1:7] == ["2", val, "±", "0.0", test, "±"]

    def test_compares_the_seeds_of_methods_together(self, cli, trained, copy, other):
        assert cli("compare", trained, other).out.count("the best") == 0  # other data
        folders = [trained, *(copy.with_name(f"like {number}") for number in range(3))]
        for number, folder in enumerate(folders[1:], 1):
            shutil.copytree(trained, folder)
            for name in ("config.toml", "summary.json"):
                text = (folder / name).read_text()
                text = text.replace("seed = 0", f"seed = {number % 2}")
                text = text.replace('"seed": 0', f'"seed": {number % 2}')
                text = text.replace("local_steps = 2", f"local_steps = {2 + number // 2}")
                (folder / name).write_text(text)
        lines = cli("compare", *folders).out.splitlines()
        heads = [number for number, line in enumerate(lines) if "the best" in line]
        last = [line.split()[:2] for line in lines[heads[-1] + 1 :]]
        assert len(heads) == 2
        assert last == [["pfedhn", "local_steps=2"], ["pfedhn", "local_steps=3"]]
        rows = json.loads(cli("compare", *folders, "--json").out)
        together = [row["paired_over_seeds"] for row in rows]
        assert {of["label"] for of in together} == {row["group"] for row in rows}
        own = next(of["to_best"] for of in together if of["to_best"] is not None)
        assert (own["seeds"], own["seeds_low"], own["mark"]) == (2, 0, "noise")
        alone = next(of["to_best"] for of in (row["paired"] for row in rows) if of["to_best"])
        assert (alone["seeds"], alone["seeds_low"]) == (1, None)

    def test_says_over_which_local_gains_are_where_there_are_several(self, cli, trained, copy):
        folders = [trained]
        for steps in (2, 3):
            folders.append(copy.with_name(f"alone {steps}"))
            shutil.copytree(trained, folders[-1])
            for name in ("config.toml", "summary.json"):
                text = (folders[-1] / name).read_text().replace('"pfedhn"', '"local"')
                text = text.replace("local_steps = 2", f"local_steps = {steps}")
                (folders[-1] / name).write_text(text)
        told = "gains over local are over local local_steps=2 of pfedhn"
        assert told in cli("compare", *folders[::-1]).err.splitlines()
        assert "gains over local" not in cli("compare", *folders[:2]).err
        rows = json.loads(cli("compare", *folders, "--json").out)
        assert rows[0]["paired"]["local"] == "local local_steps=2"

    def test_says_whose_numbers_lack_clients(self, cli, trained, copy):
        assert "evaluated" not in cli("compare", trained).err
        lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["missed"] = [{"client": line["clients"][0], "reason": "gone"}]
        (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        summary = json.loads((copy / "summary.json").read_text())
        test, novel = (
            next(len(line["clients"]) for line in lines if line["split"] == split)
            for split in ("test", "novel")
        )
        summary["evaluated"] = f"{test - 1} of {test}"
        summary["novel_evaluated"] = f"{novel - 1} of {novel}"
        (copy / "summary.json").write_text(json.dumps(summary))
        told = f"warning: pfedhn: evaluated {test - 1} of {test} clients: the test numbers are"
        assert told in cli("compare", copy).err
        (row,) = json.loads(cli("compare", copy, "--json").out)
        assert row["evaluated"] == summary["evaluated"]
        assert row["novel_evaluated"] == summary["novel_evaluated"]

    def test_compares_as_of_a_budget(self, cli, trained, other):
        outcome = cli("compare", trained, other, "--at", "rounds=2", "--json")
        assert "as of rounds=2 at most" in outcome.err
        rows = json.loads(outcome.out)
        assert [row["rounds"] for row in rows] == [2, 2]
        assert failure(cli("compare", trained, "--at", "epochs")).count("epochs") == 1

    def test_all_that_it_tells_is_as_of_the_budget(self, cli, trained, tmp_path, monkeypatch):
        drawn = []
        monkeypatch.setattr(figures, "draw_accuracy", lambda runs, *_: drawn.extend(runs))
        own = ("run", "local", *SMALL, "method.local_lr=0.3", "--out", tmp_path, "--quiet")
        alone = Path(cli(*own).out.strip())
        page = tmp_path / "page.html"
        files = ("--html", page, "--figure", tmp_path / "figure.png")
        rows = json.loads(cli("compare", trained, alone, "--at", "rounds=2", *files, "--json").out)
        of = {row["method"]: row["paired"]["over_local"] for row in rows}
        by_round = [
            {e.round: e for e in read_run(path).evaluations if e.split == "test"}
            for path in (trained, alone)
        ]
        gains = {
            number: [
                one - other
                for one, other in zip(*(of[number].main.client for of in by_round), strict=True)
            ]
            for number in (2, 4)
        }
        assert gains[2] != gains[4]
        assert of["pfedhn"]["mean"] == pytest.approx(sum(gains[2]) / len(gains[2]))
        text = page.read_text().partition('type="application/json">')[2].partition("</script>")[0]
        for told in json.loads(text)["runs"]:
            assert [place for place, _ in told["curves"]["rounds"]] == [2]
        assert [{e.round for e in run.evaluations} for run in drawn] == [{2}, {2}]

    def test_leaves_out_what_is_not_done(self, cli, trained, copy):
        RunFolder(copy).summary.unlink()
        outcome = cli("compare", trained, copy, "--json")
        assert f"not done: {copy}" in outcome.err
        assert len(json.loads(outcome.out)) == 1
        outcome = cli("compare", copy)
        assert outcome.code == 2
        assert "error: a run to compare must be done" in outcome.err

    def test_refuses_an_axis_that_is_not_there(self, cli, trained, tmp_path):
        wrong = ("--x", "epochs", "--figure", tmp_path / "figure.png")
        assert "must be one of rounds, client-visits" in failure(cli("compare", trained, *wrong))
        assert not list(tmp_path.iterdir())

    def test_refuses_an_axis_that_no_curve_goes_along(self, cli, trained):
        told = failure(cli("compare", trained, "--x", "mb"))
        assert "--x must come with --figure or --html" in told
        assert "--at mb" in told

    def test_refuses_a_folder_without_runs(self, cli, tmp_path):
        assert str(tmp_path) in failure(cli("compare", tmp_path))
        assert "missing" in failure(cli("compare", tmp_path / "missing"))

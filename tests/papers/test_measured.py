"""Records beside published numbers: whose they are, what differs, the verdict, and the page."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.nets.targets import build_target
from hyperfed.papers import lines, measured, origin, pages, report, reproduction, svg
from hyperfed.papers.measured import UNITS
from hyperfed.runs import config, experiments
from hyperfed.runs.experiments import Published
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import Lost, summarise
from hyperfed.runs.statistics import Spread
from made_tables import TABLE, make_table, record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_table(tmp_path)
    return tmp_path


def collected(folder: Path) -> Any:
    return measured.collect(folder / "results", experiments.find_all(folder / "experiments"))


def verdict(folder: Path, row: str, published: Published | None, judged: bool = True) -> Any:
    (group,) = measured.alike(collected(folder)[0]["made/table1", f"digits-{row}"])
    return measured.verdict(group, "test_accuracy", published, judged=judged)


def test_a_mean_within_the_band_is_reproduced_and_no_other(folder: Path) -> None:
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    record(folder, "fedavg", 1, [7, 6, 6, 7])  # 62.5 on average
    for published, reproduced in [
        (Published(61.0, 0.1), True),  # 1.5 points
        (Published(60.9, 0.1), False),
        (Published(64.0), True),
        (Published(64.1), False),
        (Published(58.5, 2.0), True),  # two spreads
        (Published(58.4, 2.0), False),
    ]:
        assert verdict(folder, "fedavg", published).reproduced is reproduced, published
    assert verdict(folder, "fedavg", None).why == "nothing published"
    assert verdict(folder, "fedavg", Published(62.5), judged=False).reproduced is None


def test_scaled_superseded_and_other_settings_get_no_verdict(folder: Path) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6])
    exact = Published(60.0, 1.0)
    assert verdict(folder, "fedavg", exact).reproduced is True
    origin.Origin("made/table1", "digits-fedavg", scale=0.5).write(path)
    assert verdict(folder, "fedavg", exact).why == "scaled: 0.5 of the rounds"
    origin.Origin("made/table1", "digits-fedavg", superseded="a mistake").write(path)
    assert verdict(folder, "fedavg", exact).why == "superseded: a mistake"
    record(folder, "local", 0, [6, 6, 6, 6], rounds=3)
    assert verdict(folder, "local", exact).why == "other settings: rounds=3 for 4"


def test_settings_that_change_no_number_or_that_a_record_lacks_do_not_differ(folder: Path) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6], **{"engine.workers": 1, "device": "cuda"})
    lack(path, "local_momentum")
    with (path / "config.toml").open("a") as file:
        file.write("of_another_version = 1\n")
    assert verdict(folder, "fedavg", Published(60.0)).reproduced is True


def lack(path: Path, key: str) -> None:
    """Takes a setting from a record."""
    lines = (path / "config.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{key} =")]
    assert len(kept) == len(lines) - 1
    (path / "config.toml").write_text("\n".join(kept) + "\n")


def test_a_setting_that_a_record_lacks_is_its_default_and_not_what_the_cell_wants(
    folder: Path,
) -> None:
    table = folder / "experiments" / "made" / "table1.toml"
    table.write_text(TABLE.replace("novel = 0.2 }", "novel = 0.2, val = 0.3 }"))
    lack(record(folder, "fedavg", 0, [6, 6, 6, 6]), "val")
    said = verdict(folder, "fedavg", Published(60.0))
    assert (said.reproduced, said.why) == (None, "other settings: task.val=not said for 0.3")
    # These kept their momentum before there was a key that says so; others did not.
    for method, kept in [("local", "true"), ("fml", "true"), ("pfedhn_pc", "true")]:
        wanted = measured.flat(config.from_keys(method, {"method.keep_momentum": True}))
        own = config.to_dict(config.from_keys(method, {}))
        del own["method"]["keep_momentum"]
        assert measured.flat(own)["method.keep_momentum"] == kept
        assert measured.differing(own, wanted) == {}
    own = config.to_dict(config.from_keys("fedper", {}))
    del own["method"]["keep_momentum"]
    wanted = measured.flat(config.from_keys("fedper", {"method.keep_momentum": True}))
    assert measured.differing(own, wanted) == {"method.keep_momentum": ("not said", "true")}


def test_a_partition_that_is_left_to_a_data_set_with_a_name_is_the_one_it_has(
    folder: Path,
) -> None:
    for row, partition, why in [
        ("fedavg", "class_shares", "within 60 ± 1.5"),
        ("local", "iid", 'other settings: task.partition="iid" for "class_shares"'),
    ]:
        record(folder, row, 0, [6, 6, 6, 6], **{"task.partition": partition})
        assert verdict(folder, row, Published(60.0)).why == why
    of_ones_own = {"task": {"name": "mine.csv", "partition": None}}
    dealt = [{"task": {"name": "mine.csv", "partition_file": f"/{at}/a.npz"}} for at in "xy"]
    assert measured.differing(dealt[0], measured.flat(dealt[1])) == {}
    assert measured.flat(of_ones_own)["task.partition"] == '"none"'


def test_how_answers_would_be_private_says_nothing_where_they_are_not() -> None:
    def settings(**privacy: Any) -> dict[str, Any]:
        own = {"epsilon": None, "clip": None, "delta": 0.1, "where": "local", "masking": False}
        return {"task": {"name": "mine.csv"}, "privacy": own | privacy}

    usual = measured.flat(settings())
    assert measured.differing(settings(clip=3.0, delta=0.5, where="central"), usual) == {}
    assert measured.differing(settings(clip=3.0, epsilon=8.0), usual).keys() == {"privacy.epsilon"}
    masked = measured.flat(settings(masking=True))
    assert measured.differing(settings(masking=True, clip=3.0), masked).keys() == {"privacy.clip"}


def test_a_record_is_of_the_cell_that_it_names_or_after_which_its_folder_is_called(
    folder: Path,
) -> None:
    called = record(folder, "fedavg", 0, [6, 6, 6, 6])
    named = record(folder, "fedavg", 1, [6, 6, 6, 6], place="elsewhere/x")
    origin.Origin("made/table1", "digits-trained").write(named)
    alone = record(folder, "fedavg", 2, [6, 6, 6, 6], place="elsewhere/y")
    unfinished = record(folder, "local", 0, [1, 1, 1, 1])
    (unfinished / "summary.json").unlink()
    cells, others = collected(folder)
    found = {cell: [one.record.path for one in several] for (_, cell), several in cells.items()}
    assert found == {"digits-fedavg": [called], "digits-trained": [named]}
    assert [record.path for record in others] == [alone]
    said = {"table": "made/table1", "cell": "digits-trained"}
    for wrong, told in [
        ({"table": 1}, "must say of what a record is, but: table: Input should be a valid string"),
        ({"scale": 2}, "scale: Input should be less than or equal to 1"),
        ({"scale": 0}, "scale: Input should be greater than 0"),
        ({"superseded": "x |"}, "superseded: String should match"),
        ({"table": "made/table9"}, "but there is no made/table9:digits-trained; give the folder"),
        ({"cell": "digits-x"}, "but there is no made/table1:digits-x"),
    ]:
        (named / "experiment.json").write_text(json.dumps(said | wrong))
        with pytest.raises(UserError) as refused:
            collected(folder)
        assert told in str(refused.value)
        assert str(refused.value).isprintable()


def test_records_that_differ_in_scale_or_in_being_superseded_are_not_averaged(
    folder: Path,
) -> None:
    for seed, why in enumerate(
        [{}, {"scale": 0.5}, {"superseded": "old"}, {"superseded": "older"}]
    ):
        path = record(folder, "fedavg", seed, [6, 6, 6, seed])
        origin.Origin("made/table1", "digits-fedavg", **why).write(path)
    groups = measured.alike(collected(folder)[0]["made/table1", "digits-fedavg"])
    assert [[one.summary["seed"] for one in group] for group in groups] == [[0], [1], [2], [3]]


def test_a_cost_is_an_eighth_of_both_ways_in_mebibytes_and_gets_no_verdict(folder: Path) -> None:
    """Those of pFedLA's table 3: 600 rounds of ten clients, who are sent a model and return one."""
    for target, shape, retained, published in [
        ("pfedla_cnn", (3, 32, 32), (), 693.98),
        ("lenet", (1, 28, 28), ("fc3", "fc1"), 312.52),
        ("lenet", (1, 28, 28), ("fc3",), 488.65),
    ]:
        net = build_target(target, input_shape=shape, classes=10)
        each = {name: value.nbytes for name, value in net.state_dict().items()}
        down = sum(n for name, n in each.items() if name.split(".")[0] not in retained)
        summary = {"bytes_down": 6000 * down, "bytes_up": 6000 * sum(each.values())}
        assert round(UNITS["eighth_mebibytes"][1](summary), 2) == published
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    (group,) = measured.alike(collected(folder)[0]["made/table1", "digits-fedavg"])
    said = measured.verdict(group, "eighth_mebibytes", Published(1.0), judged=True)
    assert (said.reproduced, said.why) == (None, "no accuracy")


def test_clients_that_a_metric_is_about_are_those_of_its_split_and_size(folder: Path) -> None:
    path = record(folder, "fedavg", 0, [1, 2, 3, 4])
    told = json.loads((path / "summary.json").read_text())
    novel = summarise(
        round=4, split="novel", clients=[4], count=[10], correct=[9], loss=[1.0],
        masked_correct=[10], zeroed_correct=[8], bytes_down=0, bytes_up=0, seconds=0.0,
    )  # fmt: skip
    (line,) = (path / "metrics.jsonl").read_text().splitlines()
    own = json.loads(line) | {"client_masked_accuracy": [0.5, 0.6, 0.7, 0.8]}
    own |= {"client_zeroed_accuracy": [0.2, None, 0.4, 0.5]}
    (path / "metrics.jsonl").write_text(f"{json.dumps(own)}\n")
    RunFolder(path).append(novel)
    told |= {"sizes": ["S", "M", "S", "M"], "novel_accuracy": 0.9}
    (path / "summary.json").write_text(json.dumps(told))
    ((one,),) = collected(folder)[0].values()
    for metric, clients in [
        ("test_accuracy", {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}),
        ("test_accuracy_S", {0: 0.1, 2: 0.3}),
        ("test_accuracy_M", {1: 0.2, 3: 0.4}),
        ("novel_accuracy", {4: 0.9}),
        ("test_masked_accuracy", {0: 0.5, 1: 0.6, 2: 0.7, 3: 0.8}),
        ("novel_masked_accuracy", {4: 1.0}),
        ("test_zeroed_accuracy", {0: 0.2, 2: 0.4, 3: 0.5}),
        ("novel_zeroed_accuracy", {4: 0.8}),
    ]:
        assert one.scores(metric).clients == clients, metric
    del own["client_zeroed_accuracy"]  # as of before it was told
    (path / "metrics.jsonl").write_text(f"{json.dumps(own)}\n")
    RunFolder(path).append(novel)
    ((old,),) = collected(folder)[0].values()
    assert old.scores("test_zeroed_accuracy").clients == {}
    assert measured.plain("novel_zeroed_accuracy") == "novel_accuracy"
    assert measured.plain("test_zeroed_accuracy") == "test_accuracy"
    assert one.value("novel_accuracy") == 90


def written(folder: Path, name: str, *options: str) -> str:
    out = folder / name
    records = ["--records", str(folder / "results"), "--experiments", str(folder / "experiments")]
    with pytest.raises(SystemExit) as leaving:
        main(["report", "--out", str(out), *records, *options])
    assert leaving.value.code == 0
    return out.read_text()


def row(text: str, beginning: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {beginning} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def edited(path: Path, missed: int = 0, **summary: Any) -> None:
    """Changes a record's summary, and lacks some clients in its evaluations."""
    (line,) = (path / "metrics.jsonl").read_text().splitlines()
    gone = [{"client": client, "reason": "gone"} for client in range(missed)]
    (path / "metrics.jsonl").write_text(f"{json.dumps(json.loads(line) | {'missed': gone})}\n")
    told = json.loads((path / "summary.json").read_text()) | {"evaluated": f"{4 - missed} of 4"}
    (path / "summary.json").write_text(json.dumps(told | summary))


def test_where_clients_are_missing_there_is_no_verdict_and_it_is_said(folder: Path) -> None:
    edited(record(folder, "fedavg", 0, [6, 6, 6, 6]))
    exact = Published(60.0)
    assert verdict(folder, "fedavg", exact).reproduced is True
    edited(record(folder, "fedavg", 1, [6, 6, 6, 6]), missed=3)
    assert verdict(folder, "fedavg", exact) == measured.Verdict(
        None, "seed 1: evaluated 1 of 4 clients; within 60 ± 1.5"
    )
    assert verdict(folder, "fedavg", None).why.endswith("of 4 clients; nothing published")
    edited(record(folder, "fedavg", 3, [2, 2, 2, 2], place="all/local"), missed=1)
    text = written(folder, "report.md")
    assert row(text, "FedAvg")[4] == "none (1)"
    assert "- (1) seed 1: evaluated 1 of 4 clients; within 60 ± 4" in text
    assert "- local, seed 3: evaluated 3 of 4 clients: the test numbers are without" in text


def test_a_verdict_on_novel_clients_rests_on_all_of_these(folder: Path) -> None:
    for seed, evaluated, novel_evaluated in ((0, 3, 1), (1, 4, 0)):
        path = record(folder, "fedavg", seed, [6, 6, 6, 6])
        told = json.loads((path / "summary.json").read_text())
        told |= {"novel_accuracy": 0.6, "novel_evaluated": f"{novel_evaluated} of 1"}
        edited(path, missed=4 - evaluated)
        novel = summarise(
            round=4, split="novel", clients=[4], count=[10], correct=[6], loss=[1.0],
            masked_correct=[6], zeroed_correct=[6], bytes_down=0, bytes_up=0, seconds=0.0,
            missed=[] if novel_evaluated else [Lost(4, "gone")],
        )  # fmt: skip
        RunFolder(path).append(novel)
        told["evaluated"] = f"{evaluated} of 4"
        (path / "summary.json").write_text(json.dumps(told))
    (group,) = measured.alike(collected(folder)[0]["made/table1", "digits-fedavg"])
    for metric, whole, lacking in (
        ("novel_accuracy", 0, "seed 1: evaluated 0 of 1 clients; within 60 ± 1.5"),
        ("test_accuracy", 1, "seed 0: evaluated 3 of 4 clients; within 60 ± 1.5"),
    ):
        exact = Published(60.0)
        assert measured.verdict([group[whole]], metric, exact, judged=True).reproduced is True
        assert measured.verdict(group, metric, exact, judged=True).why == lacking


def test_where_a_seed_has_no_number_there_is_no_verdict_and_it_is_said(folder: Path) -> None:
    record(folder, "fedavg", 0, [6, 6, 6, 6])
    lacking = record(folder, "fedavg", 1, [6, 6, 6, 6])
    told = json.loads((lacking / "summary.json").read_text())
    del told["test_masked_accuracy"]
    (lacking / "summary.json").write_text(json.dumps(told))
    (group,) = measured.alike(collected(folder)[0]["made/table1", "digits-fedavg"])
    said = measured.verdict(group, "test_masked_accuracy", Published(60.0), judged=True)
    assert said == measured.Verdict(None, "seed 1: no number; within 60 ± 1.5")
    for which in (group[:1], group[1:]):
        said = measured.verdict(which, "test_masked_accuracy", Published(60.0), judged=True)
        assert said.reproduced is (True if which == group[:1] else None)
    assert said.why == "not measured by these records"


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
        *("+10.0 [-3.0, 23.0] noise, 1 seed", "-30.0 [-43.0, -17.0], 1 seed", "4 × 2 × 50 steps"),
        *("4", "1.5", "15312.5"),
    ]
    assert row(text, "Local")[4:7] == ["none (1)", "50.0", "–"]
    assert "- (1) other settings: method.local_steps=7 for 50" in text
    assert row(text, "FedAvg, trained on")[4:8] == [
        "none (2)",
        "90.0",
        "+40.0 [40.0, 40.0]",
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


def test_the_best_is_so_on_the_seeds_that_both_have(folder: Path) -> None:
    """FedAvg has the higher mean, of the easier seed alone."""
    for place in ("", "aside/"):
        record(folder, "local", 0, [9, 9, 9, 9], place=place and f"{place}local")
        record(folder, "local", 1, [2, 2, 2, 2], place=place and f"{place}local")
        record(folder, "fedavg", 0, [6, 6, 6, 6], place=place and f"{place}fedavg")
    text = written(folder, "report.md")
    for local, fedavg in (("Local", "FedAvg"), ("local", "fedavg")):
        assert row(text, local)[7] == "best"
        assert row(text, fedavg)[7] == "-30.0 [-30.0, -30.0]"


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
    assert row(text, "FedAvg")[6:8] == ["-10.0 [-10.0, -10.0]"] * 2


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
    assert lines.Line("", [one], "test_accuracy", "", Spread(0, None, 1), None, None).budget[1] == 2
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


@pytest.mark.parametrize("why", [{"scale": 0.5}, {"superseded": "of older code"}])
def test_no_verdict_rests_on_a_scaled_record_or_a_superseded_one(
    folder: Path, why: dict[str, Any]
) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6])
    assert collected(folder)[0]["made/table1", "digits-fedavg"][0].counts
    origin.Origin("made/table1", "digits-fedavg", **why).write(path)
    assert not collected(folder)[0]["made/table1", "digits-fedavg"][0].counts


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
            bytes_down=0, bytes_up=0, seconds=0.0,
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
    assert row(text, "long")[6:8] == ["+10.0 [10.0, 10.0]", "best"]
    assert row(text, "short")[6] == "+30.0 [30.0, 30.0]"
    assert row(text, "local_2")[6] == "–"
    assert "- gains over local are over local_4 of long\n" in text
    assert "- gains over local are over local_2 of short\n" in text


def untested(path: Path) -> None:
    """Has no client of a record have an example to test on."""
    nobody = summarise(
        round=4, split="test", clients=[0, 1, 2, 3], count=[0] * 4, correct=[0] * 4,
        loss=[0.0] * 4, masked_correct=[0] * 4, zeroed_correct=[0] * 4,
        bytes_down=0, bytes_up=0, seconds=0.0,
    )  # fmt: skip
    (path / "metrics.jsonl").unlink()
    RunFolder(path).append(nobody)
    summary = json.loads((path / "summary.json").read_text())
    gone = [key for key in summary if "accuracy" in key]
    (path / "summary.json").write_text(json.dumps(summary | dict.fromkeys(gone)))


def test_records_without_a_number_hide_none_of_the_same_cell(folder: Path) -> None:
    untested(record(folder, "fedavg", 0, [6, 6, 6, 6]))
    record(folder, "fedavg", 1, [7, 7, 7, 7], rounds=2)
    assert row(written(folder, "report.md"), "FedAvg")[2:4] == ["70.0", "1"]


def test_a_record_of_no_table_without_a_number_has_a_dash_and_a_note(folder: Path) -> None:
    """The second seed of FedAvg has no test examples."""
    for seed in (0, 1):
        record(folder, "local", seed, [5, 5, 5, 5], place="few/local")
        record(folder, "fedavg", seed, [6, 6, 6, 6], place="few/fedavg")
    untested(folder / "results" / "few" / "fedavg" / "seed1")
    text = written(folder, "report.md")
    assert row(text, "fedavg")[1:6] == ["2", "–", "–", "–", "–"]
    assert row(text, "fedavg")[6:8] == ["+10.0 [10.0, 10.0], 1 seed", "–"]
    assert row(text, "local")[2:6] == ["50.0 ± 0.0", "50.0 ± 0.0", "50.0 ± 0.0", "–"]
    assert "\n- fedavg, seed 1: no test accuracy\n" in text
    assert text.count("no test accuracy") == 1


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
    assert row(text[a:b], "fedavg")[2:7] == ["90.0", "90.0", "90.0", "–", "+60.0 [60.0, 60.0]"]
    assert row(text[b:], "fedavg")[2:7] == ["60.0", "60.0", "60.0", "–", "+10.0 [10.0, 10.0]"]
    assert row(text[:a], "aside")[6] == "+10.0 [10.0, 10.0]"  # of those that stand in `kinds`


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
    for row, correct in (("depth0.5", 5), ("depth3", 6), ("depth20", 9)):
        record(folder, f"10-{row}", 0, [correct] * 4)
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


def test_ids_of_figures_do_not_meet_on_a_page() -> None:
    svg = '<svg id="a"><use href="#a"/><g clip-path="url(#a)"/></svg>'
    page = pages.page("{figure x/1}\n\n{figure x/2}\n", {"x/1": svg, "x/2": svg}, "T")
    for mark in ("x_1", "x_2"):
        told = f'<svg id="{mark}_a"><use href="#{mark}_a"/><g clip-path="url(#{mark}_a)"/></svg>'
        assert told in page


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


def test_a_table_that_measures_what_no_summary_has_is_refused(folder: Path) -> None:
    make_table(folder, TABLE.replace('metric = "test_accuracy"', 'metric = "test_accuracies"'))
    with pytest.raises(UserError, match=r"measures\.test\.metric must be one of .*test_accuracies"):
        collected(folder)
    with pytest.raises(UserError, match=r"measures\.test\.metric must be one of"):
        reproduction.find("made/table1", folder / "experiments", "*")


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

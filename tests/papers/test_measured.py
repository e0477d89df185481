"""Records beside published numbers: whose they are, what differs, the verdict."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyperfed.analysis.statistics import Spread
from hyperfed.errors import UserError
from hyperfed.nets.targets import build_target
from hyperfed.papers import measured, origin, reproduction
from hyperfed.papers.measured import UNITS
from hyperfed.runs import config
from hyperfed.runs.experiments import Published
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import REHEARSAL, Lost, summarise
from made_tables import TABLE, collected, make_table, record, row, written


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
    for cell, partition, why in [
        ("fedavg", "class_shares", "within 60 ± 1.5"),
        ("local", "iid", 'other settings: task.partition="iid" for "class_shares"'),
    ]:
        record(folder, cell, 0, [6, 6, 6, 6], **{"task.partition": partition})
        assert verdict(folder, cell, Published(60.0)).why == why
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


def test_a_cell_that_leaves_the_clients_out_has_those_of_its_data() -> None:
    """Where these are divided as they are; elsewhere as many as a run has by default."""

    def settings(**task: Any) -> Any:
        return config.from_keys("fedavg", {"task": task})

    own = {"name": "mine.npz", "partition": "natural", "clients": 1208}
    for left_out in ({"name": own["name"]}, {"name": own["name"], "partition": "natural"}):
        assert measured.differing(settings(**own), measured.flat(settings(**left_out))) == {}
    digits = measured.flat(settings(name="digits"))
    assert measured.differing(settings(name="digits", clients=20), digits) == {}
    assert measured.differing(settings(name="digits", clients=7), digits) == {
        "task.clients": ("7", "20")
    }
    left_out = measured.flat(settings(name=own["name"]))
    for key, value in {"partition": "dirichlet", "features": "x,y"}.items():  # not left to data
        told = measured.differing(settings(**own | {key: value}), left_out)
        assert told.keys() == {f"task.{key}"}


def test_a_record_is_of_the_cell_that_it_names_or_after_which_its_folder_is_called(
    folder: Path,
) -> None:
    called = record(folder, "fedavg", 0, [6, 6, 6, 6])
    named = record(folder, "fedavg", 1, [6, 6, 6, 6], place="elsewhere/x")
    origin.Origin("made/table1", "digits-trained").write(named)
    alone = record(folder, "fedavg", 2, [6, 6, 6, 6], place="elsewhere/y")
    for where in ("", "elsewhere/z"):  # unfinished, and so neither of the cell nor another
        (record(folder, "local", 0, [1, 1, 1, 1], place=where) / "summary.json").unlink()
    cells, others = collected(folder)
    found = {cell: [one.record.path for one in several] for (_, cell), several in cells.items()}
    assert found == {"digits-fedavg": [called], "digits-trained": [named]}
    assert [record.path for record in others] == [alone]
    (alone / "config.toml").write_text("no = settings")
    again, others = collected(folder)  # which has no need of them
    assert again.keys() == cells.keys()
    with pytest.raises(UserError, match="must hold a TOML config"):
        next(others)
    (alone / "config.toml").unlink()
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


def test_clients_of_validation_data_are_those_of_a_rehearsal_where_there_is_one(
    folder: Path,
) -> None:
    """As the number of the summary is that their mean stands beside."""
    path = record(folder, "fedavg", 0, [1, 2, 3, 4])
    for split, right in (("val", [5, 5, 5, 5]), (REHEARSAL, [2, 3, 2, 3])):
        of_split = summarise(
            round=4, split=split, clients=range(4), count=[10] * 4, correct=right, loss=[1.0] * 4,
            masked_correct=right, zeroed_correct=right, bytes_down=0, bytes_up=0, seconds=0.0,
        )  # fmt: skip
        RunFolder(path).append(of_split)
        ((one,),) = collected(folder)[0].values()
        expected = {client: of / 10 for client, of in enumerate(right)}
        assert one.scores("val_accuracy").clients == expected
        assert one.scores("val_zeroed_accuracy").clients == expected


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


@pytest.mark.parametrize("why", [{"scale": 0.5}, {"superseded": "of older code"}])
def test_no_verdict_rests_on_a_scaled_record_or_a_superseded_one(
    folder: Path, why: dict[str, Any]
) -> None:
    path = record(folder, "fedavg", 0, [6, 6, 6, 6])
    assert collected(folder)[0]["made/table1", "digits-fedavg"][0].counts
    origin.Origin("made/table1", "digits-fedavg", **why).write(path)
    assert not collected(folder)[0]["made/table1", "digits-fedavg"][0].counts


def test_a_table_that_measures_what_no_summary_has_is_refused(folder: Path) -> None:
    make_table(folder, TABLE.replace('metric = "test_accuracy"', 'metric = "test_accuracies"'))
    with pytest.raises(UserError, match=r"measures\.test\.metric must be one of .*test_accuracies"):
        collected(folder)
    with pytest.raises(UserError, match=r"measures\.test\.metric must be one of"):
        reproduction.find("made/table1", folder / "experiments", "*")


def test_records_that_count_come_first(folder: Path) -> None:
    record(folder, "local", 0, [6, 6, 6, 6], rounds=3)
    record(folder, "local", 1, [6, 6, 6, 6])
    groups = measured.alike(collected(folder)[0]["made/table1", "digits-local"])
    assert [group[0].counts for group in groups] == [True, False]


def test_the_band_is_of_decimal_numbers() -> None:
    """1.5 points are between these, and a little more in binary."""
    assert 64.4 - 62.9 > 1.5
    first: Any = SimpleNamespace(origin=SimpleNamespace(scale=1, superseded=""), differing={})
    of = Spread(64.4, None, 1), Published(62.9)
    assert measured._verdict(first, "test_accuracy", *of, judged=True).reproduced

"""A run on tables of sites' own: what is known of their columns and labels when it is over."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from safetensors import safe_open

from hyperfed.data.newcomer import rows_like
from hyperfed.errors import UserError
from hyperfed.papers.agreement import read_runs
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.system import toml

pytest.importorskip("flwr")

from commands import command
from engines.flower.sites import DirectLink
from hyperfed.apps.flower import app

KEYS = (
    *(
        "rounds=1",
        "cohort=4",
        "evaluate_every=1",
        "seed=3",
        "track=none",
        "task=clinics",
        "task.target=grade",
    ),
    *("method.local_steps=1", "engine=flower", "engine.sites=2", "engine.timeout=0.1"),
    "engine.superlink=127.0.0.1:1",
)
LABELS = ("severe", "none", "mild")
"""Not in the order of the alphabet, as which nobody is to number them."""


def table(*clients: str, seed: int = 0) -> Any:
    """Returns rows of clients, whose level says the label."""
    rng = np.random.default_rng([seed, len(clients)])
    number = np.tile(np.arange(3), 20 * len(clients))
    return pandas.DataFrame(
        {
            "pulse": number + rng.normal(0, 0.1, len(number)),
            "age": rng.normal(size=len(number)),
            "grade": np.array(LABELS)[number],
            "client": np.repeat(clients, 60),
        }
    )


class Clinics:
    """Two sites with a CSV file each, and a run that is done."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path / "run"
        self.config = config.load("pfedhn", KEYS)
        self.link = DirectLink({})
        for number, clients in ((1, ("ann", "bob")), (2, ("cem", "dan"))):
            data = path / f"{number}.csv"
            table(*clients, seed=number).to_csv(data, index=False)
            self.node(number, data=str(data), labels=",".join(LABELS), target="grade")

    def node(self, number: int, **what: Any) -> None:
        given = {"settings": toml.dumps(config.to_dict(self.config))}
        node_config = {"state": str(self.path / f"state{number}"), **what}
        self.link.sites[number] = app.site_of(given, node_config)

    def train(self) -> None:
        run = app.begin(self.config, self.link, str(self.folder))
        list(run.train())
        run.close()


@pytest.fixture(scope="module")
def clinics(tmp_path_factory: pytest.TempPathFactory) -> Clinics:
    found = Clinics(tmp_path_factory.mktemp("clinics"))
    found.train()
    return found


def test_a_run_at_sites_compares_though_no_setting_says_how_many_clients(clinics: Clinics) -> None:
    (record,) = read_runs([clinics.folder])
    assert record.config["task"]["clients"] == "none"
    assert record.summary is not None
    assert record.summary["task"] == "clinics"
    # In any other run it is a setting, and its absence damage.
    path = clinics.folder / "config.toml"
    before = path.read_text()
    path.write_text(before.replace('"flower"', '"loop"'))
    with pytest.raises(UserError, match=r"task\.clients must be a number from 1, is 'none'"):
        read_runs([clinics.folder])
    path.write_text(before)


def test_labels_that_sites_name_are_those_of_the_run(clinics: Clinics) -> None:
    (record,) = read_runs([clinics.folder])
    assert record.summary is not None
    assert record.summary["labels"] == [*LABELS]
    run = Run.open(clinics.folder)
    assert run.task.labels == LABELS


def test_a_newcomer_brings_a_table_with_the_columns_of_the_sites(
    clinics: Clinics, tmp_path: Path, capsys: Any
) -> None:
    mine = table("eve", seed=9)
    mine["split"] = ["train"] * 50 + ["val"] * 4 + ["test"] * 6
    mine.to_csv(tmp_path / "eve.csv", index=False)
    out = tmp_path / "eve.safetensors"
    given = ("--data", str(tmp_path / "eve.csv"), "--out", str(out), "--json")
    assert command("personalize", str(clinics.folder), *given) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["examples"], told["labelled"]) == (50, True)
    assert "10 rows of" in said.err
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["hyperfed"])["labels"] == [*LABELS]
    task = Run.open(clinics.folder).task
    rows = rows_like(task, mine, "mine")
    assert rows.features == ("pulse", "age")
    assert rows.x.tolist() == mine[["pulse", "age"]].to_numpy()[:50].tolist()
    assert rows.y is not None
    assert rows.y.tolist() == mine["grade"].tolist()[:50]
    # Arrays are the features in their order.
    assert rows_like(task, {"x": rows.x}, "mine").x.tolist() == rows.x.tolist()
    for other in (mine.rename(columns={"age": "years"}), mine[["age", "pulse", "grade"]]):
        with pytest.raises(UserError, match="columns that the sites have, in their order, got"):
            rows_like(task, other, "mine")
    with pytest.raises(UserError, match="split must be train in a row or more, got none"):
        rows_like(task, mine[50:], "mine")
    with pytest.raises(UserError, match="split must be one of train, val, test, got training"):
        rows_like(task, mine.assign(split="training"), "mine")


def test_models_that_a_site_keeps_say_the_names_of_its_labels(clinics: Clinics) -> None:
    site = clinics.link.sites[1]
    frame = Run.open(clinics.folder).task.roster.frame  # type: ignore[attr-defined]
    assert site.source.task(frame, {0: "ann"}).labels == LABELS


def test_labels_beyond_those_that_a_site_names_are_told(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path)
    rows = np.arange(40)
    np.savez(tmp_path / "3.npz", x=np.ones((40, 2)), y=rows % 5, client=rows // 20)
    clinics.node(2, data=str(tmp_path / "3.npz"))
    with pytest.raises(UserError, match=r"among the 3 that other sites name, got 5 at the site of"):
        app.begin(clinics.config, clinics.link, str(clinics.folder))


def test_who_is_left_out_is_in_the_log_and_is_no_site_of_the_summary(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path)
    table("ann", "bob").to_csv(tmp_path / "3.csv", index=False)
    clinics.node(3, data=str(tmp_path / "3.csv"), labels=",".join(LABELS), target="grade")
    clinics.link.keys = {1: "key of 1", 2: "key of 2", 3: "key of 3"}
    clinics.train()
    (record,) = read_runs([clinics.folder])
    assert record.summary is not None
    assert record.summary["sites"] == 2
    log = (clinics.folder / "log.txt").read_text()
    assert "warning: begins without a second client ann: another key, key of 3, says" in log
    assert "warning: begins without a second client bob" in log
    # Where too few are left, who started the run is told of them.
    asked = config.override(clinics.config, ["engine.sites=3"], allowed=["engine."])
    told = r"but 2 did(.|\n)*- not counted: a second client ann: another key"
    with pytest.raises(UserError, match=told):
        app.begin(asked, clinics.link, str(tmp_path / "other"))

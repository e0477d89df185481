"""``hyperfed serve``: newcomers of a run that is done get their models at their own sites."""

import json
import shutil
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hyperfed.apps.flower import submit
from hyperfed.data import tasks
from hyperfed.data.examples import hash_of
from hyperfed.data.roster import Roster
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from hyperfed.runs import config
from hyperfed.runs.newcomers import Newcomer, heard, spoken
from hyperfed.runs.progress import heard_failure
from hyperfed.runs.run import Run
from hyperfed.system import toml
from hyperfed.system.locks import Lock

pytest.importorskip("flwr")

from commands import command
from engines.flower.sites import DirectLink
from hyperfed.apps.flower import app

KEYS = (
    *("rounds=1", "cohort=4", "evaluate_every=1", "task.clients=4", "task.novel=0", "track=none"),
    *("method.local_steps=1", "method.novel_rounds=1", "privacy.epsilon=1", "seed=3"),
    *("engine=flower", "engine.sites=2", "engine.timeout=0.1", "engine.superlink=127.0.0.1:1"),
)
NEW = tasks.build(tasks.TaskConfig("digits", clients=12, novel=0.0), 0)
"""Whose clients come when the run is over."""


def write_data(
    path: Path,
    client: int,
    *,
    shape: tuple[int, ...] | None = None,
    names: Sequence[str] = ("eve",),
) -> None:
    """Writes what newcomers have: all of one client's examples, one after the other's."""
    parts = {part: getattr(NEW, part)[client] for part in ("train", "val", "test")}
    rows = torch.cat([*parts.values()])
    x = NEW.x[rows] if shape is None else NEW.x[rows].reshape(-1, *shape)
    split = [part for part, own in parts.items() for _ in own]
    names = [names[row % len(names)] for row in range(len(rows))]
    np.savez(path, x=x.numpy(), y=NEW.y[rows].numpy(), client=names, split=split, classes=10)


class Place:
    """A run that is done at two sites, whose nodes are still there."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, path / "run"
        self.config = config.load("pfedhn", KEYS)
        self.link = DirectLink({})
        for node, clients in ((5, "0-1"), (3, "2-3")):
            self.node(node, clients=clients)
        self.link.keys = {5: "key of 5", 3: "key of 3"}

    def node(self, number: int, **what: Any) -> None:
        given = {"settings": toml.dumps(config.to_dict(self.config))}
        node_config = {"state": str(self.path / f"state{number}"), **what}
        self.link.sites[number] = app.site_of(given, node_config)

    def newcomer(self, number: int, **what: Any) -> None:
        data = self.path / f"{number}.npz"
        write_data(data, number, shape=what.pop("shape", None))
        usual = {"data": str(data), "site": f"late{number}", "novel": True}
        self.node(number, **(usual | what))

    def models(self, number: int) -> list[Path]:
        return sorted(self.path.glob(f"state{number}/models/run-*/*.safetensors"))

    def welcome(self, sites: int = 1) -> list[Newcomer]:
        asked = config.override(self.config, [f"engine.sites={sites}"], allowed=["engine."])
        return app.welcome(asked, self.link, str(self.folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("trained"))
    run = app.begin(place.config, place.link, str(place.folder))
    list(run.train())
    run.close()
    return place


@pytest.fixture
def place(trained: Place, tmp_path: Path) -> Place:
    shutil.copytree(trained.path, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def test_one_serves_newcomers_of_a_run_at_a_time(place: Place) -> None:
    """Or what was served by one would be missing in what the other writes down."""
    place.newcomer(8)
    with Lock(place.folder), pytest.raises(UserError, match="by one process at a time"):
        place.welcome()
    assert place.models(8) == []


def test_newcomers_are_served_by_the_settings_of_the_run_alone(place: Place) -> None:
    """By those that are submitted theirs sites answer: without noise, had they none."""
    place.newcomer(8)
    bare = config.flat(config.to_dict(place.config)) | {"privacy.epsilon": None}
    place.config = config.from_keys("pfedhn", bare)
    with pytest.raises(UserError, match=r"privacy.epsilon=1.0, came None; submit it with those"):
        place.welcome()
    assert place.models(8) == []


def test_newcomers_are_served_and_nothing_of_the_run_changes(place: Place) -> None:
    before = contents(place.folder)
    place.newcomer(8)
    place.link.keys[8] = "key of 8"
    del place.link.sites[3]
    found = place.welcome()
    assert [(it.client, it.model) for it in found] == [
        ("000000", "known"),
        ("000001", "known"),
        ("late8/eve", "kept"),
    ]
    assert found[-1].value is not None
    (first,) = place.models(8)
    assert len(place.models(5)) == 2  # as before
    after = contents(place.folder)
    assert after.pop("checkpoint/served.safetensors")
    assert after.pop("newcomers.json")
    assert after == before

    # What it let out is there for whoever opens the run.
    accounts = Run.open(place.folder)._newcomers
    assert accounts.keys() == {hash_of("late8/eve")}
    assert len(accounts[hash_of("late8/eve")][0]["multipliers"]) == 1

    # The next time whoever is new then is served, and nobody else is waited for.
    assert Roster.read(place.folder / "newcomers.json").keys["late8/eve"] == "key of 8"
    with pytest.raises(UserError, match=r"engine.sites=1 sites with clients .* 0 did"):
        place.welcome()
    place.newcomer(9)
    assert [(it.client, it.model) for it in place.welcome()[2:]] == [
        ("late8/eve", "known"),
        ("late9/eve", "kept"),
    ]
    assert len(Run.open(place.folder)._newcomers) == 2
    assert (place.models(8), len(place.models(9))) == ([first], 1)


def test_images_are_normalised_as_in_training(place: Place) -> None:
    place.newcomer(8)
    place.welcome()
    (path,) = place.models(8)
    scale = load_file(path)["normalize.scale"].flatten()
    roster = Roster.read(place.folder / "sites.json")
    torch.testing.assert_close(scale, 1 / (255 * torch.tensor(roster.frame.std)))
    assert place.link.sites[8].source.introduce().std != roster.frame.std


def silent(site: Any, content: bytes) -> Exception:
    return NoAnswerError("its site did not answer within 0.1 s")


def test_who_cannot_be_served_is_told_and_others_are(place: Place) -> None:
    place.newcomer(7, shape=(1, 4, 16))
    place.newcomer(8)
    place.newcomer(9)
    place.link.broken[9] = silent
    found = {it.client: (it.model, it.why) for it in place.welcome(3) if it.model != "known"}
    assert found.pop("late8/eve") == ("kept", "")
    assert {model for model, _ in found.values()} == {"not kept"}
    assert "as those of the run are, got (1, 4, 16)" in found["late7/eve"][1]
    assert found["late9/eve"][1] == "its site did not answer within 0.1 s"

    # Who was not is served as soon as that can be.
    place.link.broken.clear()
    assert [it.client for it in place.welcome(2) if it.model == "kept"] == ["late9/eve"]


def test_one_may_be_at_a_site_that_has_clients_of_the_run(place: Place) -> None:
    data = place.path / "more.npz"
    write_data(data, 8, names=("000000", "000001", "eve"))
    place.node(5, data=str(data))
    found = {it.client: it.model for it in place.welcome()}
    assert found == {"eve": "kept", **{f"{known:06d}": "known" for known in range(4)}}
    (model,) = place.models(5)[-1:]
    assert model.name == "_eve.safetensors"
    roster = Roster.read(place.folder / "newcomers.json")
    assert roster.keys["eve"] == "key of 5"
    assert [member.novel for member in roster.members] == [False] * 4 + [True]


def test_another_key_cannot_say_the_names_of_the_run(place: Place) -> None:
    place.node(11, clients="0-1")
    place.link.keys[11] = "another"
    del place.link.sites[5]
    with pytest.raises(UserError, match=r"clients that have no model of the run yet .* but 0 did"):
        place.welcome()


def test_who_comes_beside_a_name_of_another_key_is_served(place: Place) -> None:
    data = place.path / "more.npz"
    write_data(data, 8, names=("000000", "eve"))
    place.node(11, data=str(data))
    place.link.keys[11] = "another"
    del place.link.sites[5], place.link.sites[3]
    assert [(it.client, it.model) for it in place.welcome()] == [("eve", "kept")]


def test_sites_have_as_long_as_this_command_says(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.newcomer(8)
    exchange, waited = place.link.exchange, set()

    def timed(kind: str, contents: Any, timeout: float, most: Any) -> Any:
        waited.add(timeout)
        return exchange(kind, contents, timeout, most)

    monkeypatch.setattr(place.link, "exchange", timed)
    asked = config.override(
        place.config, ["engine.sites=1", "engine.timeout=7"], allowed=["engine."]
    )
    app.welcome(asked, place.link, str(place.folder))
    assert waited == {7.0}


def test_nobody_new_is_an_error(place: Place) -> None:
    told = "engine.sites=1 sites with clients that have no model of the run yet .* 0 did"
    with pytest.raises(UserError, match=told):
        place.welcome()


def test_a_run_that_is_not_done_serves_nobody(place: Place) -> None:
    (place.folder / "summary.json").unlink()
    place.newcomer(8)
    with pytest.raises(UserError, match="must be done before newcomers are served"):
        place.welcome()
    assert command("serve", str(place.folder)) == 2


KEPT = Newcomer("late/eve", "kept", metric="accuracy", value=0.75)
KNOWN = Newcomer("clinic/ann", "known")
LOST = Newcomer('late/"max', "not kept", "its site did not answer within 600 s")


def test_a_line_of_the_log_says_what_became_of_a_newcomer() -> None:
    for newcomer in (KEPT, KNOWN, LOST):
        assert heard(spoken(newcomer) + "\n") == newcomer
    for line in ("", "newcomer: {", 'newcomer: {"client": "a", "model": "sold"}', "round 1 of 2"):
        assert heard(line) is None


@pytest.mark.parametrize(
    ("model", "raises"), [("kept", False), ("known", False), ("not kept", True)]
)
def test_the_servers_run_fails_where_a_newcomer_was_not_served(
    model: Any, raises: bool, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [KEPT, Newcomer("b", model)]
    monkeypatch.setattr(app, "welcome", lambda config, link, folder: found)
    settings = toml.dumps(config.to_dict(config.load("fedavg", ["engine=flower"])))
    context: Any = SimpleNamespace(run_config={"settings": settings, "folder": "run"})
    if raises:
        with pytest.raises(UserError, match="1 of 2 were not, b among them"):
            app.serve_newcomers(None, context)
    else:
        app.serve_newcomers(None, context)
    said = capsys.readouterr().out.splitlines()
    assert [heard(line) for line in said[:2]] == found
    assert [heard_failure(line)[:34] for line in said[2:]] == (
        ["all newcomers must be served, but "] * raises
    )


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_shows_each_client_and_fails_with_the_run(
    code: int, as_json: bool, place: Place, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: dict[str, Any] = {}
    shared = [KEPT, KNOWN, *([LOST] if code else [])]

    def flwr(home: Path, *arguments: str) -> Any:
        if arguments[0] == "run":
            bundle = tomllib.loads((Path(arguments[1]) / "pyproject.toml").read_text())
            submitted["components"] = bundle["tool"]["flwr"]["app"]["components"]
            submitted.update(tomllib.loads(Path(arguments[-1]).read_text()))
            return {"success": True, "run-id": "12"}
        return {"runs": [{"status": f"finished:{'failed' if code else 'completed'}"}]}

    def program(*arguments: str) -> list[str]:
        lines = ["INFO :  Start", *map(spoken, shared), spoken(KEPT)]
        return ["printf", "%s\\n", *lines]

    monkeypatch.setattr(submit, "_flwr", flwr)
    monkeypatch.setattr(submit, "_program", program)
    options = ["engine.timeout=9", *(["--json"] if as_json else [])]
    assert command("serve", str(place.folder), *options) == code
    said = capsys.readouterr()
    assert ("is finished:failed" in said.err) == bool(code)
    if as_json:
        told = json.loads(said.out)
        assert [(it["client"], it["model"], it["value"]) for it in told] == [
            (it.client, it.model, it.value) for it in shared
        ]
    else:
        heading, *rows = (" ".join(line.split()) for line in said.out.splitlines())
        assert heading == "client of its test examples model"
        assert rows[:2] == ["late/eve accuracy 75.0 % kept", "clinic/ann – known"]
        assert rows[2:] == [f'late/"max – not kept: {LOST.why}'] * code
    assert submitted["components"] == {
        "serverapp": f"{app.__name__}:newcomers",
        "clientapp": f"{app.__name__}:client",
    }
    assert submitted["folder"] == str(place.folder)
    sent = app.run_settings({"settings": submitted["settings"]})
    assert (sent.engine.sites, sent.engine.timeout, sent.seed) == (1, 9.0, 3)


def test_where_nobody_came_the_command_shows_no_table(
    place: Place, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise submit.RunFailedError("but 0 did")

    monkeypatch.setattr(submit, "serve", fail)
    assert command("serve", str(place.folder)) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "but 0 did\n")


@pytest.mark.parametrize("key", ["method.local_steps=3", "seed=4", "engine=loop"])
def test_the_command_changes_nothing_but_who_is_asked(key: str, place: Place, capsys: Any) -> None:
    assert command("serve", str(place.folder), key) == 2
    assert "must begin with engine.superlink or " in capsys.readouterr().err

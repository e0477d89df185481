"""The Flower app: what its configurations mean, and what is told where they are wrong."""

import json
import sys
import tomllib
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from hyperfed.apps.flower import submit
from hyperfed.data import site as sitedata
from hyperfed.data.examples import Normalize
from hyperfed.data.roster import RemoteTask, Roster, enrol
from hyperfed.engines.flower import site as answering
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from hyperfed.runs import config, private
from hyperfed.runs.run import Run
from hyperfed.system import toml

pytest.importorskip("flwr")

from flwr.common.config import validate_fields_in_config

from engines.flower.sites import DirectLink
from hyperfed.apps.flower import app
from hyperfed.apps.flower.app import NodeConfig, node_settings, run_settings, site_of, source_of
from hyperfed.engines.flower.sites import STEP, Sites
from hyperfed.engines.flower.wire import unpack_request

ROOT = Path(__file__).parents[3]


def test_the_app_of_a_checkout_names_what_there_is() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert said["components"] == {
        "serverapp": f"{app.__name__}:server",
        "clientapp": f"{app.__name__}:client",
    }
    assert [ROOT / path for path in said["fab-include"]] == [Path(str(app.__file__))]
    assert run_settings(said["config"]).method == said["config"]["method"]
    words = (app.__doc__ or "").split("A node's config")[0]
    assert [key for key in said["config"] if f"``{key}``" not in words] == []


def test_the_app_that_a_run_submits_has_the_same_components() -> None:
    bundle = tomllib.loads(submit.APP.format(version="1", server="server"))
    submitted = bundle["tool"]["flwr"]["app"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert submitted["components"] == ours["components"]
    assert set(submitted["config"]) <= set(ours["config"])
    assert validate_fields_in_config(bundle) == (True, [], [])  # what flwr run warns of


def test_keys_and_settings_mean_what_they_mean_on_the_command_line() -> None:
    overrides = ["rounds=3", "cohort=0.5", "task=digits", "method.local_steps=5", "engine=flower"]
    expected = config.load("pefll", overrides)
    given = {"method": "pefll", "rounds": 3, "cohort": 0.5, "preset": "", "folder": "x"}
    assert run_settings(given | {"keys": "task=digits method.local_steps=5"}) == expected
    text = toml.dumps(config.to_dict(expected))
    assert run_settings({"settings": text, "method": "fedavg"}) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "pefl"}, "did you mean 'pefll'"),
        ({"method": "pefll", "rounds": "three"}, "rounds"),
        ({"method": "/home/credentials.toml"}, "must be the name of a method"),
        ({"method": "table.toml:cell", "keys": "method=fedavg"}, "must be the name of a method"),
        ({"method": "pefll", "keys": "method.local_step=3"}, "did you mean 'method.local_steps'"),
    ],
)
def test_wrong_settings_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_settings(given)


@pytest.mark.parametrize(
    "key",
    [
        "task=/home/salaries.csv",
        "task=owner/name",
        "task.data_dir=/home",
        "task.partition=file task.partition_file=/home/parts.csv",
        "task.model=/home/some.py:Net",
    ],
)
def test_a_server_names_no_files_to_a_node_with_clients(key: str) -> None:
    settings = run_settings({"method": "fedavg", "keys": key})
    with pytest.raises(UserError, match=f"no files, got {key.rsplit(maxsplit=1)[-1]}"):
        source_of(node_settings({"state": "s", "clients": "0-1"}), settings, Policy())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "state"),
        ({"state": "s"}, "either data or clients"),
        ({"state": "s", "data": "a.npz", "clients": "0-3"}, "either data or clients"),
        ({"state": "s", "data": "a.npz", "colour": "red"}, "colour"),
        ({"state": "s", "data": "a.npz", "workers": 0}, "workers"),
    ],
)
def test_wrong_node_configs_are_told(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        node_settings(given)


def test_a_node_may_have_some_clients_of_the_runs_own_task() -> None:
    settings = config.load("pefll", ["task.clients=6", "engine=flower"])
    source = source_of(NodeConfig(state="s", clients="0-1,4"), settings, Policy())
    assert isinstance(source, Shard)
    assert list(source.clients) == [0, 1, 4]
    for wrong, message in (("0-6", "among the task's 6"), ("a", "numbers such as"), ("", "either")):
        with pytest.raises(UserError, match=message):
            source_of(node_settings({"state": "s", "clients": wrong}), settings, Policy())


def test_a_copy_of_a_folder_of_data_is_in_the_state_while_it_is_read_where_nobody_else_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may be killed meanwhile: then it is there to be removed."""
    state, data = tmp_path / "state", tmp_path / "data"
    data.mkdir()
    rows = {"client": ["ann"] * 20, "x": [[1.0, 2.0]] * 20, "y": [0, 1] * 10}
    datasets.Dataset.from_dict(rows).to_parquet(data / "train.parquet")
    there: list[Any] = []

    def columns_of(splits: Any, path: Path) -> Any:
        (copy,) = state.iterdir()
        there.append((copy.name[:8], copy.stat().st_mode & 0o777, any(copy.rglob("*.arrow"))))
        return real(splits, path)

    real = sitedata._columns
    monkeypatch.setattr(sitedata, "_columns", columns_of)
    settings = config.load("fedavg", ["engine=flower", "task.model=mlp"])
    source_of(NodeConfig(state=str(state), data=str(data)), settings, Policy())
    assert there == [("reading-", 0o700, True)]
    assert list(state.iterdir()) == []
    state.rmdir()
    state.write_bytes(b"no folder")
    with pytest.raises(UserError, match="state must be writable, but"):
        source_of(NodeConfig(state=str(state), data=str(data)), settings, Policy())


def test_a_run_of_the_app_equals_one_on_this_machine_and_can_be_resumed(tmp_path: Path) -> None:
    """Also after a kill in mid-run: site memory goes back to what the checkpoint names.

    The sites know the run's settings from its app alone, their arithmetic's precision too.
    """
    keys = ["rounds=6", "cohort=4", "evaluate_every=2", "checkpoint_every=2", "task.clients=6"]
    keys += ["method.local_steps=2", "task.novel=0.2", "precision=bf16", "seed=3"]
    engine = ["engine=flower", "engine.sites=2", "engine.timeout=0.1"]
    settings = config.load("fedper", [*keys, *engine])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}

    def link() -> DirectLink:
        sites = {}
        for node, clients in ((5, "0-2"), (3, "3-5")):
            node_config = {"state": str(tmp_path / f"state{node}"), "clients": clients}
            sites[node] = site_of(run_config, node_config)
        return DirectLink(sites)

    folder = tmp_path / "run"
    run = app.begin(settings, link(), str(folder))
    sent = {}
    for progress in run.train():
        if progress.round == 4:
            sent = dict(run.engine.traffic)
        if progress.round == 5:  # after the checkpoint of round 4
            break
    later = config.continued(settings, {"engine.timeout": 0.2})
    resumed = app.begin(later, link(), str(folder))
    assert (resumed.round, resumed.config) == (4, later)
    assert resumed.engine.traffic == sent
    list(resumed.train())
    loop = Run(config.load("fedper", [*keys, "engine=loop"]))
    list(loop.train())

    def numbers(of: Run) -> list[Any]:
        unlike = {"seconds": 0, "client_total_variation": (), "client_kl_divergence": ()}
        return [vars(e) | unlike for e in of.evaluations]  # the server sees no labels

    assert numbers(resumed) == numbers(loop)
    assert resumed.summary["test_accuracy"] == loop.summary["test_accuracy"]
    assert resumed.summary["novel_accuracy"] == loop.summary["novel_accuracy"]
    assert resumed.summary["sites"] == 2
    assert resumed.summary["message_bytes_down"] > 1.4 * sent["down"] > 0
    with pytest.raises(UserError, match="must not be done"):
        app.begin(settings, link(), str(folder))

    # Afterwards, without any site: the records can be read, and newcomers served.
    opened = Run.open(folder)
    x, y = loop.task.x[loop.task.train[0]], loop.task.y[loop.task.train[0]]
    model, expected = (each.personalize(x, y).state_dict() for each in (opened, loop))
    for name, entry in expected.items():
        assert entry.equal(model[name])
    with pytest.raises(UserError, match="are at their sites"):
        opened.model(0)


def test_a_site_computes_as_its_node_says_and_counts_for_what_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, best = [], answering.best_engine

    def noted(device: Any) -> Any:
        def make(*arguments: Any, **options: Any) -> Any:
            made.append(best(device)(*arguments, **options))
            return made[-1]

        return make

    monkeypatch.setattr(answering, "best_engine", noted)
    keys = ["rounds=1", "cohort=2", "task.clients=4", "task.novel=0", "method.local_steps=1"]
    settings = config.load("fedavg", [*keys, "metrics=f1", "engine=flower", "engine.timeout=0.1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    policy = tmp_path / "policy.toml"
    policy.write_text('metrics = ["f1"]\n')
    node: dict[str, Any] = {"state": str(tmp_path / "site"), "clients": "0-3"}
    node |= {"workers": 2, "cores_per_client": 3, "policy": str(policy)}
    run = app.begin(settings, DirectLink({5: site_of(run_config, node)}), str(tmp_path / "run"))
    list(run.train())
    told = [(engine.workers, engine.resources(4)["cores_per_client"]) for engine in made]
    assert {*told} == {(2, 3)}
    assert len(run.evaluations[-1].others["f1"].client) == 4


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"privacy.epsilon": 4.0}, "privacy.epsilon=8.0, came 4.0"),
        ({"privacy.epsilon": None}, "privacy.epsilon=8.0, came None"),
        ({"method.local_steps": 3, "rounds": 5}, "method.local_steps=2, came 3, rounds=4, came 5"),
        ({"task.clients": 6}, "task.clients=4, came 6"),
    ],
)
def test_a_run_is_not_resumed_by_a_submission_with_other_settings(
    other: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """Its sites would go by them, and the server by those that it began with."""
    keys = {"rounds": 4, "cohort": 4, "task.clients": 4, "task.novel": 0, "method.local_steps": 2}
    keys |= {"privacy.epsilon": 8.0, "engine.name": "flower", "engine.timeout": 0.1}
    first, submitted = (config.from_keys("fedavg", each) for each in (keys, keys | other))
    run_config = {"settings": toml.dumps(config.to_dict(first))}
    site = site_of(run_config, {"state": str(tmp_path / "state"), "clients": "0-3"})
    link, folder = DirectLink({1: site}), str(tmp_path / "run")
    app.begin(first, link, folder).close()
    with pytest.raises(UserError, match="that the run was started with") as refused:
        app.begin(submitted, link, folder)
    assert f"{told}; submit it with those, or start a new run" in str(refused.value)
    app.begin(first, link, folder).close()


def test_a_masked_run_of_the_app_equals_a_simulation_of_it(tmp_path: Path) -> None:
    keys = ["rounds=2", "cohort=4", "evaluate_every=2", "task.clients=6", "task.novel=0.0"]
    keys += ["method.local_steps=2", "privacy.masking=true"]
    settings = config.load("fedper", [*keys, "engine=flower", "engine.timeout=0.1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    sites = {
        node: site_of(run_config, {"state": str(tmp_path / str(node)), "clients": clients})
        for node, clients in ((5, "0-2"), (3, "3-5"))
    }
    link = DirectLink(sites)
    run = app.begin(settings, link, str(tmp_path / "run"))
    list(run.train())
    loop = Run(config.load("fedper", [*keys, "engine=loop"]))
    list(loop.train())
    for ours, theirs in zip(run.evaluations, loop.evaluations, strict=True):
        assert (ours.client_loss, ours.missed, ours.lost) == (theirs.client_loss, (), ())
    calls = [c for kind, _, it in link.sent if kind == STEP for c in unpack_request(it).calls]
    steps = {call.step: call.masked for call in calls}
    assert steps == {
        "mask_keys": False,
        "mask_shares": False,
        "train_model": True,
        "mask_reveal": False,
        "evaluate": False,
        "keep": False,
    }
    notes = map(json.loads, (tmp_path / "5" / "audit.jsonl").read_text().splitlines())
    assert {note["step"]: note["bytes_out"] for note in notes if note["step"] != "evaluate"} == {
        "mask_keys": 2 * 32,
        "mask_shares": 4 * 120 + 32,
        "train_model": 8 * (64 + 1) * 200,  # of FedPer's body, each in eight bytes
        "mask_reveal": 4 * 52,
        "keep": 0,  # the model is its site's
    }
    assert len([*(tmp_path / "5").glob("models/run-*/*.safetensors")]) == 3


def test_a_rule_against_lies_bears_one_about_images_and_numbers_of_examples(tmp_path: Path) -> None:
    """What one of three sites says of its images decides nothing, nor does how many it has."""
    keys = ["rounds=1", "task.clients=6", "task.novel=0.0", "engine=flower", "engine.sites=3"]

    def begun(*more: str, labels: tuple[str, ...] | None = None) -> Run:
        settings = config.load("fedavg", [*keys, *more])
        run_config = {"settings": toml.dumps(config.to_dict(settings))}
        sites = {
            node: site_of(run_config, {"state": str(tmp_path / f"{node}"), "clients": clients})
            for node, clients in ((3, "0-1"), (5, "2-3"), (7, "4-5"))
        }
        honest = sites[7].source.introduce()
        members = tuple(replace(m, examples=10**8, val=10**8) for m in honest.members)
        lie = replace(honest, members=members, pixels=2 * 10**8, mean=(1.0,), std=(1.0,))
        sites[7].source = SimpleNamespace(introduce=lambda: lie)  # type: ignore[assignment]
        settings = replace(settings, task=replace(settings.task, labels=labels))
        return app.begin(settings, DirectLink(sites), str(tmp_path / f"run-{more}-{labels}"))

    whole = Run(config.load("fedavg", ["task.clients=6", "task.novel=0.0"])).task.transform
    borne = begun("robust.aggregation=median").task
    assert borne.transform == whole
    assert begun().task.transform == Normalize((1.0,), (1.0,))
    with pytest.raises(UserError, match=r"labels must be the 2 of task\.labels, got 10 at"):
        begun(labels=("a", "b"))


def test_what_a_trusted_server_told_stays_told_whatever_checkpoint_it_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one is put back, twice: what is told anew has noise anew, and is paid for anew."""
    keys = ["rounds=4", "cohort=4", "task.clients=4", "task.novel=0", "method.local_steps=1"]
    keys += ["evaluate_every=4", "privacy.epsilon=1", "privacy.where=central"]
    settings = config.load("fedavg", [*keys, "engine=flower", "engine.sites=1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    node = {"state": str(tmp_path / "site"), "clients": "0-3"}
    link = DirectLink({1: site_of(run_config, node)})
    told = []  # with the noise of the run, and not of its plan
    add = private.AggregateNoise.add

    def noted(self: Any, mean: Any, share: float, clients: Any) -> Any:
        noisy = add(self, mean, share, clients)
        if self._secret:
            told.append(self._round)
        return noisy

    monkeypatch.setattr(private.AggregateNoise, "add", noted)

    def begun() -> Run:
        return app.begin(settings, link, str(tmp_path / "run"))

    run = begun()
    training = run.train()
    next(training)
    path = tmp_path / "run" / "checkpoint" / "state.safetensors"
    older = path.read_bytes()
    next(training)
    run.close()
    for _ in range(2):
        path.write_bytes(older)
        resumed = begun()
        paid = [len(kept["multipliers"]) for kept in resumed.engine.released.values()]
        assert paid == [len(told)] * 4
        if len(told) < 3:
            next(resumed.train())
            resumed.close()
    next(training := resumed.train())
    with pytest.raises(UserError, match="must stay within epsilon 1"):
        list(training)
    resumed.close()
    assert told == [0, 1, 1, 1]
    opened = begun()
    spent = opened.privacy()
    opened.close()
    assert spent is not None
    assert spent["epsilon_spent"] == pytest.approx(1, rel=1e-6)
    (tmp_path / "run" / "checkpoint" / "released.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="damaged"):
        begun()


def test_a_trusted_server_goes_on_wherever_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["rounds=4", "cohort=4", "task.clients=4", "task.novel=0", "method.local_steps=1"]
    keys += ["evaluate_every=2", "privacy.epsilon=1", "privacy.where=central"]
    settings = config.load("fedavg", [*keys, "engine=flower", "engine.sites=1"])
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    node = {"state": str(tmp_path / "site"), "clients": "0-3"}
    link = DirectLink({1: site_of(run_config, node)})

    def begun() -> Run:
        return app.begin(settings, link, str(tmp_path / "run"))

    run = begun()
    training = run.train()
    next(training), next(training)
    run.close()  # as in round 3
    run = begun()
    assert (run.round, run.best.round) == (2, 2)

    def killed(self: Run) -> None:
        raise SystemExit

    monkeypatch.setattr(Run, "_evaluate", killed)
    with pytest.raises(SystemExit):
        list(run.train())
    run.close()
    assert begun().round == 3


@pytest.mark.parametrize("ended", [False, True])
def test_of_two_that_wait_for_the_sites_of_one_run_one_begins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """Sites know a run by its number: the other's would name what they do not have."""
    keys = ["cohort=2", "task.clients=4", "task.novel=0", "engine=flower", "engine.timeout=0.1"]
    settings, folder = config.load("fedper", keys), tmp_path / "run"
    run_config = {"settings": toml.dumps(config.to_dict(settings)), "folder": str(folder)}
    site = site_of(run_config, {"state": str(tmp_path / "site"), "clients": "0-3"})
    first: list[Run] = []

    def gather(sites: Any, *arguments: Any, gathered: Any = Sites.gather) -> Any:
        monkeypatch.setattr(Sites, "gather", gathered)
        first.append(app.begin(settings, DirectLink({1: site}), str(folder)))
        if ended:
            first[0].close()
        return gathered(sites, *arguments)

    monkeypatch.setattr(Sites, "gather", gather)
    monkeypatch.setattr(app, "_link", lambda grid, config: DirectLink({1: site}))
    told = "begun by one process, but another one did" if ended else "by one process at a time"
    with pytest.raises(UserError, match=told):
        app.serve(None, SimpleNamespace(run_config=run_config))  # type: ignore[arg-type]
    assert isinstance(begun := first[0].task, RemoteTask)
    assert Roster.read(folder / "sites.json") == begun.roster
    log = folder / "log.txt"
    assert (log.exists() and "error before training" in log.read_text()) == ended
    first[0].close()
    app.begin(settings, DirectLink({1: site}), str(folder)).close()


def test_too_few_sites_are_an_error(tmp_path: Path) -> None:
    settings = config.load("pefll", ["engine=flower", "engine.timeout=0.01"])
    with pytest.raises(UserError, match=r"engine.sites=1 .* but 0 did"):
        app.begin(settings, DirectLink({}), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cohort=6", "cohort must be at most 4"),
        ("faults.hostile=[4]", "faults.hostile must be clients that train, numbers from 0 to 3"),
        ("track=mlflow", "track=mlflow must have mlflow"),
    ],
)
def test_what_does_not_fit_the_sites_that_came_is_refused_before_anything_is_written(
    key: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    keys = ["task.clients=4", "task.novel=0", "engine=flower", key]
    settings = config.load("fedavg", keys)
    run_config = {"settings": toml.dumps(config.to_dict(settings))}
    node = {"state": str(tmp_path / "site"), "clients": "0-3"}
    link = DirectLink({1: site_of(run_config, node)})
    with pytest.raises(UserError, match=said):
        app.begin(settings, link, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_roster_is_made_of_the_sites_that_answer() -> None:
    link = DirectLink({})
    assert link.exchange("train.step", {4: b""}, 1.0, {}).keys() == {4}
    assert isinstance(link.exchange("train.step", {4: b""}, 1.0, {})[4], NoAnswerError)
    with pytest.raises(UserError, match="do not make a federation"):
        enrol([], run=1)


def test_without_flower_the_app_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    spec = spec_from_file_location("flowerapp_again", app.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(UserError, match="pip install 'flwr=="):
        spec.loader.exec_module(module_from_spec(spec))


def test_the_engine_is_asked_for_by_its_app_alone() -> None:
    with pytest.raises(UserError, match="must be asked for by its app"):
        Run(config.load("pefll", ["engine=flower", "task.clients=4"]))

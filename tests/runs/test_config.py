"""Settings: four sources in order, every error at once, and a file that loads to the same run."""

import dataclasses
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
from pydantic import ConfigDict, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed.engines import ENGINES, Faults
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.config import to_dict
from hyperfed.runs.settings import EngineConfig, RunConfig


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Settings:
    lr: PositiveFloat = 0.1
    local_steps: PositiveInt = 50
    clip: PositiveFloat | None = 5.0
    decay: Literal["none", "cosine"] = "cosine"
    hidden: tuple[int, ...] = (100, 100)
    label: str = ""

    def __post_init__(self):
        if self.local_steps == 13:
            raise ValueError("local_steps must not be unlucky")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Plain:
    rate: float = 1.0


FAKES = {
    "hyper": SimpleNamespace(
        Config=Settings,
        PRESETS={
            "default": {"rounds": 70},
            "paper": {"rounds": 5000, "cohort": 1, "task.clients": 50, "method.lr": 0.01},
        },
    ),
    "plain": SimpleNamespace(Config=Plain, PRESETS={}),
}


def load(source="hyper", *overrides):
    with patch.object(config, "METHODS", FAKES):
        return config.load(str(source), overrides)


def from_keys(keys):
    with patch.object(config, "METHODS", FAKES):
        return config.from_keys("hyper", keys)


def errors(source, *overrides):
    """Returns the bullets of the error that these settings give."""
    with pytest.raises(UserError) as caught:
        load(source, *overrides)
    title, *bullets = str(caught.value).split("\n  - ")
    assert title.startswith(f"the configuration has {len(bullets)} error")
    return bullets


def write(folder, text):
    path = folder / "experiment.toml"
    path.write_text(text)
    return path


def test_a_method_alone_has_the_defaults_and_its_default_preset():
    run = load("hyper")
    assert (run.method, run.preset, run.rounds, run.cohort) == ("hyper", "default", 70, 0.25)
    assert run.settings == Settings()
    assert run.task.name == "digits"
    assert load("plain").rounds == RunConfig(method="", settings=None).rounds


def test_each_source_overrules_the_weaker_ones(tmp_path):
    path = write(
        tmp_path,
        'method = "hyper"\npreset = "paper"\nrounds = 9\nseed = 3\n[task]\nclients = 30\n',
    )
    run = load(path, "seed=4")
    assert run.settings.lr == 0.01  # preset over default
    assert (run.rounds, run.task.clients) == (9, 30)  # file over preset
    assert run.seed == 4  # override over file
    assert load(path, "preset=default").settings.lr == 0.1


@pytest.mark.parametrize(
    "text",
    [
        'method = "hyper"\ntask = "digits"\nengine = "loop"\n',
        '[method]\nname = "hyper"\n[task]\nname = "digits"\n[engine]\nname = "loop"\n',
        'method.name = "hyper"\ntask.name = "digits"\nengine.name = "loop"\n',
    ],
)
def test_a_section_is_short_for_its_name(tmp_path, text):
    assert load(write(tmp_path, text)) == load("hyper", "task=digits", "engine=loop")


@pytest.mark.parametrize("own", ["[method]\nlr = 1.0\n", "method.lr = 1.0\n"])
def test_a_name_beside_its_table_is_told_where_it_goes(tmp_path, own):
    with pytest.raises(UserError, match=r"where method, .* is a table, its name is a key in it"):
        load(write(tmp_path, f'method = "hyper"\n{own}'))
    with pytest.raises(UserError, match=r"must be TOML: in .*\)$"):
        load(write(tmp_path, "method = hyper\n"))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("method.lr=.2", 0.2),
        ("method.lr=5.", 5.0),
        ("method.lr=1e-2", 0.01),
        ("method.lr=3", 3.0),
        ("method.clip=none", None),
        ("method.decay=none", "none"),  # a word of its own, where the key does not admit None
        ("method.hidden=[1, 2]", (1, 2)),
        ("method.label=word", "word"),
        ("method.label='two words'", "two words"),
        ("method.label=a = b", "a = b"),
        ("method.label=2024-01-01", "2024-01-01"),
        ("method.label=1\nrounds = 2", "1\nrounds = 2"),
        ('method={label="inline"}', "inline"),
    ],
)
def test_values_are_toml_literals_or_words(override, value):
    key = "label" if "inline" in override else override.partition("=")[0].removeprefix("method.")
    found = getattr(load("hyper", override).settings, key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("text", "cohort"), [("1", 1), ("1.0", 1.0), ("7", 7), (".5", 0.5)])
def test_a_cohort_is_a_number_or_a_fraction(text, cohort):
    found = load("hyper", f"cohort={text}").cohort
    assert found == cohort
    assert type(found) is type(cohort)


@pytest.mark.parametrize("text", ["0", "-1", "0.0", "1.5", "5.0", "nan", "true", "all"])
def test_other_cohorts_are_refused(text):
    (bullet,) = errors("hyper", f"cohort={text}")
    assert bullet.startswith("cohort: must be ")


def test_all_errors_come_at_once():
    bullets = errors(
        "hyper",
        "rounds",
        "preset=papr",
        "rounds=0",
        "seed=1.5",
        "cohrt=3",
        "task.clients=many",
        "engine=loup",
        "engine.workers=0",
        "faults.drop=1.5",
        "method.lr=-1",
        "method.hidden=[1, 'x']",
        "local_stpes=5",
        "track=wandbb",
        "robust.reply_bound=1",
    )
    *others, last = (f"'{engine}'" for engine in ENGINES)
    assert sorted(bullets) == [
        "cohrt: must be a key of this run, came 3; did you mean 'cohort'?",
        "engine.workers: must be greater than 0, or none; came 0",
        f'engine: must be {", ".join(others)} or {last}; came "loup"',
        "faults.drop: must be less than or equal to 1; came 1.5",
        "local_stpes: must be a key of this run, came 5; did you mean 'method.local_steps'?",
        'method.hidden: must be a valid integer; came "x"',
        "method.lr: must be greater than 0; came -1",
        "preset: must be one of default, paper for hyper; came \"papr\"; did you mean 'paper'?",
        "robust.reply_bound: must be greater than 1, or none; came 1",
        "rounds: must be greater than 0; came 0",
        "rounds: must be key=value, such as rounds=100",
        "seed: must be a valid integer; came 1.5",
        'task.clients: must be a valid integer, or none; came "many"',
        "track: must be 'auto', 'tensorboard', 'mlflow' or 'wandb', or none; came \"wandbb\"",
    ]


def test_all_contradictions_of_a_table_come_at_once():
    keys = ("task.width=8", "task.widths=[8, 8]", "task.test=0", "task.partition=file", "rounds=0")
    assert [bullet.partition(",")[0] for bullet in errors("hyper", *keys)] == [
        "task: give width or widths",
        "task: widths must differ",
        "task: test must be above 0",
        "task: partition=file and partition_file go together",
        "task: test must be left out with partition=file",
        "rounds: must be greater than 0; came 0",
    ]


def test_an_unknown_method_names_the_nearest_and_hides_no_other_error():
    bullets = errors("hypr", "method.lr=1", "rounds=-2")
    assert bullets == [
        "method: must be one of hyper, plain; came \"hypr\"; did you mean 'hyper'?",
        "rounds: must be greater than 0; came -2",
    ]


def test_a_file_must_name_its_method(tmp_path):
    assert errors(write(tmp_path, "rounds = 5")) == [
        "method: must be one of hyper, plain; it is missing"
    ]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("clients=5", "did you mean 'task.clients'?"),
        ("clints=5", "did you mean 'task.clients'?"),
        ("mehtod.lr=5", "did you mean 'method.lr'?"),
        ("task.rounds=5", "did you mean 'rounds'?"),
        ("faults.zzzz=5", "the keys are faults.drop, faults.nan"),
        ("faults=5", "the keys are faults.drop, faults.nan"),
        ("zzzz.zzzz=5", "the keys are method, preset, rounds, "),
    ],
)
def test_an_unknown_key_is_told_the_nearest_or_all_of_its_section(override, hint):
    (bullet,) = errors("hyper", override)
    key = override.partition("=")[0]
    assert bullet.startswith(f"{key}: must be a key of this run, came 5; {hint}")


def test_another_methods_key_is_unknown():
    (bullet,) = errors("plain", "method.local_steps=5")
    assert bullet.startswith("method.local_steps: must be a key of this run")


@pytest.mark.parametrize("named", ["method=plain", "method.name=plain", "method={name='plain'}"])
def test_another_method_than_the_one_that_was_named_is_refused(tmp_path, named):
    told = 'method: must be named once, came "hyper" and "plain"; leave one out'
    # Whose method.lr is, nobody knows.
    assert errors("hyper", named, "method.lr=-1", "rounds=0") == [
        told,
        "rounds: must be greater than 0; came 0",
    ]
    assert load("hyper", "method=hyper") == load("hyper")
    with pytest.raises(UserError, match="2 errors") as caught:  # such as all settings of a run
        from_keys({**to_dict(load("plain", "method.rate=2")), "rounds": 0})
    assert told in str(caught.value)
    assert load(write(tmp_path, 'method = "hyper"'), named).method == "plain"  # a file's own


def test_a_value_of_another_type_is_not_bent_into_shape():
    assert len(errors("hyper", "rounds='5'", "seed=true", "engine.workers=2.0")) == 3


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_a_number_that_none_can_compute_with_is_refused_whatever_the_key(number):
    found = 0
    for method, module in METHODS.items():
        known = config._known(module.Config)
        floats = [key for key, kind in known.items() if "float" in str(kind)]
        with pytest.raises(UserError) as caught:
            config.load(method, [f"{key}={number}" for key in floats])
        told = {line.partition(": ")[0] for line in str(caught.value).split("\n  - ")}
        assert [key for key in floats if config.shown(key) not in told] == []
        found += len(floats)
    assert found > 5 * len(METHODS)


def test_what_only_holds_of_several_keys_is_reported_for_their_section():
    assert errors("hyper", "method.local_steps=13") == ["method: local_steps must not be unlucky"]


@pytest.mark.parametrize(
    ("content", "message"), [(None, "must be readable"), (b"rounds = ", "TOML"), (b"\xff", "TOML")]
)
def test_a_file_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "experiment.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_dumped_configuration_loads_to_an_equal_one(tmp_path):
    label = 'a "quoted\\ word", π\x7f and\ttab'
    keys: dict[str, Any] = {
        "preset": "paper",
        "method.clip": None,  # not its default, so the file has to say it
        "method.hidden": [],
        "method.lr": 1e-30,
        "method.label": label,
        "cohort": 1.0,
        "engine.cores_per_client": 2,
    }
    run = from_keys(keys)
    config.dump(run, tmp_path / "config.toml")
    told = (tmp_path / "config.toml").read_text().splitlines()[0]
    assert told == "# Trained again by: hyperfed run config.toml"
    again = load(tmp_path / "config.toml")
    assert again == run
    assert (again.settings.clip, again.settings.label) == (None, label)
    assert type(again.cohort) is float


@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_preset_makes_a_configuration_that_a_file_keeps(tmp_path, method):
    for preset in {"default", *METHODS[method].PRESETS}:
        run = config.load(method, [f"preset={preset}"])
        config.dump(run, tmp_path / "config.toml")
        assert config.load(str(tmp_path / "config.toml")) == run


def test_to_dict_holds_every_key(tmp_path):
    found = to_dict(load("hyper", "faults.drop=0.5"))
    assert found["method"] == {
        "name": "hyper",
        "lr": 0.1,
        "local_steps": 50,
        "clip": 5.0,
        "decay": "cosine",
        "hidden": [100, 100],
        "label": "",
    }
    assert found["faults"] == {"drop": 0.5, "nan": 0.0, "hostile": [], "attack": "reverse"}
    assert found["engine"] == dataclasses.asdict(EngineConfig())
    assert found["engine"]["name"] == "auto"
    assert found["rounds"] == 70


def test_python_values_make_the_same_configuration():
    made = from_keys(
        {"rounds": 3, "task.clients": 5, "method": {"hidden": (1, 2)}, "engine": "loop"}
    )
    written = ["rounds=3", "task.clients=5", "method.hidden=[1, 2]", "engine=loop"]
    assert made == load("hyper", *written)


def test_numbers_of_numpy_are_numbers():
    keys = {
        "rounds": np.int64(3),
        "cohort": np.float32(0.5),
        "task": {"clients": np.arange(4, 6)[1], "unlabelled": np.bool_(False)},
        "method": {"hidden": (np.int32(1), 2), "lr": np.float64(0.5)},
    }
    written = ["rounds=3", "cohort=0.5", "task.clients=5", "method.hidden=[1, 2]", "method.lr=0.5"]
    assert from_keys(keys) == load("hyper", *written)
    assert from_keys({"method.hidden": np.array([1, 2])}).settings.hidden == (1, 2)
    with pytest.raises(UserError, match="rounds: must be greater than 0; came 0"):
        from_keys({"rounds": np.int64(0)})


def test_a_word_may_look_like_a_number_on_the_command_line():
    keys = ("task=007", "task.target=2024", "task.client=1e3", "task.split=true")
    task = load("hyper", *keys, "task.features=2023", "method={lr=2}").task
    assert (task.name, task.client, task.split) == ("007", "1e3", "true")
    assert (task.target, task.features) == (("2024",), ("2023",))
    assert load("hyper", "task=t.csv", 'task.target="2024"').task.target == ("2024",)
    assert load("hyper", "task=t.csv", "task.target=none").task.target is None


def test_configurations_made_in_python_are_checked_too():
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Faults(drop=2.0)
    with pytest.raises(ValueError, match="greater than 0"):
        EngineConfig(workers=0)


def test_a_relative_path_begins_at_the_files_folder_or_at_the_current_one(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    path = write(
        tmp_path / "deep",
        'method = "plain"\n[task]\npartition = "file"\npartition_file = "../dealt.npz"\n',
    )
    monkeypatch.chdir(tmp_path)
    from_file = load("deep/experiment.toml")
    assert from_file.task.partition_file == tmp_path / "deep" / ".." / "dealt.npz"
    config.dump(from_file, tmp_path / "config.toml")
    monkeypatch.chdir(tmp_path / "deep")
    assert load(tmp_path / "config.toml") == from_file
    given = load(path, "task.partition_file=mine.csv")
    assert given.task.partition_file == tmp_path / "deep" / "mine.csv"
    assert load(path, "task.partition_file=none", "task.partition=iid").task.partition_file is None


@pytest.mark.parametrize("written", ["none", "3"])
def test_a_path_that_is_none_or_no_text_stays_what_it_is(tmp_path, written):
    value = '"none"' if written == "none" else written
    path = write(tmp_path, f'method = "plain"\n[task]\npartition_file = {value}\n')
    if written == "none":
        assert load(path).task.partition_file is None
    else:
        assert "task.partition_file" in errors(path)[0]


def test_a_run_comes_to_the_last_phase_of_its_method() -> None:
    phases = ["method.phase_one_rounds=10"]
    told = r"rounds: must be at least 11, or itpfl does not come to its last phase; came 10; raise"
    with pytest.raises(config.TooShortError, match=told):
        config.load("itpfl", ["rounds=10", *phases])
    assert config.load("itpfl", ["rounds=11", *phases]).rounds == 11
    with pytest.raises(UserError, match=told) as both:  # told with all else that is wrong
        config.load("itpfl", ["rounds=10", "chort=2", *phases])
    assert "2 errors" in str(both.value)
    assert not isinstance(both.value, config.TooShortError)


def test_names_have_commas_between_them_on_the_command_line() -> None:
    for features in ("task.features=age, height", 'task.features=["age", "height"]'):
        assert config.load("fedavg", [features]).task.features == ("age", "height")


def test_a_name_too_long_for_a_file_is_none_in_a_folder(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'method = "fedper"\ntask = "{"x" * 600}"\n')
    assert config.load(str(path)).task.name == "x" * 600


def test_settings_on_another_device_have_what_goes_with_it() -> None:
    def on(device: str, engine: EngineConfig) -> EngineConfig:
        there = RunConfig("fedavg", METHODS["fedavg"].Config(), engine=engine).on(device)
        assert there.device == device
        return there.engine

    graphs = EngineConfig("vmap", graphs=True)
    assert on("cuda:1", graphs) == graphs
    assert on("cpu", graphs) == on("cpu:0", graphs) == on("xpu", graphs) == EngineConfig("vmap")
    assert on("cuda", EngineConfig("ray")).gpus_per_worker == 1.0
    shared = EngineConfig("ray", gpus_per_worker=0.5)
    assert on("cuda", shared) == shared
    assert on("cpu", shared) == on("cpu:0", shared) == EngineConfig("ray")


def test_actors_have_devices_that_need_not_be_here() -> None:
    away = RunConfig("fedavg", METHODS["fedavg"].Config(), device="cuda:63")
    assert not away.has_device()
    assert dataclasses.replace(away, engine=EngineConfig("ray")).has_device()
    assert away.on("cpu").has_device()

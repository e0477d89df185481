"""What can be set is told in full."""

from types import SimpleNamespace
from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from hyperfed.methods import METHODS
from hyperfed.runs.config import flat, from_keys, shown, to_dict
from hyperfed.runs.keys import keys_of, type_name
from hyperfed.training import LocalConfig


@pytest.mark.parametrize("names", [sorted(METHODS)])
def test_every_key_of_every_method_says_what_it_means(names):
    for method in names:
        found = keys_of(method)
        settings = flat(to_dict(from_keys(method, {}))).keys() - {"method.name"}
        assert sorted(key.name for key in found) == sorted(map(shown, settings))
        assert [f"{method}: {key.name}" for key in found if not key.about] == []
        assert [key.name for key in found if "`" in key.about] == []


def test_keys_are_called_as_users_write_them():
    names = {key.name for key in keys_of("local")}
    assert {"task", "engine", "rounds", "task.clients", "method.local_lr"} <= names
    assert not {"settings", "task.name", "method.name", "method.lr"} & names


@dataclass(frozen=True)
class Config(LocalConfig):
    """Settings of a method that there is not.

    Attributes:
        local_lr: its own words,
            on two lines, with a :class:`reference` and ``code``.
    """


def test_a_method_has_the_last_word_on_what_it_inherits(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", SimpleNamespace(Config=Config, PRESETS={}))
    found = {key.name: key.about for key in keys_of("toy")}
    told = "its own words, on two lines, with a reference and code."
    assert found["method.local_lr"] == told
    assert found["method.batch_size"] == "examples of a batch."


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PositiveInt, "int > 0"),
        (PositiveFloat | None, "float > 0 | none"),
        (Annotated[float, Field(ge=0, lt=1)], "float ≥ 0, < 1"),
        (Literal["a", "b"], "a | b"),
        (bool, "true | false"),
        (PositiveInt | tuple[PositiveInt, ...] | None, "int > 0 | [int > 0, ...] | none"),
    ],
)
def test_types_are_for_people(kind, name):
    assert type_name(kind) == name


def test_defaults_are_those_of_the_method_and_values_all_there_are():
    found = {key.name: key for key in keys_of("pefll")}
    assert found["rounds"].default == "30"  # its default preset's
    assert {key.name: key for key in keys_of()}["rounds"].default == "200"
    assert found["task.partition_file"].default == "none"
    assert found["engine.graphs"].values == ("true", "false")
    assert found["track"].values == ("auto", "tensorboard", "mlflow", "wandb", "none")
    assert found["rounds"].values == ()

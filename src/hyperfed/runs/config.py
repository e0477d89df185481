"""From what a user writes to a validated :class:`RunConfig`, and back to a file.

Four sources, the weakest first: the defaults below, the method's preset, an experiment file in
TOML, and ``key=value`` overrides. They share one set of dotted keys, such as ``task.clients``;
``method.*`` are the fields of the method's own ``Config``. ``task``, ``engine`` and ``method`` are
short for ``task.name``, ``engine.name`` and ``method.name``, so in TOML ``method = "pfedhn"`` and
a table ``[method]`` with a ``name`` mean the same.

TOML has no null: a key that admits ``None`` takes the word ``none``. A relative path in a file
begins at the file's folder, elsewhere at the current one; what is written is absolute. But of a run
that is done ``task.partition_file`` is relative to the current folder, if it is below: such a path,
where it leads nowhere from the file's folder, begins at one above that, or at the current one.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError

from hyperfed.data.tasks import TaskConfig
from hyperfed.engines import EngineConfig, Faults
from hyperfed.errors import UserError, closest, nearest, one_line
from hyperfed.methods import METHODS
from hyperfed.runs import experiments
from hyperfed.runs.capability import refusals
from hyperfed.runs.settings import RobustConfig, RunConfig, ServeConfig, TrainingPrivacy
from hyperfed.system import toml
from hyperfed.system.files import atomic_write

AGAIN = "# Trained again by: hyperfed run config.toml\n"
"""Above the settings of a run."""

_PATHS = ("task.partition_file",)
_FILES = ("task.name", "task.model")  # a relative path there begins at the TOML file if it exists
_OF_PYTHON = ("name", "source", "clients", "novel", "unlabelled")
_SHORT = {"method": "method.name", "task": "task.name", "engine": "engine.name"}


GOES_ON = ("device", "engine.", "checkpoint_every", "track", "rounds")
"""How the keys begin by which a run may go on otherwise than it began: where and how it computes,
and for how long."""


class TooShortError(UserError):
    """All is right but for the number of rounds, which a method's phases do not fit in."""


def load(source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Builds the configuration of a run.

    Args:
        source: a method's name, or the path of an experiment file (or of a run's ``config.toml``),
            which ends in ``.toml``, or of a table and its cell, ``FILE.toml:CELL``
            (:mod:`hyperfed.runs.experiments`).
        overrides: ``key=value`` each. A value is read as a TOML literal; a bare word is a string,
            and so is a number where the key takes words. Of a key that is given twice the last
            counts. A file may be run with another ``method``, in the place of a method that was
            named there can be no other.

    Raises:
        UserError: lists all errors at once.
    """
    problems: list[str] = []
    changed = dict(_parse(overrides, problems))
    if file := experiments.split(source):
        written = _read(Path(file[0]), file[1]) | changed
    else:
        written = _of_method(source, changed, problems)
    return _build(written, problems)


def from_keys(method: str, keys: Mapping[str, Any]) -> RunConfig:
    """Builds the configuration of a run from Python values: ``{"rounds": 10, "task.clients": 5}``.

    Raises:
        UserError: lists all errors at once.
    """
    problems: list[str] = []
    return _build(_of_method(method, flat(keys), problems), problems)


def _of_method(method: str, keys: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the keys of a method that was named. They may name it again, and no other.

    Where they do, nobody knows whose settings ``method.*`` are.
    """
    other = keys.get("method.name", method)
    if other != method:
        came = f"{toml.literal(method)} and {toml.literal(other)}"
        problems.append(f"method: must be named once, came {came}; leave one out")
        keys = {key: value for key, value in keys.items() if not key.startswith("method.")}
    return {**keys, "method.name": method}


def override(config: RunConfig, overrides: Sequence[str], *, allowed: Sequence[str]) -> RunConfig:
    """Returns a configuration with some keys changed.

    Args:
        config: all settings.
        overrides: ``key=value`` each.
        allowed: how the keys that may change begin.

    Raises:
        UserError: another key, or a value that it does not admit; lists all errors at once.
    """
    problems: list[str] = []
    changed = dict(_parse(overrides, problems))
    return _changed(config, changed, problems, allowed, "after training")


def parse(settings: Sequence[str]) -> dict[str, Any]:
    """Returns {dotted key: value} of ``key=value`` each; of a key that is given twice the last.

    Raises:
        UserError: lists all that are no such thing at once.
    """
    problems: list[str] = []
    parsed = dict(_parse(settings, problems))
    if problems:
        raise UserError(_listed(problems))
    return parsed


def continued(config: RunConfig, changed: Mapping[str, Any]) -> RunConfig:
    """Returns the settings by which a run goes on.

    Args:
        config: all settings that it has.
        changed: {dotted key: value} of those that it goes on with instead (:data:`GOES_ON`). With
            another device goes what the engine has to have there (:meth:`RunConfig.on`).

    Raises:
        UserError: another key, or a value that it does not admit; lists all errors at once. Or no
            more rounds than it has, or other ones where noise is for as many; or it is at sites,
            or would go there.
    """
    device = changed.get("device", config.device)
    moved = config.on(device) if isinstance(device, str) and device != config.device else config
    moved = _changed(moved, changed, [], GOES_ON, "in a run that goes on")
    if "rounds" in changed:
        config.check_longer(moved.rounds)
    if {config.engine.name, moved.engine.name} > {"flower"}:
        raise UserError(
            "a run must stay where its data are, at sites (engine=flower) or not, came "
            f"engine={moved.engine.name} after {config.engine.name}; start a new run"
        )
    return moved


def _changed(
    config: RunConfig,
    changed: Mapping[str, Any],
    problems: list[str],
    allowed: Sequence[str],
    when: str,
) -> RunConfig:
    """Returns a configuration with some keys changed, of which all begin as they may."""
    other = [key for key in changed if not key.startswith(tuple(allowed)) or key == "method.name"]
    problems += [
        f"{shown(key)}: must begin with {' or '.join(allowed)} to change {when}" for key in other
    ]
    kept = {key: value for key, value in changed.items() if key not in other}
    return _build(flat(to_dict(config)) | kept, problems)


def to_dict(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings as nested dicts of plain values, with the keys that users write.

    Those of a record are such already.

    Raises:
        UserError: a method's own setting is of a type that no file can hold.
    """
    if isinstance(config, Mapping):
        return dict(config)
    try:
        plain = TypeAdapter(RunConfig).dump_python(config, mode="json")
    except PydanticSerializationError as error:
        named = ", ".join(f"{name}={value!r}" for name, value in vars(config.settings).items())
        raise UserError(
            f"settings must be numbers, words, or lists of these, which a file can hold, but among "
            f"those of {config.method} is another, in {named}: {error}"
        ) from error
    settings = plain.pop("settings")
    if config.task.source == "python":  # of which the other settings say nothing
        plain["task"] = {key: plain["task"][key] for key in _OF_PYTHON}
    return {**plain, "method": {"name": config.method, **settings}}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what :func:`to_dict` or a run's file has as {dotted key: value}, full names."""
    return dict(_flatten(settings))


def dump(config: RunConfig, path: Path) -> None:
    """Writes all settings as TOML; :func:`load` makes an equal configuration of the file.

    Above them stands the command that trains by them again, where the data are settings too.
    """
    _write(to_dict(config), path)


def make_portable(path: Path) -> None:
    """Shortens the path in the settings of a run that is done, so that they hold elsewhere too.

    It stays absolute where it is not below the current folder, or would lead to another file.

    Args:
        path: the run's ``config.toml``.

    Raises:
        UserError: the file is damaged, or the disk refuses.
    """
    config, here = load(str(path)), Path.cwd()
    if config.task.partition_file is None:
        return
    settings, file = to_dict(config), config.task.partition_file.resolve()
    if file.is_relative_to(here):
        short = file.relative_to(here).as_posix()
        if _found(path.parent, short).resolve() == file:
            settings["task"]["partition_file"] = short
            _write(settings, path)


def _write(settings: Mapping[str, Any], path: Path) -> None:
    again = "" if settings["task"]["source"] == "python" else AGAIN
    atomic_write(path, f"{again}{toml.dumps(settings)}".encode())


# Keys and values.


@cache
def _fields(kind: type, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Returns (dotted key, type) of each field of a dataclass, nested dataclasses unfolded."""
    found: list[tuple[str, Any]] = []
    hints: dict[str, Any] = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            found += _fields(hints[field.name], f"{prefix}{field.name}.")
        else:
            found.append((prefix + field.name, hints[field.name]))
    return tuple(found)


def _known(settings: type | None) -> dict[str, Any]:
    """Returns {dotted key: type}, with ``method.*`` where the method's ``Config`` is known."""
    known = dict(_fields(RunConfig))
    del known["method"], known["settings"]
    own = _fields(settings, "method.") if settings else ()
    return {"method.name": str, **known, **dict(own)}


@cache
def _words() -> frozenset[str]:
    """Returns the dotted keys that take any words, whatever the method."""
    words = {str, tuple[str, ...], NoneType}
    return frozenset(
        key for key, kind in _fields(RunConfig) if {*(get_args(kind) or [kind])} <= words
    )


def shown(key: str) -> str:
    """Returns a key as a user writes it: ``task`` for ``task.name``."""
    return next((short for short, full in _SHORT.items() if full == key), key)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        else:
            yield _SHORT.get(key, key), value


def _plain(value: Any) -> Any:
    """Returns a value with Python's numbers for NumPy's, such as those of a grid of ``arange``."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes :func:`_flatten`."""
    table: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        inner = table
        for part in path:
            inner = inner.setdefault(part, {})
        inner[name] = value
    return table


def _read(path: Path, cell: str) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for layer in experiments.layers(path, cell):
        written |= _flatten(layer)
    for key in _PATHS:
        if isinstance(value := written.get(key), str) and value != "none":
            written[key] = str(_found(path.parent, value))
    for key in _FILES:
        if isinstance(value := written.get(key), str):
            file = value.rpartition(":")[0] if ".py:" in value else value
            if _is_file(path.parent / file):
                written[key] = str(path.parent / value)
    return written


def _found(folder: Path, name: str) -> Path:
    """Returns a file where a relative name leads to one, else where it does from the folder."""
    starts = (folder, *folder.resolve().parents, Path())
    return next((start / name for start in starts if _is_file(start / name)), folder / name)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file has so long a name
        return False


def _parse(overrides: Iterable[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each ``key=value``; a table as value gives several."""
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if equals and key:
            value = toml.read_value(text)
            if isinstance(value, bool | int | float) and _SHORT.get(key, key) in _words():
                value = text  # a column may be called 2024, and a folder 007
            yield from _flatten({key: value})
        else:
            problems.append(f"{override}: must be key=value, such as rounds=100")


# Validation.


def _check_declared(method: str, kind: type) -> None:
    """Refuses a method's ``Config`` whose settings no run could have.

    Raises:
        UserError: one that lacks its decorator, or a setting that is called as another key.
    """
    if "__dataclass_fields__" not in vars(kind):  # which a base may have, of its own settings
        raise UserError(
            f"Config of method {method} must be a dataclass of pydantic itself, or what it says is "
            'no setting; write @dataclass(frozen=True, config=ConfigDict(extra="forbid")) above it'
        )
    if "name" in {field.name for field in dataclasses.fields(kind)}:
        raise UserError(
            f"a setting of method {method} must have another name than name, which is the "
            "method's own (method.name); rename it"
        )


def _build(written: Mapping[str, Any], problems: list[str]) -> RunConfig:
    """Validates section by section, so that one error does not hide the others."""
    name = written.get("method.name")
    module = METHODS.get(name) if isinstance(name, str) else None
    if module is None:
        came = f"came {toml.literal(name)}{nearest(name, METHODS)}" if name else "it is missing"
        problems.append(f"method: must be one of {', '.join(METHODS)}; {came}")

    if module is not None:
        _check_declared(str(name), module.Config)
    keys = _preset(module, name, written, problems)
    keys |= {key: _plain(value) for key, value in written.items()}
    known = _known(module.Config if module else None)
    table = _nested(_of_this_run(keys, known, module, problems))
    method = table.pop("method", {})
    own = {key: value for key, value in method.items() if key != "name"}
    sections = {
        "task": TaskConfig,
        "serve": ServeConfig,
        "robust": RobustConfig,
        "privacy": TrainingPrivacy,
        "engine": EngineConfig,
        "faults": Faults,
    }
    parts = {
        section: _section(kind, section, table.pop(section, {}), known, problems) or kind()
        for section, kind in sections.items()
    }
    config = None
    settings = _section(module.Config, "method", own, known, problems) if module else None
    if (steps := parts["serve"].finetune_steps) and getattr(settings, "pooled", False):
        problems.append(
            "serve.finetune_steps: must be 0 where a novel client uses several models "
            f"(method.novel_models); came {steps}"
        )
    if module is not None:
        rules = (parts[section] for section in ("robust", "privacy", "faults"))
        problems += refusals(str(name), settings, *rules)
    try:
        config = RunConfig(method=str(name), settings=settings, **table, **parts)
    except ValidationError as error:
        problems += _explain(error, "", known)
    least: int = getattr(settings, "least_rounds", 1)  # of a method that has several phases
    if short := config is not None and config.rounds < least:
        problems.append(
            f"rounds: must be at least {least}, or {name} does not come to its last phase; "
            f"came {config.rounds}; raise it, or lower the lengths of the phases (method.*_rounds)"
        )
    if problems or config is None:
        kind = TooShortError if short and len(problems) == 1 else UserError
        raise kind(_listed(problems))
    return config


def _listed(problems: Sequence[str]) -> str:
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    return "\n  - ".join([f"the configuration has {count}:", *problems])


def _of_this_run(
    keys: Mapping[str, Any], known: Mapping[str, Any], module: Any, problems: list[str]
) -> dict[str, Any]:
    """Returns the keys that are known, with None for ``none`` where that is one of its values."""
    found = {}
    for key, value in keys.items():
        if key in known:
            found[key] = None if value == "none" and NoneType in get_args(known[key]) else value
        elif module or not key.startswith("method."):  # nobody knows those of an unknown method
            problems.append(
                f"{shown(key)}: must be a key of this run, came {toml.literal(value)}; "
                f"{_nearest_key(key, known)}"
            )
    problems += _idle_privacy(found)
    return found


def _idle_privacy(keys: Mapping[str, Any]) -> list[str]:
    """Returns which settings of private training stand where nothing says how private it is.

    A run's own file says so: there epsilon is ``none``.
    """
    if "privacy.epsilon" in keys:
        return []
    masked = keys.get("privacy.masking") is True  # by what a clip makes whole numbers of
    alone = ("privacy.delta", "privacy.where", *(() if masked else ("privacy.clip",)))
    return [
        f"{key}: must come with privacy.epsilon, without which no training is private; came "
        f"{toml.literal(keys[key])}; set privacy.epsilon, or leave this out"
        for key in alone
        if key in keys
    ]


def _preset(
    module: Any, method: Any, written: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Returns the keys that the method's preset sets; ``default`` may set none."""
    preset = written.get("preset", "default")
    if module is None or not isinstance(preset, str):
        return {}
    presets = {"default": {}, **module.PRESETS}
    if preset not in presets:
        problems.append(
            f"preset: must be one of {', '.join(presets)} for {method}; "
            f"came {toml.literal(preset)}{nearest(preset, presets)}"
        )
    return flat(presets.get(preset, {}))


def _section(
    kind: Any, section: str, table: dict[str, Any], known: Mapping[str, Any], problems: list[str]
) -> Any:
    """Returns ``kind`` made of ``table``, or None and the reasons in ``problems``."""
    try:
        # JSON's strict mode is that of a text file: no "5" for 5, but a list for a tuple.
        found = TypeAdapter(kind).validate_json(json.dumps(table, default=str), strict=True)
        lines: list[str] = []
    except ValidationError as error:
        found, lines = None, _explain(error, section, known)
    told = {line.partition(":")[0] for line in lines}
    # Most kinds of number allow infinity, which none can compute with.
    problems += lines + [
        f"{key}: must be finite; came {toml.literal(value)}"
        for key, value in ((shown(f"{section}.{name}"), value) for name, value in table.items())
        if key not in told
        and any(isinstance(it, float) and not math.isfinite(it) for it in _leaves(value))
    ]
    return found


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _explain(error: ValidationError, section: str, known: Mapping[str, Any]) -> list[str]:
    """Returns one line for each key, which joins what the members of a union would have taken.

    Of keys that contradict each other there is a line for each contradiction. The error itself says
    nothing of ``none`` where that is a value.
    """
    lines: dict[str, tuple[list[str], str]] = {}
    for detail in error.errors(include_url=False):
        name = _key_at(section, detail["loc"], known)
        key, or_none = shown(name), NoneType in get_args(known.get(name))
        came = "" if isinstance(detail["input"], dict) else f"; came {_shown_as(detail['input'])}"
        musts, _ = lines.setdefault(key, ([], f", or none{came}" if or_none else came))
        musts.append(_requirement(detail))
    return [
        f"{key}: {line}{came}"
        for key, (musts, came) in lines.items()
        for line in ", or ".join(dict.fromkeys(musts)).splitlines()
    ]


def _shown_as(value: Any) -> str:
    """Returns a value as a file of settings has it; what none can have, as Python shows it."""
    plain = isinstance(value, None | str | bool | int | float | list | tuple)
    return toml.literal(value) if plain else one_line(repr(value), 100)


def _key_at(section: str, location: tuple[int | str, ...], known: Iterable[str]) -> str:
    """Returns the key of an error. A location goes on below it: list index, member of a union."""
    key = section
    for part in location:
        below = f"{key}.{part}" if key else str(part)
        if not any(name == below or name.startswith(f"{below}.") for name in known):
            break
        key = below
    return key


def _requirement(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "must be given"
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)


def _nearest_key(key: str, known: Iterable[str]) -> str:
    """Returns a question, by the last word of the key, or the keys there are if none is near."""
    section, _, last = key.rpartition(".")
    # Where two keys end in one word, the later here is asked for: that of the same section.
    by_section = sorted(known, key=lambda name: name.rpartition(".")[0] == section)
    ends = {shown(name).rpartition(".")[2]: shown(name) for name in by_section}
    if near := closest(last, ends):
        return f"did you mean {ends[near]!r}?"
    inside = [name for name in known if name.startswith(f"{key}.")]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    return f"the keys are {', '.join(map(shown, inside or beside or known))}"

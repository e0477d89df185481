"""From what a user writes to a validated :class:`RunConfig`, and back to a file.

Four sources, the weakest first: the defaults below, the method's preset, an experiment file in
TOML, and ``key=value`` overrides. They share one set of dotted keys, such as ``task.clients``;
``method.*`` are the fields of the method's own ``Config``. ``task``, ``engine`` and ``method`` are
short for ``task.name``, ``engine.name`` and ``method.name``, so in TOML ``method = "pfedhn"`` and
a table ``[method]`` with a ``name`` mean the same.

TOML has no null: a key that admits ``None`` takes the word ``none``. A relative path in a file
begins at the file's folder, elsewhere at the current one; what is written is absolute.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from hyperfed.data.settings import several
from hyperfed.data.tasks import TaskConfig
from hyperfed.engines import EngineConfig, Faults
from hyperfed.engines.masking import Masking
from hyperfed.engines.updates import PrivateUpdates, Where
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.runs import experiments
from hyperfed.system import toml
from hyperfed.system.files import atomic_write
from hyperfed.training import Precision
from hyperfed.trees.aggregation import Aggregation

_STRICT = ConfigDict(extra="forbid", strict=True)

AGAIN = "# Trained again by: hyperfed run config.toml\n"
"""Above the settings of a run."""

_PATHS = ("task.partition_file",)
_FILES = ("task.name", "task.model")  # a relative path there begins at the TOML file if it exists
_OF_PYTHON = ("name", "source", "clients", "novel", "unlabelled")
_SHORT = {"method": "method.name", "task": "task.name", "engine": "engine.name"}

MetricName = Literal["balanced_accuracy", "f1", "calibration", "r2"]
"""What clients count for on request (:data:`hyperfed.metrics.ON_REQUEST`)."""

Examined = Literal["descriptors", "crossed"]
"""What can be looked into beside how good models are (:mod:`hyperfed.runs.examined`)."""

TrackerName = Literal["auto", "tensorboard", "mlflow", "wandb"]
"""Where numbers go besides the records (:mod:`hyperfed.runs.trackers`)."""

NO_MEAN = ("fedfomo", "fedproto", "heurpfedla", "local", "pfedla")
"""Methods for which ``robust.aggregation`` has nothing to stand for.

Their servers keep each client's model by itself, or none; FedProto's averages prototypes class by
class, over those who have the class.
"""


NO_UPDATES = (
    "fedas",
    "feddbe",
    "fedfomo",
    "fedpac",
    "fedproto",
    "heurpfedla",
    "hypcluster",
    "itpfl",
    "lg_fedavg",
    "local",
    "pfedla",
)
"""Methods that cannot be trained privately: clients answer with more than updates, or nothing.

Of all others the servers use updates for nothing but means, of which each can have noise, for
gradients that are bounded before their mean is taken, and for what goes back to the client that
they are from.
"""

NO_SUMS = (
    "fedas",
    "feddbe",
    "fedfomo",
    "fedpac",
    "fedproto",
    "fml",
    "headstart",
    "heurpfedla",
    "hypcluster",
    "itpfl",
    "lg_fedavg",
    "local",
    "mh_pfedhn",
    "pefll",
    "per_fedavg",
    "pfedhn",
    "pfedhn_pc",
    "pfedla",
    "pfedme",
)
"""Methods whose servers need more of clients than means by numbers of examples, or nothing."""


def _number_or_fraction(cohort: int | float) -> int | float:
    if isinstance(cohort, int) and cohort < 1:
        raise ValueError("must be at least 1 client, or a fraction such as 0.25")
    if isinstance(cohort, float) and not 0 < cohort <= 1:
        raise ValueError("must be a whole number of clients, or a fraction above 0 and at most 1.0")
    return cohort


def cohort_size(cohort: int | float, known: int) -> int:
    """Returns how many of the ``known`` clients a round has; a number above all means all."""
    if isinstance(cohort, int):
        return min(cohort, known)
    # Of the fraction as it is written: 0.29 of 50 are 14.5, but in binary a little less.
    exact = Decimal(str(cohort)) * known
    return max(1, int(exact.to_integral_value(ROUND_HALF_UP)))


def check_cohort(config: "RunConfig", known: int) -> None:
    """Refuses a round of more clients than there are; that of a preset is for tasks of any size.

    Args:
        config: all settings.
        known: clients that train.

    Raises:
        UserError: somebody asked for more of them.
    """
    presets = getattr(METHODS.get(config.method), "PRESETS", {})
    usual = presets.get(config.preset, {}).get("cohort")
    if isinstance(config.cohort, int) and config.cohort > known and config.cohort != usual:
        raise UserError(
            f"cohort must be at most {known}, the clients that train, came {config.cohort}; lower "
            "it, or give a fraction (1.0 is all)"
        )


class TooShortError(UserError):
    """All is right but for the number of rounds, which a method's phases do not fit in."""


@dataclass(frozen=True, config=_STRICT)
class ServeConfig:
    """How clients are served, whatever the method.

    Attributes:
        finetune_steps: steps of local SGD, with the method's ``local_*`` settings and the task's
            loss, by which a client's personal model is fine-tuned on its own training data
            whenever it is used: in each evaluation, so that the best round is that of the
            fine-tuned models, and in all that serves known or novel clients afterwards. No round
            of training sees what came of it.
    """

    finetune_steps: NonNegativeInt = 0


@dataclass(frozen=True, config=_STRICT)
class RobustConfig:
    """What a server does against clients whose replies are wrong, by mischance or on purpose.

    Attributes:
        reply_bound: how many times as large as the others' a client's reply to a message of
            training may be (:mod:`hyperfed.engines.bounds`); one that is larger loses its client
            for the message. None for any size.
        aggregation: what stands for the mean over clients wherever a server takes it
            (:mod:`hyperfed.trees.aggregation`).
        hostile: the share of clients that ``trimmed_mean`` and ``krum`` are to bear.
    """

    reply_bound: Annotated[float, Field(gt=1)] | None = 100.0
    aggregation: Aggregation = "mean"
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.25


@dataclass(frozen=True, config=_STRICT)
class TrainingPrivacy:
    """Private training: what clients answer has a largest length, and noise or masks.

    Noise is of whole clients, not of single samples: any data of a client could be others. (What
    ``itpfl`` makes private with ``method.epsilon`` is a sample of a novel client.)

    Attributes:
        epsilon: what all answers of a client may cost in the run; no noise where not given.
        delta: at which epsilon is told.
        clip: the largest length of an answer (:mod:`hyperfed.engines.updates`). Where not given, 1
            of one with noise, and 100 of one that is only masked.
        where: noise is added by each client to what it answers (``local``), or by a server that is
            trusted with the answers to what it makes of them (``central``).
        masking: the server is told sums of what clients answer, and no answer by itself
            (:mod:`hyperfed.engines.masking`).
    """

    epsilon: Annotated[FiniteFloat, Field(gt=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    clip: Annotated[FiniteFloat, Field(gt=0)] | None = None
    where: Where = "local"
    masking: bool = False

    @property
    def bound(self) -> float:
        """The largest length of an answer."""
        return self.clip or (100.0 if self.epsilon is None else 1.0)

    def sums(self) -> Masking | None:
        """Returns how answers are summed under masks; None where they are not."""
        return Masking(self.bound, self.epsilon is not None) if self.masking else None

    def updates(self, multiplier: float = math.inf) -> PrivateUpdates | None:
        """Returns how answers are made private, with so much noise; None where they are not."""
        if self.epsilon is None:
            return None
        return PrivateUpdates(self.where, self.bound, multiplier, self.epsilon, self.delta)


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    """Everything that decides what a run computes.

    Attributes:
        method: a name in :data:`hyperfed.methods.METHODS`.
        settings: an instance of that method's ``Config``.
        preset: which of the method's published settings the run started from.
        rounds: server iterations.
        cohort: clients of a round: their number, or a fraction of those that train (1.0 is all),
            novel ones not counted; halves are rounded up, and one is the least. Where there are
            fewer than a preset has, all of them.
        evaluate_every: rounds between evaluations.
        best: which validation number makes a round the best: ``accuracy`` stands for the task's own
            metric, which of numbers is the RMSE; the others are for classes.
        metrics: what clients count for beside the task's own metric: ``balanced_accuracy``, ``f1``
            (macro) and ``calibration`` (the expected error of confidence, 15 bins) of classes,
            which tell how many examples a client has of each, and ``r2`` of numbers, which tells
            mean and spread of its targets and is always there unless clients are at sites
            (:mod:`hyperfed.metrics`).
        examine: what is looked into beside how good models are, which changes no number.
            ``descriptors``: at each evaluation, how the distances between clients' descriptors rank
            beside those between their labels, and at the end the descriptors; ``crossed``: at the
            end, each known client's metric with what the server makes for every other one.
        checkpoint_every: rounds between checkpoints.
        seed: of every draw.
        device: where clients compute, and the server beside them: ``cpu``, ``cuda`` or ``cuda:N``.
            With ``flower`` that of the server; each site says its own.
        precision: of the clients' arithmetic. ``bf16`` computes products and convolutions of local
            steps and evaluations in bfloat16; weights and messages stay float32.
        track: where numbers go besides the records (:mod:`hyperfed.runs.trackers`):
            ``tensorboard``, ``mlflow``, ``wandb`` or None for nowhere. ``auto`` is TensorBoard
            where it is installed and the run has a folder.
        task: data, split and target model.
        serve: how clients are served.
        robust: against clients whose replies are wrong.
        privacy: of training.
        engine: who computes.
        faults: faults made on purpose.
    """

    method: str
    settings: Any
    preset: str = "default"
    rounds: PositiveInt = 200
    cohort: Annotated[int | float, AfterValidator(_number_or_fraction)] = 0.25
    evaluate_every: PositiveInt = 20
    best: Literal["accuracy", "masked_accuracy", "zeroed_accuracy"] = "accuracy"
    metrics: Annotated[tuple[MetricName, ...], BeforeValidator(several)] = ()
    examine: Annotated[tuple[Examined, ...], BeforeValidator(several)] = ()
    checkpoint_every: PositiveInt = 100
    seed: NonNegativeInt = 0
    device: str = "cpu"
    precision: Precision = "float32"
    track: TrackerName | None = "auto"
    task: TaskConfig = TaskConfig()
    serve: ServeConfig = ServeConfig()
    robust: RobustConfig = RobustConfig()
    privacy: TrainingPrivacy = TrainingPrivacy()
    engine: EngineConfig = EngineConfig()
    faults: Faults = Faults()


def load(
    source: str, overrides: Sequence[str] = (), *, methods: Mapping[str, Any] = METHODS
) -> RunConfig:
    """Builds the configuration of a run.

    Args:
        source: a method's name, or the path of an experiment file (or of a run's ``config.toml``),
            which ends in ``.toml``, or of a table and its cell, ``FILE.toml:CELL``
            (:mod:`hyperfed.runs.experiments`).
        overrides: ``key=value`` each. A value is read as a TOML literal; a bare word is a string.
        methods: name -> module with ``Config`` and ``PRESETS``.

    Raises:
        UserError: lists all errors at once.
    """
    problems: list[str] = []
    file = experiments.split(source)
    written = _read(Path(file[0]), file[1]) if file else {"method.name": source}
    return _build(written | dict(_parse(overrides, problems)), problems, methods)


def from_keys(
    method: str, keys: Mapping[str, Any], *, methods: Mapping[str, Any] = METHODS
) -> RunConfig:
    """Builds the configuration of a run from Python values: ``{"rounds": 10, "task.clients": 5}``.

    Raises:
        UserError: lists all errors at once.
    """
    return _build({"method.name": method, **dict(_flatten(keys))}, [], methods)


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
    for key in list(changed):
        if not key.startswith(tuple(allowed)) or key == "method.name":
            del changed[key]
            problems.append(
                f"{shown(key)}: must begin with {' or '.join(allowed)} to change after training"
            )
    return _build(dict(_flatten(to_dict(config))) | changed, problems, METHODS)


def known_keys(method: str, *, methods: Mapping[str, Any] = METHODS) -> list[str]:
    """Returns every key that a run of ``method`` understands, as a user writes it."""
    return [shown(key) for key in _known(methods[method].Config)]


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Returns all settings as nested dicts of plain values, with the keys that users write."""
    plain = TypeAdapter(RunConfig).dump_python(config, mode="json")
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
    again = "" if config.task.source == "python" else AGAIN
    atomic_write(path, f"{again}{toml.dumps(to_dict(config))}".encode())


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
            written[key] = str(path.parent / value)
    for key in _FILES:
        if isinstance(value := written.get(key), str):
            file = path.parent / value.partition(".py:")[0]
            beside = file.with_suffix(".py") if ".py:" in value else file
            if _is_file(beside):
                written[key] = str(path.parent / value)
    return written


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file has so long a name
        return False


def _parse(overrides: Iterable[str], problems: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of each ``key=value``; a table as value gives several."""
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key.strip():
            yield from _flatten({key.strip(): toml.read_value(value.strip())})
        else:
            problems.append(f"{override}: must be key=value, such as rounds=100")


# Validation.


def _build(
    written: Mapping[str, Any], problems: list[str], methods: Mapping[str, Any]
) -> RunConfig:
    """Validates section by section, so that one error does not hide the others."""
    name = written.get("method.name")
    module = methods.get(name) if isinstance(name, str) else None
    if module is None:
        came = f"came {toml.literal(name)}{nearest(name, methods)}" if name else "it is missing"
        problems.append(f"method: must be one of {', '.join(methods)}; {came}")

    keys = _preset(module, name, written, problems) | dict(written)
    known = _known(module.Config if module else None)
    for key in [key for key in keys if key not in known]:
        value = keys.pop(key)
        if module is None and key.startswith("method."):
            continue  # nobody knows the keys of an unknown method
        hint = _nearest_key(key, known)
        problems.append(
            f"{shown(key)}: must be a key of this run, came {toml.literal(value)}; {hint}"
        )
    for key, value in keys.items():
        if value == "none" and NoneType in get_args(known[key]):
            keys[key] = None

    table = _nested(keys)
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
    config = settings = None
    if module is not None:
        settings = _section(module.Config, "method", own, known, problems)
    if (steps := parts["serve"].finetune_steps) and getattr(settings, "pooled", False):
        problems.append(
            "serve.finetune_steps: must be 0 where a novel client uses several models "
            f"(method.novel_models); came {steps}"
        )
    if (rule := parts["robust"].aggregation) != "mean" and name in NO_MEAN:
        problems.append(
            f"robust.aggregation: must be mean for {name}, whose server averages nothing that a "
            f"rule could stand for; came {toml.literal(rule)}"
        )
    if module is not None:
        problems += _not_private(parts["privacy"], str(name), settings, parts["robust"])
        problems += _not_masked(str(name), **parts)
    try:
        config = RunConfig(method=str(name), settings=settings, **table, **parts)
    except ValidationError as error:
        problems += _explain(error, "", known)
    if short := config is not None and config.rounds < (least := _least_rounds(settings)):
        problems.append(
            f"rounds: must be at least {least}, or {name} does not come to its last phase; "
            f"came {config.rounds}; raise it, or lower the lengths of the phases (method.*_rounds)"
        )
    if problems or config is None:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        kind = TooShortError if short and len(problems) == 1 else UserError
        raise kind("\n  - ".join([f"the configuration has {count}:", *problems]))
    return config


def _not_private(
    privacy: TrainingPrivacy, method: str, settings: Any, robust: RobustConfig
) -> list[str]:
    """Returns why training cannot be private with these settings."""
    if privacy.epsilon is None:
        return []
    found = []
    if method in NO_UPDATES:
        others = sorted(set(METHODS) - set(NO_UPDATES))
        found.append(
            f"privacy.epsilon: must be none for {method}, whose clients answer with more than "
            f"updates, or with nothing; came {privacy.epsilon:g}; choose one of {', '.join(others)}"
        )
    if privacy.where == "central" and robust.aggregation != "mean":
        found.append(
            "robust.aggregation: must be mean where the server adds noise to means; "
            f"came {toml.literal(robust.aggregation)}"
        )
    unmeant = ("standardize", "delayed_gradient") if privacy.where == "central" else ()
    return found + [
        f"method.{key}: must be false where the server adds noise to means, since what it does for "
        "it is none; came true"
        for key in unmeant
        if getattr(settings, key, False)
    ]


def _not_masked(
    method: str, privacy: TrainingPrivacy, robust: RobustConfig, faults: Faults, **_: Any
) -> list[str]:
    """Returns why sums cannot be masked with these settings."""
    if not privacy.masking:
        return []
    found = []
    if method in NO_SUMS:
        others = sorted(set(METHODS) - set(NO_SUMS))
        found.append(
            f"privacy.masking: must be false for {method}, whose server needs more than means; "
            f"came true; choose one of {', '.join(others)}"
        )
    if privacy.epsilon is not None and privacy.where == "local":
        found.append(
            "privacy.where: must be central where sums are masked, which have room for bounded "
            "answers and not for each one's noise; came local"
        )
    if robust.aggregation != "mean":
        found.append(
            "robust.aggregation: must be mean where sums are masked, as every other rule needs the "
            f"answers; came {toml.literal(robust.aggregation)}"
        )
    if faults.nan or faults.hostile:
        found.append(
            "faults.nan, faults.hostile: must be 0 and empty where sums are masked, since they are "
            "made where the server reads answers, which it does not"
        )
    return found


def _least_rounds(settings: Any) -> int:
    """Returns how many rounds a method needs to come to its last phase, where it has several."""
    least: int = getattr(settings, "least_rounds", 1)
    return least


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
    return dict(_flatten(presets.get(preset, {})))


def _section(
    kind: Any, section: str, table: dict[str, Any], known: Iterable[str], problems: list[str]
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


def _explain(error: ValidationError, section: str, known: Iterable[str]) -> list[str]:
    """Returns one line for each key, which joins what the members of a union would have taken."""
    lines: dict[str, tuple[list[str], str]] = {}
    for detail in error.errors(include_url=False):
        key = shown(_key_at(section, detail["loc"], known))
        came = (
            "" if isinstance(detail["input"], dict) else f"; came {toml.literal(detail['input'])}"
        )
        lines.setdefault(key, ([], came))[0].append(_requirement(detail))
    return [
        f"{key}: {', or '.join(dict.fromkeys(musts))}{came}" for key, (musts, came) in lines.items()
    ]


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


def nearest(word: object, options: Iterable[str]) -> str:
    """Returns "; did you mean ...?", or nothing where nothing is near."""
    near = difflib.get_close_matches(str(word), options, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _nearest_key(key: str, known: Iterable[str]) -> str:
    """Returns a question, by the last word of the key, or the keys there are if none is near."""
    section, _, last = key.rpartition(".")
    # Where two keys end in one word, the later here is asked for: that of the same section.
    by_section = sorted(known, key=lambda name: name.rpartition(".")[0] == section)
    ends = {shown(name).rpartition(".")[2]: shown(name) for name in by_section}
    if near := difflib.get_close_matches(last, ends, n=1):
        return f"did you mean {ends[near[0]]}?"
    inside = [name for name in known if name.startswith(f"{key}.")]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    return f"the keys are {', '.join(map(shown, inside or beside or known))}"

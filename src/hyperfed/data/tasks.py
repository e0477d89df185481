"""From settings to a :class:`~hyperfed.task.Task`: load, divide, build the targets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hyperfed import task as tasks
from hyperfed.data import datasets, features, model_files, own_files, partitions
from hyperfed.data.arrays import MOST_CLASSES, raise_all
from hyperfed.data.corruptions import CorruptionName, corrupt_novel
from hyperfed.data.division import divide, fitted, names_of, novel_dealt_anew
from hyperfed.data.examples import (
    Examples,
    Normalize,
    channel_statistics,
    fingerprint_of,
    fingerprint_of_frozen,
    hash_of,
    is_image,
)
from hyperfed.data.features import Prefix
from hyperfed.data.label_codes import recoded
from hyperfed.data.networks import in_precision_of, prepared, to_try, try_out
from hyperfed.data.newcomer import newcomer
from hyperfed.data.own import (
    Task,
    from_arrays,
    mean_squared_error,
    minus_squared_error,
)
from hyperfed.data.partitions import Partition
from hyperfed.data.roster import Frame, RemoteTask, Roster, dtype_of, no_targets
from hyperfed.data.settings import PARTITIONS, TaskConfig
from hyperfed.errors import UserError
from hyperfed.nets.targets import build_target
from hyperfed.system.randomness import seeded
from hyperfed.task import BASE

__all__ = [
    "PARTITIONS",
    "TaskConfig",
    "build",
    "check_remote",
    "divide",
    "from_arrays",
    "load",
    "newcomer",
    "remote",
    "settings_of",
    "target_sizes",
    "targets",
    "targets_of",
]

SMALLEST_LENET_SIDE = 16
"""Smaller images (the digits are 8 x 8) get an MLP by default."""


def build(config: TaskConfig, seed: int, *, served: TaskConfig | None = None) -> Task:
    """Loads the data, divides it over clients and makes the target network(s).

    Args:
        config: the settings.
        seed: of the division and of the initial weights.
        served: the same settings with another ``novel_alpha``, ``novel_corruption`` or
            ``unlabelled`` for novel clients, after training. Known ones keep what they have.

    Raises:
        UserError: the data cannot be had, or the settings do not fit it.
    """
    if config.source == "python":
        raise UserError(
            f"the task {config.name!r} of this run was made in Python, so its data are not to be "
            "had from here; go on in Python with the task that it was made with, "
            "hyperfed.open_run(FOLDER, task) or hyperfed.resume(FOLDER, task), or start a run "
            "whose data and model are files: task=FILE task.model=FILE.py:NET"
        )
    examples = load(config)
    name = datasets.located(config.name, config.data_dir)
    of_both = (replace(settings, name=name) for settings in (config, served or config))
    config, served = (fitted(settings, examples) for settings in of_both)
    partition = divide(config, examples, seed)
    if served.novel_alpha != config.novel_alpha:
        everything = divide(replace(config, examples_per_client=None), examples, seed)
        partition = novel_dealt_anew(everything, served, examples, seed)
    if config.name not in datasets.NAMES:
        known = torch.cat(partition.train[: config.client_count - config.novel_clients])
        mean, std = channel_statistics(examples.x[known])
        examples = replace(examples, mean=mean, std=std)
    if config.label_codes > 1:
        examples = recoded(examples, partition, config.label_codes)
    if served.novel_corruption is not None:
        examples = _corrupted(examples, partition, config, served.novel_corruption, seed)
    models = targets(config, examples, seed)
    x, y = (in_precision_of(models, values) for values in (examples.x, examples.y))
    examples = replace(examples, x=x, y=y)
    normalize = _transform(config, examples)
    transform: Normalize | Prefix = normalize
    once, seen = None, list(_seen(config, examples, partition, models))
    if config.prefix is not None:
        models, transform = _split(models, config.prefix, normalize, examples)
        once = features.computed(transform, examples.x)
    regression: dict[str, Any] = {"loss": mean_squared_error, "score": minus_squared_error}
    return Task(
        name=examples.name,
        x=examples.x,
        y=examples.y,
        train=partition.train,
        val=partition.val,
        test=partition.test,
        models=models,
        classes=examples.classes,
        sizes=partitions.deal_sizes(tuple(models), config.client_count, seed),
        novel=config.novel_clients,
        unlabelled=served.unlabelled,
        transform=transform,
        features=once,
        fingerprint=hash_of(*seen),
        names=names_of(config, examples, partition),
        labels=examples.labels if config.label_codes == 1 else (),
        source=Source(served, seed),
        columns=replace(config.columns, features=examples.features or None),
        **({} if examples.classes else regression),
    )


def load(config: TaskConfig) -> Examples:
    """Loads the data of a task, whose labels are numbered as its settings say.

    Raises:
        UserError: the data cannot be had, or have other labels.
    """
    examples = datasets.load(config.name, config.data_dir, config.columns)
    return examples if config.labels is None else own_files.numbered_by(examples, config.labels)


def of_nobody(config: TaskConfig) -> str:
    """Returns a sentence where the clients of somebody's own data are made up; "" of any other.

    Args:
        config: the settings of a task that was made.
    """
    known = config.partition in (None, "natural", "file") or config.name in datasets.NAMES
    if known or config.source == "python":
        return ""
    return (
        f"the {config.client_count} clients are made up, and dealt to by {config.partition}; whose "
        "an example is, a column client says, one named by task.client, or person/class/*.png"
    )


@dataclass(frozen=True)
class Source:
    """What made a task, and can make it again."""

    settings: TaskConfig
    seed: int


def settings_of(task: tasks.Task, seed: int) -> TaskConfig:
    """Returns the settings that make a task with a seed; else what records say of one from Python.

    Args:
        task: the task.
        seed: that of a run on it.
    """
    if isinstance(task.source, Source) and task.source.seed == seed:
        return task.source.settings
    return TaskConfig(
        name=task.name,
        clients=task.clients,
        novel=task.novel,
        unlabelled=task.unlabelled,
        source="python",
    )


def _transform(config: TaskConfig, examples: Examples) -> Normalize:
    """Returns how images become network input; anything else passes unchanged."""
    if config.normalize == "statistics":
        return examples.transform
    half = (0.5,) * len(examples.mean)
    return Normalize(half, half)


def _split(
    whole: Mapping[str, nn.Module], prefix: str, normalize: Normalize, examples: Examples
) -> tuple[dict[str, nn.Module], Prefix]:
    """Returns the targets that take features, and what makes these of raw examples."""
    models, net = features.split_off(whole, prefix)
    features.check(whole, models, net, normalize(examples.x[to_try(examples.x)]))
    return models, Prefix(normalize, net)


def _seen(
    config: TaskConfig, examples: Examples, partition: Partition, models: Mapping[str, nn.Module]
) -> Iterator[str]:
    """Yields what tells apart the data that two runs see, to which what is frozen belongs."""
    yield examples.fingerprint
    yield partition.fingerprint
    if config.normalize != "statistics":
        yield config.normalize
    if frozen := fingerprint_of_frozen(models):
        yield frozen


def _corrupted(
    examples: Examples,
    partition: Partition,
    config: TaskConfig,
    name: CorruptionName,
    seed: int,
) -> Examples:
    """Corrupts novel clients' images; channel statistics stay those of the data set."""
    x = corrupt_novel(examples.x, partition, novel=config.novel_clients, name=name, seed=seed)
    changed = replace(examples, x=x)
    return replace(changed, fingerprint=fingerprint_of(changed.tensors()))


def targets(config: TaskConfig, examples: Examples, seed: int) -> dict[str, nn.Module]:
    """Builds the target network of each size, its weights a function of seed and size.

    Returns:
        Size name -> network: "base" for one size; S, M and L for three; else "width8" and so on.

    Raises:
        UserError: no such target, or one that does not suit the data or takes no width.
    """
    name = config.model or _default_target(examples)
    own = model_files.is_file(name)
    widths = {BASE: config.width}
    if config.widths is not None:
        widths = dict(zip(_size_names(config.widths), config.widths, strict=True))
    shape, target = tuple(examples.x.shape[1:]), examples.y.shape[1:]
    outputs = examples.classes or target.numel()
    vocabulary = None
    if name == "char_lstm" and examples.x.numel():
        if int(examples.x.min()) < 0:
            raise UserError(
                f"tokens must be 0 or more, got {int(examples.x.min())} in {examples.name}; number "
                "them from 0"
            )
        vocabulary = max(outputs, int(examples.x.max()) + 1)
        if vocabulary > MOST_CLASSES:
            raise UserError(
                f"tokens must be below {MOST_CLASSES}, got {vocabulary - 1} in {examples.name}; "
                "number them from 0, or make floats of integers that are none"
            )
    models = {}
    for size, width in widths.items():
        given = {"width": width, "hidden": config.hidden, "vocabulary": vocabulary}
        options = {option: value for option, value in given.items() if value is not None}
        with seeded(seed, "target", size):
            models[size] = (
                prepared(model_files.make(name, options))
                if own
                else build_target(name, input_shape=shape, classes=outputs, **options)
            )
    if len(examples):
        problems: list[str] = []
        some = in_precision_of(models, examples.x[to_try(examples.x)])
        batch = _transform(config, examples)(some)
        try_out(models, batch, (*target, examples.classes), seed, problems)
        raise_all(problems, f"{name} does not suit {examples.name}")
    return models


def target_sizes(config: TaskConfig) -> tuple[str, ...]:
    """Returns the names of the targets that :func:`targets` builds."""
    return (BASE,) if config.widths is None else _size_names(config.widths)


def targets_of(config: TaskConfig, frame: Frame, seed: int) -> dict[str, nn.Module]:
    """Builds the targets of clients at sites, as :func:`targets` does, without any example.

    Raises:
        UserError: no such target, one as of :func:`check_remote`, or one that does not suit the
            data or takes no width.
    """
    check_remote(config)
    x = torch.zeros(0, *frame.shape, dtype=dtype_of(frame))
    y = no_targets(frame)
    examples = Examples(config.name, x, y, torch.zeros(0, dtype=torch.bool), frame.classes)
    return targets(config, examples, seed)


def check_remote(config: TaskConfig) -> None:
    """Refuses targets that clients at sites cannot have.

    Raises:
        UserError: one in a file, or one with a frozen part.
    """
    if config.model is not None and model_files.is_file(config.model):
        # A server does not decide which code of a site's disk runs there.
        raise UserError(
            "task.model must be the name of a target where clients are at sites, got "
            f"{config.model}; choose one of hyperfed.nets.targets"
        )
    if config.prefix is not None:
        raise UserError(
            "task.prefix must be left out where clients are at sites, got "
            f"{config.prefix}; let the sites hold features instead of examples"
        )


def remote(config: TaskConfig, roster: Roster, seed: int, link: Any = None) -> RemoteTask:
    """Makes the task of clients at sites, whose data the server does not have.

    Args:
        config: the settings; those of the data say nothing here, but what the columns of a
            newcomer's table are.
        roster: who the clients are.
        seed: of the initial weights.
        link: the way to the sites; None where nobody is to be asked.

    Raises:
        UserError: no such target, or one that does not suit the data or takes no width.
    """
    task = RemoteTask.of(roster, targets_of(config, roster.frame, seed), config.name, link)
    return replace(
        task,
        source=Source(config, seed),
        names=tuple(member.name for member in roster.members),
        labels=config.labels or roster.labels,
        columns=config.columns,
    )


def _default_target(examples: Examples) -> str:
    if examples.text:
        return "text_lstm"
    if examples.x.dtype == torch.int64:
        return "char_lstm"
    if not is_image(examples.x) or min(examples.x.shape[2:]) < SMALLEST_LENET_SIDE:
        return "mlp"
    return "omniglot_net" if examples.name == "omniglot" else "lenet"


def _size_names(widths: tuple[int, ...]) -> tuple[str, ...]:
    """Names sizes S, M and L as pFedHN (section 5.2) does, in ascending order of width."""
    if len(widths) != 3:
        return tuple(f"width{width}" for width in widths)
    ascending = sorted(widths)
    return tuple("SML"[ascending.index(width)] for width in widths)

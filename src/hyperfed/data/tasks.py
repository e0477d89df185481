"""From settings to a :class:`~hyperfed.federation.Task`: load, divide, build the targets."""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass
from torch import nn

from hyperfed.data import datasets, partitions, shares
from hyperfed.data.corruptions import CorruptionName, corrupt_novel
from hyperfed.data.examples import Examples, fingerprint_of, hash_of, is_image
from hyperfed.data.own import Task, from_arrays, newcomer
from hyperfed.data.partitions import Partition, random_source
from hyperfed.data.roster import Frame, RemoteTask, Roster, dtype_of
from hyperfed.errors import UserError
from hyperfed.federation import BASE
from hyperfed.nets.targets import build_target
from hyperfed.system.randomness import seeded

__all__ = [
    "PARTITIONS",
    "TaskConfig",
    "build",
    "divide",
    "from_arrays",
    "newcomer",
    "remote",
    "target_sizes",
    "targets",
    "targets_of",
]

Fraction = Annotated[float, Field(ge=0, lt=1)]

PartitionName = Literal[
    "class_shares",
    "dirichlet",
    "dirichlet_equal",
    "dirichlet_per_class",
    "equal_classes",
    "majority",
    "shards",
    "coarse",
    "iid",
    "natural",
]
PARTITIONS: tuple[PartitionName, ...] = get_args(PartitionName)

SMALLEST_LENET_SIDE = 16
"""Smaller images (the digits are 8 x 8) get an MLP by default."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TaskConfig:
    """The ``task.*`` settings.

    Attributes:
        name: data set, folder, .npz file or hub id (:func:`hyperfed.data.datasets.load`).
        data_dir: folder of data sets; ``$HYPERFED_DATA`` where None.
        clients: number of clients, novel ones included. With ``natural``, that many of the data
            set's own clients, drawn at random.
        fraction: of all examples that is used at all, the same of each class (with ``natural``, of
            each client) for training, validation and testing; at least one where there is one.
        partition: who holds what; :mod:`hyperfed.data.shares` describes each. ``dirichlet`` draws
            per client, ``dirichlet_equal`` too, for clients of the same size. ``coarse`` needs
            coarse labels (cifar100). ``natural`` takes the data set's own clients (writers,
            alphabets, roles).
        classes_per_client: for ``class_shares`` and ``equal_classes``; shards per client for
            ``shards``; majority classes per client for ``majority``.
        shares: ``class_shares`` as pFedHN's paper or as its official code draws them.
        share_low: a client's part of each of its classes is drawn, in proportion, between this and
            ``share_high``, by ``class_shares``. Equal ones give equal parts, as PeFLL's authors do.
        share_high: see there.
        alpha: Dirichlet concentration.
        majority_ratio: examples of a majority class to one of another, for ``majority``.
        novel: fraction of clients that join after training, rounded; the last ones.
        novel_alpha: another Dirichlet concentration for them; None for the same. Where it changes
            after training, what they hold is dealt out to them anew, and to nobody else.
        novel_corruption: of the novel clients' images, in training, validation and test
            (:mod:`hyperfed.data.corruptions`); None for images as they are.
        unlabelled: novel clients have no training labels.
        val: fraction for validation. None for 0.2 of the training split where the data set has a
            test split of its own (10,000 images of CIFAR; of MNIST 10,000 too), else 0.15 of all
            examples.
        test: fraction of all examples for testing. None for the data set's own test split, where
            it has one, else 0.15. A number pools all examples first.
        model: target network, a name of :data:`hyperfed.nets.targets.TARGETS`. None for the one
            that suits the data: char_lstm, omniglot_net, lenet, or mlp for small images.
        width: first filters of a lenet or omniglot_net; None for its default.
        hidden: outputs of the hidden layers, a number or one for each layer, as the target takes
            them (an mlp either, a lenet those of fc1 and fc2); None for its default.
        widths: several widths, one model size each, for equal groups of clients drawn at random.
            Three are called S, M and L.
    """

    name: str = "digits"
    data_dir: str | None = None
    clients: PositiveInt = 20
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    partition: PartitionName = "class_shares"
    classes_per_client: PositiveInt = 2
    shares: Literal["paper", "official"] = "paper"
    share_low: PositiveFloat = 0.4
    share_high: PositiveFloat = 0.6
    alpha: PositiveFloat = 0.1
    majority_ratio: Annotated[float, Field(ge=1)] = 5.0
    novel: Fraction = 0.1
    novel_alpha: PositiveFloat | None = None
    novel_corruption: CorruptionName | None = None
    unlabelled: bool = False
    val: Fraction | None = None
    test: Fraction | None = None
    model: str | None = None
    width: PositiveInt | None = None
    hidden: PositiveInt | tuple[PositiveInt, ...] | None = None
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] | None = None

    @property
    def novel_clients(self) -> int:
        """Number of clients that join after training."""
        return round(self.novel * self.clients)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        per_client = ("dirichlet", "dirichlet_equal")
        if self.novel_alpha is not None and self.partition not in per_client:
            raise ValueError(
                f"novel_alpha needs partition={' or '.join(per_client)}, got {self.partition}; "
                "remove novel_alpha"
            )
        for key in ("novel_alpha", "novel_corruption"):
            if getattr(self, key) is not None and not self.novel_clients:
                raise ValueError(
                    f"{key} needs novel clients, got novel={self.novel} of {self.clients} "
                    f"clients; raise novel or remove {key}"
                )
        if self.share_low > self.share_high:
            raise ValueError(
                f"share_low must be at most share_high, got {self.share_low} and {self.share_high}"
            )
        if self.widths is not None and self.width is not None:
            raise ValueError("give width or widths, not both")
        if self.widths is not None and len(set(self.widths)) < len(self.widths):
            raise ValueError(f"widths must differ, got {self.widths}")
        if (self.val or 0) + (self.test or 0) >= 1:
            raise ValueError(
                f"val + test must leave examples to train on, got {self.val} + {self.test}"
            )
        if self.novel_clients >= self.clients:
            raise ValueError(
                f"a client must be left to train, got {self.clients} clients of which "
                f"{self.novel_clients} are novel; lower novel"
            )
        return self


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
    served = served or config
    examples = datasets.load(config.name, config.data_dir)
    partition = divide(config, examples, seed)
    if served.novel_alpha != config.novel_alpha:
        partition = _novel_dealt_anew(partition, served, examples, seed)
    if served.novel_corruption is not None:
        examples = _corrupted(examples, partition, config, served.novel_corruption, seed)
    models = targets(config, examples, seed)
    return Task(
        name=examples.name,
        x=examples.x,
        y=examples.y,
        train=partition.train,
        val=partition.val,
        test=partition.test,
        models=models,
        classes=examples.classes,
        sizes=partitions.deal_sizes(tuple(models), config.clients, seed),
        novel=config.novel_clients,
        unlabelled=served.unlabelled,
        transform=examples.transform,
        fingerprint=hash_of(examples.fingerprint, partition.fingerprint),
    )


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


def divide(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Divides a data set over clients: the training, validation and test examples of each.

    Raises:
        UserError: the settings do not fit the data.
    """
    if not examples.classes:
        raise UserError(f"{examples.name} must have integer labels; use from_arrays for regression")
    if config.partition == "natural":
        return _divide_naturally(config, examples, seed)
    if not examples.shared_labels:
        raise UserError(
            f"{examples.name} numbers its labels within each natural client, so its classes cannot "
            f"be dealt out, got partition={config.partition}; use partition=natural"
        )
    labels = examples.y.numpy()
    part = _hold_out(config, examples, labels, examples.held_out.numpy(), seed)
    rng = random_source(seed, "shares")
    drawn = _draw_shares(config, examples, labels[part == partitions.TRAIN], rng)
    return partitions.by_shares(drawn, labels, part, random_source(seed, "allocate"))


def _novel_dealt_anew(
    partition: Partition, config: TaskConfig, examples: Examples, seed: int
) -> Partition:
    """Deals what novel clients hold out to them by ``novel_alpha``, as if there were no others."""
    known = config.clients - config.novel_clients
    part = np.full(len(examples), partitions.UNUSED)
    splits = (partition.train, partition.val, partition.test)
    for purpose, own in zip(
        (partitions.TRAIN, partitions.VAL, partitions.TEST), splits, strict=True
    ):
        part[torch.cat(own[known:]).numpy()] = purpose
    alone = replace(
        config,
        clients=config.novel_clients,
        novel=0.0,
        alpha=config.novel_alpha or config.alpha,
        novel_alpha=None,
        novel_corruption=None,
    )
    labels = examples.y.numpy()
    rng = random_source(seed, "novel shares")
    drawn = _draw_shares(alone, examples, labels[part == partitions.TRAIN], rng)
    novel = partitions.by_shares(drawn, labels, part, random_source(seed, "novel allocate"))
    return Partition(
        train=partition.train[:known] + novel.train,
        val=partition.val[:known] + novel.val,
        test=partition.test[:known] + novel.test,
        class_proportions=torch.cat([partition.class_proportions[:known], novel.class_proportions]),
    )


def _draw_shares(
    config: TaskConfig,
    examples: Examples,
    training_labels: shares.Integers,
    rng: np.random.Generator,
) -> shares.Shares:
    clients, per_client, classes = config.clients, config.classes_per_client, examples.classes
    sizes = np.bincount(training_labels, minlength=classes)
    match config.partition:
        case "class_shares":
            return shares.class_shares(
                clients,
                classes,
                per_client,
                rng,
                variant=config.shares,
                low=config.share_low,
                high=config.share_high,
            )
        case "dirichlet":
            return shares.dirichlet_per_client(clients, classes, _alphas(config), rng)
        case "dirichlet_equal":
            return shares.dirichlet_equal(clients, classes, _alphas(config), rng, sizes)
        case "dirichlet_per_class":
            return shares.dirichlet_per_class(clients, classes, config.alpha, rng)
        case "equal_classes":
            return shares.equal_classes(clients, classes, per_client, rng, sizes)
        case "majority":
            ratio = config.majority_ratio
            return shares.majority(clients, classes, per_client, rng, ratio=ratio, sizes=sizes)
        case "shards":
            return shares.shards(clients, classes, per_client, training_labels, rng)
        case "coarse":
            return shares.coarse_classes(clients, _coarse_of_class(examples), rng)
        case _:
            return shares.iid(clients, classes)


def _coarse_of_class(examples: Examples) -> shares.Integers:
    """Returns the coarse class of each class, (classes,)."""
    if examples.coarse is None:
        raise UserError(
            f"partition=coarse needs coarse labels, and {examples.name} has none; "
            "choose another partition, or cifar100"
        )
    labels, coarse = examples.y.numpy(), examples.coarse.numpy()
    of_class = np.full(examples.classes, -1)  # a class without examples goes to nobody
    of_class[labels] = coarse
    mixed = of_class[labels] != coarse
    if mixed.any():
        raise UserError(
            "partition=coarse needs one coarse class for each class, and in "
            f"{examples.name} class {labels[mixed][0]} has several; choose another partition"
        )
    return of_class


def _alphas(config: TaskConfig) -> npt.NDArray[np.float64]:
    """Returns the Dirichlet concentration of each client."""
    alphas = np.full(config.clients, config.alpha)
    if config.novel_alpha is not None:
        alphas[config.clients - config.novel_clients :] = config.novel_alpha
    return alphas


def _divide_naturally(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Takes the data set's own clients.

    Its own test split is kept where every client has examples on both sides of it; where not (a
    writer of MNIST is in one or the other), a client's examples are pooled and split.
    """
    if examples.client is None:
        raise UserError(
            f"partition=natural needs natural clients, and {examples.name} has none; "
            "choose another partition, or data with a client column"
        )
    client, held_out = examples.client.numpy(), examples.held_out.numpy()
    natural = int(client.max()) + 1
    if config.clients > natural:
        raise UserError(
            f"{examples.name} has {natural} natural clients, got clients={config.clients}; "
            f"set clients to at most {natural}"
        )
    on_both_sides = all(len(np.unique(client[side])) == natural for side in (held_out, ~held_out))
    own_split = held_out if on_both_sides else np.zeros_like(held_out)
    part = _hold_out(config, examples, client, own_split, seed)
    chosen = random_source(seed, "clients").permutation(natural)[: config.clients]
    number = np.full(natural, -1)
    number[chosen] = np.arange(config.clients)
    return partitions.by_client(
        number[client], examples.y.numpy(), part, clients=config.clients, classes=examples.classes
    )


def _hold_out(
    config: TaskConfig,
    examples: Examples,
    groups: shares.Integers,
    own_split: npt.NDArray[np.bool_],
    seed: int,
) -> shares.Integers:
    """Decides what each example is for, with the fractions that ``TaskConfig`` documents."""
    rng = random_source(seed, "hold out")
    if config.test is None and own_split.any():
        usual = datasets.VALIDATION.get(examples.name, 0.2)
        val = usual if config.val is None else config.val
        part = partitions.hold_out(groups, rng, val=val, test=None, held_out=own_split)
    else:
        val = 0.15 if config.val is None else config.val
        test = 0.15 if config.test is None else config.test
        part = partitions.hold_out(groups, rng, val=val, test=test)
    if config.fraction == 1:
        return part
    return partitions.thin(part, groups, config.fraction, random_source(seed, "fraction"))


def targets(config: TaskConfig, examples: Examples, seed: int) -> dict[str, nn.Module]:
    """Builds the target network of each size, its weights a function of seed and size.

    Returns:
        Size name -> network: "base" for one size; S, M and L for three; else "width8" and so on.

    Raises:
        UserError: no such target, or one that does not suit the data or takes no width.
    """
    name = config.model or _default_target(examples)
    widths = {BASE: config.width}
    if config.widths is not None:
        widths = dict(zip(_size_names(config.widths), config.widths, strict=True))
    shape, classes = tuple(examples.x.shape[1:]), examples.classes
    models = {}
    for size, width in widths.items():
        given = {"width": width, "hidden": config.hidden}
        options = {option: value for option, value in given.items() if value is not None}
        with seeded(seed, "target", size):
            models[size] = build_target(name, input_shape=shape, classes=classes, **options)
    return models


def target_sizes(config: TaskConfig) -> tuple[str, ...]:
    """Returns the names of the targets that :func:`targets` builds."""
    return (BASE,) if config.widths is None else _size_names(config.widths)


def targets_of(config: TaskConfig, frame: Frame, seed: int) -> dict[str, nn.Module]:
    """Builds the targets of clients at sites, as :func:`targets` does, without any example.

    Raises:
        UserError: no such target, or one that does not suit the data or takes no width.
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    x = torch.zeros(0, *frame.shape, dtype=dtype_of(frame))
    examples = Examples(config.name, x, nothing, nothing.bool(), frame.classes or 1)
    return targets(config, examples, seed)


def remote(config: TaskConfig, roster: Roster, seed: int, link: Any = None) -> RemoteTask:
    """Makes the task of clients at sites, whose data the server does not have.

    Args:
        config: the settings; those of the data say nothing here.
        roster: who the clients are.
        seed: of the initial weights.
        link: the way to the sites; None where nobody is to be asked.

    Raises:
        UserError: no such target, or one that does not suit the data or takes no width.
    """
    return RemoteTask.of(roster, targets_of(config, roster.frame, seed), config.name, link)


def _default_target(examples: Examples) -> str:
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

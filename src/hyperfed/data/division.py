"""From settings to who holds what: each way to divide a data set over clients."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor

from hyperfed.data import datasets, partition_files, partitions, pfllib, shares
from hyperfed.data.examples import Examples
from hyperfed.data.partitions import Partition, random_source
from hyperfed.data.settings import PartitionName, TaskConfig
from hyperfed.errors import UserError

WITHOUT_LABELS = ("natural", "shuffled", "iid", "file")
"""Partitions that need no labels."""

OF_LABELLED: PartitionName = "class_shares"
"""The partition of labelled data where settings name none, as of every data set with a name."""


def fitted(config: TaskConfig, examples: Examples) -> TaskConfig:
    """Returns the settings with those filled in that follow from the data.

    Your own data that know their clients are divided by them, and all of them take part.

    Raises:
        UserError: the settings do not fit the number of clients.
    """
    own = config.name not in datasets.NAMES and examples.client is not None
    default: PartitionName = "natural" if own else OF_LABELLED if examples.classes else "shuffled"
    partition = config.partition or default
    clients = config.client_count
    if config.clients is None and own and partition == "natural":
        clients = len(torch.unique(_clients(examples)))
    try:
        return replace(config, partition=partition, clients=clients)
    except ValidationError as error:
        wrong = [detail["msg"].removeprefix("Value error, ") for detail in error.errors()]
        told = "; ".join(line for message in wrong for line in message.splitlines())
        raise UserError(f"the settings of the task do not fit {examples.name}: {told}") from error


def divide(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Divides a data set over clients: the training, validation and test examples of each.

    Raises:
        UserError: the settings do not fit the data.
    """
    config = fitted(config, examples)
    if not examples.classes:
        if config.partition not in WITHOUT_LABELS:
            raise UserError(
                f"{examples.name} must have labels for partition={config.partition}, but its "
                f"target holds floats; choose one of {', '.join(WITHOUT_LABELS)}, or make "
                "integers or words of the target"
            )
        examples = replace(examples, y=torch.zeros(len(examples), dtype=torch.int64), classes=1)
    dealt = _deal(config, examples, seed)
    if config.examples_per_client is None:
        return dealt
    return partitions.keep_few(dealt, config.examples_per_client, seed)


def names_of(config: TaskConfig, examples: Examples, partition: Partition) -> tuple[str, ...]:
    """Returns the names of a division's clients; () where they are not those of the data."""
    if config.partition != "natural" or not examples.names:
        return ()
    client = _clients(examples)
    return tuple(examples.names[int(client[rows[0]])] for rows in partition.train)


def _clients(examples: Examples) -> Tensor:
    """Returns the natural client of each example, (N,).

    Raises:
        UserError: there are none.
    """
    if examples.client is None:
        raise UserError(
            f"partition=natural needs natural clients, and {examples.name} has none; "
            "choose another partition, or data with a client column"
        )
    return examples.client


def _deal(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Deals out all examples."""
    if config.partition == "natural":
        return _divide_naturally(config, examples, seed)
    if config.partition_file is not None:
        return _divide_by_file(config, config.partition_file, examples, seed)
    if not examples.shared_labels:
        raise UserError(
            f"{examples.name} numbers its labels within each natural client, so its classes cannot "
            f"be dealt out, got partition={config.partition}; use partition=natural"
        )
    if config.client_count > len(examples):  # before there is a list with an entry for each
        raise UserError(
            f"clients must be {len(examples)} at most, as many as there are examples of "
            f"{examples.name}, got {config.client_count}; lower task.clients"
        )
    if config.partition == "pfllib":
        return _divide_as_pfllib(config, examples, seed)
    labels = examples.y.numpy()
    part = _hold_out(config, examples, labels, examples.held_out.numpy(), seed)
    if config.partition == "shuffled":
        rng = random_source(seed, "shuffle")
        return partitions.shuffled(part, rng, clients=config.client_count)
    if config.partition == "iid":
        rng = random_source(seed, "allocate")
        return partitions.iid(labels, part, rng, clients=config.client_count)
    rng = random_source(seed, "shares")
    drawn = _draw_shares(config, examples, labels[part == partitions.TRAIN], rng)
    return partitions.by_shares(drawn, labels, part, random_source(seed, "allocate"))


def novel_dealt_anew(
    partition: Partition, config: TaskConfig, examples: Examples, seed: int
) -> Partition:
    """Deals what novel clients hold out to them by ``novel_alpha``, as if there were no others.

    Args:
        partition: of all that was dealt, before clients keep ``examples_per_client``.
        config: the settings, with the ``novel_alpha`` to deal by.
        examples: the data set.
        seed: of the division.

    Returns:
        who holds what, of which clients keep few.
    """
    known = config.client_count - config.novel_clients
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
    dealt = Partition(
        train=partition.train[:known] + novel.train,
        val=partition.val[:known] + novel.val,
        test=partition.test[:known] + novel.test,
    )
    if config.examples_per_client is None:
        return dealt
    return partitions.keep_few(dealt, config.examples_per_client, seed)


def _draw_shares(
    config: TaskConfig,
    examples: Examples,
    training_labels: shares.Integers,
    rng: np.random.Generator,
) -> shares.Shares:
    clients, per_client, classes = config.client_count, config.classes_per_client, examples.classes
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
        case "equal_classes" if config.class_sets is not None:
            return shares.chosen_classes(config.class_sets, classes, sizes)
        case "equal_classes":
            return shares.equal_classes(clients, classes, per_client, rng, sizes)
        case "majority":
            ratio = config.majority_ratio
            return shares.majority(clients, classes, per_client, rng, ratio=ratio, sizes=sizes)
        case "shards":
            return shares.shards(clients, classes, per_client, training_labels, rng)
        case "coarse":
            return shares.coarse_classes(clients, _coarse_of_class(examples), rng)
        case partition:
            raise AssertionError(f"{partition} has no shares")


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
    alphas = np.full(config.client_count, config.alpha)
    if config.novel_alpha is not None:
        alphas[config.client_count - config.novel_clients :] = config.novel_alpha
    return alphas


def _divide_naturally(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Takes the data set's own clients.

    Its own test split is kept in data of your own, and where every client has examples on both
    sides of it; where not (a writer of MNIST is in one or the other), a client's examples are
    pooled and split.
    """
    client, held_out = _clients(examples).numpy(), examples.held_out.numpy()
    natural = int(client.max()) + 1
    if config.client_count > natural:
        raise UserError(
            f"{examples.name} has {natural} natural clients, got clients={config.client_count}; "
            f"set clients to at most {natural}"
        )
    on_both_sides = all(len(np.unique(client[side])) == natural for side in (held_out, ~held_out))
    kept = on_both_sides or examples.names  # which named data sets lack
    own_split = held_out if kept else np.zeros_like(held_out)
    part = _hold_out(config, examples, client, own_split, seed)
    if examples.names and len(idle := np.setdiff1d(client, client[part == partitions.TRAIN])):
        told = ", ".join(examples.names[number] for number in idle[:3])
        raise UserError(
            f"each client of {examples.name} must have an example to train on, but {told} has none "
            f"({len(idle)} such); give it some, or leave it out"
        )
    chosen = random_source(seed, "clients").permutation(natural)[: config.client_count]
    number = np.full(natural, -1)
    number[chosen] = np.arange(config.client_count)
    return partitions.by_client(number[client], part, clients=config.client_count)


def _divide_by_file(config: TaskConfig, path: Path, examples: Examples, seed: int) -> Partition:
    """Takes what a file says."""
    if not path.exists():
        raise UserError(
            f"task.partition_file must be there, but there is no {path}; where a TOML file has a "
            "relative one, it must be in the folder of that file, in one above it or in the "
            f"current one, {Path.cwd()}"
        )
    owner, part = partition_files.read(path, examples.y.numpy(), config.client_count)
    if examples.part is not None:
        said = examples.part.numpy()
        drawn = (said == partitions.TRAIN) & (part == partitions.VAL)  # by val, say
        if (other := (owner >= 0) & (part != said) & ~drawn).any():
            raise UserError(
                f"{path} must leave examples what the data's own split says that they are for, "
                f"got another for row {int(other.argmax())} ({int(other.sum())} such); correct it, "
                "or leave that split out of the data"
            )
    if not examples.shared_labels and examples.client is not None:
        _check_labels_agree(owner, examples.client.numpy(), path)
    return _by_owner(config, examples, owner, part, seed)


def _check_labels_agree(owner: shares.Integers, natural: shares.Integers, path: Path) -> None:
    """Raises ``UserError`` where a client holds labels that mean different things."""
    rows = np.flatnonzero(owner >= 0)
    own = np.full(int(owner.max()) + 1, -1)
    own[owner[rows]] = natural[rows]
    mixed = rows[own[owner[rows]] != natural[rows]]
    if len(mixed):
        raise UserError(
            f"{path} must leave the examples of several natural clients apart, whose labels mean "
            f"different things, got both at client {owner[mixed[0]]} (row {mixed[0]}); divide "
            "within natural clients"
        )


def _divide_as_pfllib(config: TaskConfig, examples: Examples, seed: int) -> Partition:
    """Deals as PFLlib does; takes from each client's training examples those for validation."""
    if examples.part is not None:
        raise UserError(
            "partition=pfllib must be of data without a split of their own, since it cuts what a "
            f"client holds itself, but {examples.name} has one; choose another partition"
        )
    if examples.overlaps is not None:
        raise UserError(
            "partition=pfllib must be of examples that share nothing, since it draws those to test "
            f"on, but those of {examples.name} overlap; choose another partition"
        )
    owner, part = pfllib.deal(
        examples.y.numpy(),
        config.client_count,
        config.pfllib,
        classes_per_client=config.classes_per_client,
        alpha=config.alpha,
    )
    if config.val:
        held_out, rng = part != partitions.TRAIN, random_source(seed, "hold out")
        part = partitions.hold_out(owner + 1, rng, val=config.val, test=None, held_out=held_out)
    return _by_owner(config, examples, owner, part, seed)


def _by_owner(
    config: TaskConfig,
    examples: Examples,
    owner: shares.Integers,
    part: shares.Integers,
    seed: int,
) -> Partition:
    """Groups examples whose clients are known, or the same fraction of each client's."""
    used = np.flatnonzero(owner >= 0)
    if config.fraction < 1:
        rng = random_source(seed, "fraction")
        part[used] = partitions.thin(part[used], owner[used], config.fraction, rng)
    return partitions.by_client(owner, part, clients=config.client_count)


def _hold_out(
    config: TaskConfig,
    examples: Examples,
    groups: shares.Integers,
    own_split: npt.NDArray[np.bool_],
    seed: int,
) -> shares.Integers:
    """Decides what each example is for, with the fractions that ``TaskConfig`` documents."""
    rng = random_source(seed, "hold out")
    overlaps = None
    if examples.overlaps is not None:
        overlaps, groups = examples.overlaps.numpy(), _clients(examples).numpy()
    if examples.part is not None:
        part = _as_the_data_say(config, examples.part.numpy(), groups, rng)
    elif config.test is None and own_split.any():
        usual = datasets.VALIDATION.get(examples.name, 0.2)
        val = usual if config.val is None else config.val
        part = partitions.hold_out(
            groups, rng, val=val, test=None, held_out=own_split, overlaps=overlaps
        )
    else:
        usual = partitions.HELD_OUT
        val, test = (usual if share is None else share for share in (config.val, config.test))
        part = partitions.hold_out(groups, rng, val=val, test=test, overlaps=overlaps)
        if not (part == partitions.TEST).any():
            raise UserError(partitions.too_few_to_test(groups, test))
    if config.fraction == 1:
        return part
    return partitions.thin(part, groups, config.fraction, random_source(seed, "fraction"))


def _as_the_data_say(
    config: TaskConfig, part: shares.Integers, groups: shares.Integers, rng: np.random.Generator
) -> shares.Integers:
    """Returns what each example is for by the data's own split, with ``val`` where it has none."""
    validates = bool((part == partitions.VAL).any())
    if config.test is not None or (config.val is not None and validates):
        key = "test" if config.test is not None else "val"
        raise UserError(
            f"{key} must be left out where the data have a split of their own, which says what is "
            f"for what, got {getattr(config, key)}; remove it"
        )
    if not config.val:
        return part.copy()
    tested = part == partitions.TEST
    return partitions.hold_out(groups, rng, val=config.val, test=None, held_out=tested)

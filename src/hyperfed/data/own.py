"""Your own data as a task: everything is checked, and all that is wrong is reported together."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import metrics
from hyperfed import task as tasks
from hyperfed.data import arrays, features, networks, own_files, partitions, tables
from hyperfed.data.examples import Normalize, channel_statistics, fingerprint_of_frozen, hash_of
from hyperfed.data.features import Beginning, Prefix
from hyperfed.data.networks import Network
from hyperfed.data.partitions import Partition
from hyperfed.data.sizes import sizes_of
from hyperfed.errors import UserError
from hyperfed.task import BASE, accuracy

MOST_NAMED = 20
"""Features that are told by name, at most."""

OfBatch = Callable[[Tensor, Tensor], Tensor]


def from_arrays(
    x: Any,
    y: Any,
    *,
    client: Sequence[Hashable] | Any,
    model: Network | Mapping[str, Network],
    size: Mapping[Any, str] | Sequence[str] | None = None,
    prefix: Beginning | None = None,
    split: Sequence[str] | Any = None,
    val: float | None = None,
    test: float | None = None,
    novel: float = 0,
    unlabelled: bool = False,
    seed: int = 0,
    classes: int | None = None,
    labels: Sequence[str] = (),
    loss: OfBatch | None = None,
    score: OfBatch | None = None,
    name: str = "arrays",
) -> "Task":
    """Makes a task of your own data.

    Args:
        x: NumPy array or tensor, one row per example: uint8 images (N, C, H, W) or (N, H, W), which
            the task normalises by their channel statistics; floats (N, ...), converted to the
            model's precision; or integer tokens (N, ...).
        y: (N,) integer labels from 0; words, which are numbered in their order; or floats for
            regression, (N, K) where an example has K of them, such as a forecast of K hours; or
            (N, T) labels of every token, for a model that gives (B, T, classes): words, or integers
            of which -100 counts for nothing, and no row may be of it alone.
        client: (N,) who holds each example: ids of any hashable type. Clients are numbered in the
            order of their first appearance; a client's name is its id as text.
        model: target network, or a function that makes one (called with seeded initialisation), or
            {size name: either} for several sizes, which may be of any architectures. Parameters
            with ``requires_grad=False`` stay as they are and never travel. Of what a model of
            ``transformers`` returns its logits are taken, and it is told which tokens are padding.
            A model of ``peft`` may stand here as it is.
        size: which client runs which model, {client id: size name}, or a size name for each client
            in the order of their first appearance; None to deal them to equal groups at random.
        prefix: the frozen beginning of ``model``, a part of it or that part's name; or a network or
            function of a batch that stands before it, whose features the model takes. Examples go
            through it once, before training. What it makes of them is kept on disk, but that of a
            function is not.
        split: (N,) what each example is for: "train", "val" or "test". None to draw it.
        val: fraction of each client's examples for validation; None for 0.15, or what ``split``
            says.
        test: fraction of each client's examples for testing; None for the same.
        novel: clients, the last ones, that join after training: their number, or a fraction below 1
            of all, rounded.
        unlabelled: novel clients have no training labels.
        seed: of the splits, the initial weights and the sizes that are dealt.
        classes: number of labels; that of ``labels`` or the largest label + 1 where None.
        labels: names of the labels 0, 1, ...; those that ``y`` holds where it holds words.
        loss: (output, y) -> scalar. Cross entropy for labels, mean squared error for floats.
        score: (output, y) -> (B,), whose mean models are judged by, under the function's name; more
            is better. Correctness for labels (the accuracy), minus the squared error for floats
            (the RMSE). Where both are yours the model's outputs may be what they like, such as one
            for two classes; else there is one for each class, or for each float of an example.
        name: how the records call the task.

    Raises:
        UserError: lists all that is wrong with the arguments.
    """
    problems: list[str] = []
    seed = _seed(seed, problems)
    _check_flag("unlabelled", unlabelled, problems)
    classes = arrays.class_count(classes, problems)
    inputs = arrays.features(x, problems)
    usable = not problems
    y, labels, classes = _labelled(y, labels, classes, problems)
    counted = classes is None
    targets, classes = arrays.targets(y, classes, problems, tokens=True, stated=True)
    numbered = not counted or arrays.check_numbering(targets, problems)
    owner, names = arrays.named(client, problems)
    aligned = arrays.same_length(problems, x=inputs, y=targets, client=owner)
    partition = _split(owner, names, split, val=val, test=test, seed=seed, problems=problems)
    clients = int(owner.max()) + 1 if len(owner) else 0
    joining = _joining(novel, clients, problems)
    whole = models = networks.made(model, seed, problems)
    given = beginning = None
    if prefix is not None and models:
        try:
            models, beginning = features.split_off(whole, prefix, model)
        except UserError as error:
            problems.append(str(error))
    if size is not None and clients:
        sizes = list(map(str, model)) if isinstance(model, Mapping) else [BASE]
        given = sizes_of(size, names, sizes, problems)
    inputs, targets = (networks.in_precision_of(models, each) for each in (inputs, targets))
    if usable and aligned:
        rows = networks.to_try(inputs)
        batch = Normalize(*channel_statistics(inputs[rows]))(inputs[rows])
        may_be_rows = targets.ndim == 2 and (classes > 0 or targets.is_floating_point())
        # Of any other shape the problem is that of y.
        sized = numbered and (targets.ndim < 2 or (may_be_rows and targets.shape[1] > 1))
        usual = [name for name, own in (("loss", loss), ("score", score)) if own is None]
        wanted = (*targets.shape[1:], classes) if sized and usual else None
        try:
            if beginning is not None:
                batch = features.check(whole, models, beginning, batch)
            outputs = networks.try_out(models, batch, wanted, seed, problems, usual=usual)
            networks.try_functions(outputs, targets[rows], loss, score, problems)
        except UserError as error:
            problems.append(str(error))
    arrays.raise_all(problems, "these arguments do not make a task")
    assert partition is not None, "its problem was raised"

    usual_loss, usual_score = _usual(targets)
    known = torch.cat(partition.train[: clients - joining])
    frozen, told = fingerprint_of_frozen(whole), hash_of(*given) if given else ""
    normalize = Normalize(*channel_statistics(inputs[known]))
    transform: Normalize | Prefix = normalize
    once, before = None, ""
    if beginning is not None:
        transform = Prefix(normalize, beginning)
        once = features.computed(transform, inputs)
        if models == whole:  # of a part of the model, what is frozen tells
            before = transform.fingerprint() or hash_of(once)
    return Task(
        name=name,
        x=inputs,
        y=targets,
        train=partition.train,
        val=partition.val,
        test=partition.test,
        models=models,
        classes=classes,
        sizes=given or partitions.deal_sizes(tuple(models), clients, seed),
        novel=joining,
        unlabelled=unlabelled,
        transform=transform,
        features=once,
        loss=loss or usual_loss,
        score=score or usual_score,
        fingerprint=hash_of(
            inputs, targets, partition.fingerprint, *filter(None, [frozen, told, before])
        ),
        names=() if names == tuple(map(str, range(clients))) else names,
        labels=labels,
    )


def from_frame(
    frame: Any,
    *,
    client: str | int | None = None,
    target: str | int | Sequence[str | int] | None = None,
    features: str | int | Sequence[str | int] | None = None,
    split: str | int | None = None,
    **options: Any,
) -> "Task":
    """Makes a task of a table, whose columns :mod:`hyperfed.data.tables` reads.

    Args:
        frame: a pandas ``DataFrame`` with one row per example, or what has a ``to_pandas``, such as
            a table of polars or pyarrow, or a ``Dataset`` of Hugging Face, whose labels may be
            numbers with names.
        client: the column that says who holds a row; ``client`` where None.
        target: the column to be learned, or several of numbers, learned together; ``label``, ``y``
            or ``target`` where None.
        features: the column or columns it is learned from; ``x`` where None, or else all others.
        split: the column that says what a row is for; ``split``, if there is one, where None.
        options: ``model`` and all else that :func:`from_arrays` takes.

    Raises:
        UserError: lists all that is wrong with the table or the arguments.
    """
    columns = tables.Columns(_called(client), _all(target), _all(features), _called(split))
    names = own_files.names_of_target(getattr(frame, "features", None), columns)
    frame = tables.frame_of(frame)
    if not tables.is_frame(frame):
        raise UserError(
            f"a table must be a pandas DataFrame, got {type(frame).__name__}; make one of it, or "
            "pass arrays to Task.from_arrays"
        )
    rows = tables.rows_of(frame, columns, "the table")
    if rows.client is None:
        raise UserError(
            "the table must have a column that says who holds each row, got "
            f"{', '.join(map(str, frame))}; name it with client="
        )
    y, usual = rows.y, {"split": rows.split, "name": "table"}
    labels = options.get("labels")
    unnamed = labels is None or (isinstance(labels, Sized) and not len(labels))
    if y is not None and names:
        y = own_files.by_names(y, names, "the table")
        options["labels"] = names if unnamed else labels
    elif y is not None and unnamed and options.get("classes") is None:
        y, options["labels"] = tables.numbered(y)
    task = from_arrays(rows.x, y, client=rows.client, **usual | options)
    return replace(task, columns=replace(columns, features=rows.features))


def _called(column: str | int | None) -> str | None:
    """Returns the name of a column as text, which pandas may have as a number."""
    return None if column is None else str(column)


def _all(given: str | int | Sequence[str | int] | None) -> tuple[str, ...] | None:
    """Returns the names of a column or several as texts."""
    given = [given] if isinstance(given, str | int | np.integer) else given
    return None if given is None else tuple(map(str, given))


@dataclass(frozen=True, repr=False)
class Task(tasks.Task):
    """A task that data make; ``hyperfed.Task`` is this one.

    Attributes:
        columns: of the table that it was made of, so that a newcomer may bring one too.
    """

    columns: tables.Columns | None = None

    from_arrays = staticmethod(from_arrays)
    from_frame = staticmethod(from_frame)

    def __repr__(self) -> str:
        """Returns the lines of any task, and of a table another one that names its features."""
        names = self.columns and self.columns.features
        if not names:
            return super().__repr__()
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f"{super().__repr__()}\nfeatures: {', '.join(names[:MOST_NAMED])}{more}"


def _usual(y: Tensor) -> tuple[OfBatch, OfBatch]:
    """Returns the loss and the score of targets of a kind."""
    if y.is_floating_point():
        return mean_squared_error, minus_squared_error
    if y.ndim > 1:
        return token_cross_entropy, token_accuracy
    return F.cross_entropy, accuracy


def token_cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean over all tokens that count, for outputs (B, T, classes) and y (B, T)."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=arrays.IGNORED)


@metrics.scores(metrics.ACCURACY)
def token_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Returns (B,) the share of each example's tokens that are right, among those that count."""
    counts = y != arrays.IGNORED
    right = (output.argmax(dim=-1) == y) & counts
    return right.sum(dim=1) / counts.sum(dim=1).clamp(min=1)


def mean_squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Returns the mean of (output - y)^2, for outputs as many as the numbers of y (B,), (B, K)."""
    return F.mse_loss(output.reshape(y.shape), y)


@metrics.scores(metrics.RMSE)
def minus_squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Returns (B,) values of -(output - y)^2, means over K where y is (B, K): more is better."""
    return -(output.reshape(y.shape) - y).square().reshape(len(y), -1).mean(dim=1)


def _labelled(
    y: Any, labels: Sequence[str] | None, classes: int | None, problems: list[str]
) -> tuple[Any, tuple[str, ...], int | None]:
    """Returns labels by number, names of the labels 0, 1, ..., and their number as far as given.

    Args:
        y: words, numbers, or what is none of these, as it came.
        labels: their names, in any sequence; those that ``y`` holds where there are none.
        classes: number of labels, where it is given.
        problems: what must hold and does not is appended here.
    """
    if labels is not None and not arrays.in_order(labels):
        problems.append(
            f"labels must be a sequence of names, such as ['cat', 'dog'], got {labels!r}; name "
            "each, or give their number as classes"
        )
        labels = None
    given = () if labels is None else tuple(labels)  # an array of names is neither true nor false
    if not given:
        y, names = _numbered(y, problems)
        arrays.check_names("labels", names, problems)
        return y, names, classes
    arrays.check_names("labels", given, problems)
    if classes not in (None, len(given)):
        problems.append(
            f"classes must be as many as the labels, {len(given)}, got {classes}; leave "
            "classes out, or name the other labels, too"
        )
    names = tuple(map(str, given))
    return arrays.label_numbers(y, names, problems, integers=False), names, len(names)


def _numbered(y: Any, problems: list[str]) -> tuple[Any, tuple[str, ...]]:
    """Numbers labels that are words, and returns their names; anything else as it is."""
    if isinstance(y, Tensor) or np.ma.is_masked(y):
        return y, ()
    try:
        values = arrays.of_numbers(np.asarray(y))
    except ValueError:  # of rows of several lengths, which are told with all else
        return y, ()
    words = np.empty(0, dtype=object)
    if values.ndim and values.dtype.kind in "UO":
        # Words as they came: NumPy's of NaN is "nan", and that of True beside words "True".
        words = np.asarray(y, dtype=object)
    if missing := [at[0] for at, word in np.ndenumerate(words) if arrays.is_missing(word)]:
        problems.append(
            f"y must have a label in every row, got none in {len({*missing})} rows, the first at "
            f"index {missing[0]}; fill or drop them"
        )
        return np.zeros(values.shape, np.int64), ()
    kinds = {isinstance(label, str): label for label in words.flat}
    if len(kinds) > 1:
        problems.append(
            f"y must hold words alone where it holds some, got {kinds[True]!r} and "
            f"{kinds[False]!r}; write all as words"
        )
        return np.zeros(values.shape, np.int64), ()
    return tables.numbered(values, numbers=True)


def _check_flag(what: str, said: Any, problems: list[str]) -> None:
    if not isinstance(said, bool | np.bool_):
        problems.append(f"{what} must be True or False, got {said!r}; choose one")


def _seed(seed: Any, problems: list[str]) -> int:
    """Returns a seed, 0 for what is none."""
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0:
        return int(seed)
    problems.append(f"seed must be a whole number, 0 or more, got {seed!r}; choose one")
    return 0


def _split(
    owner: Tensor,
    names: Sequence[str],
    split: Any,
    *,
    val: float | None,
    test: float | None,
    seed: int,
    problems: list[str],
) -> Partition | None:
    """Splits each client's examples; appends to ``problems`` where that cannot be done."""
    if split is not None and (val is not None or test is not None):
        problems.append(
            f"val and test must be left out where split says what is for what, got {val} and "
            f"{test}; remove them"
        )
        return None
    val, test = (partitions.HELD_OUT if share is None else share for share in (val, test))
    numbers = partitions.is_number(val) and partitions.is_number(test)
    if not (numbers and val >= 0 and test >= 0 and val + test < 1):  # nor is NaN
        problems.append(
            "val and test must be 0 or more and leave examples to train on, got "
            f"{val} and {test}; lower them"
        )
        return None
    if split is None and test == 0:
        problems.append(partitions.UNTESTED)
        return None
    if not len(owner):
        return None  # same_length has said so
    groups = owner.numpy()
    before = len(problems)
    if split is None:
        rng = partitions.random_source(seed, "hold out")
        part = partitions.hold_out(groups, rng, val=val, test=test)
    else:
        part = arrays.parts(split, len(owner), problems)
    if len(problems) > before:
        return None
    idle = sorted({*groups.tolist()} - {*groups[part == partitions.TRAIN].tolist()})
    if idle:
        problems.append(
            f"each client must have a training example, got none for {len(idle)} of "
            f"{int(groups.max()) + 1} clients ({', '.join(names[own] for own in idle[:5])}); lower "
            "val and test, give them some, or leave these clients out"
        )
        return None
    if split is None and not (part == partitions.TEST).any():
        problems.append(partitions.too_few_to_test(groups, test))
        return None
    return partitions.by_client(groups, part, clients=int(groups.max()) + 1)


def _joining(novel: float, clients: int, problems: list[str]) -> int:
    """Returns how many clients join after training."""
    possible = partitions.is_number_or_fraction(novel) and not isinstance(novel, bool)
    if possible and (joining := partitions.novel_number(novel, clients)) < max(clients, 1):
        return joining
    problems.append(
        "novel must be a whole number of clients, or a fraction below 1, and leave one to "
        f"train, got novel={novel} of {clients} clients; change it"
    )
    return 0

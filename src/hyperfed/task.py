"""What is to be learned, and who holds what of it: the data of all clients and their targets.

A server is told the :class:`Outline`, a client reads its own :class:`Split`.
"""

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperfed import metrics, training, trees
from hyperfed.errors import UserError, nearest
from hyperfed.metrics import Metric
from hyperfed.system.randomness import seeded
from hyperfed.training import Batch
from hyperfed.trees import Model

BASE = "base"
"""The name of the target's size where a task has only one."""


@metrics.scores(metrics.ACCURACY)
def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Scores each example: (B, classes) logits and (B,) labels to (B,) of 0 or 1."""
    return (output.argmax(dim=-1) == y).float()


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, repr=False)
class Task:
    """Data split over clients + target model(s) + loss + metric.

    Attributes:
        name: how the records call it.
        x: (N, ...) every example once: uint8 images (N, C, H, W), float features or int64 tokens.
        y: (N,) int64 labels, or float targets for regression, (N, K) where an example has K of
            them; or (N, T) a label for every token, of which -100 counts for nothing; or (N, K)
            several labels side by side, of a task whose targets have no output for each class.
        train: for each client its examples, (m,) int64 indices into ``x`` and ``y``.
        val: the same, for choosing the best round.
        test: the same, for reporting.
        models: size name -> target network with its initial weights; {"base": net} for one size.
            Parameters with ``requires_grad=False`` are *frozen*: they belong to the task, and are
            never generated, trained, sent, averaged or remembered. Nor are the buffers of a part
            that is frozen whole (batch-norm there computes as in evaluation mode).
        classes: number of labels; 0 for regression.
        sizes: for each client the key of ``models`` it runs; all "base" where empty.
        novel: the last ``novel`` clients never train; they join afterwards.
        newcomers: the last of these, of whom nobody knew while the others trained.
        unlabelled: novel clients have no training labels.
        transform: a raw batch of ``x`` -> what the network takes.
        features: (N, ...) what ``transform`` makes of ``x``, where that is computed once.
        loss: (output, y) -> scalar, a mean over the batch.
        score: (output, y) -> (B,) what the metric is made of (:attr:`metric`): the accuracy is the
            mean of correctness, the RMSE the root of the mean of squared errors. Of your own it is
            the mean, under the function's name; more is better.
        fingerprint: a hash of the data and of who holds what.
        names: of the clients; each is called by its number where empty.
        labels: names of the labels; a label is its number where empty.
        source: what made it and can make it again (:class:`hyperfed.data.tasks.Source`); None for
            one from Python.
        metrics: those of :data:`hyperfed.metrics.ON_REQUEST` that clients count for as well.
    """

    name: str
    x: Tensor
    y: Tensor
    train: Sequence[Tensor]
    val: Sequence[Tensor]
    test: Sequence[Tensor]
    models: Mapping[str, nn.Module]
    classes: int
    sizes: Sequence[str] = ()
    novel: int = 0
    newcomers: int = 0
    unlabelled: bool = False
    transform: Callable[[Tensor], Tensor] = _as_it_is
    features: Tensor | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    score: Callable[[Tensor, Tensor], Tensor] = accuracy
    fingerprint: str = ""
    names: Sequence[str] = ()
    labels: Sequence[str] = ()
    source: Any = None
    metrics: Sequence[str] = ()

    @property
    def _examples(self) -> str:
        return f"{len(self.x):,} examples"

    def __repr__(self) -> str:
        """Returns in three lines what is to be learned, who has how much of it, and what learns."""
        several = self.target_size > 1
        floats = "numbers (a regression, since they are floats; classes are integers or words)"
        if self.classes:
            labels = f"{self.target_size} labels of " if several else ""
            kind = f"{labels}{self.classes} classes" + (" each" if several else "")
        else:
            kind = f"{self.target_size} {floats}" if several else floats
        shape = " x ".join(map(str, self.x.shape[1:])) or "one number"
        held = sorted({len(rows) for rows in self.train}) or [0]
        each = " to ".join(str(number) for number in dict.fromkeys([held[0], held[-1]]))
        untested = sum(not len(rows) for rows in self.test)
        more = f", {untested} with none for testing" if untested else ""
        nets = [
            f"{size}: {type(net).__name__}, {sum(p.numel() for p in net.parameters()):,} parameters"
            for size, net in self.models.items()
        ]
        return (
            f"{type(self).__name__} {self.name}: {self._examples} of {shape} for {kind}\n"
            f"{self.clients} clients, {self.novel} of them novel, with {each} training examples "
            f"each{more}\n{'; '.join(nets)}"
        )

    @property
    def metric(self) -> Metric:
        """What its models are judged by."""
        return metrics.metric_of(self.score)

    @cached_property
    def target_size(self) -> int:
        """Numbers that a target of regression has, or labels that an example has side by side.

        It is 1 where an example has a class, or every token of it.
        """
        side_by_side = self.y.ndim > 1 and self.without_classes is not None
        return 1 if self.classes and not side_by_side else self.y.shape[1:].numel()

    @property
    def of_tokens(self) -> bool:
        """Whether an example has a label for every token."""
        return self.classes > 0 and self.y.ndim > 1 and self.target_size == 1

    def class_counts(self, rows: Tensor) -> Tensor:
        """Returns how often examples have each class, (classes,) int64.

        Of labels side by side it is each class of each label, (target_size * classes,).

        Args:
            rows: (m,) indices into ``y``.
        """
        y = self.y[rows]
        labels = y.flatten(1).T if self.target_size > 1 else [y]
        return torch.cat([training.count_classes(label, self.classes) for label in labels])

    @property
    def clients(self) -> int:
        """Number of clients, novel ones included."""
        return len(self.train)

    @property
    def known(self) -> range:
        """Ids of the clients that take part in training."""
        return range(self.clients - self.novel)

    @property
    def novel_ids(self) -> range:
        """Ids of the clients that join after training."""
        return range(self.clients - self.novel, self.clients)

    def name_of(self, client: int) -> str:
        """Returns how a client is called."""
        return self.names[client] if self.names else str(client)

    def number_of(self, client: int | str) -> int:
        """Returns the number of a client, which is called by its number or by its name.

        Raises:
            UserError: there is no such client.
        """
        if isinstance(client, str):
            numbers = {self.name_of(number): number for number in range(self.clients)}
            if client in numbers:
                return numbers[client]
            named = [*numbers]
            raise UserError(
                f"a client's name must be one of {self.clients}, {named[0]} to {named[-1]}, came "
                f"{client!r}{nearest(client, numbers) or '; choose one of them'}"
            )
        try:
            number = operator.index(client)
        except TypeError as error:
            raise UserError(
                f"a client must be called by its number, or by its name, which is text, came "
                f"{client!r}; see run.task.names"
            ) from error
        if not 0 <= number < self.clients:
            raise UserError(f"a client's number must be below {self.clients}, came {number}")
        return number

    def size_of(self, client: int) -> str:
        """Returns the name of the target size that ``client`` runs."""
        return self.sizes[client] if self.sizes else BASE

    def initial(self, size: str) -> Model:
        """Returns the initial weights of a target: parameters and buffers that are not frozen."""
        return trees.model_of(self.models[size])

    def made_up(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns as many examples as are asked for, and what is to be learned of them.

        They are drawn from nobody's: always the same, on the CPU.
        """
        draw = torch.Generator().manual_seed(0)
        shape, dtype = (count, *self.x.shape[1:]), self.x.dtype
        if dtype.is_floating_point:
            x = torch.randn(shape, generator=draw, dtype=dtype)
        else:  # of tokens, the first are in any vocabulary
            most = 256 if dtype == torch.uint8 else 2
            x = torch.randint(0, most, shape, generator=draw, dtype=dtype)
        y = torch.arange(count) % self.classes if self.classes else torch.zeros(count)
        if self.y.ndim > 1:  # one for every token, or several numbers
            y = y[:, None].expand(count, *self.y.shape[1:])
        return x, y.to(self.y.dtype)

    def outline(self) -> "Outline":
        """Returns what a server may know of this task.

        Raises:
            UserError: a target has nothing to train.
        """
        if idle := [size for size, net in self.models.items() if not trees.parameters_of(net)]:
            raise UserError(
                "a target must have parameters to train, all of the target of size "
                f"{idle[0]!r} are frozen or it has none; set requires_grad of some"
            )
        return Outline(
            self.models,
            len(self.known),
            self.classes,
            self.novel - self.newcomers,
            of_tokens=self.of_tokens,
            of_each_class=self.without_classes is None,
            target_size=self.target_size,
            trial=self._trial(),
        )

    def _trial(self) -> Batch | None:
        """Returns made-up examples as targets take them, None where they cannot be made ready.

        There are as many as no length of an example is, so that what takes the one for the other
        fails.
        """
        task = self.on_features()  # those are computed once, and take long
        lengths = task.x.shape[1:]
        x, y = task.made_up(next(count for count in itertools.count(3) if count not in lengths))
        with seeded(0, "trial"):
            try:
                return Batch(task.transform(x.to(task.x.device)), y)
            except Exception:  # a user's own need not take what is made up
                return None

    @cached_property
    def without_classes(self) -> str | None:
        """Returns a size of which the target has fewer outputs than there are classes, if any.

        That is for a loss and a score of a user's own, such as of one logit for two classes.
        """
        if not self.classes or (self.y.ndim == 1 and self.score is accuracy):
            return None  # how often the largest is right
        x = self.transform(self.x[:2])
        for size, model in self.models.items():
            with torch.no_grad():
                output = trees.copied(model).eval()(x)
            if not metrics.of_each_class(output, self.y, self.classes):
                return size
        return None

    def on_features(self) -> "Task":
        """Returns the task whose examples are the features, where it has some; else itself."""
        if self.features is None:
            return self
        return replace(self, x=self.features, transform=_as_it_is, features=None)

    def to(self, device: torch.device) -> "Task":
        """Returns the task with its examples and models on a device; itself where it is there."""
        x, y = self.x.to(device), self.y.to(device)
        if x is self.x:  # also where the one is "cuda" and the other "cuda:0"
            return self
        train, val, test = (_moved(rows, device) for rows in (self.train, self.val, self.test))
        models = {size: copy.deepcopy(model).to(device) for size, model in self.models.items()}
        return replace(self, x=x, y=y, train=train, val=val, test=test, models=models)


def _moved(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Moves the rows of all clients at once: each on its own takes as long as all together."""
    return torch.cat([*rows]).to(device).split_with_sizes([len(own) for own in rows])


@dataclass(frozen=True)
class Outline:
    """What a server knows of a task: the target networks and numbers of clients, never data.

    ``clients`` take part in training; ``novel`` are those of which it is known that they will join.
    ``of_tokens`` says that an example has a label for every token, ``of_each_class`` that the
    targets have an output for each class, and ``target_size`` how many numbers a target of
    regression has, or labels an example has side by side. ``trial`` has made-up examples to try
    networks on; None where they cannot be made ready.
    """

    models: Mapping[str, nn.Module]
    clients: int
    classes: int
    novel: int = 0
    of_tokens: bool = False
    of_each_class: bool = True
    target_size: int = 1
    trial: Batch | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the targets' trained parameters."""
        return next(iter(trees.parameters_of(next(iter(self.models.values()))).values())).dtype

    def initial(self, size: str = BASE) -> Model:
        """Returns the initial weights of a target: parameters and buffers that are not frozen."""
        return trees.model_of(self.models[size])


class Split:
    """A client's examples of one split, gathered when asked for as the network takes them."""

    def __init__(self, task: Task, index: Tensor, *, labelled: bool = True) -> None:
        self._task, self._index, self._labelled = task, index, labelled

    def __len__(self) -> int:
        return len(self._index)

    @property
    def labels(self) -> Tensor:
        """(m,) labels of all examples; no input is gathered.

        Raises:
            UnlabelledError: the client has none.
        """
        return Batch(self._index, self._task.y[self._index] if self._labelled else None).y

    def batch(self, which: Tensor | slice = slice(None)) -> Batch:
        """Returns some examples of this split, all of them by default."""
        index = self._index[which]
        y = self._task.y[index] if self._labelled else None
        return Batch(self._task.transform(_rows(self._task.x, index)), y)

    def chunks(self, size: int) -> Iterator[Batch]:
        """Yields all examples in their order, ``size`` at a time; see ``training.pass_lengths``."""
        stop = 0
        for length in training.pass_lengths(len(self), size):
            stop += length
            yield self.batch(slice(stop - length, stop))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns ``x[index]``, laid out as ``x`` is.

    Images with their channels last are whole rows of memory only to who moves the channels there:
    copied as such they come 15 times faster than pixel by pixel.
    """
    if x.ndim > 2 and not x.is_contiguous():
        return x.movedim(1, -1).index_select(0, index).movedim(-1, 1)
    return x.index_select(0, index)

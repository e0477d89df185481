"""The settings of a task: which data, how divided, for which target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass

from hyperfed.data import partition_files, partitions
from hyperfed.data.corruptions import CorruptionName
from hyperfed.data.pfllib import Dealing
from hyperfed.data.tables import SUFFIXES, Columns, ending
from hyperfed.errors import UserError
from hyperfed.system.files import absolute, at_home, check_suffix

Fraction = Annotated[float, Field(ge=0, lt=1)]


def several(value: object) -> object:
    """Returns a list, or words with commas between them, as the tuple that strict mode asks for."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(","))
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(several)]
"""A list of names; on the command line with commas between them."""

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
    "shuffled",
    "natural",
    "pfllib",
    "file",
]
PARTITIONS: tuple[PartitionName, ...] = get_args(PartitionName)

CLIENTS = 20
"""Clients of a task that does not say how many, and whose data do not either."""


def _number_or_fraction(novel: int | float) -> int | float:
    if not partitions.is_number_or_fraction(novel):
        raise ValueError("must be a number of clients, such as 3, or a fraction below 1")
    return novel


def _absolute_file(name: str) -> str:
    return absolute(name) if ending(name) in SUFFIXES else at_home(name)


def _absolute_path(path: Path) -> Path:
    return Path(absolute(str(path)))


def _absolute_model(model: str) -> str:
    path, colon, network = model.rpartition(":")
    return f"{absolute(path)}:{network}" if colon else model


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TaskConfig:
    """The ``task.*`` settings.

    Attributes:
        name: data set, folder, hub id, or a parquet, CSV or .npz file
            (:func:`hyperfed.data.datasets.load`). A relative path begins at the folder of the
            experiment's TOML file, if the file is there, elsewhere at the current one.
        data_dir: folder of data sets; ``$HYPERFED_DATA`` where None.
        client: of your own data, the column that says who holds a row (:mod:`hyperfed.data.tables`
            has all four); ``client`` where None.
        target: the column to be learned, or several of numbers, with commas between them; ``y``,
            ``target`` or ``label`` where None.
        features: the columns it is learned from, with commas between them; ``x`` where None, or
            else all others.
        split: the column that says what a row is for, "train", "val" or "test"; ``split`` where
            None. Where there is one, ``val`` is a fraction of the training rows, and may be given
            where the column names none for validation.
        clients: number of clients, novel ones included. With ``natural``, that many of the data
            set's own clients, drawn at random. None for all of those of your own data, else 20.
        fraction: of all examples that is used at all, the same of each class (with ``natural``,
            ``pfllib`` and ``file``, of each client) for training, validation and testing; at least
            one where there is one.
        partition: who holds what; :mod:`hyperfed.data.shares` describes each. ``dirichlet`` draws
            per client, ``dirichlet_equal`` too, for clients of the same size. ``coarse`` needs
            coarse labels (cifar100). ``iid`` deals out each class evenly, ``shuffled`` everything
            in random order. ``natural`` takes the data set's own clients (writers, alphabets,
            roles). ``pfllib`` deals as that library does (:mod:`hyperfed.data.pfllib`), the same
            for every seed. ``file`` reads who holds what. None for ``natural`` where your own data
            have a column of clients, else ``class_shares``; ``shuffled`` where there are no labels.
        partition_file: that file (:mod:`hyperfed.data.partition_files`), .npz or .csv. A relative
            path begins at the folder of the experiment's TOML file, or where it leads nowhere from
            there at one above it; elsewhere at the current one.
        pfllib: which of its dealings: ``pathological`` with ``classes_per_client``, or
            ``dirichlet`` with ``alpha``.
        classes_per_client: for ``class_shares``, ``equal_classes`` and ``pfllib``; shards per
            client for ``shards``; majority classes per client for ``majority``.
        class_sets: for ``equal_classes``, the classes of each client, ``[[0, 1], [1, 2]]`` for two;
            None for random ones.
        shares: ``class_shares`` as pFedHN's paper or as its official code draws them.
        share_low: a client's part of each of its classes is drawn, in proportion, between this and
            ``share_high``, by ``class_shares``. Equal ones give equal parts, as PeFLL's authors do.
        share_high: see there.
        alpha: Dirichlet concentration.
        majority_ratio: examples of a majority class to one of another, for ``majority``.
        examples_per_client: training examples that a client keeps of those dealt out to it, drawn
            at random; nobody holds the others. A client with fewer keeps all. None for all.
        label_codes: ways in which clients code their labels. Client k adds (k mod label_codes)
            times (classes // label_codes) to each label, modulo the number of classes: with three
            codes and ten classes 0, 3 or 6. 1 for labels as they are.
        novel: clients that join after training, the last ones: their number, or a fraction below
            1 of all, rounded.
        novel_alpha: another Dirichlet concentration for them; None for the same. Where it changes
            after training, what they hold is dealt out to them anew, and to nobody else.
        novel_corruption: of the novel clients' images, in training, validation and test
            (:mod:`hyperfed.data.corruptions`); None for images as they are.
        unlabelled: novel clients have no training labels.
        val: fraction for validation. None for 0.2 of the training split where the data set has a
            test split of its own (10,000 images of CIFAR; of MNIST 10,000 too), else 0.15 of all
            examples; where rows of your own say what they are for, those that say so, and where
            none does the last round counts as the best. With ``pfllib``, which has none, a fraction
            of each client's training examples; None for 0, where the last round counts as the best.
            Of texts that are cut into overlapping examples (shakespeare, stackoverflow) it is a
            client's last ones, and those before them that share text with them are not used; so for
            ``test``. What is tested on does not follow from it, but who holds which of that does,
            unless clients are natural: compare methods by one fraction.
        test: fraction of all examples for testing. None for the data set's own test split, where
            it has one, else 0.15. A number pools all examples first. ``pfllib`` has a quarter of
            each client's examples.
        labels: names of the labels 0, 1, ... of your own data, where labels are words: their order,
            and those that no example has. None for the words there are, in their order. Where
            clients are at sites it is by these that all number them alike.
        normalize: images by the mean and deviation of each channel of the data set, or to [-1, 1],
            by 0.5 and 0.5, as PFLlib does.
        model: target network, a name of :data:`hyperfed.nets.targets.TARGETS`, or your own:
            ``file.py:Net`` is what ``Net`` in that file makes when it is called with the ``width``
            and ``hidden`` that are given. None for the one that suits the data: char_lstm,
            text_lstm, omniglot_net, lenet, or mlp for small images and what is none.
        width: first filters of a lenet or omniglot_net; None for its default.
        hidden: outputs of the hidden layers, a number or one for each layer, as the target takes
            them (an mlp either, a lenet those of fc1 and fc2); None for its default.
        widths: several widths, one model size each, for equal groups of clients drawn at random.
            Three are called S, M and L.
        prefix: the frozen part of ``model`` that examples go through first: they do so once, before
            training, and what it makes of them is kept on disk. None for all of it in training.
        source: where the task comes from: these settings, or ``python``, of which a run's records
            say the name and the numbers of clients, and which no settings can make again.
    """

    name: Annotated[str, AfterValidator(_absolute_file)] = "digits"
    data_dir: Annotated[str, AfterValidator(absolute)] | None = None
    client: str | None = None
    target: Names | None = None
    features: Names | None = None
    split: str | None = None
    labels: Names | None = None
    clients: PositiveInt | None = None
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    partition: PartitionName | None = None
    partition_file: Annotated[Path, AfterValidator(_absolute_path)] | None = None
    pfllib: Dealing = "dirichlet"
    classes_per_client: PositiveInt = 2
    class_sets: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    shares: Literal["paper", "official"] = "paper"
    share_low: PositiveFloat = 0.4
    share_high: PositiveFloat = 0.6
    alpha: PositiveFloat = 0.1
    majority_ratio: Annotated[float, Field(ge=1)] = 5.0
    examples_per_client: PositiveInt | None = None
    label_codes: PositiveInt = 1
    novel: Annotated[int | float, AfterValidator(_number_or_fraction)] = 0.1
    novel_alpha: PositiveFloat | None = None
    novel_corruption: CorruptionName | None = None
    unlabelled: bool = False
    val: Fraction | None = None
    test: Fraction | None = None
    normalize: Literal["statistics", "symmetric"] = "statistics"
    model: Annotated[str, AfterValidator(_absolute_model)] | None = None
    width: PositiveInt | None = None
    hidden: PositiveInt | tuple[PositiveInt, ...] | None = None
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] | None = None
    prefix: str | None = None
    source: Literal["settings", "python"] = "settings"

    @property
    def columns(self) -> Columns:
        """Which column of your own data is what."""
        return Columns(self.client, self.target, self.features, self.split)

    @property
    def client_count(self) -> int:
        """Number of clients, as far as it is known before the data are."""
        return CLIENTS if self.clients is None else self.clients

    @property
    def novel_clients(self) -> int:
        """Number of clients that join after training, as far as it is known before the data are."""
        return partitions.novel_number(self.novel, self.client_count)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if wrong := [*self._contradictions(), *self._wrong_division()]:
            raise ValueError("\n".join(wrong))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Tells what settings, each right by itself, cannot be together; a line for each."""
        per_client = ("dirichlet", "dirichlet_equal")
        if self.novel_alpha is not None and self.partition not in per_client:
            yield (
                f"novel_alpha needs partition={' or '.join(per_client)}, got "
                f"{self.partition or 'none'}; remove novel_alpha"
            )
        # Of data whose clients are all taken, how many there are is seen when they are read.
        counted = self.clients is not None or not self.novel
        for key in ("novel_alpha", "novel_corruption"):
            if getattr(self, key) is not None and counted and not self.novel_clients:
                yield (
                    f"{key} needs novel clients, got novel={self.novel} of {self.client_count} "
                    f"clients; raise novel or remove {key}"
                )
        if self.share_low > self.share_high:
            shares = f"{self.share_low} and {self.share_high}"
            yield f"share_low must be at most share_high, got {shares}"
        if self.widths is not None and self.width is not None:
            yield "give width or widths, not both"
        if self.widths is not None and len(set(self.widths)) < len(self.widths):
            yield f"widths must differ, got {self.widths}"
        if self.test == 0:
            yield partitions.UNTESTED
        if (self.val or 0) + (self.test or 0) >= 1:
            yield f"val + test must leave examples to train on, got {self.val} + {self.test}"
        if self.clients is not None and self.novel_clients >= self.clients:
            yield (
                f"a client must be left to train, got {self.clients} clients of which "
                f"{self.novel_clients} are novel; lower novel"
            )

    def _wrong_division(self) -> Iterator[str]:
        """Tells what does not go with divisions that somebody else has made."""
        if (self.partition == "file") != (self.partition_file is not None):
            yield (
                "partition=file and partition_file go together, got "
                f"partition={self.partition or 'none'} and partition_file={self.partition_file}; "
                "give both or neither"
            )
        if self.class_sets is not None and (
            self.partition != "equal_classes" or len(self.class_sets) != self.client_count
        ):
            yield (
                "class_sets needs partition=equal_classes and one set for each client, got "
                f"partition={self.partition or 'none'} and {len(self.class_sets)} sets of "
                f"{self.client_count} clients; correct them or remove class_sets"
            )
        if self.partition_file is not None:
            try:
                check_suffix(self.partition_file, partition_files.SUFFIXES, "partition")
            except UserError as error:
                yield str(error)
        decided = {"file": ("val", "test"), "pfllib": ("test",)}.get(self.partition or "", ())
        for key in decided:
            if getattr(self, key) is not None:
                yield (
                    f"{key} must be left out with partition={self.partition}, which says what is "
                    f"for what, got {getattr(self, key)}; remove it"
                )

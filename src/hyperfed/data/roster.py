"""Who the clients of a federation of sites are: all that a server knows of data it never sees."""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from torch import Tensor, nn

from hyperfed.data.arrays import MOST_CLASSES, check_names
from hyperfed.data.examples import Normalize, hash_of
from hyperfed.data.own import Task, mean_squared_error, minus_squared_error
from hyperfed.errors import UserError, one_line
from hyperfed.system.files import atomic_write
from hyperfed.system.version import VERSION
from hyperfed.task import BASE

_PLAIN = ConfigDict(extra="forbid", strict=True)
_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.float32, torch.float64, torch.int64)}


LONGEST_NAME = 250
"""Letters of a client's name, with that of its site."""

_Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
_Examples = Annotated[int, Field(ge=0, le=10**8)]
"""Of one client: a number beyond any, which weighs no more than that."""

_Number = Annotated[int, Field(ge=0, le=MOST_CLASSES)]
"""Of classes, or of clients."""

_TargetSize = Annotated[int, Field(ge=1, le=MOST_CLASSES)]

_Hash = Annotated[str, Field(max_length=64)]
_Side = Annotated[int, Field(ge=1, le=10**8)]
_Channels = Annotated[tuple[FiniteFloat, ...], Field(max_length=1024)]
_Shape = Annotated[tuple[_Side, ...], Field(min_length=1, max_length=8)]

MOST_VALUES = 10**8
"""Numbers in one example."""


@validated(frozen=True, config=_PLAIN)
class Member:
    """A client as its site introduces it.

    Attributes:
        name: its name in the federation, of which there is no second.
        examples: for training.
        val: for choosing the best round.
        test: for reporting.
        size: which target it runs; empty where the task has one.
        novel: joins after training.
    """

    name: _Name
    examples: _Examples
    val: _Examples
    test: _Examples
    size: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    novel: bool = False


@validated(frozen=True, config=_PLAIN)
class Introduction:
    """What a site says of itself.

    Attributes:
        members: its clients.
        shape: of one example.
        dtype: of the examples.
        classes: the number of labels, as far as this site knows; 0 for regression.
        pixels: of each channel of its training images.
        mean: of each channel of them, on the scale of x / 255; empty if not images.
        std: the same.
        fingerprint: a hash of its data.
        labels: names of the labels 0, 1, ..., where its data have words.
        features: a hash of the columns that an example is made of, in their order; empty where
            their names do not say it.
        target_size: numbers that a target of regression has.
        version: of its hyperfed.
    """

    members: Annotated[tuple[Member, ...], Field(max_length=10**6)]
    shape: _Shape
    dtype: str
    classes: _Number
    pixels: NonNegativeInt = 0
    mean: _Channels = ()
    std: _Channels = ()
    fingerprint: _Hash = ""
    labels: Annotated[tuple[_Name, ...], Field(max_length=MOST_CLASSES)] = ()
    features: _Hash = ""
    target_size: _TargetSize = 1
    version: Annotated[str, Field(max_length=64)] = VERSION


def check_introduction(said: Introduction, problems: list[str]) -> None:
    """Appends to ``problems`` what a site says of itself and cannot be.

    A server builds models and divides by what it is told here, so a lie that is possible is
    believed, and nothing else.
    """
    names = [member.name for member in said.members]
    said_of = [*names, *(member.size for member in said.members)]
    if odd := [word for word in said_of if not word.isprintable()]:
        problems.append(f"a client's name and size must be printable, got {one_line(odd[0], 100)}")
    if len(set(names)) < len(names):
        problems.append("a client's name must be there once, but one is twice")
    if idle := [m for m in said.members if not m.examples and not m.novel]:
        problems.append(f"a client must have an example to train on, but {idle[0].name} has none")
    _check_labels(said, problems)
    if said.dtype not in _DTYPES:
        problems.append(f"examples must be of dtype {', '.join(_DTYPES)}")
    if prod(said.shape) > MOST_VALUES:
        problems.append(f"an example must have {MOST_VALUES} numbers at most")
    if said.mean or said.std:
        images = said.dtype == str(torch.uint8) and len(said.shape) == 3
        if not images or {len(said.mean), len(said.std)} != {said.shape[0]}:
            problems.append("only images have a mean and a deviation, one of each for a channel")
        if not all(0 <= value <= 1 for value in (*said.mean, *said.std)):
            problems.append("mean and deviation must be of x / 255, from 0 to 1")
        if said.pixels > sum(member.examples for member in said.members):
            problems.append("mean and deviation must be of the images to train on, and of no more")


def _check_labels(said: Introduction, problems: list[str]) -> None:
    """Tells what labels cannot be, and their names, which become those of the run."""
    if said.classes and said.target_size > 1:
        problems.append(f"a label must be one number, got {said.target_size}")
    check_names("labels", said.labels, problems)
    if odd := [word for word in said.labels if not word.isprintable()]:
        problems.append(f"a label's name must be printable, got {one_line(odd[0], 100)}")
    if said.labels and len(said.labels) != said.classes:
        problems.append(f"labels must be named all {said.classes}, got {len(said.labels)} names")


@validated(frozen=True, config=_PLAIN)
class Frame:
    """What every site must know of the whole to compute as the others do. It names nobody.

    Attributes:
        known: clients that train; they have the first numbers.
        novel: clients that join afterwards.
        shape: of one example.
        dtype: of the examples.
        classes: the number of labels; 0 for regression.
        sizes: for each client which target it runs; empty where the task has one.
        mean: of each channel of the training images of all sites with a client that trains, on the
            scale of x / 255; empty if not images.
        std: the same.
        newcomers: the last of the novel clients, that came when the run was over.
        target_size: numbers that a target of regression has.
    """

    known: _Number
    novel: _Number
    shape: _Shape
    dtype: str
    classes: _Number
    sizes: tuple[str, ...] = ()
    mean: _Channels = ()
    std: _Channels = ()
    newcomers: _Number = 0
    target_size: _TargetSize = 1

    @property
    def clients(self) -> int:
        """Number of clients, novel ones included."""
        return self.known + self.novel

    def task_options(self) -> dict[str, Any]:
        """Returns what of a :class:`~hyperfed.task.Task` follows from the frame."""
        options: dict[str, Any] = {
            "classes": self.classes,
            "sizes": self.sizes,
            "novel": self.novel,
            "newcomers": self.newcomers,
            "transform": Normalize(self.mean, self.std),
        }
        if not self.classes:
            options |= {"loss": mean_squared_error, "score": minus_squared_error}
        return options


@validated(frozen=True, config=_PLAIN)
class Roster:
    """The clients of a run by number, known ones first, and their frame.

    Attributes:
        run: number of the run at the sites, the same when it is resumed.
        frame: what sites must know of the whole.
        members: the clients; the position is the number.
        fingerprint: a hash of all sites' data.
        keys: name of a client -> the key of the node that it belongs to, as ``ssh-keygen -lf``
            calls it; empty where nodes have none.
        labels: names of the labels 0, 1, ..., where a site has words.
        features: a hash of the columns that an example is made of, where a site tells it.
    """

    run: int
    frame: Frame
    members: tuple[Member, ...]
    fingerprint: str
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    labels: tuple[_Name, ...] = ()
    features: _Hash = ""

    @property
    def numbers(self) -> Mapping[str, int]:
        """Name -> number of a client."""
        return {member.name: number for number, member in enumerate(self.members)}

    def without(self, newcomers: Collection[str]) -> "Roster":
        """Returns the roster without some newcomers, called by their names."""
        left = [n for n, member in enumerate(self.members) if member.name not in newcomers]
        frame, gone = self.frame, len(self.members) - len(left)
        return dataclasses.replace(
            self,
            frame=dataclasses.replace(
                frame,
                novel=frame.novel - gone,
                newcomers=frame.newcomers - gone,
                sizes=frame.sizes and tuple(frame.sizes[n] for n in left),
            ),
            members=tuple(self.members[n] for n in left),
            keys={name: key for name, key in self.keys.items() if name not in newcomers},
        )

    def save(self, path: Path) -> None:
        """Writes the roster, which a resumed run needs, as JSON.

        Raises:
            UserError: the disk refuses.
        """
        atomic_write(path, _ROSTER.dump_json(self, indent=2))

    @staticmethod
    def read(path: Path) -> "Roster":
        """Reads what :meth:`save` wrote.

        Raises:
            UserError: there is none, or it is damaged.
        """
        try:
            # From JSON text: in strict mode a list is a tuple there, but not in Python.
            return _ROSTER.validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(
                f"{path} must be readable, but: {error.strerror}; restore it from a copy"
            ) from error
        except ValidationError as error:
            raise UserError(
                f"{path} must hold the roster of a run, but {first_of(error)}; restore it from a "
                "copy"
            ) from error


_ROSTER = TypeAdapter(Roster)


def first_of(error: ValidationError) -> str:
    """Says the first thing that is wrong, in one line and without what came."""
    first = error.errors(include_url=False, include_input=False)[0]
    return one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


def enrol(
    introductions: Sequence[Introduction],
    *,
    run: int,
    sizes: Iterable[str] = (BASE,),
    keys: Mapping[str, str] | None = None,
    labels: Sequence[str] = (),
    robust: bool = False,
) -> Roster:
    """Numbers the clients of all sites: known ones first, each part in the order of the names.

    Args:
        introductions: of every site.
        run: number of the run at the sites.
        sizes: names of the task's targets.
        keys: name of a client -> the key that it belongs to.
        labels: names of the labels, where the run has them; a site has as many.
        robust: mean and deviation of images are the median over sites, which no single one
            decides, in place of those of all images together.

    Raises:
        UserError: lists all in which the sites do not fit together.
    """
    problems: list[str] = []
    everyone = [member for site in introductions for member in site.members]
    names = [member.name for member in everyone]
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        problems.append(f"a client must be at one site, but {', '.join(twice[:3])} is at several")
    kinds = {(site.shape, site.dtype): _at(site) for site in introductions}
    if len(kinds) != 1:
        shown = ", ".join(f"{s} {d}{kinds[s, d]}" for s, d in sorted(kinds)) or "none"
        problems.append(f"examples of all sites must have one shape and dtype, got {shown}")
    if len({len(site.mean) for site in introductions}) > 1:
        problems.append("all sites must say mean and deviation of their images, or none")
    if len({site.classes == 0 for site in introductions}) > 1:
        problems.append("targets of all sites must be labels, or of all sites numbers")
    if len(counts := {site.target_size: _at(site) for site in introductions}) > 1:
        shown = ", ".join(f"{size}{counts[size]}" for size in sorted(counts))
        problems.append(f"targets of all sites must have as many numbers, got {shown}")
    words = _common_labels(introductions, labels, problems)
    features = _common_features(introductions, problems)
    choices = tuple(sizes)
    wrong = [m for m in everyone if len(choices) > 1 and m.size not in choices]
    if wrong:
        problems.append(
            f"each client must run one of the targets {', '.join(choices)}, got "
            f"{wrong[0].size or 'none'} for {wrong[0].name}; give the node's config a size"
        )
    if not any(not member.novel for member in everyone):
        problems.append("a client must be left to train, but all are novel or there are none")
    if problems:
        raise UserError("the sites do not make a federation:\n- " + "\n- ".join(problems))
    members = sorted(everyone, key=lambda member: (member.novel, member.name))
    ((shape, dtype),) = kinds
    trains = [site for site in introductions if any(not member.novel for member in site.members)]
    mean, std = (_middle if robust else _pooled)(trains)
    frame = Frame(
        known=sum(not member.novel for member in members),
        novel=sum(member.novel for member in members),
        shape=shape,
        dtype=dtype,
        classes=max(site.classes for site in introductions),
        target_size=introductions[0].target_size,
        sizes=tuple(member.size for member in members) if len(choices) > 1 else (),
        mean=mean,
        std=std,
    )
    prints = sorted(site.fingerprint for site in introductions)
    own = {member.name: key for member in members if (key := (keys or {}).get(member.name))}
    return Roster(run, frame, tuple(members), hash_of(*prints), own, words, features)


def _common_labels(
    introductions: Sequence[Introduction], labels: Sequence[str], problems: list[str]
) -> tuple[str, ...]:
    """Returns the names of the labels at the sites; () where none tells them.

    Args:
        introductions: of every site.
        labels: their names, where the run has them.
        problems: what must hold and does not is appended here.
    """
    told = dict.fromkeys(site.labels for site in introductions if site.labels)
    if len(told) > 1:
        problems.append(
            "words must be numbered alike at all sites, but sites name labels, or order them, in "
            "different ways; name them for all with task.labels"
        )
    if labels and (odd := [site for site in introductions if site.classes != len(labels)]):
        problems.append(
            f"labels must be the {len(labels)} of task.labels, got {odd[0].classes}{_at(odd[0])}"
        )
    words = next(iter(told), ())
    if not labels and words and (odd := [s for s in introductions if s.classes > len(words)]):
        problems.append(
            f"labels must be among the {len(words)} that other sites name, got {odd[0].classes}"
            f"{_at(odd[0])}; name all of them with task.labels"
        )
    return words


def _common_features(introductions: Sequence[Introduction], problems: list[str]) -> str:
    """Returns the hash of the columns that sites make examples of; "" where none tells it."""
    told = {site.features: _at(site) for site in introductions if site.features}
    if len(told) > 1:
        problems.append(
            "features must be the same columns in the same order at all sites, but are others"
            f"{' and'.join(list(told.values())[:2])}; name them alike with --features at each node"
        )
    return next(iter(told), "")


def joined(
    roster: Roster,
    introductions: Sequence[Introduction],
    *,
    run: int,
    sizes: Iterable[str] = (BASE,),
    keys: Mapping[str, str] | None = None,
) -> tuple[Roster, dict[str, str]]:
    """Adds newcomers to the clients of a run that is over, with numbers after theirs.

    The frame stays that of the run: mean and deviation of images are not computed anew.

    Args:
        roster: of the run, or with those who came to it before.
        introductions: of every site that is there; clients of the roster are left alone, and all
            others are newcomers, whether their site says so or not.
        run: number at the sites of what the newcomers are asked.
        sizes: names of the task's targets.
        keys: name of a client -> the key that it belongs to.

    Returns:
        The roster with those who fit the run, and {name: why not} of the others.
    """
    known = roster.numbers
    came = [(site, m) for site in introductions for m in site.members if m.name not in known]
    times = Counter(member.name for _, member in came)
    refused: dict[str, str] = {}
    for site, member in came:
        why = _unfit(site, member, roster, tuple(sizes))
        if times[member.name] > 1:
            why = "a client must be at one site, but is at several"
        if why is not None:
            refused[member.name] = why
    fit = [dataclasses.replace(m, novel=True) for _, m in came if m.name not in refused]
    newcomers = tuple(sorted(fit, key=lambda member: member.name))
    frame = dataclasses.replace(
        roster.frame,
        novel=roster.frame.novel + len(newcomers),
        newcomers=roster.frame.newcomers + len(newcomers),
        sizes=roster.frame.sizes and (*roster.frame.sizes, *(m.size for m in newcomers)),
    )
    own = {member.name: key for member in newcomers if (key := (keys or {}).get(member.name))}
    everyone = dataclasses.replace(
        roster,
        run=run,
        frame=frame,
        members=(*roster.members, *newcomers),
        keys=roster.keys | own,
    )
    return everyone, refused


def _unfit(
    site: Introduction, member: Member, roster: Roster, choices: Sequence[str]
) -> str | None:
    """Returns why a newcomer does not fit the run of a roster; None where it does."""
    frame = roster.frame
    if (site.shape, site.dtype) != (frame.shape, frame.dtype):
        return (
            f"its examples must be {frame.shape} {frame.dtype}, as those of the run are, got "
            f"{site.shape} {site.dtype}; convert them"
        )
    if site.features and roster.features and site.features != roster.features:
        return (
            "its features must be the columns of the run's sites in their order, but are others; "
            "name those with --features at its node"
        )
    if bool(site.classes) != bool(frame.classes) or site.classes > frame.classes:
        return (
            f"its labels must be of the {frame.classes} classes of the run (0 are numbers), got "
            f"{site.classes}; leave the others out"
        )
    if site.target_size != frame.target_size:
        return (
            f"its targets must have {frame.target_size} numbers each, as those of the run have, "
            f"got {site.target_size}; leave the others out"
        )
    if site.labels and roster.labels and site.labels != roster.labels:
        return (
            "its labels must be those of the run in their order, "
            f"{one_line(', '.join(roster.labels), 100)}; give its node --labels"
        )
    if len(choices) > 1 and member.size not in choices:
        return (
            f"it must run one of the targets {', '.join(choices)}, got {member.size or 'none'}; "
            "give its node --size"
        )
    return None


def _at(site: Introduction) -> str:
    return f" at the site of {site.members[0].name}" if site.members else ""


def _middle(sites: Sequence[Introduction]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the median over sites with images of mean and of deviation, per channel."""
    told = [site for site in sites if site.pixels] or list(sites)
    mean = tuple(map(median, zip(*(site.mean for site in told), strict=True)))
    return _rounded(mean, tuple(map(median, zip(*(site.std for site in told), strict=True))))


def _pooled(sites: Sequence[Introduction]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation per channel of all sites' images together."""
    weight = torch.tensor([float(site.pixels) for site in sites], dtype=torch.float64)
    if not sites[0].mean or not weight.sum():
        return sites[0].mean, sites[0].std
    mean = torch.tensor([site.mean for site in sites], dtype=torch.float64)  # (sites, channels)
    square = torch.tensor([site.std for site in sites], dtype=torch.float64) ** 2 + mean**2
    share = (weight / weight.sum())[:, None]
    pooled = (share * mean).sum(0)
    deviation = ((share * square).sum(0) - pooled**2).clamp(min=0).sqrt()
    return _rounded(pooled.tolist(), deviation.tolist())


def _rounded(
    mean: Sequence[float], std: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation as they are sent; nothing is divided by a deviation of zero."""
    return tuple(round(m, 4) for m in mean), tuple(round(s, 4) or 1.0 for s in std)


@dataclass(frozen=True, repr=False)
class RemoteTask(Task):
    """A task whose examples are at sites: it knows how many each client has, and none of them.

    Attributes:
        roster: who the clients are.
        link: the way to the sites (:class:`hyperfed.engines.flower.sites.Link`); None where there
            is none, as when a run's folder is read afterwards.
    """

    roster: Roster | None = None
    link: Any = None

    @property
    def _examples(self) -> str:
        held = sum(len(rows) for split in (self.train, self.val, self.test) for rows in split)
        return f"{held:,} examples at sites"

    @staticmethod
    def of(
        roster: Roster, models: Mapping[str, nn.Module], name: str, link: Any = None
    ) -> "RemoteTask":
        """Makes the task of a roster."""
        frame = roster.frame
        nothing = torch.zeros(0, dtype=torch.int64)
        return RemoteTask(
            name=name,
            x=torch.zeros(0, *frame.shape, dtype=dtype_of(frame)),
            y=no_targets(frame),
            train=[nothing.new_zeros(1).expand(member.examples) for member in roster.members],
            val=[nothing.new_zeros(1).expand(member.val) for member in roster.members],
            test=[nothing.new_zeros(1).expand(member.test) for member in roster.members],
            models=models,
            fingerprint=roster.fingerprint,
            roster=roster,
            link=link,
            **frame.task_options(),
        )


def no_targets(frame: Frame) -> Tensor:
    """Returns the targets of no example of a frame: (0,) labels or floats, or (0, K) floats."""
    if frame.classes:
        return torch.zeros(0, dtype=torch.int64)
    return torch.zeros(0, *([frame.target_size] if frame.target_size > 1 else []))


def dtype_of(frame: Frame) -> torch.dtype:
    """Returns the dtype of a frame's examples.

    Raises:
        UserError: no dtype of examples.
    """
    if frame.dtype not in _DTYPES:
        raise UserError(f"examples must be of dtype {', '.join(_DTYPES)}, got {frame.dtype}")
    return _DTYPES[frame.dtype]


def plain(value: Any) -> dict[str, Any]:
    """Returns a dataclass of this module as plain JSON values."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value), allow_nan=False))
    return found

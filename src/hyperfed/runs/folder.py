"""What a run leaves on disk, and reading it back.

``runs/<experiment>/<timestamp>-seed<k>/`` holds ``config.toml``, ``metrics.jsonl`` (one
:class:`~hyperfed.runs.records.Evaluation` per line), ``summary.json``, ``log.txt``, ``status.json``
and ``checkpoint/``. Files are replaced whole or not at all, lines are appended, and JSON says
``null`` where a number is not finite.
"""

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hyperfed.errors import LONGEST, UserError, one_line
from hyperfed.metrics import ACCURACY
from hyperfed.runs.measures import finite
from hyperfed.runs.records import Evaluation, as_line, from_line
from hyperfed.system import toml
from hyperfed.system.files import (
    PRIVATE,
    atomic_write,
    check_files,
    refused,
    remove_unfinished,
    sync,
)
from hyperfed.trees.checkpoints import previous


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, or where one is to be.

    Attributes:
        path: where it is.

    Raises:
        UserError: a pipe, or another thing that is no file, is in it.
    """

    path: Path

    def __post_init__(self) -> None:
        for folder in (self.path, self.state.parent):
            check_files(folder)

    @classmethod
    def create(cls, parent: Path, experiment: str, seed: int, timestamp: datetime) -> "RunFolder":
        """Makes ``parent/experiment/<timestamp>-seed<k>``, numbered from 2 where that is taken.

        Raises:
            UserError: the folder cannot be made.
        """
        name = f"{timestamp:%Y%m%d-%H%M%S}-seed{seed}"
        group = parent / experiment
        try:
            group.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                folder = cls(group / (name if number == 1 else f"{name}-{number}"))
                with contextlib.suppress(FileExistsError):  # a run that began in the same second
                    folder.path.mkdir(mode=PRIVATE)
                    break
            folder.state.parent.mkdir()
        except OSError as error:
            raise refused(group, error) from error
        return folder

    @property
    def config(self) -> Path:
        """All settings, as :func:`hyperfed.runs.config.dump` writes them."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One :class:`Evaluation` per line."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The final numbers; there is none before a run ends."""
        return self.path / "summary.json"

    @property
    def status(self) -> Path:
        """What it does now (:mod:`hyperfed.runs.status`)."""
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        """What a run says on the way."""
        return self.path / "log.txt"

    @property
    def state(self) -> Path:
        """The latest checkpoint, with the one before it beside it."""
        return self.path / "checkpoint" / "state.safetensors"

    @property
    def released(self) -> Path:
        """What clients at sites have paid for all that a trusted server told, to this moment."""
        return self.state.with_name("released.safetensors")

    @property
    def served(self) -> Path:
        """What clients who do not train have let out beside what checkpoints say of them."""
        return self.state.with_name("served.safetensors")

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return self.state.exists() or previous(self.state).exists()

    @property
    def sites(self) -> Path:
        """Who the clients are, where they are at sites (:class:`hyperfed.data.roster.Roster`)."""
        return self.path / "sites.json"

    @property
    def newcomers(self) -> Path:
        """The same with those who came when it was over, and whose sites have their models."""
        return self.path / "newcomers.json"

    def append(self, evaluation: Evaluation) -> None:
        """Adds a line to the metrics, whole or not at all.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        try:
            with self.metrics.open("ab", buffering=0) as file:
                start, line = file.tell(), as_line(evaluation)
                try:
                    if file.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(start)
                    raise
        except OSError as error:
            raise refused(self.metrics, error) from error

    def sync(self) -> None:
        """Has the disk keep the metrics, without which a checkpoint is of no use.

        Raises:
            UserError: the disk refuses.
        """
        if self.metrics.exists():
            sync(self.metrics)

    def check_links(self) -> None:
        """Finds out whether what is written to this folder is written to no other place.

        Raises:
            UserError: a link is in it.
        """
        for place, folders, files in os.walk(self.path):
            for path in (Path(place, name) for name in (*folders, *files)):
                if not path.is_symlink():
                    continue
                raise UserError(
                    f"{path} must be no link, as what a run writes would go to {path.readlink()}; "
                    "put a copy in its place"
                )

    def clean(self) -> None:
        """Removes what a killed process was about to put in place.

        Raises:
            UserError: the disk refuses.
        """
        for folder in (self.path, self.state.parent):
            remove_unfinished(folder)

    def truncate_after(self, round: int) -> None:
        """Drops what a resumed run writes again: later rounds, and novel clients (the end's).

        A last line that a kill cut short goes too.

        Raises:
            UserError: the metrics are damaged, or the disk refuses.
        """
        kept = [e for e in self.evaluations() if e.round <= round and e.split != "novel"]
        atomic_write(self.metrics, b"".join(map(as_line, kept)))

    def check_as_of(self, round: int) -> None:
        """Finds out whether there is nothing that :meth:`truncate_after` would drop.

        Raises:
            UserError: there is, or the metrics are damaged.
        """
        later = (e.round > round or e.split == "novel" for e in self.evaluations())
        if any(later) or self._metrics().rpartition(b"\n")[2]:  # or half a line
            raise UserError(
                f"{self.metrics} must end where a run is that is to be trained on, round {round}, "
                "but has more, of a process that was killed or that went on; use hyperfed resume "
                f"{self.path}, or hyperfed.resume(FOLDER)"
            )

    def _metrics(self) -> bytes:
        return _read(self.metrics) if self.metrics.exists() else b""

    def evaluations(self) -> list[Evaluation]:
        """Returns the metrics so far, without a last line that a kill cut short.

        Raises:
            UserError: the metrics are damaged.
        """
        whole = self._metrics().rpartition(b"\n")[0]
        found: list[Evaluation] = []
        first: dict[tuple[int, str], Evaluation] = {}
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                evaluation = from_line(line)
                if first.setdefault((evaluation.round, evaluation.split), evaluation) != evaluation:
                    raise ValueError("another line is of the same round and split")
                found.append(evaluation)
            except ValueError as error:  # pydantic's too
                raise UserError(
                    f"every line of {self.metrics} must be an evaluation, but line {number} is "
                    f"not: {line[:60]!r}; restore the file or remove that line"
                ) from error
        return found

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the final numbers; those that are not finite become null.

        Raises:
            UserError: the disk is full, read-only or otherwise refuses.
        """
        text = json.dumps(_finite_only(summary), indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write(self.summary, f"{text}\n".encode())


def _check_words(config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` where what is shown as it is, or taken apart, is no word."""
    method = config.get("method")
    words = {
        "method.name": method.get("name") if isinstance(method, dict) else None,
        "metric": summary.get("metric", ACCURACY.name),
        "evaluated": summary.get("evaluated") or "",
        "novel_evaluated": summary.get("novel_evaluated") or "",
    }
    for key, word in words.items():
        if not (isinstance(word, str) and word.isprintable() and len(word) <= LONGEST):
            raise ValueError(f"{key} is {one_line(repr(word), 60)}")


def _finite_only(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _finite_only(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_finite_only(inner) for inner in value]
        case float():
            return finite(value)
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} must be a readable file, but: {error.strerror}; "
            f"{path.parent} must be the folder of a run"
        ) from error


@dataclass(frozen=True)
class RunRecord:
    """A run as it stands on disk.

    Attributes:
        path: its folder.
        config: all settings, nested as in the file.
        evaluations: in the order of the run.
        summary: the final numbers; None for a run that has not ended.
    """

    path: Path
    config: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    summary: dict[str, Any] | None


def read_run(path: Path) -> RunRecord:
    """Reads a run's folder.

    Raises:
        UserError: it is not one, or a file in it is damaged.
    """
    folder = RunFolder(path)
    settings = _read(folder.config)
    numbers = _read(folder.summary) if folder.summary.exists() else b"null"
    try:
        config, summary = toml.loads(settings.decode()), json.loads(numbers)
        if not isinstance(summary, dict | None):
            raise ValueError(f"the summary is {one_line(numbers.decode(), 60)}")
        _check_words(config, summary or {})
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} must hold a TOML config and JSON summary, but: {error}") from error
    return RunRecord(path, config, tuple(folder.evaluations()), summary)


def find_runs(parent: Path) -> list[Path]:
    """Returns the folders of all runs in ``parent`` or below, sorted by name."""
    return sorted(config.parent for config in parent.rglob("config.toml"))

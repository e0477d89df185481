"""What a run does now, for whoever watches over it: ``status.json`` in its folder, and reading it.

The file is replaced whole as each round and each evaluation begins, and when the run ends. It is
for people and monitoring alone: a run goes on from its checkpoints, also where the disk refuses its
status.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated, Any, Literal

import torch
from pydantic import AwareDatetime, ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter
from pydantic.dataclasses import dataclass

from hyperfed import privacy
from hyperfed.engines.flower.engine import FlowerEngine
from hyperfed.errors import LONGEST, UserError, one_line
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import Lost
from hyperfed.runs.trained import TrainedMethod
from hyperfed.system.files import atomic_write
from hyperfed.system.locks import is_held

State = Literal["training", "evaluating", "stopped", "done", "failed"]
RUNNING: frozenset[State] = frozenset({"training", "evaluating"})

TOLD = 20
"""Clients lost in the last round that are named, with why."""

PAUSE = 1.0
"""Seconds between two writes of a run whose clients are here, whose rounds may take less than
that."""

PATIENCE = 600.0
"""Seconds without news after which a run counts as stale, at least."""

MESSAGES = 6
"""Times that a site may take all its time to answer, in a round or an evaluation."""

_Seconds = Annotated[FiniteFloat, Field(ge=0)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Sites:
    """How the sites of a federation are.

    Attributes:
        answering: those that are connected and gave a usable answer to what they were sent last.
        asked: all that this process of the run has sent something.
    """

    answering: NonNegativeInt
    asked: NonNegativeInt


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Status:
    """What ``status.json`` says.

    Attributes:
        method: what trains.
        engine: who computes.
        state: what the run does: ``training``, ``evaluating``, ``stopped`` (it can be resumed),
            ``done`` or ``failed``.
        error: why it failed; empty else.
        time: when this was written.
        round: rounds done.
        rounds: of the whole run.
        sites: of a federation; None of other runs.
        lost: clients lost in the last round.
        reasons: name of a lost client -> why; of the first few.
        bytes_down: sent to clients since the start.
        bytes_up: sent by clients since the start.
        epsilon_spent: of the client that spent most; None where nothing is private.
        seconds: since the start, time before a resume included.
        seconds_per_round: on average since the run began or was resumed, evaluations included; None
            before the first has been done.
        seconds_left: what the remaining rounds take at that.
        patience: seconds after ``time`` when something is wrong if there is nothing newer.
    """

    method: str
    engine: str
    state: State
    time: AwareDatetime
    round: NonNegativeInt
    rounds: NonNegativeInt
    lost: NonNegativeInt
    bytes_down: NonNegativeInt
    bytes_up: NonNegativeInt
    seconds: _Seconds
    patience: _Seconds
    reasons: Mapping[str, str] = Field(default_factory=dict)
    error: str = ""
    sites: Sites | None = None
    epsilon_spent: _Seconds | None = None
    seconds_per_round: _Seconds | None = None
    seconds_left: _Seconds | None = None

    @property
    def running(self) -> bool:
        """Whether it says that the run goes on."""
        return self.state in RUNNING


_STATUS = TypeAdapter(Status)


class Reporter:
    """Writes the status of a run.

    Args:
        run: that run.
    """

    def __init__(self, run: TrainedMethod) -> None:
        self._run = run
        self._lost: tuple[Lost, ...] = ()
        self.begin(None)

    def begin(self, folder: RunFolder | None) -> None:
        """Is told that the run trains from here on; without a folder nothing is written."""
        self._folder = folder
        self._begin = self._last = monotonic()
        self._first = self._run.round
        self._longest, self._written = 0.0, -PAUSE

    def lost(self, clients: Sequence[Lost]) -> None:
        """Is told who was lost in the round that has just ended."""
        self._lost = tuple(clients)

    def tell(self, state: State, error: str = "") -> None:
        """Writes what the run does from now on; a disk that refuses it is not the run's business.

        Args:
            state: what it does.
            error: why it failed.
        """
        if self._folder is None:
            return
        now = monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        hasty = state in RUNNING and not isinstance(self._run.engine, FlowerEngine)
        if hasty and now < self._written + PAUSE:
            return
        self._written = now
        content = _STATUS.dump_json(self._status(state, error), indent=2)
        with suppress(UserError):
            atomic_write(self._folder.status, content + b"\n")

    def _status(self, state: State, error: str) -> Status:
        run, name_of = self._run, self._run.task.name_of
        done = run.round - self._first
        each = (monotonic() - self._begin) / done if done else None
        return Status(
            method=run.config.method,
            engine=run.engine.name,
            state=state,
            error=one_line(error),
            time=datetime.now(UTC),
            round=run.round,
            rounds=run.config.rounds,
            sites=Sites(*run.engine.answering) if isinstance(run.engine, FlowerEngine) else None,
            lost=len(self._lost),
            reasons={name_of(it.client): one_line(it.reason) for it in self._lost[:TOLD]},
            bytes_down=run.bytes["down"],
            bytes_up=run.bytes["up"],
            epsilon_spent=_spent(run),
            seconds=run.seconds,
            seconds_per_round=each,
            seconds_left=None if each is None else each * (run.config.rounds - run.round),
            patience=max(PATIENCE, MESSAGES * run.config.engine.timeout, 3 * self._longest),
        )


def _spent(run: TrainedMethod) -> float | None:
    """Returns the epsilon of the client that has spent most; None where nothing is private."""
    promised = run.server.privacy() or {}
    delta = run.private.delta if run.private is not None else promised.get("delta")
    if delta is None:
        return None

    def precision(kept: Mapping[str, torch.Tensor]) -> float:
        return float((kept["multipliers"] ** -2).sum()) if kept else 0.0

    # Of that client alone: to count it for each would take longer than a round.
    most = max(run.engine.released.values(), key=precision, default={})
    told: float = privacy.spent([most], delta)["epsilon_spent"]
    return told


def read(folder: RunFolder) -> Status:
    """Reads the status of a run.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder.status
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} must be a readable file, but: {error.strerror}; a run has one from its first "
            "round on, on the host that writes its records"
        ) from error
    try:
        found = _STATUS.validate_json(content)
        if found.round > found.rounds:
            raise ValueError(f"round {found.round} of {found.rounds}")
    except ValueError as error:  # pydantic's too
        raise UserError(
            f"{path} must be the status of a run, but is not "
            f"({one_line(str(error).splitlines()[0], 100)}); its run writes it anew in its next "
            "round, or delete it"
        ) from error
    return replace(
        found,
        error=one_line(found.error),
        method=one_line(found.method, 100),
        engine=one_line(found.engine, 100),
        reasons={
            one_line(name, 100): one_line(why, LONGEST)
            for name, why in [*found.reasons.items()][:TOLD]
        },
    )


def as_written(found: Status) -> dict[str, Any]:
    """Returns a status as plain values."""
    told: dict[str, Any] = _STATUS.dump_python(found, mode="json")
    return told


def stale(status: Status, folder: RunFolder, now: datetime) -> str:
    """Returns why a status is not news any more; empty where it is, or the run has ended.

    Args:
        status: what the file says.
        folder: of the run.
        now: the time of day, with its zone.
    """
    if not status.running:
        return ""
    if is_held(folder.path) is False:
        return "the process that wrote it is gone"
    if (now - status.time).total_seconds() > status.patience:
        return f"there must be news within {status.patience:.0f} s"
    return ""

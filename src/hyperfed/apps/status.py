"""``hyperfed status``: how a run is, or a site, in words and as an exit code, for monitoring."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Argument

from hyperfed.apps.guard import STOPPED
from hyperfed.apps.printing import Json, print_json
from hyperfed.engines.flower.diary import LOG, Told, told_by
from hyperfed.engines.flower.store import MODELS, models_kept
from hyperfed.runs import status
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.remarks import megabytes

WRONG = 1
"""Exit code of what is stale or has failed."""


def show_status(
    folder: Annotated[
        Path, Argument(metavar="RUN_DIR|STATE_DIR", help="A run's folder, or a site's state.")
    ],
    as_json: Json = False,
) -> None:
    """Say how a run is. Exit code 0 where it trains or is done, 1 stale or failed, 3 stopped.

    Of the state folder of a site it says when the last message came, and how many calls were
    refused today.
    """
    if (folder / LOG).exists():
        _say_site(told_by(folder), models_kept(folder), as_json=as_json)
        return
    place = RunFolder(folder)
    found, now = status.read(place), datetime.now(UTC)
    why = status.stale(found, place, now)
    if as_json:
        print_json({**status.as_written(found), "stale": why})
    else:
        print("\n".join(_words(found, why, now)))
    _leave(found.state, why)


def _leave(state: str, why: str) -> NoReturn:
    if why or state == "failed":
        raise typer.Exit(WRONG)
    raise typer.Exit(STOPPED if state == "stopped" else 0)


def _words(found: status.Status, why: str, now: datetime) -> list[str]:
    """Returns the lines that say how a run is."""
    ago = lasting((now - found.time).total_seconds())
    state = f"stale, was {found.state}" if why else found.state
    lines = [
        f"{state}: round {found.round} of {found.rounds} of {found.method}, engine {found.engine}",
        f"last news: {ago} ago, at {found.time.astimezone():%Y-%m-%d %H:%M:%S %Z}"
        + (f"; {why}" if why else ""),
    ]
    if found.error:
        lines.append(f"error: {found.error}")
    if found.sites is not None:
        lines.append(f"sites: {found.sites.answering} of {found.sites.asked} answering")
    lines.append(f"lost in the last round: {found.lost} clients")
    lines += [f"  {name}: {reason}" for name, reason in found.reasons.items()]
    moved = f"{megabytes(found.bytes_down)} MB down, {megabytes(found.bytes_up)} MB up"
    lines.append(f"sent: {moved}")
    if found.epsilon_spent is not None:
        lines.append(f"privacy: epsilon {found.epsilon_spent:.4g} spent, of the client with most")
    lines.append(f"time: {lasting(found.seconds)}")
    if found.seconds_per_round is not None:
        lines[-1] += f", {lasting(found.seconds_per_round)} a round"
    if found.running and found.seconds_left is not None:
        lines[-1] += f", about {lasting(found.seconds_left)} to go"
    return lines


def _say_site(told: Told, models: Mapping[str, int], *, as_json: bool) -> None:
    if as_json:
        said: dict[str, Any] = {"last": told.last, "calls": told.calls, "refused": told.refused}
        print_json(said | {"torn": told.torn, "models": dict(models)})
        return
    print(f"last message: {told.last or 'none'}")
    print(f"today (UTC): {told.calls} calls of clients, {told.refused} of them refused")
    for decision, times in told.reasons:
        print(f"  {times} times {decision}")
    if told.torn:
        print(f"lines of the audit log that are none: {told.torn}; did the machine die over them?")
    for run, clients in models.items():
        print(f"models of {clients} clients for their owners: {MODELS}/{run}")


def lasting(seconds: float) -> str:
    """Returns a time in words, to two of its units."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s"
    minutes = timedelta(seconds=seconds) // timedelta(minutes=1)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds) % 60} s"

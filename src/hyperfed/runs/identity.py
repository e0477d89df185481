"""What a checkpoint must be of for a run to go on from it: its settings, data and networks.

And the evaluations beside it must be those of the same run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hyperfed import trees
from hyperfed.data.examples import Normalize, hash_of
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.errors import UserError, one_line
from hyperfed.runs import config as configuration
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.records import Evaluation
from hyperfed.runs.settings import RunConfig

MAY_CHANGE = (*configuration.GOES_ON, "task.")
"""How keys of settings begin by which a run may go on otherwise; of its task the data tell."""


def identity(config: RunConfig, task: Task) -> dict[str, Any]:
    """Returns what a checkpoint says of the run that it is of.

    Args:
        config: its settings.
        task: whose data it trains on.
    """
    return {
        "method": config.method,
        "settings": _settings(config, MAY_CHANGE, rounds=config.private),
        "data_fingerprint": task.fingerprint,
        "targets": _targets(task),
        "score": task.metric.name,
        "loss": getattr(task.loss, "__name__", type(task.loss).__name__),
        "task": _beside_the_data(task),
    }


def check_identity(meta: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another run.

    Args:
        meta: the checkpoint's. An older one says nothing of targets, of score and loss, of what is
            beside the data, or of settings.
        ours: :func:`identity` of the run that is to go on.

    Raises:
        UserError: it is of another method, of other settings, data or networks, or of a task that
            trains or judges its models, or calls or counts its clients or labels, otherwise.
    """
    for key in ("method", "data_fingerprint"):
        if meta.get(key) != ours[key]:
            raise UserError(
                f"the checkpoint's {key} must be this run's, {ours[key]}, came "
                f"{one_line(str(meta.get(key)), 100)}; use the data and the settings that the run "
                "was started with"
            )
    before: Mapping[str, str] = found if isinstance(found := meta.get("settings"), dict) else {}
    _check_settings(before, ours["settings"], "set them back in its config.toml")
    if meta.get("targets", ours["targets"]) != ours["targets"]:
        raise UserError(
            "the task's model must be the one that the run was started with, but has parameters of "
            "other names or shapes; make the task with that one, or start a new run"
        )
    for key in ("score", "loss"):
        if (before := meta.get(key, ours[key])) != ours[key]:
            raise UserError(
                f"the task's {key} must be the one that the run was started with, "
                f"{one_line(str(before), 100)}, came {one_line(ours[key], 100)}; make the task "
                "with that one, or start a new run"
            )
    said = meta.get("task", ours["task"])
    told = said if isinstance(said, dict) else {}
    if other := [what for what, value in ours["task"].items() if told.get(what) != value]:
        raise UserError(
            f"the task's {', '.join(other)} must be those that the run was started with, but are "
            "others; make the task as it was made then, or start a new run"
        )


def check_submitted(config: RunConfig, submitted: RunConfig) -> None:
    """Refuses settings for a run at sites that has others: its server would keep to its own.

    Args:
        config: those of the run.
        submitted: those that its sites are sent.

    Raises:
        UserError: another one than of where and how it computes.
    """
    ours, theirs = (
        _settings(each, configuration.GOES_ON, rounds=True) for each in (config, submitted)
    )
    _check_settings(ours, theirs, "submit it with those")


def _settings(config: RunConfig, may_change: tuple[str, ...], *, rounds: bool) -> dict[str, str]:
    """Returns {dotted key: value} of the settings but some, by how keys begin."""
    every = configuration.flat(configuration.to_dict(config))
    return {
        key: str(value)
        for key, value in every.items()
        if not key.startswith(may_change) or (key == "rounds" and rounds)
    }


def _check_settings(before: Mapping[str, str], now: Mapping[str, str], remedy: str) -> None:
    """Raises ``UserError`` for settings that are not what they were; unknown ones were the same."""
    came = {key: value for key, value in now.items() if before.get(key, value) != value}
    if came:
        both = ", ".join(f"{key}={before[key]}, came {value}" for key, value in came.items())
        raise UserError(
            "the settings must be those that the run was started with, "
            f"{one_line(both, 300)}; {remedy}, or start a new run"
        )


def check_evaluations(
    evaluations: Sequence[Evaluation], round: int, config: RunConfig, folder: RunFolder
) -> None:
    """Finds out whether checkpoint and evaluations are of one run.

    Args:
        evaluations: all that were recorded.
        round: that of the checkpoint, 0 where there is none.
        config: the settings by which they were made.
        folder: has both.

    Raises:
        UserError: one of them lacks what the other one has.
    """
    known = [e.round for e in evaluations if e.split in ("val", "test")]
    if not folder.has_checkpoint and max(known, default=0) > config.checkpoint_every:
        raise UserError(
            f"{folder.state} must be there, since {folder.metrics.name} has round {max(known)}, "
            "but is not; restore it from a copy, or start a new run"
        )
    due = [n for n in range(1, round + 1) if n % config.evaluate_every == 0 or n == config.rounds]
    if missing := [number for number in due if known.count(number) < 2]:
        raise UserError(
            f"{folder.metrics} must have every evaluation up to that of round {round}, which "
            f"{folder.state} is of, but lacks that of round {missing[0]}; restore it from a copy, "
            "or start a new run"
        )


def _targets(task: Task) -> str:
    """Hashes the names and shapes of all that a client of each size trains or keeps."""
    return hash_of(*(f"{size} {trees.structure(task.initial(size))}" for size in task.models))


def _beside_the_data(task: Task) -> dict[str, str]:
    """Hashes what the fingerprint of the data does not tell, by what an error calls it.

    Nothing where data are at sites: clients may come back at another one.
    """
    if isinstance(task, RemoteTask):
        return {}
    clients = range(task.clients)
    normalize = getattr(task.transform, "normalize", task.transform)
    told = {
        "names of clients": [task.name_of(client) for client in clients],
        "names of labels": [*task.labels],
        "sizes of clients": [task.size_of(client) for client in clients],
        "number of novel clients": task.novel,
        "normalisation": normalize if isinstance(normalize, Normalize) else None,
    }
    return {what: hash_of(repr(value)) for what, value in told.items()}

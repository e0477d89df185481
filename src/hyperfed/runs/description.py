"""What a run will have to hold and to send, found out before it is started."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hyperfed import trees
from hyperfed.data.own import Task
from hyperfed.data.tasks import of_nobody
from hyperfed.engines import EngineConfig
from hyperfed.errors import UserError
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig, one_step


@dataclass(frozen=True)
class Description:
    """How large everything is that a run learns and sends.

    Attributes:
        targets: {size: numbers of a target that are trained}.
        frozen: {size: numbers of it that are not}.
        server: {what the server learns: its numbers}, such as those of the hypernetwork.
        clients: how many take part in a round.
        bytes_down: what the first round sends to them, all together.
        bytes_up: what they return in it.
        metric: by which models are judged.
        task: what is learned from what, and who has how much of it, in words.
    """

    targets: Mapping[str, int]
    frozen: Mapping[str, int]
    server: Mapping[str, int]
    clients: int
    bytes_down: int
    bytes_up: int
    metric: str
    task: str


def describe(config: RunConfig, task: Task | None = None) -> Description:
    """Describes a run, of which nothing is written: bytes are those of a round that is tried out.

    Its clients make one local step each, in this process; what they send does not depend on it.

    Args:
        config: all settings of the run.
        task: the data; built from the settings where not given.

    Raises:
        UserError: the run could not be started, or its sites keep the data.
    """
    if config.engine.name == "flower":
        raise UserError(
            "a run to describe must be of data that are here, got engine=flower, whose sites keep "
            "theirs; leave the engine out"
        )
    more = config.rounds + 1  # so that the first round is neither the last nor evaluated
    tried = replace(
        config,
        settings=one_step(config.settings),
        engine=EngineConfig("loop"),
        rounds=more,
        evaluate_every=more,
    )
    with closing(Run(tried, task)) as run:
        learned = {name: part for name, part in vars(run.server).items() if _is_learned(part)}
        server = {name: _count(trees.parameters_of(part)) for name, part in learned.items()}
        next(run.train())
        if run.lost_everybody:
            raise UserError(
                "a run to describe must have a first round that somebody is left of, but in it "
                f"every client was lost: {run.lost_everybody}"
            )
        models = run.task.models
        return Description(
            targets={size: _count(trees.parameters_of(net)) for size, net in models.items()},
            frozen={size: _count(trees.frozen_of(net)) for size, net in models.items()},
            server=server,
            clients=run.cohort_size,
            bytes_down=run.bytes["down"],
            bytes_up=run.bytes["up"],
            metric=run.task.metric.name,
            task="\n".join(filter(None, (repr(run.task), of_nobody(run.config.task)))),
        )


def _is_learned(part: Any) -> bool:
    return isinstance(part, nn.Module) and bool(trees.parameters_of(part))


def _count(tensors: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())

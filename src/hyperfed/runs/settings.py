"""All settings of a run, each with what it decides and what it admits."""

import math
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
)
from pydantic.dataclasses import dataclass

from hyperfed.data.settings import several
from hyperfed.data.tasks import TaskConfig
from hyperfed.engines import EngineConfig, Faults
from hyperfed.engines.masking import Masking
from hyperfed.engines.updates import PrivateUpdates, Where
from hyperfed.errors import UserError
from hyperfed.methods import METHODS
from hyperfed.system.devices import is_cpu, is_here
from hyperfed.training import Precision
from hyperfed.trees.aggregation import Aggregation, Rule

_STRICT = ConfigDict(extra="forbid", strict=True)

MetricName = Literal["balanced_accuracy", "f1", "calibration", "r2"]
"""What clients count for on request (:data:`hyperfed.metrics.ON_REQUEST`)."""

Examined = Literal["descriptors", "crossed"]
"""What can be looked into beside how good models are (:mod:`hyperfed.runs.examined`)."""

TrackerName = Literal["auto", "tensorboard", "mlflow", "wandb"]
"""Where numbers go besides the records (:mod:`hyperfed.runs.trackers`)."""


def _number_or_fraction(cohort: Any) -> int | float:
    if isinstance(cohort, bool) or not isinstance(cohort, int | float):
        raise ValueError("must be a number of clients, or a fraction of them, of which 1.0 is all")
    if isinstance(cohort, int) and cohort < 1:
        raise ValueError("must be at least 1 client, or a fraction such as 0.25")
    if isinstance(cohort, float) and not 0 < cohort <= 1:
        raise ValueError("must be a whole number of clients, or a fraction above 0 and at most 1.0")
    return cohort


@dataclass(frozen=True, config=_STRICT)
class ServeConfig:
    """How clients are served, whatever the method.

    Attributes:
        finetune_steps: steps of local training, with the method's ``local_*`` settings and the
            task's loss, by which a client's personal model is fine-tuned on its own training data
            whenever it is used: in each evaluation, so that the best round is that of the
            fine-tuned models, and in all that serves known or novel clients afterwards. No round
            of training sees what came of it.
    """

    finetune_steps: NonNegativeInt = 0


@dataclass(frozen=True, config=_STRICT)
class RobustConfig:
    """What a server does against clients whose replies are wrong, by mischance or on purpose.

    Attributes:
        reply_bound: how many times as large as the others' a client's reply to a message of
            training may be (:mod:`hyperfed.engines.bounds`); one that is larger loses its client
            for the message. None for any size.
        aggregation: what stands for the mean over clients wherever a server takes it
            (:mod:`hyperfed.trees.aggregation`).
        hostile: the share of clients that ``trimmed_mean`` and ``krum`` are to bear.
    """

    reply_bound: Annotated[float, Field(gt=1)] | None = 100.0
    aggregation: Aggregation = "mean"
    hostile: Annotated[float, Field(ge=0, lt=0.5)] = 0.25

    @property
    def rule(self) -> Rule:
        """What stands for the mean, as servers have it."""
        return Rule(self.aggregation, self.hostile)


@dataclass(frozen=True, config=_STRICT)
class TrainingPrivacy:
    """Private training: what clients answer has a largest length, and noise or masks.

    Noise is of whole clients, not of single samples: any data of a client could be others. (What
    ``itpfl`` makes private with ``method.epsilon`` is a sample of a novel client.)

    Attributes:
        epsilon: what all answers of a client may cost in the run; no noise where not given.
        delta: at which epsilon is told.
        clip: the largest length of an answer (:mod:`hyperfed.engines.updates`). Where not given, 1
            of one with noise, and 100 of one that is only masked.
        where: noise is added by each client to what it answers (``local``), or by a server that is
            trusted with the answers to what it makes of them (``central``).
        masking: the server is told sums of what clients answer, and no answer by itself
            (:mod:`hyperfed.engines.masking`).
    """

    epsilon: Annotated[FiniteFloat, Field(gt=0)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    clip: Annotated[FiniteFloat, Field(gt=0)] | None = None
    where: Where = "local"
    masking: bool = False

    @property
    def bound(self) -> float:
        """The largest length of an answer."""
        return self.clip or (100.0 if self.epsilon is None else 1.0)

    @property
    def trusts_server(self) -> bool:
        """Whether clients answer without noise, which the server adds to what it makes of that."""
        return self.epsilon is not None and self.where == "central"

    def sums(self) -> Masking | None:
        """Returns how answers are summed under masks; None where they are not."""
        return Masking(self.bound, self.epsilon is not None) if self.masking else None

    def updates(self, multiplier: float = math.inf) -> PrivateUpdates | None:
        """Returns how answers are made private, with so much noise; None where they are not."""
        if self.epsilon is None:
            return None
        return PrivateUpdates(self.where, self.bound, multiplier, self.epsilon, self.delta)


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    """Everything that decides what a run computes.

    Attributes:
        method: a name in :data:`hyperfed.methods.METHODS`.
        settings: an instance of that method's ``Config``.
        preset: which of the method's published settings the run started from.
        rounds: server iterations.
        cohort: clients of a round: their number, or a fraction of those that train (1.0 is all),
            novel ones not counted; halves are rounded up, and one is the least. Where there are
            fewer than a preset has, all of them.
        evaluate_every: rounds between evaluations.
        best: which validation number makes a round the best: ``accuracy`` stands for the task's own
            metric, which of numbers is the RMSE; the others are for classes.
        metrics: what clients count for beside the task's own metric: ``balanced_accuracy``, ``f1``
            (macro) and ``calibration`` (the expected error of confidence, 15 bins) of classes,
            which tell how many examples a client has of each, and ``r2`` of numbers, which tells
            mean and spread of its targets and is always there unless clients are at sites
            (:mod:`hyperfed.metrics`).
        examine: what is looked into beside how good models are, which changes no number.
            ``descriptors``: at each evaluation, how the distances between clients' descriptors rank
            beside those between their labels, and at the end the descriptors; ``crossed``: at the
            end, each known client's metric with what the server makes for every other one.
        checkpoint_every: rounds between checkpoints; a round that ends ten minutes after the last
            one is followed by one, too.
        seed: of every draw.
        device: where clients compute, and the server beside them: ``cpu``, ``cuda`` or ``cuda:N``.
            With ``flower`` that of the server; each site says its own.
        precision: of the clients' arithmetic. ``bf16`` computes products and convolutions of local
            steps and evaluations in bfloat16; weights and messages stay float32.
        track: where numbers go besides the records (:mod:`hyperfed.runs.trackers`):
            ``tensorboard``, ``mlflow``, ``wandb`` or None for nowhere. ``auto`` is TensorBoard
            where it is installed and the run has a folder.
        task: data, split and target model.
        serve: how clients are served.
        robust: against clients whose replies are wrong.
        privacy: of training.
        engine: who computes.
        faults: faults made on purpose.
    """

    method: str
    settings: Any
    preset: str = "default"
    rounds: PositiveInt = 200
    cohort: Annotated[int | float, BeforeValidator(_number_or_fraction)] = 0.25
    evaluate_every: PositiveInt = 20
    best: Literal["accuracy", "masked_accuracy", "zeroed_accuracy"] = "accuracy"
    metrics: Annotated[tuple[MetricName, ...], BeforeValidator(several)] = ()
    examine: Annotated[tuple[Examined, ...], BeforeValidator(several)] = ()
    checkpoint_every: PositiveInt = 100
    seed: NonNegativeInt = 0
    device: str = "cpu"
    precision: Precision = "float32"
    track: TrackerName | None = "auto"
    task: TaskConfig = TaskConfig()
    serve: ServeConfig = ServeConfig()
    robust: RobustConfig = RobustConfig()
    privacy: TrainingPrivacy = TrainingPrivacy()
    engine: EngineConfig = EngineConfig()
    faults: Faults = Faults()

    def on(self, device: str) -> "RunConfig":
        """Returns these settings with another device, and of the engine what goes with it."""
        engine, gpus = self.engine, 0.0
        if engine.name == "ray" and not is_cpu(device):
            gpus = engine.gpus_per_worker or 1.0
        graphs = engine.graphs and device.startswith("cuda")
        engine = replace(engine, graphs=graphs, gpus_per_worker=gpus)
        return replace(self, device=device, engine=engine)

    def check_longer(self, rounds: int) -> None:
        """Checks that a run of these settings may have so many rounds instead.

        Raises:
            UserError: they are no more, or what the run has told of its clients was for as many.
        """
        if rounds <= self.rounds:
            raise UserError(
                f"a run that goes on for longer must have more than its {self.rounds} rounds, came "
                f"{rounds}; leave rounds out to go on as it was begun"
            )
        if self.private or self.engine.name == "flower":
            why = "whose noise is for so many" if self.private else "which is at sites"
            raise UserError(
                f"a run must end after the rounds that it began with, {self.rounds}, where it is "
                f"one {why}, came {rounds}; start a new run"
            )

    @property
    def private(self) -> bool:
        """Whether what it tells of clients has noise, which is for so many rounds."""
        mechanism = getattr(self.settings, "mechanism", None)
        return self.privacy.epsilon is not None or mechanism is not None

    def has_device(self) -> bool:
        """Returns whether the device is here, or need not be: the actors of Ray have their own."""
        return self.engine.name == "ray" or is_here(self.device)


def one_step(settings: Any) -> Any:
    """Returns a method's settings with one local step, for a round that is tried out."""
    once = {"local_steps": 1, "local_epochs": None}
    return replace(settings, **{key: once[key] for key in once.keys() & vars(settings).keys()})


def cohort_size(cohort: int | float, known: int) -> int:
    """Returns how many of the ``known`` clients a round has; a number above all means all."""
    if isinstance(cohort, int):
        return min(cohort, known)
    # Of the fraction as it is written: 0.29 of 50 are 14.5, but in binary a little less.
    exact = Decimal(str(cohort)) * known
    return max(1, int(exact.to_integral_value(ROUND_HALF_UP)))


def check_clients(config: RunConfig, known: int) -> None:
    """Refuses a round of more clients than there are, and lies of clients who never train.

    The cohort of a preset is for tasks of any size.

    Args:
        config: all settings.
        known: clients that train.

    Raises:
        UserError: somebody asked for more of them, or for the lies of another.
    """
    presets = getattr(METHODS.get(config.method), "PRESETS", {})
    usual = presets.get(config.preset, {}).get("cohort")
    if isinstance(config.cohort, int) and config.cohort > known and config.cohort != usual:
        raise UserError(
            f"cohort must be at most {known}, the clients that train, came {config.cohort}; lower "
            "it, or give a fraction (1.0 is all)"
        )
    if others := [client for client in config.faults.hostile if client >= known]:
        raise UserError(
            f"faults.hostile must be clients that train, numbers from 0 to {known - 1}, came "
            f"{others[0]}; name one of those, or leave it out"
        )

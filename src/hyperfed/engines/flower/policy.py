"""What a site lets a server do, by its own words and its own state, never by what a message says.

A run's settings, methods' steps and all that they are given come from a server. A policy is the
site's: it is read from the site's disk, and a call that it does not allow is not run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from hyperfed.data.partitions import HELD_OUT
from hyperfed.engines.calls import Call, draw, find_step
from hyperfed.engines.masking import SMALLEST, Masking
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError
from hyperfed.federation import Client, step
from hyperfed.task import Split, Task
from hyperfed.training import Batch, Batches
from hyperfed.trees import Model, Tree

COUNTING = ("evaluate", "finetune", "keep")
"""Steps of every client that reply with counts or with nothing."""

BATCHES = {"local_steps", "local_epochs", "batch_size"}
"""Settings that say on which batches a client trains."""

READS_NOTHING = 1e-3
"""How far a probability must vary over a client's examples, or the model does not read them."""


_Fraction = Annotated[float, Field(ge=0, le=0.5)]


class RefusedError(UserError):
    """The site's policy does not allow what was asked."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Policy:
    """What a site lets a server do. The defaults are strict; a file changes what it names.

    Attributes:
        methods: the methods that it runs; None for any.
        refused_steps: steps that are never run, of any method. ``export`` hands out the personal
            model of a client, which at a site is nobody else's business; the others (``pfedhn``
            with a fixed descriptor) say how many examples it has of each class.
        settings: bounds of the method's settings, {name: (least, most)}; one that is no number is
            outside. Where ``local_steps``, ``local_epochs`` or ``batch_size`` has some, what is
            trained for a reply is trained on the batches that the settings say; without bounds of
            ``local_epochs``, those of ``local_steps`` are also of the steps in passes.
        smallest_batch: examples of a batch that is trained on; the last of a pass may have fewer.
        smallest_reply: different training examples behind a reply that depends on any.
        largest_training: training examples that a step reads, those that come again too.
        smallest_evaluation: examples behind counts, of each split that a client has, and of the
            validation data by which a step chooses.
        evaluations_per_day: evaluations of a client, by all runs together, in a day (UTC).
        val: fraction of each client's examples for validation, where the data do not say which.
        test: the same for testing. A run has no other: two that differ by one example would tell
            that one from what is said of all.
        largest_message: bytes that a server may send at once.
        largest_memory: bytes that the process of a message may take, what it begins with (less than
            2 GB) included; None for as many as there are. Where the system is Linux, and the
            message is answered by ``hyperfed node``.
        metrics: what clients count for beside scores and losses
            (:data:`hyperfed.metrics.ON_REQUEST`), which tells of their labels or targets.
        epsilon: what all answers with noise may cost a client, in all runs together: a bound
            of what they tell of any one of its examples. (Those of private training are counted by
            what they tell of all its examples at once, so that of one they tell no more.) It is
            also what one run may whose server adds the noise, which has its own account.
        delta: at which that is spent.
        noise_in_training: whether clients that train must add noise of their own to what they
            answer, of which epsilon is then the most that it may cost.
        masks_in_training: whether clients train for masked sums alone.
        smallest_sum: clients that a masked sum must be of.
        largest_log: bytes of the audit log, beyond which a new file is begun.
    """

    methods: tuple[str, ...] | None = None
    refused_steps: tuple[str, ...] = ("export", "class_counts", "class_proportions")
    settings: Mapping[str, tuple[FiniteFloat, FiniteFloat]] = Field(default_factory=dict)
    smallest_batch: PositiveInt = 8
    smallest_reply: PositiveInt = 11
    largest_training: PositiveInt = 10_000_000
    smallest_evaluation: PositiveInt = 5
    evaluations_per_day: NonNegativeInt = 100
    val: _Fraction = HELD_OUT
    test: _Fraction = HELD_OUT
    largest_message: PositiveInt = 1 << 30
    largest_memory: PositiveInt | None = None
    metrics: tuple[str, ...] = ()
    epsilon: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    noise_in_training: bool = False
    masks_in_training: bool = False
    smallest_sum: Annotated[int, Field(ge=SMALLEST)] = SMALLEST
    largest_log: PositiveInt = 10 << 20

    def check_size(self, size: int) -> None:
        """Raises ``RefusedError`` for a message of so many bytes, or more, that is too large."""
        if size > self.largest_message:
            raise RefusedError(
                f"a message must have {self.largest_message} bytes at most, has {size}"
            )

    def check_division(self, val: float | None, test: float | None) -> None:
        """Raises ``RefusedError`` for held out fractions, as a run says them, that are not ours."""
        for name, ours, came in (("val", self.val, val), ("test", self.test, test)):
            if came not in (None, ours):
                raise RefusedError(f"task.{name} must be {ours:g} here, came {came}; leave it out")

    def check_run(
        self,
        method: str,
        config: Any,
        private: PrivateUpdates | None = None,
        metrics: Sequence[str] = (),
        masking: Masking | None = None,
    ) -> None:
        """Raises ``RefusedError`` for a method, settings of it or metrics that are not allowed."""
        if self.noise_in_training and (private is None or private.where != "local"):
            raise RefusedError("clients train here with noise of their own alone; set privacy")
        if self.masks_in_training and masking is None:
            raise RefusedError("clients train here for masked sums alone; set privacy.masking")
        if private is not None and private.where == "central":
            self._check_trusted(private)
        if self.methods is not None and method not in self.methods:
            raise RefusedError(f"the method must be one that the site runs, came {method}")
        for name, (least, _) in self.settings.items():
            # A method without the setting keeps every bound.
            self._check_setting(name, getattr(config, name, least))
        if refused := [name for name in metrics if name not in self.metrics]:
            raise RefusedError(
                "metrics must be among those that the site counts for "
                f"({', '.join(self.metrics) or 'none'}), came {refused[0]}; leave it out"
            )

    def _check_trusted(self, private: PrivateUpdates) -> None:
        """Raises ``RefusedError`` for a run whose server, which adds the noise, may tell more."""
        if private.epsilon > self.epsilon or private.delta > self.delta:
            raise RefusedError(
                "where a server adds the noise, privacy.epsilon and privacy.delta must be at most "
                f"{self.epsilon:g} and {self.delta:g} here, came {private.epsilon:g} and "
                f"{private.delta:g}; lower them"
            )

    def check_call(
        self,
        call: Call,
        client: type[Client],
        config: Any,
        task: Task,
        *,
        seed: int,
        scratch: Tree,
    ) -> int:
        """Finds out whether a call is allowed, but for how often.

        Args:
            call: what is asked.
            client: the method's Client.
            config: the method's settings.
            task: with the client's data.
            seed: of the run.
            scratch: what the client noted in earlier steps of the round.

        Returns:
            the number of examples behind the reply.

        Raises:
            RefusedError: it is not.
        """
        _, info = find_step(client, call.step)
        if call.step in self.refused_steps:
            raise RefusedError(f"the step {call.step} is not run here")
        if call.step == "evaluate":
            sizes = [len(task.val[call.client]), len(task.test[call.client])]
            if fewest := min((count for count in sizes if count), default=0):
                self.check_held_out(fewest, "counts of an evaluation")
            return fewest
        # Of a method that can add noise the steps that add none say what it would have hidden.
        bare = getattr(config, "mechanism", True) is None and call.step not in COUNTING
        if bare and call.client in task.novel_ids:
            raise RefusedError(f"a novel client must answer {call.step} with noise; set epsilon")
        behind = self._check_drawn(call, client, config, task, seed)
        if info.reads == 0:
            return 0
        if info.reads == "val":
            if held_out := len(task.val[call.client]):
                return held_out  # few of which are refused where they are read
        elif info.reads == "kept":
            behind = len(scratch.get("x", ()))
        else:
            behind = ceil(behind * info.reads)
        if info.name not in COUNTING:
            self._check_number(behind, self.smallest_reply, "a reply")
        return behind

    def _check_drawn(
        self, call: Call, client: type[Client], config: Any, task: Task, seed: int
    ) -> int:
        """Returns how many training examples a call's batches are of; without any all there are.

        Raises ``RefusedError`` for batches that are not allowed.
        """
        examples = len(task.train[call.client])
        if call.batches is None:
            return examples
        self.check_batches(call.batches, examples)
        if find_step(client, call.step)[1].like is not None:
            self._check_plan(call.batches, config, examples)
        return len({*draw(call, client, task, seed).tolist()})

    def check_trained(self, call: Call, client: type[Client], config: Any, task: Task) -> None:
        """Finds out whether a reply that is like nothing may be made of the batches of its call.

        Of one that is like an argument that was found out before it was made. A step that says
        nothing of its reply may also train what stays with the client, by batches of another
        number, and reply with nothing; so this is of one that replied with something.

        Args:
            call: what was asked.
            client: the method's Client.
            config: the method's settings.
            task: with the client's data.

        Raises:
            RefusedError: they are others than the settings say, which are bounded.
        """
        if call.batches is not None and find_step(client, call.step)[1].bounded is None:
            self._check_plan(call.batches, config, len(task.train[call.client]))

    def check_held_out(self, examples: int, of: str) -> None:
        """Raises ``RefusedError`` for what would be told of so few validation or test examples."""
        self._check_number(examples, self.smallest_evaluation, of)

    def check_batches(self, plan: Batches, examples: int) -> None:
        """Raises ``RefusedError`` for batches of too few of so many examples, or too many."""
        self._check_number(min(plan.size, examples), self.smallest_batch, "a batch")
        self.check_read(plan.count * sum(plan.lengths(examples)))

    def check_read(self, examples: int) -> None:
        """Raises ``RefusedError`` for a step that reads so many: nobody else would be answered."""
        if examples > self.largest_training:
            raise RefusedError(
                f"a step must be on {self.largest_training} examples at most here, those that come "
                f"again too, came {examples}"
            )

    def _check_plan(self, plan: Batches, config: Any, examples: int) -> None:
        """Raises ``RefusedError`` for batches to train on that are not those of bounded settings.

        Passes are as many steps as there are batches in them, unless they have bounds themselves.
        """
        if not BATCHES & self.settings.keys():
            return
        if plan != config.batches:
            raise RefusedError(
                "what is trained for a reply must be trained on the batches that the settings say, "
                f"{config.batches}, which are bounded here, came {plan}"
            )
        counted = "local_steps" in self.settings and "local_epochs" not in self.settings
        if counted and config.local_epochs is not None:
            self._check_setting("local_steps", config.local_epochs * len(plan.lengths(examples)))

    def _check_setting(self, name: str, value: Any) -> None:
        least, most = self.settings[name]
        if not isinstance(value, int | float) or not least <= value <= most:
            raise RefusedError(f"{name} must be {least:g} to {most:g} here, came {value}")

    def _check_number(self, came: int, least: int, of: str) -> None:
        if came < least:
            raise RefusedError(f"{of} must be of {least} examples at least here, came {came}")


def guarded(client: type[Client], policy: Policy) -> type[Client]:
    """Returns the same clients, in whose own code a policy holds as well (:class:`_Guarded`)."""

    class Guarded(_Guarded, client):  # type: ignore[valid-type, misc]
        _policy = policy

    return Guarded


class _Guarded(Client):
    """What a policy changes in the clients of any method, which come behind it.

    They count nothing by a model that does not read its input. What such a model gets right is how
    many test examples have some label, and its loss, with probabilities chosen for it, tells all
    these numbers at once. And the batches that a step draws for itself, as many and as large as the
    run's settings say, are bounded as those that a message asks for.
    """

    _policy: Policy
    _outputs: list[Tensor] | None = None
    _examples_read = 0

    def __init__(self, *, batches: Iterable[Batch] | None, **options: Any) -> None:
        super().__init__(batches=_some(batches), **options)

    def _read(self, examples: int) -> None:
        """Raises ``RefusedError`` where a step goes through too many, with those before."""
        self._examples_read += examples
        self._policy.check_read(self._examples_read)

    @property
    def train(self) -> Split:
        """The examples to learn from, not without end."""
        return _Bounded(self._task, self._task.train[self.id], self._read, self.labelled)

    @property
    def val(self) -> Split:
        """The examples to choose with, as many as are counted at least."""
        split = super().val
        if len(split):
            self._policy.check_held_out(len(split), "a choice by validation data")
        return split

    def draw_batches(self, plan: Batches) -> Iterator[Batch]:
        """Draws training batches of this step's own that the policy allows."""
        self._policy.check_batches(plan, len(self.train))
        return super().draw_batches(plan)

    def again(self, batch: Batch, times: int) -> Iterator[Batch]:
        """Yields a batch as often as the policy allows."""
        self._read(times * len(batch.x))
        return super().again(batch, times)

    @step
    def evaluate(self, received: Tree) -> Tree:
        """Counts, by models of which each says different things of different examples."""
        self._evaluated: list[tuple[Model, list[Tensor]]] = []
        counts = super().evaluate(received)
        _check_reading(self._evaluated, self.classes)
        return counts

    def _count(self, model: Model, split: Split, absent: Tensor | None) -> Tree:
        self._outputs = _outputs_of(model, self._evaluated)
        counts = super()._count(model, split, absent)
        self._outputs = None
        return counts

    def predict(self, model: Tree, x: Tensor) -> Tensor:
        """Returns the outputs, which are kept while they are counted by."""
        output = super().predict(model, x)
        if self._outputs is not None:
            self._outputs.append(output.detach())
        return output


def _some(batches: Iterable[Batch] | None) -> Iterator[Batch]:
    """Yields batches, of which there must be some: what is trained on none was trained before.

    A step could so reply with what another, which replied with nothing, has trained on few.
    """
    batch = None
    for batch in batches or ():
        yield batch
    if batch is None:
        raise RefusedError("a step that trains must be asked for batches here, came none")


class _Bounded(Split):
    """Training examples, of which each batch that is read is told of."""

    def __init__(
        self, task: Task, index: Tensor, read: Callable[[int], None], labelled: bool
    ) -> None:
        super().__init__(task, index, labelled=labelled)
        self._read = read

    def batch(self, which: Tensor | slice = slice(None)) -> Batch:
        """Returns some examples, all of them by default."""
        batch = super().batch(which)
        self._read(len(batch.x))
        return batch


def _outputs_of(model: Model, evaluated: list[tuple[Model, list[Tensor]]]) -> list[Tensor]:
    """Returns where to note what a model says, apart from what those before it did.

    Of two that are counted by, each the same for all examples, the outputs differ.
    """
    if not evaluated or evaluated[-1][0] is not model:
        evaluated.append((model, []))
    return evaluated[-1][1]


def _check_reading(evaluated: Sequence[tuple[Model, list[Tensor]]], classes: int) -> None:
    """Raises ``RefusedError`` where one of some models does not read its input, by its outputs."""
    said = (torch.cat(outputs) for _, outputs in evaluated if outputs)
    if not all(_reads(output, classes) for output in said):
        raise RefusedError(
            "a model to evaluate must say different things of different examples, but this one "
            "says the same of all"
        )


def _reads(output: Tensor, classes: int) -> bool:
    """Returns whether outputs (N, ...) differ from example to example, in what they mean."""
    told = output.double().softmax(-1) if classes else output.double()
    told = told.flatten(1) if told.ndim > 1 else told[:, None]
    varies = (told.amax(dim=0) - told.amin(dim=0)).amax()
    return len(told) < 2 or bool(varies > READS_NOTHING)

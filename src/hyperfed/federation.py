"""The contract between a method and whoever runs it. Read this first.

A method is two halves that talk. Its :class:`Server` writes a round as straight-line code, its
:class:`Client` is a few functions marked :func:`step`, and ``clients.ask(step, ...)`` is the only
way across. Who runs the clients (a loop, one vectorised kernel, a thousand machines) is the
engine's business: methods know no engine, engines know no method.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import repeat
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn

from hyperfed import functional, metrics, training, trees
from hyperfed.errors import UserError
from hyperfed.privacy import Releases
from hyperfed.task import BASE, Outline, Split, Task
from hyperfed.training import Batch, Batches
from hyperfed.trees import Model, Tree, state

__all__ = [
    "BASE",
    "EVALUATION_BATCH",
    "PERSONAL",
    "AllLostError",
    "Client",
    "Cohort",
    "Each",
    "Method",
    "Outline",
    "Pending",
    "Server",
    "Split",
    "StepInfo",
    "average",
    "step",
]


PERSONAL = "for its owner"
"""Where a client's scratch has the model that its site is to keep for its owner."""


@dataclass(frozen=True)
class Each:
    """One slice per client: leaves (C, ...). A bare tree goes to every client alike.

    Attributes:
        tree: leaves (C, ...).
        entries: for each client the names of ``tree`` that it is sent; all where None. What is left
            out does not travel, so it counts no bytes.
    """

    tree: Tree
    entries: Sequence[Collection[str]] | None = None

    def slice(self, position: int) -> Tree:
        """Returns what the client at a position of the cohort is sent."""
        tree = trees.take(self.tree, position)
        return tree if self.entries is None else trees.partition(tree, self.entries[position])[0]


EVALUATION_BATCH = 512
"""Examples to one forward pass of an evaluation: large for speed, small for the cache."""

Bounded: TypeAlias = Literal["change", "reply"]
"""What ``privacy.clip`` bounds the length of: the change that a reply makes, or the reply."""

Reads: TypeAlias = float | Literal["val", "kept"]
"""Which of a client's examples a reply depends on (:func:`step`)."""

S = TypeVar("S", bound=Callable[..., Tree])


@overload
def step(function: S, /) -> S: ...


@overload
def step(
    *,
    like: str | None = None,
    deferrable: bool = False,
    private: bool = False,
    bounded: Bounded | None = None,
    reads: Reads = 1.0,
    draws_as: Callable[..., Tree] | None = None,
) -> Callable[[S], S]: ...


def step(
    function: S | None = None,
    /,
    *,
    like: str | None = None,
    deferrable: bool = False,
    private: bool = False,
    bounded: Bounded | None = None,
    reads: Reads = 1.0,
    draws_as: Callable[..., Tree] | None = None,
) -> S | Callable[[S], S]:
    """Marks a function of a :class:`Client` that the network may call. Takes and returns trees.

    What it takes stays as it is, since it may be the server's own: a step makes new tensors, or
    writes into ``trees.clone(...)``.

    Args:
        function: the function, where the decorator stands without brackets.
        like: the argument whose names, shapes and dtypes the reply must have. A reply that differs
            loses its client for the round.
        deferrable: the step may be posted (:meth:`Cohort.post`) and run later: it writes no memory.
        private: what it replies depends on data by :meth:`Client.release` alone, where the client's
            settings are private.
        bounded: what ``privacy.clip`` bounds: "change", that of the reply to the argument that it
            is like, which it is by default where there is one, or "reply", of a step that answers
            with a difference or with a vector of no large size. A step without it cannot be asked
            in private training (:mod:`hyperfed.engines.updates`), unless it replies with nothing.
        reads: which of a client's examples the reply depends on, for a site to count: a share of
            each batch, rounded up; "val", the validation examples where there are any; "kept", what
            an earlier step of the round left in ``scratch["x"]``; or 0 of a step that looks at no
            data at all, such as a draw, which private training leaves alone.
        draws_as: another step, whose batches and other draws this one has: it does the same, and
            replies with something else.

    Raises:
        ValueError: the function has no argument that is called as ``like`` says.
    """
    bounded = bounded or (None if like is None else "change")
    drawn = None if draws_as is None else draws_as.__name__

    def mark(function: S) -> S:
        name = function.__name__
        place = None if like is None else _place_of(like, name, [*signature(function).parameters])
        function.__dict__["step"] = StepInfo(
            name, like, deferrable, private, bounded, reads, drawn, place
        )
        return function

    return mark if function is None else mark(function)


def _place_of(like: str, step: str, arguments: Sequence[str]) -> int:
    """Returns which argument of a step, after the client itself, its reply is like."""
    sent = arguments[1:]
    if like not in sent:
        told = ", ".join(sent) or "of which there is none"
        raise ValueError(
            f"like must name what step {step} is sent, {told}, came {like!r}; name such an argument"
        )
    return sent.index(like)


@dataclass(frozen=True)
class StepInfo:
    """What :func:`step` noted of a function; ``place`` is where the argument ``like`` stands."""

    name: str
    like: str | None
    deferrable: bool
    private: bool
    bounded: Bounded | None = None
    reads: Reads = 1.0
    draws_as: str | None = None
    place: int | None = None


class Client:
    """One client during one call. A method's own Client adds steps to it.

    The engine builds a fresh one for each call and carries ``memory`` and ``scratch`` in and out,
    so a step that looks stateful is a function of tensors.

    Attributes:
        id: the client's number.
        round: the current round, from 0.
        config: the method's own settings.
        memory: a tree that survives rounds. Write new tensors to it, never into one that is there:
            a lost client keeps the old ones.
        scratch: a tree that survives the messages of one round; new tensors are written to it, too.
        module: this worker's own copy of the target; weights that are not frozen mean nothing.
        batches: the batches that the server asked for, to be gone through once: a step that begins
            again after the last, or was asked without, is told; it keeps them in a list, or has
            :meth:`draw_batches`.
        generator: for any other draw of this step, a function of (seed, client, round, step).
        labelled: whether its training and validation examples have labels for it.
        releases: what the client has let out with noise, and its way to let out more.
    """

    def __init__(
        self,
        *,
        id: int,
        round: int,
        task: Task,
        module: nn.Module,
        config: Any,
        batches: Iterable[Batch] | None,
        generator: torch.Generator,
        memory: Tree,
        scratch: Tree,
        networks: Mapping[str, nn.Module] | None = None,
        labelled: bool = True,
        releases: Releases | None = None,
    ) -> None:
        self.id, self.round, self.config = id, round, config
        self.batches: Iterable[Batch] = training.OnePass(batches)
        self.generator = generator
        self.memory, self.scratch, self.releases = memory, scratch, releases
        self.module, self._networks = module, networks or {}
        self.loss, self.classes = task.loss, task.classes
        self.labelled, self._task = labelled, task

    @staticmethod
    def networks(outline: Outline, config: Any) -> dict[str, nn.Module]:
        """Builds the networks that the method's clients run beside the target: none by default.

        A server may build its own from here too. Each worker gets copies (:meth:`network`), whose
        weights mean nothing: what a client computes with comes as a tree.
        """
        return {}

    def network(self, name: str) -> nn.Module:
        """Returns this worker's own copy of one of :meth:`networks`, for ``functional.apply``."""
        return self._networks[name]

    @property
    def novel(self) -> bool:
        """Whether this client never takes part in training."""
        return self.id in self._task.novel_ids

    @property
    def train(self) -> Split:
        """The examples to learn from."""
        return Split(self._task, self._task.train[self.id], labelled=self.labelled)

    @property
    def val(self) -> Split:
        """The examples to choose with."""
        return Split(self._task, self._task.val[self.id], labelled=self.labelled)

    @property
    def test(self) -> Split:
        """Raises ``PermissionError``: :meth:`evaluate` counts on the examples to report on."""
        raise PermissionError(
            "test data is for evaluation, which Client.evaluate does for every method; learn from "
            "train, and choose by val"
        )

    @cached_property
    def parameters(self) -> KeysView[str]:
        """Names of the target's trainable entries, in order; the rest of a model are buffers."""
        return trees.parameters_of(self.module).keys()

    @cached_property
    def buffers(self) -> KeysView[str]:
        """Names of the target's buffers (batch-norm statistics), none of a frozen part."""
        return trees.buffers_of(self.module).keys()

    @property
    def zero(self) -> float:
        """What stands for no output of a class: 0 of logits, -inf of log-probabilities.

        The latter are the outputs where the task's loss is ``F.nll_loss``.
        """
        return -torch.inf if self._of_log_probabilities else 0.0

    def blended(self, outputs: Tensor) -> Tensor:
        """Returns sums of several models' outputs (B, classes) as one model's outputs are.

        Of logits they are as they come; log-probabilities are made such again.
        """
        return outputs.log_softmax(dim=-1) if self._of_log_probabilities else outputs

    @property
    def _of_log_probabilities(self) -> bool:
        return self.loss is nn.functional.nll_loss

    @property
    def device(self) -> torch.device:
        """Where the client computes: its data, its models, and tensors that a step makes anew."""
        return self._task.x.device

    @property
    def size(self) -> str:
        """The name of the client's target size."""
        return self._task.size_of(self.id)

    @property
    def initial(self) -> Model:
        """The target's initial weights, the same for all clients of its size."""
        return self._task.initial(self.size)

    def draw_batches(self, plan: Batches) -> Iterator[Batch]:
        """Draws training batches of this step's own, beside those that the server asked for.

        They come from ``generator``, an order of the examples just before its first batch, so that
        a step may draw between them.
        """
        train = self.train
        lengths = plan.lengths(len(train))
        for _ in range(plan.count):
            order = torch.randperm(len(train), generator=self.generator)
            for rows in order[: sum(lengths)].split_with_sizes(lengths):
                yield train.batch(rows)

    def again(self, batch: Batch, times: int) -> Iterator[Batch]:
        """Yields a batch so many times, for a step that stays with it for a while."""
        return repeat(batch, times)

    def release(self, value: Tensor, sensitivity: float) -> Tensor:
        """Returns a value as it may leave the client: with noise, where its settings are private.

        They are a method's that has :class:`hyperfed.methods.parts.privacy.PrivacyConfig`. What was
        let out before is let out again, with the same noise, when the same is asked of the same
        data.

        Args:
            value: what was computed from the client's data.
            sensitivity: how far replacing one sample moves it, in Euclidean norm.

        Raises:
            UserError: the client's budget is spent.
        """
        mechanism = self.config.mechanism
        if mechanism is None:
            return value
        assert self.releases is not None, "who runs clients gives them a way to let out answers"
        budget = self.config.budget or mechanism.epsilon
        return self.releases.release(value, sensitivity, mechanism, budget)

    def recall(self, name: str, entries: Collection[str]) -> Model:
        """Returns the part of a model kept as ``memory[name]``; before that, the initial one.

        Args:
            name: where the client keeps it, such as "head".
            entries: names of the target's entries that make up that part.
        """
        kept: Model | None = self.memory.get(name)
        return trees.partition(self.initial, entries)[0] if kept is None else kept

    def measured(self, model: Model) -> Model:
        """Returns the target's buffers after a pass over the client's inputs; no label is read.

        Args:
            model: every parameter and buffer of the target.
        """
        inputs = (batch.x for batch in self.train.chunks(EVALUATION_BATCH))
        return functional.batch_statistics(self.module, model, inputs)

    def train_own(
        self,
        objective: training.Objective,
        model: Model,
        batches: Iterable[Batch],
        *,
        trainable: Collection[str],
        own: Collection[str],
        anew: Collection[str] = (),
        unclipped: Collection[str] = (),
    ) -> Model:
        """Returns a locally trained model, of which the client goes on with a part.

        Where the settings say ``keep_momentum``, what its optimiser remembers of that part, the
        momentum, is kept in memory: the client's rounds make up one run of its optimiser.

        Args:
            objective: as of :func:`hyperfed.training.fit`, like the others that are not told here.
            model: to start from.
            batches: one step each.
            trainable: names of the parameters that move.
            own: names of what the client keeps for its next round.
            anew: those of them that are not what it kept, but what it received: without momentum.
            unclipped: parameters that are not clipped.
        """
        keeps = bool(self.config.keep_momentum and own)
        kept = self.memory.get("momentum", {}) if keeps else {}
        trained, moments = training.fit(
            objective,
            model,
            batches,
            self.config.local,
            trainable=trainable,
            moments=trees.partition(kept, anew)[1],
            unclipped=unclipped,
        )
        if keeps:
            self.memory["momentum"], _ = trees.partition(moments, own)
        return trained

    @property
    def objective(self) -> training.Objective:
        """The task's loss of the target in training mode."""
        return training.supervised(self.module, self.loss)

    def personal_model(self, received: Tree) -> Model:
        """Returns the model this client uses, from what the server sent and its own memory."""
        return received

    def predict(self, model: Model, x: Tensor) -> Tensor:
        """Returns (B, classes) outputs of the client's personal model."""
        return functional.apply(self.module, model, x)

    def finetuned(self, model: Model) -> Model:
        """Returns the personal model, locally trained on the batches asked for, by the task's loss.

        A method whose personal model is not the target's weights has its own.
        """
        if not model.keys() >= self.parameters | self.buffers:
            raise UserError(
                "a personal model to fine-tune must be one network's weights, but this method's is "
                "not; set serve.finetune_steps=0, or choose another method"
            )
        settings = self.config.local
        return training.fit(
            self.objective, model, self.batches, settings, trainable=self.parameters
        ).model

    @step
    def finetune(self, received: Tree) -> Tree:
        """Holds the fine-tuned personal model, to be served in this round; replies with nothing."""
        self.scratch["held"] = self.finetuned(self.served_model(received))
        return {}

    @step(reads=0)
    def hold(self, model: Model) -> Tree:
        """Holds a model that the client was handed before, to be served in this round."""
        self.scratch["held"] = model
        return {}

    def served_model(self, received: Tree) -> Model:
        """Returns the personal model, or the one that is held: fine-tuned, or made before."""
        held: Model | None = self.scratch.get("held")
        return self.personal_model(received) if held is None else held

    @step
    def export(self, received: Tree) -> Tree:
        """Hands the personal model to its owner (``Run.model``)."""
        return self.served_model(received)

    @step
    def keep(self, received: Tree) -> Tree:
        """Leaves the personal model to the client's site, for its owner; replies with nothing.

        In one process nobody asks for it: there a run has every model itself.
        """
        self.scratch[PERSONAL] = self.export(received)
        return {}

    @step
    def evaluate(self, received: Tree) -> Tree:
        """Counts on validation and test data; no prediction leaves the client.

        A method's own ``personal_model`` and ``predict`` see neither test data nor, of a client
        without labels, those of other examples: they are called from here, and are no less a part
        of personalisation for that.

        Returns:
            {"val": counts, "test": counts} of scalars: ``count`` examples, ``correct`` (sum of
            scores), ``masked_correct`` (the same with the logits of classes absent from the
            client's training data at minus infinity), ``zeroed_correct`` (the same with them at
            :attr:`zero`, as PeFLL's authors count), both equal to ``correct`` where there are no
            labels to tell from, no classes or no output for each, ``loss`` (sum over examples).
            Beside them are those that the task's ``metrics`` need
            (:data:`hyperfed.metrics.KINDS`).
        """
        model = self.served_model(received)
        absent = self._absent_classes()
        held_out = {"val": self._task.val, "test": self._task.test}
        return {
            name: self._count(model, Split(self._task, index[self.id]), absent)
            for name, index in held_out.items()
        }

    def _absent_classes(self) -> Tensor | None:
        """(classes,) True where the client has no training example of the class."""
        if not self.classes or not self.labelled:
            return None
        labels = self._task.y[self._task.train[self.id]]
        return training.count_classes(labels, self.classes) == 0

    def _count(self, model: Model, split: Split, absent: Tensor | None) -> Tree:
        score, classes = self._task.score, self.classes
        totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        more = {
            kind: totals.new_zeros(metrics.shape(kind, classes, self._task.y.shape[1:]))
            for kind in metrics.kinds(self._task.metrics)
        }
        with torch.no_grad():
            for batch in split.chunks(EVALUATION_BATCH):
                output, y = self.predict(model, batch.x), batch.y
                correct = score(output, y).sum(dtype=torch.float64)
                masked = zeroed = correct
                if absent is not None and metrics.of_each_class(output, y, classes):
                    # A network may have more outputs than there are classes: nobody has those.
                    beyond = output.shape[-1] - len(absent)
                    mask = nn.functional.pad(absent, (0, beyond), value=True)
                    masked, zeroed = (
                        score(output.masked_fill(mask, value), y).sum(dtype=torch.float64)
                        for value in (-torch.inf, self.zero)
                    )
                loss = self.loss(output, y).double() * len(y)
                totals = totals + torch.stack([correct, masked, zeroed, loss])
                more = {
                    kind: counted + metrics.KINDS[kind](output, y, classes)
                    for kind, counted in more.items()
                }
        correct, masked, zeroed, loss = totals
        return {
            "count": torch.tensor(len(split)),
            "correct": correct,
            "masked_correct": masked,
            "zeroed_correct": zeroed,
            "loss": loss,
            **more,
        }


class Cohort(Protocol):
    """The clients of one round, as a server sees them. C is their number."""

    @property
    def ids(self) -> Tensor:
        """(C,) int64 client numbers."""

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client lost this round."""

    @property
    def novel(self) -> bool:
        """Whether these clients never took part in training."""

    @property
    def round(self) -> int:
        """The current round, from 0."""

    @property
    def sizes(self) -> Mapping[str, "Cohort"]:
        """The clients grouped by target size; a cohort is asked size by size."""

    @property
    def size(self) -> str:
        """The target size of all these clients, where they have one in common."""

    @property
    def known(self) -> "Cohort":
        """All clients that take part in training, to be asked beside these here.

        They are of every size, whatever the size of these here, and remember what they do; nothing
        that they write is kept.
        """

    def ask(
        self, step: Callable[..., Tree], *payload: Tree | Each, batches: Batches | None = None
    ) -> Tree:
        """Runs a step at every client and returns the replies stacked, leaves (C, ...).

        The slice of a lost client is zero, and so is its weight.

        Raises:
            AllLostError: no client is left to answer. The round is over and changes nothing, or,
                where those of other sizes are there, begins again with them, so a method changes
                its server's state only after its last ``ask``.
        """

    def mean(
        self, step: Callable[..., Tree], *payload: Tree, batches: Batches | None = None
    ) -> Tree:
        """Runs a step at every client and returns the mean of the replies, by training examples.

        What is only asked for so can be masked (:mod:`hyperfed.engines.masking`): then nobody
        sees a single reply. For that the step's mark says what the reply is like, of a difference
        ``@step(like=..., bounded="reply")``.

        Raises:
            AllLostError: as :meth:`ask`.
        """

    def post(
        self, step: Callable[..., Tree], *payload: Tree | Each, batches: Batches | None = None
    ) -> "Pending":
        """Asks every client a last thing, whose replies can wait: it travels with a later message.

        That is the next one to any client, in this round or after it, so it costs no exchange of
        its own. When it travels changes no result: the payload is copied, the step goes on from
        what its client was asked before in this round, writes no memory, and is the last that the
        client is asked in it. Who is lost by it stays in the round.

        Raises:
            ValueError: not in training, a step that is not marked ``deferrable``, or a client that
                was not asked before or was posted a step already.
        """


class Pending(Protocol):
    """What was posted to C clients. Reading it has it travel at once, where it still waits.

    It is no state: a server that goes on from a reply in a later round reads it in ``state()`` too.
    """

    @property
    def weight(self) -> Tensor:
        """(C,) float64 training examples; 0 for a client that did not answer."""

    def reply(self) -> Tree:
        """Returns the replies stacked, leaves (C, ...); {} where nobody answered.

        The slice of a client that did not answer is zero.
        """


def average(
    clients: Cohort, step: Callable[..., Tree], model: Tree, batches: Batches | None = None
) -> Tree:
    """Has clients train a model and averages what comes back (FedAvg, algorithm 1).

    Args:
        clients: of any target sizes.
        step: takes the model of its client's size and returns it trained; marked to be like it, or
            it cannot be masked. Differences are averaged by :meth:`Cohort.mean`, size by size.
        model: {size: model}.
        batches: what to train on.

    Returns:
        {size: mean over its clients, weighted by training examples}; a size without any stays.

    Raises:
        AllLostError: no client of some size is left to answer.
    """
    groups = clients.sizes.items()
    return model | {size: group.mean(step, model[size], batches=batches) for size, group in groups}


class AllLostError(Exception):
    """Every client of a round was lost: the round changes nothing and is reported."""


class Server:
    """The server half of a method. A method's own Server fills in the two functions below.

    Attributes that are modules, optimisers, tensors or trees of tensors are its state: they are
    what a checkpoint holds. Everything else must follow from ``outline`` and ``config``; a run
    warns of what changes in a round and is none of these. Modules and optimisers are made here, and
    keep their shapes; a tensor or a tree may first come in a round. What an optimiser moves it
    moves in place, so that it is given copies: ``trees.clone(outline.initial(size))``.
    """

    def __init__(self, outline: Outline, config: Any) -> None:
        self.outline, self.config = outline, config

    def round(self, clients: Cohort) -> None:
        """Trains for one round with the clients of a cohort."""
        raise NotImplementedError

    def personalize(self, clients: Cohort) -> Tree | Each:
        """Returns what to send so that each client has its own model, by the method's protocol.

        It serves known clients and, where ``clients.novel``, clients never seen. All clients of the
        cohort have one target size. The server's state must not change.
        """
        raise NotImplementedError

    rehearse: Callable[..., Tree | Each] | None = None
    """Of a method made for novel clients: serves known ones as if they were novel.

    Takes a cohort as :meth:`personalize` does, and stands in for it where the best round is chosen:
    the models that known clients use may have stopped to change. Its state may change by nothing
    but what :meth:`diagnostics` is to tell of it.
    """

    def descriptors_of(self, clients: Cohort) -> Tensor | None:
        """Returns (C, l), what the server makes models of clients of one size from.

        Such as learned embeddings, or what clients say of their data; None where a method has no
        such thing, if only of novel clients. It serves both as :meth:`personalize` does.
        """
        return None

    def privacy(self) -> dict[str, Any] | None:
        """Returns what the settings promise of a client's privacy, plain data with its "delta".

        None where there is none. What was spent is not the server's to say.
        """
        return None

    def diagnostics(self) -> Tree:
        """Returns what the method has learned that tells how it works; {} where there is nothing.

        Every evaluation records it, as numbers in ``metrics.jsonl``, so the tensors are small: such
        as who takes how much from whom. The server's state must not change.
        """
        return {}

    def state(self, *, optimizers: bool = True) -> Tree:
        """Returns references to all tensors of the server, for a checkpoint.

        Args:
            optimizers: with those of the optimisers, which only training needs.
        """
        return state.of(vars(self), optimizers=optimizers)

    def to(self, device: torch.device) -> Self:
        """Moves all tensors of a new server to a device, and returns it."""
        vars(self).update(state.moved(vars(self), device))
        return self

    def load(self, saved: Tree) -> None:
        """Puts back what :meth:`state` gave.

        Raises:
            ValueError: a part has another shape, or the name of a method.
        """
        if methods := [name for name in saved if callable(getattr(type(self), name, None))]:
            raise ValueError(f"a server's state must not be named as a method, came {methods[0]}")
        vars(self).update(state.loaded(vars(self), saved))


class Method(Protocol):
    """A file of ``methods/``: its settings, its published presets and its two halves."""

    Config: type
    PRESETS: Mapping[str, Mapping[str, Any]]
    Client: type[Client]
    Server: type[Server]

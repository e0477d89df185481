"""What a run measures: every client's own model, by its method's protocol, on that client's data.

Evaluation is a step of the client like any other. The server receives counts and sums, never a
prediction.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperfed import metrics, trees
from hyperfed import task as tasks
from hyperfed.data.own import Task, mean_squared_error, minus_squared_error
from hyperfed.engines import Engine, EngineCohort
from hyperfed.engines.replies import UNUSABLE
from hyperfed.errors import UserError, one_line
from hyperfed.federation import AllLostError, Client, Each, Server
from hyperfed.runs.measures import Number, finite
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import generator
from hyperfed.task import accuracy
from hyperfed.training import Batches
from hyperfed.trees import Tree
from hyperfed.trees.aggregation import Rule

CHUNK = 64
"""Clients whose models are made by one call: all of a small federation, a part of a large."""


Serve: TypeAlias = Callable[[EngineCohort], Tree | Each]
"""Returns what to send to clients so that each has its model: a server's ``personalize``."""


@dataclass(frozen=True)
class Counts:
    """What C clients found on one split; all float64 of shape (C,).

    Attributes:
        count: examples.
        correct: sum of the task's score.
        masked_correct: the same among the classes that a client's training data has.
        zeroed_correct: the same with the logits of all other classes at zero.
        loss: sum of the loss.
        missed: {client: why} of those that count nothing, since they gave no usable answer.
        more: {kind: (C, ...)} of the kinds of :data:`hyperfed.metrics.KINDS` that were asked for.
    """

    count: Tensor
    correct: Tensor
    masked_correct: Tensor
    zeroed_correct: Tensor
    loss: Tensor
    missed: Mapping[int, str] = field(default_factory=dict)
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Everything that was counted, (C, ...) each."""
        return {name: getattr(self, name) for name in SUMS} | dict(self.more)

    @classmethod
    def of(cls, sums: Mapping[str, Tensor], missed: Mapping[int, str]) -> "Counts":
        """Returns counts by the names of :attr:`by_name`."""
        usual = {name: sums[name] for name in SUMS}
        more = {name: counts for name, counts in sums.items() if name not in usual}
        return cls(**usual, missed=missed, more=more)


SUMS = ("count", "correct", "masked_correct", "zeroed_correct", "loss")
"""What a client counts on one split, by name."""


def evaluate(
    server: Server,
    engine: Engine,
    ids: Sequence[int],
    round: int,
    *,
    serve: Serve | None = None,
) -> dict[str, Counts]:
    """Evaluates clients on their validation and test examples.

    Args:
        server: makes the models; its state does not change.
        engine: runs the clients; what they remember does not change.
        ids: the clients, all known or all novel.
        round: on which the draws of a personalisation depend.
        serve: what makes the models; the server's ``personalize`` where not given.

    Returns:
        {"val": counts, "test": counts} in the order of ``ids``. Who did not answer, or whose
        counts are not finite or cannot be, counts nothing and is named in ``missed``.
    """
    serve = serve or server.personalize
    found: dict[str, list[tuple[Tensor, Tree]]] = {"val": [], "test": []}
    missed: dict[int, str] = {}
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        cohort = engine.cohort(chunk, round, training=False)
        for group in cohort.sizes.values():
            replies = _asked(group, engine.client, serve, engine.task)
            missed |= _impossible(replies, group, engine.task)
            for split, parts in found.items():
                parts.append((group.ids, replies[split]))
        missed |= cohort.state.lost
    ordered = {split: _in_order(parts, ids, missed) for split, parts in found.items()}
    return {split: Counts.of(sums, missed) for split, sums in ordered.items()}


def _asked(group: EngineCohort, client: type[Client], serve: Serve, task: tasks.Task) -> Tree:
    """Returns what clients of one size count; who is lost counts nothing."""
    clients, splits = len(group.ids), ("val", "test")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(SUMS, ())
    target = task.y.shape[1:]
    shapes |= {
        kind: metrics.shape(kind, task.classes, target) for kind in metrics.kinds(task.metrics)
    }
    nobody: Tree = {
        split: {
            name: torch.zeros(clients, *shape, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        for split in splits
    }
    counts = nobody
    with _losing(group):
        replies = trees.to(group.ask(client.evaluate, serve(group)), CPU)
        counts = {
            split: {
                name: replies[split][name].double().view(clients, *shape)
                for name, shape in shapes.items()
            }
            for split in splits
        }
    return counts


@contextmanager
def _losing(group: EngineCohort) -> Iterator[None]:
    """Ends where nobody is left; of clients at sites all are lost by what the server cannot use."""
    try:
        yield
    except AllLostError:
        pass
    except UserError:
        raise
    except UNUSABLE as error:
        if not group.state.remote:
            raise
        reason = one_line(f"the server cannot use a reply: {type(error).__name__}: {error}")
        group.state.lost |= dict.fromkeys(group.there, reason)


def serve_all(engine: Engine, ids: Sequence[int], round: int, serve: Serve) -> dict[int, str]:
    """Serves known clients; returns whom it could not, and why.

    Args:
        engine: runs the clients; what they remember does not change.
        ids: the clients.
        round: on which the draws of a personalisation depend.
        serve: what makes the models.
    """
    failed: dict[int, str] = {}
    for start in range(0, len(ids), CHUNK):
        cohort = engine.cohort(ids[start : start + CHUNK], round, training=False)
        for group in cohort.sizes.values():
            with _losing(group):
                serve(group)
        failed |= cohort.state.lost
    return failed


def keeping(serve: Serve, client: type[Client], kept: dict[int, str]) -> Serve:
    """Returns what serves clients as ``serve`` does, and has the site of each keep its model.

    Whose site does not is served all the same.

    Args:
        serve: what makes the models.
        client: the method's Client.
        kept: is told of each client that was served why its site has not kept its model, "" where
            it has.
    """

    def serving(clients: EngineCohort) -> Tree | Each:
        sent = serve(clients)
        clients.gather(client.keep, (sent,), late=True)
        kept.update(dict.fromkeys(clients.there, "") | dict(clients.state.late))
        return sent

    return serving


def _impossible(replies: Tree, group: EngineCohort, task: tasks.Task) -> dict[int, str]:
    """Returns whose counts cannot be those of its examples, {client: why}."""
    held_out = {"val": task.val, "test": task.test}
    found: dict[int, str] = {}
    for place, client in enumerate(group.ids.tolist()):
        if client in group.state.lost:
            continue
        for split, rows in held_out.items():
            sums = {name: of[place] for name, of in replies[split].items()}
            if (why := _why_not(sums, len(rows[client]), task)) is not None:
                found[client] = f"its counts on {split} examples cannot be: {why}"
    return found


def _why_not(counts: metrics.Counts, examples: int, task: tasks.Task) -> str | None:
    sums = {name: float(counts[name]) for name in SUMS}
    count = sums["count"]
    if count != examples:
        return f"count {count:g} of {examples}"
    lowest, highest = _RANGES.get(task.score, (-math.inf, math.inf))
    for name in ("correct", "masked_correct", "zeroed_correct"):
        if not lowest * count <= sums[name] <= highest * count if count else sums[name]:
            return f"{name} {sums[name]:g} of {count:g}"
    least = -_ROUNDING * count if task.loss in _AT_LEAST_ZERO else -math.inf
    if sums["loss"] < least or (not count and sums["loss"]):
        return f"loss {sums['loss']:g} of {count:g}"
    right = counts["correct"] if task.score is accuracy else None
    found = (metrics.why_not(kind, counts, right) for kind in metrics.kinds(task.metrics))
    return next(filter(None, found), None)


_RANGES: Mapping[Callable[..., Tensor], tuple[float, float]] = {
    accuracy: (0.0, 1.0),
    minus_squared_error: (-math.inf, 0.0),
}
"""Of each score that we know: the least and the most for an example."""

_AT_LEAST_ZERO = (F.cross_entropy, mean_squared_error)
_ROUNDING = 1e-6


def finetuned(serve: Serve, client: type[Client], batches: Batches) -> Serve:
    """Returns what serves clients as ``serve`` does and has each train its model on.

    Args:
        serve: what makes the models.
        client: the method's Client.
        batches: one step of :meth:`hyperfed.federation.Client.finetuned` each.
    """

    def tuned(clients: EngineCohort) -> Tree:
        clients.ask(client.finetune, serve(clients), batches=batches)
        return {}  # each holds its model

    return tuned


class NotOfOneClientError(Exception):
    """What a client is sent is not a model of its own: the same for all, or only a part of it."""


def exchanged(serve: Serve, places: int = 1) -> Serve:
    """Returns what serves each client with the model of one before it, of its size.

    Args:
        serve: what makes the models.
        places: how far before it.

    Who would have the model of a client that was lost meanwhile is lost, too. It raises
    ``NotOfOneClientError`` where what clients are sent is not a model of each, and ``AllLostError``
    where the one before a client would be itself, so that it counts nothing.
    """

    def others(clients: EngineCohort) -> Each:
        if places and len(clients.ids) == 1:
            raise AllLostError
        sent = serve(clients)
        if not isinstance(sent, Each) or sent.entries is not None:
            raise NotOfOneClientError
        ids, lost = clients.ids, clients.state.lost
        theirs = zip(ids.tolist(), ids.roll(places).tolist(), strict=True)
        lost |= {c: lost[other] for c, other in theirs if other in lost}
        return Each(trees.tree_map(lambda leaf: leaf.roll(places, dims=0), sent.tree))

    return others


def with_samples(task: Task, samples: int, seed: int) -> Task:
    """Returns a task whose novel clients have a few of their training examples.

    What they are validated and tested on stays. With the same seed, those of a smaller number are
    among those of a larger.

    Args:
        task: the data.
        samples: training examples of each novel client, at least 1.
        seed: of the draw.

    Raises:
        UserError: a novel client has fewer, or there is none.
    """
    if not task.novel:
        raise UserError(
            f"there must be novel clients to have {samples} samples, but there are none; leave "
            "samples out"
        )
    train = list(task.train)
    for client in task.novel_ids:
        own = train[client]
        if not 1 <= samples <= len(own):
            raise UserError(
                f"samples must be 1 to {len(own)}, all training examples of novel client {client}, "
                f"got {samples}"
            )
        order = torch.randperm(len(own), generator=generator(seed, "samples", client))
        train[client] = own[order[:samples]]
    return replace(task, train=train, fingerprint=f"{task.fingerprint}/{samples} samples")


def all_together(drawn: Sequence[Counts], ids: Sequence[int]) -> Counts:
    """Returns the sums of several evaluations of the same clients, as of one.

    Who is missed in one of them counts nothing in any.
    """
    missed = {client: why for counts in drawn for client, why in counts.missed.items()}
    there = torch.tensor([client not in missed for client in ids])
    each = [counts.by_name for counts in drawn]
    sums = {
        name: _of_those(there, torch.stack([of[name] for of in each]).sum(0)) for name in each[0]
    }
    return Counts.of(sums, missed)


def chosen_by(counts: Counts, ids: Sequence[int], best: str) -> Tree:
    """Returns what a round is compared with others by.

    Args:
        counts: of (C,) clients on validation data.
        ids: who they are.
        best: the number that counts, such as "accuracy".

    Returns:
        {"there": whether a client was evaluated, "count": its examples, "correct": the sum that
        ``best`` is a mean of}, all (C,).
    """
    there = torch.tensor([client not in counts.missed for client in ids])
    correct = getattr(counts, best.removesuffix("accuracy") + "correct")
    return {"there": there, "count": counts.count, "correct": correct}


def is_better(now: Tree, before: Tree, hostile: float | None = None) -> bool:
    """Returns whether a round is better than one before it.

    Both are those of :func:`chosen_by`. They are compared on the clients that were evaluated in
    both, so that no round looks better because somebody was away. Without validation data there is
    nothing to choose by, and the later one is taken.

    Args:
        now: a round.
        before: the other one.
        hostile: the share of clients that may say what they like of their scores, or of how many
            examples they have. So many of the least and of the greatest scores are left out, and
            the others count once each. None where scores count as often as there are examples.
    """
    if not now["there"].any() or not before["there"].any():
        return bool(now["there"].any())
    if _mean(before, before["there"], hostile) is None:
        return True
    both = now["there"] & before["there"]
    ours, theirs = (_mean(each, both, hostile) for each in (now, before))
    return ours is not None and theirs is not None and ours > theirs


def _mean(found: Tree, whose: Tensor, hostile: float | None) -> Number:
    held = whose & (found["count"] > 0)
    count, correct = (found[name][held].tolist() for name in ("count", "correct"))
    if hostile is None:  # of sums: shares that are weighted again would part ties by their rounding
        return finite(sum(correct) / sum(count)) if count else None
    scores = [c / n for c, n in zip(correct, count, strict=True)]
    cut = Rule(hostile=hostile).borne(len(scores))
    return fmean(sorted(scores)[cut : len(scores) - cut]) if scores else None


def _in_order(
    parts: Sequence[tuple[Tensor, Tree]], ids: Sequence[int], missed: Collection[int]
) -> dict[str, Tensor]:
    came = torch.cat([clients for clients, _ in parts]).tolist()
    place = {client: index for index, client in enumerate(came)}
    order = [place[client] for client in ids]
    there = torch.tensor([client not in missed for client in ids])
    joined = {name: torch.cat([sums[name] for _, sums in parts])[order] for name in parts[0][1]}
    return {name: _of_those(there, values) for name, values in joined.items()}


def _of_those(there: Tensor, values: Tensor) -> Tensor:
    """Returns (C, ...) values of the clients that are there, (C,), and zeros of the others."""
    return values.where(there.view(-1, *[1] * (values.ndim - 1)), torch.zeros_like(values))

"""What a run measures: every client's own model, by its method's protocol, on that client's data.

Evaluation is a step of the client like any other. The server receives counts and sums, never a
prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.data.own import Task
from hyperfed.engines import Engine
from hyperfed.engines.replies import NoAnswerError
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Client, Cohort, Each, Server
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import generator
from hyperfed.training import Batches
from hyperfed.trees import Tree

CHUNK = 64
"""Clients whose models are made by one call: all of a small federation, a part of a large."""


Serve: TypeAlias = Callable[[Cohort], Tree | Each]
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
    """

    count: Tensor
    correct: Tensor
    masked_correct: Tensor
    zeroed_correct: Tensor
    loss: Tensor


def evaluate(
    server: Server,
    engine: Engine,
    ids: Sequence[int],
    round: int,
    *,
    novel: bool = False,
    serve: Serve | None = None,
) -> dict[str, Counts]:
    """Evaluates clients on their validation and test examples.

    Args:
        server: makes the models; its state does not change.
        engine: runs the clients; what they remember does not change.
        ids: the clients, all known or all novel.
        round: on which the draws of a personalisation depend.
        novel: the clients have never been asked before: they start without memory.
        serve: what makes the models; the server's ``personalize`` where not given.

    Returns:
        {"val": counts, "test": counts} in the order of ``ids``. Who did not answer, or whose
        counts are not finite, counts nothing.

    Raises:
        AllLostError: nobody counts anything, and not because the models are of no use.
    """
    serve = serve or server.personalize
    found: dict[str, list[tuple[Tensor, Counts]]] = {"val": [], "test": []}
    nobody: AllLostError | None = None
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        cohort = engine.cohort(chunk, round, training=False, fresh=novel)
        for group in cohort.sizes.values():
            try:
                replies = trees.to(group.ask(engine.client.evaluate, serve(group)), CPU)
            except AllLostError as error:
                nobody = error
                replies = dict.fromkeys(found, _nothing(len(group.ids)))
            for split, counts in replies.items():
                found[split].append((group.ids, Counts(**counts)))
    if (
        nobody is not None
        and isinstance(nobody.__cause__, NoAnswerError)
        and not any(counts.count.any() for _, counts in found["test"])
    ):
        raise nobody
    return {split: _in_order(parts, ids) for split, parts in found.items()}


def finetuned(serve: Serve, client: type[Client], batches: Batches) -> Serve:
    """Returns what serves clients as ``serve`` does and has each train its model on.

    Args:
        serve: what makes the models.
        client: the method's Client.
        batches: one step of :meth:`hyperfed.federation.Client.finetuned` each.
    """

    def tuned(clients: Cohort) -> Tree:
        clients.ask(client.finetune, serve(clients), batches=batches)
        return {}  # each holds its model

    return tuned


class NotOfOneClientError(Exception):
    """What a client is sent is not a model of its own: the same for all, or only a part of it."""


def exchanged(serve: Serve) -> Serve:
    """Returns what serves each client with the model of the client before it, of its size.

    It raises ``NotOfOneClientError`` where what clients are sent is not a model of each.
    """

    def others(clients: Cohort) -> Each:
        sent = serve(clients)
        if not isinstance(sent, Each) or sent.entries is not None:
            raise NotOfOneClientError
        return Each(trees.tree_map(lambda leaf: leaf.roll(1, dims=0), sent.tree))

    return others


def _nothing(clients: int) -> Tree:
    return {field.name: torch.zeros(clients, dtype=torch.float64) for field in fields(Counts)}


def with_samples(task: Task, samples: int, seed: int) -> Task:
    """Returns a task whose novel clients have a few of their training examples.

    What they are validated and tested on stays. With the same seed, those of a smaller number are
    among those of a larger.

    Args:
        task: the data.
        samples: training examples of each novel client, at least 1.
        seed: of the draw.

    Raises:
        UserError: a novel client has fewer.
    """
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


def _in_order(parts: Sequence[tuple[Tensor, Counts]], ids: Sequence[int]) -> Counts:
    came = torch.cat([clients for clients, _ in parts]).tolist()
    place = {client: index for index, client in enumerate(came)}
    order = [place[client] for client in ids]
    return Counts(
        **{
            field.name: torch.cat([getattr(counts, field.name) for _, counts in parts])[order]
            for field in fields(Counts)
        }
    )

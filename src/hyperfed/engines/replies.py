"""What a server accepts of its clients: replies of the right structure, finite, like each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperfed import trees
from hyperfed.errors import one_line
from hyperfed.trees import Structure, Tree


class BadReplyError(Exception):
    """A client's reply is not what the step must return."""


class DivergedError(Exception):
    """What the client would remember is not finite. It keeps what it remembered before."""

    def __init__(self, said: str = "what it would remember is not finite") -> None:
        super().__init__(said)


class NoAnswerError(Exception):
    """The client did not answer."""


UNUSABLE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""What a server may raise that goes on from a reply which no honest client sends."""


VARIANCE = "running_var"
"""How batch-norm calls what must not be below zero."""

BATCHES = "num_batches_tracked"
"""How it calls its count of batches."""

STATISTICS = (VARIANCE, BATCHES)
"""What of batch-norm no examples bring below zero."""

MOST_BATCHES = 2**40
"""How many more a reply may count than what was sent: no client goes through as many."""

ROUNDING = 1e-6
"""How far below zero a difference may bring what is zero."""


@dataclass(frozen=True)
class Reply:
    """A reply that may still differ from those of the other clients."""

    tree: Tree
    structure: Structure


def check_tree(tree: object, *, does: str = "return") -> None:
    """Raises ``BadReplyError`` unless what a step ``does`` is a (nested) dict of tensors."""
    if not isinstance(tree, dict) or not all(
        isinstance(leaf, Tensor) for _, leaf in trees.leaves(tree)
    ):
        raise BadReplyError(f"a step must {does} a (nested) dict of tensors")


def checked(tree: Tree, like: Tree | None, device: torch.device) -> Reply | BadReplyError:
    """Returns a reply, or why it cannot be one.

    Args:
        tree: what came.
        like: what it must have the names, shapes and dtypes of, where the step promises that.
        device: where the server is.
    """
    try:
        check_tree(tree)
    except BadReplyError as error:
        return error
    structure = trees.structure(tree)
    if like is not None and structure != (promised := trees.structure(like)):
        return BadReplyError(difference(structure, promised))
    return Reply(trees.to(tree, device), structure)


def expected_structure(replies: Sequence[Reply]) -> Structure | None:
    """Returns the structure that most clients replied with."""
    counts = Counter(reply.structure for reply in replies)
    return counts.most_common(1)[0][0] if counts else None


def refusal(reply: Reply | Exception, expected: Structure | None, *, finite: bool) -> str | None:
    """Returns why a reply cannot be used, or None.

    Args:
        reply: what came.
        expected: the structure that it must have.
        finite: whether all its numbers are.
    """
    if isinstance(reply, NoAnswerError | BadReplyError | DivergedError):
        return one_line(str(reply))
    if isinstance(reply, Exception):
        return one_line(f"{type(reply).__name__}: {reply}")
    if expected is not None and reply.structure != expected:
        return difference(reply.structure, expected)
    return None if finite else "the reply is not finite"


def impossible(reply: Tree, sent: Sequence[Tree], start: Tree | None) -> str | None:
    """Says which statistic of batch-norm a reply has as no examples leave it, or None.

    With a variance below zero a model gives nothing but NaN, and with a count it may divide by 0.
    Counts that grow without bound become negative at the server, for all that comes after.

    Args:
        reply: a model, or how much less each number of it is than it was.
        sent: all that the client was sent.
        start: what the model was, where the reply is that difference.
    """
    base, most = dict(trees.leaves(start or {})), _most_batches(sent)
    for path, leaf in trees.leaves(reply):
        if not path.endswith(STATISTICS):
            continue
        value = leaf if start is None else base[path].to(leaf.device) - leaf
        if bool((value < -ROUNDING).any()):
            return f"{one_line(path, 100)} comes below zero, which no examples bring it to"
        if path.endswith(BATCHES) and bool((value > most).any()):
            return f"{one_line(path, 100)} counts more batches than a client can have had"
    return None


def _most_batches(sent: Sequence[Tree]) -> int:
    """Returns how many batches a reply may count, by the most that what was sent counts."""
    counts = (leaf for tree in sent for path, leaf in trees.leaves(tree) if path.endswith(BATCHES))
    return max((int(count.max()) for count in counts), default=0) + MOST_BATCHES


def difference(came: Structure, expected: Structure) -> str:
    """Says of the first few leaves in which a reply differs from what it should be how they do."""
    found, wanted = ({path: of for path, *of in each} for each in (came, expected))
    differing = sorted({path for path, *_ in set(came) ^ set(expected)})
    told = [
        f"{one_line(path, 100)} {_how(found.get(path), wanted.get(path))}" for path in differing[:3]
    ]
    return f"the reply's names, shapes or dtypes are wrong: {', '.join(told)}"


def _how(came: list[Any] | None, expected: list[Any] | None) -> str:
    """Says how the shape and dtype of a leaf differ; None is of one that is not there."""
    if came is None:
        return "is missing"
    if expected is None:
        return "must not be there"
    (shape, dtype), (wanted, kind) = came, expected
    return f"must be {kind} {wanted}, came {dtype} {shape}"

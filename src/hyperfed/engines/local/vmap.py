"""The engine that computes clients together, under one ``torch.func.vmap`` of a step.

It is for accelerators, and for many small clients. What can go together are calls of one step with
tensors of the same shapes and as many examples in each batch; all others go to the loop.

No step is written for this engine. One that asks who its client is or lets a tensor decide what
Python does raises here, and is the loop's: that costs speed, no results, and the log says so.
"""

import logging
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from hyperfed import trees
from hyperfed.engines.calls import (
    Answer,
    Call,
    batch_lengths,
    check_unwritten,
    draw,
    hash_of_settings,
    is_labelled,
    keys_of_draws,
    let_out,
    noise_of,
    perform,
    tensors_of,
)
from hyperfed.engines.local.draws import Draws, OwnError
from hyperfed.engines.local.graphs import Graphs
from hyperfed.engines.local.loop import LoopEngine, on_cores
from hyperfed.engines.replies import DivergedError
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.system.devices import CPU, is_out_of_memory
from hyperfed.system.randomness import generator
from hyperfed.task import Split, Task
from hyperfed.trees import Model, Structure, Tree

log = logging.getLogger(__name__)


class UnstackedError(Exception):
    """A step reads a split, named by ``args``, that was not known to be read."""


class Kind(NamedTuple):
    """What calls have in common that can be computed together, or that cannot."""

    step: str
    size: str
    held: tuple[Structure, ...]


class VmappedEngine(LoopEngine):
    """A :class:`LoopEngine` that computes clients together where it can.

    A group that raises is given to the loop, which finds out whose fault it is; nothing has been
    kept of it by then. If each of its clients answers there, it was nobody's: a warning says why,
    once for each step, and calls of this kind are the loop's from then on.

    Args:
        arguments: those of the loop engine.
        chunk: clients computed at once; None for as many as fit into memory, which is found out by
            trying all, then half of them, and so on.
        graphs: records the steps of groups that come up again
            (:mod:`hyperfed.engines.local.graphs`), and those of single clients too; None to launch
            each kernel as it comes.
        options: those of the loop engine. ``workers`` concerns what is left to the loop.
    """

    name = "vmap"

    def __init__(
        self,
        *arguments: Any,
        chunk: int | None = None,
        graphs: Graphs | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.chunk, self.graphs = chunk, graphs
        self._alone: set[Kind] = set()
        self._told: set[str] = set()  # steps of which the log has said that
        self._fits: dict[Kind, int] = {}  # clients at once, where all did not
        self._read: defaultdict[str, set[str]] = defaultdict(set)  # step -> splits it reads

    def answer(self, calls: Sequence[Call]) -> list[Tree | Exception]:
        """Runs calls, together those that can be."""
        # Each attempt that fails has found out more of what goes together; nothing of it is kept.
        while (attempt := self._attempt(calls)) is None:
            continue
        answers, failures = attempt
        rest = [place for place in range(len(calls)) if place not in answers]
        looped = super().answer([calls[place] for place in rest])
        replies: dict[int, Tree | Exception] = dict(zip(rest, looped, strict=True))
        for kind, group, why in failures:
            if not any(isinstance(replies[place], Exception) for place in group):
                self._alone.add(kind)
                self._tell(kind.step, why)
        finite = trees.finite([answer.memory for answer in answers.values()])
        for (place, answer), good in zip(answers.items(), finite, strict=True):
            if self.private is not None:
                replies[place] = self._let_out(calls[place], answer, good, self.private)
                continue
            self.memories.note(calls[place], answer)  # of who is lost nothing is kept
            replies[place] = answer.tree if good else DivergedError()
        return [replies[place] for place in range(len(calls))]

    def _let_out(
        self, call: Call, answer: Answer, good: bool, private: PrivateUpdates
    ) -> Tree | Exception:
        """Returns an answer as it may leave its client, and keeps what that remembers."""
        if not good:
            answer = replace(answer, memory=self.memories.of(call)[0])
        call = replace(call, released=self.released.get(call.client, {}))
        try:
            answer = let_out(
                call,
                answer,
                self.client,
                private,
                about=hash_of_settings(self.config, self.seed),
                data=self._hash_of_data,
                noise=noise_of(call, self.seed, secret=self._secret),
                secret=self._secret,
                limits=self._limits,
            )
        except Exception as error:  # concerns this client alone
            return error
        self.memories.note(call, answer)
        if answer.released:
            self.released[call.client] = answer.released
        return answer.tree

    def _tell(self, step: str, why: str) -> None:
        """Warns of a step that is the loop's, once."""
        if step not in self._told:
            self._told.add(step)
            log.warning(
                "step %s is computed client by client, not all at once, since %s; that costs speed,"
                " no results",
                step,
                why,
            )

    def _attempt(
        self, calls: Sequence[Call]
    ) -> tuple[dict[int, Answer], list[tuple[Kind, list[int], str]]] | None:
        """Computes what can go together.

        Returns:
            {place of the call: answer}, and the groups that raised, with the reason; None where the
            calls must be grouped otherwise.
        """
        answers: dict[int, Answer] = {}
        failures: list[tuple[Kind, list[int], str]] = []
        for kind, group in self._groups(calls):
            try:
                together = self._together(kind, [calls[place] for place in group])
            except UnstackedError as error:
                self._read[kind.step].add(*error.args)
                return None
            except Exception as error:
                if is_out_of_memory(error):
                    self._make_room(kind, len(group))
                    return None
                # The loop finds out what is wrong.
                failures.append((kind, group, _reason(error)))
                # A step that fails half-way may leave the networks in any state.
                self._own = threading.local()
            else:
                answers |= zip(group, together, strict=True)
        return answers, failures

    def _make_room(self, kind: Kind, clients: int) -> None:
        """Gives back what recordings hold or, if there are none, takes half as many clients."""
        if self.graphs is not None and self.graphs.clear():
            return
        self._fits[kind] = half = clients // 2
        if not half:
            self._alone.add(kind)
        log.info("step %s: memory for fewer than %d clients at once", kind.step, clients)

    def resources(self, clients: int) -> dict[str, Any]:
        """Returns the cores there are, those that compute a group, its most clients and graphs."""
        graphs = {} if self.graphs is None else {"graphs": self.graphs.counts()}
        return super().resources(1) | {"chunk": self.chunk, **graphs}

    def _groups(self, calls: Sequence[Call]) -> Iterator[tuple[Kind, list[int]]]:
        """Yields the places of calls to be computed together."""
        if self._stochastic:  # dropout draws from the one global generator, client after client
            return
        groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
        for place, call in enumerate(calls):
            held = (*call.payload, *self.memories.of(call))
            if all(isinstance(leaf, Tensor) for tree in held for _, leaf in trees.leaves(tree)):
                alike = tuple(trees.structure(tree) for tree in held)
                kind = Kind(call.step, self.task.size_of(call.client), alike)
                groups[kind, call.cohort, *self._lengths(call)].append(place)
        for (kind, *_), group in groups.items():
            if (len(group) > 1 or self.graphs) and kind not in self._alone:
                chunk = min(self.chunk or len(group), self._fits.get(kind, len(group)))
                for start in range(0, len(group), chunk):
                    yield kind, group[start : start + chunk]

    def _lengths(self, call: Call) -> tuple[object, ...]:
        """Returns what has to be equal for the rows of a call to be stacked with another's."""
        task, client, plan = self.task, call.client, call.batches
        examples = len(task.train[client])
        drawn = tuple(batch_lengths(plan, examples))
        read = (len(getattr(task, split)[client]) for split in sorted(self._read[call.step]))
        return plan, drawn, client in task.novel_ids, *read

    def _together(self, kind: Kind, calls: Sequence[Call]) -> list[Answer]:
        """Computes a group.

        Raises:
            UnstackedError: the step reads a split that it was not known to read.
            Exception: whatever the step raises, or ``vmap`` of it.
        """
        task, first = self.task, calls[0]
        labelled, novel = is_labelled(task, first.client), first.client in task.novel_ids
        module, networks = self._module(kind.size), self._networks_of_this_thread()
        lengths = batch_lengths(first.batches, len(task.train[first.client]))

        def one(own: Tree, place: Tensor) -> Tree:
            keys = (keys_of_draws(call, self.client) for call in calls)
            generators = [generator(self.seed, "client", *key) for key in keys]
            with Draws(generators, place) as draws:
                return of(own, round=first.round, generator=draws.generator)

        def together(stacked: Tree) -> Tree:
            answer: Tree = vmap(one)(stacked, torch.arange(len(calls)))
            return answer

        def of(own: Tree, *, round: int = _ANYONE, generator: torch.Generator = _ANYONE) -> Tree:
            payload = tuple(own["payload"].values())
            batches = own["batches"].split_with_sizes(lengths)
            answer = perform(
                replace(first, client=_ANYONE, round=round, payload=payload),
                task=_of_anyone(task, kind.size, novel, own["initial"], own["rows"]),
                client=self.client,
                config=self.config,
                module=module,
                networks=networks,
                memory=own["memory"],
                scratch=own["scratch"],
                batches=(Split(task, rows, labelled=labelled).batch() for rows in batches),
                generator=generator,
                labelled=labelled,
                releases=_ANYONE,  # each answers for itself, and not together
            )
            return {"reply": answer.tree, "memory": answer.memory, "scratch": answer.scratch}

        cores = on_cores(self._cores_of_one(1))
        with cores, self.arithmetic(), warnings.catch_warnings():
            # An operation without a rule is looped over: no harm here.
            warnings.filterwarnings("ignore", "There is a performance drop")
            stacked = self._stacked(kind, calls)
            handed = tensors_of(stacked["payload"], stacked["memory"], stacked["scratch"])
            before = trees.versions(handed)
            if self.graphs is None:
                answer = together(stacked)
            else:
                key = kind, *self._lengths(first), len(calls)
                # A recording is of any round, and draws nothing: its draws would be those of one.
                answer = self.graphs.run(key, stacked, together, vmap(of))
        check_unwritten(first.step, as_before=before == trees.versions(handed))
        # What is remembered must not keep the tensors of all clients alive.
        return [
            Answer(
                trees.detach(trees.take(answer["reply"], position)),
                trees.clone(trees.take(answer["memory"], position)),
                trees.clone(trees.take(answer["scratch"], position)),
                remembers=bool(answer["memory"]),
            )
            for position in range(len(calls))
        ]

    def _stacked(self, kind: Kind, calls: Sequence[Call]) -> Tree:
        """Returns what the clients of a group have of their own, leaves (C, ...)."""
        task, read = self.task, self._read[kind.step]
        memories, scratches = zip(*map(self.memories.of, calls), strict=True)
        rows = [{split: getattr(task, split)[call.client] for split in read} for call in calls]
        payload = map(_stack, zip(*(call.payload for call in calls), strict=True))
        return {
            "payload": {str(n): trees.to(tree, self.device) for n, tree in enumerate(payload)},
            "memory": _stack(memories),
            "scratch": _stack(scratches),
            "batches": torch.stack([draw(call, self.client, task, self.seed) for call in calls]),
            "rows": _stack(rows),
            # Also of each: an update in place must not write one client's into what is not.
            "initial": trees.repeat(task.initial(kind.size), len(calls)),
        }


def best_engine(device: torch.device) -> type[LoopEngine]:
    """Returns the engine that computes clients fastest on a device of this machine."""
    return LoopEngine if device == CPU else VmappedEngine


class _Anyone:
    """Stands for what each client, or each round, has of its own: of no use to a step."""

    def _refuse(self, *_: object) -> NoReturn:
        raise OwnError(_REASONS["_Anyone"])

    __eq__ = __hash__ = __bool__ = __repr__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what a library looks for, such as __array__, it may find absent
            raise AttributeError(name)
        self._refuse()


_ANYONE: Any = _Anyone()


class _Alike(list[Any]):
    """One entry for all clients of a group, whoever is asked for; none where it is not known."""

    def __init__(self, name: str, entry: Sequence[Any]) -> None:
        super().__init__(entry)
        self._name = name

    def __getitem__(self, client: Any) -> Any:
        for entry in self:
            return entry
        raise UnstackedError(self._name)


class _TaskOfAnyone(Task):
    @property
    def novel_ids(self) -> Any:
        return [_ANYONE] * self.novel  # which says of itself alone that it is there

    def initial(self, size: str) -> Model:
        weights: Any = self.models[size]  # all that a client reads of a network here
        return trees.clone(weights)


def _of_anyone(task: Task, size: str, novel: bool, initial: Tree, rows: Tree) -> Task:
    """Returns a task with one client, who may be any of a group."""
    parts: dict[str, Any] = {field.name: getattr(task, field.name) for field in fields(Task)}
    parts["sizes"] = _Alike("sizes", [size])
    for split in ("train", "val", "test"):
        parts[split] = _Alike(split, [rows[split]] if split in rows else [])
    return _TaskOfAnyone(**parts | {"models": {size: initial}, "novel": int(novel)})


_REASONS = {
    "_Anyone": "it asks who its client is",
    "data-dependent": "a tensor decides what Python does (if, and, or, not, in)",
    ".item()": "it makes a number of a tensor (int, float, item)",
    "random operation": "it draws from PyTorch's global generator, not from self.generator",
    "data pointer": "it takes a tensor out of PyTorch (tolist, numpy)",
    "dynamic shape": "the shape of a tensor depends on numbers in another",
    "inplace arithmetic": "it writes into a tensor that all clients share",
    "broadcast shape": "it writes into a tensor that all clients share",
    "only return Tensors": "it remembers what is no tensor",
}
"""A part of what PyTorch says of a step that is not for ``vmap`` -> the words of a user."""


def _reason(error: Exception) -> str:
    """Returns why a step cannot be computed together."""
    said = str(error)
    if isinstance(error, OwnError):
        return said
    known = [words for part, words in _REASONS.items() if part in said]
    return (known or [f"{type(error).__name__}: {said}".splitlines()[0]])[0]


def _stack(held: Sequence[Tree]) -> Tree:
    """Stacks trees of one structure; a tensor that all of them hold is not copied."""

    def stacked(first: Tensor, *others: Tensor) -> Tensor:
        if all(other is first for other in others):
            return first.expand(1 + len(others), *first.shape)
        return torch.stack([first, *others])

    return trees.tree_map(stacked, *held)

"""One step at one client: what is asked of it, as plain data that can travel, and its execution.

Whoever holds the client's data runs the call with :func:`execute`: a worker thread, an actor on
another machine, a site.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.data.examples import hash_of
from hyperfed.engines.replies import DivergedError, check_tree
from hyperfed.engines.updates import KEPT, PrivateUpdates, centre_of, is_covered, moved, offset
from hyperfed.federation import EVALUATION_BATCH, Client, StepInfo
from hyperfed.privacy import Noise, Releases, secret_noise, seeded_noise
from hyperfed.system.randomness import generator
from hyperfed.task import Split, Task
from hyperfed.training import Batches
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import dumps

LOOKED_AT = 10
"""Rounds in which what a step was handed is looked at by value, too. A run gives up after as many
in which nobody succeeded."""


@dataclass(frozen=True)
class Call:
    """What a server asks of one client.

    Attributes:
        cohort: number of the cohort, unique in its engine. Memory and scratch written for it are
            drafts: its next calls see them, others only if the cohort is committed.
        round: the round's number.
        client: the client's number.
        step: name of a step of the method's Client.
        payload: the step's arguments.
        batches: what to train on.
        turn: how often this client was asked this step before, in this cohort.
        released: what the client has let out with noise (:class:`hyperfed.privacy.Releases`). It is
            its holder's to say, and travels with no message to a site.
        masked: the reply is a part of a masked sum; of a client at a site the payload's last tree
            is what the others share with it.
    """

    cohort: int
    round: int
    client: int
    step: str
    payload: tuple[Tree, ...] = ()
    batches: Batches | None = None
    turn: int = 0
    released: Tree = field(default_factory=dict)
    masked: bool = False

    def question(self, sigma: float, *more: str | int) -> str:
        """Names what is asked, to be answered with so much noise.

        How often it was asked in this round is no part of it, so that it is answered alike.

        Args:
            sigma: the noise's standard deviation.
            more: what tells it from others beside that, such as of which data it is asked.
        """
        asked = {"step": self.step, "round": self.round, "sigma": sigma}
        payload = {str(place): tree for place, tree in enumerate(self.payload)}
        told = dumps(payload, asked | {"batches": repr(self.batches)})
        return "-".join([hashlib.blake2b(told, digest_size=16).hexdigest(), *map(str, more)])

    @property
    def keys(self) -> tuple[int, int, str, int]:
        """What faults are a function of, beside the seed."""
        return self.client, self.round, self.step, self.turn


@dataclass(frozen=True)
class Answer:
    """A client's reply, and what it remembers after it.

    Attributes:
        tree: the reply, which alone goes back to the server.
        memory: what is to survive rounds.
        scratch: what is to survive the messages of this round.
        released: what the client has let out by now, in rounds that come to nothing too.
        remembers: whether it has a memory, or would have one if what it wrote were finite, which
            where training is private nobody may be told.
    """

    tree: Tree
    memory: Tree
    scratch: Tree
    released: Tree = field(default_factory=dict)
    remembers: bool = False


def find_step(client: type[Client], name: str) -> tuple[Callable[..., Tree], StepInfo]:
    """Returns a step of a method's Client by its name, and what its mark says.

    Raises:
        TypeError: the class has no such step.
    """
    function = getattr(client, name, None)
    info = getattr(function, "step", None)
    if function is None or info is None:
        raise TypeError(
            f"what is asked must be a step of the method's {client.__qualname__}, came {name}; "
            "mark a function of that name there with @step"
        )
    return function, info


def name_of(step: Callable[..., Tree]) -> str:
    """Returns by which name a step is found, whether or not it is marked as one."""
    info = getattr(step, "step", None)
    return info.name if isinstance(info, StepInfo) else getattr(step, "__name__", repr(step))


def keys_of_draws(call: Call, client: type[Client]) -> tuple[int, int, str, int]:
    """Returns what the draws of a call to a method's Client are a function of, beside the seed."""
    _, info = find_step(client, call.step)
    return call.client, call.round, info.draws_as or info.name, call.turn


def execute(
    call: Call,
    *,
    task: Task,
    client: type[Client],
    config: Any,
    seed: int,
    module: nn.Module,
    networks: Mapping[str, nn.Module],
    memory: Tree,
    scratch: Tree,
    data: Callable[[int], str],
    secret: bool,
    limits: Sequence[tuple[float, float]],
    private: PrivateUpdates | None,
) -> Answer:
    """Runs a call in this process.

    Args:
        call: what is asked.
        task: holds at least the data of the call's client.
        client: the method's Client.
        config: the method's settings.
        seed: the run's seed.
        module: a copy of the target of the client's size that nobody else uses meanwhile.
        networks: copies of the method's other networks, likewise.
        memory: what the client remembers of earlier rounds; stays as it is.
        scratch: what it remembers of earlier messages of this round; stays as it is.
        data: returns a hash of a client's data (:func:`hash_of_data`).
        secret: noise is the operating system's, not the seed's.
        limits: (epsilon, delta) that hold for all that the client lets out.
        private: how answers are made private.

    Raises:
        BadReplyError: the reply, or what is remembered, is no tree of tensors.
        DivergedError: what the client wrote to its memory is not finite.
        UserError: what it may let out is spent.
        Exception: whatever the step raises.
    """
    labelled = is_labelled(task, call.client)
    lengths = batch_lengths(call.batches, len(task.train[call.client]))
    batches = draw(call, client, task, seed).split_with_sizes(lengths)

    noise = noise_of(call, seed, secret=secret)
    handed = tensors_of(*call.payload, memory, scratch)
    before = copied(handed, call.round)
    answer = perform(
        call,
        task=task,
        client=client,
        config=config,
        module=module,
        networks=networks,
        memory=memory,
        scratch=scratch,
        batches=(Split(task, rows, labelled=labelled).batch() for rows in batches),
        generator=generator(seed, "client", *keys_of_draws(call, client)),
        labelled=labelled,
        releases=Releases(
            call.released, lambda sigma: call.question(sigma, data(call.client)), noise, limits
        ),
    )
    check_unwritten(call.step, as_before=all(map(_is_as_before, handed, before)))
    written = {n: kept for n, kept in answer.memory.items() if not same(kept, memory.get(n))}
    check_tree(written, does="remember")
    # What it was sent may be the server's own tensors, which an optimiser moves in place.
    answer = replace(answer, memory=answer.memory | trees.clone(written))
    finite = all(trees.finite([written]))
    if private is None:
        if not finite:
            raise DivergedError
        return answer
    if not finite:  # that it diverged would tell of its data
        answer = replace(answer, memory=memory)
    about = hash_of_settings(config, seed)
    return let_out(
        call,
        answer,
        client,
        private,
        about=about,
        data=data,
        noise=noise,
        secret=secret,
        limits=limits,
    )


def noise_of(call: Call, seed: int, *, secret: bool) -> Callable[[str], Noise]:
    """Returns what draws the noise of a client's answer to a question.

    Args:
        call: what is asked.
        seed: the run's seed.
        secret: noise is the operating system's, not the seed's.
    """

    def noise(question: str) -> Noise:
        if secret:
            return secret_noise
        return seeded_noise(generator(seed, "noise", call.client, question))

    return noise


def let_out(
    call: Call,
    answer: Answer,
    client: type[Client],
    private: PrivateUpdates,
    *,
    about: str,
    data: Callable[[int], str],
    noise: Callable[[str], Noise],
    secret: bool,
    limits: Sequence[tuple[float, float]],
) -> Answer:
    """Returns an answer as it may leave its client in private training: bounded, and with noise.

    What a trusted server is told stays as it is: the bound and the noise are the server's.

    Args:
        call: what was asked.
        answer: what the step made of it.
        client: the method's Client.
        private: how answers are made private.
        about: a hash of what the step computes by (:func:`hash_of_settings`).
        data: returns a hash of a client's data (:func:`hash_of_data`).
        noise: of the question that is named.
        secret: noise does not follow from the name, which then matters only of what is kept.
        limits: (epsilon, delta) that hold for all that the client lets out.

    Raises:
        BadReplyError: the reply is not like what it is promised to be like.
        UserError: the reply is no update, or what the client may let out is spent.
    """
    _, info = find_step(client, call.step)
    if private.where == "central" or not answer.tree or not is_covered(info):
        return answer
    centre = centre_of(answer.tree, promised(info, call), info)
    told = offset(answer.tree, centre, private.clip)
    keep = told.numel() <= KEPT

    def question(sigma: float) -> str:
        # Asked again in its round, a step draws other batches: that is another question, whose
        # noise is its own. So is the same step of other data, of another method or at another rate.
        more = [about, data(call.client)] if keep or not secret else []
        return call.question(sigma, call.turn, *more)

    before = answer.released or call.released  # the step itself may have let something out
    releases = Releases(before, question, noise, limits)
    noisy = releases.release(
        told, private.sensitivity, private, private.epsilon, keep=keep, run=private.run
    )
    return replace(answer, tree=moved(centre, noisy), released=releases.kept)


def promised(info: StepInfo, call: Call) -> Tree | None:
    """Returns the argument that a step's reply must be like, if any.

    Raises:
        TypeError: it was not sent.
    """
    if info.place is None:
        return None
    if info.place >= len(call.payload):
        raise TypeError(
            f"step {info.name} must be sent {info.like}, which its reply is like, but was sent "
            f"{len(call.payload)} arguments; ask it with one more"
        )
    return call.payload[info.place]


def perform(
    call: Call, *, client: type[Client], memory: Tree, scratch: Tree, **options: Any
) -> Answer:
    """Runs a call whose draws are made; raises what :func:`execute` does.

    Args:
        call: what is asked.
        client: the method's Client.
        memory: what the client remembers of earlier rounds; stays as it is.
        scratch: what it remembers of earlier messages of this round; stays as it is.
        options: what else its Client is built of.
    """
    step, info = find_step(client, call.step)
    if call.batches is None:
        options["batches"] = None
    built = client(
        id=call.client,
        round=call.round,
        memory=_apart(memory),
        scratch=_apart(scratch),
        **options,
    )
    handed = tensors_of(*call.payload, memory, scratch)
    before = trees.versions(handed)
    reply = step(built, *call.payload)
    check_unwritten(call.step, as_before=before == trees.versions(handed))
    check_tree(reply)
    if info.deferrable and not same(built.memory, memory):
        raise PermissionError(
            f"a step marked @step(deferrable=True) must not write memory, but {call.step} did; "
            "write it in a step that is asked, or write scratch"
        )
    released = built.releases.kept if isinstance(built.releases, Releases) else {}
    remembers = bool(built.memory)
    return Answer(trees.detach(reply), built.memory, built.scratch, released, remembers)


def tensors_of(*held: Tree) -> list[Tensor]:
    """Returns all tensors of some trees; a scratch may hold other things, too."""
    every: Iterator[object] = (leaf for tree in held for _, leaf in trees.leaves(tree))
    return [leaf for leaf in every if isinstance(leaf, Tensor)]


def copied(tensors: Sequence[Tensor], round: int) -> list[Tensor]:
    """Returns copies of what a step is handed, to see writes by that no version counts.

    These are such as by ``x.data`` or ``x.numpy()``. It takes time, so that no more rounds are
    looked at than a run waits for some client to succeed.
    """
    return [tensor.detach().clone() for tensor in tensors] if round < LOOKED_AT else []


def _is_as_before(now: Tensor, before: Tensor) -> bool:
    """Returns whether two tensors have the same values, of which some may be no numbers."""
    return torch.equal(now, before) or torch.equal(now.nan_to_num(), before.nan_to_num())


def check_unwritten(step: str, *, as_before: bool) -> None:
    """Finds out whether what a step was handed is as it was.

    Raises:
        PermissionError: it has not.
    """
    if not as_before:
        raise PermissionError(
            "a step must not write in place into what it was sent or what its client keeps, in "
            f"memory or scratch, which others hold too, but {step} did; make new tensors, as by "
            "x = x + 1 for x += 1 (a network's buffers, too, when it is not training), or write "
            "into trees.clone(...)"
        )


def _apart(tree: Tree) -> Tree:
    """Returns a tree of the same tensors, of which all trees in it can be written to."""
    return {name: _apart(of) if isinstance(of, dict) else of for name, of in tree.items()}


def same(kept: object, before: object) -> bool:
    """Returns whether a tree, or a leaf of one, holds the very tensors that it held before."""
    if isinstance(kept, dict) and isinstance(before, dict):
        return kept.keys() == before.keys() and all(same(kept[key], before[key]) for key in kept)
    return kept is before


def is_labelled(task: Task, client: int) -> bool:
    """Returns whether a client's batches have labels."""
    return not (task.unlabelled and client in task.novel_ids)


def hash_of_data(task: Task, client: int) -> str:
    """Returns a hash of a client's training examples, in their order and as its steps see them.

    On the CPU, so that it is the same wherever the client computes.
    """
    labelled = is_labelled(task, client)
    told = []
    with torch.no_grad():
        for rows in torch.split(task.train[client], EVALUATION_BATCH):
            told.append(hash_of(task.transform(task.x[rows].cpu())))
            told += [hash_of(task.y[rows].cpu())] if labelled else []
    return hash_of(*told)


def hash_of_settings(config: Any, seed: int) -> str:
    """Returns a hash of a method's settings, and of the seed, from which batches are drawn."""
    return hash_of(type(config).__module__, repr(config), str(seed))


def draw(call: Call, client: type[Client], task: Task, seed: int) -> Tensor:
    """Returns the rows of the task's examples in all batches that a server asked for, in one."""
    plan, rows = call.batches, task.train[call.client]
    if plan is None or not plan.count:
        return rows[:0]
    source = generator(seed, "batches", *keys_of_draws(call, client))
    count = sum(plan.lengths(len(rows)))
    # Clones, since a part of an order keeps all of it in memory.
    orders = [
        torch.randperm(len(rows), generator=source)[:count].clone() for _ in range(plan.count)
    ]
    return rows[torch.cat(orders).to(rows.device)]


def batch_lengths(plan: Batches | None, examples: int) -> list[int]:
    """Returns the lengths of the batches that a client with so many examples draws."""
    return [] if plan is None else plan.lengths(examples) * plan.count

"""What was trained: it makes the model of any client, known or new, as a module of its own."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hyperfed import engines, privacy, trees
from hyperfed.data import tasks
from hyperfed.data.examples import hash_of
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.engines import Engine, EngineCohort
from hyperfed.engines.local.loop import LoopEngine, on_cores
from hyperfed.engines.made_up import made_up
from hyperfed.engines.replies import UNUSABLE
from hyperfed.engines.updates import PrivateUpdates
from hyperfed.errors import UserError, one_line
from hyperfed.federation import AllLostError, Server
from hyperfed.methods import METHODS
from hyperfed.nets.pretrained import save_adapter
from hyperfed.runs import examined, private
from hyperfed.runs.evaluation import Serve, finetuned
from hyperfed.runs.made_once import once
from hyperfed.runs.measures import names_beside
from hyperfed.runs.settings import RunConfig
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import derive, seeded
from hyperfed.training import Steps, UnlabelledError
from hyperfed.trees import Tree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The state at the best round by validation data: the one whose models are used.

    Attributes:
        round: its number.
        value: of the metric by which it was chosen; None without validation data.
        server: its tensors.
        memory: what clients remembered.
        val: what other rounds are compared with it by (:func:`hyperfed.runs.evaluation.chosen_by`).
    """

    round: int
    value: float | None
    server: Tree
    memory: dict[int, Tree]
    val: Tree


class TrainedMethod:
    """What was trained, and the models that it makes: those of the best validation round.

    Args:
        config: all settings.
        task: the data; built from the settings where not given.

    Attributes:
        config: all settings.
        task: data split over clients.
        round: rounds done.
    """

    def __init__(self, config: RunConfig, task: Task | None = None) -> None:
        self.config = config
        task = tasks.build(config.task, config.seed) if task is None else task
        measured = names_beside(config, task)
        self.task = task if task.metrics == measured else replace(task, metrics=measured)
        if config.method not in METHODS:
            raise UserError(
                f"method {config.method} must be known in every process, but is not in this one; a "
                "script adds it to hyperfed.methods.METHODS outside of `if __name__ == "
                '"__main__":`, and starts within'
            )
        self.method: ModuleType = METHODS[config.method]
        with self._telling_of_labels():
            self.private = private.plan(config, self.task, self.method)
        self.server = self._new_server()
        examined.check(config, self.task, self.server)
        with on_cores(config.engine.cores):
            self.engine = engines.build(
                config.engine,
                self.task,
                self.method.Client,
                config.settings,
                seed=config.seed,
                faults=config.faults,
                precision=config.precision,
                device=config.device,
                private=self.private,
                masking=config.privacy.sums(),
            )
        self.server.to(self.engine.device)
        self.round = 0
        self._best: Best | None = None
        self._bytes = {"down": 0, "up": 0}
        self._earlier, self._start = 0.0, monotonic()
        self._newcomers: dict[str, dict[int, Tree]] = {}
        self._accounting: Callable[[TrainedMethod], AbstractContextManager[object]] = nullcontext
        self._trained_on = (
            config.task
        )  # by which known clients have their data, however it is served
        self._unproven = False  # is of a checkpoint of which not all has been used yet
        if self.task.unlabelled and self.task.novel:
            self._check_unlabelled()

    @property
    def bytes(self) -> Mapping[str, int]:
        """What training has sent to clients, ``down``, and had from them, ``up``, so far."""
        return dict(self._bytes)

    @property
    def seconds(self) -> float:
        """Since the start, time before a resume included."""
        return self._earlier + monotonic() - self._start

    def close(self) -> None:
        """Gives back the engine's threads, actors and connections.

        What is in memory and on disk stays; nothing can be asked of clients any more.
        """
        self.engine.close()

    @property
    def best(self) -> Best:
        """The state at the best validation round so far.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        if self._best is None:
            raise UserError(
                "a run to use must have come to its first evaluation, but is at round "
                f"{self.round}; train or resume it or, where it is in training, wait for the "
                "checkpoint that comes after that"
            )
        return self._best

    def model(self, client: int | str) -> nn.Module:
        """Returns the personal model of a client as a module of its own, ready to use.

        It is the model at the best validation round. Where labels have names, the module's
        ``label_names`` has them in the order of its outputs.

        Args:
            client: its number, or its name.

        Raises:
            UserError: no such client, or it was lost, such as by training that diverged, or by this
                method a client has more to predict by than one network.
        """
        client = self.task.number_of(client)
        novel = client in self.task.novel_ids
        number = self.config.rounds if novel else self.best.round  # the draws of the evaluation
        with self._at_best() as server:
            cohort = self.engine.cohort([client], number, training=False)
            serve = self._once(server, self.engine) if novel else server.personalize
            return self._export(serve, cohort, self.task.size_of(client))

    def adapter(self, client: int, folder: str | Path) -> None:
        """Writes a client's model, where the target is one of ``peft``, as its adapter's folder.

        It holds ``adapter_model.safetensors`` and ``adapter_config.json``, which
        ``PeftModel.from_pretrained(backbone, folder)`` opens, without hyperfed.

        Raises:
            UserError: no such client, no such target, something beside the adapter is trained, or
                the folder is there already. Nothing is written then.
        """
        save_adapter(self.model(client), Path(folder))

    def diagnostics(self) -> Tree:
        """Returns what the server had learned at the best round that tells how its method works.

        These are the tensors of :meth:`hyperfed.federation.Server.diagnostics`, {} where a method
        has none; ``evaluations`` have them of every evaluation, on ``val``.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        with self._at_best() as server:
            return trees.clone(trees.to(server.diagnostics(), CPU))

    def personalize(self, x: Any, y: Any = None, *, size: str | None = None) -> nn.Module:
        """Returns the model of a client that was never seen, by the method's own protocol.

        Args:
            x: (m, ...) the client's examples, like the task's; or a ``DataFrame`` of them, like the
                one that the task was made of; or the path of what ``hyperfed personalize --data``
                takes: a file, or a folder of images.
            y: (m,) their labels, by name where they have names, or as a tensor of numbers, like
                ``task.y``; None for an unlabelled client, where the method can do without, and
                where a ``DataFrame`` or a file has them.
            size: which target to run, where the task has several.

        Raises:
            UserError: the data do not fit the task, the method needs labels, or as :meth:`model`.
        """
        task = tasks.newcomer(self.task, x, y, size=size)
        # Every newcomer is client 0 of its own task: its data tell its draws (of noise, say) apart.
        seed = derive(self.config.seed, "newcomer", task.fingerprint)
        # Its data are in this process, wherever those of the known clients are.
        with on_cores(self.config.engine.cores):
            engine = LoopEngine(
                task.on_features(),
                self.method.Client,
                self.config.settings,
                seed=seed,
                cores_per_client=self.config.engine.cores_per_client,
                home=self.engine,
                precision=self.config.precision,
                device=self.engine.device,
                private=self._private_to_newcomers,
            )
        if task.unlabelled:
            self._check_unlabelled()
        with closing(engine), self._at_best() as server:
            engine.released = self._newcomers.setdefault(_account_of(task), {})
            cohort = engine.cohort([0], self.config.rounds, training=False)
            return self._export(self._once(server, engine), cohort, task.size_of(0))

    def privacy(self) -> dict[str, Any] | None:
        """Returns what clients are promised, and what was spent of it until now.

        None where nothing is.
        """
        promised = self.server.privacy()
        by_client: dict[str, Any] = {}
        if self.private is not None:
            promised = private.promised(self.private)
            known = (self.engine.released.get(client, {}) for client in self.task.known)
            by_client["epsilon_of_clients"] = [
                privacy.spent([each], self.private.delta)["epsilon_spent"] for each in known
            ]
        if promised is None:
            return None
        everyone = [self.engine.released, *self._newcomers.values()]
        kept = [released for each in everyone for released in each.values()]
        noise = "drawn from the run's seed: a simulation, which protects nobody who knows it"
        if isinstance(self.task, RemoteTask):
            trusted = self.config.privacy.trusts_server
            where = "server, by its" if trusted else "sites, by their"
            noise = f"drawn at the {where} operating system{'' if trusted else 's'}"
        told = promised | privacy.spent(kept, promised["delta"]) | {"noise": noise}
        return told | by_client

    def _check_unlabelled(self) -> None:
        """Finds out whether the method can do without a novel client's labels.

        No client is asked: one with made-up examples stands for it.
        """
        if steps := self.config.serve.finetune_steps:
            raise UserError(
                "serve.finetune_steps must be 0 where a novel client has no labels, which "
                f"fine-tuning needs, came {steps}; set it to 0, or give labels"
            )
        try:
            with self._telling_of_labels():
                client = self._made_up_client(unlabelled=True)
                self._new_server().to(self.engine.device).personalize(client)
        except UserError:
            raise
        except Exception:  # a user's network need not take what is made up
            log.debug("made-up examples do not tell whether the method needs labels", exc_info=True)

    @contextmanager
    def _telling_of_labels(self) -> Iterator[None]:
        """Tells that a method needs labels which a novel client does not have."""
        try:
            yield
        except UnlabelledError as error:
            raise UserError(
                f"{self.config.method} needs labels to personalise, but a novel client has none; "
                "give them, or choose a method that can do without"
            ) from error

    @cached_property
    def _private_to_newcomers(self) -> PrivateUpdates | None:
        """How newcomers' answers are made private, who may answer more often than known clients.

        A run with novel clients has noise for that. One without did not train with noise for
        newcomers who may never come; theirs is what it would have been with them, as it is of those
        who come to sites.
        """
        if self.private is None or self.task.novel:
            return self.private
        return private.plan(self.config, made_up(self.task, novel=1), self.method)

    def _made_up_client(self, *, unlabelled: bool) -> EngineCohort:
        """Returns the cohort of a novel client with made-up examples."""
        task = replace(made_up(self.task, novel=max(1, self.task.novel)), unlabelled=unlabelled)
        seed, settings, device = self.config.seed, self.config.settings, self.engine.device
        engine = LoopEngine(task, self.method.Client, settings, seed=seed, device=device)
        return engine.cohort([task.novel_ids[0]], 0, training=False)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Computes by the run's rule, on its cores; what a checkpoint's first use raises is told.

        What clients remember has no form that anybody but their method knows, so that it cannot be
        looked at before. There are gradients, though whoever asks for a model may have them off.
        """
        by_rule = trees.aggregating(self.config.robust.rule)
        try:
            with on_cores(self.config.engine.cores), by_rule, torch.inference_mode(mode=False):
                yield
        except UserError:
            raise
        except UNUSABLE as error:
            if not self._unproven:
                raise
            raise unfit(error) from error

    @contextmanager
    def _at_best(self) -> Iterator[Server]:
        """Yields a new server as it was at the best validation round.

        Inside the block the clients remember what they did then.
        """
        best, device = self.best, self.engine.device
        with self._accounting(self), self._computing():
            server = self._new_server().to(device)
            server.load(trees.to(trees.clone(best.server), device))
            now, self.engine.memory = self.engine.memory, dict(best.memory)
            try:
                yield server
            finally:
                self.engine.memory = now

    def _new_server(self) -> Server:
        of = self.method.Server
        for name in ("round", "personalize"):
            if getattr(of, name) is getattr(Server, name):
                raise UserError(f"the Server of {self.config.method} must have a {name}; write it")
        with seeded(self.config.seed, "server"):
            server: Server = of(self.task.outline(), self.config.settings)
        return server

    def _export(self, serve: Serve, cohort: EngineCohort, size: str) -> nn.Module:
        """Returns the personal model of a cohort's only client."""
        try:
            model = cohort.ask(self.method.Client.export, self._finetuning(serve)(cohort))
        except AllLostError as error:
            raise UserError(
                f"a client must come to a model for it to be handed over, but {error}; serve it "
                "otherwise, such as with a smaller method.local_lr"
            ) from error
        module = trees.fill(copy.deepcopy(self.task.models[size]), trees.take(model, 0)).eval()
        if self.task.labels:
            vars(module)["label_names"] = tuple(self.task.labels)
        return module

    def _finetuning(self, serve: Serve) -> Serve:
        """Returns what serves clients as ``serve`` does, and fine-tunes if the settings say so."""
        steps = self.config.serve.finetune_steps
        if not steps:
            return serve
        return finetuned(serve, self.method.Client, Steps(steps, self.config.settings.batch_size))

    def _once(self, server: Server, engine: Engine) -> Serve:
        """Returns what serves clients who never trained, each with one model if answers cost."""
        if self.private is None or isinstance(engine.task, RemoteTask):
            return server.personalize
        task, settings = engine.task, repr(self.config.settings)
        made_from = (task.fingerprint, int(task.unlabelled), settings, self.best.round)
        # A newcomer's is that which is asked for.
        sizes = task.sizes if len(task.models) > 1 else ()
        key = f"{derive(self.config.seed, *made_from, *sizes):016x}"
        return once(server.personalize, self.method.Client, engine.released, key)


def here(config: RunConfig) -> RunConfig:
    """Returns settings by which to serve what may have been trained on another machine's device."""
    if config.has_device():
        return config
    log.warning("device=%s is not here, so clients are served on the CPU", config.device)
    return config.on("cpu")


def _account_of(newcomer: Task) -> str:
    """Returns what a newcomer's account is called by: its examples, in any order, of any labels.

    Nothing else says who it is where it does not come by a name.
    """
    return hash_of(*sorted(hash_of(example) for example in newcomer.x))


def unfit(error: Exception) -> UserError:
    """Returns what to raise where the use of a checkpoint raised something."""
    return UserError(
        "the checkpoint must be one that this run wrote, but does not fit "
        f"({one_line(f'{type(error).__name__}: {error}', 200)}); restore it from a copy, "
        "or start a new run"
    )

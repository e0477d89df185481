"""Serving: what was trained makes the model of a client, known or new, and is evaluated so."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from hyperfed import engines, privacy, trees
from hyperfed.data import tasks
from hyperfed.data.examples import hash_of
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.data.shift import LabelShift, label_shift
from hyperfed.engines import Engine, EngineCohort, EngineConfig
from hyperfed.engines.local.loop import LoopEngine, on_cores
from hyperfed.engines.made_up import made_up
from hyperfed.engines.replies import UNUSABLE
from hyperfed.errors import UserError, one_line
from hyperfed.federation import AllLostError, Server
from hyperfed.methods import METHODS
from hyperfed.nets.pretrained import save_adapter
from hyperfed.runs import config as configuration
from hyperfed.runs import examined, private, records
from hyperfed.runs.accounts import grow, keyed
from hyperfed.runs.evaluation import (
    Counts,
    NotOfOneClientError,
    Serve,
    all_together,
    evaluate,
    exchanged,
    finetuned,
    keeping,
    with_samples,
)
from hyperfed.runs.made_once import once
from hyperfed.runs.measures import beside, measure, names_beside
from hyperfed.runs.newcomers import Newcomer
from hyperfed.runs.records import Evaluation, Lost, Void
from hyperfed.runs.settings import RunConfig, one_step
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import derive, seeded
from hyperfed.training import Steps, UnlabelledError
from hyperfed.trees import Tree

log = logging.getLogger(__name__)

NOVEL = ("novel_alpha", "novel_corruption")
"""Settings of a task that decide what data novel clients have."""

SERVING = (
    *("method.", "serve.", "engine.", "metrics", "task.unlabelled"),
    *(f"task.{key}" for key in NOVEL),
)
"""How the keys begin that may change after training; ``method.*`` only where the state fits."""


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


class Served:
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
        self.method: ModuleType = METHODS[config.method]
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
        self._accounting: Callable[[Served], AbstractContextManager[object]] = nullcontext
        self._trained = config.task  # by which known clients have their data, however it is served
        self._unproven = False  # is of a checkpoint of which not all has been used yet
        if self.task.unlabelled and self.task.novel:
            self._check_unlabelled()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what serves clients: settings, data and the best round; it trains no more.

        What clients have let out goes with it, so that a copy knows what of the budget is spent.
        """
        held = ("_best", "round", "_bytes", "_newcomers", "_trained")
        state = {name: getattr(self, name) for name in held}
        return _from_pickle, (self.config, self.task, state, self.engine.released)

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
                f"{self.round}; train or resume it"
            )
        return self._best

    @cached_property
    def label_shift(self) -> LabelShift:
        """How far apart the labels of the clients are; an empty one where they are not here."""
        return label_shift(self.task)

    def model(self, client: int | str) -> nn.Module:
        """Returns the personal model of a client as a module of its own, ready to use.

        It is the model at the best validation round. Where labels have names, the module's
        ``label_names`` has them in the order of its outputs.

        Args:
            client: its number, or its name.

        Raises:
            UserError: no such client.
        """
        client = self.task.number_of(client)
        novel = client in self.task.novel_ids
        number = self.config.rounds if novel else self.best.round  # the draws of the evaluation
        with self._at_best() as server:
            cohort = self.engine.cohort([client], number, training=False, fresh=novel)
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

    def examined(self) -> Tree:
        """Returns what the settings ask to look into at the best round (``examine``).

        Returns:
            With ``descriptors`` these, (clients, l), known clients first, and the clients'
            ``proportions`` of classes in their training examples, (clients, classes); with
            ``crossed`` the metric of each known client on its test examples, (n, n), with what it
            keeps itself and what the server makes for the client of the column, fine-tuned where
            the settings say so, nan where it has no examples; without where what clients are sent
            is not a model of each.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        found: Tree = {}
        with self._at_best() as server:
            if "descriptors" in self.config.examine:
                rows = examined.descriptors_of_all(server, self.engine, self.best.round)
                found["descriptors"] = rows
                found["proportions"] = examined.proportions(self.task)
            if "crossed" in self.config.examine:
                with suppress(NotOfOneClientError):
                    found["crossed"] = self._crossed(server)
        return found

    def _crossed(self, server: Server) -> Tensor:
        """Returns (n, n): the metric of the row's client with the model made for the column's."""

        def moved(places: int) -> Serve:
            return self._finetuning(exchanged(server.personalize, places))

        return examined.crossed(server, self.engine, self.best.round, moved)

    def personalize(self, x: Any, y: Any = None, *, size: str | None = None) -> nn.Module:
        """Returns the model of a client that was never seen, by the method's own protocol.

        Args:
            x: (m, ...) the client's examples, like the task's; or a ``DataFrame`` of them, like the
                one that the task was made of.
            y: (m,) their labels, by name where they have names, or as a tensor of numbers, like
                ``task.y``; None for an unlabelled client, where the method can do without, and
                where a ``DataFrame`` has them.
            size: which target to run, where the task has several.

        Raises:
            UserError: the data do not fit the task, or the method needs labels.
        """
        task = tasks.newcomer(self.task, x, y, size=size)
        # Every newcomer is client 0 of its own task: its data tell its draws (of noise, say) apart.
        seed = derive(self.config.seed, "newcomer", task.fingerprint)
        # Its data are in this process, wherever those of the known clients are.
        engine = engines.build(
            replace(self.config.engine, name="loop"),
            task,
            self.method.Client,
            self.config.settings,
            seed=seed,
            home=self.engine,
            precision=self.config.precision,
            device=str(self.engine.device),
            private=self.private,
        )
        if task.unlabelled:
            self._check_unlabelled()
        with closing(engine), self._at_best() as server:
            engine.released = self._newcomers.setdefault(task.fingerprint, {})
            cohort = engine.cohort([0], self.config.rounds, training=False, fresh=True)
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
            central = self.private is not None and self.private.where == "central"
            where = "server, by its" if central else "sites, by their"
            noise = f"drawn at the {where} operating system{'' if central else 's'}"
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
            client = self._made_up_client(unlabelled=True)
            self._new_server().to(self.engine.device).personalize(client)
        except UnlabelledError as error:
            raise UserError(
                f"{self.config.method} needs labels to personalise, but a novel client has none; "
                "give them, or choose a method that can do without"
            ) from error

    def _made_up_client(self, *, unlabelled: bool) -> EngineCohort:
        """Returns the cohort of a novel client with made-up examples."""
        task = replace(made_up(self.task, novel=max(1, self.task.novel)), unlabelled=unlabelled)
        seed, settings, device = self.config.seed, self.config.settings, self.engine.device
        engine = LoopEngine(task, self.method.Client, settings, seed=seed, device=device)
        return engine.cohort([task.novel_ids[0]], 0, training=False, fresh=True)

    def served_otherwise(
        self, overrides: Sequence[str] = (), *, samples: int | None = None
    ) -> "Served":
        """Returns what was trained here, with other settings for serving its clients.

        What was trained is the same. So a novel client can be served without labels, from a few
        examples, by another protocol or with other noise, and without training again.

        Args:
            overrides: ``key=value`` for ``method.*``, ``serve.*``, ``engine.*``,
                ``task.unlabelled``, ``task.novel_alpha`` and ``task.novel_corruption``.
            samples: training examples that each novel client has; all of its own where None.

        Raises:
            UserError: another key, a setting that changes what was trained, too few examples,
                other data for a task that no settings made; or the run has not come to its first
                evaluation.
        """
        asked = [key for key in NOVEL if any(o.startswith(f"task.{key}") for o in overrides)]
        if asked and self.config.task.source == "python":
            raise UserError(
                f"task.{asked[0]} can change only where settings made the task, but this run "
                "was given one; give one with other novel clients (hyperfed.data)"
            )
        config = configuration.override(self.config, overrides, allowed=SERVING)
        task = self.task
        if any(getattr(config.task, key) != getattr(self.config.task, key) for key in NOVEL):
            task = tasks.build(self._trained, config.seed, served=config.task)
        elif config.task.unlabelled != self.config.task.unlabelled:
            task = replace(task, unlabelled=config.task.unlabelled)
        if samples is not None:
            task = with_samples(task, samples, config.seed)
        other = Served(config, task)
        ours, theirs = (each._new_server().state(optimizers=False) for each in (self, other))
        # Whether clients remember what they trained, and must.
        kept, needed = (
            getattr(each.config.settings, "keeps_models", False) for each in (self, other)
        )
        if trees.structure(ours) != trees.structure(theirs) or (needed and not kept):
            raise UserError(
                f"settings for serving must not change what was trained, but {', '.join(overrides)}"
                " does; start a new run with it"
            )
        self._lend(other)
        # They are the same clients, whatever they are served by.
        other.engine.released, other._newcomers = self.engine.released, self._newcomers
        other._accounting = self._accounting
        return other

    def _lend(self, other: "Served") -> None:
        """Has another serve clients with what was trained here."""
        other.round, other._best, other._bytes = self.round, self.best, dict(self._bytes)
        other._unproven, other._trained = self._unproven, self._trained

    def serve_newcomers(
        self, task: RemoteTask, ids: Sequence[int], config: EngineConfig
    ) -> list[Newcomer]:
        """Serves clients that came to sites when training was over, and has these keep the models.

        What was trained does not change, nor do its clients. What newcomers let out with noise is
        written as that of :meth:`personalize` is.

        Args:
            task: with newcomers after the clients of this one
                (:func:`hyperfed.data.roster.joined`), and the way to their sites.
            ids: who of them is served.
            config: how sites are asked.

        Raises:
            UserError: as of :meth:`check_newcomers`.
        """
        self.check_newcomers()
        other = Served(replace(self.config, engine=config), task)
        self._lend(other)
        released = other.engine.released
        with closing(other), self._accounting(other):
            try:
                counts, kept = other._serve_novel(ids)
            finally:
                for client in ids:
                    if client in released:
                        ours = self._newcomers.setdefault(hash_of(task.name_of(client)), {})
                        grow(ours, keyed({0: released[client]}))
        values = measure(task.metric, counts.by_name).client
        why = {c: kept.get(c, counts.missed.get(c, "it was not served")) for c in ids}
        return [
            Newcomer(
                task.name_of(client),
                "not kept" if why[client] else "kept",
                why[client],
                task.metric.name,
                value,
            )
            for client, value in zip(ids, values, strict=True)
        ]

    def check_newcomers(self) -> None:
        """Finds out whether newcomers can be served at their sites.

        Raises:
            UserError: the run's clients are not at sites, or its method asks known clients
                meanwhile, whose sites need not be there.
        """
        if not isinstance(self.task, RemoteTask):
            raise UserError(
                "a run whose newcomers are served at their sites must have been trained at sites, "
                f"but was by engine={self.config.engine.name}; use hyperfed personalize"
            )
        client = self._made_up_client(unlabelled=self.task.unlabelled)
        with self._at_best() as server, suppress(AllLostError):
            server.config = one_step(self.config.settings)  # how long it trains does not matter
            server.personalize(client)
        if client.state.known is not None:
            raise UserError(
                f"{self.config.method} must be served without others, but with these settings asks "
                "known clients while a newcomer is served, whose sites need not be there; train "
                "with other settings (such as method.novel_models=fit)"
            )

    def evaluate_novel(self, draws: int = 1) -> Evaluation:
        """Evaluates novel clients, by the method's own protocol, with the best round's server.

        Args:
            draws: how often they are served, at least once, each time with noise and batches of its
                own; the counts are those of all times together. Where answers are private, each
                time spends of the clients' budget (``method.budget``).

        Raises:
            UserError: there are none, the run has not come to its first evaluation, or the budget
                is not enough.
        """
        if draws < 1:
            raise UserError(f"draws must be at least 1, got {draws}; leave it out for one")
        if not self.task.novel:
            raise UserError(
                "there must be novel clients to evaluate; train with task.novel above 0"
            )
        return self._evaluate_novel(self.best.round, draws)

    def evaluate_best(self, draws: int = 1) -> dict[str, Evaluation]:
        """Evaluates the models of the best validation round; nothing is recorded.

        Args:
            draws: how often novel clients are served, as in :meth:`evaluate_novel`.

        Returns:
            {"val": record, "test": record} of the known clients, and "novel" where there are any.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        known, best = list(self.task.known), self.best.round
        with self._at_best() as server:
            serve = self._finetuning(server.personalize)
            counts = evaluate(server, self.engine, known, best, serve=serve)
        found = {split: self._summarise(split, known, counts[split], best) for split in counts}
        if self.task.novel:
            found["novel"] = self.evaluate_novel(draws)
        return found

    def _evaluate_novel(self, round: int, draws: int = 1) -> Evaluation:
        ids = list(self.task.novel_ids)
        counts, kept = self._serve_novel(ids, draws)
        self._tell_of_models("novel clients", len(ids), kept)
        return replace(
            self._summarise("novel", ids, counts, round),
            client_total_variation=self.label_shift.novel_total_variation,
            client_kl_divergence=self.label_shift.novel_kl_divergence,
        )

    def _serve_novel(self, ids: Sequence[int], draws: int = 1) -> tuple[Counts, Mapping[int, str]]:
        """Serves novel clients with the best round's server; their sites keep the models.

        Returns:
            What they count on test examples; and, of those at sites that were served, why a site
            has not kept the model, "" where it has.
        """
        kept: dict[int, str] = {}
        with self._at_best() as server:
            serve = self._finetuning(self._once(server, self.engine))
            if isinstance(self.task, RemoteTask):
                serve = keeping(serve, self.method.Client, kept)
            options: dict[str, Any] = {"novel": True, "serve": serve}
            drawn = [
                evaluate(server, self.engine, ids, self.config.rounds + draw, **options)["test"]
                for draw in range(draws)
            ]
        return all_together(drawn, ids), kept

    def _tell_of_models(self, whose: str, count: int, kept: Mapping[int, str]) -> None:
        """Says in the log where sites have not kept models, and why; "" is of those that have."""
        failed = {client: why for client, why in kept.items() if why}
        for client, why in list(failed.items())[:1]:
            log.warning(
                "sites keep the models of %d of %d %s; client %s: %s",
                *(count - len(failed), count, whose, self.task.name_of(client), why),
            )

    def _with_others(self) -> float | None:
        """Returns the metric of known clients on their own test data with each other's models.

        Each is sent the model of the client before it, of those whose models are made together; who
        is alone there, such as the only client of its size, does not count. None where that says
        nothing: clients keep part of their models or fine-tune them, there is one model for all, or
        nobody counts; and where clients are at sites, whose models are nobody else's business.
        """
        best, ids = self.best, list(self.task.known)
        kept = any(leaf.numel() for tree in best.memory.values() for _, leaf in trees.leaves(tree))
        at_sites = isinstance(self.task, RemoteTask)
        if kept or at_sites or self.config.serve.finetune_steps:
            return None
        with self._at_best() as server:
            try:
                serve = exchanged(server.personalize)
                counts = evaluate(server, self.engine, ids, best.round, serve=serve)["test"]
            except NotOfOneClientError:
                return None
        return measure(self.task.metric, counts.by_name).value

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Computes on the run's cores; what a checkpoint's first use raises is told of that.

        What clients remember has no form that anybody but their method knows, so that it cannot be
        looked at before.
        """
        try:
            with on_cores(self.config.engine.cores):
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
        server, device = self._new_server(), self.engine.device
        server.to(device).load(trees.to(trees.clone(self.best.server), device))
        now, self.engine.memory = self.engine.memory, dict(self.best.memory)
        try:
            with self._accounting(self), self._computing():
                yield server
        finally:
            self.engine.memory = now

    def _new_server(self) -> Server:
        with seeded(self.config.seed, "server"):
            server: Server = self.method.Server(self.task.outline(), self.config.settings)
        return server

    def _export(self, serve: Serve, cohort: EngineCohort, size: str) -> nn.Module:
        """Returns the personal model of a cohort's only client."""
        model = cohort.ask(self.method.Client.export, self._finetuning(serve)(cohort))
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
        key = f"{derive(self.config.seed, *made_from):016x}"
        return once(server.personalize, self.method.Client, engine.released, key)

    def _summarise(
        self,
        split: str,
        ids: list[int],
        counts: Counts,
        round: int,
        *,
        lost: tuple[Lost, ...] = (),
        void: tuple[Void, ...] = (),
    ) -> Evaluation:
        return records.summarise(
            round=round,
            split=split,
            clients=ids,
            count=[int(count) for count in counts.count],
            correct=counts.correct.tolist(),
            loss=counts.loss.tolist(),
            masked_correct=counts.masked_correct.tolist(),
            zeroed_correct=counts.zeroed_correct.tolist(),
            bytes_down=self._bytes["down"],
            bytes_up=self._bytes["up"],
            seconds=self.seconds,
            lost=lost,
            void=void,
            missed=[
                Lost(client, counts.missed[client]) for client in ids if client in counts.missed
            ],
            metric=self.task.metric,
            others=beside(self.task),
            counts=counts.by_name,
        )


def _from_pickle(
    config: RunConfig, task: Task, state: dict[str, Any], released: dict[int, Tree]
) -> Served:
    served = Served(here(config), task)
    vars(served).update(state)
    served.engine.released = released
    return served


def here(config: RunConfig) -> RunConfig:
    """Returns settings by which to serve what may have been trained on another machine's device."""
    if config.has_device():
        return config
    log.warning("device=%s is not here, so clients are served on the CPU", config.device)
    return config.on("cpu")


def unfit(error: Exception) -> UserError:
    """Returns what to raise where the use of a checkpoint raised something."""
    return UserError(
        "the checkpoint must be one that this run wrote, but does not fit "
        f"({one_line(f'{type(error).__name__}: {error}', 200)}); restore it from a copy, "
        "or start a new run"
    )

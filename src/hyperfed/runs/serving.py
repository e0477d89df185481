"""Serving: clients are served where they are with what was trained, and evaluated so."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from typing import Any

from torch import Tensor

from hyperfed import trees
from hyperfed.data import tasks
from hyperfed.data.examples import hash_of
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask
from hyperfed.data.shift import LabelShift, label_shift
from hyperfed.engines import EngineConfig
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Server
from hyperfed.runs import config as configuration
from hyperfed.runs import examined, records
from hyperfed.runs.accounts import grow, keyed
from hyperfed.runs.evaluation import (
    Counts,
    NotOfOneClientError,
    Serve,
    all_together,
    evaluate,
    exchanged,
    keeping,
    with_samples,
)
from hyperfed.runs.measures import beside, measure
from hyperfed.runs.newcomers import Newcomer
from hyperfed.runs.records import Evaluation, Lost, Void
from hyperfed.runs.settings import RunConfig, one_step
from hyperfed.runs.trained import TrainedMethod, here
from hyperfed.trees import Tree

log = logging.getLogger(__name__)

NOVEL = ("novel_alpha", "novel_corruption")
"""Settings of a task that decide what data novel clients have."""

SERVING = (
    *("method.", "serve.", "engine.", "metrics", "task.unlabelled"),
    *(f"task.{key}" for key in NOVEL),
)
"""How the keys begin that may change after training; ``method.*`` only where the state fits."""


class Served(TrainedMethod):
    """What was trained, serving the clients of its task: how well, by which settings, and where."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what serves clients: settings, data and the best round; it trains no more.

        What clients have let out goes with it, so that a copy knows what of the budget is spent.
        """
        held = ("_best", "round", "_bytes", "_newcomers", "_trained_on", "_unproven")
        state = {name: getattr(self, name) for name in held} | {"_earlier": self.seconds}
        return _from_pickle, (self.config, self.task, state, self.engine.released)

    @cached_property
    def label_shift(self) -> LabelShift:
        """How far apart the labels of the clients are; an empty one where they are not here."""
        return label_shift(self.task)

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
        self._check_draws(draws)
        if not self.task.novel:
            raise UserError(
                "there must be novel clients to evaluate; train with task.novel above 0"
            )
        return self._evaluate_novel(self.best.round, draws)

    def _check_draws(self, draws: Any) -> None:
        if isinstance(draws, bool) or not isinstance(draws, Integral) or int(draws) < 1:
            raise UserError(
                f"draws must be a whole number, at least 1, got {draws!r}; leave it out for one"
            )
        if int(draws) > 1 and not self.task.novel:
            raise UserError(
                f"there must be novel clients to serve {draws} times, but there are none; leave "
                "draws out"
            )

    def evaluate_best(self, draws: int = 1) -> dict[str, Evaluation]:
        """Evaluates the models of the best validation round; nothing is recorded.

        Args:
            draws: how often novel clients are served, as in :meth:`evaluate_novel`.

        Returns:
            {"val": record, "test": record} of the known clients, and "novel" where there are any.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        self._check_draws(draws)
        known, best = list(self.task.known), self.best.round
        with self._at_best() as server:
            serve = self._finetuning(server.personalize)
            counts = evaluate(server, self.engine, known, best, serve=serve)
        found = {split: self._summarise(split, known, counts[split], best) for split in counts}
        if self.task.novel:
            found["novel"] = self.evaluate_novel(draws)
        return found

    def examined(self) -> Tree:
        """Returns what the settings ask to look into at the best round (``examine``).

        Returns:
            With ``descriptors`` these, (clients, l), known clients first, or of them alone where
            novel ones have none, and the same clients' ``proportions`` of classes in their training
            examples, (clients, classes); with ``crossed`` the metric of each known client on its
            test examples, (n, n), with what it keeps itself and what the server makes for the
            client of the column, fine-tuned where the settings say so, nan where it has no
            examples; without where what clients are sent is not a model of each.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        found: Tree = {}
        with self._at_best() as server:
            if "descriptors" in self.config.examine:
                rows = examined.descriptors_of_all(server, self.engine, self.best.round)
                found["descriptors"] = rows
                found["proportions"] = examined.proportions(self.task)[: len(rows)]
            if "crossed" in self.config.examine:
                with suppress(NotOfOneClientError):
                    found["crossed"] = self._crossed(server)
        return found

    def served_otherwise(
        self, overrides: Sequence[str] = (), *, samples: int | None = None
    ) -> "Served":
        """Returns what was trained here, with other settings for serving its clients.

        What was trained is the same. So a novel client can be served without labels, from a few
        examples, by another protocol or with other noise, and without training again.

        Args:
            overrides: ``key=value`` for ``method.*``, ``serve.*``, ``engine.*``, ``metrics``,
                ``task.unlabelled``, ``task.novel_alpha`` and ``task.novel_corruption``.
            samples: training examples that each novel client has; all of its own where None.

        Raises:
            UserError: another key, a setting that changes what was trained, too few examples,
                other data for a task that no settings made; or the run has not come to its first
                evaluation.
        """
        overrides = [overrides] if isinstance(overrides, str) else overrides
        asked = [key for key in NOVEL if any(o.startswith(f"task.{key}") for o in overrides)]
        if asked and self.config.task.source == "python":
            raise UserError(
                f"task.{asked[0]} can change only where settings made the task, but this run "
                "was given one; give one with other novel clients (hyperfed.data)"
            )
        config = configuration.override(self.config, overrides, allowed=SERVING)
        task = self.task
        if any(getattr(config.task, key) != getattr(self.config.task, key) for key in NOVEL):
            task = tasks.build(self._trained_on, config.seed, served=config.task)
        elif config.task.unlabelled != self.config.task.unlabelled:
            task = replace(task, unlabelled=config.task.unlabelled)
        if samples is not None:
            task = with_samples(task, samples, config.seed)
        other = Served(config, task)
        servers = (self._new_server(), other._new_server())
        if [server.privacy() is not None for server in servers] == [True, False]:
            raise UserError(
                "clients that answer with noise must be served so, got method.epsilon=none; name "
                "one, or train a run without"
            )
        ours, theirs = (server.state(optimizers=False) for server in servers)
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
        why = {**counts.missed, **kept}  # who was served and is lost afterwards has its model
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
            numbers = range(self.config.rounds, self.config.rounds + draws)
            drawn = [
                evaluate(server, self.engine, ids, each, serve=serve)["test"] for each in numbers
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
        nobody counts; and where models are nobody else's business: those of clients at sites, or
        those that a trusted server makes of what a client answered without noise.
        """
        best, ids = self.best, list(self.task.known)
        kept = any(leaf.numel() for tree in best.memory.values() for _, leaf in trees.leaves(tree))
        private = isinstance(self.task, RemoteTask) or self.config.privacy.trusts_server
        if kept or private or self.config.serve.finetune_steps:
            return None
        with self._at_best() as server:
            try:
                serve = exchanged(server.personalize)
                counts = evaluate(server, self.engine, ids, best.round, serve=serve)["test"]
            except NotOfOneClientError:
                return None
        return measure(self.task.metric, counts.by_name).value

    def _crossed(self, server: Server) -> Tensor:
        """Returns (n, n): the metric of the row's client with the model made for the column's."""

        def moved(places: int) -> Serve:
            return self._finetuning(exchanged(server.personalize, places))

        return examined.crossed(server, self.engine, self.best.round, moved)

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

    def _lend(self, other: "Served") -> None:
        """Has another serve clients with what was trained here."""
        other.round, other._best, other._bytes = self.round, self.best, dict(self._bytes)
        other._unproven, other._trained_on = self._unproven, self._trained_on
        other._earlier, other._start = self._earlier, self._start


def _from_pickle(
    config: RunConfig, task: Task, state: dict[str, Any], released: dict[int, Tree]
) -> Served:
    served = Served(here(config), task)
    vars(served).update(state)
    served.engine.released = released
    return served

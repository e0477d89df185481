"""A run: trains round by round, evaluates, checkpoints, resumes, and afterwards hands out models.

The loop is the same on every engine. What a run is when it has been killed and resumed does not
differ from what it would have been: all its state is in one file, written whole or not at all.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hyperfed import engines, trees
from hyperfed.data import tasks
from hyperfed.data.own import Task
from hyperfed.data.roster import Roster
from hyperfed.engines import Engine, EngineCohort, Exchange
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError, Server
from hyperfed.methods import METHODS
from hyperfed.runs import config as configuration
from hyperfed.runs import records
from hyperfed.runs.config import RunConfig
from hyperfed.runs.evaluation import Counts, evaluate, with_samples
from hyperfed.runs.records import Evaluation, Lost, RunFolder
from hyperfed.system.devices import CPU
from hyperfed.system.randomness import derive, generator, seeded
from hyperfed.training import UnlabelledError
from hyperfed.trees import Tree

SERVING = ("method.", "engine.", "task.unlabelled", "task.novel_corruption")
"""How the keys begin that may change after training; ``method.*`` only where the state fits."""

PATIENCE = 10
"""Rounds in a row whose clients all failed by their own errors before the run gives up."""


@dataclass(frozen=True)
class Best:
    """The state at the round with the best validation accuracy: the one whose models are used."""

    round: int
    accuracy: float | None
    server: Tree
    memory: dict[int, Tree]


@dataclass(frozen=True)
class Progress:
    """What a run has to say after a round; ``evaluation`` {split: record} where it evaluated."""

    round: int
    rounds: int
    lost: tuple[Lost, ...]
    evaluation: Mapping[str, Evaluation]


class Run:
    """Trains one method on one task.

    Args:
        config: all settings.
        task: the data; built from the settings where not given.
        folder: where the records go; None keeps them in memory only.

    Attributes:
        config: all settings.
        task: data split over clients.
        folder: where the records go.
        round: rounds done.
        evaluations: every evaluation so far.
        summary: the final numbers, {} before the run is done.
    """

    def __init__(
        self, config: RunConfig, task: Task | None = None, folder: RunFolder | None = None
    ) -> None:
        self.config, self.folder = config, folder
        self.task = tasks.build(config.task, config.seed) if task is None else task
        self._built = task is None
        self.method: ModuleType = METHODS[config.method]
        self.server = self._new_server()
        self.engine = engines.build(
            config.engine,
            self.task,
            self.method.Client,
            config.settings,
            seed=config.seed,
            faults=config.faults,
            precision=config.precision,
            device=config.device,
        )
        self.server.to(self.engine.device)
        self.round = 0
        self.evaluations: list[Evaluation] = []
        self.summary: dict[str, Any] = {}
        self._best: Best | None = None
        self._bytes = {"down": 0, "up": 0}
        self._lost: list[Lost] = []
        self._news: list[Lost] = []  # of those, what no progress has said yet
        # Not counted yet: what is posted may travel, and lose clients, after its round.
        self._exchanges: list[Exchange] = []
        self._late: list[tuple[int, str]] = []
        self._failures = 0
        self._earlier, self._start = 0.0, monotonic()
        self._stop = False
        self._commit = records.commit()  # of the code that runs, whatever is checked out later
        if self.task.unlabelled and self.task.novel:
            self._serve_unlabelled(self.engine, self.server, self.task.novel_ids[0])

    @classmethod
    def start(
        cls, config: RunConfig, out: Path, task: Task | None = None, experiment: str = ""
    ) -> "Run":
        """Begins a run in a new folder ``out/<experiment>/...``; without a name, the method's.

        Nothing is written if the task is wrong.
        """
        run = cls(config, task)
        run.folder = RunFolder.create(out, experiment or config.method, config.seed, datetime.now())
        configuration.dump(config, run.folder.config)
        return run

    @classmethod
    def open(cls, path: Path, task: Task | None = None) -> "Run":
        """Reads a run from its folder, done or not, as of its latest checkpoint.

        Raises:
            UserError: not a run's folder, a damaged or foreign checkpoint, or other data.
        """
        folder = RunFolder(path)
        if not folder.config.exists():
            raise UserError(f"{path} must be a run's folder, but has no config.toml")
        config = configuration.load(str(folder.config))
        if task is None and config.engine.name == "flower":  # whose data are not here
            task = tasks.remote(config.task, Roster.read(folder.sites), config.seed)
        run = cls(config, task, folder)
        if folder.state.exists():
            run._restore(*records.load_state(folder.state))
        run.evaluations = [e for e in folder.evaluations() if e.round <= run.round]
        if folder.summary.exists():
            run.summary = dict(records.read_run(path).summary or {})
        return run

    @classmethod
    def resume(cls, path: Path, task: Task | None = None) -> "Run":
        """Goes on with a run that was stopped or killed.

        Raises:
            UserError: as :meth:`open`; or the run is done.
        """
        if RunFolder(path).summary.exists():
            raise UserError(
                f"a run to resume must not be done, but {path} has a summary.json; "
                "evaluate or personalize it, or start a new run"
            )
        run = cls.open(path, task)
        assert run.folder is not None
        run.folder.truncate_after(run.round)
        run.evaluations = run.folder.evaluations()
        return run

    def stop(self) -> None:
        """Asks the run to checkpoint and end after the current round (for a signal's handler)."""
        self._stop = True

    def close(self) -> None:
        """Gives back the engine's threads, actors and connections.

        What is in memory and on disk stays; nothing can be asked of clients any more.
        """
        self.engine.close()

    @property
    def done(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.config.rounds

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

    def train(self) -> Iterator[Progress]:
        """Runs the remaining rounds and yields after each; ends early after :meth:`stop`.

        The last round is followed by the summary.
        """
        while not self._over():
            self._one_round()
            now = self.done or self.round % self.config.evaluate_every == 0
            evaluation = self._evaluate() if now else {}
            if self.done or self.round % self.config.checkpoint_every == 0:
                self._checkpoint()
            lost, self._news = tuple(self._news), []
            yield Progress(self.round, self.config.rounds, lost, evaluation)
        if self.done:
            self._finish()
        elif self._stop:
            self._checkpoint()

    def _over(self) -> bool:
        return self.done or self._stop

    def model(self, client: int) -> nn.Module:
        """Returns the personal model of a client as a module of its own, ready to use.

        It is the model at the best validation round.

        Raises:
            UserError: no such client.
        """
        if not 0 <= client < self.task.clients:
            raise UserError(f"a client's number must be below {self.task.clients}, came {client}")
        novel = client in self.task.novel_ids
        with self._at_best() as server:
            cohort = self.engine.cohort([client], self.config.rounds, training=False, fresh=novel)
            return self._export(server, cohort, self.task.size_of(client))

    def personalize(self, x: Any, y: Any = None, *, size: str | None = None) -> nn.Module:
        """Returns the model of a client that was never seen, by the method's own protocol.

        Args:
            x: (m, ...) the client's examples, like the task's.
            y: (m,) their labels; None for an unlabelled client, where the method can do without.
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
        )
        with closing(engine), self._at_best() as server:
            if task.unlabelled:
                self._serve_unlabelled(engine, server, 0)
            cohort = engine.cohort([0], self.config.rounds, training=False, fresh=True)
            return self._export(server, cohort, task.size_of(0))

    def _serve_unlabelled(self, engine: Engine, server: Server, client: int) -> None:
        """Finds out whether the method can do without a novel client's labels."""
        try:
            server.personalize(engine.cohort([client], 0, training=False, fresh=True))
        except UnlabelledError as error:
            raise UserError(
                f"{self.config.method} needs labels to personalise, but a novel client has none; "
                "give them, or choose a method that can do without"
            ) from error

    def served_otherwise(
        self, overrides: Sequence[str] = (), *, samples: int | None = None
    ) -> "Run":
        """Returns this run, not recorded, with other settings for serving its clients.

        What was trained is the same. So a novel client can be served without labels, from a few
        examples, by another protocol or with other noise, and without training again.

        Args:
            overrides: ``key=value`` for ``method.*``, ``engine.*``, ``task.unlabelled`` and
                ``task.novel_corruption``.
            samples: training examples that each novel client has; all of its own where None.

        Raises:
            UserError: another key, a setting that changes what was trained, too few examples,
                images to corrupt of a task that no settings made; or the run has not come to its
                first evaluation.
        """
        config = configuration.override(self.config, overrides, allowed=SERVING)
        task = self.task
        if config.task.novel_corruption != self.config.task.novel_corruption:
            if not self._built:
                raise UserError(
                    "task.novel_corruption can change only where settings made the task, but this "
                    "run was given one; corrupt its images with hyperfed.data.corruptions"
                )
            task = tasks.build(config.task, config.seed)
        elif config.task.unlabelled != self.config.task.unlabelled:
            task = replace(task, unlabelled=config.task.unlabelled)
        if samples is not None:
            task = with_samples(task, samples, config.seed)
        run = Run(config, task)
        ours, theirs = (each._new_server().state(optimizers=False) for each in (self, run))
        if trees.structure(ours) != trees.structure(theirs):
            raise UserError(
                f"settings for serving must not change what was trained, but {', '.join(overrides)}"
                " does; start a new run with it"
            )
        run.round, run._best, run._bytes = self.round, self.best, dict(self._bytes)
        return run

    def evaluate_novel(self, draws: int = 1) -> Evaluation:
        """Evaluates novel clients, by the method's own protocol, with the best round's server.

        Args:
            draws: how often they are served, at least once, each time with noise and batches of its
                own; the counts are those of all times together.

        Raises:
            UserError: there are none, or the run has not come to its first evaluation.
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
            counts = evaluate(server, self.engine, known, best)
        found = {split: self._summarise(split, known, counts[split], best) for split in counts}
        if self.task.novel:
            found["novel"] = self.evaluate_novel(draws)
        return found

    def _evaluate_novel(self, round: int, draws: int = 1) -> Evaluation:
        ids = list(self.task.novel_ids)
        with self._at_best() as server:
            drawn = [
                evaluate(server, self.engine, ids, self.config.rounds + draw, novel=True)["test"]
                for draw in range(draws)
            ]
        counts = Counts(*(sum(parts) for parts in zip(*map(astuple, drawn), strict=True)))
        return self._summarise("novel", ids, counts, round)

    # Parts of a round.

    def _one_round(self) -> None:
        cohort = self.engine.cohort(self._sample(), self.round, training=True)
        cohort.state.exchanges, cohort.state.late = self._exchanges, self._late
        try:
            self.server.round(cohort)
            self.engine.commit(cohort)
            self._failures = 0
        except AllLostError as error:
            self._failures += error.__cause__ is not None
            if self._failures >= PATIENCE:
                raise (error.__cause__ or error) from error
        self._count()
        self._note(cohort.state.lost.items())
        self.round += 1

    def _count(self) -> None:
        """Counts what has travelled in training since the last time."""
        self._bytes["down"] += sum(exchange.down for exchange in self._exchanges)
        self._bytes["up"] += sum(exchange.up for exchange in self._exchanges)
        self._note(self._late)
        self._exchanges.clear()
        self._late.clear()

    def _note(self, lost: Iterable[tuple[int, str]]) -> None:
        found = [Lost(client, reason) for client, reason in lost]
        self._lost += found
        self._news += found

    def _sample(self) -> list[int]:
        """Draws the round's cohort uniformly, without replacement; a number above all means all."""
        draw = generator(self.config.seed, "cohort", self.round)
        order = torch.randperm(len(self.task.known), generator=draw)
        return sorted(order[: self._cohort_size()].tolist())

    def _cohort_size(self) -> int:
        known, cohort = len(self.task.known), self.config.cohort
        return max(1, round(cohort * known)) if isinstance(cohort, float) else min(cohort, known)

    def _evaluate(self) -> dict[str, Evaluation]:
        ids = list(self.task.known)
        counts = evaluate(self.server, self.engine, ids, self.round)
        self._count()
        lost, self._lost = tuple(self._lost), []
        found = {
            split: self._summarise(split, ids, counts[split], self.round, lost) for split in counts
        }
        for evaluation in found.values():
            self._record(evaluation)
        # Without validation data there is nothing to choose by: the latest round is taken.
        accuracy = found["val"].accuracy
        if (rehearse := self.server.rehearse) is not None:
            as_novel = evaluate(self.server, self.engine, ids, self.round, serve=rehearse)
            accuracy = self._summarise("val", ids, as_novel["val"], self.round).accuracy
        best = None if self._best is None else self._best.accuracy
        if accuracy is None or best is None or accuracy > best:
            server = trees.to(trees.clone(self.server.state(optimizers=False)), CPU)
            self._best = Best(self.round, accuracy, server, dict(self.engine.memory))
        return found

    def _record(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        if self.folder is not None:
            self.folder.append(evaluation)

    def _summarise(
        self, split: str, ids: list[int], counts: Counts, round: int, lost: tuple[Lost, ...] = ()
    ) -> Evaluation:
        return records.summarise(
            round=round,
            split=split,
            clients=ids,
            count=[int(count) for count in counts.count],
            correct=counts.correct.tolist(),
            loss=counts.loss.tolist(),
            masked_correct=counts.masked_correct.tolist(),
            bytes_down=self._bytes["down"],
            bytes_up=self._bytes["up"],
            seconds=self._seconds(),
            lost=lost,
        )

    def _finish(self) -> None:
        """Evaluates novel clients with the best round's state and writes the summary."""
        best = self.best.round
        test = next(e for e in self.evaluations if (e.round, e.split) == (best, "test"))
        novel = self._evaluate_novel(self.round) if self.task.novel else None
        if novel is not None:
            self._record(novel)
        self.summary = {
            "method": self.config.method,
            "task": self.task.name,
            "engine": self.engine.name,
            **self.engine.resources(self._cohort_size()),
            "seed": self.config.seed,
            "rounds": self.round,
            "best_round": best,
            "val_accuracy": self.best.accuracy,
            "test_accuracy": test.accuracy,
            "test_masked_accuracy": test.masked_accuracy,
            "test_accuracy_client_mean": test.accuracy_client_mean,
            "test_accuracy_client_std": test.accuracy_client_std,
            "worst_decile_accuracy": test.worst_decile_accuracy,
            "novel_accuracy": novel.accuracy if novel else None,
            "novel_masked_accuracy": novel.masked_accuracy if novel else None,
            "bytes_down": self._bytes["down"],
            "bytes_up": self._bytes["up"],
            "seconds": self._seconds(),
            "versions": records.versions(),
            "commit": self._commit,
            "data_fingerprint": self.task.fingerprint,
            "privacy": self.server.privacy(),
        }
        if self.folder is not None:
            self.folder.write_summary(self.summary)

    # State.

    def _checkpoint(self) -> None:
        if self.folder is None:
            return
        tree: Tree = {"server": self.server.state(), "memory": _keyed(self.engine.memory)}
        self._count()  # what was posted: a server's state waits for it
        meta: dict[str, Any] = {
            "method": self.config.method,
            "data_fingerprint": self.task.fingerprint,
            "round": self.round,
            "bytes": self._bytes,
            "seconds": self._seconds(),
            "failures": self._failures,
            "lost": [[lost.client, lost.reason] for lost in self._lost],
        }
        if self._best is not None:
            tree["best"] = {"server": self._best.server, "memory": _keyed(self._best.memory)}
            meta |= {"best_round": self._best.round, "best_accuracy": self._best.accuracy}
        records.save_state(self.folder.state, tree, meta)
        self._tell_of_checkpoint()

    def _tell_of_checkpoint(self) -> None:
        best = {} if self._best is None else self._best.memory
        self.engine.saved(self.engine.memory, best)

    def _restore(self, tree: Tree, meta: Mapping[str, Any]) -> None:
        for key, ours in (
            ("method", self.config.method),
            ("data_fingerprint", self.task.fingerprint),
        ):
            if meta.get(key) != ours:
                raise UserError(
                    f"the checkpoint's {key} must be this run's, {ours}, came {meta.get(key)}; "
                    "use the data and the settings that the run was started with"
                )
        self.server.load(trees.to(tree["server"], self.engine.device))
        self.engine.memory = _numbered(tree["memory"])
        self.round, self._bytes = meta["round"], dict(meta["bytes"])
        self._earlier, self._failures = meta["seconds"], meta["failures"]
        self._lost = [Lost(client, reason) for client, reason in meta["lost"]]
        if "best" in tree:
            best = tree["best"]
            memory = _numbered(best["memory"])
            self._best = Best(meta["best_round"], meta["best_accuracy"], best["server"], memory)
        self._tell_of_checkpoint()

    @contextmanager
    def _at_best(self) -> Iterator[Server]:
        """Yields a new server as it was at the best validation round.

        Inside the block the clients remember what they did then.
        """
        server, device = self._new_server(), self.engine.device
        server.to(device).load(trees.to(trees.clone(self.best.server), device))
        now, self.engine.memory = self.engine.memory, dict(self.best.memory)
        try:
            yield server
        finally:
            self.engine.memory = now

    def _new_server(self) -> Server:
        with seeded(self.config.seed, "server"):
            server: Server = self.method.Server(self.task.outline(), self.config.settings)
        return server

    def _export(self, server: Server, cohort: EngineCohort, size: str) -> nn.Module:
        """Returns the personal model of a cohort's only client."""
        model = cohort.ask(self.method.Client.export, server.personalize(cohort))
        return trees.fill(copy.deepcopy(self.task.models[size]), trees.take(model, 0)).eval()

    def _seconds(self) -> float:
        return self._earlier + monotonic() - self._start


def _keyed(memory: Mapping[int, Tree]) -> Tree:
    return {str(client): tree for client, tree in memory.items()}


def _numbered(memory: Mapping[str, Tree]) -> dict[int, Tree]:
    return {int(client): tree for client, tree in memory.items()}

"""A run: trains round by round, evaluates, checkpoints, resumes, and afterwards hands out models.

The loop is the same on every engine. What a run is when it has been killed and resumed does not
differ from what it would have been: all its state is in one file, written whole or not at all.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from operator import index
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from hyperfed import trees
from hyperfed.data import tasks
from hyperfed.data.own import Task
from hyperfed.data.roster import RemoteTask, Roster
from hyperfed.engines.replies import UNUSABLE
from hyperfed.errors import LostEverybodyError, SpentError, UserError
from hyperfed.runs import clients, examined, learned, private, records, trackers
from hyperfed.runs import config as configuration
from hyperfed.runs.accounts import Accounts, keyed, numbered
from hyperfed.runs.drawing import save
from hyperfed.runs.evaluation import (
    Counts,
    chosen_by,
    evaluate,
    is_better,
    keeping,
    serve_all,
)
from hyperfed.runs.folder import RunFolder, read_run
from hyperfed.runs.identity import check_evaluations, check_identity, identity
from hyperfed.runs.keys import changes
from hyperfed.runs.numbers import numbers, numbers_of_sizes
from hyperfed.runs.records import REHEARSAL, Evaluation, Lost
from hyperfed.runs.rounds import Rounds
from hyperfed.runs.serving import Served
from hyperfed.runs.settings import RunConfig, check_clients, cohort_size
from hyperfed.runs.status import Reporter
from hyperfed.runs.tally import always_lost
from hyperfed.runs.trained import Best, TrainedMethod, here, unfit
from hyperfed.runs.watched import check_leaves, leaves
from hyperfed.system.devices import CPU
from hyperfed.system.locks import Lock
from hyperfed.system.provenance import commit, versions
from hyperfed.trees import Tree
from hyperfed.trees.checkpoints import load_latest, load_state, previous, save_latest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 600.0
"""Seconds after which a round is followed by a checkpoint, however few rounds there were since the
last."""


@dataclass(frozen=True)
class Progress:
    """What a run has to say after a round; ``evaluation`` {split: record} where it evaluated."""

    round: int
    rounds: int
    lost: tuple[Lost, ...]
    evaluation: Mapping[str, Evaluation]


class Run(Served):
    """Trains one method on one task.

    Args:
        config: all settings.
        task: the data; built from the settings where not given.
        folder: where the records go; None keeps them in memory only.

    Attributes:
        config: all settings; those of the task as far as they follow from the data too.
        task: data split over clients.
        folder: where the records go.
        round: rounds done.
        evaluations: every evaluation so far.
        summary: the final numbers, {} before the run is done.
    """

    def __init__(
        self, config: RunConfig, task: Task | None = None, folder: RunFolder | None = None
    ) -> None:
        super().__init__(config, task)
        self.config = replace(config, task=tasks.settings_of(self.task, config.seed))
        self._trained_on = self.config.task
        if folder is None:  # an old run stays open to be looked at
            check_clients(config, len(self.task.known))
        self.folder = folder
        self.evaluations: list[Evaluation] = []
        self.summary: dict[str, Any] = {}
        self._newest_is_whole = True  # of the checkpoints on disk
        self._stop = False
        self._within = False  # a round
        self._saved = monotonic()  # the latest checkpoint
        self._lock: Lock | None = None
        self._rounds = Rounds(self, self._charged)
        self._reporter = Reporter(self)
        self._accounting = self._on_the_disk
        self._made = leaves(self.server)
        self._commit = commit()  # of the code that runs, whatever is checked out later

    def __repr__(self) -> str:
        """Returns in a few lines what is trained on what, how far, to what end, and where it is."""
        config, metric = self.config, self.task.metric
        lines = [
            f"Run of {config.method} on {self.task.name}: {self.round} of {config.rounds} rounds"
        ]
        if self.summary:
            reached = self.summary.get(f"test_{metric.name}")
            lines.append(f"test {metric.label}: {metric.told(reached)}")
        if self.folder is not None:
            lines.append(f"in {self.folder.path}")
        return "\n".join(lines)

    @classmethod
    def start(
        cls, config: RunConfig, out: Path, task: Task | None = None, experiment: str = ""
    ) -> "Run":
        """Begins a run in a new folder ``out/<experiment>/...``; without a name, the method's.

        Nothing is written if the task is wrong.
        """
        trackers.check(config.track)
        run = cls(config, task)
        configuration.to_dict(run.config)  # raises before there is a folder
        run.folder = RunFolder.create(out, experiment or config.method, config.seed, datetime.now())
        configuration.dump(run.config, run.folder.config)
        return run

    @classmethod
    def open(cls, path: Path, task: Task | None = None) -> "Run":
        """Reads a run from its folder, done or not, as of its latest checkpoint.

        Where the latest cannot be gone on from, a run that is not done is opened as of the one
        before, which the log says. Where its device is not here, clients are served on the CPU.
        One that was killed is trained on by :meth:`resume` alone.

        Raises:
            UserError: not a run's folder, a damaged or foreign checkpoint, or other data.
        """
        folder = _run_folder(path)
        written = configuration.load(str(folder.config))
        return cls._open(folder, task, here(written), written)

    @classmethod
    def _open(
        cls, folder: RunFolder, task: Task | None, config: RunConfig, written: RunConfig
    ) -> "Run":
        """Reads a run that has settings from now on, and had those that are written there."""
        if task is None and config.engine.name == "flower":  # whose data are not here
            task = tasks.remote(config.task, Roster.read(folder.sites), config.seed)
        run = cls(config, task, folder)
        if folder.summary.exists():  # its numbers are those of the latest, and of no other
            run._restore(*load_state(folder.state))
        elif folder.has_checkpoint:
            tree, meta, run._newest_is_whole = load_latest(folder.state)
            run._restore(tree, meta)
        run._read_accounts()  # a killed run may have told of its first round without a checkpoint
        evaluations = folder.evaluations()
        check_evaluations(evaluations, run.round, written, folder)
        run.evaluations = [e for e in evaluations if e.round <= run.round]
        if folder.summary.exists():
            run.summary = dict(read_run(folder.path).summary or {})
        return run

    @classmethod
    def resume(
        cls,
        path: Path,
        task: Task | None = None,
        changed: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Goes on with a run that was stopped or killed, or with one that is done for longer.

        Args:
            path: the run's folder.
            task: the data, where the run was started with its own; else built from the settings.
            changed: {dotted key: value} of settings that it goes on with, and has from then on
                (:func:`hyperfed.runs.config.continued`). Devices round otherwise, which grows where
                training is not stable. With more ``rounds`` a run that is done goes on, too.

        Raises:
            UserError: as :meth:`open`; or the run is done, its device is not here, or it cannot go
                on with these settings.
        """
        folder, changed = _run_folder(path), changed or {}
        if folder.summary.exists() and "rounds" not in changed:
            # First, or a slip such as round=9 would be told as having asked for nothing.
            configuration.continued(configuration.load(str(folder.config)), changed)
            raise UserError(
                f"a run to resume must not be done, but {path} has a summary.json; evaluate or "
                "personalize it, give it more rounds (hyperfed resume RUN rounds=N), or start "
                "a new one"
            )
        folder.check_links()
        lock = Lock(path)
        try:
            config = configuration.load(str(folder.config))
            moved = configuration.continued(config, changed)
            if not moved.has_device():
                raise UserError(
                    f"{path} must go on with a device that is here, came {moved.device}; name one: "
                    "hyperfed resume RUN device=cpu, hyperfed reproduce TABLE device=cpu or "
                    "hyperfed.resume(device=...)"
                )
            folder.clean()
            folder.state.parent.mkdir(exist_ok=True)
            run = cls._open(folder, task, moved, config)
            # First, so that what a kill leaves here can be gone on with by either settings.
            folder.summary.unlink(missing_ok=True)
            folder.truncate_after(run.round)
            if moved != config:
                configuration.dump(moved, folder.config)
                for change in changes(config, moved):
                    log.warning("goes on with %s", change)
            if not folder.has_checkpoint:
                every = config.checkpoint_every
                log.warning("begins anew: no checkpoint is there yet, checkpoint_every=%s", every)
        except BaseException:
            lock.release()
            raise
        run.evaluations, run.summary = folder.evaluations(), {}
        run._lock = lock  # until it has been trained
        return run

    def to_frame(self) -> "DataFrame":
        """Returns what the best validation round came to, one row per client and split.

        Columns: ``client`` (its name), ``number``, ``split`` ("val", "test"; "novel" is the test
        data of clients that joined afterwards; "rehearsal" is "val" with the models that known
        clients would have as newcomers, of methods whose best round is chosen by it), ``round``,
        ``examples``, ``loss`` and the metrics by name: ``accuracy`` and ``masked_accuracy``, or
        ``rmse``, ``mse`` and ``r2``, and those that were asked for; numbers that are not there are
        missing.

        Raises:
            UserError: the run has not come to its first evaluation.
        """
        import pandas

        found = clients.at_best(self.evaluations, self.best.round)
        return pandas.DataFrame(list(clients.rows(found, self.task.names)))

    def plot(self, path: str | Path | None = None, of: str = "metric") -> "Figure":
        """Draws the metric over rounds and that of each client, by name, at the best round.

        Args:
            path: where to write the figure; its ending says the format (.png, .pdf, .svg).
            of: another figure in its place: ``weights``, ``heatmap`` or ``layers`` of what
                ``pfedla`` and ``heurpfedla`` learned, the ``shift`` or ``variation`` of novel
                clients, or with ``examine`` the ``embedding`` of clients, ``correlation`` and
                ``crossed`` models (:mod:`hyperfed.runs.learned`).

        Raises:
            UserError: the run has not come to its first evaluation, has not what the figure is of,
                or the figure cannot be written.
        """
        title = f"{self.config.method} on {self.task.name}"
        if of == "metric":
            figure = clients.draw(self.evaluations, self.best.round, self.task.names, title)
        else:
            figure = learned.draw(of, self, self.config.method)
        if path is not None:
            save(figure, Path(path))
        return figure

    def stop(self) -> None:
        """Asks the run to checkpoint and end after the current round (for a signal's handler)."""
        self._stop = True

    @property
    def done(self) -> bool:
        """Whether all rounds are done."""
        return self.round >= self.config.rounds

    def train(self) -> Iterator[Progress]:
        """Runs the remaining rounds and yields after each; ends early after :meth:`stop`.

        The last round is followed by the summary; of a run that has one nothing remains.

        Raises:
            UserError: another process trains in the run's folder; or a round was broken off, or the
                folder has later records than this run, which goes on by :meth:`resume` then.
        """
        if self._within:
            instead = "go on from its checkpoint with hyperfed.resume(FOLDER)"
            raise UserError(
                "a run must go on from the end of a round, but its latest was broken off; "
                f"{instead if self.folder else 'train a new one'}"
            )
        if self.summary:
            return
        self.take()
        self._reporter.begin(self.folder)
        self._saved = monotonic()
        try:
            yield from self._train()
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            self._reporter.tell("stopped")
            raise
        except BaseException as error:
            self._reporter.tell("failed", f"{type(error).__name__}: {error}")
            raise
        else:
            self._reporter.tell("done" if self.done else "stopped")
        finally:
            self._stop = False  # of this training, not of what may follow here
            self._unlock()

    def take(self) -> None:
        """Keeps others from the run's folder, if it has one, until it is trained or closed.

        Raises:
            UserError: another process has it, or it is not as the run left it.
        """
        if self.folder is None or self._lock is not None:
            return
        self._lock = Lock(self.folder.path)
        try:
            self.folder.check_as_of(self.round)
        except UserError:
            self._unlock()
            raise

    def close(self) -> None:
        """Gives back the engine's threads, actors and connections, and the run's folder."""
        self._unlock()
        super().close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _train(self) -> Iterator[Progress]:
        while not self._over():
            self._reporter.tell("training")
            self._within = True
            with self._computing():
                self._one_round()
            if self.round == 1:  # and not when hours are over
                check_leaves(self.server, self._made, self.round)
            now = self.done or self.round % self.config.evaluate_every == 0
            if now:
                self._reporter.tell("evaluating")
            with self._computing():
                evaluation = self._evaluate() if now else {}
            self._unproven &= not now  # it has asked all known clients
            if self._is_to_be_saved():
                self._checkpoint()
            self._within = False
            yield Progress(self.round, self.config.rounds, self._rounds.tally.news(), evaluation)
        if self.done:
            self._reporter.tell("evaluating")
            with self._computing():
                self._finish()
        elif self._stop:
            self._checkpoint()

    def _over(self) -> bool:
        return self.done or self._stop

    def _is_to_be_saved(self) -> bool:
        """Whether this round, and its evaluation, are followed by a checkpoint."""
        if self.config.privacy.trusts_server and isinstance(self.task, RemoteTask):
            return True  # clients would pay anew for a round that is done anew
        long_ago = monotonic() - self._saved >= CHECKPOINT_SECONDS
        return self.done or long_ago or self.round % self.config.checkpoint_every == 0

    # Parts of a round.

    def _one_round(self) -> None:
        lost = self._rounds.train(self._cohort(self.round))
        self._rounds.tally.count(self._bytes)
        self._reporter.lost(self._rounds.tally.note(lost.items()))
        self.round += 1

    def _cohort(self, round: int) -> list[int]:
        return private.cohort_of(self.config, self.task, round)

    @property
    def cohort_size(self) -> int:
        """How many clients take part in a round."""
        return cohort_size(self.config.cohort, len(self.task.known))

    def _evaluate(self) -> dict[str, Evaluation]:
        ids = list(self.task.known)
        serve = self._finetuning(self.server.personalize)
        counts = evaluate(self.server, self.engine, ids, self.round, serve=serve)
        rehearsed: Counts | None = None
        if self.server.rehearse is not None:
            serve = self._finetuning(self.server.rehearse)
            rehearsed = evaluate(self.server, self.engine, ids, self.round, serve=serve)["val"]
        self._rounds.tally.count(self._bytes)
        lost, void = self._rounds.tally.close()
        summarise = partial(self._summarise, round=self.round, lost=lost, void=void)
        found = {split: summarise(split, ids, counts[split]) for split in counts}
        told = trees.to(self._recordable(self.server.diagnostics()), CPU)
        if "descriptors" in self.config.examine:
            found_by = examined.descriptors_of_all(self.server, self.engine, self.round)
            told = told | {"descriptors": examined.rank_correlations(self.task, found_by)}
        found["val"] = replace(found["val"], diagnostics=records.plain(told))
        for evaluation in found.values():
            self._record(evaluation)
        if rehearsed is not None:
            self._record(summarise(REHEARSAL, ids, rehearsed))
        # Without validation data there is nothing to choose by: the latest round is taken.
        val = counts["val"] if rehearsed is None else rehearsed
        self._choose(val, ids)
        return found

    def _recordable(self, diagnostics: Tree) -> Tree:
        """Returns what evaluations record of diagnostics: nothing where they are too many."""
        numbers = sum(leaf.numel() for _, leaf in trees.leaves(diagnostics))
        if numbers <= records.MOST_NUMBERS:
            return diagnostics
        if self._best is None:  # the first evaluation
            log.warning(
                "the %d numbers of the server's diagnostics are not recorded at evaluations, where "
                "at most %d are; those of the best round are run.diagnostics()",
                numbers,
                records.MOST_NUMBERS,
            )
        return {}

    def _choose(self, val: Counts, ids: list[int]) -> None:
        """Takes this round for the best if it is, or the first."""
        now, robust = chosen_by(val, ids, self.config.best), self.config.robust
        hostile = None if robust.aggregation == "mean" else robust.hostile
        if self._best is not None and not is_better(now, self._best.val, hostile):
            return
        value = self._summarise("val", ids, val, self.round).value(self._chosen_by)
        server = trees.to(trees.clone(self._state(optimizers=False)), CPU)
        self._best = Best(self.round, value, server, dict(self.engine.memory), now)

    @property
    def lost_everybody(self) -> str:
        """Why every client was lost in the latest round, where no round has had any; else ""."""
        return "" if self._rounds.answered else self._rounds.nobody

    @property
    def _chosen_by(self) -> str:
        """The name of the number that makes a round the best."""
        return self.config.best.replace("accuracy", self.task.metric.name)

    def _record(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        if self.folder is not None:
            self.folder.append(evaluation)

    def _finish(self) -> None:
        """Evaluates novel clients with the best round's state and writes the summary."""
        if self.lost_everybody:
            raise LostEverybodyError(f"every client was lost in every round: {self.lost_everybody}")
        best = self.best.round
        if not self.best.val["there"].any():
            client, reason = (missed := self.evaluations[-1].missed[0]).client, missed.reason
            raise LostEverybodyError(
                f"every client was lost in every evaluation: client {self.task.name_of(client)}: "
                f"{reason}; {self._rounds.advice(reason)}"
            )
        test = next(e for e in self.evaluations if (e.round, e.split) == (best, "test"))
        if isinstance(self.task, RemoteTask):
            self._hand_out()
        self.evaluations = [
            e for e in self.evaluations if e.split != "novel"
        ]  # of a broken-off end
        novel = self._evaluate_novel_at_last()
        never = always_lost(self.evaluations, map(self._cohort, range(self.round)))
        self.summary = {
            "method": self.config.method,
            "task": self.task.name,
            "engine": self.engine.name,
            **self.engine.resources(self.cohort_size),
            "seed": self.config.seed,
            "rounds": self.round,
            "best_round": best,
            f"val_{self._chosen_by}": self.best.value,
            **numbers(test, novel, self._with_others()),
            "total_variation": self.label_shift.total_variation,
            "bytes_down": self._bytes["down"],
            "bytes_up": self._bytes["up"],
            "void_rounds": self._rounds.tally.void_rounds,
            "always_lost": [self.task.name_of(client) for client in never] or None,
            "seconds": self.seconds,
            "versions": versions(),
            "commit": self._commit,
            "data_fingerprint": self.task.fingerprint,
            "clients": list(self.task.names) or None,
            "labels": list(self.task.labels) or None,
            "privacy": self.privacy(),
        }
        if len(self.task.models) > 1:
            sizes = [self.task.size_of(client) for client in self.task.known]
            self.summary |= {"sizes": sizes, **numbers_of_sizes(test, sizes)}
        if self.config.examine:
            self.summary["examined"] = records.plain(self.examined())
        if self.engine.released and self.folder is not None:
            self._checkpoint()  # what was let out since the last one is not to be forgotten
        if self.folder is not None:
            configuration.make_portable(self.folder.config)
            self.folder.write_summary(self.summary)

    def _evaluate_novel_at_last(self) -> Evaluation | None:
        """Evaluates novel clients; None where there are none, or their epsilon is spent."""
        if not self.task.novel:
            return None
        try:
            novel = self._evaluate_novel(self.round)
        except SpentError as error:  # by whoever served them before
            log.warning("novel clients are not evaluated: %s", error)
            return None
        self._record(novel)
        return novel

    def _hand_out(self) -> None:
        """Has sites keep the models of the clients that trained, those of the best round."""
        ids = list(self.task.known)
        with self._at_best() as server:
            kept: dict[int, str] = {}
            serve = keeping(self._finetuning(server.personalize), self.method.Client, kept)
            failed = serve_all(self.engine, ids, self.best.round, serve)
        self._tell_of_models("clients", len(ids), failed | kept)

    def check_newcomers(self) -> None:
        """Finds out whether newcomers can be served at their sites.

        Raises:
            UserError: as of :meth:`hyperfed.runs.serving.Served.check_newcomers`; or the run is not
                done.
        """
        if not self.summary:
            raise UserError(
                f"a run must be done before newcomers are served, but is at round {self.round} of "
                f"{self.config.rounds}; go on with hyperfed resume"
            )
        super().check_newcomers()

    # State.

    @contextmanager
    def _on_the_disk(self, served: TrainedMethod) -> Iterator[None]:
        """Has on the disk what clients who do not train let out meanwhile, before it is told.

        Args:
            served: who serves them: this run, or what it gave to serve them otherwise.
        """
        if self.folder is None or (served.private is None and served.server.privacy() is None):
            yield
            return
        with self._accounts(self.folder).serving():
            yield

    def _accounts(self, folder: RunFolder) -> Accounts:
        return Accounts(folder, self.engine, self._newcomers)

    def _charged(self) -> None:
        """Has on the disk what clients at sites have paid."""
        if self.folder is not None:
            self._accounts(self.folder).told()

    def _read_accounts(self) -> None:
        assert self.folder is not None
        try:
            self._accounts(self.folder).read()
        except UserError:
            raise
        except UNUSABLE as error:
            raise unfit(error) from error

    def _checkpoint(self) -> None:
        if self.folder is None:
            return
        check_leaves(self.server, self._made, self.round)
        tree: Tree = {"server": self._state(), "memory": keyed(self.engine.memory)}
        if self.engine.released:
            tree["released"] = keyed(self.engine.released)
        self._rounds.tally.count(self._bytes)  # what was posted: a server's state waits for it
        meta: dict[str, Any] = {
            **self._identity,
            "round": self.round,
            "bytes": self._bytes,
            "traffic": self.engine.traffic,
            "seconds": self.seconds,
            **self._rounds.meta(),
        }
        if self._best is not None:
            tree["best"] = {"server": self._best.server, "memory": keyed(self._best.memory)}
            tree["best"] |= {"val": self._best.val}
            meta |= {"best_round": self._best.round, "best_accuracy": self._best.value}
        self.folder.sync()  # so that no checkpoint is ahead of them
        save_latest(self.folder.state, tree, meta, keep_newest=self._newest_is_whole)
        self._newest_is_whole, self._saved = True, monotonic()
        self._tell_of_checkpoint()

    @cached_property
    def _identity(self) -> Mapping[str, Any]:
        return identity(self.config, self.task)

    def _state(self, *, optimizers: bool = True) -> Tree:
        """Returns the server's tensors; replies that it has to read for that are aggregated."""
        with self._computing():
            return self.server.state(optimizers=optimizers)

    def _tell_of_checkpoint(self) -> None:
        best = {} if self._best is None else self._best.memory
        self.engine.saved(self.engine.memory, best)

    def _restore(self, tree: Tree, meta: Mapping[str, Any]) -> None:
        check_identity(meta, self._identity)
        try:
            self._load(tree, meta)
        except UNUSABLE as error:
            raise unfit(error) from error
        self._unproven = True
        self._tell_of_checkpoint_before()
        self._tell_of_checkpoint()

    def _tell_of_checkpoint_before(self) -> None:
        """Has sites keep what the older of two checkpoints refers to: the newer may be lost yet."""
        if self.folder is None or not isinstance(self.task, RemoteTask) or self.task.link is None:
            return
        before = previous(self.folder.state)
        if self._newest_is_whole and before.exists():
            # Where it cannot be read, nobody will go on from it.
            with suppress(UserError, *UNUSABLE):
                tree, _ = load_state(before)
                best = tree["best"]["memory"] if "best" in tree else {}
                self.engine.saved(numbered(tree["memory"]), numbered(best))

    def _load(self, tree: Tree, meta: Mapping[str, Any]) -> None:
        saved = [tree["server"], *([tree["best"]["server"]] if "best" in tree else [])]
        for server in saved:
            if strange := self._made - {*trees.structure(server)}:
                raise ValueError(f"the server must have {min(map(str, strange))}")
        self.server.load(trees.to(tree["server"], self.engine.device))
        self.engine.memory = numbered(tree["memory"])
        self.engine.released = numbered(tree.get("released", {}))
        self.round = index(meta["round"])
        if not 0 <= self.round <= self.config.rounds:
            raise ValueError(f"round {self.round} of {self.config.rounds}")
        self._bytes = {way: index(meta["bytes"][way]) for way in ("down", "up")}
        before = meta.get("traffic", {})  # an older checkpoint says nothing of it
        self.engine.traffic.update({way: index(count) for way, count in before.items()})
        self._earlier = meta["seconds"] + 0.0
        self._rounds.load(meta)
        if "best" in tree:
            best = tree["best"]
            memory = numbered(best["memory"])
            counts = [tuple(leaf.shape) for _, leaf in trees.leaves(best["val"])]
            if len(set(counts)) != 1 or len(counts[0]) != 1:
                raise ValueError("the best round must have one count of each kind of each client")
            number, value = index(meta["best_round"]), meta["best_accuracy"]  # of whatever metric
            self._best = Best(number, value, best["server"], memory, best["val"])


def _run_folder(path: Path) -> RunFolder:
    """Returns the folder of a run, which must be one."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UserError(f"{path} must be a run's folder, but has no config.toml")
    return folder

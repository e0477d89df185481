"""Reproducing a table: which runs it takes, and one of them in a process of its own.

A run is one cell with one seed, in a folder of its own, ``OUT/paper/table-cell/seed<k>``: what is
done is left alone, what is half done goes on from its checkpoint. Cells that differ in nothing but
how novel clients are served share one training.
"""

import json
import math
import re
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import count
from os.path import relpath
from pathlib import Path
from time import monotonic

from hyperfed.errors import UserError
from hyperfed.papers import agreement, bound, measured, origin
from hyperfed.papers.origin import Origin
from hyperfed.runs import config as configuration
from hyperfed.runs import experiments, records
from hyperfed.runs.config import TooShortError
from hyperfed.runs.experiments import Bound, Experiment
from hyperfed.runs.folder import RunFolder
from hyperfed.runs.numbers import numbers_of_novel
from hyperfed.runs.progress import watch
from hyperfed.runs.run import Progress, Run
from hyperfed.runs.settings import RunConfig
from hyperfed.system.files import atomic_write, refused
from hyperfed.system.locks import Lock

ONE_CORE = "engine.cores=1"
"""Setting by which a process keeps one core busy, and numbers do not depend on the machine's."""

WHERE = re.compile(r"(device|engine|engine\..+|checkpoint_every)=.*")
"""Settings that a reproduction may be given: where and how it computes, which rounds in ways of its
own and changes nothing else."""

SERVED = ("task.novel_alpha", "task.novel_corruption", "task.unlabelled", "method.novel_")
"""How the keys begin that say how novel clients are served, and change nothing in training."""

ANY_BUDGET = "method.budget=1e6"
"""Setting by which clients answer again and again: a figure averages over noise, and what its draws
cost together is promised to nobody."""

SECONDS = 0.5
"""Between two messages of a process, at least."""


@dataclass(frozen=True)
class Job:
    """A cell with a seed.

    Attributes:
        experiment: the table.
        cell: of it.
        seed: of the run.
        folder: of its record.
        config: all settings.
        origin: what its ``experiment.json`` says.
        trained: the folder of the run whose clients it serves in another way; None where it trains.
        where: settings with which it goes on when it is half done.
    """

    experiment: Experiment
    cell: str
    seed: int
    folder: Path
    config: RunConfig
    origin: Origin
    trained: Path | None = None
    where: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a person is told."""
        return f"{self.experiment.id} {self.cell} seed {self.seed}"

    @property
    def trained_or_served(self) -> bool:
        """Whether there is a record of it."""
        return RunFolder(self.folder).summary.exists()

    @property
    def further(self) -> dict[Path, tuple[int, float | None]]:
        """File of an evaluation of novel clients that is not there yet -> (examples, epsilon).

        Where rounds are scaled it is the least number of examples alone.
        """
        served = self.experiment.table.served
        if served is None:
            return {}
        least = min(served.samples)
        return {
            self.folder / name: (samples, epsilon)
            for name, (samples, epsilon) in served.files.items()
            if (self.origin.scale == 1 or samples == least) and not (self.folder / name).exists()
        }

    @property
    def bound(self) -> Bound | None:
        """Where a bound is to be measured still; by one draw where rounds are scaled."""
        wanted = self.experiment.table.bound
        if wanted is None or (self.folder / bound.FILE).exists():
            return None
        return wanted if self.origin.scale == 1 else replace(wanted, draws=1)

    @property
    def done(self) -> bool:
        """Whether there is a record of it, with all that is found out of a run that is done."""
        return self.trained_or_served and not self.further and self.bound is None

    @property
    def rounds(self) -> int:
        """Rounds that it trains."""
        return 0 if self.trained else self.config.rounds


def plan(
    experiment: Experiment,
    cells: Sequence[str],
    *,
    seeds: Sequence[int],
    scale: float,
    out: Path,
    where: Sequence[str] = (),
) -> list[Job]:
    """Returns the runs of some cells, done or not: all cells with one seed before the next seed.

    Args:
        experiment: the table.
        cells: of it.
        seeds: of the runs of each.
        scale: the part of the rounds, and of the phases among them, that is run: above 0 to 1.
        out: the folder for all records.
        where: settings that say where and how runs compute, such as ``device=cuda``. A run that is
            half done goes on with them, one that serves another's clients takes none of them.

    Raises:
        UserError: the scale is none, a setting is wrong or the table's own, or folders hold runs
            with others; tells all of these folders at once.
    """
    if not 0 < scale <= 1:
        raise UserError(f"--scale must be a part of the rounds, above 0 to 1, came {scale:g}")
    for setting in where:
        if not WHERE.fullmatch(setting):
            raise UserError(
                f"settings of a reproduction must say where it computes, device, engine.* or "
                f"checkpoint_every, came {setting}; to change what a table trains, use hyperfed "
                f"run {experiment.path}:CELL {setting}"
            )
    every = {
        (seed, cell): _job(experiment, cell, seed, scale, out, where=where)
        for seed in seeds
        for cell in experiment.cells
        if cell in cells or _folder(experiment, cell, seed, scale, out).exists()
    }
    wanted = [job for (_, cell), job in every.items() if cell in cells]
    leaders = _leaders(
        [job for (_, cell), job in every.items() if cell in cells or job.trained_or_served]
    )
    led_by = [leaders.get(training_of(job.config), job) for job in wanted]
    jobs = [
        job if leader is job else _served_by(job, leader)
        for job, leader in zip(wanted, led_by, strict=True)
    ]
    # Whose clients are served counts as well, whether it is asked for or not.
    asked = {job.folder: job for job in (*jobs, *led_by)}
    problems = [problem for job in asked.values() if (problem := _conflict(job))]
    if problems:
        told = "\n  - ".join(["folders must hold runs of these settings, but:", *problems])
        raise UserError(f"{told}\nmove them away, or give another folder with --out")
    return jobs


def _job(
    experiment: Experiment, cell: str, seed: int, scale: float, out: Path, *, where: Sequence[str]
) -> Job:
    source = experiment.source(cell)
    settings = [f"seed={seed}", ONE_CORE, *where]
    config = configuration.load(source, settings)
    if scale < 1:
        settings += _scaled(source, config, scale)
        config = configuration.load(source, settings)
    command = shlex.join(["hyperfed", "run", source, *settings])
    folder = _folder(experiment, cell, seed, scale, out)
    of = Origin(experiment.id, cell, scale, command)
    return Job(experiment, cell, seed, folder, config, of, where=tuple(where))


def _folder(experiment: Experiment, cell: str, seed: int, scale: float, out: Path) -> Path:
    """Returns the folder of a cell's record."""
    name = f"seed{seed}" if scale == 1 else f"seed{seed}-scale{scale:g}"
    return out / experiment.folder(cell) / name


def _scaled(source: str, config: RunConfig, scale: float) -> list[str]:
    """Returns settings with fewer rounds, and with shorter phases and newcomers' training."""
    part = Decimal(str(scale))  # as it is written: 0.07 of 5,000 are 350, but in binary a bit more
    phases = [
        f"method.{name}={max(1, math.floor(value * part))}"
        for name, value in vars(config.settings).items()
        if (name.endswith("_rounds") or name.startswith("novel_")) and type(value) is int and value
    ]
    for rounds in count(math.ceil(config.rounds * part)):  # no phase may be left without a round
        settings = [f"rounds={rounds}", *phases]
        try:
            configuration.load(source, settings)
        except TooShortError:
            continue
        return settings
    raise AssertionError


def training_of(config: RunConfig) -> tuple[str, ...]:
    """Returns what decides what is trained, and what a record of that tells.

    Where descriptors are looked into, novel clients tell theirs at each evaluation.
    """
    settings = measured.flat(config) | {"seed": str(config.seed)}
    settings |= {"examine": str(config.examine), "metrics": str(config.metrics)}
    served = () if "descriptors" in config.examine else SERVED
    return tuple(f"{key}={settings[key]}" for key in settings if not key.startswith(served))


def _leaders(jobs: Sequence[Job]) -> dict[tuple[str, ...], Job]:
    """Returns {what is trained: who trains it}: of jobs that share a training the one furthest on.

    That is one that is done, else one that has a checkpoint, else the first. A record without a
    checkpoint serves nobody, nor does one that was served itself.
    """

    def left(job: Job) -> tuple[bool, bool]:
        return not job.trained_or_served, not RunFolder(job.folder).has_checkpoint

    found: dict[tuple[str, ...], Job] = {}
    for job in sorted(jobs, key=left):
        if left(job) != (False, True) and not _was_served(job):
            found.setdefault(training_of(job.config), job)
    return found


def _served_by(job: Job, leader: Job) -> Job:
    """Returns a job that serves the clients of another's training."""
    serve = shlex.join(["hyperfed", "evaluate", "RUN", "--novel", *_serving(job, leader.config)])
    trained = origin.read(leader.folder) or leader.origin
    of = replace(
        job.origin,
        command=f"{trained.command or leader.origin.command}; {serve}",
        trained=relpath(leader.folder, job.folder),
    )
    return replace(job, trained=leader.folder, origin=of)


def _was_served(job: Job) -> bool:
    """Whether there is a record of it that is of the clients of another's training."""
    of = origin.read(job.folder) if job.trained_or_served else None
    return of is not None and bool(of.trained)


def _serving(job: Job, trained: RunConfig) -> list[str]:
    """Returns the settings by which a job serves clients otherwise than the run that trained.

    Others are the same, but that a run that is open has those too that follow from its data.
    """
    wanted, own = measured.flat(job.config), measured.flat(trained)
    serving = (key for key in wanted if key.startswith(SERVED))
    return [f"{key}={wanted[key]}" for key in serving if wanted[key] != own[key]]


def _conflict(job: Job) -> str:
    """Returns what is wrong with a folder that is there, or nothing."""
    folder = RunFolder(job.folder)
    if not folder.config.exists():
        return f"{job.folder}: a summary without settings" if folder.summary.exists() else ""
    settings = agreement.read_run(job.folder).config
    differing = measured.differing(settings, measured.flat(job.config))
    found = {key: f"{own} for {wanted}" for key, (own, wanted) in differing.items()}
    if settings.get("seed") != job.seed:
        found["seed"] = f"{settings.get('seed')} for {job.seed}"
    if (of := origin.read(job.folder)) is not None:
        ours = job.origin
        for key, own, wanted in (
            ("table", of.table, ours.table),
            ("cell", of.cell, ours.cell),
            ("scale", of.scale, ours.scale),
        ):
            if own != wanted:
                found[key] = f"{own} for {wanted}"
    told = ", ".join(f"{key}={text}" for key, text in found.items())
    return f"{job.folder}: {told}" if told else ""


# In the process of a job.

Tell = Callable[[tuple[object, ...]], None]
"""Takes a message: ("round", done, of all), ("done",), ("stopped",) or ("failed", why, ours)."""


def carry_out(job: Job, tell: Tell) -> None:
    """Does a job until it is done or a signal asks this process to stop.

    SIGINT and SIGTERM end it after the round it is in, with a checkpoint.

    Args:
        job: not done yet.
        tell: takes its messages, of which the last is one of its end; an ``OSError`` of it, where
            nobody listens any more, ends the run as a signal does.
    """
    stopping = _Stopping()
    try:
        done = job.trained_or_served
        if not done:
            done = _serve(job) if job.trained else _train(job, tell, stopping)
        done = done and _serve_further(job, stopping) and _measure_bound(job, stopping)
    except UserError as error:
        tell(("failed", str(error), False))
    except Exception as error:
        tell(("failed", f"{type(error).__name__}: {error}", True))
        raise
    else:
        tell(("done",) if done else ("stopped",))


class _Stopping:
    """Has signals stop a run, also one that is not there yet.

    Attributes:
        asked: whether it is to stop.
    """

    def __init__(self) -> None:
        self.asked = False
        self._run: Run | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.ask())

    def ask(self) -> None:
        """Stops the run, or the one that comes."""
        self.asked = True
        if self._run is not None:
            self._run.stop()

    def watch(self, run: Run) -> None:
        """From now on it is this run that is stopped."""
        self._run = run
        if self.asked:
            run.stop()


def _train(job: Job, tell: Tell, stopping: _Stopping) -> bool:
    """Trains, and returns whether it came to the end."""
    if RunFolder(job.folder).config.exists():
        run = Run.resume(job.folder, changed=configuration.parse(job.where))
    else:
        run = Run(job.config)
        if job.bound:
            bound.check(run.config, run.task)  # and not after hours
        run.folder = _new(job, run.config)
    with closing(run):
        stopping.watch(run)
        last = 0.0

        def told(progress: Progress) -> None:
            nonlocal last
            if (now := monotonic()) - last >= SECONDS:
                last = now
                try:
                    tell(("round", progress.round, progress.rounds))
                except OSError:
                    stopping.ask()

        watch(run, show=False, told=told)
        return bool(run.summary)


def _new(job: Job, config: RunConfig) -> RunFolder:
    """Makes the folder of a record; its settings come last, so that a folder with some is whole.

    Args:
        job: whose record it is.
        config: its settings, with what follows from the data.
    """
    folder = RunFolder(job.folder)
    try:
        folder.state.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refused(job.folder, error) from error
    job.origin.write(job.folder)
    configuration.dump(config, folder.config)
    return folder


def _serve(job: Job) -> bool:
    """Serves the novel clients of a run that is done by the settings of this cell.

    Raises:
        UserError: it is not done, so that a record of it would have numbers of fewer rounds; or
            another process trains where the record goes.
    """
    assert job.trained is not None
    with closing(Run.open(job.trained)) as run:
        if not run.summary:
            raise UserError(
                f"{job.trained} must be done to serve clients otherwise, but is at round "
                f"{run.round} of {run.config.rounds}; give the same command again"
            )
        with closing(run.served_otherwise(_serving(job, run.config))) as served:
            novel, data = served.evaluate_novel(), served.task.fingerprint
        with _cleared(job.folder):
            folder = _new(job, served.config)
            folder.truncate_after(0)
            for evaluation in (*(e for e in run.evaluations if e.split != "novel"), novel):
                folder.append(evaluation)
            configuration.make_portable(folder.config)
            ended = {**run.summary, **numbers_of_novel(novel, novel)}
            folder.write_summary(ended | {"data_fingerprint": data})  # what newcomers have is in it
    return True


@contextmanager
def _cleared(path: Path) -> Iterator[None]:
    """Keeps others out of a folder, without what a training of its own that was stopped has left.

    Its models are not those that the record is of, and would be taken for them.

    Raises:
        UserError: another process trains there, or the disk refuses.
    """
    if not path.exists():
        yield
        return
    folder = RunFolder(path)
    with Lock(path):
        try:
            for left in (*folder.state.parent.glob("*"), folder.status, folder.log):
                left.unlink(missing_ok=True)
            yield
        except OSError as error:
            raise refused(path, error) from error


def _serve_further(job: Job, stopping: _Stopping) -> bool:
    """Serves novel clients as the table says further, and returns whether it came to the end.

    Each evaluation is a file, as ``hyperfed evaluate RUN --novel --json`` prints it.
    """
    served, further = job.experiment.table.served, job.further
    if served is None or not further:
        return True
    with closing(Run.open(_trained_in(job))) as run:
        as_its_cell = _serving(job, run.config)
        for path, (samples, epsilon) in further.items():
            if stopping.asked:
                return False
            noise = [] if epsilon is None else [f"method.epsilon={epsilon}", ANY_BUDGET]
            draws = 1 if epsilon is None or job.origin.scale < 1 else served.draws
            settings = [*as_its_cell, *noise]
            with closing(run.served_otherwise(settings, samples=samples)) as otherwise:
                novel = records.as_written(otherwise.evaluate_novel(draws))
            atomic_write(path, f"{json.dumps({'novel': novel}, indent=2)}\n".encode())
    return True


def _measure_bound(job: Job, stopping: _Stopping) -> bool:
    """Measures the bound that the table is of, and returns whether it came to the end."""
    if (wanted := job.bound) is None:
        return True
    points: list[bound.Measured] = []
    with (
        closing(Run.open(_trained_in(job))) as run,
        closing(run.served_otherwise(_serving(job, run.config))) as served,
    ):
        for point in bound.sides(served, wanted):
            if stopping.asked:
                return False
            points.append(point)
    summary = agreement.read_run(job.folder).summary or {}
    bound.write(job.folder / bound.FILE, summary, wanted, points)
    return True


def _trained_in(job: Job) -> Path:
    """Returns the folder of the run whose clients a job serves, its own where it has trained."""
    if job.trained is None or RunFolder(job.folder).has_checkpoint:
        return job.folder
    return job.trained


def find(id: str, folder: Path, cells: str) -> tuple[Experiment, list[str]]:
    """Returns a table and those of its cells that fit a pattern.

    Raises:
        UserError: there is no such table, or no such cell, or a measure of the table is none.
    """
    experiment = experiments.find(id, folder)
    measured.check_measures(experiment)
    return experiment, experiment.matching(cells)

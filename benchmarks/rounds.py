"""Rounds and evaluations of a method, one call each, to be measured."""

from collections.abc import Mapping
from itertools import count
from types import ModuleType
from typing import Any

from hyperfed.engines.cohort import EngineCohort
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.runs.evaluation import evaluate
from hyperfed.system.randomness import seeded
from hyperfed.task import Task


class Rounds:
    """A method on a task, as a run drives it."""

    def __init__(
        self,
        task: Task,
        method: ModuleType,
        engine: type[LoopEngine] = LoopEngine,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        config = method.Config(**settings)
        with seeded(0, "server"):
            self.server = method.Server(task.outline(), config)
        self.engine = engine(task, method.Client, config, seed=0, **(options or {}))
        self.server.to(self.engine.device)
        self.method, self.config, self.numbers = method, config, count()

    def round(self, cohort: int) -> EngineCohort:
        """Trains with so many clients, each in turn, and returns them."""
        number, clients = next(self.numbers), self.engine.task.clients
        ids = sorted({(number * cohort + i) % clients for i in range(cohort)})
        group = self.engine.cohort(ids, number, training=True)
        self.server.round(group)
        self.engine.commit(group)
        return group

    def local_steps(self, cohort: int) -> None:
        """Has so many clients train the initial model, and nothing else."""
        group = self.engine.cohort(range(cohort), next(self.numbers), training=True)
        initial = self.engine.task.outline().initial()
        group.ask(self.method.Client.train_model, initial, batches=self.config.batches)

    def evaluate(self) -> None:
        """Evaluates all clients on validation and test data."""
        evaluate(self.server, self.engine, list(self.engine.task.known), next(self.numbers))

"""A method whose steps show what a client sees, and misbehave where told to."""

from typing import Any

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from hyperfed import federation, trees
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.federation import step
from hyperfed.task import Task
from hyperfed.trees import Tree
from toys import make_task


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Config:
    """Which clients misbehave, and how."""

    bad: tuple[int, ...] = ()
    how: str = ""


class Client(federation.Client):
    """Steps that show what a client sees."""

    @step
    def draws(self) -> Tree:
        inputs = torch.stack([batch.x.sum() for batch in self.batches])
        return {"batches": inputs, "other": torch.rand(2, generator=self.generator)}

    @step
    def sizes_of_batches(self) -> Tree:
        sizes = [len(batch.y) for batch in self.batches]
        return {"sizes": torch.tensor(sizes), "rows": torch.tensor(sum(sizes))}

    @step
    def remember(self) -> Tree:
        count = self.memory.get("count", torch.tensor(0)) + 1
        self.memory["count"] = count
        self.scratch["count"] = self.scratch.get("count", torch.tensor(0)) + 1
        return self.answer({"memory": count, "scratch": self.scratch["count"]})

    @step(like="model")
    def echo(self, model: Tree) -> Tree:
        return self.answer(dict(model))

    @step
    def total(self, model: Tree) -> Tree:
        return {"total": torch.cat(list(model.values())).sum()}

    @step
    def peek(self) -> Tree:
        return {"x": self.test.batch().x}

    @step
    def labels(self) -> Tree:
        return {"y": self.train.batch().y[:1]}

    def answer(self, good: Tree) -> Tree:
        if self.id not in self.config.bad:
            return good
        match self.config.how:
            case "raise":
                raise OSError("disk on fire")
            case "nan":
                return trees.tree_map(lambda leaf: leaf * torch.nan, good)
            case "name":
                return good | {"surplus": torch.zeros(1)}
            case "shape":
                return trees.tree_map(lambda leaf: leaf.unsqueeze(0), good)
            case "dtype":
                return trees.tree_map(lambda leaf: leaf.half(), good)
            case _:
                return None  # type: ignore[return-value]


def engine_of(task: Task | None = None, config: Config | None = None, **options: Any) -> LoopEngine:
    return LoopEngine(task or make_task(), Client, config or Config(), **{"seed": 0} | options)

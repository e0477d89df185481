"""Runs of a method of one's own, registered from Python, whose state has an odd shape."""

from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic.dataclasses import dataclass

import hyperfed
from hyperfed import federation, trees
from hyperfed.errors import UserError
from hyperfed.federation import Cohort, Outline, step
from hyperfed.methods import METHODS
from hyperfed.runs import config
from hyperfed.runs.run import Run
from hyperfed.training import LocalConfig, fit
from hyperfed.trees import Model, Tree, weighted_mean
from toys import make_task, recorded

KEYS: dict[str, Any] = {
    "rounds": 4,
    "cohort": 2,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "method": {"local_steps": 2, "local_lr": 0.1},
}


class Client(federation.Client):
    @step(bounded="reply")
    def train_model(self, model: Model) -> Tree:
        settings, trainable = self.config.local, self.parameters
        trained = fit(self.objective, model, self.batches, settings, trainable=trainable).model
        return trees.subtract(model, trained)


class Server(federation.Server):
    """Descends by an optimiser of tensors, and keeps the mean delta of the last round."""

    def __init__(self, outline: Outline, config: Any) -> None:
        super().__init__(outline, config)
        self.model = trees.clone(outline.initial())
        self.optimizer = torch.optim.Adam([*self.model.values()], lr=0.05, fused=True)

    def round(self, clients: Cohort) -> None:
        batches = self.config.batches
        deltas = clients.ask(Client.train_model, self.model, batches=batches)
        self.delta = weighted_mean(deltas, clients.weight)
        for name, weight in self.model.items():
            weight.grad = self.delta[name].clone()
        self.optimizer.step()

    def personalize(self, clients: Cohort) -> Model:
        return self.model


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mine")
    module.Config, module.Client, module.Server = LocalConfig, Client, Server
    module.PRESETS = {"default": {}}
    monkeypatch.setitem(METHODS, "mine", module)  # type: ignore[arg-type]


def test_what_a_server_moves_itself_and_what_first_comes_in_a_round_are_resumed(
    tmp_path: Path,
) -> None:
    whole = hyperfed.train("mine", make_task(novel=1), **KEYS)
    run = Run.start(config.from_keys("mine", KEYS), tmp_path, make_task(novel=1))
    for progress in run.train():
        if progress.round == 2:
            break
    assert run.folder is not None
    resumed = hyperfed.resume(run.folder.path, make_task(novel=1))
    assert recorded(resumed) == recorded(whole)


class Counting(Server):
    """Keeps what changes where no checkpoint has it."""

    def __init__(self, outline: Outline, config: Any) -> None:
        super().__init__(outline, config)
        self.times, self.deltas, self.sums = 0, [], {"of": {"w": torch.zeros(1)}, "count": 0}
        self.first, self.same, self.lazy = torch.zeros(()), ["a", 1.5], None
        self.becomes: Any = 0

    def round(self, clients: Cohort) -> None:
        super().round(clients)
        self.times += 1
        self.deltas.append(self.delta)
        self.sums["of"]["w"] += 1
        self.first = self.first + 1
        self.lazy = self.lazy or "made once"
        self.new, self.becomes = clients.round, torch.zeros(())


def test_what_no_checkpoint_keeps_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    METHODS["mine"].Server = Counting  # type: ignore[attr-defined]
    hyperfed.train("mine", make_task(), **KEYS)
    told = [record.args for record in caplog.records if "checkpoints leave it" in record.message]
    assert told == [("times", 1), ("deltas", 1), ("sums", 1), ("new", 2)]


@pytest.mark.parametrize("library", ["PyTorch", "NumPy"])
def test_draws_that_no_seed_decides_are_told_once(
    library: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw = {"PyTorch": lambda: torch.rand(1), "NumPy": lambda: np.random.rand(1)}[library]
    train = Client.train_model

    @step(bounded="reply")
    def train_model(self: Client, model: Model) -> Tree:
        draw()
        return train(self, model)

    monkeypatch.setattr(Client, "train_model", train_model)
    hyperfed.train("mine", make_task(), **KEYS)
    told = [record.args for record in caplog.records if "global generator" in record.message]
    assert told == [(1, library)]


class Growing(Server):
    """Has learned something of another shape, or type, than it was made with."""

    norms, grows = torch.zeros(0), 0

    def __init__(self, outline: Outline, config: Any) -> None:
        super().__init__(outline, config)
        self.norms = type(self).norms

    def round(self, clients: Cohort) -> None:
        super().round(clients)
        if clients.round >= self.grows:
            self.norms = torch.cat([self.norms.float(), torch.ones(1)])


@pytest.mark.parametrize(
    ("made", "grows", "told"),
    [
        (torch.zeros(0), 0, r"shape \(0,\) .* after round 1"),
        (torch.zeros(1).int(), 0, r"torch\.int32 .* after round 1"),
        (torch.zeros(0), 1, r"shape \(0,\) .* after round 3"),  # where its state is written
    ],
)
def test_a_server_that_no_checkpoint_could_be_opened_with_is_told_after_a_round(
    made: torch.Tensor, grows: int, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Growing, "norms", made)
    monkeypatch.setattr(Growing, "grows", grows)
    METHODS["mine"].Server = Growing  # type: ignore[attr-defined]
    keys = KEYS | {"checkpoint_every": 3}
    with pytest.raises(UserError, match=rf"norms of the server's state must keep .*{told}"):
        hyperfed.train("mine", make_task(), **keys, out=tmp_path)


def test_a_run_whose_folder_lost_its_checkpoints_begins_anew_to_the_end(tmp_path: Path) -> None:
    run = Run.start(config.from_keys("mine", KEYS), tmp_path, make_task())
    assert run.folder is not None
    run.folder.state.parent.rmdir()
    assert hyperfed.resume(run.folder.path, make_task()).summary["rounds"] == 4


@dataclass(frozen=True)
class WithFunction(LocalConfig):
    scale: Any = abs


def test_a_setting_that_no_file_can_hold_leaves_no_folder(tmp_path: Path) -> None:
    METHODS["mine"].Config = WithFunction  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"which a file can hold, .* scale=<built-in function abs>"):
        hyperfed.train("mine", make_task(), **KEYS, out=tmp_path)
    assert not list(tmp_path.iterdir())


class Undecorated(LocalConfig):
    local_lr: float = 0.5


@dataclass(frozen=True)
class Named(LocalConfig):
    name: str = "mine"


@dataclass(frozen=True)
class WithConstant(LocalConfig):
    kind: ClassVar = "no setting"


def test_a_config_may_have_what_is_no_setting() -> None:
    METHODS["mine"].Config = WithConstant  # type: ignore[attr-defined]
    assert config.from_keys("mine", KEYS).settings.local_lr == 0.1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Undecorated, "must be a dataclass of pydantic itself, or what it says is no setting"),
        (object, r"must be a dataclass of pydantic itself, .*; write @dataclass"),
        (Named, r"must have another name than name, which is the method's own"),
    ],
)
def test_settings_that_no_run_could_have_are_told(kind: type, message: str) -> None:
    METHODS["mine"].Config = kind  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=message):
        config.from_keys("mine", KEYS)


@pytest.mark.parametrize("name", ["round", "personalize"])
def test_what_a_server_lacks_is_told_before_training(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Server, name)
    with pytest.raises(UserError, match=f"the Server of mine must have a {name}; write it"):
        hyperfed.train("mine", make_task(), **KEYS)


def test_a_process_that_does_not_know_the_method_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a script's `if __name__` keeps from adding it."""
    settings = config.from_keys("mine", KEYS)
    monkeypatch.delitem(METHODS, "mine")
    with pytest.raises(UserError, match="method mine must be known in every process"):
        Run.start(settings, None, make_task())

"""Sites keep the models of their clients: what the server would serve, and nothing of it told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from engines.flower.sites import DirectLink, remote
from hyperfed.apps.cli import main
from hyperfed.engines.flower.policy import Policy
from hyperfed.engines.flower.site import Shard, Site
from hyperfed.errors import UserError
from hyperfed.federation import AllLostError
from hyperfed.methods import METHODS, NO_ONE_NETWORK
from hyperfed.runs.config import from_keys
from hyperfed.runs.export import export_model
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig
from hyperfed.task import Task
from toys import make_task

CLIENTS = {1: (0, 2), 2: (1, 3, 4)}
"""Node -> its clients; the last is a novel one."""

OWN: dict[str, dict[str, Any]] = {
    "itpfl": {"phase_one_rounds": 1},
    **{name: {"novel_steps": 2} for name in ("local", "pfedme", "fedala", "gpfl")},
}
SERVED = (
    *("local", "fedavg", "fedper", "fedbn", "pfedme", "fedala", "pfedhn_pc", "pefll", "headstart"),
    *("itpfl", *NO_ONE_NETWORK),
)
"""Methods that serve clients in unlike ways."""

LENIENT = Policy(smallest_batch=1, smallest_reply=1, smallest_evaluation=1)


def configured(method: str, **keys: Any) -> RunConfig:
    own = {"local_steps": 2, "batch_size": 4, "local_lr": 0.1} | OWN.get(method, {})
    small = {"rounds": 2, "cohort": 2, "evaluate_every": 2, "track": "none"}
    return from_keys(method, small | {"method": own | keys.pop("own", {})} | keys)


def data() -> Task:
    return make_task(examples=(12, 15, 20, 14, 13), novel=1)


class Federation:
    """Two sites, reached directly, each with a folder for its state."""

    def __init__(
        self,
        config: RunConfig,
        state: Path,
        policy: Policy | None = None,
        write: Callable[[nn.Module, Task, Path], None] | None = export_model,
    ) -> None:
        self.state = state
        sites = {
            node: Site(
                Shard(data(), clients),
                state / str(node),
                METHODS[config.method].Client,
                config.settings,
                seed=0,
                policy=policy,
                private=config.privacy.updates(),
                write=write,
            )
            for node, clients in CLIENTS.items()
        }
        self.link = DirectLink(sites)
        far = replace(config, engine=replace(config.engine, name="flower"))
        self.run = Run(far, remote(data(), self.link, sites))
        for _ in self.run.train():
            pass

    def path(self, client: int) -> Path:
        (node,) = (node for node, clients in CLIENTS.items() if client in clients)
        return self.state / str(node) / "models" / "run-1" / f"_{client:06d}.safetensors"


@pytest.mark.parametrize("method", SERVED)
def test_a_site_has_the_model_of_each_client(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(method)
    here = Run(config, data())
    for _ in here.train():
        pass
    there = Federation(config, tmp_path)
    assert there.run.summary["test_accuracy"] == pytest.approx(here.summary["test_accuracy"])
    told = [message for message in caplog.messages if message.startswith("sites keep")]
    if method in NO_ONE_NETWORK:
        assert told[0].startswith("sites keep the models of 0 of 4 clients; client 0: ")
        assert not (tmp_path / "1" / "models").exists()
        return
    assert told == []
    for client in range(5):
        kept = load_file(there.path(client))
        model = {f"model.{name}": value for name, value in here.model(client).state_dict().items()}
        torch.testing.assert_close(kept, model, rtol=1e-9, atol=1e-12)


def test_a_file_is_as_one_that_is_exported(tmp_path: Path) -> None:
    there = Federation(configured("pfedhn"), tmp_path)
    export_model(there.run.task.models["base"], data(), tmp_path / "other.safetensors")
    about = []
    for path in (there.path(4), tmp_path / "other.safetensors"):
        with safe_open(path, "pt") as file:
            about.append(json.loads(file.metadata()["hyperfed"]))
    assert about[0] == about[1]
    assert there.path(4).parent.stat().st_mode & 0o077 == 0


def test_a_strict_site_keeps_models_and_tells_nothing_of_them(tmp_path: Path) -> None:
    """``export``, by which a server would have them, is refused as before."""
    there = Federation(configured("pefll"), tmp_path, LENIENT)
    for client in range(5):
        assert there.path(client).exists()
    log = [json.loads(line) for line in (tmp_path / "2" / "audit.jsonl").read_text().splitlines()]
    keeps = [note for note in log if note["step"] == "keep"]
    assert [note["client"] for note in keeps] == ["000001", "000003", "000004"]
    assert {(note["bytes_out"], note["decision"]) for note in keeps} == {(0, "answered")}
    evaluations = [note["client"] for note in log if note["step"] == "evaluate"]
    assert sorted(evaluations) == ["000001", "000003", "000004"]  # one each: to keep is none
    cohort = there.run.engine.cohort([0], 9, training=False)
    with pytest.raises(AllLostError, match="the step export is not run here"):
        cohort.ask(METHODS["pefll"].Client.export, {})


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (replace(LENIENT, refused_steps=("keep",)), "the step keep is not run here"),
        (None, "the disk is full"),
    ],
)
def test_whose_site_does_not_keep_it_is_told_and_evaluated_all_the_same(
    policy: Policy | None, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise UserError("the disk is full")

    there = Federation(configured("fedavg"), tmp_path, policy, full)
    summary = there.run.summary
    assert (summary["evaluated"], summary["novel_evaluated"]) == ("4 of 4", "1 of 1")
    told = [message for message in caplog.messages if message.startswith("sites keep")]
    whose = ("4 clients; client 0", "1 novel clients; client 4")
    for message, of in zip(told, whose, strict=True):
        assert message.startswith(f"sites keep the models of 0 of {of}")
        assert why in message


def test_a_trial_without_a_place_for_models_keeps_none(tmp_path: Path) -> None:
    Federation(configured("fedavg"), tmp_path, write=None)
    assert not list(tmp_path.rglob("models"))


def test_who_has_too_few_examples_to_reply_has_a_model_all_the_same(tmp_path: Path) -> None:
    """Nothing is told of its examples by that."""
    passes = configured("fedavg", own={"local_epochs": 1}, rounds=4)
    Federation(passes, tmp_path, replace(LENIENT, smallest_reply=14))
    log = [json.loads(line) for line in (tmp_path / "1" / "audit.jsonl").read_text().splitlines()]
    first = {(note["step"], note["decision"][:7]) for note in log if note["client"] == "000000"}
    assert first == {("train_model", "refused"), ("evaluate", "answere"), ("keep", "answere")}


def test_a_model_is_written_once(tmp_path: Path) -> None:
    written = []
    Federation(configured("fedper"), tmp_path, write=lambda model, task, path: written.append(path))
    assert len(written) == len({*written}) == 5


def test_status_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Federation(configured("fedavg"), tmp_path, LENIENT)
    with pytest.raises(SystemExit, match="0"):
        main(["status", str(tmp_path / "2")])
    assert "models of 3 clients for their owners: models/run-1\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["status", str(tmp_path / "1"), "--json"])
    assert json.loads(capsys.readouterr().out)["models"] == {"run-1": 2}


def test_nothing_is_paid_for_a_model_that_is_kept(tmp_path: Path) -> None:
    """It is the one that the evaluation of novel clients has been of."""
    privacy = {"epsilon": 50.0, "clip": 1.0}
    there = Federation(configured("pfedhn", privacy=privacy, own={"novel_rounds": 3}), tmp_path)
    assert there.path(4).exists()
    assert len(there.run.engine.released[4]["multipliers"]) == 3

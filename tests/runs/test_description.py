"""What a run is said to hold and to send, before it is started."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperfed.apps.cli import main
from hyperfed.errors import UserError
from hyperfed.runs.config import from_keys, load
from hyperfed.runs.description import Description, describe
from hyperfed.runs.run import Run
from hyperfed.runs.settings import RunConfig
from hyperfed.task import Task
from own_data import N, saved, table
from toys import Stemmed, make_task

KEYS: dict[str, Any] = {"rounds": 70, "cohort": 3, "method": {"batch_size": 4, "hidden": 7}}
MODEL = 8 * 47
"""Bytes of what travels of ``Stemmed`` in float64: 39 numbers and the norm's 2 x 4."""


def of(method: str, task: Task, **settings: Any) -> Description:
    return describe(from_keys(method, KEYS | {"method": KEYS["method"] | settings}), task)


def test_counts_what_is_learned_and_what_is_frozen() -> None:
    task = make_task(Stemmed)
    found = of("pfedhn", task, hidden_layers=1, head_rank=2, embedding_size=3)
    assert found.targets == {"base": 47}
    assert found.frozen == {"base": 5 * 5 + 5 + 5 * 2 + 5 * 2 + 1}
    trunk = 7 * 4 + 7 * 8 + 2 * 7
    assert found.server == {"hyper_net": trunk + 47 * 3, "embeddings": 4 * 3}
    assert found.clients == 3
    assert found.task == repr(task)


def test_bytes_are_those_that_the_run_counts_in_its_first_round() -> None:
    task = make_task(Stemmed)
    for method in ("pfedhn", "itpfl"):
        found = of(method, task)
        settings = {"method": {"batch_size": 4, "local_steps": 2}}
        run = Run(from_keys(method, KEYS | settings), task)
        next(run.train())
        assert (found.bytes_down, found.bytes_up) == (run.bytes["down"], run.bytes["up"])
    assert of("pfedhn", task).bytes_up == 3 * MODEL


def test_the_round_that_is_tried_out_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One local step in this process, and no evaluation, whatever the run is to have."""
    tried: list[RunConfig] = []
    monkeypatch.setattr(Run, "train", lambda run: iter([tried.append(run.config)]))
    keys = KEYS | {
        "rounds": 1,
        "engine.name": "ray",
        "method.local_epochs": 3,
        "method.local_steps": 9,
    }
    describe(from_keys("pfedhn", keys), make_task())
    (config,) = tried
    assert (config.settings.local_steps, config.settings.local_epochs) == (1, None)
    assert config.engine.name == "loop"
    assert min(config.rounds, config.evaluate_every) > 1


def test_a_round_that_loses_everybody_is_told() -> None:
    config = from_keys("pfedhn", KEYS | {"faults": {"nan": 1.0}})
    with pytest.raises(UserError, match=r"every client was lost: .* is not finite"):
        describe(config, make_task())


def test_names_what_the_server_learns() -> None:
    assert set(of("pefll", make_task()).server) == {"descriptor_net", "hyper_net"}


def test_data_elsewhere_cannot_be_described() -> None:
    with pytest.raises(UserError, match="leave the engine out"):
        describe(from_keys("pfedhn", {"engine.name": "flower"}))


def test_the_command_prints_it_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Description(
        {"base": 1000}, {"base": 5}, {"hyper_net": 101_000}, 5, 20_000_000, 4_000, "rmse", "Task x"
    )
    asked = []
    monkeypatch.setattr(
        "hyperfed.apps.describe.description_of", lambda config: asked.append(config) or found
    )
    with pytest.raises(SystemExit) as left:
        main(["describe", "pfedhn", "method.head_rank=4"])
    assert not left.value.code
    assert asked[0].settings.head_rank == 4
    assert capsys.readouterr().out.splitlines() == [
        "Task x",
        "target base: 1,000 numbers trained, 5 frozen",
        "server hyper_net: 101,000 numbers trained",
        "first round: 5 clients, 20.0 MB down, 0.004 MB up",
        "judged by: RMSE (in the target's unit), less is better",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("partition", [None, "iid"])
def test_whoever_does_not_say_whose_examples_are_is_told(
    partition: str | None, tmp_path: Path
) -> None:
    """Or who calls the column otherwise would train clients that there are not."""

    def told(**columns: Any) -> str:
        data = saved(table(label=np.arange(N) % 2, **columns), tmp_path / "mine.csv")
        dealt = [f"task.partition={partition}"] if partition else []
        keys = [f"task={data}", "task.novel=0", "task.test=0.5", "task.val=0", *dealt]
        return describe(load("fedavg", [*keys, "task.clients=4"])).task.splitlines()[-1]

    made_up = f"the 4 clients are made up, and dealt to by {partition or 'class_shares'}; whose an"
    assert told(client=None).startswith(made_up)
    assert told().startswith(made_up) == bool(partition)
    assert "made up" not in describe(load("fedavg", [])).task

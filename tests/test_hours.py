"""The tool that estimates hours: what shares a measurement, and what a run comes to."""

from pathlib import Path

import pytest

from hours import cost, hours, measure, trainings
from hyperfed.errors import UserError
from hyperfed.methods import fedavg
from hyperfed.runs import config
from hyperfed.runs.settings import RunConfig
from hyperfed.trees import Tree

FEW = ["task.clients=5", "task.novel=0.2", "rounds=10", "evaluate_every=4"]


def loaded(method: str, *settings: str) -> RunConfig:
    return config.load(method, [*FEW, *settings])


def test_what_takes_no_time_shares_a_measurement_and_what_does_has_its_own() -> None:
    one = cost(loaded("fedavg"))
    for alike in ("rounds=99", "method.local_lr=0.5", "task.alpha=3.0", "cohort=2", "seed=4"):
        assert cost(loaded("fedavg", alike)) == one, alike
    for other in ("method.local_steps=7", "task.clients=6", "method.batch_size=3", "task.hidden=9"):
        assert cost(loaded("fedavg", other)) != one, other


def test_a_run_takes_its_visits_and_its_evaluations() -> None:
    # Ten rounds of two clients, evaluated after 4, 8 and 10.
    assert hours(loaded("fedavg", "cohort=2"), (9.0, 9.0, 5.0)) == pytest.approx(195 / 3600)
    # Half of four clients; six of its rounds are of phase 1.
    phased = loaded("itpfl", "cohort=0.5", "method.phase_one_rounds=6")
    assert hours(phased, (1.0, 10.0, 5.0)) == pytest.approx((2 * (6 + 40) + 15) / 3600)
    # One that is over before its first phase is has no rounds of the second.
    phased = loaded("lg_fedavg", "cohort=0.5", "method.pretrain_rounds=99")
    assert hours(phased, (1.0, 10.0, 5.0)) == pytest.approx((2 * 10 + 15) / 3600)


def test_nothing_is_told_of_a_table_whose_data_say_how_many_clients_there_are() -> None:
    with pytest.raises(UserError, match="its table must say how many clients there are"):
        measure(config.load("fedavg"))


def test_both_phases_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 6, 10, 12, 20, 39])  # rounds of 6, 2 and, with the evaluation, 19 seconds
    monkeypatch.setattr("hours.time.process_time", lambda: next(clock))
    phased = loaded("itpfl", "method.phase_one_rounds=6", "cohort=4", "method.local_steps=1")
    assert measure(phased) == (6, 2, 17)


def test_one_client_is_timed_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    train = fedavg.Client.train_model

    def counted(self: fedavg.Client, model: Tree) -> Tree:
        trained.append(self.round)
        reply: Tree = train(self, model)
        return reply

    counted.__dict__["step"] = train.__dict__["step"]
    monkeypatch.setattr(fedavg.Client, "train_model", counted)
    measure(loaded("fedavg", "cohort=4", "method.local_steps=1", "robust.reply_bound=none"))
    assert trained == [0, 1, 2]


def test_newcomers_may_be_a_number_of_clients() -> None:
    share, number = (loaded("fedavg", "cohort=1.0", f"task.novel={of}") for of in (0.4, 2))
    assert hours(number, (9.0, 9.0, 5.0)) == hours(share, (9.0, 9.0, 5.0))


def test_trainings_are_those_that_are_reproduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "experiments" / "made" / "table1.toml"
    path.parent.mkdir(parents=True)
    path.write_text(TABLE)
    monkeypatch.setattr("hours.ROOT", tmp_path)
    found = trainings()
    assert list(found) == [
        ("made/table1", ("a-local", "b-local")),
        ("made/table1", ("a-fedavg", "b-fedavg")),
    ]
    assert [one.method for one in found.values()] == ["local", "fedavg"]


TABLE = """
[table]
paper = "Nobody, 2026"
title = "Digits"
set.task.partition = "dirichlet"

[measures.test]
metric = "test_accuracy"
place = "table 1"

[columns.a]
about = "digits"

[columns.b]
about = "digits, novel clients of another distribution"
set.task.novel_alpha = 0.5

[rows.local]
about = "Local"

[rows.fedavg]
about = "FedAvg"
"""

"""The comparison of all methods: who takes part in each federation, and that it can be run."""

from dataclasses import replace

import pytest
import torch

from all_methods import FEDERATIONS, method_of, server_rates, train
from hyperfed.data.settings import TaskConfig


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_federation_has_newcomers_and_visits_everybody(name: str) -> None:
    federation = FEDERATIONS[name]
    task = TaskConfig(**federation.task)
    assert task.clients is not None
    novel = round(task.novel * task.clients)
    assert novel >= 2
    assert federation.cohort <= task.clients - novel
    assert federation.visits >= 5


def test_clients_with_two_classes_are_as_many_as_their_name_says() -> None:
    for known in (10, 50, 100):
        task = FEDERATIONS[f"two_classes_{known}"].task
        assert task["clients"] - round(task["novel"] * task["clients"]) == known
        assert task["classes_per_client"] == 2


def test_rates_are_taken_from_a_federation_that_differs_in_a_number_alone() -> None:
    takes = [each for each in FEDERATIONS.values() if each.rates_of]
    assert len(takes) == 3
    for federation in takes:
        other = FEDERATIONS[federation.rates_of or ""]
        assert other.rates_of is None
        differs = {key for key, value in other.task.items() if federation.task[key] != value}
        assert differs in ({"clients"}, {"alpha"})
        assert replace(federation, task=other.task, rates_of=None) == other


def test_newcomers_without_labels_are_served_by_a_method_that_learned_to_do_without() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_unlabelled", few, 3, {})
    assert run.task.unlabelled
    assert run.config.settings.label_dropout == 0.5
    assert len(run.task.novel_ids) == 1
    assert run.summary["novel_accuracy"] is not None


def test_what_a_hypernetwork_is_worth_is_told_by_a_training_without() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_common", few, 3, {})
    one, other = (run.model(client).state_dict() for client in (0, 1))
    *names, _ = one  # the last are biases, with class frequencies
    assert all(torch.equal(one[name], other[name]) for name in names)
    assert not server_rates("headstart_common")
    assert len(server_rates("headstart")) == 3


def test_a_last_layer_of_its_own_stays_with_the_client() -> None:
    task = FEDERATIONS["own_labels"].task | {"clients": 6}
    few = replace(FEDERATIONS["own_labels"], task=task, rounds=10, local_steps=1, cohort=1)
    run = train("headstart_own_head", few, 3, {})
    assert run.config.settings.head_layers == 1
    assert method_of("headstart_own_head") == "headstart"
    assert len(server_rates("headstart_own_head")) == 3

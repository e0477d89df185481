"""PFLlib's dealing: the sizes that it prints, and each row by a plain loop over its draws."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

import hyperfed
from hyperfed.data import pfllib
from hyperfed.data.datasets import load
from hyperfed.data.partitions import TEST, TRAIN, UNUSED
from hyperfed.data.tasks import TaskConfig, build, divide
from hyperfed.errors import UserError

MNIST = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)
"""Images of each digit, both splits together."""

README_SIZES = [
    2630, 499, 1630, 2541, 1917, 6189, 1256, 1269, 3600, 4006,
    3116, 3772, 3613, 2134, 5730, 5448, 3628, 5653, 5266, 6103,
]  # fmt: skip
README_TRAIN = [
    1972, 374, 1222, 1905, 1437, 4641, 942, 951, 2700, 3004,
    2337, 2829, 2709, 1600, 4297, 4086, 2721, 4239, 3949, 4577,
]  # fmt: skip
README_LABELS = {
    0: {0: 140, 1: 890, 4: 1, 5: 319, 7: 29, 8: 1067, 9: 184},
    1: {0: 5, 2: 27, 5: 19, 6: 335, 8: 6, 9: 107},
    16: {0: 3628},
    19: {0: 310, 1: 1, 2: 1, 3: 1, 4: 5789, 9: 1},
}
"""What its README shows for MNIST, Dirichlet 0.1, twenty clients."""


def shuffled(counts, seed=5):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


def dealt(labels, clients, dealing, classes_per_client=2, alpha=0.1):
    return pfllib.deal(labels, clients, dealing, classes_per_client=classes_per_client, alpha=alpha)


def parts(owner, part, client):
    return [np.flatnonzero((owner == client) & (part == side)).tolist() for side in (TRAIN, TEST)]


def test_sizes_are_those_of_its_readme():
    labels = shuffled(MNIST)  # the sizes depend on no more than how many there are of each
    owner, part = dealt(labels, 20, "dirichlet")
    assert np.bincount(owner).tolist() == README_SIZES
    assert np.bincount(owner[part == TRAIN]).tolist() == README_TRAIN
    assert set(part) == {TRAIN, TEST}
    for client, expected in README_LABELS.items():
        found = zip(*np.unique(labels[owner == client], return_counts=True), strict=True)
        assert dict(found) == expected


def test_every_dirichlet_row_is_where_a_plain_loop_puts_it():
    labels = shuffled((70, 50, 60))
    owner, part = dealt(labels, 4, "dirichlet", alpha=0.2)
    np.random.seed(1)
    draws = 0
    while True:  # until each client has half of its fair share, which is less than 40
        draws += 1
        held = [[] for _ in range(4)]
        for label in range(3):
            rows = [row for row in range(180) if labels[row] == label]
            np.random.shuffle(rows)
            wanted = np.random.dirichlet([0.2] * 4)
            wanted = [w if len(own) < 180 / 4 else 0.0 for w, own in zip(wanted, held, strict=True)]
            ends = [int(sum(wanted[: k + 1]) / sum(wanted) * len(rows)) for k in range(3)]
            for client, (start, end) in enumerate(pairwise([0, *ends, len(rows)])):
                held[client] += rows[start:end]
        if min(map(len, held)) >= 22:
            break
    assert draws > 1
    for client, own in enumerate(held):
        train, test = train_test_split(own, train_size=0.75)
        assert parts(owner, part, client) == [sorted(train), sorted(test)]


def test_every_pathological_row_is_where_a_plain_loop_puts_it():
    labels = shuffled((300, 200, 240, 260))
    owner, part = dealt(labels, 6, "pathological", classes_per_client=2)
    np.random.seed(1)
    held, wants = [[] for _ in range(6)], [2] * 6
    for label in range(4):
        rows = [row for row in range(1000) if labels[row] == label]
        takers = [client for client in range(6) if wants[client]][:3]  # 6 * 2 / 4 to a class
        most = len(rows) / 3
        # At least a tenth of an equal part, and a quarter of the 40 that a client needs.
        few = [np.random.randint(int(max(most / 10, 40 / 4)), int(most)) for _ in range(2)]
        for client, amount in zip(takers, [*few, len(rows) - sum(few)], strict=True):
            held[client] += rows[:amount]
            rows = rows[amount:]
            wants[client] -= 1
    assert [len(set(labels[own])) for own in held] == [2] * 6
    for client, own in enumerate(held):
        train, test = train_test_split(own, train_size=0.75)
        assert parts(owner, part, client) == [sorted(train), sorted(test)]


def test_classes_that_no_client_wants_are_nobodys():
    labels = shuffled((100,) * 6)
    owner, part = dealt(labels, 2, "pathological", classes_per_client=2)
    assert sorted(set(labels[owner >= 0])) == [0, 1, 2, 3]
    np.testing.assert_array_equal(owner == -1, part == UNUSED)


@pytest.mark.parametrize(
    ("labels", "clients", "settings", "told"),
    [
        (shuffled((3, 3)), 4, {"dealing": "pathological"}, "got 3 for 4; use fewer clients"),
        (shuffled((99,)), 2, {"dealing": "dirichlet", "alpha": 1e-9}, "in 1000 draws some had few"),
        (shuffled((9,) * 3), 9, {"dealing": "pathological", "classes_per_client": 1}, "client 0"),
    ],
)
def test_too_few_examples_are_refused(labels, clients, settings, told):
    with pytest.raises(UserError) as caught:
        dealt(labels, clients, **settings)
    assert told in str(caught.value)


@pytest.fixture
def config():
    return TaskConfig(clients=5, novel=0, partition="pfllib", pfllib="pathological")


def test_a_task_has_its_rows_whatever_the_seed(config):
    digits = load("digits")
    owner, part = dealt(digits.y.numpy(), 5, "pathological")
    for seed in (0, 1):
        task = build(config, seed)
        for client in range(5):
            rows = [task.train[client].tolist(), task.test[client].tolist()]
            assert rows == parts(owner, part, client)
            assert not len(task.val[client])


def test_settings_of_the_dealing_arrive(config):
    labels = load("digits").y.numpy()
    three = divide(replace(config, classes_per_client=3), load("digits"), 0)
    assert [len(np.unique(labels[rows])) for rows in three.train] == [3] * 5
    for alpha in (0.5, 5.0):
        dirichlet = divide(replace(config, pfllib="dirichlet", alpha=alpha), load("digits"), 0)
        owner, _ = dealt(labels, 5, "dirichlet", alpha=alpha)
        sizes = [len(t) + len(v) for t, v in zip(dirichlet.train, dirichlet.test, strict=True)]
        assert sizes == np.bincount(owner).tolist()


def test_validation_takes_a_share_of_each_clients_training_examples(config):
    whole, split = (divide(replace(config, val=val), load("digits"), 0) for val in (None, 0.2))
    for client in range(5):
        train, val = split.train[client], split.val[client]
        assert torch.cat([train, val]).sort().values.equal(whole.train[client])
        assert len(val) == round(0.2 * len(whole.train[client]))
        assert split.test[client].equal(whole.test[client])
    other = divide(replace(config, val=0.2), load("digits"), 1)
    assert not other.val[0].equal(split.val[0])


def test_a_fraction_is_of_what_somebody_holds(config):
    held = replace(config, clients=2, val=0.2)  # two classes each, of ten
    whole, half = (divide(replace(held, fraction=f), load("digits"), 0) for f in (1.0, 0.5))
    labels = load("digits").y
    for side in ("train", "val", "test"):
        for rows, of in zip(getattr(half, side), getattr(whole, side), strict=True):
            assert set(rows.tolist()) < set(of.tolist())
            assert len(rows) == round(len(of) / 2)
            assert set(labels[rows].tolist()) <= {0, 1, 2, 3}


def test_without_validation_the_last_round_counts(config):
    keys = {
        "task.clients": 5, "task.novel": 0.0, "task.partition": "pfllib", "task.fraction": 0.2,
    }  # fmt: skip
    run = hyperfed.train("fedavg", rounds=3, evaluate_every=1, **keys, **{"method.local_steps": 1})
    assert run.summary["best_round"] == 3
    assert run.summary["val_accuracy"] is None


def test_its_images_lie_between_minus_one_and_one(config):
    usual, task = (build(replace(config, normalize=how), 0) for how in ("statistics", "symmetric"))
    x = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)
    torch.testing.assert_close(task.transform(x), x / 127.5 - 1)
    assert usual.transform == load("digits").transform != task.transform
    assert usual.fingerprint != task.fingerprint

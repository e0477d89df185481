"""Novel clients: dealt to anew, by another alpha, few examples, corrupted images."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hyperfed.data import division
from hyperfed.data.corruptions import corrupt_novel
from hyperfed.data.division import novel_dealt_anew
from hyperfed.data.shift import nearest_total_variation
from hyperfed.data.tasks import TaskConfig, build, divide
from hyperfed.errors import UserError
from made_examples import all_indices, class_proportions, made


def test_novel_clients_dealt_to_anew_are_dealt_all_before_they_keep_few():
    config = TaskConfig(partition="dirichlet", alpha=0.5, clients=10, novel=4)
    few, anew = replace(config, examples_per_client=20), {"novel_alpha": 0.3}
    every = build(config, seed=0, served=replace(config, **anew))
    kept = build(few, seed=0, served=replace(few, **anew))
    for client in range(10):
        assert len(kept.train[client]) == min(20, len(every.train[client]))
        assert set(kept.train[client].tolist()) <= set(every.train[client].tolist())
    assert torch.equal(torch.cat(kept.train[:6]), torch.cat(build(few, seed=0).train[:6]))


def test_novel_clients_dealt_to_anew_keep_few_examples_and_their_codes():
    config = TaskConfig(partition="dirichlet", alpha=1.0, examples_per_client=5, label_codes=2)
    trained = build(config, seed=3)
    served = build(config, seed=3, served=replace(config, novel_alpha=10.0))
    known = torch.cat(trained.train[:18])
    assert torch.equal(known, torch.cat(served.train[:18]))
    assert torch.equal(trained.y[known], served.y[known])
    assert {len(own) for own in served.train[18:]} == {5}
    labels = build(TaskConfig(), seed=0).y
    for client in (18, 19):
        own = torch.cat([served.train[client], served.val[client], served.test[client]])
        assert torch.equal(served.y[own], (labels[own] + 5 * (client % 2)) % 10)


def test_novel_clients_without_an_alpha_of_their_own_are_dealt_to_as_all_are():
    config = TaskConfig(partition="dirichlet", alpha=0.2, novel_alpha=10.0, novel=4)
    theirs, named = (
        build(config, seed=0, served=replace(config, novel_alpha=alpha)) for alpha in (None, 0.2)
    )
    for client in theirs.novel_ids:
        assert torch.equal(theirs.train[client], named.train[client])


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_equal"])
def test_novel_clients_may_have_another_alpha(name):
    examples = made(50_000)
    config = TaskConfig(clients=100, partition=name, alpha=0.1, novel_alpha=10.0)
    proportions = class_proportions(divide(config, examples, seed=0).train, examples.y)
    known, novel = proportions[:90], proportions[90:]
    assert novel.max(dim=1).values.mean() < 0.5 < known.max(dim=1).values.mean()
    others = divide(replace(config, novel_alpha=None), examples, seed=0)
    alike = class_proportions(others.train, examples.y)
    far, near = (
        nearest_total_variation(rows[90:], rows[:90]).mean() for rows in (proportions, alike)
    )
    assert far > near


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_equal"])
def test_novel_clients_are_dealt_anew_from_what_they_hold_and_known_ones_are_not(name):
    config = TaskConfig(clients=16, partition=name, alpha=0.5, novel=0.25, val=0.25, test=0.25)
    before = build(config, seed=0)
    again = build(config, seed=0, served=replace(config, novel_alpha=None))
    assert again.fingerprint == before.fingerprint
    found = {}
    for alpha in (0.2, 1e9):
        task = build(config, seed=0, served=replace(config, novel_alpha=alpha, unlabelled=True))
        assert task.unlabelled
        assert task.fingerprint != before.fingerprint
        assert all(
            torch.equal(mine, other)
            for mine, other in zip(
                task.models["base"].parameters(), before.models["base"].parameters(), strict=True
            )
        )
        for ours, theirs in zip(
            (task.train, task.val, task.test), (before.train, before.val, before.test), strict=True
        ):
            for client in before.known:
                assert torch.equal(ours[client], theirs[client])
            assert torch.equal(all_indices(ours[12:]), all_indices(theirs[12:]))
            assert not torch.equal(ours[12], theirs[12])
            counts = [torch.bincount(task.y[own], minlength=10) for own in ours[12:]]
            found[alpha] = torch.stack(counts)
            if alpha == 1e9 and name == "dirichlet":  # an equal part of each class that there is
                assert np.ptp(found[alpha].numpy(), axis=0).max() <= 1
        if name == "dirichlet_equal":
            assert [*map(len, task.train[12:])] == [*map(len, before.train[12:])]
    # Of equal sizes, the last to take have what is left, whatever their alpha.
    spread = {alpha: count.double().std(dim=0).sum() for alpha, count in found.items()}
    assert spread[0.2] > 1.5 * spread[1e9]


def test_what_novel_clients_are_dealt_anew_follows_from_the_seed():
    examples = made(10_000)
    config = TaskConfig(clients=8, partition="dirichlet", alpha=0.5, novel=4)
    dealt = divide(config, examples, seed=0)
    for alpha, alike in ((0.5, False), (1e9, True)):  # of a large one, all shares are the same
        anew = replace(config, novel_alpha=alpha)
        first, again, other = (novel_dealt_anew(dealt, anew, examples, s).train for s in (1, 1, 2))
        assert all(map(torch.equal, first, again))
        assert not torch.equal(first[4], other[4])
        counts = [torch.bincount(examples.y[own[4]], minlength=10) for own in (first, other)]
        assert ((counts[0] - counts[1]).abs() <= 1).all() == alike


@pytest.mark.parametrize("name", ["blur", "rotation", "brightness", "contrast"])
def test_only_novel_clients_images_are_corrupted(name):
    seed = 2  # its angles are large enough to move a pixel of 8 x 8
    digits, task = (build(TaskConfig(novel_corruption=c), seed) for c in (None, name))
    for split, same in (
        (task.train, digits.train),
        (task.val, digits.val),
        (task.test, digits.test),
    ):
        for client in range(20):
            assert torch.equal(split[client], same[client])
            unchanged = (task.x[split[client]] == digits.x[split[client]]).all(dim=(1, 2, 3))
            assert unchanged.all() if client in task.known else not unchanged.all()
    expected = corrupt_novel(digits.x, digits, novel=2, name=name, seed=seed)
    assert torch.equal(task.x, expected)
    assert task.x.dtype == torch.uint8
    assert task.x.is_contiguous(memory_format=torch.channels_last)
    assert task.transform == digits.transform
    assert task.fingerprint != digits.fingerprint
    assert task.fingerprint == build(TaskConfig(novel_corruption=name), seed).fingerprint


def test_only_images_can_be_corrupted(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((90, 5), dtype=np.float32), y=np.arange(90) % 3)
    config = TaskConfig(
        name=str(tmp_path / "mine.npz"),
        clients=4,
        partition="iid",
        novel=0.5,
        novel_corruption="blur",
    )
    with pytest.raises(UserError, match=r"only images can be corrupted, .* got shape \(\d+, 5\)"):
        build(config, seed=0)


def test_novel_clients_are_dealt_by_streams_of_their_own(monkeypatch):
    asked, real = [], division.random_source
    monkeypatch.setattr(division, "random_source", lambda *of: asked.append(of) or real(*of))
    config = TaskConfig(clients=8, novel=2, partition="dirichlet", val=0.1, test=0.1)
    dealt = divide(config, made(), 3)
    novel_dealt_anew(dealt, replace(config, novel_alpha=1.0), made(), 3)
    assert len({*asked}) == len(asked) == 5
    assert {seed for seed, _ in asked} == {3}

"""Who gets which example: every partition, fractions, splits of the data and few examples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hyperfed.data import division
from hyperfed.data.partitions import keep_few
from hyperfed.data.tasks import TaskConfig, divide
from hyperfed.errors import UserError
from made_examples import BY_SHARES, FEW, all_indices, class_proportions, made


@pytest.mark.parametrize("name", BY_SHARES)
def test_every_partition_gives_each_client_the_same_proportions_on_every_split(name):
    examples = made(20_000, clients=10)
    config = TaskConfig(clients=10, partition=name, alpha=1.0, val=0.25, test=0.25)
    partition = divide(config, examples, seed=0)
    indices = all_indices(partition.train, partition.val, partition.test)
    assert len(indices.unique()) == len(indices)
    if name not in ("equal_classes", "majority"):  # which leave some of a class unused
        assert len(indices) == 20_000
    for client in range(10):
        of_train = torch.bincount(examples.y[partition.train[client]], minlength=10)
        for split in (partition.val, partition.test):
            count = torch.bincount(examples.y[split[client]], minlength=10)
            if name in ("natural", "shuffled"):  # whatever the label
                assert len(split[client]) == 500
            else:
                assert ((of_train / 2 - count).abs() <= 2).all()


def counted(split, examples):
    """How many of each class each client has."""
    return [torch.bincount(examples.y[own], minlength=examples.classes).tolist() for own in split]


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({"partition": "shuffled", "val": None}, lambda dealt, _: all_indices(dealt.test)),
        ({"partition": "natural"}, lambda dealt, _: all_indices(dealt.train)),
        ({"partition": "iid", "fraction": 0.5}, lambda dealt, _: all_indices(dealt.train)),
        ({"partition": "pfllib", "fraction": 0.5}, lambda dealt, _: all_indices(dealt.train)),
        ({"partition": "pfllib", "examples_per_client": 5}, lambda dealt, _: dealt.train[0]),
        ({"partition": "shuffled"}, lambda dealt, _: dealt.train[0]),
        ({"partition": "iid"}, lambda dealt, _: dealt.train[0]),
        (
            {"partition": "equal_classes", "class_sets": [[0, 1], [1, 2], [3], [4, 5]]},
            lambda dealt, _: dealt.train[0],
        ),
        ({"partition": "dirichlet"}, lambda dealt, of: counted(dealt.train, of)),
    ],
)
def test_each_draw_of_a_division_alone_follows_from_the_seed(settings, drawn):
    own = None if settings.get("val", 0.0) is None else torch.arange(2000) >= 1500
    examples = made(clients=20, held_out=own)  # with its own split, none is drawn to test on
    config = TaskConfig(**{"clients": 4, "novel": 0, "val": 0.0} | settings)
    found = [torch.as_tensor(drawn(divide(config, examples, s), examples)) for s in (1, 1, 2, 3)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[2], found[3])


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "equal_classes"},
        {"partition": "equal_classes", "class_sets": [[k % 10, 9] for k in range(9)] + [[8, 9]]},
        {"partition": "majority", "majority_ratio": 5.0},
    ],
)
def test_clients_have_equal_amounts_of_classes_of_which_there_are_more_and_less(settings):
    y = torch.arange(10).repeat_interleave(torch.arange(100, 1100, 100))
    config = TaskConfig(clients=10, novel=0, **settings)
    sizes = held_by(divide(config, replace(made(len(y)), y=y), seed=0))[0]
    assert np.ptp(sizes) <= 10  # rounded in each class


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "class_shares"},
        {"partition": "class_shares", "shares": "official"},
        {"partition": "equal_classes"},
        {"partition": "shards"},
    ],
)
def test_the_classes_of_a_client_are_as_many_as_is_asked_for(settings):
    examples = made()
    dealt = divide(TaskConfig(clients=10, classes_per_client=1, **settings), examples, seed=0)
    assert [len(examples.y[own].unique()) for own in dealt.train] == [1] * 10


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_equal", "dirichlet_per_class"])
def test_a_large_alpha_gives_each_client_as_much_of_each_class(name):
    examples = made()
    config = TaskConfig(clients=10, partition=name, alpha=1e9)
    counts = np.array(counted(divide(config, examples, seed=0).train, examples))
    assert np.abs(counts - 14).max() <= 1  # .7 of 200 of each class, over ten clients


def test_clients_of_coarse_classes():
    examples = made(2000)
    config = TaskConfig(clients=10, partition="coarse")
    partition = divide(config, examples, seed=0)
    held = [examples.y[own].unique().tolist() for own in partition.train]
    assert sorted(held) == sorted([[2 * c, 2 * c + 1] for c in range(5)] * 2)
    assert held != sorted(held)
    assert [len(own) for own in partition.train] == [140] * 10  # .7 of 200 of each class, halved


def held_by(partition):
    return [
        np.array([len(own) for own in split])
        for split in (partition.train, partition.val, partition.test)
    ]


@pytest.mark.parametrize("name", BY_SHARES)
def test_a_fraction_is_the_same_of_every_class_and_client(name):
    examples = made(20_000, clients=10)
    config = TaskConfig(clients=10, partition=name, alpha=1.0, val=0.25, test=0.25)
    whole = divide(config, examples, seed=0)
    tenth = divide(replace(config, fraction=0.1), examples, seed=0)
    assert tenth.fingerprint != whole.fingerprint
    assert tenth.fingerprint == divide(replace(config, fraction=0.1), examples, 0).fingerprint
    indices = all_indices(tenth.train, tenth.val, tenth.test)
    assert len(indices.unique()) == len(indices)
    splits = zip(
        (tenth.train, tenth.val, tenth.test), (whole.train, whole.val, whole.test), strict=True
    )
    for few, many in splits:
        for client in range(10):  # to within one of each class
            assert len(few[client]) == pytest.approx(len(many[client]) / 10, abs=10)
        if name == "natural":  # the same clients, with some of their own
            for client in range(10):
                assert set(few[client].tolist()) < set(many[client].tolist())
        else:
            used, of = (torch.bincount(examples.y[torch.cat(own)]) for own in (few, many))
            assert ((used - of / 10).abs() <= 1).all()


def test_a_fraction_keeps_the_official_test_split_apart():
    held_out = torch.arange(2000) < 500
    config = TaskConfig(clients=4, partition="iid", fraction=0.2)
    partition = divide(config, made(held_out=held_out), seed=0)
    assert held_out[all_indices(partition.test)].all()
    assert not held_out[all_indices(partition.train, partition.val)].any()
    assert [size.sum() for size in held_by(partition)] == pytest.approx([240, 60, 100], abs=5)


def test_a_fraction_leaves_a_natural_client_one_example_of_each_side():
    config = TaskConfig(clients=20, partition="natural", novel=0, fraction=0.01)
    partition = divide(config, made(400, clients=20), seed=0)
    assert [size.tolist() for size in held_by(partition)] == [[1] * 20] * 3


def test_ten_clients_of_a_tenth_have_as_much_as_a_hundred_of_all():
    examples = made(20_000)
    many = TaskConfig(clients=100, partition="majority")
    few = replace(many, clients=10, fraction=0.1)
    sizes = [held_by(divide(config, examples, seed=0))[0].mean() for config in (many, few)]
    # The most contended class sets the amount, and that varies with the draw.
    assert sizes[1] == pytest.approx(sizes[0], rel=0.3)


def test_a_majority_is_as_many_times_the_others_as_is_asked_for():
    examples = made(20_000)
    for ratio in (2.0, 5.0):
        config = TaskConfig(
            clients=10, partition="majority", classes_per_client=1, majority_ratio=ratio
        )
        shares = class_proportions(divide(config, examples, seed=0).train, examples.y)
        most, *others = shares.sort(dim=1, descending=True).values.unbind(dim=1)
        assert (most / torch.stack(others).mean(dim=0)).mean() == pytest.approx(ratio, rel=0.1)


def test_equal_dirichlet_clients_train_on_equally_many_examples():
    config = TaskConfig(clients=100, partition="dirichlet_equal", alpha=0.1)
    partition = divide(config, made(50_000), seed=0)
    train, val, test = held_by(partition)
    assert set(train) == {350}
    assert np.abs(val - 75).max() <= 10
    assert np.abs(test - 75).max() <= 10
    assert class_proportions(partition.train, made(50_000).y).max(dim=1).values.mean() > 0.5


def test_shuffled_examples_are_dealt_out_equally_and_in_random_order():
    examples = made(1798)
    partition = divide(FEW, examples, seed=0)
    for split, sizes in zip(held_by(partition), ({13, 14}, {7, 8}, {9}), strict=True):
        assert set(split) == sizes
    indices = all_indices(partition.train, partition.val, partition.test)
    assert indices.tolist() == list(range(1798))
    holders = torch.stack([torch.bincount(examples.y[own], minlength=10) for own in partition.test])
    assert {0, 1, 2, 3} <= set(holders.flatten().tolist())  # not one of each class
    assert divide(FEW, examples, seed=1).fingerprint != partition.fingerprint
    assert divide(FEW, examples, seed=0).fingerprint == partition.fingerprint


@pytest.mark.parametrize("clients", [60, 150])
def test_iid_examples_are_dealt_out_equally_of_each_class_and_altogether(clients):
    examples = made(6000)
    partition = divide(replace(FEW, clients=clients, partition="iid"), examples, seed=0)
    for held, size in zip(held_by(partition), (2700, 1500, 1800), strict=True):
        assert set(held) <= {size // clients, -(-size // clients)}
    for split in (partition.train, partition.val, partition.test):
        counts = torch.stack([torch.bincount(examples.y[own], minlength=10) for own in split])
        assert (counts.amax(dim=0) - counts.amin(dim=0)).max() <= 1
    indices = all_indices(partition.train, partition.val, partition.test)
    assert indices.tolist() == list(range(6000))


def test_a_client_keeps_a_few_of_its_training_examples():
    examples = made(1800)
    whole = divide(FEW, examples, seed=0)
    twelve, five = (keep_few(whole, count, seed=0) for count in (12, 5))
    for client in range(60):
        many, some, few = (set(p.train[client].tolist()) for p in (whole, twelve, five))
        assert few < some < many
        assert (len(some), len(few)) == (12, 5)
        assert five.train[client].tolist() == sorted(few)
    for split in ("val", "test"):
        pairs = zip(getattr(five, split), getattr(whole, split), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    # What is drawn depends on seed and client, and is not simply the first.
    places = [torch.isin(w, f).tolist() for w, f in zip(whole.train, five.train, strict=True)]
    assert len(set(map(tuple, places))) > 50
    assert keep_few(whole, 5, seed=1).fingerprint != five.fingerprint
    assert keep_few(whole, 99, seed=0).fingerprint == whole.fingerprint


def test_configurations_differ_in_their_partition():
    examples = made(clients=10)
    fingerprints = {
        divide(TaskConfig(clients=10, alpha=1.0, partition=name), examples, seed=0).fingerprint
        for name in (*BY_SHARES, "pfllib")
    }
    fingerprints.add(
        divide(TaskConfig(clients=10, shares="official"), examples, seed=0).fingerprint
    )
    assert len(fingerprints) == len(BY_SHARES) + 2


@pytest.mark.parametrize("name", ["class_shares", "dirichlet", "shuffled", "natural"])
def test_what_is_tested_on_does_not_follow_from_the_validation_fraction(name):
    examples = made(clients=10)
    usual, other = (
        divide(TaskConfig(clients=10, partition=name, val=val, test=0.25), examples, seed=0).test
        for val in (0.15, 0.3)
    )
    assert torch.equal(all_indices(usual), all_indices(other))
    for one, another in zip(usual, other, strict=True):
        assert len(one) == len(another)
        assert name != "natural" or torch.equal(one, another)


def test_official_shares_leave_a_third_of_ten_clients_data():
    partition = divide(TaskConfig(clients=10, shares="official"), made(), seed=0)
    indices = all_indices(partition.train, partition.val, partition.test)
    assert len(indices) == pytest.approx(2000 * 2 / 3, rel=0.1)


def test_an_official_test_split_is_kept_and_a_fifth_of_the_rest_validates():
    held_out = torch.arange(2000) < 500
    config = TaskConfig(clients=4, partition="iid")
    partition = divide(config, made(held_out=held_out), seed=0)
    assert torch.equal(all_indices(partition.test), held_out.nonzero().flatten())
    assert len(all_indices(partition.val)) == pytest.approx(300, abs=5)  # rounded in each class


def test_mnist_validates_on_10000_of_its_training_images():
    # MNIST's own: a sixth of each class, rounded, would make 10,001.
    sizes = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    digit = np.concatenate([np.repeat(np.arange(10), sizes), np.arange(10_000) % 10])
    examples = made(70_000, held_out=torch.arange(70_000) >= 60_000)
    examples = replace(examples, y=torch.from_numpy(digit))
    config = TaskConfig(clients=4, partition="iid")
    found = {
        name: [int(size.sum()) for size in held_by(divide(each, replace(examples, name=name), 0))]
        for name, each in (("mnist", config), ("made", config))
    }
    assert found == {"mnist": [50_000, 10_000, 10_000], "made": [48_000, 12_000, 10_000]}
    asked = divide(replace(config, val=0.5), replace(examples, name="mnist"), seed=0)
    assert held_by(asked)[1].sum() == pytest.approx(30_000, abs=5)  # rounded in each class


def test_a_test_fraction_pools_the_official_split():
    held_out = torch.arange(2000) < 500
    config = TaskConfig(clients=4, partition="iid", val=0.1, test=0.1)
    partition = divide(config, made(held_out=held_out), seed=0)
    sizes = [len(all_indices(s)) for s in (partition.train, partition.val, partition.test)]
    assert sizes == [1600, 200, 200]
    assert not held_out[all_indices(partition.test)].all()


def test_without_an_official_split_it_is_70_15_15():
    partition = divide(TaskConfig(clients=4, partition="iid"), made(), seed=0)
    sizes = [len(all_indices(s)) for s in (partition.train, partition.val, partition.test)]
    assert sizes == [1400, 300, 300]


def test_natural_clients_are_drawn_and_kept_whole():
    examples = made(2000, clients=20)
    partition = divide(TaskConfig(clients=5, partition="natural"), examples, seed=0)
    owners = []
    for client in range(5):
        own = torch.cat([s[client] for s in (partition.train, partition.val, partition.test)])
        assert examples.client is not None
        (natural,) = examples.client[own].unique().tolist()
        assert len(own) == 100
        owners.append(natural)
    assert len(set(owners)) == 5
    assert owners != sorted(owners)


def test_natural_clients_keep_an_official_split_only_if_all_are_on_both_sides():
    both = torch.arange(2000) >= 1500
    partition = divide(
        TaskConfig(clients=20, partition="natural"), made(clients=20, held_out=both), seed=0
    )
    assert torch.equal(all_indices(partition.test), both.nonzero().flatten())
    apart = torch.arange(2000) % 20 >= 15  # clients 15 to 19 are held out altogether
    partition = divide(
        TaskConfig(clients=20, partition="natural"), made(clients=20, held_out=apart), seed=0
    )
    assert [len(own) for own in partition.test] == [15] * 20
    assert [len(own) for own in partition.train] == [70] * 20


@pytest.mark.parametrize("own_split", [False, True])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", ["natural", "class_shares", "shuffled", "iid"])
def test_no_text_is_shared_between_training_and_what_is_held_out(name, fraction, own_split):
    place = torch.arange(2000) // 20  # of an example in its client's text
    overlaps = torch.full((2000,), 4)
    if own_split:  # which text is not shared across
        overlaps = torch.where(place < 70, (69 - place).clamp(max=4), overlaps)
    examples = replace(
        made(2000, clients=20, held_out=(place >= 70) & own_split), overlaps=overlaps
    )
    config = TaskConfig(clients=20, partition=name, fraction=fraction)
    partition = divide(config, examples, seed=0)
    dealt = {split: all_indices(getattr(partition, split)) for split in ("train", "val", "test")}
    pairs = (("train", "val", 4), ("train", "test", 4), ("val", "test", 0 if own_split else 4))
    for own, later, shared in pairs:
        for client in range(20):
            before, after = (
                place[dealt[split][dealt[split] % 20 == client]] for split in (own, later)
            )
            assert len(before)
            assert len(after)
            assert before.max() + shared < after.min()


def test_texts_that_overlap_are_not_drawn_from_as_pfllib_does():
    examples = replace(made(2000, clients=20), overlaps=torch.full((2000,), 4))
    with pytest.raises(UserError, match=r"share nothing, .* those of made overlap; choose another"):
        divide(TaskConfig(clients=20, partition="pfllib"), examples, seed=0)


def test_equal_shares_are_equal_and_the_default_ones_are_not():
    examples = made(4000)
    config = TaskConfig(clients=10, shares="paper", val=0.0)
    for shares, low, equal in (
        ("paper", 0.4, False),
        ("paper", 0.6, True),
        ("official", 0.6, True),
    ):
        own = replace(config, shares=shares, share_low=low)
        sizes = held_by(divide(own, examples, seed=0))[0]
        assert (np.ptp(sizes) <= 2) == equal
    explicit = replace(config, share_low=0.4, share_high=0.6)
    same = [divide(each, examples, seed=0).fingerprint for each in (config, explicit)]
    assert same[0] == same[1]
    wide = divide(replace(config, share_low=0.6, share_high=6.0), examples, seed=0)
    assert np.ptp(held_by(wide)[0]) > 100


def test_clients_of_classes_that_are_named():
    sets = [[0, 1, 2], [0, 1, 2], [7]]
    given = {"clients": 3, "partition": "equal_classes", "novel": 0.0}
    partition = divide(TaskConfig(**given, class_sets=sets), made(2000), seed=0)
    for split in (partition.train, partition.test):
        assert [made(2000).y[own].unique().tolist() for own in split] == sets
    for wrong in ({"partition": "iid"}, {"clients": 4}):
        with pytest.raises(ValidationError, match="one set for each client, got partition="):
            TaskConfig(**given | wrong, class_sets=sets)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"partition": "iid"},
        {"partition": "shuffled"},
        {"partition": "pfllib", "val": 0.1},
        {"partition": "dirichlet"},
    ],
)
def test_each_draw_has_a_stream_of_its_own(keys, monkeypatch):
    asked, real = [], division.random_source
    monkeypatch.setattr(division, "random_source", lambda *of: asked.append(of) or real(*of))
    divide(TaskConfig(fraction=0.9, clients=5, **keys), made(), 3)
    assert len({*asked}) == len(asked) > 1
    assert {seed for seed, _ in asked} == {3}

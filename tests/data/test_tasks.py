"""Tasks from settings: the default, every partition, novel clients, model sizes, refusals."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hyperfed.data.arrays import examples_of
from hyperfed.data.partitions import keep_few
from hyperfed.data.shift import nearest_total_variation
from hyperfed.data.tasks import PARTITIONS, TaskConfig, build, divide, targets
from hyperfed.errors import UserError

BY_SHARES = tuple(name for name in PARTITIONS if name not in ("pfllib", "file"))
"""Those that hold out the same fractions of each class, or of each client."""


@pytest.fixture(scope="module")
def digits():
    return build(TaskConfig(), seed=0)


def made(count=2000, classes=10, clients=None, held_out=None):
    """Examples with shuffled, equally frequent labels; two classes to a coarse class."""
    y = torch.from_numpy(np.random.default_rng(0).permutation(np.arange(count) % classes))
    client = None if clients is None else torch.arange(count) % clients
    examples = examples_of("made", torch.zeros(count, 1), y, classes, client)
    examples = replace(examples, coarse=y // 2)
    return examples if held_out is None else replace(examples, held_out=held_out)


def all_indices(*splits):
    return torch.cat([index for split in splits for index in split]).sort().values


def test_the_default_is_digits_over_20_clients(digits):
    assert (digits.name, digits.clients, digits.novel, digits.classes) == ("digits", 20, 2, 10)
    assert len(digits.known) == 18
    assert not digits.unlabelled
    assert digits.sizes == ("base",) * 20
    # The paper's shares use up every class, so every example is somewhere, once.
    indices = all_indices(digits.train, digits.val, digits.test)
    assert indices.tolist() == list(range(1797))
    assert sum(map(len, digits.test)) == 360
    assert sum(map(len, digits.val)) == pytest.approx(0.2 * 1437, abs=5)
    for client in range(20):
        trained, tested = (
            digits.y[split[client]].unique().tolist() for split in (digits.train, digits.test)
        )
        assert len(trained) == 2
        assert tested == trained


def test_the_target_takes_what_the_transform_gives(digits):
    batch = digits.transform(digits.x[digits.train[0][:4]])
    assert batch.dtype == torch.float32
    assert digits.models["base"](batch).shape == (4, 10)


def test_a_seed_decides_the_partition_and_the_weights(digits):
    again, other = build(TaskConfig(), seed=0), build(TaskConfig(), seed=1)
    assert again.fingerprint == digits.fingerprint != other.fingerprint
    weights = [
        torch.cat([value.flatten() for value in task.models["base"].parameters()])
        for task in (digits, again, other)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


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


def test_equal_dirichlet_clients_train_on_equally_many_examples():
    config = TaskConfig(clients=100, partition="dirichlet_equal", alpha=0.1)
    partition = divide(config, made(50_000), seed=0)
    train, val, test = held_by(partition)
    assert set(train) == {350}
    assert np.abs(val - 75).max() <= 10
    assert np.abs(test - 75).max() <= 10
    assert partition.class_proportions.max(dim=1).values.mean() > 0.5


FEW = TaskConfig(clients=60, partition="shuffled", val=0.25, test=0.3, novel=1 / 6)


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


def test_a_client_keeps_a_few_of_its_training_examples():
    examples = made(1800)
    whole = divide(FEW, examples, seed=0)
    twelve, five = (keep_few(whole, count, examples.y, seed=0) for count in (12, 5))
    for client in range(60):
        many, some, few = (set(p.train[client].tolist()) for p in (whole, twelve, five))
        assert few < some < many
        assert (len(some), len(few)) == (12, 5)
        counts = torch.bincount(examples.y[five.train[client]], minlength=10)
        assert five.class_proportions[client].tolist() == pytest.approx((counts / 5).tolist())
        assert five.train[client].tolist() == sorted(few)
    for split in ("val", "test"):
        pairs = zip(getattr(five, split), getattr(whole, split), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    # What is drawn depends on seed and client, and is not simply the first.
    places = [torch.isin(w, f).tolist() for w, f in zip(whole.train, five.train, strict=True)]
    assert len(set(map(tuple, places))) > 50
    assert keep_few(whole, 5, examples.y, seed=1).fingerprint != five.fingerprint
    assert keep_few(whole, 99, examples.y, seed=0).fingerprint == whole.fingerprint


def test_a_task_of_few_examples_whose_clients_code_labels_differently(digits):
    plain = build(replace(FEW, examples_per_client=12), seed=0)
    coded = build(replace(FEW, examples_per_client=12, label_codes=3), seed=0)
    assert {len(own) for own in coded.train} == {12}
    for client in range(60):
        for split in ("train", "val", "test"):
            own = getattr(coded, split)[client]
            assert torch.equal(own, getattr(plain, split)[client])
            assert torch.equal(coded.y[own], (plain.y[own] + 3 * (client % 3)) % 10)
    unused = torch.ones(1797, dtype=torch.bool)
    unused[all_indices(coded.train, coded.val, coded.test)] = False
    assert unused.any()
    assert torch.equal(coded.y[unused], plain.y[unused])
    assert torch.equal(plain.y, digits.y)
    assert len({coded.fingerprint, plain.fingerprint, build(FEW, seed=0).fingerprint}) == 3
    with pytest.raises(UserError, match="label_codes must be at most 10, the classes of digits"):
        build(replace(FEW, label_codes=11), seed=0)


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
    trained = build(config, seed=0)
    served = build(config, seed=0, served=replace(config, novel_alpha=10.0))
    known = torch.cat(trained.train[:18])
    assert torch.equal(known, torch.cat(served.train[:18]))
    assert torch.equal(trained.y[known], served.y[known])
    assert {len(own) for own in served.train[18:]} == {5}
    labels = build(TaskConfig(), seed=0).y
    for client in (18, 19):
        own = torch.cat([served.train[client], served.val[client], served.test[client]])
        assert torch.equal(served.y[own], (labels[own] + 5 * (client % 2)) % 10)


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


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet_equal"])
def test_novel_clients_may_have_another_alpha(name):
    examples = made(50_000)
    config = TaskConfig(clients=100, partition=name, alpha=0.1, novel_alpha=10.0)
    proportions = divide(config, examples, seed=0).class_proportions
    known, novel = proportions[:90], proportions[90:]
    assert novel.max(dim=1).values.mean() < 0.5 < known.max(dim=1).values.mean()
    alike = divide(replace(config, novel_alpha=None), examples, seed=0).class_proportions
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


def test_three_widths_are_sizes_s_m_l_for_equal_groups():
    images = replace(made(), x=torch.zeros(2000, 1, 28, 28, dtype=torch.uint8))
    models = targets(TaskConfig(widths=(16, 8, 32)), images, seed=0)
    filters = {size: next(model.parameters()).shape[0] for size, model in models.items()}
    assert filters == {"M": 16, "S": 8, "L": 32}
    assert set(targets(TaskConfig(widths=(8, 12)), images, seed=0)) == {"width8", "width12"}


def test_hidden_sizes_reach_the_target():
    for hidden, expected in ((7, [7]), ((7, 5), [7, 5]), ((), []), (None, [200])):
        (net,) = targets(TaskConfig(model="mlp", hidden=hidden), made(), seed=0).values()
        outputs = [len(value) for name, value in net.named_parameters() if "bias" in name]
        assert outputs == [*expected, 10]


def test_sizes_reach_the_task(tmp_path):
    x = np.zeros((70, 1, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(70) % 2)
    config = TaskConfig(
        name=str(tmp_path / "mine.npz"), clients=7, partition="iid", widths=(2, 3, 4)
    )
    task = build(config, seed=0)
    assert sorted(map(task.sizes.count, "SML")) == [2, 2, 3]
    assert task.models["S"](task.transform(task.x[:2])).shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "x", "target"),
    [
        ("cifar10", torch.zeros(4, 3, 32, 32, dtype=torch.uint8), "LeNet"),
        ("omniglot", torch.zeros(4, 1, 28, 28, dtype=torch.uint8), "OmniglotNet"),
        ("digits", torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "MLP"),
        ("mine", torch.zeros(4, 7), "MLP"),
        ("shakespeare", torch.zeros(4, 80, dtype=torch.int64), "CharLSTM"),
    ],
)
def test_the_default_target_suits_the_data(name, x, target):
    examples = replace(made(4, 2), name=name, x=x)
    assert type(targets(TaskConfig(), examples, seed=0)["base"]).__name__ == target


def test_a_default_target_has_an_embedding_of_each_token(tmp_path):
    x, y = np.arange(60).reshape(12, 5), np.arange(12) % 2
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.arange(12) % 3)
    net = build(TaskConfig(name=str(tmp_path / "mine.npz"), novel=0), seed=0).models["base"]
    assert (net.embedding.num_embeddings, net.fc.out_features) == (60, 2)
    assert net(torch.from_numpy(x)).shape == (12, 2)
    np.savez(tmp_path / "mine.npz", x=x - 1, y=y, client=np.arange(12) % 3)
    with pytest.raises(UserError, match="tokens must be 0 or more, got -1 in mine"):
        build(TaskConfig(name=str(tmp_path / "mine.npz"), novel=0), seed=0)


def test_a_split_of_the_data_stands_against_other_dealings(tmp_path):
    said = np.array(["train", "train", "val", "test"] * 15)
    path, dealt = tmp_path / "mine.npz", tmp_path / "dealt.npz"
    np.savez(path, x=np.ones((60, 2)), y=np.arange(60) % 2, client=np.arange(60) // 15, split=said)
    config = TaskConfig(name=str(path), clients=4, novel=0)
    with pytest.raises(UserError, match=r"pfllib must be of data without a split .* mine has one"):
        build(replace(config, partition="pfllib"), seed=0)
    from_file = replace(config, partition="file", partition_file=dealt)
    part = np.array([0, 0, 1, 2] * 15)
    for row, purpose, refused in ((0, 0, False), (0, 1, False), (0, 2, True), (3, 0, True)):
        split = np.where(np.arange(60) == row, purpose, part)
        np.savez(dealt, client=np.arange(60) // 15, split=split)
        if refused:
            with pytest.raises(UserError, match=f"got another for row {row} .1 such.; correct it"):
                build(from_file, seed=0)
        else:
            assert sum(map(len, build(from_file, seed=0).val)) == 15 + (purpose == 1)


def test_an_npz_file_is_a_task(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "mine.npz",
        x=rng.normal(size=(90, 5)).astype(np.float32),
        y=np.arange(90) % 3,
        client=np.arange(90) % 6,
    )
    config = TaskConfig(name=str(tmp_path / "mine.npz"), clients=6, partition="natural", novel=0.5)
    task = build(config, seed=0)
    assert (task.name, task.clients, task.novel) == ("mine", 6, 3)
    assert task.models["base"](task.transform(task.x[:2])).shape == (2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"novel_alpha": 0.5},
            "novel_alpha needs partition=dirichlet or dirichlet_equal, got none",
        ),
        ({"novel_corruption": "fog"}, "blur"),
        ({"novel_corruption": "blur", "novel": 0}, "novel_corruption needs novel clients, got nov"),
        (
            {"novel_alpha": 0.5, "novel": 0, "partition": "dirichlet"},
            "novel_alpha needs novel clients, got nov",
        ),
        ({"partition": "file"}, "partition=file and partition_file go together, .*=None; give"),
        ({"partition_file": "dealt.npz"}, "go together, got partition=none and .*npz"),
        (
            {"partition": "file", "partition_file": "dealt.txt"},
            r"must end in \.npz or \.csv, got .*dealt\.txt",
        ),
        (
            {"partition": "file", "partition_file": "dealt.npz", "val": 0.0},
            "val must be left out with partition=file, .* got 0.0",
        ),
        (
            {"partition": "file", "partition_file": "dealt.npz", "test": 0.2},
            "test must be left out with partition=file",
        ),
        ({"partition": "pfllib", "test": 0.25}, "test must be left out with partition=pfllib"),
        ({"share_low": 0.7}, "share_low must be at most share_high, got 0.7 and 0.6"),
        ({"width": 8, "widths": (8, 16)}, "give width or widths, not both"),
        ({"widths": (8, 8)}, "widths must differ"),
        ({"val": 0.5, "test": 0.5}, "val . test must leave examples to train on"),
        ({"test": 0.0}, "test must be above 0, .* got 0; to train on all examples .* in split"),
        ({"clients": 2, "novel": 0.9}, "got 2 clients of which 2 are novel"),
        ({"clients": 0}, "greater than 0"),
        ({"partition": "random"}, "class_shares"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"fraction": 0.0}, "greater than 0"),
        ({"fraction": 1.1}, "less than or equal to 1"),
        ({"novel": 1.0}, "must be a number of clients, such as 3, or a fraction below 1"),
        ({"novel": -1}, "must be a number of clients"),
        ({"clients": 3, "novel": 3}, "got 3 clients of which 3 are novel"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TaskConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes_per_client": 11}, r"classes per client must lie in 1..10, got 11"),
        ({"clients": 1200, "partition": "iid"}, "got 1200 clients and 1150 training examples"),
        ({"clients": 2000, "partition": "iid"}, "clients must be 1797 at most, .* got 2000"),
        ({"partition": "natural"}, "digits has none; choose another partition"),
        ({"partition": "coarse"}, "needs coarse labels, and digits has none; choose another"),
        ({"novel_corruption": "saturation"}, "saturation needs colour images, .* got 1"),
        ({"model": "lenett"}, "did you mean 'lenet'"),
        ({"width": 8}, "the options of mlp are hidden"),
        ({"model": "mlp", "hidden": 3, "width": 8}, "the options of mlp are hidden, got width"),
        ({"name": "digit"}, "did you mean 'digits'"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        build(TaskConfig(**settings), seed=0)


def test_partitions_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="has 4 natural clients, got clients=5"):
        divide(TaskConfig(clients=5, partition="natural"), made(clients=4), seed=0)
    with pytest.raises(UserError, match=r"within each natural client.*use partition=natural"):
        divide(TaskConfig(), replace(made(clients=4), shared_labels=False), seed=0)
    with pytest.raises(UserError, match=r"needs coarse labels, and made has none; .* cifar100"):
        divide(TaskConfig(partition="coarse"), replace(made(), coarse=None), seed=0)
    crossed = replace(made(), coarse=torch.arange(2000) % 3)
    with pytest.raises(UserError, match=r"one coarse class for each class, .* has several"):
        divide(TaskConfig(partition="coarse"), crossed, seed=0)
    with pytest.raises(UserError, match="must have labels for partition=dirichlet, b"):
        divide(TaskConfig(partition="dirichlet"), replace(made(), classes=0), seed=0)


def test_every_setting_is_documented():
    assert TaskConfig.__doc__ is not None
    for field in fields(TaskConfig):
        assert f"        {field.name}: " in TaskConfig.__doc__


@pytest.mark.slow
def test_omniglot_has_an_alphabet_for_a_client(hyperfed_data):
    if not (hyperfed_data / "omniglot").is_dir():
        pytest.skip(f"NOT TESTED on real data: {hyperfed_data} has no omniglot")
    config = TaskConfig(
        name="omniglot", data_dir=str(hyperfed_data), clients=50, partition="natural", novel=0
    )
    task = build(config, seed=0)
    sizes = torch.tensor(
        [[len(s[c]) for s in (task.train, task.val, task.test)] for c in range(50)]
    )
    assert sizes.sum() == 32_460
    shares = sizes / sizes.sum(dim=1, keepdim=True)
    torch.testing.assert_close(
        shares, torch.tensor([0.7, 0.15, 0.15]).expand(50, 3), atol=0.005, rtol=0
    )
    assert task.classes == 55


@pytest.mark.slow
def test_cifar10_validates_on_10000_images(hyperfed_data):
    if not (hyperfed_data / "cifar10").is_dir():
        pytest.skip(f"NOT TESTED on real data: {hyperfed_data} has no cifar10")
    task = build(TaskConfig(name="cifar10", data_dir=str(hyperfed_data), clients=50), seed=0)
    sizes = [sum(map(len, split)) for split in (task.train, task.val, task.test)]
    assert sizes == [40_000, 10_000, 10_000]


def test_clients_of_classes_that_are_named():
    sets = [[0, 1, 2], [0, 1, 2], [7]]
    given = {"clients": 3, "partition": "equal_classes", "novel": 0.0}
    partition = divide(TaskConfig(**given, class_sets=sets), made(2000), seed=0)
    for split in (partition.train, partition.test):
        assert [made(2000).y[own].unique().tolist() for own in split] == sets
    for wrong in ({"partition": "iid"}, {"clients": 4}):
        with pytest.raises(ValidationError, match="one set for each client, got partition="):
            TaskConfig(**given | wrong, class_sets=sets)

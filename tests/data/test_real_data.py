"""The real data sets, where HYPERFED_DATA has them. Only the first run decodes them."""

from pathlib import Path

import pytest
import torch

from hyperfed.data.datasets import load
from hyperfed.data.tasks import TaskConfig, build, divide

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("real data")]  # decoded by one worker


@pytest.fixture
def real(hyperfed_data):
    """Loads a data set of the folder, or skips the test where it is not there."""

    def loaded(name, folder=None):
        if not (hyperfed_data / (folder or name)).is_dir():
            pytest.skip(f"NOT TESTED on real data: {hyperfed_data} has no {folder or name}")
        return load(name, hyperfed_data)

    return loaded


def test_cifar10(real):
    examples = real("cifar10")
    assert examples.x.shape == (60_000, 3, 32, 32)
    assert examples.x.dtype == torch.uint8
    assert torch.bincount(examples.y[examples.held_out]).tolist() == [1000] * 10
    assert torch.bincount(examples.y[~examples.held_out]).tolist() == [5000] * 10
    assert examples.mean == (0.4914, 0.4822, 0.4465)
    assert examples.std == (0.2023, 0.1994, 0.2010)
    # The images themselves, not only the constants: their mean is the published one.
    total = examples.x[~examples.held_out].sum(dim=(0, 2, 3), dtype=torch.int64)
    assert (total / (255 * 50_000 * 32 * 32)).tolist() == pytest.approx(examples.mean, abs=2e-3)


def test_cifar10_validates_on_10000_images(real, hyperfed_data):
    real("cifar10")
    task = build(TaskConfig(name="cifar10", data_dir=str(hyperfed_data), clients=50), seed=0)
    sizes = [sum(map(len, split)) for split in (task.train, task.val, task.test)]
    assert sizes == [40_000, 10_000, 10_000]


def test_cifar100_has_fine_and_coarse_labels(real):
    fine, rough = real("cifar100"), real("cifar100_coarse", folder="cifar100")
    assert (fine.classes, rough.classes) == (100, 20)
    assert fine.coarse is not None
    assert fine.mean == rough.mean == (0.5071, 0.4865, 0.4409)  # pFedHN's authors, and PeFLL's
    assert fine.std == rough.std == (0.2673, 0.2564, 0.2762)
    total = fine.x[~fine.held_out].sum(dim=(0, 2, 3), dtype=torch.int64)
    count = int((~fine.held_out).sum()) * 32 * 32
    assert (total / (255 * count)).tolist() == pytest.approx(fine.mean, abs=2e-3)
    assert torch.equal(rough.y, fine.coarse)
    assert torch.bincount(fine.y).tolist() == [600] * 100
    pairs = torch.stack([fine.y, fine.coarse], 1).unique(dim=0)
    assert len(pairs) == 100  # a fine class has one superclass,
    assert torch.bincount(pairs[:, 1]).tolist() == [5] * 20  # which has five
    assert fine.fingerprint != rough.fingerprint
    assert rough.coarse is None


def test_cifar100_has_five_clients_for_each_superclass(real):
    examples = real("cifar100")
    config = TaskConfig(name="cifar100", clients=100, partition="coarse")
    partition = divide(config, examples, seed=0)
    owners = []
    for train, test in zip(partition.train, partition.test, strict=True):
        (superclass,) = examples.coarse[torch.cat([train, test])].unique().tolist()
        owners.append(superclass)
        assert len(examples.y[train].unique()) == len(examples.y[test].unique()) == 5
        assert len(train) == pytest.approx(400, abs=5)
        assert len(test) == pytest.approx(100, abs=5)
    assert torch.bincount(torch.tensor(owners)).tolist() == [5] * 20
    every = torch.cat([*partition.train, *partition.val, *partition.test])
    assert every.sort().values.tolist() == list(range(60_000))


def test_mnist_has_writers(real):
    examples = real("mnist")
    assert examples.x.shape == (70_000, 1, 28, 28)
    assert int(examples.held_out.sum()) == 10_000
    assert examples.mean == pytest.approx((0.1307,), abs=1e-4)
    assert examples.std == pytest.approx((0.3081,), abs=1e-4)
    assert examples.client is not None
    assert len(examples.client[~examples.held_out].unique()) == 539
    assert len(examples.client[examples.held_out].unique()) == 297
    partition = divide(TaskConfig(name="mnist", clients=50), examples, seed=0)
    assert sum(map(len, partition.val)) == 10_000  # as many as of CIFAR (pFedHN, appendix C.1)
    assert sum(map(len, partition.train)) == 50_000


def test_fashion_mnist(real):
    examples = real("fashion_mnist")
    assert examples.x.shape == (70_000, 1, 28, 28)
    assert torch.bincount(examples.y[~examples.held_out]).tolist() == [6000] * 10


def test_pfllib_deals_mnist_as_its_readme_shows(real):
    examples = real("mnist")
    config = TaskConfig(name="mnist", partition="pfllib", pfllib="dirichlet", novel=0)
    partition = divide(config, examples, seed=0)
    train, test = ([len(rows) for rows in side] for side in (partition.train, partition.test))
    assert [a + b for a, b in zip(train, test, strict=True)] == [
        2630, 499, 1630, 2541, 1917, 6189, 1256, 1269, 3600, 4006,
        3116, 3772, 3613, 2134, 5730, 5448, 3628, 5653, 5266, 6103,
    ]  # fmt: skip
    assert test == [
        658, 125, 408, 636, 480, 1548, 314, 318, 900, 1002,
        779, 943, 904, 534, 1433, 1362, 907, 1414, 1317, 1526,
    ]  # fmt: skip


@pytest.mark.parametrize("clients", [10, 50, 100])
def test_lists_of_pfedhns_authors_divide_cifar10(real, clients):
    path = ROOT / "experiments" / "pfedhn" / f"authors-cifar10-{clients}.npz"
    config = TaskConfig(
        name="cifar10", clients=clients, novel=0, partition="file", partition_file=path
    )
    examples = real("cifar10")
    partition = divide(config, examples, seed=0)
    held = [len(examples.y[rows].unique()) for rows in partition.train]
    assert set(held) == {2}
    every = torch.cat([*partition.train, *partition.val, *partition.test])
    assert len(every.unique()) == len(every)
    assert examples.held_out[torch.cat(partition.test)].all()
    assert not examples.held_out[torch.cat([*partition.train, *partition.val])].any()
    if clients == 50:
        sizes = [sum(map(len, side)) for side in (partition.train, partition.val, partition.test)]
        assert sizes == [36_261, 9_029, 9_025]


def test_omniglot_numbers_characters_within_alphabets(real):
    examples = real("omniglot")
    assert examples.x.shape == (32_460, 1, 28, 28)
    assert (examples.classes, examples.shared_labels) == (55, False)
    assert not examples.held_out.any()
    assert examples.client is not None
    pairs, count = torch.stack([examples.client, examples.y], 1).unique(dim=0, return_counts=True)
    assert len(pairs) == 1623
    assert (count == 20).all()
    for alphabet in range(50):
        own = pairs[pairs[:, 0] == alphabet, 1]
        assert own.tolist() == list(range(len(own)))


def test_omniglot_has_an_alphabet_for_a_client(real, hyperfed_data):
    examples = real("omniglot")
    config = TaskConfig(
        name="omniglot", data_dir=str(hyperfed_data), clients=50, partition="natural", novel=0
    )
    task = build(config, seed=0)
    split = (task.train, task.val, task.test)
    sizes = torch.tensor([[len(side[client]) for side in split] for client in range(50)])
    assert sizes.sum() == 32_460
    for client in range(50):
        own = torch.cat([side[client] for side in split])
        assert len(examples.client[own].unique()) == 1
    shares = sizes / sizes.sum(dim=1, keepdim=True)
    torch.testing.assert_close(
        shares, torch.tensor([0.7, 0.15, 0.15]).expand(50, 3), atol=0.005, rtol=0
    )
    assert task.classes == 55


def test_shakespeare_gives_every_role_both_splits(real):
    examples = real("shakespeare")
    assert examples.x.shape[1:] == (80,)
    assert examples.x.dtype == examples.y.dtype == torch.int64
    assert int(examples.x.max()) < examples.classes < 100
    assert examples.client is not None
    clients = int(examples.client.max()) + 1
    assert clients > 50
    assert torch.bincount(examples.client[~examples.held_out], minlength=clients).min() >= 50
    assert torch.bincount(examples.client[examples.held_out], minlength=clients).min() >= 5

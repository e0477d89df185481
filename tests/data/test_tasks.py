"""Tasks from settings: the default, targets of several sizes, files and splits of the data."""

import inspect
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from hyperfed.data.tasks import TaskConfig, build, targets
from hyperfed.errors import UserError
from made_examples import FEW, all_indices, made


@pytest.fixture(scope="module")
def digits():
    return build(TaskConfig(), seed=0)


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


def test_three_widths_are_sizes_s_m_l_for_equal_groups():
    x = torch.zeros(2000, 1, 28, 28, dtype=torch.uint8)
    images = replace(made(), x=x, mean=(0.5,), std=(0.5,))
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
    assert build(config, seed=1).sizes != task.sizes  # whose they are follows from the seed
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
    half = (0.5,) * len(x[0])
    examples = replace(made(4, 2), name=name, x=x, mean=half, std=half)
    assert type(targets(TaskConfig(), examples, seed=0)["base"]).__name__ == target


@pytest.mark.parametrize(
    ("x", "model"),
    [
        (torch.arange(12).reshape(4, 3), "mlp"),
        (torch.rand(4, 3), "char_lstm"),
        (torch.rand(4, 3), "text_lstm"),
        (torch.arange(255, 267).reshape(4, 3), "text_lstm"),
    ],
)
def test_a_target_of_other_inputs_does_not_suit_the_data(x, model):
    told = f"{model} does not suit made:\n.* must take a batch of x, shape .2, 3. "
    with pytest.raises(UserError, match=told):
        targets(TaskConfig(model=model), replace(made(4, 2), x=x), seed=0)


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


def test_every_setting_is_documented():
    told = inspect.getdoc(TaskConfig)
    assert told is not None
    for field in fields(TaskConfig):
        assert f"    {field.name}: " in told

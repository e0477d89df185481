"""Data sets: what is read, what the cache does, and what is said when there is nothing to read."""

import io
import operator
import os
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open

from hyperfed.data import cache, datasets, folder_checks, readers
from hyperfed.data.datasets import Normalize, load
from hyperfed.data.examples import Examples, fingerprint_of
from hyperfed.errors import UserError
from hyperfed.nets import LeNet


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts the cache into a folder of the test's own and hides the real data."""
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYPERFED_DATA", raising=False)
    return tmp_path / "cache" / "datasets"


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return {"bytes": file.getvalue(), "path": None}


def write_split(folder, split, features=None, **columns):
    import datasets as huggingface

    folder.mkdir(parents=True, exist_ok=True)
    table = huggingface.Dataset.from_dict(columns, features=features)
    table.to_parquet(folder / f"{split}.parquet")


def write_images(folder, splits, **more):
    """Writes images with a class label of three names."""
    import datasets as huggingface

    for split, (pixels, labels) in splits.items():
        columns = {name: values[split] for name, values in more.items()}
        features = huggingface.Features(
            image=huggingface.Image(),
            label=huggingface.ClassLabel(names=["a", "b", "c"]),
            **{name: huggingface.Value("string") for name in more},
        )
        write_split(
            folder, split, features, image=[png(p) for p in pixels], label=labels, **columns
        )


@pytest.fixture
def small(tmp_path):
    """A folder of 6 + 3 colour images of 4 x 5 with their pixels and labels."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 4, 5, 3), dtype=np.uint8)
    labels = [0, 1, 2, 0, 1, 2, 2, 1, 0]
    splits = {"train": (pixels[:6], labels[:6]), "test": (pixels[6:], labels[6:])}
    write_images(tmp_path / "small", splits)
    return tmp_path / "small", pixels, labels


def test_digits_come_without_a_download():
    digits = load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.uint8
    assert digits.y.dtype == torch.int64
    assert (int(digits.x.min()), int(digits.x.max())) == (0, 255)
    assert digits.classes == 10
    of_class = torch.bincount(digits.y)
    held_out = torch.bincount(digits.y[digits.held_out])
    assert int(digits.held_out.sum()) == 360
    assert ((held_out - of_class / 5).abs() < 1).all()  # stratified
    training = digits.x[~digits.held_out].double() / 255
    assert digits.mean[0] == pytest.approx(training.mean().item(), abs=1e-4)
    assert digits.std[0] == pytest.approx(training.std(correction=0).item(), abs=1e-4)
    assert digits.fingerprint == load("digits").fingerprint


def test_digits_are_decoded_once_for_each_version_of_scikit_learn(cached, monkeypatch):
    first = load("digits")
    monkeypatch.setattr(readers, "digits", mock := Mock(wraps=readers.digits, __name__="digits"))
    again = load("digits")
    assert not mock.called
    tensors = first.tensors()
    for examples in (first, again):
        assert (examples.x.shape, examples.x.stride()) == ((1797, 1, 8, 8), (64, 64, 8, 1))
        torch.testing.assert_close(examples.tensors(), tensors, rtol=0, atol=0)
    plain = vars(first).keys() - tensors.keys()
    assert {key: vars(again)[key] for key in plain} == {key: vars(first)[key] for key in plain}
    monkeypatch.setattr(datasets, "version", lambda name: f"another {name}")
    assert load("digits").fingerprint == first.fingerprint
    assert mock.call_count == 1
    assert len(list(cached.iterdir())) == 2


def test_a_folder_of_images_is_read_pixel_by_pixel(cached, small):
    folder, pixels, labels = small
    examples = load(str(folder))
    assert torch.equal(examples.x, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert examples.x.is_contiguous(memory_format=torch.channels_last)
    assert examples.y.tolist() == labels
    assert examples.held_out.tolist() == [False] * 6 + [True] * 3
    assert examples.classes == 3
    assert examples.client is None
    training = pixels[:6] / 255
    assert examples.mean == pytest.approx(training.mean(axis=(0, 1, 2)), abs=1e-4)
    assert examples.std == pytest.approx(training.std(axis=(0, 1, 2)), abs=1e-4)


def test_only_splits_for_testing_are_held_out(cached, tmp_path):
    pixels = np.zeros((2, 3, 3), dtype=np.uint8)
    splits = {split: (pixels, [0, 1]) for split in ("train", "validation", "test")}
    write_images(tmp_path / "three", splits)
    held_out = load(str(tmp_path / "three")).held_out
    assert held_out.tolist() == [False] * 4 + [True] * 2


def test_a_name_is_looked_up_in_the_data_directory(cached, small, monkeypatch):
    folder, _, labels = small
    assert load("small", data_dir=folder.parent).y.tolist() == labels
    monkeypatch.setenv("HYPERFED_DATA", str(folder.parent))
    assert load("small").y.tolist() == labels


@pytest.mark.parametrize("path", [".", "./small", "../small"])
def test_a_path_from_here_is_not_looked_up_in_the_data_directory(cached, small, monkeypatch, path):
    folder, _, labels = small
    other = {"train": (np.zeros((2, 3, 3), dtype=np.uint8), [0, 1])}
    write_images(folder.parent / "elsewhere" / "small", other)
    monkeypatch.setenv("HYPERFED_DATA", str(folder.parent / "elsewhere"))
    monkeypatch.chdir(folder.parent if path == "./small" else folder)
    assert load(path).y.tolist() == labels
    with pytest.raises(UserError, match=r"must be one of .*, a folder, .* got './none'"):
        load("./none")


def test_grey_images_and_natural_clients(cached, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 3), dtype=np.uint8)
    client = {"train": ["zoe", "ann", "zoe", "bob"]}
    write_images(tmp_path / "grey", {"train": (pixels, [0, 1, 1, 0])}, client=client)
    examples = load(str(tmp_path / "grey"))
    assert torch.equal(examples.x, torch.from_numpy(pixels)[:, None])
    assert examples.client is not None
    assert examples.client.tolist() == [2, 0, 2, 1]
    assert not examples.held_out.any()


def test_a_single_colour_image_makes_all_colour(cached, tmp_path):
    rng = np.random.default_rng(0)
    grey, colour = (rng.integers(0, 256, shape, dtype=np.uint8) for shape in [(3, 3), (3, 3, 3)])
    write_images(tmp_path / "both", {"train": ([grey, colour], [0, 1])})
    x = load(str(tmp_path / "both")).x
    assert torch.equal(x[0], torch.from_numpy(grey).expand(3, 3, 3))
    assert torch.equal(x[1], torch.from_numpy(colour).permute(2, 0, 1))


def test_femnist_is_read_by_writer_in_the_columns_of_the_hub(cached, tmp_path):
    """flwrlabs/femnist: one split; image, writer_id, hsf_id and character, one of 62."""
    import datasets as huggingface

    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    names = [*map(str, range(10)), *map(chr, range(65, 91)), *map(chr, range(97, 123))]
    features = huggingface.Features(
        image=huggingface.Image(),
        writer_id=huggingface.Value("string"),
        hsf_id=huggingface.Value("int64"),
        character=huggingface.ClassLabel(names=names),
    )
    columns = {
        "image": [png(p) for p in pixels],
        "writer_id": ["f0001_41", "f0000_14", "f0001_41"],
        "hsf_id": [0, 0, 4],
        "character": [0, 61, 28],
    }
    write_split(tmp_path / "femnist", "train", features, **columns)
    examples = load("femnist", data_dir=tmp_path)
    # As PeFLL's authors read it: two black pixels around each image, and values from 0 to 1.
    assert examples.x.shape == (3, 1, 32, 32)
    assert torch.equal(examples.x[:, :, 2:30, 2:30], torch.from_numpy(pixels)[:, None])
    assert examples.x.sum() == int(pixels.sum())
    torch.testing.assert_close(examples.transform(examples.x), examples.x / 255)
    assert LeNet(examples.x.shape[1:], 62).fc1.in_features == 800  # PeFLL, table 2
    assert examples.y.tolist() == [0, 61, 28]
    assert examples.classes == 62
    assert examples.client is not None
    assert examples.client.tolist() == [1, 0, 1]
    assert not examples.held_out.any()


def test_emnist_letters_are_26_classes_of_grey_images(cached, tmp_path):
    """tanganke/emnist_letters: image and label, splits train and test."""
    import datasets as huggingface

    letters = huggingface.ClassLabel(names=list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    features = huggingface.Features(image=huggingface.Image(), label=letters)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    for split, few, label in (("train", pixels[:2], [25, 0]), ("test", pixels[2:], [7])):
        write_split(tmp_path / "emnist", split, features, image=[*map(png, few)], label=label)
    examples = load("emnist", data_dir=tmp_path)
    assert torch.equal(examples.x, torch.from_numpy(pixels)[:, None])
    assert examples.y.tolist() == [25, 0, 7]
    assert examples.held_out.tolist() == [False, False, True]
    assert (examples.classes, examples.client) == (26, None)


def test_mnist_without_writers_has_no_clients(cached, tmp_path):
    pixels = np.zeros((3, 2, 2), dtype=np.uint8)
    write_images(tmp_path / "mnist", {"train": (pixels, [0, 1, 2])})
    assert load("mnist", data_dir=tmp_path).client is None


def opened(**splits):
    """What a reader is given: the rows of the default configuration."""
    import datasets as huggingface

    tables = {split: huggingface.Dataset.from_dict(columns) for split, columns in splits.items()}
    return lambda _: tables


def test_shakespeare_windows_follow_each_other_in_a_roles_lines():
    a, b = "abcdefghij" * 6, "klmnopqrst" * 6  # with the line break: 121 characters, 5 windows
    train = {"text": [a, "to be", b], "speaker": ["HAMLET", "Ghost", "HAMLET"]}
    test = {"text": ["z" * 81, "to be " * 20], "speaker": ["HAMLET", "Ghost"]}
    examples = readers.shakespeare(opened(train=train, test=test), "shakespeare", least=(2, 1))
    vocabulary = "\nabcdefghijklmnopqrst"
    assert examples.classes == len(vocabulary) + 1
    tokens = torch.tensor([vocabulary.index(letter) + 1 for letter in f"{a}\n{b}"])
    assert examples.held_out.tolist() == [False] * 5 + [True]
    for row, start in enumerate((0, 10, 20, 30, 40)):
        assert torch.equal(examples.x[row], tokens[start : start + 80])
        assert examples.y[row] == tokens[start + 80]
    assert (examples.x[5] == 0).all()  # z is in no training text
    assert examples.y[5] == 0
    assert examples.client is not None
    assert examples.client.tolist() == [0] * 6  # the ghost has no window to train on
    assert examples.overlaps.tolist() == [4, 3, 2, 1, 0, 0]


def test_a_role_of_shakespeare_without_enough_to_test_on_is_left_out():
    lines = {"text": ["abcdefghij" * 11, "klmnopqrst" * 11], "speaker": ["HAMLET", "Ghost"]}
    test = {"text": ["abcdefghij" * 11], "speaker": ["HAMLET"]}
    examples = readers.shakespeare(opened(train=lines, test=test), "shakespeare", least=(2, 1))
    assert examples.client.unique().tolist() == [0]
    assert examples.held_out.any()
    assert not examples.held_out.all()


def test_characters_of_omniglot_are_numbered_within_their_alphabet():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    rows = {"image": [*map(png, pixels)]}
    rows |= {"alphabet_id": [7, 3, 7, 3, 7], "character_id": [20, 11, 20, 10, 21]}
    examples = readers.omniglot(opened(train=rows), "omniglot")
    assert examples.client.tolist() == [1, 0, 1, 0, 1]
    assert examples.y.tolist() == [0, 1, 0, 0, 1]
    assert examples.classes == 2


def test_shakespeare_as_ready_windows():
    numbers = range(41)  # of which 0, 10, 20, 30 and 40 are taken
    train = {
        "x": [f"{'x' * (number % 7)}{'y' * (80 - number % 7)}" for number in numbers],
        "y": ["x" if number % 20 else "y" for number in numbers],
        "character_id": ["B" if number == 20 else "A" for number in numbers],
    }
    examples = readers.shakespeare(opened(train=train), "shakespeare", least=(2, 1))
    assert examples.y.tolist() == [2, 1, 1, 2]  # "x" is 1 and "y" is 2; B has one window only
    assert (examples.x == 1).sum(dim=1).tolist() == [0, 10 % 7, 30 % 7, 40 % 7]
    assert not examples.held_out.any()


def test_windows_of_shakespeare_tell_with_which_of_those_after_them_they_share_letters():
    text = "".join(chr(97 + number % 26) for number in range(400))
    lines = {"text": [text, text[::-1]], "speaker": ["A", "B"]}
    examples = readers.shakespeare(opened(train=lines, test=lines), "shakespeare", least=(2, 1))
    count, begin = 32, 10 * np.arange(32)
    shared = ((begin[:, None] < begin) & (begin < begin[:, None] + 81)).sum(axis=1)
    assert examples.overlaps.tolist() == shared.tolist() * 4
    assert examples.client.tolist() == ([0] * count + [1] * count) * 2


def test_stack_overflow_is_words_by_author():
    long = " ".join(f"w{number}" for number in range(26))
    train = {
        "client_id": ["77", "5", "77", "9"],
        "tokens": ["b a c a b a", long, "a b a b b zz a", "too short a post"],
        "title": [""] * 4,
    }
    test = {"client_id": ["5"], "tokens": ["a new b here a b"], "title": [""]}
    examples = readers.stackoverflow(opened(train=train, test=test), "so", vocabulary=27)
    once = sorted(
        ["c", "post", "short", "too", "zz", *long.split()]
    )  # after a and b, which are more
    token = {word: 2 + place for place, word in enumerate(["a", "b", *once[:25]])}
    assert "zz" not in token  # as other words that are last, or in no training post

    def row(words):
        known = [token.get(word, 1) for word in words.split()]
        return [0] * (20 - len(known)) + known

    words = long.split()
    expected = [("b a c a b", "a", 1)]
    expected += [
        (" ".join(words[max(0, end - 20) : end]), words[end], 0) for end in (5, 10, 15, 20, 25)
    ]
    expected += [("a new b here a", "b", 0)]
    expected = [(before, word, who) for before, word, who in expected if word in token]
    assert len(expected) == 6  # w5 is unknown, one of the last in the alphabet, and so is zz
    assert examples.x.tolist() == [row(before) for before, _, _ in expected]
    assert examples.y.tolist() == [token[word] for _, word, _ in expected]
    assert examples.client.tolist() == [who for _, _, who in expected]
    assert examples.held_out.tolist() == [False] * (len(expected) - 1) + [True]
    assert examples.classes == 29


def test_contexts_of_a_post_overlap_where_words_are_in_both():
    posts = [" ".join("abcdefg"[word % 7] for word in range(length)) for length in (41, 12, 41)]
    columns = {"client_id": ["5", "7", "5"], "tokens": posts}
    overlaps = readers.stackoverflow(opened(train=columns), "so").overlaps.tolist()
    reach = [4, 4, 4, 4, 3, 2, 1, 0]  # a context has 20 words, and every fifth is told from one
    assert overlaps == [*reach, 1, 0, *reach]


def test_stack_overflow_without_its_columns_or_long_posts_is_said():
    with pytest.raises(UserError, match=r"but lacks tokens \(columns: client_id, text\)"):
        readers.stackoverflow(opened(train={"client_id": ["1"], "text": ["a"]}), "so")
    with pytest.raises(UserError, match="posts of so must be longer than 5 words"):
        readers.stackoverflow(opened(train={"client_id": ["1"], "tokens": ["a b c d e"]}), "so")


def test_the_cache_keeps_every_tensor(cached):
    names = ("client", "coarse", "overlaps", "part")
    whole = {name: torch.arange(6) + place for place, name in enumerate(names)}
    x, y = torch.randn(6, 2), torch.arange(6) % 3
    built = Examples("made", x, y, torch.zeros(6, dtype=torch.bool), 3, **whole)
    built = replace(built, fingerprint=fingerprint_of(built.tensors()))
    cache.load_or_build("made", lambda: built)
    kept = cache.load_or_build("made", lambda: pytest.fail("it was built again"))
    for name, value in vars(built).items():
        same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert same(getattr(kept, name), value), name


def test_the_second_load_is_the_cache(cached, small, monkeypatch):
    folder, _, _ = small
    first = load(str(folder))

    def read_again(*_):
        raise AssertionError("the files were read again")

    monkeypatch.setattr(datasets, "_rows", read_again)
    # What takes a second to import reads its README.
    monkeypatch.setattr(folder_checks, "whole", read_again)
    second = load(str(folder))
    for name, value in vars(first).items():
        other = getattr(second, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    assert second.x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other", "empty"])
def test_a_damaged_cache_is_rebuilt(cached, small, damage):
    folder, _, _ = small
    first = load(str(folder))
    (path,) = cached.iterdir()
    sound = path.read_bytes()
    damaged = {
        "truncated": sound[:-5],
        "flipped": sound[:-1] + bytes([sound[-1] ^ 1]),
        "other": b"not a tensor in sight",
        "empty": b"",
    }[damage]
    path.unlink()  # the first examples still map the old file
    path.write_bytes(damaged)
    assert torch.equal(load(str(folder)).x, first.x)
    assert path.read_bytes() == sound


def test_changed_files_are_read_again(cached, small):
    folder, pixels, labels = small
    before = load(str(folder))
    write_images(folder, {"train": (255 - pixels[:6], labels[:6])})
    after = load(str(folder))
    assert not torch.equal(after.x, before.x)
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_cache_made_under_other_constants_is_not_used(cached, tmp_path, monkeypatch, name):
    import datasets as huggingface

    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
    labels = {"cifar10": ["label"], "cifar100": ["fine_label", "coarse_label"]}[name]
    kinds = dict.fromkeys(labels, huggingface.Value("int64"))
    features = huggingface.Features(img=huggingface.Image(), **kinds)
    columns = {label: [0, 1, 2] for label in labels}
    write_split(tmp_path / name, "train", features, img=[png(p) for p in pixels], **columns)
    before = load(name, data_dir=tmp_path)
    own = readers.STATISTICS[name]
    assert (before.mean, before.std) == (own["mean"], own["std"])
    changed = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    monkeypatch.setitem(readers.STATISTICS, name, changed)
    after = load(name, data_dir=tmp_path)
    assert (after.mean, after.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert len(list(cached.iterdir())) == 2
    monkeypatch.undo()


def test_a_cache_is_of_one_name_reader_source_and_every_constant(monkeypatch):
    def keys():
        yield cache.key("name", "images", readers.constants(), "source")
        for folder in "ab":  # alike in the letters that the result shows
            yield cache.key(folder + "x" * 50, "images", readers.constants(), "source")
        yield cache.key("name", "mnist", readers.constants(), "source")
        yield cache.key("name", "images", readers.constants(), [("train", 1, 2)])
        for constant in ("WINDOW", "STRIDE", "LEAST_WINDOWS", "OMNIGLOT_SIDE", "STATISTICS"):
            with monkeypatch.context() as other:
                other.setattr(readers, constant, 7)
                yield cache.key("name", "images", readers.constants(), "source")
        with monkeypatch.context() as other:
            other.setattr(cache, "FORMAT", 0)
            yield cache.key("name", "images", readers.constants(), "source")

    found = list(keys())
    assert len(set(found)) == len(found) == 11
    assert found[0] == next(keys())


def test_a_cache_that_cannot_be_written_is_done_without(small, tmp_path, monkeypatch):
    folder, _, labels = small
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HYPERFED_CACHE", str(tmp_path / "file"))
    assert load(str(folder)).y.tolist() == labels


def test_a_known_data_set_is_cached_without_being_asked(cached, small, monkeypatch, tmp_path):
    folder, _, _ = small
    monkeypatch.delenv("HYPERFED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    folder.rename(folder.with_name("fashion_mnist"))
    load("fashion_mnist", data_dir=folder.parent)
    assert len(list((tmp_path / "shared").rglob("*.safetensors"))) == 1


def test_nothing_half_written_stays_in_the_cache(cached, small):
    folder, _, _ = small
    load(str(folder))
    (path,) = cached.iterdir()
    assert path.suffix == ".safetensors"
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"x", "y", "held_out"}


def test_what_a_killed_process_left_in_the_cache_is_removed_and_what_one_writes_stays(
    cached, small
):
    folder, _, _ = small
    cached.mkdir(parents=True)
    for name, age in (("left", 3601), ("begun", 3500)):
        path = cached / f"{name}.partial"
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    load(str(folder))
    assert sorted(path.suffix for path in cached.iterdir()) == [".partial", ".safetensors"]
    assert (cached / "begun.partial").exists()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HYPERFED_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/common")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(cache.folder()) == "/own"
    monkeypatch.delenv("HYPERFED_CACHE")
    assert str(cache.folder()) == "/common/hyperfed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == tmp_path / ".cache" / "hyperfed"


@pytest.mark.parametrize(
    ("mean", "std"), [((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)), ((0.5,), (0.2,))], ids=["colour", "grey"]
)
def test_normalize_is_the_textbook_formula_in_channels_last(mean, std):
    x = torch.randint(0, 256, (5, len(mean), 4, 6), dtype=torch.uint8)
    normalized = Normalize(mean, std)(x)
    shift, scale = (torch.tensor(constants).view(-1, 1, 1) for constants in (mean, std))
    expected = (x.double() / 255 - shift) / scale
    torch.testing.assert_close(normalized.double(), expected, rtol=0, atol=1e-5)
    assert normalized.dtype == torch.float32
    # Of one channel a tensor is contiguous either way: what counts is what a convolution makes.
    convolved = F.conv2d(normalized, torch.ones(2, len(mean), 1, 1))
    assert convolved.is_contiguous(memory_format=torch.channels_last)
    assert not convolved.is_contiguous()
    tokens, floats = torch.arange(6).view(2, 3), torch.rand(2, 3)
    assert Normalize((), ())(tokens) is tokens
    assert Normalize((), ())(floats) is floats
    assert Normalize(mean, std) == Normalize(mean, std)


def test_images_of_nobody_are_refused(cached, tmp_path):
    import datasets as huggingface

    image = [png(np.zeros((4, 4), dtype=np.uint8))] * 3
    features = huggingface.Features(
        image=huggingface.Image(),
        label=huggingface.Value("int64"),
        client=huggingface.Value("int64"),
    )
    columns = {"image": image, "label": [0, 1, 0], "client": [1, None, 2]}
    write_split(tmp_path / "mine", "train", features, **columns)
    with pytest.raises(
        UserError, match=r"'client' of .* must hold a number or a word in every row"
    ):
        load(str(tmp_path / "mine"))


def test_from_npz(tmp_path):
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, 0])
    np.savez(tmp_path / "mine.npz", x=x, y=y, client=np.array(["b", "a", "b", "a"]))
    examples = load(str(tmp_path / "mine.npz"))
    assert examples.name == "mine"
    np.testing.assert_array_equal(examples.x.numpy(), x)
    assert examples.y.tolist() == [0, 1, 1, 0]
    assert examples.client is not None
    assert examples.client.tolist() == [0, 1, 0, 1]
    assert (examples.classes, examples.mean) == (2, ())


def test_from_npz_says_what_is_missing(tmp_path):
    np.savez(tmp_path / "mine.npz", data=np.zeros(3))
    with pytest.raises(
        UserError, match=r"mine.npz are data:\n- one of label, y, target must be among them"
    ):
        load(str(tmp_path / "mine.npz"))
    (tmp_path / "text.npz").write_text("x,y")
    with pytest.raises(UserError, match=r"text.npz must be an .npz archive"):
        load(str(tmp_path / "text.npz"))
    with pytest.raises(UserError, match=r"a table must be a file, but there is no .*none.npz"):
        load(str(tmp_path / "none.npz"))
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}]), y=np.zeros(2))
    with pytest.raises(UserError, match=r"holds objects of Python; .*savez\(path, x=\.\.\., y="):
        load(str(tmp_path / "objects.npz"))
    np.savez(tmp_path / "short.npz", x=np.zeros((3, 2)), y=np.zeros(4, int))
    with pytest.raises(UserError, match="x and y must have the same number of rows"):
        load(str(tmp_path / "short.npz"))


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="got 'cifra10'; did you mean 'cifar10'") as raised:
        load("cifra10")
    assert all(name in str(raised.value) for name in ("digits", *datasets.KNOWN))


def test_a_folder_without_data_is_named(cached, tmp_path):
    (tmp_path / "hollow").mkdir()
    with pytest.raises(UserError, match=r"hollow is not .*holds data files"):
        load(str(tmp_path / "hollow"))


def test_no_internet_says_where_else_data_may_come_from(cached):
    with pytest.raises(UserError, match=r"the hub could not be reached .* set data_dir"):
        load("cifar10")


def test_what_the_hub_does_not_have_must_be_local(cached):
    with pytest.raises(UserError, match="omniglot must come from a local folder"):
        load("omniglot")


def test_columns_that_cannot_be_told_are_listed(cached, tmp_path):
    write_split(tmp_path / "numbers", "train", a=[1, 2], b=[3, 4])
    with pytest.raises(UserError, match=r"the columns of .*numbers are a, b:\n- one of label, y"):
        load(str(tmp_path / "numbers"))


def test_two_labels_are_too_many_unless_one_is_called_label(cached, tmp_path):
    import datasets as huggingface

    pixels = [png(np.zeros((2, 2), dtype=np.uint8))] * 2
    features = huggingface.Features(
        image=huggingface.Image(), fine=huggingface.Value("int64"), label=huggingface.Value("int8")
    )
    write_split(tmp_path / "ok", "train", features, image=pixels, fine=[0, 5], label=[1, 0])
    assert load(str(tmp_path / "ok")).y.tolist() == [1, 0]
    features = huggingface.Features(
        image=huggingface.Image(), fine=huggingface.Value("int64"), rough=huggingface.Value("int8")
    )
    write_split(tmp_path / "two", "train", features, image=pixels, fine=[0, 5], rough=[1, 0])
    with pytest.raises(UserError, match=r"must have one label column, .* got fine, rough"):
        load(str(tmp_path / "two"))


def test_hidden_labels_are_refused(cached, tmp_path):
    import datasets as huggingface

    pixels = [png(np.zeros((2, 2), dtype=np.uint8))] * 2
    features = huggingface.Features(image=huggingface.Image(), label=huggingface.Value("int64"))
    write_split(tmp_path / "hidden", "train", features, image=pixels, label=[0, -1])
    with pytest.raises(UserError, match="must be 0 or more, got -1 in column 'label'"):
        load(str(tmp_path / "hidden"))


def test_images_of_several_sizes_are_refused(cached, tmp_path):
    shapes = [(2, 2), (3, 2), (3, 3)]
    pixels = [np.zeros(shape, dtype=np.uint8) for shape in shapes]
    write_images(tmp_path / "sizes", {"train": (pixels, [0, 1, 2])})
    with pytest.raises(UserError, match=r"one size, got \(2, 2\) and \(3, 2\) .* and 1 more"):
        load(str(tmp_path / "sizes"))


def test_images_of_sixteen_bits_are_refused(cached, tmp_path):
    write_images(tmp_path / "deep", {"train": ([np.zeros((2, 2), dtype=np.uint16)], [0])})
    with pytest.raises(UserError, match="8 bits per channel, got mode I;16"):
        load(str(tmp_path / "deep"))

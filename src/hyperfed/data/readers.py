"""From the rows of a data set to tensors: one function per layout.

A reader takes ``rows``, which opens one configuration of a data set as {split: table} of the
Hugging Face ``datasets`` library, and returns :class:`Examples` without a fingerprint.
Splits whose name starts with "test" are held out.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from hyperfed.data.arrays import is_text
from hyperfed.data.examples import Examples, channel_statistics, channels_moved_first
from hyperfed.data.hub import bar
from hyperfed.data.partitions import places
from hyperfed.data.pictures import check_memory, pixels
from hyperfed.errors import UserError, one_line

Rows = Callable[[str | None], Mapping[str, Any]]
"""Configuration name, or None for the default one -> {split name: datasets.Dataset}."""

Array = npt.NDArray[Any]

WINDOW = 80
"""Characters before the one to predict, as in LEAF (Caldas et al. 2018)."""

STRIDE = 10
"""A window starts every so many characters: neighbours that share 79 of 80 teach little."""

LEAST_WINDOWS = (50, 5)
"""A speaking role with fewer windows for training or for testing is left out."""

WORDS = 20
"""Words of Stack Overflow before the one to predict, at most, as in Reddi et al. (2021)."""

WORD_STRIDE = 5
"""Of the words of a post each such one is predicted."""

VOCABULARY = 10_000
"""Words of Stack Overflow that are told apart, the most frequent ones (Reddi et al. 2021)."""

OMNIGLOT_SIDE = 28
"""Side of an Omniglot image, resized from 105."""

FEMNIST_FRAME = 2
"""Black pixels around an image of FEMNIST: 28 x 28 become 32 x 32 (code of PeFLL's authors)."""

STATISTICS: Mapping[str, Mapping[str, Any]] = {
    "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)},
    "cifar100": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
    "femnist": {"mean": (0.0,), "std": (1.0,)},
}
"""By which the code of pFedHN's authors, and of PeFLL's, normalises each channel.

That of FEMNIST takes values from 0 to 1 as they are.
"""


def constants() -> dict[str, Any]:
    """Returns the constants of this module by name: what is decoded depends on them."""
    return {name: value for name, value in globals().items() if name.isupper()}


class NoSuchConfigurationError(UserError):
    """A data set lacks a configuration that was asked for."""


def images(rows: Rows, name: str, *, client: str = "client", label: str | None = None) -> Examples:
    """Reads any data set of images: one image column and one label column, found by their type.

    Args:
        rows: opens the data set.
        name: of the result.
        client: column of natural client ids of any type; ignored where there is none.
        label: column of labels; found by its type where None.

    Raises:
        UserError: no such columns, more than one choice, or images of several sizes.
    """
    splits = rows(None)
    features = next(iter(splits.values())).features
    pictures = image_column(features, name)
    found = label or label_column(features, name, besides=(client,))
    y, names = labels_of(splits, found, features[found], name)
    classes = len(names) or int(y.max()) + 1
    owner = None
    if client in features:
        owner = torch.from_numpy(ids_of(splits, client, name)[1])
    return _of_images(
        name, decoded(splits, pictures, name), y, _held_out(splits), classes, client=owner
    )


def femnist(rows: Rows, name: str) -> Examples:
    """Reads FEMNIST (Caldas et al. 2018): 62 classes; the natural client is the writer.

    Images are 32 x 32, as the code of PeFLL's authors has them (:data:`FEMNIST_FRAME`).
    """
    examples = images(rows, name, client="writer_id")
    framed = pad(examples.x, [FEMNIST_FRAME] * 4).contiguous(memory_format=torch.channels_last)
    return replace(examples, x=framed, **STATISTICS["femnist"])


def mnist(rows: Rows, name: str) -> Examples:
    """Reads MNIST; the natural client is the writer where a configuration ``writers`` tells it."""
    examples = images(rows, name)
    try:
        writers = rows("writers")
    except NoSuchConfigurationError:  # the hub's copy does not tell
        return examples
    owner = np.unique(column_of(writers, "writer_id"), return_inverse=True)[1]
    return replace(examples, client=torch.from_numpy(owner))


def cifar10(rows: Rows, name: str) -> Examples:
    """Reads CIFAR-10 with the authors' channel statistics (:data:`STATISTICS`)."""
    return replace(images(rows, name), **STATISTICS["cifar10"])


def cifar100(rows: Rows, name: str) -> Examples:
    """Reads CIFAR-100: ``y`` is one of 100 fine labels, ``coarse`` one of 20 superclasses.

    Its channel statistics are the authors' (:data:`STATISTICS`).
    """
    splits = rows(None)
    fine, coarse = (
        torch.from_numpy(column_of(splits, column).astype(np.int64))
        for column in ("fine_label", "coarse_label")
    )
    x = decoded(splits, "img", name)
    examples = _of_images(name, x, fine, _held_out(splits), 100, coarse=coarse)
    return replace(examples, **STATISTICS["cifar100"])


def omniglot(rows: Rows, name: str) -> Examples:
    """Reads Omniglot (Lake et al. 2015), 28 x 28: the natural client is the alphabet.

    Characters are numbered within their alphabet, so the number of classes is the size of the
    largest alphabet, 55. There is no test split: background and evaluation set hold different
    alphabets.
    """
    splits = rows(None)
    x = decoded(splits, "image", name, side=OMNIGLOT_SIDE)
    alphabet, character = column_of(splits, "alphabet_id"), column_of(splits, "character_id")
    pairs, index = np.unique(np.stack([alphabet, character], 1), axis=0, return_inverse=True)
    first = np.searchsorted(pairs[:, 0], pairs[:, 0])  # where each pair's alphabet begins
    label = (np.arange(len(pairs)) - first)[index.ravel()]
    owner = np.unique(alphabet, return_inverse=True)[1]
    return _of_images(
        name,
        x,
        torch.from_numpy(label),
        torch.zeros(len(label), dtype=torch.bool),
        int(label.max()) + 1,
        client=torch.from_numpy(owner),
        shared_labels=False,
    )


def shakespeare(rows: Rows, name: str, *, least: tuple[int, int] = LEAST_WINDOWS) -> Examples:
    """Reads Shakespeare by speaking role: 80 characters -> the next one.

    Two layouts: lines (``text``, ``speaker``), whose text is cut into windows every ``STRIDE``
    characters; or LEAF's ready windows (``x``, ``y``, ``character_id``), of which one in ``STRIDE``
    is taken.

    Token 0 is any character that the training windows lack; the others are theirs in order.
    ``classes`` counts token 0.

    Args:
        rows: opens the data set.
        name: of the result.
        least: windows that a role must have for training and (where there is a test split) for
            testing; roles with fewer are left out.
    """
    splits = rows(None)
    features = next(iter(splits.values())).features
    if "character_id" in features:
        role, windows, held_out = _ready_windows(splits)
    else:
        role, windows, held_out = _windows_of_lines(splits)
    vocabulary = np.unique(windows[~held_out])
    place = np.searchsorted(vocabulary, windows).clip(max=len(vocabulary) - 1)
    tokens = np.where(vocabulary[place] == windows, place + 1, 0)

    roles, role = np.unique(role, return_inverse=True)
    kept = np.bincount(role[~held_out], minlength=len(roles)) >= least[0]
    if held_out.any():
        kept &= np.bincount(role[held_out], minlength=len(roles)) >= least[1]
    rows_kept = kept[role]
    owner = (np.cumsum(kept) - 1)[role[rows_kept]]
    tokens, held_out = tokens[rows_kept], held_out[rows_kept]
    passage = owner * 2 + held_out  # of a role and a split
    place, count = places(passage)
    return Examples(
        name=name,
        x=torch.from_numpy(tokens[:, :-1].copy()),
        y=torch.from_numpy(tokens[:, -1].copy()),
        held_out=torch.from_numpy(held_out),
        classes=len(vocabulary) + 1,
        client=torch.from_numpy(owner),
        overlaps=torch.from_numpy((count[passage] - 1 - place).clip(max=WINDOW // STRIDE)),
    )


def stackoverflow(rows: Rows, name: str, *, vocabulary: int = VOCABULARY) -> Examples:
    """Reads Stack Overflow by author: up to ``WORDS`` words of a post -> the next one.

    Of TensorFlow Federated's columns it takes ``client_id`` and ``tokens``, a post's words with
    spaces between them. Every ``WORD_STRIDE``-th word of a post is predicted, if it is known.
    Token 0 is no word, before the first; 1 a word that is not among the most frequent ones of the
    training posts, which are 2 and so on, by frequency and then by the alphabet. ``classes`` counts
    all of them.

    Args:
        rows: opens the data set.
        name: of the result.
        vocabulary: how many words are known.

    Raises:
        UserError: no such columns, or no post from which a known word can be predicted.
    """
    splits = rows(None)
    features = next(iter(splits.values())).features
    if missing := {"client_id", "tokens"} - set(features):
        raise UserError(
            f"{name} must have the columns client_id and tokens, as of TensorFlow Federated, but "
            f"lacks {', '.join(sorted(missing))} (columns: {', '.join(features)}); rename them"
        )
    posts = [post.split() for post in column_of(splits, "tokens")]
    tested = _held_out(splits).tolist()
    seen = Counter(
        word for post, out in zip(posts, tested, strict=True) if not out for word in post
    )
    frequent = sorted(seen, key=lambda word: (-seen[word], word))[:vocabulary]
    number = {word: 2 + rank for rank, word in enumerate(frequent)}
    authors = ids_of(splits, "client_id", name)[1]
    contexts, following, author, held_out, overlaps = [], [], [], [], []
    for post, out, whose in zip(posts, tested, authors, strict=True):
        tokens = [number.get(word, 1) for word in post]
        places = [
            place for place in range(WORD_STRIDE, len(tokens), WORD_STRIDE) if tokens[place] > 1
        ]
        for rank, place in enumerate(places, 1):
            before = tokens[max(0, place - WORDS) : place]
            contexts.append([0] * (WORDS - len(before)) + before)
            following.append(tokens[place])
            author.append(whose)
            held_out.append(out)
            overlaps.append(bisect_right(places, place + WORDS) - rank)
    if not contexts:
        raise UserError(
            f"posts of {name} must be longer than {WORD_STRIDE} words, of which some follow, but "
            "none is; use other data"
        )
    return Examples(
        name=name,
        x=torch.tensor(contexts),
        y=torch.tensor(following),
        held_out=torch.tensor(held_out),
        classes=len(frequent) + 2,
        client=torch.from_numpy(np.unique(author, return_inverse=True)[1]),
        overlaps=torch.tensor(overlaps),
    )


def digits() -> Examples:
    """Reads scikit-learn's bundled digits: 1,797 grey images of 8 x 8, a fifth held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundle = load_digits()
    y = torch.from_numpy(bundle.target.astype(np.int64))
    x = torch.from_numpy(np.rint(bundle.images * 255 / 16).astype(np.uint8))[:, None]
    held_out = torch.zeros(len(y), dtype=torch.bool)
    rows = np.arange(len(y))
    held_out[train_test_split(rows, test_size=0.2, random_state=0, stratify=bundle.target)[1]] = (
        True
    )
    return _of_images("digits", x, y, held_out, 10)


def _of_images(
    name: str, x: Tensor, y: Tensor, held_out: Tensor, classes: int, **others: Any
) -> Examples:
    """Builds examples with the statistics of their training images."""
    mean, std = channel_statistics(x[~held_out])
    return Examples(name, x, y, held_out, classes, mean=mean, std=std, **others)


def column_of(splits: Mapping[str, Any], column: str) -> Array:
    """Returns a column over all splits, in their order."""
    parts = [
        table.with_format("arrow")[:].column(column).to_numpy(zero_copy_only=False)
        for table in splits.values()
    ]
    return np.concatenate(parts)


def _held_out(splits: Mapping[str, Any]) -> Tensor:
    return torch.cat(
        [torch.full((len(table),), split.startswith("test")) for split, table in splits.items()]
    )


def image_column(features: Mapping[str, Any], name: str) -> str:
    """Returns the only column of images, by {column: its kind}.

    Raises:
        UserError: there is none, or more than one.
    """
    found = [column for column, kind in features.items() if type(kind).__name__ == "Image"]
    if len(found) != 1:
        raise UserError(
            f"{name} must have one image column, got {', '.join(found) or 'none'} "
            f"(columns: {', '.join(features)}); save other data as arrays x, y in an .npz file"
        )
    return found[0]


def label_column(features: Mapping[str, Any], name: str, besides: Sequence[str] = ()) -> str:
    """Finds the label: the only class-label column, else ``label``, else the only integer one.

    Args:
        features: column -> its kind.
        name: of the data set.
        besides: columns that are no labels, such as whose an image is.

    Raises:
        UserError: there is none, or more than one choice.
    """
    kinds = {column: kind for column, kind in features.items() if column not in besides}
    labels = [column for column, kind in kinds.items() if type(kind).__name__ == "ClassLabel"]
    integers = [
        column
        for column, kind in kinds.items()
        if "int" in str(getattr(kind, "dtype", "")) and column not in labels
    ]
    if len(labels) != 1 and "label" in kinds:
        return "label"
    for found in (labels, integers):
        if len(found) == 1:
            return found[0]
    raise UserError(
        f"{name} must have one label column, a class label or an integer, "
        f"got {', '.join(labels or integers) or 'none'} (columns: {', '.join(features)}); "
        "rename the one to learn to 'label', or add it: beside a metadata file the names of "
        "folders are no labels, nor is that of a folder alone"
    )


def class_names(kind: Any) -> tuple[str, ...]:
    """Returns the names of labels by the kind of their column, ``ClassLabel``; () of another."""
    return tuple(getattr(kind, "names", None) or ())


def labels_of(
    splits: Mapping[str, Any], column: str, feature: Any, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Returns (N,) labels of a column, from 0, and their names; () of numbers without any.

    Args:
        splits: name -> rows.
        column: of labels; of words, which are numbered in their order, too.
        feature: its kind.
        name: of the data set.

    Raises:
        UserError: a row without a label, or one that is neither a number nor a word.
    """
    written = column_of(splits, column)
    if len(written) and is_text(written):
        words, number = np.unique(written.astype(str), return_inverse=True)
        return torch.from_numpy(number), tuple(map(str, words))
    if written.dtype.kind not in "iu" or not len(written):  # also where one is missing
        raise UserError(
            f"labels of {name} must be one whole number for each image, got {written.dtype} in "
            f"{len(written)} rows of column {column!r}; remove the rows without labels"
        )
    y = torch.from_numpy(written.astype(np.int64))
    if int(y.min()) < 0:
        raise UserError(
            f"labels of {name} must be 0 or more, got {int(y.min())} in column {column!r}; "
            "remove the splits or rows without labels"
        )
    names = class_names(feature)
    if names and int(y.max()) >= len(names):
        raise UserError(
            f"labels of {name} must be below {len(names)}, as many as it names, got {int(y.max())} "
            f"in column {column!r}; correct them"
        )
    return y, names


def ids_of(splits: Mapping[str, Any], column: str, name: str) -> tuple[Array, Array]:
    """Returns the different ids of a column, sorted, and the number in them of each row's.

    Raises:
        UserError: a row without an id, or one that is neither a number nor a word.
    """
    written = column_of(splits, column)
    missing = written.dtype.kind == "f" and bool(np.isnan(written).any())
    if missing or (written.dtype == object and not all(isinstance(each, str) for each in written)):
        raise UserError(
            f"column {column!r} of {name} must hold a number or a word in every row, but does not; "
            "fill or drop the others"
        )
    ids, number = np.unique(written, return_inverse=True)
    return ids, number


def decoded(splits: Mapping[str, Any], column: str, name: str, side: int | None = None) -> Tensor:
    """Decodes an image column to (N, C, H, W) uint8, ``channels_last`` in memory.

    Grey if every image is, else in colour. Threads do not help at these sizes (measured): opening a
    small image is Python's work, not the decoder's.

    Args:
        splits: name -> rows.
        column: of images.
        name: of the data set.
        side: to which each is resized, in pixels.

    Raises:
        UserError: an image that cannot be read, or images of several sizes.
    """
    pictures: list[Array] = []
    files: list[str] = []
    with bar(f"decoding {name}", sum(map(len, splits.values()))) as advance:
        for table in splits.values():
            for batch in table.with_format("arrow").iter(batch_size=1000):
                cells = batch.column(column).combine_chunks()
                paths = cells.field("path").to_pylist()
                for image, path in zip(cells.field("bytes"), paths, strict=True):
                    files.append(one_line(path or f"image {len(files)}", 200))
                    pictures.append(_picture(image, path, side, files[-1]))
                check_memory(pictures, name)
                advance(len(cells))
    sizes = Counter(picture.shape[:2] for picture in pictures)
    if len(sizes) > 1:
        (usual, _), (other, _), *more = sizes.most_common()
        odd = next(
            file for file, one in zip(files, pictures, strict=True) if one.shape[:2] == other
        )
        raise UserError(
            f"images of {name} must have one size, got {usual} and {other} (height, width), such "
            f"as {odd}, and {len(more)} more sizes; resize them"
        )
    shape = max(pictures, key=lambda picture: picture.ndim).shape  # with channels if any has them
    stacked = np.empty((len(pictures), *shape), dtype=np.uint8)
    for row, picture in zip(stacked, pictures, strict=True):
        row[...] = picture if picture.ndim == row.ndim else picture[..., None]
    return channels_moved_first(
        torch.from_numpy(stacked if stacked.ndim == 4 else stacked[..., None])
    )


def _picture(content: Any, path: str | None, side: int | None, called: str) -> Array:
    """Returns the pixels of a cell's image; who cannot read it is told which it is."""
    try:
        return pixels(content.as_buffer() if content.is_valid else path, side)
    except UserError as error:
        raise UserError(f"{called}: {error}") from error


def _windows_of_lines(splits: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Cuts each role's lines, joined: roles (W,), code points (W, 81), held out (W,)."""
    roles, windows, held_out = [], [], []
    for split, table in splits.items():
        said: dict[str, list[str]] = {}
        texts, speakers = column_of({split: table}, "text"), column_of({split: table}, "speaker")
        for text, speaker in zip(texts, speakers, strict=True):
            said.setdefault(speaker, []).append(text)
        for speaker, lines in sorted(said.items()):
            letters = _code_points("\n".join(lines))
            if len(letters) <= WINDOW:
                continue
            cut = np.lib.stride_tricks.sliding_window_view(letters, WINDOW + 1)[::STRIDE]
            windows.append(cut)
            roles += [speaker] * len(cut)
            held_out += [split.startswith("test")] * len(cut)
    return np.array(roles), np.concatenate(windows), np.array(held_out)


def _ready_windows(splits: Mapping[str, Any]) -> tuple[Array, Array, Array]:
    """Takes one window in ``STRIDE``: roles (W,), code points (W, 81), held out (W,)."""
    before, after, role = (
        column_of(splits, column)[::STRIDE] for column in ("x", "y", "character_id")
    )
    held_out = _held_out(splits).numpy()[::STRIDE]
    windows = _code_points("".join(before + after)).reshape(len(role), WINDOW + 1)
    return role.astype(str), windows, held_out


def _code_points(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)

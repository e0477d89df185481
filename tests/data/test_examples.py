"""Hashes of examples: of some rows the same as of a copy of them."""

import pytest
import torch

from hyperfed.data import examples
from hyperfed.data.examples import channel_statistics, channels_last, hash_of, hash_of_rows


def test_channel_statistics_are_of_all_images_however_many_there_are() -> None:
    """They are counted in blocks of 8,192."""
    black, white = (torch.full((8192, 1, 1, 1), value, dtype=torch.uint8) for value in (0, 255))
    assert channel_statistics(torch.cat([black, white])) == ((0.5,), (0.5,))


def test_rows_are_hashed_as_a_copy_of_them_is_of_which_none_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = channels_last(torch.randint(0, 256, (9, 3, 2, 4), dtype=torch.uint8))
    y, rows = torch.arange(9), torch.tensor([8, 0, 3, 4, 1, 2, 7])
    parts = [(values, some) for some in (rows, rows[:0], rows[5:]) for values in (images, y)]
    whole = hash_of(*(values[some] for values, some in parts))
    content, copied = examples._content, []
    monkeypatch.setattr(examples, "HASHED_ROWS", 3)
    monkeypatch.setattr(
        examples, "_content", lambda part: copied.append(len(part)) or content(part)
    )
    assert hash_of_rows(*parts) == whole
    assert max(copied) == 3
    assert hash_of_rows((y, rows.flip(0))) != hash_of_rows((y, rows))

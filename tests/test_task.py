"""What a client reads of its data, and how it is called."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hyperfed.errors import UserError
from hyperfed.task import Split
from toys import make_task


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(9 * 2 * 4 * 4, dtype=torch.uint8).reshape(9, 2, 4, 4),
        torch.arange(9 * 2 * 4 * 4, dtype=torch.uint8).reshape(9, 4, 4, 2).permute(0, 3, 1, 2),
        torch.arange(9 * 6.0).reshape(9, 6),
    ],
    ids=["images", "channels last", "features"],
)
def test_a_batch_is_the_rows_it_names_as_they_lie_in_memory(x: Tensor) -> None:
    task = replace(make_task(), x=x, y=torch.arange(9))
    rows = torch.tensor([7, 2, 5, 2])
    batch = Split(task, rows).batch(torch.tensor([3, 0, 1]))
    assert torch.equal(batch.x, x[[2, 7, 2]])
    assert torch.equal(batch.y, torch.tensor([2, 7, 2]))
    assert batch.x.stride() == x.stride()


def test_chunks_are_all_examples_in_their_order() -> None:
    task = make_task()
    rows = task.train[2]
    chunks = [*Split(task, rows).chunks(6)]
    assert len(chunks) > 1
    assert torch.equal(torch.cat([chunk.x for chunk in chunks]), task.x[rows])
    assert torch.equal(torch.cat([chunk.y for chunk in chunks]), task.y[rows])


@pytest.mark.parametrize("client", [1, np.int64(1), torch.tensor(1), "1"])
def test_a_client_is_called_by_its_number_or_name(client: Any) -> None:
    assert make_task().number_of(client) == 1


@pytest.mark.parametrize("client", [1.5, None, ("a", 1), [1]])
def test_a_client_that_is_called_otherwise_is_nobody(client: Any) -> None:
    with pytest.raises(UserError, match=r"its number, or by its name, which is text, came "):
        make_task().number_of(client)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.int64, 1), (torch.uint8, 255)], ids=["tokens", "images"]
)
def test_made_up_examples_are_in_any_vocabulary_and_of_every_shade(
    dtype: torch.dtype, most: int
) -> None:
    task = replace(make_task(), x=torch.zeros(4, 100, dtype=dtype), y=torch.arange(4))
    x, _ = task.made_up(50)
    assert x.dtype == dtype
    assert (int(x.min()), int(x.max())) == (0, most)

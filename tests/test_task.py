"""What a client reads of its data."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

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

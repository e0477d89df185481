"""Made-up clients: as many as there are, each with the size that its client has, and no example."""

import pytest
import torch

from hyperfed.engines.made_up import EXAMPLES, made_up
from hyperfed.task import Task
from toys import Normed, TwoLayers, make_task


@pytest.fixture
def task() -> Task:
    models = {"S": TwoLayers().double(), "L": Normed().double()}
    return make_task(models=models, sizes=("L", "S", "S", "L"), novel=1, examples=(12, 7, 9, 8))


@pytest.mark.parametrize(
    ("novel", "sizes"),
    [(None, "LSSL"), (1, "LSSL"), (0, "LSS"), (3, "LSSSSS")],  # further ones have the first
)
def test_made_up_clients_have_the_sizes_of_those_that_are_there(
    task: Task, novel: int | None, sizes: str
) -> None:
    found = made_up(task, novel=novel)
    assert "".join(found.size_of(client) for client in range(len(sizes))) == sizes
    assert list(found.known) == list(task.known)
    assert len(found.novel_ids) == len(sizes) - 3


def test_made_up_clients_have_nobodys_examples(task: Task) -> None:
    found = made_up(task)
    assert found.x.shape == (EXAMPLES, *task.x.shape[1:])
    assert not (found.x.unsqueeze(1) == task.x).all(dim=-1).any()
    assert all(torch.equal(rows, torch.arange(EXAMPLES)) for rows in found.train)

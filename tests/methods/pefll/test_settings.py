"""PeFLL's settings: how long a descriptor is, and what the paper publishes."""

from typing import Any

import pytest
import torch
from torch import nn

from hyperfed.methods import headstart, pefll
from hyperfed.runs import config
from hyperfed.task import Outline
from toys import (
    CLASSES,
    make_task,
)


@pytest.mark.parametrize(
    ("rule", "known", "novel", "length"),
    [
        ("n/4", 90, 10, 22),  # the paper's n is that of the clients that train
        ("1+n/4", 90, 10, 26),  # the code's is that of all
        ("n/4", 3, 9, 2),
        ("1+n/4", 3, 0, 2),
        (5, 90, 10, 5),
    ],
)
def test_the_length_of_a_descriptor(rule: Any, known: int, novel: int, length: int) -> None:
    outline = Outline({}, known, CLASSES, novel)
    assert pefll.Config(descriptor_size=rule).length(outline) == length


@pytest.mark.parametrize("method", [pefll, headstart])
def test_a_descriptor_of_one_number_is_refused(method: Any) -> None:
    """Of one entry there is no deviation, by which PeFLL divides."""
    assert method.Config(descriptor_size=2).descriptor_size == 2
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        method.Config(descriptor_size=1)


def test_few_rounds_go_by_ten_times_the_authors_rate() -> None:
    assert pefll.PRESETS["default"]["method.lr"] == pytest.approx(10 * pefll.Config().lr)


def test_the_official_length_counts_novel_clients() -> None:
    settings = config.load("pefll", ["preset=official"]).settings
    task = make_task(examples=(4,) * 13, novel=3)
    assert pefll.Server(task.outline(), settings).hyper_net.descriptor_size == 1 + 13 // 4


def test_the_paper_preset_has_table_4_and_the_factor_2_of_the_regularisers() -> None:
    settings = config.load("pefll", ["preset=paper"]).settings
    assert (settings.local_weight_decay, settings.weight_decay) == (2 * 5e-5, 2 * 1e-3)
    task = make_task(examples=(4,) * 40)
    server = pefll.Server(task.outline(), settings)
    widths = [m.weight.shape for m in server.hyper_net.modules() if isinstance(m, nn.Linear)]
    assert widths == [(100, 10), (100, 100), (39, 100)]
    assert isinstance(server.optimizer, torch.optim.SGD)
    assert not settings.standardize

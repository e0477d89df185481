"""Settings of a task that contradict themselves, or do not fit the data."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from hyperfed.data.tasks import TaskConfig, build, divide
from hyperfed.errors import UserError
from made_examples import made


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
            r"must end in \.npz or \.csv, came .*dealt\.txt",
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
        ({"name": "MNIST"}, "did you mean 'mnist'"),
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

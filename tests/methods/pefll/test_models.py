"""The models that PeFLL makes, of clients that trained and of others."""

import pytest
import torch

from hyperfed import trees
from hyperfed.methods import pefll
from hyperfed.training import UnlabelledError
from methods.pefll.checks import (
    SETTINGS,
    drawn,
)
from toys import (
    CLASSES,
    Dropping,
    Federation,
    Normed,
    close,
    make_task,
)


@pytest.mark.parametrize("client", [1, 3])
def test_known_and_novel_clients_get_a_model_from_all_their_data(client: int) -> None:
    task = make_task(novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"standardize": True})
    federation.round([0, 1, 2])
    server, rows = federation.server, task.train[client]
    descriptor = server.descriptor_net(task.x[rows], task.y[rows]).mean(0)
    standard = server.state()["standard"]
    descriptor = (descriptor - standard["mean"]) / standard["deviation"]
    model = server.hyper_net(descriptor[None])
    expected = {name: value[0].detach() for name, value in model.items()}
    ours = federation.personal(client)
    close(ours, expected)


def test_one_batch_can_describe_a_client_to_be_served() -> None:
    task = make_task(novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"prediction": "batch"})
    x, y = drawn(task, 3, 99, "describe")
    model = federation.server.hyper_net(federation.server.descriptor_net(x, y).mean(0)[None])
    expected = {name: value[0].detach() for name, value in model.items()}
    close(federation.personal(3), expected)


def test_a_label_only_descriptor_is_linear_in_the_class_proportions() -> None:
    task = make_task()
    federation = Federation("pefll", task, **SETTINGS | {"descriptor_net": "linear"})
    cohort = federation.engine.cohort([2], 0, training=False)
    net = federation.server.descriptor_net
    y = task.y[task.train[2]]
    share = torch.stack([(y == label).double().mean() for label in range(CLASSES)])
    reply = cohort.ask(
        pefll.Client.describe,
        trees.model_of(net),
        batches=pefll.Epochs(1, 8),  # three batches, the last of 4
    )["descriptor"]
    torch.testing.assert_close(reply[0], (net.linear.weight @ share + net.linear.bias).detach())


def test_what_describes_a_client_drops_nothing() -> None:
    """It is described in one pass, and another, which must be the same, is differentiated."""
    task = make_task(Dropping)
    federation = Federation("pefll", task, **SETTINGS)
    net, rows = federation.server.descriptor_net, task.train[2]
    cohort = federation.engine.cohort([2], 0, training=True)
    batches = pefll.Epochs(1, 8)
    reply = cohort.ask(pefll.Client.describe, trees.model_of(net), batches=batches)["descriptor"]
    expected = net.eval()(task.x[rows], task.y[rows]).mean(0).detach()
    close(reply[0], expected)


def test_an_unlabelled_client_is_told_why_it_gets_no_model() -> None:
    federation = Federation("pefll", make_task(novel=1, unlabelled=True), **SETTINGS)
    with pytest.raises(UnlabelledError, match="has no labels"):
        federation.personal(3)


def test_batch_norm_buffers_are_averaged_over_the_cohort_and_reach_novel_clients() -> None:
    task = make_task(Normed, novel=1)
    federation = Federation("pefll", task, **SETTINGS | {"batch_size": 10_000})
    server, means = federation.server, []
    for client in (0, 1):  # of 12 and 7 examples: each counts once
        x, y = task.x[task.train[client]], task.y[task.train[client]]
        model = server.hyper_net(server.descriptor_net(x, y).mean(0)[None])
        before_norm = x @ model["body.weight"][0].T + model["body.bias"][0]
        means.append(0.1 * before_norm.mean(0).detach())  # from 0, with batch-norm's momentum
    cohort = federation.round([0, 1])
    novel = federation.personal(3)
    torch.testing.assert_close(novel["norm.running_mean"], (means[0] + means[1]) / 2)
    assert novel["norm.num_batches_tracked"] == 1
    whole = trees.count_bytes(trees.model_of(task.models["base"]))
    assert {(e.down, e.up) for e in cohort.state.exchanges if e.step == "train_model"} == {
        (whole, whole)
    }

"""FedBABU against PyTorch's own optimiser, on the body and then on the whole."""

from typing import Any

import pytest
import torch

from hyperfed.errors import UserError
from hyperfed.methods import fedbabu
from hyperfed.runs.config import from_keys
from hyperfed.training import Epochs, Sgd
from hyperfed.trees import Tree, count_bytes, partition
from toys import (
    EXAMPLES,
    MOMENTUM,
    TORCH,
    Federation,
    Normed,
    TwoLayers,
    close,
    make_task,
    torch_sgd,
)

HEAD = ("head.weight", "head.bias")
NETS = pytest.mark.parametrize("net", [TwoLayers, Normed])
RATE = 0.03


def federation(net: Any = TwoLayers, **settings: Any) -> Federation:
    return Federation(
        "fedbabu", make_task(net, novel=1), **MOMENTUM | {"finetune_lr": RATE} | settings
    )


def with_initial_head(ours: Federation) -> Tree:
    return ours.server.body["base"] | partition(ours.task.outline().initial(), HEAD)[0]


@NETS
def test_rounds_train_and_average_the_body_under_the_initial_head(net: Any) -> None:
    ours = federation(net)
    names = [n for n, _ in ours.task.models["base"].named_parameters() if n not in HEAD]
    for number, clients in enumerate(([0, 1, 2], [0, 2])):
        whole, total = with_initial_head(ours), sum(EXAMPLES[client] for client in clients)
        trained = [torch_sgd(ours.task, c, whole, 3, names=names, **TORCH) for c in clients]
        ours.round(clients, number)
        body = ours.server.body["base"]
        assert set(body) == set(whole) - {*HEAD}
        for name, found in body.items():
            shares = [EXAMPLES[client] / total for client in clients]
            mean = sum(s * m[name].double() for s, m in zip(shares, trained, strict=True))
            close({name: found}, {name: mean.to(found.dtype)})
    assert all(memory == {} for memory in ours.engine.memory.values())


@NETS
@pytest.mark.parametrize(("client", "novel"), [(1, False), (3, True)], ids=["known", "novel"])
def test_each_client_fine_tunes_the_whole_for_itself(net: Any, client: int, novel: bool) -> None:
    ours = federation(net, finetune_epochs=4)
    for number in range(2):
        ours.round([0, 1, 2], number)
    whole = with_initial_head(ours)
    expected = torch_sgd(ours.task, client, whole, 4, **TORCH | {"lr": RATE})
    assert all((expected[name] - whole[name]).abs().max() > 1e-4 for name in HEAD)
    for _ in range(2):  # nothing of the first is kept
        close(ours.personal(client), expected)
    close(with_initial_head(ours), whole)


def test_fine_tuning_is_clipped_as_local_training_is() -> None:
    ours = federation(local_clip=1e-6, local_weight_decay=0.0, finetune_epochs=1)
    tuned, whole = ours.personal(1), with_initial_head(ours)
    moved = torch.cat([(tuned[name] - whole[name]).flatten() for name in whole]).norm()
    torch.testing.assert_close(moved.item(), RATE * 1e-6, rtol=1e-4, atol=0)


def test_fine_tuning_goes_through_all_examples_in_batches() -> None:
    """Twelve examples make three batches of four: six steps in two passes."""
    ours = federation(Normed, batch_size=4, finetune_epochs=2)
    assert ours.personal(0)["norm.num_batches_tracked"] == 6


def test_without_fine_tuning_clients_use_the_body_with_the_initial_head() -> None:
    ours = federation(finetune_epochs=0)
    ours.round([0, 1])
    close(ours.personal(1), with_initial_head(ours))
    cohort = ours.engine.cohort([1], 9, training=False)
    ours.server.personalize(cohort)
    assert cohort.state.exchanges == []


def test_no_head_travels() -> None:
    ours = federation()
    size = count_bytes(ours.server.body["base"])
    assert [(e.down, e.up) for e in ours.round([0, 1]).state.exchanges] == [(size, size)] * 2
    cohort = ours.engine.cohort([1], 9, training=False)
    ours.server.personalize(cohort)
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, 0)]


def test_statistics_in_the_head_are_averaged() -> None:
    """Its layers are the same for all, until a client trains a model of its own."""
    ours = federation(Normed, head_layers=2)
    ours.round([0, 1, 2])
    assert ours.server.body["base"]["norm.num_batches_tracked"] > 0
    assert ours.personal(1).keys() == Normed().state_dict().keys()


def test_with_an_empty_head_the_body_is_the_model_of_fedavg() -> None:
    ours = federation(Normed, head_layers=0)
    fedavg = Federation("fedavg", make_task(Normed, novel=1), **MOMENTUM)
    for number in range(2):
        for each in (ours, fedavg):
            each.round([0, 1, 2], number)
    torch.testing.assert_close(ours.server.body, fedavg.server.model, rtol=0, atol=0)


def test_a_network_must_have_the_layers() -> None:
    with pytest.raises(UserError, match=r"0 to 2 layers .* got 3"):
        federation(head_layers=3)


def test_the_paper_preset_is_that_of_ten_local_epochs() -> None:
    run = from_keys("fedbabu", fedbabu.PRESETS["paper"])
    assert (run.rounds, run.cohort, run.task.clients) == (32, 0.1, 100)
    assert run.settings.batches == Epochs(10, 50)
    assert run.settings.local == Sgd(0.1, momentum=0.9)
    assert (run.settings.finetune_epochs, run.settings.finetune) == (5, Sgd(1e-3, momentum=0.9))

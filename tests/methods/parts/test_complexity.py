"""Parameters and FLOPs: by hand, and the numbers of pFedKT's appendix G."""

import pytest
import torch
from torch import nn

from hyperfed.errors import UserError
from hyperfed.methods.parts.complexity import (
    Comparison,
    compare_hypernetworks,
    cost_of,
    count_flops,
)
from hyperfed.nets import CharLSTM, Chunked, PFedKTCNN, shapes_of

TARGET = 1_706_458
"""Parameters of pFedKT's CNN on CIFAR-10, in the appendix."""


@pytest.fixture(scope="module")
def table_12() -> Comparison:
    return compare_hypernetworks(PFedKTCNN((3, 32, 32), 10), torch.zeros(1, 3, 32, 32))


def test_the_target_of_the_paper(table_12: Comparison) -> None:
    multiply_adds = (
        16 * 28 * 28 * (3 * 5 * 5) + 32 * 10 * 10 * (16 * 5 * 5) + 800 * 1920 + 1920 * 80 + 80 * 10
    )
    assert table_12.target.parameters == TARGET
    assert table_12.target.flops == 2 * multiply_adds


def test_the_small_hypernetwork(table_12: Comparison) -> None:
    assert table_12.small.flops == 102_600  # printed in the appendix
    weights, biases = 13 * 100 + 100 * 100 + 100 * 400, 100 + 100 + 400
    assert table_12.small.parameters == weights + biases
    assert f"{table_12.small.mebibytes:.4f}" == "0.1980"  # printed


def test_the_large_hypernetwork(table_12: Comparison) -> None:
    weights = 13 * 100 + 100 * 100 + 100 * TARGET
    assert table_12.large.flops == 2 * weights
    assert table_12.large.parameters == weights + 100 + 100 + TARGET
    assert int(table_12.large.mebibytes) == 657  # printed
    ratio = table_12.large.mebibytes / table_12.small.mebibytes
    assert round(ratio) == 3321  # "about 3321" clients store as much


def test_what_the_paper_calls_gigabytes_of_flops_is_four_times_flops_over_2_to_the_30(
    table_12: Comparison,
) -> None:
    printed_small = TARGET / 400 * 102_600 * 4 / 2**30
    printed_large = table_12.large.flops * 4 / 2**30
    assert (f"{printed_small:.4f}", f"{printed_large:.4f}") == ("1.6306", "1.2715")
    assert f"{printed_small / printed_large:.2f}" == "1.28"


def test_what_the_paper_leaves_out(table_12: Comparison) -> None:
    """Whole calls, and the embeddings of the chunks."""
    assert table_12.calls == 4267
    assert table_12.embeddings == 4267 * 13
    net = Chunked({"base": shapes_of(PFedKTCNN((3, 32, 32), 10))})
    assert table_12.generation_flops == count_flops(net) == 4267 * 102_600
    kept = sum(parameter.numel() for parameter in net.parameters())
    assert kept == table_12.small.parameters + table_12.embeddings
    assert f"{kept * 4 / 2**20:.4f}" == "0.4096"


def test_a_larger_output_brings_the_ratio_towards_one() -> None:
    """Figure 9 (a)."""
    target = PFedKTCNN((3, 32, 32), 10)
    found = [
        compare_hypernetworks(target, torch.zeros(1, 3, 32, 32), chunk=chunk)
        for chunk in (100, 400, 4000)
    ]
    narrow, paper, wide = (each.generation_flops / each.large.flops for each in found)
    assert 1 < wide < 1.05 < paper < 2 < narrow


def test_hypernetworks_of_another_shape() -> None:
    found = compare_hypernetworks(
        nn.Linear(4, 5), torch.zeros(1, 4), chunk=7, embedding=3, hidden=6, hidden_layers=2
    )
    hidden = 3 * 6 + 2 * 6 * 6
    assert found.small.flops == 2 * (hidden + 6 * 7)
    assert found.large.flops == 2 * (hidden + 6 * 25)
    assert (found.calls, found.embeddings) == (4, 4 * 3)


def test_an_lstm_is_counted_step_by_step() -> None:
    text, hidden, embedding, vocabulary = 7, 5, 3, 11
    gates = 4 * hidden * (embedding + hidden) + 4 * hidden * (hidden + hidden)  # two layers
    net = CharLSTM(vocabulary, embedding, hidden, layers=2)
    found = count_flops(net, torch.zeros(1, text, dtype=torch.int64))
    assert found == 2 * (text * gates + hidden * vocabulary)


def test_counting_leaves_the_network_as_it_was_and_scales_with_examples() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    cost = cost_of(net, torch.zeros(2, 3))
    assert (cost.parameters, cost.flops) == (3 * 4 + 4 + 8, 2 * 2 * 3 * 4)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_number_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="chunk must be at least 1, got 0"):
        compare_hypernetworks(nn.Linear(2, 2), torch.zeros(1, 2), chunk=0)

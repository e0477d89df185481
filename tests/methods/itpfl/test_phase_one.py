"""IT-PFL-HN, phase 1: pFedHN's gradient in one piece, presets, what embeddings come to tell."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hyperfed.methods import itpfl
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from methods.itpfl.checks import (
    PFEDHN,
    UNITS,
    check_phase_one,
    check_phase_two,
    federation,
    state,
)
from toys import Federation, close, make_task


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("clients", [[2], [0, 1, 2]])
def test_phase_one_is_pfedhns_gradient_in_one_piece(clients: list[int], private: bool) -> None:
    check_phase_one(clients, private=private)


@pytest.mark.parametrize("settings", [{"hyper_net": "chunks", "chunk": 7}, {"head_rank": 2}])
def test_so_it_is_with_every_kind_of_hypernetwork(settings: dict[str, Any]) -> None:
    check_phase_one([0, 1, 2], **settings)


DESCENTS: list[dict[str, Any]] = [
    {"cohort_reduction": "mean"},
    {"clip": 1e-3},  # a hundredth of the gradient's norm, or less
    {"cohort_reduction": "mean", "clip": 1e-3, "weight_decay": 0.2},
    {"weight_decay": 0.2, "embedding_weight_decay": 0.3, "embedding_lr": 0.4},
    {"weight_decay": 0.2, "embedding_weight_decay": 0.0},
]
"""The server's step: equations 7 and 9 are sums, and embeddings have their own rate and decay."""


@pytest.mark.parametrize("settings", DESCENTS)
def test_the_servers_step_is_by_sum_or_mean_clipped_and_decayed(settings: dict[str, Any]) -> None:
    check_phase_one([0, 1, 2], **settings)
    check_phase_two([0, 1, 2], **settings)


def test_the_papers_preset_is_its_text() -> None:
    """Appendix C: 500 steps of a tenth of the clients, the grids; equations 7 to 9 are sums."""
    run = from_keys("itpfl", {"preset": "paper"})
    own, rates = run.settings, {1e-1, 5e-2, 1e-2, 5e-3, 1e-3}
    assert (run.rounds, run.cohort, run.task.val, run.task.novel) == (500, 0.1, 0.15, 0.1)
    assert (own.hidden, own.hidden_layers, own.encoder_units) == (100, 3, 200)
    assert (own.cohort_reduction, own.encoder_reduction) == ("sum", "sum")
    assert {own.lr, own.embedding_lr, own.local_lr, own.encoder_lr} <= rates
    decays = {own.weight_decay, own.embedding_weight_decay, own.local_weight_decay}
    assert decays <= {1e-3, 1e-4, 1e-5}
    assert own.local_epochs in {1, 2, 5, 10}
    assert own.batch_size in {32, 64}
    assert own.local_momentum == 0.9
    assert (own.encoder, own.encoder_optimizer, own.standardized) == (
        "regression",
        "average",
        False,
    )
    assert own.embedding_start == 1.0  # as of PyTorch's embeddings, and of pFedHN's


def test_the_defaults_are_what_makes_embeddings_tell_of_their_clients() -> None:
    own = from_keys("itpfl", {}).settings
    found = (own.embedding_start, own.embedding_lr, own.embedding_weight_decay)
    assert found == (0.05, 1.0, 0.0)
    assert (own.encoder, own.encoder_optimizer) == ("regression", "adam")
    assert (own.cohort_reduction, own.encoder_server_lr, own.standardized) == ("sum", 1e-3, True)


def test_phase_one_is_pfedhn() -> None:
    """From the same start, over several rounds, with momentum, weight decay and local steps."""
    theirs = {"local_steps": 4, "batch_size": 6, "local_lr": 0.05, "hidden": 7}
    ours = Federation("itpfl", make_task(), **theirs, **PFEDHN, encoder_units=UNITS)
    pfedhn = Federation("pfedhn", make_task(), **theirs)
    ours.server.hyper_net.load_state_dict(pfedhn.server.hyper_net.state_dict())
    ours.server.embeddings.load_state_dict(pfedhn.server.embeddings.state_dict())
    for number, clients in enumerate([[0], [1, 2], [0, 3]]):
        ours.round(clients, number)
        pfedhn.round(clients, number)
    for name in ("hyper_net", "embeddings"):
        close(state(ours)[name], state(pfedhn)[name])


def test_embeddings_start_as_wide_as_is_said() -> None:
    wide, narrow = (federation(settings={"embedding_start": start}) for start in (1.0, 0.05))
    expected = 0.05 * wide.server.embeddings.weight
    close(narrow.server.embeddings.weight, expected)


def two_classes_each(clients: int = 30, classes: int = 6, examples: int = 24) -> Task:
    """Clients that differ in their two classes alone, which lie apart."""
    draw = torch.Generator().manual_seed(3)
    center = 2 * torch.randn(classes, 8, generator=draw, dtype=torch.float64)
    own = torch.stack([torch.randperm(classes, generator=draw)[:2] for _ in range(clients)])
    y = own.gather(1, torch.randint(2, (clients, examples), generator=draw)).flatten()
    x = center[y] + torch.randn(len(y), 8, generator=draw, dtype=torch.float64)
    rows = list(torch.arange(len(y)).split(examples))
    with seeded(0, "two classes"):
        models = {"base": torch.nn.Linear(8, classes).double()}
    return Task("two classes", x, y, rows, rows, rows, models, classes)


def explained(embedding: Tensor, proportions: Tensor) -> float:
    """R2 of linear regression of class proportions on embeddings, each client left out once."""
    error = torch.zeros((), dtype=torch.float64)
    for client in range(len(embedding)):
        others = torch.arange(len(embedding)) != client
        padded = torch.nn.functional.pad(embedding, (0, 1), value=1.0)
        fit = torch.linalg.lstsq(padded[others], proportions[others]).solution
        error += (padded[client] @ fit - proportions[client]).square().sum()
    return 1 - float(error / (proportions - proportions.mean(dim=0)).square().sum())


def test_class_proportions_explain_embeddings_by_default_and_not_as_drawn() -> None:
    task = two_classes_each()
    counts = [torch.bincount(task.y[rows], minlength=6) for rows in task.train]
    proportions = torch.stack(counts).double() / 24
    few = {"local_steps": 1, "batch_size": 24, "local_lr": 0.2, "hidden": 20, "hidden_layers": 1}
    paper = {key[7:]: value for key, value in itpfl.PRESETS["paper"].items() if "method" in key}
    found = []
    for settings in ({}, {key: paper[key] for key in paper if "embedding" in key or "lr" in key}):
        ours = Federation("itpfl", task, **(settings | few), encoder_units=4)
        for number in range(12):
            ours.round(list(range(number % 3, 30, 3)), number)
        found.append(explained(ours.server.embeddings.weight.detach(), proportions))
    default, drawn = found
    assert default > 0.3
    assert drawn < 0


# A mutant: the check of phase 1 fails on it, so much it is worth


def test_mutant_a_network_that_never_left_its_start_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Novel clients of phase 1 served from the copy that phase 2 is to tune."""
    monkeypatch.setattr(itpfl.Server, "novel_net", property(lambda self: self.tuned_net))
    with pytest.raises(AssertionError):
        check_phase_one([2])

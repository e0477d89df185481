"""The weights of pFedLA and HeurpFedLA: limits, who weighs more, what records have of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from hyperfed import trees
from hyperfed.runs import records
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from methods.pfedla.checks import CLOSE, LAYERS, SERVER, trained_federation
from toys import FEATURES, PLAIN, Federation, Normed, TwoLayers, make_task


def with_weights(federation: Any, logits: Tensor) -> Any:
    """Makes all layers' weights the softmax of the rows of ``logits`` (n, n), for good."""
    head = federation.server.hyper_nets.heads["base"]
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(logits.repeat(1, head.bias.shape[1] // len(logits)))
    return federation


STILL: dict[str, Any] = PLAIN | SERVER | {"lr": 1e-30}
"""Hypernetworks that do not move."""
ROUNDS = ([0, 1, 2, 3], [1, 3], [0, 1, 2])


@pytest.mark.parametrize("retain", [0, 3])
def test_identity_weights_are_local_training(retain: int) -> None:
    settings = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1}
    task = make_task(Normed)
    ours = Federation("pfedla", task, retain=retain, **(STILL | settings))
    if retain == 0:  # identity: exp(-1000) is 0; retaining all layers is the same
        ours = with_weights(ours, 1000 * torch.eye(4))
    local = Federation("local", task, **(PLAIN | settings))
    for number, cohort in enumerate(ROUNDS):
        for federation in (ours, local):
            federation.round(cohort, number)
    for client in range(4):
        torch.testing.assert_close(ours.personal(client), local.personal(client), **CLOSE)


def test_uniform_weights_are_fedavg_with_equal_weights() -> None:
    settings = {"local_steps": 3, "batch_size": 5, "local_lr": 0.1}
    task = make_task(Normed, examples=(9,) * 4)
    ours = with_weights(Federation("pfedla", task, **(STILL | settings)), torch.zeros(4, 4))
    fedavg = Federation("fedavg", task, **(PLAIN | settings))
    for number in range(3):
        for federation in (ours, fedavg):
            federation.round([0, 1, 2, 3], number)
    for client in range(4):
        torch.testing.assert_close(ours.personal(client), fedavg.personal(client), **CLOSE)


def chain(clients: int = 7, classes_of_one: int = 4) -> Task:
    """Client i has the classes i to i + 3, as in figure 6: close clients share most classes."""
    draw = torch.Generator().manual_seed(3)
    classes = clients + classes_of_one - 1
    centres = 1.5 * torch.randn(classes, FEATURES, dtype=torch.float64, generator=draw)
    y = torch.cat([torch.arange(24) % classes_of_one + client for client in range(clients)])
    noise = torch.randn(len(y), FEATURES, dtype=torch.float64, generator=draw)
    parts = list(torch.arange(len(y)).split(24))

    class Net(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, classes)

    with seeded(0, "chain"):
        models = {"base": Net().double()}
    return Task("chain", centres[y] + noise, y, parts, parts, parts, models, classes)


def test_clients_with_common_classes_weigh_more_than_strangers() -> None:
    """Figure 6, with the hypernetworks as they are by default."""
    settings = {"local_steps": 5, "batch_size": 24, "local_lr": 0.2}
    federation = Federation("pfedla", chain(), **(PLAIN | settings))
    everyone = torch.arange(7)
    for number in range(20):
        federation.round(everyone.tolist(), number)
    apart = (everyone[:, None] - everyone).abs()
    for layer, weights in federation.server.weights(everyone).items():
        own, neighbours = weights[apart == 0].mean(), weights[apart == 1].mean()
        strangers = weights[apart >= 4].mean()  # no class in common
        assert own > 1.2 * neighbours > 1.4 * strangers, layer


def test_each_client_has_a_hypernetwork_of_the_sizes_in_the_settings() -> None:
    settings = {"embedding_size": 6, "hidden": 7, "hidden_layers": 3}
    nets = Federation("pfedla", make_task(), **settings).server.hyper_nets
    assert nets.embeddings.weight.shape == (4, 6)
    assert [layer.weight.shape for layer in nets.trunk] == [(4, 7, 6), *[(4, 7, 7)] * 3]
    assert nets.heads["base"].weight.shape == (4, 2 * 4, 7)  # of two layers, for four clients


def test_a_rate_suits_its_preset() -> None:
    """The paper's is for many more and longer rounds than those of the default."""
    assert from_keys("pfedla", {}).settings.lr == 0.1
    for method in ("pfedla", "heurpfedla"):
        for preset in ("paper", "paper_100"):
            assert from_keys(method, {"preset": preset}).settings.lr == 1e-2


def test_weights_are_a_function_of_the_state() -> None:
    federation = trained_federation()
    before = trees.clone(federation.server.state())
    ids = torch.tensor([2, 0])
    weights = federation.server.weights(ids)
    assert {layer: alpha.shape for layer, alpha in weights.items()} == dict.fromkeys(LAYERS, (2, 4))
    for alpha in weights.values():
        assert not alpha.requires_grad
        assert bool((alpha >= 0).all())
        torch.testing.assert_close(alpha.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(federation.server.weights(ids), weights, rtol=0, atol=0)
    torch.testing.assert_close(federation.server.state(), before, rtol=0, atol=0)


def test_an_evaluation_records_who_takes_how_much_from_whom(tmp_path: Path) -> None:
    task = chain()
    settings = PLAIN | {"local_steps": 5, "batch_size": 24, "local_lr": 0.2, "lr": 1.0}
    keys: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "cohort": 1.0}
    run = hyperfed.train("pfedla", task, method=settings, out=tmp_path, **keys)
    ours, weights = Federation("pfedla", task, **settings), {}
    for number in range(4):
        ours.round(range(7), number)
        weights[number + 1] = ours.server.weights(torch.arange(7))  # rows: who takes
    assert run.folder is not None
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    told = {line["round"]: line["diagnostics"] for line in lines if line["split"] == "val"}
    assert list(told) == [2, 4]
    for number, diagnostics in told.items():
        found = trees.tree_map(torch.tensor, {"weights": diagnostics["weights"]})
        expected = trees.tree_map(Tensor.float, {"weights": {"base": weights[number]}})
        torch.testing.assert_close(found, expected, rtol=6e-4, atol=0)  # four digits
    assert [line["diagnostics"] for line in lines if line["split"] == "test"] == [{}, {}]
    assert [e.diagnostics for e in run.evaluations if e.split == "val"] == list(told.values())
    best = {"weights": {"base": weights[run.best.round]}}
    with_weights(run, torch.zeros(7, 7))  # what comes after it does not count
    torch.testing.assert_close(run.diagnostics(), best, rtol=0, atol=0)


def test_weights_of_more_clients_than_records_have_room_for_are_those_of_the_best_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are clients by clients for each layer, and thousands of clients are not rare."""
    numbers = 2 * 7**2  # body and head
    keys: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "cohort": 1.0}
    kept = {}
    for most in (numbers, numbers - 1):
        monkeypatch.setattr(records, "MOST_NUMBERS", most)
        run = hyperfed.train("pfedla", chain(), method=PLAIN, **keys)
        kept[most] = [bool(e.diagnostics) for e in run.evaluations if e.split == "val"]
        (shape,) = {alpha.shape for alpha in run.diagnostics()["weights"]["base"].values()}
        assert shape == (7, 7)
        assert caplog.text.count("not recorded at evaluations") == (most < numbers)
    assert kept == {numbers: [True, True], numbers - 1: [False, False]}
    assert f"the {numbers} numbers of the server's diagnostics" in caplog.text


def test_weights_that_are_uniform_are_told_from_those_that_were_learned() -> None:
    ours = Federation("pfedla", chain(), **PLAIN | {"local_steps": 5, "local_lr": 0.2, "lr": 1.0})
    for number in range(4):
        ours.round(range(7), number)

    def own() -> dict[str, float]:
        """The mean weight of a client's own model, of each layer."""
        told = ours.server.diagnostics()["weights"]["base"]
        return {layer: alpha.diagonal().mean().item() for layer, alpha in told.items()}

    assert all(mean > 2 / 7 for mean in own().values())
    with_weights(ours, torch.zeros(7, 7))
    assert own() == pytest.approx(dict.fromkeys(["body", "head"], 1 / 7))


def test_the_trained_model_can_be_evaluated() -> None:
    federation = trained_federation(evaluated="trained")
    stored = federation.server.trained["base"]
    for client in (0, 3):
        ours = federation.personal(client)
        torch.testing.assert_close(ours, trees.take(stored, client), rtol=0, atol=0)

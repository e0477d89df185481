"""PartialFed against one-piece autograd, and what travels, stays and is evaluated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import fedavg, partialfed
from hyperfed.nets.anatomy import layers_of
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator
from hyperfed.trees import Model
from toys import EXAMPLES, ONE_STEP, Federation, Normed, TwoLayers, client_loss, close, make_task

LR = 0.1
FIXED = ONE_STEP | {"strategy": "fixed"}
ADAPTIVE = ONE_STEP | {
    "strategy": "adaptive",
    "strategy_steps": 3,
    "strategy_lr": 2.0,
    "temperature": 0.7,
}
LAYERS = {"body": ("body.weight", "body.bias"), "head": ("head.weight", "head.bias")}


def stepped(ours: Federation, client: int, start: Model) -> Model:
    """One plain step on all data of a client."""
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    by = torch.autograd.grad(client_loss(ours.task, client, leaves), list(leaves.values()))
    return {name: start[name] - LR * g for name, g in zip(start, by, strict=True)}


def after_two_rounds(**settings: Any) -> Federation:
    """Client 0's own model differs from the global one."""
    ours = Federation("partialfed", make_task(novel=1), **settings)
    ours.round([0, 1, 2], 0)
    ours.round([1, 2], 1)
    return ours


def check_a_fixed_round() -> None:
    """Clients 0 and 2 load the body; all layers of what they train are averaged."""
    ours = after_two_rounds(**FIXED, head_layers=1)
    received = trees.clone(ours.server.model["base"])
    own = {client: trees.clone(ours.engine.memory[client]["model"]) for client in (0, 2)}
    trained = {}
    for client in (0, 2):
        start = received | {name: own[client][name] for name in LAYERS["head"]}
        assert all((received[name] - own[client][name]).abs().max() > 1e-4 for name in received)
        trained[client] = stepped(ours, client, start)
    ours.round([0, 2], 2)
    total = EXAMPLES[0] + EXAMPLES[2]
    mean = {
        name: (EXAMPLES[0] * trained[0][name] + EXAMPLES[2] * trained[2][name]) / total
        for name in received
    }
    for client in (0, 2):
        close(ours.personal(client), trained[client])
    close(ours.server.model["base"], mean)


def test_the_fixed_strategy_loads_the_body_and_trains_and_sends_all() -> None:
    check_a_fixed_round()


def strategy_by_hand(
    ours: Federation, received: Model, own: Model, logits: Tensor, draw: Any
) -> Tensor:
    """Stage A of client 0: every step differentiates the loss of a mixture written out."""
    for _ in range(ours.config.strategy_steps):
        torch.randperm(EXAMPLES[0], generator=draw)  # all data in another order
        noise = -torch.empty(2, 2, dtype=torch.float64).exponential_(generator=draw).log()
        leaf = logits.clone().requires_grad_()
        weight = ((leaf + noise) / ours.config.temperature).exp()
        weight = weight / weight.sum(1, keepdim=True)
        mixture = {
            name: weight[row, 0] * received[name] + weight[row, 1] * own[name]
            for row, names in enumerate(LAYERS.values())
            for name in names
        }
        client_loss(ours.task, 0, mixture).backward()
        logits = logits - ours.config.strategy_lr * leaf.grad
    return logits


def check_adaptive_rounds(**settings: Any) -> set[tuple[bool, ...]]:
    """Rounds of client 0 from a strategy it has learned already; returns the choices it made."""
    ours, choices = after_two_rounds(**ADAPTIVE | settings), set()
    logits = torch.zeros(2, 2, dtype=torch.float64)
    others = torch.Generator().manual_seed(5)
    for number in range(2, 8):
        received = {
            name: value + torch.randn(value.shape, dtype=torch.float64, generator=others)
            for name, value in ours.server.model["base"].items()
        }
        ours.server.model = {"base": received}
        own = trees.clone(ours.engine.memory[0]["model"])
        draw = generator(0, "client", 0, number, "train_model", 0)
        learned = strategy_by_hand(ours, received, own, logits, draw)
        assert (learned - logits).abs().max() > 1e-2
        noise = -torch.empty(2, 2, dtype=torch.float64).exponential_(generator=draw).log()
        keeps = (learned + noise)[:, 1] > (learned + noise)[:, 0]
        names = [
            n for keep, layer in zip(keeps, LAYERS.values(), strict=True) if keep for n in layer
        ]
        trained = stepped(ours, 0, received | {name: own[name] for name in names})
        ours.round([0], number)
        close(ours.engine.memory[0]["strategy"], learned)
        close(ours.personal(0), trained)
        close(ours.server.model["base"], trained)
        logits = learned
        choices.add(tuple(keeps.tolist()))
    return choices


def test_the_adaptive_strategy_descends_the_loss_of_the_mixture_and_draws_a_hard_choice() -> None:
    assert len(check_adaptive_rounds()) > 2  # of the four


def test_a_strategy_is_learned_by_plain_steps() -> None:
    """Momentum is of the model's training, of which there is one step here."""
    check_adaptive_rounds(local_momentum=0.9)


def check_the_frequencies() -> None:
    """Of many layers with the same logits, the share that is kept is the softmax of them."""
    wide = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2000))
    ours = Federation("partialfed", make_task(), **ADAPTIVE | {"strategy_lr": 1e-30})
    cohort = ours.engine.cohort([0], 0, training=True)
    for keep in (0.2, 0.5, 0.9):
        client = Probe(cohort, wide, torch.tensor([1 - keep, keep]).log().expand(2000, 2))
        model = {name: torch.zeros(1, 1) for name in layers_names(wide)}
        own = {name: torch.ones(1, 1) for name in model}
        loaded = torch.cat(list(client.load(model, own).values()))
        torch.testing.assert_close(loaded, loaded.round(), rtol=0, atol=1e-6)  # one or the other
        torch.testing.assert_close(loaded.mean().item(), keep, rtol=0, atol=0.025)


def layers_names(module: nn.Module) -> list[str]:
    return [name for names in layers_of(module).values() for name in names]


class Probe(partialfed.Client):
    """A client whose strategy is given."""

    def __init__(self, cohort: Any, module: nn.Module, strategy: Tensor) -> None:
        self.module, self.config, self.memory = module, partialfed.Config(), {}
        self.generator = generator(0, "probe")
        self.given = strategy

    def learn_strategy(self, model: Model, own: Model) -> Tensor:
        return self.given


def test_a_layer_is_kept_with_the_probability_of_its_logits() -> None:
    check_the_frequencies()


class TestMutants:
    """Mistakes that would go unnoticed in an accuracy."""

    def test_mutant_mixes_the_other_way_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learn = partialfed.Client.learn_strategy
        monkeypatch.setattr(
            partialfed.Client, "learn_strategy", lambda self, model, own: learn(self, own, model)
        )
        with pytest.raises(AssertionError, match="not close"):
            check_adaptive_rounds()

    def test_mutant_keeps_where_it_should_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partialfed, "KEEP", 0)
        with pytest.raises(AssertionError, match="not close"):
            check_adaptive_rounds()
        with pytest.raises(AssertionError, match="not close"):
            check_the_frequencies()

    def test_mutant_loads_where_the_fixed_strategy_keeps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = partialfed.Client.load
        monkeypatch.setattr(
            partialfed.Client, "load", lambda self, model, own: load(self, own, model)
        )
        with pytest.raises(AssertionError, match="not close"):
            check_a_fixed_round()

    def test_mutant_trains_the_soft_mixture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def soft(self: partialfed.Client, model: Model, own: Model) -> Model:
            strategy = self.learn_strategy(model, own)
            noise = partialfed.gumbel_noise(strategy, self.generator)
            keep = ((strategy + noise) / self.config.temperature).softmax(-1)[:, 1]
            layers = layers_of(self.module).values()
            return {
                name: torch.lerp(model[name], own[name], share)
                for share, names in zip(keep, layers, strict=True)
                for name in names
            }

        monkeypatch.setattr(partialfed.Client, "load", soft)
        with pytest.raises(AssertionError, match="not close"):
            check_adaptive_rounds()
        with pytest.raises(AssertionError, match="not close"):
            check_the_frequencies()

    def test_mutant_chooses_the_likelier_without_drawing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(partialfed, "gumbel_noise", lambda like, source: torch.zeros_like(like))
        with pytest.raises(AssertionError, match="not close"):
            check_the_frequencies()

    def test_mutant_draws_other_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            partialfed,
            "gumbel_noise",
            lambda like, source: torch.randn(like.shape, generator=source),
        )
        with pytest.raises(AssertionError, match="not close"):
            check_the_frequencies()

    @pytest.mark.parametrize("check", [check_a_fixed_round, check_adaptive_rounds])
    def test_mutant_overwrites_what_was_kept(
        self, check: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = partialfed.Client.load
        monkeypatch.setattr(
            partialfed.Client, "load", lambda self, model, own: load(self, model, own) | model
        )
        with pytest.raises(AssertionError, match="not close"):
            check()

    @pytest.mark.parametrize("check", [check_a_fixed_round, check_adaptive_rounds])
    def test_mutant_loads_nothing(self, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would be Local."""
        load = partialfed.Client.load
        monkeypatch.setattr(
            partialfed.Client, "load", lambda self, model, own: load(self, model, own) | own
        )
        with pytest.raises(AssertionError, match="not close"):
            check()

    def test_mutant_evaluates_the_global_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(partialfed.Client, "personal_model", lambda self, received: received)
        with pytest.raises(AssertionError, match="not close"):
            check_a_fixed_round()

    def test_mutant_averages_loaded_layers_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would be FedPer."""

        def body_only(clients: Any, step: Any, model: Any, batches: Any) -> Any:
            head = {name: model["base"][name] for name in LAYERS["head"]}
            averaged = partialfed.federation.average(clients, step, model, batches)
            return {"base": averaged["base"] | head}

        monkeypatch.setattr(fedavg, "average", body_only)
        with pytest.raises(AssertionError, match="not close"):
            check_a_fixed_round()

    def test_mutant_forgets_the_strategy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learn = partialfed.Client.learn_strategy

        def afresh(self: partialfed.Client, model: Model, own: Model) -> Tensor:
            self.memory.pop("strategy", None)
            return learn(self, model, own)

        monkeypatch.setattr(partialfed.Client, "learn_strategy", afresh)
        with pytest.raises(AssertionError, match="not close"):
            check_adaptive_rounds()


# Limits


def test_where_nothing_is_kept_it_is_fedavg_but_for_the_evaluated_model() -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1}
    task = make_task(Normed)
    ours = Federation("partialfed", task, **local, strategy="fixed", head_layers=0)
    fedavg = Federation("fedavg", task, **local)
    for number, clients in enumerate(([0, 1, 2], [1, 3], [1, 2])):
        ours.round(clients, number)
        fedavg.round(clients, number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    torch.testing.assert_close(ours.personal(1), ours.engine.memory[1]["model"], rtol=0, atol=0)
    gap = ours.personal(1)["head.weight"] - ours.server.model["base"]["head.weight"]
    assert gap.abs().max() > 1e-3


def test_where_all_is_kept_it_is_local() -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1, "keep_momentum": True}
    task = make_task(Normed)
    ours = Federation("partialfed", task, **local, strategy="fixed", head_layers=3)
    alone = Federation("local", task, **local)
    for number, clients in enumerate(([0, 1, 2, 3], [1, 3], [0, 1, 2])):
        ours.round(clients, number)
        alone.round(clients, number)
    for client in range(4):
        close(ours.personal(client), alone.personal(client))


# Layers, what travels, what stays


def test_a_named_layer_is_kept_with_its_buffers() -> None:
    settings = FIXED | {"head_layers": 0, "kept_layers": ("norm",), "local_lr": 1e-12}
    ours = Federation("partialfed", make_task(Normed), **settings)
    for number, clients in enumerate(([0, 1], [1], [1])):
        ours.round(clients, number)
    received, own = ours.server.model["base"], ours.engine.memory[0]["model"]
    ours.round([0], 3)
    found = ours.personal(0)
    assert found["norm.num_batches_tracked"] == own["norm.num_batches_tracked"] + 1 == 2
    near = {"rtol": 0, "atol": 1e-9}
    torch.testing.assert_close(found["norm.weight"], own["norm.weight"], **near)
    torch.testing.assert_close(found["body.weight"], received["body.weight"], **near)


def test_buffers_go_with_the_layer_that_is_chosen() -> None:
    ours = Federation("partialfed", make_task(Normed), **ADAPTIVE)
    counter, kept = "norm.num_batches_tracked", set()
    for number in range(4):
        ours.round([0, 1] if number == 0 else [1], number)
    for number in range(4, 16):
        own = trees.clone(ours.engine.memory[0]["model"])
        received = trees.clone(ours.server.model["base"])
        assert received[counter] > own[counter]
        ours.round([0], number)
        found = ours.personal(0)
        keeps = bool(found[counter] == own[counter] + 1)
        start = own if keeps else received
        assert found[counter] == start[counter] + 1
        hidden = 0.9 * start["norm.running_var"]
        assert (found["norm.running_var"] > hidden).all()  # a tenth of the batch's is added
        kept.add(keeps)
        ours.server.model["base"] = received | {counter: received[counter] + 50}
    assert kept == {True, False}


@pytest.mark.parametrize("strategy", ["fixed", "adaptive"])
@pytest.mark.parametrize("net", [TwoLayers, Normed])
def test_all_layers_travel_both_ways_and_a_model_is_kept(
    net: type[nn.Module], strategy: str
) -> None:
    ours = Federation("partialfed", make_task(net), **ADAPTIVE | {"strategy": strategy})
    for number in range(2):
        cohort = ours.round([0, 2], number)
        size = trees.count_bytes(trees.model_of(ours.task.models["base"]))
        assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2
    layers = len(layers_of(ours.task.models["base"]))
    logits = 8 * 2 * layers if strategy == "adaptive" else 0
    assert trees.count_bytes(ours.engine.memory[0]) == size + logits


@pytest.mark.parametrize("strategy", ["fixed", "adaptive"])
def test_a_client_without_a_model_of_its_own_loads_all(strategy: str) -> None:
    ours = Federation("partialfed", make_task(), **ADAPTIVE | {"strategy": strategy})
    ours.round([0, 1], 0)
    received = trees.clone(ours.server.model["base"])
    torch.testing.assert_close(ours.personal(3), received, rtol=0, atol=0)  # it was never asked
    expected = stepped(ours, 3, received)
    ours.round([3], 1)
    close(ours.personal(3), expected)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_novel_client_loads_and_trains_the_global_model_and_sends_nothing(steps: int) -> None:
    ours = after_two_rounds(**ADAPTIVE, novel_steps=steps)
    received = trees.clone(ours.server.model["base"])
    expected = received
    for _ in range(steps):
        expected = stepped(ours, 3, expected)
    close(ours.personal(3), expected)
    torch.testing.assert_close(ours.server.model["base"], received, rtol=0, atol=0)
    cohort = ours.engine.cohort([3], 99, training=False)
    ours.server.personalize(cohort)
    assert [e.up for e in cohort.state.exchanges] == ([0] if steps else [])


@pytest.mark.parametrize("settings", [{"head_layers": 3}, {"kept_layers": ("norm",)}])
def test_layers_that_a_target_does_not_have_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"0 to 2 and kept_layers among .*body, head"):
        Federation("partialfed", make_task(), strategy="fixed", **settings)


@pytest.mark.parametrize("preset", partialfed.PRESETS)
def test_the_presets_are_settings_of_a_run(preset: str) -> None:
    config = from_keys("partialfed", {"preset": preset})
    assert config.settings.strategy == "adaptive"
    assert (config.rounds, config.cohort) == ((500, 0.1) if preset == "pfedkt" else (30, 5))
    named = from_keys("partialfed", {"method.kept_layers": ["norm1", "norm2"]})
    assert named.settings.kept_layers == ("norm1", "norm2")

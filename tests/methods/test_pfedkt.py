"""pFedKT against one-piece autograd, and what travels, stays and is evaluated."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hyperfed import trees
from hyperfed.errors import UserError
from hyperfed.methods import pfedkt
from hyperfed.methods.parts.contrast import contrastive_loss, distances
from hyperfed.nets import CharLSTM, PFedKTCNN
from hyperfed.nets.layers import draw_weights
from hyperfed.nets.shapes import spread_of
from hyperfed.runs.config import from_keys
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Outline, Task
from hyperfed.trees import Model
from toys import (
    CLASSES,
    EXAMPLES,
    FEATURES,
    ONE_STEP,
    Federation,
    Normed,
    client_loss,
    close,
    logits,
    make_task,
)

SMALL: dict[str, Any] = {"chunk": 5, "hidden": 6, "embedding_size": 3}
"""A hypernetwork of 8 chunks of the 39 parameters."""
EQUATION_1: dict[str, Any] = {"absorb_steps": 1, "optimizer": "sgd", "lr": 0.4}
SETTINGS = ONE_STEP | SMALL | EQUATION_1 | {"contrast_weight": 0.3, "margin": 20.0}
"""The hinge is active, and the contrastive loss counts."""
PARAMETERS = FEATURES * 4 + 4 + 4 * CLASSES + CLASSES

CASES = {
    "A": {"hypernetwork": False, "contrast": "none"},
    "B": {"contrast": "none"},
    "C": {"hypernetwork": False},
    "D": {},
}
"""Table 11."""

LOSSES = [
    *[("triplet", distance) for distance in ("kl", "cosine", "l2", "mse")],
    ("moon", "cosine"),
    ("moon", "kl"),
    *[("regularization", distance) for distance in ("kl", "cosine", "l2", "mse")],
    ("none", "kl"),
]
"""Table 10, and none of them."""


def distance_by_hand(private: Tensor, other: Tensor, distance: str) -> Tensor:
    """(B,) written out from appendix F.3 and equation 2: KL(other || private)."""
    p, q = private.exp() / private.exp().sum(1, True), other.exp() / other.exp().sum(1, True)
    lengths = (private**2).sum(1).sqrt() * (other**2).sum(1).sqrt()
    if distance == "kl":
        return (q * (q / p).log()).sum(1)
    if distance == "cosine":
        return 1 - (private * other).sum(1) / lengths
    square = ((private - other) ** 2).sum(1)
    return square.sqrt() if distance == "l2" else square


def loss_by_hand(
    federation: Federation, client: int, private: Model, received: Model, previous: Model
) -> Tensor:
    """Equation 3 on all training data of a client, differentiable in ``private``."""
    task, config = federation.task, federation.config
    net, index = task.models["base"], task.train[client]
    x, y = task.x[index], task.y[index]
    outputs = logits(net, private, x)
    supervised = F.cross_entropy(outputs, y)
    near = distance_by_hand(outputs, logits(net, received, x), config.distance)
    far = distance_by_hand(outputs, logits(net, previous, x), config.distance)
    mu = config.contrast_weight
    if config.contrast == "none":
        return supervised
    if config.contrast == "regularization":
        return mu * near.mean() + (1 - mu) * supervised
    if config.contrast == "moon":
        similar, other = ((-each / config.temperature).exp() for each in (near, far))
        return mu * -(similar / (similar + other)).log().mean() + (1 - mu) * supervised
    return mu * F.relu(near.mean() - far.mean() + config.margin) + (1 - mu) * supervised


def round_by_hand(
    federation: Federation, client: int, received: Model, previous: Model, phi: Model
) -> tuple[Model, Model]:
    """One step on f(theta(phi)), which autograd sees in one piece: (trained theta, new phi).

    With one plain local step of rate eta, delta is eta times the gradient.
    """
    config = federation.config
    leaves = {name: value.clone().requires_grad_() for name, value in phi.items()}
    theta = functional_call(hyper_net(federation), leaves, ("base",))
    loss = loss_by_hand(federation, client, theta, received, previous)
    by = torch.autograd.grad(loss, [*theta.values(), *leaves.values()])
    by_theta, by_phi = by[: len(theta)], by[len(theta) :]
    trained = {
        n: v.detach() - config.local_lr * g
        for (n, v), g in zip(theta.items(), by_theta, strict=True)
    }
    rate = config.lr * config.local_lr
    return trained, {n: v - rate * g for (n, v), g in zip(phi.items(), by_phi, strict=True)}


def hyper_net(federation: Federation) -> nn.Module:
    net: nn.Module = pfedkt.Client.networks(federation.task.outline(), federation.config)["base"]
    return net


def after_two_rounds(**settings: Any) -> Federation:
    """Global, previous and generated model of client 0 all differ."""
    federation = Federation("pfedkt", make_task(novel=1), **SETTINGS | settings)
    federation.round([0, 1], 0)
    federation.round([1, 2], 1)
    return federation


def check_a_round(**settings: Any) -> None:
    federation = after_two_rounds(**settings)
    memory, received = federation.engine.memory[0], federation.server.model["base"]
    trained, phi = round_by_hand(federation, 0, received, memory["model"], memory["hypernetwork"])
    federation.round([0], 2)
    ours = federation.engine.memory[0]
    close(ours["model"], trained)
    close(ours["hypernetwork"], phi)
    moved = trees.subtract(memory["hypernetwork"], phi)
    assert max(change.abs().max().item() for change in moved.values()) > 1e-4


@pytest.mark.parametrize(("contrast", "distance"), LOSSES)
def test_a_round_is_a_gradient_step_on_the_one_piece_objective(
    contrast: str, distance: str
) -> None:
    check_a_round(contrast=contrast, distance=distance)


def test_so_it_is_at_every_temperature_of_moons_loss() -> None:
    check_a_round(contrast="moon", distance="cosine", temperature=0.2)


def test_nothing_draws_the_model_where_the_hinge_is_not_active() -> None:
    """Near the global model and far from the previous one: the gradient is the supervised one."""
    federation = after_two_rounds(distance="mse", margin=0.0)
    memory = federation.engine.memory[0]
    received = functional_call(hyper_net(federation), memory["hypernetwork"], ("base",))
    federation.server.model = {"base": received}
    federation.round([0], 2)
    leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
    index = federation.task.train[0]
    outputs = logits(federation.task.models["base"], leaves, federation.task.x[index])
    (0.7 * F.cross_entropy(outputs, federation.task.y[index])).backward()
    expected = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    close(federation.engine.memory[0]["model"], expected)


def test_global_and_previous_model_run_in_evaluation_mode() -> None:
    """Their batch-norm has their own statistics, the private model's those of the batch."""
    settings = SETTINGS | {"hypernetwork": False, "distance": "mse"}
    federation = Federation("pfedkt", make_task(Normed), **settings)
    federation.round([0, 1], 0)
    federation.round([1, 2], 1)
    previous = trees.clone(federation.engine.memory[0]["model"])
    received = trees.clone(federation.server.model["base"])
    net, index = Normed().double(), federation.task.train[0]
    x, y = federation.task.x[index], federation.task.y[index]

    def outputs(model: Model) -> Tensor:
        made: Tensor = functional_call(net.eval(), model, (x,))
        return made

    leaves = {name: received[name].clone().requires_grad_() for name, _ in net.named_parameters()}
    private = functional_call(net.train(), trees.clone(received) | leaves, (x,))
    near = ((private - outputs(received)) ** 2).sum(1).mean()
    far = ((private - outputs(previous)) ** 2).sum(1).mean()
    (0.3 * F.relu(near - far + 20.0) + 0.7 * F.cross_entropy(private, y)).backward()
    federation.round([0], 2)
    for name, leaf in leaves.items():
        ours = federation.engine.memory[0]["model"][name]
        close(ours, leaf.detach() - 0.1 * leaf.grad)


def flipped(sent: Model, trained: Model) -> Model:
    return {name: trained[name] - sent[name] for name in sent}


def reversed_divergence(private: Tensor, other: Tensor, distance: Any) -> Tensor:
    p, q = private.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def exchanged(near: Tensor, far: Tensor, *settings: Any, **more: float) -> Tensor:
    return contrastive_loss(far, near, *settings, **more)


def averaged(private: Tensor, other: Tensor, distance: Any) -> Tensor:
    return distances(private, other, distance) / private.shape[-1]


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("subtract", flipped),
        ("distances", reversed_divergence),
        ("distances", averaged),
        ("contrastive_loss", exchanged),
    ],
)
def test_a_wrong_sign_direction_or_scale_is_caught(
    name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pfedkt, name, mutant)
    with pytest.raises(AssertionError):
        check_a_round()


def test_several_local_steps_are_absorbed_as_their_sum() -> None:
    """The gradient is that of <theta(phi), delta>, delta being sent minus trained."""
    federation = after_two_rounds(local_steps=5, batch_size=4, local_momentum=0.9)
    phi = federation.engine.memory[0]["hypernetwork"]
    federation.round([0], 2)
    ours = federation.engine.memory[0]
    leaves = {name: value.clone().requires_grad_() for name, value in phi.items()}
    theta = functional_call(hyper_net(federation), leaves, ("base",))
    sent, trained = torch.cat([v.flatten() for v in theta.values()]), ours["model"].values()
    delta = sent.detach() - torch.cat([v.flatten() for v in trained])
    (sent @ delta).backward()
    expected = {name: leaf.detach() - 0.4 * leaf.grad for name, leaf in leaves.items()}
    close(ours["hypernetwork"], expected)


def gap(federation: Federation, phi: Model, trained: Model) -> Tensor:
    """|theta(phi) - trained|^2 / 2, differentiable in phi."""
    theta = functional_call(hyper_net(federation), phi, ("base",))
    return torch.stack([((theta[n] - trained[n]) ** 2).sum() for n in theta]).sum() / 2


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("name", "optimizer"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)]
)
def test_absorbing_is_fitting_what_was_trained(
    steps: int, name: str, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    """By PyTorch's own optimisers, as PyTorch sets them; each turn with a new one."""
    federation = after_two_rounds(absorb_steps=steps, optimizer=name, lr=0.03, local_steps=3)
    for number in (2, 3):
        before = trees.clone(federation.engine.memory[0]["hypernetwork"])
        federation.round([0], number)
        ours = federation.engine.memory[0]
        leaves = {key: value.requires_grad_() for key, value in before.items()}
        by_hand = optimizer(leaves.values(), lr=0.03)
        for _ in range(steps):
            by_hand.zero_grad()
            gap(federation, leaves, ours["model"]).backward()
            by_hand.step()
        close(ours["hypernetwork"], trees.detach(leaves))


def left(**settings: Any) -> float:
    """What is left of |delta|^2 after a turn of client 0, with the hypernetwork of the defaults."""
    settings = {"local_steps": 20, "batch_size": 8, "local_lr": 0.05} | settings
    federation = Federation("pfedkt", make_task(), **settings)
    phi = draw_weights(hyper_net(federation), generator(0, "client", 0, 0, "train_model", 0))
    federation.round([0])
    ours = federation.engine.memory[0]
    after = gap(federation, ours["hypernetwork"], ours["model"])
    return (after / gap(federation, phi, ours["model"])).item()


def test_the_defaults_absorb_what_one_step_leaves() -> None:
    assert left() < 0.02
    paper = from_keys("pfedkt", {"preset": "paper"}).settings
    assert left(absorb_steps=paper.absorb_steps, optimizer=paper.optimizer, lr=paper.lr) > 0.3


def test_the_previous_model_of_a_newcomer_is_the_initial_global_one() -> None:
    federation = after_two_rounds()
    initial, received = federation.task.outline().initial(), federation.server.model["base"]
    phi = draw_weights(hyper_net(federation), generator(0, "client", 3, 2, "train_model", 0))
    trained, phi = round_by_hand(federation, 3, received, initial, phi)
    federation.round([3], 2)
    close(federation.engine.memory[3]["model"], trained)
    close(federation.engine.memory[3]["hypernetwork"], phi)


# Which model is evaluated, what is averaged, what travels, what stays


def check_the_evaluated_model() -> None:
    federation = after_two_rounds()
    memory = federation.engine.memory[0]
    torch.testing.assert_close(federation.personal(0), memory["model"], rtol=0, atol=0)


def test_the_trained_private_model_is_evaluated() -> None:
    check_the_evaluated_model()


def the_global_one(self: pfedkt.Client, received: Model) -> Model:
    return received


def the_generated_one(self: pfedkt.Client, received: Model) -> Model:
    return self.generate(self.hyper_net())


@pytest.mark.parametrize("mutant", [the_global_one, the_generated_one])
def test_another_one_would_be_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfedkt.Client, "personal_model", mutant)
    with pytest.raises(AssertionError):
        check_the_evaluated_model()


def test_a_known_client_that_was_never_asked_uses_the_global_model() -> None:
    federation = Federation("pfedkt", make_task(), **SETTINGS)
    federation.round([0, 1])
    torch.testing.assert_close(federation.personal(2), federation.server.model["base"])


@pytest.mark.parametrize("case", CASES)
def test_the_global_model_can_be_evaluated_instead(case: str) -> None:
    """As the paper does for A and C of its ablation; training is the same."""
    trained = after_two_rounds(**CASES[case])
    ours = after_two_rounds(**CASES[case], evaluated="global", novel_rounds=1)
    torch.testing.assert_close(ours.server.model, trained.server.model, rtol=0, atol=0)
    torch.testing.assert_close(ours.engine.memory, trained.engine.memory, rtol=0, atol=0)
    for client in range(4):  # never asked, or novel, all alike
        found = ours.personal(client)
        torch.testing.assert_close(found, ours.server.model["base"], rtol=0, atol=0)
    cohort = ours.engine.cohort([3], 99, training=False)
    ours.server.personalize(cohort)
    assert not cohort.state.exchanges  # a novel client trains nothing for it
    gap = ours.personal(0)["head.weight"] - trained.personal(0)["head.weight"]
    assert gap.abs().max() > 1e-3


def test_the_server_averages_by_training_examples_buffers_too() -> None:
    federation = Federation("pfedkt", make_task(Normed), **SETTINGS)
    federation.round([0, 1, 2])
    kept = [federation.engine.memory[client]["model"] for client in range(3)]
    share = [EXAMPLES[client] / sum(EXAMPLES[:3]) for client in range(3)]
    for name, ours in federation.server.model["base"].items():
        mean = sum(s * model[name].double() for s, model in zip(share, kept, strict=True))
        close(ours, mean.to(ours.dtype))
    assert federation.server.model["base"]["norm.running_mean"].abs().max() > 1e-3


def test_a_private_model_goes_on_with_its_own_buffers() -> None:
    federation = Federation("pfedkt", make_task(Normed), **SETTINGS)
    for number, clients in enumerate(([0, 1], [1], [0])):
        federation.round(clients, number)
    kept = federation.engine.memory[0]["model"]
    assert kept["norm.num_batches_tracked"] == 2  # the global model's would give 3


@pytest.mark.parametrize("net", [None, Normed])
def test_a_model_goes_down_and_a_model_comes_up(net: Any) -> None:
    task = make_task(net) if net else make_task()
    cohort = Federation("pfedkt", task, **SETTINGS).round([0, 2])
    size = trees.count_bytes(trees.model_of(task.models["base"]))
    assert [(e.down, e.up) for e in cohort.state.exchanges] == [(size, size)] * 2


def test_what_a_client_keeps() -> None:
    federation = after_two_rounds()
    chunks = 8  # ceil(39 / 5)
    weights = (3 * 6 + 6) + (6 * 6 + 6) + (6 * 5 + 5)
    assert PARAMETERS == 39
    assert set(federation.engine.memory) == {0, 1, 2}
    for memory in federation.engine.memory.values():
        assert trees.count_bytes(memory["hypernetwork"]) == 8 * (chunks * 3 + weights)
        assert trees.count_bytes(memory) == 8 * (chunks * 3 + weights + PARAMETERS)


def test_every_client_starts_from_a_hypernetwork_of_its_own() -> None:
    first, second = after_two_rounds(lr=1e-30), after_two_rounds(lr=1e-30)
    of = [federation.engine.memory for federation in (first, second)]
    torch.testing.assert_close(of[0][0]["hypernetwork"], of[1][0]["hypernetwork"], rtol=0, atol=0)
    for name, value in of[0][0]["hypernetwork"].items():
        assert (value - of[0][1]["hypernetwork"][name]).abs().min() > 0


def test_a_first_model_has_the_spread_of_the_target() -> None:
    """Otherwise the first weights of a wide layer are too large to train: see ``Chunked``."""
    federation = Federation("pfedkt", make_task(), **SETTINGS)
    net, noise = hyper_net(federation), generator(0, "draws")
    wanted = spread_of(federation.task.models["base"])
    models = [functional_call(net, draw_weights(net, noise), ("base",)) for _ in range(400)]
    for name, value in wanted.items():
        square = torch.stack([model[name].square().mean() for model in models]).mean()
        assert square.sqrt().item() == pytest.approx(value, rel=0.1)


def test_of_a_regression_there_is_no_divergence() -> None:
    """The softmax of one number is 1, whatever the number: nothing would be transferred."""
    task = make_task(classes=0)
    with pytest.raises(UserError, match='a task for pfedkt with distance "kl" must have classes'):
        Federation("pfedkt", task)
    Federation("pfedkt", task, distance="l2")
    Federation("pfedkt", task, contrast="none")  # which measures none


def test_the_hypernetworks_of_the_paper() -> None:
    """Table 2 and appendix G.1: 102,600 / 2 weights beside biases and chunk embeddings."""
    target = PFedKTCNN((3, 32, 32), 10)
    outline = Outline({"base": target}, 50, 10)

    def size(**settings: Any) -> int:
        with torch.device("meta"):
            net = pfedkt.Client.networks(outline, pfedkt.Config(**settings))["base"]
        return sum(parameter.numel() for parameter in net.parameters())

    assert size() == 102_600 // 2 + 600 + 4267 * 13
    assert size(hidden_layers=2) - size() == 100 * 100 + 100
    large = 13 * 100 + 100 * 100 + 100 * 1_706_458
    assert size(chunk=None) == large + 200 + 1_706_458 + 13


# The ablation of table 11, and limits


@pytest.mark.parametrize("case", CASES)
def test_the_cases_of_the_ablation(case: str) -> None:
    federation = after_two_rounds(**CASES[case])
    memory = federation.engine.memory[0]
    assert ("hypernetwork" in memory) == (case in "BD")
    received, previous = federation.server.model["base"], memory["model"]
    if case in "BD":
        expected, _ = round_by_hand(federation, 0, received, previous, memory["hypernetwork"])
    else:
        leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
        loss_by_hand(federation, 0, leaves, received, previous).backward()
        expected = {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}
    federation.round([0], 2)
    close(federation.engine.memory[0]["model"], expected)


@pytest.mark.parametrize("case", ["B", "D"])
def test_others_reach_a_private_model_by_the_contrast_alone(case: str) -> None:
    """So that each trains alone in case B, whatever the others do."""
    alone, together = (Federation("pfedkt", make_task(), **SETTINGS | CASES[case]) for _ in "ab")
    for number in range(3):
        alone.round([0], number)
        together.round([0, 1, 2], number)
    own, among = (each.engine.memory[0]["model"]["head.weight"] for each in (alone, together))
    assert torch.equal(own, among) == (case == "B")


def test_with_neither_part_it_is_fedavg_but_for_the_evaluated_model() -> None:
    local = {"local_steps": 4, "batch_size": 5, "local_lr": 0.1}
    ours = Federation("pfedkt", make_task(Normed), **local, **CASES["A"])
    fedavg = Federation("fedavg", make_task(Normed), **local)
    for number, clients in enumerate(([0, 1, 2], [1, 3])):
        ours.round(clients, number)
        fedavg.round(clients, number)
    torch.testing.assert_close(ours.server.model, fedavg.server.model, rtol=0, atol=0)
    gap = ours.personal(1)["head.weight"] - ours.server.model["base"]["head.weight"]
    assert gap.abs().max() > 1e-3


def test_without_weight_the_contrast_is_as_good_as_none() -> None:
    none, weightless = after_two_rounds(contrast="none"), after_two_rounds(contrast_weight=0.0)
    close(none.engine.memory, weightless.engine.memory)


def test_training_lowers_the_loss_of_every_client() -> None:
    local = {"local_steps": 5, "batch_size": 8, "local_lr": 0.05}
    federation = Federation("pfedkt", make_task(), **local, **EQUATION_1 | {"lr": 0.1})
    task = federation.task

    def losses() -> list[float]:
        models = [federation.personal(client) for client in range(4)]
        return [client_loss(task, client, model).item() for client, model in enumerate(models)]

    before = losses()
    for number in range(16):
        federation.round([0, 1, 2, 3], number)
    assert all(new < 0.7 * old for old, new in zip(before, losses(), strict=True))


# Novel clients


def test_a_novel_client_does_what_a_known_one_does_with_the_global_model_frozen() -> None:
    federation = after_two_rounds(novel_rounds=3)
    received = trees.clone(federation.server.model["base"])
    previous = federation.task.outline().initial()
    phi = draw_weights(hyper_net(federation), generator(0, "client", 3, 99, "join", 0))
    for _ in range(3):  # what the second one absorbs shows in the third
        previous, phi = round_by_hand(federation, 3, received, previous, phi)
    close(federation.personal(3), previous)
    torch.testing.assert_close(federation.server.model["base"], received, rtol=0, atol=0)
    assert 3 not in federation.engine.memory


def test_a_novel_client_without_rounds_uses_the_global_model_and_uploads_nothing() -> None:
    federation = after_two_rounds(novel_rounds=0)
    ours = federation.personal(3)
    torch.testing.assert_close(ours, federation.server.model["base"], rtol=0, atol=0)
    federation = after_two_rounds(novel_rounds=1)
    cohort = federation.engine.cohort([3], 99, training=False)
    federation.server.personalize(cohort)
    assert [(e.step, e.up) for e in cohort.state.exchanges] == [("join", 0)]


# Text, and the published settings


def test_a_round_on_text() -> None:
    """An LSTM that predicts the next character of each client's own made-up tokens."""
    vocabulary, length = 7, 5
    draw = torch.Generator().manual_seed(3)
    x = torch.randint(vocabulary, (36, length), generator=draw)
    rows = list(torch.arange(36).split(6))
    with seeded(0, "text"):
        net = CharLSTM(vocabulary, embedding=3, hidden=4, layers=2).double()
    task = Task(
        name="text",
        x=x,
        y=(x[:, -1] + 1) % vocabulary,
        train=rows[:2],
        val=rows[2:4],
        test=rows[4:],
        models={"base": net},
        classes=vocabulary,
    )
    federation = Federation("pfedkt", task, local_steps=2, batch_size=4, **SMALL)
    federation.round([0, 1], 0)
    federation.round([0], 1)
    ours, initial = federation.personal(0), trees.model_of(net)
    assert trees.structure(ours) == trees.structure(initial)
    assert all((ours[name] - initial[name]).abs().max() > 1e-4 for name in initial)


@pytest.mark.parametrize("preset", pfedkt.PRESETS)
def test_the_presets_are_settings_of_a_run(preset: str) -> None:
    config = from_keys("pfedkt", {"preset": preset})
    assert config.settings.local_lr == 1e-2
    expected = SimpleNamespace(weight=1e-3, margin=0.1, embedding=13, layers=1)
    if preset == "paper_cifar100":
        expected = SimpleNamespace(weight=1e-4, margin=5.0, embedding=51, layers=2)
    ours = config.settings
    found = (ours.contrast_weight, ours.margin, ours.embedding_size, ours.hidden_layers)
    assert found == (expected.weight, expected.margin, expected.embedding, expected.layers)
    if preset == "default":
        assert (ours.absorb_steps, ours.optimizer) == (100, "adam")
    else:
        assert (ours.absorb_steps, ours.optimizer, ours.lr) == (1, "sgd", 5e-3)
        assert (config.rounds, config.cohort, ours.local_epochs) == (500, 0.1, 10)
        assert (config.task.val, config.task.test) == (0.1, 0.1)

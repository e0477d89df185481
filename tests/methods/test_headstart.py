"""HeadStart: its update against one-piece autograd, where it begins, and what is averaged."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperfed
from hyperfed import trees
from hyperfed.data.own import mean_squared_error
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call
from hyperfed.errors import UserError
from hyperfed.methods import headstart
from hyperfed.nets.descriptors import Centred
from hyperfed.system.randomness import generator, seeded
from hyperfed.task import Task
from hyperfed.training import UnlabelledError
from toys import CLASSES, FEATURES, PLAIN, Federation, Normed, TwoLayers, close, logits, make_task

SETTINGS: dict[str, Any] = PLAIN | {
    "local_steps": 1,
    "batch_size": 5,
    "local_lr": 0.1,
    "optimizer": "sgd",
    "lr": 0.3,
    "network_lr": 0.5,
    "momentum": 0.0,
    "clip": None,
    "descriptor_size": 3,
    "common_lr": 0.7,
    "hidden": 7,
    "hidden_layers": 1,
    "novel_rounds": 0,
}


def drawn(task: Task, client: int, number: int, step: str) -> tuple[Tensor, Tensor]:
    """The batch of 5 that a client is given in a step: a function of these keys."""
    rows = task.train[client]
    source = generator(0, "batches", client, number, step, 0)
    rows = rows[torch.randperm(len(rows), generator=source)[:5]]
    return task.x[rows], task.y[rows]


def told(config: headstart.Config, client: int, number: int, y: Tensor) -> Tensor:
    """The labels that a client's descriptor is made with in a round."""
    draw = torch.rand((), generator=generator(0, "client", client, number, "describe_half", 0))
    return torch.full_like(y, -1) if config.label_dropout and draw < config.label_dropout else y


def expected_after(
    federation: Federation, clients: list[int], number: int, standard: list[Tensor]
) -> dict[str, Tensor]:
    """Both networks after a round, the objective being one piece for autograd.

    With one plain local step of rate 0.1, delta is 0.1 times the gradient of a client's loss by its
    model: what makes descriptors and features descends the mean loss at rate 0.5 * 0.1, matrices of
    the output at 0.3 * 0.1, and the common model, whose gradient is that mean, at 0.7 * 0.1. It is
    averaged apart from what is clipped.
    """
    server, task = federation.server, federation.task
    common = list(server.hyper_net.buffers())
    for value in common:
        value.requires_grad_()
    named = parameters(federation)
    looks = [drawn(task, client, number, "describe_half") for client in clients]
    looks = [
        (x, told(server.config, client, number, y))
        for client, (x, y) in zip(clients, looks, strict=True)
    ]
    descriptor = torch.stack([server.descriptor_net(x[:3], y[:3]).mean(0) for x, y in looks])
    if not standard:
        own = descriptor.detach()
        mean = own.sum(0) / len(own)
        square = ((own - mean) ** 2).sum() / own.numel()
        standard += [mean, torch.sqrt(square)]
    made = server.hyper_net((descriptor - standard[0]) / standard[1])
    objective = torch.zeros((), dtype=torch.float64)
    for row, client in enumerate(clients):
        x, y = drawn(task, client, number, "train_model")
        model = {name: value[row] for name, value in made.items()} | kept(federation, client)
        output = logits(task.models["base"], model, x)
        if not kept(federation, client) and (looks[row][1] >= 0).all():
            output = output + frequencies(task, client, server.config.pseudo_count).log()
        objective = objective + task.loss(output, y) / len(clients)
    found = torch.autograd.grad(objective, list(named.values()))
    for value in common:
        value.requires_grad_(False)
    pulled = {name: 0.1 * by for name, by in zip(named, found, strict=True)}
    squares = [float((by**2).sum()) for name, by in pulled.items() if rate(name) != 0.7]
    bound = (server.config.clip or math.inf) / (math.sqrt(sum(squares)) + 1e-6)
    return {
        name: value.detach()
        - rate(name) * pulled[name] * (min(1, bound) if rate(name) != 0.7 else 1)
        for name, value in named.items()
    }


def kept(federation: Federation, client: int) -> dict[str, Tensor]:
    """A client's own last layer, as it has left it or else as all begin."""
    if not federation.config.head_layers:
        return {}
    initial = {n: v for n, v in federation.task.initial("base").items() if n.startswith("head")}
    head: dict[str, Tensor] = federation.engine.memory.get(client, {}).get("head", initial)
    return head


def frequencies(task: Task, client: int, more: float | None) -> Tensor:
    """Of each class among a client's training examples and ``more`` of each; all alike for None."""
    if more is None:
        return torch.ones(task.classes, dtype=torch.float64)
    labels = task.y[task.train[client]].tolist()
    counts = [labels.count(each) + more for each in range(task.classes)]
    return torch.tensor(counts, dtype=torch.float64) / sum(counts)


def rate(name: str) -> float:
    """By how much of its gradient of the mean delta a tensor moves."""
    if name.startswith(("h.heads", "h.outputs")):
        return 0.7 if name.endswith("bias") else 0.3
    return 0.7 if name.startswith("h.common") else 0.5


def parameters(federation: Federation) -> dict[str, Tensor]:
    """All that a round moves."""
    server = federation.server
    hyper = {f"h.{name}": value for name, value in server.hyper_net.named_parameters()}
    common = {f"h.{name}": value for name, value in server.hyper_net.named_buffers()}
    described = {f"v.{name}": value for name, value in server.descriptor_net.named_parameters()}
    return hyper | common | described


@pytest.mark.parametrize(
    ("clients", "own"),
    [
        ([0, 2], {}),
        ([0, 1, 3], {}),
        ([0, 1, 3], {"hyper_net": "single"}),
        ([0, 1, 3], {"label_dropout": 0.5}),
        ([0, 1, 3], {"pseudo_count": 0.1}),
        ([0, 1, 3], {"pseudo_count": None}),
        ([0, 1, 3], {"head_rank": 2}),
        ([0, 1, 3], {"clip": 1e-3}),
        ([0, 1, 3], {"hyper_net": "chunks", "chunk": 5}),
        ([0, 1, 3], {"head_layers": 1}),
        ([0, 1, 3], {"head_layers": 1, "hyper_net": "chunks", "chunk": 5}),
    ],
)
def test_the_update_is_that_of_the_one_piece_objective_and_the_mean_delta(
    clients: list[int], own: dict[str, Any]
) -> None:
    federation = Federation("headstart", make_task(), **SETTINGS | own)
    standard: list[Tensor] = []
    for number in range(3):  # in the first only the output learns
        expected = expected_after(federation, clients, number, standard)
        federation.round(clients, number)
        ours = {name: value.detach() for name, value in parameters(federation).items()}
        close(ours, expected)
    who = {client for client, memory in federation.engine.memory.items() if memory}
    assert who == (set(clients) if "head_layers" in own else set())


@pytest.mark.parametrize("clip", [None, 1e-9])
def test_layers_of_its_own_begin_as_the_targets_and_are_kept_as_the_client_trains_them(
    clip: float | None,
) -> None:
    """Nothing that others do, no frequency and no clip touches them; who never trained has none."""
    settings = SETTINGS | {"head_layers": 1, "lr": 0.0, "local_clip": clip}
    federation = Federation("headstart", make_task(novel=1), **settings)
    task = federation.task
    for number in range(2):
        x, y = drawn(task, 1, number, "train_model")
        body = {name: value.clone() for name, value in federation.server.hyper_net.common().items()}
        assert set(body) == {"body.weight", "body.bias"}
        head = {n: v.clone().requires_grad_() for n, v in kept(federation, 1).items()}
        assert set(head) == {"head.weight", "head.bias"}
        task.loss(logits(task.models["base"], body | head, x), y).backward()
        federation.round([0, 1], number)
        for name, value in head.items():
            assert value.grad is not None
            ours = federation.engine.memory[1]["head"][name]
            close(ours, value.detach() - 0.1 * value.grad)
    served = federation.personal(1)
    close({n: served[n] for n in head}, kept(federation, 1))
    for client in (2, 3):
        served = federation.personal(client)
        close({n: served[n] for n in head}, kept(federation, 2))


def test_several_layers_may_be_its_own_and_keep_their_momentum() -> None:
    settings = SETTINGS | {"head_layers": 2, "keep_momentum": True, "local_momentum": 0.9}
    federation = Federation("headstart", make_task(Normed), **settings)
    federation.round([0, 1])
    made, memory = federation.server.hyper_net.common(), federation.engine.memory[0]
    assert set(made) == {"body.weight", "body.bias"}
    own = Normed().state_dict().keys() - set(made)
    assert set(memory["head"]) == own
    assert set(memory["momentum"]) == own - dict(Normed().named_buffers()).keys()


def test_a_newcomer_trains_its_own_layers_while_it_is_fitted_and_needs_labels_for_them() -> None:
    settings = SETTINGS | {"head_layers": 1, "novel_rounds": 2}
    federation = Federation("headstart", make_task(novel=1), **settings)
    federation.round([0, 1])
    served = federation.personal(3)
    assert not torch.allclose(served["head.weight"], federation.task.initial("base")["head.weight"])
    assert 3 not in federation.engine.memory
    settings |= {"label_dropout": 0.5}
    federation = Federation("headstart", make_task(novel=1, unlabelled=True), **settings)
    with pytest.raises(UnlabelledError):
        federation.personal(3)


@pytest.mark.parametrize("hyper_net", ["heads", "single"])
def test_without_what_tells_clients_apart_it_begins_as_the_target(hyper_net: str) -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    task = make_task(models=models, sizes=("S", "L", "S", "L"))
    federation = Federation("headstart", task, **SETTINGS, hyper_net=hyper_net)
    net = federation.server.hyper_net
    outputs = net.heads if hyper_net == "heads" else net.outputs
    with torch.no_grad():
        for layer in outputs.values():
            layer.weight.zero_()
    for size, target in federation.task.models.items():
        made = net(torch.randn(2, 3, dtype=torch.float64), size)
        for row in range(2):
            own = {name: value[row] for name, value in made.items()}
            torch.testing.assert_close(own, trees.detach(dict(target.named_parameters())))


def test_where_descriptors_say_nothing_it_is_fedavg_of_equal_clients() -> None:
    """No step of the output, which begins at zero: what is left is averaging."""
    task = make_task()
    federation = Federation(
        "headstart", task, **SETTINGS | {"lr": 1e-300, "common_lr": 1.0, "local_steps": 3}
    )
    for number in range(2):
        start = {
            name: value.clone() for name, value in federation.server.hyper_net.common().items()
        }
        sent = federation.personal(0)
        cohort = federation.engine.cohort([0, 1, 3], number, training=True)
        model = {name: value.expand(3, *value.shape) for name, value in start.items()}
        delta = cohort.ask(
            headstart.Client.train_model,
            headstart.pefll.Each(model),
            batches=federation.config.batches,
        )
        federation.round([0, 1, 3], number)
        for name, value in federation.server.hyper_net.common().items():
            more = frequencies(task, 0, 1.0).log() if name == "head.bias" else 0
            close(sent[name], start[name] + more)
            close(value, start[name] - delta[name].mean(0))


@pytest.mark.parametrize("own", [{}, {"hyper_net": "single"}, {"head_rank": 2}])
def test_the_output_learns_from_features_of_length_one(own: dict[str, Any]) -> None:
    """So that a rate of 1 moves a client's model by its delta, as averaging does."""
    net = Federation("headstart", make_task(), **SETTINGS | own).server.hyper_net
    length = net.trunk(torch.randn(5, 3, dtype=torch.float64)).norm(dim=-1)
    torch.testing.assert_close(length, torch.ones_like(length))


def test_momentum_and_weight_decay_are_not_of_the_matrices_that_make_models() -> None:
    """Those descend plainly; nothing else moves here."""
    others: dict[str, Any] = {"network_lr": 1e-300}
    own = others | {"momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = (Federation("headstart", make_task(), **SETTINGS | s) for s in (own, others))
    for number in range(3):
        ours.round([0, 1, 3], number)
        theirs.round([0, 1, 3], number)
    nets = ours.server.hyper_net, theirs.server.hyper_net
    close(nets[0].state_dict(), nets[1].state_dict())


def test_momentum_and_weight_decay_are_of_what_makes_features_and_descriptors() -> None:
    settings = SETTINGS | {"momentum": 0.9, "weight_decay": 0.1}
    federation = Federation("headstart", make_task(), **settings)
    standard: list[Tensor] = []
    speed: dict[str, Tensor] = {}
    for number in range(3):
        before = trees.detach(parameters(federation))
        expected = expected_after(federation, [0, 1, 3], number, standard)
        for name in (name for name in expected if rate(name) == 0.5):
            by = (before[name] - expected[name]) / 0.5 + 0.1 * before[name]
            speed[name] = 0.9 * speed.get(name, 0) + by
            expected[name] = before[name] - 0.5 * speed[name]
        federation.round([0, 1, 3], number)
        close(trees.detach(parameters(federation)), expected)


def test_descriptors_are_as_they_are_made_where_they_are_not_to_be_standardised() -> None:
    federation = Federation("headstart", make_task(), **SETTINGS, standardize=False)
    federation.round([0, 1, 3])
    rows = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(federation.server.standard.fitted(rows)(rows), rows)


def test_a_newcomer_is_fitted_with_the_statistics_of_batch_norm_that_all_have_learned() -> None:
    settings = SETTINGS | {"novel_rounds": 2, "local_steps": 3}
    federation = Federation("headstart", make_task(Normed, novel=1), **settings)
    initial = federation.task.initial("base")["norm.running_var"]
    federation.round([0, 1])
    learned = federation.server.buffers["base"]
    assert not torch.allclose(learned["norm.running_var"], initial)
    served = federation.personal(3)
    torch.testing.assert_close({name: served[name] for name in learned}, learned, rtol=0, atol=0)


def test_frequencies_are_of_labels_that_count() -> None:
    task = make_task()
    task.y[task.train[1][:3]] = -1  # ignored
    federation = Federation("headstart", task, **SETTINGS)
    made = federation.server.hyper_net.common()["head.bias"]
    expected = made + frequencies(task, 1, 1.0).log()
    close(federation.personal(1)["head.bias"], expected)


@pytest.mark.parametrize("tokens", [False, True])
def test_frequencies_are_of_classes_and_not_of_several_labels_each_of_which_has_an_output(
    tokens: bool,
) -> None:
    """As many labels of two classes as outputs: biases (2,) are of these, or of those."""

    class Tokens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(1 if tokens else FEATURES, 2)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(x[:, :2, None] if tokens else x)
            return made

    y = make_task().y
    task = replace(make_task(Tokens), y=torch.stack([y % 2, (y > 0).long()], 1), classes=2)
    federation = Federation("headstart", task, **SETTINGS)
    made = federation.server.hyper_net.common()["head.bias"]
    own = task.y[task.train[1]].flatten().bincount(minlength=2).double() + 1
    expected = made + (own / own.sum()).log() if tokens else made
    close(federation.personal(1)["head.bias"], expected)


class NoBias(TwoLayers):
    """Ends with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, CLASSES, bias=False)


@pytest.mark.parametrize("without", ["bias", "classes", "count", "labels"])
def test_a_model_stays_as_it_is_made_where_frequencies_have_no_place(without: str) -> None:
    task = make_task(NoBias if without == "bias" else TwoLayers, novel=1)
    if without == "classes":
        task = replace(task, y=task.y.double(), classes=0, loss=mean_squared_error)
    own: dict[str, Any] = {"pseudo_count": None} if without == "count" else {}
    if without == "labels":
        task, own = replace(task, unlabelled=True), {"label_dropout": 0.5}
    federation = Federation("headstart", task, **SETTINGS, **own)
    made = federation.server.hyper_net.common()
    close(federation.personal(3), made)


def test_what_differs_is_learned_at_the_pace_of_averaging_and_no_class_is_impossible() -> None:
    assert headstart.Config().lr == headstart.Config().common_lr == 1
    assert headstart.Config().network_lr == 1e-3  # Adam's own
    assert (headstart.Config().novel_rounds, headstart.Config().novel_lr) == (5, 1)
    assert headstart.Config().head_layers == 0
    assert (headstart.Config().local_lr, headstart.Config().descriptor_size) == (5e-3, 16)
    with pytest.raises(ValueError, match="pseudo_count"):
        headstart.Config(pseudo_count=0)


def test_the_common_model_of_a_size_moves_by_the_mean_of_its_own_clients() -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    task = make_task(models=models, sizes=("S", "L", "L", "L"))
    federation = Federation("headstart", task, **SETTINGS | {"common_lr": 1.0})
    common = federation.server.hyper_net.common("S")
    start = {name: value.clone() for name, value in common.items()}
    x, y = drawn(task, 0, 0, "train_model")
    model = {name: value.clone().requires_grad_() for name, value in start.items()}
    output = logits(models["S"], model, x) + frequencies(task, 0, 1.0).log()
    task.loss(output, y).backward()
    federation.round([0, 1, 2, 3])
    for name, value in model.items():
        assert value.grad is not None
        close(common[name], start[name] - 0.1 * value.grad)


def test_a_size_all_of_whose_clients_are_lost_in_the_last_message_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": TwoLayers().double()}
    federation = Federation(
        "headstart", make_task(models=models, sizes=("S", "L", "L", "L")), **SETTINGS
    )
    common = [federation.server.hyper_net.common(size) for size in ("S", "L")]
    before = trees.clone(common[0]), trees.clone(common[1])

    def drops(faults: Faults, seed: int, call: Call) -> bool:
        return call.client == 0 and call.step == "descriptor_net_gradient"

    monkeypatch.setattr(Faults, "drops", drops)
    assert list(federation.round([0, 1, 2]).state.lost) == [0]
    torch.testing.assert_close(common[0], before[0], rtol=0, atol=0)
    assert not torch.equal(common[1]["body.weight"], before[1]["body.weight"])


def test_a_newcomer_is_fitted_also_where_nothing_was_ever_centred() -> None:
    federation = Federation("headstart", make_task(novel=1), **SETTINGS | {"novel_rounds": 2})
    with torch.no_grad():  # or the start would be all that is made
        for layer in federation.server.hyper_net.last_layers():
            layer.weight.fill_(0.1)
    assert all(trees.finite([federation.personal(3)]))


@pytest.mark.parametrize("step", ["describe_half", "train_model"])
def test_a_lost_client_moves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, lossy = (Federation("headstart", make_task(), **SETTINGS) for _ in range(2))
    if step == "train_model":  # by then the first cohort has been centred
        whole.round([0, 1, 3])
        lossy.round([0, 1, 3])
    whole.round([0, 3], 1)

    def spoilt(faults: Faults, seed: int, call: Call) -> bool:
        return call.client == 1 and call.step == step

    monkeypatch.setattr(Faults, "spoils", spoilt)
    assert list(lossy.round([0, 1, 3], 1).state.lost) == [1]
    close(lossy.server.state(), whole.server.state())


def test_half_of_a_batch_describes_in_training_and_everything_when_served() -> None:
    federation = Federation("headstart", make_task(novel=1), **SETTINGS)
    federation.round([0, 1, 3])
    server, task = federation.server, federation.task
    for client in (0, task.novel_ids[0]):
        rows = task.train[client]
        with torch.no_grad():
            look = server.descriptor_net(task.x[rows], task.y[rows]).mean(0)
            centred = (look - server.standard.mean) / server.standard.deviation
            made = server.hyper_net(centred[None])
        made["head.bias"] = made["head.bias"] + frequencies(task, client, 1.0).log()
        ours = federation.personal(client)
        close(ours, {name: value[0] for name, value in made.items()})


def test_one_batch_that_describes_who_is_served_is_whole_and_its_labels_are_told() -> None:
    """Half of it, and some labels kept back, are for training."""
    own = {"prediction": "batch", "label_dropout": 0.5}
    federation = Federation("headstart", make_task(novel=1), **SETTINGS | own)
    federation.round([0, 1, 2])
    server, task = federation.server, federation.task
    for client in range(4):
        x, y = drawn(task, client, 99, "describe")
        with torch.no_grad():
            look = server.descriptor_net(x, y).mean(0, keepdim=True)
            made = server.hyper_net(server.standard(look))
        made["head.bias"] = made["head.bias"] + frequencies(task, client, 1.0).log()
        ours = federation.personal(client)
        close(ours, {name: value[0] for name, value in made.items()})
    hidden = headstart.Config(label_dropout=0.5)
    y = torch.arange(3)
    assert any((told(hidden, client, 99, y) < 0).all() for client in range(4))  # were it training


def check_the_fit_of_newcomers(novel_lr: float, clip: float | None, **settings: Any) -> None:
    """Gradient descent on a newcomer's loss by its descriptor; the networks and others stay."""
    task = make_task(novel=2)
    own = {"novel_rounds": 3, "novel_lr": novel_lr, "batch_size": 99, "lr": 30.0}
    federation = Federation("headstart", task, **SETTINGS | own | settings)
    server = federation.server
    for number in range(3):
        federation.round([0, 1], number)
    server.config = replace(server.config, clip=clip)
    before = trees.clone(federation.server.state())
    cohort = federation.engine.cohort([2, 3], 9, training=False)
    ours = server.descriptors_of(cohort)
    assert len(task.train[2]) != len(task.train[3])
    for place, client in enumerate((2, 3)):
        x, y = task.x[task.train[client]], task.y[task.train[client]]
        added = frequencies(task, client, 1.0).log()
        seen = server.descriptor_net(x, y).mean(0).detach()
        descriptor = seen.clone()
        for _ in range(3):
            descriptor.requires_grad_()
            made = server.hyper_net(server.standard(descriptor[None]))
            model = {name: value[0] for name, value in made.items()}
            loss = task.loss(logits(task.models["base"], model, x) + added, y)
            (by,) = torch.autograd.grad(loss, descriptor)
            pulled = 0.1 * by  # one local step of that rate
            pulled = pulled * min(1, (clip or math.inf) / (float(pulled.norm()) + 1e-6))
            descriptor = (descriptor - novel_lr * pulled).detach()
        close(ours[place], descriptor)
        assert not torch.allclose(descriptor, seen)
    torch.testing.assert_close(server.state(), before, rtol=0, atol=0)
    known = federation.engine.cohort([1], 9, training=False)
    x, y = task.x[task.train[1]], task.y[task.train[1]]
    look = server.descriptor_net(x, y).mean(0, keepdim=True).detach()
    close(server.descriptors_of(known), look)


@pytest.mark.parametrize(("novel_lr", "clip"), [(0.6, None), (1.0, 1e-3)])
def test_newcomers_are_fitted_from_where_they_were_seen_each_as_if_alone(
    novel_lr: float, clip: float | None
) -> None:
    check_the_fit_of_newcomers(novel_lr, clip)


def test_newcomers_are_fitted_by_plain_steps() -> None:
    """Momentum and weight decay are of the networks alone."""
    check_the_fit_of_newcomers(0.6, None, momentum=0.9, weight_decay=0.1)


def test_few_exchanges_find_what_the_look_at_a_newcomer_missed() -> None:
    """Of digits, whose labels each client codes in one of three ways, twelve examples each."""
    task = {"clients": 60, "novel": 1 / 6, "examples_per_client": 12, "label_codes": 3}
    task |= {"partition": "shuffled", "test": 0.39, "hidden": 50}
    run = hyperfed.train(
        "headstart",
        seed=3,
        task=task,
        rounds=100,
        cohort=20,
        evaluate_every=100,
        engine={"name": "vmap", "cores": 1},
        method={"local_steps": 10, "batch_size": 20, "local_lr": 0.03, "lr": 3.0},
    )
    first_look = run.served_otherwise(["method.novel_rounds=0"]).evaluate_novel().accuracy
    assert run.summary["novel_accuracy"] > first_look + 0.1


def test_centring_is_fitted_once_and_a_client_alone_differs_from_nobody() -> None:
    rows = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    standard = Centred(2).fitted(rows)
    torch.testing.assert_close(standard(rows), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]) * 2**0.5)
    assert standard.fitted(rows * 7) is standard
    alone = Centred(2).fitted(rows[:1])
    torch.testing.assert_close(alone(rows[:1]), torch.zeros(1, 2))
    torch.testing.assert_close(alone(rows[1:]), torch.tensor([[2.0, 0.0]]))
    again = Centred(2)
    again.load_state_dict(standard.state_dict())
    assert again.fitted(rows * 7) is again


def test_labels_are_hidden_of_a_part_of_the_visits() -> None:
    config = headstart.Config(label_dropout=0.5)
    y = torch.arange(3)
    visits = [told(config, client, number, y) for client in range(4) for number in range(2)]
    assert {tuple(seen.tolist()) for seen in visits} == {(0, 1, 2), (-1, -1, -1)}


def test_who_has_no_labels_is_described_by_inputs_alone() -> None:
    task = make_task(novel=1, unlabelled=True)
    settings = SETTINGS | {"label_dropout": 0.5, "novel_rounds": 2}
    federation = Federation("headstart", task, **settings)
    federation.round([0, 1, 2])
    server, x = federation.server, task.x[task.train[3]]
    cohort = federation.engine.cohort([3], 9, training=False)
    found = server.personalize(cohort)
    with torch.no_grad():
        net = server.descriptor_net.net
        first = next(part for part in net.modules() if isinstance(part, torch.nn.Linear))
        first.label = torch.zeros(len(x), task.classes, dtype=x.dtype)
        descriptor = net(x).mean(dim=0, keepdim=True)
        expected = server.hyper_net((descriptor - server.standard.mean) / server.standard.deviation)
    close({name: found.slice(0)[name] for name in expected}, {
        name: value[0] for name, value in expected.items()
    })  # fmt: skip


def test_who_has_no_labels_needs_a_network_that_learned_without() -> None:
    task, settings = make_task(novel=1, unlabelled=True), SETTINGS | {"novel_rounds": 2}
    federation = Federation("headstart", task, **settings)
    cohort = federation.engine.cohort([3], 9, training=False)
    with pytest.raises(UnlabelledError):
        federation.server.personalize(cohort)


def test_labels_cannot_be_hidden_where_nothing_else_describes_or_none_means_untold() -> None:
    with pytest.raises(ValueError, match="label_dropout must be 0 where labels alone describe"):
        headstart.Config(label_dropout=0.1, descriptor_net="linear")
    task = make_task()
    numbers = replace(task, y=task.y.double(), classes=0, loss=mean_squared_error)
    with pytest.raises(UserError, match="label_dropout must be 0 where targets are numbers"):
        Federation("headstart", numbers, **SETTINGS, label_dropout=0.1)

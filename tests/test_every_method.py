"""Every method keeps the contract: one table of methods x shared tests."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

import hyperfed
from hyperfed import trees
from hyperfed.engines import Faults
from hyperfed.engines.calls import Call, find_step
from hyperfed.engines.cohort import EngineCohort
from hyperfed.engines.local.loop import LoopEngine
from hyperfed.engines.local.vmap import VmappedEngine
from hyperfed.errors import UserError
from hyperfed.federation import EVALUATION_BATCH, AllLostError
from hyperfed.methods import METHODS
from hyperfed.runs.evaluation import evaluate, finetuned
from hyperfed.system.randomness import seeded
from hyperfed.task import Task
from hyperfed.training import AdamW, LocalConfig, Sgd, Steps
from toys import (
    CLASSES,
    Federation,
    Normed,
    Saying,
    Stemmed,
    TwoLayers,
    close,
    lengths,
    make_task,
    make_task_of_two_labels,
    make_token_task,
    snapshot,
)

ALL = sorted(METHODS)
SETTINGS = {"local_steps": 3, "batch_size": 4, "local_lr": 0.1}
COUNTS = {"val", "test"}
"""What is in an evaluation, and in no model."""


def federation(
    method: str, engine: Any = None, settings: dict[str, Any] | None = None, **task: Any
) -> Federation:
    own = SETTINGS | lengths(method) | (settings or {})
    return Federation(method, make_task(**task), engine, **own)


def used(ours: Federation, client: int) -> trees.Tree:
    """The model that a client uses; where a method says that it is not one, what it counts."""
    try:
        return ours.personal(client)
    except UserError as error:
        refused = str(error)
    assert "a model to hand over must be one" in refused
    cohort = ours.engine.cohort([client], 99, training=False)
    return cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort))


def same(first: trees.Tree, second: trees.Tree) -> bool:
    pairs = zip(trees.leaves(first), trees.leaves(second), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("method", ALL)
def test_how_long_a_method_takes_is_shortened_by_the_name_of_its_setting(method: str) -> None:
    settings = vars(METHODS[method].Config(**SETTINGS | lengths(method, 1)))
    long = {
        name: of
        for name, of in settings.items()
        if name.endswith(("_steps", "_rounds", "_epochs"))
        and name not in SETTINGS
        and (of or 0) > 1
    }
    assert long == {}


@pytest.mark.parametrize("method", ALL)
def test_training_changes_something_and_twice_is_the_same(method: str) -> None:
    first, second = federation(method), federation(method)
    before = trees.clone(first.server.state(optimizers=False))
    for ours in (first, second):
        for number in range(3):
            ours.round([0, 1, 3], number)
    assert same(snapshot(first), snapshot(second))
    if before:
        assert not same(before, first.server.state(optimizers=False))
    else:  # a server without state, as Local's: what has trained is with the clients
        assert set(first.engine.memory) == {0, 1, 3}


@pytest.mark.parametrize("method", ALL)
def test_batches_have_the_length_that_is_set(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's too; where nothing is trained they may be as long as in an evaluation."""
    lengths_asked = set()

    def gather(self: EngineCohort, step: Any, payload: Any, batches: Any = None) -> trees.Tree:
        if batches is not None:
            lengths_asked.add(batches.size)
        return right(self, step, payload, batches)

    right = EngineCohort.gather
    monkeypatch.setattr(EngineCohort, "gather", gather)
    ours = federation(method, novel=1)
    ours.round([0, 1, 2], 0)
    used(ours, 1)
    used(ours, 3)
    assert lengths_asked.difference({EVALUATION_BATCH}) == {SETTINGS["batch_size"]}


WAYS = [
    *((method, {}) for method in ALL),
    ("lg_fedavg", {"pretrain_rounds": 1}),
    ("mh_pfedhn", {"global_model": True}),
]
"""Methods, and settings by which their clients train something else first."""


@pytest.mark.parametrize("setting", ["local_momentum", "local_weight_decay"])
@pytest.mark.parametrize(("method", "own"), WAYS)
def test_where_the_rate_counts_so_do_momentum_and_weight_decay(
    method: str, own: dict[str, Any], setting: str
) -> None:
    """For what a newcomer makes of a model, what clients train in rounds, and on when served."""
    usual, faster, other = (
        federation(method, settings=own | changed, net=Stemmed, novel=1)
        for changed in ({}, {"local_lr": 0.2}, {setting: 0.5})
    )

    def served(ours: Federation) -> trees.Tree:
        serve = finetuned(ours.server.personalize, ours.method.Client, Steps(3, 4))
        return evaluate(ours.server, ours.engine, [0, 1], 9, serve=serve)["test"].loss

    model, by_rate, by_setting = (used(ours, 3) for ours in (usual, faster, other))
    assert same(model, by_rate) or not same(model, by_setting)
    for ours in (usual, faster, other):
        ours.round([0, 1, 2], 0)
    state, by_rate, by_setting = (snapshot(ours) for ours in (usual, faster, other))
    assert not same(state, by_rate)
    assert not same(state, by_setting)
    other.server.load(trees.clone(usual.server.state()))
    other.engine.memory = dict(usual.engine.memory)
    assert not torch.equal(served(usual), served(other))


def ended(ours: Federation) -> str:
    """A hash of what is there after a second round, and of what who missed it then uses."""
    ours.round([0, 1, 3], 1)
    leaves = trees.leaves({"state": snapshot(ours), "used": used(ours, 2)})
    every = [(repr(name), leaf.numpy().tobytes()) for name, leaf in leaves]
    return hashlib.sha256(repr(every).encode()).hexdigest()


def gone_on(file: str) -> dict[str, str]:
    """How federations end that go on from what is in a file."""
    found = {}
    for method, state in torch.load(file).items():
        ours = federation(method)
        ours.server.load(state["server"])
        ours.engine.memory = {int(client): tree for client, tree in state["memory"].items()}
        found[method] = ended(ours)
    return found


@pytest.mark.slow
def test_another_process_goes_on_to_the_same(tmp_path: Path) -> None:
    """Where sets of names have another order, and nothing is left of what was not handed over."""
    program = "import json, test_every_method as e; print(json.dumps(e.gone_on('begun.pt')))"
    places = (Path(__file__).parent, Path(hyperfed.__file__).parents[1])
    own = {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"}
    begun = {method: federation(method) for method in ALL}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for ours in begun.values():
        ours.round([0, 1, 2], 0)
    torch.save({method: snapshot(ours) for method, ours in begun.items()}, tmp_path / "begun.pt")
    here = {method: ended(ours) for method, ours in begun.items()}
    torch.set_num_threads(threads)
    said = subprocess.check_output(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | own, text=True
    )
    there = json.loads(said.splitlines()[-1])
    assert [method for method in ALL if here[method] != there[method]] == []


@pytest.mark.parametrize("method", ALL)
def test_the_number_of_workers_changes_nothing(method: str) -> None:
    one = federation(method, {"workers": 1, "cores_per_client": 1}, net=Normed)
    two = federation(method, {"workers": 2, "cores_per_client": 1}, net=Normed)
    for ours in (one, two):
        for number in range(2):
            ours.round([0, 1, 2, 3], number)
    assert same(snapshot(one), snapshot(two))


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("method", ALL)
def test_batch_norm_loses_nobody_whose_last_batch_would_have_one_example(
    method: str, kind: type[LoopEngine]
) -> None:
    known = METHODS[method].Config.__dataclass_fields__
    epochs = {key: 1 for key in known if key.endswith("_epochs")}
    own = {"batch_size": 4} | lengths(method) | epochs
    ours = Federation(method, make_task(Normed, examples=(9, 5, 9, 6)), **own)
    ours.engine = kind(ours.task, ours.method.Client, ours.config, seed=0)
    for number in range(2):
        assert ours.round([0, 1, 2, 3], number).state.lost == {}


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("method", ALL)
def test_batch_norm_loses_nobody_who_has_one_example(method: str, kind: type[LoopEngine]) -> None:
    ours = federation(method, net=Normed, examples=(9, 1, 1, 1), novel=1)
    ours.engine = kind(ours.task, ours.method.Client, ours.config, seed=0)
    for number in range(2):
        assert ours.round([0, 1, 2], number).state.lost == {}
    for clients in ([0, 1, 2], [3]):
        found = evaluate(ours.server, ours.engine, clients, 2)
        assert found["test"].missed == {}
    assert trees.finite([snapshot(ours)]) == [True]


OF_SHARES: dict[str, dict[str, Any]] = {
    "gpfl": {"magnitude_weight": 0.0},
    "headstart": {"pseudo_count": None},
    "itpfl": {"phase_one_rounds": 1},  # and one of phase 2
    "partialfed": {"strategy": "fixed"},
}
"""Settings with which shares of examples matter, and neither their number nor what it draws."""


@pytest.mark.parametrize("method", ALL)
def test_who_has_one_example_counts_as_who_has_it_twice(method: str) -> None:
    """Where everybody has twice as much all shares are the same: one example is not none."""
    found = []
    for times in (1, 2):
        ours = federation(method, settings=OF_SHARES.get(method), examples=(1, 1, 1, 1), novel=1)
        for client, rows in enumerate(ours.task.train):
            ours.task.y[rows] = client % CLASSES  # which no other client that trains has
            ours.task.train[client] = rows.repeat(times)
        for number in range(2):
            assert ours.round([0, 1, 2], number).state.lost == {}
        found.append([snapshot(ours), used(ours, 1), used(ours, 3)])
    close(*found)


@pytest.mark.parametrize("method", ALL)
def test_other_cores_per_client_agree_to_1e_6(method: str) -> None:
    one = federation(method, {"workers": 1, "cores_per_client": 1})
    two = federation(method, {"workers": 1, "cores_per_client": 2})
    for ours in (one, two):
        ours.round([0, 1, 2, 3])
    torch.testing.assert_close(snapshot(one), snapshot(two), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_a_lost_client_equals_one_never_sampled(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lossy, smaller = federation(method, net=Normed), federation(method, net=Normed)
    for ours in (lossy, smaller):
        ours.round([0, 1, 2, 3], 0)
    before = trees.clone(lossy.engine.memory.get(1, {}))

    def second_is_lost(faults: Faults, seed: int, call: Call) -> bool:
        return call.client == 1

    monkeypatch.setattr(Faults, "drops", second_is_lost)
    cohort = lossy.round([0, 1, 3], 1)
    assert list(cohort.state.lost) == [1]
    smaller.round([0, 3], 1)
    torch.testing.assert_close(snapshot(lossy), snapshot(smaller), rtol=1e-12, atol=1e-14)
    assert same(lossy.engine.memory.get(1, {}), before)


@pytest.mark.parametrize("kind", [LoopEngine, VmappedEngine])
@pytest.mark.parametrize("method", ALL)
def test_who_diverges_is_lost_and_keeps_what_it_remembered(
    method: str, kind: type[LoopEngine]
) -> None:
    """Also where the model that diverges never leaves its client."""
    ours = federation(method, examples=(8, 8, 8, 8))
    ours.engine = kind(ours.task, ours.method.Client, ours.config, seed=0)
    ours.round([0, 1, 2], 0)
    before = trees.clone(ours.engine.memory.get(1, {}))
    ours.task.x[ours.task.train[1]] = torch.nan
    assert list(ours.round([0, 1, 2], 1).state.lost) == [1]
    assert same(ours.engine.memory.get(1, {}), before)
    assert trees.finite([snapshot(ours)]) == [True]


@pytest.mark.parametrize("method", ALL)
def test_a_round_in_which_all_are_lost_changes_nothing(method: str) -> None:
    ours = federation(method, {"faults": Faults(drop=1.0)})
    before = snapshot(ours)
    with pytest.raises(AllLostError):
        ours.round([0, 1])
    assert same(snapshot(ours), before)


@pytest.mark.parametrize("net", [TwoLayers, Normed])
@pytest.mark.parametrize("method", ALL)
def test_personalize_serves_known_and_novel_clients_and_changes_nothing(
    method: str, net: Any
) -> None:
    ours = federation(method, net=net, novel=1)
    ours.round([0, 1, 2])
    before = snapshot(ours)
    for client in (1, 3):
        model = used(ours, client)
        assert same(snapshot(ours), before)
        if set(model) != COUNTS:
            expected = trees.model_of(ours.task.models["base"])
            assert trees.structure(model) == trees.structure(expected)
        assert trees.finite([model]) == [True]
        assert same(model, used(ours, client))  # and it is a function


def variants(method: str) -> Iterator[dict[str, Any]]:
    """The defaults, and every other choice of each setting that is one of a few."""
    yield {}
    config = METHODS[method].Config
    for key, kind in get_type_hints(config).items():
        choices = (True, False) if kind is bool else get_args(kind)
        if kind is bool or get_origin(kind) is Literal:
            yield from ({key: choice} for choice in choices if choice != getattr(config, key))


@pytest.mark.parametrize("method", ALL)
def test_serving_and_evaluating_leave_the_server_as_it_is(method: str) -> None:
    for settings in variants(method):
        try:
            ours = federation(method, settings=settings, novel=1)
        except ValidationError:  # it does not go with the defaults of the others
            continue
        for number in range(2):
            ours.round([0, 1, 2], number)
        before = snapshot(ours)
        server, engine = ours.server, ours.engine
        for serve in filter(None, (server.personalize, server.rehearse)):
            evaluate(server, engine, [0, 1, 2], 2, serve=serve)
        evaluate(server, engine, [3], 2)
        assert same(snapshot(ours), before), settings


def tried(method: str, task: Task) -> Iterator[Federation | str]:
    """Yields a federation for each of a method's :func:`variants`, or why it is refused."""
    for settings in variants(method):
        try:
            yield Federation(method, task, **SETTINGS | lengths(method) | settings)
        except ValidationError:  # it does not go with the defaults of the others
            continue
        except UserError as error:
            yield str(error)


def check_it_learns(ours: Federation) -> None:
    """Two rounds lose nobody, and a known and a novel client are evaluated."""
    for number in range(2):
        assert ours.round([0, 1, 2], number).state.lost == {}, ours.config
    for client in (0, 3):
        counts = evaluate(ours.server, ours.engine, [client], 2)["test"]
        assert counts.loss.isfinite(), ours.config


@pytest.mark.parametrize("method", ALL)
def test_labels_of_tokens_are_learned_or_refused_before_training(method: str) -> None:
    for ours in tried(method, make_token_task(novel=1)):
        if isinstance(ours, str):
            assert "this one has a label for every token; choose another method" in ours
        else:
            check_it_learns(ours)


@pytest.mark.parametrize("method", ALL)
def test_labels_side_by_side_are_learned_or_refused_before_training(method: str) -> None:
    told = "2 side by side", "examples have 2 labels each", "an output for each of 2 classes"
    for ours in tried(method, make_task_of_two_labels(novel=1)):
        if isinstance(ours, str):
            assert any(reason in ours for reason in told)
        else:
            check_it_learns(ours)


@pytest.mark.parametrize("unlabelled", [True, False])
def test_of_labels_side_by_side_none_is_told_of_who_has_none(unlabelled: bool) -> None:
    """A client described by its inputs alone gets the same model whatever its labels are."""
    task = make_task_of_two_labels(novel=1, unlabelled=unlabelled)
    found = []
    for flip in (0, 1):
        own = replace(task, y=task.y.clone())
        own.y[task.train[3]] ^= flip
        settings = SETTINGS | {"label_dropout": 0.5, "novel_rounds": 0, "lr": 1.0}
        ours = Federation("headstart", own, **settings)
        ours.round([0, 1, 2])
        found.append(ours.personal(3))
    assert same(*found) == unlabelled


class OneLogit(TwoLayers):
    """Says by a sign which of two classes an example has."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)


def sign_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output[:, 0], y.to(output))


def sign_is_right(output: Tensor, y: Tensor) -> Tensor:
    return ((output[:, 0] > 0) == y).double()


OF_EACH_CLASS: dict[str, dict[str, Any]] = {
    "fed_rod": {},
    "fedphp": {"transfer": "kd"},
    "fedproto": {"evaluated": "prototypes"},
    "fml": {},
    "knn_per": {},
    "mh_pfedhn": {"global_model": True},
    "pfedkt": {"distance": "kl", "contrast": "triplet"},
}
"""Methods that would learn nothing, or nonsense, of other outputs, and with which settings."""


@pytest.mark.parametrize("method", ALL)
def test_outputs_that_are_no_logits_are_learned_or_refused_before_training(method: str) -> None:
    task = make_task(OneLogit, classes=2, loss=sign_loss, score=sign_is_right, novel=1)
    task.y.clamp_(max=1)
    for ours in tried(method, task):
        if isinstance(ours, str):
            assert "must have an output for each of 2 classes" in ours
        else:
            would = OF_EACH_CLASS.get(method)
            assert would is None or not would.items() <= vars(ours.config).items()
            check_it_learns(ours)


BY_ALL_TOKENS = ("headstart", "pefll")
"""Methods that describe a client by all of its tokens, whether or not their labels count."""


@pytest.mark.parametrize("method", sorted({*ALL}.difference(BY_ALL_TOKENS)))
def test_tokens_that_count_nothing_change_nothing(method: str) -> None:
    """Their network computes each token by itself, so the loss does not see them."""
    for settings in variants(method):
        own, found = SETTINGS | lengths(method) | settings, []
        for more in (0, 3):
            try:
                ours = Federation(method, make_token_task(more), **own)
            except (UserError, ValidationError):
                continue
            for number in range(2):
                ours.round([0, 1, 3], number)
            found.append(snapshot(ours))
        if found:
            close(*found)


@pytest.mark.parametrize("method", ALL)
def test_a_server_steps_by_an_optimiser_that_is_fused(method: str) -> None:
    """It takes less than a tenth of the time of PyTorch's default on a CPU."""
    for settings in variants(method):
        try:
            server = federation(method, settings=settings, novel=1).server
        except ValidationError:  # it does not go with the defaults of the others
            continue
        for optimizer in vars(server).values():
            if isinstance(optimizer, torch.optim.Optimizer):
                assert all(group["fused"] for group in optimizer.param_groups), settings


OF_THE_CHOSEN, OF_SGD = {"fedbabu", "fedpac", "itpfl"}, {"fedas", "partialfed", "per_fedavg"}
"""Methods that train something at a rate of its own: by the optimiser that is chosen, or by SGD."""


@pytest.mark.parametrize("method", sorted({*ALL} - {"pfedkt"}))  # which has an optimiser of its own
def test_what_has_a_rate_of_its_own_is_trained_by_what_the_settings_say(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[tuple[type, float]] = set()
    for kind in (Sgd, AdamW):

        def start(self: Any, weight: Any, start: Any = kind.start) -> Any:
            found.add((type(self), self.lr))
            return start(self, weight)

        monkeypatch.setattr(kind, "start", start)
    settings = {"local_optimizer": "adamw", "local_lr": 0.07}
    ours = federation(method, settings=settings, novel=1)
    for number in range(4):
        ours.round([0, 1, 2], number)
    for client in (0, 3):
        used(ours, client)
    others = found - {(AdamW, 0.07)}
    kinds = {AdamW: method in OF_THE_CHOSEN, Sgd: method in OF_SGD}
    assert {kind for kind, _ in others} == {kind for kind, is_of in kinds.items() if is_of}
    name, said = str(ours.method.__doc__).partition(" (")[0], str(LocalConfig.__doc__).split()
    assert not others or f"{name}'s" in said


@pytest.mark.parametrize("method", ALL)
def test_on_a_frozen_part_equals_the_rest_on_what_it_makes_of_the_data(method: str) -> None:
    """So it is neither generated, trained, sent, averaged nor remembered, nor counted in bytes."""
    whole = federation(method, net=Stemmed, novel=1)
    net = whole.task.models["base"]
    before = trees.clone(trees.frozen_of(net))
    assert len(before) == 7  # two parameters of each layer, three buffers of batch-norm
    rest = federation(method, net=Normed, novel=1)
    with torch.no_grad():
        features = net.get_submodule("stem").eval()(rest.task.x)
    rest = federation(method, net=Normed, novel=1, x=features)
    counts, exchanges = [], []
    for ours in (whole, rest):
        met = [ours.round([0, 1, 2], number) for number in range(2)]
        for clients in ([0, 1, 2], [3]):
            cohort = ours.engine.cohort(clients, 9, training=False)
            served = ours.server.personalize(cohort)
            counts.append(cohort.ask(ours.method.Client.evaluate, served))
            met.append(cohort)
        exchanges.append([cohort.state.exchanges for cohort in met])
    close(snapshot(whole), snapshot(rest))
    close(counts[:2], counts[2:])
    assert exchanges[0] == exchanges[1]  # bytes too
    assert same(before, trees.frozen_of(net))


class Masked(TwoLayers):
    """With a buffer of booleans, which changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask)


@pytest.mark.parametrize("method", ALL)
def test_a_buffer_of_booleans_stays_as_it_is(method: str) -> None:
    masked, plain = (federation(method, net=net, novel=1) for net in (Masked, TwoLayers))
    counts = []
    for ours in (masked, plain):
        for number in range(2):
            assert not ours.round([0, 1, 2], number).state.lost
        for clients in ([0, 1, 2], [3]):
            cohort = ours.engine.cohort(clients, 9, training=False)
            counts.append(cohort.ask(ours.method.Client.evaluate, ours.server.personalize(cohort)))
    close(counts[:2], counts[2:])


class MoreOutputs(TwoLayers):
    """With two that are no class."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES + 2)


@pytest.mark.parametrize("method", ALL)
def test_a_target_may_have_more_outputs_than_there_are_classes(method: str) -> None:
    ours = federation(method, net=MoreOutputs, novel=1)
    for number in range(2):
        assert ours.round([0, 1, 2], number).state.lost == {}
    for ids in ([0, 1, 2], [3]):
        counts = evaluate(ours.server, ours.engine, ids, 2)["test"]
        assert counts.missed == {}
        assert counts.loss.isfinite().all()


SAYING = [(method, {}) for method in ALL if method != "itpfl"]
"""All but the one whose encoder has what a target's ``forward`` does beside its layers."""
SAYING += [("pfedhn", {"novel_models": "ensemble"})]


@pytest.mark.parametrize(("method", "settings"), SAYING)
def test_log_probabilities_are_learned_as_logits_are(method: str, settings: dict[str, Any]) -> None:
    found = []
    for net, loss in ((TwoLayers, F.cross_entropy), (Saying, F.nll_loss)):
        ours = federation(method, settings=settings, net=net, loss=loss, novel=1)
        for number, clients in enumerate(([0, 1, 2], [0, 2])):
            ours.round(clients, number)
        losses = [evaluate(ours.server, ours.engine, c, 2)["test"].loss for c in ([0, 1, 2], [3])]
        found.append((snapshot(ours), losses))
    close(*found)


@pytest.mark.parametrize("method", ALL)
def test_a_server_loads_what_it_said_its_state_was(method: str) -> None:
    ours, other = federation(method), federation(method)
    ours.round([0, 1])
    other.server.load(trees.clone(ours.server.state()))
    other.engine.memory = dict(ours.engine.memory)
    for each in (ours, other):
        for number, clients in enumerate(([2, 3], [0, 2]), 1):
            each.round(clients, number)
    assert same(snapshot(ours), snapshot(other))


@pytest.mark.parametrize("method", ALL)
def test_several_target_sizes(method: str) -> None:
    with seeded(0, "sizes"):
        models = {"S": TwoLayers().double(), "L": Normed().double()}
    ours = federation(method, models=models, sizes=("S", "L", "S", "L"))
    ours.round([0, 1, 2, 3])
    for client, size in ((0, "S"), (1, "L")):
        model = used(ours, client)
        if set(model) != COUNTS:
            assert set(model) == set(trees.model_of(models[size]))


@pytest.mark.parametrize("method", ALL)
def test_no_reply_has_a_row_of_data_in_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[trees.Tree] = []

    def gather(self: EngineCohort, *asked: Any, **options: Any) -> trees.Tree:
        replies.append(right(self, *asked, **options))
        return replies[-1]

    right = EngineCohort.gather
    monkeypatch.setattr(EngineCohort, "gather", gather)
    ours = federation(method, novel=1)
    ours.round([0, 1, 2])
    used(ours, 0)
    used(ours, 3)
    rows = ours.task.x.flatten(1)
    told = [leaf.double().flatten() for reply in replies for _, leaf in trees.leaves(reply)]
    assert told
    for numbers in told:
        if len(numbers) >= rows.shape[1]:
            there = numbers.unfold(0, rows.shape[1], 1)
            assert not (there[:, None] == rows).all(dim=2).any()


@pytest.mark.parametrize("method", ALL)
def test_no_reply_is_larger_than_a_model(method: str) -> None:
    """What clients reply with is no larger than a model.

    Or it is like what the server sent, name by name and shape by shape, as the step promises.
    """
    ours = federation(method)
    cohort = ours.round([0, 1])
    others = METHODS[method].Client.networks(ours.task.outline(), ours.config)
    networks = [ours.task.models["base"], *others.values()]
    largest = max(trees.count_bytes(trees.model_of(network)) for network in networks)
    for exchange in cohort.state.exchanges:
        _, info = find_step(ours.method.Client, exchange.step)
        most = largest if info.like is None else exchange.down
        assert exchange.up <= most, (
            f"step {info.name} must reply with at most {most} bytes, those of the largest network "
            f"or of what it was sent and says it is like, but replied with {exchange.up}: reply "
            "with less, or have it sent a tree of that shape and mark it @step(like=...)"
        )
    assert {exchange.client for exchange in cohort.state.exchanges} == {0, 1}


@pytest.mark.parametrize("method", ALL)
def test_the_docstring_says_what_travels_stays_is_evaluated_and_a_novel_client_does(
    method: str,
) -> None:
    text = " ".join((METHODS[method].__doc__ or "").split())
    words = ("Sent:", "Kept", "Evaluated:", "novel client")
    assert [word for word in words if word not in text] == []
